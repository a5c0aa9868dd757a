"""Three processes find the similarities that one does: whole batches are dealt out, each image counts once."""

import pytest
import torch
from fits import digits
from helpers import read_csv

from lightning_sym.callbacks import SimilarityReport
from lightning_sym.tasks import SimilarityTask

pytestmark = [pytest.mark.ddp, pytest.mark.long]


def scenarios(run, matching_zoo):
    for processes in (3, 1):  # five batches: one of three processes has an empty one
        measures = ["group", "orthogonal", "cka_linear", "cka_max"]
        streamed = {"measure": "cka_linear", "estimator": "minibatch"}
        task = SimilarityTask(str(matching_zoo), measures={**dict.fromkeys(measures), "streamed": streamed})
        data = digits(eval_batch_size=18, max_samples=81)
        run.fit(str(processes), task, data, SimilarityReport(), processes=processes)


def found(path):
    return torch.load(path / "last.ckpt", weights_only=True)["similarity"]


def test_similarities_nulls_and_live_channels_are_the_same(runs):
    one, several = found(runs / "1"), found(runs / "3")
    assert one["images"] == several["images"] == 81
    assert one["live"] == several["live"]
    assert list(one["similarities"]) == ["group", "orthogonal", "cka_linear", "cka_max", "streamed"]
    for measure, kinds in one["similarities"].items():
        assert list(kinds) == ["trained", "untrained", "shuffled"]
        for kind, values in kinds.items():
            assert values.shape == (3, 2, 2)
            torch.testing.assert_close(several["similarities"][measure][kind], values, atol=1e-6, rtol=0)


def test_the_report_is_the_same(runs):
    one, three = (read_csv(runs / name / "results" / "summary.csv") for name in ("1", "3"))
    assert len(one) == len(three) == 5 * 2
    for a, b in zip(one, three, strict=True):
        for column in ("similarity", "untrained", "shuffled", "above_untrained"):
            assert float(b[column]) == pytest.approx(float(a[column]), abs=1e-6)
