"""Fits of a MatchingTask in one and two processes; run by test_matching_ddp.py in a process of its own, as it forks.

Usage: ``python matching_scenarios.py FOLDER ZOO``; every scenario leaves its checkpoint and results in a subfolder,
and ``FOLDER/errors.json`` says what those that must fail said.
"""

from collections.abc import Callable
from pathlib import Path

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from scenarios import Scenarios, parallel, paths

from lightning_sym.callbacks import MatchingReport
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.tasks import MatchingTask


class Stop(MatchingTask):
    """A run that is interrupted in its second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            raise RuntimeError("interrupted")


class Unlucky(MatchingTask):
    """Something fails on the second process only."""

    def _match_weights(self, pair):
        if self.trainer.global_rank == 1:
            raise ValueError("unlucky")
        return super()._match_weights(pair)


def fit(
    folder: Path,
    zoo: Path,
    processes: int = 1,
    batch_size: int = 16,
    kind: type[MatchingTask] = MatchingTask,
    ckpt_path: Path | None = None,
    **settings,
) -> None:
    common = {"dirpath": folder, "enable_version_counter": False}
    checkpoint = ModelCheckpoint(**common, filename="last", save_on_train_epoch_end=True)
    middle = ModelCheckpoint(**common, filename="middle", every_n_train_steps=3)
    trainer = Trainer(
        **parallel(processes),
        accelerator="cpu",
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=False,
        callbacks=[MatchingReport(points=3), checkpoint, middle],
    )
    task = kind(str(zoo), **settings)
    # 81 validation and test images: not divisible by 2.
    data = DigitsDataModule(batch_size=batch_size, max_samples=81)
    trainer.fit(task, data, ckpt_path=ckpt_path, weights_only=True)


def main(folder: Path, zoo: Path) -> None:
    scenarios = Scenarios(folder)

    def run(name: str, action: Callable[..., None] = fit, **settings) -> None:
        scenarios.run(name, action, zoo, **settings)

    run("2", processes=2, batch_size=8)
    run("2 without training", processes=2, methods=["weights", "activations"])
    run("part", kind=Stop, processes=2, batch_size=8)
    run("resumed", processes=2, batch_size=8, ckpt_path=folder / "part" / "last.ckpt")
    run("resumed in the first epoch", processes=2, batch_size=8, ckpt_path=folder / "part" / "middle.ckpt")
    run("unlucky", kind=Unlucky, processes=2)
    # Last: a process that has taken gradients cannot fork. 1 x 16 images see what 2 x 8 see.
    run("1", batch_size=16)
    scenarios.finish()


if __name__ == "__main__":
    main(*paths())
