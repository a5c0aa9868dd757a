"""MergingReport: merged networks are what their settings say, and alignment undoes an element of the symmetry."""

import copy

import pytest
import torch
from experiments import HalfBlindTask
from fits import descended, digits, fit
from helpers import assert_refused, read_rows, write_zoo

from lightning_sym.callbacks import MergingReport
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports.merged_tasks import ALIGNED, ONE_MOVED, ONE_PARENT, OTHER_SEED, PARENT_TASK, PLAIN, TWO_SEEDS
from lightning_sym.symmetry import weight_matching
from lightning_sym.tasks import FineTuneTask, SquaredDistance
from lightning_sym.zoo import ModelZoo

pytestmark = pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data")
METHODS = {"linear": {}, "slerp": {}, "task_arithmetic": {"lambda": 0.5}, "ties": {"density": 0.5}, "model_stock": {}}


def network():
    return MultiLayerPerceptron(widths=(16, 12), image_size=8)


@pytest.fixture
def zoo(tmp_path):
    """Return a zoo of two networks after some steps on all digits."""
    data, networks = digits(max_samples=400), [network().fresh(number) for number in range(2)]
    for one in networks:
        descended(one, data, steps=60, lr=0.01)
    return str(write_zoo(tmp_path / "zoo", networks, data))


def run(zoo, folder, precision="64-true", **settings):
    task = FineTuneTask(network(), zoo, tasks=[1, 2], members=4)
    report, data = MergingReport(METHODS, **settings), digits(max_samples=400)
    fit(task, data, report, folder=folder, max_epochs=3, precision=precision)
    rows = read_rows(folder / "results" / "accuracies")
    return task, data, report, rows


def chosen(rows, **values):
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def accuracy(one, data, turns):
    batches = list(data.test_dataloader())
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    outputs = one.eval()(images.to(next(one.parameters()).dtype).rot90(turns, (-2, -1)))
    return float((outputs.argmax(1) == labels).double().mean())


def test_fine_tunes_stay_and_a_moved_one_comes_back(zoo, tmp_path):
    _, _, _, rows = run(zoo, tmp_path)
    for method in ("linear", "task_arithmetic", "ties", "model_stock"):
        found = {
            key: [row["accuracy"] for row in chosen(rows, setting=key[0], align=key[1], method=method)]
            for key in [(ONE_PARENT, PLAIN), (ONE_PARENT, ALIGNED), (ONE_MOVED, PLAIN), (ONE_MOVED, ALIGNED)]
        }
        assert found[ONE_PARENT, PLAIN] == found[ONE_PARENT, ALIGNED]
        # Scales are fitted to the parent, so that an element is undone up to the change by fine-tuning.
        assert found[ONE_MOVED, ALIGNED] == pytest.approx(found[ONE_PARENT, PLAIN], abs=0.05)
        assert max(abs(a - b) for a, b in zip(found[ONE_MOVED, PLAIN], found[ONE_PARENT, PLAIN], strict=True)) > 0.1


def test_copies_of_the_parent_of_which_one_was_moved_merge_to_the_parent(zoo):
    """In double precision, by every method; without alignment they do not."""
    methods = {name: settings for name, settings in METHODS.items() if name != "model_stock"}  # stays at the base
    task, report = FineTuneTask(network(), zoo, tasks=[1, 2]), MergingReport(methods)
    base = task.parent(0).double()
    with torch.no_grad():
        merged = [
            (about["setting"], about["align"], one.state_dict())
            for about, one in report._merged(task, 0, (base, {"a": base, "b": copy.deepcopy(base)}), None)
        ]
    for setting, how, state in merged:
        error = max(float((state[key] - own).abs().max()) for key, own in base.state_dict().items())
        assert error > 0.01 if (setting, how) == (ONE_MOVED, PLAIN) else error < 1e-10
    assert len(merged) == 6 + 4 * len(methods)


def test_accuracies_are_those_of_networks_merged_by_hand(zoo, tmp_path):
    task, data, _, rows = run(zoo, tmp_path, precision="32-true")
    a, b = map(ModelZoo.open(zoo).load, (0, 1))
    tuned = [copy.deepcopy(a) for _ in range(2)]
    for number, one in enumerate(tuned):
        one.load_state_dict(task.kept[number]["state"])
    means = {}
    for name, networks in (
        ((ONE_PARENT, PLAIN), tuned),
        ((TWO_SEEDS, PLAIN), [a, b]),
        ((TWO_SEEDS, ALIGNED), [a, weight_matching(task.symmetry, a, b).network]),
    ):
        means[name] = copy.deepcopy(a)
        states = [one.state_dict() for one in networks]
        means[name].load_state_dict({key: (states[0][key] + states[1][key]) / 2 for key in states[0]})
    carried = copy.deepcopy(a)  # the difference that fine-tuning made to the other parent, on the first task
    there, other = task.kept[2]["state"], b.state_dict()
    carried.load_state_dict({key: own + there[key] - other[key] for key, own in a.state_dict().items()})
    (row,) = chosen(rows, setting=OTHER_SEED, align=PLAIN, parent=0, tasks="task 1", task="task 1")
    assert row["accuracy"] == pytest.approx(accuracy(carried, data, 1), abs=1 / 359)
    for (setting, how), mean in means.items():
        own = chosen(rows, setting=setting, align=how, method="linear", parent=0)
        found = {row["task"]: row["accuracy"] for row in own}
        assert found == pytest.approx(
            {
                PARENT_TASK: accuracy(mean, data, 0),
                "task 1": accuracy(mean, data, 1),
                "task 2": accuracy(mean, data, 2),
            },
            abs=1e-9,
        )


def test_tables_numbers_and_pictures(zoo, tmp_path):
    _, _, report, rows = run(zoo, tmp_path, precision="32-true")
    summary = read_rows(tmp_path / "results" / "summary")
    assert {row["setting"] for row in summary} == {"alone", ONE_PARENT, ONE_MOVED, TWO_SEEDS, OTHER_SEED}
    of_base = [row["method"] for row in summary if row["setting"] == ONE_PARENT]
    assert of_base == list(METHODS)  # slerp, too: there are two fine-tunes
    assert [row["method"] for row in summary if row["setting"] == TWO_SEEDS] == ["linear", "slerp"]
    (linear,) = chosen(summary, setting=ONE_MOVED, method="linear")
    for column, align in (("plain", PLAIN), ("aligned", ALIGNED)):
        own = chosen(rows, setting=ONE_MOVED, method="linear", align=align)
        scores = [row["accuracy"] for row in own if row["task"] != PARENT_TASK]
        assert linear[column] == pytest.approx(sum(scores) / len(scores))
    assert report.results.numbers["details/merging/one_moved/linear/plain"] == linear["plain"] < linear["aligned"]
    assert {path.name for path in (tmp_path / "results").glob("*.png")} == {"merging.png", "tasks.png"}


def test_what_cannot_be_merged_or_reported_is_refused(zoo, tmp_path):
    assert_refused(MergingReport, {"tie": {}}, says="ties")
    assert_refused(MergingReport, {"ties": {"dense": 0.5}}, says=["ties has no setting dense", "density"])
    assert_refused(
        fit, HalfBlindTask(), digits(), MergingReport(), folder=tmp_path, says="FineTuneTask", error=TypeError
    )
    task = FineTuneTask(network(), zoo, loss=SquaredDistance())
    assert_refused(fit, task, digits(), MergingReport(), folder=tmp_path, says="no cross-entropy")
