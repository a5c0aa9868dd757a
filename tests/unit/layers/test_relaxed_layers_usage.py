"""Relaxed layers in use: shapes, precisions, transforms of torch, state, randomness, and what they say to bad input."""

import copy
import io

import pytest
import torch
from helpers import assert_refused, assert_same
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from lightning_sym.layers import (
    CircularConv,
    EquivariantLinear,
    FactoredFullyConnected,
    FullyConnected,
    GroupConv,
    GroupLift,
    GroupMax,
    PolyphasePool,
    ResidualPathways,
    SparseConv,
    SparseFactoredFullyConnected,
    grid_action,
    parameter_paths,
    regular_action,
)
from lightning_sym.symmetry import trace_symmetry

LAYERS = {
    "fully_connected": lambda: FullyConnected(4, 3, (4, 6), (2, 3)),
    "circular_conv": lambda: CircularConv(4, 3),
    "factored": lambda: FactoredFullyConnected(4, 3, (4, 6), (2, 3)),
    "sparse_conv": lambda: SparseConv(4, 3),
    "sparse_conv_learned": lambda: SparseConv(4, 3, learn_positions=True, learn_lengthscale=True),
    "sparse_factored": lambda: SparseFactoredFullyConnected(4, 3, (4, 6), (2, 3)),
    "sparse_factored_learned": lambda: SparseFactoredFullyConnected(4, 3, (4, 6), (2, 3), None, None, True, True),
    "lifting": lambda: GroupConv(4, 3, "lifting"),
    "full": lambda: GroupConv(1, 3, "full"),
    "pointwise": lambda: GroupConv(1, 3, "pointwise"),
    "separable": lambda: GroupConv(1, 3, "separable"),
    "depthwise_separable": lambda: GroupConv(1, 3, "depthwise_separable"),
    "pool": lambda: PolyphasePool(),
    "pool_l2": lambda: PolyphasePool("l2", groups=2),
    "group_lift": lambda: GroupLift(),
    "group_max": lambda: GroupMax(),
    "pathways": lambda: ResidualPathways(
        {"fc": FactoredFullyConnected(4, 3, (4, 6), (2, 3)), "conv": nn.Sequential(CircularConv(4, 3), PolyphasePool())}
    ),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return LAYERS[request.param]()


def features(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_outputs_are_new_tensors_without_gaps_and_inputs_stay(layer):
    x = features(5, 4, 4, 6)
    before = x.clone()
    y = layer(x)
    assert torch.equal(x, before)
    assert y.ndim == 4
    channels_first = isinstance(layer, FactoredFullyConnected | SparseFactoredFullyConnected)
    assert (y.transpose(0, 1) if channels_first else y).is_contiguous()
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert layer(x[:0]).shape == (0, *y.shape[1:])


def test_a_seed_draws_both_factors_in_order():
    torch.manual_seed(0)
    layer = FactoredFullyConnected(4, 3, (4, 6), (2, 3))
    torch.manual_seed(0)
    theta1, theta2 = (
        nn.init.uniform_(torch.empty(*shape), -bound, bound)
        for shape, bound in (((3, 4, 24), (3 / 24) ** 0.5), ((6, 12), (3 / 4) ** 0.5))
    )
    assert torch.equal(layer.theta1, theta1)
    assert torch.equal(layer.theta2, theta2.T.reshape(3, 4, 6))


def test_the_gradient_of_theta2_has_the_order_of_theta2_in_memory():
    layer = FactoredFullyConnected(4, 3, (4, 6), (2, 3))
    (found,) = torch.autograd.grad(layer(features(5, 4, 4, 6)).square().sum(), layer.theta2)
    assert found.stride() == layer.theta2.stride()  # backward() would copy any other


@pytest.mark.parametrize("memory", ["channels_last", "transposed", "sliced"])
def test_any_layout_in_memory_gives_the_same(layer, memory):
    x = features(4, 4, 4, 6, dtype=torch.float64)
    other = {
        "channels_last": x.to(memory_format=torch.channels_last),
        "transposed": x.mT.contiguous().mT,
        "sliced": torch.cat([x, x], 1)[:, :4],
    }[memory]
    layer = layer.double()
    torch.testing.assert_close(layer(other), layer(x))


def test_half_precision_by_autocast(layer):
    x = features(3, 4, 4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    torch.testing.assert_close(y.float(), layer(x), rtol=0.1, atol=0.1)


def test_gradients_of_each_sample_by_vmap(layer):
    layer = layer.double()
    x = features(3, 4, 4, 6, dtype=torch.float64)

    def loss(values, one):
        return functional_call(layer, values, (one[None],)).square().sum()

    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    found, by_input = vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, 0))(parameters, x)
    x.requires_grad_()
    layer(x).square().sum().backward()
    torch.testing.assert_close(by_input, x.grad)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name].sum(0), parameter.grad)


