"""The rank of the Jacobian against the dimension of the orbit: the table of docs/theory/equivalence.md, 10."""

import math
from collections.abc import Callable

import pytest
import torch
from helpers import refused
from orbit_cases import residual
from torch import Tensor, nn

from lightning_sym.networks import Gaussian, Polynomial
from lightning_sym.symmetry import LocalDimension, local_dimension, trace_symmetry
from lightning_sym.symmetry.tangents import orbit_tangents


def leaky() -> nn.Module:
    return nn.LeakyReLU(0.1)


def deep(activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 4), activation(), nn.Linear(4, 2))


def shallow(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 2))


def measured(
    make: Callable[[], nn.Module],
    edit: Callable[[nn.Module], None] | None = None,
    *,
    seed: int = 4,
    samples: int = 600,
    log_softmax: bool = False,
    training: bool = False,
) -> LocalDimension:
    torch.manual_seed(seed)
    network = make().double()
    inputs = 2 * torch.randn(samples, 3, dtype=torch.float64)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm1d):
                if module.affine:
                    module.weight.uniform_(0.5, 2.0)
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
        if edit is not None:
            edit(network)
    symmetry = trace_symmetry(network, inputs[:4], check=False)
    return local_dimension(symmetry, network, inputs, log_softmax=log_softmax, training=training)


def unexplained(found: LocalDimension) -> bool:
    return not (found.dead or found.always_on or found.duplicated or found.constant)


def copy_first(net: nn.Module) -> None:
    net[0].weight[1] = net[0].weight[0]
    net[0].bias[1] = net[0].bias[0]


def norms(affine: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine), nn.ReLU(), nn.Linear(4, 2))


