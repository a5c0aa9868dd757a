"""Notes on weights that are freer than the group: unread or multiplied by zeros only, and kernels of linear layers."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints, rising_pairs
from lightning_sym.symmetry.described import listed
from lightning_sym.symmetry.solving.refinement import Orbits
from lightning_sym.symmetry.solving.structure import VALUE, Slot, Structure
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.labelling.constraints import Constraints


def unread_units(
    structure: Structure,
    positions: Positions,
    orbits: Orbits,
    constraints: Constraints,
    tensors: Mapping[str, Tensor],
) -> dict[str, Ints]:
    """Report units with a scale that nothing undoes: all of their weights are free, but the group only scales them.

    Units that are divided by their own norm or deviation also have such a scale, but are not reported.

    Args:
        structure: The group on parameters and buffers.
        positions: The positions of units in tensors.
        orbits: The units that may be permuted.
        constraints: The constraints of operations.
        tensors: Parameters and buffers by name; only their shapes are used.

    Returns:
        Notes, each with its positions.
    """
    forms = structure.magnitudes.tocoo()
    slots = [slot for slot in structure.slots if slot.size]
    if not slots:
        return {}
    shares = [np.full(slot.size, tensors[slot.tensor].numel() // slot.size) for slot in slots]
    several = np.concatenate(shares) > 1  # a single number that is scaled is free already
    several |= np.diff(structure.magnitudes.indptr)[: len(several)] == 0
    notes = {
        note: np.flatnonzero(several & positions.marked(atoms)[positions.standing[: len(several)]])
        for atoms, note in constraints.unread
    }
    if not forms.nnz:
        return notes
    rows, generators = forms.row, forms.col
    of_slot = np.repeat(np.arange(len(slots)), [slot.size for slot in slots])[rows]
    everywhere = np.concatenate([slot.unit.ravel() for slot in slots])
    unit = everywhere[rows]
    value = np.array([(slot.kind, slot.epsilon) == VALUE for slot in slots])[of_slot]
    # Units after their own norm are fixed or are read without the scale.
    normed = (positions.marked(*constraints.normed) | positions.fixed)[orbits.roots]
    stands = np.bincount(everywhere[everywhere >= 0], minlength=len(normed))
    count = forms.shape[1]
    lone = np.bincount(generators[~value | (unit < 0)], minlength=count) == 0
    least, most = np.full(count, len(orbits.roots)), np.full(count, -1)
    np.minimum.at(least, generators, unit)
    np.maximum.at(most, generators, unit)
    lone &= (least == most) & (most >= 0) & (most < len(normed))
    lone[lone] &= ~normed[most[lone]] & (stands[most[lone]] == np.bincount(generators, minlength=count)[lone])
    pairs = rising_pairs(unit[unit >= 0], generators[unit >= 0])
    lone[lone] &= np.bincount(pairs[0], minlength=len(normed))[most[lone]] == 1
    for sign in (1, -1):  # incoming and outgoing weights have exponents of opposite sign
        lone &= (np.bincount(generators[forms.data * sign > 0], minlength=count) == 0) | (
            np.bincount(generators[forms.data * sign < 0], minlength=count) == 0
        )
    entries = np.array([tensors[slot.tensor].numel() // max(slot.size, 1) for slot in slots])[of_slot]
    lone &= np.bincount(generators, entries, minlength=count) > 1
    for index in np.unique(of_slot[lone[generators]]):
        slot, here = slots[index], lone[generators] & (of_slot == index)
        notes[
            f"{slot.tensor}{list(slot.axes)}: {len(np.unique(unit[here]))} of {slot.size} places are multiplied by "
            "zeros only, or nothing reads them: all their weights are free, and the group only scales them"
        ] = np.unique(rows[here])
    return notes


def wide_matrices(structure: Structure, tensors: Mapping[str, Tensor]) -> list[str]:
    """Report GL(d) blocks with more units than incoming or outgoing numbers.

    With k units, m incoming and n outgoing numbers, the matrices miss (m - k) (k - n) directions. If the product is
    negative, that many dimensions of the matrices change nothing.

    Args:
        structure: The group on parameters and buffers. Biases that its translations move are no incoming numbers.
        tensors: Parameters and buffers by name; only their shapes are used.
    """
    if not (structure.dense or structure.gained):
        return []
    firsts = {int(cell[0]): number for number, cell in enumerate(structure.dense)}
    forms, number = structure.magnitudes, np.full(structure.units + 1, -1)  # the last is for positions without a unit
    number[[*firsts]] = [*firsts.values()]
    met: list[list[tuple[Slot, int, int]]] = [[] for _ in structure.dense]
    for slot in structure.slots:
        of_cell = number[slot.unit.ravel()]
        for place in np.flatnonzero(of_cell >= 0):
            exponents = forms.data[slice(*forms.indptr[slot.offset + place :][:2])]
            if len(exponents):
                met[of_cell[place]].append((slot, int(exponents[0] < 0), tensors[slot.tensor].numel() // slot.size))
    between: list[list[tuple[Slot, int, int]]] = [[] for _ in structure.gained]
    for slot in structure.slots:
        for held in structure.gained_places.get(slot.offset, ()):
            norms = (gain.norm for gain in structure.gained[held.cell].gains)
            if slot.tensor not in {norm.mean[0] for norm in norms if norm is not None}:
                between[held.cell].append((slot, int(held.read), tensors[slot.tensor].numel() // slot.size))
    cells = (*structure.dense, *(own.units for own in structure.gained))
    notes: dict[str, None] = {}
    for cell, seen in zip(cells, met + between, strict=True):
        if min(sum(count for _, at, count in seen if at == side and count > 1) for side in (0, 1)) >= len(cell):
            continue  # true except in small networks; only these need a look at the biases
        seen = [(slot, at, n) for slot, at, n in seen if n > 1 or slot.tensor not in structure.shifts.names]
        least, most = sorted(sum(count for _, at, count in seen if at == side) for side in (0, 1))
        if 0 < least < len(cell) != most:
            places = dict.fromkeys(f"{slot.tensor}{list(slot.axes)}" for slot, _, _ in seen)
            notes[
                f"{listed([*places])}: {len(cell)} units have only {least} incoming or outgoing numbers, so that "
                "further free directions depend on the weights"
            ] = None
    return [*notes]
