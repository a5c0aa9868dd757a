"""Functions that are recorded after some calls give what they gave before."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lightning_sym.landscape import loss_on_data as recorded
from lightning_sym.landscape.loss_on_data import Recorded


class LooksAtItsInputs(nn.Module):
    """Does something else for inputs above a bound, which a recording could not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if float(x.max()) > 1.5 else 1)


PLAIN = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize(
    ("network", "plays"),
    [(PLAIN, True), (LooksAtItsInputs(), False)],
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
    # Ten calls for comparison; of each of two shapes three, one that is recorded, one beside it and no other, or all.
    assert len(calls) == (20 if plays else 24)


def test_a_recording_that_is_wrong_is_thrown_away(monkeypatch):
    monkeypatch.setattr(recorded, "_OFTEN", 3)
    factor = [1.0]
    often = Recorded(lambda x: x * factor[0])
    for call in range(8):
        factor[0] = float(call)
        x = torch.randn(4).double()
        torch.testing.assert_close(often(x), x * call, rtol=0, atol=0)
