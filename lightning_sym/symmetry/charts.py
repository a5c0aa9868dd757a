"""Coordinates for the group action: 1 + w or exp(w), the layers inside a flat parameter, and stacks of equal modules.

See docs/theory/intertwiners.md, 2.2.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_sym._distributed import wide
from lightning_sym.symmetry.views import ConvertedTensors


class Positive(NamedTuple):
    """A function onto the positive numbers, which a network applies to a parameter on every read."""

    function: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]  # the derivative, by its value


POSITIVE: Mapping[str, Positive] = {
    "exp": Positive(torch.exp, torch.log, lambda u: u),
    "softplus": Positive(nn.functional.softplus, lambda u: u + torch.log(-torch.expm1(-u)), lambda u: -torch.expm1(-u)),
}


@dataclass(frozen=True)
class Onto:
    """A function of :data:`POSITIVE` of ``factor * (w + number)``."""

    name: str
    factor: float = 1.0
    number: float = 0.0


class Identity(NamedTuple):
    """A multiple of the identity, which a network adds to a matrix, or to the centre of a kernel with further axes."""

    number: float
    axes: int = 0

    def like(self, tensor: Tensor) -> Tensor:
        """Return it with the shape of a tensor (a kernel of single channels has one column)."""
        result = torch.zeros_like(tensor)
        centre = result[(..., *(size // 2 for size in tensor.shape[tensor.ndim - self.axes :]))]  # type: ignore[index]
        (centre.diagonal(0, -2, -1) if centre.shape[-1] > 1 else centre).fill_(self.number)
        return result


# A number that is added, one for each element of a vector, a multiple of the identity, or a function onto the positive
# numbers.
Chart = float | tuple[float, ...] | Identity | Onto


class Piece(NamedTuple):
    """A part of a parameter that a network reads as a tensor.

    Attributes:
        name: Its name: ``flat[40:48]``, or ``heads[:, 8:16]`` for columns.
        start: Its first element, in row-major order, or its first column.
        shape: The shape that the network reads.
        rows: The number of rows, if it consists of columns of the parameter, seen as a matrix.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    rows: int = 1

    @property
    def stop(self) -> int:
        """The position after its last element, or its last column."""
        return self.start + math.prod(self.shape) // self.rows


class Charts(NamedTuple):
    """Coordinates of a network's tensors for the action of the group.

    Attributes:
        added: For each tensor, the number that the network adds on every read; or one number for each element of a
            vector, a multiple of the identity, or the function onto the positive numbers that it applies.
        pieces: For each parameter that is read piece by piece, all its pieces. The group acts on each piece.
        stacks: For each stack, the tensors of modules that elements exchange. The group acts on the stack.
    """

    added: Mapping[str, Chart] = {}
    pieces: Mapping[str, tuple[Piece, ...]] = {}
    stacks: Mapping[str, tuple[str, ...]] = {}

    @property
    def owners(self) -> dict[str, str]:
        """A mapping from the name of each piece to the name of its parameter."""
        return {piece.name: name for name, pieces in self.pieces.items() for piece in pieces}

    @property
    def only_moving(self) -> "Charts":
        """The pieces and stacks, without functions of the weights."""
        return self._replace(added={})

    def held_in(self, name: str) -> tuple[str, ...]:
        """Return the network's tensors that hold a tensor on which the group acts."""
        return self.stacks.get(name) or (self.owners.get(name, name),)

    def parts_of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the pieces of a tensor with a parameter's shape, with their names, as views if it is contiguous.

        A parameter that is not read in pieces yields the tensor itself.
        """
        if name not in self.pieces:
            yield name, tensor
            return
        matrix = tensor.reshape(self.pieces[name][0].rows, -1)
        for piece in self.pieces[name]:
            yield piece.name, matrix[:, piece.start : piece.stop].view(piece.shape)

    def slope(self, name: str, value: Tensor) -> Tensor | None:
        """Return the derivative of a tensor by the network's, given its value; None if it is 1."""
        added = self.added.get(name)
        return added.factor * POSITIVE[added.name].slope(value) if isinstance(added, Onto) else None

    def names_of(self, name: str) -> Sequence[str]:
        """Return the names of a tensor's pieces, or of the stack that it is in; otherwise its own name."""
        if name in self.pieces:
            return [piece.name for piece in self.pieces[name]]
        return [next((stack for stack, members in self.stacks.items() if name in members), name)]


