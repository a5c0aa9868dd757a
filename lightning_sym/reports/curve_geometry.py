"""The geometry along curves: rows, tables and figures of their points."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from rich.table import Table

from lightning_sym._tags import details, tag
from lightning_sym.connectivity import CurveShape, PointGeometry
from lightning_sym.connectivity.curves import CurveKind
from lightning_sym.connectivity.geometry import DIRECTIONS, TOLERANCE
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports.report import ResultTable, Row, RunResults, bold, finite, numeric, text_table

UNITS = {
    "t": "place on the curve, 0 (first network) to 1 (second network)",
    "loss": "mean loss, nats for the cross-entropy",
    "gradient_norm": "norm of the gradient of the loss by the weights",
    "speed": "norm of the derivative of the curve by t",
    "..._norm": "norm of the Hessian's product with the direction, of length 1",
    "..._curvature": "second derivative of the loss along the direction, of length 1",
    "eigenvalue_...": "the largest eigenvalues of the Hessian",
    "trace": "trace of the Hessian; trace_error: its standard error, 0 if all eigenvalues were computed",
    "rank": "of the Jacobian of the outputs by the weights; nullity: parameters minus rank",
    "orbit_dimension": "dimension of the symmetry's orbit: the nullity is at least that",
    "cosine_to_start, cka_to_start": "likeness of the Jacobians of the outputs by the input to those at t = 0",
    "probe_from_start": "accuracy of a linear classifier of Jacobians by the input, trained at t = 0, tested here",
    "probe_here": "the same, trained here",
    "probe": "the same, trained at t and tested at other_t; probe_back: the other way round",
    "..._identity": "relative deviation of both sides, by central differences in t with the step beside it",
    "tolerance": "eigenvalues of smaller magnitude are counted: relative to the largest, or absolute",
    "density": "of eigenvalues, smoothed with Gaussians of standard deviation width; one over eigenvalues",
}
# Number of points of a written density.
_GRID = 400
# Tolerances of the counts in the figure.
_COUNTED = (1e-3, 1e-6)


class CurveOf(NamedTuple):
    """Name of a curve: the numbers of the members at its endpoints, and its kind."""

    first: int
    second: int
    kind: CurveKind

    @property
    def title(self) -> str:
        """For example ``0-1 bezier``."""
        return f"{self.first}-{self.second} {self.kind}"


Shapes = Mapping[CurveOf, CurveShape]


def curve_geometry_results(shapes: Shapes, *, title: str, about: Mapping[str, Any]) -> RunResults:
    """Report the geometry along curves.

    Args:
        shapes: By curve.
        title: For tables and figures.
        about: Everything needed to make the tables again.
    """
    if not shapes:
        return RunResults([], notes=["no curve was kept, so that there is nothing to look along"])
    rows, near, densities = geometry_rows(shapes), near_zero_rows(shapes), density_rows(shapes)
    tables = [ResultTable("geometry", "the geometry at points of curves", rows, UNITS, about)]
    for name, what, found in (
        ("geometry_near_zero", "eigenvalues near zero at points of curves", near),
        ("geometry_density", "density of eigenvalues at points of curves", densities),
        ("geometry_jacobians", "likeness of Jacobians by the input between points", jacobian_rows(shapes)),
    ):
        tables += [ResultTable(name, what, found, UNITS, about)] if found else []
    first = next(iter(shapes))
    return RunResults(
        tables,
        _figures(shapes, rows, near, densities, title),
        numbers=_numbers(shapes),
        shown=_shown(shapes, title),
        notes=_notes(shapes),
        places={
            "table": "geometry.csv",
            "picture": f"{_figure_name(first)}.png",
        },
    )


def geometry_rows(shapes: Shapes) -> list[dict[str, Any]]:
    """Return all numbers of each point of each curve."""
    rows = []
    for name, shape in shapes.items():
        count = max(len(point.spectrum.eigenvalues) for point in shape.points)
        for index, point in enumerate(shape.points):
            jacobian = point.jacobian
            row: dict[str, Any] = {**name._asdict()}
            row |= {key: getattr(point, key) for key in ("t", "loss", "gradient_norm", "speed")}
            for direction in DIRECTIONS:
                norm, curvature = point.directions.get(direction, (None, None))
                row |= {f"{direction}_norm": norm, f"{direction}_curvature": curvature}
            row |= {f"eigenvalue_{number + 1}": _eigenvalue(point, number) for number in range(count)}
            row |= {"trace": point.spectrum.trace, "trace_error": point.spectrum.trace_error}
            row |= {key: getattr(jacobian, key) for key in ("parameters", "equations", "rank", "nullity")}
            row |= {"orbit_dimension": shape.orbit_dimension}
            row |= {f"{key}_to_start": finite(float(getattr(shape, key)[0, index])) for key in ("cosine", "cka")}
            row |= {"probe_from_start": finite(float(shape.probe[0, index]))}
            row |= {"probe_here": finite(float(shape.probe[index, index]))}
            for identity in ("gradient_identity", "curvature_identity"):
                found = getattr(point, identity)
                row |= {identity: finite(found.deviation), f"{identity}_step": found.step}
            rows.append({**row, "note": "; ".join(point.notes)})
    return rows


def near_zero_rows(shapes: Shapes) -> list[dict[str, Any]]:
    """Return the counts of small eigenvalues, by tolerance, where all eigenvalues were computed."""
    return [
        {
            **name._asdict(),
            "t": point.t,
            "tolerance": tolerance,
            "relative": near.relative[tolerance],
            "absolute": near.absolute[tolerance],
            "eigenvalues": near.size,
            "negative": near.negative,
            "largest_gap_decades": near.gap,
            "below_gap": near.below_gap,
        }
        for name, shape in shapes.items()
        for point in shape.points
        if (near := point.spectrum.near_zero) is not None
        for tolerance in near.relative
    ]


def density_rows(shapes: Shapes) -> list[dict[str, Any]]:
    """Return the densities of eigenvalues, where they were estimated."""
    return [
        {**name._asdict(), "t": point.t, "eigenvalue": place, "density": height, "width": density.width}
        for name, shape in shapes.items()
        for point in shape.points
        if (density := point.spectrum.density) is not None
        for places in [density.grid(_GRID)]
        for place, height in zip(places.tolist(), density.at(places).tolist(), strict=True)
    ]


def jacobian_rows(shapes: Shapes) -> list[dict[str, Any]]:
    """Return the similarity of input Jacobians between every two points of each curve."""
    return [
        {
            **name._asdict(),
            "t": shape.points[a].t,
            "other_t": shape.points[b].t,
            "cosine": finite(float(shape.cosine[a, b])),
            "cka": finite(float(shape.cka[a, b])),
            "probe": finite(float(shape.probe[a, b])),
            "probe_back": finite(float(shape.probe[b, a])),
        }
        for name, shape in shapes.items()
        for a in range(len(shape.points))
        for b in range(a + 1, len(shape.points))
    ]


def _eigenvalue(point: PointGeometry, number: int) -> float | None:
    values = point.spectrum.eigenvalues
    return values[number] if number < len(values) else None


def _numbers(shapes: Shapes) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, shape in shapes.items():
        prefix = tag("geometry", f"pair-{name.first}-{name.second}", name.kind)
        tops = [numeric(_eigenvalue(point, 0)) for point in shape.points]
        found = {
            "top_eigenvalue/max": max(tops),
            "trace/max": max(point.spectrum.trace for point in shape.points),
            "gradient_norm/max": max(point.gradient_norm for point in shape.points),
            "jacobian_cosine/ends": float(shape.cosine[0, -1]),
            "jacobian_probe/ends": float(shape.probe[0, -1]),
            "identities/worst": shape.worst_deviation,
        }
        found |= {
            f"{direction}_product/max": max(numeric(p.directions.get(direction, (None,))[0]) for p in shape.points)
            for direction in DIRECTIONS
        }
        numbers |= details({f"{prefix}/{what}": value for what, value in found.items() if math.isfinite(value)})
    return numbers


def _figure_name(name: CurveOf) -> str:
    return f"geometry-{name.first}-{name.second}-{name.kind}"


def _chart(rows: Sequence[Row], *, dense: bool) -> Chart:
    """Return the eight panels of a curve; ``dense`` if there are densities of eigenvalues."""

    def panel(title: str, marks: Sequence[Marks], **look: Any) -> Panel:
        return Panel(marks, title, "place $t$ on the curve", **look)

    def lines(labels: Mapping[str, str], table: str = "geometry", **where: Any) -> list[Marks]:
        look = {"marker": "o", "ms": 4}
        return [Marks(name, "t", label=label, look=look, table=table, where=where) for name, label in labels.items()]

    tops = [name for name in rows[0] if name.startswith("eigenvalue_")]
    trace = {"ls": "--", "marker": "s", "ms": 4, "color": "#7f7f7f"}
    errors = Marks(
        "trace", "t", kind="error", label="trace", error=["trace_error"], spans=["± standard error"], look=trace
    )
    fine = {"marker": "", "ls": "-", "lw": 1.2}  # hundreds of places
    density = [Marks("density", "eigenvalue", ["t"], label="t = {t:g}", look=fine, table="density")]
    counts = [
        marks
        for tolerance in _COUNTED
        for how, words in (("relative", " of the largest"), ("absolute", ""))
        for marks in lines({how: f"|λ| < {tolerance:g}{words}"}, "near", tolerance=tolerance)
    ]
    ranks = {"rank": "rank", "nullity": "nullity", "orbit_dimension": "dimension of the orbit"}
    start = {"cosine_to_start": "mean cosine", "cka_to_start": "linear CKA", "probe_from_start": "probe's accuracy"}
    norms, curvatures = ({f"{name}_{what}": name for name in DIRECTIONS} for what in ("norm", "curvature"))
    identities = {
        "gradient_identity": "gradient along the curve",
        "curvature_identity": "second derivative of the loss",
    }
    panels = [
        panel("loss and gradient", lines({"loss": "loss", "gradient_norm": "norm of the gradient"})),
        panel(r"$\|H d\|$ for $\|d\| = 1$", lines(norms), log="y"),
        panel(r"$d^\top H d$ for $\|d\| = 1$", lines(curvatures), levels={"0": 0.0}),
        panel("eigenvalues and trace", [*lines({name: name.replace("_", " ") for name in tops}), errors], bottom=0),
        Panel(density, "density of eigenvalues, smoothed", "eigenvalue of the Hessian", log="y")
        if dense
        else panel("eigenvalues near zero", counts),
        panel("Jacobian by the weights", lines(ranks), log="y"),
        panel("Jacobian by the input, likeness to the start", lines(start), top=1.03),
        panel("identities: relative deviation", lines(identities), log="y", levels={"tolerance": TOLERANCE}),
    ]
    return Chart(panels, columns=2, size=(4.0, 3.1), legend="above")


def _figures(
    shapes: Shapes, rows: Sequence[Row], near: Sequence[Row], densities: Sequence[Row], title: str
) -> Iterator[tuple[str, Figure]]:
    for name in shapes:
        own, zeros, dense = (
            [row for row in table if (row["first"], row["second"], row["kind"]) == name]
            for table in (rows, near, densities)
        )
        nothing = {"t": own[0]["t"], "tolerance": _COUNTED[0], "relative": None, "absolute": None}
        highest = max((row["density"] for row in dense), default=0)
        tables: dict[str, Sequence[Row]] = {
            "geometry": own,
            "near": zeros or [nothing],
            "density": [{**row, "density": max(row["density"], 1e-6 * highest)} for row in dense],
        }
        chart = replace(_chart(own, dense=bool(dense)), title=f"Along the curve {name.title}: {{title}}")
        yield from chart.named(_figure_name(name), tables, title)


def _shown(shapes: Shapes, title: str) -> Table:
    columns = ["t", "loss", *(f"‖Hd‖\n{name}" for name in DIRECTIONS), "top\neigenv.", "trace"]
    lines: list[list[str] | None] = []
    for name, shape in shapes.items():
        lines.append([bold(f"{name.first}-{name.second}"), bold(name.kind)])
        for point in shape.points:
            norms = [point.directions.get(direction, (None,))[0] for direction in DIRECTIONS]
            numbers = [point.loss, *norms, _eigenvalue(point, 0), point.spectrum.trace]
            lines.append([f"{point.t:.2g}", *map(_short, numbers)])
        lines.append(None)
    return text_table(f"Along curves: {title}", columns, lines, whole=columns, compact=True)


def _short(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2g}"


def _probed(shape: CurveShape) -> str:
    """Return the accuracy at both ends of a probe trained at the start."""
    here, there = float(shape.probe[0, 0]), float(shape.probe[0, -1])
    if math.isnan(here):
        return ""
    return f"; a linear probe on those of the start is right for {here:.0%} there, {there:.0%} at the end"


def _notes(shapes: Shapes) -> list[str]:
    worst = max(shape.worst_deviation for shape in shapes.values())
    verdict = "hold" if worst <= TOLERANCE else "[bold]do not hold[/bold]"
    notes = [
        f"both identities {verdict} at every point: largest relative deviation {worst:.1e} (tolerance {TOLERANCE:g})"
    ]
    for name, shape in shapes.items():
        notes.append(
            f"{name.title}: Jacobians by the input of both ends: cosine {float(shape.cosine[0, -1]):.3f}, CKA "
            f"{float(shape.cka[0, -1]):.3f}{_probed(shape)}"
        )
        ranks = [point.jacobian for point in shape.points]
        found = sorted({each.rank for each in ranks if each.rank is not None})
        if found:
            span = f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"
            outputs, weights = ranks[0].equations, ranks[0].parameters
            orbit = shape.orbit_dimension
            beside = "" if orbit is None else f"; dimension of the orbit {orbit:,}"
            notes.append(f"{name.title}: Jacobian of {outputs:,} outputs by {weights:,} weights: rank {span}{beside}")
        notes += [f"{name.title}: {note}" for note in dict.fromkeys(n for point in shape.points for n in point.notes)]
    return notes
