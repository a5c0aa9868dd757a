"""Similarity of the layers of networks, compared with null values."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from lightning_sym._statistics import bootstrap_over_models
from lightning_sym._tags import tag
from lightning_sym.figures import Chart, HeatMap, Marks, Panel, measure_label, similarity_maps
from lightning_sym.reports.report import ResultTable, Row, RunResults, bold, finite, numeric, text_table, unique

Pair = tuple[int, int]
UNITS = {
    "similarity": "1: the same up to what the measure does not see; unitless; empty where layers cannot be compared",
    "untrained": "the similarity of networks of the same architecture with fresh weights",
    "shuffled": "the similarity when the second network is given the images in another order",
    "above_untrained": "similarity less that of the untrained networks, mean over pairs",
    "low, high": "95 % percentile interval for the mean over pairs, from 2000 bootstrap samples of the models",
    "std": "standard deviation over pairs, sample form",
    "live": "channels that are not zero on all images",
}
_ZOOS = ("first", "other")
_EXCESS = "above_untrained"
# Column, name, color and style of trained networks and of the nulls.
_KINDS = (
    ("similarity", "trained", "#0072b2", "-"),
    ("untrained", "untrained", "#d55e00", "--"),
    ("shuffled", "shuffled inputs", "#7f7f7f", ":"),
)
_LOOKS = {label: {"color": color, "ls": style, "lw": 2.0} for _, label, color, style in _KINDS}
_DEPTH = Chart(
    [
        Panel([Marks(kind, "first_layer", label=label, looks=_LOOKS, table="pairs") for kind, label, *_ in _KINDS],
              lambda row: measure_label(row["measure"]), ylabel="similarity", by=["measure"], top=1.03),
        Panel([Marks("share", "layer", ["weights"], looks=_LOOKS, table="channels")], "live channels",
              ylabel="fraction", top=1.03),
    ],
    "Similarity over depth: {title}",
    columns=2,
    share="xy",
)  # fmt: skip


@dataclass(frozen=True)
class Similarities:
    """Measured similarities.

    Attributes:
        values: By measure and kind (``trained``, ``untrained``, ``shuffled``), shape ``[pairs, layers of the first,
            layers of the second]``.
        pairs: Numbers of the members of each pair.
        layers: Names of the layers of first and of second members.
        live: By kind, zoo (0 or 1) and member: live channels and all channels of each layer.
        one_zoo: Whether both members of a pair are of the same zoo.
    """

    values: Mapping[str, Mapping[str, Tensor]]
    pairs: Sequence[Pair]
    layers: tuple[Sequence[str], Sequence[str]]
    live: Mapping[str, Mapping[tuple[int, int], Sequence[tuple[int, int]]]]
    one_zoo: bool = True

    @property
    def models(self) -> list[Pair]:
        """The pairs as pairs of different models: members of two zoos may have the same number."""
        step = 0 if self.one_zoo else 1 + max(max(pair) for pair in self.pairs)
        return [(first, second + step) for first, second in self.pairs]

    def kinds(self, measure: str) -> dict[str, NDArray[np.float64]]:
        """Return the values of a measure by column of the tables."""
        found = {"similarity" if kind == "trained" else kind: each for kind, each in self.values[measure].items()}
        if "untrained" in found:
            found[_EXCESS] = found["similarity"] - found["untrained"]
        return {name: each.double().numpy() for name, each in found.items()}

    def partners(self, measure: str) -> list[int]:
        """Return the partner of each layer of the first network: the place of a layer of the second.

        That is the one in the same place; where the networks have different numbers of layers, the most similar one.
        """
        first, second = map(len, self.layers)
        if first == second:
            return list(range(first))
        return self.values[measure]["trained"].mean(0).nan_to_num(-math.inf).argmax(1).tolist()


def similarity_results(found: Similarities, *, title: str, about: Mapping[str, Any]) -> RunResults:
    """Report the similarity of networks by layer, with the null values.

    Args:
        found: Measured similarities.
        title: For tables and figures.
        about: Everything needed to make the tables again.
    """
    every = matrix_rows(found)
    summary = _beside(found, every)
    pairs, channels = pair_rows(found), channel_rows(found)
    what = "similarity of layers of networks: "
    numbers = {
        tag("similarity_mean", measure): float(np.mean([row["similarity"] for row in rows]))
        for measure in found.values
        if (rows := [row for row in summary if row["measure"] == measure and row["similarity"] is not None])
    }
    notes = [row["note"] for row in summary if row["note"].startswith("no interval")][:1]
    return RunResults(
        [
            ResultTable("summary", what + "each layer with its like, over pairs", summary, UNITS, about),
            ResultTable("matrices", what + "all layers with all, over pairs", every, UNITS, about),
            ResultTable("pairs", what + "all layers with all, each pair", pairs, UNITS, about),
            ResultTable("channels", "live channels of each network", channels, UNITS, about),
        ],
        _figures(found, pairs, channels, title),
        numbers=numbers,
        headline=next(iter(numbers), None),
        shown=_shown(summary, title),
        notes=[_legend(summary), *notes],
        places={"picture": "depth.png", "maps": "heat_maps.png", "table": "summary.csv", "pairs": "pairs.csv"},
    )


def similarity_of_zoos_results(
    found: Mapping[str, Similarities], *, title: str, about: Mapping[str, Any]
) -> RunResults:
    """Report the similarity of the networks of each zoo by layer, with the null values.

    Args:
        found: Measured similarities, by the names of the zoos.
        title: For the table and the figure.
        about: Everything needed to make the tables again.
    """
    summary = [
        {"zoo": name, **row}
        for name, similarities in found.items()
        for row in _beside(similarities, matrix_rows(similarities))
    ]
    pairs = [{"zoo": name, **row} for name, similarities in found.items() for row in pair_rows(similarities)]
    channels = [{"zoo": name, **row} for name, similarities in found.items() for row in channel_rows(similarities)]
    what = "similarity of layers of the networks of a zoo: "
    notes = list(dict.fromkeys(row["note"] for row in summary if row["note"].startswith("no interval")))
    return RunResults(
        [
            ResultTable("summary", what + "each layer with its like, over pairs", summary, UNITS, about),
            ResultTable("pairs", what + "all layers with all, each pair", pairs, UNITS, about),
            ResultTable("channels", "live channels of each network", channels, UNITS, about),
        ],
        _of_zoos(summary, title),
        shown=_shown(summary, title),
        notes=["mean over pairs; in brackets 95 % interval for the mean, over models", *notes],
        places={"picture": "zoos.png", "table": "summary.csv", "pairs": "pairs.csv"},
    )


def _of_zoos(summary: Sequence[Row], title: str) -> Iterator[tuple[str, Figure]]:
    """Yield the chart of zoos side by side; zoos named by numbers are places on a logarithmic axis."""
    ordered = all(re.fullmatch(r"\d+(\.\d+)?", row["zoo"]) and float(row["zoo"]) > 0 for row in summary)
    rows = [
        {**row, "place": place, "zoo": float(zoo) if ordered else zoo}
        for zoo in unique(summary, "zoo")
        for place, layer in enumerate(unique([row for row in summary if row["zoo"] == zoo], "first_layer"), 1)
        for row in summary
        if (row["zoo"], row["first_layer"]) == (zoo, layer)
    ]
    marks = [
        Marks(kind, "zoo", kind="error", label=label, error=[(f"{kind}_low", f"{kind}_high")],
              spans=["95 % interval over models"], look={"color": color, "ls": style if ordered else ""})
        for kind, label, color, style in _KINDS
    ]  # fmt: skip
    panel = Panel(
        marks, lambda row: f"{measure_label(row['measure'])}, layer {row['place']}", by=["place", "measure"],
        xlabel="zoo", log="x" if ordered else "", top=1.03,
    )  # fmt: skip
    chart = Chart([panel], "Similarity within zoos: {title}", columns=2, share="xy")
    yield from chart.named("zoos", sorted(rows, key=lambda row: row["place"]), title)


def matrix_rows(found: Similarities) -> list[dict[str, Any]]:
    """Return the similarity of each layer of the first with each of the second and the nulls, over pairs."""
    rows = []
    for measure in found.values:
        kinds = found.kinds(measure)
        table = np.stack(list(kinds.values()), axis=-1)  # pairs, layers, layers, kinds
        flat = table.reshape(len(table), -1)
        known = np.asarray(np.isfinite(flat).all(0))
        ends = {end: np.full(flat.shape[1], np.nan) for end in ("mean", "std", "low", "high")}
        note = "not comparable"
        models = len({model for pair in found.models for model in pair})
        if known.any():
            interval = bootstrap_over_models(found.models, flat[:, known])
            note = interval.note
            for end, values in ends.items():
                values[known] = getattr(interval, end)
        shaped = {end: values.reshape(table.shape[1:]) for end, values in ends.items()}
        for i, first in enumerate(found.layers[0]):
            for j, second in enumerate(found.layers[1]):
                row: dict[str, Any] = {"measure": measure, "first_layer": first, "second_layer": second}
                row |= {"pairs": len(found.pairs), "models": models}
                for k, kind in enumerate(kinds):
                    row[kind] = finite(shaped["mean"][i, j, k])
                    row |= {f"{kind}_{end}": finite(shaped[end][i, j, k]) for end in ("std", "low", "high")}
                rows.append({**row, "note": note if np.isfinite(shaped["mean"][i, j]).any() else "not comparable"})
    return rows


def _beside(found: Similarities, every: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of each layer and its partner."""
    width = len(found.layers[1])
    block = len(found.layers[0]) * width
    return [
        every[number * block + i * width + j]
        for number, measure in enumerate(found.values)
        for i, j in enumerate(found.partners(measure))
    ]


