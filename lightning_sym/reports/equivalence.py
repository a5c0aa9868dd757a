"""Results of a search for equivalent weights: candidates, points, and sets on planes through the points."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.table import Table
from safetensors.torch import save
from torch import Tensor

from lightning_sym import figures, landscape
from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._tags import tag
from lightning_sym.reports.report import ResultTable, Row, RunResults, finite, picked, text_table

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
Through = Literal["search", "orbit", "mixed"]
Values = NDArray[np.float64]
# Weights that a plane goes through: their name, the weights [P], J as loss, and the steps to find them.
PlanePoint = Any

_LEVELS = 13  # of epsilon, in the curve of Betti numbers


@dataclass
class PlaneGrid:
    """One grid of weights through the found points.

    Args:
        dimension: Dimension of the plane, ``m`` >= 1; it needs ``m + 1`` points.
        points: Grid points per axis, >= 2; odd, so that the first found point is one of them.
        bound: The box is ``[-bound, bound]`` along every axis, around the first found point. None: 1.5 times the
            largest coordinate of a found point.
        epsilon: Bound of J of the set, in the callback's unit. None: the callback's.
        refine: Measure the set once more with half the spacing, and report both.
        umap: Embed the set in two dimensions too; needs ``pip install "lightning_sym[umap]"``.

    Raises:
        ValueError: If an argument is out of range.
    """

    dimension: int = 2
    points: int = 101
    bound: float | None = None
    epsilon: float | None = None
    refine: bool = False
    umap: bool = False

    def __post_init__(self) -> None:
        check_integers(of="a grid", dimension=self.dimension)
        check_integers(2, of="a grid", points=self.points)
        given = {"bound": self.bound, "epsilon": self.epsilon}
        check_numbers("> 0", of="a grid", **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, eq=False)
class EvaluatedGrid:
    """J on one grid.

    Attributes:
        name: ``"search-2d"``, for files.
        through: Points that span the plane.
        points: All available points; the first ones span the plane.
        plane: The plane.
        grid: The places on it.
        settings: Requested settings.
        values: J there, of the grid's shape.
        epsilon: Bound of the set, in the unit of J.
        numbers: Numbers of the set.
        finer: The same with half the spacing; None if that was not asked for.
        finest: J on the finest grid.
    """

    name: str
    through: Through
    points: Sequence[PlanePoint]
    plane: landscape.WeightPlane
    grid: landscape.Grid
    settings: PlaneGrid
    values: Values
    epsilon: float
    numbers: landscape.SetNumbers
    finer: landscape.SetNumbers | None
    finest: Values

    @property
    def axis(self) -> Values:
        """Coordinates of all axes."""
        return self.grid.axis.numpy()

    @property
    def inside(self) -> tuple[Values, Values]:
        """Coordinates of the set's points and J there. Shapes ``[K, m]`` and ``[K]``."""
        inside = self.values < self.epsilon
        chosen = torch.from_numpy(np.flatnonzero(inside))
        coefficients = self.grid.axis[torch.stack(torch.unravel_index(chosen, self.grid.shape), dim=1)]
        return coefficients.numpy(), self.values[inside]

    def markers(self, coordinates: Sequence[Sequence[float]] | None = None) -> list[figures.FoundPoint]:
        """Return the points that the plane goes through, as figures mark them.

        Args:
            coordinates: Coordinates of the points; default those in the plane.
        """
        used = self.points[: self.grid.dimension + 1]
        vectors = torch.stack([point.weights for point in used]).to(self.plane.basis)
        places = self.plane.coordinates(vectors).tolist() if coordinates is None else coordinates
        return [
            figures.FoundPoint(rf"$\theta_{index}$: {point.name}", place, point.loss)
            for index, (point, place) in enumerate(zip(used, places, strict=True))
        ]


