r"""Tilts of layer norms: maps :math:`I + t 1^T` between gains, with :math:`1 + 1^T t \neq 0`.

See docs/theory/transformers.md, 4.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats
from lightning_sym.symmetry.elements import Tap
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Draw, Factor, Gains, LinearAction, passes
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, Rung
from lightning_sym.symmetry.solving.structure import Slot, Structure
from lightning_sym.symmetry.tracing.affine.tilts import Tilt

_NOTHING = 1e-12  # sums that are smaller than that, relative to their terms, are zero

Vectors = tuple[Tensor, ...]


def _sums(tilt: Tilt, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the entries that a map moves, divided by the gain, and their sums over the units.

    Returns:
        The entries. Shape (units, numbers), float64.
        The sums. Shape (numbers,), float64; None if all are zero or an entry is not finite.
    """
    rows = [tensors[name].detach().to("cpu", torch.float64).movedim(axis, 0) for name, axis in tilt.moved]
    moved = torch.cat([own.reshape(tilt.size, -1) for own in rows], 1)
    if (gain := tilt.gains.get(tilt.moved[0][0])) is not None:
        moved = moved / tensors[gain].detach().to("cpu", torch.float64)[:, None]
    total = moved.sum(0)
    nothing = float(torch.linalg.vector_norm(total)) <= _NOTHING * float(moved.abs().sum())
    return moved, None if nothing or not bool(moved.isfinite().all()) else total


