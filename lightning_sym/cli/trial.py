"""A few steps of a recipe, timed: the machinery of ``lightning-sym estimate``."""

import contextlib
import io
import math
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from rich.console import Console

from lightning_sym.cli.estimate import Asked
from lightning_sym.cli.lightning import RecipeCLI
from lightning_sym.cli.requirements import make
from lightning_sym.reports.costs import Network, RunCosts, Times, cost_table, sharing_table
from lightning_sym.reports.report import text_table

_EPOCHS = 3  # the first one warms up
_WARM = 3  # steps at the beginning that are not counted
_PATIENCE = 20.0  # seconds of the steps of an epoch


class Stopwatch(Callback):
    """Times the parts of a short run; to be the first of its callbacks.

    Attributes:
        steps: Times of the steps, without the first ones.
        epochs: Times between the last step of an epoch and the first of the next.
        validations: Times of the validations, included in ``epochs``.
        periodic: Times of callbacks at the end of an epoch, by name; included in ``epochs``.
        begun: When the first step began.
        ended: When training ended.
    """

    def __init__(self) -> None:
        self.steps: list[Times] = []
        self.epochs: list[Times] = []
        self.validations: list[Times] = []
        self.periodic: dict[str, list[Times]] = {}
        self.begun: Times | None = None
        self.ended: Times | None = None
        self._starts: list[Times] = []
        self._last = Times()
        self._validated = Times()

    def watch(self, callback: Callback, name: str) -> None:
        """Time another callback at the end of each epoch."""
        original: Callable[..., None] = callback.on_train_epoch_end
        times = self.periodic.setdefault(name, [])

        def timed(*args: Any) -> None:
            before = now()
            original(*args)
            times.append(now() - before)

        callback.on_train_epoch_end = timed  # type: ignore[method-assign, assignment]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the start of a step, and at the first step of an epoch the duration since the last one."""
        begins = now()
        if batch_idx == 0:
            self._end_epoch(begins)
        self.begun = self.begun or begins
        self._starts.append(begins)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the end of a step; end the epoch if steps take too long."""
        self._last = now()
        if (self._last - self._starts[0]).wall > _PATIENCE and batch_idx >= _WARM:
            trainer.fit_loop.max_batches = batch_idx + 1
            trainer.val_check_batch = batch_idx + 1  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the start of a validation."""
        self._validated = now()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the duration of the validation."""
        if not trainer.sanity_checking:
            self.validations.append(now() - self._validated)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the end of training."""
        self.ended = now()
        self._end_epoch(self.ended)

    def _end_epoch(self, at: Times) -> None:
        if not self._starts:
            return
        ends = [*self._starts[1:], self._last]
        taken = [end - start for start, end in zip(self._starts, ends, strict=True)]
        first = not self.epochs
        self.steps += taken[_WARM if first and len(taken) > _WARM else 0 :]
        self.epochs.append(at - self._last)
        self._starts = []


