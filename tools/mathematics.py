"""Formulas for the site: LaTeX becomes MathML when the site is built, so that readers fetch nothing."""

import re

from latex2mathml.converter import convert


def mathml(latex: str, *, block: bool = False) -> str:
    r"""Return a formula as MathML.

    Args:
        latex: The formula, without dollars.
        block: Whether it stands in lines of its own; several lines (``\\``) and columns (``&``) are aligned.

    Raises:
        ValueError: If a command is not known: MathML would show its name.
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


# latex2mathml knows the environment by the second name, and takes a bracket behind \begin{cases} for an option.
_REPLACED = {"{aligned}": "{align*}", "\\begin{cases}": "\\begin{cases}{}", r"\big\|": r"\|", r"\Big\|": r"\|"}


def blocks_to_mathml(markdown: str) -> str:
    """Return a page in which each block of code in the language ``math`` is a formula."""
    return re.sub(
        r"^```math\n(.*?)^```$",
        lambda match: mathml(match[1], block=True),
        markdown,
        flags=re.MULTILINE | re.DOTALL,
    )
