"""Parameters that a network reads as a number plus the parameter: the sum stands in the graph in their place."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.invisible import argument
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.rewriting import Rewriter

aten = torch.ops.aten


def factored(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite x + x w as x (1 + w)."""
    for value, product in (node.args[:2], node.args[1::-1]):
        if r.name(product) != "mul" or not isinstance(product, fx.Node) or not r.only_for(product, node):
            continue
        factors = [given for given in product.args[:2] if given is not value]
        if len(factors) != 1 or not isinstance(factors[0], fx.Node) or not isinstance(value, fx.Node):
            continue
        if r.shape(value) == r.shape(node) and argument(node, 2, "alpha", 1) == 1:
            return r.insert(aten.mul.Tensor, value, r.insert(aten.add.Tensor, factors[0], 1.0))
    return None


class _Read(NamedTuple):
    """A node that is ``factor * (w + number)`` of a parameter w; `part` is w as it is cast there."""

    node: fx.Node
    part: fx.Node
    factor: float
    number: float


def read_as_sums(r: Rewriter) -> None:
    """Let a parameter that is read as 1 + w, and in no other way, stand for the sum: what multiplies that scales."""
    for node, name in r.capture.states.items():
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        reads = _reads(r, _Read(node, node, 1.0, 0.0))
        numbers = {read.number for read in reads or ()}
        if reads is None or len(numbers) != 1 or numbers == {0.0} or not all(read.factor for read in reads):
            continue
        for read in reads:
            r.at = read.node
            new = read.part if read.factor == 1 else r.insert(aten.mul.Tensor, read.part, read.factor)
            r.replace(read.node, new)
        r.capture.charts[name] = numbers.pop()


def _reads(r: Rewriter, here: _Read) -> list[_Read] | None:
    """Return the last of all operations that add numbers to a parameter, or multiply it; None if others read it."""
    found: list[_Read] = []
    seen = False
    for user in here.node.users:
        step = _step(r, here, user)
        if step is None:
            seen = True
        elif (further := _reads(r, step)) is None:
            return None
        else:
            found += further
    if seen and (here.node in r.capture.states or found):
        return None
    return [here] if seen else found


def _step(r: Rewriter, here: _Read, user: fx.Node) -> _Read | None:
    """Return what an operation makes of a multiple of a parameter and a number, if it is one, too."""
    name, (_, part, factor, number) = r.name(user), here
    if any(mark.node is user for mark in r.capture.marks):
        return None
    value, old = user.meta.get("val"), here.node.meta["val"]
    if not name or not isinstance(value, Tensor) or value.shape != old.shape:
        return None
    if name == "neg":
        return _Read(user, part, -factor, number)
    if name in operations(Trait.CAST):
        return _Read(user, user if (factor, number) == (1.0, 0.0) else part, factor, number)
    if name not in ("add", "sub", "rsub", "mul") or value.dtype != old.dtype or argument(user, 2, "alpha", 1) != 1:
        return None
    first = user.args[0] is here.node
    other = _number(r, user.args[1 if first else 0])
    if other is None or not factor:
        return None
    if name == "mul":
        return _Read(user, part, factor * other, number)
    if name == "rsub" or (name == "sub" and not first):
        factor = -factor
    elif name == "sub":
        other = -other
    return _Read(user, part, factor, number + other / factor)


def _number(r: Rewriter, item: object) -> float | None:
    """Return the number that is added everywhere."""
    if isinstance(item, fx.Node) and r.name(item) == "full":
        return r.number(item.args[1])
    return r.number(item)


def charts_of(captures: Sequence[Capture]) -> tuple[dict[str, float], set[str]]:
    """Return what is added to parameters wherever they are read, and those to which not every capture adds the same."""
    charts: dict[str, float] = {}
    unlike: set[str] = set()
    for name in sorted({name for capture in captures for name in capture.charts}):
        read = {
            capture.charts.get(name, 0.0)
            for capture in captures
            for node, own in capture.states.items()
            if own == name and node.users
        }
        if len(read) == 1:
            charts[name] = read.pop()
        else:
            unlike.add(name)
    return charts, unlike
