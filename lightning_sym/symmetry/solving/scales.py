"""Scales and signs: independent generators, their exponents at every position, and their units."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import sparse

from lightning_sym.symmetry.arrays import Bools, Ints, rising
from lightning_sym.symmetry.equations import idle_together, solve
from lightning_sym.symmetry.numbering import flat
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.labelling.constraints import Constraints, Label

_ROUNDING = 1e-9  # of exponents
_FEW = 8  # generators of a unit that are compared


class Forms(NamedTuple):
    """Independent scales and signs, as exponents of generators: of shape (variables or positions, generators).

    Attributes:
        magnitudes: Exponents of scales.
        signs: Exponents of signs, modulo 2.
    """

    magnitudes: sparse.csr_matrix
    signs: sparse.csr_matrix

    def counts(self, rows: int) -> tuple[Ints, Ints]:
        """Return the number of scales, and of signs, that act at each of the first rows."""
        magnitudes, signs = (np.diff(forms.indptr[: rows + 1]).astype(np.int64) for forms in self)
        return magnitudes, signs


class Table(NamedTuple):
    """The generators of scales, or of signs, by unit.

    Attributes:
        forms: Exponents of the generators by position.
        of_units: The generators of each orbit's units, in a common order. Each of shape (units, generators).
        found_at: The column of each orbit that shows each of these generators.
        left_out: Number of omitted generators that belong to no unit.
    """

    forms: sparse.csr_matrix
    of_units: tuple[Ints, ...]
    found_at: tuple[Ints, ...]
    left_out: int


def solve_scales(constraints: Constraints) -> Forms:
    """Solve the equations between scales, and between signs.

    Biases before sines and cosines that have no signs otherwise may have signs that each add half a period:
    sin(pi - x) = sin(x). These half periods are then marked so.

    Returns:
        The solutions by variable.
    """
    scales, halves, common = constraints.fixed_magnitudes, constraints.half_periods, constraints.common
    magnitudes = solve(constraints.scales, constraints.magnitude_equations, flat(scales), common=common)

    def signs() -> sparse.csr_matrix:
        tied = [(np.stack([own.standing, own.flip], 1), np.ones(2)) for own in halves.values() if own.reflects]
        zeros = [own.flip for own in halves.values() if not own.reflects]  # half turns are solved separately
        equations = [*constraints.sign_equations, *tied]
        fixed = flat([*constraints.fixed_signs, *zeros])
        return solve(constraints.scales, equations, fixed, modulo_two=True, common=common)

    found = signs()
    for name, own in halves.items():
        if math.isfinite(own.size) and not found[own.standing].nnz:
            halves[name] = replace(own, reflects=True)
    if any(own.reflects for own in halves.values()):
        found = signs()
        halves |= {name: replace(own, reflects=bool(found[own.flip].nnz)) for name, own in halves.items()}
    return Forms(magnitudes, found)


def needlessly_fixed(constraints: Constraints, axis_labels: Mapping[str, Sequence[Label]]) -> list[str]:
    """Return notes on single causes that fix scales of parameters, see :meth:`Constraints.explain`.

    Args:
        constraints: The constraints of operations.
        axis_labels: The labels of each parameter or buffer.
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
    """Return the scale variable of each position: of parameters, of grouped weights, and of named values."""
    labels = [place.label for place in positions.places]
    labels = [
        *labels[: positions.parameters],
        *positions.grouped.values(),
        *(labels[index] for index in positions.named),
    ]
    return flat([label.scale for label in labels])


def scales_at(positions: Positions, forms: Forms) -> Forms:
    """Return the exponents of scales and signs by position: of parameters, of grouped weights, and of named values.

    Args:
        positions: The positions of units.
        forms: Solutions by variable.
    """
    variable = variables_at(positions).astype(np.int32)
    return Forms(
        _acting(forms.magnitudes[variable].tocsr(), positions),
        _acting(forms.signs[variable].tocsr(), positions, modulo_two=True),
    )


