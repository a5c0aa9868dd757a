"""Labels for people: names of measures and maps as figures print them."""

import re
from collections.abc import Sequence

from lightning_sym._text import without_wrappers

_MEASURES = {"group": "Procrustes, group", "orthogonal": "Procrustes, orthogonal"}
_WORDS = {"least_squares": "least squares", "procrustes": "Procrustes", "softsort": "SoftSort"}
_GROUPS = {"euclidean": "Euclidean"}
_KERNELS = {"linear": "linear", "max": "max", "laplace": "Laplace"}


def measure_label(name: str) -> str:
    """Return the label of a measure of similarity.

    Args:
        name: As in :data:`lightning_sym.similarity.MEASURES`, or any other name, which is returned unchanged.

    Example:
        >>> measure_label("cka_linear"), measure_label("orthogonal")
        ('CKA, linear', 'Procrustes, orthogonal')
    """
    return _MEASURES.get(name, readable_names(name))


def readable_names(text: str) -> str:
    """Replace names of measures and maps in a text by labels for people.

    Modules keep the names that tables and options use; ``module.`` of wrapped and compiled networks is omitted there,
    too. Other words are unchanged.

    Args:
        text: Title, name of a tick or entry of a legend. Formulas, with ``$``, are unchanged.

    Example:
        >>> readable_names("cka_max, module.activation1"), readable_names("rank(4)")
        ('CKA, max, activation1', 'rank 4')
    """
    if "$" in text:
        return text
    text = without_wrappers(text)
    text = re.sub(rf"\bcka_({'|'.join(_KERNELS)})\b", lambda kernel: f"CKA, {_KERNELS[kernel[1]]}", text)
    text = re.sub(r"\b(rank|lasso)\(([\d.e-]+)\)", r"\1 \2", text)
    text = re.sub(
        r"\bgroup\(([\w.,+-]+)\)", lambda group: ", ".join(["group", *map(_option, group[1].split(","))]), text
    )
    return re.sub(rf"(?<![\w./-])({'|'.join(_WORDS)})(?![\w./-])", lambda word: _WORDS[word[1]], text)


def _option(word: str) -> str:
    return _GROUPS.get(word, word)


def without_common_prefix(names: Sequence[str]) -> list[str]:
    """Remove the modules that all names begin with.

    Args:
        names: Names with dots between modules.

    Example:
        >>> without_common_prefix(["model.encoder.0.fc1", "model.encoder.1.fc1"])
        ['0.fc1', '1.fc1']
    """
    if len(set(names)) < 2:
        return list(names)
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == parts[0][shared] for path in parts):
        shared += 1
    # Numbers alone are ambiguous: the module before them stays.
    if shared and any(path[shared:][0].isdigit() and len(path) == shared + 1 for path in parts):
        shared -= 1
    return [".".join(path[shared:]) for path in parts]
