"""Networks with parallel pathways per layer, from fully connected to group convolutional."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, cast

from torch import nn

from lightning_sym._checks import check_integers, check_known, height_width
from lightning_sym.layers import (
    CircularConv,
    EquivariantLinear,
    FactoredFullyConnected,
    FullyConnected,
    GroupConv,
    GroupLift,
    GroupMax,
    PolyphasePool,
    ResidualPathways,
    SparseConv,
    SparseFactoredFullyConnected,
    grid_action,
)
from lightning_sym.layers.group_conv import ORDERS, PlaneGroup
from lightning_sym.networks.activations import make_activation
from lightning_sym.networks.base import _SequentialNetwork

# The family of each kind of path: its name within a block and in reports.
_FAMILIES = {
    "fc": "fc",
    "ffc": "fc",
    "sfc": "fc",
    "conv": "conv",
    "sconv": "conv",
    "gconv": "gconv",
    "gconv_full": "gconv",
    "gconv_separable": "gconv",
    "gconv_depthwise_separable": "gconv",
    "c4": "c4",
    "d4": "d4",
}
_BETWEEN_GRIDS = ("fc", "c4", "d4")  # families of paths that map to the smaller grid themselves


class RelaxedNetwork(_SequentialNetwork):
    """Blocks of parallel residual pathways that learn layer-wise equivariance, then two linear layers; no batch norm.

    Block ``l`` is the module ``block{l}``, a :class:`~lightning_sym.layers.ResidualPathways`, followed by
    ``activation{l}``. On 32x32 images, with ``a = width``:

    ===== =============== ============
    block channels        grid
    ===== =============== ============
    0, 1  C, a, 2a        32 -> 32, 16
    2, 3  2a, 2a, 4a      16 -> 16, 8
    4, 5  4a, 4a, 8a      8 -> 8, 4
    6     8a, 8a          4 -> 2
    7     8a, 16a         2 -> 1
    ===== =============== ============

    then ``hidden`` (16a to 64a), an activation and ``classifier``. Every other grid follows the same scheme. While the
    shorter side is above 4, pairs of blocks follow, and the second doubles the channels and halves the grid. Two more
    blocks reduce the grid to 1; the second doubles the channels. ``hidden`` quadruples the width. There are 4 blocks
    for 8x8, 6 for 16x16, 8 for 32x32 and 10 for 64x64. On rectangular grids the shorter side ends at 1, and the mean
    is taken over the rest of the longer one.

    Fully connected pathways map to the smaller grid themselves. :class:`~lightning_sym.layers.PolyphasePool` follows
    convolutional ones: a single pool for all of them, as separate pools could keep components one pixel apart. Several
    convolutional pathways are then those of ``block{l}.pooled.0``.

    With a ``gconv`` path the network works on the group p4, or p4m. The image is lifted to four or eight copies, and
    channels belong to elements of the point group (other pathways see all together); a maximum over elements precedes
    ``hidden``. A network of only ``gconv`` pathways is exactly invariant to circular shifts, rotations by 90 degrees
    and, on p4m, reflections, one of only convolutional pathways to shifts.

    Initialisation is that of the layers, and PyTorch's with zero bias for the last two.

    Args:
        paths: Kinds of the paths of every block, one or more of ``fc`` (:class:`~lightning_sym.layers.FullyConnected`),
            ``ffc`` (:class:`~lightning_sym.layers.FactoredFullyConnected`), ``sfc``
            (:class:`~lightning_sym.layers.SparseFactoredFullyConnected`), ``conv``
            (:class:`~lightning_sym.layers.CircularConv`), ``sconv`` (:class:`~lightning_sym.layers.SparseConv`),
            ``gconv`` (pointwise :class:`~lightning_sym.layers.GroupConv`), ``gconv_full``, ``gconv_separable``,
            ``gconv_depthwise_separable``, ``c4`` (:class:`~lightning_sym.layers.EquivariantLinear`: all maps that
            commute with quarter turns of square images, not with shifts), ``d4`` (also with reflections), which go with
            all kinds but ``gconv``. In a block, pathways are named by their family, ``fc``, ``conv``, ``gconv``, ``c4``
            or ``d4``, and by their kind if several belong to one family. Or a list of such lists, one for each block.
        width: Base width ``a``, >= 1.
        grid: Side of the images, or (height, width): powers of two, >= 8. Default 32, or ``image_size``.
        in_channels: Channels of the images, >= 1.
        num_classes: Number of outputs ``K``, >= 1.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.
        scale: Factor on the sum of pathways; default one over their number.
        relaxed_gain: Factor, > 0, on the initial output weights (``weight``, ``theta2``, ``u2``) of fully connected
            pathways parallel to others. Below 1 the network starts close to an equivariant one, and training relaxes
            it where that helps; at 1, fully connected pathways learn first and are hard to prune afterwards.
        kernel_size: Side of the filters of convolutional paths, odd.
        anchors: Number of anchors of ``sconv`` pathways; default half of the filter positions, rounded up. ``sfc``
            pathways always have half as many as grid positions.
        learn_positions: Train the anchors' positions in ``sconv`` and ``sfc`` paths.
        learn_lengthscale: Train their inverse length scales.
        pool_norm: ``max`` or ``l2``, see :class:`~lightning_sym.layers.PolyphasePool`.
        image_size: Alias of ``grid``, to which recipes link the shape of the data.
        group: Group of ``gconv`` pathways: ``p4``, shifts and quarter turns, or ``p4m``, also reflections.

    Raises:
        ValueError: If an argument is out of range, or ``grid`` and ``image_size`` differ.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), "Learning Layer-wise Equivariances Automatically using Gradients",
        appendix; docs/theory/relaxed_layers.md, 3.
    """

    def __init__(
        self,
        paths: Sequence[str] | Sequence[Sequence[str]] = ("ffc", "conv"),
        width: int = 10,
        grid: int | tuple[int, int] | None = None,
        in_channels: int = 3,
        num_classes: int = 10,
        activation: str = "relu",
        scale: float | None = None,
        relaxed_gain: float = 1.0,
        kernel_size: int = 3,
        anchors: int | None = None,
        learn_positions: bool = False,
        learn_lengthscale: bool = False,
        pool_norm: Literal["max", "l2"] = "max",
        image_size: int | tuple[int, int] | None = None,
        group: PlaneGroup = "p4",
    ) -> None:
        super().__init__()
        check_integers(width=width, in_channels=in_channels, num_classes=num_classes)
        if not (math.isfinite(relaxed_gain) and relaxed_gain > 0):
            raise ValueError(f"relaxed_gain of RelaxedNetwork must be a finite number > 0, got {relaxed_gain}.")
        check_known("group of RelaxedNetwork", group, ORDERS)
        sides = _grid(grid, image_size)
        scheme = _scheme(min(sides))
        offered = [_path_names(kinds) for kinds in _offered(paths, len(scheme))]
        lifted = ORDERS[group] if any("gconv" in _families(names) for names in offered) else 1
        if lifted > 1 and any({"c4", "d4"} & set(names.values()) for names in offered):
            raise ValueError(
                "Paths c4 and d4 of RelaxedNetwork turn images, but with gconv features turn on a group; use either."
            )
        learned = {"learn_positions": learn_positions, "learn_lengthscale": learn_lengthscale}

        def make(kind: str, channels: tuple[int, int], before: tuple[int, int], after: tuple[int, int]) -> nn.Module:
            flat = (lifted * channels[0], lifted * channels[1])
            layers: dict[str, Callable[[], nn.Module]] = {
                "fc": lambda: FullyConnected(*flat, before, after),
                "ffc": lambda: FactoredFullyConnected(*flat, before, after),
                "sfc": lambda: SparseFactoredFullyConnected(*flat, before, after, **learned),
                "conv": lambda: CircularConv(*flat, kernel_size),
                "sconv": lambda: SparseConv(*flat, kernel_size, anchors, **learned),
                "c4": lambda: EquivariantLinear(*flat, grid_action("c4", before), grid_action("c4", after), after),
                "d4": lambda: EquivariantLinear(*flat, grid_action("d4", before), grid_action("d4", after), after),
                "gconv": lambda: GroupConv(*channels, "pointwise", kernel_size, group),
                "gconv_full": lambda: GroupConv(*channels, "full", kernel_size, group),
                "gconv_separable": lambda: GroupConv(*channels, "separable", kernel_size, group),
                "gconv_depthwise_separable": lambda: GroupConv(*channels, "depthwise_separable", kernel_size, group),
            }
            return layers[kind]()

        if lifted > 1:
            self.lift = GroupLift(group)
        channels, depth = in_channels, 0
        for depth, ((factor, halved), names) in enumerate(zip(scheme, offered, strict=True), 1):
            after = (sides[0] // 2, sides[1] // 2) if halved else sides
            members = {name: make(kind, (channels, factor * width), sides, after) for name, kind in names.items()}
            if set(_families(names)) != {"fc"}:
                _shrink([path for name, path in members.items() if _FAMILIES[names[name]] == "fc"], relaxed_gain)
            weight = 1 / len(members) if scale is None else scale
            if halved:
                convolutional = {name for name, kind in names.items() if _FAMILIES[kind] not in _BETWEEN_GRIDS}
                members = _pooled(members, convolutional, pool_norm)
            self.add_module(f"block{depth - 1}", ResidualPathways(members, scale=weight))
            self.add_module(f"activation{depth - 1}", make_activation(activation))
            channels, sides = factor * width, after
        if max(sides) > 1:
            self.mean = nn.AvgPool2d(sides)
        if lifted > 1:
            self.group_max = GroupMax(group)
        self.flatten = nn.Flatten()
        self.hidden = nn.Linear(channels, 4 * channels)
        self.add_module(f"activation{depth}", make_activation(activation))
        self.classifier = nn.Linear(4 * channels, num_classes)
        for linear in (self.hidden, self.classifier):
            nn.init.zeros_(linear.bias)


def _shrink(paths: Iterable[nn.Module], gain: float) -> None:
    """Scale the output weights of fully connected pathways."""
    for path in paths:
        for name in ("weight", "theta2", "u2"):
            if hasattr(path, name):
                getattr(path, name).data.mul_(gain)


def _scheme(side: int) -> list[tuple[int, bool]]:
    """Return, for each block, the width in units of the base width, and whether it halves the grid."""
    blocks, factor = [], 1
    while side > 4:
        blocks += [(factor, False), (2 * factor, True)]
        factor, side = 2 * factor, side // 2
    return [*blocks, (factor, True), (2 * factor, True)]


def _pooled(members: dict[str, nn.Module], convolutional: set[str], norm: Literal["max", "l2"]) -> dict[str, nn.Module]:
    """Return the pathways to the smaller grid, with one pool for all convolutional ones.

    Separate pools might keep different components, and move apart when the image shifts.
    """
    pooled = {name: path for name, path in members.items() if name in convolutional}
    others = {name: path for name, path in members.items() if name not in convolutional}
    if len(pooled) > 1:
        return {**others, "pooled": nn.Sequential(ResidualPathways(pooled, scale=1), PolyphasePool(norm))}
    return {**others, **{name: nn.Sequential(path, PolyphasePool(norm)) for name, path in pooled.items()}}


def _families(names: Mapping[str, str]) -> list[str]:
    """Return the families of the pathways of a block, from their kinds by name."""
    return [_FAMILIES[kind] for kind in names.values()]


def _offered(paths: Sequence[str] | Sequence[Sequence[str]], blocks: int) -> list[Sequence[str]]:
    """Return the kinds of pathways of each block.

    Raises:
        ValueError: If a list per block has another number of blocks.
    """
    each = [kinds for kinds in paths if not isinstance(kinds, str)] if isinstance(paths, Sequence) else []
    if not each:
        return [cast("Sequence[str]", paths)] * blocks
    if len(each) != len(paths) or len(each) != blocks:
        raise ValueError(
            f"paths of RelaxedNetwork must be one list for all blocks, or one for each of its {blocks} blocks on this "
            f"grid, got {list(paths)}."
        )
    return each


def _path_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the kinds of pathways by name."""
    if isinstance(paths, str) or not isinstance(paths, Sequence) or not paths:
        raise ValueError(
            f"paths of RelaxedNetwork must be a list of one or more of {', '.join(_FAMILIES)}, got {paths!r}."
        )
    for kind in paths:
        check_known("path of RelaxedNetwork", kind, _FAMILIES)
    if len(set(paths)) < len(paths):
        raise ValueError(f"paths of RelaxedNetwork must differ from one another, got {list(paths)}; name each once.")
    families = [_FAMILIES[kind] for kind in paths]
    return {kind if families.count(family) > 1 else family: kind for kind, family in zip(paths, families, strict=True)}


def _grid(grid: int | tuple[int, int] | None, image_size: int | tuple[int, int] | None) -> tuple[int, int]:
    """Return height and width from either argument."""
    given = {height_width(size, "image_size") for size in (grid, image_size) if size is not None}
    if len(given) > 1:
        raise ValueError(
            f"grid of RelaxedNetwork is {grid!r}, but images are {image_size!r}; leave grid out, or resize the data."
        )
    sides = given.pop() if given else (32, 32)
    if any(side < 8 or side & (side - 1) for side in sides):
        raise ValueError(
            f"RelaxedNetwork takes images with sides that are powers of two, 8 at least, got {sides[0]}x{sides[1]}; "
            "pad or resize them."
        )
    return sides
