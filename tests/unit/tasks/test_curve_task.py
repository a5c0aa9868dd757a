"""CurveTask: curves of low loss where the straight line has a high one, ends that stay, and what is refused."""

import functools
import json
import shutil
import warnings

import pytest
import torch
from fits import Theirs, digits, fit, quiet_trainer
from helpers import assert_refused, assert_same, randomize_statistics, refused, write_zoo

from lightning_sym.callbacks import ZooExport
from lightning_sym.connectivity import Curve, CurveSummary, barrier, curve_barriers, curve_geometry
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.landscape import weight_vector
from lightning_sym.networks import MultiLayerPerceptron, MyrtleCNN
from lightning_sym.tasks import CurveName, CurveTask, ZooTask
from lightning_sym.zoo import ModelZoo, read_member

pytestmark = pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data")

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# 1297 training images, and as docs/theory/curves.md, 1.5 has it: centred only, batches of 64, no validation.
all_digits = functools.partial(
    DigitsDataModule, batch_size=64, val_fraction=0.0, train_fraction=0.902, std=[1.0], eval_batch_size=1300
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a task, its line and its curves, after the training of docs/theory/curves.md, 1.5."""
    return after(60, tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return the same after two epochs."""
    return after(2, tmp_path_factory.mktemp("begun"))


def after(epochs, folder):
    network = MultiLayerPerceptron(widths=[32], image_size=8)
    members = ZooTask(network, 2, execution="vmap", optimizer=functools.partial(SGD, weight_decay=1e-4), keep="last")
    export = ZooExport(str(folder / "zoo"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning says that there is no validation
        fit(members, all_digits(), export, folder=folder, max_epochs=epochs)
        task = CurveTask(str(folder / "zoo"), decay=1e-4, optimizer=SGD)
        fit(task, all_digits(), max_epochs=epochs)
    ends = [weight_vector(task.member(number)) for number in (0, 1)]
    return task, {"line": Curve.straight(*ends), **{name.kind: curve for name, curve in task.curves.items()}}


@pytest.mark.long
def test_loss_stays_low_along_a_curve_and_not_along_the_line(trained):
    """The table of docs/theory/curves.md, 1.5."""
    task, curves = trained
    data = all_digits()
    splits = {"train": list(data.curvature_dataloader()), "test": list(data.test_dataloader())}
    along = {kind: curve_barriers(curve, task.member(0), splits) for kind, curve in curves.items()}
    train = {kind: found["train"] for kind, found in along.items()}
    highest = {kind: CurveSummary.of(own.loss, curves[kind].steps(own.t)).highest for kind, own in train.items()}
    assert 0.15 < highest["line"] < 0.4
    assert highest["bezier"] < 0.3 * highest["line"]
    assert highest["chain"] < highest["bezier"]
    assert 0 < train["bezier"].loss_barrier < 0.06
    line, bezier, chain = (curves[kind].length() for kind in ("line", "bezier", "chain"))
    assert 1 < bezier / line < chain / line < 1.2
    assert train["bezier"].accuracy.min() > 0.99 > 0.95 > train["line"].accuracy.min()
    assert along["bezier"]["test"].accuracy.min() > 0.94
    plane = curves["bezier"].plane()
    assert 0.4 < plane.coordinates(plane.points)[2, 0] / curves["line"].length() < 0.6


@pytest.mark.long
def test_the_loss_is_flatter_along_a_curve_than_beside_it(trained):
    """The table of docs/theory/curves.md, 4.4."""
    task, curves = trained
    data = list(all_digits().curvature_dataloader())
    shape = curve_geometry(curves["bezier"], task.member(0), data, symmetry=task.symmetry, max_parameters=0)
    for point in shape.points:
        assert 4 * point.directions["tangent"][0] < point.directions["detour"][0]
        assert abs(point.directions["tangent"][1]) < point.directions["detour"][1] / 5
    start, _, middle, _, end = (point.spectrum.eigenvalues[0] for point in shape.points)
    assert 1.5 * max(start, end) < middle
    assert shape.points[2].directions["tangent"][1] < 0
    assert shape.worst_deviation < 1e-6  # although there are kinks
    assert shape.points[2].gradient_norm > 1e-2  # no critical point
    assert shape.cosine[0, -1] < 0.95
    assert shape.orbit_dimension == 32
    assert all(point.jacobian.nullity >= 32 for point in shape.points)


def test_ends_stay_bitwise_and_only_bends_are_trained(begun):
    task, curves = begun
    zoo = ModelZoo.open(task.zoo)
    for kind in ("bezier", "chain"):
        for end, number in ((0, 0), (-1, 1)):
            assert torch.equal(curves[kind].points[end], weight_vector(zoo.load(number)))
            assert_same(zoo.state(number), task.member(number).state_dict())
    assert [name for name, _ in task.population.named_trainable()] == ["bends"] * 2
    (optimizer,) = task.trainer.strategy.optimizers
    assert len(optimizer.state) == 2
    assert all(
        len(state["momentum_buffer"].flatten()) == len(curves["chain"].points[0]) for state in optimizer.state.values()
    )


def test_what_is_logged(begun):
    task, _ = begun
    logged = task.trainer.callback_metrics
    assert set(task.names) == {CurveName(0, 1, "bezier"), CurveName(0, 1, "chain")}
    assert {"train/loss", "train/accuracy", "train/loss/max"} <= logged.keys()
    assert task.each("val", {"loss": {1: 0.5}}, {}) == {"pair-0-1/chain/val_loss": 0.5}


@pytest.mark.parametrize("matched", ["weights", "activations"])
def test_a_matched_end_is_the_same_function_elsewhere(matching_zoo, matched):
    """Member 1 is member 0 in another order and scale, so that nothing is left of the barrier between them."""
    task = CurveTask(str(matching_zoo), pairs=[[0, 1]], kinds=["chain"], matched=matched)
    data = digits(max_samples=300)
    fit(task, data, limit_train_batches=1)
    images = data.normalize(data.split_tensors("test").images)
    torch.testing.assert_close(task.end((0, 1), matched)(images), task.member(1)(images), atol=1e-3, rtol=1e-3)
    (curve,) = task.curves.values()
    assert torch.equal(curve.points[-1], weight_vector(task.end((0, 1), matched)))
    assert curve.about["matched"] == matched
    batches = list(data.test_dataloader())
    before = barrier(task.member(0), task.member(1), batches, points=3).loss_barrier
    assert barrier(task.member(0), task.end((0, 1), matched), batches, points=3).loss_barrier < 0.01 * before


@pytest.fixture(scope="module")
def normed(tmp_path_factory):
    """Return a zoo of two CNNs with batch norms."""
    networks = [randomize_statistics(MyrtleCNN(2, in_channels=1, image_size=8).fresh(n), n) for n in range(2)]
    return write_zoo(tmp_path_factory.mktemp("normed") / "zoo", networks, digits())


def test_batch_norms_are_measured_at_every_point(normed):
    """The loss that is logged is the mean of those at the points, with the statistics of training images there."""
    task, data = CurveTask(str(normed), kinds=["bezier"], places=3), digits(eval_batch_size=40)
    fit(task, data)
    ((_, curve),) = task.curves.items()
    training = list(data.curvature_dataloader())[:1]
    found = curve_barriers(
        curve, task.member(0), {"val": data.val_dataloader()}, points=5, recalibration_data=training
    )["val"]
    assert task.kept[0]["metrics"]["loss"] == pytest.approx(float(found.loss[1:4].mean()), abs=1e-6)
    outputs = quiet_trainer().predict(task, digits())
    assert outputs[0].shape[:2] == (1, 3)


class Overflow(CurveTask):
    """Gives the bends of the first curve numbers so large that statistics overflow, before its first validation."""

    def on_train_epoch_start(self):
        self.population.members["0000"].bends.data.fill_(1e30)


def test_a_curve_whose_statistics_overflow_stops_and_the_others_go_on(normed):
    task = Overflow(str(normed))
    with pytest.warns(UserWarning, match=r"Curve pair-0-1/bezier was stopped in epoch 0, .* not finite. The others go"):
        fit(task, max_epochs=1, limit_train_batches=0.2)
    assert list(task.kept) == [1]


# ---- bad input


def altered(zoo, folder, change):
    """Return a copy of a zoo of which member 1 has another record or other weights."""
    from lightning_sym.zoo import rebuild_manifest, write_member

    shutil.copytree(zoo, folder)
    (first, weights), (second, others) = (read_member(folder / f"member-000{n}.safetensors") for n in (0, 1))
    data = {**second.data, **change}
    write_member(folder, 1, others if change else weights, architecture=second.architecture, data=data)
    rebuild_manifest(folder)
    assert json.dumps(first.architecture) == json.dumps(second.architecture)
    return str(folder)


def test_pairs_that_no_curve_can_join(matching_zoo, tmp_path):
    copy = altered(matching_zoo, tmp_path / "copy", {})
    assert_refused(fit, CurveTask(copy), says="pair 0-1 of the zoo at")
    assert_refused(fit, CurveTask(copy), says="have the same weights, so that there is nothing between them")
    other = altered(matching_zoo, tmp_path / "other", {"fingerprint": "another"})
    assert_refused(fit, CurveTask(other), says="were trained on different data, so that no loss is theirs")
    assert_refused(fit, CurveTask(str(matching_zoo), pairs=[[0, 7]]), says="No member 7")


def test_networks_that_differ_in_statistics_only_are_one(tmp_path):
    networks = [MyrtleCNN(2, in_channels=1, image_size=8).fresh(0) for _ in range(2)]
    first = next(module for module in networks[1].modules() if isinstance(module, torch.nn.BatchNorm2d))
    first.running_mean.fill_(0.1)
    zoo = write_zoo(tmp_path / "zoo", networks, digits())
    assert_refused(fit, CurveTask(str(zoo)), says="have the same weights, so that there is nothing between them")


def test_data_that_know_no_training_images_are_refused(normed):
    for changes in ({}, {"matched": "activations"}):
        with pytest.raises(ValueError, match="and these have no curvature_dataloader; use a datamodule of"):
            fit(CurveTask(str(normed), **changes), Theirs())


curve_task = functools.partial(CurveTask, "zoo")
curve_task.__name__ = "CurveTask"


@pytest.mark.parametrize(
    "refusal",
    [
        refused(curve_task, pairs=[[0, 0]], says="two different members"),
        refused(curve_task, kinds="chain", says="kinds must be a list"),
        *(refused(curve_task, **bad) for bad in ({"kinds": ["spline"]}, {"kinds": []}, {"bends": 0}, {"places": 0})),
        *(refused(curve_task, **bad) for bad in ({"matched": "functions"}, {"decay": -1.0})),
        refused(curve_task, optimizer=functools.partial(SGD, weight_decay=0.1), says="use decay of CurveTask"),
    ],
)
def test_refused_settings(refusal):
    refusal()
