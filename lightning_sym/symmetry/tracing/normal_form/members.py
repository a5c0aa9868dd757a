"""Take stacked weights of several modules apart: each module's weights are read alone, as in a loop over the modules.

``einsum('bi,moi->mbo', x, stack([m.weight for m in modules]))`` becomes ``stack([x @ m.weight.T for m in modules])``.
Whether an operation treats parts of its arguments separately is seen by running it on random numbers.
"""

import contextlib
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym._random import generator
from lightning_sym.symmetry.tracing.graph.capture import Capture, operation_name
from lightning_sym.symmetry.tracing.graph.functional import functional
from lightning_sym.symmetry.tracing.graph.nodes import ancestors, argument, moved, shape_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewriter
from lightning_sym.symmetry.tracing.graph.running import is_close
from lightning_sym.symmetry.tracing.normal_form.contractions import reshaped

aten = torch.ops.aten
_JOINS = ("cat", "stack", "block_diag")
_OF_MATRICES = {"bmm": aten.mm.default, "baddbmm": aten.addmm.default}
_MOST = 64  # modules
_LARGE = 2**22  # elements of a value that is computed
_Cut = tuple[str, int]  # how modules read a value: the join that makes it of their parts, and its axis


class _Parts(NamedTuple):
    """A value that consists of one part for each module.

    Attributes:
        nodes: The parts.
        join: The operation that makes the value of them: ``cat``, ``stack`` or ``block_diag``.
        axis: Its axis.
        contracted: Whether a layer has read the weights.
    """

    nodes: tuple[fx.Node, ...]
    join: str
    axis: int = 0
    contracted: bool = False


class _Call(NamedTuple):
    """An operation, and the item of its result if this is a list."""

    target: Any
    args: Any
    kwargs: Any
    item: int | None = None


def take_apart(capture: Capture) -> None:
    """Replace operations on stacked weights by operations on the weights of each module, if these are separate.

    Args:
        capture: The network, as captured. Its graph is changed.
    """
    if any(_is_stack(capture, node) for node in capture.graph.nodes):
        _Members(Rewriter(functional(capture))).run()


def _is_stack(capture: Capture, node: fx.Node) -> bool:
    """Whether an operation concatenates equally shaped values made of different parameters."""
    if name_of(node) not in _JOINS:
        return False
    parts: Any = node.args[0]
    if not 1 < len(parts) <= _MOST or len({shape_of(part) for part in parts}) > 1 or not shape_of(parts[0]):
        return False
    sources = [{own for own in ancestors(part) if own.op in ("placeholder", "get_attr")} for part in parts]
    weights = [own & capture.states.keys() for own in sources]
    apart = len(set().union(*weights)) == sum(map(len, weights))
    floating = all(part.meta["val"].is_floating_point() for part in parts)
    return apart and floating and all(own and own == held for own, held in zip(weights, sources, strict=True))


