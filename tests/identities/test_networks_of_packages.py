"""Networks of packages that nobody here wrote have their whole groups.

None of the packages is a requirement: x-transformers, transformer_lens below version 3, torch_geometric, litgpt,
vit-pytorch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sym.symmetry import trace_symmetry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.measured,
    pytest.mark.filterwarnings("ignore"),  # of the packages
]

TOKENS = torch.arange(12).reshape(2, 6)
EDGES = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 0]])
Made = tuple[nn.Module, Any]


def x_transformer(**options: Any) -> Made:
    package = pytest.importorskip("x_transformers", exc_type=ImportError)
    settings = {"dim": 4, "depth": 2, "heads": 2, "attn_dim_head": 2, "ff_mult": 1, **options}
    layers = package.Decoder(**settings)
    return package.TransformerWrapper(num_tokens=12, max_seq_len=6, attn_layers=layers), TOKENS


def hooked_transformer(**options: Any) -> Made:
    package = pytest.importorskip("transformer_lens", exc_type=ImportError)
    settings = {"n_layers": 2, "d_model": 4, "n_ctx": 6, "d_head": 2, "n_heads": 2, "d_vocab": 12, "seed": 0, **options}
    return package.HookedTransformer(package.HookedTransformerConfig(**settings)), TOKENS


def gpt(**options: Any) -> Made:
    package = pytest.importorskip("litgpt", exc_type=ImportError)
    sizes = {"block_size": 6, "vocab_size": 12, "padded_vocab_size": 12, "n_layer": 1, "n_head": 2, "n_embd": 4}
    config = package.Config(**sizes, intermediate_size=5, parallel_residual=False, **options)
    return package.GPT(config), TOKENS


class Graph(nn.Module):
    """Two layers of one class between which units are rectified."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        make, heads = (
            getattr(pytest.importorskip("torch_geometric.nn", exc_type=ImportError), name),
            options.get("heads", 1),
        )
        self.one, self.two = make(7, 6, **options), make(6 * heads, 3, **options)
        self.last = nn.Linear(3 * heads, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = torch.relu(self.one(x, edges))
        result: Tensor = self.last(torch.relu(self.two(hidden, edges)))
        return result


def graph(name: str, **options: Any) -> Made:
    return Graph(name, **options), (torch.randn(4, 7), EDGES)


def small_vit() -> Made:
    pytest.importorskip("vit_pytorch", exc_type=ImportError)
    from vit_pytorch.cct import CCT

    pool = {"pooling_kernel_size": 3, "pooling_stride": 2, "pooling_padding": 1}
    network = CCT(
        img_size=16, embedding_dim=4, n_conv_layers=1, kernel_size=3, stride=2, padding=1, num_layers=1, num_heads=2,
        mlp_ratio=1.0, num_classes=5, n_input_channels=2, positional_embedding="none", **pool,
    )  # fmt: skip
    return network, torch.randn(2, 2, 16, 16)


NETWORKS: dict[str, Callable[[], Made]] = {
    "x-transformers": x_transformer,
    "x-transformers, RMS norms and gates": lambda: x_transformer(
        use_rmsnorm=True, ff_glu=True, ff_swish=True, ff_no_bias=True
    ),
    "x-transformers, relative positions": lambda: x_transformer(rel_pos_bias=True),
    "x-transformers, one head of keys": lambda: x_transformer(attn_one_kv_head=True),
    "x-transformers, gated values": lambda: x_transformer(attn_gate_values=True),
    "TransformerLens": lambda: hooked_transformer(d_mlp=5, act_fn="gelu", normalization_type="LN"),
    "TransformerLens, attention alone": lambda: hooked_transformer(attn_only=True, normalization_type=None),
    "TransformerLens, rotary positions": lambda: hooked_transformer(
        n_layers=1, d_head=4, d_mlp=5, act_fn="silu", normalization_type="RMS", gated_mlp=True,
        positional_embedding_type="rotary", rotary_dim=4,
    ),
    "litgpt": gpt,
    "vit-pytorch": small_vit,
    **{
        f"torch_geometric, {name}": lambda name=name, options=options: graph(name, **options)  # type: ignore[misc]
        for name, options in {
            "GCNConv": {}, "SAGEConv": {}, "GATConv": {"heads": 2}, "GraphConv": {}, "ChebConv": {"K": 2},
            "TAGConv": {}, "SGConv": {}, "ClusterGCNConv": {}, "LEConv": {},
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_groups_are_whole(name: str) -> None:
    torch.manual_seed(0)
    network, example = NETWORKS[name]()
    symmetry = trace_symmetry(network.eval(), example)
    assert symmetry.nullity == symmetry.dimension
    assert symmetry.precision == torch.float64
