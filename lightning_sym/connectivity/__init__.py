"""Mode connectivity: linear paths, curves and loss barriers between networks."""

from lightning_sym.connectivity.curve_network import CurveNetwork
from lightning_sym.connectivity.curves import Curve, CurveSummary, curve_barriers, curve_coefficients, load_curve
from lightning_sym.connectivity.geometry import CurveShape, Identity, PointGeometry, PointSpectrum, curve_geometry
from lightning_sym.connectivity.interpolation import Barrier, CurveLosses, average, barrier, curve_losses, interpolate

__all__ = [
    "Barrier",
    "Curve",
    "CurveLosses",
    "CurveNetwork",
    "CurveShape",
    "CurveSummary",
    "Identity",
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
]
