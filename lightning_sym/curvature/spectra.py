"""Trace, spectral density and counts of small eigenvalues of a symmetric operator, each with how sure it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

from lightning_sym._checks import check_integers, check_known, check_numbers, is_finite
from lightning_sym._distributed import rank, summed, together, wide
from lightning_sym._linear_algebra import thin_svd
from lightning_sym._random import derive_seed, seeded
from lightning_sym._random import generator as seeded_generator
from lightning_sym._statistics import student_quantile
from lightning_sym.curvature.krylov import Quadrature, lanczos
from lightning_sym.curvature.operators import ROUNDING, CurvatureOperator, SymmetricOperator, curvlinops
from lightning_sym.networks.modes import PlainDistances

TraceMethod = Literal["hutchinson", "hutch++", "xtrace", "per_sample"]
TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-6, 1e-8)
# How near to the maximum in its middle a Gaussian of the default width falls at the next node, for evenly spaced ones.
_KAPPA = 3.0
_AT_ONCE = 2**24  # numbers that all gradients of some samples are together
_ROUNDING = 1e-5  # of the largest eigenvalue of a loss's second derivative


@dataclass(frozen=True)
class TraceEstimate:
    """A trace, and how sure it is.

    Attributes:
        value: Estimate of the trace.
        standard_error: Standard deviation over independent estimates, over the root of their number.
        squared_norm: Estimate of the squared Frobenius norm, the sum of squared eigenvalues, from the same products;
            NaN for methods other than ``"hutchinson"``.
        products: Number of products with vectors.
        degrees_of_freedom: Those of the standard error, > 0: the number of independent estimates less one; of a sum of
            several, those of Welch and Satterthwaite; infinity where there is no spread.
    """

    value: float
    standard_error: float
    squared_norm: float
    products: int
    degrees_of_freedom: float

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return Student's interval for the trace, which is wide where few independent estimates give the error.

        Args:
            level: Coverage, in (0, 1).
        """
        check_numbers("in (0, 1)", level=level)
        reach = student_quantile(level, self.degrees_of_freedom) * self.standard_error
        return self.value - reach, self.value + reach


