"""Train one network under a Gaussian prior with fixed or learned precisions."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sym._checks import check_known
from lightning_sym._loading import LoadsTrusted
from lightning_sym.curvature import GaussianPrior
from lightning_sym.curvature.blocks import check_targets
from lightning_sym.networks import NetworkOrModule
from lightning_sym.networks.modes import evaluating
from lightning_sym.tasks._members import given_network
from lightning_sym.tasks._optimizers import make_scheduler, scheduled
from lightning_sym.tasks.metrics import PopulationClassification, PopulationLoss


class EquivarianceTask(LoadsTrusted, LightningModule):
    r"""Train a network to its maximum a posteriori weights under the present precisions of its Gaussian prior.

    The :class:`lightning_sym.curvature.GaussianPrior` defines the loss of a batch and the step of the prior. Alone, the
    task keeps every precision at ``precision``;
    :class:`lightning_sym.callbacks.MarginalLikelihood` learns them, and the noise.

    Args:
        network: A network, or its architecture, from images ``[B, C, H, W]``, or other inputs, to logits or means
            ``[B, K]``. Trained in place; every layer with parameters needs a curvature rule
            (:func:`lightning_sym.curvature.register_layer`).
        likelihood: ``"classification"``: softmax and class indices ``[B]``. ``"regression"``: Gaussian, targets
            ``[B, K]``.
        precision: Prior precision of all weights at the start, > 0.
        noise: Standard deviation :math:`\sigma` of a regression at the start, > 0.
        temperature: ``T`` > 0; 1 is Bayes.
        prior_step: How the prior acts: ``"gradient"``, ``"implicit"`` or ``"auto"``, see ``step`` of
            :class:`lightning_sym.curvature.GaussianPrior`.
        prior_on: ``"weights"``, or ``"lengthscales"``: also the inverse length scales of sparse layers with
            ``learn_lengthscale``, see ``on`` of the same class.
        optimizer: Makes the optimizer from parameters; default Adam with its defaults. Without weight decay.
        lr_scheduler: Makes the learning-rate scheduler from the optimizer; default none.
        lr_scheduler_interval: Whether the scheduler steps once per epoch or per optimizer step.
        allow: Your own packages with modules of ``network``, see :func:`lightning_sym.networks.build`.

    Attributes:
        prior: The prior, with the present precisions and noise, and the number of data; counted when a fit starts.

    Logged at the end of every epoch for split ``train`` and ``val``, and for ``test``: ``<split>/loss`` (without the
    prior; cross-entropy in nats, or squared error summed over outputs; mean over data) and, for a classification,
    ``<split>/accuracy``, in [0, 1]. Those of ``train`` are of the training steps.

    A checkpoint holds log precisions and log noise.

    Raises:
        ValueError: If an argument is out of range, the optimizer decays weights, a layer has no curvature rule, or the
            prior is on length scales and none is trained.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), arXiv:2310.06131; docs/theory/curvature.md, 2.2 to 2.4.
    """

    def __init__(
        self,
        network: NetworkOrModule,
        likelihood: Literal["classification", "regression"] = "classification",
        precision: float = 1.0,
        noise: float = 1.0,
        temperature: float = 1.0,
        prior_step: Literal["auto", "implicit", "gradient"] = "auto",
        prior_on: Literal["weights", "lengthscales"] = "weights",
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        allow: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_known("lr_scheduler_interval", lr_scheduler_interval, ("epoch", "step"))
        network = given_network(network, allow)
        self.network = network
        self.prior = GaussianPrior(
            network,
            precision,
            likelihood=likelihood,
            noise=noise,
            temperature=temperature,
            step=prior_step,
            on=prior_on,
        )
        self.likelihood = likelihood
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
        self.train_metrics, self.val_metrics = self._make_metric(), self._make_metric()

    @property
    def charts(self) -> dict[str, str]:
        """The tags of each chart that TensorBoard shows first, by title."""
        names = ["loss"] if self.likelihood == "regression" else ["accuracy", "loss"]
        return {name: f"(train|val)/{name}$" for name in names}

    def _make_metric(self) -> PopulationLoss:
        return PopulationLoss(1) if self.likelihood == "regression" else PopulationClassification(1)

    # ---- training

    def on_fit_start(self) -> None:
        """Count the data, and let the prior act after each step where it is implicit.

        Raises:
            EmptyLoaderError: If there are none.
            ValueError: If there is no datamodule that says which, or the prior does not go with an optimizer.
        """
        self.prior.start(self.trainer.optimizers, getattr(self.trainer, "datamodule", None))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits or means ``[B, K]``."""
        outputs: Tensor = self.network(inputs)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch; inputs ``[B, ...]``, labels ``[B]`` or targets ``[B, K]``."""
        return self._loss(batch, self.train_metrics)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Add the gradient of the prior, where it is not implicit."""
        self.prior.add_gradients()

    def _loss(self, batch: tuple[Tensor, Tensor], metrics: PopulationLoss) -> Tensor:
        """Return the mean loss of a batch and add it to a split's sums."""
        inputs, targets = batch[:2]
        outputs = self(inputs)
        check_targets(outputs, targets, self.likelihood)
        if self.likelihood == "regression":
            loss: Tensor = (outputs - targets).square().sum() / len(outputs)
        else:
            loss = F.cross_entropy(outputs, targets.long())
        row = torch.zeros(1, dtype=torch.int64, device=outputs.device)
        metrics.add_step(row, loss.detach()[None], len(inputs), outputs.detach()[None], targets[None])
        return loss

    def _log_split(self, split: str, metrics: PopulationLoss) -> None:
        for name, value in metrics.values().items():
            self.log(f"{split}/{name}", float(value[0]), prog_bar=split == "val")  # the same on every rank already
        metrics.reset()

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
        self._loss(batch, self.val_metrics)

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self._log_split("test", self.val_metrics)

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
        metrics = self._make_metric().to(strategy.root_device)
        with evaluating(self):
            for inputs, targets in batches:
                inputs = strategy.precision_plugin.convert_input(inputs.to(strategy.root_device))
                with strategy.precision_plugin.forward_context():
                    self._loss((inputs, targets.to(strategy.root_device)), metrics)
        return {name: float(value[0]) for name, value in metrics.values().items()}

    # ---- optimizer

    def configure_optimizers(self) -> Any:
        """Make optimizer and scheduler."""
        optimizer = self._make_optimizer([p for p in self.network.parameters() if p.requires_grad])
        scheduler = make_scheduler(self.lr_scheduler, optimizer, self, self.lr_scheduler_interval)
        return scheduled(self, optimizer, scheduler, self.lr_scheduler_interval)

    def _make_optimizer(self, parameters: Any) -> Optimizer:
        optimizer = self.optimizer(parameters) if self.optimizer else torch.optim.Adam(parameters)
        self.prior.check_optimizers([optimizer])
        return optimizer

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the prior, and the training metrics of an epoch that is not over."""
        sums = self.train_metrics.totals(self.trainer)
        checkpoint["prior"] = {**self.prior.members[None].state_dict(), "train_sums": sums}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the prior back and, in a fit, the training metrics.

        Raises:
            ValueError: If the checkpoint holds none, or one of another network.
        """
        saved = checkpoint.get("prior")
        if saved is None:
            raise ValueError("The checkpoint holds no prior: it was not written by an EquivarianceTask.")
        self.prior.members[None].load_state_dict(saved)
        if self._trainer is None or self.trainer.state.fn != "fit":
            return  # training after evaluation begins a new epoch
        if self.trainer.is_global_zero:
            self.train_metrics.set_totals(saved["train_sums"])
