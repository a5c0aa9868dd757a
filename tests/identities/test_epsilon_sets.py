"""The set J < epsilon on grids and samples (docs/theory/equivalence.md, 4 and 5.5)."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lightning_sym.landscape.scale import FunctionScale, resolution, volume_exponent
from lightning_sym.landscape.sets import betti_numbers, components, describe_set, joining_levels

Array = NDArray[np.float64]


def box(n: int, m: int, bound: float = 1.0) -> list[Array]:
    """The coordinates of a grid, one open array per axis."""
    return np.meshgrid(*[np.linspace(-bound, bound, n)] * m, indexing="ij", sparse=True)


def distance(weights: tuple[Array, ...], p: float, q: float) -> Array:
    """J of c relu(a x) + d relu(b x) for inputs whose squares have the mean 1/2 on either side of 0."""
    a, b, c, d = weights
    right, left = (c * np.maximum(s * a, 0) + d * np.maximum(s * b, 0) for s in (1, -1))
    return 0.5 * (right - p) ** 2 + 0.5 * (left - q) ** 2


def test_only_pieces_are_counted_in_four_dimensions() -> None:
    radius = sum(axis**2 for axis in box(15, 4))
    assert betti_numbers(np.asarray((radius > 0.4) & (radius < 1))) == (1,)


@pytest.mark.long
def test_the_barrier_of_the_mixed_class() -> None:
    a, b, c, d = 0.8, -0.6, 0.7, 0.5
    p, q = a * c, -b * d
    barrier = min(0.5 * p**2, 0.5 * q**2)
    values = distance(tuple(box(41, 4, 2.0)), p, q)
    assert components(values < 0.99 * barrier)[0] == 2
    assert components(values < 1.01 * barrier)[0] == 1
    # The two orders of the units, at their nearest grid points.
    weights = np.array([[a, b, c, d], [b, a, d, c]])
    cells = [tuple(row) for row in np.rint((weights + 2) / 0.1).astype(int).tolist()]
    levels = joining_levels(values, cells)
    assert 0.99 * barrier <= levels[0, 1] <= 1.01 * barrier


def test_volume_exponents_are_half_the_codimension() -> None:
    source = np.random.default_rng(0)
    found: dict[str, list[Array]] = {"mixed": [], "same sign": []}
    for _ in range(10):
        weights = tuple(4 * source.random((4, 10**6), dtype=np.float32) - 2)
        for name, (p, q) in {"mixed": (0.56, 0.30), "same sign": (0.86, 0.0)}.items():
            values = distance(weights, p, q)
            found[name].append(values[values < 1e-2])
    mixed, same = (volume_exponent(np.concatenate(found[k]), 1e-2, 2.0, samples=10**7) for k in found)
    assert mixed.exponent == pytest.approx(1.0, abs=0.06)
    assert same.exponent == pytest.approx(0.5, abs=0.08)
    assert 0 < same.error < mixed.error < 0.02
    assert mixed.fractions[-1] == sum(len(part) for part in found["mixed"]) / 10**7


def test_the_error_of_the_exponent_is_the_spread_of_repetitions() -> None:
    source = np.random.default_rng(1)
    # J = r^2 in the plane: the volume is proportional to epsilon.
    runs = [volume_exponent((source.uniform(-1, 1, (2, 20_000)) ** 2).sum(0), 0.5) for _ in range(400)]
    exponents = np.array([run.exponent for run in runs])
    assert exponents.mean() == pytest.approx(1.0, abs=4 * runs[0].error / 20)
    assert exponents.std() == pytest.approx(runs[0].error, rel=0.15)


def test_the_epsilon_of_the_reference_is_larger_than_its_teacher() -> None:
    a, b, c, d = -0.08383071, -0.03428686, -0.2651674, 0.16266517
    inputs = torch.randn(16384, 1, generator=torch.Generator().manual_seed(0))
    scale = FunctionScale.of(c * torch.relu(a * inputs) + d * torch.relu(b * inputs))
    assert scale.zero == pytest.approx(1.40e-4, rel=0.05)
    warning = scale.warning(0.0025)
    assert warning is not None
    assert "times J0" in warning
    assert scale.tolerance(0.0025) == pytest.approx(18, rel=0.05)
    assert scale.warning(0.09 * scale.constant) is None
    assert scale.warning(0.1 * scale.constant) is not None


# Section 5.5: f = f0 - x^2 + s y^2 + z^2 in the plane through the centre; the class is where f has the level -q*.
CENTRE, LEVEL, CLOSING = 0.0998, 0.0167, 3.965e-3


def throat(n: int) -> Array:
    x, y, z = box(n, 3, 2.0)
    return CLOSING / (CENTRE - LEVEL) ** 2 * (CENTRE - x**2 - 0.386 * y**2 + z**2 - LEVEL) ** 2


@pytest.mark.parametrize(("factor", "expected"), [(0.97, (1, 1, 0)), (1.03, (1, 0, 0))])
def test_the_hole_of_the_paper_closes(factor: float, expected: tuple[int, ...]) -> None:
    assert betti_numbers(throat(101) < factor * CLOSING) == expected


def test_too_coarse_a_grid_has_spurious_holes_and_is_told() -> None:
    coarse, fine = (describe_set(throat(n), 4 / (n - 1), 0.0025, FunctionScale(1.0, 1.0)) for n in (50, 161))
    assert coarse.betti[1] > 10
    assert coarse.components_face > coarse.components_full
    assert any("too coarse" in warning for warning in coarse.warnings)
    assert not coarse.resolution.enough
    # 2 |f - level| / |grad f| is 2 * 0.066 / sqrt(32) at the far end, x = z = 2; cells at the border are not looked at.
    assert coarse.resolution.width == pytest.approx(0.0233, abs=0.003)
    assert any(f"{coarse.resolution.points} points per axis would do" in warning for warning in coarse.warnings)
    assert fine.betti == (1, 1, 0)
    assert fine.components_face == fine.components_full == 1
    assert any("touches the border" in warning for warning in fine.warnings)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_the_width_of_a_slanted_slab(m: int) -> None:
    # J = lambda d^2 / 2 with the distance d from a plane across the diagonal: any direction has to be seen.
    n = 9
    values = 3.0 * sum(box(n, m)) ** 2 / m
    found = resolution(np.asarray(values), 0.25, 0.12)
    assert found.curvature == pytest.approx(6.0)
    assert found.width == pytest.approx(0.4)
    assert not found.enough
    assert found.points == 11
    assert resolution(np.asarray(values), 0.25, 0.12 * (0.5 / 0.4) ** 2 * 1.001).enough
