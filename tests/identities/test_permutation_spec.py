"""Permutations in other tools' formats: applied as these tools do, they leave the function alone."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_sym.networks import CIFARResNet, LeNet5, MultiLayerPerceptron, VisionTransformer
from lightning_sym.symmetry import trace_symmetry


def permuted(network: nn.Module, places: dict[str, list[tuple[str, int]]], sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return a state dict as Git Re-Basin permutes one: every axis of a permutation by itself."""
    state = dict(network.state_dict())
    for name, axes in places.items():
        order = torch.randperm(sizes[name])
        assert not torch.equal(order, torch.arange(len(order)))
        for tensor, axis in axes:
            state[tensor] = state[tensor].index_select(axis, order)
    return state


@pytest.mark.parametrize(
    ("network", "shape", "permutations", "left_out"),
    [
        (MultiLayerPerceptron([8, 7], image_size=4), (1, 4, 4), 2, ()),
        (CIFARResNet(20, shortcut="B"), (3, 16, 16), 12, ()),
        (LeNet5(), (1, 28, 28), 3, ("conv2",)),
        (VisionTransformer(1, 8, patch_size=4, width=8, depth=2, heads=2), (1, 8, 8), 3,
            tuple(f"blocks.{i}.attention.{part}" for i in range(2) for part in ("query", "value"))),
    ],
    ids=["perceptron", "resnet", "flattened", "transformer"],
)  # fmt: skip
def test_permutations_of_whole_axes_keep_the_function(
    network: nn.Module, shape: tuple[int, ...], permutations: int, left_out: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    network, x = network.double().eval(), torch.randn(3, *shape, dtype=torch.float64)
    symmetry = trace_symmetry(network, x)
    spec = symmetry.permutation_spec()
    assert (len(spec.perm_to_axes), tuple(spec.left_out)) == (permutations, left_out)
    state = permuted(network, spec.perm_to_axes, spec.sizes)
    before = network(x)
    assert (functional_call(network, state, (x,)) - before).abs().max() <= 1e-12 * before.abs().max()
    # One permutation left out of one axis does change it: the check sees something.
    tensor, axis = next(iter(spec.perm_to_axes.values()))[0]
    state[tensor] = state[tensor].roll(1, axis)
    assert (functional_call(network, state, (x,)) - before).abs().max() > 1e-6 * before.abs().max()


def test_both_dictionaries_and_the_numbers_say_the_same() -> None:
    spec = trace_symmetry(LeNet5(), torch.randn(1, 1, 28, 28)).permutation_spec()
    back = {
        (tensor, axis): name
        for tensor, names in spec.axes_to_perm.items()
        for axis, name in enumerate(names)
        if name is not None
    }
    assert back == {place: name for name, places in spec.perm_to_axes.items() for place in places}
    numbers = spec.numbered()
    assert numbers.keys() == spec.axes_to_perm.keys()
    seen: dict[int, set[str | None]] = {}
    for tensor, row in numbers.items():
        for axis, number in enumerate(row):
            seen.setdefault(number, set()).add(back.get((tensor, axis), f"{tensor} {axis}"))
    assert all(len(names) == 1 for names in seen.values())
    assert sorted(seen) == list(range(len(seen)))
    assert "places on axis 1 of linear1.weight" in spec.left_out["conv2"]
