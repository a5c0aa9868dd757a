"""The exact theory of the two-unit network against networks, simulations and measured tables (Lengyel et al., 2020)."""

import math

import pytest
import torch
from helpers import assert_refused
from scipy import ndimage

from lightning_sym.landscape.plane_quadric import PlaneQuadric
from lightning_sym.landscape.planes import WeightPlane, weight_vector
from lightning_sym.landscape.two_unit import (
    Moments,
    TwoUnitClass,
    distance,
    distance_gradient,
    slope_jacobian,
    slopes,
    straight_legs,
    target_slopes,
)
from lightning_sym.landscape.two_unit_search import batch_moments, draw_initial, predicts_success, simulate_search
from lightning_sym.landscape.wide import class_dimension, connecting_path, slope_rank
from lightning_sym.networks import MultiLayerPerceptron

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


def toy_network(weights):
    network = MultiLayerPerceptron(widths=[2], in_channels=1, image_size=1, num_classes=1, bias=False).double()
    torch.nn.utils.vector_to_parameters(weights, network.parameters())
    return network


def run(target, restarts, steps, *, seed=1, optimizer="sgd", learning_rate=0.015, thresholds=(1e-6, 1e-10)):
    inputs = sample()
    initial = draw_initial(restarts, torch.Generator().manual_seed(seed))
    outcome = simulate_search(
        initial,
        target,
        batch_moments(inputs, 256),
        learning_rate=learning_rate,
        steps=steps,
        optimizer=optimizer,
        thresholds=thresholds,
    )
    return initial, outcome, TwoUnitClass(target, Moments.of(inputs))


@pytest.fixture(scope="module")
def mixed_run():
    return run(MIXED, 2000, 3000)


class TestDistance:
    def test_distance_and_gradient_are_those_of_a_network(self):
        generator = torch.Generator().manual_seed(3)
        inputs = sample(500)[:, None, None, None]
        moments = Moments.of(inputs)
        teacher = toy_network(draw_initial(1, generator)[0])
        for weights in draw_initial(20, generator):
            network = toy_network(weights)
            loss = (network(inputs) - teacher(inputs).detach()).square().sum(1).mean()
            loss.backward()
            expected = torch.cat([p.grad.flatten() for p in network.parameters()])
            target = weight_vector(teacher)
            assert abs(float(distance(weights, target, moments) - loss.detach())) <= EXACT
            assert float((distance_gradient(weights, target, moments) - expected).abs().max()) <= EXACT

    def test_units_at_zero_have_no_gradient(self):
        gradient = distance_gradient(vector(0, 0.5, 0.7, -0.2), MIXED, Moments())
        assert gradient[[0, 2]].tolist() == [0, 0]
        assert float(gradient[[1, 3]].abs().min()) > 0
        assert slope_jacobian(vector(0, 0.5, 0.7, -0.2))[1].tolist() == [0, 0, 0, 0]

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
        batches = batch_moments(torch.tensor([[1.0], [-2.0], [0.0], [3.0], [-1.0]]), 2)
        assert batches.tolist() == [[0.5, 2], [4.5, 0], [0, 1]]

    def test_bad_input(self):
        assert_refused(Moments.of, torch.ones(4), says="inputs of both signs")
        assert_refused(Moments.of, torch.tensor([1.0, -1.0, math.nan]), says="inputs of both signs")
        assert_refused(slopes, torch.zeros(3), says="as many output weights")
        assert_refused(target_slopes, [0.1, 0.2, 0.3], says="finite slopes")
        assert_refused(TwoUnitClass, (math.nan, 1.0), says="finite slopes")
        assert_refused(TwoUnitClass, torch.ones(6), says="6 numbers")
        assert_refused(batch_moments, torch.ones(3), 0, says=">= 1")
        assert_refused(straight_legs, [torch.zeros(2)] * 2, 0, says="points must be")


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
        # what planes of 1 to 4 dimensions show of it
        assert [found.dimension_in_plane(m) for m in (1, 2, 3, 4)] == [dimension + m - 4 for m in (1, 2, 3, 4)]

    def test_barrier_of_the_grid_test(self):
        weights = vector(0.8, -0.6, 0.7, 0.5)
        mixed = TwoUnitClass(weights)
        assert mixed.target.tolist() == pytest.approx([0.56, 0.30], abs=1e-15)
        assert mixed.barrier == pytest.approx(0.5 * 0.30**2, rel=1e-12)
        assert mixed.zero_distance == pytest.approx(0.5 * (0.56**2 + 0.30**2), rel=1e-12)
        assert TwoUnitClass(SAME_SIGN).barrier == TwoUnitClass((0, 0)).barrier == 0

    @pytest.mark.parametrize("moments", [Moments(), Moments(0.05, 0.9)], ids=["negative side", "positive side"])
    @pytest.mark.parametrize("target", [MIXED, (-0.56, 0.30), (0.56, -0.30)])
    def test_the_optimal_path_attains_the_barrier(self, target, moments):
        mixed = TwoUnitClass(target, moments)
        path = mixed.optimal_path(100)
        values = distance(path, target, moments)
        assert abs(float(values.max()) - mixed.barrier) <= EXACT
        assert bool(mixed.contains(path[[0, -1]]).all())
        assert mixed.stratum_of(path[[0, -1]]).tolist() == [0, 1]
        assert path.diff(dim=0).abs().max() < 0.1

    def test_no_path_is_lower_than_the_barrier(self):
        """Between the components an input weight is 0, and there J is never below the barrier."""
        mixed = TwoUnitClass(MIXED)
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

    def test_bad_input(self):
        assert_refused(lambda: TwoUnitClass(SAME_SIGN).optimal_path(), says="only mixed classes")
        assert_refused(lambda: TwoUnitClass(MIXED).optimal_path(start=torch.ones(4)), says="start must be a member")
        plane = WeightPlane.through(torch.cat([torch.zeros(1, 4), torch.eye(4)[:3]]).double())
        assert_refused(lambda: TwoUnitClass(MIXED).quadric(plane), says="same-sign classes")
        with pytest.raises(ValueError, match=r"dimension 3 in R\^4"):
            TwoUnitClass(SAME_SIGN).quadric(WeightPlane.through(plane.points[:3]))