# The network, what is done to it, options of the measurement, its nullity, the dimension of the orbit, and how many
# units are dead, always on, constant and duplicated.
NOTHING = (0, 0, 0, 0)
CASES = {
    "tanh": (lambda: deep(nn.Tanh), None, {}, 0, 0, NOTHING),
    "sigmoid": (lambda: deep(nn.Sigmoid), None, {}, 0, 0, NOTHING),
    "gelu": (lambda: deep(nn.GELU), None, {}, 0, 0, NOTHING),
    "gaussian": (lambda: deep(Gaussian), None, {}, 0, 0, NOTHING),
    "leaky": (lambda: deep(leaky), None, {"seed": 0}, 8, 8, NOTHING),
    "square": (lambda: deep(lambda: Polynomial(2)), None, {"seed": 0}, 8, 8, NOTHING),
    # One scale per channel of the stream.
    "residual": (lambda: residual(leaky), None, {"seed": 5}, 9, 9, NOTHING),
    # The product map, 2 x 3 weights and 2 biases, is all that the function shows.
    # 3-4-4-2: two GL(4) and two translations. Elements x -> x + (n x - c) v, v in the kernel of what follows, leave the
    # network as it is (a space of dimension 2), so that the orbit has 38, the whole nullity.
    "linear": (lambda: deep(nn.Identity), None, {}, 46 - 8, 46 - 8, NOTHING),
    "shallow": (shallow, None, {}, 4, 4, NOTHING),
    "dead unit": (shallow, lambda net: net[0].bias[0].fill_(-100), {}, 9, 4, (1, 0, 0, 0)),
    "unit always on": (shallow, lambda net: net[0].bias[:1].fill_(100), {}, 4 - 1 + 1 + 1, 4, (0, 1, 0, 0)),
    "units always on": (shallow, lambda net: net[0].bias[:2].fill_(100), {}, 4 - 2 + 4 + 2, 4, (0, 2, 0, 0)),
    # A pair of equal units with n inputs, and k outgoing weights each, independent: of its 2 (n + 1) + 2 k directions
    # those are seen that change the common slope for either of two outgoing vectors, 2 (n + 1), or the value for any of
    # the other k - 2 vectors. So k + 2 are hidden, where two different units hide 2.
    "equal units, deep": (lambda: deep(leaky), copy_first, {"seed": 0}, 12, 8, (0, 0, 0, 1)),
    "equal units": (shallow, copy_first, {}, 6, 4, (0, 0, 0, 1)),
    "tanh without an outgoing weight": (lambda: shallow(nn.Tanh), lambda net: net[2].weight[:, 0].zero_(), {}, 4, 0,
        NOTHING),
    "constant tanh": (lambda: shallow(nn.Tanh), lambda net: net[0].weight[0].zero_(), {}, 3, 0, (0, 0, 1, 0)),
    "equal tanh": (lambda: shallow(nn.Tanh), copy_first, {}, 2, 0, (0, 0, 0, 1)),
    # Scales, and what adds one number to all logits: in each column of the last layer, and in its bias.
    "log-softmax": (shallow, None, {"log_softmax": True}, 9, 4 + 4 + 1, NOTHING),
    "batch norm": (norms, None, {"seed": 0}, 12, 12, NOTHING),
    # Only what leaves the statistics as they are: none of what scales and shifts what a norm without parameters reads.
    "plain batch norm": (lambda: norms(affine=False), None, {"seed": 0}, 4, 0, NOTHING),
    "batch norm in training": (norms, None, {"seed": 0, "samples": 100, "training": True}, 12, 12, NOTHING),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(3, "linear", "plain batch norm")
def test_nullity_orbit_and_units(name: str) -> None:
    make, edit, options, nullity, orbit, counts = CASES[name]
    found = measured(make, edit, **options)
    assert (found.nullity, found.orbit_dimension, found.excess) == (nullity, orbit, nullity - orbit)
    assert (found.dead, found.always_on, found.constant, found.duplicated) == counts
    assert found.rank == found.parameters - nullity
    assert found.gap > 1e8 if nullity else found.gap == math.inf
    if name == "units always on":
        assert found.groups == {"0": {"dead": 0, "always_on": 2, "constant": 0, "duplicated": 0}}


def test_relu_has_at_least_the_scalings() -> None:
    nullities = [measured(lambda: deep(nn.ReLU), seed=seed) for seed in range(10)]
    assert all(found.excess >= 0 and found.orbit_dimension == 8 for found in nullities)
    assert min(found.nullity for found in nullities) == 8
    # A hidden symmetry with no dead and no always-on unit.
    assert any(found.excess > 0 and unexplained(found) for found in nullities)


def test_batch_norm_after_the_activation() -> None:
    layers = lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2))  # noqa: E731
    found = measured(layers, seed=0)
    assert found.nullity == 12
    assert found.orbit_dimension <= 12


def test_rank_saturates_with_the_inputs() -> None:
    found = [measured(lambda: deep(nn.ReLU), samples=samples) for samples in (5, 20, 50, 200, 600)]
    nullities = [one.nullity for one in found]
    assert nullities == sorted(nullities, reverse=True)
    assert nullities[0] == 46 - 10
    assert nullities[-2:] == [9, 9]
    assert "the rank has not saturated: 10 equations for 46 parameters" in str(found[0])
    assert found[-1].notes == ()


@pytest.mark.parametrize("training", [False, True])
def test_singular_values_depend_on_no_way_to_make_the_jacobian(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    """In parts or at once; sample by sample or, as in training mode, for all: there is no batch norm."""
    whole = measured(lambda: deep(leaky), samples=60)
    monkeypatch.setattr("lightning_sym.symmetry.dimension._CHUNK", 8 * 46 * 2 * 7)
    other = measured(lambda: deep(leaky), samples=60, training=training)
    assert torch.allclose(whole.singular_values, other.singular_values, rtol=0, atol=1e-12 * whole.singular_values[0])


def test_network_stays_as_it_is() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    inputs = torch.randn(80, 3)
    found = local_dimension(trace_symmetry(network, inputs), network, inputs, training=True)
    assert found.orbit_dimension == 12
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert network.training
    assert found.singular_values.dtype == torch.float64


def test_casts_to_single_precision_do_not_count_as_rank() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.relu(self.one(x)).float().to(self.two.weight.dtype))

    network, inputs = Casting(), 3 * torch.randn(400, 5)
    assert local_dimension(trace_symmetry(network, inputs), network, inputs).nullity == 8


