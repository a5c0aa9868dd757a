"""Objectives over orbits: they agree with written networks, with differences, and with plain second computations."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from lightning_sym.networks import Polynomial, VisionTransformer
from lightning_sym.orbit import (
    cross_layer_equalization,
    gradient_norm,
    minimize_on_orbit,
    path_norm,
    prune_by_magnitude,
    prune_by_wanda,
    quantization_error,
    round_to_nearest,
    sharpness,
    smooth_quant,
    sparsity,
    weight_norm,
)
from lightning_sym.orbit.directions import OrbitDirections
from lightning_sym.orbit.rounding import largest_inputs, rounded
from lightning_sym.orbit.view import View
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.tracing.graph.capture import state_tensors


def mlp():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    return network, (torch.randn(12, 6).double(), torch.arange(12) % 4)


def cnn():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4)
    ).double()
    network[1].running_mean.normal_()
    network[1].running_var.uniform_(0.5, 2)
    return network.eval(), (torch.randn(8, 2, 6, 6).double(), torch.arange(8) % 4)


def vit():
    torch.manual_seed(0)
    options = {"in_channels": 1, "image_size": 8, "num_classes": 4, "patch_size": 4, "width": 8, "depth": 1, "heads": 2}
    network = VisionTransformer(**options, mlp_ratio=2, norm="rms", positions="rotary").double().eval()
    return network, (torch.randn(6, 1, 8, 8).double(), torch.arange(6) % 4)


CASES = {"mlp": mlp, "cnn": cnn, "vit": vit}


def seen(network, parameters=None):
    own = {name: tensor.detach().clone().requires_grad_() for name, tensor in network.named_parameters()}
    return View(network, own | (parameters or {}), dict(network.named_buffers()))


def number(tensor):
    return float(tensor.detach())


def relative_error(changed, network, inputs):
    with torch.no_grad():
        return float((changed(inputs) - network(inputs)).square().sum() / network(inputs).square().sum())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("activations", [None, 5])
@pytest.mark.few(6, "None-channel-cnn")
def test_error_of_rounding_is_that_of_the_written_network_anywhere_on_the_orbit(case, granularity, activations):
    network, (inputs, _) = CASES[case]()
    symmetry = trace_symmetry(network, inputs, check=False)
    member = symmetry.act(symmetry.sample(torch.Generator().manual_seed(1)), network)
    objective = quantization_error(3, granularity, activations)
    value = number(objective.begun(seen(network), [inputs])(seen(member), inputs))
    for data in (None, inputs):
        written = round_to_nearest(member, 3, granularity, activations=activations, data=data)
        assert abs(value - relative_error(written, network, inputs)) < 1e-9 * value
    assert value > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_error_of_pruning_is_that_of_the_written_network(case):
    network, (inputs, _) = CASES[case]()
    value = number(sparsity(0.6).begun(seen(network), [inputs])(seen(network), inputs))
    assert abs(value - relative_error(prune_by_magnitude(network, 0.6), network, inputs)) < 1e-12
    assert value > 1e-3


def test_many_bits_and_no_pruning_change_nothing():
    network, (inputs, _) = mlp()
    view = seen(network)
    assert number(quantization_error(16)(view, inputs)) < 1e-7
    assert number(quantization_error(16, activations=16)(view, inputs)) < 1e-7
    assert number(sparsity(0.0)(view, inputs)) == 0
    zero = torch.zeros(2, 3)
    assert torch.equal(rounded(zero, 3, 0), zero)


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_rounded_weights_are_few_multiples_of_a_step_and_vectors_stay(granularity):
    network, _ = cnn()
    for bits in (2, 4):
        result = round_to_nearest(network, bits, granularity)
        for (name, before), after in zip(network.named_parameters(), result.parameters(), strict=True):
            if before.ndim < 2:
                assert torch.equal(before, after), name
                continue
            for old, row in zip(before, after, strict=True) if granularity == "channel" else [(before, after)]:
                assert len(row.unique()) <= 2**bits - 1
                step = old.abs().max() / (2 ** (bits - 1) - 1)
                assert number((row - old).abs().max()) <= number(step) / 2 * (1 + 1e-12)
                assert number((row / step - (row / step).round()).abs().max()) < 1e-12


def test_clipped_activations_stay_within_the_ranges_of_the_data():
    network, (inputs, _) = mlp()
    result = round_to_nearest(network, 16, activations=16, data=inputs)
    assert relative_error(result, network, inputs) < 1e-7
    assert relative_error(result, network, 10 * inputs) > 1e-3
    parts = round_to_nearest(network, 16, activations=16, data=[inputs, 0.5 * inputs])
    with torch.no_grad():
        assert torch.equal(parts(10 * inputs), result(10 * inputs))
    dynamic = round_to_nearest(network, 16, activations=16)
    assert relative_error(dynamic, network, 10 * inputs) < 1e-7


class Repeated(nn.Module):
    """Calls a layer once for each row."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        for _ in x:
            x = self.layer(x)
        return x


