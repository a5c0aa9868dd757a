"""Symmetry teleportation: move a network along its orbit during training, with the state of its optimiser.

Zhao, Dehmamy, Walters, Yu (2022), "Symmetry Teleportation for Accelerated Optimization", arXiv 2205.10637.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_sym._checks import check_integers, check_numbers, check_words
from lightning_sym.orbit.closed_forms import least_squares
from lightning_sym.orbit.descent import minimize_on_orbit, moving_directions
from lightning_sym.orbit.directions import ALL, KINDS, kinds_of
from lightning_sym.orbit.objective import Objective
from lightning_sym.orbit.objectives import gradient_norm, weight_norm
from lightning_sym.symmetry import Element, Symmetry
from lightning_sym.symmetry.proof import double_copy

Way = Literal["ascent", "descent", "balance", "random", "none"]
_MATRICES = {"cells", "gained", "rotations", "phases"}


@dataclass(frozen=True)
class Teleported:
    """A move along the orbit.

    Attributes:
        element: The element.
        before: The objective before; NaN if it is not computed.
        after: The objective afterwards.
        seconds: Time to find the element.
    """

    element: Element
    before: float = math.nan
    after: float = math.nan
    seconds: float = 0.0


@dataclass(frozen=True)
class Teleportation:
    """How a network moves along its orbit; its function stays.

    Attributes:
        way: "ascent" or "descent" of the objective, "balance" (to the least squared norm of the weights), a "random"
            element, or "none" (for comparisons with ``reset_state``).
        objective: Default the squared norm of the gradient of the cross-entropy. Only ascents and descents use it.
        factors: The kinds of coordinates that move, see :func:`minimize_on_orbit`.
        max_steps: Steps of the ascent or descent. >= 1.
        budget: Bound of the absolute logarithms of scales and singular values, and standard deviation of those of a
            random element; > 0. Balancing has no bound.
        reset_state: Whether the state of the optimiser is cleared for the moved parameters; otherwise it moves along,
            which second moments under matrices cannot.

    The function stays in training mode, too: matrices through batch norms are held unless `factors` names them, and so
    are scales before batch norms. Where the optimiser's state moves along, shifts and rank-one maps are held: gradients
    of some weights change with these by products that the state does not hold. Balancing then holds matrices as well,
    as second moments cannot follow these; permutations and signs, under which these optimisers are equivariant, stay.

    Raises:
        ValueError: If a value is out of range.
    """

    way: Way = "ascent"
    objective: Objective = field(default_factory=lambda: gradient_norm("cross_entropy"))
    factors: str | Sequence[str] = "all"
    max_steps: int = 10
    budget: float = 1.0
    reset_state: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        check_words(("way", self.way, ("ascent", "descent", "balance", "random", "none")))
        check_integers(1, max_steps=self.max_steps)
        check_numbers("> 0", budget=self.budget)

    def found(
        self, symmetry: Symmetry, network: nn.Module, batch: Any, optimizer: Optimizer | None = None, *, seed: int = 0
    ) -> Teleported:
        """Find an element, without a move.

        Args:
            symmetry: Symmetry of the network's architecture.
            network: Not changed.
            batch: Inputs and targets for the objective.
            optimizer: The optimiser whose state is to move along.
            seed: Seed of a random element.

        Returns:
            The element, and the objective before and after it.

        Raises:
            ValueError: If `factors` names shifts or rank-one maps (or, to balance, matrices), under which the
                optimiser's state cannot move.
        """
        began = perf_counter()
        if self.way == "none":
            return Teleported(symmetry.identity())
        hold = self._held(network, optimizer)
        if self.way == "random":
            drawn = symmetry.sample(
                torch.Generator().manual_seed(seed), scale=self.budget, permutations=False, signs=False
            )
            element = moving_directions(
                symmetry, double_copy(network), self.objective, self.factors, hold, maximize=False, bounded=True
            )[0].restricted(drawn)
            return Teleported(element, seconds=perf_counter() - began)
        balance = self.way == "balance"
        if balance and (known := self._closed_form(symmetry, network, hold)) is not None:
            return Teleported(known, *_norms(symmetry, known, network), perf_counter() - began)
        least = minimize_on_orbit(
            symmetry,
            network,
            weight_norm() if balance else self.objective,
            data=None if balance else batch,
            factors=self.factors,
            maximize=self.way == "ascent",
            max_steps=self.max_steps,
            budget=None if balance else self.budget,
            hold=hold,
            check=False,
        )
        return Teleported(least.element, least.before, least.after, perf_counter() - began)

    def move(
        self, symmetry: Symmetry, element: Element, network: nn.Module, optimizer: Optimizer | None = None
    ) -> None:
        """Move a network in place, with the state of its optimiser.

        Args:
            symmetry: Symmetry of its architecture.
            element: The element.
            network: The network; it is changed.
            optimizer: Its optimiser; its state moves along or is reset.

        Raises:
            ValueError: If matrices mix parameters with second moments, and the state is not reset.
        """
        if self.reset_state and optimizer is not None:
            for parameter in network.parameters():
                optimizer.state.pop(parameter, None)
        symmetry.act(element, network, inplace=True, optimizer=None if self.reset_state else optimizer, check=False)

    def _closed_form(self, symmetry: Symmetry, network: nn.Module, hold: Sequence[str]) -> Element | None:
        """Return the element of least squared norm, without the copies of a descent; None if it has no formula."""
        named = {self.factors} if isinstance(self.factors, str) else {*self.factors}
        kinds = {own for own in kinds_of(symmetry) if own not in hold and named & {ALL, own}}
        if not named <= {ALL, *KINDS.values()} or "scales" not in kinds:
            return None
        return least_squares(symmetry, dict(network.named_parameters()), kinds)

    def _held(self, network: nn.Module, optimizer: Optimizer | None) -> list[str]:
        """List the kinds of coordinates that do not move."""
        named = {self.factors} if isinstance(self.factors, str) else {*self.factors}
        held = {"one-sided", "gained"} - named
        if optimizer is not None and not self.reset_state and _has_state(network, optimizer):
            held |= (mixing := {"shifts", "tilts"} | (_MATRICES if self.way == "balance" else set()))
            if found := sorted(mixing & named):
                raise ValueError(
                    f"the state of the optimiser cannot move under {' and '.join(found)}; set reset_state=True, or "
                    "leave these out of factors."
                )
        return sorted(held)


def _norms(symmetry: Symmetry, element: Element, network: nn.Module) -> tuple[float, float]:
    """Return the sums of squares of all parameters before and after an element."""
    weights = {name: own.detach().double() for name, own in network.named_parameters()}
    before, after = (
        math.fsum(float(own.square().sum()) for own in tensors.values())
        for tensors in (weights, symmetry.act_on(element, weights))
    )
    return before, after


def _has_state(network: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an optimiser holds more than counts of steps for a network's parameters."""
    states = (optimizer.state.get(own, {}).values() for own in network.parameters())
    return any(isinstance(own, torch.Tensor) and own.ndim > 0 for state in states for own in state)
