"""Evidence, predictions and samples agree with laplace-torch (docs/theory/curvature.md, 4.2)."""

import copy
import math
import warnings
from pathlib import Path

import pytest
import torch
from backpack import backpack, extend
from backpack.custom_module.branching import Parallel
from backpack.custom_module.scale_module import ScaleModule
from curvature_references import GRID, LAYERS, data, jacobians, perturbed, relaxed_network, with_head
from helpers import assert_refused, refused
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sym.curvature import Evidence, RelaxedKFLR, factors, parameter_groups, to_laplace
from lightning_sym.curvature import laplace as laplace_module
from lightning_sym.layers import FactoredFullyConnected, GroupConv, GroupLift, ResidualPathways
from lightning_sym.networks import RelaxedNetwork

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a library that it imports uses torch.jit.script
    from laplace import KronLaplace, Laplace
    from laplace.baselaplace import BaseLaplace
    from laplace.curvature.backpack import BackPackGGN
    from laplace.laplace import _all_subclasses
    from laplace.utils.matrix import Kron

    from lightning_sym.curvature._laplace_torch import _matrices

CASES = [("classification", 0.0), ("regression", 0.0), ("regression", -0.7), ("regression", 0.4)]
BATCHES = pytest.mark.parametrize("size", [7, 3], ids=["one batch", "several batches"])


def loader(x, y, size):
    return list(zip(x.split(size), y.split(size), strict=True))


