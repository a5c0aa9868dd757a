"""Vision transformers (ViT) with common later additions."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_known, height_width
from lightning_sym.networks import transformer_parts as parts
from lightning_sym.networks.base import _SequentialNetwork
from lightning_sym.networks.transformer_parts import Norm

Positions = Literal["learned", "rotary", "sinusoidal", "none"]
Pool = Literal["mean", "class", "sequence"]

_POOLS: dict[str, type[nn.Module]] = {"mean": parts.MeanPool, "class": parts.FirstToken, "sequence": parts.SequencePool}


class PatchEmbedding(nn.Module):
    """Linear embedding of non-overlapping patches, with class token and added positions.

    Args:
        in_channels: Channels of the images.
        grid: Rows and columns of patches.
        patch_size: Side of a patch.
        width: Channels of the tokens.
        class_token: Whether to prepend a class token.
        positions: See :class:`VisionTransformer`; rotary ones belong to attention.
        bias: Whether the linear layer has a bias.
    """

    def __init__(
        self,
        in_channels: int,
        grid: tuple[int, int],
        patch_size: int,
        width: int,
        *,
        class_token: bool,
        positions: Positions,
        bias: bool,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(in_channels, width, patch_size, patch_size, bias=bias)
        nn.init.trunc_normal_(self.patches.weight, std=(in_channels * patch_size**2) ** -0.5)
        if self.patches.bias is not None:
            nn.init.zeros_(self.patches.bias)
        self.class_token = nn.Parameter(nn.init.normal_(torch.empty(1, 1, width), std=1e-6)) if class_token else None
        tokens = math.prod(grid) + class_token
        self.positions: nn.Module = nn.Identity()
        if positions == "learned":
            self.positions = parts.LearnedPositions(tokens, width, std=0.02)
        elif positions == "sinusoidal":
            self.positions = parts.SinusoidalPositions(tokens, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens ``[N, T, width]`` for images ``[N, in_channels, height, width]``."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], 1)
        output: Tensor = self.positions(tokens)
        return output


class VisionTransformer(_SequentialNetwork):
    """Vision transformers: patches as tokens, pre-norm blocks of attention and feed-forward layers.

    ``patch_size=16, width=768, depth=12, heads=12, mlp_ratio=4, pool="class"`` with images of 224x224 pixels and 1,000
    classes is ViT-B/16 with 86,567,656 parameters (S: width 384, 6 heads: 22,050,664; Ti: width 192, 3 heads:
    5,717,416). Initialisation as in the paper's code: Xavier-uniform linear layers, patch embeddings with unit
    output variance for white inputs, added positions with standard deviation 0.02.

    Args:
        in_channels: Channels of the images, >= 1.
        image_size: Side of the images, or (height, width); multiples of ``patch_size``.
        num_classes: Number of outputs ``C``, >= 1.
        patch_size: Side of the patches in pixels, >= 1.
        width: Channels of the stream, a multiple of ``heads``.
        depth: Number of blocks, >= 1.
        heads: Number of heads of the queries.
        key_value_heads: Number of heads of keys and values, which divides ``heads``: groups of queries share them;
            default ``heads``.
        mlp_ratio: Hidden units per channel of the stream, > 0.
        norm: ``layer`` or ``rms``: the root mean square without mean and bias.
        positions: ``learned`` vectors added to the tokens, ``rotary`` positions that rotate queries and keys
            (half of the pairs by row, half by column; channels per head a multiple of 4), ``sinusoidal``
            constants added to the tokens, or ``none``.
        activation: Activation of the feed-forward layers: a name for :func:`lightning_sym.networks.make_activation`,
            or ``swiglu`` for units gated by SiLU.
        pool: Input of the classifier after the last norm: the ``mean`` of all tokens, the ``class`` token, or as in
            compact transformers the mean under learned weights (``sequence``).
        qkv_bias: Whether queries, keys and values have biases.
        bias: Whether all other linear layers but the classifier have biases.
        layer_scale: Initial learned weights of the channels of each branch, > 0; default none.
        dropout: Dropout of tokens, attention outputs and feed-forward layers, in [0, 1).
        attention_dropout: Dropout of attention weights, in [0, 1).
        stochastic_depth: Drop rate of the last block's branches in training, in [0, 1); rises linearly from 0 at the
            first block.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Dosovitskiy et al. (2021), "An Image is Worth 16x16 Words", arXiv:2010.11929; Heo et al. (2024), "Rotary
        Position Embedding for Vision Transformer", arXiv:2403.13298 (axial).

    Example:
        >>> VisionTransformer(1, 8, patch_size=4, width=8, depth=1, heads=2).sites()[:3]
        ['embedding', 'blocks.0.attention.heads', 'blocks.0.attention']
    """

    def __init__(
        self,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        num_classes: int = 10,
        patch_size: int = 4,
        width: int = 256,
        depth: int = 7,
        heads: int = 4,
        key_value_heads: int | None = None,
        mlp_ratio: float = 2.0,
        norm: Norm = "layer",
        positions: Positions = "learned",
        activation: str = "gelu",
        pool: Pool = "mean",
        qkv_bias: bool = True,
        bias: bool = True,
        layer_scale: float | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__()
        key_value_heads = heads if key_value_heads is None else key_value_heads
        parts.check_transformer(
            "VisionTransformer",
            width=width,
            heads=heads,
            depth=depth,
            mlp_ratio=mlp_ratio,
            dropouts={"dropout": dropout, "attention_dropout": attention_dropout, "stochastic_depth": stochastic_depth},
            in_channels=in_channels,
            num_classes=num_classes,
            key_value_heads=key_value_heads,
        )
        grid = _grid(image_size, patch_size)
        _check_choices(width, heads, key_value_heads, positions, pool, layer_scale)
        class_token = pool == "class"
        angles = parts.rotary_angles(grid, width // heads, int(class_token)) if positions == "rotary" else None
        self.embedding = PatchEmbedding(
            in_channels, grid, patch_size, width, class_token=class_token, positions=positions, bias=bias
        )
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                parts.TransformerBlock(
                    parts.SelfAttention(
                        width,
                        heads,
                        key_value_heads,
                        qkv_bias=qkv_bias,
                        bias=bias,
                        dropout=attention_dropout,
                        output_dropout=dropout,
                        angles=angles,
                    ),
                    parts.FeedForward(width, int(width * mlp_ratio), activation, bias=bias, dropout=dropout),
                    (parts.make_norm(norm, width), parts.make_norm(norm, width)),
                    layer_scale=layer_scale,
                    stochastic_depth=rate,
                )
                for rate in parts.depth_rates(stochastic_depth, depth)
            )
        )
        self.norm = parts.make_norm(norm, width)
        self.pool = _POOLS[pool](*([width] if pool == "sequence" else []))
        self.classifier = nn.Linear(width, num_classes)
        parts.init_linear(self, nn.init.xavier_uniform_)

    def sites(self) -> list[str]:
        """Return the output of the embedding, and five sites per block.

        The sites of a block are the outputs of the heads, of attention, of the hidden units (after the gate, if there
        is one) and of the feed-forward layers, and the stream after the block. Axes are sample, token, channel.
        """
        return ["embedding", *parts.block_sites(self.blocks)]


def _grid(image_size: int | tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Return rows and columns of patches."""
    height, width = height_width(image_size, "image_size")
    check_integers(of="VisionTransformer", patch_size=patch_size)
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"VisionTransformer cuts images into patches of {patch_size}x{patch_size} pixels, but {height}x{width} are "
            "no multiples of them; choose another patch_size."
        )
    return height // patch_size, width // patch_size


def _check_choices(
    width: int, heads: int, key_value_heads: int, positions: str, pool: str, layer_scale: float | None
) -> None:
    """Check the arguments specific to this network."""
    check_known("kind of positions", positions, get_args(Positions))
    check_known("pool", pool, _POOLS)
    if heads % key_value_heads:
        raise ValueError(f"heads must be a multiple of key_value_heads, got {heads} and {key_value_heads}.")
    if positions == "rotary" and (width // heads) % 4:
        raise ValueError(
            f"Rotary positions need channels per head that are a multiple of 4, got {width // heads}; use another "
            "width or number of heads."
        )
    if positions == "sinusoidal" and width % 2:
        raise ValueError(f"Sinusoidal positions need an even width, got {width}.")
    if layer_scale is not None and not (math.isfinite(layer_scale) and layer_scale > 0):
        raise ValueError(f"layer_scale must be a number > 0, or null for none, got {layer_scale}.")
