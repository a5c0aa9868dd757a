"""How to cite: the file that machines read, and the papers that the recipes name."""

import re
import tomllib

import pytest
import yaml
from guides import ROOT

from lightning_sym.recipes import recipe_header, recipe_names

PAGE = (ROOT / "docs" / "citing.md").read_text()
BIBTEX = (ROOT / "docs" / "citing.bib").read_text()
ENTRIES = dict(re.findall(r"^@\w+\{(\w+),\n(.*?)^\}", BIBTEX, re.MULTILINE | re.DOTALL))
ROWS = {
    room: re.findall(r"`(\w+)`", cell)
    for rooms, cell in re.findall(r"^\|(`[a-z_/`, ]+)\|(.*)\|$", PAGE, re.MULTILINE)
    for room in re.findall(r"`(\w+)/`", rooms)
}


def test_the_citation_file_says_what_the_package_says() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # The four keys that the schema of version 1.2.0 demands, and those that are also said elsewhere.
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])
    assert (citation["license"], citation["abstract"]) == (project["license"], project["description"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
    assert citation["keywords"] == project["keywords"]
    assert f"version = {{{project['version']}}}" in BIBTEX


def test_every_kind_of_recipe_is_on_the_page() -> None:
    assert set(ROWS) == {name.partition("/")[0] for name in recipe_names()}


@pytest.mark.parametrize("room", sorted(ROWS))
def test_papers_that_recipes_name_as_their_source_are_among_those_to_cite(room: str) -> None:
    cited = {eprint for key in ROWS[room] for eprint in re.findall(r"eprint += \{([\d.]+)\}", ENTRIES[key])}
    named = {
        number
        for name in recipe_names()
        if name.startswith(f"{room}/")
        for number in re.findall(r"arXiv (\d{4}\.\d{5})", recipe_header(name)["source"])
    }
    assert named <= cited


def test_every_entry_is_complete_and_named_in_the_table() -> None:
    assert set(ENTRIES) == {"lightning_sym", *(key for keys in ROWS.values() for key in keys)}
    for key, fields in ENTRIES.items():
        if key != "lightning_sym":
            assert re.findall(r"^  (\w+) += \{.+\},?$", fields, re.MULTILINE)[-2:] == ["year", "eprint"], key
            assert {"title", "author"} <= set(re.findall(r"^  (\w+) +=", fields, re.MULTILINE))
