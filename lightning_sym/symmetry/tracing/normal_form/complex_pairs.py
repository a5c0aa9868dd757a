"""Spell complex exponentials as pairs of real values: cosines and sines of angles."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations
from lightning_sym.symmetry.tracing.graph.rewriting import NoSpellingError, Rewriter

aten = torch.ops.aten
_TURNS = {"exp", "polar"}


class _Pair(NamedTuple):
    """The real and the imaginary part of a value; None where a part is zero."""

    real: fx.Node | float | None
    imaginary: fx.Node | float | None


def parts_of_turns(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Rewrite the parts of a complex value with a complex exponential of a value that weights make.

    Other complex values, as in rotary positions and Fourier transforms, have rules of their own.
    """
    value: Any = node.args[0]
    if not _turns(r, value, set()):
        return None
    pair = _pair(r, value)
    zero = r.insert(aten.zeros_like.default, next(own for own in pair if isinstance(own, fx.Node)))
    parts = [r.insert(aten.expand.default, zero if own is None else own, list(r.shape(value))) for own in pair]
    wanted = ("real", "imag", "view_as_real").index(r.name(node))
    return r.insert(aten.stack.default, parts, -1) if wanted == 2 else parts[wanted]


def _turns(r: Rewriter, node: fx.Node, seen: set[fx.Node]) -> bool:
    """Return whether a complex value is made of an exponential that is no constant."""
    if node in seen or not _is_complex(node):
        return False
    seen.add(node)
    if name_of(node) in _TURNS and r.made_of(node) != "constants":
        return True
    return any(_turns(r, given, seen) for given in node.all_input_nodes)


def _is_complex(given: Any) -> bool:
    value = given.meta.get("val") if isinstance(given, fx.Node) else None
    return isinstance(value, Tensor) and value.is_complex()


def _pair(r: Rewriter, given: Any) -> _Pair:
    """Return the parts of a value; raises `NoSpellingError` if some operation has no spelling in parts."""
    if not _is_complex(given):
        return _Pair(given.real, given.imag or None) if isinstance(given, complex) else _Pair(given, None)
    name, args = name_of(given), given.args
    if name == "complex":
        return _Pair(*args)
    if name == "view_as_complex":
        return _Pair(*(r.insert(aten.select.int, args[0], -1, place) for place in (0, 1)))
    if name == "polar":
        return _turned(r, args[0], args[1])
    if name in ("_conj", "conj_physical", "conj"):
        real, imaginary = _pair(r, args[0])
        return _Pair(real, _times(r, imaginary, -1.0))
    if name == "exp":
        real, imaginary = _pair(r, args[0])
        length = None if real is None or real == 0.0 else r.insert(aten.exp.default, real)
        return _turned(r, length, imaginary)
    if name == "neg" or (name in operations(Trait.MOVE) and given.all_input_nodes == [args[0]]):
        parts = (None if own is None else r.insert(given.target, own, *args[1:]) for own in _pair(r, args[0]))
        return _Pair(*parts)
    if given.kwargs or len(args) != 2:
        raise NoSpellingError
    one, two = (_pair(r, own) for own in args)
    if name in ("add", "sub"):
        sign = -1.0 if name == "sub" else 1.0
        return _Pair(*(_plus(r, own, _times(r, other, sign)) for own, other in zip(one, two, strict=True)))
    if name == "mul" or (name == "div" and two.imaginary is None):
        product = aten.mul.Tensor if name == "mul" else aten.div.Tensor
        straight = [_times(r, one.real, two.real, product), _times(r, one.imaginary, two.real, product)]
        crossed = [_times(r, one.imaginary, two.imaginary), _times(r, one.real, two.imaginary)]
        return _Pair(_plus(r, straight[0], _times(r, crossed[0], -1.0)), _plus(r, straight[1], crossed[1]))
    raise NoSpellingError


def _turned(r: Rewriter, length: Any, angle: Any) -> _Pair:
    """Return the parts of a complex number with a length, 1 by default, and an angle."""
    if not isinstance(angle, fx.Node):
        raise NoSpellingError
    cosine, sine = (r.insert(function, angle) for function in (aten.cos.default, aten.sin.default))
    if length is None or r.number(length) == 1:
        return _Pair(cosine, sine)
    return _Pair(r.insert(aten.mul.Tensor, cosine, length), r.insert(aten.mul.Tensor, sine, length))


def _times(r: Rewriter, one: Any, two: Any, product: Any = aten.mul.Tensor) -> Any:
    """Return the product of two parts; None is zero."""
    if one is None or two is None or 0.0 in (one, two):
        return None
    if not isinstance(one, fx.Node):
        one, two = two, one
    if not isinstance(one, fx.Node):
        return one * two
    return r.insert(aten.neg.default, one) if two == -1.0 else r.insert(product, one, two)


def _plus(r: Rewriter, one: Any, two: Any) -> Any:
    if one is None or two is None:
        return one if two is None else two
    return r.insert(aten.add.Tensor, *(one, two) if isinstance(one, fx.Node) else (two, one))
