"""How networks are called when they are traced: keyword arguments, and which of several outputs counts."""

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_refused
from torch import Tensor, nn

from lightning_sym._checks import UnfitInputsError
from lightning_sym.symmetry import local_dimension, trace_symmetry

X = torch.randn(2, 5)
Y = torch.randn(2, 4)


class Two(nn.Module):
    """Takes two inputs, one of them wanted only at times."""

    def __init__(self, pack: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 8), nn.Linear(4, 8), nn.Linear(8, 3)
        self.pack = pack

    def forward(self, x: Tensor, mask: Tensor | None = None, *, other: Tensor | None = None) -> Any:
        h = torch.relu(self.a(x) if other is None else self.a(x) + self.b(other))
        h = h if mask is None else h * mask
        return self.head(h) if self.pack is None else self.pack(self.head(h), self.a(x))


class AnyName(Two):
    """Takes arguments of any name, as many networks of `transformers` do."""

    def forward(self, x: Tensor | None = None, **keywords: Any) -> Any:
        if x is None:
            raise ValueError("You have to specify x")
        return super().forward(x)


MASK = torch.ones(2, 1)


@pytest.mark.parametrize(
    ("positional", "keywords", "dimension"),
    [
        ((X,), {}, 8),
        (None, {"x": X}, 8),
        # Of two biases that are added, what one gains the other may lose.
        (X, {"other": Y}, 16),
        ((X, MASK), {"other": Y}, 16),
        (None, {"x": X, "mask": MASK, "other": Y}, 16),
    ],
    ids=["positional", "keyword", "both", "tuple and keyword", "all by name"],
)
@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
def test_arguments_by_name(positional: Any, keywords: dict[str, Tensor], dimension: int) -> None:
    network = Two()
    symmetry = trace_symmetry(network, positional, **keywords)
    assert symmetry.dimension == dimension
    assert symmetry.worst_error <= symmetry.tolerance
    assert symmetry.check(network) <= symmetry.tolerance
    assert symmetry.check(network, positional, **keywords) <= symmetry.tolerance
    # Without the other input, its bias takes up nothing.
    assert (symmetry.check(network, x=torch.randn(7, 5)) <= symmetry.tolerance) == ("other" not in keywords)


def test_more_examples_by_name_and_as_dictionaries_of_an_argument() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, batch: Any, scale: float = 1.0) -> Tensor:
            h = self.a(batch["x"] if isinstance(batch, dict) else batch)
            return self.b(torch.relu(h) if h.ndim == 2 else torch.tanh(h)) * scale

    short, long = X, torch.randn(2, 3, 5)
    for symmetry in (
        trace_symmetry(Branches(), {"x": short}, more_examples=[{"x": long}]),
        trace_symmetry(Branches(), short, scale=2.0, more_examples=[long]),
        trace_symmetry(Branches(), batch=short, more_examples=[{"batch": long}]),
        trace_symmetry(Branches(), batch={"x": short}, more_examples=[{"batch": {"x": long}}]),
    ):
        assert (symmetry.scales, symmetry.signs, len(symmetry.examples)) == (0, 0, 2)


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: Tensor
    past_key_values: Any = None


class Named(NamedTuple):
    logits: Tensor
    hidden: Tensor


class DynamicCache:
    """What cannot be looked into."""


