"""Streams: the orthogonal matrix that brings one network's residual stream nearest to another's.

See docs/theory/matching.md, 1.6.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sym._linear_algebra import polar_factor
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.streams import stream_rows
from lightning_sym.symmetry.elements import Element, Tap
from lightning_sym.symmetry.tracing.rotations import Rotation
from lightning_sym.symmetry.tracing.structure import Structure
from lightning_sym.symmetry.turning import NO_TURN


@dataclass(frozen=True, eq=False)
class StreamPlace:
    """Where a stream is seen: in front of all gains, or behind some.

    Attributes:
        index: The number of its rotation.
        tap: The value.
        axis: The value's axis.
        positions: Where each of the stream's units stands there. Shape (size,), int64.
        powers: Powers of the rotation's gains by which the units are multiplied there.
    """

    index: int
    tap: Tap
    axis: int
    positions: Tensor
    powers: tuple[int, ...]

    def gains(self, symmetry: Symmetry, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return by what the units are multiplied here, given a network's tensors. Shape (size,), float64."""
        rotation = symmetry.structure.rotations[self.index]
        total = torch.ones(rotation.size, dtype=torch.float64)
        for (name, at), power in zip(rotation.gains, self.powers, strict=True):
            total *= tensors[name].detach().double().cpu().reshape(-1)[torch.from_numpy(at)] ** power
        return total


def stream_places(symmetry: Symmetry) -> Iterator[StreamPlace]:
    """Yield the outputs of modules without children in which a whole stream is seen."""
    for group in symmetry.groups:
        for tap in group.taps if group.rotations and not group.dense else ():
            for slot in tap.seen if not tap.squared else ():
                for index, at, powers in symmetry._values.rotated_places.get(slot.offset, ()):
                    if len(slot.axes) == 1:
                        yield StreamPlace(index, tap, slot.axes[0], torch.from_numpy(at), powers)


def turn_of(symmetry: Symmetry, matrices: Mapping[int, Tensor]) -> Element:
    """Return the element that rotates some streams, given by their numbers, and does nothing else."""
    turns = [matrices.get(index, NO_TURN) for index in range(len(symmetry.structure.rotations))]
    return replace(symmetry.identity(), rotation=tuple(turns))


def best_turn(rotation: Rotation, products: Tensor) -> Tensor:
    """Return the allowed orthogonal Q that maximises tr(Q^T M) (orthogonal Procrustes).

    Args:
        rotation: Of which stream.
        products: M, whose rows belong to the reference. Shape (size, size).

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
    """Return M such that tr(Q^T M) is what rotating the second network by Q gives to the inner product of both.

    Args:
        structure: The group.
        index: The number of the rotation.
        target: The parameters of the reference, by name.
        current: Those of the network that is rotated, gains included.

    Returns:
        Shape (size, size), float64.
    """
    size = structure.rotations[index].size
    total = torch.zeros(size, size, dtype=torch.float64)
    # Gains are taken off the second network, and put on the reference: <R, D Q D^-1 S> = <Q, (D R) (D^-1 S)'>.
    theirs = stream_rows(structure, index, current, current)
    ours = stream_rows(
        structure, index, target, {name: 1 / current[name] for name, _ in structure.rotations[index].gains}
    )
    for (_, left), (_, right) in zip(ours, theirs, strict=True):
        total += (left @ right.T).double().cpu()
    return total
