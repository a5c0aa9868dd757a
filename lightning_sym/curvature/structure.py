"""How a network is put together: modules called in sequence, and whether outputs depend on every place of a layer."""

from typing import TypeGuard, TypeVar

from torch import fx, nn

from lightning_sym.layers import (
    CircularConv,
    FactoredFullyConnected,
    FullyConnected,
    PolyphasePool,
    ResidualPathways,
    SparseConv,
    SparseFactoredFullyConnected,
)
from lightning_sym.networks.modes import attributes_kept

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# With weights other than 0, outputs depend on every place of the input, for some values of the features.
_WHOLE = (
    *(FullyConnected, FactoredFullyConnected, SparseFactoredFullyConnected, CircularConv, SparseConv, PolyphasePool),
    *(nn.Linear, nn.Flatten, nn.Identity, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU),
)

_BIASES = ("bias", "b1", "b2")


def runs(module: nn.Module, kind: type[ModuleT]) -> TypeGuard[ModuleT]:
    """Return whether a module's forward is that of a class."""
    return isinstance(module, kind) and getattr(module.forward, "__func__", None) is kind.forward


def every_place_counts(network: nn.Module) -> bool:
    """Return whether the structure of a network alone shows that outputs depend on every place of every layer.

    True if it consists of layers that use their whole input, called in sequence or on parallel pathways, with all
    weights other than 0 and without hooks. False says nothing. Masks, convolutions with strides, and pools that cut
    off positions are such cases.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in network.modules()):
        return False
    weights = [weight for name, weight in network.named_parameters() if name.rpartition(".")[2] not in _BIASES]
    return _whole(network) and all(bool((weight != 0).all()) for weight in weights)


def _whole(module: nn.Module) -> bool:
    if runs(module, ResidualPathways):
        return module.scale != 0 and all(map(_whole, module.paths.values()))
    if runs(module, nn.Sequential):
        return all(map(_whole, module))
    if type(module) in _WHOLE:
        return runs(module, type(module))
    children = children_in_order(module)
    return bool(children) and all(map(_whole, children or ()))


class _ChildrenAsLeaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def children_in_order(module: nn.Module) -> list[nn.Module] | None:
    """Return the modules that a forward calls, one after the other; None if it does anything else."""
    try:
        with attributes_kept(module):
            graph = _ChildrenAsLeaves().trace(module)
    except Exception:  # a forward may do anything that cannot be traced
        return None
    found: list[nn.Module] = []
    last: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder" and last is None:
            last = node
        elif node.op == "call_module" and node.args == (last,) and not node.kwargs:
            found.append(module.get_submodule(str(node.target)))
            last = node
        elif node.op == "output" and node.args == (last,):
            return found
        else:
            return None
    return None
