"""DissectionTask and DissectionReport: controls that must change nothing, and files that hold what was found."""

import math
from collections import Counter

import pytest
import torch
from fits import digits, fit
from helpers import assert_refused, read_csv, read_rows, refused, write_zoo
from matplotlib.image import imread
from scipy.stats import ttest_1samp
from torch.nn.functional import interpolate

from lightning_sym._random import generator
from lightning_sym.callbacks import DissectionReport
from lightning_sym.datamodules import ConceptBatch, ConceptsDataModule
from lightning_sym.dissection import Geodesic, dissect, random_rotation
from lightning_sym.networks import ResidualCNN
from lightning_sym.reports.dissection import mean_interval
from lightning_sym.similarity import features_of
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.tasks import DissectionTask
from lightning_sym.tasks.dissection import group_matrix

pytestmark = pytest.mark.long

SETTINGS = {"top": 0.05, "alphas": [0.0, 0.3, 1.0]}


def concepts():
    return ConceptsDataModule(max_samples=40, eval_batch_size=16)


def network(seed, activation="relu", residual_activation=None):
    return ResidualCNN(
        (4, 6), (1, 1), residual_activation=residual_activation, num_classes=40, activation=activation
    ).fresh(seed)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return str(write_zoo(tmp_path_factory.mktemp("zoo"), [network(0), network(1), network(2)], concepts()))


@pytest.fixture(scope="module")
def run(zoo, tmp_path_factory):
    path = tmp_path_factory.mktemp("dissection")
    task = DissectionTask({"small": zoo}, **SETTINGS)
    fit(task, concepts(), report := DissectionReport(), folder=path, max_epochs=0)
    return path, task, report


def of(task, **wanted):
    return [one for one in task.results if all(getattr(one, name) == value for name, value in wanted.items())]


def dissected(net, bases, batches):
    return dissect(
        net, "blocks.1.activation2", bases, batches, images=40, example=batches[0].images[:1], concepts=25, top=0.05
    )


@pytest.mark.parametrize(
    ("activation", "residual"), [("relu", None), ("relu", "identity"), ("gelu", None), ("tanh", None)]
)
def test_elements_of_the_symmetry_move_units_and_change_no_overlap(activation, residual):
    net = network(3, activation, residual).double().eval()
    batches = [batch._replace(images=batch.images.double()) for batch in concepts().concept_dataloader()]
    symmetry, identity = trace_symmetry(net, batches[0].images[:2]), torch.eye(6, dtype=torch.float64)
    element = symmetry.sample(generator("test"), signs=False, mixing=False, shifts=False)
    matrix = group_matrix(symmetry, "blocks.1.activation2", generator("test"))
    moved = symmetry.act(element, net)
    own, acted = dissected(net, torch.stack([identity, matrix]), batches)
    (through_weights,) = dissected(moved, identity[None], batches)
    order = matrix.argmax(1)
    scales = matrix.max(1).values
    assert (matrix > 0).sum() == 6
    assert order.tolist() != list(range(6))
    for other in (acted, through_weights):
        torch.testing.assert_close(other.thresholds, own.thresholds[order] * scales, rtol=1e-10, atol=1e-10)
        assert torch.equal(other.overlaps, own.overlaps[order])
        assert other.detectors().units == own.detectors().units
        assert other.detectors().distinct == own.detectors().distinct
        torch.testing.assert_close(other.summary.kurtosis, own.summary.kurtosis[order], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other.summary.participation, own.summary.participation[order], rtol=1e-9, atol=0)


def test_permutations_change_nothing_at_the_end_of_their_path(run):
    _, task, _ = run
    for number in range(3):
        (start,) = of(task, member=number, network="trained", basis="rotation", alpha=0.0)
        halfway, end = of(task, member=number, basis="permutation")
        (group,) = of(task, member=number, basis="group")
        assert (halfway.alpha, end.alpha) == (0.5, 1.0)
        sorted_overlaps = start.found.overlaps.sort(0).values
        assert torch.equal(end.found.overlaps.sort(0).values, sorted_overlaps)
        assert not torch.equal(halfway.found.overlaps.sort(0).values, sorted_overlaps)
        torch.testing.assert_close(group.found.overlaps.sort(0).values, sorted_overlaps, rtol=0, atol=1e-3)  # float32


