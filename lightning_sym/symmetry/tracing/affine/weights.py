"""Evaluate a network's tensors and the values that its graphs compute of them alone, without these graphs.

The records kept here can be copied and sent to other processes.
"""

import functools
import importlib
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.affine.values import Atom, Coefficient, Total
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations
from lightning_sym.symmetry.views import NamedTensors

_SMALL = 2**16  # tensors of so many numbers are kept: gains and biases, which are asked for again and again


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor of the network, a constant, or the result of an operation on such.

    Attributes:
        operation: Where the operation is found, as :func:`_address` says; empty for tensors and constants.
        name: The name of the tensor or operation.
        value: The constant.
        arguments: Positional and keyword arguments, with others of these among them.
        shape: Shape of the result, if that is one tensor.
        dtype: Its type.
    """

    operation: str
    name: str
    value: Tensor | None = None
    arguments: Any = ((), {})
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @cached_property
    def given(self) -> list["Made"]:
        """The records among its arguments."""
        return [own for own in pytree.tree_leaves(self.arguments) if isinstance(own, Made)]

    def names(self) -> set[str]:
        """Return the names of all tensors that it is made of."""
        found: set[str] = set() if self.operation or self.value is not None else {self.name}
        return found.union(*(own.names() for own in self.given))


def kept(node: fx.Node, names: Mapping[fx.Node, str], known: dict[fx.Node, Made]) -> Made:
    """Return a node's operation on weights and constants, without its graph.

    Args:
        node: The node.
        names: The names of placeholders that hold tensors of the network.
        known: Operations kept before; grows.
    """
    if node not in known:
        val = node.meta.get("val")
        like = (tuple(val.shape), val.dtype) if isinstance(val, Tensor) else ((), None)
        if node.op == "placeholder":
            known[node] = Made("", names[node])
        elif node.op == "get_attr":
            owner: Any = node.graph.owning_module
            known[node] = Made("", str(node.target), getattr(owner, str(node.target)).detach())
        else:
            arguments = pytree.tree_map(
                lambda own: kept(own, names, known) if isinstance(own, fx.Node) else own, (node.args, node.kwargs)
            )
            known[node] = Made(_address(node.target), name_of(node), None, arguments, *like)
    return known[node]


def _address(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops:{target}"
    return f"{target.__module__}:{getattr(target, '__qualname__', target.__name__)}"


def _found(address: str) -> Callable[..., Any]:
    module, _, name = address.partition(":")
    found: Any = torch.ops if module == "torch.ops" else importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


class Generic(NamedTensors):
    """Random positive numbers in the place of a network's tensors, made when they are asked for; constants stay.

    Args:
        shapes: Shapes of all tensors.
        values: The constants.
        seed: Another one gives other numbers.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Tensor], seed: int = 0) -> None:
        self.shapes, self.constants, self.seed, self._names = shapes, values, seed, shapes
        self._small: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self.constants:
            return self.constants[name]
        if name in self._small:
            return self._small[name]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))
        made = 0.5 + torch.rand(tuple(self.shapes[name]), dtype=torch.float64, generator=generator)
        if made.numel() <= _SMALL:
            self._small[name] = made
        return made


class Program(Protocol):
    """Access to nodes by the keys of atoms."""

    def made(self, node: Any) -> Made:
        """Return the operation behind the key of an atom, behind a node, or behind the copy that was kept of a node."""


