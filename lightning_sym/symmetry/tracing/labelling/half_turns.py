"""Half periods of sines and cosines, which biases before them may absorb.

As sin(x + pi) = -sin(x) and cos(x + pi) = -cos(x), half a period added to a bias flips the sign of the output. See
docs/theory/intertwiners.md, 2.17.
"""

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.tracing.graph.nodes import argument
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations, out_of_place
from lightning_sym.symmetry.tracing.labelling.constraints import HalfPeriod, Label
from lightning_sym.symmetry.tracing.labelling.rules import pointwise, register_rule
from lightning_sym.symmetry.tracing.labelling.values import InFront, Value
from lightning_sym.symmetry.tracing.labelling.vocabulary import Trace

_PERIODIC = ("sin", "cos")


class _Sum(NamedTuple):
    """The sum of a bias and a value.

    Attributes:
        node: The operation.
        bias: The name of the bias.
        times: The factor of the bias.
        axis: The axis of the sum that indexes the bias's entries.
    """

    node: fx.Node
    bias: str
    times: float
    axis: int


@register_rule(*(f"aten::{name}" for name in _PERIODIC))
def _periodic(trace: Trace, value: Value) -> Value:
    """Allow permutations and signs; half a period in a bias flips the output."""
    target: Any = trace.node.target
    passed: Value = pointwise(out_of_place(target), trace, value)
    chain = _back(trace, trace.node.args[0]) or []
    start = _sum_at(trace, chain[0][0]) if chain else None
    if start is None:
        return passed
    period, number = _period(trace, start), _entries(trace, start, chain)
    own = next((label for label in passed.labels if _known(label, number) is not None), None)
    if period is None or own is None:  # another reader excludes half periods
        trace.aperiodic.add(start.bias)
        return passed
    trace.periodic.add(start.bias)
    constraints = trace.constraints
    found = constraints.half_periods.get(start.bias)
    if found is None:
        standing = trace.axis_labels[start.bias][0].scale
        found = HalfPeriod(period, standing, constraints.fresh_scales(standing.shape))
        constraints.fix_scales(found.flip, signs=False)
        constraints.half_periods[start.bias] = found
    elif not math.isclose(found.size, period):  # captures disagree
        trace.aperiodic.add(start.bias)
        return passed
    for node, times in chain:
        held = trace.environment[node]
        for label in held.labels if isinstance(held, Value) else ():
            if (entries := _known(label, number)) is not None:
                trace.half_turned[node] = InFront(start.bias, start.times * times, label.axes, entries)
    entries = _known(own, number)
    assert entries is not None
    flipped = constraints.fresh_scales(own.scale.shape)
    constraints.fix_scales(flipped, signs=False)
    constraints.equate([(flipped, 1.0), (own.scale, 1.0), (found.flip[entries], 1.0)], magnitudes=False)
    labels = tuple(own.scaled_by(flipped) if label is own else label for label in passed.labels)
    return replace(passed, labels=labels)


def _back(trace: Trace, node: Any) -> list[tuple[fx.Node, float]] | None:
    """Return a path from a sum with a bias to a value, if only periodic functions read the values along it.

    Returns:
        The operations from the sum to the value, with the factor of the sum at each; None if there is no such path.
    """
    if not isinstance(node, fx.Node) or any(math.isnan(own) for own in _frequencies(trace, node, set())):
        return None
    if _sum_at(trace, node) is not None:
        return [(node, 1.0)]
    for given in node.all_input_nodes:
        times = _times(trace, node, given)
        if times is not None and (path := _back(trace, given)) is not None:
            return [*path, (node, path[-1][1] * times)]
    return None


def _times(trace: Trace, node: fx.Node, given: fx.Node) -> float | None:
    """Return the factor that an operation applies to an argument; None if it is not a move, sum or product."""
    name = name_of(node)
    if node.target is operator.getitem or name in operations(Trait.MOVE):
        return 1.0 if node.all_input_nodes == [given] else None
    if name == "neg":
        return -1.0
    if name not in operations(Trait.PRODUCT | Trait.JOIN) or node.kwargs or len(node.args) != 2:
        return None
    place = int(node.args[1] is given)
    other = node.args[1 - place]
    if other is given:
        return None
    if name in operations(Trait.JOIN):
        return -1.0 if _is_subtracted(name, place) else 1.0
    number = _number(trace, other)
    if not number or (place == 1 and name not in ("mul", "multiply")):
        return None
    return number if name in ("mul", "multiply") else 1 / number


