"""Families of stitching maps and their names in recipes."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

from lightning_sym._checks import check_known
from lightning_sym._text import unknown
from lightning_sym.stitching.maps.base import Port, StitchingMap
from lightning_sym.stitching.maps.birkhoff import Projection
from lightning_sym.stitching.maps.block_maps import group_map
from lightning_sym.stitching.maps.group_maps import AssignmentMap, GroupMap, SoftSortMap
from lightning_sym.stitching.maps.linear_maps import (
    FullMap,
    IdentityMap,
    LassoMap,
    LeastSquaresMap,
    LowRankMap,
    OrthogonalMap,
    ProcrustesMap,
)

#: The families by their name, without brackets.
STITCHING_MAPS: Mapping[str, type[StitchingMap]] = MappingProxyType(
    {
        "full": FullMap,
        "rank": LowRankMap,
        "lasso": LassoMap,
        "group": GroupMap,
        "softsort": SoftSortMap,
        "orthogonal": OrthogonalMap,
        "identity": IdentityMap,
        "least_squares": LeastSquaresMap,
        "assignment": AssignmentMap,
        "procrustes": ProcrustesMap,
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
        name: ``full``; ``rank(1)`` (any rank >= 1); ``lasso`` (penalty 0.01) or ``lasso(0.001)``; ``group`` or
            ``group(euclidean)``, with the projection, which is a :class:`BlockMap` for ports with blocks of channels;
            ``softsort``; ``orthogonal``; ``identity``; and without training
            ``least_squares``, ``assignment`` and ``procrustes``. For other options use the class.

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
    option, read = _ARGUMENTS[kind]
    return functools.partial(make, **{option: read((argument or "").strip(), name)})


def _rank(text: str, name: str) -> int:
    """Parse the rank, an integer >= 1."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ValueError(f"rank needs an integer >= 1, as in rank(1), got {name!r}.")
    return int(text)


def _penalty(text: str, name: str) -> float:
    """Parse the penalty of the lasso, a finite number >= 0."""
    try:
        penalty = float(text)
    except ValueError:
        penalty = math.nan
    if not (math.isfinite(penalty) and penalty >= 0):
        raise ValueError(f"The penalty of lasso must be a number >= 0, as in lasso(0.01), got {name!r}.")
    return penalty


def _projection(text: str, name: str) -> str:
    """Parse the projection of the group's relaxation."""
    check_known("projection of group", text, get_args(Projection))
    return text


# By family, the option in brackets and its parser.
_ARGUMENTS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "rank": ("rank", _rank),
    "lasso": ("penalty", _penalty),
    "group": ("projection", _projection),
}
