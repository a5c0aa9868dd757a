"""Names of logged numbers: their characters, and the prefix ``details/`` for less important ones."""

import hashlib
import re
from collections.abc import Mapping
from typing import Final

# Number of curves that fit on one page of TensorBoard.
MOST_CURVES: Final = 30
_PREFIX: Final = "details/"


def tag(*names: str) -> str:
    """Return the name for logging, restricted to the characters ``[a-z0-9_./-]``.

    TensorBoard finds the run of a curve by the first bracket of its title: brackets in a tag would empty the chart.

    Args:
        names: Parts of the name: words, and names of layers, maps and zoos. Lower case,
            digits, ``_``, ``.`` and single hyphens stay; ``rank(4)`` becomes ``rank--4``. Other characters are
            replaced, and eight digits of the name's SHA-256 are appended, so that distinct names, such as ``Wq`` and
            ``wq``, stay distinct. Slashes stay.

    Returns:
        The parts, joined by slashes.
        The names with slashes between them.
    """
    return "/".join(_plain(part) for name in names for part in name.split("/"))


def _plain(name: str) -> str:
    if re.fullmatch(r"[a-z0-9_.]+(-[a-z0-9_.]+)*", name):
        return name
    if match := re.fullmatch(r"([a-z0-9_.]+)\(([a-z0-9_.]+(?:,[a-z0-9_.]+)*)\)", name):
        return "--".join([match[1], *match[2].split(",")])
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{re.sub('[^a-z0-9_.]+', '-', name.lower()).strip('-')}-{digest}".removeprefix("-")


def details(values: Mapping[str, float]) -> dict[str, float]:
    """Prefix the names of values for single members, pairs or pathways of a layer.

    Args:
        values: Values by name, for example ``val/loss/member-0003``, which becomes ``details/val/loss/member-0003``.
    """
    return {f"{_PREFIX}{name}": value for name, value in values.items()}


def is_detail(name: str) -> bool:
    """Test whether a name has the prefix of :func:`details`."""
    return name.startswith(_PREFIX)


def overview(values: Mapping[str, float], means: Mapping[str, float], most: int = MOST_CURVES) -> dict[str, float]:
    """Return values unchanged if they fit on a page with their means, otherwise the means, and values as details.

    Args:
        values: Values by name, for example one for each layer.
        means: Fewer values by name, for example means over layers; never details.
        most: Number of curves that fit; a monitor, next to the curves of a task, has half of a page.
    """
    return {**means, **(values if len(values) + len(means) <= most else details(values))}
