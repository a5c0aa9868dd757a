"""Shifts: additions to weights, before all else; docs/theory/translations.md."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats
from lightning_sym.symmetry.described import described_shifts, listed
from lightning_sym.symmetry.elements import Tap
from lightning_sym.symmetry.group.action import Action
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.equations import solved
from lightning_sym.symmetry.group.factor import Additive, Draw
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, Rung, Wanted
from lightning_sym.symmetry.group.statistics import kernel
from lightning_sym.symmetry.group.translations import carried, elements_alone, nearest
from lightning_sym.symmetry.rearranging import Summand
from lightning_sym.symmetry.tracing.affine.translations import WRITERS


class Shift(Additive):
    """A vector space of elements that add numbers to weights."""

    name = "shift"

    @property
    def size(self) -> int:
        """The number of entries of a part."""
        return self.structure.shifts.size

    def sample(self, draw: Draw) -> Tensor:
        """Draw a shift, normally distributed."""
        drawn = torch.randn(self.structure.shifts.size, dtype=torch.float64, generator=draw.generator)
        return drawn * (draw.scale if draw.shifts else 0.0)

    def closed(self, tensors: Mapping[str, Tensor]) -> frozenset[int]:
        """Return the entries that add nothing at some weights; see :class:`Factor`."""
        space = self.structure.shifts
        return frozenset(np.flatnonzero(~space.at(tensors).passing).tolist() if space else ())

    def carried(self, own: Tensor, by: Element, back: Element) -> Tensor:
        """Return the shift as the linear part of an element carries it."""
        action, undoing = Action(self.group, by), Action(self.group, back)
        return carried(self.structure.shifts, own, action, undoing, self.structure.slots_of)

    @property
    def dimension(self) -> int:
        """The number of independent directions."""
        return self.structure.shifts.dimension

    @property
    def gains(self) -> frozenset[str]:
        """The tensors with multiples among the additions."""
        return frozenset(self.structure.shifts.factors | self.structure.shifts.divisors)

    rung, bounded = Rung.IN_TURN, True

    def concerned(self, wanted: Wanted) -> bool:
        """Return whether shifts are removed: where scales may change."""
        return wanted.scales is not None and bool(self.structure.shifts)

    def canonical(self, state: Gathered) -> Canonical:
        """Return the shift that minimises the sum of squares of the shifted tensors."""
        return Canonical({self.name: nearest(self.structure.shifts, state.tensors, state.parameters)})

    def redundant(self, parameters: Collection[str]) -> int:
        """Return by how much entries exceed the dimension."""
        return self.size - self.dimension

    def refined(self, target: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> Tensor | None:
        """Return the shift that brings biases and means to those of the reference; see :class:`Factor`."""
        return nearest(self.structure.shifts, current, target.keys(), target) if self.structure.shifts else None

    def taken_off(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> tuple[Tensor, Bools]:
        """Return the shift that takes biases off as far as it can; see :class:`Factor`."""
        space, values = self.structure.shifts, [tensors[name].reshape(-1) for name in names]
        flat = torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)
        direct = space.at(tensors).direct(names) if space else {}
        nothing = (sparse.csr_matrix((len(own), space.size)) for own in values)
        rows = [direct.get(name, none) for name, none in zip(names, nothing, strict=True)]
        matrix = sparse.vstack(rows).tocsr() if rows else sparse.csr_matrix((0, space.size))
        found, holds = solved(matrix, np.arange(len(flat)), -flat.numpy())
        return torch.from_numpy(found), holds

    def centred(self, tensors: Mapping[str, Tensor], names: Collection[str]) -> tuple[Tensor, set[str]]:
        """Return the shift along ones that takes means off; see :class:`Factor`."""
        space = self.structure.shifts
        alone = elements_alone(space, tensors, names)
        weights = [part.places for part in space.parts.writers if part.name in names] if space.parts is not None else []
        empty = np.zeros(0, np.int64)
        entries = np.concatenate([empty, *(np.arange(space.size)[places] for places in weights)])
        shift = nearest(space, tensors, tensors.keys(), entries=entries)
        for name, (elements, added) in alone.items():
            scale = 1 / np.linalg.norm(added, axis=1)
            given = tensors[name].expand(space.parts.shapes[name]).reshape(-1).numpy() if space.parts else empty
            step = np.linalg.lstsq(scale[:, None] * added, -scale * given, rcond=None)[0]
            shift += torch.from_numpy(elements @ step)
        return shift, {own.name for own in space.kinds if own.kind == WRITERS} | alone.keys()

    def describe(self) -> Iterable[str]:
        """Return lines on the kinds of shifts."""
        return described_shifts(self.structure.shifts.kinds)

    def added(self, own: Tensor, tensors: Mapping[str, Tensor]) -> Mapping[str, Sequence[Summand]]:
        """Return the additions of a shift to tensors; see :class:`Factor`."""
        return {} if self.is_identity(own) else self.structure.shifts.at(tensors).summands(own)

    def shown(self, own: Tensor, tap: Tap, tensors: Mapping[str, Tensor] | None) -> Tensor | None:
        """Return the addition of a shift to a value; see :class:`Factor`.

        Raises:
            ValueError: If that depends on the input, or on tensors that are not given.
        """
        space, shown, element = self.structure.shifts, tap.shown, own
        if not shown or not bool(element.any()):
            return None
        if space.shows(element, shown.unknown):
            raise ValueError(
                f"the element's shifts add a multiple of ones to {tap.name} that depends on the input (its readers "
                "ignore it); expected an element without shifts: sample(shifts=False)"
            )
        if shown.at is None or not space.shows(element, shown.at):
            return None
        if tensors is None and (needed := space.needed(shown.at)):
            raise ValueError(
                f"the addition of shifts to {tap.name} depends on {listed(sorted(needed))}; expected also the network, "
                "or an element without shifts: sample(shifts=False)"
            )
        located = space.generic if tensors is None else space.at(tensors)
        added = torch.from_numpy(located.known(element)[shown.at])
        return added if bool(added.any()) else None

    def tangents(self, parameters: Mapping[str, Floats], tensors: Mapping[str, Tensor]) -> sparse.csr_matrix:
        """Return the directions of shifts that move parameters alone."""
        space = self.structure.shifts
        if not space:
            return super().tangents(parameters, tensors)
        found = space.at(tensors).rates(tensors.keys())
        moved = sparse.vstack([found[name] for name in parameters]).tocsr()
        buffers = [matrix for name, matrix in found.items() if name not in parameters]
        return moved @ kernel(sparse.vstack(buffers).tocsr()) if buffers else moved

    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the coordinates: the entries themselves."""
        return {"shifts": (self.size,)}

    def at(self, coordinates: Mapping[str, Tensor]) -> Tensor:
        """Return the part at some coordinates."""
        return coordinates["shifts"].clone()

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative with respect to the entries; see :class:`Factor`."""
        space = self.structure.shifts
        return {"shifts": torch.from_numpy(space.at(weights).pulled_back(gradients))} if space else {}
