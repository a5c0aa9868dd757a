"""Many networks that begin with frozen lower parts they share, trained side by side in one fit."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_sym._random import derive_seed, seeded
from lightning_sym.networks import Network
from lightning_sym.population import _generator_state as generator_state
from lightning_sym.population import carry_gradients, zero_unless
from lightning_sym.stitching import CutNetwork, StitchedNetwork
from lightning_sym.tasks._divergence import Divergence
from lightning_sym.tasks._members import check_data
from lightning_sym.tasks.metrics import PopulationClassification
from lightning_sym.tasks.strategy import most_validation_batches
from lightning_sym.zoo import ModelZoo

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BranchTask(LightningModule):
    """Train many :class:`lightning_sym.stitching.StitchedNetwork` s, the branches, on lower parts that are run once.

    For each batch every lower part is run once, whatever the number of branches on it; then each branch is run upwards
    from its cut. Gradients are taken branch by branch, so that the memory is that of one branch, and handed to one
    ordinary ``backward()``. A branch depends on its own name, seed and data only: it comes out as if it were trained
    alone. One whose loss is not finite stops, and the others go on.

    A subclass sets, in :meth:`build`, what is described below.

    Args:
        optimizer: Makes one optimizer for all branches, from parameters or groups of them.
        lr_scheduler: Makes its scheduler, stepped after each epoch.
        channels_last: Lay images and weights out with the channels last: the same numbers up to rounding, often faster.
        allow: Packages of your own whose networks a zoo may hold, see ``ModelZoo.open``.

    Attributes:
        branches: The networks; after ``setup``.
        names: Their names, for logs and checkpoints.
        lowers: The cut networks, by key.
        lower_of: The key of each branch's lower part.
        members: Whole networks, by key, which are evaluated as they are, beside the branches.
        kept: By index of the branch: the epoch, metrics and state of the weights with the best validation accuracy (the
            lower loss among equals).
    """

    trained: nn.ModuleList

    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None,
        channels_last: bool,
        allow: Sequence[str] | None,
    ) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.allow = tuple(allow or ())
        optimizer_now = self._make_optimizer([nn.Parameter(torch.zeros(2, 2))])  # refuses bad settings now
        self._make_scheduler(optimizer_now)
        self.names: list[str] = []
        self.branches: tuple[StitchedNetwork, ...] = ()
        self.lowers: dict[str, CutNetwork] = {}
        self.lower_of: list[str] = []
        self.members: dict[str, Network] = {}
        self.kept: dict[int, dict[str, Any]] = {}
        self._stopped: dict[int, dict[str, Any]] = {}
        self._divergence = Divergence()
        self._statistics: list[dict[str, Tensor]] | None = None  # as they were before a recalibration
        self._current: list[dict[str, Tensor]] | None = None  # the current weights, while the kept ones are tested
        self._draws: dict[int, bool] = {}  # by index, whether training draws random numbers
        self._loss_sums = torch.zeros(0, dtype=torch.float64)
        self._loss_count = 0.0

    # ---- what a subclass adds

    @abstractmethod
    def build(self) -> None:
        """Open zoos and set ``names``, ``branches``, ``lowers``, ``lower_of`` and ``members``."""

    @abstractmethod
    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Make the optimizer that is used if none was given."""

    @property
    @abstractmethod
    def zoos(self) -> dict[str, tuple[ModelZoo, int]]:
        """The zoos that members come from, each with the number of one of them; data are checked against these."""

    def held(self) -> list[nn.Parameter]:
        """Return the parameters that stay as they are in this epoch."""
        return []

    def quantities(self, metrics: Mapping[str, list[float]], split: str) -> dict[str, float]:
        """Return what else is to be logged, by name, given accuracies and losses of branches, then members."""
        return {}

    # ---- set-up

    def setup(self, stage: str) -> None:
        """Build the branches, on every process.

        Raises:
            FileNotFoundError: If there is no zoo.
            ValueError: If members, sites or data do not fit, or the precision would tie branches together.
        """
        if self.trainer.precision == "16-mixed":
            raise ValueError(
                "precision 16-mixed ties the branches together (one gradient scale for all); use bf16-mixed or 32-true."
            )
        self._prepare()
        data, trial = getattr(self.trainer, "datamodule", None), bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        for zoo, number in self.zoos.values():
            check_data(zoo, number, data, trial=trial)

    def _prepare(self) -> None:
        if self.branches:
            return
        self.build()
        self.trained = nn.ModuleList(branch.trained for branch in self.branches)
        if not any(True for _ in self.trained.parameters()):
            self.nothing = nn.Parameter(torch.zeros(1))  # an optimizer, and DDP, want a parameter
        self._loss_sums = torch.zeros(len(self.branches), dtype=torch.float64)
        self.val_metrics = PopulationClassification(len(self.branches) + len(self.members))

    def _to_device(self, device: torch.device | None = None) -> None:
        device = self.device if device is None else device
        dtype = self.dtype if isinstance(self.dtype, torch.dtype) else None
        networks: list[nn.Module | CutNetwork] = [*self.branches, *self.members.values(), *self.cuts]
        for network in networks:
            network.to(device=device, dtype=dtype)
            if self.channels_last:
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._loss_sums = self._loss_sums.to(device)

    @property
    def cuts(self) -> list[CutNetwork]:
        """All cut networks; they follow the task from device to device."""
        return list(self.lowers.values())

    def on_fit_start(self) -> None:
        """Move the frozen networks to the device, and leave running statistics to the ranks' own averages."""
        self._to_device()
        if isinstance(self.trainer.strategy.model, DistributedDataParallel):
            self.trainer.strategy.model.broadcast_buffers = False
        for branch in self.branches:
            branch.train()
            branch.set_mode("soft")

    def teardown(self, stage: str) -> None:
        """Bring the frozen networks back to the CPU, where Lightning brings the maps."""
        self._to_device(torch.device("cpu"))

    def on_train_start(self) -> None:
        """Check that all ranks can validate."""
        most_validation_batches(self)

    # ---- optimizer

    def parameters_of(self, index: int) -> list[nn.Parameter]:
        """Return the trained parameters of a branch."""
        return [parameter for parameter in self.branches[index].trained.parameters() if parameter.requires_grad]

    def configure_optimizers(self) -> Any:
        """Make one optimizer for all branches; maps say which of their parameters do not decay."""
        if hasattr(self, "nothing"):
            return torch.optim.SGD([self.nothing], lr=0.0)
        spared = {
            id(parameter)
            for branch in self.branches
            for module in branch.stitching_maps
            for parameter in module.undecayed_parameters()
        }
        parameters = [p for index in range(len(self.branches)) for p in self.parameters_of(index)]
        groups: list[dict[str, Any]] = [{"params": [p for p in parameters if id(p) not in spared]}]
        groups.append({"params": [p for p in parameters if id(p) in spared], "weight_decay": 0.0})
        optimizer = self._make_optimizer([group for group in groups if group["params"]])
        scheduler = self._make_scheduler(optimizer)
        if scheduler is None:
            return optimizer
        return OptimizerLRSchedulerConfig(optimizer=optimizer, lr_scheduler={"scheduler": scheduler})

    def _make_optimizer(self, parameters: Any) -> Optimizer:
        optimizer = self.optimizer(parameters) if self.optimizer is not None else self.default_optimizer(parameters)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS searches along one direction for all branches together; use another optimizer.")
        return optimizer

    def _make_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        scheduler = self.lr_scheduler(optimizer) if self.lr_scheduler is not None else None
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau would tie the branches' learning rates together; use a scheduler that depends on "
                "the epoch only."
            )
        return scheduler

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Take gradients away from what must not change: stopped branches, and what is held."""
        for index in self._stopped:
            for parameter in self.parameters_of(index):
                parameter.grad = None
        for parameter in self.held():
            parameter.grad = None

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then project all maps: after real steps only, not while gradients accumulate."""
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for index, branch in enumerate(self.branches):
                if index in self._stopped:
                    continue
                try:
                    branch.project()
                except ValueError:  # what is not finite has no nearest doubly stochastic matrix
                    if not self._stop_unless_finite(index):
                        raise

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each branch's gradient by itself, so that branches stay independent."""
        if not gradient_clip_val:
            return
        for index in range(len(self.branches)):
            if gradient_clip_algorithm == "value":
                nn.utils.clip_grad_value_(self.parameters_of(index), gradient_clip_val)
            else:
                nn.utils.clip_grad_norm_(self.parameters_of(index), gradient_clip_val)

    # ---- training

    def values(self, images: Tensor) -> dict[str, dict[str, tuple[Any, ...]]]:
        """Return what crosses each cut of each lower part, without gradients."""
        images = self._laid_out(images)
        return {key: cut.values(images) for key, cut in self.lowers.items()}

    def _laid_out(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last) if self.channels_last else images

    def logits(self, index: int, values: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> Tensor:
        """Return the logits of a branch, ``[B, K]``, given all values."""
        branch = self.branches[index]
        return branch.stitched(values[self.lower_of[index]][branch.site])

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of all branches. Images ``[B, C, H, W]``, logits ``[S, B, K]``."""
        values = self.values(images)
        return torch.stack([self.logits(index, values) for index in range(len(self.branches))])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Take all branches' gradients on the same images; images ``[B, C, H, W]``, labels ``[B]``."""
        images, labels = batch
        if hasattr(self, "nothing"):
            return (0.0 * self.nothing).sum()
        values = self.values(images)
        losses = self._loss_sums.new_zeros(len(self.branches))
        owned = [self.parameters_of(index) for index in range(len(self.branches))]
        gradients: list[list[Tensor]] = []
        for index, branch in enumerate(self.branches):
            if not owned[index]:
                gradients.append([])
                continue
            if index in self._stopped:
                gradients.append([torch.zeros_like(parameter) for parameter in owned[index]])
                continue
            with self._drawing(index):
                logits = self.logits(index, values)
            loss = F.cross_entropy(logits, labels) + branch.regularization()
            losses[index] = loss.detach()
            with torch.autocast(images.device.type, enabled=False):
                found = torch.autograd.grad(loss, owned[index], allow_unused=True, materialize_grads=True)
            gradients.append(list(found))
        losses, gradients, alive = self._without_diverged(losses, gradients)
        self._loss_sums += losses * len(labels)
        self._loss_count += len(labels)
        return carry_gradients(
            (losses.sum() / alive.sum().clamp(min=1)).float(),
            [gradient for own in gradients for gradient in own],
            [parameter for own in owned for parameter in own],
        )

    @contextmanager
    def _drawing(self, index: int) -> Iterator[None]:
        """Seed what dropout of a branch draws, so that it depends on no other branch, nor on what ran before."""
        # Seeding takes longer than a small branch's step; the first step shows whether it is needed.
        if self._draws.get(index) is False:
            yield
            return
        keys = (self.names[index], self.global_rank, self.trainer.fit_loop.total_batch_idx)
        with seeded(derive_seed("branch", *keys)):
            before = generator_state(self.device)
            yield
            if index not in self._draws:
                self._draws[index] = not torch.equal(before, generator_state(self.device))

    def _without_diverged(
        self, losses: Tensor, gradients: list[list[Tensor]]
    ) -> tuple[Tensor, list[list[Tensor]], Tensor]:
        """Return losses and gradients, 0 for branches that do not go on, and which branches do, shape ``[S]``, bool."""
        finite = torch.isfinite(losses)
        if self.trainer.world_size > 1:
            # All ranks hold all branches: what one rank cannot use, none may, or their weights would part.
            finite = self.trainer.strategy.reduce(finite.float(), reduce_op="sum") == self.trainer.world_size
        out = [index for index, own in enumerate(gradients) if not own or index in self._stopped]
        alive = self._divergence.note(finite, out, self.current_epoch, self.global_step)
        if self._divergence.due and not self._stop_diverged():
            return losses, gradients, alive
        flagged = zip(alive.unbind(), gradients, strict=True)
        return losses.masked_fill(~alive, 0.0), [zero_unless(flag, own) for flag, own in flagged], alive

    def _stop_diverged(self) -> bool:
        """Stop the branches that have diverged since the last look; return whether there are any."""
        found = self._divergence.look()
        for index, (epoch, step) in found.items():
            self._stop(index, "its training loss is not finite", epoch, step)
        return bool(found)

    def _stop(self, index: int, reason: str, epoch: int | None = None, step: int | None = None) -> None:
        epoch = self.current_epoch if epoch is None else epoch
        step = self.global_step if step is None else step
        self._stopped[index] = {"epoch": epoch, "step": step, "reason": reason}
        rank_zero_warn(f"{self.names[index]} was stopped in epoch {epoch}, step {step}: {reason}. The others go on.")

    @property
    def stopped(self) -> dict[int, dict[str, Any]]:
        """Why and when branches were stopped, by index; waits until the device has caught up."""
        self._stop_diverged()
        return self._stopped

    def _stop_unless_finite(self, index: int) -> bool:
        """Stop a branch whose weights are not finite, which are the same on all ranks; return whether it was.

        Weights whose squares overflow count as not finite: batch norms hide them in training, but have no statistics.
        """
        finite = all(bool(parameter.square().sum().isfinite()) for parameter in self.parameters_of(index))
        if not finite and index not in self.stopped:
            self._stop(index, "its weights are not finite, or overflow when squared")
        return not finite

    def _loss_totals(self) -> tuple[Tensor, float]:
        """Return the sums of losses over all ranks."""
        both = torch.cat([self._loss_sums, self._loss_sums.new_tensor([self._loss_count])])
        if self.trainer.world_size > 1:
            # On the device of the process group: after a fit Lightning has moved the module to the CPU.
            both = self.trainer.strategy.reduce(both.to(self.trainer.strategy.root_device), reduce_op="sum")  # type: ignore[assignment]
        return both[:-1], float(both[-1])

    def on_train_epoch_end(self) -> None:
        """Log the epoch's mean training losses."""
        sums, count = self._loss_totals()
        self._loss_sums.zero_()
        self._loss_count = 0.0
        if count and not hasattr(self, "nothing"):
            trained = [i for i in range(len(self.branches)) if i not in self.stopped and self.parameters_of(i)]
            losses = {self.names[index]: float(sums[index]) / count for index in trained}
            self._log_each("train_loss", losses)
            if losses:
                self.log("train/loss", math.fsum(losses.values()) / len(losses), prog_bar=True)
        if sum(self.trainer.num_val_batches) == 0:
            self._keep(None)
        if len(self.stopped) == len(self.branches):
            raise ValueError(
                f"All {len(self.branches)} branches were stopped, as their losses are not finite; lower the learning "
                "rate or look at the data."
            )

    def _log_each(self, name: str, values: Mapping[str, float]) -> None:
        """Log one value per branch, the same on all ranks."""
        # Straight to the loggers: self.log keeps a metric object per name, which costs a millisecond for each.
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            named = {f"{branch}/{name}": value for branch, value in values.items() if math.isfinite(value)}
            for logger in self.loggers:
                logger.log_metrics(named, step=max(self.global_step - 1, 0))  # Lightning's step of an epoch's end

    # ---- evaluation

    def _begin_evaluation(self) -> None:
        """Make all branches what is evaluated: hard maps, running statistics (the mean over ranks)."""
        self._to_device(self.trainer.strategy.root_device)
        for index, branch in enumerate(self.branches):
            branch.eval()
            # A permutation cannot be rounded if it is not finite.
            if index not in self.stopped and not self._stop_unless_finite(index):
                branch.set_mode("hard")
        self._agree()

    def _agree(self) -> None:
        """Give all ranks the same statistics, the mean of what each has seen, and rank 0's buffers of maps."""
        if self.trainer.world_size == 1:
            return
        device = self.trainer.strategy.root_device  # that of the process group, also after a fit
        seen = [
            getattr(module, name)
            for branch in self.branches
            if branch.batch_norm == "batch"
            for module in branch.batch_norms().values()
            for name in ("running_mean", "running_var")
        ]
        if seen:
            flat = torch.cat([statistic.to(device, torch.float64).flatten() for statistic in seen])
            mean = self.trainer.strategy.reduce(flat, reduce_op="mean")
            assert isinstance(mean, Tensor)
            for statistic, values in zip(seen, torch.split(mean, [len(one) for one in seen]), strict=True):
                statistic.copy_(values)
        for branch in self.branches:
            for buffer in branch.maps.buffers():
                values = buffer.to(device)
                torch.distributed.broadcast(values, 0)
                buffer.copy_(values)

    def _end_evaluation(self) -> None:
        for branch in self.branches:
            branch.train()
            branch.set_mode("soft")

    # Not on_..._start, which comes after that of callbacks: a recalibration has to see what is evaluated.
    def on_validation_model_eval(self) -> None:
        """Prepare the branches: during a fit the current weights, otherwise the kept ones."""
        super().on_validation_model_eval()
        if self.trainer.state.fn != "fit":
            self._swap_in()
        self._begin_evaluation()
        self._statistics = [self._batch_statistics(branch) for branch in self.branches]
        self.val_metrics.to(self.trainer.strategy.root_device)

    def on_validation_model_train(self) -> None:
        """Go on training."""
        super().on_validation_model_train()
        self._end_evaluation()
        self._swap_out()

    def on_test_model_eval(self) -> None:
        """Prepare the branches with the weights that were kept."""
        super().on_test_model_eval()
        self._swap_in()
        self._begin_evaluation()
        self.val_metrics.to(self.trainer.strategy.root_device)

    def on_test_model_train(self) -> None:
        """Put the current weights back."""
        super().on_test_model_train()
        self._end_evaluation()
        self._swap_out()

    def _swap_in(self) -> None:
        if self.kept:
            self._current = [self._state(branch) for branch in self.branches]
            for index, record in self.kept.items():
                self._load(index, record["state"])

    def _swap_out(self) -> None:
        if self._current is not None:
            for index, state in enumerate(self._current):
                self._load(index, state)
            self._current = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block the branches have their kept weights, ready for :meth:`evaluate`; on every rank."""
        self._swap_in()
        try:
            self._begin_evaluation()
            yield
        finally:
            self._end_evaluation()
            self._swap_out()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, list[float]]:
        """Evaluate all branches as they are, and the members; within :meth:`evaluating`, on every rank.

        Args:
            batches: Images and labels on any device; this rank's share.

        Returns:
            ``accuracy`` and ``loss``: of the branches, then of the members; NaN for stopped branches. The same on every
            rank.
        """
        strategy = self.trainer.strategy
        device = strategy.root_device
        metric = PopulationClassification(len(self.branches) + len(self.members)).to(device)
        for images, labels in batches:
            images = strategy.precision_plugin.convert_input(images.to(device))
            with strategy.precision_plugin.forward_context():
                self._update(metric, images, labels.to(device))
        computed = metric.values()
        return {name: computed[name].tolist() for name in ("accuracy", "loss")}

    def _update(self, metric: PopulationClassification, images: Tensor, labels: Tensor) -> None:
        values = self.values(images)
        running = [index for index in range(len(self.branches)) if index not in self.stopped]
        logits = [self.logits(index, values) for index in running]
        logits += [network(self._laid_out(images)) for network in self.members.values()]
        rows = [*running, *range(len(self.branches), len(self.branches) + len(self.members))]
        if rows:
            metric.update(torch.tensor(rows, device=images.device), torch.stack(logits), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Evaluate all branches and members; images ``[B, C, H, W]``, labels ``[B]``."""
        self._update(self.val_metrics, *batch)

    def on_validation_epoch_end(self) -> None:
        """Log, and keep the weights that are the best so far."""
        if self.trainer.sanity_checking:
            self.val_metrics.reset()
            return
        metrics = self._finish("val")
        if self.trainer.state.fn == "fit":
            for index, loss in enumerate(metrics["loss"][: len(self.branches)]):
                if index not in self.stopped and not math.isfinite(loss):
                    self._stop(index, "its validation loss is not finite")
            self._keep(metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Evaluate all branches and members; images ``[B, C, H, W]``, labels ``[B]``."""
        self._update(self.val_metrics, *batch)

    def on_test_epoch_end(self) -> None:
        """Log."""
        self._finish("test")

    def _finish(self, split: str) -> dict[str, list[float]]:
        computed = self.val_metrics.values()
        self.val_metrics.reset()
        metrics = {name: computed[name].tolist() for name in ("accuracy", "loss")}
        names = [*self.names, *(f"member-{key}" for key in self.members)]
        for name, values in metrics.items():
            self._log_each(f"{split}_{name}", dict(zip(names, values, strict=True)))
        for name, value in self.quantities(metrics, split).items():
            if math.isfinite(value):
                self.log(name, value)
        return metrics

    # ---- what is kept

    def _keep(self, metrics: Mapping[str, list[float]] | None) -> None:
        """Keep the current weights of the branches for which they are the best; without metrics, of all."""
        for index, branch in enumerate(self.branches):
            if index in self.stopped or (metrics is None and self._stop_unless_finite(index)):
                continue
            found = {name: values[index] for name, values in metrics.items()} if metrics is not None else {}
            old = self.kept.get(index, {}).get("metrics")
            if found and old and (found["accuracy"], -found["loss"]) <= (old["accuracy"], -old["loss"]):
                continue
            state = self._state(branch)
            if metrics is not None and self._statistics is not None:
                state |= self._statistics[index]  # as training left them, not as recalibrated for this validation
            self.kept[index] = {
                "epoch": self.current_epoch,
                "metrics": found,
                # Not on the accelerator, whose memory is for training; also what a checkpoint gives back.
                "state": {name: value.cpu() for name, value in state.items()},
            }

    @staticmethod
    def _state(branch: StitchedNetwork) -> dict[str, Tensor]:
        """Return copies of a branch's trained parameters and its buffers."""
        frozen = {name for name, parameter in branch.named_parameters() if not parameter.requires_grad}
        return {name: value.detach().clone() for name, value in branch.state_dict().items() if name not in frozen}

    @staticmethod
    def _batch_statistics(branch: StitchedNetwork) -> dict[str, Tensor]:
        return {
            f"{name}.{part}": getattr(module, part).clone()
            for name, module in branch.batch_norms().items()
            for part in _STATISTICS
        }

    def _load(self, index: int, state: Mapping[str, Tensor]) -> None:
        branch = self.branches[index]
        missing, unexpected = branch.load_state_dict(dict(state), strict=False)
        frozen = {name for name, parameter in branch.named_parameters() if not parameter.requires_grad}
        if unexpected or set(missing) - frozen:
            raise ValueError(f"What was kept for {self.names[index]} does not fit; use the settings of that run.")

    # ---- recalibration, see lightning_sym.callbacks.BatchNormRecalibration

    def recalibration_targets(self, exact: bool = False) -> list[tuple[nn.Module, list[str]]]:
        """Return what batch norm statistics are measured on: networks, and the names of their batch norms.

        All branches at once, with one pass through each lower part; for exact statistics, where a pass ends at each
        batch norm, one by one.
        """
        running = [branch for index, branch in enumerate(self.branches) if index not in self.stopped]
        if exact:
            return [(branch, list(branch.batch_norms())) for branch in running if branch.batch_norms()]
        names = [f"branches.{i}.{name}" for i, branch in enumerate(running) for name in branch.batch_norms()]
        keys = [key for index, key in enumerate(self.lower_of) if index not in self.stopped]
        return [(_Together(self.lowers, running, keys), names)] if names else []

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what is kept, and the statistics of the branches; to be called on every rank, as Lightning does."""
        self._agree()
        losses, count = self._loss_totals()
        checkpoint["branches"] = {
            "names": list(self.names),
            "statistics": {
                index: {name: value.cpu() for name, value in self._batch_statistics(branch).items()}
                for index, branch in enumerate(self.branches)
            },
            "kept": dict(self.kept),
            "stopped": dict(self.stopped),
            "losses": losses.cpu(),
            "count": count,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what had been kept.

        Raises:
            ValueError: If the checkpoint is of another task or of other branches.
        """
        saved = checkpoint.get("branches")
        if saved is None:
            raise ValueError(f"The checkpoint holds no branches: it was not written by a {type(self).__name__}.")
        self._prepare()
        if saved["names"] != self.names:
            other = next((n for n in (*saved["names"], *self.names) if (n in self.names) != (n in saved["names"])), "")
            raise ValueError(
                f"The checkpoint is of other branches than this run ({other or 'in another order'!r} differs); use the "
                "settings and the zoo that it was made with, which the config.yaml of its run holds."
            )
        for index, statistics in saved["statistics"].items():
            norms = self.branches[index].batch_norms()
            for name, value in statistics.items():
                module, _, part = name.rpartition(".")
                getattr(norms[module], part).copy_(value)
        self.kept = {index: dict(record) for index, record in saved["kept"].items()}
        self._divergence.forget()
        self._stopped = {index: dict(record) for index, record in saved["stopped"].items()}
        if self._trainer is None or self.trainer.is_global_zero:  # what was added up over ranks is one rank's now
            self._loss_sums = saved["losses"].to(self._loss_sums)
            self._loss_count = saved["count"]


class _Together(nn.Module):
    """All branches on their lower parts, for one pass that measures the statistics of all."""

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
