"""Base classes of reports at the end of a fit."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from pytorch_lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import Progress

from lightning_sym.callbacks._checks import check_needs, checked_datamodule, on_first_rank, run_folder
from lightning_sym.callbacks._waiting import said_if_long
from lightning_sym.callbacks.publishing import publish_results
from lightning_sym.datamodules import InMemoryDataModule, InputDataModule
from lightning_sym.reports import Report, RunResults
from lightning_sym.tasks.same_run import check_same_run
from lightning_sym.zoo import versions


class AfterFit(Callback, ABC):
    """Base of callbacks that write files to the folder of the run when a fit has ended.

    They work once, when training has ended, also if a run that was killed after its last epoch is resumed. Nothing is
    done in a trial (``fast_dev_run``).

    Args:
        dirpath: Folder of the files; default ``folder`` in the run's folder.

    Attributes:
        needs: Names of the attributes that a task of any class must have. Attributes set after the constructor must be
            declared in the class.
        example: A task that has them, for error messages.
        data_type: Required type of the data; None for any.
        folder: Name of the folder of the files.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[str] = ""
    data_type: ClassVar[type[InputDataModule] | None] = InMemoryDataModule
    folder: ClassVar[str] = "results"

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self._run = Path()
        self._path: Path | None = None
        self._concluded = False

    @property
    def path(self) -> Path:
        """The folder of the files; from ``setup`` on."""
        assert self._path is not None
        return self._path

    @property
    def active(self) -> bool:
        """Whether this run writes files: a fit, and no trial."""
        return self._path is not None

    def data(self, trainer: Trainer) -> Any:
        """Return the datamodule with its type checked.

        Raises:
            TypeError: If it is not of ``data_type``.
        """
        return None if self.data_type is None else checked_datamodule(self, trainer, self.data_type)

    def source(self, data: Any) -> dict[str, Any]:
        """Return the facts at the end of every table: the data and the versions of packages."""
        return {"data": data.identity(), "versions": versions()}

    @abstractmethod
    def conclude(self, trainer: Trainer, task: Any, data: Any) -> None:
        """Write the files at the end of a fit; called on every rank."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task and the data.

        Raises:
            TypeError: If the task lacks a required attribute, or the data are not of ``lightning_sym.datamodules``.
            ValueError: If processes of the run have other settings.
        """
        self._path, self._concluded = None, False
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        check_same_run(trainer, pl_module)
        check_needs(self, pl_module, self.needs, self.example)
        self.data(trainer)
        self._run = run_folder(trainer)  # asked for here, as it needs all ranks
        self._path = Path(self.dirpath) if self.dirpath else self._run / self.folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Conclude the fit, if it is no trial."""
        if self.active:
            with said_if_long(trainer, f"{type(self).__name__} works"):
                self.conclude(trainer, pl_module, self.data(trainer))
            self._concluded = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Conclude a run that was killed after its last epoch: resumed, it has no training to end."""
        if not self._concluded:
            self.on_train_end(trainer, pl_module)


class RunReport(AfterFit):
    """Base of callbacks that report the results of a fit: tables, figures, and a summary on the terminal.

    A subclass evaluates networks in :meth:`measure`, on every rank. On rank 0, :meth:`report` converts the measurements
    to :class:`lightning_sym.reports.RunResults`. These are written, drawn, sent to loggers and, after the progress bar
    has closed, printed. As in :class:`AfterFit`, this happens once, and not in a trial (``fast_dev_run``).

    Figures are in TensorBoard under ``figures/<class>/<name>``.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        TypeError: If a subclass has neither :meth:`report` nor ``declared``.

    Attributes:
        declared: Tables, columns and charts of the report. With it :meth:`measure` returns rows by the name of the
            table, and :meth:`report` need not be written.
        needs: Names of the attributes that a task of any class must have. Attributes set after the constructor must be
            declared in the class.
        example: A task that has them, for error messages.
        data_type: Required type of the data.
        results: Results of :meth:`report`; None before its call, and on ranks other than 0.
    """

    declared: ClassVar[Report | None] = None

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(dirpath)
        if self.declared is None and type(self).report is RunReport.report:
            raise TypeError(f"{type(self).__name__} has no method report; write it, or set declared.")
        self.results: RunResults | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task and the data, and that there is no second such report.

        Raises:
            TypeError: If the task lacks a required attribute, or the data are not of ``lightning_sym.datamodules``.
            ValueError: If processes of the run have other settings, or another report writes the same files.
        """
        super().setup(trainer, pl_module, stage)
        alike: list[Any] = [one for one in trainer.callbacks if type(one) is type(self)]  # type: ignore[attr-defined]
        others = [one for one in alike if one is not self] if any(one is self for one in alike) else []
        if self.active and any(other.dirpath == self.dirpath for other in others):
            name = type(self).__name__
            raise ValueError(f"There are two {name} with the same files; remove one, or set another dirpath.")

    def measure(self, trainer: Trainer, task: Any, data: Any) -> Any:
        """Evaluate everything that the report needs; called on every rank, to work together."""
        return None

    def report(self, trainer: Trainer, task: Any, data: Any, measured: Any) -> RunResults:
        """Return the results to write and print; called on rank 0 only.

        By default ``measured`` are rows by the name of the table, for the declaration ``declared``.

        Args:
            trainer: Trainer of the run.
            task: The task.
            data: The datamodule.
            measured: Measurements returned by :meth:`measure`.

        """
        assert self.declared is not None
        return self.declared.results(measured, title=type(task).__name__, about=self.source(data))

    def publish(self, trainer: Trainer, results: RunResults) -> None:
        """Write tables and files, draw figures, and send all to the loggers; called on rank 0 only."""
        publish_results(trainer, results, self.path, f"figures/{type(self).__name__}")

    @contextmanager
    def progress(self, trainer: Trainer, title: str) -> Iterator[Callable[[int, int], None]]:
        """Show the progress of some work, on rank 0, if there is a progress bar.

        Args:
            trainer: Trainer of the run.
            title: Label of the bar.

        Yields:
            Function of the number of completed steps and of all steps; it does nothing if there is no bar.
        """
        if not trainer.is_global_zero or trainer.progress_bar_callback is None:
            yield lambda done, total: None
            return
        with Progress(transient=True) as bar:
            line = bar.add_task(title)
            yield lambda done, total: bar.update(line, completed=done, total=total)

    def conclude(self, trainer: Trainer, task: Any, data: Any) -> None:
        """Make the report and publish it."""
        measured = self.measure(trainer, task, data)
        self.results = None

        def publish() -> None:
            results = self.report(trainer, task, data, measured)
            self._check_names(trainer, results)
            self.results = results
            self.publish(trainer, self.results)

        on_first_rank(trainer, publish)

    def _check_names(self, trainer: Trainer, results: RunResults) -> None:
        """Warn if a table will replace that of another report."""
        mine = {table.name for table in results.tables}
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, RunReport) and other is not self and other.results and other.path == self.path:
                for name in mine & {table.name for table in other.results.tables}:
                    warnings.warn(
                        f"{type(self).__name__} overwrites {name}.csv of {type(other).__name__} in {self.path}; rename "
                        "its table, or set another dirpath.",
                        stacklevel=2,
                    )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary, after the progress bar has closed."""
        super().on_fit_end(trainer, pl_module)
        if self.active and self.results is not None:
            self.results.show(Console(), self.path, self._run)
