"""Data in, matplotlib figure out."""

from lightning_sym._exports import exported
from lightning_sym.figures._equivalence import FoundPoint as FoundPoint
from lightning_sym.figures._equivalence import Scale as Scale
from lightning_sym.figures._panels import measure_label as measure_label
from lightning_sym.figures._panels import readable_names as readable_names
from lightning_sym.figures.cards import cards as cards
from lightning_sym.figures.curve import CurvePlane as CurvePlane
from lightning_sym.figures.curve import contour_levels as contour_levels
from lightning_sym.figures.curve import curve_planes as curve_planes
from lightning_sym.figures.declared import Chart as Chart
from lightning_sym.figures.declared import Marks as Marks
from lightning_sym.figures.declared import Panel as Panel
from lightning_sym.figures.declared import epoch_panel as epoch_panel
from lightning_sym.figures.dissection import Strip as Strip
from lightning_sym.figures.dissection import unit_images as unit_images
from lightning_sym.figures.equivalence_planes import class_stack_figure as class_stack_figure
from lightning_sym.figures.equivalence_planes import log_contour as log_contour
from lightning_sym.figures.equivalence_planes import loss_surface as loss_surface
from lightning_sym.figures.equivalence_planes import planes_beside as planes_beside
from lightning_sym.figures.equivalence_sets import betti_curve as betti_curve
from lightning_sym.figures.equivalence_sets import embedding as embedding
from lightning_sym.figures.equivalence_sets import isosurface as isosurface
from lightning_sym.figures.equivalence_sets import isosurface_mesh as isosurface_mesh
from lightning_sym.figures.equivalence_sets import point_set as point_set
from lightning_sym.figures.equivalence_sets import search_curves as search_curves
from lightning_sym.figures.files import check_figure_files as check_figure_files
from lightning_sym.figures.files import figure_bytes as figure_bytes
from lightning_sym.figures.files import fitted_figure as fitted_figure
from lightning_sym.figures.files import write_figure as write_figure
from lightning_sym.figures.similarity import HeatMap as HeatMap
from lightning_sym.figures.similarity import similarity_maps as similarity_maps
from lightning_sym.figures.stitching import penalty_heat_map as penalty_heat_map
from lightning_sym.figures.zoo import confusion_matrix as confusion_matrix

__all__ = exported(globals())
