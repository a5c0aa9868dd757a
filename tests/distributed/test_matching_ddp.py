"""Two processes match what one matches."""

import json

import pytest
import torch
from fits import Interrupt, digits, saving
from helpers import assert_same, read_csv

from lightning_sym.callbacks import MatchingReport
from lightning_sym.tasks import MatchingTask

pytestmark = pytest.mark.ddp

# Float32 gradients, added up in another order; moments in float64.
ROUNDING = {"atol": 1e-4, "rtol": 1e-3}


class Unlucky(MatchingTask):
    """Something fails on the second process only."""

    def _match_weights(self, pair):
        if self.trainer.global_rank == 1:
            raise ValueError("unlucky")
        return super()._match_weights(pair)


def scenarios(run, matching_zoo):
    def fit(name, *callbacks, kind=MatchingTask, processes=2, methods=None, **settings):
        task = kind(str(matching_zoo), **({"methods": methods} if methods else {}))
        # 81 validation and test images: not divisible by 2. 1 x 16 images see what 2 x 8 see.
        data = digits(batch_size=16 // processes, max_samples=81)
        callbacks = [MatchingReport(points=3), saving(run.folder / name, "middle", every_n_train_steps=3), *callbacks]
        run.fit(name, task, data, *callbacks, processes=processes, max_epochs=2, **settings)

    fit("2")
    fit("2 without training", methods=["weights", "activations"])
    fit("part", Interrupt("1 0"), fails="RuntimeError: interrupted")
    fit("resumed", ckpt_path=run.folder / "part" / "last.ckpt")
    fit("resumed in the first epoch", ckpt_path=run.folder / "part" / "middle.ckpt")
    fit("unlucky", kind=Unlucky, fails="ValueError: unlucky")
    fit("1", processes=1)


def checkpoint(path):
    return torch.load(path / "last.ckpt", weights_only=True)


def matching(path):
    return checkpoint(path)["matching"]


def test_elements_are_the_same(runs):
    one, two = matching(runs / "1"), matching(runs / "2")
    assert one["pairs"] == two["pairs"] == [[0, 1], [0, 2], [1, 2]]
    for pair, methods in one["elements"].items():
        assert set(methods) == {"weights", "activations", "straight_through"}
        for method in ("weights", "activations"):
            found, expected = two["elements"][pair][method], methods[method]
            assert torch.equal(found["permutation"], expected["permutation"]), (pair, method)
            torch.testing.assert_close(found["log_scale"], expected["log_scale"], **ROUNDING)
        assert torch.equal(two["step"][pair]["permutation"], one["step"][pair]["permutation"])
        torch.testing.assert_close(
            torch.tensor(two["best"][pair]["loss"]), torch.tensor(one["best"][pair]["loss"]), **ROUNDING
        )


def test_latent_networks_are_the_same(runs):
    one, two = (checkpoint(runs / name)["state_dict"] for name in ("1", "2"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, **ROUNDING)


def test_every_image_counts_once_in_the_report(runs):
    one, two = (read_csv(runs / name / "results" / "barriers.csv") for name in ("1", "2"))
    assert len(one) == 3 * 4 * 2
    for a, b in zip(one, two, strict=True):
        assert (a["method"], a["split"]) == (b["method"], b["split"])
        assert float(b["loss_barrier"]) == pytest.approx(float(a["loss_barrier"]), abs=1e-3)
        assert float(b["loss_first"]) == pytest.approx(float(a["loss_first"]), abs=1e-6)
    assert json.loads((runs / "2" / "results" / "summary.json").read_text())["images"] == {"train": 81, "test": 81}


def test_methods_without_training_run_in_two_processes(runs):
    found = matching(runs / "2 without training")
    assert set(found["elements"]["0-1"]) == {"weights", "activations"}


@pytest.mark.parametrize("name", ["resumed", "resumed in the first epoch"])
def test_resumed_matching_of_two_processes_is_uninterrupted(runs, name):
    whole, resumed = matching(runs / "2"), matching(runs / name)
    for pair, methods in whole["elements"].items():
        for method, expected in methods.items():
            found = resumed["elements"][pair][method]
            assert torch.equal(found["permutation"], expected["permutation"]), (pair, method)
            torch.testing.assert_close(found["log_scale"], expected["log_scale"], atol=1e-9, rtol=1e-9)
    assert_same(checkpoint(runs / "2")["state_dict"], checkpoint(runs / name)["state_dict"])
