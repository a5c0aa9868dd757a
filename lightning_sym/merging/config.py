"""Merges described in YAML: mergekit's files with local models, and settings of this package."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import yaml

from lightning_sym._checks import check_seeds, is_integer
from lightning_sym._files import StrictLoader, load_yaml, read_json
from lightning_sym._text import nearest, unknown
from lightning_sym._trust import NETWORKS, SETTINGS, check_settings, resolve
from lightning_sym.merging.adapters import MergedAdapters, is_adapter
from lightning_sym.merging.alignment import HOW
from lightning_sym.merging.card import write_merged_adapters
from lightning_sym.merging.checkpoints import MergedCheckpoints, merge_checkpoints
from lightning_sym.merging.methods import FLAGS, METHODS, MergeMethod, merge_method
from lightning_sym.merging.parameters import MergeSettings, Setting, check_setting
from lightning_sym.models import build_model, example_of

_THEIRS = (
    *("merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype", "tokenizer_source"),
    *("chat_template", "name"),
)
_OURS = ("align", "network", "data", "seed", "ignore", "recalibrate", "rank")
# Keys that do not apply to adapters alone.
_OF_NETWORKS = ("align", "network", "data", "ignore", "recalibrate", "dtype", "out_dtype")
_ELSEWHERE = "putting layers together needs mergekit"
_REFUSED = {
    "modules": "merging by modules needs mergekit; list the models under models",
    "tokenizer": "merging tokenizers needs mergekit; tokenizer_source: base takes that of the base",
    "experts": "building mixtures of experts needs mergekit-moe",
    "gate_mode": "building mixtures of experts needs mergekit-moe",
}
_DTYPES = ("float32", "float16", "bfloat16", "float64")
# Parameters of mergekit that change nothing here. Means on the sphere are iterated until they converge.
_IDLE: Mapping[str, tuple[str, ...] | None] = {
    "int8_mask": None,
    "rescale": ("task_arithmetic",),
    "max_iter": ("karcher",),
    "tol": ("karcher",),
    "eps": ("multislerp",),
    "nuslerp_row_wise": ("nuslerp",),  # of whole tensors, which alone are implemented
}
# Parameters of mergekit that have one value here, by method.
_FIXED: Mapping[str, Mapping[str, bool]] = {
    "filter_wise": {"model_stock": False},
    "nuslerp_flatten": {"nuslerp": True},
    "normalize_weights": {"multislerp": True},
}
# Numbers of layers in configurations of transformers.
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")

_Scope = Mapping[str, Setting]


@dataclass(frozen=True)
class MergeConfig:
    """A merge as a YAML file describes it.

    Attributes:
        file: The YAML file.
        models: Paths of the models besides the base. ``linear`` and other methods without a base take a listed base
            as their first model, so that the result has its types and files; ``slerp`` starts there.
        base: Path of the base; None if the method uses none.
        settings: The method and its settings.
        align: "auto", "weights", "activations" or "none".
        network: Name of the network under ``class_path``, its arguments under ``init_args``; None for that of the
            models' folders.
        data: The datamodule, in the same form; None without one.
        ignore: Patterns of tensors' names that are left out.
        recalibrate: Whether to recompute batch norm statistics.
        of_adapters: Whether the models are adapters without their network, for :meth:`merge_adapters`.
        rank: Rank of merged adapters; None for the largest of them.
        out_dtype: Type of the result: ``out_dtype``, or ``dtype`` without it. None for that of the reference.
            Computation is in float32 or float64.
        notes: Parts of the file that change nothing.
        text: The file's content, for the description of the result.
    """

    file: Path
    models: tuple[str, ...]
    base: str | None
    settings: MergeSettings
    align: str = "auto"
    network: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None
    ignore: tuple[str, ...] = ()
    recalibrate: bool = False
    of_adapters: bool = False
    rank: int | None = None
    out_dtype: str | None = None
    notes: tuple[str, ...] = ()
    text: str = field(default="", repr=False)

    @classmethod
    def read(cls, file: str | Path) -> "MergeConfig":
        """Read a YAML file, and check everything in it that needs no weights.

        Paths in the file start at its own folder. Only a ``config.json`` of the models is read, for the range of
        ``slices``.

        Args:
            file: The file.

        Raises:
            ValueError: If the file is not valid YAML, has duplicate or unknown keys, values of other types or out of
                range, asks for something that needs mergekit, or names a model that is no local path.
            OSError: If the file cannot be read.
        """
        if not (path := Path(file)).is_file():
            raise FileNotFoundError(f"there is no file {path}; expected a merge in YAML.")
        try:
            text = path.read_text(encoding="utf-8")
            content = load_yaml(text, str(path), StrictLoader)
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not a text file; expected YAML.") from None
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {_problem(error)}.") from None
        try:
            return replace(_read(path, content), text=text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for :func:`lightning_sym.merging.merge_checkpoints`, ``files`` included."""
        return {
            "files": self.models,
            "base": self.base,
            "method": self.settings,
            "align": self.align,
            "recalibrate": self.recalibrate,
            "ignore": self.ignore,
            "out_dtype": self.out_dtype,
            "seed": self.settings.seed,
            "description": self.text,
            "notes": self.notes,
        }

    def run(self, out: str | Path, **others: Any) -> MergedCheckpoints:
        """Merge the models and write the result.

        Args:
            out: Path of the result.
            others: Further arguments of :func:`lightning_sym.merging.merge_checkpoints`, before those of the file.

        Raises:
            ValueError: As :func:`lightning_sym.merging.merge_checkpoints`; also if the file names a datamodule and no
                ``data`` are passed, or names adapters alone.
            OSError: If the result cannot be written.
        """
        if self.of_adapters:
            raise ValueError(f"{self.file} names adapters alone; expected MODEL+ADAPTER, or a call of merge_adapters.")
        if self.data is not None and "data" not in others:
            raise ValueError(
                f"{self.file} names the datamodule {self.data['class_path']}, which only the command builds; pass its "
                "batches as data."
            )
        given = {**self.arguments(), **others}
        if self.network is not None and "network" not in given:
            model = build_model(*trusted_class(self.network, "lightning_sym.networks", str(self.file)))
            given = {"inputs": example_of(model), **given, "network": model.network}
        return merge_checkpoints(given.pop("files"), out, **given)

    def merge_adapters(self, out: str | Path) -> MergedAdapters:
        """Merge adapters without their network, and write the result with a ``README.md``.

        Args:
            out: Folder of the result.

        Raises:
            ValueError: As :func:`lightning_sym.merging.merge_adapters`; also if the models are not adapters.
            OSError: If the result cannot be written.
        """
        if not self.of_adapters:
            raise ValueError(f"{self.file} names models that are no adapters alone; call run.")
        return write_merged_adapters(self.models, self.settings, out, rank=self.rank, text=self.text)


