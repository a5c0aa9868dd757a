"""Tiny runs of every task with its callbacks on the pretend GPU: fit, interruption, resume, test.

``python scenarios.py [name ...]`` prints a line for each and ends with 1 if one fails; ``1/2`` is every second from the
second on. With ``PRETEND_TRACE=1`` it also lists the places that wait for the device most often.
"""

import collections
import contextlib
import csv
import functools
import io
import logging
import math
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import device
import installation

if __name__ == "__main__" and not installation.real():
    installation.install()
sys.path.append(str(Path(__file__).parents[1]))  # after this folder, which has a scenarios.py too

import fits
import matplotlib as mpl
import pytest
import torch
from architectures import Words
from fits import Interrupt, fit
from helpers import assert_same, checked_cards, replace_traces, too_small, write_zoo
from pytorch_lightning import Callback
from pytorch_lightning.loggers import TensorBoardLogger
from torch.utils.data import TensorDataset

import lightning_sym
from lightning_sym._tags import MOST_CURVES, is_detail
from lightning_sym.callbacks import (
    BatchNormRecalibration,
    CalibrationReport,
    CurvatureMonitor,
    CurveGeometry,
    CurveReport,
    DissectionReport,
    EnsembleReport,
    EquivalenceReport,
    FastGeometricEnsemble,
    LearningCoefficient,
    MarginalLikelihood,
    MatchingReport,
    MergingReport,
    OrbitReport,
    PlaneGrid,
    PruningReport,
    RotationReport,
    SimilarityMonitor,
    SimilarityOfZoosReport,
    SimilarityReport,
    SpectrumReport,
    StitchingReport,
    SymmetryMonitor,
    SymmetryTeleportation,
    TeleportationReport,
    WalkReport,
    WeightRegressionReport,
    ZooExport,
    ZooReport,
    publishing,
)
from lightning_sym.cli.checkpoints import RunCheckpoint
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.datamodules import (
    ConceptsDataModule,
    DatasetDataModule,
    GaussianInputsDataModule,
    Quadrant,
    TensorDataModule,
    ZooWeightsDataModule,
)
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN, Network, RelaxedNetwork
from lightning_sym.stitching import STITCHING_MAPS
from lightning_sym.symmetry import completeness, trace_symmetry
from lightning_sym.tasks import (
    AnalyticLandscapesTask,
    CurveTask,
    DissectionTask,
    EquivalenceTask,
    EquivarianceTask,
    FineTuneTask,
    MatchingTask,
    OrbitTask,
    RashomonPruning,
    RotationTask,
    SimilarityOfZoosTask,
    SimilarityTask,
    SquaredDistance,
    StitchingTask,
    TeleportationTask,
    VariedZooTask,
    WeightRegressionTask,
    ZooTask,
)

ROOT = Path(__file__).parents[2]
ROOMS = (lightning_sym, lightning_sym.callbacks, lightning_sym.datamodules)
PACKAGES = tuple(f"{Path(room.__file__).parent}{os.sep}" for room in ROOMS)
SCENARIOS = {}
EVERYWHERE = collections.Counter()  # with PRETEND_TRACE, where the device was waited for
# Settings of all runs, changed by tools/gpu_check.py.
ACCELERATOR = "gpu"
# Whether each run is repeated on the CPU. The pretend GPU computes the CPU's numbers, but draws other random ones.
AGAINST_CPU = installation.real()
# Of what is logged: relative to its size, and at least. After a few steps of Adam rounding is as large as this.
TOLERANCES = {"full": (0.02, 0.005), "half": (0.1, 0.03)}
DIFFERENCES = []  # from the CPU, in the order found: the largest, in tolerances, with tag and both numbers


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


# ---- one run


class Watch(Callback):
    """Checks that a fit is on the device, and counts what waits for it within steps."""

    def __init__(self, on):
        self.on = on
        self.waits = collections.Counter()

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        for tensor in (*(batch if isinstance(batch, (list, tuple)) else [batch]), *task.parameters()):
            assert tensor.device.type == self.on, f"on {tensor.device}"
        self.recording = device.recorded_waits(self.waits)
        self.recording.__enter__()

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.recording.__exit__(None, None, None)


