"""Half turns: half periods that biases can absorb without changing the function, and the signs that they flip."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import sparse

from lightning_sym.symmetry.arrays import Bools, Floats
from lightning_sym.symmetry.equations import solve
from lightning_sym.symmetry.numbering import flat
from lightning_sym.symmetry.solving.scales import variables_at
from lightning_sym.symmetry.solving.structure import HalfTurns, Structure
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.labelling.constraints import Constraints
from lightning_sym.symmetry.tracing.labels import Labels


def reflected(labels: Labels) -> Labels:
    """Let biases of which sign changes add half a period p represent b - p / 2, so that signs map it to its negative.

    Named values v between the bias and the sine then become p - v.
    """
    walk, sizes = labels.walk, {n: own.size for n, own in labels.walk.constraints.half_periods.items() if own.reflects}
    added = dict(labels.charts.added)
    for name, size in sizes.items():
        before = added.get(name, 0.0)
        assert isinstance(before, float | tuple), "functions onto the positive numbers and matrices have no half turns"
        added[name] = tuple(own - size / 2 for own in before) if isinstance(before, tuple) else before - size / 2
    for mark, value in walk.taps.items():
        if (front := value.half_turned) is not None and front.bias in sizes:
            walk.taps[mark] = replace(value, offset=front.times * sizes[front.bias])
    return labels._replace(charts=labels.charts._replace(added=added))


class Turned(NamedTuple):
    """The solution for half turns.

    Attributes:
        sizes: Half a period at each entry of each bias.
        odd: Whether a half turn is allowed by itself; otherwise only even numbers are. Shape (half turns,), bool.
        flips: The variables that each half turn flips. Shape (variables, half turns).
    """

    sizes: dict[str, Floats]
    odd: Bools
    flips: sparse.csc_matrix


def solve_half_turns(constraints: Constraints) -> Turned | None:
    """Find half turns that preserve the function while all biases before them keep their signs.

    A whole turn always does. Half a turn does if it requires no other half turn.
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
    """Add half turns to the groups on parameters and on values.

    Args:
        turned: The solution; None if there are no half turns.
        structure: The group on parameters and buffers.
        values: The group on named values.
        positions: The positions of units.
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
