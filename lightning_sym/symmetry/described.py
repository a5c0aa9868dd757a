"""A symmetry as text: the printed table, at most 80 columns wide.

Repeated layers with equal groups share one line.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_sym.symmetry.elements import AxisGroup
from lightning_sym.symmetry.solving.structure import Structure
from lightning_sym.symmetry.tracing.affine.parts import Kind

WIDTH = 80
_NUMBER = re.compile(r"(?<!\d)\d+(?![^.\[])")  # index of a layer: it ends a part of a name


def described_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of axis groups.

    Args:
        rows: Rows of :meth:`~lightning_sym.symmetry.Symmetry.table`.
    """
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        names = tuple(_NUMBER.sub("*", name) for name in (row["group"], *row["parameters"]))
        numbers = (row[key] for key in ("size", "cells", "type", "dimension", "log10_permutations"))
        alike.setdefault((*names, *numbers), []).append(row)
    table, details = [("axis group", "alike", "units", "dimension", "log10 permutations")], [""]
    for members in alike.values():
        row = members[0]
        size, cells = row["size"], row["cells"]
        units = f"{size}" if cells in (1, size) else f"{cells} x {size // cells}"
        (name,) = joined(member["group"] for member in members)
        table.append((name, f"{len(members)}", units, f"{row['dimension']}", f"{row['log10_permutations']:.1f}"))
        axes = [
            joined(places)[0] for places in zip(*(counted(member["parameters"]) for member in members), strict=True)
        ]
        details.append(f"{row['type']}, on {listed(axes)}" if axes else row["type"])
    width = [max(map(len, column)) for column in zip(*table, strict=True)]
    room = WIDTH - sum(width[1:]) - 2 * len(width[1:])
    layout = "  ".join([f"{{:{min(width[0], room)}}}", *(f"{{:>{size}}}" for size in width[1:])])
    lines = []
    for (name, *own), detail in zip(table, details, strict=True):
        if len(name) > room:
            lines.append(name)
            name = ""
        lines.append(layout.format(name, *own))
        lines += wrapped(detail, indent=4) if detail else []
    lines.insert(1, "-" * max(len(line) for line in lines))
    if any(len(members) > 1 for members in alike.values()):
        lines += wrapped("alike: how many groups a line describes; its numbers are those of each")
    if parts := next((row for row in rows if 1 < row["cells"] < row["size"]), None):
        size = parts["size"] // parts["cells"]
        lines += wrapped(
            f"{parts['cells']} x {size}: {parts['cells']} parts (heads, groups of channels) of {size} units"
        )
    if any(row["group"].endswith("(2)") for row in rows):
        lines += wrapped("(2): the second group of units that begins in the same module")
    return lines


def described_shifts(kinds: Sequence[Kind]) -> list[str]:
    """Return the lines that describe translations, one for each kind."""
    found: dict[str, list[Kind]] = {}
    for own in kinds:
        found.setdefault(own.kind, []).append(own)
    lines = []
    for kind, alike in found.items():
        names = joined(dict.fromkeys(own.name for own in alike))
        lines += wrapped(f"shifts, {sum(len(own.entries) for own in alike)} {kind}: {listed(names)}")
    return lines


def described_blocks(structure: Structure, groups: Sequence[AxisGroup]) -> list[str]:
    """Return a line for each kind of permuted blocks, and of copies that are permuted inside blocks."""
    members = [set(group.units.tolist()) for group in groups]
    slots = [set() if (copies := structure.copies_of(index)) is None else set(copies.slots.ravel().tolist())
             for index in range(len(groups))]  # fmt: skip
    whole: dict[tuple[Any, ...], list[list[str]]] = {}
    copied = Counter[tuple[int, tuple[str, ...]]]()
    for table in structure.blocks:
        units = set(table.ravel().tolist())
        standing = sum(any(unit in own for own in members) for unit in table[0].tolist())
        held = members if standing else slots
        names = [group.name for group, own in zip(groups, held, strict=True) if units & own]
        if standing:
            key = (len(table), standing, *(_NUMBER.sub("*", name) for name in names))
            whole.setdefault(key, []).append(names)
        else:
            copied[len(table), tuple(names)] += 1
    lines = []
    for (count, units, *_), systems in whole.items():
        text = f"permuted blocks: {count} of {units} units, in {_in(systems)}"
        lines += wrapped(text)
    inside: dict[tuple[Any, ...], list[list[str]]] = {}
    for (count, own), blocks in copied.items():
        inside.setdefault((count, blocks, *(_NUMBER.sub("*", name) for name in own)), []).append(list(own))
    for (count, blocks, *_), systems in inside.items():
        where = f" inside each of {blocks} blocks" if blocks > 1 else ""
        lines += wrapped(f"permuted copies of units{where}: {count}, in {_in(systems)}")
    return lines


def _in(systems: Sequence[Sequence[str]]) -> str:
    """List the groups of isomorphic systems of blocks."""
    names = [joined(own)[0] for own in zip(*systems, strict=True)]
    return listed(names, most=max(len(names), 3)) + (f" ({len(systems)} times)" if len(systems) > 1 else "")


def joined(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in layer indices: blocks.0-11.norm, blocks.0,2.norm.

    Example:
        >>> joined(["head", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm"])
        ['head', 'blocks.0-2.norm']
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("*", name), []).append(name)
    return [_as_one(own) for own in alike.values()]


def _as_one(names: Sequence[str]) -> str:
    texts = _NUMBER.split(names[0])
    numbers = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    return "".join(text + number for text, number in zip(texts, [*map(_numbers, numbers), ""], strict=True))


def _numbers(numbers: Sequence[int]) -> str:
    """Abbreviate a list of layer indices."""
    own = sorted(set(numbers))
    if len(own) > 2 and own == list(range(own[0], own[-1] + 1)):
        return f"{own[0]}-{own[-1]}"
    return ",".join(map(str, own)) if len(own) <= 3 else "*"


def counted(names: Sequence[str]) -> list[str]:
    """Merge equal names, with their counts."""
    times = Counter(names)
    return [name if number == 1 else f"{name} ({number} times)" for name, number in times.items()]


def listed(names: Sequence[str], most: int = 3) -> str:
    """List the first few names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def wrapped(text: str, *, indent: int = 0) -> list[str]:
    """Wrap a text to lines, with a hanging indent."""
    margin = " " * indent
    return textwrap.wrap(
        text, WIDTH, initial_indent=margin, subsequent_indent=margin + "  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
