"""Interpretability of single units: concept detectors in the network's basis and in rotated bases."""

from lightning_sym.dissection.bases import Geodesic, in_bases, random_permutation_matrix, random_rotation
from lightning_sym.dissection.companions import UnitStatistics, UnitSummary
from lightning_sym.dissection.detectors import Detectors, detectors
from lightning_sym.dissection.networks import BasisDissection, dissect
from lightning_sym.dissection.overlaps import ConceptOverlap
from lightning_sym.dissection.quantiles import TopQuantile

__all__ = [
    "BasisDissection",
    "ConceptOverlap",
    "Detectors",
    "Geodesic",
    "TopQuantile",
    "UnitStatistics",
    "UnitSummary",
    "detectors",
    "dissect",
    "in_bases",
    "random_permutation_matrix",
    "random_rotation",
]
