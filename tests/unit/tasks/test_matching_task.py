"""MatchingTask: what was planted is found, by every method, and what cannot be matched is refused."""

import functools
import re
import shutil
import warnings

import fits
import pytest
import torch
from helpers import assert_refused, assert_same, read_rows, write_zoo
from pytorch_lightning import Trainer

from lightning_sym.callbacks import MatchingReport
from lightning_sym.connectivity import barrier
from lightning_sym.datamodules import Resized
from lightning_sym.networks import MyrtleCNN, VisionTransformer
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.tasks import MatchingTask, StitchingTask
from lightning_sym.zoo import ModelZoo

digits = functools.partial(fits.digits, batch_size=100, max_samples=300)


def fit(task, data=None, **changes) -> Trainer:
    return fits.fit(task, data or digits(), **{"max_epochs": 2, **changes})


@pytest.fixture(scope="module")
def fitted(matching_zoo):
    task = MatchingTask(str(matching_zoo))
    trainer = fit(task)
    return task, dict(trainer.callback_metrics)


def test_all_methods_find_what_was_planted(fitted):
    task, _ = fitted
    assert task.pairs == [(0, 1), (0, 2), (1, 2)]
    for method in ("weights", "activations", "straight_through"):
        matched = task.matched((0, 1), method)
        torch.testing.assert_close(matched.state_dict(), task.member(0).state_dict(), atol=1e-3, rtol=1e-3)  # float32


def test_matching_changes_no_function(fitted):
    task, _ = fitted
    data = digits()
    images = data.normalize(data.split_tensors("test").images)
    for pair in task.pairs:
        before = task.member(pair[1])(images)
        for method in task.methods:
            torch.testing.assert_close(task.matched(pair, method)(images), before, atol=1e-3, rtol=1e-3)


def test_matching_lowers_the_barrier(fitted):
    task, _ = fitted
    batches = list(digits().test_dataloader())
    found = {
        method: barrier(task.member(0), task.matched((0, 2), method), batches, points=5).loss_barrier
        for method in ("unmatched", "weights", "activations", "straight_through")
    }
    assert max(found["weights"], found["activations"], found["straight_through"]) < 0.6 * found["unmatched"], found


def test_without_straight_through_one_epoch_is_enough(matching_zoo):
    task = MatchingTask(str(matching_zoo), pairs=[[2, 0]], methods=["activations"])
    trainer = fit(task, max_epochs=5)
    assert trainer.current_epoch == 1
    assert list(task.elements) == [(2, 0)]
    assert list(task.elements[2, 0]) == ["activations"]


