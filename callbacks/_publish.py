"""Figures, tables and final numbers of a run: to its ``results`` folder, to the loggers and to the terminal."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console

from lightning_sym._files import write_atomically


def publish_figure(trainer: Trainer, figure: Figure, tag: str, file: Path) -> None:
    """Save a figure as PNG and send it to every logger that takes figures; to be called on rank 0.

    Args:
        trainer: Its loggers are used; those without ``add_figure`` are passed over.
        figure: The figure.
        tag: Name in TensorBoard, for example ``figures/ZooReport/confusion``.
        file: The PNG to write.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(file, buffer.getvalue())
    for logger in trainer.loggers:
        add_figure = getattr(getattr(logger, "experiment", None), "add_figure", None)
        if callable(add_figure):
            add_figure(tag, figure, global_step=trainer.global_step)


def publish_table(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any], file: Path) -> None:
    """Write a table as ``<file>.csv`` and, with what is known about it, as ``<file>.json``.

    Args:
        rows: One mapping per row, all with the same keys in the same order.
        about: Units, seeds, versions, fingerprint: everything needed to make the table again.
        file: The path without suffix.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(file.with_suffix(".csv"), text.getvalue())
    write_atomically(file.with_suffix(".json"), json.dumps({**about, "rows": list(rows)}, indent=1) + "\n")


def log_summary(trainer: Trainer, values: Mapping[str, float], hp_metric: float | None = None) -> None:
    """Send the numbers that a run ends with to every logger; to be called on rank 0.

    Args:
        trainer: Its loggers are used.
        values: By name; may be empty.
        hp_metric: What TensorBoard shows beside the hyperparameters, in place of the -1 that Lightning begins with;
            None leaves it as it is.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            metric = {} if hp_metric is None else {"hp_metric": hp_metric}
            logger.log_metrics({**values, **metric}, step=trainer.global_step)
        elif values:
            logger.log_metrics(dict(values), step=max(trainer.global_step - 1, 0))


def print_places(console: Console, places: Mapping[str, Path], run: Path) -> None:
    """Say where a run's files are, a line for each, the run's folder and how to watch it last.

    Args:
        console: What is printed to.
        places: Files and folders by what they are, a word of at most seven letters.
        run: The run's folder.
    """
    for what, place in {**places, "logs": run, "watch": f"tensorboard --logdir {run}"}.items():
        console.print(f"  {what:8}{place}", highlight=False, soft_wrap=True)
