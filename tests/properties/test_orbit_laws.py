"""Laws of descents over orbits, on random networks, objectives and starts."""

import copy
import functools
import itertools
import random

import pytest
import torch
from helpers import randomize_statistics
from torch import nn

from lightning_sym.orbit import (
    Teleportation,
    View,
    gradient_norm,
    minimize_on_orbit,
    quantization_error,
    round_to_nearest,
    weight_norm,
)
from lightning_sym.symmetry import canonicalize, trace_symmetry, weight_matching
from lightning_sym.symmetry.group.gauge import one_sided
from lightning_sym.symmetry.group.norms import Squares

EXACT = 1e-10  # sums of up to 1e3 products in float64, through up to 8 layers


def mlp(seed, norms=True):
    """Return a network of random widths, activations and norms, in float64 and evaluation mode."""
    drawn = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        widths, layers = [5, *(drawn.randint(3, 8) for _ in range(3))], []
        for first, second in itertools.pairwise(widths):
            layers.append(nn.Linear(first, second, bias=drawn.random() < 0.7))
            if norms and drawn.random() < 0.6:
                layers.append(nn.BatchNorm1d(second))
            layers.append(drawn.choice([nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Identity])())
        network = nn.Sequential(*layers, nn.Linear(widths[-1], 3)).double()
        randomize_statistics(network)
    return network.eval()


def batch(seed=0, count=24):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(3, (count,), generator=generator)


def fourth_powers(weights):
    return sum(own.pow(4).sum() + own.square().sum() for own in weights.values())


def measured(objective, network, data):
    """Return an objective of a network's own weights."""
    exact = copy.deepcopy(network).double().eval().requires_grad_()
    view = View(exact, dict(exact.named_parameters()), dict(exact.named_buffers()))
    return float((objective(view, data) if getattr(objective, "reads_data", False) else objective(view)).detach())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "objective", [weight_norm(3), gradient_norm(), fourth_powers], ids=["weights", "gradients", "own"]
)
@pytest.mark.few(4)
def test_the_objective_falls_and_the_function_stays(seed, objective):
    network, (inputs, targets) = mlp(seed).train(seed % 2 == 0), batch()
    before = copy.deepcopy(network.state_dict())
    symmetry = trace_symmetry(network, inputs, check=False)
    data = (inputs, targets) if getattr(objective, "reads_data", False) else None
    found = minimize_on_orbit(symmetry, network, objective, data=data, max_steps=6)
    for name, own in network.state_dict().items():
        assert torch.equal(own, before[name])
    assert found.network.training == network.training
    assert found.before == pytest.approx(measured(objective, network, data), rel=EXACT)
    assert found.after == pytest.approx(measured(objective, found.network, data), rel=1e-8)
    assert found.after <= found.before
    with torch.no_grad():
        torch.testing.assert_close(
            copy.deepcopy(found.network).eval()(inputs), copy.deepcopy(network).eval()(inputs), rtol=EXACT, atol=EXACT
        )
    acted = symmetry.act(found.element, network).state_dict()
    assert all(torch.equal(own, acted[name]) for name, own in found.network.state_dict().items())


