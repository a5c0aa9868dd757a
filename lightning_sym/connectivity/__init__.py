"""Mode connectivity: linear paths, curves and loss barriers between networks."""

from lightning_sym._exports import exported
from lightning_sym.connectivity.curve_network import CurveNetwork as CurveNetwork
from lightning_sym.connectivity.curves import Curve as Curve
from lightning_sym.connectivity.curves import CurveSummary as CurveSummary
from lightning_sym.connectivity.curves import curve_barriers as curve_barriers
from lightning_sym.connectivity.curves import curve_coefficients as curve_coefficients
from lightning_sym.connectivity.curves import load_curve as load_curve
from lightning_sym.connectivity.geometry import CurveShape as CurveShape
from lightning_sym.connectivity.geometry import Identity as Identity
from lightning_sym.connectivity.geometry import PointGeometry as PointGeometry
from lightning_sym.connectivity.geometry import PointSpectrum as PointSpectrum
from lightning_sym.connectivity.geometry import curve_geometry as curve_geometry
from lightning_sym.connectivity.interpolation import Barrier as Barrier
from lightning_sym.connectivity.interpolation import CurveLosses as CurveLosses
from lightning_sym.connectivity.interpolation import average as average
from lightning_sym.connectivity.interpolation import barrier as barrier
from lightning_sym.connectivity.interpolation import curve_losses as curve_losses
from lightning_sym.connectivity.interpolation import interpolate as interpolate

__all__ = exported(globals())
