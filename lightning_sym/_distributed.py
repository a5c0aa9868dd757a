"""Devices and processes: placement of tensors, and operations of all ranks together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_sym._checks import UnfitInputsError, reason_of

Batches: TypeAlias = Iterable[Tensor | Sequence[Tensor]]
T = TypeVar("T")


def device_of(network: nn.Module) -> torch.device:
    """Return the device of a network's first parameter or buffer; the CPU if it has none."""
    for tensor in chain(network.parameters(), network.buffers()):
        return tensor.device
    return torch.device("cpu")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device; only copies to the CPU block, which could otherwise be read too early."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def on_device_of(network: nn.Module, inputs: T) -> T:
    """Move all tensors in nested tuples, lists and dicts to the device of the network."""
    device = device_of(network)
    found: T = tree_map_only(Tensor, lambda tensor: moved(tensor, device), inputs)
    return found


def inputs_for(network: nn.Module, inputs: T) -> T:
    """Move all tensors to the device of a network, and convert floating ones to the dtype of its weights.

    Inputs keep their dtype if the weights have several floating dtypes: such a network converts them itself.
    """
    kinds = {own.dtype for own in chain(network.parameters(), network.buffers()) if own.dtype.is_floating_point}
    if len(kinds) != 1 or (kind := kinds.pop()).itemsize == 1:
        return on_device_of(network, inputs)
    found: T = tree_map_only(Tensor, lambda own: own.to(kind) if own.is_floating_point() else own, inputs)
    return on_device_of(network, found)


def run_on(network: nn.Module, *inputs: Any) -> Any:
    """Run a network on inputs, moved and converted for it.

    Raises:
        UnfitInputsError: If it does not run on them.
    """
    given = inputs_for(network, inputs)
    with fitting(*inputs):
        return outputs_on(network, *given)


def outputs_on(network: nn.Module, *inputs: Any, **keywords: Any) -> Any:
    """Call a network; one that differentiates inside also runs where gradients are off."""
    try:
        return network(*inputs, **keywords)
    except RuntimeError as error:
        if torch.is_grad_enabled() or "require grad" not in str(error):
            raise
    with torch.enable_grad():
        return tree_map_only(Tensor, Tensor.detach, network(*inputs, **keywords))


@contextmanager
def fitting(*inputs: Any) -> Iterator[None]:
    """Raise errors of a network as :class:`UnfitInputsError` about its inputs, except for a lack of memory."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        got = [
            f"{str(own.dtype)[6:]} {list(own.shape)}" if isinstance(own, Tensor) else type(own).__name__
            for own in inputs
        ]
        raise UnfitInputsError(
            f"the network does not run on inputs {', '.join(got)} ({reason_of(error)}); pass batches, in a "
            "list or loader, of inputs as it takes them."
        ) from error


def wide(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on a device: float64, or float32 if it has no float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide_device(device: torch.device) -> torch.device:
    """Return the device for float64 tensors: the device itself, or the CPU if it has no float64 (MPS)."""
    return device if wide(device) == torch.float64 else torch.device("cpu")


def ranks() -> int:
    """Return the number of processes of ``torch.distributed``; 1 if it is not initialised."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def rank() -> int:
    """Return the rank of this process in ``torch.distributed``; 0 if it is not initialised."""
    return torch.distributed.get_rank() if ranks() > 1 else 0


def summed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over ranks; call it on every rank, with the same shape and dtype."""
    if ranks() > 1:
        tensor = tensor.clone()
        torch.distributed.all_reduce(tensor)
    return tensor


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, in order of rank; call it on every rank."""
    values = [value]
    if ranks() > 1:
        values = [None] * ranks()
        torch.distributed.all_gather_object(values, value)
    return values


def together(work: Callable[[], object]) -> None:
    """Run a function on every rank; raise the first rank's error on all, so that all continue consistently."""
    error: Exception | None = None
    try:
        work()
    except Exception as caught:
        if ranks() == 1:
            raise
        error = caught
    if (first := next(filter(None, gathered(error)), None)) is not None:
        raise error if error is not None and repr(error) == repr(first) else first
