"""The report of a stitching fit: what it evaluates, when, and what it leaves behind."""

import csv
import json
import math
import shutil
from statistics import mean, stdev

import pytest
import torch
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from lightning_sym.callbacks import BatchNormRecalibration, StitchPenalty
from lightning_sym.datamodules import DigitsDataModule
from lightning_sym.networks import MyrtleCNN
from lightning_sym.tasks import MatchingTask, StitchingTask
from lightning_sym.zoo import rebuild_manifest, write_member

pytestmark = [
    pytest.mark.filterwarnings("ignore:The members of the zoo at .* were trained on other data"),
    pytest.mark.filterwarnings("ignore:.*was stopped in epoch"),
]

SITES = [f"activation{layer}" for layer in range(1, 5)]


@pytest.fixture(scope="module")
def cnn_zoo(tmp_path_factory):
    """Three small CNNs with batch norm, untrained but for their running statistics."""
    path = tmp_path_factory.mktemp("cnn") / "zoo"
    data = DigitsDataModule(max_samples=100)
    network = MyrtleCNN(width=2, in_channels=1, image_size=8)
    for number in range(3):
        member = network.fresh(number)
        member.train()
        member(data.normalize(data.split_tensors("train").images))
        state = {name: tensor.detach() for name, tensor in member.state_dict().items()}
        write_member(path, number, state, architecture=network.architecture, data=data.identity())
    rebuild_manifest(path)
    return path


def run(folder, zoo, *callbacks, logger=False, epochs=1, **settings):
    report = StitchPenalty()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        logger=logger,
        callbacks=[*callbacks, report],
    )
    task = StitchingTask(str(zoo), **settings)
    trainer.fit(task, DigitsDataModule(batch_size=20, max_samples=100))
    return trainer, task


