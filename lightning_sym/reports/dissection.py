"""Concepts of single units, in the networks' own basis and in rotated ones."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from rich.table import Table
from torch import Tensor

from lightning_sym._statistics import student_interval
from lightning_sym._tags import tag
from lightning_sym.dissection import BasisDissection, StrongestImages, three_places
from lightning_sym.figures import Chart, Marks, Panel, Strip, unit_images
from lightning_sym.reports.report import ResultTable, Row, RunResults, finite, grouped, numeric, text_table, unique

QUANTITIES = (
    "interpretable",
    "distinct",
    "overlap",
    "kurtosis",
    "participation",
    "selectivity",
    "class_variance",
    "live",
)
UNITS = {
    "alpha": "place on the path from the network's own basis (0) to a random one (1)",
    "basis": "rotation: uniform on SO(C); permutation: even; group: an element of the network's own symmetry, "
    "permutations and positive scales",
    "interpretable": "units that detect a concept",
    "distinct": "different concepts that are detected",
    "overlap": "largest intersection over union of a unit with a concept, mean over units",
    "kurtosis": "fourth central moment over squared variance, median over live units; 3 for a Gaussian",
    "participation": "(sum a^2)^2 / (M sum a^4), median over live units",
    "selectivity": "(largest - rest) / (|largest| + |rest|) of mean responses to classes, mean over live units",
    "class_variance": "fraction of the variance of an image's mean response that its class explains, mean over live "
    "units",
    "live": "units that are not constant",
    "count": "units that detect the concept, or a concept of the category, mean over members",
    "change": "value at the end of the path less that at its beginning, mean over members",
    "low, high": "95 % interval for the mean over members, Student's t; each member has a rotation of its own",
}
_SHOWN = ("interpretable", "distinct", "kurtosis", "class_variance")


def _panel(quantity: str, heading: str) -> Panel:
    error = [(f"{quantity}_low", f"{quantity}_high")]
    look = {"ls": "", "marker": "x", "ms": 7, "mew": 1.8}
    of: Any = {"y": quantity, "x": "alpha", "color": "{zoo}"}
    marks = [
        Marks(group=["zoo"], error=error, spans=["95 % interval over members"],
              where={"network": "trained", "basis": "rotation"}, **of),
        Marks(group=["zoo", "network"], where={"network": "untrained", "basis": "rotation"},
              look={"ls": "--", "lw": 1.2}, **of),
        Marks(group=["zoo", "basis"], where={"basis": "permutation"}, look=look, **of),
    ]  # fmt: skip
    return Panel(marks, heading, r"$\alpha$: own basis ($0$) to a random one ($1$)",
                 bottom=None if quantity == "kurtosis" else 0)  # fmt: skip


CHART = Chart(
    [
        _panel("interpretable", "interpretable units"),
        _panel("distinct", "distinct concepts"),
        _panel("overlap", "largest overlap, mean"),
        _panel("kurtosis", "kurtosis, median"),
        _panel("participation", "participation ratio, median"),
        _panel("class_variance", "variance explained by class, mean"),
    ],
    "Meaning of units in rotated bases: {title}",
)

CATEGORIES = Chart(
    [
        Panel(
            [Marks("count", "alpha", ["category"], kind="area", label="{category}")],
            "{zoo}",
            r"$\alpha$ (0: own basis)",
            "interpretable units",
            by=["zoo"],
            bottom=0,
        )
    ],
    "Interpretable units by category of concept: {title}",
    columns=3,
    share="y",
)
_MOST_CONCEPTS = 40  # names in one panel; the table has all


def _concepts_chart(rows: Sequence[Row]) -> Chart:
    """Return the chart of the units of each concept of one network: a panel for each of three bases."""
    names = len(unique(rows, "concept"))
    bars = Marks("count", "concept", ["category"], kind="bars", label="{category}")
    panel = Panel([bars], r"$\alpha = {alpha:g}$", ylabel="units", by=["alpha"], bottom=0, flat=True)
    return Chart([panel], "Units of each concept: {title}", 3, (3.0, max(2.2, 0.8 + 0.17 * names)), share="x")


@dataclass(frozen=True, eq=False)
class Dissected:
    """One network in one basis.

    Attributes:
        zoo: Name of its zoo.
        member: The member's number.
        network: ``"trained"``, or ``"untrained"``: the weights that the member began with.
        basis: ``"rotation"``, ``"permutation"`` or ``"group"``.
        alpha: Where on the path from the identity to it.
        found: The result.
    """

    zoo: str
    member: int
    network: str
    basis: str
    alpha: float
    found: BasisDissection


@dataclass(frozen=True, eq=False)
class BestUnit:
    """A unit with a large overlap, and the images to which it responds most.

    Attributes:
        zoo: Name of its zoo.
        member: The member's number.
        alpha: Where on the path to a rotation.
        unit: Its index.
        concept: Index of the concept with the largest overlap.
        overlap: Intersection over union with that concept.
        strongest: Images, not normalised, with values in [0, 1], and the active pixels in them.
    """

    zoo: str
    member: int
    alpha: float
    unit: int
    concept: int
    overlap: float
    strongest: StrongestImages


class MeanInterval(NamedTuple):
    """A mean over members, and the 95 % interval for it; NaN where there is none."""

    mean: float
    low: float
    high: float


def mean_interval(values: ArrayLike, level: float = 0.95) -> MeanInterval:
    """Return the mean of independent values, with the interval of Student's t; of finite values only.

    Args:
        values: Shape ``[M]``.
        level: Coverage, in (0, 1).
    """
    numbers = np.asarray(values, dtype=float)
    numbers = numbers[np.isfinite(numbers)]
    mean = float(numbers.mean()) if len(numbers) else math.nan
    return MeanInterval(mean, *(student_interval(numbers, level=level) if len(numbers) > 1 else (math.nan, math.nan)))


def dissection_results(
    results: Sequence[Dissected],
    best: Sequence[BestUnit],
    *,
    concepts: Sequence[Any],
    least: float,
    title: str,
    about: Mapping[str, Any],
) -> RunResults:
    """Report the concepts of single units, in the networks' own basis and in rotated ones.

    Args:
        results: One for each network and basis.
        best: Units with their strongest images, to be drawn.
        concepts: Names and categories of the concepts.
        least: Threshold of the overlap.
        title: For tables and figures.
        about: Everything needed to make the tables again.
    """
    rows = basis_rows(results, least)
    summary, changes = summary_rows(rows), change_rows(rows)
    by_concept = concept_rows(results, concepts, least)
    by_category = category_rows(by_concept)
    what = "what units detect, "
    numbers = {
        tag("dissection", row["zoo"], f"change_of_{row['quantity']}"): row["change"]
        for row in changes
        if (row["network"], row["basis"]) == ("trained", "rotation") and row["change"] is not None
    }
    notes = ["in brackets: 95 % interval for the mean change, Student's t over members"]
    for basis, words in (("group", "elements of the networks' own symmetry"), ("permutation", "permutations")):
        counts = [row for row in changes if row["basis"] == basis and row["quantity"] in ("interpretable", "distinct")]
        if counts:
            worst = max(row["largest"] for row in counts)
            notes.append(f"control: {words} change at most {worst:g} units or concepts of a member")
    return RunResults(
        [
            ResultTable("changes", what + "at the end of the path less at its beginning", changes, UNITS, about),
            ResultTable("summary", what + "mean over members", summary, UNITS, about),
            ResultTable("bases", what + "of each network in each basis", rows, UNITS, about),
            ResultTable("units", what + "unit by unit, unrotated", unit_rows(results, concepts, least), UNITS, about),
            ResultTable("concepts", "units of each concept, mean over members", by_concept, UNITS, about),
            ResultTable("categories", "units of each category, mean over members", by_category, UNITS, about),
        ],
        _figures(summary, by_category, by_concept, best, concepts, title),
        numbers=numbers,
        shown=_shown(summary, changes, title),
        notes=notes,
        places={"picture": "dissection.png", "table": "changes.csv", "units": "units.csv"},
    )


def basis_rows(results: Sequence[Dissected], least: float) -> list[dict[str, Any]]:
    """Return one row for each network and basis."""
    rows = []
    for one in results:
        detected, summary = one.found.detectors(least), one.found.summary
        live = summary.live
        rows.append(
            {
                **{name: getattr(one, name) for name in ("zoo", "member", "network", "basis", "alpha")},
                "units": len(live),
                "interpretable": detected.units,
                "distinct": detected.distinct,
                "overlap": float(detected.overlap.mean()),
                "kurtosis": _of_live(summary.kurtosis, live, "median"),
                "participation": _of_live(summary.participation, live, "median"),
                "selectivity": _of_live(summary.selectivity, live, "mean"),
                "class_variance": _of_live(summary.class_variance, live, "mean"),
                "live": int(live.sum()),
            }
        )
    return rows


def _of_live(values: Tensor, live: Tensor, how: str) -> float | None:
    chosen = values[live]
    if not len(chosen):
        return None
    return finite(float(chosen.median() if how == "median" else chosen.mean()))


def unit_rows(results: Sequence[Dissected], concepts: Sequence[Any], least: float) -> list[dict[str, Any]]:
    """Return the detected concept of each unit of each trained network, in the network's own basis."""
    rows = []
    for one in results:
        if (one.network, one.basis, one.alpha) != ("trained", "rotation", 0.0):
            continue
        detected = one.found.detectors(least)
        for unit, (concept, overlap, detects) in enumerate(
            zip(detected.concept.tolist(), detected.overlap.tolist(), detected.detects.tolist(), strict=True)
        ):
            name, category = concepts[concept]
            rows.append(
                {
                    **{"zoo": one.zoo, "member": one.member, "unit": unit, "concept": name, "category": category},
                    **{"overlap": overlap, "detects": detects, "threshold": float(one.found.thresholds[unit])},
                    "kurtosis": finite(float(one.found.summary.kurtosis[unit])),
                }
            )
    return rows


