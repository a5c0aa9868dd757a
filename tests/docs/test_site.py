"""The site: its navigation has every page, and the gallery's pictures, links and commands are there."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from guides import ROOT, Command, settings

DOCS = ROOT / "docs"
CARDS = (
    (DOCS / "index.md").read_text().partition('<div class="grid cards"')[2].partition("</div>")[0].split("\n-   ")[1:]
)


def pages_of(entry: Any) -> list[str]:
    """Return the pages of the navigation, in order."""
    if isinstance(entry, str):
        return [entry]
    return [page for one in (entry.values() if isinstance(entry, dict) else entry) for page in pages_of(one)]


def test_the_navigation_has_every_page_once() -> None:
    listed = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages - set(listed) == set(), "add these pages to nav in mkdocs.yml"
    assert sorted(listed) == sorted(pages), "nav in mkdocs.yml names a page twice, or one that does not exist"


def test_every_page_is_linked_from_another() -> None:
    linked = set()
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            linked.add((page.parent / target).resolve())
    alone = [page.name for page in DOCS.rglob("*.md") if page.resolve() not in linked and page.name != "index.md"]
    assert alone == [], "link to these pages from another page"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: re.findall(r"\*\*\[([^\]]+)", card)[0])
def test_a_card_of_the_gallery_has_a_picture_a_page_and_a_command(card: str) -> None:
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", card)
    (page,) = re.findall(r"\*\*\[[^\]]+\]\(([^)]+)\)\*\*", card)
    (line,) = re.findall(r"`(lightning-sym [^`]+)`", card)
    assert (DOCS / picture).is_file()
    command = Command.of(line)
    assert command is not None
    assert settings(command.recipe)["model"]
    assert command.recipe.partition("/")[0] in (DOCS / page).read_text()


def test_every_kind_of_experiment_has_a_card() -> None:
    shown = {recipe.partition("/")[0] for recipe in re.findall(r"--config ([\w/]+)", "".join(CARDS))}
    assert shown == {folder.name for folder in (ROOT / "recipes").iterdir() if any(folder.glob("*.yaml"))}


def test_the_first_page_begins_with_a_picture() -> None:
    before, _, _ = (DOCS / "index.md").read_text().partition("```")
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", before)
    assert (DOCS / picture).is_file()
    assert before.index(picture) < 500  # characters: two lines of text, so that it is seen without scrolling


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="needs the extra docs")
def test_the_site_is_built_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    fetching = r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?:"
    fetched = {page.name for page, text in pages.items() if re.search(fetching, text)}
    assert fetched == set()
    # Opened from the disk: the index is a script, and the worker's stand-in comes before the theme's code.
    assert (tmp_path / "search" / "search_index.js").read_text().startswith("var __index = {")
    for page in ("index.html", "theory/index.html"):
        shim, bundle = re.findall(r'<script src="([^"]+)">', pages[tmp_path / page])
        assert shim.endswith("javascripts/iframe-worker.js")
        assert (tmp_path / page).parent.joinpath(shim).is_file()
        assert "bundle" in bundle
    assert 'class="language-bash highlight"' in pages[tmp_path / "index.html"]  # what the style sheet wraps
    assert re.search(
        r"<details>\s*<summary>[^<]*</summary>\s*<p>.*?<table>", pages[tmp_path / "results/git-re-basin.html"], re.S
    )
    assert "<math" in (tmp_path / "theory" / "curvature.html").read_text()
    raw = {page.name for page, text in pages.items() if re.search(r":(?:class|func|math):<code>|```math", text)}
    assert raw == set()
