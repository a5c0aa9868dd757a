"""Curvature of the loss and sensitivity of the function at points of a curve in weight space."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_batches, check_integers, check_numbers, check_pair
from lightning_sym._distributed import device_of, gathered, wide
from lightning_sym._random import generator
from lightning_sym.connectivity.curves import Curve, curve_coefficients
from lightning_sym.connectivity.interpolation import Loss
from lightning_sym.curvature.blocks import EmptyLoaderError
from lightning_sym.curvature.jacobians import JacobianRank, input_jacobians, jacobian_rank
from lightning_sym.curvature.krylov import NotConvergedError, top_eigenpairs
from lightning_sym.curvature.operators import CurvatureOperator, batches_of, directional_curvature
from lightning_sym.curvature.spectra import NearZero, SpectralDensity, near_zero, spectral_density, trace
from lightning_sym.networks.batch_norm import batch_norms, recalibrate_batch_norm
from lightning_sym.networks.modes import in_precision
from lightning_sym.similarity.cka import Alignment, alignments
from lightning_sym.symmetry import Symmetry
from lightning_sym.symmetry.tracing.graph.capture import copied

DIRECTIONS = ("straight", "detour", "tangent", "random")
# Steps of central differences. The smaller ones fit between kinks of piecewise linear networks.
STEPS = (1e-5, 1e-6, 1e-7, 1e-8)
# Upper bound of the deviations for a smooth network.
TOLERANCE = 1e-6
# Ridge of the probes, relative to the mean squared norm of their training features.
_RIDGE = 1e-2


class Identity(NamedTuple):
    """Deviation from an exact identity, measured by central differences.

    Attributes:
        deviation: Difference of both sides, relative to their size.
        step: The step in t with the smallest deviation.
    """

    deviation: float
    step: float

    @property
    def holds(self) -> bool:
        """Whether the identity holds to 1e-6."""
        return self.deviation <= TOLERANCE


@dataclass(frozen=True, eq=False)
class PointSpectrum:
    """Eigenvalues of the Hessian at one point.

    Attributes:
        eigenvalues: The largest ones, in descending order; empty if not found, see :attr:`note`.
        trace: Sum of all eigenvalues.
        trace_error: Standard error of the trace; 0 if all eigenvalues were computed.
        near_zero: Counts of small eigenvalues; None if not all were computed.
        density: Spectral density by Lanczos's method; None if all were computed, or it was not requested.
        note: Reason for missing eigenvalues; empty if there are some.
    """

    eigenvalues: tuple[float, ...]
    trace: float
    trace_error: float
    near_zero: NearZero | None = None
    density: SpectralDensity | None = None
    note: str = ""


@dataclass(frozen=True, eq=False)
class PointGeometry:
    r"""Loss and function around one point of a curve; docs/theory/curves.md, 4.

    Attributes:
        t: Curve parameter of the point, in [0, 1].
        loss: Mean loss at the point.
        gradient_norm: :math:`\|g\|` of the gradient by all trainable parameters.
        speed: :math:`\|\gamma'(t)\|`.
        directions: By direction :math:`\|H d\|` and :math:`d^\top H d` for d of length 1; zero or undefined directions
            are left out.
        spectrum: Eigenvalues of H and their statistics.
        gradient_identity: :math:`H \gamma' = \frac{d}{dt} g(\gamma(t))`.
        curvature_identity: :math:`\frac{d^2}{dt^2} L(\gamma(t)) = \gamma'^\top H \gamma' + g^\top \gamma''`.
        jacobian: Rank of the Jacobian of the outputs by the parameters.
    """

    t: float
    loss: float
    gradient_norm: float
    speed: float
    directions: dict[str, tuple[float, float]]
    spectrum: PointSpectrum
    gradient_identity: Identity
    curvature_identity: Identity
    jacobian: JacobianRank

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons for missing results."""
        return tuple(note for note in (self.spectrum.note, self.jacobian.note) if note)


@dataclass(frozen=True, eq=False)
class CurveShape:
    """Results of :func:`curve_geometry`.

    Attributes:
        points: The points, in the order of t.
        cosine: Mean cosine between the input Jacobians at two points, over samples with nonzero Jacobians. Shape
            ``[T, T]``, float64, on the CPU.
        cka: Linear CKA between these Jacobians, as features of the samples; NaN if one is the same for all samples,
            or for fewer than 4 samples. Shape ``[T, T]``, float64, on the CPU.
        samples: Number of samples of the loss.
        orbit_dimension: Dimension of the symmetry group; None if no symmetry was given.
        recalibrated: Whether batch norm statistics were recomputed at every point.
    """

    points: tuple[PointGeometry, ...]
    cosine: Tensor
    cka: Tensor
    probe: Tensor
    samples: int
    orbit_dimension: int | None
    recalibrated: bool

    @property
    def worst_deviation(self) -> float:
        """The largest deviation of the two identities, over all points."""
        return max(d for p in self.points for d in (p.gradient_identity.deviation, p.curvature_identity.deviation))


