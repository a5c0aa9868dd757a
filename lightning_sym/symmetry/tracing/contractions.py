"""One spelling for products that sum over axes: `linear` of values and weights, `matmul` of two values.

Axes are called by letters, as in `torch.einsum`.
"""

import math
import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.invisible import argument, memories_of
from lightning_sym.symmetry.tracing.rewriting import Rewriter

aten = torch.ops.aten
# Operations that show the memory of their first argument in another shape.
VIEWS = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "squeeze", "unsqueeze", "permute"),
    *("transpose", "t", "numpy_T", "mT", "movedim", "swapaxes", "swapdims", "slice", "select", "narrow", "expand"),
    *("expand_as", "contiguous", "alias", "detach", "to"),
}


def permuted(r: Rewriter, node: fx.Node, axes: Sequence[int]) -> fx.Node:
    """Return a value whose axes are some of another one's, in an order."""
    order = list(axes)
    return node if order == list(range(len(order))) else r.insert(aten.permute.default, node, order)


def reshaped(r: Rewriter, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """Return a value in another shape."""
    return node if r.shape(node) == tuple(shape) else r.insert(aten.reshape.default, node, list(shape))


def _ordered(r: Rewriter, node: fx.Node, letters: str, target: str) -> fx.Node:
    return permuted(r, node, [letters.index(letter) for letter in target])


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return how a tensor lies in its memory; strides of axes of size 1 tell nothing."""
    strides = tuple(step if size > 1 else 0 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tuple(tensor.shape), strides, tensor.storage_offset(), tensor.dtype


def shown(r: Rewriter, node: fx.Node) -> list[fx.Node]:
    """Return the values whose memory a node shows in its own shape, the first one first, and itself."""
    found = [node]
    while r.name(found[-1]) in VIEWS and isinstance(before := found[-1].args[0], fx.Node):
        if r.is_frozen(before) or memories_of(before) != memories_of(node):
            break
        found.append(before)
    return found[::-1]


def stored(r: Rewriter, node: fx.Node, axes: Sequence[int]) -> fx.Node | None:
    """Return the tensor that lies in memory as some axes of a value do, if there is; transposed, of a matrix."""
    value: Tensor = node.meta["val"]
    whole = value[tuple(slice(None) if axis in axes else 0 for axis in range(value.ndim))]
    order = [sorted(axes).index(axis) for axis in axes]
    wanted = layout(whole.permute(order))
    for turned in (False, True) if len(axes) == 2 else (False,):
        for one in shown(r, node):
            own = one.meta.get("val")
            if isinstance(own, Tensor) and own.ndim == len(axes) and layout(own.mT if turned else own) == wanted:
                return permuted(r, one, [1, 0]) if turned else one
    return None


def _matrix(r: Rewriter, weight: fx.Node, letters: str, rows: str, columns: str) -> fx.Node | None:
    """Return weights as a matrix; along their other letters they are the same everywhere.

    Weights with more axes than a matrix stay as they are (experts, heads), unless they are a view of one.
    """
    gone = [letter for letter in letters if letter not in rows + columns]
    if len(rows) == len(columns) == 1:
        found = stored(r, weight, [letters.index(rows), letters.index(columns)])
        return found or _ordered(r, *without(r, weight, letters, gone), rows + columns)
    sizes = dict(zip(letters, r.shape(weight), strict=True))
    shape = [math.prod(sizes[letter] for letter in part) for part in (rows, columns)]
    weight, letters = without(r, weight, letters, gone)
    weight = reshaped(r, _ordered(r, weight, letters, rows + columns), shape)
    found = stored(r, weight, [0, 1])
    return found if found is not weight or (not rows and len(columns) == 1) else None


def without(r: Rewriter, node: fx.Node, letters: str, gone: Sequence[str]) -> tuple[fx.Node, str]:
    """Return a value at the first place of some of its axes, and the letters that are left."""
    for letter in gone:
        node = r.insert(aten.select.int, node, letters.index(letter), 0)
        letters = letters.replace(letter, "")
    return node, letters


def contract(r: Rewriter, one: str, two: str, out: str, first: fx.Node, second: fx.Node) -> fx.Node | None:
    """Return the product of two values, summed over letters that do not come out; None if no spelling is plainer.

    Args:
        r: The rewriter.
        one: The letters of the first factor's axes.
        two: The second's.
        out: The result's.
        first: First factor.
        second: Second factor.
    """
    sizes: dict[str, int] = {}
    for letters, node in ((one, first), (two, second)):
        if len(letters) != len(r.shape(node)) or len(set(letters)) != len(letters):
            return None
        if any(sizes.setdefault(letter, size) != size for letter, size in zip(letters, r.shape(node), strict=True)):
            return None
    if {letter for letter in one + two if (letter in one) != (letter in two)} - set(out) or set(out) - set(one + two):
        return None
    if set(one + two) <= set(out):
        return _product(r, one, two, out, first, second)
    made = r.made_of(first), r.made_of(second)
    if made == ("weights", "inputs"):
        return _linear(r, two, one, out, second, first, sizes)
    if made == ("inputs", "weights"):
        return _linear(r, one, two, out, first, second, sizes)
    return _matmul(r, one, two, out, first, second)


def _linear(
    r: Rewriter, one: str, two: str, out: str, value: fx.Node, weight: fx.Node, sizes: dict[str, int]
) -> fx.Node | None:
    strides = dict(zip(two, weight.meta["val"].stride(), strict=True))
    repeated = {
        letter for letter in two if letter in one and letter in out and (sizes[letter] == 1 or not strides[letter])
    }
    rows = "".join(letter for letter in out if letter in two and letter not in one)
    columns = "".join(letter for letter in two if letter in one and letter not in out)
    if not columns or set(two) - repeated - set(rows + columns):
        return None
    rest = "".join(letter for letter in out if letter not in rows)
    if (matrix := _matrix(r, weight, two, rows, columns)) is None:
        return None
    narrow = ""  # axes of size 1 that the value was only given for this product
    for letter in rest:
        others = [axis for axis, other in enumerate(one) if other != letter]
        if sizes[letter] == 1 and (found := stored(r, value, others)) is not None:
            value, one, rest, narrow = found, one.replace(letter, ""), rest.replace(letter, ""), narrow + letter
    value = _ordered(r, value, one, rest + columns)
    kept = [sizes[letter] for letter in rest]
    if len(columns) > 1:
        value = reshaped(r, value, [*kept, math.prod(sizes[letter] for letter in columns)])
    result = r.insert(aten.linear.default, value, matrix)
    if not rows:
        result = r.insert(aten.select.int, result, -1, 0)
    elif len(rows) > 1:
        result = reshaped(r, result, [*kept, *(sizes[letter] for letter in rows)])
    result = _ordered(r, result, rest + rows, "".join(letter for letter in out if letter not in narrow))
    for axis, letter in enumerate(out):
        if letter in narrow:
            result = r.insert(aten.unsqueeze.default, result, axis)
    return result


def _product(r: Rewriter, one: str, two: str, out: str, first: fx.Node, second: fx.Node) -> fx.Node:
    parts = []
    for letters, part in ((one, first), (two, second)):
        sizes = dict(zip(letters, r.shape(part), strict=True))
        own = "".join(letter for letter in out if letter in letters)
        shape = [sizes.get(letter, 1) for letter in out]
        parts.append(reshaped(r, _ordered(r, part, letters, own), shape[out.find(own[0]) if own else len(shape) :]))
    return r.insert(aten.mul.Tensor, *parts)


def _matmul(r: Rewriter, one: str, two: str, out: str, first: fx.Node, second: fx.Node) -> fx.Node | None:
    batch = "".join(letter for letter in out if letter in one and letter in two)
    summed = "".join(letter for letter in one if letter in two and letter not in out)
    own, other = (
        "".join(letter for letter in out if letter in letters and letter not in batch) for letters in (one, two)
    )
    if not own and not other:
        product = r.insert(
            aten.mul.Tensor, _ordered(r, first, one, batch + summed), _ordered(r, second, two, batch + summed)
        )
        axes = list(range(len(batch), len(batch + summed)))
        return _ordered(r, r.insert(aten.sum.dim_IntList, product, axes), batch, out)
    if len(summed) > 1 or len(own) > 1 or len(other) > 1:
        return None
    if not own:
        return _matmul(r, two, one, out, second, first)
    first = _ordered(r, first, one, batch + own + summed)
    second = _ordered(r, second, two, batch + summed + other)
    if not other:
        second = r.insert(aten.unsqueeze.default, second, -1)
    result = r.insert(aten.matmul.default, first, second)
    if not other:
        result = r.insert(aten.squeeze.dim, result, -1)
    return _ordered(r, result, batch + own + other, out)


# The spellings.


def matmul(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite `matmul`, `mm`, `bmm` and `mv`."""
    first, second = node.args[:2]
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    ranks = len(r.shape(first)), len(r.shape(second))
    if len({r.made_of(first), r.made_of(second)} & {"weights", "inputs"}) == 2:
        batch = string.ascii_lowercase[: max(*ranks, 2) - 2]
        one, two = (batch[len(batch) - max(rank - 2, 0) :] for rank in ranks)
        # Of factors of other sizes along the axes in front, those of size 1 are the same everywhere.
        sizes = [dict(zip(letters, r.shape(part), strict=False)) for letters, part in ((one, first), (two, second))]
        gone = [letter for letter in one if letter in two and sizes[0][letter] != sizes[1][letter]]
        first, one = without(r, first, one, [letter for letter in gone if sizes[0][letter] == 1])
        second, two = without(r, second, two, [letter for letter in gone if sizes[1][letter] == 1])
        rows, columns = "Y" * (ranks[0] > 1), "Z" * (ranks[1] > 1)
        return contract(r, f"{one}{rows}X", f"{two}X{columns}", f"{batch}{rows}{columns}", first, second)
    if r.name(node) == "matmul":
        return None
    return r.insert(aten.matmul.default, first, second)


def addmm(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite `addmm`, `baddbmm` and `addmv`."""
    added, first, second = node.args[:3]
    alpha, beta = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
    product = r.insert(aten.matmul.default, first, second)
    if alpha != 1:
        product = r.insert(aten.mul.Tensor, product, alpha)
    if beta != 1:
        added = r.insert(aten.mul.Tensor, added, beta)
    return r.insert(aten.add.Tensor, product, added)


def _letters(r: Rewriter, equation: str, values: Sequence[fx.Node]) -> tuple[list[str], str] | None:
    """Return the letters of all axes in an equation, those behind dots too; None if one stands twice in a term."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms, unused = inputs.split(","), [letter for letter in string.ascii_letters if letter not in equation]
    counts = [len(r.shape(value)) - len(term.replace("...", "")) for term, value in zip(terms, values, strict=True)]
    if max(counts) > len(unused):
        return None
    dots = "".join(unused[: max(counts)])
    terms = [term.replace("...", dots[len(dots) - count :]) for term, count in zip(terms, counts, strict=True)]
    if not arrow:
        once = sorted(letter for letter in set(inputs) - set(".,") if inputs.count(letter) == 1)
        out = "..." * ("..." in inputs) + "".join(once)
    if any(len(set(term)) != len(term) for term in terms):
        return None
    return terms, out.replace("...", dots)


def einsum(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite sums of products of two values or more, the first two first."""
    equation, values = node.args[:2]
    assert isinstance(equation, str)
    assert isinstance(values, (list, tuple))
    found = _letters(r, equation, values) if len(values) > 1 else None
    if found is None:
        return None
    (one, two, *others), out = found
    if others:
        later = "".join([out, *others])
        between = "".join(dict.fromkeys(letter for letter in one + two if letter in later))
        pair = r.insert(aten.einsum.default, f"{one},{two}->{between}", list(values[:2]))
        return r.insert(aten.einsum.default, f"{','.join([between, *others])}->{out}", [pair, *values[2:]])
    first, second = values
    rewritten = contract(r, one, two, out, first, second)
    plain = f"{one},{two}->{out}"
    if rewritten is None and plain != equation:
        return r.insert(aten.einsum.default, plain, [first, second])
    return rewritten


def tensordot(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite `tensordot` and `inner`."""
    first, second = node.args[:2]
    ranks = [len(r.shape(part)) for part in (first, second)]
    one, two = string.ascii_lowercase[: ranks[0]], list(string.ascii_uppercase[: ranks[1]])
    axes: Any = node.args[2:4] if r.name(node) == "tensordot" else ([-1], [-1])
    if not min(ranks) or len(axes) != 2:
        return None
    for at, to in zip(*axes, strict=True):
        two[to] = one[at]
    out = "".join(letter for letter in [*one, *two] if (letter in one) != (letter in two))
    return r.insert(aten.einsum.default, f"{one},{''.join(two)}->{out}", [first, second])


def multi_dot(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite `linalg_multi_dot` and `chain_matmul`, the first two first."""
    values: Any = node.args[0]
    result = values[0]
    for value in values[1:]:
        result = r.insert(aten.matmul.default, result, value)
    return result if len(values) > 1 else None


def bilinear(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite `bilinear`: a value times a weight is a matrix for each of the other's."""
    first, second, weight, bias = (argument(node, at, name) for at, name in enumerate(("a", "b", "c", "bias")))
    lead = string.ascii_lowercase[: len(r.shape(first)) - 1]
    result = r.insert(aten.einsum.default, f"{lead}X,ZXY,{lead}Y->{lead}Z", [first, weight, second])
    return result if bias is None else r.insert(aten.add.Tensor, result, bias)


def summed_product(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the sum of an elementwise product of a value and weights."""
    product, axes = node.args[0], argument(node, 1, "dim")
    if not r.only_for(product, node) or r.name(product) != "mul" or not axes or node.kwargs.get("dtype") is not None:
        return None
    assert isinstance(product, fx.Node)
    parts: list[Any] = list(product.args[:2])
    if not all(isinstance(part, fx.Node) for part in parts):
        return None
    if {r.made_of(part) for part in parts} != {"weights", "inputs"}:
        return None
    whole = r.shape(product)
    letters, axes = string.ascii_lowercase[: len(whole)], [axes] if isinstance(axes, int) else axes
    summed = {letters[axis] for axis in axes}
    terms = []
    for at, part in enumerate(parts):
        own = letters[len(letters) - len(r.shape(part)) :]
        value = r.made_of(part) == "inputs"
        described = zip(own, r.shape(part), part.meta["val"].stride(), strict=True)
        gone = [
            letter for letter, size, step in described if (size == 1 if not value else 0) or (not step and size > 1)
        ]
        gone += [
            letter
            for letter, size in zip(own, r.shape(part), strict=True)
            if value and size == 1 < whole[letters.index(letter)]
        ]
        parts[at], own = without(r, part, own, list(dict.fromkeys(gone)))
        terms.append(own)
    if not all(letter in term for letter in summed for term in terms) or set(letters) != set("".join(terms)):
        return None
    out = "".join(letter for letter in letters if letter not in summed)
    result = contract(r, *terms, out, *parts)
    if result is not None and argument(node, 2, "keepdim", False):
        result = reshaped(r, result, r.shape(node))
    return result


def narrow_convolution(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite convolutions of width 1 by a matrix that was given further axes."""
    value, weight, bias, stride, padding, _, groups = (
        argument(node, at, name, default)
        for at, (name, default) in enumerate(
            [
                ("input", None),
                ("weight", None),
                ("bias", None),
                ("stride", [1]),
                ("padding", [0]),
                ("", 1),
                ("groups", 1),
            ]
        )
    )
    count = int(r.name(node)[4])
    channel = len(r.shape(value)) - count - 1
    plain = groups == 1 and set(stride) <= {1} and not isinstance(padding, str) and set(padding) <= {0}
    if not plain or r.made_of(weight) != "weights" or set(r.shape(weight)[2:]) != {1} or weight in r.capture.states:
        return None
    letters = string.ascii_lowercase[: channel + 1 + count]
    out = letters[:channel] + "Z" + letters[channel + 1 :]
    matrix = "Z" + letters[channel] + string.ascii_uppercase[:count]
    weight, matrix = without(r, weight, matrix, matrix[2:])
    result = contract(r, letters, matrix, out, value, weight)
    if result is None or bias is None:
        return result
    return r.insert(aten.add.Tensor, result, reshaped(r, bias, [-1, *[1] * count]))
