"""Elements of a symmetry group: one part per factor of the group."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Part: TypeAlias = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Element:
    """One element of a network's symmetry group.

    The parts act in turn, from the last factor of the group to the first: translations first, permutations last. A
    part is a tensor, or a tuple with one tensor per member (matrix, rotation, rank-one map). An empty tensor denotes a
    member that acts as the identity. Each part is also an attribute: ``element.permutation``.

    Attributes:
        group: Fingerprint of the element's symmetry.
        parts: The parts by factor:

            - ``permutation``: The new unit i is the old unit ``permutation[i]``. Shape (units,), int64.
            - ``log_scale``: Natural logarithms of the positive scales. Shape (scales,), float64.
            - ``sign``: +1 or -1. Shape (signs,), float64.
            - ``dense``: One invertible matrix per GL(d) block. Each of shape (size, size), float64.
            - ``gained``: One invertible matrix per GL(d) block between gains. Each of shape (size, size) or (0, 0),
              float64.
            - ``rotation``: One orthogonal matrix per rotated stream. Each of shape (size, size) or (0, 0), float64.
            - ``phase``: One angle per rotary pair, in radians. Shape (pairs,), float64.
            - ``half_turn``: Half periods added to biases before sines. Shape (half turns,), float64.
            - ``tilt``: One vector per rank-one map. Each of shape (size,), float64.
            - ``shift``: Coefficients of the translations (docs/theory/translations.md). Shape (size,), float64.
    """

    group: str
    parts: Mapping[str, Part]

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("parts", {})  # empty while a copy is made
        if name not in parts:
            raise AttributeError(f"an element has no part {name!r}, only {', '.join(parts)}")
        return parts[name]

    def replaced(self, **parts: Part) -> "Element":
        """Replace some parts of the element.

        Raises:
            AttributeError: If the element has no part with one of these names.
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
