"""Train many networks with shared frozen bottom layers in one fit."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sym._tags import MOST_CURVES, details, overview, tag
from lightning_sym.networks import Network
from lightning_sym.population import LoopPopulation, Population
from lightning_sym.stitching import CutNetwork, StitchedNetwork
from lightning_sym.tasks._members import ZooUserTask
from lightning_sym.tasks.metrics import PopulationClassification, PopulationLoss
from lightning_sym.tasks.population_interface import ByMember, Rows

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BranchPopulation(LoopPopulation):
    """Branches as the members of a population, with their trainable parameters.

    Args:
        branches: The networks; their numbers are their places.
        names: Their names, which seed dropout.
        lowers: The cut networks, by key.
        lower_of: The key of each branch's bottom layers.
        channels_last: Lay images out with the channels last.
    """

    def __init__(
        self,
        branches: Sequence[StitchedNetwork],
        names: Sequence[str],
        lowers: Mapping[str, CutNetwork],
        lower_of: Sequence[str],
        *,
        channels_last: bool = False,
    ) -> None:
        super().__init__(lambda index: branches[index].trained, range(len(branches)), channels_last=channels_last)
        self._parts = tuple(branches), dict(lowers), tuple(lower_of)  # in a tuple: frozen parts are not registered
        self._names = tuple(names)

    def train(self, mode: bool = True) -> "BranchPopulation":
        """Set the mode of all branches."""
        super().train(mode)
        for branch in self._parts[0]:
            branch.train(mode)
        return self

    def prepared(self, inputs: Tensor) -> dict[str, dict[str, tuple[Any, ...]]]:
        """Compute the values at each cut of all bottom layers, without gradients."""
        images = super().prepared(inputs)
        return {key: cut.values(images) for key, cut in self._parts[1].items()}

    def run_member(self, number: int, prepared: Any) -> Tensor:
        """Compute the logits of a branch, ``[B, K]``, from the values at the cuts."""
        branches, _, lower_of = self._parts
        return branches[number].stitched(prepared[lower_of[number]][branches[number].site])

    def random_key(self, number: int) -> str:
        """Return the branch's name, which does not depend on other branches as its number does."""
        return self._names[number]

    def penalty(self, number: int) -> Tensor:
        """Return the regularisers of a branch's maps."""
        return self._parts[0][number].regularization()

    def member_state(self, number: int) -> dict[str, Tensor]:
        """Return copies of a branch's trained parameters and its buffers."""
        branch = self._parts[0][number]
        frozen = _frozen(branch)
        return {name: value.detach().clone() for name, value in branch.state_dict().items() if name not in frozen}

    def set_member_state(self, number: int, state: Mapping[str, Tensor]) -> None:
        """Give a branch other trained parameters and buffers."""
        branch = self._parts[0][number]
        missing, unexpected = branch.load_state_dict(dict(state), strict=False)
        if unexpected or set(missing) - _frozen(branch):
            raise ValueError(f"The kept state of branch {number} does not fit; use the settings of that run.")


def _frozen(branch: StitchedNetwork) -> set[str]:
    return {name for name, parameter in branch.named_parameters() if not parameter.requires_grad}


