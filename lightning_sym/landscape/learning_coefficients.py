"""The local learning coefficient of a network by Langevin chains, with a verdict on whether they say anything."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_integers, check_known, check_numbers, check_seeds
from lightning_sym._distributed import gathered, rank, ranks
from lightning_sym._random import generator
from lightning_sym._statistics import student_interval, student_quantile
from lightning_sym.landscape.langevin import METHODS, Dynamics, Method, Noise, expected_energy
from lightning_sym.landscape.loss_on_data import BatchLoss, LossOnData

LARGEST_STEP = 0.1
"""Limit of the step times the largest curvature of the chains' potential."""
SAME = 0.05
"""How far from 1 the ratio of the last to the second quarter of stationary chains may be, and how uncertain."""
AGREEMENT = 1.1
"""The potential scale reduction below which chains count as agreeing."""
_SURELY = 0.9995
"""Level of Student's interval of a ratio, which must be beyond that distance before chains count as not stationary."""
FIRST_CHAINS = 8
"""How many chains are run by default before their spread says how many decide."""
_MOST_CHAINS = 2048  # by default
_MOST_WORK = 2**33  # of chains by default: their number times steps, samples, and weights and inputs of a sample
_CERTAIN = 0.6 * SAME  # target error of a ratio for the default number of chains
_FEWEST = 3  # chains
_FEWEST_DRAWS = 8  # two in each quarter
_TRACE_EVERY = 10  # steps, where the loss on all data is not known anyway
_FIRST_LOOK = 10  # step of the second measurement of curvature; then at twice as many, and so on
_RELAXATIONS = 4  # after which the variance of a flat direction lacks less than 2%
_UNSTABLE = 4  # times the step that fits: chains that have taken such steps begin again


