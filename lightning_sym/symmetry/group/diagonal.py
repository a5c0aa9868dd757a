"""Diagonal factors: positive scales and signs."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats, Ints, along, odd, odd_entries, rising
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.equations import of_single_units, solved
from lightning_sym.symmetry.group.factor import MANY, Draw, Factor
from lightning_sym.symmetry.group.gained_forms import held_scales
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, Rung
from lightning_sym.symmetry.group.gauge import without_balance
from lightning_sym.symmetry.group.norms import Squares
from lightning_sym.symmetry.group.order import find_signs
from lightning_sym.symmetry.group.proportion import MagnitudeDescent, in_proportion
from lightning_sym.symmetry.group.search import Search
from lightning_sym.symmetry.group.statistics import idle_generators, idle_signs, kernel, tangent_rows
from lightning_sym.symmetry.group.streams import gain_signs
from lightning_sym.symmetry.solving.structure import Slot

_EVEN = 0.15  # largest deviation of log scales from a layer's mean in conventionally trained networks


class Diagonal(Factor[Tensor]):
    """One number per generator. Generators act on positions with exponents; permutations permute generators."""

    neutral: ClassVar[float]
    bounded = True
    kind: ClassVar[Literal["scales", "signs"]]

    @property
    def forms(self) -> sparse.csr_matrix:
        """The generators' exponents; those of signs count modulo 2. Shape (positions of all slots, generators)."""
        return self.structure.magnitudes if self.kind == "scales" else self.structure.signs

    @property
    def tables(self) -> tuple[Ints, ...]:
        """The generators of each orbit's units. Each of shape (units, generators of a unit)."""
        return self.structure.scale_table if self.kind == "scales" else self.structure.sign_table

    def identity(self) -> Tensor:
        """Return the identity."""
        return torch.full((self.forms.shape[1],), self.neutral, dtype=torch.float64)

    def is_identity(self, own: Tensor) -> bool:
        """Return whether a part is the identity."""
        return not bool((own != self.neutral).any())

    def carried(self, own: Tensor, by: Element, back: Element) -> Tensor:
        """Permute the numbers along with their units; see :class:`Factor`."""
        if self.group["permutation"].is_identity(by.permutation):
            return own
        result, there = own.clone(), back.permutation.numpy()
        for orbit, table in enumerate(self.tables):
            if table.shape[1]:
                old = self.structure.arriving(orbit, self.kind, there)
                result[torch.from_numpy(old)] = own[torch.from_numpy(table)]
        return result

    def seen_at(self, seen: Slot, values: Factor[Tensor]) -> tuple[Tensor, Floats]:
        """Return the generators outside GL(d) blocks that act on visible units, and their first exponents there.

        Args:
            seen: The positions of the units in a value.
            values: This factor of the group on values.
        """
        assert values.forms is not None
        rows = values.forms[seen.rows]
        numbers, first = np.unique(rows.indices, return_index=True)
        free = self.outside_cells(torch.full((self.forms.shape[1],), -1.0))[numbers].numpy() == -1
        return torch.from_numpy(numbers[free].astype(np.int64)), rows.data[first[free]]

    def outside_cells(self, own: Tensor) -> Tensor:
        """Reset generators inside GL(d) blocks to the identity, as the blocks' matrices include them."""
        for units, table in zip(self.structure.orbits, self.tables, strict=True):
            if self.structure.cell_of[units[0]] >= 0:
                own[torch.from_numpy(table.ravel())] = self.neutral
        return own

    @property
    def inside(self) -> int:
        """The number of generators inside GL(d) blocks."""
        return sum(len(cell) for cell in self.structure.dense)