def pair_rows(found: Similarities) -> list[dict[str, Any]]:
    """Return every similarity that was measured."""
    return [
        {
            "measure": measure, "first": pair[0], "second": pair[1], "first_layer": first, "second_layer": second,
            **{
                "similarity" if kind == "trained" else kind: finite(float(values[number, i, j]))
                for kind, values in kinds.items()
            },
        }
        for measure, kinds in found.values.items()
        for number, pair in enumerate(found.pairs)
        for i, first in enumerate(found.layers[0])
        for j, second in enumerate(found.layers[1])
    ]  # fmt: skip


def channel_rows(found: Similarities) -> list[dict[str, Any]]:
    """Return the numbers of live channels of each network's layers."""
    return [
        {
            "zoo": _ZOOS[side],
            "member": number,
            "weights": kind,
            "layer": layer,
            "live": live,
            "channels": total,
        }
        for kind, networks in found.live.items()
        for (side, number), layers in networks.items()
        for layer, (live, total) in zip(found.layers[side], layers, strict=True)
    ]


def _live_share(found: Similarities, kind: str, side: int) -> list[float]:
    """Return the fraction of live channels of each layer, mean over the members of a zoo."""
    own = [layers for (zoo, _), layers in found.live.get(kind, {}).items() if zoo == side]
    return [float(np.mean([live / channels for live, channels in layer])) for layer in zip(*own, strict=True)]


