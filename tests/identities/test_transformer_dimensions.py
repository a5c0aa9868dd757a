"""The dimension of the group of whole networks is the nullity of their Jacobian (intertwiners.md, 2.11 to 3.6).

Weights are generic (gains, biases and embeddings, too), there are more classes than channels, and eps is large enough
that scales of what norms read are seen.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Program, of, parameter
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.symmetry import local_dimension, trace_symmetry

WIDTH, INNER, HEADS, CLASSES, LENGTH = 8, 6, 2, 14, 5
E = WIDTH // HEADS
L, N = nn.Linear, nn.LayerNorm


def attend(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return s.out(((q @ k.mT / E**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


def layer_scale(s: Any, x: Tensor) -> Tensor:
    x = x + s.gain1 * attend(s, s.norm1(x))
    return x + s.gain2 * s.down(F.gelu(s.up(s.norm2(x))))


def compact(s: Any, x: Tensor) -> Tensor:
    """A layer of a compact convolutional transformer, with a norm in the stream itself."""
    x = s.norm2(x + attend(s, s.norm1(x)))
    return x + s.down(F.gelu(s.up(x)))


def block(function: Callable[..., Tensor], *, biased: bool) -> nn.Module:
    parts = {
        "norm1": of(N, WIDTH), "norm2": of(N, WIDTH), "qkv": of(L, WIDTH, 3 * WIDTH, bias=biased),
        "out": of(L, WIDTH, WIDTH), "up": of(L, WIDTH, INNER), "down": of(L, INNER, WIDTH),
    }  # fmt: skip
    if function is layer_scale:
        parts |= {"gain1": parameter(WIDTH), "gain2": parameter(WIDTH)}
    return Program(function, parts)


def patches(s: Any, x: Tensor) -> Tensor:
    x = s.patches(x).flatten(2).mT
    return s.head(s.norm(s.blocks(torch.cat([s.token.expand(len(x), -1, -1), x], 1) + s.positions))[:, 0])


def pooled_sequence(s: Any, x: Tensor) -> Tensor:
    x = F.max_pool2d(torch.relu(s.patches(x)), 2).flatten(2).mT + s.positions
    x = s.norm(s.blocks(x))
    return s.head((s.pool(x).softmax(1).mT @ x).squeeze(-2))


def vision(function: Callable[..., Tensor], biased: bool) -> nn.Module:
    compact_one = function is pooled_sequence
    parts = {
        "patches": of(nn.Conv2d, 3, WIDTH, 3, padding=1, bias=False) if compact_one else of(nn.Conv2d, 3, WIDTH, 2, 2),
        "positions": parameter(1, 4 if compact_one else 5, WIDTH), "norm": of(N, WIDTH), "head": of(L, WIDTH, 10),
        "blocks": lambda: nn.Sequential(*(block(compact if compact_one else layer_scale, biased=biased)
                                          for _ in range(2))),
    }  # fmt: skip
    parts |= {"pool": of(L, WIDTH, 1)} if compact_one else {"token": parameter(1, 1, WIDTH)}
    return Program(function, parts)


def gpt2(tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=CLASSES, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_inner=INNER, n_positions=LENGTH,
            bos_token_id=0, eos_token_id=0, use_cache=False, tie_word_embeddings=tied, attn_implementation="eager",
        )
    )  # fmt: skip


def bert(head: str, tied: bool = True, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": CLASSES, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "intermediate_size": INNER, "max_position_embeddings": LENGTH, "pad_token_id": None, "layer_norm_eps": 0.1,
        "type_vocab_size": 1,
    }  # fmt: skip
    config = transformers.BertConfig(**sizes, tie_word_embeddings=tied, attn_implementation="eager", **settings)
    network = getattr(transformers, f"BertFor{head}")(config)
    if not tied:  # the decoder has a bias of its own, and nothing uses this one
        network.cls.predictions.register_parameter("bias", None)
    return network


# Per layer and head: GL(e) on queries and keys, and on values; per layer the gains of two norms.
LINEAR = 2 * (2 * WIDTH * E + 2 * WIDTH)
# Biases of K, V, two norms; rows that read them; writers' means.
SHIFTS = 2 * (4 * WIDTH + (3 * WIDTH + INNER) + (WIDTH + 1) + (INNER + 1))
ROTATED = (WIDTH - 1) * (WIDTH - 2) // 2
LAST = WIDTH + ROTATED  # the gain of the last norm, and the stream
UNTIED = LINEAR + SHIFTS + LENGTH + WIDTH + (CLASSES - 1) + LAST + WIDTH  # tilts of the last norm
# Two gains; patches and the token against positions to their means; the last norm's bias and what reads it.
VISION = 2 * 2 * WIDTH + 2 * WIDTH + (12 + 1 + 1 + LENGTH) - 2 + (WIDTH + 10)
# Without biases of Q, K, V: those of K and V and the norm's, and rows of Q, are gone, and the norm is tilted.
UNBIASED = 2 * (-3 * WIDTH - WIDTH + WIDTH)

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int | None]] = {
    # How it is made, a sample, how many samples, and the dimension by formula.
    "GPT-2, tied": (of(gpt2, True), (), 40, 321),
    "GPT-2, untied": (of(gpt2, False), (), 40, 379),
    "ViT with LayerScale": (of(vision, patches, True), (3, 4, 4), 200, LINEAR + SHIFTS + VISION + LAST),
    "ViT, no biases of queries": (
        of(vision, patches, False), (3, 4, 4), 200, LINEAR + SHIFTS + VISION + LAST + UNBIASED),
    "CCT": (of(vision, pooled_sequence, False), (3, 4, 4), 200, None),
    "BERT, classes": (of(bert, "SequenceClassification", num_labels=10), (), 250, None),
    "BERT, masked": (of(bert, "MaskedLM"), (), 40, None),
    "BERT, untied": (of(bert, "MaskedLM", tied=False), (), 40, None),
}  # fmt: skip
SLOW = ("GPT-2, tied", "ViT with LayerScale", "BERT, classes", "BERT, untied")
CASES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in NETWORKS]


@functools.cache
def made(name: str) -> tuple[nn.Module, Any]:
    make, shape, samples, *_ = NETWORKS[name]
    torch.manual_seed(0)
    network = make().double().eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    if shape:
        return network, torch.randn(samples, *shape, dtype=torch.float64)
    return network, torch.randint(0, CLASSES, (samples, LENGTH))


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_dimension_is_the_nullity_of_the_jacobian(name: str) -> None:
    network, inputs = made(name)
    symmetry = trace_symmetry(network, inputs[:2], output="logits" if name[:4] in ("GPT-", "BERT") else None)
    *_, expected = NETWORKS[name]
    assert symmetry.worst_error <= symmetry.tolerance
    found = local_dimension(symmetry, network, inputs)
    assert found.gap > 1e4
    assert found.nullity == symmetry.dimension
    if expected is not None:
        assert symmetry.dimension == expected
    if name == "GPT-2, untied":
        assert expected == UNTIED
