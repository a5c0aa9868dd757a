"""Lanczos's method with full reorthogonalisation: eigenpairs with residuals, and quadrature nodes for densities."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_sym._checks import check_integers, check_known, check_numbers
from lightning_sym._distributed import wide
from lightning_sym._random import generator as seeded_generator
from lightning_sym.curvature.blocks import CurvatureError
from lightning_sym.curvature.operators import ROUNDING, SymmetricOperator

Which = Literal["largest", "smallest", "magnitude"]
# Matrices of at most so many eigenvalues are decomposed whole, so that no copy of a multiple eigenvalue is missed.
_WHOLE = 64
# The search on a few of the samples: most products, relative error, and random part of the beginning that it gives.
_FIRST_PRODUCTS, _FIRST_ERROR, _RANDOM = 6, 0.1, 0.05


class NotConvergedError(CurvatureError):
    """Eigenpairs were not found to the tolerance that was asked for."""


@dataclass(frozen=True, eq=False)
class EigenPairs:
    r"""Eigenvalues at one end of a spectrum, with residuals.

    Attributes:
        values: Eigenvalues, the most extreme one first. Shape ``[k]``, float64, on the CPU.
        vectors: Their eigenvectors, of length 1, in the subspace that the matrix acts on. Shape ``[P, k]``, in the
            widest dtype of the operator's device.
        residuals: :math:`\|H v - \lambda v\|` from a product made for this: within so much of the value there is an
            eigenvalue. Shape ``[k]``, float64, on the CPU.
        products: Number of products with vectors that it took.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int


@dataclass(frozen=True)
class Eigenvalue:
    """An extreme eigenvalue, and how sure it is.

    Attributes:
        value: The eigenvalue.
        error: Estimate of its relative error, at most the one that was asked for.
        products: Number of products with vectors and all data that it took.
    """

    value: float
    error: float
    products: int


@dataclass(frozen=True, eq=False)
class Quadrature:
    r"""Quadrature of a matrix by Lanczos's method from some starting vectors.

    Attributes:
        nodes: Ritz values :math:`\theta_{ri}`, rising. Shape ``[R, m]``, float64, on the CPU.
        weights: :math:`\tau_{ri} = U_{1i}^2`, with sum 1 for each starting vector q of length 1:
            :math:`\sum_i \tau_{ri} \theta_{ri}^k = q_r^\top H^k q_r` for k up to 2m - 1. Where a Krylov space was
            complete before m steps, the remaining nodes have weight 0. Shape ``[R, m]``, float64, on the CPU.
        products: Number of products with vectors.
    """

    nodes: Tensor
    weights: Tensor
    products: int


