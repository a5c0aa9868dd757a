"""Spell loops over parts in one way: equal operations on parts of a value become one operation on all parts."""

import functools
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.nodes import argument, memories_of, numbers_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations, spatial_axes_of
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.contractions import VIEWS, joined, reshaped, sources_of

aten = torch.ops.aten
_MOST = 64  # operations of a branch
_LARGE = 2**22  # elements of a value that are numbered
_ELEMENTWISE = {"neg", "where", "masked_fill", "mT", "eq", "ne", "logical_not"} | operations(
    Trait.POINTWISE | Trait.JOIN | Trait.PRODUCT | Trait.CAST | Trait.ORDER
)
_SUMS = {"sum", "mean", "amax", "amin", "var", "std"}
# The number of axis arguments that follow the value.
_AXES = {"transpose": 2, "select": 1, "slice": 1}
_AXES |= dict.fromkeys(("softmax", "log_softmax", *_SUMS), 1)
# Without one of these, merging the branches has no benefit.
_CONVOLUTIONS = {name for name in operations(Trait.CONVOLVE) if "transpose" not in name}
_TOGETHER = {"softmax", "log_softmax", "layer_norm", "rms_norm", "linear", "matmul", *_CONVOLUTIONS, *_SUMS}
# These treat samples, along the first axis, one by one.
_EACH_SAMPLE = operations(Trait.POOL | Trait.MAX_POOL | Trait.RESIZE | Trait.NEAREST)
_MIXED = {"weights", "inputs"}


class _Lifted(NamedTuple):
    """The values of all branches: one common value, or (``along``) all of them along a new first axis."""

    node: Any
    along: bool


