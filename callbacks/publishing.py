"""Write figures, text and final numbers of a run to its folder, and send them to its loggers."""

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import Logger, MLFlowLogger, TensorBoardLogger

from lightning_sym._files import write_atomically
from lightning_sym.callbacks.figure_files import FigureFiles
from lightning_sym.figures import cards, write_figure
from lightning_sym.reports import ResultTable, RunResults


def publish_figure(trainer: Trainer, figure: Figure, tag: str, file: Path) -> None:
    """Save a figure and send its panels to every logger that takes figures; call it on rank 0.

    Args:
        trainer: Its loggers are used: TensorBoard and W&B for the panels, MLflow for the file.
        figure: The figure, which is consumed, see :func:`lightning_sym.figures.cards`.
        tag: Name in TensorBoard, for example ``figures/ZooReport/confusion``. Several panels are numbered:
            ``figures/StitchingReport/penalties/1``.
        file: The PNG to write, with all panels; :class:`FigureFiles` chooses its size, and files beside it.
    """
    chosen = FigureFiles.of(trainer)
    write_figure(figure, file, chosen.form, chosen.size)
    for logger in trainer.loggers:
        send_files(logger, tag.rpartition("/")[0], [file])
    for number, card in cards(figure):
        for logger in trainer.loggers:
            send_figure(logger, f"{tag}/{number}" if number else tag, card, trainer.global_step)


def publish_text(trainer: Trainer, text: str, tag: str) -> None:
    """Send text to every logger that takes it, preserving its layout; call it on rank 0.

    Args:
        trainer: Its loggers are used: TensorBoard, W&B, MLflow.
        text: One or several lines.
        tag: Name in TensorBoard.
    """
    for logger in trainer.loggers:
        send_text(logger, tag, text, trainer.global_step)


def publish_table(trainer: Trainer, table: ResultTable, tag: str, folder: Path) -> None:
    """Write a table, and send it to every logger that takes tables or files; call it on rank 0.

    Args:
        trainer: Its loggers are used: W&B, and MLflow for the files.
        table: The table.
        tag: Name in W&B, for example ``tables/ZooReport/members``.
        folder: Folder of the files ``<name>.csv`` and ``<name>.json``.
    """
    table.write(folder)
    for logger in trainer.loggers:
        send_table(logger, tag, table, trainer.global_step)
        send_files(logger, tag.rpartition("/")[0], [folder / f"{table.name}{kind}" for kind in (".csv", ".json")])


