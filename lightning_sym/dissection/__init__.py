"""Interpretability of single units: concept detectors in the network's basis and in rotated bases."""

from lightning_sym.dissection.bases import Geodesic, in_bases, random_permutation_matrix, random_rotation, three_places
from lightning_sym.dissection.companions import UnitStatistics, UnitSummary
from lightning_sym.dissection.detectors import Detectors, detectors
from lightning_sym.dissection.networks import BasisDissection, dissect
from lightning_sym.dissection.overlaps import ConceptOverlap
from lightning_sym.dissection.quantiles import TopQuantile
from lightning_sym.dissection.strongest import StrongestImages, strongest_images

__all__ = [
    "BasisDissection",
    "ConceptOverlap",
    "Detectors",
    "Geodesic",
    "StrongestImages",
    "TopQuantile",
    "UnitStatistics",
    "UnitSummary",
    "detectors",
    "dissect",
    "in_bases",
    "random_permutation_matrix",
    "random_rotation",
    "strongest_images",
    "three_places",
]