class _Members:
    """The values that consist of separate parts.

    Attributes:
        found: Their parts.
        numbers: Random numbers for every value.
    """

    def __init__(self, r: Rewriter) -> None:
        self.r, self.random = r, generator("parts of stacked weights")
        self.found: dict[fx.Node, _Parts] = {}
        self.numbers: dict[fx.Node, Tensor] = {}

    def run(self) -> None:
        """Process all operations in order; where one needs several parts, it reads them joined."""
        r = self.r
        for node in list(r.graph.nodes):
            r.at = node
            call = _call(r, node)
            if r.name(node) in _JOINS and _is_stack(r.capture, node):
                self._begin(node)
            elif call is not None and any(own in self.found for own in _given(call)):
                with contextlib.suppress(NoSpellingError):
                    if (part := self._one_part(call)) is not None:
                        r.replace(node, part)
                    elif (parts := self._parts(call)) is not None:
                        self.found[node] = parts
        for node, own in self.found.items():
            read = r.is_marked(node) or any(user not in self.found for user in node.users)
            if own.contracted and read:
                r.at = node
                join = aten.stack.default if own.join == "stack" else aten.cat.default
                r.replace(node, r.insert(join, list(own.nodes), own.axis))
        r.erase_unread()

    def _begin(self, node: fx.Node) -> None:
        parts: Any = node.args[0]
        join = self.r.name(node)
        if join == "block_diag":
            own = [self._numbers_like(part.meta["val"]) for part in parts]
            self.numbers[node] = torch.block_diag(*own)  # type: ignore[no-untyped-call]
        axis = 0 if join == "block_diag" else argument(node, 1, "dim", 0) % len(self.r.shape(node))
        self.found[node] = _Parts(tuple(parts), join, axis)

    def _numbers_like(self, value: Tensor) -> Tensor:
        found = torch.rand(value.shape, generator=self.random, dtype=torch.float64) + 0.5
        return found if value.is_floating_point() else (found > 1).to(value.dtype)

    def _number(self, node: fx.Node) -> Tensor:
        """Return random numbers in place of a value.

        Raises:
            NoSpellingError: If it is too large, or no tensor.
        """
        if node not in self.numbers:
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or value.numel() > _LARGE:
                raise NoSpellingError
            self.numbers[node] = self._numbers_like(value)
        return self.numbers[node]

    def _one_part(self, call: _Call) -> fx.Node | None:
        """Return the part that an operation reads alone, in the shape of its result; None for other operations."""
        value = call.args[0] if call.args else None
        if value not in self.found or len(_given(call)) > 1 or operation_name(call.target) not in operations(Trait.CUT):
            return None
        own, whole = self.found[value], _run(call, {value: self._number(value)})
        for at, node in enumerate(own.nodes) if isinstance(whole, Tensor) and own.join != "block_diag" else ():
            part = _part(self.numbers[value], own.join, own.axis, at, len(own.nodes))
            if part.numel() == whole.numel() and torch.equal(part.reshape(-1), whole.reshape(-1)):
                return reshaped(self.r, node, whole.shape)
        return None

    def _parts(self, call: _Call) -> _Parts | None:
        """Return the parts of an operation's result; None if it combines parts of its arguments."""
        given = _given(call)
        inside = [self.found[own] for own in given if own in self.found]
        count = len(inside[0].nodes)
        whole = _run(call, {own: self._number(own) for own in given})
        if any(len(own.nodes) != count for own in inside) or not isinstance(whole, Tensor) or whole.numel() > _LARGE:
            return None
        most = 1 if operation_name(call.target) in operations(Trait.REDUCE) else None  # not along one entry
        for cuts in itertools.product(*(self._cuts(own, count)[:most] for own in given)):
            read = dict(zip(given, cuts, strict=True))
            for one in _spellings(call, read, whole, count):
                if (join := self._joined(one, read, whole, count)) is not None:
                    contracted = operation_name(call.target) in operations(Trait.CONTRACT)
                    contracted = contracted or any(own.contracted for own in inside)
                    return _Parts(self._written(one, read, count), *join, contracted)
        return None

    def _cuts(self, node: fx.Node, count: int) -> list[_Cut]:
        """Return the ways in which modules may read a value: as its parts, the whole, or cut along an axis."""
        if (own := self.found.get(node)) is not None:
            return [(own.join, own.axis), *([("cat", own.axis)] if own.join == "stack" else [])]
        sizes = list(enumerate(self.r.shape(node)))
        alone = [("stack", axis) for axis, size in sizes if size == count]
        return [("", 0), *alone, *(("cat", axis) for axis, size in sizes if size > 1 and size % count == 0)]

    def _joined(self, call: _Call, read: dict[fx.Node, _Cut], whole: Tensor, count: int) -> tuple[str, int] | None:
        """Return how results for all parts make the whole result; None if they do not."""
        ways: list[_Cut] = []
        for at in range(count):
            numbers = {own: _part(self._number(own), *cut, at, count) for own, cut in read.items()}
            part = _run(call, numbers)
            if not isinstance(part, Tensor):
                return None
            if not at:
                ways = _ways(part.shape, whole.shape, count)
            ways = [way for way in ways if _are_close(part, _part(whole, *way, at, count))]
            if not ways:
                return None
        return ways[0]

    def _written(self, call: _Call, read: dict[fx.Node, _Cut], count: int) -> tuple[fx.Node, ...]:
        nodes = {own: self._values(own, cut, count) for own, cut in read.items()}
        made = []
        for at in range(count):
            args, kwargs = fx.map_arg((call.args, call.kwargs), {own: each[at] for own, each in nodes.items()}.get)
            result = args[0] if call.target is _same else self.r.insert(call.target, *args, **kwargs)
            made.append(result if call.item is None else self.r.insert(operator.getitem, result, call.item))
        return tuple(made)

    def _values(self, node: fx.Node, cut: _Cut, count: int) -> Sequence[fx.Node]:
        """Return the parts of a value, or the whole value for each."""
        r, (join, axis) = self.r, cut
        if (own := self.found.get(node)) is not None:
            wide = join == "cat" and own.join == "stack"
            return [r.insert(aten.unsqueeze.default, part, axis) for part in own.nodes] if wide else own.nodes
        if not join:
            return [node] * count
        if r.name(node) in operations(Trait.MOVE) and isinstance(source := node.args[0], fx.Node):
            numbers = torch.arange(math.prod(r.shape(source)))
            shown = moved(node, numbers.reshape(r.shape(source)))
            first, *others = (_part(shown, join, axis, at, count) for at in range(count))
            if all(torch.equal(first, other) for other in others) and torch.equal(first.reshape(-1), numbers):
                return [reshaped(r, source, first.shape)] * count  # a value repeated for all modules
        if join == "stack":
            return [r.insert(aten.select.int, node, axis, at) for at in range(count)]
        size = r.shape(node)[axis] // count
        return [r.insert(aten.slice.Tensor, node, axis, at * size, (at + 1) * size) for at in range(count)]


