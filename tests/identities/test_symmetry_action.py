"""Random elements keep the function, for one small network per operation and for every architecture of ours.

For each network the whole group is stated, too: how many units change places, how many magnitudes and signs are free.
The numbers are derived by hand from the table of docs/theory/intertwiners.md, 2.2.
"""

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import Program, buffer, of, one_in, parameter, sequential
from symmetry_family_cases import A, B, C, L, usual_parts
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.convnext import CNBlock
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer
from torchvision.ops import SqueezeExcitation, StochasticDepth

from lightning_sym.networks import (
    CIFARResNet,
    CIFARResNet18,
    LeNet5,
    MultiLayerPerceptron,
    MyrtleCNN,
    Network,
    TorchvisionNetwork,
)
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.trace import trace_symmetry

EXACT = 1e-10
VECTOR, SEQUENCE, IMAGE = (2, 5), (2, 5, 5), (2, 3, 8, 8)


@dataclass
class Case:
    """A network and its group."""

    network: Callable[[], nn.Module]  # makes the network
    shape: Any  # the example input's shape; or a function that makes the example
    sizes: Sequence[int]  # sizes of the axis groups whose units change places
    scales: int  # free magnitudes, those inside dense cells included
    signs: int  # the same for signs
    # the numbers whose product is the number of permutations; by default the factorials of `sizes`
    order: Sequence[int] | None = None
    dense: Sequence[int] = ()  # sizes of the dense cells
    shifts: int = 0  # free shifts in front of batch norms
    note: str | None = None  # what one of the notes says; None: nothing limits this group
    # dimensions of the spaces in which streams are rotated: of their units, one less behind a layer norm. The
    # units' permutations and signs are among them: `order` leaves them out.
    rotations: Sequence[int] = ()
    signs_in_rotations: int = 0  # how many of the signs are
    gained: Sequence[int] = ()  # sizes of the cells that matrices mix between gains
    dimension: int = field(init=False)
    log10: float = field(init=False)

    def __post_init__(self) -> None:
        order = [math.factorial(size) for size in self.sizes] if self.order is None else self.order
        self.log10 = math.log10(math.prod(order))
        self.dimension = self.scales + sum(size * size - size for size in (*self.dense, *self.gained)) + self.shifts
        self.dimension += sum(size * (size - 1) // 2 for size in self.rotations)


f = math.factorial


def functional(
    function: Callable[..., Any],
    shape: Any,
    *args: Any,
    dense: Sequence[int] = (),
    shifts: int = 0,
    note: str | None = None,
    rotations: Sequence[int] = (),
    signs_in_rotations: int = 0,
    gained: Sequence[int] = (),
    **parts: Any,
) -> Case:
    """Return a case of a program; further keywords make its parts, besides the usual ``a`` and ``b``."""
    parts = usual_parts(function, A, B) | parts
    return Case(
        lambda: Program(function, parts), shape, *args, dense=dense, shifts=shifts, note=note, rotations=rotations,
        signs_in_rotations=signs_in_rotations, gained=gained,
    )  # fmt: skip


RELU, TANH, FLAT = nn.ReLU, nn.Tanh, nn.Flatten
LINEAR_CASES = {
    "mlp_relu": Case(sequential(of(L, 5, 8), RELU, of(L, 8, 7), RELU, of(L, 7, 3)), VECTOR, [8, 7], 15, 0),
    "mlp_tanh": Case(sequential(of(L, 5, 8), TANH, of(L, 8, 7), TANH, of(L, 7, 3)), VECTOR, [8, 7], 0, 15),
    "mlp_gelu": Case(sequential(of(L, 5, 8), nn.GELU, of(L, 8, 7), nn.GELU, of(L, 7, 3)), VECTOR, [8, 7], 0, 0),
    "mlp_linear": Case(sequential(of(L, 5, 8), of(L, 8, 7), nn.Identity, of(L, 7, 3)), VECTOR, [8, 7], 15, 15, [1],
        dense=[8, 7]),
    "no_bias": Case(sequential(of(L, 5, 8, bias=False), RELU, of(L, 8, 7, bias=False), RELU, of(L, 7, 3, bias=False)),
        VECTOR, [8, 7], 15, 0),
    "shared_module": functional(lambda s, x: s.c(torch.relu(s.b(torch.relu(s.b(torch.relu(s.a(x))))))), VECTOR, [6], 6,
        0, a=of(L, 5, 6), b=of(L, 6, 6), c=of(L, 6, 2)),
    "functional_forms": functional(lambda s, x: F.linear(F.leaky_relu(F.linear(x, s.a, s.b), 0.2), s.c), VECTOR, [8], 8,
        0, a=parameter(8, 5), b=parameter(8), c=parameter(2, 8)),
    "functional_normal": functional(lambda s, x: F.conv2d(F.max_pool2d(F.relu(F.batch_norm(F.conv2d(x, s.a), s.m, s.v,
        s.g, s.b)), 2), s.c), IMAGE, [6], 12, 6, a=parameter(6, 3, 3, 3), m=buffer(6), v=lambda: torch.rand(6) + 0.5,
        g=parameter(6), b=parameter(6), c=parameter(2, 6, 1, 1)),
    "transposed_weight": functional(lambda s, x: F.linear(torch.relu(F.linear(x, s.a.t())), s.b.mT), VECTOR, [8], 8, 0,
        a=parameter(5, 8), b=parameter(8, 2)),
    "matmul": functional(lambda s, x: torch.relu(x @ s.a + s.b) @ s.c, VECTOR, [8], 8, 0, a=parameter(5, 8),
        b=parameter(8), c=parameter(8, 2)),
    # A vector in front of a matrix, and behind one; whatever acts between two factors is undone by the other.
    "vector_behind": functional(lambda s, x: torch.relu(s.a(x)) @ s.v, VECTOR, [8], 8, 0, v=parameter(8)),
    "vector_in_front": functional(lambda s, x: s.b(torch.relu(s.a(x) + s.v @ s.w)), VECTOR, [8, 4], 12, 4, [f(8)],
        dense=[4], v=parameter(4), w=parameter(4, 8)),
    "vector_in_front_of_matrices": functional(lambda s, x: s.b(torch.relu(s.a(x) + s.v @ s.w)), SEQUENCE, [8, 4], 12, 4,
        [f(8)], dense=[4], v=parameter(4), w=parameter(5, 4, 8)),
    "vector_times_vector": functional(lambda s, x: s.b(torch.relu(s.a(x)) * (s.v @ s.w)), VECTOR, [8, 4], 13, 5, [f(8)],
        dense=[4], v=parameter(4), w=parameter(4)),
    "einsum": functional(lambda s, x: torch.einsum("bi,oi->bo", torch.relu(torch.einsum("bi,oi->bo", x, s.a)), s.b),
        VECTOR, [8], 8, 0, a=parameter(8, 5), b=parameter(2, 8)),
    # Encoder and decoder share a weight: scales would have to be their own inverses, and ReLU admits no signs.
    "tied_autoencoder": functional(lambda s, x: F.linear(torch.relu(F.linear(x, s.a)), s.a.t()), VECTOR, [8], 0, 0,
        a=parameter(8, 5)),
    "tied_autoencoder_tanh": functional(lambda s, x: F.linear(torch.tanh(F.linear(x, s.a)), s.a.t()), VECTOR, [8], 0, 8,
        a=parameter(8, 5)),
    "embedding": Case(sequential(of(nn.Embedding, 10, 6), FLAT, of(L, 18, 5), RELU, of(L, 5, 2)),
        lambda: torch.arange(6).reshape(2, 3), [6, 5], 11, 6, [f(5)], dense=[6]),
    # A residual stream between an embedding and its transpose: signed permutations.
    "tied_embedding": functional(lambda s, i: (lambda h: (h + s.d(torch.relu(s.u(h)))) @ s.e.weight.t())(s.e(i)),
        lambda: torch.arange(6).reshape(2, 3), [6, 8], 8, 6, [f(8)], rotations=[6], signs_in_rotations=6,
        e=of(nn.Embedding, 10, 6), u=of(L, 6, 8), d=of(L, 8, 6)),
    "width_1": Case(sequential(of(L, 5, 1), RELU, of(L, 1, 2)), VECTOR, [], 1, 0),
    "width_1_conv": Case(sequential(of(C, 3, 1, 3), RELU, FLAT, of(L, 36, 4), RELU, of(L, 4, 2)), IMAGE, [4], 5, 0),
    "batch_1": Case(sequential(of(L, 5, 8), RELU, of(L, 8, 3)), (1, 5), [8], 8, 0),
    "no_batch_axis": Case(sequential(of(L, 5, 8), RELU, of(L, 8, 3)), (5,), [8], 8, 0),
    "log_softmax_head": Case(sequential(of(L, 5, 8), RELU, of(L, 8, 3), of(nn.LogSoftmax, -1)), VECTOR, [8], 8, 0),
    "dropout": Case(sequential(of(L, 5, 8), RELU, nn.Dropout, of(L, 8, 7), nn.AlphaDropout, of(L, 7, 2)), VECTOR,
        [8, 7], 15, 7, [f(8)], dense=[7]),
    "bilinear_two_inputs": functional(lambda s, x, y: s.c(torch.relu(s.a(x)) * s.b(y)),
        lambda: (torch.randn(2, 5), torch.randn(2, 4)), [8], 16, 8, b=of(L, 4, 8), c=of(L, 8, 2)),
}  # fmt: skip

CONVOLUTION_CASES = {
    "conv1d": Case(sequential(of(nn.Conv1d, 3, 8, 3), of(nn.BatchNorm1d, 8), nn.LeakyReLU, of(nn.MaxPool1d, 2),
        of(nn.Conv1d, 8, 4, 1), FLAT, of(L, 12, 2)), (2, 3, 8), [8, 4], 20, 12, [f(8)], dense=[4], shifts=8),
    "conv3d": Case(sequential(of(nn.Conv3d, 3, 6, 2), RELU, of(nn.MaxPool3d, 2), of(nn.Conv3d, 6, 4, 1), nn.ELU,
        of(nn.AdaptiveAvgPool3d, 1), FLAT, of(L, 4, 2)), (2, 3, 5, 5, 5), [6, 4], 6, 0),
    "linear_conv": Case(sequential(of(C, 3, 4, 3), of(nn.AvgPool2d, 2), of(C, 4, 2, 1), FLAT), IMAGE, [4], 4, 4, [1],
        dense=[4]),
    # Depthwise: the permutation of the input, scales of its own; ReLU6 leaves those in front of the norm.
    "depthwise": Case(sequential(of(C, 3, 8, 3, padding=1), of(nn.BatchNorm2d, 8), RELU,
        of(C, 8, 8, 3, groups=8, padding=1), of(nn.BatchNorm2d, 8), nn.ReLU6, of(C, 8, 4, 1), RELU,
        of(nn.AdaptiveAvgPool2d, 1), FLAT, of(L, 4, 2)), IMAGE, [8, 4], 28, 16, shifts=16),
    # The bias is read behind both uses: one scale for each channel.
    "depthwise_used_twice": functional(lambda s, x: s.c(F.relu(s.g(F.relu(s.g(s.a(x)))))), IMAGE, [4], 4, 0,
        a=of(C, 3, 4, 1), g=of(C, 4, 4, 1, groups=4), c=of(C, 4, 2, 1)),
    "grouped_used_twice": functional(lambda s, x: s.c(F.relu(s.g(F.relu(s.g(s.a(x)))))), IMAGE, [4], 4, 0, [2**2 * 2],
        a=of(C, 3, 4, 1), g=of(C, 4, 4, 1, groups=2), c=of(C, 4, 2, 1)),
    "depth_multiplier": Case(sequential(of(C, 3, 4, 3), RELU, of(C, 4, 8, 3, groups=4), RELU, of(C, 8, 2, 1), FLAT),
        IMAGE, [4, 8], 12, 0, [f(4), 2**4]),
    "grouped": Case(sequential(of(C, 3, 8, 3), RELU, of(C, 8, 12, 3, groups=4), RELU, of(C, 12, 2, 1), FLAT), IMAGE,
        [8, 12], 20, 0, [f(4), f(2) ** 4, f(3) ** 4]),
    "grouped_twice": Case(sequential(of(C, 3, 8, 3), RELU, of(C, 8, 12, 1, groups=4), RELU, of(C, 12, 8, 1, groups=4),
        RELU, of(C, 8, 2, 1), FLAT), IMAGE, [8, 12, 8], 28, 0, [f(4), f(2) ** 4, f(3) ** 4, f(2) ** 4]),
    "transposed": Case(sequential(of(C, 3, 8, 3), RELU, of(nn.ConvTranspose2d, 8, 6, 3, stride=2), RELU, of(C, 6, 2, 1),
        FLAT), IMAGE, [8, 6], 14, 0),
    "transposed_1d": Case(sequential(of(nn.Conv1d, 3, 8, 3), RELU, of(nn.ConvTranspose1d, 8, 6, 3), RELU,
        of(nn.Conv1d, 6, 2, 1)), (2, 3, 8), [8, 6], 14, 0),
    "transposed_grouped": Case(sequential(of(C, 3, 8, 3), RELU, of(nn.ConvTranspose2d, 8, 12, 3, stride=2, groups=4),
        RELU, of(C, 12, 2, 1), FLAT), IMAGE, [8, 12], 20, 0, [f(4), f(2) ** 4, f(3) ** 4]),
    "channel_shuffle": Case(sequential(of(C, 3, 8, 3), RELU, of(nn.ChannelShuffle, 2), of(C, 8, 8, 1, groups=2), RELU,
        of(C, 8, 2, 1), FLAT), IMAGE, [8, 8], 16, 0, [2, f(4) ** 2, f(4) ** 2]),
    "upsample": Case(sequential(of(C, 3, 8, 3), RELU, of(nn.Upsample, scale_factor=2, mode="bilinear"), of(C, 8, 4, 1),
        RELU, of(nn.Upsample, scale_factor=2), of(C, 4, 2, 1), FLAT), IMAGE, [8, 4], 12, 0),
    "upsample_linear": Case(sequential(of(C, 3, 4, 3), of(nn.Upsample, scale_factor=2, mode="bilinear"), of(C, 4, 2, 1),
        FLAT), IMAGE, [4], 4, 4, [1], dense=[4]),
    "flatten_max": Case(sequential(of(C, 3, 8, 3), TANH, of(nn.MaxPool2d, 2), FLAT, of(L, 72, 7), TANH, of(L, 7, 2)),
        IMAGE, [8, 7], 0, 7),
    "flatten_mean": Case(sequential(of(C, 3, 8, 3), TANH, of(nn.AvgPool2d, 2), FLAT, of(L, 72, 7), TANH, of(L, 7, 2)),
        IMAGE, [8, 7], 0, 15),
    "spatial_1x1_batch_1": Case(sequential(of(C, 3, 8, 3, padding=1), RELU, of(C, 8, 4, 1), RELU, FLAT, of(L, 4, 2)),
        (1, 3, 1, 1), [8, 4], 12, 0),
    "spatial_1x1_batch_norm": Case(sequential(of(C, 3, 8, 3, padding=1), of(nn.BatchNorm2d, 8), RELU,
        of(nn.AdaptiveAvgPool2d, 1), FLAT, of(L, 8, 2)), (1, 3, 1, 1), [8], 16, 8, shifts=8),
    "pad_zero": Case(sequential(of(C, 3, 4, 3), RELU, of(nn.ZeroPad2d, 1), of(C, 4, 2, 3)), IMAGE, [4], 4, 0),
    "pad_one": Case(sequential(of(C, 3, 4, 3), RELU, of(nn.ConstantPad2d, 1, 1.0), of(C, 4, 2, 3)), IMAGE, [4], 0, 0),
    "pad_reflect": Case(sequential(of(C, 3, 4, 3, padding=1, padding_mode="reflect"), RELU, of(nn.ReplicationPad2d, 1),
        of(C, 4, 2, 3)), IMAGE, [4], 4, 0),
    "pad_circular": Case(sequential(of(C, 3, 4, 3), RELU, of(C, 4, 2, 3, padding=1, padding_mode="circular")), IMAGE,
        [4], 4, 0),
    "roll_and_flip": functional(lambda s, x: s.b(torch.roll(torch.relu(s.a(x)), (2, -1), (2, 3)).flip(3)), IMAGE, [6],
        6, 0, a=of(C, 3, 6, 3), b=of(C, 6, 2, 1)),
    "unfold": functional(lambda s, x: s.b(F.unfold(torch.relu(s.a(x)), 2, stride=2).mT), IMAGE, [6], 6, 0,
        a=of(C, 3, 6, 3), b=of(L, 24, 2)),
    "channels_of_a_linear_layer": functional(lambda s, x: s.b(torch.relu(s.a(x)).view(-1, 2, 3, 3)), VECTOR, [2], 2, 0,
        a=of(L, 5, 18), b=of(nn.ConvTranspose2d, 2, 3, 2)),
    "matrix_of_gains": functional(lambda s, x: s.b(torch.relu(s.a(x)) * s.g.flatten()), VECTOR, [8], 16, 8,
        g=parameter(2, 4)),
    "messages": functional(lambda s, x: s.b(torch.zeros(4, 8).to(x).index_add(0, x[:, 0].abs().long() % 4,
        torch.relu(s.a(x)))), VECTOR, [8], 8, 0),
    # Sub-pixels are not interchangeable, and only whole blocks of four can move.
    "pixel_shuffle": Case(sequential(of(C, 3, 8, 3), RELU, of(nn.PixelShuffle, 2), of(C, 2, 4, 1), RELU, of(C, 4, 2, 1),
        FLAT), IMAGE, [2, 4], 6, 0),
}  # fmt: skip

NORM_CASES = {
    "batch_norm_mlp": Case(sequential(of(L, 5, 8), of(nn.BatchNorm1d, 8), RELU, of(L, 8, 7), of(nn.BatchNorm1d, 7),
        TANH, of(L, 7, 3)), VECTOR, [8, 7], 23, 22, shifts=15),
    "batch_norm_no_bias": Case(sequential(of(L, 5, 8, bias=False), of(nn.BatchNorm1d, 8), RELU, of(L, 8, 3)), VECTOR,
        [8], 16, 8),
    "batch_norm_after_relu": Case(sequential(of(L, 5, 4), RELU, of(nn.BatchNorm1d, 4), of(L, 4, 2)), VECTOR, [4], 8, 4),
    "batch_norm_plain": Case(sequential(of(L, 5, 4), of(nn.BatchNorm1d, 4, affine=False), RELU, of(L, 4, 2)), VECTOR,
        [4], 4, 0, shifts=4),
    "batch_norm_no_statistics": Case(sequential(of(C, 3, 4, 3), of(nn.BatchNorm2d, 4, track_running_stats=False), RELU,
        of(C, 4, 2, 1)), IMAGE, [4], 4, 4),
    # Four groups of two; each group's sign is divided out, and gamma takes it back.
    "group_norm": Case(sequential(of(C, 3, 8, 3), of(nn.GroupNorm, 4, 8), RELU, of(C, 8, 2, 1), FLAT), IMAGE, [8], 8, 4,
        [f(4), f(2) ** 4]),
    "group_norm_no_eps": Case(sequential(of(C, 3, 8, 3), of(nn.GroupNorm, 4, 8, eps=0), RELU, of(C, 8, 2, 1), FLAT),
        IMAGE, [8], 12, 4, [f(4), f(2) ** 4]),
    "group_norm_1": Case(sequential(of(C, 3, 8, 3), of(nn.GroupNorm, 1, 8), RELU, of(C, 8, 2, 1), FLAT), IMAGE, [8], 8,
        1),
    "group_norm_all": Case(sequential(of(C, 3, 8, 3), of(nn.GroupNorm, 8, 8), RELU, of(C, 8, 2, 1), FLAT), IMAGE, [8],
        8, 8),
    "instance_norm": Case(sequential(of(C, 3, 8, 3), of(nn.InstanceNorm2d, 8, affine=True), RELU, of(C, 8, 2, 1), FLAT),
        IMAGE, [8], 8, 8),
    "instance_norm_tracked": Case(sequential(of(C, 3, 8, 3), of(nn.InstanceNorm2d, 8, affine=True,
        track_running_stats=True), RELU, of(C, 8, 2, 1), FLAT), IMAGE, [8], 16, 8, shifts=8),
    "layer_norm": Case(sequential(of(L, 5, 8), of(nn.LayerNorm, 8), RELU, of(L, 8, 2)), VECTOR, [8], 8, 1),
    "layer_norm_linear": Case(sequential(of(L, 5, 8), of(nn.LayerNorm, 8), of(L, 8, 2)), VECTOR, [8], 8, 9,
        [1], rotations=[7]),
    "layer_norm_plain": Case(sequential(of(L, 5, 8), of(nn.LayerNorm, 8, elementwise_affine=False), of(L, 8, 2)),
        VECTOR, [8], 0, 1, [1], rotations=[7]),
    "layer_norm_no_eps": Case(sequential(of(L, 5, 8), of(nn.LayerNorm, 8, eps=0), RELU, of(L, 8, 2)), VECTOR, [8], 9,
        1),
    "rms_norm": Case(sequential(of(L, 5, 8), of(nn.RMSNorm, 8), RELU, of(L, 8, 2)), VECTOR, [8], 8, 8),
    "rms_norm_linear": Case(sequential(of(L, 5, 8), of(nn.RMSNorm, 8), of(L, 8, 2)), VECTOR, [8], 8, 16,
        [1], rotations=[8], signs_in_rotations=8),
    "written_out_rms_norm": functional(lambda s, x: (lambda h: s.b(s.g * h * torch.rsqrt(h.pow(2).mean(-1,
        keepdim=True) + 1e-6)))(s.a(x)), VECTOR, [8], 8, 16, [1], rotations=[8], signs_in_rotations=8, g=parameter(8)),
}  # fmt: skip

MOVEMENT_CASES = {
    "cat": functional(lambda s, x: s.c(s.n(torch.cat([F.relu(s.a(x)), F.relu(s.b(x)), x], 1))), IMAGE, [4, 5], 21, 12,
        a=of(C, 3, 4, 3, padding=1), b=of(C, 3, 5, 3, padding=1), n=of(nn.BatchNorm2d, 12), c=of(C, 12, 2, 1)),
    "cat_with_itself": functional(lambda s, x: s.c(torch.cat([F.relu(s.a(x))] * 2, 1)), IMAGE, [4], 4, 0,
        a=of(C, 3, 4, 3), c=of(C, 8, 2, 1)),
    "cat_of_tokens": functional(lambda s, x: s.b(torch.relu(torch.cat([s.t.expand(2, 1, 8), s.a(x)], 1))), SEQUENCE,
        [8], 8, 0, t=parameter(1, 1, 8)),
    "slices": functional(lambda s, x: (lambda h: s.b(torch.cat([F.relu(h[:, :3]), F.gelu(h[:, 3:])], 1)))(s.a(x)),
        VECTOR, [3, 5], 3, 0),
    "split_sizes": functional(lambda s, x: (lambda p, q: s.b(torch.cat([torch.tanh(q), torch.relu(p)],
        1)))(*s.a(x).split([3, 5], 1)), VECTOR, [3, 5], 3, 5),
    "unbind": functional(lambda s, x: (lambda p, q: s.b(torch.relu(p) * q))(*s.a(x).reshape(2, 2, 8).unbind(1)), VECTOR,
        [8], 16, 8, a=of(L, 5, 16)),
    "index_select": functional(lambda s, x: s.b(torch.relu(s.a(x)).index_select(1,
        torch.tensor([3, 0, 7, 5, 1, 2, 6, 4]))), VECTOR, [8], 8, 0),
    # Half of the units is never read: these four change places among themselves.
    "index_some": functional(lambda s, x: s.c(torch.relu(s.a(x))[:, [0, 2, 4, 6]]), VECTOR, [4, 4], 8, 4, [f(4)],
        dense=[4], c=of(L, 4, 2)),
    "flip_and_roll_of_units": functional(lambda s, x: s.b(torch.relu(s.a(x)).flip(1).roll(2, 1)), VECTOR, [8], 8, 0),
    "stack": functional(lambda s, x: s.c(torch.stack([torch.relu(s.a(x)), torch.relu(s.b(x))], 1).sum(1)), VECTOR,
        [8, 2], 8, 0, b=of(L, 5, 8), c=of(L, 8, 2)),
    "tokens": functional(lambda s, x: s.c(torch.relu(s.b(torch.relu(s.a(x)).flatten(2).transpose(1, 2))).mean(1)),
        IMAGE, [8, 6], 14, 0, a=of(C, 3, 8, 3), b=of(L, 8, 6), c=of(L, 6, 2)),
    "patches": functional(lambda s, x: s.b(torch.relu(s.a(x)).reshape(2, 8, 3, 2, 3, 2).permute(0, 2, 4, 3, 5,
        1).reshape(2, 9, 32)), IMAGE, [8], 8, 0, a=of(C, 3, 8, 3), b=of(L, 32, 6)),
    "repeat": functional(lambda s, x: s.b(torch.relu(s.a(x)).repeat_interleave(2, 1)), VECTOR, [8], 8, 0,
        b=of(L, 16, 2)),
    "in_place_relu": functional(lambda s, x: (lambda h: s.b(h.relu_() + h))(s.a(x)), VECTOR, [8], 8, 0),
    "in_place_modules": Case(sequential(of(L, 5, 8), of(nn.ReLU, inplace=True), of(L, 8, 7),
        of(nn.LeakyReLU, inplace=True), of(L, 7, 2)), VECTOR, [8, 7], 15, 0),
}  # fmt: skip


def add_in_place(s: Any, x: Tensor) -> Any:
    h = torch.relu(s.a(x))
    g = s.b(h)
    g += h
    return s.c(torch.relu(g))


def write_into_slice(s: Any, x: Tensor) -> Any:
    h = s.a(x)
    h[:, :4] = torch.relu(h[:, :4])
    return s.c(h)


def masked_attention(s: Any, x: Tensor) -> Any:
    q, k, v = s.q(x), s.k(x), s.v(x)
    mask = torch.tril(torch.ones(5, 5, dtype=torch.bool))
    return s.o((q @ k.mT / math.sqrt(8)).masked_fill(~mask, -math.inf).softmax(-1) @ v)


MOVEMENT_CASES |= {
    "add_in_place": functional(add_in_place, VECTOR, [8, 8], 16, 0, b=of(L, 8, 8), c=of(L, 8, 2)),
    "write_into_slice": functional(write_into_slice, VECTOR, [4, 4], 8, 4, [f(4)], dense=[4], c=of(L, 8, 2)),
}  # fmt: skip

CONSTANT_CASES = {
    # A table that is part of the program cannot move, one that is part of the state can.
    "position_constant": functional(lambda s, x: s.b(torch.relu(s.a(x) + torch.linspace(-1, 1, 40).reshape(5, 8))),
        SEQUENCE, [], 0, 0, note="tell units apart"),
    "position_buffer": functional(lambda s, x: s.b(torch.relu(s.a(x) + s.p)), SEQUENCE, [8], 8, 0, p=buffer(5, 8)),
    "position_parameter": functional(lambda s, x: s.b(torch.relu(s.a(x) + s.p)), SEQUENCE, [8], 8, 0,
        p=parameter(1, 5, 8)),
    # The same for all units: they may change places, but adding a number stops scales.
    "time_constant": functional(lambda s, x: s.b(torch.relu(s.a(x) + torch.arange(5)[:, None])), SEQUENCE, [8], 0, 0),
    "time_factor": functional(lambda s, x: s.b(torch.relu(s.a(x) * torch.linspace(1, 2, 5)[:, None])), SEQUENCE, [8], 8,
        0),
    # Different factors for different units: scales pass, permutations do not.
    "unit_factor": functional(lambda s, x: s.b(torch.relu(s.a(x)) * torch.arange(1.0, 9.0)), SEQUENCE, [], 8, 0,
        note="tell units apart"),
    "scalars": functional(lambda s, x: s.b(torch.relu(-2 * s.a(x) / 3)), VECTOR, [8], 8, 0),
    "scalar_added": functional(lambda s, x: s.b(torch.relu(s.a(x) + 1)), VECTOR, [8], 8, 0),
    # The gate's own magnitude and sign are free against the next weight.
    "scalar_gate": functional(lambda s, x: s.b(F.relu(s.a(x)) * s.g), VECTOR, [8], 9, 1, g=parameter()),
}  # fmt: skip

GATE_CASES = {
    "swiglu": functional(lambda s, x: s.d(F.silu(s.g(x)) * s.u(x)), VECTOR, [8], 8, 8, g=of(L, 5, 8), u=of(L, 5, 8),
        d=of(L, 8, 2)),
    "glu": functional(lambda s, x: s.d(F.glu(s.g(x))), VECTOR, [8], 8, 8, g=of(L, 5, 16), d=of(L, 8, 2)),
    "prelu": Case(sequential(of(L, 5, 8), of(nn.PReLU, 8), of(L, 8, 2)), VECTOR, [8], 8, 0),
    "prelu_one_slope": Case(sequential(of(L, 5, 8), nn.PReLU, of(L, 8, 2)), VECTOR, [8], 8, 0),
    "product_with_itself": functional(lambda s, x: (lambda h: s.b(h * h))(s.a(x)), VECTOR, [8], 8, 8),
    "quotient": functional(lambda s, x: s.c(s.a(x) / (s.b(x).square() + 1)), VECTOR, [8], 8, 16, b=of(L, 5, 8),
        c=of(L, 8, 2)),
    "addcmul": functional(lambda s, x: s.d(torch.addcmul(s.a(x), torch.relu(s.b(x)), s.c(x))), VECTOR, [8], 16, 8,
        b=of(L, 5, 8), c=of(L, 5, 8), d=of(L, 8, 2)),
    "masks_of_comparisons": functional(lambda s, x: s.b(F.relu(s.a(x)).masked_fill(s.mask == 0, 0.0) * (x != 0).any()),
        VECTOR, [8], 8, 0, mask=lambda: torch.ones(8)),
    # A leaky ReLU written out, a threshold that scales would move, and a maximum of two, which may change places
    # (positive scales in common).
    "where": functional(lambda s, x: (lambda h: s.b(torch.where(h > 0, h, 0.1 * h)))(s.a(x)), VECTOR, [8], 8, 0),
    "where_threshold": functional(lambda s, x: (lambda h: s.b(torch.where(h > 0.1, h, 0.1 * h)))(s.a(x)), VECTOR, [8],
        0, 0),
    "where_else_one": functional(lambda s, x: (lambda h: s.b(torch.where(h > 0, h, torch.ones(()))))(s.a(x)), VECTOR,
        [8], 0, 0),
    "maximum": functional(lambda s, x: s.c(torch.maximum(s.a(x), s.b(x))), VECTOR, [8, 2], 8, 0, b=of(L, 5, 8),
        c=of(L, 8, 2)),
    "minimum_with_constant": functional(lambda s, x: s.b(torch.minimum(s.a(x), torch.tensor(0.5))), VECTOR, [8], 0, 0),
    # No rule of its own: units move together, and the notes say that scales were given up.
    "lerp": functional(lambda s, x: s.c(torch.relu(torch.lerp(s.a(x), s.b(x), 0.3))), VECTOR, [8], 8, 0,
        b=of(L, 5, 8), c=of(L, 8, 2)),
    # A cumulative sum over time is linear, and leaves the units alone.
    "cumsum_over_time": functional(lambda s, x: s.b(torch.relu(s.a(x)).cumsum(1)), SEQUENCE, [8], 8, 0),
    "cumsum_over_units": functional(lambda s, x: s.b(torch.relu(s.a(x)).cumsum(-1)), SEQUENCE, [], 1, 0, note="cumsum"),
    "softmax_over_units": functional(lambda s, x: s.b(s.a(x).softmax(-1)), VECTOR, [8], 0, 0),
    "sum_over_units": functional(lambda s, x: s.b(torch.relu(s.a(x)).sum(1, keepdim=True)), VECTOR, [8], 1, 0,
        b=of(L, 1, 2)),
}  # fmt: skip

BLOCK_CASES = {
    # Every ReLU: 4 + 6 + 5; what the transposed convolution puts out meets linear maps only.
    "u_net": functional(lambda s, x: (lambda h: s.e(torch.relu(s.d(torch.cat([h,
        s.u(torch.relu(s.b(F.max_pool2d(h, 2))))], 1)))))(torch.relu(s.a(x))), IMAGE, [4, 6, 4, 5], 19, 4,
        [f(4), f(6), f(5)], dense=[4], a=of(C, 3, 4, 3, padding=1), b=of(C, 4, 6, 3, padding=1),
        u=of(nn.ConvTranspose2d, 6, 4, 2, stride=2), d=of(C, 8, 5, 3, padding=1), e=of(C, 5, 2, 1)),
    "inception": functional(lambda s, x: s.g(torch.relu(s.f(torch.cat([torch.relu(s.a(x)), torch.relu(s.b(x)),
        torch.relu(s.c(x)), torch.relu(s.d(F.max_pool2d(x, 3, 1, 1)))], 1))).mean((2, 3))), IMAGE, [2, 3, 2, 2, 4], 13,
        0, a=of(C, 3, 2, 1), b=of(C, 3, 3, 3, padding=1), c=of(C, 3, 2, 5, padding=2), d=of(C, 3, 2, 1),
        f=of(C, 9, 4, 1), g=of(L, 4, 2)),
    # Stream of 4 + 3 channels, read by norms: in front of them 4 + 3, behind them 4 + 7, and 3 that nothing restricts.
    "dense_block": functional(lambda s, x: (
        lambda h: (lambda g: s.o(torch.cat([g, s.b(F.relu(s.n(g)))], 1)))(torch.cat([h, s.a(F.relu(s.m(h)))], 1)))(
        s.i(x)), IMAGE, [4, 3, 3], 21, 10, [f(4), f(3)], dense=[3], i=of(C, 3, 4, 3, padding=1), m=of(nn.BatchNorm2d,
        4), a=of(C, 4, 3, 3, padding=1), n=of(nn.BatchNorm2d, 7), b=of(C, 7, 3, 3, padding=1), o=of(C, 10, 2, 1)),
    "squeeze_excitation": Case(sequential(of(C, 3, 8, 3), RELU, of(SqueezeExcitation, 8, 4), of(C, 8, 2, 1), FLAT),
        IMAGE, [8, 4], 12, 0),
    # Stream 4, expansion 8: in front of the three norms 8 + 8 + 4, and the stream itself.
    "inverted_residual": Case(sequential(of(C, 3, 4, 3), of(InvertedResidual, 4, 4, 1, 2), of(C, 4, 2, 1), FLAT), IMAGE,
        [4, 8], 24, 24, gained=[4]),
    # Stream 8, gamma of the norm 8, layer scale 8; one sign for the whole depthwise output in front of the norm.
    "convnext": Case(sequential(of(C, 3, 8, 3), of(CNBlock, 8, 0.5, 0.0), of(C, 8, 2, 1), FLAT), IMAGE, [8, 32], 24,
        25),
    "stochastic_depth": functional(lambda s, x: s.c(torch.relu((lambda h: h + s.p(s.b(h)))(torch.relu(s.a(x))))),
        VECTOR, [8, 8], 16, 0, b=of(L, 8, 8), p=of(StochasticDepth, 0.5, "row"), c=of(L, 8, 2)),
    "lstm": functional(lambda s, x: s.o(s.l(x)[0]), SEQUENCE, [8], 0, 8, l=of(nn.LSTM, 5, 8, batch_first=True),
        o=of(L, 8, 2)),
    "rnn": functional(lambda s, x: s.o(torch.relu(s.i(s.l(x)[0]))), SEQUENCE, [6, 8], 6, 8,
        l=of(nn.RNN, 5, 8, batch_first=True), i=of(L, 8, 6), o=of(L, 6, 2)),
    "gru": functional(lambda s, x: s.o(s.l(torch.relu(s.i(x)))[0]), SEQUENCE, [6, 8], 6, 8, i=of(L, 5, 6),
        l=of(nn.GRU, 6, 8, batch_first=True), o=of(L, 8, 2)),
}  # fmt: skip

# Per layer of two heads of size 4: 2 x 16 for queries and keys, 2 x 16 for values; the heads change places.
HEADS = [4] * 4
ATTENTION_CASES = {
    "masked_attention": functional(masked_attention, SEQUENCE, [8, 8], 16, 16, [1], dense=[8, 8], q=of(L, 5, 8),
        k=of(L, 5, 8), v=of(L, 5, 8), o=of(L, 8, 2)),
    "causal_attention": functional(
        lambda s, x: s.o(F.scaled_dot_product_attention(s.q(x), s.k(x), s.v(x), is_causal=True)), SEQUENCE, [8, 8], 16,
        16, [1], dense=[8, 8], q=of(L, 5, 8), k=of(L, 5, 8), v=of(L, 5, 8), o=of(L, 8, 2)),
    "self_attention": functional(lambda s, x: (lambda h: s.o(s.m(h, h, h, need_weights=False)[0]))(s.i(x)), SEQUENCE,
        [8, 8, 8, 8], 32, 32, [2], dense=[8, 8, *HEADS], i=of(L, 5, 8),
        m=of(nn.MultiheadAttention, 8, 2, batch_first=True), o=of(L, 8, 2)),
    "attention_with_weights": functional(lambda s, x: (lambda h: (lambda y, w: (s.o(y), w))(*s.m(h, h, h)))(s.i(x)),
        SEQUENCE, [8, 8, 8, 8], 32, 32, [2], dense=[8, 8, *HEADS], i=of(L, 5, 8),
        m=of(nn.MultiheadAttention, 8, 2, batch_first=True), o=of(L, 8, 2)),
    # The weights of each head are put out, so heads stay in their places.
    "attention_with_weights_per_head": functional(lambda s, x: (lambda h: (lambda y, w: (s.o(y), w))(*s.m(h, h, h,
        average_attn_weights=False)))(s.i(x)), SEQUENCE, [8, 8, 8, 8], 32, 32, [1], dense=[8, 8, *HEADS], i=of(L, 5, 8),
        m=of(nn.MultiheadAttention, 8, 2, batch_first=True), o=of(L, 8, 2)),
    # Queries read one stream, keys and values the other, by rows of one weight: a matrix mixes each stream.
    "cross_attention": functional(lambda s, x, y: (lambda q, k: s.o(s.m(q, k, k)[0]))(s.i(x), s.j(y)),
        lambda: (torch.randn(2, 5, 5), torch.randn(2, 3, 4)), [8, 8, 8, 8, 8], 40, 40, [2], dense=[8, 8, 8, *HEADS],
        i=of(L, 5, 8), j=of(L, 4, 8), m=of(nn.MultiheadAttention, 8, 2, batch_first=True), o=of(L, 8, 2)),
    "attention_other_widths": functional(lambda s, x, y: (lambda q, k: s.o(s.m(q, k, k)[0]))(s.i(x), s.j(y)),
        lambda: (torch.randn(2, 5, 5), torch.randn(2, 3, 4)), [8, 6, 8, 8, 8], 38, 38, [2], dense=[8, 6, 8, *HEADS],
        i=of(L, 5, 8), j=of(L, 4, 6), m=of(nn.MultiheadAttention, 8, 2, kdim=6, vdim=6, batch_first=True),
        o=of(L, 8, 2)),
    # Post-norm: the stream is tied to the input, but its sign between the norms is free. Feed-forward 16, ReLU.
    "encoder_layer": Case(of(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True), (2, 5, 8), [8, 8, 16], 32, 17,
        [2, f(16)], dense=HEADS),
    # Pre-norm: the gammas of both norms against their readers.
    "encoder_layer_norm_first": Case(of(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True, norm_first=True),
        (2, 5, 8), [8, 8, 16], 48, 32, [2, f(16)], dense=HEADS),
    # The memory is an input. Rows that read the second norm and rows that read it are apart: three gammas are free.
    "decoder_layer_norm_first": Case(of(nn.TransformerDecoderLayer, 8, 2, 16, batch_first=True, norm_first=True,
        activation="gelu"), lambda: (torch.randn(2, 5, 8), torch.randn(2, 3, 8)), [8, 8, 8, 8, 16], 16 + 40, 16 + 40,
        [2, 2, f(16)], dense=HEADS + HEADS),
    # Stream 8 with rotations and one sign; three norms; heads; feed-forward 16, GELU.
    "vision_transformer": Case(of(VisionTransformer, 8, 4, 1, 2, 8, 16, num_classes=3), IMAGE, [8, 8, 8, 16], 24 + 16,
        24 + 16 + 1, [2, f(16)], dense=HEADS, rotations=[7]),
    # Stem 8 with one sign, stream 8 with one sign; five norms; per block heads, and 32 GELU.
    "swin_transformer": Case(of(SwinTransformer, [4, 4], 8, [2], [2], [4, 4], num_classes=3), (2, 3, 32, 32),
        [8, 8, 8, 8, 8, 32, 32], 40 + 32, 40 + 32 + 2, [f(8), 2, 2, f(32), f(32)], dense=HEADS + HEADS,
        note="the stream of features.0.0.weight is not rotated"),
}  # fmt: skip


# By how many of eight units have positive scales, and how many signs (docs/theory/intertwiners.md, 1.2), the exponent
# aside.
ACTIVATIONS: dict[tuple[int, int], dict[str, Callable[[Tensor], Tensor]]] = {
    (8, 0): {"relu": F.relu, "clamp": lambda x: x.clamp(min=0), "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
        "relu_squared": lambda x: F.relu(x) ** 2, "rrelu": F.rrelu, "exp": torch.exp},
    (8, 8): {"abs": torch.abs, "leaky_relu(-1)": lambda x: F.leaky_relu(x, -1.0), "square": lambda x: x**2,
        "square_method": lambda x: x.square(), "cube": lambda x: x**3, "sign": torch.sign},
    (0, 8): {"gaussian": lambda x: torch.exp(-x.square()), "cos": torch.cos, "tanh": torch.tanh, "sin": torch.sin,
        "erf": torch.erf, "atan": torch.atan, "softsign": F.softsign, "hardtanh": F.hardtanh,
        "softshrink": F.softshrink, "hardshrink": F.hardshrink, "tanhshrink": F.tanhshrink},
    (0, 0): {"sigmoid": torch.sigmoid, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu, "softplus": F.softplus, "elu": F.elu, "celu": F.celu, "selu": F.selu, "mish": F.mish,
        "relu6": F.relu6, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "logsigmoid": F.logsigmoid,
        "threshold": lambda x: F.threshold(x, 0.1, 0.0)},
}  # fmt: skip

CASES = {
    **LINEAR_CASES,
    **CONVOLUTION_CASES,
    **NORM_CASES,
    **MOVEMENT_CASES,
    **CONSTANT_CASES,
    **GATE_CASES,
    **BLOCK_CASES,
    **ATTENTION_CASES,
    **{f"activation_{name}": functional(lambda s, x, activation=activation: s.b(activation(s.a(x))), VECTOR, [8],
        scales, signs) for (scales, signs), activations in ACTIVATIONS.items() for name,
        activation in activations.items()},
}  # fmt: skip


def example(shape: Any) -> tuple[Tensor, ...]:
    made = shape() if callable(shape) else torch.randn(shape)
    return made if isinstance(made, tuple) else (made,)


# Shifts besides those in front of batch norms, which the cases state.
SHIFTS = {
    "group_norm_1": 1, "dropout": 7, "log_softmax_head": 9, "dense_block": 10, "cat": 12, "mlp_linear": 15,
    "index_some": 24, "attention_other_widths": 38, "cross_attention": 40, "convnext": 49, "encoder_layer": 66,
    "encoder_layer_norm_first": 73, "decoder_layer_norm_first": 106, "vision_transformer": 178, "swin_transformer":
    325,
    **dict.fromkeys(["group_norm", "group_norm_no_eps", "conv1d", "batch_norm_after_relu",
        "batch_norm_no_statistics", "vector_in_front", "linear_conv", "upsample_linear"], 4),
    **dict.fromkeys(["embedding", "layer_norm", "layer_norm_no_eps"], 6),
    **dict.fromkeys(["group_norm_all", "instance_norm", "layer_norm_plain", "position_buffer", "position_parameter",
        "rnn", "maximum", "softmax_over_units", "addcmul", "inverted_residual"], 8),
    "lerp": 48,
    **dict.fromkeys(["layer_norm_linear", "gru", "causal_attention", "masked_attention"], 16),
    **dict.fromkeys(["lstm", "self_attention", "attention_with_weights", "attention_with_weights_per_head"], 32),
}  # fmt: skip


@functools.cache
def traced(name: str) -> tuple[Case, nn.Module, tuple[Tensor, ...], Symmetry]:
    torch.manual_seed(0)
    case = CASES[name]
    network = case.network().eval()
    inputs = example(case.shape)
    return case, network, inputs, trace_symmetry(network, inputs, check=False)


# What notes say besides: linear layers in a row wider than what goes in or comes out, whose nullity depends on weights.
WIDE = ["mlp_linear", "vector_in_front_of_matrices", "vector_times_vector", "dropout", "linear_conv", "upsample_linear",
    "write_into_slice", "masked_attention", "causal_attention", "self_attention", "attention_with_weights",
    "attention_with_weights_per_head", "attention_other_widths", "cross_attention", "dense_block"]  # fmt: skip
NOTES = {
    **dict.fromkeys(WIDE, "incoming or outgoing numbers"),
    "minimum_with_constant": "biases could absorb",
    "cat_with_itself": "reads units more than once",
    "repeat": "reads units more than once",
}
# Matrices of units that nothing reads, whose weights are all free: these are among the shifts.
TWICE = {"index_some": 16}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(3, "vector_times_vector")
def test_whole_group_keeps_the_function(name: str) -> None:
    case, network, inputs, symmetry = traced(name)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    assert symmetry.check(network, inputs, samples=2, perturb=0.3) <= EXACT
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    moved = [g.size for g in symmetry.groups if g.movable and g.size > 1 and g.kind != "moves with its block"]
    assert Counter(moved) == Counter(case.sizes)
    assert symmetry.log10_permutations == pytest.approx(case.log10, abs=1e-9)
    assert (symmetry.scales, symmetry.signs) == (case.scales, case.signs)
    assert sorted(len(cell) for cell in symmetry.structure.dense) == sorted(case.dense)
    assert sorted(cell.size for cell in symmetry.structure.gained) == sorted(case.gained)
    assert symmetry.shifts == case.shifts + SHIFTS.get(name, 0)
    dimension = case.dimension + SHIFTS.get(name, 0) - TWICE.get(name, 0)
    assert symmetry.dimension + symmetry.buffer_dimension == dimension
    free = (case.signs - sum(case.dense) - sum(case.gained) - case.signs_in_rotations) * math.log(2)
    assert symmetry.log_order == pytest.approx(case.log10 * math.log(10) + free, abs=1e-8)
    stated = NOTES.get(name, case.note)
    if stated is None:
        assert not symmetry.notes
    else:
        assert any(stated in note for note in symmetry.notes)


# Our architectures. Of width w, the ResNet of depth 20 has 43 w channels in front of batch norms (49 w with option B),
# 21 w inside blocks, and streams of 4 w (7 w) channels; ResNet-18 has 75 w, 30 w and 15 w; Myrtle 15 w in all.


def resnet_order(shortcut: str, w: int) -> list[int]:
    times = (5, 4, 3) if shortcut == "A" else (4, 4, 4)
    return [f(w << stage) for stage, count in enumerate(times) for _ in range(count)]


MYRTLE = [f(2), f(4), f(8), f(16)]
OURS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[int], int, int]] = {
    **{f"perceptron_{a}": (of(MultiLayerPerceptron, [5, 4, 3], image_size=3, activation=a), (2, 1, 3, 3),
        [f(5), f(4), f(3)], 12 * scale, 12 * sign) for a, scale, sign in [("relu", 1, 0), ("leaky_relu(0.1)", 1, 0),
        ("tanh", 0, 1), ("gelu", 0, 0), ("silu", 0, 0), ("sigmoid", 0, 0), ("gaussian", 0, 1), ("polynomial(2)", 1, 1),
        ("polynomial(3)", 1, 1)]},
    # Two poolings by maximum after the convolutions stop their signs, unless the activation has dropped them.
    **{f"lenet_{a}": (of(LeNet5, activation=a), (2, 1, 28, 28), [f(6), f(16), f(120), f(84)], 226 * scale, signs) for a,
        scale, signs in [("relu", 1, 0), ("tanh", 0, 204), ("gelu", 0, 0), ("sigmoid", 0, 0), ("gaussian", 0, 226)]},
    **{f"myrtle_bn_{a}": (of(MyrtleCNN, 2, image_size=8, activation=a), (2, 3, 8, 8), MYRTLE, *rest) for a,
        *rest in [("relu", 60, 30), ("leaky_relu(0.1)", 60, 30), ("gelu", 30, 30), ("sigmoid", 30, 30)]},
    **{f"myrtle_{a}": (of(MyrtleCNN, 2, batch_norm=False, image_size=8, activation=a), (2, 3, 8, 8), MYRTLE,
        *rest) for a, *rest in [("relu", 30, 0), ("gelu", 0, 0), ("sigmoid", 0, 0), ("silu", 0, 0)]},
    # Gaussian: even, so that a flipped sum is noticed by nobody; the padded channels of a stage are flipped by its
    # first block. Signs of the stream are as many as its channels.
    **{f"resnet20_{shortcut}_{a}": (of(CIFARResNet, width=2, shortcut=shortcut, activation=a), (2, 3, 8, 8),
        resnet_order(shortcut, 2), 2 * (norms + scale * (21 + stream)),
        2 * (norms + sign * (21 + stream))) for shortcut, norms, stream in [("A", 43, 4), ("B", 49, 7)] for a, scale,
        sign in [("relu", 1, 0), ("leaky_relu(0.1)", 1, 0), ("tanh", 0, 1), ("gelu", 0, 0), ("sigmoid", 0, 0),
        ("gaussian", 0, 1)]},
    "resnet20_A_width_1": (of(CIFARResNet, width=1), (1, 3, 8, 8), resnet_order("A", 1), 68, 43),
    **{f"resnet18_{a}": (of(CIFARResNet18, width=2, activation=a), (2, 3, 8, 8), [f(2 << s) for s in range(4)] * 3, 240,
        150) for a in ("relu", "leaky_relu(0.2)")},
    "wrapped": (lambda: Network.wrap(nn.Sequential(L(5, 8), nn.Tanh(), L(8, 2))), (2, 5), [f(8)], 0, 8),
    "torchvision": (
        of(TorchvisionNetwork, "squeezenet1_1", image_size=64, num_classes=3), (1, 3, 64, 64),
        # Per fire module: squeeze s, expanded twice e.
        [f(64), *(f(n) for s in (16, 32, 48, 64) for n in (s, 4 * s, 4 * s) * 2)],
        64 + 2 * (16 + 128 + 32 + 256 + 48 + 384 + 64 + 512), 0,
    ),
}  # fmt: skip


