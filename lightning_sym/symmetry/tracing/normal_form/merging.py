"""Merge linear layers that read one value and whose results are added into the layer with the largest kernel.

Examples: a 3x3 and a 1x1 convolution, each with a batch norm (RepVGG); a layer and two smaller ones in a row (LoRA).
Numbers, gains, permuted axes, crops and zeros at the edges may come between. The merged layer reads its weight only in
a sum with the others' weights, which translations then change freely.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.nodes import argument, by_axis, moved
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewriter
from lightning_sym.symmetry.tracing.labelling.rules import own_operations
from lightning_sym.symmetry.tracing.normal_form.contractions import reshaped
from lightning_sym.symmetry.tracing.normal_form.sums import Term, number_of, summed, terms_of

aten = torch.ops.aten
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_LAYERS = ("linear", *_CONVOLUTIONS)
_PADS = operations(Trait.PAD)
_MOVES = operations(Trait.PERMUTE) | {"slice", *_PADS}
_STEPS = {"mul", "div", "neg", "batch_norm", *_LAYERS, *_MOVES}


@dataclass(eq=False)
class _Layer:
    """A chain of operations that is linear in the channels of one value, up to biases.

    Attributes:
        term: The term of a sum that it is.
        root: The value.
        steps: The operations in order.
        order: The axes of the term, as axes of the value.
        window: Size, stride and padding of the kernel along each axis of the value; a crop is a negative padding.
        channels: The value's axis of channels; None if the chain only moves the value and multiplies it by numbers.
        kernel: The axes of the value along which the kernel has axes.
        groups: The number of groups of channels; 0 without a kernel.
        resized: The axes of the value of which steps take or add places.
    """

    term: Term
    root: fx.Node
    steps: list[fx.Node]
    order: list[int]
    window: list[tuple[int, int, int]]
    channels: int | None = None
    kernel: tuple[int, ...] = ()
    groups: int = 0
    resized: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        """The number of places that its kernel reads."""
        return math.prod(size for size, *_ in self.window)

    def holds(self, other: "_Layer") -> bool:
        """Whether another chain's kernel can be a part of this one's."""
        width = self.root.meta["val"].shape[self.channels] if self.channels is not None else 1
        return (
            self.order == other.order
            and other.channels in (None, self.channels)
            and (other.groups == self.groups or (other.groups == 0 and self.groups in (width, 1)))
            and (other.kernel in ((), self.kernel) or not self.kernel)
            and all(
                stride == step and 0 <= before - pad <= most - size
                for (size, stride, pad), (most, step, before) in zip(other.window, self.window, strict=True)
            )
        )


def sums_of_layers(captures: Sequence[Capture]) -> list[str]:
    """Return the modules of the first capture's sums of layers that may be merged, if all captures have some."""
    mergers = [(capture, _Merger(Rewriter(capture, own_operations()))) for capture in captures]
    found = [[own for own in capture.graph.nodes if merger.layers_of(own)] for capture, merger in mergers]
    return [captures[0].modules.get(own) or "forward" for own in found[0]] if all(found) else []


