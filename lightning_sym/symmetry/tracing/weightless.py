"""Networks without weights: parameters on torch's meta device have shapes and no values, constants need theirs."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_sym.symmetry.tracing.capture import constant_names, state_tensors


def is_weightless(network: nn.Module) -> bool:
    """Return whether a network holds a parameter or buffer on the meta device."""
    return any(tensor.is_meta for tensor in state_tensors(network).values())


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Build networks without memory for their weights: parameters are on the meta device, buffers keep their values.

    Under ``torch.device("meta")`` buffers lose their values, too. Those of `transformers` and `timm` can be had again,
    others (a table of sinusoids) cannot, and what they meet is then taken to be fixed.

    Example:
        >>> with without_weights():
        ...     network = nn.Linear(100_000, 100_000)
        >>> network.weight.device
        device(type='meta')
    """
    register = nn.Module.register_parameter
    known: Any = WeakIdKeyDictionary()  # a parameter in two places is still one

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if parameter not in known:
                kind, kept = type(parameter), parameter.__dict__
                known[parameter] = kind(parameter.to("meta"), requires_grad=parameter.requires_grad)
                known[parameter].__dict__.update(kept)
            parameter = known[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]


def constant_values(network: nn.Module) -> dict[str, Tensor]:
    """Return the values of constant buffers that have none, as the network's own initialisation gives them.

    Constant are buffers that are in no state dict, and those of integers. `timm` fills them by a method of the module,
    `transformers` by one of the model.

    Returns:
        By name, on the CPU; those that nothing fills, or randomly, are missing.
    """
    unsaved = constant_names(network)
    values: dict[str, Tensor] = {}
    for prefix, module in network.named_modules():
        names = {f"{prefix}.{name}" if prefix else name: name for name, tensor in module.named_buffers(recurse=False)}
        wanted = {
            own: name
            for name, own in names.items()
            for tensor in [module._buffers[own]]
            if tensor is not None and tensor.is_meta and (name in unsaved or not tensor.is_floating_point())
        }
        if not wanted:
            continue
        # What is the same whatever was there before has been filled.
        zeros, ones = (_initialised(network, prefix, module, list(wanted), fill) for fill in (0, 1))
        for own, name in wanted.items():
            if own in zeros and own in ones and torch.equal(zeros[own], ones[own]):
                values[name] = zeros[own]
    return values


def _initialised(network: nn.Module, prefix: str, module: nn.Module, names: list[str], fill: int) -> dict[str, Tensor]:
    """Return buffers of a copy of a module after its own initialisation; they were filled with a number before."""
    twin = copy.copy(module)
    twin._parameters, twin._buffers = dict(module._parameters), dict(module._buffers)
    for name in names:
        twin._buffers[name] = torch.full_like(module.get_buffer(name), fill, device="cpu")
    parts = prefix.split(".") if prefix else []
    owners: list[Any] = [network.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        torch.manual_seed(fill)
        if callable(own := getattr(twin, "init_non_persistent_buffers", None)):
            own()
        elif model := next((owner for owner in owners if callable(getattr(owner, "_init_weights", None))), None):
            model._init_weights(twin)
    found = {name: twin._buffers.get(name) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None and tensor.device.type == "cpu"}
