"""Learning coefficients by chains, or the reasons for refusal: rows, tables and figures."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.landscape import LearningCoefficientEstimate
from lightning_sym.reports.report import ResultTable, Row, RunResults, finite, text_table, unique

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
    """Return the record of an estimate, as plain values: ``values`` for a row, and some ``traces``.

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
    """Return the record of a network without chains.

    Args:
        reason: Why, in one sentence.
    """
    return {
        "values": {"estimate": None, "standard_error": None, "refusal": reason, "cautions": ""},
        "traces": {"steps": [], "chains": [], "mean": []},
    }


def short_refusal(values: Row) -> str:
    """Return the reason for refusal in a few words; empty if there is an estimate."""
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
    """Report the estimates of chains.

    Args:
        entries: Facts about each network (``network``, its name; ``epoch`` and ``step`` of training; ``exact`` and
            ``theory`` where they are known), and its :func:`coefficient_record`; in the order of time.
        title: For tables and figures.
        about: Everything needed to make the tables again.
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
        _figures(rows, traces, title, name),
        numbers=numbers,
        headline=f"{name}/final" if f"{name}/final" in numbers else None,
        shown=_shown(shown, title),
        notes=["± standard error, with chains as units", *notes[:_MOST_NOTES], *more],
        places={"picture": f"{name}.png", "chains": f"{name}_traces.png", "table": f"{name}.csv"},
    )


_OVER_TRAINING = Chart(
    [
        Panel(
            [
                Marks("estimate", "epoch", label="mean of those that are stationary"),
                Marks("estimate", "epoch", kind="dots", label="networks", look={"ms": 7, "alpha": 0.6}),
            ],
            xlabel="epoch", ylabel="learning coefficient", bottom=0, whole=True,
        ),
        Panel([Marks("refused", "epoch", kind="steps", label="refused", look={"color": "#7f7f7f"}, table="refused")],
              xlabel="epoch", ylabel="refused", bottom=0, whole=True),
    ],
    "Learning coefficients: {title}",
    share="x",
)  # fmt: skip
_AT_THE_END = Chart(
    [
        Panel(
            [
                Marks("theory", "name", kind="dots", label="learning coefficient", look={"marker": "D", "ms": 6.5}),
                Marks("exact", "name", kind="dots", label="exact for these chains", look={"marker": "|", "ms": 13}),
                Marks("estimate", "name", kind="error", label="estimate", error=["standard_error"],
                      spans=["± standard error"], look={"ls": ""}),
            ],
            ylabel="learning coefficient", bottom=0, flat=True,
        )
    ],
    "Learning coefficients: {title}",
)  # fmt: skip
_TRACES = Chart(
    [
        Panel(
            [
                *(Marks(f"chain_{chain}", "step_of_chain", label="chains", look={"color": "#56b4e9", "lw": 0.5})
                  for chain in range(_CHAINS)),
                Marks("mean", "step_of_chain", label="mean of all chains", look={"color": "#0072b2", "lw": 0.8}),
                Marks("mean", "step_of_chain", label="... after the burn-in", look={"color": "#0072b2", "lw": 2.4},
                      where=lambda row: row["step_of_chain"] >= row["burn_in"]),
            ],
            "{name}", "step", "nβ (L - L₀)", ["name"], bottom=0, top=lambda row: row["top"],
            levels=lambda row: {} if row.get("exact") is None else {"exact": row["exact"]},
        )
    ],
    "Chains behind them: {title}",
)  # fmt: skip


def _figures(
    rows: Sequence[Row],
    traces: Sequence[Row],
    title: str,
    name: str,
) -> Iterator[tuple[str, Figure]]:
    epochs = unique(rows, "epoch") if "epoch" in rows[0] else []
    last = [row for row in rows if row.get("epoch") == rows[-1].get("epoch")]
    named = [{**row, "name": _said(row)} for row in last]
    if len(epochs) > 1:
        refused = [
            {"epoch": epoch, "refused": sum(bool(row["refusal"]) for row in rows if row["epoch"] == epoch)}
            for epoch in epochs
        ]
        yield from _OVER_TRAINING.named(name, {"estimates": rows, "refused": refused}, title)
    else:
        yield from _AT_THE_END.named(name, named, title)
    drawn = {row["network"]: row for row in last}
    ended = [row for row in traces if row.get("epoch") == rows[-1].get("epoch")]
    means = {network: [row["mean"] for row in ended if row["network"] == network] for network in drawn}
    # Chains that diverge would hide the others.
    levels = {
        network: row.get("exact") or median(mean for mean in means[network] if mean is not None)
        for network, row in drawn.items()
        if any(mean is not None for mean in means[network])
    }
    panels = []
    for row in (row for row in ended if row["network"] in drawn):
        own, level = drawn[row["network"]], levels.get(row["network"], 0.0)
        top = 3 * min(level, 1e30) if level > 0 else None
        heights = {key: row[key] for key in row if key == "mean" or key.startswith("chain_")}
        if top is not None:  # beyond the axis, and small enough to be drawn
            heights = {key: None if value is None else min(value, 10 * top) for key, value in heights.items()}
        burn_in = own["burn_in"] * own["draw_every"]
        panels.append({**row, **heights, "name": _said(own), "burn_in": burn_in, "top": top})
    most = unique(panels, "name")[:_MOST_PANELS]
    yield from _TRACES.named(f"{name}_traces", [row for row in panels if row["name"] in most], title)


def _said(row: Row) -> str:
    """Return the name of a network, with the reason where it was refused."""
    return f"{row['network']}: {short_refusal(row)}" if row["refusal"] else str(row["network"])


def _shown(rows: Sequence[Row], title: str) -> Table:
    known = "theory" in rows[0]
    columns = ["landscape" if known else "network", "estimate", *(["exact", "theory"] if known else []), "chains"]
    lines = []
    for row in rows:
        estimate = "-" if row["estimate"] is None else f"{row['estimate']:.3f} ± {row['standard_error']:.3f}"
        beside = ["-" if row[key] is None else f"{row[key]:.3f}" for key in (("exact", "theory") if known else ())]
        lines.append([row["network"], estimate, *beside, short_refusal(row) or "stationary"])
    return text_table(f"Learning coefficients: {title}", columns, lines, whole=columns, compact=True)
