"""Data in, matplotlib figure out."""

from lightning_sym.figures.matching import Bars, Lines, barrier_bars, interpolation_curves
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
    "Lines",
    "PenaltyFamily",
    "PenaltyPanel",
    "SparsityFamily",
    "barrier_bars",
    "confusion_matrix",
    "interpolation_curves",
    "penalty_curves",
    "penalty_heat_map",
    "rotation_penalty",
    "sparsity_against_penalty",
    "symmetry_curves",
    "validation_curves",
    "zoo_overview",
]
