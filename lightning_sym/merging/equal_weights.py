"""Test whether networks of one function have the same weights, in one reading of both."""

import math

import torch
from torch import Tensor, nn

from lightning_sym._distributed import wide
from lightning_sym.merging.equality import Equality
from lightning_sym.symmetry.tracing.capture import state_tensors

# Largest difference of a slice, in units of its rounding. Moved copies that are stored in single precision differ by 3.
_TIMES = 10.0
_AT_ONCE = 2**18  # numbers compared at once


def equal_weights(a: nn.Module, b: nn.Module, rounding: float) -> Equality:
    """Compare all slices (rows, columns) of the tensors of two networks with the rounding of their numbers.

    The limit is half of that of :func:`lightning_sym.merging.equality.weight_difference`, which in addition allows for
    errors of the other network's numbers: networks that pass here pass there.

    Args:
        a: The reference.
        b: A network of the same function.
        rounding: Relative rounding error of the numbers.

    Returns:
        "equal", or the "same function" with a slice that differs by more. No inputs are tried.
    """
    worst, where, theirs = 0.0, "no weight", state_tensors(b)
    for name, own in sorted(state_tensors(a).items(), key=lambda named: named[1].numel()):
        one, two = own.detach(), theirs[name].detach().to(own.device)
        if name.endswith("num_batches_tracked") or torch.equal(one, two):
            continue
        times, place = _largest(one, two, _TIMES * rounding) if one.is_floating_point() else (math.inf, "")
        if not times <= worst:  # NaN counts
            worst, where = times, name + place
        if not worst <= 1:
            return Equality("same function", worst, where, 0)
    return Equality("equal", worst, where, 0)


def _largest(one: Tensor, two: Tensor, allowed: float) -> tuple[float, str]:
    """Return the largest difference of a slice relative to an allowed part of its norm, and its place."""
    if one.ndim < 2:
        one, two = one.reshape(-1, 1), two.reshape(-1, 1)
    found = [torch.zeros(2, size, dtype=wide(one.device), device=one.device) for size in one.shape]
    step = max(_AT_ONCE * len(one) // max(one.numel(), 1), 1)
    for start in range(0, len(one), step):
        at = slice(start, start + step)
        x, y = (own[at].to(torch.promote_types(own.dtype, torch.float32)) for own in (one, two))
        for place, own in enumerate((torch.where(x == y, 0.0, x - y), x)):  # masks hold equal infinities
            squares = own.square()
            for axis, totals in enumerate(found):
                others = [other for other in range(own.ndim) if other != axis]
                totals[place, at if axis == 0 else slice(None)] += squares.sum(others, dtype=totals.dtype)
    worst, where = 0.0, ""
    for axis, (apart, whole) in enumerate(found):
        times = torch.where(apart != 0, apart.sqrt() / (allowed * whole.sqrt()), 0.0)
        if times.numel() and not float(times.max()) <= worst:
            worst, where = float(times.max()), f" at {int(times.argmax())} of axis {axis}"
    return worst, where
