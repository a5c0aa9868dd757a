"""Embedding of a set of weights in two dimensions with UMAP."""

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_sym._checks import check_integers

_NEIGHBOURS = 20
_MIN_DIST = 0.5


@dataclass(frozen=True, eq=False)
class Embedding:
    """Coordinates of a set and of the found points by UMAP.

    Attributes:
        chosen: Which rows of the set were embedded, ascending; all if there were few enough. Shape ``[k]``, int64.
        coordinates: Coordinates of the chosen rows. Shape ``[k, 2]``, float64.
        points: Coordinates of the found points. Shape ``[q, 2]``, float64.
    """

    chosen: NDArray[np.int64]
    coordinates: NDArray[np.float64]
    points: NDArray[np.float64]


def umap_embedding(coefficients: ArrayLike, points: ArrayLike, *, seed: int, most: int = 5000) -> Embedding:
    """Embed a set of weights and the found points together in two dimensions.

    The coefficients in an orthonormal basis of a plane have the distances of the weights themselves, so the result is
    that for the weights. UMAP keeps neighbourhoods, not distances: whether the set is connected has to be asked of the
    grid (:func:`~lightning_sym.landscape.sets.betti_numbers`), not of the picture.

    Args:
        coefficients: The set. Shape ``[k, m]``.
        points: The found points, fitted together with the set. Shape ``[q, m]``.
        seed: Seed of UMAP and of the choice; the same seed gives the same coordinates.
        most: Beyond this many rows of the set, a random choice of this many is embedded; >= 1.

    Returns:
        The coordinates. Neighbours are 20, or all others if there are fewer; the minimal distance is 0.5.

    Raises:
        ValueError: If shapes do not fit, an entry is not finite, or there are fewer than 4 rows in all.
        ImportError: If umap-learn is not installed.

    References:
        Lengyel et al. (2020), GENNI, figure 3; McInnes, Healy, Melville (2018), UMAP, arXiv:1802.03426.
    """
    rows, found = np.asarray(coefficients, dtype=np.float64), np.asarray(points, dtype=np.float64)
    if rows.ndim != 2 or found.ndim != 2 or rows.shape[1] != found.shape[1]:
        raise ValueError(
            f"coefficients and points must have shapes [k, m] and [q, m], got {list(rows.shape)} and "
            f"{list(found.shape)}."
        )
    if not (np.isfinite(rows).all() and np.isfinite(found).all()):
        raise ValueError("coefficients and points must be finite; leave out the rows that are not.")
    check_integers(most=most)
    chosen = np.arange(len(rows))
    if len(rows) > most:
        chosen = np.sort(np.random.default_rng(seed).choice(len(rows), most, replace=False))
    together = np.concatenate([rows[chosen], found])
    if len(together) < 4:
        raise ValueError(
            f"An embedding needs at least 4 points, got {len(together)}; raise epsilon or refine the grid."
        )
    with warnings.catch_warnings():
        # With a fixed seed UMAP uses one thread, and warns; TensorFlow is for a variant that is not used.
        warnings.filterwarnings("ignore", message="n_jobs value .* overridden to 1 by setting random_state")
        warnings.filterwarnings("ignore", message="Tensorflow not installed")
        try:
            from umap import UMAP
        except ImportError as error:
            raise ImportError('The embedding needs umap-learn: pip install "lightning_sym[umap]".') from error
        fitted = UMAP(
            n_components=2,
            n_neighbors=min(_NEIGHBOURS, len(together) - 1),
            min_dist=_MIN_DIST,
            metric="euclidean",
            # The spectral start needs more points than it computes eigenvectors.
            init="spectral" if len(together) > 10 else "random",
            random_state=seed,
        ).fit_transform(together)
    coordinates = np.asarray(fitted, dtype=np.float64)
    return Embedding(chosen, coordinates[: len(chosen)], coordinates[len(chosen) :])
