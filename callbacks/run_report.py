"""What the reports at the end of a fit have in common."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic

from pytorch_lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from typing_extensions import TypeVar

from lightning_sym.callbacks._checks import checked_datamodule, checked_task, run_folder
from lightning_sym.callbacks._publish import print_places
from lightning_sym.datamodules import ImageDataModule, InputDataModule

TaskT = TypeVar("TaskT", bound=LightningModule)
DataT = TypeVar("DataT", bound=InputDataModule, default=ImageDataModule)


class RunReport(Callback, ABC, Generic[TaskT, DataT]):
    """Base of callbacks that say at the end of a fit what it found: tables, figures, and a summary on the terminal.

    A subclass names its task in ``task_type`` and writes its files in :meth:`report`, which is called once, when
    training has ended: also where a run that was killed after its last epoch is resumed and has nothing to train. It is
    not called in a trial (``fast_dev_run``). Then, after the progress bar has gone, :meth:`table`, :meth:`notes` and
    :meth:`places` are printed on rank 0.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Attributes:
        task_type: The task that the report is about.
        data_type: The data that it can be given.
    """

    task_type: ClassVar[type[LightningModule]]
    data_type: ClassVar[type[InputDataModule]] = ImageDataModule  # type: ignore[type-abstract]

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self._run = Path()
        self._path: Path | None = None
        self._written = False

    @property
    def path(self) -> Path:
        """The folder of tables and figures; within :meth:`report` and after it."""
        assert self._path is not None
        return self._path

    def task(self, task: LightningModule) -> TaskT:
        """Return the task as what it is.

        Raises:
            TypeError: If it is not of ``task_type``.
        """
        found: Any = checked_task(self, task, self.task_type)
        return found  # type: ignore[no-any-return]

    def data(self, trainer: Trainer) -> DataT:
        """Return the datamodule as what it is.

        Raises:
            TypeError: If it is not of ``data_type``.
        """
        found: Any = checked_datamodule(self, trainer, self.data_type)
        return found  # type: ignore[no-any-return]

    @abstractmethod
    def report(self, trainer: Trainer, task: TaskT, data: DataT) -> None:
        """Evaluate, and write tables and figures to :attr:`path`; called on every rank, written on rank 0 only."""

    @abstractmethod
    def table(self) -> Table:
        """Return the table that is printed."""

    def notes(self) -> list[str]:
        """Return what is printed below the table, a line each, with markup of rich."""
        return []

    @abstractmethod
    def places(self, trainer: Trainer) -> dict[str, Path]:
        """Return the most important files, by what they are in a word."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task and the data.

        Raises:
            TypeError: If the task is another one, or the data are not of ``lightning_sym.datamodules``.
        """
        self._path = None
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self.task(pl_module)
        self.data(trainer)
        self._written = False
        self._run = run_folder(trainer)  # asked for here, as it needs all ranks
        self._path = Path(self.dirpath) if self.dirpath else self._run / "results"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report."""
        if self._path is None:
            return
        self.report(trainer, self.task(pl_module), self.data(trainer))
        self._written = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary, after the progress bar has gone."""
        if not self._written:  # a run that was killed after its last epoch: resumed, it has no training to end
            self.on_train_end(trainer, pl_module)
        if self._path is None or not trainer.is_global_zero:
            return
        console = Console()
        console.print(self.table())
        for note in self.notes():
            console.print(f"  {note}", highlight=False, soft_wrap=True)
        print_places(console, self.places(trainer), self._run)
