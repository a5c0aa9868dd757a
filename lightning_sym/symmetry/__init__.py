"""Symmetries of networks: the groups that commute through activations."""

from typing import TYPE_CHECKING

from lightning_sym._exports import exported, lazy

if TYPE_CHECKING:
    from lightning_sym.symmetry.base import Symmetry as Symmetry
    from lightning_sym.symmetry.canonical.form import Balance as Balance
    from lightning_sym.symmetry.canonical.form import CanonicalForm as CanonicalForm
    from lightning_sym.symmetry.canonical.form import balance as balance
    from lightning_sym.symmetry.canonical.form import canonicalize as canonicalize
    from lightning_sym.symmetry.dimension import LocalDimension as LocalDimension
    from lightning_sym.symmetry.dimension import local_dimension as local_dimension
    from lightning_sym.symmetry.elements import AxisGroup as AxisGroup
    from lightning_sym.symmetry.elements import Occurrence as Occurrence
    from lightning_sym.symmetry.elements import Tap as Tap
    from lightning_sym.symmetry.group.action import ActivationAction as ActivationAction
    from lightning_sym.symmetry.group.channels import ChannelGroup as ChannelGroup
    from lightning_sym.symmetry.group.element import Element as Element
    from lightning_sym.symmetry.groups import INTERTWINER_GROUPS as INTERTWINER_GROUPS
    from lightning_sym.symmetry.groups import intertwiner_group as intertwiner_group
    from lightning_sym.symmetry.groups import measure as measure
    from lightning_sym.symmetry.intertwiners import GroupElement as GroupElement
    from lightning_sym.symmetry.intertwiners import IntertwinerGroup as IntertwinerGroup
    from lightning_sym.symmetry.matching.activations import ActivationMoments as ActivationMoments
    from lightning_sym.symmetry.matching.activations import activation_matching as activation_matching
    from lightning_sym.symmetry.matching.distance import OrbitDistance as OrbitDistance
    from lightning_sym.symmetry.matching.distance import orbit_distance as orbit_distance
    from lightning_sym.symmetry.matching.weights import Match as Match
    from lightning_sym.symmetry.matching.weights import parameter_distance as parameter_distance
    from lightning_sym.symmetry.matching.weights import weight_matching as weight_matching
    from lightning_sym.symmetry.moves.cells import balance_heads as balance_heads
    from lightning_sym.symmetry.moves.gains import fold_norm_gains as fold_norm_gains
    from lightning_sym.symmetry.moves.hadamard import hadamard as hadamard
    from lightning_sym.symmetry.moves.moved import Moved as Moved
    from lightning_sym.symmetry.moves.streams import rotate_stream as rotate_stream
    from lightning_sym.symmetry.moves.streams import stream_axes as stream_axes
    from lightning_sym.symmetry.moves.tied import untie as untie
    from lightning_sym.symmetry.moves.writers import center_writers as center_writers
    from lightning_sym.symmetry.permutation_spec import PermutationSpec as PermutationSpec
    from lightning_sym.symmetry.tangents import OrbitTangents as OrbitTangents
    from lightning_sym.symmetry.tangents import orbit_tangents as orbit_tangents
    from lightning_sym.symmetry.trace import trace_symmetry as trace_symmetry
    from lightning_sym.symmetry.tracing.graph.calls import Call as Call
    from lightning_sym.symmetry.tracing.graph.weightless import without_weights as without_weights
    from lightning_sym.symmetry.tracing.labelling.rules import register_rule as register_rule
    from lightning_sym.symmetry.tracing.labelling.values import Value as Value
    from lightning_sym.symmetry.tracing.labelling.vocabulary import Trace as Trace

__getattr__, __dir__ = lazy(globals())

__all__ = exported(globals())