@pytest.mark.parametrize("name", LAYERS)
def test_several_members_by_vmap(name):
    torch.manual_seed(0)
    members = [LAYERS[name]().double() for _ in range(3)]
    x = features(3, 2, 4, 4, 6, dtype=torch.float64)
    state = stack_module_state(members) if any(members[0].state_dict()) else ({}, {})
    together = vmap(lambda values, buffers, x: functional_call(members[0], (values, buffers), (x,)))(*state, x)
    for member, one, y in zip(members, x, together, strict=True):
        torch.testing.assert_close(y, member(one))


def test_tracing_sees_one_call_and_runs_the_same(layer):
    x = features(2, 4, 4, 6)
    from lightning_sym.networks import Network

    network = Network.wrap(nn.Sequential(layer, nn.ReLU(), nn.Flatten()))
    (site,) = network.sites()
    lower, upper = network.split(site)
    assert torch.equal(upper(lower(x)), network(x))
    names = [node.target for node in lower.graph.nodes if node.op == "call_module"]
    assert names == ["module.0", "module.1"]


@pytest.mark.few(4)
def test_symmetries_are_traced_to_a_group_that_is_certain(layer):
    torch.manual_seed(0)
    x = features(2, 4, 4, 6, dtype=torch.float64)
    layer = layer.double()
    outputs = layer(x).flatten(1).shape[1]
    network = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(outputs, 5).double(), nn.ReLU(), nn.Linear(5, 2))
    symmetry = trace_symmetry(network.double(), x)
    assert symmetry.worst_error < 1e-8
    assert symmetry.dimension >= 5  # the scales of the ReLUs behind it, whatever is not understood


def test_state_survives_saving_copying_and_loading(layer):
    x, stream = features(2, 4, 4, 6), io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = copy.deepcopy(layer)
    assert torch.equal(other(x), layer(x))
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(torch.load(stream))
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_initial_values_follow_the_global_generator(name):
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(LAYERS[name]().state_dict())
    assert_same(states[0], states[1])
    drawn = [k for k in states[0] if k.split(".")[-1] in ("weight", "u", "u1", "u2", "theta1", "theta2", "positions1")]
    assert all(not torch.equal(states[0][k], states[2][k]) for k in drawn)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_can_be_built_without_memory(name):
    with torch.device("meta"):
        layer = LAYERS[name]()
        assert layer(torch.empty(2, 4, 4, 6)).is_meta
    assert [p.shape for p in layer.parameters()] == [p.shape for p in LAYERS[name]().parameters()]


def test_maps_that_commute_with_turns_can_be_built_without_memory_and_filled():
    state = EquivariantLinear(2, 3, grid_action("d4", 4), grid_action("d4", 2), 2).state_dict()
    with torch.device("meta"):
        layer = EquivariantLinear(2, 3, grid_action("d4", 4), grid_action("d4", 2), 2)
        EquivariantLinear(2, 3, regular_action([[0, 1], [1, 0]]))
        EquivariantLinear(2, 3, [[0, 1], [1, 0]])
        assert layer(torch.empty(2, 2, 4, 4)).is_meta
    layer.load_state_dict(state, assign=True)
    x = torch.randn(5, 2, 4, 4)
    torch.testing.assert_close(layer(x.rot90(1, (2, 3))), layer(x).rot90(1, (2, 3)))


