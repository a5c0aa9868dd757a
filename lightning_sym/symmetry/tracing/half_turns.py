"""Half periods of sines and cosines, which biases in front of them may take up.

As sin(x + pi) = -sin(x) and cos(x + pi) = -cos(x), half a period added to a bias changes the sign of what comes out.
See docs/theory/intertwiners.md, 2.17.
"""

import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from lightning_sym.symmetry.tracing.constraints import HalfPeriod, Label
from lightning_sym.symmetry.tracing.nodes import argument
from lightning_sym.symmetry.tracing.numbering import Ints
from lightning_sym.symmetry.tracing.operations import Trait, name_of, operations, out_of_place
from lightning_sym.symmetry.tracing.rules import pointwise, register_rule
from lightning_sym.symmetry.tracing.values import InFront, Value
from lightning_sym.symmetry.tracing.vocabulary import Trace

_PERIODIC = ("sin", "cos")


class _Sum(NamedTuple):
    """Where a bias is added.

    Attributes:
        node: The operation.
        bias: The name of the bias.
        times: By what it is multiplied before.
        axis: On which axis of the sum its entries stand.
    """

    node: fx.Node
    bias: str
    times: float
    axis: int


@register_rule(*(f"aten::{name}" for name in _PERIODIC))
def _periodic(trace: Trace, value: Value) -> Value:
    """Units move and change sign; half a period in a bias flips what comes out."""
    assert isinstance(trace.node.target, torch._ops.OpOverload)
    passed: Value = pointwise(out_of_place(trace.node.target), trace, value)
    chain = list(_back(trace, trace.node.args[0]))
    start = _sum_at(trace, chain[-1][0]) if chain else None
    if start is None:
        return passed
    period = trace.periods.setdefault(start.node, _period(trace, start))
    number = _entries(trace, start)
    own = next((label for label in passed.labels if _known(label, number) is not None), None)
    if period is None or own is None:
        return passed
    constraints = trace.constraints
    found = constraints.half_periods.get(start.bias)
    if found is None:
        standing = trace.axis_labels[start.bias][0].scale
        found = HalfPeriod(period, standing, constraints.fresh_scales(standing.shape))
        constraints.fix_scales(found.flip, signs=False)
        constraints.half_periods[start.bias] = found
    elif not math.isclose(found.size, period):  # of captures that differ
        constraints.half_periods[start.bias] = replace(found, size=math.nan)
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


def _back(trace: Trace, node: Any) -> Iterator[tuple[fx.Node, float]]:
    """Yield what leads to a value without anything but numbers and movements, and by what each is multiplied there.

    The last one is where a bias is added, if there is such a sum; numbers are relative to that one.
    """
    nodes: list[tuple[fx.Node, float]] = []
    while isinstance(node, fx.Node):
        step = None if _sum_at(trace, node) is not None else _step(trace, node)
        nodes.append((node, 1.0 if step is None else step[1]))
        if step is None:
            break
        node = step[0]
    total, found = 1.0, []
    for one, times in reversed(nodes):
        total *= times
        found.append((one, total))
    yield from reversed(found)


def _step(trace: Trace, node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return what an operation multiplies by a number, adds a number to, or moves; None if it does something else."""
    name, nodes = name_of(node), [own for own in node.args if isinstance(own, fx.Node)]
    if node.target is operator.getitem or name in operations(Trait.MOVE):
        return (nodes[0], 1.0) if len(node.all_input_nodes) == 1 else None
    if name == "neg":
        return nodes[0], -1.0
    if name not in operations(Trait.PRODUCT | Trait.JOIN) or node.kwargs or len(node.args) != 2:
        return None
    for place, (own, other) in enumerate((node.args, node.args[::-1])):
        number = _number(trace, other)
        if not isinstance(own, fx.Node) or number is None or _number(trace, own) is not None:
            continue
        if name in operations(Trait.JOIN):
            sign = -1.0 if (name in ("sub", "subtract") and place == 1) or (name == "rsub" and place == 0) else 1.0
            return own, sign
        if name in ("mul", "multiply"):
            return (own, number) if number else None
        return (own, 1 / number) if place == 0 and number else None
    return None


def _number(trace: Trace, given: Any) -> float | None:
    """Return a number of the graph, or a constant of one element."""
    if isinstance(given, (int, float)):
        return float(given)
    value = trace.environment.get(given) if isinstance(given, fx.Node) else None
    if not isinstance(value, Value) or value.concrete is None or value.by_size or value.concrete.numel() != 1:
        return None
    return float(value.concrete)


def _sum_at(trace: Trace, node: fx.Node) -> _Sum | None:
    """Return what an operation adds of a bias that nothing else reads; None if it adds none."""
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
            minus = (name in ("sub", "subtract") and place == 1) or (name == "rsub" and place == 0)
            return _Sum(node, held, -times if minus else times, axis + shape.ndim)
    return None


def _bias(trace: Trace, node: Any) -> tuple[str, float, int] | None:
    """Return which bias a value is, by what it is multiplied, and on which axis it stands, counted from the last."""
    times, value = 1.0, trace.environment.get(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, Value) or len(value.labels) != 1 or len(value.labels[0].axes) != 1:
        return None
    axis = value.labels[0].axes[0] - value.ndim
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if (name := trace.capture.states.get(node)) is not None:
            vector = name in trace.axis_labels and len(trace.tensors[name].shape) == 1
            return (name, times, axis) if vector and trace.tensors[name].numel() == value.labels[0].size else None
        step = _step(trace, node)
        if step is None or name_of(node) in operations(Trait.JOIN):
            return None
        node, times = step[0], times * step[1]
    return None


def _period(trace: Trace, start: _Sum) -> float | None:
    """Return half a period in the bias, if sines and cosines of one frequency alone read the sum."""
    found = {round(own, 12) for own in _frequencies(trace, start.node)}
    frequency = found.pop() * abs(start.times) if len(found) == 1 else math.nan
    return None if math.isnan(frequency) else math.pi / frequency


def _frequencies(trace: Trace, node: fx.Node) -> Iterator[float]:
    for user in node.users:
        if name_of(user) in _PERIODIC:
            yield 1.0
        elif (step := _step(trace, user)) is not None and step[0] is node:
            yield from (abs(step[1]) * own for own in _frequencies(trace, user))
        else:
            yield math.nan


def _entries(trace: Trace, start: _Sum) -> dict[int, int]:
    """Return for each unit of a sum the number of its bias's entry."""
    for label in trace.environment[start.node].labels:
        if label.axes == (start.axis,):
            number = {int(atom): place for place, atom in enumerate(label.atom)}
            return number if len(number) == trace.tensors[start.bias].numel() else {}
    return {}


def _known(label: Label, number: dict[int, int]) -> Ints | None:
    """Return for each position of a label the number of the bias's entry that is added there; None if none is."""
    entries = [number.get(int(atom), -1) for atom in label.atom.ravel()]
    return None if -1 in entries or not entries else np.array(entries).reshape(label.atom.shape)
