"""``upper(lower(x)) == network(x)`` to the last bit, for every site of every architecture."""

import functools

import pytest
import torch
from architectures import OURS, TORCHVISION, check_every_cut
from helpers import one_in
from torch import Tensor, nn

# Of the deep ones the shortest: the others have more blocks of the same kind, and a cut at each.
CASES = {name: case for name, case in (OURS | TORCHVISION).items() if name not in ("resnet44", "resnet56")}


@pytest.mark.parametrize("case", one_in(3, CASES))
@pytest.mark.long
def test_the_halves_are_the_network(case: str) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    network = make()
    assert len(network.sites()) == len(set(network.sites())) > 0
    check_every_cut(network, torch.randn(2, *shape))


@pytest.mark.parametrize("case", one_in(2, CASES))
@torch.no_grad()
@pytest.mark.long
def test_the_first_value_is_what_the_site_puts_out(case: str) -> None:
    make, shape = CASES[case]
    network = make().eval()
    x = torch.randn(2, *shape)
    seen: dict[str, Tensor] = {}

    def record(name: str, _: nn.Module, __: object, output: Tensor) -> None:
        key, call = name, 1
        while key in seen:
            call += 1
            key = f"{name}-{call}"
        seen[key] = output

    named = dict(network.named_modules())
    for site in network.sites():
        if site in named:
            named[site].register_forward_hook(functools.partial(record, site))
    network(x)
    recorded = dict(seen)
    assert list(recorded) == network.sites()  # in execution order
    for site in network.sites()[:: max(1, len(recorded) // 6)]:
        values = network.split(site)[0](x)
        assert torch.equal(values[0] if isinstance(values, tuple) else values, recorded[site]), site


def test_torchvision_resnet_has_one_site_per_call() -> None:
    network = CASES["tv_resnet18"][0]()
    sites = network.sites()
    assert len(sites) == 17
    assert sites[:3] == ["module.relu", "module.layer1.0.relu", "module.layer1.0.relu-2"]
    x = torch.randn(1, 3, 32, 32)
    network.eval()
    # Within a block the skip connection crosses the cut too; between blocks nothing else does.
    assert isinstance(network.split("module.layer1.0.relu")[0](x), tuple)
    assert isinstance(network.split("module.layer1.0.relu-2")[0](x), Tensor)


@pytest.mark.parametrize("case", ["myrtle", "resnet20_a", "tv_squeezenet"])
def test_gradients_through_the_halves_are_the_network_s(case: str) -> None:
    make, shape = CASES[case]
    network = make().eval()
    x = torch.randn(2, *shape)
    expected = torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
    lower, upper = network.split(network.sites()[-2])
    found = torch.autograd.grad(upper(lower(x)).square().sum(), list(network.parameters()))
    for a, b in zip(found, expected, strict=True):
        # Contributions to one tensor may be added in another order: float32 rounding.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
