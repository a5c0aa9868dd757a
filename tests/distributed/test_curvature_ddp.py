"""Factors, evidence and precisions of two and three processes are those of one, and bitwise the same on all ranks."""

import pytest
import torch
from scenarios import load, outcome
from torch import nn

from lightning_sym.curvature import Evidence, PrecisionOptimizer, factors, parameter_groups
from lightning_sym.layers import CircularConv, FactoredFullyConnected, PolyphasePool, ResidualPathways

pytestmark = [pytest.mark.ddp, pytest.mark.long]

SCENARIOS = [
    f"{likelihood}, torch.{dtype}"
    for likelihood in ("classification", "regression")
    for dtype in ("float32", "float64")
]
RESULTS = ["loss", "evidence", "log_precisions", "log_noise", "effective", "relative"]
SAMPLES = 50  # not a multiple of 3


def network():
    torch.manual_seed(0)
    paths = {"fc": FactoredFullyConnected(1, 4, 8, 4), "conv": nn.Sequential(CircularConv(1, 4), PolyphasePool())}
    return nn.Sequential(ResidualPathways(paths), nn.GELU(), nn.Flatten(), nn.Linear(64, 3))


def data(likelihood):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    if likelihood == "classification":
        return x, torch.randint(3, (SAMPLES,), generator=generator)
    return x, torch.randn(SAMPLES, 3, generator=generator)


def share(likelihood, rank, world, batch=8):
    x, y = (tensor[rank::world] for tensor in data(likelihood))
    return list(zip(x.split(batch), y.split(batch), strict=True))


