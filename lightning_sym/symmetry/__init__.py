"""Symmetries of networks: the groups that commute through activations."""

from typing import TYPE_CHECKING

from lightning_sym._lazy import lazy

if TYPE_CHECKING:
    from lightning_sym.symmetry.base import Symmetry
    from lightning_sym.symmetry.canonical.form import Balance, CanonicalForm, balance, canonicalize
    from lightning_sym.symmetry.dimension import LocalDimension, local_dimension
    from lightning_sym.symmetry.elements import AxisGroup, Occurrence, Tap
    from lightning_sym.symmetry.group.action import ActivationAction
    from lightning_sym.symmetry.group.channels import ChannelGroup
    from lightning_sym.symmetry.group.element import Element
    from lightning_sym.symmetry.groups import INTERTWINER_GROUPS, intertwiner_group, measure
    from lightning_sym.symmetry.intertwiners import GroupElement, IntertwinerGroup
    from lightning_sym.symmetry.matching.activations import ActivationMoments, activation_matching
    from lightning_sym.symmetry.matching.distance import OrbitDistance, orbit_distance
    from lightning_sym.symmetry.matching.weights import Match, parameter_distance, weight_matching
    from lightning_sym.symmetry.moves.cells import balance_heads
    from lightning_sym.symmetry.moves.gains import fold_norm_gains
    from lightning_sym.symmetry.moves.hadamard import hadamard
    from lightning_sym.symmetry.moves.moved import Moved
    from lightning_sym.symmetry.moves.streams import rotate_stream, stream_axes
    from lightning_sym.symmetry.moves.tied import untie
    from lightning_sym.symmetry.moves.writers import center_writers
    from lightning_sym.symmetry.permutation_spec import PermutationSpec
    from lightning_sym.symmetry.tangents import OrbitTangents, orbit_tangents
    from lightning_sym.symmetry.trace import trace_symmetry
    from lightning_sym.symmetry.tracing.calls import Call
    from lightning_sym.symmetry.tracing.rules import register_rule
    from lightning_sym.symmetry.tracing.values import Value
    from lightning_sym.symmetry.tracing.vocabulary import Trace
    from lightning_sym.symmetry.tracing.weightless import without_weights

__getattr__, __dir__ = lazy(globals())

__all__ = [
    "INTERTWINER_GROUPS",
    "ActivationAction",
    "ActivationMoments",
    "AxisGroup",
    "Balance",
    "Call",
    "CanonicalForm",
    "ChannelGroup",
    "Element",
    "GroupElement",
    "IntertwinerGroup",
    "LocalDimension",
    "Match",
    "Moved",
    "Occurrence",
    "OrbitDistance",
    "OrbitTangents",
    "PermutationSpec",
    "Symmetry",
    "Tap",
    "Trace",
    "Value",
    "activation_matching",
    "balance",
    "balance_heads",
    "canonicalize",
    "center_writers",
    "fold_norm_gains",
    "hadamard",
    "intertwiner_group",
    "local_dimension",
    "measure",
    "orbit_distance",
    "orbit_tangents",
    "parameter_distance",
    "register_rule",
    "rotate_stream",
    "stream_axes",
    "trace_symmetry",
    "untie",
    "weight_matching",
    "without_weights",
]
