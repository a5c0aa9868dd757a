"""GPTQ and AWQ: they agree with plain second computations, and lower the errors that they are made to lower."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_orbit_objectives import CASES, cnn, mlp, relative_error
from torch import nn
from torch.nn import functional

from lightning_sym.orbit import awq, prune_by_magnitude, prune_by_wanda, round_by_gptq, round_to_nearest
from lightning_sym.orbit.gptq import input_grams, rounded_rows
from lightning_sym.orbit.rounding import mean_inputs, rounded
from lightning_sym.symmetry import trace_symmetry


def drawn(seed, rows, columns, samples):
    """Return rows, and correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    inputs = torch.randn(samples, columns, generator=generator, dtype=torch.float64) @ mixing
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64), inputs


def errors(changed, rows, inputs):
    return ((changed - rows) @ inputs.mT).square().sum(1)


sizes = {"seed": st.integers(0, 10**6), "rows": st.integers(1, 5), "columns": st.integers(1, 7)}


@given(**sizes, bits=st.integers(2, 5))
def test_gptq_with_the_identity_as_gram_matrix_rounds_to_nearest(seed, rows, columns, bits):
    weight, _ = drawn(seed, rows, columns, 1)
    largest = weight.abs().amax(1, keepdim=True)
    expected = rounded(weight, bits, largest=largest)
    for size in (1.0, 3.7):
        gram = size * torch.eye(columns, dtype=torch.float64)
        assert torch.equal(rounded_rows(weight, bits, largest, gram), expected)


@given(**sizes, bits=st.integers(2, 5), samples=st.integers(0, 12))
def test_gptq_never_has_a_larger_error_than_rounding_to_nearest(seed, rows, columns, bits, samples):
    weight, inputs = drawn(seed, rows, columns, samples)
    largest = weight.abs().amax(1, keepdim=True)
    found, nearest = rounded_rows(weight, bits, largest, inputs.mT @ inputs), rounded(weight, bits, largest=largest)
    before, after = errors(nearest, weight, inputs), errors(found, weight, inputs)
    assert bool((after <= before * (1 + 1e-9)).all())
    steps = found / (largest / (2 ** (bits - 1) - 1))
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-9)
    assert float(steps.abs().max()) < 2 ** (bits - 1) - 1 + 1e-9


def test_gptq_is_the_least_squares_solution_of_the_remaining_columns_at_each_step():
    weight, inputs = drawn(1, 4, 6, 30)
    gram, largest, bits = inputs.mT @ inputs, weight.abs().amax(1, keepdim=True), 3
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(6).double()
    order = gram.diagonal().argsort(descending=True)
    result, left = torch.zeros_like(weight), weight.clone()
    for number, column in enumerate(order):
        result[:, column] = rounded(left[:, [column]], bits, largest=largest)[:, 0]
        fixed, free = order[: number + 1], order[number + 1 :]
        known = (weight[:, fixed] - result[:, fixed]) @ damped[fixed][:, free]
        left[:, free] = weight[:, free] + torch.linalg.solve(damped[free][:, free], known.mT).mT
    nearest = rounded(weight, bits, largest=largest)
    better = errors(result, weight, inputs) < errors(nearest, weight, inputs)
    assert int(better.sum()) >= 3
    expected = torch.where(better[:, None], result, nearest)
    torch.testing.assert_close(rounded_rows(weight, bits, largest, gram), expected, rtol=0, atol=1e-12)


def test_grams_of_kernels_are_those_of_unfolded_inputs():
    torch.manual_seed(0)
    grouped = nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2).double()
    images = torch.randn(5, 4, 7, 8).double()
    patches = functional.unfold(images, (3, 2), dilation=(1, 2), padding=1, stride=2).view(5, 2, 12, -1)
    expected = torch.einsum("ngil,ngjl->gij", patches, patches)
    found = input_grams(grouped, [images[:2], images[2:]])
    torch.testing.assert_close(found["weight"], expected, rtol=1e-12, atol=1e-12)
    line, flat = nn.Conv1d(3, 2, 4).double(), nn.Conv2d(3, 2, (1, 4)).double()
    signals = torch.randn(2, 3, 9).double()
    one, two = input_grams(line, [signals])["weight"], input_grams(flat, [signals[:, :, None]])["weight"]
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_gptq_rounds_each_layer_on_the_inputs_of_rounded_layers(case, granularity):
    network, (inputs, _) = CASES[case]()
    found = round_by_gptq(network, 3, granularity, data=[inputs[:2], inputs[2:]])
    own, nearest = dict(found.named_parameters()), dict(round_to_nearest(network, 3, granularity).named_parameters())
    names, changed = list(input_grams(network, [inputs])), False
    for number, name in enumerate(names):
        before = copy.deepcopy(network)
        with torch.no_grad():
            for other in names[:number]:
                before.get_parameter(other).copy_(own[other])
            gram = input_grams(before, [inputs])[name][0]
            rows = network.get_parameter(name).flatten(1)
            largest = rows.abs().amax(1, keepdim=True)
            largest = largest if granularity == "channel" else largest.amax().expand_as(largest)
            expected = rounded_rows(rows, 3, largest, gram)
        torch.testing.assert_close(own[name].detach().flatten(1), expected, rtol=0, atol=1e-10)
        changed |= not torch.equal(own[name], nearest[name])
    assert changed
    assert all(torch.equal(own[name], value) for name, value in network.named_parameters() if value.ndim < 2)


