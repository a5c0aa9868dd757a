"""Figure of a walk inside a class of equivalent weights."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from lightning_sym.figures import _equivalence as shared
from lightning_sym.figures._panels import BLUE, GREEN, INK, SKY, VERMILION, panels, readable


@readable
def walk_curves(
    losses: ArrayLike,
    predictor_losses: ArrayLike,
    dimensions: ArrayLike,
    distances: ArrayLike,
    orbit_steps: ArrayLike,
    orbit_distances: ArrayLike,
    *,
    bound: bool = False,
    title: str = "",
) -> Figure:
    """Draw where a walk went: its distances, its J, and the dimension of the class along it.

    Args:
        losses: J at each point; 0 is drawn at the lower end. Shape ``[T + 1]``.
        predictor_losses: J after each step, before it was corrected. Shape ``[T]``.
        dimensions: Dimension of the class at each point. Shape ``[T + 1]``, integers.
        distances: In weight space to the beginning. Shape ``[T + 1]``.
        orbit_steps: At which points the distance to the orbit was measured. Shape ``[S]``, integers.
        orbit_distances: To the orbit of the beginning. Shape ``[S]``.
        bound: Whether these are upper bounds.
        title: Above the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If shapes do not fit.
    """
    after = shared.checked("losses", losses, [None])
    before = shared.checked("predictor_losses", predictor_losses, [len(after) - 1])
    degrees = shared.checked("dimensions", dimensions, [len(after)])
    plain = shared.checked("distances", distances, [len(after)])
    places = shared.checked("orbit_steps", orbit_steps, [None])
    orbit = shared.checked("orbit_distances", orbit_distances, [len(places)])
    figure, (left, middle, right) = panels(6.4, 9.6, 3, 1, title=title)
    steps = np.arange(len(after))
    left.plot(steps, plain, color=INK, lw=1.6, label="to the beginning")
    label = "to its orbit under the symmetry group" + (", at most" if bound else "")
    left.plot(places, orbit, color=VERMILION, lw=1.6, ls="--", label=label)
    left.set(title="Where the walk goes", ylabel="distance of weights")
    left.set_ylim(bottom=0, top=1.2 * max(float(plain.max(initial=0)), float(orbit.max(initial=0)), 1e-12))
    left.legend(fontsize=8, loc="upper left")
    lowest, label = 1e-34, "after a step along the tangent"
    middle.semilogy(steps[1:], np.maximum(before, lowest), color=SKY, lw=1, label=label)
    middle.semilogy(steps, np.maximum(after, lowest), color=BLUE, lw=1.2, label="after the correction")
    middle.set(title="J on the way", ylabel="J")
    middle.legend(fontsize=8)
    right.step(steps, degrees, where="mid", color=GREEN, lw=1.6)
    right.set(title="Dimension of the class there", ylabel="weights less rank of the Jacobian")
    right.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    right.set_ylim(degrees.min() - 0.6, degrees.max() + 0.6)
    for axes in (left, middle, right):
        axes.set_xlabel("step")
        axes.margins(x=0.01)
        axes.grid(alpha=0.25)
    return figure
