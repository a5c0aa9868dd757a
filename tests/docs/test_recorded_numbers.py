"""Numbers of a guide that come from a run occur in the record of the run, to the guide's digits.

Checked are numbers with a decimal point, in blocks of text that link to ``benchmarks/results``, and in those before
and after a picture in its section. Integers occur anywhere by chance, so they are not.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from guides import PAGES, ROOT

from lightning_sym.recipes import recipe_header, recipe_names

RESULTS = ROOT / "benchmarks" / "results"
_LINK = re.compile(r"\]\(([^)#\s]*benchmarks/results/[\w-]+\.md)(?:#([\w-]+))?\)")
_NUMBER = re.compile(r"(?<![\w.,\[])\d+\.\d+(?!\.?\w)")
GUIDES = [page for page in PAGES if page.parent == ROOT / "docs" and page.name not in ("papers.md", "results.md")]
# Numbers of a run that nothing records yet: record them in guides.md when it is made again.
UNRECORDED = {
    "curves": {"1.855", "0.044", "0.023", "0.063"},
    "learning-on-weights": {"0.08", "0.02", "0.15"},
    "matching": {"94.1", "96.8", "96.0"},
    "stitching": {"1.4", "1.7", "2.3", "4.5", "7.8"},
}


def sections(text: str) -> dict[str, str]:
    """Return the sections of a file of results by the anchors of their titles; "" is the whole file."""
    found = {"": text}
    for section in re.split(r"^#{2,3} ", text, flags=re.MULTILINE)[1:]:
        found[re.sub(r"[^\w -]", "", section.split("\n", 1)[0].lower()).replace(" ", "-")] = section
    return found


def parts_of(text: str) -> list[list[str]]:
    """Return the blocks of each section of a page, without code, formulas and inline code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    return [re.split(r"\n\s*\n", part) for part in re.split(r"^#+ ", text, flags=re.MULTILINE)]


def records(page: Path, text: str) -> str:
    """Return what a text links to in ``benchmarks/results``: sections if it names them, otherwise files."""
    links = [(sections((page.parent / file).resolve().read_text()), anchor) for file, anchor in _LINK.findall(text)]
    return "\n".join(found[anchor] for found, anchor in links)


def claims(page: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yield blocks with numbers to check and the record of each."""
    recipes = set(re.findall(r"[a-z_]+/\w+", text)).intersection(recipe_names())
    of_page = records(page, text) + "\n".join(str(recipe_header(name)) for name in recipes)
    for blocks in parts_of(text):
        first = next((place for place, block in enumerate(blocks) if "![" in block), len(blocks) + 1)
        for place, block in enumerate(blocks):
            if _LINK.search(block):
                yield block, records(page, block)
            elif place >= first - 1:
                yield block, of_page


def unrecorded(block: str, record: str) -> list[str]:
    """Return the numbers of a block that no number of the record rounds to."""
    known = [float(one) for one in re.findall(r"\d*\.\d+|\d+", record)]
    text = re.sub(r"\]\([^)]*\)(, [\d.]+)?", "]", block)

    def has(written: str) -> bool:
        half = 0.5 * 10.0 ** -len(written.split(".")[1]) + 1e-9
        return any(abs(float(written) - one) <= half for one in known)

    return [one for one in _NUMBER.findall(text) if not has(one)]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_numbers_of_a_guide_are_those_of_its_record(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = {one for block, record in claims(page, text) for one in unrecorded(block, record)}
    assert missing == UNRECORDED.get(page.stem, set())


def test_a_number_of_another_run_is_found() -> None:
    record = "|descent|.0035 / 92.7|"
    assert unrecorded("It leaves 0.0035, at 92.7 %.", record) == []
    assert unrecorded("It leaves 0.0036, at 92.8 % ([theory](x.md), 5.2).", record) == ["0.0036", "92.8"]