def _is_subtracted(name: str, place: int) -> bool:
    """Return whether an argument of a sum or difference is subtracted."""
    return place == 1 if name in ("sub", "subtract") else place == 0 and name == "rsub"


def _number(trace: Trace, given: Any) -> float | None:
    """Return the value of a number or of a constant with one element; else None."""
    if isinstance(given, (int, float)):
        return float(given)
    value = trace.environment.get(given) if isinstance(given, fx.Node) else None
    if not isinstance(value, Value) or value.concrete is None or value.by_size or value.concrete.numel() != 1:
        return None
    return float(value.concrete)


def _sum_at(trace: Trace, node: fx.Node) -> _Sum | None:
    """Return the sum if an operation adds a bias that it alone reads; else None."""
    name, shape = name_of(node), node.meta.get("val")
    if not isinstance(shape, torch.Tensor):
        return None
    if name == "linear" or (name.startswith("conv") and "transpose" not in name):
        bias = _bias(trace, argument(node, 2, "bias"))
        return None if bias is None else _Sum(node, *bias[:2], shape.ndim - 1 if name == "linear" else 1)
    if name not in operations(Trait.JOIN) or node.kwargs or len(node.args) != 2:
        return None
    for place, given in enumerate(node.args):
        if (bias := _bias(trace, given)) is not None and isinstance(node.args[1 - place], fx.Node):
            held, times, axis = bias
            times = -times if _is_subtracted(name, place) else times
            fits = shape.shape[axis] == trace.tensors[held].numel()
            return _Sum(node, held, times, axis + shape.ndim) if fits else None
    return None


def _bias(trace: Trace, node: Any) -> tuple[str, float, int] | None:
    """Return the name of a bias, the number that multiplies it, and its axis counted from the last; else None."""
    times, value = 1.0, trace.environment.get(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, Value) or len(value.labels) != 1 or len(value.labels[0].axes) != 1:
        return None
    axis = value.labels[0].axes[0] - value.ndim
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if (name := trace.capture.states.get(node)) is not None:
            vector = name in trace.axis_labels and len(trace.tensors[name].shape) == 1
            return (name, times, axis) if vector and trace.tensors[name].numel() == value.labels[0].size else None
        (given, *others) = node.all_input_nodes or (None,)
        step = _times(trace, node, given) if given is not None and not others else None
        if step is None:
            return None
        node, times = given, times * step
    return None


def _period(trace: Trace, start: _Sum) -> float | None:
    """Return half a period of the bias if only sines and cosines of one frequency read the sum; else None."""
    found = {round(own, 12) for own in _frequencies(trace, start.node, set())}
    return math.pi / (found.pop() * abs(start.times)) if len(found) == 1 else None


def _frequencies(trace: Trace, node: fx.Node, sums: set[fx.Node]) -> Iterator[float]:
    """Yield the factor of a value in each periodic function that reads it; NaN for any other reader.

    Args:
        trace: The walk.
        node: The value.
        sums: Additions on the way; a second visit means that the value is added to itself.
    """
    for user in node.users:
        times = _times(trace, user, node)
        if name_of(user) in _PERIODIC:
            yield 1.0
        elif times is None or user in sums:
            yield math.nan
        else:
            sums |= {user} if name_of(user) in operations(Trait.JOIN) else set()
            yield from (abs(times) * own for own in _frequencies(trace, user, sums))


def _entries(trace: Trace, start: _Sum, path: list[tuple[fx.Node, float]]) -> dict[int, int]:
    """Return the index of the bias's entry for each unit along a path from a sum."""
    labels = [label for label in trace.environment[start.node].labels if label.axes == (start.axis,)]
    number = {int(atom): place for label in labels for place, atom in enumerate(label.atom)}
    if len(number) != trace.tensors[start.bias].numel():
        return {}
    for (before, _), (node, _) in itertools.pairwise(path):
        if name_of(node) not in operations(Trait.JOIN):  # which may keep the units of the other summand
            continue
        one, two = trace.environment[before], trace.environment[node]
        for label, other in itertools.product(one.labels, two.labels):
            same = other.axes == tuple(axis + two.ndim - one.ndim for axis in label.axes)
            if same and label.atom.shape == other.atom.shape and (entries := _known(label, number)) is not None:
                number |= dict(zip(other.atom.ravel().tolist(), entries.ravel().tolist(), strict=True))
    return number


def _known(label: Label, number: dict[int, int]) -> Ints | None:
    """Return the index of the bias's entry at each position of a label; None if a position has none."""
    entries = [number.get(int(atom), -1) for atom in label.atom.ravel()]
    return None if -1 in entries or not entries else np.array(entries).reshape(label.atom.shape)
