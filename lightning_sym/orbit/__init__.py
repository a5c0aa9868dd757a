"""Optimise any function of the weights over the orbit of a network; its function stays."""

from lightning_sym._exports import exported
from lightning_sym.orbit.descent import OrbitMinimum as OrbitMinimum
from lightning_sym.orbit.descent import minimize_on_orbit as minimize_on_orbit
from lightning_sym.orbit.directions import OrbitDirections as OrbitDirections
from lightning_sym.orbit.files import ReparametrizedCheckpoint as ReparametrizedCheckpoint
from lightning_sym.orbit.files import reparametrize_checkpoint as reparametrize_checkpoint
from lightning_sym.orbit.gptq import round_by_gptq as round_by_gptq
from lightning_sym.orbit.hand_made import awq as awq
from lightning_sym.orbit.hand_made import cross_layer_equalization as cross_layer_equalization
from lightning_sym.orbit.hand_made import prune_by_wanda as prune_by_wanda
from lightning_sym.orbit.hand_made import smooth_quant as smooth_quant
from lightning_sym.orbit.least_norm import least_norm as least_norm
from lightning_sym.orbit.objective import Objective as Objective
from lightning_sym.orbit.objectives import OBJECTIVES as OBJECTIVES
from lightning_sym.orbit.objectives import gradient_norm as gradient_norm
from lightning_sym.orbit.objectives import objective_named as objective_named
from lightning_sym.orbit.objectives import path_norm as path_norm
from lightning_sym.orbit.objectives import quantization_error as quantization_error
from lightning_sym.orbit.objectives import sharpness as sharpness
from lightning_sym.orbit.objectives import sparsity as sparsity
from lightning_sym.orbit.objectives import weight_norm as weight_norm
from lightning_sym.orbit.rounding import prune_by_magnitude as prune_by_magnitude
from lightning_sym.orbit.rounding import round_to_nearest as round_to_nearest
from lightning_sym.orbit.teleportation import Teleportation as Teleportation
from lightning_sym.orbit.teleportation import Teleported as Teleported
from lightning_sym.orbit.teleportation import Way as Way
from lightning_sym.orbit.view import View as View

__all__ = exported(globals())
