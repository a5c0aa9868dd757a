"""Statistics of batch norms measured anew, after the weights in front of them were changed.

A network whose weights were interpolated, merged, stitched or rounded has batch norms whose running statistics
belong to other weights. :func:`recalibrate_batch_norm` measures them again.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from lightning_sym._distributed import Batches, device_of, gathered, moved, ranks, summed, together, wide
from lightning_sym._text import unknown
from lightning_sym.networks.modes import evaluating


class NotFiniteStatisticsError(ValueError):
    """Statistics of a batch norm that were measured are infinite or NaN."""


def batch_norms(network: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norms of a network that have running statistics.

    Args:
        network: Any module. It may be a batch norm itself, whose name is then ``""``.

    Returns:
        ``BatchNorm1d``, ``2d``, ``3d`` and ``SyncBatchNorm`` modules by their name in the network, in the order of
        ``named_modules``; one that has several names appears once. Those with ``track_running_stats=False`` are
        left out.

    Raises:
        ValueError: If a batch norm is lazily initialised and was not called yet.
    """
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            if is_lazy(module.running_mean):
                raise ValueError(f"The batch norm {name!r} is not initialised yet; call the network once before.")
            found[name] = module
    return found


def recalibrate_batch_norm(
    network: nn.Module,
    batches: Batches | Callable[[], Batches],
    *,
    exact: bool = False,
    modules: Iterable[str] | None = None,
) -> list[str]:
    r"""Measure the running statistics of batch norms anew, in place.

    By default one pass with the batch norms in train mode and everything else in eval mode: the statistics are reset
    and become the mean over the batches of each batch's mean and (unbiased) variance. Every batch counts alike, so
    leave out a short last one, and use the largest batches that fit: a deeper layer sees inputs that were normalised
    with the statistics of one batch, which is off by several percent at 32 images and below one at 512.

    ``exact=True`` takes one pass for each batch norm instead, in the order in which they are called, all in eval
    mode: each gets the mean and the population variance (divided by the count) of its inputs over all data, given
    the statistics of those before. In eval mode the network is then, on these data, what it is in train mode with
    all of them in a single batch, however they are batched.

    With several processes (``torch.distributed`` initialised; to be called on every rank, each with its own share of
    the data) all ranks get the same statistics, those that one process gets from all batches: the numbers of batches
    may differ and be 0. An error on one rank is raised on all.

    Args:
        network: The module that is called with each batch. It gets its own train and eval modes and the batch norms'
            momentum back, and after an error all statistics too. Weights are not touched.
        batches: Inputs, or a function that returns them. Of a batch that is a tuple or list, the first entry is
            used. Batches are moved to the network's device. Exact mode reads them once for each batch norm (and one
            batch more), so it needs a list, a loader or a function, the same data each time: nothing shuffled into
            other ``drop_last`` remainders, no random augmentation.
        exact: See above.
        modules: Names of the batch norms to recalibrate, as in :func:`batch_norms`; None for all. The others stay
            in eval mode with the statistics that they have.

    Returns:
        Names of the batch norms that were recalibrated. Those that no batch reached are left as they were and left
        out. Empty, without reading any data, if there is nothing to recalibrate.

    Raises:
        ValueError: If there are no batches, none reaches a batch norm, statistics are not finite, ``modules`` has an
            unknown name, a batch is no tensor, exact mode cannot read the batches twice or finds a batch norm that
            is called twice for one batch, ``SyncBatchNorm`` layers would wait for ranks that have fewer batches, or
            the network is wrapped in ``DistributedDataParallel``.

    Note:
        Of ``SyncBatchNorm`` the default mode uses the batch of all ranks together, as in training, so the ranks need
        equally many batches; exact mode does not synchronise within a batch. Exact mode ends forward passes early by
        an exception and finds inputs by hooks, so a compiled network has to be given uncompiled.

    References:
        Jordan et al. (2023), "REPAIR: REnormalizing Permuted Activations for Interpolation Repair", arXiv:2211.08403.
        Resetting before is as in ``torch.optim.swa_utils.update_bn``, which has neither ranks nor exact mode.

    Example:
        >>> norm = nn.BatchNorm1d(1, dtype=torch.float64)
        >>> recalibrate_batch_norm(nn.Sequential(norm), [torch.tensor([[1.0], [5.0]], dtype=torch.float64)], exact=True)
        ['0']
        >>> norm.running_mean, norm.running_var
        (tensor([3.], dtype=torch.float64), tensor([4.], dtype=torch.float64))
    """
    if isinstance(network, nn.parallel.DistributedDataParallel):
        raise ValueError("network is wrapped for DDP, whose forward overwrites statistics; pass network.module.")
    selected = _select(batch_norms(network), modules)
    if not selected:
        return []
    if exact and isinstance(batches, Iterator):
        raise ValueError(
            "exact=True reads the batches once for each batch norm, and this iterator can be read only once; "
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
        if name not in found:
            raise ValueError(unknown("batch norm", name, found))
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
    """Return the mean over updates of a floating tensor, and the latest value of any other.

    The ``avg_fn`` for Lightning's ``WeightAveraging`` (or ``torch.optim.swa_utils.AveragedModel(use_buffers=True)``)
    where a network has batch norms. The default averages integer buffers too, such as ``num_batches_tracked``: on a CPU
    the mean is cut to an integer, and on CUDA the second update ends with an error.

    Args:
        averaged: The mean of the values before. Any shape and dtype.
        current: The next value. Same shape, dtype and device.
        count: How many values ``averaged`` is the mean of, >= 1.

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
    seen = 0

    def run() -> None:
        nonlocal seen
        for images in _inputs(network, batches):
            network(images)
            seen += 1

    together(run)
    device = device_of(network)
    # Of each batch norm its own count: a rank without batches, or a layer called twice, has another one.
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
    """Check that no rank would wait in a SyncBatchNorm for others that have run out of batches."""
    synchronised = [name for name, module in selected.items() if isinstance(module, nn.SyncBatchNorm)]
    if ranks() == 1 or not synchronised:
        return
    lengths = gathered(len(source) if isinstance(source, Sized) else None)
    if len(set(lengths)) > 1:
        raise ValueError(
            f"SyncBatchNorm {synchronised[0]!r} needs as many batches on every rank, got {lengths}; "
            "leave some out or use exact=True."
        )


# ---- one pass for each batch norm


class _ReachedError(Exception):
    """Ends a forward pass at the batch norm whose input is wanted."""


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
            for images in _inputs(network, source()):
                network(images)
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
                f"The batch norm {name!r} is called {order.count(name)} times for one batch, so that its inputs "
                "depend on its own statistics; use exact=False."
            )
    return order


def _moments(network: nn.Module, module: _BatchNorm, source: Callable[[], Batches]) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and population variance of a batch norm's inputs over all batches and ranks.

    Two parts with counts n and m, means a and b and sums of squared deviations S and T together have the count n + m,
    the mean a + (b - a) m / (n + m), and S + T + (b - a)^2 n m / (n + m). Unlike the sum of squares, this does not
    cancel where the mean is large.

    Returns:
        Mean and variance, shape ``[C]``, and the number of batches, scalar; in double precision where the device has
        it, on the device of the network.
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
            for images in _inputs(network, source()):
                with suppress(_ReachedError):
                    network(images)

    together(run)
    sums = summed(torch.cat([torch.stack([count, count.new_tensor(seen)]), mean * count]))
    total, batches_seen, joint = sums[0], sums[1], sums[2:] / sums[0]
    squares = summed(squares + (mean - joint).square() * count)
    return joint, squares / total, batches_seen


# ---- batches and ranks


def _inputs(network: nn.Module, batches: Batches) -> Iterator[Tensor]:
    """Yield the inputs of every batch on the network's device."""
    device = device_of(network)
    for batch in batches:
        images = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if not isinstance(images, Tensor):
            raise ValueError(
                f"batches must give tensors, or tuples or lists that start with one, got {type(batch).__name__}."
            )
        yield moved(images, device)


def _check_some(batches: float) -> None:
    if batches == 0:
        raise ValueError("There are no batches to recalibrate batch norms with; pass at least one.")