def test_ranges_are_refused_where_batches_differ_in_calls():
    one, two = torch.ones(1, 3), torch.ones(2, 3)
    written = round_to_nearest(Repeated(), 4, activations=4, data=two)
    written(one)
    with pytest.raises(ValueError, match="more linear maps than the 2 of the data"):
        written(torch.ones(3, 3))
    with pytest.raises(ValueError, match="other linear maps on each batch"):
        round_to_nearest(Repeated(), 4, activations=4, data=[one, two])


class Conv1D(nn.Module):
    """The layer of GPT-2: its weight is transposed."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def test_channels_are_outputs_where_weights_are_transposed():
    torch.manual_seed(0)
    for layer in (Conv1D(6, 4), nn.ConvTranspose2d(6, 4, 3)):
        weight = round_to_nearest(layer, 3, "channel").weight.movedim(1, 0).flatten(1)
        largest = layer.weight.movedim(1, 0).flatten(1).abs().amax(1)
        assert torch.allclose(weight.abs().amax(1), largest)
        assert all(len(row.unique()) <= 7 for row in weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


@pytest.mark.parametrize(("layer", "shape"), [(Conv1D(6, 4), (5, 6)), (Attention(), (2, 5, 8))], ids=["addmm", "mha"])
def test_activations_of_other_layers_are_rounded(layer, shape):
    torch.manual_seed(0)
    layer, inputs = layer.double().eval(), torch.randn(*shape).double()
    largest = inputs.abs().max()
    by_hand = round_to_nearest(layer, 12)((inputs / largest * 3).round() / 3 * largest)
    written = round_to_nearest(layer, 12, activations=3)
    assert torch.allclose(written(inputs), by_hand)
    with torch.no_grad():
        assert torch.allclose(written(inputs), by_hand)
    assert torch.allclose(
        quantization_error(12, activations=3)(seen(layer), inputs),
        torch.tensor(relative_error(written, layer, inputs)).double(),
    )


def test_hooks_end_after_an_error_and_travel_with_copies():
    network, (inputs, _) = mlp()
    written = copy.deepcopy(round_to_nearest(network, 4, activations=3, data=inputs))
    before = written(inputs)
    with pytest.raises(RuntimeError):
        written(inputs[:, :3])
    assert torch.equal(network(inputs), network(inputs))
    assert torch.equal(written(inputs), before)
    assert not torch.equal(round_to_nearest(network, 4)(inputs), before)


def test_equal_weights_are_pruned_to_the_number_that_was_asked_for():
    layer = nn.Linear(5, 4, bias=False)
    layer.weight.data = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0]).repeat(4, 1)
    for fraction, count in ((0.1, 2), (0.5, 10), (0.9, 18)):
        assert int((prune_by_magnitude(layer, fraction).weight == 0).sum()) == max(count, 4)


def test_pruning_of_all_tensors_together_takes_the_smallest_weights():
    network, _ = mlp()
    pruned = prune_by_magnitude(network, 0.5, scope="global")
    before = torch.cat([own.detach().abs().reshape(-1) for own in network.parameters() if own.ndim > 1])
    after = torch.cat([own.detach().abs().reshape(-1) for own in pruned.parameters() if own.ndim > 1])
    assert int((after == 0).sum()) == len(before) // 2
    assert float(before[after == 0].max()) <= float(before[after != 0].min())


class NativeLayerNorm(nn.Module):
    """A layer norm by torch's own operation."""

    def forward(self, x):
        return torch.native_layer_norm(x, [6], None, None, 1e-5)[0]


