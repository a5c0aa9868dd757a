"""GPTQ: matrices are rounded so that their outputs on data change least, one layer after another."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym._checks import not_finite
from lightning_sym._distributed import inputs_for
from lightning_sym.orbit import rounding
from lightning_sym.symmetry.tracing.graph.capture import copied

_DAMPING = 0.01  # of the mean of the diagonal, added to it, as in the authors' code


def round_by_gptq(
    network: nn.Module,
    bits: int,
    granularity: rounding.Granularity = "tensor",
    *,
    data: Any,
    activations: int | None = None,
) -> nn.Module:
    r"""Round the matrices and kernels of a network so that the outputs of each one on data change little.

    GPTQ (Frantar et al. 2022, arXiv 2210.17323). Layers are rounded in the order of their calls, on inputs X of the
    layers that are already rounded. Within a matrix, columns are rounded one after another, in the order of falling
    inputs; the columns that remain make up for the error. Steps are those of :func:`round_to_nearest`.

    A row d of differences has the error :math:`d X X^\top d^\top`. A row with a smaller error after rounding to nearest
    is rounded to nearest. So are matrices that no linear map reads as a whole (embeddings, ``nn.MultiheadAttention``),
    and transposed convolutions.

    Args:
        network: Not changed.
        bits: Number of bits of a weight, >= 2.
        granularity: Whether each tensor has one range, or each output channel its own.
        data: One batch, or an iterable of batches, as :func:`minimize_on_orbit` takes them.
        activations: As for :func:`round_to_nearest`, with ranges from the data; the weights are rounded first.

    Returns:
        A changed copy.

    Raises:
        ValueError: If the number of bits is below 2, the granularity is unknown, or the data are missing.

    Example:
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> len(round_by_gptq(network, bits=3, data=torch.randn(20, 5))[0].weight.unique()) <= 7
        True
    """
    rounding.check_rounding(bits, granularity, activations)
    result = copied(network)
    batches = inputs_for(result, rounding.batches_in(data))
    axes, parameters, done = rounding.matrices_of(result), dict(result.named_parameters()), set[str]()
    with torch.no_grad():
        while found := input_grams(result, batches, without=done, first=True):
            ((name, grams),) = found.items()
            done.add(name)
            _round(parameters[name], axes[name], bits, granularity, grams)
        for name in axes.keys() - done:
            _round(parameters[name], axes[name], bits, granularity)
    return result if activations is None else rounding.round_inputs(result, activations, batches)


def input_grams(
    network: nn.Module, data: Sequence[Any], *, without: Collection[str] = (), first: bool = False
) -> dict[str, Tensor]:
    """Compute the Gram matrices of the inputs that the rows of each matrix or kernel multiply on data.

    Args:
        network: Not changed; it runs in evaluation mode.
        data: Batches.
        without: Names of weights to leave out.
        first: Whether to compute that of the first weight that is called only.

    Returns:
        By the name of the weight, in the order of calls; float64, of shape (groups, inputs, inputs), with the axes of a
        kernel's inputs in their order. Weights that are not read as a whole, and transposed convolutions, are missing.
    """
    axes = rounding.matrices_of(network)
    names = {_place(own): name for name, own in network.named_parameters() if name in axes and name not in without}
    found: dict[str, Tensor] = {}

    def see(inputs: Tensor, weight: Tensor | None, axis: int, again: Callable[..., Any]) -> Tensor:
        name = None if weight is None else names.get(_place(weight))
        if weight is None or name is None or (first and found and name not in found):
            return inputs
        if weight.ndim == 2:
            columns = inputs.movedim(axis, -1).flatten(0, -2)[None]
        elif axes[name] == 0:
            inner = weight.shape[1:]
            groups, size = inputs.shape[axis] // inner[0], math.prod(inner)
            kernel = torch.eye(size).to(weight).view(size, *inner).repeat(groups, *(1 for _ in inner))
            unfolded = again(inputs, kernel).movedim(axis, -1).unflatten(-1, (groups, size))
            columns = unfolded.movedim(-2, 0).flatten(1, -2)
        else:
            return inputs
        columns = columns.double()
        gram = columns.mT @ columns
        found[name] = found[name] + gram if name in found else gram
        return inputs

    rounding.show_inputs(network, data, see)
    if broken := not_finite(found):
        raise ValueError(f"squared inputs of {broken[0]} on the data exceed float64; scale the data down.")
    return found


def _place(weight: Tensor) -> tuple[int, ...]:
    """Return numbers that two tensors share only if these are the same part of memory."""
    return weight.data_ptr(), *weight.shape, *weight.stride()


def _round(
    parameter: Tensor, axis: int, bits: int, granularity: rounding.Granularity, grams: Tensor | None = None
) -> None:
    """Round a matrix or kernel in place, without Gram matrices to nearest."""
    whole = parameter.movedim(axis, 0)
    rows = whole.double().flatten(1)
    largest = rows.abs().amax(1, keepdim=True)
    if granularity == "tensor":
        largest = largest.amax().expand_as(largest)
    if grams is None:
        result = rounding.rounded(rows, bits, largest=largest)
    else:
        parts = zip(rows.chunk(len(grams)), largest.chunk(len(grams)), grams, strict=True)
        result = torch.cat([rounded_rows(own, bits, top, gram) for own, top, gram in parts])
    parameter.copy_(result.view(whole.shape).movedim(0, axis))


def rounded_rows(rows: Tensor, bits: int, largest: Tensor, gram: Tensor) -> Tensor:
    """Round rows by GPTQ, or to nearest where that has the smaller error.

    Args:
        rows: Of shape (rows, inputs), float64.
        bits: Number of bits, >= 2.
        largest: The range of each row, of shape (rows, 1).
        gram: Gram matrix of the inputs, of shape (inputs, inputs), float64.

    Returns:
        Multiples of the steps, in the same shape.
    """
    diagonal = gram.diagonal()
    order, damping = diagonal.argsort(descending=True, stable=True), _DAMPING * diagonal.mean()
    damped = gram[order][:, order] + torch.eye(len(gram)).to(gram) * torch.where(damping > 0, damping, 1.0)
    # Row j of the factor tells how the columns after j make up for an error of column j.
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    chosen = rows[:, order]
    for column in range(len(gram)):
        own = chosen[:, column : column + 1].clone()
        chosen[:, column : column + 1] = rounding.rounded(own, bits, largest=largest)
        error = (own - chosen[:, column : column + 1]) / factor[column, column]
        chosen[:, column + 1 :] -= error * factor[column, column + 1 :]
    chosen, nearest = chosen[:, order.argsort()], rounding.rounded(rows, bits, largest=largest)
    errors = [(((own - rows) @ gram) * (own - rows)).sum(1, keepdim=True) for own in (chosen, nearest)]
    return torch.where(errors[0] < errors[1], chosen, nearest)