class Scale(Diagonal):
    """Positive scales, given by their natural logarithms."""

    name, kind, neutral = "log_scale", "scales", 0.0

    rung = Rung.SIZES

    def canonical(self, state: Gathered) -> Canonical:
        """Return the scales of the wanted gauge; gains of rotated streams are brought to 1 first."""
        state.weigh(held_scales(self.structure, state.tensors, state.wanted))
        return Canonical({self.name: torch.from_numpy(state.gauge.log_scale)}, state.gauge.notes)

    def is_even(self, one: Tensor, two: Tensor) -> bool:
        """Return whether scales are nearly equal within each class, and between both networks."""
        both = np.stack([one.numpy(), two.numpy()])
        classes = (both[:, members] for members in self.group.plan.classes)
        return all(bool((own.std(1) <= _EVEN).all() and abs(own[0].mean() - own[1].mean()) <= _EVEN) for own in classes)

    def unbounded(self, networks: Sequence[Mapping[str, Tensor]], balanced: bool) -> tuple[Sequence[str], bool]:
        """Return a note on scales that have no balance; see :class:`Factor`."""
        plan = self.group.plan
        free = sum(int(without_balance(plan, Squares(plan, own)).sum()) for own in networks if balanced)
        note = (
            f"scales of dead units ({free} in both networks) have no balance, as all weights into these units, or out "
            "of them, are zero: they are compared unchanged, and no lower bound is known"
        )
        return [note] * bool(free), bool(free)

    def put_in_proportion(self, theirs: Mapping[str, Tensor], own: Mapping[str, Tensor], back: Tensor) -> Tensor | None:
        """Return corrections of scales for units that would be out of proportion; see :class:`Factor`."""
        if not len(back):
            return None
        change = torch.from_numpy(in_proportion(self.group.plan, theirs, own, back.numpy())) - back
        return change if bool(change.any()) else None

    def refined(self, target: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> Tensor | None:
        """Return the scales that minimise the distance, by coordinate descent; see :class:`Factor`."""
        return MagnitudeDescent(self.group, target, {name: current[name] for name in target}).run()

    def brought_to_one(self, rows: Ints, values: Floats) -> tuple[Tensor, Bools]:
        """Return the scales that bring magnitudes to 1; see :class:`Factor`."""
        found, holds = solved(of_single_units(self.structure, self.forms, rows), rows, -np.log(np.abs(values)))
        return torch.from_numpy(found), holds

    def sample(self, draw: Draw) -> Tensor:
        """Draw normally distributed logarithms."""
        drawn = torch.randn(self.forms.shape[1], dtype=torch.float64, generator=draw.generator) * draw.scale
        return self.outside_cells(drawn)

    def sample_at(self, seen: Slot, values: Factor[Tensor], draw: Draw) -> Tensor:
        """Draw log-normal scales of mean 1; see :class:`Factor`."""
        numbers, exponents = self.seen_at(seen, values)
        drawn = (
            draw.scale * torch.randn(len(numbers), dtype=torch.float64, generator=draw.generator) - draw.scale**2 / 2
        )
        return self.identity().index_copy(0, numbers, drawn / torch.from_numpy(exponents))

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        """Return the product of two parts; `earlier` acts first."""
        return later + earlier

    def inverse(self, own: Tensor) -> Tensor:
        """Return the inverse of a part."""
        return -own

    @property
    def dimension(self) -> int:
        """The number of scales outside GL(d) blocks."""
        return int(self.forms.shape[1]) - self.inside

    def multipliers(self, own: Tensor) -> Floats:
        """Return the factor that multiplies each position of all slots before it moves."""
        result: Floats = np.exp(self.forms @ own.numpy())
        return result

    def tangents(self, parameters: Mapping[str, Floats], tensors: Mapping[str, Tensor]) -> sparse.csr_matrix:
        """Return the tangents of all combinations of scales that move no buffer; see :class:`Factor`."""
        structure = self.structure
        blocks = [tangent_rows(structure.slots_of.get(name, ()), w, self.forms) for name, w in parameters.items()]
        rows = [np.arange(slot.rows.start, slot.rows.stop) for slot in structure.slots if slot.tensor not in parameters]
        moved = sparse.vstack([sparse.csr_matrix((0, self.forms.shape[1])), *blocks]).tocsr()
        return moved @ kernel(self.forms[np.concatenate(rows)]) if rows and self.forms.shape[1] else moved

    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the coordinates: the logarithms themselves."""
        return {"scales": (self.forms.shape[1],)}

    def of_orbit(self, orbit: int, name: str) -> Tensor:
        """Return a mask of the generators of an orbit's units; see :class:`Factor`."""
        own = torch.from_numpy(self.tables[orbit].ravel())
        return super().of_orbit(orbit, name).index_fill(0, own, True)

    def at(self, coordinates: Mapping[str, Tensor]) -> Tensor:
        """Return the part at some coordinates."""
        return self.outside_cells(coordinates["scales"].clone())

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative with respect to the logarithms; see :class:`Factor`."""
        total, products = np.zeros(self.forms.shape[0]), dict[tuple[str, str], Tensor]()
        for slot in self._scaled:
            if slot.tensor in gradients:
                if (key := (slot.tensor, slot.kind)) not in products:
                    own = weights[slot.tensor]  # of a variance: v' = s^2 (v + epsilon) - epsilon
                    own = 2 * (own + slot.epsilon) if slot.kind == "variance" else own
                    products[key] = own * gradients[slot.tensor]
                total[slot.rows] = along(products[key], slot.axes).reshape(-1)
        return {"scales": self.outside_cells(torch.from_numpy(self.forms.T @ total))}

    @cached_property
    def _scaled(self) -> list[Slot]:
        """The slots with scales."""
        return [slot for slot in self.structure.slots if self.forms[slot.rows].nnz]

    def dual(self, own: Tensor) -> Tensor:
        """Return the inverse scales."""
        return -own

    def within(self, own: Tensor, budget: float, condition: float) -> Tensor:
        """Return the logarithms within bounds."""
        return own.clamp(-budget, budget)

    def inwards(
        self, own: Tensor, slopes: Mapping[str, Tensor], budget: float, condition: float
    ) -> Mapping[str, Tensor]:
        """Return derivatives without those of scales that would leave their bounds; see :class:`Factor`."""
        if "scales" not in slopes or math.isinf(budget):
            return {}
        found, nearly = slopes["scales"], budget * (1 - 1e-9)
        out = ((own >= nearly) & (found < 0)) | ((own <= -nearly) & (found > 0))
        reached = bool((own.abs() >= nearly).any())
        return {"scales": found.masked_fill(out, 0.0)} if reached else {}


class Sign(Diagonal):
    """Signs: +1 or -1 per generator."""

    name, kind, neutral = "sign", "signs", 1.0

    rung, keeps_norms = Rung.SIGNS, True

    def canonical(self, state: Gathered) -> Canonical:
        """Return the signs determined by the largest entries; inside GL(d) blocks, as diagonal matrices."""
        known = gain_signs(self.structure, state.tensors)
        known = np.where(idle_generators(self.structure, self.forms), idle_signs(self.structure, state.tensors), known)
        sign = torch.from_numpy(find_signs(state.plan, state.gauged, state.reflected, known))
        inside, others = list(self.structure.same), sign.clone()
        for cell, generators in self.in_cells.items():
            inside[cell] = torch.diag(sign[generators].prod(1))
            others[generators] = 1.0
        return Canonical({"dense": tuple(inside), self.name: others})

    @cached_property
    def flips(self) -> sparse.csc_matrix:
        """Indicator of the positions that each generator flips. Shape (positions of all slots, generators)."""
        return odd_entries(self.forms).tocsc()

    def improve(self, search: Search) -> bool:
        """Flip generators where that reduces the distance, one table column at a time."""
        improved = False
        for column in search.open_signs:
            names, slopes = search.slopes(self.flips[:, column])
            flipped = np.unique(column[slopes < 0])
            if search.attempt({self.name: self._flipping(flipped)}, names):
                improved = True
                continue
            for generator in flipped[:, None]:  # generators that act on common entries: one by one
                improved |= search.attempt({self.name: self._flipping(generator)}, names)
        return improved

    def _flipping(self, generators: Ints) -> Tensor:
        return self.identity().index_fill(0, torch.from_numpy(generators), -1.0)

    def veiled(self, signs: bool) -> tuple[set[str], set[str]]:
        """Return the biases that absorb sign changes, and all tensors that signs flip."""
        if not signs:
            return set(), set()
        flips = self.flips.tocsr()
        flipped = {slot.tensor for slot in self.structure.slots if flips[slot.rows].nnz}
        return {bias for bias, _, _, _ in self.structure.absorbed}, flipped

    def brought_to_one(self, rows: Ints, values: Floats) -> tuple[Tensor, Bools]:
        """Return the signs that make values positive; see :class:`Factor`."""
        negative = (values < 0).astype(float)
        found, holds = solved(of_single_units(self.structure, self.forms, rows), rows, negative, modulo_two=True)
        return torch.from_numpy(1 - 2 * found), holds

    @property
    def in_cells(self) -> dict[int, Tensor]:
        """The generators of the units of each GL(d) block. Each of shape (units, generators of a unit), int64."""
        found = {}
        for units, table in zip(self.structure.orbits, self.tables, strict=True):
            own = self.structure.cell_of[units]
            found.update({cell: torch.from_numpy(table[own == cell]) for cell in np.unique(own[own >= 0]).tolist()})
        return found

    def sample(self, draw: Draw) -> Tensor:
        """Draw uniform signs."""
        if not draw.signs:
            return self.identity()
        drawn = torch.randint(0, 2, (self.forms.shape[1],), generator=draw.generator).double() * 2 - 1
        if draw.cycles and len(self.rare) == 1:
            drawn[self.rare] = -1.0
        return self.outside_cells(drawn)

    @cached_property
    def rare(self) -> Ints:
        """The generators outside GL(d) blocks that no column of a table shares with many others."""
        pairs = zip(self.structure.orbits, self.tables, strict=True)
        columns = [column for units, table in pairs if self.structure.cell_of[units[0]] < 0 for column in table.T]
        few = [own for own in map(rising, columns) if len(own) < MANY]
        return rising(np.concatenate([np.zeros(0, np.int64), *few]))

    @property
    def chances(self) -> int:
        """The number of rare generators; a single one flips in each element that moves all units."""
        return len(self.rare) if len(self.rare) > 1 else 0

    def sample_at(self, seen: Slot, values: Factor[Tensor], draw: Draw) -> Tensor:
        """Draw uniform signs; see :class:`Factor`."""
        numbers, _ = self.seen_at(seen, values)
        drawn = 1.0 - 2.0 * torch.randint(0, 2, (len(numbers),), generator=draw.generator).double()
        return self.identity().index_copy(0, numbers, drawn)

    def unlike(self, own: Tensor, other: Tensor) -> Tensor:
        """Return the signs opposite to another part's."""
        return -other

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        """Return the product of two parts; `earlier` acts first."""
        return later * earlier

    def inverse(self, own: Tensor) -> Tensor:
        """Return the inverse of a part."""
        return own

    @property
    def log_order(self) -> float:
        """Natural logarithm of the number of signs that are not matrices of another factor, nor rotations by pi."""
        inside = self.inside + self.structure.phases + sum(cell.size for cell in self.structure.gained)
        inside += sum(rotation.size for rotation in self.structure.rotations if rotation.plain_sign.any())
        return float((self.forms.shape[1] - inside) * np.log(2))

    def multipliers(self, own: Tensor) -> Floats:
        """Return the sign that multiplies each position of all slots before it moves."""
        return np.where(odd(self.forms @ (own < 0).double().numpy()), -1.0, 1.0)

    def check(self, own: Tensor) -> None:
        """Check that a tensor is a part of this factor.

        Raises:
            ValueError: If an entry is neither 1 nor -1.
        """
        super().check(own)
        if not bool((own.abs() == 1).all()):
            raise ValueError("sign holds other numbers than 1 and -1")
