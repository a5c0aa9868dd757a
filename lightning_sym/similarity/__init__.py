"""Similarity of two networks' representations up to a symmetry group."""

from lightning_sym._exports import exported
from lightning_sym.similarity.cka import CKA as CKA
from lightning_sym.similarity.cka import Link as Link
from lightning_sym.similarity.features import Features as Features
from lightning_sym.similarity.features import features_of as features_of
from lightning_sym.similarity.kernels import gram as gram
from lightning_sym.similarity.measures import Layer as Layer
from lightning_sym.similarity.measures import Measure as Measure
from lightning_sym.similarity.population import PopulationSimilarity as PopulationSimilarity
from lightning_sym.similarity.population import SimilarityMatrix as SimilarityMatrix
from lightning_sym.similarity.procrustes import GroupProcrustes as GroupProcrustes
from lightning_sym.similarity.procrustes import OrthogonalProcrustes as OrthogonalProcrustes

__all__ = exported(globals())
