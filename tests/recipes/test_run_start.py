"""What a run logs to, and the two lines that say at its start what is trained, on what, and where."""

import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import QUIET, SMALL, succeed
from helpers import read_csv
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelSummary, RichModelSummary
from pytorch_lightning.demos.boring_classes import BoringModel
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from lightning_sym.callbacks import publish_numbers
from lightning_sym.cli.loggers import RunTensorBoard
from lightning_sym.cli.summary import RunSummary, trained
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask

UNSAID = [option for option in QUIET if "model_summary" not in option]


def test_loggers_of_ones_own_are_added_to_those_of_the_run_folder():
    own = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=mine", "--trainer.max_epochs=1"]
    reports = "--trainer.callbacks=[ZooReport]"
    succeed("fit", *SMALL, *QUIET, "--run_dir=run", reports, *own)
    names = {path.name.partition(".out.")[0] for path in Path("run").iterdir()}
    assert {"config.yaml", "metrics.csv", "events", "results", "checkpoints"} <= names
    ours, theirs = (read_csv(Path(folder) / "metrics.csv") for folder in ("run", "mine/lightning_logs/version_0"))
    assert ours[-1]["val/loss"] == next(row["val/loss"] for row in theirs if row["val/loss"])


@pytest.mark.long  # in a process of its own
def test_commands_on_files_do_without_lightning():
    succeed("fit", *SMALL, *QUIET, "--run_dir=run", "--trainer.callbacks=[ZooReport]", "--trainer.max_epochs=1")
    shutil.copytree("run", "again")
    for seed in (0, 1):
        torch.manual_seed(seed)
        weights = {"0.weight": torch.randn(8, 4), "0.bias": torch.randn(8), "2.weight": torch.randn(3, 8)}
        save_file(weights, f"{seed}.safetensors")
    Path("net.py").write_text(
        "from torch import nn\n\n\ndef Net():\n    return nn.Sequential(\n        "
        "nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)\n    )\n"
    )
    code = (
        "import json, sys; from lightning_sym.cli import main; "
        "failed = [main(words) for words in json.loads(sys.argv[1])]; "
        "print([name for name in ('pytorch_lightning', 'lightning', 'lightning_fabric') if name in sys.modules]); "
        "sys.exit(any(failed))"
    )
    net = ["--network", "net.Net", "--input", "4"]
    commands = (
        ["symmetry", "net.Net", "--input", "4"],
        ["merge", "0.safetensors", "1.safetensors", *net, "--out", "mean.safetensors"],
        ["compare", "run", "again", "--out", "both"],
    )
    run = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of other packages
@pytest.mark.skipif(None in map(importlib.util.find_spec, ("mlflow", "wandb")), reason="needs mlflow and wandb")
def test_the_trackers_of_the_guide_get_figures_and_tables(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    guide = Path(__file__).parents[2] / "docs" / "trackers.md"
    (text,) = re.findall(r"^```yaml\n(# trackers.yaml\n.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    Path("trackers.yaml").write_text(text)
    options = ["--trainer.callbacks=[ZooReport]", "--trainer.max_epochs=1", "--run_dir=run"]
    succeed("fit", *SMALL, *QUIET, "--config=trackers.yaml", *options)
    importlib.import_module("wandb").finish()
    kept = {path.name for path in Path("tracked").rglob("*/artifacts/**/*.*")}
    assert kept == {"config.txt", "confusion.png", "validation_curves.png", "members.csv", "members.json"}
    (media,) = Path("tracked").glob("wandb/offline-run-*/files/media")
    assert {path.name.partition("_")[0] for path in media.rglob("*.*")} == {
        "config",
        "confusion",
        "members",
        "validation",
    }
    assert Path("run/results/members.csv").is_file()


def test_two_lines_say_what_is_trained_on_what_and_where():
    result = succeed("fit", *SMALL, *UNSAID, "--run_dir=run", "--trainer.max_epochs=1")
    first, second = result.out.splitlines()[:2]
    each = 64 * 8 + 8 + 8 * 10 + 10
    assert first == f"  MultiLayerPerceptron: 2 members, {2 * each:,} trained parameters (ZooTask)"
    assert second == "  DigitsDataModule, 64 for training; cpu; run folder run"


def test_only_networks_are_called_members():
    class Pairs(ZooTask):
        def member_title(self, number):
            return f"Pair {number}"

    network = MultiLayerPerceptron(widths=[8], image_size=8)
    assert trained(ZooTask(network, members=2)) == "MultiLayerPerceptron: 2 members, 0 trained parameters (ZooTask)"
    assert trained(Pairs(network, members=2)).startswith("MultiLayerPerceptron: 2 trained together, ")
    assert trained(BoringModel()) == "BoringModel: 66 trained parameters (BoringModel)"


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ([], [RunSummary]),
        (["--trainer.enable_model_summary=true"], [RichModelSummary]),
        (["--trainer.enable_model_summary=false"], []),
        (["--trainer.callbacks=ModelSummary"], [ModelSummary]),
    ],
)
@pytest.mark.few(4)
def test_a_table_of_modules_is_lightnings_if_it_is_wanted(built, options, kinds):
    succeed("fit", *SMALL, *UNSAID, *options)
    assert [type(one) for one in built.trainer.callbacks if isinstance(one, ModelSummary)] == kinds


@pytest.mark.parametrize(("epochs", "points"), [(1, True), (2, True), (3, False)])
def test_runs_of_one_or_two_epochs_show_points(built, epochs, points):
    succeed("fit", *SMALL, *QUIET, f"--trainer.max_epochs={epochs}")
    (board,) = [logger for logger in built.trainer.loggers if isinstance(logger, RunTensorBoard)]
    assert board.points is points


@pytest.mark.parametrize("details", [True, False])
def test_the_table_of_hyperparameters_has_the_main_number_and_the_next_four_that_are_logged(tmp_path, details):
    board = RunTensorBoard(tmp_path / "run", details=details)
    trainer = Trainer(logger=board)
    trainer.logger.log_hyperparams({"lr": 0.1})
    numbers = dict.fromkeys(("a", "details/b", "main", *"cdef"), 1.0)
    publish_numbers(trainer, numbers, "main")
    board.finalize("success")
    about = EventAccumulator(str(tmp_path / "run")).Reload().PluginTagToContent("hparams")
    infos = metadata.parse_experiment_plugin_data(about[metadata.EXPERIMENT_TAG]).metric_infos
    assert [info.name.tag for info in infos] == (["main", "a", "details/b", "c", "d"] if details else ["main", *"acde"])


@pytest.mark.parametrize("points", [True, False])
def test_points_are_the_last_of_two_values_and_three_make_a_curve(tmp_path, points):
    board = RunTensorBoard(tmp_path / "run", points=points)
    for step in range(4):
        board.log_metrics({"curve": float(step), **({"short": float(step)} if step < 2 else {})}, step)
    board.finalize("success")
    scalars = EventAccumulator(str(tmp_path / "run")).Reload().Scalars
    assert [(one.step, one.value) for one in scalars("curve")] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [(one.step, one.value) for one in scalars("short")] == ([(1, 1)] if points else [(0, 0), (1, 1)])
