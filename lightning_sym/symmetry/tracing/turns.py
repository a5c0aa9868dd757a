"""Which operations of a graph mix the elements of one value by constants, and where that turns planes of coordinates.

See docs/theory/intertwiners.md, 2.15.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lightning_sym.symmetry.tracing.capture import operation_name
from lightning_sym.symmetry.tracing.constraints import Constraints, Label
from lightning_sym.symmetry.tracing.mixtures import Labelled, Mixture, Planes, added, find_planes, joined
from lightning_sym.symmetry.tracing.values import Value, values_in

_CLOSING = ("add", "sub", "cat")


def mixture_of(value: Value) -> Mixture:
    """Return of which value's elements this one is made: of its own, if of no other one's."""
    return value.mixture or Mixture.of(value)


def mixed(node: fx.Node, arguments: Sequence[Any], keywords: dict[str, Any]) -> Mixture | None:
    """Return what an operation that moves nothing makes of the elements of one value by constants; None if it does not.

    Products begin it, with a constant that is something else at other positions: others leave all positions alike.
    """
    name = operation_name(node.target)
    if keywords or not arguments:
        return None
    first = arguments[0]
    if name == "neg" and first.labels:
        return mixture_of(first).times(torch.tensor(-1.0))
    if name == "mul" and len(arguments) == 2:
        return _product(*arguments)
    if name in ("add", "sub") and len(arguments) == 2 and any(_is_open(value) for value in arguments):
        return _of_one_base(arguments, lambda parts: added(parts, [1.0, 1.0 if name == "add" else -1.0]))
    if name == "cat":
        return _of_one_base(first, lambda parts: joined(parts, lambda tensors: torch.cat(tensors, *arguments[1:])))
    return None


def _product(one: Any, two: Any) -> Mixture | None:
    """Return the product of a value and a constant."""
    value, factor = (one, two) if isinstance(one, Value) and one.labels else (two, one)
    if not isinstance(value, Value) or not value.labels:
        return None
    own = mixture_of(value)
    if isinstance(factor, (int, float)):
        return own.times(torch.tensor(float(factor))) if own.opened else None
    known = factor.concrete if isinstance(factor, Value) and not factor.labels else None
    if known is None:
        return None
    # Along which axes of the value, from the end, the constant is not the same.
    varying = {axis - known.ndim for axis, size in enumerate(known.shape) if size > 1 and known.stride(axis)}
    varying = {axis for axis in varying if bool((known != known.narrow(axis, 0, 1)).any())}
    labelled = {axis - value.ndim for label in value.labels for axis in label.axes}
    by_position = bool(varying - labelled)
    if not (own.opened or by_position):
        return None
    return own.times(known, by_position=by_position, mixed=bool(varying & labelled))


def _of_one_base(values: Sequence[Any], combine: Callable[[list[Mixture]], Mixture]) -> Mixture | None:
    if not all(isinstance(value, Value) and value.labels for value in values):
        return None
    parts = [mixture_of(value) for value in values]
    return combine(parts) if all(own.base is parts[0].base for own in parts) else None


def _is_open(value: Any) -> bool:
    return isinstance(value, Value) and value.mixture is not None and value.mixture.opened


class Turns:
    """Where constants turn planes of coordinates in one walk through a network.

    Args:
        constraints: The demands.
    """

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self._made_of: dict[fx.Node, Labelled] = {}
        self._harmless: set[fx.Node] = set()
        self._put_off: dict[int, list[Any]] = {}

    @contextmanager
    def mixing(self, mixture: Mixture | None) -> Iterator[None]:
        """Leave what an operation does to planes to the whole of which it is a part."""
        if mixture is None or not mixture.opened:
            yield
            return
        self.constraints.mixing = True
        try:
            yield
        finally:
            self.constraints.mixing = False
        self._put_off.setdefault(id(mixture.base), []).extend(self.constraints.put_off)
        self.constraints.put_off = []

    def follow(self, node: fx.Node, mixture: Mixture | None, result: Any) -> Any:
        """Return the result of an operation, made of the elements of one value, or with planes that were turned."""
        if mixture is None:
            for value in values_in(result):
                if value.mixture is not None and value.mixture.opened:
                    self._note(node, value.mixture)
            return result
        if not isinstance(result, Value):
            return result
        if not mixture.opened:
            return replace(result, mixture=mixture)
        self._note(node, mixture)
        if mixture.by_position and operation_name(node.target) in _CLOSING:
            planes = find_planes(mixture, result.shape)
            if planes is not None:
                self._harmless.add(node)
                return self._turned(mixture.base, planes, result)
        return replace(result, mixture=mixture)

    def _note(self, node: fx.Node, mixture: Mixture) -> None:
        self._made_of[node] = mixture.base
        if not mixture.mixed:
            self._harmless.add(node)

    def _turned(self, base: Labelled, planes: Planes, result: Value) -> Value:
        """Return a value whose coordinates are those of the base, turned in planes."""
        constraints = self.constraints
        (label,) = base.labels
        label = constraints.resolve(label)
        atom, tag, scale = (part.ravel() for part in label.parts)
        first, second = atom[planes.first], atom[planes.second]
        constraints.turned.append((first, second))
        one, two = (constraints.copied_from(part) for part in (first, second))
        if (one != first).any():  # turned copies are turned units
            constraints.turned.append((one, two))
        constraints.equate([(scale[planes.first], 1.0), (scale[planes.second], -1.0)])
        if planes.several:
            constraints.planes.append((first, second))
        shape = tuple(result.shape[axis] for axis in planes.axes)
        own = Label(planes.axes, *(part[planes.source].reshape(shape) for part in (atom, tag, scale)))
        return Value(result.shape, (own,))

    def finish(self) -> None:
        """Hold what is mixed and not turned in planes, but read."""
        for node, base in self._made_of.items():
            if node in self._harmless or all(self._made_of.get(user) is base for user in node.users):
                continue
            self.constraints.held += [label.atom.ravel() for label in base.labels]
            for atom, note in self._put_off.pop(id(base), ()):
                self.constraints.fix_units(atom)
                if note:
                    self.constraints.notes[note] = None