NORMS = {
    "layer": lambda: nn.LayerNorm([2, 6]),
    "native": NativeLayerNorm,
    "weight": lambda: nn.utils.weight_norm(nn.Linear(6, 6)),
    "instance": lambda: nn.InstanceNorm1d(2, affine=True),
    "tracked": lambda: nn.InstanceNorm1d(2, track_running_stats=True),
    "group": lambda: nn.GroupNorm(1, 2),
    "rms": lambda: nn.RMSNorm(6),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "objective",
    [gradient_norm("cross_entropy"), sharpness(), sharpness(probes=2), sharpness(kind="top")],
    ids=["gradient", "trace", "probes", "top"],
)
@pytest.mark.few(4)
def test_derivatives_through_norms_agree_with_differences(norm, objective):
    # torch's derivatives of its fused layer and instance norms are wrong by up to 60 percent under some transforms.
    torch.manual_seed(0)
    reader = nn.Linear(12, 3)
    network = nn.Sequential(nn.Linear(5, 12), nn.Unflatten(1, (2, 6)), NORMS[norm](), nn.Tanh(), nn.Flatten(), reader)
    network = network.double().eval()
    batch = (torch.randn(7, 5).double(), torch.arange(7) % 3)
    before = network(batch[0])
    own = {name: (tensor + 0.1 * torch.randn_like(tensor)).detach() for name, tensor in network.named_parameters()}
    along = {name: torch.randn_like(tensor) for name, tensor in own.items()}

    def value(step):
        moved = {name: (tensor + step * along[name]).requires_grad_() for name, tensor in own.items()}
        return objective(seen(network, moved), batch), moved

    here, leaves = value(0.0)
    slopes = torch.autograd.grad(here, list(leaves.values()), materialize_grads=True)
    slope = sum(float((a * b).sum()) for a, b in zip(slopes, along.values(), strict=True))
    sides = [number(value(step)[0]) for step in (1e-5, -1e-5)]
    assert slope == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-6)
    assert torch.equal(network(batch[0]), before)  # torch's own norms are back


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "objective",
    [
        weight_norm(),
        weight_norm(3),
        gradient_norm("cross_entropy"),
        sharpness("cross_entropy"),
        sharpness("cross_entropy", probes=3),
        sharpness("cross_entropy", "top"),
    ],
    ids=["norm", "cubes", "gradient", "trace", "probes", "top"],
)
@pytest.mark.few(6)
def test_derivative_by_the_group_agrees_with_differences(case, objective):
    network, batch = CASES[case]()
    symmetry = trace_symmetry(network, batch[0], check=False)
    directions = OrbitDirections(symmetry)
    state, generator = state_tensors(network), torch.Generator().manual_seed(2)
    names = dict(network.named_parameters())

    def view_at(coordinates):
        moved = symmetry.act_on(directions.element(coordinates), state)
        leaves = {name: own.detach().clone().requires_grad_() for name, own in moved.items() if own.is_floating_point()}
        own = {**moved, **leaves}
        return View(network, {n: own[n] for n in names}, {n: own[n] for n in own if n not in names}), leaves

    # One step along all coordinates together: each kind of them alone is a matter of test_orbit_descent.py.
    along = {}
    for name, shape in directions.shapes.items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        along[name] = drawn - drawn.mT if name.startswith("rotation") else drawn
    sides = []
    for step in (1e-5, -1e-5):
        here, _ = view_at({name: step * own for name, own in along.items()})
        sides.append(number(objective(here, batch)))
    view, leaves = view_at(directions.zeros())
    value = objective(view, batch)
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    slopes = {each: own for each, own in zip(leaves, found, strict=True) if own is not None}
    pulled = directions.pulled_back(symmetry.tensors(network), slopes)
    expected = sum(float((pulled[name] * own).sum()) for name, own in along.items())
    size, difference = max(1, abs(number(value))), (sides[0] - sides[1]) / 2e-5
    assert abs(difference) > 0.01 * size
    assert abs(expected - difference) < 1e-6 * size


@pytest.mark.parametrize("case", CASES)
def test_hand_made_elements_keep_the_function(case):
    network, (inputs, _) = CASES[case]()
    symmetry = trace_symmetry(network, inputs, check=False)
    for element in (cross_layer_equalization(symmetry, network), smooth_quant(symmetry, network, inputs)):
        moved = symmetry.act(element, network)
        assert relative_error(moved, network, inputs) < 1e-24
        assert not torch.equal(moved(inputs), network(inputs))


