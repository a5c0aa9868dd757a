"""Compact convolutional transformers (CCT)."""

import re
from functools import partial
from typing import Literal, get_args

from torch import Tensor, nn

from lightning_sym._checks import check_known, height_width
from lightning_sym.networks import transformer_parts as parts
from lightning_sym.networks.activations import make_activation
from lightning_sym.networks.base import _SequentialNetwork

Positions = Literal["learned", "sinusoidal", "none"]

# Width, heads and MLP ratio of the published encoders, by their number of blocks.
_ENCODERS = {2: (128, 2, 1.0), 4: (128, 2, 1.0), 6: (256, 4, 2.0), 7: (256, 4, 2.0), 14: (384, 6, 3.0)}
_BETWEEN = 64  # channels between two convolutions


class ConvolutionalEmbedding(nn.Sequential):
    """Convolutions with activation and max pooling; the output's pixels become tokens with positions.

    Args:
        in_channels: Channels of the images.
        image_size: Height and width.
        width: Channels of the tokens.
        kernel_size: Size of the kernels.
        convolutions: Number of convolutions.
        activation: Name of the activation.
        positions: See :class:`CompactTransformer`.
    """

    def __init__(
        self,
        in_channels: int,
        image_size: tuple[int, int],
        width: int,
        kernel_size: int,
        convolutions: int,
        activation: str,
        positions: Positions,
    ) -> None:
        super().__init__()
        stride, padding = max(1, kernel_size // 2 - 1), max(1, kernel_size // 2)
        height, breadth = image_size
        channels = in_channels
        for index in range(1, convolutions + 1):
            out = width if index == convolutions else _BETWEEN
            conv = nn.Conv2d(channels, out, kernel_size, stride, padding, bias=False)
            nn.init.kaiming_normal_(conv.weight)
            self.add_module(f"conv{index}", conv)
            self.add_module(f"activation{index}", make_activation(activation))
            self.add_module(f"pool{index}", nn.MaxPool2d(3, 2, 1))
            convolved = ((side + 2 * padding - kernel_size) // stride + 1 for side in (height, breadth))
            height, breadth = ((side - 1) // 2 + 1 for side in convolved)
            channels = out
        self.flatten = nn.Flatten(2)
        self.transpose = Transpose()
        tokens = height * breadth
        if positions == "learned":
            self.add_module("positions", parts.LearnedPositions(tokens, width, std=0.2))
        elif positions == "sinusoidal":
            self.add_module("positions", parts.SinusoidalPositions(tokens, width))


class Transpose(nn.Module):
    """Transposes channels and positions."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, T, C]`` for ``[N, C, T]``."""
        return x.transpose(1, 2)


class CompactTransformer(_SequentialNetwork):
    """Compact convolutional transformers CCT-2, 4, 6, 7 and 14: convolutional tokenisation and sequence pooling.

    As in the authors' code, the second layer norm of a block acts on the stream itself:
    ``x = x + attention(norm1(x))``, ``x = norm2(x)``, ``x = x + mlp(x)``. Queries, keys and values have no biases. With
    the defaults and CIFAR-10's images there are 3,760,139 parameters. Linear layers start with normal weights of
    standard deviation 0.02, convolutions Kaiming-normal, positions with standard deviation 0.2.

    Args:
        in_channels: Channels of the images, >= 1.
        image_size: Side of the images, or (height, width); any.
        num_classes: Number of outputs ``C``, >= 1.
        variant: ``L/PxC``: blocks, kernel size and number of convolutions. ``L`` is 2, 4, 6, 7 or 14 and sets the
            defaults below. Published are 2/3x2, 4/3x2, 6/3x1, 6/3x2, 7/3x1, 7/3x2 for 32x32 and 14/7x2 for 224x224
            pixels.
        width: Channels of the stream, a multiple of ``heads``; default that of the variant (128, 256 or 384).
        heads: Number of heads; default that of the variant (2, 4 or 6).
        mlp_ratio: Hidden units per channel of the stream; default that of the variant (1, 2 or 3).
        positions: ``learned`` vectors added to the tokens, ``sinusoidal`` constants, or ``none``.
        activation: Activation of the feed-forward layers: a name for :func:`lightning_sym.networks.make_activation`.
        dropout: Dropout of tokens, attention outputs and feed-forward layers, in [0, 1).
        attention_dropout: Dropout of attention weights, in [0, 1).
        stochastic_depth: Drop rate of the last block's branches in training, in [0, 1); rises linearly from 0 at the
            first block.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Hassani et al. (2021), "Escaping the Big Data Paradigm with Compact Transformers", arXiv:2104.05704, and its
        code. Queries, keys and values are separate layers here.

    Example:
        >>> CompactTransformer(1, 28, variant="2/3x2", width=8).sites()[:4]
        ['embedding.activation1', 'embedding.activation2', 'embedding', 'blocks.0.attention.heads']
    """

    def __init__(
        self,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        num_classes: int = 10,
        variant: str = "7/3x1",
        width: int | None = None,
        heads: int | None = None,
        mlp_ratio: float | None = None,
        positions: Positions = "learned",
        activation: str = "gelu",
        dropout: float = 0.0,
        attention_dropout: float = 0.1,
        stochastic_depth: float = 0.1,
    ) -> None:
        super().__init__()
        depth, kernel_size, convolutions = _read(variant)
        usual = _ENCODERS[depth]
        width, heads = usual[0] if width is None else width, usual[1] if heads is None else heads
        mlp_ratio = usual[2] if mlp_ratio is None else mlp_ratio
        parts.check_transformer(
            "CompactTransformer",
            width=width,
            heads=heads,
            depth=depth,
            mlp_ratio=mlp_ratio,
            dropouts={"dropout": dropout, "attention_dropout": attention_dropout, "stochastic_depth": stochastic_depth},
            in_channels=in_channels,
            num_classes=num_classes,
        )
        check_known("kind of positions", positions, get_args(Positions))
        if positions == "sinusoidal" and width % 2:
            raise ValueError(f"Sinusoidal positions need an even width, got {width}.")
        size = height_width(image_size, "image_size")
        self.embedding = ConvolutionalEmbedding(in_channels, size, width, kernel_size, convolutions, "relu", positions)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(
                parts.TransformerBlock(
                    parts.SelfAttention(
                        width, heads, heads, qkv_bias=False, dropout=attention_dropout, output_dropout=dropout
                    ),
                    parts.FeedForward(width, int(width * mlp_ratio), activation, dropout=dropout),
                    (parts.make_norm("layer", width), parts.make_norm("layer", width)),
                    norm_in_stream=True,
                    stochastic_depth=rate,
                )
                for rate in parts.depth_rates(stochastic_depth, depth)
            )
        )
        self.norm = parts.make_norm("layer", width)
        self.pool = parts.SequencePool(width)
        self.classifier = nn.Linear(width, num_classes)
        parts.init_linear(self, partial(nn.init.trunc_normal_, std=0.02))

    def sites(self) -> list[str]:
        """Return the activations and the output of the embedding, and five sites per block.

        The sites of a block are the outputs of the heads, of attention, of the hidden units and of the feed-forward
        layers, and the stream after the block. Their axes are sample, token, channel.
        """
        activations = [name for name, _ in self.embedding.named_children() if name.startswith("activation")]
        return [*(f"embedding.{name}" for name in activations), "embedding", *parts.block_sites(self.blocks)]


def _read(variant: str) -> tuple[int, int, int]:
    """Return blocks, kernel size and number of convolutions of a variant."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)x([0-9]+)", variant) if isinstance(variant, str) else None
    depth, kernel_size, convolutions = map(int, match.groups()) if match else (0, 0, 0)
    if depth not in _ENCODERS or not kernel_size or not convolutions:
        raise ValueError(
            f"variant of CompactTransformer must be blocks/kernel size x convolutions, as in 7/3x1, with "
            f"{', '.join(map(str, _ENCODERS))} blocks, got {variant!r}."
        )
    return depth, kernel_size, convolutions
