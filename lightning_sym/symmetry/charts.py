"""Tensors as the group acts on them: a gain that the network reads as 1 + w is 1 + w there (docs/theory, 2.2)."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lightning_sym._distributed import wide
from lightning_sym.symmetry.views import ConvertedTensors

# By tensor, the number that the network adds to it wherever it reads it; or one for each element of a vector.
Charts = Mapping[str, float | tuple[float, ...]]


class _Charted(ConvertedTensors):
    def __init__(self, tensors: Mapping[str, Tensor], charts: Charts) -> None:
        super().__init__(tensors, torch.detach)
        self._charts = charts

    def _made(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        added = self._charts.get(name)
        return tensor if added is None else _sum(tensor.detach().to(wide(tensor.device)), added)


def charted(tensors: Mapping[str, Tensor], charts: Charts) -> Mapping[str, Tensor]:
    """Return a network's tensors as the group acts on them.

    Args:
        tensors: As the network holds them, by name. Not changed.
        charts: What is added to which.

    Returns:
        The same, where nothing is added to any; else a mapping that makes the sums, in double precision, when asked.
    """
    return _Charted(tensors, charts) if any(name in tensors for name in charts) else tensors


def uncharted(
    named: Iterable[tuple[str, Tensor]], charts: Charts, like: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as a network holds them, from what they are as the group acts on them.

    Args:
        named: Names and tensors.
        charts: What is added to which.
        like: The tensors as the network holds them before, for their dtypes.
    """
    for name, tensor in named:
        added = charts.get(name)
        yield name, tensor if added is None else _sum(tensor, added, -1).to(like[name].dtype)


def _sum(tensor: Tensor, added: float | tuple[float, ...], sign: int = 1) -> Tensor:
    numbers = torch.tensor(added, dtype=tensor.dtype, device=tensor.device) if isinstance(added, tuple) else added
    return tensor + sign * numbers
