"""Equivalence classes of one-input ReLU networks of any width, without biases."""

import torch
from torch import Tensor

from lightning_sym.landscape.two_unit import slope_jacobian, slopes, straight_legs

_EQUAL = 1e-9  # relative error of slopes up to which two weight vectors compute the same function


def class_dimension(positive: int, negative: int) -> int:
    """Return the dimension of the equivalence class at a point whose input weights are not 0.

    Args:
        positive: Number of units with positive input weight, >= 0.
        negative: Number of units with negative input weight, >= 0.

    Returns:
        Twice the number of units, less one for each sign that occurs. At points where all output weights of a sign are
        0 too: its input weights drop out of the slope, but the output weights do not.

    Raises:
        ValueError: If a number is negative.
    """
    if min(positive, negative) < 0:
        raise ValueError(f"numbers of units must be >= 0, got {positive} and {negative}.")
    return 2 * (positive + negative) - (positive > 0) - (negative > 0)


def slope_rank(input_weights: Tensor, output_weights: Tensor) -> int:
    """Return the rank of the derivative of the slopes (p, q) in the weights.

    Args:
        input_weights: Shape ``[H]``, floating.
        output_weights: Shape ``[H]``.

    Returns:
        0, 1 or 2: the number of parameters less the local dimension of the class.

    Raises:
        ValueError: If the shapes differ.
    """
    if input_weights.shape != output_weights.shape or input_weights.ndim != 1:
        raise ValueError(
            f"input and output weights must be vectors of one length, got shapes {[*input_weights.shape]} and "
            f"{[*output_weights.shape]}."
        )
    # The two rows share no column, so each counts by itself, whatever their scales.
    return int(slope_jacobian(torch.cat([input_weights, output_weights])).any(-1).sum())


def connecting_path(start: Tensor, end: Tensor, points: int = 20) -> Tensor:
    """Return a path between two members of one class along which the function does not change at all.

    One unit per slope is made to carry it alone; a unit with output weight 0 can then change its input weight, sign
    included, and take a slope over. This needs one unit more than there are slopes that are not 0: three in general,
    two if the target is a ramp on one side. All legs are straight, so also between the points J is 0.

    Args:
        start: Input weights, then output weights. Shape ``[2 H]``, floating.
        end: Another member of the same class. Shape ``[2 H]``.
        points: Per leg, >= 1.

    Returns:
        From ``start`` to ``end``. Shape ``[T, 2 H]``, float64.

    Raises:
        ValueError: If the two compute different functions, no unit can be spared, or ``points`` < 1.
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
            "or TwoUnitClass.optimal_path, which crosses the barrier."
        )

    def concentrate(weights: Tensor) -> tuple[Tensor, dict[int, int]]:
        """Return the weights with one carrier per slope, and the carriers: a straight leg away at constant slopes."""
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

    def hand_over(side: int, unit: int) -> None:
        """Let an idle unit carry a slope, with the input weight of the carrier at the end."""
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
                hand_over(other, idle())
        if carriers[side] == unit and now[unit] != last[unit]:
            hand_over(side, idle())
        if carriers[side] != unit:
            hand_over(side, unit)
    return straight_legs([*corners, last, end], points)
