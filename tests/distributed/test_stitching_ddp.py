"""Two processes stitch what one stitches."""

import functools
import json

import pytest
import torch
from fits import Interrupt, digits, saving
from helpers import assert_same, write_zoo
from pytorch_lightning import Callback

from lightning_sym.callbacks import BatchNormRecalibration
from lightning_sym.networks import MyrtleCNN
from lightning_sym.stitching import FullMap
from lightning_sym.tasks import StitchingTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]

MAPS = ["full", "group", "assignment", "least_squares", "identity"]
# Of assignment, least squares and identity, of two pairs.
UNTRAINED = [5 * pair + offset for pair in range(2) for offset in (2, 3, 4)]
# Float32 gradients, added up in another order.
ROUNDING = {"atol": 1e-4, "rtol": 1e-3}


class Write(Callback):
    """Writes what validation found, on every rank."""

    def on_train_end(self, trainer, task):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        with task.evaluating():
            found = task.evaluate(trainer.datamodule.test_dataloader())
        path = trainer.checkpoint_callback.dirpath
        with open(f"{path}/metrics-{trainer.global_rank}.json", "w") as file:
            json.dump({"metrics": metrics, "test": found, "stopped": task.stopped}, file)


class Unlucky(StitchingTask):
    """Features of the second process are not finite."""

    def on_fit_start(self):
        prepared, unlucky = self.population.prepared, self.trainer.global_rank == 1
        self.population.prepared = lambda images: prepared(images * float("nan") if unlucky else images)
        super().on_fit_start()


class Explodes(FullMap):
    """Its loss is not a number on the second process, from the third step on."""

    def __init__(self, port):
        super().__init__(port)
        self.calls = 0

    def regularization(self):
        self.calls += 1
        one = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        return self.weight.sum() * (float("nan") if one and self.calls > 2 else 0.0)


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    networks = [MyrtleCNN(2, in_channels=1, image_size=8).fresh(number) for number in range(2)]
    return write_zoo(tmp_path_factory.mktemp("norms"), networks, digits(max_samples=81))


def scenarios(run, norms):
    def fit(name, *callbacks, processes=2, kind=StitchingTask, maps=MAPS, batch_norm="frozen", **settings):
        task = kind(
            str(norms),
            pairs=[[0, 1], [1, 0]],
            sites=["activation2"],
            maps=maps,
            batch_norm=batch_norm,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        )
        # 81 validation and test images: not divisible by 2. 1 x 16 images see what 2 x 8 see.
        data = digits(batch_size=16 // processes, max_samples=81)
        # Two full batches of each of two processes are four of one.
        recalibration = BatchNormRecalibration(images=64, batch_size=16)
        middle = saving(run.folder / name, "middle", every_n_train_steps=3)
        callbacks = [recalibration, Write(), middle, *callbacks]
        run.fit(name, task, data, *callbacks, processes=processes, **{"max_epochs": 2, **settings})

    fit("2")
    fit("2 batch", batch_norm="batch")
    fit("2 untrained", maps=["assignment", "identity"], max_epochs=1)
    fit("part", Interrupt("1 0"), batch_norm="batch", fails="RuntimeError: interrupted")
    fit("resumed", ckpt_path=run.folder / "part" / "middle.ckpt", batch_norm="batch")
    fit("unlucky", kind=Unlucky, fails="ValueError: x has values that are not finite")
    fit("explodes", maps=["full", Explodes])
    fit("1", processes=1)


def checkpoint(path):
    return torch.load(path / "last.ckpt", weights_only=True)


def results(path, rank=0):
    return json.loads((path / f"metrics-{rank}.json").read_text())


def test_maps_that_are_fitted_are_the_same(runs):
    one, two = (checkpoint(runs / name)["state_dict"] for name in ("1", "2"))
    found = [name for name in one if int(name.split(".")[2]) in UNTRAINED]
    assert any(name.endswith("assignment") for name in found)
    for name in found:
        torch.testing.assert_close(two[name], one[name], rtol=1e-6, atol=1e-6)  # from sums in float64


def test_every_image_counts_once_and_recalibration_is_exact(runs):
    one, two = results(runs / "1"), results(runs / "2")
    assert one["metrics"].keys() == two["metrics"].keys()
    for name, value in one["metrics"].items():
        # Maps that differ by rounding may tell one image of 81 otherwise, in one stitch.
        assert two["metrics"][name] == pytest.approx(value, abs=1e-3 if "loss" in name else 1.5 / 81), name
        if name.endswith(("assignment", "least_squares", "identity")):  # exact but for rounding of logits
            assert two["metrics"][name] == pytest.approx(value, abs=1e-6), name
    for name, values in one["test"].items():
        for index in UNTRAINED:
            assert two["test"][name][index] == pytest.approx(values[index], abs=1e-6), (name, index)


@pytest.mark.parametrize("name", ["2", "2 batch", "2 untrained"])
def test_all_ranks_find_the_same(runs, name):
    assert results(runs / name, 0) == results(runs / name, 1)


def test_statistics_of_batches_are_the_mean_over_ranks(runs):
    found, frozen = (checkpoint(runs / name)["population"]["records"][0] for name in ("2 batch", "2"))
    start = MyrtleCNN(2, in_channels=1, image_size=8).fresh(1).state_dict()
    name = next(name for name in frozen if name.endswith("running_mean"))
    assert torch.equal(frozen[name], start[name.removeprefix("upper.")])
    assert not torch.equal(found[name], start[name.removeprefix("upper.")])


def test_resumed_in_the_first_epoch_is_uninterrupted(runs):
    whole, resumed = checkpoint(runs / "2 batch"), checkpoint(runs / "resumed")
    assert_same(whole["state_dict"], resumed["state_dict"])
    for index, statistics in whole["population"]["records"].items():
        for key, value in statistics.items():
            torch.testing.assert_close(resumed["population"]["records"][index][key], value, rtol=1e-6, atol=1e-7)
    for index, kept in whole["population"]["kept"].items():
        assert resumed["population"]["kept"][index]["epoch"] == kept["epoch"]
        assert resumed["population"]["kept"][index]["metrics"]["accuracy"] == kept["metrics"]["accuracy"]
    torch.testing.assert_close(resumed["population"]["train_sums"], whole["population"]["train_sums"])


def test_what_one_rank_cannot_use_stops_on_all(runs):
    found = [results(runs / "explodes", rank) for rank in (0, 1)]
    assert found[0]["stopped"] == found[1]["stopped"]
    assert set(found[0]["stopped"]) == {"1", "3"}
    # The others go on as if these were not there.
    one = checkpoint(runs / "1")["state_dict"]
    two = checkpoint(runs / "explodes")["state_dict"]
    for index in range(2):
        torch.testing.assert_close(
            two[f"population.members.{2 * index:04d}.0.weight"],
            one[f"population.members.{5 * index:04d}.0.weight"],
            **ROUNDING,
        )
