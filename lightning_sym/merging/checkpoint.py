"""Checkpoints: found, read with a network, and written with new weights."""

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym._checkpoint_files import CONFIGURATION, Found, check_described, configuration_in, locate
from lightning_sym._checks import finite_or_mask
from lightning_sym._files import load_json
from lightning_sym._text import unknown
from lightning_sym.merging.folders import configured_as, files_beside, notes_beside
from lightning_sym.merging.network_files import NetworkFiles, with_tensors
from lightning_sym.models import Model, build_light, model_in, names_in_network
from lightning_sym.networks.batch_norm import batch_norms
from lightning_sym.symmetry.files import Planned, Shards, new_folder, write_files, write_single
from lightning_sym.symmetry.proof import double
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import first_names, state_tensors
from lightning_sym.weights import listed, match_weights, read_weights
from lightning_sym.zoo import ModelZoo

_FLOATING = {str(dtype)[6:]: dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


def find_checkpoints(path: str | Path) -> list[Found]:
    """Find the weights that a path names.

    Args:
        path: A file; a folder with ``config.json`` and weights; a zoo; a folder with ``adapter_config.json``; or two
            paths of a model and an adapter, ``MODEL+ADAPTER``.

    Returns:
        One input; of a zoo each member.

    Raises:
        ValueError: If there are no weights.
    """
    found = locate(path)
    if not found.is_zoo:
        return [found]
    zoo = ModelZoo.open(found.file.parent)
    return [Found(str(zoo.path / member.file), zoo.path / member.file) for member in zoo]


def example_in(dtype: torch.dtype, inputs: Any) -> Call:
    """Return a call with example inputs, floating ones in double precision if the weights are.

    Args:
        dtype: Type of the weights.
        inputs: An input, a tuple of positional arguments, or a call.
    """
    call = Call.of(inputs)
    return call if dtype != torch.float64 else Call(*double(tuple(call)))


def model_of(found: Found, *, weights: bool = False) -> Model:
    """Build the network of an input, from its configuration or its zoo.

    Args:
        found: The input.
        weights: Whether it needs memory for (random) weights. Without, it has none where a checkpoint fills them all.

    Raises:
        ValueError: If nothing says what the network is, or it cannot be built.
    """
    described = check_described(found)
    if found.configuration is not None and (quantized := found.configuration.get("quantization_config")):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise ValueError(
            f"{found.given} holds quantized weights ({method}); expected weights of 16 bits or more: dequantize() and "
            "save_pretrained() of transformers write them."
        )
    build = functools.partial(model_in, described.parent)
    return build(meta=False) if weights else build_light(build)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint and its network.

    Attributes:
        file: The file, or the index of several.
        network: Network with the checkpoint's weights, in evaluation mode; in double precision if the file is, else in
            single precision.
        shards: Layout on disk; None if the file is not safetensors.
        dtypes: The type of each floating tensor in the file, by the network's names.
        stored: The tensors in the file, by their names there, mapped into memory where possible.
        names: For each tensor in the file that the network has, the first name in the network.
        extras: For each of the file's other tensors under the same prefix, its name without the prefix.
        prefix: Prefix of the names in the file that the network's names lack.
        ignored: First names of the network's tensors that patterns leave out.
        notes: Choices that were made.
    """

    file: Path
    network: nn.Module
    shards: Shards | None
    dtypes: Mapping[str, torch.dtype]
    stored: Mapping[str, Tensor]
    names: Mapping[str, str]
    extras: Mapping[str, str]
    prefix: str = ""
    ignored: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        file: str | Path,
        network: nn.Module,
        prefix: str | None = None,
        copies: NetworkFiles | None = None,
        ignore: Sequence[str] = (),
        described: Path | None = None,
    ) -> "Checkpoint":
        """Read a checkpoint into a copy of a network.

        Tensors stay in the memory-mapped file, except those of another type, which are converted.

        Args:
            file: A state dict, a Lightning checkpoint, a file of safetensors or the index of several.
            network: Network for the weights; may be without weights, on torch's meta device. Not changed.
            prefix: Prefix of the weights' names, where several prefixes fit.
            copies: Storage for converted tensors; None for memory.
            ignore: Patterns of names, in the file or the network, of tensors that may be surplus or missing. A missing
                one has the value of ``network``.
            described: File that describes the network, for messages; None if the caller has chosen it.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is damaged, not finite, or has another configuration.
            OSError: If there is no space for converted tensors.
        """
        file = Path(file)
        shards = Shards(file) if _is_safetensors(file) else None
        tensors = read_weights(file, mapped=True) if shards is None else shards.read_all()
        renamed = {name: key for key, name in names_in_network(network, tensors).items()}
        fit = match_weights(
            {name: tensors[key] for name, key in renamed.items()}, network,
            prefix=prefix, source=str(file), ignore=ignore, described=described,
        )  # fmt: skip
        state = fit.tensors
        if empty := next((name for name, tensor in state.items() if tensor.is_meta), None):
            raise ValueError(
                f"{file} does not hold {empty}, which is ignored, but the network needs a value of it to be run; give "
                "the checkpoint that has it first."
            )
        if name := next((name for name, own in network.named_parameters() if own.is_complex()), None):
            raise ValueError(f"{file} holds {name} as {state[name].dtype}; expected weights that are real numbers.")
        floating = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        for name, tensor in floating.items():
            if tensor.dtype not in _FLOATING.values():
                raise ValueError(f"{file} holds {name} as {tensor.dtype}; expected numbers of 16 bits or more.")
            if not finite_or_mask(tensor):
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
        result = with_tensors(network, held).eval()
        for name, norm in batch_norms(result).items():
            if norm.running_var is not None and bool((norm.running_var + norm.eps <= 0).any()):
                raise ValueError(
                    f"{file} holds {name}.running_var with negative numbers, at which its outputs are NaN; expected "
                    "variances: recompute them with recalibrate_batch_norm."
                )
        found = {names[name] for name in fit.names.values()}
        missing = [name for name in fit.ignored if names[name] not in found]
        outside = [key for key in fit.outside if shards is not None]
        notes = [
            *([f"{file} does not hold {listed(missing)}, which is ignored"] if missing else []),
            *([f"{file} also holds {listed(outside)}, which the network has not: copied as is"] if outside else []),
        ]
        return cls(
            file=file,
            network=result.double() if exact else result,
            shards=shards,
            dtypes={name: tensor.dtype for name, tensor in floating.items()},
            stored=tensors,
            # The first name of tied tensors comes first.
            names={
                renamed[key]: names[name]
                for key, name in sorted(fit.names.items(), key=lambda one: names[one[1]] != one[1])
            },
            extras={renamed[key]: name for key, name in fit.extras.items()},
            prefix=fit.prefix,
            ignored=frozenset(names[name] for name in fit.ignored),
            notes=(*fit.notes, *notes),
        )

    def write(
        self,
        tensors: Mapping[str, Tensor],
        out: str | Path,
        *,
        out_dtype: str | torch.dtype | None = None,
        beside: Mapping[str, Callable[[Path], object]] | None = None,
    ) -> Path:
        """Write other weights in this checkpoint's form: names, types, shards and metadata.

        Checkpoints other than safetensors become safetensors: with the network's names, or, in the folder of a model,
        with their own. If ``out`` is a folder, the other files of the model (configuration, tokenizer) are copied.
        A new folder appears by one rename; a single file is moved to its place last.

        Args:
            tensors: New floating tensors by the network's first names. Each is read once, when it is written. Tensors
                that are ignored or absent, and integers, are copied from this checkpoint.
            out: A path that ends in ``.safetensors``, or else a new folder.
            out_dtype: Another type for the tensors of the commonest type, such as ``"bfloat16"``, also stated in the
                configuration.
            beside: Functions that write further files, by their names in the folder of the result. Each takes the path
                to write to.

        Returns:
            The written file or index.

        Raises:
            ValueError: If a number exceeds the range of its type, or ``out`` does not suit. No file remains.
            OSError: If it cannot be written. No file remains.
        """
        out, dtype = Path(out), _type_named(out_dtype)
        planned, further = self._planned(tensors, dtype), dict(beside or {})
        metadata = {file: self._metadata(file) for file in planned}
        if out.suffix == ".safetensors":
            if len(planned) > 1:
                raise ValueError(f"out is the file {out}, and the checkpoint has several; expected a folder.")
            (file,) = planned
            if not further:
                write_single(out, planned[file], metadata[file])
                return out
            with new_folder(out.parent, [*further, out.name]) as scratch:
                write_files(scratch, {out.name: planned[file]}, {out.name: metadata[file]})
                for name, write in further.items():
                    write(scratch / name)
            return out
        self.file.stat()  # an error if the folder was removed meanwhile: its other files are copied
        copied = files_beside(self.file.parent)
        with new_folder(out) as scratch:
            write_files(scratch, planned, metadata)
            written = self._write_index(scratch, planned) or next(iter(planned))
            for name, path in copied.items():
                target = scratch / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if name == CONFIGURATION and dtype is not None:
                    target.write_text(configured_as(path.read_text(encoding="utf-8"), dtype), encoding="utf-8")
                else:
                    shutil.copyfile(path, target)
            for name, write in further.items():
                write(scratch / name)
        return out / written

    def left_behind(self, out: str | Path) -> tuple[str, ...]:
        """Describe weights next to this checkpoint that :meth:`write` does not merge; empty if ``out`` is a file."""
        if Path(out).suffix == ".safetensors":
            return ()
        if self.shards is not None:
            return notes_beside(self.file.parent, {file.name for file in self.shards.files})
        index = self.file.suffix == ".json"
        pickles = (
            load_json(self.file.read_text(encoding="utf-8"))["weight_map"].values() if index else (self.file.name,)
        )
        return notes_beside(self.file.parent, {*pickles})

    def _planned(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, dict[str, Planned]]:
        """Return the tensors to write, by file and by name in the file."""
        rows = list(self._rows())
        counts: dict[torch.dtype, int] = {}
        for _, _, _, tensor in rows:
            if tensor.is_floating_point():
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
        commonest = max(counts, key=lambda one: counts[one], default=None)
        planned: dict[str, dict[str, Planned]] = {}
        given = set(tensors)  # a mapping may compute a tensor to say whether it has it
        for file, key, name, tensor in rows:
            moved = name in given and name not in self.ignored and tensor.is_floating_point()
            planned.setdefault(file, {})[key] = Planned(
                shape=tuple(tensor.shape),
                dtype=dtype if dtype is not None and tensor.dtype == commonest else tensor.dtype,
                read=functools.partial(tensors.__getitem__, name) if moved else functools.partial(_same, tensor),
                shared=name if moved else None,
            )
        return planned

    def _rows(self) -> Iterator[tuple[str, str, str, Tensor]]:
        """Yield file and name there, the network's first name or "", and the old tensor of everything to write."""
        if self.shards is not None:
            for key, stored in self.shards.tensors.items():
                yield stored.file.name, key, self.names.get(key, ""), self.stored[key]
            return
        files = self._files_of_pickles()
        keys: dict[str, str] = {}
        for key, name in self.names.items():
            keys.setdefault(name, key)
        if configuration_in(self.file.parent) is not None and not self.prefix:
            for name, key in keys.items():
                yield files[key], key, name, self.stored[key]
            for key in self.extras:
                yield files[key], key, "", self.stored[key]
            return
        own, names = state_tensors(self.network), first_names(self.network)
        for place in self.network.state_dict():  # ties by all of their names, as torch loads them
            if (name := names[place]) in keys:
                yield files[keys[name]], place, name, self.stored[keys[name]]
            elif name not in self.ignored:
                yield min(files.values()), place, name, own[name].to(self.dtypes.get(name, own[name].dtype))
        for key, name in self.extras.items():
            yield files[key], name, "", self.stored[key]

    def _files_of_pickles(self) -> dict[str, str]:
        """Return the file of safetensors for each tensor of a pickle, or of several."""
        if self.file.suffix != ".json":
            return dict.fromkeys(self.stored, "model.safetensors")
        placed = load_json(self.file.read_text(encoding="utf-8"))["weight_map"]
        return {key: f"{Path(file).stem.replace('pytorch_model', 'model')}.safetensors" for key, file in placed.items()}

    def _metadata(self, file: str) -> dict[str, str]:
        """Return the metadata in the header of a file."""
        if self.shards is None:
            return {"format": "pt"}
        header = next((path for path in self.shards.files if path.name == file), self.shards.files[0])
        return {**self.shards.metadata[header], "format": "pt"}

    def _write_index(self, folder: Path, planned: Mapping[str, Mapping[str, Planned]]) -> str | None:
        """Write the index of several files, and return its name; None for one file."""
        if self.file.suffix != ".json":
            return None
        content = load_json(self.file.read_text(encoding="utf-8"))
        total = sum(own.size for tensors in planned.values() for own in tensors.values())
        content["metadata"] = {**(content.get("metadata") or {}), "total_size": total}
        content["weight_map"] = {key: file for file, tensors in planned.items() for key in sorted(tensors)}
        name = self.file.name.replace("pytorch_model.bin", "model.safetensors")
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return name


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _is_safetensors(file: Path) -> bool:
    """Return whether a file is safetensors, or an index, but for one of pickles."""
    return file.suffix == ".safetensors" or (file.suffix == ".json" and not file.name.endswith(".bin.index.json"))


def _type_named(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = _FLOATING.get(dtype.removeprefix("torch."))
    if found is None:
        raise ValueError(unknown("out_dtype", dtype, _FLOATING))
    return found
