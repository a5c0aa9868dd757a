"""Sentences for the user, made in one place so that they read alike."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches

TRACEBACK = "LIGHTNING_SYM_TRACEBACK"  # environment variable
USAGE = "usage: lightning-sym COMMAND [--config RECIPE_OR_FILE] [--SECTION.NAME VALUE ...]"


def nearest(given: str, names: Iterable[str], before: str = "", after: str = "") -> str:
    """Return a question with the names that are nearest to one that was given; empty if none is near.

    Args:
        given: What was given.
        names: The valid names.
        before: Written before each name.
        after: Written behind each name.
    """
    found = get_close_matches(given, sorted(set(names)), n=2, cutoff=0.6)
    # Two if both are as near.
    likeness = [SequenceMatcher(None, name, given).ratio() for name in found]
    found = [name for name, ratio in zip(found, likeness, strict=True) if ratio > likeness[0] - 0.1]
    return f" Did you mean {' or '.join(repr(before + name + after) for name in found)}?" if found else ""


def unknown(kind: str, name: object, options: Iterable[str]) -> str:
    """Return the sentence that says a name is not one of the options, with the nearest one.

    Args:
        kind: What the name is meant to be, for example ``"activation"``.
        name: What was given.
        options: The valid names; listed in the order given.

    Returns:
        One sentence, ending in a full stop.
    """
    options = list(options)
    near = get_close_matches(str(name), options, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Unknown {kind} {name!r}; expected one of: {', '.join(options)}.{hint}"


def ranges(numbers: Sequence[int]) -> str:
    """Return ``0-3, 7`` for ``[0, 1, 2, 3, 7]``.

    Args:
        numbers: Ascending.
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
