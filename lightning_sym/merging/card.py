"""README.md of a merged model or adapter: what was merged, the method and its settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_sym.merging.adapters import Adapter, MergedAdapters, merge_adapters
from lightning_sym.merging.methods import FLAGS, MergeMethod
from lightning_sym.merging.parameters import MergeSettings, Setting
from lightning_sym.merging.sources import Sources


def configuration_of(
    settings: MergeSettings, models: Sequence[str], base: str | None, options: Mapping[str, Any]
) -> str:
    """Return the configuration in YAML that merges the same models in the same way.

    Args:
        settings: The method and its settings.
        models: The models, in the order of the settings.
        base: The base; None for none. ``slerp`` starts at its first model.
        options: Further entries of the configuration; empty ones are left out.
    """
    base = models[0] if settings.method.name == "slerp" else base
    content: dict[str, Any] = {
        "merge_method": settings.method.name,
        "models": [
            {"model": model, "parameters": {name: _value(own) for name, own in each.items()}}
            for model, each in zip(models, settings.per_model, strict=True)
        ],
        "base_model": base,
        "parameters": {name: _value(own, flag=name in FLAGS) for name, own in settings.shared.items()},
        "seed": settings.seed,
        **{name: value for name, value in options.items() if value},
    }
    return yaml.safe_dump(_without_empty(content), sort_keys=False)


def card_of(asked: Sources, reasons: Sequence[str], configuration: str, title: str) -> str:
    """Return the text of README.md.

    Args:
        asked: The models and the method.
        reasons: Why networks were left unchanged by the alignment, or "".
        configuration: The settings, in YAML.
        title: Name of the merged model.
    """
    rows = [
        (one.given, "base" if asked.has_base and not place else "model", _state(place, reason))
        for place, (one, reason) in enumerate(zip(asked.found, reasons, strict=True))
    ]
    return _text(title, asked.settings.method, [("model", "role", "alignment"), *rows], configuration)


def write_merged_adapters(
    folders: Sequence[str],
    settings: MergeSettings,
    out: str | Path,
    *,
    rank: int | None = None,
    text: str | None = None,
) -> MergedAdapters:
    """Merge adapters without their network, and write the result with a ``README.md``.

    Args:
        folders: The adapters.
        settings: The method and its settings, the same for all tensors.
        out: Folder of the result.
        rank: As for :func:`lightning_sym.merging.merge_adapters`.
        text: The settings in YAML; None: they are written out.

    Raises:
        ValueError: As :func:`lightning_sym.merging.merge_adapters`; also if ``out`` holds an adapter.
        OSError: If the result cannot be written.
    """
    adapters = [Adapter.read(folder) for folder in folders]
    merged = merge_adapters(adapters, method=settings, rank=rank)
    rows = [(one.source, str(_rank(one))) for one in adapters]
    error = max(own[merged.method] for own in merged.errors.values())
    text = configuration_of(settings, folders, None, {"rank": rank}) if text is None else text
    says = f"Its rank is {_rank(merged.adapter)}; truncation changes products by at most {error:.2g} of their norms."
    card = _text(Path(out).name, settings.method, [("adapter", "rank"), *rows], text, says)
    merged.adapter.write(out, readme=card)
    return merged


def _rank(adapter: Adapter) -> int:
    """Return the largest rank of a module."""
    return max(own.rank for own in adapter.products.values())


def _text(title: str, method: MergeMethod, table: Sequence[Sequence[str]], configuration: str, *more: str) -> str:
    source = f"arXiv:{method.source}" if method.source[:4].isdigit() else method.source
    first, *rows = (f"| {' | '.join(row)} |" for row in table)
    return "\n".join(
        [
            f"# {title}",
            "",
            f"Merged by lightning_sym with the method `{method.name}` ({source}).",
            *more,
            "",
            first,
            "|" + "---|" * len(table[0]),
            *rows,
            "",
            "```yaml",
            configuration.rstrip(),
            "```",
            "",
            "Relative paths start at the folder in which the models were merged.",
            "",
        ]
    )


def _state(place: int, reason: str) -> str:
    """Describe the alignment of a model."""
    return "reference" if not place else f"unchanged: {reason}" if reason else "aligned to the reference"


def _value(setting: Setting, *, flag: bool = False) -> Any:
    """Return a setting as a configuration states it; a flag as true or false."""
    kind = bool if flag else float
    values = [kind(own[0]) if len(own) == 1 else list(own) for _, own in setting.entries]
    if [part for part, _ in setting.entries] == [None]:
        return values[0]
    parts = [{} if part is None else {"filter": part} for part, _ in setting.entries]
    return [{**part, "value": value} for part, value in zip(parts, values, strict=True)]


def _without_empty(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping without empty parts."""
    if not isinstance(content, Mapping):
        return content
    found = {}
    for name, value in content.items():
        own = [_without_empty(one) for one in value] if isinstance(value, list) else value
        own = _without_empty(own) if isinstance(own, Mapping) else own
        if own not in ({}, None):
            found[name] = own
    return found
