"""Training a zoo whose members differ by their training, so that their accuracies spread."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sym._random import generator
from lightning_sym.networks import NetworkOrModule
from lightning_sym.tasks.zoo import ZooTask


class VariedZooTask(ZooTask):
    r"""Train a zoo whose members differ by learning rate, number of epochs and label noise.

    The settings of a member are drawn from its number alone. Otherwise this is a
    :class:`lightning_sym.tasks.ZooTask`, also with ``execution="vmap"``.

    - The learning rate is that of the optimizer times a factor. Gradients are multiplied by it, which is the same for
      SGD without weight decay, with or without momentum.
    - Every member is trained to the end of the run. The weights that are kept are those after its number of epochs.
    - In every training batch, each label is replaced with a given probability by a uniformly random class.

    Args:
        network: As for ``ZooTask``.
        members: Number of members. >= 1.
        seed: Number of the first member. >= 0.
        execution: As for ``ZooTask``.
        optimizer: Makes the optimizer from parameters; default ``torch.optim.SGD`` with learning rate 0.1. It must be
            SGD without weight decay.
        rate_factors: Smallest and largest factor of the learning rate, > 0, drawn log-uniformly.
        epochs: Smallest and largest number of epochs, >= 1, drawn log-uniformly and rounded.
        label_noise: Smallest and largest probability of a random label, in [0, 1], drawn uniformly.
        allow: As for ``ZooTask``.

    Raises:
        ValueError: If an argument is out of range, or the optimizer is another one.

    References:
        Zoos with varied training as data for learning: Unterthiner, Keysers, Gelly, Bousquet, Tolstikhin (2020),
        "Predicting Neural Network Accuracy from Weights", arXiv:2002.11448. They vary initialisation, regularisation,
        optimizer and the fraction of training data as well, and do not change labels.
    """

    def __init__(
        self,
        network: NetworkOrModule,
        members: int = 4,
        seed: int = 0,
        execution: Literal["loop", "vmap"] = "loop",
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        rate_factors: Sequence[float] = (0.1, 1.0),
        epochs: Sequence[int] = (1, 30),
        label_noise: Sequence[float] = (0.0, 0.5),
        allow: Sequence[str] | None = None,
    ) -> None:
        _check_range("rate_factors", rate_factors, "> 0", lambda low, _: low > 0)
        _check_range("epochs", epochs, ">= 1", lambda low, _: low >= 1)
        _check_range("label_noise", label_noise, "in [0, 1]", lambda low, high: low >= 0 and high <= 1)
        self.rate_factors, self.epochs, self.label_noise = map(tuple, (rate_factors, epochs, label_noise))
        super().__init__(
            network,
            members=members,
            seed=seed,
            execution=execution,
            optimizer=optimizer,
            keep="last",
            allow=allow,
        )
        self._drawn = {number: self._draw_settings(number) for number in self.numbers}
        made = self._settings
        if made["optimizer_name"] != "SGD" or made.get("weight_decay"):
            decay = " with weight decay" if made["optimizer_name"] == "SGD" else ""
            raise ValueError(
                f"{type(self).__name__} scales gradients instead of the learning rate, which has another effect with "
                f"{made['optimizer_name']}{decay}; use torch.optim.SGD without weight decay."
            )

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Make the default optimizer: SGD."""
        return torch.optim.SGD(parameters, lr=0.1)

    def member_settings(self, number: int) -> dict[str, Any]:
        """Return a member's ``rate_factor``, ``epochs`` and ``label_noise``."""
        return dict(self._drawn[number])

    def _draw_settings(self, number: int) -> dict[str, Any]:
        rate, epochs, noise = torch.rand(3, generator=generator("settings", number), dtype=torch.float64).tolist()
        low, high = self.label_noise
        return {
            "rate_factor": _log_uniform(self.rate_factors, rate),
            "epochs": round(_log_uniform(self.epochs, epochs)),
            "label_noise": low + noise * (high - low),
        }

    def identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the run that loads it must share."""
        own = {"rate_factors": self.rate_factors, "epochs": self.epochs, "label_noise": self.label_noise}
        return {**super().identity(), **{name: list(value) for name, value in own.items()}}

    def training_batch(self, batch: Any, batch_idx: int) -> tuple[Tensor, Any]:
        """Replace some labels by random ones."""
        inputs, targets = super().training_batch(batch, batch_idx)
        total, own = self.global_batch(targets.shape[1])
        classes, shape = self.trainer.datamodule.num_classes, (total, *targets.shape[2:])  # type: ignore[attr-defined]
        rows = []
        for number in self.population.numbers:
            random = self.step_generator("label noise", number, batch_idx, per_process=False)
            replaced = torch.rand(shape, generator=random) < self._drawn[number]["label_noise"]
            rows.append(torch.randint(classes, shape, generator=random).where(replaced, -1)[own])
        noise = torch.stack(rows).to(targets.device, non_blocking=True)
        return inputs, torch.where(noise < 0, targets, noise)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Multiply gradients by the factors of learning rates."""
        super().on_before_optimizer_step(optimizer)
        factors = {number: self._drawn[number]["rate_factor"] for number in self.population.numbers}
        for owner, parameter in zip(self.population.owners(), self.population.trainable(), strict=True):
            if parameter.grad is None:
                continue
            if owner is not None:
                parameter.grad.mul_(factors[owner])
            else:
                column = torch.tensor(list(factors.values()), dtype=parameter.dtype)
                column = column.to(parameter.device, non_blocking=True)
                parameter.grad.mul_(column.view(-1, *[1] * (parameter.dim() - 1)))

    def keep_weights(self, values: Mapping[str, list[float]]) -> None:
        """Keep the current weights of the members that have not reached their number of epochs."""
        done = {n: record for n, record in self.kept.items() if self.current_epoch >= self._drawn[n]["epochs"]}
        super().keep_weights(values)
        self.kept.update(done)


def _log_uniform(ends: Sequence[float], place: float) -> float:
    low, high = map(math.log, ends)
    return math.exp(low + place * (high - low))


def _check_range(name: str, ends: Sequence[float], accepted: str, holds: Callable[[float, float], bool]) -> None:
    """Check two ends of a range."""
    if len(ends) != 2 or not (ends[0] <= ends[1] < math.inf and holds(*ends)):
        raise ValueError(f"{name} must be the smallest and the largest value, {accepted}, got {list(ends)}.")
