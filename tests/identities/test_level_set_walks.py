"""Walks and Langevin chains inside classes (docs/theory/equivalence.md, 7 and 8)."""

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.landscape import walks
from lightning_sym.landscape.langevin import expected_energy, sample_sgld
from lightning_sym.landscape.outputs import NetworkOutputs
from lightning_sym.landscape.planes import weight_vector
from lightning_sym.landscape.quotient import orbit_distances
from lightning_sym.landscape.two_unit import slopes
from lightning_sym.landscape.walks import LevelSetWalk, walk_level_set
from lightning_sym.networks import MultiLayerPerceptron

pytestmark = pytest.mark.long

MIXED, SAME_SIGN = (0.8, -0.6, 0.7, 0.5), (0.8, 0.6, 0.7, 0.5)


def two_unit(weights: tuple[float, ...]) -> nn.Module:
    network = MultiLayerPerceptron(widths=[2], in_channels=1, image_size=1, num_classes=1, bias=False).double()
    nn.utils.vector_to_parameters(torch.tensor(weights, dtype=torch.float64), network.parameters())
    return network


def line(samples: int) -> Tensor:
    """Return inputs with both moments exactly 1/2, those of the normal distribution."""
    x = torch.linspace(0.1, 2.0, samples // 2, dtype=torch.float64)
    x = x / x.square().mean().sqrt()
    return torch.cat([x, -x])[:, None, None, None]


def displacement(walk: LevelSetWalk) -> float:
    """Return the distance of the end from the beginning."""
    return float((walk.vectors[-1] - walk.vectors[0]).norm())


def far_from_orbit(walk: LevelSetWalk, network: nn.Module) -> float:
    found = orbit_distances(network, walk.vectors, weight_vector(network), line(2))
    assert found.kind == "exact"
    return float(found.distances.max())


def test_a_walk_of_same_sign_stays_in_the_class_and_leaves_the_orbit() -> None:
    network = two_unit(SAME_SIGN)
    walk = walk_level_set(network, line(8), steps=500, step_size=0.05)
    assert walk.vectors.shape == (501, 4)
    assert float(walk.losses.max()) < 1e-20
    p, q = slopes(walk.vectors).T
    assert torch.allclose(p, torch.full_like(p, 0.86), rtol=0, atol=1e-10)
    assert float(q.abs().max()) < 1e-10
    assert far_from_orbit(walk, network) > 1.0
    # P - rank is the dimension of the class.
    assert walk.ranks.unique().tolist() == [1]


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_the_rank_does_not_depend_on_the_size_of_the_outputs(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs of sizes 1 to 1e-3, with two outputs each: four singular values above the limit of 1e-4."""
    network = nn.Linear(3, 2, bias=False).double()
    inputs = size * torch.diag(torch.tensor([1.0, 1e-3, 0.0], dtype=torch.float64))[:2]
    monkeypatch.setattr(walks, "_RCOND", 1e-4)
    walk = walk_level_set(network, inputs, steps=1, step_size=0.1)
    assert walk.ranks.unique().tolist() == [4]


def test_a_walk_of_mixed_signs_stays_on_the_orbit() -> None:
    network = two_unit(MIXED)
    walk = walk_level_set(network, line(8), steps=200, step_size=0.05)
    assert float(walk.losses.max()) < 1e-20
    assert displacement(walk) > 2.0
    assert far_from_orbit(walk, network) < 1e-9
    assert walk.ranks.unique().tolist() == [2]


@pytest.mark.slow
def test_a_random_walk_of_same_sign_visits_the_flanges() -> None:
    network = two_unit(SAME_SIGN)
    walk = walk_level_set(network, line(8), steps=4000, step_size=0.15, direction="random")
    assert float(walk.losses.max()) < 1e-20
    patterns = {tuple(pattern) for pattern in walk.vectors[:, :2].sign().int().tolist()}
    assert {(1, 1)} < patterns
    assert far_from_orbit(walk, network) > 1.0


def test_steps_are_as_long_as_asked_and_corrections_are_short() -> None:
    walk = walk_level_set(two_unit(SAME_SIGN), line(8), steps=50, step_size=0.02)
    moved = walk.vectors.diff(dim=0).norm(dim=1)
    assert torch.allclose(moved, walk.step_sizes, rtol=0.05)
    # The predictor is off by h^2, so that J before correction is of order h^4.
    assert 0 < float(walk.predictor_losses.max()) < 0.02**4
    assert int(walk.corrector_steps.max()) <= 3
    # A carried direction goes on; new directions diffuse.
    diffused = walk_level_set(two_unit(SAME_SIGN), line(8), steps=50, step_size=0.02, direction="random")
    assert displacement(diffused) < 0.6 * displacement(walk)


def test_a_step_that_fails_is_halved_and_grows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "_CORRECTIONS", 3)
    network = two_unit(MIXED)
    # Against the wall a = 0, where the slope p cannot be kept: c = p / a grows without bound.
    toward = torch.tensor([-1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    walk = walk_level_set(network, line(8), steps=30, step_size=0.8, direction=toward)
    assert float(walk.step_sizes.min()) < 0.8
    assert float(walk.step_sizes.max()) == 0.8
    assert float(walk.losses.max()) < walk.tolerance


def test_a_loss_that_is_the_tolerance_is_not_below_it() -> None:
    options = {"steps": 1, "step_size": 0.4}
    # Below this tolerance after one correction, and not before.
    reached = walk_level_set(two_unit(MIXED), line(8), tolerance=1e-3, **options)
    assert reached.corrector_steps.tolist() == [1]
    walk = walk_level_set(two_unit(MIXED), line(8), tolerance=float(reached.losses[1]), **options)
    assert float(walk.losses[1]) < walk.tolerance
    assert walk.corrector_steps.tolist() == [2]


def test_a_tanh_network_that_fits_few_digits_walks_freely() -> None:
    data = DigitsDataModule(max_samples=100)
    images, _ = data.split_tensors("train")
    images = data.normalize(images)[:6].double()
    network = MultiLayerPerceptron(widths=[8], image_size=8, activation="tanh").fresh(0).double()
    walk = walk_level_set(network, images, steps=30, step_size=0.2)
    assert float(walk.losses.max()) < 1e-20
    assert int(walk.corrector_steps.max()) <= 3
    assert walk.ranks.unique().tolist() == [60]  # every output on every digit is a constraint of its own
    assert displacement(walk) == pytest.approx(30 * 0.2, rel=0.1)
    function = NetworkOutputs(network, images)
    assert torch.allclose(function(walk.vectors[-1]), function(walk.vectors[0]), rtol=0, atol=1e-10)


def test_the_jacobian_is_that_of_differences() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    function = NetworkOutputs(network, torch.randn(4, 1, 6, 6))
    jacobian = function.jacobian(function.own)
    assert jacobian.shape == (12, len(function.own))
    ahead = torch.randn_like(function.own)
    with torch.no_grad():
        difference = (function(function.own + 1e-6 * ahead) - function(function.own - 1e-6 * ahead)) / 2e-6
    assert torch.allclose(jacobian @ ahead, difference.flatten(), rtol=1e-6, atol=1e-8)


def test_the_walk_leaves_network_and_generator_alone_and_repeats_itself() -> None:
    network = two_unit(SAME_SIGN).train()
    before, state = weight_vector(network), torch.get_rng_state()
    seen: list[tuple[int, int]] = []
    runs = [
        walk_level_set(
            network, line(8), steps=5, step_size=0.1, seed=3, progress=lambda *counts: seen.append(counts)
        ).vectors
        for _ in range(2)
    ]
    assert torch.equal(*runs)
    assert seen[:5] == [(step + 1, 5) for step in range(5)]
    assert torch.equal(before, weight_vector(network))
    assert network.training
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(runs[0], walk_level_set(network, line(8), steps=5, step_size=0.1, seed=4).vectors)


def curvatures(weights: tuple[float, ...]) -> Tensor:
    """Return the eigenvalues above 0 of the Hessian of J, with both moments 1/2."""
    a, b, c, d = weights
    return torch.tensor([a * a + b * b + c * c + d * d] if b > 0 else [a * a + c * c, b * b + d * d])


@pytest.mark.parametrize(("weights", "expected"), [(MIXED, 0.99856), (SAME_SIGN, 0.50826)], ids=["mixed", "same sign"])
@pytest.mark.parametrize(("chains", "steps"), [(300, 300), pytest.param(400, 8000, marks=pytest.mark.slow)])
def test_langevin_chains_read_the_learning_coefficient(
    weights: tuple[float, ...], expected: float, chains: int, steps: int
) -> None:
    # With this step the formula of docs/theory/equivalence.md, 8, predicts 0.9986 and 0.5083.
    options = {"chains": chains, "steps": steps, "burn_in": 200, "inverse_temperature": 1e5, "step": 0.05 / 1e5}
    found = sample_sgld(two_unit(weights), line(8), **options)
    assert found.curvature == pytest.approx(float(curvatures(weights).max()), rel=1e-3)
    at_regular = expected_energy(curvatures(weights), found.inverse_temperature, found.localisation, found.step)
    assert at_regular == pytest.approx(expected, abs=1e-4)
    assert 0 < found.standard_error < 0.03
    assert abs(found.learning_coefficient - expected) < 4 * found.standard_error
    # No chain left its stratum.
    signs = torch.tensor(weights[:2]).sign().double()
    assert bool((found.vectors[:, :2].sign() == signs).all())


def test_langevin_defaults_and_shapes() -> None:
    network, inputs = two_unit(MIXED), line(8)
    options = {"chains": 3, "steps": 10, "burn_in": 2, "inverse_temperature": 1e4}
    seen: list[tuple[int, int]] = []
    state = torch.get_rng_state()
    found = sample_sgld(network, inputs, progress=lambda *counts: seen.append(counts), **options)
    assert torch.equal(state, torch.get_rng_state())
    assert found.step == pytest.approx(0.2 / (1e4 * found.curvature))
    assert found.localisation == pytest.approx(100)
    assert found.vectors.shape == (3, 4)
    assert found.losses.shape == (10, 3)
    assert found.learning_coefficient == pytest.approx(1e4 * float(found.losses.mean()))
    assert seen[-1] == (12, 12)
    # The last weights are those of the last loss.
    function = NetworkOutputs(network, inputs)
    squares = (function(found.vectors[0]) - function(function.own)).square().mean()
    assert float(squares) == pytest.approx(float(found.losses[-1, 0]))
    assert math.isnan(sample_sgld(network, inputs, **{**options, "chains": 1}).standard_error)
