"""Between networks: lines in weight space, loss barriers, means and merging."""

from lightning_sym.connectivity.interpolation import Barrier, average, barrier, interpolate
from lightning_sym.connectivity.merging import Merged, merge

__all__ = ["Barrier", "Merged", "average", "barrier", "interpolate", "merge"]
