"""EquivalenceTask: what is found, rounds, thresholds, where the teacher comes from, and what is refused."""

import functools
import math

import fits
import pytest
import torch
from helpers import assert_refused
from safetensors.torch import save_file

from lightning_sym.datamodules import DigitsDataModule, GaussianInputsDataModule
from lightning_sym.landscape.two_unit import Moments, distance
from lightning_sym.networks import LeNet5, MultiLayerPerceptron
from lightning_sym.tasks import EquivalenceTask
from lightning_sym.tasks._stopping import Divergence

pytestmark = pytest.mark.long

MIXED = [0.8, -0.6, 0.7, 0.5]
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def two_unit():
    return MultiLayerPerceptron(widths=[2], image_size=1, num_classes=1, bias=False)


def inputs(**options):
    return GaussianInputsDataModule(**{"samples": 1024, "batch_size": 256, "val_samples": 512, **options})


def fit(task, data=None, **options):
    settings = {"max_epochs": 100, "precision": "64-true", "num_sanity_val_steps": 0, **options}
    return fits.fit(task, data or inputs(), **settings)


@pytest.fixture(scope="module")
def searched():
    task = EquivalenceTask(two_unit(), members=24, points=4, teacher=MIXED, optimizer=SGD)
    fit(task)
    return task


