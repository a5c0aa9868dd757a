"""Grids: their points, their losses, and long ones that are interrupted."""

import os
import time

import numpy as np
import pytest
import torch
from helpers import assert_refused
from torch import nn

from lightning_sym.landscape import grids
from lightning_sym.landscape.evaluation import LossSurface
from lightning_sym.landscape.grids import Grid, GridTooLargeError, evaluate_grid, grid_fingerprint
from lightning_sym.landscape.planes import WeightPlane
from lightning_sym.networks import MultiLayerPerceptron


def small(method="affine", chunk=7, dimension=2, dtype=torch.float64, seed=0):
    """Return a surface of a small perceptron, and a plane."""
    torch.manual_seed(seed)
    network = MultiLayerPerceptron(widths=[3], image_size=2, num_classes=2).to(dtype)
    inputs = torch.randn(150, 4, dtype=dtype)
    surface = LossSurface(network, inputs, network(inputs), method=method, chunk=chunk)
    return surface, WeightPlane.through(torch.randn(dimension + 1, surface.size))


# ---- points

# Dimension, points along an axis, bound.
CUBES = [(1, 2, 3), (2, 5, 1.0), (3, 4, 1.5), (4, 3, 13.0), (1, 101, 0.1), (2, 35, 2)]


@pytest.mark.parametrize(("dimension", "points", "bound"), CUBES)
def test_coefficients_are_a_cartesian_product(dimension, points, bound):
    grid = Grid(dimension, points, bound)
    axis = torch.tensor([-bound + i / (points - 1) * 2 * bound for i in range(points)], dtype=torch.float64)
    expected = torch.stack(torch.meshgrid([axis] * dimension, indexing="ij"), -1)
    assert grid.shape == tuple(expected.shape[:-1])
    assert grid.size == expected[..., 0].numel()
    assert torch.equal(grid.axis, axis)
    assert grid.axis[points // 2] == 0 or points % 2 == 0
    assert torch.equal(grid.coefficients().view(expected.shape), expected)
    assert torch.equal(grid.coefficients(1, grid.size - 1), grid.coefficients()[1:-1])
    assert grid.coefficients(1, 1).shape == (0, dimension)
    assert grid.spacing == pytest.approx(2 * bound / (points - 1))


def test_indices_are_those_of_the_nearest_points():
    grid = Grid(3, 6, 1.5)
    everywhere = grid.coefficients().view(*grid.shape, 3)
    expected = torch.stack(torch.meshgrid([torch.arange(6)] * 3, indexing="ij"), -1)
    jitter = 0.49 * grid.spacing * (2 * torch.rand(everywhere.shape, generator=torch.Generator().manual_seed(0)) - 1)
    assert torch.equal(grid.index_of(everywhere + jitter), expected)
    outside = torch.tensor([[1.81, 0, 0], [0, -1.81, 0], [torch.nan, 0, 0], [torch.inf, 0, 0], [1.79, 0, 0]])
    assert (grid.index_of(outside) == -1).all(1).tolist() == [True, True, True, True, False]


# ---- losses


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_losses_lie_where_their_coefficients_are(dimension):
    surface, plane = small(dimension=dimension)
    grid = Grid(dimension, 5, 2.0)
    values = evaluate_grid(surface, plane, grid)
    assert values.shape == grid.shape
    assert values.dtype == torch.float64
    cell = tuple(range(1, dimension + 1))
    expected = surface.at(plane.weights(grid.axis[torch.tensor(cell)])[None])
    torch.testing.assert_close(values[cell], expected[0], rtol=1e-12, atol=0)
    found = evaluate_grid(surface, plane, grid, below=float(values.median()))
    assert torch.equal(found, torch.where(values < values.median(), values, torch.inf))


class _Interruption(BaseException):
    pass


def interrupt(surface, plane, grid, path, blocks, error=_Interruption):
    def progress(done, total):
        nonlocal blocks
        blocks -= 1
        if not blocks:
            raise error

    with pytest.raises(error):
        evaluate_grid(surface, plane, grid, partial=path, progress=progress)


@pytest.mark.parametrize("method", ["affine", "vmap", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_interrupted_grid_goes_on_to_the_same_bits(tmp_path, method, dtype):
    grid, path = Grid(2, 6, 1.0), tmp_path / "grid.npz"
    whole = evaluate_grid(*small(method, dtype=dtype), grid)
    interrupt(*small(method, dtype=dtype), grid, path, 2)
    assert path.exists()
    interrupt(*small(method, dtype=dtype), grid, path, 1, KeyboardInterrupt)
    calls = []
    found = evaluate_grid(*small(method, dtype=dtype), grid, partial=path, progress=lambda *call: calls.append(call))
    assert torch.equal(found, whole)
    assert calls == [(7, 15), (14, 15), (15, 15)]  # three blocks of seven were done
    assert list(tmp_path.iterdir()) == []


def test_progress_is_kept_while_the_work_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(grids, "_SAVE_SECONDS", 0.0)
    path = tmp_path / "new folder" / "grid.npz"
    seen = []
    evaluate_grid(*small(), Grid(2, 5, 1.0), partial=path, progress=lambda *call: seen.append(path.exists()))
    assert seen == [True] * 4
    assert not path.exists()


@pytest.mark.parametrize("change", ["seed", "chunk", "method", "grid", "below", "dtype"])
def test_a_partial_file_of_something_else_is_refused(tmp_path, change):
    grid, path = Grid(2, 6, 1.0), tmp_path / "grid.npz"
    interrupt(*small(), grid, path, 2)
    before = path.read_bytes()
    changes = {"seed": {"seed": 1}, "chunk": {"chunk": 6}, "method": {"method": "loop"}}.get(change, {})
    changes |= {"dtype": torch.float32} if change == "dtype" else {}
    grid = Grid(2, 6, 1.5) if change == "grid" else grid
    below = 1.0 if change == "below" else None
    says = ("grid.npz belongs to another grid, ", "; remove it or name another file")
    assert_refused(lambda: evaluate_grid(*small(**changes), grid, partial=path, below=below), says=says)
    assert path.read_bytes() == before


def test_damaged_partial_files_are_refused(tmp_path):
    grid, path = Grid(2, 6, 1.0), tmp_path / "grid.npz"
    interrupt(*small(), grid, path, 2)
    content = path.read_bytes()
    damaged = [b"", b"nonsense", content[: len(content) // 2], content.replace(b"done", b"gone")]
    flipped = bytearray(content)
    flipped[content.index(b"values.npy") + 200] ^= 255
    for wrong in (*damaged, bytes(flipped)):
        path.write_bytes(wrong)
        assert_refused(lambda: evaluate_grid(*small(), grid, partial=path), says="grid.npz is damaged; remove it to")
    with path.open("wb") as file:
        np.savez(file, fingerprint=np.array([{}], dtype=object), done=np.zeros(1, bool), values=np.zeros(1))
    assert_refused(lambda: evaluate_grid(*small(), grid, partial=path), says="is damaged")


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Cannot write"):
        interrupt(*small(), Grid(2, 6, 1.0), tmp_path / "file" / "grid.npz", 1)
    assert os.listdir(tmp_path) == ["file"]


def test_frozen_weights_and_buffers_count():
    def fingerprint(scale: float) -> str:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))
        network[1].running_mean *= 0
        network[1].running_mean += scale
        surface = LossSurface(network, torch.randn(20, 4), torch.zeros(20, 1), method="loop")
        return grid_fingerprint(surface, WeightPlane.through(torch.randn(3, surface.size)), Grid(2, 5, 1.0))

    assert fingerprint(0.5) == fingerprint(0.5)
    assert fingerprint(0.5) != fingerprint(0.25)
    assert len(fingerprint(0.5)) == 64


# ---- limits


def too_large(says, surface, plane, grid, **options):
    assert_refused(lambda: evaluate_grid(surface, plane, grid, **options), says=says, error=GridTooLargeError)


def test_only_what_is_left_counts_for_the_limit(tmp_path):
    class Slow(nn.Linear):
        def forward(self, x):
            torch.bmm(torch.zeros(1, 300, 300), torch.zeros(1, 300, 300))
            return super().forward(x)

    network = Slow(2, 1)
    surface = LossSurface(network, torch.ones(3, 2), torch.zeros(3, 1), method="loop", chunk=1)
    plane, grid, path = WeightPlane.through(torch.eye(3)), Grid(2, 15, 1.0), tmp_path / "grid.npz"
    interrupt(surface, plane, grid, path, 224)
    seconds = []
    for _ in range(5):
        before = time.perf_counter()
        surface.on(plane, torch.zeros(1, 2))
        seconds.append(time.perf_counter() - before)
    limit = 50 * min(seconds)
    evaluate_grid(surface, plane, grid, partial=path, limit_seconds=limit)
    too_large("limit_seconds", surface, plane, grid, limit_seconds=limit / 10)
