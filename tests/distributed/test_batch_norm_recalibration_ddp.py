"""BatchNormRecalibration gives two processes the statistics of one, and gives each its own back."""

import pytest
import torch
from fits import digits, quiet_trainer
from pytorch_lightning import Callback, LightningModule
from torch import nn

from lightning_sym.callbacks import BatchNormRecalibration

pytestmark = [pytest.mark.ddp, pytest.mark.long]

# Sums over float32 activations in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Normed(LightningModule):
    """Two batch norms, whose statistics are other ones on every process."""

    def __init__(self, wrong_rank=None):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.Flatten(),
            nn.Linear(80, 10),
        )  # fmt: skip
        self.wrong_rank = wrong_rank
        self.seen = {}

    def forward(self, x):
        if self.wrong_rank == self.global_rank and not self.trainer.training:
            raise ValueError("wrong on one rank")
        return self.network(x)

    def statistics(self):
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


class Edges(Callback):
    """Gives every process its own statistics, and notes them."""

    def __init__(self, folder):
        self.folder = folder

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
        torch.save(pl_module.seen, f"{self.folder} {trainer.global_rank}.pt")


def scenarios(run):
    def evaluate(folder, devices, stage="test", wrong_rank=None, **settings):
        callbacks = [Edges(folder), BatchNormRecalibration(**settings)]
        strategy = "ddp_fork" if devices > 1 else "auto"
        trainer = quiet_trainer(*callbacks, folder=folder, devices=devices, strategy=strategy, num_sanity_val_steps=0)
        # 80 training images: 40 for each of two processes.
        getattr(trainer, stage)(Normed(wrong_rank), digits(batch_size=16 // devices, eval_batch_size=20))

    def measure(name, devices, **settings):
        run(f"{name} {devices}", evaluate, devices=devices, **settings)

    for devices in (2, 1):
        measure("mean", devices, batch_size=20)
        measure("exact", devices, exact=True, batch_size=7)
        measure("some exact", devices, images=31, exact=True)
    measure("fit", 2, stage="fit", batch_size=10)
    measure("fit kept", 2, stage="fit", keep=True)
    # 4 and 3 images: only one full batch. Before that, an error on one process.
    measure("uneven", 2, images=7, batch_size=4, wrong_rank=1)


@pytest.fixture(scope="module")
def found(runs):
    def load(name, devices=2):
        return [torch.load(runs / f"{name} {devices} {rank}.pt") for rank in range(devices)]

    return load


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", ["mean", "exact", "some exact"])
def test_two_processes_measure_what_one_measures(found, name):
    first, second = found(name)
    (alone,) = found(name, 1)
    assert equal(first["measured"], second["measured"])
    for key, value in first["measured"].items():
        if "exact" not in name or not key.endswith("tracked"):  # with exact the batches may be others
            torch.testing.assert_close(value, alone["measured"][key], **CLOSE)


@pytest.mark.parametrize("name", ["mean", "exact", "uneven", "fit"])
def test_each_process_gets_its_own_back(found, name):
    first, second = found(name)
    assert equal(first["before"], first["after"])
    assert equal(second["before"], second["after"])
    assert not equal(first["before"], second["before"])
    assert not equal(first["measured"], first["after"])
    assert equal(first["measured"], second["measured"])


def test_within_a_fit(found):
    first, second = found("fit")
    assert equal(first["weights"], second["weights"])
    assert equal(first["measured"], second["measured"])
    assert int(first["measured"]["1.num_batches_tracked"]) == 8
    first, second = found("fit kept")
    assert equal(first["after"], second["after"])
    assert equal(first["after"], first["measured"])


def test_batches_that_only_one_process_has(found):
    for one in found("uneven"):
        assert int(one["measured"]["1.num_batches_tracked"]) == 1


def test_an_error_while_recalibrating_on_one_process_is_one_of_both(found):
    for one in found("uneven"):
        assert "wrong on one rank" in one["error"]
        assert equal(one["before"], one["after error"])
