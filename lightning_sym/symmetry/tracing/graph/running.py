"""Run parts of a captured network on numbers in float64."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.tracing.graph.nodes import value_of

aten = torch.ops.aten
CLOSE = 1e-9  # relative rounding error of a region in float64


class Step(NamedTuple):
    """A current or former operation of the graph."""

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> "Step":
        """Return a node's operation."""
        return cls(node, node.target, node.args, node.kwargs)


class UnknownError(Exception):
    """A constant without a value."""


class UnlikeError(ValueError):
    """A region that computes another function than the one proposed."""


# Raised by operations that cannot run on numbers alone, and by proposals of functions that do not fit.
NOT_ON_NUMBERS = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, KeyError, UnknownError)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results in float64 are equal up to rounding."""
    return bool((found - expected).abs().max() <= CLOSE * expected.abs().max())


class Constants:
    """The values of nodes that depend on no input and no weight; floating-point values are in float64.

    Args:
        known: Values for inputs and weights; extended in place.
    """

    def __init__(self, known: dict[fx.Node, Any] | None = None) -> None:
        self._known: dict[fx.Node, Any] = {} if known is None else known

    def __call__(self, node: fx.Node) -> Any:
        """Return the value of a node that depends on no input and no weight.

        Raises:
            UnknownError: If it is unknown.
        """
        if node not in self._known:
            if node.op == "get_attr" or "constant" in node.meta:
                value = value_of(node)
                if not isinstance(value, Tensor) or value.is_meta or type(value) is not Tensor:
                    raise UnknownError
                kind = torch.complex128 if value.is_complex() else torch.float64 if value.is_floating_point() else None
                self._known[node] = value.to(kind or value.dtype)
            elif is_plain_operation(node):
                self._known[node] = run_step(Step.of(node), self)
            else:
                raise UnknownError
        return self._known[node]


def run_step(step: Step, get: Callable[[fx.Node], Any]) -> Any:
    """Run an operation in float64 on the CPU."""

    def replaced(item: Any) -> Any:
        if isinstance(item, torch.dtype):
            return torch.float64 if item.is_floating_point else torch.complex128 if item.is_complex else item
        return torch.device("cpu") if isinstance(item, torch.device) else item

    args = pytree.tree_map(replaced, fx.map_arg(step.args, get))
    kwargs = pytree.tree_map(replaced, fx.map_arg(step.kwargs, get))
    value = step.node.meta.get("val")
    made = not any(isinstance(item, Tensor) for item in pytree.tree_leaves((args, kwargs)))
    if made and isinstance(value, Tensor) and value.is_floating_point():
        kwargs = {**kwargs, "dtype": torch.float64}
    function = aten.reshape.default if step.target is aten.view.default else step.target
    return function(*args, **kwargs)


def run_steps(steps: Iterable[Step], values: dict[fx.Node, Any], constants: Constants) -> None:
    """Run operations on the values of earlier ones, and add their results to these.

    Args:
        steps: The operations, in order.
        values: Values of the region's inputs and weights.
        constants: Values of all other nodes.
    """
    for step in steps:
        values[step.node] = run_step(step, lambda node: values[node] if node in values else constants(node))


def moved_by(step: Step, tensor: Tensor) -> Any:
    """Move the elements of a tensor as an operation does."""
    return run_step(step, lambda _: tensor)


def is_plain_operation(node: fx.Node) -> bool:
    """Whether an operation is a deterministic operation of torch."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function" and getattr(target, "__name__", "") == "getitem"
    return target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags
