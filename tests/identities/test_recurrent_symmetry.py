"""Recurrent layers: hidden units change places, with signs and scales that the cell's activations let through.

The groups are derived by hand (docs/theory/intertwiners.md, 2.9) and judged by the nullity of the Jacobian. In that,
the two biases of a gate, which are only ever added, count once more.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Program
from torch import Tensor, nn

from lightning_sym.symmetry import Symmetry, local_dimension, trace_symmetry

pytestmark = pytest.mark.long


HIDDEN, OUTPUTS = 3, 5


def network(layer: nn.Module, read: Callable[[Any], Tensor], **parts: Any) -> nn.Module:
    """Return a recurrent layer with a linear map behind what is read of its results."""
    parts = {"layer": layer, "head": nn.LazyLinear(OUTPUTS, bias=False)} | parts
    return Program(lambda s, x: s.head(read(s.layer(x))), parts)


def sequence(out: Any) -> Tensor:
    return out[0]


def last_state(out: Any) -> Tensor:
    state = out[1][0] if isinstance(out[1], tuple) else out[1]
    return state[-1]


# By name: the network, how many sets of hidden units change places, signs and magnitudes per unit, the dimension that
# matrices add, and how many pairs of biases there are.
CASES: dict[str, tuple[Callable[[], nn.Module], int, int, int, int, int]] = {
    "lstm": (lambda: network(nn.LSTM(3, HIDDEN, batch_first=True), sequence), 1, 1, 0, 0, 4),
    "lstm, last state": (lambda: network(nn.LSTM(3, HIDDEN, batch_first=True), last_state), 1, 1, 0, 0, 4),
    "lstm, projected": (lambda: network(nn.LSTM(3, HIDDEN, proj_size=2, batch_first=True), sequence), 1, 1, 0, 4, 4),
    "lstm, both ways, without biases": (lambda: network(nn.LSTM(3, HIDDEN, bidirectional=True, bias=False,
        batch_first=True), sequence), 2, 1, 0, 0, 0),
    "gru": (lambda: network(nn.GRU(3, HIDDEN, batch_first=True), sequence), 1, 1, 0, 0, 2),
    "gru, two layers": (lambda: network(nn.GRU(3, HIDDEN, num_layers=2, batch_first=True), sequence), 2, 1, 0, 0, 4),
    "tanh": (lambda: network(nn.RNN(3, HIDDEN, batch_first=True), sequence), 1, 1, 0, 0, 1),
    "relu, without biases": (lambda: network(nn.RNN(3, HIDDEN, nonlinearity="relu", bias=False, batch_first=True),
        sequence), 1, 0, 1, 0, 0),
}  # fmt: skip


def built(name: str) -> tuple[nn.Module, Tensor, Symmetry]:
    torch.manual_seed(0)
    net = CASES[name][0]().double().eval()
    inputs = torch.randn(6, 5, 3, dtype=torch.float64)
    net(inputs)
    with torch.no_grad():
        for weight in net.parameters():
            weight.normal_(std=0.7)
    return net, inputs, trace_symmetry(net, inputs[:2])


@pytest.mark.parametrize("name", CASES)
def test_group_of_a_recurrent_layer(name: str) -> None:
    net, _, symmetry = built(name)
    _, sets, signs, scales, matrices, _ = CASES[name]
    projected = 2 * (matrices > 0)
    assert symmetry.log10_permutations == pytest.approx(sets * math.log10(math.factorial(HIDDEN)))
    assert symmetry.signs == sets * HIDDEN * signs + projected
    assert symmetry.dimension - symmetry.shifts == sets * HIDDEN * scales + matrices
    assert not symmetry.notes
    for length in (1, 2, 9):
        assert symmetry.check(net, torch.randn(3, length, 3), samples=2) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_nullity_is_the_group_and_the_pairs_of_biases(name: str) -> None:
    net, _, symmetry = built(name)
    _, sets, _, scales, matrices, pairs = CASES[name]
    inputs = torch.randn(60 if "last" in name else 12, 5, 3, dtype=torch.float64)
    found = local_dimension(symmetry, net, inputs)
    assert found.nullity == sets * HIDDEN * scales + matrices + pairs * HIDDEN
    assert found.gap > 1e6 or not found.nullity


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_length_of_the_example_does_not_matter(layer: Any, length: int) -> None:
    """From an example of one step, whose state is zero before, no weight of the recurrence counts as unused."""
    torch.manual_seed(0)
    net = network(layer(3, HIDDEN, batch_first=True), sequence)
    net(torch.randn(1, 4, 3))
    symmetry = trace_symmetry(net, torch.randn(2, length, 3))
    assert (symmetry.units, symmetry.signs) == (HIDDEN, HIDDEN)
    assert symmetry.check(net, torch.randn(2, 7, 3)) < 1e-12


def test_initial_states_follow_the_units() -> None:
    """A learned one moves along; one that comes as an input holds all units."""
    torch.manual_seed(0)

    def run(s: Any, x: Tensor) -> Tensor:
        return s.head(s.layer(x, s.start.expand(-1, x.shape[1], -1).contiguous())[0])

    parts = {"layer": nn.GRU(3, HIDDEN), "head": nn.Linear(HIDDEN, 2)}
    learned = Program(run, parts | {"start": nn.Parameter(torch.randn(1, 1, HIDDEN))})
    assert trace_symmetry(learned, torch.randn(5, 2, 3)).signs == HIDDEN
    given = Program(lambda s, x, h: s.head(s.layer(x, h)[0]), parts)
    assert trace_symmetry(given, (torch.randn(5, 2, 3), torch.randn(1, 2, HIDDEN))).log_order == 0


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_in_a_loop_have_the_group_of_the_layer(cell: Any) -> None:
    torch.manual_seed(0)

    def run(s: Any, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = s.cell(step, state)
        return s.head(state[0] if isinstance(state, tuple) else state)

    net = Program(run, {"cell": cell(3, HIDDEN), "head": nn.Linear(HIDDEN, 2)})
    symmetry = trace_symmetry(net, torch.randn(2, 3, 3))
    assert (symmetry.units, symmetry.signs) == (HIDDEN, HIDDEN)
    assert symmetry.log10_permutations == pytest.approx(math.log10(math.factorial(HIDDEN)))
    assert symmetry.check(net, torch.randn(2, 6, 3)) < 1e-12


def test_units_that_stand_at_several_gates_are_counted_as_duplicates_once() -> None:
    net, inputs, symmetry = built("lstm")
    with torch.no_grad():
        for tensor in net.layer.parameters():  # the second unit becomes the first
            tensor.unflatten(0, (4, HIDDEN))[:, 1] = tensor.unflatten(0, (4, HIDDEN))[:, 0]
    counts = local_dimension(symmetry, net, inputs).groups
    assert [count["duplicated"] for count in counts.values()] == [1]
