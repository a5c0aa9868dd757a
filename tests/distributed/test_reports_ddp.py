"""Tables of reports: those of two processes are those of one. A new task or report needs a row here."""

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fits import digits
from helpers import randomize_statistics, write_zoo
from pytorch_lightning import Callback, LightningModule

from lightning_sym import callbacks, tasks
from lightning_sym.callbacks import (
    BatchNormRecalibration,
    CalibrationReport,
    OrbitReport,
    RotationReport,
    SimilarityOfZoosReport,
    StitchingReport,
    SymmetryTeleportation,
    TeleportationReport,
    WalkReport,
    WeightRegressionReport,
    ZooExport,
    ZooReport,
)
from lightning_sym.datamodules import GaussianInputsDataModule, ZooWeightsDataModule
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN
from lightning_sym.tasks import (
    AnalyticLandscapesTask,
    EquivalenceTask,
    OrbitTask,
    RotationTask,
    SimilarityOfZoosTask,
    StitchingTask,
    TeleportationTask,
    VariedZooTask,
    WeightRegressionTask,
)

LIMIT = 600  # seconds, for two dozen runs
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
SGD_SMALL = functools.partial(torch.optim.SGD, lr=0.005)
SAID_OF_RUNS = {"seconds", "versions", "world_size", "strategy", "batch_size"}  # not of what they found
NUMBERS = re.compile(r"[\d.]+(e-?\d+)?")


class Fit(NamedTuple):
    """A run.

    Attributes:
        task: The task.
        data: Its data.
        callbacks: Reports, and what they need.
        epochs: Number of epochs.
    """

    task: LightningModule
    data: Any
    callbacks: list[Callback]
    epochs: int = 2


class Row(NamedTuple):
    """A run that is made by one process and by two.

    Attributes:
        make: Returns it, given the folder of zoos, that of the run, and the number of processes that share out a batch.
        tables: Tables of the report with their numbers of rows.
        rounding: How far numbers may be apart, relatively or absolutely; 0: they are the same.
        members: Whether processes share out the members, not the data.
    """

    make: Callable[[Path, Path, int], Fit]
    tables: dict[str, int]
    rounding: float = 0.0
    members: bool = False


