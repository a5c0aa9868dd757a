"""Scales and signs: which stay free, how they act at every position, and which of them belong to each unit."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lightning_sym.symmetry.arrays import rising
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.constraints import Constraints, Label
from lightning_sym.symmetry.tracing.equations import solve
from lightning_sym.symmetry.tracing.numbering import Ints, flat

_TRIES = 8  # places of a tensor that are looked at first


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
    variable = variables_at(positions)
    return Forms(
        _acting(forms.magnitudes[variable].tocsr(), positions),
        _acting(forms.signs[variable].tocsr(), positions, modulo_two=True),
    )


def _acting(forms: sparse.csr_matrix, positions: Positions, *, modulo_two: bool = False) -> sparse.csr_matrix:
    """Drop generators that act on one parameter only, and there undo along some axes what they do along others."""
    places, offset = positions.places[: positions.parameters], positions.offset
    by_tensor: dict[str | None, list[int]] = {}
    for index, place in enumerate(places):
        by_tensor.setdefault(place.tensor, []).append(index)
    times, idle = np.bincount(forms.indices, minlength=forms.shape[1]), []
    for name, slots in by_tensor.items():
        if len(slots) < 2 or name in positions.grouped:
            continue
        own = [forms[offset[index] : offset[index + 1]] for index in slots]
        here = rising(np.concatenate([each.indices for each in own]))
        found = np.stack([np.bincount(np.searchsorted(here, each.indices), minlength=len(here)) for each in own])
        inside = here[(found.sum(0) == times[here]) & ((found > 0).sum(0) > 1)]
        labels = [places[index].label for index in slots]
        columns = [each[:, inside].tocsc() for each in own] if len(inside) else []
        for number, generator in enumerate(inside):
            exponents = [each[:, number].toarray().ravel() for each in columns]
            if _cancels(exponents, labels, modulo_two=modulo_two):
                idle.append(generator)
    return forms[:, np.setdiff1d(np.arange(forms.shape[1]), idle)] if idle else forms


def _cancels(exponents: Sequence[NDArray[np.float64]], labels: Sequence[Label], *, modulo_two: bool) -> bool:
    """Whether exponents along the axes of one tensor add up to nothing everywhere.

    Args:
        exponents: For each label, by position.
        labels: Each along some axes of the tensor.
        modulo_two: Whether they are signs.
    """
    rank = 1 + max((axis for label in labels for axis in label.axes), default=0)
    parts = []
    for exponent, label in zip(exponents, labels, strict=True):
        sizes = dict(zip(label.axes, label.atom.shape, strict=True))
        parts.append(exponent.reshape([sizes.get(axis, 1) for axis in range(rank)]))
    shape = np.broadcast_shapes(*(part.shape for part in parts))
    # Where one of them acts, the others are looked at in a few places first: most do not undo it.
    acting = next(part for part in parts if part.any())
    lines = np.random.default_rng(0).integers(0, shape, (_TRIES, rank))
    lines = np.where(np.array(acting.shape) > 1, np.argwhere(acting)[0], lines)
    seen = np.sum([part[tuple(np.where(np.array(part.shape) > 1, lines, 0).T)] for part in parts], 0)
    if (seen % 2 if modulo_two else seen).any():
        return False
    total = np.asarray(sum(parts))
    return not (total % 2 if modulo_two else total).any()


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
    result = forms[:, used].tocsr()
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
