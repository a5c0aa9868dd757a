"""One measure for many pairs of networks in one pass over the data, with caches per network."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sym.similarity.cka import CKA, Link, LinkedCKA
from lightning_sym.similarity.features import Features
from lightning_sym.similarity.matrix import SimilarityMatrix


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
