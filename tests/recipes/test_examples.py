"""The examples run, skip what is done, and say what failed."""

import json
import sys

import pytest
from helpers import example, read_csv

from lightning_sym.zoo import ModelZoo

SHORT = ("--trainer.max_epochs=1", "--model.lr_scheduler.T_max=1", "--data.max_samples=64", "--trainer.logger=false")


table = example("table1_in_miniature")


def test_a_run_is_a_recipe_that_is_made_once(tmp_path, capsys):
    row = table.run("digit and quadrant", table.LEARNED, 3, tmp_path, SHORT)
    assert "seed 3" in capsys.readouterr().out
    assert (row["seed"], len(row["types"]), len(row["conv_shares"])) == (3, 6, 6)
    found = json.loads((tmp_path / "results" / "layers.json").read_text())
    assert row["negative_log_marginal_likelihood"] == -found["evidence"]["log_marginal_likelihood"]
    assert table.run("digit and quadrant", table.LEARNED, 3, tmp_path, ("--no_such_option",)) == row
    assert capsys.readouterr().out == ""


def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"MAP FC on digit, seed 0, in .* failed: (.|\n)*no_such_recipe"):
        table.run("digit", "MAP FC", 0, tmp_path, ("--config=no_such_recipe",))  # is found out without torch


def test_table_and_picture(tmp_path, monkeypatch, capsys):
    def made(task, model, seed, folder, options):
        shares = [0.9, 0.1 * seed] if model == table.LEARNED else []
        numbers = {"test_accuracy": 0.5 + seed / 10, "negative_log_marginal_likelihood": 1.0 + seed}
        return {"task": task, "model": model, "seed": seed, **numbers, "conv_shares": shares}

    monkeypatch.setattr(table, "run", made)
    monkeypatch.setattr(sys, "argv", ["table1", "--runs", str(tmp_path), "--seeds", "2", "--jobs", "1"])
    table.main()
    assert len(read_csv(tmp_path / "table1.csv")) == 2 * 5 * 2
    means = json.loads((tmp_path / "table1.json").read_text())["means"]
    last = next(row for row in means if (row["task"], row["model"]) == ("digit", table.LEARNED))
    assert last["test_accuracy_percent"] == pytest.approx(55)
    assert last["negative_evidence_per_datum"] == pytest.approx(1.5)
    assert last["conv_shares"] == pytest.approx([0.9, 0.05])
    assert (tmp_path / "table1.png").stat().st_size > 10_000
    assert {path.name for path in tmp_path.iterdir()} == {"table1.csv", "table1.json", "table1.png"}


def test_a_zoo_of_regressors_learns_and_is_written(tmp_path):
    module = example("pixel_regression")
    task, data = module.train(tmp_path, members=2, epochs=6)
    first, last = task.history["val/loss"][0], task.history["val/loss"][-1]
    assert all(b < 0.8 * a for a, b in zip(first, last, strict=True))
    assert not any("accuracy" in name for name in task.history)
    zoo = ModelZoo.open(tmp_path / "zoo")
    images, _ = data.split_tensors("test")
    left, right = task.evaluation_batch((data.normalize(images), None))
    for number in (0, 1):
        error = float((zoo.load(number)(left) - right).detach().square().mean())
        assert zoo.member(number).metrics["test"] == {"loss": pytest.approx(error, rel=1e-5)}
    assert len(module.picture(task, data, count=3).axes) == 9
