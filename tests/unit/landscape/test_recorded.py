"""Functions that are recorded after some calls give what they gave before."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lightning_sym.landscape import recorded
from lightning_sym.landscape.recorded import Recorded


class LooksAtItsInputs(nn.Module):
    """Does something else for inputs above a bound, which a recording could not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if float(x.max()) > 1.5 else 1)


@pytest.mark.parametrize(
    ("network", "plays"),
    [(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double(), True), (LooksAtItsInputs(), False)],
    ids=["recorded", "looks at values"],
)
def test_a_function_gives_the_same_before_and_after_it_is_recorded(network, plays, monkeypatch):
    monkeypatch.setattr(recorded, "_OFTEN", 3)
    calls = []

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        calls.append(len(x))
        return functional_call(network, weights, (x,)).square().mean()

    function = vmap(grad(loss), in_dims=(0, None))
    often = Recorded(function)
    for call in range(10):
        weights = {name: torch.randn(2, *p.shape).double() for name, p in network.named_parameters()}
        x = torch.randn(5 + call % 2, 3).double()
        torch.testing.assert_close(often(weights, x), function(weights, x), rtol=0, atol=0)
    # Ten calls for comparison; of each of two shapes two, one that is recorded, and none from there on, or all.
    assert len(calls) == (16 if plays else 22)
