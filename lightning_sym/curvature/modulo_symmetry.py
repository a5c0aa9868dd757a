"""Sharpness of a network's loss, and its part that depends on the point of the orbit."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers
from lightning_sym._random import generator as seeded_generator
from lightning_sym.curvature.krylov import top_eigenpairs
from lightning_sym.curvature.operators import CurvatureOperator, Kind, Loss, SymmetricOperator
from lightning_sym.curvature.spectra import TraceEstimate, trace
from lightning_sym.symmetry import OrbitTangents, Symmetry, canonicalize, orbit_tangents
from lightning_sym.symmetry.proof import double_copy

MEASURES = ("top_eigenvalue", "trace", "norm")


class ComplementOperator(SymmetricOperator):
    r"""A matrix restricted to the directions orthogonal to an orbit: :math:`\Pi H \Pi`.

    Its eigenvalues are those of the restriction, ``P - rank`` of them; the zeros that :math:`\Pi H \Pi` has along the
    orbit are none of them.

    Args:
        operator: The matrix H, of all of the network's parameters.
        tangents: The orbit's tangents at the same network.

    Raises:
        ValueError: If the operator has other parameters than the tangents.
    """

    def __init__(self, operator: CurvatureOperator, tangents: OrbitTangents) -> None:
        super().__init__()
        if tuple(operator.names) != tangents.names:
            raise ValueError(
                "the operator must have all parameters of the network as variables, as the orbit moves them all; make "
                "it with parameters=[name for name, _ in network.named_parameters()]."
            )
        self.operator, self.tangents = operator, tangents
        self.size, self.dtype, self.device = operator.size, operator.dtype, operator.device

    @property
    def dimension(self) -> int:
        """Number of directions across the orbit, ``P - rank``."""
        return self.size - self.tangents.rank

    def inside(self, vectors: Tensor) -> Tensor:
        """Return the parts of vectors orthogonal to the orbit."""
        return self.tangents.across(vectors)

    def _times(self, vectors: Tensor) -> Tensor:
        return self.inside(self.operator @ self.inside(vectors))

    def matrix(self, *, max_parameters: int = 4000) -> Tensor:
        """Return the restriction in an orthonormal basis of the complement; as :meth:`CurvatureOperator.matrix`.

        Returns:
            Shape ``[P - rank, P - rank]``.
        """
        whole, basis = self.operator.matrix(max_parameters=max_parameters), self.tangents.complement()
        basis = basis.to(whole)
        return basis.T @ whole @ basis


@dataclass(frozen=True)
class Sharpness:
    """The sharpness of a loss, by three measures of one matrix.

    Attributes:
        top_eigenvalue: The largest eigenvalue.
        residual: Residual of its eigenvector: how far the eigenvalue may be off.
        trace: The sum of all eigenvalues, with its standard error.
        norm: The Frobenius norm, the root of the sum of squared eigenvalues, from the same products as the trace.
    """

    top_eigenvalue: float
    residual: float
    trace: TraceEstimate
    norm: float

    def value(self, measure: str) -> float:
        """Return one of ``MEASURES`` as a number."""
        found = getattr(self, measure)
        return found.value if isinstance(found, TraceEstimate) else float(found)


@dataclass(frozen=True)
class SharpnessModuloSymmetry:
    """Sharpness of one network, raw and with its symmetry divided out.

    Attributes:
        raw: Sharpness of the network itself.
        balanced: Sharpness of the canonical representative of its orbit.
        modulo: Sharpness of the representative in the directions orthogonal to the orbit; the same for all members.
        parameters: Number of parameters.
        orbit: Number of directions that were taken out.
        statistics: Number of one-parameter groups that move running statistics of batch norms: fixed by the canonical
            form, and not taken out.
        notes: Symmetries that the canonical form could not fix.
    """

    raw: Sharpness
    balanced: Sharpness
    modulo: Sharpness
    parameters: int
    orbit: int
    statistics: int
    notes: tuple[str, ...]

    def gauge_share(self, measure: str) -> float:
        """Return ``1 - modulo / raw`` for one of ``MEASURES``: which part goes when the symmetry is divided out.

        Negative where the network is flatter than the balanced member of its orbit; NaN where ``raw`` is 0.
        """
        raw = self.raw.value(measure)
        return 1 - self.modulo.value(measure) / raw if raw else math.nan

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row per measure: ``raw``, ``balanced``, ``modulo_symmetry``, ``gauge_share``."""
        for measure in MEASURES:
            places = {"raw": self.raw, "balanced": self.balanced, "modulo_symmetry": self.modulo}
            values = {name: place.value(measure) for name, place in places.items()}
            yield {"measure": measure, **values, "gauge_share": self.gauge_share(measure)}


