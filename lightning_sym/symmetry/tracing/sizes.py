"""What depends on the sizes of an input: the lengths of its axes, and constants that are made at these."""

from collections.abc import Sequence

from torch import Tensor, fx

# Operations that make constants which are the same for inputs of all sizes: from other such constants, or one number.
OF_NO_SIZE = {
    *("zeros", "ones", "full", "empty", "scalar_tensor", "zeros_like", "ones_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "lift_fresh", "lift_fresh_copy", "clone", "alias", "detach"),
    *("to", "_to_copy", "float", "double", "type_as", "contiguous", "copy", "fill", "zero", "stack", "cat"),
    *("view", "reshape", "flatten", "unflatten", "permute", "unsqueeze", "squeeze", "transpose", "t", "numpy_T", "mT"),
    *("movedim", "expand", "expand_as", "repeat", "slice", "select", "narrow", "index", "index_select", "gather"),
    *("chunk", "split", "split_with_sizes", "unbind", "sum", "mean", "softmax", "where", "masked_fill"),
    *("add", "sub", "rsub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "pow", "square"),
    *("cos", "sin", "sigmoid", "tanh", "relu", "bitwise_not", "logical_not", "eq", "ne", "gt", "lt", "ge", "le"),
}


def lengths_of(inputs: Sequence[fx.Node]) -> set[int]:
    """Return the sizes of the inputs' axes that may be other ones: not of the batch, nor of features of a vector."""
    tensors = [node.meta["val"] for node in inputs if isinstance(node.meta.get("val"), Tensor)]
    return {size for t in tensors if t.ndim > 2 or not t.is_floating_point() for size in t.shape[1:]}
