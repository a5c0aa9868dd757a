"""Half turns of sines and cosines (docs/theory/intertwiners.md, 2.17)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints, odd, on_axes
from lightning_sym.symmetry.described import listed
from lightning_sym.symmetry.elements import Tap
from lightning_sym.symmetry.group.diagonal import Sign
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import MANY, Additive, Draw
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, Wanted
from lightning_sym.symmetry.group.search import Search
from lightning_sym.symmetry.rearranging import Summand

_MOST = 2  # half turns of a random element, in either direction


class HalfTurn(Additive):
    """Whole numbers of half periods added to biases before sines; odd numbers flip the outgoing weights.

    Together with the signs, they form the infinite dihedral group of each unit.
    """

    name, bounded = "half_turn", True

    @property
    def size(self) -> int:
        """The number of entries of a part."""
        return len(self.structure.half_turns.place)

    def sample(self, draw: Draw) -> Tensor:
        """Draw uniform integers from -2 to 2; even ones where odd ones are not allowed.

        The part is the identity without signs or without translations, as half turns change both.
        """
        if not (draw.signs and draw.shifts and self.size):
            return self.identity()
        drawn = torch.randint(-_MOST, _MOST + 1, (self.size,), generator=draw.generator).double()
        return torch.where(torch.from_numpy(self.structure.half_turns.odd), drawn, 2 * (drawn / 2).trunc())

    @property
    def chances(self) -> int:
        """The number of half turns, if they are few."""
        return self.size if self.size < MANY else 0

    def carried(self, own: Tensor, by: Element, back: Element) -> Tensor:
        """Permute the numbers along with their entries, with the signs of the biases; see :class:`Factor`."""
        sign = self.group["sign"]
        assert isinstance(sign, Sign)
        place = self.structure.half_turns.place
        signed = own * torch.from_numpy(sign.multipliers(by.sign)[place])
        return signed[torch.from_numpy(self._number[self.group.source(by.permutation)[place]])]

    @cached_property
    def _number(self) -> Ints:
        """Index of the half turn at each position of all slots, or -1."""
        number = np.full(self.structure.magnitudes.shape[0], -1)
        number[self.structure.half_turns.place] = np.arange(self.size)
        return number

    def multipliers(self, own: Tensor) -> Floats:
        """Return the sign that multiplies each position of all slots before it moves."""
        numbers = own.numpy() % 2
        return np.where(odd(self.structure.half_turns.flips @ numbers), -1.0, 1.0)

    def added(self, own: Tensor, tensors: Mapping[str, Tensor]) -> Mapping[str, Sequence[Summand]]:
        """Return the summands of biases; see :class:`Factor`."""
        amount = own * torch.from_numpy(self.structure.half_turns.size)
        return {name: [Summand(amount[at])] for name, at in self.parts.items() if bool(amount[at].any())}

    def shown(self, own: Tensor, tap: Tap, tensors: Mapping[str, Tensor] | None) -> Tensor | None:
        """Return the translation of a value between the bias and the sine; None if it is zero."""
        front = tap.in_front
        if front is None or front.bias not in self.parts:
            return None
        at, size = self.parts[front.bias], self.structure.half_turns.size
        amount = (front.times * own.numpy() * size)[at][front.entries]
        shown = torch.from_numpy(on_axes(amount.ravel(), amount.shape, front.axes, len(tap.shape)))
        return shown if bool(shown.any()) else None

    @cached_property
    def parts(self) -> dict[str, slice]:
        """The half turns of each bias."""
        found, first = {}, 0
        for name, count in zip(self.structure.half_turns.biases, self.structure.half_turns.counts, strict=True):
            found[name] = slice(first, first + count)
            first += count
        return found

    def describe(self) -> Iterable[str]:
        """Yield a line on the biases that absorb half periods."""
        turns = self.structure.half_turns
        if self.size:
            some = "" if turns.odd.all() else f" ({int((~turns.odd).sum())} of them in even numbers only)"
            yield (
                f"half turns, {self.size} of sines and cosines, absorbed by biases{some}: " + listed(list(turns.biases))
            )

    def concerned(self, wanted: Wanted) -> bool:
        """Return whether half turns are part of the form: only where signs may change."""
        return wanted.signs and self.size > 0

    def canonical(self, state: Gathered) -> Canonical:
        """Return the half turns that bring biases into (-p / 2, p / 2], with p half a period, or a whole one."""
        turns, found, tensors = self.structure.half_turns, self.identity(), state.tensors
        for name, at in self.parts.items():
            bias = tensors[name].detach().to("cpu", torch.float64)
            step = torch.where(torch.from_numpy(turns.odd[at]), 1.0, 2.0)
            size = torch.from_numpy(turns.size[at]) * step
            found[at] = -(bias / size - 0.5).ceil() * step  # into (-size / 2, size / 2]
        return Canonical({self.name: found})

    def veiled(self, signs: bool) -> tuple[set[str], set[str]]:
        """Return the biases, and all tensors that odd numbers flip."""
        turns = self.structure.half_turns
        if not (signs and self.size):
            return set(), set()
        return {*turns.biases, *(slot.tensor for slot in self.structure.slots if turns.flips[slot.rows].nnz)}, set()

    def improve(self, search: Search) -> bool:
        """Add half turns, with or without a sign change of the unit, where that reduces the distance."""
        if not (search.signs and self.size):
            return False
        improved, sign = False, self.group["sign"]
        for with_sign in (False, True):
            acting, flipped = self._reflected if with_sign else (self.structure.half_turns.flips.tocsc(), None)
            names, slopes = search.slopes(acting)
            gained, step = self._gained(search, -1.0 if with_sign else 1.0)
            gained -= 4 * slopes
            if flipped is not None:
                gained[flipped < 0] = 0.0
            better = np.flatnonzero(gained > 0)
            rest = [better[[at]] for at in np.argsort(-gained[better])] if len(better) > 1 else []
            for chosen in (better, *rest):
                if not len(chosen):
                    break
                parts = {self.name: self.identity(), sign.name: sign.identity()}
                parts[self.name][torch.from_numpy(chosen)] = torch.from_numpy(step[chosen])
                if flipped is not None:
                    parts[sign.name][torch.from_numpy(flipped[chosen])] = -1.0
                if search.attempt(parts, [*self.parts, *names]):
                    improved = True
                    if chosen is better:
                        break
        return improved

    @cached_property
    def _reflected(self) -> tuple[sparse.csc_matrix, Ints]:
        """The joint action of half turns and the signs of their units.

        Positions that both flip together, except those of the biases, shape (positions, half turns); and the sign
        generators, -1 where there is none, shape (half turns,).
        """
        turns, signs, sign = self.structure.half_turns, self.structure.signs, self.group["sign"]
        assert isinstance(sign, Sign)
        start, count = signs.indptr[turns.place], np.diff(signs.indptr)[turns.place]
        able = (count == 1) & turns.odd
        flipped = np.where(able, signs.indices[np.minimum(start, len(signs.indices) - 1)], -1)
        acting = (turns.flips + sign.flips[:, np.maximum(flipped, 0)]).tolil()
        acting[turns.place, np.arange(self.size)] = 0
        acting = acting.tocsc()
        acting.data = np.mod(acting.data, 2)
        acting.eliminate_zeros()
        return acting, flipped

    def _gained(self, search: Search, sign: float) -> tuple[Floats, Floats]:
        """Return the largest decrease of the biases' squared distance, and the half turns that achieve it.

        Args:
            search: The search.
            sign: -1 if the biases change sign after the half turns, else 1.
        """
        turns = self.structure.half_turns
        gained, step = np.zeros(self.size), np.where(turns.odd, 1.0, 2.0)
        for name, at in self.parts.items():
            ours, theirs = (own[name].double().cpu().numpy() for own in (search.target, search.current))
            up, down = (
                np.square(ours - theirs) - np.square(ours - sign * (theirs + k * turns.size[at]))
                for k in (step[at], -step[at])
            )
            gained[at], step[at] = np.maximum(up, down), np.where(up >= down, step[at], -step[at])
        return gained, step

    def check(self, own: Tensor) -> None:
        """Check that a tensor is a part of this factor.

        Raises:
            ValueError: If an entry is not an integer, or odd where only even ones are allowed.
        """
        super().check(own)
        step = torch.where(torch.from_numpy(self.structure.half_turns.odd), 1.0, 2.0)
        if not bool((own % step == 0).all()):
            raise ValueError("half_turn holds numbers that are not whole, or odd ones where only even ones are allowed")
