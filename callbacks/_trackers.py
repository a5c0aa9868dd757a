"""Send figures, tables, texts and files to loggers.

Each function sends one of these to one logger, or does nothing if the logger cannot take it. Loggers are known by their
methods and by Lightning's classes, so that no tracker has to be installed.
"""

import io
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image
from pytorch_lightning.loggers import Logger, MLFlowLogger

from lightning_sym.reports import ResultTable


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
