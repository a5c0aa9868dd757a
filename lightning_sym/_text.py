"""Text of messages: suggestions for names, lists of options, ranges of numbers."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

TRACEBACK = "LIGHTNING_SYM_TRACEBACK"  # environment variable
LARGEST_SEED = 2**32 - 1  # numpy and Lightning take no larger one
USAGE = "usage: lightning-sym COMMAND [--config RECIPE_OR_FILE] [--SECTION.NAME VALUE]"


def nearest(given: str, names: Iterable[str], before: str = "", after: str = "") -> str:
    """Return a question with the names closest to a given one; empty if none is close.

    A name of several words is close to its initials: ``learning_rate`` to ``lr``.

    Args:
        given: The given name.
        names: The valid names.
        before: Written before each name.
        after: Written after each name.
    """
    names = sorted(set(names))
    found = get_close_matches(given, names, n=2, cutoff=0.6)
    found = found or [name for name in names if initials(given) == name or initials(name) == given]
    found = found or [name for name in names if len(given) > 3 and name.lower().startswith(given.lower())][:2]
    # Two names if both are equally close.
    likeness = [SequenceMatcher(None, name, given).ratio() for name in found]
    found = [name for name, ratio in zip(found, likeness, strict=True) if ratio > likeness[0] - 0.1]
    return f" Did you mean {' or '.join(repr(before + name + after) for name in found)}?" if found else ""


def initials(name: str) -> str:
    """Return ``lr`` for ``learning_rate``; empty for a single word."""
    words = [word for word in name.split("_") if word]
    return "".join(word[0] for word in words) if len(words) > 1 else ""


def unknown(kind: str, name: object, options: Iterable[str]) -> str:
    """Return the message for an unknown name, with the closest options.

    Args:
        kind: Kind of the name, for example ``"activation"``.
        name: The given name.
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
        numbers: Numbers in ascending order.
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def other_settings(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Describe differing settings of two data sets by their options: ``": --data.data_seed is 1, and was 0"``.

    Args:
        theirs: Identity of the data that a member was trained on.
        mine: Identity of the current data.
    """
    if theirs.get("class_path") != mine.get("class_path"):
        return f": --data is {mine.get('class_path')}, and was {theirs.get('class_path')}"
    # In the form of a zoo's files, in which tuples are lists.
    was, now = (json.loads(json.dumps(one.get("arguments") or {}, default=str)) for one in (theirs, mine))
    differ = [name for name in now if name in was and was[name] != now[name] and not name.endswith("batch_size")]
    said = [f"--data.{name} is {json.dumps(now[name])[:40]}, and was {json.dumps(was[name])[:40]}" for name in differ]
    return f": {'; '.join(said)}" if said else ""


def name_of_callable(function: Callable[..., Any]) -> str:
    """Describe a callable in words: its name, and its settings if these are numbers or words.

    Args:
        function: A function, possibly with bound arguments (``functools.partial``), a module, or another callable
            object.

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


def without_wrappers(text: str) -> str:
    """Remove the prefixes ``module.`` and ``_orig_mod.`` of wrapped and compiled networks from a text.

    Args:
        text: Text with names of modules.

    Example:
        >>> without_wrappers("module.layer1.0.relu, submodule.relu")
        'layer1.0.relu, submodule.relu'
    """
    return re.sub(r"(?<![\w./-])(?:module\.|_orig_mod\.)+(?=\w)", "", text)