# ---- the file


@dataclass(frozen=True)
class _Entry:
    """A model in the file.

    Attributes:
        path: Its path.
        scopes: Its parameters.
        where: Its place.
    """

    path: str
    scopes: _Scope
    where: str


def _read(file: Path, content: object) -> MergeConfig:
    tokenizer = content.get("tokenizer") if isinstance(content, Mapping) else None
    if isinstance(content, Mapping) and isinstance(tokenizer, Mapping) and [*tokenizer] == ["source"]:
        content = {key: value for key, value in content.items() if key != "tokenizer"}
        content["tokenizer_source"] = tokenizer["source"]
    top = _mapping(content, "the file", (*_THEIRS, *_OURS), _REFUSED)
    if "merge_method" not in top:
        raise ValueError("merge_method is missing; expected for example merge_method: linear.")
    method = merge_method(_text(top, "merge_method", ""))
    if ("models" in top) == ("slices" in top):
        raise ValueError("expected models or slices, one of them.")
    notes: list[str] = []
    shared = _parameters(top.get("parameters"), "parameters", method, notes)
    entries, scopes, base = _models(file, top, method, notes)
    if "base_model" in top:
        named = _model(top["base_model"], "base_model", file.parent)
        if base not in (None, named):
            raise ValueError(f"slices[0].base_model is {base}, but base_model is {named}; expected one base.")
        base = named
    scopes = (*scopes, shared)
    unused = None
    of_adapters = all(is_adapter(entry.path) for entry in entries) and (base is None or is_adapter(base))
    listed = [entry for entry in entries if entry.path == base]
    others = [entry for entry in entries if entry.path != base]
    if method.name == "slerp":
        if base is None:
            raise ValueError("slerp needs base_model, the model at t = 0.")
        entries, base = [*(listed or [_Entry(base, {}, "base_model")]), *others], None
    elif base is not None and method.base == "unused":
        if not listed:
            unused = base
            notes.append(
                f"{method.name} uses no base, and {base} is not among the models: it is not used, and the tokenizer is "
                "that of the first model; list it among the models to merge it, as mergekit does"
            )
        entries, base = [*listed, *others], None
    elif base is None and method.base == "needed" and not of_adapters:
        raise ValueError(f"{method.name} needs base_model, the parent of the models.")
    else:
        entries = others
    if of_adapters:
        useless = [*(["base_model"] if base is not None else []), *(key for key in _OF_NETWORKS if key in top)]
        if useless:
            raise ValueError(f"{useless[0]} does not apply to adapters alone; expected MODEL+ADAPTER, or leave it out.")
    if "rank" in top and not (of_adapters and is_integer(top["rank"], 1)):
        raise ValueError(f"rank must be an integer >= 1, for models that are adapters alone, got {brief(top['rank'])}.")
    seed = top.get("seed", 0)
    check_seeds(seed=seed)
    dtype = _word(top, "dtype", _DTYPES)
    reference = base or entries[0].path if entries else None
    _check_tokenizer(top, file.parent, unused or reference)
    notes += _template(top, reference or "")
    _text(top, "name", "")
    return MergeConfig(
        file=file,
        models=tuple(entry.path for entry in entries),
        base=base,
        settings=_settings(
            method, entries, scopes, base is not None or (of_adapters and method.base == "needed"), seed
        ),
        align=_word(top, "align", HOW) or "auto",
        network=_class(top, "network"),
        data=_class(top, "data"),
        ignore=_patterns(top.get("ignore", ())),
        recalibrate=_flag(top, "recalibrate"),
        of_adapters=of_adapters,
        rank=top.get("rank"),
        out_dtype=_word(top, "out_dtype", _DTYPES) or dtype,
        notes=tuple(notes),
    )


