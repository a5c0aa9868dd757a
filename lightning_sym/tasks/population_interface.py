"""The methods that an experiment on a population overrides: members, loss, data, metrics, logging and checkpoints."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sym._loading import LoadsTrusted
from lightning_sym._text import name_of_callable, ranges
from lightning_sym.population import LoopPopulation, Loss, Population, VmapPopulation
from lightning_sym.tasks.losses import CrossEntropy
from lightning_sym.tasks.metrics import PopulationClassification, PopulationLoss

ByMember: TypeAlias = Mapping[str, Mapping[int, float]]
"""Values of members, by quantity and number."""
Rows: TypeAlias = Mapping[str, list[float]]
"""Values of members, by quantity, in the order of a metric's rows."""


class PopulationInterface(LoadsTrusted, LightningModule):
    """Methods that a subclass of :class:`PopulationTask` may override, with their defaults.

    Only :meth:`make_member` has none.
    """

    population: Population
    loss_function: Loss
    execution: str
    weight_decay_on: Literal["all", "weights"]
    _numbers: Sequence[int]

    # ---- members, loss and data

    def make_member(self, number: int) -> nn.Module:
        """Make a new member; its initial weights depend on its number only. Every task overrides this."""
        raise NotImplementedError(f"{type(self).__name__} must define make_member, which makes its members.")

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Compute one member's loss on a batch, a scalar, from its outputs and targets."""
        return self.loss_function(outputs, targets)

    def training_batch(self, batch: Any, batch_idx: int) -> tuple[Tensor, Any]:
        """Split a training batch into inputs and targets; override it to change data for training.

        Args:
            batch: Inputs and targets from the datamodule, ``[M, B, ...]`` if :attr:`own_batches`.
            batch_idx: Number of the batch within the epoch; for :meth:`step_generator`.
        """
        return self.evaluation_batch(batch)

    def evaluation_batch(self, batch: Any) -> tuple[Tensor, Any]:
        """Split a batch into inputs and targets; override it to choose other targets than the datamodule's."""
        inputs, targets = batch
        return inputs, targets

    @property
    def numbers(self) -> list[int]:
        """The numbers of all members, on every rank."""
        return list(self._numbers)

    @property
    def classifies(self) -> bool:
        """Whether the loss is the cross-entropy, so that there are accuracies."""
        return not self._overrides_loss and isinstance(self.loss_function, CrossEntropy)

    @property
    def _overrides_loss(self) -> bool:
        return type(self).loss is not PopulationInterface.loss

    def on_losses(self, losses: Tensor, alive: Tensor) -> None:
        """Observe the losses of a training step; an override must not wait for the device.

        Args:
            losses: Losses of this rank's members, 0 for stopped ones. Shape ``[m]``.
            alive: Whether each member continues. Shape ``[m]``, bool.
        """

    # ---- metrics, optimizer and logging

    def make_metric(self, split: str) -> PopulationLoss:
        """Make the metric for the losses of all members, and for accuracies if the loss is a cross-entropy.

        Args:
            split: ``"train"``, or ``"val"`` for every evaluation.
        """
        return (
            PopulationClassification(len(self.numbers))
            if self.classifies
            else PopulationLoss(len(self.numbers), self.loss)
        )

    def score(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Rank weights by their validation metrics; the highest score is the best, and among equals the earlier epoch.

        The default is the accuracy, with ties broken by the lower loss; without accuracies, the lower loss.
        """
        loss = -metrics["loss"]
        return (metrics["accuracy"], loss) if "accuracy" in metrics else (loss,)

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Make the default optimizer: Adam with its defaults."""
        return torch.optim.Adam(parameters)

    def make_population(self, numbers: list[int]) -> Population:
        """Make this rank's members, given their numbers."""
        kind = VmapPopulation if self.execution == "vmap" else LoopPopulation
        return kind(self.make_member, numbers)

    def identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the run that loads it must share, as plain values by name."""
        return {"members": ranges(self.numbers), "execution": self.execution, "loss": self._loss_name}

    @property
    def _loss_name(self) -> str:
        return name_of_callable(type(self).loss if self._overrides_loss else self.loss_function)

    def member_title(self, number: int) -> str:
        """Return the name of a member in messages."""
        return f"Member {number}"

    def tag(self, split: str, quantity: str, number: int) -> str:
        """Return the tag of a member's value, after ``details/``."""
        return f"{split}/{quantity}/member-{number:04d}"

    def summary(self, split: str, running: ByMember, values: Rows) -> dict[str, float]:
        """Summarise all members for the logger: means and extremes, at most about 30 values.

        Args:
            split: ``"train"``, ``"val"`` or ``"test"``.
            running: Values by quantity and number, of the members that were not stopped.
            values: All values of the metric, by quantity.
        """
        found: dict[str, float] = {}
        for name, numbers in running.items():
            if own := list(numbers.values()):
                found[f"{split}/{name}"] = math.fsum(own) / len(own)
                found |= {f"{split}/{name}/min": min(own), f"{split}/{name}/max": max(own)}
        return found

    def each(self, split: str, running: ByMember, values: Rows) -> dict[str, float]:
        """Return the logged details of single members; arguments as for :meth:`summary`."""
        return {self.tag(split, name, n): value for name, numbers in running.items() for n, value in numbers.items()}

    @property
    def shown(self) -> str:
        """The tag of the value in the progress bar."""
        return "val/accuracy" if self.classifies else "val/loss"

    @property
    def charts(self) -> dict[str, str]:
        """The charts in TensorBoard's tab *Custom Scalars*: regular expressions of tags, by title.

        By default they show training and validation values with the extremes over members. If the progress bar shows
        another value, they show that one and its siblings.
        """
        split, _, _ = self.shown.partition("/")
        if split not in ("train", "val"):
            return {split.replace("_", " "): f"{re.escape(split)}(/.*)?$"}
        return {
            title: tags
            for name in (*(["accuracy"] if self.classifies else []), "loss")
            for title, tags in (
                (name, f"(train|val)/{name}$"),
                (f"{name}, lowest and highest", f"(train|val)/{name}/(min|max)$"),
            )
        }

    def shared_buffers(self) -> Iterable[Tensor]:
        """Return the running statistics, which ranks that share out the data average."""
        return (buffer for buffer in self.population.buffers() if buffer.is_floating_point())

    def undecayed_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters without weight decay."""
        if self.weight_decay_on == "all":
            return []
        return [parameter for name, parameter in self.population.named_trainable() if "weight" not in name]

    # ---- kept weights

    def state_to_keep(self, number: int) -> dict[str, Tensor]:
        """Return the state to keep of a member that is the best so far."""
        return self.population.member_state(number)

    def member_records(self) -> dict[int, Any]:
        """Return further checkpoint entries of this rank's members, by number, as plain values and tensors."""
        return {}

    def load_member_records(self, records: Mapping[int, Any]) -> None:
        """Restore the entries that :meth:`member_records` returned."""
