"""Training a zoo: many members of one architecture in one fit."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym.curvature import GaussianPrior
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.networks import Network, NetworkOrModule, WrappedNetwork
from lightning_sym.population import LoopPopulation, Population
from lightning_sym.tasks._members import check_data, given_network
from lightning_sym.tasks._optimizers import describe_optimizer
from lightning_sym.tasks.losses import CrossEntropy, SquaredDistance
from lightning_sym.tasks.metrics import PopulationClassification
from lightning_sym.tasks.population import PopulationTask
from lightning_sym.zoo import ModelZoo

# Below, both gamma variates of a draw may be 0 in float64, and their share is then 1/2 instead of 0 or 1.
_LEAST = 0.01


class ZooTask(PopulationTask):
    r"""Train many members of one architecture that differ by seed only.

    Member ``n`` has the initial weights of ``network.fresh(n)`` and its own order of the training data, both from
    its number alone: with ``execution="loop"`` on a CPU a member is bitwise the one that would have been trained alone.
    See :class:`lightning_sym.tasks.PopulationTask` for the behaviour that all tasks with several networks share:
    diverging members, placement on processes, kept weights, logs and checkpoints.

    Args:
        network: The architecture; its own weights are not used. On the command line any module's class may be named,
            which is wrapped: of packages other than this one and torchvision those in ``allow``. Default: that of the
            zoo ``initial``.
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
        mixup: Parameter of the beta distribution of weights in mixtures of two inputs and of their labels, one for each
            batch of a member; 0 for none, or >= 0.01.
        cutmix: The same for CutMix, where a rectangle of an image is replaced by that of another. With both, each batch
            gets one of the two, equally probable. Classes only, with the default loss. 0 or >= 0.01.
        mixing_epochs: For how many epochs there are mixtures; default all. >= 1.
        keep: Which weights of a member are kept: of the ``"best"`` epoch by validation accuracy (ties: the lower
            validation loss, then the earlier epoch), as in the paper, or of the ``"last"`` epoch.
        channels_last: Keep images in ``torch.channels_last`` layout (``"loop"`` only). Often faster for
            convolutions; changes results by rounding.
        loss: Called as ``loss(outputs, targets)`` with one member's outputs and targets of a batch; returns one number.
            Default the mean cross-entropy, in nats. With another loss there are no accuracies: only it is logged, and
            the best epoch is that with the lowest one. In YAML the path of a function or of a class, as
            ``torch.nn.MSELoss``.
        prior_precision: Precision of the Gaussian prior of all weights at the start, > 0; it needs an optimizer without
            weight decay, and the plain cross-entropy or, for a regression, the loss
            :class:`lightning_sym.tasks.SquaredDistance`. Default: members have no prior.
        initial: Folder of a zoo with the initial weights of members with these numbers. Default: random weights.
        allow: Your own packages with modules of ``network``, and with networks of the zoo ``initial``,
            see ``ModelZoo.open``.

    Attributes:
        prior: :class:`lightning_sym.curvature.GaussianPrior` of the members; None if they have none.
            :class:`lightning_sym.callbacks.MarginalLikelihood` learns its precisions.

    Raises:
        ValueError: If an argument is out of range.

    Warns:
        UserWarning: If there is a prior, and ``training_batch`` is overridden: the evidence is of the original data.

    References:
        Godfrey, Brown, Emerson, Kvinge (2022), "On the Symmetries of Deep Learning Models and their Internal
        Representations", arXiv:2205.14258, appendix D.1. We choose the epoch on a validation split where the paper
        uses the test set. Mixtures: Zhang et al. (2018), "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412;
        Yun et al. (2019), "CutMix: Regularization Strategy to Train Strong Classifiers", arXiv:1905.04899.
    """

    def __init__(
        self,
        network: NetworkOrModule | None = None,
        members: int = 4,
        seed: int = 0,
        execution: Literal["loop", "vmap"] = "loop",
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        weight_decay_on: Literal["all", "weights"] = "all",
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mixing_epochs: int | None = None,
        keep: Literal["best", "last"] = "best",
        channels_last: bool = False,
        loss: Callable[[Any, Any], Any] | None = None,
        prior_precision: float | None = None,
        initial: str | None = None,
        allow: Sequence[str] | None = None,
    ) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}.")
        if label_smoothing and loss is not None:
            raise ValueError("label_smoothing is of the cross-entropy, and loss is another one; drop one of the two.")
        check_mixing(mixup, cutmix, mixing_epochs)
        if (mixup or cutmix) and (loss is not None or prior_precision is not None):
            other = "a prior, of the original data" if loss is None else "a loss of its own"
            raise ValueError(
                f"mixup and cutmix change the labels of the cross-entropy, and there is {other}; drop one."
            )
        if channels_last and execution == "vmap":
            raise ValueError('channels_last works with execution="loop" only; drop one of the two.')
        super().__init__(
            members,
            seed,
            execution=execution,
            loss=CrossEntropy(label_smoothing) if loss is None else loss,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            lr_scheduler_interval=lr_scheduler_interval,
            weight_decay_on=weight_decay_on,
            keep=keep,
        )
        if network is None:
            if initial is None:
                raise ValueError("network is missing; give the architecture, or the folder of a zoo as initial.")
            architecture: object = ModelZoo.open(initial, allow=allow or ()).architecture
        else:
            architecture = network
        network = given_network(architecture, allow)
        self._template = (network,)  # in a tuple: the template's weights are no part of the population
        self.members = members
        self.initial = initial
        self.allow = tuple(allow or ())
        self.label_smoothing = label_smoothing
        self.mixup, self.cutmix, self.mixing_epochs = mixup, cutmix, mixing_epochs
        self.channels_last = channels_last
        if prior_precision is not None:
            regression = isinstance(loss, SquaredDistance)
            if label_smoothing or (loss is not None and not regression):
                setting = f"label_smoothing {label_smoothing}" if loss is None else f"loss {self._loss_name}"
                raise ValueError(
                    f"With {setting} the loss is no log likelihood, which prior_precision needs; use the plain "
                    "cross-entropy, lightning_sym.tasks.SquaredDistance for values, or leave prior_precision out."
                )
            self.prior = GaussianPrior(
                network.fresh(seed),
                prior_precision,
                likelihood="regression" if regression else "classification",
                members=self.numbers,
            )
            describe_optimizer(self)  # refuses weight decay now
            if type(self).training_batch is not ZooTask.training_batch:
                warnings.warn(
                    f"{type(self).__name__} changes training batches (training_batch), and the evidence of "
                    "prior_precision is that of the original data: with changed targets, as in mixup, the training "
                    "loss is not their log likelihood.",
                    stacklevel=2,
                )
        self._split_metrics: dict[str, dict[str, Tensor]] | None = None
        self.save_hyperparameters(ignore=["network", "optimizer", "lr_scheduler", "loss"])
        self.save_hyperparameters({"network": network.architecture, **self.describe()})
        if isinstance(network, WrappedNetwork):
            self.hparams.pop("_instantiator", None)  # Lightning's would make the module without its wrapper

    @property
    def network(self) -> Network:
        """The architecture that the members are made from."""
        return self._template[0]

    def setup(self, stage: str) -> None:
        """Check that the trainer, and the data if training continues from a zoo, suit the members.

        Raises:
            FileNotFoundError: If there is no such zoo.
            ValueError: If the trainer would tie the members together, the zoo's members do not suit, or data with
                mixtures do not say how many classes there are.
        """
        super().setup(stage)
        if (self.mixup or self.cutmix) and stage == "fit" and self._classes() is None:
            raise ValueError(
                "mixup and cutmix need the number of classes, and the data have no num_classes; give a datamodule with "
                "this attribute, or set both to 0."
            )
        if self.initial is not None and stage == "fit":
            data, trial = getattr(self.trainer, "datamodule", None), bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
            check_data(self._open_initial(), self.parent_of(self.seed), data, trial=trial)

    def _open_initial(self) -> ModelZoo:
        assert self.initial is not None
        zoo = ModelZoo.open(self.initial, allow=self.allow)
        if zoo.architecture != self.network.architecture:
            raise ValueError(
                f"The zoo at {zoo.path} holds {zoo.architecture} and network is {self.network.architecture}; give the "
                "architecture of the zoo."
            )
        return zoo

    def make_member(self, number: int) -> nn.Module:
        """Return the architecture with the weights of a seed, or of a member of the initial zoo."""
        if self.initial is None:
            return self.network.fresh(number)
        return self._open_initial().load(self.parent_of(number)).train()

    def parent_of(self, number: int) -> int:
        """Return the index of the member of the initial zoo that a member starts from."""
        return number

    def member_settings(self, number: int) -> dict[str, Any]:
        """Return the training settings of one member that differ from those of others, for its file."""
        return {}

    def identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the run that loads it must share; mixtures belong to the loss."""
        identity = super().identity()
        if self.mixup or self.cutmix:
            epochs = "" if self.mixing_epochs is None else f", mixing_epochs={self.mixing_epochs}"
            identity["loss"] += f" of mixtures (mixup={self.mixup}, cutmix={self.cutmix}{epochs})"
        return identity

    def make_population(self, numbers: list[int]) -> Population:
        """Return the members with these numbers, of this rank."""
        if self.execution == "loop":
            return LoopPopulation(self.make_member, numbers, channels_last=self.channels_last)
        return super().make_population(numbers)

    def training_batch(self, batch: Any, batch_idx: int) -> tuple[Tensor, Any]:
        """Return inputs and targets, mixed with those of another input if that is wanted."""
        inputs, targets = super().training_batch(batch, batch_idx)
        over = self.mixing_epochs is not None and self.current_epoch >= self.mixing_epochs
        if over or not (self.mixup or self.cutmix):
            return inputs, targets
        randoms = [self.step_generator("mixing", number, batch_idx) for number in self.population.numbers]
        shares = [own_shares(self.mixup, self.cutmix, inputs.shape[2:], random) for random in randoms]
        classes = self._classes()
        assert classes is not None
        return mixed(inputs, targets, shares, classes)

    def _classes(self) -> int | None:
        """Return the number of classes of the data; None if they do not say."""
        return getattr(getattr(self.trainer, "datamodule", None), "num_classes", None)

    def on_train_start(self) -> None:
        """Check that there are weights to train, and that the best ones can be told."""
        super().on_train_start()
        if hasattr(self, "nothing") and self.population.numbers:
            warnings.warn("No parameter of the network requires gradients, so that nothing is trained.", stacklevel=2)
        self._split_metrics = None

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return class probabilities of the kept weights of all members, ``[M, B, K]``; outputs with another loss."""
        outputs = super().predict_step(batch, batch_idx)
        return outputs.softmax(2) if self.classifies else outputs

    def split_metrics(self, data: InMemoryDataModule) -> dict[str, dict[str, Tensor]]:
        """Evaluate the kept weights on each split, once; to be called on every rank.

        Args:
            data: The datamodule. The training split is taken without augmentation.

        Returns:
            The result of :meth:`evaluate`, by split: ``train``, ``val`` (if there is one) and ``test``; with accuracies
            also ``confusion``, shape ``[K, K]``, see :meth:`PopulationClassification.compute`.
        """
        if self._split_metrics is None:
            loaders = {
                "train": data.curvature_dataloader(),
                "val": data.val_dataloader(),
                "test": data.test_dataloader(),
            }
            self._split_metrics = {
                # Not "if loader": one of length 0 is this rank's share of very few images.
                split: self.evaluate(
                    loader, PopulationClassification(self.members, data.num_classes) if self.classifies else None
                )
                for split, loader in loaders.items()
                if loader not in (None, [])
            }
        return self._split_metrics


def check_mixing(mixup: float, cutmix: float, epochs: int | None) -> None:
    """Check the settings of mixtures.

    Raises:
        ValueError: If one is out of range, or there are epochs and no mixtures.
    """
    for name, value in (("mixup", mixup), ("cutmix", cutmix)):
        check_numbers(">= 0", **{name: value})
        if 0 < value < _LEAST:
            raise ValueError(
                f"{name} must be 0 or at least {_LEAST}, below which nearly nothing is mixed, got {value!r}."
            )
    if epochs is not None:
        check_integers(mixing_epochs=epochs)
        if not (mixup or cutmix):
            raise ValueError("mixing_epochs is the end of mixup or cutmix; set one of them above 0, or drop it.")


def own_shares(mixup: float, cutmix: float, shape: Sequence[int], random: torch.Generator) -> Tensor:
    """Draw the share of the first of two inputs in a mixture, at every position.

    With both parameters above 0, mixup and CutMix are equally probable.

    Args:
        mixup: Parameter of the symmetric beta distribution of the share in mixup, >= 0; 0 for none.
        cutmix: Parameter of that in CutMix, before the rectangle is cut off at the borders, >= 0; 0 for none.
        shape: Shape of an input; height and width are last.
        random: Generator on the CPU.

    Returns:
        0 in a rectangle and 1 elsewhere, ``[H, W]``, or a constant of shape ``[]``; float32 on the CPU. The mean is the
        share of the first label.

    Raises:
        ValueError: If CutMix has no height and width to cut.
    """
    cut = cutmix > 0 and (not mixup or bool(torch.rand((), generator=random) < 0.5))
    beta = torch.full((2,), cutmix if cut else mixup, dtype=torch.float64)
    # torch.distributions.Beta takes no generator.
    share = float(torch._sample_dirichlet(beta, generator=random)[0])
    if not cut:
        return torch.tensor(share, dtype=torch.float32)
    if len(shape) < 2:
        raise ValueError(f"cutmix cuts rectangles from images, got inputs of shape {list(shape)}; use mixup.")
    shares = torch.ones(*shape[-2:])
    sides = []
    for side in shape[-2:]:
        centre = int(torch.randint(side, (), generator=random))
        half = int(0.5 * math.sqrt(1 - share) * side)
        sides.append(slice(max(0, centre - half), centre + half))
    shares[sides[0], sides[1]] = 0
    return shares


def mixed(inputs: Tensor, labels: Tensor, shares: Sequence[Tensor], classes: int) -> tuple[Tensor, Tensor]:
    """Mix each input and its label with the one before it in the batch.

    Args:
        inputs: Shape ``[M, B, ...]``, floating; a row for each member.
        labels: Shape ``[M, B]``, int64.
        shares: Result of :func:`own_shares` for each member.
        classes: Number of classes, ``K``.

    Returns:
        Inputs like the given ones, and probabilities of classes, ``[M, B, K]``, in the type of the inputs.

    Raises:
        ValueError: If inputs are integers.
    """
    if not inputs.is_floating_point():
        raise ValueError(f"mixup and cutmix mix floating inputs, got {inputs.dtype}, as of tokens; set both to 0.")
    size = next((share.shape for share in shares if share.ndim), ())
    at = torch.stack([share.expand(size) for share in shares])
    of_labels = torch.stack([share.mean() for share in shares])
    at, of_labels = (value.to(inputs.device, inputs.dtype, non_blocking=True) for value in (at, of_labels))
    at = at.view(len(shares), *[1] * (inputs.ndim - 1 - len(size)), *size)
    targets = F.one_hot(labels, classes).to(inputs.dtype)
    return (
        torch.lerp(inputs.roll(1, dims=1), inputs, at),
        torch.lerp(targets.roll(1, dims=1), targets, of_labels[:, None, None]),
    )
