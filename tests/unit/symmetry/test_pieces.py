"""One parameter that holds the weights of several layers."""

import copy
from collections.abc import Callable

import pytest
import torch
from helpers import assert_refused
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.merging import merge_checkpoints
from lightning_sym.symmetry import canonicalize, orbit_tangents, trace_symmetry, weight_matching

EXACT = 1e-12


class Flat(nn.Module):
    """A function of an input and of one vector."""

    def __init__(self, size: int, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.flat, x)


def transposed(w: Tensor, x: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w[:40].view(8, 5).t(), w[40:45])) @ w[45:60].view(3, 5).T


def tied(w: Tensor, x: Tensor) -> Tensor:
    matrix = w[:40].view(5, 8)
    return torch.tanh(x @ matrix.T + w[40:]) @ matrix


def convolution(w: Tensor, x: Tensor) -> Tensor:
    kernel, bias, head = w.split([48, 6, 24])
    return F.linear(torch.relu(F.conv1d(x[:, None], kernel.view(6, 1, 8), bias)).flatten(1), head.unflatten(0, (4, 6)))


def with_gaps(w: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x @ w[:40].view(8, 5) + w[42:47]) @ w[50:65].view(5, 3)


def overlapping(w: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x @ w[:40].view(8, 5)) @ w[30:45].view(5, 3)


def inputs(count: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


# Size, function, dimension, units, names of pieces.
CASES = {
    "transposed": (60, transposed, 5, 5, ["flat[0:40]", "flat[40:45]", "flat[45:60]"]),
    "tied": (45, tied, 0, 5, ["flat[0:40]", "flat[40:45]"]),
    "convolution": (78, convolution, 6, 6, ["flat[0:48]", "flat[48:54]", "flat[54:78]"]),
    "with gaps": (65, with_gaps, 5, 5, ["flat[0:40]", "flat[40:42]", "flat[42:47]", "flat[47:50]", "flat[50:65]"]),
    "overlapping": (45, overlapping, 0, 0, ["flat"]),
}


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
@pytest.mark.parametrize("name", CASES)
def test_pieces_are_the_weights_of_layers(name: str) -> None:
    size, function, dimension, units, names = CASES[name]
    network, x = Flat(size, function), inputs(9)
    symmetry = trace_symmetry(network, inputs(3))
    assert symmetry.dimension == dimension
    assert sum(group.size for group in symmetry.groups if group.movable) == units
    assert list(symmetry.tensors(network)) == names
    assert symmetry.parameter_names == {*names}
    element = symmetry.sample(torch.Generator().manual_seed(0))
    moved = symmetry.act(element, network)
    torch.testing.assert_close(moved(x), network(x), rtol=EXACT, atol=EXACT)
    assert orbit_tangents(symmetry, network).rank == dimension
    assert weight_matching(symmetry, network, moved).distance_after < 1e-10
    one, two = (canonicalize(symmetry, own).network.flat for own in (network, moved))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_files_and_optimisers_hold_the_whole_parameter(tmp_path):
    network = Flat(60, transposed)
    symmetry = trace_symmetry(network, inputs(3))
    element = symmetry.sample(torch.Generator().manual_seed(0))
    save_file(network.state_dict(), tmp_path / "one.safetensors")
    written = symmetry.act_on_files(element, tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    moved = symmetry.act(element, network)
    torch.testing.assert_close(load_file(written), dict(moved.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(symmetry.act_on(element, network.state_dict())["flat"], moved.flat.data, rtol=0, atol=0)
    assert_refused(symmetry.act_on, element, dict(symmetry.tensors(network)), says="has no tensor flat[")

    own, optimizer = copy.deepcopy(network), {}
    optimizer[own] = torch.optim.Adam(own.parameters(), lr=0.01)
    train(own, optimizer[own])
    other = copy.deepcopy(own)
    optimizer[other] = torch.optim.Adam(other.parameters(), lr=0.01)
    optimizer[other].load_state_dict(copy.deepcopy(optimizer[own].state_dict()))
    permuting = symmetry.sample(torch.Generator().manual_seed(0), scale=0)
    symmetry.act(permuting, other, inplace=True, optimizer=optimizer[other])
    for each in (own, other):
        train(each, optimizer[each])
    torch.testing.assert_close(own(inputs(5)), other(inputs(5)), rtol=EXACT, atol=EXACT)


def test_pieces_are_parameters_as_those_of_layers_are():
    def layers(w: Tensor, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, w[:40].view(5, 8), w[40:45]), w[45:75].view(6, 5), w[75:])

    one = trace_symmetry(Flat(81, layers), inputs(3))
    two = trace_symmetry(nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 6)).double(), inputs(3))
    assert (one.dimension, one.shift_kinds, one.notes) == (two.dimension, two.shift_kinds, two.notes)
    assert one.shifts == 5


def train(network, optimizer):
    for count in range(3, 6):
        optimizer.zero_grad()
        network(inputs(count)).square().mean().backward()
        optimizer.step()


def test_what_is_cut_elsewhere_at_another_length_stays_whole():
    def positions(w: Tensor, x: Tensor) -> Tensor:
        length = x.shape[1]
        return torch.relu(x + (w[:16] @ w[16 : 16 * (1 + length)].view(length, 16).T)[..., None])

    network = Flat(96, positions)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    symmetry = trace_symmetry(network, x, more_examples=[x[:, :3]])
    assert list(symmetry.tensors(network)) == ["flat"]


class Decoder(nn.Module):
    """Layers around one with cross-attention, whose packed matrix reads two values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(12, 8)
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, norm_first=True, dropout=0.0)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.head(self.layer(self.first(x), self.second(memory)))


def test_rows_of_a_matrix_that_read_different_values_move_apart(tmp_path):
    torch.manual_seed(0)
    network, given = Decoder().double().eval(), tuple(torch.randn(2, n, 12, dtype=torch.float64) for n in (3, 4))
    symmetry = trace_symmetry(network, given)
    weight = "layer.multihead_attn.in_proj_weight"
    assert [name for name in symmetry.tensors(network) if "[" in name] == [f"{weight}[0:64]", f"{weight}[64:192]"]
    element = symmetry.sample(torch.Generator().manual_seed(1))
    other = symmetry.act(element, network)
    torch.testing.assert_close(other(*given), network(*given), rtol=EXACT, atol=EXACT)
    forms = [canonicalize(symmetry, own).network.state_dict() for own in (network, other)]
    torch.testing.assert_close(*forms, rtol=1e-10, atol=1e-10)
    signs = symmetry.act(
        symmetry.sample(torch.Generator().manual_seed(2), scale=0, mixing=False, shifts=False), network
    )
    match = weight_matching(symmetry, network, signs)
    torch.testing.assert_close(
        symmetry.act(match.element, signs).state_dict(), network.state_dict(), rtol=EXACT, atol=EXACT
    )
    # On files, one tensor after the other.
    files = {name: tmp_path / f"{name}.safetensors" for name in ("network", "other", "signs", "merged")}
    save_file({name: own.contiguous() for name, own in network.state_dict().items()}, files["network"])
    save_file({name: own.contiguous() for name, own in signs.state_dict().items()}, files["signs"])
    symmetry.act_on_files(element, files["network"], files["other"])
    torch.testing.assert_close(load_file(files["other"]), dict(other.state_dict()), rtol=EXACT, atol=EXACT)
    merge_checkpoints([files["network"], files["signs"]], files["merged"], network=Decoder().double(), inputs=given)
    torch.testing.assert_close(load_file(files["merged"]), dict(network.state_dict()), rtol=EXACT, atol=EXACT)
