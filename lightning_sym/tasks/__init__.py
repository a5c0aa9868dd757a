"""LightningModules, one per experiment."""

from lightning_sym.tasks.strategy import MemberParallelStrategy
from lightning_sym.tasks.zoo import ZooTask

__all__ = ["MemberParallelStrategy", "ZooTask"]
