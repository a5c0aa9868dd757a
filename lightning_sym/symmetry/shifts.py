"""What may be added to the weights of a network whose group is known, and the layer norms that are tilted."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_sym.symmetry.solving.group import Group
from lightning_sym.symmetry.tracing.affine.space import Shown, Translations
from lightning_sym.symmetry.tracing.affine.translations import find_translations
from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.labels import Labels
from lightning_sym.symmetry.tracing.structure import Structure
from lightning_sym.symmetry.tracing.tensors import Tensors
from lightning_sym.symmetry.tracing.tilt_search import find_tilts
from lightning_sym.symmetry.translations import folded


class Added(NamedTuple):
    """A group with what may be added to weights, and with tilts.

    Attributes:
        structure: The group on parameters and buffers.
        values: The same group on the values inside the network that have a name.
        shown: What shifts do to these values.
        notes: What limits shifts and tilts.
        common_shift: Counts the shifts that a softmax behind the outputs does not see besides; None without shifts.
    """

    structure: Structure
    values: Structure
    shown: dict[str, Shown]
    notes: list[str]
    common_shift: Callable[[], int] | None


def find_shifts(captures: Sequence[Capture], tensors: Tensors, labels: Labels, group: Group, *, wanted: bool) -> Added:
    """Find what may be added to weights, and the layer norms that are tilted.

    Args:
        captures: The network in normal form, on one example or several.
        tensors: Its tensors.
        labels: What its operations demand.
        group: Its group without shifts.
        wanted: Whether there are to be shifts.
    """
    structure, values, *_ = group
    # A bias that absorbs the constant of a flipped unit cannot absorb a change of the mean, too.
    flipped = [weight for _, weight, _, _ in structure.absorbed]
    states, kept = tensors.states, labels.kept
    found, shapes = Translations(), {name: _without_values(tensor) for name, tensor in states.items()}
    find = functools.partial(find_translations, captures, constants=kept, fixed=labels.stacked, keep=flipped)
    if wanted:
        found = find(states)
    structure = replace(structure, shifts=found)
    tilts, notes = find_tilts(structure, values, found.normed)
    structure, values = (replace(each, tilts=tuple(tilts)) for each in (structure, values))
    shifts = folded(structure)
    structure, values = (replace(each, shifts=shifts) for each in (structure, values))

    def common_shift() -> int:
        """Return how many more shifts a softmax behind the outputs does not see."""
        return find(shapes, outputs=True).dimension - found.dimension

    return Added(structure, values, found.shown, [*notes, *found.notes], common_shift if wanted else None)


def _without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same kind and shape without memory."""
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
