"""Base of callbacks that measure networks during training: choice of networks, schedule, and starting values."""

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightning_sym._checks import check_integers
from lightning_sym._distributed import gathered
from lightning_sym._text import ranges
from lightning_sym.callbacks._checks import OF_POPULATIONS, has_members, lacking, network_of
from lightning_sym.callbacks._waiting import said_if_long
from lightning_sym.callbacks.publishing import publish_results
from lightning_sym.callbacks.report import AfterFit
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.symmetry.tracing.graph.capture import copied

_CPU = torch.device("cpu")
_SHARDED = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)


class TrainingMonitor(AfterFit):
    """Base of callbacks that measure a network, or the members of a population, during training.

    There is a point at the start, after every so many epochs or optimizer steps, and at the end. Each point is logged,
    and the end writes a figure and tables of all points. Checkpoints hold the points and the starting values.

    Args:
        every_n_epochs: Epochs between two points. >= 1.
        every_n_steps: Optimizer steps between two points, instead of epochs. None or >= 1.
        members: Members of a population to watch: ``"all"`` or their indices.
        network: The attribute of the LightningModule that holds the network, with dots for attributes of attributes;
            ``""`` is the LightningModule itself. Not used for a population.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
        prefix: First part of all names.

    Attributes:
        shown_first: Tags of each chart of the tab *Custom Scalars*, by title: regular expressions, without the
            prefix.

    Raises:
        ValueError: If an argument is out of range.
    """

    data_type = None
    shown_first: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        every_n_epochs: int,
        every_n_steps: int | None,
        members: Literal["all"] | list[int],
        network: str,
        dirpath: str | None,
        prefix: str,
    ) -> None:
        check_integers(every_n_epochs=every_n_epochs, every_n_steps=1 if every_n_steps is None else every_n_steps)
        if members != "all" and (isinstance(members, str) or not members or len(set(members)) != len(members)):
            raise ValueError(f'members must be "all" or distinct numbers, at least one, got {members!r}.')
        if not re.fullmatch(r"[\w.-]+", prefix):
            raise ValueError(f"prefix must be made of letters, digits, '_', '.' and '-', got {prefix!r}.")
        super().__init__(dirpath)
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.members = members
        self.network = network
        self.prefix = prefix
        self.clear()

    # ---- interface of subclasses

    def clear(self) -> None:
        """Reset the state of an earlier fit."""
        self.points: list[dict[str, Any]] = []
        self.starts: dict[int, Any] = {}
        self._saved_as: dict[str, Any] | None = None
        self._begun = False
        self._epoch = 0.0
        self._closed = False  # the last point is only there because training was to end

    @abstractmethod
    def settings(self, members: list[int]) -> dict[str, Any]:
        """Return the settings that a checkpoint and the resumed run must share."""

    def take_starts(self, trainer: Trainer, pl_module: LightningModule) -> dict[int, Any]:
        """Return the starting values to compare later weights with, by member; default none; called on every rank."""
        return dict.fromkeys(self.watched(pl_module))

    @abstractmethod
    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the measurements of a point, as plain values and tensors by name; called on every rank."""

    @abstractmethod
    def scalars(self, point: Mapping[str, Any], *, named: bool) -> dict[str, float]:
        """Return the values to log for a point; ``named`` if members have indices."""

    @abstractmethod
    def results(self, network: str, members: list[int]) -> RunResults:
        """Return the tables and the figure; called on rank 0 only."""

    @property
    def state_key(self) -> str:
        """Key that separates the states of two monitors of one fit."""
        return self._generate_state_key(network=self.network, prefix=self.prefix)

    @property
    def charts(self) -> dict[str, str]:
        """Tags of TensorBoard's first charts, by title, from ``shown_first``."""
        return {title: f"{re.escape(self.prefix)}/{tags}$" for title, tags in self.shown_first.items()}

    # ---- which networks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the members and the strategy.

        Raises:
            ValueError: If there is no such member, or the strategy shards weights.
        """
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.clear()
        name = type(self).__name__
        check_whole_weights(self, trainer)
        task: Any = pl_module
        several = has_members(pl_module)
        if several and self.members != "all" and (missing := sorted(set(self.members) - set(task.numbers))):
            raise ValueError(
                f"{name}(members=...) names member(s) {ranges(missing)}, but the task has {ranges(task.numbers)}."
            )
        if not several and self.members != "all":
            raise ValueError(
                f"{name}(members={self.members}) is for a task with several networks, such as a ZooTask, but "
                f"{type(pl_module).__name__} has no {' and no '.join(lacking(pl_module, OF_POPULATIONS))}; leave "
                'members at "all".'
            )

    def network_of(self, pl_module: LightningModule) -> nn.Module:
        """Return the network to watch; for a population its template.

        Raises:
            ValueError: If there is no such network.
        """
        return network_of(self, pl_module, "network" if has_members(pl_module) else self.network)

    def watched(self, pl_module: LightningModule) -> list[int]:
        """Return the indices of all watched members; a network outside of a population has index 0."""
        if not has_members(pl_module):
            return [0]
        numbers: Any = pl_module.numbers
        return list(numbers) if self.members == "all" else sorted(self.members)

    def own_states(
        self, trainer: Trainer, pl_module: LightningModule, device: torch.device | None = _CPU
    ) -> dict[int, dict[str, Tensor]]:
        """Return copies of the weights of this rank's members; each member belongs to one rank.

        Args:
            trainer: The trainer.
            pl_module: The LightningModule in training.
            device: Device of the copies; None for the device of the weights, which avoids waiting for them.
        """
        if not has_members(pl_module):  # all ranks have the same weights
            network = self.network_of(pl_module)
            state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
            return {0: _copies(state, device)} if trainer.is_global_zero else {}
        task: Any = pl_module
        numbers = self.watched(pl_module)
        if task.member_parallel:
            return {n: _copies(task.population.member_state(n), device) for n in numbers if n in task.member_seeds}
        states = {number: _copies(task.population.member_state(number), device) for number in numbers}
        if trainer.world_size > 1:  # average running statistics, as the task does at the end of an epoch
            for name, _ in task.network.named_buffers():
                for state in states.values():
                    if state[name].is_floating_point():
                        state[name] = torch.stack(gathered(state[name])).mean(0)
        return states if trainer.is_global_zero else {}

    def states(self, trainer: Trainer, pl_module: LightningModule) -> dict[int, dict[str, Tensor]]:
        """Return the weights of all watched members, on the CPU of every rank; call it on every rank."""
        return by_member(self.own_states(trainer, pl_module))

    def copied(self, trainer: Trainer, pl_module: LightningModule, state: Mapping[str, Tensor]) -> nn.Module:
        """Return a copy of the network with the weights of a member, on this process's device."""
        with isolate_rng():
            network = copied(self.network_of(pl_module)).to(trainer.strategy.root_device)
        if has_members(pl_module):  # the template was never trained, and has its original precision
            network.to(next(tensor.dtype for tensor in state.values() if tensor.is_floating_point()))
        network.load_state_dict(dict(state), strict=False)
        return network

    # ---- points

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the start, unless the run resumes from a checkpoint; called on every rank.

        Raises:
            ValueError: If the checkpoint's monitor had other settings.
        """
        self._begun = True
        mine = self.settings(self.watched(pl_module))
        if self._saved_as is not None and self._saved_as != mine:
            different = [f"{name} {self._saved_as.get(name)!r} there, {mine[name]!r} here" for name in mine
                         if self._saved_as.get(name) != mine[name]]  # fmt: skip
            raise ValueError(
                f"The checkpoint's {type(self).__name__} had other settings: {'; '.join(different)}. Resume with "
                "the same network and arguments, or with another prefix to start new curves."
            )
        if self._closed:  # the run continues with more epochs
            self.points.pop()
            self._closed = False
        if not self.points:
            self.starts |= self.take_starts(trainer, pl_module)
            done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            self._add_point(trainer, pl_module, _epochs(trainer, begun=done))

    def _add_point(self, trainer: Trainer, pl_module: LightningModule, epoch: float) -> None:
        """Measure a point; call it on every rank."""
        with said_if_long(trainer, f"{type(self).__name__} measures"):
            point = {"step": trainer.global_step, "epoch": epoch, **self.measure(trainer, pl_module)}
        self.points.append(point)
        if trainer.is_global_zero and self.active:
            scalars = self.scalars(point, named=has_members(pl_module))
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=max(trainer.global_step - 1, 0))  # Lightning's step at an epoch's end

    def _is_due(self, trainer: Trainer, epochs: int) -> bool:
        """Test whether a point is due after so many epochs, and has not been measured."""
        wanted = self._begun and self.every_n_steps is None and epochs % self.every_n_epochs == 0
        return wanted and bool(trainer.global_step != self.points[-1]["step"])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measure a point that the end of the previous epoch should have measured."""
        # Lightning does not repeat the end of an epoch after resuming from a checkpoint saved just before it.
        if batch_idx == 0 and self._is_due(trainer, trainer.current_epoch):
            self._add_point(trainer, pl_module, float(trainer.current_epoch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure after every so many optimizer steps."""
        if self.every_n_steps is None or trainer.global_step == self.points[-1]["step"]:
            return  # the step count is unchanged while gradients accumulate
        if trainer.global_step % self.every_n_steps == 0:
            self._add_point(trainer, pl_module, _epochs(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after every so many epochs."""
        self._epoch = _epochs(trainer, ended=True)
        if self._is_due(trainer, trainer.current_epoch + 1):
            self._add_point(trainer, pl_module, self._epoch)
        elif trainer.current_epoch + 1 == trainer.max_epochs or trainer.global_step == trainer.max_steps:
            # Not in conclude: the last checkpoint, which is written next, would lack the point.
            self._close(trainer, pl_module)

    def _close(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the end, unless there was no step since the last point; call it on every rank."""
        if self._begun and trainer.global_step != self.points[-1]["step"]:
            self._add_point(trainer, pl_module, self._epoch)
            self._closed = True

    def conclude(self, trainer: Trainer, task: LightningModule, data: None) -> None:
        """Measure the end, and write the figure and the tables, unless there was no step."""
        self._close(trainer, task)
        if self.points and trainer.is_global_zero:
            results = self.results(architecture_name(self.network_of(task)), self.watched(task))
            publish_results(trainer, results, self.path, f"figures/{type(self).__name__}")

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the curves and the starting values, on rank 0 of all members."""
        if not self._begun or not self.points:
            return {}
        curves = {"points": list(self.points), "starts": self.starts, "closed": self._closed}
        return {"settings": self.settings(sorted(self.starts)), **curves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the curves and the starting values."""
        if state_dict:
            self._saved_as = state_dict["settings"]
            self.points = list(state_dict["points"])
            self.starts, self._closed = state_dict["starts"], state_dict["closed"]


def by_member(own: Mapping[int, Any]) -> dict[int, Any]:
    """Merge the ranks' values by member, ordered by index; call it on every rank."""
    return dict(sorted(item for part in gathered(dict(own)) for item in part.items()))


def _copies(state: Mapping[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
    return {name: tensor.detach().to(device, copy=True) for name, tensor in state.items()}


def check_whole_weights(callback: Callback, trainer: Trainer) -> None:
    """Check that every process has unsharded weights.

    Raises:
        ValueError: If the strategy shards them.
    """
    if isinstance(trainer.strategy, _SHARDED):
        raise ValueError(
            f"{type(callback).__name__} needs whole weights, which {type(trainer.strategy).__name__} shards; use ddp, "
            "or remove the callback."
        )


def _epochs(trainer: Trainer, *, begun: int | None = None, ended: bool = False) -> float:
    """Return the number of trained epochs, including the fraction of the current one.

    Args:
        trainer: The trainer, which knows the number of batches per epoch.
        begun: Batches of this epoch to count; default all begun ones, which are complete at the end of a batch.
        ended: Whether the epoch is over, for epochs of unknown length.
    """
    batches = float(trainer.num_training_batches)
    if not math.isfinite(batches) or batches == 0:
        return float(trainer.current_epoch + ended)
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready if begun is None else begun
    return float(trainer.current_epoch + min(1.0, done / batches))