def run(
    folder,
    make_task,
    make_callbacks,
    make_data,
    interrupt="1 1",
    waits=False,
    accelerator=None,
    tests=True,
    **settings,
):
    """Fit and test; fit as far as an interruption, and resume; the same has to come out.

    Args:
        folder: For all files.
        make_task: Makes the task.
        make_callbacks: Makes its callbacks, given the folder of the run.
        make_data: Makes the data.
        interrupt: Where, see `fits.Interrupt`; None: nowhere.
        waits: Whether steps may wait for the device.
        accelerator: Accelerator of the trainer; default ``ACCELERATOR``, and then the CPU too if ``AGAINST_CPU``.
        tests: Whether the task has a test.
        settings: Settings of the trainer.

    Returns:
        The task of the uninterrupted run.
    """

    def once(name, place="", resumed=None, accelerator=accelerator or ACCELERATOR):
        torch.manual_seed(0)
        path = folder / name
        watch, task, data = Watch("cuda" if accelerator == "gpu" else "cpu"), make_task(), make_data()
        saving = RunCheckpoint(
            path, filename="last", enable_version_counter=False, every_n_train_steps=1, save_on_train_epoch_end=True
        )
        callbacks = [Interrupt(place), watch, *make_callbacks(path), saving]
        loggers = [MetricsCSV(path), TensorBoardLogger(path, "", "")]
        options = {"max_epochs": 2, "accelerator": accelerator, "devices": 1, "logger": loggers, **settings}
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            trainer = fit(task, data, *callbacks, folder=path, ckpt_path=resumed, **options)
        assert_at_a_glance(said.getvalue(), path / "metrics.csv")
        if resumed is None and tests:
            trainer.test(task, data, verbose=False)
        ours = {site: count for site, count in watch.waits.items() if site.startswith(PACKAGES)}
        assert waits or not ours, f"steps wait for the device: {ours}"
        return task

    task = once("whole")
    if AGAINST_CPU and accelerator is None:
        once("cpu", accelerator="cpu")
        precision = "half" if "16" in str(settings.get("precision")) else "full"
        assert_near(folder / "cpu" / "metrics.csv", folder / "whole" / "metrics.csv", *TOLERANCES[precision])
    if interrupt is not None:
        with pytest.raises(RuntimeError, match="interrupted"):
            once("first", interrupt)
        once("second", resumed=folder / "first" / "last.ckpt")
        whole, second = (
            torch.load(folder / name / "last.ckpt", "cpu", weights_only=True) for name in ("whole", "second")
        )
        for key in whole.keys() - {"loops", "callbacks"}:  # which hold folders, and counts of restarts
            assert_same(whole[key], second[key], key)
    return task


def logged(file):
    """Return what a run has logged by step and tag, but times and memory."""
    if not file.exists():
        return {}
    with file.open() as rows:
        return {
            (row["step"], tag): float(value)
            for row in csv.DictReader(rows)
            for tag, value in row.items()
            if value and not re.match("time|memory|step|epoch", tag)
        }


def assert_near(expected, found, relative, absolute):
    """Check that losses agree, and that the same was logged; note the largest difference of anything else.

    Accuracies, ranks and what depends on an assignment jump where a rounding decides.
    """
    expected, found = logged(expected), logged(found)
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    differences = [
        (abs(number - found[key]) / (absolute + relative * abs(number)), *key, number, found[key])
        for key, number in expected.items()
        if number != found[key] and not (math.isnan(number) and math.isnan(found[key]))
    ]
    DIFFERENCES.append(max(differences, default=(0.0, "", "", 0.0, 0.0)))
    far = [one for one in sorted(differences, reverse=True) if not one[0] <= 1 and "loss" in one[2]]
    assert not far, f"{len(far)} losses differ from the CPU's: in tolerances, step, tag, CPU, here: {far[:4]}"


# What the summary of a run says about files may be as long as their names are.
FILES = re.compile(r"  \w{1,7} +\S*/|  watch ")


