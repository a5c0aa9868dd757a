"""The member of least norm of an orbit."""

from torch import nn

from lightning_sym.orbit.descent import OrbitMinimum, minimize_on_orbit
from lightning_sym.orbit.objectives import weight_norm
from lightning_sym.symmetry.base import Symmetry


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
        >>> import torch
        >>> from lightning_sym.symmetry import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        >>> found = least_norm(trace_symmetry(network, torch.randn(2, 5)), network)
        >>> found.converged, found.after <= found.before
        (True, True)
    """
    return minimize_on_orbit(symmetry, network, weight_norm(2), max_steps=max_steps, tolerance=tolerance, check=check)
