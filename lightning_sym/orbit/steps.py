"""Steps of a descent on a group: L-BFGS and Adam in coordinates that return to 0 after each step.

See docs/theory/orbit.md, 2.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sym.orbit.problem import OrbitProblem
from lightning_sym.symmetry.group.element import Element

Progress = Callable[[int, int], None] | None

_LONGEST = 0.5  # of the entries of one step
_MEMORY = 20  # pairs that L-BFGS keeps
_ARMIJO = 1e-4  # part of the expected decrease that a step has to reach
_HALVINGS = 40


class OrbitStep(NamedTuple):
    """One step of a descent.

    Attributes:
        step: Its number; 0 is the start.
        objective: The objective before the step: over all data by L-BFGS, over one batch by Adam.
        gradient: The largest absolute entry of the derivative by the coordinates.
        seconds: Since the beginning.
    """

    step: int
    objective: float
    gradient: float
    seconds: float


def _largest(coordinates: Mapping[str, Tensor]) -> float:
    return max((float(own.abs().max()) for own in coordinates.values()), default=0.0)


def _finite(value: float, gradient: Mapping[str, Tensor]) -> bool:
    return math.isfinite(value) and all(bool(own.isfinite().all()) for own in gradient.values())


def _require_finite(value: float, gradient: Mapping[str, Tensor]) -> None:
    if not _finite(value, gradient):
        raise ValueError(
            "the derivative of the objective is not finite at the start; expected an objective that is differentiable "
            "there."
        )


def by_lbfgs(
    problem: OrbitProblem, element: Element, max_steps: int, tolerance: float, progress: Progress = None
) -> tuple[Element, list[OrbitStep], bool]:
    """Minimise by L-BFGS with backtracking.

    Returns:
        The element, the steps, and whether the derivative fell below the tolerance.
    """
    began, history = time.perf_counter(), list[OrbitStep]()
    value, gradient = problem.gradient(element)
    _require_finite(value, gradient)
    pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=_MEMORY)
    for number in range(max_steps + 1):
        size = _largest(gradient)
        history.append(OrbitStep(number, problem.sign * value, size, time.perf_counter() - began))
        if progress is not None:
            progress(number, max_steps)
        if size <= tolerance * max(1.0, abs(value)):
            return element, history, True
        if number == max_steps:
            break
        flat = _flat(gradient)
        direction = _two_loops(pairs, flat)
        if not float(direction @ flat) < 0:
            pairs.clear()
            direction = -flat
        found = _backtracked(problem, element, value, flat, direction, first=not pairs)
        if found is None and pairs:  # once more, along the gradient
            pairs.clear()
            direction = -flat
            found = _backtracked(problem, element, value, flat, direction, first=True)
        if found is None:
            break
        length, element, value, gradient = found
        step, turned = length * direction, _flat(gradient) - flat
        if float(step @ turned) > 1e-12 * float(step.norm() * turned.norm()):
            pairs.append((step, turned))
    return element, history, False


def _backtracked(
    problem: OrbitProblem, element: Element, value: float, flat: Tensor, direction: Tensor, *, first: bool
) -> tuple[float, Element, float, dict[str, Tensor]] | None:
    """Return the length of a step that decreases the objective enough, and the element, value and derivative there."""
    longest = float(direction.abs().max())
    length = min(1.0, _LONGEST / longest) if not first else min(1.0, 0.1 / longest)
    slope = float(direction @ flat)
    for _ in range(_HALVINGS):
        if abs(length * slope) < 1e-16 * max(1.0, abs(value)):
            return None  # below rounding
        at = problem.after(_shaped(length * direction, problem.directions.shapes), element)
        reached, gradient = problem.gradient(at)
        if _finite(reached, gradient) and reached <= value + _ARMIJO * length * slope:
            return length, at, reached, gradient
        length /= 2
    return None


def _two_loops(pairs: Sequence[tuple[Tensor, Tensor]], gradient: Tensor) -> Tensor:
    """Return the direction of L-BFGS (Nocedal and Wright 2006, algorithm 7.4)."""
    direction, kept = -gradient, list[tuple[float, float, Tensor, Tensor]]()
    for step, turned in reversed(pairs):
        rho = 1 / float(step @ turned)
        alpha = rho * float(step @ direction)
        direction = direction - alpha * turned
        kept.append((rho, alpha, step, turned))
    if pairs:
        step, turned = pairs[-1]
        direction = direction * (float(step @ turned) / float(turned @ turned))
    for rho, alpha, step, turned in reversed(kept):
        direction = direction + (alpha - rho * float(turned @ direction)) * step
    return direction


def _flat(coordinates: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([own.reshape(-1) for own in coordinates.values()])


def _shaped(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    parts = torch.split(flat, [math.prod(shape) for shape in shapes.values()])  # type: ignore[no-untyped-call]
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def by_adam(
    problem: OrbitProblem,
    element: Element,
    max_steps: int,
    tolerance: float,
    lr: float,
    seed: int,
    progress: Progress = None,
) -> tuple[Element, list[OrbitStep], bool]:
    """Minimise by Adam, one batch at a time; momenta stay in the coordinates, which return to 0 after each step.

    Returns:
        The best element on all data that was seen, the steps, and whether the derivative fell below the tolerance.
    """
    began, history = time.perf_counter(), list[OrbitStep]()
    generator = torch.Generator().manual_seed(seed)
    coordinates = problem.directions.zeros()
    adam = torch.optim.Adam([own.requires_grad_() for own in coordinates.values()], lr=lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(max_steps, 1))
    count = len(problem.batches)
    best, least, order = element, math.inf, list[int]()
    every = 1 if count < 2 else max(max_steps // 20, 1)
    for number in range(max_steps + 1):
        order = order or torch.randperm(count, generator=generator).tolist()
        some = [problem.batches[order.pop()]] if count else None
        value, gradient = problem.gradient(element, some)
        if number == 0:
            _require_finite(value, gradient)
        if not _finite(value, gradient):  # back to the best point, with half of the steps
            element = best
            for group in adam.param_groups:
                group["lr"] /= 2
            continue
        size = _largest(gradient)
        history.append(OrbitStep(number, problem.sign * value, size, time.perf_counter() - began))
        if progress is not None:
            progress(number, max_steps)
        if number % every == 0 or number == max_steps:
            whole = value if count < 2 else problem.sign * problem.value(element)
            best, least = (element, whole) if whole < least else (best, least)
        if size <= tolerance * max(1.0, abs(value)) and count < 2:
            return best, history, True
        if number == max_steps:
            break
        for name, own in coordinates.items():
            own.grad = gradient[name]
        adam.step()
        cosine.step()
        with torch.no_grad():
            step = {name: own.detach().clamp(-_LONGEST, _LONGEST) for name, own in coordinates.items()}
            element = problem.after(step, element)
            for own in coordinates.values():
                own.zero_()
    return best, history, False
