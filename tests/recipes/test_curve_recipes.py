"""The recipe of curves between ResNets runs from end to end, on random images in CIFAR-10's own files."""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torchvision
from commands import QUIET, succeed
from helpers import read_csv

from lightning_sym.connectivity import load_curve
from lightning_sym.datamodules import CIFAR10DataModule
from lightning_sym.zoo import ModelZoo


@pytest.fixture
def cifar10(monkeypatch):
    """Write 5 x 40 training and 40 test images to ``data``; torchvision's sums are replaced by theirs."""
    source, random = torchvision.datasets.CIFAR10, np.random.default_rng(0)
    folder = Path("data") / source.base_folder
    folder.mkdir(parents=True)

    def write(name, content):
        (folder / name).write_bytes(data := pickle.dumps(content))
        return hashlib.md5(data).hexdigest()

    for part in ("train_list", "test_list"):
        contents = {
            name: {"data": random.integers(0, 256, (40, 3072), dtype=np.uint8), "labels": [n % 10 for n in range(40)]}
            for name, _ in getattr(source, part)
        }
        monkeypatch.setattr(source, part, [[name, write(name, content)] for name, content in contents.items()])
    md5 = write(source.meta["filename"], {source.meta["key"]: [str(number) for number in range(10)]})
    monkeypatch.setattr(source, "meta", {**source.meta, "md5": md5})
    monkeypatch.setattr(CIFAR10DataModule, "source_sizes", None)


@pytest.mark.slow
@pytest.mark.usefixtures("cifar10")
@pytest.mark.filterwarnings("ignore:The learning rate comes to its lowest")
def test_curves_between_resnets_are_trained_and_reported():
    short = ("--data.download=false", "--trainer.max_epochs=1", "--data.eval_batch_size=20", *QUIET)
    succeed("fit", "--config", "zoo/cifar10_resnet20", "--model.members=3", *short)
    report = (
        "--trainer.callbacks.points=3",
        "--trainer.callbacks.plane_points=3",
        "--trainer.callbacks.plane_images=8",
    )
    result = succeed("fit", "--config", "curve/cifar10_resnet20", "--model.pairs=[[0,1],[0,2]]", *report, *short)
    results = Path("runs/curve-cifar10-resnet20/results")
    rows = read_csv(results / "curves.csv")
    assert {row["path"] for row in rows} == {"line", "matched", "bezier", "chain"}
    assert all(0 < float(row["loss_lowest"]) <= float(row["loss_highest"]) < 10 for row in rows)
    assert {"along.png", "planes.png", "points.csv", "summary.json"} <= {file.name for file in results.iterdir()}
    curve = load_curve(results / "curve-0-2-bezier.safetensors")
    zoo = ModelZoo.open("runs/zoo-cifar10-resnet20/zoo")
    assert curve.about["members"] == [zoo.member(number).sha256 for number in (0, 2)]
    assert curve.length() > float((curve.points[-1] - curve.points[0]).norm())
    assert "bezier" in result.out.lower()
