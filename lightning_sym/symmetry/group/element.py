"""An element of a symmetry group: for each factor of the group, its part."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Part: TypeAlias = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Element:
    """One element of a network's symmetry group.

    Its parts act one after the other, from the last factor of the group to the first: shifts first, permutations last.
    A part is a tensor, or a tuple with one tensor per member (matrix, rotation, tilt); an empty tensor stands for a
    member that changes nothing. Each part is an attribute, too: ``element.permutation``.

    Attributes:
        group: The fingerprint of the symmetry that it belongs to.
        parts: By factor:

            - ``permutation``: The new unit i is the old unit ``permutation[i]``. Shape (units,), int64.
            - ``log_scale``: Natural logarithms of the magnitudes. Shape (scales,), float64.
            - ``sign``: +1 or -1. Shape (signs,), float64.
            - ``dense``: Invertible matrices, one per dense cell. Each of shape (size, size), float64.
            - ``gained``: Invertible matrices between gains, one per gained cell. Each of shape (size, size) or (0, 0),
              float64.
            - ``rotation``: Orthogonal matrices, one per rotation. Each of shape (size, size) or (0, 0), float64.
            - ``phase``: The angle by which each plane is turned, in radians. Shape (planes,), float64.
            - ``half_turn``: Half periods that are added to biases in front of sines. Shape (half turns,), float64.
            - ``tilt``: One vector per tilt. Each of shape (size,), float64.
            - ``shift``: What is added (docs/theory/translations.md). Shape (size,), float64.
    """

    group: str
    parts: Mapping[str, Part]

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("parts", {})  # empty while a copy is made
        if name not in parts:
            raise AttributeError(f"an element has no part {name!r}, only {', '.join(parts)}")
        return parts[name]

    def replaced(self, **parts: Part) -> "Element":
        """Return the element with some of its parts replaced.

        Raises:
            AttributeError: If it has no part of such a name.
        """
        for name in parts:
            getattr(self, name)
        return Element(self.group, {**self.parts, **parts})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name: ``permutation``, and ``dense.0``, ``dense.1``, ... for the members of a tuple."""
        return {name if number is None else f"{name}.{number}": own for name, number, own in self._each()}

    def _each(self) -> Iterator[tuple[str, int | None, Tensor]]:
        for name, part in self.parts.items():
            if isinstance(part, Tensor):
                yield name, None, part
            else:
                yield from ((name, number, own) for number, own in enumerate(part))

    def __repr__(self) -> str:
        moved = int((self.permutation != torch.arange(len(self.permutation))).sum())
        scales, signs = int((self.log_scale != 0).sum()), int((self.sign < 0).sum())
        more = [f"{moved} of {len(self.permutation)} units move, {scales} scales and {signs} signs change"]
        for name, part in self.parts.items():
            if name in ("permutation", "log_scale", "sign"):
                continue
            count = len(part) if isinstance(part, tuple) else int((part != 0).sum())
            more += [f"{name} of {count}"] if count else []
        return f"<Element: {', '.join(more)}>"
