"""Weight space: planes, grids, sets of nearly equivalent weights, walks; two_unit/: the exact theory of ReLU lines."""

from lightning_sym.landscape.analytic import AnalyticLandscape, analytic_landscapes, reduced_rank_coefficient
from lightning_sym.landscape.embedding import Embedding, umap_embedding
from lightning_sym.landscape.evaluation import LossSurface
from lightning_sym.landscape.grids import Grid, GridTooLargeError, evaluate_grid
from lightning_sym.landscape.langevin import SGLDSamples, sample_sgld
from lightning_sym.landscape.learning_coefficients import LearningCoefficientEstimate, learning_coefficient
from lightning_sym.landscape.outputs import surfaces
from lightning_sym.landscape.planes import WeightPlane, independent, weight_tensors, weight_vector
from lightning_sym.landscape.pruning import (
    MagnitudePruning,
    PrunedNetwork,
    Pruning,
    PruningSettings,
    PruningStep,
    rashomon_pruning,
)
from lightning_sym.landscape.quotient import OrbitDistances, canonical_vectors, function_distances, orbit_distances
from lightning_sym.landscape.scale import FunctionScale, Resolution, VolumeExponent, resolution, volume_exponent
from lightning_sym.landscape.sets import SetNumbers, describe_set
from lightning_sym.landscape.topology import betti_numbers, components, joining_levels
from lightning_sym.landscape.two_unit import Moments, TwoUnitClass, is_relu_line
from lightning_sym.landscape.units import RemovableUnits, removable_units
from lightning_sym.landscape.walks import LevelSetWalk, walk_level_set

__all__ = [
    "AnalyticLandscape",
    "Embedding",
    "FunctionScale",
    "Grid",
    "GridTooLargeError",
    "LearningCoefficientEstimate",
    "LevelSetWalk",
    "LossSurface",
    "MagnitudePruning",
    "Moments",
    "OrbitDistances",
    "PrunedNetwork",
    "Pruning",
    "PruningSettings",
    "PruningStep",
    "RemovableUnits",
    "Resolution",
    "SGLDSamples",
    "SetNumbers",
    "TwoUnitClass",
    "VolumeExponent",
    "WeightPlane",
    "analytic_landscapes",
    "betti_numbers",
    "canonical_vectors",
    "components",
    "describe_set",
    "evaluate_grid",
    "function_distances",
    "independent",
    "is_relu_line",
    "joining_levels",
    "learning_coefficient",
    "orbit_distances",
    "rashomon_pruning",
    "reduced_rank_coefficient",
    "removable_units",
    "resolution",
    "sample_sgld",
    "surfaces",
    "umap_embedding",
    "volume_exponent",
    "walk_level_set",
    "weight_tensors",
    "weight_vector",
]
