"""Descent over orbits: the function stays, derivatives are right, known minima are found; docs/theory/orbit.md."""

import functools
import itertools
import math

import pytest
import torch
from helpers import randomize_statistics
from torch import nn
from torch.nn import functional

from lightning_sym.networks import VisionTransformer
from lightning_sym.orbit import Objective, OrbitDirections, least_norm, minimize_on_orbit, weight_norm
from lightning_sym.orbit.closed_forms import least_dual_squares, least_squares
from lightning_sym.orbit.directions import kinds_of
from lightning_sym.orbit.problem import OrbitProblem
from lightning_sym.symmetry import canonicalize, fold_norm_gains, trace_symmetry


def squares(weights):
    return sum(own.square().sum() for own in weights.values())


def squares_of(network):
    return float(squares(dict(network.named_parameters())).detach())


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def mlp(*sizes, activation=nn.ReLU, bias=True):
    layers = []
    for one, two in itertools.pairwise(sizes):
        layers += [nn.Linear(one, two, bias=bias), activation()]
    return nn.Sequential(*layers[:-1]), torch.randn(3, sizes[0])


def relu():
    return mlp(8, 16, 12, 4)


def two_linear_layers():
    """Linear layers in a row, with biases that cancel."""
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4), nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)), (
        torch.randn(3, 12)
    )


def layer_norms():
    """A bottleneck between layer norms, of which the last one is read without a bias."""
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3), nn.Linear(3, 9), nn.LayerNorm(9)
    return nn.Sequential(*layers, nn.Linear(9, 4, bias=False)), torch.randn(3, 6)


def batch_norms():
    layers = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5), nn.ReLU()
    return randomize_statistics(nn.Sequential(*layers, nn.Flatten(), nn.Linear(20, 4))), torch.randn(3, 3, 6, 6)


def between_gains():
    """Matrices between gains: a batch norm between linear layers."""
    network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return randomize_statistics(network), torch.randn(3, 6)


class LogGains(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.w, self.v = nn.Linear(6, 4), nn.Linear(4, 3), *map(nn.Parameter, torch.randn(2, 4))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)) * self.w.exp() / functional.softplus(self.v))


def log_gains():
    return LogGains(), torch.randn(3, 6)


def vit(**options):
    options = {"norm": "rms", "positions": "rotary"} | options
    return VisionTransformer(in_channels=1, image_size=8, num_classes=4, patch_size=4, width=8, depth=1, heads=2,
                             **options), torch.randn(2, 1, 8, 8)  # fmt: skip


def hugging_face(name, **options):
    def make():
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
        if name == "GPT2":
            sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
        else:
            sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 16, "head_dim": 4}
        configuration = getattr(transformers, f"{name}Config")(vocab_size=11, **sizes, **options)
        model = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
        return getattr(transformers, model)(configuration), torch.randint(11, (2, 5))

    return make


NETWORKS = {
    "relu": (relu, {"scales"}),
    "two linear layers": (two_linear_layers, {"scales", "cells", "shifts"}),
    "layer norms": (layer_norms, {"scales", "cells", "rotations", "shifts", "tilts"}),
    "batch norms": (batch_norms, {"scales", "shifts"}),
    "between gains": (between_gains, {"scales", "gained", "shifts"}),
    "log-gains": (log_gains, {"scales"}),
    "vit": (vit, {"scales", "cells", "rotations", "phases"}),
    "vit with layer norms": (lambda: vit(norm="layer", positions="learned"), {"cells", "rotations", "shifts"}),
    "llama": (hugging_face("Llama"), {"scales", "cells", "rotations", "phases"}),
    "qwen": (hugging_face("Qwen3", tie_word_embeddings=True), {"scales", "cells"}),
    "gemma": (hugging_face("Gemma2"), {"scales", "cells", "phases"}),
    "gpt2": (hugging_face("GPT2"), {"cells", "shifts"}),
}


@functools.cache
def symmetry_of(make):
    """Trace each architecture once: most of the time of these tests goes there."""
    network, inputs = drawn(make)
    return trace_symmetry(network, inputs)


