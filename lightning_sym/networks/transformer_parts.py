"""Parts of vision transformers: attention, feed-forward layers, blocks, positions and pooling."""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_integers, check_known, check_numbers
from lightning_sym.networks.activations import make_activation

Norm = Literal["layer", "rms"]

_ROTARY_BASE = 100.0  # for images with their short grids (Heo et al. 2024); language models have 10,000


def make_norm(kind: Norm, width: int) -> nn.Module:
    """Make a norm of tokens with a gain, and with a bias for a layer norm.

    Raises:
        ValueError: If the kind is unknown.
    """
    check_known("norm", kind, get_args(Norm))
    return nn.LayerNorm(width) if kind == "layer" else nn.RMSNorm(width, eps=1e-6)


class StochasticDepth(nn.Module):
    """Drops a residual branch in training, sample by sample, and rescales the rest to preserve the mean.

    Args:
        rate: Probability of dropping a sample's branch, in [0, 1).

    References:
        Huang et al. (2016), "Deep Networks with Stochastic Depth", arXiv:1603.09382.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch ``[N, T, C]``, with rows of zeros in training."""
        if not self.training or not self.rate:
            return x
        return x * F.dropout(torch.ones_like(x[:, :1, :1]), self.rate)

    def extra_repr(self) -> str:
        """Return the rate, for ``repr``."""
        return f"rate={self.rate:g}"


