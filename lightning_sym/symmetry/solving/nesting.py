"""Nesting of units: members of heads, or of rows of heads."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_sym.symmetry.arrays import Bools, Ints, rising, rising_pairs
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.constraints import Constraints
from lightning_sym.symmetry.tracing.numbering import Hashes, components, flat, marked, mix, sum_by


class Nesting(NamedTuple):
    """Parents and members among roots.

    Attributes:
        pairs: Parents and members. Shape (2, pairs).
        shared: Parents that stay fixed while blocks are permuted.
        gains: The pairs with parents that are only gains, shared by several members. Shape (2, pairs).
    """

    pairs: Ints
    shared: Ints
    gains: Ints = np.zeros((2, 0), np.int64)

    @property
    def others(self) -> Ints:
        """All other pairs. Shape (2, pairs)."""
        return self.pairs[:, ~np.isin(self.pairs[0], self.gains[0])]


def find_nesting(constraints: Constraints, positions: Positions, colour: Hashes) -> Nesting:
    """Find parents and members: members know their parents, and parents that share members move together.

    Args:
        constraints: The constraints of operations.
        positions: The positions of units.
        colour: Hash of the places of each root.
    """
    if not constraints.blocks and not constraints.shared_gains:
        return Nesting(np.zeros((2, 0), np.int64), np.zeros(0, np.int64))
    pairs = _pairs([*constraints.blocks, *constraints.shared_gains], positions)
    others, gains = (_pairs(own, positions) for own in (constraints.blocks, constraints.shared_gains))
    gains = gains[:, ~np.isin(gains[0], others[0])]
    return Nesting(pairs, _shared(pairs, colour, marked(len(colour), positions.standing)), gains)


def _pairs(blocks: Sequence[tuple[Ints, Ints]], positions: Positions) -> Ints:
    """Return the roots of parents and members, without repeated pairs. Shape (2, pairs)."""
    parent, member = (positions.root[flat([pair[side] for pair in blocks])] for side in (0, 1))
    pairs: Ints = rising_pairs(parent, member)
    return pairs


def _shared(pairs: Ints, colour: Hashes, standing: Bools) -> Ints:
    """Return the parents that stay fixed while blocks are permuted: gains that all heads share.

    Such a gain is the parent of one unit in each head. A component of parents and members that contains it has several
    parents of one kind, whereas a block has one of each kind.

    Args:
        pairs: Parents and members. Shape (2, pairs).
        colour: Hash of the places of each root.
        standing: Mask of the roots in parameters.
    """
    component = components(len(colour), [(pairs[0], pairs[1])])
    own = rising(pairs[0])
    _, kind, count = np.unique(
        np.stack([component[own].astype(np.uint64), colour[own]]), axis=1, return_inverse=True, return_counts=True
    )
    several = marked(len(colour), component[own[count[kind.ravel()] > 1]])
    found: Ints = own[several[component[own]] & standing[own]]
    return found


def roles(nesting: Nesting, colour: Hashes) -> tuple[Hashes, Ints]:
    """Return a hash of each root's role in its block, and all pairs except those of shared parents.

    The role depends on the root's orbit, the orbits of its parents, and the shared parents.
    """
    (parent, member), number = nesting.pairs, len(colour)
    role = mix(colour ^ sum_by(member, mix(colour[parent]), number))
    among = np.isin(parent, nesting.shared)
    if among.any():
        role = mix(role ^ sum_by(member[among], mix(parent[among].astype(np.uint64)), number))
    return role, nesting.pairs[:, ~among]
