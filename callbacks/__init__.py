"""What happens between steps and epochs."""

from lightning_sym.callbacks.batch_norm_recalibration import BatchNormRecalibration, RecalibrationTargets
from lightning_sym.callbacks.equivalence_plane import EquivalencePlane, PlaneGrid
from lightning_sym.callbacks.equivalence_walk import EquivalenceWalk
from lightning_sym.callbacks.marginal_likelihood import MarginalLikelihood
from lightning_sym.callbacks.matching_report import MatchingReport
from lightning_sym.callbacks.rotation_penalty import RotationPenalty
from lightning_sym.callbacks.run_report import RunReport
from lightning_sym.callbacks.stitch_penalty import StitchPenalty
from lightning_sym.callbacks.symmetry_monitor import SymmetryMonitor
from lightning_sym.callbacks.zoo_export import ZooExport
from lightning_sym.callbacks.zoo_report import ZooReport

__all__ = [
    "BatchNormRecalibration",
    "EquivalencePlane",
    "EquivalenceWalk",
    "MarginalLikelihood",
    "MatchingReport",
    "PlaneGrid",
    "RecalibrationTargets",
    "RotationPenalty",
    "RunReport",
    "StitchPenalty",
    "SymmetryMonitor",
    "ZooExport",
    "ZooReport",
]
