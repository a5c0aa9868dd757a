"""A trace without notes has found everything: its dimension is the nullity of the Jacobian at generic weights.

What stays fixed, or moves in ways that depend on the weights, has a note. `SILENT` lists what has none today, and why.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from helpers import Program, one_in, parameter
from helpers import of as made
from model_zoo_cases import causal
from orbit_cases import NETWORKS
from symmetry_family_cases import CASES, leaves
from test_spelling import ALL, LISTED
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from translation_cases import CASES as TRANSLATIONS

from lightning_sym.symmetry import completeness, trace_symmetry

pytestmark = pytest.mark.measured

L = nn.Linear
Inputs = tuple[Tensor, ...]
# Singular values of the Jacobian, relative to the largest: those that are zero are about 1e-15.
ZERO = 1e-12
# Weights at which the nullity is measured: at some, units are dead or always on, which only adds directions.
DRAWS = 30
MOST_PARAMETERS = 200

SILENT: dict[str, str] = {
    "writes: sums_of_units_step_by_step": "has no derivative",
    "tables: threshold_of_each_unit": "has steps",
}
# What `trace_symmetry` measures on inputs of further lengths, with further tokens, or at weights that it searches for.
FURTHER = {"shared: layer_norm_of_two_layers": "weights", "shared: layer_norm_used_twice_in_series": "weights",
    "weighted mean: steps": "lengths, of which the sum is divided by three",
    "bag of embeddings: sum": "lengths, of which the sum is divided by three",
    "bag of embeddings: counts": "lengths, of which the sum is divided by three"}  # fmt: skip
# What notes say of weights that are freer than the group: then the dimension is not the nullity.
FREER = ("incoming or outgoing numbers", "nothing reads", "biases could absorb", "reads units more than once",
    "share its running mean", "scales could undo", "no scale in common",
    "by zero, whose weights", "invertible matrices also mix these")  # fmt: skip
# Where exchanges that the group lacks are all that is noted.
EXCHANGED = {
    "writes: two_units_swapped", "writes: indices_are_an_output", "shared: linear_behind_which_two_norms_stand",
    "shared: two_norms_in_front_of_tanh", "shared: weight_of_a_grouped_and_of_a_plain_convolution",
    "parts: selected_paths", "grouped", "mean and variance of members: loop",
    "mean and variance of members: stacks"}  # fmt: skip
# Where such a note is wrong.
ALARMS: dict[str, str] = {}
WIDE = FREER[0]  # then matrices of the group may change nothing


class Case(NamedTuple):
    """A network and its inputs."""

    # positive: Whether weights are made positive, as units would be dead otherwise.

    network: Callable[[], nn.Module]  # makes it
    example: Callable[[int], Any]  # makes inputs of a batch size
    more: Sequence[Callable[[int], Inputs]] = ()  # further examples to trace
    others: Sequence[Callable[[int], Inputs]] = ()  # inputs of other lengths


def program(function: Callable[..., Any], *shape: int, **parts: Any) -> Case:
    return Case(lambda: Program(function, parts), lambda n: (torch.randn(n, *shape, dtype=torch.float64),))


A, B = made(L, 8, 6), made(L, 3, 2)
# Units that are cut off before anything reads them, and layers whose freedom depends on weights.
PARTS = {
    "cut behind tanh": program(lambda s, x: s.b(torch.tanh(s.a(x))[..., :3]), 8, a=A, b=B),
    "cut behind relu": program(lambda s, x: s.b(torch.relu(s.a(x))[..., 3:]), 8, a=A, b=B),
    "cut behind two functions": program(lambda s, x: s.b(torch.tanh(torch.relu(s.a(x)))[..., 1:4]), 8, a=A, b=B),
    "cut behind a gate": program(lambda s, x: s.b((torch.tanh(s.a(x)) * torch.sigmoid(s.c(x)))[..., :3]), 8, a=A, b=B,
        c=A),
    "cut twice": program(lambda s, x: s.b(torch.tanh(s.c(torch.relu(s.a(x))[..., :4]))[..., :3]), 8, a=A, b=B,
        c=made(L, 4, 5)),
    "index": program(lambda s, x: s.b(torch.tanh(s.a(x))[:, [0, 2, 4]]), 8, a=A, b=B),
    "index_select": program(lambda s, x: s.b(torch.relu(s.a(x)).index_select(1, torch.tensor([1, 2, 5]))), 8, a=A, b=B),
    "narrow": program(lambda s, x: s.b(torch.tanh(s.a(x)).narrow(-1, 2, 3)), 8, a=A, b=B),
    "chunk": program(lambda s, x: s.b(torch.tanh(s.a(x)).chunk(2, -1)[1]), 8, a=A, b=B),
    "split": program(lambda s, x: s.b((lambda h: h[0] * h[2])(torch.tanh(s.a(x)).split([3, 1, 3], -1))), 8,
        a=made(L, 8, 7), b=B),
    "parts that are added": program(lambda s, x: s.b((lambda h: h[..., :3] + h[..., 4:7])(torch.tanh(s.a(x)))), 8,
        a=made(L, 8, 8), b=B),
    "one step of several": program(lambda s, x: s.b(torch.tanh(s.a(x) + s.p)[:, 0]), 4, 8, a=A, p=parameter(4, 6),
        b=made(L, 6, 2)),
    "cut behind a gain": program(lambda s, x: s.b(torch.tanh(s.a(x) * s.g)[..., :3]), 8, a=A, g=parameter(6), b=B),
    "cut behind a module": program(lambda s, x: s.b(s.t(s.a(x))[..., :3]), 8, a=A, b=B, t=nn.Tanh),
    "cut behind a mean": program(lambda s, x: s.b(torch.tanh(s.a(x)).mean(1)[..., :3]), 4, 8, a=A, b=B),
    "cut behind a view": program(lambda s, x: s.b(torch.tanh(s.a(x)).view(-1, 2, 3)[:, 0]), 8, a=A, b=B),
    "cut behind a batch norm": program(lambda s, x: s.b(s.n(s.a(x))[..., :3]), 8, a=A, b=B, n=made(nn.BatchNorm1d, 6)),
    "cut behind a softmax": program(lambda s, x: s.b(torch.softmax(s.a(x), -1)[..., :3]), 8, a=A, b=B),
    "cut, and read elsewhere": program(lambda s, x: (lambda h: s.b(torch.relu(h)[...,
        :3]) + s.c(h))(torch.tanh(s.a(x))), 8, a=A, b=B, c=made(L, 6, 2)),
    "wider than the input": program(lambda s, x: s.b(s.a(x)), 5, a=made(L, 5, 6), b=made(L, 6, 9)),
    "wider than the input, with a bias": program(lambda s, x: s.b(s.a(x)), 5, a=made(L, 5, 6),
        b=made(L, 6, 9, bias=False)),
    "wider than the output": program(lambda s, x: s.b(s.a(x)), 8, a=A, b=made(L, 6, 3)),
    "wider than both": program(lambda s, x: s.b(s.a(x)), 4, a=made(L, 4, 6), b=made(L, 6, 3)),
    "bottleneck": program(lambda s, x: s.b(s.a(x)), 8, a=made(L, 8, 4), b=made(L, 4, 7)),
    "layers that are added": program(lambda s, x: s.b(torch.relu(s.a(x) - 0.5 * s.c(x))), 8, a=made(L, 8, 3),
        c=made(L, 8, 3), b=B),
    "layers of two values that are added": program(lambda s, x: s.b(torch.relu(s.a(x) + s.c(torch.tanh(x)))), 8,
        a=made(L, 8, 3), c=made(L, 8, 3), b=B),
    "exponential": program(lambda s, x: s.b(torch.exp(s.a(0.1 * x))), 8, a=made(L, 8, 3), b=B),
    "exponential behind which tanh stands": program(lambda s, x: s.b(torch.tanh(torch.exp(s.a(0.1 * x)))), 8,
        a=made(L, 8, 3), b=B),
    "twice beside itself": program(lambda s, x: s.b(torch.cat([torch.tanh(s.a(x))] * 2, -1)), 8, a=made(L, 8, 3),
        b=made(L, 6, 2)),
}  # fmt: skip


def of_translations(name: str) -> Case:
    case = TRANSLATIONS[name]

    def drawn(shape: Sequence[int]) -> Callable[[int], Inputs]:
        sizes = tuple(shape[1:])
        if case.tokens:
            return lambda n: (torch.randint(case.tokens, (n, *sizes)),)
        return lambda n: (torch.randn(n, *sizes, dtype=torch.float64),)

    others = [drawn(shape) for shape in case.others]
    return Case(lambda: Program(case.function, case.parts), drawn(case.example), others=others)


def of_orbits(name: str) -> Case:
    make, shape = NETWORKS[name]
    return Case(make, lambda n: (torch.randn(n, *shape, dtype=torch.float64),))


def of_families(name: str) -> Case:
    case = CASES[name]
    return Case(case.make, case.example, case.more, (*case.more, *case.fresh))


def of_spellings(name: str) -> Case:
    function, spelling = name.split(": ", 1)[0], name.split(": ", 1)[1]
    return Case(lambda: ALL[function].network(spelling), ALL[function].inputs)


KINDS: dict[str, tuple[Callable[[str], Case], list[str]]] = {
    "part": (PARTS.__getitem__, [*PARTS]),
    "family": (of_families, [*CASES]),
    "spelling": (of_spellings, [f"{name}: {spelling}" for name, spelling in LISTED]),
    "translation": (of_translations, [*TRANSLATIONS]),
    "orbit": (of_orbits, [*NETWORKS]),
}


class Exact(TorchFunctionMode):
    """Keeps double precision where a network asks for single precision."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def double(item: Any) -> Any:
            return torch.float64 if item in (torch.float32, torch.bfloat16) and isinstance(item, torch.dtype) else item

        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(map(double, args)) if function is torch.Tensor.to else args
        return function(*args, **{key: double(value) for key, value in (kwargs or {}).items()})


