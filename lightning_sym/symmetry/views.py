"""A network's tensors in another dtype: computed on access, and not stored."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_sym._checks import is_finite

Kept = TypeVar("Kept")

_SMALL = 2**14  # tensors of at most so many numbers are cached: gains and biases, which are needed often


def doubled(tensor: Tensor) -> Tensor:
    """Convert a floating tensor to double precision on the CPU; only detach any other."""
    return tensor.detach().to("cpu", torch.float64) if tensor.is_floating_point() else tensor.detach()


def fitting(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert a tensor to another dtype; its numbers must stay finite.

    Raises:
        ValueError: If they do not.
    """
    tensor = tensor.to(dtype)
    if not is_finite(tensor):
        raise ValueError(
            f"{name} would hold numbers that {dtype} does not; expected an element of smaller scales, or a type of "
            "larger range."
        )
    return tensor


class NamedTensors(Mapping[str, Tensor]):
    """Tensors that are made on each access; a subclass sets their names."""

    _names: Collection[str]

    def __contains__(self, name: object) -> bool:  # the default of Mapping would compute the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ConvertedTensors(NamedTensors):
    """Tensors that are converted on each access.

    Args:
        tensors: Tensors by name. Not changed.
        convert: Converts one tensor.
        names: Names to include; by default all.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], convert: Callable[[Tensor], Tensor], names: Collection[str] | None = None
    ) -> None:
        self._tensors, self._convert = tensors, convert
        self._names = dict.fromkeys(name for name in tensors if names is None or name in names)
        self._small: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._small:
            return self._small[name]
        if name not in self._names:
            raise KeyError(name)
        tensor = self._made(name)
        if tensor.numel() <= _SMALL:
            self._small[name] = tensor
        return tensor

    def _made(self, name: str) -> Tensor:
        return self._convert(self._tensors[name])


class FixedTensors(ConvertedTensors):
    """Tensors in double precision that do not change, so that all that is computed from them can be kept.

    Args:
        tensors: Tensors by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors, torch.detach)
        self._kept: dict[str, Any] = {}

    def kept(self, what: str, make: Callable[[], Kept]) -> Kept:
        """Return a value computed from the tensors; the first call computes it, later ones return the same."""
        if what not in self._kept:
            self._kept[what] = make()
        found: Kept = self._kept[what]
        return found
