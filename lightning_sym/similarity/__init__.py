"""Similarity of two networks' representations up to a symmetry group."""

from lightning_sym.similarity.cka import CKA, Link
from lightning_sym.similarity.features import Features, features_of
from lightning_sym.similarity.kernels import gram
from lightning_sym.similarity.matrix import SimilarityMatrix
from lightning_sym.similarity.measures import Layer, Measure
from lightning_sym.similarity.population import PopulationSimilarity
from lightning_sym.similarity.procrustes import GroupProcrustes, OrthogonalProcrustes

__all__ = [
    "CKA",
    "Features",
    "GroupProcrustes",
    "Layer",
    "Link",
    "Measure",
    "OrthogonalProcrustes",
    "PopulationSimilarity",
    "SimilarityMatrix",
    "features_of",
    "gram",
]
