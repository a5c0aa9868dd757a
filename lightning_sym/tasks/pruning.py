"""Pruning the members of a zoo on their Rashomon sets: as few units as the loss on the training data allows."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_sym._checks import check_different
from lightning_sym._distributed import device_of
from lightning_sym.landscape.pruning import (
    MagnitudePruning,
    Pruning,
    PruningSettings,
    check_below,
    mean_loss,
    units_in,
)
from lightning_sym.landscape.units import RemovableUnits, Removed, removable_units
from lightning_sym.networks import Network, recalibrate_batch_norm
from lightning_sym.networks.narrowing import Axis
from lightning_sym.population import LoopPopulation, Population
from lightning_sym.symmetry import Symmetry, trace_symmetry
from lightning_sym.tasks._members import ZooUserTask, example_input
from lightning_sym.tasks.population_interface import ByMember, Rows
from lightning_sym.zoo import ModelZoo


class PrunedPopulation(LoopPopulation):
    """Networks of one architecture, each without some of its units: a member runs the smaller network.

    Parameters keep their whole size.

    Args:
        units: Units of the architecture.
        make: Returns the whole network of a member.
        numbers: The members' numbers.
        channels_last: Keep four-dimensional tensors in ``torch.channels_last`` layout.

    Attributes:
        removed: Returns the removed units of a member, by axis group.
    """

    def __init__(
        self,
        units: RemovableUnits,
        make: Callable[[int], nn.Module],
        numbers: Sequence[int],
        *,
        channels_last: bool = False,
    ) -> None:
        super().__init__(make, numbers, channels_last=channels_last)
        self.units = units
        self.removed: Callable[[int], Removed] = lambda number: {}
        # By number: removed units, kept units, and a network of that shape. Weights are those of the whole network.
        self._small: dict[int, tuple[Removed, Mapping[Axis, Tensor], nn.Module]] = {}

    def run_member(self, number: int, prepared: Any) -> Any:
        """Return the outputs of a member's smaller network."""
        whole, removed = self._member(number), self.removed(number)
        if number not in self._small or self._small[number][0] != removed:
            places = {axis: positions.to(device_of(whole)) for axis, positions in self.units.kept(removed).items()}
            self._small[number] = copy.deepcopy(removed), places, self.units.without(whole, removed).to("meta")
        _, kept, small = self._small[number]
        small.train(self.training)
        tensors = self.units.sliced({**dict(whole.named_parameters()), **dict(whole.named_buffers())}, kept)
        return functional_call(small, tensors, (prepared,))


