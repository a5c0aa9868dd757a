"""Two processes find the elements, and report the midpoints, that one does; the rest is in ``conformance``."""

import json

import pytest
import torch
from fits import Interrupt, digits, saving
from helpers import assert_same, read_csv

from lightning_sym.callbacks import MatchingReport
from lightning_sym.tasks import MatchingTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]


class Unlucky(MatchingTask):
    """Something fails on the second process only."""

    def _match_weights(self, pair, method):
        if self.trainer.global_rank == 1:
            raise ValueError("unlucky")
        return super()._match_weights(pair, method)


def scenarios(run, matching_zoo):
    def fit(name, *callbacks, kind=MatchingTask, processes=2, methods=None, **settings):
        task = kind(str(matching_zoo), methods=methods)
        # 81 validation and test images: not divisible by 2. 1 x 16 images see what 2 x 8 see.
        data = digits(batch_size=16 // processes, max_samples=81)
        callbacks = [MatchingReport(points=3), saving(run.folder / name, "middle", every_n_train_steps=3), *callbacks]
        run.fit(name, task, data, *callbacks, processes=processes, max_epochs=2, **settings)

    fit("2")
    fit("2 without training", methods=["weights", "activations"])
    fit("part", Interrupt("1 0"), fails="RuntimeError: interrupted")
    fit("resumed in the first epoch", ckpt_path=run.folder / "part" / "middle.ckpt")
    fit("unlucky", kind=Unlucky, fails="ValueError: unlucky")
    fit("1", processes=1)


def found(path):
    return torch.load(path / "last.ckpt", weights_only=True)["population"]


def test_elements_are_the_same(runs):
    one, two, untrained = (found(runs / name)["elements"] for name in ("1", "2", "2 without training"))
    assert list(one) == list(two) == list(untrained) == [(0, 1), (0, 2), (1, 2)]
    for pair, methods in one.items():
        assert set(methods) == {"weights", "activations", "straight_through"}
        assert set(untrained[pair]) == {"weights", "activations"}
        for method in ("weights", "activations"):  # of straight-through in the conformance suite
            expected = methods[method]
            for element in (two[pair][method], untrained[pair][method]):
                assert torch.equal(element["parts"]["permutation"], expected["parts"]["permutation"]), (pair, method)
                # Moments in float64, added up in another order.
                torch.testing.assert_close(
                    element["parts"]["log_scale"], expected["parts"]["log_scale"], atol=1e-4, rtol=1e-3
                )


def test_every_image_counts_once_in_the_report(runs):
    one, two = (read_csv(runs / name / "results" / "barriers.csv") for name in ("1", "2"))
    assert len(one) == 3 * 4 * 2
    for a, b in zip(one, two, strict=True):
        assert (a["method"], a["split"]) == (b["method"], b["split"])
        assert float(b["loss_barrier"]) == pytest.approx(float(a["loss_barrier"]), abs=1e-3)
        assert float(b["loss_first"]) == pytest.approx(float(a["loss_first"]), abs=1e-6)
    assert json.loads((runs / "2" / "results" / "summary.json").read_text())["images"] == {"train": 81, "test": 81}


def test_moments_of_two_processes_are_in_a_checkpoint_of_the_first_epoch(runs):
    """Those of both are added up, to be one process's when the run goes on."""
    whole, resumed = (found(runs / name) for name in ("2", "resumed in the first epoch"))
    for pair, methods in whole["elements"].items():
        for method, expected in methods.items():
            element = resumed["elements"][pair][method]
            assert torch.equal(element["parts"]["permutation"], expected["parts"]["permutation"]), (pair, method)
            torch.testing.assert_close(
                element["parts"]["log_scale"], expected["parts"]["log_scale"], atol=1e-9, rtol=1e-9
            )
    assert_same(whole["kept"], resumed["kept"])