class TrialCLI(RecipeCLI):
    """The command line of a fit, cut short and timed.

    Args:
        asked: Options of the command.
        folder: Folder of the run.
    """

    def __init__(self, asked: Asked, folder: Path) -> None:
        self._asked = asked
        self._folder = folder
        self.watch = Stopwatch()
        self.counts: dict[str, int] = {}
        self.needs: list[str] = []
        super().__init__(["fit", *asked.args])

    def before_instantiate_classes(self) -> None:
        """Shorten the run and move its folder; its requirements run for two steps."""
        config = self.config[self.subcommand]
        planned = config.trainer
        self.limit = planned.get("limit_train_batches")
        self.every = planned.get("check_val_every_n_epoch") or 1
        interval = planned.get("val_check_interval")
        self.within = round(1 / interval) if isinstance(interval, float) and 0 < interval < 1 else 1
        self.max_steps = planned.get("max_steps", -1)
        self.max_epochs = planned.get("max_epochs") or (1000 if self.max_steps == -1 else -1)
        config.run_dir, config.zoo_dir, config.ckpt_path, config.overwrite = str(self._folder), None, None, False
        planned.max_epochs = min(_EPOCHS, self.max_epochs) if self.max_epochs > 0 else _EPOCHS
        planned.max_steps = -1
        planned.limit_train_batches = self._asked.steps
        planned.check_val_every_n_epoch = 1
        planned.val_check_interval = None
        planned.enable_progress_bar = planned.enable_model_summary = False
        super().before_instantiate_classes()
        self.needs = [requirement.recipe for requirement in self._required]
        if self._required:
            self._try_requirements(config)

    def _run_subcommand(self, subcommand: str) -> None:
        """Try the requirements separately: they are not part of the run."""
        before = now()
        for requirement in self._required:
            make(requirement, self._get(self.config, "trainer"), self._trial)
        self.tried, self._required = now() - before, []
        super()._run_subcommand(subcommand)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer with a stopwatch; callbacks of every n-th epoch act after each of the few epochs."""
        trainer = super().instantiate_trainer(**kwargs)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if count := _planned(callback, self.max_epochs):
                name = type(callback).__name__
                self.counts[name] = count
                self.watch.watch(callback, name)
                callback.every_n_epochs = 1
                if getattr(callback, "burn_in", None) is not None:
                    callback.burn_in = 1
        trainer.callbacks.insert(0, self.watch)  # type: ignore[attr-defined]
        return trainer

    def costs(self, began: Times, ended: Times) -> RunCosts:
        """Predict the cost of the whole run.

        Args:
            began: When the command began.
            ended: When the short run had ended.
        """
        watch, trainer = self.watch, self.trainer
        assert watch.begun is not None
        assert watch.ended is not None
        batches: Any = trainer.train_dataloader
        full = len(batches) if hasattr(batches, "__len__") else self._asked.steps
        steps = full if self.limit is None else min(full, self.limit) if isinstance(self.limit, int) else full
        steps = int(full * self.limit) if isinstance(self.limit, float) else steps
        epochs = self.max_epochs if self.max_epochs > 0 else math.ceil(self.max_steps / steps)
        if 0 < self.max_steps < epochs * steps:
            epochs = math.ceil(self.max_steps / steps)
        validation = _settled(watch.validations)
        periodic = {name: (_settled(times), self.counts[name]) for name, times in watch.periodic.items()}
        each = sum((own for own, _ in periodic.values()), validation)
        rest = _settled(watch.epochs) - each
        parameters = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
        return RunCosts(
            start=watch.begun - began - self.tried,
            step=Times.mean(watch.steps),
            steps=steps,
            epochs=epochs,
            validation=validation,
            validations=epochs // self.every * self.within if watch.validations else 0,
            epoch=Times(max(rest.wall, 0.0), max(rest.cpu, 0.0)),
            after=ended - watch.ended,
            periodic=periodic,
            gradients=sum(p.numel() * p.element_size() for p in parameters),
            members=len(getattr(self.model, "numbers", [0])),
        )


def _planned(callback: Callback, epochs: int) -> int:
    """Return the period, in epochs of the whole run, of a callback that acts after some epochs only."""
    every = vars(callback).get("every_n_epochs")  # not that of ModelCheckpoint, which is a property
    if not isinstance(every, int) or every < 1:
        return 0
    due = getattr(callback, "updates_after", lambda epoch: epoch % every == 0)
    return sum(bool(due(epoch)) for epoch in range(1, epochs + 1))


def _settled(several: list[Times]) -> Times:
    """Return the mean without the first one, which warms up."""
    return Times.mean(several[1:] or several)


def now() -> Times:
    """Return the present times."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Times(time.perf_counter(), time.process_time())


def print_estimate(asked: Asked) -> None:
    """Run a few steps, and print the predicted cost of the whole run.

    Args:
        asked: Options of the command.
    """
    with tempfile.TemporaryDirectory(prefix="lightning-sym-") as folder, _quiet():
        cli = TrialCLI(asked, Path(folder) / "run")
        costs = cli.costs(Times(asked.began, 0.0), now())
        disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    device = str(cli.trainer.strategy.root_device)
    threads = f", {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}" if device == "cpu" else ""
    table = cost_table(costs, f"{costs.epochs} epochs of {costs.steps} steps on this machine ({device}{threads})")
    console = Console(width=80)
    lines = [
        [row["part"], str(row["times"]), *(_time(row[key]) for key in ("each", "wall", "cpu"))] for row in table.rows
    ]
    console.print(table.what, style="italic", highlight=False, markup=False)
    console.print(text_table("", ["part", "times", "each", "in all", "processor"], [*lines[:-1], None, lines[-1]]))
    console.print(f"  memory  {_bytes(_peak())} at most; files {_bytes(disk)} after {_EPOCHS} epochs", highlight=False)
    if asked.devices:
        shared = sharing_table(costs, asked.devices, Network(bandwidth=asked.bandwidth))
        rows = [
            [row["strategy"], _time(row["seconds"]), f"{row['speedup']:.1f}", _bytes(row["sent"])]
            for row in shared.rows
        ]
        console.print(shared.what, style="italic", highlight=False)
        console.print(text_table("", ["strategy", "time", "speed-up", "sent by a process"], rows))
    for recipe in cli.needs:
        console.print(f"  without {recipe}, which is run first: estimate it by itself", highlight=False, markup=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the run, and processes that it starts, print from the terminal; a trial's zoo is no cause to warn."""
    sys.stdout.flush()
    terminal = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(terminal, 1)
        os.close(terminal)
        os.close(nowhere)


def _peak() -> float:
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


def _time(seconds: float) -> str:
    for unit, length, least in (("d", 86400.0, 2.0), ("h", 3600.0, 1.5), ("min", 60.0, 1.5), ("s", 1.0, 1.0)):
        if seconds >= least * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{1000 * seconds:.3g} ms"


def _bytes(count: float) -> str:
    for unit, size in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
