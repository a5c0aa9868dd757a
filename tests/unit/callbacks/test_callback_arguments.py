"""Arguments of callbacks that are out of range are refused by the constructor, by name."""

import math

import pytest
from helpers import refused

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
    WalkReport,
    ZooReport,
)


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
        *(refused(WalkReport, **bad) for bad in ({"step_size": 0}, {"chain_steps": 9}, {"direction": "back"})),
        refused(ZooReport, rows=-1),
    ],
)
def test_arguments_out_of_range_are_refused(refusal):
    refusal()
