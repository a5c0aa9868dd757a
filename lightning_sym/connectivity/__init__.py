"""Mode connectivity: linear paths, curves and loss barriers between networks, and merging, also of adapters."""

from lightning_sym.connectivity.adapters import Adapter, MergedAdapters, merge_adapters
from lightning_sym.connectivity.checkpoints import MergedCheckpoints, merge_checkpoints
from lightning_sym.connectivity.curve_network import CurveNetwork
from lightning_sym.connectivity.curves import Curve, CurveSummary, curve_barriers, curve_coefficients, load_curve
from lightning_sym.connectivity.geometry import CurveShape, Identity, PointGeometry, PointSpectrum, curve_geometry
from lightning_sym.connectivity.interpolation import Barrier, CurveLosses, average, barrier, curve_losses, interpolate
from lightning_sym.connectivity.merging import Merged, merge

__all__ = [
    "Adapter",
    "Barrier",
    "Curve",
    "CurveLosses",
    "CurveNetwork",
    "CurveShape",
    "CurveSummary",
    "Identity",
    "Merged",
    "MergedAdapters",
    "MergedCheckpoints",
    "PointGeometry",
    "PointSpectrum",
    "average",
    "barrier",
    "curve_barriers",
    "curve_coefficients",
    "curve_geometry",
    "curve_losses",
    "interpolate",
    "load_curve",
    "merge",
    "merge_adapters",
    "merge_checkpoints",
]
