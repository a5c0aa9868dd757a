"""TensorBoard logs of a run folder, without details unless they are wanted."""

import errno
import os
import struct
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]
from torch.utils.tensorboard.summary import hparams

from lightning_sym._files import writing
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
