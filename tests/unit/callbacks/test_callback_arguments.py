"""Arguments of callbacks that are out of range are refused by the constructor, by name."""

import inspect
import math

import pytest
from helpers import assert_refused, refused
from jsonargparse import ArgumentParser
from pytorch_lightning import Callback, LightningModule

from lightning_sym import callbacks, datamodules, tasks
from lightning_sym.callbacks import (
    BatchNormRecalibration,
    CurveGeometry,
    CurveReport,
    EnsembleReport,
    EquivalenceReport,
    MarginalLikelihood,
    MatchingReport,
    PlaneGrid,
    SimilarityMonitor,
    SpectrumReport,
    WalkReport,
    ZooReport,
)


def options(kind):
    return inspect.signature(kind).parameters


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for room in (callbacks, tasks)
        for kind in vars(room).values()
        if inspect.isclass(kind) and issubclass(kind, Callback | LightningModule) and "loss" in options(kind)
    ],
)
@pytest.mark.parametrize("loss", ["lightning_sym.tasks.SquaredDistance", "torch.nn.functional.huber_loss"])
def test_a_loss_is_named_by_its_path(kind, loss):
    """A type of functions that return a tensor would be, to the command line, one of classes that are tensors."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=inspect.signature(kind).parameters["loss"].annotation)
    assert callable(parser.instantiate_classes(parser.parse_args([f"--loss={loss}"])).loss)


SEEDS = [
    (kind, name)
    for room in (callbacks, datamodules, tasks)
    for kind in vars(room).values()
    if inspect.isclass(kind) and not inspect.isabstract(kind)
    for name in options(kind)
    if name == "seed" or name.endswith("_seed")
]


@pytest.mark.parametrize("bad", [2**32, -1, 1.5, True])
@pytest.mark.parametrize(("kind", "name"), SEEDS, ids=lambda one: getattr(one, "__name__", one))
def test_a_seed_is_refused_unless_numpy_and_lightning_take_it(kind, name, bad):
    needed = {key: "zoo" for key, option in options(kind).items() if option.default is option.empty}
    given = {key: {"a": "zoo"} if key == "zoos" else value for key, value in needed.items()}
    assert_refused(kind, **{**given, name: bad}, says=f"{name} must be an integer from 0 to 4294967295, got {bad}.")


@pytest.mark.parametrize(
    "refusal",
    [
        *(refused(BatchNormRecalibration, **bad) for bad in ({"images": 0}, {"batch_size": -1})),
        *(refused(CurveGeometry, **bad) for bad in ({"points": 1}, {"pairs": 0}, {"jacobian_images": 3})),
        *(refused(CurveGeometry, **bad) for bad in ({"probes": 1}, {"density_steps": -1}, {"max_parameters": 0.5})),
        *(refused(CurveReport, **bad) for bad in ({"points": 1}, {"train_batches": 0}, {"planes": -1})),
        *(refused(CurveReport, **bad) for bad in ({"plane_points": 1}, {"plane_images": 0}, {"matching": "functions"})),
        *(refused(EnsembleReport, **bad) for bad in ({"points": 1}, {"train_batches": 0}, {"bins": 0})),
        *(refused(EquivalenceReport, **bad) for bad in ({"epsilon": 0}, {"epsilon_unit": "V"}, {"inputs": 0})),
        *(refused(EquivalenceReport, through=through) for through in ([], "search", ["teacher"])),
        refused(EquivalenceReport, precision="half"),
        *(refused(MarginalLikelihood, **bad) for bad in ({"burn_in": 0}, {"every_n_epochs": 0}, {"steps": 1.5})),
        *(refused(MarginalLikelihood, **bad) for bad in ({"samples": 0}, {"lr": 0.0}, {"engine": "jax"})),
        *(refused(MarginalLikelihood, **bad) for bad in ({"granularity": "per_weight"}, {"ffc": "dense"})),
        refused(MarginalLikelihood, bounds=(1.0, -1.0), says="ascending"),
        *(refused(MatchingReport, **bad) for bad in ({"points": 1}, {"train_batches": 0}, {"recalibrate": "never"})),
        *(refused(PlaneGrid, **bad) for bad in ({"dimension": 0}, {"dimension": 2.0}, {"points": 1}, {"points": 10.0})),
        *(refused(PlaneGrid, **bad) for bad in ({"bound": 0.0}, {"epsilon": math.inf})),
        *(refused(SimilarityMonitor, **bad) for bad in ({"images": 3}, {"reference_member": -1})),
        *(refused(SimilarityMonitor, sites=sites) for sites in ([], "first", ["a", "a"])),
        refused(SimilarityMonitor, measures=["group", "cosine"], says="cosine"),
        *(refused(SpectrumReport, **{name: 0}) for name in ("steps", "probes", "trace_probes", "train_batches")),
        refused(WalkReport, step_size=0),
        refused(ZooReport, rows=-1),
    ],
)
def test_arguments_out_of_range_are_refused(refusal):
    refusal()