def test_what_is_learned_is_a_parameter_and_phi_is_kept_if_nothing_is():
    for positions in (False, True):
        for lengthscale in (False, True):
            conv = SparseConv(2, 3, 3, None, positions, lengthscale)
            dense = SparseFactoredFullyConnected(2, 3, 4, 2, None, None, positions, lengthscale)
            found = {name for name, _ in (*conv.named_parameters(), *dense.named_parameters())}
            expected = {"u", "bias", "u1", "u2", "b1"}
            expected |= {"positions", "positions1", "positions2"} if positions else set()
            expected |= {"omega", "omega1", "omega2"} if lengthscale else set()
            assert found == expected
            assert (conv.phi is None) == (dense.phi1 is None) == (dense.phi2 is None) == (positions or lengthscale)
            if conv.phi is not None:
                assert conv.interpolation() is conv.phi
                assert conv.phi.is_contiguous()
                assert not conv.phi.requires_grad


def test_anchors_are_half_of_the_positions_rounded_up_and_lie_within_them():
    assert [SparseConv(1, 1, k).u.shape[-1] for k in (1, 3, 5)] == [1, 5, 13]
    assert SparseConv(1, 1, 3, anchors=7).positions.shape == (7, 2)
    layer = SparseFactoredFullyConnected(2, 3, (3, 5), (1, 1))
    assert layer.u1.shape == (3, 2, 8)
    assert layer.u2.shape == (1, 6)
    layer = SparseFactoredFullyConnected(2, 3, (9, 3), 2, anchors=27, out_anchors=3)
    assert (layer.u1.shape, layer.u2.shape) == ((3, 2, 27), (3, 6))
    reach = layer.positions1.abs().amax(0)
    assert 3 < reach[0] <= 4
    assert 0.5 < reach[1] <= 1


def test_names_of_paths():
    block = ResidualPathways({"conv": CircularConv(1, 1), "more": nn.Sequential(ResidualPathways(CircularConv(1, 1)))})
    assert list(block.paths) == ["conv", "more"]
    assert block.scale == 0.5
    network = nn.Sequential(CircularConv(1, 1), block)
    assert parameter_paths(network) == {
        "1.conv.weight": ("1", "conv"),
        "1.conv.bias": ("1", "conv"),
        "1.more.0.0.weight": ("1", "0"),
        "1.more.0.0.bias": ("1", "0"),
    }
    assert parameter_paths(ResidualPathways({"a": CircularConv(1, 1)})) == {"a.weight": ("", "a"), "a.bias": ("", "a")}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FullyConnected(0, 3, 4), "in_channels of FullyConnected must be an integer >= 1, got 0."),
        (lambda: CircularConv(2, 3.0), "out_channels of CircularConv must be an integer >= 1, got 3.0."),
        (lambda: CircularConv(2, 3, 4), "kernel_size of CircularConv must be odd, got 4."),
        (lambda: GroupConv(0, 3), "in_channels of GroupConv must be an integer >= 1, got 0."),
        (lambda: GroupConv(2, 3, "full", 2), "kernel_size of GroupConv must be odd, got 2."),
        (lambda: FactoredFullyConnected(2, 3, (4, 0)), "grid of FactoredFullyConnected must be an integer >= 1 or a"),
        (lambda: FactoredFullyConnected(2, 3, 4, (1, 2, 3)), "out_grid of FactoredFullyConnected must be"),
        (lambda: FullyConnected(2, 3, 2.5), "grid of FullyConnected must be"),
        (lambda: SparseConv(2, 3, anchors=10), "between anchors on 9 positions, got anchors=10; use 9 at most."),
        (lambda: SparseConv(2, 3, anchors=0), "anchors of SparseConv must be an integer >= 1, got 0."),
        (lambda: SparseFactoredFullyConnected(2, 3, 4, 2, out_anchors=5), "on 4 positions, got out_anchors=5; use 4"),
        (lambda: GroupConv(2, 3, "pointwize"), "Unknown kind of GroupConv 'pointwize'"),
        (lambda: GroupConv(2, 3, "full").spatial(torch.zeros(2, 8, 4, 4)), "full"),
        (lambda: GroupConv(2, 3, "separable").rotation(torch.zeros(2, 8, 4, 4)), "separable"),
        (lambda: GroupConv(2, 3, "separable").filters(), "separable"),
        (lambda: PolyphasePool("l3"), "Unknown norm of PolyphasePool 'l3'"),
        (lambda: PolyphasePool(groups=0), "groups of PolyphasePool must be an integer >= 1"),
        (lambda: ResidualPathways(), "needs one path at least"),
        (lambda: ResidualPathways({}), "needs one path at least"),
        (lambda: ResidualPathways("conv"), "must be a module, got 'conv'"),
        (lambda: ResidualPathways({"scale": nn.Identity()}), "cannot be named 'scale'"),
        (lambda: ResidualPathways({"a.b": nn.Identity()}), "cannot be named 'a.b'"),
    ],
)
def test_relaxed_layers_name_arguments_out_of_range(make, text):
    assert_refused(make, says=text)


