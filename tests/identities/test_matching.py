"""Matching finds planted elements, changes no function, and beats every alternative where all can be tried."""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from helpers import one_in, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from orbit_cases import EXACT, difference, function_change, made, member
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchvision.ops import FrozenBatchNorm2d

from lightning_sym.merging import Merged, merge
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.symmetry import (
    ActivationMoments,
    Balance,
    CanonicalForm,
    Element,
    LocalDimension,
    Match,
    OrbitDistance,
    activation_matching,
    canonicalize,
    orbit_distance,
    parameter_distance,
    proof,
    trace_symmetry,
    weight_matching,
)
from lightning_sym.symmetry.group.proportion import best_factors
from lightning_sym.symmetry.matching.balanced import balanced, comparable
from lightning_sym.symmetry.matching.coordinate_descent import Descent
from lightning_sym.symmetry.matching.distance import lower_bound

MATCHED = (
    *("relu", "wide", "tanh", "wide_tanh", "gelu", "lenet5", "myrtle", "myrtle_without_norm"),
    *("resnet20_a", "resnet20_b", "resnet18", "depthwise", "two_groups", "group_norm"),
)


def test_only_networks_that_may_compute_the_same_are_copied_in_double_precision(monkeypatch):
    """Others are told apart by what they put out in their own precision; members of one orbit are not."""
    case, copied = made("relu"), []
    a, b = (copy.deepcopy(case.network).float() for _ in range(2))
    with torch.no_grad():
        for parameter in b.parameters():
            parameter.copy_(torch.randn_like(parameter))
    monkeypatch.setattr(proof, "double_copy", lambda network, f=proof.double_copy: copied.append(network) or f(network))
    examples = [pytree.tree_map_only(Tensor, Tensor.float, call) for call in case.symmetry.examples]
    assert not proof.compute_the_same(examples, a, b)
    assert copied == []
    assert proof.compute_the_same(examples, a, case.moved(a, 0.5))
    assert len(copied) == 2


@pytest.mark.parametrize("scale", [0.0, 0.5])
@pytest.mark.parametrize("name", MATCHED)
@pytest.mark.few(6, "depthwise-0.0", "depthwise-0.5")
def test_planted_elements_are_recovered(name, scale):
    case = made(name)
    b = case.moved(case.network, scale)
    match = weight_matching(case.symmetry, case.network, b, scales=scale > 0)
    assert difference(match.network, case.network) < EXACT
    assert function_change(case, b, match.network) < EXACT
    assert difference(match.network, case.symmetry.act(match.element, b)) == 0
    assert match.distance_after < EXACT < match.distance_before
    assert match.method == "weights"


def two_networks(make):
    """Return two networks of one architecture from two seeds, and their symmetry."""
    networks = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        networks.append(make().eval())
    return *networks, trace_symmetry(networks[0], torch.randn(1, 3, 8, 8), check=False)


def _narrow() -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), *layers, nn.Linear(64, 10))


def _normed() -> nn.Module:
    layers = (nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, bias=False))
    return nn.Sequential(*layers, nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10))


@pytest.mark.parametrize("make", [_narrow, _normed])
def test_a_pass_from_layer_to_layer_comes_nearer(make, monkeypatch):
    a, b, symmetry = two_networks(make)
    ours = [weight_matching(symmetry, a, b, scales=False, seed=seed) for seed in range(3)]
    monkeypatch.setattr(Descent, "pass_forward", lambda _: None)
    plain = [weight_matching(symmetry, a, b, scales=False, seed=seed) for seed in range(3)]
    assert max(match.distance_after for match in ours) < min(match.distance_after for match in plain)


@pytest.mark.parametrize("make", [_narrow, _normed])
def test_scales_take_nothing_where_they_give_nothing(make):
    """Balancing two networks as they were initialised gives nothing, and no forms are compared."""
    a, b, symmetry = two_networks(make)
    match = weight_matching(symmetry, a, b)
    assert match.distance_after <= weight_matching(symmetry, a, b, scales=False, signs=False).distance_after
    compared = comparable(symmetry, a, b, balance=True)
    assert not Descent(compared, signs=True, device=torch.device("cpu")).suspicious(symmetry.identity())
    for planted in (0.0, 0.05):  # even, too
        moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0), scale=planted), a)
        assert weight_matching(symmetry, a, moved).distance_after < 1e-5 * parameter_distance(a, moved)


