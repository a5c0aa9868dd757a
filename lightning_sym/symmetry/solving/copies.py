"""Copies of units in repeated values, such as the keys of grouped queries.

During tracing, a copy is a separate unit with a link to its original. If copies belong to several blocks (the queries'
heads), whole blocks of copies can be permuted: each is a *slot*. Finally, the positions of copies become positions of
the original unit, distinguished by slots only. See docs/theory/transformers.md, 2.
"""

from dataclasses import dataclass

import numpy as np

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.numbering import Hashes


@dataclass(frozen=True)
class Sheets:
    """The columns of a table that belong to copies, and the corresponding columns of other copies.

    Attributes:
        copy: For each column the index of the copy, or -1. Shape (columns,).
        partner: For each column and copy, the column with the same role for that copy, or -1. Columns without a copy
            are their own partners. Shape (columns, copies).
    """

    copy: Ints
    partner: Ints

    @property
    def complete(self) -> bool:
        """Whether each column has a counterpart for every copy."""
        return bool((self.partner >= 0).all())


@dataclass(frozen=True)
class Copies:
    """The copies of an orbit's units.

    Attributes:
        slots: For each unit and each of its copies, the slot of the copy: a unit that represents a block of copies.
            Shape (units, copies).
        columns: The copies' columns of the orbit's table of positions.
        scales: The copies' columns of its table of scales.
        signs: The copies' columns of its table of signs.
    """

    slots: Ints
    columns: Sheets
    scales: Sheets
    signs: Sheets

    @property
    def count(self) -> int:
        """The number of copies of each unit."""
        return int(self.slots.shape[1])


def arriving(table: Ints, sheets: Sheets | None, place: Ints, rank: Ints) -> Ints:
    """Return the source of each entry of a table of units under a permutation.

    Args:
        table: A row per unit.
        sheets: The columns that belong to copies.
        place: For each unit, the row of its source.
        rank: For each unit and copy, the index of the source copy among those of the source unit.
    """
    if sheets is None or not (sheets.copy >= 0).any():
        return table[place]
    column = np.broadcast_to(np.arange(table.shape[1]), table.shape).copy()
    of_copies = np.flatnonzero(sheets.copy >= 0)
    column[:, of_copies] = sheets.partner[of_copies[None, :], rank[:, sheets.copy[of_copies]]]
    result: Ints = table[place[:, None], column]
    return result


def sheets(kind: Ints | Hashes, copy: Ints, copies: int) -> Sheets:
    """Return the columns of copies with their counterparts.

    Args:
        kind: The role of each column, equal for all copies. Shape (columns,).
        copy: The index of each column's copy, or -1. Shape (columns,).
        copies: The number of copies.
    """
    partner = np.full((len(kind), copies), -1)
    for column in range(len(kind)):
        if copy[column] < 0:
            partner[column] = column
        else:
            like = np.flatnonzero((kind == kind[column]) & (copy >= 0))
            partner[column, copy[like]] = like
    return Sheets(copy, partner)