def _models(
    file: Path, top: Mapping[str, Any], method: MergeMethod, notes: list[str]
) -> tuple[list[_Entry], tuple[_Scope, ...], str | None]:
    """Return the listed models, the parameters of a slice, and its base."""
    where, nodes, base = "models", top.get("models"), None
    keys: tuple[str, ...] = ("model", "parameters")
    scopes: tuple[_Scope, ...] = ()
    if "slices" in top:
        slices = _list(top["slices"], "slices")
        if len(slices) > 1:
            raise ValueError(f"slices holds {len(slices)} slices, but {_ELSEWHERE}; expected a single one.")
        where = "slices[0]"
        only = _mapping(slices[0], where, ("sources", "base_model", "parameters"), {"residual_weight": _ELSEWHERE})
        scopes = (_parameters(only.get("parameters"), f"{where}.parameters", method, notes),)
        if "base_model" in only:
            base = _model(only["base_model"], f"{where}.base_model", file.parent)
        where, keys, nodes = f"{where}.sources", ("model", "layer_range", "parameters"), only.get("sources")
    entries: list[_Entry] = []
    for number, node in enumerate(_list(nodes, where)):
        place = f"{where}[{number}]"
        misplaced = {name: f"{name} is a parameter; put it under parameters" for name in _known(method)}
        entry = _mapping(node, place, keys, misplaced)
        if "model" not in entry:
            raise ValueError(f"{place} has no model; expected the path of a local model.")
        path = _model(entry["model"], f"{place}.model", file.parent)
        if same := next((one for one in entries if one.path == path), None):
            raise ValueError(f"{place}.model: {path} is {same.where} already; list each model once.")
        if "slices" in top:
            _check_whole(entry.get("layer_range"), path, f"{place}.layer_range")
        own = _parameters(entry.get("parameters"), f"{place}.parameters", method, notes, of_model=True)
        entries.append(_Entry(path, own, place))
    return entries, scopes, base


def _settings(
    method: MergeMethod, entries: Sequence[_Entry], scopes: Sequence[_Scope], has_base: bool, seed: int
) -> MergeSettings:
    """Put the parameters of models, of the slice and of the file together, in this precedence."""
    given: dict[str, Any] = {}
    for name, default in method.per_model.items():
        chains = [_chain(name, (entry.scopes, *scopes)) for entry in entries]
        if not any(chains):
            continue
        if name == "weight" and None in chains:
            missing = entries[chains.index(None)].where
            raise ValueError(f"{missing} has no weight, but other models have; give one to each.")
        given[name] = [chain or Setting.of(default, name) for chain in chains]
    for name in method.shared:
        given[name] = _chain(name, scopes)
    return MergeSettings.of(method.name, len(entries), has_base=has_base, seed=seed, **given)


