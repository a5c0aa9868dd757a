"""Rotary pairs: units with two coordinates at every place, where a complex number may act.

See docs/theory/transformers.md, 5.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lightning_sym.symmetry.arrays import Ints, rising_pairs
from lightning_sym.symmetry.numbering import Hashes, components, flat, marked, mix, sum_by
from lightning_sym.symmetry.tracing.labelling.constraints import Constraints, Label

NO_PAIRS = np.zeros((0, 2), np.int64)


class Places(NamedTuple):
    """Data on the positions of units.

    Attributes:
        raw: The original atom at each position, before atoms were merged.
        key: A hash that is equal for the two coordinates of one pair at one place.
    """

    raw: Ints | NDArray[np.int32]
    key: Hashes

    def within(self, rows: slice) -> "Places":
        """Select some of the positions."""
        return Places(self.raw[rows], self.key[rows])


class PlaneFinder:
    """Finds the units that are rotary pairs, and the positions of their first and second coordinates.

    Where constants rotate two coordinates, these are merged into one unit. Merges elsewhere distinguish them: all
    other operations have to keep first coordinates apart from second ones.

    Args:
        constraints: The constraints of operations.
        root: The root of each atom.
        grouped: By weight of a grouped convolution, the label over its first two axes.
    """

    def __init__(self, constraints: Constraints, root: Ints, grouped: Sequence[Label]) -> None:
        self.any = bool(constraints.planes)
        if not self.any:
            return
        number = constraints.atoms
        copies = [(copy.ravel(), original.ravel()) for copy, original, _ in constraints.copies]
        coordinate = components(number, [*constraints.merges, *constraints.contracted, *copies])
        # Atoms of one value: those of queries, for example, without the keys that multiply them.
        self.family = components(number, [*constraints.merges, *constraints.turned])
        held = [*constraints.held, *constraints.normed, *constraints.centred, *constraints.gained]
        held += constraints.divided
        held += [label.atom for label in grouped]
        stuck = marked(number, coordinate[flat(held)])
        # Blocks that contain a coordinate: the two coordinates of a pair belong to the same ones.
        shared = [*constraints.blocks, *constraints.shared_gains]
        parent, member = (flat([pair[side] for pair in shared]) for side in (0, 1))
        pairs = rising_pairs(root[parent], coordinate[member])
        blocks = sum_by(pairs[1], mix(pairs[0]), number)
        first, second = (flat([pair[side] for pair in constraints.planes]) for side in (0, 1))
        found = rising_pairs(coordinate[first], coordinate[second])
        times = np.bincount(found.ravel(), minlength=number)
        free = ~stuck[found].any(0) & (times[found] == 1).all(0) & (blocks[found[0]] == blocks[found[1]])
        free &= found[0] != found[1]
        found = found[:, free]
        self._coordinate = coordinate
        self._side, self._plane = np.zeros(number, np.int64), np.full(number, -1)
        for side in (0, 1):
            self._side[found[side]] = 1 - 2 * side
            self._plane[found[side]] = np.arange(found.shape[1])
        self._planes = found.shape[1]

    def of_parameters(
        self, columns: Sequence[Ints], places: Places, forms: Sequence[sparse.csr_matrix]
    ) -> tuple[Ints, ...]:
        """Return the pairs of columns that are the two coordinates of rotary pairs, for each orbit.

        Args:
            columns: The columns of each orbit.
            places: Data on the parameters' positions.
            forms: Exponents of scales, and of signs, by position.

        Returns:
            Each of shape (pairs, 2); no pairs if the units of an orbit are not rotary pairs.
        """
        if not self.any:
            return ()
        plane = self._plane[self._coordinate[places.raw]]
        # All positions of a pair must belong to one unit.
        standing = np.bincount(plane[plane >= 0], minlength=self._planes)
        self._flip = np.ones(self._planes, np.int64)
        times = np.bincount(forms[0].indices[: forms[0].indptr[len(places.raw)]], minlength=forms[0].shape[1])
        result = []
        for matrix in columns:
            own = plane[matrix] if matrix.size else matrix
            whole = matrix.size and (own >= 0).all() and (own == own[:, :1]).all()
            if not (whole and (standing[own[:, 0]] == matrix.shape[1]).all()):
                result.append(NO_PAIRS)
                continue
            # The first coordinate is the one in the first column, by convention.
            self._flip[own[:, 0]] = self._sides(matrix[:, :1], places)[:, 0]
            pairs = self._paired(matrix, places)
            one, two = (matrix[:, pairs[:, side]].ravel() for side in (0, 1))
            alike = 2 * len(pairs) == matrix.shape[1] and all((own[one] != own[two]).nnz == 0 for own in forms)
            # A phase and its modulus act on the same units: a modulus that acts elsewhere has no phase there.
            alike = alike and _act_nowhere_else(forms[0], times, matrix)
            result.append(pairs if alike else NO_PAIRS)
        return tuple(result) if any(len(pairs) for pairs in result) else ()

    def of_values(self, planes: Sequence[Ints], columns: Sequence[Ints], places: Places) -> tuple[Ints, ...]:
        """Return the same for values inside the network, for orbits of rotary pairs.

        Args:
            planes: The pairs of columns for parameters.
            columns: The columns of each orbit, among the positions of values.
            places: Data on these positions.
        """
        return tuple(
            self._paired(matrix, places) if len(pairs) and matrix.size else NO_PAIRS
            for pairs, matrix in zip(planes, columns, strict=False)
        )

    def _sides(self, matrix: Ints, places: Places) -> Ints:
        """Return 1 at first coordinates of pairs, -1 at second ones, and 0 elsewhere."""
        coordinate = self._coordinate[places.raw[matrix]]
        plane = self._plane[coordinate]
        return np.where(plane >= 0, self._side[coordinate] * self._flip[plane], 0)

    def _paired(self, matrix: Ints, places: Places) -> Ints:
        """Return the pairs of columns that are the two coordinates at one place, for all units."""
        sides, keys = self._sides(matrix, places), places.key[matrix]
        regular = ((sides == sides[:1]) & (sides != 0)).all(0)
        partners: dict[tuple[int, int], list[int]] = {}
        for column in np.flatnonzero(regular).tolist():
            partners.setdefault((int(keys[0, column]), int(sides[0, column])), []).append(column)
        pairs = []
        for (key, side), own in partners.items():
            others = partners.get((key, -1), [])
            if side == 1 and len(own) == len(others) == 1 and (keys[:, own[0]] == keys[:, others[0]]).all():
                pairs.append((own[0], others[0]))
        found = np.array(pairs, np.int64).reshape(-1, 2)
        ordered = np.sort(keys[:, found[:, 0]], axis=1)
        return NO_PAIRS if (ordered[:, 1:] == ordered[:, :-1]).any() else found


def _act_nowhere_else(forms: sparse.csr_matrix, times: Ints, columns: Ints) -> bool:
    """Return whether generators that act on some units act on one of these units each, and nowhere else.

    Args:
        forms: Exponents, by position.
        times: Number of positions that each generator acts on.
        columns: The positions of the units.
    """
    own = forms[columns.ravel()]
    unit = np.repeat(np.arange(columns.size) // columns.shape[1], np.diff(own.indptr))
    (generator, _), count = np.unique(np.stack([own.indices, unit]), axis=1, return_counts=True)
    return len(np.unique(generator)) == len(generator) and bool((count == times[generator]).all())
