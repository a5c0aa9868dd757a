"""Writing trained members into a zoo."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from lightning_sym._distributed import together
from lightning_sym._text import ranges
from lightning_sym.callbacks._checks import check_needs, checked_datamodule, on_first_rank, run_folder
from lightning_sym.tasks import ZooTask
from lightning_sym.zoo import ModelZoo, rebuild_manifest, write_member

_NEEDS = (*("numbers", "member_seeds", "member_parallel", "network", "execution", "stopped", "kept"), "split_metrics")
_ELSEWHERE = "choose another folder (ZooExport's dirpath; --run_dir or --zoo_dir)"


class ZooExport(Callback):
    """Write the members of a :class:`lightning_sym.tasks.ZooTask` into a zoo at the end of a fit.

    The kept weights are evaluated once on the training (no augmentation), validation and test split, and these
    metrics go into each member's file. Members that were stopped are not written. Before training starts, the
    folder is checked: it must be writable, hold the same architecture and data if it holds a zoo, and none of
    the members that are about to be trained.

    Args:
        dirpath: The zoo's folder; default ``zoo`` in the run's folder. It may hold members already.
        overwrite: Replace members of the same numbers that are there already. Resumed runs always do.

    Attributes:
        path: The zoo's folder; None before ``setup``.
    """

    def __init__(self, dirpath: str | None = None, overwrite: bool = False) -> None:
        self.dirpath = dirpath
        self.overwrite = overwrite
        self.path: Path | None = None
        self._zoo: ModelZoo | None = None
        self._written = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task, the data and the folder.

        Raises:
            TypeError: If the task lacks what is written, or the data are not of ``lightning_sym.datamodules``.
            ValueError: If the folder holds another architecture or other data.
            OSError: If the folder cannot be written to.
        """
        self.path, self._zoo, self._written = None, None, False
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        check_needs(self, pl_module, _NEEDS, "ZooTask")
        task: Any = pl_module
        identity = checked_datamodule(self, trainer).identity()
        self.path = path = Path(self.dirpath) if self.dirpath else run_folder(trainer) / "zoo"

        def check() -> None:
            _check_writable(path)
            if any(path.glob("member-*.safetensors")):
                self._zoo = ModelZoo.open(path)
                _check_like(self._zoo, task.network.architecture, task.numbers, identity)

        on_first_rank(trainer, check)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that no members are replaced by accident; whether the run is a resumed one is known by now.

        Raises:
            ValueError: If the zoo has members of these numbers.
        """
        task: Any = pl_module

        def check() -> None:
            if self._zoo is None or self.overwrite or trainer.ckpt_path is not None:
                return
            if taken := sorted(set(task.numbers) & set(self._zoo.numbers)):
                raise ValueError(
                    f"The zoo at {self._zoo.path} already has member(s) {ranges(taken)}; train others (seed "
                    f"{max(self._zoo.numbers) + 1} of ZooTask, --model.seed), replace them (ZooExport(overwrite=True), "
                    f"--overwrite true), or {_ELSEWHERE}."
                )

        if self.path is not None:
            on_first_rank(trainer, check)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the kept weights and write this rank's members."""
        if self.path is None:
            return
        task: Any = pl_module
        path, data = self.path, checked_datamodule(self, trainer)
        results = task.split_metrics(data)
        mine = task.member_seeds if task.member_parallel or trainer.is_global_zero else []

        def write() -> None:
            for number in mine:
                if number not in task.stopped:
                    _write(path, number, trainer, task, data.identity(), results)

        together(write)
        on_first_rank(trainer, lambda: rebuild_manifest(path))
        self._written = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the members of a run that was killed after its last epoch; resumed, it has no training to end."""
        if not self._written:
            self.on_train_end(trainer, pl_module)


def _check_writable(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".writable").touch()
        (path / ".writable").unlink()
    except OSError as error:
        raise OSError(
            error.errno,
            f"The zoo's folder {path.absolute()} cannot be written to ({error.strerror}); choose another --run_dir "
            "or --zoo_dir",
        ) from None


def _check_like(zoo: ModelZoo, architecture: dict[str, Any], numbers: list[int], mine: dict[str, Any]) -> None:
    """Check that a zoo is one of the same architecture, trained on the same data but for what will be replaced."""
    if zoo.architecture != architecture:
        raise ValueError(
            f"The zoo at {zoo.path} holds {_describe(zoo.architecture)} and this run trains {_describe(architecture)}; "
            f"{_ELSEWHERE}."
        )
    for member in [member for member in zoo if member.number not in numbers]:
        for what in ("fingerprint", "mean", "std"):
            if member.data.get(what) != mine[what]:
                raise ValueError(
                    f"Member {member.number} of the zoo at {zoo.path} was trained on other data ({what} "
                    f"{str(member.data.get(what))[:40]}, these have {str(mine[what])[:40]}); {_ELSEWHERE}."
                )


def _write(
    path: Path, number: int, trainer: Trainer, task: ZooTask, data: dict[str, Any], results: Mapping[str, Any]
) -> None:
    """Write a member; a warning says why one cannot be, and the others are written all the same."""
    if number not in task.kept:
        warnings.warn(
            f"Member {number} was not written: training ended before the first validation, which decides "
            'what is kept; train longer, or set keep="last".',
            stacklevel=2,
        )
        return
    row = task.numbers.index(number)
    metrics = {
        split: {name: float(values[name][row]) for name in ("accuracy", "loss") if name in values}
        for split, values in results.items()
        if math.isfinite(float(values["loss"][row]))
    }
    try:
        write_member(
            path,
            number,
            task.kept[number]["state"],
            architecture=task.network.architecture,
            metrics=metrics,
            data=data,
            training=_training(trainer, task, number),
        )
    except ValueError as error:  # weights that are not finite
        warnings.warn(str(error), stacklevel=2)


def _training(trainer: Trainer, task: ZooTask, number: int) -> dict[str, Any]:
    """Return how a member was trained, for its file."""
    return {
        "epochs": trainer.current_epoch,
        "epoch_kept": task.kept[number]["epochs"],
        "steps": trainer.global_step,
        "optimizer": type(trainer.optimizers[0]).__name__,
        "loss": task.hparams.get("loss_name"),
        "execution": task.execution,
        "precision": str(trainer.precision),
        "world_size": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "accelerator": trainer.strategy.root_device.type,
    }


def _describe(architecture: dict[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in architecture["init_args"].items())
    return f"{architecture['class_path']}({arguments})"