PACKS = {
    "dictionary": lambda logits, hidden: {"logits": logits, "hidden": hidden},
    "ordered": lambda logits, hidden: collections.OrderedDict(logits=logits, past_key_values=(hidden,), hidden=hidden),
    "dataclass": lambda logits, hidden: Output(logits, hidden, DynamicCache()),
    "named tuple": Named,
}


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS)
@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
def test_logits_count_where_there_are_logits_and_the_notes_name_the_rest(pack: Any) -> None:
    network = Two(pack)
    symmetry = trace_symmetry(network, X)
    assert symmetry.dimension == 8
    assert [note for note in symmetry.notes if note.startswith("of the outputs logits stays the same, hidden may")]
    assert trace_symmetry(network, X, output="logits").dimension == 8
    hidden = trace_symmetry(network, X, output="hidden")
    assert (hidden.dimension, hidden.units) == (0, 0) or hidden.log10_permutations == 0
    assert symmetry.examples[0].outputs_of(network)[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("pack", "output", "dimension"),
    [
        (lambda logits, hidden: (logits, hidden), 0, 8),
        (lambda logits, hidden: (logits, hidden), None, 0),
        (lambda logits, hidden: {"boxes": logits, "past_key_values": hidden}, None, 8),
        (lambda logits, hidden: (logits, DynamicCache()), None, 8),
        (lambda logits, hidden: {"boxes": logits, "hidden": hidden}, None, 0),
        (lambda logits, hidden: Named(logits, hidden), 0, 8),
    ],
    ids=["first of a tuple", "whole tuple", "cache by name", "cache by class", "no logits", "named tuple by place"],
)
@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
def test_which_outputs_count(pack: Any, output: Any, dimension: int) -> None:
    network = Two(pack)
    symmetry = trace_symmetry(network, X, output=output)
    assert symmetry.dimension == dimension
    # The same outputs count everywhere.
    found = local_dimension(symmetry, network, torch.randn(60, 5))
    assert found.equations == 60 * sum(t.shape[1] for t in symmetry.examples[0].outputs_of(network))


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
def test_an_output_of_another_kind_is_named_in_the_notes() -> None:
    symmetry = trace_symmetry(Two(lambda logits, hidden: (logits, SimpleNamespace(hidden=hidden))), X)
    assert any("1 may change" in note for note in symmetry.notes)


@pytest.mark.parametrize(
    ("network", "arguments", "keywords", "says"),
    [
        (Two(), (), {}, ("got nothing", "Two takes x and, if wanted, mask, other")),
        (Two(), (), {"other": Y}, ("missing a required argument: 'x'", "Two.forward")),
        (Two(), (X,), {"msk": MASK}, ("no argument 'msk'", "Did you mean 'mask'?")),
        (Two(), (X,), {"chek": False}, ("no argument 'chek'", "Did you mean 'check'?")),
        (AnyName(), (X,), {"outptu": "logits"}, ("no argument 'outptu'", "Did you mean 'output'?")),
        (Two(), ((X, MASK, Y),), {}, ("too many positional arguments", "Two.forward")),
        (Two(), (X,), {"x": X}, ("multiple values", "Two.forward")),
    ],
    ids=["nothing", "missing", "misspelt", "misspelt option", "option of any", "too many", "twice"],
)
def test_arguments_that_do_not_fit(network: nn.Module, arguments: Any, keywords: Any, says: tuple[str, ...]) -> None:
    assert_refused(trace_symmetry, network, *arguments, **keywords, says=says, error=TypeError)


@pytest.mark.parametrize(
    ("network", "keywords", "says"),
    [
        (AnyName(), {"xx": X}, ("You have to specify x", "Did you mean 'x'?")),
        (Two(PACKS["dictionary"]), {"x": X, "output": "logit"}, ("Unknown output 'logit'", "Did you mean 'logits'?")),
        (Two(lambda *both: both), {"x": X, "output": 2}, ("Unknown output 2", "0, 1")),
        (Two(), {"x": X, "output": "logits"}, ("returns one tensor",)),
        (Two(lambda *_: SimpleNamespace()), {"x": X}, ("nothing that can be compared", "SimpleNamespace")),
        (Two(lambda *_: {"text": "words"}), {"x": X}, ("nothing that can be compared", "dict")),
    ],
    ids=["misspelt", "no such output", "no such place", "one output", "an object", "words"],
)
def test_outputs_that_are_not_there(network: nn.Module, keywords: Any, says: tuple[str, ...]) -> None:
    error = UnfitInputsError if "xx" in keywords else ValueError
    assert_refused(trace_symmetry, network, **keywords, says=says, error=error)


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
def test_check_and_local_dimension_refuse_arguments_that_do_not_fit() -> None:
    network = Two()
    symmetry = trace_symmetry(network, X)
    for function in (symmetry.check, lambda *given, **named: local_dimension(symmetry, *given, **named)):
        assert_refused(function, network, mask=MASK, says=("missing a required argument: 'x'",), error=TypeError)
    assert_refused(symmetry.check, network, x=X, sampels=3, says="Did you mean 'samples'?", error=TypeError)
    x = torch.randn(80, 5)
    call = symmetry.examples[0]._replace(positional=(x,))
    assert local_dimension(symmetry, network, x=x).nullity == local_dimension(symmetry, network, call).nullity
