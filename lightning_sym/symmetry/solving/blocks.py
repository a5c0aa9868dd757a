"""Blocks of units that are permuted, such as attention heads."""

import itertools
from typing import NamedTuple

import numpy as np

from lightning_sym.symmetry.arrays import Bools, Ints, rising
from lightning_sym.symmetry.numbering import Hashes, components, marked, mix
from lightning_sym.symmetry.solving.nesting import Nesting, roles
from lightning_sym.symmetry.solving.replicas import Folded
from lightning_sym.symmetry.solving.units import Positions


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


def find_blocks(nesting: Nesting, colour: Hashes, positions: Positions, unit_of: Ints, folded: Folded | None) -> Blocks:
    """Find blocks that may be permuted, and number their parents after the units.

    Members of slots that are not units are numbered first, directly after the units.

    Args:
        nesting: Parents and members.
        colour: Hash of the places of each root.
        positions: The positions of units.
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
    fixed = positions.fixed | marked(len(colour), nesting.shared)
    for members in _Search(nesting, _by_column(colour, positions, unit_of), fixed, slot_of, folded).systems:
        table = np.where(slot_of[members] >= 0, number_of[members], unit_of[members])
        units = (table >= 0).all(0)
        if units.any():
            found.append(table[:, units])
            others = members[:, (number_of[members] < 0).all(0)]  # blocks inside these carry their own parents
            carried.append(number_of.max() + 1 + np.arange(others.size).reshape(others.shape))
            number_of[others] = carried[-1]
    return Blocks(tuple(found), tuple(carried), number_of)


def _by_column(colour: Hashes, positions: Positions, unit_of: Ints) -> Hashes:
    """Distinguish roots that are no units by their columns in grouped convolutions, whose order stays."""
    for label in positions.grouped.values():
        root, column = positions.root[label.atom], np.zeros(len(colour), np.int64)
        column[root] = np.where(unit_of[root] < 0, np.arange(root.shape[1]) + 1, 0)
        colour = mix(colour ^ column.astype(np.uint64))
    return colour


class _Search:
    """Search for isomorphic blocks.

    Args:
        nesting: Parents and members.
        colour: Hash of the places of each root.
        fixed: Mask of the roots that stay in place.
        slot_of: The slot that contains each root, or -1.
        folded: Copies folded into positions of units.

    Attributes:
        systems: The roots of isomorphic blocks, each of shape (blocks, members). Blocks inside others come first.
    """

    def __init__(self, nesting: Nesting, colour: Hashes, fixed: Bools, slot_of: Ints, folded: Folded | None) -> None:
        self.colour, self.fixed, self.slot_of, self.folded = colour, fixed, slot_of, folded
        self.role, pairs = roles(nesting, colour)
        self.systems: list[Ints] = []
        self._within(pairs)

    def _within(self, pairs: Ints) -> list[tuple[int, Ints] | None]:
        """Find the blocks of some pairs of parents and members, and add the systems of isomorphic ones.

        Parents that share members form one block, together with all their members.

        Returns:
            For each block a key and its roots, in an order common to isomorphic ones; None if it stays in place.
        """
        roots = rising(pairs)
        parent, member = np.searchsorted(roots, pairs)
        component = components(len(roots), [(parent, member)])[parent]
        order = np.argsort(component, kind="stable")
        ends = np.flatnonzero(np.diff(component[order])) + 1
        blocks = [self._block(own) for own in np.split(pairs[:, order], ends, axis=1) if own.size]
        found: dict[int, list[Ints]] = {}
        for key, array in filter(None, blocks):
            found.setdefault(key, []).append(array)
        self.systems += [np.stack(group) for group in found.values() if len(group) > 1]
        return blocks

    def _block(self, pairs: Ints) -> tuple[int, Ints] | None:
        """Return a key and the roots of the block with some parents and members; see :meth:`_within`."""
        array, own = rising(pairs), rising(pairs[0][self.slot_of[pairs[0]] < 0])
        slots = rising(self.slot_of[array[self.slot_of[array] >= 0]])
        fixed = self.fixed[array].any()
        parts = [self.folded.atoms[slot] for slot in slots] if self.folded is not None else []
        array = array[self.slot_of[array] < 0]
        kinds, kind, count = np.unique(self.colour[own], return_inverse=True, return_counts=True)
        if len(kinds) < len(own):  # there may be blocks inside, as maxout units in the groups of a norm
            outer = np.setdiff1d(own[count[kind] == 1], pairs[1])
            inner = pairs[:, ~np.isin(pairs[0], outer)]
            inside = self._within(inner) if outer.size and not slots.size else [None]
            parts = [part for _, part in sorted(filter(None, inside), key=lambda each: each[0])]
            fixed |= len(parts) < len(inside)
            array = np.setdiff1d(array, inner)
        if fixed:
            return None
        array = array[np.lexsort((array, self.role[array]))]
        with np.errstate(over="ignore"):
            key = int(mix(self.role[array]).sum())
            for rank, part in enumerate(parts):
                key ^= int(mix(mix(self.role[part]) + np.uint64(rank)).sum())
        return key, np.concatenate([array, *parts])
