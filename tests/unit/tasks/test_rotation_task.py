"""RotationTask: what is rotated, what is trained, what is drawn, and what is refused."""

import copy
import functools

import fits
import pytest
import torch
from helpers import assert_refused, assert_same, write_zoo
from pytorch_lightning import Trainer

from lightning_sym._tags import is_detail
from lightning_sym.networks import CIFARResNet, MyrtleCNN
from lightning_sym.stitching import FixedMap, IdentityMap
from lightning_sym.tasks import RotationTask
from lightning_sym.tasks.rotation import Rotation
from lightning_sym.zoo import ModelZoo

pytestmark = pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data")
ALL = ["group", "orthogonal", "none", "undo"]


digits = functools.partial(fits.digits, batch_size=50, max_samples=300)


def fit(task, **changes) -> Trainer:
    return fits.fit(task, digits(), **{"max_epochs": 2, **changes})


def zoo_of(path, network):
    return write_zoo(path, [network.fresh(0)], digits())


@pytest.fixture(scope="module")
def fitted(matching_zoo):
    task = RotationTask(str(matching_zoo), members=[0, 2], sites="all", kinds=ALL, repeats=2)
    trainer = fit(task)
    return task, dict(trainer.callback_metrics)


def branch(task, name):
    return task.branches[task.names.index(name)]


# ---- what is there


def test_one_branch_for_each_member_site_kind_and_repeat(fitted):
    task, _ = fitted
    assert len(task.branches) == len(task.rotations) == 2 * 2 * (2 + 2 + 1 + 2)
    assert task.rotations[0] == Rotation(0, "activation1", "group", 0)
    assert task.names[-1] == "member-2/activation2/undo/repeat-1"
    assert [n for n in task.names if "none" in n and "member-0" in n] == [
        "member-0/activation1/none/repeat-0",
        "member-0/activation2/none/repeat-0",
    ]


def test_the_map_stands_in_front_of_the_activation(fitted):
    task, _ = fitted
    images = torch.rand(3, 1, 8, 8)
    network = task.members["0"]
    rotated = branch(task, "member-0/activation1/orthogonal/repeat-1")
    (fixed,) = rotated.stitching_maps
    assert isinstance(fixed, FixedMap)
    torch.testing.assert_close(fixed.matrix() @ fixed.matrix().T, torch.eye(12), atol=1e-5, rtol=0)
    upper = rotated.upper
    expected = images.flatten(1)
    expected = torch.relu(network.linear1(expected) @ fixed.matrix().T)
    expected = upper.classifier(torch.relu(upper.linear2(expected)))
    torch.testing.assert_close(rotated(images), expected)
    (identity,) = branch(task, "member-0/activation1/none/repeat-0").stitching_maps
    assert isinstance(identity, IdentityMap)


def test_draws_depend_on_their_own_names_only(fitted, matching_zoo):
    task, _ = fitted
    settings = {"members": [2], "sites": ["activation2"], "kinds": ["orthogonal", "group"], "repeats": 2}
    alone = RotationTask(str(matching_zoo), **settings)
    fit(alone, max_epochs=1)
    drawn = {}
    for name in alone.names:
        assert torch.equal(branch(alone, name).maps[0].fixed, branch(task, name).maps[0].fixed)
        drawn[name] = branch(alone, name).maps[0].fixed
    for name in ("member-2/activation2/group/repeat-0", "member-2/activation2/orthogonal/repeat-0"):
        assert not torch.equal(drawn[name], drawn[name.replace("repeat-0", "repeat-1")])
    other = RotationTask(str(matching_zoo), members=[2], sites=["activation2"], repeats=1, seed=1)
    fit(other, max_epochs=1)
    assert all(not torch.equal(branch(other, name).maps[0].fixed, drawn[name]) for name in other.names)


def test_the_oracle_undoes_what_the_group_kind_does(fitted):
    task, _ = fitted
    for member in (0, 2):
        for site in ("activation1", "activation2"):
            for repeat in (0, 1):
                group, undo = (branch(task, f"member-{member}/{site}/{k}/repeat-{repeat}") for k in ("group", "undo"))
                assert torch.equal(group.maps[0].fixed, undo.maps[0].fixed)


# ---- what is trained


def test_lower_parts_and_matrices_stay_and_upper_parts_are_trained(matching_zoo):
    task = RotationTask(str(matching_zoo), members=[0], sites="all", kinds=ALL, repeats=1)
    before = ModelZoo.open(matching_zoo).load(0).state_dict()
    fit(task)
    assert_same(task.members["0"].state_dict(), before)
    for rotation, network in zip(task.rotations, task.branches, strict=True):
        parameters = dict(network.upper.named_parameters())
        expected = {"classifier.weight", "classifier.bias"}
        if rotation.site == "activation1":
            expected |= {"linear2.weight", "linear2.bias"}
        assert set(parameters) == expected
        trained = rotation.kind != "undo"
        assert {p.requires_grad for p in parameters.values()} == {trained}
        assert len(task.parameters_of(task.names.index(str(rotation)))) == (len(expected) if trained else 0)
        if trained:
            assert all(not torch.equal(value, before[name]) for name, value in parameters.items())


