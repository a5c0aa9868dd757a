"""Products of two thin matrices and their gauge (docs/theory/matching.md, 7)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy  # its parts are imported on first use
import torch
from torch import Tensor

from lightning_sym._linear_algebra import polar_factor, thin_svd

Gauge = Literal["orthogonal", "invertible"]
# Smaller singular values, relative to the largest, are rounding.
_RANK = 1e-12
# Scale of the descent's first step, which stays away from singular matrices.
_STEP, _HUGE = 0.01, 1e300


@dataclass(frozen=True, eq=False)
class LowRank:
    """A matrix as a product ``up @ down``; all pairs ``up @ inv(g), g @ down`` represent it.

    Attributes:
        up: B of LoRA's ``B A``. Shape ``(rows, rank)``, float64.
        down: A of LoRA's ``B A``. Shape ``(rank, columns)``, float64.
    """

    up: Tensor
    down: Tensor

    @property
    def rank(self) -> int:
        """Inner size of the factors, an upper bound for the rank of the product."""
        return self.up.shape[1]

    @property
    def product(self) -> Tensor:
        """The matrix. Shape ``(rows, columns)``."""
        return self.up @ self.down

    @property
    def norm(self) -> float:
        """The product's Frobenius norm, computed without forming the product."""
        return float(self._singular()[1].norm())

    def _singular(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the thin singular value decomposition of the product, from the factors' QR decompositions."""
        (left, upper), (right, lower) = torch.linalg.qr(self.up), torch.linalg.qr(self.down.T)
        u, values, v = thin_svd(upper @ lower.T)
        return left @ u, values, v @ right.T

    def changed(self, gauge: Tensor) -> "LowRank":
        """Return the same product in another gauge: ``up @ inv(g), g @ down``.

        Args:
            gauge: g, invertible. Shape ``(rank, rank)``, float64.
        """
        return LowRank(torch.linalg.solve(gauge, self.up, left=False), gauge @ self.down)

    def times(self, factor: float) -> "LowRank":
        """Return the product times a number > 0, half of it in each factor."""
        return LowRank(self.up * factor**0.5, self.down * factor**0.5)

    def padded(self, rank: int) -> "LowRank":
        """Return the same product with inner size `rank`, padded with zeros; not less than now."""
        more = rank - self.rank
        return LowRank(torch.nn.functional.pad(self.up, (0, more)), torch.nn.functional.pad(self.down, (0, 0, 0, more)))

    def truncated(self, rank: int) -> "LowRank":
        """Return the nearest product of the given rank (Eckart and Young), balanced as in :meth:`balanced`."""
        u, values, v = self._singular()
        u, values, v = u[:, :rank], values[:rank], v[:rank]
        largest = v.gather(1, v.abs().argmax(1, keepdim=True))
        root = values.sqrt() * torch.where(largest[:, 0] < 0, -1.0, 1.0)
        found = LowRank(u * root, root[:, None] * v)
        return found.padded(rank) if found.rank < rank else found

    def balanced(self) -> "LowRank":
        """Return the product in the gauge of equal Gram matrices, ``up.T @ up == down @ down.T``.

        They are diagonal, with the product's singular values in descending order, and the largest entry of each row of
        ``down`` is positive. This form is unique if the singular values differ. If the product has a smaller rank than
        its factors, it is a limit of gauges that no gauge attains: for ``up = 0`` both factors become zero.
        """
        return self.truncated(self.rank)

    def is_full(self) -> bool:
        """Return whether the product has the rank of its factors."""
        values = self._singular()[1]
        return len(values) >= self.rank and bool(values[self.rank - 1] > _RANK * values[0])

    def squared_distance(self, other: "LowRank") -> float:
        """Return the sum of the squared distances between the factors."""
        return float((self.up - other.up).square().sum() + (self.down - other.down).square().sum())

    def aligned(self, reference: "LowRank") -> "LowRank":
        """Rotate the factors towards those of a reference (orthogonal Procrustes).

        Args:
            reference: A product of the same shapes. Both should be balanced; otherwise the result has no meaning.
        """
        return self.changed(polar_factor(reference.down @ self.down.T + reference.up.T @ self.up))

    def matched(self, reference: "LowRank", gauge: Gauge = "orthogonal") -> "LowRank":
        """Return the product in the gauge with factors nearest to those of a reference.

        Args:
            reference: A product of the same shapes, and of full rank.
            gauge: "orthogonal": both are balanced, aligned, and brought to the reference's gauge. "invertible": the
                result is then refined by descent on :meth:`squared_distance` over all invertible matrices. A minimum
                exists if both have full rank; it has no closed form, and descent finds a local one.

        Raises:
            ValueError: If the reference has a smaller rank than its factors; with "invertible", also if this one has.
        """
        if not reference.is_full() or (gauge == "invertible" and not self.is_full()):
            raise ValueError(
                "no gauge brings these factors to those of an adapter whose product has a smaller rank than they have "
                "(one of them is zero, or its columns depend on one another); match by balance() on both sides."
            )
        balanced = reference.balanced()
        # The reference's factors are g @ balanced.down: balanced.down has orthogonal rows.
        back = (reference.down @ balanced.down.T) / balanced.down.square().sum(1)
        found = self.balanced().aligned(balanced).changed(back)
        return found.changed(_least(found, reference)) if gauge == "invertible" else found


def _least(own: LowRank, reference: LowRank) -> Tensor:
    """Return the invertible matrix that minimises the distance of the factors, by descent from the identity."""
    size, identity = own.rank, torch.eye(own.rank, dtype=torch.float64)
    unit = max(own.squared_distance(LowRank(own.up * 0, own.down * 0)), 1e-300)
    downs, ups = own.down @ own.down.T / unit, own.up.T @ own.up / unit
    cross_down, cross_up = reference.down @ own.down.T / unit, own.up.T @ reference.up / unit

    def value(flat: Any) -> tuple[float, Any]:
        gauge = identity + _STEP * torch.from_numpy(flat.reshape(size, size))
        back, info = torch.linalg.inv_ex(gauge)
        if bool(info) or not bool(back.isfinite().all()):
            return _HUGE, np.zeros_like(flat)
        one = (gauge * (gauge @ downs - 2 * cross_down)).sum()
        two = (back * (ups @ back - 2 * cross_up)).sum()
        slope = 2 * (gauge @ downs - cross_down) - 2 * back.T @ (ups @ back - cross_up) @ back.T
        return float(one + two), _STEP * slope.numpy().ravel()

    start = np.zeros(size * size)
    options = {"maxiter": 2000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-12}
    found = scipy.optimize.minimize(value, start, jac=True, method="L-BFGS-B", options=options)
    best: Any = found.x if found.fun < value(start)[0] else start
    return identity + _STEP * torch.from_numpy(best.reshape(size, size))


def mean_product(products: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """Return the exact weighted sum of products; its inner size is the sum of theirs.

    Args:
        products: At least one, of one shape.
        weights: One number for each.
    """
    ups = [weight * own.up for weight, own in zip(weights, products, strict=True)]
    return LowRank(torch.cat(ups, 1), torch.cat([own.down for own in products]))


def mean_factors(products: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """Return the product of the weighted sums of both factors.

    Args:
        products: At least one, of one shape and rank.
        weights: One number for each.
    """
    pairs = list(zip(weights, products, strict=True))
    up = torch.stack([weight * own.up for weight, own in pairs]).sum(0)
    return LowRank(up, torch.stack([weight * own.down for weight, own in pairs]).sum(0))


def difference(one: LowRank, other: LowRank) -> float:
    """Return the Frobenius norm of the difference of two products."""
    return mean_product([one, other], [1.0, -1.0]).norm
