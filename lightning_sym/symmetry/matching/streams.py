"""Streams: the orthogonal matrix that brings one network's residual stream nearest to another's.

See docs/theory/matching.md, 1.6.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.elements import Tap
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.streams import NO_TURN


@dataclass(frozen=True, eq=False)
class StreamPlace:
    """Where a stream is seen: in front of all gains, or behind some.

    Attributes:
        index: The number of its rotation.
        tap: The value.
        axis: The value's axis.
        positions: Where each of the stream's units stands there. Shape (size,), int64.
        powers: Powers of the rotation's gains by which the units are multiplied there.
    """

    index: int
    tap: Tap
    axis: int
    positions: Tensor
    powers: tuple[int, ...]

    def gains(self, symmetry: Symmetry, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return by what the units are multiplied here, given a network's tensors. Shape (size,), float64."""
        rotation = symmetry.structure.rotations[self.index]
        total = torch.ones(rotation.size, dtype=torch.float64)
        for (name, at), power in zip(rotation.gains, self.powers, strict=True):
            total *= tensors[name].detach().double().cpu().reshape(-1)[torch.from_numpy(at)] ** power
        return total


def stream_places(symmetry: Symmetry) -> Iterator[StreamPlace]:
    """Yield the outputs of modules without children in which a whole stream is seen."""
    for group in symmetry.groups:
        for tap in group.taps if group.rotations and not group.dense else ():
            for slot in tap.seen if not tap.squared else ():
                for index, at, powers in symmetry._values.rotated_places.get(slot.offset, ()):
                    if len(slot.axes) == 1:
                        yield StreamPlace(index, tap, slot.axes[0], torch.from_numpy(at), powers)


def turn_of(symmetry: Symmetry, matrices: Mapping[int, Tensor]) -> Element:
    """Return the element that rotates some streams, given by their numbers, and does nothing else."""
    turns = [matrices.get(index, NO_TURN) for index in range(len(symmetry.structure.rotations))]
    return symmetry.identity().replaced(rotation=tuple(turns))
