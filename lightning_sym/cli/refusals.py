"""Find the option behind an error, from the methods on its traceback and the options that were given.

A constructor knows the name of its argument only, not the path of the option.
"""

import inspect
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from pytorch_lightning import Trainer

from lightning_sym.cli.given import LINKED, SECTIONS, classes, owned


def name_option(sentence: str, error: BaseException, given: Mapping[str, Any]) -> str:
    """Add the dotted path of the refused option to an error's sentence.

    Args:
        sentence: Message of the error.
        error: The error, with its traceback.
        given: The options that were given, by :func:`~lightning_sym.cli.given.merge`.

    Returns:
        The sentence, unchanged if it names a path already or no option fits.
    """
    if re.search(rf"(?<![\w.])(?:{'|'.join(SECTIONS)})\.[a-z]", sentence):
        return sentence
    path = _refused(sentence, error, given)
    if not path:
        return sentence
    start = re.match(rf"`?{path.rpartition('.')[2]}`?(?!\w)", sentence)
    return f"{path}{sentence[start.end() :]}" if start else f"{path}: {sentence}"


def _refused(sentence: str, error: BaseException, given: Mapping[str, Any]) -> str:
    """Return the path of the option, or of the class, that an error is about; empty if it is about none."""
    made = ""
    for owner, method in _methods(error):
        constructing = method == "__init__"
        if isinstance(owner, Trainer) and not constructing:  # every hook is called by the trainer
            continue
        for path, kind, node in classes(given):
            if kind.rpartition(".")[2] != type(owner).__name__:
                continue
            if option := _option(sentence, path, node, type(owner), constructing):
                return option
            # A sentence of the trainer without an option is not about all of its options.
            made = made or (path if constructing and not isinstance(owner, Trainer) else "")
    return made


def _methods(error: BaseException) -> Iterator[tuple[object, str]]:
    """Yield the methods that an error passed, with their objects; the innermost first."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if code.co_varnames[:1] == ("self",) and "self" in frame.f_locals:
            yield frame.f_locals["self"], code.co_name


def _option(sentence: str, path: str, node: Mapping[str, Any], kind: type, constructing: bool) -> str:
    """Return the path of the option of a class, or below it, that a sentence is about; empty if there is none.

    The best sign is that the sentence begins with the option's name, the next its name and its value, then a name that
    is no word of the language; last, only its value, if that is the value of no other option.
    """
    options = {f"{path}.{name}": value for name, value in node.items()}
    options |= {f"{owner}.{name}": value for owner, _, name, value in owned({path: node}) if owner != path}
    options |= {f"{path}.{name}": None for name in inspect.signature(kind).parameters if name not in node}
    signs = []
    for option, value in options.items():
        name = option.rpartition(".")[2]
        if name in LINKED:  # no options of the network, so that the network itself is named
            continue
        named = re.search(rf"(?<![\w.]){name}(?!\w)", sentence)
        valued = any(_has_value(sentence, entry, constructing) for entry in _entries(value))
        place = named.start() if named else len(sentence)
        if re.match(rf"`?{name}`?(?!\w)", sentence) or f"{name}='{value}'" in sentence:
            signs.append((0, place, option))
        elif named and valued:
            signs.append((1, place, option))
        elif named and ("_" in name or re.search(rf"\b(?:as|needs|set) {name}\b|\b{name}=", sentence)):
            signs.append((2, place, option))
        elif valued:
            signs.append((3, place, option))
    sign, _, option = min(signs, default=(3, 0, ""))
    return option if sign < 3 or len(signs) == 1 else ""


def _entries(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _has_value(sentence: str, value: object, constructing: bool) -> bool:
    """Return whether a sentence says a value so that it is recognised."""
    if isinstance(value, str):
        # A word may be there by chance, but neither a path nor the end of one.
        plain = len(value) > 2 and (constructing or not value.isalpha() or f"/{value}" in sentence)
        return repr(value) in sentence or (plain and bool(re.search(rf"(?<![\w.]){re.escape(value)}(?!\w)", sentence)))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    texts = "|".join(re.escape(text) for text in {str(value), str(float(value))})
    before = r"(?:got|value|:) " if isinstance(value, int) and value >= 0 else r"(?<![\w.-])"
    return bool(re.search(rf"{before}(?:{texts})(?!\w|\.\d)", sentence))