def test_planted_permutations_of_heads_are_recovered():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    network = nn.Sequential(nn.Linear(4, 8), layer, nn.LayerNorm(8), nn.Linear(8, 3)).double().eval()
    generator = torch.Generator().manual_seed(0)
    symmetry = trace_symmetry(network, torch.randn(2, 5, 4, dtype=torch.float64, generator=generator))
    assert symmetry.structure.dense
    b = symmetry.act(symmetry.sample(generator, scale=0.0, mixing=False, shifts=False), network)
    assert difference(weight_matching(symmetry, network, b, scales=False, restarts=10).network, network) < EXACT


def sigmoid() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3))


def signs_of_groups() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 1, bias=False), nn.GroupNorm(4, 8, affine=False), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)
    )


@pytest.mark.parametrize(("make", "shape", "affine"), [(sigmoid, (4,), True), (signs_of_groups, (1, 2, 2), False)])
def test_signs_that_biases_take_up_and_signs_of_whole_cells(make, shape, affine):
    """Flips of sigmoids change biases (docs/theory/intertwiners.md, 1.4); a group without gains passes one sign on."""
    torch.manual_seed(0)
    networks = [make().double() for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, *shape, dtype=torch.float64, generator=generator)
    symmetry = trace_symmetry(networks[0], inputs, affine=affine)
    assert symmetry.signs
    for _ in range(3):
        element = symmetry.sample(generator, scale=0.0, mixing=False, shifts=False)
        same, other = (symmetry.act(element, network) for network in networks)
        match = activation_matching(symmetry, networks[0], same, [inputs])
        assert difference(match.network, networks[0]) < EXACT
        bounds = orbit_distance(symmetry, networks[0], other)
        assert bounds.upper == pytest.approx(weight_matching(symmetry, networks[0], other).distance_after)
        assert orbit_distance(symmetry, networks[0], same).lower <= EXACT
        assert bounds.lower <= min(parameter_distance(networks[0], n) for n in (other, networks[1])) + EXACT
    if affine:
        with pytest.raises(ValueError, match="pass measure='correlation'"):
            activation_matching(symmetry, networks[0], same, [inputs], measure="product")


def test_rotations_are_recovered():
    network = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    symmetry = trace_symmetry(network, torch.randn(2, 5, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=generator))[0]
    identity = symmetry.identity()
    b = symmetry.act(identity.replaced(dense=(rotation,)), network)
    match = weight_matching(symmetry, network, b)
    assert difference(match.network, network) < EXACT


