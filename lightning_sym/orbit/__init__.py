"""Optimise any function of the weights over the orbit of a network; its function stays."""

from lightning_sym.orbit.descent import OrbitMinimum, minimize_on_orbit
from lightning_sym.orbit.directions import OrbitDirections
from lightning_sym.orbit.least_norm import least_norm
from lightning_sym.orbit.objective import Objective
from lightning_sym.orbit.view import View

__all__ = ["Objective", "OrbitDirections", "OrbitMinimum", "View", "least_norm", "minimize_on_orbit"]
