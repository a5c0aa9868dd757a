"""Contractions by letters, as in ``torch.einsum``."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.affine.values import Value


class Sum(NamedTuple):
    """A contraction by letters: those of both factors and of the result."""

    one: str
    two: str
    out: str

    @property
    def gone(self) -> str:
        """The summed letters."""
        return "".join(letter for letter in self.one if letter not in self.out)

    @property
    def turned(self) -> "Sum":
        """The same contraction with exchanged factors."""
        return Sum(self.two, self.one, self.out)

    @property
    def equation(self) -> str:
        """The equation for `torch.einsum`."""
        return f"{self.one},{self.two}->{self.out}"


def aligned(array: Tensor, letters: str, out: str, lead: int = 0) -> Tensor:
    """Rearrange a thin array to other letters; missing axes have size 1, and removed axes must have size 1."""
    array = array.reshape(
        [
            *array.shape[:lead],
            *(size for letter, size in zip(letters, array.shape[lead:], strict=True) if letter in out),
        ]
    )
    own = [letter for letter in letters if letter in out]
    order = sorted(range(len(own)), key=lambda at: out.index(own[at]))
    array = array.permute((*range(lead), *(lead + at for at in order)))
    sizes = {own[at]: size for at, size in zip(order, array.shape[lead:], strict=True)}
    return array.reshape([*array.shape[:lead], *(sizes.get(letter, 1) for letter in out)])


def equation_shape(one: Value, two: Value, first: str, second: str, out: str) -> tuple[int, ...]:
    """Return the shape of a contraction."""
    sizes = dict(zip(first + second, (*one.shape, *two.shape), strict=True))
    return tuple(sizes[letter] for letter in out)


def size_of_products(numbers: Tensor, weights: Value, by: Sum) -> int:
    """Return the number of products that a contraction of a thin array with weights sums."""
    sizes = dict(zip(by.one, numbers.shape, strict=True)) | dict(zip(by.two, weights.shape, strict=True))
    return math.prod(sizes.values())


def at_origin(numbers: Tensor, weights: Value) -> Tensor:
    """Arrange a parameter's translation along the axes of a value that shows the parameter."""
    assert weights.origin is not None
    index = [
        at if numbers.shape[axis] > 1 else torch.zeros((1,) * weights.rank, dtype=torch.int64)
        for axis, at in enumerate(weights.origin[1])
    ]
    return numbers[tuple(index)]
