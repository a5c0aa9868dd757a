"""Scales and signs: which stay free, how they act at every position, and which of them belong to each unit."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lightning_sym.symmetry.arrays import rising
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.constraints import Constraints, Label
from lightning_sym.symmetry.tracing.equations import idle_together, solve
from lightning_sym.symmetry.tracing.numbering import Ints, flat

_ROUNDING = 1e-9  # of exponents


class Forms(NamedTuple):
    """Free scales and signs, as exponents of generators: of shape (variables or positions, generators).

    Attributes:
        magnitudes: The exponents of scales.
        signs: Those of signs, modulo 2.
    """

    magnitudes: sparse.csr_matrix
    signs: sparse.csr_matrix

    def counts(self, rows: int) -> tuple[Ints, Ints]:
        """Return how many scales, and how many signs, act at each of the first rows."""
        magnitudes, signs = (np.diff(forms.indptr[: rows + 1]).astype(np.int64) for forms in self)
        return magnitudes, signs


class Table(NamedTuple):
    """The generators of scales, or of signs, unit by unit.

    Attributes:
        forms: Exponents by position, of those generators that belong to a unit.
        of_units: For each orbit its units' generators, in one order for all units. Each of shape (units, generators).
        found_at: For each orbit, at which of its columns each of the generators was found.
        left_out: How many generators belong to no unit.
    """

    forms: sparse.csr_matrix
    of_units: tuple[Ints, ...]
    found_at: tuple[Ints, ...]
    left_out: int


def solve_scales(constraints: Constraints) -> Forms:
    """Solve the equations between scales, and between signs.

    Returns:
        The solutions by variable.
    """
    scales, signs = constraints.fixed_magnitudes, constraints.fixed_signs
    halves = [own.flip for own in constraints.half_periods.values()]  # these are found by themselves
    return Forms(
        solve(constraints.scales, constraints.magnitude_equations, flat(scales)),
        solve(constraints.scales, constraints.sign_equations, flat([*signs, *halves]), modulo_two=True),
    )


def needlessly_fixed(constraints: Constraints, axis_labels: Mapping[str, Sequence[Label]]) -> list[str]:
    """Return the notes of what alone fixes scales of parameters, see :meth:`Constraints.explain`.

    Args:
        constraints: All demands.
        axis_labels: By parameter or buffer, its labels.
    """
    own = {index for first, last, _ in constraints.explained for index in range(first, last)}
    if not own:
        return []
    others = [zeros for index, zeros in enumerate(constraints.fixed_magnitudes) if index not in own]
    free = solve(constraints.scales, constraints.magnitude_equations, flat(others))
    standing = flat([label.scale for labels in axis_labels.values() for label in labels])
    shown = np.bincount(free[standing].indices, minlength=free.shape[1]) > 0
    notes: dict[str, None] = {}
    for first, last, note in constraints.explained:
        if shown[free[flat(constraints.fixed_magnitudes[first:last])].indices].any():
            notes[note] = None
    return [*notes]


def variables_at(positions: Positions) -> Ints:
    """Return the variable that scales each position: of parameters, of grouped weights, and of named values."""
    labels = [place.label for place in positions.places]
    labels = [
        *labels[: positions.parameters],
        *positions.grouped.values(),
        *(labels[index] for index in positions.named),
    ]
    return flat([label.scale for label in labels])


def scales_at(positions: Positions, forms: Forms) -> Forms:
    """Return how scales and signs act at positions: of parameters, of grouped weights, and of named values.

    Args:
        positions: Where units are seen.
        forms: Solutions by variable.
    """
    variable = variables_at(positions).astype(np.int32)
    return Forms(
        _acting(forms.magnitudes[variable].tocsr(), positions),
        _acting(forms.signs[variable].tocsr(), positions, modulo_two=True),
    )


def _acting(forms: sparse.csr_matrix, positions: Positions, *, modulo_two: bool = False) -> sparse.csr_matrix:
    """Drop generators which undo along some axes of parameters what they, or others, do along others.

    Of several that do so together one is dropped if it acts on all units of a place alike; else all stay.
    """
    places, offset = positions.places[: positions.parameters], positions.offset
    end = positions.own + sum(label.size for label in positions.grouped.values())
    slots = [
        (place.tensor, place.label.axes, place.label.atom.shape, int(begin))
        for place, begin in zip(places, offset, strict=False)
    ]
    columns, idle = idle_together(forms[:end].tocsr(), slots, positions.grouped.keys(), modulo_two=modulo_two)
    if not len(idle):
        return forms
    common = np.zeros(forms.shape[1], bool)
    for index, begin in enumerate(offset[: len(places)]):
        counts = np.bincount(forms[int(begin) : int(offset[index + 1])].indices, minlength=forms.shape[1])
        common |= counts == max(places[index].label.size, 1)
    times = np.bincount(forms.indices, minlength=forms.shape[1])[columns]
    dropped = []
    for row in range(len(idle)):
        able = [column for column in np.flatnonzero(idle[row]) if common[columns[column]]]
        if np.count_nonzero(idle[row]) == 1:
            able = [*np.flatnonzero(idle[row])]
        if not able:
            continue
        pivot = max(able, key=lambda column: times[column])
        dropped.append(columns[pivot])
        idle -= np.outer(np.where(np.arange(len(idle)) > row, idle[:, pivot] / idle[row, pivot], 0), idle[row])
        idle = idle % 2 if modulo_two else np.where(np.abs(idle) <= _ROUNDING, 0, idle)
    return forms[:, np.setdiff1d(np.arange(forms.shape[1]), dropped)]


def tabulate(columns: Sequence[Ints], forms: sparse.csr_matrix, rows: int, *, modulo_two: bool) -> Table:
    """Find which generators belong to each unit.

    A generator belongs to a unit if, at some place of the unit, it is the only one that is not known from other places.
    Where others that are known act with it, what all of them do there is taken in its place as a generator. Those that
    only ever act together are left out, since nothing says how permutations carry them along.

    Args:
        columns: For each orbit (units, columns): the positions at which each unit stands.
        forms: All generators by position.
        rows: How many of the first positions are those of parameters: generators that touch none are dropped.
        modulo_two: Whether they are signs.
    """
    forms, left_out = _used(forms, rows), 0
    while True:
        tables, found = zip(*(_table(matrix, forms) for matrix in columns), strict=True) if columns else ((), ())
        known = np.zeros(forms.shape[1], bool)
        for table in tables:
            known[table] = True
        if known.all():
            return Table(forms, tables, found, left_out)
        # Signs inside rotations have to stay as they are: they are among the matrices.
        if not modulo_two and (parted := _parted(columns, forms, known)) is not None:
            parted.eliminate_zeros()
            forms = parted
            continue
        left_out += int((~known).sum())
        forms = forms[:, np.flatnonzero(known)].tocsr()
        forms.sort_indices()


def _parted(columns: Sequence[Ints], forms: sparse.csr_matrix, known: NDArray[np.bool_]) -> sparse.csr_matrix | None:
    """Exchange generators for others, each of which acts alone at one place of its units.

    At these places one generator that is not known acts to the power 1 or -1, with others that are known. That all of
    them act to the power 1 there is the new generator; the known ones stay, and so does what they generate.

    Args:
        columns: See `tabulate`.
        forms: All generators by position.
        known: For each generator whether it is known.

    Returns:
        The same by the new generators; None if there is no such place.
    """
    for column in (column for matrix in columns for column in matrix.T):
        acting = forms[column].tocoo()
        new = ~known[acting.col]
        if not np.array_equal(acting.row[new], np.arange(len(column))) or (np.abs(acting.data[new]) != 1).any():
            continue
        replaced, first, which = np.unique(acting.col[new], return_index=True, return_inverse=True)
        rows = forms[column]
        if abs(rows - rows[first[which]]).nnz:  # of two units it is not the same that is done
            continue
        # x_new = sum_k c_k x_k + c x_old, solved for x_old
        signs = sparse.diags(acting.data[new][first])
        held = sparse.csr_matrix(
            (np.ones(len(replaced)), (replaced, np.arange(len(replaced)))), (len(known), len(first))
        )
        change = sparse.identity(len(known), format="csr") + held @ (signs @ (held.T - rows[first]))
        result = (forms @ change).tocsr()
        result.sort_indices()
        return result
    return None


def _used(forms: sparse.csr_matrix, rows: int) -> sparse.csr_matrix:
    """Drop generators that touch no parameter: none of the first rows."""
    forms = forms.tocsr()
    used = rising(forms.indices[: forms.indptr[rows]])
    result = forms if len(used) == forms.shape[1] else forms[:, used].tocsr()
    result.sort_indices()
    return result


def _table(matrix: Ints, forms: sparse.csr_matrix) -> tuple[Ints, Ints]:
    """Return the generators of each unit of an orbit, and the columns that show them; see `tabulate`."""
    units = np.arange(len(matrix))
    count = np.diff(forms.indptr)[matrix]
    alone = np.flatnonzero((count == 1).all(0) & bool(len(units)))
    first = forms.indices[forms.indptr[matrix[:1, alone].ravel()]]
    found = alone[np.sort(np.unique(first, return_index=True)[1])].tolist()
    chosen = [forms.indices[forms.indptr[matrix[:, at]]].astype(np.int64) for at in found]
    later = np.flatnonzero(count.min(0, initial=2) > 1) if count.size else alone
    acting = forms[matrix[:, later].T.ravel()]
    ends = acting.indptr[:: max(len(units), 1)].tolist()
    unit = np.repeat(np.tile(units, len(later)), np.diff(acting.indptr))
    pairs, pair = np.unique(unit * forms.shape[1] + acting.indices, return_inverse=True)
    held = [units * forms.shape[1] + generators for generators in chosen]
    taken = np.isin(pairs, np.concatenate([np.zeros(0, np.int64), *held]))
    left, grew = list(range(len(later))), True
    while grew:
        grew, further = False, []
        for column in left:
            here = slice(ends[column], ends[column + 1])
            new = ~taken[pair[here]]
            if np.array_equal(unit[here][new], units):  # one more for each unit
                chosen.append(acting.indices[here][new].astype(np.int64))
                found.append(int(later[column]))
                taken[pair[here]] = grew = True
            elif new.any():
                further.append(column)
        left = further
    table = np.stack(chosen, 1) if chosen else np.zeros((len(matrix), 0), np.int64)
    return table, np.array(found, np.int64)