def test_the_default_is_adam_without_decay_on_biases(matching_zoo):
    task = RotationTask(str(matching_zoo), members=[0], repeats=1)
    trainer = fit(task, max_epochs=1)
    (optimizer,) = trainer.optimizers
    assert type(optimizer) is torch.optim.Adam
    weights, biases = optimizer.param_groups
    assert (weights["lr"], weights["weight_decay"], biases["weight_decay"]) == (1e-3, 1e-4, 0.0)
    assert {p.ndim for p in weights["params"]} == {2}
    assert {p.ndim for p in biases["params"]} == {1}


def test_batch_norms_above_the_cut_are_trained_but_not_the_oracle_s(tmp_path):
    network = MyrtleCNN(2, in_channels=1, image_size=8)
    task = RotationTask(str(zoo_of(tmp_path, network)), sites=["activation2"], kinds=["group", "undo"], repeats=1)
    before = copy.deepcopy(network.fresh(0).state_dict())
    fit(task, max_epochs=1)
    group, undo = task.branches
    assert set(group.batch_norms()) == {"upper.norm3", "upper.norm4"}
    assert not torch.equal(group.upper.norm3.running_mean, before["norm3.running_mean"])
    assert not torch.equal(group.upper.norm3.weight, before["norm3.weight"])
    images = torch.rand(9, 1, 8, 8)
    member = task.members["0"]
    torch.testing.assert_close(undo.eval()(images), member(images), atol=1e-5, rtol=1e-4)


def test_inside_a_block_the_skip_connection_passes(tmp_path):
    network = CIFARResNet(width=2, in_channels=1, image_size=8)
    site = "blocks.1.activation1"
    task = RotationTask(str(zoo_of(tmp_path, network)), sites=[site], kinds=["group", "undo"], repeats=1)
    fit(task, max_epochs=1)
    assert len(task.lowers["0"].crossings(site)) == 2
    group, undo = task.branches
    assert len(group.maps) == len(undo.maps) == 1
    images = torch.rand(9, 1, 8, 8)
    torch.testing.assert_close(undo.eval()(images), task.members["0"](images), atol=1e-5, rtol=1e-4)


# ---- penalties


def test_penalties_are_against_the_own_member(fitted, monkeypatch):
    task, metrics = fitted
    count = len(task.branches)
    accuracies = [0.01 * index for index in range(count)] + [0.9, 0.8]
    found = task.penalties(accuracies)
    assert found[0] == pytest.approx(0.9)
    assert found[-1] == pytest.approx(0.8 - 0.01 * (count - 1))
    expected = {"undo", "group", "none", "orthogonal"}
    assert {name.removeprefix("penalty/") for name in metrics if name.startswith("penalty/")} == expected | {
        f"{site}/{kind}" for site in ("activation1", "activation2") for kind in expected - {"undo"}
    }
    assert float(metrics["details/penalty/activation1/undo"]) == 0.0  # nothing is trained
    assert float(metrics["penalty/undo"]) == 0.0
    by_site = [float(metrics[f"penalty/{site}/orthogonal"]) for site in ("activation1", "activation2")]
    assert float(metrics["penalty/orthogonal"]) == pytest.approx(sum(by_site) / 2, abs=1e-7)
    monkeypatch.setattr(RotationTask, "label", lambda _, index: (f"site {index}", "kind"))
    assert count > 15  # with as many places the means alone stand above the details, so that those of the zoo do, too
    above = [name for name in task.quantities({"accuracy": accuracies}, "val") if not is_detail(name)]
    assert above == ["penalty/kind"]


def test_a_subclass_adds_a_kind(matching_zoo):
    class Halved(RotationTask):
        known_kinds = (*RotationTask.known_kinds, "half")

        def rotate(self, rotation, source, example):
            if rotation.kind != "half":
                return super().rotate(rotation, source, example)
            return (lambda port: FixedMap(port, 0.5 * torch.eye(port.in_channels))), source

    task = Halved(str(matching_zoo), members=[0], kinds=["half", "none"], repeats=1)
    metrics = fit(task, max_epochs=1).callback_metrics
    assert torch.equal(task.branches[0].maps[0].fixed, 0.5 * torch.eye(12))
    assert "penalty/activation1/half" in metrics
    assert_refused(
        RotationTask,
        "zoo",
        kinds=["half"],
        says="kinds must be a list of different ones of group, orth",
    )


# ---- checkpoints
