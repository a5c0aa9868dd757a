"""Engine backpack: what only it refuses, other users of BackPACK, and its parts in BackPACK."""

import backpack
import pytest
import torch
from backpack import extend
from backpack.custom_module.branching import Parallel
from backpack.extensions import BatchGrad
from helpers import assert_refused
from test_curvature_engine import Own, batches, perceptron, state
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym.curvature import RelaxedKFAC, RelaxedKFLR, Rule, factors, register_layer
from lightning_sym.layers import CircularConv, FactoredFullyConnected, PolyphasePool, ResidualPathways
from lightning_sym.networks import CIFARResNet, Network


def found(network, loader=None, **settings):
    return factors(network, batches() if loader is None else loader, engine="backpack", **settings)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_other_users_of_backpack_are_not_disturbed():
    other, loss = extend(nn.Sequential(nn.Linear(4, 3))), extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y = batches()[0]
    value = loss(other(x), y)
    with backpack.backpack(BatchGrad()), backpack.disable():
        found(perceptron())
        value.backward()
    assert other[0].weight.grad_batch.shape == (4, 3, 4)


def test_an_extended_network_and_its_factors_are_left_alone():
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    expected = factors(network, batches()).blocks
    network = extend(network)
    network[0].weight.kflr = "old"
    before = state(network)
    torch.testing.assert_close(found(network).blocks["0.weight"].out_factor, expected["0.weight"].out_factor)
    assert network[0].weight.kflr == "old"
    assert state(network) == before


def test_modules_without_parameters_may_be_used_twice():
    activation = nn.Tanh()
    network = nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4), activation, nn.Linear(4, 3))
    expected = factors(network, batches()).blocks
    for name, block in found(network).blocks.items():
        torch.testing.assert_close(block.out_factor, expected[name].out_factor)


# ---- what is refused


class Wrapper(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.parts(x)


class Functional(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.parts(x))


class Skip(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts(x)


class Branches(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x) if x.sum() > 0 else x


class Unused(Network):
    def __init__(self):
        super().__init__()
        self.layer, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def replaced():
    network = perceptron()
    network.forward = lambda x: network[4](network[0](x))
    return network


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Wrapper(nn.Linear(4, 3)), r"cannot handle the network \(Wrapper\).*engine: autograd"),
        (lambda: nn.Sequential(Functional(nn.Linear(4, 3))), r"module '0' \(Functional\).*engine: autograd"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Skip(nn.Linear(4, 4))), r"module '1' \(Skip\).*engine: autograd"),
        (lambda: Branches(nn.Linear(4, 4)), r"network \(Branches\).*engine: autograd"),
        (CIFARResNet, r"\(ResidualBlock\).*engine: autograd"),
        (replaced, r"the network \(Sequential\).*engine: autograd"),
        (Unused, r"'spare' \(Linear\) has trainable parameters but is not called"),
        (lambda: nn.Sequential(nn.Linear(4, 3), InPlace()), r"'1' \(InPlace\) changes its input in place.*autograd"),
        (lambda: nn.Sequential(InPlace(), nn.Linear(4, 3)), r"'0' \(InPlace\) changes its input in place.*autograd"),
        (lambda: nn.Sequential(nn.Linear(4, 3), Pair()), r"'1' \(Pair\) must take one tensor and return one"),
    ],
)
def test_networks_that_engine_backpack_refuses(make, words):
    torch.manual_seed(0)
    network = make()
    before = state(network)
    with pytest.raises(ValueError, match=words) as error:
        found(network)
    assert str(error.value).count(". ") == 0, "one sentence"
    assert state(network) == before


def test_a_path_that_does_not_fit_is_an_error_of_the_layer():
    network = nn.Sequential(ResidualPathways(CircularConv(1, 2), nn.Sequential(CircularConv(1, 2), PolyphasePool())))
    before = state(network)
    assert_refused(found, network, [(torch.randn(2, 1, 4, 4), torch.arange(2))], says="paths of ResidualPathways must")
    assert state(network) == before


