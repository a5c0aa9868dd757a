"""Objectives: functions of a network's weights that differ between points of its orbit."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from lightning_sym.orbit.view import View
from lightning_sym.symmetry import Element, Symmetry


class Objective(ABC):
    """A function of a network's weights that differs between points of its orbit.

    Any function that takes a :class:`View` (and a batch, if there are data) and returns a scalar will do. A subclass
    says more about itself.

    Attributes:
        smooth: Whether it is differentiable with meaningful gradients, so that L-BFGS may minimise it; otherwise Adam.
        reads_data: Whether it needs batches.
        needs_one_sided: Whether scales that only multiply weights (before batch norms) are moved; a norm of weights
            would let these tend to 0.
        unbounded_above: Whether maximising needs a budget.
        factors: The kinds of coordinates that are moved by default.
    """

    smooth: bool = True
    reads_data: bool = False
    needs_one_sided: bool = False
    unbounded_above: ClassVar[bool] = True
    factors: str | Sequence[str] = "all"

    def begun(self, view: View, batches: Sequence[Any]) -> "Objective":
        """Return the objective for one network: with its measurements at the start.

        Args:
            view: The network at the start.
            batches: All batches.

        Raises:
            ValueError: If two batches look like inputs and their targets.
        """
        check_no_targets(batches)
        return self

    def closed_form(
        self, symmetry: Symmetry, view: View, batches: Sequence[Any], kinds: frozenset[str]
    ) -> Element | None:
        """Return the element to the minimum, where there is a formula; None otherwise.

        Args:
            symmetry: The network's symmetry.
            view: The network at the start.
            batches: All batches.
            kinds: The kinds of coordinates that move, as :class:`OrbitDirections` names them.
        """
        return None

    @abstractmethod
    def __call__(self, view: View, batch: Any = None) -> Tensor:
        """Return the value, a scalar that is differentiable by the view's parameters.

        Args:
            view: The network.
            batch: A batch; None without data.
        """


class Watched(Objective):
    """An objective whose values are shown to a function.

    Args:
        objective: The objective.
        show: Takes each value.
    """

    def __init__(self, objective: Objective, show: Callable[[float], None]) -> None:
        self._objective, self._show = objective, show
        self.smooth, self.reads_data = objective.smooth, objective.reads_data
        self.needs_one_sided, self.factors = objective.needs_one_sided, objective.factors
        self.unbounded_above = objective.unbounded_above  # type: ignore[misc]

    def begun(self, view: View, batches: Sequence[Any]) -> Objective:
        """Return the objective for one network; see :class:`Objective`."""
        return Watched(self._objective.begun(view, batches), self._show)

    def closed_form(
        self, symmetry: Symmetry, view: View, batches: Sequence[Any], kinds: frozenset[str]
    ) -> Element | None:
        """Return the element to the minimum; see :class:`Objective`."""
        return self._objective.closed_form(symmetry, view, batches, kinds)

    def __call__(self, view: View, batch: Any = None) -> Tensor:
        """Return the value; see :class:`Objective`."""
        value = self._objective(view, batch)
        if isinstance(value, Tensor) and value.numel() == 1:
            self._show(float(value.detach()))
        return value


def check_no_targets(batches: Sequence[Any]) -> None:
    """Check that two batches are not the inputs and the targets of one.

    Raises:
        ValueError: If there are two tensors of one length, of which only the second has integers or one axis.
    """
    if len(batches) != 2 or not all(isinstance(own, Tensor) and own.ndim for own in batches):
        return
    inputs, targets = batches
    targeted = (inputs.is_floating_point() and not targets.is_floating_point()) or (inputs.ndim > 1 == targets.ndim)
    if len(inputs) == len(targets) and targeted:
        raise ValueError(
            "a list holds batches, and these two look like the inputs and the targets of one; pass a tuple, "
            "data=(inputs, targets)."
        )
