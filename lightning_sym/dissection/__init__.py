"""Interpretability of single units: concept detectors in the network's basis and in rotated bases."""

from lightning_sym._exports import exported
from lightning_sym.dissection.bases import Geodesic as Geodesic
from lightning_sym.dissection.bases import in_bases as in_bases
from lightning_sym.dissection.bases import random_permutation_matrix as random_permutation_matrix
from lightning_sym.dissection.bases import random_rotation as random_rotation
from lightning_sym.dissection.bases import three_places as three_places
from lightning_sym.dissection.companions import UnitStatistics as UnitStatistics
from lightning_sym.dissection.companions import UnitSummary as UnitSummary
from lightning_sym.dissection.networks import BasisDissection as BasisDissection
from lightning_sym.dissection.networks import dissect as dissect
from lightning_sym.dissection.overlaps import ConceptOverlap as ConceptOverlap
from lightning_sym.dissection.overlaps import Detectors as Detectors
from lightning_sym.dissection.overlaps import detectors as detectors
from lightning_sym.dissection.quantiles import TopQuantile as TopQuantile
from lightning_sym.dissection.strongest import StrongestImages as StrongestImages
from lightning_sym.dissection.strongest import strongest_images as strongest_images

__all__ = exported(globals())
