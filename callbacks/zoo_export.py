"""Write trained members into a zoo."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer

from lightning_sym._claims import Claim
from lightning_sym._distributed import together
from lightning_sym._files import remove_abandoned
from lightning_sym._text import other_settings, ranges
from lightning_sym.callbacks._checks import on_first_rank
from lightning_sym.callbacks.report import AfterFit
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.tasks import ZooTask
from lightning_sym.zoo import ModelZoo, rebuild_manifest, write_member

_ELSEWHERE = "choose another folder (ZooExport's dirpath; --run_dir or --zoo_dir)"


class ZooExport(AfterFit):
    """Write the members of a :class:`lightning_sym.tasks.ZooTask` into a zoo at the end of a fit.

    The kept weights are evaluated once on the training (without augmentation), validation and test split, and the
    metrics are written to each member's file. Stopped members are not written. Before training starts, the folder is
    checked: it must be writable and hold none of the members to be trained. If it holds a zoo, its architecture and
    data must match.

    Args:
        dirpath: The zoo's folder; default ``zoo`` in the run's folder. It may hold members already.
        overwrite: Replace existing members of the same indices. Resumed runs always do.

    Attributes:
        path: The zoo's folder; available after ``setup``.
    """

    needs = (
        *("numbers", "member_seeds", "member_parallel", "member_settings", "network", "execution", "stopped", "kept"),
        "split_metrics",
    )
    example = "ZooTask"
    folder = "zoo"

    def __init__(self, dirpath: str | None = None, overwrite: bool = False) -> None:
        super().__init__(dirpath)
        self.overwrite = overwrite
        self._zoo: ModelZoo | None = None
        self._claim: Claim | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task, the data and the folder.

        Raises:
            TypeError: If the task lacks needed attributes, or the data are not of ``lightning_sym.datamodules``.
            ValueError: If the folder holds another architecture or other data.
            OSError: If the folder cannot be written to, or another run has reserved members of these indices.
        """
        super().setup(trainer, pl_module, stage)
        self._zoo = None
        self._release()
        task: Any = pl_module

        def check() -> None:
            _check_writable(self.path)
            what, todo = f"The zoo at {self.path}", f"train others (ZooTask's seed, --model.seed), or {_ELSEWHERE}"
            self._claim = Claim(self.path, "zoo", task.numbers, what, todo)
            remove_abandoned(self.path)
            if any(self.path.glob("member-*.safetensors")):
                self._zoo = ModelZoo.open(self.path)
                _check_like(self._zoo, task.network.architecture, task.numbers, self.data(trainer).identity())

        if self.active:
            on_first_rank(trainer, check)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that no members are replaced by accident; only now is it known whether the run was resumed.

        Raises:
            ValueError: If the zoo has members of these indices.
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

        if self.active:
            on_first_rank(trainer, check)

    def conclude(self, trainer: Trainer, task: ZooTask, data: InMemoryDataModule) -> None:
        """Evaluate the kept weights and write this rank's members."""
        results = task.split_metrics(data)
        mine = task.member_seeds if task.member_parallel or trainer.is_global_zero else []

        def write() -> None:
            lasting = [number for number in mine if number not in task.stopped]
            if unseen := [number for number in lasting if number not in task.kept]:
                warnings.warn(
                    f"Member{'s' * (len(unseen) > 1)} {ranges(unseen)} could not be written: training ended before the "
                    'first validation, which determines the kept weights; train longer, or set keep="last".',
                    stacklevel=2,
                )
            for number in lasting:
                if number in task.kept:
                    _write(self.path, number, trainer, task, data.identity(), results)

        together(write)
        on_first_rank(trainer, lambda: rebuild_manifest(self.path))
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the reserved indices."""
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the reserved indices."""
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None


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
    """Check that a zoo has the same architecture and, except for members to be replaced, the same data."""
    if zoo.architecture != architecture:
        theirs, ours = _different(zoo.architecture, architecture)
        raise ValueError(f"The zoo at {zoo.path} holds {theirs} but this run trains {ours}; {_ELSEWHERE}.")
    for member in [member for member in zoo if member.number not in numbers]:
        for what in ("fingerprint", "mean", "std"):
            if member.data.get(what) != mine[what]:
                raise ValueError(
                    f"Member {member.number} of the zoo at {zoo.path} was trained on other data"
                    f"{other_settings(member.data, mine) or f' (another {what})'}; {_ELSEWHERE}."
                )


def _write(
    path: Path, number: int, trainer: Trainer, task: ZooTask, data: dict[str, Any], results: Mapping[str, Any]
) -> None:
    """Write a member; warn if one cannot be written, and write the others."""
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
    """Return the training settings and metrics of a member, for its file."""
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
        **({"settings": own} if (own := task.member_settings(number)) else {}),
    }


def _different(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return both architectures as text: class and differing arguments (all arguments if the classes differ)."""
    same = a["class_path"] == b["class_path"]
    common = {name for name, value in a["init_args"].items() if same and b["init_args"].get(name, ...) == value}
    found = []
    for one in (a, b):
        arguments = [f"{name}={value!r}" for name, value in one["init_args"].items() if name not in common]
        found.append(f"{one['class_path'].rpartition('.')[2] if same else one['class_path']}({', '.join(arguments)})")
    return found
