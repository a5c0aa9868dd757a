"""Finds norms and softmaxes, however they are written, and puts one operation in the place of each.

A region is a part of the graph that makes a value of one other value of the same shape, without weights. It is run on
random numbers, and what comes out tells what it is. See docs/theory/intertwiners.md, 2.11.
"""

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.invisible import MOVEMENTS, moved
from lightning_sym.symmetry.tracing.rewriting import KeptError, Rewriter

aten = torch.ops.aten

_CASTS = {"to", "_to_copy", "type_as", "float", "double", "half", "bfloat16"}
_PASSED = _CASTS | {"dropout", "clone", "contiguous", "alias", "detach", "positive"}
_SUMS = {
    *("mean", "sum", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "amax", "max", "logsumexp"),
    *("softmax", "_softmax", "log_softmax", "_log_softmax", "einsum", "matmul", "mm", "bmm", "linear", "mv", "dot"),
    *(
        "layer_norm",
        "rms_norm",
        "group_norm",
        "instance_norm",
        "batch_norm",
        "native_layer_norm",
        "cumsum",
        "tensordot",
    ),
}
_LAST = {"mul", "div", "add", "sub", "exp", "log", "cat", "addcmul", *MOVEMENTS}
_MOST_NODES = 48  # of a region
_MOST_FAILURES = 4  # values that are tried in vain as the one of which a region is made
_CLOSE = 1e-9  # relative rounding errors of a region in float64
_SMALL, _LARGE = 1e-4, 1e3  # factors that tell eps and what multiplies a norm

Kind = Literal["layer", "rms", "softmax", "log_softmax"]


@dataclass(frozen=True)
class Measured:
    """What a region does.

    Attributes:
        kind: A layer norm takes the mean off, an RMS norm does not.
        axes: The axes over which it goes, whole.
        split: An axis on which it goes over blocks of one size, each by itself, and this size; None if there is none.
        factor: The number by which it multiplies in the end.
        eps: What it adds to the variance, or to the mean square.
        exact: Whether it is this function. If not, it is another function of the deviation times the same value, which
            no rotation changes either.
    """

    kind: Kind
    axes: tuple[int, ...]
    split: tuple[int, int] | None = None
    factor: float = 1.0
    eps: float = 0.0
    exact: bool = True


def recognise(rewriter: Rewriter) -> int:
    """Put one operation in the place of each norm and softmax that is written out.

    Args:
        rewriter: Of the captured network, whose graph is changed.

    Returns:
        The number of changes.
    """
    return _Recogniser(rewriter).run()


class _Region(NamedTuple):
    """A product of factors, each to a power 1 or -1, of which those made of weights stand apart; and a summand.

    Attributes:
        node: The last operation.
        factors: The factors that are made of inputs, and numbers.
        gains: The factors that are made of weights.
        bias: What is added then, made of weights.
        shape: The shape of the product.
        moves: What moves its elements then, in order; the last is `node`.
    """

    node: fx.Node
    factors: list[tuple[fx.Node | float, int]]
    gains: list[tuple[fx.Node, int]]
    bias: fx.Node | None
    shape: tuple[int, ...]
    moves: list["_Step"]


class _Step(NamedTuple):
    """An operation as it is in the graph, or was."""

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> "_Step":
        return cls(node, node.target, node.args, node.kwargs)


