"""Shifts: what may be added to weights without a change of the function, and which other weights take it off again.

See docs/theory/intertwiners.md, 3.6.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from lightning_sym._distributed import wide
from lightning_sym.symmetry.tracing.invisible import Gains

Ints = NDArray[np.int64]

# What the kinds of shifts are called in tables.
NORM = "biases that batch norms take off"
LINEAR = "biases that linear layers take off"
UNSEEN = "biases that nothing sees"
OPPOSED = "weights against one another"
WRITERS = "means that norms take off"
READERS = "rows that read a layer norm"


@dataclass(frozen=True, eq=False)
class Fold:
    """Gains between which a rotation acts on an axis: there, shifts are counted in multiples of their product.

    What a rotation makes of a shift is then the same for all networks (docs/theory/intertwiners.md, 3.6).

    Attributes:
        axis: The tensor's axis.
        at: Where the rotation's units stand on it. Shape (units,).
        gains: Names of gains, where the units stand in them (shape (units,)), and the powers.
    """

    axis: int
    at: Ints
    gains: tuple[tuple[str, Ints, int], ...]

    def multiples(self, size: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return of what an axis's entries are multiples. Shape (size,), float64, on the CPU."""
        found = torch.ones(size, dtype=torch.float64)
        for name, place, power in self.gains:
            gain = tensors[name].detach().to("cpu", torch.float64).reshape(-1)[torch.from_numpy(place)]
            if power < 0 and bool((gain == 0).any()):
                raise ValueError(
                    f"{name} holds a zero, by which a shift would be divided; expected gains that are not zero, "
                    "or an element without shifts: sample(shifts=False)"
                )
            found[torch.from_numpy(self.at)] *= gain**power
        return found


@dataclass(frozen=True)
class Added:
    """What a shift adds to one tensor.

    Attributes:
        tensor: Its name.
        axes: The axes along which what is added varies as the shift says; along all others it is one number, or a
            multiple of the gains.
        shape: The tensor's sizes along these axes.
        matrix: What is added on these axes, from the shift: (positions, size), sparse; None for the identity.
        axis: The axis of the gains, if there are any.
        gains: Tensors on that axis, and the powers to which they multiply what is added.
        folds: Axes along which it is counted in multiples of gains.
    """

    tensor: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    matrix: sparse.csr_matrix | None = None
    axis: int | None = None
    gains: Gains = ()
    folds: tuple[Fold, ...] = ()

    @property
    def needed(self) -> set[str]:
        """The names of the gains."""
        return {gain for gain, _ in self.gains} | {name for fold in self.folds for name, *_ in fold.gains}

    def of(self, shift: Tensor) -> Tensor:
        """Return what is added on the axes."""
        return (shift if self.matrix is None else torch.from_numpy(self.matrix @ shift.numpy())).reshape(self.shape)


