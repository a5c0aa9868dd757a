"""Figures of learning coefficients: estimates beside what is known, over training, and the chains behind them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lightning_sym.figures import _panels as shared

_REFUSED = "#7f7f7f"


@dataclass(frozen=True)
class Coefficient:
    """A row of :func:`coefficient_rows`.

    Attributes:
        name: Beside the row.
        estimate: The estimate; NaN if it was refused.
        error: Its standard error.
        exact: What the chains must give at their temperature, step and localisation; NaN if that is not known.
        theory: The learning coefficient; NaN if that is not known.
        refused: Why there is no estimate, in a few words; empty if there is one.
    """

    name: str
    estimate: float
    error: float
    exact: float = np.nan
    theory: float = np.nan
    refused: str = ""


@shared.readable
def coefficient_rows(rows: Sequence[Coefficient], *, title: str = "") -> Figure:
    """Draw estimates with bars of two standard errors, beside exact values and learning coefficients.

    Args:
        rows: From top to bottom, at least one.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no rows.
    """
    shared.check_some(rows=rows)
    figure, (axes,) = shared.panels(6.6, 1.4 + 0.32 * len(rows), title=title)
    places = np.arange(len(rows))
    known = [value for row in rows for value in (row.estimate, row.exact, row.theory) if np.isfinite(value)]
    limit = 1.12 * max(known, default=1.0)
    for place, row in zip(places, rows, strict=True):
        if row.refused:
            axes.text(0.01 * limit, float(place), f"refused: {row.refused}", color=_REFUSED, va="center", fontsize=8)
    shown = [row for row in rows if not row.refused]
    where = [place for place, row in zip(places, rows, strict=True) if not row.refused]
    marks = (
        ("learning coefficient", [row.theory for row in shown], "D", shared.ORANGE, 6.5),
        ("exact for these chains", [row.exact for row in shown], "|", shared.BLACK, 13.0),
    )
    for label, values, marker, color, size in marks:
        if np.isfinite(values).any():
            axes.plot(values, where, ls="", marker=marker, ms=size, mfc="none", color=color, mew=1.6, label=label)
    axes.errorbar(
        [row.estimate for row in shown],
        where,
        xerr=[2 * row.error for row in shown],
        fmt="o",
        ms=4,
        color=shared.BLUE,
        capsize=3,
        label="estimate ± 2 standard errors",
        zorder=3,
    )
    axes.set_yticks(places, [row.name for row in rows], fontsize=8)
    axes.set(xlim=(0, limit), xlabel="learning coefficient", ylim=(len(rows) - 0.4, -0.6))
    axes.grid(axis="x", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


@shared.readable
def coefficient_curves(epochs: Sequence[float], values: ArrayLike, refused: ArrayLike, *, title: str = "") -> Figure:
    """Draw learning coefficients over training.

    Args:
        epochs: How many epochs had been trained. Length ``T``.
        values: Estimates; NaN where they were refused. Shape ``[T, M]`` for ``M`` networks.
        refused: How many of the networks were refused. Shape ``[T]``.
        title: Above all.

    Returns:
        The figure.
    """
    figure, (above, below) = shared.panels(6.5, 5.0, 2, 1, title=title, sharex=True, height_ratios=(3, 1))
    places = np.asarray(epochs, dtype=float)
    table = np.asarray(values, dtype=float)
    shared.band(above, places, table, color=shared.BLUE, lw=2.0, label="mean of those that are stationary")
    for column in table.T:
        above.plot(places, column, ls="", marker="o", ms=3.5, color=shared.BLUE, alpha=0.6)
    above.set_ylim(bottom=0)
    shared.over_epochs(above, "learning coefficient")
    below.bar(places, np.asarray(refused, dtype=float), width=0.6 * _spacing(places), color=_REFUSED)
    below.set_ylim(0, max(1, table.shape[1]))
    shared.over_epochs(below, "refused")
    return figure


def _spacing(places: ArrayLike) -> float:
    gaps = np.diff(np.asarray(places, dtype=float))
    return float(gaps.min()) if len(gaps) else 1.0


@dataclass(frozen=True)
class ChainTraces:
    """A panel of :func:`chain_traces`.

    Attributes:
        title: Above it.
        steps: Length ``T``.
        traces: nb (L - reference) of some chains, NaN where there is none. Shape ``[T, C]``.
        mean: The same, mean over all chains. Length ``T``.
        expected: What the mean must become; NaN if that is not known.
        burn_in: Step before which nothing is averaged.
        refused: Whether there is no estimate.
    """

    title: str
    steps: Sequence[float]
    traces: ArrayLike
    mean: ArrayLike
    expected: float = np.nan
    burn_in: float = 0.0
    refused: bool = False
    columns: int = field(default=2, repr=False)


@shared.readable
def chain_traces(panels: Sequence[ChainTraces], *, title: str = "") -> Figure:
    """Draw the chains behind estimates: some of them, the mean of all, and what is not averaged.

    Args:
        panels: At least one.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no panels.
    """
    shared.check_some(panels=panels)
    columns = min(panels[0].columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, places = shared.panels(1.0 + 3.0 * columns, 1.0 + 2.1 * rows, len(panels), columns, title=title)
    for axes, panel in zip(places, panels, strict=True):
        steps, traces = np.asarray(panel.steps, dtype=float), np.asarray(panel.traces, dtype=float)
        axes.plot(steps, traces, color=shared.SKY, lw=0.5, alpha=0.7)
        color = _REFUSED if panel.refused else shared.BLUE
        mean = np.asarray(panel.mean, dtype=float)
        axes.plot(steps, mean, color=color, lw=1.6, label="mean of all chains")
        axes.axvspan(0, panel.burn_in, color=shared.INK, alpha=0.07, lw=0)
        if np.isfinite(panel.expected):
            axes.axhline(panel.expected, color=shared.VERMILION, lw=1.2, ls="--")
        level = panel.expected if np.isfinite(panel.expected) else float(np.nanmedian(mean))
        axes.set_ylim(0, 3 * level if level > 0 else None)
        axes.set_xlim(0, float(steps[-1]))
        axes.set_title(panel.title, fontsize=8, color=_REFUSED if panel.refused else shared.INK)
        axes.tick_params(labelsize=7)
    for axes in places[::columns]:
        axes.set_ylabel("nβ (L - L₀)", fontsize=8)
    for axes in places[-columns:]:
        axes.set_xlabel("step", fontsize=8)
    return figure
