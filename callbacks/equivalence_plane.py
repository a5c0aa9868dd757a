"""What a search for equivalent weights found: planes through it, sets of nearly equivalent weights, their numbers."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save
from torch import Tensor

from lightning_sym._files import write_atomically
from lightning_sym.callbacks._checks import on_first_rank
from lightning_sym.callbacks._publish import log_summary, publish_figure, publish_table
from lightning_sym.callbacks.run_report import RunReport
from lightning_sym.datamodules import InputDataModule
from lightning_sym.figures import (
    FoundPoint,
    betti_curve,
    embedding,
    isosurface,
    isosurface_mesh,
    log_contour,
    loss_surface,
    planes_beside,
    point_set,
    search_curves,
)
from lightning_sym.landscape import (
    FunctionScale,
    Grid,
    GridTooLargeError,
    LossSurface,
    Moments,
    SetNumbers,
    TwoUnitClass,
    WeightPlane,
    betti_numbers,
    describe_set,
    evaluate_grid,
    independent,
    is_relu_line,
    orbit_distances,
    umap_embedding,
    weight_vector,
)
from lightning_sym.tasks import EquivalenceTask, FoundWeights
from lightning_sym.zoo import versions

Through = Literal["search", "orbit", "mixed"]

_TWO_UNIT_WEIGHTS = 4
_MOST_WARNINGS = 3
_TOUCHING = 1e-5  # weights nearer to an orbit than this are on it, up to single precision
_FIGURES = ("surface", "contour", "set", "isosurface", "betti", "umap")
_MOST_LOSSES = 3
_LEVELS = 13  # of epsilon, in the curve of Betti numbers
_UNITS = {
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
    """

    dimension: int = 2
    points: int = 101
    bound: float | None = None
    epsilon: float | None = None
    refine: bool = False
    umap: bool = False

    def __post_init__(self) -> None:
        for name, number, least in (("dimension", self.dimension, 1), ("points", self.points, 2)):
            if type(number) is not int or number < least:
                raise ValueError(f"{name} of a grid must be an integer >= {least}, got {number!r}.")
        for name, value in (("bound", self.bound), ("epsilon", self.epsilon)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} of a grid must be a finite number > 0, or null, got {value}.")


@dataclass(frozen=True, eq=False)
class _Slice:
    """One evaluated grid."""

    name: str
    through: Through
    found: Sequence[FoundWeights]
    plane: WeightPlane
    grid: Grid
    settings: PlaneGrid
    values: NDArray[np.float64]
    epsilon: float
    numbers: SetNumbers
    finer: SetNumbers | None
    finest: NDArray[np.float64]

    @property
    def axis(self) -> NDArray[np.float64]:
        return self.grid.axis.numpy()


