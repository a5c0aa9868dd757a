"""What half turns of sines win in a match: docs/theory/intertwiners.md, 2.17."""

from collections.abc import Mapping

import numpy as np
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints
from lightning_sym.symmetry.tracing.structure import HalfTurns, Structure


def reflected(structure: Structure, flips: sparse.csc_matrix) -> tuple[sparse.csc_matrix, Ints]:
    """Return what half turns flip together with the signs of their units.

    Args:
        structure: The group.
        flips: Where each generator of signs flips what stands there. Shape (positions, generators).

    Returns:
        The positions but for the biases', shape (positions, half turns); and these signs, -1 where there is none to go
        along. Shape (half turns,).
    """
    turns, signs = structure.half_turns, structure.signs
    start, count = signs.indptr[turns.place], np.diff(signs.indptr)[turns.place]
    able = (count == 1) & turns.odd
    sign = np.where(able, signs.indices[np.minimum(start, len(signs.indices) - 1)], -1)
    acting = (turns.flips + flips[:, np.maximum(sign, 0)]).tolil()
    acting[turns.place, np.arange(len(turns.place))] = 0
    acting = acting.tocsc()
    acting.data = np.mod(acting.data, 2)
    acting.eliminate_zeros()
    return acting, sign


def gains_of_half_turns(
    turns: HalfTurns, target: Mapping[str, Tensor], current: Mapping[str, Tensor], sign: float
) -> tuple[Floats, Floats]:
    """Return by how much biases come nearer, squared, by the best half turn each; and these half turns.

    Args:
        turns: The half turns.
        target: Parameters of the reference, by name.
        current: Those of the network that is moved.
        sign: -1 if the biases change their signs behind the half turns, else 1.
    """
    first, gained, step = 0, np.zeros(len(turns.place)), np.where(turns.odd, 1.0, 2.0)
    for name, count in zip(turns.biases, turns.counts, strict=True):
        at = slice(first, first + count)
        ours, theirs = (own[name].double().cpu().numpy() for own in (target, current))
        up, down = (
            np.square(ours - theirs) - np.square(ours - sign * (theirs + k * turns.size[at]))
            for k in (step[at], -step[at])
        )
        gained[at], step[at] = np.maximum(up, down), np.where(up >= down, step[at], -step[at])
        first += count
    return gained, step
