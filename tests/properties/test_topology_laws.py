"""Pieces, holes and joining levels against slow and obvious second implementations."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from lightning_sym.landscape.sets import betti_numbers, components, joining_levels

sizes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)
masks = hnp.arrays(np.bool_, sizes)
# Few different values, so that there are ties; infinite ones as from points that were given up early.
levels = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, np.inf])


def homology(inside: NDArray[np.bool_]) -> tuple[list[int], int]:
    """The Betti numbers of the union of closed cells from the ranks of boundary maps, and its Euler characteristic."""
    m = inside.ndim
    # A cell of the complex has doubled coordinates: odd along the axes in which it is an interval.
    cells: set[tuple[int, ...]] = set()
    for cube in np.argwhere(inside).tolist():
        cells |= set(itertools.product(*[(2 * i, 2 * i + 1, 2 * i + 2) for i in cube]))
    by_dimension = [sorted(c for c in cells if sum(i % 2 for i in c) == k) for k in range(m + 1)]
    ranks = [0]
    for k in range(1, m + 1):
        place = {cell: i for i, cell in enumerate(by_dimension[k - 1])}
        boundary = np.zeros((len(place), len(by_dimension[k])))
        for column, cell in enumerate(by_dimension[k]):
            odd = [axis for axis in range(m) if cell[axis] % 2]
            for number, axis in enumerate(odd):
                for side in (-1, 1):
                    face = (*cell[:axis], cell[axis] + side, *cell[axis + 1 :])
                    boundary[place[face], column] = side * (-1) ** number
        ranks.append(int(np.linalg.matrix_rank(boundary)) if boundary.size else 0)
    ranks.append(0)
    betti = [len(by_dimension[k]) - ranks[k] - ranks[k + 1] for k in range(m + 1)]
    return betti, sum((-1) ** k * len(found) for k, found in enumerate(by_dimension))


def minimax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """All joining levels by the algorithm of Floyd and Warshall, between cells in the order of the flat array."""
    places = np.argwhere(np.ones(values.shape))
    near = abs(places[:, None] - places[None]).max(2) <= 1
    flat = values.ravel()
    found = np.where(near, np.maximum(flat[:, None], flat), np.inf)
    for k in range(len(flat)):
        found = np.minimum(found, np.maximum(found[:, k, None], found[k]))
    return found


@given(masks)
@settings(max_examples=150, deadline=None)
def test_betti_numbers_are_those_of_the_chain_complex(inside: NDArray[np.bool_]) -> None:
    betti, euler = homology(inside)
    found = betti_numbers(inside)
    assert list(found) == betti[: inside.ndim]
    assert betti[inside.ndim] == 0
    assert sum((-1) ** k * count for k, count in enumerate(found)) == euler


@given(masks)
@settings(max_examples=50, deadline=None)
def test_pieces_are_numbered_and_faces_join_less(inside: NDArray[np.bool_]) -> None:
    full, labels = components(inside)
    face, finer = components(inside, "face")
    assert full <= face <= inside.sum()
    for count, found in ((full, labels), (face, finer)):
        assert ((found > 0) == inside).all()
        assert sorted(set(found[inside].tolist())) == list(range(1, count + 1))
    # A piece by faces lies in one piece by corners.
    assert len(set(zip(finer[inside].tolist(), labels[inside].tolist(), strict=True))) == face


@given(hnp.arrays(np.float64, sizes | hnp.array_shapes(min_dims=4, max_dims=4, max_side=3), elements=levels), st.data())
@settings(max_examples=200, deadline=None)
def test_joining_levels_are_minimax_paths(values: NDArray[np.float64], data: st.DataObject) -> None:
    flat = data.draw(st.lists(st.integers(0, values.size - 1), max_size=6))
    cells = [tuple(int(i) for i in np.unravel_index(k, values.shape)) for k in flat]
    found = joining_levels(values, cells)
    assert found.shape == (len(flat), len(flat))
    assert (found == minimax(values)[np.ix_(flat, flat)]).all()


@given(hnp.arrays(np.float64, sizes, elements=st.floats(0, 9)), st.floats(0, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_cells_are_joined_above_their_level_only(
    values: NDArray[np.float64], epsilon: float, data: st.DataObject
) -> None:
    cells = [tuple(data.draw(st.integers(0, n - 1)) for n in values.shape) for _ in range(2)]
    level = float(joining_levels(values, cells)[0, 1])
    for bound in (level, epsilon):
        labels = components(values < bound)[1]
        one, two = (int(labels[cell]) for cell in cells)
        assert (one == two > 0) == (level < bound)
