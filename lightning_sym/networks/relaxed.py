"""Networks whose layers hold several paths, from fully connected to group convolutional."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, cast

from torch import nn

from lightning_sym._checks import check_integers, height_width
from lightning_sym._text import unknown
from lightning_sym.layers import (
    CircularConv,
    FactoredFullyConnected,
    FullyConnected,
    GroupConv,
    GroupLift,
    GroupMax,
    PolyphasePool,
    ResidualPathways,
    SparseConv,
    SparseFactoredFullyConnected,
)
from lightning_sym.networks.activations import make_activation
from lightning_sym.networks.base import _SequentialNetwork

# The family of each kind of path: its name within a block, and in reports.
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
}


class RelaxedNetwork(_SequentialNetwork):
    """Blocks of parallel paths that learn how equivariant each layer is, then two linear layers; no batch norm.

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

    then ``hidden`` (16a to 64a), an activation and ``classifier``. Every other grid follows the same scheme: pairs of
    blocks, the second of which doubles the channels and halves the grid, as long as the shorter side is above 4; then
    two blocks to 1, of which the second doubles the channels; ``hidden`` is four times as wide as what comes in. So
    there are 4 blocks for 8x8, 6 for 16x16, 8 for 32x32 and 10 for 64x64. On rectangular grids the shorter side ends at
    1, and the mean is taken over what is left of the longer one.

    Fully connected paths map to the smaller grid by themselves; convolutional ones are followed by
    :class:`~lightning_sym.layers.PolyphasePool`: one for all of them where there are several, which then are the paths
    of ``block{l}.pooled.0``, as pools of their own could keep components one pixel apart.

    With a ``gconv`` path the network works on the group p4: the image is lifted to four copies, all channels above are
    those of each rotation (other paths see the four together), and the maximum over rotations stands before ``hidden``.
    A network of ``gconv`` paths alone is exactly invariant to circular shifts and to rotations by 90 degrees, one of
    convolutional paths alone to shifts.

    Initialisation is that of the layers, and torch's for the last two, with zero bias.

    Args:
        paths: Kinds of the paths of every block, one or more of ``fc`` (:class:`~lightning_sym.layers.FullyConnected`),
            ``ffc`` (:class:`~lightning_sym.layers.FactoredFullyConnected`), ``sfc``
            (:class:`~lightning_sym.layers.SparseFactoredFullyConnected`), ``conv``
            (:class:`~lightning_sym.layers.CircularConv`), ``sconv`` (:class:`~lightning_sym.layers.SparseConv`),
            ``gconv`` (pointwise :class:`~lightning_sym.layers.GroupConv`), ``gconv_full``, ``gconv_separable``,
            ``gconv_depthwise_separable``. In a block, paths are called by their family, ``fc``, ``conv`` or ``gconv``,
            and by their kind where several are of one family. Or a list of such lists, one for each block.
        width: Base width ``a``, >= 1.
        grid: Side of the images, or (height, width): powers of two, >= 8. Default 32, or ``image_size``.
        in_channels: Channels of the images, >= 1.
        num_classes: Number of outputs ``K``, >= 1.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.
        scale: Factor on the sum of paths; default one over their number.
        relaxed_gain: Factor, > 0, on the initial output weights (``weight``, ``theta2``, ``u2``) of fully connected
            paths that stand beside others. Below 1 the network starts close to an equivariant one, and training
            relaxes it where that helps; at 1, fully connected paths, which learn first, are hard to leave again.
        kernel_size: Side of the filters of convolutional paths, odd.
        anchors: Number of anchors of ``sconv`` paths; default half of the filter positions, rounded up. Those of
            ``sfc`` paths are always half of the grid's.
        learn_positions: Train the anchors' positions in ``sconv`` and ``sfc`` paths.
        learn_lengthscale: Train their inverse length scales.
        pool_norm: ``max`` or ``l2``, see :class:`~lightning_sym.layers.PolyphasePool`.
        image_size: The same as ``grid``, under the name by which recipes pass on what the data have.

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
    ) -> None:
        super().__init__()
        check_integers(width=width, in_channels=in_channels, num_classes=num_classes)
        if not (math.isfinite(relaxed_gain) and relaxed_gain > 0):
            raise ValueError(f"relaxed_gain of RelaxedNetwork must be a finite number > 0, got {relaxed_gain}.")
        sides = _grid(grid, image_size)
        scheme = _scheme(min(sides))
        offered = [_path_names(kinds) for kinds in _offered(paths, len(scheme))]
        lifted = 4 if any("gconv" in _families(names) for names in offered) else 1
        learned = {"learn_positions": learn_positions, "learn_lengthscale": learn_lengthscale}

        def make(kind: str, channels: tuple[int, int], before: tuple[int, int], after: tuple[int, int]) -> nn.Module:
            flat = (lifted * channels[0], lifted * channels[1])
            layers: dict[str, Callable[[], nn.Module]] = {
                "fc": lambda: FullyConnected(*flat, before, after),
                "ffc": lambda: FactoredFullyConnected(*flat, before, after),
                "sfc": lambda: SparseFactoredFullyConnected(*flat, before, after, **learned),
                "conv": lambda: CircularConv(*flat, kernel_size),
                "sconv": lambda: SparseConv(*flat, kernel_size, anchors, **learned),
                "gconv": lambda: GroupConv(*channels, "pointwise", kernel_size),
                "gconv_full": lambda: GroupConv(*channels, "full", kernel_size),
                "gconv_separable": lambda: GroupConv(*channels, "separable", kernel_size),
                "gconv_depthwise_separable": lambda: GroupConv(*channels, "depthwise_separable", kernel_size),
            }
            return layers[kind]()

        if lifted > 1:
            self.lift = GroupLift()
        channels, depth = in_channels, 0
        for depth, ((factor, halved), names) in enumerate(zip(scheme, offered, strict=True), 1):
            after = (sides[0] // 2, sides[1] // 2) if halved else sides
            members = {name: make(kind, (channels, factor * width), sides, after) for name, kind in names.items()}
            if set(_families(names)) != {"fc"}:
                _shrink([path for name, path in members.items() if _FAMILIES[names[name]] == "fc"], relaxed_gain)
            weight = 1 / len(members) if scale is None else scale
            if halved:
                members = _pooled(members, {name for name, kind in names.items() if _FAMILIES[kind] != "fc"}, pool_norm)
            self.add_module(f"block{depth - 1}", ResidualPathways(members, scale=weight))
            self.add_module(f"activation{depth - 1}", make_activation(activation))
            channels, sides = factor * width, after
        if max(sides) > 1:
            self.mean = nn.AvgPool2d(sides)
        if lifted > 1:
            self.group_max = GroupMax()
        self.flatten = nn.Flatten()
        self.hidden = nn.Linear(channels, 4 * channels)
        self.add_module(f"activation{depth}", make_activation(activation))
        self.classifier = nn.Linear(4 * channels, num_classes)
        for linear in (self.hidden, self.classifier):
            nn.init.zeros_(linear.bias)


def _shrink(paths: Iterable[nn.Module], gain: float) -> None:
    """Multiply the weights by which fully connected paths write their outputs."""
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
    """Return paths to the smaller grid: one pool follows all convolutional ones together.

    With a pool for each, two paths might keep different components, and move apart when the image moves.
    """
    pooled = {name: path for name, path in members.items() if name in convolutional}
    others = {name: path for name, path in members.items() if name not in convolutional}
    if len(pooled) > 1:
        return {**others, "pooled": nn.Sequential(ResidualPathways(pooled, scale=1), PolyphasePool(norm))}
    return {**others, **{name: nn.Sequential(path, PolyphasePool(norm)) for name, path in pooled.items()}}


def _families(names: Mapping[str, str]) -> list[str]:
    """Return the families of the paths of a block, from their kinds by name."""
    return [_FAMILIES[kind] for kind in names.values()]


def _offered(paths: Sequence[str] | Sequence[Sequence[str]], blocks: int) -> list[Sequence[str]]:
    """Return the kinds of paths of each block.

    Raises:
        ValueError: If they are given block by block, for another number of blocks.
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
    """Return the kinds of paths by the names of the paths."""
    if isinstance(paths, str) or not isinstance(paths, Sequence) or not paths:
        raise ValueError(
            f"paths of RelaxedNetwork must be a list of one or more of {', '.join(_FAMILIES)}, got {paths!r}."
        )
    for kind in paths:
        if kind not in _FAMILIES:
            raise ValueError(unknown("path of RelaxedNetwork", kind, _FAMILIES))
    if len(set(paths)) < len(paths):
        raise ValueError(f"paths of RelaxedNetwork must differ from one another, got {list(paths)}; name each once.")
    families = [_FAMILIES[kind] for kind in paths]
    return {kind if families.count(family) > 1 else family: kind for kind, family in zip(paths, families, strict=True)}


def _grid(grid: int | tuple[int, int] | None, image_size: int | tuple[int, int] | None) -> tuple[int, int]:
    """Return height and width from the two arguments that may say so."""
    given = {height_width(size, "image_size") for size in (grid, image_size) if size is not None}
    if len(given) > 1:
        raise ValueError(
            f"grid of RelaxedNetwork is {grid!r}, but images are {image_size!r}; leave grid out, or resize the data."
        )
    sides = given.pop() if given else (32, 32)
    if any(side < 8 or side & (side - 1) for side in sides):
        raise ValueError(
            f"RelaxedNetwork takes images whose sides are powers of two, 8 at least, got {sides[0]}x{sides[1]}; "
            "pad or resize them."
        )
    return sides
