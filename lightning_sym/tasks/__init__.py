"""LightningModules, one per experiment."""

from lightning_sym.reports.dissection import Dissected
from lightning_sym.tasks.analytic_landscapes import AnalyticLandscapesTask, Calibrated
from lightning_sym.tasks.curve import CurveName, CurveTask
from lightning_sym.tasks.dissection import DissectionTask
from lightning_sym.tasks.equivalence import EquivalenceTask, FoundWeights
from lightning_sym.tasks.equivariance import EquivarianceTask
from lightning_sym.tasks.fine_tune import FineTuneTask
from lightning_sym.tasks.losses import CrossEntropy, SquaredDistance
from lightning_sym.tasks.matching import MatchingTask
from lightning_sym.tasks.metrics import PopulationClassification, PopulationLoss
from lightning_sym.tasks.orbit import OrbitTask
from lightning_sym.tasks.population import PopulationTask
from lightning_sym.tasks.pruning import RashomonPruning
from lightning_sym.tasks.rotation import RotationTask
from lightning_sym.tasks.similarity import SimilarityTask
from lightning_sym.tasks.similarity_of_zoos import SimilarityOfZoosTask
from lightning_sym.tasks.stitching import StitchingTask
from lightning_sym.tasks.strategy import MemberParallelStrategy
from lightning_sym.tasks.teleportation import TeleportationTask
from lightning_sym.tasks.varied_zoo import VariedZooTask
from lightning_sym.tasks.weight_regression import WeightRegressionTask
from lightning_sym.tasks.zoo import ZooTask

__all__ = [
    "AnalyticLandscapesTask",
    "Calibrated",
    "CrossEntropy",
    "CurveName",
    "CurveTask",
    "Dissected",
    "DissectionTask",
    "EquivalenceTask",
    "EquivarianceTask",
    "FineTuneTask",
    "FoundWeights",
    "MatchingTask",
    "MemberParallelStrategy",
    "OrbitTask",
    "PopulationClassification",
    "PopulationLoss",
    "PopulationTask",
    "RashomonPruning",
    "RotationTask",
    "SimilarityOfZoosTask",
    "SimilarityTask",
    "SquaredDistance",
    "StitchingTask",
    "TeleportationTask",
    "VariedZooTask",
    "WeightRegressionTask",
    "ZooTask",
]
