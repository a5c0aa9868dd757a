"""Moments and matches from two processes are those of one with all the batches."""

import pytest
import torch
from scenarios import load, outcome

from lightning_sym.networks import MyrtleCNN
from lightning_sym.symmetry import ActivationMoments, activation_matching, trace_symmetry

pytestmark = pytest.mark.ddp

# Which of five batches each of two ranks has, by the name of the sharing.
SHARES = {"even": [[0, 2], [1, 3]], "uneven": [[0, 2, 3, 4], [1]], "all on one": [[], [0, 1, 2, 3, 4]]}
# Rounding in double precision: sums in another order.
ROUNDING = {"atol": 1e-11, "rtol": 1e-12}


def network(seed):
    return MyrtleCNN(2, in_channels=1, image_size=8, num_classes=3, activation="tanh").fresh(seed).double()


def batches():
    generator = torch.Generator().manual_seed(0)
    # Of unequal sizes, as the last of a rank may be.
    return [torch.randn(3 + k, 1, 8, 8, generator=generator, dtype=torch.float64) + k for k in range(5)]


def scenarios(run):
    symmetry = trace_symmetry(network(0), batches()[0])

    def work(rank, world, folder):
        results = {}
        a, b = network(0), network(1)
        for sharing, shares in SHARES.items():
            data = [batches()[number] for number in (shares[rank] if world == 2 else sorted(shares[0] + shares[1]))]
            moments = ActivationMoments(symmetry, a, b)
            for images in data:
                moments.update(images)
            moments.reduce()
            sums = moments.state_dict()["sums"]
            results[f"moments, {sharing}"] = {f"{name} {k}": v for name in sums for k, v in sums[name].items()}
            element = activation_matching(symmetry, a, b, data).element
            parts = ("permutation", "sign", "log_scale")
            results[f"match, {sharing}"] = {name: getattr(element, name) for name in parts}
        if world == 2:
            bad = [torch.zeros(2, 7, 8, 8, dtype=torch.float64)] if rank == 1 else batches()[:1]
            results["wrong"] = outcome(activation_matching, symmetry, a, b, bad)
        return results

    run.processes(2, work)
    run.processes(1, work)


@pytest.mark.parametrize("sharing", SHARES)
@pytest.mark.parametrize("kind", ["moments", "match"])
def test_two_processes_are_one(runs, kind, sharing):
    one, *others = (result[f"{kind}, {sharing}"] for result in load(runs, 1) + load(runs, 2))
    for other in others:
        assert other.keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, **ROUNDING)
    for name, value in others[0].items():
        assert torch.equal(value, others[1][name]), "bitwise the same on both ranks"


def test_an_error_of_one_rank_is_raised_on_both(runs):
    for result in load(runs, 2):
        assert "was built for images of shape" in result["wrong"]