def test_path_begins_at_the_networks_own_basis_and_members_have_rotations_of_their_own(run):
    _, task, _ = run
    assert [(one.basis, one.alpha) for one in of(task, member=1, network="trained")] == [
        *(("rotation", alpha) for alpha in (0.0, 0.3, 1.0)),
        ("permutation", 0.5),
        ("permutation", 1.0),
        ("group", 1.0),
    ]
    assert {one.basis for one in of(task, network="untrained")} == {"rotation"}
    batches = list(concepts().concept_dataloader())
    (plain,) = dissected(task.zoos["small"].load(1), torch.eye(6)[None], batches)
    (first,) = of(task, member=1, network="trained", basis="rotation", alpha=0.0)
    assert torch.equal(plain.overlaps, first.found.overlaps)
    ends = {number: task._bases(number, "untrained", 6, None, "")[-1][2] for number in range(2)}
    assert not torch.equal(ends[0], ends[1])
    # The members of this zoo were never trained: what is found of their first weights is the same.
    (fresh,) = of(task, member=1, network="untrained", alpha=0.0)
    assert torch.equal(fresh.found.overlaps, first.found.overlaps)


def test_files_hold_what_was_found(run):
    path, task, report = run
    folder = path / "results"
    tables = ("changes", "summary", "bases", "units", "concepts", "categories", "numbers")
    names = {f"{name}.{kind}" for name in tables for kind in ("csv", "json")}
    pictures = {"dissection.png", "categories.png", "concepts-small.png", "best-units-small.png"}
    assert {file.name for file in folder.iterdir()} == {*names, *pictures}
    for picture in pictures:
        assert imread(folder / picture).std() > 0.01
    bases, changes, units = (read_rows(folder / name) for name in ("bases.json", "changes.json", "units.json"))
    assert len(bases) == len(read_csv(folder / "bases.csv")) == 3 * (6 + 3)
    for row, one in zip(bases, task.results, strict=True):
        found = one.found.detectors(0.04)
        assert (row["interpretable"], row["distinct"], row["units"]) == (found.units, found.distinct, 6)
        assert row["overlap"] == pytest.approx(found.overlap.mean().item())
    trained = [row for row in bases if row["network"] == "trained" and row["basis"] == "rotation"]
    by_member = {(row["member"], row["alpha"]): row for row in trained}
    differences = [by_member[number, 1.0]["overlap"] - by_member[number, 0.0]["overlap"] for number in range(3)]
    wanted = "trained", "rotation", "overlap"
    (change,) = [row for row in changes if (row["network"], row["basis"], row["quantity"]) == wanted]
    expected = ttest_1samp(differences, 0).confidence_interval(0.95)
    assert change["change"] == pytest.approx(sum(differences) / 3)
    assert (change["low"], change["high"]) == pytest.approx(tuple(expected))
    assert report.results.numbers["dissection/small/change_of_overlap"] == change["change"]
    for row in changes:
        if row["basis"] == "group" and row["quantity"] in ("interpretable", "distinct"):
            assert row["largest"] == 0
    assert len(units) == 3 * 6
    assert {row["concept"] for row in units} <= {concept.name for concept in ConceptsDataModule.concepts}


