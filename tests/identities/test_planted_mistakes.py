"""The self-test finds every mistake in an element: a wrong entry, a wrong scale, two units in each other's place."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sym.symmetry import Symmetry, self_test, trace_symmetry
from lightning_sym.symmetry.self_test import _prove


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _normed() -> nn.Module:
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, 2))


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(4, 8), layer, nn.LayerNorm(8), nn.Linear(8, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (_layers, (4,)),
    "normed": (_normed, (2, 8, 8)),
    "attention": (_attention, (5, 4)),
}


def _drawn(network: str) -> tuple[nn.Module, Tensor]:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    return make().eval(), torch.randn(2, *shape)


@functools.cache
def _untested(network: str) -> Symmetry:
    return trace_symmetry(*_drawn(network), check=False)


def _entry(tensor: Tensor) -> None:
    tensor.view(-1)[0] += 1e-3 * (1 + tensor.view(-1)[0].abs())


def _scale(tensor: Tensor) -> None:
    tensor[0] *= 1.1


def _places(tensor: Tensor) -> None:
    tensor[[0, 1]] = tensor[[1, 0]].clone()


CASES = [
    (network, name, mistake)
    for network, (make, _) in NETWORKS.items()
    for name, own in make().state_dict().items()
    for mistake in (_entry, _scale, _places)
    if own.ndim and (network != "attention" or (own.ndim > 1 and mistake is not _places))  # enough of each kind
]


@pytest.mark.parametrize(("network", "name", "mistake"), CASES)
@pytest.mark.few(4)
def test_a_mistake_in_one_tensor_is_found(
    network: str, name: str, mistake: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    symmetry = _untested(network)
    if name not in symmetry.structure.moving:
        pytest.skip("no element moves this tensor")
    right = Symmetry._weights

    def wrong(self: Symmetry, element: Any, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for key, tensor in right(self, element, tensors):
            if key == name:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                mistake(tensor)
            yield key, tensor

    monkeypatch.setattr(Symmetry, "_weights", wrong)
    large = mistake is _scale  # as a large network, which is tested on fewer samples
    whole = name == CASES[0][1]  # for the first tensor of each network: further traces find no way out either
    monkeypatch.setattr(self_test, "_LARGE", 0 if large else self_test._LARGE)
    with pytest.raises(RuntimeError, match="the self-test changed the output"):
        trace_symmetry(*_drawn(network)) if whole else _prove(symmetry, _drawn(network)[0], [], None, thrifty=large)
