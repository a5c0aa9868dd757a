"""Networks whose weights are on the meta device: traced by shapes and constants alone."""

from typing import Any
from unittest import mock

import pytest
import torch
from helpers import assert_refused
from torch import Tensor, nn

from lightning_sym.symmetry import local_dimension, register_rule, trace_symmetry, without_weights
from lightning_sym.symmetry.tracing.graph import weightless as module_of_large
from lightning_sym.symmetry.tracing.labelling import rules

X = torch.randn(2, 3, 8)


class Positions(nn.Module):
    """Tokens with constants of every kind: frequencies, an index, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 6), nn.Linear(6, 4)
        self.table = nn.Parameter(torch.randn(5, 6))
        self.register_buffer("frequencies", self.made()["frequencies"], persistent=False)
        self.register_buffer("order", self.made()["order"])
        self.register_buffer("mask", torch.ones(6), persistent=False)

    @staticmethod
    def made() -> dict[str, Tensor]:
        # The first two are one number: the units they meet change places.
        return {"frequencies": torch.tensor([2.0, 2.0, 0.5, 0.3, 0.2, 0.1]), "order": torch.tensor([2, 0, 1])}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x)) * self.frequencies + self.table[self.order]
        return self.head(torch.tanh(h * self.mask))


class Timm(Positions):
    def init_non_persistent_buffers(self) -> None:
        self._buffers.update(self.made(), mask=torch.ones(6))


class Model(nn.Module):
    """Knows how its parts are initialised, as models of `transformers` do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Positions()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Positions):
            module._buffers.update(module.made(), mask=torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Drawn(Positions):
    """Draws its frequencies: nobody can have them again."""

    def init_non_persistent_buffers(self) -> None:
        self._buffers.update(frequencies=torch.randn(6), order=torch.tensor([2, 0, 1]), mask=torch.ones(6))


def on_meta(kind: Any) -> nn.Module:
    with torch.device("meta"):
        return kind()


def weightless(kind: Any) -> nn.Module:
    with without_weights():
        return kind()


def deferred(kind: Any) -> nn.Module:
    """Return a network, of which every tensor was large."""
    with mock.patch.object(module_of_large, "_LARGE", 0):
        return weightless(kind)


@pytest.mark.parametrize(
    ("kind", "build"),
    [(Timm, on_meta), (Model, on_meta), (Positions, weightless), (Drawn, weightless), (Positions, deferred)],
    ids=["filled by the module", "filled by the model", "buffers kept", "drawn buffers kept", "large buffers"],
)
def test_the_group_is_that_of_the_network_with_weights(kind: Any, build: Any) -> None:
    network, empty = kind(), build(kind)
    assert all(parameter.is_meta for parameter in empty.parameters())
    found, known = trace_symmetry(empty, X), trace_symmetry(network, X)
    assert (found.fingerprint, found.dimension) == (known.fingerprint, known.dimension)
    assert found.log10_permutations == known.log10_permutations
    if kind is not Drawn:
        assert found.log10_permutations > 0
    assert [note for note in found.notes if note.startswith("not checked")]
    assert "checked with" not in str(found)
    # Its elements are those of every network of the architecture that has weights.
    element = found.sample(torch.Generator().manual_seed(0))
    for symmetry in (found, known):
        torch.testing.assert_close(symmetry.act(element, network)(X), network(X), rtol=1e-4, atol=1e-5)
    assert found.check(network) <= found.tolerance
    assert all(tensor.is_meta for tensor in empty.parameters())


@pytest.mark.parametrize("kind", [Positions, Drawn])
def test_constants_that_cannot_be_had_fix_what_they_meet(kind: Any) -> None:
    symmetry = trace_symmetry(on_meta(kind), X)
    assert any("frequencies is a constant without values" in note for note in symmetry.notes)
    assert symmetry.log10_permutations == 0
    assert symmetry.check(kind()) <= symmetry.tolerance


def test_tied_weights_stay_tied_and_buffers_keep_their_values() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.randn(4, 3), requires_grad=False)
            self.one, self.two = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.one.weight = self.two.weight = weight
            self.norm = nn.BatchNorm1d(4)

    register = nn.Module.register_parameter
    network = weightless(Tied)
    assert network.one.weight is network.two.weight
    assert not network.one.weight.requires_grad
    assert network.norm.running_var.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="odd"), without_weights():
        raise RuntimeError("odd")
    assert nn.Module.register_parameter is register
    assert not nn.Linear(2, 2).weight.is_meta


