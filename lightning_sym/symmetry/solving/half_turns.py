"""Half turns: which half periods in biases leave the function alone, and what they flip."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import sparse

from lightning_sym.symmetry.arrays import Bools, Floats
from lightning_sym.symmetry.solving.scales import variables_at
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.constraints import Constraints
from lightning_sym.symmetry.tracing.equations import solve
from lightning_sym.symmetry.tracing.numbering import flat
from lightning_sym.symmetry.tracing.structure import HalfTurns, Structure


class Turned(NamedTuple):
    """The solution for half turns.

    Attributes:
        sizes: By bias, half a period at each of its entries.
        odd: Which half turns are allowed by themselves, or in even numbers only. Shape (half turns,), bool.
        flips: Which variables a half turn flips. Shape (variables, half turns).
    """

    sizes: dict[str, Floats]
    odd: Bools
    flips: sparse.csc_matrix


def solve_half_turns(constraints: Constraints) -> Turned | None:
    """Find which half turns leave the function alone while all biases in front of them keep their signs.

    A whole turn always does. Half a turn does if no other half turn has to go with it.
    """
    known = {name: own for name, own in constraints.half_periods.items() if math.isfinite(own.size)}
    if not known:
        return None
    still = flat([*constraints.fixed_signs, *(own.standing for own in known.values())])
    forms = solve(constraints.scales, constraints.sign_equations, still, modulo_two=True)
    flips = forms[flat([own.flip for own in known.values()])].tocsr()
    alone, used = np.diff(flips.indptr) == 1, np.bincount(flips.indices, minlength=flips.shape[1])
    first = np.zeros(flips.shape[0], np.int64)
    first[alone] = flips.indices[flips.indptr[:-1][alone]]
    odd = alone & (used[first] == 1) if flips.shape[1] else alone
    chosen = forms.tocsc()[:, first[odd]]
    where = sparse.csr_matrix((np.ones(odd.sum()), (np.arange(odd.sum()), np.flatnonzero(odd))), (odd.sum(), len(odd)))
    sizes = {name: np.full(len(own.flip), own.size) for name, own in known.items()}
    return Turned(sizes, odd, (chosen @ where).tocsc())


def with_half_turns(
    turned: Turned | None, structure: Structure, values: Structure, positions: Positions
) -> tuple[Structure, Structure]:
    """Return the group on parameters, and on values, with half turns.

    Args:
        turned: The solution.
        structure: The group on parameters and buffers.
        values: The group on named values.
        positions: Where units are seen.
    """
    if turned is None:
        return structure, values
    starts = {s.tensor: s.offset for s in structure.slots if s.axes == (0,) and s.tensor in turned.sizes}
    held = np.concatenate([np.full(len(own), name in starts) for name, own in turned.sizes.items()])
    place = flat([starts[name] + np.arange(len(own)) for name, own in turned.sizes.items() if name in starts])
    size = np.concatenate([np.zeros(0), *(own for name, own in turned.sizes.items() if name in starts)])
    end, flips = structure.magnitudes.shape[0], turned.flips[variables_at(positions)].tocsr()[:, np.flatnonzero(held)]
    if not len(place):
        return structure, values
    biases = tuple(name for name in turned.sizes if name in starts)
    counts = tuple(len(turned.sizes[name]) for name in biases)
    made = HalfTurns(biases, counts, place, size, turned.odd[held], flips[:end])
    return replace(structure, half_turns=made), replace(values, half_turns=replace(made, flips=flips[end:]))
