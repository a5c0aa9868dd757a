"""What happens between steps and epochs."""

from lightning_sym.callbacks.matching_report import MatchingReport
from lightning_sym.callbacks.symmetry_monitor import SymmetryMonitor
from lightning_sym.callbacks.zoo_export import ZooExport
from lightning_sym.callbacks.zoo_report import ZooReport

__all__ = ["MatchingReport", "SymmetryMonitor", "ZooExport", "ZooReport"]