def run(network: nn.Module, inputs: Any) -> list[Tensor]:
    """Return all outputs that are floating, flat."""
    with Exact():
        made = network(**inputs) if isinstance(inputs, dict) else network(*(x.clone() for x in inputs))
    return [leaf.flatten() for leaf in leaves(made) if leaf.is_floating_point()]


def forward_rows(network: nn.Module, inputs: Any) -> Tensor:
    """Differentiate outputs by one parameter after the other: where a network writes in place. Shape as of `rows`."""
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    columns = []
    with torch.no_grad(), forward_ad.dual_level():
        for name, weight in weights.items():
            for direction in torch.eye(weight.numel(), dtype=weight.dtype):
                moved = forward_ad.make_dual(weight.clone(), direction.view_as(weight))
                made = functional_call(network, weights | {name: moved}, tuple(x.clone() for x in inputs))
                parts = [forward_ad.unpack_dual(leaf) for leaf in leaves(made) if leaf.is_floating_point()]
                columns.append(
                    torch.cat(
                        [(torch.zeros_like(p.primal) if p.tangent is None else p.tangent).flatten() for p in parts]
                    )
                )
    return torch.stack(columns, 1)


def rows(network: nn.Module, inputs: Any) -> Tensor:
    """Differentiate outputs by all parameters. Shape (outputs, parameters), each row of length 1."""
    parameters = list(network.parameters())
    try:
        found = [part for part in run(network, inputs) if part.requires_grad]
        outputs = torch.cat([part[part.isfinite()] for part in found])
        chosen = torch.randperm(len(outputs))[: 2 * sum(parameter.numel() for parameter in parameters)]
        every = torch.eye(len(outputs), dtype=outputs.dtype)[chosen]
        parts = torch.autograd.grad(outputs, parameters, every, is_grads_batched=True, materialize_grads=True)
        whole = zip(parts, parameters, strict=True)  # of those that are not read one zero for all rows
        matrix = torch.cat([part.expand(len(every), *own.shape).reshape(len(every), -1) for part, own in whole], 1)
    except (RuntimeError, IndexError):  # it writes in place
        matrix = forward_rows(network, inputs)
    matrix = matrix[matrix.isfinite().all(1)]
    return matrix / torch.linalg.vector_norm(matrix, dim=1, keepdim=True).clamp(min=1e-9)


