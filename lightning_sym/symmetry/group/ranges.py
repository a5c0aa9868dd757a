"""Largest magnitudes of matrices by unit, under any scales."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints, on_axes, together
from lightning_sym.symmetry.group.norms import classes_of
from lightning_sym.symmetry.solving.structure import Slot, Structure


class Slices:
    """The entries of the exponents of scales at one labelled axis of a matrix.

    Args:
        name: Name of the matrix.
        slot: The axis.
        columns: Which axis of the matrix its inputs index.
        forms: The exponents at the positions of the axis.
    """

    def __init__(self, name: str, slot: Slot, columns: int, forms: sparse.csr_matrix) -> None:
        self.name, self.slot, self.columns = name, slot, columns
        entries = forms.tocoo()
        self.position, self.generator, self.exponent = entries.row, entries.col, entries.data


class Ranges:
    """Largest magnitudes of matrices by unit, under any scales.

    Args:
        structure: The group.
        tensors: Parameters, by name; only those in `axes` count.
        axes: Which axis of each matrix its outputs index, by the name of the parameter that holds it.
        cells: Whether units on which any invertible matrix acts are scaled as well.

    Attributes:
        logs: Logarithms of the scales. Shape (scales,).
        classes: Scales that play the same role.
        slices: All labelled axes of matrices.
    """

    def __init__(
        self, structure: Structure, tensors: Mapping[str, Tensor], axes: Mapping[str, int], *, cells: bool
    ) -> None:
        self._structure = structure
        self._weights: dict[str, Tensor] = {}
        self._slots: dict[str, list[Slot]] = {}
        self._forms = structure.magnitudes
        self.slices: list[Slices] = []
        for name, tensor in tensors.items():
            whole = name.partition("[")[0]
            if whole not in axes or sum(size > 1 for size in tensor.shape) < 2:
                continue
            self._weights[name] = tensor.detach().abs().to("cpu", torch.float64)
            self._slots[name] = [slot for slot in structure.slots_of.get(name, ()) if slot.kind == "value"]
            self.slices += [Slices(name, own, 1 - axes[whole], self._forms[own.rows]) for own in self._slots[name]]
        self.logs: Floats = np.zeros(self._forms.shape[1])
        within = range(len(structure.dense)) if cells else ()
        self.classes: list[Ints] = classes_of(structure, structure.scale_table, self._forms, within)

    def factor(self, name: str, slot: Slot | None = None) -> Floats:
        """Return the factors of a matrix's entries under the current scales, to be broadcast; or those of one axis."""
        result: Floats = np.ones(())
        for own in self._slots[name] if slot is None else [slot]:
            factor = np.exp(self._forms[own.rows] @ self.logs)
            result = result * on_axes(factor, own.shape, own.axes, self._weights[name].ndim)
        return result

    def largest(self, each: Slices) -> Floats:
        """Return the largest magnitude at each position of an axis, under the current scales."""
        weight = self._weights[each.name].numpy() * self.factor(each.name)
        found: Floats = together(torch.from_numpy(weight), each.slot.axes).reshape(each.slot.size, -1).amax(1).numpy()
        return found

    def equalised(self, members: Ints) -> Floats:
        """Return the change of some scales that makes the ranges on both sides equal."""
        size = len(self.logs)
        sides = {+1: np.zeros(size), -1: np.zeros(size)}
        exponents = {+1: np.zeros(size), -1: np.zeros(size)}
        chosen = np.zeros(size, bool)
        chosen[members] = True
        for each in self._touching(chosen):
            sizes = self.largest(each)
            for sign, side in sides.items():
                at = chosen[each.generator] & (sign * each.exponent > 0)
                np.maximum.at(side, each.generator[at], sizes[each.position[at]])
                np.maximum.at(exponents[sign], each.generator[at], sign * each.exponent[at])
        up, down = sides[+1][members], sides[-1][members]
        change, both = np.zeros(len(members)), (up > 0) & (down > 0)
        total = (exponents[+1] + exponents[-1])[members]
        change[both] = (np.log(down[both]) - np.log(up[both])) / total[both]
        return change

    def _touching(self, chosen: Floats) -> Iterator[Slices]:
        return (each for each in self.slices if chosen[each.generator].any())

    def coordinates(self) -> dict[str, Tensor]:
        """Return the coordinates of the element with these scales; within GL(d) blocks, of diagonal matrices."""
        structure, logs = self._structure, torch.from_numpy(self.logs.copy())
        found = {"scales": logs}
        for units, table in zip(structure.orbits, structure.scale_table, strict=True):
            own = structure.cell_of[units]
            for cell in np.unique(own[own >= 0]).tolist():
                found[f"matrix {cell}"] = torch.diag(logs[torch.from_numpy(table[own == cell])].sum(1))
        return found