@pytest.mark.few(3, "perceptron_gaussian", "myrtle_bn_leaky_relu(0.1)")
@pytest.mark.parametrize("name", one_in(3, OURS))
def test_our_architectures(name: str) -> None:
    make, shape, order, scales, signs = OURS[name]
    torch.manual_seed(0)
    network, inputs = make().eval(), torch.randn(shape)
    symmetry = trace_symmetry(network, inputs)
    assert symmetry.worst_error <= EXACT
    assert symmetry.log10_permutations == pytest.approx(sum(math.log10(n) for n in order), abs=1e-8)
    assert (symmetry.scales, symmetry.signs) == (scales, signs)
    # Where two batch norms meet in a sum, one of their biases is taken off the other.
    shifts = 4 + 8 if name.startswith("resnet20_B") else 4 + 8 + 16 if name.startswith("resnet18") else 0
    assert (symmetry.shifts, symmetry.dimension) == (shifts, scales + shifts)
    assert not symmetry.notes


# What acting leaves alone.

ACTED = ["batch_norm_mlp", "depthwise", "grouped", "transposed_grouped", "instance_norm_tracked", "tied_autoencoder",
    "tied_embedding", "encoder_layer_norm_first", "mlp_linear", "position_buffer", "cat", "convnext"]  # fmt: skip


