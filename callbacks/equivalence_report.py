"""Report of a search for equivalent weights: planes through its points, and sets of nearly equivalent weights."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn

from lightning_sym import landscape
from lightning_sym._checks import check_integers, check_numbers, check_words
from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InputDataModule
from lightning_sym.figures import isosurface_mesh
from lightning_sym.reports import RunResults
from lightning_sym.reports.equivalence import (
    EvaluatedGrid,
    PlaneGrid,
    PlanePoint,
    SearchData,
    Through,
    equivalence_results,
    evaluated_grids,
    point_rows,
)
from lightning_sym.reports.report import picked
from lightning_sym.tasks import EquivalenceTask, FoundWeights

_TWO_UNIT_WEIGHTS = 4
_FIGURES = ("surface", "contour", "set", "isosurface", "betti", "umap")
_MOST_LOSSES = 3


class EquivalenceReport(RunReport):
    r"""Report a search with :class:`lightning_sym.tasks.EquivalenceTask`, and draw planes through the found points.

    Each grid has an orthonormal basis of the plane through the found points. J is evaluated on it. The set
    ``J < epsilon`` is described by its fraction, Betti numbers, volume exponent, and the epsilon that joins found
    points. Figures are those of GENNI, compared with the exact class if it is known, as for two ReLU units. If the
    points do not suffice for all planes, the others are drawn, and the notes list the missing points.

    Files in ``results``:

    - ``candidates.csv``: all candidates and their outcomes
    - ``points.csv``: J, R, distance to the teacher's orbit and coordinates of the found points
    - ``sets.csv`` and ``.json``: a row for each grid
    - ``found.safetensors``: weights, bases and centres
    - ``grid-<points>-<m>d.safetensors``: J on the grid

    Figures are also in TensorBoard under ``figures/EquivalenceReport``, with 3D sets as meshes: ``search.png``,
    ``surface-...png``, ``contour-...png``, ``set-...png``, ``isosurface-...png``, ``betti-...png``, ``umap-...png``.

    A grid that was interrupted is continued by ``--ckpt_path last``. Grids are shared out over processes.

    Args:
        grids: The grids; default ``m = 2`` with 101 and ``m = 3`` with 51 points per axis.
        epsilon: Bound of J of the sets, > 0, in the unit of ``epsilon_unit``.
        epsilon_unit: ``"J0"``, the J of the zero function on the inputs of the grid, or ``"J"``: J itself.
        through: Points that span the planes: ``"search"``, the found points, that with the lowest J first; ``"orbit"``,
            the teacher and random images of it under its symmetry group; ``"mixed"``, found points and images in turn.
        inputs: Number of the search's inputs for J, >= 1.
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

    needs = (
        *("teacher", "network", "about_teacher", "points", "seed", "members", "tolerance", "held_out", "milestones"),
        *("scales", "found_points", "orbit_points", "all_outcomes", "success_fraction", "curves"),
        *("title", "copy_of_teacher", "sample_inputs", "held_out_surface"),
    )
    example = "EquivalenceTask"
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
        check_numbers("> 0", epsilon=epsilon)
        check_integers(inputs=inputs)
        kinds = ("search", "orbit", "mixed")
        if isinstance(through, str) or not through or not set(through) <= set(kinds):
            raise ValueError(f"through must be a list of some of {', '.join(kinds)}, got {through!r}.")
        check_words(("epsilon_unit", epsilon_unit, ("J0", "J")), ("precision", precision, ("double", "single")))
        self.grids = [PlaneGrid(2, 101), PlaneGrid(3, 51)] if grids is None else list(grids)
        self.epsilon = epsilon
        self.epsilon_unit = epsilon_unit
        self.through: tuple[Through, ...] = tuple(dict.fromkeys(through))
        self.inputs = inputs
        self.precision = precision
        self.limit_seconds = limit_seconds
        self.limit_bytes = limit_bytes
        self.evaluated: list[EvaluatedGrid] = []

    # ---- checks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the settings that do not depend on the teacher.

        Raises:
            ImportError: If an embedding is asked for, and umap-learn is not installed.
            TypeError: If the task lacks a required attribute, or the data are of another kind.
            ValueError: If a grid goes through more points than the search looks for.
        """
        super().setup(trainer, pl_module, stage)
        if not self.active:
            return
        if any(grid.umap for grid in self.grids) and find_spec("umap") is None:
            raise ImportError(
                'A grid with umap: true needs umap-learn: pip install "lightning_sym[umap]", or set umap to false.'
            )
        task: Any = pl_module
        points = task.points
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
        if not self.active:
            return
        task: Any = pl_module
        size = landscape.weight_vector(task.teacher).numel()
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

    def measure(self, trainer: Trainer, task: EquivalenceTask, data: InputDataModule) -> Any:
        """Evaluate all grids; return them and the reasons for missing ones."""
        task.on_train_end()  # Lightning calls it after those of callbacks
        teacher, inputs, targets, scale = self._teacher_on_inputs(task, trainer.strategy.root_device)
        surface = landscape.LossSurface(teacher, inputs, targets, dtype=inputs.dtype)

        def on_grid(plane: landscape.WeightPlane, grid: landscape.Grid, name: str) -> NDArray[np.float64]:
            # Named for its grid and plane, so that a grid of another search is not resumed.
            key = hashlib.sha256(repr((grid, plane.centre.tolist(), plane.basis.tolist())).encode()).hexdigest()[:12]
            with self.progress(trainer, f"J on the {name} grid") as progress:
                return landscape.evaluate_grid(
                    surface,
                    plane,
                    grid,
                    partial=self.path / f".grid-{name}-{key}.partial",
                    progress=progress,
                    limit_seconds=self.limit_seconds,
                    limit_bytes=self.limit_bytes,
                ).numpy()

        found = [
            one
            for through in self.through
            for one in evaluated_grids(
                through,
                self._found(task, through),
                self.grids,
                scale,
                on_grid,
                epsilon=self.epsilon,
                unit=scale.zero if self.epsilon_unit == "J0" else 1.0,
                advice=_what_to_change(task, through),
            )
        ]
        self.evaluated = [one for one in found if isinstance(one, EvaluatedGrid)]
        return [one for one in found if isinstance(one, str)], teacher, inputs, scale

    def report(self, trainer: Trainer, task: EquivalenceTask, data: InputDataModule, measured: Any) -> RunResults:
        """Return candidates, points and sets, with figures."""
        missing, teacher, inputs, scale = measured
        exact, all_inputs = two_unit_class(teacher, inputs), torch.zeros(0)
        if landscape.is_relu_line(teacher):  # few numbers; they give the moments of the exact theory
            all_inputs = torch.cat(list(task.sample_inputs())).to(inputs)
        search = SearchData(
            task.title(),
            task.all_outcomes(),
            task.milestones,
            task.tolerance,
            task.success_fraction(),
            task.scales["sample"],
            task.scales["held_out"],
            task.curves(),
            two_unit_class(teacher, all_inputs),
        )
        points = {point.name: point for one in self.evaluated for point in one.points}
        points |= {point.name: point for point in task.found_points()}
        stored = {f"point-{name.replace(' ', '-')}": point.weights.contiguous() for name, point in points.items()}
        held_out = search.held_out
        about = {
            "teacher": task.about_teacher,
            "architecture": task.network.architecture,
            "J0": scale.zero,
            "V": scale.constant,
            "held_out": {"J0": held_out.zero, "V": held_out.constant},
            "seed": task.seed,
            "settings": picked(task, "members", "points", "tolerance", "held_out"),
            "success_fraction": search.success_fraction,
            "steps": trainer.global_step,
            "inputs": self.inputs,
            "precision": self.precision,
            **self.source(data),
        }
        return equivalence_results(
            search,
            self.evaluated,
            self._point_rows(task, list(points.values()), teacher, inputs[:2]),
            {**stored, "teacher": landscape.weight_vector(task.teacher).cpu()},
            scale=scale,
            exact=exact,
            missing=missing,
            about=about,
        )

    def publish(self, trainer: Trainer, results: RunResults) -> None:
        """Write and draw everything; delete files of a replaced search, or of this search with other grids."""
        stale = [*self.path.glob(".grid-*.partial*"), *self.path.glob("grid-*.safetensors"), self.path / "beside.png"]
        for leftover in [*stale, *(path for kind in _FIGURES for path in self.path.glob(f"{kind}-*.png"))]:
            leftover.unlink(missing_ok=True)
        super().publish(trainer, results)
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        for one in [one for one in self.evaluated if one.grid.dimension == 3 and boards]:
            vertices, faces = isosurface_mesh(one.values, one.axis, one.epsilon)
            for logger in boards if len(faces) else []:
                logger.experiment.add_mesh(
                    f"{type(self).__name__}/{one.name}",
                    torch.from_numpy(np.ascontiguousarray(vertices, np.float32))[None],
                    faces=torch.from_numpy(np.ascontiguousarray(faces, np.int32))[None],
                    global_step=trainer.global_step,
                )

    def _teacher_on_inputs(
        self, task: EquivalenceTask, device: torch.device
    ) -> tuple[torch.nn.Module, Tensor, Tensor, landscape.FunctionScale]:
        """Return a copy of the teacher in the grids' precision, the grids' inputs, its outputs, and its scale there."""
        task.to(device)
        kind = torch.float64 if self.precision == "double" else torch.float32
        inputs = first_inputs(task.sample_inputs(), self.inputs).to(kind)
        # Copied: the task's own teacher keeps its precision.
        teacher = task.copy_of_teacher().to(inputs)
        with torch.no_grad():
            targets = teacher(inputs)
        scale = landscape.FunctionScale.of(targets.flatten(1))
        if scale.constant == 0:
            raise ValueError(
                f"The teacher is constant on the {len(inputs)} inputs of the grids; raise inputs of EquivalenceReport."
            )
        return teacher, inputs, targets, scale

    def _found(self, task: EquivalenceTask, through: Through) -> list[FoundWeights]:
        """Return the points that a plane goes through, the first one its centre, the others independent of it."""
        searched, needed = task.found_points(), self._most_points
        if through == "search":
            return searched[:needed]
        if through == "orbit":
            vector = landscape.weight_vector(task.teacher).cpu()
            points = [FoundWeights("teacher", vector, 0.0, 0.0, None), *task.orbit_points(needed - 1)]
        else:
            images = task.orbit_points(max(1, needed // 2))
            points = [point for pair in zip_longest(searched, images) for point in pair if point is not None]
        vectors = torch.stack([point.weights.double() for point in points])
        accepted = landscape.independent(vectors[1:] - vectors[0])
        return [points[0], *(points[1 + index] for index in accepted)][:needed]

    def _point_rows(
        self, task: EquivalenceTask, points: Sequence[PlanePoint], teacher: nn.Module, example: Tensor
    ) -> list[dict[str, Any]]:
        if not points:
            return []
        target = landscape.weight_vector(teacher)
        vectors = torch.stack([point.weights for point in points]).to(target)
        held_out = task.held_out_surface(target.dtype).at(vectors).tolist()
        distances = landscape.orbit_distances(teacher, vectors, target, example)
        return point_rows(points, vectors, held_out, distances, task.scales["held_out"], self.evaluated)


def _what_to_change(task: EquivalenceTask, through: Through) -> str:
    """Describe the missing points and how to obtain more."""
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


def first_inputs(batches: Iterable[Tensor], most: int) -> Tensor:
    """Return the first inputs of some batches. Shape ``[N, ...]``, ``N <= most``."""
    found: list[Tensor] = []
    for batch in batches:
        found.append(batch)
        if sum(map(len, found)) >= most:
            break
    return torch.cat(found)[:most]


def two_unit_class(teacher: nn.Module, inputs: Tensor) -> landscape.TwoUnitClass | None:
    """Return the exact class of a network of two ReLU units of one input; None for others, or one-sided inputs."""
    if not landscape.is_relu_line(teacher) or landscape.weight_vector(teacher).numel() != _TWO_UNIT_WEIGHTS:
        return None
    if inputs.min() >= 0 or inputs.max() <= 0:
        return None
    return landscape.TwoUnitClass(
        landscape.weight_vector(teacher).double().cpu(), landscape.Moments.of(inputs.flatten().cpu())
    )
