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
    figure, (axes,) = shared.panels(7.0, 4.2, title=title)
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
    figure, panels = shared.panels(3.4 * len(measures), 3.4, len(measures), title=title)
    at = np.arange(len(members))
    for axes, (measure, places) in zip(panels, measures.items(), strict=True):
        for index, (place, (label, color)) in enumerate(_PLACES.items()):
            axes.bar(at + 0.27 * (index - 1), np.asarray(places[place], dtype=float), 0.27, color=color, label=label)
        axes.set_xticks(at, members)
        axes.set(xlabel="member", title=measure.replace("_", " "))
    shared.legend_beside(figure, panels[0].get_legend_handles_labels()[0], "lower center")
    return figure
