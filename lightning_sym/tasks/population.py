"""The base of all tasks that train several networks in one fit."""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from lightning_sym._checks import check_integers, not_finite
from lightning_sym._distributed import gathered
from lightning_sym._loading import LoadsTrusted
from lightning_sym._random import derive_seed, generator
from lightning_sym._tags import details
from lightning_sym._text import name_of_callable, ranges
from lightning_sym.curvature import GaussianPrior
from lightning_sym.population import LoopPopulation, Loss, Population, VmapPopulation, carry_gradients
from lightning_sym.tasks._divergence import Divergence
from lightning_sym.tasks._optimizers import check_optimizer, check_scheduler, make_scheduler, scheduled
from lightning_sym.tasks.losses import CrossEntropy, check_loss, is_cross_entropy
from lightning_sym.tasks.metrics import PopulationClassification, PopulationLoss
from lightning_sym.tasks.same_run import check_same_run
from lightning_sym.tasks.strategy import MemberParallelStrategy, gather, most_validation_batches

T = TypeVar("T")


class PopulationTask(LoadsTrusted, LightningModule):
    r"""Train several networks, the members, in one fit; each comes out as if it were trained alone.

    A subclass says what its members are, in :meth:`make_member`, and, if it is not the cross-entropy, what their loss
    is, in :meth:`loss`. This is a complete experiment::

        class Digits(PopulationTask):
            def make_member(self, number):
                return MultiLayerPerceptron(widths=[16], image_size=8).fresh(number)


        Trainer(max_epochs=5).fit(Digits(members=8), DigitsDataModule())

    The rest is here: every member has its own order of the training data, from its number alone; losses add and
    gradients do not mix; a member whose loss is no longer finite is stopped and reported, and the others go on;
    gradients are clipped member by member; metrics are sums over all processes; of each member the best weights are
    kept, and these are what ``test``, ``predict`` and :meth:`evaluate` look at; a run that is resumed ends as one that
    was not interrupted.

    So that no step waits for an accelerator, losses are looked at every 50 steps there, and wherever it matters
    (validation, the epoch's end, checkpoints): what is kept, logged and reported is the same, but for so long the
    optimizer still moves a stopped member's current weights by its momentum and weight decay, as under ``"vmap"``.

    Place the members with the trainer: ``strategy="ddp"`` shares out the data (every process holds all members),
    ``strategy="ddp_members"`` shares out the members (every process sees all the data, no gradient traffic).

    Args:
        members: Number of members, ``M``. >= 1.
        seed: The first member's number; the members are ``seed, ..., seed + members - 1``. >= 0.
        execution: ``"loop"`` runs one member after another (the faster one for convolutions on a CPU),
            ``"vmap"`` all in one vectorised call (the faster one for many small fully connected networks). Both give
            the same numbers up to rounding, but for dropout and other random layers, which draw for all members
            together under ``"vmap"``.
        loss: Called as ``loss(outputs, targets)`` with one member's outputs and targets of a batch; returns one number.
            Default the mean cross-entropy. A subclass may override :meth:`loss` instead.
        optimizer: Makes the optimizer from parameters; default :meth:`default_optimizer`. With ``execution="vmap"`` it
            must act entry by entry.
        lr_scheduler: Makes the learning-rate scheduler from the optimizer; default none. ``OneCycleLR`` without
            ``total_steps`` has its cycle over the whole run.
        lr_scheduler_interval: Whether the scheduler steps once per epoch or per optimizer step.
        weight_decay_on: ``"all"`` parameters, or ``"weights"``: those with "weight" in their name, batch norm's
            included, biases not.
        keep: Which weights of a member are kept: of the ``"best"`` epoch, see :meth:`score`, or of the ``"last"`` one.
            None: the best if there are validation data, otherwise the last.

    Attributes:
        population: This rank's members; after ``configure_model``.
        kept: What is kept of this rank's members, by number: ``epoch``, ``epochs`` (how many were trained by then),
            ``metrics`` and ``state``.
        history: What was logged in each epoch of a fit, by name, for instance ``"val/loss"``: one row for each epoch,
            one value for each member, NaN for those that were stopped.
        history_epochs: How many epochs had been trained when it was logged, by split.
        prior: :class:`lightning_sym.curvature.GaussianPrior` of the members, set by subclasses that have one;
            None if they have none.

    Class attributes:
        own_batches: Whether every member has its own order of the training data: batches are ``[M, B, ...]`` then;
            otherwise all see the same, ``[B, ...]``.
        places_members: Whether members may be placed on several processes with ``ddp_members``.

    Logged at the end of every epoch, on rank 0, for split ``train`` and ``val`` (and once for ``test``):
    ``<split>/loss`` (mean over the members that have not been stopped), ``<split>/loss/min`` and ``.../max``, and for
    a cross-entropy the same for ``accuracy``, in ``[0, 1]``. For ``train`` they are those of the training steps
    (augmented images, changing weights). What concerns one member is a detail, ``details/<split>/loss/member-0003``:
    ``metrics.csv`` has it, and TensorBoard with ``--log_details true``.

    A checkpoint holds the whole population: weights, the weights kept so far, the history of the curves, and which
    members were stopped.

    Raises:
        ValueError: If an argument is out of range.
    """

    population: Population
    own_batches: ClassVar[bool] = True
    places_members: ClassVar[bool] = True

    def __init__(
        self,
        members: int = 1,
        seed: int = 0,
        *,
        execution: str = "loop",
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        weight_decay_on: Literal["all", "weights"] = "all",
        keep: Literal["best", "last"] | None = None,
    ) -> None:
        super().__init__()
        check_integers(members=members)
        check_integers(0, seed=seed)
        check_words(
            ("execution", execution, ("loop", "vmap")),
            ("lr_scheduler_interval", lr_scheduler_interval, ("epoch", "step")),
            ("weight_decay_on", weight_decay_on, ("all", "weights")),
        )
        if keep is not None:
            check_words(("keep", keep, ("best", "last")))
        self._numbers = range(seed, seed + members)
        self.seed = seed
        self.execution = execution
        if loss is not None:
            check_loss(loss)
        self.loss_function: Loss = CrossEntropy() if loss is None else loss
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.lr_scheduler_interval = lr_scheduler_interval
        self.weight_decay_on = weight_decay_on
        self.keep = keep
        self.prior: GaussianPrior | None = None
        # Refuses bad settings now.
        self._settings = self._describe_optimizer()
        self.kept: dict[int, dict[str, Any]] = {}
        self.history: dict[str, list[list[float]]] = {}
        self.history_epochs: dict[str, list[float]] = {}
        self._stopped: dict[int, dict[str, Any]] = {}
        self._divergence = Divergence()
        self._keeps_last = keep == "last"
        self._evaluating = False
        self._current: dict[int, dict[str, Tensor]] = {}  # the current weights, while the kept ones are evaluated

    # ---- what a subclass says

    def make_member(self, number: int) -> nn.Module:
        """Return a new member with its initial weights, which depend on its number only. To be overridden."""
        raise NotImplementedError(f"{type(self).__name__} must say in make_member what its members are.")

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return one member's loss on a batch, a scalar, given its outputs and its targets."""
        return self.loss_function(outputs, targets)

    def training_batch(self, batch: Any, batch_idx: int) -> tuple[Tensor, Any]:
        """Return inputs and targets of a training step; to be overridden where data are changed for training.

        Args:
            batch: What the datamodule gives: inputs and targets, ``[M, B, ...]`` if :attr:`own_batches`.
            batch_idx: Number of the batch within the epoch; for :meth:`step_generator`.
        """
        return self.evaluation_batch(batch)

    def evaluation_batch(self, batch: Any) -> tuple[Tensor, Any]:
        """Return inputs and targets of a batch; to be overridden where targets are not what the datamodule says."""
        inputs, targets = batch
        return inputs, targets

    def make_metric(self, split: str) -> PopulationLoss:
        """Return what adds up the losses (and accuracies, if the loss is a cross-entropy) of all members.

        Args:
            split: ``"train"``, or ``"val"`` for all that is evaluated.
        """
        return (
            PopulationClassification(len(self.numbers))
            if self.classifies
            else PopulationLoss(len(self.numbers), self.loss)
        )

    def score(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return what says how good weights are, given their validation metrics; the highest is the best.

        The accuracy if there is one, ties: the lower loss; otherwise the lower loss. Among equals the earlier epoch.
        """
        loss = -metrics["loss"]
        return (metrics["accuracy"], loss) if "accuracy" in metrics else (loss,)

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Make the optimizer that is used if none was given: Adam with its defaults."""
        return torch.optim.Adam(parameters)

    def make_population(self, numbers: list[int]) -> Population:
        """Return the members with these numbers, of this rank."""
        kind = VmapPopulation if self.execution == "vmap" else LoopPopulation
        return kind(self.make_member, numbers)

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the run that loads it must have in common, as plain values by name."""
        return {"members": ranges(self.numbers), "execution": self.execution, "loss": self._loss_name}

    @property
    def _loss_name(self) -> str:
        return name_of_callable(type(self).loss if self._overrides_loss else self.loss_function)

    def member_title(self, number: int) -> str:
        """Return how messages call a member."""
        return f"Member {number}"

    def tag(self, split: str, quantity: str, number: int) -> str:
        """Return the name under which a member's value is logged, behind ``details/``."""
        return f"{split}/{quantity}/member-{number:04d}"

    def summary(
        self, split: str, running: Mapping[str, Mapping[int, float]], values: Mapping[str, list[float]]
    ) -> dict[str, float]:
        """Return what is logged of all members together: means and extremes, at most about 30 values.

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

    def each(
        self, split: str, running: Mapping[str, Mapping[int, float]], values: Mapping[str, list[float]]
    ) -> dict[str, float]:
        """Return what is logged of single members, as details; the arguments are those of :meth:`summary`."""
        return {self.tag(split, name, n): value for name, numbers in running.items() for n, value in numbers.items()}

    @property
    def shown(self) -> str:
        """The name of the value that is shown in the progress bar."""
        return "val/accuracy" if self.classifies else "val/loss"

    @property
    def charts(self) -> dict[str, str]:
        """What TensorBoard shows first (tab *Custom Scalars*): by title, which tags a chart has, a regular expression.

        Default: the values of training and validation, and the extremes over members; of a task that shows another
        value in the progress bar, that one with its siblings.
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
        """Return the running statistics; ranks that share out the data are given their mean."""
        return (buffer for buffer in self.population.buffers() if buffer.is_floating_point())

    def undecayed_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that have no weight decay."""
        if self.weight_decay_on == "all":
            return []
        return [parameter for name, parameter in self.population.named_trainable() if "weight" not in name]

    def step_generator(self, name: str, number: int, batch_idx: int, *, per_process: bool = True) -> torch.Generator:
        """Return a generator of random numbers for one member and step, the same in a run that is resumed.

        Args:
            name: What is drawn.
            number: The member's number.
            batch_idx: Number of the batch within the epoch.
            per_process: Whether processes that share out the data draw different numbers, as for noise on images;
                False for what a member has once in a step.
        """
        return generator(name, number, self._draw(batch_idx, per_process))

    # ---- members and their placement

    @property
    def numbers(self) -> list[int]:
        """The numbers of all members, on every rank."""
        return list(self._numbers)

    @property
    def member_seeds(self) -> list[int]:
        """The numbers of the members on this rank; datamodules make one order of the data for each."""
        if not self.own_batches:
            raise AttributeError("All members see the same batches.")  # datamodules make one order then
        return list(self.population.numbers)

    @property
    def member_parallel(self) -> bool:
        """Whether every rank holds members of its own."""
        trainer = self._trainer
        return trainer is not None and isinstance(trainer.strategy, MemberParallelStrategy)

    @property
    def classifies(self) -> bool:
        """Whether the loss is the cross-entropy, so that there are accuracies."""
        return not self._overrides_loss and isinstance(self.loss_function, CrossEntropy)

    @property
    def _overrides_loss(self) -> bool:
        return type(self).loss is not PopulationTask.loss

    def setup(self, stage: str) -> None:
        """Check that the trainer suits a population.

        Raises:
            ValueError: If it would tie the members together, or cannot place them, or targets are values and the loss
                is the cross-entropy, or other processes of the run have other settings.
        """
        check_same_run(self.trainer, self)
        if self.trainer.precision == "16-mixed":
            raise ValueError(
                "precision 16-mixed ties the members together (one gradient scale for all); use bf16-mixed, 32-true or "
                "64-true."
            )
        if self.execution == "vmap" and getattr(self.trainer.strategy, "_layer_sync", None) is not None:
            raise ValueError('sync_batchnorm has no effect on execution="vmap"; use execution="loop".')
        if self.member_parallel and not self.places_members:
            raise ValueError(
                f"{type(self).__name__} shares out the data, not its members; use --trainer.strategy ddp in place of "
                "ddp_members."
            )
        data = getattr(self.trainer, "datamodule", None)
        as_they_are = type(self).evaluation_batch is PopulationTask.evaluation_batch
        if self.classifies and as_they_are and not getattr(data, "regression", False):
            self._check_class_numbers(data)
        # Of a single output, a value each, every cross-entropy is 0; of several they may be probabilities.
        single = getattr(data, "num_classes", None) == 1 and is_cross_entropy(self.loss_function)
        if (self.classifies or single) and as_they_are and getattr(data, "regression", False):
            takes_loss = "loss" in inspect.signature(type(self)).parameters
            todo = (
                "name the loss that networks are trained with (--model.loss lightning_sym.tasks.SquaredDistance)"
                if takes_loss
                else "compare such networks by MatchingTask or CurveTask with their loss, or in Python "
                "(docs/your-own.md)"
            )
            raise ValueError(
                f"{type(self).__name__} has the cross-entropy as its loss, which is of class numbers, and the targets "
                f"of {type(data).__name__} are values; {todo}."
            )

    def configure_model(self) -> None:
        """Make this rank's members."""
        if hasattr(self, "population"):
            return
        numbers = self.numbers
        if self.member_parallel:
            rank, size = self.trainer.global_rank, self.trainer.world_size
            if size > len(numbers):
                raise ValueError(
                    f"{len(numbers)} member(s) cannot be placed on {size} processes with strategy ddp_members; raise "
                    "members, or start fewer processes."
                )
            numbers = numbers[rank::size]
        self.population = self.make_population(numbers)
        if not self.population.trainable():
            self.nothing = nn.Parameter(torch.zeros(1))  # an optimizer, and DDP, want a parameter
        self._rows = torch.tensor([self.numbers.index(number) for number in numbers])
        self.train_metrics, self.val_metrics = self.make_metric("train"), self.make_metric("val")

    def rows(self, device: torch.device) -> Tensor:
        """Return the places of this rank's members among all members. Shape ``[m]``, int64."""
        self._rows = self._rows.to(device)
        return self._rows

    def _check_class_numbers(self, data: Any) -> None:
        """Check that there is one class number per input, where the data lie in memory."""
        tensors = getattr(data, "split_tensors", None)
        shape = () if tensors is None else tensors("train")[1].shape
        if len(shape) > 1:
            raise ValueError(
                f"{type(self).__name__} takes one class number per input, and the targets of {type(data).__name__} are "
                f"of shape {list(shape)}; of one-hot targets give targets.argmax(1), or name a loss of your own that "
                "takes them."
            )

    # ---- optimizer

    def configure_optimizers(self) -> Any:
        """Make one optimizer for all members; see the class for what it may be."""
        if hasattr(self, "nothing"):
            return torch.optim.SGD([self.nothing], lr=0.0)
        spared = {id(parameter) for parameter in self.undecayed_parameters()}
        parameters: Any = self.population.trainable()
        if spared:
            decayed, others = ([p for p in parameters if (id(p) in spared) == without] for without in (False, True))
            parameters = [{"params": decayed}] if decayed else []
            parameters.append({"params": others, "weight_decay": 0.0})
        optimizer = self._make_optimizer(parameters)
        scheduler = self._make_scheduler(optimizer)
        return scheduled(self, optimizer, scheduler, self.lr_scheduler_interval)

    def _make_optimizer(self, parameters: Any) -> Optimizer:
        optimizer = self.optimizer(parameters) if self.optimizer is not None else self.default_optimizer(parameters)
        check_optimizer(optimizer, self.execution)
        if self.prior is not None:
            self.prior.check_optimizers([optimizer])
        return optimizer

    def _make_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        if self.lr_scheduler is None:
            return None
        scheduler = make_scheduler(self.lr_scheduler, optimizer, self, self.lr_scheduler_interval)
        check_scheduler(scheduler)
        return scheduler

    def describe(self) -> dict[str, Any]:
        """Return the hyperparameters that a logger is told beside the arguments: class, loss, optimizer, scheduler."""
        kind = type(self)
        path = f"{kind.__module__}.{kind.__qualname__}"
        return {"_class_path": path, "loss_name": self._loss_name, **self._settings}

    def _describe_optimizer(self) -> dict[str, Any]:
        """Make optimizer and scheduler for a tensor of no network, to refuse bad settings now and to name them."""
        optimizer = self._make_optimizer([nn.Parameter(torch.zeros(2, 2))])
        settings = {name: optimizer.defaults.get(name) for name in ("lr", "weight_decay", "momentum")}
        scheduler = self._make_scheduler(optimizer)
        return {
            **{name: value for name, value in settings.items() if isinstance(value, int | float)},
            "optimizer_name": type(optimizer).__name__,
            "lr_scheduler_name": type(scheduler).__name__ if scheduler else "none",
        }

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Keep what is not finite away from the optimizer; in a loop, stopped members stay as they are."""
        if self.prior is not None:
            self.prior.add_gradients()
        for number in self.skipped:
            self.population.drop_gradients(number)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each member's gradient by itself, so that members stay independent."""
        if gradient_clip_val:
            self.population.clip_gradients(gradient_clip_val, by_norm=gradient_clip_algorithm != "value")

    # ---- training

    def on_fit_start(self) -> None:
        """Let the members' prior act, if they have one, and leave running statistics to :meth:`agree`."""
        if self.prior is not None:
            self.prior.start(self.trainer.optimizers, getattr(self.trainer, "datamodule", None), self)
        if isinstance(self.trainer.strategy.model, DistributedDataParallel):
            # Otherwise rank 0's running statistics, which come from its share of the data, would overwrite the others'.
            self.trainer.strategy.model.broadcast_buffers = False

    def on_train_start(self) -> None:
        """Check that the best weights can be told."""
        validated = most_validation_batches(self) > 0
        if self.keep == "best" and not validated:
            raise ValueError(
                'keep="best" needs validation data, and there are none; set val_fraction above 0, or keep="last".'
            )
        self._keeps_last = self.keep == "last" or not validated

    def forward(self, inputs: Tensor) -> Any:
        """Return the outputs of this rank's members, current weights. Inputs ``[B, ...]``, outputs ``[M, B, ...]``."""
        return self.population(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Take all members' gradients; batches are ``[M, B, ...]``, or ``[B, ...]`` if all members see the same."""
        if hasattr(self, "nothing"):
            return (0.0 * self.nothing).sum()
        inputs, targets = self.training_batch(batch, batch_idx)
        if self.own_batches:
            self._check_own(inputs, targets)
        step = self.population.step(
            inputs,
            targets,
            self.loss if self._overrides_loss else self.loss_function,
            shared=not self.own_batches,
            skip=self.skipped,
            draw=self._draw(batch_idx),
        )
        losses, gradients, alive = self._without_diverged(step.losses, step.gradients)
        size = inputs.shape[int(self.own_batches)]
        self.train_metrics.add_step(self.rows(losses.device), losses, size * alive, step.outputs, targets)
        self.on_losses(losses, alive)
        return carry_gradients(losses.sum() / alive.sum().clamp(min=1), gradients, self.population.trainable())

    def on_losses(self, losses: Tensor, alive: Tensor) -> None:
        """Called in every training step; nothing here may wait for the device.

        Args:
            losses: This rank's members' losses, 0 for those that do not go on. Shape ``[m]``.
            alive: Which members go on. Shape ``[m]``, bool.
        """

    def _check_own(self, inputs: Tensor, targets: Any) -> None:
        """Raise unless there is one batch for each member."""
        own = inputs.dim() > 1 and len(inputs) == len(self.population)
        if not own or (isinstance(targets, Tensor) and targets.shape[:2] != inputs.shape[:2]):
            raise ValueError(
                f"Expected one batch per member, of shape [{len(self.population)}, B, ...], got {list(inputs.shape)}; "
                "the datamodule has to make one order per entry of task.member_seeds, as those of "
                "lightning_sym.datamodules do."
            )

    def _draw(self, batch_idx: int, per_process: bool = True) -> int:
        # Not the global step, which stands still while gradients accumulate. Ranks that share out the data draw
        # different masks.
        place = self.global_rank if per_process and not self.member_parallel else 0
        return derive_seed(self.current_epoch, batch_idx, place)

    def _without_diverged(self, losses: Tensor, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return losses and gradients, 0 for members that do not go on, and which members do, shape ``[m]``, bool."""
        finite = torch.isfinite(losses)
        if self.trainer.world_size > 1 and not self.member_parallel:
            # All ranks hold all members: what one rank cannot use, none may, or their weights would part.
            finite = self.trainer.strategy.reduce(finite.float(), reduce_op="sum") == self.trainer.world_size
        skipped = self.skipped
        out = [index for index, number in enumerate(self.population.numbers) if number in skipped]
        alive = self._divergence.note(finite, out, self.current_epoch, self.global_step)
        if self._divergence.due and not self._stop_diverged():
            return losses, gradients, alive  # zeros already where members were skipped
        return losses.masked_fill(~alive, 0.0), self.population.without(gradients, alive), alive

    def _stop_diverged(self) -> bool:
        """Stop the members that have diverged since the last look; return whether there are any."""
        found = self._divergence.look()
        for index, (epoch, step) in found.items():
            self.stop(self.population.numbers[index], "its training loss is not finite", epoch, step)
        return bool(found)

    def stop(self, number: int, reason: str, epoch: int | None = None, step: int | None = None) -> None:
        """Train a member no further.

        Args:
            number: Number of one of this rank's members.
            reason: Said in a warning and kept with it.
            epoch: When that was; default now.
            step: Likewise.
        """
        epoch = self.current_epoch if epoch is None else epoch
        step = self.global_step if step is None else step
        self._stopped[number] = {"epoch": epoch, "step": step, "reason": reason}
        if self.member_parallel or self.trainer.is_global_zero:  # said by a rank that holds the member, once
            warnings.warn(
                f"{self.member_title(number)} was stopped in epoch {epoch}, step {step}: {reason}. The others go on.",
                stacklevel=2,
            )

    @property
    def stopped(self) -> dict[int, dict[str, Any]]:
        """Why and when this rank's members were stopped, by number; waits until the device has caught up."""
        self._stop_diverged()
        return self._stopped

    @property
    def skipped(self) -> frozenset[int]:
        """This rank's members that are known to be stopped, and so are not run; asking waits for nothing."""
        return frozenset(self._stopped)

    def on_train_epoch_end(self) -> None:
        """Log the epoch's training metrics, and keep the weights if the last ones are to be kept."""
        self._log_epoch("train", self.train_metrics)
        self.agree()  # no validation may have done so in this epoch
        if self._keeps_last:
            self._keep({})
        if len(self.gathered()[0]) == len(self.numbers):
            raise ValueError(
                "All members were stopped, as their losses are not finite; lower the learning rate or look at the data."
            )

    def agree(self) -> None:
        """Give all ranks the same running statistics, the mean of what each has seen; to be called on every rank."""
        if self.trainer.world_size == 1 or self.member_parallel or not (buffers := list(self.shared_buffers())):
            return
        device = self.trainer.strategy.root_device  # that of the process group, also after a fit
        flat = torch.cat([buffer.to(device, torch.float64).flatten() for buffer in buffers])
        mean = self.trainer.strategy.reduce(flat, reduce_op="mean")
        assert isinstance(mean, Tensor)
        for buffer, values in zip(buffers, torch.split(mean, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))

    # ---- what is logged and kept

    def _log_epoch(self, split: str, metric: PopulationLoss) -> dict[str, list[float]]:
        """Log a metric per member and over members; return its values and clear it."""
        values = {name: value.tolist() for name, value in metric.values().items() if value.dim() == 1}
        metric.reset()
        stopped, _ = self.gathered()
        running = {
            name: {n: v for n, v in zip(self.numbers, row, strict=False) if n not in stopped and math.isfinite(v)}
            for name, row in values.items()
        }
        if self.trainer.state.fn == "fit":
            for name, row in values.items():
                own = zip(self.numbers, row, strict=False)
                self.history.setdefault(f"{split}/{name}", []).append([math.nan if n in stopped else v for n, v in own])
            self.history_epochs.setdefault(split, []).append(self._epochs_trained())
        # The values are the same on every rank already.
        for name, value in self.summary(split, running, values).items():
            self.log(name, value, prog_bar=name == self.shown)
        self.log_details(self.each(split, running, values))
        return values

    def log_details(self, values: Mapping[str, float]) -> None:
        """Log what concerns single members, the same on all ranks, at the end of an epoch: ``details/<name>``.

        They go straight to the loggers: ``self.log`` keeps a metric object per name, which costs a millisecond each.
        """
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            for logger in self.loggers:
                # Lightning's step of an epoch's end.
                logger.log_metrics(details(values), step=max(self.global_step - 1, 0))

    def _keep(self, values: Mapping[str, list[float]]) -> None:
        """Keep the current weights of the members for which they are the best; without metrics, of all."""
        for number in self.population.numbers:
            if number in self.stopped:
                continue
            metrics = {name: row[self.numbers.index(number)] for name, row in values.items()}
            old = self.kept.get(number, {}).get("metrics")
            if metrics and old and self.score(metrics) <= self.score(old):
                continue
            self.kept[number] = {
                "epoch": self.current_epoch,
                "metrics": metrics,
                # Not on the accelerator, whose memory is for training; also what a checkpoint gives back.
                "state": {name: value.cpu() for name, value in self.state_to_keep(number).items()},
                "epochs": self._epochs_trained(),
            }

    def state_to_keep(self, number: int) -> dict[str, Tensor]:
        """Return what is kept of a member that is the best so far."""
        return self.population.member_state(number)

    def _epochs_trained(self) -> float:
        """Return how many epochs have been trained by now, with the part of the current one."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return self.current_epoch + min(1.0, progress / max(1, int(self.trainer.num_training_batches)))

    def gathered_by_member(self, values: Mapping[int, T]) -> dict[int, T]:
        """Bring together what every rank has of its own members; to be called on every rank, so not in a report alone.

        Args:
            values: Something that can be pickled for each of this rank's members, or for some of them, by number.

        Returns:
            The same for the members of all ranks, in order of their numbers, on every rank; tensors are on the CPU.
        """
        parts: list[Mapping[int, T]] = [values]
        if self.member_parallel:
            # On the CPU: tensors of an accelerator would come back on the sender's device.
            parts = gathered({n: tree_map_only(Tensor, Tensor.cpu, value) for n, value in values.items()})
        return dict(sorted((number, value) for part in parts for number, value in part.items()))

    def gathered(self) -> tuple[dict[int, dict[str, Any]], dict[int, float]]:
        """Return what became of the members of all ranks; to be called on every rank.

        Returns:
            Why and when members were stopped, and after how many epochs of training the kept weights were taken; by
            number, the same on every rank.
        """
        epochs = {number: record["epochs"] for number, record in self.kept.items()}
        return self.gathered_by_member(self.stopped), self.gathered_by_member(epochs)

    # ---- evaluation

    def begin_evaluation(self) -> None:
        """Make all members what is evaluated."""
        self.population.eval()
        self.agree()

    def end_evaluation(self) -> None:
        """Make all members what is trained."""

    def to_device(self, device: torch.device) -> None:
        """Move all that is evaluated; Lightning moves modules to the CPU when a fit ends."""
        self.population.to(device)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block the members have their kept weights, ready for :meth:`evaluate`; on every rank."""
        if self._evaluating:
            yield
            return
        self.to_device(self.trainer.strategy.root_device)
        mode = self.population.training
        self._evaluating = True
        self._swap_in()
        try:
            self.begin_evaluation()
            yield
        finally:
            self.end_evaluation()
            self._swap_out()
            self.population.train(mode)
            self._evaluating = False

    def _swap_in(self) -> None:
        self._current = {number: self.population.member_state(number) for number in self.kept}
        for number, record in self.kept.items():
            self.population.set_member_state(number, record["state"])

    def _swap_out(self) -> None:
        for number, state in self._current.items():
            self.population.set_member_state(number, state)
        self._current = {}

    # Not on_..._start, which comes after that of callbacks: a recalibration has to see what is evaluated.
    def on_validation_model_eval(self) -> None:
        """Prepare the members: during a fit their current weights, otherwise the kept ones."""
        super().on_validation_model_eval()
        if self.trainer.state.fn != "fit":
            self._swap_in()
        self.begin_evaluation()

    def on_validation_model_train(self) -> None:
        """Put the current weights back."""
        super().on_validation_model_train()
        self.end_evaluation()
        self._swap_out()

    def on_predict_end(self) -> None:
        """Put the current weights back."""
        self.end_evaluation()
        self._swap_out()

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_validation_model_train

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate all members on the same batch: inputs and targets, ``[B, ...]``."""
        self.add_evaluation(self.val_metrics, *self.evaluation_batch(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate the kept weights of all members on the same batch."""
        self.add_evaluation(self.val_metrics, *self.evaluation_batch(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the outputs of the kept weights of all members, ``[M, B, ...]``."""
        return self.population(batch if isinstance(batch, Tensor) else batch[0])

    def add_evaluation(self, metric: PopulationLoss, inputs: Tensor, targets: Any) -> None:
        """Add one batch to a metric, of all members that were not stopped."""
        skipped = frozenset(self.stopped)
        running = [index for index, number in enumerate(self.population.numbers) if number not in skipped]
        if running:
            outputs = self.population(inputs, skip=skipped)
            rows = self.rows(inputs.device)
            metric.update(rows if not skipped else rows[running], outputs, targets)

    def on_validation_epoch_end(self) -> None:
        """Log the members' validation metrics and keep the weights that are the best so far."""
        if self.trainer.sanity_checking:
            self.val_metrics.reset()
            return
        values = self._log_epoch("val", self.val_metrics)
        if self.trainer.state.fn != "fit":
            return
        for number in self.population.numbers:
            if number not in self.stopped and not math.isfinite(values["loss"][self.numbers.index(number)]):
                self.stop(number, "its validation loss is not finite")
        if not self._keeps_last:
            self._keep(values)

    def on_test_epoch_end(self) -> None:
        """Log the members' test metrics."""
        self._log_epoch("test", self.val_metrics)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any], metric: PopulationLoss | None = None) -> dict[str, Tensor]:
        """Evaluate the kept weights of all members that were not stopped; to be called on every rank.

        Within :meth:`evaluating` members are evaluated as they are.

        Args:
            batches: Inputs and targets on any device; this rank's share.
            metric: What adds up; default that of validation.

        Returns:
            ``loss`` (and ``accuracy``), shape ``[M]``, NaN for stopped members. On the CPU, the same on every rank.
        """
        strategy = self.trainer.strategy
        metric = (self.make_metric("val") if metric is None else metric).to(strategy.root_device)
        with self.evaluating():
            for batch in batches:
                moved = strategy.precision_plugin.convert_input(strategy.batch_to_device(batch, strategy.root_device))
                with strategy.precision_plugin.forward_context():
                    self.add_evaluation(metric, *self.evaluation_batch(moved))
        return metric.values()

    # ---- checkpoints

    def member_records(self) -> dict[int, Any]:
        """Return what else a checkpoint holds of this rank's members, by number, as plain values and tensors."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what has been kept, of all ranks' members; to be called on every rank, as Lightning does."""
        self.agree()
        mine = self.kept, self.stopped, self.member_records()
        parts = gather(mine) if self.member_parallel else [mine]
        kept, stopped, records = ({n: one for part in parts for n, one in part[i].items()} for i in range(3))
        checkpoint["population"] = {
            **self.identity(),
            "kept": dict(kept),
            "stopped": dict(stopped),
            "records": dict(records),
            "history": self.history,
            "history_epochs": self.history_epochs,
            "train_sums": self.train_metrics.totals(self.trainer),
            "processes": self.trainer.world_size if self.member_parallel else 1,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what had been kept.

        Raises:
            ValueError: If the checkpoint is of other members or of other settings, or is resumed with another placement
                of the members.
        """
        self.configure_model()
        saved = checkpoint.get("population")
        identity = self.identity()
        if saved is None or not identity.keys() <= saved.keys():
            raise ValueError(f"The checkpoint holds no population: it was not written by a {type(self).__name__}.")
        for name, mine in identity.items():
            if saved[name] != mine:
                theirs, ours = first_difference(saved[name], mine)
                raise ValueError(
                    f"The checkpoint has {name} {theirs} and this run has {ours}; use the settings that it was trained "
                    "with, which the config.yaml of its run holds."
                )
        processes = self.trainer.world_size if self.member_parallel else 1
        if saved["processes"] != processes and self._trainer is not None and self.trainer.state.fn == "fit":
            raise ValueError(
                f"The members of the checkpoint were placed on {saved['processes']} process(es) and those of this run "
                f"on {processes}; resume with the same strategy and number of processes."
            )
        own = set(self.population.numbers)
        self.kept = {number: record for number, record in saved["kept"].items() if number in own}
        self._divergence.forget()
        self._stopped = {number: record for number, record in saved["stopped"].items() if number in own}
        self.load_member_records({number: record for number, record in saved["records"].items() if number in own})
        self.history, self.history_epochs = saved["history"], saved["history_epochs"]
        if self._trainer is None or self.trainer.is_global_zero:  # what was added up over ranks is one rank's now
            self.train_metrics.set_totals(saved["train_sums"])

    def broken_weights(self) -> list[str]:
        """Return the weights that are not finite, but for current weights of members that were stopped."""
        found = []
        for number in self.population.numbers:
            current = {} if number in self.stopped else self.population.member_state(number)
            states = {"weights": current, "kept weights": self.kept.get(number, {}).get("state", {})}
            for kind, state in states.items():
                tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
                found += [f"{name}, {kind} of {self.member_title(number)}" for name in not_finite(tensors)]
        return found

    def load_member_records(self, records: Mapping[int, Any]) -> None:
        """Take back what :meth:`member_records` returned."""


def check_words(*checks: tuple[str, object, tuple[str, ...]]) -> None:
    """Raise unless each argument, of a name and a value, is one of the accepted words."""
    for name, value, accepted in checks:
        if value not in accepted:
            options = " or ".join(f'"{word}"' for word in accepted)
            raise ValueError(f"{name} must be {options}, got {value!r}.")


def first_difference(a: Any, b: Any) -> tuple[Any, Any]:
    """Return two values that differ, or if they are lists the first of each that the other has not, or its order."""
    if not (isinstance(a, list) and isinstance(b, list)):
        return a, b
    one, two = ([item for item in mine if item not in theirs] for mine, theirs in ((a, b), (b, a)))
    if not one and not two:
        return "in one order", "in another"
    return (one[0] if one else f"without {two[0]}"), (two[0] if two else f"without {one[0]}")
