"""Centred kernel alignment, of two layers or of all layers of several networks."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_sym._checks import check_known, check_numbers
from lightning_sym.similarity.features import Axes, Features, SimilarityMetric, check_pair, undefined
from lightning_sym.similarity.kernels import Kernel, centre_, centred_columns, gram, inner, linear_hsic, standardized

Estimator: TypeAlias = Literal["unbiased", "biased", "minibatch"]
Normalize: TypeAlias = Literal["none", "channel"]
Side: TypeAlias = Tensor | list[Tensor]  # centred kernels of all layers, or the centred features of each

# Largest size of features with fourth powers, and sums of many of them, in the range of a dtype.
_REACH = {torch.float32: 1e6, torch.float64: 1e70}
_FEWEST = {"unbiased": 4, "biased": 2, "minibatch": 4}  # samples


@dataclass(frozen=True)
class Alignment:
    """Choice of kernels and criterion; the settings are those of :class:`CKA`."""

    kernel: Kernel
    estimator: Estimator
    normalize: Normalize
    bandwidth: float | None

    @property
    def fewest(self) -> int:
        """Smallest number of samples of an estimate."""
        return _FEWEST[self.estimator]

    @property
    def unbiased(self) -> bool:
        """Whether the criterion is the unbiased one."""
        return self.estimator != "biased"

    def small(self, layers: Iterable[Tensor]) -> bool:
        """Test whether a product of features is cheaper than a kernel: few numbers per sample."""
        return self.kernel == "linear" and all(layer[0].numel() <= len(layer) for layer in layers)

    def side(self, layers: Iterable[Tensor], count: int, *, small: bool) -> tuple[Side, Tensor]:
        """Prepare the layers of one network for comparison, and compute the criterion of each with itself.

        Args:
            layers: Features, each of shape ``[N, C, positions]``; only one is in memory at a time.
            count: Number of layers.
            small: Whether to return centred features, each of shape ``[N, D]``, instead of kernels ``[count, N, N]``;
                float64.
        """
        scale = self.normalize == "channel"
        made: list[Tensor] = []
        floors: list[Tensor] = []  # criteria that may be rounding errors
        kernels, room = torch.empty(0), torch.empty(0)
        for place, layer in enumerate(layers):
            layer = _multipliable(layer, faint=scale or self.kernel != "linear")
            if scale or self.kernel != "linear":
                layer = standardized(layer, scale=scale)
            if self.kernel == "linear":
                rows, floor = centred_columns(layer, room)
                floors.append(floor)
                if small:
                    made.append(rows.double())
                    continue
                room = rows
                layer = rows[:, None]
            kernel = gram(layer, self.kernel, self.bandwidth)
            if self.kernel != "linear":
                eps = 16 * torch.finfo(kernel.dtype).eps
                floors.append((eps * torch.linalg.vector_norm(kernel).double()).square() / kernel.numel())
            if not place:
                kernels = kernel.new_empty((count, *kernel.shape), dtype=torch.float64)
            centre_(kernels[place].copy_(kernel), unbiased=self.unbiased)
        if small:
            own = torch.stack([linear_hsic(one, one, unbiased=self.unbiased) for one in made])
        else:
            own = torch.stack([inner(one[None], one[None], unbiased=self.unbiased)[0, 0] for one in kernels])
        return made if small else kernels, torch.where(own > torch.stack(floors), own, 0.0)

    def between(self, ours: Side, theirs: Side) -> Tensor:
        """Return the criteria of all pairs of layers, prepared by :meth:`side`. Shape ``[A, B]``."""
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            return inner(ours, theirs, unbiased=self.unbiased)
        return torch.stack(
            [torch.stack([linear_hsic(one, two, unbiased=self.unbiased) for two in theirs]) for one in ours]
        )

    def criteria(self, x: Sequence[Tensor], y: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the criteria of all pairs of layers, and of each layer with itself; float64."""
        small = self.small([*x, *y])
        (ours, within_x), (theirs, within_y) = (self.side(layers, len(layers), small=small) for layers in (x, y))
        return self.between(ours, theirs), within_x, within_y


