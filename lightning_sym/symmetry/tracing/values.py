"""Tensors of the graph, seen from outside: their shapes, and who acts on them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import distinct_columns
from lightning_sym.symmetry.tracing.constraints import Ints, Label
from lightning_sym.symmetry.tracing.coordinates import rank_within

Path = tuple[Callable[[Tensor], Tensor], ...]

# What a rule should do with values in the place of what it does with tensors.
_EXPECTED = (
    "expected a method of the trace, as trace.join for sums and products, trace.move for indices and views, or "
    "trace.compute(function, value) for any function of torch"
)


@dataclass(frozen=True, eq=False)
class Members:
    """Of which member of a stack (which expert, which head) each element of a value is.

    Attributes:
        number: Elements of one number are of one member; negative ones are of members that the input chose. Of the
            value's shape, int64.
        size: How many members the stack has.
    """

    number: Tensor
    size: int


class InFront(NamedTuple):
    """What half turns add to a value between a bias and a sine.

    Attributes:
        bias: The bias.
        times: By what it is multiplied there.
        axes: The axes of the value on which its entries stand.
        entries: Which entry stands at each place on these.
    """

    bias: str
    times: float
    axes: tuple[int, ...]
    entries: Ints


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph, seen from outside: its shape, and who acts on it.

    Attributes:
        shape: Its shape.
        labels: Who acts on it: usually one label, on the channels; none where nothing does. A parameter has one per
            axis. The labels of one value live on different axes.
        concrete: Its value, where it is made of constants only (indices, masks).
        state: The parameter or buffer that this is, untouched so far.
        offset: What a unit's change of sign adds to it: sigmoid(-x) = 1 - sigmoid(x). Only a linear operation with a
            bias can take it up (docs/theory/intertwiners.md, 1.4).
        by_size: Whether a constant may be another one for an input of another size: it was made from positions (a
            range, a triangle), or is a part of something that is not one number everywhere.
        sources: The values whose elements were only moved to get here, and how they were moved, step by step.
        squared: Whether these are squares of units that orthogonal matrices may mix, so that these do not act on them.
        chooses: The units among which whole numbers choose: each says which of these, in order, it was.
        members: Of which members of a stack its elements are; None if that is not known, or of several.
        half_turned: What half turns of a bias add to it; of values that have a name.
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
            """Raise an error: functions of torch take no values."""
            raise TypeError(f"torch's {getattr(function, '__name__', function)} takes no Value; {_EXPECTED}")

        def __getattr__(self, name):
            known = "" if name.startswith("__") else f"; {_EXPECTED}"  # Python asks for dunder names itself
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
    def is_zero(self) -> bool:
        """Whether this is a constant full of zeros, for inputs of any size."""
        return self.concrete is not None and not self.by_size and not bool(self.concrete.any())

    def with_labels(self, *labels: Label) -> "Value":
        """Return a value of the same shape with other labels."""
        return Value(self.shape, labels)

    def on(self, axes: Sequence[int | None], rank: int) -> "Value":
        """Return what acts on it on other axes, of a tensor with `rank` axes; on those that go to None nothing acts."""
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
    """Return the tensors among an operation's arguments."""
    if isinstance(arguments, Value):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, (tuple, list)):
        return []
    return [value for argument in arguments for value in values_in(argument)]


def filled(number: Any, shape: Sequence[int]) -> Value:
    """Return a constant that is one number everywhere."""
    # In double precision, which holds the least number of every type: masks are filled with it.
    return Value(tuple(shape), concrete=torch.full(tuple(shape), number, dtype=torch.float64))


def numbered(label: Label) -> Ints:
    """Number the positions that one unit and tag hold, in order."""
    return rank_within(distinct_columns(label.atom, label.tag)[1]).reshape(label.atom.shape)
