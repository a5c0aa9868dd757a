import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from architectures import OURS
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.func import functional_call, stack_module_state, vmap

from lightning_sym.networks import (
    CIFARPreResNet,
    CIFARResNet,
    CIFARResNet18,
    CompactTransformer,
    LeNet5,
    LinearSumsResNet,
    MultiLayerPerceptron,
    MyrtleCNN,
    Network,
    ResidualCNN,
    TorchvisionNetwork,
    VisionTransformer,
    is_activation,
)
from lightning_sym.networks.transformer_parts import RotaryPositions, SelfAttention, StochasticDepth, rotary_angles


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def on_meta(make: Callable[..., Network], *arguments: Any, **options: Any) -> Network:
    with torch.device("meta"):
        return make(*arguments, **options)


@pytest.mark.parametrize(
    ("network", "parameters"),
    [
        (LeNet5(image_size=32), 61_706),
        (LeNet5(image_size=28), 61_706),
        (LeNet5(image_size=28, padding=0, num_classes=1), 43_661),
        (LeNet5(image_size=32, padding=2), 61_706 + 120 * 16 * (6 * 6 - 5 * 5)),
        (MyrtleCNN(), 1_557_066),
        (MyrtleCNN(batch_norm=False), 1_556_106),
        (MyrtleCNN(512, constant_width=True), 7_100_938),
        (MyrtleCNN(512, batch_norm=False, constant_width=True), 7_098_890),
        (CIFARResNet(20), 269_722),
        (CIFARResNet(32), 464_154),
        (CIFARResNet(44), 658_586),
        (CIFARResNet(56), 853_018),
        (CIFARPreResNet(), 272_282),
        (CIFARResNet18(), 11_173_962),
        (ResidualCNN(), 38_378),
        (MultiLayerPerceptron(), 784 * 512 + 512 + 2 * (512 * 512 + 512) + 5130),
        (MultiLayerPerceptron([2], image_size=1, num_classes=1, bias=False), 4),
        # Hassani et al. (2021): 0.284, 0.482, 3.33, 3.85, 3.76 and 22.36 million.
        (CompactTransformer(variant="2/3x2"), 283_723),
        (CompactTransformer(variant="4/3x2"), 482_123),
        (CompactTransformer(variant="6/3x2"), 3_326_923),
        (CompactTransformer(variant="7/3x2"), 3_853_259),
        (CompactTransformer(), 3_760_139),
        (on_meta(CompactTransformer, 3, 224, 1000, "14/7x2"), 22_367_273),
        # Their 3.168 and 22.29 million do not count the constants that stand for learned positions.
        (CompactTransformer(variant="6/3x1", positions="sinusoidal"), 3_168_267),
        (on_meta(CompactTransformer, 3, 224, 1000, "14/7x2", positions="sinusoidal"), 22_292_009),
        (VisionTransformer(qkv_bias=False, pool="class"), 3_716_874),  # ViT-Lite 7/4 of the same paper: 3.717 million
        # Dosovitskiy et al. (2021), as timm and torchvision count: ViT-Ti/16, S/16 and B/16.
        *(
            (on_meta(VisionTransformer, 3, 224, 1000, 16, width, 12, heads, mlp_ratio=4, pool="class"), parameters)
            for width, heads, parameters in ((192, 3, 5_717_416), (384, 6, 22_050_664), (768, 12, 86_567_656))
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_parameter_counts_are_the_published_ones(network: Network, parameters: int) -> None:
    assert count(network) == parameters


@pytest.mark.parametrize(
    ("network", "positions"),
    [
        (MyrtleCNN(width=2), [3, 6, 10, 14]),
        (MyrtleCNN(width=2, batch_norm=False), [2, 4, 7, 10]),
        (CIFARResNet(width=2), [3, 8, 11, 16, 19, 24, 27, 32, 35, 40, 43, 48, 51, 56, 59, 64, 67, 72, 75]),
        (CIFARResNet18(width=2), [3, 8, 11, 16, 19, 24, 27, 34, 37, 42, 45, 52, 55, 60, 63, 70, 73]),
    ],
    ids=["myrtle", "myrtle_no_bn", "resnet20", "resnet18"],
)
def test_activations_are_where_the_paper_counts_them(network: Network, positions: list[int]) -> None:
    found = [i for i, module in enumerate(network.modules()) if is_activation(module)]
    assert found == positions
    names = [name for name, _ in network.named_modules()]
    assert network.sites() == [names[i] for i in positions]


@pytest.mark.parametrize("size", [8, 9, 28, 32, 45, (8, 33)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (MyrtleCNN, {"width": 2}),
        (MyrtleCNN, {"width": 2, "batch_norm": False}),
        (CIFARResNet, {"width": 2}),
        (CIFARResNet, {"width": 3, "shortcut": "B"}),
        (CIFARResNet18, {"width": 1}),
        (CIFARPreResNet, {"depth": 8, "width": 1}),
        (MultiLayerPerceptron, {"widths": [3]}),
        (CompactTransformer, {"variant": "2/3x1", "width": 4}),
        (CompactTransformer, {"variant": "2/7x2", "width": 4, "positions": "sinusoidal"}),
        (VisionTransformer, {"patch_size": 1, "width": 4, "heads": 1, "depth": 1, "positions": "rotary"}),
    ],
)
@pytest.mark.few(4)
def test_shapes_for_many_image_sizes(
    cls: Any, arguments: dict[str, Any], channels: int, size: int | tuple[int, int]
) -> None:
    network = cls(in_channels=channels, image_size=size, num_classes=7, **arguments)
    height, width = (size, size) if isinstance(size, int) else size
    with torch.no_grad():
        assert network(torch.zeros(2, channels, height, width)).shape == (2, 7)


@pytest.mark.parametrize("pool", ["mean", "class", "sequence"])
@pytest.mark.parametrize("make", [CompactTransformer, VisionTransformer])
@pytest.mark.few(3)
def test_sites_of_transformers_are_tokens(make: Any, pool: str) -> None:
    network = (
        make(1, 8, 3, "2/3x2", 8) if make is CompactTransformer else make(1, 8, 3, 4, 8, 2, 2, mlp_ratio=1, pool=pool)
    )
    blocks = [site for site in network.sites() if site.startswith("blocks.")]
    assert [site for site in blocks if site.startswith("blocks.1")] == [
        *("blocks.1.attention.heads", "blocks.1.attention", "blocks.1.mlp.hidden", "blocks.1.mlp", "blocks.1")
    ]
    x, tokens = torch.randn(2, 1, 8, 8), 4 + (make is VisionTransformer and pool == "class")
    for site in ["embedding", *blocks]:
        values = network.eval().split(site)[0](x)
        # The stream goes past attention and feed-forward layers, and is all that there is between blocks.
        assert isinstance(values, tuple) == ("attention" in site or "mlp" in site)
        for value in values if isinstance(values, tuple) else [values]:
            assert value.shape == (2, tokens, 8)


def test_rotary_scores_depend_on_differences_of_positions_only() -> None:
    """Turned queries and keys: every score depends on rows and columns between the two tokens, and on nothing else."""
    angles = rotary_angles((4, 5), 8)
    turn = RotaryPositions(angles.double())
    torch.manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    scores = (turn(query.expand(1, 1, 20, 8)) @ turn(key.expand(1, 1, 20, 8)).mT).reshape(4, 5, 4, 5)
    torch.testing.assert_close(scores[1:, :, 1:, :], scores[:-1, :, :-1, :], rtol=0, atol=1e-6)
    torch.testing.assert_close(scores[:, 1:, :, 1:], scores[:, :-1, :, :-1], rtol=0, atol=1e-6)
    assert float(scores.std()) > 0.01
    assert not rotary_angles((4, 5), 8, extra=1)[0].any()


def test_shared_keys_are_those_of_neighbouring_queries() -> None:
    torch.manual_seed(0)
    one, two = SelfAttention(8, 4, 2), SelfAttention(8, 4, 4)
    state = one.state_dict()
    for name in ("key", "value"):
        for kind in ("weight", "bias"):
            shared = state[f"{name}.{kind}"]
            state[f"{name}.{kind}"] = shared.unflatten(0, (2, 2)).repeat_interleave(2, 0).flatten(0, 1)
    two.load_state_dict(state)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(one(x), two(x))


def test_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = SelfAttention(8, 2, 2).double(), nn.MultiheadAttention(8, 2, batch_first=True).double()
    state = ours.state_dict()
    theirs.load_state_dict(
        {f"in_proj_{kind}": torch.cat([state[f"{name}.{kind}"] for name in ("query", "key", "value")])
         for kind in ("weight", "bias")} | {f"out_proj.{kind}": state[f"output.{kind}"] for kind in ("weight", "bias")}
    )  # fmt: skip
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0], rtol=1e-10, atol=1e-12)


def test_stochastic_depth_keeps_the_mean_and_works_in_training_only() -> None:
    torch.manual_seed(0)
    drop, x = StochasticDepth(0.25), torch.randn(4000, 2, 3)
    kept = drop(x)
    gone = (kept == 0).all((1, 2))
    torch.testing.assert_close(kept[~gone], x[~gone] / 0.75)
    assert abs(float(gone.double().mean()) - 0.25) < 0.03
    assert torch.equal(drop.eval()(x), x)


def test_myrtle_feature_sizes_are_the_published_ones() -> None:
    network = MyrtleCNN()
    x = torch.zeros(1, 3, 32, 32)
    shapes = [tuple(network.split(site)[0](x).shape[1:]) for site in network.sites()]
    assert shapes == [(64, 32, 32), (128, 32, 32), (256, 16, 16), (512, 8, 8)]
    assert network.final_pool.kernel_size == (4, 4)
    assert MyrtleCNN(width=1, image_size=28).final_pool.kernel_size == (3, 3)


def test_option_a_keeps_even_pixels_between_zero_channels() -> None:
    shortcut = CIFARResNet(width=4).blocks[3].shortcut
    x = torch.randn(2, 4, 5, 6)
    y = shortcut(x)
    assert y.shape == (2, 8, 3, 3)
    assert torch.equal(y[:, 2:6], x[:, :, ::2, ::2])
    assert not y[:, :2].any()
    assert not y[:, 6:].any()


def test_resnet20_weights_are_kaiming_normal() -> None:
    weight = CIFARResNet().fresh(0).blocks[8].conv2.weight
    # 36,864 draws: their standard deviation is known to 0.4 %; uniform weights would have kurtosis 1.8.
    scaled = weight.double() / (2 / (64 * 9)) ** 0.5
    assert abs(scaled.std().item() - 1) < 0.02
    assert abs(scaled.pow(4).mean().item() - 3) < 0.3


@pytest.mark.parametrize("activation", ["relu", "leaky_relu(0.1)", "tanh", "gaussian", "polynomial(2)"])
def test_the_activation_is_used_everywhere_and_never_shared(activation: str) -> None:
    for network in (
        LeNet5(activation=activation),
        MyrtleCNN(width=1, activation=activation),
        CIFARResNet(width=1, activation=activation),
        CIFARResNet18(width=1, activation=activation),
        MultiLayerPerceptron([2, 2], image_size=2, activation=activation),
    ):
        kinds = {type(network.get_submodule(site)) for site in network.sites()}
        assert len(kinds) == 1
        assert (nn.ReLU in kinds) == (activation == "relu")


@given(
    widths=st.lists(st.integers(1, 6), max_size=4),
    classes=st.integers(1, 4),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_perceptrons_of_any_widths(widths: list[int], classes: int, size: tuple[int, int]) -> None:
    network = MultiLayerPerceptron(widths, image_size=size, num_classes=classes).double()
    sizes = [size[0] * size[1], *widths, classes]
    assert count(network) == sum((a + 1) * b for a, b in pairwise(sizes))
    assert len(network.sites()) == len(widths)
    x = torch.randn(3, 1, *size, dtype=torch.float64)
    assert network(x).shape == (3, classes)
    for site in network.sites():
        lower, upper = network.split(site)
        assert torch.equal(upper(lower(x)), network(x))


@pytest.mark.parametrize("case", OURS)
def test_members_run_stacked_under_vmap_as_they_do_alone(case: str) -> None:
    make, shape = OURS[case]
    network = make()
    torch.manual_seed(0)
    members = [network.fresh(seed).double().eval() for seed in range(2)]
    parameters, buffers = stack_module_state(members)  # type: ignore[arg-type]
    x = torch.randn(2, 3, *shape, dtype=torch.float64)

    def run(p: Any, b: Any, images: torch.Tensor) -> Any:
        return functional_call(network.eval(), (p, b), (images,))

    stacked = vmap(run)(parameters, buffers, x)
    alone = torch.stack([member(images) for member, images in zip(members, x, strict=True)])
    torch.testing.assert_close(stacked, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "refusal",
    [
        *(refused(LeNet5, **bad) for bad in ({"image_size": 30}, {"image_size": (28, 32)})),
        refused(LeNet5, padding=1, says="padding must be 0 or 2"),
        *(refused(MyrtleCNN, **bad) for bad in ({"image_size": 7}, {"image_size": (32, 4)}, {"image_size": "32"})),
        *(refused(MyrtleCNN, **bad) for bad in ({"width": 0}, {"width": 1.5}, {"in_channels": 0})),
        *(refused(MyrtleCNN, **bad) for bad in ({"num_classes": True}, {"image_size": (32, 32, 3)})),
        *(refused(kind, activation="rel") for kind in (MyrtleCNN, functools.partial(MultiLayerPerceptron, []))),
        *(refused(CIFARResNet, **bad) for bad in ({"depth": 18}, {"shortcut": "C"}, {"image_size": 0})),
        refused(CIFARResNet18, width=-1),
        *(refused(CompactTransformer, **bad) for bad in ({"width": 6, "heads": 4}, {"mlp_ratio": 0}, {"dropout": 1.0})),
        *(refused(CompactTransformer, variant=bad, says="7/3x1") for bad in ("7", "8/3x1", "7/3x0", 7)),
        *(refused(kind, positions="sine") for kind in (CompactTransformer, VisionTransformer)),
        *(
            refused(kind, width=3, heads=1, positions="sinusoidal", says="even width")
            for kind in (CompactTransformer, VisionTransformer)
        ),
        refused(VisionTransformer, image_size=(32, 30), says="32x30 are no multiples"),
        refused(VisionTransformer, width=24, heads=4, positions="rotary", says="a multiple of 4, got 6"),
        *(refused(VisionTransformer, **bad) for bad in ({"key_value_heads": 3}, {"norm": "l2"})),
        *(refused(VisionTransformer, **bad) for bad in ({"pool": "max"}, {"layer_scale": 0.0}, {"mlp_ratio": 0.001})),
        *(refused(VisionTransformer, **bad) for bad in ({"activation": "geglu"}, {"attention_dropout": -0.1})),
        *(refused(MultiLayerPerceptron, widths=bad, says="widths must be a list of integers") for bad in (8, "88")),
        refused(TorchvisionNetwork, "resnet81", says=["network 'resnet81'", "Did you mean 'resnet"]),
        refused(TorchvisionNetwork, "alexnet", image_size=16, says="alexnet cannot take images of shape"),
        refused(TorchvisionNetwork, "resnet18", num_classes=0),
        refused(LinearSumsResNet, "alexnet", says="alexnet has no residual blocks"),
    ],
)
def test_bad_arguments_fail_in_the_constructor(refusal: Callable[[], None]) -> None:
    refusal()


def test_torchvision_networks_take_other_channels_and_sizes() -> None:
    network = TorchvisionNetwork("squeezenet1_1", in_channels=1, image_size=32, num_classes=4).eval()
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 4)
    assert network.architecture == {
        "class_path": "lightning_sym.networks.TorchvisionNetwork",
        "init_args": {"model": "squeezenet1_1", "in_channels": 1, "image_size": 32, "num_classes": 4},
    }
    assert network.training is False
    assert not any(getattr(module, "inplace", False) for module in network.modules())


@pytest.mark.parametrize(("model", "calls"), [("resnet18", 2), ("wide_resnet50_2", 3)])
def test_residual_sums_of_torchvision_have_no_relu(model: str, calls: int) -> None:
    linear, whole = LinearSumsResNet(model, image_size=32).eval(), TorchvisionNetwork(model, image_size=32).eval()
    whole.load_state_dict(linear.state_dict())
    graph = fx.symbolic_trace(whole.module)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(whole(x), graph(x), rtol=0, atol=0)
    of_blocks = [node for node in graph.graph.nodes if str(node.target).startswith("layer") and ".relu" in node.target]
    for node in of_blocks[calls - 1 :: calls]:
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    graph.recompile()
    assert torch.equal(linear(x), graph(x))
    assert not torch.equal(linear(x), whole(x))
    sites = [site.removeprefix("module.") for site in linear.sites()]
    assert len(sites) == 1 + len(of_blocks) - len(of_blocks[calls - 1 :: calls])
