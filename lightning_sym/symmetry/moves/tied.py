"""Gives tied parameters, of embeddings and heads, tensors of their own."""

from typing import Any

from torch import nn

from lightning_sym.symmetry.tracing.capture import copied


def untie(network: nn.Module) -> nn.Module:
    """Return a copy of a network in which every module has parameters of its own.

    The function is the same, the group is larger: embeddings that are tied to the head hold a stream in its axes
    (docs/theory/transformers.md, 3), so trace the new network. A configuration that says so
    (``tie_word_embeddings`` of `transformers`) says afterwards that embeddings are not tied, and so does what is saved.

    Args:
        network: Not changed.

    Returns:
        The new network. What two modules shared, each of them has.

    Raises:
        TypeError: If it is no network, or holds something that cannot be copied.
        ValueError: If no parameter is shared between modules.

    Example:
        >>> network = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9, bias=False))
        >>> network[2].weight = network[0].weight
        >>> untie(network)[2].weight is network[0].weight
        False
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"expected a network (a torch.nn.Module), got {type(network).__name__}")
    if not shared_parameters(network):
        raise ValueError(
            "no parameter of the network is shared between modules, so that there is nothing to untie; one that "
            "`forward` itself uses twice needs a second parameter in the code"
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
        if isinstance(vars(module).get("all_tied_weights_keys"), dict):  # what transformers ties again and leaves out
            module.__dict__["all_tied_weights_keys"] = {}
    return result


def shared_parameters(network: nn.Module) -> list[list[str]]:
    """Return the names of every parameter that several modules hold. A module of two names is one module."""
    places: dict[int, list[str]] = {}
    for prefix, module in network.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append(f"{prefix}.{name}".lstrip("."))
    return [names for names in places.values() if len(names) > 1]


def described_ties(network: nn.Module) -> str:
    """Say which parameters are shared; empty if none are."""
    shared = shared_parameters(network)
    return f"embeddings are tied, {shared[0][1]} is {shared[0][0]}" if shared else ""


def _say_untied(config: Any) -> None:
    """Let a configuration, and those inside it, say that embeddings are not tied."""
    if getattr(config, "tie_word_embeddings", False) is True:
        config.tie_word_embeddings = False
    for key in getattr(config, "sub_configs", None) or ():
        _say_untied(getattr(config, key, None))
