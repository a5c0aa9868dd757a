"""The base of all tasks that train several networks in one fit."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from lightning_sym._checks import check_integers, check_seeds, check_words
from lightning_sym._distributed import gathered
from lightning_sym._random import derive_seed, generator
from lightning_sym._tags import details
from lightning_sym.curvature import GaussianPrior
from lightning_sym.population import Loss, carry_gradients
from lightning_sym.tasks import strategy
from lightning_sym.tasks._kept_weights import WeightExchange, broken_weights, epochs_trained, keep_best
from lightning_sym.tasks._optimizers import decay_groups, describe_optimizer, make_optimizer, make_scheduler, scheduled
from lightning_sym.tasks._population_checkpoint import load_population_state, population_state
from lightning_sym.tasks._stopping import Stopping
from lightning_sym.tasks._suitability import check_own_batches, check_suits
from lightning_sym.tasks.losses import CrossEntropy, check_loss
from lightning_sym.tasks.metrics import PopulationLoss
from lightning_sym.tasks.population_interface import PopulationInterface

T = TypeVar("T")


class PopulationTask(PopulationInterface):
    r"""Train several networks, the members, in one fit, with the results of training each alone.

    A subclass defines :meth:`make_member` and, if the loss is not the cross-entropy, :meth:`loss`.
    :class:`PopulationInterface` lists all methods to override. This is a complete experiment::

        class Digits(PopulationTask):
            def make_member(self, number):
                return MultiLayerPerceptron(widths=[16], image_size=8).fresh(number)


        Trainer(max_epochs=5).fit(Digits(members=8), DigitsDataModule())

    Every member has its own order of the training data, which depends on its number only. Losses add and gradients do
    not mix; they are clipped member by member. A member with a loss that is not finite is stopped and reported, and the
    others continue. Metrics are sums over all processes. ``test``, ``predict`` and :meth:`evaluate` use the best
    weights of each member. A resumed run ends like an uninterrupted one.

    On an accelerator no step waits for the device: losses are checked every 50 steps, and at validation, epoch ends
    and checkpoints. Until then momentum and weight decay still move the current weights of a stopped member.

    The trainer places the members: ``strategy="ddp"`` shares out the data (every process holds all members), and
    ``strategy="ddp_members"`` shares out the members (every process sees all data, without gradient traffic).

    Args:
        members: Number of members, ``M``. >= 1.
        seed: Number of the first member; the members are ``seed, ..., seed + members - 1``. >= 0.
        execution: ``"loop"`` runs one member after another, which is faster for convolutions on a CPU. ``"vmap"`` runs
            all in one vectorised call, which is faster for many small dense networks. Results agree up to rounding,
            except for random layers such as dropout: under ``"vmap"`` they draw for all members together.
        loss: Called as ``loss(outputs, targets)`` for one member and batch; returns a scalar. Default the mean
            cross-entropy. A subclass may override :meth:`loss` instead.
        optimizer: Makes the optimizer from parameters; default :meth:`default_optimizer`. With ``execution="vmap"`` it
            must act entry by entry.
        lr_scheduler: Makes the learning-rate scheduler from the optimizer; default none. The cycle of
            ``OneCycleLR`` without ``total_steps`` lasts for the whole run.
        lr_scheduler_interval: Whether the scheduler steps once per epoch or per optimizer step.
        weight_decay_on: ``"all"`` parameters, or ``"weights"``: those with "weight" in their name, batch norm's
            included, biases not.
        keep: Keep each member's weights of the ``"best"`` epoch, see :meth:`score`, or of the ``"last"`` one. None: the
            best if there are validation data, otherwise the last.

    Attributes:
        population: Members of this rank; after ``configure_model``.
        kept: Kept weights of this rank's members, by number: ``epoch``, ``epochs`` (number trained by then),
            ``metrics`` and ``state``.
        history: Values of a fit by name, for instance ``"val/loss"``: a row for each epoch with a value for each
            member, NaN for stopped ones.
        history_epochs: Number of epochs trained at each row, by split.
        prior: :class:`lightning_sym.curvature.GaussianPrior` of the members, set by subclasses; None without a prior.

    Class attributes:
        own_batches: Whether every member has its own order of the training data, with batches ``[M, B, ...]``, or all
            see the same batches, ``[B, ...]``.
        places_members: Whether members may be placed on several processes with ``ddp_members``.

    Logged at the end of every epoch, on rank 0, for split ``train`` and ``val`` (and once for ``test``):
    ``<split>/loss`` (mean over running members), ``<split>/loss/min`` and ``.../max``, and for
    a cross-entropy the same for ``accuracy``, in ``[0, 1]``. Values for ``train`` come from the training steps,
    with augmented images and changing weights. Values of one member are details, ``details/<split>/loss/member-0003``,
    in ``metrics.csv``, and in TensorBoard with ``--log_details true``.

    A checkpoint holds the whole population: current and kept weights, the history, and the records of stopped members.

    Raises:
        ValueError: If an argument is out of range.
    """

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
        check_seeds(seed=seed)
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
        self._settings = describe_optimizer(self)  # refuses bad settings now
        self.kept: dict[int, dict[str, Any]] = {}
        self.history: dict[str, list[list[float]]] = {}
        self.history_epochs: dict[str, list[float]] = {}
        self.stopping = Stopping(self)
        self._keeps_last = keep == "last"
        self._exchange = WeightExchange(self)

    def step_generator(self, name: str, number: int, batch_idx: int, *, per_process: bool = True) -> torch.Generator:
        """Make a random generator for one member and step, the same in a resumed run.

        Args:
            name: Name of the random quantity.
            number: The member's number.
            batch_idx: Number of the batch within the epoch.
            per_process: Whether processes that share out the data draw different numbers, as for noise on images.
        """
        return generator(name, number, self._draw(batch_idx, per_process))

    def global_batch(self, size: int) -> tuple[int, slice]:
        """Return the size of the batch of all processes that share out the data, and this one's places in it.

        What is drawn for all of it by :meth:`step_generator` without ``per_process`` is then one process's.

        Args:
            size: Size of this process's batch.
        """
        shared = self._trainer is not None and not self.member_parallel
        count, rank = (self.trainer.world_size, self.global_rank) if shared else (1, 0)
        return count * size, slice(rank * size, (rank + 1) * size)

    # ---- members and their placement

    @property
    def member_seeds(self) -> list[int]:
        """The numbers of this rank's members; datamodules make one order of the data for each."""
        if not self.own_batches:
            raise AttributeError("All members see the same batches.")  # datamodules make one order then
        return list(self.population.numbers)

    @property
    def member_parallel(self) -> bool:
        """Whether every rank holds different members."""
        trainer = self._trainer
        return trainer is not None and isinstance(trainer.strategy, strategy.MemberParallelStrategy)

    def setup(self, stage: str) -> None:
        """Check that the trainer, the data and the other processes suit a population; see :func:`check_suits`."""
        check_suits(self, overrides=type(self).evaluation_batch is not PopulationTask.evaluation_batch)

    def configure_model(self) -> None:
        """Make this rank's members."""
        if hasattr(self, "population"):
            return
        numbers = strategy.share_of_members(self.trainer, self.numbers) if self.member_parallel else self.numbers
        self.population = self.make_population(numbers)
        if not self.population.trainable():
            self.nothing = nn.Parameter(torch.zeros(1))  # an optimizer, and DDP, want a parameter
        self._rows = torch.tensor([self.numbers.index(number) for number in numbers])
        self.train_metrics, self.val_metrics = self.make_metric("train"), self.make_metric("val")

    def rows(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's members among all members. Shape ``[m]``, int64."""
        self._rows = self._rows.to(device)
        return self._rows

    # ---- optimizer

    def configure_optimizers(self) -> Any:
        """Make one optimizer for all members."""
        if hasattr(self, "nothing"):
            return torch.optim.SGD([self.nothing], lr=0.0)
        parameters = decay_groups(self.population.trainable(), self.undecayed_parameters())
        optimizer = make_optimizer(self, parameters)
        scheduler = make_scheduler(self.lr_scheduler, optimizer, self, self.lr_scheduler_interval)
        return scheduled(self, optimizer, scheduler, self.lr_scheduler_interval)

    def describe(self) -> dict[str, Any]:
        """Return further hyperparameters to log: class, loss, optimizer and scheduler."""
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"_class_path": path, "loss_name": self._loss_name, **self._settings}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Add the prior's gradients and drop those of stopped members."""
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
        """Clip the gradient of each member separately."""
        if gradient_clip_val:
            self.population.clip_gradients(gradient_clip_val, by_norm=gradient_clip_algorithm != "value")

    # ---- training

    def on_fit_start(self) -> None:
        """Start the prior, and leave running statistics to :meth:`agree`."""
        if self.prior is not None:
            self.prior.start(self.trainer.optimizers, getattr(self.trainer, "datamodule", None), self)
        if isinstance(self.trainer.strategy.model, DistributedDataParallel):
            # Otherwise the running statistics of rank 0, from its share of the data, would overwrite all others.
            self.trainer.strategy.model.broadcast_buffers = False

    def on_train_start(self) -> None:
        """Check that validation can rank the weights, if the best are to be kept."""
        validated = strategy.most_validation_batches(self) > 0
        if self.keep == "best" and not validated:
            raise ValueError(
                'keep="best" needs validation data, and there are none; set val_fraction above 0, or keep="last".'
            )
        self._keeps_last = self.keep == "last" or not validated

    def forward(self, inputs: Tensor) -> Any:
        """Run this rank's members with their current weights. Inputs ``[B, ...]``, outputs ``[M, B, ...]``."""
        return self.population(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the gradients of all members; batches are ``[M, B, ...]``, or ``[B, ...]`` if members share them."""
        if hasattr(self, "nothing"):
            return (0.0 * self.nothing).sum()
        inputs, targets = self.training_batch(batch, batch_idx)
        if self.own_batches:
            check_own_batches(self, inputs, targets)
        step = self.population.step(
            inputs,
            targets,
            self.loss if self._overrides_loss else self.loss_function,
            shared=not self.own_batches,
            skip=self.skipped,
            draw=self._draw(batch_idx),
        )
        losses, gradients, alive = self.stopping.without_diverged(step.losses, step.gradients)
        size = inputs.shape[int(self.own_batches)]
        self.train_metrics.add_step(self.rows(losses.device), losses, size * alive, step.outputs, targets)
        self.on_losses(losses, alive)
        return carry_gradients(losses.sum() / alive.sum().clamp(min=1), gradients, self.population.trainable())

    def _draw(self, batch_idx: int, per_process: bool = True) -> int:
        # Not the global step, which is constant while gradients accumulate. Ranks that share out the data draw
        # different masks.
        place = self.global_rank if per_process and not self.member_parallel else 0
        return derive_seed(self.current_epoch, batch_idx, place)

    def stop(self, number: int, reason: str, epoch: int | None = None, step: int | None = None) -> None:
        """Stop training a member.

        Args:
            number: Number of one of this rank's members.
            reason: Reason for the warning and the record.
            epoch: Epoch of the failure; default now.
            step: Step of the failure; default now.
        """
        self.stopping.stop(number, reason, epoch, step)

    @property
    def stopped(self) -> dict[int, dict[str, Any]]:
        """Reason, epoch and step of this rank's stopped members, by number; waits for the device."""
        self.stopping.settle()
        return self.stopping.records

    @property
    def skipped(self) -> frozenset[int]:
        """Members of this rank that are known to be stopped and are not run; does not wait for the device."""
        return frozenset(self.stopping.records)

    def on_train_epoch_end(self) -> None:
        """Log the training metrics, and keep the weights under ``keep="last"``."""
        self._log_epoch("train", self.train_metrics)
        self.agree()  # validation may not have run in this epoch
        if self._keeps_last:
            self.keep_weights({})
        if len(self.gathered()[0]) == len(self.numbers):
            raise ValueError(
                "All members were stopped, as their losses are not finite; lower the learning rate or look at the data."
            )

    def agree(self) -> None:
        """Average the running statistics over ranks; to be called on every rank."""
        if self.trainer.world_size > 1 and not self.member_parallel:
            strategy.average_over_ranks(self.trainer.strategy, list(self.shared_buffers()))

    # ---- logging and kept weights

    def _log_epoch(self, split: str, metric: PopulationLoss) -> dict[str, list[float]]:
        """Log a metric of each member and their summary; return its values and reset it."""
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
            self.history_epochs.setdefault(split, []).append(epochs_trained(self))
        # The values are the same on every rank already.
        for name, value in self.summary(split, running, values).items():
            self.log(name, value, prog_bar=name == self.shown)
        self.log_details(self.each(split, running, values))
        return values

    def log_details(self, values: Mapping[str, float]) -> None:
        """Log values of single members at the end of an epoch, as ``details/<name>``; the same on all ranks.

        They bypass ``self.log``, which spends a millisecond on each name.
        """
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            for logger in self.loggers:
                # Lightning's step of an epoch's end.
                logger.log_metrics(details(values), step=max(self.global_step - 1, 0))

    def keep_weights(self, values: Mapping[str, list[float]]) -> None:
        """Keep the current weights of all members with their best score so far.

        Args:
            values: Metrics by name, a value for each member; none to keep the weights of all members.
        """
        keep_best(self, values)

    def gathered_by_member(self, values: Mapping[int, T]) -> dict[int, T]:
        """Collect values of the members of all ranks; to be called on every rank.

        Args:
            values: Values of this rank's members, or of some, by number; they must pickle.

        Returns:
            The values of all ranks, in order of the numbers, the same on every rank, with tensors on the CPU.
        """
        parts: list[Mapping[int, T]] = [values]
        if self.member_parallel:
            # On the CPU: tensors of an accelerator would come back on the sender's device.
            parts = gathered({n: tree_map_only(Tensor, Tensor.cpu, value) for n, value in values.items()})
        return dict(sorted((number, value) for part in parts for number, value in part.items()))

    def kept_states(self) -> dict[int, dict[str, Tensor]]:
        """Collect the kept weights of the members of all ranks; to be called on every rank.

        Returns:
            State dicts by number, without members that were stopped before any weights were kept; the current weights
            of all members if nothing was trained.
        """
        own = {number: record["state"] for number, record in self.kept.items()}
        if not own and not self.trainer.global_step:
            own = {number: self.population.member_state(number) for number in self.population.numbers}
        return self.gathered_by_member(own)

    def gathered(self) -> tuple[dict[int, dict[str, Any]], dict[int, float]]:
        """Collect the records of stopped members and the ages of kept weights; to be called on every rank.

        Returns:
            Records of stopped members, and the number of epochs before the kept weights; both by number.
        """
        ages = {number: record["epochs"] for number, record in self.kept.items()}
        return self.gathered_by_member(self.stopped), self.gathered_by_member(ages)

    # ---- evaluation

    def begin_evaluation(self) -> None:
        """Prepare the members for evaluation."""
        self.population.eval()
        self.agree()

    def end_evaluation(self) -> None:
        """Prepare the members for training again."""

    def to_device(self, device: torch.device) -> None:
        """Move the members; Lightning moves modules to the CPU when a fit ends."""
        self.population.to(device)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the members their kept weights within the block, ready for :meth:`evaluate`; on every rank."""
        with self._exchange.evaluating():
            yield

    # Not on_..._start: callbacks come first there, and a recalibration needs the evaluated weights.
    def on_validation_model_eval(self) -> None:
        """Prepare the members: their current weights during a fit, otherwise the kept ones."""
        super().on_validation_model_eval()
        if self.trainer.state.fn != "fit":
            self._exchange.swap_in()
        self.begin_evaluation()

    def on_validation_model_train(self) -> None:
        """Restore the current weights."""
        super().on_validation_model_train()
        self.end_evaluation()
        self._exchange.swap_out()

    def on_predict_end(self) -> None:
        """Restore the current weights."""
        self.end_evaluation()
        self._exchange.swap_out()

    on_test_model_eval = on_predict_model_eval = on_validation_model_eval
    on_test_model_train = on_validation_model_train

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate all members on the same batch: inputs and targets, ``[B, ...]``."""
        self.add_evaluation(self.val_metrics, *self.evaluation_batch(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Run all members with their kept weights; outputs ``[M, B, ...]``."""
        return self.population(batch if isinstance(batch, Tensor) else batch[0])

    def add_evaluation(self, metric: PopulationLoss, inputs: Tensor, targets: Any) -> None:
        """Add one batch of all running members to a metric."""
        skipped = frozenset(self.stopped)
        running = [index for index, number in enumerate(self.population.numbers) if number not in skipped]
        if running:
            outputs = self.population(inputs, skip=skipped)
            rows = self.rows(inputs.device)
            metric.update(rows if not skipped else rows[running], outputs, targets)

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics and keep the best weights."""
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
            self.keep_weights(values)

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self._log_epoch("test", self.val_metrics)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any], metric: PopulationLoss | None = None) -> dict[str, Tensor]:
        """Evaluate the kept weights of all running members; to be called on every rank.

        Within :meth:`evaluating` members keep the weights they have.

        Args:
            batches: Inputs and targets on any device; the share of this rank.
            metric: Metric to update; default that of validation.

        Returns:
            ``loss`` (and ``accuracy``), shape ``[M]``, NaN for stopped members. On the CPU, the same on every rank.
        """
        device, plugin = self.trainer.strategy.root_device, self.trainer.strategy.precision_plugin
        metric = (self.make_metric("val") if metric is None else metric).to(device)
        with self.evaluating():
            for batch in batches:
                moved = plugin.convert_input(self.trainer.strategy.batch_to_device(batch, device))
                with plugin.forward_context():
                    self.add_evaluation(metric, *self.evaluation_batch(moved))
        return metric.values()

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the kept weights and the records of all ranks; to be called on every rank, as Lightning does."""
        self.agree()
        checkpoint["population"] = population_state(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the kept weights and the records.

        Raises:
            ValueError: If the checkpoint has other members, settings, or, when training resumes, processes.
        """
        self.configure_model()
        load_population_state(self, checkpoint)

    def broken_weights(self) -> list[str]:
        """Return the names of weights that are not finite, except for the current weights of stopped members."""
        return broken_weights(self)
