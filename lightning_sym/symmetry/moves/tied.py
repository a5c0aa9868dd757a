"""Unties shared parameters of embeddings and heads."""

from typing import Any

from torch import nn

from lightning_sym.symmetry.tracing.graph.capture import copied


def untie(network: nn.Module) -> nn.Module:
    """Return a copy of a network without parameters shared between modules.

    The function is the same, and the group is larger: embeddings tied to the head fix the basis of a stream
    (docs/theory/transformers.md, 3). Trace the new network. A configuration with ``tie_word_embeddings``
    (`transformers`) is updated, and with it saved files.

    Args:
        network: Not changed.

    Returns:
        The new network. Each module has its own copy of a shared parameter.

    Raises:
        TypeError: If `network` is not a module, or contains something that cannot be copied.
        ValueError: If no modules share a parameter.

    Example:
        >>> network = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9, bias=False))
        >>> network[2].weight = network[0].weight
        >>> untie(network)[2].weight is network[0].weight
        False
    """
    if not shared_parameters(network):
        raise ValueError(
            "no modules of the network share a parameter, so there is nothing to untie; a parameter that `forward` "
            "itself uses twice has to be split in the code"
        )
    result = copied(network)
    for places in shared_parameters(result):
        for name in places[1:]:
            prefix, _, own = name.rpartition(".")
            module = result.get_submodule(prefix)
            parameter = module._parameters[own]
            assert parameter is not None
            module._parameters[own] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    for module in result.modules():
        _say_untied(getattr(module, "config", None))
        if isinstance(vars(module).get("all_tied_weights_keys"), dict):  # transformers would tie these again on saving
            module.__dict__["all_tied_weights_keys"] = {}
    return result


def shared_parameters(network: nn.Module) -> list[list[str]]:
    """Return the names of every parameter that several modules share. A module with two names counts once."""
    places: dict[int, list[str]] = {}
    for prefix, module in network.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append(f"{prefix}.{name}".lstrip("."))
    return [names for names in places.values() if len(names) > 1]


def described_ties(network: nn.Module) -> str:
    """Describe shared parameters; empty if there are none."""
    shared = shared_parameters(network)
    return f"embeddings are tied, {shared[0][1]} is {shared[0][0]}" if shared else ""


def _say_untied(config: Any) -> None:
    """Set configurations, including nested ones, to untied embeddings."""
    if getattr(config, "tie_word_embeddings", False) is True:
        config.tie_word_embeddings = False
    for key in getattr(config, "sub_configs", None) or ():
        _say_untied(getattr(config, key, None))