def test_gptq_lowers_the_error_of_correlated_inputs_and_rounds_activations():
    network, _ = mlp()
    mixing = torch.randn(2, 6, generator=torch.Generator().manual_seed(1)).double()
    inputs = torch.randn(60, 2, generator=torch.Generator().manual_seed(2)).double() @ mixing
    found = round_by_gptq(network, 3, "channel", data=inputs)
    nearest = round_to_nearest(network, 3, "channel")
    assert relative_error(found, network, inputs) < 0.5 * relative_error(nearest, network, inputs)
    with_activations = round_by_gptq(network, 3, "channel", data=inputs, activations=3)
    assert relative_error(with_activations, found, inputs) > 1e-4


def test_matrices_that_no_map_reads_are_rounded_to_nearest():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Flatten(), nn.Unflatten(1, (2, 4, 1)))
    network.append(nn.ConvTranspose2d(2, 3, 2)).double()
    tokens = torch.arange(14).view(7, 2) % 7
    found, nearest = round_by_gptq(network, 3, data=tokens), round_to_nearest(network, 3)
    same = [torch.equal(a, b) for a, b in zip(found.parameters(), nearest.parameters(), strict=True)]
    assert same == [True, False, True, True, True]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.few(4, "tensor-cnn")
def test_awq_keeps_the_function_and_moves_the_network(case, granularity):
    network, (inputs, _) = CASES[case]()
    symmetry = trace_symmetry(network, inputs)
    moved = symmetry.act(awq(symmetry, network, inputs, 3, granularity), network)
    with torch.no_grad():
        torch.testing.assert_close(moved(inputs), network(inputs), rtol=1e-12, atol=1e-12)
    assert any(not torch.equal(a, b) for a, b in zip(network.parameters(), moved.parameters(), strict=True))


def test_awq_takes_the_power_with_the_least_error_of_the_outputs():
    powers = set()
    for seed in range(3):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4)).double().requires_grad_(False)
        network[0].weight.mul_(torch.logspace(-1, 1, 10)[:, None])
        network[0].bias.zero_()  # no unit is dead
        inputs, weight = torch.randn(40, 6).double(), network[2].weight
        symmetry = trace_symmetry(network, inputs)
        hidden = torch.relu(network[0](inputs))
        tried = {}
        for power in torch.arange(20).double() / 20:
            scale = hidden.mean(0) ** power
            scale = scale / (scale.max() * scale.min()).sqrt()
            change = rounded(weight * scale, 3, 0) / scale - weight
            tried[float(power)] = float((hidden @ change.mT).square().sum()), weight * scale
        moved = symmetry.act(awq(symmetry, network, [inputs[:10], inputs[10:]], 3, "channel"), network)
        best = min(tried, key=lambda power, tried=tried: tried[power][0])
        torch.testing.assert_close(moved[2].weight, tried[best][1], rtol=1e-12, atol=1e-12)
        powers.add(best)
    assert len(powers) > 1


def test_mean_inputs_are_means_over_batches_and_places():
    network, (inputs, _) = cnn()
    found = mean_inputs(network, [inputs[:3], inputs[3:]])
    torch.testing.assert_close(found["0.weight"], inputs.abs().mean((0, 2, 3)))


def test_kept_matrices_are_not_pruned():
    network, (inputs, _) = mlp()
    for pruned in (prune_by_magnitude(network, 0.5, keep=["0.weight"]),
                   prune_by_wanda(network, inputs, 0.5, keep=["0.weight"])):  # fmt: skip
        assert torch.equal(pruned[0].weight, network[0].weight)
        assert int((pruned[2].weight == 0).sum()) == 40
    with pytest.raises(ValueError, match="matrix to keep 'weight'"):
        prune_by_wanda(network, inputs, 0.5, keep=["weight"])
