"""Kronecker factors against dense matrices by automatic differentiation (docs/theory/curvature.md, 1)."""

import copy
import itertools
import math

import pytest
import torch
from curvature_references import (
    GRID,
    LAYERS,
    data,
    dense_blocks,
    hessians,
    perturbed,
    relative_error,
    relaxed_network,
    square_root_gradients,
    with_head,
)
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from lightning_sym.curvature import Evidence, factors, find_rule, parameter_groups
from lightning_sym.curvature.blocks import in_parameter_order
from lightning_sym.curvature.passes import loss_and_columns, softmax_root
from lightning_sym.curvature.rules import gram
from lightning_sym.layers import CircularConv, FactoredFullyConnected, SparseConv, SparseFactoredFullyConnected

LIKELIHOODS = ["classification", "regression"]


def found_blocks(network, x, y, likelihood, **settings):
    found = factors(network, list(zip(x.split(2), y.split(2), strict=True)), likelihood, **settings)
    assert found.samples == len(x)
    return found.blocks


ONE_PLACE = {  # Of a single sample, A and B are of rank one each.
    "linear": [nn.Linear(2 * 24, 5), nn.Tanh(), nn.Linear(5, 3), nn.GELU()],
    "conv": [nn.Unflatten(1, (2, *GRID)), nn.Conv2d(2, 3, GRID), nn.Flatten(), nn.Tanh()],
    "circular": [nn.Unflatten(1, (2, *GRID)), nn.AdaptiveAvgPool2d(1), CircularConv(2, 3), nn.Flatten(), nn.Tanh()],
    "sparse": [nn.Unflatten(1, (2, *GRID)), nn.AdaptiveAvgPool2d(1), SparseConv(2, 3), nn.Flatten(), nn.Tanh()],
}


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", ONE_PLACE)
def test_one_sample_at_one_place_is_exact(name, likelihood):
    network = perturbed(nn.Sequential(*copy.deepcopy(ONE_PLACE[name]), nn.Linear(3, 3)))
    assert_exact(network, *data(1, (2 * 24,), 3, likelihood), likelihood)


def test_a_deep_linear_network_with_gaussian_noise_is_exact():
    network = perturbed(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2, bias=False), nn.Linear(2, 3)))
    assert_exact(network, *data(7, (4,), 3, "regression"), "regression")


def assert_exact(network, x, y, likelihood):
    expected, found = dense_blocks(network, x, likelihood), found_blocks(network, x, y, likelihood)
    assert list(found) == list(expected)
    for name, block in found.items():
        assert relative_error(block.dense(), expected[name]) < 1e-10


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.few(10)
def test_blocks_without_inputs_are_exact(layer, likelihood):
    network, shape = with_head(layer)
    x, y = data(5, shape, 3, likelihood)
    expected = dense_blocks(network, x, likelihood)
    blocks = found_blocks(network, x, y, likelihood)
    left_out = {name for name in expected if "positions" in name or "omega" in name}
    assert set(blocks) == set(expected) - left_out
    exact = {name: block for name, block in blocks.items() if block.in_factor is None}
    assert exact
    for name, block in exact.items():
        assert relative_error(block.dense(), expected[name]) < 1e-10


# ---- loops over samples, columns and positions


def circular_patch(x, i, j, kernel):
    height, width = x.shape[-2:]
    reach = kernel // 2
    rows = [(i + a - reach) % height for a in range(kernel)]
    columns = [(j + b - reach) % width for b in range(kernel)]
    return x[:, rows][:, :, columns]


