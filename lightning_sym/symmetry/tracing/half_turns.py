"""Half periods of sines and cosines, which biases in front of them may take up.

As sin(x + pi) = -sin(x) and cos(x + pi) = -cos(x), half a period added to a bias changes the sign of what comes out.
See docs/theory/intertwiners.md, 2.17.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from lightning_sym.symmetry.tracing.constraints import HalfPeriod
from lightning_sym.symmetry.tracing.nodes import argument
from lightning_sym.symmetry.tracing.operations import Trait, name_of, operations, out_of_place
from lightning_sym.symmetry.tracing.rules import pointwise, register_rule
from lightning_sym.symmetry.tracing.values import Value
from lightning_sym.symmetry.tracing.vocabulary import Trace

_PERIODIC = ("sin", "cos")


@register_rule(*(f"aten::{name}" for name in _PERIODIC))
def _periodic(trace: Trace, value: Value) -> Value:
    """Units move and change sign; half a period in a bias flips what comes out."""
    assert isinstance(trace.node.target, torch._ops.OpOverload)
    passed: Value = pointwise(out_of_place(trace.node.target), trace, value)
    chain = _chain(trace.node)
    factor = None if chain is None else _factor(chain[-1][0])
    if chain is None or factor is None:
        return passed
    writer = chain[-1][0]
    held = writer.args[2]
    assert isinstance(held, fx.Node)  # _chain looked
    bias = trace.capture.states.get(held, "")
    axis = value.ndim - 1 if name_of(writer) == "linear" else 1
    own = next((label for label in passed.labels if label.axes == (axis,)), None)
    if own is None or bias not in trace.axis_labels or len(held.users) > 1:
        return passed
    constraints, standing = trace.constraints, trace.axis_labels[bias][0]
    if standing.size != own.size:
        return passed
    found = constraints.half_periods.get(bias)
    if found is None:
        found = HalfPeriod(math.pi / factor, standing.scale, constraints.fresh_scales((own.size,)))
        constraints.fix_scales(found.flip, signs=False)
        constraints.half_periods[bias] = found
    elif not math.isclose(found.size, math.pi / factor):  # of captures that differ
        constraints.half_periods[bias] = replace(found, size=math.nan)
        return passed
    trace.half_turned |= {node: (bias, times) for node, times in chain}
    flipped = constraints.fresh_scales((own.size,))
    constraints.fix_scales(flipped, signs=False)
    constraints.equate([(flipped, 1.0), (own.scale, 1.0), (found.flip, 1.0)], magnitudes=False)
    labels = tuple(own.scaled_by(flipped) if label is own else label for label in passed.labels)
    return replace(passed, labels=labels)


def _chain(node: fx.Node) -> list[tuple[fx.Node, float]] | None:
    """Return what leads from a layer with a bias to what a periodic function reads, multiplied by numbers only.

    Returns:
        The nodes from the function's input back to the layer, and by what the bias is multiplied in each; None if there
        is no such layer.
    """
    nodes, read = [], node.args[0]
    while isinstance(read, fx.Node) and (times := _multiple(read)) is not None:
        nodes.append((read, times))
        read = read.args[0]
    if not isinstance(read, fx.Node) or name_of(read) not in operations(Trait.CONTRACT):
        return None
    if "transpose" in name_of(read) or not (name_of(read) == "linear" or name_of(read).startswith("conv")):
        return None
    if not isinstance(argument(read, 2, "bias"), fx.Node) or len(read.args) < 3:
        return None
    found, total = [(read, 1.0)], 1.0
    for node, times in reversed(nodes):
        total *= times
        found.append((node, total))
    return found[::-1]


def _multiple(node: fx.Node) -> float | None:
    """Return by which number an operation multiplies its first argument; None if it does something else, too."""
    name = name_of(node)
    if name == "neg":
        return -1.0
    number = node.args[1] if name in operations(Trait.PRODUCT) and len(node.args) == 2 and not node.kwargs else None
    if not isinstance(number, (int, float)) or not number or not isinstance(node.args[0], fx.Node):
        return None
    return 1 / number if name in ("div", "divide", "true_divide") else float(number)


def _factor(node: fx.Node) -> float | None:
    """Return by which number a value is multiplied for all periodic functions, which alone read it; up to its sign."""
    found = {round(own, 12) for own in _factors(node)}
    return found.pop() if len(found) == 1 and not math.isnan(min(found)) else None


def _factors(node: fx.Node) -> Iterator[float]:
    for user in node.users:
        if name_of(user) in _PERIODIC:
            yield 1.0
        elif (times := _multiple(user)) is not None:
            yield from (abs(times) * own for own in _factors(user))
        else:
            yield math.nan
