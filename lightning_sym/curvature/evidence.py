"""The Laplace approximation of the log marginal likelihood, its gradients, and the use of paths."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._distributed import ranks
from lightning_sym.curvature.blocks import CurvatureError, Factors, NonFiniteError, Spectrum
from lightning_sym.curvature.prior_groups import PriorGroups

_NOISE_BOUNDS = (-10.0, 10.0)  # of the log noise
_CHUNK = 1 << 22  # eigenvalues held in double precision at a time


@dataclass(frozen=True)
class EvidenceTerms:
    """The log marginal likelihood, in nats, as the sum of its three parts.

    Attributes:
        log_likelihood: Log likelihood of the data at the weights.
        log_determinant: Half the log ratio of posterior and prior precision, >= 0; it is subtracted.
        scatter: Half the sum of precision times squared weights, >= 0; it is subtracted.
    """

    log_likelihood: float
    log_determinant: float
    scatter: float

    @property
    def total(self) -> float:
        """The log marginal likelihood."""
        return self.log_likelihood - self.log_determinant - self.scatter


@dataclass(frozen=True)
class EffectiveNumber:
    """The number of parameters of a path that the data determine.

    Attributes:
        layer: In which the path competes.
        size: Number P of parameters.
        raw: Gamma, in [0, P].
        normalised: Gamma / P.
        relative: Normalised number over the sum of the normalised numbers of all paths of the layer; they add up to
            1, and are equal if all are 0.
        precision: Prior precision of the path; the geometric mean, weighted by size, if its tensors have several.
        mean_square: Mean squared weight.
    """

    layer: str
    size: int
    raw: float
    normalised: float
    relative: float
    precision: float
    mean_square: float


class Evidence:
    r"""The log marginal likelihood as a function of prior precisions and noise, at fixed weights and factors.

    .. math::
        L = \log p(D | \theta) - \tfrac12 \sum_l \Big[\sum_i \log\big(1 + h\, e_{l,i} / \delta_l\big)
            + \delta_l \|\theta_l\|^2\Big],

    with eigenvalues e of the curvature at unit noise, precisions :math:`\delta = \exp \lambda` of the Gaussian prior,
    and h = 1 / temperature, for regression 1 / (temperature * sigma^2). The factor h also multiplies the fit in
    :math:`\log p(D | \theta)`.

    Args:
        factors: Curvature of the parameters. With several processes the constructor is to be called on every rank, as
            it shares the eigenvalue problems out.
        squared_norms: Squared norm of each parameter tensor, by name.
        groups: Which parameters share a precision; every parameter with a block must be in it.
        temperature: > 0; 1 is Bayes.

    Attributes:
        groups: As given. Vectors of log precisions are in the order of ``groups.names``.
        samples: Number N of data.

    Raises:
        ValueError: If the temperature is not positive, or a parameter has no group or norm.
        NonFiniteError: If eigenvalues or norms are not finite.

    References:
        MacKay (1992), "Bayesian interpolation"; Immer et al. (2021), arXiv:2104.04975;
        docs/theory/curvature.md, 3.1 to 3.3.

    Example:
        >>> from lightning_sym.curvature import factors, parameter_groups
        >>> network = nn.Linear(1, 1, bias=False)
        >>> torch.nn.init.ones_(network.weight).shape
        torch.Size([1, 1])
        >>> data = [(torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [1.0]]))]
        >>> found = Evidence.of(network, factors(network, data, "regression"), parameter_groups(network))
        >>> round(found.log_marginal_likelihood(torch.zeros(1)), 4)  # -log(2 pi) - log(3) / 2 - 1 / 2
        -2.8872
    """

    def __init__(
        self, factors: Factors, squared_norms: Mapping[str, float], groups: PriorGroups, *, temperature: float = 1.0
    ) -> None:
        check_numbers("> 0", temperature=temperature)
        for name in factors.blocks:
            if name not in groups.precisions or name not in squared_norms:
                raise ValueError(f"Parameter {name!r} has a curvature block but no precision group or squared norm.")
            if not math.isfinite(squared_norms[name]):
                raise NonFiniteError(f"The squared norm of {name!r} is {squared_norms[name]}; lower the learning rate.")
        self.groups = groups
        self.samples = factors.samples
        self.temperature = temperature
        self._factors = factors
        self._spectra = factors.eigenvalues()
        self._index = {name: number for number, name in enumerate(groups.names)}
        self._of = {name: self._index[groups.precisions[name]] for name in self._spectra}
        self._squares = {name: float(squared_norms[name]) for name in self._spectra}

    @classmethod
    def of(cls, network: nn.Module, factors: Factors, groups: PriorGroups, *, temperature: float = 1.0) -> "Evidence":
        """Return the evidence at the present weights of a network; see the class.

        Args:
            network: That of the factors.
            factors: As for the class.
            groups: As for the class.
            temperature: As for the class.
        """
        norms = {
            name: parameter.detach().double().square().sum().item()
            for name, parameter in network.named_parameters()
            if name in factors.blocks
        }
        found = cls(factors, norms, groups, temperature=temperature)
        for name, parameter in network.named_parameters():
            if name in norms and parameter.numel() != found._spectra[name].size:
                raise ValueError(f"{name!r} has another size in the factors; pass the network of the factors.")
        return found

    @property
    def device(self) -> torch.device:
        """Device of the eigenvalues."""
        return next((s.out.device for s in self._spectra.values()), torch.device("cpu"))

    def terms(self, log_precisions: Tensor, log_noise: float = 0.0) -> EvidenceTerms:
        """Return the three parts of the log marginal likelihood.

        Args:
            log_precisions: Log precisions of the groups. Shape ``[G]``, floating, finite.
            log_noise: Logarithm of sigma, for a regression.

        Returns:
            In nats, summed over the data, not divided by N.

        Raises:
            ValueError: If there are not as many precisions as groups, or a classification is given noise.
        """
        precisions = self._precisions(log_precisions)
        h = self._scale(log_noise)
        log_likelihood = -h * self._factors.loss_sum
        if self._factors.likelihood == "regression":
            count = self.samples * self._factors.outputs
            # The normaliser is not tempered, as in laplace-torch. Half the square: h/2.
            log_likelihood = log_likelihood / 2 - count * (0.5 * math.log(2 * math.pi) + log_noise)
        determinant = scatter = 0.0
        for name, spectrum in self._spectra.items():
            precision = precisions[self._of[name]]
            scatter += 0.5 * precision * self._squares[name]
            determinant += sum(0.5 * float((e * (h / precision)).log1p().sum()) for e in _chunks(spectrum))
        return EvidenceTerms(log_likelihood, determinant, scatter)

    def log_marginal_likelihood(self, log_precisions: Tensor, log_noise: float = 0.0) -> float:
        """Return the log marginal likelihood in nats, over all data; see :meth:`terms`.

        Args:
            log_precisions: Log precisions of the groups. Shape ``[G]``.
            log_noise: Logarithm of sigma, for a regression.
        """
        return self.terms(log_precisions, log_noise).total

    def gradients(self, log_precisions: Tensor, log_noise: float = 0.0) -> tuple[Tensor, float]:
        r"""Return the derivatives of the log marginal likelihood, in closed form.

        :math:`\tfrac12 (\gamma_l - \delta_l \|\theta_l\|^2)` and
        :math:`h\,\mathrm{SSE} - N K + \sum_l \gamma_l`.

        Args:
            log_precisions: Log precisions of the groups. Shape ``[G]``.
            log_noise: Logarithm of sigma, for a regression.

        Returns:
            For the log precisions, shape ``[G]``, float64, on the CPU, and for ``log_noise``, 0 for a classification.
        """
        precisions = self._precisions(log_precisions)
        gradient = torch.zeros(len(self._index), dtype=torch.float64)
        total = 0.0
        for name, gamma in self._gammas(precisions, self._scale(log_noise)).items():
            total += gamma
            gradient[self._of[name]] += 0.5 * (gamma - precisions[self._of[name]] * self._squares[name])
        if self._factors.likelihood == "classification":
            return gradient, 0.0
        count = self.samples * self._factors.outputs
        return gradient, self._scale(log_noise) * self._factors.loss_sum - count + total

    def effective_parameters(
        self, log_precisions: Tensor, log_noise: float = 0.0, *, per_tensor: bool = False
    ) -> dict[str, EffectiveNumber]:
        """Return the effective number of parameters of every path.

        Args:
            log_precisions: Log precisions of the groups. Shape ``[G]``.
            log_noise: Logarithm of sigma, for a regression.
            per_tensor: Whether every parameter tensor counts as a path; relative numbers are then 1.

        Returns:
            By the name of path or tensor.

        References:
            docs/theory/curvature.md, 3.3.
        """
        precisions = self._precisions(log_precisions)
        raw: dict[str, float] = {}
        sums: dict[str, list[float]] = {}
        for name, gamma in self._gammas(precisions, self._scale(log_noise)).items():
            path = name if per_tensor else self.groups.paths[name]
            size = self._spectra[name].size
            raw[path] = raw.get(path, 0.0) + gamma
            row = (float(size), size * math.log(precisions[self._of[name]]), self._squares[name])
            sums[path] = [a + b for a, b in zip(sums.get(path, [0.0, 0.0, 0.0]), row, strict=True)]
        layer = {path: path if per_tensor else self.groups.layers[path] for path in raw}
        share = {path: raw[path] / sums[path][0] for path in raw}
        found = {}
        for path, (count, log_precision, square) in sums.items():
            rivals = [other for other in raw if layer[other] == layer[path]]
            total = sum(share[other] for other in rivals)
            relative = share[path] / total if total > 0 else 1 / len(rivals)
            found[path] = EffectiveNumber(
                layer[path],
                int(count),
                raw[path],
                share[path],
                relative,
                math.exp(log_precision / count),
                square / count,
            )
        return found

    def fixed_point(self, log_precisions: Tensor, log_noise: float = 0.0) -> Tensor:
        """Return MacKay's update: the log of gamma over squared norm, per group; at the optimum it changes nothing.

        Args:
            log_precisions: Log precisions of the groups. Shape ``[G]``.
            log_noise: Logarithm of sigma, for a regression.

        Returns:
            Shape ``[G]``, float64; infinite where the weights are 0, minus infinity where gamma is, NaN
            where both are.
        """
        precisions = self._precisions(log_precisions)
        gamma, square = (torch.zeros(len(self._index), dtype=torch.float64) for _ in range(2))
        for name, value in self._gammas(precisions, self._scale(log_noise)).items():
            gamma[self._of[name]] += value
            square[self._of[name]] += self._squares[name]
        return torch.log(gamma / square)

    def _gammas(self, precisions: list[float], h: float) -> dict[str, float]:
        found = {}
        for name, spectrum in self._spectra.items():
            ratio = precisions[self._of[name]] / h
            found[name] = sum(float((e / (e + ratio)).sum()) for e in _chunks(spectrum))
        return found

    def _precisions(self, log_precisions: Tensor) -> list[float]:
        log_precisions = torch.as_tensor(log_precisions)
        if log_precisions.shape != (len(self._index),):
            raise ValueError(
                f"There are {len(self._index)} groups of precisions, got log_precisions of shape "
                f"{list(log_precisions.shape)}; give one for each, in the order of groups.names."
            )
        values = [float(value) for value in log_precisions.detach().double().exp()]
        if not all(0 < value < math.inf for value in values):
            raise ValueError("log_precisions must be finite and between -700 and 700; clamp them.")
        return values

    def _scale(self, log_noise: float) -> float:
        if self._factors.likelihood == "classification":
            if log_noise != 0:
                raise ValueError(f"A classification has no noise, got log_noise={log_noise}; leave it out.")
            return 1 / self.temperature
        return math.exp(-2 * log_noise) / self.temperature


def _chunks(spectrum: Spectrum) -> Iterator[Tensor]:
    """Yield all eigenvalues of a block in double precision, a part at a time."""
    out, inner = spectrum.out, spectrum.inner
    if out.device.type != "mps":
        out, inner = out.double(), inner.double()
    step = max(1, _CHUNK * out.shape[-1] // max(spectrum.size, 1))
    for part in torch.split(out, step, dim=-1):
        yield part[..., :, None] * inner[..., None, :]


class PrecisionOptimizer:
    """Log precisions, and the log noise of a regression, with the Adam that makes the evidence grow.

    The state is on the CPU and in double precision. With several processes the first rank's values are sent to the
    others after every update, so that all have the same to the last bit.

    Args:
        groups: Names of the groups, in order.
        lr: Learning rate of Adam, > 0.
        log_noise: Initial log of sigma.
        learn_noise: Whether the noise of a regression is updated as well.
        bounds: Range of log precisions; they are clamped after each step, and the log noise to (-10, 10).

    Attributes:
        log_precisions: Shape ``[G]``, float64.
        log_noise: A scalar, float64.

    Raises:
        ValueError: If ``lr`` is not positive, a range is empty or there is no group.

    References:
        van der Ouderaa et al. (2023), arXiv:2310.06131; docs/theory/curvature.md, 3.4.

    Example:
        >>> optimizer = PrecisionOptimizer(["0", "1"])
        >>> optimizer.log_precisions
        tensor([0., 0.], dtype=torch.float64)
    """

    def __init__(
        self,
        groups: tuple[str, ...] | list[str],
        *,
        lr: float = 0.1,
        log_noise: float = 0.0,
        learn_noise: bool = False,
        bounds: tuple[float, float] = (-20.0, 20.0),
    ) -> None:
        check_numbers("> 0", of="the precisions", lr=lr)
        low, high = bounds
        if not -700 <= low < high <= 700:
            raise ValueError(f"bounds of a logarithm must be ascending and within 700 of 0, got {(low, high)}.")
        if not groups:
            raise ValueError("There are no groups of precisions to learn.")
        self.groups = tuple(groups)
        self.lr = lr
        self.learn_noise = learn_noise
        self.bounds = bounds
        self.log_precisions = torch.zeros(len(groups), dtype=torch.float64).clamp(*bounds)
        self.log_noise = torch.tensor(float(log_noise), dtype=torch.float64).clamp(*_NOISE_BOUNDS)
        self._adam = torch.optim.Adam([self.log_precisions, self.log_noise], lr=lr)

    def update(self, evidence: Evidence, steps: int = 20, lr: float | None = None) -> None:
        """Take steps of Adam uphill on the evidence per sample.

        Args:
            evidence: Evidence with the same groups.
            steps: >= 1.
            lr: Learning rate of these steps, >= 0; default that of the optimizer.

        Raises:
            ValueError: If the groups are others, or ``steps`` is not >= 1.
            CurvatureError: If a gradient is not finite; nothing is changed by that step.
        """
        if evidence.groups.names != self.groups:
            raise ValueError(
                "The evidence has other groups of precisions than the optimizer; make both from one network."
            )
        check_integers(steps=steps)
        lr = self.lr if lr is None else lr
        if not (lr >= 0 and math.isfinite(lr)):
            raise ValueError(f"lr of the steps must be a finite number >= 0, got {lr}.")
        for group in self._adam.param_groups:
            group["lr"] = lr
        for _ in range(steps):
            gradient, noise = evidence.gradients(self.log_precisions, float(self.log_noise))
            if not (gradient.isfinite().all() and math.isfinite(noise)):
                raise CurvatureError("A gradient of the evidence is not finite; look at the weights.")
            self.log_precisions.grad = -gradient / evidence.samples
            self.log_noise.grad = (
                torch.tensor(-noise / evidence.samples, dtype=torch.float64) if self.learn_noise else None
            )
            self._adam.step()
            self.log_precisions.clamp_(*self.bounds)
            self.log_noise.clamp_(*_NOISE_BOUNDS)
        self._adam.zero_grad()
        if ranks() > 1:
            self._broadcast(evidence.device)

    def _broadcast(self, device: torch.device) -> None:
        adam = [v for state in self._adam.state.values() for v in state.values() if isinstance(v, Tensor)]
        for tensor in (self.log_precisions, self.log_noise, *adam):
            sent = tensor.to(device)
            torch.distributed.broadcast(sent, 0)
            tensor.copy_(sent)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs."""
        return {
            "groups": list(self.groups),
            "log_precisions": self.log_precisions.clone(),
            "log_noise": self.log_noise.clone(),
            "adam": copy.deepcopy(self._adam.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state.

        Args:
            state: State of an optimizer of the same groups.

        Raises:
            ValueError: If it is of other groups.
        """
        if tuple(state["groups"]) != self.groups:
            raise ValueError("The checkpoint has other groups of precisions than this network; use its own recipe.")
        self.log_precisions.copy_(state["log_precisions"])
        self.log_noise.copy_(state["log_noise"])
        self._adam.load_state_dict(state["adam"])