def _chain(name: str, scopes: Iterable[_Scope]) -> Setting | None:
    """Return the setting of a name, from the first scope that has a matching entry for a tensor."""
    found: Setting | None = None
    for scope in scopes:
        if name in scope:
            found = scope[name] if found is None else found.over(scope[name])
    return found


def _known(method: MergeMethod) -> tuple[str, ...]:
    return (*method.per_model, *method.shared)


def _parameters(node: object, where: str, method: MergeMethod, notes: list[str], *, of_model: bool = False) -> _Scope:
    """Read the parameters of a model, a slice or the file, and note those of other methods."""
    if not isinstance(node, Mapping | None):
        raise ValueError(f"{where} must be a mapping of parameters, got {brief(node)}.")
    found = {}
    for name, value in (node or {}).items():
        place = f"{where}.{name}"
        if name not in _known(method):
            if name in _IDLE and method.name in (_IDLE[name] or (method.name,)):
                continue
            if isinstance(name, str) and method.name in _FIXED.get(name, {}):
                fixed = _FIXED[name][method.name]
                if value is not fixed:
                    raise ValueError(
                        f"{place} is {brief(value)}, but {method.name} is implemented only with {name}: "
                        f"{str(fixed).lower()}; leave it out."
                    )
                continue
            if name in (*_IDLE, *_FIXED) or any(name in _known(other) for other in METHODS.values()):
                reason = f"changes nothing, as {method.name} has no {name}"
                if not any(note.endswith(reason) for note in notes):  # models may have it alike
                    notes.append(f"{place} {reason}")
                continue
        check_setting(method, str(name), place)
        if of_model and name in method.shared:
            raise ValueError(f"{place}: {name} is one value for the whole merge; put it under parameters of the file.")
        found[name] = Setting.of(value, place, flag=name in FLAGS)
    return found


# ---- models


def _model(node: object, where: str, folder: Path) -> str:
    """Return the path of a model, with ``+`` and that of an adapter, from text or a mapping of mergekit."""
    if isinstance(node, Mapping):
        given = _mapping(node, where, ("model", "lora"), {})
        parts = [_text_or_path(given[key], f"{where}.{key}") for key in ("model", "lora") if key in given]
        if "model" not in given:
            raise ValueError(f"{where} has no model; expected the path of a local model.")
    else:
        whole = _text_or_path(node, where)
        parts = [whole] if os.path.exists(folder / whole) else whole.split("+")
    if len(parts) > 2:
        raise ValueError(f"{where}: {node!r} holds several +; expected a model and one adapter.")
    for part in parts:
        if not part or not os.path.exists(folder / part):
            near = _near(folder / part) if part else ""
            raise ValueError(
                f"{where}: there is no {part!r} in the folder of this file, {folder.absolute()}; expected the path of "
                f"a local model, as nothing is downloaded.{near}"
            )
    return "+".join(os.path.normpath(folder / part) for part in parts)


def _text_or_path(node: object, where: str) -> str:
    if isinstance(node, Mapping):
        given = _mapping(node, where, ("path",), {"revision": "nothing is downloaded; leave it out"})
        node = given.get("path")
    if not isinstance(node, str) or not node:
        raise ValueError(f"{where} must be the path of a local model, got {brief(node)}.")
    return node


def _near(path: Path) -> str:
    """Return a question with the files that have similar names."""
    try:
        return nearest(path.name, os.listdir(path.parent))
    except OSError:
        return ""


def _check_whole(node: object, path: str, where: str) -> None:
    """Check that a range of layers is that of the whole model."""
    if not isinstance(node, list) or len(node) != 2 or not all(is_integer(end, 0) for end in node):
        raise ValueError(
            f"{where} must be the first layer and the one after the last, such as [0, 32], got {brief(node)}."
        )
    model = Path(path if Path(path).exists() else path.split("+")[0])
    depth = _depth((model if model.is_dir() else model.parent) / "config.json")
    if depth is None:
        raise ValueError(
            f"{where}: {model} has no config.json with a number of layers; list the models under models instead of "
            "slices."
        )
    if node != [0, depth]:
        if node[1] > depth:
            raise ValueError(f"{where} is {node}, but {model} has {depth} layers; expected [0, {depth}].")
        raise ValueError(f"{where} is {node} of [0, {depth}], but {_ELSEWHERE}; expected all layers.")


