"""Trace a network with torch.fx to find its sites, and cut it in two at a site."""

import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from lightning_sym.networks.activations import FUNCTIONAL_ACTIVATIONS, IdentityActivation, is_activation
from lightning_sym.networks.modes import attributes_kept


@functools.cache
def _functional_activations() -> dict[Callable[..., Any], str]:
    """Return torch's elementwise activation functions with their names."""
    table = {}
    for name in FUNCTIONAL_ACTIVATIONS:
        for owner in (torch, F):
            for attribute in (name, name + "_"):
                if hasattr(owner, attribute):
                    table[getattr(owner, attribute)] = name
    return table


# torch.fx traces ``a += b`` as ``a = a + b``, which differs if another name or view of ``a`` is read later.
# Its code for operator.iadd rebinds a local variable, which is wrong for sizes.
def in_place_add(a: Any, b: Any) -> Any:
    """Return ``a`` after ``a += b``."""
    a += b
    return a


def in_place_subtract(a: Any, b: Any) -> Any:
    """Return ``a`` after ``a -= b``."""
    a -= b
    return a


def in_place_multiply(a: Any, b: Any) -> Any:
    """Return ``a`` after ``a *= b``."""
    a *= b
    return a


def in_place_divide(a: Any, b: Any) -> Any:
    """Return ``a`` after ``a /= b``."""
    a /= b
    return a


_OUT_OF_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    in_place_add: operator.add,
    in_place_subtract: operator.sub,
    in_place_multiply: operator.mul,
    in_place_divide: operator.truediv,
}
_NEW_TENSOR = (operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.mul, torch.cat)


class _InPlaceProxy(fx.Proxy):
    """A proxy that records in-place operators as in-place."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", in_place_add, (self, other), {})

    def __isub__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", in_place_subtract, (self, other), {})

    def __imul__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", in_place_multiply, (self, other), {})

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", in_place_divide, (self, other), {})


@dataclass
class TracedNetwork:
    """A traced network.

    Args:
        graph: One placeholder, the calls in execution order, one output.
        sites: The activation nodes by site name, in execution order.
        outputs: The node that holds the output of the first call of each module, by module name.
    """

    graph: fx.Graph
    sites: dict[str, fx.Node]
    outputs: dict[str, fx.Node]


class NetworkTracer(fx.Tracer):
    """The tracer of torch.fx, which stops at activations and at this package's layers, and records where it failed.

    Args:
        leaves: Further module types to stop at.
    """

    def __init__(self, leaves: tuple[type[nn.Module], ...] = ()) -> None:
        super().__init__()
        self.leaves = leaves
        self.outputs: dict[str, fx.Node] = {}
        self.failed_at: str | None = None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return a proxy that distinguishes in-place operators."""
        return _InPlaceProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Test whether a module becomes one call of the graph."""
        return (
            is_activation(m)
            or isinstance(m, self.leaves)
            or type(m).__module__.startswith("lightning_sym.layers")
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace one call, and record its output, or the innermost module that fails."""
        path = (self.submodule_paths or {}).get(m, "")
        try:
            output = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_at = self.failed_at or path
            raise
        if isinstance(output, fx.Proxy):
            self.outputs.setdefault(path, output.node)
        return output


def trace(network: nn.Module, leaves: tuple[type[nn.Module], ...] = (), *, strict: bool = True) -> TracedNetwork:
    """Trace a network and find its sites.

    In-place arithmetic (``out += x``) becomes out of place where this provably preserves the result, so that
    the second half of a cut does not modify outputs of the first.

    Args:
        network: The network, in the mode (train or eval) to trace. Its forward takes one tensor; further
            arguments keep their defaults.
        leaves: Module types to treat as one call.
        strict: Reject in-place modules, and activation modules called twice. If False, later calls of a module have
            names ``name-2``, ``name-3``. Functional activations always have the names
            ``<enclosing module>.functional-<function>``.

    Returns:
        The graph, the sites and the modules' outputs.

    Raises:
        ValueError: If the network cannot be traced, or violates a rule of ``strict``.
    """
    kind = type(network).__name__
    tracer = NetworkTracer(leaves)
    parameters = list(inspect.signature(network.forward).parameters.values())
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) != 1:
        raise ValueError(
            f"{kind}.forward must take exactly one required input to have sites, but takes {len(required)}: "
            f"{', '.join(required) or 'none'}."
        )
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    try:
        with warnings.catch_warnings(), attributes_kept(network):
            warnings.simplefilter("ignore")  # about default arguments, which are removed below
            graph = tracer.trace(network, concrete_args=defaults or None)
    except Exception as error:
        where = f"module {tracer.failed_at!r}" if tracer.failed_at else "its own forward"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"{kind} cannot be traced in {where} ({reason}); "
            f"avoid Python control flow that depends on tensors, or list the module's type in leaf_modules."
        ) from error
    for placeholder in [node for node in graph.nodes if node.op == "placeholder"][1:]:
        _erase_with_users(graph, placeholder)
    sites = _find_sites(network, graph, strict)
    _avoid_in_place(network, graph)
    return TracedNetwork(graph, sites, tracer.outputs)


