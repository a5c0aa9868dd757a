"""Reparametrizations by hand that users know, as elements of the traced group; and pruning by Wanda."""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sym._checks import check_numbers
from lightning_sym._distributed import inputs_for, on_device_of
from lightning_sym.orbit import rounding
from lightning_sym.orbit.directions import OrbitDirections
from lightning_sym.orbit.gptq import input_grams
from lightning_sym.symmetry import Element, Symmetry
from lightning_sym.symmetry.group.ranges import Ranges, Slices
from lightning_sym.symmetry.moves.moved import require_weights
from lightning_sym.symmetry.proof import double, double_copy
from lightning_sym.symmetry.tracing.graph.capture import copied

_SWEEPS = 1000
_ALPHAS = tuple(number / 20 for number in range(20))
_STILL = 1e-13  # largest change of a logarithm in the last sweep


def cross_layer_equalization(symmetry: Symmetry, network: nn.Module) -> Element:
    r"""Equalise, for each unit, the range of its incoming and of its outgoing weights by scales.

    Cross-layer equalisation (Nagel et al. 2019, arXiv 1906.04721): the scale of a unit is
    :math:`\sqrt{r_\text{out} / r_\text{in}}` with the largest magnitudes r of its weights. Pairs of layers are those
    of the traced group; passes over all of them repeat until nothing changes. Biases do not count. Scales without
    matrices on one side (gains of norms, weights before batch norms) stay: fold these first.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.

    Returns:
        The element.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If the network is not of the traced architecture, or has no weights.

    Example:
        >>> from lightning_sym.symmetry import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        >>> symmetry = trace_symmetry(network, torch.randn(2, 5))
        >>> equal = symmetry.act(cross_layer_equalization(symmetry, network), network)
        >>> torch.allclose(equal[0].weight.abs().amax(1), equal[2].weight.abs().amax(0))
        True
    """
    require_weights(symmetry, network)
    ranges = _ranges(symmetry, network, cells=True)
    for _ in range(_SWEEPS):
        largest = 0.0
        for members in ranges.classes:
            change = ranges.equalised(members)
            ranges.logs[members] += change
            largest = max(largest, float(np.abs(change).max(initial=0.0)))
        if largest <= _STILL:
            break
    return OrbitDirections(symmetry).element(ranges.coordinates())


def smooth_quant(symmetry: Symmetry, network: nn.Module, data: Any, alpha: float = 0.5) -> Element:
    r"""Move the ranges of activations into the weights that read them, by scales.

    SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): channel j of the activations is divided by
    :math:`s_j = \max|X_j|^\alpha / \max|W_j|^{1-\alpha}`, and the weights that read it are multiplied. The division is
    done by the gains of a norm, or by the weights before a ReLU, as the traced group allows.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.
        data: One batch, or an iterable of batches, as :func:`minimize_on_orbit` takes them.
        alpha: How much of the range moves, in [0, 1].

    Returns:
        The element.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If the network is not of the traced architecture, the data are missing, or alpha is outside [0, 1].
    """
    check_numbers("in [0, 1]", alpha=alpha)
    require_weights(symmetry, network)
    exact = double_copy(network)
    batches = on_device_of(exact, double(rounding.batches_in(data)))
    largest = rounding.largest_inputs(exact, batches)
    ranges = _ranges(symmetry, network, cells=False)
    inputs, weights = np.zeros(len(ranges.logs)), np.zeros(len(ranges.logs))
    exponents = np.zeros(len(ranges.logs))
    for each in ranges.slices:
        own = largest.get(each.name.partition("[")[0])
        if own is None or each.slot.axes != (each.columns,) or len(own) != each.slot.size:
            continue
        sizes = ranges.largest(each)
        np.maximum.at(inputs, each.generator, np.where(each.exponent < 0, own.cpu().numpy()[each.position], 0.0))
        np.maximum.at(weights, each.generator, np.where(each.exponent < 0, sizes[each.position], 0.0))
        np.maximum.at(exponents, each.generator, -each.exponent)
    used = (inputs > 0) & (weights > 0) & (exponents > 0)
    used &= np.isin(np.arange(len(used)), np.concatenate([np.zeros(0, int), *ranges.classes]))
    logs = np.log(inputs[used]) * alpha - np.log(weights[used]) * (1 - alpha)
    ranges.logs[used] = -logs / exponents[used]
    return OrbitDirections(symmetry).element(ranges.coordinates())


