"""The report of the guide: a declaration and what measure returns."""

import json

import pytest
from fits import digits, fit
from helpers import assert_refused, printed, read_csv
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sym.callbacks import RunReport
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports import Column, Report
from lightning_sym.reports.report import final_numbers, shown_table
from lightning_sym.tasks import ZooTask


class SizeReport(RunReport):
    """Report the norms of the layers of the members of a zoo."""

    needs = ("kept_states",)
    example = "ZooTask"
    declared = Report(
        tables={"sizes": "norms of the layers of the members of a zoo"},
        columns=[
            Column("member", heading="member", text="d"),
            Column("layer", heading="layer"),
            Column("norm", "Euclidean norm of the weights", heading="norm", text=".2f", number="final/norm/{layer}"),
        ],
        charts={
            "sizes": Chart(
                [
                    Panel([Marks("norm", x="layer", label="mean of all members")], ylabel="norm"),
                    Panel([Marks("norm", x="layer", group=["member"], kind="bars")], ylabel="norm", bottom=0),
                ]
            )
        },
        title="Sizes of {title}",
        places={"picture": "sizes.png", "table": "sizes.csv"},
    )

    def measure(self, trainer, task, data):
        return {
            "sizes": [
                {"member": number, "layer": name.removesuffix(".weight"), "norm": float(tensor.norm())}
                for number, state in task.kept_states().items()
                for name, tensor in state.items()
                if name.endswith("weight")
            ]
        }


def test_a_declaration_is_a_table_a_figure_numbers_and_a_summary(tmp_path, capsys):
    report = SizeReport()
    logger = TensorBoardLogger(tmp_path, name="", version="")
    task = ZooTask(MultiLayerPerceptron(widths=(4,), image_size=8), members=2)
    fit(task, digits(), report, folder=tmp_path, logger=logger)
    rows = read_csv(tmp_path / "results" / "sizes.csv")
    assert [(row["member"], row["layer"]) for row in rows] == [
        (number, layer) for number in "01" for layer in ("linear1", "classifier")
    ]
    about = json.loads((tmp_path / "results" / "sizes.json").read_text())
    assert about["units"] == {"norm": "Euclidean norm of the weights"}
    assert about["data"]["class_path"].endswith("DigitsDataModule")
    layers = ("linear1", "classifier")
    means = {name: sum(float(row["norm"]) for row in rows if row["layer"] == name) / 2 for name in layers}
    numbers = json.loads((tmp_path / "results" / "numbers.json").read_text())
    assert {row["number"]: row["value"] for row in numbers["rows"]} == {
        f"final/norm/{layer}": pytest.approx(mean) for layer, mean in means.items()
    }
    assert numbers["headline"] == "final/norm/linear1"
    out = capsys.readouterr().out
    for word in ("Sizes of ZooTask", "classifier", f"{float(rows[0]['norm']):.2f}", "sizes.png"):
        assert word in out
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert {"final/norm/linear1", "final/norm/classifier"} <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["figures/SizeReport/sizes/1", "figures/SizeReport/sizes/2"]


def test_a_report_without_either_is_refused():
    assert_refused(type("Empty", (RunReport,), {}), says="Empty has no method report", error=TypeError)


ROWS = [
    {"path": "line", "split": "train", "loss": 0.123456, "accuracy": 0.5, "note": ""},
    {"path": "line", "split": "test", "loss": None, "accuracy": 0.25, "note": "none"},
    {"path": "two ends", "split": "train", "loss": 2.0, "accuracy": 1.0, "note": "a"},
]


def test_cells_have_formats_factors_and_dashes():
    columns = [
        Column("path", heading="path"),
        Column("loss", "nats", "loss", ".3f"),
        Column("accuracy", "fraction", "accuracy, %", ".0f", 100),
        Column("unseen", "m"),
        Column("both", heading="both", text=lambda row: f"{row['split']}/{row['note']}"),
    ]
    text = printed(lambda console: console.print(shown_table("Title", columns, ROWS)))
    for said in ("Title", "0.123", "50", "test/none", "two ends"):
        assert said in text
    assert "unseen" not in text
    assert [column.cell(ROWS[1]) for column in columns[:3]] == ["line", "-", "25"]
    assert Report({}, columns).units == {"loss": "nats", "accuracy": "fraction", "unseen": "m"}


def test_final_numbers_are_means_of_rows_with_the_same_name():
    columns = [Column("loss", number="barrier/{split}/{path}"), Column("accuracy", number="accuracy/{path}")]
    assert final_numbers(columns, ROWS) == {
        "barrier/train/line": 0.123456,
        "accuracy/line": 0.375,
        "barrier/train/two_ends": 2.0,
        "accuracy/two_ends": 1.0,
    }


def test_tables_without_rows_are_kept_and_missing_ones_are_not():
    report = Report({"a": "first", "b": "second"}, [Column("loss", "nats")], headline="x")
    found = report.results({"b": ROWS, "a": [], "drawn": ROWS}, title="t", about={}, numbers={"x": 1.0}, notes=["n"])
    assert [(table.name, len(table.rows)) for table in found.tables] == [("a", 0), ("b", 3)]
    assert (found.headline, found.notes, found.shown) == ("x", ["n"], None)
    assert [table.name for table in report.results({"b": ROWS}, title="t", about={}).tables] == ["b"]


def test_a_chart_has_the_title_of_the_table_which_may_be_wider_than_its_columns(capsys):
    report = Report(
        {"a": "rows"}, [Column("x", heading="x")], {"c": Chart([Panel([Marks("y", "x")])])}, "Heights of {title}"
    )
    results = report.results({"a": [{"x": 1, "y": 2.0}]}, title="some networks", about={})
    ((_, figure),) = results.figures
    assert figure.get_suptitle() == "Heights of some networks"
    Console().print(results.shown)
    assert capsys.readouterr().out.startswith("Heights of some networks\n")
