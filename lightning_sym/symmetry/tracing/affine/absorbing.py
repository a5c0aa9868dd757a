"""Weights that a network reads only in a sum with a function of others, `w + f(v)`: all of v may change.

Then w takes off the change of f. Example: a layer with a low-rank update, `W + B A`.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.affine.reading import Constants
from lightning_sym.symmetry.tracing.affine.system import System
from lightning_sym.symmetry.tracing.affine.weights import Generic, Made, Program, Weights
from lightning_sym.symmetry.tracing.nodes import ancestors, shape_of
from lightning_sym.symmetry.tracing.operations import Trait, name_of, operations

_MOVING = operations(Trait.REGROUP | Trait.PERMUTE | Trait.CAST)
_JOINING = {"add", "sub"}


class ByFunction(NamedTuple):
    """The change of a function of weights, where some of these change.

    Attributes:
        node: The function.
        given: The names and shapes of the weights that change.
    """

    node: Made
    given: tuple[tuple[str, tuple[int, ...]], ...]

    def _moved(self, values: Tensor, weights: Weights) -> Tensor:
        """Return the function after additions to its weights, side by side in `values`."""
        parts = values.split([math.prod(shape) for _, shape in self.given])
        moved = {name: weights.tensor(name) + own.reshape(shape)
                 for (name, shape), own in zip(self.given, parts, strict=True)}  # fmt: skip
        rest = {name: weights.tensor(name) for name in self.node.names() - moved.keys()}
        made: Tensor = _Moved(weights.program, {**rest, **moved}).node(self.node)
        return made

    def __call__(self, values: Tensor, weights: Weights) -> Tensor:
        """Return derived unknowns."""
        before = weights.node(self.node)
        return torch.stack([self._moved(own, weights) - before for own in values])

    def rates(self, values: Tensor, weights: Weights) -> Tensor:
        """Return the derivative of derived unknowns along values."""
        zero, made = torch.zeros(values.shape[1], dtype=torch.float64), []
        for own in values:
            made.append(torch.func.jvp(lambda t: self._moved(t, weights), (zero,), (own,))[1])
        return torch.stack(made)

    def pulled_back(self, slopes: Tensor, shape: Sequence[int], weights: Weights) -> Tensor:
        """Return the derivative by values of a shape, given that by the derived unknowns."""
        _, back = torch.func.vjp(lambda t: self._moved(t, weights), torch.zeros(tuple(shape), dtype=torch.float64))
        return torch.stack([back(own)[0] for own in slopes])

    def names(self, program: Program) -> set[str]:
        """Return the names of the tensors that are needed."""
        return self.node.names()


class _Moved(Weights):
    """Weights of which some carry derivatives."""

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer."""
        return self.tensors[name]


def absorb_ahead(system: System, captures: Sequence[Constants]) -> None:
    """Record the functions of weights that another weight absorbs, if it does in all captures."""
    functions = [list(_functions(system, constants)) for constants in captures]
    inside = [_inside(own) for own in functions]
    idle = [{*map(constants.capture.states.get, own)} for constants, own in zip(captures, inside, strict=True)]
    kept = set().union(*(constants.capture.buffers for constants in captures)) | system.partial.keys()
    common = set.intersection(*idle) - {None} if idle else set()
    free = {str(name) for name in common & system.movable - kept}
    every = [node for own in functions for node in own]
    if not free or set().union(*idle) - {None} != common or not all(_holds_at_zero(system, own, free) for own in every):
        return
    system.inside = set().union(*inside)
    system.idle = {str(name) for name in common}
    system.absorbed = {node: tuple(sorted(free & system.made(node).names())) for node in every}
    for name in system.idle:
        system.weights.discard(name)
        system.common.pop(name, None)


def _functions(system: System, constants: Constants) -> Iterator[fx.Node]:
    """Yield the functions that are added to a parameter without other readers, the last ones first."""
    states, taken = constants.capture.states, set[fx.Node]()
    for node in reversed(constants.capture.graph.nodes):
        if name_of(node) not in _JOINING or node in taken or not _is_of_weights(node, states):
            continue
        terms = [*_terms(node)]
        taken |= {own for own in ancestors(node) if name_of(own) in _JOINING}
        if any(shape_of(own) == shape_of(node) and _root(own, states) in system.movable for own in terms):
            yield from (own for own in terms if isinstance(own, fx.Node) and _root(own, states) is None)


def _terms(node: fx.Node) -> Iterator[Any]:
    """Yield the terms of nested sums without other readers."""
    for given in () if node.kwargs else node.args[:2]:
        if isinstance(given, fx.Node) and name_of(given) in _JOINING and len(given.users) == 1 and not given.kwargs:
            yield from _terms(given)
        else:
            yield given


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


def _holds_at_zero(system: System, node: fx.Node, free: Collection[str]) -> bool:
    """Whether a function is finite where its free weights vanish, as in canonical forms."""
    tensors = {name: own for name, own in system.tensors.items() if name in system.constants}
    generic = Generic({name: own.shape for name, own in system.tensors.items()}, tensors)
    made = system.made(node)
    zeros = {name: torch.zeros_like(generic[name]) if name in free else generic[name] for name in made.names()}
    return bool(Weights(system, zeros).node(made).isfinite().all())
