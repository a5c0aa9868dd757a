"""Recognition: find units that were only moved, in the networks' own scales, from few numbers per unit.

A network and a copy with other places of its units agree in every direction. A few random directions (Johnson and
Lindenstrauss 1984, "Extensions of Lipschitz mappings into a Hilbert space") show which unit is which. This takes far
less time than a search for networks that merely resemble each other.
"""

from collections.abc import Collection, Generator
from typing import NamedTuple

import torch
from torch import nn

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.matching.balanced import comparable
from lightning_sym.symmetry.matching.coordinate_descent import FREEDOM, Descent, Directions

_DIRECTIONS = 64
# Units that only moved leave a smaller fraction of the squared distance.
_HOPELESS = 0.5


class Recognised(NamedTuple):
    """A point of an orbit that may be nearest to the reference.

    Attributes:
        element: Maps ``b`` to the point.
        settled: Whether only rounding is left of the distance.
        objective: Objective of the descent, before and after; see :class:`Descended`.
    """

    element: Element
    settled: bool
    objective: tuple[float, float]


def recognised(
    symmetry: Symmetry,
    a: nn.Module,
    b: nn.Module,
    *,
    signs: bool,
    device: torch.device,
    seed: int,
    freedom: Collection[str] = FREEDOM,
) -> Generator[Recognised, None, None]:
    """Match units and blocks without scales; then, where only cells with matrices are left, rotate these.

    Args:
        symmetry: The symmetry of both networks.
        a: The reference. Not changed.
        b: The network to align. Not changed.
        signs: Whether signs may change.
        device: Device for the gains.
        seed: Seed of the directions.
        freedom: The parts of the group to use; see :func:`lightning_sym.symmetry.weight_matching`.

    Yields:
        The point after each of the two steps; nothing if the units do not seem to have moved only.
    """
    rigid = [own for own in FREEDOM if own in freedom and own in ("permutations", "blocks")]
    compared = comparable(symmetry, a, b, balance=False, signs=signs)
    descent = Descent(compared, signs=signs, device=device, freedom=rigid)
    mixed = frozenset().union(*(group.tensors for group in descent.groups if group.mixers))
    begin, before = descent.objective, descent.squared_distance_outside(mixed)
    descent.directions = Directions(_DIRECTIONS, seed)
    descent.pass_forward()
    descent.directions = None
    after = descent.squared_distance_outside(mixed)
    if after > _HOPELESS * before:
        return
    descent.permute_blocks()
    yield Recognised(compared.back(descent.element), descent.settled, (begin, descent.objective))
    if "matrices" in freedom and mixed and not descent.settled:
        descent.freedom = frozenset(freedom)
        descent.permute_blocks()
        descent.mix_cells()
        yield Recognised(compared.back(descent.element), descent.settled, (begin, descent.objective))
