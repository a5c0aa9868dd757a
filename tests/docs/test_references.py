"""References to the theory pages lead to sections that exist; the page of recipes is what their headers say."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from guides import ROOT
from recipes_page import PAGE, guide_of, page

from lightning_sym.recipes import recipe_header, recipe_names

THEORY = ROOT / "docs" / "theory"
FOLDERS = ("benchmarks", "callbacks", "datamodules", "docs", "examples", "lightning_sym", "recipes", "tests")
_NUMBERS = r"\d+(?:\.\d+)?(?:(?:, | and | to )\d+\.\d+)*"
# In code, comments and tests "docs/theory/matching.md, 1.2"; on pages a link to the file, then ", 1.2".
_REFERENCE = re.compile(rf"docs/theory/(\w+\.md)\)?(?:, ({_NUMBERS}))?")
_WITHIN = re.compile(r"\((\d+\.\d+)\)")  # on a theory page: a section of its own
_UNREAD = re.compile(
    r"\bour specification|\bthe specification|specification, \d|\bspec \d|\bspec section", re.IGNORECASE
)


def files() -> Iterator[Path]:
    """Yield everything that people read or run."""
    for folder in FOLDERS:
        for pattern in ("*.py", "*.md", "*.yaml"):
            yield from (path for path in (ROOT / folder).rglob(pattern) if path != Path(__file__))
    yield from ROOT.glob("*.md")


def sections(text: str) -> set[str]:
    """Return the numbers of a page's sections."""
    return set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?) ", text, re.MULTILINE))


SECTIONS = {path.name: sections(path.read_text()) for path in THEORY.glob("*.md")}


def dead_references(text: str, own: str = "") -> list[str]:
    """Return the references of a text that lead nowhere.

    Args:
        text: What a file holds.
        own: The name of the theory page that it is, if it is one.
    """
    text = re.sub(r"[ \t]*\n[ \t]*(?:#+ )?", " ", text)  # a reference may go over the end of a line
    text = text.replace("](" if own else "](theory/", "](docs/theory/")
    dead = []
    for name, numbers in [*_REFERENCE.findall(text), *((own, number) for number in _WITHIN.findall(text) if own)]:
        cited = re.findall(r"\d+(?:\.\d+)?", numbers)
        if name not in SECTIONS or not SECTIONS[name].issuperset(cited):
            dead.append(f"{name}, {numbers}")
    return dead


def test_every_reference_to_the_theory_leads_to_a_section() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in files()}
    dead = {
        path.relative_to(ROOT).as_posix(): found
        for path, text in texts.items()
        if (found := dead_references(text, path.name if path.parent == THEORY else ""))
    }
    assert dead == {}
    assert sum("docs/theory/" in text for text in texts.values()) > 40


def test_nothing_cites_a_text_that_readers_do_not_have() -> None:
    citing = [path.relative_to(ROOT).as_posix() for path in files() if _UNREAD.search(path.read_text(encoding="utf-8"))]
    assert citing == []


@pytest.mark.parametrize(
    ("text", "own", "dead"),
    [
        ("See docs/theory/matching.md, 1.2.", "", []),
        ("See docs/theory/matching.md, 99.", "", ["matching.md, 99"]),
        ("see docs/theory/matching.md, 1.1\n    # and 9.9", "", ["matching.md, 1.1 and 9.9"]),
        ("See docs/theory/matches.md.", "", ["matches.md, "]),
        ("See [theory](theory/matching.md), 1.9, and [curvature](curvature.md), 77.", "", ["matching.md, 1.9"]),
        ("See [matching.md](matching.md), 1.9.", "stitching.md", ["matching.md, 1.9"]),
        ("As above (1.1), and (8.8).", "matching.md", ["matching.md, 8.8"]),
    ],
)
def test_a_dead_reference_is_found(text: str, own: str, dead: list[str]) -> None:
    assert dead_references(text, own) == dead


def test_sections_are_numbered_in_order() -> None:
    for path in THEORY.glob("*.md"):
        if path.name != "index.md":
            numbers = re.findall(r"^#{2,3} (\S+) ", path.read_text(), re.MULTILINE)
            order = [tuple(int(part) for part in number.split(".")) for number in numbers]
            assert order == sorted(set(order)), path.name


def test_files_that_contributors_are_sent_to_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


# ---- the page of recipes


def test_the_page_of_recipes_is_made_from_their_headers() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make recipes-page"
    assert re.findall(r"^\|\[`([\w/]+)`\]", page(), re.MULTILINE) == recipe_names()


def test_every_recipe_has_a_guide_that_is_about_recipes_of_its_folder() -> None:
    for name in recipe_names():
        assert name.partition("/")[0] + "/" in (ROOT / "docs" / guide_of(name)).read_text(encoding="utf-8"), name


def test_a_header_is_read_to_its_end() -> None:
    says = recipe_header("stitching/mnist5k")
    assert list(says) == ["summary", "question", "source", "expected", "time", "hardware"]
    assert says["question"].endswith("the symmetries of ReLU?")
