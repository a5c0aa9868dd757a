"""Figures of stitching: what it costs in accuracy to continue one network with the rest of another."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]

# Okabe and Ito's palette, which color-blind readers can tell apart; grey is for baselines.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c510a", "#5e3c99", "#b8a800")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "h")
_GREYS = ("#7a7a7a", "#a0a0a0", "#5a5a5a", "#b5b5b5")
_DASHES = ((0, (4, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (2, 1, 2, 3)))
_HATCHES = ("////", "....", "xxxx")
_INK = "#1b1b1b"
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
    if not panels:
        raise ValueError("panels must have at least one entry, got none.")
    for panel in panels:
        _check(panel.sites, panel.families, f"panel {panel.title!r}")
    looks = _looks([family for panel in panels for family in panel.families])
    most = max(len(panel.sites) for panel in panels)
    widths = [1.0 + _site_width(most) * len(panel.sites) for panel in panels]
    figure = Figure(figsize=(2.4 + sum(widths), 4.2 if most <= 8 else 5.4), layout="constrained", dpi=120)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, panel in zip(row, panels, strict=True):
        trained = [family.name for family in panel.families if not family.baseline]
        for family in panel.families:
            mean, below, above = _errors(family)
            # Error bars of one site side by side.
            shift = 0.0 if family.baseline else 0.07 * (trained.index(family.name) - (len(trained) - 1) / 2)
            shift *= min(1.0, 5 / max(1, len(trained)))
            _curve(axes, np.arange(len(panel.sites), dtype=np.float64) + shift, mean, below, above, looks[family.name])
        axes.set_title(panel.title, fontsize=10)
        _name_sites(axes, panel.sites)
        axes.grid(axis="y", alpha=0.25)
        axes.axhline(0, color=_INK, lw=0.9, zorder=1)
    _penalty_axis(row[0], [_ends(family) for panel in panels for family in panel.families], row)
    figure.legend(handles=[look.handle() for look in looks.values()], loc="outside right center", frameon=False,
                  fontsize=9, handlelength=2.6)  # fmt: skip
    if title:
        figure.suptitle(title)
    return figure


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
    cell = 0.62 if max(rows, columns) <= 8 else 0.42
    figure = Figure(
        figsize=(max(4.2, 2.0 + long + cell * columns), max(3.2, 1.4 + long + cell * rows)), layout="constrained",
        dpi=120,
    )  # fmt: skip
    axes = figure.add_subplot()
    finite = points[np.isfinite(points)]
    top = max(float(finite.max(initial=0.0)), 1.0)
    bottom = min(float(finite.min(initial=0.0)), 0.0)
    colors = colormaps["cividis_r"].with_extremes(bad="#e6e6e6")
    image = axes.imshow(np.ma.masked_invalid(points), cmap=colors, vmin=bottom, vmax=top)
    for row in range(rows):
        for column in range(columns):
            value = points[row, column]
            if np.isfinite(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
                axes.text(
                    column, row, _number(value) if abs(value) < 9.95 or cell > 0.5 else f"{value:.0f}",
                    ha="center", va="center", fontsize=8 if cell > 0.5 else 6.5, color="white" if dark else _INK,
                )  # fmt: skip
            else:
                axes.add_patch(
                    Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="////", edgecolor="#a0a0a0", lw=0)
                )
    longest = max(map(len, sites_b))
    flat = longest <= 4 or (longest <= 7 and cell > 0.5)
    axes.set_xticks(range(columns), list(sites_b), rotation=0 if flat else 90, fontsize=8)
    axes.set_yticks(range(rows), list(sites_a), fontsize=8)
    axes.set_xlabel("continued in B after")
    axes.set_ylabel("A up to")
    figure.colorbar(image, ax=axes, label="stitching penalty, points of accuracy", shrink=0.9, pad=0.02)
    if title:
        figure.suptitle(title)
    return figure


def sparsity_against_penalty(families: Sequence[SparsityFamily], sites: Sequence[str], title: str = "") -> Figure:
    """Draw the penalty against the sparsity of the stitching map, one panel per site and one marker per family.

    The vertical axis is the one of :func:`penalty_curves`.

    Args:
        families: For example a lasso at several strengths, and the symmetry group, whose elements have a sparsity of
            1 - 1/c on c channels; at least one.
        sites: Names of the panels, at most four in a row.
        title: Above all.

    Returns:
        The figure.

    Raises:
        ValueError: If there are no families or sites, or a family's arrays have another length than the sites.
    """
    _check(sites, families, "the figure")
    looks = _looks(families)
    columns = min(4, len(sites))
    rows = -(-len(sites) // columns)
    figure = Figure(figsize=(2.6 + 2.3 * columns, 0.9 + 2.5 * rows), layout="constrained", dpi=120)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    ends = []
    order = list(looks)
    for place, (axes, site) in enumerate(zip(panels, sites, strict=False)):
        for family in families:
            x = float(np.asarray(family.sparsity, dtype=float)[place])
            y = 100 * float(np.asarray(family.penalty, dtype=float)[place])
            if not (np.isfinite(x) and np.isfinite(y)):
                continue
            look, rank = looks[family.name], order.index(family.name)
            error = 0.0 if family.std is None else 100 * float(np.asarray(family.std, dtype=float)[place])
            if np.isfinite(error) and error > 0:
                axes.errorbar(x, y, yerr=error, color=look.color, lw=1.2, capsize=2, zorder=2)
            axes.add_line(_marker(look, rank, [x], [y]))
            ends.append(np.array([y - (error if np.isfinite(error) else 0), y + (error if np.isfinite(error) else 0)]))
        axes.set_title(_wrapped(site), fontsize=9)
        axes.set_xlim(-0.04, 1.04)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.grid(alpha=0.25)
        axes.axhline(0, color=_INK, lw=0.9, zorder=1)
    for axes in panels[len(sites) :]:
        axes.set_axis_off()
    for place in range(columns):  # the lowest panel of each column has the numbers
        axes = panels[max(index for index in range(len(sites)) if index % columns == place)]
        axes.tick_params(labelbottom=True)
    _penalty_axis(grid[0, 0], ends, panels[: len(sites)], label=False)
    figure.supxlabel("sparsity: fraction of zeros in the map", fontsize=10)
    figure.supylabel(_penalty_label(ends), fontsize=10)
    handles = [_marker(look, rank) for rank, look in enumerate(looks.values())]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    if title:
        figure.suptitle(title)
    return figure


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
    figure = Figure(figsize=(3.6 + len(sites) * group, 3.8), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    handles = []
    ends = [_ends(kind) for kind in kinds]
    for place, kind in enumerate(kinds):
        mean, below, above = _errors(kind)
        x = np.arange(len(sites)) + (place - (len(kinds) - 1) / 2) * width
        look = looks[kind.name]
        hatch = _HATCHES[place % 3] if kind.baseline else None
        filled = "white" if kind.baseline else look.color
        axes.bar(x, np.nan_to_num(mean), 0.92 * width, facecolor=filled, edgecolor=look.color, hatch=hatch, zorder=2)
        shown = np.isfinite(mean) & (below + above > 0)
        axes.errorbar(x[shown], mean[shown], [below[shown], above[shown]], fmt="none", ecolor=_INK, elinewidth=1.1,
                      capsize=2.5, zorder=4)  # fmt: skip
        for at, value, up in zip(x, mean, above, strict=True):
            if np.isfinite(value) and few:
                axes.annotate(
                    _number(value), (at, max(value + up, 0)), xytext=(0, 2), textcoords="offset points", ha="center",
                    fontsize=7, color="#444444",
                )  # fmt: skip
        handles.append(Rectangle((0, 0), 1, 1, label=kind.name, facecolor=filled, edgecolor=look.color, hatch=hatch))
    axes.axhline(0, color=_INK, lw=0.9, zorder=3)
    _name_sites(axes, sites)
    _penalty_axis(axes, ends, [axes], label=False)
    axes.set_ylabel(_penalty_label(ends, "rotation"))
    axes.set_ylim(top=axes.get_ylim()[1] * (1.12 if _is_logarithmic(ends) else 1.03))  # for the numbers
    axes.grid(axis="y", alpha=0.25)
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    if title:
        figure.suptitle(title)
    return figure


# ---- looks


@dataclass(frozen=True)
class _Look:
    name: str
    color: str
    marker: str | None
    dashes: tuple[int, tuple[float, ...]] | None

    def handle(self) -> Line2D:
        if self.marker is None:
            return Line2D([], [], color=self.color, lw=1.2, ls=self.dashes or "-", label=self.name)
        return Line2D([], [], color=self.color, lw=1.8, marker=self.marker, ms=5.5, label=self.name)


def _looks(families: Sequence[PenaltyFamily | SparsityFamily]) -> dict[str, _Look]:
    """Return the look of every family by name, trained ones first; by order of appearance, the same in all panels."""
    looks: dict[str, _Look] = {}
    for baseline in (False, True):
        names = dict.fromkeys(family.name for family in families if family.baseline == baseline)
        for place, name in enumerate(name for name in names if name not in looks):
            if baseline:
                marker = None
                looks[name] = _Look(name, _GREYS[place % 4], marker, _DASHES[place % 4])
            else:
                looks[name] = _Look(name, _COLORS[place % 10], _MARKERS[place % 10], None)
    return looks


def _marker(look: _Look, rank: int, x: Sequence[float] = (), y: Sequence[float] = ()) -> Line2D:
    """Return markers, for the legend if without places; hollow for baselines, smaller for later ones, so all show."""
    hollow = look.marker is None
    return Line2D(
        x, y, ls="", marker=_MARKERS[rank % 10] if look.marker is None else look.marker, ms=max(5.0, 9.5 - 0.8 * rank),
        color=look.color, mfc="none" if hollow else look.color, mec=look.color if hollow else "white",
        mew=1.4 if hollow else 0.6, label=look.name, zorder=3, clip_on=False,
    )  # fmt: skip


def _curve(axes: Axes, x: Values, mean: Values, below: Values, above: Values, look: _Look) -> None:
    if look.marker is None:
        axes.plot(x, mean, color=look.color, lw=1.2, ls=look.dashes, marker=".", ms=3, zorder=2)
        return
    axes.errorbar(
        x, mean, [below, above], color=look.color, lw=1.8, marker=look.marker, ms=5.5, mec="white", mew=0.5,
        elinewidth=1.2, capsize=2, zorder=3,
    )  # fmt: skip


# ---- numbers


def _check(sites: Sequence[str], families: Sequence[PenaltyFamily] | Sequence[SparsityFamily], where: str) -> None:
    if not sites or not families:
        raise ValueError(
            f"{where} must have at least one site and one family, got {len(sites)} and {len(families)}; give what "
            "was measured, or leave it out."
        )
    for family in families:
        named = (
            {"mean": family.mean, "low": family.low, "high": family.high, "std": family.std}
            if isinstance(family, PenaltyFamily)
            else {"sparsity": family.sparsity, "penalty": family.penalty}
            | ({} if family.std is None else {"std": family.std})
        )
        for name, values in named.items():
            if np.shape(values) != (len(sites),):
                raise ValueError(
                    f"{name} of the family {family.name!r} must have one value per site ({len(sites)} in {where}), "
                    f"got shape {list(np.shape(values))}; use NaN where there is none."
                )


def _errors(family: PenaltyFamily) -> tuple[Values, Values, Values]:
    """Return the mean and the lengths of the error bars below and above it, in points; lengths are finite."""
    mean, low, high, std = (
        100 * np.asarray(values, dtype=float) for values in (family.mean, family.low, family.high, family.std)
    )
    whole = np.isfinite(low) & np.isfinite(high)
    below, above = np.where(whole, mean - low, std), np.where(whole, high - mean, std)
    # A bootstrap interval may leave its mean out; a bar has no negative length.
    lengths = np.nan_to_num(np.stack([below, above]), nan=0, posinf=0, neginf=0).clip(min=0)
    return mean, lengths[0], lengths[1]


def _number(value: float) -> str:
    """Return a number with one digit after the point, and no "-0.0"."""
    return f"{round(value, 1) + 0.0:.1f}"


def _ends(family: PenaltyFamily) -> Values:
    mean, below, above = _errors(family)
    return np.concatenate([mean - below, mean + above])


# ---- axes


def _is_logarithmic(ends: Sequence[Values]) -> bool:
    largest = max((float(np.nanmax(part)) for part in ends if np.isfinite(part).any()), default=0.0)
    return largest > 2.5 * _LINEAR


def _penalty_label(ends: Sequence[Values], kind: str = "stitching") -> str:
    label = f"{kind} penalty, points of accuracy"
    return f"{label}\n(linear to {_LINEAR:.0f}, logarithmic above)" if _is_logarithmic(ends) else label


def _penalty_axis(first: Axes, ends: Sequence[Values], row: Sequence[Axes], *, label: bool = True) -> None:
    """Scale the shared vertical axis to what is drawn; if penalties are very large, so that small ones are seen."""
    if label:
        first.set_ylabel(_penalty_label(ends))
    finite = np.concatenate([part[np.isfinite(part)] for part in ends] or [np.zeros(0)])
    lowest, highest = min(0.0, float(finite.min(initial=0))), max(1.0, float(finite.max(initial=0)))
    if not _is_logarithmic(ends):
        margin = 0.05 * (highest - lowest)
        first.set_ylim(lowest - margin, highest + margin)
        return
    # The linear part takes as much room as the decade above it.
    for axes in row:
        axes.set_yscale("symlog", linthresh=_LINEAR, linscale=1.0, subs=[])
        axes.axhspan(_LINEAR, 1e4, color="#f2f2f2", lw=0, zorder=0)
    ticks = [-40, -20, -10, -5, 0, 2, 4, 6, 8, 10, 20, 40, 60, 100]
    bottom = lowest * 1.1 if lowest < 0 else 0.0
    bottom = min(bottom, -0.5)
    first.set_ylim(bottom, highest * 1.15)
    first.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if bottom <= tick <= highest * 1.15]))
    first.yaxis.set_minor_locator(NullLocator())
    first.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


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


def _wrapped(name: str) -> str:
    return "\n".join(textwrap.wrap(name, 26)) or name
