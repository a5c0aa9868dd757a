"""Tensors as the group acts on them: 1 + w where a network reads that, and the layers that are cut from one parameter.

See docs/theory/intertwiners.md, 2.2.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sym._distributed import wide
from lightning_sym.symmetry.views import ConvertedTensors


class Piece(NamedTuple):
    """A part of a parameter that a network reads as a tensor.

    Attributes:
        name: What it is called: ``flat[40:48]``.
        start: Its first element, in row-major order.
        shape: The shape in which it is read.
    """

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The element behind its last one."""
        return self.start + math.prod(self.shape)


class Charts(NamedTuple):
    """How the group sees a network's tensors.

    Attributes:
        added: By tensor, the number that the network adds to it wherever it reads it; or one for each element of a
            vector.
        pieces: By parameter that is read piece by piece, all its pieces. The group acts on each.
    """

    added: Mapping[str, float | tuple[float, ...]] = {}
    pieces: Mapping[str, tuple[Piece, ...]] = {}

    @property
    def owners(self) -> dict[str, str]:
        """By the name of each piece, that of the parameter."""
        return {piece.name: name for name, pieces in self.pieces.items() for piece in pieces}

    def parts_of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the pieces of a tensor of a parameter's shape, with their names, as views if it is contiguous.

        Only itself, if the parameter is read as it is.
        """
        if name not in self.pieces:
            yield name, tensor
            return
        line = tensor.reshape(-1)
        for piece in self.pieces[name]:
            yield piece.name, line[piece.start : piece.stop].view(piece.shape)

    def names_of(self, name: str) -> Sequence[str]:
        """Return what a tensor is called as the group acts on it: the names of its pieces."""
        return [piece.name for piece in self.pieces[name]] if name in self.pieces else [name]


class _Charted(ConvertedTensors):
    def __init__(self, tensors: Mapping[str, Tensor], charts: Charts) -> None:
        super().__init__(tensors, torch.detach, [])
        self._charts, self._owners = charts, charts.owners
        self._names = dict.fromkeys(own for name in tensors for own in charts.names_of(name))

    def _made(self, name: str) -> Tensor:
        owner = self._owners.get(name, name)
        tensor = self._tensors[owner]
        if owner != name:
            tensor = dict(self._charts.parts_of(owner, tensor.detach()))[name]
        added = self._charts.added.get(name)
        return tensor if added is None else _sum(tensor.detach().to(wide(tensor.device)), added)


def charted(tensors: Mapping[str, Tensor], charts: Charts) -> Mapping[str, Tensor]:
    """Return a network's tensors as the group acts on them.

    Args:
        tensors: As the network holds them, by name. Not changed.
        charts: What is added to which, and which are read in pieces.

    Returns:
        The same, where the network reads all of them as they are; else a mapping that makes pieces, and sums in double
        precision, when asked.
    """
    return _Charted(tensors, charts) if any(name in tensors for own in charts for name in own) else tensors


def uncharted(
    named: Iterable[tuple[str, Tensor]], charts: Charts, like: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as a network holds them, from what they are as the group acts on them.

    Args:
        named: Names and tensors.
        charts: What is added to which, and which are read in pieces.
        like: The tensors as the network holds them before, for their dtypes, and pieces that are not given.
    """
    owners = charts.owners
    made: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        owner, added = owners.get(name, name), charts.added.get(name)
        held = tensor if added is None else _sum(tensor, added, -1).to(like[owner].dtype)
        if owner == name:
            yield name, held
        else:
            made.setdefault(owner, {})[name] = held
    for owner, parts in made.items():
        whole = like[owner].detach().clone(memory_format=torch.contiguous_format)
        for name, part in charts.parts_of(owner, whole):
            if name in parts:
                part.copy_(parts[name])
        yield owner, whole


def _sum(tensor: Tensor, added: float | tuple[float, ...], sign: int = 1) -> Tensor:
    numbers = torch.tensor(added, dtype=tensor.dtype, device=tensor.device) if isinstance(added, tuple) else added
    return tensor + sign * numbers
