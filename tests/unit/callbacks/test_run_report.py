"""A report of one's own in a few lines."""

import pytest
from pytorch_lightning import LightningModule, Trainer
from rich.table import Table

from lightning_sym.callbacks import RunReport
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import MatchingTask, ZooTask


class Count(RunReport[ZooTask]):
    """Says how many members there are."""

    task_type = ZooTask
    calls = 0

    def report(self, trainer, task, data):
        self.calls += 1
        self.members = task.members
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "count.txt").write_text(f"{task.members} members, {data.num_classes} classes\n")

    def table(self):
        table = Table(title="Count")
        table.add_column("members")
        table.add_row(str(self.members))
        return table

    def notes(self):
        return ["a note"]

    def places(self, trainer):
        return {"count": self.path / "count.txt"}


def run(folder, task: LightningModule, report: RunReport, **settings):
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[report], **settings,
    )  # fmt: skip
    trainer.fit(task, DigitsDataModule(max_samples=60, batch_size=20))


def zoo_task():
    return ZooTask(MultiLayerPerceptron(widths=(4,), image_size=8), members=2)


def test_it_is_written_once_and_printed(tmp_path, capsys):
    report = Count()
    run(tmp_path, zoo_task(), report)
    assert report.calls == 1
    assert (tmp_path / "results" / "count.txt").read_text() == "2 members, 10 classes\n"
    printed = capsys.readouterr().out
    assert "a note" in printed
    assert str(tmp_path / "results" / "count.txt") in printed
    assert "tensorboard --logdir" in printed


def test_another_folder_and_no_report_in_a_trial(tmp_path):
    run(tmp_path, zoo_task(), Count(str(tmp_path / "there")))
    assert (tmp_path / "there" / "count.txt").is_file()
    trial = Count()
    run(tmp_path / "trial", zoo_task(), trial, fast_dev_run=True)
    assert trial.calls == 0


def test_another_task_is_refused_by_name(tmp_path, matching_zoo):
    with pytest.raises(TypeError, match=r"Count works with .*ZooTask, got MatchingTask; remove the callback"):
        run(tmp_path, MatchingTask(str(matching_zoo)), Count())
