"""A search that was interrupted, or its grids, and goes on ends where the uninterrupted one ends, bit for bit."""

import functools
from pathlib import Path

import pytest
import torch
from fits import Interrupt
from fits import fit as run
from helpers import assert_refused, assert_same

from lightning_sym.callbacks import EquivalenceReport, PlaneGrid
from lightning_sym.cli.checkpoints import RunCheckpoint
from lightning_sym.datamodules import GaussianInputsDataModule
from lightning_sym.landscape import LossSurface
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import EquivalenceTask

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """Figures are compared in tests/unit/callbacks."""
    monkeypatch.setattr("lightning_sym.reports.equivalence._figures", lambda *_: ())


def fit(folder: Path, place: str = "", ckpt_path: Path | None = None, execution: str = "vmap", fresh: bool = False):
    checkpoint = RunCheckpoint(folder, filename="last", enable_version_counter=False, every_n_train_steps=3)
    grids = [PlaneGrid(1, 9), PlaneGrid(2, 101), PlaneGrid(3, 25)]  # 1, 2 and 2 blocks
    report = EquivalenceReport(grids, epsilon=0.5, limit_seconds=None)
    task = EquivalenceTask(
        MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False),
        members=6,
        points=4,
        teacher=[0.8, -0.6, 0.7, 0.5],
        tolerance=0.02,
        held_out=0.5,
        round_steps=24,
        max_rounds=4,
        execution=execution,
        optimizer=functools.partial(torch.optim.Adam, lr=0.05),
    )
    data = GaussianInputsDataModule(samples=512, batch_size=128, val_samples=256, fresh=fresh)  # 4 steps
    settings = {"folder": folder, "ckpt_path": ckpt_path, "max_epochs": 60, "precision": "64-true"}
    return task, run(task, data, Interrupt(place), report, checkpoint, **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return uninterrupted runs, by execution and by whether inputs are fresh."""

    @functools.cache
    def run(execution: str = "vmap", fresh: bool = False):
        folder = tmp_path_factory.mktemp("whole")
        return folder, *fit(folder, execution=execution, fresh=fresh)

    return run


def assert_same_search(one: EquivalenceTask, two: EquivalenceTask) -> None:
    for name in ("found", "outcomes", "latest", "checks", "scales", "round", "round_start"):
        assert_same(getattr(one, name), getattr(two, name), name)
    assert_same(one.all_outcomes(), two.all_outcomes())
    assert_same(dict(one.state_dict()), dict(two.state_dict()))


def assert_same_files(one: Path, two: Path) -> None:
    first, second = ({path.name: path.read_bytes() for path in (folder / "results").iterdir()} for folder in (one, two))
    assert first.keys() == second.keys()
    assert len(first) == 4 * 2 + 1 + 3  # tables, weights, grids; no partial file
    for name, content in first.items():
        assert content == second[name], name


# Rounds begin with epochs 0, 6 and 12; the last of four points is found after epoch 13 or 14.
@pytest.mark.parametrize(
    ("place", "execution", "fresh"),
    [
        ("0 2", "vmap", False),  # before the first checkpoint
        ("2 2", "vmap", True),
        ("5 3", "vmap", False),
        ("6 0", "loop", False),
        ("end", "vmap", False),
    ],
)
def test_resumed_search_is_uninterrupted(place, execution, fresh, whole, tmp_path):
    folder, expected, trainer = whole(execution, fresh)
    assert expected.round == 2, "the search must need three rounds"
    assert trainer.current_epoch >= 14
    assert len(expected.found_points()) == 4
    assert_refused(fit, tmp_path, place, execution=execution, fresh=fresh, says="interrupted", error=RuntimeError)
    last = tmp_path / "last.ckpt"
    assert last.exists() == (place != "0 2")
    assert not (tmp_path / "results").exists()
    task, resumed = fit(tmp_path, ckpt_path=last if last.exists() else None, execution=execution, fresh=fresh)
    assert resumed.global_step == trainer.global_step
    assert_same_search(expected, task)
    assert_same_files(folder, tmp_path)


@pytest.mark.parametrize(
    ("grid", "call", "error"), [("search-2d", 2, KeyboardInterrupt), ("search-3d", 1, RuntimeError)]
)
def test_a_grid_that_was_interrupted_goes_on(whole, tmp_path, monkeypatch, grid, call, error):
    folder, expected, _ = whole()
    dimension = int(grid[-2])
    calls: list[int] = []
    on = LossSurface.on

    def counting(surface, plane, coefficients, *, below=None):
        calls.append(plane.dimension)
        if calls.count(dimension) == stop_at:
            raise error("interrupted")
        return on(surface, plane, coefficients, below=below)

    monkeypatch.setattr(LossSurface, "on", counting)
    stop_at = call
    with pytest.raises((error, SystemExit)):  # what Lightning makes of the KeyboardInterrupt
        fit(tmp_path)
    results = tmp_path / "results"
    partial = list(results.glob(f".grid-{grid}-*.partial"))
    assert len(partial) == (call > 1)  # there was something to keep
    assert list(results.glob("*")) == partial

    calls.clear()
    stop_at = -1
    task, _ = fit(tmp_path, ckpt_path=tmp_path / "last.ckpt")
    assert calls.count(dimension) == 2 - (call - 1)  # of two blocks, what was left
    assert_same_search(expected, task)
    assert_same_files(folder, tmp_path)


def test_a_table_that_could_not_be_written_is_written_by_the_resumed_run(whole, tmp_path, monkeypatch):
    folder, expected, _ = whole()

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lightning_sym.reports.ResultTable.write", full)
        assert_refused(fit, tmp_path, says="No space left", error=OSError)
    task, _ = fit(tmp_path, ckpt_path=tmp_path / "last.ckpt")
    assert_same_search(expected, task)
    assert_same_files(folder, tmp_path)


def test_a_finished_search_that_is_resumed_takes_no_step(whole, tmp_path):
    _, expected, trainer = whole()
    fit(tmp_path)
    task, resumed = fit(tmp_path, place=f"{trainer.current_epoch} 0", ckpt_path=tmp_path / "last.ckpt")
    assert resumed.global_step == trainer.global_step
    assert_same_search(expected, task)
