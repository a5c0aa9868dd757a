"""RashomonPruning: below the threshold, really smaller, beside a twin of the same widths; what it leaves behind."""

import functools
import json

import fits
import pytest
import torch
from fits import Theirs, fit, quiet_trainer
from helpers import assert_refused, assert_same, randomize_statistics, read_csv, read_rows, refused, write_zoo
from matplotlib.image import imread
from torch.nn import functional as F

from lightning_sym.callbacks import PruningReport
from lightning_sym.cli.loggers import MetricsCSV
from lightning_sym.landscape.pruning import mean_loss
from lightning_sym.networks import CIFARResNet, MultiLayerPerceptron, MyrtleCNN, recalibrate_batch_norm
from lightning_sym.reports.pruning import against_twins
from lightning_sym.similarity import CKA, SimilarityMatrix, features_of
from lightning_sym.stitching import CutNetwork, StitchedNetwork
from lightning_sym.symmetry import trace_symmetry, weight_matching
from lightning_sym.tasks import RashomonPruning
from lightning_sym.zoo import ModelZoo

digits = functools.partial(fits.digits, batch_size=40, max_samples=160)
MAKERS = {
    "perceptron": lambda: MultiLayerPerceptron([12, 8], image_size=8),
    "batch norm": lambda: MyrtleCNN(3, in_channels=1, image_size=8),
}
pytestmark = pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data")


def zoo_of(make, folder, members=2):
    return write_zoo(folder, [randomize_statistics(make().fresh(n), n) for n in range(members)], digits())