@torch.no_grad()
def curve_geometry(
    curve: Curve,
    network: nn.Module,
    data: Any,
    loss: Loss | None = None,
    *,
    points: int = 5,
    inputs: Tensor | None = None,
    labels: Tensor | None = None,
    symmetry: Symmetry | None = None,
    eigenvalues: int = 1,
    tolerance: float = 1e-3,
    probes: int = 16,
    density_steps: int = 0,
    max_parameters: int = 4000,
    max_bytes: int = 2**30,
    progress: Callable[[int, int], None] | None = None,
) -> CurveShape:
    r"""Compute Hessian, gradient and Jacobians at points of a curve (docs/theory/curves.md, 4).

    All results are computed in double precision, in copies of the network in eval mode. Directions have length 1:
    ``straight`` (from the start to the end of the curve), ``detour`` (from the linear path to the control point
    furthest from it, perpendicular to the path), ``tangent`` and ``random`` (the same at all points). At every point,
    central differences of gradients check the two identities between Hessian and curve. Gradients jump at the kinks of
    piecewise linear activations, and a difference must not cross a kink: steps decrease from 1e-5 until an identity
    holds, and the smallest deviation is returned.

    Batch norm statistics are recomputed exactly at every point, over all data. Hessian and identities treat them as
    constants.

    Args:
        curve: The curve.
        network: A network of the architecture, with any weights. Not changed. Its device is used.
        data: As for :class:`lightning_sym.curvature.CurvatureOperator`: batches in a fixed order, this process's share.
        loss: Mean over the samples of a batch; None: the cross-entropy.
        points: Number of points, equally spaced in t, endpoints included. >= 2.
        inputs: Inputs for Jacobians, shape ``[N, ...]``; identical on all processes. None: the
            first 64 samples of the first process.
        labels: Classes of ``inputs``, shape ``[N]``, integers, for the probes. None: no probes, or, if ``inputs`` is
            None, those of the data, if they are classes.
        symmetry: The symmetry of the network, for ``orbit_dimension``.
        eigenvalues: Number of largest eigenvalues to compute. >= 1.
        tolerance: Their residual, relative to the largest. In (0, 1).
        probes: Number of random vectors for the trace. >= 2.
        density_steps: Lanczos steps for the density of eigenvalues, from 4 random vectors; 0 for no density.
        max_parameters: Networks of at most this size have their whole Hessian decomposed: eigenvalues and trace are
            then exact, and small eigenvalues are counted. >= 0.
        max_bytes: Most memory for the Jacobian by the parameters, in bytes. >= 1.
        progress: Called with the number of points done and of all.

    Returns:
        Results at each point, and the similarity of input Jacobians between points.

    Raises:
        ValueError: If an argument is out of range, or the curve does not match the network.
        NonFiniteError: If a weight or a product is not finite.

    Note:
        Call it on every process together. A decomposed Hessian costs P products with vectors and ``O(P^3)`` time
        per point; otherwise about ``30 + probes + 4 density_steps`` products, each of about four gradients.
        Memory holds at least 60 vectors of P numbers of 8 bytes, and ``4 density_steps`` for the density.

    References:
        The directions are those of a post on the Rashomon manifold (2022), which does not contain the identities.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
        >>> data = torch.randn(20, 2), torch.randint(2, (20,))
        >>> shape = curve_geometry(Curve(torch.randn(3, 17)), network, data)
        >>> shape.worst_deviation < 1e-6
        True
    """
    check_integers(2, points=points, probes=probes)
    check_integers(eigenvalues=eigenvalues, max_bytes=max_bytes)
    check_integers(0, density_steps=density_steps, max_parameters=max_parameters)
    check_numbers("in (0, 1)", tolerance=tolerance)
    device = device_of(network)
    dtype = wide(device)
    scratch = in_precision(copied(network), dtype).eval()
    exact = Curve(curve.points.detach().to(device, dtype), curve.kind)
    place = exact.writer(scratch)
    norms = batch_norms(scratch)
    data = batches_of(data)
    chosen, classes = _first(data, 64) if inputs is None else (inputs.to(dtype), labels)
    if labels is not None and inputs is None:
        raise ValueError("labels need the inputs that they belong to; pass both, or neither.")
    classes = _classes(classes, len(chosen), given=labels is not None)
    fixed, criterion = _fixed_directions(exact), F.cross_entropy if loss is None else loss
    found, jacobians, samples = [], [], 0
    for index, t in enumerate(torch.linspace(0, 1, points, dtype=torch.float64).tolist()):
        place(t)
        if norms:
            recalibrate_batch_norm(scratch, _Widened(data, dtype), exact=True)
        operator = CurvatureOperator(scratch, data, criterion)
        samples = operator.samples
        gradient, value = operator.gradient_and_loss()
        tangent = exact.tangent(t)
        own = {**fixed, "tangent": tangent}
        along = directional_curvature(operator, {d: own[d] for d in DIRECTIONS if d in own and bool(own[d].any())})
        speed = float(tangent.norm())
        scale = speed * max(norm for norm, _ in along.values())
        identities = _identities(exact, t, operator, gradient, scale, _Gradients(scratch, operator, criterion))
        place(t)
        spectrum = _spectrum(operator, eigenvalues, tolerance, probes, density_steps, max_parameters)
        jacobian = jacobian_rank(scratch, chosen, max_bytes=max_bytes)
        jacobians.append(input_jacobians(scratch, chosen).double().cpu())
        found.append(PointGeometry(t, value, float(gradient.norm()), speed, along, spectrum, *identities, jacobian))
        if progress is not None:
            progress(index + 1, points)
    return CurveShape(
        tuple(found),
        _cosines(jacobians),
        _alignments(jacobians),
        _probes(jacobians, classes),
        samples,
        None if symmetry is None else symmetry.dimension,
        bool(norms),
    )


