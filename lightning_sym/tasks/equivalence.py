"""Looking for other weights that compute the same function as a given network."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from lightning_sym import landscape
from lightning_sym._checks import check_integers, check_numbers, check_seeds, check_words
from lightning_sym._random import derive_seed, generator
from lightning_sym.networks import Network, NetworkOrModule, WrappedNetwork
from lightning_sym.population import Population
from lightning_sym.symmetry import trace_symmetry
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.tasks._members import given_network
from lightning_sym.tasks._relu_lines import ReluLinePopulation
from lightning_sym.tasks._teachers import Teacher, check_teacher, drawn, load_teacher
from lightning_sym.tasks.losses import SquaredDistance
from lightning_sym.tasks.population import PopulationTask

# Entries of a search in a checkpoint, apart from its candidates.
_SAVED = ("found", "outcomes", "latest", "checks", "round", "round_start")
# Largest number of candidates with separate curves in the loggers.
_MOST_CURVES = 64
# The last weights of every candidate are kept for networks of up to so many parameters.
_SMALL = 10_000


@dataclass(frozen=True, eq=False)
class FoundWeights:
    """Weights that compute nearly the teacher's function.

    Attributes:
        name: ``"candidate 3"`` or ``"orbit 1"``.
        weights: Shape ``[P]``, on the CPU.
        loss: J on the sample that the threshold is on; NaN if not measured.
        held_out: J on the held-out inputs; NaN if not measured.
        steps: Optimizer steps from its initial weights to the check that found it; None for a member of the orbit.
    """

    name: str
    weights: Tensor
    loss: float
    held_out: float
    steps: int | None


class EquivalenceTask(PopulationTask):
    r"""Search weights that compute the function of a frozen teacher: many candidates, trained side by side.

    Every candidate starts from its own initial weights and descends the auxiliary loss

    .. math:: J(\theta) = \frac1N \sum_{x \in C} \lVert \phi(x, \theta) - \phi(x, \theta^*) \rVert_2^2,

    the sum over outputs and the mean over inputs: an estimate of the squared :math:`L_2` distance of the functions. All
    see the same batches; losses add and gradients do not mix. At every validation J is measured on the training inputs
    (where a datamodule draws fresh ones in every step: on the held-out ones) and on the held-out inputs, and a
    candidate is *found* when ``J < tolerance * J0`` and ``R < held_out``: J0 is the J of the zero function, and
    ``R = J / V`` on held-out inputs. V is the J of the best constant: at ``R = 1`` a candidate is no better than a
    constant. The weights of a found candidate with the lowest J are kept. The search ends when
    ``points`` linearly independent ones have been found.

    With ``round_steps`` the candidates that have not been found after so many steps are given up, and all restart
    from other initial weights, up to ``max_rounds`` times. Candidates do not depend on each other.

    The search varies the trainable parameters; buffers are the teacher's, and networks compute as in evaluation
    mode.

    Place the candidates with the trainer: on one process, or on several with ``strategy="ddp_members"``.

    Args:
        network: The architecture. None: that of the zoo.
        members: Candidates that are trained at once, ``R`` >= 1. None: ``8 * points``, as bad minima are common.
        points: Linearly independent points that are wanted, >= 1; ``m + 1`` for a plane of dimension ``m``.
        teacher: The function that is looked for: a seed of initial weights, a file of weights, or the list of all
            weights in the order of ``network.parameters()``. None: seed 0, or the zoo's member.
        zoo: The folder of the teacher's zoo.
        member: The teacher's index in the zoo; None for the first member.
        seed: Seed of the candidates' initial weights, >= 0.
        tolerance: Largest J of a found candidate, in units of J0. > 0.
        held_out: Largest ``R`` of a found candidate on held-out inputs. > 0.
        round_steps: Steps before candidates that have not been found restart; None: never. >= 1. Looked at when
            J is measured.
        max_rounds: How often candidates are started, >= 1.
        stop_when_found: Whether the fit ends when there are enough points.
        milestones: Levels of J in units of J0; the first step with a lower J is recorded. All > 0.
        execution: ``"loop"`` runs one candidate after another, ``"vmap"`` all in one vectorised call; ``"auto"`` is
            loop for networks with convolutions, which are slower vectorised on a CPU, else vmap.
        optimizer: Makes the optimizer; default Adam with its defaults. With ``"vmap"`` it must act entry by entry.
        allow: Your own packages with networks of the zoo, and with modules that ``network`` names on the command line,
            see ``ModelZoo.open``.

    Attributes:
        teacher: The frozen network; after ``setup``.
        scales: J0 and V on the sample of the threshold and on the held-out inputs, by ``"sample"`` and ``"held_out"``.
        found: Found candidates, by number; the same on every rank.
        outcomes: Outcomes of candidates of finished rounds, by number; :meth:`all_outcomes` has all.

    Logged at every validation: ``search/found``, ``search/independent`` (numbers of candidates), ``search/running``,
    quartiles of J over candidates as ``j/lowest``, ``j/lower_quartile``, ``j/median``, ``j/upper_quartile``, the lowest
    ``r/lowest``, and for up to 64 candidates ``details/j/candidate-0003``.

    A checkpoint holds all candidates, found weights, and the state of the rounds.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Lengyel et al. (2020), "GENNI: Visualising the Geometry of Equivalences for Neural Network Identifiability",
        NeurIPS workshop DiffGeo4DL. They stop after a fixed number of steps and compare J with
        thresholds above J0. Hence we use tolerances in units of J0 and the held-out ``R``.
    """

    teacher: Network
    own_batches = False

    def __init__(
        self,
        network: NetworkOrModule | None = None,
        members: int | None = None,
        points: int = 4,
        teacher: Teacher | None = None,
        zoo: str | None = None,
        member: int | None = None,
        seed: int = 0,
        tolerance: float = 1e-10,
        held_out: float = 1e-2,
        round_steps: int | None = None,
        max_rounds: int = 1,
        stop_when_found: bool = True,
        milestones: Sequence[float] = (1e-2, 1e-4, 1e-6, 1e-8),
        execution: Literal["auto", "loop", "vmap"] = "auto",
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        allow: Sequence[str] | None = None,
    ) -> None:
        network = None if network is None else given_network(network, allow)
        check_integers(optional=True, members=members, round_steps=round_steps)
        check_integers(points=points, max_rounds=max_rounds)
        check_seeds(seed=seed)
        check_numbers("> 0", tolerance=tolerance, held_out=held_out)
        check_numbers("> 0", **{f"milestones[{place}]": milestone for place, milestone in enumerate(milestones)})
        check_words(("execution", execution, ("auto", "loop", "vmap")))
        if max_rounds > 1 and round_steps is None:
            raise ValueError(
                f"max_rounds {max_rounds} needs round_steps: the number of steps before candidates restart."
            )
        members = 8 * points if members is None else members
        super().__init__(members, loss=SquaredDistance(), optimizer=optimizer)
        self.seed = seed
        self.execution = execution
        self._template = (network,)  # in a tuple: the template's weights are no part of the task
        self._teacher = check_teacher(teacher, zoo, member, network)
        self.zoo, self._member, self._allow = zoo, member, tuple(allow or ())
        self.members = members
        self.points = points
        self.tolerance = tolerance
        self.held_out = held_out
        self.round_steps = round_steps
        self.max_rounds = max_rounds
        self.stop_when_found = stop_when_found
        self.milestones = [float(value) for value in milestones]
        self.save_hyperparameters(ignore=["network", "optimizer"])
        architecture = None if network is None else network.architecture
        self.save_hyperparameters({"network": architecture, "_class_path": self.describe()["_class_path"]})
        if isinstance(network, WrappedNetwork):
            self.hparams.pop("_instantiator", None)  # Lightning's would make the module without its wrapper

        self.scales: dict[str, landscape.FunctionScale] = {}
        self.found: dict[int, dict[str, Any]] = {}
        self.outcomes: dict[int, dict[str, Any]] = {}
        self.latest: dict[int, dict[str, Any]] = {}  # state of the candidates of this round
        self.checks: list[dict[str, Any]] = []
        self.round = 0
        self.round_start = 0
        self.about_teacher: dict[str, Any] = {}
        self._first_steps = torch.zeros(0)
        self._held_out_sums: list[Tensor] = []

    # ---- teacher and candidates

    @property
    def network(self) -> Network:
        """The architecture."""
        return self._template[0] or self.teacher

    @property
    def slots(self) -> tuple[int, ...]:
        """The places of this rank's candidates among all that are trained at once."""
        return self.population.numbers

    def number(self, slot: int) -> int:
        """Return the number of the candidate in a slot; every round has new numbers."""
        return self.round * self.members + slot

    def configure_model(self) -> None:
        """Load the teacher and make this rank's candidates; on every process."""
        if hasattr(self, "population"):
            return
        self.teacher, self.about_teacher = load_teacher(
            self._teacher, self.zoo, self._member, self._template[0], self._allow
        )
        if self.execution == "auto":
            convolutions = any(isinstance(module, _ConvNd) for module in self.teacher.modules())
            self.execution = "loop" if convolutions else "vmap"
        size = landscape.weight_vector(self.teacher).numel()
        if self.points > size + 1:
            raise ValueError(
                f"{self.points} independent points do not fit into the {size} weights of {type(self.teacher).__name__};"
                f" set points to {size + 1} or less."
            )
        super().configure_model()
        free = {name for name, parameter in self.network.named_parameters() if parameter.requires_grad}
        if {name for name, _ in self.population.named_trainable()} != free:
            raise ValueError(
                "Some parameters of network were frozen, or freed, after its construction, and each candidate is "
                "constructed again; set requires_grad in the constructor of the network."
            )
        self._start_round()

    def make_member(self, number: int) -> Network:
        """Return a network like the teacher; every round gives it other weights."""
        return self.teacher.fresh(number)

    def make_population(self, numbers: list[int]) -> Population:
        """Make this rank's candidates; those of one input without biases have a closed form."""
        if self.execution == "vmap" and landscape.is_relu_line(self.teacher):
            return ReluLinePopulation(self.make_member, numbers)
        return super().make_population(numbers)

    def member_title(self, number: int) -> str:
        """Return the candidate that is now in a slot."""
        return f"Candidate {self.number(number)}"

    def identity(self) -> dict[str, Any]:
        """Return the settings of the search that a checkpoint must share."""
        return {"members": self.members, "execution": self.execution, "teacher": self.about_teacher}

    def initial_state(self, number: int) -> dict[str, Tensor]:
        """Return the weights that a candidate starts from, with the teacher's buffers and frozen parameters."""
        fresh = drawn(self.teacher, derive_seed("candidate", self.seed, number))
        kept = dict(self.teacher.named_buffers(remove_duplicate=False)) | {
            name: parameter
            for name, parameter in self.teacher.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
        }
        return {name: kept.get(name, value) for name, value in fresh.state_dict().items()}

    def _start_round(self) -> None:
        """Give every candidate of this rank new initial weights."""
        for slot in self.slots:
            self.population.set_member_state(slot, self.initial_state(self.number(slot)))
        self.stopping.restart({})
        self._first_steps = torch.full((len(self.milestones), len(self.slots)), -1, dtype=torch.int64)

    def setup(self, stage: str) -> None:
        """Check that the trainer suits a search.

        Raises:
            ValueError: If several processes would share out the data, or precision ties candidates together.
        """
        super().setup(stage)
        if self.trainer.world_size > 1 and not self.member_parallel:
            raise ValueError(
                "On several processes the search shares out its candidates, not the data; use --trainer.strategy "
                "ddp_members."
            )

    def train(self, mode: bool = True) -> "EquivalenceTask":
        """Set the mode; teacher and candidates always compute as in evaluation mode."""
        super().train(mode)
        for name in ("teacher", "population"):
            if hasattr(self, name):
                getattr(self, name).eval()
        return self

    # ---- training

    def on_fit_start(self) -> None:
        """Measure J0 and V.

        Raises:
            ValueError: If there are no held-out inputs, or the teacher is constant on the inputs.
        """
        super().on_fit_start()
        self.train()
        self.scales = {}
        for name, loader in (("sample", self._sample()), ("held_out", self.trainer.datamodule.val_dataloader())):  # type: ignore[attr-defined]
            parts = [self.target(inputs).flatten(1).cpu() for inputs in self._inputs(loader)]
            if not parts:
                raise ValueError(
                    "The search needs held-out inputs, and there are none; set val_fraction (val_samples) above 0."
                )
            outputs = torch.cat(parts)
            self.scales[name] = landscape.FunctionScale.of(outputs)
            if self.scales[name].constant == 0:
                raise ValueError(
                    f"The teacher is constant on the {len(outputs)} {name.replace('_', '-')} inputs, so that J says "
                    "nothing about other functions; choose another teacher, or other inputs."
                )

    def on_train_start(self) -> None:
        """End at once where a run that had found everything is resumed."""
        if self.done:
            self.trainer.should_stop = True

    def _sample(self) -> Any:
        """Return a loader of the inputs that the threshold is on."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if data is None or not hasattr(data, "curvature_dataloader"):
            raise ValueError(
                "The search needs a datamodule with curvature_dataloader, as those of lightning_sym.datamodules; pass "
                "one to trainer.fit(task, datamodule)."
            )
        return data.val_dataloader() if self.fresh_inputs else data.curvature_dataloader()

    @property
    def fresh_inputs(self) -> bool:
        """Whether every step has new inputs, so that there is no fixed training sample."""
        return bool(getattr(getattr(self.trainer, "datamodule", None), "fresh", False))

    def _inputs(self, loader: Any) -> Iterator[Tensor]:
        """Yield a loader's inputs on this rank's device, in the precision of the fit; of a trial few."""
        strategy, trial = self.trainer.strategy, int(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        for batch in islice(loader, trial or None):
            inputs = batch[0] if isinstance(batch, tuple | list) else batch
            yield strategy.precision_plugin.convert_input(inputs.to(strategy.root_device))

    @torch.no_grad()
    def target(self, inputs: Tensor) -> Tensor:
        """Return the teacher's outputs, which no gradient goes through."""
        outputs: Tensor = self.teacher(inputs)
        return outputs

    def evaluation_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return a batch's inputs, ``[B, ...]``, and the teacher's outputs."""
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        return inputs, self.target(inputs)

    def on_losses(self, losses: Tensor, alive: Tensor) -> None:
        """Record the candidates that pass milestones with this batch."""
        if "sample" not in self.scales or not self.milestones:
            return
        levels = torch.tensor(self.milestones, dtype=torch.float64) * self.scales["sample"].zero
        self._first_steps = self._first_steps.to(losses.device)
        below = (losses < levels.to(losses)[:, None]) & alive
        step = self.global_step - self.round_start
        self._first_steps = torch.where(below & (self._first_steps < 0), step, self._first_steps)

    def on_train_epoch_end(self) -> None:
        """Log nothing: J is measured at validations."""
        self.train_metrics.reset()

    # ---- checks

    @torch.no_grad()
    def measure(self, batches: Iterable[Tensor]) -> Tensor:
        """Return J of this rank's candidates on all inputs of ``batches``. Shape ``[r]``, float64, on the CPU."""
        total, count = torch.zeros(len(self.slots), dtype=torch.float64), 0
        for inputs in batches:
            total += self._distances(inputs, self.target(inputs))
            count += len(inputs)
        return total / count

    def _distances(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over a batch of squared distances, by candidate. Shape ``[r]``, float64, on the CPU."""
        differences: Tensor = self.population(inputs) - targets
        return differences.double().square().flatten(1).sum(1).cpu()

    def on_validation_epoch_start(self) -> None:
        """Begin to add up."""
        self._held_out_sums = []
        self._held_out_count = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add up squared distances on held-out inputs."""
        inputs, targets = self.evaluation_batch(batch)
        self._held_out_sums.append(self._distances(inputs, targets))
        self._held_out_count += len(inputs)

    def on_validation_epoch_end(self) -> None:
        """See which candidates are found, log, and end or start a round."""
        if self.trainer.sanity_checking or self.trainer.state.fn != "fit":
            return
        held_out = torch.stack(self._held_out_sums).sum(0) / self._held_out_count
        self._check(held_out)
        self._log_check()
        if self.done:
            self.trainer.should_stop = True
        elif self.round_steps is not None and self.global_step - self.round_start >= self.round_steps:
            if self.round + 1 < self.max_rounds:
                self.outcomes.update(self.latest)
                self.latest = {}
                self.round += 1
                self.round_start = self.global_step
                self._start_round()
                self.optimizers().optimizer.state.clear()  # type: ignore[union-attr]
            elif self.stop_when_found:
                self.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Look once more if training ended between two checks; to be called on every rank."""
        if self.latest and self.checks[-1]["step"] == self.global_step:
            return
        if self.round and self.round_start == self.global_step:  # the last round has not begun
            return
        self.to(self.trainer.strategy.root_device)
        self._check(self.measure(self._inputs(self.trainer.datamodule.val_dataloader())))  # type: ignore[attr-defined]

    def _check(self, held_out: Tensor) -> None:
        """Measure J, keep found weights, and record the state of every candidate; the same on every rank."""
        losses = held_out if self.fresh_inputs else self.measure(self._inputs(self._sample()))
        names = [name for name, parameter in self.teacher.named_parameters() if parameter.requires_grad]
        small = sum(self.teacher.get_parameter(name).numel() for name in names) <= _SMALL
        mine: dict[int, dict[str, Any]] = {}
        for index, slot in enumerate(self.slots):
            number, stopped = self.number(slot), self.stopped.get(slot, {}).get("reason", "")
            entry: dict[str, Any] = {
                "round": self.round,
                "steps": self.global_step - self.round_start,
                "loss": math.nan if stopped else float(losses[index]),
                "held_out": math.nan if stopped else float(held_out[index]),
                "milestones": self._first_steps[:, index].tolist(),
                "stopped": stopped,
            }
            if small or self._improved(number, entry):
                state = self.population.member_state(slot)
                entry["weights"] = torch.cat([state[name].flatten() for name in names]).cpu()
            mine[number] = entry
        self.latest = self.gathered_by_member(mine)
        for number, entry in self.latest.items():
            if self._improved(number, entry):
                first = self.found.get(number, entry)["steps"]
                self.found[number] = {name: entry[name] for name in ("weights", "loss", "held_out")} | {"steps": first}
            if not small:
                entry.pop("weights", None)
        self.checks.append(
            {
                "step": self.global_step,
                "round": self.round,
                "round_step": self.global_step - self.round_start,
                "losses": [entry["loss"] for entry in self.latest.values()],
            }
        )

    def _improved(self, number: int, entry: Mapping[str, Any]) -> bool:
        """Return whether a candidate is found, with a lower J than before if it had been found."""
        before = self.found.get(number, {"loss": math.inf})
        return self._good(entry) and bool(entry["loss"] < before["loss"])

    def _good(self, entry: Mapping[str, Any]) -> bool:
        return bool(
            entry["loss"] < self.tolerance * self.scales["sample"].zero
            and self.scales["held_out"].relative(entry["held_out"]) < self.held_out
        )

    @property
    def done(self) -> bool:
        """Whether enough has been found for the search to end."""
        return self.stop_when_found and len(self.independent_numbers()) >= self.points

    def independent_numbers(self) -> list[int]:
        """Return the numbers of found candidates that are linearly independent: that with the lowest J first."""
        numbers = sorted(self.found, key=lambda number: (self.found[number]["loss"], number))
        if len(numbers) < 2:
            return numbers
        weights = torch.stack([self.found[number]["weights"].double() for number in numbers])
        accepted = landscape.independent(weights[1:] - weights[0])
        return [numbers[0], *(numbers[1 + index] for index in accepted)]

    shown = "j/median"

    @property
    def charts(self) -> dict[str, str]:
        """J over candidates, how many were found, and R of the best one."""
        return {"J": "j/[^/]+$", "candidates": "search/(found|independent)$", "R of the best candidate": "r/lowest$"}

    def _log_check(self) -> None:
        running = [entry for entry in self.latest.values() if math.isfinite(entry["loss"])]
        values: dict[str, float] = {
            "search/found": len(self.found),
            "search/independent": len(self.independent_numbers()),
            "search/running": len(running),
        }
        if not running:
            raise ValueError(
                "All candidates were stopped, as their losses are not finite; lower the learning rate or look at the "
                "inputs."
            )
        losses = torch.tensor([entry["loss"] for entry in running], dtype=torch.float64)
        levels = {"lowest": 0.0, "lower_quartile": 0.25, "median": 0.5, "upper_quartile": 0.75}
        values |= {f"j/{name}": float(losses.quantile(level)) for name, level in levels.items()}
        values["r/lowest"] = min(self.scales["held_out"].relative(entry["held_out"]) for entry in running)
        for name, value in values.items():
            self.log(name, value, prog_bar=name in ("search/found", self.shown))
        if self.members <= _MOST_CURVES:
            self.log_details({f"j/candidate-{number:04d}": entry["loss"] for number, entry in self.latest.items()})

    # ---- results

    def found_points(self) -> list[FoundWeights]:
        """Return the independent points, that with the lowest J first, at most ``points`` of them."""
        numbers = self.independent_numbers()[: self.points]
        return [FoundWeights(f"candidate {number}", **self.found[number]) for number in numbers]

    def all_outcomes(self) -> dict[int, dict[str, Any]]:
        """Return the outcome of every candidate, by number.

        Returns:
            ``round``, ``steps`` since its start, ``loss`` (J), ``held_out`` (J on held-out inputs), ``milestones`` (the
            step of each, -1 if not reached), ``stopped`` (why, or empty), ``found``, and for networks of up to 10,000
            parameters ``weights``, the last ones. As of the last check, the same on every rank.
        """
        entries = {**self.outcomes, **self.latest}
        return {number: {**entry, "found": number in self.found} for number, entry in entries.items()}

    def success_fraction(self) -> float:
        """Return the fraction of candidates that were found, of finished rounds and the current one."""
        return len(self.found) / max(1, len(self.outcomes | self.latest))

    def curves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return J of every candidate over the steps of its round, as measured.

        Returns:
            Steps ``[T]``, int64; J ``[T, C]``, float64, NaN where there is none, for all ``C`` candidates in order of
            their numbers; and which of them were found, ``[C]``, bool.
        """
        steps = sorted({entry["round_step"] for entry in self.checks})
        numbers = sorted(self.outcomes | self.latest)
        losses = torch.full((len(steps), len(numbers)), math.nan, dtype=torch.float64)
        for entry in self.checks:
            first = entry["round"] * self.members
            row = torch.tensor(entry["losses"], dtype=torch.float64)
            losses[steps.index(entry["round_step"]), first : first + len(row)] = row
        return torch.tensor(steps), losses, torch.tensor([number in self.found for number in numbers])

    def describe_teacher(self) -> str:
        """Return a few words for titles: ``"seed 10"``."""
        about = self.about_teacher
        if "zoo" in about:
            return f"member {about['member']} of {Path(about['zoo']).parent.name or about['zoo']}"
        teacher = about["teacher"]
        if isinstance(teacher, int):
            return f"seed {teacher}"
        if isinstance(teacher, str):
            return Path(teacher).name
        return f"({', '.join(f'{weight:g}' for weight in teacher)})" if len(teacher) <= 4 else f"{len(teacher)} weights"

    def title(self) -> str:
        """Return a few words for titles: ``"LeNet5, seed 0"``."""
        line = landscape.is_relu_line(self.teacher)
        units = self.teacher.get_submodule("linear1").out_features if line else 0
        name = f"{units} ReLU units" if line else type(self.teacher).__name__
        return f"{name}, {self.describe_teacher()}"

    def copy_of_teacher(self) -> Network:
        """Return a copy that may be changed, in evaluation mode."""
        return copied(self.teacher).eval()

    def sample_inputs(self) -> Iterator[Tensor]:
        """Yield the inputs that the threshold is on, in batches, in the precision of the fit."""
        return self._inputs(self._sample())

    def held_out_surface(self, dtype: torch.dtype) -> landscape.LossSurface:
        """Return J on all held-out inputs, as a function of weights.

        Args:
            dtype: That the teacher computes in.
        """
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        inputs = torch.cat(list(self._inputs(data.val_dataloader()))).to(dtype)
        teacher = self.copy_of_teacher().to(inputs)
        with torch.no_grad():
            targets = torch.cat([teacher(part) for part in torch.split(inputs, 1024)])
        return landscape.LossSurface(teacher, inputs, targets, dtype=dtype)

    def orbit_points(self, count: int) -> list[FoundWeights]:
        """Return random elements of the teacher's symmetry group, acting on it: exact members of its class.

        Args:
            count: How many, >= 0.

        Raises:
            ValueError: If the network has none but the identity, or they change its buffers, which are no weights.
        """
        shape = next(iter(self.trainer.datamodule.val_dataloader()))[0].shape[1:]  # type: ignore[attr-defined]
        weight = landscape.weight_vector(self.teacher)
        example = torch.randn(2, *shape, generator=generator("orbit example"), dtype=torch.float32).to(weight)
        symmetry = trace_symmetry(self.teacher, example)
        found: list[FoundWeights] = []
        for index in range(8 * count):  # of a small group some are the identity
            if len(found) == count:
                break
            element = symmetry.sample(generator("orbit", self.seed, index))
            moved = symmetry.act(element, self.teacher)
            buffers = dict(moved.named_buffers())
            if not all(torch.equal(value, buffers[name]) for name, value in self.teacher.named_buffers()):
                raise ValueError(
                    "The symmetry of this network moves running statistics of batch norms, which are no weights here, "
                    "so that the orbit is not in the searched space; leave the orbit out."
                )
            vector = landscape.weight_vector(moved).cpu()
            if not torch.equal(vector, weight.cpu()):
                found.append(FoundWeights(f"orbit {len(found) + 1}", vector, math.nan, math.nan, None))
        if count and not found:
            raise ValueError(f"{type(self.teacher).__name__} has no symmetry that moves it; leave the orbit out.")
        return found

    # ---- test

    def on_test_epoch_start(self) -> None:
        """Begin to add up."""
        if not self.found:
            raise ValueError("Nothing has been found that could be tested; search for longer, or raise tolerance.")
        self._test_sums = torch.zeros(len(self.found), dtype=torch.float64)
        self._test_outputs: list[Tensor] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Add squared distances of found candidates on test inputs."""
        inputs, targets = self.evaluation_batch(batch)
        self._test_outputs.append(targets.flatten(1).cpu())
        for row, found in enumerate(self.found.values()):
            weights = landscape.weight_tensors(self.teacher, found["weights"].to(targets))
            outputs = functional_call(self.teacher, weights, (inputs,))
            self._test_sums[row] += float((outputs - targets).double().square().sum())

    def on_test_epoch_end(self) -> None:
        """Log J / V of found candidates: lowest, mean and highest, and ``details/test/r/candidate-0003``."""
        outputs = torch.cat(self._test_outputs)
        scale = landscape.FunctionScale.of(outputs)
        values = [scale.relative(float(total) / len(outputs)) for total in self._test_sums]
        self.log_details(
            {f"test/r/candidate-{number:04d}": value for number, value in zip(self.found, values, strict=True)}
        )
        for name, value in (("lowest", min(values)), ("mean", sum(values) / len(values)), ("highest", max(values))):
            self.log(f"test/r/{name}", value)

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the results and the state of the rounds, of all ranks' candidates."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["search"] = {name: getattr(self, name) for name in _SAVED}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the results.

        Raises:
            ValueError: If the checkpoint is of another search.
        """
        super().on_load_checkpoint(checkpoint)
        for name in _SAVED:
            setattr(self, name, checkpoint["search"][name])

    def member_records(self) -> dict[int, Any]:
        """Return the steps when this rank's candidates passed the milestones."""
        return {slot: self._first_steps[:, index].cpu() for index, slot in enumerate(self.slots)}

    def load_member_records(self, records: Mapping[int, Any]) -> None:
        """Take them back."""
        self._first_steps = torch.stack([records[slot] for slot in self.slots], dim=1)
