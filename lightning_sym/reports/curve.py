"""Loss and accuracy along curves and linear paths between the members of a zoo."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from lightning_sym._tags import details, tag
from lightning_sym.connectivity import Barrier, Curve, CurveSummary
from lightning_sym.figures import CurvePlane, curve_planes
from lightning_sym.landscape import WeightPlane
from lightning_sym.reports.paths import path_chart
from lightning_sym.reports.report import ResultTable, Row, RunResults, averages, finite, grouped, text_table, unique

Pair = tuple[int, int]
SPLITS = ("train", "test")
LINE, MATCHED = "line", "matched"
UNITS = {
    "path": f"the straight line ({LINE!r}), that after matching ({MATCHED!r}), or the kind of curve",
    "t": "place on the path, 0 (first network) to 1 (second network)",
    "loss": "mean cross-entropy, nats; or the mean of the task's own loss",
    "accuracy": "fraction of inputs, 0 to 1",
    "..._start, ..._end": "at t = 0 and t = 1",
    "..._lowest, ..._highest, ..._mean": "over all places, equally spaced in t",
    "..._integral": "mean over the length of the path",
    "loss_barrier": "largest loss on the path above the straight line between the losses of its ends, nats",
    "accuracy_barrier": "fraction of inputs, 0 to 1: as loss_barrier, positive where the path is worse",
    "length": "length of the path, in units of weights",
    "distance": "Euclidean distance between the weights of both ends",
    "x, y": "place in the plane through both ends and the bend: along the straight line, and across",
    "std": "standard deviation over pairs, sample form",
}


@dataclass(frozen=True, eq=False)
class MeasuredPath:
    """Losses and accuracies on one path between the two networks of a pair.

    Attributes:
        curve: The curve; the straight line as one without bends.
        along: Loss and accuracy, by split.
    """

    curve: Curve
    along: Mapping[str, Barrier]


@dataclass(frozen=True, eq=False)
class MeasuredPlane:
    """The loss in the plane of a curve.

    Attributes:
        name: Curve and pair, for example ``"0-1, bezier"``.
        curve: The curve.
        plane: The plane.
        x: Along its first axis. Shape ``[A]``.
        y: Along its second axis. Shape ``[B]``.
        loss: Shape ``[A, B]``.
    """

    name: str
    curve: Curve
    plane: WeightPlane
    x: Tensor
    y: Tensor
    loss: Tensor


Paths = Mapping[str, Mapping[Pair, MeasuredPath]]


def curve_results(
    paths: Paths,
    planes: Sequence[MeasuredPlane],
    *,
    title: str,
    about: Mapping[str, Any],
    notes: Sequence[str] = (),
    loss: str | None = None,
) -> RunResults:
    """Report the loss along curves and along linear paths.

    Args:
        paths: Evaluations by path (``"line"``, ``"matched"``, ``"bezier"``, ``"chain"``) and pair.
        planes: Planes of some curves.
        title: Title of tables and figures.
        about: Everything needed to make the tables again.
        notes: Lines below the table on the terminal.
        loss: Name of the loss; None for the cross-entropy.
    """
    rows = path_rows(paths)
    classified = all(row["accuracy_lowest"] is not None for row in rows)
    summary, points = curve_summary(rows), point_rows(paths)
    barriers, highest = (
        {tag(name, f"{row['split']}_loss", row["path"]): row[f"loss_{name}"] for row in summary}
        for name in ("barrier", "highest")
    )
    numbers = {**barriers, **details(highest)}
    curved = [tag("barrier", "train_loss", row["path"]) for row in summary
              if row["split"] == "train" and row["path"] not in (LINE, MATCHED)]  # fmt: skip
    what = "ways between networks of a zoo: "
    tables = [
        ResultTable("summary", what + "means over pairs", summary, UNITS, about),
        ResultTable("curves", what + "of each pair", rows, UNITS, about),
        ResultTable("points", what + "all places", points, UNITS, about),
    ]
    places = {"picture": "along.png", "table": "summary.csv", "pairs": "curves.csv"}
    if planes:
        tables.append(ResultTable("planes", "loss in the planes of curves", plane_rows(planes), UNITS, about))
        places["planes"] = "planes.png"
    curves = {
        f"curve-{pair[0]}-{pair[1]}-{kind}.safetensors": path.curve.to_bytes()
        for kind, own in paths.items()
        if kind not in (LINE, MATCHED)
        for pair, path in own.items()
    }
    if curves:
        places["curve"] = next(iter(curves))
    return RunResults(
        tables,
        _figures(points, planes, title, loss),
        files=curves,
        numbers=numbers,
        headline=min(curved, key=lambda name: numbers[name], default=None),
        shown=_shown(summary, title),
        notes=[
            *notes,
            f"mean over pairs; highest and barrier along the path, {'nats' if loss is None else f'of {loss}'}"
            + ("; lowest accuracy along it, %" if classified else ""),
        ],
        places=places,
    )


def path_rows(paths: Paths) -> list[dict[str, Any]]:
    """Return loss, accuracy, barriers and lengths of each path and pair, by split."""
    found = []
    for name, own in paths.items():
        for pair, path in own.items():
            ends = path.curve.points[[0, -1]].double()
            places = next(iter(path.along.values())).t
            steps = path.curve.steps(places)
            for split, along in path.along.items():
                row: dict[str, Any] = {"path": name, "first": pair[0], "second": pair[1], "split": split}
                for quantity, values in (("loss", along.loss), ("accuracy", along.accuracy)):
                    summary = vars(CurveSummary.of(values, steps)) if values is not None else {}
                    for part in ("start", "end", "lowest", "highest", "mean", "integral"):
                        row[f"{quantity}_{part}"] = summary.get(part)
                row |= {"loss_barrier": along.loss_barrier, "accuracy_barrier": along.accuracy_barrier}
                row |= {"length": float(steps.sum()), "distance": float((ends[1] - ends[0]).norm())}
                found.append(row)
    return found


def curve_summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return means over pairs, by path and split, with the standard deviation of the barrier."""
    found = []
    for key, own in grouped(rows, "path", "split"):
        mean = averages(own, [name for name in own[0] if name not in ("path", "split", "first", "second")])
        spread = float(np.std([row["loss_barrier"] for row in own], ddof=1)) if len(own) > 1 else math.nan
        found.append({**key, "pairs": len(own), **mean, "loss_barrier_std": finite(spread)})
    return found


