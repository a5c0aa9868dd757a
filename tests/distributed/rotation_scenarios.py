"""Fits of a RotationTask in one and two processes; run by test_rotation_ddp.py in a process of its own, as it forks.

Usage: ``python rotation_scenarios.py FOLDER ZOO``; every scenario leaves its checkpoint and results in a subfolder, and
``FOLDER/errors.json`` says what those that must fail said.
"""

from pathlib import Path

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from scenarios import Scenarios, parallel, paths

from lightning_sym.callbacks import RotationPenalty
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.tasks import RotationTask


class Stop(RotationTask):
    """A run that is interrupted in its second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            raise RuntimeError("interrupted")


def fit(
    folder: Path,
    zoo: Path,
    processes: int = 1,
    batch_size: int = 16,
    kind: type[RotationTask] = RotationTask,
    ckpt_path: Path | None = None,
) -> None:
    checkpoint = ModelCheckpoint(folder, filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
    trainer = Trainer(
        **parallel(processes),
        accelerator="cpu",
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=False,
        callbacks=[RotationPenalty(), checkpoint],
    )
    kinds = ["group", "orthogonal", "none", "undo"]
    task = kind(str(zoo), members=[0, 2], kinds=kinds, repeats=2)
    # 81 validation and test images: not divisible by 2.
    data = DigitsDataModule(batch_size=batch_size, max_samples=81)
    trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True)


def main(folder: Path, zoo: Path) -> None:
    scenarios = Scenarios(folder)

    def run(name: str, **settings) -> None:
        scenarios.run(name, fit, zoo, **settings)

    run("2", processes=2, batch_size=8)
    run("part", kind=Stop, processes=2, batch_size=8)
    run("resumed", processes=2, batch_size=8, ckpt_path=folder / "part" / "last.ckpt")
    # Last: a process that has taken gradients cannot fork. 1 x 16 images see what 2 x 8 see.
    run("1", batch_size=16)
    scenarios.finish()


if __name__ == "__main__":
    main(*paths())