@pytest.mark.parametrize("name", ACTED)
def test_copy_and_in_place_agree_bitwise(name: str) -> None:
    _, network, _, symmetry = traced(name)
    element = symmetry.sample(torch.Generator().manual_seed(1))
    before = {key: value.clone() for key, value in network.state_dict().items()}
    made = symmetry.act(element, network)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    inplace = copy.deepcopy(network)
    tensors = list(inplace.state_dict(keep_vars=True).values())
    assert symmetry.act(element, inplace, inplace=True) is inplace
    assert all(new is old for new, old in zip(inplace.state_dict(keep_vars=True).values(), tensors, strict=True))
    assert made.state_dict().keys() == before.keys()
    assert all(torch.equal(value, made.state_dict()[key]) for key, value in inplace.state_dict().items())
    assert any(not torch.equal(value, before[key]) for key, value in made.state_dict().items())
    assert type(made) is type(network)
    # Nothing is shared: changing the result does not change the original.
    with torch.no_grad():
        for value in made.state_dict().values():
            value.zero_()
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["batch_norm_mlp", "encoder_layer_norm_first", "grouped", "mlp_linear"])
def test_dtypes_modes_and_flags_are_kept(name: str, dtype: torch.dtype) -> None:
    _, network, inputs, symmetry = traced(name)
    network = copy.deepcopy(network).to(dtype).train()
    next(network.parameters()).requires_grad_(False)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
    made = symmetry.act(symmetry.sample(torch.Generator().manual_seed(2)), network)
    assert all(module.training for module in made.modules())
    for (key, old), new in zip(
        network.state_dict(keep_vars=True).items(), made.state_dict(keep_vars=True).values(), strict=True
    ):
        assert (new.dtype, new.requires_grad, type(new)) == (old.dtype, old.requires_grad, type(old))
        assert new.is_leaf
        if "num_batches" in key:
            assert int(new) == 7
    if dtype != torch.bfloat16:
        network, made = network.eval(), made.eval()
        old, new = (net(*(x.to(dtype) for x in inputs)).detach() for net in (network, made))
        limit = 1e-4 if dtype == torch.float32 else EXACT
        assert float((new - old).abs().max() / old.abs().max()) <= limit