def point_rows(paths: Paths) -> list[dict[str, Any]]:
    """Return loss and accuracy at each place of each path."""
    found = []
    for name, own in paths.items():
        for pair, path in own.items():
            for split, along in path.along.items():
                accuracy = [None] * len(along.t) if along.accuracy is None else along.accuracy.tolist()
                found += [
                    {"path": name, "first": pair[0], "second": pair[1], "split": split, "t": t, "loss": loss,
                     "accuracy": right}
                    for t, loss, right in zip(along.t.tolist(), along.loss.tolist(), accuracy, strict=True)
                ]  # fmt: skip
    return found


def plane_rows(planes: Sequence[MeasuredPlane]) -> list[dict[str, Any]]:
    """Return the loss at each point of each plane; None where it is not finite."""
    return [
        {"curve": plane.name, "x": x, "y": y, "loss": finite(loss)}
        for plane in planes
        for x, column in zip(plane.x.tolist(), plane.loss.tolist(), strict=True)
        for y, loss in zip(plane.y.tolist(), column, strict=True)
    ]


def _figures(
    points: Sequence[Row], planes: Sequence[MeasuredPlane], title: str, loss: str | None
) -> Iterator[tuple[str, Figure]]:
    chart = path_chart(
        points, "path", ["split"], title="Between two networks: {title}", panel="{split} data", loss=loss
    )
    yield from chart.named("along", points, title)
    if planes:
        yield "planes", curve_planes([_panel(plane) for plane in planes], title=f"Planes of curves: {title}")


def _panel(measured: MeasuredPlane) -> CurvePlane:
    plane, curve = measured.plane, measured.curve
    t = torch.linspace(0, 1, 61, dtype=torch.float64)
    places = [curve(place) for place in t.tolist()]
    return CurvePlane(
        measured.name,
        measured.x,
        measured.y,
        measured.loss,
        plane.coordinates(curve.points[[0, -1]]),
        plane.coordinates(curve.points[1:-1]),
        torch.stack([plane.coordinates(place) for place in places]),
        max(float(plane.residual(place)) for place in places),
    )


def _shown(summary: Sequence[Row], title: str) -> Table:
    columns = ["path", "train loss\nhighest", "barrier", "test loss\nhighest", "barrier", "accuracy\nlowest", "length"]
    by_path = {(row["path"], row["split"]): row for row in summary}
    classified = all(row["accuracy_lowest"] is not None for row in summary)
    lines = []
    for path in unique(summary, "path"):
        train, test = by_path[path, "train"], by_path[path, "test"]
        lines.append(
            [
                path,
                *(f"{row[name]:.4f}" for row in (train, test) for name in ("loss_highest", "loss_barrier")),
                *([f"{100 * test['accuracy_lowest']:.1f}"] if classified else []),
                f"{train['length']:.2f}",
            ]
        )
    columns = [column for column in columns if classified or "accuracy" not in column]
    return text_table(f"Curves: {title}", columns, lines, whole=columns[1:])