class Stream(nn.Module):
    """A pre-norm transformer whose stream is normalised by one of two norms, with gains, over tokens of 4 numbers."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
        self.embed, self.layer, self.head = nn.Linear(4, 8), layer, nn.Linear(8, 3)
        self.layer.norm1, self.layer.norm2, self.norm = (getattr(nn, norm)(8) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.embed(tokens)
        attention = self.layer.self_attn
        tokens = tokens + attention(*[self.layer.norm1(tokens)] * 3, need_weights=False)[0]
        return self.head(self.norm(tokens + self.layer._ff_block(self.layer.norm2(tokens))))


@pytest.mark.parametrize("method", ["weights", "activations"])
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.long
def test_planted_rotations_of_streams_are_recovered(norm, method):
    torch.manual_seed(0)
    network = Stream(norm).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(24, 5, 4, dtype=torch.float64, generator=generator)
    symmetry = trace_symmetry(network, tokens[:2])
    assert symmetry.structure.rotations
    assert symmetry.structure.dense
    b = symmetry.act(symmetry.sample(generator, scale=0.3), network)
    if method == "weights":
        match = weight_matching(symmetry, network, b)
    else:
        match = activation_matching(symmetry, network, b, tokens.split(8))
    assert match.distance_after < EXACT < 10 < match.distance_before
    assert float((match.network(tokens) - b(tokens)).detach().abs().max()) < EXACT
    # Principal axes leave nothing of the orbit: one form, and distances of 0 from both sides.
    forms = [canonicalize(symmetry, one) for one in (network, b)]
    assert not forms[0].notes
    assert difference(*(form.network for form in forms)) < EXACT
    assert difference(canonicalize(symmetry, forms[0].network).network, forms[0].network) < EXACT
    assert orbit_distance(symmetry, network, b).upper < EXACT
    unrelated = orbit_distance(symmetry, network, Stream(norm).double())
    assert EXACT < unrelated.lower <= unrelated.upper
    # Without scales gains differ, and what is rotated between them changes its norm.
    other = weight_matching(symmetry, network, Stream(norm).double(), scales=False)
    assert other.distance_after <= other.distance_before


@pytest.mark.parametrize("name", one_in(3, MATCHED))
@pytest.mark.few(5)
def test_of_unrelated_networks_only_the_distance_changes(name):
    case = made(name)
    a, b = case.network, member(name, 7)
    copies = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
    one, two = (weight_matching(case.symmetry, a, b, restarts=2, seed=3, refine=True) for _ in range(2))
    assert function_change(case, b, one.network) < EXACT
    assert one.distance_after < one.distance_before
    assert one.distance_after == pytest.approx(parameter_distance(a, one.network))
    assert all(x <= y for x, y in itertools.pairwise(one.objective))
    assert max(one.restarts) == one.objective[-1]
    assert len(one.restarts) == 2
    # Bitwise the same again, and the arguments as they were.
    assert difference(one.network, two.network) == 0
    assert one.objective == two.objective
    for network, before in zip((a, b), copies, strict=True):
        assert all(torch.equal(t, before[k]) for k, t in network.state_dict().items())


@pytest.mark.parametrize("name", ["wide_tanh", "myrtle", "resnet20_a", "depthwise", "group_norm"])
@pytest.mark.few(5)
def test_scales_and_signs_never_end_farther_than_permutations_alone(name):
    case = made(name)
    for seed in (7, 8):
        a, b = case.network, member(name, seed)
        alone, match = (weight_matching(case.symmetry, a, b, scales=free, signs=free) for free in (False, True))
        assert match.distance_after <= alone.distance_after


def one_layer(activation: nn.Module, size: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, size), activation, nn.Linear(size, 2)).double()


def rows(network: nn.Module) -> tuple[Tensor, Tensor]:
    """Return incoming (with the bias) and outgoing weights, one row per unit."""
    return torch.cat([network[0].weight, network[0].bias[:, None]], 1).detach(), network[2].weight.T.detach()


@settings(deadline=None, max_examples=15, derandomize=True)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 5), kind=st.sampled_from(["gelu", "tanh", "relu"]))
def test_one_hidden_layer_is_exact_in_one_sweep(seed, size, kind):
    activation = {"gelu": nn.GELU(), "tanh": nn.Tanh(), "relu": nn.ReLU()}[kind]
    a, b = one_layer(activation, size, seed), one_layer(activation, size, seed + 1)
    symmetry = trace_symmetry(a, torch.randn(2, 3, dtype=torch.float64), check=False)
    match = weight_matching(symmetry, a, b, scales=False, balance=False)
    (ai, ao), (bi, bo) = rows(a), rows(b)
    pairs = ai @ bi.T + ao @ bo.T
    if kind == "tanh":
        pairs = pairs.abs()
    best = max(sum(float(pairs[i, p[i]]) for i in range(size)) for p in itertools.permutations(range(size)))
    fixed = float(a[2].bias.detach() @ b[2].bias.detach())
    assert match.objective[-1] == pytest.approx(best + fixed, abs=1e-12)
    assert match.objective[min(1, len(match.objective) - 1)] == match.objective[-1]
    assert match.sweeps <= 2
    # Both bounds are the distance itself.
    bounds = orbit_distance(symmetry, a, b, balance=False)
    assert bounds.lower == pytest.approx(bounds.upper, rel=1e-9)
    assert bounds.upper == pytest.approx(match.distance_after, rel=1e-9)
    assert bounds.exact


def test_scales_are_those_of_least_distance():
    a, b = one_layer(nn.ReLU(), 4, 0), one_layer(nn.ReLU(), 4, 1)
    symmetry = trace_symmetry(a, torch.randn(2, 3, dtype=torch.float64))
    plain, match = (weight_matching(symmetry, a, b, refine=refine) for refine in (False, True))
    assert match.distance_after < plain.distance_after
    (ai, ao), (bi, bo) = rows(a), rows(b)
    grid = torch.logspace(-3, 3, 20001, dtype=torch.float64)
    for unit in range(4):
        mi, mo = rows(match.network)
        source = int(match.element.permutation[unit])
        mine = float((ai[unit] - mi[unit]).square().sum() + (ao[unit] - mo[unit]).square().sum())
        incoming, outgoing = ai[unit] - grid[:, None] * bi[source], ao[unit] - bo[source] / grid[:, None]
        assert mine <= float((incoming.square().sum(1) + outgoing.square().sum(1)).min()) + 1e-12


def test_positive_scales_of_incoming_weights_alone_are_closed_form():
    """With one norm behind, the best factor is <a, b> / |b|^2 where that is positive (docs/theory/matching.md, 1.4)."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in "ab")
    p, q = (a * b).sum(1).numpy(), (b * b).sum(1).numpy()
    step = best_factors(p, q, 0 * p, 0 * q)
    for i in range(5):
        assert step[i] == pytest.approx(math.log(p[i] / q[i]) if p[i] > 0 else 0.0)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.floats(0.01, 5), st.floats(0.01, 5))
