"""The examples run, and what they make is what they say."""

import pytest
from helpers import example

from lightning_sym.zoo import ModelZoo


def test_a_zoo_of_regressors_learns_and_is_written(tmp_path):
    module = example("pixel_regression")
    task, data = module.train(tmp_path, members=2, epochs=6)
    first, last = task.history["val/loss"][0], task.history["val/loss"][-1]
    assert all(b < 0.8 * a for a, b in zip(first, last, strict=True))
    assert not any("accuracy" in name for name in task.history)
    zoo = ModelZoo.open(tmp_path / "zoo")
    images, _ = data.split_tensors("test")
    left, right = task.evaluation_batch((data.normalize(images), None))
    for number in (0, 1):
        error = float((zoo.load(number)(left) - right).detach().square().mean())
        assert zoo.member(number).metrics["test"] == {"loss": pytest.approx(error, rel=1e-5)}
    assert len(module.picture(task, data, count=3).axes) == 9
