"""What is said of a walk through equivalent weights, by theory where the class is known."""

from pathlib import Path

import pytest
import torch
from helpers import printed

from lightning_sym.landscape import orbit_distances, sample_sgld, walk_level_set
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports.walk import walk_results


def results(weights, chains=0):
    network = MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False).double()
    torch.nn.utils.vector_to_parameters(torch.tensor(weights).double(), network.parameters())
    inputs = torch.randn(50, 1, 1, 1, generator=torch.Generator().manual_seed(0)).double()
    walk = walk_level_set(network, inputs, steps=60, step_size=0.05)
    places = torch.tensor([0, 30, 60])
    orbit = orbit_distances(network, walk.vectors[places], walk.vectors[0], inputs[:2])
    samples = None
    if chains:
        samples = sample_sgld(network, inputs, chains=chains, steps=40, burn_in=10, inverse_temperature=5e4)
    about = {"data": "digits", "versions": "new"}
    return walk_results(
        walk, places, orbit, samples, title="two units", teacher={"teacher": 0}, settings={"steps": 60}, about=about
    )


@pytest.mark.parametrize(
    ("weights", "dimension", "says"),
    [
        ([0.8, 0.6, 0.7, 0.5], 3, "the class is larger than its symmetry group makes it"),  # one slope
        ([0.8, -0.6, 0.7, 0.5], 2, "never left the teacher's orbit"),  # two slopes: nothing but the group
    ],
)
def test_a_walk_stays_in_the_orbit_where_the_class_is_the_orbit(weights, dimension, says):
    found = results(weights)
    (table,) = found.tables
    assert [row["step"] for row in table.rows if row["orbit_distance"] is not None] == [0, 30, 60]
    assert {row["dimension"] for row in table.rows} == {dimension}
    assert max(row["J"] for row in table.rows) < 1e-20
    facts = table.about["found"]
    assert facts["distance"] == max(row["distance"] for row in table.rows) > 0.5
    assert found.numbers["walk/rank"] == facts["rank"] == 4 - dimension
    assert list(table.about) == ["teacher", "orbit_distance_is", "settings", "found", "data", "versions"]
    assert says in found.notes[0]
    assert [name for name, _ in found.figures] == ["walk"]
    assert set(found.files) == {"walk.safetensors"}


def test_chains_are_reported_beside_half_the_rank():
    found = results([0.8, 0.6, 0.7, 0.5], chains=2)
    text = printed(lambda console: found.show(console, Path("there"), Path("run")))
    for word in ("learning coefficient", "±", "what a regular point would have: 0.5", "there/walk.csv"):
        assert word in text
