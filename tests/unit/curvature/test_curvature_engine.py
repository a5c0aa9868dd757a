"""Both engines: what they accept and refuse, and that they leave nothing behind; rules and blocks."""

import copy
import functools
import warnings

import pytest
import torch
from backpack.context import CTX
from helpers import Program, assert_refused, of, refused
from torch import Tensor, nn

from lightning_sym.curvature import (
    CurvatureError,
    EmptyLoaderError,
    KroneckerBlock,
    NonFiniteError,
    Rule,
    factors,
    find_rule,
    parameter_groups,
    register_layer,
)
from lightning_sym.curvature import blocks as blocks_module
from lightning_sym.curvature.blocks import symmetric_eigenvalues
from lightning_sym.layers import SparseConv
from lightning_sym.networks import TorchvisionNetwork


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def batches():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    return [(x[:4], torch.arange(4) % 3), (x[4:], torch.arange(2))]


@pytest.fixture(params=["autograd", "backpack"])
def found(request):
    """Return the factors of a network by one of the engines."""
    return lambda network, loader=None, *args, **settings: factors(
        network, batches() if loader is None else loader, *args, engine=request.param, **settings
    )


def state(network):
    return {
        "modes": [module.training for module in network.modules()],
        "attributes": [sorted(vars(module)) for module in network.modules()],
        "hooks": [[len(v) for k, v in vars(m).items() if k.endswith("_hooks")] for m in network.modules()],
        "of parameters": [sorted(vars(parameter)) for parameter in network.parameters()],
        "addresses": [parameter.data_ptr() for parameter in network.parameters()],
        "gradients": [None if p.grad is None else p.grad.tolist() for p in network.parameters()],
        "values": {name: value.tolist() for name, value in network.state_dict().items()},
        "hooks of backpack": list(map(id, CTX.hook_handles)),
        "extensions of backpack": CTX.get_active_exts(),
        "filters": list(warnings.filters),
    }


@pytest.mark.parametrize("gradients", ["none", "filled"])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_left_behind(found, training, gradients):
    network = perceptron()
    if gradients == "filled":
        network(torch.randn(4, 4)).sum().backward()
    network.train(training)
    network[2].eval()
    random, before = torch.get_rng_state(), state(network)
    for settings in ({}, {"samples": 2}):
        found(network, **settings)
        assert state(network) == before
    assert torch.equal(random, torch.get_rng_state())


class Breaks(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, x):
        if self.where == "forward":
            raise RuntimeError("it breaks")

        def fail(g):
            raise RuntimeError("it breaks")

        y = x * 1
        if y.requires_grad:
            y.register_hook(fail)
        return y


@pytest.mark.parametrize("where", ["forward", "backward", "loader"])
def test_nothing_is_left_behind_after_an_error(found, where):
    network = perceptron().train()
    if where != "loader":
        network.insert(1, Breaks(where))
    before = state(network)

    def loader():
        yield batches()[0]
        raise RuntimeError("it breaks")

    with pytest.raises((RuntimeError, ValueError), match="it breaks"):
        found(network, loader())
    assert state(network) == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_where_gradients_are_off(found, mode):
    network = perceptron().eval()
    expected = found(network).blocks
    with mode():
        again = found(network).blocks
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert not torch.is_grad_enabled()
    for name, block in expected.items():
        assert torch.equal(again[name].out_factor, block.out_factor)


def test_monte_carlo_follows_its_generator(found):
    network = perceptron()
    draws = [found(network, samples=1, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    first, again, other = (draw.blocks["4.weight"].out_factor for draw in draws)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    default = [found(network, samples=1).blocks["4.weight"].out_factor for _ in range(2)]
    assert torch.equal(*default)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single_and_summed_in_double(found, dtype):
    network = perceptron().to(dtype)
    blocks = found(network).blocks
    assert all(parameter.dtype == dtype for parameter in network.parameters())
    for name, block in found(copy.deepcopy(network).float()).blocks.items():
        assert blocks[name].out_factor.dtype == torch.float64
        assert torch.equal(blocks[name].out_factor, block.out_factor)


def test_autocast_is_off_meanwhile():
    network = perceptron()
    expected = factors(network, batches()).blocks["0.weight"]
    with torch.autocast("cpu", torch.bfloat16):
        found = factors(network, batches()).blocks["0.weight"]
    assert torch.equal(found.out_factor, expected.out_factor)


def test_operations_in_place_behind_a_layer_do_no_harm():
    out_of_place = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    in_place = nn.Sequential(out_of_place[0], nn.ReLU(inplace=True), out_of_place[2])
    expected = factors(out_of_place, batches()).blocks
    for name, block in factors(in_place, batches()).blocks.items():
        assert torch.equal(block.out_factor, expected[name].out_factor)


def changes_its_input():
    def forward(net, x):
        x = x + 0
        y = net.layer(x)
        x.mul_(2)
        return y + x

    return Program(forward, {"layer": of(nn.BatchNorm1d, 4)})


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T


def unused():
    network = perceptron()
    network.register_module("spare", nn.Linear(2, 2))
    network.forward = lambda x: nn.Sequential(*list(network)[:-1])(x)
    return network


def tied():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network[1].weight = network[0].weight
    return network


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (changes_its_input, "input of module 'layer' is changed in place"),
        (lambda: Program(lambda net, x: (net.layer(x), x), {"layer": of(nn.Linear, 4, 3)}), "inputs, got tuple"),
        (unused, "'spare' .Linear. has trainable parameters but is not called"),
        (lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3)), r"outputs of shape \[N, K\], got shape"),
    ],
)
def test_networks_that_engine_autograd_refuses(make, words):
    with pytest.raises(ValueError, match=words):
        factors(make(), batches())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), Own()), "'1' has parameters but its type Own has no curvature rule"),
        (lambda: nn.Linear(4, 3).requires_grad_(False), "no trainable parameters"),
        (tied, "'0' and '1' share a parameter"),
        (lambda: nn.LazyLinear(3), "not initialised yet; call the network once"),
        (lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "track_running_stats=True"),
        (lambda: nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel), "wrapped for DDP"),
    ],
)
def test_networks_that_both_engines_refuse(found, make, words):
    assert_refused(lambda: found(make()), says=words)


