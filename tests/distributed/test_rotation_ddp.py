"""Two processes train rotated networks as one does."""

import pytest
import torch
from fits import Interrupt, digits
from helpers import assert_same, read_csv

from lightning_sym.callbacks import RotationReport
from lightning_sym.tasks import RotationTask

pytestmark = pytest.mark.ddp

# Float32 gradients, added up in another order, through some steps of Adam.
ROUNDING = {"atol": 1e-4, "rtol": 1e-3}


def scenarios(run, matching_zoo):
    def fit(name, processes=2, *callbacks, **settings):
        kinds = ["group", "orthogonal", "none", "undo"]
        task = RotationTask(str(matching_zoo), members=[0, 2], kinds=kinds, repeats=2)
        # 81 validation and test images: not divisible by 2. 1 x 16 images see what 2 x 8 see.
        data = digits(batch_size=16 // processes, max_samples=81)
        run.fit(name, task, data, RotationReport(), *callbacks, processes=processes, max_epochs=2, **settings)

    fit("2")
    fit("part", 2, Interrupt("1 0"), fails="RuntimeError: interrupted")
    fit("resumed", ckpt_path=run.folder / "part" / "last.ckpt")
    fit("1", 1)


def weights(path):
    return torch.load(path / "last.ckpt", weights_only=True)["state_dict"]


def table(path):
    return read_csv(path / "results" / "penalties.csv")


def test_matrices_and_weights_are_the_same(runs):
    one, two = weights(runs / "1"), weights(runs / "2")
    assert one.keys() == two.keys()
    for name, value in one.items():
        if name.endswith("fixed"):
            assert torch.equal(two[name], value)
        else:
            torch.testing.assert_close(two[name], value, **ROUNDING)
    assert sum(name.endswith("fixed") for name in one) == 2 * 3 * 2


def test_every_image_counts_once_in_the_table(runs):
    one, two = table(runs / "1"), table(runs / "2")
    assert len(one) == 2 * (2 + 2 + 1 + 2)
    for a, b in zip(one, two, strict=True):
        for name in ("member", "site", "kind", "repeat"):
            assert a[name] == b[name]
        for name in ("val_loss", "test_loss"):
            assert float(b[name]) == pytest.approx(float(a[name]), abs=1e-3)
        for name in ("member_val_accuracy", "member_test_accuracy"):
            assert float(b[name]) == pytest.approx(float(a[name]), abs=1e-7)
        # A digit on the border between two classes may fall on the other side.
        assert abs(float(b["test_penalty"]) - float(a["test_penalty"])) < 1.5 / 81


def test_resumed_rotation_of_two_processes_is_uninterrupted(runs):
    assert_same(weights(runs / "2"), weights(runs / "resumed"))
    assert table(runs / "2") == table(runs / "resumed")