# ---- directions and identities


def _fixed_directions(curve: Curve) -> dict[str, Tensor]:
    """Return the directions shared by all points."""
    drawn = torch.randn(curve.points.shape[1], generator=generator("direction in weight space"), dtype=torch.float64)
    found = {"straight": curve.points[-1] - curve.points[0], "random": drawn.to(curve.points)}
    with suppress(ValueError):  # a linear path has none
        found["detour"] = curve.plane().basis[:, 1].to(curve.points)
    return found


def _identities(
    curve: Curve,
    t: float,
    operator: CurvatureOperator,
    gradient: Tensor,
    scale: float,
    gradient_near: Callable[..., Tensor],
) -> tuple[Identity, Identity]:
    """Measure the deviation from both identities.

    Args:
        curve: The curve.
        t: Curve parameter of the point.
        operator: The Hessian at the point.
        gradient: The gradient at the point.
        scale: Norm of products with vectors of the tangent's length; values below 1e-9 of it are rounding.
        gradient_near: Returns the gradient at a nearby point.
    """
    tangent = curve.tangent(t)
    product = operator @ tangent
    parts = torch.stack([tangent @ product, gradient @ curve.second_derivative(t)])
    sizes = (
        max(float(product.norm()), 1e-9 * scale),
        max(float(parts.abs().sum()), 1e-9 * scale * float(tangent.norm())),
    )
    best = [Identity(math.inf, STEPS[0])] * 2
    for step in STEPS:
        ends = [_extended(curve, t, offset) for offset in (-step, step)]
        gradients = [gradient_near(point) for point, _ in ends]
        slopes = [own @ along for own, (_, along) in zip(gradients, ends, strict=True)]
        differences = (
            float(((gradients[1] - gradients[0]) / (2 * step) - product).norm()),
            float(((slopes[1] - slopes[0]) / (2 * step) - parts.sum()).abs()),
        )
        for number, (difference, size) in enumerate(zip(differences, sizes, strict=True)):
            deviation = difference / size if size > 0 else difference
            best[number] = min(best[number], Identity(deviation, step))
        if all(identity.holds for identity in best):
            break
    return best[0], best[1]


