"""Commands that ask a question about checkpoints: spectrum, learning-coefficient, evidence, similarity, curve."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from commands import call, succeed
from helpers import read_csv

from lightning_sym.cli.from_files import COMMANDS
from lightning_sym.cli.main import _COMMANDS
from lightning_sym.zoo import ModelZoo

DATA = ("--data=DigitsDataModule", "--data.max_samples=64", "--trainer.accelerator=cpu")
NETWORK = """
from torch import nn
from own_layers import Rectified

class Own(nn.Module):
    def __init__(self, width=4, num_classes=3):
        super().__init__()
        self.hidden, self.act, self.output = nn.Linear(64, width), Rectified(), nn.Linear(width, num_classes)

    def forward(self, x):
        return self.output(self.act(self.hidden(x.flatten(1))))


class Functional(Own):
    def forward(self, x):
        return self.output(nn.functional.relu(self.hidden(x.flatten(1))))


def made(width=4):
    return Own(width, 10)
"""
DATASET = """
import torch

class Halves(torch.utils.data.Dataset):
    def __init__(self, count=60):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 1, 8, 8, generator=generator)
        self.y = torch.arange(count) % 3
        self.x[torch.arange(count), 0, self.y] += 2

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])
"""


@pytest.fixture
def own(monkeypatch):
    """Put checkpoints, the module of their class and one of a data set into the current folder."""
    Path("own_layers.py").write_text("from torch import nn\n\nRectified = nn.ReLU\n")
    Path("own_nets.py").write_text(NETWORK)
    Path("own_data.py").write_text(DATASET)
    kept, here = sys.path.copy(), str(Path.cwd())
    sys.path[:] = [path for path in kept if path not in ("", here)]  # as the installed program has it
    with monkeypatch.context() as patch:
        patch.syspath_prepend(here)
        from own_nets import Own

        for seed, (name, classes) in enumerate({"a.pt": 10, "b.pt": 10, "three.pt": 3}.items()):
            torch.manual_seed(seed)
            torch.save(Own(4, classes).state_dict(), name)
    names = ("own_nets", "own_layers", "own_data")
    for name in names:
        sys.modules.pop(name, None)
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.path[:] = kept


QUICK = {
    "spectrum": ["--trainer.callbacks.steps=4", "--trainer.callbacks.trace_probes=2", "--trainer.callbacks.probes=1"],
    "learning-coefficient": ["--trainer.callbacks.steps=16", "--trainer.callbacks.chains=3"],
    "evidence": [],
    "similarity": ["--model.measures=[cka_linear]", "--model.nulls=[]"],
    "curve": ["--trainer.max_epochs=1", "--data.batch_size=16", "--trainer.callbacks.plane_points=3"],
}
RESULTS = {
    "spectrum": ("sharpness.csv", "sharpness.png", 6),
    "learning-coefficient": ("learning_coefficient.csv", "learning_coefficient_traces.png", 2),
    "evidence": ("layers.csv", "evidence.png", 4),
    "similarity": ("summary.csv", "depth.png", 2),
    "curve": ("summary.csv", "along.png", 8),
}
FIGURES = ("--figures=pdf", "--figure_size=column")
assert COMMANDS.keys() == QUICK.keys() == RESULTS.keys() <= _COMMANDS.keys()


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.long
def test_files_become_a_zoo_and_the_recipe_writes_its_tables_and_figures(command):
    own = ["--network=own_nets.Own", "--network.width=4"]
    network = own if command != "similarity" else ["--network=own_nets:Functional"]
    result = succeed(command, "a.pt", "b.pt", *network, *DATA, *QUICK[command], *FIGURES, "--out=run")
    assert "member 0: a.pt, test accuracy " in result.out
    table, picture, rows = RESULTS[command]
    assert len(read_csv(Path("run/results") / table)) == rows
    assert (Path("run/results") / picture).is_file()
    zoo = ModelZoo.open("run/imported", allow=["own_nets"])
    assert zoo.architecture["init_args"]["num_classes"] == 10  # of the data, not the default
    assert torch.equal(zoo.state(0)["module.hidden.weight"], torch.load("a.pt")["hidden.weight"])
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["model"]["init_args"]["allow"] == ["own_nets"]
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    again = call(command, "a.pt", "b.pt", *network, *DATA, *QUICK[command], "--out=run")
    assert (again.status, "run already holds a run" in again.error, "--out FOLDER" in again.error) == (1, True, True)
    assert before == {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}


@pytest.mark.usefixtures("own")
def test_a_data_set_and_a_zoo_and_a_function_of_ones_own():
    data = ["--data=DatasetDataModule", "--data.dataset=own_data.Halves", "--data.dataset.count=90"]
    result = succeed("evidence", "three.pt", "--network=own_nets.Own", *data, DATA[-1], "--out=mine")
    assert "1 curvature pass of " in result.out
    assert "of those kept" not in result.out  # nothing was trained: there are no other weights
    member = ModelZoo.open("mine/imported", allow=["own_nets"]).member(0)
    assert sum(member.data["splits"].values()) == 90
    succeed("import", "a.pt", "b.pt", "--network=own_nets:made", "--out=zoo", *DATA[:2])
    assert json.loads(Path("zoo/manifest.json").read_text())["architecture"]["class_path"] == "own_nets.made"
    refused = call("evidence", "zoo", *DATA)
    assert "own_nets.made, which is not in the allow-list" in refused.error  # a file names it, not the command line
    np.savez("own_nets.npz", inputs=np.zeros((90, 1, 8, 8), np.float32), targets=np.arange(90) % 10)
    refused = call("evidence", "zoo", "--data=TensorDataModule", "--data.train=own_nets.npz", DATA[-1])
    assert "own_nets.made, which is not in the allow-list" in refused.error  # nor does the name of a file of data
    assert not Path("runs").exists()
    succeed("evidence", "zoo", *DATA, "--model.allow=[own_nets]")
    succeed("evidence", "zoo", *DATA, "--model.allow=[own_nets]")
    assert {path.name for path in Path("runs").iterdir()} == {"evidence", "evidence-2"}
    assert not Path("runs/evidence/imported").exists()


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--network=own_nets.Own", "--network.width=5"], "own.*hidden"),
        (["--network=own_nets.Own", "--model.prior_precision=-1"], "model.prior_precision"),
        (["--network=own_nets.Own", "--trainer.accelerator=gpuu"], "invalid accelerator name"),
    ],
)
@pytest.mark.few(3, "options1-model.prior_precision")
def test_a_failed_attempt_leaves_nothing_and_may_be_repeated(options, says):
    files = set(Path().iterdir())
    result = call("evidence", "a.pt", *DATA, "--out=runs/mine", *options)
    assert result.status == 1
    assert set(Path().iterdir()) - files <= {Path("__pycache__")}
    succeed("evidence", "a.pt", "--network=own_nets.Own", *DATA, "--out=runs/mine")


@pytest.mark.usefixtures("own")
def test_an_interrupted_command_says_how_to_start_it_again():
    Path("leaves.py").write_text(
        "from pytorch_lightning import Callback\n\n\nclass Leave(Callback):\n"
        "    def on_train_epoch_end(self, trainer, pl_module):\n        raise KeyboardInterrupt\n"
    )
    command = ["curve", "a.pt", "b.pt", "--network=own_nets.Own", *DATA, *QUICK["curve"], "--out=c"]
    result = call(*command, "--trainer.callbacks+=leaves.Leave")
    assert result.status == 130
    assert result.err.splitlines()[-1] == "lightning-sym: interrupted; restart with --overwrite true --out c"
    assert "c already holds a run" in call(*command).error
    succeed(*command, "--overwrite=true")
    assert Path("c/results/summary.csv").is_file()
