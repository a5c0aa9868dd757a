"""One measure for many pairs of networks in one pass over the data, with caches per network."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sym.similarity.cka import CKA, Side, alignments
from lightning_sym.similarity.features import Features, SimilarityMetric, check_pair, undefined
from lightning_sym.similarity.matrix import SimilarityMatrix


class Link(NamedTuple):
    """Two networks to compare.

    Attributes:
        first: Name of the first network.
        second: Name of the second network.
        shuffled: Whether the second network receives shuffled images, as a baseline without similarity.
    """

    first: str
    second: str
    shuffled: bool = False


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
            [LinkedCKA(metric, first, second, links)]
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


class LinkedCKA(SimilarityMetric):
    """Centred kernel alignment of all layers of linked networks; see :class:`PopulationSimilarity`.

    With ``estimator="minibatch"`` every batch of at least 4 samples counts.

    Args:
        metric: A metric with the settings.
        first: Names of the layers of networks that are first in links.
        second: Names of the layers of networks that are second in links.
        links: The pairs of networks.
    """

    displacements: list[Tensor] | Tensor
    between: Tensor
    batches: Tensor

    def __init__(self, metric: CKA, first: Sequence[str], second: Sequence[str], links: Sequence[Link]) -> None:
        super().__init__()
        self.alignment, self.links = metric.alignment, tuple(links)
        self.layers: dict[str, tuple[str, ...]] = {}
        for link in links:
            for network, names in ((link.first, first), (link.second, second)):
                if self.layers.setdefault(network, tuple(names)) != tuple(names):
                    raise ValueError(f"{network} is first and second in links, with different layers.")
        self._streamed = metric.estimator == "minibatch"
        if self._streamed:
            shape = (len(links), len(first), len(second))
            self.add_state("between", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
            for number, names in enumerate(self.layers.values()):
                own = torch.zeros(len(names), dtype=torch.float64)
                self.add_state(f"within{number}", own, dist_reduce_fx="sum")
            self.add_state("batches", torch.tensor(0), dist_reduce_fx="sum")
            return
        self._states = {
            (network, layer): f"kept{number}_{place}"
            for number, (network, names) in enumerate(self.layers.items())
            for place, layer in enumerate(names)
        }
        for name in (*self._states.values(), "displacements"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, features: Mapping[str, Mapping[str, Features]], order: Tensor | None = None) -> None:
        """Add a batch; see :meth:`PopulationSimilarity.update`."""
        layers = {network: [features[network][name] for name in names] for network, names in self.layers.items()}
        every = list(itertools.chain.from_iterable(layers.values()))
        for layer in every:
            check_pair(every[0], layer)
        here = torch.arange(len(every[0]), device=every[0].channels.device)
        order = here if order is None else order.to(here.device)
        if not self._streamed:
            for (network, name), state in self._states.items():
                getattr(self, state).append(features[network][name].channels)
            assert isinstance(self.displacements, list)
            self.displacements.append(order - here)  # not positions, which change when batches are concatenated
        elif len(here) >= self.alignment.fewest:
            held = {(name, place): layer.channels for name, own in layers.items() for place, layer in enumerate(own)}
            between, within = self._criteria(
                lambda network, place: held[network, place], order, small=self.alignment.small(held.values())
            )
            self.between += torch.stack(between)
            for number, name in enumerate(self.layers):
                getattr(self, f"within{number}").add_(within[name])
            self.batches += 1

    def _criteria(
        self, layer: Callable[[str, int], Tensor], order: Tensor, *, small: bool
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the criteria of the layers of each link, and of each network's layers with themselves.

        Args:
            layer: Returns the features of a network's layer, by index; only one is in memory at a time.
            order: Order of the samples of shuffled networks.
            small: As for :meth:`Alignment.side`.
        """
        sides: dict[str, Side] = {}
        within: dict[str, Tensor] = {}
        for network, names in self.layers.items():
            layers = (layer(network, place) for place in range(len(names)))
            sides[network], within[network] = self.alignment.side(layers, len(names), small=small)
        between = []
        for link in self.links:
            theirs = sides[link.second]
            if link.shuffled and isinstance(theirs, Tensor):  # a kernel's rows and columns are samples
                theirs = theirs[:, order][:, :, order]
            elif link.shuffled:
                theirs = [one[order] for one in theirs]
            between.append(self.alignment.between(sides[link.first], theirs))
        return between, within

    def compute(self) -> Tensor:
        """Return the alignments; see :meth:`PopulationSimilarity.compute`."""
        if self._streamed:
            within = {name: getattr(self, f"within{number}") for number, name in enumerate(self.layers)}
            between, samples = list(self.between), self.alignment.fewest if int(self.batches) else 0
        else:
            moves = self._whole("displacements")
            samples = len(moves)
            if samples >= self.alignment.fewest:
                order = torch.arange(samples, device=moves.device) + moves
                small = self.alignment.kernel == "linear" and self._widest() <= samples
                between, within = self._criteria(self._layer, order, small=small)
        if samples < self.alignment.fewest:
            reason = f"the {self.alignment.estimator} estimator needs {self.alignment.fewest} samples, got {samples}."
            first, second = (len(self.layers[name]) for name in self.links[0][:2])
            return undefined(reason).expand(len(self.links), first, second).clone()
        for name, own in within.items():
            if constant := [self.layers[name][place] for place in (own <= 0).nonzero().flatten().tolist()]:
                undefined(f"the features of {name} at {', '.join(constant)} are the same for all inputs.")
        return torch.stack(
            [
                alignments(one, within[link.first], within[link.second])
                for one, link in zip(between, self.links, strict=True)
            ]
        )

    def _layer(self, network: str, place: int) -> Tensor:
        return self._whole(self._states[network, self.layers[network][place]])

    def _widest(self) -> int:
        """Return the largest number of features per sample."""
        states = [getattr(self, name) for name in self._states.values()]
        return max((state if isinstance(state, Tensor) else state[0])[0].numel() for state in states)

    def _whole(self, name: str) -> Tensor:
        state = getattr(self, name)  # a tensor after synchronisation of processes
        return state if isinstance(state, Tensor) else torch.cat(state) if state else torch.zeros(0, dtype=torch.int64)
