"""Notebooks run as scripts, and the site shows them."""

import json
import sys

import pytest
from guides import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import notebooks as tool

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def shape(notebook):
    """Return what the outputs of a notebook consist of, without numbers."""
    return [
        [sorted(output.get("data", {"stream": ""})) for output in cell["outputs"]]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == [
        "learned_equivariance", "symmetry_of_your_network", "zoo_and_stitching",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.drawn
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_its_file_does(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "2")
    notebook = read(path)
    stored = shape(notebook)
    tool.run(notebook)
    assert shape(notebook) == stored
    assert any(stored)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_becomes_a_page(path):
    assert path.stat().st_size < 150_000
    notebook = read(path)
    assert notebook["nbformat"] == 4
    page = tool.to_markdown(notebook)
    assert page.startswith("# ")
    assert page.count("```python") == sum(cell["cell_type"] == "code" for cell in notebook["cells"])
    assert "/tmp" not in page