BETWEEN = pytest.mark.parametrize(
    "between", [nn.ReLU(), nn.Identity(), Polynomial(2)], ids=["scales", "matrices", "squares"]
)


@BETWEEN
def test_equalised_layers_have_equal_ranges_for_each_unit(between):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 9), between, nn.Linear(9, 7), between, nn.Linear(7, 3)).double()
    symmetry = trace_symmetry(network, torch.randn(3, 6).double(), check=False)
    equal = symmetry.act(cross_layer_equalization(symmetry, network), network)
    for first, second in ((0, 2), (2, 4)):
        incoming, outgoing = equal[first].weight.abs().amax(1), equal[second].weight.abs().amax(0)
        assert torch.allclose(incoming, outgoing, rtol=1e-10)


@pytest.mark.parametrize("activation", [nn.ReLU(), Polynomial(2)], ids=["relu", "squares"])
def test_smooth_quant_splits_the_range_of_activations_as_by_hand(activation):
    network, (inputs, _) = mlp()
    network[1] = activation
    symmetry = trace_symmetry(network, inputs, check=False)
    moved = symmetry.act(smooth_quant(symmetry, network, inputs, alpha=0.3), network)
    hidden = network[:2](inputs)
    scale = hidden.amax(0) ** 0.3 / network[2].weight.abs().amax(0) ** 0.7
    scale = torch.where(hidden.amax(0) > 0, scale, 1.0)
    assert torch.allclose(moved[:2](inputs), hidden / scale, rtol=1e-10)


def test_smooth_quant_moves_ranges_into_the_readers_of_a_norm():
    network, (inputs, _) = vit()
    symmetry = trace_symmetry(network, inputs, check=False)
    moved = symmetry.act(smooth_quant(symmetry, network, inputs, alpha=1.0), network)
    seen_by = {}
    moved.blocks[0].mlp.register_forward_pre_hook(lambda module, given: seen_by.update(x=given[0]))
    moved(inputs)
    largest = seen_by["x"].abs().flatten(0, -2).amax(0)
    assert torch.allclose(largest, torch.ones_like(largest))


def test_wanda_as_by_hand_on_a_small_layer():
    layer = nn.Linear(4, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, -3.0, 2.0, 1.0]])
    inputs = torch.tensor([[3.0, 1.0, 1.0, 0.1], [4.0, 0.0, 1.0, 0.0]])  # norms 5, 1, 1.41, 0.1
    pruned = prune_by_wanda(layer, inputs, 0.5)
    assert pruned.weight.tolist() == [[1.0, 0.0, 3.0, 0.0], [4.0, -3.0, 0.0, 0.0]]


def test_wanda_takes_the_norms_at_each_entry_of_grouped_kernels():
    torch.manual_seed(0)
    layer, inputs = nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1), torch.randn(2, 4, 5, 5)
    norms = functional.unfold(inputs.square(), 3, stride=2, padding=1).sum((0, 2)).sqrt().view(4, 3, 3)
    pruned = prune_by_wanda(layer, inputs, 0.5)
    for row in range(6):
        scores = layer.weight[row].detach().abs() * norms[slice(0, 2) if row < 3 else slice(2, 4)]
        zero = pruned.weight[row] == 0
        assert int(zero.sum()) == 9
        assert float(scores[zero].max()) < float(scores[~zero].min())


@pytest.mark.parametrize("layer", [Conv1D(6, 4), nn.ConvTranspose2d(6, 4, 2)], ids=["addmm", "transposed"])
def test_wanda_prunes_rows_of_outputs_where_weights_are_transposed(layer):
    inputs = torch.randn(3, 6) if isinstance(layer, Conv1D) else torch.randn(3, 6, 4, 4)
    norms = (inputs if inputs.ndim == 2 else inputs.movedim(1, -1).flatten(0, 2)).square().sum(0).sqrt()
    rows = prune_by_wanda(layer, inputs, 0.5).weight.movedim(1, 0)
    scores = layer.weight.detach().movedim(1, 0).abs() * norms.view(-1, *(1 for _ in rows.shape[2:]))
    for row, score in zip(rows, scores, strict=True):
        assert int((row == 0).sum()) == row.numel() // 2
        assert float(score[row == 0].max()) < float(score[row != 0].min())


