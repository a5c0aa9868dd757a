"""Merge linear layers that read one value and whose results are added into the layer with the largest kernel.

Examples: a 3x3 and a 1x1 convolution, each with a batch norm (RepVGG); a layer and two smaller ones in a row (LoRA).
The merged layer reads its weight only in a sum with the others' weights, which translations then change freely.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_sym.symmetry.tracing.affine.products import listed
from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.contractions import reshaped
from lightning_sym.symmetry.tracing.nodes import argument, shape_of
from lightning_sym.symmetry.tracing.operations import name_of, spatial_axes_of
from lightning_sym.symmetry.tracing.rewriting import NoSpellingError, Rewriter
from lightning_sym.symmetry.tracing.rules import own_operations
from lightning_sym.symmetry.tracing.sums import Term, summed, terms_of

aten = torch.ops.aten
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_LAYERS = ("linear", *_CONVOLUTIONS)
_STEPS = ("mul", "batch_norm", *_LAYERS)


class _Layer(NamedTuple):
    """A chain of linear operations on channels that reads one value.

    Attributes:
        term: The term of a sum that it is.
        root: The value.
        steps: The operations in order.
        window: Sizes, strides and paddings of the kernel, along each spatial axis.
        groups: The number of groups of channels; 0 without a kernel.
    """

    term: Term
    root: fx.Node
    steps: list[fx.Node]
    window: list[tuple[int, int, int]]
    groups: int

    @property
    def size(self) -> int:
        """The number of places that its kernel reads."""
        return math.prod(size for size, *_ in self.window)


def sums_of_layers(captures: Sequence[Capture]) -> list[str]:
    """Return the modules of the first capture's sums of layers that may be merged, if all captures have some."""
    found = [[own for own in capture.graph.nodes if _may_merge(own)] for capture in captures]
    return [captures[0].modules.get(own) or "forward" for own in found[0]] if all(found) else []


def merged(captures: Sequence[Capture]) -> Sequence[Capture] | None:
    """Return copies of captures with merged layers; None if no layers are added in any."""
    if not sums_of_layers(captures):
        return None
    copies = [_copied(capture) for capture in captures]
    changed = [_Merger(Rewriter(own, own_operations())).run() for own in copies]
    return copies if all(changed) else None


def _may_merge(node: fx.Node) -> bool:
    """Whether a sum may have two terms that layers make of one value."""
    if name_of(node) not in ("add", "sub"):
        return False
    ends, layers = [], False
    waiting: list[Any] = [*node.args[:2]]
    while waiting:
        own = waiting.pop()
        if not isinstance(own, fx.Node):
            return False
        if (inner := len(own.users) == 1) and name_of(own) in ("add", "sub"):
            waiting += own.args[:2]
            continue
        steps, begin = 0, own
        while len(own.users) == 1 and name_of(own) in _STEPS and isinstance(own.args[0], fx.Node):
            layers |= name_of(own) in _LAYERS
            first = name_of(own) != "mul" or shape_of(own.args[0]) == shape_of(own)
            own, steps = own.args[0 if first else 1], steps + 1
            if not isinstance(own, fx.Node):
                return False
        ends += [own] * (steps > 0 and inner and begin is not own)
    return layers and len(ends) > len(set(ends))


def _copied(capture: Capture) -> Capture:
    graph, own = fx.Graph(), dict[Any, Any]()
    graph.output(graph.graph_copy(capture.graph, own))
    graph.owning_module = capture.graph.owning_module
    marks = [replace(mark, node=own[mark.node], after=own.get(mark.after, mark.after)) for mark in capture.marks]
    return replace(
        capture, graph=graph, states={own[node]: name for node, name in capture.states.items()}, marks=marks,
        inputs=[own[node] for node in capture.inputs],
        modules={own[node]: name for node, name in capture.modules.items() if node in own},
    )  # fmt: skip