def evaluated_grids(
    through: Through,
    points: Sequence[PlanePoint],
    grids: Sequence[PlaneGrid],
    scale: landscape.FunctionScale,
    evaluate: Callable[[landscape.WeightPlane, landscape.Grid, str], Values],
    *,
    epsilon: float,
    unit: float,
    advice: str = "",
) -> Iterator[EvaluatedGrid | str]:
    """Evaluate grids with enough points.

    Args:
        through: Points that span the planes.
        points: The points, the first one the centre.
        grids: Requested grids.
        scale: J0 and V of the teacher.
        evaluate: Returns J on a grid of a plane; called with its name as well.
        epsilon: Bound of sets for grids without one.
        unit: Unit of all these bounds.
        advice: Advice where points are missing.

    Yields:
        Each evaluated grid; or a sentence with the reason why there is none.
    """
    for number, settings in enumerate(grids):
        dimension = settings.dimension
        earlier = sum(other.dimension == dimension for other in grids[:number])
        name = f"{through}-{dimension}d" + (f"-{earlier + 1}" if earlier else "")
        if len(points) < dimension + 1:
            there = "is 1" if len(points) == 1 else f"are {len(points)}"
            yield (
                f"no {dimension}D grid through {through} points: it needs {dimension + 1}, and there {there} that can "
                f"be used; {advice}"
            )
            continue
        vectors = torch.stack([point.weights.double() for point in points[: dimension + 1]])
        plane = landscape.WeightPlane.through(vectors)
        coordinates = plane.coordinates(vectors)
        bound = settings.bound or float(f"{1.5 * float(coordinates.abs().max()):.2g}")
        limit = (settings.epsilon or epsilon) * unit
        try:
            measured = [
                _measured(evaluate, plane, landscape.Grid(dimension, count, bound), part, limit, scale, coordinates)
                for count, part in [
                    (settings.points, name),
                    *([(2 * settings.points - 1, f"{name}-refined")] if settings.refine else []),
                ]
            ]
        except landscape.GridTooLargeError as error:  # the same on every rank; the search is not lost for it
            yield f"no {name} grid: {error}"
            continue
        (grid, values, numbers), (_, finest, finer) = measured[0], measured[-1]
        refined = finer if settings.refine else None
        yield EvaluatedGrid(name, through, points, plane, grid, settings, values, limit, numbers, refined, finest)


def _measured(
    evaluate: Callable[[landscape.WeightPlane, landscape.Grid, str], Values],
    plane: landscape.WeightPlane,
    grid: landscape.Grid,
    name: str,
    epsilon: float,
    scale: landscape.FunctionScale,
    coordinates: Tensor,
) -> tuple[landscape.Grid, Values, landscape.SetNumbers]:
    values = evaluate(plane, grid, name)
    cells = [tuple(cell) for cell in grid.index_of(coordinates).tolist()]
    return grid, values, landscape.describe_set(values, grid.spacing, epsilon, scale, cells)


