"""Recalibrate batch norm statistics after the weights before them have changed.

The running statistics of a network with interpolated, merged, stitched or rounded weights belong to other weights.
:func:`recalibrate_batch_norm` recomputes them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from lightning_sym._checks import check_batches, check_known, is_batch
from lightning_sym._distributed import Batches, device_of, gathered, ranks, run_on, summed, together, wide
from lightning_sym.networks.modes import evaluating


class NotFiniteStatisticsError(ValueError):
    """Recomputed batch norm statistics are infinite or NaN."""


class EqualBatches:
    """The batches of the size of the first one: batch norm statistics give every batch the same weight.

    Args:
        batches: Batches that begin with the inputs; they are read as often as these.
    """

    def __init__(self, batches: Iterable[Sequence[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Yield the batches in order."""
        size = None
        for batch in self._batches:
            size = size or len(batch[0])
            if len(batch[0]) == size:
                yield batch


def batch_norms(network: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norms of a network that have running statistics.

    Args:
        network: Any module. If it is a batch norm itself, its name is ``""``.

    Returns:
        ``BatchNorm1d``, ``2d``, ``3d`` and ``SyncBatchNorm`` modules by their name in the network, in the order of
        ``named_modules``; one with several names appears once. Those with ``track_running_stats=False`` are
        excluded.

    Raises:
            ValueError: If a batch norm is lazily initialised and has not been called.
    """
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            if is_lazy(module.running_mean):
                raise ValueError(f"The batch norm {name!r} is not initialised; run the network once before.")
            found[name] = module
    return found


def recalibrate_batch_norm(
    network: nn.Module,
    batches: Batches | Callable[[], Batches],
    *,
    exact: bool = False,
    modules: Iterable[str] | None = None,
) -> list[str]:
    r"""Recompute the running statistics of batch norms, in place.

    The default is one pass with the batch norms in train mode and the rest in eval mode. The statistics are reset and
    become the mean over the batches of each batch's mean and (unbiased) variance. Every batch has the same weight,
    and batches shorter than the first one, as a last one may be, are left out. Use the largest batches that fit. Deeper
    layers see inputs normalised with the statistics of one batch, which deviate by several percent at 32 images and by
    less than one at 512.

    ``exact=True`` takes one pass for each batch norm instead, in calling order, all in eval mode. Each receives the
    mean and the population variance (divided by the count) of its inputs over all data, given the statistics of those
    before. In eval mode the network then computes, on these data, what it computes in train mode with all data in a
    single batch.

    With several processes (``torch.distributed`` initialised; call it on every rank, each with its own share of the
    data) all ranks get the same statistics as one process with all batches. The numbers of batches may differ and be
    0. All ranks raise an error of one rank.

    Args:
        network: The module that is called with each batch. Its train and eval modes and the batch norms'
            momentum are restored, and after an error all statistics. Weights do not change.
        batches: Inputs, or a function that returns them; the first entry of a batch that is a tuple or list.
            Batches are moved to the network's device. Exact mode reads them once for each batch norm (and one
            batch more). It needs a list, a loader or a function, with the same data each time: no shuffling before
            ``drop_last``, no random augmentation.
        exact: See above.
        modules: Names of the batch norms to recalibrate, as in :func:`batch_norms`; None for all. The others stay
            in eval mode with their statistics.

    Returns:
        Names of the recalibrated batch norms. Batch norms that no batch reached are unchanged and excluded. Empty,
        without reading any data, if there are none to recalibrate.

    Raises:
        ValueError: If there are no batches, none reaches a batch norm, statistics are not finite, ``modules`` has an
            unknown name, a batch is no tensor, exact mode cannot read the batches twice or finds a batch norm
            called twice for one batch, ``SyncBatchNorm`` layers would wait for ranks with fewer batches, or
            the network is wrapped in ``DistributedDataParallel``.

    Note:
        In the default mode ``SyncBatchNorm`` uses the batch of all ranks together, as in training, so that the ranks
        need equally many batches, and none is left out; exact mode does not synchronise within a batch. Exact mode ends
        forward passes early by an exception and finds inputs by hooks: pass a compiled network uncompiled.

    References:
        Jordan et al. (2023), "REPAIR: REnormalizing Permuted Activations for Interpolation Repair", arXiv:2211.08403.
        The reset is that of ``torch.optim.swa_utils.update_bn``, which has neither ranks nor exact mode.

    Example:
        >>> norm = nn.BatchNorm1d(1, dtype=torch.float64)
        >>> recalibrate_batch_norm(nn.Sequential(norm), [torch.tensor([[1.0], [5.0]], dtype=torch.float64)], exact=True)
        ['0']
        >>> norm.running_mean, norm.running_var
        (tensor([3.], dtype=torch.float64), tensor([4.], dtype=torch.float64))
    """
    if isinstance(network, nn.parallel.DistributedDataParallel):
        raise ValueError("network is wrapped for DDP, and its forward overwrites statistics; pass network.module.")
    selected = _select(batch_norms(network), modules)
    if not selected:
        return []
    if exact and isinstance(batches, Iterator):
        raise ValueError(
            "exact=True reads the batches once for each batch norm, but this iterator can be read only once; "
            "pass a list, a loader or a function that returns the batches."
        )
    source = batches if callable(batches) else lambda: batches
    kept = {module: (module.momentum, _statistics(module)) for module in selected.values()}
    measured: list[str] = []
    try:
        with evaluating(network), torch.no_grad():
            found = (_measure_exactly if exact else _measure_in_one_pass)(network, selected, source)
        if not found:
            raise ValueError(f"No batch reached any of the batch norms {list(selected)}.")
        for name in found:
            _check_finite(name, selected[name])
        measured = found
    finally:
        for name, module in selected.items():
            momentum, statistics = kept[module]
            module.momentum = momentum
            if name not in measured:
                _write(module, *statistics)
    return measured


def _select(found: dict[str, _BatchNorm], names: Iterable[str] | None) -> dict[str, _BatchNorm]:
    if names is None:
        return found
    if isinstance(names, str):
        raise ValueError(f"modules must be a list of names, got the string {names!r}.")
    wanted = list(names)
    for name in wanted:
        check_known("batch norm", name, found)
    return {name: module for name, module in found.items() if name in wanted}


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _statistics(module: _BatchNorm) -> list[Tensor]:
    """Return copies of mean, variance and number of batches."""
    return [getattr(module, name).clone() for name in _STATISTICS]


@torch.no_grad()
def _write(module: _BatchNorm, mean: Tensor, variance: Tensor, batches: Tensor) -> None:
    for name, value in zip(_STATISTICS, (mean, variance, batches), strict=True):
        getattr(module, name).copy_(value)


def _check_finite(name: str, module: _BatchNorm) -> None:
    mean, variance, _ = _statistics(module)
    if not (mean.isfinite().all() and variance.isfinite().all()):
        raise NotFiniteStatisticsError(
            f"The recalibrated statistics of the batch norm {name!r} are not finite; "
            "look for weights or inputs that are not finite or very large."
        )


def float_average(averaged: Tensor, current: Tensor, count: Tensor | int) -> Tensor:
    """Return the running mean of a floating tensor, and the latest value of any other.

    Pass it as ``avg_fn`` to Lightning's ``WeightAveraging`` (or ``torch.optim.swa_utils.AveragedModel`` with
    ``use_buffers=True``) for networks with batch norms. The default averages integer buffers as well, such as
    ``num_batches_tracked``: on a CPU it truncates the mean, and on CUDA the second update fails.

    Args:
        averaged: The mean of the previous values. Any shape and dtype.
        current: The next value. Same shape, dtype and device.
        count: Number of values in ``averaged``, >= 1.

    Returns:
        Shape, dtype and device of ``averaged``.

    Example:
        >>> float_average(torch.tensor(1.0), torch.tensor(4.0), 2), float_average(torch.tensor(1), torch.tensor(4), 2)
        (tensor(2.), tensor(4))
    """
    if averaged.is_floating_point() or averaged.is_complex():
        return averaged + (current - averaged) / (count + 1)
    return current


# ---- one pass


def _measure_in_one_pass(
    network: nn.Module, selected: dict[str, _BatchNorm], source: Callable[[], Batches]
) -> list[str]:
    batches = source()
    _check_equal_lengths(selected, batches)
    for module in selected.values():
        module.reset_running_stats()
        module.momentum = None  # the cumulative mean
        module.training = True
    seen, shortest = 0, 1
    waits = ranks() > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in selected.values())

    def run() -> None:
        nonlocal seen, shortest
        for images in inputs_of(batches):
            if len(images) >= shortest or waits:
                run_on(network, images)
                shortest = shortest if seen or waits else len(images)
                seen += 1

    together(run)
    device = device_of(network)
    # The count belongs to the batch norm: a rank without batches, or a layer called twice, has a different one.
    parts = [torch.tensor([seen], dtype=wide(device), device=device)]
    for module in selected.values():
        mean, variance, count = (tensor.to(device, wide(device)) for tensor in _statistics(module))
        parts += [count[None], mean * count, variance * count]
    batches_seen, *sums = torch.split(summed(torch.cat(parts)), [len(part) for part in parts])
    _check_some(batches_seen.item())
    measured = []
    for (name, module), count, means, variances in zip(
        selected.items(), sums[::3], sums[1::3], sums[2::3], strict=True
    ):
        if count > 0:
            measured.append(name)
            if ranks() > 1:
                _write(module, means / count, variances / count, count[0])
    return measured


def _check_equal_lengths(selected: dict[str, _BatchNorm], source: object) -> None:
    """Check that no rank would wait in a SyncBatchNorm for others without further batches."""
    synchronised = [name for name, module in selected.items() if isinstance(module, nn.SyncBatchNorm)]
    if ranks() == 1 or not synchronised:
        return
    lengths = gathered(len(source) if isinstance(source, Sized) else None)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"SyncBatchNorm {synchronised[0]!r} needs equally many batches on every rank, got {lengths}; "
            "leave some out or use exact=True."
        )


# ---- one pass for each batch norm


class _ReachedError(Exception):
    """Ends a forward pass at the batch norm that receives the wanted input."""


def _measure_exactly(network: nn.Module, selected: dict[str, _BatchNorm], source: Callable[[], Batches]) -> list[str]:
    order = _call_order(network, selected, source)
    for name in order:
        _write(selected[name], *_moments(network, selected[name], source))
    return order


def _call_order(network: nn.Module, selected: dict[str, _BatchNorm], source: Callable[[], Batches]) -> list[str]:
    """Return the names of the batch norms in the order in which the first batch reaches them."""
    order: list[str] = []
    seen = False

    def run() -> None:
        nonlocal seen
        with ExitStack() as hooks:
            for name, module in selected.items():
                hooks.enter_context(module.register_forward_pre_hook(lambda *_, name=name: order.append(name)))
            for images in inputs_of(source()):
                run_on(network, images)
                seen = True
                break

    together(run)
    orders = [theirs for theirs, theirs_seen in gathered((order, seen)) if theirs_seen]
    _check_some(len(orders))
    order = orders[0]
    if any(theirs != order for theirs in orders):
        raise ValueError("The ranks call the batch norms in different orders; exact=True needs one order.")
    for name in order:
        if order.count(name) > 1:
            raise ValueError(
                f"The batch norm {name!r} is called {order.count(name)} times for one batch, and its inputs "
                "depend on its own statistics; use exact=False."
            )
    return order


def _moments(network: nn.Module, module: _BatchNorm, source: Callable[[], Batches]) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and population variance of a batch norm's inputs over all batches and ranks.

    Let two parts have counts n and m, means a and b, and sums of squared deviations S and T. Together they have count
    n + m, mean a + (b - a) m / (n + m), and sum S + T + (b - a)^2 n m / (n + m). Unlike the sum of squares, this does
    not cancel where the mean is large.

    Returns:
        Mean and variance, shape ``[C]``, and the number of batches, scalar; on the device of the network, in double
        precision if the device supports it.
    """
    device = device_of(network)
    count = torch.zeros((), dtype=wide(device), device=device)
    mean, squares = (torch.zeros(module.num_features, dtype=wide(device), device=device) for _ in range(2))
    seen = 0

    def add(module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal count, mean, squares, seen
        values: Tensor = args[0]  # [N, C, ...]
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        if size := values.numel() // values.shape[1]:
            variance, center = torch.var_mean(values, dim=[0, *range(2, values.ndim)], correction=0)
            total = count + size
            shift = center.to(mean) - mean
            squares = squares + variance.to(mean) * size + shift.square() * (count * size / total)
            mean = mean + shift * (size / total)
            count, seen = total, seen + 1
        raise _ReachedError

    def run() -> None:
        with module.register_forward_pre_hook(add):
            for images in inputs_of(source()):
                with suppress(_ReachedError):
                    run_on(network, images)

    together(run)
    sums = summed(torch.cat([torch.stack([count, count.new_tensor(seen)]), mean * count]))
    total, batches_seen, joint = sums[0], sums[1], sums[2:] / sums[0]
    squares = summed(squares + (mean - joint).square() * count)
    return joint, squares / total, batches_seen


# ---- batches and ranks


def inputs_of(batches: Batches) -> Iterator[Tensor]:
    """Yield the inputs of every batch."""
    check_batches(batches, "batches")
    for batch in batches:
        images = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if not is_batch(images):
            raise ValueError(
                f"batches must yield tensors, or tuples or lists that begin with one, got {type(batch).__name__}."
            )
        yield images


def _check_some(batches: float) -> None:
    if batches == 0:
        raise ValueError("There are no batches to recalibrate batch norms with; pass at least one.")