def drawn(make):
    torch.manual_seed(0)
    network, inputs = make()
    network = network.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    with torch.no_grad():
        for own in network.parameters():  # no gains of one value
            own.add_(0.1 * torch.randn_like(own))
    return network, inputs


def traced(make):
    symmetry = symmetry_of(make)
    return *drawn(make), symmetry


def problem_of(network, symmetry, objective, factors="all", batches=()):
    return OrbitProblem(symmetry, network.requires_grad_(False), OrbitDirections(symmetry, factors), objective, batches)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.few(5, "layer norms", "between gains", "vit with layer norms")
def test_derivatives_by_all_coordinates_are_those_along_them_at_random_members(name):
    make, kinds = NETWORKS[name]
    network, _, symmetry = traced(make)
    assert kinds <= {*kinds_of(symmetry)}
    slopes = {n: torch.randn(own.shape, dtype=torch.float64) for n, own in network.state_dict().items()}

    def cubic(view, factor):
        tensors = {**view.parameters, **view.buffers}
        return factor * sum((slopes[n] * (own + own**3)).sum() for n, own in tensors.items() if own.requires_grad)

    problem = problem_of(network, symmetry, cubic, batches=[0.5, 1.5])
    member = symmetry.sample(generator(1), scale=0.3)
    value, gradient = problem.gradient(member)
    assert value == pytest.approx(problem.value(member), rel=1e-12)
    assert value == pytest.approx(float(cubic(problem.view(member), 1.0).detach()), rel=1e-12)
    seen = set()
    for coordinate, shape in problem.directions.shapes.items():
        if coordinate.split()[0] in seen:  # one matrix, one rotation
            continue
        seen.add(coordinate.split()[0])
        along = torch.randn(shape, dtype=torch.float64)
        one, two = (problem.value(problem.after({coordinate: step * along}, member)) for step in (1e-5, -1e-5))
        assert (one - two) / 2e-5 == pytest.approx(float((gradient[coordinate] * along).sum()), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("make", [layer_norms, between_gains, vit])
def test_coordinates_are_exponentials(make):
    """Two steps of X are one of 2 X, for each kind of coordinates apart."""
    _, _, symmetry = traced(make)
    directions = OrbitDirections(symmetry)
    for name, shape in directions.shapes.items():
        along = 0.3 * torch.randn(shape, dtype=torch.float64)
        one, two = directions.element({name: along}), directions.element({name: 2 * along})
        for each, other in zip(symmetry.compose(one, one).tensors().values(), two.tensors().values(), strict=True):
            assert torch.allclose(each, other, rtol=0, atol=1e-12)


def test_least_norm_of_a_relu_network_is_its_balanced_form_from_all_members():
    network, _, symmetry = traced(relu)
    least = squares_of(canonicalize(symmetry, network).network)
    for member in (network, symmetry.act(symmetry.sample(generator(1)), network)):
        for found in (minimize_on_orbit(symmetry, member, squares), least_norm(symmetry, member)):
            assert found.converged
            assert found.change < 1e-12
            assert found.after == pytest.approx(least, rel=1e-9)
        assert len(found.history) == 1  # the closed form
        assert "closed form" in found.notes[0]


@pytest.mark.parametrize("sizes", [(7, 9, 6, 3), (12, 8, 10)])
def test_least_gradient_norms_are_those_of_the_dual(sizes):
    """Of a ReLU network, and of one with GL(8): gradients move by the inverse transpose."""
    network, inputs, symmetry = traced(
        lambda: mlp(*sizes, activation=nn.ReLU if len(sizes) > 3 else nn.Identity, bias=len(sizes) > 3)
    )
    targets = torch.randint(sizes[-1], (len(inputs),))

    def slopes(view, batch):
        loss = functional.cross_entropy(view.output(batch), batch[1])
        return torch.autograd.grad(loss, list(view.values()), create_graph=True)

    def steepness(view, batch):
        return sum(own.square().sum() for own in slopes(view, batch))

    found = minimize_on_orbit(symmetry, network, steepness, data=(inputs, targets), max_steps=500)
    problem = problem_of(network, symmetry, steepness, batches=[(inputs, targets)])
    view = problem.view(symmetry.identity())
    element = least_dual_squares(
        symmetry, dict(zip(view, slopes(view, (inputs, targets)), strict=True)), kinds_of(symmetry)
    )
    if element is None:  # units that no input activates have no gradient
        pytest.fail("expected a closed form")
    assert found.after < 0.99 * found.before
    assert problem.value(element) == pytest.approx(found.after, rel=1e-9)


def test_least_trace_of_a_relu_network_is_that_of_the_dual():
    network, inputs, symmetry = traced(lambda: mlp(5, 7, 6, 2))

    def slopes(view):
        outputs = view(inputs).T.reshape(-1)
        rows = [torch.autograd.grad(own, list(view.values()), create_graph=True) for own in outputs]
        return {name: sum(own[at].square() for own in rows) for at, name in enumerate(view)}

    def trace(view):
        return sum(own.sum() for own in slopes(view).values())

    found = minimize_on_orbit(symmetry, network, trace)
    problem = problem_of(network, symmetry, trace)
    roots = {name: own.detach().sqrt() for name, own in slopes(problem.view(symmetry.identity())).items()}
    element = least_dual_squares(symmetry, roots, ["scales"])
    assert problem.value(element) == pytest.approx(found.after, rel=1e-9)
    assert found.after < 0.99 * found.before


def test_a_closed_form_is_given_only_where_there_is_one():
    for make in (vit, batch_norms, between_gains):  # gains around rotations, scales that only multiply, gains
        network, _, symmetry = traced(make)
        assert least_squares(symmetry, dict(network.named_parameters()), ["scales"]) is None
    network, _, symmetry = traced(two_linear_layers)
    weights = dict(network.named_parameters())
    assert least_squares(symmetry, weights, ["scales", "cells", "shifts"]) is None
    element = least_squares(symmetry, weights, ["scales", "cells"])
    found = minimize_on_orbit(symmetry, network, squares, factors=["scales", "cells"])
    assert squares_of(symmetry.act(element, network)) == pytest.approx(found.after, rel=1e-9)


@pytest.mark.long
def test_function_and_orthogonality_last_through_a_thousand_steps():
    network, inputs, symmetry = traced(vit)
    problem = problem_of(network, symmetry, squares, ["scales", "cells", "rotations", "phases"])
    element, draws = symmetry.identity(), generator(2)
    for _ in range(1000):
        step = {
            n: 0.02 * torch.randn(shape, dtype=torch.float64, generator=draws)
            for n, shape in problem.directions.shapes.items()
        }
        element = problem.after(step, element)
    turn = element.rotation[0]
    assert float((turn @ turn.mT - torch.eye(len(turn))).abs().max()) < 1e-12
    before, after = network(inputs), problem.view(element)(inputs)
    assert float((after - before).abs().max() / before.abs().max()) < 1e-12


def test_rotations_leave_the_norm_where_gains_are_folded():
    network, _, symmetry = traced(vit)
    folded = fold_norm_gains(symmetry, network).network
    found = minimize_on_orbit(symmetry, folded, squares, factors="rotations")
    assert found.converged
    assert len(found.history) == 1
    turned = symmetry.act(OrbitDirections(symmetry).element({"rotation 0": torch.randn(8, 8)}), folded)
    assert squares_of(turned) == pytest.approx(squares_of(folded), rel=1e-12)
    unfolded = minimize_on_orbit(symmetry, network, squares, factors="rotations", max_steps=3)
    assert unfolded.after < unfolded.before - 1e-3


def test_a_random_member_returns_with_shifts_only():
    """Biases of linear layers in a row cancel: without coordinates of shifts the descent stays far."""
    network, _, symmetry = traced(two_linear_layers)
    member = symmetry.act(symmetry.sample(generator(1)), network)
    own, other = (least_norm(symmetry, each) for each in (network, member))
    assert own.converged
    assert other.converged
    assert other.after == pytest.approx(own.after, rel=1e-8)
    assert max(own.change, other.change) < 1e-12
    kinds = [kind for kind in kinds_of(symmetry) if kind != "shifts"]
    assert minimize_on_orbit(symmetry, member, squares, factors=kinds).after > 1.01 * own.after
    # Balanced scales with shifts of 0 are not the least norm.
    assert squares_of(canonicalize(symmetry, network).network) > own.after + 1e-3


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_descents_repeat_bit_by_bit_and_their_elements_undo(optimizer):
    network, inputs, symmetry = traced(two_linear_layers)

    def loss(view, batch):
        return squares(view) + len(batch) * (view["0.weight"] ** 4).sum()

    one, two, other = (
        minimize_on_orbit(
            symmetry, network, loss, data=[inputs, inputs[:1]], optimizer=optimizer, max_steps=12, seed=seed
        )
        for seed in (3, 3, 4)
    )
    if optimizer == "adam":  # batches in another order
        assert [step.objective for step in one.history] != [step.objective for step in other.history]
    assert one.after < one.before
    assert [step.step for step in one.history] == list(range(13))
    times = [0.0, *(step.seconds for step in one.history)]
    assert times == sorted(times)
    assert [step.objective for step in one.history] == [step.objective for step in two.history]
    for name, own in one.network.state_dict().items():
        assert torch.equal(own, two.network.state_dict()[name])
    back = symmetry.act(symmetry.inverse(one.element), one.network)
    for name, own in back.state_dict().items():
        assert torch.allclose(own, network.state_dict()[name], rtol=0, atol=1e-12)


def test_adam_returns_the_best_point_that_it_saw():
    network, _, symmetry = traced(relu)
    least = minimize_on_orbit(symmetry, network, squares).element
    near = symmetry.compose(
        OrbitDirections(symmetry).element({"scales": torch.full_like(least.log_scale, 0.01)}), least
    )
    # The first step is longer than the way to the minimum.
    found = minimize_on_orbit(symmetry, network, squares, optimizer="adam", lr=0.5, max_steps=2, start=near)
    least = min(step.objective for step in found.history)
    assert found.after == pytest.approx(least, rel=1e-12)
    assert least < found.history[-1].objective - 0.01


@pytest.mark.parametrize("count", [1, 3])
def test_steps_that_only_lead_uphill_end_at_the_start(count):
    """Adam on batches with steps that are far too long, from a point next to the minimum."""
    network, _, symmetry = traced(relu)
    near = minimize_on_orbit(symmetry, network, squares, max_steps=30).element
    seen = list[tuple[int, int]]()
    found = minimize_on_orbit(
        symmetry,
        network,
        lambda weights, factor: factor * squares(weights),
        data=[torch.tensor(1.0 + own) for own in range(count)],
        optimizer="adam",
        lr=0.5,
        max_steps=3,
        tolerance=1e-30,
        start=near,
        progress=lambda done, of: seen.append((done, of)),
    )
    first = (1 + count) / 2 * squares_of(symmetry.act(near, network))
    assert found.after == pytest.approx(first, rel=1e-12)
    assert torch.equal(found.element.log_scale, near.log_scale)
    assert seen == [(number, 3) for number in range(4)]


def test_linear_layers_without_a_minimum_stop_at_a_condition_number():
    network, _, symmetry = traced(lambda: mlp(64, 16, 10, activation=nn.Identity, bias=False))
    found = minimize_on_orbit(symmetry, network, squares, max_steps=100, tolerance=1e-12)
    values = torch.linalg.svdvals(found.element.dense[0])
    assert float(values[0] / values[-1]) <= 1e4 * (1 + 1e-6)
    assert found.change < 1e-11  # rounding, times the condition number
    assert "1 matrices were stopped at the condition number 1e+04" in found.notes[0]


def test_scales_before_batch_norms_are_held_without_a_budget():
    network, _, symmetry = traced(batch_norms)
    found = minimize_on_orbit(symmetry, network, squares)
    assert "11 scales before batch norms, or that only multiply weights, were held" in found.notes[0]
    assert found.converged
    assert found.change < 1e-12
    bounded = minimize_on_orbit(symmetry, network, squares, budget=1.0)
    assert bounded.after < found.after
    assert float(bounded.element.log_scale.abs().max()) <= 1


def test_a_budget_bounds_scales_and_condition_numbers_of_a_maximum():
    network, _, symmetry = traced(two_linear_layers)
    found = minimize_on_orbit(symmetry, network, squares, maximize=True, budget=0.5, max_steps=30)
    assert found.after > 2 * found.before
    assert found.history[-1].objective > found.history[0].objective
    assert float(found.element.log_scale.abs().max()) == pytest.approx(0.5)
    values = torch.linalg.svdvals(found.element.dense[0])
    assert float((values[0] / values[-1]).log()) <= 0.5 + 1e-9
    assert any("shifts and rank-one maps were held" in note for note in found.notes)
    assert any("scales reached the budget of 0.5" in note for note in found.notes)
    with pytest.raises(ValueError, match="nothing bounds shifts"):
        minimize_on_orbit(symmetry, network, squares, maximize=True, factors="shifts")


def test_bounded_descents_and_ascents_begin_at_the_network():
    """Not at the closed form, which is out of bounds or the minimum."""
    network, _, symmetry = traced(relu)
    low = minimize_on_orbit(symmetry, network, weight_norm(), budget=0.05)
    high = minimize_on_orbit(symmetry, network, weight_norm(), maximize=True)
    for found, bound in ((low, 0.05), (high, 3.0)):
        assert found.history[0].objective == pytest.approx(found.before, rel=1e-12)
        assert float(found.element.log_scale.abs().max()) == pytest.approx(bound)
        assert not any("closed form" in note for note in found.notes)
    assert low.after < low.before < high.after


def test_descents_begin_at_balanced_and_at_rotated_networks():
    network, _, symmetry = traced(relu)
    least = squares_of(canonicalize(symmetry, network).network)
    assert minimize_on_orbit(symmetry, network, squares, start="balanced", max_steps=0).after == pytest.approx(least)
    network, _, symmetry = traced(vit)
    turn = minimize_on_orbit(symmetry, network, squares, start="hadamard", max_steps=0).element.rotation[0]
    assert torch.allclose(turn.abs(), torch.full_like(turn, 8**-0.5), rtol=0, atol=1e-12)


def test_scales_at_their_budget_do_not_block_the_others():
    network, _, symmetry = traced(relu)
    member = symmetry.act(symmetry.sample(generator(1), scale=1.5, permutations=False), network)
    start = symmetry.sample(generator(2), scale=0.1)  # permutes
    for first in (None, start):
        found = minimize_on_orbit(symmetry, member, squares, budget=0.7, start=first)
        assert found.converged
    scales = found.element.log_scale
    assert 0 < int((scales.abs() > 0.7 - 1e-9).sum()) < len(scales)


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_steps_to_where_the_objective_is_not_finite_are_halved(optimizer):
    network, _, symmetry = traced(relu)
    wall = 0.5 * (squares_of(network) + least_norm(symmetry, network).after)

    def barrier(weights):
        room = squares(weights) - wall
        return torch.where(room > 0, squares(weights) - 0.1 * room.clamp_min(1e-12).log(), math.nan)

    found = minimize_on_orbit(symmetry, network, barrier, optimizer=optimizer, lr=0.3, max_steps=60)
    assert math.isfinite(found.after)
    assert found.after < found.before


def test_patterns_of_axis_groups_choose_what_moves():
    network, _, symmetry = traced(relu)
    names = [group.name for group in symmetry.groups]
    assert names == ["0", "2"]
    table = torch.from_numpy(symmetry.structure.scale_table[0].ravel())
    for objective in (squares, weight_norm()):  # the closed form is for all scales
        found = minimize_on_orbit(symmetry, network, objective, factors=["0*"])
        moved = found.element.log_scale != 0
        assert bool(moved[table].all())
        assert int(moved.sum()) == len(table)


def test_rotations_through_a_gain_of_zero_are_held_or_refused():
    torch.manual_seed(0)
    network, inputs = vit()
    network = network.double().eval()
    name = next(own for own, _ in network.named_parameters() if "norm" in own)
    symmetry = trace_symmetry(network, inputs.double())
    with torch.no_grad():
        dict(network.named_parameters())[name].view(-1)[0] = 0
    found = minimize_on_orbit(symmetry, network, squares, max_steps=5)
    assert any("rotation 0 was held" in note and name in note for note in found.notes)
    assert found.after < found.before
    with pytest.raises(ValueError, match="holds zeros, through which rotation 0 cannot act"):
        minimize_on_orbit(symmetry, network, squares, factors="rotations")


def test_networks_without_continuous_coordinates_stay():
    network, _, symmetry = traced(lambda: mlp(4, 5, 3, activation=nn.Tanh))
    found = minimize_on_orbit(symmetry, network, squares)
    assert found.converged
    assert found.history == ()
    assert found.before == found.after
    assert "no continuous coordinate" in found.notes[0]


class NeedsData(Objective):
    reads_data = True

    def __call__(self, view, batch=None):
        return squares(view)


class Vanishing(Objective):
    """Lets scales before batch norms run to zero, so that the function loses its digits."""

    needs_one_sided = True

    def __call__(self, view, batch=None):
        return view["0.weight"].square().sum().log()


REFUSED = {
    "vector": (lambda weights: weights["0.weight"], {}, "must return a scalar tensor, got shape"),
    "number": (lambda weights: 1.0, {}, "must return a scalar tensor, got float"),
    "infinite": (lambda weights: squares(weights) / 0, {}, "the objective is inf at the start"),
    "constant": (lambda weights: torch.ones(()), {}, "no derivative by weights that the group moves"),
    "kind": (squares, {"factors": "rotation"}, "Unknown factor or axis group 'rotation'.* scales"),
    "pattern": (squares, {"factors": ["9*"]}, r"Unknown factor or axis group '9\*'"),
    "data": (NeedsData(), {}, "NeedsData needs data to run the network on; pass data="),
    "empty": (NeedsData(), {"data": []}, "data hold no batch"),
    "unbounded": (squares, {"maximize": True, "budget": math.inf}, "no maximum on the orbit"),
    "budget": (squares, {"budget": 0.0}, "budget must be a number > 0, got 0.0"),
    "start": (squares, {"start": "random"}, 'start must be "balanced" or "hadamard"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_its_cause(case):
    objective, options, message = REFUSED[case]
    network, _, symmetry = traced(relu)
    with pytest.raises(ValueError, match=message):
        minimize_on_orbit(symmetry, network, objective, **options)


def test_networks_without_values_are_refused():
    _, _, symmetry = traced(relu)
    with pytest.raises(ValueError, match="without values"):
        minimize_on_orbit(symmetry, relu()[0].double().to("meta"), squares)


def test_a_function_that_changes_is_an_error():
    network, _, symmetry = traced(batch_norms)
    with pytest.raises(RuntimeError, match="the move changed the output"):
        minimize_on_orbit(symmetry, network, Vanishing(), max_steps=400)


def test_without_steps_a_network_stays():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    symmetry = trace_symmetry(network, torch.randn(2, 3).double())
    found = minimize_on_orbit(symmetry, network, weight_norm(), max_steps=0)
    assert symmetry.factors.is_identity(found.element)
    assert minimize_on_orbit(symmetry, network, weight_norm()).after < found.after


def test_a_start_is_within_the_budget_also_where_nothing_moves():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2)).double()
    symmetry = trace_symmetry(network, torch.randn(2, 3).double())
    start = symmetry.sample(torch.Generator().manual_seed(0), scale=2.0)
    found = minimize_on_orbit(symmetry, network, weight_norm(), start=start, budget=0.5, factors="cells", max_steps=3)
    assert float(found.element.log_scale.abs().max()) <= 0.5
    assert float(start.log_scale.abs().max()) > 0.5
