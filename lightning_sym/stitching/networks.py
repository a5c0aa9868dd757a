"""Stitching: the bottom layers of one network, a small map, and the top layers of another.

A stitching layer has one map per port, that is, per tensor that crosses the cut. At the end of a residual block one
tensor crosses, inside a block two do: the branch and the skip connection. With a map for each, networks that differ by
a symmetry only can be stitched without loss at any cut (:class:`PlantedStitches`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sym._checks import check_words
from lightning_sym._distributed import inputs_for, run_on
from lightning_sym._random import seeded
from lightning_sym.networks import Network, architecture_name
from lightning_sym.networks.batch_norm import batch_norms
from lightning_sym.stitching.maps.base import Port, StitchingMap
from lightning_sym.stitching.maps.families import stitching_map
from lightning_sym.stitching.maps.moments import FeatureMoments
from lightning_sym.symmetry import ChannelGroup, Element, IntertwinerGroup, Symmetry, Tap, trace_symmetry
from lightning_sym.symmetry.tracing.graph.capture import copied

Family = str | Callable[[Port], StitchingMap]
Ports = Literal["all", "branch"]
BatchNormMode = Literal["batch", "frozen"]

NOTHING = IntertwinerGroup("nothing", positive_scales=False, signs=False, permutations=False)


@dataclass(frozen=True)
class Crossing:
    """A value that crosses a cut.

    Attributes:
        name: The module that returns it, otherwise the operation.
        shape: Its shape without the batch axis; empty if it is not a tensor.
        axis: Its channel axis, counted with the batch axis: 1 for ``[N, C, H, W]``, 2 for ``[N, T, C]``.
        mapped: Whether stitching layers map it. The network's input, and values other than floating tensors with
            channels, pass unchanged.
        group: Action of the network's symmetry on its channels.
        blocks: The action if it mixes blocks of channels: attention heads, rotated streams; otherwise None.
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
        """Shape without batch and channel axes: height and width, or empty."""
        return _positions(self.shape, self.axis)


