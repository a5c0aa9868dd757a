"""Tensors of the graph as rules know them: shapes and labels."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints, distinct_columns
from lightning_sym.symmetry.tracing.graph.coordinates import rank_within
from lightning_sym.symmetry.tracing.labelling.constraints import Label

Path = tuple[Callable[[Tensor], Tensor], ...]
# By axis of a value: the axis of a result that it becomes; None for an axis that vanishes.
Goes = Sequence[int | None]

# The rest of an error message for torch functions called on values.
_EXPECTED = (
    "expected a method of the trace, as trace.join for sums and products, trace.move for indices and views, or "
    "trace.compute(function, value) for any function of torch"
)


@dataclass(frozen=True, eq=False)
class Members:
    """The member of a stack (expert, head) that each element of a value belongs to.

    Attributes:
        number: Elements with equal numbers belong to the same member; negative numbers are members that the input
            chose. Of the value's shape, int64.
        size: The number of members in the stack.
    """

    number: Tensor
    size: int


class InFront(NamedTuple):
    """The offset that half turns add to a value between a bias and a sine.

    Attributes:
        bias: The bias.
        times: The factor of the bias in the value.
        axes: The value's axes that index the bias's entries.
        entries: The index of the bias's entry at each position of these axes.
    """

    bias: str
    times: float
    axes: tuple[int, ...]
    entries: Ints


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph as a rule knows it: its shape and its labels.

    Attributes:
        shape: Its shape.
        labels: The units that act on it: usually one label, on the channels; none if the group does not act on it. A
            parameter has one per axis. The labels of one value have disjoint axes.
        concrete: The elements of a value made of constants only (indices, masks).
        state: The name of the parameter or buffer that this is, before any operation.
        offset: The constant that a unit's sign change adds: sigmoid(-x) = 1 - sigmoid(x). Norms subtract it, and a
            linear operation with a bias can absorb it (docs/theory/intertwiners.md, 1.4).
        by_size: Whether a constant may differ for inputs of another size. Such constants depend on positions (a range,
            a triangle), or are parts of nonuniform constants.
        sources: Pairs of a source value and the moves, step by step, from its elements to this value.
        squared: Whether these are squares of units that orthogonal matrices may mix; such matrices do not act on
            squares.
        chooses: The units that integers of this value refer to, in order.
        members: The members of a stack that its elements belong to; None if unknown or mixed.
        half_turned: The offset that half turns of a bias add; for named values.
    """

    shape: tuple[int, ...]
    labels: tuple[Label, ...] = ()
    concrete: Tensor | None = None
    state: str | None = None
    offset: float = 0.0
    by_size: bool = False
    sources: "tuple[tuple[Value, Path], ...]" = ()
    squared: bool = False
    chooses: Label | None = None
    members: Members | None = None
    half_turned: InFront | None = None

    if not TYPE_CHECKING:  # type checkers find these mistakes themselves

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            """Raise an error: torch functions do not accept values."""
            raise TypeError(f"torch's {getattr(function, '__name__', function)} takes no Value; {_EXPECTED}")

        def __getattr__(self, name):
            known = "" if name.startswith("__") else f"; {_EXPECTED}"  # Python itself looks up dunder names
            raise AttributeError(f"a Value has no {name!r}{known}")

        def _refused(self, *others):
            raise TypeError(f"operators and indices take no Value; {_EXPECTED}")

        __getitem__ = __neg__ = __abs__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refused
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refused

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def of_state(self) -> bool:
        """Whether this is a parameter or buffer, perhaps after moves."""
        return all(root.state is not None for root, _ in self.sources or ((self, ()),))

    @property
    def is_zero(self) -> bool:
        """Whether this is an all-zero constant for inputs of any size."""
        return self.concrete is not None and not self.by_size and not bool(self.concrete.any())

    def with_labels(self, *labels: Label) -> "Value":
        """Return a value of the same shape with other labels."""
        return Value(self.shape, labels)

    def on(self, axes: Goes, rank: int) -> "Value":
        """Return the value on other axes of a tensor with ``rank`` axes; axes mapped to None lose their labels."""
        sizes = [1] * rank
        for size, target in zip(self.shape, axes, strict=True):
            if target is not None:
                sizes[target] = size
        labels = []
        for label in self.labels:
            targets = [target for axis in label.axes if (target := axes[axis]) is not None]
            if len(targets) == len(label.axes):
                order = sorted(range(len(targets)), key=targets.__getitem__)
                labels.append(label.moved(tuple(sorted(targets)), functools.partial(np.transpose, axes=order)))
        if self.concrete is None or None in axes:
            return Value(tuple(sizes), tuple(labels))
        order = sorted(range(self.ndim), key=lambda axis: axes[axis] or 0)
        return Value(tuple(sizes), concrete=self.concrete.permute(order).reshape(sizes), by_size=self.by_size)


def values_in(arguments: Any) -> list[Value]:
    """Return all values among an operation's arguments."""
    if isinstance(arguments, Value):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, (tuple, list)):
        return []
    return [value for argument in arguments for value in values_in(argument)]


def filled(number: Any, shape: Sequence[int]) -> Value:
    """Return a constant with equal elements."""
    # In double precision, which can represent the minimum of every dtype: masks contain these.
    return Value(tuple(shape), concrete=torch.full(tuple(shape), number, dtype=torch.float64))


def numbered(label: Label) -> Ints:
    """Number the positions of each pair of unit and tag, in order."""
    return rank_within(distinct_columns(label.atom, label.tag)[1]).reshape(label.atom.shape)