def images(share: int, **changes: Any) -> Any:
    """Return 81 images for testing, no multiple of 2; one process sees in a step what two see."""
    return digits(**{"batch_size": 24 // share, "max_samples": 81, **changes})


def orbit(zoos: Path, folder: Path, share: int) -> Fit:
    settings = {"grid": {"bits": [3, 4]}, "arms": ["trained", "random", "orbit"], "images": 16, "steps": 4}
    return Fit(OrbitTask(str(zoos / "perceptrons"), **settings), digits(), [OrbitReport()], 0)


def calibration(zoos: Path, folder: Path, share: int) -> Fit:
    task = AnalyticLandscapesTask(["3x²+5y²", "x^2 y^2", "3x²+5y², SGLD, unstable"], chains=5, steps=300)
    return Fit(task, GaussianInputsDataModule([3, 1, 1], samples=9, batch_size=4), [CalibrationReport()], 0)


def rotation(zoos: Path, folder: Path, share: int) -> Fit:
    kinds = ["group", "orthogonal", "undo"]
    task = RotationTask(str(zoos / "normed"), sites=["activation2"], kinds=kinds, repeats=1, optimizer=SGD)
    task.on_train_batch_start = lambda *_: task.population.eval() and None  # statistics of all images
    return Fit(task, images(share), [RotationReport()])


def similarity_of_zoos(zoos: Path, folder: Path, share: int) -> Fit:
    names = {name: str(zoos / name) for name in ("perceptrons", "normed")}
    task = SimilarityOfZoosTask(names, measures=["group", "orthogonal", "cka_linear", "cka_max"])
    # Five batches: one of two processes has fewer.
    return Fit(task, images(1, eval_batch_size=18), [SimilarityOfZoosReport()], 1)


def stitching(zoos: Path, folder: Path, share: int) -> Fit:
    task = StitchingTask(
        str(zoos / "normed"),
        sites=["activation2", "activation4"],
        pairs=[[0, 1], [1, 0]],
        maps=["full", "group", "lasso", "assignment", "least_squares"],
        batch_norm="frozen",
        optimizer=SGD,
    )
    # Two full batches of each of two processes are four of one.
    return Fit(task, images(share), [BatchNormRecalibration(images=64, batch_size=16), StitchingReport()])


def teleportation(zoos: Path, folder: Path, share: int) -> Fit:
    network = MultiLayerPerceptron(widths=(6,), image_size=8)
    task = TeleportationTask(network, arms=["plain", "teleported"], rates=[0.1, 0.05], seeds=2, optimizer=SGD)
    return Fit(task, images(share), [SymmetryTeleportation([1], images=50, max_steps=2), TeleportationReport()])


def varied_zoo(zoos: Path, folder: Path, share: int) -> Fit:
    network = MultiLayerPerceptron(widths=(6,), image_size=8)
    task = VariedZooTask(network, members=3, epochs=(1, 2), label_noise=(0.2, 0.6))
    return Fit(task, images(share), [ZooExport(str(folder / "zoo")), ZooReport()])


def weight_regression(zoos: Path, folder: Path, share: int) -> Fit:
    task = WeightRegressionTask(str(zoos / "many"), members=5, hidden=4, optimizer=SGD_SMALL)
    data = ZooWeightsDataModule(str(zoos / "many"), batch_size=8 // share)
    return Fit(task, data, [WeightRegressionReport()])


def walk(zoos: Path, folder: Path, share: int) -> Fit:
    network = MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False)
    task = EquivalenceTask(network, members=2, teacher=[0.8, -0.6, 0.7, 0.5], round_steps=4, max_rounds=1)
    data = GaussianInputsDataModule(samples=512, batch_size=128, val_samples=256)
    return Fit(task, data, [WalkReport(steps=6, inputs=20, chains=2)], 1)


ROWS = {
    "orbit": Row(orbit, {"points": 18}),
    "calibration": Row(calibration, {"calibration": 3}, 1e-7),
    "rotation": Row(rotation, {"penalties": 6}, 1e-4),
    "similarity of zoos": Row(similarity_of_zoos, {"summary": 20, "pairs": 76, "channels": 22}, 5e-6),
    "stitching": Row(stitching, {"penalties": 30, "summary": 15}, 1e-4),
    "teleportation": Row(teleportation, {"summary": 2, "rates": 4, "runs": 8, "curves": 16}, 1e-4),
    "teleportation, members": Row(teleportation, {"summary": 2, "rates": 4, "runs": 8, "curves": 16}, 0, members=True),
    "varied zoo": Row(varied_zoo, {"members": 3}, 1e-4),
    "varied zoo, members": Row(varied_zoo, {"members": 3}, members=True),
    "weight regression": Row(weight_regression, {"repeats": 6, "summary": 6, "predictions": 48}, 1e-4),
    "weight regression, members": Row(weight_regression, {"repeats": 6, "summary": 6, "predictions": 48}, members=True),
    "walk": Row(walk, {"walk": 7}, members=True),
}


def scenarios(run):
    zoos = run.folder / "zoos"
    write_zoo(zoos / "perceptrons", [MultiLayerPerceptron([6], image_size=8).fresh(n) for n in range(3)], digits())
    networks = [randomize_statistics(MyrtleCNN(2, in_channels=1, image_size=8).fresh(n), n) for n in range(2)]
    write_zoo(zoos / "normed", networks, digits())
    many = [MultiLayerPerceptron([3], image_size=8).fresh(number) for number in range(30)]
    write_zoo(zoos / "many", many, digits(), [number / 30 for number in range(30)])
    for processes in (2, 1):  # one process comes last: a process that has taken gradients cannot fork
        for name, row in ROWS.items():
            path = f"{name} {processes}"
            fit = row.make(zoos, run.folder / path, 1 if row.members else processes)
            settings = {"processes": processes, "max_epochs": fit.epochs}
            strategy = "ddp_members_fork" if row.members else "ddp_fork"
            run.fit(path, fit.task, fit.data, *fit.callbacks, strategy=strategy, **settings)


def unlike(one: Any, two: Any, rounding: float, where: str) -> Iterator[str]:
    """Yield the places where two documents differ by more than rounding, with what is there."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        for key in one.keys() - SAID_OF_RUNS:
            yield from unlike(one[key], two[key], rounding, f"{where}/{key}")
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            yield from unlike(a, b, rounding, f"{where}/{index}")
    elif isinstance(one, str) and isinstance(two, str):  # sentences with numbers, and folders
        if NUMBERS.sub("", one) != NUMBERS.sub("", two):
            yield f"{where}: {one!r} and {two!r}"
    elif two != (pytest.approx(one, rel=rounding, abs=rounding) if isinstance(one, float) else one):
        yield f"{where}: {one!r} and {two!r}"


@pytest.mark.ddp
@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_tables_of_two_processes_are_those_of_one(name, runs):
    one, two = (runs / f"{name} {processes}" / "results" for processes in (1, 2))
    documents = {
        path.name: [json.loads((at / path.name).read_text()) for at in (one, two)] for path in one.glob("*.json")
    }
    for table, count in ROWS[name].tables.items():
        assert len(documents[f"{table}.json"][0]["rows"]) == count
    found = [line for table, pair in documents.items() for line in unlike(*pair, ROWS[name].rounding, table)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", [tasks, callbacks])
def test_every_task_and_callback_is_in_a_run_of_several_processes(module):
    files = [*Path(__file__).parent.glob("test_*.py"), *Path(__file__).parents[1].glob("conformance/test_*.py")]
    words = set(re.findall(r"\w+", "".join(file.read_text() for file in files)))
    parts = [one for one in map(vars(module).get, module.__all__) if isinstance(one, type)]
    names = {one.__name__ for one in parts if issubclass(one, LightningModule | Callback)}
    assert len(names) > 10
    assert names - words - {"FigureFiles", "RunReport"} == set()  # these measure nothing
