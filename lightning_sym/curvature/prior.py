"""A Gaussian prior of weights during training: its precisions, its gradient or implicit step, the number of data."""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_sym._distributed import gathered, ranks, together
from lightning_sym._text import unknown
from lightning_sym.curvature.blocks import LIKELIHOODS, EmptyLoaderError, Likelihood
from lightning_sym.curvature.groups import parameter_groups

PriorStep: TypeAlias = Literal["auto", "implicit", "gradient"]

# Precisions beyond these are not used: exp(40) is more than any float32 weight can feel.
_LOG_BOUNDS = (-40.0, 40.0)


class Precisions:
    """The present precisions of one network.

    Attributes:
        log_precisions: Logarithm of the precision of every parameter that has a prior, by name.
        log_noise: Logarithm of the standard deviation of a regression's noise.
    """

    def __init__(self, log_precisions: Mapping[str, float], log_noise: float = 0.0) -> None:
        self.log_precisions = dict(log_precisions)
        self.log_noise = log_noise

    def set(self, log_precisions: Mapping[str, float], log_noise: float = 0.0) -> None:
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

    def state_dict(self) -> dict[str, Any]:
        """Return the precisions and the noise."""
        return {"log_precisions": self.log_precisions, "log_noise": self.log_noise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back; see :meth:`set`."""
        self.set(state["log_precisions"], state["log_noise"])


class _TrainedPrior:
    """How training feels a prior; what the priors of one network and of many have in common."""

    def __init__(
        self,
        network: nn.Module,
        precision: float,
        noise: float,
        temperature: float,
        likelihood: Likelihood,
        step: PriorStep,
    ):
        for name, value in (("precision", precision), ("noise", noise), ("temperature", temperature)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number > 0, got {value}.")
        for name, choice, accepted in (
            ("likelihood", likelihood, LIKELIHOODS),
            ("prior_step", step, ("auto", "implicit", "gradient")),
        ):
            if choice not in accepted:
                raise ValueError(unknown(name, choice, accepted))
        self.network = network
        self.precision = precision
        self.likelihood: Likelihood = likelihood
        self.temperature = temperature
        self.step = step
        self.implicit = step == "implicit"
        self.samples = 0

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that the prior goes with optimizers, and decide whether it acts after their steps.

        Raises:
            ValueError: If one decays weights, or the prior cannot take its implicit step after those of one.
        """
        for optimizer in optimizers:
            if any(group.get("weight_decay") for group in optimizer.param_groups):
                raise ValueError(
                    f"{type(optimizer).__name__} decays weights, which the Gaussian prior does by itself; set "
                    "weight_decay to 0."
                )
        unknown_metric = [type(one).__name__ for one in optimizers if type(one) not in (SGD, Adam, AdamW)]
        if unknown_metric and self.step == "implicit":
            raise ValueError(
                f"prior_step implicit is for torch.optim.SGD, Adam and AdamW, got {unknown_metric[0]}; use gradient or "
                "auto."
            )
        self.implicit = self.step != "gradient" and not unknown_metric

    def _begin(
        self,
        optimizers: Sequence[Optimizer],
        data: Any,
        strengths: Callable[[], Mapping[int, float | Tensor]],
        shared: bool,
    ) -> None:
        """Count the data, and take the implicit step after every step of the optimizers."""
        if not hasattr(data, "curvature_dataloader"):
            raise ValueError(
                "A Gaussian prior needs a datamodule with curvature_dataloader(), which gives each training datum "
                f"once, as those of lightning_sym.datamodules, got {type(data).__name__}; pass one to "
                "trainer.fit(task, datamodule)."
            )
        self.check_optimizers(optimizers)
        self.samples, counts = count_data(data.curvature_dataloader(), shared=shared)
        if self.likelihood == "classification" and (ranks() == 1 or torch.distributed.get_rank() == 0):
            _warn_of_missing_classes(counts, getattr(data, "num_classes", len(counts)))
        if self.implicit:
            for optimizer in optimizers:
                optimizer.register_step_post_hook(lambda stepped, *_: shrink(stepped, strengths()))

    def _strength(self, precisions: Precisions, name: str) -> float:
        """Return ``c`` in the prior's part ``c |theta|^2 / 2`` of the loss, with precisions that float32 can hold."""
        if self.samples < 1:
            raise ValueError("The prior is relative to the number of data, which start() counts; call it before.")
        factor = self.temperature
        if self.likelihood == "regression":
            factor *= 2 * math.exp(2 * precisions.log_noise)
        low, high = _LOG_BOUNDS
        return factor * (math.exp(min(max(precisions.log_precisions[name], low), high)) / self.samples)


class GaussianPrior(_TrainedPrior, Precisions):
    r"""A Gaussian prior of a network's weights, independent entry by entry, that the network is trained under.

    For a classification the loss of a batch of m of the N data is

    .. math:: \frac1m \sum \mathrm{CE} + \frac{T}{2N} \sum_l \delta_l \|\theta_l\|^2,

    and for a regression with noise :math:`\sigma`, whose errors are summed over outputs,

    .. math:: \frac1m \sum \|y - f\|^2 + \frac{2 \sigma^2 T}{2N} \sum_l \delta_l \|\theta_l\|^2 :

    the negative log joint probability over N, up to a constant, with a precision :math:`\delta_l` for every parameter
    that has curvature; positions and lengthscales of sparse layers have no prior.

    A LightningModule owns a prior as ``self.prior``, calls :meth:`start` in ``on_fit_start`` and adds :meth:`penalty`
    to its training loss; :class:`lightning_sym.callbacks.MarginalLikelihood` then learns the precisions, and the noise.
    Without the callback they stay as they are, which is maximum a posteriori training.

    With ``step="implicit"`` the prior is no part of the loss that is differentiated; instead, after every step of the
    optimizer with learning rate :math:`\eta`, weights are divided by :math:`1 + \eta c_l / d`, where
    :math:`c_l = T \delta_l / N` (times :math:`2 \sigma^2` for a regression): the proximal step in the metric d of the
    optimizer, see :func:`shrink`. It comes to rest at the same weights, where :math:`c_l \theta` is minus the mean
    gradient of the fit, and is stable for every precision. With the gradient of the prior, SGD with momentum
    :math:`\beta` is so only if :math:`\eta c_l < 2 (1 + \beta)`, and Adam makes the weights of a path that is switched
    off swing about 0 at the scale of :math:`\eta`, so that they are noise to the other paths and their precision cannot
    rise.

    Args:
        network: Every layer with trainable parameters needs a curvature rule
            (:func:`lightning_sym.curvature.register_layer`).
        precision: Prior precision of all weights at the start, > 0.
        likelihood: ``"classification"``: softmax and class indices. ``"regression"``: Gaussian, errors as above.
        noise: Standard deviation :math:`\sigma` of a regression at the start, > 0.
        temperature: ``T`` > 0; 1 is Bayes.
        step: ``"gradient"``: the prior is part of the loss. ``"implicit"``: see above, for ``torch.optim.SGD``,
            ``Adam`` and ``AdamW`` (with ``weight_decay=0``), not for subclasses. ``"auto"``: implicit for these, and
            gradient for all other optimizers.

    Attributes:
        log_precisions: Logarithm of the precision of every parameter that has a prior, by name.
        log_noise: Logarithm of :math:`\sigma`; 0 for a classification.
        samples: Number N of data, of all processes; counted by :meth:`start`.
        implicit: Whether the prior acts after the steps of the optimizer; known once it has seen the optimizer.

    Raises:
        ValueError: If an argument is out of range, or a layer has no curvature rule.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), arXiv:2310.06131; docs/theory/curvature.md, 2.2 and 2.3.

    Example:
        >>> prior = GaussianPrior(nn.Linear(1, 2), precision=3.0)
        >>> prior.samples = 10  # start() counts them
        >>> prior.strengths()
        {'weight': 0.3, 'bias': 0.3}
    """

    def __init__(
        self,
        network: nn.Module,
        precision: float = 1.0,
        *,
        likelihood: Likelihood = "classification",
        noise: float = 1.0,
        temperature: float = 1.0,
        step: PriorStep = "auto",
    ) -> None:
        _TrainedPrior.__init__(self, network, precision, noise, temperature, likelihood, step)
        log_noise = math.log(noise) if likelihood == "regression" else 0.0
        Precisions.__init__(self, _same_precisions(network, precision), log_noise)

    @property
    def members(self) -> dict[int | None, Precisions]:
        """This prior under the number ``None``, as those of a population stand under the numbers of its members."""
        return {None: self}

    def start(self, optimizers: Sequence[Optimizer], data: Any) -> None:
        """Count the data, and let the prior act after the optimizers' steps where it is implicit.

        To be called on every rank once a fit, when the optimizers are made: ``trainer.optimizers`` in ``on_fit_start``.

        Args:
            optimizers: Optimizers of the network, without weight decay.
            data: The datamodule, ``trainer.datamodule``: its ``curvature_dataloader()`` gives batches ``(inputs, labels
                or targets, ...)``, each training datum once, this rank's share. If it has ``num_classes``, a warning
                names the classes that never occur.

        Raises:
            EmptyLoaderError: If there are no data.
            ValueError: If the datamodule has no ``curvature_dataloader()``, a class index is negative, or the prior
                does not go with an optimizer.
        """
        self._begin(optimizers, data, self._by_tensor, shared=True)

    def strengths(self) -> dict[str, float]:
        """Return, by parameter, ``c`` in the prior's part ``sum c |theta|^2 / 2`` of the loss.

        Raises:
            ValueError: If the data have not been counted yet.
        """
        return {name: self._strength(self, name) for name in self.log_precisions}

    def _by_tensor(self) -> dict[int, float | Tensor]:
        parameters = dict(self.network.named_parameters())
        return {id(parameters[name]): strength for name, strength in self.strengths().items()}

    def energy(self) -> Tensor:
        """Return the prior's part of the loss, a scalar, whether training feels it by its gradient or not."""
        parameters = dict(self.network.named_parameters())
        terms = [c / 2 * parameters[name].square().sum() for name, c in self.strengths().items()]
        return torch.stack(terms).sum()

    def penalty(self) -> Tensor | float:
        """Return what a training loss has to be added: the :meth:`energy`, or 0 where the prior acts after steps."""
        return 0.0 if self.implicit else self.energy()


class RunningMembers(Protocol):
    """What the prior of a population asks of a task; every :class:`lightning_sym.tasks.ZooTask` has it."""

    @property
    def population(self) -> Any:
        """The networks of this rank: :class:`lightning_sym.population.Population`."""

    @property
    def skipped(self) -> Collection[int]:
        """Numbers of the members that were stopped, which have no prior any more."""

    @property
    def member_parallel(self) -> bool:
        """Whether every rank holds members of its own, and all the data."""


class PopulationPrior(_TrainedPrior):
    """Gaussian priors of the members of a population, each with precisions of its own; see :class:`GaussianPrior`.

    Args:
        network: With the parameters that every member has.
        numbers: Numbers of all members, the same on every rank.
        precision: Prior precision of all weights at the start, > 0.

    Attributes:
        members: The present precisions of every member, by its number.

    Raises:
        ValueError: If an argument is out of range, or a layer has no curvature rule.
    """

    def __init__(self, network: nn.Module, numbers: Iterable[int], precision: float = 1.0) -> None:
        super().__init__(network, precision, 1.0, 1.0, "classification", "auto")
        start = _same_precisions(network, precision)
        self.members: dict[int | None, Precisions] = {number: Precisions(start) for number in numbers}
        self._task: RunningMembers | None = None
        self._strengths: tuple[list[object], dict[int, float | Tensor]] | None = None

    def start(self, optimizers: Sequence[Optimizer], data: Any, task: RunningMembers) -> None:
        """Count the data, and let the prior act after the optimizers' steps where it is implicit.

        Args:
            optimizers: As for :meth:`GaussianPrior.start`.
            data: As for :meth:`GaussianPrior.start`; with ``ddp_members`` every rank has all the data.
            task: Whose population it is.

        Raises:
            EmptyLoaderError: If there are no data.
            ValueError: As :meth:`GaussianPrior.start`.
        """
        self._task, self._strengths = task, None
        self._begin(optimizers, data, self._by_tensor, shared=not task.member_parallel)

    def _by_tensor(self) -> dict[int, float | Tensor]:
        """Return strengths by the id of the parameter.

        Returns:
            Numbers, or for stacked tensors, of shape ``[M, 1, ...]``; 0 for members that were stopped.
        """
        assert self._task is not None
        population, stopped = self._task.population, self._task.skipped
        # Precisions that were set are other objects, so that in a step without news nothing is sent to the device.
        key: list[object] = [stopped, *(self.members[number].log_precisions for number in population.numbers)]
        if self._strengths is None or self._strengths[0] != key:
            found: dict[int, float | Tensor] = {}
            for (name, parameter), owner in zip(population.named_trainable(), population.owners(), strict=True):
                numbers = population.numbers if owner is None else (owner,)
                if name not in self.members[numbers[0]].log_precisions:
                    continue
                values = [0.0 if n in stopped else self._strength(self.members[n], name) for n in numbers]
                kind = torch.promote_types(parameter.dtype, torch.float32)
                stacked = torch.tensor(values, dtype=kind, device=parameter.device)
                found[id(parameter)] = (
                    values[0] if owner is not None else stacked.view(-1, *[1] * (parameter.dim() - 1))
                )
            self._strengths = key, found
        return self._strengths[1]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the prior's part to the members' gradients, where it does not act after the step."""
        if self.implicit or self._task is None:
            return
        strengths = self._by_tensor()
        for parameter in self._task.population.trainable():
            if id(parameter) in strengths and parameter.grad is not None:
                parameter.grad += strengths[id(parameter)] * parameter


def _same_precisions(network: nn.Module, precision: float) -> dict[str, float]:
    return dict.fromkeys(parameter_groups(network).precisions, math.log(precision))


@torch.no_grad()
def shrink(optimizer: Optimizer, strengths: Mapping[int, float | Tensor]) -> None:
    r"""Divide weights by :math:`1 + \eta c / d`, as after a step of size :math:`\eta g / d` along gradients g.

    That is the proximal step of :math:`c \theta^2 / 2` in the optimizer's own metric d, so that weights come to rest
    where :math:`c \theta` is minus the mean gradient, and are stable for every c. For SGD d is :math:`1 - \beta`, as
    momentum magnifies gradients (over one minus the dampening), for Adam :math:`\sqrt{\hat v} + \epsilon`, elementwise.

    Args:
        optimizer: One that :func:`has_implicit_step`, right after its step.
        strengths: ``c`` >= 0 by the id of the parameter: numbers, or tensors that broadcast to it. Parameters that are
            not in it, or have no gradient, stay as they are, and so do all if a gradient scaler made the step do
            nothing.
    """
    # Fused steps are called by a gradient scaler in any case, and look there themselves whether to do something.
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):
        return
    for group in optimizer.param_groups:
        rate = group["lr"]
        if group.get("momentum"):
            rate = rate * (1 - group["dampening"]) / (1 - group["momentum"])
        for parameter in group["params"]:
            strength = strengths.get(id(parameter))
            if strength is None or parameter.grad is None:
                continue
            step = rate * strength
            if "betas" in group:
                step = step / _adam_metric(group, optimizer.state[parameter])
            parameter.div_(1 + step)


def _adam_metric(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """Return by what Adam divided its averaged gradients in the step it just took; in the shape of the parameter."""
    beta = float(group["betas"][1])
    # On the device of the step count, which fused and capturable steps keep beside the weights: nothing waits for it.
    correction = -torch.expm1(torch.as_tensor(state["step"]) * (math.log(beta) if beta else -math.inf))
    moment: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    return moment.sqrt().div_(correction.sqrt()).add_(group["eps"])


def count_data(loader: Iterable[Sequence[Tensor]], *, shared: bool = True) -> tuple[int, Tensor]:
    """Return how many data there are, and how many of each class; to be called on every rank.

    Args:
        loader: Batches ``(inputs, labels or targets, ...)``; this rank's share.
        shared: Whether every rank has data of its own, which are added up; otherwise all have the same.

    Returns:
        N, and a count for each class up to the largest that occurs, int64, on the CPU; empty if the labels are no
        class indices.

    Raises:
        EmptyLoaderError: If there are none.
        ValueError: If a class index is negative.
    """
    labels: list[Tensor] = []
    together(lambda: labels.extend(_labels(loader)))
    samples = sum(len(part) for part in labels)
    classes = [part for part in labels if part.ndim == 1 and not part.is_floating_point()]
    counts = torch.bincount(torch.cat(classes)) if classes else torch.zeros(0, dtype=torch.int64)
    parts = gathered((samples, counts)) if shared else [(samples, counts)]
    if (total := sum(samples for samples, _ in parts)) == 0:
        raise EmptyLoaderError("There are no training data: curvature_dataloader() gives nothing; look at the data.")
    width = max(len(counts) for _, counts in parts)
    return total, torch.stack([F.pad(counts, (0, width - len(counts))) for _, counts in parts]).sum(0)


def _labels(loader: Iterable[Sequence[Tensor]]) -> Iterator[Tensor]:
    for batch in loader:
        part = batch[1].cpu()
        if part.ndim == 1 and len(part) and part.min() < 0 and not part.is_floating_point():
            raise ValueError(f"Labels must be class indices >= 0, got {int(part.min())}; look at the training data.")
        yield part


def _warn_of_missing_classes(counts: Tensor, classes: int) -> None:
    """Warn of classes that never occur; ``counts`` as of :func:`count_data`, nothing is said if they are empty."""
    missing = [number for number in range(classes) if number >= len(counts) or counts[number] == 0]
    if missing and len(counts):
        named = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        warnings.warn(
            f"{len(missing)} of {classes} classes never occur in the training data ({named}); what is learned of them "
            "comes from the prior alone.",
            stacklevel=2,
        )
