"""The scale of epsilon, the resolution, the volume exponent, and the numbers and sentences of a set."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_sym.landscape.grids import Grid
from lightning_sym.landscape.scale import FunctionScale, resolution, volume_exponent
from lightning_sym.landscape.sets import describe_set
from lightning_sym.reports.equivalence import set_rows

X = np.linspace(-1, 1, 41)
RINGS = (np.hypot(X[:, None], X) - 0.5) ** 2  # zero on a circle
UNIT = FunctionScale(1.0, 1.0)


class TestFunctionScale:
    def test_sums_over_outputs_and_means_over_inputs(self) -> None:
        outputs = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
        scale = FunctionScale.of(outputs)
        assert scale == FunctionScale((25 + 1) / 2, 1.0 + 4.0)
        assert scale.relative(10.0) == 2.0
        assert scale.tolerance(0.13) == pytest.approx(0.01)
        assert scale.largest_epsilon == 0.5

    def test_warns_from_a_tenth_of_the_smaller_score(self) -> None:
        scale = FunctionScale(10.0, 1.0)
        assert scale.warning(0.0999) is None
        assert scale.warning(0.1) == (
            "epsilon = 0.1 is 0.01 times J0 = 10, the J of the zero function, and 0.1 times V = 1, the J of the best "
            "constant: functions in the set may have little in common with the teacher; take epsilon below 0.1."
        )

    @pytest.mark.parametrize(("value", "kind"), [(0.0, "zero"), (0.1, "constant")])
    def test_nothing_is_small_next_to_a_constant(self, value: float, kind: str) -> None:
        # 0.1 has no exact mean in float32.
        scale = FunctionScale.of(torch.full((1001, 3), value))
        assert scale.constant == 0
        assert f"The teacher is {kind} on the inputs" in str(scale.warning(1e-30))
        assert scale.relative(0.0) == 0
        assert scale.relative(1e-30) == math.inf
        assert math.isnan(scale.relative(math.nan))
        assert scale.tolerance(1.0) == (math.inf if value == 0 else pytest.approx(1 / 0.03))

    def test_small_variation_is_not_taken_for_rounding(self) -> None:
        outputs = 1 + 1e-9 * torch.randn(1000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert FunctionScale.of(outputs).constant == pytest.approx(1e-18, rel=0.2)

    @pytest.mark.parametrize(
        ("relative", "word"),
        [
            (0.0, "equivalent"),
            (0.01, "equivalent"),
            (0.0101, "nearly equivalent"),
            (0.1, "nearly equivalent"),
            (0.11, "not equivalent"),
            (math.inf, "not equivalent"),
            (math.nan, "not equivalent"),
        ],
    )
    def test_words(self, relative: float, word: str) -> None:
        assert FunctionScale.word(relative) == word


class TestResolution:
    def test_a_fine_grid_keeps_its_points(self) -> None:
        found = resolution(RINGS, 0.05, 0.01)  # curvature 2, width 0.2
        assert found.enough
        assert found.points == 41
        assert found.width == pytest.approx(0.2, rel=0.01)

    def test_the_points_that_would_do_are_odd_in_number(self) -> None:
        # 2 / (0.1523 / 2) = 26.3 intervals: 27 are enough, and 28 have a grid point in the centre.
        found = resolution(50 * np.linspace(-1, 1, 21) ** 2, 0.1, 0.29)
        assert found.width == pytest.approx(0.1523, rel=1e-3)
        assert found.points == 29

    def test_an_empty_set_is_measured_where_j_is_smallest(self) -> None:
        assert resolution(3 * X**2 + 1, 0.05, 0.5).curvature == pytest.approx(6)

    def test_the_worst_place_of_the_set_counts(self) -> None:
        values = np.minimum(40 * (X + 0.5) ** 2, (X - 0.5) ** 2)
        assert resolution(values, 0.05, 0.01).curvature == pytest.approx(80)

    def test_flat_functions_have_no_width(self) -> None:
        found = resolution(np.zeros((5, 5)), 0.1, 0.1)
        assert (found.width, found.enough) == (math.inf, True)

    @pytest.mark.parametrize("values", [np.where(RINGS < 1e-4, RINGS, np.inf), np.zeros((2, 5))])
    def test_unknown_where_no_neighbours_are_known(self, values: np.ndarray) -> None:
        found = resolution(values, 0.05, 1e-4)
        assert math.isnan(found.width)
        assert (found.enough, found.points) == (False, 0)


class TestVolumeExponent:
    def test_exact_powers(self) -> None:
        # The values k^2 / n^2: the number below epsilon is about n sqrt(epsilon).
        found = volume_exponent((np.arange(100_000) / 100_000) ** 2, 0.5, 3.0, steps=7)
        assert found.exponent == pytest.approx(0.5, abs=1e-3)
        assert found.epsilons == pytest.approx(0.5 * 10 ** np.linspace(-3, 0, 7))
        assert found.fractions == pytest.approx(np.sqrt(found.epsilons), rel=1e-2)

    def test_large_values_only_count_as_points(self) -> None:
        values = (np.arange(1000) / 1000) ** 2
        whole = volume_exponent(values, 0.1)
        part = volume_exponent(values[values < 0.1], 0.1, samples=1000)
        early = volume_exponent(np.where(values < 0.1, values, np.inf), 0.1)
        for other in (part, early):
            assert (other.exponent, other.error) == (whole.exponent, whole.error)
            assert (other.fractions == whole.fractions).all()

    def test_epsilon_itself_is_not_below(self) -> None:
        values = np.array([0.0] * 10 + [1.0] * 10)
        assert volume_exponent(values, 1.0).fractions[-1] == 0.5


class TestDescribeSet:
    def test_a_clean_set_has_no_warnings(self) -> None:
        cells = [(30, 20), (10, 20), (20, 30)]
        found = describe_set(RINGS, 0.05, 0.02, UNIT, cells)
        assert found.warnings == ()
        assert found.betti == (1, 1)
        assert (found.components_full, found.components_face, found.border) == (1, 1, False)
        assert found.fraction == pytest.approx(np.pi * 2 * 0.5 * 2 * np.sqrt(0.02) / 4, rel=0.05)
        assert found.smallest == RINGS.min()
        assert (found.tolerance, found.relative) == (0.02, 0.02)
        assert found.exponent is not None
        assert found.exponent.exponent == pytest.approx(0.5, abs=0.1)
        assert found.joining.shape == (3, 3)
        assert found.joining.max() < 0.02

    def test_each_limit_has_its_sentence(self) -> None:
        values = (np.add.outer(X, X) - 0.505) ** 2 + 1e-4  # one cell across, from border to border
        found = describe_set(values, 0.05, 2e-4, FunctionScale(1e-3, 1e-3), [(-1, 3), (35, 15), (10, 10)])
        assert found.border
        assert (found.components_full, found.components_face) == (1, 31)
        text = list(found.warnings)
        assert len(text) == 7
        assert "times J0" in text[0]
        assert "more than half the width 0.02" in text[1]
        assert f"{found.resolution.points} points per axis would do, the grid has 41" in text[1]
        assert "31 pieces if cells are joined by faces, 1 if corners" in text[2]
        assert "touches the border" in text[3]
        assert "volume exponent needs at least 10" in text[4]
        assert text[5].startswith("Outside the box: found points 0;")
        assert "nearest to the found points 2 are" in text[6]
        assert all(sentence.endswith(".") for sentence in text)
        assert found.exponent is None
        assert np.isnan(found.joining[0]).all()
        assert np.isnan(found.joining[:, 0]).all()
        assert np.isfinite(found.joining[1:, 1:]).all()

    def test_an_empty_set(self) -> None:
        found = describe_set(RINGS + 0.5, 0.05, 0.05, UNIT, [(30, 20)])
        assert (found.betti, found.fraction, found.border) == ((0, 0), 0.0, False)
        assert found.warnings[0] == (
            "The set is empty: the smallest J on the grid is 0.5; raise epsilon = 0.05 above it, or refine the grid."
        )
        assert len(found.warnings) == 2  # and the found point is not in it
        assert found.exponent is None

    def test_values_given_up_early(self) -> None:
        found = describe_set(np.where(RINGS < 0.01, RINGS, np.inf), 0.05, 0.01, UNIT, [(30, 20), (20, 20)])
        assert found.joining[0, 1] == math.inf
        assert any("evaluate J also where it is large" in warning for warning in found.warnings) == math.isnan(
            found.resolution.width
        )

    @pytest.mark.parametrize("epsilon", [0.02, 1e-9])
    def test_rows_hold_plain_values(self, epsilon: float) -> None:
        found = describe_set(RINGS + 1e-6, 0.05, epsilon, FunctionScale(0.0, 0.0), [(30, 20), (-1, -1)])
        (row,) = set_rows([SimpleNamespace(name="plane", numbers=found, finer=None, grid=Grid(2, 41, 1.0))])
        assert json.loads(json.dumps(row, allow_nan=False)) == row
        assert row["epsilon_over_J0"] is None
        assert json.loads(row["joining"]) == [[RINGS[30, 20] + 1e-6, None], [None, None]]
        assert json.loads(row["betti"]) == list(found.betti)
        assert (row["exponent"] is None) == (row["exponent_error"] is None) == (epsilon == 1e-9)
