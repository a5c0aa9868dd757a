"""Local learning coefficients of a network, or of the members of a population, during or after training."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pytorch_lightning import LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from lightning_sym._checks import check_integers, check_known, check_numbers, check_seeds, not_finite
from lightning_sym.callbacks._batches import TrainingBatches
from lightning_sym.callbacks._checks import loss_of
from lightning_sym.callbacks._monitor import TrainingMonitor
from lightning_sym.landscape import learning_coefficient
from lightning_sym.landscape.langevin import METHODS, Method
from lightning_sym.reports import RunResults
from lightning_sym.reports.learning_coefficients import coefficient_record, coefficient_results, refused_record
from lightning_sym.reports.report import counted, over_members, picked
from lightning_sym.zoo import versions

_NEVER = 2**62  # epochs between two points, to measure only the end
_SETTINGS = (
    "chains",
    "steps",
    "burn_in",
    "inverse_temperature",
    "localisation",
    "step",
    "method",
    "batch_size",
    "execution",
    "seed",
)


class LearningCoefficient(TrainingMonitor):
    r"""Estimate the local learning coefficient of a network during or after training.

    :func:`lightning_sym.landscape.learning_coefficient` defines the estimate, which exists only if the chains are
    stationary. Chains run on all training data without augmentation: the ``curvature_dataloader()`` of a datamodule,
    otherwise the training set in index order. The data are read twice to check that they are constant, and held in
    memory. With several processes each runs its share of the chains of every member.

    In a task with several networks, such as a :class:`lightning_sym.tasks.ZooTask`, each watched member has an
    estimate, at its current weights. Any other module is one network, the attribute ``network``.

    Logged at each point, for networks with an estimate: ``learning_coefficient/estimate`` (the mean over members,
    and ``details/.../member-0003``); always ``learning_coefficient/refused``, the number of networks without one. At
    the end, on rank 0, in ``results``: ``learning_coefficient.csv`` and ``.json`` (a row per point and network:
    estimate, standard error, verdict, settings), ``learning_coefficient_traces.csv`` and ``.json`` and ``.png`` (the
    chains), and ``learning_coefficient.png`` (in TensorBoard under ``figures/LearningCoefficient``). A table is
    printed.

    Training is bitwise unaffected: the callback samples a copy and draws no random number of training. Checkpoints hold
    the results, so that a resumed run continues them.

    Args:
        every_n_epochs: Epochs between two estimates, >= 1. None: at the end only. The start has none; with
            ``max_epochs=0`` the given weights have one.
        members: Members of a task with several networks to watch: ``"all"`` or their indices.
        network: The attribute of the LightningModule that holds the network, with dots for attributes of attributes;
            ``""`` is the LightningModule itself. Not used for a task with several networks.
        loss: Called with outputs and targets; the mean over samples, a scalar. Default the module's ``loss``,
            ``loss_function``, ``criterion`` or ``loss_fn``.
        chains: As the next ten, see :func:`lightning_sym.landscape.learning_coefficient`; default 8, and more for
            small networks if 8 do not suffice.
        steps: Steps of each chain, the burn-in included.
        burn_in: Discarded initial steps, at least half; default half.
        inverse_temperature: :math:`nb`; default :math:`n / \ln n`.
        localisation: :math:`\gamma`; default :math:`nb / 100`.
        step: :math:`\eta`; default from the curvature.
        method: ``"underdamped"`` or ``"sgld"``.
        batch_size: Samples of each gradient; default all.
        execution: ``"vmap"`` or ``"loop"``.
        seed: Seed of the chains.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
        prefix: First part of all names instead of ``learning_coefficient``; two of these callbacks in one fit need
            different prefixes.

    Raises:
        ValueError: If an argument is out of range.
    """

    shown_first: ClassVar[Mapping[str, str]] = {"learning coefficient, and how many have none": "(estimate|refused)"}

    def __init__(
        self,
        every_n_epochs: int | None = None,
        members: Literal["all"] | list[int] = "all",
        network: str = "network",
        loss: Callable[[Any, Any], Any] | None = None,
        chains: int | None = None,
        steps: int = 2000,
        burn_in: int | None = None,
        inverse_temperature: float | None = None,
        localisation: float | None = None,
        step: float | None = None,
        method: Method = "underdamped",
        batch_size: int | None = None,
        execution: Literal["vmap", "loop"] = "vmap",
        seed: int = 0,
        dirpath: str | None = None,
        prefix: str = "learning_coefficient",
    ) -> None:
        often = _NEVER if every_n_epochs is None else every_n_epochs
        super().__init__(often, None, members, network, dirpath, prefix)
        check_integers(3, optional=True, chains=chains)
        check_integers(8, steps=steps)
        check_seeds(seed=seed)
        if burn_in is not None and not steps <= 2 * burn_in + 1 <= 2 * steps:
            raise ValueError(f"burn_in must be at least half of steps={steps} and less than all, got {burn_in!r}.")
        optional = {"inverse_temperature": inverse_temperature, "step": step}
        check_numbers("> 0", **{name: value for name, value in optional.items() if value is not None})
        check_numbers(">= 0", optional=True, localisation=localisation)
        check_integers(optional=True, batch_size=batch_size)
        check_known("method", method, METHODS)
        check_known("execution", execution, ("vmap", "loop"))
        self.loss = loss
        self.chains, self.steps, self.burn_in = chains, steps, burn_in
        self.inverse_temperature, self.localisation, self.step = inverse_temperature, localisation, step
        self.method, self.batch_size, self.execution, self.seed = method, batch_size, execution, seed
        self._data: list[Any] = []
        self._found: RunResults | None = None

    def settings(self, members: list[int]) -> dict[str, Any]:
        """Return the settings that a checkpoint and the resumed run must share."""
        return {"members": members, **picked(self, *_SETTINGS)}

    # ---- the data

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the data, and begin.

        Raises:
            TypeError: If the training data have no fixed order.
            ValueError: If there is no such network or no loss, or the data change between two passes.
        """
        self.network_of(pl_module)  # raises an error if there is none
        loss_of(self, pl_module, self.loss)  # raises an error if there is none
        self._found = None
        self._data = TrainingBatches(self, trainer, pl_module).of_all()
        self.begin(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release the data."""
        self._data = []

    # ---- points

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the results of each network, on every rank; empty before the first step of a training."""
        if trainer.global_step == 0 and trainer.max_epochs != 0:
            return {"networks": {}}
        # Each member is on one rank, but all ranks run chains of all members.
        states = self.states(trainer, pl_module)
        return {"networks": {number: self._one(trainer, pl_module, state) for number, state in states.items()}}

    def _one(self, trainer: Trainer, pl_module: LightningModule, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the result of one network."""
        if not_finite(state):
            return refused_record("its weights are not finite.")
        network, loss = self.copied(trainer, pl_module, state), loss_of(self, pl_module, self.loss)
        arguments = picked(self, *_SETTINGS)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(trainer.strategy.root_device.type, enabled=False),
        ):
            return coefficient_record(learning_coefficient(network, self._data, loss, **arguments))

    def scalars(self, point: Mapping[str, Any], *, named: bool) -> dict[str, float]:
        """Return the estimates, and the number of networks without one."""
        found = {number: one["values"]["estimate"] for number, one in point["networks"].items()}
        if not found:
            return {}
        values = {number: value for number, value in found.items() if value is not None}
        refusals = {f"{self.prefix}/refused": float(len(found) - len(values))}
        return refusals | over_members({f"{self.prefix}/estimate": values}, named=named)

    # ---- the end

    def results(self, network: str, members: list[int]) -> RunResults:
        """Return the tables and the figures."""
        entries = [
            ({"epoch": point["epoch"], "training_step": point["step"], "network": self._name(number, members)}, record)
            for point in self.points
            for number, record in point["networks"].items()
        ]
        about = {"architecture": network, "settings": self.settings(members), "versions": versions()}
        title = network if len(members) == 1 else f"{counted(len(members), 'member')}, {network}"
        self._found = coefficient_results(entries, title=title, about=about, name=self.prefix)
        return self._found

    def _name(self, number: int, members: list[int]) -> str:
        return f"member-{number:04}" if len(members) > 1 or self.members != "all" else "network"

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the summary, after the progress bar has closed; without any epoch, first measure the given weights."""
        if self.active and trainer.max_epochs == 0:  # Lightning calls no hook of the training then
            self.on_train_start(trainer, pl_module)
        super().on_fit_end(trainer, pl_module)
        if self.active and self._found is not None:
            self._found.show(Console(), self.path, self._run)
