"""Two processes find what one finds, and evaluate the same grids."""

import functools
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
from fits import Poison
from helpers import assert_same
from pytorch_lightning import Callback
from safetensors.torch import load_file

from lightning_sym.callbacks import EquivalenceReport, PlaneGrid
from lightning_sym.cli.checkpoints import RunCheckpoint
from lightning_sym.datamodules import GaussianInputsDataModule
from lightning_sym.landscape import LossSurface
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import EquivalenceTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]

# Points per axis by dimension: 1, 2 and 6 blocks of points.
GRIDS = {1: 9, 2: 101, 3: 35}


class Plane(EquivalenceReport):
    """Draws nothing, and writes what every rank knows of the search."""

    def publish(self, trainer, results) -> None:
        super().publish(trainer, replace(results, figures=()))

    def measure(self, trainer, task, data):
        measured = super().measure(trainer, task, data)
        names = ("found", "outcomes", "latest", "history", "round", "round_start")
        state = {name: getattr(task, name) for name in names} | {"slots": task.slots, "step": trainer.global_step}
        state["values"] = [torch.from_numpy(slice_.values) for slice_ in self.evaluated]
        torch.save(state, f"{trainer.default_root_dir}/rank-{trainer.global_rank}.pt")
        return measured


class Stop(Callback):
    """Interrupts a run in its second round."""

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if task.round == 1 and batch_idx == 2:
            raise RuntimeError("interrupted")


def breaking_grids():
    """Return a context in which the second block of a 3D grid fails, on the first process."""
    on, blocks = LossSurface.on, []

    def failing(surface, plane, coefficients, *, below=None):
        if plane.dimension == 3 and torch.distributed.get_rank() == 0:
            blocks.append(coefficients)
            if len(blocks) == 2:
                raise RuntimeError("grid interrupted")
        return on(surface, plane, coefficients, below=below)

    return mock.patch.object(LossSurface, "on", failing)


def scenarios(run):
    def fit(name, *callbacks, execution="loop", dimensions=GRIDS, processes=1, task=None, **settings):
        network = MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False)
        given = {
            "members": 5, "points": 4, "teacher": [0.8, -0.6, 0.7, 0.5], "tolerance": 0.02, "held_out": 0.5,
            "round_steps": 24, "max_rounds": 6, "execution": execution,
            "optimizer": functools.partial(torch.optim.Adam, lr=0.05), **(task or {}),
        }  # fmt: skip
        plane = Plane([PlaneGrid(*pair) for pair in dimensions.items()], epsilon=0.5, limit_seconds=None)
        steps = RunCheckpoint(run.folder / name, filename="step", enable_version_counter=False, every_n_train_steps=3)
        data = GaussianInputsDataModule(samples=512, batch_size=128, val_samples=256)  # 4 steps
        settings = {"strategy": "ddp_members_fork", "max_epochs": 60, "precision": "64-true", **settings}
        run.fit(
            name, EquivalenceTask(network, **given), data, *callbacks, plane, steps, processes=processes, **settings
        )

    def step(name):
        return run.folder / name / "step.ckpt"

    fit("2 loop", processes=2)
    fit("2 vmap", processes=2, execution="vmap")
    fit("2 poisoned", Poison(1, 2), processes=2)  # a candidate of the second process
    fit("2 part", Stop(), processes=2, fails="RuntimeError: interrupted")
    fit("2 resumed", processes=2, ckpt_path=step("2 part"))
    message = "were placed on 2 process(es) and those of this run on 1"
    fit("2 other number", ckpt_path=step("2 part"), fails=message)
    with breaking_grids():
        fit("2 broken", processes=2, fails="RuntimeError: grid interrupted")
    shutil.copytree(run.folder / "2 broken", run.folder / "2 mended")
    fit("2 mended", processes=2, ckpt_path=step("2 broken"))
    message = "shares out its candidates, not the data; use --trainer.strategy ddp_members"
    fit("plain ddp", processes=2, strategy="ddp_fork", fails=message)
    message = "1 member(s) cannot be placed on 2 processes"
    fit("too few", processes=2, task={"members": 1, "points": 1}, dimensions={}, fails=message)
    fit("1 loop")
    fit("1 vmap", execution="vmap")
    fit("1 poisoned", Poison(1, 2))


def search(path, rank=0):
    return torch.load(path / f"rank-{rank}.pt", weights_only=True)


def files(path):
    return {file.name: file.read_bytes() for file in (path / "results").iterdir()}


def searched(path, rank=0):
    return {name: value for name, value in search(path, rank).items() if name != "slots"}


def test_a_broken_grid_leaves_what_it_had(runs):
    left = sorted(file.name for file in (runs / "2 broken" / "results").iterdir())
    assert len(left) == 2
    assert left[0].startswith(".grid-search-3d-")
    assert left[1] == f"{left[0]}.1"


def test_candidates_are_shared_out(runs):
    assert search(runs / "1 loop")["slots"] == (0, 1, 2, 3, 4)
    assert [search(runs / "2 loop", rank)["slots"] for rank in (0, 1)] == [(0, 2, 4), (1, 3)]
    assert search(runs / "1 loop")["round"] >= 2
    assert len(search(runs / "1 loop")["found"]) >= 4


def test_a_loop_finds_bitwise_the_same(runs):
    """Candidates, tables and grids; also those of the second rank."""
    for rank in (0, 1):
        assert_same(searched(runs / "1 loop"), searched(runs / "2 loop", rank))
    one, two = files(runs / "1 loop"), files(runs / "2 loop")
    assert one.keys() == two.keys()
    assert len(one) == 4 * 2 + 1 + 3  # no partial file
    for name, content in one.items():
        assert content == two[name], name


def test_vmap_finds_the_same_up_to_rounding(runs):
    one, two = searched(runs / "1 vmap"), searched(runs / "2 vmap")
    assert_same(two, searched(runs / "2 vmap", 1))
    assert list(one["found"]) == list(two["found"])
    assert one["step"] == two["step"]
    for number, entry in one["found"].items():
        torch.testing.assert_close(two["found"][number]["weights"], entry["weights"], rtol=1e-9, atol=1e-9)
        assert two["found"][number]["steps"] == entry["steps"]
        assert two["found"][number]["loss"] == pytest.approx(entry["loss"], rel=1e-6)
    for grid in ("search-2d", "search-3d"):
        values = [load_file(runs / name / "results" / f"grid-{grid}.safetensors")["J"] for name in ("1 vmap", "2 vmap")]
        torch.testing.assert_close(*values, rtol=1e-8, atol=1e-10)


def test_a_candidate_that_stops_stops_on_all_ranks(runs):
    one, two = searched(runs / "1 poisoned"), searched(runs / "2 poisoned")
    assert one["outcomes"][1]["stopped"] == "its training loss is not finite"
    assert_same(one, two)
    assert_same(two, searched(runs / "2 poisoned", 1))
    whole = searched(runs / "1 loop")["outcomes"]
    for number in (0, 2, 3, 4):
        assert_same(one["outcomes"][number], whole[number])


@pytest.mark.parametrize("name", ["2 resumed", "2 mended"])
def test_an_interrupted_search_or_grid_of_two_processes_goes_on(runs, name):
    assert_same(searched(runs / "2 loop"), searched(runs / name))
    one, two = files(runs / "2 loop"), files(runs / name)
    assert one.keys() == two.keys()
    for file, content in one.items():
        assert content == two[file], file