class RashomonPruning(ZooUserTask):
    r"""Prune networks of a zoo: remove units as long as the loss on the training data stays below a threshold.

    The threshold of a network is fixed: the mean loss of the whole network on all training data, without augmentation,
    plus ``epsilon``; the networks below it are its Rashomon set. Each attempt takes the units with the least effect: a
    walk of some optimizer steps on the training loss and a growing penalty on their outgoing weights, then removal. If
    the loss on all training data is then above the threshold, fewer units are tried. If not even one can be removed,
    the network is restored and the next unit is tried. See :class:`lightning_sym.landscape.Pruning` for the order of
    removals. For each loss, batch norm statistics are recomputed on training images, also for the whole network.

    The architecture needs removable units in its symmetry (:func:`lightning_sym.landscape.removable_units`): hidden
    units, channels with their batch norms, channels of residual streams. The result, :meth:`pruned`, has smaller
    tensors under the names of the whole network, and can be saved in a zoo.

    All networks and all values of epsilon are members of one population and see the same batches. With ``magnitude``
    each has a twin that is pruned by magnitude: as many units of every layer, at the same moments, those with the
    smallest product of incoming and outgoing norm; trained for as many steps by the same optimizer.

    The fit ends when nothing more can be removed anywhere; let ``max_epochs`` be large.

    Args:
        zoo: The zoo's folder.
        members: Numbers of the members to prune; ``"all"`` for all.
        epsilon: By how much the loss may exceed that of the whole network, in nats, > 0; or several such numbers, of
            which each member is pruned with every one.
        steps: Length of a walk, in optimizer steps, >= 1.
        penalty: Weight of the squared outgoing weights at the beginning of a walk, > 0.
        penalty_end: The same when the cooldown begins; until then it grows geometrically. >= ``penalty``.
        fraction: Fraction of the remaining units that are tried at once, in ``[0, 1)``; at least one unit. 0 tries
            single units, which takes longer and removes no less.
        tries: Number of failed single units before pruning ends. >= 1.
        cooldown: During which last part of a walk the learning rate falls, linearly to zero, in ``[0, 1]``; 0 keeps it
            constant.
        groups: Names of the axis groups to prune, as in the symmetry's table; default all that can be.
        magnitude: Whether each network has a twin that is pruned by magnitude.
        channels_last: Keep images in ``torch.channels_last`` layout; convolutions of few channels are faster.
        loss: Mean loss of a batch, given outputs and targets; default the cross-entropy.
        optimizer: Makes the optimizer of the walks, which is reset for each; default Adam, learning rate 0.003.
        allow: Your own packages with networks of the zoo, see ``ModelZoo.open``.

    Attributes:
        jobs: Member and epsilon of each network that is pruned; their place is the number in the population, and the
            twins follow.
        prunings: How far each is, by number.
        twins: Measurements of the twins, by the number of the network that they follow: for each number of units,
            those at the end of the last walk with as many.
        units: The units of the architecture.

    Logged whenever units were removed, on rank 0: ``details/<name>/units``, ``.../train_loss``, for instance of
    ``member-0000/epsilon-0.01``; ``units`` is the number over all networks.

    A checkpoint holds the removed units, the walk in progress and the optimizer; a resumed run ends as one that was not
    interrupted.

    Raises:
        ValueError: If an argument is out of range.

    References:
        The loop is from "Finding the Rashomon manifold" (SERI MATS sprint, 2022), docs/theory/pruning.md, 2; trying
        several units at once, and those without a walk that need none, is ours. Magnitudes: Li et al. (2017), "Pruning
        Filters for Efficient ConvNets", arXiv:1608.08710, who take the norm of the incoming weights alone, which
        rescaling changes.
    """

    population: PrunedPopulation
    symmetry: Symmetry
    units: RemovableUnits

    def __init__(
        self,
        zoo: str,
        members: Literal["all"] | list[int] = "all",
        epsilon: float | list[float] = 0.01,
        steps: int = 300,
        penalty: float = 1e-3,
        penalty_end: float = 7.1,
        fraction: float = 0.1,
        tries: int = 3,
        cooldown: float = 0.5,
        groups: Sequence[str] | None = None,
        magnitude: bool = True,
        channels_last: bool = False,
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        allow: Sequence[str] | None = None,
    ) -> None:
        super().__init__(loss=loss, optimizer=optimizer)
        epsilons = list(epsilon) if isinstance(epsilon, Sequence) else [epsilon]
        check_different("epsilon", epsilons, of="numbers > 0")
        self.settings = {
            each: PruningSettings(each, steps, penalty, penalty_end, fraction, tries, cooldown) for each in epsilons
        }
        if members != "all":
            check_different("members", members, of="numbers")
        self.zoo = str(zoo)
        self.members = members
        self.groups = None if groups is None else list(groups)
        self.magnitude = magnitude
        self.channels_last = channels_last
        self.allow = tuple(allow or ())
        self.save_hyperparameters(ignore=["optimizer", "loss"])
        self.save_hyperparameters(self.describe())

        self.jobs: list[tuple[int, float]] = []
        self.prunings: dict[int, Pruning] = {}
        self.twins: dict[int, list[dict[str, float]]] = {}
        self._magnitudes: dict[int, MagnitudePruning] = {}

    # ---- the zoo

    @property
    def zoos(self) -> dict[str, tuple[ModelZoo, int]]:
        """The zoo, with the number of one member; after ``setup``."""
        return {"zoo": (self.model_zoo, self.jobs[0][0])}

    def build(self) -> None:
        """Open the zoo and find the units of its networks."""
        zoo = self.model_zoo
        numbers = zoo.numbers if self.members == "all" else list(self.members)
        self.jobs = [(zoo.member(number).number, epsilon) for number in numbers for epsilon in self.settings]
        first = zoo.load(numbers[0])
        example = example_input(zoo, numbers[0], first, self.data)
        self.symmetry = trace_symmetry(first, example, nullity=False, exchange=False)
        self.units = removable_units(first, example, symmetry=self.symmetry)
        if self.groups is not None:
            self.units.restrict(self.groups)

    def setup(self, stage: str) -> None:
        """Build the networks, on every process.

        Raises:
            TypeError: If the data do not provide all training data.
        """
        super().setup(stage)
        if stage == "fit" and not hasattr(self.data, "curvature_dataloader"):
            raise TypeError(
                f"RashomonPruning measures losses on all training data, and {type(self.data).__name__} has no "
                "curvature_dataloader; use a datamodule of lightning_sym.datamodules."
            )

    # ---- members

    @property
    def numbers(self) -> list[int]:
        """The places of the jobs, then those of their twins."""
        return list(range(len(self.jobs) * (2 if self.magnitude else 1)))

    def job_of(self, number: int) -> int:
        """Return the job that a member of the population is, or is the twin of."""
        return number % len(self.jobs)

    def is_twin(self, number: int) -> bool:
        """Return whether a member of the population is pruned by magnitude."""
        return number >= len(self.jobs)

    def make_member(self, number: int) -> nn.Module:
        """Return a network of the zoo, to be trained."""
        return self.model_zoo.load(self.jobs[self.job_of(number)][0]).requires_grad_().train()

    def make_population(self, numbers: list[int]) -> Population:
        """Return the members, to be run one after the other."""
        return PrunedPopulation(self.units, self.make_member, numbers, channels_last=self.channels_last)

    def configure_model(self) -> None:
        """Make the members and their prunings."""
        super().configure_model()
        if self.prunings:
            return
        for job, (_, epsilon) in enumerate(self.jobs):
            self.prunings[job] = Pruning(
                self.units,
                self.settings[epsilon],
                evaluate=self._train_loss,
                batches=lambda: self._batches("train"),
                describe=self._on_test,
            )
            if self.magnitude:
                self._magnitudes[job], self.twins[job] = MagnitudePruning(self.units), []
        self.population.removed = lambda number: self._holder(number).removed

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Make the optimizer of the walks: Adam."""
        return torch.optim.Adam(parameters, lr=3e-3)

    def identity(self) -> dict[str, Any]:
        """Return the jobs, their settings, and the architecture."""
        return {
            "jobs": [list(job) for job in self.jobs],
            "settings": [vars(settings) for settings in self.settings.values()],
            "magnitude": self.magnitude,
            "units": dict(self.units.sizes),
            "symmetry": self.symmetry.fingerprint,
            "loss": self._loss_name,
        }

    def name(self, number: int) -> str:
        """Return the name of a member in logs and folders: ``member-0000/epsilon-0.01``, twins with a suffix."""
        member, epsilon = self.jobs[self.job_of(number)]
        return f"member-{member:04d}/epsilon-{epsilon:g}" + ("/magnitude" if self.is_twin(number) else "")

    def member_title(self, number: int) -> str:
        """Return the name of a member in messages."""
        member, epsilon = self.jobs[self.job_of(number)]
        twin = "The magnitude twin of member" if self.is_twin(number) else "Member"
        return f"{twin} {member} at epsilon {epsilon:g}"

    def tag(self, split: str, quantity: str, number: int) -> str:
        """Return the tag of a member's value."""
        return f"{self.name(number)}/{split}_{quantity}"

    def _holder(self, number: int) -> Pruning | MagnitudePruning:
        return self._magnitudes[self.job_of(number)] if self.is_twin(number) else self.prunings[number]

    def pruned(self, number: int) -> Network:
        """Return the current smaller network of a member, in evaluation mode, on the CPU."""
        assert isinstance(self.dtype, torch.dtype)
        whole = self.model_zoo.load(self.jobs[self.job_of(number)][0]).to(self.dtype)
        whole.load_state_dict(self.kept[number]["state"])
        small = self._holder(number).small(whole).eval()
        assert isinstance(small, Network)
        return small

    # ---- measurements

    def _batches(self, split: Literal["train", "test"]) -> Iterator[Any]:
        """Yield inputs and targets of all images of a split; of a trial few.

        Yields:
            Batches, inputs in the dtype of the networks.
        """
        loader = self.data.curvature_dataloader() if split == "train" else self.data.test_dataloader()
        trial = int(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        for batch in islice(loader, trial or None):
            inputs, targets = self.evaluation_batch(batch)
            inputs = inputs.to(self.dtype) if inputs.is_floating_point() else inputs
            yield self.population.prepared(inputs), targets

    def _measured(self, network: nn.Module, split: Literal["train", "test"]) -> tuple[float, float | None]:
        loss = self.loss if self._overrides_loss else self.loss_function
        return mean_loss(network, self._batches(split), loss)

    def _train_loss(self, network: nn.Module) -> float:
        recalibrate_batch_norm(network, lambda: self._batches("train"))
        return self._measured(network, "train")[0]

    def _on_test(self, network: nn.Module) -> dict[str, float]:
        loss, error = self._measured(network, "test")
        return {"test_loss": loss} | ({} if error is None else {"test_error": error})

    def check(self, number: int) -> None:
        """Measure the smaller network once more; to be called on every rank.

        Raises:
            RuntimeError: If its loss is above its threshold.
        """
        small = self.pruned(number).to(self.trainer.strategy.root_device)
        check_below(self._measured(small, "train")[0], self.prunings[number].threshold)

    # ---- the fit

    @property
    def active(self) -> list[int]:
        """The running jobs."""
        return [job for job, own in self.prunings.items() if not own.finished and job not in self.stopping.records]

    @property
    def skipped(self) -> frozenset[int]:
        """The members that are not run: those that were stopped or are finished, and their twins."""
        active = set(self.active)
        return super().skipped | {number for number in self.numbers if self.job_of(number) not in active}

    def on_fit_start(self) -> None:
        """Measure the whole networks; a resumed run has the values in its checkpoint."""
        super().on_fit_start()
        self.to_device(self.device)
        for job, pruning in self.prunings.items():
            if not pruning.history:
                pruning.start(self.population.network(job))
                self._follow(job)
                self._note(job)
        self._end_if_done()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Add the penalties' gradients, after all processes have shared theirs."""
        super().on_before_optimizer_step(optimizer)
        active = [self.prunings[job] for job in self.active]
        for group in optimizer.param_groups if active else ():
            # Walks begin and end together, so that one rate is that of all of them.
            group["lr"] = active[0].rate * group.setdefault("initial_lr", group["lr"])
        for job in self.active:
            self.prunings[job].add_gradients(self.population.network(job))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Decide where a checkpoint was written between a walk's last step and the decision."""
        self._decide()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Decide at the end of walks."""
        self._decide()

    def _decide(self) -> None:
        for job in self.active:
            if not self.prunings[job].due or job in self.stopped:
                continue
            self.prunings[job].decide(self.population.network(job))
            self._follow(job)
            self._note(job)
            members = [number for number in self.numbers if self.job_of(number) == job]
            for parameter in [p for number in members for p in self.population.network(number).parameters()]:
                for optimizer in self.trainer.optimizers:
                    optimizer.state.pop(parameter, None)  # every walk is reset
        self._end_if_done()

    def _follow(self, job: int) -> None:
        """Measure the twin, and prune it to the current widths of the job."""
        twin = job + len(self.jobs)
        if not self.magnitude or twin in self.stopped:
            return
        network, magnitude, pruning = self.population.network(twin), self._magnitudes[job], self.prunings[job]
        small = magnitude.small(network)
        loss = self._train_loss(small)
        self.units.write_back(network, small, magnitude.removed)  # with the statistics that were measured
        units = units_in(self.units.sizes) - sum(map(len, magnitude.removed.values()))
        row = {"units": units, "walks": pruning.walks, "loss": loss, **self._on_test(small)}
        self.twins[job] = [other for other in self.twins[job] if other["units"] != units] + [row]
        self.kept[twin] = self._record(loss, network.state_dict())
        if not pruning.finished:
            magnitude.follow(network, {name: len(removed) for name, removed in pruning.removed.items()})

    def _note(self, job: int) -> None:
        """Keep accepted networks, log them, and measure them again at the end."""
        pruning = self.prunings[job]
        step = pruning.history[-1]
        self.kept[job] = self._record(step.loss, pruning.kept)
        self.log_details(
            {f"{self.name(job)}/units": units_in(pruning.widths), f"{self.name(job)}/train_loss": step.loss}
        )
        if pruning.finished:
            self.check(job)

    def _record(self, loss: float, state: Mapping[str, Tensor]) -> dict[str, Any]:
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        epochs = float(self.current_epoch)
        return {"epoch": self.current_epoch, "metrics": {"loss": loss}, "state": state, "epochs": epochs}

    def _end_if_done(self) -> None:
        if not self.active:
            self.trainer.should_stop = True

    def keep_weights(self, values: Mapping[str, list[float]]) -> None:
        """Do nothing: accepted networks are kept already."""

    def summary(self, split: str, running: ByMember, values: Rows) -> dict[str, float]:
        """Return means over networks, and the total number of remaining units."""
        found = super().summary(split, running, values)
        return {**found, "units": float(sum(units_in(pruning.widths) for pruning in self.prunings.values()))}

    shown = "units"

    @property
    def charts(self) -> dict[str, str]:
        """Remaining units, and the training loss."""
        return {"units": "units$", "training loss": "train/loss$"}

    # ---- checkpoints

    def member_records(self) -> dict[int, Any]:
        """Return the progress of each member, by its number."""
        jobs = {job: copy.deepcopy(pruning.state_dict()) for job, pruning in self.prunings.items()}
        twins = {
            job + len(self.jobs): {"removed": copy.deepcopy(own.removed), "rows": copy.deepcopy(self.twins[job])}
            for job, own in self._magnitudes.items()
        }
        return jobs | twins

    def load_member_records(self, records: Mapping[int, Any]) -> None:
        """Take it back."""
        for number, record in records.items():
            if self.is_twin(number):
                job = self.job_of(number)
                self._magnitudes[job].removed, self.twins[job] = record["removed"], record["rows"]
            else:
                self.prunings[number].load_state_dict(record)
