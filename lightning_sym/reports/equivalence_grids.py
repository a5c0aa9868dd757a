"""Grids of J on planes through equivalent weights, and their figures."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym.figures import FoundPoint, betti_curve, embedding, isosurface, log_contour, loss_surface, point_set
from lightning_sym.landscape import (
    FunctionScale,
    Grid,
    GridTooLargeError,
    SetNumbers,
    TwoUnitClass,
    WeightPlane,
    betti_numbers,
    describe_set,
    umap_embedding,
)

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
    plane: WeightPlane
    grid: Grid
    settings: PlaneGrid
    values: Values
    epsilon: float
    numbers: SetNumbers
    finer: SetNumbers | None
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

    def markers(self, coordinates: Sequence[Sequence[float]] | None = None) -> list[FoundPoint]:
        """Return the points that the plane goes through, as figures mark them.

        Args:
            coordinates: Coordinates of the points; default those in the plane.
        """
        used = self.points[: self.grid.dimension + 1]
        vectors = torch.stack([point.weights for point in used]).to(self.plane.basis)
        places = self.plane.coordinates(vectors).tolist() if coordinates is None else coordinates
        return [
            FoundPoint(rf"$\theta_{index}$: {point.name}", place, point.loss)
            for index, (point, place) in enumerate(zip(used, places, strict=True))
        ]


def evaluated_grids(
    through: Through,
    points: Sequence[PlanePoint],
    grids: Sequence[PlaneGrid],
    scale: FunctionScale,
    evaluate: Callable[[WeightPlane, Grid, str], Values],
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
        plane = WeightPlane.through(vectors)
        coordinates = plane.coordinates(vectors)
        bound = settings.bound or float(f"{1.5 * float(coordinates.abs().max()):.2g}")
        limit = (settings.epsilon or epsilon) * unit
        try:
            measured = [
                _measured(evaluate, plane, Grid(dimension, count, bound), part, limit, scale, coordinates)
                for count, part in [
                    (settings.points, name),
                    *([(2 * settings.points - 1, f"{name}-refined")] if settings.refine else []),
                ]
            ]
        except GridTooLargeError as error:  # the same on every rank; the search is not lost for it
            yield f"no {name} grid: {error}"
            continue
        (grid, values, numbers), (_, finest, finer) = measured[0], measured[-1]
        refined = finer if settings.refine else None
        yield EvaluatedGrid(name, through, points, plane, grid, settings, values, limit, numbers, refined, finest)


def _measured(
    evaluate: Callable[[WeightPlane, Grid, str], Values],
    plane: WeightPlane,
    grid: Grid,
    name: str,
    epsilon: float,
    scale: FunctionScale,
    coordinates: Tensor,
) -> tuple[Grid, Values, SetNumbers]:
    values = evaluate(plane, grid, name)
    cells = [tuple(cell) for cell in grid.index_of(coordinates).tolist()]
    return grid, values, describe_set(values, grid.spacing, epsilon, scale, cells)


def grid_figures(
    evaluated: EvaluatedGrid, scale: FunctionScale, exact: TwoUnitClass | None, title: str
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
        yield f"surface-{name}", loss_surface(values, axis, markers, scale, **said)
        yield f"contour-{name}", log_contour(values, axis, markers, scale, epsilon=epsilon, overlay=overlay, **said)
    if dimension == 3:
        field = None
        if exact is not None and exact.kind == "same_sign":
            field = _exact_fields(evaluated, exact)[0][1]
            quadric = exact.quadric(evaluated.plane)
            if math.isfinite(quadric.closing_epsilon) and quadric.centre_inside:
                marks["the throat closes"] = quadric.closing_epsilon
        yield f"set-{name}", point_set(*evaluated.inside, epsilon, evaluated.grid.bound, markers, scale, **said)
        yield f"isosurface-{name}", isosurface(values, axis, epsilon, markers, scale, overlay_field=field, **said)
    if dimension in (2, 3):
        levels = epsilon * np.geomspace(0.1, 10, _LEVELS)
        found = [betti_numbers(evaluated.finest < level) for level in levels]
        thin = (evaluated.finer or evaluated.numbers).resolution
        if math.isfinite(thin.curvature):
            marks["grid too coarse below"] = thin.curvature * thin.spacing**2 / 2
        marks["epsilon"] = epsilon
        if exact is not None and exact.kind == "mixed":
            marks["barrier"] = exact.barrier
        names = ("pieces", "loops", "cavities")[:dimension]
        curves = {label: [numbers[k] for numbers in found] for k, label in enumerate(names)}
        yield f"betti-{name}", betti_curve(levels, curves, marks, title=heading)
    if evaluated.settings.umap and (evaluated.values < epsilon).sum() >= 4:
        coefficients, inside = evaluated.inside
        places = np.array([marker.coefficients for marker in markers])
        flat = umap_embedding(coefficients, places, seed=0)
        points = evaluated.markers(flat.points.tolist())
        yield f"umap-{name}", embedding(flat.coordinates, inside[flat.chosen], epsilon, points, scale, **said)


def _exact_fields(evaluated: EvaluatedGrid, exact: TwoUnitClass) -> list[tuple[str, Values]]:
    """Return fields on the grid; the exact class is their common zero set."""
    grid, plane = evaluated.grid, evaluated.plane
    coefficients = grid.coefficients(0, grid.size).to(plane.basis.device)
    fields = exact.residuals(plane, coefficients).cpu().numpy().reshape(*grid.shape, 2)
    if exact.kind == "mixed":
        return [("slope above 0 is right", fields[..., 0]), ("slope below 0 is right", fields[..., 1])]
    active = int(exact.target[0] == 0)
    there = np.abs(fields[..., 1 - active]) <= 1e-12
    return [("exact class", np.where(there, fields[..., active], np.nan))]