def nullity(case: Case, network: nn.Module, count: int, wide: float = 2.0) -> int:
    """Return the nullity at random weights, over inputs of every length that the case names."""
    with torch.no_grad():
        for own in network.parameters():
            own.copy_((0.7 if own.ndim > 1 else 0.5) * torch.randn_like(own) + 0.1)
    with torch.no_grad():
        outputs = sum(len(part) for part in run(network, case.example(2))) / 2
    samples = max(24, math.ceil(2.5 * count / outputs))
    given = [make(samples) for make in (case.example, *case.others)]
    if not isinstance(given[0], dict):
        given = [tuple(wide * x if x.is_floating_point() else x for x in inputs) for inputs in given]
    values = torch.linalg.svdvals(torch.cat([rows(network, inputs) for inputs in given]))
    if not len(values):
        pytest.skip("puts out no finite numbers")
    return count - int((values > ZERO * values[0]).sum())


def check(name: str, case: Case, most: int = MOST_PARAMETERS, draws: int = DRAWS) -> None:
    """Check that the dimension is the nullity, or that a note says why not, and that no such note is wrong."""
    torch.manual_seed(0)
    network = case.network().double().eval()
    count = sum(own.numel() for own in network.parameters())
    if count > most:
        pytest.skip("the Jacobian would take long")
    inputs = case.example(2)
    given, named = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    more = {"more_examples": [make(2) for make in case.more]} if case.more else {}
    symmetry = trace_symmetry(network, *given, **more, **named)
    others = [note for note in symmetry.notes if "some exchange" not in note]
    assert (others != list(symmetry.notes) and not others) == (name in EXCHANGED)
    said = bool(others) or symmetry.buffer_dimension > 0
    freer = [note for note in symmetry.notes if any(part in note for part in FREER)]
    measured = []
    for seed in range(5 if name in {*SILENT, *FURTHER} or said else draws):
        torch.manual_seed(50 + seed)
        try:
            measured.append(nullity(case, network, count))
        except NotImplementedError as error:  # of operations that write into their results
            pytest.skip(f"has no Jacobian: {error}")
        if measured[-1] == symmetry.dimension:
            break
    found = min(measured)
    assert symmetry.dimension <= found or any(WIDE in note for note in freer), (symmetry.dimension, measured)
    whole = symmetry.nullity == symmetry.dimension
    unread = any("no output depends on" in note for note in symmetry.notes)  # of tokens that the example lacks
    if said and symmetry.nullity is not None and not case.others and not unread:
        assert symmetry.nullity <= found, measured
    falls_short = not said and symmetry.dimension < found
    assert (falls_short and not whole) == (name in SILENT), (symmetry.dimension, measured)
    assert (falls_short and whole) == (name in FURTHER), (symmetry.dimension, measured)
    wrong = bool(freer) and symmetry.dimension == found
    assert wrong == (name in ALARMS), (symmetry.dimension, freer)