def _extended(curve: Curve, t: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return point and tangent of the local polynomial, continued beyond the segment of a chain."""
    if curve.kind == "chain" or curve.bends == 0:
        tangent = curve.tangent(t)
        return curve(t) + offset * tangent, tangent
    at = torch.tensor(t + offset, dtype=torch.float64)
    steps = curve.points.diff(dim=0)
    point = curve_coefficients("bezier", len(curve.points), at).to(curve.points) @ curve.points
    return point, len(steps) * (curve_coefficients("bezier", len(steps), at).to(steps) @ steps)


class _Gradients:
    """Gradients at nearby points, with the batch norm statistics of one point."""

    def __init__(self, network: nn.Module, operator: CurvatureOperator, loss: Loss) -> None:
        self._network, self._operator, self._loss = network, operator, loss

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of the operator, without samples that the loss ignores."""
        yield from self._operator.batches()

    def __call__(self, point: Tensor) -> Tensor:
        Curve(torch.stack([point, point]), "chain").writer(self._network)(0)
        return CurvatureOperator(self._network, self, self._loss, check=False).gradient_and_loss()[0]


# ---- the spectrum


def _spectrum(
    operator: CurvatureOperator,
    count: int,
    tolerance: float,
    probes: int,
    density_steps: int,
    max_parameters: int,
) -> PointSpectrum:
    """Return all eigenvalues of a small network, else the largest ones and estimates."""
    if operator.size <= max_parameters:
        values = torch.linalg.eigvalsh(operator.matrix(max_parameters=max_parameters)).flip(0).double().cpu()
        return PointSpectrum(tuple(values[:count].tolist()), float(values.sum()), 0.0, near_zero(values))
    estimate = trace(operator, probes)
    density = spectral_density(operator, density_steps) if density_steps else None
    try:
        top, note = tuple(top_eigenpairs(operator, count, tolerance=tolerance).values.tolist()), ""
    except NotConvergedError as error:
        top, note = (), str(error)
    return PointSpectrum(top, estimate.value, estimate.standard_error, None, density, note)


# ---- Jacobians by the input


def _cosines(jacobians: Sequence[Tensor]) -> Tensor:
    """Return the mean cosine between the samples' Jacobians at two points. Shape ``[T, T]``."""
    rows = torch.stack([F.normalize(jacobian.flatten(1), dim=1) for jacobian in jacobians])
    there = rows.any(2).to(rows)  # a zero Jacobian has no direction
    return (torch.einsum("and,bnd->ab", rows, rows) / (there @ there.T)).clamp(-1, 1)  # by rounding beyond


def _alignments(jacobians: Sequence[Tensor]) -> Tensor:
    """Return the linear CKA between Jacobians at two points. Shape ``[T, T]``."""
    cka = Alignment("linear", "unbiased", "none", None)
    features = [jacobian.flatten(1)[:, :, None] for jacobian in jacobians]
    if len(features[0]) < cka.fewest:
        return torch.full((len(features), len(features)), math.nan, dtype=torch.float64)
    return alignments(*cka.criteria(features, features))


def _classes(targets: Tensor | None, count: int, *, given: bool) -> Tensor | None:
    """Return targets that are classes of samples; None for others unless they are ``given`` as classes."""
    if targets is not None and targets.shape == (count,) and not targets.is_floating_point():
        return targets
    if given:
        got = None if targets is None else f"{targets.dtype} {list(targets.shape)}"
        raise ValueError(f"labels must be the classes of the {count} inputs, integers of shape [{count}], got {got}.")
    return None


def _probes(jacobians: Sequence[Tensor], classes: Tensor | None) -> Tensor:
    """Return the accuracy of ridge regression from the Jacobians at one point to another. Shape ``[T, T]``.

    Each half of the samples is predicted by a fit to the other half.
    """
    count = len(jacobians)
    if classes is None or len(classes) < 4:
        return torch.full((count, count), math.nan, dtype=torch.float64)
    features = [jacobian.flatten(1) for jacobian in jacobians]
    kinds = torch.searchsorted(torch.tensor(sorted(set(classes.tolist()))), classes.cpu())
    targets = F.one_hot(kinds).double()
    right = torch.zeros(count, count, dtype=torch.float64)
    for first in (0, 1):
        train, test = slice(first, None, 2), slice(1 - first, None, 2)
        mean = targets[train].mean(0)
        for row, own in enumerate(features):
            centre = own[train].mean(0)
            centred = own[train] - centre
            gram = centred @ centred.T
            ridge = _RIDGE * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
            weights = centred.T @ torch.linalg.solve(
                gram + ridge * torch.eye(len(gram)).to(gram), targets[train] - mean
            )
            for column, other in enumerate(features):
                predicted = ((other[test] - centre) @ weights + mean).argmax(1)
                right[row, column] += (predicted == kinds[test]).sum()
    return right / len(classes)


# ---- data


def _first(data: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return the first inputs and targets of the first non-empty process, on every process."""
    found: list[tuple[Tensor, Tensor]] = []
    check_batches(data)
    for batch in data:
        check_pair(batch)
        found.append((batch[0], batch[1]))
        if sum(len(each) for each, _ in found) >= count:
            break
    own = [torch.cat(parts)[:count].cpu() for parts in zip(*found, strict=True)]
    shared = [(images, targets) for images, targets in (each for each in gathered(own) if each)]
    if not shared:
        raise EmptyLoaderError("data has no samples on any process; pass a training split with samples.")
    return shared[0]


class _Widened:
    """Batches with floating inputs in another precision."""

    def __init__(self, data: Any, dtype: torch.dtype) -> None:
        self._data, self._dtype = data, dtype

    def __iter__(self) -> Iterator[Tensor]:
        for images, *_ in self._data:
            yield images.to(self._dtype) if images.is_floating_point() else images
