"""Find the norms of a network from its operations: gains, biases, and the writers of their inputs.

See docs/theory/transformers.md, 3 and 6.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.nodes import argument, reduced, shape_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations

_SUMS = {"add", "sub"}
_PASSED = operations(Trait.CAST) | {"neg"}
_MOVED = _PASSED | operations(Trait.MOVE)
_PROPAGATED = _MOVED | operations(Trait.POOL) | {"getitem"}
_PLACES = {"layer_norm": (2, 3), "rms_norm": (2, None)}
_BATCH_NORMS = {"batch_norm", "cudnn_batch_norm"}


@dataclass(frozen=True)
class Norm:
    """A norm of single samples: layer norm, RMS norm or group norm, in any spelling.

    Attributes:
        module: The innermost module that runs it.
        gain: The parameter that multiplies the normalised value; None if there is none.
        bias: The parameter added afterwards; None if there is none.
        plain: Whether the gain is the parameter itself, rather than 1 + the parameter.
        layer: Whether it is a layer norm over one axis, which subtracts the mean.
        writers: For a layer norm, the tensors that write its input: weights, biases, embeddings, positions.
        others: Other terms of its input, as ``operation in module``.
    """

    module: str
    gain: str | None
    bias: str | None
    plain: bool = True
    layer: bool = False
    writers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def find_norms(captures: Sequence[Capture], parameters: Collection[str]) -> tuple[Norm, ...]:
    """Return the norms of a network in the order of the forward pass, without duplicates.

    Args:
        captures: The network, captured on one or several examples.
        parameters: The names of its parameters.
    """
    return tuple(dict.fromkeys(norm for capture in captures for norm in _Finder(capture, parameters).found()))


def absorbed_statistics(captures: Sequence[Capture], parameters: Collection[str]) -> set[str]:
    """Return the running statistics that parameters of their batch norm absorb: variances by gains, means by biases.

    The function is unchanged if the gain scales with the root of the variance, or the bias moves with the mean.

    Args:
        captures: The network, captured on one or several examples.
        parameters: The names of its parameters.
    """
    absorbed: set[str] = set()
    alone: set[str] = set()
    for capture in captures:
        for node, name in capture.states.items():
            readers = [*_readers(node)]
            users = [user for user in readers if name_of(user) in _BATCH_NORMS and len(user.args) > 4]
            if name in parameters or not users:
                continue
            # Argument indices of the statistic and the parameter: gain for variance, bias for mean.
            own, other = (4, 1) if _moved(users[0].args[4]) is node else (3, 2)
            partner = _moved(users[0].args[other])
            if (
                isinstance(partner, fx.Node)
                and capture.states.get(partner) in parameters
                and all(
                    user in users and _moved(user.args[own]) is node and _moved(user.args[other]) is partner
                    for user in (*readers, *_readers(partner))
                )
            ):
                absorbed.add(name)
            else:
                alone.add(name)
    return absorbed - alone


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the readers of a tensor, after moves."""
    for user in node.users:
        yield from _readers(user) if name_of(user) in operations(Trait.REGROUP) else (user,)


def _moved(node: Any) -> Any:
    """Return the tensor of which a node shows all elements."""
    while isinstance(node, fx.Node) and name_of(node) in operations(Trait.REGROUP):
        node = node.args[0]
    return node


