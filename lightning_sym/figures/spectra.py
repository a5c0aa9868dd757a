"""Figures of spectra: densities of eigenvalues, and sharpness as it is and with the symmetry divided out."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lightning_sym.figures import _panels as shared

_PLACES = {
    "raw": ("as it is", shared.ORANGE),
    "balanced": ("balanced", shared.SKY),
    "modulo_symmetry": ("modulo symmetry", shared.BLUE),
}


@shared.readable
def spectral_densities(
    x: ArrayLike, densities: Mapping[str, ArrayLike], *, width: float, size: int, title: str = ""
) -> Figure:
    """Draw densities of eigenvalues on a logarithmic scale, all smoothed with the same width.

    Args:
        x: Eigenvalues. Shape ``[g]``.
        densities: By name, for example of the member. Shape ``[g]`` each.
        width: Standard deviation of the smoothing, which is written below.
        size: Number of eigenvalues: below ``1 / size`` within one width there is less than one of them.
        title: Above.

    Returns:
        The figure.

    Raises:
        ValueError: If there is no density.
    """
    shared.check_some(densities=densities)
    figure, (axes,) = shared.panels(6.4, 4.2, title=title)
    places = np.asarray(x, dtype=float)
    single = 1 / (size * width * np.sqrt(2 * np.pi))  # the peak of one eigenvalue
    for name, density in densities.items():
        axes.plot(places, np.maximum(np.asarray(density, dtype=float), 1e-3 * single), lw=1.2, label=name)
    axes.axhline(single, color=shared.INK, lw=0.8, ls=":", label="one eigenvalue")
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-2 * single)
    axes.set(xlabel=f"eigenvalue (smoothed with a Gaussian of width {width:.2g})", ylabel="density")
    axes.legend(frameon=False, fontsize=8)
    return figure


@shared.readable
def sharpness_bars(
    members: Sequence[str], measures: Mapping[str, Mapping[str, ArrayLike]], *, title: str = ""
) -> Figure:
    """Draw, for each measure, the sharpness of all members as they are, balanced, and modulo symmetry.

    Args:
        members: Names of the members.
        measures: By measure: ``"raw"``, ``"balanced"`` and ``"modulo_symmetry"``, a number per member each.
        title: Above all.

    Returns:
        The figure, one panel per measure.

    Raises:
        ValueError: If there is no member or no measure.
    """
    shared.check_some(members=members, measures=measures)
    figure, panels = shared.panels(6, 1 + 2.4 * len(measures), len(measures), 1, title=title)
    at = np.arange(len(members))
    for axes, (measure, places) in zip(panels, measures.items(), strict=True):
        for index, (place, (label, color)) in enumerate(_PLACES.items()):
            axes.bar(at + 0.27 * (index - 1), np.asarray(places[place], dtype=float), 0.27, color=color, label=label)
        axes.set_xticks(at, members)
        axes.set(xlabel="member", title=measure.replace("_", " "))
    shared.legend_beside(figure, panels[0].get_legend_handles_labels()[0], "lower center", columns=3)
    return figure


@shared.readable
def sharpness_curves(
    epochs: Sequence[float],
    *,
    loss: ArrayLike,
    top_eigenvalue: ArrayLike,
    along_step: ArrayLike,
    trace: ArrayLike,
    trace_error: ArrayLike,
    title: str = "",
) -> Figure:
    """Draw how sharp a loss is over training: largest eigenvalue and curvature along the step, trace, loss.

    Lines are means over members, shades reach from the lowest to the highest member, bars are one standard error of the
    mean trace; NaN is left out.

    Args:
        epochs: How many epochs had been trained at each point. Length ``T``.
        loss: In its own unit. Shape ``[T, M]`` for ``M`` members, like all that follows.
        top_eigenvalue: In units of the loss per squared unit of parameters, like the next three.
        along_step: Second derivative in the direction of the step just taken.
        trace: Estimate of the sum of eigenvalues.
        trace_error: Its standard error.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there is no point.
    """
    shared.check_some(epochs=epochs)
    figure, (top, middle, right) = shared.panels(6.4, 9, 3, 1, title=title)
    places = np.asarray(epochs, dtype=float)
    values, errors = (np.asarray(each, dtype=float) for each in (trace, trace_error))
    shared.band(top, places, np.asarray(top_eigenvalue, dtype=float), color=shared.BLUE, lw=1.8, label="largest")
    along = np.asarray(along_step, dtype=float)
    shared.band(top, places, along, color=shared.VERMILION, lw=1.8, ls="--", label="along the step")
    shared.band(middle, places, values, color=shared.BLUE, lw=1.8)
    known = np.isfinite(values)
    count = known.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(known, values, 0).sum(1) / count
        bars = np.sqrt(np.where(known, errors, 0) ** 2 @ np.ones(values.shape[1])) / count
    middle.errorbar(places, means, bars, fmt="none", ecolor=shared.INK, capsize=3, lw=1)
    losses = np.asarray(loss, dtype=float)
    shared.band(right, places, losses, color=shared.BLUE, lw=1.8)
    if (known_losses := losses[np.isfinite(losses)]).size and known_losses.min() > 0:
        right.set_yscale("log")
    for axes, heading, label in (
        (top, "Eigenvalue", "second derivative of the loss"),
        (middle, "Trace", "sum of eigenvalues, ± standard error"),
        (right, "Training loss", "in eval mode, without regularisers"),
    ):
        shared.over_epochs(axes, label)
        axes.set_title(heading, fontsize=11)
        axes.margins(x=0.02)
    shared.legend_of_some(top)
    return figure