@pytest.mark.parametrize(
    ("layer", "shape", "text"),
    [
        (FullyConnected(2, 3, 4), (5, 2, 4, 5), "expects features of shape [N, 2, 4, 4], got [5, 2, 4, 5]; build"),
        (FactoredFullyConnected(2, 3, 4), (5, 3, 4, 4), "expects features of shape [N, 2, 4, 4], got [5, 3, 4, 4]"),
        (SparseFactoredFullyConnected(2, 3, 4), (2, 4, 4), "expects features of shape [N, 2, 4, 4], got [2, 4, 4]"),
        (CircularConv(2, 3), (5, 1, 4, 4), "CircularConv expects features of shape [N, 2, H, W], got [5, 1, 4, 4]"),
        (SparseConv(2, 3), (2, 4, 4), "SparseConv expects features of shape [N, 2, H, W], got [2, 4, 4]"),
        (GroupConv(2, 3, "full"), (5, 2, 4, 4), "GroupConv expects features of shape [N, 8, H, W], got [5, 2, 4, 4]"),
        (GroupConv(2, 3, "lifting"), (5, 8, 4, 4), "GroupConv expects features of shape [N, 2, H, W], got"),
        (GroupMax(), (5, 6, 4, 4), "GroupMax expects features [N, 4 C, H, W], got [5, 6, 4, 4]"),
        (PolyphasePool(), (5, 2, 3, 4), "needs features [N, C, H, W] with even ones, got [5, 2, 3, 4]; pad"),
        (PolyphasePool(), (2, 4, 4), "got [2, 4, 4]"),
        (PolyphasePool(groups=3), (5, 4, 2, 2), "with 3 groups of channels needs a multiple of them, got 4"),
        (
            ResidualPathways({"fc": FullyConnected(2, 3, 4, 2), "conv": CircularConv(2, 3)}),
            (5, 2, 4, 4),
            "must give the same shape, got [5, 3, 2, 2] by fc, [5, 3, 4, 4] by conv; let a PolyphasePool follow",
        ),
        (
            ResidualPathways(FullyConnected(2, 3, 4, 1), CircularConv(2, 3)),  # would broadcast
            (5, 2, 4, 4),
            "must give the same shape",
        ),
    ],
)
def test_features_that_do_not_fit(layer, shape, text):
    assert_refused(layer, torch.zeros(shape), says=text)


def test_descriptions():
    assert repr(FullyConnected(2, 3, 4, (2, 1))) == "FullyConnected(2, 3, grid=(4, 4), out_grid=(2, 1))"
    assert repr(SparseConv(2, 3)) == "SparseConv(2, 3, kernel_size=3, anchors=5)"
    assert "anchors=8, out_anchors=2" in repr(SparseFactoredFullyConnected(2, 3, 4, 2))
    assert repr(GroupConv(2, 3, "full")) == "GroupConv(2, 3, kind='full', kernel_size=3, group='p4')"
    assert repr(PolyphasePool()) == "PolyphasePool(norm='max', groups=1)"
    assert "scale=0.333333" in repr(ResidualPathways(nn.Identity(), nn.Identity(), nn.Identity()))