@pytest.mark.parametrize("way", ["ascent", "descent", "random"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.few(6, "0-random", "3-random")
def test_teleportation_keeps_functions_in_training_mode_and_scales_before_batch_norms(seed, way):
    network, data = mlp(seed), batch()
    symmetry = trace_symmetry(network, data[0], check=False)
    element = Teleportation(way, max_steps=3).found(symmetry, network, data).element
    moved = symmetry.act(element, network)
    one, two = (copy.deepcopy(own).train()(data[0]) for own in (network, moved))
    torch.testing.assert_close(two, one, rtol=EXACT, atol=EXACT)
    before_norms = [n for n, own in enumerate(network) if isinstance(own, nn.BatchNorm1d)]
    for number in before_norms:
        torch.testing.assert_close(moved[number].running_var, network[number].running_var, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["descent", "random"])
@pytest.mark.parametrize(
    "make", [functools.partial(torch.optim.SGD, lr=0.0, momentum=0.9), functools.partial(torch.optim.Adam, lr=0.0)]
)
def test_the_state_of_an_optimiser_moves_as_gradients_do(way, make):
    """Shifts would change gradients of weights behind them, so they stay where the optimiser holds state."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    randomize_statistics(network.eval())
    inputs, targets = data = batch()
    symmetry, optimizer = trace_symmetry(network, inputs, check=False), make(network.parameters())
    nn.functional.cross_entropy(network(inputs), targets).backward()
    optimizer.step()
    teleportation = Teleportation(way, max_steps=3)
    element = teleportation.found(symmetry, network, data, optimizer).element
    assert not symmetry.factors.is_identity(element)
    teleportation.move(symmetry, element, network, optimizer)
    network.zero_grad()
    nn.functional.cross_entropy(network(inputs), targets).backward()
    for own in network.parameters():
        state = optimizer.state[own]
        average = state["momentum_buffer"] if "momentum_buffer" in state else state["exp_avg"] / 0.1
        torch.testing.assert_close(average, own.grad, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="cannot move under shifts"):
        Teleportation(way, factors=["scales", "shifts"]).found(symmetry, network, data, optimizer)


def test_random_moves_stay_within_the_chosen_axis_groups():
    data = batch()
    network = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    symmetry = trace_symmetry(network, data[0], check=False)
    element = Teleportation("random", factors=[symmetry.groups[0].name]).found(symmetry, network, data).element
    moved = symmetry.act(element, network)
    assert not torch.equal(moved[0].weight, network[0].weight)
    assert torch.equal(moved[4].weight, network[4].weight)


class Stream(nn.Module):
    """A stream that a batch norm and a linear layer read.

    Its scale divides weights of that layer, but together with the scale of the layer's units it only multiplies.
    """

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(5, 6), nn.Linear(6, 3)
        self.inner, self.back, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        x = self.first(x)
        return self.out(torch.relu(self.norm(x + self.back(torch.relu(self.inner(x))))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scales_that_only_multiply_together_are_held(dtype):
    torch.manual_seed(0)
    network, (inputs, _) = Stream().double().eval(), batch()
    randomize_statistics(network)
    symmetry, network = trace_symmetry(network, inputs, check=False), network.to(dtype)
    found = minimize_on_orbit(symmetry, network, weight_norm(), max_steps=60)
    assert torch.equal(found.network.norm.running_var, network.norm.running_var)
    assert found.after < found.before
    start = minimize_on_orbit(symmetry, network, fourth_powers, start="balanced", max_steps=0)
    torch.testing.assert_close(start.network.norm.running_var + start.network.norm.eps, torch.ones(6, dtype=dtype))
    if dtype != torch.float64:  # near -epsilon no digit is left
        away = symmetry.identity()
        moving = one_sided(symmetry.factors.plan, Squares(symmetry.factors.plan, symmetry.tensors(network)))
        scales = away.replaced(log_scale=away.log_scale.masked_fill(torch.from_numpy(moving), -16.0))
        with pytest.raises(RuntimeError, match=r"norm.running_var so close to -epsilon"):
            minimize_on_orbit(symmetry, network, fourth_powers, start=scales, max_steps=0)


def test_forms_and_matches_of_scales_that_only_multiply_together():
    """The form keeps the function in single precision, does not depend on the member, and matching finds a member."""
    torch.manual_seed(0)
    network, (inputs, _) = Stream().double().eval(), batch()
    randomize_statistics(network)
    symmetry = trace_symmetry(network, inputs, check=False)
    member = symmetry.act(symmetry.sample(torch.Generator().manual_seed(3)), network)
    one, two = (canonicalize(symmetry, own).network.state_dict() for own in (network, member))
    for name, own in one.items():
        torch.testing.assert_close(own, two[name], rtol=1e-11, atol=1e-11)
    assert weight_matching(symmetry, network, member).distance_after < 1e-11
    single = network.float()
    form = canonicalize(symmetry, single).network
    torch.testing.assert_close(form(inputs.float()), single(inputs.float()), rtol=1e-4, atol=1e-5)


def test_a_scale_through_a_variance_with_a_minimum_is_moved():
    """A layer that reads the stream itself holds the scale from below: nothing is held, and the norm is least."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 6), Read(6)).double().eval()
    network[1].norm.running_var.uniform_(0.5, 2)
    symmetry = trace_symmetry(network, batch()[0], check=False)
    found = minimize_on_orbit(symmetry, network, weight_norm())
    assert found.converged
    assert not any("held" in note for note in found.notes)
    assert not torch.equal(found.network[1].norm.running_var, network[1].norm.running_var)


class Read(nn.Module):
    """A batch norm and a linear layer that read the same units."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.one, self.two = nn.BatchNorm1d(width), nn.Linear(width, 3), nn.Linear(width, 3)

    def forward(self, x):
        return self.one(torch.tanh(self.norm(x))) + self.two(x)


class Flat(nn.Module):
    """Two layers in one vector: names of its axis groups hold brackets."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.randn(54, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def forward(self, x):
        return torch.relu(x @ self.flat[:30].view(6, 5).T + self.flat[30:36]) @ self.flat[36:].view(3, 6).T


def test_axis_groups_with_brackets_in_their_names_are_chosen():
    network = Flat()
    symmetry = trace_symmetry(network, batch()[0], check=False)
    found = minimize_on_orbit(symmetry, network, weight_norm(), factors=[symmetry.groups[0].name])
    assert found.after < found.before


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_descents_differentiate_where_gradients_are_off(context):
    network, (inputs, _) = mlp(1), batch()
    symmetry = trace_symmetry(network, inputs, check=False)
    with context():
        found = minimize_on_orbit(symmetry, network, fourth_powers, max_steps=5)
    assert found.after < found.before


def test_powers_below_one_have_derivatives_where_biases_are_zero():
    network, (inputs, _) = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double(), batch()
    nn.init.zeros_(network[0].bias)
    found = minimize_on_orbit(trace_symmetry(network, inputs, check=False), network, weight_norm(0.5), max_steps=20)
    assert found.after < found.before


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_a_derivative_that_is_not_finite_is_named(optimizer):
    network, (inputs, _) = mlp(1, norms=False), batch()
    symmetry = trace_symmetry(network, inputs, check=False)
    with pytest.raises(ValueError, match="derivative of the objective is not finite at the start"):
        minimize_on_orbit(symmetry, network, lambda w: (w["0.weight"] * 0).norm().sqrt(), optimizer=optimizer)


def test_an_objective_keeps_no_outputs_of_the_last_network():
    objective, (inputs, _) = quantization_error(3), batch()
    first, second = mlp(1), mlp(2)
    minimize_on_orbit(trace_symmetry(first, inputs, check=False), first, objective, data=inputs, max_steps=1)
    with torch.no_grad():
        wanted, rounded = second(inputs), round_to_nearest(second, 3)(inputs)
    own = float((rounded - wanted).square().sum() / wanted.square().sum())
    assert measured(objective, second, inputs) == pytest.approx(own, rel=1e-9)
