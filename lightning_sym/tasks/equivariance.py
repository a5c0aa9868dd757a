"""Training one network under a Gaussian prior whose precisions may be learned."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_sym._text import unknown
from lightning_sym.curvature import parameter_groups
from lightning_sym.networks import Network, build
from lightning_sym.tasks._prior import (
    count_data,
    decays_weights,
    has_implicit_step,
    prior_strength,
    shrink,
    warn_of_missing_classes,
)
from lightning_sym.tasks.metrics import PopulationClassification


class EquivarianceTask(LightningModule):
    r"""Train a network to its maximum a posteriori weights under the present precisions of its Gaussian prior.

    The loss of a batch of m of the N data is, for a classification,

    .. math:: \frac1m \sum \mathrm{CE} + \frac{T}{2N} \sum_l \delta_l \|\theta_l\|^2,

    and for a regression with noise :math:`\sigma`, whose errors are summed over outputs,

    .. math:: \frac1m \sum \|y - f\|^2 + \frac{2 \sigma^2 T}{2N} \sum_l \delta_l \|\theta_l\|^2 :

    the negative log joint probability over N, up to a constant. Alone, the task keeps every precision at ``precision``;
    :class:`lightning_sym.callbacks.MarginalLikelihood` learns them, and the noise. Positions and lengthscales of sparse
    layers have no prior.

    With ``prior_step="implicit"`` the prior is no part of the loss that is differentiated; instead, after every step of
    the optimizer with learning rate :math:`\eta`, weights are divided by :math:`1 + \eta c_l / d`, where
    :math:`c_l = T \delta_l / N` (times :math:`2 \sigma^2` for a regression): the proximal step in the metric d of the
    optimizer, which is :math:`1 - \beta` for SGD with momentum :math:`\beta`, and elementwise
    :math:`\sqrt{\hat v} + \epsilon` for Adam. It comes to rest at the same weights, where :math:`c_l \theta` is minus
    the mean gradient of the fit, and is stable for every precision. With the gradient of the prior, SGD is so only if
    :math:`\eta c_l < 2 (1 + \beta)`, and Adam makes the weights of a path that is switched off swing about 0 at the
    scale of :math:`\eta`, so that they are noise to the other paths and their precision cannot rise.

    Args:
        network: From images ``[B, C, H, W]``, or other inputs, to logits or means ``[B, K]``. Trained in place; every
            layer with parameters needs a curvature rule (:func:`lightning_sym.curvature.register_layer`).
        likelihood: ``"classification"``: softmax and class indices ``[B]``. ``"regression"``: Gaussian, targets
            ``[B, K]``.
        precision: Prior precision of all weights at the start, > 0.
        noise: Standard deviation :math:`\sigma` of a regression at the start, > 0.
        temperature: ``T`` > 0; 1 is Bayes.
        prior_step: ``"gradient"``: the prior is part of the loss. ``"implicit"``: see above, for ``torch.optim.SGD``,
            ``Adam`` and ``AdamW`` (with ``weight_decay=0``), not for subclasses. ``"auto"``: implicit for these, and
            gradient for all other optimizers.
        optimizer: Makes the optimizer from parameters; default Adam with its defaults. Without weight decay.
        lr_scheduler: Makes the learning-rate scheduler from the optimizer; default none.
        lr_scheduler_interval: Whether the scheduler steps once per epoch or per optimizer step.

    Attributes:
        log_precisions: Logarithm of the precision of every parameter that has a prior, by name.
        log_noise: Logarithm of :math:`\sigma`.
        samples: Number N of data, of all processes; counted when a fit starts.

    Logged at the end of every epoch for split ``train`` and ``val``, and for ``test``: ``<split>/loss`` (without the
    prior; cross-entropy in nats, or squared error summed over outputs; mean over data) and, for a classification,
    ``<split>/accuracy``, in [0, 1]. Those of ``train`` are of the training steps.

    A checkpoint holds log precisions and log noise.

    Raises:
        ValueError: If an argument is out of range, the optimizer decays weights, or a layer has no curvature rule.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), arXiv:2310.06131; docs/theory/curvature.md, 2.2 and 2.3.
    """

    def __init__(
        self,
        network: Network,
        likelihood: Literal["classification", "regression"] = "classification",
        precision: float = 1.0,
        noise: float = 1.0,
        temperature: float = 1.0,
        prior_step: Literal["auto", "implicit", "gradient"] = "auto",
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__()
        if isinstance(network, Mapping):  # from a checkpoint, by way of load_from_checkpoint
            network = build(network)
        for name, value in (("precision", precision), ("noise", noise), ("temperature", temperature)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number > 0, got {value}.")
        for name, choice, accepted in (
            ("likelihood", likelihood, ("classification", "regression")),
            ("prior_step", prior_step, ("auto", "implicit", "gradient")),
            ("lr_scheduler_interval", lr_scheduler_interval, ("epoch", "step")),
        ):
            if choice not in accepted:
                raise ValueError(unknown(name, choice, accepted))
        self.network = network
        self.likelihood = likelihood
        self.temperature = temperature
        self.prior_step = prior_step
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.lr_scheduler_interval = lr_scheduler_interval
        self.save_hyperparameters(ignore=["network", "optimizer", "lr_scheduler"])
        kind = type(self)
        trial = self._make_optimizer([nn.Parameter(torch.zeros(2, 2))])  # refuses bad settings now
        self.save_hyperparameters(
            {
                "network": network.architecture,
                "_class_path": f"{kind.__module__}.{kind.__qualname__}",
                "optimizer_name": type(trial).__name__,
                **{name: trial.defaults[name] for name in ("lr", "momentum") if trial.defaults.get(name) is not None},
            }
        )
        start = math.log(precision)
        self.log_precisions: dict[str, float] = dict.fromkeys(parameter_groups(network).precisions, start)
        self.log_noise = math.log(noise) if likelihood == "regression" else 0.0
        self.samples = 0
        self.train_metrics, self.val_metrics, self.test_metrics = (PopulationClassification(1) for _ in range(3))

    # ---- prior

    def set_prior(self, log_precisions: Mapping[str, float], log_noise: float = 0.0) -> None:
        """Change the prior that the next steps are taken with.

        Args:
            log_precisions: By parameter, for all that have a prior.
            log_noise: Logarithm of the noise of a regression.

        Raises:
            ValueError: If they are of other parameters.
        """
        if log_precisions.keys() != self.log_precisions.keys():
            raise ValueError("The precisions are not those of this network's parameters; make both from one network.")
        self.log_precisions = {name: float(value) for name, value in log_precisions.items()}
        self.log_noise = float(log_noise)

    def prior_strengths(self) -> dict[str, float]:
        """Return, by parameter, ``c`` in the prior's part ``sum c |theta|^2 / 2`` of the loss.

        Raises:
            ValueError: If the data have not been counted yet; that is when a fit starts.
        """
        if self.samples < 1:
            raise ValueError("The prior is relative to the number of data, counted when a fit starts; set samples.")
        factor = self.temperature
        if self.likelihood == "regression":
            factor *= 2 * math.exp(2 * self.log_noise)
        return {name: factor * prior_strength(value, self.samples) for name, value in self.log_precisions.items()}

    def prior_term(self) -> Tensor:
        """Return the prior's part of the loss, a scalar."""
        parameters = dict(self.network.named_parameters())
        terms = [c / 2 * parameters[name].square().sum() for name, c in self.prior_strengths().items()]
        return torch.stack(terms).sum()

    @property
    def implicit(self) -> bool:
        """Whether the prior acts after the steps of the optimizer, and not by way of the loss."""
        return self.prior_step == "implicit" or (self.prior_step == "auto" and self._has_implicit_step)

    def _shrink(self, optimizer: Optimizer, *_: Any) -> None:
        """Take the implicit step; called after every step of the optimizer."""
        parameters = dict(self.network.named_parameters())
        shrink(optimizer, {id(parameters[name]): c for name, c in self.prior_strengths().items()})

    # ---- training

    def on_fit_start(self) -> None:
        """Count the data, and let the prior act after each step where it is implicit.

        Raises:
            EmptyLoaderError: If there are none.
            ValueError: If there is no datamodule that says which, or the prior does not go with an optimizer.
        """
        data: Any = getattr(self.trainer, "datamodule", None)
        if data is None or not hasattr(data, "curvature_dataloader"):
            raise ValueError(
                "EquivarianceTask needs a datamodule with curvature_dataloader(), which gives each training datum "
                "once, as those of lightning_sym.datamodules; pass one to trainer.fit(task, datamodule)."
            )
        self.samples, counts = count_data(data.curvature_dataloader())
        if self.likelihood == "classification" and self.trainer.is_global_zero:
            warn_of_missing_classes(counts, getattr(data, "num_classes", len(counts)))
        self._check_optimizers(self.trainer.optimizers)  # a subclass may make others
        if self.implicit:
            for optimizer in self.trainer.optimizers:
                optimizer.register_step_post_hook(self._shrink)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits or means ``[B, K]``."""
        outputs: Tensor = self.network(inputs)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch; inputs ``[B, ...]``, labels ``[B]`` or targets ``[B, K]``."""
        loss = self._loss(batch, self.train_metrics)
        return loss if self.implicit else loss + self.prior_term()

    def _loss(self, batch: tuple[Tensor, Tensor], metrics: PopulationClassification) -> Tensor:
        """Return the mean loss of a batch and add it to a split's sums."""
        inputs, targets = batch[:2]
        outputs = self(inputs)
        if self.likelihood == "regression":
            if targets.shape != outputs.shape:
                raise ValueError(
                    f"Regression targets must have the shape of the outputs, {list(outputs.shape)}, got "
                    f"{list(targets.shape)}; reshape them in the datamodule."
                )
            loss: Tensor = (outputs - targets).square().sum() / len(outputs)
            correct = torch.zeros(1, dtype=torch.int64, device=outputs.device)
        else:
            if targets.shape != outputs.shape[:1] or targets.is_floating_point():
                raise ValueError(
                    f"Labels must be class indices of shape [{len(outputs)}], got {targets.dtype} of shape "
                    f"{list(targets.shape)}; for values choose likelihood regression."
                )
            loss = F.cross_entropy(outputs, targets.long())
            correct = (outputs.argmax(1) == targets).sum()[None]
        metrics.add(torch.zeros(1, dtype=torch.int64, device=outputs.device), correct, loss.detach()[None], len(inputs))
        return loss

    def _log_split(self, split: str, metrics: PopulationClassification) -> None:
        values = {name: float(value[0]) for name, value in metrics.values().items()}
        metrics.reset()
        for name in ("loss",) if self.likelihood == "regression" else ("accuracy", "loss"):
            self.log(f"{split}/{name}", values[name], prog_bar=split == "val")  # the same on every rank already

    def on_train_epoch_end(self) -> None:
        """Log the epoch's training metrics."""
        self._log_split("train", self.train_metrics)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Evaluate a batch of the validation split."""
        self._loss(batch, self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        if self.trainer.sanity_checking:
            self.val_metrics.reset()
        else:
            self._log_split("val", self.val_metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Evaluate a batch of the test split."""
        self._loss(batch, self.test_metrics)

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self._log_split("test", self.test_metrics)

    def predict_step(self, batch: tuple[Tensor, Tensor] | Tensor, batch_idx: int) -> Tensor:
        """Return class probabilities, or means. Shape ``[B, K]``."""
        outputs: Tensor = self(batch if isinstance(batch, Tensor) else batch[0])
        return outputs.softmax(1) if self.likelihood == "classification" else outputs

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Evaluate the present weights; to be called on every rank, also after a fit.

        Args:
            batches: Inputs and labels or targets; this rank's share.

        Returns:
            ``loss`` and, for a classification, ``accuracy``; as logged, over all ranks.
        """
        strategy = self.trainer.strategy
        self.to(strategy.root_device)  # after a fit Lightning has moved the module to the CPU
        metrics = PopulationClassification(1).to(strategy.root_device)
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        for inputs, targets in batches:
            inputs = strategy.precision_plugin.convert_input(inputs.to(strategy.root_device))
            with strategy.precision_plugin.forward_context():
                self._loss((inputs, targets.to(strategy.root_device)), metrics)
        for module, training in modes:
            module.training = training
        values = {name: float(value[0]) for name, value in metrics.values().items()}
        return {"loss": values["loss"]} if self.likelihood == "regression" else values

    # ---- optimizer

    def configure_optimizers(self) -> Any:
        """Make optimizer and scheduler."""
        optimizer = self._make_optimizer([p for p in self.network.parameters() if p.requires_grad])
        scheduler = self.lr_scheduler(optimizer) if self.lr_scheduler else None
        if scheduler is None:
            return optimizer
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau waits for a metric, which changes with the prior; use a scheduler that depends on "
                "the epoch or step only."
            )
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
        self._check_optimizers([optimizer])
        return optimizer

    def _check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise unless the prior goes with optimizers, and keep whether it can act after their steps."""
        for optimizer in optimizers:
            if decays_weights(optimizer):
                raise ValueError(
                    f"{type(optimizer).__name__} decays weights, which the prior of EquivarianceTask does by itself; "
                    "set weight_decay to 0."
                )
            if self.prior_step == "implicit" and not has_implicit_step(optimizer):
                raise ValueError(
                    f"prior_step implicit is for torch.optim.SGD, Adam and AdamW, got {type(optimizer).__name__}; use "
                    "gradient or auto."
                )
        self._has_implicit_step = all(has_implicit_step(optimizer) for optimizer in optimizers)

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the prior, and the training metrics of an epoch that is not over."""
        device = self.trainer.strategy.root_device  # after a fit Lightning has moved the module to the CPU
        sums = {name: getattr(self.train_metrics, name).clone().to(device) for name in ("correct", "loss_sum", "count")}
        if self.trainer.world_size > 1:
            sums = {name: self.trainer.strategy.reduce(total, reduce_op="sum") for name, total in sums.items()}
        checkpoint["prior"] = {
            "log_precisions": self.log_precisions,
            "log_noise": self.log_noise,
            "train_sums": sums,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the prior back and, in a fit, the training metrics.

        Raises:
            ValueError: If the checkpoint holds none, or one of another network.
        """
        saved = checkpoint.get("prior")
        if saved is None:
            raise ValueError("The checkpoint holds no prior: it was not written by an EquivarianceTask.")
        self.set_prior(saved["log_precisions"], saved["log_noise"])
        if self._trainer is None or self.trainer.state.fn != "fit":
            return  # what is trained later begins with an epoch of its own
        if self.trainer.is_global_zero:
            for name, value in saved["train_sums"].items():
                setattr(self.train_metrics, name, value.to(self.device))
        self.train_metrics._update_count = 1  # or it would warn at the end of an epoch that only had its end to go
