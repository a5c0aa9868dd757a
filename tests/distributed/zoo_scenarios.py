"""Fits of a ZooTask in one and two processes; run by test_zoo_ddp.py in a process of its own, as it forks.

Usage: ``python zoo_scenarios.py FOLDER``; every scenario leaves its zoo, checkpoint and metrics in a subfolder, and
``FOLDER/errors.json`` says what those that must fail said.
"""

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_sym.callbacks import ZooExport, ZooReport
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.tasks import ZooTask

MEMBERS = 3


def perceptron() -> MultiLayerPerceptron:
    return MultiLayerPerceptron(widths=(8,), image_size=8)


def myrtle() -> MyrtleCNN:
    return MyrtleCNN(width=2, in_channels=1, image_size=8)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def digits(batch_size: int) -> DigitsDataModule:
    # 81 images in validation and test: not divisible by 2.
    return DigitsDataModule(batch_size=batch_size, max_samples=81, shift=1)


class Stop(ZooTask):
    """A run that is interrupted after its second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            raise RuntimeError("interrupted")


class Diverging(ZooTask):
    """Member 1 has a weight that is not finite."""

    def on_train_start(self) -> None:
        super().on_train_start()
        if 1 in self.population.numbers:
            next(iter(self.population.member_parameters(1))).data.fill_(torch.nan)


def trainer(folder: Path, strategy: str | None, epochs: int = 2, **changes) -> Trainer:
    parallel = {"devices": 1} if strategy is None else {"devices": 2, "strategy": strategy}
    checkpoint = ModelCheckpoint(
        folder,
        filename="last",
        enable_version_counter=False,
        save_on_train_epoch_end=True,
        auto_insert_metric_name=False,
    )
    return Trainer(
        **{"accelerator": "cpu", "max_epochs": epochs, "enable_progress_bar": False, **parallel, **changes},
        enable_model_summary=False,
        default_root_dir=folder,
        logger=MetricsCSV(folder),
        callbacks=[ZooExport(), ZooReport(), checkpoint],
    )


def fit(
    folder: Path,
    strategy: str | None = None,
    network: Callable[[], Network] = perceptron,
    batch_size: int = 16,
    epochs: int = 2,
    kind: type[ZooTask] = ZooTask,
    ckpt_path: Path | None = None,
    data: DigitsDataModule | None = None,
    **settings,
) -> None:
    task = kind(network(), **{"members": MEMBERS, "optimizer": sgd, "keep": "last", **settings})
    trainer(folder, strategy, epochs).fit(task, data or digits(batch_size), ckpt_path=ckpt_path, weights_only=True)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    errors: dict[str, str] = {}

    def run(name: str, action: Callable[..., None], **settings) -> None:
        try:
            action(folder / name, **{key: value for key, value in settings.items() if key != "note"})
        except Exception as error:
            errors[name + settings.get("note", "")] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"

    # The data shared out: 2 x 16 images see what 1 x 32 sees.
    run("data 1", fit, batch_size=32)
    run("data 2", fit, strategy="ddp_fork")
    run("data 2 norm", fit, strategy="ddp_fork", network=myrtle)
    run("data 2 diverging", fit, strategy="ddp_fork", kind=Diverging)
    # The members shared out.
    for execution in ("loop", "vmap"):
        run(f"members 1 {execution}", fit, network=myrtle, keep="best", execution=execution)
        run(
            f"members 2 {execution}", fit, strategy="ddp_members_fork", network=myrtle, keep="best", execution=execution
        )
    run("members 2 diverging", fit, strategy="ddp_members_fork", kind=Diverging)
    run("too few members", fit, strategy="ddp_members_fork", members=1)
    # What is wrong on one process ends them all.
    one = DigitsDataModule(batch_size=16, val_fraction=0.0007)
    run("one image", fit, strategy="ddp_fork", data=one)
    run("data 2", fit, strategy="ddp_fork", network=myrtle, note=", other architecture")
    for execution in ("loop", "vmap"):
        common = {"strategy": "ddp_members_fork", "epochs": 3, "execution": execution}
        run(f"whole {execution}", fit, **common)
        run(f"part {execution}", fit, kind=Stop, **common)
        run(f"part {execution} resumed", fit, ckpt_path=folder / f"part {execution}" / "last.ckpt", **common)
    run("other world", fit, ckpt_path=folder / "members 2 loop" / "last.ckpt", network=myrtle, keep="best", epochs=3)
    run(
        "other placement",
        fit,
        strategy="ddp_members_fork",
        ckpt_path=folder / "members 1 loop" / "last.ckpt",
        network=myrtle,
        keep="best",
        epochs=3,
    )

    def test(path: Path, strategy: str | None) -> None:
        task = ZooTask(myrtle(), members=MEMBERS, keep="best")
        checkpoint = folder / "members 2 loop" / "last.ckpt"
        found = trainer(path, strategy).test(task, digits(16), ckpt_path=checkpoint, verbose=False, weights_only=True)
        (folder / f"{path.name}.json").write_text(json.dumps(found[0]))

    run("test 1", test, strategy=None)
    run("test 2", test, strategy="ddp_members_fork")
    run("test 2 data", test, strategy="ddp_fork")
    (folder / "errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