def canonical_operator(
    symmetry: Symmetry, network: nn.Module, data: Any, loss: Loss, *, kind: Kind = "hessian", columns: int = 8
) -> tuple[CurvatureOperator, ComplementOperator, tuple[str, ...]]:
    """Return the matrix at the canonical member of a network's orbit, and the same across the orbit.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed; computed in float64, on its device.
        data: As for :class:`~lightning_sym.curvature.CurvatureOperator`.
        loss: As there.
        kind: As there.
        columns: As there.

    Returns:
        The matrix, its restriction, and the symmetries that the canonical form could not fix.

    Raises:
        ValueError: If the network has another structure than the traced one, or invertible matrices act on some units;
            or as for :class:`~lightning_sym.curvature.CurvatureOperator`.
    """
    form = canonicalize(symmetry, double_copy(network))
    tangents = orbit_tangents(symmetry, form.network)
    operator = _whole(form.network, data, loss, kind, columns)
    return operator, ComplementOperator(operator, tangents), form.notes


def sharpness_modulo_symmetry(
    symmetry: Symmetry,
    network: nn.Module,
    data: Any,
    loss: Loss,
    *,
    kind: Kind = "hessian",
    probes: int = 64,
    tolerance: float = 1e-6,
    columns: int = 8,
) -> SharpnessModuloSymmetry:
    r"""Measure how sharp a network's loss is, and how much of that is a matter of the member of its orbit.

    Rescaling a ReLU unit leaves the function alone and changes every eigenvalue of the Hessian. Here the matrix is
    taken at the canonical member of the orbit (balanced scales), and there in the directions orthogonal to the orbit,
    in the Euclidean metric of the parameters: numbers that all members of the orbit share (docs/theory/spectra.md,
    6.1). Batch norms use their running statistics, which are constants; regularisers outside ``loss`` do not count
    (6.3).

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed; computed in float64, on its device.
        data: As for :class:`~lightning_sym.curvature.CurvatureOperator`.
        loss: As there.
        kind: ``"hessian"`` or ``"gauss_newton"``.
        probes: Random vectors for traces and norms, the same for all three. >= 2.
        tolerance: Tolerance of the top eigenvalue, as for :func:`~lightning_sym.curvature.top_eigenpairs`.
        columns: As for :class:`~lightning_sym.curvature.CurvatureOperator`.

    Returns:
        The three sharpnesses.

    Raises:
        ValueError: As for :func:`canonical_operator`, or if an argument is out of range.
        NotConvergedError: If a top eigenvalue was not found.

    Example:
        >>> from lightning_sym.symmetry.trace import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> data = torch.randn(40, 5), torch.randint(3, (40,))
        >>> symmetry = trace_symmetry(network, data[0])
        >>> moved = symmetry.act(symmetry.sample(scale=1.0), network)
        >>> loss = nn.functional.cross_entropy
        >>> one, two = (sharpness_modulo_symmetry(symmetry, n, data, loss) for n in (network, moved))
        >>> abs(one.modulo.top_eigenvalue / two.modulo.top_eigenvalue - 1) < 1e-4  # the weights were moved in float32
        True
        >>> one.orbit
        8
    """
    check_integers(2, probes=probes)
    as_it_is = _whole(network, data, loss, kind, columns)
    balanced, modulo, notes = canonical_operator(symmetry, network, data, loss, kind=kind, columns=columns)
    return SharpnessModuloSymmetry(
        raw=_sharpness(as_it_is, probes, tolerance),
        balanced=_sharpness(balanced, probes, tolerance),
        modulo=_sharpness(modulo, probes, tolerance),
        parameters=balanced.size,
        orbit=modulo.tangents.rank,
        statistics=modulo.tangents.statistics,
        notes=notes,
    )


def _whole(network: nn.Module, data: Any, loss: Loss, kind: Kind, columns: int) -> CurvatureOperator:
    """Return the matrix of all parameters, trained or not, in float64."""
    names = [name for name, _ in network.named_parameters()]
    return CurvatureOperator(network, data, loss, kind=kind, parameters=names, dtype=torch.float64, columns=columns)


def _sharpness(operator: SymmetricOperator, probes: int, tolerance: float) -> Sharpness:
    pairs = top_eigenpairs(operator, tolerance=tolerance)
    found = trace(operator, probes, generator=seeded_generator("sharpness"))
    return Sharpness(float(pairs.values[0]), float(pairs.residuals[0]), found, math.sqrt(found.squared_norm))
