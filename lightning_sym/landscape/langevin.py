"""Langevin chains: many random walks of weights at once, held near low loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._random import generator
from lightning_sym.landscape.outputs import NetworkOutputs

Method = Literal["underdamped", "sgld"]
METHODS: tuple[Method, ...] = ("underdamped", "sgld")
# Block of noise per chain: steps, and entries. A fixed block makes draws independent of the number of chains.
_NOISE_STEPS, _NOISE = 256, 2**18
_PRODUCTS = 30  # with the Hessian, at most, for its largest eigenvalue
_CLOSE = 0.01  # which part of an eigenvalue its residual may be


class Noise:
    """Draw normal noise for chains, each from a separate generator, independent of other chains and of the device.

    Args:
        chains: Numbers of the chains.
        size: Entries for each chain and step.
        seed: Seed of all.
        like: Tensor with the dtype and device of the result.
    """

    def __init__(self, chains: Sequence[int], size: int, seed: int, like: Tensor) -> None:
        # On the CPU, wherever the network is: each device has its own random numbers, and a seed names one chain.
        self._sources = [generator("langevin", seed, chain) for chain in chains]
        self._size, self._like = size, like
        self._block = like.new_empty(0, len(chains), size)
        self._next = 0

    def __call__(self) -> Tensor:
        """Return the noise of the next step, shape ``[chains, size]``."""
        if self._next == len(self._block):
            steps = max(1, min(_NOISE_STEPS, _NOISE // self._size))
            drawn = [torch.randn(steps, self._size, generator=one, dtype=self._like.dtype) for one in self._sources]
            self._block = torch.stack(drawn, 1).to(self._like) if drawn else self._like.new_empty(steps, 0, self._size)
            self._next = 0
        self._next += 1
        return self._block[self._next - 1]


class Dynamics:
    r"""Dynamics of chains in :math:`U = nb\, J + \frac{\gamma}{2} |\theta - \theta_0|^2`.

    See docs/theory/learning_coefficients.md, 2.

    Args:
        method: ``"sgld"``: :math:`\theta \leftarrow \theta - \frac{\eta}{2} \nabla U + \sqrt{\eta}\, \xi`.
            ``"underdamped"``: with velocities, by the splitting BAOAB with time step :math:`\sqrt{\eta}`; its law of
            the weights is exact where U is quadratic.
        step: :math:`\eta`; may be changed between steps.
        friction: Friction of the velocities, per unit of time.
        noise: Noise of the steps.
    """

    def __init__(self, method: Method, step: float, friction: float, noise: Noise) -> None:
        self.step, self._friction, self._noise = step, friction, noise
        self._velocity = noise() if method == "underdamped" else None

    def begin_again(self, rows: Tensor) -> None:
        """Give chains new velocities.

        Args:
            rows: Which. Shape ``[chains]``, bool.
        """
        if self._velocity is not None:
            self._velocity = torch.where(rows[:, None], self._noise(), self._velocity)

    def advance(self, vectors: Tensor, slope: Tensor) -> Tensor:
        """Return the positions of chains after a step.

        Args:
            vectors: Where they are. Shape ``[chains, P]``.
            slope: Gradient of U there. Shape ``[chains, P]``.
        """
        noise = self._noise()
        if self._velocity is None:
            return torch.add(vectors, slope, alpha=-self.step / 2).add_(noise, alpha=math.sqrt(self.step))
        time = math.sqrt(self.step)
        keep = math.exp(-self._friction * time)
        kicked = torch.add(self._velocity, slope, alpha=-time)
        halfway = torch.add(vectors, kicked, alpha=time / 2)
        self._velocity = kicked.mul_(keep).add_(noise, alpha=math.sqrt(1 - keep**2))
        return halfway.add_(self._velocity, alpha=time / 2)


def expected_energy(
    eigenvalues: Tensor, inverse_temperature: float, localisation: float, step: float, method: Method = "sgld"
) -> float:
    r"""Return :math:`E[nb\,(J - J_0)]` of chains in a quadratic J (docs/theory/learning_coefficients.md, 2).

    Each direction adds :math:`\frac{1}{2} \frac{nb \lambda}{k}` with :math:`k = nb \lambda + \gamma`: half, less the
    pull of the localisation; and with ``"sgld"`` times :math:`\frac{1}{1 - \eta k / 4}`, the bias of the finite step.

    Args:
        eigenvalues: Eigenvalues of the Hessian of J. Any shape.
        inverse_temperature: :math:`nb`.
        localisation: :math:`\gamma`.
        step: :math:`\eta`.
        method: How they move.

    Returns:
        The mean; infinity if some :math:`\eta k \ge 4` or :math:`k < 0`, where chains leave to infinity.
    """
    rate = inverse_temperature * eigenvalues.double() + localisation
    rounding = 1e-9 * inverse_temperature * eigenvalues.double().abs().amax() if eigenvalues.numel() else 0.0
    if bool(((step * rate >= 4) | (rate < -rounding)).any()):
        return math.inf
    share = inverse_temperature * eigenvalues.double() / rate.where(rate != 0, 1.0) / 2
    return float((share / (1 - step * rate / 4) if method == "sgld" else share).sum())


def largest_curvatures(loss: Callable[[Tensor], Tensor], vectors: Tensor, *, seed: int = 0) -> Tensor:
    r"""Return for each weight vector an upper estimate of the largest eigenvalue of the Hessian of a loss there.

    Lanczos with full reorthogonalisation, of all vectors together: the largest Ritz value plus the norm of its
    residual, within which there is an eigenvalue. It ends when that norm is 1% of the value, or after 30 Hessian
    products; P of them, where P is less, are exact.

    Args:
        loss: From a weight vector ``[P]`` to a scalar; twice differentiable by ``torch.func``.
        vectors: Shape ``[C, P]``.
        seed: Seed of the first direction.

    Returns:
        Shape ``[C]``, float64, on the CPU.
    """

    def product(vector: Tensor, direction: Tensor) -> Tensor:
        found: Tensor = grad(lambda weights: (grad(loss)(weights) * direction).sum())(vector)
        return found

    return lanczos_top(lambda directions: vmap(product, randomness="same")(vectors, directions), vectors, seed=seed)


def lanczos_top(products: Callable[[Tensor], Tensor], like: Tensor, *, seed: int = 0) -> Tensor:
    """Return the largest Ritz values plus the norms of their residuals, for several symmetric matrices at once.

    Ends as :func:`largest_curvatures` says.

    Args:
        products: From directions ``[C, P]``, one for each matrix, to its products with them.
        like: Shape, dtype and device of the directions.
        seed: Seed of the first direction.

    Returns:
        Shape ``[C]``, float64, on the CPU.
    """
    count, size = like.shape
    steps = min(_PRODUCTS, size)
    first = torch.randn(size, generator=generator("lanczos", seed), dtype=torch.float64).to(like)
    basis = [(first / first.norm()).expand(count, size)]
    matrix = torch.zeros(count, steps, steps, dtype=torch.float64)
    for row in range(steps):
        ahead = products(basis[-1])
        matrix[:, row, row] = (ahead * basis[-1]).sum(1).cpu().double()
        known = torch.stack(basis, 1)  # [C, row + 1, P]
        for _ in range(2):
            ahead = ahead - torch.einsum("crp,cr->cp", known, torch.einsum("crp,cp->cr", known, ahead))
        length = ahead.norm(dim=1)
        # Once the space is exhausted only rounding remains: a direction of length 0 drops it.
        scale = matrix.abs().amax((1, 2)).to(length)
        left = length > 100 * torch.finfo(like.dtype).eps * scale
        remainder = torch.where(left, length, 0).cpu().double() * (row + 1 < size)
        values, directions = torch.linalg.eigh(matrix[:, : row + 1, : row + 1])
        found: Tensor = values[:, -1]
        residual = remainder * directions[:, -1, -1].abs()
        if steps < size and bool((residual <= _CLOSE * found).all()):
            break
        if row + 1 < steps:
            matrix[:, row, row + 1] = matrix[:, row + 1, row] = remainder
            basis.append(torch.where(left[:, None], ahead / length.where(left, 1.0)[:, None], 0.0))
    upper: Tensor = found + residual
    return upper


@dataclass(frozen=True, eq=False)
class SGLDSamples:
    r"""Langevin chains at low loss, and the learning coefficient read off them.

    Attributes:
        vectors: Weight vectors of all chains at the last step. Shape ``[chains, P]``.
        losses: J of every chain at every step after the burn-in. Shape ``[steps, chains]``, float64.
        learning_coefficient: Mean of :math:`nb J`; half the codimension of the class, if its points are regular.
        standard_error: Standard error of that mean, from the spread over chains; NaN for one chain.
        inverse_temperature: :math:`nb`, per unit of J.
        step: :math:`\eta`, squared weights.
        localisation: :math:`\gamma`, per squared weight.
        curvature: :math:`\lambda_{max}`, largest eigenvalue of the Hessian of J at the start.
    """

    vectors: Tensor
    losses: Tensor
    learning_coefficient: float
    standard_error: float
    inverse_temperature: float
    step: float
    localisation: float
    curvature: float


def sample_sgld(
    network: nn.Module,
    inputs: Tensor,
    *,
    chains: int,
    steps: int,
    burn_in: int,
    inverse_temperature: float,
    step: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SGLDSamples:
    r"""Run Langevin chains around weights that compute a network's function, at low temperature.

    See docs/theory/equivalence.md, 8.

    .. math::
        \theta \leftarrow \theta - \tfrac{\eta}{2} \big(nb \nabla J(\theta) + \gamma (\theta - \theta_0)\big)
        + \sqrt{\eta}\, \xi, \qquad J(\theta) = \tfrac{1}{N} \sum_x \|\phi(x, \theta) - \phi(x, \theta^*)\|^2 .

    The chains sample :math:`\exp(-nb J - \frac{\gamma}{2} |\theta - \theta_0|^2)`. Under it :math:`E[nb J]` tends to
    the local learning coefficient: half the codimension :math:`\kappa` of the class at a regular point, less where
    classes of codimension differ. All chains begin at the network's weights :math:`\theta_0`, near which
    :math:`\gamma = nb / 100` keeps them. The gradient is that of all inputs; chains are run together, in float64.

    Args:
        network: Computes :math:`\phi(\cdot, \theta^*)`. Not changed.
        inputs: Shape ``[N, ...]``.
        chains: Number of chains, >= 1.
        steps: Steps after the burn-in, >= 1.
        burn_in: Steps before, >= 0. A direction of curvature :math:`\lambda` forgets its beginning in about
            :math:`2 / (\eta\, nb \lambda)` steps.
        inverse_temperature: :math:`nb > 0`. With :math:`nb = \kappa / (2 J)` for a class of codimension
            :math:`\kappa`, the loss fluctuates about J.
        step: :math:`\eta > 0`; by default :math:`0.2 / (nb \lambda_{max})`, which makes J too large by 5% in the
            stiffest direction.
        seed: Seed of the noise, which is drawn on the CPU: the same seed is the same chain on every device, up to
            rounding. The caller's generators are not touched.
        progress: Called with (steps done, burn_in + steps) after every step.

    Returns:
        The samples.

    Raises:
        ValueError: If an argument is out of range, or J has no curvature at the start.
        FloatingPointError: If a chain leaves the finite numbers.

    References:
        Welling and Teh (2011), "Bayesian Learning via Stochastic Gradient Langevin Dynamics"; Lau et al. (2023), "The
        Local Learning Coefficient", arXiv:2308.12108, for the estimate and the localisation.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
        >>> found = sample_sgld(network, torch.randn(40, 2), chains=4, steps=30, burn_in=10, inverse_temperature=1e4)
        >>> found.vectors.shape, found.losses.shape
        (torch.Size([4, 9]), torch.Size([30, 4]))
    """
    check_integers(chains=chains, steps=steps)
    check_integers(0, burn_in=burn_in)
    check_numbers("> 0", inverse_temperature=inverse_temperature)
    check_numbers("> 0", optional=True, step=step)
    function = NetworkOutputs(network, inputs)
    beginning = function.own
    with torch.no_grad():
        targets = function(beginning)

    def loss(vector: Tensor) -> Tensor:
        return (function(vector) - targets).square().sum() / len(targets)

    curvature = float(largest_curvatures(loss, beginning[None], seed=seed))
    if step is None:
        if not curvature > 0:
            raise ValueError(
                "J has no curvature at the start (a dead network?), so no step fits; give step, or start elsewhere."
            )
        step = 0.2 / (inverse_temperature * curvature)
    localisation = inverse_temperature / 100

    gradient = vmap(grad_and_value(loss), randomness="same")
    vectors = beginning.repeat(chains, 1)
    dynamics = Dynamics("sgld", step, 0.0, Noise(range(chains), len(beginning), seed, beginning))
    losses = torch.empty(steps, chains, dtype=torch.float64, device=beginning.device)
    for index in range(-burn_in, steps):
        slope, values = gradient(vectors)
        if not bool(torch.isfinite(values).all()):
            raise FloatingPointError(
                f"{int((~torch.isfinite(values)).sum())} of {chains} chains left the finite numbers at step "
                f"{index + burn_in}; take a step smaller than {step:.2e}."
            )
        if index >= 0:
            losses[index] = values
            sampled = vectors
        vectors = dynamics.advance(vectors, inverse_temperature * slope + localisation * (vectors - beginning))
        if progress is not None:
            progress(index + burn_in + 1, burn_in + steps)
    means = inverse_temperature * losses.mean(0)
    return SGLDSamples(
        vectors=sampled,
        losses=losses,
        learning_coefficient=float(means.mean()),
        standard_error=float(means.std()) / math.sqrt(chains) if chains > 1 else math.nan,
        inverse_temperature=inverse_temperature,
        step=step,
        localisation=localisation,
        curvature=curvature,
    )
