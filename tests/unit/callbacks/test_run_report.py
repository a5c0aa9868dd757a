"""A report of one's own in a few lines; and what every report needs of its task is what it says."""

import ast
import inspect
import json
import textwrap

import pytest
from experiments import HalfBlindTask
from fits import digits, fit, quiet_trainer
from helpers import assert_refused
from pytorch_lightning import LightningModule

import lightning_sym.callbacks
from lightning_sym.callbacks import RunReport
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports import ResultTable, RunResults
from lightning_sym.tasks import ZooTask


class Count(RunReport):
    needs = ("numbers",)
    example = "ZooTask"
    calls = 0

    def report(self, trainer, task, data, measured):
        self.calls += 1
        rows = [{"members": len(task.numbers), "classes": data.num_classes}]
        return RunResults(
            [ResultTable("count", "how many there are", rows)], notes=["a note"], places={"it": "count.csv"}
        )


def zoo_task():
    return ZooTask(MultiLayerPerceptron(widths=(4,), image_size=8), members=2)


def test_it_is_written_once_and_printed(tmp_path, capsys):
    report = Count()
    fit(zoo_task(), digits(), report, folder=tmp_path)
    assert report.calls == 1
    assert (tmp_path / "results" / "count.csv").read_text() == "members,classes\n2,10\n"
    printed = capsys.readouterr().out
    for word in ("how many there are", "a note", str(tmp_path / "results" / "count.csv"), "tensorboard --logdir"):
        assert word in printed


def test_another_folder(tmp_path):
    fit(zoo_task(), digits(), Count(str(tmp_path / "there")), folder=tmp_path)
    assert (tmp_path / "there" / "count.csv").is_file()


class Sum(Count):
    def report(self, trainer, task, data, measured):
        table = ResultTable("sum", "sums", [{"sum": 1}], {"sum": "networks"})
        return RunResults([table], numbers={"sum": 1.0, "final/sum": 2.0}, headline="final/sum")


class Best(Count):
    def report(self, trainer, task, data, measured):
        return RunResults([ResultTable("best", "the best", [{"best": 1}])], numbers={"best": 3.0}, headline="best")


def test_final_numbers_of_several_reports_stand_in_one_table(tmp_path):
    fit(zoo_task(), digits(), Sum(), Count(), Best(), folder=tmp_path)
    numbers = json.loads((tmp_path / "results" / "numbers.json").read_text())
    assert {row["number"]: row["value"] for row in numbers["rows"]} == {"sum": 1.0, "final/sum": 2.0, "best": 3.0}
    assert numbers["headline"] == "final/sum"
    assert numbers["units"] == {"sum": "networks", "final/sum": "networks"}


def test_tables_of_two_reports_with_one_name_are_reported(tmp_path):
    with pytest.raises(ValueError, match="There are two Count with the same files; remove one, or set"):
        fit(zoo_task(), digits(), Count(), Count(), folder=tmp_path)
    assert not list(tmp_path.iterdir())
    again = type("Again", (Count,), {})()
    with pytest.warns(UserWarning, match=r"Again overwrites count\.csv of Count in .*; rename its table, or"):
        fit(zoo_task(), digits(), Count(), again, folder=tmp_path)
    fit(zoo_task(), digits(), Count(), Count(str(tmp_path / "there")), folder=tmp_path)
    assert (tmp_path / "there" / "count.csv").is_file()


def test_any_task_that_has_what_is_needed_will_do(tmp_path):
    fit(HalfBlindTask(7), digits(), Count(), folder=tmp_path)
    assert (tmp_path / "results" / "count.csv").read_text() == "members,classes\n7,10\n"


def test_an_error_in_a_report_ends_the_fit_as_what_it_is(tmp_path):
    class Broken(Count):
        def report(self, trainer, task, data, measured):
            raise OSError("No space left on device")

    assert_refused(lambda: fit(zoo_task(), digits(), Broken(), folder=tmp_path), says="No space left", error=OSError)


REPORTS = [
    kind
    for name in lightning_sym.callbacks.__all__
    if inspect.isclass(kind := getattr(lightning_sym.callbacks, name)) and getattr(kind, "needs", ())
]


@pytest.mark.parametrize("kind", REPORTS)
def test_what_a_report_needs_is_what_it_uses(kind):
    """Whoever writes a task of their own reads it there, and the error names it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.getmodule(kind))))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "task"
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id == "picked" and getattr(call.args[0], "id", "") == "task":
            used |= {argument.value for argument in call.args[1:]}
    assert used - set(dir(LightningModule)) == set(kind.needs).union(*getattr(kind, "either", ()))
    assert kind.example in lightning_sym.tasks.__all__


@pytest.mark.parametrize("kind", REPORTS)
def test_other_tasks_and_data_are_refused_before_a_fit_and_nothing_is_done_in_a_trial(kind):
    report, trainer = kind(), quiet_trainer()
    says = [f"{kind.__name__} works with lightning_sym.tasks.{kind.example} and", f"has no {kind.needs[0]} and "]
    assert_refused(report.setup, trainer, LightningModule(), "fit", error=TypeError, says=says)
    able = type("Able", (), dict.fromkeys(kind.needs))()
    says = [f"{kind.__name__} needs a datamodule of lightning_sym.datamodules", "NoneType"]
    assert_refused(report.setup, trainer, able, "fit", error=TypeError, says=says)
    for trial, stage in ((quiet_trainer(fast_dev_run=True), "fit"), (trainer, "validate")):
        report.setup(trial, able, stage)
        assert not report.active
