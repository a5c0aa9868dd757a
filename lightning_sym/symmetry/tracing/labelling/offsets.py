"""Constants that sign changes add, ``sigmoid(-x) = 1 - sigmoid(x)``, between a function and the operation they end at.

See docs/theory/intertwiners.md, 1.4.
"""

from torch import fx

from lightning_sym.symmetry.tracing.graph.nodes import argument
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations


def offset_behind(node: fx.Node, offset: float) -> float | None:
    """Return the constant added to an operation's result if `offset` is added to its input; None if it may vary."""
    name, number = name_of(node), node.args[1] if len(node.args) == 2 else None
    if name in operations(Trait.REGROUP | Trait.PERMUTE | Trait.CAST):
        return offset
    if name == "neg":
        return -offset
    if name in ("mul", "div") and isinstance(number, int | float) and number:
        return offset * number if name == "mul" else offset / number
    return None


def subtracts_mean(node: fx.Node) -> bool:
    """Whether an operation is a norm that subtracts the mean of its input."""
    if name_of(node) == "batch_norm":
        return node.args[3] is None or bool(argument(node, 5, "training"))
    return name_of(node) == "layer_norm"


def is_centred(node: fx.Node) -> bool:
    """Whether only norms that subtract a constant read a value, perhaps moved or multiplied by numbers."""
    return bool(node.users) and all(
        user.args[:1] == (node,)
        and (subtracts_mean(user) or (offset_behind(user, 1.0) is not None and is_centred(user)))
        for user in node.users
    )
