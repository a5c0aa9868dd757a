"""Groups of parameters that share a prior precision, and the paths of layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

from lightning_sym._checks import check_known
from lightning_sym.curvature.rules import find_rule, full_name
from lightning_sym.layers import parameter_paths

Granularity: TypeAlias = Literal["per_path", "per_tensor"]


@dataclass(frozen=True)
class PriorGroups:
    """A partition of the parameters of a network.

    Attributes:
        precisions: From a parameter's name to the name of the group that shares its precision.
        paths: From a parameter's name to the name of its path: of the module that is one summand of a relaxed layer,
            otherwise of the module that holds the parameter.
        layers: From a path's name to the name of the layer with its competing paths.
    """

    precisions: Mapping[str, str]
    paths: Mapping[str, str]
    layers: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups, each once, in order of their first parameter."""
        return tuple(dict.fromkeys(self.precisions.values()))


def parameter_groups(network: nn.Module, granularity: Granularity = "per_path") -> PriorGroups:
    """Divide the trainable parameters of a network that have curvature.

    Args:
        network: Any module. The paths of a relaxed layer come from :func:`~lightning_sym.layers.parameter_paths`;
            elsewhere every module is a path and a layer.
        granularity: ``"per_path"``: one precision for all tensors of a path. ``"per_tensor"``: one for each tensor,
            biases apart.

    Returns:
        Without the parameters that curvature leaves out: anchor positions and lengthscales.

    Raises:
        ValueError: If the granularity is unknown, or a layer with trainable parameters has no curvature rule.

    Example:
        >>> parameter_groups(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))).precisions
        {'0.weight': '0', '0.bias': '0', '1.weight': '1', '1.bias': '1'}
    """
    check_known("granularity of prior precisions", granularity, ("per_path", "per_tensor"))
    on_paths = parameter_paths(network)
    precisions, paths, layers = {}, {}, {}
    for name, module in network.named_modules():
        own = [key for key, tensor in module.named_parameters(recurse=False) if tensor.requires_grad]
        if not own:
            continue
        left_out = find_rule(name, module).left_out
        for key in own:
            if key not in left_out:
                full = full_name(name, key)
                path, layer = name, name
                if full in on_paths:
                    layer, child = on_paths[full]
                    path = f"{layer}.{child}" if layer else child
                paths[full] = path
                layers[path] = layer
                precisions[full] = path if granularity == "per_path" else full
    return PriorGroups(precisions, paths, layers)
