"""FineTuneTask: parents of a zoo, one task for each member, and tasks of one's own."""

import pytest
import torch
from fits import digits, fit
from helpers import assert_refused, assert_same, write_zoo

from lightning_sym.datamodules import TensorDataModule
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.tasks import FineTuneTask, ZooTask
from lightning_sym.zoo import ModelZoo

pytestmark = pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data")


def network():
    return MultiLayerPerceptron(widths=(6,), image_size=8)


@pytest.fixture
def zoo(tmp_path):
    return str(write_zoo(tmp_path / "zoo", [network().fresh(number) for number in range(3)], digits()))


class Shifted(FineTuneTask):
    """Tasks with other labels."""

    def task_batch(self, task, inputs, targets):
        return inputs, (targets + task) % 10


def test_members_start_from_their_parents(zoo):
    task = FineTuneTask(network(), zoo, tasks=[1, 2], members=3, seed=1)
    fit(task, max_epochs=0)
    assert [task.parent_of(number) for number in task.numbers] == [0, 1, 1]
    assert [task.task_of(number) for number in task.numbers] == [2, 1, 2]
    for number in task.numbers:
        parent = ModelZoo.open(zoo).load(task.parent_of(number))
        assert_same(task.population.member_state(number), parent.state_dict())


def test_without_a_turn_fine_tuning_is_further_training(zoo):
    tuned, further = FineTuneTask(network(), zoo, tasks=[0]), ZooTask(network(), 3, initial=zoo, keep="last")
    for task in (tuned, further):
        fit(task, max_epochs=2)
    for number in range(3):
        assert_same(tuned.kept[number]["state"], further.kept[number]["state"])
    assert tuned.history == further.history


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_every_member_is_trained_and_evaluated_on_its_task(zoo, execution):
    seen = {}

    class Watching(FineTuneTask):
        def training_batch(self, batch, batch_idx):
            seen["given"], seen["made"] = batch, super().training_batch(batch, batch_idx)
            return seen["made"]

    task, data = Watching(network(), zoo, tasks=[1, 3], members=4, execution=execution), digits()
    fit(task, data, max_epochs=1)
    (given, labels), (made, targets) = seen["given"], seen["made"]
    assert torch.equal(targets, labels)
    for number in range(4):
        assert torch.equal(made[number], given[number].rot90(task.task_of(number), (-2, -1)))
    found = task.split_metrics(data)["test"]["accuracy"]
    images, labels = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    for number in range(4):
        tuned = network()
        tuned.load_state_dict(task.kept[number]["state"])
        outputs = tuned.eval()(images.rot90([1, 3][number % 2], (-2, -1)))
        assert float(found[number]) == float((outputs.argmax(1) == labels).double().mean())


def test_tasks_of_a_subclass(zoo):
    """A task of other labels trains what a ZooTask trains that changes the labels itself."""

    class Relabelled(ZooTask):
        def evaluation_batch(self, batch):
            return batch[0], (batch[1] + 3) % 10

    tuned, other = Shifted(network(), zoo, tasks=[3]), Relabelled(network(), 3, initial=zoo, keep="last")
    for task in (tuned, other):
        fit(task, max_epochs=2)
    assert_same(tuned.kept[1]["state"], other.kept[1]["state"])
    assert tuned.history == other.history


def test_what_cannot_be_turned_or_found_is_refused(zoo, tmp_path):
    assert_refused(FineTuneTask, network(), zoo, tasks=[1, 1], says="different tasks")
    assert_refused(FineTuneTask, network(), zoo, tasks=[], says="different tasks")
    wide = MultiLayerPerceptron(widths=(6,), image_size=(8, 4), num_classes=2)
    fields = TensorDataModule((torch.randn(40, 1, 8, 4), torch.arange(40) % 2), batch_size=8)
    other = str(write_zoo(tmp_path / "wide", [wide.fresh(0)], fields))
    says = ["quarter turns of square images", "override task_batch"]
    assert_refused(fit, FineTuneTask(wide, other), fields, says=says)
    assert_refused(fit, FineTuneTask(network(), zoo, seed=9), digits(), says="No member 3")
    missing = FineTuneTask(network(), str(tmp_path / "nowhere"))
    assert_refused(fit, missing, digits(), says="No zoo at", error=FileNotFoundError)