@pytest.mark.parametrize(
    ("change", "likelihood", "words"),
    [
        (lambda x, y: (x, y + 2), "classification", "Labels must be in 0 to 2"),
        (lambda x, y: (x, y - 1), "classification", "Labels must be in 0 to 2"),
        (lambda x, y: (x, y.float()), "classification", "class indices"),
        (lambda x, y: (x, y[:, None]), "classification", "class indices"),
        (lambda x, y: (x, y.float()), "regression", r"shape of the outputs, \[4, 3\]"),
        (lambda x, y: (x, torch.zeros(4, 2)), "regression", r"got \[4, 2\]"),
        (lambda x, y: x, "classification", "pairs of tensors"),
    ],
)
def test_data_that_do_not_fit(found, change, likelihood, words):
    with pytest.raises(ValueError, match=words):
        found(perceptron(), [change(*batch) for batch in batches()], likelihood)


compute = functools.partial(factors, perceptron(), batches())


@pytest.mark.parametrize(
    "refusal",
    [
        refused(compute, likelihood="poisson"),
        refused(compute, likelihood=nn.CrossEntropyLoss(weight=torch.ones(3)), says=("CrossEntropyLoss()", "leave")),
        refused(compute, engine="autogard", says="Did you mean 'autograd'"),
        refused(compute, samples=0),
        refused(compute, ffc="per-channel", says="Did you mean 'per_channel'"),
        refused(register_layer, int, says="subclasses of nn.Module", error=TypeError),
        refused(lambda: register_layer(Own)(int), says="subclass of Rule", error=TypeError),
    ],
)
def test_bad_arguments_are_named(refusal):
    refusal()


@pytest.mark.parametrize("loader", [[], [(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))]])
def test_no_data(found, loader):
    assert_refused(lambda: found(perceptron(), loader), says="at least one batch", error=EmptyLoaderError)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_and_inputs_that_are_not_finite(found, value):
    network = perceptron()
    with torch.no_grad():
        network[0].weight[0, 0] = value
    assert_refused(found, network, says="'0.weight'", error=NonFiniteError)
    x, y = batches()[0]
    for likelihood, target in (("classification", y), ("regression", torch.zeros(4, 3))):
        with pytest.raises(CurvatureError, match=r"not finite|loss in the curvature pass"):
            found(perceptron(), [(x * value, target)], likelihood)


def test_frozen_parameters_are_constants(found):
    network = perceptron()
    network[0].weight.requires_grad_(False)
    network[3].requires_grad_(False)
    expected = {"0.bias", "4.weight", "4.bias"}
    assert set(found(network).blocks) == expected == set(parameter_groups(network).precisions)


def test_anchor_positions_are_left_out_and_listed(found):
    conv = SparseConv(2, 3, learn_positions=True, learn_lengthscale=True)
    network = nn.Sequential(conv, nn.Flatten(), nn.Linear(48, 3))
    curvature = found(network, [(torch.randn(2, 2, 4, 4), torch.arange(2))])
    assert curvature.left_out == ("0.positions", "0.omega")
    assert set(curvature.blocks) == {"0.u", "0.bias", "2.weight", "2.bias"} == set(parameter_groups(network).precisions)


