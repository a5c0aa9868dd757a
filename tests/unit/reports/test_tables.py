"""Tables on disk and on the terminal, and the summary of a run."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_refused, printed, read_csv
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lightning_sym.reports import ResultTable, RunResults
from lightning_sym.reports.report import (
    Column,
    averages,
    bold,
    counted,
    final_numbers,
    finite,
    grouped,
    spread_cell,
    text_table,
)

ROWS = [{"step": 1, "loss": 0.123456, "note": None}, {"step": 2, "loss": None, "note": "a, b"}]


def test_a_table_is_written_with_units_and_all_that_is_known(tmp_path):
    ResultTable("steps", "what steps cost", ROWS, {"loss": "nats"}, {"seed": 3}).write(tmp_path / "new")
    assert (tmp_path / "new" / "steps.csv").read_text() == 'step,loss,note\n1,0.123456,\n2,,"a, b"\n'
    found = json.loads((tmp_path / "new" / "steps.json").read_text())
    assert found == {"what": "what steps cost", "units": {"loss": "nats"}, "seed": 3, "rows": ROWS}
    assert list(found) == ["what", "units", "seed", "rows"]
    ResultTable("none", "nothing", []).write(tmp_path)
    assert read_csv(tmp_path / "none.csv") == []


def test_a_table_is_shown_with_four_digits():
    text = printed(ResultTable("steps", "what steps cost", ROWS).show)
    assert "what steps cost" in text
    assert "1 0.1235 -" in text
    assert "2 - a, b" in text


def test_a_summary_names_files_and_places():
    table = ResultTable("steps", "what steps cost", ROWS)
    found = RunResults([table], notes=["a note"], places={"table": "steps.csv", "zoo": Path("else/zoo")})
    text = printed(lambda console: found.show(console, Path("run/results"), Path("run")))
    for word in ("0.1235", "a note", "table run/results/steps.csv", "zoo else/zoo", "tensorboard --logdir run"):
        assert word in text
    assert "what" not in printed(lambda console: RunResults([]).show(console, Path("a"), Path("b")))
    assert "tensorboard --logdir 'my runs'" in printed(lambda console: found.show(console, Path("a"), Path("my runs")))


def shown(show, width=80):
    text = io.StringIO()
    show(Console(file=text, width=width))
    return [line.rstrip() for line in text.getvalue().splitlines()]


words = st.text("abc.-_ (0)", min_size=1, max_size=60).map(str.strip).filter(bool)
numbers = st.integers(10**4, 10**9).map(str)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(words, min_size=2, max_size=24), st.lists(words, min_size=1, max_size=3), st.booleans(), st.data())
def test_tables_of_any_names_fit_on_80_columns_with_all_numbers(columns, names, compact, data):
    cells = st.lists(numbers, min_size=len(columns) - 1, max_size=len(columns) - 1)
    rows = [[name, *data.draw(cells)] for name in names]
    table = text_table("a title", columns, [*rows, None], whole=columns, compact=compact)
    lines = shown(lambda console: console.print(table), width=120)
    assert max(map(len, lines)) <= 80
    found = " ".join(lines).split()
    assert {cell for row in rows for cell in row[1:]} <= set(found)


def test_final_numbers_have_the_units_of_the_columns_that_they_are_of():
    units = {"loss_barrier": "nats above the line", "loss": "nats", "low, R": "unitless"}
    numbers = {"barrier/test_loss/line": 0.5, "val_loss": float("nan"), "R/kept": 2.0, "walks": 3.0}
    ending = RunResults([ResultTable("t", "a table", ROWS, units)], numbers=numbers, headline="R/kept").ending
    assert ending.rows == [{"number": n, "value": None if n == "val_loss" else value} for n, value in numbers.items()]
    assert ending.units == {"barrier/test_loss/line": "nats above the line", "val_loss": "nats", "R/kept": "unitless"}
    assert ending.about == {"headline": "R/kept"}


def test_names_with_brackets_and_paths_are_printed_as_they_are():
    rows = [{"na[i]me": "run[red]", "value": "[/tmp]"}]
    results = RunResults([ResultTable("t", "of [b]", rows)], places={"table": Path("out[bold]", "t.csv")})
    text = printed(lambda console: results.show(console, Path("[i]a"), Path("[i]b")))
    for name in ("na[i]me", "run[red]", "[/tmp]", "of [b]", "out[bold]/t.csv", "--logdir '[i]b'"):
        assert name in text
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    console.print(text_table("", ["a"], [[bold("b[i]")], ["c"]]))
    assert "\x1b[1mb[i]" in console.file.getvalue()


def test_numbers_of_numpy_and_torch_are_written_and_json_has_no_nan(tmp_path):
    row = {"a": np.float32(0.1), "b": np.int64(3), "c": torch.tensor(0.5), "d": np.bool_(True), "e": math.nan}
    table = ResultTable("t", "", [row], about={"at": Path("x"), "best": np.float64(math.inf), "all": (np.int8(1),)})
    table.write(tmp_path)
    assert read_csv(tmp_path / "t.csv") == [
        {"a": str(float(np.float32(0.1))), "b": "3", "c": "0.5", "d": "True", "e": "nan"}
    ]
    found = json.loads((tmp_path / "t.json").read_text(), parse_constant=pytest.fail)
    assert found["rows"] == [{"a": float(np.float32(0.1)), "b": 3, "c": 0.5, "d": True, "e": None}]
    assert (found["at"], found["best"], found["all"]) == ("x", None, [1])
    assert '<td style="text-align: right">0.5</td>' in table._repr_html_()
    assert "0.5" in printed(table.show)
    assert type(final_numbers([Column("c", number="c")], [row])["c"]) is float


def test_a_final_number_that_names_no_column_is_refused():
    says = ["'final/{layer}' of the column norm names 'layer'", "they have norm."]
    assert_refused(final_numbers, [Column("norm", number="final/{layer}")], [{"norm": 1.0}], says=says)


def test_cells():
    assert spread_cell("{:.1f}".format, 1.0) == "1.0"
    assert spread_cell("{:.1f}".format, 1.0, 0.25) == "1.0 ± 0.2"
    assert spread_cell("{:.1f}".format, 1.0, None, 0.5, 1.5) == "1.0\n\\[0.5, 1.5]"
    assert (finite(1.5), finite(float("nan")), finite(float("inf"))) == (1.5, None, None)
    assert (counted(1, "pair"), counted(2, "pair")) == ("1 pair", "2 pairs")


def test_rows_are_grouped_in_their_order_and_averaged():
    rows = [
        {"kind": kind, "loss": loss, "none": None} for kind, loss in (("b", 1.0), ("a", 2.0), ("b", 4.0), ("b", None))
    ]
    found = grouped(rows, "kind")
    assert [(key, len(own)) for key, own in found] == [({"kind": "b"}, 3), ({"kind": "a"}, 1)]
    assert averages(found[0][1], ["loss", "none"]) == {"loss": 2.5, "none": None}