class BranchTask(ZooUserTask):
    """Train many :class:`lightning_sym.stitching.StitchedNetwork` s, the branches, on shared bottom layers.

    Each batch runs the bottom layers once for all branches that share them; then each branch is run from its cut.
    Gradients are taken branch by branch, so that the memory is that of one branch. Branches are the
    members of a population: see :class:`lightning_sym.tasks.PopulationTask`.

    A subclass sets the following attributes in :meth:`build`.

    Args:
        optimizer: Makes one optimizer for all branches, from parameters or groups of them.
        lr_scheduler: Makes its scheduler, stepped after each epoch.
        channels_last: Lay images and weights out with the channels last: the same numbers up to rounding, often faster.
        allow: Your own packages with networks of the zoo, see ``ModelZoo.open``.
        weight_decay_on: ``"all"`` parameters but those of maps that must not decay; or ``"weights"``: no biases either.

    Attributes:
        branches: The networks; after ``setup``.
        names: Their names, for logs and checkpoints.
        lowers: The cut networks, by key.
        lower_of: The key of each branch's bottom layers.
        members: Whole networks, by key, which are evaluated with the branches.
    """

    population: BranchPopulation

    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None,
        channels_last: bool,
        allow: Sequence[str] | None,
        weight_decay_on: Literal["all", "weights"] = "all",
    ) -> None:
        super().__init__(optimizer=optimizer, lr_scheduler=lr_scheduler, weight_decay_on=weight_decay_on)
        self.channels_last = channels_last
        self.allow = tuple(allow or ())
        self.names: list[str] = []
        self.branches: tuple[StitchedNetwork, ...] = ()
        self.lowers: dict[str, CutNetwork] = {}
        self.lower_of: list[str] = []
        self.members: dict[str, Network] = {}
        self._statistics: list[dict[str, Tensor]] | None = None  # from before a recalibration

    # ---- methods of subclasses

    @abstractmethod
    def build(self) -> None:
        """Open zoos and set ``names``, ``branches``, ``lowers``, ``lower_of`` and ``members``."""

    def held(self) -> list[nn.Parameter]:
        """Return the parameters that are fixed in this epoch."""
        return []

    @abstractmethod
    def label(self, index: int) -> tuple[str, str]:
        """Return the place and the kind of a branch; penalties are averages over both."""

    def references(self, index: int) -> list[str]:
        """Return the keys of the members that a branch is compared with: that of its bottom layers."""
        return [self.lower_of[index]]

    @property
    def cuts(self) -> list[CutNetwork]:
        """All cut networks; they follow the task from device to device."""
        return list(self.lowers.values())

    # ---- branches as members

    @property
    def numbers(self) -> list[int]:
        """The branches' places."""
        return list(range(len(self.branches)))

    def make_population(self, numbers: list[int]) -> Population:
        """Return the branches as a population."""
        return BranchPopulation(self.branches, self.names, self.lowers, self.lower_of, channels_last=self.channels_last)

    def make_metric(self, split: str) -> PopulationLoss:
        """Make the metric: losses of branches in training; otherwise also accuracies, and those of whole members."""
        if split == "train":
            return PopulationLoss(len(self.branches))
        return PopulationClassification(len(self.branches) + len(self.members))

    def identity(self) -> dict[str, Any]:
        """Return the names of the branches."""
        return {"branches": list(self.names)}

    def member_title(self, number: int) -> str:
        """Return a branch's name."""
        return self.names[number]

    def tag(self, split: str, quantity: str, number: int) -> str:
        """Return for example ``pair-0-1/activation1/full/val_accuracy``."""
        return tag(self.names[number], f"{split}_{quantity}")

    shown = "train/loss"

    @property
    def charts(self) -> dict[str, str]:
        """Penalties by kind, and the training loss."""
        return {"validation penalty by kind": "penalty/[^/]+$", "training loss": "train/loss$"}

    def summary(self, split: str, running: ByMember, values: Rows) -> dict[str, float]:
        """Return the mean training loss, or :meth:`quantities`."""
        if split == "train":
            losses = running["loss"].values()
            return {"train/loss": math.fsum(losses) / len(losses)} if losses else {}
        return self.quantities(values, split)

    def each(self, split: str, running: ByMember, values: Rows) -> dict[str, float]:
        """Return the values of branches, and of the members."""
        members = {name: zip(self.members, row[len(self.branches) :], strict=False) for name, row in values.items()}
        return super().each(split, running, values) | {
            f"member-{key}/{split}_{name}": value for name, pairs in members.items() for key, value in pairs
        }

    def penalties(self, accuracies: Sequence[float]) -> list[float]:
        """Return the penalty of each branch, a fraction: the mean accuracy of its references, less its own.

        Args:
            accuracies: Accuracies of branches, then of members, as :meth:`evaluate` gives them.

        References:
            Godfrey et al. (2022), arXiv:2205.14258, section 3.3 for rotations and eq. 4.3 for stitches.
        """
        clean = dict(zip(self.members, accuracies[len(self.branches) :], strict=True))
        references = ([clean[key] for key in self.references(index)] for index in self.numbers)
        return [sum(ones) / len(ones) - own for ones, own in zip(references, accuracies, strict=False)]

    def quantities(self, metrics: Mapping[str, list[float]], split: str) -> dict[str, float]:
        """Return the mean penalties of running branches, by kind, and by place and kind.

        The penalties of a place are details if nothing is trained there, as they are constant, or if there are many:
        half a page is reserved for the curves of the zoo.
        """
        prefix = "penalty" if split == "val" else f"{split}_penalty"
        kinds: dict[str, list[float]] = {}
        trained: dict[str, list[float]] = {}
        still: dict[str, list[float]] = {}
        for index, penalty in enumerate(self.penalties(metrics["accuracy"])):
            if math.isfinite(penalty):
                place, kind = self.label(index)
                at = trained if self.parameters_of(index) else still
                at.setdefault(tag(prefix, place, kind), []).append(penalty)
                kinds.setdefault(tag(prefix, kind), []).append(penalty)
        return overview(_means(trained), _means(kinds), MOST_CURVES // 2) | details(_means(still))

    def undecayed_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have no weight decay; maps say which of theirs do not."""
        maps = [module for branch in self.branches for module in branch.stitching_maps]
        return [*super().undecayed_parameters(), *(p for module in maps for p in module.undecayed_parameters())]

    def parameters_of(self, index: int) -> list[nn.Parameter]:
        """Return the trained parameters of a branch."""
        return self.population.member_parameters(index)

    @property
    def skipped(self) -> frozenset[int]:
        """Branches that training does not run: those known to be stopped, and those with nothing to train."""
        return super().skipped.union(index for index in self.numbers if not self.parameters_of(index))

    # ---- training

    def to_device(self, device: torch.device) -> None:
        """Move branches and frozen networks."""
        dtype = self.dtype if isinstance(self.dtype, torch.dtype) else None
        networks: list[nn.Module | CutNetwork] = [*self.branches, *self.members.values(), *self.cuts]
        for network in networks:
            network.to(device=device, dtype=dtype)
            if self.channels_last:
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def on_fit_start(self) -> None:
        """Move the frozen networks to the device."""
        super().on_fit_start()
        self.to_device(self.device)
        self.end_evaluation()

    def teardown(self, stage: str) -> None:
        """Bring the frozen networks back to the CPU, where Lightning brings the maps."""
        self.to_device(torch.device("cpu"))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Drop the gradients of stopped branches and of fixed parameters."""
        super().on_before_optimizer_step(optimizer)
        for parameter in self.held():
            parameter.grad = None

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then project all maps: after real steps only, not while gradients accumulate."""
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for index, branch in enumerate(self.branches):
                if index in self.stopping.records:
                    continue
                try:
                    branch.project()
                except ValueError:  # a matrix that is not finite has no nearest doubly stochastic one
                    if not self._stop_unless_finite(index):
                        raise

    def _stop_unless_finite(self, index: int) -> bool:
        """Stop a branch if its weights, the same on all ranks, are not finite; return whether it was stopped.

        Weights with overflowing squares count as not finite: batch norms hide them in training, but have no statistics.
        """
        finite = all(bool(parameter.square().sum().isfinite()) for parameter in self.parameters_of(index))
        if not finite and index not in self.stopped:
            self.stop(index, "its weights are not finite, or overflow when squared")
        return not finite

    # ---- evaluation

    def begin_evaluation(self) -> None:
        """Prepare all branches for evaluation: hard maps, and running statistics averaged over ranks."""
        self.to_device(self.trainer.strategy.root_device)
        for index, branch in enumerate(self.branches):
            # A permutation cannot be rounded if it is not finite.
            if index not in self.stopped and not self._stop_unless_finite(index):
                branch.set_mode("hard")
        super().begin_evaluation()

    def end_evaluation(self) -> None:
        """Prepare all branches for training."""
        self.population.train()
        for branch in self.branches:
            branch.set_mode("soft")

    def on_validation_model_eval(self) -> None:
        """Prepare the branches, and remember the statistics that a recalibration may replace."""
        super().on_validation_model_eval()
        self._statistics = [_batch_statistics(branch) for branch in self.branches]

    def shared_buffers(self) -> list[Tensor]:
        """Return the running statistics that training changes."""
        return [
            getattr(module, name)
            for branch in self.branches
            if branch.batch_norm == "batch"
            for module in branch.batch_norms().values()
            for name in ("running_mean", "running_var")
        ]

    def agree(self) -> None:
        """Average the statistics over ranks, and copy rank 0's buffers of maps to all."""
        super().agree()
        if self.trainer.world_size == 1:
            return
        device = self.trainer.strategy.root_device  # that of the process group, also after a fit
        for branch in self.branches:
            for buffer in branch.maps.buffers():
                values = buffer.to(device)
                torch.distributed.broadcast(values, 0)
                buffer.copy_(values)

    def evaluate(self, batches: Iterable[Any], metric: PopulationLoss | None = None) -> dict[str, list[float]]:  # type: ignore[override]
        """Evaluate all branches, and the members; see :meth:`PopulationTask.evaluate`.

        Returns:
            ``accuracy`` and ``loss``: of the branches, then of the members; NaN for stopped branches. The same on every
            rank.
        """
        return {name: value.tolist() for name, value in super().evaluate(batches, metric).items()}

    def add_evaluation(self, metric: PopulationLoss, inputs: Tensor, targets: Any) -> None:
        """Add one batch to a metric, of all branches that were not stopped and of the members."""
        super().add_evaluation(metric, inputs, targets)
        if self.members:
            images = LoopPopulation.prepared(self.population, inputs)
            rows = torch.arange(len(self.branches), len(self.branches) + len(self.members), device=inputs.device)
            metric.update(rows, torch.stack([network(images) for network in self.members.values()]), targets)

    # ---- kept weights

    def keep_weights(self, values: Mapping[str, list[float]]) -> None:
        if not values:
            for index in self.numbers:
                self._stop_unless_finite(index)
        super().keep_weights(values)

    def state_to_keep(self, number: int) -> dict[str, Tensor]:
        """Return a branch's state, with statistics as training left them, not as recalibrated for this validation."""
        statistics = self._statistics[number] if self._statistics is not None else {}
        return super().state_to_keep(number) | statistics

    def member_records(self) -> dict[int, Any]:
        """Return the statistics of the branches."""
        return {
            index: {name: value.cpu() for name, value in _batch_statistics(branch).items()}
            for index, branch in enumerate(self.branches)
        }

    def load_member_records(self, records: Mapping[int, Any]) -> None:
        """Take back the statistics."""
        for index, statistics in records.items():
            norms = self.branches[index].batch_norms()
            for name, value in statistics.items():
                module, _, part = name.rpartition(".")
                getattr(norms[module], part).copy_(value)

    # ---- recalibration, see lightning_sym.callbacks.BatchNormRecalibration

    def recalibration_targets(self, exact: bool = False) -> list[tuple[nn.Module, list[str]]]:
        """Return the networks for recalibration, with the names of their batch norms.

        All branches at once, with one pass through shared bottom layers; for exact statistics, where a pass ends at
        each batch norm, one by one.
        """
        running = [branch for index, branch in enumerate(self.branches) if index not in self.stopped]
        if exact:
            return [(branch, list(branch.batch_norms())) for branch in running if branch.batch_norms()]
        names = [f"branches.{i}.{name}" for i, branch in enumerate(running) for name in branch.batch_norms()]
        keys = [key for index, key in enumerate(self.lower_of) if index not in self.stopped]
        return [(_Together(self.lowers, running, keys), names)] if names else []


def _batch_statistics(branch: StitchedNetwork) -> dict[str, Tensor]:
    return {
        f"{name}.{part}": getattr(module, part).clone()
        for name, module in branch.batch_norms().items()
        for part in _STATISTICS
    }


class _Together(nn.Module):
    """All branches on their bottom layers, for one pass that measures the statistics of all."""

    def __init__(
        self, lowers: Mapping[str, CutNetwork], branches: Sequence[StitchedNetwork], keys: Sequence[str]
    ) -> None:
        super().__init__()
        self._lowers, self._keys = lowers, keys
        self.branches = nn.ModuleList(branches)

    def forward(self, images: Tensor) -> None:
        values = {key: cut.values(images) for key, cut in self._lowers.items()}
        for branch, key in zip(self.branches, self._keys, strict=True):
            assert isinstance(branch, StitchedNetwork)
            branch.stitched(values[key][branch.site])


def _means(values: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: math.fsum(of_all) / len(of_all) for name, of_all in values.items()}
