"""Statistics of hidden units of a merged network without batch norms, set to those of its parents."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym.networks.modes import evaluating

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SMALLEST = 1e-12  # variance of a unit, relative to the largest of its layer, below which it is constant


def repair(
    network: nn.Module,
    parents: Sequence[nn.Module],
    batches: Iterable[Sequence[Tensor]],
    shares: Callable[[str], Sequence[float]],
) -> list[str]:
    """Rescale and shift the units of each hidden layer so that they have the mean and the deviation of the parents.

    The means and standard deviations of a unit before its activation are averaged over the parents. The corrections are
    folded into weights and biases; units of layers without a bias keep their mean. Layers are linear layers and
    convolutions that are called once, without the last one called, and without layers that share their weight.

    Args:
        network: The merged network, in evaluation mode. Its weights are changed.
        parents: The networks that were merged, with units in its order. Not changed.
        batches: Batches that begin with the inputs; read once. Batches of one size give each input the same weight.
        shares: Returns the share of each parent for the name of a weight; their sum is 1.

    Returns:
        The names of the changed layers, in calling order.

    Raises:
        ValueError: If the network has no such layer, or there are no batches.

    References:
        Jordan et al. (2023), "REPAIR: REnormalizing Permuted Activations for Interpolation Repair", arXiv:2211.08403,
        section 4. Corrections follow layer by layer in one pass, as each batch is corrected by its own statistics.
    """
    names: list[str] = []
    targets = [_Statistics() for _ in parents]
    own = _Statistics()
    with torch.no_grad(), evaluating(network):
        for inputs, *_ in batches:
            names = names or _hidden_layers(network, inputs)
            if not names:
                raise ValueError(
                    "recalibrate needs batch norms, or hidden linear layers or convolutions that are called once; the "
                    "network has none of them, so leave it out."
                )
            goals: dict[str, tuple[Tensor, Tensor]] = {}
            for parent, found in zip(parents, targets, strict=True):
                with evaluating(parent):
                    found.collect(parent, names, inputs)
            for name in names:
                goals[name] = _averaged([found.last[name] for found in targets], shares(f"{name}.weight"))
            own.collect(network, names, inputs, goals)
        if not names:
            raise ValueError("recalibrate needs data, but there are no batches.")
        for name in names:
            goal = _averaged([found.pooled(name) for found in targets], shares(f"{name}.weight"))
            _fold(network.get_submodule(name), *own.pooled(name), *goal)
    return names


class _Statistics:
    """Means and variances of units over batches.

    Attributes:
        last: For each layer, mean and variance in the last batch. Shapes ``[units]``, float64.
    """

    def __init__(self) -> None:
        self.last: dict[str, tuple[Tensor, Tensor]] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self._count: dict[str, int] = {}

    def collect(
        self,
        network: nn.Module,
        names: Sequence[str],
        inputs: Tensor,
        goals: dict[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Run a network on a batch, and correct each layer to the goals before the next one runs."""

        def hook(name: str) -> Callable[..., Tensor | None]:
            def seen(module: Any, _inputs: object, output: Tensor) -> Tensor | None:
                axis = _axis(module, output)
                rows = output.movedim(axis, 0).flatten(1).double()
                mean, variance = rows.mean(1), rows.var(1, unbiased=False)
                self.last[name] = mean, variance
                sums = self._sums.setdefault(name, [torch.zeros_like(mean), torch.zeros_like(mean)])
                sums[0] += rows.sum(1)
                sums[1] += rows.square().sum(1)
                self._count[name] = self._count.get(name, 0) + rows.shape[1]
                if goals is None:
                    return None
                factor, added = _correction(mean, variance, *goals[name], biased=module.bias is not None)
                shape = [-1 if own == axis % output.ndim else 1 for own in range(output.ndim)]
                return output * factor.to(output.dtype).view(shape) + added.to(output.dtype).view(shape)

            return seen

        with ExitStack() as hooks:
            for name in names:
                handle = network.get_submodule(name).register_forward_hook(hook(name))
                hooks.callback(handle.remove)
            network(inputs)

    def pooled(self, name: str) -> tuple[Tensor, Tensor]:
        """Return mean and variance of a layer's units over all batches."""
        count, (total, squares) = self._count[name], self._sums[name]
        mean = total / count
        return mean, (squares / count - mean.square()).clamp_min(0)


def _averaged(rows: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the averages of means and of standard deviations, from pairs of means and variances."""
    means = torch.stack([weight * mean for weight, (mean, _) in zip(weights, rows, strict=True)])
    deviations = torch.stack([weight * variance.sqrt() for weight, (_, variance) in zip(weights, rows, strict=True)])
    return means.sum(0), deviations.sum(0)


def _axis(module: Any, output: Tensor) -> int:
    """Return the axis of the units of a layer's output."""
    return -1 if isinstance(module, nn.Linear) else output.ndim - module.weight.ndim + 1


def _correction(
    mean: Tensor, variance: Tensor, goal_mean: Tensor, goal: Tensor, *, biased: bool
) -> tuple[Tensor, Tensor]:
    """Return factor and summand of each unit; constant units keep their factor."""
    moving = variance > _SMALLEST * variance.max().clamp_min(1e-300)
    factor = torch.where(moving, goal / variance.clamp_min(1e-300).sqrt(), 1.0)
    return factor, goal_mean - factor * mean if biased else torch.zeros_like(mean)


def _fold(module: Any, mean: Tensor, variance: Tensor, goal_mean: Tensor, goal: Tensor) -> None:
    """Put the correction of a layer into its weight and bias."""
    factor, added = _correction(mean, variance, goal_mean, goal, biased=module.bias is not None)
    weight = module.weight
    weight.copy_(weight.double() * factor.view(-1, *[1] * (weight.ndim - 1)))
    if module.bias is not None:
        module.bias.copy_(module.bias.double() * factor + added)


def _hidden_layers(network: nn.Module, inputs: Tensor) -> list[str]:
    """Return the layers that can be corrected, in calling order."""
    places: dict[nn.Module, str] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        if isinstance(module, _LAYERS):
            places.setdefault(module, name)
    owners: dict[int, int] = {}
    for module in network.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    calls: list[nn.Module] = []
    with ExitStack() as hooks:
        for module in places:
            handle = module.register_forward_hook(lambda own, _inputs, _output: calls.append(own))
            hooks.callback(handle.remove)
        network(inputs)
    return [places[own] for own in calls[:-1] if calls.count(own) == 1 and owners[id(own.weight)] == 1]
