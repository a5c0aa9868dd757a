"""Checks of arguments and inputs that the layers share."""

from collections.abc import Sequence

from torch import Tensor, nn

Grid = int | Sequence[int]


def check_counts(module: nn.Module, **values: object) -> None:
    """Check that every value is an integer >= 1.

    Args:
        module: Whose arguments they are.
        values: The arguments by name.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} of {type(module).__name__} must be an integer >= 1, got {value!r}.")


def check_kernel(module: nn.Module, kernel_size: object) -> None:
    """Check that a kernel size is an odd integer >= 1, so that the kernel has a centre.

    Raises:
        ValueError: If it is not.
    """
    check_counts(module, kernel_size=kernel_size)
    if isinstance(kernel_size, int) and kernel_size % 2 == 0:
        raise ValueError(f"kernel_size of {type(module).__name__} must be odd, got {kernel_size}.")


def height_width(module: nn.Module, grid: Grid, name: str = "grid") -> tuple[int, int]:
    """Return height and width of a grid given as such, or by the side of a square.

    Raises:
        ValueError: If it is neither an integer >= 1 nor a pair of them.
    """
    sides = (grid, grid) if isinstance(grid, int) else tuple(grid) if isinstance(grid, Sequence) else ()
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
        raise ValueError(
            f"{name} of {type(module).__name__} must be an integer >= 1 or a pair (height, width), got {grid!r}."
        )
    return sides[0], sides[1]


def check_features(module: nn.Module, x: Tensor, channels: int, grid: tuple[int, int] | None = None) -> None:
    """Check that features are ``[N, channels, H, W]``, on the grid that a layer was made for.

    Raises:
        ValueError: If they are not.
    """
    if x.ndim != 4 or x.shape[1] != channels or (grid is not None and tuple(x.shape[2:]) != grid):
        sides = ("H", "W") if grid is None else grid
        raise ValueError(
            f"{type(module).__name__} expects features of shape [N, {channels}, {sides[0]}, {sides[1]}], got "
            f"{list(x.shape)}; build the layer for the channels and grid of what comes in."
        )
