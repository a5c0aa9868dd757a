"""Translations of values: their tangents, what they do to the function, sums of them, and the shifts among them."""

import functools
from typing import Any

import pytest
import torch
from helpers import Program, one_in
from test_spelling import ALL, LISTED, jacobian
from torch import Tensor, nn
from torch.func import functional_call, jvp
from translation_cases import CASES

from lightning_sym.symmetry import trace as trace_module
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.charts import Charts, charted, uncharted
from lightning_sym.symmetry.tangents import _shifts
from lightning_sym.symmetry.tracing.affine.translations import Translations, find_translations
from lightning_sym.symmetry.tracing.calls import Call
from lightning_sym.symmetry.tracing.capture import capture, constant_names, state_tensors
from lightning_sym.symmetry.tracing.normalise import normalise

EXACT = 1e-10
# Singular values, relative to the largest.
ZERO = 1e-9


def translations(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Translations, Charts]:
    """Return what may be added to tensors, and in which charts."""
    captured = normalise(capture(network, Call.of(inputs)))
    return find_translations([captured], state_tensors(network), constant_names(network)), captured.charts


@functools.cache
def rows(name: str) -> Tensor:
    return jacobian(ALL[name])


def rank(vectors: Tensor) -> int:
    values = torch.linalg.svdvals(vectors)
    return int((values > ZERO * values.max()).sum()) if values.numel() else 0


def moving_parameters(found: Translations, charts: Charts, network: nn.Module) -> Tensor:
    """Return tangents that move parameters alone, as vectors."""
    tensors = dict(charted(network.state_dict(), charts))
    vectors = found.vectors(tensors, [name for name, _ in network.named_parameters()])
    statistics = found.vectors(tensors, [n for n, b in network.named_buffers() if b.is_floating_point()])
    if not vectors.numel() or not statistics.numel():
        return vectors
    _, values, right = torch.linalg.svd(statistics.T)
    return right[int((values > ZERO).sum()) :] @ vectors


@pytest.mark.parametrize(("name", "spelling"), one_in(6, LISTED))
def test_tangents_keep_the_function_and_hold_the_shifts(name: str, spelling: str) -> None:
    torch.manual_seed(3)
    function = ALL[name]
    network, inputs = function.network(spelling), function.inputs(2)
    found, charts = translations(network, inputs)
    vectors = moving_parameters(found, charts, network)
    if len(vectors):
        assert float((rows(name) @ vectors.T).abs().max()) < 1e-8 * float(rows(name).abs().max())
    symmetry = trace_symmetry(network, inputs, check=False)
    parameters = {n: p.detach().double().numpy() for n, p in charted(dict(network.named_parameters()), charts).items()}
    shifts = torch.from_numpy(_shifts(symmetry, parameters).toarray().T.copy())
    assert rank(torch.cat([vectors, shifts])) == rank(vectors)


@pytest.mark.parametrize(("name", "spelling"), one_in(4, LISTED))
def test_finite_translations_keep_the_function_and_add(name: str, spelling: str) -> None:
    torch.manual_seed(3)
    function = ALL[name]
    network, inputs = function.network(spelling), function.inputs(2)
    found, charts = translations(network, inputs)
    raw = network.state_dict()
    tensors: dict[str, Any] = dict(charted(raw, charts))
    one, two = (3 * torch.randn(found.size, dtype=torch.float64) for _ in range(2))
    first = tensors | found.act(one, tensors)
    with torch.no_grad():
        expected, made = (
            functional_call(network, dict(uncharted(weights.items(), charts, raw)), inputs)
            for weights in (tensors, first)
        )
    assert float((made - expected).abs().max()) < EXACT * float(expected.abs().max())
    after, both = first | found.act(two, first), tensors | found.act(one + two, tensors)
    for name_of_tensor, tensor in both.items():
        size = max(float(tensor.double().abs().max()), 1.0)
        assert float((after[name_of_tensor] - tensor).double().abs().max()) < 1e-12 * size


@pytest.mark.parametrize("name", ["linear", "linear around a layer norm", "residual", "embedding and positions"])
def test_translations_and_the_linear_part_are_the_null_space(name: str) -> None:
    torch.manual_seed(3)
    function = ALL[name]
    network, inputs = function.network(next(iter(function.spellings))), function.inputs(2)
    found, charts = translations(network, inputs)
    linear = trace_symmetry(network, inputs, shifts=False, check=False).dimension
    assert found.dimension + linear == function.nullity
    assert rank(moving_parameters(found, charts, network)) == found.dimension


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_added_that_an_input_of_another_size_sees(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    network = Program(case.function, case.parts).double()

    def drawn(*shape: int) -> Tensor:
        return torch.randint(case.tokens, shape) if case.tokens else torch.randn(shape, dtype=torch.float64)

    found, _ = translations(network, (drawn(*case.example),))
    assert found.dimension == case.dimension
    tensors: dict[str, Any] = {n: t.detach() for n, t in state_tensors(network).items() if t.is_floating_point()}
    element = torch.randn(1, found.size, dtype=torch.float64)
    changes = {n: own[0] for n, own in found.changes(element, tensors).items()}
    zero = {n: torch.zeros_like(t) for n, t in tensors.items()}
    anything = {n: torch.randn_like(t) * changes[n].abs().max() for n, t in tensors.items() if n in changes}
    for shape in (case.example, *case.others):
        inputs = drawn(*shape)

        def outputs(weights: dict[str, Any], inputs: Tensor = inputs) -> tuple[Tensor, ...]:
            made = functional_call(network, weights, (inputs,))
            return made if isinstance(made, tuple) else (made,)

        own, others = (jvp(outputs, (tensors,), (zero | moved,))[1] for moved in (changes, anything))
        for one, other in zip(own, others, strict=True):
            assert float(one.abs().max()) <= 1e-9 * float(other.abs().max())


# Networks with shifts that only the interpreter finds. They are not in the groups of today, see `trace._FURTHER`.
FURTHER_SHIFTS = [
    ("linear", "bias as a column"),
    ("group norm", "group_norm"),
    ("positions", "slice"),
    ("pool of CLIP", "multi_head_attention_forward"),
    ("embedding into an LSTM", "lstm"),
    ("three linear layers", "linear"),
]


@pytest.mark.parametrize(("name", "spelling"), FURTHER_SHIFTS)
def test_further_shifts_form_a_group(name: str, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = ALL[name]
    torch.manual_seed(3)
    network, inputs = function.network(spelling), function.inputs(2)
    without = trace_symmetry(network, inputs, check=False)
    monkeypatch.setattr(trace_module, "_FURTHER", True)
    symmetry = trace_symmetry(network, inputs, check=False)
    assert without.dimension <= symmetry.dimension <= function.nullity
    generator = torch.Generator().manual_seed(1)
    first, second = (symmetry.sample(generator, scale=0.3) for _ in range(2))
    own = {key: torch.rand_like(value) + 0.5 for key, value in network.state_dict().items()}
    moved = symmetry.act_on(first, own)
    before, after = (functional_call(network, tensors, inputs) for tensors in (own, moved))
    assert float((after - before).abs().max()) < EXACT * float(before.abs().max())
    both = symmetry.act_on(symmetry.compose(second, first), own)
    for key, tensor in symmetry.act_on(second, moved).items():
        assert float((both[key] - tensor).abs().max()) < 1e-9 * max(float(tensor.abs().max()), 1.0)
