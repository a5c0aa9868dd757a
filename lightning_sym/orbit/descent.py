"""Descent of any function of the weights over the orbit of a network.

See docs/theory/orbit.md. A step is ``g <- exp(X) g``, with coordinates X of the Lie algebra that are 0 between steps;
g always acts on the original weights, so that rounding does not add up.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_numbers, check_words
from lightning_sym._distributed import on_device_of
from lightning_sym._notebook import Tabular
from lightning_sym.networks.modes import evaluating
from lightning_sym.orbit.directions import ALL, KINDS, OrbitDirections, kinds_of
from lightning_sym.orbit.objective import Objective
from lightning_sym.orbit.problem import Function, OrbitProblem
from lightning_sym.orbit.rounding import batches_in
from lightning_sym.orbit.steps import OrbitStep, by_adam, by_lbfgs
from lightning_sym.symmetry import Element, rotate_stream
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.canonical.form import balanced_element
from lightning_sym.symmetry.described import listed
from lightning_sym.symmetry.group.gauge import one_sided
from lightning_sym.symmetry.group.norms import Squares
from lightning_sym.symmetry.moves.moved import ChangedFunctionError, Moved, moved, require_weights
from lightning_sym.symmetry.proof import double, double_copy, tolerance_of
from lightning_sym.symmetry.tracing.graph.capture import state_tensors

Start = Element | Literal["balanced", "hadamard"] | None

_ONE_SIDED = "one-sided"
_BUDGET = 3.0  # of logarithms, where an objective is maximised
_CONDITION = math.log(1e4)  # of condition numbers: more of these would lose digits of the function


@dataclass(frozen=True)
class OrbitMinimum(Moved, Tabular):
    """The result of a descent over the orbit; unpacks to the network and the element.

    Attributes:
        network: The new network, in the dtype and on the device of the given one, which is not changed.
        element: The element of the traced group that maps the given network to it.
        notes: Closed forms that were used, coordinates that were held, and bounds that were reached.
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

    def titled_rows(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the number of steps, and the objective before and after with the change of outputs."""
        end = "converged" if self.converged else "not converged"
        row = {"objective before": self.before, "after": self.after, "largest change of an output": self.change}
        return f"Descent on the orbit, steps: {len(self.history)}, {end}", [row]


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
    hold: str | Iterable[str] = (),
    seed: int = 0,
    check: bool = True,
    progress: Callable[[int, int], None] | None = None,
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
            Each batch has the same weight, also a smaller one.
        factors: The coordinates that move: "all", or some of ``scales``, ``cells`` (matrices on heads and linear layers
            in a row), ``gained`` (matrices around batch norms, which keep the function in evaluation mode only),
            ``rotations``, ``phases``, ``shifts``, ``tilts``, and of patterns of names of axis groups
            (``symmetry.groups[i].name``). None: as the objective says, by default all.
        maximize: Whether to maximise instead.
        optimizer: "lbfgs" for smooth objectives on all data together, "adam" for rounded ones or single batches.
            "auto" chooses.
        lr: Learning rate of Adam, which falls to 0 by a cosine; > 0.
        max_steps: Most steps, >= 0.
        tolerance: The descent ends where no entry of the derivative exceeds this, times the objective where that is
            above 1. > 0.
        budget: Bound of the absolute logarithms of scales and singular values, and of the logarithms of condition
            numbers, > 0. None: 3 if maximised; otherwise condition numbers of at most 1e4 only, as the function loses
            the digits that they cost.
        start: The first element; "balanced", of smallest norm over scales and cells; or "hadamard", which rotates
            streams by Hadamard matrices. None: the identity.
        hold: Kinds of coordinates that do not move, although `factors` names them; and "one-sided", scales before
            batch norms and others that only multiply weights.
        seed: Seed of the order of batches.
        check: Whether to verify that the function stays the same.
        progress: Called after each step with its number and `max_steps`; the descent may end before these.

    Returns:
        The network, the element, and how it went: the best point that was seen, never worse than the start.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If the network is not of the traced architecture or has no weights; if the objective is no scalar,
            not finite at the start, or without a derivative by weights that move; if data are missing; if there is no
            such kind of coordinates or axis group, or it cannot move; or if an argument is out of its range.
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
    directions, notes = moving_directions(
        symmetry, exact, objective, factors, hold, maximize=maximize, bounded=budget is not None
    )
    with torch.inference_mode(False), torch.enable_grad(), unchecked(), evaluating(exact):
        problem = OrbitProblem(symmetry, exact, directions, objective, batches, -1.0 if maximize else 1.0)
        problem.budget = _BUDGET if maximize and budget is None else math.inf if budget is None else budget
        problem.condition = min(problem.budget, _CONDITION)
        first = problem.within(_started(symmetry, exact, start), symmetry.factors)
        free = start is None and budget is None and not maximize and max_steps > 0
        if free and (known := problem.closed_form()) is not None:
            first, notes = known, [*notes, "the descent starts at the closed form over scales and cells"]
        before = problem.value(symmetry.identity())
        value = before if symmetry.factors.is_identity(first) else problem.value(first)
        if not math.isfinite(value):
            raise ValueError(f"the objective is {value} at the start; expected a finite number.")
        element, history, converged = first, list[OrbitStep](), not directions.shapes
        if not directions.shapes:
            notes.append("no continuous coordinate of the group moves: the network stays at the start")
        elif optimizer == "lbfgs" or (optimizer == "auto" and problem.smooth):
            element, history, converged = by_lbfgs(problem, first, max_steps, tolerance, progress)
        else:
            element, history, converged = by_adam(problem, first, max_steps, tolerance, lr, seed, progress)
        after = problem.value(element)
    notes += _at_bounds(problem, element)
    result = moved(symmetry, network, element, check=check, notes=notes)
    if check:
        _require_variances(symmetry, exact, element, _lowest_dtype(network))
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
    return list(on_device_of(network, double(batches_in(data, inputs_only=False))))


def moving_directions(
    symmetry: Symmetry,
    network: nn.Module,
    objective: Objective | Function,
    factors: str | Iterable[str] | None,
    hold: str | Iterable[str] = (),
    *,
    maximize: bool,
    bounded: bool,
) -> tuple[OrbitDirections, list[str]]:
    """Return the coordinates that move, and notes on those that are held.

    Args:
        symmetry: The symmetry.
        network: In float64. Not changed.
        objective: The objective.
        factors: See :func:`minimize_on_orbit`.
        hold: See :func:`minimize_on_orbit`.
        maximize: Whether the objective is maximised.
        bounded: Whether there is a budget.

    Raises:
        ValueError: If a coordinate that was asked for cannot move, or there is no such kind to be held.
    """
    held = [hold] if isinstance(hold, str) else list(hold)
    check_words(*(("hold", own, (*KINDS.values(), _ONE_SIDED)) for own in held))
    chosen = getattr(objective, "factors", ALL) if factors is None else factors
    chosen = [chosen] if isinstance(chosen, str) else list(chosen)
    if factors is None:  # an objective names kinds for all networks
        chosen = [kind for kind in chosen if kind == ALL or kind in kinds_of(symmetry)]
    directions, masks, notes = OrbitDirections(symmetry, chosen), dict[str, Tensor](), list[str]()
    free = factors is None or ALL in chosen
    for name, shape in directions.shapes.items():
        if KINDS[name.split()[0]] in held:
            masks[name] = torch.ones(shape, dtype=torch.bool)
    notes += [f"{listed(sorted({KINDS[name.split()[0]] for name in masks}))} were held"] * bool(masks)
    directions, masks = OrbitDirections(symmetry, chosen, masks), dict(masks)
    if maximize:
        unbounded = [own for own in directions.shapes if own.split()[0] in ("shifts", "tilt")]
        for name in unbounded:
            if not free:
                raise ValueError(
                    f"nothing bounds {name.split()[0]}s, along which the objective is maximised; leave them out."
                )
            masks[name] = torch.ones(directions.shapes[name], dtype=torch.bool)
        notes += ["shifts and rank-one maps were held: no budget bounds them"] * bool(unbounded)
    tensors = symmetry.tensors(network)
    for name, gains in _through_zeros(symmetry, directions, tensors).items():
        if not free:
            raise ValueError(
                f"{gains} holds zeros, through which {name} cannot act; expected other gains, or factors without it."
            )
        masks[name] = torch.ones(directions.shapes[name], dtype=torch.bool)
        notes.append(f"{name} was held, as {gains} holds zeros")
    unlimited = not (bounded or maximize or getattr(objective, "needs_one_sided", False))
    if (unlimited or _ONE_SIDED in held) and "scales" in directions.shapes:
        plan = symmetry.factors.plan
        mask = torch.from_numpy(one_sided(plan, Squares(plan, tensors)))
        masks["scales"] = mask
        if count := int((mask & ~directions.fixed.get("scales", torch.zeros_like(mask))).sum()):
            why = ": without a budget these tend to 0" * (_ONE_SIDED not in held)
            notes.append(f"{count} scales before batch norms, or that only multiply weights, were held{why}")
    return OrbitDirections(symmetry, chosen, masks) if masks else directions, notes


def _through_zeros(symmetry: Symmetry, directions: OrbitDirections, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the coordinates of matrices that gains with zeros keep from acting, and these gains."""
    found = {}
    for factor, closed in symmetry.factors.closed(tensors).items():
        own = symmetry.factors[factor]
        gains = listed([name for name in sorted(own.gains) if not bool(tensors[name].all())])
        names = (name for name in own.coordinates() if name in directions.shapes)
        found.update({name: gains for name in names if name.split()[-1] in map(str, closed)})
    return found


def _lowest_dtype(network: nn.Module) -> torch.dtype:
    found = {own.dtype for own in network.buffers() if own.is_floating_point()}
    return max(found, key=lambda own: torch.finfo(own).eps, default=torch.float64)


def _require_variances(symmetry: Symmetry, exact: nn.Module, element: Element, dtype: torch.dtype) -> None:
    """Check that running variances plus epsilon keep their digits in the network's precision.

    Raises:
        ChangedFunctionError: If one does not.
    """
    tensors = symmetry.act_on(element, state_tensors(exact))
    least = torch.finfo(dtype).eps / tolerance_of(dtype)
    for slot in symmetry.structure.slots:
        if slot.kind == "variance" and bool((tensors[slot.tensor] + slot.epsilon < least * slot.epsilon).any()):
            raise ChangedFunctionError(
                f"scales before a batch norm bring {slot.tensor} so close to -epsilon that the sum of both loses its "
                f"digits in {str(dtype).removeprefix('torch.')}; expected another start, or factors without scales."
            )


def _at_bounds(problem: OrbitProblem, element: Element) -> list[str]:
    """Return notes on scales and matrices that reached a bound."""
    notes = []
    for name, count in problem.stopped(element).items():
        if not isinstance(element.parts[name], tuple):
            notes.append(f"{count} scales reached the budget of {problem.budget:g}")
        else:
            notes.append(
                f"{count} matrices were stopped at the condition number {math.exp(problem.condition):.3g} or the "
                "budget: the objective may have no minimum there"
            )
    return notes


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
