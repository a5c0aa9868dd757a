"""One function, one group, however it is written: the dimension is the nullity of the Jacobian in every spelling.

`SHORT` lists the spellings whose group is smaller than that today, or another than that of the function's other
spellings: they have to fail, so that what makes them right takes them off the list.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection

import pytest
import torch
from found_spelling_cases import FOUND
from further_spelling_cases import FURTHER
from generated_spelling_cases import GENERATED
from head_spelling_cases import HEAD_CASES
from helpers import of, one_in, parameter
from masked_spelling_cases import MASKED
from member_spelling_cases import MEMBERS
from published_spelling_cases import PUBLISHED
from spelled_layers import ANGLES, COS, SIN
from spelling_cases import FUNCTIONS, Function, rotary, steps
from table_spelling_cases import TABLES, of_each_two, scalar_product
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F
from tried_spelling_cases import TRIED

from lightning_sym.symmetry import Symmetry, canonicalize, trace_symmetry, weight_matching

ALL = FUNCTIONS | FURTHER | TRIED | FOUND | HEAD_CASES | MASKED | MEMBERS | PUBLISHED | TABLES | GENERATED
LISTED = [(name, spelling) for name, function in ALL.items() for spelling in function.spellings]
# Rounding of float64 in outputs that are computed in another order.
EXACT = 1e-11
# Singular values of the Jacobian, relative to the largest: those that are zero are about 1e-15, others above 1e-8.
ZERO = 1e-11
EVERY = "every spelling"
MATRICES = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SHORT: dict[str, Collection[str]] = {
    "norm per head": EVERY,
    "scores of places": EVERY,  # both factors read x: one may change by M times the other, with an antisymmetric M
    "relative keys": {"batches of positions"},  # axes of heads and of samples as one
    "positions": {"lookup"},
    "attention, learned biases": {"embedding"},
    "latents behind a norm": {"by hand", "by hand, widened"},
    "weights of learned vectors": {"loop"},  # whole; translations of pieces have another name
}


# Spellings traced each time, of each function: its first ones (four of those in `FUNCTIONS`, otherwise one), and the
# following ones, which reach lines of the package that few others reach. Every ninth other is long, the rest slow.
FIRST_OF_FUNCTIONS, FIRST = 2, 1
REACHING: dict[str, Collection[str]] = {
    "LSTM by hand": {"two products"}, "attention, causal": {"exp of a triangle", "exp over sum, stable",
    "fused, mask"}, "attention, grouped queries": {"einsum, positions first", "gather", "stack"},
    "attention, learned biases": {"index_select"}, "attention, mask as input": {"products"},
    "attention, one matrix": {"gpt2", "zeros behind"}, "attention, padded": {"added mask", "exp where",
    "softmax, filled"}, "attention, slopes in a window": {"least number"}, "bag of embeddings": {"mean of indicators",
    "sum"}, "batch norm": {"instance_norm"}, "bias of queries": {"sum"}, "bilinear": {"matmul", "outer"},
    "conditioned norm, scale read twice": {"two numbers"}, "convolution": {"chunks", "conv3d", "mirrored"},
    "convolution and batch norm": {"channels last", "depthwise"}, "decaying sums": {"Fourier"},
    "depthwise convolution and batch norm": {"convolution", "folded", "native"},
    "differences of softmaxes": {"unflatten"}, "embedding and positions": {"gather", "index_select", "stack"},
    "factorisation machine": {"pairs", "products"}, "gains as softplus": {"columns of the weight"},
    "gains of 1 + w": {"minus", "ones"}, "gains that a layer makes": {"diag_embed"},
    "gains that heads share": {"chunks"}, "gated": {"joined"}, "group norm": {"chunks", "image"},
    "grouped queries in arrays": {"fused_groups, by_matmul"}, "groups of an input": {"module"},
    "half of a layer added": {"half the input", "in rows"},
    "heads in arrays": {"heads as samples"}, "kernels of width 1, added": {"cat"},
    "kernels of width 1, side by side": {"one kernel"}, "kernels side by side": {"groups"},
    "kernels that a layer makes": {"loop"}, "largest step": {"aminmax", "max", "max_pool1d"}, "layer norm": {"matrix"},
    "layers, then heads in an array": {"chunk by chunk"}, "linear": {"bias as a column", "rows"},
    "linear around a layer norm": {"columns"}, "linear attention, shares": {"einsum", "sum of keys"},
    "logsumexp of steps": {"log of mean", "log of sum"}, "masked mean": {"weights"}, "maxout": {"max", "max_pool1d",
    "minus the least", "where"}, "mean of neighbours": {"index_add in place", "index_put", "one hot",
    "scatter_reduce"}, "neighbours": {"index_put", "scatter_add"},
    "norm of channels into a convolution": {"rms of centred"}, "numbers for each head": {"repeated"},
    "pixel unshuffle": {"slices", "unfold"}, "pooling": {"mean of chunks", "products"}, "prototypes": {"cdist",
    "expanded"}, "queries, keys, values in an array": {"by_rows", "head_in_part"}, "rational activation": {"Horner"},
    "recurrent layer": {"cell"}, "relative keys": {"batches of positions"}, "residual": {"alpha", "folded gain",
    "negative bias"}, "reversible layers": {"chunks_in_place"}, "rotary, halves": {"written"},
    "rotary, pairs": {"matrices", "written"}, "row that reads a product of places": {"sum"},
    "scores over lengths": {"einsum"}, "two layers, added": {"cat", "mean of a cat"},
    "units of several matrices": {"einsum of a stack"},
    "shares of kernels": {"loop"}, "signed square, by hand": {"rectifiers"}, "sines, complex": {"polar"},
    "size, by hand": {"rectifiers"}, "squeeze and excite": {"einsum"}, "tanh, by hand": {"one exponential"},
    "the best of experts": {"low numbers"}, "two matrices of one tensor": {"unbind"}, "units on two axes": {"unbind"},
    "wave, by hand": {"sin"}, "weight norm": {"_weight_norm"}, "weighted mean": {"steps"},
}  # fmt: skip


def often(name: str, spelling: str) -> bool:
    """Return whether a spelling is traced each time."""
    first = [*ALL[name].spellings][: FIRST_OF_FUNCTIONS if name in FUNCTIONS else FIRST]
    return spelling in {*first, reference(name), *REACHING.get(name, ())}


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
    symmetry = trace_symmetry(function.network(spelling), function.inputs(2), check=False)
    assert not any("stopped" in note for note in symmetry.notes), symmetry.notes  # no analysis ended in an exception
    return symmetry


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
        "matrices between gains": sorted(cell.size for cell in structure.gained),
        "tilts": sum(tilt.size for tilt in structure.tilts),
        "phases": structure.phases,
        "shifts": {*symmetry.shift_kinds},
    }


def moved_around(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    parts = [
        torch.einsum("bihw,oi->bohw", x.roll((1 - i, 1 - j), (2, 3)), w[:, :, i, j]) for i in range(3) for j in range(3)
    ]
    return sum(parts) + b[:, None, None]


# Functions that look like others, of which each is made of the parts of one, and have groups of their own.
LOOKALIKES: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "padded from the other side": ("convolution", lambda s, x: moved_around(torch.tanh(s.a(x)), s.b.weight, s.b.bias)),
    "strides": ("convolution", lambda s, x: F.conv2d(torch.einsum("bihwkl,oikl->bohw",
        x.unfold(2, 3, 1).unfold(3, 3, 1), s.a.weight) + s.a.bias[:, None, None], s.b.weight, s.b.bias, stride=2)),
    "two times": ("convolution", lambda s, x: sum(
        F.conv2d(y, s.b.weight, s.b.bias) for y in (torch.tanh(s.a(x)), torch.tanh(s.a(x)).flip(-1)))),
    "other angles": ("rotary, halves", rotary(lambda q: torch.cat(
        [q[..., :2] * COS - q[..., 2:] * SIN, q[..., :2] * (2 * ANGLES).sin() + q[..., 2:] * (2 * ANGLES).cos()], -1))),
    "any matrices": ("rotary, halves", rotary(lambda q: torch.einsum("tij,bhtj->bhti", MATRICES, q))),
    "one more": ("masked mean", lambda s, x, keep: s.b((keep[..., None] * s.a(x)).sum(1) / (keep.sum(1, True) + 1))),
    "count of others": ("mean of neighbours", lambda s, x, ends: s.b(torch.zeros_like(s.a(x)).index_add(0, ends[1],
        s.a(x)[ends[0]]) / torch.zeros_like(x[:, :1]).index_add(0, ends[0], torch.ones_like(x[:, :1])[ends[0]]))),
    "rolled factor": ("products of each two", lambda s, x, y, z: s.o(of_each_two(scalar_product)(
        s.a(x), s.b(y), s.c(z)) + scalar_product(s.a(x).roll(1, -1), s.b(y)))),
    "weighted product": ("products of each two", lambda s, x, y, z: s.o(of_each_two(scalar_product)(
        s.a(x) * torch.arange(1, 4), s.b(y), s.c(z)) + scalar_product(s.a(x), s.b(y)))),
    "product of three": ("products of each two", lambda s, x, y, z: s.o(of_each_two(scalar_product)(
        s.a(x), s.b(y), s.c(z)) * (s.a(x) * s.b(y) * s.c(z)).sum(-1, keepdim=True))),
    "factors times weights": ("products of each two", lambda s, x, y, z: s.o(of_each_two(scalar_product)(
        s.a(x) * s.o.weight[0], s.b(y) * s.o.weight[1], s.c(z) * s.o.weight[2]))),
    "imaginary part of a sum": ("layer of low rank added", lambda s, x: s.o(torch.tanh((lambda z: z.real - z.imag**2)(
        x.to(torch.complex128) @ (s.w + 1j * (s.b @ s.a)).T)))),
    "counts that are cut": ("bag of embeddings", lambda s, i: s.b(
        F.one_hot(i, 9).sum(1).clamp(max=1).to(s.e.weight) @ s.e.weight)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_looks_like_a_spelling_has_the_group_of_its_own_function(name: str) -> None:
    like, forward = LOOKALIKES[name]
    parts = {part: made for part, made in ALL[like].parts.items() if part != "n"}
    function = dataclasses.replace(
        ALL[like], parts=parts, spellings={name: forward}, samples=min(ALL[like].samples, 30)
    )
    torch.manual_seed(3)
    symmetry = trace_symmetry(function.network(name), function.inputs(2))
    rows = jacobian(function)
    values = torch.linalg.svdvals(rows)
    assert symmetry.dimension <= rows.shape[1] - int((values > ZERO * values[0]).sum())


# A matrix of which an operation shows a diagonal, or rows in another shape: 6 inputs, 8 units, 5 outputs.
PARTS: dict[str, Callable[..., Tensor]] = {
    "diagonal": lambda s, x: s.b(torch.relu(s.a(x) + s.p.diagonal()[None])),
    "diag": lambda s, x: s.b(torch.relu(s.a(x) + torch.diag(s.p))),
    "other diagonal": lambda s, x: s.b(torch.relu(s.a(x) + s.p.flip(0).diagonal())),
    "diagonal between layers": lambda s, x: s.b(s.a(x) + s.p.diagonal()),
    "diagonal of gains": lambda s, x: s.b(torch.tanh(s.a(x) * s.p.diagonal())),
    "rows": lambda s, x: s.b(torch.relu(s.a(x) + s.p[: x.shape[1]])),
    "flat rows": lambda s, x: s.b(torch.relu(s.a(x) + s.p.reshape(-1)[: 8 * x.shape[1]].reshape(-1, 8))),
    "flat rows, narrow": lambda s, x: s.b(torch.relu(s.a(x) + s.p.flatten().narrow(0, 0, 8 * x.shape[1]).view(-1, 8))),
    "flat columns": lambda s, x: s.b(torch.relu(s.a(x) + s.p.T.flatten()[: 8 * x.shape[1]].view(-1, 8))),
    "group norm": lambda s, x: s.b(torch.tanh(F.linear(x, F.group_norm(s.a.weight, 2), s.a.bias) + F.group_norm(s.p,
        1)[0])),
}  # fmt: skip


@functools.cache
def of_parts(name: str, shifts: bool) -> Symmetry:
    parts = {"a": of(nn.Linear, 6, 8), "b": of(nn.Linear, 8, 5), "p": parameter(8, 8)}
    function = Function(parts, steps(6), 0, {name: PARTS[name]})
    torch.manual_seed(3)
    return trace_symmetry(function.network(name), function.inputs(2), shifts=shifts)


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.few(4, "diag-False", "diag-True", "diagonal of gains-True", "group norm-True")
def test_parts_of_a_matrix_have_no_more_than_the_function(name: str, shifts: bool) -> None:
    symmetry = of_parts(name, shifts)
    assert symmetry.worst_error < symmetry.tolerance
    if "rows" in name:  # scales, and the bias of the first layer against the table
        assert symmetry.dimension == of_parts("rows", shifts).dimension == (16 if shifts else 8)


def test_what_is_listed_is_a_spelling() -> None:
    assert all({*spellings} <= {*ALL[name].spellings} for name, spellings in REACHING.items())
    assert all(name in ALL for name in SHORT)
    for name, spellings in SHORT.items():
        assert spellings == EVERY or {*spellings} < {*ALL[name].spellings}


@pytest.mark.long  # a test of the cases only
@pytest.mark.parametrize("name", one_in(3, ALL))
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
            found = ALL[name].network(spelling)(*inputs).detach()
        assert float((found - expected).abs().max()) < EXACT * float(expected.abs().max()), spelling


def marks(name: str, spelling: str) -> list[pytest.MarkDecorator]:
    falls_short = [pytest.mark.xfail(strict=True, raises=AssertionError)] * short(name, spelling)
    seldom = pytest.mark.slow if LISTED.index((name, spelling)) % 9 else pytest.mark.long
    return falls_short + [seldom] * (not often(name, spelling))


@pytest.mark.parametrize(
    ("name", "spelling"), [pytest.param(*case, marks=marks(*case), id=": ".join(case)) for case in LISTED]
)
def test_dimension_is_the_nullity_in_every_spelling(name: str, spelling: str) -> None:
    symmetry = traced(name, spelling)
    assert symmetry.dimension == ALL[name].nullity
    assert kinds(symmetry) == kinds(traced(name, reference(name)))


@pytest.mark.parametrize("name", ["maxout", "largest step", "logsumexp of steps"])
def test_extrema_and_their_like_keep_permutations(name: str) -> None:
    assert traced(name, reference(name)).log10_permutations > 0.7


@pytest.mark.parametrize("spelling", PUBLISHED["rectifiers of both signs"].spellings)
def test_note_on_signs_that_exchange_copies(spelling: str) -> None:
    """A unit's sign change would exchange its two copies, which the group does not contain."""
    assert any("units and their negatives" in note for note in traced("rectifiers of both signs", spelling).notes)


