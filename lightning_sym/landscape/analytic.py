"""Landscapes with known learning coefficients, to calibrate estimates by chains."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev

from lightning_sym._checks import check_integers
from lightning_sym._random import generator
from lightning_sym.landscape.learning_coefficients import LearningCoefficientEstimate, learning_coefficient
from lightning_sym.landscape.loss_on_data import LossOnData

_FARTHEST, _NODES = 8.0, 4000  # of the quadrature, in standard deviations of the localisation and per axis


def summed_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over samples of the squared distance, summed over outputs: J."""
    return (outputs - targets).square().flatten(1).sum(1).mean()


class SquareSum(nn.Module):
    r"""Output :math:`\sqrt{c_i}\, w_i` for all inputs, so that :math:`J = \sum_i c_i w_i^2` around 0.

    Args:
        coefficients: The :math:`c_i >= 0`; 0 for a flat direction.
    """

    def __init__(self, *coefficients: float) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(len(coefficients), dtype=torch.float64))
        self.register_buffer("scales", torch.tensor(coefficients, dtype=torch.float64).sqrt())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs. Shape ``[N, len(coefficients)]``."""
        return (self.get_buffer("scales") * self.weights).expand(len(inputs), -1)


class NormalCrossing(nn.Module):
    r"""Output :math:`x^{k_1} y^{k_2}` for all inputs, so that :math:`J = x^{2 k_1} y^{2 k_2}`; at 0.

    Args:
        first: :math:`k_1 >= 0`.
        second: :math:`k_2 >= 0`, one of them above 0.
    """

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        check_integers(0, first=first, second=second)
        check_integers(largest=max(first, second))
        self.powers = (first, second)
        self.weights = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output. Shape ``[N, 1]``."""
        # Products, as the second derivative of a power at 0 is NaN for some exponents.
        value = torch.ones_like(self.weights[0])
        for weight, power in zip(self.weights, self.powers, strict=True):
            for _ in range(power):
                value = value * weight
        return value.expand(len(inputs), 1)


