"""Loggers of a run folder: TensorBoard without details unless they are wanted, and metrics.csv with all numbers."""

import csv
import errno
import io
import os
import struct
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]
from torch.utils.tensorboard.summary import hparams

from lightning_sym._files import write_atomically, writing
from lightning_sym._runs import whole_lines
from lightning_sym._tags import is_detail

# Trusted packages, on which no result depends.
_LEFT_OUT = ("allow",)
# Columns that come first in TensorBoard's table: it begins with those that are marked as different between runs.
_FIRST = ("lr", "maps", "members", "methods", "network", "optimizer_name", "pairs", "seed", "zoo")
# TensorBoard ticks the first five metrics of that table.
_TICKED = 5


class RunTensorBoard(TensorBoardLogger):
    """Log to the event files of a run folder; details (``details/...``) only if they are wanted.

    Hyperparameters are written when the run ends, with the name of its main figure.

    Args:
        folder: The run folder.
        details: Whether to show numbers of single members, pairs and layers.
        points: Whether to show a quantity with one or two values as a point, its last value: for runs of one or two
            epochs, whose curves are straight lines.

    Attributes:
        headline: Name of the run's main figure, for TensorBoard's table of hyperparameters.
        numbers: Names of the final numbers; the first of them follow the main figure in that table.
    """

    def __init__(self, folder: str | Path, *, details: bool = False, points: bool = False) -> None:
        path = Path(folder)
        super().__init__(path.parent, path.name, "", default_hp_metric=False)
        self.details = details
        self.points = points
        self.headline: str | None = None
        self.numbers: dict[str, None] = {}
        self._waiting: dict[str, list[tuple[int | None, float]]] = {}  # the first values, by name
        self._hyperparameters: dict[str, Any] = {}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers, except for the epoch."""
        shown = {n: value for n, value in metrics.items() if n != "epoch" and (self.details or not is_detail(n))}
        with self.writing():
            if not self.points:
                super().log_metrics(shown, step)
                return
            for name, value in shown.items():
                values = self._waiting.setdefault(name, [])
                values.append((step, value))
                if len(values) > 2:  # a curve
                    for at, one in values if len(values) == 3 else values[-1:]:
                        super().log_metrics({name: one}, at)

    @rank_zero_only
    def save(self) -> None:
        """Write the logged values."""
        with self.writing():
            super().save()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise the errors of writing the event file as those of all files."""
        file = self._file
        if file is not None:  # otherwise TensorBoard's thread also prints them
            self.experiment.file_writer.event_writer._async_writer._worker._invoke_excepthook = lambda *_: None
        with writing(file or Path(self.log_dir, "events.out.tfevents")):
            yield
            if file is not None and not file.exists():  # written data would be lost
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    @property
    def _file(self) -> Path | None:
        """The event file; None if it has not been opened, or has been closed."""
        writer = None if self._experiment is None else self._experiment.file_writer  # type: ignore[no-untyped-call]
        return None if writer is None else Path(writer.event_writer._file_name)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Keep hyperparameters until the end."""
        given = dict(vars(params) if isinstance(params, Namespace) else params)
        mine = {n: value for n, value in given.items() if not n.startswith("_") and n not in _LEFT_OUT}
        self._hyperparameters |= mine
        self.hparams.update(mine)

    @rank_zero_only
    def show_first(self, *sources: object) -> None:
        """Write the charts of TensorBoard's tab *Custom Scalars*, in a group for each source.

        Args:
            *sources: A task and its callbacks. Those with an attribute ``charts`` say which tags a chart has, by its
                title: regular expressions of names that they log.
        """
        groups = {type(source).__name__: charts for source in sources if (charts := getattr(source, "charts", None))}
        if groups:
            charts = {n: {title: ["Multiline", [tags]] for title, tags in own.items()} for n, own in groups.items()}
            with self.writing():
                self.experiment.add_custom_scalars(charts)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the hyperparameters and the name of the main figure, and close the files.

        A run that failed before it logged anything leaves no event file.
        """
        failed = status == "failed"
        with suppress(OSError) if failed else nullcontext(), self.writing():  # of a failed run the first error is said
            for name, values in self._waiting.items():
                if len(values) < 3:
                    super().log_metrics({name: values[-1][1]}, values[-1][0])
            self._waiting = {}
            if self.headline is not None and self._hyperparameters:
                writer = self.experiment._get_file_writer()
                shown = [name for name in self.numbers if self.details or not is_detail(name)]
                names = list(dict.fromkeys([self.headline, *shown]))
                for summary in _summaries(_flat(self._hyperparameters), names[:_TICKED]):
                    writer.add_summary(summary)
                self._hyperparameters = {}
        opened = self._file
        with suppress(OSError) if failed else nullcontext(), self.writing():
            super().finalize(status)
        if failed and opened is not None:
            _remove_if_empty(opened)


def _remove_if_empty(events: Path) -> None:
    """Remove an event file that holds nothing but the record with its format, the first one of every file."""
    content = events.read_bytes() if events.is_file() else b""
    if len(content) >= 8 and len(content) == struct.unpack("<Q", content[:8])[0] + 16:  # a length and two checksums
        events.unlink()


def _summaries(params: dict[str, bool | int | float | str], names: Sequence[str]) -> Iterator[Any]:
    """Yield the summaries of hyperparameters, with the names of the main figures; their values are scalars."""
    for summary in hparams(params, dict.fromkeys(names, 0.0)):  # type: ignore[no-untyped-call]
        metadata = summary.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(metadata.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in _FIRST
        metadata.content = content.SerializeToString()
        yield summary


def _flat(params: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Flatten hyperparameters for TensorBoard, nested ones as ``outer/inner``, without empty ones."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            # A class with its arguments: network, network/width.
            path = str(value.get("class_path", ""))  # whole in the config; columns are narrow
            kind = {"class_path": path.rpartition(".")[2]} if path else None
            inside = value if kind is None else kind | dict(value.get("init_args") or {})
            flat |= {f"{name}/{inner}".removesuffix("/class_path"): one for inner, one in _flat(inside).items()}
        elif value not in (None, [], ()):
            flat[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


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
