"""The stitching penalty of every pair, site and family of maps."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym._statistics import bootstrap_over_models
from lightning_sym._tags import details, tag
from lightning_sym.figures import Chart, Marks, Panel, penalty_heat_map
from lightning_sym.reports.report import (
    ResultTable,
    Row,
    RunResults,
    bold,
    finite,
    grouped,
    in_points,
    numeric,
    spread_cell,
    stopped_notes,
    text_table,
    unique,
)

AS_IS, RECALIBRATED, NO_NORM = "as is", "recalibrated", "none"
_TITLES = {AS_IS: "batch norm statistics as training left them", RECALIBRATED: "statistics recalibrated"}
_SPANS = ("95 % interval over models", "± standard deviation over pairs")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "h")
_GREYS, _DASHES = ("#7a7a7a", "#a0a0a0", "#5a5a5a", "#b5b5b5"), ("--", ":", "-.", (0, (6, 1.5, 1, 1.5)))
_LINES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
UNITS = {
    "penalty": "mean accuracy of both members less that of the stitched network; fraction of inputs, positive is worse",
    "accuracy": "fraction of inputs, 0 to 1",
    "loss": "mean cross-entropy, nats",
    "dimension": "degrees of freedom of the map, over all ports",
    "sparsity": "fraction of entries of the map that are at most 1e-3, over all ports",
    "epoch": "epoch whose weights were kept, counted from 0: that with the best validation accuracy",
    "batch_norm": f"running statistics of the upper part: as training left them ({AS_IS!r}), recomputed on "
    f"training images ({RECALIBRATED!r}), or no batch norm above the cut ({NO_NORM!r})",
    "low, high": "95 % percentile interval for the mean over pairs, from 2000 bootstrap samples of the models",
    "std": "standard deviation over pairs, sample form",
    "chosen": "family that was chosen for the pair and place, by the accuracy on the validation split",
    "number": "number in the brackets of that family's name",
    "share": "fraction of the pairs with this choice, 0 to 1",
}


def stitching_results(
    networks: Sequence[Row],
    evaluations: Mapping[str, Mapping[str, Sequence[float]]],
    stopped: Mapping[int, str],
    *,
    title: str,
    about: Mapping[str, Any],
    two_zoos: bool = False,
    epochs: int | None = None,
    choose: Sequence[str] = (),
) -> RunResults:
    """Report the penalties of stitched networks.

    Args:
        networks: Facts about each before the test: ``name``, ``lower``, ``upper`` (numbers of the members),
            ``site``, ``target_site``, ``place``, ``family``, ``trained``, ``batch_norm`` (whether the upper part has
            batch norms), ``ports``, ``dimension``, ``sparsity``, ``epoch``, ``val_accuracy`` and ``val_loss``.
        evaluations: By kind of statistics (``"as is"``, ``"recalibrated"``): ``accuracy``, ``loss`` and ``penalty`` of
            each network.
        stopped: Why networks were stopped, by their place in the list.
        title: For tables and figures.
        about: Everything needed to make the tables again.
        two_zoos: Whether lower and upper members are of different zoos, so that equal numbers are different models.
        epochs: For how many epochs maps were trained, for the advice to train them longer; None gives no number.
        choose: Families with a choice between those that differ by a number, see :func:`chosen_rows`. The mean penalty
            and the picture show the chosen ones instead of these.
    """
    rows = stitching_rows(networks, evaluations, stopped)
    found = {base: chosen_rows(rows, base) for base in choose}
    bases = [base for base, own in found.items() if own]
    candidates = {row["family"] for row in rows if any(differs_by_number(row["family"], base) for base in bases)}
    without = [f"no {base} map was validated, so none was chosen" for base in choose if base not in bases]
    if choose:
        chosen = [row for base in bases for row in found[base]]
        rows = [*({**row, "chosen": None} for row in rows), *chosen]
    summary = stitching_summary(rows, two_zoos=two_zoos)
    kind = _best_kind(summary)
    choices = _choices([row for row in rows if row.get("chosen") and row["batch_norm"] in (kind, NO_NORM)], candidates)
    drawn = [row for row in summary if row["family"] not in candidates]
    final = [row for row in drawn if row["batch_norm"] in (kind, NO_NORM) and row["penalty"] is not None]
    trained = [row["penalty"] for row in final if row["trained"]]
    what = "stitching penalties on the test split: "
    sites_differ = any(row["site"] != row["target_site"] for row in summary)
    picture = _map_name(drawn, drawn[0]["family"]) if sites_differ else "penalties"
    return RunResults(
        [
            ResultTable("penalties", what + "each stitched network", rows, UNITS, about),
            ResultTable("summary", what + "over pairs", summary, UNITS, about),
            *([ResultTable("choices", "chosen maps, by place", choices, UNITS, about)] if choices else []),
        ],
        chain(_figures(drawn, title, sites_differ), _CHOSEN.named("choices", choices, title)),
        numbers={
            **({"test_penalty": float(np.mean(trained))} if trained else {}),
            **details({tag("test_penalty", row["place"], row["family"]): row["penalty"] for row in final}),
        },
        headline="test_penalty" if trained else None,
        shown=_shown(summary, title),
        notes=[
            _legend(summary),
            *without,
            *_undertrained(final, epochs),
            *stopped_notes(networks, stopped, "penalties.csv"),
        ],
        places={
            "picture": f"{picture}.png",
            "table": "summary.csv",
            "pairs": "penalties.csv",
            **({"choices": "choices.png"} if choices else {}),
        },
    )


def stitching_rows(
    networks: Sequence[Row], evaluations: Mapping[str, Mapping[str, Sequence[float]]], stopped: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return a row for each network and kind of statistics; one without batch norm has the same with all of them."""
    rows = []
    for number, (kind, found) in enumerate(evaluations.items()):
        for index, network in enumerate(networks):
            if number and not network["batch_norm"]:
                continue
            row = {name: value for name, value in network.items() if name != "name"}
            row["batch_norm"] = kind if network["batch_norm"] else NO_NORM
            for name in ("accuracy", "loss", "penalty"):
                row[name] = None if index in stopped else finite(found[name][index])
            rows.append({**row, "stopped": stopped.get(index, "")})
    return rows


