"""Data in, matplotlib figure out."""

from lightning_sym.figures._equivalence import FoundPoint, Scale
from lightning_sym.figures.cards import cards
from lightning_sym.figures.comparison import Compared, comparison_dots
from lightning_sym.figures.curve import CurvePlane, contour_levels, curve_planes
from lightning_sym.figures.curve_geometry import GeometryLines, curve_geometry_panels
from lightning_sym.figures.declared import Chart, Marks, Panel
from lightning_sym.figures.equivalence_planes import class_stack_figure, log_contour, loss_surface, planes_beside
from lightning_sym.figures.equivalence_sets import (
    betti_curve,
    embedding,
    isosurface,
    isosurface_mesh,
    point_set,
    search_curves,
)
from lightning_sym.figures.learning_coefficients import (
    ChainTraces,
    Coefficient,
    chain_traces,
    coefficient_curves,
    coefficient_rows,
)
from lightning_sym.figures.similarity import (
    Depth,
    HeatMap,
    ZooPanel,
    similarity_depth,
    similarity_maps,
    similarity_of_zoos,
)
from lightning_sym.figures.stitching import (
    PenaltyFamily,
    PenaltyPanel,
    SparsityFamily,
    penalty_curves,
    penalty_heat_map,
    rotation_penalty,
    sparsity_against_penalty,
)
from lightning_sym.figures.zoo import confusion_matrix

__all__ = [
    "ChainTraces",
    "Chart",
    "Coefficient",
    "Compared",
    "CurvePlane",
    "Depth",
    "FoundPoint",
    "GeometryLines",
    "HeatMap",
    "Marks",
    "Panel",
    "PenaltyFamily",
    "PenaltyPanel",
    "Scale",
    "SparsityFamily",
    "ZooPanel",
    "betti_curve",
    "cards",
    "chain_traces",
    "class_stack_figure",
    "coefficient_curves",
    "coefficient_rows",
    "comparison_dots",
    "confusion_matrix",
    "contour_levels",
    "curve_geometry_panels",
    "curve_planes",
    "embedding",
    "isosurface",
    "isosurface_mesh",
    "log_contour",
    "loss_surface",
    "penalty_curves",
    "penalty_heat_map",
    "planes_beside",
    "point_set",
    "rotation_penalty",
    "search_curves",
    "similarity_depth",
    "similarity_maps",
    "similarity_of_zoos",
    "sparsity_against_penalty",
]