class Weights:
    """The values of a network's tensors, and of all that its graphs compute of them alone; float64, on the CPU.

    Args:
        program: Looks up atoms.
        tensors: Parameters and buffers, by name.
        tiny: Replacement for zeros among the factors of equations, so that divisions by them show.

    Attributes:
        has_zeros: Whether there were any.
    """

    def __init__(self, program: Program, tensors: Mapping[str, Tensor], tiny: float = 0.0) -> None:
        self.program, self.tensors, self.tiny, self.has_zeros = program, tensors, tiny, False
        self._known: dict[Any, Any] = {}

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer."""
        if name in self._known:
            known: Tensor = self._known[name]
            return known
        own = self.tensors[name].detach().cpu()
        own = own.double() if own.is_floating_point() else own
        if own.numel() <= _SMALL:
            self._known[name] = own
        return own

    def node(self, node: Any) -> Any:
        """Return the result of a node on weights and constants."""
        made = self.program.made(node)
        if made not in self._known:
            result = self._run(made)
            if not isinstance(result, Tensor) or result.numel() > _SMALL:
                return result
            self._known[made] = result
        return self._known[made]

    def as_held(self, node: Any) -> Tensor:
        """Return the result of a node on weights: a view of a tensor in its own type, anything else as :meth:`node`."""
        made = self.program.made(node)
        views, held = [], made
        while held.name == "permute" and held.operation:
            views.append(held.arguments[0][1])
            held = held.arguments[0][0]
        if held.operation or held.value is not None or not self.tensors[held.name].is_floating_point():
            whole: Tensor = self.node(node)
            return whole
        tensor = self.tensors[held.name].detach().cpu()
        for order in reversed(views):
            tensor = tensor.permute(order)
        return tensor

    def _run(self, made: Made) -> Any:
        if made.value is not None:
            value = made.value.cpu()
            return value.double() if value.is_floating_point() else value
        if not made.operation:
            return self.tensor(made.name)
        positional, keywords = made.arguments
        if made.name in operations(Trait.CAST) and isinstance(positional[0], Made):
            value, wanted = self.node(positional[0]), made.dtype
            assert wanted is not None
            both = value.is_floating_point() and wanted.is_floating_point
            return value if both else value.to(torch.float64 if wanted.is_floating_point else wanted)

        def given(own: Any) -> Any:
            if not isinstance(own, Made):
                return own
            return torch.empty(own.shape) if made.name in operations(Trait.LIKE) else self.node(own)

        positional, keywords = pytree.tree_map(given, made.arguments)
        if "device" in keywords:
            keywords = {**keywords, "device": torch.device("cpu")}
        if made.name in ("view", "_unsafe_view"):
            return positional[0].reshape(positional[1])
        result = _found(made.operation)(*positional, **keywords)
        return pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, result)

    def atom(self, atom: Atom) -> Tensor:
        """Return the numbers of an atom. Shape (numbers,)."""
        if atom.kind == "length":
            size, walk = atom.key
            return torch.tensor([size * (1 + 0.37 * walk)], dtype=torch.float64)
        if atom not in self._known:
            made = self.tensor(atom.key) if atom.kind == "parameter" else self.node(atom.key).double()
            made = self.without_zeros(made.reshape(-1))
            if made.numel() > _SMALL:
                return made
            self._known[atom] = made
        found: Tensor = self._known[atom]
        return found

    def without_zeros(self, numbers: Tensor) -> Tensor:
        """Return numbers with something tiny in the place of zeros."""
        zeros = numbers == 0
        if self.tiny and bool(zeros.any()):
            self.has_zeros = True
            numbers = torch.where(zeros, self.tiny, numbers)
        return numbers

    def coefficient(self, coefficient: Coefficient) -> Tensor:
        """Return the numbers of a coefficient; thin."""
        result: Tensor | float = coefficient.factor
        for atom, power, places in coefficient.items:
            numbers = self.atom(atom)[places]
            result = result * (numbers if power == 1 else numbers**power)
        return result if isinstance(result, Tensor) else torch.tensor(result, dtype=torch.float64)

    def total(self, total: Total) -> Tensor:
        """Return the sum of a relation. Shape (segments,)."""
        if total not in self._known:
            self._known[total] = self._sum(total)
        found: Tensor = self._known[total]
        return found

    def _sum(self, total: Total) -> Tensor:
        constant = torch.tensor(total.constant, dtype=torch.float64).nan_to_num()  # multiples of unknown totals vanish
        result = torch.zeros(total.segments, dtype=torch.float64) + constant
        for coefficient, segments, shape in total.terms:
            numbers = self.coefficient(coefficient).expand(shape).reshape(-1)
            result = result.index_add(0, segments.expand(shape).reshape(-1), numbers)
        if total.before is not None:
            result = result + self.total(total.before[0])[total.before[1]]
        return result


def names_of(program: Program, coefficient: Coefficient) -> set[str]:
    """Return the names of the tensors in a coefficient."""
    return set().union(*(names_of_atom(program, atom) for atom, *_ in coefficient.items))


def names_of_atom(program: Program, atom: Atom) -> set[str]:
    """Return the names of the tensors in an atom."""
    if atom.kind == "length":
        return set()
    return {str(atom.key)} if atom.kind == "parameter" else program.made(atom.key).names()


def names_of_total(program: Program, total: Total) -> set[str]:
    """Return the names of the tensors in a relation's sum."""
    found = set().union(*(names_of(program, coefficient) for coefficient, *_ in total.terms))
    return found | (names_of_total(program, total.before[0]) if total.before is not None else set())