def precisions(groups, seed=0):
    return torch.randn(len(groups.names), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def for_backpack(module):
    """Return the containers that BackPACK knows around the same layers."""
    if isinstance(module, ResidualPathways):
        return nn.Sequential(Parallel(*map(for_backpack, module.paths.values())), ScaleModule(module.scale))
    return nn.Sequential(*map(for_backpack, module)) if isinstance(module, nn.Sequential) else module


class Backend(BackPackGGN):
    """laplace-torch's own, with our extension in place of BackPACK's."""

    def kron(self, x, y, N, **kwargs):  # noqa: N803
        loss = self.lossfunc(self.model(x), y)
        with backpack(RelaxedKFLR()):
            loss.backward(retain_graph=True)
        found = []
        for parameter in self.model.parameters():
            block = parameter.kflr
            del parameter.kflr
            inner = block.in_factor
            if inner is not None and inner.ndim == 3:
                inner = torch.block_diag(*inner)
            matrices = [block.out_factor.clone()] + ([] if inner is None else [inner * len(y) / N])
            found.append(matrices[::-1] if block.shared_out_last else matrices)
        return self.factor * loss.detach(), self.factor * Kron(found)


def own_fit(model, likelihood):
    """Return a KronLaplace for factors of any sides: those of theta2 are not the first axis and all others."""
    laplace = KronLaplace(model, likelihood, backend=Backend)

    def zeros() -> None:
        pairs = {id(layer.theta2) for layer in model.modules() if isinstance(layer, FactoredFullyConnected)}
        sides = [
            [p.shape[:2].numel(), p.shape[2]] if id(p) in pairs else [len(p)] + [p[0].numel()] * (p.ndim > 1)
            for p in laplace.params
        ]
        laplace.H = Kron([[torch.zeros(side, side).double() for side in own] for own in sides])

    laplace._init_H = zeros
    return laplace


def perceptron():
    return perturbed(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@BATCHES
@pytest.mark.parametrize(("likelihood", "log_noise"), CASES)
@pytest.mark.parametrize(
    ("make", "shape", "backend"), [(perceptron, (4,), BackPackGGN), (relaxed_network, (2, *GRID), Backend)]
)
@pytest.mark.few(6)
def test_evidence_of_laplace_torchs_own_fit(make, shape, backend, likelihood, log_noise, size):
    network = make()
    x, y = data(7, shape, 3, likelihood)
    groups = parameter_groups(network)
    log_precisions = precisions(groups)
    model = extend(for_backpack(copy.deepcopy(network)))
    laplace = own_fit(model, likelihood) if backend is Backend else KronLaplace(model, likelihood, backend=backend)
    laplace.fit(DataLoader(TensorDataset(x, y), batch_size=size))
    values = dict(zip(groups.names, log_precisions.exp(), strict=True))
    each = torch.stack([values[groups.precisions[name]] for name, _ in network.named_parameters()])
    sigma = torch.tensor(log_noise, dtype=torch.float64).exp()
    expected = laplace.log_marginal_likelihood(each, *([sigma] if likelihood == "regression" else [])).item()
    for engine in ("autograd", "backpack"):
        found = factors(network, loader(x, y, size), likelihood, engine=engine)
        evidence = Evidence.of(network, found, groups).log_marginal_likelihood(log_precisions, log_noise)
        assert abs(evidence - expected) < 1e-8


@BATCHES
@pytest.mark.parametrize("engine", ["autograd", "backpack"])
@pytest.mark.parametrize(("likelihood", "log_noise"), CASES)
@pytest.mark.few(6)
def test_evidence_of_to_laplace(likelihood, log_noise, engine, size):
    network = relaxed_network()
    groups = parameter_groups(network, "per_tensor")
    data_set = loader(*data(7, (2, *GRID), 3, likelihood), size)
    for seed in range(3):
        log_precisions = precisions(groups, seed)
        laplace = to_laplace(
            network, data_set, likelihood, log_precisions=log_precisions, log_noise=log_noise, groups=groups,
            engine=engine, temperature=1 + seed,
        )  # fmt: skip
        assert isinstance(laplace, KronLaplace)
        evidence = Evidence.of(network, factors(network, data_set, likelihood), groups, temperature=1 + seed)
        expected = evidence.log_marginal_likelihood(log_precisions, log_noise)
        assert abs(laplace.log_marginal_likelihood().item() - expected) < 1e-8


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.few(10)
def test_every_layer_has_a_laplace_posterior(layer, likelihood):
    network, shape = with_head(layer)
    groups = parameter_groups(network, "per_tensor")
    log_precisions = precisions(groups)
    batches = loader(*data(5, shape, 3, likelihood), 3)
    laplace = to_laplace(network, batches, likelihood, log_precisions=log_precisions, groups=groups)
    found = factors(network, batches, likelihood)
    expected = Evidence.of(network, found, groups).log_marginal_likelihood(log_precisions)
    assert abs(laplace.log_marginal_likelihood().item() - expected) < 1e-8
    # Entry by entry, so that samples and predictions have the parameters' order.
    deltas = dict(zip(groups.names, log_precisions.exp(), strict=True))
    dense = [block.dense() + deltas[name] * torch.eye(block.size).double() for name, block in found.blocks.items()]
    torch.testing.assert_close(laplace.posterior_precision.to_matrix(), torch.block_diag(*dense), rtol=1e-9, atol=1e-9)


def posterior(network, batches, likelihood, log_precisions, groups, log_noise=0.0):
    """Return the dense posterior covariance."""
    deltas = dict(zip(groups.names, log_precisions.exp(), strict=True))
    scale = math.exp(-2 * log_noise)
    blocks = factors(network, batches, likelihood).blocks.items()
    dense = [scale * b.dense() + deltas[groups.precisions[n]] * torch.eye(b.size).double() for n, b in blocks]
    return torch.linalg.inv(torch.block_diag(*dense))


@pytest.mark.parametrize(("likelihood", "log_noise"), CASES[:3])
def test_predictive_distribution(likelihood, log_noise):
    network = relaxed_network()
    groups = parameter_groups(network)
    log_precisions = precisions(groups)
    x, y = data(7, (2, *GRID), 3, likelihood)
    laplace = to_laplace(network, [(x, y)], likelihood, log_precisions=log_precisions, log_noise=log_noise)
    new = data(4, (2, *GRID), 3, likelihood, seed=1)[0]
    means, found = jacobians(network, new)
    slopes = torch.cat(list(found.values()), 2)
    covariance = slopes @ posterior(network, [(x, y)], likelihood, log_precisions, groups, log_noise) @ slopes.mT
    if likelihood == "regression":
        mean, variance = laplace(new)
        torch.testing.assert_close(mean, means)
        torch.testing.assert_close(variance, covariance)
    else:
        kappa = 1 / (1 + torch.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt()
        torch.testing.assert_close(laplace(new), (kappa * means).softmax(1))


def test_samples_have_the_posterior_mean_and_covariance():
    network = perturbed(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)))
    groups = parameter_groups(network)
    log_precisions = precisions(groups)
    x, y = data(20, (2,), 2, "classification")
    laplace = to_laplace(network, [(x, y)], log_precisions=log_precisions)
    covariance = posterior(network, [(x, y)], "classification", log_precisions, groups)
    draws = laplace.sample(100_000, generator=torch.Generator().manual_seed(0))
    mean = nn.utils.parameters_to_vector(network.parameters()).detach()
    assert (draws.mean(0) - mean).abs().max() < 6 * (covariance.diagonal().max() / 100_000).sqrt()
    assert (draws.T.cov() - covariance).norm() < 0.03 * covariance.norm()


def test_the_derivatives_are_right_for_the_noise_too():
    # laplace-torch's own gives half of it: the determinant's part is lost.
    network = relaxed_network()
    groups = parameter_groups(network, "per_tensor")
    log_precisions = precisions(groups)
    batches = loader(*data(7, (2, *GRID), 3, "regression"), 3)
    laplace = to_laplace(network, batches, "regression", groups=groups)
    delta, log_noise = (
        log_precisions.clone().requires_grad_(),
        torch.tensor(-0.3, dtype=torch.float64, requires_grad=True),
    )
    laplace.log_marginal_likelihood(delta.exp(), log_noise.exp()).backward()
    evidence = Evidence.of(network, factors(network, batches, "regression"), groups)
    slopes, slope = evidence.gradients(log_precisions, log_noise.item())
    torch.testing.assert_close(delta.grad, slopes)
    assert log_noise.grad.item() == pytest.approx(slope, rel=1e-9)


# ---- what laplace-torch does to networks, and what we refuse


def test_the_network_stays_as_it_is():
    network = relaxed_network().train()
    batches = loader(*data(7, (2, *GRID), 3, "classification"), 3)
    network(batches[0][0]).sum().backward()
    before = {name: (p.data_ptr(), p.clone(), p.grad.clone()) for name, p in network.named_parameters()}
    attributes = [sorted(vars(module)) for module in network.modules()]
    laplace = to_laplace(network, batches)
    laplace(batches[0][0])
    laplace(batches[0][0], pred_type="nn", link_approx="mc", n_samples=3)
    laplace.predictive_samples(batches[0][0], n_samples=2)
    assert all(module.training for module in network.modules())
    assert not any(module.training for module in laplace.model.modules())
    assert [sorted(vars(module)) for module in network.modules()] == attributes
    for name, parameter in network.named_parameters():
        address, value, gradient = before[name]
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, gradient)
    evidence = laplace.log_marginal_likelihood().item()
    with torch.no_grad():
        network[0].fc.theta1.mul_(2)
    assert laplace.log_marginal_likelihood().item() == evidence
    assert to_laplace(network, batches).log_marginal_likelihood().item() != evidence


