"""Equations between unknowns: solved as a matrix is, from the start or step by step, and each only once."""

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.arrays import distinct_columns
from lightning_sym.symmetry.equations import _once, solve
from lightning_sym.symmetry.group.translations import pivots
from lightning_sym.symmetry.solving import scales
from lightning_sym.symmetry.tracing.affine.moves import Move
from lightning_sym.symmetry.tracing.affine.solution import Solution, eliminate
from lightning_sym.symmetry.tracing.affine.system import System
from lightning_sym.symmetry.tracing.affine.values import ONE, Coefficient, Unknowns
from lightning_sym.symmetry.tracing.graph.coordinates import numbered_rows


def echelon(matrix: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Return the columns of the pivots, the last of each row, and what the other columns make of these; dense."""
    rows, pivots_at = matrix.copy(), []
    for column in reversed(range(rows.shape[1])):
        left = [row for row in range(len(rows)) if row not in [own for own, _ in pivots_at]]
        at = max(left, key=lambda row: abs(rows[row, column]), default=None)
        if at is None or abs(rows[at, column]) < 1e-8:
            continue
        rows[at] /= rows[at, column]
        for row in range(len(rows)):
            if row != at:
                rows[row] -= rows[row, column] * rows[at]
        pivots_at.append((at, column))
    forms = np.eye(rows.shape[1])
    for at, column in pivots_at:
        forms[column] = -rows[at]
        forms[column, column] = 0
    return [column for _, column in pivots_at], forms


def random_system(seed: int) -> tuple[sparse.csr_matrix, np.ndarray, np.ndarray]:
    """Return equations of few unknowns each, which unknowns are zero, and priorities."""
    generator = np.random.default_rng(seed)
    count, size = generator.integers(2, 20), generator.integers(0, 20)
    matrix = np.zeros((size, count))
    for row in matrix:
        own = generator.choice(count, min(count, generator.integers(1, 5)), replace=False)
        row[own] = generator.choice([1, -1, 2, 0.5], len(own))
    zero = generator.random(count) < 0.1
    zero[0] = True
    return sparse.csr_matrix(matrix), zero, generator.integers(0, 4, count)


@pytest.mark.parametrize("seed", range(40))
def test_elimination_is_the_reduced_echelon_form(seed: int) -> None:
    equations, zero, priority = random_system(seed)
    count = equations.shape[1]
    order = np.lexsort((np.arange(count), priority))
    whole = np.concatenate([equations.toarray(), np.eye(count)[zero]])[:, order]
    bound, forms = echelon(whole)
    found = eliminate(equations, zero, priority)
    free = [at for at in range(count) if at not in bound]
    assert found.free.tolist() == order[free].tolist()
    np.testing.assert_allclose(found.forms.toarray()[order], forms[:, free], atol=1e-9)
    # As many independent equations as unknowns that they define, and these can be solved for.
    own = equations[found.rows][:, found.bound].toarray()
    assert np.linalg.matrix_rank(own) == len(found.bound)


@pytest.mark.parametrize("seed", range(20))
def test_elimination_goes_on_from_what_is_solved(seed: int) -> None:
    equations, zero, priority = random_system(seed)
    half = equations.shape[0] // 2
    first = eliminate(equations[:half], np.arange(len(zero)) == 0, priority)
    found, whole = first.narrowed(equations[half:], zero, priority), eliminate(equations, zero, priority)
    assert found.free.tolist() == whole.free.tolist()
    np.testing.assert_allclose(found.forms.toarray(), whole.forms.toarray(), atol=1e-9)
    assert not found.whole


def test_unknowns_are_made_once_for_the_same_sum() -> None:
    unknowns = Unknowns()
    one, two = unknowns.fresh((3,), 4), unknowns.fresh((3,), 4)
    places = torch.tensor([0, 1, 1, 0, 2, 0])
    terms = [(one[places], ONE), (two[places], Coefficient(2.0))]
    found = unknowns.combined(terms)
    assert found is not None
    again = unknowns.combined(terms)
    assert again is not None
    assert len(found.unique()) == 3
    assert torch.equal(found == found[:, None], places == places[:, None])
    assert torch.equal(found, again)
    assert unknowns.count == 10
    # Other numbers are other sums.
    other = unknowns.combined([(one[places], ONE), (two[places], Coefficient(3.0))])
    assert other is not None
    assert not set(other.tolist()) & set(found.tolist())
    # Each of many equal ones is equal to the first.
    count = len(unknowns.equations)
    unknowns.equate(one[places], one[places.flip(0)])
    assert sum(len(numbers) for numbers, _ in unknowns.equations[count:]) == 2


@pytest.mark.parametrize(
    ("kind", "run"),
    [("other", lambda t: t.roll((1, -2), (0, 1))), ("other", lambda t: torch.nn.functional.pad(t, (0, 1, 2, 0))),
        ("cut", lambda t: t.narrow(1, 1, 2)), ("cut", lambda t: t.select(1, 2)), ("cut", lambda t: t.split(3, 1))],
)  # fmt: skip
def test_moves_behind_leading_axes_are_those_of_each_part(kind: str, run) -> None:  # type: ignore[no-untyped-def]
    made = run(torch.zeros(3, 4))
    after = tuple(made[0].shape) if isinstance(made, tuple) else tuple(made.shape)
    move = Move(kind, (3, 4), after, run, axis=1, drops=len(after) == 1)
    array = torch.arange(1, 25).reshape(2, 3, 4)
    thin = move(array[:, :, :1], 1), [run(part.expand(3, 4)) for part in array[:, :, :1]]
    for own, parts in zip(
        thin[0] if isinstance(thin[0], list) else [thin[0]],
        zip(*thin[1], strict=True) if isinstance(made, tuple) else [thin[1]],
        strict=True,
    ):
        assert torch.equal(own.expand(torch.stack(list(parts)).shape), torch.stack(list(parts)))
    found, wanted = move(array, 1), [run(part) for part in array]
    for own, parts in zip(
        found if isinstance(found, list) else [found],
        zip(*wanted, strict=True) if isinstance(made, tuple) else [wanted],
        strict=True,
    ):
        assert torch.equal(own, torch.stack(list(parts)))


def test_pivots_are_independent_rows() -> None:
    generator = np.random.default_rng(0)
    chain = sparse.csr_matrix(np.array([[1.0, 0, 0, 0], [1, 2, 0, 0], [0, 1, 3, 0], [0, 3, 0, 4]]))
    assert sorted(pivots(chain).tolist()) == [0, 1, 2, 3]
    entangled = sparse.csr_matrix(generator.normal(size=(30, 4)) * (generator.random((30, 4)) < 0.8))
    rows = pivots(entangled)
    assert np.linalg.matrix_rank(entangled.toarray()[rows]) == 4
    with pytest.raises(RuntimeError, match="change nothing that can be told"):
        pivots(sparse.csr_matrix(np.array([[1.0, 1.0], [2.0, 2.0]])))


@pytest.mark.parametrize("modulo_two", [False, True])
def test_equations_that_captures_repeat_are_solved_once(modulo_two: bool) -> None:
    """A capture of another length has multiples of the same equations: then no unknown is in a single one."""
    generator = np.random.default_rng(0)
    variables = np.stack([generator.choice(60, 4, replace=False) for _ in range(30)])
    factors = np.array([1.0, 1, 1, 1]) if modulo_two else np.array([1.0, -2, 0.5, 3])
    zeros = np.zeros(0, np.int64)
    once = solve(60, [(variables, factors)], zeros, modulo_two=modulo_two)
    again = [(variables[::-1], factors if modulo_two else -2 * factors), (variables, factors)]
    twice = solve(60, again, zeros, modulo_two=modulo_two)
    assert twice.shape == once.shape
    whole = np.zeros((30, 60))
    whole[np.arange(30)[:, None], variables] = factors
    left = whole @ twice
    assert not np.any(left % 2 if modulo_two else np.abs(left) > 1e-9)
    rows = csr_matrix(np.array([[1.0, 2, 3, 0], [0, 1, 2, 3], [2, 4, 6, 0], [1, 2, 4, 0], [0, -1, -2, -3]]))
    assert _once(rows).toarray().tolist() == rows.toarray()[[0, 1, 3]].tolist()


@pytest.mark.parametrize("most", [3, 1000, 2**40])
def test_columns_and_rows_are_told_apart_as_numpy_does(most: int) -> None:
    """Also where numbers are too large to make one of several, and where the first columns say nothing."""
    generator = np.random.default_rng(most)
    for count, height in ((1, 2), (9, 1), (30, 2), (30, 4)):
        columns = generator.integers(-3, most, (height, count))[:, generator.integers(0, count, count)]
        unique, which = np.unique(columns, axis=1, return_inverse=True)
        for found, wanted in zip(distinct_columns(*columns), (unique, which), strict=True):
            np.testing.assert_array_equal(found, wanted)
        for rows in (columns.T, np.c_[np.zeros((count, 12)), columns.T], np.eye(count)):
            wanted = np.unique(rows, axis=0, return_inverse=True)[1]
            np.testing.assert_array_equal(numbered_rows(rows), wanted)


def test_generators_that_act_with_known_ones_are_exchanged_for_what_acts_alone() -> None:
    """Four units are written by s + t and read by -s - t: s is one of two, t of each unit; s acts alone elsewhere."""
    rows = [[unit % 2, 2 + unit] for unit in range(4)]
    forms = np.zeros((10, 6))
    for unit, own in enumerate(rows):
        forms[unit, own], forms[4 + unit, own] = (-1, 1), (-1, -1)
    forms[8, 0] = forms[9, 1] = 1
    columns = [np.arange(8).reshape(2, 4).T, np.array([[8], [9]])]
    found = scales.tabulate(columns, sparse.csr_matrix(forms), 10, modulo_two=False)
    assert found.left_out == 0
    assert found.forms.shape == (10, 6)
    assert set(np.unique(found.of_units[0])) >= {2, 3, 4, 5}
    # What they generate stays.
    assert np.linalg.matrix_rank(np.hstack([forms, found.forms.toarray()])) == 6
    assert np.array_equal(found.forms.toarray(), np.rint(found.forms.toarray()))


class TiedTransformer(nn.Module):
    """A table of tokens that also reads the stream, one layer between layer norms."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, 4), nn.Embedding(6, 4)
        self.first, self.layer, self.last = nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.last(h + self.layer(self.first(h))) @ self.tokens.weight.mT


def test_blocks_of_equations_do_not_grow_with_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a table with equal factors share a block: 50,000 blocks of one row each took most of the time."""
    counts = []

    def solved(self: Solution, system: System) -> None:
        plain(self, system)
        counts.append((len(system.unknowns.equations), sum(len(own) for own, _ in system.unknowns.equations)))

    plain = Solution.__init__
    monkeypatch.setattr(Solution, "__init__", solved)
    for tokens in (7, 70):
        trace_symmetry(TiedTransformer(tokens).eval(), torch.randint(tokens, (2, 5)), check=False)
    (blocks, rows), (many_blocks, many_rows) = counts
    assert many_blocks == blocks
    assert many_rows > rows + 63
