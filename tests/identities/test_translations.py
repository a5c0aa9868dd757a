"""Translations of values: their tangents, what they do to the function, sums of them, and the shifts among them."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers import Program, of, one_in
from orbit_laws import assert_dimension_is_the_nullity
from test_spelling import ALL, LISTED, jacobian
from torch import Tensor, nn
from torch.func import functional_call, jvp
from translation_cases import CASES

from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.charts import Charts, charted, uncharted
from lightning_sym.symmetry.tracing.affine.space import Translations
from lightning_sym.symmetry.tracing.affine.translations import find_translations
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import capture, constant_names, state_tensors
from lightning_sym.symmetry.tracing.normal_form.normalise import normalise
from lightning_sym.symmetry.tracing.normal_form.pieces import cut_parameters

EXACT = 1e-10
# Singular values, relative to the largest.
ZERO = 1e-9


def translations(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Translations, Charts]:
    """Return what may be added to tensors, and in which charts."""
    captured = capture(network, Call.of(inputs))
    cut_parameters(captured, set())
    captured = normalise(captured)
    charts = Charts(captured.charts, captured.pieces)
    tensors = dict(charted(state_tensors(network), Charts({}, charts.pieces)))
    return find_translations([captured], tensors, constant_names(network)), charts


def acted(
    found: Translations, element: Tensor, tensors: Mapping[str, Tensor], at: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    added = found.at(tensors if at is None else at).summands(element) if found else {}
    return {
        name: functools.reduce(lambda sum, own: own.added_to(sum), added.get(name, []), tensor)
        for name, tensor in tensors.items()
    }


def rank(vectors: Tensor) -> int:
    values = torch.linalg.svdvals(vectors)
    return int((values > ZERO * values.max()).sum()) if values.numel() else 0


def vectors_of(found: Translations, tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return tangents as vectors. Shape (size, all entries of the named tensors)."""
    rates = found.at(tensors).rates(names)
    parts = [torch.from_numpy(rates[name].toarray().T.copy()) for name in names]
    return torch.cat(parts, 1) if parts else torch.zeros(found.size, 0, dtype=torch.float64)


def moving_parameters(found: Translations, charts: Charts, network: nn.Module) -> Tensor:
    """Return tangents that move parameters alone, as vectors."""
    tensors = dict(charted(network.state_dict(), charts))
    vectors = vectors_of(
        found, tensors, [own for name, _ in network.named_parameters() for own in charts.names_of(name)]
    )
    statistics = vectors_of(found, tensors, [n for n, b in network.named_buffers() if b.is_floating_point()])
    if not vectors.numel() or not statistics.numel():
        return vectors
    _, values, right = torch.linalg.svd(statistics.T)
    return right[int((values > ZERO).sum()) :] @ vectors


@pytest.mark.parametrize(("name", "spelling"), one_in(16, LISTED))
def test_as_many_tangents_as_dimensions_and_finite_translations_keep_the_function(name: str, spelling: str) -> None:
    torch.manual_seed(3)
    network, inputs = ALL[name].network(spelling), ALL[name].inputs(2)
    found, charts = translations(network, inputs)
    vectors = moving_parameters(found, charts, network)
    if len(vectors):
        rows = jacobian(ALL[name])
        assert float((rows @ vectors.T).abs().max()) < 1e-8 * float(rows.abs().max())
    buffers = any(b.is_floating_point() for _, b in network.named_buffers())
    assert rank(vectors) <= found.dimension
    assert buffers or rank(vectors) == found.dimension
    torch.manual_seed(3)
    raw = network.state_dict()
    tensors: dict[str, Any] = dict(charted(raw, charts))
    one, two = (3 * torch.randn(found.size, dtype=torch.float64) for _ in range(2))
    first = acted(found, one, tensors)
    with torch.no_grad():
        expected, made = (
            functional_call(network, dict(uncharted(weights.items(), charts, raw)), inputs)
            for weights in (tensors, first)
        )
    assert float((made - expected).abs().max()) < EXACT * float(expected.abs().max())
    after, both = acted(found, two, first), acted(found, one + two, tensors)
    for name_of_tensor, tensor in both.items():
        size = max(float(tensor.double().abs().max()), 1.0)
        assert float((after[name_of_tensor] - tensor).double().abs().max()) < 1e-12 * size


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(3)
def test_nothing_is_added_that_an_input_of_another_size_sees(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    network = Program(case.function, case.parts).double()

    def drawn(*shape: int) -> Tensor:
        return torch.randint(case.tokens, shape) if case.tokens else torch.randn(shape, dtype=torch.float64)

    found, _ = translations(network, (drawn(*case.example),))
    assert found.dimension == case.dimension
    tensors: dict[str, Any] = {n: t.detach() for n, t in state_tensors(network).items() if t.is_floating_point()}
    element = torch.randn(found.size, dtype=torch.float64)
    moved = acted(found, element, {n: torch.zeros_like(t) for n, t in tensors.items()}, tensors)
    changes = {n: own for n, own in moved.items() if bool(own.any())}
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


@pytest.mark.parametrize("read", [3, 4, 5])
def test_units_that_nothing_reads_count_once(read: int) -> None:
    torch.manual_seed(0)
    parts = {"first": of(nn.Linear, 8, 6), "second": of(nn.Linear, read, 5)}
    network = Program(lambda s, x: s.second(s.first(x)[..., :read]), parts).double()
    inputs = torch.randn(64, 8, dtype=torch.float64)
    symmetry = trace_symmetry(network, inputs[:3])
    assert symmetry.dimension == (6 - read) * 9 + read * read + read
    assert_dimension_is_the_nullity(symmetry, network, inputs, 1e6)