def test_path_norm_is_the_sum_over_paths():
    network, batch = mlp()
    first, second, third = (network[place] for place in (0, 2, 4))
    for power in (1, 2):
        paths = first.weight.abs().pow(power).sum(1) + first.bias.abs().pow(power)
        for layer in (second, third):
            paths = layer.weight.abs().pow(power) @ paths + layer.bias.abs().pow(power)
        objective = path_norm(power).begun(seen(network), [batch])
        assert torch.allclose(objective(seen(network), batch), paths.sum(), rtol=1e-12)
    symmetry = trace_symmetry(network, batch[0], check=False)
    member = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0)), network)
    assert torch.allclose(objective(seen(member), batch), paths.sum(), rtol=1e-10)


def test_gradient_norm_and_curvature_agree_with_dense_derivatives():
    network, (inputs, targets) = mlp()
    own = {name: tensor.detach() for name, tensor in network.named_parameters()}
    sizes = [tensor.numel() for tensor in own.values()]

    def outputs(flat):
        parts = flat.split(sizes)
        placed = {name: part.view(own[name].shape) for name, part in zip(own, parts, strict=True)}
        return functional_call(network, placed, (inputs,))

    flat = torch.cat([tensor.reshape(-1) for tensor in own.values()])
    jacobian = torch.autograd.functional.jacobian(outputs, flat)
    gradient = torch.func.grad(lambda own: functional.cross_entropy(outputs(own), targets))(flat)
    shares = outputs(flat).softmax(1)
    inner = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]
    matrix = torch.einsum("nkp,nkl,nlq->pq", jacobian, inner, jacobian) / len(inputs)
    hessian = torch.func.hessian(lambda own: functional.cross_entropy(outputs(own), targets))(flat)
    view, batch = seen(network), (inputs, targets)
    for power in (1, 2, 4):
        expected = gradient.abs().pow(power).sum()
        assert torch.allclose(gradient_norm(p=power)(view, batch), expected, rtol=1e-10)
    values = torch.randn(12, 4).double()
    slopes = torch.func.grad(lambda own: (outputs(own) - values).square().mean())(flat)
    assert torch.allclose(gradient_norm("mse")(view, (inputs, values)), slopes.square().sum(), rtol=1e-10)
    squares = 2 * jacobian.square().sum() / values.numel()
    assert torch.allclose(sharpness("mse")(view, (inputs, values)), squares, rtol=1e-10)
    top = torch.linalg.svdvals(jacobian.flatten(0, -2))[0].square() * 2 / values.numel()
    assert torch.allclose(sharpness("mse", "top")(view, (inputs, values)), top, rtol=1e-8)
    counts = targets.index_fill(0, torch.tensor([1, 4]), -100)  # of labels that the loss ignores, one has no curvature
    rows = (counts >= 0).to(inner)[:, None, None] * inner * len(inputs) / int((counts >= 0).sum())
    ignoring = torch.einsum("nkp,nkl,nlp->", jacobian, rows, jacobian) / len(inputs)
    assert torch.allclose(sharpness()(view, (inputs, counts)), ignoring, rtol=1e-10)
    assert torch.allclose(sharpness()(view, batch), matrix.trace(), rtol=1e-10)
    assert torch.allclose(matrix.trace(), hessian.trace(), rtol=1e-10)  # piecewise linear in each weight
    assert torch.allclose(sharpness(kind="top")(view, batch), torch.linalg.eigvalsh(matrix)[-1], rtol=1e-8)
    estimate = number(sharpness(probes=400)(view, batch))
    assert abs(estimate / float(matrix.trace()) - 1) < 0.1


@pytest.mark.parametrize("case", ["mlp", "vit"])
def test_descents_lower_the_error_of_written_networks(case):
    network, (inputs, _) = CASES[case]()
    symmetry = trace_symmetry(network, inputs, check=False)
    network = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0)), network)
    cases = [
        (quantization_error(3), lambda one: round_to_nearest(one, 3)),
        (quantization_error(3, "channel", 6), lambda one: round_to_nearest(one, 3, "channel", activations=6)),
    ]
    if case == "vit":  # with the mask held, the error has no derivative by scales
        cases.append((sparsity(0.6), lambda one: prune_by_magnitude(one, 0.6)))
    for objective, change in cases:
        found = minimize_on_orbit(symmetry, network, objective, data=inputs, max_steps=60, lr=0.03)
        assert found.change < 1e-11  # from a member whose scales differ by a factor of 10
        assert found.after < 0.8 * found.before
        for value, one in ((found.before, network), (found.after, found.network)):
            assert abs(value - relative_error(change(one), network, inputs)) < 1e-9 * value


