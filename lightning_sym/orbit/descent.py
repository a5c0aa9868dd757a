"""Descent of any function of the weights over the orbit of a network.

See docs/theory/orbit.md. A step is ``g <- exp(X) g``, with coordinates X of the Lie algebra that are 0 between steps;
g always acts on the original weights, so that rounding does not add up.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_numbers, check_words
from lightning_sym._distributed import on_device_of
from lightning_sym.networks.modes import evaluating
from lightning_sym.orbit.directions import ALL, KINDS, OrbitDirections
from lightning_sym.orbit.objective import Objective
from lightning_sym.orbit.view import View
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.canonical.form import balanced_element
from lightning_sym.symmetry.charts import Charts, charted
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.gauge import one_sided
from lightning_sym.symmetry.group.norms import Squares
from lightning_sym.symmetry.moves.moved import Moved, moved, require_weights
from lightning_sym.symmetry.moves.streams import rotate_stream
from lightning_sym.symmetry.proof import double, double_copy
from lightning_sym.symmetry.tracing.calls import Call
from lightning_sym.symmetry.tracing.capture import first_names, state_tensors

Function = Callable[..., Tensor]
Start = Element | Literal["balanced", "hadamard"] | None

_LONGEST = 0.5  # of the entries of one step
_MEMORY = 20  # pairs that L-BFGS keeps
_ARMIJO = 1e-4  # part of the expected decrease that a step has to reach
_HALVINGS = 40
_BUDGET = 3.0  # of logarithms, where an objective is maximised


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


@dataclass(frozen=True)
class OrbitMinimum(Moved):
    """The network at which a descent over the orbit ended; unpacks to the network and the element.

    Attributes:
        network: The new network, in the dtype and on the device of the given one, which is not changed.
        element: The element of the traced group that maps the given network to it.
        notes: Closed forms that were used, and what was held.
        change: The largest relative change of an output in float64.
        before: The objective at the given network, over all data.
        after: The objective at the result.
        history: The steps.
        converged: Whether the derivative fell below the tolerance. Rounding has no such point, so that Adam seldom
            converges in this sense; it returns the best point that it saw.
    """

    before: float = math.nan
    after: float = math.nan
    history: tuple[OrbitStep, ...] = field(default=(), repr=False)
    converged: bool = False


def minimize_on_orbit(
    symmetry: Symmetry,
    network: nn.Module,
    objective: Objective | Function,
    *,
    data: Any = None,
    factors: str | Iterable[str] | None = None,
    maximize: bool = False,
    optimizer: Literal["auto", "lbfgs", "adam"] = "auto",
    lr: float = 0.02,
    max_steps: int = 200,
    tolerance: float = 1e-8,
    budget: float | None = None,
    start: Start = None,
    seed: int = 0,
    check: bool = True,
) -> OrbitMinimum:
    r"""Move a network along its orbit until an objective of its weights is least; its function stays.

    The derivative of the objective by the weights is pulled back to coordinates of the group: logarithms of scales,
    matrices, angles, shifts. Permutations and signs do not change.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.
        objective: A function that takes a :class:`View` of the network (or any mapping of its parameters), and a batch
            if there are data, and returns a scalar, differentiable by the parameters; or an :class:`Objective`.
        data: One batch, or an iterable of batches, which is read once. A batch is a tensor, a pair of inputs and
            targets, a mapping of keyword arguments, or a :class:`Call`. Floating inputs are converted to float64.
        factors: The kinds of coordinates that move: "all", or some of ``scales``, ``cells`` (matrices), ``rotations``,
            ``phases``, ``shifts`` and ``tilts``. None: as the objective says, by default all.
        maximize: Whether to maximise instead.
        optimizer: "lbfgs" for smooth objectives on all data together, "adam" for rounded ones or single batches.
            "auto" chooses.
        lr: Learning rate of Adam, which falls to 0 by a cosine; > 0.
        max_steps: Most steps, >= 0.
        tolerance: The descent ends where no entry of the derivative exceeds this, times the objective where that is
            above 1. > 0.
        budget: Bound of the absolute logarithms of scales and of the singular values of matrices, > 0. None: no bound
            for scales, or 3 if maximised.
        start: The first element; "balanced", of smallest norm over scales and cells; or "hadamard", which rotates
            streams by Hadamard matrices. None: the identity.
        seed: Seed of the order of batches.
        check: Whether to verify that the function stays the same.

    Returns:
        The network, the element, and how it went.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If the network is not of the traced architecture or has no weights; if the objective is no scalar,
            not finite at the start, or without a derivative by weights that move; if data are missing; if there is no
            such kind of coordinates; or if an argument is out of its range.
        RuntimeError: If the function has changed.

    Example:
        >>> from lightning_sym.symmetry import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        >>> symmetry = trace_symmetry(network, torch.randn(2, 5))
        >>> def squares(weights):
        ...     return sum(own.square().sum() for own in weights.values())
        >>> found = minimize_on_orbit(symmetry, network, squares)
        >>> found.converged, found.after < found.before
        (True, True)
    """
    check_words(("optimizer", optimizer, ("auto", "lbfgs", "adam")))
    check_integers(0, max_steps=max_steps)
    check_numbers("> 0", lr=lr, tolerance=tolerance)
    _check_budget(budget, maximize, objective)
    require_weights(symmetry, network, check=check)
    exact = double_copy(network).requires_grad_(False)
    batches = _batches(data, exact)
    if not batches and getattr(objective, "reads_data", False):
        raise ValueError(f"{type(objective).__name__} needs data to run the network on; pass data=...")
    held, notes = _held(symmetry, exact, objective, budget)
    chosen = getattr(objective, "factors", ALL) if factors is None else factors
    if factors is None and chosen != ALL:  # an objective names kinds for all networks
        present = {KINDS[name.split()[0]] for own in symmetry.factors for name in own.coordinates()}
        chosen = [kind for kind in chosen if kind in present]
    directions = OrbitDirections(symmetry, chosen, held)
    with unchecked(), evaluating(exact):
        problem = _Problem(symmetry, exact, directions, objective, batches, -1.0 if maximize else 1.0)
        problem.budget = _BUDGET if maximize and budget is None else budget
        before = problem.value(symmetry.identity())
        first = problem.begin(_started(symmetry, exact, start))
        smooth = getattr(objective, "smooth", True) and len(batches) < 2
        if optimizer == "lbfgs" or (optimizer == "auto" and smooth):
            element, history, converged = _lbfgs(problem, first, max_steps, tolerance)
        else:
            element, history, converged = _adam(problem, first, max_steps, tolerance, lr, seed)
        after = problem.value(element)
    result = moved(symmetry, network, element, check=check, notes=notes)
    return OrbitMinimum(
        result.network,
        result.element,
        result.notes,
        result.change,
        before=before,
        after=after,
        history=tuple(history),
        converged=converged,
    )


def _check_budget(budget: float | None, maximize: bool, objective: Objective | Function) -> None:
    if budget is not None and not (maximize and budget == math.inf):
        check_numbers("> 0", budget=budget)
    if budget == math.inf and getattr(objective, "unbounded_above", True):
        raise ValueError(
            "the objective has no maximum on the orbit, so that maximising it needs a finite budget, got inf."
        )


def _batches(data: Any, network: nn.Module) -> list[Any]:
    """Return a list of batches in float64 on the device of a network."""
    if data is None:
        return []
    single = isinstance(data, (Tensor, Call, Mapping, tuple))
    found: list[Any] = list(on_device_of(network, double([data] if single else list(data))))
    if not found:
        raise ValueError("data hold no batch; expected at least one.")
    return found


def _held(
    symmetry: Symmetry, network: nn.Module, objective: Objective | Function, budget: float | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return masks of the coordinates that stay, by name, and notes."""
    if getattr(objective, "needs_one_sided", False) or budget is not None:
        return {}, []
    plan = symmetry.factors.plan
    mask = torch.from_numpy(one_sided(plan, Squares(plan, symmetry.tensors(network))))
    if not bool(mask.any()):
        return {}, []
    count = int(mask.sum())
    note = f"{count} scales that only multiply weights (before batch norms) were held: without a budget these tend to 0"
    return {"scales": mask}, [note]


