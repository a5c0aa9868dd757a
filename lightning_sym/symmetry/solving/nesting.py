"""Nesting of units: members of heads, or of rows of heads."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_sym.symmetry.arrays import Bools, Ints, rising, rising_pairs
from lightning_sym.symmetry.numbering import Hashes, Numbers, components, flat, marked, mix, sum_by
from lightning_sym.symmetry.solving.units import Positions
from lightning_sym.symmetry.tracing.labelling.constraints import Constraints


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

    def without(self, parents: Iterable[Ints]) -> "Nesting":
        """Return the nesting without some parents."""
        gone = flat([*parents])
        pairs, gains = (own[:, ~np.isin(own[0], gone)] for own in (self.pairs, self.gains))
        return Nesting(pairs, np.setdiff1d(self.shared, gone), gains)

    @property
    def others(self) -> Ints:
        """All other pairs. Shape (2, pairs)."""
        return self.pairs[:, ~np.isin(self.pairs[0], self.gains[0])]


class Heads(NamedTuple):
    """A unit of every head, with the gains and biases that all heads share.

    Attributes:
        gains: The roots of the gains and biases, each of another parameter.
        members: The roots of the units, one in each head.
    """

    gains: Ints
    members: Ints

    @property
    def copies(self) -> tuple[Ints, Ints, Ints]:
        """The units as copies of the gain; see :meth:`Constraints.copied`."""
        return self.members, np.full_like(self.members, self.gains[0]), np.arange(len(self.members))


def heads_with_one_gain(nesting: Nesting, colour: Hashes, fixed: Bools) -> list[Heads]:
    """Find units of heads that could change places with others of all heads, together with the gains of all heads.

    Args:
        nesting: Parents and members.
        colour: Hash of the places of each root.
        fixed: Mask of the roots that stay in place.
    """
    by_members: dict[tuple[int, ...], list[int]] = {}
    for gain in nesting.shared.tolist():
        members = nesting.pairs[1, slice(*np.searchsorted(nesting.pairs[0], (gain, gain + 1)))]  # pairs rise
        by_members.setdefault(tuple(members.tolist()), []).append(gain)
    heads = [Heads(np.array(gains), np.array(members)) for members, gains in by_members.items()]
    met = np.bincount(flat([own.members for own in heads]), minlength=len(colour))
    kinds = [tuple(tuple(sorted(colour[part].tolist())) for part in own) for own in heads]
    alike = Counter(kinds)
    return [
        own
        for own, kind in zip(heads, kinds, strict=True)
        if alike[kind] > 1
        and len({*colour[own.gains].tolist()}) == len(own.gains)
        and not (fixed[flat([*own])].any() or (met[own.members] > 1).any())
    ]


def merged(heads: Sequence[Heads], root: Ints, atom: Numbers) -> dict[str, Any]:
    """Return roots and atoms of positions, with the gains that heads share as one root each."""
    onto = np.arange(len(root))
    for own in heads:
        onto[own.gains] = own.gains[0]
    return {"root": onto[root], "atom": onto.astype(atom.dtype)[atom]}


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
    parents of one kind, whereas a block has one of each kind; members of blocks inside a block have no different other
    parents, and one parent of each kind.

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
    alike = own[several[component[own]] & standing[own]]
    gains = np.isin(pairs[0], alike)
    held = sum_by(pairs[1][~gains], mix(pairs[0][~gains]), len(colour))
    told = gains & (held[pairs[1]] > 0)
    heads = np.unique(np.stack([pairs[0][told].astype(np.uint64), held[pairs[1][told]]]), axis=1)
    gain, count = np.unique(heads[0].astype(np.int64), return_counts=True)
    together = gains & (np.bincount(pairs[1][gains], minlength=len(colour))[pairs[1]] > 1)  # no blocks of their own
    return rising(np.r_[gain[count > 1], pairs[0][together]])


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
