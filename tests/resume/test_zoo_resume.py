"""A run that was killed and resumed leaves what the uninterrupted run leaves, bit for bit."""

import importlib
import os
import signal

import pytest
import torch
from commands import QUIET
from helpers import assert_same
from pytorch_lightning import Callback

from lightning_sym.cli import checkpoints, main
from lightning_sym.zoo import ModelZoo

pytestmark = pytest.mark.long

FIT = (
    *("fit", "--seed_everything=0", "--trainer.max_epochs=3", *QUIET),
    *("--trainer.callbacks=ZooExport", "--trainer.callbacks+=test_zoo_resume.Killer", "--trainer.callbacks+=ZooReport"),
    *("--model=ZooTask", "--model.members=3", "--model.network=MyrtleCNN", "--model.network.width=2"),
    *("--model.optimizer=torch.optim.Adam", "--model.optimizer.lr=0.01"),
    *("--model.lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR", "--model.lr_scheduler.T_max=3"),
    *("--data=DigitsDataModule", "--data.batch_size=16", "--data.max_samples=80", "--data.shift=1"),
)
# Where the run is killed, and further options. An epoch has 5 steps.
SCENARIOS = {
    "mid-epoch": ("train 1 3",),
    "validation": ("val 1",),
    "export": ("end",),
    "between checkpoint and row": ("saved 2",),
    "within a checkpoint": ("saving 2",),
    "checkpoint in the middle of an epoch": ("train 0 4", "--checkpoint.every_n_train_steps=3"),
}


class Killer(Callback):
    """Kills the process at one place."""

    place = ""

    def maybe(self, place):
        if place == self.place:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self.maybe(f"train {trainer.current_epoch} {batch_idx}")

    def on_validation_epoch_end(self, trainer, task):
        if not trainer.sanity_checking:
            self.maybe(f"val {trainer.current_epoch}")

    def on_train_end(self, trainer, task):
        self.maybe("end")


def kill_while_saving(save=checkpoints.torch.save, write=checkpoints.write_atomically):
    """Have this process killed in the middle of a checkpoint, or when it is there."""

    def saving(checkpoint, file):
        file.write(b"half")
        file.flush()
        Killer().maybe(f"saving {checkpoint['epoch']}")
        file.seek(0)
        save(checkpoint, file)
        epoch.append(checkpoint["epoch"])

    def writing(path, content):
        write(path, content)
        Killer().maybe(f"saved {epoch[-1]}")

    epoch = []
    checkpoints.torch.save, checkpoints.write_atomically = saving, writing


def scenarios(run):
    for module in ("lightning_sym.cli.lightning", "sklearn.datasets", "torch.utils.tensorboard"):
        importlib.import_module(module)  # once, for all processes

    def fit(name, place="", *options):
        child = os.fork()
        if child == 0:
            Killer.place = place
            kill_while_saving()
            os._exit(main([*FIT, "--run_dir", str(run.folder / name), *options]))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert fit("whole") == 0
    for name, (place, *options) in SCENARIOS.items():
        assert fit(name, place, *options) == -signal.SIGKILL
        assert fit(name, "", *options, "--ckpt_path=last") == 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_resumed_run_is_the_uninterrupted_one(runs, name):
    whole, resumed = runs / "whole", runs / name
    expected, found = ModelZoo.open(whole / "zoo"), ModelZoo.open(resumed / "zoo")
    assert found.numbers == expected.numbers == [0, 1, 2]
    assert found.verify() == {}
    for number in expected.numbers:
        assert_same(found.state(number), expected.state(number))
        assert found.member(number).metrics == expected.member(number).metrics
        assert found.member(number).training == expected.member(number).training
    for file in ("results/members.csv", "metrics.csv"):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes(), file
    assert (resumed / "results" / "confusion.png").is_file()
    assert not [path for path in resumed.rglob(".*") if path.name != ".manifest.lock"]


def test_the_runs_differ_where_they_should(runs):
    """Otherwise the comparison above would say little."""
    rows = (runs / "whole" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 4
    assert len(set(rows)) == 4
    zoo = ModelZoo.open(runs / "whole" / "zoo")
    assert not torch.equal(zoo.state(0)["conv1.weight"], zoo.state(1)["conv1.weight"])