def test_ranges_and_relative_sums_as_by_hand():
    layer = nn.Linear(2, 2).double()
    layer.weight.data = torch.tensor([[3.0, -1.0], [0.5, 1.5]]).double()
    view, mean = seen(layer), 12.5 / 4  # of squares
    assert number(quantization_error(3, kind="range")(view)) == pytest.approx((3 / 3) ** 2 / 12 / mean)
    both = ((3 / 3) ** 2 + (1.5 / 3) ** 2) / 2
    assert number(quantization_error(3, "channel", kind="range")(view)) == pytest.approx(both / 12 / mean)
    assert number(sparsity(kind="l1")(view)) == pytest.approx(1.5 / mean**0.5)


@pytest.mark.parametrize("sizes", [(), (3,), (3, 4), (3, 4, 5)], ids=["linear", "1d", "2d", "3d"])
def test_largest_inputs_are_those_of_each_feature(sizes):
    torch.manual_seed(0)
    count = len(sizes)
    kinds = (f"Conv{count}d", f"ConvTranspose{count}d") if sizes else ("Linear",)
    for layer in (getattr(nn, kind)(4, 2, *[2][:count]) for kind in kinds):
        one, two = torch.randn(6, 4, *sizes), torch.randn(2, 4, *sizes)
        found = largest_inputs(layer, [one, two])
        every = torch.cat([one, two]).abs().movedim(1, -1).flatten(0, -2)
        assert torch.equal(found["weight"], every.amax(0))


def test_objectives_of_weights_alone_move_no_scales_unless_asked():
    network, (inputs, _) = mlp()
    symmetry = trace_symmetry(network, inputs, check=False)
    for objective in (quantization_error(4, kind="range"), sparsity(kind="l1")):
        assert "scales" not in objective.factors
        found = minimize_on_orbit(symmetry, network, objective, factors="scales", max_steps=40)
        assert found.after < found.before
    network, (inputs, _) = vit()
    symmetry = trace_symmetry(network, inputs, check=False)
    found = minimize_on_orbit(symmetry, network, quantization_error(4, kind="range"), max_steps=20)
    assert not bool(found.element.log_scale.any())
    assert found.after < found.before


@pytest.mark.parametrize("objective", [weight_norm(), gradient_norm(), sharpness()], ids=["norm", "gradient", "trace"])
def test_descents_start_at_closed_forms_and_agree_with_those_without(objective):
    network, batch = mlp()
    symmetry = trace_symmetry(network, batch[0], check=False)
    found = minimize_on_orbit(symmetry, network, objective, data=batch)
    assert any("closed form" in note for note in found.notes)
    assert len(found.history) <= 3
    descent = minimize_on_orbit(symmetry, network, lambda view, given: objective(view, given), data=batch)
    assert abs(found.after - descent.after) < 1e-9 * descent.after
    assert found.after < found.before


def test_classes_are_the_last_axis_of_outputs_of_sequences():
    torch.manual_seed(0)
    network, inputs, targets = nn.Linear(4, 5).double(), torch.randn(3, 7, 4).double(), torch.randint(0, 5, (3, 7))
    flat = gradient_norm()(seen(network), (inputs.flatten(0, 1), targets.flatten()))
    assert torch.allclose(gradient_norm()(seen(network), (inputs, targets)), flat, rtol=1e-12)


def test_matrices_of_zeros_have_no_error_of_rounding():
    network, _ = mlp()
    with torch.no_grad():
        network[0].weight.zero_()
    rest = [own for own in network.parameters() if own.ndim > 1 and own.any()]
    expected = torch.stack([own.abs().mean() / own.square().mean().sqrt() for own in rest]).mean()
    assert torch.allclose(sparsity(kind="l1")(seen(network)), expected, rtol=1e-12)
    steps = torch.stack([(own.abs().max() / 7).square() / 12 / own.square().mean() for own in rest]).mean()
    assert torch.allclose(quantization_error(kind="range")(seen(network)), steps, rtol=1e-12)
