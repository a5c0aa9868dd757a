"""A new experiment on the base of populations: curves between networks along which the loss is low."""

import functools

import pytest
import torch
from experiments import CurveTask
from fits import digits, fit
from torch.nn import functional as F

from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import ZooTask

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.fixture(scope="module")
def data():
    return digits(max_samples=400, batch_size=40)


@pytest.fixture(scope="module")
def ends(data):
    network = MultiLayerPerceptron(widths=(16,), image_size=8)
    zoo = ZooTask(network, members=3, optimizer=ADAM, keep="last")
    fit(zoo, data, max_epochs=20)
    networks = [network.fresh(number) for number in range(3)]
    for number, one in enumerate(networks):
        one.load_state_dict(zoo.kept[number]["state"])
    return networks


def losses_along(curve, images, labels):
    """Return the loss at eleven points of a curve, from end to end."""
    curve.eval()
    found = []
    for place in torch.linspace(0, 1, 11).tolist():
        curve.place = place
        with torch.no_grad():
            found.append(float(F.cross_entropy(curve(images), labels)))
    return torch.tensor(found)


def test_the_loss_along_a_trained_curve_is_below_that_of_the_straight_line(ends, data):
    task = CurveTask([(ends[0], ends[1]), (ends[0], ends[2])], members=2, points=1, optimizer=ADAM, keep="last")
    images, labels = data.split_tensors("test")
    images = data.normalize(images)
    straight = [losses_along(task.make_member(number), images, labels) for number in (0, 1)]
    fit(task, data, max_epochs=15)
    for number, line in enumerate(straight):
        along = losses_along(task.population.members[f"{number:04d}"], images, labels)
        torch.testing.assert_close(along[[0, -1]], line[[0, -1]])  # the ends stay where they are
        assert along.mean() < 0.8 * line.mean()
        assert along.max() < 0.7 * line.max()
    assert "val/accuracy" in task.history
