"""Networks with memory-mapped weights, which the operating system can evict from memory."""

import mmap
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym.symmetry.arrays import give_back_memory
from lightning_sym.symmetry.tracing.graph.capture import copied, state_tensors

_ALIGNED = 64  # bytes


def with_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a network that refers to other tensors without copying them.

    Args:
        network: Not changed; may be without weights, on torch's meta device.
        tensors: Parameters and buffers by their first names; missing ones are copied from the network.
    """
    made: dict[int, Any] = {}
    for name, old in state_tensors(network).items():
        if name in tensors:
            new = tensors[name].detach()
            made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    return copied(network, made)


class NetworkFiles:
    """Keeps tensors in unnamed files, which vanish with the process even if it is killed.

    Args:
        folder: Folder on the disk to use; None for memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def keep(self, network: nn.Module) -> nn.Module:
        """Return a copy of a network with tensors in a file, or the network itself if memory is used."""
        return network if self.folder is None else self.copy(network, state_tensors(network).items())

    def copy(self, network: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> nn.Module:
        """Return an independent copy of a network with other tensors.

        Args:
            network: Not changed.
            tensors: New parameters and buffers by their first names, written one by one; the others are copied.

        Raises:
            OSError: If the disk is full.
        """
        return with_tensors(network, self.placed(tensors))

    def placed(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Write tensors to one file and return them memory-mapped.

        Args:
            tensors: Tensors by name, written one by one.

        Raises:
            OSError: If the disk is full.
        """
        if self.folder is None:
            return {name: tensor.detach().clone() for name, tensor in tensors}
        try:
            found = dict(self._mapped(tensors, self.folder))
            give_back_memory()
            return found
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(
                error.errno,
                f"Cannot keep a copy of the weights in {self.folder}: {reason}; no file remains. Free space "
                "there, or write the result to another folder",
            ) from error

    @staticmethod
    def _write(file: Any, tensor: Tensor) -> None:
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)

    @staticmethod
    def _mapped(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> Iterator[tuple[str, Tensor]]:
        places: list[tuple[str, int, torch.dtype, torch.Size]] = []
        with tempfile.TemporaryFile(dir=folder) as file:
            for name, tensor in tensors:
                own = tensor.detach().cpu().contiguous()
                file.write(bytes(-file.tell() % _ALIGNED))
                places.append((name, file.tell(), own.dtype, own.shape))
                NetworkFiles._write(file, own)
            file.flush()
            whole = mmap.mmap(file.fileno(), 0) if file.tell() else None
        for name, begin, dtype, shape in places:
            if whole is None or not shape.numel():
                yield name, torch.empty(shape, dtype=dtype)
            else:
                yield name, torch.frombuffer(whole, dtype=dtype, count=shape.numel(), offset=begin).view(shape)
