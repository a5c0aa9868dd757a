"""Diagonals of products: products of diagonals, or of entries at the same positions."""

from typing import Any

import torch
from torch import fx

from lightning_sym.symmetry.tracing.graph.nodes import argument, equation_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, operations
from lightning_sym.symmetry.tracing.graph.rewriting import Rewriter
from lightning_sym.symmetry.tracing.normal_form.contractions import permuted, reshaped

aten = torch.ops.aten


def of_diagonals(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite an `einsum` with a repeated letter in a term as one of diagonals."""
    equation: Any = node.args[0]
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    if not arrow or "..." in inputs:
        return None
    terms, values = inputs.split(","), list(node.args[1])  # type: ignore[arg-type]
    for at, term in enumerate(terms):
        while repeated := next((letter for letter in term if term.count(letter) > 1), ""):
            axes = term.index(repeated), term.rindex(repeated)
            values[at] = r.insert(aten.diagonal.default, values[at], 0, *axes)
            term = "".join(letter for axis, letter in enumerate(term) if axis not in axes) + repeated
        terms[at] = term
    return r.insert(aten.einsum.default, f"{','.join(terms)}->{out}", values) if terms != inputs.split(",") else None


def diagonal(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the diagonal of an elementwise operation or a product of matrices."""
    source: Any = node.args[0]
    shape, offset = r.shape(source), argument(node, 1, "offset", 0)
    axes = [argument(node, at, name, at - 2) % len(shape) for at, name in ((2, "dim1"), (3, "dim2"))]
    if offset or shape[axes[0]] != shape[axes[1]] or not r.only_for(source, node) or source.kwargs:
        return None
    if r.name(source) in operations(Trait.POINTWISE | Trait.JOIN | Trait.PRODUCT) | {"neg"}:
        return r.insert(source.target, *(_diagonal(r, item, axes, len(shape)) for item in source.args))
    equation = equation_of(source) if len(source.args) == 2 else None
    if equation is None:
        return None
    factors = source.args[1] if r.name(source) == "einsum" else source.args
    given, out = equation.split("->")
    rest = "".join(letter for axis, letter in enumerate(out) if axis not in axes)
    given = given.replace(out[axes[1]], out[axes[0]])
    return r.insert(aten.einsum.default, f"{given}->{rest}{out[axes[0]]}", list(factors))


def _diagonal(r: Rewriter, item: Any, axes: list[int], rank: int) -> Any:
    """Return the part of an operation's argument that its result's diagonal reads."""
    if not isinstance(item, fx.Node) or not r.shape(item):
        return item
    item = reshaped(r, item, [1] * (rank - len(r.shape(item))) + list(r.shape(item)))
    wide, narrow = axes if r.shape(item)[axes[1]] == 1 else axes[::-1]
    if r.shape(item)[narrow] > 1:
        return r.insert(aten.diagonal.default, item, 0, *axes)
    order = [axis for axis in range(rank) if axis != wide] + [wide]
    return r.insert(aten.squeeze.dim, permuted(r, item, order), order.index(narrow))
