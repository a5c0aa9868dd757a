"""How similar two networks' representations are, up to which symmetry."""

from lightning_sym.similarity.cka import CKA, ChannelStatistics
from lightning_sym.similarity.kernels import gram, hsic
from lightning_sym.similarity.procrustes import GroupProcrustes, OrthogonalProcrustes

__all__ = ["CKA", "ChannelStatistics", "GroupProcrustes", "OrthogonalProcrustes", "gram", "hsic"]