def table(folder, name="penalties"):
    with (folder / "results" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_stitch_is_in_the_table_with_both_kinds_of_statistics(cnn_zoo, tmp_path):
    maps = ["full", "rank(1)", "group", "identity", "assignment"]
    run(tmp_path, cnn_zoo, BatchNormRecalibration(), pairs=[[0, 1], [1, 2]], maps=maps)
    rows = table(tmp_path)
    # Above the last site there is no batch norm: one row there, two elsewhere.
    assert len(rows) == 2 * len(maps) * (3 * 2 + 1)
    for row in rows:
        assert row["batch_norm"] == ("none" if row["site"] == "activation4" else row["batch_norm"])
        assert 0 <= float(row["accuracy"]) <= 1
        assert row["trained"] == str(row["family"] not in ("identity", "assignment"))
    summary = {(row["place"], row["family"], row["batch_norm"]): row for row in table(tmp_path, "summary")}
    for (place, family, kind), row in summary.items():
        each = [r for r in rows if (r["place"], r["family"], r["batch_norm"]) == (place, family, kind)]
        assert float(row["penalty"]) == pytest.approx(sum(float(r["penalty"]) for r in each) / 2)
        assert row["pairs"] == "2"
    about = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert about["recalibration"] == {"images": None, "batch_size": None, "exact": False}
    assert set(about["members"]["lower"]) == {"0", "1"}
    assert about["data"]["fingerprint"]
    assert (tmp_path / "results" / "penalties.png").stat().st_size > 10_000


def test_the_penalty_is_the_mean_accuracy_of_both_less_that_of_the_stitched(matching_zoo, tmp_path):
    # Member 1 is member 0 in another order and scale: what is assigned from features loses nothing.
    _, task = run(tmp_path, matching_zoo, pairs=[[0, 1]], maps=["assignment", "identity"])
    rows = {(row["site"], row["family"]): row for row in table(tmp_path)}
    data = DigitsDataModule(max_samples=100)
    images, labels = data.split_tensors("test")
    with torch.no_grad():
        accuracies = [
            float((network(data.normalize(images)).argmax(1) == labels).double().mean())
            for network in (task.members["0"], task.members["1"])
        ]
    for (_, family), row in rows.items():
        expected = sum(accuracies) / 2 - float(row["accuracy"])
        assert float(row["penalty"]) == pytest.approx(expected, abs=1e-12)
        assert (float(row["penalty"]) == 0) == (family == "assignment")
        assert row["batch_norm"] == "none"
    group = rows["activation1", "assignment"]
    assert float(group["sparsity"]) == pytest.approx(1 - 1 / 12)


def test_members_of_two_zoos_have_a_spread_and_no_interval(matching_zoo, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(matching_zoo, other)
    pairs = [[0, 1], [1, 2], [2, 0], [0, 0]]
    for chosen in (pairs, pairs[:3]):  # equal numbers are different models, so are different ones
        folder = tmp_path / str(len(chosen))
        run(folder, matching_zoo, target_zoo=str(other), pairs=chosen, maps=["identity"])
        penalties = {}
        for row in table(folder):
            penalties.setdefault(row["place"], []).append(float(row["penalty"]))
        for row in table(folder, "summary"):
            assert float(row["penalty_std"]) == pytest.approx(stdev(penalties[row["place"]]), abs=1e-12)
            assert row["penalty_low"] == row["penalty_high"] == ""
            assert row["note"] == "no interval: a zoo stitched to another one"


def test_the_headline_is_the_mean_over_trained_maps(cnn_zoo, tmp_path):
    class Headline(TensorBoardLogger):
        def log_metrics(self, metrics, step=None):
            found.extend(value for name, value in metrics.items() if name == "hp_metric")

    found = []
    settings = {"pairs": [[0, 1]], "maps": ["full", "group", "assignment", "identity"]}
    run(tmp_path, cnn_zoo, BatchNormRecalibration(), logger=Headline(tmp_path, "", ""), **settings)
    rows = [row for row in table(tmp_path, "summary") if row["batch_norm"] != "as is" and row["trained"] == "True"]
    assert len(rows) == 2 * len(SITES)
    assert found[-1] == pytest.approx(mean(float(row["penalty"]) for row in rows))


def test_weights_are_left_as_training_left_them(cnn_zoo, tmp_path):
    class Compare(StitchPenalty):
        def on_train_end(self, trainer, pl_module):
            before = {name: value.clone() for name, value in pl_module.state_dict().items()}
            statistics = [value.clone() for branch in pl_module.branches for value in branch.buffers()]
            super().on_train_end(trainer, pl_module)
            after = [value for branch in pl_module.branches for value in branch.buffers()]
            assert all(torch.equal(one, two) for one, two in zip(statistics, after, strict=True))
            assert all(torch.equal(value, before[name]) for name, value in pl_module.state_dict().items())

    compare = Compare(str(tmp_path / "other"))
    run(tmp_path, cnn_zoo, BatchNormRecalibration(), compare, pairs=[[0, 1]], maps=["group"], epochs=2)
    assert (tmp_path / "other" / "penalties.csv").is_file()


def test_any_to_any_sites_give_heat_maps_and_lasso_a_picture_of_sparsity(cnn_zoo, tmp_path):
    settings = {"pairs": [[0, 1]], "sites": "any", "resize": True, "maps": ["full", "lasso(0.1)"]}
    _, task = run(tmp_path, cnn_zoo, logger=CSVLogger(tmp_path, "logs", ""), **settings)
    assert task.left_out  # an upper site with more positions than the lower
    results = tmp_path / "logs" / "results"
    names = {path.name for path in results.glob("*.png")}
    assert names == {"penalties_full.png", "penalties_lasso_0_1.png", "sparsity.png"}
    logged = (tmp_path / "logs" / "metrics.csv").read_text()
    assert "test_penalty/activation1-activation2/full" in logged


def test_a_stitch_that_diverged_is_named_and_has_no_penalty(cnn_zoo, tmp_path, capsys):
    class Diverging(StitchingTask):
        def on_train_batch_start(self, batch, batch_idx):
            with torch.no_grad():
                for parameter in self.parameters_of(0):
                    parameter.fill_(math.nan)

    report = StitchPenalty()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=tmp_path, logger=False,
        callbacks=[BatchNormRecalibration(), report],
    )  # fmt: skip
    task = Diverging(str(cnn_zoo), pairs=[[0, 1]], sites=["activation1"], maps=["group", "full"])
    trainer.fit(task, DigitsDataModule(batch_size=20, max_samples=100))
    rows = {(row["family"], row["batch_norm"]): row for row in table(tmp_path)}
    assert rows["group", "recalibrated"]["penalty"] == ""
    assert rows["group", "recalibrated"]["stopped"] == "its training loss is not finite"
    assert math.isfinite(float(rows["full", "recalibrated"]["penalty"]))
    assert "pair-0-1/activation1/group was stopped" in " ".join(capsys.readouterr().out.split())


def test_another_task_is_refused(matching_zoo, tmp_path):
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[StitchPenalty()],
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"StitchPenalty works with .*, got MatchingTask"):
        trainer.fit(MatchingTask(str(matching_zoo)), DigitsDataModule(max_samples=100))
