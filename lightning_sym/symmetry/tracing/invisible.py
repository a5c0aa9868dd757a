"""What is asked of the nodes of a captured graph: names, shapes, arguments, memory that is written into."""

from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.capture import operation_name

PASSES = {
    *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "contiguous", "clone", "alias", "detach"),
    *("positive", "lift_fresh", "lift_fresh_copy", "to", "_to_copy", "float", "double", "type_as", "neg"),
}
MOVEMENTS = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("permute", "transpose", "t", "numpy_T", "mT", "movedim", "swapaxes", "swapdims"),
    *("slice", "select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unsafe_split"),
    *("unsafe_chunk", "unbind", "hsplit", "vsplit", "dsplit", "expand", "repeat", "tile", "repeat_interleave"),
    *("roll", "flip", "rot90", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
}
SOFTMAX = {"softmax", "_softmax", "log_softmax", "_log_softmax"}
TRANSPOSES = {"t", "numpy_T", "transpose", "permute", "mT"}


def name_of(node: fx.Node) -> str:
    """Return the name of a node's operation, without the mark of writing in place."""
    return operation_name(node.target).removesuffix("_") if node.op == "call_function" else node.op


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the one tensor that a node makes, or None."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Return an argument of an operation, wherever it was given."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def moved(node: fx.Node, tensor: Tensor) -> Any:
    """Run an operation that only moves elements on another tensor; None if it needs tensors besides."""
    if any(isinstance(other, fx.Node) for other in torch.utils._pytree.tree_leaves((node.args[1:], node.kwargs))):
        return None
    if name_of(node) in ("view", "_unsafe_view"):
        shape: Any = node.args[1]
        return tensor.reshape(shape) if isinstance(shape, (list, tuple)) else None
    target: Any = node.target
    return target(tensor, *node.args[1:], **node.kwargs)


