"""The names of logged numbers: what one looks for stands above, the rest below ``details/``."""

from collections.abc import Mapping
from typing import Final

# So many curves can be looked at on one page of TensorBoard.
MOST_CURVES: Final = 30
_PREFIX: Final = "details/"


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
