"""Convert formulas from LaTeX to MathML when the site is built, so that readers download no scripts."""

import re

from latex2mathml.converter import convert


def mathml(latex: str, *, block: bool = False) -> str:
    r"""Convert a formula to MathML.

    Args:
        latex: The formula, without dollars.
        block: Whether it is a displayed formula; several lines (``\\``) and columns (``&``) are aligned.

    Raises:
        ValueError: If a command is unknown: MathML would show its name.
    """
    latex = latex.strip()
    if block and "\\\\" in latex and r"\begin{" not in latex:
        latex = rf"\begin{{aligned}} {latex} \end{{aligned}}"
    for here, there in _REPLACED.items():
        latex = latex.replace(here, there)
    made = convert(latex, display="block" if block else "inline")
    if unknown := re.search(r"<m[io][^>]*>(\\[^<]+|&)</m[io]>", made):
        raise ValueError(f"{unknown[1]} in {latex!r} is not known to latex2mathml; write the formula without it.")
    return f'<div class="formula">{made}</div>' if block else made


# latex2mathml has another name for the environment, and reads a bracket after \begin{cases} as an option.
_REPLACED = {"{aligned}": "{align*}", "\\begin{cases}": "\\begin{cases}{}", r"\big\|": r"\|", r"\Big\|": r"\|"}


def blocks_to_mathml(markdown: str) -> str:
    """Convert the blocks of code in the language ``math`` on a page to formulas."""
    return re.sub(
        r"^```math\n(.*?)^```$",
        lambda match: mathml(match[1], block=True),
        markdown,
        flags=re.MULTILINE | re.DOTALL,
    )
