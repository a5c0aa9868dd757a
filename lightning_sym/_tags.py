"""The names of logged numbers: of which characters they are; what one looks for stands above ``details/``."""

import hashlib
import re
from collections.abc import Mapping
from typing import Final

# So many curves can be looked at on one page of TensorBoard.
MOST_CURVES: Final = 30
_PREFIX: Final = "details/"


def tag(*names: str) -> str:
    """Return the name under which something is logged, of the characters ``[a-z0-9_./-]`` alone.

    TensorBoard finds the run of a curve by the first bracket of its title: a chart with one in a tag is empty.

    Args:
        *names: What a name is put together of: words, and names of layers, maps and zoos, as they are. Lower case,
            digits, ``_``, ``.`` and single hyphens stay; ``rank(4)`` becomes ``rank--4``. Anything else is put into
            such characters and followed by eight digits of its SHA-256, so that no two names become one, as ``Wq`` and
            ``wq`` would. Slashes stay.

    Returns:
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
    """Return values under names that say that they are details: of one member, one pair, one path of a layer.

    Args:
        values: By name, for example ``val/loss/member-0003``, which becomes ``details/val/loss/member-0003``.
    """
    return {f"{_PREFIX}{name}": value for name, value in values.items()}


def is_detail(name: str) -> bool:
    """Return whether a number is logged under a name of :func:`details`."""
    return name.startswith(_PREFIX)


def overview(values: Mapping[str, float], means: Mapping[str, float], most: int = MOST_CURVES) -> dict[str, float]:
    """Return values as they are if they fit on a page with their means, otherwise the means, and values as details.

    Args:
        values: By name, for example one for each layer.
        means: Fewer, by name, for example over layers; in either case as they are.
        most: So many fit on the page; a monitor, which stands beside the curves of a task, has half of it.
    """
    return {**means, **(values if len(values) + len(means) <= most else details(values))}
