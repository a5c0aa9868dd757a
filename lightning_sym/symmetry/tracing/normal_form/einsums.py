"""Test whether a function is a mean of a value, or a sum of products of two values, over whole axes."""

import string
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.graph.running import UnlikeError, is_close
from lightning_sym.symmetry.tracing.normal_form.layers import Bilinear, find_meeting, indices


def find_sum(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], shown: tuple[int, ...]
) -> tuple[list[int], float]:
    """Find the summed axes of a function.

    Args:
        function: Maps a value of the first shape to one of the second.
        shape: The first shape.
        shown: The second shape: the remaining axes in order, perhaps with axes of size 1.

    Returns:
        The axes, and a number that multiplies the sum.

    Raises:
        Exception: One of :data:`NOT_ON_NUMBERS`, if it is no sum over whole axes.
    """
    place = tuple(size // 2 for size in shown)
    met = find_meeting(lambda one, value: one * function(value), (1,) * len(shown), shape, place)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    axes = sorted(met.summed)
    total = value.sum(axes) * met.factor
    alike = axes and [n for n in total.shape if n > 1] == [n for n in shown if n > 1]
    if not alike or not is_close(total.reshape(-1), function(value).reshape(-1)):
        raise UnlikeError
    return axes, met.factor


def find_contraction(
    function: Bilinear, first: tuple[int, ...], second: tuple[int, ...], shown: tuple[int, ...]
) -> tuple[str, float]:
    """Find the summed axes of a function that adds products of two values.

    Args:
        function: Bilinear.
        first: The shape of its first argument.
        second: The shape of its second argument.
        shown: The shape of its result.

    Returns:
        The equation for `torch.einsum`, and a number that multiplies the sum of products.

    Raises:
        Exception: One of :data:`NOT_ON_NUMBERS`, for other functions.
    """
    centre = tuple(size // 2 for size in shown)
    met = find_meeting(function, first, second, centre)
    letters = iter(string.ascii_letters)
    one: list[str | None] = [None] * len(first)
    two: list[str | None] = [None] * len(second)
    out = [next(letters) for _ in shown]
    for axis in met.summed:
        line = met.met[tuple(slice(None) if axis == at else place for at, place in enumerate(met.one))]
        steps = indices(line - 1, first).diff(dim=0)
        (moving,) = steps[0].nonzero().T
        one[int(moving)] = two[axis] = next(letters)
    for axis, size in enumerate(shown):
        if size == 1:
            continue
        other = tuple(place - (axis == at) for at, place in enumerate(centre))
        beside = find_meeting(function, first, second, other)
        starts = (indices(each.met[each.one][None] - 1, first)[0] for each in (met, beside))
        moves = (next(starts) - next(starts), torch.tensor(met.one) - torch.tensor(beside.one))
        for names, move in ((one, moves[0]), (two, moves[1])):
            for at in move.nonzero().ravel().tolist():
                names[at] = out[axis]
    given = [[name or next(letters) for name in names] for names in (one, two)]
    read = {*given[0], *given[1]}
    equation = f"{''.join(given[0])},{''.join(given[1])}->{''.join(name for name in out if name in read)}"
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (first, second)]
    found = torch.einsum(equation, values) * met.factor
    if not is_close(found.reshape(shown), function(values[0], values[1])):
        raise UnlikeError
    return equation, met.factor
