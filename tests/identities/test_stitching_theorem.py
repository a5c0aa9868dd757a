"""Theorem 4.2 of Godfrey et al. (2022), planted: networks that differ by a symmetry are stitched without any loss."""

import functools

import pytest
import torch
import torchvision
from helpers import one_in, randomize_statistics
from torch import Tensor, nn

from lightning_sym.networks import (
    CIFARResNet,
    CIFARResNet18,
    CompactTransformer,
    LeNet5,
    MultiLayerPerceptron,
    MyrtleCNN,
    Network,
    TorchvisionNetwork,
    VisionTransformer,
)
from lightning_sym.stitching import CutNetwork, FeatureMoments, FixedMap, PlantedStitches, StitchedNetwork

EXACT = 1e-10  # of float64, relative to the largest logit; measured values are below 1e-13


class WithBuffer(Network):
    """Reads a buffer of its own, as well as of its layers, after the site."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.activation, self.last = nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 5)
        self.register_buffer("shift", torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.first(x))) + self.shift


class Untrained(MyrtleCNN):
    """A network whose batch norms have neither weight nor bias."""

    def __init__(self) -> None:
        super().__init__(2, image_size=8)
        for name, module in list(self.named_modules()):
            if isinstance(module, nn.BatchNorm2d):
                setattr(self, name, nn.BatchNorm2d(module.num_features, affine=False))


OURS = {
    "perceptron": (lambda: MultiLayerPerceptron([5, 4, 3], image_size=3), (1, 3, 3)),
    "perceptron tanh": (lambda: MultiLayerPerceptron([5, 4], image_size=3, activation="tanh"), (1, 3, 3)),
    "perceptron identity": (lambda: MultiLayerPerceptron([5, 4], image_size=3, activation="identity"), (1, 3, 3)),
    "lenet": (lambda: LeNet5(), (1, 28, 28)),
    "lenet tanh": (lambda: LeNet5(activation="tanh"), (1, 28, 28)),
    "lenet gelu": (lambda: LeNet5(activation="gelu"), (1, 28, 28)),
    "myrtle": (lambda: MyrtleCNN(2, image_size=8), (3, 8, 8)),
    "myrtle tanh": (lambda: MyrtleCNN(2, image_size=8, activation="tanh"), (3, 8, 8)),
    "myrtle without bn": (lambda: MyrtleCNN(2, batch_norm=False, image_size=8, activation="gelu"), (3, 8, 8)),
    "myrtle constant": (lambda: MyrtleCNN(3, constant_width=True, image_size=8), (3, 8, 8)),
    "myrtle affine-free": (Untrained, (3, 8, 8)),
    "resnet20": (lambda: CIFARResNet(20, width=2), (3, 8, 8)),
    "resnet20 B leaky": (lambda: CIFARResNet(20, width=2, shortcut="B", activation="leaky_relu(0.1)"), (3, 8, 8)),
    "resnet20 tanh": (lambda: CIFARResNet(20, width=2, activation="tanh"), (3, 8, 8)),
    "resnet18": (lambda: CIFARResNet18(width=2), (3, 8, 8)),
    "resnet18 gelu": (lambda: CIFARResNet18(width=2, activation="gelu"), (3, 8, 8)),
    "cct": (lambda: CompactTransformer(1, 8, variant="2/3x1", width=4), (1, 8, 8)),
    "vit": (lambda: VisionTransformer(1, 8, 5, 4, 8, 2, 2, pool="sequence"), (1, 8, 8)),
    "vit modern": (lambda: VisionTransformer(1, 8, 5, 4, 8, 1, 2, 1, 1, "rms", "rotary", "swiglu", layer_scale=0.5),
        (1, 8, 8)),
}  # fmt: skip
WRAPPED = {
    "torchvision resnet18": (lambda: Network.wrap(functools.partial(torchvision.models.resnet18, num_classes=10)),
        (3, 32, 32), 3),
    "mobilenet_v2": (lambda: TorchvisionNetwork("mobilenet_v2", image_size=32), (3, 32, 32), 2),
    "densenet": (lambda: Network.wrap(functools.partial(torchvision.models.DenseNet, 4, (2, 3, 2), num_init_features=6,
        bn_size=2, num_classes=10)), (3, 32, 32), 8),
    "squeezenet": (lambda: Network.wrap(torchvision.models.squeezenet1_1), (3, 32, 32), 4),
    "vit": (lambda: Network.wrap(functools.partial(small_vit, 0)), (3, 16, 16), 4),
}  # fmt: skip


# What others test too, more cheaply.
SLOW = {"resnet20 tanh", "resnet18 gelu", "mobilenet_v2", "squeezenet"}


def listed(cases: dict) -> list:
    return [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in cases]


def small_vit(seed: int) -> nn.Module:
    network = torchvision.models.VisionTransformer(16, 8, 2, 2, 12, 20, num_classes=10)
    nn.init.normal_(network.heads.head.weight)  # torchvision starts it at 0
    return network


def made(case, count: int = 10**6, **settings):
    make, shape = case[:2]
    torch.manual_seed(0)
    network = randomize_statistics(make()).double().eval()
    sites = network.sites()[:: max(1, len(network.sites()) // count)]
    images = torch.randn(3, *shape, dtype=torch.float64)
    return CutNetwork(network, sites, example=images, **settings), images


def planted_in(source: CutNetwork, images: Tensor, **settings):
    planted = PlantedStitches(source, generator=torch.Generator().manual_seed(1))
    return planted, CutNetwork(planted.network, source.sites, example=images, like=source, **settings)


def exact_stitch(source, target, planted, site, **settings) -> StitchedNetwork:
    given = iter([matrix for matrix in planted.matrices(site) if matrix is not None])
    stitched = StitchedNetwork(
        source, target, site, family=lambda port: FixedMap(port, next(given)), batch_norm="frozen", **settings
    )
    return stitched.double()


@torch.no_grad()
def error(stitched: nn.Module, images: Tensor, expected: Tensor) -> float:
    return float((stitched(images) - expected).abs().max() / expected.abs().max())


def check_theorem(source: CutNetwork, images: Tensor, **settings) -> None:
    with torch.no_grad():
        expected = source.network(images)
    planted, target = planted_in(source, images, **settings)
    assert error(planted.network, images, expected) < EXACT
    for site in source.sites:
        assert error(exact_stitch(source, target, planted, site), images, expected) < EXACT, site
        # The matrices are what takes one network's values to the other's.
        for matrix, crossing, x, y in zip(
            planted.matrices(site),
            source.crossings(site),
            source.values(images)[site],
            target.values(images)[site],
            strict=True,
        ):
            if matrix is not None:
                moved = (x.movedim(crossing.axis, -1) @ matrix.T).movedim(-1, crossing.axis)
                torch.testing.assert_close(moved, y, rtol=EXACT, atol=EXACT * max(1.0, float(y.abs().max())))
        # And the identity is not, so that the theorem is not empty; but of A with itself it is exact to the last bit.
        own = StitchedNetwork(source, source, site, family="identity", batch_norm="frozen").double()
        with torch.no_grad():
            assert torch.equal(own(images), expected), site


@pytest.mark.parametrize("case", one_in(3, listed(OURS), 1))
@pytest.mark.few(5)
def test_every_cut_of_our_architectures_is_exact(case):
    check_theorem(*made(OURS[case]))


@pytest.mark.parametrize("case", listed(WRAPPED))
@pytest.mark.long
def test_cuts_of_wrapped_architectures_are_exact(case):
    check_theorem(*made(WRAPPED[case], WRAPPED[case][2]))


@pytest.mark.slow
def test_cuts_of_densenet121_are_exact():
    make = functools.partial(torchvision.models.densenet121, num_classes=10)
    check_theorem(*made((lambda: Network.wrap(make), (3, 32, 32)), 8))


@pytest.mark.parametrize("case", ["perceptron", "myrtle"])
def test_the_identity_is_no_stitch_of_networks_that_differ(case):
    source, images = made(OURS[case])
    _, target = planted_in(source, images)
    with torch.no_grad():
        expected = source.network(images)
    for site in source.sites:
        plain = StitchedNetwork(source, target, site, family="identity", batch_norm="frozen").double()
        assert error(plain, images, expected) > 1e-3, site


@pytest.mark.parametrize("case", ["perceptron", "myrtle", "resnet20"])
@pytest.mark.few(3)
def test_cuts_before_the_activation_are_exact_too(case):
    check_theorem(*made(OURS[case], before=True), before=True)


def test_even_activations_take_signs_before_and_none_after():
    def make():
        return MultiLayerPerceptron([5, 4], image_size=3, activation="leaky_relu(-1)")  # the absolute value

    for before, signs in ((True, True), (False, False)):
        source, _ = made((make, (1, 3, 3)), before=before)
        assert [source.crossings(site)[0].group.signs for site in source.sites] == [signs, signs]
        assert all(source.crossings(site)[0].group.positive_scales for site in source.sites)
        check_theorem(*made((make, (1, 3, 3))))


def test_the_branch_alone_is_exact_at_block_ends_and_wrong_inside():
    source, images = made(OURS["resnet20"])
    planted, target = planted_in(source, images)
    with torch.no_grad():
        expected = source.network(images)
    inside = 0
    for site in source.sites:
        stitched = exact_stitch(source, target, planted, site, ports="branch")
        if len(source.crossings(site)) == 1:
            assert error(stitched, images, expected) < EXACT, site
        else:
            inside += 1
            assert error(stitched, images, expected) > 1e-2, site  # the skip connection is in the basis of A
    assert inside == 9


def test_buffers_of_the_network_itself_move_with_it():
    torch.manual_seed(0)
    images = torch.rand(3, 3)
    source = CutNetwork(WithBuffer(), example=images)
    assert source.to(torch.float64) is source
    images = images.double()
    values = source.values(images)["activation"]
    assert source.upper("activation").double()(values).dtype == torch.float64
    check_theorem(source, images)


# ---- maps that are fitted to features


@torch.no_grad()
def fitted(source, target, site, family, images) -> StitchedNetwork:
    stitched = StitchedNetwork(source, target, site, family=family, batch_norm="frozen").double()
    moments = [FeatureMoments(m.port.in_channels, m.port.out_channels) for m in stitched.stitching_maps]
    for part in images.split(50):
        stitched.add_moments(source.values(part)[site], target.values(part)[site], moments)
    for module, found in zip(stitched.stitching_maps, moments, strict=True):
        module.init_from_moments(found)
    stitched.set_mode("hard")
    return stitched


def wide(activation: str, architecture: str):
    if architecture == "perceptron":
        return lambda: MultiLayerPerceptron([6, 5], image_size=3, activation=activation), (1, 3, 3)
    return lambda: CIFARResNet(20, width=3, activation=activation), (3, 8, 8)


# 3e-7: the normal equations of least squares square the condition number.
@pytest.mark.parametrize(
    ("family", "tolerance"), [("group", EXACT), ("assignment", EXACT), ("softsort", EXACT), ("least_squares", 3e-7)]
)
@pytest.mark.parametrize(
    ("architecture", "activation"),
    [("perceptron", "relu"), ("perceptron", "tanh"), ("perceptron", "gelu"), ("resnet", "relu")],
)
@pytest.mark.long
def test_fitted_maps_find_what_was_planted(architecture, activation, family, tolerance):
    make, shape = wide(activation, architecture)
    torch.manual_seed(0)
    network = randomize_statistics(make()).double().eval()
    images = torch.randn(100, *shape, dtype=torch.float64)
    sites = network.sites()[:4]
    source = CutNetwork(network, sites, example=images)
    _, target = planted_in(source, images)
    with torch.no_grad():
        expected = network(images)
    for site in sites:
        if family == "softsort" and any(c.group.signs for c in source.crossings(site)):
            continue  # which has none
        stitched = fitted(source, target, site, family, images)
        assert error(stitched, images, expected) < tolerance, site
        with torch.no_grad():
            assert torch.equal(stitched(images).argmax(1), expected.argmax(1))  # penalty 0


@pytest.mark.parametrize("case", ["vit", "vit modern", "cct"])
def test_maps_of_the_group_find_what_was_planted_in_a_transformer(case):
    """At every site: heads with their matrices, hidden units, and the stream past them."""
    make, shape = OURS[case]
    torch.manual_seed(0)
    network = make().double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # norms and biases start at 1 and 0
    images = torch.randn(60, *shape, dtype=torch.float64)
    source = CutNetwork(network, example=images)
    planted, target = planted_in(source, images)
    kinds = set()
    for site in source.sites:
        stitched = fitted(source, target, site, "group", images)
        found = [module.matrix() for module in stitched.stitching_maps]
        for matrix, wanted in zip(found, [m for m in planted.matrices(site) if m is not None], strict=True):
            torch.testing.assert_close(matrix, wanted, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            assert error(stitched, images, network(images)) < EXACT, site
        parts = [part for module in stitched.stitching_maps for part in getattr(module, "parts", [module])]
        kinds |= {type(part).__name__ for part in parts}
    stream = {"vit": {"OnesFixingMap"}, "vit modern": {"OrthogonalMap"}, "cct": set()}[case]
    assert kinds == {"HeadMap", "GroupMap"} | stream