def assert_at_a_glance(said, metrics):
    """Check that what a fit prints fits on 80 columns, with all numbers, and what it logs on a page of TensorBoard."""
    wide = [line for line in said.splitlines() if len(line.rstrip()) > 80 and not FILES.match(line)]
    assert not wide, wide
    assert not re.search(r"\d…", said), said
    tags = metrics.read_text().partition("\n")[0].split(",") if metrics.exists() else []
    above = [tag for tag in tags if not is_detail(tag) and tag not in ("step", "epoch")]
    assert len(above) < MOST_CURVES, above


# ---- what runs are made of

adam = functools.partial(torch.optim.Adam, lr=0.01)
digits = functools.partial(fits.digits, max_samples=48)
cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=2)


def perceptron():
    return MultiLayerPerceptron(widths=(6,), image_size=8, in_channels=1)


def myrtle():
    return MyrtleCNN(2, in_channels=1, image_size=8)


def zoo_at(folder, make=myrtle, members=2, data=digits):
    return str(write_zoo(folder, [make().fresh(number) for number in range(members)], data()))


# ---- zoos


def zoo(folder, execution, network=perceptron, callbacks=(), prior_precision=None, **settings):
    task = functools.partial(ZooTask, members=2, execution=execution, optimizer=adam, lr_scheduler=cosine)
    return run(
        folder,
        lambda: task(network(), prior_precision=prior_precision),
        lambda path: [ZooExport(str(path / "zoo")), ZooReport(), *(make(path) for make in callbacks)],
        digits,
        **settings,
    )


def evidence(path, **changes):
    return MarginalLikelihood(
        **{"burn_in": 1, "every_n_epochs": 1, "steps": 2, "dirpath": str(path / "results"), **changes}
    )


SCENARIOS |= {
    "zoo_loop": functools.partial(zoo, execution="loop"),
    "zoo_vmap": functools.partial(zoo, execution="vmap"),
    "zoo_loop_batch_norm_double": functools.partial(zoo, execution="loop", network=myrtle, precision="64-true"),
    "zoo_vmap_batch_norm": functools.partial(zoo, execution="vmap", network=myrtle),
    "zoo_bfloat16": functools.partial(zoo, execution="vmap", precision="bf16-true"),
    "zoo_mixed_precision": functools.partial(zoo, execution="loop", precision="bf16-mixed"),
    "zoo_deterministic": functools.partial(zoo, execution="vmap", network=myrtle, deterministic=True, interrupt=None),
    "zoo_evidence_loop": functools.partial(
        zoo, execution="loop", callbacks=[functools.partial(evidence, samples=1)], prior_precision=1.0
    ),
    "zoo_evidence_vmap": functools.partial(zoo, execution="vmap", callbacks=[evidence], prior_precision=1.0),
}


@scenario
def zoo_varied(folder):
    """Settings of each member, and learning on the weights of such a zoo."""
    for execution in ("loop", "vmap"):
        run(
            folder / execution,
            lambda: VariedZooTask(perceptron(), members=2, execution=execution),  # noqa: B023
            lambda path: [ZooExport(str(path / "zoo"))],
            digits,
        )


@scenario
def weight_regression(folder):
    accuracies = [number / 12 for number in range(12)]
    zoo = str(write_zoo(folder / "zoo", [perceptron().fresh(n) for n in range(12)], digits(), accuracies))
    run(
        folder,
        lambda: WeightRegressionTask(zoo, members=5, hidden=4),
        lambda path: [WeightRegressionReport(dirpath=str(path / "results"))],
        lambda: ZooWeightsDataModule(zoo, batch_size=4),
        interrupt="1 0",
        waits=True,  # for random elements, which are drawn on the CPU
    )


