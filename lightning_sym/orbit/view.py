"""A network at one point of its orbit, as objectives see it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_sym.networks.modes import for_loss
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import first_names
from lightning_sym.symmetry.views import NamedTensors


class View(NamedTensors):
    """A network at one point of its orbit: its parameters by name, which it runs with.

    As a mapping, it is the mapping of the parameters, so that functions of these take it as well.

    Attributes:
        module: The network at the start. In evaluation mode and float64; do not change its tensors.
        parameters: The parameters here, by their first names; float64, with gradients.
        buffers: The buffers here, by their first names; statistics of batch norms move along.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        places: Mapping[str, str] | None = None,
    ) -> None:
        self.module, self.parameters, self.buffers, self._names = module, parameters, buffers, parameters
        self._places = first_names(module) if places is None else places

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[name]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the network here, in evaluation mode.

        Args:
            arguments: Positional arguments; a single :class:`Call` holds all.
            keywords: Keyword arguments.

        Returns:
            The network's outputs.
        """
        call = arguments[0] if arguments and isinstance(arguments[0], Call) else Call(arguments, keywords)
        held = {**self.parameters, **self.buffers}
        placed = {place: held[first] for place, first in self._places.items()}
        with _DifferentiableStatistics():
            return functional_call(self.module, placed, call.positional, dict(call.keywords), tie_weights=False)

    def output(self, batch: Any) -> Tensor:
        """Run the network on a batch of data, and return the first of its outputs that count.

        Args:
            batch: Inputs, a pair of inputs and targets, a mapping of keyword arguments, or a :class:`Call`.
        """
        call = call_of(batch)
        return call.counted(self(call))[0]

    def replaced(self, parameters: Mapping[str, Tensor]) -> "View":
        """Return the view with other values of some parameters.

        Args:
            parameters: By name.

        Raises:
            KeyError: If the network has no parameter of such a name.
        """
        for name in parameters:
            self.parameters[name]
        return View(self.module, {**self.parameters, **parameters}, self.buffers, self._places)


class _DifferentiableStatistics(TorchFunctionMode):
    """Lets batch norms in evaluation mode differentiate by their statistics, which also move along an orbit."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function is functional.batch_norm:
            return _batch_norm(*args, **given)
        if function is torch.batch_norm:
            inputs, weight, bias, mean, variance, training, momentum, epsilon, _ = args
            return _batch_norm(inputs, mean, variance, weight, bias, training, momentum, epsilon)
        return function(*args, **given)


def _batch_norm(
    inputs: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute a batch norm, in evaluation mode by operations that differentiate by its statistics."""
    if training or mean is None or variance is None:
        return functional.batch_norm(inputs, mean, variance, weight, bias, training, momentum, eps)
    shape = [1, -1, *(1 for _ in inputs.shape[2:])]
    gain = (variance + eps).rsqrt()
    result = (inputs - mean.reshape(shape)) * (gain if weight is None else gain * weight).reshape(shape)
    return result if bias is None else result + bias.reshape(shape)


def call_of(batch: Any) -> Call:
    """Return the call that runs a network on a batch; targets are left out.

    Args:
        batch: Inputs, a pair of inputs and targets, a mapping of keyword arguments, or a :class:`Call`.
    """
    if isinstance(batch, Call):
        return batch
    if isinstance(batch, Mapping):
        return Call((), {name: own for name, own in batch.items() if name not in ("labels", "targets")})
    return Call.of(batch[0] if isinstance(batch, (tuple, list)) else batch)


def targets_of(batch: Any) -> Tensor:
    """Return the targets of a batch.

    Args:
        batch: A pair of inputs and targets, or a mapping with ``labels`` or ``targets``.

    Raises:
        ValueError: If it has none.
    """
    if isinstance(batch, Call):
        found = None
    elif isinstance(batch, Mapping):
        found = batch.get("labels", batch.get("targets"))
    else:
        found = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if found is None:
        raise ValueError("the batch holds no targets; expected pairs of inputs and targets.")
    target: Tensor = for_loss(found)
    return target
