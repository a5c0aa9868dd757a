"""Checks of the arguments of `trace_symmetry`: the network and its example calls."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from lightning_sym._checks import is_finite, must_be_finite
from lightning_sym.symmetry.tracing.graph.calls import Call, arguments_of, check_arguments
from lightning_sym.symmetry.tracing.graph.capture import state_tensors
from lightning_sym.symmetry.tracing.graph.weightless import is_weightless

# Modules that hide the operations of others, by class.
_MADE_FROM_OTHERS = {
    "exported": "a program that torch.export made",
    "scripted": "a scripted or traced module of TorchScript, with hidden operations",
    "OptimizedModule": "a module that torch.compile made (it has the other as _orig_mod)",
    **dict.fromkeys(("DataParallel", "DistributedDataParallel"), "a wrapper for several devices (around its module)"),
}
# The options of `trace_symmetry`, which are not arguments of the network.
_OPTIONS = ("example_input", "more_examples", "affine", "check", "tolerance", "cuts", "output", "shifts")


def examples_of(
    network: nn.Module, given: Any, more: Sequence[Any], keywords: Mapping[str, Any], output: str | int | None
) -> list[Call]:
    """Return the example calls for tracing a network.

    Args:
        network: The network.
        given: An input, a tuple of positional arguments, or None if all arguments are keywords.
        more: Further inputs; a dictionary among them replaces the keywords, if there are any.
        keywords: Keyword arguments.
        output: The output that counts.

    Raises:
        TypeError: If a call holds no tensor, or does not fit.
        ValueError: If a tensor is empty.
    """
    if not isinstance(more, (list, tuple)):
        raise TypeError(f"more_examples must be a list of inputs, got {type(more).__name__}")
    calls = [Call.of(given, keywords, output)]
    for example in more:
        if keywords and isinstance(example, Mapping):
            calls.append(Call.of(given, example, output))
        else:
            calls.append(Call.of(example, {} if given is None else keywords, output))
    for call in calls:
        _check_example(network, call)
    return calls


def _check_example(network: nn.Module, example: Call) -> None:
    """Check that an example holds tensors, and that the network accepts it."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(example) if isinstance(t, Tensor)]
    if not tensors:
        given = ", ".join(type(value).__name__ for value in (*example.positional, *example.keywords.values()))
        raise TypeError(
            "the example input must be a tensor or a tuple with tensors, or keyword arguments of the network, got "
            f"{given or 'nothing'}; {type(network).__name__} takes {arguments_of(network)}"
        )
    if any(t.numel() == 0 for t in tensors):
        raise ValueError("the example input is empty; expected at least one sample")
    if any(t.is_meta for t in tensors) and not is_weightless(network):
        raise ValueError("the example input has no values (on meta), but the network has; expected one with values")
    check_arguments(network, example, _OPTIONS)


def check_network(network: nn.Module) -> None:
    """Check that a network's weights are traceable and finite.

    Raises:
        TypeError: If a parameter is complex or not floating.
        ValueError: If weights are parametrised, lazy or not finite, or a module is scripted.
    """
    for name, module in network.named_modules():
        kind = "exported" if "eval" in vars(module) else type(module).__name__
        if made := _MADE_FROM_OTHERS.get("scripted" if isinstance(module, torch.jit.ScriptModule) else kind):
            raise ValueError(f"{name or 'the network'} is {made}; expected the module that it was made from")
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(f"{name or 'the network'} was compiled in place; expected a module without compile()")
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"{name or 'the network'} has parametrised weights, computed from other tensors; remove the "
                "parametrisation first (torch.nn.utils.parametrize.remove_parametrizations)"
            )
        hooks = getattr(module, "_forward_pre_hooks", {}).values()
        if hook := next((h for h in hooks if type(h).__name__ in ("SpectralNorm", "WeightNorm")), None):
            kind = type(hook).__name__
            raise ValueError(
                f"{name or 'the network'} has weights that a {kind} hook computes before every forward; remove the "
                "hook first (torch.nn.utils.remove_spectral_norm or remove_weight_norm)"
            )
    states = state_tensors(network)
    for name, tensor in states.items():
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ValueError(f"{name} has no shape yet (a lazy module); run the network once on an example first")
    for name, parameter in network.named_parameters():
        if parameter.is_complex() or not parameter.is_floating_point():
            raise TypeError(f"{name} has dtype {parameter.dtype}; expected real floating-point parameters")
    weights = dict(network.named_parameters())
    for name, tensor in states.items():
        if must_be_finite(name, weights) and not is_finite(tensor):
            raise ValueError(f"{name} holds values that are not finite; expected finite weights and statistics")