class CutNetwork:
    """A frozen network that is cut at several sites for stitching.

    Args:
        network: The network. It is put in evaluation mode, and its parameters get ``requires_grad=False``; values do
            not change.
        sites: Cut sites; default all, see ``Network.sites``.
        example: An input, shape ``[N, C, H, W]`` or the network's own, N >= 1, in the weights' dtype. Moved to
            the network's device.
        before: Cut before the activations instead of after them.
        like: A cut network of the same architecture, sites and ``before`` that provides the symmetry, as tracing
            takes about a second.

    Attributes:
        network: The network.
        sites: The cut sites, in the given order.

    Raises:
        TypeError: If the network is a module of another kind; wrap it with ``Network.wrap``.
        ValueError: If there is no such site, or the halves do not reproduce the network's output.
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
            raise TypeError(f"network must be a Network with known sites, got {name}; pass Network.wrap(network).")
        network.eval().requires_grad_(False)
        self.network = network
        self._cuts = network.cuts(sites, before=before)
        self.sites = list(self._cuts.sites)
        self._example = inputs_for(network, example[:2])
        self._like = like
        self._symmetry: Symmetry | None = None
        self._crossings: dict[str, tuple[Crossing, ...]] = {}
        with torch.no_grad():
            expected = run_on(network, self._example)
            if not isinstance(expected, Tensor):
                raise ValueError(
                    f"{architecture_name(network)} returns a {type(expected).__name__}; expected one tensor, so wrap "
                    "the network in a module that returns it."
                )
            values = self.values(self._example)
            for site in self.sites:
                if not torch.allclose(self._cuts.uppers[site](values[site]), expected, rtol=0, atol=0, equal_nan=True):
                    raise ValueError(
                        f"{architecture_name(network)} cut at {site!r} does not reproduce its output; "
                        "look for operations that change a tensor in place, or draw random numbers in evaluation mode."
                    )
        self._shapes = {site: tuple(map(_shape, found)) for site, found in values.items()}

    @property
    def lower(self) -> nn.Module:
        """The bottom layers up to the last cut: map images to one tuple per site, of all values that cross there."""
        return self._cuts.lower

    def to(self, *args: Any, **kwargs: Any) -> "CutNetwork":
        """Move the network and its parts, as ``nn.Module.to`` does."""
        # Also move buffers that the network's own forward reads, which the parts hold under the same name.
        for module in (self.network, self._cuts.lower, *self._cuts.uppers.values(), self._cuts.whole):
            module.to(*args, **kwargs)
        return self

    def values(self, images: Tensor) -> dict[str, tuple[Any, ...]]:
        """Return the values that cross each cut, for a batch of images, on the network's device; without gradients."""
        with torch.no_grad(), self.network.explaining(images):
            return dict(zip(self.sites, self._cuts.lower(inputs_for(self.network, images)), strict=True))

    def upper(self, site: str, *, own_parameters: bool = False) -> nn.Module:
        """Return the top layers after a cut.

        Modules and buffers are copies. Parameters are shared with the network, or copies with gradients.
        """
        upper = self._cuts.uppers[site]
        shared: dict[int, Any] = {} if own_parameters else {id(p): p for p in upper.parameters()}
        found = copied(upper, shared)
        return found.requires_grad_(True) if own_parameters else found

    def crossings(self, site: str) -> tuple[Crossing, ...]:
        """Return the values that cross a cut, the site's activation first, with the symmetry's action on each."""
        if self._like is not None:
            return self._like.crossings(site)
        self.check_site(site)
        if site not in self._crossings:  # computing the groups of large values takes long
            self._crossings[site] = self._crossing(site)
        return self._crossings[site]

    def check_site(self, site: str) -> None:
        """Raise ``ValueError`` unless the network is cut at a site."""
        if site not in self.sites:
            raise ValueError(f"The network is not cut at {site!r}, only at {', '.join(self.sites)}.")

    def _crossing(self, site: str) -> tuple[Crossing, ...]:
        inputs = {node.name for node in self._cuts.whole.graph.nodes if node.op == "placeholder"}  # type: ignore[union-attr]
        taps = self.symmetry.taps
        # Without a group, the channel axis is that of other values of the same shape, or the usual one.
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
        """Return the group on a value's channels if it mixes blocks of channels."""
        found = self.symmetry.channels(tap)
        return found if any(kind in ("orthogonal", "invertible") for kind in found.inside) else None

    def shapes(self, site: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return names and shapes of the values that cross a cut, see :class:`Crossing`; needs no symmetry."""
        return tuple(zip(self._cuts.crossing[site], self._shapes[site], strict=True))

    @property
    def symmetry(self) -> Symmetry:
        """The symmetry of the network, with hook points at all crossing values, ``site/0``, ``site/1``, ..."""
        if self._like is not None:
            return self._like.symmetry
        if self._symmetry is None:
            example = self._example.to(next(self.network.parameters()))
            with seeded(0):  # the caller's random numbers do not depend on when this is computed
                self._symmetry = trace_symmetry(self.network, example, nullity=False, cuts=self._cuts)
        return self._symmetry


class PlantedStitches:
    r"""A network that differs from another by a symmetry only, with the exact stitching matrices between the two.

    For :math:`B = g A` and every cut, the values of ``B`` are those of ``A`` times :math:`\varphi(g)` (Theorem 4.2 of
    Godfrey et al. 2022); :meth:`matrices` returns these matrices, from ``Symmetry.on_activations``.

    Args:
        source: Network ``A``.
        element: An element of ``source.symmetry``; default a random one without translations, which are not linear.
        generator: Generator for the random element.
        scale: Standard deviation of the logarithm of its scales, >= 0.

    Attributes:
        element: The element.
        network: Network ``B``.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, Theorem 4.2. Maps for several ports are an addition.
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
        """Return, for each value that crosses the cut, the matrix from its channels in ``A`` to those in ``B``.

        Each has shape ``[C, C]``; None for a value that passes unchanged.
        """
        symmetry, like = self._source.symmetry, next(self._source.network.parameters())
        inverse = symmetry.inverse(self.element)
        matrices: list[Tensor | None] = []
        for index, crossing in enumerate(self._source.crossings(site)):
            action = symmetry.on_activations(inverse, f"{site}/{index}", self.network) if crossing.mapped else None
            if action is None or not action.parts:  # the group acts trivially
                matrices.append(None if action is None else torch.eye(crossing.channels).to(like))
            else:  # use the rounded inverse that B's next layer was multiplied by
                matrices.append(torch.linalg.inv(action.element.matrix().to(like)))
        return tuple(matrices)


class StitchedNetwork(nn.Module):
    """The bottom layers of one network, a map for each value that crosses, and the top layers of another.

    Both parts are frozen (except with ``train_upper``): parameters have no gradients, and the bottom layers always run
    in evaluation mode without gradients. Batch norms of the top layers have separate statistics, and in train
    mode use those of the batch (``batch_norm="batch"``) or of network ``B`` (``"frozen"``).

    Args:
        source: Network ``A``, which provides the bottom layers.
        target: Network ``B``, which provides the top layers.
        site: Cut site of ``A``.
        target_site: Cut site of ``B``; default the same.
        family: Makes the map of a port: a name for :func:`lightning_sym.stitching.stitching_map`, or any callable that
            takes a :class:`lightning_sym.stitching.Port`, such as a subclass of
            :class:`lightning_sym.stitching.StitchingMap`.
        ports: ``"all"``: a map for each value that crosses. ``"branch"``: a map for the site's activation only, as in
            the paper; skip connections of ``A`` then pass unchanged.
        batch_norm: See above.
        resize: Average the positions of a value of ``A`` if their numbers are whole multiples of those of ``B``.
        train_upper: Train a copy of ``B``'s parameters in the top layers.

    Attributes:
        maps: The maps, in the order of the ports.
        upper: The top layers.
        site: Cut site of ``A``.
        target_site: Cut site of ``B``.

    Raises:
        ValueError: If widths, positions or the number of ports do not match.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 4 and appendix D.2, after Lenc and Vedaldi (2015) and Bansal et
        al. (2021). Maps for skip connections are an addition.

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
        self._lower = (source.lower, source.sites.index(site))  # in a tuple: neither trained nor saved
        self.upper = target.upper(target_site, own_parameters=train_upper)
        self.train_upper = train_upper
        self.maps = nn.ModuleList(make(port) for port in self._ports if port is not None)
        for module in self.maps:
            if not isinstance(module, StitchingMap):
                raise TypeError(f"A family must make a StitchingMap from a Port, got {type(module).__name__}.")
        self.maps.to(next((p.dtype for p in target.network.parameters() if p.is_floating_point()), None))
        # The positions that values are averaged to; None if they match those of the top layers.
        self._sizes = [
            crossing.positions if port and _positions(shape, port.axis) != crossing.positions else None
            for port, crossing, (_, shape) in zip(
                self._ports, target.crossings(target_site), source.shapes(site), strict=False
            )
        ]
        self.train()

    def train(self, mode: bool = True) -> "StitchedNetwork":
        """Set the mode of the maps, and of the top layers if these are trained, otherwise of their batch norms only."""
        super().train(mode)
        if not self.train_upper:
            self.upper.eval()  # no dropout
        for module in self.upper.modules():
            if isinstance(module, _BatchNorm):
                module.train(mode and self.batch_norm == "batch")
        return self

    @property
    def trained(self) -> nn.Module:
        """The trained part: the maps, or all but the bottom layers."""
        return self if self.train_upper else self.maps

    def batch_norms(self) -> dict[str, _BatchNorm]:
        """Return the batch norms of the top layers that have statistics, by name."""
        return {f"upper.{name}": module for name, module in batch_norms(self.upper).items()}

    def set_mode(self, mode: Literal["soft", "hard"]) -> None:
        """Use the maps in training form (``soft``) or evaluation form (``hard``: rounded, thresholded)."""
        for module in self.stitching_maps:
            module.mode = mode

    def mapped(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the inputs of the top layers, from all values that cross the cut of network ``A``."""
        maps = iter(self.maps)
        sized = zip(self._sized(values), self._ports, strict=True)
        return tuple(value if port is None else next(maps)(value) for value, port in sized)

    def _sized(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of network ``A``, averaged to as many positions as those of ``B``."""
        return [
            _pooled(value, port.axis, size) if port and size else value
            for value, port, size in zip(values, self._ports, self._sizes, strict=False)
        ]

    def add_moments(self, values: Sequence[Any], wanted: Sequence[Any], moments: Sequence[FeatureMoments]) -> None:
        """Add a batch to the moments that fit the maps.

        Args:
            values: Values that cross the cut of network ``A``.
            wanted: Values that cross the cut of network ``B``, for the same images.
            moments: One for each map; changed in place.
        """
        sums = iter(moments)
        for x, y, port in zip(self._sized(values), wanted, self._ports, strict=True):
            if port is not None:
                next(sums).update(x, y, port.axis)

    def stitched(self, values: Sequence[Any]) -> Tensor:
        """Return logits ``[N, C]`` from the values that cross the cut of network ``A``."""
        logits: Tensor = self.upper(self.mapped(values))
        return logits

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[N, C]`` for images."""
        lower, index = self._lower
        with torch.no_grad():
            values = run_on(lower, images)[index]
        return self.stitched(values)

    def regularization(self) -> Tensor:
        """Return the sum of the maps' regularisers, a scalar."""
        return sum((module.regularization() for module in self.stitching_maps), torch.zeros(()))

    def project(self) -> None:
        """Project all maps; call it after an optimizer step."""
        for module in self.stitching_maps:
            module.project()

    @property
    def stitching_maps(self) -> list[StitchingMap]:
        """The maps, with their type."""
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
    """Return the port of each value that crosses the target's cut; None for a value that passes unchanged.

    Arguments and errors are those of :class:`StitchedNetwork`.
    """
    check_words(("ports", ports, ("all", "branch")))
    for cut, name in ((source, site), (target, target_site)):
        cut.check_site(name)
    wanted, given = target.crossings(target_site), source.shapes(site)
    where = f"{site!r} of the bottom network and {target_site!r} of the top one cannot be stitched"
    if len(given) < len(wanted):
        raise ValueError(
            f"{where}: {len(wanted)} values cross the top network's cut "
            f"({', '.join(crossing.name for crossing in wanted)}), but only {len(given)} the bottom network's; choose "
            "a site at the end of a block."
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
    """Return why a value of this shape cannot pass without a map; empty if it can."""
    if shape == crossing.shape:
        return ""
    advice = 'use ports="all"' if crossing.mapped else "choose other sites"
    return (
        f"{crossing.name} would pass without a map, but has shape {list(shape)} below and {list(crossing.shape)} "
        f"above; {advice}"
    )


def _mapping_trouble(name: str, shape: tuple[int, ...], crossing: Crossing, resize: bool) -> str:
    """Return why a value of this name and shape cannot be mapped; empty if it can."""
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
    """Average a value over positions so that ``size`` remain."""
    pool: Callable[..., Tensor] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(size) - 1]
    return pool(value.movedim(axis, 1), size).movedim(1, axis)