def test_a_torchvision_network_whose_additions_are_in_place():
    torch.manual_seed(0)
    network = TorchvisionNetwork("resnet18", image_size=32, num_classes=3).requires_grad_(False).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and module.num_features <= 64:
            module.requires_grad_(True)
    x = torch.randn(2, 3, 32, 32)
    found = factors(network, [(x, torch.tensor([0, 1]))])
    # In-place additions and activations follow the batch norms: their blocks are exact all the same.
    name, block = next((n, b) for n, b in found.blocks.items() if n.endswith("bias"))
    expected = torch.zeros_like(block.out_factor)
    for sample in x:
        output = network(sample[None])[0]
        p = output.softmax(0).detach()
        parameter = network.get_parameter(name)
        jacobian = torch.stack([torch.autograd.grad(value, parameter, retain_graph=True)[0] for value in output])
        expected += jacobian.T @ (p.diag() - torch.outer(p, p)) @ jacobian
    torch.testing.assert_close(block.out_factor, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_anchor_positions_may_be_all_that_is_trained(found):
    network = nn.Sequential(SparseConv(2, 3, learn_positions=True), nn.Flatten(), nn.Linear(48, 3))
    network.requires_grad_(False)[0].positions.requires_grad_(True)
    curvature = found(network, [(torch.randn(2, 2, 4, 4), torch.tensor([0, 1]))])
    assert (curvature.blocks, curvature.left_out) == ({}, ("0.positions",))


# ---- rules


def test_a_layer_of_ones_own():
    class Matrix(Own):
        pass

    class Heir(Matrix):
        pass

    class Stranger(Matrix):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    @register_layer(Matrix)
    class MatrixRule(Rule):
        def inputs(self, module, x):
            return {"matrix": x.reshape(len(x), -1, 4)}

        def gradients(self, module, x, g):
            return {"matrix": g.reshape(*g.shape[:2], -1, 3)}

    network, linear = Heir(), nn.Linear(4, 3, bias=False)
    assert isinstance(find_rule("", network), MatrixRule)
    linear.weight.data = network.matrix.data
    found, expected = factors(network, batches()).blocks["matrix"], factors(linear, batches()).blocks["weight"]
    torch.testing.assert_close(found.out_factor, expected.out_factor)
    assert_refused(lambda: factors(Stranger(), batches()), says="Stranger has no curvature rule")


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        ({}, r"no gradients for \['matrix'\]"),
        ({"matrix": torch.ones(1, 1, 1, 2)}, "block of 2 parameters for 'matrix'"),
    ],
)
def test_rules_that_are_wrong(found, gives, words):
    class Layer(Own):
        pass

    @register_layer(Layer)
    class LayerRule(Rule):
        def gradients(self, module, x, g):
            return gives

    with pytest.raises(ValueError, match=words):
        found(Layer())


# ---- blocks


def test_eigenvalues_fall_back_to_double_precision(monkeypatch):
    original, dtypes = torch.linalg.eigvalsh, []

    def fails_in_single(matrix):
        dtypes.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return original(matrix)

    monkeypatch.setattr(blocks_module.torch.linalg, "eigvalsh", fails_in_single)
    values = symmetric_eigenvalues(torch.diag(torch.tensor([2.0, -1e-9])), "weight")
    assert dtypes == [torch.float32, torch.float64]
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0, 2.0], "negative ones are rounding"


def test_eigenvalues_that_cannot_be_found(monkeypatch):
    def fails(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    with pytest.raises(NonFiniteError, match=r"'0\.weight' is not finite"):
        symmetric_eigenvalues(torch.full((2, 2), float("nan")), "0.weight")
    monkeypatch.setattr(blocks_module.torch.linalg, "eigvalsh", fails)
    assert_refused(symmetric_eigenvalues, torch.eye(2), "0.weight", says="not in double", error=NonFiniteError)


def test_dense_blocks_follow_the_order_of_the_tensor():
    b, a = torch.randn(3, 2, 2), torch.randn(3, 4, 4)
    inside = KroneckerBlock(b, a).dense().reshape(2, 3, 4, 2, 3, 4)
    outside = KroneckerBlock(b, a, blocks_first=True).dense().reshape(3, 2, 4, 3, 2, 4)
    for c in range(3):
        expected = torch.einsum("op,ij->oipj", b[c], a[c])
        torch.testing.assert_close(inside[:, c, :, :, c], expected)
        torch.testing.assert_close(outside[c, :, :, c], expected)
    assert inside[:, 0, :, :, 1].abs().max() == 0


def test_columns_fall_back_where_vmap_fails():
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return torch.from_numpy(g.numpy() * 2)

    class Double(nn.Module):
        def forward(self, x):
            return Opaque.apply(x)

    network = nn.Sequential(nn.Linear(4, 5), Double(), nn.Linear(5, 3))
    inner = network[0](batches()[0][0])
    with pytest.raises(RuntimeError):
        torch.autograd.grad(network[1:](inner), inner, torch.ones(2, 4, 3), is_grads_batched=True)
    together = factors(network, batches(), "classification", columns=3).blocks["0.weight"].out_factor
    single = factors(network, batches(), "classification", columns=1).blocks["0.weight"].out_factor
    torch.testing.assert_close(together, single)
