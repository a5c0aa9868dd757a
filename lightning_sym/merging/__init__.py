"""Merging: networks aligned up to symmetry and merged, in memory and from files, also adapters."""

from lightning_sym.merging.adapters import Adapter, MergedAdapters, merge_adapters
from lightning_sym.merging.alignment import Alignment, Merged, align, merge
from lightning_sym.merging.checkpoints import MergedCheckpoints, merge_checkpoints
from lightning_sym.merging.config import MergeConfig
from lightning_sym.merging.methods import METHODS, MergeMethod, merge_tensors
from lightning_sym.merging.parameters import MergeSettings

__all__ = [
    "METHODS",
    "Adapter",
    "Alignment",
    "MergeConfig",
    "MergeMethod",
    "MergeSettings",
    "Merged",
    "MergedAdapters",
    "MergedCheckpoints",
    "align",
    "merge",
    "merge_adapters",
    "merge_checkpoints",
    "merge_tensors",
]