def test_best_factors_beat_a_grid(numbers, q, s):
    p, r = numbers[0] * math.sqrt(q), numbers[1] * math.sqrt(s)

    def value(f):
        return -2 * p * f + q * f**2 - 2 * r / f + s / f**2

    step = best_factors(*(np.array([x]) for x in (p, q, r, s)))
    grid = np.logspace(-3, 3, 5001)
    assert value(math.exp(step[0])) <= value(grid).min() + 1e-9


class Symmetric(nn.Module):
    """Reads one group on both axes of a weight, where descents often end in a local optimum."""

    def __init__(self):
        super().__init__()
        self.first, self.weight, self.last = nn.Linear(4, 6), nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) @ (self.weight - self.weight.T))


def normed():
    norm = nn.LayerNorm(6)
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 6), norm, nn.Linear(6, 3))


@pytest.mark.parametrize("make", [Symmetric, normed])
def test_orbit_distance_is_zero_where_matching_needs_the_canonical_forms(make):
    torch.manual_seed(0)
    network = make().double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    symmetry = trace_symmetry(network, torch.randn(3, 4, dtype=torch.float64))
    for seed in range(4):
        moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), network)
        bounds = orbit_distance(symmetry, network, moved)
        assert bounds.lower <= bounds.upper < EXACT


@pytest.mark.parametrize("name", ["relu", "tanh", "myrtle", "resnet20_a", "two_groups"])
def test_orbit_distance_of_one_orbit_is_zero(name):
    case = made(name)
    bounds = orbit_distance(case.symmetry, case.network, case.moved(case.network, 0.5))
    assert bounds.lower <= bounds.upper < EXACT
    same = orbit_distance(case.symmetry, case.network, case.network)
    assert same.lower == same.upper == 0
    other = orbit_distance(case.symmetry, case.network, member(name, 7))
    assert 0 < other.lower <= other.upper


@pytest.mark.parametrize("name", ["relu", "tanh", "myrtle", "resnet20_a", "depthwise", "two_groups", "group_norm"])
@pytest.mark.few(6)
def test_no_member_of_the_orbit_is_nearer_than_the_lower_bound(name):
    case = made(name)
    symmetry = case.symmetry

    def bound(a: nn.Module, b: nn.Module) -> float:
        return lower_bound(Descent(comparable(symmetry, a, b, balance=False), signs=True, device=torch.device("cpu")))

    a, b = (canonicalize(symmetry, n, signs=False, order=False).network for n in (case.network, member(name, 7)))
    near = copy.deepcopy(a)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    lower = bound(a, b)
    assert lower > 0
    for seed in range(5):
        element = symmetry.sample(torch.Generator().manual_seed(seed), scale=0.0, shifts=False)
        # From the whole orbit the same bound, and no member below it: not the nearest one that is known, either.
        assert bound(a, symmetry.act(element, b)) == pytest.approx(lower, rel=1e-9)
        assert parameter_distance(a, symmetry.act(element, b)) >= lower
        assert bound(a, symmetry.act(element, near)) <= parameter_distance(a, near) * (1 + 1e-9)