class TestQuadric:
    def test_eigenvalues_of_random_planes(self):
        """Test 9: of the form, on random orthonormal bases."""
        form = torch.zeros(4, 4, dtype=torch.float64)
        form[:2, 2:] = form[2:, :2] = torch.eye(2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            basis = torch.linalg.qr(torch.randn(4, 3, generator=generator, dtype=torch.float64)).Q
            low, s, high = torch.linalg.eigvalsh(basis.T @ form @ basis).tolist()
            assert abs(low + 1) <= EXACT
            assert abs(high - 1) <= EXACT
            assert abs(s) <= 1 + EXACT

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


class TestWide:
    @pytest.mark.parametrize(
        ("signs", "dimension"), [("+-", 2), ("++", 3), ("++-", 4), ("+++", 5), ("+++--", 8)], ids=str
    )
    def test_class_dimensions(self, signs, dimension):
        """Test 15: from the Jacobian of a network's outputs."""
        units = len(signs)
        generator = torch.Generator().manual_seed(units)
        inputs = 0.1 + torch.rand(units, generator=generator, dtype=torch.float64)
        inputs *= torch.tensor([1 if sign == "+" else -1 for sign in signs])
        outputs = torch.randn(units, generator=generator, dtype=torch.float64)
        x = sample(50)

        def function(weights):
            return (weights[units:, None] * (weights[:units, None] * x).relu()).sum(0)

        jacobian = torch.autograd.functional.jacobian(function, torch.cat([inputs, outputs]))
        assert 2 * units - int(torch.linalg.matrix_rank(jacobian)) == dimension
        assert class_dimension(signs.count("+"), signs.count("-")) == dimension
        assert 2 * units - slope_rank(inputs, outputs) == dimension

    def test_dead_output_weights_leave_the_rank(self):
        """On the flange B1, d = 0 and b < 0, the class has dimension 2 although only one slope is not 0."""
        assert slope_rank(vector(1, -1), vector(0.5, 0)) == 2
        assert slope_rank(vector(1, 0), vector(0.5, 3)) == 1
        assert slope_rank(vector(0, 0), vector(0.5, 3)) == 0

    def test_three_units_have_no_barrier(self):
        """Test 8: from (+, -, -) to the swapped pattern."""
        start = vector(0.8, -0.6, -0.4, 0.7, 0.5, -0.2)
        p, q = slopes(start).tolist()
        end = vector(-0.6, 0.8, 0.5, q / 0.6, 0.5 * p / 0.8, 0.5 * p / 0.5)
        assert slopes(end).tolist() == pytest.approx([p, q], abs=1e-12)
        path = connecting_path(start, end, points=100)
        values = distance(path, [p, q], Moments())
        assert float(values.max()) <= 1e-30
        torch.testing.assert_close(path[[0, -1]], torch.stack([start, end]))
        assert float(path.diff(dim=0).abs().max()) < 0.05

    def test_bad_input(self):
        assert_refused(connecting_path, torch.ones(6), 2 * torch.ones(6), says="same function")
        assert_refused(connecting_path, torch.ones(6), torch.ones(4), says="one length")
        assert_refused(class_dimension, -1, 2, says="numbers of units")
        assert_refused(slope_rank, torch.ones(2), torch.ones(3), says="one length")


class TestSearch:
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_simulation_is_training(self, optimizer):
        """Weights after 60 minibatch steps on real networks, uneven last batch included, one unit at 0."""
        inputs, target = sample(1000), MIXED
        initial = draw_initial(4, torch.Generator().manual_seed(2))
        initial[3, 0] = 0
        settings = {"learning_rate": 0.02, "steps": 60, "optimizer": optimizer}
        outcome = simulate_search(
            initial, target, batch_moments(inputs, 256), sample=Moments.of(inputs), thresholds=(0.1, 0.03), **settings
        )
        p, q = target
        teacher = inputs.clamp_min(0) * p + (-inputs).clamp_min(0) * q
        for number, weights in enumerate(initial):
            network = toy_network(weights)
            make = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
            descent = make(network.parameters(), lr=0.02)
            losses = []
            for step in range(61):
                with torch.no_grad():
                    losses.append(float((network(inputs[:, None, None, None])[:, 0] - teacher).square().mean()))
                if step == 60:
                    break
                x, y = (part.split(256)[step % 4] for part in (inputs, teacher))
                descent.zero_grad()
                (network(x[:, None, None, None])[:, 0] - y).square().mean().backward()
                descent.step()
            assert float((weight_vector(network) - outcome.weights[number]).abs().max()) <= EXACT
            assert float(outcome.distances[number]) == pytest.approx(losses[-1], abs=EXACT)
            for column, level in enumerate((0.1, 0.03)):
                expected = next((step for step, loss in enumerate(losses) if loss < level), -1)
                assert int(outcome.steps[number, column]) == expected
        assert float(outcome.weights[3, 0]) == 0

    def test_the_start_decides(self, mixed_run):
        """Test 10: 2000 restarts, 3000 steps."""
        initial, outcome, mixed = mixed_run
        reached = outcome.distances < 1e-6
        assert float((predicts_success(initial, mixed.target) == reached).double().mean()) >= 0.99
        # each unit alive with probability 1 - sqrt(2) / 8, signs opposite with 1 / 2
        assert 0.5 * (1 - math.sqrt(2) / 8) ** 2 == pytest.approx(0.339, abs=5e-4)
        assert float(reached.double().mean()) == pytest.approx(0.339, abs=0.04)

    @pytest.mark.parametrize("target", [(-0.56, 0.30), (0.56, -0.30), (-0.56, -0.30)])
    def test_the_start_decides_for_slopes_of_any_sign(self, target):
        """With slopes of two signs more succeed, as units that cross 0 are of use there; none less."""
        initial, outcome, _ = run(target, 1000, 3000)
        reached, predicted = outcome.distances < 1e-6, predicts_success(initial, target)
        assert float((predicted & ~reached).double().mean()) <= 0.002
        more = float((reached & ~predicted).double().mean())
        assert more == pytest.approx(0.1, abs=0.03) if target[0] * target[1] < 0 else more <= 0.01

    def test_failures_sit_at_the_three_local_minima(self, mixed_run):
        """Test 11, and the shares of 2600 failures in the table: 47.5, 47.9 and 4.7%."""
        _, outcome, mixed = mixed_run
        found = [name for name in mixed.diagnose(outcome.distances, 1e-6) if name != "reached"]
        assert sum(name in mixed.local_minima for name in found) >= 0.95 * len(found)
        shares = [found.count(name) / len(found) for name in mixed.local_minima]
        assert shares == pytest.approx([0.475, 0.479, 0.047], abs=0.05)

    def test_steps_of_the_mixed_target(self, mixed_run):
        _, outcome, _ = mixed_run
        assert outcome.fraction(1e-6) == pytest.approx(0.349, abs=0.05)
        assert outcome.fraction(1e-6, within=1000) == pytest.approx(0.318, abs=0.05)
        assert outcome.quantiles(1e-6) == pytest.approx([422, 627, 976, 1476], rel=0.15)
        assert outcome.quantiles(1e-10) == pytest.approx([756, 1040, 1460, 1978], rel=0.15)

    @pytest.mark.parametrize(("target", "success", "median"), [(MIXED, 0.373, 206), (SAME_SIGN, 0.697, 200)])
    def test_adam(self, target, success, median):
        _, outcome, _ = run(target, 1000, 2000, optimizer="adam", learning_rate=0.01)
        assert outcome.fraction(1e-6) == pytest.approx(success, abs=0.05)
        assert outcome.quantiles(1e-10, [0.5]) == pytest.approx([median], rel=0.1)

    def test_larger_steps(self):
        _, outcome, _ = run(MIXED, 2000, 600, learning_rate=0.1)
        assert outcome.fraction(1e-6) == pytest.approx(0.349, abs=0.04)
        assert outcome.quantiles(1e-10, [0.5]) == pytest.approx([153], rel=0.1)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("target", "success", "steps", "more_steps", "within"),
        [
            (MIXED, 0.349, [422, 627, 976, 1476], [756, 1040, 1460, 1978], 0.318),
            (SAME_SIGN, 0.681, [234, 598, 3798, 13446], [390, 1303, 6693, 17282], 0.444),
            (PAPER, 0.677, [302, 1235, 5337, 16646], [605, 2471, 11058, 18064], 0.290),
        ],
        ids=["mixed", "same sign", "paper"],
    )
    def test_the_table_of_20000_steps(self, target, success, steps, more_steps, within):
        initial, outcome, found = run(target, 4096, 20000)
        # twice 4096 restarts: four standard errors of the difference of two fractions
        error = 4 * math.sqrt(2 * 0.25 / 4096)
        assert outcome.fraction(1e-6) == pytest.approx(success, abs=error)
        assert outcome.fraction(1e-6, within=1000) == pytest.approx(within, abs=error)
        assert outcome.quantiles(1e-6) == pytest.approx(steps, rel=0.15)
        assert outcome.quantiles(1e-10) == pytest.approx(more_steps, rel=0.15)
        predicted = predicts_success(initial, target)
        assert float(predicted.double().mean()) <= outcome.fraction(1e-6) + 0.01
        if found.kind == "same_sign":
            assert 1 - (1 - (1 - math.sqrt(2) / 8) / 2) ** 2 == pytest.approx(0.654, abs=5e-4)
            assert float(predicted.double().mean()) == pytest.approx(0.654, abs=error)

    def test_divergence_is_no_success(self):
        inputs = sample(512)
        initial = torch.cat([1000 * torch.ones(1, 4), vector(0.8, -0.6, 0.7, 0.5)[None]])
        outcome = simulate_search(initial, MIXED, batch_moments(inputs, 256), learning_rate=0.1, steps=50)
        assert not bool(outcome.distances[0].isfinite())
        assert outcome.steps.tolist() == [[-1, -1], [0, 0]]
        assert outcome.fraction(1e-6) == 0.5

    def test_no_steps_and_no_thresholds(self):
        initial = draw_initial(3, torch.Generator().manual_seed(0))
        outcome = simulate_search(initial, MIXED, torch.full((1, 2), 0.5), learning_rate=0.1, steps=0, thresholds=())
        assert torch.equal(outcome.weights, initial)
        assert outcome.steps.shape == (3, 0)
        torch.testing.assert_close(outcome.distances, distance(initial, MIXED, Moments()))

    def test_bad_input(self):
        initial, moments = torch.zeros(3, 4), torch.full((1, 2), 0.5)
        good = {"learning_rate": 0.1, "steps": 1}
        for change, message in (
            ({"optimizer": "lbfgs"}, "optimizer must be"),
            ({"learning_rate": -1.0}, "learning_rate must be"),
            ({"initial": torch.zeros(4)}, "initial must have shape"),
            ({"moments": torch.zeros(2)}, "moments must have shape"),
        ):
            with pytest.raises(ValueError, match=message):
                simulate_search(**{"initial": initial, "target": MIXED, "moments": moments, **good, **change})
        outcome = simulate_search(initial, MIXED, moments, **good)
        assert all(math.isnan(value) for value in outcome.quantiles(1e-6))
        assert_refused(outcome.fraction, 1e-3, says="simulate with it")