def _figures(
    found: Similarities, rows: Sequence[Row], channels: Sequence[Row], title: str
) -> Iterator[tuple[str, Figure]]:
    other = 0 if found.one_zoo else 1
    maps = [
        HeatMap(
            measure_label(measure),
            {kind: values.nanmean(0).numpy() for kind, values in kinds.items() if kind in found.live},
        )
        for measure, kinds in found.values.items()
    ]
    labels = {kind: (_labels(found, kind, 0), _labels(found, kind, other)) for kind in found.live}
    yield "heat_maps", similarity_maps(maps, labels, title=f"Similarity, mean over pairs: {title}")
    beside = {
        (measure, found.layers[0][i], found.layers[1][j])
        for measure in found.values
        for i, j in enumerate(found.partners(measure))
    }
    pairs = [row for row in rows if (row["measure"], row["first_layer"], row["second_layer"]) in beside]
    live = [{**row, "share": row["live"] / row["channels"]} for row in channels if row["zoo"] == _ZOOS[0]]
    yield from _DEPTH.named("depth", {"pairs": pairs, "channels": live}, title)


def _labels(found: Similarities, kind: str, side: int) -> list[str]:
    """Return the names of layers, with the share of channels that are live."""
    shares = _live_share(found, kind, side)
    return [f"{name}\n{share:.0%} live" for name, share in zip(found.layers[side], shares, strict=True)]


def _shown(summary: Sequence[Row], title: str) -> Table:
    nulls = [name for name in ("untrained", "shuffled") if name in summary[0]]
    excess = ["above untrained"] if "untrained" in nulls else []
    columns = ["layer", "similarity", *nulls, *excess]
    lines: list[list[str] | None] = []
    for measure in unique(summary, "measure"):
        lines.append([bold(measure)])
        for row in [row for row in summary if row["measure"] == measure]:
            first, second = row["first_layer"], row["second_layer"]
            cells = [_number(row, "similarity", spread="zoo" not in row), *(_number(row, name) for name in nulls)]
            cells += [_number(row, _EXCESS, interval=True) for _ in excess]
            layer = first if first == second else f"{first}, {second}"
            lines.append([f"{row['zoo']}, {layer}" if "zoo" in row else layer, *cells])
        lines.append(None)
    return text_table(f"Similarity: {title}", columns, lines, whole=columns[1:], compact=True)


def _legend(summary: Sequence[Row]) -> str:
    spread = any(value is not None for row in summary for name, value in row.items() if name.endswith("_std"))
    interval = any(
        math.isfinite(numeric(value)) for row in summary for name, value in row.items() if name.endswith("_low")
    )
    text = "mean ± std over pairs" if spread else "mean over pairs"
    return text + ("; in brackets 95 % interval for the mean, over models" if interval else "")


def _number(row: Row, name: str, *, spread: bool = False, interval: bool = False) -> str:
    if row[name] is None:
        return "-"
    text = f"{row[name]:{'+' if interval else ''}.3f}"
    if spread and row[f"{name}_std"] is not None:
        text += f" ± {row[f'{name}_std']:.3f}"
    low, high = (numeric(row[f"{name}_{end}"]) for end in ("low", "high"))
    return f"{text} \\[{low:.3f}, {high:.3f}]" if interval and math.isfinite(low) else text