def _started(symmetry: Symmetry, network: nn.Module, start: Start) -> Element:
    if start is None:
        return symmetry.identity()
    if isinstance(start, Element):
        symmetry._own(start)
        return start
    check_words(("start", start, ("balanced", "hadamard")))
    if start == "balanced":
        return balanced_element(symmetry, network, signs=False)
    return rotate_stream(symmetry, network, "hadamard", check=False).element


class _Problem:
    """An objective as a function on the group.

    Args:
        symmetry: The symmetry.
        network: In float64 and evaluation mode. Not changed.
        directions: The coordinates.
        objective: The objective.
        batches: All batches.
        sign: -1 to maximise.

    Attributes:
        budget: Bound of absolute logarithms; None for none.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        network: nn.Module,
        directions: OrbitDirections,
        objective: Objective | Function,
        batches: Sequence[Any],
        sign: float,
    ) -> None:
        self.symmetry, self.network, self.directions, self.batches = symmetry, network, directions, batches
        self.sign, self.budget = sign, None
        self._state, self._places = state_tensors(network), first_names(network)
        self._parameters = {name for name, _ in network.named_parameters()}
        self._moving = set(symmetry.structure.moving)
        pieces = Charts(pieces=symmetry.structure.charts.pieces)
        self._chart = lambda gradients: charted(gradients, pieces)
        begun = objective.begun(self.view(symmetry.identity()), batches) if isinstance(objective, Objective) else None
        self._objective: Function = objective if begun is None else begun

    def view(self, element: Element) -> View:
        """Return the network at a point of the orbit."""
        tensors = self.symmetry.act_on(element, self._state)
        parameters, buffers = {}, {}
        for name, tensor in tensors.items():
            own = tensor.detach()
            if own.is_floating_point() and (name in self._parameters or name in self._moving):
                own.requires_grad_()
            (parameters if name in self._parameters else buffers)[name] = own
        return View(self.network, parameters, buffers, self._places)

    def _values(self, view: View, batches: Sequence[Any] | None) -> Iterable[Tensor]:
        """Yield the objective of each batch."""
        for arguments in [(batch,) for batch in (self.batches if batches is None else batches)] or [()]:
            value = self._objective(view, *arguments)
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"the objective must return a scalar tensor, got {what}.")
            yield value.reshape(())

    def value(self, element: Element, batches: Sequence[Any] | None = None) -> float:
        """Return the mean objective over batches; None for all."""
        values = [float(own.detach()) for own in self._values(self.view(element), batches)]
        return math.fsum(values) / len(values)

    def gradient(self, element: Element, batches: Sequence[Any] | None = None) -> tuple[float, dict[str, Tensor]]:
        """Return the mean objective, times the sign, and its derivative by the coordinates at an element."""
        view = self.view(element)
        leaves = {n: own for n, own in {**view.parameters, **view.buffers}.items() if own.requires_grad}
        total, found, count = 0.0, dict[str, Tensor](), 0
        for value in self._values(view, batches):
            total, count = total + float(value.detach()), count + 1
            if not value.requires_grad:
                continue
            parts = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            for name, part in zip(leaves, parts, strict=True):
                if part is not None and name in self._moving:
                    found[name] = part if name not in found else found[name] + part
        if not found:
            raise ValueError(
                "the objective has no derivative by weights that the group moves; expected a differentiable function "
                "of the view's parameters."
            )
        # Rotations read the gains around them, also where an objective does not.
        found = {n: found.get(n, torch.zeros_like(own)) for n, own in leaves.items() if n in self._moving}
        scaled = {name: own * (self.sign / count) for name, own in found.items()}
        weights = charted({name: leaves[name] for name in scaled}, self.symmetry.structure.charts)
        charts = self._chart(scaled)
        return self.sign * total / count, self.directions.pulled_back(weights, {name: charts[name] for name in charts})

    def begin(self, element: Element) -> Element:
        """Return the first element; check that the objective is finite there.

        Raises:
            ValueError: If it is not.
        """
        value = self.value(element)
        if not math.isfinite(value):
            raise ValueError(f"the objective is {value} at the start; expected a finite number.")
        return element

    def after(self, coordinates: Mapping[str, Tensor], element: Element) -> Element:
        """Return the element after a step, within the budget."""
        composed = self.symmetry.compose(self.directions.element(coordinates), element)
        if self.budget is None:
            return composed
        parts = {own.name: own.within(composed.parts[own.name], self.budget) for own in self.symmetry.factors}
        return composed.replaced(**parts)


def _largest(coordinates: Mapping[str, Tensor]) -> float:
    return max((float(own.abs().max()) for own in coordinates.values()), default=0.0)


def _lbfgs(
    problem: _Problem, element: Element, max_steps: int, tolerance: float
) -> tuple[Element, list[OrbitStep], bool]:
    """Minimise by L-BFGS with backtracking.

    Returns:
        The element, the steps, and whether the derivative fell below the tolerance.
    """
    began, history = time.perf_counter(), list[OrbitStep]()
    value, gradient = problem.gradient(element)
    pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=_MEMORY)
    for number in range(max_steps + 1):
        size = _largest(gradient)
        history.append(OrbitStep(number, problem.sign * value, size, time.perf_counter() - began))
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
    problem: _Problem, element: Element, value: float, flat: Tensor, direction: Tensor, *, first: bool
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
        if math.isfinite(reached) and reached <= value + _ARMIJO * length * slope:
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
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _adam(
    problem: _Problem, element: Element, max_steps: int, tolerance: float, lr: float, seed: int
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
        if not math.isfinite(value):  # back to the best point, with half of the steps
            element = best
            for group in adam.param_groups:
                group["lr"] /= 2
            continue
        size = _largest(gradient)
        history.append(OrbitStep(number, problem.sign * value, size, time.perf_counter() - began))
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
