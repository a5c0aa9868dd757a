"""A run that was killed and resumed leaves what the uninterrupted run leaves, bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_sym.zoo import ModelZoo

RECIPE = """
seed_everything: 0
trainer:
  accelerator: cpu
  max_epochs: 3
  enable_progress_bar: false
  callbacks:
    - class_path: lightning_sym.callbacks.ZooExport
    - class_path: killer.Killer
    - class_path: lightning_sym.callbacks.ZooReport
model:
  class_path: lightning_sym.tasks.ZooTask
  init_args:
    network:
      class_path: lightning_sym.networks.MyrtleCNN
      init_args:
        width: 2
    members: 3
    optimizer:
      class_path: torch.optim.Adam
      init_args:
        lr: 0.01
    lr_scheduler:
      class_path: torch.optim.lr_scheduler.CosineAnnealingLR
      init_args:
        T_max: 3
data:
  class_path: lightning_sym.datamodules.DigitsDataModule
  init_args:
    batch_size: 16
    max_samples: 80
    shift: 1
"""

KILLER = """
import os, signal
from pathlib import Path
from pytorch_lightning import Callback

class Killer(Callback):
    '''Kills the process at one place, if the environment names it; once, as a file remembers.'''

    def maybe(self, place):
        wanted, _, file = os.environ.get("KILL", "").partition(":")
        if place == wanted and not Path(file).exists():
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self.maybe(f"train {trainer.current_epoch} {batch_idx}")

    def on_validation_epoch_end(self, trainer, task):
        if not trainer.sanity_checking:
            self.maybe(f"val {trainer.current_epoch}")

    def on_train_end(self, trainer, task):
        self.maybe("end")
"""

# Imports once and forks for every run: a killed process is a killed process, and starting one takes 6 seconds.
DRIVER = """
import json, os, sys
import sklearn.datasets
import torch.utils.tensorboard
from lightning_sym.cli import main
import lightning_sym.cli.lightning
torch.set_num_threads(1)
statuses = []
for kill, args in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        os.environ["KILL"] = kill
        os._exit(main(args))
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print("statuses", json.dumps(statuses))
"""

# Where the run is killed, and further options. An epoch has 5 steps.
SCENARIOS = {
    "mid-epoch": ("train 1 3", []),
    "validation": ("val 1", []),
    "export": ("end", []),
    "checkpoint in the middle of an epoch": ("train 0 4", ["--checkpoint.every_n_train_steps", "3"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Run all scenarios, and beside them the uninterrupted run ``whole``."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "killer.py").write_text(KILLER)
    fit = ["fit", "--config", str(folder / "recipe.yaml")]
    jobs = [
        ["", [*fit, "--run_dir", str(folder / "whole")]],
    ]
    for name, (place, options) in SCENARIOS.items():
        run = [*fit, "--run_dir", str(folder / name), *options]
        kill = f"{place}:{folder / name}.killed"
        jobs += [[kill, run], [kill, [*run, "--ckpt_path", "last"]]]
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(jobs)],
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    statuses = json.loads(result.stdout.rpartition("statuses ")[2])
    assert statuses == [0] + [-signal.SIGKILL, 0] * len(SCENARIOS), result.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", SCENARIOS)
def test_resumed_run_is_the_uninterrupted_one(runs, name):
    whole, resumed = runs / "whole", runs / name
    expected, found = ModelZoo.open(whole / "zoo"), ModelZoo.open(resumed / "zoo")
    assert found.numbers == expected.numbers == [0, 1, 2]
    assert found.verify() == {}
    for number in expected.numbers:
        state = found.state(number)
        assert all(torch.equal(state[key], value) for key, value in expected.state(number).items())
        assert found.member(number).metrics == expected.member(number).metrics
        assert found.member(number).training == expected.member(number).training
    for file in ("results/members.csv", "metrics.csv"):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes(), file
    assert (resumed / "results" / "zoo.png").is_file()


def test_the_runs_differ_where_they_should(runs):
    """Otherwise the comparison above would say little."""
    rows = (runs / "whole" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 4
    assert len(set(rows)) == 4
    zoo = ModelZoo.open(runs / "whole" / "zoo")
    assert not torch.equal(zoo.state(0)["conv1.weight"], zoo.state(1)["conv1.weight"])
