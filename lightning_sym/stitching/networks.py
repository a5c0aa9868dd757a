"""Stitching: the lower part of one network, a small map, and the upper part of another.

A stitch is a set of ports. At the end of a residual block one tensor crosses the cut, inside a block two do: the
branch and the skip connection. With one map for each of them, a network that differs from another by a symmetry only
can be stitched to it without any loss, wherever it is cut (:class:`PlantedStitches`).
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sym._checks import check_words
from lightning_sym._distributed import on_device_of
from lightning_sym._random import seeded
from lightning_sym.networks import Network, architecture_name
from lightning_sym.networks.batch_norm import batch_norms
from lightning_sym.stitching.maps.base import Port, StitchingMap
from lightning_sym.stitching.maps.families import stitching_map
from lightning_sym.stitching.maps.moments import FeatureMoments
from lightning_sym.symmetry import ChannelGroup, Element, IntertwinerGroup, Symmetry, Tap, trace_symmetry

Family = str | Callable[[Port], StitchingMap]
Ports = Literal["all", "branch"]
BatchNormMode = Literal["batch", "frozen"]

NOTHING = IntertwinerGroup("nothing", positive_scales=False, signs=False, permutations=False)


@dataclass(frozen=True)
class Crossing:
    """A value that crosses a cut.

    Attributes:
        name: The module whose output it is, otherwise the operation.
        shape: Its shape without the batch axis; empty for what is no tensor.
        axis: Its channel axis, counted with the batch axis: 1 for ``[N, C, H, W]``, 2 for ``[N, T, C]``.
        mapped: Whether a stitch has a map here. The network's input, and what is no floating tensor with channels,
            pass as they are.
        group: What the network's symmetry does to its channels.
        blocks: The same where it mixes blocks of them: heads of attention, streams that rotate; otherwise None.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 1
    mapped: bool = True
    group: IntertwinerGroup = NOTHING
    blocks: ChannelGroup | None = None

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.shape[self.axis - 1]

    @property
    def positions(self) -> tuple[int, ...]:
        """Shape without batch and channel axes: height and width, or nothing."""
        return _positions(self.shape, self.axis)