def convolution_loops(layer, x, g):
    """Return B, A and the bias block of a convolution on the torus, or on p4, by their definition."""
    places = list(itertools.product(range(x.shape[2]), range(x.shape[3])))
    kind = getattr(layer, "kind", "on the torus")
    rotations = 1 if kind == "on the torus" else 4
    a_sum = b_sum = bias = 0
    for n in range(len(x)):
        for column in g[:, n]:
            column = column.unflatten(0, (rotations, -1))
            for turns, (i, j) in itertools.product(range(rotations), places):
                b_sum = b_sum + torch.outer(column[turns, :, i, j], column[turns, :, i, j])
            total = column.sum((0, 2, 3))
            bias = bias + torch.outer(total, total)
        for turns, (i, j) in itertools.product(range(rotations), places):
            seen = x[n]
            if kind in ("full", "pointwise"):
                groups = x[n].unflatten(0, (4, -1))
                order = [(turns + shift) % 4 for shift in range(4)] if kind == "full" else [turns]
                seen = torch.cat([groups[h] for h in order])
            patch = circular_patch(seen, i, j, layer.weight.shape[-1])
            vector = torch.rot90(patch, -turns, (1, 2)).flatten()
            a_sum = a_sum + torch.outer(vector, vector)
    return {"weight": (b_sum / (rotations * len(places)), a_sum / len(x)), "bias": (bias, None)}


def factored_loops(layer, x, g):
    c_in, c_out = layer.in_channels, layer.out_channels
    theta2 = layer.theta2.detach().permute(2, 0, 1)  # [S', C', C]
    x, g = x.flatten(2), g.flatten(3)
    z = torch.einsum("ocs,ncs->noc", layer.theta1.detach(), x) + layer.b1.detach()[:, None]
    b1 = b2 = out1 = out2 = 0
    for v, n in itertools.product(range(len(g)), range(len(x))):
        gz = torch.stack([theta2[:, :, c].T.mul(g[v, n]).sum(1) for c in range(c_in)])  # [C, C']
        out1 = out1 + sum(torch.outer(row, row) for row in gz) / c_in
        out2 = out2 + sum(torch.outer(row, row) for row in g[v, n]) / c_out
        b1 = b1 + torch.outer(gz.sum(0), gz.sum(0))
        b2 = b2 + torch.outer(g[v, n].sum(0), g[v, n].sum(0))
    in1 = torch.stack([sum(torch.outer(row[c], row[c]) for row in x) / len(x) for c in range(c_in)])
    in2 = torch.stack([sum(torch.outer(row[o], row[o]) for row in z) / len(x) for o in range(c_out)])
    return {"theta1": (out1, in1), "theta2": (out2, in2), "b1": (b1, None), "b2": (b2, None)}


CONVOLUTIONS = ["circular", "circular 5 on a small grid", *(f"p4 {kind}" for kind in ("lifting", "full", "pointwise"))]
LOOPS = {**dict.fromkeys(CONVOLUTIONS, convolution_loops), "factored": factored_loops}


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("layer", LOOPS)
def test_factors_are_those_of_loops(layer, likelihood):
    network, shape = with_head(layer)
    x, y = data(3, shape, 3, likelihood)
    expected = LOOPS[layer](network[0], x, square_root_gradients(network, x, likelihood))
    found = found_blocks(network, x, y, likelihood)
    for name, (b, a) in expected.items():
        block = found[f"0.{name}"]
        assert relative_error(block.out_factor, b) < 1e-12
        assert (a is None) == (block.in_factor is None)
        if a is not None:
            assert relative_error(block.in_factor, a) < 1e-12


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.few(10, "p4 separable")
def test_vectors_without_dropped_terms_give_the_exact_matrix(layer):
    network, shape = with_head(layer)
    x, _ = data(4, shape, 3, "classification")
    expected = dense_blocks(network, x, "classification")
    module, rule = network[0], find_rule("0", network[0])
    g = square_root_gradients(network, x, "classification")
    with torch.no_grad():
        inputs, gradients = rule.inputs(module, x), rule.gradients(module, x, g)
        fast = rule.in_factors(module, x)
    assert inputs.keys() == fast.keys()
    for name, vectors in gradients.items():
        if getattr(module, name, None) is None:
            continue  # a layer without bias
        if name not in inputs:
            jacobian = vectors[:, :, 0]
        else:
            a = inputs[name]
            assert relative_error(fast[name], gram(a, a.ndim - 3)) < 1e-12
            lead = {3: ("", ""), 4: ("l", "")}[a.ndim]
            letters = "loi" if name in rule.blocks_first and a.ndim == 4 else f"o{lead[0]}i"
            lead_g = "l" if vectors.ndim == 5 else ""
            sum_over = "r"
            if a.ndim == 4 and vectors.ndim == 4:  # a factored layer: places are the blocks
                jacobian = torch.einsum("vnlo,lni->vnoli", vectors, a[:, :, 0]).flatten(2)
            else:
                equation = f"{lead_g}vn{sum_over}o,{lead[0]}n{sum_over}i->vn{letters}"
                jacobian = torch.einsum(equation, vectors, a).flatten(2)
        exact = torch.einsum("vnp,vnq->pq", jacobian, jacobian)
        order = in_parameter_order(torch.arange(len(exact)), rule.axes(module, name))
        exact = exact[order][:, order]
        assert relative_error(exact, expected[f"0.{name}"]) < 1e-10


