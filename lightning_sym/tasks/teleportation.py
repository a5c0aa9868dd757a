"""Training with and without symmetry teleportation, from the same start and at several learning rates."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_sym._checks import check_different, check_integers, check_numbers
from lightning_sym.networks import NetworkOrModule
from lightning_sym.tasks._optimizers import make_optimizer, make_scheduler, scheduled
from lightning_sym.tasks.zoo import ZooTask


class TeleportationTask(ZooTask):
    r"""Train the same networks in several arms and at several learning rates, to compare symmetry teleportation.

    Members with the same seed have the same initial weights and the same order of the training data. With ``A`` arms
    and ``R`` rates, member ``n`` belongs to arm ``n % A``, to rate ``n // A % R`` and to seed ``n // (A R)``. The arms
    are names: :class:`lightning_sym.callbacks.SymmetryTeleportation` with the name of an arm moves its members.

    Args:
        network: The architecture.
        arms: Names of the arms, different ones, at least one.
        rates: Learning rates, > 0, different ones, at least one.
        seeds: Number of seeds, >= 1.
        optimizer: Makes the optimizer from groups of parameters, each with its learning rate; default SGD.
        keep: As for ``ZooTask``.
        loss: As for ``ZooTask``.
        allow: As for ``ZooTask``.

    Attributes:
        arms: As given.
        rates: As given.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        network: NetworkOrModule,
        arms: Sequence[str],
        rates: Sequence[float],
        seeds: int = 1,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        keep: Literal["best", "last"] = "last",
        loss: Callable[[Any, Any], Any] | None = None,
        allow: Sequence[str] | None = None,
    ) -> None:
        check_different("arms", arms)
        check_different("rates", rates, of="numbers")
        for rate in rates:
            check_numbers("> 0", rates=rate)
        check_integers(1, seeds=seeds)
        self.arms, self.rates, self.seeds = list(arms), list(rates), seeds
        members = len(self.arms) * len(self.rates) * seeds
        super().__init__(network, members=members, optimizer=optimizer, keep=keep, loss=loss, allow=allow)

    def arm_of(self, number: int) -> str:
        """Return the arm of a member."""
        return self.arms[number % len(self.arms)]

    def rate_of(self, number: int) -> float:
        """Return the learning rate of a member at the start."""
        return self.rates[number // len(self.arms) % len(self.rates)]

    def seed_of(self, number: int) -> int:
        """Return the seed of a member."""
        return number // (len(self.arms) * len(self.rates))

    @property
    def member_seeds(self) -> list[int]:
        """The seeds of this rank's members, for the order of their data."""
        return [self.seed_of(number) for number in self.population.numbers]

    def make_member(self, number: int) -> nn.Module:
        """Return the architecture with the weights of a seed."""
        return self.network.fresh(self.seed_of(number))

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Make the default optimizer: SGD without momentum."""
        return torch.optim.SGD(parameters, lr=self.rates[0])

    def configure_optimizers(self) -> Any:
        """Make one optimizer, with a group of parameters for each learning rate."""
        if hasattr(self, "nothing"):
            return super().configure_optimizers()
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter, owner in zip(self.population.trainable(), self.population.owners(), strict=True):
            assert owner is not None  # members are run one by one
            groups.setdefault(self.rate_of(owner), []).append(parameter)
        optimizer = make_optimizer(self, [{"params": own, "lr": rate} for rate, own in groups.items()])
        scheduler = make_scheduler(self.lr_scheduler, optimizer, self, self.lr_scheduler_interval)
        return scheduled(self, optimizer, scheduler, self.lr_scheduler_interval)

    def identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the run that loads it must share."""
        return {**super().identity(), "arms": self.arms, "rates": self.rates}