@scenario
def zoo_of_tensors(folder):
    """Floats with classes and with values, and tokens, in place of images."""
    source = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(48, 2, 7, generator=source), torch.arange(48) % 3
    spectra = functools.partial(TensorDataModule, standardize=True, batch_size=8)
    for name, targets, loss in (("classes", labels, None), ("values", inputs.mean((1, 2)), SquaredDistance())):
        data = functools.partial(spectra, (inputs, targets))
        network = MultiLayerPerceptron([4], in_channels=2, image_size=(7, 1), num_classes=data().num_classes)
        run(
            folder / name,
            lambda: ZooTask(network, members=2, execution="vmap", loss=loss, prior_precision=1.0, optimizer=adam),  # noqa: B023
            lambda path: [ZooExport(str(path / "zoo")), ZooReport(), evidence(path)],
            data,
        )
    tokens = functools.partial(
        DatasetDataModule, TensorDataset(torch.arange(192).view(48, 4) % 11, labels), batch_size=8
    )
    run(
        folder / "tokens",
        lambda: ZooTask(Network.wrap(Words), members=2, optimizer=adam),
        lambda path: [ZooReport()],
        tokens,
    )


@scenario
def zoo_monitored(folder):
    monitored = functools.partial(ZooTask, myrtle(), members=2, optimizer=adam)
    run(folder, monitored, lambda path: [SymmetryMonitor(members=[0]), SimilarityMonitor(reference=myrtle())], digits)


@scenario
def zoo_learning_coefficients(folder):
    task = functools.partial(ZooTask, perceptron(), members=2, optimizer=adam)
    settings = {"chains": 3, "steps": 44}
    make = lambda _: [  # noqa: E731
        LearningCoefficient(every_n_epochs=1, **settings),
        LearningCoefficient(method="sgld", batch_size=8, execution="loop", prefix="batches", members=[0], **settings),
    ]
    run(folder, task, make, digits)


@scenario
def zoo_of_snapshots(folder):
    zoo_at(folder / "zoo")
    task = functools.partial(ZooTask, myrtle(), members=2, optimizer=adam, keep="last", initial=str(folder / "zoo"))
    run(
        folder,
        task,
        lambda path: [
            FastGeometricEnsemble(0.01, 1e-4, cycle_steps=2, points=2),
            EnsembleReport(dirpath=str(path / "members")),
        ],
        digits,
    )


@scenario
def zoo_with_curvature(folder):
    monitored = functools.partial(ZooTask, myrtle(), members=1, optimizer=adam)
    monitor = functools.partial(CurvatureMonitor, probes=2, train_batches=1, tolerance=0.1)
    report = functools.partial(SpectrumReport, steps=4, probes=1, trace_probes=2, tolerance=0.1, train_batches=1)
    run(folder, monitored, lambda path: [monitor(), report()], digits)


class Poison(Callback):
    """Makes the weights of member 1 NaN before the fifth step, in the second epoch."""

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_step == 4:
            state = task.population.member_state(1)
            task.population.set_member_state(1, {name: value * torch.nan for name, value in state.items()})


@scenario
def zoo_diverging(folder):
    """A member that diverges stops at the same step as on the CPU, with the same weights kept."""
    for execution in ("loop", "vmap"):
        tasks = [
            run(
                folder / execution / f"on_{accelerator}",
                lambda: ZooTask(perceptron(), members=3, execution=execution, optimizer=adam, keep="last"),  # noqa: B023
                lambda path: [Poison()],
                digits,
                interrupt=None,
                accelerator=accelerator,
            )
            for accelerator in ("cpu", ACCELERATOR)
        ]
        expected, found = tasks
        near = {"rtol": 1e-2, "atol": 2e-3} if AGAINST_CPU else {}  # where sums have another order
        assert found.stopped == expected.stopped
        assert found.stopped[1]["step"] == 4
        assert found.kept.keys() == expected.kept.keys()
        for number, record in expected.kept.items():
            assert found.kept[number]["epoch"] == record["epoch"]
            for name, value in record["state"].items():
                torch.testing.assert_close(found.kept[number]["state"][name].cpu(), value.cpu(), **near)
        for name, rows in expected.history.items():
            torch.testing.assert_close(torch.tensor(found.history[name]), torch.tensor(rows), **near, equal_nan=True)


# ---- stitching, rotation, matching


def of_a_zoo(folder, task, callbacks, make=myrtle, members=2, **settings):
    """Run a task on a zoo, which is its first argument; callbacks are functions."""
    path = zoo_at(folder / "zoo", make, members)
    run(folder, lambda: task(path), lambda _: [make_one() for make_one in callbacks], digits, **settings)


