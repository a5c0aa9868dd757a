"""Colour refinement: roots at the same places form an orbit; those of them with the same parents form a cell."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from lightning_sym.symmetry.arrays import Ints, rising
from lightning_sym.symmetry.numbering import Hashes, flat, marked, mix, sum_by
from lightning_sym.symmetry.solving.nesting import Nesting
from lightning_sym.symmetry.solving.scales import Forms
from lightning_sym.symmetry.solving.units import Positions, tagged


class Orbits(NamedTuple):
    """Units that may be permuted, or that belong together where permutations are not allowed.

    Attributes:
        roots: The root of each unit.
        unit_of: The unit of each root, or -1.
        units: The units of each orbit.
        cells: Index of each unit's cell, for each orbit: units of one cell are permuted freely.
        movable: Whether each orbit's units may be permuted at all.
        columns: The positions of each orbit's units. Each of shape (units, columns).
    """

    roots: Ints
    unit_of: Ints
    units: list[Ints]
    cells: list[Ints]
    movable: list[bool]
    columns: list[Ints]


def colours(positions: Positions, forms: Forms) -> Hashes:
    """Return a hash of the places of each root; whether it is fixed is included for naming only.

    Args:
        positions: The positions of units.
        forms: Scales and signs by position.
    """
    where, tag, own = positions.where, positions.tag, positions.own
    magnitudes, signs = forms.counts(own)
    place = mix(np.arange(len(positions.places)))  # there are many positions at each

    def keys(part: slice) -> Hashes:
        key = tagged(place[where[part]], tag[part])
        acting = slice(part.start, max(min(part.stop, own), part.start))  # the number of scales there is included
        key[: acting.stop - acting.start] ^= mix(magnitudes[acting] * 64 + signs[acting])
        return mix(key)

    return mix(sum_by(positions.atom, keys, len(positions.root)) ^ positions.fixed.astype(np.uint64))


def refine(positions: Positions, forms: Forms, colour: Hashes, nesting: Nesting) -> Orbits:
    """Partition roots by their places and parents; movable or scalable roots in parameters become units.

    Args:
        positions: The positions of units.
        forms: Scales and signs by position.
        colour: Hash of the places of each root.
        nesting: Parents and members of blocks.
    """
    number, own, standing = len(positions.root), positions.own, positions.standing
    magnitudes, signs = forms.counts(own)
    carries = marked(number, standing[(magnitudes > 0) | (signs > 0)])
    roots = np.flatnonzero(marked(number, standing) & (~positions.fixed | carries))
    unit_of = np.full(number, -1)
    unit_of[roots] = np.arange(len(roots))
    cell_key = cell_keys(colour, nesting.pairs, nesting.pairs[0])
    units = [np.asarray(group) for group in sorted_groups(colour[roots])]
    columns = columns_of(units, unit_of[standing], positions, slice(own))
    movable = [not positions.fixed[roots[group[0]]] for group in units]
    cells = [
        np.unique(cell_key[roots[group]], return_inverse=True)[1] if moves else np.arange(len(group))
        for group, moves in zip(units, movable, strict=True)
    ]
    return _together(Orbits(roots, unit_of, units, cells, movable, columns), positions, forms)


def cell_keys(colour: Hashes, pairs: Ints, parents: Ints) -> Hashes:
    """Return a hash of the cell of each root: its places and its parents.

    Args:
        colour: Hash of the places of each root.
        pairs: Parents and members. Shape (2, pairs).
        parents: The roots that are parents (heads). They move with their members only; each is a separate cell.
    """
    parent, member = pairs
    key = mix(colour ^ sum_by(member, mix(parent.astype(np.uint64)), len(colour)))
    key[parents] = mix(parents)
    return key


def sorted_groups(keys: Ints | Hashes) -> list[Ints]:
    """Return the indices of equal keys, as one array per key, in the order of first appearance."""
    if not len(keys):
        return []
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    groups = np.split(order, starts[1:])
    return sorted(groups, key=lambda group: int(group[0]))


def columns_of(
    units: Sequence[Ints], unit: Ints, positions: Positions, at: slice | Ints, colour: Hashes | None = None
) -> list[Ints]:
    """Return the positions of each orbit's units, in a common order for all its units.

    Args:
        units: The units of each orbit.
        unit: The unit at each of some positions.
        positions: The positions of units.
        at: The selected positions.
        colour: Hash of the places of each unit, needed if orbits were joined: tags fix the order only among units of
            one colour.

    Returns:
        Indices among the selected positions, each of shape (units, columns).
    """
    order = np.lexsort((positions.copy[at], positions.tag[at], positions.where[at], unit))
    ordered, columns = unit[order], []
    for own in units:
        starts, ends = (np.searchsorted(ordered, own, side=side) for side in ("left", "right"))
        matrix = order[starts[:, None] + np.arange((ends - starts).min())]
        everything: list[Any] = [slice(None)]
        known = colour is not None and own.max(initial=0) < len(colour)
        for alike in sorted_groups(colour[own]) if colour is not None and known else everything:
            matrix[alike] = matrix[alike][:, np.argsort(matrix[alike][0])]  # the order of tags is arbitrary
        columns.append(matrix)
    return columns


def _together(orbits: Orbits, positions: Positions, forms: Forms) -> Orbits:
    """Join orbits without permutations inside cells, if their units have the same places and scales.

    The coordinates of a head, which rotary positions distinguish, thus form one axis group instead of many.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    firsts = [matrix[0] for matrix in orbits.columns]
    acting, end = [own[flat(firsts)] for own in forms], 0
    for index, (own, moves, first) in enumerate(zip(orbits.cells, orbits.movable, firsts, strict=True)):
        key: tuple[Any, ...] = (index,)
        begin, end = end, end + len(first)
        if len(rising(own)) == len(own):
            patterns = (_pattern(rows, begin, end) for rows in acting)
            key = (moves, positions.where[first].tobytes(), positions.copy[first].tobytes(), *patterns)
        kinds.setdefault(key, []).append(index)
    joined = orbits._replace(units=[], cells=[], movable=[], columns=[])
    for members in kinds.values():
        units = np.concatenate([orbits.units[index] for index in members])
        order = np.argsort(units, kind="stable")
        joined.units.append(units[order])
        joined.cells.append(orbits.cells[members[0]] if len(members) == 1 else np.arange(len(units)))
        joined.movable.append(orbits.movable[members[0]])
        joined.columns.append(np.concatenate([orbits.columns[index] for index in members])[order])
    return joined


def _pattern(forms: sparse.csr_matrix, begin: int, end: int) -> tuple[bytes, ...]:
    """Hash some successive rows of exponents, up to the names of the generators."""
    starts = forms.indptr[begin : end + 1]
    generators = forms.indices[starts[0] : starts[-1]].tolist()
    names = {generator: number for number, generator in enumerate(dict.fromkeys(generators))}
    renamed = np.array([names[generator] for generator in generators], np.int64)
    return (starts - starts[0]).tobytes(), renamed.tobytes(), forms.data[starts[0] : starts[-1]].tobytes()
