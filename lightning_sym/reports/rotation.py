"""The rotation penalty of every member, site, kind and repeat."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports import ResultTable, RunResults
from lightning_sym.reports.report import Row, finite, in_points, spread_cell, stopped_notes, text_table, unique

_SAMPLES = 2000
UNITS = {
    "penalty": "accuracy of the member less that of the rotated network after training, on the same data; fraction "
    "of inputs, positive is worse. That on val is too low by what the choice of the epoch gains, as test is not",
    "accuracy": "fraction of inputs, 0 to 1",
    "loss": "mean cross-entropy, nats",
    "epoch": "epoch whose weights were kept, counted from 0: that with the best validation accuracy; none if untrained",
    "std": "standard deviation over the repeats of a member, sample form; of several members the root mean square",
    "low, high": f"95 % percentile interval for the mean test penalty, from {_SAMPLES} bootstrap samples of what "
    "interval_over names; none if there are fewer than three",
    "above_group": "penalty less that of the kind group at the same site: mean over members of the differences between "
    "a member's means, with a 95 % bootstrap interval over members (none for one member)",
}
KINDS = {
    "group": "group element",
    "orthogonal": "orthogonal matrix",
    "none": "not rotated, trained on",
    "undo": "group element, undone exactly",
}
_HATCHED = {"color": "white", "edgecolor": "#7a7a7a", "hatch": "////"}
_BASELINES = {KINDS["none"]: _HATCHED, KINDS["undo"]: {**_HATCHED, "hatch": "...."}}
CHART = Chart(
    [
        Panel(
            [
                Marks("penalty", "site", kind="bars", label=lambda row: KINDS.get(row["kind"], str(row["kind"])),
                      error=[("low", "high"), "std"],
                      spans=["95 % bootstrap interval", "± standard deviation over repeats"], factor=100,
                      values=".1f", looks=_BASELINES)
            ],
            points=True,
        )
    ],
    "Rotation penalty: {title}",
    size=(8.0, 3.8), legend="beside",
)  # fmt: skip


def rotation_results(
    networks: Sequence[Row],
    evaluations: Mapping[str, Mapping[str, Sequence[float]]],
    stopped: Mapping[int, str],
    *,
    title: str,
    about: Mapping[str, Any],
    numbers: Mapping[str, float],
    headline: str | None,
) -> RunResults:
    """Report the penalty of rotating units.

    Args:
        networks: Facts about each before the test: ``name``, ``member``, ``site``, ``kind``, ``repeat`` and
            ``epoch``.
        evaluations: By split (``"test"``, and ``"val"`` if there is one): ``accuracy``, ``loss``, ``penalty`` and
            ``member_accuracy`` (of the network that was not rotated) of each network.
        stopped: Why networks were stopped, by their place in the list.
        title: For table and figure.
        about: Everything needed to make the tables again.
        numbers: Mean penalties on the test split, by tag.
        headline: The name of that of the kind which the run is about.
    """
    rows = rotation_rows(networks, evaluations, stopped)
    summary = rotation_summary(rows)
    what = "rotation penalties: "
    return RunResults(
        [
            ResultTable("penalties", what + "each rotated network", rows, UNITS, about),
            ResultTable("summary", what + "per site and kind", summary, UNITS, about),
        ],
        CHART.named("rotation_penalty", summary, title),
        numbers=numbers,
        headline=headline,
        shown=_shown(summary, title),
        notes=[_legend(summary), *_differences(summary), *stopped_notes(networks, stopped, "penalties.csv")],
        places={"picture": "rotation_penalty.png", "table": "summary.csv", "runs": "penalties.csv"},
    )


def rotation_rows(
    networks: Sequence[Row], evaluations: Mapping[str, Mapping[str, Sequence[float]]], stopped: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return a row for each rotated network; arguments as for :func:`rotation_results`."""
    rows = []
    for index, network in enumerate(networks):
        row = {name: value for name, value in network.items() if name != "name"}
        for split in ("val", "test"):
            for column, name in (
                (f"{split}_penalty", "penalty"),
                (f"{split}_accuracy", "accuracy"),
                (f"{split}_loss", "loss"),
                (f"member_{split}_accuracy", "member_accuracy"),
            ):
                row[column] = finite(evaluations[split][name][index]) if split in evaluations else None
        rows.append({**row, "stopped": stopped.get(index, "")})
    return rows