def shared_memory(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes in whose memory something is written that one of their other readers may see."""
    nodes = {node: place for place, node in enumerate(graph.nodes)}
    by_memory: dict[int, list[fx.Node]] = {}
    written: set[int] = set()
    for node, place in nodes.items():
        memories = memories_of(node)
        for target in _written(node):
            for memory in memories_of(target):
                others = [other for other in by_memory.get(memory, ()) if other is not target]
                late = any(nodes[user] > place for other in (target, *others) for user in other.users)
                if late or target.op == "placeholder" or shape_of(target) != shape_of(node):
                    written.add(memory)
        for memory in memories:
            by_memory.setdefault(memory, []).append(node)
    return {node for memory in written for node in by_memory[memory]}


def memories_of(node: fx.Node) -> set[int]:
    """Return which memory the tensors lie in that a node makes."""
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    dense = (value for value in values if isinstance(value, Tensor) and value.layout == torch.strided)
    return {int(value.untyped_storage()._cdata) for value in dense}


def _written(node: fx.Node) -> list[fx.Node]:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    found = []
    for index, own in enumerate(node.target._schema.arguments):
        if own.alias_info is not None and own.alias_info.is_write:
            given = argument(node, index, own.name)
            found += [leaf for leaf in torch.utils._pytree.tree_leaves(given) if isinstance(leaf, fx.Node)]
    return found


<<<<<<< HEAD
=======
def _met(one: Invisible, two: Invisible) -> Invisible:
    if one is None or two is None:
        return two if one is None else one
    return {axes: gains for axes, gains in one.items() if two.get(axes) == gains}


class Backwards:
    """What is invisible at every node of a captured network.

    Args:
        capture: The network.
        parameters: The names of tensors that may be gains: floating, and saved.
        outputs: Whether a softmax reads the outputs along their last axis.
        unsafe: Nodes of which nothing is known.
    """

    def __init__(self, capture: Capture, parameters: Collection[str], *, outputs: bool, unsafe: set[fx.Node]) -> None:
        self.capture, self.parameters, self.outputs = capture, parameters, outputs
        self._at: dict[fx.Node, Any] = {}
        for node in reversed(capture.graph.nodes):
            if node in unsafe:
                self._at[node] = [{}] * (_count(node) or 0) if _count(node) is not None else {}
            elif (count := _count(node)) is not None:
                items: list[Invisible] = [None] * count
                for user in node.users:
                    if user.target is operator.getitem:
                        items[user.args[1]] = _met(items[user.args[1]], self._at[user])  # type: ignore[index,call-overload]
                    else:
                        items = [{}] * count
                self._at[node] = items
            else:
                found: Invisible = None
                for user in node.users:
                    found = _met(found, self.asked(user, node))
                self._at[node] = found

    def __call__(self, node: fx.Node) -> Invisible:
        """Return what is invisible at a node."""
        found: Invisible = self._at[node] if _count(node) is None else {}
        return found

    def passed(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether an operation hands what is invisible at one of its arguments on to its result."""
        names = {"layer_norm", *SOFTMAX, "instance_norm", "batch_norm", "group_norm", "var", "std"}
        return name_of(user) not in names and centred_from(user) is not node

    def asked(self, user: fx.Node, node: fx.Node) -> Invisible:
        """Return what one reader of a value does not see of it."""
        shape = shape_of(node)
        if user.op == "output":
            return {frozenset({len(shape) - 1}): ()} if self.outputs and shape else {}
        if shape is None or user.op != "call_function":
            return {}
        name, result = name_of(user), self._at[user]
        if name == "mean" and user.users and all(centred_from(other) is node for other in user.users):
            return None  # it is only taken off again
        if centred_from(user) is node:
            return {frozenset(reduced(user.args[1], len(shape))): ()}  # type: ignore[arg-type]
        if name in PASSES:
            return _copied(result)
        if name in MOVEMENTS:
            return self._before_move(user, shape, result)
        if isinstance(result, list) or result is None:
            result = {}
        places = [place for place, given in enumerate(user.args) if given is node]
        if len(places) != 1 and name != "scaled_dot_product_attention":
            inside = name == "cat" and isinstance(user.args[0], (list, tuple))
            return self._before_cat(user, result) if inside else {}
        rule: Callable[..., Invisible] | None = getattr(self, f"_{_RULES.get(name, '')}", None)
        if rule is None:
            return {}
        found: Invisible = None
        for place in places:
            found = _met(found, rule(user, place, shape, result))
        return found

    @staticmethod
    def _before_move(user: fx.Node, shape: tuple[int, ...], result: Any) -> Invisible:
        items = result if isinstance(result, list) else [result]
        if all(own is None for own in items):
            return None
        if any(own == {} for own in items):
            return {}
        where = moved(user, _coordinates(shape))
        if where is None:
            return {}
        parts = zip(where if isinstance(result, list) else [where], items, strict=True)
        found: Invisible = None
        for part, own in parts:
            if own is None:
                continue
            maps = {}
            for axes, gains in own.items():
                sources = [_source(part, axis, shape) for axis in axes]
                if all(source is not None and (exact or not gains) for source, exact in map(_split, sources)):
                    maps[frozenset(int(_split(source)[0]) for source in sources)] = gains  # type: ignore[arg-type]
            found = _met(found, maps)
        return found

    @staticmethod
    def _before_cat(user: fx.Node, result: dict[Axes, Gains]) -> Invisible:
        axis = argument(user, 1, "dim", 0) % len(shape_of(user) or (1,))
        return {axes: gains for axes, gains in result.items() if axis not in axes}

    # What is asked of the argument at a place, by the kind of operation.

    def _layer_norm(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        if place == 3:
            return _before_broadcast(result, shape, shape_of(user) or ())
        return {frozenset(range(len(shape) - len(user.args[1]), len(shape))): ()} if place == 0 else {}  # type: ignore[arg-type]

    def _softmax(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        axis: Any = user.args[1]
        return {frozenset({axis % len(shape)}): ()} if place == 0 else {}

    def _by_itself(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        """Instance norm, and batch norm by the batch's own statistics."""
        name = name_of(user)
        own = argument(user, 3, "running_mean") is None if name == "batch_norm" else bool(user.args[5])
        own = own or (name == "batch_norm" and bool(user.args[5]))
        if place == 2:
            return _of_channels(result)
        if place or not own:
            return {}
        return {frozenset(axis for axis in range(len(shape)) if axis != 1 and (axis or name == "batch_norm")): ()}

    def _spread(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        """Variances and standard deviations."""
        return {frozenset(reduced(user, len(shape))): ()} if place == 0 else {}

    def _one_group(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        if place == 3:
            return _of_channels(result)
        return {frozenset(range(1, len(shape))): ()} if place == 0 and user.args[1] == 1 else {}

    def _sum(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        return _before_broadcast(result, shape, shape_of(user) or ()) if place < 2 else {}

    def _product(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        whole = shape_of(user) or ()
        quotient = name_of(user) == "div"
        if place > 1 or (quotient and place == 1) or user.kwargs.get("rounding_mode"):
            return {}
        other = user.args[1 - place]
        if not isinstance(other, fx.Node):
            return dict(result)
        sizes = shape_of(other)
        if sizes is None or shape != whole:
            return {}
        offset, found = len(whole) - len(sizes), {}
        for axes, gains in result.items():
            if all(axis < offset or sizes[axis - offset] == 1 for axis in axes):
                found[axes] = gains
            elif len(axes) == 1 and self.capture.states.get(other) in self.parameters:
                (axis,) = axes
                if math.prod(sizes) == sizes[axis - offset] == whole[axis]:
                    found[axes] = _times(gains, self.capture.states[other], 1 if quotient else -1)
        return found

    def _linear(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        last = len(shape_of(user) or ()) - 1
        if place == 0:
            return {axes: gains for axes, gains in result.items() if last not in axes}
        if place == 1:
            return {frozenset({0}): gains for axes, gains in result.items() if axes == {last}}
        return _before_broadcast(result, shape, shape_of(user) or ())

    def _matmul(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        rank = len(shape_of(user) or ())
        summed_here = rank - 1 if place == 0 else rank - 2  # where the other factor's own axis is in the result
        if place > 1 or rank < 2 or len(shape) < 2:
            return {}
        # What is the same along an axis is not when it was multiplied by what changes along it.
        other = shape_of(user.args[1 - place]) or ()
        varying = {axis + rank - len(other) for axis, size in enumerate(other[:-2]) if size > 1} | {summed_here}
        free = {axes: gains for axes, gains in result.items() if varying.isdisjoint(axes)}
        if len(shape) == rank:
            return free
        return {frozenset({1}): gains for axes, gains in free.items() if axes == {rank - 1}} if place else {}

    def _attention(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        rank = len(shape)
        if place == 1:
            return {frozenset({rank - 2}): ()}  # one number for all keys, whatever the query
        if place == 2 and not user.kwargs.get("enable_gqa"):
            return {axes: gains for axes, gains in result.items() if rank - 2 not in axes}
        return {frozenset({rank - 1}): ()} if place == 3 and shape[-1] > 1 else {}

    def _embedding(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        last = len(shape_of(user) or ()) - 1
        return {frozenset({1}): gains for axes, gains in result.items() if axes == {last}} if place == 0 else {}

    def _convolution(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        if place == 1:
            plain = argument(user, 6, "groups", 1) == 1
            return {frozenset({0}): gains for axes, gains in result.items() if axes == {1} and plain}
        if place == 2:
            return _of_channels(result)
        return {}

    def _mean(self, user: fx.Node, place: int, shape: tuple[int, ...], result: dict[Axes, Gains]) -> Invisible:
        gone, keep = reduced(user, len(shape)), len(shape_of(user) or ()) == len(shape)
        kept = [axis for axis in range(len(shape)) if keep or axis not in gone]
        found = {frozenset(kept[axis] for axis in axes): gains for axes, gains in result.items()}
        return {axes: gains for axes, gains in found.items() if not axes & gone}


_RULES = {
    "layer_norm": "layer_norm",
    **dict.fromkeys(SOFTMAX, "softmax"),
    **dict.fromkeys(("instance_norm", "batch_norm"), "by_itself"),
    "group_norm": "one_group",
    **dict.fromkeys(("var", "std"), "spread"),
    **dict.fromkeys(("add", "sub", "rsub"), "sum"),
    **dict.fromkeys(("mul", "div"), "product"),
    "linear": "linear",
    "matmul": "matmul",
    "scaled_dot_product_attention": "attention",
    "embedding": "embedding",
    **{f"conv{count}d": "convolution" for count in (1, 2, 3)},
    **dict.fromkeys(("mean", "sum"), "mean"),
}


def centred_from(node: fx.Node) -> fx.Node | None:
    """Return the value whose mean over some axes an operation takes off it; None if it does something else."""
    if name_of(node) != "sub" or len(node.args) < 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    value, mean = node.args[:2]
    if not isinstance(value, fx.Node) or not isinstance(mean, fx.Node) or name_of(mean) != "mean":
        return None
    kept = len(shape_of(value) or ()) == len(shape_of(mean) or ())
    return value if mean.args[0] is value and kept else None


>>>>>>> bb2a306cb3a013dd43b0c16fd80be5ada24f8da9
def reduced(node: fx.Node, rank: int) -> set[int]:
    """Return the axes over which a mean or sum goes."""
    axes = argument(node, 1, "dim")
    axes = range(rank) if axes is None else [axes] if isinstance(axes, int) else axes
    return {axis % rank for axis in axes} or set(range(rank))