LISTED_CASES = [(kind, name) for kind, (_, names) in KINDS.items() for name in names]
SPELLINGS = [case for case in LISTED_CASES if case[0] == "spelling"]
# The dimension of most spellings is compared with the nullity in test_spelling.py as well.
TRIED = [
    *LISTED_CASES[: len(PARTS)],
    *one_in(12, [case for case in LISTED_CASES[len(PARTS) :] if case not in SPELLINGS]),
    *one_in(48, SPELLINGS, first=8),
]


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:parameters that evaluation never uses")
@pytest.mark.parametrize(("kind", "name"), TRIED, ids=str)
def test_without_notes_the_dimension_is_the_nullity(kind: str, name: str) -> None:
    check(name, KINDS[kind][0](name))


def test_a_search_goes_on_from_weights_at_which_all_units_are_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, steps = completeness._mutate, itertools.count()

    def dead(network: nn.Module, *given: Any) -> None:
        mutate(network, *given)
        for own in network.parameters():
            own.data.mul_(next(steps) >= len(list(network.parameters())))

    torch.manual_seed(0)
    gained = Program(
        lambda s, x: s.b(torch.relu(s.d(torch.sigmoid(s.g) * s.a(x)))),
        {"a": made(L, 6, 3), "g": parameter(3), "d": made(L, 3, 4), "b": made(L, 4, 2)},
    ).double()
    x = torch.randn(2, 6, dtype=torch.float64)
    monkeypatch.setattr(completeness, "_mutate", dead)
    symmetry = trace_symmetry(gained, x)
    assert next(steps) > 0
    assert (symmetry.dimension, symmetry.nullity) == (10, 19)
    assert any("leaves out 9 of 19" in note for note in symmetry.notes)


