"""Orthogonal matrices on streams: their readers and writers, the best matrix, and the canonical one.

See docs/theory/transformers.md, 3, and docs/theory/canonical.md, 7.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_sym._linear_algebra import polar_factor, random_orthogonal
from lightning_sym.symmetry.arrays import Floats, Ints, together
from lightning_sym.symmetry.group.between_gains import NO_MATRIX, Matrices
from lightning_sym.symmetry.group.factor import passes
from lightning_sym.symmetry.solving.rotations import Rotation, exponents
from lightning_sym.symmetry.solving.structure import Slot, Structure

# Relative to the largest eigenvalue: nearer axes are not unique, and smaller values count as nothing.
_CLOSE, _NOTHING = 1e-9, 1e-24


def random_turn(rotation: Rotation, generator: torch.Generator | None, *, most: int | None = None) -> Tensor:
    """Draw an orthogonal matrix, all being equally likely (of those that leave the vector of ones alone, if it must).

    Args:
        rotation: The cell to rotate.
        generator: Where randomness comes from.
        most: How many units it changes at most; any of them are equally likely. By default all.

    Returns:
        Shape (size, size), float64.
    """
    size = rotation.size if most is None else min(most, rotation.size)
    matrix = random_orthogonal(size - rotation.fixes_ones, generator)
    if rotation.fixes_ones:
        reflection = ones_reflection(size)
        around_first = torch.eye(size, dtype=torch.float64)
        around_first[1:, 1:] = matrix
        matrix = reflection @ around_first @ reflection
    if size == rotation.size:
        return matrix
    chosen = torch.randperm(rotation.size, generator=generator)[:size]
    whole = torch.eye(rotation.size, dtype=torch.float64)
    whole[chosen[:, None], chosen] = matrix
    return whole


def ones_reflection(size: int) -> Tensor:
    """Return the reflection that exchanges the first axis and the vector of ones. Shape (size, size), float64."""
    normal = torch.full((size,), size**-0.5, dtype=torch.float64)
    normal[0] -= 1
    return torch.eye(size, dtype=torch.float64) - 2 * torch.outer(normal, normal) / normal.dot(normal)


def stream_rows(
    structure: Structure, index: int, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[Slot, Ints, tuple[int, ...], Tensor]]:
    """Yield each slot on a stream, the units' places, the powers of the gains, and one row per unit without gains.

    Args:
        structure: The group.
        index: The number of the rotation.
        tensors: Parameters, by name; missing ones are left out.
    """
    rotation = structure.rotations[index]
    for slot in structure.slots:
        if slot.tensor not in tensors:
            continue
        for number, at, powers in structure.rotated_places.get(slot.offset, ()):
            if number == index:
                tensor = together(tensors[slot.tensor].detach(), slot.axes)
                rows = tensor.index_select(0, torch.from_numpy(at).to(tensor.device)).reshape(len(at), -1)
                for (name, place), power in zip(rotation.gains, powers, strict=True):
                    if power:
                        gain = tensors[name].detach().reshape(-1)[torch.from_numpy(place).to(rows.device)]
                        rows = rows / gain.to(rows)[:, None] ** power
                yield slot, at, powers, rows


def rotatable(structure: Structure, tensors: Mapping[str, Tensor]) -> list[int]:
    """Return the numbers of the rotations without zeros in their gains."""
    return [
        index
        for index, rotation in enumerate(structure.rotations)
        if all(passes(tensors[name].reshape(-1)[torch.from_numpy(at)]) for name, at in rotation.gains)
    ]


def best_turn(rotation: Rotation, products: Tensor) -> Tensor:
    """Return the allowed orthogonal Q that maximises tr(Q^T M) (orthogonal Procrustes).

    Args:
        rotation: The rotation of the stream.
        products: M, with the rows of the reference. Shape (size, size).

    Returns:
        Shape (size, size), float64, on the CPU.
    """
    products = products.detach().double().cpu()
    if rotation.fixes_ones:
        # Apart from the vector of ones, which is to stay.
        products = products - products.mean(0, keepdim=True)
        products = products - products.mean(1, keepdim=True)
        products = products + products.norm().clamp_min(1e-300) / rotation.size
    return polar_factor(products)


def weight_products(
    structure: Structure, index: int, target: Mapping[str, Tensor], current: Mapping[str, Tensor]
) -> Tensor:
    """Return M such that tr(Q^T M) is the change of both networks' inner product if Q rotates the second.

    Args:
        structure: The group.
        index: The number of the rotation.
        target: The parameters of the reference, by name.
        current: Those of the network that is rotated, gains included.

    Returns:
        Shape (size, size), float64.
    """
    rotation, sums = structure.rotations[index], dict[tuple[int, ...], Tensor]()
    total = torch.zeros(rotation.size, rotation.size, dtype=torch.float64)
    for slot in structure.slots:
        if slot.tensor not in target or slot.tensor not in current:
            continue
        for number, at, powers in structure.rotated_places.get(slot.offset, ()):
            if number == index:
                pair = [together(own[slot.tensor].detach(), slot.axes) for own in (target, current)]
                if slot.offset not in structure.rotated_whole:
                    pair = [own.index_select(0, torch.from_numpy(at).to(own.device)) for own in pair]
                left, right = (own.reshape(len(at), -1) for own in pair)
                product = (left @ right.T).double().cpu()
                sums[powers] = sums[powers].add_(product) if powers in sums else product
    # Gains of the second network are divided out, and multiplied onto the reference: <R, D Q D^-1 S> = <Q, (D R) (D^-1
    # S)'>.
    for powers, product in sums.items():
        for (name, place), power in zip(rotation.gains, powers, strict=True):
            if power:
                gain = current[name].detach().double().cpu().reshape(-1)[torch.from_numpy(place)] ** power
                product = gain[:, None] * product / gain
        total += product
    return total


def folding(structure: Structure, tensors: Mapping[str, Tensor]) -> Floats:
    """Return the logarithms of the scales that bring gains around rotated streams to 1 or -1.

    After gains that differ, a rotation of the stream is no rotation of its readers. Their norms, and all results
    computed from them, would depend on the rotation. Streams after a gain with a zero entry, through which rotations
    cannot pass, are kept.

    Args:
        structure: The group.
        tensors: Its parameters, by name.

    Returns:
        Shape (generators of scales,); nan for those that do not act on such gains.
    """
    found: Floats = np.full(structure.magnitudes.shape[1], np.nan)
    for index in rotatable(structure, tensors):
        rotation = structure.rotations[index]
        table = structure.scale_table[rotation.orbit][structure.place_in_orbit[rotation.units]]
        acting = rotation.powers.any(1)
        steps = np.zeros(table.shape)
        for (name, at), powers in zip(rotation.gains, rotation.powers.T, strict=True):
            gain = tensors[name].detach().double().cpu().reshape(-1).numpy()[at]
            steps -= np.log(np.abs(gain))[:, None] * powers
        found[table[:, acting]] = steps[:, acting]
    return found


def gain_signs(structure: Structure, tensors: Mapping[str, Tensor]) -> Floats:
    """Return the signs that make gains around rotated streams positive, one by one, where signs are free.

    The sign that all units of a stream share comes first, where rotations fix the vector of ones: it makes the largest
    of the first sums over units positive that do not vanish.

    Args:
        structure: The group.
        tensors: Its parameters, by name.

    Returns:
        Shape (generators of signs,); nan for those that flip no such gain.
    """
    found: Floats = np.full(structure.signs.shape[1], np.nan)
    for index in rotatable(structure, tensors):
        rotation = structure.rotations[index]
        place = structure.place_in_orbit[rotation.units]
        table = structure.sign_table[rotation.orbit][place]
        shared = (table == table[:1]).all(0)
        for generator in table[0, shared & rotation.fixes_ones].tolist():
            found[generator] = _sign_of_ones(structure, index, generator, tensors)
        # Gains that several units share are at places without these.
        held = {name: structure.slots_of[name][0].offset + at for name, at in rotation.gains}
        acting = exponents(structure.signs, np.stack(list(held.values()), 1), table) if held else None
        if acting is None:
            continue
        by_gain = {name: own % 2 for name, own in zip(held, acting, strict=True)}
        for name, at in rotation.gains:
            alone = by_gain[name] > sum(by_gain[other] for other, _ in rotation.gains if other != name)
            for own in np.flatnonzero(alone & ~rotation.plain_sign & ~shared)[:1]:
                gain = tensors[name].detach().double().cpu().reshape(-1).numpy()[at]
                around = found[table[0, shared & (by_gain[name] > 0)]]
                found[table[:, own]] = np.sign(gain) * np.nan_to_num(around, nan=1.0).prod()
    return found


def _sign_of_ones(structure: Structure, index: int, generator: int, tensors: Mapping[str, Tensor]) -> float:
    """Return the sign of a stream along the vector of ones, which its rotation fixes; nan if nothing shows it.

    It is that of the largest mean over units, in the first tensor with means other than zero. Divided by gains, biases
    and readers of a norm flip with the stream. Tensors come first whose other units have neither signs nor matrices.
    """
    rotation, shown = structure.rotations[index], list[tuple[bool, Tensor]]()
    for slot, at, powers, rows in stream_rows(structure, index, tensors):
        held = (structure.slots_of[name][0].offset + int(place[0]) for name, place in rotation.gains)
        flips = sum(k * structure.signs[row, generator] for row, k in zip(held, powers, strict=True))
        if (structure.signs[slot.offset + int(at[0]), generator] + flips) % 2:
            others = (other for other in structure.slots_of[slot.tensor] if other is not slot)
            shown.append((all(_only_permuted(structure, other) for other in others), rows.to("cpu", torch.float64)))
    least = _CLOSE * max((float(rows.abs().max()) for _, rows in shown), default=0.0)
    means = [rows.mean(0) for plain in (True, False) for own, rows in shown if own is plain]
    largest = (mean[mean.abs().argmax()] for mean in means)
    return next((float(mean.sign()) for mean in largest if abs(mean) > least), np.nan)


def principal_turns(structure: Structure, tensors: Mapping[str, Tensor]) -> tuple[Matrices, list[str]]:
    """Return the part that rotates streams to their principal axes, and notes on axes that are not unique.

    The axes are those of the Gram matrix of all tensors that write to a stream or read it, before gains: largest
    first. Each has the direction with a positive sum of cubes of the entries that no other unit shares.

    Args:
        structure: The group.
        tensors: The network's parameters, by name, in the balanced gauge.
    """
    notes = []
    turns = [NO_MATRIX] * len(structure.rotations)
    for index in rotatable(structure, tensors):
        rotation = structure.rotations[index]
        rows = [(slot, part.double().cpu()) for slot, *_, part in stream_rows(structure, index, tensors)]
        outside = [part for slot, part in rows if _is_alone(structure, slot)]
        basis = _basis(rotation)
        gram = torch.stack([basis.mT @ (part @ part.mT) @ basis for _, part in rows]).sum(0)
        values, axes = torch.linalg.eigh(gram)
        values, axes = values.flip(0), axes.flip(1)
        lean = torch.zeros_like(values)
        for part in outside:
            lean += (axes.mT @ basis.mT @ part).pow(3).sum(1)
        axes = axes * torch.where(lean < 0, -1.0, 1.0)
        seen = values > _NOTHING * values[0]
        close = (values[:-1] - values[1:] <= _CLOSE * values[0]) & seen[:-1]
        if bool(close.any()) or bool((seen & (lean == 0)).any()):
            notes.append(
                "a stream has principal axes that are not unique (equal sizes, or no direction): the form is canonical "
                "up to rotations among them"
            )
        turns[index] = basis @ axes.mT @ basis.mT + _ones(rotation)
    return tuple(turns), notes


def _is_alone(structure: Structure, slot: Slot) -> bool:
    """Whether a slot's tensor has no other units."""
    return all(other is slot or bool((other.unit < 0).all()) for other in structure.slots_of[slot.tensor])


def _only_permuted(structure: Structure, slot: Slot) -> bool:
    """Whether the units of a slot have neither signs nor matrices."""
    units = slot.unit[slot.unit >= 0]
    mixed = slot.offset in structure.rotated_places or (structure.cell_of[units] >= 0).any()
    return not (mixed or (structure.phase_of[units] >= 0).any() or structure.signs[slot.rows].nnz)


def _ones(rotation: Rotation) -> Tensor:
    """Return the projection on the fixed space of a rotation. Shape (size, size), float64."""
    size = rotation.size
    return torch.full((size, size), rotation.fixes_ones / size, dtype=torch.float64)


def _basis(rotation: Rotation) -> Tensor:
    """Return an orthonormal basis of the rotated space. Shape (size, free), float64."""
    if rotation.fixes_ones:
        return ones_reflection(rotation.size)[:, 1:]
    return torch.eye(rotation.size, dtype=torch.float64)
