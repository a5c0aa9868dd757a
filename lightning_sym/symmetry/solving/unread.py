"""Says which weights are freer than the group: what meets zeros only or is not read, and kernels of linear layers."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from lightning_sym.symmetry.described import listed
from lightning_sym.symmetry.solving.refinement import Orbits
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.constraints import Constraints
from lightning_sym.symmetry.tracing.structure import VALUE, Structure


def unread_units(
    structure: Structure, positions: Positions, orbits: Orbits, constraints: Constraints, tensors: Mapping[str, Tensor]
) -> list[str]:
    """Say where a unit's scale is undone nowhere: all of its weights are free, and the group only scales them.

    What is divided by its own norm or deviation has such a scale, too, and loses nothing.

    Args:
        structure: The group on parameters and buffers.
        positions: Where units are seen.
        orbits: Which of them may change places.
        constraints: What operations demand.
        tensors: Parameters and buffers by name; shapes count.
    """
    forms = structure.magnitudes.tocoo()
    slots = [slot for slot in structure.slots if slot.size]
    if not forms.nnz or not slots:
        return []
    rows, generators = forms.row, forms.col
    of_slot = np.repeat(np.arange(len(slots)), [slot.size for slot in slots])[rows]
    everywhere = np.concatenate([slot.unit.ravel() for slot in slots])
    unit = everywhere[rows]
    value = np.array([(slot.kind, slot.epsilon) == VALUE for slot in slots])[of_slot]
    # Behind their own norm units stay where they are, or are read without the scale.
    normed = (positions.marked(*constraints.normed) | positions.fixed)[orbits.roots]
    stands = np.bincount(everywhere[everywhere >= 0], minlength=len(normed))
    count = forms.shape[1]
    lone = np.bincount(generators[~value | (unit < 0)], minlength=count) == 0
    least, most = np.full(count, len(orbits.roots)), np.full(count, -1)
    np.minimum.at(least, generators, unit)
    np.maximum.at(most, generators, unit)
    lone &= (least == most) & (most >= 0) & (most < len(normed))
    lone[lone] &= ~normed[most[lone]] & (stands[most[lone]] == np.bincount(generators, minlength=count)[lone])
    pairs = np.unique(np.stack([unit[unit >= 0], generators[unit >= 0]]), axis=1)
    lone[lone] &= np.bincount(pairs[0], minlength=len(normed))[most[lone]] == 1
    for sign in (1, -1):  # of what stands in front of a unit and what reads it, the exponents differ in sign
        lone &= (np.bincount(generators[forms.data * sign > 0], minlength=count) == 0) | (
            np.bincount(generators[forms.data * sign < 0], minlength=count) == 0
        )
    entries = np.array([tensors[slot.tensor].numel() // max(slot.size, 1) for slot in slots])[of_slot]
    lone &= np.bincount(generators, entries, minlength=count) > 1
    notes = []
    for index in np.unique(of_slot[lone[generators]]):
        slot = slots[index]
        units = len(np.unique(unit[lone[generators] & (of_slot == index)]))
        notes.append(
            f"{slot.tensor}{list(slot.axes)}: {units} of {slot.size} places meet zeros only, or nothing reads them, so "
            "that all their weights are free; the group scales them"
        )
    return notes


def wide_matrices(structure: Structure, tensors: Mapping[str, Tensor]) -> list[str]:
    """Say which linear layers in a row are wider than what one of them passes on, so that it has a kernel.

    Of k units behind m numbers and in front of n, the matrices leave (m - k) (k - n) directions out.

    Args:
        structure: The group on parameters and buffers.
        tensors: Parameters and buffers by name; shapes count.
    """
    if not structure.dense:
        return []
    firsts = {int(cell[0]): number for number, cell in enumerate(structure.dense)}
    number = np.full(structure.units + 1, -1)  # the last is for positions without a unit
    number[[*firsts]] = [*firsts.values()]
    widths = np.zeros((len(structure.dense), 2), int)
    names: list[list[str]] = [[] for _ in structure.dense]
    for slot in structure.slots:
        of_cell = number[slot.unit.ravel()]
        for place in np.flatnonzero(of_cell >= 0):
            exponents = structure.magnitudes[slot.offset + place].data
            if len(exponents):
                widths[of_cell[place], int(exponents[0] < 0)] += tensors[slot.tensor].numel() // slot.size
                names[of_cell[place]].append(f"{slot.tensor}{list(slot.axes)}")
    notes: dict[str, None] = {}
    for cell, (least, most), places in zip(structure.dense, np.sort(widths), names, strict=True):
        if 0 < least < len(cell) < most:
            notes[
                f"{listed([*dict.fromkeys(places)])}: {len(cell)} units in front of or behind {least} numbers only "
                "have a kernel, which depends on the weights; no matrix of the group moves it"
            ] = None
    return [*notes]