def faded(case, network: nn.Module, seed: int) -> nn.Module:
    """Return the network with one of seven units in each tensor made smaller, down to 1e-12 times."""
    generator = torch.Generator().manual_seed(seed)
    network = copy.deepcopy(network)
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for slot in case.symmetry.structure.slots:
            if slot.tensor in parameters and len(slot.axes) == 1:
                chances, exponents = torch.rand(2, slot.size, generator=generator, dtype=torch.float64)
                factors = torch.where(chances < 1 / 7, 10 ** (-12 * exponents), 1.0)
                parameter = parameters[slot.tensor]
                parameter.mul_(factors.view(*(-1 if axis in slot.axes else 1 for axis in range(parameter.ndim))))
    return network


FADING = (
    *("relu", "residual", "recurrent", "lenet5", "myrtle", "grouped"),
    *("biased_before_batch_norm", "inverted_residuals"),
)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(FADING), st.booleans())
@pytest.mark.long
def test_no_match_is_farther_than_the_start_where_units_are_nearly_dead(seed, name, single):
    """Scales of units with hardly any weights say nothing (docs/theory/matching.md, 1.5)."""
    case = made(name)
    a, b = (faded(case, member(name, number), seed + number) for number in (0, 7))
    compared = comparable(case.symmetry, a, b, balance=True)
    left, right = (balanced(case.symmetry, network)[0] for network in (a, b))
    size = [math.sqrt(sum(float(p.detach().square().sum()) for p in net.parameters())) for net in (a, left, right)]
    handed = case.symmetry.act(compared.back(case.symmetry.identity()), b)
    assert parameter_distance(a, handed) <= 4 * sum(size)  # also before a match is compared with the start
    assert function_change(case, b, handed) < EXACT
    if single:
        a, b = a.float(), b.float()
    match = weight_matching(case.symmetry, a, b)
    assert match.distance_after <= match.distance_before


