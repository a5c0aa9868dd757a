"""UMAP of a set of weights keeps its pieces apart, is repeatable, and says what it needs."""

import builtins

import numpy as np
import pytest

from lightning_sym.landscape.embedding import umap_embedding


@pytest.mark.slow  # UMAP is compiled by numba at first use
def test_two_clusters_stay_apart_and_the_same_seed_gives_the_same():
    rng = np.random.default_rng(0)
    centres = np.array([[0.0, 0, 0], [10, 0, 0]])
    rows = np.concatenate([centre + 0.3 * rng.normal(size=(60, 3)) for centre in centres])
    first, again = (umap_embedding(rows, centres, seed=1, most=80) for _ in range(2))
    assert first.coordinates.shape == (80, 2)
    assert first.points.shape == (2, 2)
    assert first.coordinates.dtype == np.float64
    assert (np.diff(first.chosen) > 0).all()
    np.testing.assert_array_equal(first.chosen, again.chosen)
    np.testing.assert_array_equal(first.coordinates, again.coordinates)
    np.testing.assert_array_equal(first.points, again.points)
    cluster = first.chosen // 60
    middles = np.stack([first.coordinates[cluster == k].mean(0) for k in range(2)])
    spread = max(np.linalg.norm(first.coordinates[cluster == k] - middles[k], axis=1).max() for k in range(2))
    assert np.linalg.norm(middles[1] - middles[0]) > 2 * spread
    distances = np.linalg.norm(first.points[:, None] - middles, axis=-1)
    assert distances.argmin(1).tolist() == [0, 1]  # each found point among its cluster
    for few in (3, 9, 22):  # fewer than the neighbours, or than the start needs
        small = umap_embedding(rows[:few], centres[:1], seed=0)
        assert small.chosen.tolist() == list(range(few))
        assert np.isfinite(small.coordinates).all()


def test_a_missing_package_is_named(monkeypatch):
    def absent(name, *arguments, original=builtins.__import__, **keywords):
        if name == "umap":
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r'pip install "lightning_sym\[umap\]"'):
        umap_embedding(np.zeros((9, 3)), np.zeros((1, 3)), seed=0)
