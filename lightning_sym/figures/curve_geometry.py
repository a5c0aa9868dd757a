"""Figure of the geometry along a curve: curvature, spectrum, Jacobians, and whether both identities hold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lightning_sym.figures import _panels as shared

_COLORS = {
    "straight": shared.BLUE,
    "detour": shared.VERMILION,
    "tangent": shared.GREEN,
    "random": "#7f7f7f",
}
Curves = Mapping[str, ArrayLike]


@dataclass(frozen=True)
class GeometryLines:
    """What :func:`curve_geometry_panels` draws; each quantity has T values, NaN where there is none.

    Attributes:
        t: Places. Shape ``[T]``.
        loss: Mean losses, in nats for the cross-entropy.
        gradient_norm: Norms of the gradient.
        norms: By direction: norms of products with the Hessian.
        curvatures: By direction: second derivatives of the loss.
        eigenvalues: The largest ones. Shape ``[k, T]``.
        trace: Traces.
        trace_error: Their standard errors.
        counts: By what is counted: numbers of small eigenvalues; empty if there are no counts.
        density: By place: eigenvalues and their density; empty if there is none.
        ranks: By what it is: rank, nullity, dimension of the orbit.
        similarity: By measure: likeness of the Jacobians by the input to those at the start.
        deviations: By identity: how far it is from holding.
        tolerance: Deviations that smooth networks stay below.
    """

    t: ArrayLike
    loss: ArrayLike
    gradient_norm: ArrayLike
    norms: Curves
    curvatures: Curves
    eigenvalues: ArrayLike
    trace: ArrayLike
    trace_error: ArrayLike
    ranks: Curves
    similarity: Curves
    deviations: Curves
    tolerance: float
    counts: Curves = field(default_factory=dict)
    density: Mapping[float, tuple[ArrayLike, ArrayLike]] = field(default_factory=dict)


@shared.readable
def curve_geometry_panels(lines: GeometryLines, *, title: str = "") -> Figure:
    """Draw what was found at the points of a curve, in eight panels.

    Args:
        lines: What is drawn.
        title: Above all.

    Returns:
        The figure.
    """
    figure, axes = shared.panels(8, 13.5, 8, 2, title=title)
    t = np.asarray(lines.t, dtype=float)
    _lines(axes[0], t, {"loss": lines.loss, "norm of the gradient": lines.gradient_norm}, "loss and gradient")
    _lines(axes[1], t, lines.norms, r"$\|H d\|$ for $\|d\| = 1$", log=True)
    _lines(axes[2], t, lines.curvatures, r"$d^\top H d$ for $\|d\| = 1$")
    axes[2].axhline(0, color=shared.INK, lw=0.8)
    _spectrum(axes[3], t, lines)
    if lines.density:
        _density(axes[4], lines.density)
    else:
        _lines(axes[4], t, lines.counts, "eigenvalues near zero")
    _lines(axes[5], t, lines.ranks, "Jacobian by the weights", log=True)
    _lines(axes[6], t, lines.similarity, "Jacobian by the input, likeness to the start")
    axes[6].set_ylim(top=1.03)
    _lines(axes[7], t, lines.deviations, "identities: relative deviation", log=True)
    axes[7].axhline(lines.tolerance, color=shared.INK, lw=1, ls="--", label="tolerance")
    for panel in axes:
        shared.legend_above(panel)
    return figure


def _lines(axes: Axes, t: shared.Values, curves: Curves, title: str, *, log: bool = False) -> None:
    """Draw some lines with points; of a logarithmic axis what is not positive is left out."""
    palette = [shared.BLUE, shared.VERMILION, shared.GREEN, shared.PINK, shared.SKY, shared.ORANGE]
    anything = False
    for number, (name, given) in enumerate(curves.items()):
        values = np.asarray(given, dtype=float)
        values = np.where(values > 0, values, math.nan) if log else values
        anything |= bool(np.isfinite(values).any())
        axes.plot(t, values, "o-", ms=4, color=_COLORS.get(name, palette[number % len(palette)]), label=name)
    if not anything:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#7f7f7f")
    elif log:
        axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("place $t$ on the curve", fontsize=9)
    axes.grid(alpha=0.25)


def _spectrum(axes: Axes, t: shared.Values, lines: GeometryLines) -> None:
    values = np.atleast_2d(np.asarray(lines.eigenvalues, dtype=float))
    _lines(axes, t, {_eigenvalue(number): row for number, row in enumerate(values)}, "eigenvalues and trace")
    look: dict[str, Any] = {"fmt": "s--", "ms": 4, "capsize": 3, "color": "#7f7f7f"}
    axes.errorbar(
        t, np.asarray(lines.trace), yerr=np.asarray(lines.trace_error), label="trace ± standard error", **look
    )
    axes.set_ylim(bottom=0)


def _eigenvalue(number: int) -> str:
    return "largest eigenvalue" if number == 0 else f"eigenvalue {number + 1}"


def _density(axes: Axes, density: Mapping[float, tuple[ArrayLike, ArrayLike]]) -> None:
    colors = shared.line_colors(max(len(density), 5))
    highest = 0.0
    for color, (t, (places, values)) in zip(colors, density.items(), strict=False):
        heights = np.asarray(values, dtype=float)
        highest = max(highest, float(heights.max()))
        axes.semilogy(places, np.maximum(heights, 1e-300), color=color, label=f"t = {t:g}")
    axes.set_ylim(1e-6 * highest, 2 * highest)
    axes.set_title("density of eigenvalues, smoothed", fontsize=10)
    axes.set_xlabel("eigenvalue of the Hessian", fontsize=9)
    axes.grid(alpha=0.25)
