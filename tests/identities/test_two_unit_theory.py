"""The exact theory of the two-unit network against measured tables and fine grids (Lengyel et al., 2020)."""

import math

import pytest
import torch
from scipy import ndimage

from lightning_sym.landscape.planes import WeightPlane
from lightning_sym.landscape.two_unit import Moments, PlaneQuadric, TwoUnitClass, balanced_weights, distance, slopes

EXACT = 1e-12
SEED_10 = (-0.08383071, -0.03428686, -0.2651674, 0.16266517)
MIXED, SAME_SIGN, PAPER = (0.56, 0.30), (0.86, 0.0), (0.0, -0.016651893)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def sample(count=16384, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plane_about(normal, step):
    """Return a 3-plane with that normal and f at its critical point, which is at ``step`` times S normal."""
    normal = normal / torch.linalg.vector_norm(normal)
    centre = step * normal.roll(2)  # where the gradient of f, S theta, is along the normal
    origin = centre + torch.linalg.svd(normal[None]).Vh[1]
    others = origin + torch.linalg.svd(normal[None]).Vh[1:]
    return WeightPlane.through(torch.cat([origin[None], others])), float(centre[:2] @ centre[2:])


class TestDistance:
    def test_balanced_weights_have_their_slopes(self):
        wanted = sample(22).view(11, 2)
        wanted[0, 0] = wanted[1, 1] = 0
        weights = balanced_weights(wanted)
        torch.testing.assert_close(slopes(weights), wanted, rtol=0, atol=EXACT)
        torch.testing.assert_close(weights[:, :2].abs(), weights[:, 2:].abs())

    def test_the_target_of_seed_10(self):
        torch.manual_seed(10)
        # drawn in the order of the original code: first layer, then second
        drawn = [torch.nn.Linear(*sizes, bias=False).weight.detach().flatten() for sizes in ((1, 2), (2, 1))]
        torch.testing.assert_close(torch.cat(drawn), torch.tensor(SEED_10))
        paper = TwoUnitClass(vector(*SEED_10))
        assert paper.kind == "same_sign"
        assert paper.target.tolist() == pytest.approx([0, -0.016651893], abs=1e-9)
        # J0 is 1.40e-4 on 16384 inputs, to the sampling error of M-: 1 / sqrt(N) relative, twice that allowed thrice
        assert paper.zero_distance == pytest.approx(1.40e-4, rel=0.02)

    def test_moments_are_sums_over_all_inputs(self):
        found = Moments.of(torch.tensor([1.0, -2.0, 0.0, 3.0]))
        assert found == Moments(10 / 4, 4 / 4)


class TestClass:
    @pytest.mark.parametrize(
        ("target", "kind", "dimension", "components", "coefficient"),
        [
            (MIXED, "mixed", 2, 2, 1.0),
            ((-0.5, 0.3), "mixed", 2, 2, 1.0),
            (SAME_SIGN, "same_sign", 3, 1, 0.5),
            (PAPER, "same_sign", 3, 1, 0.5),
            ((0.0, 0.0), "zero", 3, 1, 0.5),
        ],
    )
    def test_kinds(self, target, kind, dimension, components, coefficient):
        found = TwoUnitClass(target)
        assert (found.kind, found.dimension, found.components) == (kind, dimension, components)
        assert found.learning_coefficient == coefficient
        assert (found.barrier > 0) == (kind == "mixed")

    def test_no_path_is_lower_than_the_barrier(self):
        """Between the components an input weight is 0, and there J is never below the barrier."""
        mixed = TwoUnitClass(vector(0.8, -0.6, 0.7, 0.5))
        assert mixed.target.tolist() == pytest.approx(MIXED, abs=1e-15)
        assert mixed.zero_distance == pytest.approx(0.5 * (0.56**2 + 0.30**2), rel=1e-12)
        assert mixed.barrier == pytest.approx(0.5 * 0.30**2, rel=1e-12)
        weights = torch.randn(10000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        weights[:, 0] = 0
        weights[0] = vector(0, 1, 0, 0.56)
        values = distance(weights, MIXED, mixed.moments)
        assert float(values.min()) == pytest.approx(mixed.barrier, rel=1e-12)

    def test_diagnosis(self):
        mixed = TwoUnitClass(MIXED)
        found = mixed.diagnose(torch.tensor([1e-9, 0.045, 0.1568, 0.2018, 0.1, math.nan]), 1e-6)
        sides = ["negative side lost", "positive side lost", "both sides lost"]
        assert found == ["reached", *sides, "elsewhere", "not finite"]
        assert set(TwoUnitClass(SAME_SIGN).local_minima) == {"both sides lost"}
        assert TwoUnitClass((0, 0)).local_minima == {}


class TestQuadric:
    @pytest.mark.parametrize("side", [1, -1])
    @pytest.mark.parametrize("sheets", [1, 2])
    @pytest.mark.parametrize("s_sign", [1, -1])
    def test_topology_changes_at_the_closing_epsilon(self, side, sheets, s_sign):
        """Around the centre, on a fine grid: the hole of one sheet fills, or two sheets touch, exactly there."""
        plane, throat = plane_about(vector(-0.4 * s_sign, -0.3 * s_sign, 1, 0.9), 3.0 * side)
        # f - f0 = (-y1^2 + s y2^2 + y3^2) / 2: one sheet if level - f0 has the sign of s
        level = throat + 0.02 * s_sign * (1 if sheets == 1 else -1)
        same_sign = TwoUnitClass((level, 0.0) if side > 0 else (0.0, -level), Moments(0.47, 0.52))
        quadric = same_sign.quadric(plane)
        assert quadric.s * s_sign > 0.5
        assert quadric.sheets == sheets
        assert quadric.centre_inside
        moment = 0.47 if side > 0 else 0.52
        assert quadric.closing_epsilon == pytest.approx(moment * 0.02**2, rel=1e-9)
        # the axis of the throat, or through both sheets, is the one whose sign differs from the others
        axis = 2 if s_sign < 0 else 0
        others = [k for k in range(3) if k != axis]
        ticks = torch.linspace(-0.5, 0.5, 201, dtype=torch.float64)
        y = torch.zeros(201, 201, 3, dtype=torch.float64)
        y[..., others[0]], y[..., others[1]] = torch.meshgrid(ticks, ticks, indexing="ij")
        line = torch.zeros(201, 3, dtype=torch.float64)
        line[:, axis] = ticks

        def low(coefficients, epsilon):
            weights = plane.weights(quadric.centre + coefficients @ quadric.axes.T)
            return (distance(weights, same_sign.target, same_sign.moments) < epsilon).numpy()

        for factor, pieces in ((0.97, 2), (1.03, 1)):
            epsilon = factor * quadric.closing_epsilon
            found = ~low(y, epsilon) if sheets == 1 else low(line, epsilon)  # the throat is a piece of the outside
            assert ndimage.label(found)[1] == pieces
            assert low(torch.zeros(1, 3, dtype=torch.float64), epsilon).item() == (factor > 1)

    def test_the_reference_figure(self):
        """One sheet, from the reference's throat value, s and moments: the hole closes at 3.965e-3, 25 J0."""
        s, throat, level = -0.386, 0.0998, 0.016651893
        angle = math.asin(-s) / 2
        plane, _ = plane_about(vector(math.sin(angle), 0, math.cos(angle), 0), -math.sqrt(2 * throat / -s))
        moments = Moments(0.5, 1.6e-4 / level**2)
        quadric = TwoUnitClass(PAPER, moments).quadric(plane)
        assert quadric.s == pytest.approx(s, abs=1e-12)
        assert quadric.throat == pytest.approx(throat, abs=1e-12)
        assert quadric.level == pytest.approx(level)
        assert quadric.sheets == 1
        assert quadric.closing_epsilon == pytest.approx(3.965e-3, rel=0.02)
        assert quadric.closing_epsilon / TwoUnitClass(PAPER, moments).zero_distance == pytest.approx(25, abs=0.5)

    def test_planes_without_a_centre(self):
        """s = 0: a saddle surface in general; two walls where f does not change along the flat axis."""
        # ca + db with d = const: the axis b is flat, f = ca + d b
        for constant, level, sheets in ((0.3, 0.7, 1), (0.0, 0.7, 2), (0.0, 0.0, 1)):
            centre = vector(0, 0, 0, constant)
            plane = WeightPlane.through(torch.cat([centre[None], centre + torch.eye(4, dtype=torch.float64)[:3]]))
            quadric = PlaneQuadric(plane, level, 0.5, 1)
            assert quadric.eigenvalues.tolist() == pytest.approx([-1, 0, 1], abs=EXACT)
            assert quadric.sheets == sheets
            assert math.isnan(quadric.throat) == math.isnan(quadric.closing_epsilon) == (constant != 0)
