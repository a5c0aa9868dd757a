"""Searches with their grids in one and two processes; run by test_equivalence_ddp.py in a process of its own.

Usage: ``python equivalence_scenarios.py FOLDER``; every scenario leaves its results, and what every rank found, in a
subfolder, and ``FOLDER/errors.json`` says what those that must fail said.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from pytorch_lightning import Callback, Trainer
from scenarios import Scenarios, parallel, paths

from lightning_sym.callbacks import EquivalencePlane, PlaneGrid
from lightning_sym.cli.checkpoints import RunCheckpoint
from lightning_sym.datamodules import GaussianInputsDataModule
from lightning_sym.landscape import LossSurface
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import EquivalenceTask

# Points per axis by dimension: 1, 2 and 6 blocks of points.
GRIDS = {1: 9, 2: 101, 3: 35}


class Plane(EquivalencePlane):
    """Draws nothing, and writes what every rank knows of the search."""

    def _figures(self, *_):
        return iter(())

    def report(self, trainer, task, data) -> None:
        super().report(trainer, task, data)
        names = ("found", "outcomes", "latest", "history", "round", "round_start")
        state = {name: getattr(task, name) for name in names} | {"slots": task.slots, "step": trainer.global_step}
        state["values"] = [torch.from_numpy(slice_.values) for slice_ in self._slices]
        torch.save(state, Path(trainer.default_root_dir) / f"rank-{trainer.global_rank}.pt")


class Stop(Callback):
    """Interrupts a run in its second round."""

    def on_train_batch_start(self, trainer, task, batch, batch_idx) -> None:
        if task.round == 1 and batch_idx == 2:
            raise RuntimeError("interrupted")


class Poison(Callback):
    """Makes one candidate NaN, which is on the second of two processes."""

    def on_train_batch_start(self, trainer, task, batch, batch_idx) -> None:
        if trainer.global_step == 2 and 1 in task.slots:
            state = task.population.member_state(1)
            task.population.set_member_state(1, {name: value * float("nan") for name, value in state.items()})


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


def fit(
    folder: Path,
    processes: int = 1,
    execution: str = "loop",
    strategy: str = "ddp_members_fork",
    ckpt_path: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
    dimensions: dict[int, int] = GRIDS,
    **settings,
) -> None:
    folder.mkdir(exist_ok=True)
    placed = {**parallel(processes), "strategy": strategy} if processes == 2 else parallel(1)
    grids = [PlaneGrid(dimension, points) for dimension, points in dimensions.items()]
    plane = Plane(grids, epsilon=0.5, limit_seconds=None)
    checkpoint = RunCheckpoint(folder, filename="last", enable_version_counter=False, every_n_train_steps=3)
    trainer = Trainer(
        **placed,
        accelerator="cpu",
        max_epochs=60,
        precision="64-true",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=False,
        callbacks=[*callbacks, plane, checkpoint],
    )
    task = EquivalenceTask(
        MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False),
        **{
            "members": 5,
            "points": 4,
            "teacher": [0.8, -0.6, 0.7, 0.5],
            "tolerance": 0.02,
            "held_out": 0.5,
            "round_steps": 24,
            "max_rounds": 6,
            "execution": execution,
            "optimizer": functools.partial(torch.optim.Adam, lr=0.05),
            **settings,
        },
    )
    data = GaussianInputsDataModule(samples=512, batch_size=128, val_samples=256)  # 4 steps
    trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True)


def main(folder: Path) -> None:
    scenarios = Scenarios(folder)

    def run(name: str, action: Callable[..., None] = fit, **settings) -> None:
        scenarios.run(name, action, **settings)

    run("2 loop", processes=2)
    run("2 vmap", processes=2, execution="vmap")
    run("2 poisoned", processes=2, callbacks=(Poison(),))
    run("2 part", processes=2, callbacks=(Stop(),))
    run("2 resumed", processes=2, ckpt_path=folder / "2 part" / "last.ckpt")
    run("2 other number", ckpt_path=folder / "2 part" / "last.ckpt")
    with breaking_grids():
        run("2 broken", processes=2)
    shutil.copytree(folder / "2 broken", folder / "2 mended")
    run("2 mended", processes=2, ckpt_path=folder / "2 broken" / "last.ckpt")
    run("plain ddp", processes=2, strategy="ddp_fork")
    run("too few", processes=2, members=1, points=1, dimensions={})
    # Last: a process that has taken gradients cannot fork.
    run("1 loop")
    run("1 vmap", execution="vmap")
    run("1 poisoned", callbacks=(Poison(),))
    scenarios.finish()


if __name__ == "__main__":
    main(*paths())