def _depth(file: Path) -> int | None:
    """Return the number of layers from a configuration of transformers; None without one."""
    content = read_json(file) or {}
    for own in (content, content.get("text_config")):
        for name in _DEPTHS:
            if isinstance(own, dict) and is_integer(own.get(name)):
                return int(own[name])
    return None


# ---- values


def _mapping(node: object, where: str, known: Sequence[str], refused: Mapping[str, str]) -> dict[str, Any]:
    """Return a mapping with known keys, without those of empty values."""
    if not isinstance(node, Mapping):
        raise ValueError(f"{where} must be a mapping with {', '.join(known[:3])}, got {brief(node)}.")
    for key in node:
        if key in refused:
            raise ValueError(f"{where} has {key}: {refused[key]}.")
        if key not in known:
            near = nearest(str(key), known)
            raise ValueError(f"{where} has an unknown key {key!r}; expected {', '.join(known)}.{near}")
    return {key: value for key, value in node.items() if value is not None}


def _list(node: object, where: str) -> list[Any]:
    if not isinstance(node, list) or not node:
        raise ValueError(f"{where} must be a list with at least one entry, got {brief(node)}.")
    return node


def _text(top: Mapping[str, Any], key: str, default: str) -> str:
    value = top.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be text, got {brief(value)}.")
    return value


def _word(top: Mapping[str, Any], key: str, accepted: Sequence[str]) -> str | None:
    if key not in top:
        return None
    value = _text(top, key, "").removeprefix("torch.")
    if value not in accepted:
        raise ValueError(unknown(key, value, accepted))
    return value


def _flag(top: Mapping[str, Any], key: str) -> bool:
    value = top.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {brief(value)}.")
    return value


def _patterns(node: object) -> tuple[str, ...]:
    patterns = (node,) if isinstance(node, str) else node
    if not isinstance(patterns, list | tuple) or not all(isinstance(one, str) and one for one in patterns):
        raise ValueError(f"ignore must be a pattern of tensors' names or a list of patterns, got {brief(node)}.")
    return tuple(patterns)


def _class(top: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Return a class with its arguments; the short form is its name."""
    node = top.get(key)
    if node is None:
        return None
    if isinstance(node, str) and node:
        return {"class_path": node, "init_args": {}}
    given = _mapping(node, key, ("class_path", "init_args"), {})
    arguments = given.get("init_args", {})
    if not isinstance(given.get("class_path"), str) or not isinstance(arguments, dict):
        raise ValueError(f"{key} must be a name, or class_path and init_args, got {brief(node)}.")
    return {"class_path": given["class_path"], "init_args": arguments}


def _problem(error: yaml.YAMLError) -> str:
    """Describe an error in a YAML file, with its line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    context = "" if error.context is None else f"{error.context}, "
    return f"{context}{error.problem} (line {error.problem_mark.line + 1})"


def trusted_class(named: Mapping[str, Any], room: str, source: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the arguments of a class that a file names, after a comparison with the allow-list.

    Args:
        named: ``class_path`` and ``init_args``, as :class:`MergeConfig` holds them.
        room: Module of classes that are named without their module.
        source: The file, for messages.

    Raises:
        ValueError: If the class, or one in its arguments, is outside the packages that files may name.
    """
    path, arguments = named["class_path"], named["init_args"]
    if ":" not in path:  # names of libraries' models are looked up there
        path = path if "." in path else f"{room}.{path}"
        arguments = check_settings(arguments, resolve(path, (*NETWORKS, *SETTINGS), source), (), source)
    return path, arguments


def _check_tokenizer(top: Mapping[str, Any], folder: Path, reference: str | None) -> None:
    """Check that the tokenizer is that of the base, or of the first model."""
    source = _text(top, "tokenizer_source", "base")
    if source == "base" and "tokenizer_source" in top and "base_model" not in top:
        raise ValueError("tokenizer_source is base, but there is no base_model; leave it out for the first model's.")
    if source != "base" and os.path.normpath(folder / source) != reference:
        near = nearest(source, ("base",))
        raise ValueError(f"tokenizer_source is {source}, but merging vocabularies needs mergekit; expected base.{near}")


def _template(top: Mapping[str, Any], reference: str) -> list[str]:
    """Return a note on a chat template, which is not applied."""
    if _text(top, "chat_template", "auto") == "auto":
        return []
    return [f"chat_template is not applied: the result has that of {reference}"]
