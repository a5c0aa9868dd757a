"""Merging: networks aligned up to symmetry and averaged, in memory and from files, also adapters."""

from lightning_sym.merging.adapters import Adapter, MergedAdapters, merge_adapters
from lightning_sym.merging.alignment import Alignment, Merged, align, merge
from lightning_sym.merging.checkpoints import MergedCheckpoints, merge_checkpoints

__all__ = [
    "Adapter",
    "Alignment",
    "Merged",
    "MergedAdapters",
    "MergedCheckpoints",
    "align",
    "merge",
    "merge_adapters",
    "merge_checkpoints",
]
