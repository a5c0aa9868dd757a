"""Learning coefficients, or why there are none: rows, tables and figures of estimates by chains."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym.figures import ChainTraces, Coefficient, chain_traces, coefficient_curves, coefficient_rows
from lightning_sym.landscape import LearningCoefficientEstimate
from lightning_sym.reports.cells import Row, finite, numeric, text_table, unique
from lightning_sym.reports.table import ResultTable, RunResults

UNITS = {
    "estimate": "local learning coefficient; empty if it was refused",
    "standard_error": "of the estimate, with chains as units",
    "exact": "what the mean of such chains is, at their temperature, step and localisation; empty if not known",
    "theory": "learning coefficient; empty if not known",
    "refusal": "why there is no estimate",
    "ratio": "loss above the reference in the last quarter of the chains, over that in the second",
    "distance_ratio": "the same of the distance to the weights at which chains begin",
    "agreement": "potential scale reduction of the losses after the burn-in; 1 if chains agree",
    "inverse_temperature": "n beta, per unit of loss",
    "localisation": "gamma, per squared weight",
    "step": "squared weights",
    "step_curvature": "step times the largest curvature of the chains' potential",
    "curvature": "largest eigenvalue of the Hessian of the loss, upper estimate, where chains begin",
    "farthest_curvature": "the largest of these where chains end",
    "reference": "loss where chains begin",
    "distance": "mean distance of chains at their end to where they begin",
}
_ROWS, _CHAINS = 300, 6  # of a trace that is kept
_MOST_PANELS, _MOST_NOTES = 16, 4


def coefficient_record(found: LearningCoefficientEstimate) -> dict[str, Any]:
    """Return what is kept of an estimate, as plain values: ``values`` for a row, and some ``traces``.

    Args:
        found: The estimate.
    """
    (ratio, ratio_error), (distance_ratio, _) = found.ratio, found.distance_ratio
    above = found.inverse_temperature * (found.losses - found.reference)
    places = torch.linspace(0, len(above) - 1, min(_ROWS, len(above))).long()
    values = {
        "estimate": found.estimate,
        "standard_error": found.standard_error,
        "refusal": found.refusal,
        "ratio": finite(ratio),
        "ratio_error": finite(ratio_error),
        "distance_ratio": finite(distance_ratio),
        "agreement": finite(found.agreement),
        "samples": found.samples,
        "parameters": found.parameters,
        "method": found.method,
        "chains": found.losses.shape[1],
        "escaped": len(found.escaped),
        "draws": len(found.losses),
        "draw_every": found.draw_every,
        "burn_in": found.burn_in,
        "inverse_temperature": found.inverse_temperature,
        "localisation": found.localisation,
        "step": found.step,
        "step_curvature": found.step_curvature,
        "curvature": found.curvature,
        "farthest_curvature": found.farthest_curvature,
        "reference": found.reference,
        "distance": finite(float(found.distances[-1].mean())),
        "cautions": " ".join(found.cautions),
    }
    traces = {
        "steps": (places * found.draw_every).tolist(),
        "chains": above[places, :_CHAINS].tolist(),
        "mean": above[places].nanmean(1).tolist(),
    }
    return {"values": values, "traces": traces}


def refused_record(reason: str) -> dict[str, Any]:
    """Return what is kept of a network for which no chains could be run.

    Args:
        reason: Why, in one sentence.
    """
    return {
        "values": {"estimate": None, "standard_error": None, "refusal": reason, "cautions": ""},
        "traces": {"steps": [], "chains": [], "mean": []},
    }


def short_refusal(values: Row) -> str:
    """Return in a few words why there is no estimate; empty if there is one."""
    refusal = values["refusal"]
    if not refusal:
        return ""
    if values.get("escaped"):
        return "left to infinity"
    if ": " in refusal:
        which = "distance_ratio" if ": the distance" in refusal else "ratio" if ": the loss" in refusal else ""
        ratio = values.get(which)
        return str(refusal.partition(":")[0]) + (
            "" if ratio is None else f" {ratio:.2f}" if ratio < 1000 else f" {ratio:.0e}"
        )
    return "not finite" if "not finite" in refusal else "no minimum"


def coefficient_results(
    entries: Sequence[tuple[Row, Mapping[str, Any]]],
    *,
    title: str,
    about: Mapping[str, Any],
    name: str = "learning_coefficient",
) -> RunResults:
    """Say what chains found.

    Args:
        entries: What is known of each network (``network``, its name; ``epoch`` and ``step`` of training; ``exact`` and
            ``theory`` where they are known), and its :func:`coefficient_record`; in the order of time.
        title: For tables and figures.
        about: What is needed to make the tables again.
        name: Name of the files.
    """
    columns = dict.fromkeys(key for _, record in entries for key in record["values"])
    rows = [{**head, **columns, **record["values"]} for head, record in entries]
    traces = [
        {**head, "step_of_chain": step, "mean": finite(mean), **{f"chain_{i}": finite(v) for i, v in enumerate(chains)}}
        for head, record in entries
        for step, mean, chains in zip(*(record["traces"][key] for key in ("steps", "mean", "chains")), strict=True)
    ]
    last = [entry for entry in entries if entry[0].get("epoch") == entries[-1][0].get("epoch")]
    shown = [{**head, **record["values"]} for head, record in last]
    refused = sum(bool(row["refusal"]) for row in shown)
    notes = [f"{row['network']}: {row['refusal']}" for row in shown if row["refusal"]]
    notes += [f"{row['network']}: {row['cautions']}" for row in shown if row["cautions"] and not row["refusal"]]
    more = [f"{len(notes) - _MOST_NOTES} more notes are in {name}.csv"] if len(notes) > _MOST_NOTES else []
    found = [row["estimate"] for row in shown if row["estimate"] is not None]
    numbers = {f"{name}/refused": float(refused)}
    if found and "theory" not in shown[0]:
        numbers[f"{name}/final"] = sum(found) / len(found)
    return RunResults(
        [
            ResultTable(name, "local learning coefficients by Langevin chains", rows, UNITS, about),
            ResultTable(f"{name}_traces", "nb (L - reference) along chains", traces, UNITS, about),
        ],
        _figures(entries, last, title, name),
        numbers=numbers,
        headline=f"{name}/final" if f"{name}/final" in numbers else None,
        shown=_shown(shown, title),
        notes=["± standard error, with chains as units", *notes[:_MOST_NOTES], *more],
        places={"picture": f"{name}.png", "chains": f"{name}_traces.png", "table": f"{name}.csv"},
    )


def _figures(
    entries: Sequence[tuple[Row, Mapping[str, Any]]],
    last: Sequence[tuple[Row, Mapping[str, Any]]],
    title: str,
    name: str,
) -> Iterator[tuple[str, Figure]]:
    epochs = unique([head for head, _ in entries], "epoch") if "epoch" in entries[0][0] else []
    title = f"Learning coefficients: {title}"
    if len(epochs) > 1:
        networks = unique([head for head, _ in entries], "network")
        table = [[math.nan] * len(networks) for _ in epochs]
        refused = [0] * len(epochs)
        for head, record in entries:
            row = epochs.index(head["epoch"])
            table[row][networks.index(head["network"])] = numeric(record["values"]["estimate"])
            refused[row] += bool(record["values"]["refusal"])
        yield name, coefficient_curves(epochs, table, refused, title=title)
    else:
        bars = [
            Coefficient(
                head["network"],
                estimate=numeric(record["values"]["estimate"]),
                error=numeric(record["values"]["standard_error"]),
                exact=numeric(head.get("exact")),
                theory=numeric(head.get("theory")),
                refused=short_refusal(record["values"]),
            )
            for head, record in last
        ]
        yield name, coefficient_rows(bars, title=title)
    panels = [
        ChainTraces(
            f"{head['network']}" + (f": {short_refusal(record['values'])}" if record["values"]["refusal"] else ""),
            record["traces"]["steps"],
            record["traces"]["chains"],
            record["traces"]["mean"],
            numeric(head.get("exact")),
            record["values"]["burn_in"] * record["values"]["draw_every"],
            bool(record["values"]["refusal"]),
        )
        for head, record in [entry for entry in last if entry[1]["traces"]["steps"]][:_MOST_PANELS]
    ]
    if panels:
        yield f"{name}_traces", chain_traces(panels, title=f"Chains behind them: {title.partition(': ')[2]}")


def _shown(rows: Sequence[Row], title: str) -> Table:
    known = "theory" in rows[0]
    columns = ["landscape" if known else "network", "estimate", *(["exact", "theory"] if known else []), "chains"]
    lines = []
    for row in rows:
        estimate = "-" if row["estimate"] is None else f"{row['estimate']:.3f} ± {row['standard_error']:.3f}"
        beside = ["-" if row[key] is None else f"{row[key]:.3f}" for key in (("exact", "theory") if known else ())]
        lines.append([row["network"], estimate, *beside, short_refusal(row) or "stationary"])
    return text_table(f"Learning coefficients: {title}", columns, lines, whole=columns, compact=True)
