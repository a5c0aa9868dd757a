"""Find the translations of a network with a known group, and the rank-one maps of its layer norms."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_sym.symmetry.group.gained_shifts import with_carried_shifts
from lightning_sym.symmetry.solving.group import Group
from lightning_sym.symmetry.solving.structure import NO_HALF_TURNS, Structure
from lightning_sym.symmetry.solving.tilt_search import find_leaning, find_tilts
from lightning_sym.symmetry.tracing.affine.parts import Shown
from lightning_sym.symmetry.tracing.affine.space import Translations
from lightning_sym.symmetry.tracing.affine.translations import find_translations
from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.labels import Labels
from lightning_sym.symmetry.tracing.normal_form.merging import merged
from lightning_sym.symmetry.tracing.tensors import Tensors


class Added(NamedTuple):
    """A group with its translations and rank-one maps.

    Attributes:
        structure: The group on parameters and buffers.
        values: The same group on the named values inside the network.
        shown: The effect of translations on these values.
        notes: The limits of translations and rank-one maps.
        common_shift: Function that counts the additional translations that a softmax after the outputs cancels; None
            without translations.
    """

    structure: Structure
    values: Structure
    shown: dict[str, Shown]
    notes: list[str]
    common_shift: Callable[[], int] | None


def find_shifts(
    captures: Sequence[Capture],
    tensors: Tensors,
    labels: Labels,
    group: Group,
    *,
    wanted: bool,
    merges: bool = True,
    still: Collection[str] = (),
) -> Added:
    """Find the translations of the weights and the rank-one maps of layer norms.

    Args:
        captures: The network in normal form, on one example or several.
        tensors: Its tensors.
        labels: The constraints of its operations.
        group: Its group without translations.
        wanted: Whether to search for translations.
        merges: Whether to merge layers for this.
        still: Tensors that are not translated.
    """
    structure, values, *_ = group
    # A bias that absorbs the constant of a flipped unit cannot also absorb a change of the mean.
    flipped = [weight for _, weight, _, _ in structure.absorbed]
    states, kept = tensors.states, labels.kept
    found, shapes = Translations(), {name: _without_values(tensor) for name, tensor in states.items()}
    find: Callable[..., Translations] = functools.partial(
        find_translations,
        constants=kept,
        members=labels.stacked,
        keep=flipped,
        still=still,
        scaled=structure.scales_differ,
    )
    if wanted:
        found, find = _largest([captures, merged(captures) if merges else None], find, states)
    else:
        structure, values = (replace(each, half_turns=NO_HALF_TURNS) for each in (structure, values))
    structure = replace(structure, shifts=found)
    tilts, notes = find_tilts(structure, values, found.normed)
    tilts += find_leaning(structure, values, found.leaning)
    structure, values = (replace(each, tilts=tuple(tilts)) for each in (structure, values))
    sizes = {name: tuple(tensor.shape) for name, tensor in states.items()}
    structure, values, held = with_carried_shifts(structure, values, sizes)

    def common_shift() -> int:
        """Return the number of additional translations that a softmax after the outputs cancels."""
        return find(shapes, outputs=True).dimension - found.dimension

    return Added(structure, values, found.shown, [*notes, *held, *found.notes], common_shift if wanted else None)


def _largest(
    ways: Sequence[Sequence[Capture] | None], find: Callable[..., Translations], states: Mapping[str, Tensor]
) -> tuple[Translations, Callable[..., Translations]]:
    """Return the translations that are found, and the function that finds them.

    Merged layers have more, unless a norm or an absent bias allows more of separate ones.
    """
    best: tuple[Translations, Callable[..., Translations]] | None = None
    for own in ways:
        if own is None:
            continue
        way = functools.partial(find, own)
        found = way(states)
        if not found.adds_up:
            way = functools.partial(way, exclusive=True)
            found = way(states)
        if best is None:
            best = found, way
        elif found.dimension > best[0].dimension:
            found.normed, found.leaning = best[0].normed, best[0].leaning
            best = found, way
    assert best is not None
    return best


def _without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same kind and shape without memory."""
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
