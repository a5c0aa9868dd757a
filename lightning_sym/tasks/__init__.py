"""LightningModules, one per experiment."""

from lightning_sym._exports import exported
from lightning_sym.reports.dissection import Dissected as Dissected
from lightning_sym.tasks.analytic_landscapes import AnalyticLandscapesTask as AnalyticLandscapesTask
from lightning_sym.tasks.analytic_landscapes import Calibrated as Calibrated
from lightning_sym.tasks.curve import CurveName as CurveName
from lightning_sym.tasks.curve import CurveTask as CurveTask
from lightning_sym.tasks.dissection import DissectionTask as DissectionTask
from lightning_sym.tasks.equivalence import EquivalenceTask as EquivalenceTask
from lightning_sym.tasks.equivalence import FoundWeights as FoundWeights
from lightning_sym.tasks.equivariance import EquivarianceTask as EquivarianceTask
from lightning_sym.tasks.fine_tune import FineTuneTask as FineTuneTask
from lightning_sym.tasks.losses import CrossEntropy as CrossEntropy
from lightning_sym.tasks.losses import SquaredDistance as SquaredDistance
from lightning_sym.tasks.matching import MatchingTask as MatchingTask
from lightning_sym.tasks.metrics import PopulationClassification as PopulationClassification
from lightning_sym.tasks.metrics import PopulationLoss as PopulationLoss
from lightning_sym.tasks.orbit import OrbitTask as OrbitTask
from lightning_sym.tasks.population import PopulationTask as PopulationTask
from lightning_sym.tasks.pruning import RashomonPruning as RashomonPruning
from lightning_sym.tasks.rotation import RotationTask as RotationTask
from lightning_sym.tasks.similarity import SimilarityTask as SimilarityTask
from lightning_sym.tasks.similarity_of_zoos import SimilarityOfZoosTask as SimilarityOfZoosTask
from lightning_sym.tasks.stitching import StitchingTask as StitchingTask
from lightning_sym.tasks.strategy import MemberParallelStrategy as MemberParallelStrategy
from lightning_sym.tasks.teleportation import TeleportationTask as TeleportationTask
from lightning_sym.tasks.varied_zoo import VariedZooTask as VariedZooTask
from lightning_sym.tasks.weight_regression import WeightRegressionTask as WeightRegressionTask
from lightning_sym.tasks.zoo import ZooTask as ZooTask

__all__ = exported(globals())
