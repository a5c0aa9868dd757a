"""Weights that a network reads only in a sum with a function of others, `w + f(v)`: all of v may change.

Then w absorbs the change of f. Example: a layer with a low-rank update, `W + B A`.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_sym.symmetry.tracing.affine.reading import Constants
from lightning_sym.symmetry.tracing.affine.system import System
from lightning_sym.symmetry.tracing.affine.weights import ByFunction, Generic, Weights
from lightning_sym.symmetry.tracing.graph.nodes import ancestors, shape_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations

_MOVING = operations(Trait.REGROUP | Trait.PERMUTE | Trait.CAST)
_JOINING, _SUMMING = {"add", "sub"}, operations(Trait.JOIN | Trait.CAT)
_LAYERS = {"linear"} | operations(Trait.CONVOLVE)
_MOST = 2**16  # maximal entries of a function that is added to a weight which may change otherwise


class _Function(NamedTuple):
    """A function of weights that is added to a parameter without other readers.

    Attributes:
        node: The function.
        taker: The parameter, if it absorbs the whole change of the function; empty if the sum may change as well.
        sign: The sign of its change then.
        total: The sum, if only layers read it: it then has the parameter's translations.
    """

    node: fx.Node
    taker: str
    sign: float
    total: fx.Node | None


def absorb_ahead(system: System, captures: Sequence[Constants]) -> None:
    """Record the functions of weights that another weight absorbs, if it does in all captures."""
    functions = [[own for own in _functions(system, each) if _is_small(own)] for each in captures]
    buffers = set[str]().union(*(each.capture.buffers for each in captures))
    while True:
        inside = [_inside([own.node for own in each]) for each in functions]
        idle = [{*map(each.capture.states.get, own)} - {None} for each, own in zip(captures, inside, strict=True)]
        common = {str(name) for name in set.intersection(*idle)} if idle else set[str]()
        free = common & system.movable - buffers - system.partial.keys()
        held = [[own for own in each if _holds(system, own, free)] for each in functions]
        if held == functions:
            break
        functions = held
    if len({frozenset(own) for own in idle}) > 1 or not free:
        return
    system.inside, system.idle = set[fx.Node]().union(*inside), free | common & buffers
    for own in itertools.chain(*functions):
        made = system.made(own.node)
        system.absorbed[own.node] = tuple(sorted(free & made.names()))
        if own.total is not None:
            system.totals |= dict.fromkeys([own.total, *_nested(own.total)], own.taker)
            system.weights.add(own.taker)
        if own.taker:
            given = tuple((name, system.shape(name)) for name in system.absorbed[own.node])
            taken = system.takers.setdefault(own.taker, {})
            taken.setdefault(system.signature(own.node), (ByFunction(made, given), own.sign))
    for name in system.idle:
        system.weights.discard(name)
        system.common.pop(name, None)


def _functions(system: System, constants: Constants) -> Iterator[_Function]:
    """Yield functions that are added to a parameter without other readers, the last ones first."""
    states, taken = constants.capture.states, set[fx.Node]()
    for node in reversed(constants.capture.graph.nodes):
        if name_of(node) not in _JOINING or node in taken or not _is_of_weights(node, states):
            continue
        if node.meta["val"].is_complex():  # a real weight absorbs no imaginary part
            continue
        terms = [*_terms(node)]
        taken |= {own for own in ancestors(node) if name_of(own) in _JOINING}
        whole = [(own, sign) for own, sign in terms
                 if shape_of(own) == shape_of(node) and _root(own, states) in system.movable]  # fmt: skip
        if not whole:
            continue
        first, by = whole[0]
        takes = len(whole) == 1 and first in states and len(shape_of(node) or ()) > 1 and _is_kernel(node, states)
        functions = [(own, sign) for own, sign in terms if isinstance(own, fx.Node) and _root(own, states) is None]
        read = takes and by == 1 and len(functions) + 1 == len(terms) and _is_kernel(node, states, alone=True)
        for own, sign in functions:
            yield _Function(own, states[first] if takes else "", -sign * by, node if read else None)


def _terms(node: fx.Node, sign: float = 1.0) -> Iterator[tuple[Any, float]]:
    """Yield the terms of nested sums without other readers, with their signs."""
    if node.kwargs:
        return
    for given, by in zip(node.args[:2], (sign, -sign if name_of(node) == "sub" else sign), strict=True):
        if isinstance(given, fx.Node) and name_of(given) in _JOINING and len(given.users) == 1 and not given.kwargs:
            yield from _terms(given, by)
        else:
            yield given, by


def _nested(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the sums among the terms of a sum."""
    for given in node.all_input_nodes:
        if name_of(given) in _JOINING and len(given.users) == 1 and not given.kwargs:
            yield given
            yield from _nested(given)


def _is_kernel(node: fx.Node, states: Any, *, alone: bool = False) -> bool:
    """Whether a sum of weights is no summand itself: layers read it, or functions of weights other than sums.

    Args:
        node: The sum.
        states: The names of weights.
        alone: Whether only layers may read it.
    """
    for user in node.users:
        name, inputs = name_of(user), not _is_of_weights(user, states)
        if name in _MOVING:
            if not _is_kernel(user, states, alone=alone):
                return False
        elif name in _LAYERS and user.args[1] is node:
            if alone and not inputs:
                return False
        elif alone or inputs or name in _SUMMING:
            return False
    return True


def _is_small(function: _Function) -> bool:
    return bool(function.taker) or math.prod(shape_of(function.node) or ()) <= _MOST


def _is_of_weights(node: fx.Node, states: Any) -> bool:
    placed = [own for own in ancestors(node) if own.op == "placeholder"]
    return bool(placed) and all(own in states for own in placed)


def _source(node: fx.Node) -> fx.Node:
    """Return the value of which a node shows all elements."""
    while name_of(node) in _MOVING and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _root(node: Any, states: Any) -> str | None:
    """Return the parameter that a term shows, if nothing else reads it; empty if something does, None for others."""
    if not isinstance(node, fx.Node) or (source := _source(node)) not in states:
        return None
    while node is not source and len(node.users) == 1:
        node = node.all_input_nodes[0]
    return str(states[source]) if node is source and len(source.users) == 1 else ""


def _inside(functions: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the operations and weights that only some functions read."""
    found, inside = {*functions}, set[fx.Node]()
    for node in sorted({own for function in functions for own in ancestors(function)}, reverse=True):
        if node.users and node not in found and all(user in inside or user in found for user in node.users):
            inside.add(node)
    return inside


def _holds(system: System, function: _Function, free: set[str]) -> bool:
    """Whether some weights of a function may change, and it is finite where these vanish, as in canonical forms."""
    tensors = {name: own for name, own in system.tensors.items() if name in system.constants}
    generic = Generic({name: own.shape for name, own in system.tensors.items()}, tensors)
    made = system.made(function.node)
    zeros = {name: torch.zeros_like(generic[name]) if name in free else generic[name] for name in made.names()}
    return not free.isdisjoint(zeros) and bool(Weights(system, zeros).node(made).isfinite().all())
