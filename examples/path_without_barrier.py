"""Three ReLU units of one input have no barrier: a path between equivalent weights along which J stays 0.

Two units that exchange their slopes must cross a barrier (``optimal_path`` of ``two_unit_class.py``). An additional
unit allows a path around it, which is built here segment by segment:

    python examples/path_without_barrier.py
"""

import torch
from torch import Tensor
from two_unit_class import optimal_path, straight_legs

from lightning_sym.landscape.two_unit import Moments, TwoUnitClass, distance, slopes

_EQUAL = 1e-9  # largest relative error of slopes of equal functions


def connecting_path(start: Tensor, end: Tensor, points: int = 20) -> Tensor:
    """Return a path between two members of one equivalence class along which the function does not change.

    First a single unit carries each slope. A unit with output weight 0 can then change its input weight, including its
    sign, and take over a slope. This needs one more unit than nonzero slopes: three in general, two for a
    one-sided ramp. All segments are linear, so that J is 0 between the points as well.

    Args:
        start: Input weights, then output weights. Shape ``[2 H]``, floating.
        end: Another member of the same class. Shape ``[2 H]``.
        points: Number of points per segment, >= 1.

    Returns:
        Points from ``start`` to ``end``. Shape ``[T, 2 H]``, float64.

    Raises:
        ValueError: If the two compute different functions, no unit is idle, or ``points`` < 1.
    """
    start, end = start.detach().double().cpu(), end.detach().double().cpu()
    if start.ndim != 1 or start.shape != end.shape:
        raise ValueError(f"start and end must be vectors of one length, got {[*start.shape]} and {[*end.shape]}.")
    target = slopes(start)
    units = len(start) // 2
    scale = max(float((w[:units] * w[units:]).abs().sum()) for w in (start, end))
    if float((slopes(end) - target).abs().max()) > _EQUAL * scale:
        raise ValueError(
            f"start and end must compute the same function, got slopes {target.tolist()} and {slopes(end).tolist()}."
        )
    carried = [side for side in (0, 1) if abs(float(target[side])) > _EQUAL * scale]
    if units <= len(carried):
        raise ValueError(
            f"{units} units that carry {len(carried)} slopes cannot spare one; take {len(carried) + 1} units or more, "
            "or optimal_path of two_unit_class.py, which crosses the barrier."
        )

    def concentrate(weights: Tensor) -> tuple[Tensor, dict[int, int]]:
        """Return weights with one carrier per slope, and the carriers: a linear segment with constant slopes."""
        result, carriers = weights.clone(), {}
        result[units:] = 0
        for side in carried:
            unit = int((weights[:units] * (1 - 2 * side)).argmax())
            carriers[side] = unit
            result[units + unit] = target[side] / weights[unit].abs()
        return result, carriers

    now, carriers = concentrate(start)
    last, goal = concentrate(end)
    corners = [start, now.clone()]

    def transfer_slope(side: int, unit: int) -> None:
        """Let an idle unit carry a slope, with the final input weight of the carrier."""
        now[unit] = last[goal[side]]
        corners.append(now.clone())
        now[units + carriers[side]] = 0
        now[units + unit] = last[units + goal[side]]
        corners.append(now.clone())
        carriers[side] = unit

    def idle() -> int:
        return next(unit for unit in range(units) if unit not in carriers.values())

    for side in carried:
        unit = goal[side]
        for other in carried:
            if other != side and carriers[other] == unit:
                transfer_slope(other, idle())
        if carriers[side] == unit and now[unit] != last[unit]:
            transfer_slope(side, idle())
        if carriers[side] != unit:
            transfer_slope(side, unit)
    return straight_legs([*corners, last, end], points)


def main() -> None:
    """Exchange the slopes of two units with and without a third one, and print the largest J on the path."""
    two = TwoUnitClass(torch.tensor([0.8, -0.6, 0.7, 0.5]))
    print(f"two units:   {float(distance(optimal_path(two), two.target, two.moments).max()):.2e}, the barrier")
    start = torch.tensor([0.8, -0.6, 0.3, 0.7, 0.5, 0.0])  # the third unit has no effect
    path = connecting_path(start, start[[1, 0, 2, 4, 3, 5]])
    print(f"three units: {float(distance(path, two.target, Moments()).max()):.2e}")


if __name__ == "__main__":
    main()
