"""README.md of a merged model: the models, the method and its settings."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lightning_sym.merging.methods import FLAGS
from lightning_sym.merging.parameters import Setting
from lightning_sym.merging.sources import Sources


def configuration_of(asked: Sources, options: Mapping[str, Any]) -> str:
    """Return the configuration in YAML that merges the same models in the same way.

    Args:
        asked: The models and the method.
        options: Further entries of the configuration; empty ones are left out.
    """
    settings = asked.settings
    models = [
        {"model": asked.found[place].given, "parameters": {name: _value(own) for name, own in each.items()}}
        for place, each in zip(asked.models, settings.per_model, strict=True)
    ]
    content: dict[str, Any] = {"merge_method": settings.method.name, "models": models}
    if asked.has_base or settings.method.name == "slerp":
        content["base_model"] = asked.found[0].given
    content["parameters"] = {name: _value(own, flag=name in FLAGS) for name, own in settings.shared.items()}
    content |= {"seed": settings.seed, **{name: value for name, value in options.items() if value}}
    return yaml.safe_dump(_without_empty(content), sort_keys=False)


def card_of(asked: Sources, reasons: Sequence[str], configuration: str, title: str) -> str:
    """Return the text of README.md.

    Args:
        asked: The models and the method.
        reasons: Why networks were left unchanged by the alignment, or "".
        configuration: The settings, in YAML.
        title: Name of the merged model.
    """
    method = asked.settings.method
    source = f"arXiv:{method.source}" if method.source[:4].isdigit() else method.source
    rows = [
        f"| {one.given} | {'base' if asked.has_base and not place else 'model'} | {_state(place, reason)} |"
        for place, (one, reason) in enumerate(zip(asked.found, reasons, strict=True))
    ]
    return "\n".join(
        [
            f"# {title}",
            "",
            f"Merged by lightning_sym with the method `{method.name}` ({source}).",
            "",
            "| model | role | alignment |",
            "|---|---|---|",
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
