"""metrics.csv that survives a resume."""

import csv
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from lightning_sym._files import write_atomically


class MetricsCSV(Logger):
    """All logged scalars as ``metrics.csv``, one row per step.

    Lightning's own CSVLogger deletes the file of the interrupted run when it is resumed; this one keeps the rows
    up to the step at which the run goes on, and adds to the row of this step: what a run ends with is logged there.

    Args:
        folder: Where the file lies. Created at the first write.
        file: Its name.
    """

    def __init__(self, folder: str | Path, file: str = "metrics.csv") -> None:
        super().__init__()
        self._file = Path(folder) / file
        self._rows: dict[int, dict[str, Any]] | None = None

    @property
    def name(self) -> str:
        """The folder's name."""
        return self._file.parent.name

    @property
    def version(self) -> str:
        """Always empty: the folder is the run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The folder."""
        return str(self._file.parent)

    @property
    def log_dir(self) -> str:
        """The folder."""
        return self.save_dir

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add scalars to the row of a step."""
        step = 0 if step is None else step
        if self._rows is None:
            self._rows = {number: row for number, row in self._read().items() if number <= step}
        self._rows.setdefault(step, {"step": step}).update(metrics)

    @rank_zero_only
    def save(self) -> None:
        """Write the file."""
        if not self._rows:
            return
        logged = dict.fromkeys(name for row in self._rows.values() for name in row)
        names = sorted(logged, key=lambda name: (name != "step", name != "epoch", name.count("/")))  # details last
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows.values())
        write_atomically(self._file, text.getvalue())

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the file for the last time."""
        self.save()

    def _read(self) -> dict[int, dict[str, Any]]:
        if not self._file.is_file():
            return {}
        with self._file.open(newline="", encoding="utf-8") as file:
            rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
        return {int(row["step"]): {**row, "step": int(row["step"])} for row in rows if row.get("step", "").isdigit()}