def test_tied_weights_stay_tied() -> None:
    one = L(6, 6)
    network = nn.Sequential(L(5, 6), nn.ReLU(), one, nn.ReLU(), one, nn.ReLU(), L(6, 2))
    table = nn.Embedding(10, 6)
    head = L(6, 10, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, nn.LayerNorm(6), L(6, 6), nn.Tanh(), head)
    for net, x, first, second in (
        (network, torch.randn(2, 5), "2.weight", "4.weight"),
        (model, torch.arange(4)[None], "0.weight", "4.weight"),
    ):
        symmetry = trace_symmetry(net, x)
        made = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0)), net)
        state = made.state_dict(keep_vars=True)
        assert state[first] is state[second]
        assert state[first] is not net.state_dict(keep_vars=True)[first]


def test_one_example_serves_all_sizes() -> None:
    """Batch 1 and one pixel say as much as a batch of images (docs/theory/tracing.md, 8.4)."""
    torch.manual_seed(0)
    network = CIFARResNet(width=2).eval()
    reference = trace_symmetry(network, torch.randn(2, 3, 16, 16), check=False)
    for shape in ((1, 3, 1, 1), (1, 3, 2, 2), (3, 3, 1, 5)):
        symmetry = trace_symmetry(network, torch.randn(shape), check=False)
        assert (symmetry.log10_permutations, symmetry.scales, symmetry.signs) == (
            reference.log10_permutations, reference.scales, reference.signs,
        )  # fmt: skip
        assert symmetry.check(network, torch.randn(2, 3, 16, 16), perturb=0.3) <= EXACT
