"""A network's tensors as they would be in another dtype: made when asked for, and not kept."""

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

_SMALL = 2**14  # tensors of so many numbers are kept: gains and biases, which are asked for again and again


def doubled(tensor: Tensor) -> Tensor:
    """Return a floating tensor in double precision on the CPU, any other as it is."""
    return tensor.detach().to("cpu", torch.float64) if tensor.is_floating_point() else tensor.detach()


class ConvertedTensors(Mapping[str, Tensor]):
    """Tensors of which each is converted whenever it is asked for.

    Args:
        tensors: By name. Not changed.
        convert: What becomes of one.
        names: Those that there are; by default all.
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

    def __contains__(self, name: object) -> bool:  # that of Mapping would make the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
