"""Families of stitching maps and their names in recipes."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

from lightning_sym._checks import check_known
from lightning_sym._text import unknown
from lightning_sym.stitching.maps import linear_maps
from lightning_sym.stitching.maps.base import Port, StitchingMap
from lightning_sym.stitching.maps.birkhoff import Projection
from lightning_sym.stitching.maps.block_maps import group_map
from lightning_sym.stitching.maps.group_maps import AssignmentMap, GroupMap, SoftSortMap

#: The families by their name, without brackets.
STITCHING_MAPS: Mapping[str, type[StitchingMap]] = MappingProxyType(
    {
        "full": linear_maps.FullMap,
        "rank": linear_maps.LowRankMap,
        "lasso": linear_maps.LassoMap,
        "group": GroupMap,
        "softsort": SoftSortMap,
        "orthogonal": linear_maps.OrthogonalMap,
        "identity": linear_maps.IdentityMap,
        "least_squares": linear_maps.LeastSquaresMap,
        "assignment": AssignmentMap,
        "procrustes": linear_maps.ProcrustesMap,
    }
)
_ACCEPTED = (
    "full",
    "rank(1)",
    "lasso(0.01)",
    "group",
    "group(euclidean)",
    *list(STITCHING_MAPS)[4:],
)


def stitching_map(name: str) -> Callable[[Port], StitchingMap]:
    """Return a function that makes a map of a family from a port.

    Args:
        name: ``full``; ``rank(1)`` (any rank >= 1); ``lasso`` (penalty 0.01) or ``lasso(0.001)``; ``group``,
            ``group(euclidean)`` with the projection, ``group(0.01)`` with alpha, or ``group(euclidean,0.01)`` with
            both, which is a :class:`BlockMap` for ports with blocks of channels; ``softsort``; ``orthogonal``;
            ``identity``; and without training ``least_squares``, ``assignment`` and ``procrustes``. For
            other options use the class.

    Returns:
        A function of the :class:`Port`; call it once per port.

    Raises:
        ValueError: If the name is unknown, or its argument is missing, superfluous or out of range.

    Example:
        >>> stitching_map("rank(2)")(Port(8, 4)).dimension()
        20
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", name) if isinstance(name, str) else None
    kind, argument = (match[1], match[2]) if match else ("", None)
    if kind not in STITCHING_MAPS:
        raise ValueError(unknown("stitching map", name, _ACCEPTED))
    make: Callable[..., StitchingMap] = group_map if kind == "group" else STITCHING_MAPS[kind]
    if argument is None and kind != "rank":
        return make
    if kind not in _ARGUMENTS:
        raise ValueError(f"The stitching map {kind!r} takes no argument, got {name!r}.")
    return functools.partial(make, **_ARGUMENTS[kind]((argument or "").strip(), name))


def _rank(text: str, name: str) -> dict[str, Any]:
    """Parse the rank, an integer >= 1."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ValueError(f"rank needs an integer >= 1, as in rank(1), got {name!r}.")
    return {"rank": int(text)}


def _weight(text: str) -> float | None:
    """Return the weight of a regulariser, a finite number >= 0; None for another text."""
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if math.isfinite(weight) and weight >= 0 else None


def _penalty(text: str, name: str) -> dict[str, Any]:
    """Parse the penalty of the lasso."""
    if (penalty := _weight(text)) is None:
        raise ValueError(f"The penalty of lasso must be a number >= 0, as in lasso(0.01), got {name!r}.")
    return {"penalty": penalty}


def _group(text: str, name: str) -> dict[str, Any]:
    """Parse the projection of the group's relaxation, the weight of its regulariser, or both in this order."""
    first, comma, last = map(str.strip, text.partition(","))
    alpha = _weight(last if comma else first)
    if alpha is None and (comma or re.match(r"[-+.]?[0-9]|nan|inf", first)):
        raise ValueError(f"alpha of group must be a number >= 0, as in group(euclidean,0.01), got {name!r}.")
    if comma or alpha is None:
        check_known("projection of group", first, get_args(Projection))
    return ({"projection": first} if comma or alpha is None else {}) | ({} if alpha is None else {"alpha": alpha})


# By family, the parser of the options in brackets.
_ARGUMENTS: dict[str, Callable[[str, str], dict[str, Any]]] = {"rank": _rank, "lasso": _penalty, "group": _group}