def chosen_rows(rows: Sequence[Row], base: str) -> list[dict[str, Any]]:
    """Return for each pair, place and kind of statistics the row of the best map on the validation split.

    The choice is between the families with the name ``base`` but for a number: for ``"group"`` these are
    ``group(0.01)``, ``group(0.1)`` and so on, for ``"group(euclidean)"`` these are ``group(euclidean,0.01)`` and so on.
    Of equal accuracies the one with the lower validation loss is chosen. Maps that were stopped, or never validated,
    are left out.

    Args:
        rows: As :func:`stitching_rows` gives them.
        base: The name without the number.

    Returns:
        Copies of the rows, with the family ``group(chosen)`` and the name of the chosen family in ``chosen``.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, appendix D.5, choose alpha so.
    """
    own = [row for row in rows if differs_by_number(row["family"], base)]
    candidates = [row for row in own if not row["stopped"] and row["val_accuracy"] is not None]
    chosen = []
    for _, found in grouped(candidates, "batch_norm", "lower", "upper", "place"):
        best = max(found, key=lambda row: (row["val_accuracy"], -row["val_loss"]))
        chosen.append({**best, "family": _numbered(base, "chosen"), "chosen": best["family"]})
    return chosen


def differs_by_number(family: str, base: str) -> bool:
    """Return whether a family's name is another one with a number in brackets: ``group(0.1)`` is ``group`` with one."""
    name, number = _split(family)
    return name == base and not math.isnan(number)


def _split(family: str) -> tuple[str, float]:
    """Return a family's name without the number in brackets, and this number, NaN if there is none."""
    match = re.fullmatch(r"(\w+)\((?:\s*(\w*[a-z]\w*)\s*,)?\s*([0-9._eE+-]+)\s*\)", family)
    if match is None:
        return family, math.nan
    return f"{match[1]}({match[2]})" if match[2] else match[1], float(match[3])


def _numbered(base: str, value: object) -> str:
    return f"{base[:-1]},{value})" if base.endswith(")") else f"{base}({value})"


def _choices(chosen: Sequence[Row], candidates: Iterable[str]) -> list[dict[str, Any]]:
    """Return how often each candidate was chosen, by place."""
    choices = []
    for at, found in grouped(chosen, "place", "family"):
        of_family = [name for name in candidates if _numbered(_split(name)[0], "chosen") == at["family"]]
        for name in sorted(of_family, key=lambda name: _split(name)[1]):
            count = sum(row["chosen"] == name for row in found)
            values = {"chosen": name, "number": f"{_split(name)[1]:g}"}
            choices.append({**at, **values, "pairs": count, "share": count / len(found)})
    return choices


