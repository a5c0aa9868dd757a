"""Regular grids on planes of weight space, and losses on all their points."""

import hashlib
import math
import pickle
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._distributed import gathered, ranks, summed, together
from lightning_sym._files import write_atomically
from lightning_sym.landscape.evaluation import LossSurface
from lightning_sym.landscape.planes import WeightPlane, as_exact

# Seconds between two writings of the partial file.
_SAVE_SECONDS = 20.0
# Errors from reading a damaged file.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError)
# For each point: the result, its sum over ranks, and the coefficients of some.
_POINT_BYTES = 3 * 8


@dataclass(frozen=True)
class Grid:
    """A cube of equally spaced coefficients; axis k of its arrays belongs to basis vector k ("ij" order).

    Args:
        dimension: Number m of axes, >= 1.
        points: Per axis, >= 2. With an odd number the grid has the centre of the plane as a point.
        bound: Half of the side, > 0.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> grid = Grid(dimension=2, points=5, bound=1.0)
        >>> grid.shape, grid.spacing
        ((5, 5), 0.5)
        >>> grid.coefficients(5, 7)
        tensor([[-0.5000, -1.0000],
                [-0.5000, -0.5000]], dtype=torch.float64)
    """

    dimension: int
    points: int
    bound: float

    def __post_init__(self) -> None:
        check_integers(of="a grid", dimension=self.dimension)
        check_integers(2, of="a grid", points=self.points)
        check_numbers("> 0", of="a grid", bound=self.bound)

    @property
    def axis(self) -> Tensor:
        """The coefficients along every axis, rising, shape [points], float64."""
        return torch.arange(self.points, dtype=torch.float64) / (self.points - 1) * (2 * self.bound) - self.bound

    @property
    def shape(self) -> tuple[int, ...]:
        """``(points,) * dimension``."""
        return (self.points,) * self.dimension

    @property
    def size(self) -> int:
        """The number of points, ``points ** dimension``."""
        return int(self.points**self.dimension)

    @property
    def spacing(self) -> float:
        """The distance of neighbours along an axis."""
        return 2 * self.bound / (self.points - 1)

    def coefficients(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the coefficients of points.

        Args:
            start: The first point in C order.
            stop: The point after the last one; None for the end.

        Returns:
            Shape [stop - start, dimension], float64.

        Raises:
            ValueError: If ``0 <= start <= stop <= size`` does not hold.
        """
        stop = self.size if stop is None else stop
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"start and stop must satisfy 0 <= start <= stop <= {self.size}, got {start} and {stop}.")
        numbers = torch.arange(start, stop)
        powers = [self.points**axis for axis in reversed(range(self.dimension))]
        return self.axis[torch.stack([numbers // power % self.points for power in powers], 1)]

    def index_of(self, coefficients: Tensor) -> Tensor:
        """Return the indices of the nearest points.

        Args:
            coefficients: Shape [..., dimension], floating.

        Returns:
            Shape [..., dimension], int64; all -1 for coefficients more than half a spacing outside the grid, or not
            finite.

        Raises:
            ValueError: If the shape is wrong.
        """
        places = (as_exact(coefficients, self.dimension, "coefficients") + self.bound) / self.spacing
        inside = ((places >= -0.5) & (places <= self.points - 0.5)).all(-1, keepdim=True)
        nearest = places.nan_to_num().round().clamp(0, self.points - 1).long()
        return torch.where(inside, nearest, -1)


class GridTooLargeError(ValueError):
    """A grid is expected to exceed a limit of time or memory; the message names both."""


def evaluate_grid(
    surface: LossSurface,
    plane: WeightPlane,
    grid: Grid,
    *,
    below: float | None = None,
    partial: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    limit_seconds: float | None = 600,
    limit_bytes: int | None = 2 * 2**30,
) -> Tensor:
    """Return the losses on all points of a grid.

    With several processes (``torch.distributed`` initialised; to be called on every rank with the same arguments) each
    evaluates some blocks of points, and all get the result. Blocks begin at multiples of ``surface.chunk``. So the
    result is bitwise the same for any number of ranks and after any interruption, with the same method, number of
    threads and machine; see :class:`~lightning_sym.landscape.evaluation.LossSurface` for
    methods that are chosen by timing.

    Args:
        surface: The surface to evaluate.
        plane: Where the coefficients belong to.
        grid: Grid of the plane's dimension.
        below: As for :meth:`LossSurface.on`: only losses below are wanted, others become ``inf``.
        partial: A file that keeps the progress: every 20 seconds and when an error or Ctrl-C ends the work. If it
            exists, the work resumes from it, with any number of ranks; at the end it is removed. Rank r > 0 writes
            ``<partial>.<r>``. None keeps nothing.
        progress: Called on every rank after each block with the number of points done and the number to do, those of
            this rank.
        limit_seconds: The longest time that may be expected; None for any.
        limit_bytes: The most memory that may be expected, in bytes, of every rank; None for any.

    Returns:
        Shape ``grid.shape``, float64, on the CPU.

    Raises:
        GridTooLargeError: If an estimate is above its limit.
        ValueError: If dimensions do not fit, or the partial file is damaged or belongs to another grid, network, data,
            method, precision or chunk.
        OSError: If the partial file cannot be written.
    """
    if plane.dimension != grid.dimension:
        raise ValueError(
            f"The grid has {grid.dimension} axes and the plane {plane.dimension} dimensions; make them equal."
        )
    needed = grid.size * _POINT_BYTES
    if limit_bytes is not None and needed > limit_bytes:
        raise GridTooLargeError(
            f"{_points(grid)} need about {needed / 2**30:.3g} GiB, above limit_bytes ({limit_bytes / 2**30:.3g} GiB); "
            "take fewer points, or pass limit_bytes=None."
        )
    middle = grid.size // 2
    together(lambda: surface.choose(plane, grid.coefficients(middle, min(middle + surface.chunk, grid.size))))
    surface.method = gathered(surface.method)[0]
    work = _Work(surface, plane, grid, below, None if partial is None else Path(partial))
    together(work.load)
    work.share()
    if limit_seconds is not None:
        seconds = max(gathered(work.estimate(limit_seconds)))
        if seconds > limit_seconds:
            raise GridTooLargeError(
                f"{_points(grid)} need about {seconds:.3g} s ({ranks()} process(es)), above limit_seconds "
                f"({limit_seconds:g} s); take fewer points or inputs, or pass limit_seconds=None."
            )
    together(lambda: work.run(progress))
    own = torch.from_numpy(work.values)
    values = summed(own.to(surface.device) if surface.device.type == "cuda" else own).cpu()
    work.remove()
    return values.view(grid.shape)


def _points(grid: Grid) -> str:
    return f"{grid.points}^{grid.dimension} = {grid.size} points"


class _Work:
    """The blocks of a grid: which are done, which are this rank's, and their file."""

    def __init__(
        self, surface: LossSurface, plane: WeightPlane, grid: Grid, below: float | None, path: Path | None
    ) -> None:
        self.surface, self.plane, self.grid, self.below, self.path = surface, plane, grid, below, path
        self.chunk = surface.chunk
        self.values = np.zeros(grid.size)
        self.done = np.zeros(-(-grid.size // self.chunk), dtype=bool)
        self.todo: list[int] = []
        self.rank = torch.distributed.get_rank() if ranks() > 1 else 0
        self.own_path = path.with_name(f"{path.name}.{self.rank}") if path is not None and self.rank else path
        self.loaded: list[Path] = []
        self.fingerprint = grid_fingerprint(surface, plane, grid, below) if path is not None else ""

    def points(self, block: int) -> slice:
        return slice(block * self.chunk, min((block + 1) * self.chunk, self.grid.size))

    def points_of(self, blocks: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the points of some blocks."""
        return np.repeat(blocks, self.chunk)[: self.grid.size]

    def evaluate(self, points: slice) -> NDArray[np.float64]:
        coefficients = self.grid.coefficients(points.start, points.stop)
        return self.surface.on(self.plane, coefficients, below=self.below).numpy()

    def load(self) -> None:
        """Read this rank's points from partial files of all ranks."""
        if self.path is None:
            return
        others = self.path.parent.glob(f"{self.path.name}.*") if self.path.parent.is_dir() else ()
        for path in (self.path, *sorted(path for path in others if path.suffix[1:].isdecimal())):
            if not path.exists():
                continue
            try:
                with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                    found, done, values = str(file["fingerprint"]), file["done"], file["values"]
                readable = done.dtype == bool and values.dtype == np.float64 and done.ndim == values.ndim == 1
            except _DAMAGED:
                readable = False
            if not readable:
                raise ValueError(f"The partial file {path} is damaged; remove it to restart.")
            fits = found == self.fingerprint and len(done) == len(self.done)
            if not fits or (points := self.points_of(done)).sum() != len(values):
                raise ValueError(
                    f"The partial file {path} belongs to another grid, network, data, method, precision or chunk; "
                    "remove it or name another file."
                )
            self.values[points] = values
            self.done |= done
            self.loaded.append(path)

    def share(self) -> None:
        """Give each block that is done to the first rank that has it, and divide the others."""
        everywhere = np.stack(gathered(self.done))
        earlier = np.logical_or.reduce(everywhere[: self.rank])
        self.values[self.points_of(earlier)] = 0.0
        self.done &= ~earlier
        self.todo = np.flatnonzero(~np.logical_or.reduce(everywhere)).tolist()[self.rank :: ranks()]

    @property
    def count(self) -> int:
        """Number of points of this rank."""
        return sum((part := self.points(block)).stop - part.start for block in self.todo)

    def estimate(self, limit: float) -> float:
        """Return the seconds that this rank needs: from one point, and if that is too long from a block."""
        if not (count := self.count):
            return 0.0
        start = self.points(self.todo[len(self.todo) // 2]).start
        seconds = math.inf
        for size in (1, 1, min(self.chunk, count)):
            before = time.perf_counter()
            self.evaluate(slice(start, min(start + size, self.grid.size)))
            seconds = min(seconds, (time.perf_counter() - before) / size * count)
            if seconds <= limit:
                break
        return seconds

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Evaluate this rank's blocks."""
        saved = time.monotonic()
        total, count, unsaved = self.count, 0, False
        try:
            for block in self.todo:
                part = self.points(block)
                self.values[part] = self.evaluate(part)
                self.done[block] = unsaved = True
                if self.path is not None and time.monotonic() - saved > _SAVE_SECONDS:
                    self.save()
                    saved, unsaved = time.monotonic(), False
                count += part.stop - part.start
                if progress is not None:
                    progress(count, total)
        finally:  # another rank may be slower, or fail
            if self.path is not None and unsaved and (ranks() > 1 or not self.done.all()):
                self.save()

    def save(self) -> None:
        """Write the blocks that are this rank's, those read before included."""
        assert self.own_path is not None
        name, values = np.array(self.fingerprint), self.values[self.points_of(self.done)]
        write_atomically(self.own_path, lambda file: np.savez(file, fingerprint=name, done=self.done, values=values))

    def remove(self) -> None:
        """Remove the partial files; all ranks have the result."""
        for path in (self.own_path, *self.loaded):
            if path is not None:
                path.unlink(missing_ok=True)


def grid_fingerprint(surface: LossSurface, plane: WeightPlane, grid: Grid, below: float | None = None) -> str:
    """Return a name for everything that the losses on a grid depend on.

    Args:
        surface: After its method is chosen. A loss function counts by its module and name only.
        plane: Plane in weight space.
        grid: On the plane.
        below: As for :func:`evaluate_grid`.

    Returns:
        64 hexadecimal digits: of network, frozen weights and buffers, plane, inputs, targets, loss, method, precision,
        chunk, grid and ``below``.
    """
    digest = hashlib.sha256()
    for text in (*surface.description(), repr((grid.dimension, grid.points, grid.bound)), repr(below)):
        digest.update(text.encode() + b"\0")
    for tensor in (plane.centre, plane.basis, *surface.constants()):
        digest.update(f"{tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