def _acting(forms: sparse.csr_matrix, positions: Positions, *, modulo_two: bool = False) -> sparse.csr_matrix:
    """Drop generators with actions that cancel along several axes of parameters, alone or together with others.

    If several cancel together, one that acts equally on all units of a place is dropped, or else the one that acts at
    most positions (a scale that the units of one head share); if several act at as many, all are kept.
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
            among = np.flatnonzero(idle[row])
            able = [*among[times[among] == times[among].max()]]
            if len(able) > 1:
                continue
        pivot = max(able, key=lambda column: times[column])
        dropped.append(columns[pivot])
        idle -= np.outer(np.where(np.arange(len(idle)) > row, idle[:, pivot] / idle[row, pivot], 0), idle[row])
        idle = idle % 2 if modulo_two else np.where(np.abs(idle) <= _ROUNDING, 0, idle)
    return forms[:, np.setdiff1d(np.arange(forms.shape[1]), dropped)]


def tabulate(columns: Sequence[Ints], forms: sparse.csr_matrix, rows: int, *, modulo_two: bool) -> Table:
    """Assign generators to units.

    A generator belongs to a unit if it is the only unassigned one at some place of the unit. If assigned generators act
    at that place as well, the product of all of them replaces it as a generator. Generators that never act alone are
    omitted, as the action of permutations on them is undetermined.

    Args:
        columns: The positions of each orbit's units. Each of shape (units, columns).
        forms: Exponents of all generators by position.
        rows: Number of the first positions that belong to parameters: generators that act on none are dropped.
        modulo_two: Whether they are signs.
    """
    forms, left_out = _used(forms, rows), 0
    while True:
        tables, found = zip(*(_table(matrix, forms) for matrix in columns), strict=True) if columns else ((), ())
        known = np.zeros(forms.shape[1], bool)
        for table in tables:
            known[table] = True
        if known.all():
            if not modulo_two:
                forms = _alike(columns, _parted_from_others(forms, tables), tables, found)
            return Table(forms, tables, found, left_out)
        # Signs inside rotations stay unchanged: they are among the matrices.
        if not modulo_two and (parted := _parted(columns, forms, known)) is not None:
            parted.eliminate_zeros()
            forms = parted
            continue
        left_out += int((~known).sum())
        forms = forms[:, np.flatnonzero(known)].tocsr()
        forms.sort_indices()


def _alike(
    columns: Sequence[Ints], forms: sparse.csr_matrix, tables: Sequence[Ints], found: Sequence[Ints]
) -> sparse.csr_matrix:
    """Give the generators of an orbit's units equal exponents at corresponding positions, as permutations require."""
    change = np.ones(forms.shape[1])
    for matrix, table, places in zip(columns, tables, found, strict=True):
        if table.size:
            own = np.asarray(forms[matrix[:, places].ravel(), table.ravel()]).reshape(table.shape)
            change[table] = own[:1] / own
    return forms if (change == 1).all() else (forms @ sparse.diags(change)).tocsr()


def _parted_from_others(forms: sparse.csr_matrix, tables: Sequence[Ints]) -> sparse.csr_matrix:
    """Multiply generators by powers of others of the same unit if they then act at fewer positions, all of them old.

    A scale that only multiplies weights then divides no others, so that a gauge can normalise these weights.
    """
    several = [table for table in tables if 1 < table.shape[1] <= _FEW]
    if not several:
        return forms
    by_generator = forms.tocsc()
    changes: list[tuple[Ints, Ints, float]] = []
    for table in several:
        first = by_generator[:, table[0]]
        acting = [
            dict(zip(first.indices[begin:end].tolist(), first.data[begin:end].tolist(), strict=True))
            for begin, end in itertools.pairwise(first.indptr)
        ]
        changed: set[int] = set()
        for one, two in itertools.permutations(range(len(acting)), 2):
            ratios = {acting[one].get(place, 0.0) / power for place, power in acting[two].items()}
            if len(ratios) != 1 or 0.0 in ratios or len(acting[two]) == len(acting[one]) or {one, two} & changed:
                continue
            changes.append((table[:, two], table[:, one], -ratios.pop()))
            changed.add(one)
    if not changes:
        return forms
    rows, to = (np.concatenate([own[at] for own in changes]) for at in (0, 1))
    powers = np.concatenate([np.full(len(one), power) for one, _, power in changes])
    result = forms @ (sparse.identity(forms.shape[1]) + sparse.csr_matrix((powers, (rows, to)), [forms.shape[1]] * 2))
    result.data[np.abs(result.data) < _ROUNDING] = 0
    result.eliminate_zeros()
    result.sort_indices()
    return result


