"""Two and three processes find the similarities that one does: whole batches are dealt out, each image counts once."""

import pytest
import torch
from fits import digits
from helpers import read_csv

from lightning_sym.callbacks import SimilarityReport
from lightning_sym.tasks import SimilarityTask

pytestmark = pytest.mark.ddp


def scenarios(run, matching_zoo):
    for name, settings in {
        "3": {"processes": 3},  # five batches: one process has an empty one
        "2": {"processes": 2},
        "1": {"processes": 1},
    }.items():
        measures = ["group", "orthogonal", "cka_linear", "cka_max"]
        streamed = {"measure": "cka_linear", "estimator": "minibatch"}
        task = SimilarityTask(str(matching_zoo), measures={**dict.fromkeys(measures), "streamed": streamed})
        data = digits(eval_batch_size=18, max_samples=81)
        run.fit(name, task, data, SimilarityReport(), **settings)


def found(path):
    return torch.load(path / "last.ckpt", weights_only=True)["similarity"]


@pytest.mark.parametrize("processes", ["2", "3"])
def test_similarities_nulls_and_live_channels_are_the_same(runs, processes):
    one, several = found(runs / "1"), found(runs / processes)
    assert one["images"] == several["images"] == 81
    assert one["live"] == several["live"]
    assert list(one["similarities"]) == ["group", "orthogonal", "cka_linear", "cka_max", "streamed"]
    for measure, kinds in one["similarities"].items():
        assert list(kinds) == ["trained", "untrained", "shuffled"]
        for kind, values in kinds.items():
            assert values.shape == (3, 2, 2)
            torch.testing.assert_close(several["similarities"][measure][kind], values, atol=1e-6, rtol=0)


def test_the_report_is_the_same(runs):
    one, two = (read_csv(runs / name / "results" / "summary.csv") for name in ("1", "2"))
    assert len(one) == len(two) == 5 * 2
    for a, b in zip(one, two, strict=True):
        for column in ("similarity", "untrained", "shuffled", "above_untrained"):
            assert float(b[column]) == pytest.approx(float(a[column]), abs=1e-6)
