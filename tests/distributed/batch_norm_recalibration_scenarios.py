"""BatchNormRecalibration in one and two processes; run by test_batch_norm_recalibration_ddp.py, as it forks.

Usage: ``python batch_norm_recalibration_scenarios.py FOLDER``; leaves ``FOLDER/<scenario> <rank>.pt``: the statistics
that a validation saw, those before and after it, the accuracy, or the text of an error.
"""

import sys
import warnings
from pathlib import Path

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_sym.callbacks import BatchNormRecalibration
from lightning_sym.datamodules import DigitsDataModule


class Normed(LightningModule):
    """Two batch norms, whose statistics are other ones on every process."""

    def __init__(self, wrong_rank: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.Flatten(),
            nn.Linear(80, 10),
        )  # fmt: skip
        self.wrong_rank = wrong_rank
        self.seen: dict[str, object] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.wrong_rank == self.global_rank and not self.trainer.training:
            raise ValueError("wrong on one rank")
        return self.network(x)

    def statistics(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.network.named_buffers()}

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.seen["measured"] = self.statistics()
        self.log("accuracy", (self.network(batch[0]).argmax(1) == batch[1]).double().mean(), sync_dist=True)

    test_step = validation_step

    def on_validation_epoch_start(self):
        self.seen["weights"] = {name: value.detach().clone() for name, value in self.network.named_parameters()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def evaluate(folder: Path, name: str, devices: int, *, fit: bool = False, **settings) -> None:
    task = Normed(settings.pop("wrong_rank", None))
    parallel = {"devices": 1} if devices == 1 else {"devices": 2, "strategy": "ddp_fork"}
    trainer = Trainer(
        **parallel,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        callbacks=[Edges(folder, name, devices), BatchNormRecalibration(**settings)],
    )
    # 80 training images: 40 for each of two processes.
    data = DigitsDataModule(batch_size=16 // devices, eval_batch_size=20, max_samples=80)
    if fit:
        trainer.fit(task, data)
    else:
        trainer.test(task, data, verbose=False)


class Edges(Callback):
    """Gives every process its own statistics, and notes them."""

    def __init__(self, folder: Path, name: str, devices: int) -> None:
        self.folder, self.name, self.devices = folder, name, devices

    def on_test_start(self, trainer, pl_module):
        for buffer in pl_module.network.buffers():
            buffer += 1 + trainer.global_rank
        pl_module.seen["before"] = pl_module.statistics()
        if pl_module.wrong_rank is not None:
            try:
                BatchNormRecalibration().recalibrate(trainer, pl_module)
            except ValueError as error:
                pl_module.seen["error"] = str(error)
            pl_module.seen["after error"] = pl_module.statistics()
            pl_module.wrong_rank = None

    on_validation_start = on_test_start

    def teardown(self, trainer, pl_module, stage):
        pl_module.seen["after"] = pl_module.statistics()
        torch.save(pl_module.seen, self.folder / f"{self.name} {self.devices} {trainer.global_rank}.pt")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for devices in (2, 1):
        evaluate(folder, "mean", devices, batch_size=20)
        evaluate(folder, "exact", devices, exact=True, batch_size=7)
        evaluate(folder, "some exact", devices, images=31, exact=True)
    evaluate(folder, "fit", 2, fit=True, batch_size=10)
    evaluate(folder, "fit kept", 2, fit=True, keep=True)
    # 4 and 3 images: only one full batch. Before that, an error on one process.
    evaluate(folder, "uneven", 2, images=7, batch_size=4, wrong_rank=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
