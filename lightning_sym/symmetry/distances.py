"""Distances and inner products of tensors, without temporary tensors of their size."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sym._distributed import wide

_AT_ONCE = 2**20  # number of entries compared at once


def inner(one: Tensor, two: Tensor) -> float:
    """Return the inner product of two tensors of one shape and dtype."""
    return float(torch.dot(one.reshape(-1), two.reshape(-1)))


def squared_difference(one: Tensor, two: Tensor) -> float:
    """Return the squared distance of two tensors of one shape and dtype, without a temporary tensor of their size."""
    if one.numel() <= _AT_ONCE:
        difference = one - two
        return inner(difference, difference)
    ones, twos = (torch.split(tensor.reshape(-1), _AT_ONCE) for tensor in (one, two))
    return math.fsum(squared_difference(*pair) for pair in zip(ones, twos, strict=True))


def squared_distance(ones: Mapping[str, Tensor], twos: Mapping[str, Tensor]) -> float:
    """Return the squared Euclidean distance between tensors of equal names, which may be on different devices."""
    return math.fsum(_squared_distance(one, twos[name].to(one)) for name, one in ones.items())


def _squared_distance(one: Tensor, two: Tensor) -> float:
    parts = zip(*(torch.split(tensor.detach().reshape(-1), _AT_ONCE) for tensor in (one, two)), strict=True)
    return math.fsum(float((x - y).square().sum(dtype=wide(x.device))) for x, y in parts)
