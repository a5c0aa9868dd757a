"""Sentences for the user, made in one place so that they read alike."""

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

TRACEBACK = "LIGHTNING_SYM_TRACEBACK"  # environment variable
USAGE = "usage: lightning-sym COMMAND [--config RECIPE_OR_FILE] [--SECTION.NAME VALUE ...]"


def nearest(given: str, names: Iterable[str], before: str = "", after: str = "") -> str:
    """Return a question with the names that are nearest to one that was given; empty if none is near.

    A name of several words is near to its initials: ``learning_rate`` to ``lr``.

    Args:
        given: What was given.
        names: The valid names.
        before: Written before each name.
        after: Written behind each name.
    """
    names = sorted(set(names))
    found = get_close_matches(given, names, n=2, cutoff=0.6)
    found = found or [name for name in names if initials(given) == name or initials(name) == given]
    # Two if both are as near.
    likeness = [SequenceMatcher(None, name, given).ratio() for name in found]
    found = [name for name, ratio in zip(found, likeness, strict=True) if ratio > likeness[0] - 0.1]
    return f" Did you mean {' or '.join(repr(before + name + after) for name in found)}?" if found else ""


def initials(name: str) -> str:
    """Return ``lr`` for ``learning_rate``; of a single word nothing."""
    words = [word for word in name.split("_") if word]
    return "".join(word[0] for word in words) if len(words) > 1 else ""


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


def other_settings(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Return which settings of two data differ, by their options: ``": --data.data_seed is 1, and was 0"``.

    Args:
        theirs: Identity of the data that a member was trained on.
        mine: That of those that are used.
    """
    if theirs.get("class_path") != mine.get("class_path"):
        return f": --data is {mine.get('class_path')}, and was {theirs.get('class_path')}"
    # As a zoo's files hold them: tuples are lists there.
    was, now = (json.loads(json.dumps(one.get("arguments") or {}, default=str)) for one in (theirs, mine))
    differ = [name for name in now if name in was and was[name] != now[name] and not name.endswith("batch_size")]
    said = [f"--data.{name} is {json.dumps(now[name])[:40]}, and was {json.dumps(was[name])[:40]}" for name in differ]
    return f": {'; '.join(said)}" if said else ""


def name_of_callable(function: Callable[..., Any]) -> str:
    """Return what is called in words: its name and its settings, as far as these are numbers, words and the like.

    Args:
        function: A function, also with some arguments given (``functools.partial``), a module, or any object that is
            called.

    Example:
        >>> name_of_callable(sorted), name_of_callable(functools.partial(sorted, reverse=True))
        ('sorted', 'sorted(reverse=True)')
    """
    if isinstance(function, functools.partial):
        name = name_of_callable(function.func)
        settings = {**{f"argument {place}": value for place, value in enumerate(function.args)}, **function.keywords}
    elif inspect.isroutine(function):
        return getattr(function, "__qualname__", repr(function))
    else:
        name, settings = type(function).__qualname__, dict(getattr(function, "__dict__", {}))
    said = [
        f"{key}={value!r}"
        for key, value in settings.items()
        if isinstance(value, int | float | str | tuple | None) and not key.startswith("_") and key != "training"
    ]
    return f"{name}({', '.join(said)})"
