"""One function, one group, however it is written: the dimension is the nullity of the Jacobian in every spelling.

`SHORT` lists the spellings whose group is smaller than that today, or another than that of the function's other
spellings: they have to fail, so that what makes them right takes them off the list.
"""

import functools
import warnings
from collections.abc import Collection

import pytest
import torch
from further_spelling_cases import FURTHER
from helpers import one_in
from spelling_cases import FUNCTIONS, Function
from torch import Tensor
from torch.func import functional_call, jacrev

from lightning_sym.symmetry import Symmetry, trace_symmetry

torch.set_num_threads(1)

ALL = FUNCTIONS | FURTHER
LISTED = [(name, spelling) for name, function in ALL.items() for spelling in function.spellings]
# Rounding of float64 in outputs that are computed in another order.
EXACT = 1e-11
# Singular values of the Jacobian, relative to the largest: those that are zero are about 1e-15, others above 1e-8.
ZERO = 1e-11
EVERY = "every spelling"
SHORT: dict[str, Collection[str]] = {
    "linear": {"cat of chunks", "sum of chunks", "bias as a column"},
    "linear around a layer norm": {"cat of chunks", "sum of chunks", "bias as a column"},
    "group norm": EVERY,
    "batch norm": {"norm, then gain", "by hand", "folded", "addcmul", "channels first", "depthwise"},
    "convolution": {
        "unfold",
        "windows",
        "tensordot",
        "shifted",
        "conv3d",
        "transposed",
        "padded",
        "chunks",
        "sum over inputs",
    },
    "attention, causal": {"exp over sum, stable", "exp times mask", "logsumexp", "head by head"},
    "attention, padded": {"added mask", "exp times mask", "softmax times mask"},
    "rotary, halves": {"complex", "written", "matrices"},
    "rotary, pairs": {"complex", "matrices", "narrow"},
    "gated": {"stack"},
    "residual": {"sum", "folded gain", "baddbmm"},
    "embedding and positions": {"index", "index_select", "one hot", "gather"},
    "pooling": {"sum", "einsum", "matmul", "stack", "products", "mean of chunks"},
    "cosine": {"cosine_similarity", "divided later", "outer norms"},
    "gains of 1 + w": EVERY,
    "gains of 1 + w of a layer norm": EVERY,
    "gains of 1 + w in front of layers": EVERY,
    "gains of 1 + w around layers": EVERY,
    "conditioned norm": EVERY,
    "norm per head": EVERY,
    "gain per head": EVERY,
    "gains per head": EVERY,
    "pixel shuffle": EVERY,
    "pixel unshuffle": {"pixel_unshuffle", "unfold"},
    "decoder": EVERY,
    "decoder with leaky relu": EVERY,
    "neighbours": {"index_add", "index_add in place", "scatter_add", "scatter_reduce", "index_put"},
    "mean of neighbours": EVERY,
    "bottleneck with a batch norm": EVERY,
    "cosine attention": EVERY,
    "temperature per head": EVERY,
    "shared queries and keys": EVERY,
    "weighted mean": {"products", "steps"},
    "masked mean": EVERY,
    "one flat parameter": EVERY,
    "bag of embeddings": {"embedding_bag", "sum", "counts", "steps"},
    "bilinear": {"matmul", "outer"},
}


def short(name: str, spelling: str) -> bool:
    listed = SHORT.get(name, ())
    return listed == EVERY or spelling in listed


def reference(name: str) -> str:
    """Return a spelling of a function whose group is whole, if there is one."""
    spellings = list(ALL[name].spellings)
    return next((spelling for spelling in spellings if not short(name, spelling)), spellings[0])


@functools.cache
def traced(name: str, spelling: str) -> Symmetry:
    torch.manual_seed(3)
    function = ALL[name]
    return trace_symmetry(function.network(spelling), function.inputs(2), check=False)


@functools.cache
def outputs(name: str) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return inputs that no trace has seen, and a function's outputs in its first spelling."""
    torch.manual_seed(4)
    inputs = ALL[name].inputs(5)
    with torch.no_grad():
        return inputs, ALL[name].network(next(iter(ALL[name].spellings)))(*inputs)


def jacobian(function: Function) -> Tensor:
    """Compute the derivative of all outputs by all parameters. Shape (outputs, parameters)."""
    torch.manual_seed(5)
    network, inputs = function.network(next(iter(function.spellings))), function.inputs(function.samples)
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # of LSTMs
        parts = jacrev(lambda weights: functional_call(network, weights, inputs).flatten())(parameters)
    return torch.cat([part.reshape(len(part), -1) for part in parts.values()], 1)