class _Merger:
    """Merges layers in a graph.

    Args:
        rewriter: Changes the graph.
    """

    def __init__(self, rewriter: Rewriter) -> None:
        self.r = rewriter

    def run(self) -> bool:
        """Merge all layers that can be; return whether there are any."""
        changed, before = False, list(self.r.graph.nodes)
        for node in reversed(before):
            if not node._erased and self.r.name(node) in ("add", "sub"):
                with contextlib.suppress(NoSpellingError):
                    changed |= self._merged(node)
        for node in reversed(list(self.r.graph.nodes)):
            if not node.users and node not in before:
                self.r.graph.erase_node(node)
        return changed

    def _merged(self, node: fx.Node) -> bool:
        """Merge terms of a sum."""
        r, terms = self.r, terms_of(self.r, node)
        layers = [own for term in terms if (own := self._layer(term)) is not None]
        able = [own for own in layers if own.term.added and self._takes_weights(own)]
        if not able:
            return False
        first = max(able, key=lambda own: own.size)
        others = [own for own in layers if own is not first and own.root is first.root and _fits(own, first)]
        if not others:
            return False
        r.at, gone = node, {first.term, *(own.term for own in others)}
        value = self._sum(first, others)
        r.replace(node, summed(r, value, [term for term in terms if term not in gone]))
        return True

    # Layers.

    def _layer(self, term: Term) -> _Layer | None:
        r, node, steps, window = self.r, term.node, list[fx.Node](), list[tuple[int, int, int]]()
        while len(node.users) == 1 and self._is_step(node):
            steps.insert(0, node)
            node = next(own for own in node.args[:2] if r.made_of(own) == "inputs")  # type: ignore[assignment]
        rank = len(r.shape(term.node))
        spread = [step for step in steps if r.name(step) in _CONVOLUTIONS]
        for at, step in enumerate(spread):
            count = spatial_axes_of(r.name(step))
            given = [argument(step, place, key, 4 - place) for place, key in ((3, "stride"), (4, "padding"))]
            own = [*zip(r.shape(step.args[1])[2:], *(listed(numbers, count) for numbers in given), strict=True)]
            if at and (any(each != (1, 1, 0) for each in own) or {*map(_groups, spread)} != {1}):
                return None
            window = window or own
        flat = spread or any(r.name(step) == "batch_norm" for step in steps)
        groups = next((_groups(step) for step in steps if r.name(step) in _LAYERS), 0)
        return _Layer(term, node, steps, window or [(1, 1, 0)] * (rank - 2) * bool(flat), groups) if steps else None

    def _is_step(self, node: fx.Node) -> bool:
        r, name = self.r, self.r.name(node)
        if name == "batch_norm":
            return argument(node, 3, "running_mean") is not None and not node.args[5]
        if name in _LAYERS:
            plain = name == "linear" or (
                not isinstance(argument(node, 4, "padding", 0), str)
                and set(listed(argument(node, 5, "dilation", 1), 1)) == {1}
            )
            return plain and r.made_of(node.args[0]) == "inputs" and r.made_of(node.args[1]) == "weights"
        return name == "mul" and sorted(r.made_of(own) == "inputs" for own in node.args[:2]) == [False, True] and (
            self._gain(node) is not None
        )  # fmt: skip

    def _gain(self, node: fx.Node) -> Any:
        """Return the gain of each channel, or the number, by which a node multiplies; None for other factors."""
        r, rank = self.r, len(self.r.shape(node))
        (factor,) = (own for own in node.args[:2] if r.made_of(own) != "inputs")
        if (number := r.number(factor)) is not None:
            return number
        sizes = [1] * (rank - len(r.shape(factor))) + [*r.shape(factor)]
        return factor if [at for at, size in enumerate(sizes) if size > 1] in ([1], [rank - 1]) else None

    def _takes_weights(self, layer: _Layer) -> bool:
        """Whether a layer has one kernel, a parameter without other readers."""
        r, kernels = self.r, [own for own in layer.steps if self.r.name(own) in _LAYERS]
        kernel: Any = kernels[0].args[1] if len(kernels) == 1 and kernels[0] is layer.steps[0] else None
        return kernel in r.capture.states and len(kernel.users) == 1

    # Sums of weights.

    def _sum(self, first: _Layer, others: Sequence[_Layer]) -> fx.Node:
        """Return the value of a layer that takes up the weights of others."""
        r, parts = self.r, [(own, *self._weights(own, first)) for own in others]
        kernels, biases = [], []
        for layer, kernel, bias in parts:
            pads, sign = list[int](), 1.0 if layer.term.added else -1.0
            for (size, _, pad), (most, _, before) in zip(layer.window[::-1], first.window[::-1], strict=True):
                pads += [before - pad, most - size - before + pad]
            kernel = r.insert(aten.constant_pad_nd.default, kernel, pads) if any(pads) else kernel
            kernels.append(self._times(kernel, sign))
            biases += [] if bias is None else [self._times(bias, sign)]
        kernel, bias = (functools.reduce(self._plus, own) if own else None for own in (kernels, biases))
        self._hide([*first.steps, *(step for own in others for step in own.steps)], kernel)
        gains = [self._affine(step)[0] for step in first.steps]
        carriers = [at for at, step in enumerate(first.steps) if self._affine(step)[1] is not None]
        value = first.root
        for at, step in enumerate(first.steps):
            args, later = [value if own in (first.root, *first.steps) else own for own in step.args], gains[at + 1 :]
            if at == 0:
                args[1] = r.insert(aten.add.Tensor, args[1], self._divided(kernel, later))
            if bias is not None and carriers and at == carriers[-1]:
                args[2] = r.insert(aten.add.Tensor, args[2], self._divided(bias, later))
            value = r.insert(step.target, *args, **step.kwargs)
        if bias is not None and not carriers:
            value = r.insert(aten.add.Tensor, value, reshaped(r, bias, [-1, *[1] * len(first.window)]))
        return value

    def _hide(self, steps: Sequence[fx.Node], function: Any) -> None:
        """Let names of values that depend on how weights are distributed refer to a function of these."""
        marks = self.r.capture.marks
        marks[:] = [replace(mark, node=function) if mark.node in steps else mark for mark in marks]
        for step in steps:
            self.r._marked.discard(step)
        self.r._marked.add(function)

    def _weights(self, layer: _Layer, first: _Layer) -> tuple[Any, Any]:
        """Return the kernel and the bias of a chain, as a part of another one."""
        r, kernel, bias, spatial = self.r, None, None, len(first.window)
        for step in layer.steps:
            if r.name(step) in _LAYERS:
                own: Any = step.args[1]
                flat = reshaped(r, own, [r.shape(own)[0], -1])
                if kernel is not None:
                    whole = reshaped(r, kernel, [r.shape(kernel)[0], -1])
                    made = r.insert(aten.matmul.default, flat, whole)
                    own = reshaped(r, made, [r.shape(made)[0], *r.shape(kernel)[1:]])
                kernel = own
                bias = None if bias is None else r.insert(aten.matmul.default, flat, bias)
                bias = self._plus(bias, argument(step, 2, "bias"))
                continue
            gain, more = self._affine(step)
            if kernel is None:
                size = r.shape(step)[1 if r.name(step) == "batch_norm" or spatial else -1]
                unit = torch.eye(size) if first.groups == 1 else torch.ones(size, 1)
                kernel = reshaped(r, r.hold(unit), [*unit.shape, *[1] * spatial])
            kernel = self._times(kernel, gain)
            bias = None if bias is None else self._times(bias, gain)
            if r.name(step) == "batch_norm":
                mean = r.insert(aten.neg.default, self._times(argument(step, 3, "running_mean"), gain))
                bias = self._plus(self._plus(bias, more), mean)
        return kernel, bias

    def _affine(self, step: fx.Node) -> tuple[Any, Any]:
        """Return the gain of a step, None for a layer, and its bias."""
        r = self.r
        if r.name(step) in _LAYERS:
            return None, argument(step, 2, "bias")
        if r.name(step) == "mul":
            gain = self._gain(step)
            return (reshaped(r, gain, [-1]) if isinstance(gain, fx.Node) else gain), None
        moved = r.insert(aten.add.Tensor, argument(step, 4, "running_var"), step.args[7])
        scale = r.insert(aten.rsqrt.default, moved)
        gain = argument(step, 1, "weight")
        return scale if gain is None else r.insert(aten.mul.Tensor, gain, scale), argument(step, 2, "bias")

    def _times(self, tensor: Any, gain: Any) -> fx.Node:
        """Multiply the rows of weights by a number or a gain."""
        if isinstance(gain, fx.Node):
            gain = reshaped(self.r, gain, [-1, *[1] * (len(self.r.shape(tensor)) - 1)])
        return self.r.insert(aten.mul.Tensor, tensor, gain)

    def _divided(self, tensor: Any, gains: Sequence[Any]) -> fx.Node:
        """Divide the rows of weights by gains."""
        for gain in gains:
            one = self.r.insert(aten.reciprocal.default, gain) if isinstance(gain, fx.Node) else 1 / gain
            tensor = self._times(tensor, one)
        return self._times(tensor, 1.0)

    def _plus(self, one: Any, two: Any) -> Any:
        """Return the sum of two tensors, of which some may be missing."""
        return (one if two is None else two) if one is None or two is None else self.r.insert(aten.add.Tensor, one, two)


def _groups(node: fx.Node) -> int:
    return int(argument(node, 6, "groups", 1))


def _fits(layer: _Layer, first: _Layer) -> bool:
    """Whether a layer's kernel is a part of another one."""
    width = (first.term.node.meta["val"].shape[1] if first.window else 1, 1)
    same = layer.groups == first.groups or (layer.groups == 0 and first.groups in width)
    return (
        same
        and len(layer.window) in (0, len(first.window))
        and all(
            stride == step and 0 <= before - pad <= most - size
            for (size, stride, pad), (most, step, before) in zip(layer.window, first.window, strict=False)
        )
    )