class _Recogniser:
    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter, self.graph = rewriter, rewriter.graph
        self.order = {node: place for place, node in enumerate(self.graph.nodes)}
        self.constants: dict[fx.Node, Any] = {}
        self.known: dict[Hashable, Measured | None] = {}

    def run(self) -> int:
        """Go through the graph from its end, so that the largest regions are found first."""
        changes, node = 0, next(iter(reversed(self.graph.nodes)))
        while node.op != "root":
            before = node.prev
            if self.rewriter.name(node) in _LAST and node.users and (new := self._rewritten(node)) is not None:
                changes += 1
                before = new
            node = before
        return changes

    def _rewritten(self, node: fx.Node) -> fx.Node | None:
        """Replace the region that ends in a node, if there is one; return the node before what was put in."""
        for region in self._regions(node):
            best: tuple[Measured, fx.Node, list[_Step]] | None = None
            failures = 0
            for start, steps in self._starts(region):
                measured = self._measured(region, start, steps)
                if measured is None:
                    failures += 1
                    if best is not None or failures == _MOST_FAILURES:
                        break
                elif best is None or _is_larger(measured, best[0]):
                    best = measured, start, steps
            if best is not None and not self._is_plain(region, *best):
                self.rewriter.at, before = node, node.prev
                try:
                    new = self._put(region, *best)
                except KeptError:
                    return None
                first = _after(before)
                self.rewriter.replace(node, new)
                return first.prev
        return None

    # Where a region may begin and end.

    def _regions(self, node: fx.Node) -> Iterator[_Region]:
        """Yield what a node may be the last step of: with the weights that it multiplies and adds, and without."""
        moves, whole = [], node
        while self.rewriter.name(whole) in MOVEMENTS and (whole is node or self._is_inner(whole, moves[0])):
            if whole.all_input_nodes != [whole.args[0]]:
                return
            moves.insert(0, whole)
            whole = whole.args[0]
        inner = not moves or self._is_inner(whole, moves[0])
        if self.rewriter.name(whole) == "add" and len(whole.args) == 2 and not whole.kwargs and inner:
            for value, bias in (whole.args, whole.args[::-1]):
                if (
                    isinstance(bias, fx.Node)
                    and self.rewriter.made_of(bias) == "weights"
                    and self.rewriter.made_of(value) == "inputs"
                    and _size(value) == _size(whole)
                    and self._is_inner(value, whole)
                ):
                    yield self._product(value, whole, bias, whole, moves)
        elif moves and inner and self.rewriter.name(whole) in ("mul", "div"):
            region = self._product(whole, moves[0], None, whole, moves)
            if region.gains:
                yield region
                return
        if self.rewriter.name(node) != "add":
            yield self._product(node, node, None, node, [])

    def _product(self, node: Any, user: fx.Node, bias: fx.Node | None, whole: fx.Node, moves: list[fx.Node]) -> _Region:
        region = _Region(
            moves[-1] if moves else whole, [], [], bias, _size(whole) or (), [_Step.of(move) for move in moves]
        )
        own = self.rewriter.made_of(node)
        waiting: list[tuple[Any, int]] = [(node, 1)]
        users: dict[Any, fx.Node] = {}
        while waiting:
            part, power = waiting.pop()
            name = self.rewriter.name(part)
            inner = part is whole or (isinstance(part, fx.Node) and self._is_inner(part, users.get(part, user)))
            if name in ("mul", "div") and inner and len(part.args) == 2 and not part.kwargs:
                one, two = part.args
                users |= dict.fromkeys(part.all_input_nodes, part)
                waiting += [(two, power if name == "mul" else -power), (one, power)]
            elif name in _CASTS and inner and part is not whole and isinstance(part.args[0], fx.Node):
                users[part.args[0]] = part
                waiting.append((part.args[0], power))
            elif isinstance(part, fx.Node) and own == "inputs" and self.rewriter.made_of(part) == "weights":
                region.gains.append((part, power))
            else:
                region.factors.append((part, power))
        return region

    def _is_inner(self, node: Any, user: fx.Node) -> bool:
        """Whether a node is read by one other only, and may go with it."""
        return self.rewriter.only_for(node, user)

    def _starts(self, region: _Region) -> Iterator[tuple[fx.Node, list[_Step]]]:
        """Yield the values of which, alone, a region is made: each with the nodes between, in order; the next first."""
        last = region.node
        value = last.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        heap: list[tuple[int, fx.Node]] = []
        steps: list[_Step] = []
        seen: set[fx.Node] = set()

        def add(node: Any) -> None:
            if isinstance(node, fx.Node) and node not in seen and self.rewriter.made_of(node) != "constants":
                seen.add(node)
                heapq.heappush(heap, (-self.order[node], node))

        for factor, _ in region.factors:
            add(factor)
        summed = False
        while heap and len(steps) < _MOST_NODES:
            _, node = heapq.heappop(heap)
            own = node.meta.get("val")
            if (
                not heap
                and summed
                and isinstance(own, Tensor)
                and own.shape == value.shape
                and own.dtype == value.dtype
                and node is not last
                and not self.rewriter.is_frozen(node)
            ):
                yield node, steps[::-1]
            name = self.rewriter.name(node)
            if not name or not _is_plain_operation(node) or self._has_weights(node, region):
                return
            summed = summed or name in _SUMS
            steps.append(_Step.of(node))
            for given in node.all_input_nodes:
                add(given)

    def _has_weights(self, node: fx.Node, region: _Region) -> bool:
        """Whether a node brings weights into what is made of inputs."""
        made = {self.rewriter.made_of(given) for given in node.all_input_nodes}
        return self.rewriter.made_of(node) == "inputs" and "weights" in made

    # What a region does.

    def _measured(self, region: _Region, start: fx.Node, steps: Sequence[_Step]) -> Measured | None:
        key = self._key(region, start, steps)
        if key not in self.known:
            try:
                with torch.no_grad():
                    self.known[key] = measured(lambda t: self._run(region, start, steps, t), _size(start) or ())
            except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, _UnknownError):
                self.known[key] = None  # what cannot be run on numbers alone is no norm that could be found
        return self.known[key]

    def _key(self, region: _Region, start: fx.Node, steps: Sequence[_Step]) -> Hashable:
        """Return what two regions have in common that do the same."""
        number: dict[fx.Node, Any] = {start: -1} | {step.node: place for place, step in enumerate(steps)}

        def told(node: fx.Node) -> Any:
            return ("node", number[node]) if node in number else ("constant", id(node))

        parts = [(step.target, fx.map_arg(step.args, told), fx.map_arg(step.kwargs, told)) for step in steps]
        factors = [(told(f) if isinstance(f, fx.Node) else f, power) for f, power in region.factors]
        moves = [(move.target, move.args[1:], move.kwargs) for move in region.moves]
        return str((_size(start), parts, factors, region.shape, moves))

    def _run(self, region: _Region, start: fx.Node, steps: Sequence[_Step], numbers: Tensor) -> Tensor:
        """Run a region in float64, without its gains and bias."""
        values: dict[fx.Node, Any] = {start: numbers.clone()}

        def get(node: fx.Node) -> Any:
            return values[node] if node in values else self._constant(node)

        for step in steps:
            values[step.node] = _run(step, get)
        result: Any = torch.ones((), dtype=torch.float64)
        for factor, power in region.factors:
            part = get(factor) if isinstance(factor, fx.Node) else factor
            result = result * part if power == 1 else result / part
        result = result.expand(region.shape)
        for move in region.moves:
            result = _moved_by(move, result)
        return result.expand(numbers.shape)

    def _constant(self, node: fx.Node) -> Any:
        """Return the value of what no input and no weight changes.

        Raises:
            _UnknownError: If it has none.
        """
        if node not in self.constants:
            if node.op == "get_attr":
                value = getattr(node.graph.owning_module, str(node.target))
                if not isinstance(value, Tensor) or value.is_meta or type(value) is not Tensor:
                    raise _UnknownError
                self.constants[node] = value.double() if value.is_floating_point() else value
            elif _is_plain_operation(node):
                self.constants[node] = _run(_Step.of(node), self._constant)
            else:
                raise _UnknownError
        return self.constants[node]

    # What is put in its place.

    def _is_plain(self, region: _Region, measured: Measured, start: fx.Node, steps: Sequence[_Step]) -> bool:
        """Whether a region is one operation already, so that there is nothing to do."""
        if region.gains or region.bias is not None:
            return False
        names = [self.rewriter.name(step.node) for step in steps]
        told = {"layer": ("layer_norm",), "rms": ("rms_norm",)}.get(measured.kind, (measured.kind, f"_{measured.kind}"))
        told = ("group_norm",) if measured.split is not None and measured.kind == "layer" else told
        known = [name for name in names if name in told or name == "instance_norm"]
        others = [name for name in names if name not in known and name not in _PASSED | MOVEMENTS]
        return len(known) == 1 and not others

    def _put(self, region: _Region, measured: Measured, start: fx.Node, steps: Sequence[_Step]) -> fx.Node:
        insert, shape = self.rewriter.insert, _size(start) or ()
        gains, bias = list(region.gains), region.bias
        if measured.kind in ("softmax", "log_softmax"):
            target = aten.softmax.int if measured.kind == "softmax" else aten.log_softmax.int
            node = insert(target, start, measured.axes[0])
        else:
            if measured.split is None and len(measured.axes) > 1 and measured.kind == "layer":
                # Behind a norm of all channels and places, gains of channels make it a group norm of one group.
                first = [gain for gain, power in gains if power == 1][:1] or [bias]
                axis = next((a for a in measured.axes if self._vector(first[0], region, shape, a)), None)
                if axis is not None:
                    others = tuple(other for other in measured.axes if other != axis)
                    measured = replace(measured, axes=others, split=(axis, shape[axis]))
            layout = _Layout(shape, measured)
            weight = offset = None
            if measured.exact and gains and gains[0][1] == 1:
                weight = self._vector(gains[0][0], region, shape, layout.channel)
                gains = gains[weight is not None :]
            if measured.exact and measured.factor == 1 and not gains and measured.kind == "layer":
                offset = self._vector(bias, region, shape, layout.channel)
                bias = None if offset is not None else bias
            node = layout.put(insert, start, weight, offset)
            if not measured.exact:
                node.meta["stands_for"] = lambda numbers: self._run(region, start, steps, numbers)
        if measured.factor != 1:
            node = insert(aten.mul.Tensor, node, measured.factor)
        for gain, power in gains:
            moved_gain = self._moved(gain, region)
            node = insert(aten.mul.Tensor if power == 1 else aten.div.Tensor, node, moved_gain)
        if bias is not None:
            node = insert(aten.add.Tensor, node, self._moved(bias, region))
        if node.meta["val"].dtype != region.node.meta["val"].dtype:
            node = insert(aten.to.dtype, node, region.node.meta["val"].dtype)
        return node

    def _moved(self, weights: fx.Node, region: _Region) -> fx.Node:
        """Move a gain or bias as what it is joined with is moved."""
        if region.moves:
            weights = self.rewriter.insert(aten.expand.default, weights, list(region.shape))
        for move in region.moves:
            weights = self.rewriter.insert(move.target, weights, *move.args[1:], **move.kwargs)
        return weights

    def _vector(
        self, weights: fx.Node | None, region: _Region, shape: tuple[int, ...], axis: int | None
    ) -> fx.Node | None:
        """Return the parameter of one axis whose elements, in order, stand along an axis of what comes out."""
        way: list[fx.Node] = []
        vector = weights
        while isinstance(vector, fx.Node) and self.rewriter.name(vector) in MOVEMENTS:
            way.append(vector)
            vector = vector.args[0]  # type: ignore[assignment]
        if axis is None or vector not in self.rewriter.capture.states or _size(vector) != (shape[axis],):
            return None
        places: Any = torch.arange(shape[axis])
        for node in way[::-1]:
            places = moved(node, places)
        if region.moves and isinstance(places, Tensor):
            places = places.expand(region.shape)
        for move in region.moves:
            places = _moved_by(move, places)
        if not isinstance(places, Tensor):
            return None
        expected = torch.arange(shape[axis]).reshape(-1, *[1] * (len(shape) - axis - 1))
        return vector if torch.equal(*torch.broadcast_tensors(places, expected)) else None


