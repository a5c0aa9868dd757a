"""Find rank-one maps I + t aᵀ of layer norms and streams, see docs/theory/transformers.md, 4."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lightning_sym.symmetry.solving.structure import Slot, Structure
from lightning_sym.symmetry.tracing.affine.tilts import Leaning, Normed, Tilt

Norms = Mapping[tuple[str | None, str], Normed]


def find_tilts(structure: Structure, values: Structure, norms: Norms) -> tuple[list[Tilt], list[str]]:
    """Find the layer norms with a rank-one map of their bias and readers.

    If other biases absorb every translation of the norm's bias, translations already contain these maps, and the norm
    is omitted.

    Args:
        structure: The group on tensors, including translations and rotations.
        values: The same group on named values.
        norms: The layer norms that only linear layers read, by gain and bias.

    Returns:
        The maps, and notes on omitted ones.
    """
    shifted = structure.shifts.names
    found, notes = [], []
    for (gain, offset), norm in norms.items():
        twice = len({name for name, _ in norm.readers}) < len(norm.readers)  # one matrix, read along both axes
        if not norm.readers or twice or offset in shifted:
            continue
        slots = [_slot_on(structure, name, axis) for name, axis in ((offset, 0), *norm.readers)]
        behind = [] if gain is None else [_slot_on(structure, gain, 0)]
        seen = [_slot_on(values, name, axis) for name, axis in norm.seen]
        if not all(_moves_alike(structure, slots[0], slot) for slot in [*slots, *behind]) or None in seen:
            notes.append(f"readers of the layer norm with bias {offset} keep their mean, as they move in another way")
            continue
        assert slots[0] is not None
        powers = [1, *[-1] * (len(slots) - 1)]
        if all(_is_between(structure, slot, gain, power) for slot, power in zip(slots, powers, strict=True) if slot):
            around = [(offset, 0), *norm.readers, *norm.seen] if gain is not None else []
            gains = {name: str(gain) for name, _ in around}
            found.append(Tilt(slots[0].size, ((offset, 0),), gains, tuple(norm.readers), tuple(norm.seen)))
        else:
            notes.append(f"readers of the layer norm with bias {offset} keep their mean, as other gains are in between")
    return found, notes


def find_leaning(structure: Structure, values: Structure, streams: Sequence[Leaning]) -> list[Tilt]:
    """Find the streams with a rank-one map: layer norms do not read multiples of the vector of ones.

    Args:
        structure: The group on tensors, including rotations.
        values: The same group on named values.
        streams: The streams that only layer norms and linear layers read.
    """
    found = []
    for stream in streams:
        slots = [_slot_on(structure, name, axis) for name, axis in (*stream.readers, *stream.writers)]
        first, seen = slots[0], [_slot_on(values, name, axis) for name, axis in stream.seen]
        behind = [_slot_on(structure, gain, 0) for gain in {*stream.gains.values()}]
        if first is None or None in seen or not all(_moves_alike(structure, first, slot) for slot in [*slots, *behind]):
            continue
        gains = [stream.gains.get(slot.tensor) for slot in slots if slot is not None]
        if all(_is_between(structure, slot, gain, -1) for slot, gain in zip(slots, gains, strict=True) if slot):
            tilt = Tilt(first.size, stream.readers, stream.gains, stream.writers, of_stream=True)
            found.append(replace(tilt, written=stream.seen, mixed=stream.mixed))
    return found


def _slot_on(structure: Structure, name: str, axis: int) -> Slot | None:
    """Return the only slot on an axis; None if there are several, or if one has further axes."""
    own = structure.slots_of.get(name, [])
    at = [slot for slot in own if slot.axes == (axis,)]
    return at[0] if len(at) == 1 and all(slot.axes == (axis,) or axis not in slot.axes for slot in own) else None


def _moves_alike(structure: Structure, one: Slot | None, two: Slot | None) -> bool:
    """Whether two slots have the same units in the same order, without copies or GL(d) blocks."""
    if one is None or two is None or not np.array_equal(one.unit, two.unit):
        return False
    held = set(one.unit[one.unit >= 0].tolist())
    copied = any(
        structure.copies_of(index) is not None and not held.isdisjoint(units.tolist())
        for index, units in enumerate(structure.orbits)
    )
    return not copied and two.kind == "value" and two.offset not in structure.dense_places


def _is_between(structure: Structure, slot: Slot, gain: str | None, power: int) -> bool:
    """Whether rotations on a slot fix ones and act between the norm's own gain, if any rotation acts there."""
    turned = np.zeros(slot.size, bool)
    for index, at, powers in structure.rotated_places.get(slot.offset, ()):
        rotation = structure.rotations[index]
        known = [(name, k, place) for (name, place), k in zip(rotation.gains, powers, strict=True) if k]
        if [(name, k) for name, k, _ in known] != ([(gain, power)] if gain is not None else []):
            return False
        if not all(np.array_equal(place, at) for *_, place in known):
            return False
        if not rotation.fixes_ones:
            return False
        turned[at] = True
    return bool(turned.all() or not turned.any())