def concept_rows(results: Sequence[Dissected], concepts: Sequence[Any], least: float) -> list[dict[str, Any]]:
    """Return the number of units that detect each concept, mean over the trained members of a zoo, on their paths.

    Concepts are those that a unit of the zoo detects at some place; categories without any have none.
    """
    rows = []
    own = [one for one in results if (one.network, one.basis) == ("trained", "rotation")]
    for zoo in dict.fromkeys(one.zoo for one in own):
        counts: dict[float, list[Tensor]] = {}
        for one in (one for one in own if one.zoo == zoo):
            detected = one.found.detectors(least)
            count = detected.concept[detected.detects].bincount(minlength=len(concepts))
            counts.setdefault(one.alpha, []).append(count)
        means = {alpha: torch.stack(found).double().mean(0) for alpha, found in counts.items()}
        known = torch.stack(list(means.values())).any(0).nonzero()[:, 0].tolist()
        for alpha, mean in means.items():
            for concept in known:
                name, category = concepts[concept]
                key = {"zoo": zoo, "alpha": alpha, "category": category, "concept": name}
                rows.append({**key, "members": len(counts[alpha]), "count": float(mean[concept])})
    return rows


def category_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the number of interpretable units by category of their concepts.

    Args:
        rows: Rows of :func:`concept_rows`.
    """
    return [
        {**key, "members": own[0]["members"], "count": sum(row["count"] for row in own)}
        for key, own in grouped(rows, "zoo", "alpha", "category")
    ]


def _figures(
    summary: Sequence[Row],
    by_category: Sequence[Row],
    by_concept: Sequence[Row],
    best: Sequence[BestUnit],
    concepts: Sequence[Any],
    title: str,
) -> Iterator[tuple[str, Figure]]:
    yield from CHART.named("dissection", summary, title)
    yield from CATEGORIES.named("categories", by_category, title)
    files = _file_names(list(dict.fromkeys(row["zoo"] for row in summary)))
    for zoo in unique(by_concept, "zoo"):
        own = [row for row in by_concept if row["zoo"] == zoo]
        places = three_places(row["alpha"] for row in own)
        own = [row for row in own if row["alpha"] in places]
        totals = {key["concept"]: sum(row["count"] for row in rows) for key, rows in grouped(own, "concept")}
        most = sorted(totals, key=lambda concept: -totals[concept])[:_MOST_CONCEPTS]
        drawn = [row for row in own if row["concept"] in most]
        left_out = f", the {len(most)} most frequent of {len(totals)}" if len(most) < len(totals) else ""
        yield from _concepts_chart(drawn).named(f"concepts-{files[zoo]}", drawn, zoo + left_out)
    for zoo in dict.fromkeys(one.zoo for one in best):
        of_zoo = [one for one in best if one.zoo == zoo]
        columns = [[_strip(one, concepts) for one in of_zoo if one.alpha == alpha]
                   for alpha in dict.fromkeys(one.alpha for one in of_zoo)]  # fmt: skip
        heading = f"Units with the largest overlaps: {zoo}, member {of_zoo[0].member}"
        yield f"best-units-{files[zoo]}", unit_images(columns, title=heading)


def _strip(one: BestUnit, concepts: Sequence[Any]) -> Strip:
    """Return the images of a unit below its concept."""
    place = f"\N{GREEK SMALL LETTER ALPHA} = {one.alpha:g}, unit {one.unit}"
    title = f"{place}\n{concepts[one.concept][0]} {one.overlap:.2f}"
    return Strip(title, one.strongest.images.numpy(), one.strongest.active.numpy())


def _file_names(zoos: Sequence[str]) -> dict[str, str]:
    """Return the part of a file's name for each zoo; equal ones get the zoo's place as well."""
    names = [re.sub(r"[^\w.-]+", "-", zoo) for zoo in zoos]
    same = {name for name in names if names.count(name) > 1}
    return {
        zoo: f"{name}-{place}" if name in same else name
        for place, (zoo, name) in enumerate(zip(zoos, names, strict=True))
    }


def summary_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the means over members of each basis, with their intervals."""
    found = []
    for key, own in grouped(rows, "zoo", "network", "basis", "alpha"):
        line: dict[str, Any] = {**key, "members": len(own)}
        for quantity in QUANTITIES:
            interval = mean_interval([numeric(row[quantity]) for row in own])
            line |= {quantity: finite(interval.mean)}
            line |= {f"{quantity}_{end}": finite(getattr(interval, end)) for end in ("low", "high")}
        found.append(line)
    return found


