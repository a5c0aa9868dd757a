"""The group that acts on the channels of one value: permutations, scales, signs and matrices."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Ints
from lightning_sym.symmetry.intertwiners import IntertwinerGroup
from lightning_sym.symmetry.solving.structure import Slot, Structure

Inside = Literal["fixed", "permuted", "orthogonal", "invertible"]


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    r"""The group that acts on the channels of one value inside a network.

    Each channel belongs to a block. A permutation moves blocks within their kind; the kind also decides the matrices
    that act inside a block. A unit of a convolution is a block of one channel; after flattening, its block has one
    channel per pixel. An attention head is a block that GL(d) acts on.

    Attributes:
        blocks: The channels of each block, in an order that is the same for all blocks of a kind. Each of shape
            (members, channels per member), int64; every channel is in exactly one block.
        kinds: Index of each block's kind. Shape (blocks,), int64.
        inside: For each kind, the group on the members of a block: trivial, permutations, or all orthogonal or
            invertible matrices.
        scales: Index of each channel's positive scale; channels of one index share it, and -1 denotes none. Shape
            (channels,), int64.
        signs: The same for signs.
        axes: The axes of the value that index the channels, batch included; several are read in row-major order.
        shifted: Whether a constant may be added to a channel, so that only centred values can be compared.
        name: Name for tables.
        fixes_ones: Whether the orthogonal matrices fix the vector of ones.
    """

    blocks: tuple[Tensor, ...]
    kinds: Tensor
    inside: tuple[Inside, ...]
    scales: Tensor
    signs: Tensor
    axes: tuple[int, ...] = (1,)
    shifted: bool = False
    name: str = ""
    fixes_ones: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the group itself: it is immutable, and copies of a metric share it."""
        return self

    @property
    def channels(self) -> int:
        """The number of channels."""
        return len(self.scales)

    @classmethod
    def of_activation(cls, group: IntertwinerGroup, channels: int, axis: int = 1) -> Self:
        r"""Return the group of all :math:`\varphi(A)`, for A in an intertwiner group, on the output of an activation.

        Args:
            group: The group.
            channels: The number of channels, >= 1.
            axis: Their axis.
        """
        each, none = torch.arange(channels), torch.full((channels,), -1)
        blocks = (each[:, None],) if group.dense else tuple(each[:, None, None])
        moves = group.permutations and not group.dense
        each_inside: Inside = "invertible" if group.dense else "fixed"
        return cls(
            blocks=blocks,
            kinds=torch.zeros(len(blocks), dtype=torch.int64) if moves or group.dense else each,
            inside=(each_inside,) * (1 if moves or group.dense else channels),
            scales=each if group.positive_scales and group.exponent and not group.dense else none,
            signs=each if group.signs and not group.even and not group.dense else none,
            axes=(axis,),
            shifted=bool(group.offset),
            name=group.name,
        )

    @classmethod
    def orthogonal(cls, channels: int, axis: int = 1) -> Self:
        """Return the group of all orthogonal matrices.

        Args:
            channels: The number of channels, >= 1.
            axis: Their axis.
        """
        none = torch.full((channels,), -1)
        kinds = torch.zeros(1, dtype=torch.int64)
        return cls((torch.arange(channels)[:, None],), kinds, ("orthogonal",), none, none, (axis,), name="orthogonal")