class _Charted(ConvertedTensors):
    def __init__(self, tensors: Mapping[str, Tensor], charts: Charts) -> None:
        super().__init__(tensors, torch.detach, [])
        self._charts, self._owners = charts, charts.owners
        self._names = dict.fromkeys(own for name in tensors for own in charts.names_of(name))
        for name, members in charts.stacks.items():
            lacking = [own for own in members if own not in tensors]
            if name in self._names and lacking:
                raise ValueError(
                    f"elements exchange {', '.join(members)}, and {', '.join(lacking)} is not given; expected all of "
                    "these tensors."
                )

    def _made(self, name: str) -> Tensor:
        members, owner = self._charts.stacks.get(name), self._owners.get(name, name)
        if members:
            tensor = torch.stack([self._tensors[own].detach() for own in members])
        elif owner != name:
            tensor = dict(self._charts.parts_of(owner, self._tensors[owner].detach()))[name]
        else:
            tensor = self._tensors[owner]
        added = self._charts.added.get(name)
        return tensor if added is None else _in_chart(tensor.detach().to(wide(tensor.device)), added)


def charted(tensors: Mapping[str, Tensor], charts: Charts) -> Mapping[str, Tensor]:
    """Convert a network's tensors to the coordinates of the group.

    Args:
        tensors: The network's tensors by name. Not changed.
        charts: The added numbers and the pieces.

    Returns:
        `tensors` itself if no chart applies; otherwise a mapping that computes pieces and stacks, and sums in double
        precision, on access.

    Raises:
        ValueError: If some members of a stack are missing.
    """
    applies = any(name in tensors for own in (charts.added, charts.pieces, *charts.stacks.values()) for name in own)
    return _Charted(tensors, charts) if applies else tensors


def uncharted(
    named: Iterable[tuple[str, Tensor]], charts: Charts, like: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Convert tensors from the coordinates of the group back to those of the network.

    Args:
        named: Names and tensors in the coordinates of the group; all pieces of a parameter in a row.
        charts: The added numbers and the pieces.
        like: The network's current tensors, for the dtypes and for pieces that are not given.

    Yields:
        Names and tensors of the network.
    """
    owners, current, cut = charts.owners, "", set[str]()
    parts: dict[str, Tensor] = {}
    for name, tensor in named:
        (owner, *_), added = charts.stacks.get(name) or (owners.get(name, name),), charts.added.get(name)
        held = tensor if added is None else _in_chart(tensor, added, -1).to(like[owner].dtype)
        if parts and owner != current:
            yield current, _joined(charts, current, parts, like)
            parts = {}
        if name in charts.stacks:
            for own, member in zip(charts.stacks[name], held, strict=True):
                yield own, member.clone()  # memory of its own
            continue
        if owner == name:
            yield name, held
            continue
        assert owner == current or owner not in cut, f"the pieces of {owner} are not in a row"
        current, parts[name] = owner, held
        cut.add(owner)
    if parts:
        yield current, _joined(charts, current, parts, like)


def _joined(charts: Charts, owner: str, parts: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return a parameter with some of its pieces replaced."""
    whole = like[owner].detach().clone(memory_format=torch.contiguous_format)
    for name, part in charts.parts_of(owner, whole):
        if name in parts:
            part.copy_(parts[name])
    return whole


def _in_chart(tensor: Tensor, added: Chart, sign: int = 1) -> Tensor:
    if isinstance(added, Onto):
        if sign > 0:
            return POSITIVE[added.name].function(added.factor * (tensor + added.number))
        return POSITIVE[added.name].inverse(tensor) / added.factor - added.number
    if isinstance(added, Identity):
        return tensor + sign * added.like(tensor)
    if isinstance(added, tuple):
        return tensor + sign * torch.tensor(added, dtype=tensor.dtype, device=tensor.device).view(tensor.shape)
    return tensor + sign * added
