"""The tangent space of a network's orbit."""

from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from lightning_sym.symmetry.arrays import Floats
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.charts import Charts, charted
from lightning_sym.symmetry.group.statistics import counted_twice
from lightning_sym.symmetry.tracing.graph.capture import state_tensors

# Directions this close to a combination of others, relative to their length, count as dependent.
_DEPENDENT = 1e-10


@dataclass(frozen=True, eq=False)
class OrbitTangents:
    r"""The tangent space of a network's orbit, restricted to the space of its parameters.

    Attributes:
        names: Names of the network's parameters, in their order, which is that of the vectors.
        vectors: One tangent of length 1 per column. Sparse, shape ``[P, d]``, float64.
        rank: Dimension of their span; less than d where units are dead or copies.
        generators: Number of all one-parameter groups, including those of `Symmetry.buffer_dimension`.
        statistics: Number of one-parameter groups that move running statistics of batch norms, and so are no directions
            of the parameters alone. They are not among the vectors.
    """

    names: tuple[str, ...]
    vectors: sparse.csr_matrix
    rank: int
    generators: int
    statistics: int
    _inverse: Floats

    def along(self, vectors: Tensor) -> Tensor:
        """Project vectors to the orbit's tangent space, in the Euclidean metric.

        Args:
            vectors: Shape ``[P]`` or ``[P, K]``, floating, on any device.

        Returns:
            The same shape, dtype and device; computed in float64 on the CPU.
        """
        given = vectors.detach().double().cpu().numpy()
        found = self.vectors @ (self._inverse @ (self.vectors.T @ given))
        return torch.from_numpy(np.ascontiguousarray(found)).to(vectors)

    def across(self, vectors: Tensor) -> Tensor:
        """Project vectors to the orthogonal complement of the tangent space; see `along`."""
        return vectors - self.along(vectors)

    def complement(self) -> Tensor:
        """Return an orthonormal basis of the orthogonal complement. Shape ``[P, P - rank]``, float64, dense."""
        left, _, _ = np.linalg.svd(self.vectors.toarray(), full_matrices=True)
        return torch.from_numpy(np.ascontiguousarray(left[:, self.rank :]))


def orbit_tangents(symmetry: Symmetry, network: nn.Module) -> OrbitTangents:
    r"""Return the tangents of a network's orbit at the network.

    A scale that multiplies weight k by :math:`\lambda^{a_k}` has the tangent :math:`a_k w_k`; a translation is its own
    tangent. A rotation's generator S moves weights by :math:`D S D^{-1} W`, and so does a matrix between gains. A phase
    moves the coordinates of its rotary pair by (-y, x). Directions that also move running statistics are left out: with
    these fixed, they change the function. Biases compensate the means that matrices between gains move.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.

    Returns:
        The tangents.

    Raises:
        ValueError: If the network has another structure than the traced one, or GL(d) acts on some units.

    Example:
        >>> from lightning_sym.symmetry.trace import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> found = orbit_tangents(trace_symmetry(network, torch.randn(2, 5)), network)
        >>> found.vectors.shape, found.rank
        ((75, 8), 8)
    """
    symmetry.require(network)
    mixed = [factor for factor in symmetry.factors if factor.permutes and factor.dimension]
    if cells := sum(len(factor.identity()) for factor in mixed):
        raise ValueError(
            f"invertible matrices act on {cells} cells of units (linear layers in a row), which have no balanced "
            "representative; put an activation between them, or merge them into one."
        )
    return tangents_at(symmetry, network)


def tangents_at(symmetry: Symmetry, network: nn.Module) -> OrbitTangents:
    """Return the tangents of a network's orbit, including those of GL(d) blocks; see `orbit_tangents`.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: A network of this architecture (not checked). Not changed.
    """
    structure = symmetry.structure
    own = charted(dict(network.named_parameters()), structure.charts)
    parameters = {name: p.detach().double().cpu().numpy() for name, p in own.items()}
    states = charted(state_tensors(network), structure.charts)
    found = [factor.tangents(parameters, states) for factor in symmetry.factors]
    vectors = sparse.hstack(found).tocsc()
    slopes = [structure.charts.slope(name, own[name].detach().double().cpu()) for name in parameters]
    if any(slope is not None for slope in slopes):
        ones = (np.ones(part.size) for part in parameters.values())
        each = (one if slope is None else 1 / slope.numpy().ravel() for one, slope in zip(ones, slopes, strict=True))
        vectors = (sparse.diags(np.concatenate([*each])) @ vectors).tocsc()
    statistics = structure.idle - symmetry.parameter_names
    twice = counted_twice(structure, symmetry.shapes, statistics) if statistics else symmetry._counted_twice
    twice += sum(factor.redundant(parameters) for factor in symmetry.factors)
    count = symmetry.dimension + symmetry.buffer_dimension - vectors.shape[1] + twice
    lengths = np.sqrt(np.asarray(vectors.multiply(vectors).sum(0)).ravel())
    alive = lengths > _DEPENDENT * max(float(lengths.max(initial=0.0)), 1e-300)
    names, places = _places_in(network, structure.charts)
    vectors = (places @ vectors[:, alive] @ sparse.diags(1 / lengths[alive])).tocsr()
    values, rotation = np.linalg.eigh((vectors.T @ vectors).toarray())
    used = values > _DEPENDENT
    inverse = (rotation[:, used] / values[used]) @ rotation[:, used].T
    return OrbitTangents(
        names=names,
        vectors=vectors,
        rank=int(used.sum()),
        generators=symmetry.dimension + symmetry.buffer_dimension,
        statistics=count,
        _inverse=inverse,
    )


def _places_in(network: nn.Module, charts: Charts) -> tuple[tuple[str, ...], sparse.csr_matrix]:
    """Return the names of a network's parameters, and a matrix that brings pieces and stacks into their order."""
    parameters = dict(network.named_parameters())
    counts = [own.numel() for own in parameters.values()]
    numbers = torch.split(torch.arange(sum(counts)), counts)
    number = {name: n.view(own.shape) for (name, own), n in zip(parameters.items(), numbers, strict=True)}
    parts = charted(number, charts.only_moving).values()
    rows = torch.cat([part.flatten() for part in parts]).numpy() if number else np.zeros(0, np.int64)
    shape = sum(counts), len(rows)
    return tuple(parameters), sparse.csr_matrix((np.ones(len(rows)), (rows, np.arange(len(rows)))), shape)
