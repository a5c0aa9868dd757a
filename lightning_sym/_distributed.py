"""Devices and processes: where tensors are, and what all ranks do together."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Batches: TypeAlias = Iterable[Tensor | Sequence[Tensor]]
T = TypeVar("T")


def device_of(network: nn.Module) -> torch.device:
    """Return the device of a network's first parameter or buffer; the CPU if it has none."""
    for tensor in chain(network.parameters(), network.buffers()):
        return tensor.device
    return torch.device("cpu")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; nothing waits for copies but for those to the CPU, which could be read too early."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def on_device_of(network: nn.Module, inputs: T) -> T:
    """Return inputs, however nested in tuples, lists and dicts, with every tensor on the device of the network."""
    device = device_of(network)
    found: T = tree_map_only(Tensor, lambda tensor: moved(tensor, device), inputs)
    return found


def wide(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on a device: float64, or float32 where there is none (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide_device(device: torch.device) -> torch.device:
    """Return the device for what has to be float64: itself, or the CPU where there is none (MPS)."""
    return device if wide(device) == torch.float64 else torch.device("cpu")


def ranks() -> int:
    """Return the number of processes of ``torch.distributed``; 1 if it is not initialised."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def rank() -> int:
    """Return the number of this process of ``torch.distributed``; 0 if it is not initialised."""
    return torch.distributed.get_rank() if ranks() > 1 else 0


def summed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over ranks; to be called on every rank, with the same shape and dtype."""
    if ranks() > 1:
        tensor = tensor.clone()
        torch.distributed.all_reduce(tensor)
    return tensor


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, in order of rank; to be called on every rank."""
    values = [value]
    if ranks() > 1:
        values = [None] * ranks()
        torch.distributed.all_gather_object(values, value)
    return values


def together(work: Callable[[], object]) -> None:
    """Do something on every rank; the first rank's error is raised on all, so that all do the same then."""
    error: Exception | None = None
    try:
        work()
    except Exception as caught:
        if ranks() == 1:
            raise
        error = caught
    if (first := next(filter(None, gathered(error)), None)) is not None:
        raise error if error is not None and repr(error) == repr(first) else first
