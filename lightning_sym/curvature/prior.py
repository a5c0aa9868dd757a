"""A Gaussian prior of weights during training: its precisions, its gradient or implicit step, the number of data."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_sym._checks import check_known, check_numbers
from lightning_sym._distributed import gathered, ranks, together
from lightning_sym.curvature.blocks import LIKELIHOODS, EmptyLoaderError, Likelihood
from lightning_sym.curvature.prior_groups import parameter_groups

PriorStep: TypeAlias = Literal["auto", "implicit", "gradient"]
PRIOR_STEPS: tuple[PriorStep, ...] = ("auto", "implicit", "gradient")
PriorOn: TypeAlias = Literal["weights", "lengthscales"]

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


class GaussianPrior:
    r"""A Gaussian prior of a network's weights, independent entry by entry, that the network is trained under.

    For a classification the loss of a batch of m of the N data is

    .. math:: \frac1m \sum \mathrm{CE} + \frac{T}{2N} \sum_l \delta_l \|\theta_l\|^2,

    and for a regression with noise :math:`\sigma` and errors summed over outputs,

    .. math:: \frac1m \sum \|y - f\|^2 + \frac{2 \sigma^2 T}{2N} \sum_l \delta_l \|\theta_l\|^2 :

    the negative log joint probability over N, up to a constant, with a precision :math:`\delta_l` for every parameter
    that has curvature; positions and lengthscales of sparse layers have no prior.

    A LightningModule owns a prior as ``self.prior``, and calls :meth:`start` in ``on_fit_start`` and
    :meth:`add_gradients` in ``on_before_optimizer_step``; :class:`lightning_sym.callbacks.MarginalLikelihood` then
    learns the precisions, and the noise. Without the callback they stay fixed: maximum a posteriori
    training.

    With ``step="implicit"`` the prior is not part of the differentiated loss. Instead, each step of the optimizer with
    learning rate :math:`\eta` is followed by a division of the weights by :math:`1 + \eta c_l / d`. Here
    :math:`c_l = T \delta_l / N` (times :math:`2 \sigma^2` for a regression). This is the proximal step in the metric d
    of the optimizer, see :func:`shrink`. It converges to the same weights, where :math:`c_l \theta` is minus the mean
    gradient of the fit, and is stable for every precision. With the gradient of the prior, SGD with momentum
    :math:`\beta` is stable only if :math:`\eta c_l < 2 (1 + \beta)`. Adam makes the weights of a path that is switched
    off oscillate about 0 at the scale of :math:`\eta`. They are noise to the other paths, and their precision cannot
    rise.

    In a population, every member has a prior with separate precisions.

    Args:
        network: Every layer with trainable parameters needs a curvature rule
            (:func:`lightning_sym.curvature.register_layer`). For a population, a network with the parameters that every
            member has.
        precision: Prior precision of all weights at the start, > 0.
        likelihood: ``"classification"``: softmax and class indices. ``"regression"``: Gaussian, errors as above.
        noise: Standard deviation :math:`\sigma` of a regression at the start, > 0.
        temperature: ``T`` > 0; 1 is Bayes.
        step: ``"gradient"``: the prior's gradient is added to that of the loss. ``"implicit"``: see above, for
            ``torch.optim.SGD``, ``Adam`` and ``AdamW`` (with ``weight_decay=0``), not for subclasses. ``"auto"``:
            implicit for these, and gradient for all other optimizers.
        members: Numbers of all members of a population, the same on every rank; default: there is one network.
        on: ``"weights"``: all weights, and the values at anchors. ``"lengthscales"``: the trained inverse length scales
            of sparse layers as well.

    Attributes:
        members: The present precisions by the number of the member; the only network has the number None.
        on: As given.
        samples: Number N of data, of all processes; counted by :meth:`start`.
        implicit: Whether the prior acts after the steps of the optimizer; known once it has seen the optimizer.

    Raises:
        ValueError: If an argument is out of range, a layer has no curvature rule, or the prior is on length scales and
            none is trained.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), arXiv:2310.06131; docs/theory/curvature.md, 2.2 to 2.4.

    Example:
        >>> prior = GaussianPrior(nn.Linear(1, 2), precision=3.0)
        >>> prior.samples = 10  # start() counts them
        >>> round(prior.strength("weight"), 6)
        0.3
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
        members: Iterable[int] | None = None,
        on: PriorOn = "weights",
    ) -> None:
        check_numbers("> 0", precision=precision, noise=noise, temperature=temperature)
        check_known("likelihood", likelihood, LIKELIHOODS)
        check_known("prior_step", step, PRIOR_STEPS)
        check_known("prior_on", on, ("weights", "lengthscales"))
        self.network = network
        self.precision = precision
        self.likelihood: Likelihood = likelihood
        self.temperature = temperature
        self.step = step
        self.on: PriorOn = on
        self.implicit = step == "implicit"
        self.samples = 0
        groups = parameter_groups(network, lengthscales=on == "lengthscales")
        start = dict.fromkeys(groups.precisions, math.log(precision))
        log_noise = math.log(noise) if likelihood == "regression" else 0.0
        self.members = {number: Precisions(start, log_noise) for number in ([None] if members is None else members)}
        self._task: Any = None
        self._strengths: tuple[object, dict[Tensor, float | Tensor]] | None = None

    @property
    def log_precisions(self) -> dict[str, float]:
        """Logarithm of the precision of every parameter of the only network, by name."""
        return self.members[None].log_precisions

    @property
    def log_noise(self) -> float:
        """Logarithm of the standard deviation of the noise of the only network."""
        return self.members[None].log_noise

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
        others = [type(one).__name__ for one in optimizers if type(one) not in (SGD, Adam, AdamW)]
        if others and self.step == "implicit":
            raise ValueError(
                f"prior_step implicit is for torch.optim.SGD, Adam and AdamW, got {others[0]}; use gradient or auto."
            )
        self.implicit = self.step != "gradient" and not others

    def start(self, optimizers: Sequence[Optimizer], data: Any, task: Any = None) -> None:
        """Count the data, and let the prior act after the optimizers' steps where it is implicit.

        To be called on every rank once a fit, when the optimizers are made: ``trainer.optimizers`` in ``on_fit_start``.

        Args:
            optimizers: Optimizers of the network, without weight decay.
            data: The datamodule, ``trainer.datamodule``: its ``curvature_dataloader()`` gives batches ``(inputs, labels
                or targets, ...)``, each training datum once, this rank's share (all of them where ranks hold members of
                their own). If it has ``num_classes``, a warning names the classes that never occur.
            task: Whose members they are, for a population: a :class:`lightning_sym.tasks.ZooTask`, or any with its
                ``population``, ``skipped`` (numbers of stopped members) and ``member_parallel``.

        Raises:
            EmptyLoaderError: If there are no data.
            ValueError: If the datamodule has no ``curvature_dataloader()``, a class index is negative, or the prior
                does not go with an optimizer.
        """
        if not hasattr(data, "curvature_dataloader"):
            raise ValueError(
                "A Gaussian prior needs a datamodule with curvature_dataloader(), which gives each training datum "
                f"once, as those of lightning_sym.datamodules, got {type(data).__name__}; pass one to "
                "trainer.fit(task, datamodule)."
            )
        self.check_optimizers(optimizers)
        self._task, self._strengths = task, None
        shared = task is None or not task.member_parallel
        self.samples, counts = count_data(data.curvature_dataloader(), shared=shared)
        if self.likelihood == "classification" and (ranks() == 1 or torch.distributed.get_rank() == 0):
            _warn_of_missing_classes(counts, getattr(data, "num_classes", len(counts)))
        if self.implicit:
            for optimizer in optimizers:
                optimizer.register_step_post_hook(lambda stepped, *_: shrink(stepped, self.strengths()))

    def strength(self, name: str, member: int | None = None) -> float:
        """Return ``c`` in a parameter's part ``c |theta|^2 / 2`` of the loss, with precisions that float32 can hold.

        Args:
            name: Name of the parameter.
            member: Its number; of a population.

        Raises:
            ValueError: If the data have not been counted yet.
        """
        if self.samples < 1:
            raise ValueError("The prior is relative to the number of data, which start() counts; call it before.")
        own = self.members[member]
        factor = self.temperature
        if self.likelihood == "regression":
            factor *= 2 * math.exp(2 * own.log_noise)
        low, high = _LOG_BOUNDS
        return factor * (math.exp(min(max(own.log_precisions[name], low), high)) / self.samples)

    def strengths(self) -> dict[Tensor, float | Tensor]:
        """Return the :meth:`strength` of every parameter that has a prior.

        Returns:
            Numbers, or for stacked tensors of a population, of shape ``[M, 1, ...]``; 0 for members that were stopped.
        """
        stopped = self._task.skipped if self._task else ()
        numbers = self._task.population.numbers if self._task else (None,)
        # Precisions that were set are other objects, so that in a step without news nothing is sent to the device.
        present = [(self.members[n].log_precisions, self.members[n].log_noise) for n in numbers]
        key = (self.samples, stopped, present)
        if self._strengths is None or self._strengths[0] != key:
            found: dict[Tensor, float | Tensor] = {}
            for name, parameter, members, stacked in self._tensors():
                if name in present[0][0]:
                    values = [0.0 if n in stopped else self.strength(name, n) for n in members]
                    found[parameter] = _stacked(values, parameter) if stacked else values[0]
            self._strengths = key, found
        return self._strengths[1]

    def _tensors(self) -> Iterator[tuple[str, Tensor, Sequence[int | None], bool]]:
        """Yield name, parameter, the members that it is of, and whether it has a row for each."""
        if self._task is None:
            yield from ((name, parameter, (None,), False) for name, parameter in self.network.named_parameters())
            return
        population = self._task.population
        for (name, parameter), owner in zip(population.named_trainable(), population.owners(), strict=True):
            yield name, parameter, population.numbers if owner is None else (owner,), owner is None

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the prior's part to the gradients, where it does not act after the step.

        To be called on every rank in ``on_before_optimizer_step``.

        Raises:
            ValueError: If the data have not been counted yet.
        """
        for parameter, strength in self.strengths().items():
            if not self.implicit and parameter.grad is not None:
                parameter.grad += strength * parameter


def _stacked(values: Sequence[float], parameter: Tensor) -> Tensor:
    kind = torch.promote_types(parameter.dtype, torch.float32)
    return torch.tensor(values, dtype=kind, device=parameter.device).view(-1, *[1] * (parameter.dim() - 1))


@torch.no_grad()
def shrink(optimizer: Optimizer, strengths: Mapping[Tensor, float | Tensor]) -> None:
    r"""Divide weights by :math:`1 + \eta c / d`, as after a step of size :math:`\eta g / d` along gradients g.

    That is the proximal step of :math:`c \theta^2 / 2` in the optimizer's metric d. Weights converge to
    :math:`c \theta` equal to minus the mean gradient, and are stable for every c. For SGD d is :math:`1 - \beta`, as
    momentum magnifies gradients (over one minus the dampening), for Adam :math:`\sqrt{\hat v} + \epsilon`, elementwise.

    Args:
        optimizer: ``SGD``, ``Adam`` or ``AdamW``, right after its step.
        strengths: ``c`` >= 0 by parameter: numbers, or tensors that broadcast to it. Parameters that are
            not in it, or have no gradient, are left unchanged. All are if a gradient scaler skipped the step.
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
            strength = strengths.get(parameter)
            if strength is None or parameter.grad is None:
                continue
            step = rate * strength
            if "betas" in group:
                step = step / _adam_metric(group, optimizer.state[parameter])
            parameter.div_(1 + step)


def _adam_metric(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """Return Adam's divisor of the averaged gradients in the latest step, in the shape of the parameter."""
    beta = float(group["betas"][1])
    # On the device of the step count, as fused and capturable steps keep it there: no synchronisation.
    correction = -torch.expm1(torch.as_tensor(state["step"]) * (math.log(beta) if beta else -math.inf))
    moment: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    return moment.sqrt().div_(correction.sqrt()).add_(group["eps"])


def count_data(loader: Iterable[Sequence[Tensor]], *, shared: bool = True) -> tuple[int, Tensor]:
    """Count the data, and those of each class; to be called on every rank.

    Args:
        loader: Batches ``(inputs, labels or targets, ...)``; this rank's share.
        shared: Whether every rank has different data, to be added up; otherwise all have the same.

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
            f"{len(missing)} of {classes} classes never occur in the training data ({named}); results for them "
            "come from the prior alone.",
            stacklevel=2,
        )
