"""Features of two networks on the same inputs, in a common form."""

import copy
import functools
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_sym._checks import check_known
from lightning_sym._distributed import gathered, ranks, run_on, wide_device
from lightning_sym.symmetry import Tap

Axes: TypeAlias = int | Sequence[int]

_TERMS = 4096  # terms of a sum of products that is accumulated in float64


class SimilarityMetric(Metric):
    """A metric of features that learns their shapes from the first batch.

    A process without batches takes the shapes of the others in synchronisation. The states, like :class:`Features`,
    stay on the CPU if the device has no float64.
    """

    full_state_update = True
    higher_is_better: bool | None = True

    def __init__(self) -> None:
        # A process without further data must still take part in synchronisation.
        super().__init__(compute_with_cache=False)

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Synchronise the states of all processes, as ``torchmetrics`` does."""
        if ranks() > 1 and not self._is_synced:
            self._adopt_shapes()
        super().sync(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        device = fn(torch.empty(0)).device
        return super()._apply(fn, *args, **kwargs) if wide_device(device) == device else self

    def _adopt_shapes(self) -> None:
        held = {name: getattr(self, name) for name in self._defaults}
        own = {name: state[0] if isinstance(state, list) and state else state for name, state in held.items()}
        shapes = {name: (t.shape, t.dtype) for name, t in own.items() if isinstance(t, Tensor) and t.numel()}
        known = {name: found for other in gathered(shapes) for name, found in other.items()}
        for name, (shape, dtype) in known.items():
            if name not in shapes:
                listed = isinstance(held[name], list)
                empty = torch.zeros((0, *shape[1:]) if listed else shape, dtype=dtype, device=self.device)
                setattr(self, name, [empty] if listed else empty)


class Features:
    """Store the outputs of one layer for a batch in the form common to all measures, and cache their statistics.

    Args:
        values: Real, samples on the first axis; not changed, and not copied if possible.
            Values from a device without float64 move to the CPU.
        axes: Axes of the channels, without the first; several are flattened in row-major order.
        name: Name for messages.

    Attributes:
        channels: Features with pixels or tokens last, in order. Shape ``[N, C, positions]``; half precision becomes
            float32.
        grid: Height and width of an image; None for other features.

    Raises:
        TypeError: If it is not a dense tensor of a floating dtype.
        ValueError: If it is empty, there is no such axis, or a value is not finite.
    """

    def __init__(self, values: Tensor, axes: Axes = 1, name: str = "features") -> None:
        axes = (axes,) if isinstance(axes, int) else tuple(axes)
        if not isinstance(values, Tensor) or not values.dtype.is_floating_point or values.layout != torch.strided:
            got = f"a {type(values).__name__}" if not isinstance(values, Tensor) else f"{values.dtype}, {values.layout}"
            raise TypeError(
                f"{name} must be a floating tensor that is dense, got {got}; pass torch.as_tensor(values).float(), or "
                "values.to_dense()."
            )
        if not all(-values.ndim < axis < values.ndim and axis % values.ndim for axis in axes):
            raise ValueError(
                f"{name} must have samples on its first axis and channels on {list(axes)}, got {list(values.shape)}."
            )
        if not values.numel():
            raise ValueError(f"{name} must hold at least one sample and one channel, got shape {list(values.shape)}.")
        values = values.detach().to(wide_device(values.device))
        self.grid = (values.shape[2], values.shape[3]) if values.ndim == 4 and axes == (1,) else None
        size = math.prod(values.shape[axis] for axis in axes)
        moved = values.movedim(axes, tuple(range(1, 1 + len(axes)))).reshape(len(values), size, -1)
        self.channels = moved.float() if moved.dtype in (torch.float16, torch.bfloat16) else moved
        self._sums = self.channels.sum(2)
        if not bool(self._sums.isfinite().all()):
            _check_finite(values, name)
        self._kept: dict[Any, Tensor] = {}

    def __len__(self) -> int:
        return len(self.channels)

    @property
    def size(self) -> int:
        """Number of channels."""
        return self.channels.shape[1]

    @property
    def positions(self) -> int:
        """Number of pixels or tokens."""
        return self.channels.shape[2]

    def mean(self) -> Tensor:
        """Return each channel's mean. Shape ``[C]``, float64."""
        return self._once("mean", lambda: self._sums.double().sum(0) / (len(self) * self.positions))

    def squares(self) -> Tensor:
        """Return each channel's sum of squares about its mean. Shape ``[C]``, float64."""

        def summed() -> Tensor:
            norms: Tensor = torch.linalg.vector_norm(self._centred(), dim=2)
            return norms.double().square().sum(1)

        return self._once("squares", summed)

    def products(self) -> Tensor:
        """Return the sums of products of all pairs of channels about their means. Shape ``[C, C]``, float64."""
        return self._once("products", lambda: joint_products([(self, self)])[0])

    def reordered(self, order: Tensor) -> Self:
        """Permute the samples: sample ``i`` of the result is sample ``order[i]``."""
        moved = copy.copy(self)
        order = order.to(self.channels.device)
        moved.channels, moved._sums = self.channels[order], self._sums[order]
        moved._kept = {name: self._kept[name] for name in ("mean", "squares", "products") if name in self._kept}
        return moved

    def _centred(self) -> Tensor:
        """Return the channels with their means subtracted. Shape ``[C, N, positions]``."""
        return self._once("centred", lambda: _stacked((self,)))

    def _once(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def _check_finite(values: Tensor, name: str) -> None:
    """Raise an error that locates values that are not finite, if there are any; their sums alone may not be finite."""
    wrong = (~values.isfinite()).nonzero()
    if len(wrong):
        raise ValueError(
            f"{name} has {len(wrong)} values that are not finite, the first at {wrong[0].tolist()}; look for overflow "
            "or diverged members, above all in half precision."
        )


def joint_products(pairs: Sequence[tuple[Features, Features]]) -> list[Tensor]:
    """Return the sums of products of channels about their means, over samples and positions, for pairs of layers.

    Layers with the same grid are stacked into one layer with the channels of all: a few large matrix products replace
    many small ones. A pixel that is repeated is multiplied with the sum of the pixels of the finer grid.

    Args:
        pairs: Layers of two networks on the same inputs.

    Returns:
        For each pair a tensor of shape ``[C1, C2]``, float64.

    Raises:
        ValueError: If grids do not match, see :func:`repeats`.
    """
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    for place, (x, y) in enumerate(pairs):
        alike[tuple((one.grid, one.channels.shape[2], one.channels.dtype) for one in (x, y))].append(place)
    found: dict[int, Tensor] = {}
    for places in alike.values():
        xs, ys = (tuple(dict.fromkeys(pairs[place][side] for place in places)) for side in (0, 1))
        times = repeats(xs[0], ys[0])
        product = _summed_products(_pooled(xs, times[1]), _pooled(ys, times[0]))
        rows, columns = (dict(zip(side, _places(side), strict=True)) for side in (xs, ys))
        for place in places:
            x, y = pairs[place]
            found[place] = product[rows[x], columns[y]]
    return [found[place] for place in range(len(pairs))]


def _places(layers: Sequence[Features]) -> list[slice]:
    """Return the slice of each layer's channels in the concatenation."""
    ends = list(itertools.accumulate(layer.size for layer in layers))
    return [slice(end - layer.size, end) for layer, end in zip(layers, ends, strict=True)]


def _stacked(layers: tuple[Features, ...]) -> Tensor:
    """Return the channels of layers of one shape, with their means subtracted. Shape ``[channels, N, positions]``."""

    def stack() -> Tensor:
        shape = (sum(layer.size for layer in layers), *layers[0].channels[:, 0].shape)
        stacked = layers[0].channels.new_empty(shape)
        for layer, place in zip(layers, _places(layers), strict=True):
            mean = layer.mean().to(stacked.dtype)
            torch.sub(layer.channels.transpose(0, 1), mean[:, None, None], out=stacked[place])
            layer._kept["centred"] = stacked[place]
        return stacked

    return layers[0]._once(("stacked", layers[1:]), stack)


def _pooled(layers: tuple[Features, ...], sides: tuple[int, int]) -> Tensor:
    """Return the same with pixels summed over rectangles. Shape ``[channels, N, positions / area]``."""
    grid = layers[0].grid
    if sides == (1, 1) or grid is None:
        return _stacked(layers)

    def pool() -> Tensor:
        # Slice by slice: several times as fast as torch's pooling of many small images.
        (height, width), whole = grid, _stacked(layers)
        images = whole.view(*whole.shape[:2], height // sides[0], sides[0], width)
        rows = functools.reduce(torch.add, images.unbind(3)).view(*images.shape[:3], width // sides[1], sides[1])
        return functools.reduce(torch.add, rows.unbind(4)).flatten(2)

    return layers[0]._once(("pooled", layers[1:], sides), pool)


def _summed_products(x: Tensor, y: Tensor) -> Tensor:
    """Return the sums over samples and positions of the products of channels.

    Args:
        x: Shape ``[C1, N, positions]``.
        y: Shape ``[C2, N, positions]``.

    Returns:
        Shape ``[C1, C2]``, float64. A few thousand products are summed in the dtype of the features; with one position,
        all are summed in float64.
    """
    dtype = torch.float64 if x.shape[2] == 1 else torch.promote_types(x.dtype, y.dtype)
    total = torch.zeros(len(x), len(y), dtype=torch.float64, device=x.device)
    ours, theirs = x.flatten(1), y.flatten(1)
    for start in range(0, ours.shape[1], _TERMS):
        part = slice(start, start + _TERMS)
        total += ours[:, part].to(dtype) @ theirs[:, part].to(dtype).T
    return total


def repeats(x: Features, y: Features) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the repetitions, down and across, that bring the pixels of x and of y to a common grid.

    Raises:
        ValueError: If the sides of one grid are not multiples of the other's, or other features have different numbers
            of positions.
    """
    if x.grid is None or y.grid is None:
        if x.positions != y.positions:
            raise ValueError(
                f"x has {x.positions} pixels or tokens per sample and y {y.positions}; expected equal numbers, or CKA, "
                "which needs no common grid."
            )
        return (1, 1), (1, 1)
    (h1, w1), (h2, w2) = x.grid, y.grid
    high, wide = max(h1, h2), max(w1, w2)
    if high % h1 or high % h2 or wide % w1 or wide % w2:
        raise ValueError(
            f"the grids of x and y are {h1} x {w1} and {h2} x {w2}; expected sides that are multiples of the other's: "
            "pool first, or use CKA, which needs no common grid."
        )
    return (high // h1, wide // w1), (high // h2, wide // w2)


def check_pair(x: Features, y: Features) -> None:
    """Check that two batches have the same number of samples.

    Raises:
        ValueError: If they do not.
    """
    if len(x) != len(y):
        raise ValueError(
            f"x has {len(x)} samples and y {len(y)}; expected features of the same inputs, in the same order."
        )


def undefined(reason: str) -> Tensor:
    """Return NaN with a warning about the reason: a 0-dimensional tensor, float64."""
    warnings.warn(f"no similarity: {reason}", UserWarning, stacklevel=3)
    return torch.tensor(math.nan, dtype=torch.float64)


def features_of(network: nn.Module, taps: Iterable[Tap | str], *inputs: Any) -> dict[str, Tensor]:
    """Run a network on a batch, in evaluation mode without gradients, and return the outputs of modules.

    Args:
        network: The network; its mode is restored.
        taps: Hook points of its symmetry, or names of modules (or one name); a suffix ``-2``, ... selects a later call.
        inputs: Arguments of the network, moved to its device.

    Returns:
        Outputs by name. Later modules that change them in place have no effect; they may share memory with the inputs.
        A module with several outputs contributes the first.

    Raises:
        ValueError: If there is no such module, it has fewer calls, or its output is not a tensor.
    """
    modules = dict(network.named_modules())
    wanted: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for tap in [taps] if isinstance(taps, str) else taps:
        name, module, call = (tap, tap, 0) if isinstance(tap, str) else (tap.name, tap.module, tap.call)
        base, _, number = name.rpartition("-")
        if module not in modules and number.isdigit():
            module, call = base, int(number) - 1
        check_known("module", module, modules)
        wanted[module][call] = name
    found = _tapped(network, inputs, modules, wanted, copy=False)
    missing = [name for names in wanted.values() for name in names.values() if name not in found]
    if missing:
        raise ValueError(f"{', '.join(missing)} were not called by the network on these inputs.")
    return found


def _tapped(
    network: nn.Module,
    inputs: Any,
    modules: dict[str, nn.Module],
    wanted: dict[str, dict[int, str]],
    *,
    copy: bool,
) -> dict[str, Tensor]:
    """Return the outputs of some calls of modules, copied if later modules change them in place."""
    found: dict[str, Tensor] = {}
    versions: dict[str, int] = {}
    handles = []
    for name, names in wanted.items():
        calls = itertools.count()

        def keep(module: nn.Module, args: Any, output: Any, calls: Any = calls, names: Any = names) -> None:
            name = names.get(next(calls))
            if name is not None:
                tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
                if tensor is None:
                    raise ValueError(f"{name} returns no tensor but {type(output).__name__}; expected another module.")
                found[name] = tensor.detach().clone() if copy else tensor.detach()
                versions[name] = found[name]._version

        handles.append(modules[name].register_forward_hook(keep))
    training = {name: module.training for name, module in modules.items()}
    try:
        with torch.no_grad():
            run_on(network.eval(), *inputs)
    finally:
        for handle in handles:
            handle.remove()
        for name, module in modules.items():
            module.training = training[name]
    if all(tensor._version == versions[name] for name, tensor in found.items()):
        return found
    return _tapped(network, inputs, modules, wanted, copy=True)