@pytest.fixture(scope="module", params=MAKERS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruning")
    zoo = zoo_of(MAKERS[request.param], folder / "zoo")
    task = RashomonPruning(str(zoo), epsilon=[0.02, 0.2], steps=6, fraction=0.3, tries=1)
    path = folder / "run"
    fit(task, digits(), PruningReport(), folder=path, logger=MetricsCSV(path), max_epochs=400, limit_val_batches=0)
    return task, path


def loss_of(network, data):
    return mean_loss(network, data.curvature_dataloader(), F.cross_entropy)[0]


@pytest.mark.long
def test_every_network_is_smaller_and_below_its_threshold(run):
    task, _ = run
    data = digits()
    data.setup("fit")
    assert task.jobs == [(0, 0.02), (0, 0.2), (1, 0.02), (1, 0.2)]
    for job, (number, epsilon) in enumerate(task.jobs):
        pruning, small, whole = task.prunings[job], task.pruned(job), task.model_zoo.load(number)
        assert pruning.finished
        assert not small.training
        recalibrate_batch_norm(whole, [torch.cat([images for images, _ in data.curvature_dataloader()])])
        assert pruning.threshold == pytest.approx(loss_of(whole, data) + epsilon, rel=1e-4)
        assert loss_of(small, data) == pruning.history[-1].loss <= pruning.threshold
        assert all(step.loss <= pruning.threshold for step in pruning.history)
        count = sum(parameter.numel() for parameter in small.parameters())
        assert count < sum(parameter.numel() for parameter in whole.parameters())
        left = sum(pruning.widths.values())
        assert left == sum(task.units.sizes.values()) - sum(len(step.units) for step in pruning.history)
        twin = task.pruned(job + len(task.jobs))
        assert [p.shape for p in twin.parameters()] == [p.shape for p in small.parameters()]
        assert task.twins[job][-1]["units"] == left
        assert task.twins[job][-1]["loss"] == pytest.approx(loss_of(twin, data))
        assert task.twins[job][-1]["walks"] == pruning.walks
    assert {task.prunings[job].reference for job in (0, 1)} == {task.prunings[0].reference}


def test_the_fit_ends_when_nothing_more_can_go(run):
    task, _ = run
    walks = max(pruning.walks for pruning in task.prunings.values())
    assert task.trainer.global_step == walks * 6
    assert task.current_epoch < 400


def test_pruned_networks_are_zoos_that_can_be_loaded_and_matched(run):
    task, path = run
    for job, (number, _) in enumerate(task.jobs):
        zoo = ModelZoo.open(path / "pruned" / task.name(job))
        network, kept = zoo.load(number), task.pruned(job)
        assert_same(network.state_dict(), kept.state_dict())
        assert network.sites() == task.model_zoo.load(number).sites()
        assert zoo.member(number).metric("train", "loss") == task.prunings[job].history[-1].loss
        images = torch.rand(2, 1, 8, 8)
        symmetry = trace_symmetry(network, images)
        assert {group.name: group.size for group in symmetry.groups} == task.prunings[job].widths
        moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0), scale=0.1), network)
        matched = weight_matching(symmetry, network, moved).network
        torch.testing.assert_close(matched(images), network(images), atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:no similarity")  # members that were never trained become constants
def test_pruned_networks_can_be_compared_and_stitched_and_matching_refuses_them(run):
    task, path = run
    images = torch.rand(6, 1, 8, 8)
    for job, (number, _) in enumerate(task.jobs):
        small, whole = ModelZoo.open(path / "pruned" / task.name(job)).load(number), task.model_zoo.load(number)
        layers = whole.sites()
        matrix = SimilarityMatrix(CKA("linear"), layers)
        matrix.update(features_of(small, layers, images), features_of(whole, layers, images))
        assert matrix.compute().shape == (len(layers), len(layers))
        stitched = StitchedNetwork(*(CutNetwork(n, example=images) for n in (small, whole)), layers[0], family="full")
        assert stitched(images).shape == (6, 10)
        with pytest.raises(ValueError, match="is not of the traced architecture"):
            weight_matching(trace_symmetry(whole, images), whole, small)


def test_files_and_loggers(run):
    task, path = run
    names = ("summary", "steps", "magnitude", "widths", "numbers")
    tables = [f"{name}.{kind}" for name in names for kind in ("csv", "json")]
    assert {file.name for file in (path / "results").iterdir()} == {*tables, "pruning.png"}
    assert imread(path / "results" / "pruning.png").std() > 0.01
    summary = read_rows(path / "results" / "summary")
    steps = read_rows(path / "results" / "steps")
    for row, pruning in zip(summary, task.prunings.values(), strict=True):
        own = [step for step in steps if (step["member"], step["epsilon"]) == (row["member"], row["epsilon"])]
        assert [step["loss"] for step in own] == [step.loss for step in pruning.history]
        assert own[-1]["units"] == row["units"] == sum(pruning.widths.values())
        assert row["loss"] <= row["threshold"]
        assert row["steps"] == 6 * pruning.walks
        assert row["magnitude_loss"] is not None
    about = json.loads((path / "results" / "summary.json").read_text())
    assert {"units", "versions", "settings", "members", "architecture", "zoo", "data"} <= set(about)
    last = read_csv(path / "metrics.csv")[-1]
    assert float(last["details/pruning/units/member-0-epsilon-0.02"]) == summary[0]["units"]


def test_differences_from_the_twins_are_given_with_their_standard_error():
    rows = [{"epsilon": 0.1, "test_error": 0.03 + n / 100, "magnitude_test_error": 0.03} for n in range(3)]
    other = {"epsilon": 0.2, "test_error": 0.1, "magnitude_test_error": None}
    (sentence,) = against_twins([*rows, other])
    # Differences of 0, 1 and 2 points: standard deviation 1, divided by the root of 3.
    assert sentence == (
        "epsilon 0.1: test error minus that of the twin +1.00 ± 0.58 points "
        "(mean and its standard error over 3 members)"
    )


def test_trainer_test_evaluates_what_is_left(run):
    task, _ = run
    data = digits()
    (found,) = quiet_trainer().test(task, data, verbose=False)
    expected = [mean_loss(task.pruned(n), data.test_dataloader(), F.cross_entropy) for n in task.numbers]
    assert found["test/loss"] == pytest.approx(sum(loss for loss, _ in expected) / len(expected), rel=1e-4)


def test_groups_of_a_network_can_be_chosen(tmp_path):
    zoo = zoo_of(MAKERS["perceptron"], tmp_path / "zoo", members=1)
    task = RashomonPruning(str(zoo), groups=["linear2"], steps=2, fraction=0.3, tries=1, epsilon=0.2, magnitude=False)
    fit(task, digits(), max_epochs=200, limit_val_batches=0)
    assert task.prunings[0].widths.keys() == {"linear2"}
    assert task.pruned(0).linear1.out_features == 12
    assert task.numbers == [0]
    assert not task.twins


def test_what_has_no_removable_units_is_refused_before_the_fit(tmp_path):
    data = digits()
    resnet = write_zoo(tmp_path / "a", [CIFARResNet(width=2, in_channels=1, image_size=8)], data)
    task = RashomonPruning(str(resnet), groups=["blocks.3.conv2"])
    assert_refused(fit, task, data, says="The units of blocks.3.conv2 cannot be removed one by one: without one the")
    zoo = zoo_of(MAKERS["perceptron"], tmp_path / "b", members=1)
    with pytest.raises(TypeError, match="Theirs has no curvature_dataloader"):
        fit(RashomonPruning(str(zoo)), Theirs())
    assert_refused(lambda: fit(RashomonPruning(str(zoo), members=[7]), data), says="No member 7")


@pytest.mark.parametrize(
    "refusal",
    [
        *(refused(RashomonPruning, "zoo", **bad) for bad in ({"epsilon": 0.0}, {"steps": 0}, {"tries": 0})),
        *(refused(RashomonPruning, "zoo", **bad) for bad in ({"fraction": 1.0}, {"penalty": -1.0}, {"cooldown": 1.1})),
        *(refused(RashomonPruning, "zoo", epsilon=bad) for bad in ([], [0.1, 0.1])),
        *(refused(RashomonPruning, "zoo", members=bad) for bad in ([], [1, 1])),
    ],
)
def test_settings_out_of_range_are_refused(refusal):
    refusal()
