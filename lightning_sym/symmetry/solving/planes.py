"""Units that are planes: two coordinates at every place, which a complex number may turn and scale.

See docs/theory/transformers.md, 5.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lightning_sym.symmetry.arrays import rising_pairs
from lightning_sym.symmetry.tracing.constraints import Constraints, Label
from lightning_sym.symmetry.tracing.numbering import Hashes, Ints, components, flat, marked, mix, sum_by

NO_PAIRS = np.zeros((0, 2), np.int64)


class Places(NamedTuple):
    """What is known of every position at which units are seen.

    Attributes:
        raw: The atom that stood there before any were merged.
        key: What two positions have in common that are the two coordinates of one plane at one place.
    """

    raw: Ints | NDArray[np.int32]
    key: Hashes

    def within(self, rows: slice) -> "Places":
        """Return what is known of some of the positions."""
        return Places(self.raw[rows], self.key[rows])


class PlaneFinder:
    """Finds out which units are planes, and which of their positions are the first and second coordinates.

    Where constants turn two coordinates, these are merged into one unit. They are known apart by what they were merged
    with elsewhere: everything else has to treat the coordinates of a plane as coordinates, the first as first.

    Args:
        constraints: All demands.
        root: For each atom, the one with which it was merged.
        grouped: By weight of a grouped convolution, the label over its two first axes.
    """

    def __init__(self, constraints: Constraints, root: Ints, grouped: Sequence[Label]) -> None:
        self.any = bool(constraints.planes)
        if not self.any:
            return
        number = constraints.atoms
        copies = [(copy.ravel(), original.ravel()) for copy, original, _ in constraints.copies]
        coordinate = components(number, [*constraints.merges, *constraints.contracted, *copies])
        # What is of one value: queries, say, but not the keys that they meet.
        self.family = components(number, [*constraints.merges, *constraints.turned])
        held = [*constraints.held, *constraints.normed, *constraints.centred, *constraints.gained]
        held += constraints.divided
        held += [label.atom for label in grouped]
        stuck = marked(number, coordinate[flat(held)])
        # Blocks to which a coordinate belongs: the two of a plane have the same ones.
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
        """Return for each orbit which two of its columns are coordinates of a plane, pair by pair.

        Args:
            columns: Of each orbit.
            places: What is known of the parameters' positions.
            forms: Exponents of scales, and of signs, by position.

        Returns:
            Each of shape (pairs, 2); no pairs if the units of an orbit are no planes.
        """
        if not self.any:
            return ()
        plane = self._plane[self._coordinate[places.raw]]
        # Whatever stands in a plane belongs to one unit.
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
            # Which coordinate is the first one is a convention: that of the first column.
            self._flip[own[:, 0]] = self._sides(matrix[:, :1], places)[:, 0]
            pairs = self._paired(matrix, places)
            one, two = (matrix[:, pairs[:, side]].ravel() for side in (0, 1))
            alike = 2 * len(pairs) == matrix.shape[1] and all((own[one] != own[two]).nnz == 0 for own in forms)
            # A phase goes with its modulus: where that acts on other units too, nothing turns them along.
            alike = alike and _act_nowhere_else(forms[0], times, matrix)
            result.append(pairs if alike else NO_PAIRS)
        return tuple(result) if any(len(pairs) for pairs in result) else ()

    def of_values(self, planes: Sequence[Ints], columns: Sequence[Ints], places: Places) -> tuple[Ints, ...]:
        """Return the same for values inside the network, of those orbits that are planes.

        Args:
            planes: What was found for parameters.
            columns: Of each orbit, among the positions of values.
            places: What is known of these.
        """
        return tuple(
            self._paired(matrix, places) if len(pairs) and matrix.size else NO_PAIRS
            for pairs, matrix in zip(planes, columns, strict=False)
        )

    def _sides(self, matrix: Ints, places: Places) -> Ints:
        """Return 1 where the first coordinate of a plane stands, and -1 where the second one does."""
        coordinate = self._coordinate[places.raw[matrix]]
        plane = self._plane[coordinate]
        return np.where(plane >= 0, self._side[coordinate] * self._flip[plane], 0)

    def _paired(self, matrix: Ints, places: Places) -> Ints:
        """Return the columns that are first and second coordinates at one place, the same for all units."""
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
    """Whether the generators that act where some units stand act nowhere but at one of these units each.

    Args:
        forms: Exponents, by position.
        times: At how many positions each generator acts.
        columns: The positions of the units.
    """
    own = forms[columns.ravel()]
    unit = np.repeat(np.arange(columns.size) // columns.shape[1], np.diff(own.indptr))
    (generator, _), count = np.unique(np.stack([own.indices, unit]), axis=1, return_counts=True)
    return len(np.unique(generator)) == len(generator) and bool((count == times[generator]).all())