class Mean(nn.Module):
    """Takes the mean over what is not padding, which is 0 in the input."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, x):
        there = (x != 0).any(-1, keepdim=True)
        return self.head((self.layer(x).tanh() * there).sum(1) / there.sum(1))


def trimmed(rank, world):
    """Return batches of rows of images, padded to the longest sample of the batch."""
    found = []
    for x, y in share("classification", rank, world, batch=3):
        x, lengths = x[:, 0].clone(), 1 + (x[:, 0, 0, 0] * 100).long().abs() % 8
        x[torch.arange(8) >= lengths[:, None]] = 0
        found.append((x[:, : lengths.max()].double(), y))
    return found


def summary(found, model):
    evidence = Evidence.of(model, found, parameter_groups(model))
    regression = found.likelihood == "regression"
    optimizer = PrecisionOptimizer(evidence.groups.names, learn_noise=regression)
    optimizer.update(evidence, 20)
    noise = float(optimizer.log_noise)
    numbers = evidence.effective_parameters(optimizer.log_precisions, noise)
    return {
        "samples": torch.tensor(found.samples),
        "loss": torch.tensor(found.loss_sum, dtype=torch.float64),
        "evidence": torch.tensor(evidence.log_marginal_likelihood(optimizer.log_precisions, noise)).double(),
        "log_precisions": optimizer.log_precisions,
        "log_noise": optimizer.log_noise,
        "effective": torch.tensor([number.raw for number in numbers.values()], dtype=torch.float64),
        "relative": torch.tensor([number.relative for number in numbers.values()], dtype=torch.float64),
        **{f"{name} B": block.out_factor for name, block in found.blocks.items()},
        **{f"{name} A": block.in_factor for name, block in found.blocks.items() if block.in_factor is not None},
        **{f"{name} eigenvalues": spectrum.out for name, spectrum in found.eigenvalues().items()},
        "adam": optimizer.state_dict()["adam"]["state"][0]["exp_avg_sq"],
    }


def work(rank, world, folder):
    results = {}
    for dtype in (torch.float32, torch.float64):
        model = network().to(dtype)
        for likelihood in ("classification", "regression"):
            found = factors(model, share(likelihood, rank, world), likelihood)
            results[f"{likelihood}, {dtype}"] = summary(found, model)
    mine = share("classification", rank, world)
    results["backpack"] = summary(factors(network().double(), mine, engine="backpack"), network().double())
    results["backpack drawn"] = summary(factors(network(), mine, engine="backpack", samples=1), network())
    torch.manual_seed(0)
    lengths = Mean().double()
    results["lengths"] = summary(factors(lengths, trimmed(rank, world)), lengths)
    # All samples on the last rank; the others have none.
    loader = share("classification", 0, 1) if rank == world - 1 else []
    results["one rank has all"] = summary(factors(network().double(), loader, "classification"), network().double())

    x, y = data("classification")
    results["no data"] = outcome(factors, network(), [])
    results["wrong labels of rank 0"] = outcome(factors, network(), [(x[:3], y[:3] + (3 if rank == 0 else 0))])
    broken = network()
    if rank == world - 1:
        with torch.no_grad():
            broken[3].bias.fill_(float("nan"))
    results["nan on the last rank"] = outcome(factors, broken, [(x[:3], y[:3])])
    # One rank alone finds what is wrong with the network: the others have no sample.
    mixing = nn.Sequential(nn.BatchNorm2d(1, affine=False, track_running_stats=False), network())
    last = [(x[:3], y[:3])] if rank == world - 1 else []
    for engine in ("autograd", "backpack"):
        results[f"mixed samples of the last rank, {engine}"] = outcome(factors, mixing, last, engine=engine)
    settings = {"columns": 20, "generator": torch.Generator().manual_seed(rank)}
    exact, drawn = (
        factors(network(), mine, "classification", samples=samples, **settings).blocks for samples in (None, 100)
    )
    results["monte carlo"] = {
        name: (drawn[name].out_factor - block.out_factor).norm() / block.out_factor.norm()
        for name, block in exact.items()
    }
    return results


def scenarios(run):
    for world in (2, 3, 1):
        run.processes(world, work)


@pytest.fixture(scope="module")
def results(runs):
    return {world: load(runs, world) for world in (1, 2, 3)}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scenario", [*SCENARIOS, "backpack", "lengths"])
def test_several_processes_are_one(results, scenario, world):
    (one,), others = (results[w] for w in (1, world))
    single = scenario.endswith("32")
    for other in others:
        assert other[scenario].keys() == one[scenario].keys()
        assert other[scenario]["samples"] == one[scenario]["samples"] == 50
        for name in RESULTS:
            tolerance = {"rtol": 1e-6, "atol": 1e-6} if single else {"rtol": 1e-10, "atol": 1e-10}
            torch.testing.assert_close(other[scenario][name], one[scenario][name], **tolerance)
        for name, value in one[scenario].items():
            if name.endswith((" A", " B")):
                tolerance = 1e-6 if single else 1e-13
                assert (other[scenario][name] - value).norm() < tolerance * value.norm(), name


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scenario", [*SCENARIOS, "backpack", "backpack drawn", "one rank has all"])
def test_ranks_find_the_same_factors_to_the_last_bit(results, scenario, world):
    first, *others = (result[scenario] for result in results[world])
    for other in others:
        for name, value in first.items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_may_have_no_data(results, world):
    for result in results[world]:
        for name, value in results[1][0]["one rank has all"].items():
            torch.testing.assert_close(result["one rank has all"][name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("no data", "EmptyLoaderError: The loader gave no sample"),
        ("wrong labels of rank 0", "ValueError: Labels must be in 0 to 2"),
        ("nan on the last rank", "NonFiniteError: '3.bias' of the network"),
        ("mixed samples of the last rank, autograd", "ValueError: The input of module '1.0.fc'"),
        ("mixed samples of the last rank, backpack", "ValueError: The input of module '1.0.fc'"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(results, scenario, words):
    for world, found in results.items():
        for result in found:
            assert result[scenario].startswith(words), (world, result[scenario])


def test_monte_carlo_is_near_the_exact_factors_of_all_ranks(results):
    for world in (2, 3):
        for name, error in results[world][0]["monte carlo"].items():
            assert 0 < error < 0.3, name
