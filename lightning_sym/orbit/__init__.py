"""Optimise any function of the weights over the orbit of a network; its function stays."""

from lightning_sym.orbit.descent import OrbitMinimum, minimize_on_orbit
from lightning_sym.orbit.directions import OrbitDirections
from lightning_sym.orbit.files import ReparametrizedCheckpoint, reparametrize_checkpoint
from lightning_sym.orbit.gptq import round_by_gptq
from lightning_sym.orbit.hand_made import awq, cross_layer_equalization, prune_by_wanda, smooth_quant
from lightning_sym.orbit.least_norm import least_norm
from lightning_sym.orbit.objective import Objective
from lightning_sym.orbit.objectives import (
    OBJECTIVES,
    gradient_norm,
    objective_named,
    path_norm,
    quantization_error,
    sharpness,
    sparsity,
    weight_norm,
)
from lightning_sym.orbit.rounding import prune_by_magnitude, round_to_nearest
from lightning_sym.orbit.teleportation import Teleportation, Teleported, Way
from lightning_sym.orbit.view import View

__all__ = [
    "OBJECTIVES",
    "Objective",
    "OrbitDirections",
    "OrbitMinimum",
    "ReparametrizedCheckpoint",
    "Teleportation",
    "Teleported",
    "View",
    "Way",
    "awq",
    "cross_layer_equalization",
    "gradient_norm",
    "least_norm",
    "minimize_on_orbit",
    "objective_named",
    "path_norm",
    "prune_by_magnitude",
    "prune_by_wanda",
    "quantization_error",
    "reparametrize_checkpoint",
    "round_by_gptq",
    "round_to_nearest",
    "sharpness",
    "smooth_quant",
    "sparsity",
    "weight_norm",
]
