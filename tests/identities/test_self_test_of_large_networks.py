"""The self-test of large networks: on few samples, and on parts of images where the network takes them."""

from typing import Any

import pytest
import torch
from helpers import assert_refused
from torch import Tensor, nn

from lightning_sym.symmetry import Trace, Value, register_rule, trace_symmetry
from lightning_sym.symmetry.proof import cropped
from lightning_sym.symmetry.tracing import rules

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
    assert (symmetry.dimension, symmetry.elements_tried) == (
        16 + 256 + 16,
        2,
    )  # scales, matrices, biases before the head


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
