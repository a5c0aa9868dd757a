"""Find batch norms with saved statistics in any spelling, and replace each by `batch_norm`.

The factor and the offset of each channel are functions of weights. Evaluated on random numbers, they show which weight
is the mean, the variance, the gain and the bias.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.nodes import ancestors, argument
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.graph.running import NOT_ON_NUMBERS, Constants, Step, run_step

aten = torch.ops.aten
_ARITHMETIC = {"add", "sub", "mul", "div"}
_CLOSE = 1e-9  # relative rounding errors in float64
_MOST = 12  # operations of a batch norm
_MOST_STATES = 4  # mean, variance, gain and bias
_LARGE = 2**22  # elements of a value for the evaluation


@dataclass(frozen=True)
class _Found:
    """A batch norm: its tensors, None where absent, and the axis of its channels."""

    axis: int
    mean: fx.Node
    variance: fx.Node
    gain: fx.Node | None
    bias: fx.Node | None
    eps: float


def recognise_batch_norms(rewriter: Rewriter) -> int:
    """Replace each written-out batch norm, and each with a later gain and bias, by one operation.

    Args:
        rewriter: The rewriter of the captured network. Changes the graph.

    Returns:
        The number of changes.
    """
    capture = rewriter.capture
    if not any(name in capture.buffers for name in capture.states.values()):
        return 0
    return rewriter.rewrite_from_the_end(lambda node: _rewritten(rewriter, node))


def _rewritten(r: Rewriter, node: fx.Node) -> fx.Node | None:
    chain = _chain(r, node) if _is_affine(r, node) else []
    for length in range(len(chain), 1, -1):
        steps = chain[:length][::-1]
        start: Any = _value(r, steps[0].node)
        if not _is_affine(r, steps[0].node) or sum(_is_affine(r, step.node) for step in steps) < 2:
            continue
        if (found := _found(r, start, steps)) is not None:
            new = _put(r, start, steps, found)
            r.replace(node, new)
            return new
    return None


# Possible components.


def _value(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Return the only argument of an operation that depends on inputs; None if there are several."""
    made = [given for given in node.all_input_nodes if r.made_of(given) == "inputs"]
    own = [given for given in node.args[:2] if given in made]
    return made[0] if len(made) == 1 == len(own) else None


def _is_affine(r: Rewriter, node: fx.Node) -> bool:
    """Whether an operation multiplies every channel by weights, or adds weights to it."""
    name = r.name(node)
    if name == "batch_norm":
        return argument(node, 3, "running_mean") is not None and argument(node, 5, "training") is False
    if name in ("conv1d", "conv2d", "conv3d"):
        sizes = r.shape(node.args[1])
        stride, padding = argument(node, 3, "stride", [1]), argument(node, 4, "padding", [0])
        plain = not isinstance(padding, str) and set(stride) <= {1} and set(padding) <= {0}
        return plain and argument(node, 6, "groups", 1) == sizes[0] > 1 and math.prod(sizes[1:]) == 1
    # A lone number belongs to no channel.
    return name in _ARITHMETIC and not node.kwargs and any(r.made_of(given) == "weights" for given in node.args[:2])


def _moves(r: Rewriter, node: fx.Node) -> bool:
    if r.name(node) not in operations(Trait.MOVE | Trait.CAST) or node.all_input_nodes != [node.args[0]]:
        return False
    one, two = node.meta.get("val"), node.args[0].meta.get("val")  # type: ignore[union-attr]
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return False
    return one.numel() == two.numel() and one.dtype == two.dtype


def _chain(r: Rewriter, node: fx.Node) -> list[Step]:
    """Return a chain of operations that ends in a node, last one first; each is read only by the next."""
    found: list[Step] = []
    user = None
    while len(found) < _MOST and (user is None or r.only_for(node, user)):
        if not _is_affine(r, node) and not _moves(r, node):
            break
        value = _value(r, node)
        if value is None or (r.shape(value) != r.shape(node) and not _moves(r, node)):
            break
        found.append(Step.of(node))
        node, user = value, node
    return found


def _states(r: Rewriter, steps: list[Step], start: fx.Node) -> list[fx.Node]:
    inside = {start, *(step.node for step in steps)}
    outside = [given for step in steps for given in step.node.all_input_nodes if given not in inside]
    return [
        node for node in dict.fromkeys(one for given in outside for one in ancestors(given)) if node in r.capture.states
    ]


# Measured effect.