_CHOSEN = Chart(
    [
        Panel(
            [Marks("share", "number", ["place"], "bars", factor=100)],
            "{family}",
            "parameter of the chosen map",
            "% of pairs",
            by=["family"],
            bottom=0,
        )
    ],
    "Choices by validation accuracy: {title}",
    columns=1,
    legend="beside",
)


def stitching_summary(rows: Sequence[Row], *, two_zoos: bool = False) -> list[dict[str, Any]]:
    """Return means over pairs, for each kind of statistics, place and family.

    Args:
        rows: As :func:`stitching_rows` gives them.
        two_zoos: Whether equal numbers of lower and upper members are different models; there is no interval then.
    """
    summary = []
    for _, found in grouped(rows, "batch_norm", "place", "family"):
        used = [row for row in found if row["penalty"] is not None]
        values = [row["penalty"] for row in used]
        numbers: dict[str, Any] = dict.fromkeys(("penalty", "penalty_std", "penalty_low", "penalty_high"))
        note = "all pairs were stopped"
        if used:
            numbers["penalty"] = float(np.mean(values))
            note = "no interval: a zoo stitched to another one"
            numbers["penalty_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
        if used and not two_zoos:
            interval = bootstrap_over_models([(int(row["lower"]), int(row["upper"])) for row in used], values)
            numbers |= {f"penalty_{name}": finite(float(getattr(interval, name))) for name in ("low", "high")}
            note = interval.note
        summary.append(
            {
                **{
                    name: found[0][name] for name in ("place", "site", "target_site", "family", "trained", "batch_norm")
                },
                "pairs": len(used),
                **numbers,
                "accuracy": float(np.mean([row["accuracy"] for row in used])) if used else None,
                "dimension": found[0]["dimension"],
                "sparsity": float(np.mean([row["sparsity"] for row in used])) if used else None,
                "note": note,
            }
        )
    return summary


def _best_kind(summary: Sequence[Row]) -> str:
    """Return the kind of statistics that is shown where there is room for one."""
    kinds = unique(summary, "batch_norm")
    return next(kind for kind in (RECALIBRATED, AS_IS, NO_NORM) if kind in kinds)


def _kinds(summary: Sequence[Row]) -> list[str]:
    """Return the kinds of statistics; places without batch norm go with each."""
    return [kind for kind in unique(summary, "batch_norm") if kind != NO_NORM] or [NO_NORM]


def _figures(summary: Sequence[Row], title: str, sites_differ: bool) -> Iterator[tuple[str, Figure]]:
    best, looks = _best_kind(summary), _looks(summary)
    if not sites_differ:
        panels = [
            Panel(_marks("place", "family", looks, {"batch_norm": (kind, NO_NORM)}), _TITLES.get(kind, ""), points=True)
            for kind in _kinds(summary)
        ]
        chart = Chart(panels, "Stitching penalty: {title}", columns=1, legend="beside", share="y")
        yield from chart.named("penalties", summary, title)
    else:
        below, above = unique(summary, "site"), unique(summary, "target_site")
        for family in unique(summary, "family"):
            values = np.full((len(below), len(above)), np.nan)
            for row in summary:
                if row["family"] == family and row["batch_norm"] in (best, NO_NORM):
                    values[below.index(row["site"]), above.index(row["target_site"])] = numeric(row["penalty"])
            figure = penalty_heat_map(values, below, above, f"Stitching penalty, {family}: {title}")
            yield _map_name(summary, family), figure
    if any(row["family"].startswith("lasso") for row in summary):
        known = [row for row in summary if row["batch_norm"] in (best, NO_NORM) and row["sparsity"] is not None]
        marks = [
            Marks("penalty", "sparsity", ["family"], "error", error=["penalty_std"], spans=[_SPANS[1]], factor=100,
                  looks=looks, look={"ls": ""})
        ]  # fmt: skip
        panel = Panel(marks, "{place}", "sparsity: fraction of zeros in the map", by=["place"], points=True)
        chart = Chart([panel], "Sparsity: {title}", columns=2, legend="beside", share="xy")
        yield from chart.named("sparsity", known, title)


def _marks(x: str, group: str, looks: Mapping[str, Mapping[str, Any]], where: Mapping[str, Any]) -> list[Marks]:
    """Return the marks of penalties in points, with the interval or else the standard deviation.

    Args:
        x: Column of the places.
        group: Column of the series.
        looks: Properties by series; those with ``ls`` are baselines, without error bars.
        where: Which rows are drawn.
    """
    error: Any = [("penalty_low", "penalty_high"), "penalty_std"]
    of: Any = {"x": x, "group": [group], "factor": 100, "looks": looks}
    bars = {"error": error, "spans": _SPANS}
    return [
        Marks("penalty", kind="error", where={**where, "trained": True}, **bars, **of),
        Marks("penalty", kind="line", where={**where, "trained": False}, **of),
    ]


def _looks(summary: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the looks of families: markers and dashes of trained ones, grey dashes of baselines."""
    trained = {row["family"]: row["trained"] for row in summary}
    baselines = [family for family, learned in trained.items() if not learned]
    others = [family for family, learned in trained.items() if learned]
    return {
        **{family: {"color": _GREYS[k % 4], "ls": _DASHES[k % 4], "lw": 1.2} for k, family in enumerate(baselines)},
        **{family: {"marker": _MARKERS[k % 10], "ls": _LINES[k % 5]} for k, family in enumerate(others)},
    }


def _map_name(summary: Sequence[Row], family: str) -> str:
    """Return the name of the heat map of a family, which is part of it if there are several."""
    word = "".join(letter if letter.isalnum() else "_" for letter in family).strip("_")
    return "penalties" if len(unique(summary, "family")) == 1 else f"penalties_{word}"


# Largest excess penalty of a larger family, as a mean over sites, that the choice of test images can explain.
_BY_CHANCE = 0.01


def _undertrained(final: Sequence[Row], epochs: int | None) -> Iterator[str]:
    """Yield a line for each family that loses more than a family it contains: its training has not converged."""
    penalties: dict[str, dict[str, float]] = {}
    for row in final:
        if row["trained"]:
            penalties.setdefault(row["family"], {})[row["place"]] = row["penalty"]
    for larger, own in penalties.items():
        excess = {
            smaller: float(np.mean([own[place] - others[place] for place in own if place in others]))
            for smaller, others in penalties.items()
            if _contains(larger, smaller) and own.keys() & others.keys()
        }
        worst = max(excess, key=excess.__getitem__, default="")
        if worst and excess[worst] > _BY_CHANCE:
            more = "" if epochs is None else f" {2 * epochs}"
            yield (
                f"{larger} loses {in_points(excess[worst])} more than {worst}, which it contains: not trained to the "
                f"end; more epochs: --trainer.max_epochs{more}"
            )


def _contains(larger: str, smaller: str) -> bool:
    """Return whether every map of one family is one of the other, by their names."""
    ranks = [int(match[1]) if (match := re.fullmatch(r"rank\((\d+)\)", name)) else None for name in (larger, smaller)]
    if larger == "full":
        return smaller != "full" and (
            ranks[1] is not None or re.match(r"(group|softsort|orthogonal)\b", smaller) is not None
        )
    return ranks[0] is not None and ranks[1] is not None and ranks[0] > ranks[1]


def _legend(summary: Sequence[Row]) -> str:
    text = "accuracy points lost, mean over pairs"
    if any(row["penalty_std"] is not None for row in summary):
        text += " ± standard deviation"
    text += "; * not trained"
    if any(row["batch_norm"] == RECALIBRATED for row in summary):
        text += "; batch norm statistics as training left them (as is) and recomputed (recalibrated)"
    return text


def _shown(summary: Sequence[Row], title: str) -> Table:
    """Return families by sites; where there are many sites, families by their mean, least and worst site."""
    places = unique(summary, "place")
    few = len(places) <= 4
    lines: list[list[str] | None] = []
    for kind in _kinds(summary):
        rows = {(r["family"], r["place"]): r for r in summary if r["batch_norm"] in (kind, NO_NORM)}
        lines += [] if kind == NO_NORM else [[bold(kind)]]
        for family, trained in {row["family"]: row["trained"] for row in summary}.items():
            name = f"{family}{'' if trained else ' *'}"
            found = {place: numeric(rows.get((family, place), {}).get("penalty")) for place in places}
            if few:
                lines.append([name, *(_cell(rows.get((family, place), {})) for place in places)])
            elif known := {place: value for place, value in found.items() if math.isfinite(value)}:
                worst = max(known, key=known.__getitem__)
                values = [float(np.mean(list(known.values()))), min(known.values()), known[worst]]
                lines.append([name, *map(in_points, values), worst])
        lines.append(None)
    columns = ["map", *(places if few else ("mean over sites", "least", "most", "at"))]
    return text_table(f"Stitching penalties on test data: {title}", columns, lines, whole=["map"])


def _cell(row: Row) -> str:
    return "-" if row.get("penalty") is None else spread_cell(in_points, row["penalty"], row["penalty_std"])