stitch = functools.partial(StitchingTask, pairs=[[0, 1]])
recalibration = functools.partial(BatchNormRecalibration, images=16)
barriers = functools.partial(MatchingReport, points=3)
ALL_MAPS = ["rank(1)" if name == "rank" else name for name in STITCHING_MAPS]
MEASURES = ["group", "orthogonal", "cka_linear", "cka_max", "cka_laplace"]
ROTATIONS = ["group", "orthogonal", "none", "undo"]
SCENARIOS |= {
    "stitching": functools.partial(
        of_a_zoo,
        task=functools.partial(
            stitch, sites=["activation2"], maps=["full", "group", "assignment", "lasso"], head_start=0.5
        ),
        callbacks=[recalibration, StitchingReport],
        waits=True,  # for the projection of doubly stochastic matrices
    ),
    "stitching_unprojected": functools.partial(
        of_a_zoo,
        task=functools.partial(stitch, sites=["activation2"], maps=["full", "lasso"]),
        callbacks=[StitchingReport],
    ),
    "stitching_all_maps": functools.partial(
        of_a_zoo,
        task=functools.partial(stitch, maps=ALL_MAPS, head_start=0.5),
        callbacks=[StitchingReport],
        make=perceptron,
        waits=True,
    ),
    "rotation": functools.partial(
        of_a_zoo,
        task=functools.partial(RotationTask, sites=["activation2"], kinds=ROTATIONS, repeats=1),
        callbacks=[RotationReport],
        members=1,
    ),
    "matching": functools.partial(
        of_a_zoo,
        task=functools.partial(MatchingTask, methods=["weights", "activations"]),
        callbacks=[barriers],
        interrupt="0 1",
        waits=True,  # for the check of activations in the one epoch that there is
    ),
    "matching_straight_through": functools.partial(
        of_a_zoo,
        task=MatchingTask,
        callbacks=[barriers],
        make=perceptron,
        interrupt="0 1",
        waits=True,  # for the assignments, which are made on the CPU in every step
    ),
    "pruning": functools.partial(
        of_a_zoo,
        task=functools.partial(RashomonPruning, epsilon=0.5, steps=2, fraction=0.3, tries=2),
        callbacks=[PruningReport],
        members=1,
        interrupt="0 1",
        waits=True,  # for the losses that decide
    ),
    "merging": functools.partial(
        of_a_zoo,
        task=lambda path: FineTuneTask(perceptron(), zoo=path, members=3, optimizer=adam),
        callbacks=[MergingReport],
        make=perceptron,
        waits=True,  # for alignments, which are computed on the CPU
    ),
    "teleportation": functools.partial(
        of_a_zoo,
        task=lambda path: TeleportationTask(perceptron(), arms=["plain", "ascent"], rates=[0.1]),
        callbacks=[
            functools.partial(SymmetryTeleportation, [1], arm="ascent", max_steps=2),
            functools.partial(SymmetryTeleportation, every_n_steps=2, way="balance", arm="plain"),
            TeleportationReport,
        ],
        make=perceptron,
        waits=True,  # for the elements, which are computed on the CPU
    ),
    "curve_geometry": functools.partial(
        of_a_zoo,
        task=functools.partial(CurveTask, kinds=["bezier"]),
        callbacks=[functools.partial(CurveGeometry, points=2, images=8, jacobian_images=4, probes=2, density_steps=2)],
        make=lambda: MultiLayerPerceptron(widths=(2,), image_size=8, in_channels=1),
        interrupt="0 1",
        waits=True,  # for eigenvalues, which are computed on the CPU
    ),
    "curve_loop_batch_norm": functools.partial(
        of_a_zoo,
        task=functools.partial(CurveTask, matched="activations", decay=1e-3),
        callbacks=[
            functools.partial(CurveReport, points=3, plane_points=3),
            functools.partial(EnsembleReport, points=3),
        ],
    ),
    "curve_vmap": functools.partial(
        of_a_zoo,
        task=functools.partial(CurveTask, execution="vmap"),
        callbacks=[functools.partial(CurveReport, points=3, plane_points=3)],
        make=perceptron,
    ),
    "similarity": functools.partial(
        of_a_zoo,
        task=functools.partial(
            SimilarityTask, measures=["group", "orthogonal", "cka_linear", "cka_max", "cka_laplace"]
        ),
        callbacks=[SimilarityReport],
        interrupt=None,  # the one epoch that there is trains nothing
        waits=True,  # for the check that features are finite
        tests=False,
    ),
}


