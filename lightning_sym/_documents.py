"""YAML and JSON from untrusted sources, read within limits."""

import json
from pathlib import Path
from typing import Any

import yaml

_LONGEST = 10_000_000  # characters
_LONGEST_JSON = 100_000_000  # bytes; limit of the header of safetensors files
_DEEPEST = 50  # levels
_MOST = 50_000  # values, counted once per alias


class TooLargeError(ValueError):
    """A document exceeds the limits of recipes, manifests and tables."""


class LimitedLoader(yaml.SafeLoader):
    """Reads YAML of plain values, and counts the values before making them."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._count = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next value, as nodes.

        Raises:
            TooLargeError: If there are too many, or they are nested too deeply.
        """
        self._count, self._depth = self._count + 1, self._depth + 1
        if self._depth > _DEEPEST:
            raise TooLargeError(f"it is nested more than {_DEEPEST} levels deep")
        if self._count > _MOST:
            raise TooLargeError(f"it holds more than {_MOST} values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class StrictLoader(LimitedLoader):
    """Read YAML and refuse duplicate keys, which would silently lose a value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping.

        Raises:
            ConstructorError: If a key is duplicate.
        """
        found: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in found:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
                found.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str, source: str, loader: type[LimitedLoader] = LimitedLoader) -> Any:
    """Parse YAML within limits.

    Args:
        text: The YAML.
        source: Origin of the text, for messages.
        loader: Class of the loader.

    Raises:
        YAMLError: If it is not valid YAML.
        TooLargeError: If it is too long, nested too deeply, holds itself or too many values.
    """
    try:
        if len(text) > _LONGEST:
            raise TooLargeError(f"it is longer than {_LONGEST} characters")
        opened = loader(text)
        try:
            node = opened.get_single_node()
            _expanded(node, {})
            return None if node is None else opened.construct_document(node)
        finally:
            opened.dispose()
    except TooLargeError as error:
        raise TooLargeError(f"{source} is not read: {error}.") from None
    except ValueError as error:  # an invalid number or date
        raise yaml.YAMLError(str(error)) from None


def _expanded(node: yaml.Node | None, sizes: dict[int, int]) -> int:
    """Return the number of values of a node with expanded aliases; enclosing nodes still have size 0."""
    if id(node) in sizes:
        if sizes[id(node)] == 0:
            raise TooLargeError("it contains itself, by an alias within its own anchor")
        return sizes[id(node)]
    sizes[id(node)] = 0
    inner = node.value if isinstance(node, yaml.CollectionNode) else []
    entries = [entry for pair in inner for entry in pair] if isinstance(node, yaml.MappingNode) else inner
    size = 1 + sum(_expanded(entry, sizes) for entry in entries)
    if size > _MOST:
        raise TooLargeError(f"it holds more than {_MOST} values with expanded aliases")
    sizes[id(node)] = size
    return size


def read_json(file: Path, kind: type = dict) -> Any:
    """Return the content of a file of JSON; None if it cannot be read, is damaged, or holds no value of this kind."""
    try:
        content = load_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the second: neither text nor JSON
        return None
    return content if isinstance(content, kind) else None


def load_json(text: str | bytes) -> Any:
    """Parse JSON within limits.

    Raises:
        ValueError: If it is not valid JSON, too long or nested too deeply.
    """
    if len(text) > _LONGEST_JSON:
        raise TooLargeError(f"it is longer than {_LONGEST_JSON} bytes")
    try:
        content = json.loads(text)
    except RecursionError:
        raise TooLargeError(f"it is nested more than {_DEEPEST} levels deep") from None
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(_DEEPEST):
        inner = (entry for one in level for entry in (one.values() if isinstance(one, dict) else one))
        level = [entry for entry in inner if isinstance(entry, dict | list)]
        if not level:
            return content
    raise TooLargeError(f"it is nested more than {_DEEPEST} levels deep")
