"""Stack the weights of modules that do the same, so that elements can exchange them: experts, heads, branches.

The normal form turns equal operations on parts of one array into one operation on all parts. Weights of separate
modules become parts of one array here; elements act on this array (`Charts.stacks`).
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.nodes import argument, memories_of, shape_of, value_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations
from lightning_sym.symmetry.tracing.normal_form.pieces import renew

aten = torch.ops.aten
# Tensors of one role in modules that do the same, by name: one for each module.
Role = tuple[str, ...]
_JOINS = ("cat", "stack")
_CHAINS = {"add": "add", "logaddexp": "logaddexp"} | dict.fromkeys(("maximum", "max", "fmax"), "max")
_CHAINS |= dict.fromkeys(("minimum", "min", "fmin"), "min")
# Operations that read a part of a value, or compare places with one, with the arguments that choose the part.
_PARTS = {"select": (2,), "slice": (2, 3), "getitem": (1,), "index": (1,), "index_select": (2,), "eq": (1,)}


class Branches(NamedTuple):
    """Modules with equal operations.

    Attributes:
        roles: Their tensors, by name.
        inside: Their operations.
    """

    roles: tuple[Role, ...]
    inside: frozenset[fx.Node]


class _Node(NamedTuple):
    """An operation, without the place of the part that it reads."""

    kind: Any
    given: tuple[Any, ...]


def alike(capture: Capture) -> list[Branches]:
    """Find branches with equal operations whose results are concatenated, stacked or added.

    Args:
        capture: The network, as captured.

    Returns:
        Sets of branches. Nothing else reads their weights, and no two sets share any.
    """
    kinds: dict[_Node, int] = {}
    kind: dict[fx.Node, int] = {}
    for node in capture.graph.nodes:
        kind[node] = kinds.setdefault(_described(capture, node, kind), len(kinds))
    found: dict[frozenset[frozenset[str]], Branches] = {}  # by the tensors of each module
    named = {mark.node for mark in capture.marks if not mark.module}  # a caller asks for these values
    for leaves in _joined(capture):
        sets: dict[int, list[fx.Node]] = {}
        for leaf in dict.fromkeys(leaves):
            sets.setdefault(kind[leaf], []).append(leaf)
        for branches in sets.values():
            own = _branches(capture, branches) if len(branches) > 1 else None
            if own is not None and not own.inside & named:
                key = frozenset(frozenset(module) for module in zip(*own.roles, strict=True))
                before = found.get(key, own)  # modules may run several times
                found[key] = Branches(before.roles, before.inside | own.inside)
    alone: list[Branches] = []
    taken: set[str] = set()
    weights = {name: node for node, name in capture.states.items() if "kept" not in node.meta}
    for own in found.values():
        names = {name for role in own.roles for name in role}
        if not names & taken and all({*weights[name].users} <= own.inside for name in names & weights.keys()):
            alone.append(own)
            taken |= names
    return alone


def _described(capture: Capture, node: fx.Node, kind: dict[fx.Node, int]) -> _Node:
    if node in capture.states:
        value: Tensor = node.meta["val"]
        is_buffer = capture.states[node] in capture.buffers
        return _Node("state", (tuple(value.shape), value.dtype, is_buffer, "kept" in node.meta))
    if node.op == "get_attr" and isinstance(held := value_of(node), Tensor) and not held.is_meta:
        numbers = held.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _Node("constant", (tuple(held.shape), held.dtype, numbers))
    if node.op != "call_function":
        return _Node(node.name, ())
    given = fx.map_arg((_without_place(node), node.kwargs), kind.__getitem__)
    return _Node(node.target, (repr(given),))


def _inputs(capture: Capture, node: fx.Node) -> list[fx.Node]:
    """Return the values that an operation reads, without the place of a part unless a buffer holds it."""
    given = node.all_input_nodes
    is_part = name_of(node) in ("index", "index_select")
    return [own for own in given if not is_part or own is given[0] or own in capture.states]


def _without_place(node: fx.Node) -> list[Any]:
    """Return the arguments of an operation without the place of the part that it reads, but with its size."""
    args, value = list(node.args), node.meta.get("val")
    for at in _PARTS.get(name_of(node), ()):
        if at < len(args):
            args[at] = "place"
    return [*args, tuple(value.shape) if isinstance(value, Tensor) and name_of(node) in _PARTS else ()]


def _joined(capture: Capture) -> Iterator[Sequence[fx.Node]]:
    """Yield the values that each concatenation, stack, and chain of sums or extrema joins."""
    for node in capture.graph.nodes:
        if name_of(node) in _JOINS and node.users:
            yield node.args[0]
        elif (chain := _chain_of(node)) and not any(_chain_of(user) == chain for user in node.users):
            leaves, left = [], [node]
            while left:
                own = left.pop()
                if _chain_of(own) == chain and shape_of(own) == shape_of(node):
                    left += [given for given in own.args[:2] if isinstance(given, fx.Node)]
                else:
                    leaves.append(own)
            yield leaves


def _chain_of(node: fx.Node) -> str | None:
    """Return which function of two values an operation is, if it may be applied to several in any order."""
    return _CHAINS.get(name_of(node)) if len(node.all_input_nodes) == 2 or name_of(node) == "add" else None


def _branches(capture: Capture, branches: Sequence[fx.Node]) -> Branches | None:
    """Return the roles of weights in branches of one kind; None if they share operations or weights in other ways."""
    roles: dict[fx.Node, tuple[fx.Node, ...]] = {}
    met: set[tuple[fx.Node, ...]] = set()
    left = [tuple(branches)]
    while left:
        nodes = left.pop()
        if nodes in met or len(set(nodes)) == 1:
            continue
        met.add(nodes)
        if len(set(nodes)) < len(nodes):
            return None
        if nodes[0] in capture.states:
            if "kept" in nodes[0].meta and not _hold_equal_numbers(nodes):
                return None
            roles[nodes[0]] = nodes
            continue
        left += zip(*(_inputs(capture, node) for node in nodes), strict=True)
    inside = {node for nodes in met for node in nodes}
    weights = [node for nodes in roles.values() for node in nodes if "kept" not in node.meta]
    if {*branches} <= {*weights}:
        inside |= {user for node in branches for user in node.users}
    in_order = [tuple(capture.states[node] for node in nodes) for nodes in roles.values()]
    # The normal form has no operation for all branches instead of these.
    single = any("::" in name_of(node) for node in inside)
    if len(weights) > len(set(weights)) or not weights or single:
        return None
    order = {node: at for at, node in enumerate(capture.graph.nodes)}
    places = sorted(range(len(branches)), key=lambda at: order[branches[at]])  # as the network runs them
    return Branches(tuple(tuple(role[at] for at in places) for role in in_order), frozenset(inside))


def _hold_equal_numbers(nodes: Sequence[fx.Node]) -> bool:
    first, *others = (node.meta["kept"] for node in nodes)
    return not first.is_meta and all(not own.is_meta and torch.equal(first, own) for own in others)


def stack(capture: Capture, roles: Collection[Role]) -> None:
    """Replace the weights of equal branches by parts of one array for each role, and equal constants by one of them.

    The values inside these branches lose their names, as elements move them from one name to another.

    Args:
        capture: The network. Its graph is changed.
        roles: Of :func:`alike`, for this capture or another one.
    """
    hidden = {node for own in alike(capture) if {*own.roles} <= {*roles} for node in own.inside} if roles else set()
    joins = {user for node in hidden for user in node.users if name_of(user) in _JOINS}
    hidden |= {node for node in joins if {*node.all_input_nodes} <= hidden}
    capture.marks[:] = [mark for mark in capture.marks if mark.node not in hidden]
    for members in roles:
        named = {name: node for node, name in capture.states.items()}
        nodes = [named[name] for name in members if name in named]
        if not nodes:
            continue
        if "kept" in nodes[0].meta:
            _share(capture, nodes)
            continue
        name, like = stack_name(members), nodes[0].meta["val"]
        first = next(node for node in capture.states if node in nodes)
        with capture.graph.inserting_before(first):
            whole = capture.graph.placeholder(f"{first.name}_stack")
        with like.fake_mode:
            whole.meta["val"] = torch.empty((len(members), *like.shape), dtype=like.dtype, device=like.device)
        after = next(node for node in capture.graph.nodes if node.op != "placeholder")
        for at, own in enumerate(members):
            if own in named:
                with capture.graph.inserting_before(after):
                    part = capture.graph.call_function(aten.select.int, (whole, 0, at))
                with like.fake_mode:
                    part.meta["val"] = whole.meta["val"].select(0, at)
                old = memories_of(named[own])
                for user in [*named[own].users]:
                    user.replace_input_with(named[own], part)
                    renew(user, old)
        capture.states = {whole if node is first else node: name if node is first else own
                          for node, own in capture.states.items() if node is first or node not in nodes}  # fmt: skip
        capture.marks[:] = [mark for mark in capture.marks if mark.node not in nodes]
        for node in nodes:
            capture.graph.erase_node(node)
        capture.buffers |= {name} if members[0] in capture.buffers else set()
        capture.stacks[name] = members


def _share(capture: Capture, nodes: Sequence[fx.Node]) -> None:
    """Let all readers of equal constants read the first one."""
    first, *others = nodes
    for node in others:
        old = memories_of(node)
        for user in [*node.users]:
            user.replace_input_with(node, first)
            renew(user, old)
        capture.folded |= {capture.states.pop(node)}  # other networks must hold the same numbers
        capture.graph.erase_node(node)
    capture.marks[:] = [mark for mark in capture.marks if mark.node not in others]


def read_apart(capture: Capture) -> set[Role]:
    """Return the stacks of which the network still reads members one by one, so that all have common units."""
    return {
        capture.stacks[name]
        for node, name in capture.states.items()
        if name in capture.stacks
        for user in node.users
        if name_of(user) in operations(Trait.PARTS) | {"select", "slice"} and argument(user, 1, "dim", 0) == 0
    }


def stack_name(members: Role) -> str:
    """Name the stack of some tensors: ``experts.{0,1}.weight``."""
    parts = [name.split(".") for name in members]
    if len({len(own) for own in parts}) == 1:
        columns = list(zip(*parts, strict=True))
        varying = [at for at, column in enumerate(columns) if len(set(column)) > 1]
        if len(varying) == 1:
            (at,) = varying
            return ".".join(f"{{{','.join(own)}}}" if n == at else own[0] for n, own in enumerate(columns))
    return f"{{{','.join(members)}}}"


def stacks_of(captures: Sequence[Capture]) -> dict[str, Role]:
    """Return the stacks of all captures."""
    return {name: members for capture in captures for name, members in capture.stacks.items()}
