"""Minima over scales and GL(d) blocks that have a formula: docs/theory/orbit.md, 3."""

from collections.abc import Collection, Mapping

from torch import Tensor

from lightning_sym.orbit.directions import kinds_of
from lightning_sym.symmetry import Element, Symmetry
from lightning_sym.symmetry.canonical.form import least_element
from lightning_sym.symmetry.charts import charted
from lightning_sym.symmetry.group.gauge import one_sided
from lightning_sym.symmetry.group.norms import Squares


def least_squares(symmetry: Symmetry, weights: Mapping[str, Tensor], kinds: Collection[str]) -> Element | None:
    """Return the element that minimises the sum of squares of all weights.

    The sum is geodesically convex over scales and GL(d) blocks. At its minimum, the norms of weights into and out of
    each unit agree, and so do the Gram matrices of each block.

    Args:
        symmetry: The network's symmetry.
        weights: All parameters, by name.
        kinds: The kinds of coordinates that move.

    Returns:
        None where other kinds than scales, or scales and cells, move; where the group has rotations or matrices between
        gains, or the network adds numbers to weights; and where a scale only multiplies weights: there is no minimum.
    """
    plan, charts = symmetry.factors.plan, symmetry.structure.charts
    covered = {*kinds} in ({"scales"}, {"scales", "cells"})
    if not covered or charts.added or {"rotations", "gained"} & {*kinds_of(symmetry)}:
        return None
    tensors = charted({name: own.detach() for name, own in weights.items()}, charts)
    if bool(one_sided(plan, Squares(plan, tensors)).any()):
        return None
    return least_element(symmetry, tensors, cells="cells" in kinds)


def least_dual_squares(symmetry: Symmetry, slopes: Mapping[str, Tensor], kinds: Collection[str]) -> Element | None:
    r"""Return the element that minimises a sum of squares of numbers that move as derivatives by the weights do.

    Scales divide these where they multiply weights, and the inverse transpose acts for a matrix. So the element that
    minimises the sum of squares of weights with these values is inverted in this sense: :math:`-\log s`,
    :math:`A^{-T}`. Gradients of a loss are such numbers, and for scales alone the roots of the diagonal of the
    Gauss-Newton matrix, which is that of the Hessian where activations are piecewise linear.

    Args:
        symmetry: The network's symmetry.
        slopes: One number per weight, by name.
        kinds: The kinds of coordinates that move.

    Returns:
        None as for :func:`least_squares`.
    """
    found = least_squares(symmetry, slopes, kinds)
    if found is None:
        return None
    return found.replaced(**{factor.name: factor.dual(found.parts[factor.name]) for factor in symmetry.factors})
