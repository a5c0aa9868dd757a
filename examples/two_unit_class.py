"""The class of two ReLU units in detail: its pieces, a path across its barrier, and the dimension with more units.

``docs/equivalence.md`` uses these functions; ``path_without_barrier.py`` compares two units with three.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_sym.landscape.two_unit import TwoUnitClass, balanced_weights


@dataclass(frozen=True)
class Stratum:
    """A piece of an equivalence class, cut out by the signs of the input weights.

    Attributes:
        name: As in the docs: ``"S"``, ``"A"``, ``"B1"``, ...
        signs: Signs of a and b: -1, 0 or 1 each.
        condition: Further condition on the weights, for captions.
        dimension: 2 or 3.
    """

    name: str
    signs: tuple[int, int]
    condition: str
    dimension: int


def strata(exact: TwoUnitClass) -> tuple[Stratum, ...]:
    """Return the pieces of the class, which are disjoint and make up the class.

    A mixed class is one orbit of rescaling and swapping the units. The 3-dimensional pieces of the others are
    larger than orbits, which are 2-dimensional: there (c, d) -> (c + t b, d - t a) is one more free move. On
    B1 and B2 the output weight of a unit is 0 and its input weight free; C1 and C2 join them to A.
    """
    if exact.kind == "mixed":
        return (
            Stratum("S", (1, -1), "ca = p, d|b| = q", 2),
            Stratum("swapped S", (-1, 1), "db = p, c|a| = q", 2),
        )
    if exact.kind == "zero":
        same = [Stratum("A" + "+-"[s < 0], (s, s), "ca + db = 0", 3) for s in (1, -1)]
        opposite = [Stratum(f"B{n}", signs, "c = d = 0", 2) for n, signs in ((1, (1, -1)), (2, (-1, 1)))]
        dead = [
            Stratum("C" + "+-"[s < 0] + str(n), (s, 0) if n == 1 else (0, s), "cd"[n - 1] + " = 0", 2)
            for s in (1, -1)
            for n in (1, 2)
        ]
        return (*same, *opposite, *dead, Stratum("D", (0, 0), "c and d free", 2))
    s, slope, (a, b) = (1, "p", "ab") if exact.target[0] else (-1, "q", ("|a|", "|b|"))
    return (
        Stratum("A", (s, s), f"c{a} + d{b} = {slope}", 3),
        Stratum("B1", (s, -s), f"c{a} = {slope}, d = 0", 2),
        Stratum("B2", (-s, s), f"d{b} = {slope}, c = 0", 2),
        Stratum("C1", (s, 0), f"c{a} = {slope}, d free", 2),
        Stratum("C2", (0, s), f"d{b} = {slope}, c free", 2),
    )


def optimal_path(exact: TwoUnitClass, points: int = 50, start: Tensor | None = None) -> Tensor:
    """Return a path from one component of a mixed class to the other, with the barrier as its largest J.

    The unit with the cheaper slope gives up its output weight, then its sign; the other hands its slope over to
    it, and takes on the first one's sign and slope. All five legs are straight.

    Args:
        exact: The class.
        points: Per leg, >= 1.
        start: A member, shape ``[4]``; by default the target's weights or, if it was given by slopes, weights with
            ``|a| = |c|``, ``|b| = |d|``. The path ends at the same weights with the units swapped.

    Returns:
        Shape ``[5 points + 1, 4]``, float64.

    Raises:
        ValueError: If the class is not mixed, ``start`` is not a member, or ``points`` < 1.
    """
    if exact.kind != "mixed":
        raise ValueError(f"only mixed classes have a barrier; this one is {exact.kind} and connected.")
    if start is None:
        start = exact.weights
    if start is None:
        start = balanced_weights(exact.target)
    start = start.detach().double().cpu()
    if start.shape != (4,) or not exact.contains(start):
        raise ValueError(f"start must be a member (a, b, c, d) of the class, got {start.tolist()}.")
    p, q = exact.target.tolist()
    cheap = 1 if exact.moments.negative * q**2 <= exact.moments.positive * p**2 else -1
    # The cheaper slope's unit comes first: that with negative input for q, that with positive input for p.
    first = int(start[0] * cheap > 0)
    order = [first, 1 - first, 2 + first, 3 - first]
    a, b, c, d = start[order].tolist()
    corners = [[a, b, c, d], [a, b, 0, d], [b, b, 0, d], [b, b, d, 0], [b, a, d, 0], [b, a, d, c]]
    return straight_legs([*start.new_tensor(corners)[:, order]], points)


def straight_legs(corners: Sequence[Tensor], points: int) -> Tensor:
    """Return points along straight legs between corners; legs of length 0 count too.

    Args:
        corners: Shape ``[P]`` each.
        points: Per leg, >= 1.

    Returns:
        Shape ``[(len(corners) - 1) points + 1, P]``.

    Raises:
        ValueError: If ``points`` < 1.
    """
    if points < 1:
        raise ValueError(f"points must be an integer >= 1, got {points}.")
    share = torch.arange(points, dtype=corners[0].dtype)[:, None] / points
    legs = [left + share * (right - left) for left, right in pairwise(corners)]
    return torch.cat([*legs, corners[-1][None]])


def class_dimension(positive: int, negative: int) -> int:
    """Return the dimension of the equivalence class at a point whose input weights are not 0.

    Args:
        positive: Number of units with positive input weight, >= 0.
        negative: Number of units with negative input weight, >= 0.

    Returns:
        Twice the number of units, less one for each sign that occurs. At points where all output weights of a sign are
        0 too: its input weights drop out of the slope, but the output weights do not.
    """
    return 2 * (positive + negative) - (positive > 0) - (negative > 0)