def test_units_of_concepts_and_categories_sum_to_the_interpretable_ones(run):
    path, task, _ = run
    concepts, categories, summary = (
        read_rows(path / f"results/{name}.json") for name in ("concepts", "categories", "summary")
    )
    category_of = dict(ConceptsDataModule.concepts)
    for alpha in (0.0, 0.3, 1.0):
        counts = Counter()
        for one in of(task, network="trained", basis="rotation", alpha=alpha):
            found = one.found.detectors(0.04)
            counts.update(ConceptsDataModule.concepts[concept].name for concept in found.concept[found.detects])
        rows = [row for row in concepts if row["alpha"] == alpha]
        assert {row["concept"]: row["count"] for row in rows} == pytest.approx(
            {row["concept"]: counts[row["concept"]] / 3 for row in rows}
        )
        assert counts.keys() <= {row["concept"] for row in rows}
        assert all(row["category"] == category_of[row["concept"]] and row["members"] == 3 for row in rows)
        (total,) = [row["interpretable"] for row in summary
                    if (row["network"], row["basis"], row["alpha"]) == ("trained", "rotation", alpha)]  # fmt: skip
        assert sum(row["count"] for row in categories if row["alpha"] == alpha) == pytest.approx(total)
        assert total > 0


def test_best_units_have_the_images_with_their_largest_responses(run):
    _, task, _ = run
    found = task.best_units(concepts(), torch.device("cpu"), units=2, images=3)
    assert [one.alpha for one in found] == [0.0, 0.0, 0.3, 0.3, 1.0, 1.0]
    batches = list(concepts().concept_dataloader())
    data = ConceptsDataModule(max_samples=40)
    pixels = data.split_tensors("test").images / 255
    features = features_of(task.zoos["small"].load(0), ["blocks.1.activation2"], torch.cat([b.images for b in batches]))
    for one in found:
        (rotated,) = of(task, member=0, network="trained", basis="rotation", alpha=one.alpha)
        overlaps = rotated.found.overlaps.max(1).values
        assert one.overlap == overlaps[one.unit] >= overlaps.sort().values[-2]
        assert rotated.found.overlaps[one.unit, one.concept] == one.overlap
        direction = Geodesic(random_rotation(6, generator("dissection", "rotation", 0, 0))).at(one.alpha)[one.unit]
        maps = torch.einsum("c,nchw->nhw", direction.float(), features["blocks.1.activation2"])
        order = maps.flatten(1).amax(1).sort(descending=True, stable=True)
        torch.testing.assert_close(one.strongest.responses, order.values[:3])
        torch.testing.assert_close(one.strongest.images, pixels[order.indices[:3]], rtol=0, atol=1e-6)
        large = interpolate(maps[order.indices[:3], None], size=(32, 32), mode="bilinear")[:, 0]
        assert torch.equal(one.strongest.active, large > rotated.found.thresholds[one.unit].float())


def test_every_zoo_can_have_a_site_which_need_not_be_an_activation(zoo, tmp_path):
    sites = {"sums": "blocks.1.norm2", "blocks": "blocks.0"}
    task = DissectionTask({"sums": zoo, "blocks": zoo, "last": zoo}, site=sites, members=1, **SETTINGS)
    fit(task, concepts(), DissectionReport(best_units=0), folder=tmp_path, max_epochs=0)
    assert task.sites == {**sites, "last": "blocks.1.activation2"}
    assert [len(one.found.thresholds) for one in task.results if one.basis == "group"] == [6, 4, 6]
    names = {file.name for file in (tmp_path / "results").iterdir() if file.suffix == ".png"}
    assert names == {"dissection.png", "categories.png", *(f"concepts-{name}.png" for name in task.sites)}