class _UnknownError(Exception):
    """A constant without a value."""


class _Layout:
    """How a norm over any axes is one of torch's operations, which go over the last axes, or groups of channels."""

    def __init__(self, shape: tuple[int, ...], measured: Measured) -> None:
        self.shape, self.measured = shape, measured
        kept = [axis for axis in range(len(shape)) if axis not in measured.axes]
        if measured.split is not None:
            kept.remove(measured.split[0])
            self.permuted = [*kept, measured.split[0], *measured.axes]
            self.channel: int | None = measured.split[0]
        else:
            self.permuted = [*kept, *measured.axes]
            self.channel = measured.axes[0] if len(measured.axes) == 1 else None
        self.kept = kept

    def put(self, insert: Any, start: fx.Node, weight: fx.Node | None, bias: fx.Node | None) -> fx.Node:
        """Insert the operations, with gain and bias along the axis of the channels."""
        node, measured = start, self.measured
        moved = self.permuted != list(range(len(self.shape)))
        if moved:
            node = insert(aten.permute.default, node, self.permuted)
        sizes = [self.shape[axis] for axis in self.permuted]
        if measured.split is None:
            over = [self.shape[axis] for axis in measured.axes]
            if measured.kind == "layer":
                node = insert(aten.layer_norm.default, node, over, weight, bias, measured.eps)
            else:
                node = insert(aten.rms_norm.default, node, over, weight, measured.eps)
        else:
            axis, size = measured.split
            groups, rest = self.shape[axis] // size, [self.shape[axis] for axis in measured.axes]
            before = [self.shape[axis] for axis in self.kept]
            if measured.kind == "layer":
                flat = [math.prod(before), self.shape[axis], *rest]
                if flat != sizes:
                    node = insert(aten.reshape.default, node, flat)
                node = insert(aten.group_norm.default, node, groups, weight, bias, measured.eps)
                if flat != sizes:
                    node = insert(aten.reshape.default, node, sizes)
            else:
                node = insert(aten.reshape.default, node, [*before, groups, size, *rest])
                node = insert(aten.rms_norm.default, node, [size, *rest], None, measured.eps)
                node = insert(aten.reshape.default, node, sizes)
                if weight is not None:
                    wide = insert(aten.reshape.default, weight, [-1, *[1] * len(rest)])
                    node = insert(aten.mul.Tensor, node, wide)
        if moved:
            node = insert(aten.permute.default, node, [self.permuted.index(axis) for axis in range(len(self.shape))])
        return node


