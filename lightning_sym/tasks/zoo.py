"""Training a zoo: many members of one architecture in one fit."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_sym._random import derive_seed
from lightning_sym._text import ranges
from lightning_sym.curvature import PopulationPrior
from lightning_sym.networks import Network, build
from lightning_sym.population import LoopPopulation, Population, VmapPopulation, carry_gradients
from lightning_sym.tasks._divergence import Divergence
from lightning_sym.tasks._optimizers import check_optimizer
from lightning_sym.tasks.losses import CrossEntropy
from lightning_sym.tasks.metrics import PopulationClassification
from lightning_sym.tasks.strategy import MemberParallelStrategy, gather, most_validation_batches


class SplitData(Protocol):
    """The part of a datamodule that a population is evaluated on; ``ImageDataModule`` has it."""

    @property
    def num_classes(self) -> int:
        """Number of classes, ``K``."""

    def curvature_dataloader(self) -> Any:
        """Return the training split, not augmented and not shuffled."""

    def val_dataloader(self) -> Any:
        """Return the validation split; empty if there is none."""

    def test_dataloader(self) -> Any:
        """Return the test split."""


class ZooTask(LightningModule):
    r"""Train many members of one architecture that differ by seed only.

    Member ``n`` has the initial weights of ``network.fresh(n)`` and its own order of the training data, both from
    its number alone. Losses add and gradients do not mix: with ``execution="loop"`` on a CPU a member is bitwise
    the one that would have been trained alone. A member whose loss is no longer finite is stopped and reported;
    the others go on. So that no step waits for an accelerator, losses are looked at every 50 steps there, and wherever
    it matters (validation, the epoch's end, checkpoints): what is kept, logged and reported is the same, but for so
    long the optimizer still moves a stopped member's current weights by its momentum and weight decay, as under
    ``"vmap"``.

    Place the members with the trainer: ``strategy="ddp"`` shares out the data (every process holds all members),
    ``strategy="ddp_members"`` shares out the members (every process sees all the data, no gradient traffic).

    Args:
        network: The architecture; its own weights are not used.
        members: Number of members, ``M``. >= 1.
        seed: The first member's number; the members are ``seed, ..., seed + members - 1``. >= 0.
        execution: ``"loop"`` runs one member after another (the faster one for convolutions on a CPU),
            ``"vmap"`` all in one vectorised call (the faster one for many small fully connected networks). Both give
            the same numbers up to rounding, but for dropout and other random layers, which draw for all members
            together under ``"vmap"``.
        optimizer: Makes the optimizer from parameters; default Adam with its defaults, as in the paper.
            With ``execution="vmap"`` it must act entry by entry.
        lr_scheduler: Makes the learning-rate scheduler from the optimizer; default none.
        lr_scheduler_interval: Whether the scheduler steps once per epoch or per optimizer step.
        weight_decay_on: ``"all"`` parameters, or ``"weights"``: those with "weight" in their name, batch norm's
            included, biases not (the paper's code).
        label_smoothing: In ``[0, 1)``.
        keep: Which weights of a member are kept: of the ``"best"`` epoch by validation accuracy (ties: the lower
            validation loss, then the earlier epoch), as in the paper, or of the ``"last"`` epoch.
        channels_last: Keep images in ``torch.channels_last`` layout (``"loop"`` only). Often faster for
            convolutions; changes results by rounding.
        prior_precision: Precision of the Gaussian prior of all weights at the start, > 0; it needs an optimizer without
            weight decay and labels that are not smoothed. Default: members have no prior.

    Attributes:
        prior: :class:`lightning_sym.curvature.PopulationPrior` of the members, whose precisions
            :class:`lightning_sym.callbacks.MarginalLikelihood` learns; None if they have none.

    Logged at the end of every epoch, on rank 0, for split ``train`` and ``val`` (and once for ``test``):
    ``<split>/accuracy`` and ``<split>/loss`` (mean over the members that have not been stopped),
    ``<split>/accuracy/min``, ``.../max`` and ``<split>/accuracy/member-0003``, the same for ``loss``. Accuracies
    are fractions in ``[0, 1]``; losses are mean cross-entropies in nats, for ``train`` those of the training steps
    (augmented images, changing weights).

    A checkpoint holds the whole population: weights, the weights kept so far, the history of the curves, and which
    members were stopped.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Godfrey, Brown, Emerson, Kvinge (2022), "On the Symmetries of Deep Learning Models and their Internal
        Representations", arXiv:2205.14258, appendix D.1. We choose the epoch on a validation split where the paper
        uses the test set.
    """

    population: Population

    def __init__(
        self,
        network: Network,
        members: int = 4,
        seed: int = 0,
        execution: Literal["loop", "vmap"] = "loop",
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        weight_decay_on: Literal["all", "weights"] = "all",
        label_smoothing: float = 0.0,
        keep: Literal["best", "last"] = "best",
        channels_last: bool = False,
        prior_precision: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(network, Mapping):  # from a checkpoint, by way of load_from_checkpoint
            network = build(network)
        if members < 1:
            raise ValueError(f"members must be at least 1, got {members}.")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, as it is the first member's number, got {seed}.")
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}.")
        for name, value, accepted in (
            ("execution", execution, ("loop", "vmap")),
            ("lr_scheduler_interval", lr_scheduler_interval, ("epoch", "step")),
            ("weight_decay_on", weight_decay_on, ("all", "weights")),
            ("keep", keep, ("best", "last")),
        ):
            if value not in accepted:
                raise ValueError(f'{name} must be "{accepted[0]}" or "{accepted[1]}", got {value!r}.')
        if channels_last and execution == "vmap":
            raise ValueError('channels_last works with execution="loop" only; drop one of the two.')
        self._template = (network,)  # in a tuple: the template's weights are no part of the population
        self.members = members
        self.seed = seed
        self.execution = execution
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.lr_scheduler_interval = lr_scheduler_interval
        self.weight_decay_on = weight_decay_on
        self.label_smoothing = label_smoothing
        self.keep = keep
        self.channels_last = channels_last
        self.prior: PopulationPrior | None = None
        if prior_precision is not None:
            if label_smoothing:
                raise ValueError(
                    f"With label_smoothing {label_smoothing} the loss is no log likelihood, which prior_precision "
                    "needs; leave one of the two out."
                )
            self.prior = PopulationPrior(network.fresh(seed), self.numbers, prior_precision)
        self.save_hyperparameters(ignore=["network", "optimizer", "lr_scheduler"])
        kind = type(self)
        self.save_hyperparameters(
            {
                "network": network.architecture,
                "_class_path": f"{kind.__module__}.{kind.__qualname__}",
                **self._describe_optimizer(),
            }
        )

        self.train_metrics = PopulationClassification(members)
        self.val_metrics = PopulationClassification(members)
        self.kept: dict[int, dict[str, Any]] = {}
        self._stopped: dict[int, dict[str, Any]] = {}
        self._divergence = Divergence()
        self.history: dict[str, list[list[float]]] = {}
        self.history_epochs: dict[str, list[float]] = {}
        self._current: dict[int, dict[str, Tensor]] = {}  # the current weights, while the kept ones are evaluated
        self._split_metrics: dict[str, dict[str, Tensor]] | None = None

    # ---- members and their placement

    @property
    def numbers(self) -> list[int]:
        """The numbers of all members of the zoo, on every rank."""
        return list(range(self.seed, self.seed + self.members))

    @property
    def member_seeds(self) -> list[int]:
        """The numbers of the members on this rank; datamodules make one order of the data for each."""
        return list(self.population.numbers)

    @property
    def network(self) -> Network:
        """The architecture that the members are made from."""
        return self._template[0]

    @property
    def member_parallel(self) -> bool:
        """Whether every rank holds members of its own."""
        trainer = self._trainer
        return trainer is not None and isinstance(trainer.strategy, MemberParallelStrategy)

    def configure_model(self) -> None:
        """Make this rank's members."""
        if hasattr(self, "population"):
            return
        numbers = self.numbers
        if self.member_parallel:
            rank, size = self.trainer.global_rank, self.trainer.world_size
            if size > self.members:
                raise ValueError(
                    f"{self.members} member(s) cannot be placed on {size} processes with strategy ddp_members; "
                    "raise members, or start fewer processes."
                )
            numbers = numbers[rank::size]
        if self.execution == "vmap":
            self.population = VmapPopulation(self.network, numbers)
        else:
            self.population = LoopPopulation(self.network, numbers, channels_last=self.channels_last)
        self._rows = torch.tensor([number - self.seed for number in numbers])

    def setup(self, stage: str) -> None:
        """Check that the trainer suits a population."""
        if self.trainer.precision == "16-mixed":
            raise ValueError(
                "precision 16-mixed ties the members together (one gradient scale for all); use bf16-mixed or 32-true."
            )
        if self.execution == "vmap" and getattr(self.trainer.strategy, "_layer_sync", None) is not None:
            raise ValueError('sync_batchnorm has no effect on execution="vmap"; use execution="loop".')

    def rows(self, device: torch.device) -> Tensor:
        """Return the places of this rank's members among all members. Shape ``[m]``, int64."""
        self._rows = self._rows.to(device)
        return self._rows

    # ---- training

    def on_fit_start(self) -> None:
        """Let the members' prior act, if they have one."""
        if self.prior is not None:
            self.prior.start(self.trainer.optimizers, getattr(self.trainer, "datamodule", None), self)

    def on_train_start(self) -> None:
        """Check that the best weights can be told, and leave running statistics to :meth:`_average_buffers`."""
        most = most_validation_batches(self)
        if self.keep == "best" and most == 0:
            raise ValueError(
                'keep="best" needs validation data, and there are none; set val_fraction above 0, or keep="last".'
            )
        self._split_metrics = None
        if isinstance(self.trainer.strategy.model, DistributedDataParallel):
            # Otherwise rank 0's running statistics, which come from its share of the data, would overwrite the others'.
            self.trainer.strategy.model.broadcast_buffers = False

    def on_validation_model_eval(self) -> None:
        """Evaluate the current weights during a fit, with the same running statistics on all ranks."""
        super().on_validation_model_eval()
        if self.trainer.state.fn != "fit":
            self._swap_in()
        self._average_buffers()

    def on_validation_model_train(self) -> None:
        """Put the current weights back."""
        super().on_validation_model_train()
        self._swap_out()

    def _average_buffers(self) -> None:
        """Give all ranks the same running statistics, the mean of what each has seen."""
        if self.trainer.world_size == 1 or self.member_parallel or self.trainer.state.fn != "fit":
            return
        for buffer in self.population.buffers():
            if buffer.is_floating_point():
                buffer.copy_(self.trainer.strategy.reduce(buffer, reduce_op="mean"))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of this rank's members, current weights. Images ``[B, C, H, W]``, logits ``[M, B, K]``."""
        logits: Tensor = self.population(images)
        return logits

    def configure_optimizers(self) -> Any:
        """Make one optimizer for all members; see the class for what it may be."""
        named = list(self.population.named_trainable())
        parameters: Any = [parameter for _, parameter in named]
        if self.weight_decay_on == "weights":
            parameters = [
                {"params": [parameter for name, parameter in named if "weight" in name]},
                {
                    "params": [parameter for name, parameter in named if "weight" not in name],
                    "weight_decay": 0.0,
                },
            ]
            parameters = [group for group in parameters if group["params"]]
        optimizer = self._make_optimizer(parameters)
        scheduler = self._make_scheduler(optimizer)
        if scheduler is None:
            return optimizer
        epochs, period = self.trainer.max_epochs, getattr(scheduler, "T_max", None)
        per_epoch = self.lr_scheduler_interval == "epoch" and not self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if period is not None and per_epoch and epochs not in (None, -1, period):
            warnings.warn(
                f"The learning rate comes to its lowest after {period} epochs (T_max) and training ends after {epochs} "
                f"(max_epochs); to anneal over the whole run set lr_scheduler.T_max to {epochs}.",
                stacklevel=2,
            )
        return OptimizerLRSchedulerConfig(
            optimizer=optimizer, lr_scheduler={"scheduler": scheduler, "interval": self.lr_scheduler_interval}
        )

    def _make_optimizer(self, parameters: Any) -> Optimizer:
        optimizer = self.optimizer(parameters) if self.optimizer else torch.optim.Adam(parameters)
        check_optimizer(optimizer, self.execution)
        if self.prior is not None:
            self.prior.check_optimizers([optimizer])
        return optimizer

    def _make_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        scheduler = self.lr_scheduler(optimizer) if self.lr_scheduler else None
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau would tie the members' learning rates together; use a scheduler that depends on "
                "the epoch or step only."
            )
        return scheduler

    def _describe_optimizer(self) -> dict[str, Any]:
        """Make optimizer and scheduler for a tensor of no network, to refuse bad settings now and to name them."""
        optimizer = self._make_optimizer([nn.Parameter(torch.zeros(2, 2))])
        settings = {name: optimizer.defaults.get(name) for name in ("lr", "weight_decay", "momentum")}
        described = {name: value for name, value in settings.items() if isinstance(value, int | float)}
        scheduler = self._make_scheduler(optimizer)
        return {
            **described,
            "optimizer_name": type(optimizer).__name__,
            "lr_scheduler_name": type(scheduler).__name__ if scheduler else "none",
        }

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Take all members' gradients on their own batches; images ``[M, B, C, H, W]``, labels ``[M, B]``."""
        images, labels = batch
        if images.dim() != 5 or len(images) != len(self.population):
            raise ValueError(
                f"Expected one batch of images per member, shape [{len(self.population)}, B, C, H, W], got "
                f"{list(images.shape)}; the datamodule has to make one order per entry of task.member_seeds, as "
                "those of lightning_sym.datamodules do."
            )
        step = self.population.step(
            images,
            labels,
            CrossEntropy(self.label_smoothing),
            skip=self.skipped,
            # Not the global step, which stands still while gradients accumulate. Ranks that share out the data
            # draw different masks.
            draw=derive_seed(self.current_epoch, batch_idx, 0 if self.member_parallel else self.global_rank),
        )
        losses, gradients, alive = self._without_diverged(step.losses, step.gradients)
        correct = 0 * alive if step.outputs is None else (step.outputs.argmax(2) == labels).sum(1) * alive
        self.train_metrics.add(self.rows(images.device), correct, losses, labels.shape[1] * alive)
        return carry_gradients(losses.sum() / alive.sum().clamp(min=1), gradients, self.population.trainable())

    def _without_diverged(self, losses: Tensor, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return losses and gradients, 0 for members that do not go on, and which members do, shape ``[m]``, bool."""
        finite = torch.isfinite(losses)
        if self.trainer.world_size > 1 and not self.member_parallel:
            # All ranks hold all members: what one rank cannot use, none may, or their weights would part.
            finite = self.trainer.strategy.reduce(finite.float(), reduce_op="sum") == self.trainer.world_size
        out = [index for index, number in enumerate(self.population.numbers) if number in self._stopped]
        alive = self._divergence.note(finite, out, self.current_epoch, self.global_step)
        if self._divergence.due and not self._stop_diverged():
            return losses, gradients, alive  # zeros already where members were skipped
        return losses.masked_fill(~alive, 0.0), self.population.without(gradients, alive), alive

    def _stop_diverged(self) -> bool:
        """Stop the members that have diverged since the last look; return whether there are any."""
        found = self._divergence.look()
        for index, (epoch, step) in found.items():
            self._stop(self.population.numbers[index], "its training loss is not finite", epoch, step)
        return bool(found)

    def _stop(self, number: int, reason: str, epoch: int, step: int) -> None:
        self._stopped[number] = {"epoch": epoch, "step": step, "reason": reason}
        if self.member_parallel or self.trainer.is_global_zero:  # said by a rank that holds the member, once
            warnings.warn(
                f"Member {number} was stopped in epoch {epoch}, step {step}: {reason}. The others go on.", stacklevel=2
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

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Keep what is not finite away from the optimizer; in a loop, stopped members stay as they are."""
        if self.prior is not None:
            self.prior.add_gradients()
        for number in self.skipped:
            if number in self.population.numbers:
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

    def on_train_epoch_end(self) -> None:
        """Log the epoch's training metrics."""
        self._log_members("train", self.train_metrics)
        self._average_buffers()  # no validation may have done so in this epoch, and a checkpoint has rank 0's only
        if self.keep == "last":
            self._keep_current({})
        if len(self.gathered()[0]) == self.members:
            raise ValueError(
                "All members were stopped, as their losses are not finite; lower the learning rate or look at the data."
            )

    # ---- validation, test, prediction

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Evaluate all members on the same images; images ``[B, C, H, W]``, labels ``[B]``.

        During a fit the current weights, otherwise (``lightning-sym validate``) the kept ones.
        """
        images, labels = batch
        self.val_metrics.update(self.rows(images.device), self.population(images), labels)

    def on_validation_epoch_end(self) -> None:
        """Log the members' validation metrics and keep the weights that are the best so far."""
        if self.trainer.sanity_checking:
            self.val_metrics.reset()
            return
        values = self._log_members("val", self.val_metrics)
        if self.trainer.state.fn != "fit":
            return
        for number in self.population.numbers:
            if number not in self.stopped and not math.isfinite(values["loss"][number - self.seed]):
                self._stop(number, "its validation loss is not finite", self.current_epoch, self.global_step)
        if self.keep == "best":
            self._keep_current(values)

    def _keep_current(self, values: Mapping[str, list[float]]) -> None:
        """Keep the current weights of the members for which they are the best."""
        for number in self.population.numbers:
            if number in self.stopped:
                continue
            metrics = {name: values[name][number - self.seed] for name in values}
            old = self.kept.get(number, {}).get("metrics")
            if metrics and old and (metrics["accuracy"], -metrics["loss"]) <= (old["accuracy"], -old["loss"]):
                continue
            self.kept[number] = {
                "epoch": self.current_epoch,
                "metrics": metrics,
                # Not on the accelerator, whose memory is for training; also what a checkpoint gives back.
                "state": {name: value.cpu() for name, value in self.population.member_state(number).items()},
                "epochs": self._epochs_trained(),
            }

    def _epochs_trained(self) -> float:
        """Return how many epochs have been trained by now, with the part of the current one."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return self.current_epoch + min(1.0, progress / max(1, int(self.trainer.num_training_batches)))

    def _log_members(self, split: str, metric: PopulationClassification) -> dict[str, list[float]]:
        """Log a metric per member and over members; return its values and clear it."""
        computed = metric.values()
        values = {name: computed[name].tolist() for name in ("accuracy", "loss")}
        metric.reset()
        stopped, _ = self.gathered()
        summary: dict[str, float] = {}
        single: dict[str, float] = {}
        for name, numbers in values.items():
            running = [
                value
                for number, value in zip(self.numbers, numbers, strict=True)
                if number not in stopped and math.isfinite(value)
            ]
            if running:
                summary[f"{split}/{name}"] = math.fsum(running) / len(running)
                summary[f"{split}/{name}/min"] = min(running)
                summary[f"{split}/{name}/max"] = max(running)
            for number, value in zip(self.numbers, numbers, strict=True):
                if number not in stopped and math.isfinite(value):
                    single[f"{split}/{name}/member-{number:04d}"] = value
            if self.trainer.state.fn == "fit":
                row = [
                    math.nan if number in stopped else value
                    for number, value in zip(self.numbers, numbers, strict=True)
                ]
                self.history.setdefault(f"{split}/{name}", []).append(row)
        if self.trainer.state.fn == "fit":
            self.history_epochs.setdefault(split, []).append(self._epochs_trained())
        # The values are the same on every rank already.
        for name, value in summary.items():
            self.log(name, value, prog_bar=name == "val/accuracy")
        # Straight to the loggers: self.log keeps a metric object per name, which costs a millisecond for each member.
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            for logger in self.loggers:
                logger.log_metrics(single, step=max(self.global_step - 1, 0))  # Lightning's step of an epoch's end
        return values

    def gathered(self) -> tuple[dict[int, dict[str, Any]], dict[int, float]]:
        """Return what became of the members of all ranks; to be called on every rank.

        Returns:
            Why and when members were stopped, and after how many epochs of training the kept weights were taken; by
            number, the same on every rank.
        """
        epochs = {number: record["epochs"] for number, record in self.kept.items()}
        if not self.member_parallel:
            return self.stopped, epochs
        parts: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(parts, (self.stopped, epochs))
        stopped = {number: record for part, _ in parts for number, record in part.items()}
        return stopped, {number: epoch for _, part in parts for number, epoch in part.items()}

    def on_test_model_eval(self) -> None:
        """Test the weights that were kept."""
        super().on_test_model_eval()
        self._swap_in()
        self.test_metrics = PopulationClassification(self.members).to(self.device)

    def on_test_model_train(self) -> None:
        """Put the current weights back."""
        super().on_test_model_train()
        self._swap_out()

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Evaluate the kept weights of all members on the same images."""
        images, labels = batch
        self.test_metrics.update(self.rows(images.device), self.population(images), labels)

    def on_test_epoch_end(self) -> None:
        """Log the members' test metrics."""
        self._log_members("test", self.test_metrics)

    def on_predict_model_eval(self) -> None:
        """Predict with the weights that were kept."""
        super().on_predict_model_eval()
        self._swap_in()

    def on_predict_model_train(self) -> None:
        """Put the current weights back."""
        self._swap_out()

    def predict_step(self, batch: tuple[Tensor, Tensor] | Tensor, batch_idx: int) -> Tensor:
        """Return class probabilities of the kept weights of all members. Shape ``[M, B, K]``."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        probabilities: Tensor = self.population(images).softmax(2)
        return probabilities

    def _swap_in(self) -> None:
        self._current = {number: self.population.member_state(number) for number in self.kept}
        for number, record in self.kept.items():
            self.population.set_member_state(number, record["state"])

    def _swap_out(self) -> None:
        for number, state in self._current.items():
            self.population.set_member_state(number, state)
        self._current = {}

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> dict[str, Tensor]:
        """Evaluate the kept weights of all members that were not stopped; to be called on every rank.

        Args:
            batches: Images ``[B, C, H, W]`` and labels ``[B]`` on any device; this rank's share.
            num_classes: ``K``.

        Returns:
            ``accuracy`` and ``loss``, shape ``[M]``, NaN for stopped members, and ``confusion``, shape ``[K, K]``:
            see :meth:`PopulationClassification.compute`. On the CPU, the same on every rank.
        """
        # After a fit Lightning has moved the module to the CPU; a resumed run without an epoch left gets here then.
        strategy = self.trainer.strategy
        device = strategy.root_device
        self.population.to(device)
        metric = PopulationClassification(self.members, num_classes).to(device)
        running = [index for index, number in enumerate(self.population.numbers) if number not in self.stopped]
        rows = self.rows(device)[running]
        mode = self.population.training
        self.population.eval()
        self._swap_in()
        for images, labels in batches:
            images = strategy.precision_plugin.convert_input(images.to(device))
            with strategy.precision_plugin.forward_context():
                logits = self.population(images)
            metric.update(rows, logits[running], labels.to(device))
        self._swap_out()
        self.population.train(mode)
        return metric.values()

    def split_metrics(self, data: "SplitData") -> dict[str, dict[str, Tensor]]:
        """Evaluate the kept weights on each split, once; to be called on every rank.

        Args:
            data: The datamodule. The training split is taken without augmentation.

        Returns:
            What :meth:`evaluate` returns, by split: ``train``, ``val`` (if there is one) and ``test``.
        """
        if self._split_metrics is None:
            loaders = {
                "train": data.curvature_dataloader(),
                "val": data.val_dataloader(),
                "test": data.test_dataloader(),
            }
            self._split_metrics = {
                # Not "if loader": one of length 0 is this rank's share of very few images.
                split: self.evaluate(loader, data.num_classes)
                for split, loader in loaders.items()
                if loader not in (None, [])
            }
        return self._split_metrics

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what has been kept, of all ranks' members."""
        kept, stopped = self.kept, self.stopped
        if self.member_parallel:
            parts = gather((self.kept, self.stopped))
            kept = {number: record for part, _ in parts for number, record in part.items()}
            stopped = {number: record for _, part in parts for number, record in part.items()}
        sums = self.train_metrics
        # On the device of the process group: after a fit Lightning has moved the module to the CPU.
        device = self.trainer.strategy.root_device
        totals = {name: getattr(sums, name).clone().to(device) for name in ("correct", "loss_sum", "count")}
        if self.trainer.world_size > 1:
            totals = {name: self.trainer.strategy.reduce(total, reduce_op="sum") for name, total in totals.items()}
        checkpoint["population"] = {
            "numbers": self.numbers,
            "execution": self.execution,
            "kept": kept,
            "stopped": stopped,
            "history": self.history,
            "history_epochs": self.history_epochs,
            "train_sums": totals,
            "processes": self.trainer.world_size if self.member_parallel else 1,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what had been kept.

        Raises:
            ValueError: If the checkpoint is of other members or of the other execution, or is resumed with another
                placement of the members.
        """
        saved = checkpoint.get("population")
        if saved is None:
            raise ValueError("The checkpoint holds no population: it was not written by a ZooTask.")
        for name, theirs, mine in (
            ("members", ranges(saved["numbers"]), ranges(self.numbers)),
            ("execution", saved["execution"], self.execution),
        ):
            if theirs != mine:
                raise ValueError(
                    f"The checkpoint has {name} {theirs} and this run has {mine}; use the settings that it was trained "
                    "with, which the config.yaml of its run holds."
                )
        processes = self.trainer.world_size if self.member_parallel else 1
        if saved["processes"] != processes and self._trainer is not None and self.trainer.state.fn == "fit":
            raise ValueError(
                f"The members of the checkpoint were placed on {saved['processes']} process(es) and those of this run "
                f"on {processes}; resume with the same strategy and number of processes."
            )
        own = set(self.population.numbers) if hasattr(self, "population") else set(self.numbers)
        self.kept = {number: record for number, record in saved["kept"].items() if number in own}
        self._divergence.forget()
        self._stopped = {number: record for number, record in saved["stopped"].items() if number in own}
        self.history = saved["history"]
        self.history_epochs = saved["history_epochs"]
        if self._trainer is None or self.trainer.is_global_zero:
            for name, value in saved["train_sums"].items():
                setattr(self.train_metrics, name, value.to(self.device))
        self.train_metrics._update_count = 1  # or it would warn at the end of an epoch that only had its end to go