def test_rounding_behind_a_saturated_softmax_is_not_rank() -> None:
    """Attention maps as outputs: a shift of all keys changes nothing, and no operation notes that it is not found."""

    def maps(s: Any, x: Tensor) -> Tensor:
        q, k = (torch.einsum("btd,hde->bthe", x, w) + b for w, b in ((s.q, s.a), (s.k, s.b)))
        return torch.einsum("bthe,bshe->bhts", q, k).softmax(-1)

    weights, biases = parameter(2, 6, 3), parameter(2, 3)
    torch.manual_seed(0)
    network = Program(maps, {"q": weights, "k": weights, "a": biases, "b": biases}).double()
    symmetry = trace_symmetry(network, torch.randn(2, 4, 6, dtype=torch.float64))
    assert symmetry.dimension == 24 or any("leaves out" in note for note in symmetry.notes)


@pytest.mark.parametrize("tokens", [[[3, 5, 4, 8]], [[0, 1, 2, 8]], [[2, 3, 4, 5]]])
def test_the_nullity_is_measured_at_all_tokens(tokens: list[list[int]]) -> None:
    """A table that is tied is read at all of its rows, whatever the example holds."""
    torch.manual_seed(0)
    tied = Program(
        lambda s, x: torch.cat([F.linear(s.n(s.e(x)), s.e.weight, s.b), s.h(s.n(s.e(x)))], -1),
        {"e": made(nn.Embedding, 9, 4), "n": made(nn.LayerNorm, 4), "h": made(L, 4, 2), "b": parameter(9)},
    ).double()
    assert trace_symmetry(tied, torch.tensor(tokens)).nullity == 6


# ---- networks of transformers and timm

TEXT: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6,
    "max_position_embeddings": 6, "vocab_size": 14}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 1}