def _found(r: Rewriter, start: fx.Node, steps: list[Step]) -> _Found | None:
    """Return the batch norm that some operations compute; None if they compute none."""
    states, shape = _states(r, steps, start), r.shape(start)
    names = [r.capture.states[state] for state in states]
    saved = [state for state, name in zip(states, names, strict=True) if name in r.capture.buffers]
    sizes = {r.shape(state) for state in states}
    if len(saved) != 2 or len(states) > _MOST_STATES or len(sizes) != 1 or math.prod(shape) > _LARGE:
        return None
    (size,) = sizes
    if len(size) != 1 or size[0] < 2 or len(shape) < 2 or size[0] not in shape:
        return None
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(2):
        numbers = {
            state: 0.5 + torch.rand(size, generator=generator, dtype=torch.float64).to(torch.float64)
            for state in states
        }
        try:
            with torch.no_grad():
                factor, added = _effect(r, start, steps, numbers)
        except NOT_ON_NUMBERS:
            return None
        draws.append((numbers, factor, added))
    for axis in (axis for axis, own in enumerate(shape) if own == size[0]):
        told = [(numbers, _along(factor, axis), _along(added, axis)) for numbers, factor, added in draws]
        if any(part is None for _, *parts in told for part in parts):
            continue
        for mean, variance, gain, bias in _roles(states, saved):
            if (eps := _eps(told, mean, variance, gain, bias)) is not None:
                return _Found(axis, mean, variance, gain, bias, eps)
    return None


def _roles(states: list[fx.Node], saved: list[fx.Node]) -> Iterator[tuple[Any, ...]]:
    others: list[fx.Node | None] = [state for state in states if state not in saved]
    others += [None] * (2 - len(others))
    for (mean, variance), (gain, bias) in itertools.product(
        itertools.permutations(saved), itertools.permutations(others)
    ):
        yield mean, variance, gain, bias


def _effect(r: Rewriter, start: fx.Node, steps: list[Step], numbers: dict[fx.Node, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the factor and the offset that operations apply to each element of their input."""
    known: dict[fx.Node, Any] = dict(numbers)
    get = Constants(known)

    def run(value: Tensor, moved: bool = False) -> Tensor:
        known[start] = value
        for step in steps:
            before = known[_value(r, step.node)]  # type: ignore[index]
            known[step.node] = run_step(step, get) if not moved or _moves(r, step.node) else before
        return known[steps[-1].node]  # type: ignore[no-any-return]

    shape = r.shape(start)
    places = run(torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape), moved=True).long().reshape(-1)
    back = torch.argsort(places)
    zero = run(torch.zeros(shape, dtype=torch.float64))
    one = run(torch.ones(shape, dtype=torch.float64))
    return ((one - zero).reshape(-1)[back].reshape(shape), zero.reshape(-1)[back].reshape(shape))


def _along(tensor: Tensor, axis: int) -> Tensor | None:
    """Return a tensor's vector along an axis; None if it varies along other axes."""
    rows = tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])
    return rows[0] if torch.equal(rows, rows[:1].expand_as(rows)) else None


def _eps(told: list[Any], mean: fx.Node, variance: fx.Node, gain: fx.Node | None, bias: fx.Node | None) -> float | None:
    """Return the eps added to the variance; None if these roles of the weights contradict the measured effect."""
    first: Any = None
    for numbers, factor, added in told:
        one = numbers[gain] if gain is not None else torch.ones_like(factor)
        shift = numbers[bias] if bias is not None else torch.zeros_like(factor)
        if first is None:
            exact = float(((one / factor).square() - numbers[variance]).mean())
            first = (0.0, float(f"{exact:.3g}"), exact)
        first = [
            eps
            for eps in first
            if eps >= 0
            and torch.allclose(factor, one * (numbers[variance] + eps).rsqrt(), rtol=_CLOSE, atol=0)
            and torch.allclose(added, shift - numbers[mean] * factor, rtol=_CLOSE, atol=_CLOSE)
        ]
    return float(first[0]) if first else None


def _put(r: Rewriter, start: fx.Node, steps: list[Step], found: _Found) -> fx.Node:
    order = list(range(len(r.shape(start))))
    order.insert(1, order.pop(found.axis))
    turned = order != sorted(order)
    value = r.insert(aten.permute.default, start, order) if turned else start
    value = r.insert(
        aten.batch_norm.default, value, found.gain, found.bias, found.mean, found.variance, False, 0.1, found.eps, False
    )
    if turned:
        value = r.insert(aten.permute.default, value, [order.index(axis) for axis in range(len(order))])
    for step in steps:
        if _moves(r, step.node):
            value = r.insert(step.target, value, *step.args[1:], **step.kwargs)
    return value
