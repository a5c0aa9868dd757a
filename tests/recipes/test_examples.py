"""The examples and benchmarks run, and what the examples make is what they say."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import example
from torch.nn.functional import gelu

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


def test_error_of_exchanging_gelu_and_a_scale_is_the_sampled_one(tmp_path, capsys):
    module = example("gelu_homogeneity")
    x = torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for t in (0.25, 0.5, 2.0, 10.0):
        sampled = (gelu(t * x) - t * gelu(x)).square()
        tolerance = 5 * float(sampled.std()) / len(x) ** 0.5  # five standard errors
        assert float(module.exchange_error([t])) ** 2 == pytest.approx(float(sampled.mean()), abs=tolerance)
    assert module.exchange_error([0.0, 1.0]).tolist() == pytest.approx([0.0, 0.0], abs=1e-15)
    assert float(module.exchange_error([1e4])) / 1e4 == pytest.approx(module.limit_of_slope(), rel=1e-4)
    module.main(["--out", str(tmp_path)])
    assert f"{module.limit_of_slope():.5f}" in capsys.readouterr().out
    assert (tmp_path / "figure.png").is_file()


FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALLEST = {  # the options by which a benchmark calls what it measures, and little more
    "curvature": "--quick",
    "equivalence": "--rounds 1 --only point",
    "landscape": "--rounds 1 --part curve_steps",
    "learning_coefficient": "--rounds 1",
    "merging": "--rounds 1 --only resnet50",
    "peers": "--rounds 1 --only ckatorch curvlinops",
    "scaling": "",
    "similarity": "--rounds 1 --only max",
    "spectra": "--rounds 1",
    "startup": "--rounds 1",
    "stitching": "--rounds 1 --only step",
    "symmetry": "--rounds 1 --only trace",
    "zoo": "--rounds 1 --steps 2 --part steps",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("[a-z]*.py")))
def test_every_benchmark_runs(tmp_path, name):
    """Nothing else finds that a name is gone which a benchmark calls: to mypy, modules have any attribute."""
    for file in FOLDER.glob("*.py"):
        shutil.copy(file, tmp_path)  # it writes its results beside itself
    subprocess.run([sys.executable, tmp_path / f"{name}.py", *SMALLEST[name].split()], check=True)