def test_layers_that_laplace_torch_refuses_are_those_of_to_laplace():
    """The guide quotes its error, so that a search for it finds the way out."""
    network, batches = relaxed_network(), loader(*data(7, (2, *GRID), 3, "classification"), 3)
    theirs = Laplace(network, "classification", "all", "kron")
    with pytest.raises(NotImplementedError, match="Found parameters in un-supported layers") as refusal:
        theirs.fit(DataLoader(TensorDataset(*map(torch.cat, zip(*batches, strict=True))), batch_size=7))
    assert str(refusal.value).rstrip(".") in (Path(__file__).parents[2] / "docs/curvature.md").read_text()
    assert to_laplace(network, batches)(batches[0][0]).shape == (3, 3)


def test_laplace_torchs_own_classes_are_found_as_before():
    """``laplace.Laplace`` looks through all subclasses of the process for a key, which ours does not have."""
    x, y = data(5, (4,), 3, "classification")
    network = nn.Linear(4, 3).double()
    to_laplace(network, [(x, y)])
    registered = [(kind._key, kind) for kind in _all_subclasses(BaseLaplace) if hasattr(kind, "_key")]
    assert all(kind.__module__.startswith("laplace.") for _, kind in registered)
    assert len(dict(registered)) == len(registered)
    theirs = Laplace(network, "classification", "all", "kron")
    assert type(theirs) is KronLaplace
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=5))