@scenario
def similarity_of_zoos(folder):
    zoos = {"a": zoo_at(folder / "a", perceptron), "b": zoo_at(folder / "b", myrtle)}
    task = functools.partial(SimilarityOfZoosTask, zoos, measures=["group", "cka_linear"])
    reports = lambda _: [SimilarityOfZoosReport()]  # noqa: E731
    run(folder, task, reports, digits, interrupt=None, waits=True, tests=False)


@scenario
def dissection(folder):
    concepts = functools.partial(ConceptsDataModule, max_samples=40)
    path = zoo_at(folder / "zoo", lambda: MyrtleCNN(2, image_size=32, num_classes=40), 1, concepts)
    run(
        folder,
        lambda: DissectionTask({"small": path}, alphas=[0.0, 1.0]),
        lambda _: [DissectionReport()],
        concepts,
        interrupt=None,
        tests=False,
        max_epochs=0,
    )


@scenario
def orbit(folder):
    by_hand = ["trained", "random", "balanced", "equalized", "smooth_quant"]
    of = {
        "quantization_error": {"grid": {"bits": [3, 4]}, "options": {"activations": 8}, "arms": [*by_hand, "orbit"]},
        "sparsity": {"grid": {"fraction": [0.5]}, "arms": ["trained", "wanda", "scales"]},
        "sharpness": {"grid": {"kind": ["trace", "top"]}, "arms": ["trained", "orbit"]},
    }
    for objective, settings in of.items():
        of_a_zoo(
            folder / objective,
            functools.partial(OrbitTask, objective=objective, images=8, steps=2, **settings),
            [OrbitReport],
            perceptron,
            interrupt=None,
            tests=False,
            max_epochs=0,
        )


@scenario
def calibration(folder):
    run(
        folder,
        lambda: AnalyticLandscapesTask(chains=4, steps=44),
        lambda _: [CalibrationReport()],
        lambda: GaussianInputsDataModule([3, 1, 1], samples=8, batch_size=8),
        interrupt=None,
        tests=False,
        max_epochs=0,
    )


# ---- equivalence


search = functools.partial(EquivalenceTask, tolerance=1e6, held_out=1e6)


def equivalence(folder, execution, *callbacks, **data):
    task = functools.partial(
        search,
        **{"members": 4, "points": 3, "teacher": [0.8, -0.6, 0.7, 0.5], "execution": execution, "milestones": [1e-3]},
        optimizer=functools.partial(torch.optim.Adam, lr=0.05),
    )
    run(
        folder,
        lambda: task(MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False)),
        lambda _: [make() for make in callbacks],
        lambda: GaussianInputsDataModule(samples=128, batch_size=32, val_samples=64, **data),
        precision="64-true",
        interrupt="0 1",
    )


def plane(*grids):
    return lambda: EquivalenceReport(list(grids), epsilon=0.5, limit_seconds=None)


SCENARIOS |= {
    "equivalence_plane": lambda folder: equivalence(folder, "vmap", plane(PlaneGrid(1, 9), PlaneGrid(2, 9))),
    "equivalence_plane_of_fresh_inputs": lambda folder: equivalence(folder, "loop", plane(PlaneGrid(2, 5)), fresh=True),
    "equivalence_walk": lambda folder: equivalence(folder, "vmap", lambda: WalkReport(steps=3, step_size=0.05)),
    "equivalence_of_a_member": functools.partial(
        of_a_zoo,
        task=lambda path: search(perceptron(), zoo=path, members=3, points=2, optimizer=adam),
        callbacks=[plane(PlaneGrid(1, 5))],
        make=perceptron,
        members=1,
        interrupt="0 1",
    ),
}