@pytest.mark.parametrize("name", FADING)
@pytest.mark.few(6)
def test_units_that_are_as_dead_as_the_reference_s_get_its_scales_exactly(name):
    case = made(name)
    a, identity = faded(case, case.network, 0), case.symmetry.identity()
    scales = torch.randn(case.symmetry.scales, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2
    b = case.symmetry.act(identity.replaced(log_scale=scales), a)
    handed = comparable(case.symmetry, a, b, balance=True).back(identity)
    assert difference(case.symmetry.act(handed, b), a) < EXACT


def test_the_mean_does_not_take_scales_of_nearly_dead_units():
    a, b = one_layer(nn.ReLU(), 4, 0), one_layer(nn.ReLU(), 4, 1)
    with torch.no_grad():
        a[2].weight[:, 0] = 1e-9
    merged = merge(trace_symmetry(a, torch.randn(2, 3, dtype=torch.float64)), [a, b]).network
    assert max(float(p.detach().abs().max()) for p in merged.parameters()) < 2


@pytest.mark.parametrize("measure", ["correlation", "product"])
@pytest.mark.parametrize("name", MATCHED)
@pytest.mark.long
def test_activations_recover_planted_elements(name, measure):
    case = made(name)
    scale = 0.5 if measure == "correlation" else 0.0
    b = case.moved(case.network, scale)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(96, *case.inputs.shape[1:], dtype=torch.float64, generator=generator)
    match = activation_matching(case.symmetry, case.network, b, images.split(32), measure=measure, scales=scale > 0)
    assert function_change(case, b, match.network) < EXACT
    assert difference(match.network, case.network) < EXACT
    assert match.objective[0] <= match.objective[1]
    assert match.method == "activations"


@functools.cache
def two_perceptrons():
    a, b = (MultiLayerPerceptron((4, 3), image_size=2, num_classes=2).fresh(k).double() for k in (0, 1))
    return a, b, trace_symmetry(a, torch.randn(1, 1, 2, 2, dtype=torch.float64))


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 100))
def test_moments_do_not_depend_on_the_batches(sizes, seed):
    a, b, symmetry = two_perceptrons()
    total = sum(sizes)
    images = torch.randn(max(total, 1), 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    whole, parts = (ActivationMoments(symmetry, a, b) for _ in range(2))
    whole.update(images[:total])
    start = 0
    for number, size in enumerate(sizes):
        parts.update((images[start : start + size], None))
        start += size
        if number == 0:
            again = ActivationMoments(symmetry, a, b)
            again.load_state_dict(parts.state_dict())
            parts = again
    assert parts.samples == whole.samples == {"linear1": total, "linear2": total}
    for name, sums in whole.state_dict()["sums"].items():
        for key, value in sums.items():
            torch.testing.assert_close(parts.state_dict()["sums"][name][key], value, atol=1e-12, rtol=1e-12)


def test_correlations_are_those_of_numpy_and_dead_units_give_zero():
    a, b = (MultiLayerPerceptron((4,), image_size=2, num_classes=2).fresh(k).double() for k in (0, 1))
    with torch.no_grad():
        a.linear1.bias[1] = -100.0
    images = torch.randn(50, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moments = ActivationMoments(trace_symmetry(a, images), a, b)
    moments.update(images)
    with torch.no_grad():
        x, y = (n.activation1(n.linear1(images.flatten(1))).numpy() for n in (a, b))
    alive = [0, 2, 3]
    expected = np.corrcoef(x[:, alive].T, y.T)[:3, 3:]
    found = moments.correlation("linear1").numpy()
    np.testing.assert_allclose(found[alive], expected, atol=1e-10)
    assert (found[1] == 0).all()
    assert moments.places == {"linear1": "activation1"}
    np.testing.assert_allclose(moments.product("linear1").numpy(), x.T @ y / 50, atol=1e-12)


@pytest.mark.parametrize("name", ["wide", "wide_tanh", "myrtle", "two_groups"])
@pytest.mark.few(3)
def test_the_mean_of_copies_is_the_network(name):
    case = made(name)
    networks = [case.network, *(case.moved(case.network, 0.5, seed) for seed in (1, 2, 3))]
    merged = merge(case.symmetry, networks)
    assert difference(merged.network, case.network) < 1e-8
    assert merged.distances[-1] < EXACT
    for element, network in zip(merged.elements, networks, strict=True):
        assert difference(case.symmetry.act(element, network), case.network) < 1e-8
    by_activations = merge(case.symmetry, networks[:2], align="activations", batches=[case.inputs])
    assert difference(by_activations.network, case.network) < 1e-8
    other = merge(case.symmetry, networks, reference=2)
    assert difference(other.network, networks[2]) < 1e-8


def test_merging_comes_nearer_in_every_round():
    case = made("relu")
    networks = [member("relu", seed) for seed in range(4)]
    one, two = (merge(case.symmetry, networks, seed=1) for _ in range(2))
    assert difference(one.network, two.network) == 0
    assert all(x >= y for x, y in itertools.pairwise(one.distances))
    assert one.distances[-1] < one.distances[0]
    assert difference(merge(case.symmetry, networks[:1]).network, networks[0]) < EXACT


def test_single_precision_and_an_initial_element():
    case = made("lenet5")
    a, b = copy.deepcopy(case.network).float(), case.moved(case.network, 0.5).float()
    match = weight_matching(case.symmetry, a, b)
    assert difference(match.network, a) < 1e-4
    again = weight_matching(case.symmetry, a, b, initial=match.element)
    assert again.sweeps == 1
    assert next(again.network.parameters()).dtype == torch.float32


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_shows_progress_where_it_is_asked_for(monkeypatch, capsys, rank):
    network, _, symmetry = made("relu")
    monkeypatch.setattr("lightning_sym._distributed.ranks", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    weight_matching(symmetry, network, network)
    assert capsys.readouterr().out == ""
    weight_matching(symmetry, network, network, progress=True)
    assert ("matching: restart 1, sweep 1, objective" in capsys.readouterr().out) == (rank == 0)


@pytest.mark.parametrize("result", [Balance, CanonicalForm, LocalDimension, Match, Merged, OrbitDistance, Element])
def test_results_cannot_be_changed(result):
    assert result.__dataclass_params__.frozen


def spoilt() -> nn.Module:
    network = copy.deepcopy(made("relu").network)
    with torch.no_grad():
        network[0].weight[0, 0] = torch.nan
    return network


def large(size: float) -> nn.Module:
    network = copy.deepcopy(made("relu").network).float()
    with torch.no_grad():
        network[0].weight[0, 0] = size
    return network


A, INPUTS, SYMMETRY = made("relu")
B, _, OTHER = made("tanh")
MOMENTS, OF_OTHERS = ActivationMoments(SYMMETRY, A, A), ActivationMoments(OTHER, B, B)


@pytest.mark.parametrize(
    "refusal",
    [
        refused(weight_matching, SYMMETRY, A, B, says="b is not of the traced architecture"),
        refused(weight_matching, SYMMETRY, A, spoilt(), says="0.weight of b holds values that are not finite"),
        refused(
            weight_matching, SYMMETRY, A, large(1e38), says=("0.weight of b", "whose squares float32 does not hold")
        ),
        refused(
            orbit_distance, SYMMETRY, large(1e38), A, says=("0.weight of a", "whose squares float32 does not hold")
        ),
        refused(
            merge, SYMMETRY, [A, large(1e20)], says=("0.weight of network 1", "whose squares float32 does not hold")
        ),
        refused(weight_matching, SYMMETRY, A, A, restarts=0),
        refused(lambda: weight_matching(SYMMETRY, A, A, initial=OTHER.identity()), says="of another network"),
        refused(activation_matching, SYMMETRY, A, A, [INPUTS], measure="cosine", says="measure must be"),
        refused(activation_matching, SYMMETRY, A, A, [], says="at least one batch"),
        refused(activation_matching, SYMMETRY, A, A, ["x"], says="must yield tensors, or tuples"),
        refused(activation_matching, SYMMETRY, A, A, OF_OTHERS, says="moments are those of"),
        refused(MOMENTS.load_state_dict, OF_OTHERS.state_dict(), says="the state holds other axis groups"),
        refused(merge, SYMMETRY, [], says="at least one network"),
        refused(merge, SYMMETRY, [A], align="activations", says="needs batches"),
        refused(merge, SYMMETRY, [A, B], says="network 1 is not of the traced architecture"),
        refused(merge, SYMMETRY, [A] * 3, align="activations", batches=iter([INPUTS]), says="this iterator only once"),
    ],
)
def test_refused_arguments(refusal):
    refusal()


class FixedGains(nn.Module):
    """Hidden units behind gains, or inside frozen batch norms, that are buffers."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 4)
        self.norm = FrozenBatchNorm2d(8) if frozen else None
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        x = x if self.norm is None else self.norm(x[..., None, None])[..., 0, 0]
        return self.out(self.gain * torch.relu(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_buffers_that_are_gains_count_as_weights(frozen):
    """A match that flips or stretches the gains of one network only would cancel them in a mean."""
    torch.manual_seed(0)
    a, b = (FixedGains(frozen).double() for _ in range(2))
    symmetry = trace_symmetry(a, torch.randn(2, 6, dtype=torch.float64))
    match = weight_matching(symmetry, a, b)
    assert match.distance_after < 0.9 * match.distance_before
    gains = [match.network.gain] + ([match.network.norm.weight] if frozen else [])
    assert all(bool((gain > 0.5).all()) for gain in gains)
    # Permutations alone are those of the network without its gains, which are ones.
    alone = weight_matching(symmetry, a, b, scales=False)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    one, two = (copy.deepcopy(plain) for _ in range(2))
    for network, whole in ((one, a), (two, b)):
        network[0].load_state_dict(whole.into.state_dict())
        network[2].load_state_dict(whole.out.state_dict())
    same = weight_matching(trace_symmetry(one, torch.randn(2, 6, dtype=torch.float64)), one, two, scales=False)
    assert torch.equal(alone.network.into.weight, same.network[0].weight)
    planted = symmetry.act(symmetry.sample(torch.Generator().manual_seed(1)), a)
    found = weight_matching(symmetry, a, planted).network
    for name, own in a.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], own, rtol=1e-9, atol=1e-9)