@dataclass(frozen=True, eq=False)
class LearningCoefficientEstimate:
    r"""An estimate of the learning coefficient at some weights by Langevin chains, with checks of its validity.

    Attributes:
        losses: L on all data along each chain, the burn-in included; NaN from where a chain left to infinity. Shape
            ``[draws, chains]``, float64.
        distances: Euclidean distance to the beginning there. Shape ``[draws, chains]``, float64.
        draw_every: Steps between two draws.
        burn_in: How many of the draws, from the first on, are never averaged.
        reference: L at the beginning, on the same data.
        samples: Number of data, n.
        parameters: Number of weights that move, P.
        method: How chains move.
        inverse_temperature: :math:`nb`.
        localisation: :math:`\gamma`.
        step: :math:`\eta` of the draws that are averaged.
        curvature: :math:`\lambda_{max}`, an upper estimate of the largest eigenvalue of the Hessian of L at the
            beginning.
        farthest_curvature: The largest of these over all chains, at their ends.
        escaped: Steps when chains diverged to infinity, by their number.
    """

    losses: Tensor
    distances: Tensor
    draw_every: int
    burn_in: int
    reference: float
    samples: int
    parameters: int
    method: Method
    inverse_temperature: float
    localisation: float
    step: float
    curvature: float
    farthest_curvature: float
    escaped: dict[int, int]

    @property
    def chain_means(self) -> Tensor:
        r""":math:`nb (\bar L - L_0)` of each chain after the burn-in. Shape ``[chains]``; NaN if it escaped."""
        return self.inverse_temperature * (self.losses[self.burn_in :].mean(0) - self.reference)

    @property
    def step_curvature(self) -> float:
        r""":math:`\eta h_{max}`, with the largest :math:`h_{max} = nb \lambda_{max} + \gamma` found."""
        steepest = max(self.curvature, self.farthest_curvature, 0.0)
        return self.step * (self.inverse_temperature * steepest + self.localisation)

    @property
    def ratio(self) -> tuple[float, float]:
        """Mean of L less the reference in the last quarter of the chains over that in their second, and its error."""
        return _quarters(self.losses - self.reference)

    @property
    def distance_ratio(self) -> tuple[float, float]:
        """The same of the distance: whether the chains still move away."""
        return _quarters(self.distances)

    @property
    def agreement(self) -> float:
        """Potential scale reduction of the losses after the burn-in (Gelman and Rubin 1992): 1 if chains agree."""
        kept = self.losses[self.burn_in :]
        count = len(kept)
        within, between = float(kept.var(0).mean()), float(kept.mean(0).var())
        return math.sqrt((count - 1) / count + between / within) if within > 0 else math.nan

    @property
    def refusal(self) -> str:
        """Why there is no estimate, in one sentence; empty if there is one."""
        return self._unfit() or self._drift()[0]

    @property
    def chains_wanted(self) -> int:
        """Number of chains that should decide whether they are stationary; as many as there are if that is decided."""
        return self.losses.shape[1] if self._unfit() else self._drift()[1]

    def _unfit(self) -> str:
        """Return why chains say nothing whether they are stationary or not, in one sentence; empty if they do."""
        if self.escaped:
            first = min(self.escaped.values())
            return (
                f"{len(self.escaped)} of {self.losses.shape[1]} chains left to infinity, the first at step {first}; "
                f"take a step smaller than {self.step:.1e}, or a localisation larger than {self.localisation:.3g}."
            )
        if len(self.losses) < _FEWEST_DRAWS or len(self.losses) - self.burn_in < 2:
            return (
                f"undecided: {len(self.losses)} draws, {self.burn_in} of them burn-in, are too few to show whether the "
                f"chains are stationary; take more steps, at least {_FEWEST_DRAWS * self.draw_every}, or a shorter "
                "burn-in."
            )
        if bool((self.losses == self.reference).all()):
            return (
                "the loss is the same wherever the chains went, so that no direction counts or they do not move (a "
                "dead network?); begin at weights that the loss depends on."
            )
        if not float(self.chain_means.mean()) > 0:
            return (
                "the chains found a loss below that of the weights they began at, which are no minimum then; train to "
                "the end, or begin at better weights."
            )
        return ""

    def _drift(self) -> tuple[str, int]:
        """Return why chains are not known to be stationary, empty if they are, and how many chains would decide."""
        chains, steps = self.losses.shape[1], len(self.losses) * self.draw_every
        enough, needed = self.fitting_localisation
        longer = (
            f"set steps={max(needed, 2 * steps)} in place of {steps}, or localisation={enough:.2g} in place of "
            f"{self.localisation:.3g}, whose pull lets flat directions settle in these steps but lowers the number."
        )
        undecided, wanted, surely = [], chains, student_quantile(_SURELY, chains - 1)
        for what, (ratio, error) in (("loss", self.ratio), ("distance", self.distance_ratio)):
            text = f"the {what} in the last quarter of the chains is {ratio:.2f} ± {error:.2f} times that in the second"
            off = abs(ratio - 1)
            if off > SAME + surely * error:
                return f"not stationary: {text}, not within {SAME} of 1; {longer}", chains
            if math.isnan(ratio):
                undecided.append(f"the {what} in the second quarter of the chains is not above where they began")
                wanted = max(wanted, 4 * chains)
            elif off > SAME or not error <= SAME:
                undecided.append(f"{text}, too uncertain to say whether they are stationary")
                wanted = max(wanted, 2 * chains, math.ceil(chains * (error / _CERTAIN) ** 2))
        if undecided:
            more = f"take more chains (chains={wanted} in place of {chains}) or steps."
            if wanted > 4 * max(chains, _MOST_CHAINS):  # nobody can run as many
                more = f"take more steps (steps={2 * steps} in place of {steps}), or begin nearer to a minimum."
            return f"undecided: {undecided[0]}; {more}", wanted
        if not self.agreement <= AGREEMENT:
            return (
                f"not stationary: the chains do not agree, potential scale reduction {self.agreement:.2f}, which must "
                f"be at most {AGREEMENT}; {longer}"
            ), chains
        return "", chains

    @property
    def fitting_localisation(self) -> tuple[float, int]:
        r"""A localisation with which these steps suffice for flat directions, and the steps for the present one.

        The variance of a direction without curvature lacks less than 2% after :math:`4 / \sqrt{\eta\gamma}` steps, with
        ``"sgld"`` after :math:`4 / (\eta\gamma)`: the localisation makes this a quarter of the steps. It is at least
        four times the present one, for chains whose curvature changes on the way. It is rounded up to two
        digits; the steps are at most 2**31.
        """
        steps = len(self.losses) * self.draw_every
        power = 1 if self.method == "sgld" else 2
        enough = (4 * _RELAXATIONS / steps) ** power / self.step
        needed = 4 * _RELAXATIONS / (self.step * self.localisation) ** (1 / power) if self.localisation else math.inf
        enough = max(enough, 4 * self.localisation)
        digit = 10.0 ** (math.floor(math.log10(enough)) - 1)
        return math.ceil(enough / digit) * digit, math.ceil(min(needed, 2.0**31) / 100) * 100

    @property
    def cautions(self) -> list[str]:
        """Notes on an estimate, in sentences."""
        found = []
        if self.step_curvature > (2 * LARGEST_STEP if self.method == "sgld" else 2.0):
            found.append(f"step * h_max is {self.step_curvature:.2g}, so large that it biases the estimate.")
        if self.localisation > self.inverse_temperature * max(self.curvature, self.farthest_curvature):
            found.append(
                f"the localisation {self.localisation:.3g} is above nb * lambda_max = "
                f"{self.inverse_temperature * max(self.curvature, self.farthest_curvature):.3g}: it decides the number."
            )
        return found

    @property
    def estimate(self) -> float | None:
        """The learning coefficient; None if the chains are not stationary, see :attr:`refusal`."""
        return None if self.refusal else float(self.chain_means.mean())

    @property
    def standard_error(self) -> float | None:
        """Standard error of the estimate, with chains as units; None without one."""
        means = self.chain_means
        return None if self.refusal else float(means.std()) / math.sqrt(len(means))

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Return Student's interval for the mean of such chains, from their spread; None without an estimate.

        It covers the mean of many such chains, at their temperature, localisation and step, not the limit of low
        temperatures.

        Args:
            level: Coverage, in (0, 1).
        """
        return None if self.refusal else student_interval(self.chain_means.numpy(), level=level)

    def regular(self, eigenvalues: Tensor) -> float:
        """Return the mean of such chains in a quadratic loss, with their step and localisation.

        See :func:`lightning_sym.landscape.langevin.expected_energy`.

        Args:
            eigenvalues: Eigenvalues of the Hessian of L at the beginning. Any shape.
        """
        return expected_energy(eigenvalues, self.inverse_temperature, self.localisation, self.step, self.method)

    def __str__(self) -> str:
        """Return the estimate with its error, or why there is none."""
        if self.refusal:
            return f"no learning coefficient: {self.refusal}"
        return " ".join([f"learning coefficient {self.estimate:.3f} ± {self.standard_error:.3f}", *self.cautions])


def _quarters(traces: Tensor) -> tuple[float, float]:
    """Return the ratio of the last quarter of traces ``[draws, chains]`` to the second, and its standard error."""
    count = len(traces)
    second, last = traces[count // 4 : count // 2].mean(0), traces[-(count // 4) :].mean(0)
    if not float(second.mean()) > 0:
        return math.nan, math.nan
    ratio = float(last.mean() / second.mean())
    return ratio, float((last - ratio * second).std() / second.mean()) / math.sqrt(len(last))


def learning_coefficient(
    network: nn.Module,
    data: Iterable[Any],
    loss: BatchLoss = F.cross_entropy,
    *,
    chains: int | None = None,
    steps: int = 2000,
    burn_in: int | None = None,
    inverse_temperature: float | None = None,
    localisation: float | None = None,
    step: float | None = None,
    method: Method = "underdamped",
    batch_size: int | None = None,
    block_size: int = 2048,
    execution: Literal["vmap", "loop"] = "vmap",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> LearningCoefficientEstimate:
    r"""Estimate the local learning coefficient of a network at its weights (docs/theory/learning_coefficients.md).

    .. math::
        \hat\lambda = nb\, \big(E[L_n(\theta)] - L_n(\theta_0)\big), \qquad
        \theta \sim \exp\!\big(-nb\, L_n(\theta) - \tfrac{\gamma}{2} \|\theta - \theta_0\|^2\big),

    by chains that run together. Losses are those on all data, those of the burn-in are never averaged, and there is no
    estimate unless the chains are stationary: losses and distances in their last quarter are within 5% of those in
    their second, and the chains agree.

    Args:
        network: Any module, in evaluation mode for this; not changed.
        data: Batches of inputs and targets, each sample once, for example the ``curvature_dataloader()`` of a
            datamodule; they are held in memory. Under ``torch.distributed`` every process is given the same.
        loss: Called with outputs and targets; the mean over samples, a scalar.
        chains: Number of chains, >= 3. By default 8, and where these are too few to decide whether they are
            stationary, as with few weights, as many from the beginning as their spread says; four times as many where
            half of them or fewer left to infinity at a step that was fitted. All that within a budget: at most 2048,
            and at most 8.6e9 for chains times steps times samples times weights and inputs of a sample.
        steps: Steps of each chain, the burn-in included. >= 8.
        burn_in: Steps that are not averaged: at least half of the steps, which is the default, and less than all.
        inverse_temperature: :math:`nb > 0`; default :math:`n / \ln n`.
        localisation: :math:`\gamma >= 0`, the pull towards :math:`\theta_0`; default :math:`nb / 100`.
        step: :math:`\eta > 0`. By default such that :math:`\eta h_{max} \le 0.1`, where :math:`h_{max}` is the largest
            curvature of the potential: measured at the beginning, and again along the first quarter of the steps
            wherever the chains are by then, when the step may become smaller, and chains that ran away begin again.
        method: ``"underdamped"``: with velocities, which goes farther in as many steps; its finite step causes no bias
            in a quadratic loss. ``"sgld"``: stochastic gradient Langevin dynamics, as in the paper; its
            finite step makes the estimate too large, by 2.6% where :math:`\eta h = 0.1`.
        batch_size: Samples of each gradient, drawn for each chain and step; default all. Their noise heats the
            chains.
        block_size: Most samples that go through the network at once.
        execution: ``"vmap"``, all chains in one vectorised call; or ``"loop"``, one after another, for networks that
            ``torch.func.vmap`` cannot run.
        dtype: Dtype of weights and arithmetic; default that of the network, single precision at least.
        seed: Seed of noise and batches; each chain has its own. The caller's generators are not touched.
        progress: Called with (steps done, steps) after every step; where more chains begin, with more steps to do.

    Returns:
        Estimate, standard error, verdict, and all that they are made from.

    Raises:
        ValueError: If an argument is out of range, the loss is no mean, or is not finite at the network's weights.

    Note:
        A step costs a forward and a backward pass for each chain; memory is that of ``chains`` networks on
        ``block_size`` samples.

    References:
        Lau et al. (2023), "The Local Learning Coefficient", arXiv:2308.12108; Welling and Teh (2011); Leimkuhler and
        Matthews (2013), arXiv:1203.5428, for the splitting. We differ from the first in that losses are those on all
        data, half of each chain is burn-in, and an estimate may be refused.

    Example:
        >>> network = nn.Linear(2, 1, bias=False).double()
        >>> x = torch.randn(100, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> found = learning_coefficient(network, [(x, network(x))], F.mse_loss)
        >>> round(found.estimate, 1)  # half the number of weights
        1.0
    """
    check_integers(_FEWEST, optional=True, chains=chains)
    check_integers(8, steps=steps)
    check_integers(block_size=block_size)
    check_seeds(seed=seed)
    burn_in = steps // 2 if burn_in is None else burn_in
    if not isinstance(burn_in, int) or not steps <= 2 * burn_in + 1 or not burn_in < steps:
        raise ValueError(f"burn_in must be at least half of steps={steps} and less than all, got {burn_in!r}.")
    check_known("method", method, METHODS)
    check_known("execution", execution, ("vmap", "loop"))
    given = next((parameter.dtype for parameter in network.parameters()), torch.float32)
    dtype = dtype or (torch.float32 if given in (torch.float16, torch.bfloat16) else given)
    function = LossOnData(network, data, loss, dtype=dtype, block_size=block_size, execution=execution)
    if inverse_temperature is None:
        if function.samples < 3:
            raise ValueError(f"n / ln n is no inverse temperature for {function.samples} samples; give one.")
        inverse_temperature = function.samples / math.log(function.samples)
    localisation = inverse_temperature / 100 if localisation is None else localisation
    check_numbers("> 0", inverse_temperature=inverse_temperature, **({} if step is None else {"step": step}))
    check_numbers(">= 0", localisation=localisation)
    if batch_size is not None:
        check_integers(batch_size=batch_size)
        if batch_size > function.samples:
            raise ValueError(f"batch_size must be at most the {function.samples} samples, got {batch_size}.")
    heat = (inverse_temperature, localisation)

    def run(number: int, before: int) -> LearningCoefficientEstimate:
        numbers = list(range(number))[rank() :: ranks()]
        told = progress and (lambda done, of: progress(before + done, before + of))
        return _Run(function, numbers, *heat, method, batch_size, seed)(steps, burn_in, step, told)

    found = run(FIRST_CHAINS if chains is None else chains, 0)
    if chains is None:
        most = min(_MOST_CHAINS, _MOST_WORK // (steps * function.work))
        before = steps
        # Chains in fewer dimensions differ more from each other, and only they themselves tell by how much.
        while len(found.chain_means) < (wanted := min(_wanted(found, step is None), most)):
            found, before = run(wanted, before), before + steps
    return found


def _wanted(found: LearningCoefficientEstimate, fitted: bool) -> int:
    """Return the default number of chains for the next run; the current number to stop.

    A fitted step knows the curvature where the chains were early on. If few of them left, others would have seen more.

    Args:
        found: The latest estimate.
        fitted: Whether their step was fitted.
    """
    chains, gone = len(found.chain_means), len(found.escaped)
    return 4 * chains if fitted and 0 < gone <= chains / 2 else found.chains_wanted


class _Run:
    """One run of the chains of this process, in the company of those of the others.

    Arguments are those of :func:`learning_coefficient`; ``numbers`` are those of the chains of this process.
    """

    def __init__(
        self,
        function: LossOnData,
        numbers: list[int],
        inverse_temperature: float,
        localisation: float,
        method: Method,
        batch_size: int | None,
        seed: int,
    ) -> None:
        self.function, self.numbers, self.seed = function, numbers, seed
        self.inverse_temperature, self.localisation, self.method = inverse_temperature, localisation, method
        self.batch_size = batch_size
        self.batches = [generator("langevin batches", seed, number) for number in numbers]
        self.escaped: dict[int, int] = {}

    def __call__(
        self, steps: int, burn_in: int, step: float | None, progress: Callable[[int, int], None] | None
    ) -> LearningCoefficientEstimate:
        function, start = self.function, self.function.own
        (reference,) = function.values(start[None]).tolist()
        if not math.isfinite(reference):
            raise ValueError(
                f"the loss at the network's weights is {reference}; a learning coefficient is that of weights of "
                "finite loss."
            )
        curvature = float(function.largest_curvatures(start[None], self.seed))
        fitted = step is None
        noise = Noise(self.numbers, len(start), self.seed, start)
        slowest = self.localisation or (self.inverse_temperature * max(curvature, 0.0)) / 100
        dynamics = Dynamics(self.method, step or self._fitting(curvature), 2 * math.sqrt(slowest), noise)
        vectors = start.repeat(len(self.numbers), 1)
        every = 1 if self.batch_size is None else _TRACE_EVERY
        losses, distances, look = [], [], _FIRST_LOOK
        for index in range(steps):
            if fitted and index == look and index <= steps // 4:
                vectors, changed = self._fit_step(dynamics, vectors)
                look += _FIRST_LOOK if changed else index
            slopes, values = self._gradients(vectors)
            if index % every == 0:
                values = values if self.batch_size is None else self._values(vectors)
                losses.append(values.double())
                distances.append((vectors - start).norm(dim=1).double())
            self._leave(values, index)
            slopes = slopes.mul_(self.inverse_temperature).add_(vectors - start, alpha=self.localisation)
            vectors = dynamics.advance(vectors, slopes)
            if progress is not None:
                progress(index + 1, steps)
        steepest = self._steepest(vectors)
        escaped = {number: at for part in gathered(self.escaped) for number, at in part.items()}
        gone = {number: -(-at // every) for number, at in escaped.items()}
        return LearningCoefficientEstimate(
            losses=self._of_all(torch.stack(losses).cpu(), gone),
            distances=self._of_all(torch.stack(distances).cpu(), gone),
            draw_every=every,
            burn_in=-(-burn_in // every),
            reference=reference,
            samples=function.samples,
            parameters=len(start),
            method=self.method,
            inverse_temperature=self.inverse_temperature,
            localisation=self.localisation,
            step=dynamics.step,
            curvature=curvature,
            farthest_curvature=max(
                float(part.amax()) if len(part) else 0.0 for part in gathered(steepest.nan_to_num(0))
            ),
            escaped=escaped,
        )

    def _fit_step(self, dynamics: Dynamics, vectors: Tensor) -> tuple[Tensor, bool]:
        """Fit the step to the curvature at the chains; chains with a far too large step restart.

        Returns:
            Where the chains are now, and whether any has to begin again.
        """
        steepness = self.inverse_temperature * self._steepest(vectors) + self.localisation
        too_steep = ~(dynamics.step * steepness <= _UNSTABLE * LARGEST_STEP)
        parts = gathered(
            (float(steepness.nan_to_num(math.inf).amax()) if len(steepness) else 0.0, bool(too_steep.any()))
        )
        largest, again = max(one for one, _ in parts), any(one for _, one in parts)
        # Curvature at diverged chains is not informative, so the step falls by degrees.
        dynamics.step = min(dynamics.step, max(LARGEST_STEP / largest, dynamics.step / _UNSTABLE if again else 0.0))
        if not again:
            return vectors, False
        for row in too_steep.nonzero().flatten().tolist():
            self.escaped.pop(self.numbers[row], None)
        rows = too_steep.to(vectors.device)
        dynamics.begin_again(rows)
        return torch.where(rows[:, None], self.function.own, vectors), True

    def _fitting(self, curvature: float) -> float:
        """Return the step that fits a curvature.

        Raises:
            ValueError: If there is none.
        """
        steepest = self.inverse_temperature * max(curvature, 0.0) + self.localisation
        if not steepest > 0:
            raise ValueError(
                "The loss has no curvature above 0 at the network's weights (a dead network, a maximum?) and there is "
                "no localisation, so that no step fits; give step, or localisation."
            )
        return LARGEST_STEP / steepest

    def _steepest(self, vectors: Tensor) -> Tensor:
        """Return the largest curvature, at least 0, where each chain of this process is; NaN if that is nowhere."""
        found = torch.full((len(vectors),), math.nan, dtype=torch.float64)
        finite = torch.isfinite(vectors).all(1).cpu()
        if bool(finite.any()):
            found[finite] = self.function.largest_curvatures(vectors[finite.to(vectors.device)], self.seed).clamp(min=0)
        return found

    def _gradients(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        if not self.numbers:
            return torch.zeros_like(vectors), vectors.new_zeros(0)
        rows = None
        if self.batch_size is not None:
            draws = [torch.randperm(self.function.samples, generator=one)[: self.batch_size] for one in self.batches]
            rows = torch.stack(draws)
        return self.function.gradients(vectors, rows)

    def _values(self, vectors: Tensor) -> Tensor:
        return self.function.values(vectors) if self.numbers else vectors.new_zeros(0)

    def _leave(self, values: Tensor, index: int) -> None:
        """Record the chains that are no longer finite; their values are NaN from here on."""
        if bool(torch.isfinite(values).all()):
            return
        for row in (~torch.isfinite(values)).nonzero().flatten().tolist():
            self.escaped.setdefault(self.numbers[row], index)

    def _of_all(self, columns: Tensor, gone: dict[int, int]) -> Tensor:
        """Return the columns of the chains of all processes, in order; NaN from the rows of their divergence."""
        parts = gathered((self.numbers, columns))
        whole = columns.new_empty(len(columns), sum(len(numbers) for numbers, _ in parts))
        for numbers, part in parts:
            whole[:, numbers] = part
        for number, row in gone.items():
            whole[row:, number] = math.nan
        return whole.masked_fill(~torch.isfinite(whole), math.nan)