def _parted(columns: Sequence[Ints], forms: sparse.csr_matrix, known: Bools) -> sparse.csr_matrix | None:
    """Replace generators by others that act alone at one place of their units.

    At these places one unassigned generator has exponent 1 or -1, together with assigned ones. The product of all of
    them becomes the new generator. Assigned generators stay, and the group that all generate stays the same.

    Args:
        columns: See `tabulate`.
        forms: Exponents of all generators by position.
        known: Mask of assigned generators.

    Returns:
        Exponents of the new generators; None if there is no such place.
    """
    for column in (column for matrix in columns for column in matrix.T):
        acting = forms[column].tocoo()
        new = ~known[acting.col]
        if not np.array_equal(acting.row[new], np.arange(len(column))) or (np.abs(acting.data[new]) != 1).any():
            continue
        replaced, first, which = np.unique(acting.col[new], return_index=True, return_inverse=True)
        rows = forms[column]
        if abs(rows - rows[first[which]]).nnz:  # the products at two units differ
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
    """Drop generators that act on no parameter: on none of the first rows."""
    forms = forms.tocsr()
    used = rising(forms.indices[: forms.indptr[rows]])
    result = forms if len(used) == forms.shape[1] else forms[:, used].tocsr()
    result.sort_indices()
    return result


def _table(matrix: Ints, forms: sparse.csr_matrix) -> tuple[Ints, Ints]:
    """Return the generators of each unit of an orbit, and the columns that show them; see `tabulate`."""
    units = np.arange(len(matrix))
    count = forms.indptr[matrix + 1] - forms.indptr[matrix]
    alone = np.flatnonzero((count == 1).all(0) & bool(len(units)))
    first = forms.indices[forms.indptr[matrix[:1, alone].ravel()]]
    found = alone[np.sort(np.unique(first, return_index=True)[1])].tolist()
    chosen = [forms.indices[forms.indptr[matrix[:, at]]].astype(np.int64) for at in found]
    later = np.flatnonzero(count.min(0, initial=2) > 1) if count.size else alone[:0]
    if not len(later) and chosen:
        return np.stack(chosen, 1), np.array(found, np.int64)
    acting = forms[matrix[:, later].T.ravel()]
    ends = acting.indptr[:: max(len(units), 1)].tolist()
    unit = np.repeat(np.tile(units, len(later)), np.diff(acting.indptr))
    pairs, pair = np.unique(unit * forms.shape[1] + acting.indices, return_inverse=True)
    held = flat([units * forms.shape[1] + generators for generators in chosen])
    taken, place = np.zeros(len(pairs) + 1, bool), np.searchsorted(pairs, held)
    taken[place[np.append(pairs, -1)[place] == held]] = True
    left, grew = list(range(len(later))), True
    while grew:
        grew, further = False, []
        for column in left:
            here = slice(ends[column], ends[column + 1])
            new = ~taken[pair[here]]
            if np.array_equal(unit[here][new], units):  # one new generator for each unit
                chosen.append(acting.indices[here][new].astype(np.int64))
                found.append(int(later[column]))
                taken[pair[here]] = grew = True
            elif new.any():
                further.append(column)
        left = further
    table = np.stack(chosen, 1) if chosen else np.zeros((len(matrix), 0), np.int64)
    return table, np.array(found, np.int64)