def rotation_summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return mean, spread and interval for each site and kind, and the excess of the mean over that of the group."""
    by_key: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        own = by_key.setdefault((row["site"], row["kind"]), {})
        if row["test_penalty"] is not None:
            own.setdefault(row["member"], []).append(row["test_penalty"])
    summary = []
    for (site, kind), by_member in by_key.items():
        values = list(by_member.values())
        whole = [value for each in values for value in each]
        spreads = [np.var(each, ddof=1) for each in values if len(each) > 1]
        low, high, over = resampled_interval(values)
        group = by_key.get((site, "group"), {}) if kind != "group" else {}
        above = [[float(np.mean(by_member[n]) - np.mean(group[n]))] for n in by_member if n in group]
        above_low, above_high, _ = resampled_interval(above)
        validated = [r["val_penalty"] for r in rows if (r["site"], r["kind"]) == (site, kind)]
        summary.append(
            {
                "site": site,
                "kind": kind,
                "members": len(values),
                "networks": len(whole),
                "penalty": _mean(whole),
                "std": float(np.sqrt(np.mean(spreads))) if spreads else None,
                "low": low,
                "high": high,
                "interval_over": over,
                "above_group": _mean([value for (value,) in above]),
                "above_group_low": above_low,
                "above_group_high": above_high,
                "val_penalty": _mean([value for value in validated if value is not None]),
            }
        )
    return summary


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def resampled_interval(values: Sequence[Sequence[float]]) -> tuple[float | None, float | None, str]:
    """Return the bootstrap interval of the mean and the resampled unit: members, or repeats of one member.

    None for two members, or two repeats of one: resamples of two are only these two and their mean.

    Args:
        values: For each member the penalties of its repeats.

    References:
        Efron (1979), "Bootstrap Methods: Another Look at the Jackknife".
    """
    if len(values) > 2:  # repeats of one member are no news about others
        drawn, over = np.array([np.mean(each) for each in values]), "members"
    elif len(values) == 1 and len(values[0]) > 2:
        drawn, over = np.array(values[0]), "repeats"
    else:
        return None, None, ""
    picked = np.random.default_rng(0).integers(len(drawn), size=(_SAMPLES, len(drawn)))
    low, high = np.quantile(drawn[picked].mean(1), [0.025, 0.975])
    return float(low), float(high), over


def _legend(summary: Sequence[Row]) -> str:
    text = "mean on test data"
    if any(row["std"] is not None for row in summary):
        text += " ± standard deviation over repeats"
    over = sorted({row["interval_over"] for row in summary} - {""})
    return text + (f"; in brackets: 95 % interval for the mean, over {' or '.join(over)}" if over else "")


def _differences(summary: Sequence[Row]) -> list[str]:
    """Return in words how far orthogonal matrices are above the group: members differ more than these differences."""
    rows = [row for row in summary if row["kind"] == "orthogonal" and row["above_group"] is not None]
    names = ("above_group", "above_group_low", "above_group_high")
    parts = []
    for row in rows:
        mean, low, high = (row[name] for name in names)
        parts.append(f"{row['site']} {spread_cell(in_points, mean, None, low, high)}".replace("\n", " "))
    return [f"orthogonal less group, member by member: {', '.join(parts)}"] if parts else []


def _shown(summary: Sequence[Row], title: str) -> Table:
    kinds = unique(summary, "kind")
    by_key = {(row["site"], row["kind"]): row for row in summary}
    lines = [[site, *(_cell(by_key[site, kind]) for kind in kinds)] for site in unique(summary, "site")]
    return text_table(f"Rotation penalty, points: {title}", ["in front of", *kinds], lines, whole=kinds)


def _cell(row: Row) -> str:
    if row["penalty"] is None:
        return "stopped"
    return spread_cell(in_points, *(row[name] for name in ("penalty", "std", "low", "high")))
