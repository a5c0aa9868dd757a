"""Two names for one storage: they are one tensor, or the network is refused.

What an element makes of a network is compared on inputs of another batch size, after its state dict went into a network
that was built anew, and in place, where every name that shares the memory changes.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_refused, assert_same
from safetensors.torch import load_file, save_file
from symmetry_family_cases import L, difference, evaluate
from torch import Tensor, nn

from lightning_sym.merging import merge_checkpoints
from lightning_sym.symmetry import Symmetry, canonicalize, trace_symmetry, weight_matching


class Chain(nn.Module):
    """Linear layers, some of whose tensors share memory; a buffer or attribute ``extra`` is read where there is one.

    Args:
        share: Called with the network.
    """

    def __init__(self, share: Callable[[Any], object]) -> None:
        super().__init__()
        self.a, self.mid, self.dec, self.out = L(5, 8), L(8, 8), L(8, 8), L(8, 3)
        share(self)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.dec(torch.relu(self.mid(torch.relu(self.a(x))))))
        if (extra := getattr(self, "extra", None)) is not None:
            h = h @ extra.T if extra.ndim == 2 else h * extra
        return self.out(h)


def by_data(s: Any) -> None:
    s.dec.weight.data = s.mid.weight.data


def by_view(s: Any) -> None:
    s.dec.weight = nn.Parameter(s.mid.weight.detach().view(8, 8))


def weight_and_bias(s: Any) -> None:
    by_data(s)
    s.dec.bias.data = s.mid.bias.data


def by_slices_of_one(s: Any) -> None:
    flat = torch.randn(64)
    s.mid.weight, s.dec.weight = (nn.Parameter(flat[:].view(8, 8)) for _ in range(2))


def buffer(s: Any) -> None:
    s.register_buffer("extra", s.mid.weight.data)


def unsaved_buffer(s: Any) -> None:
    s.register_buffer("extra", s.mid.weight.data, persistent=False)


def two_buffers(s: Any) -> None:
    s.register_buffer("first", torch.rand(8) + 1, persistent=False)
    s.register_buffer("extra", s.first)


def of_one_flat_parameter(s: Any) -> None:
    flat = torch.randn(128)
    s.mid.weight, s.dec.weight = (nn.Parameter(part.view(8, 8)) for part in flat.split(64))


def columns_of_one(s: Any) -> None:
    wide = torch.randn(8, 16)
    s.mid.weight, s.dec.weight = (nn.Parameter(part) for part in wide.split(8, dim=1))


def by_numpy(s: Any) -> None:
    s.dec.weight.data = torch.from_numpy(s.mid.weight.detach().numpy())  # a storage of its own at the same address


def by_dlpack(s: Any) -> None:
    s.dec.weight.data = torch.from_dlpack(s.mid.weight.detach())


def by_one_array(s: Any) -> None:
    s.array = np.random.default_rng(0).normal(size=(8, 8))
    s.mid.weight, s.dec.weight = (nn.Parameter(torch.from_numpy(s.array)) for _ in range(2))


def halves_of_one_array(s: Any) -> None:
    array = np.random.default_rng(0).normal(size=(16, 8))
    s.mid.weight, s.dec.weight = (nn.Parameter(torch.from_numpy(part)) for part in (array[:8], array[8:]))


def transposed(s: Any) -> None:
    s.dec.weight = nn.Parameter(s.mid.weight.detach().T)


def overlapping_slices(s: Any) -> None:
    flat = torch.randn(128)
    s.mid.weight, s.dec.weight = (nn.Parameter(flat[at : at + 64].view(8, 8)) for at in (0, 60))


def overlapping_columns(s: Any) -> None:
    wide = torch.randn(8, 15)
    s.mid.weight, s.dec.weight = (nn.Parameter(wide[:, at : at + 8]) for at in (0, 7))


def row_as_buffer(s: Any) -> None:
    s.register_buffer("extra", s.mid.weight.data[0])


def row_as_bias(s: Any) -> None:
    s.dec.bias.data = s.mid.weight.data[0]


def expanded(s: Any) -> None:
    s.dec.bias = nn.Parameter(torch.randn(1).expand(8))


def attribute(s: Any) -> None:
    s.__dict__["extra"] = s.mid.weight.data


def transposed_attribute(s: Any) -> None:
    s.__dict__["extra"] = s.mid.weight.detach().T


def transposed_by_numpy(s: Any) -> None:
    s.dec.weight.data = torch.from_numpy(s.mid.weight.detach().numpy().T)


def row_by_numpy(s: Any) -> None:
    s.dec.bias.data = torch.from_numpy(s.mid.weight.detach().numpy()[0])


def in_a_list(s: Any) -> None:
    s.held = {"views": [s.dec.bias.data]}


SHARED = [by_data, by_view, weight_and_bias, by_slices_of_one, buffer, unsaved_buffer, two_buffers]
SHARED += [by_numpy, by_dlpack, by_one_array]
APART = [of_one_flat_parameter, columns_of_one, halves_of_one_array]
OVERLAPPING = [transposed, overlapping_slices, overlapping_columns, row_as_buffer, row_as_bias, expanded, attribute]
OVERLAPPING += [transposed_attribute, in_a_list, transposed_by_numpy, row_by_numpy]
X, OTHER = (2, 5), (9, 5)


def built(share: Callable[[Any], object], seed: int) -> Any:
    torch.manual_seed(seed)
    with torch.random.fork_rng():
        torch.set_default_dtype(torch.float64)
        try:
            return Chain(share).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def traced(share: Callable[[Any], object]) -> tuple[Symmetry, Any, Tensor]:
    network = built(share, 0)
    symmetry = trace_symmetry(network, torch.randn(X, dtype=torch.float64), check=False)
    return symmetry, network, torch.randn(OTHER, dtype=torch.float64)


@pytest.mark.parametrize("share", SHARED + APART)
@pytest.mark.few(5)
def test_an_element_keeps_the_function_in_memory_in_place_and_through_a_state_dict(share: Any) -> None:
    symmetry, network, x = traced(share)
    assert symmetry.dimension > 0
    before = evaluate(network, (x,))
    for seed in range(2):
        moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), network)
        assert difference(evaluate(moved, (x,)), before) < 1e-9
        for own in (moved, canonicalize(symmetry, moved).network):
            fresh = built(share, 7)
            fresh.load_state_dict(own.state_dict())
            assert difference(evaluate(fresh, (x,)), before) < 1e-9
        symmetry.act(symmetry.sample(torch.Generator().manual_seed(seed)), network, inplace=True)
        assert_same(dict(moved.state_dict()), dict(network.state_dict()))
        assert difference(evaluate(network, (x,)), before) < 1e-9
    if share in SHARED:
        for own in (network, moved):
            one = own.first if share is two_buffers else own.mid.weight
            two = getattr(own, "extra", own.dec.weight)
            assert one.data_ptr() == two.data_ptr()


def test_names_that_share_memory_have_the_group_of_one_tensor() -> None:
    def by_name(s: Any) -> None:
        s.dec.weight = s.mid.weight

    assert traced(by_data)[0].dimension == traced(by_view)[0].dimension == traced(by_name)[0].dimension


@pytest.mark.parametrize("share", OVERLAPPING)
@pytest.mark.few(6, "expanded", "transposed_attribute")
def test_any_other_overlap_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match="share memory") as error:
        traced(share)
    assert "\n" not in str(error.value)
    symmetry, network, _ = traced(lambda s: s.register_buffer("extra", torch.rand(8)) if share is row_as_buffer else 0)
    share(network)
    with pytest.raises(ValueError, match=r"share memory|the network holds"):
        symmetry.act(symmetry.sample(), network, inplace=True)


@pytest.mark.parametrize("share", [by_data, buffer, two_buffers])
def test_a_network_that_was_parted_is_accepted_while_its_numbers_are_equal(share: Any) -> None:
    """``network.double()`` and ``copy.deepcopy`` part names that share memory."""
    symmetry, network, x = traced(share)
    for parted in (copy.deepcopy(network), copy.deepcopy(network).float().double()):
        before = evaluate(parted, (x,))
        element = symmetry.sample(torch.Generator().manual_seed(3))
        for moved in (symmetry.act(element, parted), canonicalize(symmetry, parted).network):
            assert difference(evaluate(moved, (x,)), before) < 1e-9
        assert symmetry.check(parted) < 1e-10
        assert weight_matching(symmetry, network, symmetry.act(element, parted)).distance_after < 1e-6
        symmetry.act(element, parted, inplace=True)
        assert difference(evaluate(parted, (x,)), before) < 1e-9
    with torch.no_grad():
        (parted.dec.weight if share is by_data else parted.extra).add_(1)
    with pytest.raises(ValueError, match="one tensor in the traced network"):
        symmetry.act(symmetry.sample(), parted)


def test_names_that_are_shared_only_in_the_other_network_are_refused() -> None:
    symmetry, _, _ = traced(lambda s: None)
    for share in (by_data, by_view, weight_and_bias):
        with pytest.raises(ValueError, match="one tensor there and two in the traced network"):
            symmetry.act(symmetry.sample(), built(share, 1))


def test_an_optimiser_of_both_names_is_carried() -> None:
    symmetry, network, x = traced(by_data)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    network(x).square().mean().backward()
    optimizer.step()
    kept = {name: optimizer.state[own]["momentum_buffer"].clone() for name, own in network.named_parameters()}
    symmetry.act(symmetry.sample(mixing=False), network, inplace=True, optimizer=optimizer)
    for name, own in network.named_parameters():
        assert not torch.equal(optimizer.state[own]["momentum_buffer"], kept[name]) or name == "out.bias"


def test_a_file_with_other_numbers_under_the_second_name_is_refused(tmp_path: Path) -> None:
    symmetry, network, x = traced(by_data)
    element, state = symmetry.sample(torch.Generator().manual_seed(1)), network.state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "equal.safetensors")
    save_file({name: tensor + (name == "dec.weight") for name, tensor in state.items()}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other numbers as .*, which are one tensor"):
        symmetry.act_on_files(element, tmp_path / "other.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    fresh = built(by_data, 5)
    fresh.load_state_dict(load_file(symmetry.act_on_files(element, tmp_path / "equal.safetensors", tmp_path / "out")))
    assert difference(evaluate(fresh, (x,)), evaluate(network, (x,))) < 1e-9


def test_what_no_element_moves_may_overlap() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.rand(12)
            self.a, self.b = L(5, 8), L(8, 3)
            self.register_buffer("first", table[:8], persistent=False)
            self.register_buffer("second", table[4:], persistent=False)
            self.views = (table[:3], table[1:])

        def forward(self, x: Tensor) -> Any:
            return self.b(torch.relu(self.a(x)) * self.first * self.second)

    network = Masked()
    symmetry = trace_symmetry(network, torch.randn(X), check=False)
    symmetry.act(symmetry.sample(), network, inplace=True)


def test_state_dicts_and_files_hold_shared_modules_by_all_names(tmp_path: Path) -> None:
    def made(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        twice = nn.Linear(6, 6)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), twice, nn.Tanh(), twice, nn.Tanh(), nn.Linear(6, 3)).double()

    network, other, x = made(0), made(1), torch.randn(5, 4, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    element = symmetry.sample(torch.Generator().manual_seed(0))
    moved = dict(symmetry.act(element, network).state_dict())
    assert not torch.equal(moved["4.weight"], network[4].weight)
    torch.testing.assert_close(symmetry.act_on(element, network.state_dict()), moved)
    save_file({name: own.clone() for name, own in network.state_dict().items()}, tmp_path / "one.safetensors")
    written = symmetry.act_on_files(element, tmp_path / "one.safetensors", tmp_path / "moved.safetensors")
    torch.testing.assert_close(load_file(written), moved)
    for name, own in (("a.pt", network), ("b.pt", other)):
        torch.save(own.state_dict(), tmp_path / name)
    merged = merge_checkpoints([tmp_path / "a.pt", tmp_path / "b.pt"], tmp_path / "m.safetensors", network=made(2),
                               inputs=x)  # fmt: skip
    made(3).load_state_dict(load_file(merged.out))  # strictly


def test_state_dicts_of_other_names_or_numbers_are_refused() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    tied = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 9, bias=False))
    tied[2].weight = tied[0].weight
    for own, x in ((network, torch.randn(2, 4)), (tied, torch.arange(4))):
        symmetry, state = trace_symmetry(own, x), own.state_dict()
        wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
        assert_refused(
            symmetry.act_on, symmetry.sample(), wrapped, says="has no tensor module.0.weight; expected names"
        )
    state["2.weight"] = state["2.weight"] + 1
    assert_refused(symmetry.act_on, symmetry.sample(), state, says="0.weight and 2.weight are one tensor")
