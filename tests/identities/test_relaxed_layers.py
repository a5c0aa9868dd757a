"""Relaxed layers against slow, obvious second implementations, and the symmetries they promise, in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sym.layers import (
    CircularConv,
    FactoredFullyConnected,
    FullyConnected,
    GroupConv,
    PolyphasePool,
    ResidualPathways,
    SparseConv,
    SparseFactoredFullyConnected,
)
from lightning_sym.networks import RelaxedNetwork

EXACT = {"rtol": 1e-10, "atol": 1e-10}
GRIDS = [(4, 4), (3, 5), (6, 2), (1, 1)]
KINDS = ["full", "pointwise", "separable", "depthwise_separable"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def randomised(module):
    """Give every parameter, biases too, a random value; in float64."""
    module = module.double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "omega" not in name and "positions" not in name:
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) / math.sqrt(parameter[0].numel()))
    return module


def features(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# ---- Second implementations


def convolve(x, weight):
    """Sum over the taps of a filter of rolled inputs."""
    k = weight.shape[-1]
    y = x.new_zeros(len(x), len(weight), *x.shape[2:])
    for a in range(k):
        for b in range(k):
            moved = torch.roll(x, (k // 2 - a, k // 2 - b), (2, 3))
            y += torch.einsum("ncij,oc->noij", moved, weight[:, :, a, b])
    return y


def dense_factored(layer, theta1, theta2, b2):
    """Return weight and bias of the dense layer that a factored one is."""
    weight = torch.einsum("ocy,ocx->oycx", theta2, theta1)
    bias = torch.einsum("ocy,o->oy", theta2, layer.b1) + b2
    return weight, bias


def apply_dense(x, weight, bias, out_grid):
    y = torch.einsum("oycx,ncx->noy", weight, x.flatten(2)) + bias
    return y.unflatten(2, out_grid)


def block_diagonal_factored(layer, x):
    """The formulation with one-hot inputs of the published code (docs/theory/relaxed_layers.md, 1.3)."""
    n, c, o = len(x), layer.in_channels, layer.out_channels
    one_hot = torch.zeros(n, c, c, x[0, 0].numel(), dtype=x.dtype)
    for channel in range(c):
        one_hot[:, channel, channel] = x.flatten(2)[:, channel]
    z = one_hot.flatten(2) @ layer.theta1.flatten(1).T + layer.b1  # [N, C, C']
    inner = torch.zeros(n, o, o, c, dtype=x.dtype)
    for channel in range(o):
        inner[:, channel, channel] = z[:, :, channel]
    y = inner.flatten(2) @ layer.theta2.flatten(0, 1) + layer.b2
    return y.unflatten(2, layer.out_grid)


def gaussian_process(positions, grid, omega=1.0):
    """The interpolation of 1.4 entry by entry, in numpy."""
    z = np.asarray(positions.detach(), dtype=np.float64)
    centre = [(side - 1) / 2 for side in grid]
    points = [(i - centre[0], j - centre[1]) for i in range(grid[0]) for j in range(grid[1])]

    def kern(a, b):
        return (1 + 1e-6) * math.exp(-0.5 * omega**2 * ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2))

    system = np.array([[kern(a, b) for b in z] for a in z]) + 0.01**2 * np.eye(len(z))
    return torch.from_numpy(np.linalg.solve(system, np.array([[kern(a, b) for b in points] for a in z])))


def turn(filters, quarter_turns):
    """Rotate counter-clockwise about the centre, tap by tap."""
    for _ in range(quarter_turns):
        k = filters.shape[-1]
        turned = torch.empty_like(filters)
        for i in range(k):
            for j in range(k):
                turned[..., k - 1 - j, i] = filters[..., i, j]
        filters = turned
    return filters


def group_convolution(layer, x):
    """The formulas of 1.6, rotation by rotation; x is [N, 4, C, H, W], or [N, C, H, W] to lift."""
    bias = layer.bias[:, None, None]
    outputs = []
    if layer.kind in ("separable", "depthwise_separable"):
        spatial = torch.stack(
            [
                torch.cat(
                    [
                        convolve(x[:, h, c, None], turn(layer.spatial_weight[c], h)[None, None])
                        for c in range(layer.in_channels)
                    ],
                    1,
                )
                + layer.spatial_bias[:, None, None]
                for h in range(4)
            ],
            1,
        )
    for g in range(4):
        if layer.kind == "lifting":
            y = convolve(x, turn(layer.weight, g))
        elif layer.kind == "pointwise":
            y = convolve(x[:, g], turn(layer.weight, g))
        elif layer.kind == "full":
            weight = layer.weight.unflatten(1, (4, layer.in_channels))
            y = sum(convolve(x[:, h], turn(weight[:, (h - g) % 4], g)) for h in range(4))
        elif layer.kind == "separable":
            y = sum(torch.einsum("ncij,oc->noij", spatial[:, h], layer.weight[:, :, (h - g) % 4]) for h in range(4))
        else:
            r = layer.rotation_bias[:, None, None] + sum(
                layer.rotation_weight[:, (h - g) % 4][:, None, None] * spatial[:, h] for h in range(4)
            )
            y = torch.einsum("ncij,oc->noij", r, layer.weight)
        outputs.append(y + bias)
    return torch.stack(outputs, 1)


def pool_by_loops(x, norm):
    results = []
    for sample in x:
        best, kept = -1.0, None
        for a, b in ((0, 0), (1, 0), (0, 1), (1, 1)):
            component = sample[:, a::2, b::2]
            score = component.abs().max() if norm == "max" else component.pow(2).sum().sqrt()
            if score > best:
                best, kept = score, component
        results.append(kept)
    return torch.stack(results)


@pytest.mark.parametrize("grid", GRIDS)
def test_fully_connected_is_its_formula(grid):
    layer = randomised(FullyConnected(3, 4, grid, (2, 3)))
    x = features(5, 3, *grid)
    expected = torch.zeros(5, 4, 6, dtype=torch.float64)
    for o in range(4):
        for y in range(6):
            expected[:, o, y] = layer.bias[o, y] + (layer.weight[o, y] * x.flatten(2)).sum((1, 2))
    torch.testing.assert_close(layer(x), expected.unflatten(2, (2, 3)), **EXACT)


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("grid", GRIDS)
def test_circular_conv_is_a_sum_of_shifts(grid, kernel_size):
    layer = randomised(CircularConv(3, 4, kernel_size))
    x = features(5, 3, *grid)
    expected = convolve(x, layer.weight) + layer.bias[:, None, None]
    torch.testing.assert_close(layer(x), expected, **EXACT)


def test_fully_connected_contains_the_convolution():
    conv = randomised(CircularConv(2, 3))
    dense = FullyConnected(2, 3, (3, 4)).double()
    x = features(1, 2, 3, 4)
    with torch.no_grad():
        jacobian = torch.func.jacrev(conv)(x)
        dense.weight.copy_(jacobian.reshape(3, 12, 2, 12))
        dense.bias.copy_(conv.bias[:, None].expand(3, 12))
    y = features(4, 2, 3, 4)
    torch.testing.assert_close(dense(y), conv(y), **EXACT)


@pytest.mark.parametrize("out_grid", [(2, 2), (3, 1)])
@pytest.mark.parametrize("grid", GRIDS)
def test_factored_layer_is_block_diagonal_maps_and_a_dense_map_of_rank_one(grid, out_grid):
    layer = randomised(FactoredFullyConnected(3, 4, grid, out_grid))
    x = features(5, 3, *grid)
    torch.testing.assert_close(layer(x), block_diagonal_factored(layer, x), **EXACT)
    weight, bias = dense_factored(layer, layer.theta1, layer.theta2, layer.b2)
    torch.testing.assert_close(layer(x), apply_dense(x, weight, bias, out_grid), **EXACT)


@pytest.mark.parametrize("omega", [None, 1.3])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_sparse_conv_interpolates_its_filters(kernel_size, omega):
    layer = randomised(SparseConv(3, 4, kernel_size, learn_lengthscale=omega is not None))
    if omega is not None:
        nn.init.constant_(layer.omega, omega)
    phi = gaussian_process(layer.positions, (kernel_size, kernel_size), omega or 1.0)
    # The buffer was made in float32.
    torch.testing.assert_close(
        layer.interpolation(), phi, rtol=0, atol=1e-10 if omega else 1e-6 * float(phi.abs().max())
    )
    filters = torch.einsum("ocm,mt->oct", layer.u, layer.interpolation()).view(4, 3, kernel_size, kernel_size)
    x = features(5, 3, 4, 6)
    torch.testing.assert_close(layer.filters(), filters, **EXACT)
    torch.testing.assert_close(layer(x), convolve(x, filters) + layer.bias[:, None, None], **EXACT)


@pytest.mark.parametrize("batch", [1, 3, 9], ids=["project_both", "project_one", "form_both"])
@pytest.mark.parametrize("grid", GRIDS)
def test_sparse_factored_layer_is_the_dense_map_of_its_interpolated_factors(grid, batch):
    layer = randomised(SparseFactoredFullyConnected(2, 5, grid, (2, 3), learn_positions=True))
    theta1 = torch.einsum("ocm,mx->ocx", layer.u1, gaussian_process(layer.positions1, grid))
    theta2 = torch.einsum("mo,my->oy", layer.u2, gaussian_process(layer.positions2, (2, 3))).unflatten(0, (5, 2))
    weight, bias = dense_factored(layer, theta1, theta2, 0.0)
    x = features(batch, 2, *grid)
    torch.testing.assert_close(layer(x), apply_dense(x, weight, bias, (2, 3)), rtol=1e-9, atol=1e-9)
    for factor, expected in zip(layer.factors(), (theta1, theta2), strict=True):
        torch.testing.assert_close(factor, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("kind", ["lifting", *KINDS])
def test_group_conv_is_its_formula_with_explicitly_rotated_filters(kind, kernel_size):
    layer = randomised(GroupConv(3, 2, kind, kernel_size))
    x = features(4, 3, 4, 6) if kind == "lifting" else features(4, 4, 3, 4, 6)
    flat = x if kind == "lifting" else x.flatten(1, 2)
    torch.testing.assert_close(layer(flat), group_convolution(layer, x).flatten(1, 2), **EXACT)


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_pool_keeps_the_component_with_the_largest_norm(norm):
    x = features(64, 3, 4, 6)
    y = PolyphasePool(norm)(x)
    assert torch.equal(y, pool_by_loops(x, norm))  # sample by sample
    assert y.is_contiguous()
    firsts = (y == x[..., ::2, ::2]).flatten(1).all(1)
    assert 0 < firsts.sum() < 64  # the choice differs between samples


def test_pool_takes_the_first_of_equal_components():
    x = torch.zeros(3, 1, 4, 4)
    x[0, 0, 1, 0], x[0, 0, 2, 1] = 2.0, -2.0  # components (1, 0) and (0, 1)
    x[1, 0, 3, 3], x[1, 0, 0, 1] = 2.0, 2.0  # (1, 1) and (0, 1)
    y = PolyphasePool()(x)
    assert torch.equal(y[0], x[0, :, 1::2, ::2])
    assert torch.equal(y[1], x[1, :, ::2, 1::2])


@pytest.mark.parametrize(
    "layer",
    [
        FullyConnected(2, 3, (2, 3), (1, 2)),
        FactoredFullyConnected(2, 3, (2, 3), (1, 2)),
        SparseFactoredFullyConnected(2, 3, (2, 3), (1, 2), learn_positions=True, learn_lengthscale=True),
        CircularConv(2, 3),
        SparseConv(2, 3, learn_positions=True, learn_lengthscale=True),
        *(GroupConv(2, 3, kind) for kind in KINDS),
    ],
    ids=lambda layer: getattr(layer, "kind", type(layer).__name__),
)
@pytest.mark.few(6)
def test_gradients_of_all_parameters_are_those_of_finite_differences(layer):
    layer = randomised(layer)
    x = features(2, 8 if isinstance(layer, GroupConv) else 2, 2, 3).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *layer.parameters()), atol=1e-6)


# ---- Equivariance (docs/theory/relaxed_layers.md, 1.2, 1.6 and 2)


def shifted(x, shift):
    return torch.roll(x, shift, (2, 3))


def rotated_features(x):
    """Rotate features [N, 4 C, H, W] on the group by 90 degrees."""
    return torch.rot90(x.unflatten(1, (4, -1)), 1, (-2, -1)).roll(1, 1).flatten(1, 2)


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_pool_commutes_with_rotations_up_to_a_shift(norm):
    pool = PolyphasePool(norm)
    x = features(8, 12, 4, 6)
    found, expected = pool(rotated_features(x)), rotated_features(pool(x))
    for one, other in zip(found, expected, strict=True):
        moved = [torch.roll(other, (a, b), (1, 2)) for a in (0, 1) for b in (0, 1)]
        assert any(torch.equal(one, candidate) for candidate in moved)


def network(paths, grid=8, **arguments):
    return randomised(RelaxedNetwork(paths, 2, grid, in_channels=2, num_classes=3, **arguments))


P4 = ["gconv", "gconv_full", "gconv_separable", "gconv_depthwise_separable"]


@pytest.mark.parametrize("grid", [8, (8, 16)], ids=str)
@pytest.mark.parametrize("paths", [["conv"], ["sconv"], ["conv", "sconv"], ["conv", "gconv"], *([kind] for kind in P4)])
def test_convolutional_networks_are_invariant_to_shifts(paths, grid):
    net = network(paths, grid)
    x = features(4, 2, *((8, 8) if grid == 8 else grid))
    logits = net(x)
    assert logits.std(0).max() > 1e-3
    for shift in [(1, 0), (0, 1), (3, 5)]:
        torch.testing.assert_close(net(shifted(x, shift)), logits, **EXACT)
    # Sample by sample, each by its own shift.
    each = torch.stack([torch.roll(one, (k, 2 * k + 1), (1, 2)) for k, one in enumerate(x)])
    torch.testing.assert_close(net(each), logits, **EXACT)


def test_two_pools_in_one_block_would_not_be_invariant():
    """Why one pool follows the sum of convolutional paths: kept components may be one pixel apart."""
    paths = [randomised(CircularConv(2, 3)) for _ in range(2)]
    apart = ResidualPathways(*(nn.Sequential(path, PolyphasePool()) for path in paths))
    together = nn.Sequential(ResidualPathways(*paths), PolyphasePool())
    x = features(32, 2, 4, 4)

    def total(block, x):
        return block(x).square().sum((1, 2, 3))

    torch.testing.assert_close(total(together, shifted(x, (1, 1))), total(together, x), **EXACT)
    assert (total(apart, shifted(x, (1, 1))) - total(apart, x)).abs().max() > 0.1


@pytest.mark.parametrize("paths", [[kind] for kind in P4] + [P4], ids="-".join)
def test_group_networks_are_invariant_to_rotations_and_shifts(paths):
    net = network(paths)
    x = features(4, 2, 8, 8)
    for turns in range(1, 4):
        turned = shifted(torch.rot90(x, turns, (-2, -1)), (turns, 3))
        torch.testing.assert_close(net(turned), net(x), **EXACT)


# ---- The limits in which a free path leaves equivariance alone, 1.9 and 3


def violation(block, x):
    return float((block(shifted(x, (1, 2))) - shifted(block(x), (1, 2))).detach().abs().max())


def zero(*tensors):
    for tensor in tensors:
        nn.init.zeros_(tensor)


@pytest.mark.parametrize(
    ("kind", "some", "last"),
    [
        (FullyConnected, ["weight"], "bias"),
        (FactoredFullyConnected, ["theta1", "b2"], "b1"),  # which passes through theta2
        (FactoredFullyConnected, ["theta2"], "b2"),
    ],
)
def test_a_free_path_is_equivariant_only_without_all_that_varies_over_space(kind, some, last):
    free = randomised(kind(2, 3, (4, 6)))
    block, x = ResidualPathways({"fc": free, "conv": randomised(CircularConv(2, 3))}), features(3, 2, 4, 6)
    assert violation(block, x) > 0.1
    zero(*(getattr(free, name) for name in some))
    assert violation(block, x) > 0.1
    zero(getattr(free, last))
    assert violation(block, x) < 1e-10


@pytest.mark.parametrize("learn_positions", [False, True])
def test_without_length_scale_sparse_weights_are_constant_over_space(learn_positions):
    free = randomised(
        SparseFactoredFullyConnected(2, 3, (4, 6), (2, 3), learn_positions=learn_positions, learn_lengthscale=True)
    )
    x = features(3, 2, 4, 6)
    assert free(x).std((2, 3)).min() > 1e-3
    zero(free.omega1, free.omega2)
    variance = 1 + 1e-6
    phi1, phi2 = free.interpolations()
    torch.testing.assert_close(phi1, torch.full_like(phi1, variance / (12 * variance + 1e-4)), rtol=1e-9, atol=0)
    torch.testing.assert_close(phi2, torch.full_like(phi2, variance / (3 * variance + 1e-4)), rtol=1e-9, atol=0)
    torch.testing.assert_close(free(x), free(x)[..., :1, :1].expand_as(free(x)), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(free(shifted(x, (1, 2))), free(x), rtol=1e-8, atol=1e-9)
    conv = randomised(SparseConv(2, 3, learn_lengthscale=True))
    zero(conv.omega)
    filters = conv.filters()
    torch.testing.assert_close(filters, filters[..., :1, :1].expand_as(filters), rtol=1e-8, atol=1e-10)


# ---- Scales, 1.7, and initial values


def test_the_scale_of_the_sum_can_be_moved_into_a_tensor_of_each_path():
    layers = {
        "fc": (FullyConnected(2, 3, 4), ["weight", "bias"]),
        "ffc": (FactoredFullyConnected(2, 3, 4), ["theta2", "b2"]),
        "sconv": (SparseConv(2, 3), ["u", "bias"]),
        "conv": (CircularConv(2, 3), ["weight", "bias"]),
    }
    block = randomised(ResidualPathways({name: layer for name, (layer, _) in layers.items()}, scale=0.3))
    x = features(3, 2, 4, 4)
    before = block(x)
    block.scale = 1.0
    with torch.no_grad():
        for layer, tensors in layers.values():
            for tensor in tensors:
                getattr(layer, tensor).mul_(0.3)
    torch.testing.assert_close(block(x), before, **EXACT)


def bounds(tensor, bound):
    """Whether a tensor is spread uniformly over (-bound, bound)."""
    values = tensor.detach().abs()
    assert 0.95 * bound < float(values.max()) <= bound
    assert float(values.square().mean()) == pytest.approx(bound**2 / 3, rel=0.1)


def test_initial_values_have_the_bounds_of_the_paper():
    layer = FullyConnected(4, 6, (4, 8), (2, 4))
    bounds(layer.weight, 1 / math.sqrt(4 * 32))
    factored = FactoredFullyConnected(4, 6, (4, 8), (8, 8))
    bounds(factored.theta1, math.sqrt(3 / 32))
    bounds(factored.theta2, math.sqrt(3 / 4))
    bounds(CircularConv(10, 20, 5).weight, math.sqrt(6 / 250))
    bounds(GroupConv(10, 20, "full").weight, math.sqrt(6 / 360))
    bounds(GroupConv(10, 20, "pointwise").weight, math.sqrt(6 / 90))
    separable = GroupConv(64, 2, "separable")
    bounds(separable.spatial_weight, math.sqrt(6 / 9))
    bounds(GroupConv(64, 20, "separable").weight, math.sqrt(3 / 256))
    depthwise = GroupConv(64, 20, "depthwise_separable")
    assert (depthwise.rotation_weight == 0.25).all()
    bounds(depthwise.weight, math.sqrt(3 / 64))
    sparse = SparseFactoredFullyConnected(4, 6, 4)
    for module in (layer, factored, separable, depthwise, sparse):
        for name, parameter in module.named_parameters():
            assert ("b" in name.split("_")[-1] and "weight" not in name) == (not parameter.any()), name


def test_all_anchors_reproduce_a_filter_and_half_of_them_fit_it_best():
    # With all positions as anchors the least-squares fit is the target itself: He-uniform, with its variance.
    variances = [float(SparseConv(10, 20, anchors=9).filters().detach().var()) for _ in range(20)]
    assert np.mean(variances) == pytest.approx(2 / 90, rel=0.05)
    # With half, it is the projection of the target onto the anchors' interpolations: what is left is orthogonal.
    torch.manual_seed(3)
    target = torch.empty(8, 5, 9).uniform_(-math.sqrt(6 / 45), math.sqrt(6 / 45))
    torch.manual_seed(3)
    layer = SparseConv(5, 8)
    rest = target - layer.filters().detach().flatten(2)
    torch.testing.assert_close(rest @ layer.phi.T, torch.zeros(8, 5, 5), rtol=0, atol=1e-4)
    assert 0.2 < rest.norm() / target.norm() < 0.9
