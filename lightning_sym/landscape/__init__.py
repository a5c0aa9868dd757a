"""Weight space: planes, grids, sets of nearly equivalent weights, walks; two_unit/: the exact theory of ReLU lines."""

from lightning_sym._exports import exported
from lightning_sym.landscape.analytic import AnalyticLandscape as AnalyticLandscape
from lightning_sym.landscape.analytic import analytic_landscapes as analytic_landscapes
from lightning_sym.landscape.analytic import reduced_rank_coefficient as reduced_rank_coefficient
from lightning_sym.landscape.embedding import Embedding as Embedding
from lightning_sym.landscape.embedding import umap_embedding as umap_embedding
from lightning_sym.landscape.evaluation import LossSurface as LossSurface
from lightning_sym.landscape.grids import Grid as Grid
from lightning_sym.landscape.grids import GridTooLargeError as GridTooLargeError
from lightning_sym.landscape.grids import evaluate_grid as evaluate_grid
from lightning_sym.landscape.langevin import SGLDSamples as SGLDSamples
from lightning_sym.landscape.langevin import sample_sgld as sample_sgld
from lightning_sym.landscape.learning_coefficients import LearningCoefficientEstimate as LearningCoefficientEstimate
from lightning_sym.landscape.learning_coefficients import learning_coefficient as learning_coefficient
from lightning_sym.landscape.outputs import surfaces as surfaces
from lightning_sym.landscape.planes import WeightPlane as WeightPlane
from lightning_sym.landscape.planes import independent as independent
from lightning_sym.landscape.planes import weight_tensors as weight_tensors
from lightning_sym.landscape.planes import weight_vector as weight_vector
from lightning_sym.landscape.pruning import MagnitudePruning as MagnitudePruning
from lightning_sym.landscape.pruning import PrunedNetwork as PrunedNetwork
from lightning_sym.landscape.pruning import Pruning as Pruning
from lightning_sym.landscape.pruning import PruningSettings as PruningSettings
from lightning_sym.landscape.pruning import PruningStep as PruningStep
from lightning_sym.landscape.pruning import rashomon_pruning as rashomon_pruning
from lightning_sym.landscape.quotient import OrbitDistances as OrbitDistances
from lightning_sym.landscape.quotient import canonical_vectors as canonical_vectors
from lightning_sym.landscape.quotient import orbit_distances as orbit_distances
from lightning_sym.landscape.scale import FunctionScale as FunctionScale
from lightning_sym.landscape.scale import Resolution as Resolution
from lightning_sym.landscape.scale import VolumeExponent as VolumeExponent
from lightning_sym.landscape.scale import resolution as resolution
from lightning_sym.landscape.scale import volume_exponent as volume_exponent
from lightning_sym.landscape.sets import SetNumbers as SetNumbers
from lightning_sym.landscape.sets import betti_numbers as betti_numbers
from lightning_sym.landscape.sets import components as components
from lightning_sym.landscape.sets import describe_set as describe_set
from lightning_sym.landscape.sets import joining_levels as joining_levels
from lightning_sym.landscape.two_unit import Moments as Moments
from lightning_sym.landscape.two_unit import TwoUnitClass as TwoUnitClass
from lightning_sym.landscape.two_unit import is_relu_line as is_relu_line
from lightning_sym.landscape.units import RemovableUnits as RemovableUnits
from lightning_sym.landscape.units import removable_units as removable_units
from lightning_sym.landscape.walks import LevelSetWalk as LevelSetWalk
from lightning_sym.landscape.walks import walk_level_set as walk_level_set

__all__ = exported(globals())
