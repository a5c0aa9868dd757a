"""Blocks of units that are permuted, such as attention heads."""

import itertools
from typing import NamedTuple

import numpy as np

from lightning_sym.symmetry.arrays import Bools, Ints
from lightning_sym.symmetry.numbering import Hashes, components, mix
from lightning_sym.symmetry.solving.nesting import Nesting, roles
from lightning_sym.symmetry.solving.replicas import Folded


class Blocks(NamedTuple):
    """Systems of blocks.

    Attributes:
        members: The units of each block, for each system. Each of shape (blocks, members).
        parents: The parents of each block, for each system, numbered after the units. Each of shape (blocks, parents).
        number_of: Index of each root as a unit or parent, or -1.
    """

    members: tuple[Ints, ...]
    parents: tuple[Ints, ...]
    number_of: Ints

    def without(self, units: Ints) -> "Blocks":
        """Drop the systems of blocks that begin with one of some units."""
        kept = [not np.isin(table[:, 0], units).any() for table in self.members]
        members, parents = (tuple(itertools.compress(part, kept)) for part in (self.members, self.parents))
        return Blocks(members, parents, self.number_of)


def find_blocks(nesting: Nesting, colour: Hashes, fixed: Bools, unit_of: Ints, folded: Folded | None) -> Blocks:
    """Find blocks that may be permuted, and number their parents after the units.

    Members of slots that are not units are numbered first, directly after the units.

    Args:
        nesting: Parents and members.
        colour: Hash of the places of each root.
        fixed: Mask of the roots that stay in place.
        unit_of: The unit of each root, or -1.
        folded: Copies folded into positions of units.
    """
    number_of = unit_of.copy()
    if not nesting.pairs.size:
        return Blocks((), (), number_of)
    slot_of = np.full(len(unit_of), -1)
    found, carried = [], []
    if folded is not None and folded.atoms:
        new = folded.all_atoms[unit_of[folded.all_atoms] < 0]
        number_of[new] = unit_of.max() + 1 + np.arange(len(new))
        for index, atoms in enumerate(folded.atoms):
            slot_of[atoms] = index
        found = [number_of[np.stack([folded.atoms[slot] for slot in system])] for system in folded.systems]
        carried = [np.zeros((len(system), 0), np.int64) for system in folded.systems]
    for members in _alike(nesting, colour, fixed, slot_of, folded):
        table = np.where(slot_of[members] >= 0, number_of[members], unit_of[members])
        units = (table >= 0).all(0)
        if units.any():
            found.append(table[:, units])
            others = members[:, (table < 0).all(0)]
            carried.append(number_of.max() + 1 + np.arange(others.size).reshape(others.shape))
            number_of[others] = carried[-1]
    return Blocks(tuple(found), tuple(carried), number_of)


def _alike(nesting: Nesting, colour: Hashes, fixed: Bools, slot_of: Ints, folded: Folded | None) -> list[Ints]:
    """Return the roots of isomorphic blocks, each of shape (blocks, members).

    Args:
        nesting: Parents and members.
        colour: Hash of the places of each root.
        fixed: Mask of the roots that stay in place.
        slot_of: The slot that contains each root, or -1.
        folded: Copies folded into positions of units.
    """
    role, (parent, member) = roles(nesting, colour)
    # Parents that share members form one block, together with all their members.
    component = components(len(colour), [(parent, member)])
    blocks: dict[int, list[int]] = {}
    for index in np.unique(np.r_[parent, member]):
        blocks.setdefault(int(component[index]), []).append(int(index))
    parents = set(parent.tolist())
    found: dict[int, list[Ints]] = {}
    for together in blocks.values():
        array: Ints = np.array(together)
        own = [index for index in together if index in parents and slot_of[index] < 0]
        if fixed[array].any() or len({int(colour[index]) for index in own}) < len(own):
            continue
        slots = np.unique(slot_of[array[slot_of[array] >= 0]])
        parts = [folded.atoms[slot] for slot in slots] if folded is not None else []
        array = array[slot_of[array] < 0]
        array = array[np.lexsort((array, role[array]))]
        with np.errstate(over="ignore"):
            key = int(mix(role[array]).sum())
            for rank, part in enumerate(parts):
                key ^= int(mix(mix(role[part]) + np.uint64(rank)).sum())
        found.setdefault(key, []).append(np.concatenate([array, *parts]))
    return [np.stack(group) for group in found.values() if len(group) > 1]