def test_found_points_compute_the_teachers_function(searched):
    points = searched.found_points()
    assert len(points) == 4
    x = torch.randn(200, 1, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for point in points:
        a, b, c, d = point.weights.tolist()
        mine = c * (a * x).relu() + d * (b * x).relu()
        theirs = 0.7 * (0.8 * x).relu() + 0.5 * (-0.6 * x).relu()
        assert (mine - theirs).abs().max() < 1e-3
        assert point.loss < 1e-10 * searched.scales["sample"].zero
        assert searched.scales["held_out"].relative(point.held_out) < 1e-2
    assert points[0].loss == min(point.loss for point in points)


def test_loss_is_that_of_the_closed_form(searched):
    sample = torch.cat(list(searched.sample_inputs())).flatten()
    moments = Moments.of(sample)
    for entry in searched.all_outcomes().values():
        exact = float(distance(entry["weights"], torch.tensor(MIXED), moments))
        assert entry["loss"] == pytest.approx(exact, rel=1e-9, abs=1e-16)


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_second_round_is_as_a_search_from_scratch(execution):
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    settings = {"members": 2, "points": 4, "teacher": MIXED, "execution": execution, "optimizer": adam}
    rounds = EquivalenceTask(two_unit(), round_steps=8, max_rounds=2, **settings)
    fit(rounds, max_epochs=20)
    assert rounds.round == 1
    assert sorted(rounds.all_outcomes()) == [0, 1, 2, 3]
    assert {entry["steps"] for entry in rounds.all_outcomes().values()} == {8}

    class FromSecondRound(EquivalenceTask):
        def number(self, slot):
            return self.members + slot

    scratch = FromSecondRound(two_unit(), **settings)
    fit(scratch, max_epochs=2)
    for number in (2, 3):
        assert torch.equal(scratch.all_outcomes()[number]["weights"], rounds.all_outcomes()[number]["weights"])
    steps, losses, found = rounds.curves()
    assert steps.tolist() == [4, 8]
    assert losses.shape == (2, 4)
    assert losses.isfinite().all()
    assert not found.any()


def test_initial_weights_do_not_depend_on_the_precision_of_the_fit():
    tasks = [EquivalenceTask(two_unit(), members=2, teacher=10, optimizer=SGD, stop_when_found=False) for _ in "ab"]
    fit(tasks[0], max_epochs=1, precision="64-true")
    fit(tasks[1], max_epochs=1, precision="32-true")
    reference = [-0.08383071, -0.03428686, -0.2651674, 0.16266517]  # docs/theory/equivalence.md, 1.2
    for task in tasks:
        weights = torch.cat([parameter.flatten() for parameter in task.teacher.parameters()])
        torch.testing.assert_close(weights.double(), torch.tensor(reference).double(), rtol=0, atol=1e-8)
    one, two = (task.all_outcomes()[0]["weights"].double() for task in tasks)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_fresh_inputs_leave_no_training_sample():
    task = EquivalenceTask(two_unit(), members=8, points=2, teacher=MIXED, optimizer=SGD)
    fit(task, inputs(fresh=True))
    assert len(task.found_points()) == 2
    for entry in task.all_outcomes().values():
        assert entry["loss"] == entry["held_out"]


def test_teacher_from_a_file(tmp_path):
    network = two_unit().fresh(3)
    save_file(network.state_dict(), tmp_path / "teacher.safetensors")
    torch.save(network.state_dict(), tmp_path / "teacher.pt")
    for name in ("teacher.safetensors", "teacher.pt"):
        task = EquivalenceTask(two_unit(), members=1, teacher=str(tmp_path / name))
        task.configure_model()
        assert all(torch.equal(a, b) for a, b in zip(task.teacher.parameters(), network.parameters(), strict=True))


def test_files_that_are_no_teacher(tmp_path):
    def load(file):
        EquivalenceTask(two_unit(), members=1, teacher=str(file)).configure_model()

    assert_refused(load, tmp_path / "absent.safetensors", says="There is no file", error=FileNotFoundError)
    for name in ("broken.safetensors", "broken.pt"):
        (tmp_path / name).write_bytes(b"nonsense")
        assert_refused(load, tmp_path / name, says="is text, not a file of")
        (tmp_path / name).write_bytes(bytes(range(200, 240)))
        assert_refused(load, tmp_path / name, says="is damaged")
    save_file(LeNet5().state_dict(), tmp_path / "other.safetensors")
    assert_refused(load, tmp_path / "other.safetensors", says="which MultiLayerPerceptron has not")
    torch.save([1, 2], tmp_path / "list.pt")
    assert_refused(load, tmp_path / "list.pt", says="holds no tensors by name")
    state = {name: torch.full_like(value, math.nan) for name, value in two_unit().state_dict().items()}
    save_file(state, tmp_path / "nan.safetensors")
    assert_refused(load, tmp_path / "nan.safetensors", says="not finite")


@pytest.mark.parametrize(
    ("teacher", "held_out", "says"),
    [
        ([1.0, 2.0, 3.0], 512, "3 weights, and MultiLayerPerceptron has 4 parameters"),
        ([0.0, 0.0, 1.0, 1.0], 512, "teacher is constant"),
        (MIXED, 0, "needs held-out inputs"),
    ],
)
def test_teachers_and_inputs_that_no_search_can_use(teacher, held_out, says):
    task = EquivalenceTask(two_unit(), members=2, teacher=teacher)
    assert_refused(fit, task, inputs(val_samples=held_out), says=says)


def test_a_late_look_counts_no_milestone_of_a_candidate_that_diverged_before(monkeypatch):
    monkeypatch.setattr(Divergence, "due", False)
    task = EquivalenceTask(two_unit(), members=3, teacher=MIXED, stop_when_found=False, milestones=[1e9, 1e-30])
    with pytest.warns(UserWarning, match="Candidate 1 was stopped in epoch 0, step 0"):
        fit(task, max_epochs=1, callbacks=[fits.Poison(1, 0)])
    assert [entry["milestones"] for entry in task.all_outcomes().values()] == [[0, -1], [-1, -1], [0, -1]]


def test_the_part_that_was_found_is_of_all_candidates(searched):
    found = [entry["found"] for entry in searched.all_outcomes().values()]
    assert searched.success_fraction() == sum(found) / len(found)


def test_images_and_orbit_members():
    network = MultiLayerPerceptron(widths=[8], image_size=8)
    task = EquivalenceTask(network, members=2, teacher=0, stop_when_found=False)
    fit(task, DigitsDataModule(), max_epochs=2, precision="32-true")
    points = task.orbit_points(3)
    assert [point.name for point in points] == ["orbit 1", "orbit 2", "orbit 3"]
    surface = task.held_out_surface(torch.float64)
    vectors = torch.stack([point.weights for point in points]).double()
    teacher = torch.cat([parameter.detach().flatten() for parameter in task.teacher.parameters()]).double()
    assert (vectors - teacher).norm(dim=1).min() > 0.1
    assert surface.at(vectors).max() < 1e-10 * task.scales["held_out"].zero  # weights are float32
    assert task.fresh_inputs is False


def test_test_evaluates_what_was_found(searched):
    trainer = fit(searched, max_epochs=1)
    values = trainer.test(searched, inputs(), verbose=False)[0]
    assert values["test/r/highest"] < 1e-2
    assert values["test/r/lowest"] <= values["test/r/mean"] <= values["test/r/highest"]


def test_nothing_found_to_test():
    task = EquivalenceTask(two_unit(), members=1, teacher=MIXED)
    trainer = fit(task, max_epochs=1)
    assert_refused(lambda: trainer.test(task, inputs(), verbose=False), says="Nothing has been found")
