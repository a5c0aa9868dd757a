"""Labels of values that receive some elements from another value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools
from lightning_sym.symmetry.tracing.labelling.constraints import Label
from lightning_sym.symmetry.tracing.labelling.values import Value
from lightning_sym.symmetry.tracing.labelling.vocabulary import Trace


def overwrite(trace: Trace, base: Value, where: Tensor, new: Value) -> Value:
    """Write a value into elements of another value, and return the result.

    Args:
        trace: The trace.
        base: The value that is written into.
        where: For each element of `new`, its destination as a position in the flattened `base`. Shape of `new`, int64,
            without repetition.
        new: The written value.
    """
    where = where.reshape(-1)
    inside = torch.zeros(math.prod(base.shape), dtype=torch.bool)
    inside[where] = True
    inside = inside.reshape(base.shape)

    def put(tensor: Tensor) -> Tensor:
        result = torch.zeros(inside.numel(), dtype=tensor.dtype)
        result[where] = tensor.reshape(-1)
        return result.reshape(base.shape)

    return choose(trace, inside, new, put, base)


def choose(trace: Trace, inside: Tensor, new: Value, put: Callable[[Tensor], Tensor], base: Value) -> Value:
    """Combine two values: the first one at some positions, the second one elsewhere.

    Args:
        trace: The trace.
        inside: The positions of the first value. Shape of the result, bool.
        new: The first value.
        put: Moves it to the result's shape; elements outside ``inside`` are ignored.
        base: The second value, of the result's shape.
    """

    def show(tensor: Tensor) -> Tensor:
        moved = put(tensor)
        return torch.where(inside, moved, torch.zeros((), dtype=moved.dtype))

    def keep(tensor: Tensor) -> Tensor:
        return torch.where(inside, torch.zeros((), dtype=tensor.dtype), tensor)

    if base.concrete is not None and new.concrete is not None:
        chosen = torch.where(inside, put(new.concrete), base.concrete)
        return replace(base, concrete=chosen, by_size=base.by_size or new.by_size)
    if not bool(inside.any()):
        return base
    if bool(inside.all()):
        return trace.carry(new, trace.move(new, put), put)
    # Each value is zero at the positions of the other, so the result is a sum.
    added, kept = _placed(trace, new, show, inside), _placed(trace, base, keep, ~inside)
    for value, shown in ((added, inside), (kept, ~inside)):
        for label in value.labels:
            _see_where(trace, label, shown)
    axes = list(dict.fromkeys(label.axes for value in (added, kept) for label in value.labels))

    def followed(result: Value) -> Value:
        return trace.carry(base, trace.carry(new, result, show), keep)

    if not axes:
        return followed(base.with_labels())
    parts = [
        _completed(trace, value, axes, shown if old.concrete is None else trace.move(old, move))
        for value, old, shown, move in ((added, new, inside, show), (kept, base, ~inside, keep))
    ]
    alive_anywhere = torch.zeros_like(inside)
    for value, shown, move in ((new, inside, show), (base, ~inside, keep)):
        alive_anywhere |= shown if value.concrete is None else move(value.concrete) != 0
    result = trace.join(*parts, product=False)
    for label in result.labels:
        # Units that are always zero (channels added by padding) can be permuted and rescaled.
        alive = _along(alive_anywhere, label.axes)
        trace.constraints.restrict(label.at(~alive))
    return followed(result)


def _see_where(trace: Trace, label: Label, shown: Tensor) -> None:
    """Record the visible positions of units; only units with equal positions can be permuted."""
    label = trace.constraints.resolve(label)
    others = [axis for axis in range(shown.ndim) if axis not in label.axes]
    rows = shown.permute((*label.axes, *others)).reshape(label.size, -1).numpy()
    _, kind = np.unique(rows, axis=0, return_inverse=True)
    tag = trace.constraints.derive_tags(label.tag.ravel(), kind.ravel())
    trace.see(Label((), label.atom.ravel(), tag, label.scale.ravel()).at(rows.any(1)))


def _along(mask: Tensor, axes: tuple[int, ...]) -> Bools:
    """Return a mask of positions on some axes with a true entry along the others."""
    others = [axis for axis in range(mask.ndim) if axis not in axes]
    result: Bools = (mask.any(others) if others else mask).numpy()
    return result


def _placed(trace: Trace, value: Value, function: Any, shown: Tensor) -> Value:
    """Move a value to its positions among zeros."""
    with trace.constraints.unrestricted():  # the zeros are future units, including mixtures of them
        result: Value = trace.move(value, function)
    labels = []
    for label in result.labels:
        # A unit that fills the value fills only a part of the result; the other positions are other units.
        axes = tuple(a for a in range(shown.ndim) if bool((shown != shown.narrow(a, 0, 1)).any()))
        if label.axes or not axes:
            labels.append(label)
            continue
        held = _along(shown, axes)
        spread = trace.constraints.fresh(axes, held.shape)
        atom, tag, scale = (
            np.where(held, own, other)
            for own, other in zip(trace.constraints.resolve(label).parts, spread.parts, strict=True)
        )
        if held.sum() > 1:
            tag = trace.constraints.derive_tags(tag, np.arange(tag.size).reshape(tag.shape))
        labels.append(Label(axes, atom, tag, scale))
    return replace(result, labels=tuple(labels))


def _completed(trace: Trace, value: Value, axes: Sequence[tuple[int, ...]], content: Value | Tensor) -> Value:
    """Add labels to a value such that it has labels on all given axes.

    Args:
        trace: The trace.
        value: Has labels on some of the axes.
        axes: The axes to label.
        content: The value itself if it is constant; otherwise a bool mask of its nonzero entries, which become fixed.
    """
    labels = list(value.labels)
    for own in axes:
        if any(label.axes == own for label in labels):
            continue
        shape = tuple(value.shape[axis] for axis in own)
        label = trace.constraints.fresh(own, shape)
        if isinstance(content, Tensor):
            trace.constraints.fix(label.at(_along(content, own)))
        else:
            label = trace.beside_constant(label, content, added=True)
        labels.append(label)
    return value.with_labels(*labels)
