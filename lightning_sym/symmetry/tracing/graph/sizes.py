"""Dependence on the sizes of an input: the lengths of its axes, and constants created at these sizes."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.operations import Trait, operations

# Operations that create size-independent constants from other such constants, or from one number.
OF_NO_SIZE = {"repeat", "copy", "fill", "zero", "put", "eq", "ne"} | operations(
    Trait.CONSTANT | Trait.CAST | Trait.REGROUP | Trait.PERMUTE | Trait.CUT | Trait.EXPAND | Trait.PICK
)
OF_NO_SIZE |= operations(Trait.LINEAR | Trait.POINTWISE | Trait.ORDER | Trait.SOFTMAX)


def growing_inputs(
    inputs: Sequence[fx.Node], features: Mapping[fx.Node, Collection[int]] | None = None
) -> dict[fx.Node, frozenset[int]]:
    """Return the axes of inputs that may have other sizes: all except the batch axis and a vector's features.

    Args:
        inputs: The inputs.
        features: Further axes of constant size.
    """
    fixed = features or {}
    tensors = [(node, node.meta["val"]) for node in inputs if isinstance(node.meta.get("val"), Tensor)]
    return {
        node: frozenset(range(1, t.ndim)) - set(fixed.get(node, ()))
        for node, t in tensors
        if t.ndim > 2 or not t.is_floating_point()
    }


def lengths_of(inputs: Sequence[fx.Node]) -> set[int]:
    """Return the sizes of the inputs' axes that may vary."""
    return {node.meta["val"].shape[axis] for node, axes in growing_inputs(inputs).items() for axis in axes}
