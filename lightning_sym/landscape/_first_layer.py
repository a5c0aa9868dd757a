"""The first layer of a network with weights, its input, and the rest of the network."""

import functools
import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from lightning_sym.networks import architecture_name
from lightning_sym.networks.activations import is_activation
from lightning_sym.networks.cuts import crossing_nodes, lower_half, trace, upper_half

_AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class MaxPool(nn.Module):
    """Max pooling of disjoint squares as a maximum of slices: the same values, several times faster on CPUs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return the maxima, [..., H // size, W // size], of [..., H, W]."""
        n = self.size
        height, width = x.shape[-2] // n * n, x.shape[-1] // n * n
        rows = [x[..., start:height:n, :width] for start in range(n)]
        x = functools.reduce(torch.maximum, rows)
        return functools.reduce(torch.maximum, [x[..., start::n] for start in range(n)])


def with_fast_pools(network: nn.Module) -> None:
    """Replace max poolings by an equivalent :class:`MaxPool`, in place."""
    for parent in list(network.modules()):
        for name, module in parent.named_children():
            if type(module) is not nn.MaxPool2d or _has_hooks(module):
                continue
            sizes = {*_pair(module.kernel_size), *_pair(module.stride)}
            plain = (_pair(module.padding), _pair(module.dilation)) == ((0, 0), (1, 1))
            if len(sizes) == 1 and plain and not module.ceil_mode and not module.return_indices:
                setattr(parent, name, MaxPool(sizes.pop()))


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


@dataclass(frozen=True)
class FirstLayer:
    """A network cut after its first layer with weights, which is affine in them and the only one that sees the input.

    Attributes:
        name: Name of the layer in the network; ``""`` never.
        layer: The layer.
        before: From the network's inputs to the layer's, without parameters; None if they are the same.
        rest: From the layer's output to the network's.
        dense: The names of the modules of ``rest`` in order, if it is a chain of linear layers and elementwise
            activations after a linear layer; otherwise None.
    """

    name: str
    layer: nn.Module
    before: nn.Module | None
    rest: nn.Module
    dense: tuple[str, ...] | None

    def entering(self, inputs: Tensor) -> Tensor:
        """Compute the layer's input, for inputs [N, ...]."""
        found: Tensor = inputs if self.before is None else self.before(inputs)[0][0]
        return found


def find_first_layer(network: nn.Module) -> FirstLayer:
    """Cut a network in eval mode after its first layer.

    Raises:
        ValueError: If the network cannot be traced, or its first layer is not linear or convolutional, is used twice,
            or is not the only thing that reads the input.
    """
    kind = architecture_name(network)
    if len(list(network.named_parameters(remove_duplicate=False))) != len(list(network.parameters())):
        raise ValueError(f"{kind} has parameters with several names.")
    graph = trace(network, (*getattr(network, "leaf_modules", ()), MaxPool), strict=False).graph
    node = next((node for node in graph.nodes if _has_parameters(network, node)), None)
    if node is None:
        raise ValueError(f"No layer of {kind} has parameters.")
    name = str(node.target)
    layer = network.get_submodule(name) if node.op == "call_module" else None
    if not isinstance(layer, nn.Module) or type(layer) not in _AFFINE or _has_hooks(layer):
        raise ValueError(f"The first layer of {kind}, {name!r}, is not linear or convolutional.")
    if sum(_modules(network, other) is layer for other in graph.nodes) > 1 or len(node.args) != 1:
        raise ValueError(f"The first layer of {kind}, {name!r}, is called more than once.")
    if crossing_nodes(graph, node) != [node]:
        raise ValueError(f"The first layer of {kind}, {name!r}, is not the only one that reads the input.")
    (source,) = node.all_input_nodes
    return FirstLayer(
        name=name,
        layer=layer,
        before=None if source.op == "placeholder" else lower_half(network, graph, [source]),
        rest=upper_half(network, graph, node, unpacked=True),
        dense=_dense_chain(network, node) if isinstance(layer, nn.Linear) else None,
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _modules(network: nn.Module, node: fx.Node) -> nn.Module | None:
    return network.get_submodule(str(node.target)) if node.op == "call_module" else None


def _has_parameters(network: nn.Module, node: fx.Node) -> bool:
    if node.op == "get_attr":
        return isinstance(operator.attrgetter(str(node.target))(network), nn.Parameter)
    module = _modules(network, node)
    return module is not None and next(module.parameters(), None) is not None


def _dense_chain(network: nn.Module, node: fx.Node) -> tuple[str, ...] | None:
    """Return the names of the modules after a node if each reads only the one before, and all are dense."""
    names: list[str] = []
    while len(node.users) == 1:
        (user,) = node.users
        if user.op == "output":
            return tuple(names) if user.args[0] is node else None
        module = _modules(network, user)
        if module is None or len(user.args) != 1 or user.kwargs or _has_hooks(module):
            return None
        plain = type(module) is nn.Linear or isinstance(module, nn.Identity | _DropoutNd)
        if not plain and not (is_activation(module) and next(module.parameters(), None) is None):
            return None
        names.append(str(user.target))
        node = user
    return None


def apply_elementwise(module: nn.Module, hidden: Tensor) -> Tensor:
    """Apply an elementwise module of a dense chain to numbers that may be overwritten."""
    if type(module) is nn.ReLU:
        return F.relu_(hidden)
    result: Tensor = module(hidden)
    return result