def trace(
    operator: SymmetricOperator,
    probes: int = 100,
    *,
    method: TraceMethod = "hutchinson",
    repeats: int = 4,
    generator: torch.Generator | None = None,
) -> TraceEstimate:
    r"""Estimate a trace from products with random signs, with its standard error.

    ``"hutchinson"``: the mean of :math:`z^\top H z`, of variance :math:`2 (\|H\|_F^2 - \sum_i H_{ii}^2)` per probe, so
    exact for diagonal matrices; its standard error is that of the probes. ``"hutch++"`` and ``"xtrace"``
    are better where few eigenvalues make up the trace and there are many probes; they are run ``repeats`` times with a
    share of the products each, and the standard error is that of the repeats: so few that intervals want
    :meth:`TraceEstimate.interval`, not twice that error (docs/theory/spectra.md, 3).
    ``"per_sample"``, of a :class:`CurvatureOperator`: the trace of the Gauss-Newton matrix from gradients of single
    samples (far less noise), plus that of the rest of the Hessian by Hutchinson.

    Args:
        operator: The matrix H.
        probes: Number of products with vectors. ``"hutch++"`` and ``"xtrace"`` round it down to a multiple that
            ``repeats`` equal runs can use. For ``"per_sample"`` it counts passes over the samples' gradients, at a few
            products each, and products with the rest. >= 2.
        method: See above.
        repeats: Independent runs of ``"hutch++"`` and ``"xtrace"``. >= 2.
        generator: Generator of the signs, on the CPU; use one in the same state on each rank.

    Returns:
        The estimate.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Hutchinson (1990); Meyer et al. (2021), arXiv:2010.09649; Epperly, Tropp, Webber (2024), arXiv:2301.07825.

    Example:
        >>> from lightning_sym.curvature.operators import MatrixOperator
        >>> found = trace(MatrixOperator(torch.diag(torch.tensor([6.0, 10.0, 0.0]))), 10)
        >>> found.value, found.standard_error, found.squared_norm
        (16.0, 0.0, 136.0)
    """
    check_integers(2, probes=probes, repeats=repeats)
    generator = seeded_generator("trace") if generator is None else generator
    if method == "hutchinson":
        return _hutchinson(operator, probes, generator)
    check_known("method", method, get_args(TraceMethod))
    if method == "per_sample":
        return _per_sample(operator, probes, generator)
    unit = 3 if method == "hutch++" else 2
    share = probes // repeats // unit * unit
    if not 0 < share < operator.dimension:
        raise ValueError(
            f"{method} needs at least {unit} probes in each of {repeats} repeats, and fewer than the "
            f"{operator.dimension} eigenvalues of the matrix, got probes={probes}; change probes or repeats, or use "
            "method='hutchinson'."
        )
    before = operator.products
    values = []
    for _ in range(repeats):
        if method == "xtrace":
            values.append(_xtrace(operator, share // 2, generator))
            continue
        with seeded(int(torch.randint(2**62, (), generator=generator))):
            values.append(float(curvlinops().hutchpp_trace(_Wide(operator), share)))
    error = float(torch.tensor(values, dtype=torch.float64).std()) / math.sqrt(repeats)
    return TraceEstimate(math.fsum(values) / repeats, error, math.nan, operator.products - before, repeats - 1)


def _xtrace(operator: SymmetricOperator, count: int, generator: torch.Generator) -> float:
    """Return the mean over random signs w of :math:`tr(Q^T H Q) + w^T (I - Q Q^T) H (I - Q Q^T) w`.

    Q is a basis of the products with all *other* signs. It is the basis of all products without a direction s: the row
    of the pseudoinverse that belongs to the sign, or none if its product depends on the others, as for a matrix of low
    rank. (Epperly's formulas, and curvlinops, invert a triangular matrix that is singular then.)
    """
    signs = _signs(operator, count, generator)
    ahead = operator @ signs
    basis, triangle = torch.linalg.qr(ahead)
    left, sizes, right = thin_svd(triangle)
    rounding = len(sizes) * torch.finfo(sizes.dtype).eps
    kept = sizes > rounding * sizes.amax()
    null, basis, sizes, right = right[~kept], basis @ left[:, kept], sizes[kept], right[kept]
    if not len(sizes):
        return 0.0
    products = operator @ basis
    inside = basis.T @ products
    # A product that no linear relation of the products has in it is independent of the others.
    alone = null.norm(dim=0) <= rounding * sizes[0] / sizes[-1]
    without = torch.where(alone, right * (sizes[-1] / sizes)[:, None], 0.0)
    without = without / without.norm(dim=0).where(alone, 1.0)

    def outside(coordinates: Tensor) -> Tensor:
        found: Tensor = coordinates - without * (without * coordinates).sum(0)
        return found

    rest = ahead - products @ outside(basis.T @ signs)
    rest = rest - basis @ outside(basis.T @ rest)
    each = inside.trace() - (without * (inside @ without)).sum(0) + (signs * rest).sum(0)
    return float(each.mean())


def _per_sample(operator: SymmetricOperator, probes: int, generator: torch.Generator) -> TraceEstimate:
    if not isinstance(operator, CurvatureOperator):
        raise ValueError(
            f"per_sample needs the samples of a CurvatureOperator, got a {type(operator).__name__}; use "
            "method='hutchinson'."
        )
    value, error, freedom = gauss_newton_trace(operator, probes, generator)
    if operator.kind == "gauss_newton":
        return TraceEstimate(value, error, math.nan, 0, freedom)
    rest = _hutchinson(operator.residual(), probes, generator)
    both = math.hypot(error, rest.standard_error)
    spread = error**4 / freedom + rest.standard_error**4 / rest.degrees_of_freedom
    return TraceEstimate(value + rest.value, both, math.nan, rest.products, both**4 / spread if spread else math.inf)


def _hutchinson(operator: SymmetricOperator, probes: int, generator: torch.Generator) -> TraceEstimate:
    values, squares = [], []
    # Memory for a few vectors at a time.
    for start in range(0, probes, 64):
        signs = _signs(operator, min(64, probes - start), generator)
        products = operator @ signs
        values.append((signs * products).sum(0).double().cpu())
        squares.append(products.square().sum(0).double().cpu())
    found = torch.cat(values)
    error = float(found.std()) / math.sqrt(probes)
    return TraceEstimate(float(found.mean()), error, float(torch.cat(squares).mean()), probes, probes - 1)


def _signs(operator: SymmetricOperator, count: int, generator: torch.Generator) -> Tensor:
    """Return random signs, ``[P, count]``, drawn vector by vector, so that more probes extend fewer ones."""
    drawn = torch.randint(2, (count, operator.size), generator=generator).T
    return (2 * drawn - 1).to(device=operator.device, dtype=wide(operator.device))


class _Wide:
    """An operator for curvlinops's estimators; their vectors are drawn on the CPU, so all devices use the same."""

    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, operator: SymmetricOperator) -> None:
        self.shape = operator.shape
        self._operator = operator

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self._operator @ vectors


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    r"""A spectral density by stochastic Lanczos quadrature, made by :func:`spectral_density`.

    It is the mixture :math:`\rho(x) = \frac1R \sum_r \sum_i \tau_{ri}\, N(x; \theta_{ri}, \sigma^2)`, with integral 1:
    that of all eigenvalues, each made a Gaussian of width :math:`\sigma`, but for the noise of R random vectors.
    Details finer than :math:`\sigma` are not in it: compare it with other spectra at the same width.

    Attributes:
        nodes: Nodes :math:`\theta`. Shape ``[R, m]``, float64.
        weights: Weights :math:`\tau`, with sum 1 for each r. Shape ``[R, m]``, float64.
        size: Number of eigenvalues.
        width: Standard deviation :math:`\sigma` of the smoothing, in units of eigenvalues.
        products: Number of products with vectors.
    """

    nodes: Tensor
    weights: Tensor
    size: int
    width: float
    products: int

    @property
    def low(self) -> float:
        """The smallest node: at least the smallest eigenvalue, and near it."""
        return float(self.nodes.min())

    @property
    def high(self) -> float:
        """The largest node: at most the largest eigenvalue, and near it."""
        return float(self.nodes.max())

    def grid(self, points: int = 1024) -> Tensor:
        """Return points over all of the density, five widths beyond the nodes. Shape ``[points]``, float64."""
        check_integers(2, points=points)
        return torch.linspace(self.low - 5 * self.width, self.high + 5 * self.width, points, dtype=torch.float64)

    def at(self, points: Tensor, width: float | None = None) -> Tensor:
        """Return the density at some points.

        Args:
            points: Eigenvalues. Shape ``[n]``.
            width: Another width of the smoothing. > 0.

        Returns:
            Shape ``[n]``, float64, in units of one over eigenvalues.
        """
        return smoothed(self.nodes.flatten(), points, self._width(width), self.weights.flatten() / len(self.nodes))

    def _width(self, width: float | None) -> float:
        check_numbers("> 0", optional=True, width=width)
        return self.width if width is None else width


def smoothed(values: Tensor, points: Tensor, width: float, weights: Tensor | None = None) -> Tensor:
    """Return the density of values, each smoothed by a Gaussian.

    Args:
        values: Eigenvalues or nodes. Shape ``[n]``.
        points: Where. Shape ``[g]``.
        width: Standard deviation of the Gaussians, > 0.
        weights: Weight of each value, with sum 1; default equal. Shape ``[n]``.

    Returns:
        Shape ``[g]``, float64, on the CPU.
    """
    check_numbers("> 0", width=width)
    if values.ndim != 1 or not len(values) or not (is_finite(values) and is_finite(points)):
        raise ValueError(f"values and points must be finite and values a vector, got shape {list(values.shape)}.")
    values, points = values.detach().double().cpu(), points.detach().double().cpu()
    weights = torch.full_like(values, 1 / len(values)) if weights is None else weights.double().cpu()
    density = torch.zeros_like(points)
    for some, own in zip(torch.split(values, 512), torch.split(weights, 512), strict=True):
        gaussians = torch.exp(-0.5 * ((points - some[:, None]) / width) ** 2)
        density += own @ gaussians
    return density / (width * math.sqrt(2 * math.pi))


def spectral_density(
    operator: SymmetricOperator,
    steps: int = 64,
    probes: int = 4,
    *,
    width: float | None = None,
    generator: torch.Generator | None = None,
) -> SpectralDensity:
    r"""Estimate the density of eigenvalues by stochastic Lanczos quadrature (docs/theory/spectra.md, 4).

    From each of ``probes`` random Gaussian vectors ``steps`` steps of :func:`~lightning_sym.curvature.lanczos` give
    nodes and weights, all vectors together in every product.

    Args:
        operator: The matrix H; of one that acts on a subspace, the density of eigenvalues of the restriction.
        steps: Number m of products per vector; of more than there are eigenvalues, which the rule for the width counts,
            so many are made. More steps resolve finer detail.
        probes: Number R of random vectors. More of them lower the noise. >= 1.
        width: Standard deviation of the smoothing, in units of eigenvalues, > 0; default
            :math:`\frac{1.1\,(\theta_{max} - \theta_{min})}{(m - 1) \sqrt{8 \ln 3}}`, the rule of Papyan (2020): the
            resolution of m steps.
        generator: Generator of the vectors, on the CPU; use one in the same state on each rank.

    Returns:
        The density, with its nodes and weights.

    Raises:
        ValueError: If an argument is out of range, or there are no eigenvalues.

    References:
        Ghorbani, Krishnan, Xiao (2019), arXiv:1901.10159; Papyan (2020), JMLR 21, without reorthogonalisation.

    Example:
        >>> from lightning_sym.curvature.operators import MatrixOperator
        >>> density = spectral_density(MatrixOperator(torch.diag(torch.arange(100.0))), 20, 8)
        >>> x = density.grid()
        >>> round(float(torch.trapezoid(density.at(x), x)), 4)
        1.0
    """
    check_integers(steps=steps, probes=probes)
    check_numbers("> 0", optional=True, width=width)
    if not operator.dimension:
        raise ValueError("the matrix acts on a subspace of dimension 0, so that there are no eigenvalues.")
    generator = seeded_generator("density") if generator is None else generator
    draw = partial(torch.randn, operator.size, dtype=torch.float64, generator=generator)
    starts = torch.stack([draw() for _ in range(probes)], 1)
    found: Quadrature = lanczos(operator, starts, min(steps, operator.dimension))
    if width is None:
        span = 1.1 * float(found.nodes.max() - found.nodes.min())
        width = span / (max(steps - 1, 1) * math.sqrt(8 * math.log(_KAPPA)))
        largest = float(found.nodes.abs().max())
        if not width > ROUNDING * largest:  # a multiple of the identity
            width = 1e-3 * (largest or 1.0)
    return SpectralDensity(found.nodes, found.weights, operator.dimension, width, found.products)


@dataclass(frozen=True)
class NearZero:
    """Counts of eigenvalues near zero, for many tolerances.

    Attributes:
        size: Number of eigenvalues.
        largest: The largest magnitude.
        relative: By tolerance, how many magnitudes are at most it times the largest; all, if that is 0.
        absolute: By tolerance, how many magnitudes are below it.
        negative: How many eigenvalues are below minus rounding (``1e-12`` of the largest magnitude).
        gap: Decades between the two neighbouring magnitudes that are furthest apart, of those above rounding and the
            first one in it; 0 if there are no two.
        below_gap: How many magnitudes are below this gap.
    """

    size: int
    largest: float
    relative: dict[float, int]
    absolute: dict[float, int]
    negative: int
    gap: float
    below_gap: int


def near_zero(eigenvalues: Tensor, tolerances: Sequence[float] = TOLERANCES) -> NearZero:
    """Count eigenvalues near zero over tolerances, relative and absolute, and look for the largest gap.

    Relative counts change when the largest eigenvalue does, so compare two networks by absolute ones as well.

    Args:
        eigenvalues: All eigenvalues. Shape ``[P]``.
        tolerances: In (0, 1).

    Returns:
        The counts.

    Raises:
        ValueError: If there is no eigenvalue, one is not finite, or a tolerance is out of range.

    Example:
        >>> found = near_zero(torch.tensor([6.0, 10.0, 1e-14]))
        >>> found.relative[1e-6], found.below_gap, round(found.gap)
        (1, 1, 12)
    """
    values = eigenvalues.detach().double().cpu().flatten()
    if not len(values) or not values.isfinite().all():
        raise ValueError("eigenvalues must be finite, at least one.")
    for tolerance in tolerances:
        check_numbers("in (0, 1)", tolerance=tolerance)
    sizes = values.abs().sort(descending=True).values
    largest = float(sizes[0])
    rounding = ROUNDING * largest
    # Gaps among numbers below rounding mean nothing.
    logs = sizes.clamp(min=rounding or 1.0).log10()
    steps = logs[:-1] - logs[1:]
    place = int(steps.argmax()) if len(steps) else 0
    gap = float(steps[place]) if len(steps) else 0.0
    return NearZero(
        size=len(values),
        largest=largest,
        relative={t: int((sizes <= t * largest).sum()) for t in tolerances},
        absolute={t: int((sizes < t).sum()) for t in tolerances},
        negative=int((values < -rounding).sum()),
        gap=gap,
        below_gap=len(values) - place - 1 if gap > 0 else 0,
    )


def gauss_newton_trace(
    operator: CurvatureOperator, passes: int, generator: torch.Generator
) -> tuple[float, float, float]:
    r"""Estimate the trace of the Gauss-Newton matrix of an operator's network, data and loss, with its standard error.

    .. math::
        \mathrm{tr}\, G = \frac1N \sum_n \sum_k \pm \| J_n^\top s_{nk} \|^2
        = E\, \frac1N \sum_n \pm \Big\| J_n^\top \sum_k z_{nk} s_{nk} \Big\|^2,
        \qquad \nabla^2_f \ell_n = \sum_k \pm s_{nk} s_{nk}^\top,

    with random signs z. Only products between outputs of one sample are noise, and that averages out over
    the samples. With a random z for the weights, all products between samples are noise as well
    (docs/theory/spectra.md, 3).

    Args:
        operator: An operator of either kind. To be called on every process together.
        passes: How often the gradients of all samples are taken. >= 2.
        generator: Generator of the signs, on the CPU, in the same state on each rank; each draws others.

    Returns:
        Estimate, standard error and its degrees of freedom, by Welch and Satterthwaite.

    Raises:
        ValueError: If the network mixes samples, or ``torch.func`` cannot take the gradient of one sample.
    """
    drawn = int(torch.randint(2**62, (), generator=generator))
    own = torch.Generator().manual_seed(derive_seed("samples", drawn, rank()))
    # Sums over the samples of this process: of means over passes, of their variances, of the squares of these.
    sums = torch.zeros(3, dtype=wide(operator.device), device=operator.device)

    def add() -> None:
        for x, y in operator.batches():
            values = torch.stack([_squares(operator, x, y, own) for _ in range(passes)])
            spread = values.var(0) / passes
            sums.add_(torch.stack([values.mean(0).sum(), spread.sum(), spread.square().sum()]))

    together(add)
    total = summed(sums)
    freedom = (passes - 1) * float(total[1]) ** 2 / float(total[2]) if total[2] > 0 else math.inf
    return float(total[0]) / operator.samples, math.sqrt(float(total[1])) / operator.samples, freedom


def _squares(operator: CurvatureOperator, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Return each sample's part of the trace, with random signs. Shape ``[N]``."""
    network, loss = operator.network, operator.loss
    weights = {name: network.get_parameter(name).detach() for name in operator.names}

    def squared(one: Tensor, direction: Tensor) -> Tensor:
        def along(own: dict[str, Tensor]) -> Tensor:
            outputs: Tensor = functional_call(network, own, (one[None],))[0]
            return (outputs * direction).sum()

        slopes = grad(along)(weights)
        return torch.stack([slope.square().sum() for slope in slopes.values()]).sum()

    def compared(one: Tensor, target: Tensor) -> Tensor:
        return loss(one[None], target[None])

    with torch.no_grad():
        outputs = network(x)
        alone = network(x[:1])
    if not torch.allclose(alone, outputs[:1], rtol=1e-3, atol=1e-5 * float(outputs.abs().max())):
        raise ValueError("the network mixes the samples of a batch, so that none has gradients; use another method.")
    try:
        second = vmap(jacrev(grad(compared)))(outputs, y)
        values, axes = torch.linalg.eigh(second.reshape(len(x), outputs[0].numel(), -1).to(wide(x.device)))
        signs = 2 * torch.randint(2, values.shape, generator=generator).to(values) - 1
        found = torch.zeros(len(x), dtype=values.dtype, device=values.device)
        for sign in (1.0, -1.0):
            # Where the loss curves down, as some losses do, its part counts as negative.
            sizes = torch.where(sign * values > _ROUNDING * values.abs().max(), values.abs(), 0.0).sqrt()
            if bool(sizes.any()):
                sides = (axes @ (sizes * signs)[:, :, None])[:, :, 0].reshape(outputs.shape).to(outputs)
                chunk = max(1, _AT_ONCE // operator.size)
                with PlainDistances():
                    found += sign * vmap(squared, chunk_size=chunk)(x, sides)
    except RuntimeError as error:
        reason = str(error).split(". ")[0].splitlines()[0]
        raise ValueError(
            f"torch.func cannot take the gradients of single samples ({reason}); use method='hutchinson'."
        ) from error
    return found