class CutNetwork:
    """A frozen network that is cut at several sites, to be stitched to others.

    Args:
        network: The network. It is put in evaluation mode, and its parameters get ``requires_grad=False``; values stay
            as they are.
        sites: Where; default everywhere, see ``Network.sites``.
        example: An input, shape ``[N, C, H, W]`` or whatever the network takes, N >= 1, of the weights' dtype. Moved to
            the network's device.
        before: Cut before the activations instead of after them.
        like: A cut network of the same architecture, sites and ``before``, whose symmetry is taken over, as tracing
            takes a second or so.

    Attributes:
        network: The network.
        sites: Where it is cut, in the given order.

    Raises:
        TypeError: If the network is a module of another kind; ``Network.wrap`` makes one of it.
        ValueError: If there is no such site, or a half does not compute what the network does.
    """

    def __init__(
        self,
        network: Network,
        sites: Sequence[str] | None = None,
        *,
        example: Tensor,
        before: bool = False,
        like: "CutNetwork | None" = None,
    ) -> None:
        if not isinstance(network, Network):
            name = type(network).__name__
            raise TypeError(
                f"network must be a Network, whose sites are known, got {name}; pass Network.wrap(network)."
            )
        network.eval().requires_grad_(False)
        self.network = network
        self._cuts = network.cuts(sites, before=before)
        self.sites = list(self._cuts.sites)
        self._example = on_device_of(network, example[:2])
        self._like = like
        self._symmetry: Symmetry | None = None
        self._crossings: dict[str, tuple[Crossing, ...]] = {}
        with torch.no_grad():
            expected = network(self._example)
            values = self.values(self._example)
            for site in self.sites:
                if not torch.allclose(self._cuts.uppers[site](values[site]), expected, rtol=0, atol=0, equal_nan=True):
                    raise ValueError(
                        f"{architecture_name(network)} cut at {site!r} does not compute what it does in one piece; "
                        "look for operations that change a tensor in place, or draw random numbers in evaluation mode."
                    )
        self._shapes = {site: tuple(map(_shape, found)) for site, found in values.items()}

    @property
    def lower(self) -> nn.Module:
        """The part up to the last cut: from images to a tuple for each site of all that crosses there."""
        return self._cuts.lower

    def to(self, *args: Any, **kwargs: Any) -> "CutNetwork":
        """Move the network and its parts, as ``nn.Module.to`` does."""
        # The parts too: buffers that the network itself reads, not one of its modules, are theirs under the same name.
        for module in (self.network, self._cuts.lower, *self._cuts.uppers.values(), self._cuts.whole):
            module.to(*args, **kwargs)
        return self

    def values(self, images: Tensor) -> dict[str, tuple[Any, ...]]:
        """Return what crosses each cut, for a batch of images, on the network's device; without gradients."""
        with torch.no_grad(), self.network.explaining(images):
            return dict(zip(self.sites, self._cuts.lower(on_device_of(self.network, images)), strict=True))

    def upper(self, site: str, *, own_parameters: bool = False) -> nn.Module:
        """Return the part after a cut.

        Modules and buffers are copies. Parameters are the network's own; or copies too, with gradients.
        """
        upper = self._cuts.uppers[site]
        shared: dict[int, Any] = {} if own_parameters else {id(p): p for p in upper.parameters()}
        copied: nn.Module = copy.deepcopy(upper, shared)
        return copied.requires_grad_(True) if own_parameters else copied

    def crossings(self, site: str) -> tuple[Crossing, ...]:
        """Return the values that cross a cut, the site's activation first, and what the symmetry does to each."""
        if self._like is not None:
            return self._like.crossings(site)
        if site not in self._crossings:  # the symmetry's groups on large values take long to find
            self._crossings[site] = self._crossing(site)
        return self._crossings[site]

    def _crossing(self, site: str) -> tuple[Crossing, ...]:
        inputs = {node.name for node in self._cuts.whole.graph.nodes if node.op == "placeholder"}  # type: ignore[union-attr]
        taps = self.symmetry.taps
        # A value on which nothing acts has its channels where others of its shape have them, or where they usually are.
        known = {tap.shape[1:]: tap.axis for tap in taps.values() if tap.axis}
        found = []
        for index, (name, shape) in enumerate(self.shapes(site)):
            if not shape or name in inputs:
                found.append(Crossing(name, shape, mapped=False))
                continue
            tap = taps[f"{site}/{index}"]
            acting = tap.axis is not None and len(tap.seen) == 1
            group, blocks = (tap.group, self._blocks(tap)) if acting else (NOTHING, None)
            axis = tap.axis or known.get(shape, 2 if len(shape) == 2 else 1)
            found.append(Crossing(name, shape, axis, group=group, blocks=blocks))
        return tuple(found)

    def _blocks(self, tap: Tap) -> ChannelGroup | None:
        """Return the group on a value's channels if it mixes blocks of them."""
        found = self.symmetry.channels(tap)
        return found if any(kind in ("orthogonal", "invertible") for kind in found.inside) else None

    def shapes(self, site: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return names and shapes of the values that cross a cut, see :class:`Crossing`; asks for no symmetry."""
        return tuple(zip(self._cuts.crossing[site], self._shapes[site], strict=True))

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the network; its taps show all that crosses the cuts, as ``site/0``, ``site/1``, ..."""
        if self._like is not None:
            return self._like.symmetry
        if self._symmetry is None:
            example = self._example.to(next(self.network.parameters()))
            with seeded(0):  # the caller's random numbers do not depend on who asks first
                self._symmetry = trace_symmetry(self.network, example, cuts=self._cuts)
        return self._symmetry


class PlantedStitches:
    r"""A network that differs from another by a symmetry only, and the stitches between the two, which are exact.

    For :math:`B = g A` and every cut, the values of ``B`` are those of ``A`` times :math:`\varphi(g)` (Theorem 4.2 of
    Godfrey et al. 2022); :meth:`matrices` are these, from ``Symmetry.on_activations``.

    Args:
        source: Network ``A``.
        element: An element of ``source.symmetry``; default a random one without shifts, which no matrix does.
        generator: Generator for the random element.
        scale: Standard deviation of the logarithm of its scales, >= 0.

    Attributes:
        element: The element.
        network: Network ``B``.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, Theorem 4.2. A map for each port is ours.
    """

    def __init__(
        self,
        source: CutNetwork,
        element: Element | None = None,
        *,
        generator: torch.Generator | None = None,
        scale: float = 0.5,
    ) -> None:
        self._source = source
        symmetry = source.symmetry
        self.element = symmetry.sample(generator, scale=scale, shifts=False) if element is None else element
        moved = symmetry.act(self.element, source.network)
        assert isinstance(moved, Network)
        self.network = moved

    def matrices(self, site: str) -> tuple[Tensor | None, ...]:
        """Return for each value that crosses the cut what takes that of ``A`` to that of ``B``.

        Each of shape ``[C, C]``, None where a value passes as it is.
        """
        symmetry, like = self._source.symmetry, next(self._source.network.parameters())
        inverse = symmetry.inverse(self.element)
        matrices: list[Tensor | None] = []
        for index, crossing in enumerate(self._source.crossings(site)):
            action = symmetry.on_activations(inverse, f"{site}/{index}", self.network) if crossing.mapped else None
            if action is None or not action.parts:  # nothing acts
                matrices.append(None if action is None else torch.eye(crossing.channels).to(like))
            else:  # the rounded inverse is what B's next layer was multiplied by
                matrices.append(torch.linalg.inv(action.element.matrix().to(like)))
        return tuple(matrices)


class StitchedNetwork(nn.Module):
    """The lower part of one network, a map for each value that crosses, and the upper part of another.

    Both parts are frozen (but see ``train_upper``): parameters have no gradients, the lower part is always in
    evaluation mode and run without gradients. Batch norms of the upper part have statistics of their own, and in train
    mode use those of the batch (``batch_norm="batch"``) or the upper network's (``"frozen"``).

    Args:
        source: Network ``A``, the lower one.
        target: Network ``B``, the upper one.
        site: Where ``A`` is cut.
        target_site: Where ``B`` is cut; default the same.
        family: Makes the map of a port: a name for :func:`lightning_sym.stitching.stitching_map`, or any callable that
            takes a :class:`lightning_sym.stitching.Port`, such as a subclass of
            :class:`lightning_sym.stitching.StitchingMap`.
        ports: ``"all"``: a map for each value that crosses. ``"branch"``: one for the site's activation only, as the
            paper; a skip connection then comes from ``A`` as it is.
        batch_norm: See above.
        resize: Average the positions of a value of ``A`` where it has whole multiples of those of ``B``.
        train_upper: Let the upper part have parameters of its own, a copy of ``B``'s, that are trained.

    Attributes:
        maps: The maps, in the order of the ports.
        upper: The upper part.
        site: Where ``A`` is cut.
        target_site: Where ``B`` is cut.

    Raises:
        ValueError: If widths, positions or the number of ports do not fit.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 4 and appendix D.2, after Lenc and Vedaldi (2015) and Bansal et
        al. (2021). Maps for skip connections are ours.

    Example:
        >>> from lightning_sym.networks import MultiLayerPerceptron
        >>> a, b = (MultiLayerPerceptron([5, 4], image_size=2).fresh(seed) for seed in (0, 1))
        >>> images = torch.rand(3, 1, 2, 2)
        >>> a, b = (CutNetwork(network, example=images) for network in (a, b))
        >>> StitchedNetwork(a, b, "activation1", family="full")(images).shape
        torch.Size([3, 10])
    """

    def __init__(
        self,
        source: CutNetwork,
        target: CutNetwork,
        site: str,
        target_site: str | None = None,
        *,
        family: Family = "group",
        ports: Ports = "all",
        batch_norm: BatchNormMode = "batch",
        resize: bool = False,
        train_upper: bool = False,
    ) -> None:
        super().__init__()
        check_words(("batch_norm", batch_norm, ("batch", "frozen")))
        target_site = site if target_site is None else target_site
        self._ports = stitch_ports(source, target, site, target_site, ports=ports, resize=resize)
        make = stitching_map(family) if isinstance(family, str) else family
        self.site, self.target_site, self.batch_norm = site, target_site, batch_norm
        self._lower = (source.lower, source.sites.index(site))  # in a tuple: no part of what is trained and saved
        self.upper = target.upper(target_site, own_parameters=train_upper)
        self.train_upper = train_upper
        self.maps = nn.ModuleList(make(port) for port in self._ports if port is not None)
        for module in self.maps:
            if not isinstance(module, StitchingMap):
                raise TypeError(f"A family must make a StitchingMap from a Port, got {type(module).__name__}.")
        # The positions that values are averaged to; None where they are as the upper part has them.
        self._sizes = [
            crossing.positions if port and _positions(shape, port.axis) != crossing.positions else None
            for port, crossing, (_, shape) in zip(
                self._ports, target.crossings(target_site), source.shapes(site), strict=False
            )
        ]
        self.train()

    def train(self, mode: bool = True) -> "StitchedNetwork":
        """Set the mode: of the maps, of the upper part if it is trained, otherwise of its batch norms only."""
        super().train(mode)
        if not self.train_upper:
            self.upper.eval()  # no dropout
        for module in self.upper.modules():
            if isinstance(module, _BatchNorm):
                module.train(mode and self.batch_norm == "batch")
        return self

    @property
    def trained(self) -> nn.Module:
        """The part that is trained: the maps, or all but the lower part."""
        return self if self.train_upper else self.maps

    def batch_norms(self) -> dict[str, _BatchNorm]:
        """Return the batch norms of the upper part that have statistics, by name."""
        return {f"upper.{name}": module for name, module in batch_norms(self.upper).items()}

    def set_mode(self, mode: Literal["soft", "hard"]) -> None:
        """Use the maps as they are trained (``soft``) or as they are evaluated (``hard``: rounded, cut off)."""
        for module in self.stitching_maps:
            module.mode = mode

    def mapped(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return what the upper part takes, for all that crosses the cut of the lower network."""
        maps = iter(self.maps)
        sized = zip(self._sized(values), self._ports, strict=True)
        return tuple(value if port is None else next(maps)(value) for value, port in sized)

    def _sized(self, values: Sequence[Any]) -> list[Any]:
        """Return the values that are taken from the lower network, with as many positions as the upper one has."""
        return [
            _pooled(value, port.axis, size) if port and size else value
            for value, port, size in zip(values, self._ports, self._sizes, strict=False)
        ]

    def add_moments(self, values: Sequence[Any], wanted: Sequence[Any], moments: Sequence[FeatureMoments]) -> None:
        """Add a batch to the moments that maps are fitted from.

        Args:
            values: What crosses the cut of the lower network.
            wanted: What crosses the cut of the upper network, for the same images.
            moments: One for each map; changed in place.
        """
        sums = iter(moments)
        for x, y, port in zip(self._sized(values), wanted, self._ports, strict=True):
            if port is not None:
                next(sums).update(x, y, port.axis)

    def stitched(self, values: Sequence[Any]) -> Tensor:
        """Return logits ``[N, C]`` for what crosses the cut of the lower network."""
        logits: Tensor = self.upper(self.mapped(values))
        return logits

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[N, C]`` for images."""
        lower, index = self._lower
        with torch.no_grad():
            values = lower(images)[index]
        return self.stitched(values)

    def regularization(self) -> Tensor:
        """Return the sum of the maps' regularisers, a scalar."""
        return sum((module.regularization() for module in self.stitching_maps), torch.zeros(()))

    def project(self) -> None:
        """Project all maps, after an optimizer's step."""
        for module in self.stitching_maps:
            module.project()

    @property
    def stitching_maps(self) -> list[StitchingMap]:
        """The maps, as what they are."""
        return [module for module in self.maps if isinstance(module, StitchingMap)]


def stitch_ports(
    source: CutNetwork,
    target: CutNetwork,
    site: str,
    target_site: str,
    *,
    ports: Ports = "all",
    resize: bool = False,
) -> list[Port | None]:
    """Return the port of each value that crosses the target's cut; None for one that passes as it is.

    Arguments and errors are those of :class:`StitchedNetwork`.
    """
    check_words(("ports", ports, ("all", "branch")))
    for cut, name in ((source, site), (target, target_site)):
        if name not in cut.sites:
            raise ValueError(f"The network is not cut at {name!r}, only at {', '.join(cut.sites)}.")
    wanted, given = target.crossings(target_site), source.shapes(site)
    where = f"{site!r} of the lower network and {target_site!r} of the upper one cannot be stitched"
    if len(given) < len(wanted):
        raise ValueError(
            f"{where}: {len(wanted)} values cross the upper network's cut "
            f"({', '.join(crossing.name for crossing in wanted)}), and only {len(given)} the lower network's; choose a "
            "site at the end of a block."
        )
    found: list[Port | None] = []
    for index, (crossing, (name, shape)) in enumerate(zip(wanted, given, strict=False)):
        passes = not crossing.mapped or (ports == "branch" and index > 0)
        if trouble := _passing_trouble(shape, crossing) if passes else _mapping_trouble(name, shape, crossing, resize):
            raise ValueError(f"{where}: {trouble}.")
        axis = crossing.axis
        found.append(
            None if passes else Port(shape[axis - 1], crossing.channels, axis, crossing.group, crossing.blocks)
        )
    return found


def _passing_trouble(shape: tuple[int, ...], crossing: Crossing) -> str:
    """Say why a value of this shape cannot pass without a map; empty if it can."""
    if shape == crossing.shape:
        return ""
    advice = 'use ports="all"' if crossing.mapped else "choose other sites"
    return (
        f"{crossing.name} would pass without a map, but has shape {list(shape)} below and {list(crossing.shape)} "
        f"above; {advice}"
    )


def _mapping_trouble(name: str, shape: tuple[int, ...], crossing: Crossing, resize: bool) -> str:
    """Say why a value of this name and shape cannot be mapped; empty if it can."""
    if len(shape) != len(crossing.shape):
        return (
            f"a value of shape {list(shape)} (without batch) cannot become one of shape {list(crossing.shape)}; choose "
            "sites of the same kind"
        )
    positions = _positions(shape, crossing.axis)
    multiples = all(a % b == 0 for a, b in zip(positions, crossing.positions, strict=True))
    if positions == crossing.positions or (multiples and resize):
        return ""
    below, above = ("x".join(map(str, sides)) or "single" for sides in (positions, crossing.positions))
    advice = "set resize=True to average positions" if multiples else "choose sites with whole multiples of them"
    return f"{name} has {below} positions and {crossing.name} has {above}; {advice}"


def _shape(value: object) -> tuple[int, ...]:
    if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
        return tuple(value.shape[1:])
    return ()


def _positions(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[: axis - 1] + shape[axis:]


def _pooled(value: Tensor, axis: int, size: tuple[int, ...]) -> Tensor:
    """Return the means over positions such that ``size`` are left."""
    pool: Callable[..., Tensor] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(size) - 1]
    return pool(value.movedim(axis, 1), size).movedim(1, axis)
