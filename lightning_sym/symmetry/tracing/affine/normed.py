"""Find the readers of the layer norms of each gain and bias, from the interpreter's results.

See docs/theory/transformers.md, 4.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from lightning_sym.symmetry.tracing.affine.interpreter import Interpreter
from lightning_sym.symmetry.tracing.affine.tilts import Normed
from lightning_sym.symmetry.tracing.affine.values import Value
from lightning_sym.symmetry.tracing.graph.operations import name_of

Pair = tuple[str | None, str]


def normed_of(interpreters: Sequence[Interpreter]) -> dict[Pair, Normed]:
    """Return the layer norms that only linear layers read, by gain and bias, if these layers read only that norm.

    Args:
        interpreters: One for each capture, after they have run.
    """
    found: dict[Pair, Normed] = {}
    uses: dict[str, set[Any]] = {}
    for interpreter in interpreters:
        for name, readings in _readings(interpreter).items():
            uses.setdefault(name, set()).update(readings)
        for pair, own in _one(interpreter).items():
            found[pair] = found[pair].met(own) if pair in found else own
    fixed = set().union(*(interpreter.system.fixed for interpreter in interpreters))
    offsets = [offset for _, offset in found]
    return {
        pair: own
        for pair, own in found.items()
        if own.alone
        and offsets.count(pair[1]) == 1
        and all(uses[name] == {pair} and name not in fixed for name, _ in own.readers)
    }


def _pair(value: Any) -> Pair | None:
    """Return the gain and the bias of a layer norm's output, perhaps moved or averaged; None for other values."""
    relation = value.relation if isinstance(value, Value) else None
    if relation is None or len(relation.axes) != 1 or relation.total.segments != 1 or len(relation.total.terms) != 1:
        return None
    if relation.total.before is None or not relation.total.before[0].vanishes or relation.total.constant:
        return None
    coefficient = relation.total.terms[0][0]
    atoms = [(atom.kind, atom.key, power) for atom, power, _ in coefficient.items]
    own = [(atom.kind, atom.key, power) for atom, power, _ in relation.coefficient.items]
    plain = coefficient.factor == relation.coefficient.factor == 1
    offsets = [key for kind, key, power in atoms if power == 1 and kind == "parameter"]
    gains = [key for kind, key, power in atoms if power == -1 and kind == "parameter"]
    if not plain or len(offsets) != 1 or len(gains) > 1 or len(offsets) + len(gains) < len(atoms):
        return None
    if own != [("parameter", key, -1) for key in gains]:
        return None
    return (gains[0] if gains else None), offsets[0]


def _readings(interpreter: Interpreter) -> dict[str, set[Any]]:
    """Return for each weight the layer norms that it reads, with None for other inputs."""
    found: dict[str, set[Any]] = {}
    for readings in interpreter.readings.values():
        for name, _, value in readings:
            found.setdefault(name, set()).add(_pair(value))
    return found


def _one(interpreter: Interpreter) -> dict[Pair, Normed]:
    """Return the readers of the layer norms of one capture."""
    values, capture = interpreter.values, interpreter.capture
    nodes: dict[Pair, list[fx.Node]] = {}
    for node, value in values.items():
        if isinstance(value, Value) and value.varies and (pair := _pair(value)) is not None:
            nodes.setdefault(pair, []).append(node)
    result = {}
    for pair, own in nodes.items():
        readers: dict[tuple[str, int], None] = {}
        alone = True
        for node in own:
            (axis,) = values[node].relation.axes
            alone &= axis == values[node].rank - 1
            for user in node.users:
                if _pair(values.get(user)) == pair and name_of(user) != "layer_norm":
                    continue
                read = [reading for reading in interpreter.readings.get(user, ()) if _pair(reading[2]) == pair]
                alone &= len(read) == 1 and list(user.all_input_nodes).count(node) == 1
                for name, axes, _ in read:
                    alone &= len(axes) == 1 and len(interpreter.system.shape(name)) > 1
                    readers |= dict.fromkeys((name, axis) for axis in axes)
        alone &= _only_there(interpreter, pair, set(own))
        found = Normed(readers, alone, {})
        for mark in capture.marks:
            if mark.node in own:
                found.seen[mark.name, values[mark.node].rank - 1] = None
        result[pair] = found
    return result


def _only_there(interpreter: Interpreter, pair: Pair, own: set[fx.Node]) -> bool:
    """Whether a norm's bias is read only where the norm adds it."""
    waiting = [node for node, name in interpreter.capture.states.items() if name == pair[1]]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            value = interpreter.values.get(user)
            if isinstance(value, Value) and value.origin is not None and value.origin[0] == pair[1]:
                waiting.append(user)
            elif user not in own:
                return False
    return True
