"""Results become tables of pandas, and tables in notebooks."""

import sys

import pytest
import torch
from helpers import assert_refused
from torch import nn

from lightning_sym.merging import merge
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.orbit import minimize_on_orbit
from lightning_sym.reports import ResultTable, RunResults
from lightning_sym.symmetry import trace_symmetry, weight_matching
from lightning_sym.zoo import ModelZoo

ROWS = [{"layer": "<a>", "norm": 0.123456, "note": None}, {"layer": "b", "norm": 2.0, "note": "yes"}]
TABLE = ResultTable("norms", "norms & more", ROWS, {"norm": "Euclidean"}, {"seeds": [0, 1]})


def networks(count):
    torch.manual_seed(0)
    return [MultiLayerPerceptron(widths=(5,), image_size=2, num_classes=3) for _ in range(count)]


def test_a_table_becomes_one_of_pandas_with_its_units():
    frame = TABLE.to_pandas()
    assert frame["norm"].tolist() == [0.123456, 2.0]
    assert frame["note"].isna().tolist() == [True, False]  # None is missing
    assert list(frame.columns) == TABLE.columns
    assert frame.attrs == {"title": "norms & more", "units": {"norm": "Euclidean"}, "seeds": [0, 1]}
    assert ResultTable("none", "no rows", []).to_pandas().empty


def test_a_notebook_shows_a_table():
    shown = TABLE._repr_html_()
    for text in ("norms &amp; more", '<th title="Euclidean">norm</th>', "&lt;a&gt;", ">0.1235<", "<td></td>"):
        assert text in shown
    assert "<a>" not in shown
    many = ResultTable("many", "many rows", [{"row": row} for row in range(31)])
    assert many._repr_html_().count("<tr>") == 31  # 30, and the names of the columns
    assert "The first 30 of 31 rows." in many._repr_html_()
    results = RunResults([TABLE], notes=["  [bold]a note[/bold] <b>"])
    assert results._repr_html_() == shown + "<p>a note &lt;b&gt;</p>"


def test_without_pandas_it_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert_refused(TABLE.to_pandas, says="pip install pandas", error=ImportError)


def test_a_zoo_has_a_row_for_each_member(tmp_path):
    metrics = [{"val": {"loss": 0.5}}, {"test": {"loss": 0.25}}]
    zoo = ModelZoo.add(tmp_path, networks(2), network=networks(1)[0], metrics=metrics)
    frame = zoo.to_pandas()
    assert frame["member"].tolist() == [0, 1]
    assert frame["val/loss"].isna().tolist() == [False, True]
    assert frame["test/loss"][1] == 0.25
    assert "2 members, MultiLayerPerceptron" in zoo._repr_html_()


def test_matching_merging_and_descent_are_tables():
    a, b = networks(2)
    symmetry = trace_symmetry(a, torch.randn(2, 1, 2, 2))
    match = weight_matching(symmetry, a, b)
    rows = match.to_pandas().set_index("quantity")
    assert rows.loc["distance"].tolist() == [match.distance_before, match.distance_after]
    assert match.distance_after <= match.distance_before
    merged = merge(symmetry, [a, b])
    assert merged.to_pandas()["root mean square"].tolist() == list(merged.distances)
    assert "Average of 2 networks" in merged._repr_html_()
    found = minimize_on_orbit(
        symmetry, a, lambda state: sum(tensor.square().sum() for tensor in state.values()), max_steps=2
    )
    assert found.to_pandas().iloc[0].tolist() == pytest.approx([found.before, found.after, found.change])
    assert "Descent on the orbit" in found._repr_html_()


def test_a_symmetry_shows_itself():
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    assert trace_symmetry(network, torch.randn(2, 2))._repr_html_().startswith("<pre>")
