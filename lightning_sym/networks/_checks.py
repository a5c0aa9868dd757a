"""Checks of constructor arguments that the architectures share."""

from collections.abc import Sequence


def check_counts(**values: object) -> None:
    """Check that every value is an integer >= 1.

    Args:
        values: The arguments by name.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}.")


def height_width(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Return the height and width of square or rectangular images.

    Args:
        image_size: The side of square images, or height and width, in pixels.

    Returns:
        Height and width, each >= 1.

    Raises:
        ValueError: If the argument is neither.
    """
    sides = [image_size, image_size] if isinstance(image_size, int) else image_size
    if (
        not isinstance(sides, Sequence)
        or len(sides) != 2
        or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides)
    ):
        raise ValueError(f"image_size must be an integer >= 1 or a pair (height, width), got {image_size!r}.")
    return sides[0], sides[1]
