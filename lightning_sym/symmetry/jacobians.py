"""The Jacobian of a network's outputs by its parameters, and whether its derivatives are those of the outputs."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, functionalize, vjp, vmap
from torch.utils import _pytree as pytree

from lightning_sym.networks.modes import PassedGradients
from lightning_sym.symmetry.tracing.graph.calls import Call

# Minimum number of different inputs of each length.
_INPUTS = 48
# Divisor of the number of inputs where a network processes them one by one.
_FASTER = 4
# Number of directions along which derivatives are tested, relative length of a step, and of the difference allowed.
_DIRECTIONS, _STEP, _UNLIKE = 16, 1e-6, 1e-2
# Errors of torch where a function has no batched derivative.
_REFUSALS = (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError)


def jacobian_at(network: nn.Module, call: Call, more: int, generator: torch.Generator) -> Tensor:
    """Return rows of the Jacobian at noisy inputs: random sums of outputs, differentiated by all parameters.

    Returns:
        At least `more` times as many rows as there are parameters. Shape (rows, parameters), float64.

    Raises:
        RuntimeError: If the network cannot be differentiated.
    """
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    outputs, tensors = outputs_at(network, call)

    def pulled(tensors: Sequence[Tensor], sums: Tensor, function: Callable[..., Tensor]) -> Tensor:
        pull = vjp(lambda weights: function(weights, tensors), parameters)[1]
        return _beside(vmap(pull)(sums)[0].values())

    values = outputs(parameters, tensors).abs()
    scale = torch.where(values > 0, values, values.max()).clamp(min=1e-300)  # sizes of outputs may differ widely
    size, count = len(values), sum(parameter.numel() for parameter in parameters.values())
    number = math.ceil(max(_INPUTS * more, 1.1 * count * math.sqrt(more) / size))
    given = [varied(tensor, number, generator) for tensor in tensors]
    each = min(size, math.ceil((count + 16) * math.sqrt(more) / number))
    sums = torch.randn(number, each, size, generator=generator, dtype=torch.float64) / scale
    for function in (outputs, functionalize(outputs)):  # the latter avoids in-place operations, and is slower
        with contextlib.suppress(*_REFUSALS):
            found: Tensor = vmap(pulled, (0, 0, None), randomness="same")(given, sums, function)
            return found.flatten(0, 1)
    weights = {name: parameter.requires_grad_() for name, parameter in parameters.items()}
    blocks = []
    for index in range(math.ceil(number / _FASTER)):  # one call at a time
        made = outputs(weights, [tensor[index] for tensor in given])
        own = torch.randn(min(_FASTER * each, size), size, generator=generator, dtype=torch.float64) / scale
        # Parameters that are not read get a single zero for all rows.
        parts = torch.autograd.grad(made, [*weights.values()], own, is_grads_batched=True, materialize_grads=True)
        whole = zip(parts, weights.values(), strict=True)
        blocks.append(_beside(part.expand(len(own), *weight.shape) for part, weight in whole))
    return torch.cat(blocks)


def varied(tensor: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return noisy copies of a tensor, or other integers in its range. Shape (count, ...)."""
    shape = (count, *tensor.shape)
    if tensor.is_floating_point():
        finite = tensor[tensor.isfinite()]
        size = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
        drawn = torch.randn(count, *[1] * tensor.ndim, generator=generator, dtype=torch.float64).exp()
        return tensor + (size or 1.0) * drawn * torch.randn(shape, generator=generator, dtype=torch.float64)
    if tensor.dtype == torch.bool or not tensor.numel():
        return tensor.expand(shape)
    return torch.randint(int(tensor.min()), int(tensor.max()) + 1, shape, generator=generator, dtype=tensor.dtype)


def has_its_derivative(network: nn.Module, call: Call) -> bool:
    """Test whether derivatives predict small changes of the outputs; a function may define others."""
    generator, (outputs, tensors) = torch.Generator().manual_seed(4), outputs_at(network, call)
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    numbers = []
    for given in zip(*(varied(tensor, _DIRECTIONS, generator) for tensor in tensors), strict=True):
        along = {
            name: _STEP * own.abs().mean() * torch.randn(own.shape, generator=generator, dtype=own.dtype)
            for name, own in parameters.items()
        }
        ends = [outputs({name: own + by * along[name] for name, own in parameters.items()}, given) for by in (-1, 1)]
        sums = torch.randn(ends[0].shape, generator=generator, dtype=torch.float64)
        if (slopes := slopes_of(outputs, parameters, given, sums)) is None:
            return True
        predicted = sum(float((slopes[name] * own).sum()) for name, own in along.items())
        numbers.append((float(sums @ (ends[1] - ends[0])) / 2, predicted))
    pairs = torch.tensor(numbers, dtype=torch.float64)
    found, predicted = pairs[pairs.isfinite().all(1)].T
    return bool((found - predicted).norm() <= _UNLIKE * torch.maximum(found.norm(), predicted.norm()))


def moves_outputs(network: nn.Module, entries: Tensor, calls: Sequence[Call]) -> bool:
    """Test whether other values of some entries change outputs; the derivative of a step does not show it."""
    generator = torch.Generator().manual_seed(5)
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    others, begin = {}, 0
    for name, own in parameters.items():
        mask = entries[begin : begin + own.numel()].view(own.shape)
        size = float(own.square().mean().sqrt()) or 1.0
        others[name] = torch.where(mask, 3 * size * torch.randn(own.shape, generator=generator, dtype=own.dtype), own)
        begin += own.numel()
    for call in calls:
        outputs, tensors = outputs_at(network, call)
        one, two = (outputs(weights, tensors).detach() for weights in (parameters, others))
        if bool(((one - two).abs() > 1e-9 * one.abs().max()).any()):
            return True
    return False


def outputs_at(network: nn.Module, call: Call) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return the flat outputs as a function of parameters and of the tensors of a call, and these tensors."""
    buffers, (leaves, structure) = dict(network.named_buffers()), pytree.tree_flatten(call)

    def outputs(weights: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> Tensor:
        given = iter(tensors)
        own: Call = pytree.tree_unflatten(
            [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        )
        with PassedGradients():
            found = functional_call(network, buffers | dict(weights), own.positional, dict(own.keywords))
        counted = (leaf for leaf in own.counted(found) if leaf.is_floating_point())
        return torch.cat([torch.nan_to_num(leaf, 0.0, 0.0, 0.0).flatten() for leaf in counted])

    return outputs, [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def slopes_of(
    outputs: Callable[..., Tensor], parameters: dict[str, Tensor], given: Sequence[Tensor], sums: Tensor
) -> dict[str, Tensor] | None:
    """Return the derivatives of a sum of outputs by all parameters; None where in-place operations hide them."""
    for function in (outputs, functionalize(outputs)):
        with contextlib.suppress(*_REFUSALS):
            found: dict[str, Tensor] = vjp(lambda weights, f=function: f(weights, given), parameters)[1](sums)[0]
            return found
    with contextlib.suppress(*_REFUSALS), torch.enable_grad():
        weights = {name: own.clone().requires_grad_() for name, own in parameters.items()}
        made = torch.autograd.grad(sums @ outputs(weights, given), [*weights.values()], materialize_grads=True)
        return dict(zip(weights, made, strict=True))
    return None


def _beside(parts: Iterable[Tensor]) -> Tensor:
    """Concatenate the rows of all parameters."""
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)