def crossing_nodes(graph: fx.Graph, site: fx.Node) -> list[fx.Node]:
    """Return the nodes with values that later nodes read after a cut: ``site`` first, then in execution order.

    Parameters and buffers (get_attr) are excluded: each half reads its own.
    """
    before = [node for node in graph.nodes if node < site and node.op != "get_attr"]
    return [site, *(node for node in before if any(user > site for user in node.users))]


def lower_half(network: nn.Module, graph: fx.Graph, sites: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the part of a traced network up to the last of several cuts.

    Args:
        network: The traced network; the part shares its submodules.
        graph: Its graph.
        sites: The last nodes before the cuts.

    Returns:
        A module that returns one tuple per site: the values of :func:`crossing_nodes`.
    """
    result = tuple(tuple(crossing_nodes(graph, site)) for site in sites)
    return _part(network, "Lower", _until(graph, max(sites)), result)


def upper_half(network: nn.Module, graph: fx.Graph, site: fx.Node, *, unpacked: bool = False) -> fx.GraphModule:
    """Return the part of a traced network after a cut.

    Args:
        network: The traced network; the part shares its submodules.
        graph: Its graph.
        site: The last node before the cut.
        unpacked: Take a single value itself, without a tuple around it.

    Returns:
        A module that takes the tuple of the values of :func:`crossing_nodes`.
    """
    upper, values = fx.Graph(), dict[fx.Node, fx.Node]()
    entry = upper.placeholder("activation" if unpacked else "values")
    for index, node in enumerate(crossing_nodes(graph, site)):
        values[node] = entry if unpacked else upper.call_function(operator.getitem, (entry, index))
    *nodes, output = graph.nodes
    read = [node for node in nodes if node < site and node.op == "get_attr" and any(user > site for user in node.users)]
    return _part(network, "Upper", read + [node for node in nodes if node > site], output.args[0], upper, values)


def with_values(network: nn.Module, graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the traced network with outputs: a tuple of its output and the values of some nodes."""
    *before, output = graph.nodes
    return _part(network, "Whole", before, (output.args[0], *nodes))


def cut(network: nn.Module, graph: fx.Graph, site: fx.Node) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a traced network after a node, in execution order.

    Args:
        network: The traced network; both halves share its submodules.
        graph: Its graph.
        site: The last node of the first half.

    Returns:
        The two halves. The first returns the value of ``site``, or, if later nodes need further values, a tuple
        that begins with it; the second takes the output of the first.
    """
    crossing = tuple(crossing_nodes(graph, site))
    only = len(crossing) == 1
    lower = _part(network, "Lower", _until(graph, site), site if only else crossing)
    return lower, upper_half(network, graph, site, unpacked=only)


def _until(graph: fx.Graph, last: fx.Node) -> list[fx.Node]:
    """Return the nodes up to ``last``; a parameter belongs to the part that uses it."""
    until = [node for node in graph.nodes if node <= last]
    return [node for node in until if node.op != "get_attr" or any(user <= last for user in node.users)]


def _part(
    network: nn.Module,
    name: str,
    nodes: Sequence[fx.Node],
    result: Any,
    part: fx.Graph | None = None,
    values: dict[fx.Node, fx.Node] | None = None,
) -> fx.GraphModule:
    """Return a module that runs copies of some nodes, with the network's submodules and mode.

    Args:
        network: The traced network.
        name: Name of the module's class.
        nodes: Nodes of the network's graph, in order.
        result: Output of the module: one of these nodes, or tuples of them.
        part: The graph to extend; default a new one.
        values: The nodes of ``part`` by the nodes that they replace.
    """
    part, values = part or fx.Graph(), values or {}
    for node in nodes:
        values[node] = part.node_copy(node, values.__getitem__)
    part.output(fx.map_arg(result, values.__getitem__))
    half = fx.GraphModule(network, part, class_name=name)
    shared = set(network.modules())
    for path, module in half.named_modules():
        if module not in shared:  # containers around a shared module are new
            module.training = network.get_submodule(path).training
    return half


def _erase_with_users(graph: fx.Graph, node: fx.Node) -> None:
    """Remove a node and its dependents: the checks that fx adds for a default argument."""
    for user in list(node.users):
        _erase_with_users(graph, user)
    graph.erase_node(node)


def _find_sites(network: nn.Module, graph: fx.Graph, strict: bool) -> dict[str, fx.Node]:
    """Return the activation nodes by name, in execution order."""
    kind = type(network).__name__
    sites: dict[str, fx.Node] = {}
    calls: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            name = str(node.target)
            module = network.get_submodule(name)
            if strict and getattr(module, "inplace", False) is True:
                raise ValueError(
                    f"The module {name!r} of {kind} works in place; "
                    f"write {type(module).__name__}(inplace=False), so that its input is not overwritten."
                )
            if not is_activation(module):
                continue
            if strict and name in calls:
                raise ValueError(
                    f"The activation module {name!r} of {kind} is called more than once; "
                    f"give each call its own {type(module).__name__}, so that each is a separate site."
                )
        else:
            function = _functional_name(node)
            if function is None:
                continue
            parent = _enclosing_module(node)
            name = f"{parent}.functional-{function}".lstrip(".")
        calls[name] = calls.get(name, 0) + 1
        site = name if calls[name] == 1 else f"{name}-{calls[name]}"
        while site in sites:  # a module may be named relu-2
            site += "-2"
        sites[site] = node
    return sites


def _functional_name(node: fx.Node) -> str | None:
    """Return the name of the activation that a node applies as a function or tensor method; None for other nodes."""
    if node.op == "call_function" and callable(node.target):
        return _functional_activations().get(node.target)
    if node.op == "call_method" and str(node.target).removesuffix("_") in ("relu", "sigmoid", "tanh"):
        return str(node.target).removesuffix("_")
    return None


def _enclosing_module(node: fx.Node) -> str:
    """Return the name of the module that called a node's operation; empty for the network itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def _avoid_in_place(network: nn.Module, graph: fx.Graph) -> None:
    """Replace in-place functions and methods by others where this provably preserves the result.

    This holds if no later node reads the overwritten tensor, or if later nodes read it under its own name and not
    through a view: they then read the new tensor instead.
    """
    for node in graph.nodes:
        replacement = _out_of_place(node)
        if replacement is None or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        target = node.args[0]
        aliases = _possible_aliases(network, target, node)
        if any(alias.op == "get_attr" for alias in aliases):
            continue  # updates a parameter or buffer
        readers = {alias: [user for user in alias.users if user > node] for alias in aliases}
        if any(users for alias, users in readers.items() if alias is not target):
            continue
        if readers[target] and not _is_new_tensor(network, target):
            continue  # might be a size: += does not change its other names
        for user in readers[target]:
            user.replace_input_with(target, node)
        node.target = replacement
        if node.kwargs.get("inplace"):
            node.kwargs = {**node.kwargs, "inplace": False}


def _out_of_place(node: fx.Node) -> Callable[..., Any] | str | None:
    """Return the out-of-place version of an in-place function or method; None for any other node."""
    target = node.target
    if node.op == "call_method" and str(target).endswith("_") and not str(target).endswith("__"):
        method = str(target)[:-1]
        return method if hasattr(Tensor, method) else None
    if node.op != "call_function" or not callable(target):
        return None
    if target in _OUT_OF_PLACE:
        return _OUT_OF_PLACE[target]
    if node.kwargs.get("inplace") is True:
        return target
    name = getattr(target, "__name__", "")
    if target in _functional_activations() and name.endswith("_"):
        return getattr(torch, name[:-1], None) or getattr(F, name[:-1], None)
    return None


def _possible_aliases(network: nn.Module, node: fx.Node, without: fx.Node) -> set[fx.Node]:
    """Return the nodes that may share memory with a node, ignoring one user (the in-place operation)."""
    found, pending = {node}, [node]
    while pending:
        current = pending.pop()
        relatives = [user for user in current.users if not _is_new_tensor(network, user)]
        if not _is_new_tensor(network, current):
            relatives += current.all_input_nodes
        for relative in relatives:
            if relative is not without and relative.op != "output" and relative not in found:
                found.add(relative)
                pending.append(relative)
    return found


def _is_new_tensor(network: nn.Module, node: fx.Node) -> bool:
    """Test whether a node's output certainly shares no memory with its inputs."""
    if node.op == "call_module":
        module = network.get_submodule(str(node.target))
        layers = (
            nn.Linear,
            nn.modules.conv._ConvNd,
            nn.modules.batchnorm._BatchNorm,
            nn.GroupNorm,
            nn.LayerNorm,
        )
        return isinstance(module, layers) or (is_activation(module) and not isinstance(module, IdentityActivation))
    return node.op == "call_function" and node.target in _NEW_TENSOR
