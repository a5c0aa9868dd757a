"""Interpolation in weight space: linear paths, weight averages, and the loss barrier along a path."""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from lightning_sym._checks import (
    as_list,
    check_batches,
    check_counts_alike,
    check_integers,
    check_pair,
    is_finite,
)
from lightning_sym._distributed import Batches, device_of, moved, rank, run_on, summed, together, wide
from lightning_sym.networks.batch_norm import batch_norms, recalibrate_batch_norm
from lightning_sym.networks.modes import batch_loss, evaluating, for_loss
from lightning_sym.symmetry.tracing.graph.capture import copied

LabelledBatches: TypeAlias = Iterable[Sequence[Tensor]]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
PART = 1 << 18  # numbers of a tensor that are converted at a time


def interpolate(a: nn.Module, b: nn.Module, t: float) -> nn.Module:
    """Return a network on the linear path through two networks.

    Its floating (or complex) parameters and buffers are ``(1 - t) a + t b``, running statistics included. For batch
    norms these are not the statistics of the new weights, see
    :func:`lightning_sym.networks.recalibrate_batch_norm`. At ``t = 0`` and ``t = 1`` they are bitwise those of ``a``
    and ``b``, and everywhere where both hold the same infinity, as masks do.

    Args:
        a: The network at ``t = 0``, which also determines the rest (integer buffers, dtype, device, ``requires_grad``,
            train mode, classes).
        b: The network at ``t = 1``, of the same structure, shapes and dtypes; it may be on another device.
        t: Any finite number, unitless; values outside of [0, 1] extrapolate.

    Returns:
        A new network, a deep copy of ``a`` with other values. Neither argument changes.

    Raises:
        ValueError: If ``t`` is not finite or the networks differ in structure, shape or dtype; the message names the
            first difference.

    Example:
        >>> a, b = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> with torch.no_grad():
        ...     _ = a.weight.fill_(1.0), b.weight.fill_(3.0)
        >>> interpolate(a, b, 0.25).weight.item()
        1.5
    """
    if not math.isfinite(t):
        raise ValueError(f"t must be finite, got {t}.")
    check_same_structure(a, b)
    result = copied(a)
    line(a, b, result)(t)
    return result


def average(networks: Sequence[nn.Module], weights: Sequence[float] | None = None) -> nn.Module:
    """Return the weighted average of networks.

    Args:
        networks: At least one, all of the same structure, shapes and dtypes. As for :func:`interpolate`, tensors
            without floating-point values are those of the first network.
        weights: One number for each network, unitless, finite, with a sum other than 0; they are divided by their
            sum. None: equal weights.

    Returns:
        A new network. Sums are accumulated in double precision, so that the average of equal networks equals them up
        to rounding in double precision.

    Raises:
        ValueError: If there are no networks, they differ, or the weights do not match.
    """
    networks = as_list("networks", networks)
    means = mean_tensors(networks, weights)
    result, weighted = copied(networks[0]), dict(networks[0].named_parameters())
    with torch.no_grad():
        for (name, mean), target in zip(means, _floating(result).values(), strict=True):
            if name in weighted and not is_finite(mean):
                raise ValueError(f"{name} has values that are not finite in some network; leave that one out.")
            target.copy_(mean)
    return result