def together(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the concatenation of equally processed parts of a value as one computation on the whole value."""
    parts: Any = node.args[0]
    axis = argument(node, 1, "dim", 0) % len(r.shape(node))
    if len(parts) < 2 or any(not r.only_for(part, node) for part in parts):
        return None
    branches = _Branches(r, apart=True)
    lifted = branches.lift(parts, [node] * len(parts))
    if lifted is None or not lifted.along or not branches.mixes:
        return None
    order = list(range(1, len(r.shape(lifted.node))))
    order.insert(axis, 0)
    return reshaped(r, r.insert(aten.permute.default, lifted.node, order), r.shape(node))


def added_branches(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the sum of experts that run one after the other as one computation of all experts, plus other terms."""
    if node.kwargs or any(r.name(user) == "add" and r.only_for(node, user) for user in node.users):
        return None
    leaves, readers = r.leaves(node, {"add"})
    if (product := _summed_products(r, node, leaves)) is not None:
        return product
    rest: list[Any] = []
    alike: dict[str, list[tuple[fx.Node, fx.Node]]] = {}
    for leaf, reader in zip(leaves, readers, strict=True):
        layer = r.made_of(leaf) == "inputs" or r.name(leaf) in ("linear", "matmul")
        kind = r.name(leaf) if layer and r.shape(leaf) == r.shape(node) else ""
        kind = kind or ("weights" if r.made_of(leaf) == "weights" else "")
        if kind:
            alike.setdefault(kind, []).append((leaf, reader))
        elif leaf != 0:  # initial term of Python's sum
            rest.append(leaf)
    biases, count = alike.pop("weights", []), 0
    total: list[fx.Node] = []
    for several in alike.values():
        parts, own = [leaf for leaf, _ in several], [reader for _, reader in several]
        new = _experts(r, parts, own) if len(parts) > 1 else None
        total += parts if new is None else [new]
        count += new is not None
    if not count:
        return None
    parts = [leaf for leaf, _ in biases]
    lifted = _Branches(r).lift(parts, [reader for _, reader in biases]) if len(parts) > 1 else None
    apart = lifted is None or not lifted.along
    total += [*(parts if apart else [r.insert(aten.sum.dim_IntList, lifted.node, [0])]), *rest]  # type: ignore[union-attr]
    return functools.reduce(lambda one, two: r.insert(aten.add.Tensor, one, two), total)


def _summed_products(r: Rewriter, node: fx.Node, leaves: Sequence[Any]) -> fx.Node | None:
    """Return the sum of regrouped products of weights as one product of all (Kronecker products); None for others."""
    leaves = [leaf for leaf in leaves if leaf != 0]  # initial term of Python's sum
    inner: list[Any] = [leaf.args[0] if r.name(leaf) in operations(Trait.REGROUP) else None for leaf in leaves]
    if r.made_of(node) != "weights" or len(inner) < 2 or any(r.name(own) != "mul" for own in inner):
        return None
    lifted = _Branches(r).lift(inner, leaves)
    if lifted is None or not lifted.along:
        return None
    axes = string.ascii_lowercase[: len(r.shape(inner[0]))]
    total = r.insert(aten.einsum.default, f"z{axes},z{axes}->{axes}", list(lifted.node.args[:2]))
    return reshaped(r, total, r.shape(node))


def _experts(r: Rewriter, leaves: Sequence[fx.Node], readers: Sequence[fx.Node]) -> fx.Node | None:
    """Return the sum of experts as one computation of all; None if they differ."""
    if (total := _of_parts(r, leaves) or _summed_layers(r, leaves, readers)) is not None:
        return total
    branches = _Branches(r)
    lifted = branches.lift(leaves, readers)
    if lifted is None or not lifted.along or not branches.experts:
        return None
    return r.insert(aten.sum.dim_IntList, lifted.node, [0])


def _of_parts(r: Rewriter, leaves: Sequence[Any]) -> fx.Node | None:
    """Return the sum of products of parts of a table and parts of a layer's weights as one product."""
    name = r.name(leaves[0])
    if name not in ("linear", "matmul") or any(r.name(leaf) != name or r.made_of(leaf) != "weights" for leaf in leaves):
        return None
    axes = (-1, -1) if name == "linear" else (-1, -2)
    whole = [joined(r, [leaf.args[at] for leaf in leaves], axis) for at, axis in enumerate(axes)]
    if None in whole:
        return None
    return _with_biases(r, r.insert(leaves[0].target, *whole), leaves)


def _summed_layers(r: Rewriter, leaves: Sequence[Any], readers: Sequence[fx.Node]) -> fx.Node | None:
    """Return the sum of layers that read one head each as one product with the weights of all heads."""
    name = r.name(leaves[0])
    if name not in {"linear"} | _CONVOLUTIONS or any(r.name(leaf) != name for leaf in leaves):
        return None
    if any(not r.only_for(leaf, own) for leaf, own in zip(leaves, readers, strict=True)):
        return None
    place = {node: at for at, node in enumerate(r.graph.nodes)}
    leaves = sorted(leaves, key=place.__getitem__)  # as the branches were written
    branches = _Branches(r)
    values, weights = (branches.lift([leaf.args[at] for leaf in leaves], leaves) for at in (0, 1))
    if values is None or weights is None or not values.along or not weights.along or not branches.mixes:
        return None
    if name == "linear":
        letters = string.ascii_lowercase[: len(r.shape(leaves[0])) - 1]
        equation = f"z{letters}x,zyx->{letters}y"
        total: fx.Node = r.insert(aten.einsum.default, equation, [values.node, weights.node])
    elif (joint := _joint_convolution(r, leaves, values.node, weights.node)) is None:
        return None
    else:
        total = joint
    return _with_biases(r, total, leaves)


def _with_biases(r: Rewriter, total: fx.Node, leaves: Sequence[fx.Node]) -> fx.Node:
    biases = [bias for leaf in leaves if (bias := argument(leaf, 2, "bias")) is not None]
    return functools.reduce(functools.partial(r.insert, aten.add.Tensor), biases, total)


def _joint_convolution(r: Rewriter, leaves: Sequence[fx.Node], values: fx.Node, weights: fx.Node) -> fx.Node | None:
    """Return the sum of convolutions as one convolution of the channels of all."""
    first = leaves[0]
    options = [leaf.args[3:] for leaf in leaves]
    if any(own != options[0] for own in options) or any(leaf.kwargs for leaf in leaves):
        return None
    if options[0][3:] not in ((), (1,)):
        return None  # in groups
    if any(argument(leaf, 2, "bias") is not None for leaf in leaves):
        return None
    count, samples, channels, *sizes = r.shape(values)
    if len(sizes) != spatial_axes_of(r.name(first)):
        return None
    flat = reshaped(r, r.insert(aten.movedim.int, values, 0, 1), [samples, count * channels, *sizes])
    outputs, *kernel = r.shape(first.args[1])
    held = reshaped(r, r.insert(aten.movedim.int, weights, 0, 1), [outputs, count * channels, *kernel[1:]])
    return r.insert(first.target, flat, held, None, *options[0])


def pieces(r: Rewriter, nodes: Sequence[fx.Node], readers: Sequence[fx.Node] = ()) -> fx.Node | None:
    """Return the value that contains all given values, with these along a new first axis; None if there is none.

    Args:
        r: The rewriter.
        nodes: The values.
        readers: Their readers, if the value may be computed anew, from stacked weights of equal modules.
    """
    branches = _Branches(r)
    found = branches.parts_of_one(nodes)
    if found is None and readers and r.capture.stacks:
        found = branches.lift(nodes, readers)
        found = found if found is not None and found.along and branches.mixes else None
    return None if found is None else found.node


class _Branches:
    """Branches of a network with equal operations, each on its own part.

    Args:
        r: The rewriter.
        apart: Whether layers with separate weights may read parts of a value.

    Attributes:
        mixes: Whether the branches do more than moves and elementwise functions.
        experts: Outputs of layers that have separate weights per branch, from one stack of weights.
    """

    def __init__(self, r: Rewriter, *, apart: bool = False) -> None:
        self.r, self.mixes, self.apart = r, False, apart or bool(r.capture.stacks)
        self.experts: set[fx.Node] = set()
        self.known: dict[tuple[fx.Node, ...], _Lifted | None] = {}
        self.readers: set[fx.Node] = set()  # of the results of all branches

    def lift(self, nodes: Sequence[Any], readers: Sequence[fx.Node]) -> _Lifted | None:
        """Return one operation that computes the values of all branches; None if the branches differ.

        Args:
            nodes: The values, one per branch, or numbers.
            readers: The readers of these values.
        """
        if not all(isinstance(node, fx.Node) for node in nodes):
            return _Lifted(nodes[0], False) if all(node == nodes[0] for node in nodes) else None
        if all(node is nodes[0] for node in nodes) or self._are_equal_constants(nodes):
            return _Lifted(nodes[0], False)
        key = tuple(nodes)
        self.readers = self.readers or {*readers}
        if key not in self.known:
            if len(self.known) == _MOST:
                return None
            self.known[key] = None
            found = self.parts_of_one(nodes) or self._repeated(nodes)
            self.known[key] = found or self._operation(nodes, readers)
        return self.known[key]

    def _are_equal_constants(self, nodes: Sequence[fx.Node]) -> bool:
        first, *others = (self.r.constant(node) if self.r.made_of(node) == "constants" else None for node in nodes)
        return first is not None and all(own is not None and torch.equal(first, own) for own in others)

    def parts_of_one(self, nodes: Sequence[fx.Node]) -> _Lifted | None:
        """Return the value that contains a part for each branch, with the parts along a new first axis."""
        values: list[Any] = [node.meta.get("val") for node in nodes]
        if any(not isinstance(value, Tensor) or value.shape != values[0].shape for value in values):
            return None
        memories = [memories_of(node) for node in nodes]
        if any(memory != memories[0] for memory in memories):
            return None
        wanted = torch.stack([numbers_of(value) for value in values])
        for source in sources_of(self.r, nodes[0]):
            held = source.meta["val"]
            if not 0 < held.numel() <= _LARGE or held.dtype != values[0].dtype:
                return None
            own = numbers_of(held)
            for axis, size in enumerate(held.shape):
                for cut in _cuts(axis, size, len(nodes)):
                    result: Any = source
                    moved = own
                    for target, args in cut:
                        moved = target(moved, *args)
                    if moved.shape == wanted.shape and torch.equal(moved, wanted):
                        for target, args in cut:
                            result = self.r.insert(target, result, *args)
                        return _Lifted(result, True)
        return None

    def _repeated(self, nodes: Sequence[fx.Node]) -> _Lifted | None:
        """Return parts of a value that consecutive branches share (keys that serve several queries each)."""
        own = list(dict.fromkeys(nodes))
        times = len(nodes) // len(own)
        if times == 1 or [node for node in own for _ in range(times)] != list(nodes):
            return None
        found = self.lift(own, own)
        return (
            None
            if found is None
            else _Lifted(self.r.insert(aten.repeat_interleave.self_int, found.node, times, 0), True)
        )

    def _is_inside(self, node: fx.Node) -> bool:
        """Whether only the readers of the results use an operation, perhaps through others."""
        left, met = [node], {node}
        while left:
            own = left.pop()
            if not self.r.name(own) or self.r.is_marked(own) or len(met) > _MOST:
                return False
            new = {*own.users} - self.readers - met
            met |= new
            left += new
        return True

    def _operation(self, nodes: Sequence[fx.Node], readers: Sequence[fx.Node]) -> _Lifted | None:
        """Return one operation on the combined arguments of the branches' operations."""
        r, first = self.r, nodes[0]
        name = r.name(first)
        if not name or any(node.target is not first.target for node in nodes):
            return None
        several = name in VIEWS or name == "mT" or bool(r.capture.stacks)  # readers; of stacks, all must be combined
        if not several and not all(self._is_inside(node) for node in nodes):
            return None
        if any(len(node.args) != len(first.args) or node.kwargs != first.kwargs for node in nodes):
            return None
        if any(isinstance(value, fx.Node) for value in first.kwargs.values()):
            return None
        if not isinstance(first.meta.get("val"), Tensor):
            return None  # a list of parts
        shapes = {r.shape(node) for node in nodes}
        args: list[_Lifted] = []
        for given in zip(*(node.args for node in nodes), strict=True):
            if (own := self.lift(given, nodes)) is None:
                return None
            args.append(own)
        if len(shapes) > 1 or not any(arg.along for arg in args):
            return None
        lifted = self._expert(first, args) if name == "linear" else None
        lifted = self._convolution(first, args) if name in _CONVOLUTIONS else lifted or _lifted(r, first, name, args)
        count = next(r.shape(arg.node)[0] for arg in args if arg.along)
        lifted = lifted if r.shape(lifted) == (count, *r.shape(first)) else None
        if lifted is not None and name == "mul" and {r.made_of(arg.node) for arg in args if arg.along} == _MIXED:
            self.experts.add(lifted)  # the weights of experts, times their shares
        if lifted is not None and any(arg.node in self.experts for arg in args if isinstance(arg.node, fx.Node)):
            self.experts.add(lifted)
        weighted = any(arg.along and r.made_of(arg.node) == "weights" for arg in args)
        self.mixes = self.mixes or (lifted is not None and (name in _TOGETHER or weighted))
        return None if lifted is None else _Lifted(lifted, True)

    def _convolution(self, node: fx.Node, args: list[_Lifted]) -> fx.Node | None:
        """Return a convolution with a group for each branch, or with a sample for each if all share the kernel."""
        r, (value, weight, *rest) = self.r, args
        bias, options = (rest[0] if rest else _Lifted(None, False)), [arg.node for arg in rest[1:]]
        shape, channel = r.shape(node), len(r.shape(node)) - 1 - spatial_axes_of(r.name(node))
        if any(arg.along for arg in rest[1:]) or node.kwargs or channel != 1 or not (value.along or weight.along):
            return None
        if not weight.along:
            if bias.along:
                return None
            count, *sizes = r.shape(value.node)
            flat = reshaped(r, value.node, [count * sizes[0], *sizes[1:]])
            result = r.insert(node.target, flat, weight.node, bias.node, *options)
            return reshaped(r, result, [count, *shape])
        count, *kernel = r.shape(weight.node)
        if bias.node is not None and not bias.along:
            return None
        held = reshaped(r, weight.node, [count * kernel[0], *kernel[1:]])
        added = None if bias.node is None else reshaped(r, bias.node, [count * kernel[0]])
        if value.along:
            _, *sizes = r.shape(value.node)
            moved = r.insert(aten.movedim.int, value.node, 0, 1)
            flat = reshaped(r, moved, [sizes[0], count * sizes[1], *sizes[2:]])
            axes = len(shape) - 2
            standard: list[Any] = [[1] * axes, [0] * axes, [1] * axes, 1]  # stride, padding, dilation, groups
            options = [*options, *standard[len(options) :]]
            options[3] *= count
        else:
            flat = value.node
        result = r.insert(node.target, flat, held, added, *options)
        result = r.insert(aten.movedim.int, reshaped(r, result, [shape[0], count, *shape[1:]]), 1, 0)
        if not value.along:
            self.experts.add(result)
        return result

    def _expert(self, node: fx.Node, args: list[_Lifted]) -> fx.Node | None:
        """Return a layer with separate weights per branch, on a common value or on outputs of such layers."""
        r, (value, weight, *bias) = self.r, args
        apart = value.along and value.node not in self.experts and not self.apart  # rows of heads
        if not weight.along or apart or len(r.shape(weight.node)) != 3:
            return None
        rank = len(r.shape(node))
        turned = r.insert(aten.permute.default, weight.node, [0, 2, 1])
        count, *sizes = r.shape(turned)
        turned = reshaped(r, turned, [count, *[1] * (rank - 2), *sizes])
        if rank == 1 and value.along:  # a row for each branch
            row = r.insert(aten.unsqueeze.default, value.node, -2)
            result = r.insert(aten.squeeze.dim, r.insert(aten.matmul.default, row, turned), -2)
        else:
            result = r.insert(aten.matmul.default, value.node, turned)
        if bias and bias[0].node is not None:
            result = r.insert(aten.add.Tensor, result, _wide(r, bias[0], rank) if bias[0].along else bias[0].node)
        self.experts.add(result)
        return result


_Cut = list[tuple[Callable[..., Any], tuple[Any, ...]]]


def _cuts(axis: int, size: int, count: int) -> list[_Cut]:
    """Return the ways to split an axis into parts along a new first axis: single entries, blocks, or strided."""
    front: _Cut = [(aten.movedim.int, (axis, 0))]
    found: list[_Cut] = [front] if size == count else []
    if size % count == 0:
        found.append([(aten.unflatten.int, (axis, [count, size // count])), *front])
        found.append([(aten.unflatten.int, (axis, [size // count, count])), (aten.movedim.int, (axis + 1, 0))])
    return found


def lifted_operation(r: Rewriter, node: fx.Node, args: Sequence[tuple[Any, fx.Node | None]]) -> fx.Node | None:
    """Return an operation with a new first axis; None if it cannot be extended.

    Args:
        r: The rewriter.
        node: The operation.
        args: Its arguments, and the same with the new first axis if they vary along it.
    """
    given = [_Lifted(own if wide is None else wide, wide is not None) for own, wide in args]
    return _lifted(r, node, r.name(node), given)


def _lifted(r: Rewriter, node: fx.Node, name: str, args: list[_Lifted]) -> fx.Node | None:
    """Return an operation with a new first axis for the branches; None if it cannot be extended."""
    value, rest = args[0], [arg.node for arg in args[1:]]
    rank = len(r.shape(node))
    if name == "matmul":
        return _product(r, node, args)
    if name in _ELEMENTWISE:
        # Broadcasting aligns the last axes, so the new axis must be first everywhere.
        return r.insert(node.target, *(_wide(r, arg, rank) if arg.along else arg.node for arg in args), **node.kwargs)
    if name in ("batch_norm", "cudnn_batch_norm"):
        return _batch_norm(r, node, args)
    if not value.along or any(arg.along for arg in args[1:] if name not in ("layer_norm", "rms_norm")):
        return None
    if name in _EACH_SAMPLE:
        members, samples, *sizes = r.shape(value.node)
        result = r.insert(node.target, reshaped(r, value.node, [members * samples, *sizes]), *rest, **node.kwargs)
        return reshaped(r, result, [members, *r.shape(node)])
    before = len(r.shape(value.node)) - 1
    if (count := _AXES.get(name)) is not None:
        if len(rest) < count:
            return None
        axes = [_after_first(axis, before) for axis in rest[:count]]
        return None if None in axes else r.insert(node.target, value.node, *axes, *rest[count:], **node.kwargs)
    if name == "permute":
        return r.insert(node.target, value.node, [0, *(axis % before + 1 for axis in rest[0])])
    if name in operations(Trait.REGROUP):
        return r.insert(aten.reshape.default, value.node, [r.shape(value.node)[0], *r.shape(node)])
    if name in operations(Trait.EXPAND):
        wide = _wide(r, value, rank)
        return r.insert(aten.expand.default, wide, [r.shape(wide)[0], *r.shape(node)])
    if name == "linear":
        return r.insert(node.target, value.node, *rest, **node.kwargs)
    return _norm(r, node, name, args) if name in ("layer_norm", "rms_norm") else None


def _product(r: Rewriter, node: fx.Node, args: list[_Lifted]) -> fx.Node:
    """Return a product of matrices for each branch; vectors are rows or columns."""
    vectors = [at for at, given in enumerate(node.args[:2]) if len(r.shape(given)) == 1]
    rank = len(r.shape(node)) + len(vectors)
    own = [
        arg._replace(node=r.insert(aten.unsqueeze.default, arg.node, at - 2)) if at in vectors else arg
        for at, arg in enumerate(args[:2])
    ]
    factors = [_wide(r, arg, rank) if arg.along else arg.node for arg in own]
    # Units that branches share need the first axis as well.
    factors = [r.insert(aten.unsqueeze.default, part, 0) if len(r.shape(part)) == rank else part for part in factors]
    result: fx.Node = r.insert(node.target, *factors)
    for at in vectors:
        result = r.insert(aten.squeeze.dim, result, at - 2)
    return result


def _after_first(axis: Any, rank: int) -> Any:
    """Return axis numbers after the insertion of a new first axis."""
    if isinstance(axis, int):
        return axis % rank + 1
    return [own % rank + 1 for own in axis] if isinstance(axis, (list, tuple)) and axis else None


def _wide(r: Rewriter, arg: _Lifted, rank: int) -> fx.Node:
    count, *sizes = r.shape(arg.node)
    return reshaped(r, arg.node, [count, *[1] * (rank - len(sizes)), *sizes])


def _batch_norm(r: Rewriter, node: fx.Node, args: list[_Lifted]) -> fx.Node | None:
    """Return a batch norm of the channels of all branches, or of more samples if all branches share it."""
    value, states, rest = args[0], args[1:5], [arg.node for arg in args[5:]]
    held = [arg for arg in states if arg.node is not None]
    if not value.along or len({arg.along for arg in held}) != 1 or node.kwargs:
        return None
    count, samples, channels, *sizes = r.shape(value.node)
    if not held[0].along:
        flat = reshaped(r, value.node, [count * samples, channels, *sizes])
        result = r.insert(node.target, flat, *(arg.node for arg in states), *rest)
        return reshaped(r, result, [count, samples, channels, *sizes])
    flat = reshaped(r, r.insert(aten.movedim.int, value.node, 0, 1), [samples, count * channels, *sizes])
    own = [None if arg.node is None else reshaped(r, arg.node, [count * channels]) for arg in states]
    result = r.insert(node.target, flat, *own, *rest)
    return r.insert(aten.movedim.int, reshaped(r, result, [samples, count, channels, *sizes]), 1, 0)


def _norm(r: Rewriter, node: fx.Node, name: str, args: list[_Lifted]) -> fx.Node | None:
    """Return a norm of all branches; gains and biases that differ between branches follow it."""
    rank, over = len(r.shape(node)), args[1].node
    at_eps = 4 if name == "layer_norm" else 3
    weights = args[2:at_eps]
    eps = argument(node, at_eps, "eps", 1e-5 if name == "layer_norm" else None)
    own = [None if arg.along else arg.node for arg in weights]
    if weights and own[0] is None:  # the bias follows the gain
        own = [None] * len(own)
    result = r.insert(node.target, args[0].node, over, *(own + [None] * (at_eps - 2 - len(own))), eps)
    for arg, given, target in zip(weights, own, (aten.mul.Tensor, aten.add.Tensor), strict=False):
        if arg.node is not None and given is None:
            result = r.insert(target, result, _wide(r, arg, rank) if arg.along else arg.node)
    return result