@pytest.mark.parametrize(("name", "spelling"), one_in(32, LISTED))
def test_elements_keep_the_function(name: str, spelling: str) -> None:
    function = ALL[name]
    symmetry = trace_symmetry(function.network(spelling), function.inputs(2))
    assert symmetry.worst_error < symmetry.tolerance
    # With the lengths at which the self-test traces as well, some have fewer: means that divide by 3, given masks.
    assert symmetry.dimension <= traced(name, spelling).dimension


@pytest.mark.parametrize("name", [*HEAD_CASES, "factors with biases", "gains and biases of classes", "thresholds"])
def test_elements_with_translations_multiply_as_they_act(name: str) -> None:
    symmetry = traced(name, reference(name))
    network, generator = ALL[name].network(reference(name)), torch.Generator().manual_seed(0)
    first, second = symmetry.sample(generator), symmetry.sample(generator)
    one = symmetry.act(second, symmetry.act(first, network)).state_dict()
    two = symmetry.act(symmetry.compose(second, first), network).state_dict()
    for key, tensor in one.items():
        assert float((tensor - two[key]).abs().max()) < EXACT * float(tensor.abs().max()), key


@pytest.mark.parametrize(
    "name",
    ["decoder", "neighbours", "gains that heads share", "conditioned norm", "gain per head", "gains per head",
        "temperature per head", "shared queries and keys", "heads in arrays", "factors with biases"],
)  # fmt: skip
@pytest.mark.few(5, "conditioned norm", "factors with biases", "gain per head", "shared queries and keys")
def test_planted_elements_are_found(name: str) -> None:
    symmetry = traced(name, reference(name))
    torch.manual_seed(3)
    network = ALL[name].network(reference(name))
    assert canonicalize(symmetry, network, check=True).difference < 1e-8
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0)), network)
    assert weight_matching(symmetry, network, moved, restarts=3).distance_after < 1e-10
