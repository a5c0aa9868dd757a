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


def parameter_groups(
    network: nn.Module, granularity: Granularity = "per_path", *, lengthscales: bool = False
) -> PriorGroups:
    """Divide the trainable parameters of a network that have curvature.

    Args:
        network: Any module. The paths of a relaxed layer come from :func:`~lightning_sym.layers.parameter_paths`;
            elsewhere every module is a path and a layer.
        granularity: ``"per_path"``: one precision for all tensors of a path. ``"per_tensor"``: one for each tensor,
            biases apart.
        lengthscales: Whether the trained inverse length scales of sparse layers have a prior, too. Those of a pathway
            share a precision, or have one each per tensor. They are paths of a layer ``<layer>.omega``, so that
            effective numbers compare the length scales of pathways.

    Returns:
        Without the parameters that curvature leaves out: anchor positions and, unless asked for, length scales.

    Raises:
        ValueError: If the granularity is unknown, a layer with trainable parameters has no curvature rule, or there is
            no trained length scale to have a prior.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), section 3.2; docs/theory/curvature.md, 2.1 and 2.4.

    Example:
        >>> parameter_groups(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))).precisions
        {'0.weight': '0', '0.bias': '0', '1.weight': '1', '1.bias': '1'}
    """
    check_known("granularity of prior precisions", granularity, ("per_path", "per_tensor"))
    on_paths = parameter_paths(network)
    precisions, paths, layers, scaled = {}, {}, {}, False
    for name, module in network.named_modules():
        own = [key for key, tensor in module.named_parameters(recurse=False) if tensor.requires_grad]
        if not own:
            continue
        rule = find_rule(name, module, lengthscales=lengthscales)
        of_scales = {key for key in own if lengthscales and key in rule.lengthscales}
        scaled = scaled or bool(of_scales)
        for key in own:
            if key not in rule.left_out:
                full = full_name(name, key)
                layer, child = on_paths.get(full, (name, ""))
                if key in of_scales:
                    layer = full_name(layer, "omega")
                path = full_name(layer, child) if child else layer
                paths[full] = path
                layers[path] = layer
                precisions[full] = path if granularity == "per_path" else full
    if lengthscales and not scaled:
        raise ValueError(
            "A prior on length scales needs sparse layers that train theirs, and the network has none; make it with "
            "learn_lengthscale=True, or put the prior on weights."
        )
    return PriorGroups(precisions, paths, layers)