def test_convolutions() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 2), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    inputs = torch.randn(200, 1, 5, 5)
    found = local_dimension(trace_symmetry(network, inputs[:2]), network, inputs)
    assert (found.nullity, found.orbit_dimension) == (3, 3)
    assert "nullity                    3" in str(found)


NETWORK, INPUTS = shallow(), torch.randn(8, 3)
GIVEN = trace_symmetry(NETWORK, INPUTS, check=False), NETWORK, INPUTS


@pytest.mark.parametrize(
    "refusal",
    [
        refused(local_dimension, *GIVEN, tolerance=0),
        refused(local_dimension, *GIVEN, max_parameters=0),
        refused(local_dimension, *GIVEN, max_parameters=20),
        refused(local_dimension, *GIVEN[:2], INPUTS[:0], says="a batch of at least one sample"),
        refused(local_dimension, GIVEN[0], deep(nn.ReLU), INPUTS, says="expected shape"),
    ],
)
def test_refused_arguments(refusal: Callable[[], None]) -> None:
    refusal()


class Frozen(nn.Module):
    """Multiplies units by numbers that a state dict holds and nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class OnlyBias(nn.BatchNorm1d):
    """A batch norm with a bias and no gain."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, None, self.bias)


class OneGain(nn.Sequential):
    """Two batch norms with one gain."""

    def __init__(self) -> None:
        parts = norms()
        super().__init__(*parts[:3], nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), parts[3])
        self[4].weight = self[1].weight


# Networks; what the group does to parameters, and what to buffers for which no parameters make up.
BUFFERS = {
    "plain": (lambda: norms(affine=False), 0, 8),
    "plain, without a bias": (lambda: nn.Sequential(nn.Linear(3, 4, bias=False), *norms(affine=False)[1:]), 0, 4),
    "plain, tanh": (lambda: nn.Sequential(*norms(affine=False)[:2], nn.Tanh(), nn.Linear(4, 2)), 0, 8),
    "with gain and bias": (norms, 12, 0),
    "with gain and bias, tanh": (lambda: nn.Sequential(*norms()[:2], nn.Tanh(), nn.Linear(4, 2)), 8, 0),
    "a buffer as gain": (lambda: nn.Sequential(nn.Linear(3, 4), Frozen(), nn.ReLU(), nn.Linear(4, 2)), 4, 4),
    "two buffers": (lambda: nn.Sequential(nn.Linear(3, 4), Frozen(), Frozen(), nn.ReLU(), nn.Linear(4, 2)), 4, 8),
    "a bias alone": (lambda: nn.Sequential(nn.Linear(3, 4), OnlyBias(4), nn.ReLU(), nn.Linear(4, 2)), 4, 4),
    "one gain for two": (OneGain, 12, 8),
    "no norm": (shallow, 4, 0),
}


@pytest.mark.filterwarnings("ignore:parameters that evaluation never uses")
@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.few(5)
def test_what_acts_on_buffers_is_counted_beside(name: str) -> None:
    make, dimension, buffers = BUFFERS[name]
    torch.manual_seed(0)
    network = make().double()
    with torch.no_grad():
        for key, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if "var" in key else torch.randn_like(tensor))
    x = torch.randn(200, 3, dtype=torch.float64)
    symmetry = trace_symmetry(network, x[:4])
    assert (symmetry.dimension, symmetry.buffer_dimension) == (dimension, buffers)
    found = local_dimension(symmetry, network, x)
    assert symmetry.dimension == found.orbit_dimension <= found.nullity
    assert ("of buffers" in " ".join(str(symmetry).split())) == (buffers > 0)
    tangents = orbit_tangents(symmetry, network)
    assert tangents.generators == dimension + buffers
    assert tangents.rank <= found.nullity