def test_a_run_that_was_interrupted_and_resumed_is_the_uninterrupted_one(zoo, run, tmp_path, monkeypatch):
    """Nothing is trained and nothing half-done is kept: the run that is resumed, from its start, dissects anew."""
    trainer = fit(DissectionTask({"small": zoo}, **SETTINGS), concepts(), folder=tmp_path, max_epochs=0)
    trainer.save_checkpoint(last := tmp_path / "last.ckpt")

    def interrupt(done: int, jobs: int) -> None:
        if done == 2:
            raise RuntimeError("interrupted")

    dissect_all = DissectionTask.dissect_all
    again = DissectionTask({"small": zoo}, **SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(
            DissectionTask, "dissect_all", lambda self, data, device, _: dissect_all(self, data, device, interrupt)
        )
        with pytest.raises(RuntimeError, match="interrupted"):
            fit(again, concepts(), DissectionReport(), folder=tmp_path, max_epochs=0)
    assert len(again.results) == 2 * (6 + 3) // 2
    assert not [file for file in (tmp_path / "results").rglob("*") if file.is_file()]
    resumed = DissectionTask({"small": zoo}, **SETTINGS)
    fit(resumed, concepts(), DissectionReport(), folder=tmp_path, max_epochs=0, ckpt_path=last)
    for table in ("changes", "summary", "bases", "units", "concepts", "categories"):
        name = f"results/{table}.csv"
        assert (tmp_path / name).read_bytes() == (run[0] / name).read_bytes()


def test_interval_of_few_members():
    assert mean_interval([]) == pytest.approx((math.nan,) * 3, nan_ok=True)
    assert mean_interval([2.0, math.nan]) == pytest.approx((2.0, math.nan, math.nan), nan_ok=True)
    low, high = ttest_1samp([1.0, 2.0, 4.0], 0).confidence_interval(0.95)
    assert mean_interval([1.0, 2.0, 4.0]) == pytest.approx((7 / 3, low, high))


def test_without_controls_there_are_rotations_only(zoo, tmp_path):
    task = DissectionTask({"small": zoo}, members=1, controls=False, site="blocks.0.activation1", **SETTINGS)
    fit(task, concepts(), DissectionReport(), folder=tmp_path, max_epochs=0)
    assert [(one.network, one.basis, one.alpha) for one in task.results] == [
        ("trained", "rotation", alpha) for alpha in (0.0, 0.3, 1.0)
    ]
    assert len(task.results[0].found.thresholds) == 4


def test_images_without_classes_have_no_selectivity():
    batches = [ConceptBatch(b.images, b.masks, b.annotated, None) for b in concepts().concept_dataloader()]
    (found,) = dissected(network(0), torch.eye(6)[None], batches)
    assert found.summary.selectivity.isnan().all()
    assert found.summary.kurtosis[found.summary.live].isfinite().all()


@pytest.mark.parametrize(
    "refusal",
    [
        refused(DissectionTask, zoos={}),
        refused(DissectionTask, {"a": "b"}, alphas=[0.0, 0.5], says=["alphas", "0 and 1"]),
        *(refused(DissectionTask, {"a": "b"}, alphas=bad, says="different") for bad in ([0.0, 1.0, 1.0], 0.5)),
        refused(DissectionTask, {"a": "b"}, alphas=[0.0, 1.5, 1.0], says=["alphas", "1.5"]),
        *(refused(DissectionTask, {"a": "b"}, **bad) for bad in ({"members": 0}, {"top": 0.0}, {"least": 1.0})),
        refused(DissectionTask, {"a": "b"}, basis_seed=-1),
        refused(DissectionTask, {"a": "b"}, site={"c": "relu"}, says=["zoo 'c'", "a"]),
        refused(DissectionReport, best_units=-1),
    ],
)
def test_settings_out_of_range_are_refused(refusal):
    refusal()


def test_what_does_not_fit_is_one_sentence(zoo, tmp_path):
    def run(task, data):
        fit(task, data, max_epochs=0, folder=tmp_path)

    assert_refused(run, DissectionTask({"a": zoo}), digits(), error=TypeError, says=["concepts", "DigitsDataModule"])
    assert_refused(run, DissectionTask({"a": zoo}, site="activation9"), concepts(), says="activation9")
    second = DissectionTask({"a": zoo, "b": zoo}, site={"b": "classifier"})  # refused before the first zoo is dissected
    assert_refused(run, second, concepts(), says="classifier returns values of shape")
    assert second.results == []
    missing = DissectionTask({"a": str(tmp_path / "none")})
    assert_refused(run, missing, concepts(), error=FileNotFoundError, says="none")
    batches = list(concepts().concept_dataloader())
    settings = {"images": 40, "example": batches[0].images[:1], "concepts": 25}
    assert_refused(lambda: dissect(network(0), "flatten", torch.eye(6)[None], batches, **settings), says="flatten")