@scenario
def equivalence_of_a_network_with_buffers(folder):
    """A teacher given as numbers stays where its network is, buffers and parameters together."""
    numbers = torch.cat([parameter.flatten() for parameter in myrtle().parameters()]).tolist()
    there = "cuda" if ACCELERATOR == "gpu" else "cpu"
    for network in (myrtle(), myrtle().to(there)):
        task = EquivalenceTask(network, members=2, teacher=numbers)
        with torch.device(there):  # as Lightning calls it
            task.configure_model()
        places = {tensor.device for tensor in (*network.buffers(), *task.teacher.parameters(), *task.teacher.buffers())}
        assert len(places) == 1, places
    run(
        folder,
        lambda: search(myrtle(), members=2, teacher=numbers),
        lambda path: [],
        digits,
        interrupt="0 1",
    )


# ---- equivariance


def equivariance(folder, **changes):
    run(
        folder,
        lambda: EquivarianceTask(RelaxedNetwork(width=1, grid=16, in_channels=1), optimizer=adam),
        lambda path: [evidence(path, **changes)],
        lambda: digits(transforms=[Quadrant("digit")]),
    )


SCENARIOS |= {
    "equivariance_autograd_samples": functools.partial(equivariance, samples=1),
    "equivariance_backpack": functools.partial(equivariance, engine="backpack"),
    "equivariance_backpack_samples": functools.partial(equivariance, engine="backpack", samples=1),
    "equivariance_autograd": equivariance,
}


@scenario
def averaged_weights(folder):
    """The callbacks that the guide to stitching recommends, word for word."""
    guide = (ROOT / "docs" / "stitching.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "WeightAveraging" in block]

    def callbacks(path):
        namespace = {}
        exec(code, namespace)
        return namespace["averaging"]

    run(folder, lambda: EquivarianceTask(myrtle(), optimizer=adam), callbacks, digits)


# ---- all of them


def attempt(name):
    """Run a scenario in a folder of its own; return what it raised, or None."""
    said = io.StringIO()
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        try:
            SCENARIOS[name](Path(folder))
        except Exception as error:
            return error
        finally:  # a trainer leaves its own setting behind
            torch.use_deterministic_algorithms(strict[0], warn_only=strict[1])
    return None


def explain(error):
    """Return an error with the innermost places of ours, as text."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    places = " <- ".join(f"{frame.filename}:{frame.lineno}" for frame in frames[::-1][:6])
    return f"{type(error).__name__}: {str(error)[:500]}\n      {places}"


def prepare():
    """Settle what all runs share."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    mpl.use("agg")
    torch.set_num_threads(1)
    publishing.publish_figure = functools.partial(publish_if_readable, publishing.publish_figure)
    publishing.cards = checked_cards
    # functions.py runs the self-test and measures a nullity; here they would take most of the time.
    completeness.MOST_PARAMETERS = 0
    replace_traces(lambda *arguments, **options: trace_symmetry(*arguments, **{**options, "check": False}))


def publish_if_readable(publish, trainer, figure, tag, file):
    """Check that what is in a figure can be read in TensorBoard without a click."""
    assert not too_small(figure), (tag, too_small(figure))
    publish(trainer, figure, tag, file)


def main(names):
    prepare()
    if names and (part := re.fullmatch(r"(\d)/(\d)", names[0])):
        names = list(SCENARIOS)[int(part[1]) :: int(part[2])]
    failed = False
    with device.recorded_waits(EVERYWHERE) if os.environ.get("PRETEND_TRACE") else contextlib.nullcontext():
        for name in names or SCENARIOS:
            start = time.process_time()
            error = attempt(name)
            failed = failed or error is not None
            said = "ok  " if error is None else f"FAIL {explain(error)}"
            print(f"{name} ({time.process_time() - start:.1f} s): {said}", flush=True)
    for site, count in EVERYWHERE.most_common(25):
        print(count, site)
    if device.SUSPICIONS:
        print("copies: FAIL", dict(device.SUSPICIONS))
    return failed or bool(device.SUSPICIONS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