class TwoRectifiedUnits(nn.Module):
    """Two rectified linear units of the first input, four weights without biases.

    Args:
        incoming: Incoming weight of each unit.
        outgoing: Outgoing weight of each unit.
    """

    def __init__(self, incoming: tuple[float, float], outgoing: tuple[float, float]) -> None:
        super().__init__()
        self.incoming = nn.Parameter(torch.tensor(incoming, dtype=torch.float64))
        self.outgoing = nn.Parameter(torch.tensor(outgoing, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output. Shape ``[N, 1]``."""
        return (inputs[:, :1] * self.incoming).relu() @ self.outgoing[:, None]


class ReducedRank(nn.Module):
    """A linear map through a narrow layer, at weights with a product of a given rank, and zeros beyond it.

    Args:
        inputs: M, number of inputs.
        hidden: H, width of the layer.
        outputs: N, number of outputs.
        rank: r, of the product.
        seed: Seed of the weights.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, rank: int, seed: int = 0) -> None:
        super().__init__()
        check_integers(inputs=inputs, hidden=hidden, outputs=outputs)
        check_integers(0, rank=rank)
        if rank > min(inputs, hidden, outputs):
            raise ValueError(f"rank must be at most {min(inputs, hidden, outputs)}, the narrowest layer, got {rank}.")
        source = generator("reduced rank", seed)
        used = (torch.arange(hidden) < rank).double()
        # Orthogonal, so that no singular value is small: how far chains may go before they see another stratum.
        first, second = (
            torch.linalg.qr(torch.randn(size, size, generator=source, dtype=torch.float64))[0]
            for size in (inputs, outputs)
        )
        first = torch.cat([first, first.new_zeros(max(0, hidden - inputs), inputs)])[:hidden]
        second = torch.cat([second, second.new_zeros(outputs, max(0, hidden - outputs))], 1)[:, :hidden]
        self.first = nn.Parameter(first * used[:, None])
        self.second = nn.Parameter(second * used)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs. Shape ``[N, outputs]``."""
        return inputs @ self.first.T @ self.second.T


def reduced_rank_coefficient(inputs: int, hidden: int, outputs: int, rank: int) -> float:
    """Return the learning coefficient of reduced-rank regression (docs/theory/learning_coefficients.md, 4).

    Args:
        inputs: M, number of inputs, >= 1.
        hidden: H, width of the layer, >= 1.
        outputs: N, number of outputs, >= 1.
        rank: r, rank of the true map, in ``0 .. min(M, H, N)``.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Aoyagi and Watanabe (2005), "Stochastic Complexities of Reduced Rank Regression in Bayesian Estimation".

    Example:
        >>> reduced_rank_coefficient(3, 2, 3, 2), reduced_rank_coefficient(3, 2, 3, 1)
        (4.0, 3.5)
    """
    m, h, n, r = inputs, hidden, outputs, rank
    check_integers(inputs=m, hidden=h, outputs=n)
    check_integers(0, rank=r)
    if r > min(m, h, n):
        raise ValueError(f"rank must be at most {min(m, h, n)}, the narrowest layer, got {r}.")
    if n + r <= m + h and m + r <= n + h and h + r <= m + n:
        odd = (m + h + n + r) % 2
        return (-((h + r) ** 2) - m**2 - n**2 + 2 * (h + r) * (m + n) + 2 * m * n + odd) / 8
    if m + h < n + r:
        return (h * m - h * r + n * r) / 2
    if n + h < m + r:
        return (h * n - h * r + m * r) / 2
    return m * n / 2


def crossing_energy(first: int, second: int, inverse_temperature: float, localisation: float) -> float:
    r"""Return :math:`E[nb\, x^{2 k_1} y^{2 k_2}]` of the localised posterior around 0, by quadrature.

    The trapezoidal rule in :math:`\ln x` and :math:`\ln y`, which converges exponentially here.

    Args:
        first: :math:`k_1 >= 0`.
        second: :math:`k_2 >= 0`.
        inverse_temperature: :math:`nb > 0`.
        localisation: :math:`\gamma > 0`.
    """
    log = np.linspace(math.log(1e-9), math.log(_FARTHEST), _NODES) - math.log(localisation) / 2
    inner = np.exp(2 * log)
    weight = np.exp(log - localisation * inner / 2)
    below = above = 0.0
    for block in np.array_split(np.arange(_NODES), 8):
        energy = inverse_temperature * np.exp(2 * first * log[block, None] + 2 * second * log[None])
        density = np.exp(-energy) * weight[block, None] * weight[None]
        below += float(density.sum())
        above += float((energy * density).sum())
    return above / below


Kind = Literal["regular", "crossing", "singular"]


@dataclass(frozen=True, eq=False)
class AnalyticLandscape:
    """A network at weights where the learning coefficient of J is known.

    Attributes:
        name: Its name.
        network: The network, in double precision.
        theory: The learning coefficient.
        kind: ``"regular"`` points and normal ``"crossing"`` have an exact value at finite temperature, other
            ``"singular"`` points have none.
        settings: Arguments of :func:`lightning_sym.landscape.learning_coefficient`.
        refused: Whether these settings are such that there must be no estimate.
    """

    name: str
    network: nn.Module
    theory: float
    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: bool = False

    def data(self, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return inputs ``[N, ...]`` with the network's outputs as targets."""
        inputs = inputs.detach().double().flatten(1)
        with torch.no_grad():
            return [(inputs, self.network(inputs))]

    def estimate(self, inputs: Tensor, **changes: Any) -> LearningCoefficientEstimate:
        """Estimate the coefficient by chains.

        Args:
            inputs: Shape ``[N, ...]``, at least three numbers each.
            changes: To the settings.
        """
        return learning_coefficient(self.network, self.data(inputs), summed_squares, **{**self.settings, **changes})

    def exact(self, inputs: Tensor, found: LearningCoefficientEstimate) -> float | None:
        """Return the exact mean of chains with these settings; None if it is not known.

        Args:
            inputs: As for :meth:`estimate`.
            found: Its result.
        """
        if self.kind == "regular":
            function = LossOnData(self.network, self.data(inputs), summed_squares, dtype=torch.float64)
            return found.regular(torch.linalg.eigvalsh(jacrev(grad(function.at))(function.own).cpu()))
        if isinstance(self.network, NormalCrossing):
            return crossing_energy(*self.network.powers, found.inverse_temperature, found.localisation)
        return None


def analytic_landscapes() -> list[AnalyticLandscape]:
    """Return landscapes of all kinds: regular, singular, and two that must give no estimate.

    Returns:
        Networks of inputs with three numbers.
    """
    paper: dict[str, Any] = {
        "inverse_temperature": 1e3,
        "method": "sgld",
        "localisation": 1e3,
        "chains": 600,
        "steps": 2500,
    }

    def settings(inverse_temperature: float, localisation: float, chains: int, steps: int = 2500) -> dict[str, Any]:
        cold = {"inverse_temperature": inverse_temperature, "localisation": localisation}
        return {**cold, "chains": chains, "steps": steps}

    def toy(name: str, refused: bool = False, **settings: Any) -> AnalyticLandscape:
        return AnalyticLandscape(f"3x²+5y²{name}", SquareSum(3.0, 5.0, 0.0), 1.0, "regular", settings, refused)

    def units(name: str, theory: float, *incoming: float) -> AnalyticLandscape:
        network = TwoRectifiedUnits((incoming[0], incoming[1]), (0.7, 0.5))
        return AnalyticLandscape(f"ReLU, {name}", network, theory, "regular", settings(1e5, 1e3, 600))

    def reduced(rank: int, kind: Kind) -> AnalyticLandscape:
        theory, network = reduced_rank_coefficient(3, 2, 3, rank), ReducedRank(3, 2, 3, rank)
        return AnalyticLandscape(f"rank {rank} by 2 units", network, theory, kind, settings(1e4, 10.0, 400))

    def crossing(first: int, second: int, chains: int = 800) -> AnalyticLandscape:
        network, theory = NormalCrossing(first, second), 1 / (2 * max(first, second))
        name = " ".join(f"{w}^{2 * power}" for w, power in zip("xy", network.powers, strict=True) if power)
        return AnalyticLandscape(name, network, theory, "crossing", settings(1e3, 1.0, chains, 3000))

    return [
        toy("", **settings(1e3, 10.0, 600)),
        toy(", SGLD", **paper),
        toy(", SGLD, large", **{**paper, "step": 2e-4, "localisation": 30.0}),
        units("opposite signs", 1.0, 0.8, -0.6),
        units("same sign", 0.5, 0.8, 0.6),
        reduced(2, "regular"),
        reduced(1, "singular"),
        crossing(1, 0),
        crossing(1, 1, 1600),
        crossing(0, 2),
        crossing(1, 2, 3200),
        crossing(2, 2, 1600),
        toy(", SGLD, unstable", refused=True, **{**paper, "step": 5e-4, "steps": 1000}),
        toy(", SGLD, tiny", refused=True, **{**paper, "step": 1e-7, "steps": 1000}),
    ]
