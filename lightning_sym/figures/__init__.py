"""Data in, matplotlib figure out."""

from lightning_sym.figures._equivalence import FoundPoint, Scale
from lightning_sym.figures.dissection import Paths, dissection_curves
from lightning_sym.figures.equivalence_planes import class_stack_figure, log_contour, loss_surface, planes_beside
from lightning_sym.figures.equivalence_sets import (
    betti_curve,
    embedding,
    isosurface,
    isosurface_mesh,
    point_set,
    search_curves,
)
from lightning_sym.figures.equivalence_walks import walk_curves
from lightning_sym.figures.equivariance import evidence_curves, relative_effective_parameters
from lightning_sym.figures.matching import Bars, Lines, barrier_bars, interpolation_curves
from lightning_sym.figures.similarity import Depth, HeatMap, similarity_depth, similarity_maps
from lightning_sym.figures.spectra import sharpness_bars, spectral_densities
from lightning_sym.figures.stitching import (
    PenaltyFamily,
    PenaltyPanel,
    SparsityFamily,
    penalty_curves,
    penalty_heat_map,
    rotation_penalty,
    sparsity_against_penalty,
)
from lightning_sym.figures.symmetry import symmetry_curves
from lightning_sym.figures.zoo import confusion_matrix, validation_curves, zoo_overview

__all__ = [
    "Bars",
    "Depth",
    "FoundPoint",
    "HeatMap",
    "Lines",
    "Paths",
    "PenaltyFamily",
    "PenaltyPanel",
    "Scale",
    "SparsityFamily",
    "barrier_bars",
    "betti_curve",
    "class_stack_figure",
    "confusion_matrix",
    "dissection_curves",
    "embedding",
    "evidence_curves",
    "interpolation_curves",
    "isosurface",
    "isosurface_mesh",
    "log_contour",
    "loss_surface",
    "penalty_curves",
    "penalty_heat_map",
    "planes_beside",
    "point_set",
    "relative_effective_parameters",
    "rotation_penalty",
    "search_curves",
    "sharpness_bars",
    "similarity_depth",
    "similarity_maps",
    "sparsity_against_penalty",
    "spectral_densities",
    "symmetry_curves",
    "validation_curves",
    "walk_curves",
    "zoo_overview",
]
