"""Cells of units that orthogonal matrices may mix, as the network reads only their norm (residual streams).

See docs/theory/transformers.md, 3.
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from lightning_sym.symmetry.arrays import Bools, Floats, Ints


@dataclass(frozen=True, eq=False)
class Rotation:
    r"""A cell of units on which an orthogonal matrix Q may act.

    At places after gains :math:`\gamma_l`, :math:`D Q D^{-1}` acts, with
    :math:`D = \prod_l \operatorname{diag}(\gamma_l)^{k_l}`. The gains themselves are unchanged.

    Attributes:
        units: The units, in order. Shape (size,).
        orbit: The index of their orbit.
        fixes_ones: Whether Q must fix the vector of ones, as the network also reads the mean of the units.
        gains: Pairs of a gain parameter's name and the element for each unit, shape (size,).
        powers: Exponents k of the gains for each of a unit's scale generators. Shape (generators, gains).
        plain_sign: Whether each of a unit's sign generators flips it before all gains. Shape (generators,), bool.
    """

    units: Ints
    orbit: int
    fixes_ones: bool
    gains: tuple[tuple[str, Ints], ...]
    powers: Ints
    plain_sign: Bools

    @property
    def size(self) -> int:
        """The number of units."""
        return len(self.units)

    @property
    def dimension(self) -> int:
        """The dimension of the group of these matrices."""
        free = self.size - self.fixes_ones
        return free * (free - 1) // 2


def exponents(forms: sparse.csr_matrix, columns: Ints, table: Ints) -> Ints | None:
    """Return the exponents of a unit's generators at each of its places; None if units differ.

    Args:
        forms: Exponents, shape (positions, generators).
        columns: The positions of the units. Shape (units, columns).
        table: The units' generators. Shape (units, generators).

    Returns:
        Shape (columns, generators); None if units differ, or an exponent is not an integer.
    """
    units, width = columns.shape
    number_of = np.full(forms.shape[1], -1)
    number_of[table] = np.arange(table.shape[1])
    rows = forms[columns.ravel()]
    unit, column = np.divmod(np.repeat(np.arange(units * width), np.diff(rows.indptr)), width)
    generator = number_of[rows.indices]
    if (generator < 0).any() or (table[unit, generator] != rows.indices).any():
        return None
    found = np.zeros((width, table.shape[1]))
    found[column[unit == 0], generator[unit == 0]] = rows.data[unit == 0]
    counts = np.count_nonzero(found, axis=1)
    alike = (found[column, generator] == rows.data).all() and (
        np.diff(rows.indptr).reshape(units, width) == counts
    ).all()
    whole = np.rint(found).astype(np.int64)
    return whole if alike and np.array_equal(whole, found) else None


def own_exponents(forms: sparse.csr_matrix, columns: Ints) -> Floats | None:
    """Return the exponent of each unit's own generator at each of its places; None if there is none.

    Args:
        forms: Exponents, shape (positions, generators).
        columns: The positions of the units. Shape (units, columns), with at least two units.

    Returns:
        Shape (columns,); None unless each unit has exactly one own generator, and all others act on all units or none.
    """
    units, width = columns.shape
    if not width:
        return np.zeros(0)
    start = forms.indptr[columns]
    if (forms.indptr[columns + 1] == start + 1).all():  # no other generator acts
        exponents = forms.data[start]
        return exponents[0] if (exponents * exponents[:, :1] == exponents[0] * exponents[0, 0]).all() else None
    rows = forms[columns.ravel()]
    place = np.repeat(np.arange(units * width), np.diff(rows.indptr))
    unit, column = np.divmod(place, width)
    kinds, generator = np.unique(rows.indices, return_inverse=True)
    table = np.zeros((len(kinds), units), bool)
    table[generator, unit] = True
    own = table.sum(1) == 1
    common = ~own[generator]
    alike = np.unique(np.stack([column[common], generator[common], rows.data[common]]), axis=1, return_counts=True)[1]
    if (alike != units).any() or own.sum() != units or (table[own].sum(0) != 1).any():
        return None
    if (np.bincount(place[~common], minlength=units * width) != 1).any():
        return None
    exponents = np.zeros((units, width))
    exponents[unit[~common], column[~common]] = rows.data[~common]
    return exponents[0] if (exponents * exponents[:, :1] == exponents[0] * exponents[0, 0]).all() else None