def _multipliable(layer: Tensor, *, faint: bool) -> Tensor:
    """Convert features to a dtype in which products of kernels neither overflow nor underflow.

    Args:
        layer: Shape ``[N, C, positions]``.
        faint: Whether channels may be divided by their norm, the root of a sum of squares, so that those of tiny
            values count.

    Raises:
        ValueError: If there is no such dtype.
    """
    reach = _REACH[layer.dtype]
    if faint:
        channels = layer.abs().amax(0).amax(1)  # one axis after the other, which is 60 times faster
        largest, faint = float(channels.max()), bool(((channels > 0) & (channels < reach**-2.5)).any())
    else:
        largest = max(map(abs, torch.stack(layer.aminmax()).tolist()))
    if not largest or (1 / reach <= largest <= reach and not (faint and layer.dtype != torch.float64)):
        return layer
    if layer.dtype != torch.float64:
        return layer.double()
    raise ValueError(
        f"features of up to {largest:.0e} are too {'large' if largest > 1 else 'small'} for products of their kernels; "
        "divide them by that."
    )


def alignments(between: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the alignments from the criteria of pairs of layers and of each with itself; NaN where one is 0."""
    norms = torch.outer(x.clamp_min(0).sqrt(), y.clamp_min(0).sqrt())  # the product itself may underflow
    return torch.where(norms > 0, between / norms, math.nan)


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


class LinkedCKA(SimilarityMetric):
    """Centred kernel alignment of all layers of linked networks, with each layer's kernel computed once.

    Args:
        alignment: The kernels and the criterion.
        first: Names of the layers of networks that are first in links.
        second: Names of the layers of networks that are second in links.
        links: The pairs of networks.
        short: Whether batches smaller than the first count, for ``minibatch``; those of fewer than 4 samples never do.

    Raises:
        ValueError: If a network is first and second in links, with different layers.
    """

    displacements: list[Tensor] | Tensor
    between: Tensor
    batches: Tensor

    def __init__(
        self,
        alignment: Alignment,
        first: Sequence[str],
        second: Sequence[str],
        links: Sequence[Link],
        *,
        short: bool = True,
    ) -> None:
        super().__init__()
        self.alignment, self.links = alignment, tuple(links)
        self.layers: dict[str, tuple[str, ...]] = {}
        for link in links:
            for network, names in ((link.first, first), (link.second, second)):
                if self.layers.setdefault(network, tuple(names)) != tuple(names):
                    raise ValueError(f"{network} is first and second in links, with different layers.")
        self._least = None if short else 0  # samples of a batch that counts; 0 before the first batch
        self._shapes: dict[tuple[str, str], tuple[int, ...]] = {}  # of the layers' features, without samples
        self._streamed = alignment.estimator == "minibatch"
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
        self._shuffles = any(link.shuffled for link in links)
        for name in (*self._states.values(), *(["displacements"] if self._shuffles else [])):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, features: Mapping[str, Mapping[str, Features]], order: Tensor | None = None) -> None:
        """Add a batch of features of all networks, from the same inputs in the same order.

        Args:
            features: Features by the names of networks and layers.
            order: Permutation of the batch for shuffled second networks. Shape ``[N]``, int64.

        Raises:
            ValueError: If the features do not match.
        """
        layers = {network: [features[network][name] for name in names] for network, names in self.layers.items()}
        every = list(itertools.chain.from_iterable(layers.values()))
        for layer in every:
            check_pair(every[0], layer)
        keys = [(network, name) for network, names in self.layers.items() for name in names]
        shapes = {key: tuple(layer.channels.shape[1:]) for key, layer in zip(keys, every, strict=True)}
        if self._shapes and self._shapes != shapes:
            raise ValueError(
                f"features have the shapes {[*shapes.values()]} (channels, positions); expected "
                f"{[*self._shapes.values()]}, as before."
            )
        self._shapes = shapes
        samples = len(every[0])
        here = torch.arange(samples, device=every[0].channels.device)
        order = here if order is None else order.to(here.device)
        if not self._streamed:
            for (network, name), state in self._states.items():
                getattr(self, state).append(features[network][name].channels.clone())
            if self._shuffles:
                assert isinstance(self.displacements, list)
                self.displacements.append(order - here)  # not positions, which change when batches are concatenated
            return
        if self._least == 0:
            self._least = samples
        if samples >= max(self.alignment.fewest, self._least or 0):
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
        """Return the alignments. Shape ``[links, layers of the first, layers of the second]``, float64, at most 1.

        The value is NaN, with a warning about the reason, if there are too few samples or features are the same for all
        inputs.
        """
        if self._streamed:
            within = {name: getattr(self, f"within{number}") for number, name in enumerate(self.layers)}
            between, samples = list(self.between), self.alignment.fewest if int(self.batches) else 0
        else:
            any_layer = self._whole(next(iter(self._states.values())))
            samples = len(any_layer)
            if samples >= self.alignment.fewest:
                order = torch.arange(samples, device=any_layer.device)
                order = order + self._whole("displacements") if self._shuffles else order
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
        if not isinstance(state, Tensor) and len(state) == 1:
            only: Tensor = state[0]
            return only
        return state if isinstance(state, Tensor) else torch.cat(state) if state else torch.zeros(0, dtype=torch.int64)

    def reset(self) -> None:
        """Reset the metric."""
        super().reset()
        self._least, self._shapes = None if self._least is None else 0, {}


class CKA(LinkedCKA):
    r"""Centred kernel alignment: :math:`HSIC(K, L) / \sqrt{HSIC(K, K)\, HSIC(L, L)}` of kernels between samples.

    1 if both networks arrange the inputs in the same way, about 0 for unrelated features; the unbiased
    estimators may be slightly negative. Grids, tokens and channels need not agree between the networks.

    =========== ==================================================================================================
    kernel      invariant to
    =========== ==================================================================================================
    ``linear``  orthogonal mixing of channels and positions, one scale; with ``normalize="channel"`` instead
                permutations and scales of channels
    ``max``     permutations, scales and signs of channels: all of :math:`G_{ReLU}`; not positive definite
    ``laplace`` the same; positive definite. :math:`\exp(-d / h)`, see `lightning_sym.similarity.gram`
    =========== ==================================================================================================

    ``unbiased`` and ``biased`` store the features of all samples until :meth:`compute`, in their dtype: ``N * D``
    numbers for each network, and then a few matrices of ``N * N`` (for ``linear``, if that is less, of ``D * D``).
    ``minibatch`` stores three numbers, the unbiased criterion summed over batches. It is unbiased as well, but depends
    slightly on the batches. Batches smaller than 4 samples, or than the first batch, are left out.

    Args:
        kernel: ``linear``, ``max`` or ``laplace``.
        estimator: ``unbiased`` (Song et al. 2012), ``biased`` (Kornblith et al. 2019) or ``minibatch`` (Nguyen et al.
            2021).
        normalize: ``channel`` divides each centred channel by its norm over samples and positions; ``none`` does not.
            The default depends on the kernel: none for ``linear``. ``minibatch`` takes ``none`` only, as norms within a
            batch depend on the rest of the batch.
        bandwidth: ``h`` of the Laplace kernel, > 0; default the median distance of different samples.
        axes: The axes of the channels of x and of y.

    Raises:
        ValueError: If an argument is unknown or out of range, or ``update`` gets features that do not match.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 5 and equation 5.6; Kornblith et al. (2019), arXiv:1905.00414;
        Nguyen et al. (2021), arXiv:2010.15327. docs/theory/similarity.md, 2.

    Example:
        >>> x = torch.rand(20, 3, 4, 4)
        >>> metric = CKA("max")
        >>> metric.update(x, x.flip(1))
        >>> round(metric.compute().item(), 6)
        1.0
    """

    def __init__(
        self,
        kernel: Kernel = "linear",
        *,
        estimator: Estimator = "unbiased",
        normalize: Normalize | None = None,
        bandwidth: float | None = None,
        axes: tuple[Axes, Axes] = (1, 1),
    ) -> None:
        normalize = normalize or ("none" if kernel == "linear" else "channel")
        check_known("kernel", kernel, get_args(Kernel))
        check_known("estimator", estimator, get_args(Estimator))
        check_known("normalize", normalize, get_args(Normalize))
        check_numbers("> 0", optional=True, bandwidth=bandwidth)
        if estimator == "minibatch" and normalize == "channel":
            raise ValueError(
                'channels\' means and norms within one batch depend on the rest of the batch; set normalize="none", or '
                'estimator="unbiased".'
            )
        alignment = Alignment(kernel, estimator, normalize, bandwidth)
        super().__init__(alignment, ["its layer"], ["its layer"], [Link("x", "y")], short=False)
        self.axes = axes

    def update(self, x: Tensor | Features, y: Tensor | Features) -> None:  # type: ignore[override]
        """Add a batch of features of both networks, from the same inputs in the same order.

        Args:
            x: Features of the first network, samples first; floating, finite.
            y: Features of the second network.

        Raises:
            TypeError: If a dtype is not floating.
            ValueError: If shapes do not match, or a value is not finite.
        """
        given = zip("xy", (x, y), self.axes, strict=True)
        super().update(
            {name: {"its layer": f if isinstance(f, Features) else Features(f, axes, name)} for name, f, axes in given}
        )

    def compute(self) -> Tensor:
        """Return the alignment, a 0-dimensional tensor, float64, at most 1.

        The value is NaN, with a warning about the reason, if there are too few samples or features are the same for all
        inputs.
        """
        return super().compute()[0, 0, 0]
