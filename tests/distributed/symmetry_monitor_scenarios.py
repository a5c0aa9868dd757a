"""SymmetryMonitor in one and two processes; run by test_symmetry_monitor_ddp.py in a process of its own, as it forks.

Usage: ``python symmetry_monitor_scenarios.py FOLDER``; every scenario leaves its results in a subfolder, and
``FOLDER/errors.json`` says what went wrong.
"""

import json
import sys
import traceback
import warnings
from pathlib import Path

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_sym.callbacks import SymmetryMonitor
from lightning_sym.cli.metrics_csv import MetricsCSV
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask


class Stop(ZooTask):
    """A run that is interrupted after its second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            raise RuntimeError("interrupted")


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def fit(
    folder: Path,
    strategy: str | None = None,
    batch_size: int = 16,
    kind: type[ZooTask] = ZooTask,
    resume: Path | None = None,
    **settings,
) -> None:
    task = kind(MultiLayerPerceptron(widths=(8, 6), image_size=8), members=3, optimizer=sgd, keep="last")
    parallel = {"devices": 1} if strategy is None else {"devices": 2, "strategy": strategy}
    trainer = Trainer(
        **parallel,
        accelerator="cpu",
        max_epochs=3,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=MetricsCSV(folder),
        callbacks=[
            SymmetryMonitor(**settings),
            ModelCheckpoint(folder, filename="last", enable_version_counter=False, save_on_train_epoch_end=True),
        ],
    )
    data = DigitsDataModule(batch_size=batch_size, max_samples=81)
    trainer.fit(task, data, ckpt_path=resume, weights_only=True)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    errors: dict[str, str] = {}

    def run(name: str, **settings) -> None:
        try:
            fit(folder / name, **settings)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"

    run("data 2", strategy="ddp_fork")
    run("members 2", strategy="ddp_members_fork")
    run("steps 2", strategy="ddp_members_fork", every_n_steps=2, members=[0, 2])  # process 1 watches none
    for name, strategy in (("members", "ddp_members_fork"), ("data", "ddp_fork")):
        run(f"part {name}", strategy=strategy, kind=Stop)
        run(f"resumed {name}", strategy=strategy, resume=folder / f"part {name}" / "last.ckpt")
    # Last: after a backward pass beside the tracer's tensors without data, torch refuses to fork.
    run("data 1", batch_size=32)
    run("members 1")
    (folder / "errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