def top_eigenpairs(
    operator: SymmetricOperator,
    k: int = 1,
    *,
    which: Which = "largest",
    tolerance: float = 1e-4,
    max_products: int = 2000,
    basis: int | None = None,
    generator: torch.Generator | None = None,
) -> EigenPairs:
    r"""Find eigenvalues at one end of the spectrum, with eigenvectors; converged, or an error.

    Lanczos's method with full reorthogonalisation and thick restarts (docs/theory/spectra.md, 2). A pair is converged
    when :math:`\|H v - \lambda v\| \leq` ``tolerance`` times the largest :math:`|\lambda|` seen, by a product of its
    own. The error of an eigenvalue is at most that, and for one apart from the others about the square of it over the
    gap.

    Args:
        operator: The matrix H; of one that acts on a subspace, eigenvalues of the restriction.
        k: How many. At most ``operator.dimension``.
        which: ``"largest"`` or ``"smallest"`` algebraically, or largest ``"magnitude"``.
        tolerance: Residual relative to the largest eigenvalue by magnitude. In (0, 1); below 1e-5 it needs a network in
            float64.
        max_products: Number of products before giving up. >= 1.
        basis: Vectors held at once before a restart, at least ``k + 4``; default ``max(2 k + 20, 60)``. Each takes as
            much memory as the weights do in float64.
        generator: Generator of the starting vector, on the CPU; use one in the same state on each rank.

    Returns:
        The pairs.

    Raises:
        ValueError: If an argument is out of range.
        NotConvergedError: If the tolerance was not reached; the message names the residuals.

    Note:
        For an eigenvalue with several independent eigenvectors (as copies of units have) one vector is found first.
        The others are found by rounding only, perhaps after k others have converged. Matrices of up to 64 eigenvalues
        are decomposed whole, with all copies.

    References:
        Wu and Simon (2000), "Thick-Restart Lanczos Method for Large Symmetric Eigenvalue Problems".

    Example:
        >>> from lightning_sym.curvature.operators import MatrixOperator
        >>> top_eigenpairs(MatrixOperator(torch.diag(torch.tensor([6.0, 10.0, 0.0]))), 2).values
        tensor([10.0000,  6.0000], dtype=torch.float64)
    """
    size = operator.dimension
    check_integers(k=k, max_products=max_products)
    check_numbers("in (0, 1)", tolerance=tolerance)
    basis = min(size, max(2 * k + 20, 60, _WHOLE) if basis is None else basis)
    if k > size or (basis < k + 4 and basis < size):
        raise ValueError(
            f"k must be at most {size}, the number of eigenvalues, and basis at least k + 4, got k={k} and "
            f"basis={basis}."
        )
    check_known("which", which, get_args(Which))
    before = operator.products
    space = _Space(operator, basis, seeded_generator("eigenpairs") if generator is None else generator)
    while True:
        space.expand()
        values, rotation, estimates, largest = space.ritz()
        chosen = _order(which, values)[:k]
        whole = space.held == size
        enough = space.held >= k + 4 and (size > _WHOLE or whole)
        if (enough and bool((estimates[chosen] <= 0.5 * tolerance * largest).all())) or whole:
            vectors = space.vectors(rotation[:, chosen])
            found = values[chosen]
            residuals = (operator @ vectors - vectors * found.to(vectors)).norm(dim=0).double().cpu()
            if bool((residuals <= tolerance * largest).all()) or largest == 0:
                return EigenPairs(found.cpu(), vectors, residuals, operator.products - before)
            worst = float(residuals.max() / largest)
            raise NotConvergedError(
                f"{k} eigenpairs ({which}) have residuals of up to {worst:.1e} of the largest eigenvalue where "
                f"{tolerance:.1e} was asked for, as {operator.dtype} products are no more precise; raise tolerance, or "
                "compute in float64 with dtype=torch.float64."
            )
        if operator.products - before >= max_products:
            worst = float(estimates[chosen].max() / largest) if len(chosen) == k else float("inf")
            raise NotConvergedError(
                f"{k} eigenpairs ({which}) were not found in {max_products} products: residuals of up to {worst:.1e} "
                f"of the largest eigenvalue where {tolerance:.1e} was asked for; raise max_products, basis or "
                "tolerance, or ask for fewer."
            )
        if space.held == basis:
            space.restart(_order(which, values)[: k + (basis - k) // 2], values, rotation)


def top_eigenvalue(
    operator: SymmetricOperator,
    *,
    error: float = 1e-3,
    max_products: int = 500,
    generator: torch.Generator | None = None,
) -> Eigenvalue:
    r"""Find the largest eigenvalue to a relative error, in fewer products than an eigenvector takes.

    Lanczos's method. With the two largest Ritz values :math:`\theta_1, \theta_2`, and the norms of their residuals
    :math:`r_1, r_2`, it ends when

    .. math:: \min\!\Big(r_1,\ \frac{2\, r_1^2}{\theta_1 - \theta_2 - r_2}\Big) \leq \text{error} \cdot |\theta_1|:

    twice the bound of Kato and Temple, where the rest of the spectrum is taken to end at :math:`\theta_2 + r_2`. So a
    gap below the eigenvalue ends the search early. A Hessian of one batch is first searched on an eighth of its
    samples, at an eighth of the price, and the vector found there is the beginning.

    Args:
        operator: The matrix H; of one that acts on a subspace, the eigenvalue of the restriction.
        error: Relative error of the eigenvalue, in (0, 1); by default one per mille. Below 1e-5 it needs a network in
            float64.
        max_products: Number of products before giving up. >= 1.
        generator: Generator of the random directions, on the CPU; use one in the same state on each rank.

    Returns:
        The eigenvalue, an estimate of its error, and the number of products.

    Raises:
        ValueError: If an argument is out of range, or there is no eigenvalue.
        NotConvergedError: If the error was not reached.

    Note:
        The error is an estimate, as no finite number of products with vectors bounds the rest of a spectrum;
        :func:`top_eigenpairs` gives eigenvectors and residuals.

    References:
        Kato (1949), "On the upper and lower bounds of eigenvalues"; Parlett (1998), "The Symmetric Eigenvalue
        Problem", section 10.5.

    Example:
        >>> from lightning_sym.curvature.operators import MatrixOperator
        >>> round(top_eigenvalue(MatrixOperator(torch.diag(torch.tensor([6.0, 10.0, 0.0])))).value, 4)
        10.0
    """
    check_integers(max_products=max_products)
    check_numbers("in (0, 1)", error=error)
    if not operator.dimension:
        raise ValueError("the matrix acts on a subspace of dimension 0, so that there are no eigenvalues.")
    generator = seeded_generator("eigenvalue") if generator is None else generator
    few, start = operator.few(), None
    if few is not None:
        space = _Space(few, min(few.dimension, _FIRST_PRODUCTS), generator)
        values, rotation, found = _extreme(space, max(error, _FIRST_ERROR), space.size)
        start = space.vectors(rotation[:, -1:])[:, 0]
    before = operator.products
    space = _Space(operator, min(operator.dimension, _WHOLE), generator, start)
    while True:
        values, rotation, found = _extreme(space, error, max_products - operator.products + before)
        products = operator.products - before
        if found <= error:
            return Eigenvalue(float(values[-1]), found, products)
        if products >= max_products:
            raise NotConvergedError(
                f"the largest eigenvalue was found to a relative error of {found:.1e} in {products} products where "
                f"{error:.1e} was asked for; raise error or max_products."
            )
        space.restart(_order("largest", values)[: space.size // 2], values, rotation)


def _extreme(space: "_Space", error: float, most: int) -> tuple[Tensor, Tensor, float]:
    """Expand a space until its largest Ritz value has a relative error, or the space is full, or after some products.

    Returns:
        Ritz values, rising; their vectors in the basis; the estimate of the error.
    """
    for _ in range(min(most, space.size - space.held)):
        space.expand()
        values, rotation, residuals, _ = space.ritz()
        bound = residual = float(residuals[-1])
        if len(values) > 1 and (gap := float(values[-1] - values[-2] - residuals[-2])) > residual:
            bound = min(residual, 2 * residual**2 / gap)
        found = bound / abs(float(values[-1])) if float(values[-1]) else math.inf if bound else 0.0
        if space.held == space.operator.dimension:
            found = 0.0
        if found <= error and (space.held > 1 or found == 0.0):
            break
    return values, rotation, found


def lanczos(operator: SymmetricOperator, starts: Tensor, steps: int) -> Quadrature:
    r"""Run Lanczos's method with full reorthogonalisation from several vectors at once.

    .. math::
        z = H q_j,\quad \alpha_j = q_j^\top z,\quad z \leftarrow z - Q (Q^\top z) \text{ (twice)},\quad
        \beta_j = \|z\|,\quad q_{j+1} = z / \beta_j

    T, tridiagonal with :math:`\alpha` and :math:`\beta`, is decomposed as :math:`U \theta U^\top` in float64
    (docs/theory/spectra.md, 2). Without reorthogonalisation copies of converged eigenvalues would appear among the
    nodes.

    Args:
        operator: The matrix H.
        starts: Starting vectors of any nonzero norm; only their parts in the matrix's subspace count.
            Shape ``[P, R]``.
        steps: Number of steps m, at most ``operator.dimension``. >= 1.

    Returns:
        Nodes and weights for each vector.

    Raises:
        ValueError: If a shape or an argument is out of range.

    Note:
        ``O(R m^2 P)`` time besides the ``R m`` products, and ``R m P`` numbers of 8 bytes in memory.
    """
    check_integers(steps=steps)
    if starts.ndim != 2 or len(starts) != operator.size or not starts.shape[1]:
        raise ValueError(f"starts must have shape [{operator.size}, R], got {list(starts.shape)}.")
    if steps > operator.dimension:
        raise ValueError(f"steps must be at most the {operator.dimension} eigenvalues of the matrix, got {steps}.")
    device, before = operator.device, operator.products
    q = operator.inside(starts.detach().to(device=device, dtype=wide(device))).T
    norms = q.norm(dim=1, keepdim=True)
    if not bool(((norms > 0) & norms.isfinite()).all()):
        raise ValueError("starts must be finite vectors other than zero.")
    q = q / norms
    runs = len(q)
    held = torch.zeros(runs, steps, operator.size, dtype=q.dtype, device=device)
    diagonal, beside = torch.zeros(2, runs, steps, dtype=torch.float64)
    lengths = torch.full((runs,), steps)
    largest = torch.zeros(runs, dtype=torch.float64)
    for step in range(steps):
        held[:, step] = q
        z = (operator @ q.T).T
        diagonal[:, step] = (q * z).sum(1).double().cpu()
        known = held[:, : step + 1]
        for _ in range(2):
            z = operator.inside((z - ((known @ z[:, :, None]).mT @ known)[:, 0]).T).T
        beta = z.norm(dim=1)
        beside[:, step] = beta.double().cpu()
        largest = torch.maximum(largest, diagonal[:, step].abs() + beside[:, step])
        # A new direction shorter than rounding: the Krylov space is complete.
        ended = (beside[:, step] <= ROUNDING * largest) & (lengths == steps)
        lengths[ended] = step + 1
        if bool((lengths <= step + 1).all()):
            break
        running = (lengths > step + 1).to(device)
        q = torch.where(running[:, None], z / beta.where(running, torch.ones_like(beta))[:, None], 0.0)
    nodes, weights = torch.zeros(2, runs, steps, dtype=torch.float64)
    for run, length in enumerate(lengths.tolist()):
        off = beside[run, : length - 1]
        matrix = diagonal[run, :length].diag() + off.diag(1) + off.diag(-1)
        values, rotation = torch.linalg.eigh(matrix)
        nodes[run, :length], weights[run, :length] = values, rotation[0] ** 2
        nodes[run, length:] = values[-1]
    return Quadrature(nodes, weights, operator.products - before)


class _Space:
    """A Krylov space with an orthonormal basis, the matrix on it, and its direction of growth."""

    def __init__(
        self, operator: SymmetricOperator, basis: int, generator: torch.Generator, start: Tensor | None = None
    ) -> None:
        self.size = basis
        self.operator, self.generator = operator, generator
        dtype = wide(operator.device)
        self.basis = torch.zeros(basis, operator.size, dtype=dtype, device=operator.device)  # in rows
        self.matrix = torch.zeros(basis, basis, dtype=torch.float64)
        self.held, self.beta, self.largest = 0, 0.0, 0.0
        self.next = self._fresh()
        if start is not None:  # a random part keeps every eigenvector within reach
            self.next = self._outside(start.to(self.basis) + _RANDOM * self.next)[0]

    def _fresh(self) -> Tensor:
        """Return a random direction outside the space."""
        drawn = torch.randn(self.operator.size, dtype=torch.float64, generator=self.generator).to(self.basis)
        return self._outside(self._outside(drawn / drawn.norm())[0])[0]

    def _outside(self, vector: Tensor) -> tuple[Tensor, float]:
        """Return the part of a vector outside the space, brought to length 1, and how long it was.

        It stays in the subspace of the matrix, even if the part is small and its rounding large.
        """
        known = self.basis[: self.held]
        for _ in range(2):
            vector = self.operator.inside(vector - (known @ vector) @ known)
        length = float(vector.norm())
        return (vector / length if length > 0 else vector), length

    def expand(self) -> None:
        """Take one more direction in."""
        place = self.held
        self.basis[place] = self.next
        self.held += 1
        image = self.operator @ self.next
        inside = (self.basis[: self.held] @ image).double().cpu()
        self.matrix[: self.held, place] = inside
        self.matrix[place, : self.held] = inside
        self.largest = max(self.largest, float(image.norm()))
        self.next, self.beta = self._outside(image)
        if self.beta <= ROUNDING * self.largest:
            # The space is complete: the matrix maps it to itself.
            self.beta = 0.0
            if self.held < len(self.basis):
                self.next = self._fresh()

    def ritz(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return Ritz values, rising; their vectors in the basis; estimates of residuals; the largest magnitude."""
        values, rotation = torch.linalg.eigh(self.matrix[: self.held, : self.held])
        return values, rotation, self.beta * rotation[-1].abs(), float(values.abs().max())

    def vectors(self, rotation: Tensor) -> Tensor:
        """Return vectors given in the basis."""
        return self.basis[: self.held].T @ rotation.to(self.basis)

    def restart(self, kept: Tensor, values: Tensor, rotation: Tensor) -> None:
        """Keep some Ritz vectors only; how the next direction is coupled to them shows when it is taken in."""
        vectors = self.vectors(rotation[:, kept])
        self.held = len(kept)
        self.basis[: self.held] = vectors.T
        self.matrix.zero_()
        self.matrix[: self.held, : self.held] = values[kept].diag()
        self.next = self._outside(self.next)[0]


def _order(which: Which, values: Tensor) -> Tensor:
    """Return the places of values, the wanted ones first."""
    keys = {"largest": values, "smallest": -values, "magnitude": values.abs()}
    return keys[which].argsort(descending=True, stable=True)
