"""What happens between steps and epochs."""

from lightning_sym.callbacks.zoo_export import ZooExport
from lightning_sym.callbacks.zoo_report import ZooReport

__all__ = ["ZooExport", "ZooReport"]
