"""Which units are members of which: of heads, say, or of rows of heads."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sym.symmetry.arrays import rising, rising_pairs
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.constraints import Constraints
from lightning_sym.symmetry.tracing.numbering import Hashes, Ints, components, flat, marked, mix, sum_by


class Nesting(NamedTuple):
    """Which roots are members of which parents.

    Attributes:
        pairs: Parents and members. Shape (2, pairs).
        shared: Parents that stay where they are while blocks change places.
        gains: The pairs whose parents are gains, and nothing else, that several members share. Shape (2, pairs).
    """

    pairs: Ints
    shared: Ints
    gains: Ints = np.zeros((2, 0), np.int64)

    @property
    def others(self) -> Ints:
        """The pairs whose parents are no such gains. Shape (2, pairs)."""
        return self.pairs[:, ~np.isin(self.pairs[0], self.gains[0])]


def find_nesting(constraints: Constraints, positions: Positions, colour: Hashes) -> Nesting:
    """Find parents and members: members know their parents, and parents that share members move together.

    Args:
        constraints: All demands.
        positions: Where units are seen.
        colour: For each root, where it stands.
    """
    if not constraints.blocks and not constraints.shared_gains:
        return Nesting(np.zeros((2, 0), np.int64), np.zeros(0, np.int64))
    pairs = _pairs([*constraints.blocks, *constraints.shared_gains], positions)
    others, gains = (_pairs(own, positions) for own in (constraints.blocks, constraints.shared_gains))
    gains = gains[:, ~np.isin(gains[0], others[0])]
    return Nesting(pairs, _shared(pairs, colour, marked(len(colour), positions.standing)), gains)


def _pairs(blocks: Sequence[tuple[Ints, Ints]], positions: Positions) -> Ints:
    """Return the roots of parents and members, each pair once. Shape (2, pairs)."""
    parent, member = (positions.root[flat([pair[side] for pair in blocks])] for side in (0, 1))
    pairs: Ints = rising_pairs(parent, member)
    return pairs


def _shared(pairs: Ints, colour: Hashes, standing: NDArray[np.bool_]) -> Ints:
    """Return which parents stay where they are while blocks change places: gains that all heads share.

    Such a gain is the parent of one unit in each head. Of all that hangs together through it, several parents are
    alike, where a block has one of each kind.

    Args:
        pairs: Parents and members. Shape (2, pairs).
        colour: For each root, what it is like.
        standing: For each root, whether it stands in a parameter.
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
    """Return what each root is in its block: its orbit, those of its parents, and the shared parents themselves.

    With the pairs of parents and members, but for shared parents.
    """
    (parent, member), number = nesting.pairs, len(colour)
    role = mix(colour ^ sum_by(member, mix(colour[parent]), number))
    among = np.isin(parent, nesting.shared)
    if among.any():
        role = mix(role ^ sum_by(member[among], mix(parent[among].astype(np.uint64)), number))
    return role, nesting.pairs[:, ~among]