# ---- the extensions by themselves


def own_layer():
    class Layer(Own):
        pass

    @register_layer(Layer)
    class LayerRule(Rule):
        def inputs(self, module, x):
            return {"matrix": x[:, None]}

        def gradients(self, module, x, g):
            return {"matrix": g[:, :, None]}

    return nn.Sequential(nn.Tanh(), Layer()), (4,)


def branched():
    paths = Parallel(FactoredFullyConnected(2, 2, 4, 2), nn.Sequential(CircularConv(2, 2), PolyphasePool()))
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), paths, nn.GELU(), nn.Flatten()), (
        *(2, 4, 4),
    )


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("make", [own_layer, branched])
@pytest.mark.long
def test_extensions_in_backpack_itself(make, likelihood):
    torch.manual_seed(0)
    network, shape = make()
    network = network.double()
    x = torch.randn(5, *shape, dtype=torch.float64)
    y = torch.arange(5) % 3 if likelihood == "classification" else torch.randn_like(network(x))
    residual = nn.Sequential(
        *(ResidualPathways(*m.branch.children(), scale=1) if isinstance(m, Parallel) else m for m in network)
    )
    expected = list(factors(residual, [(x, y)], likelihood).blocks.values())
    loss = extend((nn.CrossEntropyLoss if likelihood == "classification" else nn.MSELoss)(reduction="sum"))
    network = extend(network)
    for extension in (RelaxedKFLR(), RelaxedKFAC(mc_samples=4000)):
        with backpack.backpack(extension):
            torch.manual_seed(1)
            loss(network(x), y).backward(retain_graph=True)
        for parameter, block in zip(network.parameters(), expected, strict=True):
            given = getattr(parameter, extension.savefield)
            # BackPACK's MSELoss has no factor of one half.
            b = given.out_factor if likelihood == "classification" else given.out_factor / 2
            error = (b - block.out_factor).norm() / block.out_factor.norm()
            assert error < (1e-12 if extension.savefield == "kflr" else 0.2)
            assert block.in_factor is None or torch.allclose(given.in_factor, block.in_factor)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(3), reduction="sum"), "has class weights.*leave them"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(3), reduction="sum"), "has class weights.*leave them"),
        (nn.CrossEntropyLoss(), "reduction='mean', but B is a sum"),
        (nn.CrossEntropyLoss(reduction="sum", ignore_index=1), "ignores samples"),
    ],
)
def test_losses_that_are_no_sums_of_log_likelihoods(loss, words):
    network, function = extend(nn.Sequential(nn.Linear(4, 3))), extend(loss)
    x, y = batches()[0]
    targets = F.one_hot(y, 3).float() if isinstance(loss, nn.BCEWithLogitsLoss) else y
    for extension in (RelaxedKFLR(), RelaxedKFAC()):
        with backpack.backpack(extension), pytest.raises(ValueError, match=words):
            function(network(x), targets).backward(retain_graph=True)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_extensions_refuse_tokens_that_are_folded_into_the_batch():
    """They cannot check that those of a sample are together; ``factors`` can, and has their blocks."""
    network = nn.Sequential(nn.Flatten(0, 1), nn.Linear(2, 5), nn.Unflatten(0, (-1, 2)), nn.Flatten(), nn.Linear(10, 3))
    loss, x, y = extend(nn.CrossEntropyLoss(reduction="sum")), torch.randn(5, 2, 2), torch.arange(5) % 3
    expected = factors(nn.Sequential(*network[1:2], nn.Flatten(), network[4]), [(x, y)]).blocks
    for name, other in (("1.weight", "0.weight"), ("1.bias", "0.bias")):
        torch.testing.assert_close(found(network, [(x, y)]).blocks[name].dense(), expected[other].dense())
    network = extend(network)
    with backpack.backpack(RelaxedKFLR()), pytest.raises(ValueError, match=r"shape \[10, 2\] for 5 samples.*factors"):
        loss(network(x), y).backward(retain_graph=True)
