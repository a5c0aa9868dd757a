"""What is special about an example's shape is no symmetry at another one that the network takes."""

import math

import pytest
import torch
from torch import nn

from lightning_sym.symmetry import trace_symmetry, without_weights

# Each function takes what it needs of the network's weights.
pytestmark = pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")

EXACT = 1e-10
N, D = 5, 8  # width of the input, hidden units


class Network(nn.Module):
    """A layer, something that a function makes of its units, and another layer."""

    def __init__(self, between) -> None:
        super().__init__()
        self.first, self.last, self.hidden = nn.Linear(N, D), nn.Linear(D, 3), nn.Linear(D, D)
        self.gain = nn.Parameter(torch.randn(D))
        self.between = between

    def forward(self, x):
        return self.last(self.between(self, x, self.first(x)))


def table_of_python_numbers(network, x, h):
    """At position 0 all are 1."""
    rows = [[math.cos(place * (unit + 1)) for unit in range(D)] for place in range(x.shape[1])]
    return torch.relu(h * torch.tensor(rows, dtype=h.dtype))


def fixed_decays(network, x, h):
    decay, out = torch.linspace(0.5, 1, D, dtype=h.dtype), [h[:, 0]]
    for place in range(1, x.shape[1]):
        out.append(decay * out[-1] + h[:, place])
    return torch.stack(out, 1)


def unrolled(network, x, h):
    state = torch.tanh(h[:, 0])
    for place in range(1, x.shape[1]):
        state = torch.tanh(h[:, place] + network.hidden(state))
    return state


def rolled(network, x, h):
    return torch.relu(h.roll(x.shape[1] - 1, -1) * network.gain)


def power(network, x, h):
    return torch.relu(h) ** x.shape[1]


def rolled_from_six_on(network, x, h):
    return torch.relu(h.roll(max(x.shape[1] - 6, 0), -1) * network.gain)


def power_by_four(network, x, h):
    return torch.relu(h) ** max(1, x.shape[1] // 4)


def rolled_by_samples(network, x, h):
    return torch.relu(h.roll(max(len(x) - 4, 0), -1) * network.gain)


def rolled_by_a_sample(network, x, h):
    return torch.relu(h.roll(len(x) - 1, -1) * network.gain)


# The shape that is traced, and others.
CASES = {
    table_of_python_numbers: [(2, 1), (2, 9)],
    fixed_decays: [(2, 1), (3, 9)],
    unrolled: [(2, 1), (3, 9)],
    rolled: [(2, 1), (2, 5), (2, 8)],
    power: [(2, 1), (2, 4), (2, 5)],
    rolled_from_six_on: [(2, 6), (2, 1), (2, 8), (2, 9)],
    power_by_four: [(2, 6), (2, 5), (2, 9)],
    rolled_by_samples: [(2, 3), (1, 3), (9, 3)],
    rolled_by_a_sample: [(1, 3), (2, 3), (9, 3)],
}


def inputs(shape):
    return torch.randn(*shape, N, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("between", CASES)
@pytest.mark.few(6)
def test_the_group_is_that_of_other_shapes(between):
    torch.manual_seed(0)
    network = Network(between).double()
    given, *others = CASES[between]
    symmetry = trace_symmetry(network, inputs(given))
    moved = Network(between).double()
    moved.load_state_dict(symmetry.act(symmetry.sample(torch.Generator().manual_seed(1)), network).state_dict())
    for shape in (given, *others):
        torch.testing.assert_close(moved(inputs(shape)), network(inputs(shape)), rtol=EXACT, atol=EXACT)
    assert not any("as long as the examples" in note for note in symmetry.notes)


@pytest.mark.parametrize("between", [table_of_python_numbers, unrolled])
def test_one_position_without_a_test(between):
    with without_weights():
        network = Network(between)
    symmetry = trace_symmetry(network, torch.randn(2, 1, N))
    assert symmetry.signs == (D if between is unrolled else 0)
    assert (symmetry.log10_permutations > 0) == (between is unrolled)
    real = Network(between).double()
    moved = symmetry.act(symmetry.sample(), real)
    torch.testing.assert_close(moved(inputs((2, 9))), real(inputs((2, 9))), rtol=EXACT, atol=EXACT)


def test_what_no_length_settles_has_a_note():
    def linear_from_some_unit_on(network, x, h):
        first = max(0, D - x.shape[1] + 1)
        return torch.cat([torch.relu(h[..., :first]), h[..., first:]], -1)

    torch.manual_seed(0)
    symmetry = trace_symmetry(Network(linear_from_some_unit_on).double(), inputs((2, 1)))
    assert symmetry.worst_error <= EXACT
    assert any("of inputs as long as the examples only" in note for note in symmetry.notes)


@pytest.mark.parametrize("shape", [(2, 1), (1, 1), (1, 6), (4, 6), (6, 4)])
def test_ordinary_layers_have_one_group_at_all_shapes(shape):
    torch.manual_seed(0)
    network = Network(lambda network, x, h: torch.relu(h)).double()
    symmetry = trace_symmetry(network, inputs(shape))
    assert (symmetry.dimension, symmetry.signs, len(symmetry.notes)) == (D, 0, 1)  # the unused weights
    assert symmetry.log10_permutations == pytest.approx(math.log10(math.factorial(D)))


def test_a_table_at_one_row_is_fixed_as_before():
    """The lengths that are tried are no examples: they do not tell which part of a table others reach."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(32, D, dtype=torch.float64))
    network = Network(lambda network, x, h: torch.relu(h + network.table[: x.shape[1]])).double()
    network.table = table
    notes = [trace_symmetry(network, inputs((2, length))).notes for length in (1, 4)]
    assert all(any(note.startswith("table[0] is fixed") for note in own) for own in notes)


class OnePatch(nn.Module):
    """Attention over patches of 4 x 4 pixels, of which an example may have one only."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(2, D, 4, 4), nn.Linear(D, 3)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.patch(x).flatten(2).mT)
        return self.head(torch.tanh(((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)).mean(1)))


def test_a_softmax_over_one_place_is_traced_over_several():
    """Without a self-test, whose other sizes would tell: those of large networks are no larger than the example."""
    torch.manual_seed(0)
    network = OnePatch().double()
    small, large = (torch.randn(2, 2, size, size, dtype=torch.float64) for size in (4, 8))
    found = trace_symmetry(network, small, check=False)
    assert found.dimension == trace_symmetry(network, large, check=False).dimension
    assert found.check(network, large) < EXACT


@pytest.mark.parametrize("units", [2, 3, 4])
def test_one_number_for_all_units_is_no_input_with_a_number_for_each(units: int) -> None:
    """A network also takes 2 or 3 numbers, if it has as many units: another function, where they are told apart."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, units), nn.Linear(units, 6)

        def forward(self, x, gate):
            return self.last(self.first(x) * gate)

    inputs = torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 1, dtype=torch.float64)
    symmetry = trace_symmetry(Gated().double(), inputs)
    assert (symmetry.dimension, symmetry.notes) == (units**2, ())
