"""Merging: networks aligned up to symmetry and merged, in memory and from files, also adapters."""

from lightning_sym._exports import exported
from lightning_sym.merging.adapters import Adapter as Adapter
from lightning_sym.merging.adapters import MergedAdapters as MergedAdapters
from lightning_sym.merging.adapters import merge_adapters as merge_adapters
from lightning_sym.merging.alignment import Alignment as Alignment
from lightning_sym.merging.alignment import Merged as Merged
from lightning_sym.merging.alignment import align as align
from lightning_sym.merging.alignment import merge as merge
from lightning_sym.merging.checkpoints import MergedCheckpoints as MergedCheckpoints
from lightning_sym.merging.checkpoints import merge_checkpoints as merge_checkpoints
from lightning_sym.merging.config import MergeConfig as MergeConfig
from lightning_sym.merging.methods import METHODS as METHODS
from lightning_sym.merging.methods import MergeMethod as MergeMethod
from lightning_sym.merging.methods import merge_tensors as merge_tensors
from lightning_sym.merging.parameters import MergeSettings as MergeSettings

__all__ = exported(globals())