class EquivalencePlane(RunReport[EquivalenceTask, InputDataModule]):
    r"""Put planes through the weights that an :class:`lightning_sym.tasks.EquivalenceTask` found, and draw them.

    At the end of the search, for each grid: an orthonormal basis of the plane through the found points, J on the grid,
    the set ``J < epsilon`` with its numbers (fraction, Betti numbers, volume exponent, at which epsilon found points
    join), and the pictures of GENNI. Where there is an exact answer, as for two ReLU units, it is drawn beside them.
    With fewer points than a plane needs, the planes that can be drawn are, and the notes say what was missing.

    In ``results``: ``candidates.csv`` (all candidates and what became of them), ``points.csv`` (found points: J, R,
    distance to the teacher's orbit, coordinates), ``sets.csv`` and ``.json`` (a row for each grid),
    ``found.safetensors`` (weights, bases, centres), ``grid-<points>-<m>d.safetensors`` (J on the grid), and figures,
    which are in TensorBoard under ``figures/EquivalencePlane`` too, with 3D sets as meshes: ``search.png``,
    ``surface-...png``, ``contour-...png``, ``set-...png``, ``isosurface-...png``, ``betti-...png``, ``umap-...png``.

    A grid that was interrupted is continued by ``--ckpt_path last``. Grids are shared out over processes.

    Args:
        grids: The grids; default ``m = 2`` with 101 and ``m = 3`` with 51 points per axis.
        epsilon: Bound of J of the sets, > 0, in the unit of ``epsilon_unit``.
        epsilon_unit: ``"J0"``, the J of the zero function on the inputs of the grid, or ``"J"``: as it is.
        through: What the planes go through: ``"search"``, the found points, that with the lowest J first; ``"orbit"``,
            the teacher and random images of it under its symmetry group; ``"mixed"``, found points and images in turn.
        inputs: How many of the inputs of the search J is taken of, >= 1.
        precision: Precision of the network on the grid: ``"double"``, which pieces and holes near a threshold need,
            or ``"single"``, twice as fast.
        limit_seconds: Longest time that one grid may be estimated to take; None for no limit.
        limit_bytes: The same for its memory.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Lengyel et al. (2020), "GENNI: Visualising the Geometry of Equivalences for Neural Network Identifiability".
        Their epsilons are larger than J0: such sets hold the zero function, which is warned of and marked here.
    """

    task_type = EquivalenceTask
    data_type = InputDataModule  # type: ignore[type-abstract]

    def __init__(
        self,
        grids: list[PlaneGrid] | None = None,
        epsilon: float = 0.01,
        epsilon_unit: Literal["J0", "J"] = "J0",
        through: Sequence[Through] = ("search",),
        inputs: int = 500,
        precision: Literal["double", "single"] = "double",
        limit_seconds: float | None = 600,
        limit_bytes: int | None = 2 * 2**30,
        dirpath: str | None = None,
    ) -> None:
        super().__init__(dirpath)
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise ValueError(f"epsilon must be a finite number > 0, got {epsilon}.")
        if type(inputs) is not int or inputs < 1:
            raise ValueError(f"inputs must be an integer >= 1, got {inputs!r}.")
        kinds = ("search", "orbit", "mixed")
        if isinstance(through, str) or not through or not set(through) <= set(kinds):
            raise ValueError(f"through must be a list of some of {', '.join(kinds)}, got {through!r}.")
        if epsilon_unit not in ("J0", "J"):
            raise ValueError(f'epsilon_unit must be "J0" or "J", got {epsilon_unit!r}.')
        if precision not in ("double", "single"):
            raise ValueError(f'precision must be "double" or "single", got {precision!r}.')
        self.grids = [PlaneGrid(2, 101), PlaneGrid(3, 51)] if grids is None else list(grids)
        self.epsilon = epsilon
        self.epsilon_unit = epsilon_unit
        self.through: tuple[Through, ...] = tuple(dict.fromkeys(through))
        self.inputs = inputs
        self.precision = precision
        self.limit_seconds = limit_seconds
        self.limit_bytes = limit_bytes
        self._rows: list[dict[str, Any]] = []
        self._points: list[dict[str, Any]] = []
        self._slices: list[_Slice] = []
        self._notes: list[str] = []
        self._pictures: list[str] = []
        self._levels: dict[str, float] = {}  # of J at bad minima that are known

    # ---- checks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check what can be known before there is a teacher.

        Raises:
            ImportError: If an embedding is asked for, and umap-learn is not installed.
            TypeError: If the task or the data are of another kind.
            ValueError: If a grid goes through more points than the search looks for.
        """
        super().setup(trainer, pl_module, stage)
        if self._path is None:
            return
        if any(grid.umap for grid in self.grids) and find_spec("umap") is None:
            raise ImportError(
                'A grid with umap: true needs umap-learn: pip install "lightning_sym[umap]", or set umap to false.'
            )
        points = self.task(pl_module).points
        if "search" in self.through and self._most_points > points:
            raise ValueError(
                f"A grid of dimension {self._most_points - 1} goes through {self._most_points} points, and the search "
                f"looks for {points}; set points of the task to {self._most_points}, or take smaller dimensions."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check, before the search, that the teacher suits the grids.

        Raises:
            ValueError: If a dimension is larger than the number of weights, the teacher has no orbit that planes could
                go through, or it is constant on the grids' inputs.
        """
        if self._path is None:
            return
        task = self.task(pl_module)
        size = weight_vector(task.teacher).numel()
        if self._most_points > size + 1:
            raise ValueError(
                f"A grid of dimension {self._most_points - 1} does not fit into the {size} weights of this network; "
                f"use at most {size}."
            )
        if set(self.through) - {"search"}:
            task.orbit_points(1)
        self._teacher_on_inputs(task, trainer.strategy.root_device)

    @property
    def _most_points(self) -> int:
        """The most points that a plane goes through."""
        return max((grid.dimension for grid in self.grids), default=0) + 1

    # ---- work

    def report(self, trainer: Trainer, task: EquivalenceTask, data: InputDataModule) -> None:
        """Evaluate all grids, and write tables and figures."""
        task.on_train_end()  # Lightning calls it after those of callbacks
        teacher, inputs, targets, scale = self._teacher_on_inputs(task, trainer.strategy.root_device)
        surface = LossSurface(teacher, inputs, targets, dtype=inputs.dtype)
        exact = _two_unit_class(teacher, inputs)
        self._notes, self._slices = [], []
        for through in self.through:
            found = self._found(task, through)
            self._slices += self._evaluated(trainer, task, through, found, surface, scale)
        self._points = self._point_rows(task, teacher, inputs[:2], scale)
        sampled = _two_unit_class(teacher, self._all_inputs(task).to(inputs))
        self._levels = {} if sampled is None else sampled.local_minima
        self._rows = _candidate_rows(task, sampled)
        on_first_rank(trainer, lambda: self._publish(trainer, task, data, scale, exact))

    def _teacher_on_inputs(
        self, task: EquivalenceTask, device: torch.device
    ) -> tuple[torch.nn.Module, Tensor, Tensor, FunctionScale]:
        """Return a copy of the teacher in the grids' precision, the grids' inputs, its outputs, and its scale there."""
        task.to(device)
        inputs = first_inputs(task, self.inputs).to(torch.float64 if self.precision == "double" else torch.float32)
        # Copied: the task's own teacher keeps its precision.
        teacher = task.copy_of_teacher().to(inputs)
        with torch.no_grad():
            targets = teacher(inputs)
        scale = FunctionScale.of(targets.flatten(1))
        if scale.constant == 0:
            raise ValueError(
                f"The teacher is constant on the {len(inputs)} inputs of the grids; raise inputs of EquivalencePlane."
            )
        return teacher, inputs, targets, scale

    def _all_inputs(self, task: EquivalenceTask) -> Tensor:
        """Return all inputs of the sample, if they are few numbers; they give the moments of the exact theory."""
        if not is_relu_line(task.teacher):
            return torch.zeros(0)
        return torch.cat(list(task.sample_inputs()))

    def _found(self, task: EquivalenceTask, through: Through) -> list[FoundWeights]:
        """Return the points that a plane goes through, the first one its centre, the others independent of it."""
        searched, needed = task.found_points(), self._most_points
        if through == "search":
            return searched[:needed]
        if through == "orbit":
            vector = weight_vector(task.teacher).cpu()
            points = [FoundWeights("teacher", vector, 0.0, 0.0, None), *task.orbit_points(needed - 1)]
        else:
            images = task.orbit_points(max(1, needed // 2))
            points = [point for pair in zip(searched, images, strict=False) for point in pair]
            points += [*searched[len(images) :], *images[len(searched) :]]
        vectors = torch.stack([point.weights.double() for point in points])
        accepted = independent(vectors[1:] - vectors[0], task.independence)
        return [points[0], *(points[1 + index] for index in accepted)][:needed]

    def _evaluated(
        self,
        trainer: Trainer,
        task: EquivalenceTask,
        through: Through,
        found: Sequence[FoundWeights],
        surface: LossSurface,
        scale: FunctionScale,
    ) -> Iterator[_Slice]:
        """Evaluate the grids for which there are enough points.

        Yields:
            One slice for each.
        """
        for number, settings in enumerate(self.grids):
            earlier = sum(other.dimension == settings.dimension for other in self.grids[:number])
            name = f"{through}-{settings.dimension}d" + (f"-{earlier + 1}" if earlier else "")
            if len(found) < settings.dimension + 1:
                self._notes.append(
                    f"no {settings.dimension}D grid through {through} points: it needs {settings.dimension + 1}, and "
                    f"there {_are(len(found))} that can be used; {_what_to_change(task, through)}"
                )
                continue
            vectors = torch.stack([point.weights.double() for point in found[: settings.dimension + 1]])
            plane = WeightPlane.through(vectors, tolerance=task.independence)
            furthest = float(plane.coordinates(vectors).abs().max())
            bound = settings.bound or float(f"{1.5 * furthest:.2g}")
            epsilon = (settings.epsilon or self.epsilon) * (scale.zero if self.epsilon_unit == "J0" else 1.0)
            grid = Grid(settings.dimension, settings.points, bound)
            try:
                values = self._on_grid(trainer, surface, plane, grid, name)
            except GridTooLargeError as error:  # the same on every rank; the search is not lost for it
                self._notes.append(f"no {name} grid: {error}")
                continue
            cells = [tuple(cell) for cell in grid.index_of(plane.coordinates(vectors)).tolist()]
            numbers = describe_set(values, grid.spacing, epsilon, scale, cells)
            finer, finest = None, values
            if settings.refine:
                fine = Grid(settings.dimension, 2 * settings.points - 1, bound)
                cells = [tuple(cell) for cell in fine.index_of(plane.coordinates(vectors)).tolist()]
                finest = self._on_grid(trainer, surface, plane, fine, f"{name}-refined")
                finer = describe_set(finest, fine.spacing, epsilon, scale, cells)
            yield _Slice(name, through, found, plane, grid, settings, values, epsilon, numbers, finer, finest)

    def _on_grid(
        self, trainer: Trainer, surface: LossSurface, plane: WeightPlane, grid: Grid, name: str
    ) -> NDArray[np.float64]:
        # Named for what it is a part of: what another search left here is not gone on with.
        key = hashlib.sha256(repr((grid, plane.centre.tolist(), plane.basis.tolist())).encode()).hexdigest()[:12]
        with progress_bar(trainer, f"J on the {name} grid") as progress:
            values = evaluate_grid(
                surface,
                plane,
                grid,
                partial=self.path / f".grid-{name}-{key}.partial",
                progress=progress,
                limit_seconds=self.limit_seconds,
                limit_bytes=self.limit_bytes,
            )
        return values.numpy()

    def _point_rows(
        self, task: EquivalenceTask, teacher: torch.nn.Module, example: Tensor, scale: FunctionScale
    ) -> list[dict[str, Any]]:
        points = {point.name: point for slice_ in self._slices for point in slice_.found}
        points |= {point.name: point for point in task.found_points()}
        if not points:
            return []
        target = weight_vector(teacher)
        vectors = torch.stack([point.weights for point in points.values()]).to(target)
        surface = task.held_out_surface(target.dtype)
        held_out = surface.at(vectors).tolist()
        distances = orbit_distances(teacher, vectors, target, example)
        shared = task.scales["held_out"]
        rows = []
        for index, point in enumerate(points.values()):
            relative = shared.relative(held_out[index])
            rows.append(
                {
                    "point": point.name,
                    "steps": point.steps,
                    "J": _finite(point.loss),
                    "held_out_J": held_out[index],
                    "R": relative,
                    "verdict": FunctionScale.word(relative),
                    "distance": float(distances.plain[index]),
                    "orbit_distance": float(distances.distances[index]),
                    "orbit_distance_is": distances.kind,
                    **{
                        f"coefficients_{slice_.name}": json.dumps(
                            [round(value, 12) for value in slice_.plane.coordinates(vectors[index].double()).tolist()]
                        )
                        for slice_ in self._slices
                    },
                    **{
                        f"residual_{slice_.name}": float(slice_.plane.residual(vectors[index].double()))
                        for slice_ in self._slices
                    },
                }
            )
        return rows

    # ---- files

    def _publish(
        self,
        trainer: Trainer,
        task: EquivalenceTask,
        data: InputDataModule,
        scale: FunctionScale,
        exact: TwoUnitClass | None,
    ) -> None:
        about = {
            "units": _UNITS,
            "teacher": task.about_teacher,
            "architecture": task.network.architecture,
            "J0": scale.zero,
            "V": scale.constant,
            "held_out": {"J0": task.scales["held_out"].zero, "V": task.scales["held_out"].constant},
            "seed": task.seed,
            "settings": {name: getattr(task, name) for name in ("members", "points", "tolerance", "held_out")},
            "success_fraction": task.success_fraction(),
            "steps": trainer.global_step,
            "inputs": self.inputs,
            "precision": self.precision,
            "data": data.identity(),
            "versions": versions(),
        }
        if exact is not None:
            about["exact"] = {
                "kind": exact.kind,
                "dimension": exact.dimension,
                "components": exact.components,
                "barrier": exact.barrier,
                "moments": asdict(exact.moments),
            }
        stale = [*self.path.glob(".grid-*.partial*"), *self.path.glob("grid-*.safetensors"), self.path / "beside.png"]
        for leftover in [*stale, *(path for kind in _FIGURES for path in self.path.glob(f"{kind}-*.png"))]:
            leftover.unlink(missing_ok=True)  # of a search that was replaced, or gone on with other grids
        publish_table(self._rows, {"what": "all candidates of the search", **about}, self.path / "candidates")
        publish_table(self._points, {"what": "points that planes go through", **about}, self.path / "points")
        publish_table(
            [_set_row(slice_, numbers, finer) for slice_ in self._slices for numbers, finer in _measured(slice_)],
            {"what": "sets of weights with J < epsilon", **about},
            self.path / "sets",
        )
        self._save(task)
        self._pictures = []
        for name, figure in self._figures(task, scale, exact):
            publish_figure(trainer, figure, f"figures/EquivalencePlane/{name}", self.path / f"{name}.png")
            self._pictures.append(name)
        self._meshes(trainer)
        values = {"success_fraction": task.success_fraction()}
        for slice_ in self._slices:
            values[f"fraction/{slice_.name}"] = slice_.numbers.fraction
            values[f"pieces/{slice_.name}"] = float(slice_.numbers.components_full)
        searched = [row["R"] for row in self._points if row["steps"] is not None]
        values["R/highest_kept"] = max(searched, default=math.nan)
        log_summary(
            trainer, {name: value for name, value in values.items() if math.isfinite(value)}, values["R/highest_kept"]
        )

    def _save(self, task: EquivalenceTask) -> None:
        """Write weights and grids, for use elsewhere."""
        points = {point.name: point.weights for slice_ in self._slices for point in slice_.found}
        points |= {point.name: point.weights for point in task.found_points()}
        stored = {f"point-{name.replace(' ', '-')}": weights.contiguous() for name, weights in points.items()}
        stored["teacher"] = weight_vector(task.teacher).cpu()
        for slice_ in self._slices:
            stored[f"basis-{slice_.name}"] = slice_.plane.basis.cpu().contiguous()
            stored[f"centre-{slice_.name}"] = slice_.plane.centre.cpu().contiguous()
            grid = {"J": torch.from_numpy(slice_.values).contiguous(), "axis": slice_.grid.axis.contiguous()}
            write_atomically(self.path / f"grid-{slice_.name}.safetensors", save(grid))
        write_atomically(self.path / "found.safetensors", save(stored))

    def _figures(
        self, task: EquivalenceTask, scale: FunctionScale, exact: TwoUnitClass | None
    ) -> Iterator[tuple[str, Figure]]:
        title = task.title()
        steps, losses, survived = task.curves()
        yield (
            "search",
            search_curves(
                steps,
                losses,
                [task.tolerance * task.scales["sample"].zero],
                task.scales["sample"],
                survived=survived,
                levels=self._levels,
                title=f"Search: {title}",
            ),
        )
        for slice_ in self._slices:
            yield from _slice_figures(slice_, scale, exact, title)
        planes = {slice_.through: slice_ for slice_ in self._slices if slice_.grid.dimension == 2}
        if "search" in planes and "orbit" in planes:
            pair = planes["search"], planes["orbit"]
            yield (
                "beside",
                planes_beside(
                    (pair[0].values, pair[1].values),
                    (pair[0].axis, pair[1].axis),
                    (_markers(pair[0]), _markers(pair[1])),
                    scale,
                    names=("through points of the search", "through the teacher's orbit"),
                    epsilon=pair[0].epsilon,
                    title=title,
                    warning=scale.warning(pair[0].epsilon),
                ),
            )

    def _meshes(self, trainer: Trainer) -> None:
        """Send the surfaces J = epsilon of 3D grids to TensorBoard."""
        for slice_ in self._slices:
            if slice_.grid.dimension != 3:
                continue
            vertices, faces = isosurface_mesh(slice_.values, slice_.axis, slice_.epsilon)
            if not len(faces):
                continue
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_mesh(
                        f"EquivalencePlane/{slice_.name}",
                        torch.from_numpy(np.ascontiguousarray(vertices, np.float32))[None],
                        faces=torch.from_numpy(np.ascontiguousarray(faces, np.int32))[None],
                        global_step=trainer.global_step,
                    )

    # ---- terminal

    def table(self) -> Table:
        """Return the points and how near they are to the teacher."""
        table = Table(title="Points of the planes", title_justify="left")
        for column in ("point", "steps", "R held out", "distance", "to the orbit"):
            table.add_column(column, justify="left" if column == "point" else "right", no_wrap=True)
        for row in self._points:
            bound = "" if row["orbit_distance_is"] == "exact" or row["orbit_distance"] < _TOUCHING else "<= "
            table.add_row(
                row["point"],
                "-" if row["steps"] is None else str(row["steps"]),
                f"{row['R']:.1e}",
                f"{row['distance']:.2f}",
                f"{bound}{row['orbit_distance']:.2g}",
            )
        return table

    def notes(self) -> list[str]:
        """Say what became of the candidates and what the sets are."""
        found = sum(bool(row["found"]) for row in self._rows)
        outcomes = ", ".join(
            f"{sum(row['outcome'] == name for row in self._rows)} {name}"
            for name in dict.fromkeys(row["outcome"] for row in self._rows)
        )
        lines = [
            f"{found} of {len(self._rows)} candidates met the demands of the search ({outcomes})",
            "R = J / V on held-out inputs: 1 is no better than a constant; orbit: of the teacher's symmetry group",
        ]
        for slice_ in self._slices:
            numbers = slice_.numbers
            pieces = f"Betti numbers {', '.join(map(str, numbers.betti))}"
            if slice_.finer is not None:
                pieces += f" ({', '.join(map(str, slice_.finer.betti))} with half the spacing)"
            lines.append(
                f"{slice_.name}: J < {slice_.epsilon:.2g} = {numbers.tolerance:.2g} J0 on {100 * numbers.fraction:.2g} "
                f"% of the grid; {pieces}"
            )
            finest = slice_.finer or numbers
            lines += [f"  {warning}" for warning in finest.warnings[:_MOST_WARNINGS]]
        return lines + self._notes

    def places(self, trainer: Trainer) -> dict[str, Path]:
        """Return the picture and the tables."""
        order = ("set-", "contour-", "search")
        picture = next((name for start in order for name in self._pictures if name.startswith(start)), "search")
        return {
            "picture": self.path / f"{picture}.png",
            "table": self.path / "sets.csv",
            "points": self.path / "points.csv",
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _what_to_change(task: EquivalenceTask, through: Through) -> str:
    """Say what points are missing, and how there would be more."""
    if through == "orbit":
        return "the teacher's symmetry group has no more independent images; take smaller dimensions"
    entries = task.all_outcomes().values()
    losses = sorted(entry["loss"] for entry in entries if not entry["found"] and math.isfinite(entry["loss"]))
    others = ", ".join(f"{loss:.2g}" for loss in losses[:_MOST_LOSSES])
    lowest = f"the lowest J of the other candidates: {others}; " if losses else ""
    return (
        f"{lowest}found is what has J below {task.tolerance * task.scales['sample'].zero:.2g} and R below "
        f"{task.held_out:g}; raise members, max_rounds or the number of steps, or tolerance and held_out"
    )


def first_inputs(task: EquivalenceTask, most: int) -> Tensor:
    """Return the first of the inputs that the search's threshold is on. Shape ``[N, ...]``, ``N <= most``."""
    found, count = [], 0
    for batch in task.sample_inputs():
        found.append(batch)
        count += len(batch)
        if count >= most:
            break
    return torch.cat(found)[:most]


@contextmanager
def progress_bar(trainer: Trainer, title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show how far a grid is, on rank 0, where there is a progress bar.

    Yields:
        What to call with the number of points done and of all; or None.
    """
    if not trainer.is_global_zero or trainer.progress_bar_callback is None:
        yield None
        return
    with Progress(transient=True) as bar:
        line = bar.add_task(title)
        yield lambda done, total: bar.update(line, completed=done, total=total)


def _two_unit_class(teacher: torch.nn.Module, inputs: Tensor) -> TwoUnitClass | None:
    """Return the exact class of a network of two ReLU units of one input; None for others, or one-sided inputs."""
    if not is_relu_line(teacher) or weight_vector(teacher).numel() != _TWO_UNIT_WEIGHTS:
        return None
    if inputs.min() >= 0 or inputs.max() <= 0:
        return None
    return TwoUnitClass(weight_vector(teacher).double().cpu(), Moments.of(inputs.flatten().cpu()))


def _candidate_rows(task: EquivalenceTask, exact: TwoUnitClass | None) -> list[dict[str, Any]]:
    scale, held_out = task.scales["sample"], task.scales["held_out"]
    rows = []
    for number, entry in task.all_outcomes().items():
        if entry["found"]:
            outcome = "found"
        elif entry["stopped"]:
            outcome = "stopped"
        elif exact is not None:
            outcome = exact.diagnose(torch.tensor([entry["loss"]]), 0.01 * scale.constant)[0]
            outcome = {"reached": "nearly equivalent", "elsewhere": "on its way or stuck"}.get(outcome, outcome)
        else:
            outcome = _outcome(entry["loss"], scale)
        signs = ""
        if exact is not None and "weights" in entry:
            signs = "".join("0+-"[int(value)] for value in entry["weights"][:2].sign().tolist())
        rows.append(
            {
                "candidate": number,
                "round": entry["round"],
                "found": entry["found"],
                "outcome": outcome,
                "steps": entry["steps"],
                "J": _finite(entry["loss"]),
                "J_over_J0": _finite(entry["loss"] / scale.zero),
                "R": _finite(held_out.relative(entry["held_out"])),
                **{
                    f"steps_below_{level:g}_J0": step if step >= 0 else None
                    for level, step in zip(task.milestones, entry["milestones"], strict=True)
                },
                **({"input_signs": signs} if exact is not None else {}),
                "reason": entry["stopped"],
            }
        )
    return rows


def _outcome(loss: float, scale: FunctionScale) -> str:
    """Name what a candidate that was not found computes, from its J."""
    for name, level in (("zero function", scale.zero), ("best constant", scale.constant)):
        if abs(loss - level) <= 0.01 * level:
            return name
    if loss > scale.constant:
        return "worse than a constant"
    return "nearly equivalent" if loss < 0.01 * scale.constant else "on its way or stuck"


def _measured(slice_: _Slice) -> Iterator[tuple[SetNumbers, bool]]:
    yield slice_.numbers, False
    if slice_.finer is not None:
        yield slice_.finer, True


def _set_row(slice_: _Slice, numbers: SetNumbers, finer: bool) -> dict[str, Any]:
    facts = numbers.as_dict()
    exponent = facts.pop("exponent") or {}
    thin = facts.pop("resolution")
    return {
        "grid": slice_.name,
        "points": numbers.shape[0],
        "refined": finer,
        "bound": slice_.grid.bound,
        "epsilon": numbers.epsilon,
        "epsilon_over_J0": facts["tolerance"],
        "epsilon_over_V": facts["relative"],
        "fraction": facts["fraction"],
        "smallest_J": facts["smallest"],
        "betti": json.dumps(facts["betti"]),
        "pieces_full": facts["components_full"],
        "pieces_face": facts["components_face"],
        "touches_border": facts["border"],
        "spacing": thin["spacing"],
        "width": thin["width"],
        "exponent": exponent.get("exponent"),
        "exponent_error": exponent.get("error"),
        "joining": json.dumps(facts["joining"]),
        "warnings": " ".join(numbers.warnings),
    }


def _markers(slice_: _Slice, coordinates: Sequence[Sequence[float]] | None = None) -> list[FoundPoint]:
    """Return the points that a plane goes through, as figures mark them."""
    used = slice_.found[: slice_.grid.dimension + 1]
    vectors = torch.stack([point.weights for point in used]).to(slice_.plane.basis)
    places = slice_.plane.coordinates(vectors).tolist() if coordinates is None else coordinates
    return [
        FoundPoint(rf"$\theta_{index}$: {point.name}", place, point.loss)
        for index, (point, place) in enumerate(zip(used, places, strict=True))
    ]


def _exact_fields(slice_: _Slice, exact: TwoUnitClass) -> list[tuple[str, NDArray[np.float64]]]:
    """Return fields on the grid whose zeros are the exact class, or whose common zeros are."""
    coefficients = slice_.grid.coefficients(0, slice_.grid.size)
    residuals = exact.residuals(slice_.plane, coefficients.to(slice_.plane.basis.device)).cpu().numpy()
    fields = residuals.reshape(*slice_.grid.shape, 2)
    if exact.kind == "mixed":
        return [("slope above 0 is right", fields[..., 0]), ("slope below 0 is right", fields[..., 1])]
    active = int(exact.target[0] == 0)
    there = np.abs(fields[..., 1 - active]) <= 1e-12
    return [("exact class", np.where(there, fields[..., active], np.nan))]


def _slice_figures(
    slice_: _Slice, scale: FunctionScale, exact: TwoUnitClass | None, title: str
) -> Iterator[tuple[str, Figure]]:
    dimension, name, epsilon = slice_.grid.dimension, slice_.name, slice_.epsilon
    if dimension not in (2, 3) and not slice_.settings.umap:
        return
    warning, markers = scale.warning(epsilon), _markers(slice_)
    values, axis = slice_.values, slice_.axis
    heading = f"{title}: {slice_.through} points"
    if dimension == 2:
        overlay = _exact_fields(slice_, exact) if exact is not None and exact.kind != "zero" else []
        yield f"surface-{name}", loss_surface(values, axis, markers, scale, title=heading, warning=warning)
        yield (
            f"contour-{name}",
            log_contour(values, axis, markers, scale, epsilon=epsilon, overlay=overlay, title=heading, warning=warning),
        )
    inside = values < epsilon
    grid = slice_.grid
    chosen = torch.from_numpy(np.flatnonzero(inside))
    coefficients = grid.axis[torch.stack(torch.unravel_index(chosen, grid.shape), dim=1)].numpy()
    marks = {}
    if dimension == 3:
        field = None
        if exact is not None and exact.kind == "same_sign":
            field = _exact_fields(slice_, exact)[0][1]
            quadric = exact.quadric(slice_.plane)
            if math.isfinite(quadric.closing_epsilon) and quadric.centre_inside:
                marks["the throat closes"] = quadric.closing_epsilon
        yield (
            f"set-{name}",
            point_set(
                coefficients, values[inside], epsilon, grid.bound, markers, scale, title=heading, warning=warning
            ),
        )
        yield (
            f"isosurface-{name}",
            isosurface(values, axis, epsilon, markers, scale, overlay_field=field, title=heading, warning=warning),
        )
    if dimension in (2, 3):
        levels = epsilon * np.geomspace(0.1, 10, _LEVELS)
        found = [betti_numbers(slice_.finest < level) for level in levels]
        thin = (slice_.finer or slice_.numbers).resolution
        if math.isfinite(thin.curvature):
            marks["grid too coarse below"] = thin.curvature * thin.spacing**2 / 2
        names = ("pieces", "loops", "cavities")[:dimension]
        marks["epsilon"] = epsilon
        if exact is not None and exact.kind == "mixed":
            marks["barrier"] = exact.barrier
        yield (
            f"betti-{name}",
            betti_curve(
                levels,
                {label: [numbers[k] for numbers in found] for k, label in enumerate(names)},
                marks,
                title=heading,
            ),
        )
    if slice_.settings.umap and len(coefficients) >= 4:
        places = np.array([marker.coefficients for marker in markers])
        embedded = umap_embedding(coefficients, places, seed=0)
        yield (
            f"umap-{name}",
            embedding(
                embedded.coordinates,
                values[inside][embedded.chosen],
                epsilon,
                _markers(slice_, embedded.points.tolist()),
                scale,
                title=heading,
                warning=warning,
            ),
        )