def publish_numbers(trainer: Trainer, values: Mapping[str, float], headline: str | None = None) -> None:
    """Send the final numbers of a run to every logger; call it on rank 0.

    Args:
        trainer: Its loggers are used.
        values: Numbers by name; may be empty.
        headline: Name of the main number, which TensorBoard shows with the hyperparameters. Lightning's own TensorBoard
            logger fixes that name before the run, so that the number is also logged as ``hp_metric``.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            metric = {}
            # The logger of a run folder has both attributes.
            if headline is not None and hasattr(logger, "headline") and hasattr(logger, "numbers"):
                logger.headline = headline
                logger.numbers |= dict.fromkeys(values)
            elif headline is not None:
                metric = {"hp_metric": values[headline]}
            logger.log_metrics({**values, **metric}, step=trainer.global_step)
        elif values:
            logger.log_metrics(dict(values), step=max(trainer.global_step - 1, 0))


def publish_results(trainer: Trainer, results: RunResults, folder: Path, tag: str) -> None:
    """Write tables and files, draw figures, and send them to the loggers; call it on rank 0.

    The table ``numbers`` holds the final numbers of all reports of the run.

    Args:
        trainer: Its loggers are used.
        results: Results of a run.
        folder: Folder of the files.
        tag: First part of the figures' names in the loggers, for example ``figures/ZooReport``; tables are in
            ``tables/ZooReport``.
    """
    for table in results.tables:
        publish_table(trainer, table, f"tables/{tag.removeprefix('figures/')}/{table.name}", folder)
    if results.numbers:
        _with_earlier(results.ending, folder).write(folder)
    for name, content in results.files.items():
        write_atomically(folder / name, content)
    for name, figure in results.figures:
        publish_figure(trainer, figure, f"{tag}/{name}", folder / f"{name}.png")
    for name, text in results.texts.items():
        publish_text(trainer, text, name)
    publish_numbers(trainer, results.numbers, results.headline)


def _with_earlier(table: ResultTable, folder: Path) -> ResultTable:
    """Prepend the final numbers that other reports of the run have written."""
    file = folder / f"{table.name}.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"rows": []}
    mine = {row["number"] for row in table.rows}
    rows = [*(row for row in earlier["rows"] if row["number"] not in mine), *table.rows]
    headline = earlier.get("headline") or table.about["headline"]
    return replace(table, rows=rows, units={**earlier.get("units", {}), **table.units}, about={"headline": headline})


def send_figure(logger: Logger, tag: str, figure: Figure, step: int) -> None:
    """Send a figure to TensorBoard (``add_figure``), or as an image to a logger with ``log_image``, as that of W&B.

    Args:
        logger: The logger.
        tag: Name of the figure.
        figure: The figure.
        step: Step of the run.
    """
    log_image = getattr(logger, "log_image", None)
    if not _to_board(logger, "add_figure", tag, figure, step) and callable(log_image):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        log_image(tag, [Image.open(buffer)], step=step)


def send_text(logger: Logger, tag: str, text: str, step: int) -> None:
    """Send text to TensorBoard (``add_text``), a logger with ``log_text``, or MLflow, preserving its layout.

    Args:
        logger: The logger.
        tag: Name of the text.
        text: One or several lines.
        step: Step of the run.
    """
    # Four spaces mark a Markdown code block, which preserves columns.
    block = "\n".join("    " + line for line in text.splitlines())
    log_text = getattr(logger, "log_text", None)
    if isinstance(logger, MLFlowLogger):
        logger.experiment.log_text(logger.run_id, text, f"{tag}.txt")
    elif not _to_board(logger, "add_text", tag, block, step) and callable(log_text):
        log_text(tag, columns=["text"], data=[[text]], step=step)


def send_table(logger: Logger, tag: str, table: ResultTable, step: int) -> None:
    """Send a table to a logger with ``log_table``, as that of W&B; a column with numbers and text becomes text.

    Args:
        logger: The logger.
        tag: Name of the table.
        table: The table; nothing is sent if it has no rows.
        step: Step of the run.
    """
    log_table = getattr(logger, "log_table", None)
    if callable(log_table) and table.rows:
        columns = [_of_one_type([row[name] for row in table.rows]) for name in table.columns]
        log_table(tag, columns=table.columns, data=[list(row) for row in zip(*columns, strict=True)], step=step)


def send_files(logger: Logger, folder: str, files: Sequence[Path]) -> None:
    """Send files to MLflow, which keeps them as artifacts of the run.

    Args:
        logger: The logger.
        folder: Folder of the artifacts.
        files: The files.
    """
    if isinstance(logger, MLFlowLogger):
        for file in files:
            logger.experiment.log_artifact(logger.run_id, str(file), folder)


def _to_board(logger: Logger, method: str, tag: str, what: object, step: int) -> bool:
    """Call a method of TensorBoard's writer; return whether the logger has one."""
    add = getattr(getattr(logger, "experiment", None), method, None)
    if not callable(add):
        return False
    with getattr(logger, "writing", nullcontext)():  # the logger of a run folder names its file
        add(tag, what, global_step=step)
    return True


def _of_one_type(values: Sequence[Any]) -> Sequence[Any]:
    """Return the values of a column, as text if they are of several types; None may be among them."""
    kinds = {"number" if type(value) in (int, float) else type(value).__name__ for value in values if value is not None}
    return values if len(kinds) < 2 else [None if value is None else str(value) for value in values]
