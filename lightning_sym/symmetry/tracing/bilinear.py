"""Spell one row that reads the product of two layers as the bilinear form that it is."""

from typing import Any

import torch
from torch import fx

from lightning_sym.symmetry.tracing.contractions import VIEWS, are_vectors, reshaped
from lightning_sym.symmetry.tracing.nodes import argument
from lightning_sym.symmetry.tracing.operations import Trait, operations
from lightning_sym.symmetry.tracing.rewriting import Rewriter

aten = torch.ops.aten


def bilinear_row(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite a layer of one output that reads the product of two layers as a bilinear form, which matrices mix.

    The layer is linear, or a convolution of width 1. The products of several outputs have scales only.
    """
    (read, weight), bias = node.args[:2], argument(node, 2, "bias")
    if not isinstance(read, fx.Node) or not _is_row(r, node):
        return None
    product = read.args[0] if r.name(read) in operations(Trait.PERMUTE) and r.only_for(read, node) else read
    if r.name(product) != "mul" or not isinstance(product, fx.Node):
        return None
    one, two = product.args[:2]
    if not _is_layer(r, one) or not _is_layer(r, two) or len(r.shape(one)) != len(r.shape(two)):
        return None
    if not r.only_for(product, node if read is product else read):
        return None
    if read is not product:
        one, two = (r.insert(read.target, part, *read.args[1:]) for part in (one, two))
    axis = len(r.shape(read)) - (1 if r.name(node) == "linear" else len(r.shape(weight)) - 1)
    if r.shape(one)[axis] != r.shape(two)[axis] or not are_vectors(r, one, two, axis):  # type: ignore[arg-type]
        return None
    scaled = r.insert(aten.mul.Tensor, one, r.insert(aten.select.int, weight, 0, 0))
    total = r.insert(aten.sum.dim_IntList, r.insert(aten.mul.Tensor, scaled, two), [axis], True)
    if bias is None:
        return total
    return r.insert(aten.add.Tensor, total, reshaped(r, bias, [1] * (len(r.shape(read)) - axis)))


def _is_row(r: Rewriter, node: fx.Node) -> bool:
    """Whether an operation contracts its input with one row of weights, at each place alone."""
    weight: Any = node.args[1]
    if r.made_of(weight) != "weights" or len(r.shape(weight)) < 2 or r.shape(weight)[0] != 1:
        return False
    if r.name(node) == "linear":
        return True
    stride, padding, groups = (
        argument(node, at, name, default)
        for at, name, default in ((3, "stride", [1]), (4, "padding", [0]), (6, "groups", 1))
    )
    one_place = set(r.shape(weight)[2:]) == {1} and set(stride) <= {1}
    return one_place and groups == 1 and not isinstance(padding, str) and set(padding) <= {0}


def _is_layer(r: Rewriter, node: Any) -> bool:
    """Whether a value shows the outputs of a layer, at most moved."""
    while r.name(node) in VIEWS or (r.name(node) == "getitem" and r.name(node.args[0]) in operations(Trait.PARTS)):
        node = node.args[0] if r.name(node) in VIEWS else node.args[0].args[0]
    return r.name(node) in {"linear", "embedding"} | operations(Trait.CONVOLVE)
