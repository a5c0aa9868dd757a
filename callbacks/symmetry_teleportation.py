"""Symmetry teleportation: networks in training move along their orbits."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from lightning_sym._checks import check_integers
from lightning_sym._distributed import gathered
from lightning_sym._random import derive_seed
from lightning_sym._tags import details
from lightning_sym.callbacks._checks import has_members, network_of, on_first_rank
from lightning_sym.callbacks._waiting import said_if_long
from lightning_sym.callbacks.symmetry_monitor import first_input, known_example
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.orbit import OBJECTIVES, Objective, Teleportation, Teleported, Way, objective_named
from lightning_sym.population import LoopPopulation
from lightning_sym.symmetry import Symmetry, trace_symmetry

_LOGGED = {"before": "objective_before", "after": "objective_after", "seconds": "seconds"}

_TOGETHER = (
    'SymmetryTeleportation moves members one by one, but these are run in one vectorised call; set execution="loop".'
)


class SymmetryTeleportation(Callback):
    r"""Move networks along their symmetry orbits at the start of some epochs or steps; their functions stay.

    By default, each move takes a few steps that enlarge the squared norm of the gradient. With ``way="balance"`` and
    ``every_n_steps``, training is confined to canonical weights: those of least norm, where the incoming and outgoing
    norms of all units agree. The callback moves the optimiser's state as well, or resets it. It also keeps the function
    in training mode: it holds scales before batch norms and matrices through these. Where it moves the state, it also
    holds shifts, and to balance it holds matrices. It computes the objective on the first training images of the
    datamodule, without augmentation; without such a datamodule, on the first batch of the epoch.

    It logs ``<prefix>/objective_before``, ``.../objective_after`` and ``.../seconds``, with ``arm`` as
    ``<prefix>/<arm>/...``: for a population the means over members, and single members as details. With
    ``every_n_steps`` it logs the moves at multiples of the trainer's ``log_every_n_steps``. The callback has no
    state: a resumed run moves at the same epochs and steps. Processes that share out the data all apply the element of
    rank 0.

    Args:
        epochs: The epochs, counted from 0, before which networks move; by default 1, unless `every_n_steps` is given.
        way: "ascent" or "descent" of the objective, "balance" (to the least squared norm of all weights, without data),
            a "random" element, or "none" (to reset the optimiser only).
        objective: Name of an objective (:data:`lightning_sym.orbit.OBJECTIVES`), or an objective.
        options: Its options, if it is given by name; by default the cross-entropy is the loss of those that have one.
        factors: The kinds of coordinates that move, see :func:`lightning_sym.orbit.minimize_on_orbit`.
        max_steps: Steps of each move. >= 1.
        budget: Bound of the absolute logarithms of scales and singular values in one move; > 0. Not used to balance.
        reset_state: Whether a move clears the optimiser's state. Matrices and rotations cannot move second moments: set
            this for Adam if these move.
        images: Number of training images for the objective. >= 1.
        members: Members of a population that move: ``"all"`` or their indices.
        arm: Instead of ``members``, those of one arm of a :class:`lightning_sym.tasks.TeleportationTask`.
        network: The attribute of the LightningModule that holds the network, with dots for attributes of attributes;
            ``""`` is the LightningModule itself. Not used for a population.
        prefix: First part of the logged names.
        every_n_steps: Networks move before the first step and then after each number of this many steps. >= 1.

    Raises:
        TypeError: If epochs are no list.
        ValueError: If an argument is out of range, there is no such objective, or both `epochs` and `every_n_steps` are
            given.

    References:
        Zhao, Dehmamy, Walters, Yu (2022), "Symmetry Teleportation for Accelerated Optimization", arXiv:2205.10637.
        Stock, Graham, Gribonval, Jégou (2019), "Equi-normalization of Neural Networks", arXiv:1902.10416, balances the
        weights after each step of SGD.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        epochs: list[int] | None = None,
        way: Way = "ascent",
        objective: str | Objective = "gradient_norm",
        options: dict[str, Any] | None = None,
        factors: str | list[str] = "all",
        max_steps: int = 10,
        budget: float = 1.0,
        reset_state: bool = False,
        images: int = 256,
        members: Literal["all"] | list[int] = "all",
        arm: str | None = None,
        network: str = "network",
        prefix: str = "teleportation",
        every_n_steps: int | None = None,
    ) -> None:
        if epochs is not None and every_n_steps is not None:
            raise ValueError(
                f"SymmetryTeleportation takes either epochs or every_n_steps, got {epochs} and {every_n_steps}; "
                "leave one of them out."
            )
        if every_n_steps is not None:
            check_integers(1, every_n_steps=every_n_steps)
        epochs = [1] if epochs is None else epochs
        if not isinstance(epochs, list | tuple):
            raise TypeError(f"epochs must be a list of integers, as [1], got {epochs!r}.")
        for epoch in epochs:
            check_integers(0, epochs=epoch)
        check_integers(1, images=images)
        if isinstance(objective, str):
            if options is None:
                taken = inspect.signature(OBJECTIVES[objective]).parameters if objective in OBJECTIVES else ()
                options = {"loss": "cross_entropy"} if "loss" in taken else {}
            objective = objective_named(objective, **options)
        self.teleportation = Teleportation(way, objective, factors, max_steps, budget, reset_state)
        self.epochs, self.every_n_steps = list(epochs), every_n_steps
        self.images, self.members, self.arm = images, members, arm
        self.network, self.prefix = network, prefix
        self._symmetry: Symmetry | None = None
        self._last = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task.

        Raises:
            ValueError: If there is no such network or arm, or members are run in one vectorised call.
        """
        self._symmetry, self._last = None, -1
        if stage != "fit":
            return
        if not has_members(pl_module):
            network_of(self, pl_module, self.network)
        elif getattr(pl_module, "execution", "loop") == "vmap":
            raise ValueError(_TOGETHER)
        arms = getattr(pl_module, "arms", [])
        if self.arm is not None and self.arm not in arms:
            raise ValueError(
                f"SymmetryTeleportation(arm={self.arm!r}) names an arm of a TeleportationTask, but "
                f"{type(pl_module).__name__} has {', '.join(arms) or 'none'}; leave arm out, or set it to one of these."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Move at the first batch of an epoch, where a resumed run begins as well; or at the first one of a step."""
        if not self._is_due(trainer, batch_idx):
            return
        networks = self._networks(pl_module)
        if self._symmetry is None:
            example = known_example(trainer, pl_module)
            example = first_input(pl_module, batch) if example is None else example
            network = network_of(self, pl_module, "network" if has_members(pl_module) else self.network)
            example = example if isinstance(example, tuple) else (example,)
            self._symmetry = trace_symmetry(network, *example, nullity=False)
        data = self._data(trainer, pl_module, batch)
        with said_if_long(trainer, "SymmetryTeleportation moves networks"):
            found = {number: self._moved(trainer, own, data, number) for number, own in networks.items()}
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.every_n_steps is None or (every and trainer.global_step % every == 0):  # 0 is never
            self._log(trainer, pl_module, found)

    def _is_due(self, trainer: Trainer, batch_idx: int) -> bool:
        """Return whether networks move now: at the first batch of a due step, if several batches share it."""
        if self.every_n_steps is None:
            return not batch_idx and trainer.current_epoch in self.epochs
        step, last = trainer.global_step, self._last
        self._last = step
        return step != last and step % self.every_n_steps == 0

    def _networks(self, pl_module: LightningModule) -> dict[int, nn.Module]:
        """Return the networks of this rank that move, by number."""
        if not has_members(pl_module):
            return {0: network_of(self, pl_module, self.network)}
        task: Any = pl_module
        if not isinstance(task.population, LoopPopulation):  # by execution="auto"
            raise ValueError(_TOGETHER)
        own = [number for number in task.population.numbers if number not in task.skipped]
        if self.arm is not None:
            own = [number for number in own if task.arm_of(number) == self.arm]
        elif self.members != "all":
            own = [number for number in own if number in self.members]
        networks = {number: task.population.network(number) for number in own}
        # A member whose last step overflowed does not move; its next loss stops it.
        return {
            number: network
            for number, network in networks.items()
            if bool(torch.stack([weights.isfinite().all() for weights in network.parameters()]).all())
        }

    def _data(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        """Return inputs and targets for the objective, the same on all ranks."""
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, InMemoryDataModule):
            found = gathered(batch)[0] if trainer.world_size > 1 else batch
            found = tuple(found) if isinstance(found, list) else found  # of a DataLoader
            return pl_module.transfer_batch_to_device(found, pl_module.device, 0)
        inputs, targets = (own[: self.images] for own in data.split_tensors("train"))
        pair = trainer.strategy.precision_plugin.convert_input((data.normalize(inputs), targets))
        pair = pl_module.transfer_batch_to_device(pair, pl_module.device, 0)
        split = getattr(pl_module, "evaluation_batch", None)
        return pair if split is None else split(pair)

    def _moved(self, trainer: Trainer, network: nn.Module, data: Any, number: int) -> Teleported:
        """Move a network; with replicas on all ranks by the element of rank 0."""
        assert self._symmetry is not None
        seed = derive_seed("teleportation", number, trainer.current_epoch)
        optimizer = self._optimizer(trainer, network)
        found: list[Teleported] = []

        def find() -> None:
            assert self._symmetry is not None
            found.append(self.teleportation.found(self._symmetry, network, data, optimizer, seed=seed))

        if trainer.world_size > 1 and not getattr(trainer.lightning_module, "member_parallel", False):
            on_first_rank(trainer, find)
            found = gathered(found)[0]
        else:
            find()
        (move,) = found
        self.teleportation.move(self._symmetry, move.element, network, optimizer)
        return move

    @staticmethod
    def _optimizer(trainer: Trainer, network: nn.Module) -> torch.optim.Optimizer | None:
        """Return the optimiser of a network.

        Raises:
            ValueError: If several train it.
        """
        own = {*network.parameters()}
        found = [
            one for one in trainer.optimizers if any(not own.isdisjoint(group["params"]) for group in one.param_groups)
        ]
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} optimisers train the network, but SymmetryTeleportation moves the state of one; use one."
            )
        return found[0] if found else None

    def _log(self, trainer: Trainer, pl_module: LightningModule, found: Mapping[int, Teleported]) -> None:
        """Log the mean over members, and each member as a detail; values that were not computed are left out."""
        members = has_members(pl_module)
        own = {
            number: {name: value for name in _LOGGED if math.isfinite(value := getattr(one, name))}
            for number, one in found.items()
        }
        if getattr(pl_module, "member_parallel", False):
            own = {number: values for part in gathered(own) for number, values in part.items()}
        if not trainer.is_global_zero:
            return
        prefix = self.prefix if self.arm is None else f"{self.prefix}/{self.arm.replace(' ', '_')}"
        logged = {}
        for name, logged_name in _LOGGED.items():
            values = {number: one[name] for number, one in own.items() if name in one}
            if values:
                logged[f"{prefix}/{logged_name}"] = math.fsum(values.values()) / len(values)
            if members:
                logged |= details({f"{prefix}/{logged_name}/member-{n:04d}": value for n, value in values.items()})
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=max(trainer.global_step - 1, 0))