def channel_group(values: Structure, slot: Slot, *, shifted: bool, name: str) -> ChannelGroup:
    """Return the group on the channels of a value.

    Where a value allows no exact description, the group returned is larger than the network's, never smaller. Blocks
    that are permuted only jointly with blocks of another kind (queries and keys in one tensor) count as independent.
    Rotations between gains, and rank-one maps on a stream, count as GL(d).

    Args:
        values: The group on values inside the network.
        slot: The axes that index the channels.
        shifted: See :class:`ChannelGroup`.
        name: See :class:`ChannelGroup`.
    """
    units = slot.unit.ravel()
    tilt = values.tilted_places.get(slot.offset)
    if tilt is not None and values.tilts[tilt[0]].of_stream:
        every, none = torch.arange(len(units))[:, None], torch.full((len(units),), -1)
        kinds_of_one = torch.zeros(1, dtype=torch.int64)
        return ChannelGroup((every,), kinds_of_one, ("invertible",), none, none, slot.axes, shifted, name)
    places = {int(unit): np.flatnonzero(units == unit) for unit in np.unique(units) if unit >= 0}
    blocks: list[Ints] = []
    kinds: list[int] = []
    inside: list[Inside] = []
    own, fixes_ones = np.zeros(len(units), bool), False

    def add(found: list[Ints], kind: Inside, *, movable: bool) -> None:
        if not found:
            return
        for first in (found,) if movable else ([block] for block in found):
            kinds.extend([len(inside)] * len(first))
            inside.append(kind)
        blocks.extend(found)

    for index, orbit in enumerate(values.orbits):
        seen = [unit for unit in orbit.tolist() if unit in places]
        if not seen:
            continue
        # Blocks that are orbits, such as the heads of attention weights, come last and have no cells.
        cells = values.cells[index][np.isin(orbit, seen)] if index < len(values.cells) else np.zeros(len(seen), int)
        grouped = [np.array(seen)[cells == cell] for cell in dict.fromkeys(cells.tolist())]
        movable = values.movable[index]
        turned = values.rotation_of[seen[0]] >= 0
        between = values.gained_of[seen[0]] >= 0
        if values.phase_of[seen[0]] >= 0:
            # A rotary pair with rotations and scales: GL(2) contains them.
            add([places[unit][:, None] for unit in seen], "invertible", movable=movable)
            continue
        if turned or between or values.cell_of[seen[0]] >= 0:
            mixed = [np.concatenate([places[unit] for unit in cell])[:, None] for cell in grouped]
            if turned or between:  # permutations and the units' own scales and signs are among the matrices
                own[np.concatenate(mixed).ravel()] = True
            if turned:
                fixes_ones |= values.rotations[values.rotation_of[seen[0]]].fixes_ones
            between_gains = any(any(powers) for *_, powers in values.rotated_places.get(slot.offset, ()))
            add(mixed, "orthogonal" if turned and not between_gains else "invertible", movable=movable)
        elif movable and len(grouped) > 1:
            add([np.stack([places[unit] for unit in cell]) for cell in grouped], "permuted", movable=True)
        else:
            add([places[unit][None] for unit in seen], "fixed", movable=movable)
    placed = np.concatenate([np.zeros(0, np.int64), *(block.ravel() for block in blocks)])
    add([np.array([[place]]) for place in np.setdiff1d(np.arange(len(units)), placed)], "fixed", movable=False)
    return ChannelGroup(
        blocks=tuple(torch.from_numpy(block) for block in blocks),
        kinds=torch.tensor(kinds),
        inside=tuple(inside),
        scales=_classes(values.magnitudes[slot.rows], own),
        signs=_classes(values.flips[slot.rows], own),
        axes=slot.axes,
        shifted=shifted or slot.offset in values.tilted_places,
        name=name,
        fixes_ones=fixes_ones,
    )


def _classes(exponents: sparse.csr_matrix, free: Bools) -> Tensor:
    """Number the distinct rows that are not zero; return each row's number, -1 for zero rows.

    Args:
        exponents: Exponents of all generators, in rows.
        free: Rows that count as zero.
    """
    exponents = sparse.diags((~free).astype(float)) @ exponents
    exponents.eliminate_zeros()
    entries = list(zip(exponents.indices.tolist(), exponents.data.tolist(), strict=True))
    rows = [tuple(entries[start:end]) for start, end in itertools.pairwise(exponents.indptr.tolist())]
    numbers = {row: number for number, row in enumerate(dict.fromkeys(row for row in rows if row))}
    return torch.tensor([numbers.get(row, -1) for row in rows])