# ---- factored layers


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_per_channel_blocks_are_exact_for_one_sample(likelihood):
    network, shape = with_head("factored")
    x, y = data(1, shape, 3, likelihood)
    expected = dense_blocks(network, x, likelihood)
    found = found_blocks(network, x, y, likelihood, ffc="per_channel")
    for name, blocks, axis in (("0.theta1", 3, 1), ("0.theta2", 2, 0)):
        block, shape = found[name], network.get_parameter(name).shape
        assert block.out_factor.shape[0] == block.in_factor.shape[0] == shape[axis] == blocks
        dense, exact = (matrix.reshape(*shape, *shape) for matrix in (block.dense(), expected[name]))
        for number in range(blocks):
            part = (matrix.select(axis, number).select(axis + 2, number) for matrix in (dense, exact))
            assert relative_error(*part) < 1e-10


def test_per_channel_blocks_are_exact_in_linear_networks():
    torch.manual_seed(0)
    network = perturbed(nn.Sequential(FactoredFullyConnected(3, 2, GRID, (2, 3)), nn.Flatten(), nn.Linear(12, 4)))
    x, y = data(7, (3, *GRID), 4, "regression")
    expected = dense_blocks(network, x, "regression")["0.theta1"].reshape(2, 3, 24, 2, 3, 24)
    found = found_blocks(network, x, y, "regression", ffc="per_channel")["0.theta1"].dense().reshape(2, 3, 24, 2, 3, 24)
    for c in range(3):
        assert relative_error(found[:, c, :, :, c], expected[:, c, :, :, c]) < 1e-10


@pytest.mark.parametrize("ffc", ["shared", "per_channel"])
@pytest.mark.parametrize(("channels", "name"), [((1, 3), "theta1"), ((3, 1), "theta2")])
def test_a_factored_layer_of_one_channel_is_exact_for_one_sample(channels, name, ffc):
    torch.manual_seed(0)
    layer = FactoredFullyConnected(*channels, GRID, (2, 3))
    network = perturbed(nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(6 * channels[1], 3)))
    x, y = data(1, (channels[0], *GRID), 3, "classification")
    expected = dense_blocks(network, x, "classification")[f"0.{name}"]
    found = found_blocks(network, x, y, "classification", ffc=ffc)[f"0.{name}"]
    assert relative_error(found.dense(), expected) < 1e-10


def with_data(layer, count=5, likelihood="classification"):
    network, shape = with_head(layer)
    return network, *data(count, shape, 3, likelihood)


# ---- sparse layers: the chain rule