def kinds(symmetry: Symmetry) -> dict[str, object]:
    """Return of what a group is made."""
    structure = symmetry.structure
    return {
        "scales": symmetry.scales,
        "signs": symmetry.signs,
        "permutations": round(symmetry.log10_permutations, 6),
        "rotations": sorted(rotation.dimension for rotation in structure.rotations),
        "matrices": sorted(len(cell) for cell in structure.dense),
        "tilts": sum(tilt.size for tilt in structure.tilts),
        "phases": structure.phases,
        "shifts": {*symmetry.shift_kinds},
    }


def test_what_is_listed_as_short_is_a_spelling() -> None:
    assert all(name in ALL for name in SHORT)
    for name, spellings in SHORT.items():
        assert spellings == EVERY or {*spellings} < {*ALL[name].spellings}


@pytest.mark.parametrize("name", ALL)
def test_nullity(name: str) -> None:
    rows = jacobian(ALL[name])
    values = torch.linalg.svdvals(rows)
    values = values / values[0]
    rank = int((values > ZERO).sum())
    assert rows.shape[1] - rank == ALL[name].nullity
    assert len(rows) > rows.shape[1]
    assert values[rank - 1] > 1e3 * ZERO  # a clear gap: no direction is almost free


@pytest.mark.parametrize("name", ALL)
def test_all_spellings_are_one_function(name: str) -> None:
    inputs, expected = outputs(name)
    for spelling in ALL[name].spellings:
        with torch.no_grad():
            found = ALL[name].network(spelling)(*inputs)
        assert float((found - expected).abs().max()) < EXACT * float(expected.abs().max()), spelling


FALLS_SHORT = pytest.mark.xfail(strict=True, raises=AssertionError)


@pytest.mark.parametrize(
    ("name", "spelling"),
    [pytest.param(*case, marks=[FALLS_SHORT] * short(*case), id=": ".join(case)) for case in LISTED],
)
def test_dimension_is_the_nullity_in_every_spelling(name: str, spelling: str) -> None:
    symmetry = traced(name, spelling)
    assert symmetry.dimension == ALL[name].nullity
    assert kinds(symmetry) == kinds(traced(name, reference(name)))


@pytest.mark.parametrize(("name", "spelling"), one_in(16, LISTED))
def test_elements_keep_the_function(name: str, spelling: str) -> None:
    function = ALL[name]
    symmetry = trace_symmetry(function.network(spelling), function.inputs(2))
    assert symmetry.worst_error < symmetry.tolerance
    assert symmetry.dimension == traced(name, spelling).dimension


# Networks with shifts that only the affine interpreter finds.
FURTHER_SHIFTS = [
    ("linear", "conv1d"),
    ("linear around a layer norm", "conv1d"),
    ("group norm", "group_norm"),
    ("residual", "minus"),
    ("positions", "slice"),
    ("pool of CLIP", "multi_head_attention_forward"),
    ("embedding into an LSTM", "lstm"),
    ("three linear layers", "linear"),
]


@pytest.mark.parametrize(("name", "spelling"), FURTHER_SHIFTS)
def test_further_shifts_form_a_group(name: str, spelling: str) -> None:
    network, symmetry = ALL[name].network(spelling), traced(name, spelling)
    generator = torch.Generator().manual_seed(1)
    first, second = (symmetry.sample(generator, scale=0.3) for _ in range(2))
    own = {key: torch.rand_like(value) + 0.5 for key, value in network.state_dict().items()}
    moved = symmetry.act_on(first, own)
    inputs = ALL[name].inputs(3)
    before, after = (functional_call(network, tensors, inputs) for tensors in (own, moved))
    assert float((after - before).abs().max()) < EXACT * float(before.abs().max())
    both = symmetry.act_on(symmetry.compose(second, first), own)
    for tensors, expected in (
        (symmetry.act_on(second, moved), both),
        (symmetry.act_on(symmetry.inverse(first), moved), own),
    ):
        assert all(
            float((tensors[key] - expected[key]).abs().max()) < EXACT * float(expected[key].abs().max()) for key in own
        )


def test_dimensions_that_no_shift_expresses_are_noted() -> None:
    symmetry = traced("group norm", "group_norm")
    assert [note for note in symmetry.notes if note.startswith("16 more dimensions")]
    assert not any("more dimensions" in note for note in traced("positions", "slice").notes)
