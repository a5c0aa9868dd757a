"""An objective as a function on the group of a network."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym.orbit.directions import KINDS, OrbitDirections
from lightning_sym.orbit.objective import Objective
from lightning_sym.orbit.view import View
from lightning_sym.symmetry import Element, Symmetry
from lightning_sym.symmetry.charts import charted, uncharted
from lightning_sym.symmetry.group.factor import Factor, members
from lightning_sym.symmetry.tracing.graph.capture import first_names, state_tensors
from lightning_sym.symmetry.views import FixedTensors

Function = Callable[..., Tensor]


class OrbitProblem:
    """An objective as a function on the group.

    Args:
        symmetry: The symmetry.
        network: In float64 and evaluation mode. Not changed.
        directions: The coordinates.
        objective: The objective.
        batches: All batches.
        sign: -1 to maximise.

    Attributes:
        budget: Bound of the absolute logarithms of scales and of singular values.
        condition: Bound of the logarithms of condition numbers of matrices.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        network: nn.Module,
        directions: OrbitDirections,
        objective: Objective | Function,
        batches: Sequence[Any] = (),
        sign: float = 1.0,
    ) -> None:
        self.symmetry, self.network, self.directions, self.batches = symmetry, network, directions, batches
        self.sign, self.budget, self.condition = sign, math.inf, math.inf
        self._identity = symmetry.identity()
        self._state, self._places = state_tensors(network), first_names(network)
        self._fixed = FixedTensors(symmetry.tensors(network))
        self._parameters = {name for name, _ in network.named_parameters()}
        self._moving = set(symmetry.structure.moving)
        self._pieces = symmetry.structure.charts.only_moving  # added numbers have no derivative
        begun = objective.begun(self.view(symmetry.identity()), batches) if isinstance(objective, Objective) else None
        self._objective: Function = objective if begun is None else begun

    def view(self, element: Element) -> View:
        """Return the network at a point of the orbit."""
        moved = self.symmetry.acted(element, self._fixed)
        tensors = dict(uncharted(moved.items(), self.symmetry.structure.charts, self._state))
        parameters, buffers = dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in tensors.items():
            own = tensor.detach()
            if own.is_floating_point() and (name in self._parameters or name in self._moving):
                own.requires_grad_()
            (parameters if name in self._parameters else buffers)[name] = own
        return View(self.network, parameters, buffers, self._places)

    def _values(self, view: View, batches: Sequence[Any] | None) -> Iterable[Tensor]:
        """Yield the objective of each batch."""
        every: list[tuple[Any, ...]] = [(batch,) for batch in (self.batches if batches is None else batches)]
        for arguments in every or [()]:
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
        for names in self._pieces.stacks.values():  # the objective may read some of them
            some = any(name in found for name in names)
            found |= {name: torch.zeros_like(leaves[name]) for name in names if some and name not in found}
        weights = charted({**view.parameters, **view.buffers}, self.symmetry.structure.charts)
        pieces = charted(found, self._pieces)
        by_chart = {name: self.symmetry.structure.charts.slope(name, weights[name]) for name in pieces}
        slopes = self.directions.pulled_back(
            weights, {name: pieces[name] if by is None else pieces[name] / by for name, by in by_chart.items()}
        )
        slopes = {name: own * (self.sign / count) for name, own in slopes.items()}
        return self.sign * total / count, self._inwards(slopes, element)

    def _inwards(self, slopes: dict[str, Tensor], element: Element) -> dict[str, Tensor]:
        """Return a derivative without the part that would leave the bounds."""
        outer = self._identity
        for factor in self.symmetry.factors:
            own = element.parts[factor.name]
            if factor.inwards(own, slopes, *self.bounds):
                # Coordinates act where the element has put the units.
                own = factor.carried(own, outer, self.symmetry.inverse(outer))
                slopes |= factor.inwards(own, slopes, *self.bounds)
            outer = outer.replaced(**{factor.name: element.parts[factor.name]})
        return slopes

    def closed_form(self) -> Element | None:
        """Return the element to the minimum, if there is a formula for all that moves."""
        if self.directions.fixed or not isinstance(self._objective, Objective):
            return None
        kinds = frozenset(KINDS[name.split()[0]] for name in self.directions.shapes)
        return self._objective.closed_form(self.symmetry, self.view(self._identity), self.batches, kinds)

    @property
    def smooth(self) -> bool:
        """Whether L-BFGS minimises it."""
        return getattr(self._objective, "smooth", True) and len(self.batches) < 2

    def after(self, coordinates: Mapping[str, Tensor], element: Element) -> Element:
        """Return the element after a step, within bounds."""
        return self.within(self.symmetry.compose(self.directions.element(coordinates), element))

    def within(self, element: Element, factors: Iterable[Factor[Any]] | None = None) -> Element:
        """Return the nearest element within bounds.

        Args:
            element: The element.
            factors: The factors whose parts may exceed these; None for those that move.
        """
        bounded = self._bounded if factors is None else factors
        parts = {own.name: own.within(element.parts[own.name], *self.bounds) for own in bounded}
        return element.replaced(**parts) if parts else element

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of logarithms, of scales and of condition numbers."""
        return self.budget, self.condition

    @cached_property
    def _bounded(self) -> list[Factor[Any]]:
        """The factors with parts that may leave the bounds."""
        moved = self.directions.shapes.keys()
        return [own for own in self.symmetry.factors if not moved.isdisjoint(own.coordinates())]

    def stopped(self, element: Element) -> dict[str, int]:
        """Count the scales and matrices of an element that reached a bound, by factor."""
        nearly, found = [own * (1 - 1e-6) for own in self.bounds], {}
        for factor in self._bounded:
            part = element.parts[factor.name]
            pairs = zip(members(part), members(factor.within(part, *nearly)), strict=True)
            changed = [(one != two).flatten() for one, two in pairs if one.numel()]
            found[factor.name] = sum(int(own.any() if isinstance(part, tuple) else own.sum()) for own in changed)
        return {name: count for name, count in found.items() if count}
