"""Figures of stitching: what it costs in accuracy to continue one network with the rest of another."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike

from lightning_sym.figures import _panels as shared
from lightning_sym.figures._panels import Values

_COLORS = (
    *(shared.BLUE, shared.VERMILION, shared.GREEN, shared.PINK, shared.SKY, shared.ORANGE, shared.BLACK),
    *("#8c510a", "#5e3c99", "#b8a800"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "h")
_GREYS = ("#7a7a7a", "#a0a0a0", "#5a5a5a", "#b5b5b5")  # for baselines
_DASHES = ((0, (4, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (2, 1, 2, 3)))
_HATCHES = ("////", "....", "xxxx")
# Beyond this many points the vertical axis of penalties is logarithmic, if there are larger ones.
_LINEAR = 10.0


@dataclass(frozen=True)
class PenaltyFamily:
    """Stitching penalties of one kind of map at every site, over the pairs of networks.

    All arrays have shape ``[S]``, one entry per site, with NaN where there is none; penalties are fractions: 0.01 is
    one point of accuracy, positive is worse.

    Attributes:
        name: What the legend says.
        mean: Mean over pairs.
        low: Lower end of the interval for the mean.
        high: Upper end. Where either end is not finite, error bars show ``std`` instead, if that is finite.
        std: Standard deviation over pairs, >= 0.
        baseline: Whether the map was not trained; drawn thin, dashed and grey.
    """

    name: str
    mean: ArrayLike
    low: ArrayLike
    high: ArrayLike
    std: ArrayLike
    baseline: bool = False


@dataclass(frozen=True)
class PenaltyPanel:
    """What one panel of :func:`penalty_curves` shows.

    Attributes:
        title: Above the panel.
        sites: Names of the places that were cut, in the order of the network.
        families: What is drawn; arrays of the length of ``sites``.
    """

    title: str
    sites: Sequence[str]
    families: Sequence[PenaltyFamily]


@dataclass(frozen=True)
class SparsityFamily:
    """Sparsity and penalty of one kind of map at every site, for :func:`sparsity_against_penalty`.

    Attributes:
        name: What the legend says.
        sparsity: Fraction of entries of the map that are (almost) 0, in [0, 1]; NaN where there is none. Shape
            ``[S]``.
        penalty: Stitching penalty as a fraction; NaN where there is none. Shape ``[S]``.
        std: Standard deviation of the penalty over pairs, >= 0; None for no error bars. Shape ``[S]``.
        baseline: Whether it is there to compare with: drawn grey.
    """

    name: str
    sparsity: ArrayLike
    penalty: ArrayLike
    std: ArrayLike | None = None
    baseline: bool = False


@shared.readable
def penalty_curves(panels: Sequence[PenaltyPanel], title: str = "") -> Figure:
    """Draw the stitching penalty of every family against the site, one panel per setting.

    The vertical axis, the same in all panels, is in points of accuracy (100 times the fraction). If penalties go far
    beyond 10 points it is linear up to 10 and logarithmic above, which the axis says and a line marks. A family has
    the same color and marker in all panels.

    Args:
        panels: From left to right; at least one.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no panels, a panel has no sites or families, or a family's arrays have other lengths
            than the sites.

    References:
        Godfrey et al. (2022), "On the Symmetries of Deep Learning Models and their Internal Representations",
        arXiv:2205.14258, figures of section 4, whose error bars are the standard deviation over pairs.
    """
    shared.check_some(panels=panels)
    for panel in panels:
        _check(panel.sites, panel.families, f"panel {panel.title!r}")
    looks = _looks([family for panel in panels for family in panel.families])
    most = max(len(panel.sites) for panel in panels)
    widths = [1.0 + _site_width(most) * len(panel.sites) for panel in panels]
    size = max(5.4, 2.4 + max(widths)), 0.4 + (3.8 if most <= 8 else 5.0) * len(panels)
    figure, row = shared.panels(*size, len(panels), 1, title=title, sharey=True)
    ends = []
    for axes, panel in zip(row, panels, strict=True):
        trained = [family.name for family in panel.families if not family.baseline]
        for family in panel.families:
            mean, lengths = _errors(family)
            ends.append(mean + lengths * [[-1], [1]])
            x, look = np.arange(len(panel.sites), dtype=np.float64), looks[family.name]
            if family.baseline:
                axes.plot(x, mean, marker=".", ms=3, zorder=2, **look)
                continue
            # Error bars of one site side by side.
            shift = 0.07 * (trained.index(family.name) - (len(trained) - 1) / 2) * min(1.0, 5 / len(trained))
            bars: dict[str, Any] = {"elinewidth": 1.2, "capsize": 2, "mec": "white", "mew": 0.5}
            axes.errorbar(x + shift, mean, lengths, zorder=3, **bars, **look)
        axes.set_title(panel.title, fontsize=10)
        _name_sites(axes, panel.sites)
    label = _penalty_axis(row, ends)
    for axes in row:
        axes.set_ylabel(label)
    handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    shared.legend_beside(figure, handles, handlelength=2.6)
    return figure


@shared.readable
def penalty_heat_map(values: ArrayLike, sites_a: Sequence[str], sites_b: Sequence[str], title: str = "") -> Figure:
    """Draw the penalty of stitching any site of one network to any site of another.

    Cells have their numbers, in points of accuracy. NaN, where the sites do not fit or nothing was trained, is grey
    and hatched.

    Args:
        values: Penalties as fractions. Shape ``[A, B]``: rows are sites of the first network (whose first part is
            used), columns of the second.
        sites_a: Names of the rows. Length ``A``.
        sites_b: Names of the columns. Length ``B``.
        title: Above the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If there is no cell, or the shape is not ``[A, B]``.
    """
    points = 100 * np.asarray(values, dtype=float)
    if points.size == 0 or points.shape != (len(sites_a), len(sites_b)):
        raise ValueError(
            f"values must have one row per name in sites_a ({len(sites_a)}) and one column per name in sites_b "
            f"({len(sites_b)}), at least one each, got shape {list(points.shape)}."
        )
    rows, columns = points.shape
    long = max(map(len, [*sites_a, *sites_b])) * 0.065
    cell, fontsize = (0.62, 8) if max(rows, columns) <= 8 else (0.42, 6.5)
    size = max(4.2, 2.0 + long + cell * columns), max(3.2, 1.4 + long + cell * rows)
    figure, (axes,) = shared.panels(*size, title=title)
    texts = [[_number(value) if abs(value) < 9.95 or cell > 0.5 else f"{value:.0f}" for value in row] for row in points]
    for row, column in np.argwhere(~np.isfinite(points)):
        texts[row][column] = ""
        corner = column - 0.5, row - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, hatch="////", edgecolor="#a0a0a0", lw=0))
    finite = points[np.isfinite(points)]
    limits = float(finite.min(initial=0.0)), float(finite.max(initial=1.0))
    colors = colormaps["cividis_r"].with_extremes(bad="#e6e6e6")
    image = shared.numbered_cells(axes, points, texts, colors, limits, fontsize)
    longest = max(map(len, sites_b))
    flat = longest <= 4 or (longest <= 7 and cell > 0.5)
    axes.set_xticks(range(columns), list(sites_b), rotation=0 if flat else 90, fontsize=8)
    axes.set_yticks(range(rows), list(sites_a), fontsize=8)
    axes.set(xlabel="continued in B after", ylabel="A up to")
    figure.colorbar(image, ax=axes, label="stitching penalty, points of accuracy", shrink=0.9, pad=0.02)
    return figure


@shared.readable
def sparsity_against_penalty(families: Sequence[SparsityFamily], sites: Sequence[str], title: str = "") -> Figure:
    """Draw the penalty against the sparsity of the stitching map, one panel per site and one marker per family.

    The vertical axis is the one of :func:`penalty_curves`.

    Args:
        families: For example a lasso at several strengths, and the symmetry group, whose elements have a sparsity of
            1 - 1/c on c channels; at least one.
        sites: Names of the panels, two in a row.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no families or sites, or a family's arrays have another length than the sites.
    """
    _check(sites, families, "the figure")
    looks = _looks(families)
    columns = min(2, len(sites))
    size = 2.6 + 2.3 * columns, 0.9 + 2.5 * -(-len(sites) // columns)
    figure, panels = shared.panels(*size, len(sites), columns, title=title, sharex=True, sharey=True)
    ranks = {name: rank for rank, name in enumerate(looks)}
    ends = []
    for family in families:
        look, rank = looks[family.name], ranks[family.name]
        stds = np.zeros(len(sites)) if family.std is None else family.std
        sparsities, penalties, stds = (
            np.asarray(part, dtype=float) for part in (family.sparsity, family.penalty, stds)
        )
        for axes, x, y, error in zip(panels, sparsities, 100 * penalties, 100 * np.nan_to_num(stds), strict=True):
            if not (np.isfinite(x) and np.isfinite(y)):
                continue
            if error > 0:
                axes.errorbar(x, y, yerr=error, color=look["color"], lw=1.2, capsize=2, zorder=2)
            axes.add_line(_marker(family.name, look, rank, [x], [y]))
            ends.append(y + error * np.array([-1, 1]))
    for axes, site in zip(panels, sites, strict=True):
        axes.set_title("\n".join(textwrap.wrap(site, 26)) or site, fontsize=9)
        axes.set_xlim(-0.04, 1.04)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.grid(axis="x", alpha=0.25)
    figure.supxlabel("sparsity: fraction of zeros in the map", fontsize=10)
    figure.supylabel(_penalty_axis(panels, ends), fontsize=10)
    shared.legend_beside(figure, (_marker(name, look, ranks[name]) for name, look in looks.items()))
    return figure


@shared.readable
def rotation_penalty(sites: Sequence[str], kinds: Sequence[PenaltyFamily], title: str = "") -> Figure:
    """Draw what a rotation of the units at a site costs after the layers behind it were trained again.

    Groups of bars, one group per site and one bar per kind of rotation, with error bars as in
    :func:`penalty_curves`; baselines (nothing trained, the exact undoing) are hatched. The vertical axis is the one of
    :func:`penalty_curves` too.

    Args:
        sites: Names of the groups, in the order of the network.
        kinds: For example an element of the symmetry group, and an orthogonal matrix; at least one.
        title: Above the figure.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no sites or kinds, or a kind's arrays have another length than the sites.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 3.3.
    """
    _check(sites, kinds, "the figure")
    looks = _looks(kinds)
    width = 0.82 / len(kinds)
    few = len(sites) * len(kinds) <= 24
    group = max(0.3 + 0.3 * len(kinds) if few else 0.18 * len(kinds), _site_width(len(sites)))
    figure, (axes,) = shared.panels(3.6 + len(sites) * group, 3.8, title=title)
    handles, ends = [], []
    for place, kind in enumerate(kinds):
        mean, lengths = _errors(kind)
        ends.append(mean + lengths * [[-1], [1]])
        x = np.arange(len(sites)) + (place - (len(kinds) - 1) / 2) * width
        color = looks[kind.name]["color"]
        look: dict[str, Any] = {"facecolor": color, "edgecolor": color}
        if kind.baseline:
            look |= {"facecolor": "white", "hatch": _HATCHES[place % 3]}
        axes.bar(x, np.nan_to_num(mean), 0.92 * width, zorder=2, **look)
        shown = np.isfinite(mean) & (lengths.sum(axis=0) > 0)
        bars: dict[str, Any] = {"fmt": "none", "ecolor": shared.INK, "elinewidth": 1.1, "capsize": 2.5}
        axes.errorbar(x[shown], mean[shown], lengths[:, shown], zorder=4, **bars)
        for at, value, up in zip(x, mean, lengths[1], strict=True):
            if np.isfinite(value) and few:
                axes.annotate(
                    _number(value), (at, max(value + up, 0)), xytext=(0, 2), textcoords="offset points", ha="center",
                    fontsize=7, color="#444444",
                )  # fmt: skip
        handles.append(Rectangle((0, 0), 1, 1, label=kind.name, **look))
    _name_sites(axes, sites)
    axes.set_ylabel(_penalty_axis([axes], ends, "rotation"))
    axes.set_ylim(top=axes.get_ylim()[1] * (1.12 if axes.get_yscale() == "symlog" else 1.03))  # for the numbers
    shared.legend_beside(figure, handles)
    return figure


# ---- looks


def _looks(families: Sequence[PenaltyFamily | SparsityFamily]) -> dict[str, dict[str, Any]]:
    """Return the line of every family by name, trained ones first; by order of appearance, the same in all panels."""
    trained = dict.fromkeys(family.name for family in families if not family.baseline)
    others = dict.fromkeys(family.name for family in families if family.baseline and family.name not in trained)
    return {
        name: {"color": _COLORS[place % 10], "marker": _MARKERS[place % 10], "lw": 1.8, "ms": 5.5}
        for place, name in enumerate(trained)
    } | {name: {"color": _GREYS[place % 4], "ls": _DASHES[place % 4], "lw": 1.2} for place, name in enumerate(others)}


def _marker(name: str, look: dict[str, Any], rank: int, x: Sequence[float] = (), y: Sequence[float] = ()) -> Line2D:
    """Return markers, for the legend if without places; hollow for baselines, smaller for later ones, so all show."""
    color = look["color"]
    face = {"mfc": color, "mec": "white", "mew": 0.6} if "marker" in look else {"mfc": "none", "mec": color, "mew": 1.4}
    marker, size = look.get("marker", _MARKERS[rank % 10]), max(5.0, 9.5 - 0.8 * rank)
    return Line2D(x, y, ls="", marker=marker, ms=size, color=color, label=name, zorder=3, clip_on=False, **face)


# ---- numbers


def _check(sites: Sequence[str], families: Sequence[PenaltyFamily] | Sequence[SparsityFamily], where: str) -> None:
    if not sites or not families:
        raise ValueError(
            f"{where} must have at least one site and one family, got {len(sites)} and {len(families)}; give what "
            "was measured, or leave it out."
        )
    for family in families:
        for name, values in vars(family).items():
            if name in ("name", "baseline") or values is None:
                continue
            if np.shape(values) != (len(sites),):
                raise ValueError(
                    f"{name} of the family {family.name!r} must have one value per site ({len(sites)} in {where}), "
                    f"got shape {list(np.shape(values))}; use NaN where there is none."
                )


def _errors(family: PenaltyFamily) -> tuple[Values, Values]:
    """Return the mean ``[S]`` and the lengths of the error bars below and above it ``[2, S]``, finite, in points."""
    mean, low, high, std = (
        100 * np.asarray(values, dtype=float) for values in (family.mean, family.low, family.high, family.std)
    )
    whole = np.isfinite(low) & np.isfinite(high)
    lengths = np.where(whole, [mean - low, high - mean], std)
    # A bootstrap interval may leave its mean out; a bar has no negative length.
    return mean, np.nan_to_num(lengths, nan=0, posinf=0, neginf=0).clip(min=0)


def _number(value: float) -> str:
    """Return a number with one digit after the point, and no "-0.0"."""
    return f"{round(value, 1) + 0.0:.1f}"


# ---- axes


def _penalty_axis(panels: Sequence[Axes], ends: Sequence[Values], kind: str = "stitching") -> str:
    """Scale the shared vertical axis to what is drawn; if penalties are very large, so that small ones are seen.

    Args:
        panels: All panels.
        ends: Where bars end, or other things that are drawn.
        kind: What the penalty is of.

    Returns:
        The label of the axis.
    """
    drawn = np.concatenate([np.ravel(part) for part in ends] or [np.zeros(0)])
    finite = drawn[np.isfinite(drawn)]
    lowest, highest = float(finite.min(initial=0.0)), float(finite.max(initial=1.0))
    for axes in panels:
        axes.grid(axis="y", alpha=0.25)
        axes.axhline(0, color=shared.INK, lw=0.9, zorder=3 if kind == "rotation" else 1)
    label, first = "penalty, points of accuracy", panels[0]  # what of, the title says
    if highest <= 2.5 * _LINEAR:
        margin = 0.05 * (highest - lowest)
        first.set_ylim(lowest - margin, highest + margin)
        return label
    # The linear part takes as much room as the decade above it.
    for axes in panels:
        axes.set_yscale("symlog", linthresh=_LINEAR, linscale=1.0, subs=[])
        axes.axhspan(_LINEAR, 1e4, color="#f2f2f2", lw=0, zorder=0)
    ticks = [-40, -20, -10, -5, 0, 2, 4, 6, 8, 10, 20, 40, 60, 100]
    bottom = min(lowest * 1.1, -0.5)
    first.set_ylim(bottom, highest * 1.15)
    first.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if bottom <= tick <= highest * 1.15]))
    first.yaxis.set_minor_locator(NullLocator())
    first.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return f"{label}\n(logarithmic above {_LINEAR:.0f})"


def _site_width(sites: int) -> float:
    """Return the width of one site in inches."""
    return float(np.clip(9 / max(1, sites), 0.34, 0.85))


def _name_sites(axes: Axes, sites: Sequence[str]) -> None:
    longest = max(map(len, sites))
    upright = longest > 14 * _site_width(len(sites))  # an inch has room for 14 letters
    axes.set_xticks(
        range(len(sites)), list(sites), fontsize=8, rotation=50 if upright else 0, ha="right" if upright else "center",
        rotation_mode="anchor" if upright else "default",
    )  # fmt: skip
    axes.set_xlim(-0.6, len(sites) - 0.4)
