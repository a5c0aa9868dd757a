"""The sizes of docs/theory/tracing.md, 8.3, and torchvision's models without any hint."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from lightning_sym.networks import (
    CIFARPreResNet,
    CIFARResNet,
    CIFARResNet18,
    CompactTransformer,
    MultiLayerPerceptron,
    MyrtleCNN,
    VisionTransformer,
)
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.dimension import local_dimension
from lightning_sym.symmetry.trace import trace_symmetry

EXACT = 1e-10


def sizes(symmetry: Symmetry) -> Counter[int]:
    """Return how many axis groups of each size change places by themselves."""
    return Counter(g.size for g in symmetry.groups if g.movable and g.size > 1 and g.kind != "moves with its block")


def log10_factorials(counts: dict[int, int]) -> float:
    return sum(count * math.lgamma(size + 1) for size, count in counts.items()) / math.log(10)


# docs/theory/tracing.md, 8.3: sizes, decimal logarithm of the number of permutations, magnitudes, signs.
TABLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[int, int], float, int, int]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)), (2, 5),
        {8: 1, 7: 1}, 8.3, 15, 0),
    "myrtle": (lambda: MyrtleCNN(64, batch_norm=False), (1, 3, 32, 32), {64: 1, 128: 1, 256: 1, 512: 1}, 1978.2, 960,
        0),
    "myrtle_bn": (lambda: MyrtleCNN(64), (1, 3, 32, 32), {64: 1, 128: 1, 256: 1, 512: 1}, 1978.2, 1920, 960),
    "resnet20_a": (lambda: CIFARResNet(), (1, 3, 32, 32), {16: 5, 32: 4, 64: 3}, 475.6, 688 + 336 + 64, 688),
    "resnet20_b": (lambda: CIFARResNet(shortcut="B"), (1, 3, 32, 32), {16: 4, 32: 4, 64: 4}, 551.4, 784 + 336 + 112,
        784),
    # Of each channel: a scale before and after each batch norm within a branch; one in a stream, one after each norm.
    "preresnet20": (lambda: CIFARPreResNet(), (1, 3, 32, 32), {16: 4, 32: 4, 64: 4}, 551.4,
        3 * 2 * (16 + 32 + 64) + 5 * 16 + 4 * (32 + 64), 448),
    "cifar_resnet18": (lambda: CIFARResNet18(), (1, 3, 32, 32), {64: 3, 128: 3, 256: 3, 512: 3}, 5934.5, 7680, 4800),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.few(5)
def test_sizes_of_the_theory(name: str) -> None:
    make, shape, expected, log10, scales, signs = TABLE[name]
    torch.manual_seed(0)
    network = make().eval()
    symmetry = trace_symmetry(network, torch.randn(shape))
    assert symmetry.worst_error <= EXACT
    assert sizes(symmetry) == Counter(expected)
    assert len(symmetry.groups) == sum(expected.values())
    assert round(symmetry.log10_permutations, 1) == log10
    assert symmetry.log10_permutations == pytest.approx(log10_factorials(expected), rel=1e-9)
    # Where two batch norms meet in a sum, one of their biases is taken off the other.
    shifts = {"resnet20_b": 32 + 64, "cifar_resnet18": 128 + 256 + 512}.get(name, 0)
    assert (symmetry.scales, symmetry.signs, symmetry.shifts) == (scales, signs, shifts)
    assert symmetry.dimension == scales + shifts
    assert symmetry.log_order == pytest.approx(log10_factorials(expected) * math.log(10) + signs * math.log(2))
    assert not symmetry.notes


def test_perceptron_of_the_matching_recipe() -> None:
    symmetry = trace_symmetry(MultiLayerPerceptron([512, 512, 512]), torch.randn(1, 1, 28, 28), check=False)
    assert sizes(symmetry) == Counter({512: 3})
    assert symmetry.dimension == 1536


# One block of width 8, two heads of 4 channels, 14 outputs, four tokens of 4x4 pixels. By case: options, and in sums
# matrices on heads and gains of norms, then rotations of the stream, then shifts. These are: of the block; embeddings
# against one another, and the means of what writes them; the last norm and the rows of the head.
WITH_LAYER_NORMS = 2 * 32 + 3 * 8 + 7 * 6 // 2
OUTSIDE = 8 + (16 + 1 + 4) - 1 + 8 + 14
TRANSFORMERS: dict[str, tuple[dict[str, Any], int]] = {
    "usual": ({}, WITH_LAYER_NORMS + (8 * 8 + 2 * 6 + 2) + OUTSIDE),
    # The score reads the last norm, too, and a softmax the scores.
    "sequence": ({"pool": "sequence"}, WITH_LAYER_NORMS + (8 * 8 + 2 * 6 + 2) + OUTSIDE + 2),
    # Scales of up against down, and the gate's rows and biases.
    "gated": ({"activation": "swiglu"}, WITH_LAYER_NORMS + (8 * 8 + 3 * 6 + 2) + OUTSIDE + 6),
    "layer scale": ({"layer_scale": 0.5}, WITH_LAYER_NORMS + (8 * 8 + 2 * 6 + 2) + OUTSIDE + 2 * 8),
    # Shifts: biases of keys and values, patches against positions.
    "rms": ({"norm": "rms"}, 2 * 32 + 3 * 8 + 8 * 7 // 2 + 2 * 8 + 8),
    # One matrix each for the shared head of keys and values, whose biases are as wide.
    "shared keys": ({"key_value_heads": 1}, WITH_LAYER_NORMS - 32 + (8 * 8 - 2 * 8 + 2 * 6 + 2) + OUTSIDE),
    # In place of matrices on queries and keys, a complex number per plane of each head; keys' biases are seen, and
    # there are no positions to add.
    "rotary": ({"positions": "rotary"}, WITH_LAYER_NORMS - 32 + 2 * 2 * 2 + (7 * 8 + 2 * 6 + 2) + OUTSIDE - 8 - 4 + 1),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.long
def test_vision_transformers_have_their_whole_group(name: str) -> None:
    torch.manual_seed(0)
    options, expected = TRANSFORMERS[name]
    network = VisionTransformer(1, 8, 14, 4, 8, 1, 2, mlp_ratio=0.75, **options).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    symmetry = trace_symmetry(network, torch.randn(2, 1, 8, 8, dtype=torch.float64))
    found = local_dimension(symmetry, network, torch.randn(100, 1, 8, 8, dtype=torch.float64))
    assert symmetry.worst_error < EXACT
    assert found.nullity == expected
    assert found.gap > 1e6
    assert symmetry.dimension == expected


def test_dimension_of_a_compact_transformer_is_the_nullity_of_its_jacobian() -> None:
    """Queries, keys and values read a layer norm and have no biases: rows of two of them are free, and norms tilt."""
    torch.manual_seed(0)
    network = CompactTransformer(1, 8, 14, "2/3x1", 4, mlp_ratio=1.5).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    symmetry = trace_symmetry(network, torch.randn(2, 1, 8, 8, dtype=torch.float64))
    found = local_dimension(symmetry, network, torch.randn(100, 1, 8, 8, dtype=torch.float64), tolerance=1e-11)
    assert found.gap > 1e3
    assert found.excess == 0


@dataclass
class Model:
    """A model of torchvision and its group."""

    # how many axis groups of each size change places; None where only their number is stated
    sizes: dict[int, int] | None
    groups: int  # how many axis groups change places
    log10: float | None  # decimal logarithm of the number of permutations; None: the factorials of the sizes
    scales: int  # free magnitudes
    signs: int  # free signs
    shifts: int = 0  # dimension of the shifts
    dense: int = 0  # dimension of the dense cells and of those between gains, less their magnitudes
    rotations: tuple[int, ...] = ()  # dimensions of the spaces in which streams are rotated
    notes: int = 0  # how many notes say what limits the group
    tilts: int = 0  # dimension of the tilts of layer norms
    image: int = 32  # side of the example image
    options: tuple[tuple[str, Any], ...] = ()  # for torchvision's function


# In the sums: in front of batch norms (both), then behind them or at ReLUs (magnitudes), then in streams.
# A stream without activation has signs, too.
MODELS: dict[str, Model] = {
    "resnet18": Model({64: 3, 128: 3, 256: 3, 512: 3}, 12, None, 4800 + 1920 + 960, 4800, shifts=896),
    # Two inner groups for each of 16 blocks, the first convolution, four streams.
    "resnet50": Model({64: 7, 128: 8, 256: 13, 512: 7, 1024: 1, 2048: 1}, 37, None,
        26560 + 2 * (3 * 64 + 4 * 128 + 6 * 256 + 3 * 512) + 64 + 3840, 26560, shifts=3840),
    "vgg11_bn": Model({64: 1, 128: 1, 256: 2, 512: 4, 4096: 2}, 10, None, 2 * 2752 + 2 * 4096, 2752, shifts=2752),
    # Each norm in front of a convolution: 120 groups, of which 58 are the layers' new channels.
    "densenet121": Model({32: 58, 64: 1, 128: 59, 256: 1, 512: 1}, 120, None, 52064, 10240),
    "squeezenet1_1": Model({64: 7, 16: 2, 128: 4, 32: 2, 48: 2, 192: 4, 256: 4}, 25, None,
        64 + 2 * 9 * (16 + 32 + 48 + 64), 0, image=64),
    "googlenet": Model(None, 57, None, 2 * 7280, 7280, notes=1, options=(("init_weights", False),)),
    # The first depthwise convolution has the first convolution's channels; 16 expansions, 7 streams, the last layer.
    "mobilenet_v2": Model({32: 2, 16: 1, 96: 2, 24: 1, 144: 2, 192: 3, 64: 1, 384: 4, 576: 3, 160: 1, 960: 3, 320: 1,
        1280: 1}, 25, None, 17056 + 712, 17056 + 712,
        shifts=16 + 2 * 24 + 3 * 32 + 4 * 64 + 3 * 96 + 3 * 160 + 320, dense=142456),
    # Norms 6056, streams 16 + 24 + 40 + 48 + 96, ReLUs 16 + 2 x 72 + 2 x 88, and 592 squeezed channels. Shifts: what
    # the norms at the ends of the blocks add, and the next norm's running mean takes off.
    "mobilenet_v3_small": Model({8: 1, 16: 2, 24: 2, 32: 1, 40: 2, 48: 1, 64: 2, 72: 2, 88: 1, 96: 2, 120: 1, 144: 3,
        240: 2, 288: 1, 576: 3, 1024: 1}, 27, None, 6056 + 224 + 336 + 592, 6056 + 224,
        shifts=16 + 2 * 24 + 3 * 40 + 2 * 48 + 3 * 96, dense=13728),
    # SiLU everywhere: magnitudes in front of norms and in the seven streams only.
    "efficientnet_b0": Model(None, 40, None, 21008 + 784, 21008 + 784,
        shifts=16 + 2 * 24 + 2 * 40 + 3 * 80 + 3 * 112 + 4 * 192 + 320, dense=159856),
    # Per block: gamma of the norm, layer scale, and one sign in front of the norm. Streams meet norms: one sign each.
    # Shifts: also each place of the kernels of 2 x 2 that read a norm.
    "convnext_tiny": Model({96: 1, 192: 1, 384: 4, 768: 4, 1536: 9, 3072: 3}, 22, None, 2 * 6624 + 672 + 768,
        2 * 6624 + 672 + 768 + 18 + 4 + 1, shifts=40391 + 1000 + 4 * (192 + 384 + 768), image=64),
    # Squeezed channels 8 + 12 + 3 x 26 + 6 x 52 + 5 x 110. Two groups of w channels per block, in w / 8 groups of 8.
    "regnet_y_400mf": Model(None, 53, log10_factorials({32: 1, 48: 1, 104: 1, 208: 1, 440: 1, 12: 1, 52: 6, 110: 5,
        26: 3 + 6, 55: 6, 6: 1, 13: 3, 8: 1 + 2 * (6 + 3 * 13 + 6 * 26 + 6 * 55)}), 13576 + 32 + 2 * 4248 + 800 + 960,
        13576, shifts=48 + 104 + 208 + 440),
    # Per channel of the 13 plain branches six magnitudes and four signs; the three wide blocks' first branches 2 + 2.
    "shufflenet_v2_x0_5": Model(None, 80, 4884.77, 696 * 6 + 168 * 10 + 48 + 2048, 696 * 4 + 168 * 7 + 24 + 1024,
        shifts=696 + 168 * 2),
    # 25 norms; 12 layers with 12 heads of 64; one sign of the stream; rotations. Shifts: docs/theory/translations.md;
    # patches, class token and 5 positions against one another and to their means; the last norm and the head.
    "vit_b_16": Model(None, 37, log10_factorials({3072: 12, 12: 12}), 25 * 768 + 12 * 1536, 25 * 768 + 12 * 1536 + 1,
        shifts=12 * (8 * 768 + 2 * 3072 + 2) + 2 * 768 + (768 + 1 + 1 + 5) - 2 + 768 + 1000,
        dense=12 * 2 * 12 * 64 * 63, rotations=(767,), options=(("image_size", 32),)),
    # Norms of 12 blocks, of three mergings (of four channels each) and the last; heads of 32; stem and four streams, of
    # which all but the first, into which a norm writes, are rotated. Mergings have no biases behind their norms.
    "swin_t": Model(None, 40, log10_factorials({96: 1, 384: 2, 768: 2, 1536: 6, 3072: 2, 3: 2, 6: 2, 12: 6, 24: 2}),
        8832 + 2688 + 768 + 8832, 8832 + 2688 + 768 + 8832 + 5, shifts=42011, dense=4416 * 2 * 31,
        rotations=(191, 383, 767), tilts=4 * (96 + 192 + 384), notes=1),
}  # fmt: skip
# Three with 28 to 130 million weights, twice in float64, and those whose kinds of layers others have, too.
SLOW = {"vgg11_bn", "vit_b_16", "swin_t", "densenet121", "efficientnet_b0", "mobilenet_v2", "regnet_y_400mf"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MODELS]
)
@pytest.mark.long
def test_torchvision(name: str) -> None:
    model = MODELS[name]
    torch.manual_seed(0)
    network = getattr(torchvision.models, name)(weights=None, **dict(model.options)).eval()
    x = torch.randn(1, 3, model.image, model.image)
    # Tracing runs the self-test on perturbed weights: symmetry.check(network, x, perturb=0.3).
    if name == "googlenet":
        with pytest.warns(UserWarning, match=re.escape("aux1.conv.conv.weight")):
            symmetry = trace_symmetry(network, x)
    else:
        symmetry = trace_symmetry(network, x)
    assert len(symmetry.notes) == model.notes
    assert symmetry.worst_error <= EXACT
    assert sizes(symmetry).total() == model.groups
    if model.sizes is not None:
        assert sizes(symmetry) == Counter(model.sizes)
    if model.log10 is None:
        assert symmetry.log10_permutations == pytest.approx(log10_factorials(sizes(symmetry)), rel=1e-9)
    else:
        assert symmetry.log10_permutations == pytest.approx(model.log10, abs=5e-3)
    assert (symmetry.scales, symmetry.signs, symmetry.shifts) == (model.scales, model.signs, model.shifts)
    turning = sum(size * (size - 1) // 2 for size in model.rotations)
    assert symmetry.dimension == model.scales + model.shifts + model.dense + turning + model.tilts
