"""Blocks of units that change places as wholes."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.group.assignment import Chosen, MatchingGroup, Tables, best_assignment
from lightning_sym.symmetry.tracing.structure import Structure


@dataclass
class Blocks:
    """Blocks that change places as wholes.

    Attributes:
        kinds: For each kind of member (units of one cell of a group in each block): the group, and the members' places
            in it. Each of shape (blocks, members).
        count: The number of blocks.
        slots: The members that stand for copies of units. Shape (blocks, slots).
    """

    kinds: list[tuple[MatchingGroup, Ints]]
    count: int
    slots: Ints

    @property
    def groups(self) -> dict[int, MatchingGroup]:
        """The groups by their numbers."""
        return {group.index: group for group, _ in self.kinds}


def block_systems(structure: Structure, groups: list[MatchingGroup]) -> list[Blocks]:
    """Return the systems of blocks of a group."""
    orbit_and_cell = np.full((structure.units, 2), -1)
    for group in groups:
        orbit_and_cell[group.units, 0] = group.index
        orbit_and_cell[group.units, 1] = structure.cells[group.index]
    systems = []
    for table in structure.blocks:
        slots = table[:, orbit_and_cell[table[0], 0] < 0]
        if slots.shape == table.shape:  # blocks of copies inside of blocks
            continue
        keys = [tuple(pair) for pair in orbit_and_cell[table[0]].tolist()]
        kinds = []
        for key in dict.fromkeys(key for key in keys if key[0] >= 0):
            group = groups[key[0]]
            members = table[:, [other == key for other in keys]]
            kinds.append((group, np.searchsorted(group.units, members)))
        systems.append(Blocks(kinds, len(table), slots))
    return systems


def best_blocks(
    system: Blocks, tables: Mapping[int, Tables], raw: Mapping[tuple[int, str], Tensor], *, mixing: bool = True
) -> tuple[Ints, dict[int, Chosen]]:
    """Return which block comes to which place, and for each group which of its units come to the places.

    The gain of a block at a place is that of the best assignment of its members; members that are mixed count with what
    the best mixing gives, or as they are without `mixing`.

    Args:
        system: The blocks.
        tables: By the group's number, the gains of units that are assigned.
        raw: By the group's number and the mixer's name, what this says of pairs; see :meth:`Factor.pair_gains`.
        mixing: Whether members may be mixed.
    """
    count = system.count
    total = np.zeros((count, count))
    for group, places in system.kinds:
        for mixer in group.mixers:
            total += mixer.gains_of_blocks(raw[group.index, mixer.name], places, mixing)
        for new, old in itertools.product(range(count), repeat=2) if group.alone else ():
            total[new, old] += tables[group.index].best(places[new], places[old])[0]
    order = best_assignment(total)
    chosen: dict[int, Chosen] = {}
    for group, places in system.kinds:
        own = chosen.setdefault(group.index, Chosen(np.arange(len(group.units)), {}))
        for new, old in enumerate(order):
            if group.alone:
                tables[group.index].put(own, places[new], places[old])
            else:
                own.source[places[new]] = places[old]
    return order, chosen