class LayerScale(nn.Module):
    """Multiplies every channel of a residual branch by a learned weight.

    Args:
        width: Number of channels.
        initial: Initial value of all weights.

    References:
        Touvron et al. (2021), "Going deeper with Image Transformers", arXiv:2103.17239.
    """

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the shape of ``x``, ``[N, T, C]``."""
        return x * self.scale


def rotary_angles(grid: tuple[int, int], head_width: int, extra: int = 0) -> Tensor:
    """Return the angles of rotary positions on a grid: half of the rotary pairs follow the row, half the column.

    Args:
        grid: Rows and columns of the tokens.
        head_width: Channels of a head, a multiple of 4. Pair ``p`` has channels ``p`` and ``head_width/2 + p``.
        extra: Leading tokens without position, which are not rotated, such as a class token.

    Returns:
        Angles in radians. Shape ``[extra + rows * columns, head_width / 2]``.

    References:
        Heo et al. (2024), "Rotary Position Embedding for Vision Transformer", arXiv:2403.13298 (axial).
    """
    quarter = head_width // 4
    frequencies = _ROTARY_BASE ** (-torch.arange(quarter) / quarter)
    rows, columns = torch.meshgrid(*(torch.arange(float(size)) for size in grid), indexing="ij")
    angles = torch.cat([place.flatten()[:, None] * frequencies for place in (rows, columns)], 1)
    return torch.cat([torch.zeros(extra, 2 * quarter), angles])


class RotaryPositions(nn.Module):
    """Rotates the pairs of queries or keys by angles that depend on the token's position.

    Args:
        angles: Shape ``[T, E / 2]``; see :func:`rotary_angles`.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, angles: Tensor) -> None:
        super().__init__()
        # Architecture constants outside of the state dict: symmetries of the weights must not change them.
        self.register_buffer("cosine", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sine", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return rotated queries or keys. Shape ``[N, heads, T, E]``."""
        first, second = x.chunk(2, -1)
        return x * self.cosine + torch.cat([-second, first], -1) * self.sine


class SelfAttention(nn.Module):
    """Multi-head self-attention over tokens; queries may share keys and values.

    Args:
        width: Channels of the tokens, a multiple of ``heads``.
        heads: Number of query heads.
        key_value_heads: Number of heads of keys and values, which divides ``heads``; head ``q`` of the queries reads
            head ``q // (heads / key_value_heads)``.
        qkv_bias: Whether queries, keys and values have biases.
        bias: Whether the output layer has a bias.
        dropout: Dropout of the attention weights in training, in [0, 1).
        output_dropout: Dropout of the output in training, in [0, 1).
        angles: Angles of rotary positions, see :func:`rotary_angles`; default none.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        key_value_heads: int,
        *,
        qkv_bias: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        angles: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.query_heads, self.key_value_heads = heads, key_value_heads
        self.scale = (width // heads) ** -0.5
        shared = key_value_heads * (width // heads)
        self.query = nn.Linear(width, width, bias=qkv_bias)
        self.key = nn.Linear(width, shared, bias=qkv_bias)
        self.value = nn.Linear(width, shared, bias=qkv_bias)
        self.query_positions, self.key_positions = (
            nn.Identity() if angles is None else RotaryPositions(angles) for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)
        self.heads = nn.Identity()  # hook point for the outputs of the heads
        self.output = nn.Linear(width, width, bias=bias)
        self.output_dropout = nn.Dropout(output_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, T, C]`` for tokens ``[N, T, C]``."""
        query = self.query_positions(_split_heads(self.query(x), self.query_heads))
        key = self.key_positions(_split_heads(self.key(x), self.key_value_heads))
        value = _split_heads(self.value(x), self.key_value_heads)
        if (times := self.query_heads // self.key_value_heads) > 1:
            key, value = (shared.repeat_interleave(times, 1) for shared in (key, value))
        # Not torch's fused kernels, which lack second derivatives and run stacked networks one by one.
        weights = self.dropout((query * self.scale @ key.transpose(2, 3)).softmax(-1))
        heads = self.heads((weights @ value).transpose(1, 2).flatten(2))
        output: Tensor = self.output_dropout(self.output(heads))
        return output


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Return ``[N, heads, T, E]`` for ``[N, T, heads * E]``."""
    apart: Tensor = torch.unflatten(x, -1, (heads, -1))
    return apart.transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, or gated units: ``down(silu(gate(x)) * up(x))``.

    Args:
        width: Channels of the tokens.
        hidden: Number of hidden units.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes, or ``swiglu``.
        bias: Whether the linear layers have biases.
        dropout: Dropout of hidden units and outputs in training, in [0, 1).

    References:
        Shazeer (2020), "GLU Variants Improve Transformer", arXiv:2002.05202.
    """

    def __init__(self, width: int, hidden: int, activation: str, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        gated = activation == "swiglu"
        self.gate = nn.Linear(width, hidden, bias=bias) if gated else None
        self.up = nn.Linear(width, hidden, bias=bias)
        self.activation = make_activation("silu" if gated else activation)
        self.hidden = nn.Identity()  # hook point for the hidden units, gated or not
        self.hidden_dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, T, C]`` for tokens ``[N, T, C]``."""
        up = self.up(x)
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        output: Tensor = self.dropout(self.down(self.hidden_dropout(self.hidden(hidden))))
        return output


class TransformerBlock(nn.Module):
    """Attention and feed-forward layers, each after a norm and added to the stream of tokens.

    Args:
        attention: Attention branch: maps normalised tokens to an update of the stream.
        mlp: Feed-forward branch, in the same form.
        norms: The norms before the branches.
        norm_in_stream: Whether the second norm's output replaces the stream, rather than only being read by ``mlp``.
        layer_scale: Initial weights of both branches; default none.
        stochastic_depth: Drop rate of the branches in training, in [0, 1).
    """

    def __init__(
        self,
        attention: SelfAttention,
        mlp: FeedForward,
        norms: tuple[nn.Module, nn.Module],
        *,
        norm_in_stream: bool = False,
        layer_scale: float | None = None,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__()
        width = attention.output.out_features
        self.norm_in_stream = norm_in_stream
        self.norm1, self.norm2 = norms
        self.attention, self.mlp = attention, mlp
        self.scale1, self.scale2 = (
            nn.Identity() if layer_scale is None else LayerScale(width, layer_scale) for _ in range(2)
        )
        self.drop1, self.drop2 = (StochasticDepth(stochastic_depth) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, T, C]`` for tokens ``[N, T, C]``."""
        x = x + self.drop1(self.scale1(self.attention(self.norm1(x))))
        read = self.norm2(x)
        stream = read if self.norm_in_stream else x
        output: Tensor = stream + self.drop2(self.scale2(self.mlp(read)))
        return output


class LearnedPositions(nn.Module):
    """Adds a learned vector to every token.

    Args:
        tokens: Number of tokens.
        width: Channels.
        std: Standard deviation of the initial normal distribution, truncated at two.
    """

    def __init__(self, tokens: int, width: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(tokens, width), std=std))

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the shape of ``x``, ``[N, T, C]``."""
        return x + self.weight


class SinusoidalPositions(nn.Module):
    r"""Adds to token ``t`` the alternating constants :math:`\sin(t \omega_j), \cos(t \omega_j)`.

    With :math:`\omega_j = 10000^{-2j/C}`. They are not parameters and not in the state dict.

    Args:
        tokens: Number of tokens.
        width: Channels ``C``, even.

    References:
        Vaswani et al. (2017), "Attention Is All You Need", arXiv:1706.03762, section 3.5.
    """

    table: Tensor

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        frequencies = torch.exp(-math.log(10_000) * torch.arange(0, width, 2) / width)
        angles = torch.arange(float(tokens))[:, None] * frequencies
        table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the shape of ``x``, ``[N, T, C]``."""
        return x + self.table


class SequencePool(nn.Module):
    """Weighted mean of all tokens: softmax over one learned score per token.

    Args:
        width: Channels.

    References:
        Hassani et al. (2021), "Escaping the Big Data Paradigm with Compact Transformers", arXiv:2104.05704, 3.2.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C]`` for tokens ``[N, T, C]``."""
        weights = self.score(x).transpose(1, 2).softmax(-1)
        pooled: Tensor = (weights @ x).squeeze(1)
        return pooled


class MeanPool(nn.Module):
    """The mean of all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C]`` for tokens ``[N, T, C]``."""
        return x.mean(1)


class FirstToken(nn.Module):
    """The first token: the class token, if there is one."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C]`` for tokens ``[N, T, C]``."""
        return x[:, 0]


def block_sites(blocks: nn.Sequential) -> list[str]:
    """Return the sites of blocks: heads, attention, hidden units, feed-forward output, and the stream after each."""
    parts = ("attention.heads", "attention", "mlp.hidden", "mlp")
    return [
        name for index in range(len(blocks)) for name in (*(f"blocks.{index}.{p}" for p in parts), f"blocks.{index}")
    ]


def init_linear(network: nn.Module, draw: Callable[[Tensor], Tensor]) -> None:
    """Initialise the weights of all linear layers by an in-place function; biases become 0."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def depth_rates(rate: float, depth: int) -> list[float]:
    """Return the rates of stochastic depth of all blocks, which rise linearly from 0 to ``rate``."""
    return [rate * index / max(1, depth - 1) for index in range(depth)]


def check_transformer(
    of: str,
    *,
    width: int,
    heads: int,
    depth: int,
    mlp_ratio: float,
    dropouts: dict[str, float],
    **integers: int,
) -> None:
    """Check the arguments common to all transformers.

    Raises:
        ValueError: If an argument is out of range.
    """
    check_integers(of=of, width=width, heads=heads, depth=depth, **integers)
    check_numbers("> 0", of=of, mlp_ratio=mlp_ratio)
    if width % heads:
        raise ValueError(f"The width of {of} must be a multiple of heads, got width={width} and heads={heads}.")
    if int(width * mlp_ratio) < 1:
        raise ValueError(f"mlp_ratio of {of} must leave one hidden unit at least, got {mlp_ratio} times {width}.")
    for name, rate in dropouts.items():
        if not 0 <= rate < 1:
            raise ValueError(f"{name} of {of} is a probability and must be in [0, 1), got {rate}.")