def awq(
    symmetry: Symmetry, network: nn.Module, data: Any, bits: int = 4, granularity: rounding.Granularity = "tensor"
) -> Element:
    r"""Scale up the weights that read large activations, by as much as lowers the error of their rounding most.

    The search of AWQ (Lin et al. 2023, arXiv 2306.00978): channel j of the activations is divided by
    :math:`s_j = (\mathrm{mean}|X_j|)^\alpha`, divided by the geometric mean of the largest and the least of them.
    Of 20 values of alpha from 0 to 0.95, each class of scales takes the one with the least squared error of the
    outputs of the rounded weights that read these activations, after the earlier classes. Errors of the weights before
    do not count. As for :func:`smooth_quant`, the traced group tells which weights read the same activations, and which
    absorb the division; heads are scaled, too.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.
        data: One batch, or an iterable of batches, as :func:`minimize_on_orbit` takes them.
        bits: Number of bits of a weight, >= 2.
        granularity: Whether each tensor has one range, or each output channel its own.

    Returns:
        The element.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If the network is not of the traced architecture, the data are missing, the number of bits is below
            2, or the granularity is unknown.
    """
    rounding.check_rounding(bits, granularity, None)
    require_weights(symmetry, network)
    exact = double_copy(network)
    batches = on_device_of(exact, double(rounding.batches_in(data)))
    means, grams, axes = rounding.mean_inputs(exact, batches), input_grams(exact, batches), rounding.matrices_of(exact)
    tensors = symmetry.tensors(exact)
    ranges = Ranges(symmetry.structure, tensors, axes, cells=True)
    readers = []
    for each in ranges.slices:
        whole = each.name.partition("[")[0]
        if whole in grams and each.slot.axes == (each.columns,) and len(means[whole]) == each.slot.size:
            readers.append((each, whole))
    for members in ranges.classes:
        used = np.zeros(len(ranges.logs), bool)
        used[members] = True
        sizes, exponents, own = np.zeros(len(used)), np.zeros(len(used)), []
        for each, whole in readers:
            at = used[each.generator] & (each.exponent < 0)
            np.maximum.at(sizes, each.generator[at], means[whole].cpu().numpy()[each.position[at]])
            np.maximum.at(exponents, each.generator[at], -each.exponent[at])
            own += [(each, grams[whole], axes[whole])] * bool(at.any())
        used &= sizes > 0
        if not used.any():
            continue
        logs = np.log(sizes[used])
        logs = (logs - (logs.max() + logs.min()) / 2) / exponents[used]
        errors = {}
        for alpha in _ALPHAS:
            ranges.logs[used] = -alpha * logs
            errors[alpha] = sum(
                _error(
                    tensors[each.name].to(gram), ranges, each, bits, axis if granularity == "channel" else None, gram
                )
                for each, gram, axis in own
            )
        ranges.logs[used] = -min(errors, key=lambda alpha: errors[alpha]) * logs
    return OrbitDirections(symmetry).element(ranges.coordinates())


def _error(weight: Tensor, ranges: Ranges, each: Slices, bits: int, axis: int | None, gram: Tensor) -> float:
    """Return the squared error of the outputs of a rounded weight under the current scales."""
    moved = weight * torch.from_numpy(ranges.factor(each.name)).to(weight)
    scale = torch.from_numpy(ranges.factor(each.name, each.slot)).to(weight)
    rows = ((rounding.rounded(moved, bits, axis) - moved) / scale).movedim(1 - each.columns, 0).flatten(1)
    parts = zip(rows.chunk(len(gram)), gram, strict=True)
    return sum(float(((own @ each_gram) * own).sum().detach()) for own, each_gram in parts)


def prune_by_wanda(network: nn.Module, data: Any, fraction: float, *, keep: Collection[str] = ()) -> nn.Module:
    r"""Set the weights of least :math:`|w_{ij}| \, \|x_j\|_2` to 0, within each row of each matrix.

    Wanda (Sun et al. 2023, arXiv 2306.11695). Here :math:`\|x_j\|_2` is the norm of all inputs that the weight
    multiplies on the data; those of a kernel's entries lie at different pixels. Matrices that no linear map reads
    (embeddings) are pruned by magnitude within their rows, so that the fraction is that of
    :func:`prune_by_magnitude`. The paper keeps the first and the last layer; name these in `keep` for that. All norms
    are those of the unpruned network.

    Args:
        network: Not changed.
        data: One batch, or an iterable of batches, as :func:`minimize_on_orbit` takes them.
        fraction: Part of the weights of each row that becomes 0, in [0, 1).
        keep: Names of parameters that stay.

    Returns:
        A changed copy.

    Raises:
        ValueError: If the fraction is outside [0, 1), the data are missing, or there is no such matrix to keep.

    Example:
        >>> pruned = prune_by_wanda(nn.Linear(10, 6), torch.randn(4, 10), 0.7)
        >>> (pruned.weight == 0).sum(1).tolist()
        [7, 7, 7, 7, 7, 7]
    """
    check_numbers("in [0, 1)", fraction=fraction)
    result = copied(network)
    batches = inputs_for(result, rounding.batches_in(data))
    squares = rounding.squared_inputs(result, batches)
    axes = rounding.pruned_matrices(result, keep)
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if name in axes:
                scores = parameter.abs().double()
                if name in squares:
                    scores *= squares[name].sqrt()
                masks = torch.stack([rounding.kept(row, fraction) for row in scores.movedim(axes[name], 0)])
                parameter.mul_(masks.movedim(0, axes[name]))
    return result


def _ranges(symmetry: Symmetry, network: nn.Module, *, cells: bool) -> Ranges:
    return Ranges(symmetry.structure, symmetry.tensors(network), rounding.matrices_of(network), cells=cells)