def _call(r: Rewriter, node: fx.Node) -> _Call | None:
    """Return a replaceable operation, with that of a list whose item it is."""
    if node.target is operator.getitem and r.name(node.args[0]) in operations(Trait.PARTS):
        whole: Any = node.args[0]
        return _Call(whole.target, whole.args, whole.kwargs, node.args[1])  # type: ignore[arg-type]
    return _Call(node.target, node.args, node.kwargs) if r.name(node) else None


def _given(call: _Call) -> list[fx.Node]:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))


def _same(value: Tensor) -> Tensor:
    return value


def _spellings(call: _Call, read: dict[fx.Node, _Cut], whole: Tensor, count: int) -> Iterator[_Call]:
    """Yield operations that may do for one part what an operation does for all."""
    name, (value, *rest) = operation_name(call.target), call.args
    if name in operations(Trait.MOVE) and call.item is None and len(read) == 1:
        yield _Call(_same, (value,), {})
    yield call
    if name in _OF_MATRICES:
        yield call._replace(target=_OF_MATRICES[name])
    gone = {axis for join, axis in read.values() if join == "stack"}
    if name in operations(Trait.CONTRACT) and len(read) == 2:
        yield from (_Call(aten.linear.default, order, {}) for order in itertools.permutations(read))
    if name == "einsum" and (equation := _without_letter(call, read)) is not None:
        yield call._replace(args=(equation, *rest))
    for axis in gone:  # which the parts lack
        numbers = [own - (own > axis) if type(own) is int else own for own in rest]
        yield call._replace(args=(value, *numbers))
        yield call._replace(args=(value, *(_lower(own, axis) if isinstance(own, list) else own for own in numbers)))
    if name in operations(Trait.REGROUP | Trait.EXPAND) and len(read) == 1:
        target = aten.reshape.default if name in operations(Trait.REGROUP) else aten.expand.default
        for axis, size in enumerate(whole.shape):
            before, after = whole.shape[:axis], whole.shape[axis + 1 :]
            if size == count:
                yield _Call(target, (value, [*before, *after]), {})
            if size % count == 0:
                yield _Call(target, (value, [*before, size // count, *after]), {})
    for at, number in enumerate(rest):  # the groups of a convolution
        if type(number) is int and number > 1 and number % count == 0:
            yield call._replace(args=(value, *rest[:at], number // count, *rest[at + 1 :]))


def _lower(axes: list[Any], gone: int) -> list[Any]:
    """Return axes of a value in one that lacks an axis."""
    return [own - (own > gone) if type(own) is int else own for own in axes if own != gone]


def _without_letter(call: _Call, read: dict[fx.Node, _Cut]) -> str | None:
    """Return an equation without the letter of the axis that the parts of its terms lack."""
    inputs, arrow, out = call.args[0].replace(" ", "").partition("->")
    terms, gone = inputs.split(","), set()
    if not arrow or "." in inputs:
        return None
    for at, (term, own) in enumerate(zip(terms, call.args[1], strict=True)):
        join, axis = read[own]
        if join == "stack":
            gone.add(term[axis])
            terms[at] = term[:axis] + term[axis + 1 :]
    return f"{','.join(terms)}->{out.replace(gone.pop(), '')}" if len(gone) == 1 else None


def _part(value: Tensor, join: str, axis: int, at: int, count: int) -> Tensor:
    """Return a part of numbers; all of them without ``join``."""
    if join == "block_diag":
        return value.chunk(count, 0)[at].chunk(count, 1)[at]
    return value.select(axis, at) if join == "stack" else value.chunk(count, axis)[at] if join else value


def _run(call: _Call, numbers: dict[fx.Node, Tensor]) -> Any:
    """Return the result of an operation on numbers; None if it does not run on them."""
    args, kwargs = fx.map_arg((call.args, call.kwargs), numbers.__getitem__)
    try:
        result = call.target(*args, **kwargs)
        return result if call.item is None else result[call.item]
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None


def _ways(part: Sequence[int], whole: Sequence[int], count: int) -> list[_Cut]:
    """Return how parts of one shape may make a value of another shape."""
    found: list[_Cut] = []
    for axis, size in enumerate(whole):
        if size == count and (*whole[:axis], *whole[axis + 1 :]) == (*part,):
            found.append(("stack", axis))
        if size % count == 0 and (*whole[:axis], size // count, *whole[axis + 1 :]) == (*part,):
            found.append(("cat", axis))
    return found


def _are_close(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and is_close(one.double(), two.double())