def merged(captures: Sequence[Capture]) -> Sequence[Capture] | None:
    """Return copies of captures with merged layers; None if no layers are added in any."""
    if not sums_of_layers(captures):
        return None
    copies = [_copied(capture) for capture in captures]
    changed = [_Merger(Rewriter(own, own_operations())).run() for own in copies]
    return copies if all(changed) else None


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
        r, changed, before = self.r, False, list(self.r.graph.nodes)
        for node in reversed(before):
            with contextlib.suppress(NoSpellingError):
                while not node._erased and (layers := self.layers_of(node)):
                    r.at, gone = node, {own.term for own in layers}
                    rest = [term for term in terms_of(r, node) if term not in gone]
                    total = summed(r, self._sum(layers[0], layers[1:]), rest)
                    r.replace(node, total)
                    node, changed = total, True
        for node in reversed(list(r.graph.nodes)):
            if not node.users and node not in before:
                r.graph.erase_node(node)
        return changed

    def layers_of(self, node: fx.Node) -> list[_Layer]:
        """Return terms of a sum, of which the first can absorb the others' weights; empty if there are none."""
        r, terms = self.r, terms_of(self.r, node) if self.r.name(node) in ("add", "sub") else []
        terms = [term for term in terms if len(r.shape(term.node)) == len(r.shape(node))]
        whole = [term for term in terms if r.shape(term.node) == r.shape(node)]
        layers = [own for term in whole if (own := self._layer(term)) is not None]
        for first in sorted(filter(self._takes_weights, layers), key=lambda own: -own.size):
            rest = [self._layer(term, first.root) for term in terms if term is not first.term]
            if others := [own for own in rest if own is not None and first.holds(own) and self._fits(own, node)]:
                return [first, *others]
        return []

    def _fits(self, layer: _Layer, node: fx.Node) -> bool:
        """Whether a term has the shape of the sum, or one channel instead of all."""
        sizes = zip(layer.order, self.r.shape(layer.term.node), self.r.shape(node), strict=True)
        return all(size == whole or axis == layer.channels for axis, size, whole in sizes)

    # Layers.

    def _layer(self, term: Term, root: fx.Node | None = None) -> _Layer | None:
        """Return a term as a chain that reads weights and a value, by default the one that its last layer reads."""
        r, node, steps, inner = self.r, term.node, list[fx.Node](), False
        while node is not root and self._is_step(node) and (not inner or root is not None or r.name(node) in _MOVES):
            inner |= r.name(node) in _LAYERS
            steps.insert(0, node)
            node = self._value(node)
        reads = any(r.made_of(own) == "weights" for step in steps for own in step.all_input_nodes)
        if not reads or root not in (None, node):
            return None
        rank = len(r.shape(node))
        layer = _Layer(term, node, steps, [*range(rank)], [(1, 1, 0)] * rank)
        return layer if all(self._passes(layer, at) for at in range(len(steps))) else None

    def _is_step(self, node: fx.Node) -> bool:
        r, name = self.r, self.r.name(node)
        made = [r.made_of(own) for own in node.args[:2]] if name in _STEPS else []
        if made.count("inputs") != 1 or [*map(r.made_of, node.all_input_nodes)].count("inputs") != 1:
            return False
        if name in ("mul", "div"):
            alike = r.shape(node) == r.shape(self._value(node)) and self._gain(node) is not None
            return alike and (name == "mul" or made[0] == "inputs")
        if name in _CONVOLUTIONS:
            plain = set(by_axis(argument(node, 5, "dilation", 1), 1)) == {1} and len(r.shape(node)) == 2 + int(name[4])
            return plain and made[0] == "inputs" and not isinstance(argument(node, 4, "padding", 0), str)
        if name in _PADS:
            return min(node.args[1]) >= 0 and {*node.args[2:], *node.kwargs.values()} <= {"constant", 0, None}  # type: ignore[type-var,arg-type]
        saved = name != "batch_norm" or (argument(node, 3, "running_mean") is not None and not node.args[5])
        return made[0] == "inputs" and saved

    def _passes(self, layer: _Layer, at: int) -> bool:
        """Add the effect of the next step to a chain; return whether the chain stays linear in channels."""
        r, step, order, earlier = self.r, layer.steps[at], layer.order, layer.steps[:at]
        name, before = r.name(step), [own for own in earlier if r.name(own) not in _MOVES]
        if name in operations(Trait.PERMUTE):
            layer.order = [*moved(step, torch.empty(order, device="meta")).shape]
        if name in _LAYERS:
            if layer.groups > 1 or (_groups(step) > 1 and before):
                return False
            layer.groups = _groups(step)
            layer.kernel = layer.kernel or tuple(order[2:] if name in _CONVOLUTIONS else ())
        biased = any(r.name(own) in (*_LAYERS, "batch_norm") and argument(own, 2, "bias") is not None for own in before)
        cut = any(r.name(own) == "slice" for own in earlier)
        for axis, (size, stride, pad) in self._windows(step).items():
            most, jump, before_it = layer.window[order[axis]]
            edge = pad > 0 or name in _PADS
            if (edge and (biased or cut)) or ((size > 1 or edge) and (most > 1 or jump > 1)):
                return False  # beyond the edges of the value, its kernel reads zeros
            layer.window[order[axis]] = most * size, jump * stride, before_it + pad * jump
        if name == "slice" or name in _PADS:
            sizes = zip(r.shape(step.args[0]), r.shape(step), strict=True)
            layer.resized |= {order[axis] for axis, (size, new) in enumerate(sizes) if size != new}
        if (place := self._channels(step)) is not None:
            if layer.channels not in (None, order[place]):
                return False
            layer.channels = order[place]
        whole = layer.channels is None or layer.window[layer.channels] == (1, 1, 0)
        return whole and layer.channels not in layer.resized

    def _windows(self, step: fx.Node) -> dict[int, tuple[int, int, int]]:
        """Return size, stride and padding of the kernel of a step, along each axis that it cuts, pads or sums over."""
        name, sizes = self.r.name(step), self.r.shape(step.args[0])
        if name == "slice":
            begin, axis = argument(step, 2, "start") or 0, argument(step, 1, "dim", 0) % len(sizes)
            return {axis: (1, argument(step, 4, "step", 1), -(begin % sizes[axis]))}
        if name in _PADS:
            return {len(sizes) - 1 - at: (1, 1, width) for at, width in enumerate(step.args[1][::2])}  # type: ignore
        kernel = self.r.shape(step.args[1])[2:] if name in _CONVOLUTIONS else ()
        given = [argument(step, place, key, 4 - place) for place, key in ((3, "stride"), (4, "padding"))]
        return dict(enumerate(zip(kernel, *(by_axis(own, len(kernel)) for own in given), strict=bool(kernel)), 2))

    def _channels(self, step: fx.Node) -> int | None:
        """Return the axis of channels of a layer's or gain's input; None for other steps."""
        r, name, rank = self.r, self.r.name(step), len(self.r.shape(step))
        if name in _LAYERS or name == "batch_norm":
            return rank - 1 if name == "linear" else 1
        gain = None if name in _MOVES else self._gain(step)
        sizes = r.shape(gain) if isinstance(gain, fx.Node) else ()
        return next((rank - len(sizes) + axis for axis, size in enumerate(sizes) if size > 1), None)

    def _value(self, node: fx.Node) -> Any:
        """Return the argument of a step that depends on inputs."""
        return next(own for own in node.args[:2] if self.r.made_of(own) == "inputs")

    def _gain(self, node: fx.Node) -> Any:
        """Return the factor of each channel, or of all, by which a node multiplies; None for other factors."""
        r = self.r
        if number := number_of(r, node) or (r.name(node) == "mul" and r.number(node.args[0])):
            return number
        (factor,) = (own for own in node.args[:2] if r.made_of(own) != "inputs")
        plain = isinstance(factor, fx.Node) and sum(size > 1 for size in r.shape(factor)) <= 1
        return factor if plain else None

    def _takes_weights(self, layer: _Layer) -> bool:
        """Whether a chain consists of moves, gains and one layer with a kernel that is a parameter read only there."""
        r, at = self.r, next((at for at, own in enumerate(layer.steps) if self.r.name(own) not in _MOVES), 0)
        kernel: Any = layer.steps[at].args[1] if r.name(layer.steps[at]) in _LAYERS else None
        rest = [own for own in layer.steps[at + 1 :] if r.name(own) in _LAYERS]
        alone = kernel in r.capture.states and all(len(own.users) == 1 for own in (kernel, *layer.steps[at:]))
        return alone and not rest

    # Sums of weights.

    def _sum(self, first: _Layer, others: Sequence[_Layer]) -> fx.Node:
        """Return the value of a layer that absorbs the weights of others."""
        r, parts = self.r, [(own, *self._weights(own, first)) for own in others]
        kernels, biases = [], []
        for layer, kernel, bias in parts:
            pads, sign = list[int](), 1.0 if layer.term.added == first.term.added else -1.0
            for axis in first.kernel[::-1]:
                (size, _, pad), (most, _, before) = layer.window[axis], first.window[axis]
                pads += [before - pad, most - size - before + pad]
            kernel = reshaped(r, kernel, [*r.shape(kernel)[:2], *(layer.window[axis][0] for axis in first.kernel)])
            kernel = r.insert(aten.constant_pad_nd.default, kernel, pads) if any(pads) else kernel
            kernels.append(self._times(kernel, sign))
            biases += [] if bias is None else [self._times(bias, sign)]
        kernel, bias = (functools.reduce(self._plus, own) if own else None for own in (kernels, biases))
        self._hide([*first.steps, *(step for own in others for step in own.steps)], kernel)
        affine = [self._affine(step) for step in first.steps]
        carriers = [at for at, (_, own) in enumerate(affine) if own is not None]
        value = first.root
        for at, step in enumerate(first.steps):
            later = [gain for gain, _ in affine[at + 1 :] if gain is not None]
            args = [value if own in (first.root, *first.steps) else own for own in step.args]
            if r.name(step) in _LAYERS:
                args[1] = r.insert(aten.add.Tensor, args[1], self._divided(kernel, later))
            if bias is not None and carriers and at == carriers[-1]:
                args[2] = r.insert(aten.add.Tensor, args[2], self._divided(bias, later))
            value = r.insert(step.target, *args, **step.kwargs)
        if bias is not None and not carriers:
            sizes = [-1 if own == first.channels else 1 for own in first.order]
            value = r.insert(aten.add.Tensor, value, reshaped(r, bias, sizes))
        return value if first.term.added else r.insert(aten.neg.default, value)

    def _hide(self, steps: Sequence[fx.Node], function: Any) -> None:
        """Let names of values that depend on how weights are distributed refer to a function of these."""
        marks = self.r.capture.marks
        marks[:] = [replace(mark, node=function) if mark.node in steps else mark for mark in marks]
        for step in steps:
            self.r._marked.discard(step)
        self.r._marked.add(function)

    def _weights(self, layer: _Layer, first: _Layer) -> tuple[Any, Any]:
        """Return the kernel and the bias of a chain, as a part of another one."""
        r, kernel, bias = self.r, None, None
        unit = torch.eye(r.shape(first.root)[first.channels or 0], dtype=first.root.meta["val"].dtype)
        unit = unit if first.groups == 1 else unit.sum(1, keepdim=True)
        for step in layer.steps:
            gain, more = self._affine(step)
            if r.name(step) in _LAYERS:
                own: Any = step.args[1]
                flat, sizes = reshaped(r, own, [*r.shape(own)[:2], -1]), r.shape(own)[2:]
                if kernel is not None:
                    sizes = max(sizes, r.shape(kernel)[2:], key=lambda each: (math.prod(each), len(each)))
                    parts = [flat, reshaped(r, kernel, [*r.shape(kernel)[:2], -1])]
                    made = r.insert(aten.einsum.default, "omk,mik->oik", parts)
                    own = reshaped(r, made, [*r.shape(made)[:2], *sizes])
                if bias is not None:
                    bias = r.insert(aten.matmul.default, r.insert(aten.sum.dim_IntList, flat, [2]), bias)
                kernel, bias = own, self._plus(bias, more)
            elif gain is not None:
                kernel = self._times(r.hold(unit) if kernel is None else kernel, gain)
                bias = None if bias is None else self._times(bias, gain)
                if r.name(step) == "batch_norm":
                    mean = r.insert(aten.neg.default, self._times(argument(step, 3, "running_mean"), gain))
                    bias = self._plus(self._plus(bias, more), mean)
        return kernel, bias

    def _affine(self, step: fx.Node) -> tuple[Any, Any]:
        """Return the gain and the bias of a step."""
        r, name = self.r, self.r.name(step)
        if name in _MOVES:
            return None, None
        if name in _LAYERS:
            return None, argument(step, 2, "bias")
        if name != "batch_norm":
            gain = self._gain(step)
            if not isinstance(gain, fx.Node):
                return gain, None
            gain = reshaped(r, gain, [-1])
            return (r.insert(aten.reciprocal.default, gain) if name == "div" else gain), None
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
