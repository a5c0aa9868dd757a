"""The two examples on ReLU units: simulated searches are training, and three units have no barrier."""

import math
import sys

import pytest
import torch
from helpers import assert_refused, example
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sym.landscape import Moments, TwoUnitClass, weight_vector
from lightning_sym.landscape.two_unit import distance, slopes
from lightning_sym.networks import MultiLayerPerceptron

EXACT = 1e-12
MIXED, SAME_SIGN, PAPER = (0.56, 0.30), (0.86, 0.0), (0.0, -0.016651893)


search, paths = example("two_unit_search"), example("path_without_barrier")
connecting_path = paths.connecting_path


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def gaussian(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def toy_network(weights):
    network = MultiLayerPerceptron(widths=[2], in_channels=1, image_size=1, num_classes=1, bias=False).double()
    torch.nn.utils.vector_to_parameters(weights, network.parameters())
    return network


def run(target, restarts, steps, *, optimizer="sgd", learning_rate=0.015):
    inputs = gaussian(0, 16384)
    initial = search.draw_initial(restarts, torch.Generator().manual_seed(1))
    moments = search.batch_moments(inputs, 256)
    settings = {"learning_rate": learning_rate, "steps": steps, "optimizer": optimizer}
    outcome = search.simulate_search(initial, target, moments, **settings)
    return initial, outcome, TwoUnitClass(target, Moments.of(inputs))


@pytest.fixture(scope="module")
def mixed_run():
    return run(MIXED, 2000, 3000)


@pytest.mark.parametrize("module", [search, paths])
def test_the_example_prints_its_table(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example", *(["--restarts=50", "--steps=200"] if module is search else [])])
    module.main()
    lines = capsys.readouterr().out.splitlines()
    if module is search:
        assert [line.split(" (")[0] for line in lines] == list(search.TARGETS)
    else:
        barrier, none = (float(line.split(":")[1].split(",")[0]) for line in lines)
        assert barrier == pytest.approx(0.045)
        assert none < 1e-30


class TestSearch:
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_simulation_is_training(self, optimizer):
        """Weights after 60 minibatch steps on real networks, uneven last batch included, one unit at 0."""
        inputs, target = gaussian(0, 1000), MIXED
        initial = search.draw_initial(4, torch.Generator().manual_seed(2))
        initial[3, 0] = 0
        settings = {"learning_rate": 0.02, "steps": 60, "optimizer": optimizer}
        outcome = search.simulate_search(
            initial,
            target,
            search.batch_moments(inputs, 256),
            sample=Moments.of(inputs),
            thresholds=(0.1, 0.03),
            **settings,
        )
        p, q = target
        teacher = inputs.clamp_min(0) * p + (-inputs).clamp_min(0) * q
        for number, weights in enumerate(initial):
            network = toy_network(weights)
            make = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
            descent = make(network.parameters(), lr=0.02)
            losses = []
            for step in range(61):
                with torch.no_grad():
                    losses.append(float((network(inputs[:, None, None, None])[:, 0] - teacher).square().mean()))
                if step == 60:
                    break
                x, y = (part.split(256)[step % 4] for part in (inputs, teacher))
                descent.zero_grad()
                (network(x[:, None, None, None])[:, 0] - y).square().mean().backward()
                descent.step()
            assert float((weight_vector(network) - outcome.weights[number]).abs().max()) <= EXACT
            assert float(outcome.distances[number]) == pytest.approx(losses[-1], abs=EXACT)
            for column, level in enumerate((0.1, 0.03)):
                expected = next((step for step, loss in enumerate(losses) if loss < level), -1)
                assert int(outcome.steps[number, column]) == expected
        assert float(outcome.weights[3, 0]) == 0

    def test_the_start_decides(self, mixed_run):
        """Test 10: 2000 restarts, 3000 steps."""
        initial, outcome, mixed = mixed_run
        reached = outcome.distances < 1e-6
        assert float((search.predicts_success(initial, mixed.target) == reached).double().mean()) >= 0.99
        # each unit alive with probability 1 - sqrt(2) / 8, signs opposite with 1 / 2
        assert 0.5 * (1 - math.sqrt(2) / 8) ** 2 == pytest.approx(0.339, abs=5e-4)
        assert float(reached.double().mean()) == pytest.approx(0.339, abs=0.04)

    def test_failures_sit_at_the_three_local_minima(self, mixed_run):
        """Test 11, and the shares of 2600 failures in the table: 47.5, 47.9 and 4.7%."""
        _, outcome, mixed = mixed_run
        found = [name for name in mixed.diagnose(outcome.distances, 1e-6) if name != "reached"]
        assert sum(name in mixed.local_minima for name in found) >= 0.95 * len(found)
        shares = [found.count(name) / len(found) for name in mixed.local_minima]
        assert shares == pytest.approx([0.475, 0.479, 0.047], abs=0.05)

    @pytest.mark.parametrize(
        ("target", "settings", "success", "quantiles"),
        [
            (MIXED, {}, 0.349, [756, 1040, 1460, 1978]),
            (MIXED, {"restarts": 1000, "steps": 2000, "optimizer": "adam", "learning_rate": 0.01}, 0.373, [206]),
            (SAME_SIGN, {"restarts": 1000, "steps": 2000, "optimizer": "adam", "learning_rate": 0.01}, 0.697, [200]),
            (MIXED, {"restarts": 2000, "steps": 600, "learning_rate": 0.1}, 0.349, [153]),
        ],
        ids=["sgd", "adam", "adam, one slope", "larger steps"],
    )
    def test_shares_and_steps_are_those_of_the_table(self, mixed_run, target, settings, success, quantiles):
        _, outcome, _ = run(target, **settings) if settings else mixed_run
        assert outcome.fraction(1e-6) == pytest.approx(success, abs=0.05)
        shares = [0.5] if len(quantiles) == 1 else [0.1, 0.5, 0.9, 0.99]
        assert outcome.quantiles(1e-10, shares) == pytest.approx(quantiles, rel=0.1 if settings else 0.15)


LAW = settings(max_examples=60, deadline=None, derandomize=True)


@given(seed=st.integers(0, 2**40))
@LAW
def test_predictions_do_not_depend_on_the_order_of_units_and_mirror_with_the_inputs(seed):
    target = gaussian(seed, 2)
    initial = gaussian(seed + 1, 200, 4)
    expected = search.predicts_success(initial, target)
    assert torch.equal(search.predicts_success(initial[:, [1, 0, 3, 2]], target), expected)
    assert torch.equal(search.predicts_success(initial * torch.tensor([-1, -1, 1, 1]), target.flip(0)), expected)
    assert bool((search.predicts_success(initial, [float(target[0]), 0.0]) >= expected).all())


def another_member(weights, seed):
    """Other input weights of any signs (both occur), random output weights, the first of each side solved for."""
    count = len(weights) // 2
    inputs, outputs = gaussian(seed, count), gaussian(seed + 1, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    inputs[order[0]], inputs[order[1]] = inputs[order[0]].abs(), -inputs[order[1]].abs()
    missing = slopes(weights) - slopes(torch.cat([inputs, outputs]))
    outputs[order[:2]] += missing / inputs[order[:2]].abs()
    return torch.cat([inputs, outputs])


@given(seed=st.integers(0, 2**40), count=st.integers(3, 6))
@LAW
def test_members_of_wide_classes_are_joined_without_a_barrier(seed, count):
    start = gaussian(seed, 2 * count)
    end = another_member(start, seed + 1)
    path = connecting_path(start, end, points=7)
    torch.testing.assert_close(path[0], start)
    torch.testing.assert_close(path[-1], end)
    scale = float((path[:, :count] * path[:, count:]).abs().max())
    values = distance(path, slopes(start), Moments())
    assert float(values.max()) <= (1e-13 * (1 + scale)) ** 2
    # straight legs: also between the points
    middle = distance((path[1:] + path[:-1]) / 2, slopes(start), Moments())
    assert float(middle.max()) <= (1e-13 * (1 + scale)) ** 2


@given(seed=st.integers(0, 2**40), side=st.sampled_from([1, -1]))
@LAW
def test_same_sign_classes_of_two_units_are_connected(seed, side):
    """From weights with both units alive to the dead-unit flange with the carrier the other unit."""
    start = gaussian(seed, 4)
    start[:2] = side * start[:2].abs()
    slope = slopes(start).sum()
    a, b = gaussian(seed + 1, 2).tolist()
    end = torch.tensor([-side * abs(a), side * abs(b), 0.0, float(slope) / abs(b)], dtype=torch.float64)
    values = distance(connecting_path(start, end), slopes(start), Moments())
    assert float(values.max()) <= 1e-24 * (1 + float(end.abs().max())) ** 2
    assert_refused(connecting_path, *[torch.tensor([1.0, -1.0, 0.5, 0.5])] * 2, says="cannot spare one")


def test_weights_that_no_path_joins_are_refused():
    assert_refused(connecting_path, torch.ones(6), 2 * torch.ones(6), says="same function")
    assert_refused(connecting_path, torch.ones(6), torch.ones(4), says="one length")
