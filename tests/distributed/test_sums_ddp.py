"""Statistics, barriers, moments and matches from two processes are those of one with all the batches."""

import re

import pytest
import torch
from scenarios import load, outcome
from torch import nn

from lightning_sym.connectivity import barrier
from lightning_sym.networks import MyrtleCNN, recalibrate_batch_norm
from lightning_sym.symmetry import ActivationMoments, activation_matching, trace_symmetry

pytestmark = pytest.mark.ddp

# Which of five batches each of two ranks has, by the name of the sharing.
SHARES = {"even": [[0, 2], [1, 3]], "uneven": [[0, 2, 3, 4], [1]], "all on one": [[], [0, 1, 2, 3, 4]]}
# Rounding in double precision: sums in another order; those of moments are larger.
ROUNDING = {"atol": 1e-12, "rtol": 1e-12}
ROUNDING_OF_MOMENTS = {"atol": 1e-11, "rtol": 1e-12}


def network(seed, activation="relu"):
    return MyrtleCNN(2, in_channels=1, image_size=8, num_classes=3, activation=activation).fresh(seed).double()


def batches():
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(6, 1, 8, 8, generator=generator, dtype=torch.float64) + k,
            torch.randint(3, (6,), generator=generator),
        )
        for k in range(5)
    ]


def statistics(data, **settings):
    found = network(0)
    recalibrate_batch_norm(found, data, **settings)
    return dict(found.named_buffers())


def curves(data):
    found = barrier(network(0), network(1), data, points=3)
    return {"loss": found.loss, "accuracy": found.accuracy, "samples": torch.tensor(found.samples)}


def synchronised(count, exact):
    found = nn.SyncBatchNorm.convert_sync_batchnorm(network(0))
    recalibrate_batch_norm(found, batches()[:count], exact=exact)
    return dict(found.named_buffers())


def wrapped(data):
    recalibrate_batch_norm(nn.parallel.DistributedDataParallel(network(0)), data)
    return {}


def sums(symmetry, data):
    moments = ActivationMoments(symmetry, network(0, "tanh"), network(1, "tanh"))
    for images, _ in data:
        moments.update(images)
    moments.reduce()
    state = moments.state_dict()["sums"]
    return {f"{name} {key}": value for name in state for key, value in state[name].items()}


def match(symmetry, data):
    images = [images for images, _ in data]
    element = activation_matching(symmetry, network(0, "tanh"), network(1, "tanh"), images).element
    return {name: getattr(element, name) for name in ("permutation", "sign", "log_scale")}


def work(rank, world, folder):
    results = {}
    symmetry = trace_symmetry(network(0, "tanh"), batches()[0][0])
    for sharing, shares in SHARES.items():
        numbers = shares[rank] if world == 2 else sorted(shares[0] + shares[1])
        data = [batches()[number] for number in numbers]
        results[f"one pass, {sharing}"] = outcome(statistics, data)
        results[f"exact, {sharing}"] = outcome(statistics, data, exact=True)
        results[f"barrier, {sharing}"] = outcome(curves, data)
        # Of unequal sizes, as the last batch of a rank may be.
        data = [(batches()[number][0][: 2 + number], None) for number in numbers]
        results[f"moments, {sharing}"] = outcome(sums, symmetry, data)
        results[f"match, {sharing}"] = outcome(match, symmetry, data)
    if world == 2:
        # Errors of one rank are raised on both, which then go on together.
        wrong = [(torch.zeros(2, 7, 8, 8, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))]
        infinite = [(batches()[0][0] * torch.inf, batches()[0][1])]
        good = batches()[:1]
        for name, bad in (("wrong", wrong), ("infinite", infinite)):
            for exact in (False, True):
                data = bad if rank == 1 else good
                results[f"{name}, {exact}"] = outcome(statistics, data, exact=exact)
            results[f"{name}, barrier"] = outcome(curves, data)
        results["wrong, match"] = outcome(match, symmetry, wrong if rank == 1 else good)
        for exact in (False, True):
            results[f"none, {exact}"] = outcome(statistics, [], exact=exact)
        results["none, barrier"] = outcome(curves, [])
        results["synchronised"] = outcome(synchronised, 1 + rank, exact=False)
        results["synchronised, exact"] = outcome(synchronised, 1 + rank, exact=True)
        results["wrapped"] = outcome(wrapped, good)
        results["afterwards"] = outcome(statistics, good)
    return results


def scenarios(run):
    run.processes(2, work)
    run.processes(1, work)


@pytest.fixture(scope="module")
def results(runs):
    return load(runs, 1) + load(runs, 2)


@pytest.mark.parametrize("sharing", SHARES)
@pytest.mark.parametrize("kind", ["one pass", "exact", "barrier", "moments", "match"])
def test_two_processes_are_one(results, kind, sharing):
    one, *others = (result[f"{kind}, {sharing}"] for result in results)
    rounding = ROUNDING_OF_MOMENTS if kind in ("moments", "match") else ROUNDING
    for other in others:
        assert other.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, **rounding)
    for name, value in others[0].items():
        assert torch.equal(value, others[1][name]), "bitwise the same on both ranks"


def test_statistics_are_new_and_differ_between_the_ways(results):
    passes, exact = results[0]["one pass, uneven"], results[0]["exact, uneven"]
    for name in passes:
        if name.endswith("num_batches_tracked"):
            assert passes[name] == exact[name] == 5
        else:
            assert not torch.equal(passes[name], exact[name])
    assert results[0]["barrier, uneven"]["samples"] == 30
    assert results[0]["barrier, even"]["samples"] == 24


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong, False", r"built for images of shape \[N, 1, 8, 8\] and cannot take \[\d, 7, 8, 8\]"),
        ("wrong, True", r"built for images of shape \[N, 1, 8, 8\] and cannot take \[\d, 7, 8, 8\]"),
        ("wrong, barrier", r"built for images of shape \[N, 1, 8, 8\] and cannot take \[\d, 7, 8, 8\]"),
        ("wrong, match", r"was built for images of shape"),
        ("infinite, False",
            "NotFiniteStatisticsError: The recalibrated statistics of the batch norm 'norm1' are not finite"),
        ("infinite, True",
            "NotFiniteStatisticsError: The recalibrated statistics of the batch norm 'norm1' are not finite"),
        ("infinite, barrier", "ValueError: At t = 0: The recalibrated statistics of the batch norm 'norm1'"),
        ("none, False", "ValueError: There are no batches"),
        ("none, True", "ValueError: There are no batches"),
        ("none, barrier", "ValueError: At t = 0: There are no batches"),
        ("wrapped", "ValueError: network is wrapped for DDP.*; pass network.module"),
        ("synchronised", r"needs equally many batches on every rank, got \[1, 2\]; leave some out or use exact=True"),
    ],
)  # fmt: skip
def test_errors_of_one_rank_are_raised_on_both(results, name, message):
    for result in results[1:]:
        assert re.search(message, result[name])


def test_synchronised_batch_norms_need_no_equal_numbers_in_exact_mode(results):
    _, a, b = results
    for name, value in a["synchronised, exact"].items():
        assert torch.equal(value, b["synchronised, exact"][name])
        if name.endswith("num_batches_tracked"):
            assert value == 3


def test_the_ranks_are_still_in_step_after_the_errors(results):
    _, a, b = results
    assert a["afterwards"].keys() == b["afterwards"].keys()
    for name, value in a["afterwards"].items():
        assert torch.equal(value, b["afterwards"][name])
