"""Phases of rotary pairs (docs/theory/transformers.md, 5)."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints, as_array, together
from lightning_sym.symmetry.elements import Tap
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Additive, Draw, Gains, LinearAction
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, Rung, Wanted
from lightning_sym.symmetry.solving.structure import Slot, Structure

# A pair has no principal axes if its Gram matrix is a multiple of the identity, up to this relative difference.
_ROUND = 1e-9


class Phase(Additive):
    """One rotation angle per rotary pair."""

    name = "phase"

    @property
    def size(self) -> int:
        """The number of entries of a part."""
        return self.structure.phases

    def sample(self, draw: Draw) -> Tensor:
        """Draw uniform angles in [-pi, pi)."""
        if not draw.mixing:
            return self.identity()
        return (2 * torch.rand(self.size, dtype=torch.float64, generator=draw.generator) - 1) * math.pi

    def carried(self, own: Tensor, by: Element, back: Element) -> Tensor:
        """Permute the angles along with their pairs; see :class:`Factor`."""
        result, of = own.clone(), self.structure.phase_of
        turned = np.flatnonzero(of >= 0)
        result[torch.from_numpy(of[turned])] = own[torch.from_numpy(of[by.permutation.numpy()[turned]])]
        return result

    @property
    def dimension(self) -> int:
        """The number of rotary pairs."""
        return self.size

    def dimension_at(self, offsets: Collection[int]) -> int:
        """Return the number of rotary pairs in some slots, given by their offsets."""
        return len({phase for at in offsets for phase in self.structure.turned_places.get(at, ([],))[0]})

    def linear_action(self, own: Tensor, gains: Gains) -> "PhaseAction | None":
        """Return the action of a part; None for the identity."""
        return None if self.is_identity(own) else PhaseAction(self.structure, own)

    def tangents(self, parameters: Mapping[str, Floats], tensors: Mapping[str, Tensor]) -> sparse.csr_matrix:
        """Return the tangents of the phases: the coordinates of each pair move by (-y, x)."""
        blocks = [sparse.csr_matrix((0, self.size))]
        for name, weights in parameters.items():
            total = sparse.csr_matrix((weights.size, self.size))
            number = torch.arange(weights.size).view(weights.shape)
            for slot in self.structure.slots_of.get(name, ()):
                if slot.offset not in self.structure.turned_places:
                    continue
                phase, first, second = self.structure.turned_places[slot.offset]
                lines = together(number, slot.axes).reshape(slot.size, -1).numpy()
                for at, other, sign in ((first, second, -1.0), (second, first, 1.0)):
                    rows = lines[at]
                    rates = sign * weights.ravel()[lines[other]].ravel()
                    column = np.repeat(phase, rows.shape[1])
                    total = total + sparse.csr_matrix((rates, (rows.ravel(), column)), shape=total.shape)
            blocks.append(total)
        return sparse.vstack(blocks).tocsr()

    def _planes(self, *tensors: Mapping[str, Tensor]) -> Iterator[tuple[Any, ...]]:
        """Yield the phases of each slot, and the rows of first and second coordinates in each set of tensors."""
        for slot in self.structure.slots:
            if slot.tensor in tensors[0] and slot.offset in self.structure.turned_places:
                phase, *places = self.structure.turned_places[slot.offset]
                both = (together(own[slot.tensor], slot.axes).reshape(slot.size, -1) for own in tensors)
                yield phase, *(rows[torch.from_numpy(at)] for rows in both for at in places)

    rung, keeps_norms = Rung.SIZED, True

    def canonical(self, state: Gathered) -> Canonical:
        """Return the angles that rotate each pair to the principal axes of the first weights that contain it.

        Its two coordinates are then orthogonal, and the first one is larger. The rotation by pi remains: it is a sign.
        """
        gram, seen = np.zeros((3, self.size)), np.zeros(self.size, bool)
        for phase, *both in self._planes(state.tensors):
            if seen[phase].any():
                continue
            x, y = (own.detach().double().cpu().numpy() for own in both)
            for kind, product in enumerate((x * x, y * y, x * y)):
                np.add.at(gram[kind], phase, product.sum(1))
            seen[phase] = True
        apart = gram[0] - gram[1]
        unclear = np.hypot(apart, 2 * gram[2]) <= _ROUND * (gram[0] + gram[1])
        angle = np.where(unclear, 0.0, -np.arctan2(2 * gram[2], apart) / 2)
        notes = [f"{unclear.sum()} planes are not rotated, as both axes have equal length"] if unclear.any() else []
        return Canonical({self.name: torch.from_numpy(angle)}, notes)

    def left(self, wanted: Wanted, tensors: Mapping[str, Tensor]) -> Iterable[str]:
        """Yield a note on pairs that stay unchanged."""
        if self.size and wanted.scales is None:
            yield f"{self.size} planes are not rotated: the form is canonical up to phases only"

    freedom = "matrices"

    def mixes(self, orbit: int) -> bool:
        """Return whether the units of an orbit are rotary pairs."""
        return bool((self.structure.phase_of[self.structure.orbits[orbit]] >= 0).any())

    def pair_gains(self, orbit: int, gained: Callable[[Tensor | None], Tensor]) -> Tensor:
        """Return complex numbers z; a rotation by an angle gains Re(z exp(-i angle)). See :class:`Factor`."""
        quarter = self.identity()
        quarter[torch.from_numpy(self.structure.phase_of[self.structure.orbits[orbit]])] = math.pi / 2
        return torch.complex(gained(None).double(), gained(quarter).double())

    def gains_of_blocks(self, table: Tensor, places: Ints, mixing: bool) -> Floats:
        """Return the moduli of complex gains, the gains of the optimal phases; see :class:`Factor`."""
        index = torch.from_numpy(places)
        planes = table.cpu()[index[:, None], index[None]]
        return as_array((planes.abs() if mixing else planes.real).sum(-1))

    def mixing_blocks(self, own: Tensor, table: Tensor, units: Ints, places: Ints, order: Ints) -> Tensor:
        """Return a part with the optimal angles of assigned blocks; see :class:`Factor`."""
        own, table = own.clone(), table.cpu()
        for new, old in enumerate(order):
            pairs = table[torch.from_numpy(places[new]), torch.from_numpy(places[old])]
            own[torch.from_numpy(self.structure.phase_of[units[places[old]]])] = pairs.angle()
        return own

    def unbounded(self, networks: Sequence[Mapping[str, Tensor]], balanced: bool) -> tuple[Sequence[str], bool]:
        """Return a note on rotary pairs; see :class:`Factor`."""
        turned = "turned to their principal axes" if balanced else "not turned"
        note = f"{self.size} planes are {turned} for the upper bound, and left out of the lower one"
        return [note] * (self.size > 0), False

    def veiled(self, signs: bool) -> tuple[set[str], set[str]]:
        """Return the tensors that contain rotary pairs; lower bounds ignore them."""
        return {slot.tensor for slot in self.structure.slots if slot.offset in self.structure.turned_places}, set()

    def best_match(self, target: Mapping[str, Tensor], current: Mapping[str, Tensor], orbit: int) -> Tensor | None:
        """Return the angles that minimise the distance; see :class:`Factor`."""
        own = self.structure.phase_of[self.structure.orbits[orbit]]
        if not (own >= 0).any():
            return None
        real, imaginary = self.identity(), self.identity()
        for phase, x, y, other_x, other_y in self._planes(target, current):
            at = torch.from_numpy(phase)
            real.index_add_(0, at, (x * other_x + y * other_y).sum(1).double().cpu())
            imaginary.index_add_(0, at, (y * other_x - x * other_y).sum(1).double().cpu())
        chosen = torch.from_numpy(own[own >= 0])
        return self.identity().index_copy(0, chosen, torch.atan2(imaginary, real)[chosen])

    def balanced_heads(self, tensors: Mapping[str, Tensor]) -> Canonical | None:
        """Return the scales that equalise the norms of queries and keys in each pair; see :class:`Factor`."""
        if not self.size:
            return None
        structure, forms = self.structure, self.structure.magnitudes
        squares = np.zeros((2, forms.shape[1]))
        for slot in structure.slots:
            if slot.offset not in structure.turned_places or slot.tensor not in tensors:
                continue
            _, *coordinates = structure.turned_places[slot.offset]
            at = np.concatenate(coordinates)
            rows = together(tensors[slot.tensor].double().cpu(), slot.axes).reshape(slot.size, -1)
            own = forms[slot.offset + at]  # one scale at each
            np.add.at(squares, ((own.data < 0).astype(int), own.indices), rows.square().sum(1).numpy()[at])
        acting, nonzero = squares.any(0), squares.all(0)
        result = np.zeros(forms.shape[1])
        result[nonzero] = np.log(squares[1, nonzero] / squares[0, nonzero]) / 4
        zeros = int((acting & ~nonzero).sum())
        notes = [f"{zeros} planes stay unchanged, as queries or keys are 0 there"] if zeros else []
        return Canonical({"log_scale": torch.from_numpy(result)}, notes)

    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the coordinates: the angles themselves."""
        return {"phases": (self.size,)}

    def of_orbit(self, orbit: int, name: str) -> Tensor:
        """Return a mask of the angles of an orbit's pairs; see :class:`Factor`."""
        phases = self.structure.phase_of[self.structure.orbits[orbit]]
        return super().of_orbit(orbit, name).index_fill(0, torch.from_numpy(phases[phases >= 0]), True)

    def at(self, coordinates: Mapping[str, Tensor]) -> Tensor:
        """Return the part at some coordinates."""
        return coordinates["phases"].clone()

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative with respect to the angles; see :class:`Factor`."""
        found = self.identity()
        for phase, along_x, along_y, x, y in self._planes(gradients, weights):
            found.index_add_(0, torch.from_numpy(phase), (along_y * x - along_x * y).sum(1))
        return {"phases": found}


class PhaseAction(LinearAction):
    """The action of phases on single axes.

    Args:
        structure: The group.
        phase: The angle of each rotary pair.
    """

    def __init__(self, structure: Structure, phase: Tensor) -> None:
        self.structure, self.phase = structure, phase
        self._turns, self._cosine, self._sine = (own.numpy() for own in (phase != 0, phase.cos(), phase.sin()))

    def acts_at(self, slot: Slot) -> bool:
        """Return whether a rotary pair of a slot rotates."""
        places = self.structure.turned_places.get(slot.offset)
        return places is not None and bool(self._turns[places[0]].any())

    def require(self, tap: Tap, slot: Slot) -> None:
        """Check that phases act on a value inside the network by a matrix.

        Raises:
            ValueError: If the value shows only some coordinates of rotated pairs.
        """
        phases = self.structure.phase_of[slot.unit.ravel()]
        seen = (slot.unit.ravel() >= 0) & (phases >= 0)
        if not seen.any() or not bool(self.phase[torch.from_numpy(phases[seen])].any()):
            return
        places = self.structure.turned_places.get(slot.offset)
        if tap.squared or places is None or 2 * len(places[0]) != seen.sum():
            raise ValueError(
                f"{tap.name} shows single coordinates of planes that the element rotates; no matrix describes this; "
                "expected another tap, or an element without phases: sample(mixing=False)"
            )

    def on_axis(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Rotate the pairs of one axis."""
        phase, first, second = self.structure.turned_places[slot.offset]
        other, by, across = np.arange(slot.size), np.ones(slot.size), np.zeros(slot.size)
        other[first], other[second] = second, first  # (x, y) becomes (x cos - y sin, y cos + x sin)
        by[first] = by[second] = self._cosine[phase]
        across[second] = self._sine[phase]
        across[first] = -across[second]
        shape = [-1 if own == axis % tensor.ndim else 1 for own in range(tensor.ndim)]
        kept, crossed = (torch.from_numpy(own).reshape(shape).to(tensor) for own in (by, across))
        swapped = tensor.index_select(axis, torch.from_numpy(other).to(tensor.device))
        return torch.addcmul(tensor * kept, swapped, crossed)
