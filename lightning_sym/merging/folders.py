"""Folders of models: configuration, weights, and the files next to them."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from lightning_sym._checkpoint_files import CONFIGURATION, configuration_in
from lightning_sym._files import load_json, read_json
from lightning_sym.models import with_defaults

# Weights, in any format, and descriptions of them.
_OF_WEIGHTS = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.ot"),
    *("*.onnx", "*.onnx_data*", "*.onnx.data", "*.tflite", "*.npz", "*.pkl", "*.distcp"),
)
# Files and folders of trainings, and of adapters.
_NOT_COPIED = (
    *("adapter_config.json", "readme.md", "*.tmp", "trainer_state.json", "training_args.bin", "optimizer*"),
    *("scheduler*", "rng_state*", "events.out.tfevents*", "zero_to_fp32.py"),
    *("history.csv", "report.json"),  # of a reparametrized model
)
_FOLDERS_NOT_COPIED = ("checkpoint-*", "global_step*", "runs", "__pycache__")
_SMALL = 2**26  # bytes; larger files in subfolders are weights of a format without a known name
_NAMED = 5  # files in a note
# Settings of a configuration that are independent of the architecture.
_NOT_ARCHITECTURE = (
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "problem_type", "finetuning_task"),
    *("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "gradient_checkpointing", "_attn_implementation_autoset"),
    *("unsloth_version", "id2label", "label2id", "pretrained_cfg"),
)


def files_beside(folder: Path) -> dict[str, Path]:
    """Return the files that a merged model takes from a folder, by their names relative to it.

    These are all but weights, states of trainings and hidden files. Weights of further modules of
    sentence-transformers, such as ``2_Dense``, are taken too: the model needs them, and they are not merged.

    Args:
        folder: Folder with ``config.json``; without, nothing is taken.
    """
    return {name: path for name, path, state in _beside(folder) if state != "left out"}


def notes_beside(folder: Path, merged: Collection[str]) -> tuple[str, ...]:
    """Describe other weights in the folder of a model, which are not merged.

    Args:
        folder: As for :func:`files_beside`.
        merged: Names of the files that are merged.
    """
    found: dict[str, list[str]] = {}
    for name, _, state in _beside(folder):
        if state != "taken" and name not in merged and not name.endswith(".index.json"):
            found.setdefault(state, []).append(name)
    says = {
        "left out": f"not copied from {folder}, as weights of another format or part are not merged",
        "module": f"copied from {folder} unchanged, as further modules are not merged",
    }
    return tuple(
        f"{text}: {', '.join(own[:_NAMED])}{f' and {len(own) - _NAMED} more' * (len(own) > _NAMED)}"
        for state, text in says.items()
        if (own := found.get(state, []))
    )


def _beside(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield name, path and state of the files next to the configuration: "taken", "left out", or "module"."""
    if configuration_in(folder) is None:
        return
    listed = _json_in(folder, "modules.json", list)  # of sentence-transformers
    modules = [one.get("path") for one in listed if isinstance(one, dict)]
    for name, path in _files(folder):
        inside, _, own = name.rpartition("/")
        weights = any(fnmatch(own.lower(), one) for one in _OF_WEIGHTS)
        if weights or (inside and path.stat().st_size > _SMALL):
            yield name, path, "module" if inside and inside in modules else "left out"
        else:
            yield name, path, "taken"


def _files(folder: Path, start: str = "") -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        name = path.name.lower()
        if name.startswith("."):
            continue
        if path.is_dir():
            if not path.is_symlink() and not any(fnmatch(name, own) for own in _FOLDERS_NOT_COPIED):
                yield from _files(path, f"{start}{path.name}/")
        elif path.is_file() and not any(fnmatch(name, own) for own in _NOT_COPIED):
            yield start + path.name, path


def configured_as(content: str, dtype: torch.dtype) -> str:
    """Return the text of a configuration with another type of the weights."""
    name = str(dtype).removeprefix("torch.")

    def changed(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {
            key: name if key in ("torch_dtype", "dtype") and isinstance(entry, str) else changed(entry)
            for key, entry in part.items()
        }

    return json.dumps(changed(load_json(content)), indent=2, ensure_ascii=False) + "\n"


def check_configurations(files: Sequence[Path]) -> tuple[str, ...]:
    """Check that the configurations in the checkpoints' folders are of one architecture.

    Args:
        files: The checkpoints, the reference first.

    Returns:
        Notes on differing chat templates, tokenizers and names of labels.

    Raises:
        ValueError: If the configurations differ in vocabulary or architecture.
    """
    folders = [folder for folder in dict.fromkeys(file.parent for file in files) if configuration_in(folder)]
    notes: list[str] = []
    for folder in folders[1:]:
        _check_architecture(folders[0], folder)
        for what, read in _COMPARED:
            if (theirs := read(folder)) is not None and theirs != read(folders[0]):
                notes.append(f"the {what} of {folder} and {folders[0]} differ: those of {folders[0]} are taken")
    return tuple(notes)


def _check_architecture(first: Path, other: Path) -> None:
    contents = [configuration_in(folder) or {} for folder in (first, other)]
    if _differing(contents):  # versions of transformers write other sets of entries
        contents = [with_defaults(content) for content in contents]
    differing = _differing(contents)
    for key, (ours, theirs) in sorted(differing.items(), key=lambda one: one[0] != "model_type"):
        if key.endswith("vocab_size") and None not in (ours, theirs):
            raise ValueError(
                f"{other} has a vocabulary of {theirs} and {first} one of {ours}; save {other} with "
                f"resize_token_embeddings({ours}) of transformers first, or {first} with {theirs}."
            )
        raise ValueError(
            f"{other / CONFIGURATION} states {key}: {theirs!r}, but {first / CONFIGURATION} {ours!r}; expected "
            "checkpoints of one configuration."
        )


def _differing(contents: Sequence[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each entry that differs and is part of the architecture."""
    ours, theirs = (dict(_entries(content)) for content in contents)
    keys = (key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key))
    return {key: (ours.get(key), theirs.get(key)) for key in keys}


def _entries(content: dict[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of the architecture, also of nested configurations, by names joined by dots."""
    for key, entry in content.items():
        if key not in _NOT_ARCHITECTURE:
            if isinstance(entry, dict):
                yield from _entries(entry, f"{start}{key}.")
            else:
                yield start + key, entry


def _json_in(folder: Path, name: str, kind: type = dict) -> Any:
    """Return the content of a file of JSON; empty if there is none, or none of this kind."""
    return read_json(folder / name, kind) or kind()


def _chat_template(folder: Path) -> Any:
    """Return the chat template of a folder, where older and newer versions of transformers have it."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return _json_in(folder, "tokenizer_config.json").get("chat_template") or _json_in(
            folder, "chat_template.json"
        ).get("chat_template")


def _labels(folder: Path) -> Any:
    return _json_in(folder, CONFIGURATION).get("id2label")


def _tokens(folder: Path) -> Any:
    """Return the number of each token."""
    content = _json_in(folder, "tokenizer.json")
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return None if vocabulary is None else (vocabulary, [(one.get("id"), one.get("content")) for one in added or ()])


_COMPARED: tuple[tuple[str, Callable[[Path], Any]], ...] = (
    ("chat templates", _chat_template),
    ("tokens", _tokens),
    ("names of the labels", _labels),
)