@pytest.mark.parametrize("learned", [False, True])
def test_a_sparse_convolution_projects_the_convolutions_factors(learned):
    torch.manual_seed(0)
    sparse = SparseConv(2, 3, learn_positions=learned, learn_lengthscale=learned)
    network = perturbed(nn.Sequential(sparse, nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)))
    dense = CircularConv(2, 3).double()
    with torch.no_grad():
        dense.weight.copy_(sparse.filters())
        dense.bias.copy_(sparse.bias)
    x, y = data(4, (2, *GRID), 3, "classification")
    other = nn.Sequential(dense, *network[1:])
    phi = torch.block_diag(*[sparse.interpolation().detach()] * 2)
    found, expected = (found_blocks(n, x, y, "classification") for n in (network, other))
    assert set(found) == {"0.u", "0.bias", "3.weight", "3.bias"}
    assert relative_error(found["0.u"].out_factor, expected["0.weight"].out_factor) < 1e-10
    assert relative_error(found["0.u"].in_factor, phi @ expected["0.weight"].in_factor @ phi.T) < 1e-10
    exact = [dense_blocks(n, x, "classification")[name] for n, name in ((network, "0.u"), (other, "0.weight"))]
    chain = torch.block_diag(*[phi] * 3)
    assert relative_error(exact[0], chain @ exact[1] @ chain.T) < 1e-10


@pytest.mark.parametrize("ffc", ["shared", "per_channel"])
def test_a_sparse_factored_layer_projects_the_factored_ones(ffc):
    torch.manual_seed(0)
    sparse = SparseFactoredFullyConnected(3, 2, GRID, (2, 3))
    network = perturbed(nn.Sequential(sparse, nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)))
    dense = FactoredFullyConnected(3, 2, GRID, (2, 3)).double()
    with torch.no_grad():
        for parameter, value in zip((dense.theta1, dense.theta2), sparse.factors(), strict=True):
            parameter.copy_(value)
        dense.b1.copy_(sparse.b1)
        dense.b2.zero_()
    x, y = data(4, (3, *GRID), 3, "classification")
    other = nn.Sequential(dense, *network[1:])
    found, expected = (found_blocks(n, x, y, "classification", ffc=ffc) for n in (network, other))
    phi1, phi2 = (phi.detach() for phi in sparse.interpolations())
    pairs = {
        "u1 B": (found["0.u1"].out_factor, expected["0.theta1"].out_factor),
        "u1 A": (found["0.u1"].in_factor, phi1 @ expected["0.theta1"].in_factor @ phi1.T),
        "u2 B": (found["0.u2"].out_factor, phi2 @ expected["0.theta2"].out_factor @ phi2.T),
        "u2 A": (found["0.u2"].in_factor, expected["0.theta2"].in_factor),
        "b1": (found["0.b1"].out_factor, expected["0.b1"].out_factor),
    }
    for name, pair in pairs.items():
        assert relative_error(*pair) < 1e-10, name


# ---- eigenvalues, batches, other ways to the same numbers


@pytest.mark.parametrize("ffc", ["shared", "per_channel"])
@pytest.mark.parametrize("layer", ["factored", "conv groups", "conv depthwise", "p4 separable", "circular", "linear"])
def test_eigenvalues_give_the_dense_log_determinant(layer, ffc):
    network, x, y = with_data(layer)
    delta, h = 0.3, 1.7
    curvature = factors(network, [(x, y)], ffc=ffc)
    for block, spectrum in zip(curvature.blocks.values(), curvature.eigenvalues().values(), strict=True):
        dense = h * block.dense() + delta * torch.eye(block.size, dtype=torch.float64)
        expected = torch.linalg.slogdet(dense).logabsdet
        found = (h * spectrum.products() + delta).log().sum()
        assert spectrum.products().numel() == block.size
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ffc", ["shared", "per_channel"])
def test_the_cut_into_batches_does_not_matter(ffc):
    network = relaxed_network()
    x, y = data(10, (2, *GRID), 3, "classification")
    whole = factors(network, [(x, y)], ffc=ffc)
    cut = factors(network, [(x[:1], y[:1]), (x[1:8], y[1:8]), (x[8:8], y[8:8]), (x[8:], y[8:])], ffc=ffc)
    assert cut.samples == 10
    assert cut.loss_sum == pytest.approx(whole.loss_sum, rel=1e-12)
    for name, block in whole.blocks.items():
        assert relative_error(cut.blocks[name].dense(), block.dense()) < 1e-10


