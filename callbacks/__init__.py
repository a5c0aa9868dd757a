"""Callbacks: measurements and updates during training, and reports at the end."""

from lightning_sym.callbacks.batch_norm_recalibration import BatchNormRecalibration, RecalibrationTargets
from lightning_sym.callbacks.calibration_report import CalibrationReport
from lightning_sym.callbacks.curvature_monitor import CurvatureMonitor
from lightning_sym.callbacks.curve_geometry import CurveGeometry
from lightning_sym.callbacks.curve_report import CurveReport
from lightning_sym.callbacks.dissection_report import DissectionReport
from lightning_sym.callbacks.ensemble_report import EnsembleReport
from lightning_sym.callbacks.equivalence_report import EquivalenceReport
from lightning_sym.callbacks.fast_geometric_ensemble import FastGeometricEnsemble
from lightning_sym.callbacks.figure_files import FigureFiles
from lightning_sym.callbacks.learning_coefficient import LearningCoefficient
from lightning_sym.callbacks.marginal_likelihood import MarginalLikelihood
from lightning_sym.callbacks.matching_report import MatchingReport
from lightning_sym.callbacks.merging_report import MergingReport
from lightning_sym.callbacks.orbit_report import OrbitReport
from lightning_sym.callbacks.pruning_report import PruningReport
from lightning_sym.callbacks.publishing import (
    publish_figure,
    publish_numbers,
    publish_results,
    publish_table,
    publish_text,
)
from lightning_sym.callbacks.report import RunReport
from lightning_sym.callbacks.rotation_report import RotationReport
from lightning_sym.callbacks.similarity_monitor import SimilarityMonitor
from lightning_sym.callbacks.similarity_of_zoos_report import SimilarityOfZoosReport
from lightning_sym.callbacks.similarity_report import SimilarityReport
from lightning_sym.callbacks.spectrum_report import SpectrumReport
from lightning_sym.callbacks.stitching_report import StitchingReport
from lightning_sym.callbacks.symmetry_monitor import SymmetryMonitor
from lightning_sym.callbacks.symmetry_teleportation import SymmetryTeleportation
from lightning_sym.callbacks.teleportation_report import TeleportationReport
from lightning_sym.callbacks.walk_report import WalkReport
from lightning_sym.callbacks.weight_regression_report import WeightRegressionReport
from lightning_sym.callbacks.zoo_export import ZooExport
from lightning_sym.callbacks.zoo_report import ZooReport
from lightning_sym.reports.equivalence_grids import PlaneGrid

__all__ = [
    "BatchNormRecalibration",
    "CalibrationReport",
    "CurvatureMonitor",
    "CurveGeometry",
    "CurveReport",
    "DissectionReport",
    "EnsembleReport",
    "EquivalenceReport",
    "FastGeometricEnsemble",
    "FigureFiles",
    "LearningCoefficient",
    "MarginalLikelihood",
    "MatchingReport",
    "MergingReport",
    "OrbitReport",
    "PlaneGrid",
    "PruningReport",
    "RecalibrationTargets",
    "RotationReport",
    "RunReport",
    "SimilarityMonitor",
    "SimilarityOfZoosReport",
    "SimilarityReport",
    "SpectrumReport",
    "StitchingReport",
    "SymmetryMonitor",
    "SymmetryTeleportation",
    "TeleportationReport",
    "WalkReport",
    "WeightRegressionReport",
    "ZooExport",
    "ZooReport",
    "publish_figure",
    "publish_numbers",
    "publish_results",
    "publish_table",
    "publish_text",
]