def mean_tensors(networks: Sequence[nn.Module], weights: Sequence[float] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weighted averages of floating parameters and buffers, one by one, as :func:`average` does.

    Args:
        networks: At least one.
        weights: One number for each.

    Returns:
        Pairs of first name and average, in the dtype and on the device of the first network's tensor.

    Raises:
        ValueError: As for :func:`average`; raised at the call.
    """
    given = [1.0] * len(networks) if weights is None else list(map(float, weights))
    if len(given) != len(networks):
        raise ValueError(f"weights must have one number for each of {len(networks)} networks, got {len(given)}.")
    total = math.fsum(given)
    if not all(map(math.isfinite, given)) or total == 0:
        raise ValueError(f"weights must be finite with a sum other than 0, got {given}.")
    for network in networks[1:]:
        check_same_structure(networks[0], network)
    first, *others = [_floating(network) for network in networks]

    shares = [weight / total for weight in given]
    return (
        (name, weighted_sum([target, *(tensors[name] for tensors in others)], shares)) for name, target in first.items()
    )


def weighted_sum(tensors: Sequence[Tensor], coefficients: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    """Return the weighted sum of tensors, accumulated in double precision and rounded once.

    Args:
        tensors: At least one, floating or complex, of one shape; moved to the device of the first.
        coefficients: One number for each, unitless.
        dtype: Dtype of the result; None for that of the first tensor.

    Returns:
        Shape of each tensor. Beyond the result, memory for :data:`PART` numbers is used.
    """
    first = tensors[0]
    result = torch.empty(first.shape, dtype=dtype or first.dtype, device=first.device)
    exact = torch.promote_types(result.dtype, wide(first.device))
    flat, into = [tensor.detach().reshape(-1) for tensor in tensors], result.view(-1)
    for part in parts(first.numel()):
        total = flat[0][part].to(exact, copy=True).mul_(coefficients[0])
        for coefficient, tensor in zip(coefficients[1:], flat[1:], strict=True):
            total.add_(tensor[part].to(first.device, exact), alpha=coefficient)
        into[part] = (
            total if (kept := _kept([own[part] for own in flat])) is None else torch.where(kept, flat[0][part], total)
        )
    return result


def _kept(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a mask of the places where tensors hold one infinity, as masks do; None if the first one is finite."""
    first = tensors[0]
    if is_finite(first):
        return None
    same = [tensor.to(first) == first for tensor in tensors[1:]]
    return functools.reduce(torch.logical_and, same, first.isinf())


def parts(numbers: int, unit: int = 1) -> Iterator[slice]:
    """Yield slices of a flat tensor, each of about :data:`PART` numbers, so that temporary copies stay small.

    Args:
        numbers: Size of the tensor.
        unit: Numbers that stay together; every slice has a multiple of them.
    """
    step = max(1, unit, PART // max(1, unit) * unit)
    return (slice(start, min(start + step, numbers)) for start in range(0, numbers, step))


@dataclass(frozen=True, eq=False)
class CurveLosses:
    """Loss and accuracy at several points in weight space.

    Attributes:
        loss: Mean loss over all samples (of the cross-entropy, over all labels but ignored ones) at each point. Shape
            ``[T]``, float64, on the CPU.
        accuracy: Fraction of samples classified correctly, of those with a label, in [0, 1]. Shape ``[T]``, float64,
            on the CPU. None if the data are no classification.
        samples: Number of samples, over all ranks.
        recalibrated: Whether batch norm statistics were recomputed at every point.
    """

    loss: Tensor
    accuracy: Tensor | None
    samples: int
    recalibrated: bool


@dataclass(frozen=True, eq=False)
class Barrier(CurveLosses):
    r"""Loss and accuracy on a path between two networks, and their excess over the endpoints.

    Two definitions are in use, which agree if both endpoints are equally good. Both are positive where the path is
    worse than its endpoints, also for the accuracy:

    - relative to linear interpolation between the endpoints,
      :math:`\max_t [L(t) - ((1-t) L(0) + t L(1))]`: ``loss_barrier``, ``accuracy_barrier``. Non-negative, as the
      maximum includes the endpoints;
    - relative to their mean, :math:`\max_t L(t) - (L(0) + L(1)) / 2` (Ainsworth et al. (2023), "Git Re-Basin",
      arXiv:2209.04836): ``loss_barrier_mean``, ``accuracy_barrier_mean``. At least half the difference of the
      endpoints.

    Attributes:
        t: Points, equally spaced in [0, 1], endpoints included. Shape ``[T]``, float64, on the CPU.
    """

    t: Tensor

    @property
    def loss_barrier(self) -> float:
        """Loss barrier relative to linear interpolation, in units of the loss (nats for the cross-entropy)."""
        return self._above_line(self.loss)

    @property
    def loss_barrier_mean(self) -> float:
        """Loss barrier relative to the mean of the endpoints, in units of the loss."""
        return self._above_mean(self.loss)

    @property
    def accuracy_barrier(self) -> float | None:
        """Accuracy barrier relative to linear interpolation, a fraction; None without accuracy."""
        return None if self.accuracy is None else self._above_line(-self.accuracy)

    @property
    def accuracy_barrier_mean(self) -> float | None:
        """Accuracy barrier relative to the mean of the endpoints, a fraction; None without accuracy."""
        return None if self.accuracy is None else self._above_mean(-self.accuracy)

    @property
    def loss_ends(self) -> tuple[float, float]:
        """The losses of both endpoints."""
        return self.loss[0].item(), self.loss[-1].item()

    @property
    def accuracy_ends(self) -> tuple[float, float] | None:
        """The accuracies of both endpoints; None without accuracy."""
        return None if self.accuracy is None else (self.accuracy[0].item(), self.accuracy[-1].item())

    def _above_line(self, values: Tensor) -> float:
        return float((values - ((1 - self.t) * values[0] + self.t * values[-1])).max())

    @staticmethod
    def _above_mean(values: Tensor) -> float:
        return float(values.max() - (values[0] + values[-1]) / 2)


class LossOptions(TypedDict, total=False):
    """Options of measurements of losses at points in weight space.

    Attributes:
        loss: Maps outputs and labels of a batch to their mean loss, a scalar. None: the cross-entropy in nats. A
            warning is given if samples have unequal weights (class weights; labels that losses other than the
            cross-entropy ignore), as the mean over batches then depends on their sizes.
        recalibrate: Recompute batch norm statistics. ``"auto"``: if the networks have batch norms with running
            statistics. True: raise an error if there are none. False: interpolate statistics like weights.
        recalibration_data: Data for batch norm statistics: batches of images, or tuples and lists that begin with
            images; read once for every point. None: the data of the loss. Pass training data in batches of equal size,
            as large as fit; see :func:`lightning_sym.networks.recalibrate_batch_norm`.
        progress: Show a progress bar (on rank 0).
    """

    loss: Loss | None
    recalibrate: bool | Literal["auto"]
    recalibration_data: Batches | None
    progress: bool


def barrier(
    a: nn.Module,
    b: nn.Module,
    data: LabelledBatches,
    *,
    points: int = 25,
    **options: Unpack[LossOptions],
) -> Barrier:
    """Measure loss and accuracy along the linear path between two networks.

    Networks are evaluated in eval mode without gradients. The weights of each point are written into one scratch
    network. Batch norm statistics are recomputed at every point, **endpoints included**, so that all points are
    comparable; the endpoints then differ slightly from the given networks. Without this, collapsed variances of
    activations between the endpoints dominate the barrier.

    With several processes (``torch.distributed`` initialised) every rank passes its share of the data, without
    duplicates, and all get the same result. All ranks raise an error of one rank.

    Args:
        a: The network at ``t = 0``. Not changed. Its device is used.
        b: The network at ``t = 1``, of the same structure. Not changed.
        data: Batches ``(images, labels)``, read once for every point: a list or a loader, not an iterator, and
            without random augmentation. Batches are moved to the network's device.
        points: Number of points, >= 2, equally spaced, endpoints included.
        options: See :class:`LossOptions`.

    Returns:
        Losses and barriers. Accuracies exist if labels are integers of shape ``[B]`` and outputs have shape
        ``[B, C]`` with ``C >= 2``, for any loss.

    Raises:
        ValueError: If the networks differ, an argument is out of its range, ``data`` is empty, is an iterator or has
            batches of another form, or a loss is not finite; the message names the point.

    References:
        Frankle et al. (2020), "Linear Mode Connectivity and the Lottery Ticket Hypothesis", arXiv:1912.05671, for the
        barrier; Jordan et al. (2023), "REPAIR", arXiv:2211.08403, for the statistics.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> barrier(net, net, [(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))], points=5).loss_barrier
        0.0
    """
    check_integers(2, points=points)
    check_same_structure(a, b)
    t = torch.linspace(0, 1, points, dtype=torch.float64)
    scratch = copied(a)
    curve = curve_losses(scratch, line(a, b, scratch), t.tolist(), data, **options)
    return Barrier(curve.loss, curve.accuracy, curve.samples, curve.recalibrated, t)


def curve_losses(
    network: nn.Module,
    place: Callable[[float], object],
    points: Sequence[float],
    data: LabelledBatches,
    **options: Unpack[LossOptions],
) -> CurveLosses:
    """Measure loss and accuracy at many points in weight space, as :func:`barrier` does on a linear path.

    Args:
        network: A scratch network. It returns with the weights of the last point, and its own train and eval modes.
        place: Writes the weights of a point into ``network`` in place.
        points: Arguments of ``place``, at least one, in the order of the result.
        data: As for :func:`barrier`.
        options: See :class:`LossOptions`.

    Returns:
        Loss and accuracy at each point.

    Raises:
        ValueError: As for :func:`barrier`, or if there are no points.
    """
    return split_losses(network, place, points, {"": data}, **options)[""]


def split_losses(
    network: nn.Module,
    place: Callable[[float], object],
    points: Sequence[float],
    splits: Mapping[str, LabelledBatches],
    *,
    loss: Loss | None = None,
    recalibrate: bool | Literal["auto"] = "auto",
    recalibration_data: Batches | None = None,
    progress: bool = False,
) -> dict[str, CurveLosses]:
    """Measure loss and accuracy on several data sets at many points, with statistics recomputed once per point.

    Args:
        network: As for :func:`curve_losses`.
        place: As for :func:`curve_losses`.
        points: As for :func:`curve_losses`.
        splits: Data by name, each as for :func:`barrier`; at least one.
        loss: See :class:`LossOptions`.
        recalibrate: See :class:`LossOptions`.
        recalibration_data: See :class:`LossOptions`; None for the first of the splits.
        progress: See :class:`LossOptions`.

    Returns:
        Loss and accuracy at each point, by name.

    Raises:
        ValueError: As for :func:`barrier`, or if there are no points.
    """
    for name, given in (("point", points), ("split", splits)):
        if len(given) == 0:
            raise ValueError(f"{name}s must have at least one {name}, got none.")
    norms = batch_norms(network)
    if recalibrate not in (True, False, "auto"):
        raise ValueError(f"recalibrate must be True, False or 'auto', got {recalibrate!r}.")
    if recalibrate is True and not norms:
        raise ValueError(
            "recalibrate=True needs batch norms with running statistics, but the network has none; use "
            "recalibrate='auto'."
        )
    recalibrated = bool(norms) and recalibrate is not False
    statistics_data: Batches = next(iter(splits.values())) if recalibration_data is None else recalibration_data
    for name, data in splits.items():
        _check_rereadable(f"data of {name}" if name else "data", data)
    _check_rereadable("recalibration_data", statistics_data)
    rows: dict[str, list[Tensor]] = {name: [] for name in splits}
    with torch.no_grad(), evaluating(network):
        for t in track(points, description="points on the curve", disable=not progress or rank() > 0):
            place(t)
            if recalibrated:
                try:
                    recalibrate_batch_norm(network, statistics_data)
                except ValueError as error:
                    raise ValueError(f"At t = {t:g}: {error}") from error
            for name, data in splits.items():
                first = not rows[name]
                rows[name].append(_sums(network, data, F.cross_entropy if loss is None else loss, check=first))
    return {name: _means(torch.stack(own), points, recalibrated) for name, own in rows.items()}


def output_change(before: nn.Module, after: nn.Module, data: LabelledBatches) -> float:
    r"""Measure the relative difference between the outputs of two networks.

    .. math:: \sqrt{\textstyle\sum_x \|f'(x) - f(x)\|^2 \,/\, \sum_x \|f(x)\|^2}

    Both networks are evaluated in eval mode without gradients. With several processes every rank passes its share of
    the data, and all get the same result.

    Args:
        before: The network f. Not changed.
        after: The network f', on the device of f. Not changed.
        data: Batches ``(inputs, targets)``; only inputs are used. They are moved to the networks' device.

    Returns:
        Relative difference, unitless: 0 for equal functions (up to rounding), 0.03 for a change of 3 %; infinite if
        only the outputs of f are zero.
    """
    device = device_of(before)
    sums = torch.zeros(2, dtype=wide(device), device=device)

    def run() -> None:
        for inputs, _ in data:
            old, new = (run_on(network, inputs).to(sums) for network in (before, after))
            sums[0] += (new - old).square().sum()
            sums[1] += old.square().sum()

    with torch.no_grad(), evaluating(before), evaluating(after):
        together(run)
    change, size = summed(sums).cpu().double()
    return float((change / size).sqrt()) if change else 0.0


def _means(rows: Tensor, points: Sequence[float], recalibrated: bool) -> CurveLosses:
    """Return the means over the samples of all ranks, from the sums of :func:`_sums` at each point: ``[T, 7]``."""
    loss_sum, correct, classified, count, content, weight, labelled = summed(rows).cpu().double().unbind(1)
    if count[0] == 0:
        raise ValueError("data has no samples; pass at least one batch.")
    losses = loss_sum / weight
    for t, value in zip(points, losses.tolist(), strict=True):
        if not math.isfinite(value):
            raise ValueError(
                f"The loss at t = {t:g} is {value}; check weights and data for values that are not finite, and for "
                "batches in which all labels are ignored."
            )
    same = (content - content[0]).abs() <= torch.finfo(rows.dtype).eps ** 0.4 * content[0]
    if not (same & (count == count[0])).all() and rank() == 0:
        warnings.warn(
            "The data change from point to point, and the losses with them; pass a list, or a loader without random "
            "augmentation that does not leave out other samples in every pass (shuffle with drop_last).",
            stacklevel=2,
        )
    # A single batch on any rank without classes excludes the accuracy.
    accuracy = correct / labelled if torch.equal(classified, count) else None
    return CurveLosses(losses, accuracy, int(count[0]), recalibrated)


def line(a: nn.Module, b: nn.Module, target: nn.Module) -> Callable[[float], None]:
    """Return a function that writes the point at ``t`` of the linear path from ``a`` to ``b`` into a third network.

    Args:
        a: The network at ``t = 0``.
        b: The network at ``t = 1``; checked before by :func:`check_same_structure`.
        target: A deep copy of ``a``, which is not ``a`` itself.

    Returns:
        The function. It runs one in-place ``lerp`` per tensor and copies at the endpoints, where ``lerp`` changes -0 to
        0 and propagates infinities of the other endpoint as NaN.
    """
    ends = _floating(b)
    # Moved to the target's device once, not at every point.
    paths = []
    for (name, start), out in zip(_floating(a).items(), _floating(target).values(), strict=True):
        paths.append((start, end := ends[name].to(start.device), out, _kept([start, end])))

    def place(t: float) -> None:
        with torch.no_grad():
            for start, end, out, kept in paths:
                if t == 0:
                    out.copy_(start)
                elif t == 1:
                    out.copy_(end)
                else:
                    torch.lerp(start, end, t, out=out)
                    if kept is not None:
                        out.copy_(torch.where(kept, start, out))

    return place


def check_same_structure(a: nn.Module, b: nn.Module) -> None:
    """Check that two networks have the same modules, parameters, buffers and ties, with the same shapes and dtypes.

    Args:
        a: The first network.
        b: The second network.

    Raises:
        ValueError: If not; the message names the first difference.
    """

    def parts(network: nn.Module) -> dict[str, str]:
        found = {
            f"module {name!r}" if name else "whole network": f"a {type(module).__module__}.{type(module).__qualname__}"
            for name, module in network.named_modules(remove_duplicate=False)
        }
        own: dict[Tensor, str] = {}
        parameters = (("parameter", *named) for named in network.named_parameters(remove_duplicate=False))
        buffers = (("buffer", *named) for named in network.named_buffers(remove_duplicate=False))
        for kind, name, tensor in (*parameters, *buffers):
            if is_lazy(tensor):
                raise ValueError(f"The {kind} {name!r} is not initialised; run both networks once before.")
            first = own.setdefault(tensor, name)
            tie = "" if first == name else f", tied to {first!r}"
            shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            found[f"{kind} {name!r}"] = f"of shape {shape} and dtype {dtype}{tie}"
        return found

    first, second = parts(a), parts(b)
    for name in (*first, *second):
        if name not in first or name not in second:
            which = "first" if name in first else "second"
            raise ValueError(
                f"The networks differ in structure: only the {which} has the {name}; pass two of one architecture."
            )
        if first[name] != second[name]:
            raise ValueError(
                f"The networks differ: the {name} is {first[name]} in the first and {second[name]} in the second; pass "
                "two of one architecture."
            )


def _floating(network: nn.Module) -> dict[str, Tensor]:
    """Return the interpolated parameters and buffers, each once."""
    return {
        name: tensor.detach()
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
        if tensor.is_floating_point() or tensor.is_complex()
    }


def _check_rereadable(name: str, data: object) -> None:
    check_batches(data, name)
    if isinstance(data, Iterator):
        raise ValueError(
            f"{name} is read once for every point, and this iterator can be read only once; pass a list or a loader."
        )


def _sums(network: nn.Module, data: LabelledBatches, loss: Loss, *, check: bool) -> Tensor:
    """Return this rank's sums: loss, correct, classified, all samples, content, weight, labelled ones. Shape ``[7]``.

    A check warns of losses that batches of other sizes would change.
    """
    device = device_of(network)
    unequal, ignored = "", _ignored(loss)
    sums = torch.zeros(7, dtype=wide(device), device=device)

    def run() -> None:
        nonlocal unequal
        for batch in data:
            check_pair(batch)
            images, labels = (moved(tensor, device) for tensor in batch[:2])
            size = len(images)
            if size == 0:
                continue
            outputs, labels = for_loss((run_on(network, images), labels))
            value = batch_loss(loss, outputs, labels)
            if check and ignored is None and not unequal:
                unequal = _unequal(loss, outputs, labels)
            integer = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
            counts, weight = torch.ones_like(labels, dtype=torch.bool), torch.tensor(size, device=device)
            if integer and ignored is not None:
                counts = labels != ignored
                weight = counts.sum()
            sums[0] += torch.where(weight > 0, value.to(sums) * weight, 0.0)
            sums[5] += weight
            if integer and labels.shape == outputs.shape[:1] and outputs.ndim == 2 and outputs.shape[1] > 1:
                counts = counts & (labels >= 0)
                sums[1] += ((outputs.argmax(1) == labels) & counts).sum()
                sums[6] += counts.sum()
                sums[2] += size
            sums[3] += size
            rows = images.reshape(size, -1)
            rows = (rows if rows.is_complex() else rows.float()).abs()  # in any order and batches, but not mirrored
            sums[4] += (rows * torch.linspace(1, 2, rows.shape[1], device=device)).sum(dtype=sums.dtype)

    together(run)
    if unequal and rank() == 0:
        warnings.warn(f"The mean over batches of other sizes would be another number: {unequal}", stacklevel=2)
    return sums


def _ignored(loss: Loss) -> int | None:
    """Return the label that a loss ignores; None if it is unknown."""
    given: dict[str, Any] = {}
    function: Any = loss
    if isinstance(function, functools.partial) and not function.args:
        function, given = function.func, function.keywords
    if isinstance(function, nn.CrossEntropyLoss) and function.weight is None and function.reduction == "mean":
        return function.ignore_index
    known = function is F.cross_entropy and given.keys() <= {"ignore_index", "label_smoothing"}
    return given.get("ignore_index", -100) if known else None


def _unequal(loss: Loss, outputs: Any, labels: Tensor) -> str:
    """Return why a loss is no mean over samples with equal weights; empty if it is one, or fails on single samples."""

    def mean(rows: Tensor) -> Tensor:
        two = rows.repeat_interleave(2).to(labels.device)  # a loss may drop the axis of a batch of one
        return loss(tree_map(lambda tensor: tensor[two], outputs), labels[two])

    try:
        check_counts_alike(mean, len(labels), targets=labels)
    except ValueError as error:
        return str(error) if str(error).startswith("loss must be the mean") else ""
    except (RuntimeError, IndexError, TypeError):
        return ""
    return ""