class _Finder:
    def __init__(self, capture: Capture, parameters: Collection[str]) -> None:
        self.capture, self.parameters = capture, parameters

    def found(self) -> Iterator[Norm]:
        for node in self.capture.graph.nodes:
            name, module = name_of(node), self.capture.modules.get(node, "")
            if name in _PLACES:
                at_gain, at_bias = _PLACES[name]
                gain = self._state(argument(node, at_gain, "weight"))
                bias = self._state(argument(node, at_bias, "bias")) if at_bias is not None else None
                gain, bias, plain = self._after(node, gain, bias)
                layer = name == "layer_norm" and len(node.args[1]) == 1 and not _is_of_parts(node)
                writers, others = self._writers(node.args[0]) if layer else ((), ())
                yield Norm(module, gain, bias, plain, layer, writers, others)

    def _after(self, node: fx.Node, gain: str | None, bias: str | None) -> tuple[str | None, str | None, bool]:
        """Return the gain and bias after a norm, including its own, and whether the gain is plain."""
        plain, users = True, list(node.users)
        while len(users) == 1 and bias is None:
            user, name = users[0], name_of(users[0])
            others = [given for given in user.args[:2] if given is not node]
            if name == "mul" and len(others) == 1 and isinstance(others[0], fx.Node):
                found, as_it_is = self._gain(others[0])
                if gain is not None or found is None or not _is_vector(others[0]):
                    break
                gain, plain = found, as_it_is
            elif name == "add" and len(others) == 1:
                bias = self._state(others[0]) if _is_vector(others[0]) else None
                break
            elif name not in _MOVED and (name not in ("mul", "div") or user.args[0] is not node):
                break
            node, users = user, list(user.users)
        return gain, bias, plain

    def _state(self, node: Any) -> str | None:
        """Return the parameter that a node shows, after moves and casts; None if it shows none."""
        while isinstance(node, fx.Node) and name_of(node) in _MOVED:
            node = node.args[0]
        name = self.capture.states.get(node) if isinstance(node, fx.Node) else None
        return name if name in self.parameters else None

    def _gain(self, node: Any) -> tuple[str | None, bool]:
        name = self._state(node)
        node = _passed(node)
        if name is None and isinstance(node, fx.Node) and name_of(node) in ("add", "rsub"):
            tensors = [given for given in node.args[:2] if isinstance(given, fx.Node)]
            return (self._state(tensors[0]) if len(tensors) == 1 else None), False
        return name, True

    def _writers(self, node: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors that write a value, and the other terms of its sum."""
        writers: dict[str, None] = {}
        others: dict[str, None] = {}
        seen: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if not isinstance(node, fx.Node) or node in seen:
                continue
            seen.add(node)
            name = name_of(node)
            if node in self.capture.states:
                writers[self.capture.states[node]] = None
            elif name in _PROPAGATED or (name == "mean" and not _over_last(node)):
                waiting.append(node.args[0])
            elif name in _SUMS and all(isinstance(given, fx.Node) for given in node.args[:2]):
                waiting += node.args[:2]
            elif name == "cat":
                waiting += list(node.args[0])  # type: ignore[arg-type]
            elif name in ("mul", "div") and (value := self._scaled(node)) is not None:
                waiting.append(value)
            elif name in ("linear", "matmul", "embedding") or name.startswith("conv"):
                read = [self._state(given) for given in node.all_input_nodes]
                writers |= dict.fromkeys(name for name in read if name is not None)
                if not any(read):
                    others[self._place(node)] = None
            else:
                others[self._place(node)] = None
        return tuple(writers), tuple(others)

    def _scaled(self, node: fx.Node) -> Any:
        """Return the value that a product multiplies by a number, gains, or one number for all units; else None."""
        one, two = node.args[:2]
        for value, factor in ((one, two), (two, one)) if name_of(node) == "mul" else ((one, two),):
            if isinstance(value, fx.Node):
                sizes = shape_of(factor)
                if not isinstance(factor, fx.Node) or self._state(factor) or (sizes is not None and sizes[-1:] == (1,)):
                    return value
        return None

    def _place(self, node: fx.Node) -> str:
        module = self.capture.modules.get(node)
        name = "an input" if node.op == "placeholder" else name_of(node)
        return f"{name} in {module}" if module else name


def _is_of_parts(node: fx.Node) -> bool:
    """Whether a norm acts on parts of an axis (groups of channels) that later operations reassemble."""
    source: Any = node.args[0]
    whole = shape_of(source.args[0]) if name_of(source) in operations(Trait.REGROUP) else None
    while whole is not None and len(node.users) == 1:
        (node,) = node.users
        if shape_of(node) == whole or name_of(node) not in _MOVED | _SUMS | {"mul", "div"}:
            return shape_of(node) == whole
    return False


def _over_last(node: fx.Node) -> bool:
    """Whether a mean goes over the last axis."""
    rank = len(shape_of(node.args[0]) or ())
    return rank - 1 in reduced(node, rank)


def _passed(node: Any) -> Any:
    """Return a node before casts and negations."""
    while isinstance(node, fx.Node) and name_of(node) in _PASSED:
        node = node.args[0]
    return node


def _is_vector(node: Any) -> bool:
    """Whether a value, before moves, has one axis besides those of size 1."""
    while isinstance(node, fx.Node) and name_of(node) in _MOVED:
        node = node.args[0]
    return sum(size > 1 for size in shape_of(node) or ()) == 1