def change_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the change of each quantity along a path, by member."""
    start = {
        (row["zoo"], row["member"], row["network"]): row
        for row in rows
        if (row["basis"], row["alpha"]) == ("rotation", 0)
    }
    found = []
    for key, own in grouped(rows, "zoo", "network", "basis"):
        ends = [row for row in own if row["alpha"] == 1]
        for quantity in QUANTITIES:
            pairs = [(numeric(row[quantity]), start[row["zoo"], row["member"], row["network"]]) for row in ends]
            differences = [end - numeric(first[quantity]) for end, first in pairs]
            interval = mean_interval(differences)
            begin = mean_interval([numeric(first[quantity]) for _, first in pairs])
            found.append(
                {
                    **key,
                    "quantity": quantity,
                    "members": len(ends),
                    "beginning": finite(begin.mean),
                    "change": finite(interval.mean),
                    **{end: finite(getattr(interval, end)) for end in ("low", "high")},
                    "largest": max((abs(value) for value in differences if math.isfinite(value)), default=0.0),
                }
            )
    return found


def _shown(summary: Sequence[Row], changes: Sequence[Row], title: str) -> Table:
    lines: list[list[str] | None] = []
    for zoo in unique(summary, "zoo"):
        rotations = [row for row in changes if (row["zoo"], row["basis"]) == (zoo, "rotation")]
        own = {(row["network"], row["quantity"]): row for row in rotations}
        for network in ("trained", "untrained"):
            if (network, _SHOWN[0]) in own:
                lines.append([f"{zoo}\n{network}", *(_cell(own[network, quantity]) for quantity in _SHOWN)])
        lines.append(None)
    columns = ["zoo", "interpretable\nunits", "distinct\nconcepts", "kurtosis", "variance\nby class"]
    return text_table(f"Units in their own basis, and their changes under random rotations: {title}", columns, lines)


def _cell(row: Row) -> str:
    if row["change"] is None:
        return "-"
    digits = 1 if abs(row["beginning"]) >= 1 else 3
    change = f"{row['beginning']:.{digits}f} {row['change']:+.{digits}f}"
    return change if row["low"] is None else f"{change}\n\\[{row['low']:+.{digits}f}, {row['high']:+.{digits}f}]"