def measured(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Measured | None:
    """Find out if a function is a norm or a softmax.

    Args:
        function: Maps a tensor in float64 to one of the same shape.
        shape: This shape.

    Returns:
        What it does; None if it is neither.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    result = function(numbers)
    if not bool(result.isfinite().all()):
        return None
    found = _seen_by_one(function, numbers, result)
    if found is None:
        return None
    axes, split = found
    if len(axes) == 1 and split is None:
        for kind in ("softmax", "log_softmax"):
            expected = getattr(torch, kind)(numbers, axes[0])
            factor = float(result.flatten()[0] / expected.flatten()[0])
            if kind == "log_softmax" and abs(factor - 1) > _CLOSE:
                continue
            if _close(result, factor * expected):
                return Measured(kind, axes, factor=_rounded(factor))  # type: ignore[arg-type]
    return _norm(function, numbers, result, axes, split, generator)


def _seen_by_one(
    function: Callable[[Tensor], Tensor], numbers: Tensor, result: Tensor
) -> tuple[tuple[int, ...], tuple[int, int] | None] | None:
    """Return on which axes, whole or in blocks, lies what the first element changes."""
    other = numbers.clone()
    other[(0,) * numbers.ndim] += 1.0
    changed = (function(other) - result).abs() > _CLOSE * float(result.abs().max())
    axes: list[int] = []
    splits: list[tuple[int, int]] = []
    for axis, size in enumerate(numbers.shape):
        others = [other for other in range(numbers.ndim) if other != axis]
        own = changed.any(dim=others) if others else changed
        count = int(own.sum())
        if count == size > 1:
            axes.append(axis)
        elif count > 1:
            if size % count or not bool(own[:count].all()):
                return None
            splits.append((axis, count))
    if len(splits) > 1 or not (axes or splits):
        return None
    block = math.prod(numbers.shape[axis] for axis in axes) * (splits[0][1] if splits else 1)
    return (tuple(axes), splits[0] if splits else None) if int(changed.sum()) == block else None


def _norm(
    function: Callable[[Tensor], Tensor],
    numbers: Tensor,
    result: Tensor,
    axes: tuple[int, ...],
    split: tuple[int, int] | None,
    generator: torch.Generator,
) -> Measured | None:
    """Find out if a function multiplies what it takes, without its mean perhaps, by a function of its size."""
    shape = numbers.shape

    def grouped(tensor: Tensor) -> Tensor:
        wide, gone = tensor, list(axes)
        if split is not None:
            axis, size = split
            wide = tensor.unflatten(axis, (shape[axis] // size, size))
            gone = [other + (other > axis) for other in axes] + [axis + 1]
        kept = [axis for axis in range(wide.ndim) if axis not in gone]
        return wide.permute(*kept, *gone).flatten(len(kept)).flatten(0, -2)

    def ratio(numbers: Tensor, result: Tensor, centred: bool) -> tuple[Tensor, Tensor] | None:
        """Return the mean squares of groups, and by what these are multiplied; None if they are not."""
        value, own = grouped(numbers), grouped(result)
        value = value - value.mean(-1, keepdim=True) if centred else value
        square = value.square().mean(-1)
        factor = (own * value).mean(-1) / square
        return (square, factor) if _close(own, factor[:, None] * value) else None

    for centred in (True, False):
        if (found := ratio(numbers, result, centred)) is None:
            continue
        samples = [found]
        for scale in (_SMALL, _LARGE):
            if (further := ratio(numbers * scale, function(numbers * scale), centred)) is None:
                return None
            samples.append(further)
        kind: Kind = "layer" if centred else "rms"
        (square, factor), (small, steep), (large, flat) = samples
        eps = 0.0
        for _ in range(3):
            eps = float((flat.square() * (large + eps) / steep.square() - small)[0])
        for own in (0.0, float(f"{eps:.3g}"), eps):
            times = float((factor * (square + own).sqrt())[0])
            if own >= 0 and all(_close(each, times * (squares + own).rsqrt()) for squares, each in samples):
                return Measured(kind, axes, split, _rounded(times), own)
        # Any other function of the size: the same for other numbers of this size, and more than a power of it.
        other = torch.randn(shape, generator=generator, dtype=torch.float64)
        further = ratio(other, function(other), centred)
        if further is None:
            return None
        powers = (factor / steep).abs().log() / math.log(1 / _SMALL), (flat / factor).abs().log() / math.log(_LARGE)
        if bool((powers[0] - powers[1]).abs().max() < 1e-6):
            return None
        if not _is_function_of(function, numbers, other, ratio, centred):
            return None
        return Measured(kind, axes, split, 1.0, 1e-5, exact=False)
    return None


def _is_function_of(function: Any, numbers: Tensor, other: Tensor, ratio: Any, centred: bool) -> bool:
    """Whether what multiplies groups depends on nothing but their size."""
    own = ratio(numbers, function(numbers), centred)
    low, high = 1e-2, 1e2
    square = ratio(other, function(other), centred)
    if own is None or square is None:
        return False
    # Each group of the other numbers is given the size of the first group, one at a time.
    for place in range(min(len(square[0]), 3)):
        scale = float((own[0][0] / square[0][place]).sqrt())
        if not low < scale < high:
            continue
        again = ratio(other * scale, function(other * scale), centred)
        if again is None or abs(float(again[1][place] / own[1][0]) - 1) > _CLOSE:
            return False
    return True


def _is_larger(new: Measured, old: Measured) -> bool:
    """Whether a region that begins before another one is the same norm, or takes the mean off besides."""
    same = (new.axes, new.split, new.factor, new.exact) == (old.axes, old.split, old.factor, old.exact)
    close = abs(new.eps - old.eps) <= 1e-5 * max(new.eps, old.eps)
    return same and close and (new.kind == old.kind or (new.kind, old.kind) == ("layer", "rms"))


def _run(step: _Step, get: Callable[[fx.Node], Any]) -> Any:
    """Run an operation in float64 on the CPU."""

    def replaced(item: Any) -> Any:
        if isinstance(item, torch.dtype):
            return torch.float64 if item.is_floating_point else item
        return torch.device("cpu") if isinstance(item, torch.device) else item

    args = pytree.tree_map(replaced, fx.map_arg(step.args, get))
    kwargs = pytree.tree_map(replaced, fx.map_arg(step.kwargs, get))
    value = step.node.meta.get("val")
    made = not any(isinstance(item, Tensor) for item in pytree.tree_leaves((args, kwargs)))
    if made and isinstance(value, Tensor) and value.is_floating_point():
        kwargs = {**kwargs, "dtype": torch.float64}
    function = aten.reshape.default if step.target is aten.view.default else step.target
    return function(*args, **kwargs)


def _moved_by(step: _Step, tensor: Tensor) -> Any:
    """Move the elements of a tensor as an operation does."""
    return _run(step, lambda _: tensor)


def computed(capture: Capture, values: Mapping[fx.Node, Any]) -> list[Tensor]:
    """Run a captured network in float64 on the CPU.

    Args:
        capture: The network.
        values: What its placeholders hold.

    Returns:
        Its outputs.
    """
    known = dict(values)
    for node in capture.graph.nodes:
        if node.op == "output":
            break
        if node.op == "get_attr":
            held = getattr(node.graph.owning_module, str(node.target))
            known[node] = held.double() if held.is_floating_point() else held
        elif stands_for := node.meta.get("stands_for"):
            known[node] = stands_for(known[node.args[0]])
        elif node.op == "call_function" and node.target is not torch._C._set_grad_enabled:
            known[node] = _run(_Step.of(node), known.__getitem__)
    return [known[leaf] for leaf in pytree.tree_leaves(node.args[0]) if isinstance(leaf, fx.Node)]


def _is_plain_operation(node: fx.Node) -> bool:
    """Whether an operation is one of torch's own, which leaves nothing to chance."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function" and getattr(target, "__name__", "") == "getitem"
    return target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags


def _after(node: fx.Node) -> fx.Node:
    return node.next


def _close(one: Tensor, two: Tensor) -> bool:
    return bool((one - two).abs().max() <= _CLOSE * two.abs().max())


def _rounded(factor: float) -> float:
    return 1.0 if abs(factor - 1) < _CLOSE else factor


def _size(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None
