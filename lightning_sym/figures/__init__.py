"""Data in, matplotlib figure out."""

from lightning_sym.figures._equivalence import FoundPoint, Scale
from lightning_sym.figures.cards import cards
from lightning_sym.figures.curve import CurvePlane, contour_levels, curve_planes
from lightning_sym.figures.declared import Chart, Marks, Panel, epoch_panel
from lightning_sym.figures.dissection import Strip, unit_images
from lightning_sym.figures.equivalence_planes import class_stack_figure, log_contour, loss_surface, planes_beside
from lightning_sym.figures.equivalence_sets import (
    betti_curve,
    embedding,
    isosurface,
    isosurface_mesh,
    point_set,
    search_curves,
)
from lightning_sym.figures.files import check_figure_files, figure_bytes, fitted_figure, write_figure
from lightning_sym.figures.labels import measure_label, readable_names
from lightning_sym.figures.similarity import HeatMap, similarity_maps
from lightning_sym.figures.stitching import penalty_heat_map
from lightning_sym.figures.zoo import confusion_matrix

__all__ = [
    "Chart",
    "CurvePlane",
    "FoundPoint",
    "HeatMap",
    "Marks",
    "Panel",
    "Scale",
    "Strip",
    "betti_curve",
    "cards",
    "check_figure_files",
    "class_stack_figure",
    "confusion_matrix",
    "contour_levels",
    "curve_planes",
    "embedding",
    "epoch_panel",
    "figure_bytes",
    "fitted_figure",
    "isosurface",
    "isosurface_mesh",
    "log_contour",
    "loss_surface",
    "measure_label",
    "penalty_heat_map",
    "planes_beside",
    "point_set",
    "readable_names",
    "search_curves",
    "similarity_maps",
    "unit_images",
    "write_figure",
]
