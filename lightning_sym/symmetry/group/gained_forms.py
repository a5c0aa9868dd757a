"""Canonical forms of cells that matrices mix between gains: docs/theory/intertwiners.md, 2.18."""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, together
from lightning_sym.symmetry.group.factor import passes
from lightning_sym.symmetry.group.gathered import Wanted
from lightning_sym.symmetry.group.gauge import variance_scales
from lightning_sym.symmetry.group.statistics import idle_generators
from lightning_sym.symmetry.group.streams import folding
from lightning_sym.symmetry.solving.structure import Structure
from lightning_sym.symmetry.tracing.labelling.gained import Gain, GainedCell, GainedPlace


def wants_matrices(wanted: Wanted) -> bool:
    """Return whether gained cells are brought to a form: only if all else is as well.

    Networks are matched in a gauge without them, as matrices keep the function in evaluation mode alone.
    """
    return wanted.scales == "balanced" and wanted.signs and wanted.order


def usable(structure: Structure, tensors: Mapping[str, Tensor]) -> list[int]:
    """Return the numbers of the gained cells without zeros in their gains."""
    cells = enumerate(structure.gained)
    return [index for index, cell in cells if all(passes(gain.of(tensors)) for gain in cell.gains)]


def held_scales(structure: Structure, tensors: Mapping[str, Tensor], wanted: Wanted) -> Floats:
    """Return the logarithms of scales that are known before others: those that bring gains to 1 or -1.

    These are the gains around rotated streams, and those around matrices. Where the latter are made of a batch
    norm's gain and variance, the gains of the batch norms get the mean square 1. Where translations move these weights,
    the scales bring running variances to 1.

    Args:
        structure: The group.
        tensors: Parameters and buffers, by name.
        wanted: The form.

    Returns:
        Shape (generators of scales,); nan for those that are not known.
    """
    found = folding(structure, tensors)
    found = found if wanted.scales == "balanced" else np.full_like(found, np.nan)
    if structure.idle:
        found = np.where(idle_generators(structure, structure.magnitudes), variance_scales(structure, tensors), found)
    for index in usable(structure, tensors) if wants_matrices(wanted) else ():
        cell = structure.gained[index]
        table = structure.scale_table[cell.orbit][structure.place_in_orbit[cell.units]]
        rates, _ = _taken_off(cell, tensors)
        own = cell.solve.any(1)
        found[table[:, own]] = (cell.solve @ rates).T[:, own]
    return found


def _taken_off(cell: GainedCell, tensors: Mapping[str, Tensor]) -> tuple[Floats, Floats]:
    """Return scales that bring a cell's gains to 1 or -1, and the gains of batch norms then.

    These have the mean square 1; those of readers and of writers the same sum of squares, if both have some.

    Args:
        cell: The cell; its gains are not zero.
        tensors: Parameters and buffers, by name.

    Returns:
        Logarithms of the multipliers of gains, and of the scales at the matrices' place. Shape (gains + 1, size);
        and of the gains of batch norms. Shape (batch norms, size).
    """
    rates = np.zeros((len(cell.gains) + 1, cell.size))
    rates[:-1] = [-np.log(np.abs(gain.of(tensors).numpy())) for gain in cell.gains]
    logs = [np.log(np.abs(Gain(gain.name, gain.at).of(tensors).numpy())) for gain in cell.gains]
    norms = [gain.norm is not None for gain in cell.gains]
    sizes = (np.stack(logs) + cell.at_gains @ rates)[norms]
    sides = cell.at_gains[norms, -1]
    squares = [np.square(np.exp(sizes[sides == side])) for side in (1, -1)]
    if len(squares[0]) and len(squares[1]):
        rates[-1] = np.log(squares[1].sum(0) / squares[0].sum(0)) / 4
    elif len(sizes):
        rates[-1] = -sides[0] * np.log(np.concatenate(squares).mean(0)) / 2
    return rates, sizes + sides[:, None] * rates[-1]


def in_order_of_gains(structure: Structure, tensors: Mapping[str, Tensor], cells: Collection[int]) -> Tensor:
    """Return the permutation that sorts units by the ratios of several batch norms' gains, which no matrix changes.

    Args:
        structure: The group.
        tensors: Parameters and buffers, by name.
        cells: The numbers of the gained cells.
    """
    permutation = np.arange(structure.units)
    for cell in (structure.gained[index] for index in cells):
        if sum(gain.norm is not None for gain in cell.gains) > 1:
            _, logs = _taken_off(cell, tensors)
            units = np.sort(cell.units)
            permutation[units] = cell.units[np.lexsort(logs)]
    return torch.from_numpy(permutation)


def gram_matrices_between(
    structure: Structure, tensors: Mapping[str, Tensor], gains: Mapping[str, Tensor], cells: Collection[int]
) -> list[tuple[int, tuple[Tensor, Tensor]]]:
    """Return the Gram matrices of the weights into and out of gained cells, with all gains divided out.

    Args:
        structure: The group.
        tensors: The parameters that count, by name.
        gains: Parameters and buffers, by name.
        cells: The numbers of the cells.

    Returns:
        For each cell its number and both matrices, in float64 on the CPU.
    """
    grams = {cell: torch.zeros(2, structure.gained[cell].size, structure.gained[cell].size).double() for cell in cells}
    values = {cell: [gain.of(gains) for gain in structure.gained[cell].gains] for cell in cells}
    for slot in structure.slots:
        for place in structure.gained_places.get(slot.offset, ()) if slot.tensor in tensors else ():
            if place.cell in grams:
                tensor = together(tensors[slot.tensor], slot.axes)
                rows = tensor[torch.from_numpy(place.at).to(tensor.device)].reshape(len(place.at), -1)
                rows = rows.double().cpu() / around(place, values[place.cell])[:, None]
                grams[place.cell][int(place.read)] += rows @ rows.mT
    return [(cell, (own[0], own[1])) for cell, own in grams.items()]


def around(place: GainedPlace, gains: Collection[Tensor]) -> Tensor:
    """Return the diagonal around the matrix at a place. Shape (size,)."""
    return torch.stack([gain**power for gain, power in zip(gains, place.powers, strict=True)]).prod(0)


def tensors_between(structure: Structure) -> set[str]:
    """Return the names of the tensors that gained cells mix."""
    return {slot.tensor for slot in structure.slots if slot.offset in structure.gained_places}


def orbits_between(structure: Structure, cells: Collection[int]) -> set[int]:
    """Return the orbits with all of their cells among some gained ones."""
    left = {own.orbit for index, own in enumerate(structure.gained) if index not in cells}
    return {structure.gained[index].orbit for index in cells} - left