# Maps to derived unknowns: called with values of others, after leading axes, and with weights.


class ByProduct(NamedTuple):
    """A contraction with weights.

    Attributes:
        node: The node of the weights.
        shape: Their shape.
        equation: Equation by letters, including leading axes.
        whole: The shape of the contracted tensor.
    """

    node: Any
    shape: tuple[int, ...]
    equation: str
    whole: tuple[int, ...]

    def __call__(self, values: Tensor, weights: Weights) -> Tensor:
        """Return derived unknowns."""
        given = values.expand((*values.shape[: values.ndim - len(self.whole)], *self.whole))
        own = weights.as_held(self.node)
        letters = self.equation.split("->")[0].split(",")[1]
        if own.shape != self.shape or own.numel() <= _SMALL or len(set(letters)) < own.ndim:
            return torch.einsum(self.equation, given, self._factor(weights))
        return self._in_pieces(given, own)

    def _in_pieces(self, given: Tensor, own: Tensor) -> Tensor:
        """Contract with weights that become double precision piece by piece, each in the cache."""
        inputs, result = self.equation.split("->")
        letters = inputs.split(",")[1]
        axis = max(range(own.ndim), key=own.stride)
        at, there = (term.find(letters[axis]) - len(term) for term in (inputs.split(",")[0], result))
        pieces = torch.split(own, max(4 * _SMALL * own.shape[axis] // own.numel(), 1), axis)
        parts = [given] * len(pieces)
        if letters[axis] in inputs.split(",")[0]:
            parts = list(torch.split(given, pieces[0].shape[axis], at))
        found = (
            torch.einsum(self.equation, *pair) for pair in zip(parts, (own.double() for own in pieces), strict=True)
        )
        return torch.cat(list(found), there) if letters[axis] in result else functools.reduce(torch.add, found)

    def pulled_back(self, slopes: Tensor, shape: Sequence[int], weights: Weights) -> Tensor:
        """Return the derivative by values of a shape, given that by the derived unknowns."""
        inputs, result = self.equation.split("->")
        values, by = inputs.split(",")
        back = torch.einsum(f"{result},{by}->{values}", slopes, self._factor(weights))
        return back.sum_to_size(*back.shape[: back.ndim - len(shape)], *shape)

    def _factor(self, weights: Weights) -> Tensor:
        own: Tensor = weights.node(self.node)  # with axes of size 1 where samples or heads share it
        return own.reshape(self.shape) if own.numel() == math.prod(self.shape) else own.expand(self.shape)

    def names(self, program: Program) -> set[str]:
        """Return the names of the tensors that are needed."""
        return program.made(self.node).names()


class ByKernel(NamedTuple):
    """A convolution of a value that is the same at all places.

    Attributes:
        node: The node of the kernel.
        shape: Its shape.
        groups: Number of groups of the channels.
        channels: How many there are.
        rank: Rank of the input.
    """

    node: Any
    shape: tuple[int, ...]
    groups: int
    channels: int
    rank: int

    def __call__(self, values: Tensor, weights: Weights) -> Tensor:
        """Return derived unknowns."""
        front = values.shape[: values.ndim - self.rank]
        given = values.reshape(*front, -1).expand(*front, self.channels).reshape(*front, self.groups, -1)
        made = torch.einsum("...gc,goc->...go", given, self._kernel(weights))
        return made.reshape(*front, 1, self.shape[0], *[1] * (self.rank - 2))

    def pulled_back(self, slopes: Tensor, shape: Sequence[int], weights: Weights) -> Tensor:
        """Return the derivative by values of a shape, given that by the derived unknowns."""
        front = slopes.shape[: slopes.ndim - self.rank]
        back: Tensor = torch.einsum("...go,goc->...gc", slopes.reshape(*front, self.groups, -1), self._kernel(weights))
        return back.reshape(*front, -1).sum_to_size(*front, math.prod(shape)).reshape((*front, *shape))

    def _kernel(self, weights: Weights) -> Tensor:
        kernel: Tensor = weights.node(self.node).reshape(self.shape)
        return kernel.flatten(2).sum(2).reshape(self.groups, self.shape[0] // self.groups, -1)

    def names(self, program: Program) -> set[str]:
        """Return the names of the tensors that are needed."""
        return program.made(self.node).names()


class Beside(NamedTuple):
    """Maps to derived unknowns, side by side, so that changes of several weights are taken off all of them at once.

    Attributes:
        maps: Each with the shapes of its values and of its derived unknowns.
        rows: How many rows the results have.
    """

    maps: tuple[tuple[Any, tuple[int, ...], tuple[int, ...]], ...]
    rows: int

    def __call__(self, values: Tensor, weights: Weights) -> Tensor:
        """Return derived unknowns. Shape (..., rows, all columns)."""
        given = torch.split(values, [math.prod(shape) for _, shape, _ in self.maps], -1)
        front = values.shape[:-1]
        made = [
            own(part.reshape(*front, *shape), weights).reshape(*front, self.rows, -1)
            for part, (own, shape, _) in zip(given, self.maps, strict=True)
        ]
        return torch.cat(made, -1)

    def pulled_back(self, slopes: Tensor, shape: Sequence[int], weights: Weights) -> Tensor:
        """Return the derivative by values of a shape, given that by the derived unknowns."""
        parts = torch.split(slopes, [math.prod(made) // self.rows for *_, made in self.maps], -1)
        front = slopes.shape[:-2]
        found = [
            own.pulled_back(part.reshape(*front, *made), given, weights).reshape(*front, -1)
            for part, (own, given, made) in zip(parts, self.maps, strict=True)
        ]
        return torch.cat(found, -1)

    def names(self, program: Program) -> set[str]:
        """Return the names of the tensors that are needed."""
        return set().union(*(own.names(program) for own, *_ in self.maps))


class ByTotal(NamedTuple):
    """Multiples of the sum of a relation.

    Attributes:
        total: The sum.
        rank: Rank of the multiplied value, segments first.
    """

    total: Total
    rank: int

    def __call__(self, values: Tensor, weights: Weights) -> Tensor:
        """Return derived unknowns."""
        summed: Tensor = torch.tensordot(weights.total(self.total), values, ([0], [values.ndim - self.rank]))
        return summed

    def pulled_back(self, slopes: Tensor, shape: Sequence[int], weights: Weights) -> Tensor:
        """Return the derivative by values of a shape, given that by the derived unknowns."""
        by = weights.total(self.total).reshape(-1, *[1] * (len(shape) - 1))
        return by * slopes.unsqueeze(slopes.ndim - len(shape) + 1)

    def names(self, program: Program) -> set[str]:
        """Return the names of the tensors that are needed."""
        return names_of_total(program, self.total)


class ByFunction(NamedTuple):
    """The change of a function of weights, where some of these change.

    Attributes:
        node: The function.
        given: The names and shapes of the weights that change.
    """

    node: Made
    given: tuple[tuple[str, tuple[int, ...]], ...]

    def _moved(self, values: Tensor, weights: Weights) -> Tensor:
        """Return the function after additions to its weights, side by side in `values`."""
        parts = torch.split(values, [math.prod(shape) for _, shape in self.given])
        moved = {name: weights.tensor(name) + own.reshape(shape)
                 for (name, shape), own in zip(self.given, parts, strict=True)}  # fmt: skip
        rest = {name: weights.tensor(name) for name in self.node.names() - moved.keys()}
        made: Tensor = _Moved(weights.program, {**rest, **moved}).node(self.node)
        return made

    def __call__(self, values: Tensor, weights: Weights) -> Tensor:
        """Return derived unknowns."""
        before = weights.node(self.node)
        return torch.stack([self._moved(own, weights) - before for own in values])

    def rates(self, values: Tensor, weights: Weights) -> Tensor:
        """Return the derivative of derived unknowns along values."""
        zero, made = torch.zeros(values.shape[1], dtype=torch.float64), []
        for own in values:
            made.append(torch.func.jvp(lambda t: self._moved(t, weights), (zero,), (own,))[1])
        return torch.stack(made)

    def pulled_back(self, slopes: Tensor, shape: Sequence[int], weights: Weights) -> Tensor:
        """Return the derivative by values of a shape, given that by the derived unknowns."""
        zero = torch.zeros(tuple(shape), dtype=torch.float64)
        back = torch.func.vjp(lambda t: self._moved(t, weights), zero)[1]
        return torch.stack([back(own)[0] for own in slopes])

    def names(self, program: Program) -> set[str]:
        """Return the names of the tensors that are needed."""
        return self.node.names()


class _Moved(Weights):
    """Weights of which some carry derivatives."""

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer."""
        return self.tensors[name]
