"""One measure for many pairs of networks in one pass over the data, with caches per network."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sym.similarity.cka import CKA, Link, LinkedCKA
from lightning_sym.similarity.features import Axes, Features, check_pair, joint_products
from lightning_sym.similarity.procrustes import GroupProcrustes


class SimilarityMatrix(Metric):
    """A similarity of every layer of one network with every layer of another.

    Each layer's features are computed once, and so are quantities of a single layer, such as a kernel. Memory depends
    on the metric: for Procrustes measures a matrix of ``C1 * C2`` for each pair, independent of the data; for CKA the
    features of each layer (with ``minibatch`` three numbers per pair).

    Args:
        metric: A metric with ``update(x, y)``, which is copied for each pair. If pairs have different groups, one
            metric for each pair: a row for each layer of the first network.
        first: Names of layers of the first network, at least one.
        second: Names of layers of the second network; default the same.

    Raises:
        ValueError: If there are no layers, or the number of metrics differs from that of pairs.

    Example:
        >>> from lightning_sym.similarity import OrthogonalProcrustes
        >>> matrix = SimilarityMatrix(OrthogonalProcrustes(), ["low", "high"])
        >>> features = {"low": torch.rand(8, 5), "high": torch.rand(8, 3)}
        >>> matrix.update(features, features)
        >>> matrix.compute().shape
        torch.Size([2, 2])
    """

    full_state_update = False
    higher_is_better = True

    def __init__(
        self,
        metric: Metric | Sequence[Sequence[Metric]],
        first: Sequence[str],
        second: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.first, self.second = tuple(first), tuple(first if second is None else second)
        if not self.first or not self.second:
            raise ValueError("there are no layers to compare; name at least one of each network.")
        if isinstance(metric, CKA):
            self._axes = metric.axes
            joint = LinkedCKA(metric.alignment, self.first, self.second, [Link("x", "y")], short=False)
            self.metrics = nn.ModuleList([joint])
            return
        rows = [[metric] * len(self.second)] * len(self.first) if isinstance(metric, Metric) else metric
        if [len(row) for row in rows] != [len(self.second)] * len(self.first):
            raise ValueError(
                f"there are {[len(row) for row in rows]} metrics in the rows; expected {len(self.first)} rows of "
                f"{len(self.second)}."
            )
        self.metrics = nn.ModuleList(one.clone() for row in rows for one in row)

    def update(self, first: Mapping[str, Tensor | Features], second: Mapping[str, Tensor | Features]) -> None:
        """Add a batch of features of both networks, from the same inputs in the same order.

        Args:
            first: Features of the first network by layer name; other layers are ignored. ``Features`` cache quantities
                of a single layer, also for other matrices.
            second: Features of the second network.

        Raises:
            ValueError: If a layer is missing, or a metric rejects the features.
        """
        for names, features in ((self.first, first), (self.second, second)):
            missing = [name for name in names if name not in features]
            if missing:
                raise ValueError(f"the features of {', '.join(missing)} are missing; got {', '.join(features)}.")
        ours, theirs = [first[name] for name in self.first], [second[name] for name in self.second]
        kept: dict[Any, Features] = {}  # caches of single layers, shared by the pairs

        def shared(place: tuple[str, int], layer: Tensor | Features, axes: Axes) -> Features:
            if isinstance(layer, Features):
                return layer
            if (place, axes) not in kept:
                kept[place, axes] = Features(layer, axes, f"{place[0]} at layer {place[1]}")
            return kept[place, axes]

        if isinstance(self.metrics[0], LinkedCKA):
            given = zip("xy", (self.first, self.second), (ours, theirs), self._axes, strict=True)
            self.metrics[0].update(
                {
                    side: {
                        name: shared((side, i), f, axes) for i, (name, f) in enumerate(zip(names, found, strict=True))
                    }
                    for side, names, found, axes in given
                }
            )
            return
        together: list[tuple[GroupProcrustes, tuple[Features, Features]]] = []
        for metric, ((i, x), (j, y)) in zip(
            self._each(), itertools.product(enumerate(ours), enumerate(theirs)), strict=True
        ):
            if isinstance(metric, GroupProcrustes):
                pair = shared(("x", i), x, metric.axes[0]), shared(("y", j), y, metric.axes[1])
                check_pair(*pair)
                together.append((metric, pair))
            else:
                metric.update(x, y)
        for (metric, pair), products in zip(together, joint_products([pair for _, pair in together]), strict=True):
            metric.update(*pair, products)

    def compute(self) -> Tensor:
        """Return the similarities. Shape ``[layers of the first, layers of the second]``, float64.

        ``torchmetrics`` returns a single number without axes.
        """
        values = [torch.as_tensor(metric.compute()).double().cpu() for metric in self._each()]
        return torch.stack(values).view(len(self.first), len(self.second))

    def reset(self) -> None:
        """Reset the metrics."""
        super().reset()
        for metric in self._each():
            metric.reset()

    def _each(self) -> list[Metric]:
        return [metric for metric in self.metrics if isinstance(metric, Metric)]


class PopulationSimilarity(nn.Module):
    """A similarity of all layers of all linked networks.

    Equals a :class:`SimilarityMatrix` for each link, but kernels are computed once per layer and network, and features
    are stored per network rather than per link.

    Args:
        metric: As for :class:`SimilarityMatrix`.
        first: Names of the layers of networks that are first in links.
        second: Names of the layers of networks that are second in links.
        links: The pairs of networks.

    Raises:
        ValueError: If there are no links, or as for :class:`SimilarityMatrix`.

    Example:
        >>> features = {name: {"low": Features(torch.rand(8, 5))} for name in "abc"}
        >>> similarity = PopulationSimilarity(CKA("max"), ["low"], ["low"], [Link("a", "b"), Link("a", "c")])
        >>> similarity.update(features)
        >>> similarity.compute().shape
        torch.Size([2, 1, 1])
    """

    def __init__(
        self,
        metric: Metric | Sequence[Sequence[Metric]],
        first: Sequence[str],
        second: Sequence[str],
        links: Sequence[Link],
    ) -> None:
        super().__init__()
        if not links:
            raise ValueError("there are no links; name at least one pair of networks.")
        self.shape = len(links), len(first), len(second)
        self.links = tuple(links)
        self.parts = nn.ModuleList(
            [LinkedCKA(metric.alignment, first, second, links)]
            if isinstance(metric, CKA)
            else [SimilarityMatrix(metric, first, second) for _ in links]
        )

    def update(self, features: Mapping[str, Mapping[str, Features]], order: Tensor | None = None) -> None:
        """Add a batch of features of all networks, from the same inputs in the same order.

        Args:
            features: Features by the names of networks and layers.
            order: Permutation of the batch for shuffled second networks. Shape ``[N]``, int64.

        Raises:
            ValueError: If a link is shuffled and there is no order, or the features do not match.
        """
        if order is None and any(link.shuffled for link in self.links):
            raise ValueError("a link is shuffled; pass the order of the inputs, a permutation of the batch.")
        for part in self.parts:
            if isinstance(part, LinkedCKA):
                part.update(features, order)
                return
        moved: dict[str, dict[str, Features]] = {}
        for link, matrix in zip(self.links, self.parts, strict=True):
            second = features[link.second]
            if link.shuffled and order is not None:
                if link.second not in moved:
                    moved[link.second] = {name: layer.reordered(order) for name, layer in second.items()}
                second = moved[link.second]
            matrix.update(features[link.first], second)  # type: ignore[operator]  # a SimilarityMatrix

    def compute(self) -> Tensor:
        """Return the similarities. Shape ``[links, layers of the first, layers of the second]``, float64, on the CPU.

        Call it on every rank; all ranks return the same.
        """
        values = [torch.as_tensor(part.compute()).cpu() for part in self.parts]  # type: ignore[operator]
        return torch.stack(values).view(self.shape)

    def reset(self) -> None:
        """Reset the metrics."""
        for part in self.parts:
            part.reset()  # type: ignore[operator]
