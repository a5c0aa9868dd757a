"""Results of a search for equivalent weights: candidates, points, and sets on planes through the points."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from safetensors.torch import save
from torch import Tensor

from lightning_sym._tags import tag
from lightning_sym.figures import planes_beside, search_curves
from lightning_sym.landscape import FunctionScale, OrbitDistances, SetNumbers, TwoUnitClass
from lightning_sym.reports.cells import Row, finite, picked, text_table
from lightning_sym.reports.equivalence_grids import EvaluatedGrid, PlanePoint, grid_figures
from lightning_sym.reports.table import ResultTable, RunResults

UNITS = {
    "J": "mean over inputs of the squared distance to the teacher's outputs, summed over outputs",
    "J0, V": "J of the zero function, and of the best constant",
    "R": "J / V on held-out inputs: 1 is no better than a constant",
    "steps": "optimizer steps since the start of the candidate's round",
    "steps_below": "first step whose batch had a J below so many times J0; empty if none had",
    "distance": "Euclidean distance of weights to those of the teacher",
    "orbit_distance": "the same to the nearest image of the teacher under its symmetry group",
    "coefficients": "coordinates in the orthonormal basis of the plane, from the first point",
    "residual": "distance to the plane",
    "fraction": "part of the grid's points at which J < epsilon",
    "betti": "Betti numbers of the union of the cells around these points: pieces, loops, cavities",
    "joining": "smallest epsilon at which two found points are in one piece of the set, within the plane and the box",
    "exponent": "d log volume / d log epsilon: half the codimension of the class within the plane",
}
_TOUCHING = 1e-5  # weights nearer to an orbit than this are on it, up to single precision
_MOST_WARNINGS = 3
_NAMES = {"reached": "nearly equivalent", "elsewhere": "on its way or stuck"}


@dataclass(frozen=True, eq=False)
class SearchData:
    """A search that has ended.

    Attributes:
        title: Title of the search, for figures.
        outcomes: By number of the candidate: ``round``, ``steps``, ``loss`` (J), ``held_out`` (J there), ``milestones``
            (the step of each, -1 if not reached), ``stopped`` (why, or empty), ``found``, and maybe ``weights``.
        milestones: The J that these count, in units of J0.
        tolerance: Largest J of found points, in units of J0.
        success_fraction: Part of the candidates that was found.
        scale: J0 and V on the inputs of the search.
        held_out: The same on the held-out inputs.
        curves: Steps ``[T]``, J of each of the ``C`` candidates ``[T, C]``, and which of them were found ``[C]``.
        exact: The exact class on these inputs, where there is a theory of it.
    """

    title: str
    outcomes: Mapping[int, Row]
    milestones: Sequence[float]
    tolerance: float
    success_fraction: float
    scale: FunctionScale
    held_out: FunctionScale
    curves: tuple[Tensor, Tensor, Tensor]
    exact: TwoUnitClass | None = None


def equivalence_results(
    search: SearchData,
    grids: Sequence[EvaluatedGrid],
    points: Sequence[Row],
    stored: Mapping[str, Tensor],
    *,
    scale: FunctionScale,
    exact: TwoUnitClass | None,
    missing: Sequence[str],
    about: Mapping[str, Any],
) -> RunResults:
    """Report the points of a search and the sets around them.

    Args:
        search: The search.
        grids: J on planes.
        points: As :func:`point_rows` gives them.
        stored: Weights by name, for use elsewhere; bases and centres of the planes are added.
        scale: J0 and V on the grids' inputs.
        exact: The exact class on the grids' inputs, where there is a theory of it.
        missing: Sentences on the grids that there are not.
        about: Everything needed to make the tables again.
    """
    if exact is not None:
        facts = picked(exact, "kind", "dimension", "components", "barrier")
        about = {**about, "exact": {**facts, "moments": asdict(exact.moments)}}
    candidates = candidate_rows(search)
    tensors, files = dict(stored), {}
    for one in grids:
        tensors[f"basis-{one.name}"] = one.plane.basis.cpu().contiguous()
        tensors[f"centre-{one.name}"] = one.plane.centre.cpu().contiguous()
        content = {"J": torch.from_numpy(one.values).contiguous(), "axis": one.grid.axis.contiguous()}
        files[f"grid-{one.name}.safetensors"] = save(content)
    worst = max((row["R"] for row in points if row["steps"] is not None), default=math.nan)
    numbers = {"success_fraction": search.success_fraction, "r/highest_kept": worst}
    for one in grids:
        numbers[tag("fraction", one.name)] = one.numbers.fraction
        numbers[tag("pieces", one.name)] = float(one.numbers.components_full)
    pictures = [("set", 3), ("contour", 2)]
    drawn = [f"{kind}-{one.name}" for kind, dimension in pictures for one in grids if one.grid.dimension == dimension]
    return RunResults(
        [
            ResultTable("candidates", "all candidates of the search", candidates, UNITS, about),
            ResultTable("points", "points that planes go through", points, UNITS, about),
            ResultTable("sets", "sets of weights with J < epsilon", set_rows(grids), UNITS, about),
        ],
        _figures(search, grids, scale, exact),
        files={**files, "found.safetensors": save(tensors)},
        numbers={name: value for name, value in numbers.items() if math.isfinite(value)},
        headline="r/highest_kept" if math.isfinite(worst) else None,
        shown=_shown(points),
        notes=[*_notes(candidates, grids), *missing],
        places={"picture": f"{[*drawn, 'search'][0]}.png", "table": "sets.csv", "points": "points.csv"},
    )


def candidate_rows(search: SearchData) -> list[dict[str, Any]]:
    """Return the outcome of every candidate."""
    rows = []
    for number, entry in search.outcomes.items():
        signs = {}
        if search.exact is not None:
            weights = entry["weights"][:2].sign().tolist() if "weights" in entry else []
            signs = {"input_signs": "".join("0+-"[int(value)] for value in weights)}
        steps = zip(search.milestones, entry["milestones"], strict=True)
        rows.append(
            {
                "candidate": number,
                "round": entry["round"],
                "found": entry["found"],
                "outcome": _outcome(entry, search.scale, search.exact),
                "steps": entry["steps"],
                "J": finite(entry["loss"]),
                "J_over_J0": finite(entry["loss"] / search.scale.zero),
                "R": finite(search.held_out.relative(entry["held_out"])),
                **{f"steps_below_{level:g}_J0": step if step >= 0 else None for level, step in steps},
                **signs,
                "reason": entry["stopped"],
            }
        )
    return rows


def _outcome(entry: Row, scale: FunctionScale, exact: TwoUnitClass | None) -> str:
    """Classify the function of a candidate; for one that was not found, by its J."""
    loss, near = entry["loss"], 0.01 * scale.constant
    if entry["found"] or entry["stopped"]:
        return "found" if entry["found"] else "stopped"
    if exact is not None:
        name = exact.diagnose(torch.tensor([loss]), near)[0]
        return _NAMES.get(name, name)
    for name, level in (("zero function", scale.zero), ("best constant", scale.constant)):
        if abs(loss - level) <= 0.01 * level:
            return name
    if loss > scale.constant:
        return "worse than a constant"
    return "nearly equivalent" if loss < near else "on its way or stuck"


def point_rows(
    points: Sequence[PlanePoint],
    vectors: Tensor,
    held_out: Sequence[float],
    distances: OrbitDistances,
    scale: FunctionScale,
    grids: Sequence[EvaluatedGrid],
) -> list[dict[str, Any]]:
    """Return the distances of each point to the teacher's function and orbit, and its place on the planes.

    Args:
        points: The points, ``n`` of them.
        vectors: Their weights. Shape ``[n, P]``.
        held_out: J on held-out inputs.
        distances: To the teacher and to its orbit.
        scale: J0 and V on the held-out inputs.
        grids: J on planes.
    """
    rows = []
    for index, (point, vector) in enumerate(zip(points, vectors.double(), strict=True)):
        relative = scale.relative(held_out[index])
        places = {one.name: one.plane.coordinates(vector).tolist() for one in grids}
        rows.append(
            {
                "point": point.name,
                "steps": point.steps,
                "J": finite(point.loss),
                "held_out_J": held_out[index],
                "R": relative,
                "verdict": FunctionScale.word(relative),
                "distance": float(distances.plain[index]),
                "orbit_distance": float(distances.distances[index]),
                "orbit_distance_is": distances.kind,
                **{f"coefficients_{n}": json.dumps([round(value, 12) for value in p]) for n, p in places.items()},
                **{f"residual_{one.name}": float(one.plane.residual(vector)) for one in grids},
            }
        )
    return rows


def set_rows(grids: Sequence[EvaluatedGrid]) -> list[dict[str, Any]]:
    """Return the numbers of the set J < epsilon on each grid and each refined grid."""
    return [
        _set_row(one, numbers, refined)
        for one in grids
        for numbers, refined in ((one.numbers, False), (one.finer, True))
        if numbers is not None
    ]


def _set_row(one: EvaluatedGrid, numbers: SetNumbers, refined: bool) -> dict[str, Any]:
    exponent = numbers.exponent
    return {
        "grid": one.name,
        "points": numbers.shape[0],
        "refined": refined,
        "bound": one.grid.bound,
        "epsilon": numbers.epsilon,
        "epsilon_over_J0": finite(numbers.tolerance),
        "epsilon_over_V": finite(numbers.relative),
        "fraction": numbers.fraction,
        "smallest_J": finite(numbers.smallest),
        "betti": json.dumps(numbers.betti),
        "pieces_full": numbers.components_full,
        "pieces_face": numbers.components_face,
        "touches_border": numbers.border,
        "spacing": numbers.resolution.spacing,
        "width": finite(numbers.resolution.width),
        "exponent": None if exponent is None else exponent.exponent,
        "exponent_error": None if exponent is None else exponent.error,
        "joining": json.dumps([[finite(level) for level in row] for row in numbers.joining.tolist()]),
        "warnings": " ".join(numbers.warnings),
    }


def _figures(
    search: SearchData, grids: Sequence[EvaluatedGrid], scale: FunctionScale, exact: TwoUnitClass | None
) -> Iterator[tuple[str, Figure]]:
    levels = {} if search.exact is None else search.exact.local_minima
    threshold, title = search.tolerance * search.scale.zero, f"Search: {search.title}"
    yield "search", search_curves(*search.curves, threshold, search.scale, levels=levels, title=title)
    for one in grids:
        if one.grid.dimension in (2, 3) or one.settings.umap:
            yield from grid_figures(one, scale, exact, search.title)
    planes = {one.through: one for one in grids if one.grid.dimension == 2}
    if {"search", "orbit"} <= planes.keys():
        both = planes["search"], planes["orbit"]
        values, axes, markers = zip(*((one.values, one.axis, one.markers()) for one in both), strict=True)
        names = "through points of the search", "through the teacher's orbit"
        epsilon = both[0].epsilon
        said: Any = {"epsilon": epsilon, "title": search.title, "warning": scale.warning(epsilon)}
        yield "beside", planes_beside(values, axes, markers, scale, names=names, **said)


def _shown(points: Sequence[Row]) -> Table:
    """Return the points and how near they are to the teacher."""
    lines = []
    for row in points:
        bound = "" if row["orbit_distance_is"] == "exact" or row["orbit_distance"] < _TOUCHING else "<= "
        steps = "-" if row["steps"] is None else str(row["steps"])
        distances = [f"{row['distance']:.2f}", f"{bound}{row['orbit_distance']:.2g}"]
        lines.append([row["point"], steps, f"{row['R']:.1e}", *distances])
    columns = ["point", "steps", "R held out", "distance", "to the orbit"]
    return text_table("Points of the planes", columns, lines, whole=columns)


def _notes(candidates: Sequence[Row], grids: Sequence[EvaluatedGrid]) -> list[str]:
    """Summarise the candidates and the sets."""
    outcomes = [row["outcome"] for row in candidates]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
    lines = [
        f"{outcomes.count('found')} of {len(outcomes)} candidates met the demands of the search ({counts})",
        "R = J / V on held-out inputs: 1 is no better than a constant; orbit: of the teacher's symmetry group",
    ]
    for one in grids:
        numbers = one.numbers
        pieces = f"Betti numbers {', '.join(map(str, numbers.betti))}"
        if one.finer is not None:
            pieces += f" ({', '.join(map(str, one.finer.betti))} with half the spacing)"
        lines.append(
            f"{one.name}: J < {one.epsilon:.2g} = {numbers.tolerance:.2g} J0 on {100 * numbers.fraction:.2g} % of the "
            f"grid; {pieces}"
        )
        lines += [f"  {warning}" for warning in (one.finer or numbers).warnings[:_MOST_WARNINGS]]
    return lines
