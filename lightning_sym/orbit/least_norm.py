"""The member of least norm of an orbit."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym.orbit.closed_forms import least_squares
from lightning_sym.orbit.descent import OrbitMinimum, minimize_on_orbit
from lightning_sym.orbit.objective import Objective
from lightning_sym.orbit.view import View
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.element import Element


class SquaredNorm(Objective):
    """The sum of squares of all parameters."""

    def closed_form(
        self, symmetry: Symmetry, view: View, batches: Sequence[Any], kinds: frozenset[str]
    ) -> Element | None:
        """Return the element to the minimum over scales and cells; see :func:`least_squares`."""
        return least_squares(symmetry, view.parameters, kinds)

    def __call__(self, view: View, batch: Any = None) -> Tensor:
        """Return the sum of squares."""
        return torch.stack([own.square().sum() for own in view.parameters.values()]).sum()


def least_norm(
    symmetry: Symmetry, network: nn.Module, *, max_steps: int = 500, tolerance: float = 1e-8, check: bool = True
) -> OrbitMinimum:
    """Move a network to the point of least norm of its orbit, by descent over the whole group.

    :func:`canonicalize` balances scales, but sets gains around rotated streams to 1 and shifts to canonical values,
    which may cost norm. Permutations and signs change no norm and stay. Over scales and GL(d) blocks the norm is
    geodesically convex, and its least value unique. Rotations between gains other than 1 may lead to other local
    minima.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.
        max_steps: Most steps, >= 0.
        tolerance: See :func:`minimize_on_orbit`.
        check: Whether to verify that the function stays the same.

    Returns:
        The network, the element, and the squared norms before and after. Scales that only multiply weights (before
        batch norms) are held, with a note: the norm has no minimum along these.

    Raises:
        TypeError: As :func:`minimize_on_orbit`.
        ValueError: As :func:`minimize_on_orbit`.
        RuntimeError: If the function has changed.

    Example:
        >>> from lightning_sym.symmetry import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        >>> found = least_norm(trace_symmetry(network, torch.randn(2, 5)), network)
        >>> found.converged, found.after <= found.before
        (True, True)
    """
    return minimize_on_orbit(symmetry, network, SquaredNorm(), max_steps=max_steps, tolerance=tolerance, check=check)