class Tables(nn.Module):
    """Makes buffers in all ways that are in use, from tensors of more than 100 numbers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layer = nn.Linear(n, n)
        self.drawn = nn.Parameter(torch.randn(n, n) * 0.02)
        place, width = torch.arange(n * n).view(n, n), n
        self.register_buffer("mask", torch.tril(torch.ones(n, n, dtype=torch.bool)), persistent=False)
        self.register_buffer("causal", torch.full((n, n), float("-inf")).triu_(1))
        sinusoids = torch.zeros(n, n)
        sinusoids[:, 0::2], sinusoids[:, 1::2] = place[:, 0::2].sin(), place[:, 1::2].cos()
        self.register_buffer("sinusoids", sinusoids.unsqueeze(0))
        angles = torch.outer(torch.arange(n), torch.arange(n)).float()
        self.register_buffer("turns", torch.polar(torch.ones(n, n), angles))
        self.register_buffer("near_layer", torch.ones(n * n, device=self.layer.weight.device))
        self.register_buffer("both", torch.cat([torch.ones(n, n), torch.zeros(n, n)]).to(torch.float16))
        self.register_buffer("absent", None)
        self.own = nn.Buffer(place % 7, persistent=False)
        self.attribute = torch.ones(n, n) * torch.arange(n)
        steps = torch.zeros(n, n)
        for row in range(n):
            steps[row, :row] = row
        self.register_buffer("steps", steps)
        steps[0, 0] = 5.0  # after it was registered
        chosen = torch.zeros(n, n)
        chosen[place % 3 == 0] = 2.0  # how many are written depends on values
        self.register_buffer("chosen", chosen)
        corner = torch.zeros(2, 2)
        corner.copy_(torch.ones(width, width)[:2, :2])
        self.register_buffer("corner", corner)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, n * n)[:3]]
        self.largest = int(place.max()) if (place > 3).any() else 0
        self.register_buffer("where", place.nonzero())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("n", [12, 17])
def test_large_buffers_have_the_values_that_they_have_with_weights(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_large, "_LARGE", 100)
    full, empty = Tables(n), weightless(lambda: Tables(n))
    shapes = [{name: p.shape for name, p in network.named_parameters()} for network in (full, empty)]
    assert shapes[0] == shapes[1]
    assert all(parameter.is_meta for parameter in empty.parameters())
    for (name, found), (_, known) in zip(empty.named_buffers(), full.named_buffers(), strict=True):
        torch.testing.assert_close(found, known, rtol=0, atol=0, msg=name)
    assert empty.state_dict().keys() == full.state_dict().keys()
    torch.testing.assert_close(empty.attribute, full.attribute, rtol=0, atol=0)
    assert (empty.rates, empty.largest) == (full.rates, full.largest)


def test_values_that_are_not_followed_are_left_out_and_never_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.zeros(20, 20)
            table.view(-1).fill_(2.0)
            self.register_buffer("table", table)
            later = torch.zeros(20, 20)
            self.register_buffer("later", later)

    monkeypatch.setattr(module_of_large, "_LARGE", 100)
    assert weightless(Shared).table.is_meta
    with without_weights():
        later = torch.zeros(20, 20)
        row = later[0]
        nn.Module().register_buffer("later", later)
        with pytest.raises(RuntimeError, match="changed in place by another name"):
            row.fill_(1.0)
    with pytest.raises(Exception, match="meta"), without_weights():
        torch.zeros(2).copy_(nn.Linear(2, 2).weight[0])  # a weight has no values


def test_weights_are_never_allocated() -> None:
    with without_weights():  # 40 GB each
        network = nn.Sequential(nn.Linear(100_000, 100_000), nn.Embedding(100_000, 100_000))
        network.table = nn.Parameter(torch.randn(100_000, 100_000, generator=None) * 0.02)
        nn.init.trunc_normal_(network.table)
    assert all(parameter.is_meta for parameter in network.parameters())


class Half(nn.Module):
    """A module with a rule of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) * 0.5


@pytest.mark.parametrize("build", [on_meta, weightless])
def test_modules_with_rules_of_their_own(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_RULES", "_PYTHON"):
        monkeypatch.setattr(rules, name, dict(getattr(rules, name)))
    register_rule(Half)(lambda trace, module, value: trace.elementwise(value, positive_scales=True))
    symmetry = trace_symmetry(build(lambda: nn.Sequential(nn.Linear(8, 6), Half(), nn.Linear(6, 4))), X)
    assert symmetry.dimension == 6


def test_what_needs_weights_says_so() -> None:
    empty = on_meta(lambda: nn.Linear(8, 4))
    symmetry = trace_symmetry(empty, X)
    assert_refused(symmetry.check, empty, says=("without values (on meta)", "expected a network with weights"))
    assert_refused(local_dimension, symmetry, empty, X, says="expected a network with weights")


def test_a_large_network_costs_no_memory() -> None:
    with torch.device("meta"):  # 40 GB of weights
        network = nn.Sequential(nn.Linear(8, 100_000), nn.ReLU(), nn.Linear(100_000, 100_000, bias=False))
    symmetry = trace_symmetry(network, X)
    assert symmetry.dimension == 100_000


def test_llama_on_meta() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=14, **sizes)
    build = lambda: transformers.LlamaForCausalLM(config).eval()  # noqa: E731
    ids = torch.randint(14, (2, 5))
    found = [trace_symmetry(network, input_ids=ids) for network in (on_meta(build), weightless(build), build())]
    assert len({symmetry.fingerprint for symmetry in found}) == 1
    assert found[0].check(build(), input_ids=ids[:, :3]) <= found[2].tolerance
