"""Weight space: planes, grids, sets of nearly equivalent weights, walks; the exact theory of two ReLU units."""

from lightning_sym.landscape._closed_form import is_relu_line
from lightning_sym.landscape.embedding import Embedding, umap_embedding
from lightning_sym.landscape.evaluation import LossSurface
from lightning_sym.landscape.grids import Grid, GridTooLargeError, evaluate_grid
from lightning_sym.landscape.plane_quadric import PlaneQuadric
from lightning_sym.landscape.planes import WeightPlane, independent, weight_tensors, weight_vector
from lightning_sym.landscape.quotient import OrbitDistances, canonical_vectors, function_distances, orbit_distances
from lightning_sym.landscape.sampling import (
    NeighbourGraph,
    SetSample,
    SGLDSamples,
    neighbour_graph,
    sample_set,
    sample_sgld,
)
from lightning_sym.landscape.scale import FunctionScale, Resolution, VolumeExponent, resolution, volume_exponent
from lightning_sym.landscape.sets import SetNumbers, describe_set
from lightning_sym.landscape.stacks import class_stack, cut_dimension, surfaces, two_unit_targets
from lightning_sym.landscape.topology import betti_numbers, components, joining_levels
from lightning_sym.landscape.two_unit import (
    Moments,
    Stratum,
    TwoUnitClass,
    distance,
    distance_gradient,
    slope_jacobian,
    slopes,
)
from lightning_sym.landscape.two_unit_search import (
    SearchOutcome,
    batch_moments,
    draw_initial,
    predicts_success,
    simulate_search,
)
from lightning_sym.landscape.walks import LevelSetWalk, walk_level_set
from lightning_sym.landscape.wide import class_dimension, connecting_path, slope_rank

__all__ = [
    "Embedding",
    "FunctionScale",
    "Grid",
    "GridTooLargeError",
    "LevelSetWalk",
    "LossSurface",
    "Moments",
    "NeighbourGraph",
    "OrbitDistances",
    "PlaneQuadric",
    "Resolution",
    "SGLDSamples",
    "SearchOutcome",
    "SetNumbers",
    "SetSample",
    "Stratum",
    "TwoUnitClass",
    "VolumeExponent",
    "WeightPlane",
    "batch_moments",
    "betti_numbers",
    "canonical_vectors",
    "class_dimension",
    "class_stack",
    "components",
    "connecting_path",
    "cut_dimension",
    "describe_set",
    "distance",
    "distance_gradient",
    "draw_initial",
    "evaluate_grid",
    "function_distances",
    "independent",
    "is_relu_line",
    "joining_levels",
    "neighbour_graph",
    "orbit_distances",
    "predicts_success",
    "resolution",
    "sample_set",
    "sample_sgld",
    "simulate_search",
    "slope_jacobian",
    "slope_rank",
    "slopes",
    "surfaces",
    "two_unit_targets",
    "umap_embedding",
    "volume_exponent",
    "walk_level_set",
    "weight_tensors",
    "weight_vector",
]
