"""Figures, tables and texts reach every logger that takes them; MLflow and W&B with their local files."""

import importlib.util
import json

import pytest
from fits import digits, fit
from helpers import read_csv
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, WandbLogger
from pytorch_lightning.loggers.logger import Logger

from lightning_sym.callbacks import ZooReport, publish_table, publish_text
from lightning_sym.networks import MultiLayerPerceptron
from lightning_sym.reports import ResultTable
from lightning_sym.tasks import ZooTask

FIGURES = {f"figures/ZooReport/{name}" for name in ("confusion", "validation_curves")}


def report(*loggers, folder):
    """Fit a zoo with a report and send it to loggers."""
    task = ZooTask(MultiLayerPerceptron(widths=(4,), image_size=8), members=2)
    trainer = fit(task, digits(), ZooReport(), folder=folder, logger=list(loggers))
    publish_text(trainer, "a: 1\n  b: 2", "config")
    return trainer, read_csv(next(folder.rglob("members.csv")))


class Notebook(Logger):
    """A logger with the methods that Lightning's logger of W&B has."""

    name = version = "notebook"

    def __init__(self):
        super().__init__()
        self.numbers, self.images, self.tables, self.texts = {}, {}, {}, {}

    def log_hyperparams(self, params):
        pass

    def log_metrics(self, metrics, step=None):
        self.numbers |= metrics

    def log_image(self, key, images, step=None):
        self.images[key] = [image.size for image in images]

    def log_table(self, key, columns, data, step=None):
        self.tables[key] = (columns, data)

    def log_text(self, key, columns, data, step=None):
        self.texts[key] = data


@pytest.mark.drawn
def test_a_logger_with_methods_for_images_tables_and_texts_gets_them(tmp_path):
    notebook = Notebook()
    _, rows = report(notebook, CSVLogger(tmp_path / "bare"), folder=tmp_path)
    assert notebook.images.keys() == FIGURES
    assert all(min(size) > 200 for (size,) in notebook.images.values())
    assert notebook.texts == {"config": [["a: 1\n  b: 2"]]}
    (columns, data), *others = notebook.tables.values()
    assert others == []
    assert columns == list(rows[0])
    assert [row[columns.index("test_accuracy")] for row in data] == [float(row["test_accuracy"]) for row in rows]
    assert notebook.numbers["test/accuracy"] == pytest.approx(sum(float(row["test_accuracy"]) for row in rows) / 2)


def test_columns_of_several_types_are_sent_as_text(tmp_path):
    notebook = Notebook()
    trainer, _ = report(notebook, folder=tmp_path)
    rows = [{"rank": 1, "loss": None, "which": True}, {"rank": "full", "loss": 2, "which": False}]
    rows.append({"rank": None, "loss": 0.5, "which": None})
    publish_table(trainer, ResultTable("ranks", "losses by rank", rows), "tables/Mine/ranks", tmp_path)
    publish_table(trainer, ResultTable("none", "nothing", []), "tables/Mine/none", tmp_path)
    _, data = notebook.tables["tables/Mine/ranks"]
    assert data == [["1", None, True], ["full", 2, False], [None, 0.5, None]]
    assert "tables/Mine/none" not in notebook.tables


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore")  # those of another package
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")
def test_mlflow_keeps_numbers_figures_tables_and_texts(tmp_path):
    logger = MLFlowLogger(
        "zoos", tracking_uri=f"sqlite:///{tmp_path}/runs.db", artifact_location=str(tmp_path / "kept")
    )
    _, rows = report(logger, folder=tmp_path)
    numbers = logger.experiment.get_run(logger.run_id).data.metrics
    assert numbers["test/accuracy"] == pytest.approx(sum(float(row["test_accuracy"]) for row in rows) / 2)
    assert len(logger.experiment.get_metric_history(logger.run_id, "val/loss")) == 1
    kept = tmp_path / "kept" / logger.run_id / "artifacts"
    assert {path.relative_to(kept).as_posix() for path in kept.rglob("*.*")} == {
        *(f"{name}.png" for name in FIGURES),
        *("tables/ZooReport/members.csv", "tables/ZooReport/members.json", "config.txt"),
    }
    assert (kept / "config.txt").read_text() == "a: 1\n  b: 2"
    assert read_csv(kept / "tables/ZooReport/members.csv") == rows


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore")  # those of another package
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_wandb_offline_keeps_numbers_figures_tables_and_texts(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="zoos", offline=True, save_dir=tmp_path)
    _, rows = report(logger, folder=tmp_path)
    mean = sum(float(row["test_accuracy"]) for row in rows) / 2
    assert logger.experiment.summary["test/accuracy"] == pytest.approx(mean)
    logger.experiment.finish()
    (media,) = tmp_path.glob("wandb/offline-run-*/files/media")
    shown = {
        path.relative_to(media).as_posix().rpartition("_")[0].rpartition("_")[0]: path for path in media.rglob("*.*")
    }
    assert shown.keys() == {*(f"images/{name}" for name in FIGURES), "table/tables/ZooReport/members", "table/config"}
    table = json.loads(shown["table/tables/ZooReport/members"].read_text())
    assert table["columns"] == list(rows[0])
    assert [row[table["columns"].index("member")] for row in table["data"]] == [0, 1]
    assert json.loads(shown["table/config"].read_text())["data"] == [["a: 1\n  b: 2"]]