class Tilts(Factor[Vectors]):
    """A vector t per layer norm's bias: the rank-one map acts on the bias, its inverse on the norm's readers."""

    name = "tilt"

    def identity(self) -> Vectors:
        """Return the part that changes nothing."""
        return tuple(torch.zeros(tilt.size, dtype=torch.float64) for tilt in self.structure.tilts)

    def is_identity(self, own: Vectors) -> bool:
        """Return whether a part changes nothing."""
        return not any(bool(vector.any()) for vector in own)

    def sample(self, draw: Draw) -> Vectors:
        """Draw rank-one maps that change the output of a norm by about `draw.scale` relative to its size.

        `draw.scale` is the standard deviation of the logarithm of the map's determinant, and, times the square root of
        the size, of the entries. With `draw.signs` the determinant may be negative except for streams.
        """
        if not draw.mixing:
            return self.identity()
        parts, closed = [*self.identity()], draw.keeps(self.name)
        for index, tilt in enumerate(self.structure.tilts):
            if index not in closed:
                parts[index] = self._drawn(tilt.size, draw, draw.signs and not tilt.of_stream)
        return tuple(parts)

    def closed(self, tensors: Mapping[str, Tensor]) -> frozenset[int]:
        """Return the numbers of the maps of norms with a gain of zero; see :class:`Factor`."""
        tilts = enumerate(self.structure.tilts)
        return frozenset(
            index for index, tilt in tilts if not all(passes(tensors[name]) for name in tilt.gains.values())
        )

    def _drawn(self, size: int, draw: Draw, signs: bool) -> Tensor:
        vector = torch.randn(size, dtype=torch.float64, generator=draw.generator) * (draw.scale / math.sqrt(size))
        factor = float(torch.exp(draw.scale * torch.randn((), dtype=torch.float64, generator=draw.generator)))
        if signs and bool(torch.randint(0, 2, (), generator=draw.generator)):
            factor = -factor
        return vector + (factor - 1 - float(vector.sum())) / size

    def compose(self, later: Vectors, earlier: Vectors) -> Vectors:
        """Return the product: (I + s 1^T) (I + t 1^T) = I + (t + (1 + 1^T t) s) 1^T."""
        return tuple(two + (1 + two.sum()) * one for one, two in zip(later, earlier, strict=True))

    def inverse(self, own: Vectors) -> Vectors:
        """Return the inverse of a part."""
        return tuple(-vector / (1 + vector.sum()) for vector in own)

    def carried(self, own: Vectors, by: Element, back: Element) -> Vectors:
        """Return Q t in the new order, as Q leaves the vector of ones alone: Q (I + t 1^T) Q^-1 = I + Q t 1^T."""
        result = []
        for tilt, vector in zip(self.structure.tilts, own, strict=True):
            name, along = tilt.moved[0]
            slot = next(own for own in self.structure.slots_of[name] if own.axes == (along,))
            for index, at, _ in self.structure.rotated_places.get(slot.offset, ()):
                if len(turn := by.rotation[index]):
                    where = torch.from_numpy(at)
                    vector = vector.index_copy(0, where, turn @ vector[where])
            source = self.group.source(by.permutation)[slot.rows] - slot.offset
            result.append(vector[torch.from_numpy(source)])
        return tuple(result)

    @property
    def dimension(self) -> int:
        """The number of entries of all vectors."""
        return sum(tilt.size for tilt in self.structure.tilts)

    def dimension_at(self, offsets: Collection[int]) -> int:
        """Return the number of entries of the vectors that act at some slots, given by their offsets."""
        places = self.structure.tilted_places
        return sum(self.structure.tilts[index].size for index in {places[at][0] for at in offsets if at in places})

    def describe(self) -> Iterable[str]:
        """Yield a line for each rank-one map."""
        for tilt in self.structure.tilts:
            what = "a stream's readers and writers"
            what = what if tilt.of_stream else "a layer norm's bias and readers"
            yield f"rank-one maps, {tilt.size} of {what}: {tilt.moved[0][0]}"

    def shown(self, own: Vectors, tap: Tap, tensors: Mapping[str, Tensor] | None) -> Tensor | None:
        """Refuse values that a map changes by multiples of ones; see :class:`Factor`.

        Raises:
            ValueError: If these multiples depend on the input.
        """
        for tilt, vector in zip(self.structure.tilts, own, strict=True):
            if tap.name in tilt.mixed and bool(vector.any()):
                raise ValueError(
                    f"the element's rank-one maps add a multiple of ones to {tap.name} that depends on the input (its "
                    "readers ignore it); expected an element without them: sample(mixing=False)"
                )
        return None

    def linear_action(self, own: Vectors, gains: Gains) -> "TiltAction | None":
        """Return the action of a part by matrices; None for the identity."""
        return None if self.is_identity(own) else TiltAction(self.structure, own, gains)

    def tangents(self, parameters: Mapping[str, Floats], tensors: Mapping[str, Tensor]) -> sparse.csr_matrix:
        """Return the directions of the rank-one maps, one per entry."""
        found = [super().tangents(parameters, tensors)]
        closed = self.closed(tensors)
        for tilt in (own for index, own in enumerate(self.structure.tilts) if index not in closed):
            change = {name: np.zeros((tilt.size, *w.shape)) for name, w in parameters.items()}
            gains = {name: parameters[gain].ravel() for name, gain in tilt.gains.items() if name in parameters}
            ones = np.ones(tilt.size)
            for name, axis in tilt.moved:
                rows, gain = np.moveaxis(parameters[name], axis, 0), gains.get(name, ones)
                total = np.tensordot(1 / gain, rows, 1)
                change[name] += np.moveaxis(np.multiply.outer(np.diag(gain), total), 1, axis + 1)
            for name, axis in tilt.readers:
                rows, gain = np.moveaxis(parameters[name], axis, 0), gains.get(name, ones)
                taken = np.multiply.outer(gain, 1 / gain)
                change[name] -= np.moveaxis(np.einsum("kd,k...->kd...", taken, rows), 1, axis + 1)
            rates = np.concatenate([own.reshape(tilt.size, -1) for own in change.values()], 1)
            found.append(sparse.csr_matrix(rates.T))
        return sparse.hstack(found).tocsr()

    @property
    def gains(self) -> frozenset[str]:
        """The gains of the norms."""
        return frozenset(gain for tilt in self.structure.tilts for gain in tilt.gains.values())

    rung, bounded, by_signs = Rung.IN_TURN, True, True

    def canonical(self, state: Gathered) -> Canonical:
        """Return the maps that make each norm's bias equal its gain, among all that the norm's readers leave open.

        The matrix M that reads a stream has sums r along its units; afterwards M r is the same for all units, and the
        length of r is their number. A map stays the identity, with a note, if the ratio of bias to gain sums to zero:
        no map changes that.
        """
        result, notes = [], []
        for tilt in self.structure.tilts:
            moved, total = _sums(tilt, state.tensors)
            if total is None:
                what = "its ratio to the gain" if moved.shape[1] == 1 else "each of its rows"
                notes.append(f"{tilt.moved[0][0]} stays, as {what} sums to zero, and no rank-one map changes that")
                result.append(torch.zeros(tilt.size, dtype=torch.float64))
            else:
                size = torch.linalg.vector_norm(total)
                factor = (1 if tilt.of_stream else total[total.abs().argmax()].sign()) / size
                result.append(factor - moved @ total / size**2)
        return Canonical({self.name: tuple(result)}, notes)

    def unbounded(self, networks: Sequence[Mapping[str, Tensor]], balanced: bool) -> tuple[Sequence[str], bool]:
        """Return a note on norms whose maps the balanced form leaves open; see :class:`Factor`."""
        free = {tilt.moved[0][0] for own in networks for tilt in self.structure.tilts if _sums(tilt, own)[1] is None}
        names = ", ".join(sorted(free))
        note = f"{names}: rank-one maps are not determined, as sums are zero (a new norm), and no lower bound is known"
        return [note] * bool(free), bool(free)

    def invariants(self, tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return no invariants: a change of a stream's sign, then of maps, flips a part of these tensors alone."""
        tilts = self.structure.tilts
        names = {name for tilt in tilts for name, _ in (*tilt.moved, *tilt.readers)} | self.gains  # balanced with these
        return {name: [] for name in names if name in tensors}

    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the coordinates: vectors a with the maps exp(a 1^T)."""
        return {f"tilt {index}": (tilt.size,) for index, tilt in enumerate(self.structure.tilts)}

    def of_orbit(self, orbit: int, name: str) -> Tensor:
        """Return a mask of maps on an orbit's units; see :class:`Factor`."""
        places, units = self.structure.tilts[int(name.split()[1])].moved, self.structure.orbits[orbit]
        slots = (own for at, axis in places for own in self.structure.slots_of[at] if own.axes == (axis,))
        return super().of_orbit(orbit, name) | any(bool(np.isin(own.unit, units).any()) for own in slots)

    def at(self, coordinates: Mapping[str, Tensor]) -> Vectors:
        """Return the part at some coordinates: exp(a 1^T) = I + (e^s - 1) / s a 1^T, with s = 1^T a."""
        found = []
        for vector in (coordinates[name] for name in self.coordinates()):
            total = float(vector.sum())
            found.append(vector * (math.expm1(total) / total if total else 1.0))
        return tuple(found)

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative with respect to the coordinates; see :class:`Factor`."""
        found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.coordinates().items()}
        for index, tilt in enumerate(self.structure.tilts):
            own, ones = found[f"tilt {index}"], torch.ones(tilt.size, dtype=torch.float64)
            for name, axis in (place for place in (*tilt.moved, *tilt.readers) if place[0] in gradients):
                rows, slopes = (each[name].movedim(axis, 0).reshape(tilt.size, -1) for each in (weights, gradients))
                gain = weights[tilt.gains[name]] if name in tilt.gains else ones
                if (name, axis) in tilt.moved:
                    own += gain * (slopes @ ((1 / gain) @ rows))
                else:
                    own -= gain * (rows @ ((1 / gain) @ slopes))
        return found


class TiltAction(LinearAction):
    """The action of the maps on single axes: they add a matrix of rank one.

    Args:
        structure: The group.
        vectors: One vector t per map.
        gains: The gains around the maps.
    """

    def __init__(self, structure: Structure, vectors: Vectors, gains: Gains) -> None:
        self.structure, self.vectors, self.gains = structure, vectors, gains

    def learn(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the gains around the maps.

        Raises:
            ValueError: If a gain holds a zero.
        """
        for tilt, vector in zip(self.structure.tilts, self.vectors, strict=True):
            for gain in {*tilt.gains.values()} if bool(vector.any()) else ():
                self.gains.learn(gain, tensors, "tilt")

    def acts_at(self, slot: Slot) -> bool:
        """Return whether a map changes the units of a slot."""
        at = self.structure.tilted_places.get(slot.offset)
        return at is not None and bool(self.vectors[at[0]].any())

    def on_axis(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Let a map act on one axis, between gains."""
        index, reads = self.structure.tilted_places[slot.offset]
        gain, vector = self.structure.tilts[index].gains.get(slot.tensor), self.vectors[index]
        ones = torch.ones_like(vector)
        if reads:  # W - W t 1^T / (1 + 1^T t), written for columns
            ones, vector = -vector / (1 + vector.sum()), ones
        if gain is not None:
            around = self.gains.of(gain, "tilt")
            vector, ones = (vector / around, ones * around) if reads else (vector * around, ones / around)
        total = torch.tensordot(tensor, ones.to(tensor), ([axis], [0])).unsqueeze(axis)
        change: Tensor = total * vector.to(tensor).reshape([-1 if at == axis else 1 for at in range(tensor.ndim)])
        return tensor + change