def grid_figures(
    evaluated: EvaluatedGrid, scale: landscape.FunctionScale, exact: landscape.TwoUnitClass | None, title: str
) -> Iterator[tuple[str, Figure]]:
    """Draw one grid of two or three dimensions, or its embedding.

    Args:
        evaluated: The grid.
        scale: J0 and V of the teacher.
        exact: The exact class of the teacher, if there is a theory of it.
        title: Above the figures.

    Yields:
        Names and figures.
    """
    dimension, name, epsilon = evaluated.grid.dimension, evaluated.name, evaluated.epsilon
    values, axis, markers = evaluated.values, evaluated.axis, evaluated.markers()
    heading = f"{title}: {evaluated.through} points"
    said: Any = {"title": heading, "warning": scale.warning(epsilon)}
    marks = {}
    if dimension == 2:
        overlay = _exact_fields(evaluated, exact) if exact is not None and exact.kind != "zero" else []
        yield f"surface-{name}", figures.loss_surface(values, axis, markers, scale, **said)
        yield (
            f"contour-{name}",
            figures.log_contour(values, axis, markers, scale, epsilon=epsilon, overlay=overlay, **said),
        )
    if dimension == 3:
        field = None
        if exact is not None and exact.kind == "same_sign":
            field = _exact_fields(evaluated, exact)[0][1]
            quadric = exact.quadric(evaluated.plane)
            if math.isfinite(quadric.closing_epsilon) and quadric.centre_inside:
                marks["the throat closes"] = quadric.closing_epsilon
        yield f"set-{name}", figures.point_set(*evaluated.inside, epsilon, evaluated.grid.bound, markers, scale, **said)
        yield (
            f"isosurface-{name}",
            figures.isosurface(values, axis, epsilon, markers, scale, overlay_field=field, **said),
        )
    if dimension in (2, 3):
        levels = epsilon * np.geomspace(0.1, 10, _LEVELS)
        found = [landscape.betti_numbers(evaluated.finest < level) for level in levels]
        thin = (evaluated.finer or evaluated.numbers).resolution
        if math.isfinite(thin.curvature):
            marks["grid too coarse below"] = thin.curvature * thin.spacing**2 / 2
        marks["epsilon"] = epsilon
        if exact is not None and exact.kind == "mixed":
            marks["barrier"] = exact.barrier
        names = ("pieces", "loops", "cavities")[:dimension]
        curves = {label: [numbers[k] for numbers in found] for k, label in enumerate(names)}
        yield f"betti-{name}", figures.betti_curve(levels, curves, marks, title=heading)
    if evaluated.settings.umap and (evaluated.values < epsilon).sum() >= 4:
        coefficients, inside = evaluated.inside
        places = np.array([marker.coefficients for marker in markers])
        flat = landscape.umap_embedding(coefficients, places, seed=0)
        points = evaluated.markers(flat.points.tolist())
        yield f"umap-{name}", figures.embedding(flat.coordinates, inside[flat.chosen], epsilon, points, scale, **said)


def _exact_fields(evaluated: EvaluatedGrid, exact: landscape.TwoUnitClass) -> list[tuple[str, Values]]:
    """Return fields on the grid; the exact class is their common zero set."""
    grid, plane = evaluated.grid, evaluated.plane
    coefficients = grid.coefficients(0, grid.size).to(plane.basis.device)
    fields = exact.residuals(plane, coefficients).cpu().numpy().reshape(*grid.shape, 2)
    if exact.kind == "mixed":
        return [("slope above 0 is right", fields[..., 0]), ("slope below 0 is right", fields[..., 1])]
    active = int(exact.target[0] == 0)
    there = np.abs(fields[..., 1 - active]) <= 1e-12
    return [("exact class", np.where(there, fields[..., active], np.nan))]


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
    scale: landscape.FunctionScale
    held_out: landscape.FunctionScale
    curves: tuple[Tensor, Tensor, Tensor]
    exact: landscape.TwoUnitClass | None = None


def equivalence_results(
    search: SearchData,
    grids: Sequence[EvaluatedGrid],
    points: Sequence[Row],
    stored: Mapping[str, Tensor],
    *,
    scale: landscape.FunctionScale,
    exact: landscape.TwoUnitClass | None,
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


def _outcome(entry: Row, scale: landscape.FunctionScale, exact: landscape.TwoUnitClass | None) -> str:
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
    distances: landscape.OrbitDistances,
    scale: landscape.FunctionScale,
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
                "verdict": landscape.FunctionScale.word(relative),
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


def _set_row(one: EvaluatedGrid, numbers: landscape.SetNumbers, refined: bool) -> dict[str, Any]:
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
    search: SearchData,
    grids: Sequence[EvaluatedGrid],
    scale: landscape.FunctionScale,
    exact: landscape.TwoUnitClass | None,
) -> Iterator[tuple[str, Figure]]:
    levels = {} if search.exact is None else search.exact.local_minima
    threshold, title = search.tolerance * search.scale.zero, f"Search: {search.title}"
    yield "search", figures.search_curves(*search.curves, threshold, search.scale, levels=levels, title=title)
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
        yield "beside", figures.planes_beside(values, axes, markers, scale, names=names, **said)


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
