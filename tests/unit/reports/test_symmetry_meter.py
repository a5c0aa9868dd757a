"""What is measured of a network along its symmetry, and what is logged, written and drawn of it."""

import math

import pytest
import torch
from helpers import assert_refused
from torch import Tensor, nn

from lightning_sym.reports.symmetry import GroupKind, SymmetryMeter, monitor_results, monitor_scalars
from lightning_sym.symmetry import trace_symmetry


def sequential(seed: int = 0, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), activation(), nn.Linear(7, 5), activation(), nn.Linear(5, 3))


def state(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


def measured(network: nn.Module, later: nn.Module) -> dict:
    """Return what a meter says of a network that was another one at the start."""
    meter = SymmetryMeter(network, torch.zeros(2, 4))
    start = meter.start(state(network))
    return meter.values(state(later), start, meter.forms(start["state"]))


def naive(network: nn.Sequential) -> dict[str, Tensor]:
    """Incoming and outgoing squared norms of the ReLU perceptron's two hidden layers."""
    first, second, third = (layer for layer in network if isinstance(layer, nn.Linear))
    result = {}
    for name, one, two in (("0", first, second), ("2", second, third)):
        incoming = one.weight.detach().double().square().sum(1) + one.bias.detach().double().square()
        result[name] = torch.stack([incoming, two.weight.detach().double().square().sum(0)])
    return result


def test_values_are_those_of_the_formulas():
    network, later = sequential(), sequential(1)
    before, after = naive(network), naive(later)
    found = measured(network, later)
    for group in ("0", "2"):
        incoming, outgoing = after[group]
        difference = incoming - outgoing
        change = difference - (before[group][0] - before[group][1])
        assert found["groups"][group] == {
            "imbalance": pytest.approx(float(difference.abs().sum() / (incoming + outgoing).sum())),
            "conserved": pytest.approx(float(difference.abs().mean())),
            "drift": pytest.approx(float(change.abs().sum() / before[group].sum()), rel=1e-6),
            "dead": 0,
        }
    one, two = (torch.cat([p.detach().flatten() for p in n.parameters()]).double() for n in (network, later))
    assert found["distance"]["parameters"] == pytest.approx(float((two - one).norm() / one.norm()), rel=1e-5)
    assert set(measured(network, network)["distance"].values()) == {0.0}


def test_only_what_is_defined_is_given():
    """tanh has no free scale, so nothing is conserved; units behind a batch norm and before a tanh only receive."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    groups = measured(network, network)["groups"]
    assert set(groups["0"]) == {"conserved", "drift", "dead"}
    assert set(groups["3"]) == {"imbalance", "dead"}
    assert groups["0"]["conserved"] > 0


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
def test_distances_in_an_orbit(activation):
    """Rescaling is no distance in the balanced gauge, permuting none in canonical form."""
    network = sequential(activation=activation).double()
    symmetry = trace_symmetry(network, torch.zeros(2, 4, dtype=torch.float64))
    for permutations in (False, True):
        element = symmetry.sample(torch.Generator().manual_seed(1), permutations=permutations)
        distance = measured(network, symmetry.act(element, network))["distance"]
        assert distance["parameters"] > 0.1
        assert (distance["balanced"] > 0.1) == permutations
        assert distance["balanced"] < 1e-10 or permutations
        assert distance["canonical"] < 1e-10


def test_dead_units_are_counted():
    network = sequential()
    with torch.no_grad():
        network[0].weight[2].zero_()
        network[0].bias[2].zero_()
        network[2].weight[:, 2].zero_()
        network[4].weight[:, 1].zero_()
    found = measured(network, network)
    assert [found["groups"][name]["dead"] for name in ("0", "2")] == [1, 1]
    assert all(math.isfinite(value) for value in found["distance"].values())


def test_weights_that_are_not_finite_have_no_numbers():
    network, later = sequential(), sequential(1)
    with torch.no_grad():
        later[2].weight[0, 0] = math.nan
    found = measured(network, later)
    assert all(math.isnan(value) for group in found["groups"].values() for value in group.values())
    assert all(math.isnan(value) for value in found["distance"].values())
    assert SymmetryMeter(network, torch.zeros(2, 4)).forms(state(later)) == {}


def test_networks_that_cannot_be_measured_are_refused():
    assert_refused(SymmetryMeter, nn.Sequential(nn.ReLU()), torch.zeros(2, 4), says="has no parameters")


def point(step, *values, distance=0.5):
    """A point of one member for each value, which is its imbalance; the second group has nothing conserved."""
    members = {
        2 * index: {
            "groups": {"conv1 (2)": {"imbalance": value, "conserved": 1.0, "drift": 0.1, "dead": 0}, "b": {"dead": 1}},
            "distance": dict.fromkeys(("parameters", "balanced", "canonical"), distance),
        }
        for index, value in enumerate(values)
    }
    return {"step": step, "epoch": step / 2, "members": members}


KINDS = {"conv1 (2)": GroupKind(7, True, True), "b": GroupKind(5, False, False)}


def test_scalars_are_means_over_members_that_are_finite():
    scalars = monitor_scalars(point(1, 0.2, 0.4, math.nan), "mine", named=True)
    assert scalars["mine/imbalance/conv1--2"] == pytest.approx(0.3)
    assert scalars["details/mine/imbalance/conv1--2/member-0002"] == 0.4
    assert "details/mine/imbalance/conv1--2/member-0004" not in scalars
    assert scalars["mine/distance/balanced"] == 0.5
    assert not [tag for tag in monitor_scalars(point(1, 0.2)) if "member" in tag]
    assert "symmetry/imbalance/b" not in monitor_scalars(point(1, 0.2))


def test_tables_have_a_row_for_every_point_member_and_group():
    points = [point(0, 0.1, 0.2), point(2, 0.3, math.nan, distance=math.nan)]
    found = monitor_results(points, KINDS, network="Net", about={"seed": 1}, name="mine")
    groups, distances = found.tables
    assert (groups.name, distances.name) == ("mine", "mine_distance")
    assert len(groups.rows) == 2 * 2 * 2
    assert [row["imbalance"] for row in groups.rows] == [0.1, None, 0.2, None, 0.3, None, None, None]
    assert groups.rows[5] == {"step": 2, "epoch": 1.0, "member": 0, "group": "b", "size": 5, "imbalance": None,
                              "conserved": None, "drift": None, "dead": 1}  # fmt: skip
    assert [row["canonical"] for row in distances.rows] == [0.5, 0.5, None, None]
    ((name, figure),) = found.figures
    titles = [
        "Imbalance, 0 = balanced",
        "Change of the quantities conserved by gradient flow",
        "Distance to the start",
        "Dead units",
    ]
    assert (name, [axes.get_title() for axes in figure.axes]) == ("mine", titles)
    for values in (values for one in points for values in one["members"].values()):
        del values["groups"]["conv1 (2)"]
    without = monitor_results(points, {"b": KINDS["b"]}, network="Net", about={}, distance=False)
    assert (len(without.tables), list(without.figures)) == (1, [])  # nothing to draw


def test_units_of_frozen_weights_conserve_nothing():
    layers = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    assert [kind[2] for kind in SymmetryMeter(layers, torch.randn(2, 5)).kinds.values()] == [True, True]
    layers[4].weight.requires_grad_(False)
    assert [kind[2] for kind in SymmetryMeter(layers, torch.randn(2, 5)).kinds.values()] == [True, False]
