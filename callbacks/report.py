"""What the reports at the end of a fit have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from pytorch_lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import Progress

from lightning_sym._distributed import together
from lightning_sym.callbacks._checks import check_needs, checked_datamodule, run_folder
from lightning_sym.callbacks.publishing import publish_results
from lightning_sym.datamodules import ImageDataModule, InputDataModule
from lightning_sym.reports import RunResults
from lightning_sym.zoo import versions


class RunReport(Callback, ABC):
    """Base of callbacks that say at the end of a fit what it found: tables, figures, and a summary on the terminal.

    A subclass evaluates what it needs in :meth:`measure`, on every rank, and makes of it
    :class:`lightning_sym.reports.RunResults` in :meth:`report`, on rank 0; these are written, drawn, sent to loggers
    and, after the progress bar has gone, printed. That is done once, when training has ended: also where a run that was
    killed after its last epoch is resumed and has nothing to train. Nothing is done in a trial (``fast_dev_run``).

    Figures are in TensorBoard under ``figures/<class>/<name>``.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Attributes:
        needs: Names of what the task must have; any task that has it will do. What is set after the constructor must be
            declared in the class of the task.
        example: A task that has it, for the message to those that do not.
        data_type: The data that the report can be given.
        results: What :meth:`report` returned; None before that, and on ranks other than 0.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[str] = ""
    data_type: ClassVar[type[InputDataModule]] = ImageDataModule  # type: ignore[type-abstract]

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self.results: RunResults | None = None
        self._run = Path()
        self._path: Path | None = None
        self._written = False

    @property
    def path(self) -> Path:
        """The folder of tables and figures; from ``setup`` on."""
        assert self._path is not None
        return self._path

    @property
    def active(self) -> bool:
        """Whether this run is one that is reported on: a fit, and no trial."""
        return self._path is not None

    def data(self, trainer: Trainer) -> Any:
        """Return the datamodule as what it is.

        Raises:
            TypeError: If it is not of ``data_type``.
        """
        return checked_datamodule(self, trainer, self.data_type)

    def source(self, data: Any) -> dict[str, Any]:
        """Return what every table says at its end: which data and which versions of packages it was made with."""
        return {"data": data.identity(), "versions": versions()}

    def measure(self, trainer: Trainer, task: Any, data: Any) -> Any:
        """Return what has to be evaluated for the report; called on every rank, for all to work together."""
        return None

    @abstractmethod
    def report(self, trainer: Trainer, task: Any, data: Any, measured: Any) -> RunResults:
        """Return what is written and printed; called on rank 0 only.

        Args:
            trainer: Trainer of the run.
            task: The task.
            data: The datamodule.
            measured: What :meth:`measure` returned.
        """

    def publish(self, trainer: Trainer, results: RunResults) -> None:
        """Write tables and files, draw figures, and send all to the loggers; called on rank 0 only."""
        publish_results(trainer, results, self.path, f"figures/{type(self).__name__}")

    @contextmanager
    def progress(self, trainer: Trainer, title: str) -> Iterator[Callable[[int, int], None] | None]:
        """Show how far some work is, on rank 0, where there is a progress bar.

        Args:
            trainer: Trainer of the run.
            title: Beside the bar.

        Yields:
            What to call with the number of steps done and of all; or None.
        """
        if not trainer.is_global_zero or trainer.progress_bar_callback is None:
            yield None
            return
        with Progress(transient=True) as bar:
            line = bar.add_task(title)
            yield lambda done, total: bar.update(line, completed=done, total=total)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task and the data.

        Raises:
            TypeError: If the task lacks what the report needs, or the data are not of ``lightning_sym.datamodules``.
        """
        self._path, self.results, self._written = None, None, False
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        check_needs(self, pl_module, self.needs, self.example)
        self.data(trainer)
        self._run = run_folder(trainer)  # asked for here, as it needs all ranks
        self._path = Path(self.dirpath) if self.dirpath else self._run / "results"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the report and publish it."""
        if not self.active:
            return
        data = self.data(trainer)
        measured = self.measure(trainer, pl_module, data)

        def publish() -> None:
            if trainer.is_global_zero:
                self.results = self.report(trainer, pl_module, data, measured)
                self.publish(trainer, self.results)

        together(publish)
        self._written = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary, after the progress bar has gone."""
        if not self._written:  # a run that was killed after its last epoch: resumed, it has no training to end
            self.on_train_end(trainer, pl_module)
        if self.results is not None:
            self.results.show(Console(), self.path, self._run)