def test_without_validation_the_training_loss_decides(matching_zoo):
    task = MatchingTask(str(matching_zoo), pairs=[[0, 2]], methods=["straight_through"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning says that there is no validation
        trainer = fit(task, digits(val_fraction=0.0))
    best = task.kept[0]["metrics"]
    last = trainer.callback_metrics["details/pair-0-2/straight_through/train_midpoint_loss"]
    assert best["loss"] <= float(last) + 1e-6


def test_batch_norms_use_the_batch_at_midpoints_and_keep_their_statistics(tmp_path):
    data = digits()
    write_zoo(tmp_path, [MyrtleCNN(2, in_channels=1, image_size=8).fresh(number) for number in range(2)], data)
    task = MatchingTask(str(tmp_path))
    fit(task, data, max_epochs=1)
    assert set(task.elements[0, 1]) == {"weights", "activations", "straight_through"}
    for number in range(2):
        assert_same(ModelZoo.open(tmp_path).state(number), task.member(number).state_dict())


def test_testing_reports_all_methods(fitted, matching_zoo, tmp_path):
    task = MatchingTask(str(matching_zoo), pairs=[[0, 1]])
    trainer = fit(task, default_root_dir=tmp_path)
    (found,) = trainer.test(task, digits(), verbose=False)
    assert found["details/pair-0-1/weights/test_midpoint_loss"] < found["details/pair-0-1/unmatched/test_midpoint_loss"]


# ---- bad input


@pytest.mark.parametrize("task", [MatchingTask, StitchingTask])
def test_one_member_cannot_be_matched_or_stitched(matching_zoo, tmp_path, task):
    shutil.copy(matching_zoo / "member-0002.safetensors", tmp_path)
    says = ("ing needs two members or more, ", " only member 2; train further ones into it (--model.seed 3")
    assert_refused(lambda: fit(task(str(tmp_path))), says=says)


def test_other_data_are_refused_or_said(matching_zoo):
    with pytest.raises(ValueError, match=r"trained with input_shape \[1, 8, 8\], and the data have \[1, 4, 4\]"):
        fit(MatchingTask(str(matching_zoo)), digits(transforms=[Resized(4)]))
    with pytest.warns(UserWarning, match="were trained on other data .*--data.data_seed is 1, and was 0"):
        fit(MatchingTask(str(matching_zoo), methods=["weights"]), digits(data_seed=1))


def test_other_datamodules_will_do(matching_zoo):
    task = MatchingTask(str(matching_zoo), methods=["weights", "activations"])
    fit(task, fits.Theirs())
    assert set(task.elements[0, 1]) == {"weights", "activations"}


# ---- transformers


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    """A zoo of three small vision transformers; member 1 is member 0 moved by an element of every kind."""
    data, folder = digits(), tmp_path_factory.mktemp("transformers")
    options = {"patch_size": 4, "width": 8, "depth": 1, "heads": 2, "positions": "rotary", "norm": "rms"}
    first, third = (VisionTransformer(1, 8, **options).fresh(seed).eval() for seed in (0, 2))
    symmetry = trace_symmetry(first, torch.randn(2, 1, 8, 8))
    moved = symmetry.act(symmetry.sample(torch.Generator().manual_seed(0), scale=0.2), first)
    return write_zoo(folder, [first, moved, third], data)


@pytest.mark.long
def test_descent_is_no_worse_than_all_others_and_changes_the_function_by_soft_maps_only(transformers, tmp_path):
    exact = ["permutations", "blocks", "matrices", "weights", "activations", "activations_weights"]
    methods = [*exact, "orbit_descent", "soft_maps"]
    task = MatchingTask(str(transformers), pairs=[[0, 1], [0, 2]], methods=methods)
    report = MatchingReport(points=3)
    trainer = fits.fit(task, digits(), report, folder=tmp_path, max_epochs=3)
    metrics = trainer.callback_metrics
    data = digits()
    images = data.normalize(data.split_tensors("test").images)
    found = {(row["method"], row["second"]): row for row in read_rows(tmp_path / "results" / "barriers")}
    assert len(task.kept) == 4
    for number, (pair, trained) in enumerate(task.trainings):
        before = task.member(pair[1])(images)
        best = task.kept[number]["metrics"]["loss"]
        for method in exact:
            assert best <= metrics[f"details/pair-{pair[0]}-{pair[1]}/{method}/midpoint_loss"] + 1e-6
        for method in (*exact, "orbit_descent"):
            torch.testing.assert_close(task.matched(pair, method)(images), before, atol=1e-3, rtol=1e-3)
            assert found[method, pair[1]]["output_change"] < 1e-4
        change = (task.matched(pair, trained)(images) - before).norm() / before.norm()
        assert found[trained, pair[1]]["output_change"] == pytest.approx(float(change.detach()), abs=1e-5)
        if pair == (0, 2):
            assert (change > 1e-2) == (trained == "soft_maps")
            assert best < metrics["details/pair-0-2/weights/midpoint_loss"]
    said = " ".join(report.results.notes)
    assert re.search(r"soft-maps changes the function of B by \d+\.\d%: test loss .* accuracy", said)
    assert "orbit" not in said
    merged = ModelZoo.open(tmp_path / "results" / "merged")
    for number in merged.numbers:
        record = merged.member(number).training["merged"]
        assert (record["output_change"] > 1e-3) == (record["method"] == "soft_maps")
    matched = task.matched((0, 1), "weights").state_dict()
    torch.testing.assert_close(matched, task.member(0).state_dict(), atol=1e-3, rtol=1e-3)


def test_soft_maps_of_batch_norms_are_refused(tmp_path):
    data = digits()
    write_zoo(tmp_path, [MyrtleCNN(2, in_channels=1, image_size=8).fresh(number) for number in range(2)], data)
    says = ("no matrix acts on their running variances (norm1.running_var)", "without batch norms")
    assert_refused(lambda: fit(MatchingTask(str(tmp_path), methods=["soft_maps"]), data), says=says)


def test_optimizers_that_differ_are_refused_together(matching_zoo):
    with pytest.raises(ValueError, match="straight_through or orbit_descent and soft_maps, not both"):
        MatchingTask(str(matching_zoo), methods=["straight_through", "orbit_descent"])
