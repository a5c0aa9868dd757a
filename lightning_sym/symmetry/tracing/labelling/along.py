"""Measure along which axes an operation without a rule acts on each entry by itself, such as a median over the others.

Units on such axes keep their permutations, and scales where the operation is homogeneous. The self-test of
`trace_symmetry` proves what random numbers suggest here.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.graph.running import is_close

_MOST = 2**16  # numbers of a measured tensor
# Operations may differ for large and small numbers. No function is periodic in log(x) with periods log(pi) and log(2).
_FACTORS = (1.0, 1 / math.pi, 2.0**10, 2.0**-10)


class Result(NamedTuple):
    """One result of an operation.

    Attributes:
        places: By axis of the input along which every entry has its own part of the result: the axis of the result.
        exponent: The e with f(t x) = t^e f(x) for t > 0; None if there is none.
        even: Whether f(-x) = f(x).
        odd: Whether f(-x) = -f(x).
    """

    places: dict[int, int]
    exponent: float | None
    even: bool
    odd: bool


def measured_along(
    function: Callable[[Tensor], Any], shape: tuple[int, ...], axes: Collection[int]
) -> list[Result] | None:
    """Measure an operation on random numbers.

    Args:
        function: Maps a float64 tensor to a tensor or several.
        shape: The tensor's shape.
        axes: The axes that matter.

    Returns:
        What each result is; None if the operation is not defined on random numbers, or the tensor is large.
    """
    if math.prod(shape) > _MOST:
        return None
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    moving = {axis: (x.roll(1, axis), _with_first(x, other, axis)) for axis in axes if shape[axis] > 1}

    def run(given: Tensor) -> list[Tensor]:
        found = function(given.clone())
        parts = [own.detach() for own in (found if isinstance(found, (tuple, list)) else [found])]
        return [torch.view_as_real(own) if own.is_complex() else own.double() for own in parts]

    try:
        scaled = [run(factor * x) for factor in _FACTORS]
        negative = run(-x)
        moved = {axis: [[run(factor * own) for own in pair] for factor in _FACTORS] for axis, pair in moving.items()}
    except Exception:  # of any kind: an operation of another package may refuse random numbers
        return None
    runs = [*scaled, negative, *(own for pairs in moved.values() for pair in pairs for own in pair)]
    shapes = {tuple(own.shape for own in each) for each in runs}
    if len(shapes) > 1 or not all(bool(own.isfinite().all()) for own in scaled[0]):
        return None
    found = []
    for at, own in enumerate(scaled[0]):
        places = {}
        for axis, pairs in moved.items():
            each = {
                _place(result[at], one[at], two[at], axis) for result, (one, two) in zip(scaled, pairs, strict=True)
            }
            if len(each) == 1 and (place := each.pop()) is not None:
                places[axis] = place
        exponent = _exponent([result[at] for result in scaled])
        found.append(Result(places, exponent, _equal(negative[at], own), _equal(negative[at], -own)))
    return found


def _with_first(x: Tensor, other: Tensor, axis: int) -> Tensor:
    """Return numbers of which the first along an axis are others."""
    changed = x.clone()
    changed.select(axis, 0).copy_(other.select(axis, 0))
    return changed


def _place(result: Tensor, rolled: Tensor, changed: Tensor, axis: int) -> int | None:
    """Return the axis of a result that holds the entries of an axis of the input, each by itself; None if none does."""
    places: list[int] = [axis, axis - 1, *range(result.ndim)]
    for place in places:
        inside = 0 <= place < result.ndim and result.shape[place] > 1
        if inside and _equal(result.roll(1, place), rolled) and not _equal(result, rolled):
            one, two = (own.narrow(place, 1, own.shape[place] - 1) for own in (result, changed))
            if _equal(one, two):
                return place
    return None


def _exponent(scaled: list[Tensor]) -> float | None:
    """Return the degree of homogeneity, given the results for each of the factors; None if there is none."""
    result = scaled[0].flatten()
    at = int(result.abs().argmax()) if len(result) else 0
    ratio = float(scaled[1].flatten()[at] / result[at]) if len(result) and result[at] != 0 else 0.0
    if not 0 < ratio < math.inf:
        return None
    exponent = round(math.log(ratio, _FACTORS[1]), 9)
    alike = (_equal(own, factor**exponent * scaled[0]) for own, factor in zip(scaled, _FACTORS, strict=True))
    return exponent if all(alike) else None


def _equal(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and is_close(one, two)
