"""Data in, matplotlib figure out."""

from lightning_sym.figures.zoo import confusion_matrix, validation_curves, zoo_overview

__all__ = ["confusion_matrix", "validation_curves", "zoo_overview"]