@pytest.mark.parametrize("engine", ["autograd", "backpack"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_columns_together_are_columns_one_by_one(likelihood, engine):
    network = relaxed_network()
    x, y = data(5, (2, *GRID), 3, likelihood)
    one, *others = (found_blocks(network, x, y, likelihood, engine=engine, columns=c) for c in (1, 2, 3, 10))
    for name, block in one.items():
        for other in others:
            assert relative_error(other[name].out_factor, block.out_factor) < 1e-12


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_gradients_of_a_relaxed_network_are_exact(likelihood):
    network = relaxed_network()
    x, y = data(4, (2, *GRID), 3, likelihood)
    expected = dense_blocks(network, x, likelihood)
    found = found_blocks(network, x, y, likelihood)
    assert found.keys() == expected.keys()
    checked = 0
    for name, block in found.items():
        if block.in_factor is None:
            assert relative_error(block.dense(), expected[name]) < 1e-10
            checked += 1
        else:
            assert 0.2 < block.dense().trace() / expected[name].trace() < 5
    assert checked == 7


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_monte_carlo_is_unbiased(likelihood):
    network, x, y = with_data("factored", 4, likelihood)
    exact = found_blocks(network, x, y, likelihood)
    generator = torch.Generator().manual_seed(0)
    settings = {"samples": 4000, "generator": generator, "columns": 500}
    drawn = factors(network, [(x, y)], likelihood, **settings).blocks
    once = found_blocks(network, x, y, likelihood, samples=1, generator=generator)
    for name, block in exact.items():
        assert relative_error(drawn[name].out_factor, block.out_factor) < 0.05
        assert relative_error(once[name].out_factor, block.out_factor) > 0.1, "one draw is noise"
        if block.in_factor is not None:
            assert relative_error(drawn[name].in_factor, block.in_factor) < 1e-12


@pytest.mark.parametrize("classes", [1, 2, 3, 10])
def test_the_exact_square_root_of_a_softmax_has_one_column_less_than_classes(classes):
    logits = 3 * torch.randn(50, classes, generator=torch.Generator().manual_seed(classes), dtype=torch.float64)
    logits[:10] = logits[:10].round()  # ties
    _, root = loss_and_columns(logits, torch.zeros(50).long(), "classification", None, None)
    assert root.shape == (max(classes - 1, 1), 50, classes)
    p = logits.softmax(1)
    torch.testing.assert_close(
        torch.einsum("vni,vnj->nij", root, root), p.diag_embed() - p[:, :, None] * p[:, None], rtol=1e-12, atol=1e-16
    )


def test_the_square_root_of_a_confident_network_keeps_its_digits_in_single_precision():
    logits = torch.tensor([[30.0, 0.0, 1.0, -5.0], [0.0, 18.0, 2.0, 17.0]])
    found, exact = (softmax_root(given.softmax(1)) for given in (logits, logits.double()))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def test_a_single_draw_shows_the_curvature_of_a_confident_network():
    """Of 100 labels drawn from its predictions mostly all are the likeliest, which have next to no curvature."""
    logits = torch.full((100, 10), -9.0, dtype=torch.float64)  # 1.1e-3 for all other labels of a datum together
    logits[:, 3] = 0.0
    labels = torch.full((100,), 3)
    _, exact = loss_and_columns(logits, labels, "classification", None, None)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        _, drawn = loss_and_columns(logits, labels, "classification", 1, generator)
        assert drawn.square().sum() == pytest.approx(exact.square().sum(), rel=0.5)


# ---- samples of different lengths


class Do(nn.Module):
    """A function of a tensor, and of what the one before it remembered, as a module that both engines take."""

    def __init__(self, function, memory):
        super().__init__()
        self.function, self.memory = function, memory

    def forward(self, x):
        return self.function(self.memory, x)


def remember(memory, x):
    memory["mask"] = x[..., -1:] != 0
    return x[..., :-1]


def masked(memory, h, value=0.0):
    return h.masked_fill(~memory["mask"], value)


def softly(memory, h):
    return (masked(memory, h[..., :1], -math.inf).softmax(1) * h).sum(1)


def mildly(memory, h):
    return ((h[..., :1] - 1e3 * ~memory["mask"]).softmax(1) * h).sum(1)


def attending(memory, h):
    scores = h @ h.mT - 1e9 * (~memory["mask"]).to(h).mT
    return masked(memory, scores.softmax(-1) @ h).sum(1)


def last(memory, h):
    return h[torch.arange(len(h)), memory["mask"][..., 0].sum(1) - 1]


def gated(memory, h):
    return h * (h > 0)


def far_from_on(memory, h):
    return torch.where(h > 1.5, h - 1.5, 0.0)


# By name: the width of the first layer, what comes behind it, and how rows become a sample.
POOLS = {
    "mean": (5, lambda memory, h: h.tanh(), lambda m, h: masked(m, h).sum(1) / m["mask"].sum(1)),
    "sum by a product": (5, lambda memory, h: h.relu(), lambda m, h: (h * m["mask"]).sum(1)),
    "largest, of narrow layers that are off": (1, lambda m, h: h.relu(), lambda m, h: masked(m, h, -math.inf).amax(1)),
    "largest of some": (2, gated, lambda m, h: masked(m, h, -1e9).max(1).values),
    "softmax": (4, lambda memory, h: F.hardtanh(h), softly),
    "attention": (5, lambda memory, h: F.gelu(h), attending),
    "softmax behind a finite mask": (4, gated, mildly),
    "mean of units that few turn on": (3, far_from_on, lambda m, h: masked(m, h).sum(1) / m["mask"].sum(1)),
    "last": (3, gated, last),
    "convolution": (4, lambda m, h: masked(m, h.relu()), lambda m, h: masked(m, h).sum(1)),
}


def of_lengths(name, seed=0):
    """Return a network of samples of any length."""
    width, between, pool = POOLS[name]
    memory = {}
    torch.manual_seed(seed)
    first = [nn.Linear(3, width)]
    if name == "convolution":
        first = [Do(lambda m, x: x.mT, memory), nn.Conv1d(3, width, 3, padding=1), Do(lambda m, h: h.mT, memory)]
    layers = [Do(remember, memory), *first, Do(between, memory), nn.Linear(width, 4), nn.Tanh(), Do(pool, memory)]
    return perturbed(nn.Sequential(*layers, nn.Linear(4, 3)), seed)


def padded(lengths, seed=0):
    """Return samples of some lengths, with zeros behind, the last number of each row being 1 where there is data."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), max(lengths), 4, generator=generator, dtype=torch.float64)
    x[..., -1] = 1
    there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return x * there[..., None], torch.randint(3, (len(lengths),), generator=generator)


def cut(x, y, size, trim):
    """Return batches, of which padding is trimmed to the longest sample or left as it is."""
    lengths = (x[..., -1] != 0).sum(1)
    return [
        (a[:, : lengths[i : i + size].max()] if trim else a, b)
        for i, (a, b) in zip(range(0, len(x), size), zip(x.split(size), y.split(size), strict=True), strict=True)
    ]


def row_by_row(network, x, lengths, only_last):
    """Return A and B of all weights from every sample by itself, without padding."""
    network, kept, sums = copy.deepcopy(network), {}, {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d):
            module.register_forward_hook(lambda module, args, y, name=name: kept.update({name: (module, args[0], y)}))
    for sample, length in zip(x, lengths, strict=True):
        outputs = network(sample[None, :length])
        values, axes = torch.linalg.eigh(hessians(outputs.detach(), "classification")[0])
        for name, (module, a, y) in kept.items():
            columns = (axes * values.clamp_min(0).sqrt()).T
            g = torch.stack([torch.autograd.grad(outputs, y, c[None], retain_graph=True)[0] for c in columns])
            if isinstance(module, nn.Conv1d):
                a, g = F.unfold(a[:, :, None], (1, 3), padding=(0, 1)).mT, g.mT
            a, g = a.detach().reshape(-1, a.shape[-1]), g.reshape(len(columns), -1, g.shape[-1])
            if only_last:
                a, g = a[-1:], g[:, -1:]
            b, inner, rows = sums.get(name, (0, 0, 0))
            sums[name] = (b + torch.einsum("vro,vrp->op", g, g), inner + a.T @ a, rows + len(a))
    return {name: (b * len(x) / rows, a / len(x)) for name, (b, a, rows) in sums.items()}


@pytest.mark.parametrize("engine", ["autograd", "backpack"])
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.few(6, "largest of some-backpack")
def test_padding_counts_for_nothing_however_it_is_trimmed(name, engine):
    network, lengths = of_lengths(name), [4, 2, 1, 5, 1, 3]
    x, y = padded(lengths)
    expected = row_by_row(network, x, lengths, name == "last")
    biases = dense_blocks(network, x, "classification")
    for how in itertools.product((6, 4, 3, 1), (False, True)):
        found = factors(network, cut(x, y, *how), engine=engine)
        for key, (b, a) in expected.items():
            block = found.blocks[f"{key}.weight"]
            assert relative_error(block.out_factor, b) < 1e-10
            assert relative_error(block.in_factor, a) < 1e-10
            assert relative_error(found.blocks[f"{key}.bias"].dense(), biases[f"{key}.bias"]) < 1e-10


class Attention(nn.Module):
    """Attention with queries and keys of their own, whose scores are without effect at a sample of one place."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        there, h = x[..., -1] != 0, self.embed(x[..., :-1])
        seen = there[:, None].expand(-1, there.shape[1], -1)
        h = h + F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h), attn_mask=seen)
        return self.head((h * there[..., None]).sum(1) / there.sum(1, keepdim=True))


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("size", [9, 4, 1])
def test_scores_of_a_single_place_count_however_they_round(size, trim):
    torch.manual_seed(0)
    network, lengths = perturbed(Attention()), [5, 1, 1, 2, 1, 3, 1, 4, 1]
    x, y = padded(lengths)
    blocks = factors(network, cut(x, y, size, trim)).blocks
    for key, (b, a) in row_by_row(network, x, lengths, only_last=False).items():
        assert relative_error(blocks[f"{key}.weight"].out_factor, b) < 1e-10
        assert relative_error(blocks[f"{key}.weight"].in_factor, a) < 1e-10