GPT = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6, "n_inner": 6, "vocab_size": 14}
BERT = TEXT | {"type_vocab_size": 1}
# Attention and perceptron side by side: the perceptron sees tokens alone, of which there have to be enough.
BESIDE = {"vocab_size": 40}
OPT = {"ffn_dim": 6, "word_embed_proj_dim": 8}
GEMMA = GROUPED | {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 4}
# The family, whether embeddings are tied, and settings.
TEXTS: dict[str, tuple[str, bool | None, dict[str, Any]]] = {
    "gpt2": ("GPT2", None, GPT | {"head": "LMHeadModel"}),
    "gpt2-untied": ("GPT2", False, GPT | {"head": "LMHeadModel"}),
    "gpt_neox": ("GPTNeoX", None, TEXT | BESIDE),
    "gpt_neox-sequential": ("GPTNeoX", None, TEXT | {"use_parallel_residual": False}),
    "gptj": ("GPTJ", None, GPT | BESIDE | {"rotary_dim": 2}),
    "gpt_bigcode": ("GPTBigCode", None, GPT),
    "opt": ("OPT", None, TEXT | OPT),
    "bloom": ("Bloom", None, {"hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 14}),
    "llama": ("Llama", False, TEXT),
    "llama-grouped": ("Llama", False, GROUPED),
    "llama-tied": ("Llama", True, GROUPED),
    "mistral": ("Mistral", False, GROUPED | {"sliding_window": 3}),
    "qwen2": ("Qwen2", False, GROUPED),
    "qwen3": ("Qwen3", False, GROUPED | {"head_dim": 4}),
    "gemma": ("Gemma", None, GROUPED | {"head_dim": 4}),
    "gemma-untied": ("Gemma", False, GROUPED | {"head_dim": 4}),
    "gemma2": ("Gemma2", None, GEMMA),
    "gemma2-untied": ("Gemma2", False, GEMMA),
    "gemma3": ("Gemma3Text", None, GEMMA | {"network_of": "Gemma3"}),
    "phi3": ("Phi3", None, GROUPED),
    "mpt": ("Mpt", None, {"d_model": 8, "n_heads": 2, "n_layers": 1, "max_seq_len": 6, "vocab_size": 14}),
    "olmo": ("Olmo", False, GROUPED),
    "olmo2": ("Olmo2", False, GROUPED),
    "stablelm": ("StableLm", False, GROUPED | {"partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2", None, GROUPED),
    "granite": ("Granite", False, GROUPED),
    "nemotron": ("Nemotron", None, GROUPED | {"head_dim": 4}),
    "glm": ("Glm", None, GROUPED | {"head_dim": 4}),
    "bert": ("Bert", None, BERT | {"head": "ForMaskedLM"}),
    "bert-classifier": ("Bert", None, BERT | {"head": "ForSequenceClassification", "num_labels": 12}),
    "electra": ("Electra", None, BERT | {"head": "ForMaskedLM", "embedding_size": 8}),
    "modernbert": ("ModernBert", None, TEXT | {"head": "ForMaskedLM"}),
}
TIMM: dict[str, dict[str, Any]] = {
    "vit": {},
    "vit, norms of queries and keys": {"qk_norm": True},
    "vit, LayerScale": {"init_values": 0.5},
    "vit, mean of tokens": {"global_pool": "avg", "class_token": False, "depth": 1},
    "vit, without biases of queries": {"qkv_bias": False},
}
QUICK = {"gpt2-untied", "gemma2"}


def generic(network: nn.Module) -> nn.Module:
    """Return a network whose norms see scales, and which has a gradient by all rows of its tables."""
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.1)
    return network


def text(name: str) -> Case:
    family, tied, settings = TEXTS[name]
    model = causal(family, tied, **settings)
    size = settings["vocab_size"]
    return Case(lambda: generic(model.make()), lambda n: {"input_ids": torch.randint(size, (n, 6))})


def vision(name: str) -> Case:
    timm = pytest.importorskip("timm")
    settings = {"depth": 2} | TIMM[name]

    def make() -> nn.Module:
        return generic(
            timm.models.vision_transformer.VisionTransformer(
                (12, 8), 4, 1, 14, embed_dim=8, num_heads=2, mlp_ratio=0.75, **settings
            )
        )

    return Case(make, lambda n: (torch.randn(n, 1, 12, 8, dtype=torch.float64),))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in (*TEXTS, *TIMM)]
)
def test_without_notes_the_dimension_of_a_network_of_a_library_is_the_nullity(name: str) -> None:
    pytest.importorskip("transformers")
    check(name, text(name) if name in TEXTS else vision(name), most=1400, draws=2)
