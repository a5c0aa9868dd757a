"""The self-test of large networks: on few samples, and on parts of images where the network takes them."""

from typing import Any

import pytest
import torch
from helpers import assert_refused
from torch import Tensor, nn

from lightning_sym.symmetry import Trace, Value, register_rule, self_test, trace_symmetry
from lightning_sym.symmetry.proof import cropped, moving_element
from lightning_sym.symmetry.tracing.labelling import rules

X = torch.randn(2, 3, 160, 160)


class Convolutions(nn.Module):
    """Takes images of any size, or only of one, and says on which it ran."""

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.one, self.two, self.head = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Linear(16, 3),
        )
        self.only = only

    def act(self, hidden: Tensor) -> Tensor:
        return torch.relu(hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.only is not None and x.shape[-1] != self.only:
            raise AssertionError("wrong image size")
        return self.head(self.two(self.act(self.one(x))).mean((2, 3)))


class Sizes(Convolutions):
    """Does something else with small images."""

    def act(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden) if hidden.shape[-1] <= 64 else torch.relu(hidden)


def sizes_seen(monkeypatch: pytest.MonkeyPatch, kind: Any) -> set[int]:
    """Collect the sizes of the images on which networks of a class run with numbers."""
    seen: set[int] = set()
    forward = kind.forward

    def watched(self: nn.Module, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            seen.add(x.shape[-1])
        return forward(self, x)

    monkeypatch.setattr(kind, "forward", watched)
    return seen


@pytest.mark.parametrize(
    ("network", "tested"),
    [(Convolutions(), {64}), (Convolutions(only=160), {64, 160}), (Sizes(), {64, 160})],
    ids=["any size", "one size", "another function for small images"],
)
def test_images_are_cut_where_the_network_takes_parts(
    monkeypatch: pytest.MonkeyPatch, network: nn.Module, tested: set[int]
) -> None:
    seen = sizes_seen(monkeypatch, type(network))
    symmetry = trace_symmetry(network, X)
    assert seen == tested
    assert symmetry.worst_error <= 1e-10
    assert symmetry.check(network) <= 1e-10  # on the example as it is
    assert symmetry.dimension == 16 + 256 + 16  # scales, matrices, biases before the head
    assert symmetry.elements_tried == 1


def test_a_rule_that_allows_too_much_is_found_on_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sigmoid(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x)

    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))

    @register_rule(Sigmoid)
    def wrong(trace: Trace, module: nn.Module, value: Value) -> Value:
        return trace.elementwise(value, positive_scales=True)

    class Wrong(Convolutions):
        def __init__(self) -> None:
            super().__init__()
            self.sigmoid = Sigmoid()

        def act(self, hidden: Tensor) -> Tensor:
            return self.sigmoid(hidden)

    assert_refused(trace_symmetry, Wrong(), X, says="the self-test changed the output", error=RuntimeError)


def test_what_is_cut() -> None:
    given = {"pixels": torch.randn(2, 3, 80, 96), "small": torch.randn(2, 3, 64, 96), "ids": torch.ones(2, 90).long()}
    cut = cropped((given, torch.randn(2, 100, 70)))
    assert [tuple(cut[0][name].shape) for name in given] == [(2, 3, 64, 64), (2, 3, 64, 96), (2, 90)]
    assert torch.equal(cut[0]["pixels"], given["pixels"][..., :64, :64])
    assert cut[1].shape == (2, 100, 70)


@pytest.mark.parametrize(
    ("sizes", "tried"),
    [((8, 8), 1), ((8, 1), 1), ((8, 2), 2), ((1, 1), 2), ((7, 8), 2)],
    ids=["many signs", "a single one", "few", "two of them", "few before many"],
)
def test_few_signs_ask_for_a_second_element(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], tried: int
) -> None:
    monkeypatch.setattr(self_test, "_LARGE", 0)
    one, two = sizes
    network = nn.Sequential(nn.Linear(4, one), nn.Tanh(), nn.Linear(one, two), nn.Tanh(), nn.Linear(two, 3))
    assert trace_symmetry(network, torch.randn(2, 4)).elements_tried == tried


@pytest.mark.parametrize("heads", [2, 3, 8])
def test_few_heads_ask_for_a_second_element(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    monkeypatch.setattr(self_test, "_LARGE", 0)
    layer = nn.TransformerEncoderLayer(24, heads, 16, dropout=0.0, batch_first=True, norm_first=True)
    network = nn.Sequential(nn.Linear(4, 24), layer, nn.Linear(24, 3)).eval()
    assert trace_symmetry(network, torch.randn(2, 5, 4)).elements_tried == 1 + (heads == 3)


def test_a_single_sign_changes_in_one_element() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh(), nn.Linear(1, 3))
    symmetry = trace_symmetry(network, torch.randn(2, 4), check=False)
    for seed in range(8):
        element = moving_element(symmetry, network, torch.Generator().manual_seed(seed), 0.5, None)
        assert symmetry.act(element, network, check=False)[4].weight.sign().ne(network[4].weight.sign()).all()


@pytest.mark.parametrize(
    ("operation", "activation", "allowed"),
    [
        ("tanh", nn.Tanh(), {"positive_scales": True}),
        ("sigmoid", nn.Sigmoid(), {"signs": True}),
        ("gelu", nn.GELU(), {"positive_scales": True}),
        ("relu", nn.ReLU(), {"positive_scales": True, "signs": True}),
        ("elu", nn.ELU(), {"signs": True}),
        ("softplus", nn.Softplus(), {"signs": True}),
        ("hardtanh", nn.Hardtanh(), {"positive_scales": True}),
        ("silu", nn.SiLU(), {"positive_scales": True}),
        ("leaky_relu", nn.LeakyReLU(), {"signs": True}),
        ("mish", nn.Mish(), {"positive_scales": True}),
    ],
)
def test_one_element_finds_a_rule_that_allows_too_much(
    monkeypatch: pytest.MonkeyPatch, operation: str, activation: nn.Module, allowed: dict[str, bool]
) -> None:
    monkeypatch.setattr(self_test, "_LARGE", 0)

    def wrong(trace: Trace, value: Value, *args: Any, **keywords: Any) -> Value:
        return trace.elementwise(value, **allowed)

    monkeypatch.setattr(rules, "_RULES", {**rules._RULES, f"aten::{operation}": wrong})
    elements: list[int] = []
    change = self_test.largest_change

    def counted(*args: Any, samples: int, **keywords: Any) -> Any:
        elements.append(samples)
        return change(*args, samples=samples, **keywords)

    monkeypatch.setattr(self_test, "largest_change", counted)
    network = nn.Sequential(nn.Linear(5, 16), activation, nn.Linear(16, 12), activation, nn.Linear(12, 3))
    assert_refused(
        trace_symmetry, network, torch.randn(2, 5), says="the self-test changed the output", error=RuntimeError
    )
    assert set(elements) == {1}