def test_units_that_are_off_still_count():
    """What has no gradient at these weights alone has none of its rows left out."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(1, 2, 1), nn.ReLU()]
    network = perturbed(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3)))
    x, y = data(9, (1, 4, 4), 3, "classification")
    blocks = factors(network, [(x, y)]).blocks
    assert (blocks["0.weight"].places, blocks["3.weight"].places) == (16, 4)
    patches = F.unfold(x, 3, padding=1).mT.flatten(0, 1)
    assert relative_error(blocks["0.weight"].in_factor, patches.T @ patches / 9) < 1e-12


def pack(memory, x):
    memory["mask"] = x[..., -1] != 0
    return x[..., :-1][memory["mask"]]


def unpacked(memory, rows):
    found = rows.new_zeros(*memory["mask"].shape, rows.shape[1])
    return found.index_put((memory["mask"],), rows).sum(1)


def in_segments(memory, rows):
    of = memory["mask"].nonzero()[:, 0]
    return rows.new_zeros(len(memory["mask"]), rows.shape[1]).index_add(0, of, rows)


def by_a_product(memory, rows):
    return F.one_hot(memory["mask"].nonzero()[:, 0], len(memory["mask"])).to(rows).T @ rows


def in_pieces(memory, rows):
    return torch.stack([piece.sum(0) for piece in rows.split(memory["mask"].sum(1).tolist())])


@pytest.mark.parametrize("engine", ["autograd", "backpack"])
@pytest.mark.parametrize("unpack", [unpacked, in_segments, by_a_product, in_pieces])
def test_packed_rows_are_given_to_their_samples_or_refused_in_whichever_batch(unpack, engine):
    memory = {}
    torch.manual_seed(0)
    parts = [Do(pack, memory), nn.Linear(3, 5), nn.Tanh(), Do(unpack, memory), nn.Linear(5, 3)]
    network = perturbed(nn.Sequential(*parts))
    right = [padded([2] * 6), padded([3] * 4, seed=1)], [padded([k], seed=k) for k in (1, 4, 2)]
    for batches in right:
        found = factors(network, batches, engine=engine)
        x = torch.cat([F.pad(x, (0, 0, 0, 4 - x.shape[1])) for x, _ in batches])
        expected = row_by_row(nn.Sequential(*parts), x, (x[..., -1] != 0).sum(1), False)
        for key, (b, a) in expected.items():
            assert relative_error(found.blocks[f"{key}.weight"].out_factor, b) < 1e-10
            assert relative_error(found.blocks[f"{key}.weight"].in_factor, a) < 1e-10
    ones = padded([1] * 6)
    for wrong in ([padded([2] * 6), padded([1, 2, 3, 2])], [ones, padded([0, 2, 1, 1])], [ones, ones, padded([3, 0])]):
        with pytest.raises(ValueError, match=r"not of the sample whose turn it is|first axis cannot be the samples"):
            factors(network, wrong, engine=engine)


# ---- inputs far from 0


@pytest.mark.parametrize("engine", ["autograd", "backpack"])
@pytest.mark.parametrize("kind", ["linear", "conv", "circular", "factored"])
@pytest.mark.few(6)
def test_inputs_far_from_zero_keep_their_digits_in_single_precision(kind, engine):
    images, labels = (torch.from_numpy(part)[:400] for part in load_digits(return_X_y=True))
    makes = {
        "linear": lambda: (nn.Flatten(), nn.Linear(64, 24), nn.Linear(24, 24)),
        "conv": lambda: (nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 24)),
        "circular": lambda: (CircularConv(1, 4), nn.Flatten(), nn.Linear(256, 24)),
        "factored": lambda: (FactoredFullyConnected(1, 3, (8, 8), (4, 4)), nn.Flatten(), nn.Linear(48, 24)),
    }
    for offset in (0, 1e2, 1e4):
        torch.manual_seed(0)
        network = nn.Sequential(*makes[kind](), nn.Tanh(), nn.Linear(24, 10))
        found = []
        for dtype in (torch.float32, torch.float64):
            x = (images.float() / 16 + offset).to(dtype)[:, None].view(-1, 1, 8, 8)
            with torch.no_grad():  # the first batch's outputs are moderate at every offset
                network = network.to(dtype)
            batches = list(zip(x.split(150), labels.split(150), strict=True))
            evidence = Evidence.of(network, factors(network, batches, engine=engine), parameter_groups(network))
            found.append(evidence.terms(torch.zeros(len(evidence.groups.names))).log_determinant / len(x))
        assert found[0] == pytest.approx(found[1], rel=1e-3), offset
