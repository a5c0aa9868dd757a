"""metrics.csv that survives a resume."""

import csv
import errno
import io
import os
from argparse import Namespace
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from lightning_sym._files import write_atomically, writing
from lightning_sym._runs import whole_lines


class MetricsCSV(Logger):
    """Write all logged scalars to ``metrics.csv``, one row per step.

    Lightning's CSVLogger deletes the file of an interrupted run that is resumed. This logger keeps the rows up to the
    step where the run resumes, and adds to that row: the final metrics are logged there.

    Rows are appended. The last row is rewritten as more is logged for its step. Each write is one system call, so a
    killed process leaves whole rows. Only a new column, or a new value in an earlier row, rewrites the file.

    Args:
        folder: Folder of the file. Created at the first write.
        file: Its name.
    """

    def __init__(self, folder: str | Path, file: str = "metrics.csv") -> None:
        super().__init__()
        self._file = Path(folder) / file
        self._rows: dict[int, dict[str, Any]] | None = None
        self._names: dict[str, None] = {}  # of all that was logged
        self._columns: list[str] = []  # those of the file
        self._written: set[int] = set()  # steps with unchanged rows in the file; the first ones
        self._last = self._end = 0  # bytes of the file before its last row, and with it
        self._last_step: int | None = None  # of that row
        self._reopened = False  # it has got other values
        self._anew = True

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
            self._names = dict.fromkeys(name for row in self._rows.values() for name in row)
        row = self._rows.setdefault(step, {"step": step})
        if step in self._written:
            if all(str(row.get(name)) == str(value) for name, value in metrics.items()):
                return  # Lightning logs an epoch's means again after the checkpoint
            # Not the last row of the file: nothing can be put there.
            self._anew = self._anew or step != self._last_step
            self._reopened = True
            self._written.discard(step)
        row.update(metrics)
        self._names.update(dict.fromkeys(row))

    @rank_zero_only
    def save(self) -> None:
        """Write the rows that are not in the file as they are."""
        if self._rows is None or len(self._rows) == len(self._written):
            return
        count = len(self._rows) - len(self._written)
        rows = [*islice(reversed(self._rows.values()), count)][::-1]
        if self._anew or len(self._columns) != len(self._names) or not self._append([self._text([r]) for r in rows]):
            # Details last.
            self._columns = sorted(self._names, key=lambda name: (name != "step", name != "epoch", name.count("/")))
            rows = [*self._rows.values()]
            text = self._text(rows, header=True)
            write_atomically(self._file, text)
            self._end = len(text)
            self._last = self._end - len(self._text(rows[-1:]))
        self._written.update(row["step"] for row in rows)
        self._last_step = rows[-1]["step"]
        self._reopened = self._anew = False

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the file for the last time."""
        with suppress(OSError) if status == "failed" else nullcontext():  # the first error is said
            self.save()

    def _text(self, rows: Iterable[dict[str, Any]], *, header: bool = False) -> bytes:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()

    def _append(self, rows: list[bytes]) -> bool:
        """Append rows; the first may replace the last row of the file, with other values.

        Returns:
            Whether that was possible: the file is the one that was written here, and a row did not get shorter.
        """
        text = b"".join(rows)
        begin = self._last if self._reopened else self._end
        if begin + len(rows[0]) < self._end:
            return False
        try:
            descriptor = os.open(self._file, os.O_WRONLY)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(descriptor).st_size != self._end:
                return False
            with writing(self._file):
                done = os.pwrite(descriptor, text, begin)  # in one call: a killed process has made it or not
                if done < len(text):
                    os.ftruncate(descriptor, max(begin, self._end))
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
        self._end = begin + len(text)
        self._last = self._end - len(rows[-1])
        return True

    def _read(self) -> dict[int, dict[str, Any]]:
        if not self._file.is_file():
            return {}
        rows = [
            {name: value for name, value in row.items() if value} for row in csv.DictReader(whole_lines(self._file))
        ]
        return {int(row["step"]): {**row, "step": int(row["step"])} for row in rows if row.get("step", "").isdigit()}
