"""A pruning that was interrupted ends as one that was not, to the last digit of its tables, twins included."""

import pytest
from fits import Interrupt, descended, digits, fit, saving
from helpers import assert_refused, assert_same, one_in, write_zoo

from lightning_sym.callbacks import PruningReport
from lightning_sym.networks import MyrtleCNN
from lightning_sym.tasks import RashomonPruning
from lightning_sym.zoo import ModelZoo

TABLES = ("summary", "steps", "magnitude", "widths")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data"),
]


def prune(zoo, folder, *callbacks, **options):
    """Prune a CNN to the end, with two bounds; an epoch has 5 steps, a walk 4, and every step is saved."""
    task = RashomonPruning(str(zoo), members=[1], epsilon=[0.1, 1.0], steps=4, fraction=0.3, tries=2)
    checkpoint = saving(folder, every_n_train_steps=1)
    settings = {"folder": folder, "max_epochs": 400, "limit_val_batches": 0, **options}
    fit(task, digits(), *callbacks, PruningReport(folder / "results"), checkpoint, **settings)
    return task


def left_behind(folder):
    """Return the tables, and the networks."""
    tables = {name: (folder / "results" / f"{name}.csv").read_text() for name in TABLES}
    zoos = [ModelZoo.open(path.parent) for path in sorted(folder.glob("pruned/*/*/manifest.json"))]
    return tables, [zoo.load(number).state_dict() for zoo in zoos for number in zoo.numbers]


def trained(number):
    """Return a CNN after 40 steps on all images, so that not everything can go for nothing."""
    network = MyrtleCNN(2, in_channels=1, image_size=8).fresh(number)
    return descended(network, digits(), steps=40, lr=0.01)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return write_zoo(tmp_path_factory.mktemp("pruning") / "zoo", [trained(n) for n in range(2)], digits())


@pytest.fixture(scope="module")
def whole(zoo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return prune(zoo, folder), left_behind(folder)


# In the cooldown of the second walk, between a walk's end and its decision, and before the reports.
@pytest.mark.parametrize("place", one_in(3, ["1 2", "0 4", "end"]))
def test_a_pruning_that_goes_on_is_one_that_was_not_interrupted(place, zoo, whole, tmp_path):
    expected, (tables, networks) = whole
    assert_refused(lambda: prune(zoo, tmp_path / "first", Interrupt(place)), says="interrupted", error=RuntimeError)
    task = prune(zoo, tmp_path / "second", ckpt_path=tmp_path / "first" / "last.ckpt")
    assert all(pruning.finished for pruning in task.prunings.values())
    found, states = left_behind(tmp_path / "second")
    assert found == tables
    assert_same(states, networks)
    assert task.twins == expected.twins
    for number in task.numbers:
        assert_same(task.kept[number]["state"], expected.kept[number]["state"])
    assert len(states) == 2
    assert max(pruning.walks for pruning in task.prunings.values()) > 1
