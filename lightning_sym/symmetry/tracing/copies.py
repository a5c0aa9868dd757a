"""Copies of units: a value that is repeated, such as the keys of grouped queries, whose copies may change places.

A copy is a unit of its own while the network is traced, which says of which unit it is a copy. Where it belongs to one
of several blocks (a query's head), whole blocks of copies may change places: each is a *slot*. In the end the positions
of copies are positions of the unit, and only slots tell them apart. See docs/theory/transformers.md, 2.
"""

from dataclasses import dataclass

import numpy as np

from lightning_sym.symmetry.tracing.numbering import Hashes, Ints


@dataclass(frozen=True)
class Sheets:
    """Which columns of a table belong to copies, and where the same column is for another copy.

    Attributes:
        copy: For each column the number of the copy, or -1. Shape (columns,).
        partner: For each column and copy, the column that says the same of that copy; -1 if none does, and the column
            itself if it belongs to no copy. Shape (columns, copies).
    """

    copy: Ints
    partner: Ints

    @property
    def complete(self) -> bool:
        """Whether each column has its like for all copies."""
        return bool((self.partner >= 0).all())


@dataclass(frozen=True)
class Copies:
    """The copies of an orbit's units.

    Attributes:
        slots: For each unit and each of its copies, the slot to which the copy belongs: a unit that stands for a block
            of copies. Shape (units, copies).
        columns: Which of the orbit's columns belong to copies.
        scales: The same of the columns of its table of scales.
        signs: The same of the columns of its table of signs.
    """

    slots: Ints
    columns: Sheets
    scales: Sheets
    signs: Sheets

    @property
    def count(self) -> int:
        """How many copies each unit has."""
        return int(self.slots.shape[1])


def arriving(table: Ints, sheets: Sheets | None, place: Ints, rank: Ints) -> Ints:
    """Return what a permutation brings to each entry of a table of units.

    Args:
        table: A row per unit.
        sheets: Which of its columns belong to copies.
        place: For each unit, the row of the one that comes in its place.
        rank: For each unit and copy, the number of the copy (among those of the unit that comes) that comes.
    """
    if sheets is None or not (sheets.copy >= 0).any():
        return table[place]
    column = np.broadcast_to(np.arange(table.shape[1]), table.shape).copy()
    of_copies = np.flatnonzero(sheets.copy >= 0)
    column[:, of_copies] = sheets.partner[of_copies[None, :], rank[:, sheets.copy[of_copies]]]
    result: Ints = table[place[:, None], column]
    return result


def sheets(kind: Ints | Hashes, copy: Ints, copies: int) -> Sheets:
    """Return which columns belong to copies, given what each says (equal for all copies), and of which copy."""
    partner = np.full((len(kind), copies), -1)
    for column in range(len(kind)):
        if copy[column] < 0:
            partner[column] = column
        else:
            like = np.flatnonzero((kind == kind[column]) & (copy >= 0))
            partner[column, copy[like]] = like
    return Sheets(copy, partner)
