"""The permutations of a symmetry in the formats of other matching and weight-space tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.elements import AxisGroup


@dataclass(frozen=True)
class PermutationSpec:
    """Tensor axes that are permuted together.

    Attributes:
        perm_to_axes: The tensors and axes that each permutation acts on, by the name of its axis group.
        axes_to_perm: The permutation of each axis, or None, by tensor; tensors without units are omitted.
        sizes: The number of units of each permutation.
        left_out: Axis groups with permutations that do not act on whole axes, with reasons. They keep their order.

    References:
        ``perm_to_axes`` and ``axes_to_perm`` are those of Git Re-Basin (Ainsworth et al. 2023, arXiv:2209.04836);
        :meth:`numbered` is the input of universal neural functionals (Zhou et al. 2024, arXiv:2402.05232).
    """

    perm_to_axes: Mapping[str, Sequence[tuple[str, int]]]
    axes_to_perm: Mapping[str, tuple[str | None, ...]]
    sizes: Mapping[str, int]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def numbered(self) -> dict[str, tuple[int, ...]]:
        """Return an integer for each axis of each tensor, the same for axes of one permutation.

        Permutations are numbered from 0 in the order of the forward pass; then come the axes that are not permuted.
        """
        numbers: dict[str | tuple[str, int], int] = {name: index for index, name in enumerate(self.perm_to_axes)}
        return {
            tensor: tuple(
                numbers.setdefault((tensor, axis) if name is None else name, len(numbers))
                for axis, name in enumerate(names)
            )
            for tensor, names in self.axes_to_perm.items()
        }


def permutation_spec_of(
    groups: Sequence[AxisGroup],
    shapes: Mapping[str, tuple[int, ...]],
    blocks: Sequence[Ints],
    stacks: Mapping[str, Sequence[str]],
) -> PermutationSpec:
    """Return the permutations that act on whole axes.

    Args:
        groups: The axis groups.
        shapes: Shapes of all parameters and buffers.
        blocks: Blocks of units that are permuted.
        stacks: The stacked tensors of modules that elements exchange.
    """

    def placed(tensor: str, axis: int) -> list[tuple[str, int]]:
        return [(own, axis - 1) for own in stacks[tensor]] if tensor in stacks else [(tensor, axis)]

    in_blocks = np.unique(np.concatenate([np.zeros(0, np.int64), *(table.ravel() for table in blocks)]))
    perm_to_axes: dict[str, list[tuple[str, int]]] = {}
    sizes, left_out = {}, {}
    for group in groups:
        if reason := _why_not(group, shapes, in_blocks, stacks):
            left_out[group.name] = reason
            continue
        sizes[group.name] = group.size
        perm_to_axes[group.name] = [
            *dict.fromkeys(place for own in group.occurrences for place in placed(own.tensor, own.axis))
        ]
    names = {place: name for name, places in perm_to_axes.items() for place in places}
    held = dict.fromkeys(own.tensor for group in groups for own in group.occurrences)
    ranks = {name: len(shapes[own]) - (own in stacks) for own in held for name, _ in placed(own, 0)}
    axes_to_perm = {name: tuple(names.get((name, axis)) for axis in range(rank)) for name, rank in ranks.items()}
    return PermutationSpec(perm_to_axes, axes_to_perm, sizes, left_out)


def _why_not(
    group: AxisGroup, shapes: Mapping[str, tuple[int, ...]], in_blocks: Ints, stacks: Mapping[str, Sequence[str]]
) -> str:
    """Return the reason why a group's permutations do not act on whole axes; empty if they do."""
    if not group.movable:
        return "its units keep their order"
    if any(own.tensor in stacks and (own.axis == 0 or own.further) for own in group.occurrences):
        return "elements exchange whole modules with it (trace_symmetry(..., exchange=False) keeps these in place)"
    if int(group.cells.max()) > 0 or np.isin(group.units.numpy(), in_blocks).any():
        return "its units are permuted inside blocks or with their blocks"
    order = group.occurrences[0].positions
    for own in group.occurrences:
        if own.further or own.positions.numel() != shapes[own.tensor][own.axis]:
            return f"its units are a part of axis {own.axis} of {own.tensor}"
        if own.positions.shape[1] != 1:
            return f"each of its units has {own.positions.shape[1]} places on axis {own.axis} of {own.tensor}"
        if not torch.equal(own.positions, order):
            return f"its units have another order on axis {own.axis} of {own.tensor}"
    return ""
