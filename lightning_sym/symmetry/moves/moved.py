"""The result of a reparametrization, its numerical verification, and shared helpers."""

import contextlib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_sym._checks import not_finite
from lightning_sym._distributed import on_device_of
from lightning_sym.networks.modes import evaluating
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.proof import batches_of, change_between, double, double_copy, tolerance_of
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.norms import Norm
from lightning_sym.symmetry.tracing.graph.weightless import is_weightless


class ChangedFunctionError(RuntimeError):
    """A reparametrization changed a network's function."""


@dataclass(frozen=True)
class Moved:
    """A reparametrized network; unpacks to the network and the element.

    Attributes:
        network: The new network, in the dtype and on the device of the given one, which is not changed.
        element: The element of the traced group that maps the given network to it, up to rounding.
        notes: Reasons why something was left unchanged.
        change: The largest relative change of an output in float64; NaN if it was not measured.
    """

    network: nn.Module
    element: Element
    notes: tuple[str, ...] = ()
    change: float = float("nan")

    def __iter__(self) -> Iterator[Any]:
        yield self.network
        yield self.element


def require_weights(symmetry: Symmetry, network: nn.Module, *, check: bool = True) -> None:
    """Check that a network has the traced architecture, and weights.

    Args:
        symmetry: The symmetry of that architecture.
        network: Not changed.
        check: Whether to run a network that is new to the symmetry.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If the architecture differs, or tensors have no values.
    """
    if isinstance(network, nn.Module) and is_weightless(network):
        raise ValueError(
            "the network holds tensors without values (on meta), but elements are computed from values; expected a "
            "network with weights of the traced architecture"
        )
    with contextlib.nullcontext() if check else unchecked():
        symmetry.require(network)
    if broken := not_finite(dict(network.named_parameters())):
        raise ValueError(f"{broken[0]} holds values that are not finite; expected a network with finite weights.")


def norms_of(symmetry: Symmetry) -> Sequence[Norm]:
    """Return the norms of a network.

    Raises:
        ValueError: If elements exchange some of them.
    """
    if symmetry.exchanged_norms:
        raise ValueError(
            f"elements exchange the modules with the norms {few(symmetry.exchanged_norms)}; expected a symmetry that "
            "keeps them at their places: trace_symmetry(..., exchange=False)"
        )
    return symmetry.norms


def moved(
    symmetry: Symmetry,
    network: nn.Module,
    element: Element,
    *,
    check: bool,
    settle: Callable[[nn.Module], None] = lambda network: None,
    notes: Sequence[str] = (),
) -> Moved:
    """Apply an element to a network, and verify that its function stays the same.

    Args:
        symmetry: Symmetry of the network.
        network: Not changed.
        element: The element.
        check: Whether to compare outputs.
        settle: Removes rounding from the result in place (gains of nearly 1 become 1).
        notes: Notes for the result.

    Raises:
        ChangedFunctionError: If the function has changed.
    """
    result = symmetry.act(element, network, check=check)
    settle(result)
    if not check:
        return Moved(result, element, tuple(notes))
    exact = double_copy(network)
    with unchecked():
        after = symmetry.act(element, exact)
    settle(after)
    change, precision = largest_output_change(symmetry, exact, after)
    if not change <= max(symmetry.tolerance, tolerance_of(precision)):
        raise ChangedFunctionError(
            f"the move changed the output by {change:.1e} (relative; at most {symmetry.tolerance:.1g} was expected): "
            "the weights lose too many digits in it, or the symmetry is not that of this network "
            "(symmetry.check(network) tells)"
        )
    return Moved(result, element, tuple(notes), change)


def largest_output_change(symmetry: Symmetry, exact: nn.Module, other: nn.Module) -> tuple[float, torch.dtype]:
    """Return the largest relative change of an output between two networks, and the lowest precision of operations.

    Args:
        symmetry: Symmetry with the examples; inputs with noise around them are used as well.
        exact: A network in float64. Not changed.
        other: The same with other weights.
    """
    generator = torch.Generator().manual_seed(0)
    calls: list[Call] = list(on_device_of(exact, double(list(symmetry.examples))))
    with torch.no_grad(), evaluating(exact), evaluating(other):
        batches = [batch for call in calls for batch in batches_of(exact, call, generator)]
        return change_between(exact, other, batches, generator)


def is_left(leave: str | Iterable[str], *names: str | None) -> bool:
    """Return whether one of some names matches a pattern to leave unchanged."""
    patterns = [leave] if isinstance(leave, str) else leave
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names if name)


def check_left(leave: str | Iterable[str], names: Iterable[str | None]) -> None:
    """Check that every pattern of `leave` matches a name.

    Raises:
        ValueError: If one does not.
    """
    known = [name for name in names if name]
    for pattern in [leave] if isinstance(leave, str) else leave:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
            raise ValueError(
                f"leave={pattern!r} names none of the network's norms; expected patterns of {few(known, 3)}"
            )


def few(names: Sequence[str], most: int = 2) -> str:
    """List the first few names."""
    names = list(dict.fromkeys(names))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def pattern_of(names: Iterable[str]) -> list[str]:
    """Return patterns that match some names; repeated layers share one."""
    return list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names))