def test_a_state_can_be_saved_and_loaded():
    network = relaxed_network()
    batches = [data(5, (2, *GRID), 3, "classification")]
    groups = parameter_groups(network)
    laplace, other = (to_laplace(network, batches, log_precisions=precisions(groups, seed)) for seed in range(2))
    other.load_state_dict(laplace.state_dict())
    assert other.log_marginal_likelihood().item() == laplace.log_marginal_likelihood().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_and_half_precision(dtype):
    torch.manual_seed(0)
    network = RelaxedNetwork(["fc", "sfc", "gconv_depthwise_separable"], 1, 8, 1, 3, learn_lengthscale=True).to(dtype)
    batches = loader(torch.randn(7, 1, 8, 8), torch.arange(7) % 3, 3)
    laplace = to_laplace(network, batches)
    assert all(parameter.dtype == torch.float32 for parameter in laplace.model.parameters())
    evidence = Evidence.of(network, factors(network, batches), parameter_groups(network))
    expected = evidence.log_marginal_likelihood(torch.zeros(len(evidence.groups.names)))
    assert laplace.log_marginal_likelihood().item() == pytest.approx(expected, rel=1e-4)
    assert laplace(torch.randn(2, 1, 8, 8)).sum(1) == pytest.approx(1, abs=1e-5)


def factored(channels: int, grid: int) -> nn.Sequential:
    return nn.Sequential(FactoredFullyConnected(channels, 2, grid, 1), nn.Flatten())


def pictures(channels: int, side: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(2, channels, side, side), torch.arange(2))]


def test_the_limit_is_of_all_matrices_in_their_precision(monkeypatch):
    # 33 blocks of 1024 x 1024, in float32
    says = ["matrices of 4.3 GiB", "'0.theta1' is 33792 x 33792", "; use Evidence"]
    assert_refused(lambda: to_laplace(factored(33, 32), pictures(33, 32)), says=says)
    network = factored(3, 4)  # theta1: 2 and 48; theta2: 1 and 6; biases: 2 and 1
    size = 4 * (2**2 + 48**2 + 1 + 6**2 + 2**2 + 1)
    monkeypatch.setattr(laplace_module, "_MOST_BYTES", size)
    to_laplace(network, pictures(3, 4))
    x, y = pictures(3, 4)[0]
    assert_refused(lambda: to_laplace(network.double(), [(x.double(), y)]), says="GiB at most")
    monkeypatch.setattr(laplace_module, "_MOST_BYTES", size - 1)
    assert_refused(lambda: to_laplace(network.float(), pictures(3, 4)), says="GiB at most")


@pytest.mark.parametrize("ffc", ["shared", "per_channel"])
def test_the_sides_are_those_of_the_matrices(ffc):
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(4, 2, 3, padding=1, groups=2), FactoredFullyConnected(2, 2, 4), GroupLift()),
        *(GroupConv(2, 2, "depthwise_separable"), nn.Flatten(), nn.Linear(128, 2)),
    )
    blocks = factors(network, pictures(4, 4), ffc=ffc).blocks
    assert len(blocks) == 14
    for block in blocks.values():
        assert block.dense_sides == [len(matrix) for matrix in _matrices(block)]


def to_laplace_of_a_line(**settings):
    return to_laplace(nn.Linear(4, 3).double(), [data(5, (4,), 3, "classification")], **settings)


@pytest.mark.parametrize(
    "refusal",
    [
        refused(
            to_laplace_of_a_line, log_precisions=torch.zeros(2), says=("1 groups of", "one finite number for each")
        ),
        refused(to_laplace_of_a_line, log_precisions=torch.tensor([math.nan]), says="one finite number for each"),
        refused(to_laplace_of_a_line, log_noise=0.1, says="A classification has no noise"),
        refused(to_laplace_of_a_line, temperature=0.0),
        refused(to_laplace_of_a_line, engine="backpak", says="Did you mean 'backpack'"),
        refused(to_laplace_of_a_line, groups=parameter_groups(nn.Sequential(nn.Linear(2, 2))),
            says="'weight' has a curvature block but no precision group"),
        refused(lambda: to_laplace_of_a_line().fit([]), says="call to_laplace again", error=RuntimeError),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(refusal):
    refusal()
