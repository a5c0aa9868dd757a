"""How a group acts on the channels of one value: what may change places, be scaled, change sign or be mixed."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.intertwiners import IntertwinerGroup
from lightning_sym.symmetry.tracing.structure import Slot, Structure

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Inside = Literal["fixed", "permuted", "orthogonal", "invertible"]


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    r"""The group that acts on the channels of one value inside a network.

    Each channel belongs to a block. A permutation moves whole blocks to places of the same kind; the kind also decides
    the matrices that act inside a block. A unit of a convolution is a block of one channel; after flattening, one of as
    many as the image has pixels; an attention head is a block that any invertible matrix mixes.

    Attributes:
        blocks: For each block its channels, in an order that is the same for all blocks of a kind. Each of shape
            (members, channels per member), int64; every channel is in one of them.
        kinds: For each block the number of its kind. Shape (blocks,), int64.
        inside: For each kind what is done to the members of a block: nothing, permutations, or any orthogonal or
            invertible matrix.
        scales: For each channel the number of its positive scale; channels of one number have it in common, and those
            of -1 have none. Shape (channels,), int64.
        signs: The same for signs.
        axes: The axes of the value on which the channels stand, batch included; several are read in row-major order.
        shifted: Whether something constant may be added to a channel, so that only centred values can be compared.
        name: Words for tables.
        fixes_ones: Whether the orthogonal matrices leave the vector of ones alone.
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
        """Return the group itself, which nobody changes: copies of a metric share it."""
        return self

    @property
    def channels(self) -> int:
        """The number of channels."""
        return len(self.scales)

    @classmethod
    def of_activation(cls, group: IntertwinerGroup, channels: int, axis: int = 1) -> Self:
        r"""Return how :math:`\varphi(A)`, for A of an intertwiner group, acts on what an activation puts out.

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

    Blocks that can only change places together with others of another kind (a head's queries and keys in one tensor)
    are given kinds of their own, and where rotations act between gains, or tilts on a stream, any invertible matrix
    does: the group returned is then larger than the network's, never smaller.

    Args:
        values: The group on values inside the network.
        slot: The axes on which the channels stand.
        shifted: As for :class:`ChannelGroup`.
        name: Likewise.
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
        # Blocks themselves, such as the heads of attention weights, come last and have no cells.
        cells = values.cells[index][np.isin(orbit, seen)] if index < len(values.cells) else np.zeros(len(seen), int)
        grouped = [np.array(seen)[cells == cell] for cell in dict.fromkeys(cells.tolist())]
        movable = values.movable[index]
        turned = values.rotation_of[seen[0]] >= 0
        between = values.gained_of[seen[0]] >= 0
        if values.phase_of[seen[0]] >= 0:
            # A plane that is turned and scaled: of a group that is not smaller.
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
    """Return for each row its number among the different rows that are not zero; -1 for those that are.

    Args:
        exponents: Of all generators, in rows.
        free: Rows that count as zero.
    """
    exponents = sparse.diags((~free).astype(float)) @ exponents
    exponents.eliminate_zeros()
    entries = list(zip(exponents.indices.tolist(), exponents.data.tolist(), strict=True))
    rows = [tuple(entries[start:end]) for start, end in itertools.pairwise(exponents.indptr.tolist())]
    numbers = {row: number for number, row in enumerate(dict.fromkeys(row for row in rows if row))}
    return torch.tensor([numbers.get(row, -1) for row in rows])
