"""A checkpoint with its network, and its files and folder."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym._documents import load_json
from lightning_sym.merging.network_files import NetworkFiles, with_tensors
from lightning_sym.symmetry.files import Shards, named_for, write_moved, write_new
from lightning_sym.symmetry.proof import all_finite
from lightning_sym.symmetry.tracing.capture import first_names, state_tensors
from lightning_sym.weights import fit_weights, read_weights

# Files of a model that are not copied: weights in other files and formats, training states, descriptions of weights.
_NOT_COPIED = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf"),
    *("trainer_state.json", "readme.md", "*.tmp"),
)
# Settings of a configuration that are independent of the architecture.
_NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint and its network.

    Attributes:
        file: The file, or the index of several.
        network: Network with the checkpoint's weights, in evaluation mode; in double precision if the file is, else in
            single precision.
        shards: Layout on disk; None if the file is not safetensors.
        dtypes: The type of each floating tensor in the file, by the network's names.
    """

    file: Path
    network: nn.Module
    shards: Shards | None
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def read(
        cls, file: str | Path, network: nn.Module, prefix: str | None = None, copies: NetworkFiles | None = None
    ) -> "Checkpoint":
        """Read a checkpoint into a copy of a network.

        Tensors stay in the memory-mapped file, except those of another type, which are converted.

        Args:
            file: A state dict, a Lightning checkpoint, a file of safetensors or the index of several.
            network: Network for the weights; may be without weights, on torch's meta device. Not changed.
            prefix: Prefix of the weights' names, where several prefixes fit.
            copies: Storage for converted tensors; None for memory.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is damaged, not finite, or has another configuration.
            OSError: If there is no space for converted tensors.
        """
        file = Path(file)
        shards = Shards(file) if file.suffix in (".json", ".safetensors") else None
        tensors = read_weights(file, mapped=True) if shards is None else shards.read_all()
        state = fit_weights(tensors, network, prefix=prefix, source=str(file))
        floating = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        for name, tensor in floating.items():
            if not all_finite(tensor):
                raise ValueError(f"{file} holds {name} with values that are not finite; expected finite weights.")
        exact = bool(floating) and all(tensor.dtype == torch.float64 for tensor in floating.values())
        names = first_names(network)
        held: dict[str, Tensor] = {}
        for name, tensor in state.items():
            held.setdefault(names[name], tensor)
        types = {
            name: torch.float64 if exact and own.is_floating_point() else own.dtype
            for name, own in state_tensors(network).items()
        }
        others = ((name, own.to(types[name])) for name, own in held.items() if own.dtype != types[name])
        held |= (copies if copies is not None else NetworkFiles()).placed(others)
        found = with_tensors(network, held).eval()
        dtypes = {name: tensor.dtype for name, tensor in floating.items()}
        return cls(file, found.double() if exact else found, shards, dtypes)

    def write(self, network: nn.Module, out: str | Path) -> Path:
        """Write another network's weights in this checkpoint's form: names, types, shards and metadata.

        Checkpoints other than safetensors become one safetensors file with the network's names. If ``out`` is a folder,
        the other files of a transformers model (configuration, tokenizer) are copied.

        Args:
            network: Network of this checkpoint's architecture.
            out: As :func:`merge_checkpoints` takes it.

        Returns:
            The written file or index.

        Raises:
            ValueError: If a number exceeds the range of its type. No file remains.
            OSError: If it cannot be written. No file remains.
        """
        out = Path(out)
        beside = [] if out.suffix == ".safetensors" else model_files(self.file)
        tensors = {name: tensor.detach() for name, tensor in state_tensors(network).items()}
        names = first_names(network)
        if self.shards is None:
            held = {name: tensors[name] for name in network.state_dict() if names.get(name) == name}
            types = {name: self.dtypes.get(name, tensor.dtype) for name, tensor in held.items()}
            return _write_into_folder(held, types, out, beside) if beside else write_new(held, types, out)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        needed = [name for name, _ in network.named_parameters()]
        named = named_for(self.shards, shapes, names, needed, ())

        def moved(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
            for name in weights:
                if name in moving:
                    yield name, tensors[name]

        moving = {name for name in named.values() if tensors[name].is_floating_point()}
        return write_moved(self.shards, named, moved, moving, out, beside)


def _configuration_of(file: Path) -> dict[str, Any] | None:
    """Return the transformers configuration in a checkpoint's folder; None if there is none."""
    try:
        content = load_json((file.parent / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "model_type" in content else None


def model_files(file: Path) -> list[Path]:
    """Return the files of a transformers model in its checkpoint's folder, without weights."""
    if _configuration_of(file) is None:
        return []
    files = (path for path in sorted(file.parent.iterdir()) if path.is_file() and not path.name.startswith("."))
    return [path for path in files if not any(fnmatch(path.name.lower(), own) for own in _NOT_COPIED)]


def _write_into_folder(
    tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype], out: Path, model_files: Sequence[Path]
) -> Path:
    """Write tensors and copies of other files into a folder, completely or not at all."""
    there = out.exists()
    try:
        found = write_new(tensors, types, out / "model.safetensors")
        for path in model_files:
            shutil.copyfile(path, out / path.name)
    except BaseException:
        for name in ("model.safetensors", *(path.name for path in model_files)):
            (out / name).unlink(missing_ok=True)
        if not there and out.exists():
            out.rmdir()
        raise
    return found


def check_configurations(files: Sequence[Path]) -> None:
    """Check that the transformers configurations in the checkpoints' folders agree."""
    found: list[tuple[Path, dict[str, Any]]] = []
    for path in dict.fromkeys(file.parent / "config.json" for file in files):
        content = _configuration_of(path)
        if content is not None:
            found.append((path, {key: value for key, value in content.items() if key not in _NOT_ARCHITECTURE}))
    for path, content in found[1:]:
        first, own = found[0]
        for key in sorted(own.keys() | content.keys()):
            if own.get(key) != content.get(key):
                raise ValueError(
                    f"{path} states {key}: {content.get(key)!r}, but {first} {own.get(key)!r}; expected checkpoints "
                    "of one configuration."
                )
