"""Adds the shifts that only the affine interpreter finds to those of the older walk, and says what neither expresses.

See docs/theory/intertwiners.md, 3.6.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.described import joined, listed
from lightning_sym.symmetry.statistics import rank_of
from lightning_sym.symmetry.tracing.affine.as_shifts import as_shifts
from lightning_sym.symmetry.tracing.affine.solution import Generic
from lightning_sym.symmetry.tracing.affine.translations import Translations, find_translations
from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.shifts import Shift, Shown
from lightning_sym.symmetry.translations import rates, size_of

_MOST_PLACES = 1_000_000  # outputs of weights and entries of biases up to which translations are searched
_MOST_ENTRIES = 2**24  # of a dense matrix of all directions, up to which further shifts are used
_EXACT = 1e-8  # by how much two elements, one after the other, differ at most from their product


class Further(NamedTuple):
    """What the affine interpreter adds.

    Attributes:
        options: All shifts, in several ways, the best first: each with its number among those from before, or None.
        dimension: The dimension of all translations; None if it was not counted.
        left: The names of tensors of which some translations are not expressed as shifts.
        why_not: Why the dimension was not counted.
        blind: Which users' rules do not say what may be added to values.
    """

    options: list[list[tuple[Shift, int | None]]]
    dimension: int | None
    left: list[str]
    why_not: str = ""
    blind: tuple[str, ...] = ()

    def notes(self, used: int) -> list[str]:
        """Say what shifts of a network do not use.

        Args:
            used: The dimension of those that the network has, and of its tilts.
        """
        if self.dimension is None:
            return [f"whether more may be added to weights than shifts say was not searched, as {self.why_not}"]
        count = self.dimension - used
        if count <= 0:
            return [*self.blind]
        names = listed(joined(self.left)) or "tensors whose shifts depend on one another"
        return [
            *self.blind,
            f"{count} more dimensions of what may be added to weights are not used, as no shift expresses them: "
            f"{names}",
        ]


def shown_by(option: Sequence[tuple[Shift, int | None]], shown: Mapping[str, Shown]) -> dict[str, Shown]:
    """Return what shifts do to named values, by their new numbers; what further ones do is unknown.

    Args:
        option: All shifts, and their numbers among those from before.
        shown: What those from before do.
    """
    number = {old: new for new, (_, old) in enumerate(option) if old is not None}
    more = tuple(new for new, (_, old) in enumerate(option) if old is None)
    return {
        name: replace(
            own,
            added=tuple((number[index], matrix) for index, matrix in own.added if index in number),
            unknown=(*(number[index] for index in own.unknown if index in number), *more),
            norms=tuple((number[index], norm) for index, norm in own.norms if index in number),
        )
        for name, own in shown.items()
    }


def find_further(
    captures: Sequence[Capture], tensors: Mapping[str, Tensor], constants: Collection[str], shifts: Sequence[Shift]
) -> Further:
    """Find all translations of a network, and write those as shifts that it does not have yet.

    Args:
        captures: The network, captured on one example or several.
        tensors: Its parameters and buffers by name.
        constants: The names of those that are in no state dict.
        shifts: Those that were found before.
    """
    if sum(sum(tensor.shape) for name, tensor in tensors.items() if name not in constants) > _MOST_PLACES:
        return Further([], None, [], "the network is too large")
    try:
        found = find_translations(captures, tensors, constants)
    except Exception as error:  # an operation that the interpreter does not know, in a form that it does not expect
        return Further([], None, [], f"the affine interpreter stopped ({type(error).__name__}: {error})")
    dimension, blind = found.dimension, tuple(found.system.blind)
    if dimension <= size_of(shifts):
        return Further([], dimension, [], blind=blind)
    written = as_shifts(found)
    left = list(dict.fromkeys(name for names in written.left for name in names))
    weights = sum(tensor.numel() for name, tensor in tensors.items() if name in found.system.movable)
    if weights * found.size > _MOST_ENTRIES:
        left = list(dict.fromkeys([*left, *(own.names[0] for own in written.shifts)]))
        return Further([], dimension, left, blind=blind)
    return Further(_Choice(found, shifts, written.shifts).options(), dimension, left, blind=blind)


class _Choice:
    """Chooses between shifts from before and further ones, by their directions at generic weights.

    Args:
        found: All translations.
        shifts: The shifts from before.
        further: Further ones.
    """

    def __init__(self, found: Translations, shifts: Sequence[Shift], further: Sequence[Shift]) -> None:
        tensors = Generic(found.system)
        names = [name for name in tensors if name in found.system.movable]
        every = sparse.csr_matrix(found.vectors(tensors, names).numpy().T)
        self.shifts, self.columns = shifts, {}
        rank = rank_of(every)
        for shift in (*shifts, *further):
            rows = {name: sparse.csr_matrix((tensors[name].numel(), shift.size)) for name in names}
            for name, matrix in rates(shift, tensors, [*shifts, *further]):
                rows[name] = rows[name] + matrix
            self.columns[id(shift)] = sparse.vstack(list(rows.values())).tocsr()
        # What is written as a shift has to be a translation.
        self.further = [
            own for own in further if rank_of(sparse.hstack([every, self.columns[id(own)]]).tocsr()) == rank
        ]

    def rank(self, shifts: Sequence[Shift]) -> int:
        """Return in how many directions shifts move weights."""
        return rank_of(sparse.hstack([self.columns[id(shift)] for shift in shifts]).tocsr()) if shifts else 0

    def options(self) -> list[list[tuple[Shift, int | None]]]:
        """Return shifts that say more than those from before do: further ones alone, or besides these."""
        most = self.rank([*self.shifts, *self.further])
        if most == self.rank(self.shifts):
            return []
        found = []
        if self.rank(self.further) == most:
            found.append(self._counted([(shift, None) for shift in self.further]))
        besides: list[tuple[Shift, int | None]] = [(shift, number) for number, shift in enumerate(self.shifts)]
        for shift in sorted(self.further, key=lambda own: own.pivots is not None):
            own, names = [shift for shift, _ in besides], set(shift.names)
            if self.rank([*own, shift]) > self.rank(own):
                alone = self.rank([shift])
                besides = [
                    (old, at) for old, at in besides if not names & set(old.names) or self.rank([shift, old]) > alone
                ]
                besides.append((shift, None))
        return [*found, self._counted(besides)]

    def _counted(self, option: Sequence[tuple[Shift, int | None]]) -> list[tuple[Shift, int | None]]:
        """Count once what shifts have in common: the last of them say how much that is."""
        shifts = [shift for shift, _ in option]
        common = size_of(shifts) - self.rank(shifts)
        last = max((at for at, (_, old) in enumerate(option) if old is None), default=0)
        return [(replace(shift, common=common) if at == last else shift, old) for at, (shift, old) in enumerate(option)]


def laws_hold(symmetry: Symmetry, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether random elements act one after the other as their product does, and their inverses undo them.

    Args:
        symmetry: Of a network.
        tensors: The network's parameters and buffers, of which shapes count but for constants.
    """
    generator = torch.Generator().manual_seed(0)
    own = {
        name: tensor if not tensor.is_floating_point() or name not in symmetry.layout
        else 0.5 + torch.rand(tensor.shape, dtype=torch.float64, generator=generator)
        for name, tensor in tensors.items()
    }  # fmt: skip
    first, second = (symmetry.sample(generator, scale=0.3) for _ in range(2))
    try:
        moved = symmetry.act_on(first, own)
        pairs = [
            (symmetry.act_on(second, moved), symmetry.act_on(symmetry.compose(second, first), own)),
            (symmetry.act_on(symmetry.inverse(first), moved), own),
        ]
    except ValueError:
        return False
    return all(
        float((one[name] - two[name]).abs().max()) <= _EXACT * float(two[name].abs().max())
        for one, two in pairs
        for name in own
        if own[name].is_floating_point() and own[name].numel()
    )