@dataclass(frozen=True)
class TakenOff:
    """A bias that takes off what a shift adds to the input of its linear layer: b - W t.

    Attributes:
        bias: Its name.
        weight: The weight.
        axis: The weight's axis over which the layer sums.
        out: The weight's axis of the outputs.
        matrix: t from the shift: (inputs, size), sparse.
        folds: Of what t is counted in multiples.
        unseen: Directions of the outputs that nobody sees, which are projected away, orthonormal. Shape (outputs,
            directions); None for nothing.
        at: Which entries of the bias take off which outputs. Two arrays of numbers; None for each its own.
        before: The weight in front, without a bias, out of which t comes: the matrix makes t of what that makes.
    """

    bias: str
    weight: str
    axis: int
    out: int
    matrix: sparse.csr_matrix
    folds: tuple[Fold, ...] = ()
    unseen: NDArray[np.float64] | None = None
    at: tuple[Ints, Ints] | None = None
    before: "TakenOff | None" = None

    @property
    def needed(self) -> set[str]:
        """The names of the tensors that say what is taken off."""
        own = {self.weight} | {name for fold in self.folds for name, *_ in fold.gains}
        return own if self.before is None else own | self.before.needed

    def seen(self, taken: Tensor, size: int) -> Tensor:
        """Return what the bias takes off of what the weight makes.

        Args:
            taken: What it makes. Shape (outputs,), or (outputs, entries).
            size: The number of the bias's entries.
        """
        if self.unseen is not None:
            unseen = torch.from_numpy(self.unseen).to(taken)
            taken = taken - unseen @ (unseen.T @ taken)
        if self.at is None:
            return taken
        entries, outputs = (torch.from_numpy(own) for own in self.at)
        return taken.new_zeros(size, *taken.shape[1:]).index_copy(0, entries, taken[outputs])

    def entering(self, shift: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return t. Shape (inputs,), float64."""
        if self.before is not None:
            shift = self.before.made(shift, tensors).double().cpu()
        values = torch.from_numpy(self.matrix @ shift.numpy())
        for fold in self.folds:
            values = values * fold.multiples(len(values), tensors)
        return values

    def made(self, shift: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return what the weight makes of t. Shape (outputs,), float64 where the weight's device has that."""
        weight = tensors[self.weight].detach()
        exact = wide(weight.device)
        flat = (weight.flatten(2).sum(2, dtype=exact) if weight.ndim > 2 else weight).to(exact)
        made: Tensor = torch.tensordot(flat, self.entering(shift, tensors).to(flat), ([self.axis], [0]))
        return made

    def rates(self, tensors: Mapping[str, Tensor]) -> NDArray[np.float64]:
        """Return what the weight makes of each entry of the shift. Shape (outputs, entries), float64."""
        weight = tensors[self.weight].flatten(2).sum(2) if tensors[self.weight].ndim > 2 else tensors[self.weight]
        for fold in self.folds:
            shape = [-1 if axis == self.axis else 1 for axis in range(weight.ndim)]
            weight = weight * fold.multiples(weight.shape[self.axis], tensors).reshape(shape)
        by = weight.movedim(self.axis, 1).numpy() @ self.matrix
        return np.asarray(by if self.before is None else by @ self.before.rates(tensors))


@dataclass(frozen=True)
class Balanced:
    """A bias that takes off what a shift u adds to rows that read a layer norm: b - u sum(beta / gamma).

    Attributes:
        bias: Its name.
        gain: The norm's gain gamma; None for ones.
        offset: The norm's bias beta.
    """

    bias: str
    gain: str | None
    offset: str


def ratio(gain: str | None, offset: str, tensors: Mapping[str, Tensor]) -> float:
    """Return the sum of a layer norm's bias over its gain."""
    bias = tensors[offset].detach().to("cpu", torch.float64)
    if gain is None:
        return float(bias.sum())
    own = tensors[gain].detach().to("cpu", torch.float64)
    if not bool(own.all()):
        raise ValueError(
            f"{gain} holds a zero, by which {offset} would be divided; expected gains that are not zero, or an element "
            "without shifts: sample(shifts=False)"
        )
    return float((bias / own).sum())


@dataclass(frozen=True)
class Shift:
    """A vector that may be added to tensors without a change of the function.

    Attributes:
        kind: What it is called in tables.
        size: Its number of entries.
        added: What it adds, to one tensor after the other. The first names it.
        taken_off: The biases that take off what linear layers make of it.
        balanced: The bias that takes off what rows that read a layer norm make of it.
        pivots: For each entry, where it alone is added, once: (number in `added`, position on its axes). Shape
            (size, 2). None where all entries are added, one by one, to the one tensor.
        norm: For rows that read a layer norm without a bias behind them, the norm's gain and its bias: what is added
            to the rows is added to all else sum(beta / gamma) times, see :class:`Balanced`.
        common: How many of its directions other shifts have, too, besides those that its tensors tell.
    """

    kind: str
    size: int
    added: tuple[Added, ...]
    taken_off: tuple[TakenOff, ...] = ()
    balanced: tuple[Balanced, ...] = ()
    pivots: Ints | None = None
    norm: tuple[str | None, str] | None = None
    common: int = 0

    def times(self, tensors: Mapping[str, Tensor]) -> float:
        """Return how many times it is added to what is not a row that reads a layer norm."""
        return 1.0 if self.norm is None else ratio(*self.norm, tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors to which it is added."""
        return tuple(part.tensor for part in self.added)


@dataclass(frozen=True)
class Shown:
    """What shifts do to a value inside the network.

    Attributes:
        axes: The axes along which it varies what they add.
        added: By the number of a shift, what it adds on these axes: (positions, size), sparse.
        unknown: The numbers of the shifts that add something that depends on the input.
        norms: The numbers of the shifts that are added as many times as a norm says, see :class:`Shift`.
    """

    axes: tuple[int, ...] = ()
    added: tuple[tuple[int, sparse.csr_matrix], ...] = ()
    unknown: tuple[int, ...] = ()
    norms: tuple[tuple[int, tuple[str | None, str]], ...] = ()
