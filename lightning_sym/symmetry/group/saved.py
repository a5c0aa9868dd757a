"""Safetensors files of elements."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from lightning_sym._files import write_atomically
from lightning_sym.symmetry.group.element import Element

_GROUP = "lightning_sym.group"  # the key of the fingerprint in a file's metadata


def write_element(element: Element, path: str | Path, metadata: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Write an element and the fingerprint of its group, with further metadata; see :meth:`Symmetry.save`."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"an element is written to a file of safetensors; expected {path.name}.safetensors")
    tensors = {name: tensor.clone().contiguous() for name, tensor in element.tensors().items()}
    write_atomically(path, save_safetensors(tensors, metadata={**metadata, _GROUP: element.group}))
    return path


def read_element(path: str | Path, group: str) -> dict[str, Tensor]:
    """Read the tensors of an element from a file; see :meth:`Symmetry.load`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; expected an element that Symmetry.save wrote")
    try:
        with safe_open(path, framework="pt") as opened:  # type: ignore[no-untyped-call]
            found = (opened.metadata() or {}).get(_GROUP)
            if found is None:
                raise ValueError(f"{path} holds no element of a symmetry; expected one that Symmetry.save wrote")
            if found != group:
                raise ValueError(
                    f"{path} holds an element of another symmetry ({found[:12]}, this one is {group[:12]}); expected "
                    "one of the same architecture, traced in the same way"
                )
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors ({error}); write it again") from None
