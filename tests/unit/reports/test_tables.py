"""Tables on disk and on the terminal, and the summary of a run."""

import json
from pathlib import Path

from helpers import printed, read_csv

from lightning_sym.reports import ResultTable, RunResults
from lightning_sym.reports.cells import counted, finite, spread_cell

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


def test_cells():
    assert spread_cell("{:.1f}".format, 1.0) == "1.0"
    assert spread_cell("{:.1f}".format, 1.0, 0.25) == "1.0 ± 0.2"
    assert spread_cell("{:.1f}".format, 1.0, None, 0.5, 1.5) == "1.0\n\\[0.5, 1.5]"
    assert (finite(1.5), finite(float("nan")), finite(float("inf"))) == (1.5, None, None)
    assert (counted(1, "pair"), counted(2, "pair")) == ("1 pair", "2 pairs")
