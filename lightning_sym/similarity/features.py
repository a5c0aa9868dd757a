"""Features of two networks on the same inputs, brought into one form."""

import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sym._distributed import gathered, on_device_of, ranks
from lightning_sym._text import unknown
from lightning_sym.symmetry import Tap


class SimilarityMetric(Metric):
    """A metric of features whose shapes are known from the first batch on.

    A process that was given no batch takes the shapes of the others when they are brought together.
    """

    full_state_update = True
    higher_is_better: bool | None = True
    is_differentiable = False

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Bring the states of all processes together, as ``torchmetrics`` does."""
        if ranks() > 1 and not self._is_synced:
            self._take_shapes()
        super().sync(*args, **kwargs)

    def _take_shapes(self) -> None:
        held = {name: getattr(self, name) for name in self._defaults}
        own = {name: state[0] if isinstance(state, list) and state else state for name, state in held.items()}
        shapes = {name: (t.shape, t.dtype) for name, t in own.items() if isinstance(t, Tensor) and t.numel()}
        known = {name: found for other in gathered(shapes) for name, found in other.items()}
        for name, (shape, dtype) in known.items():
            if name not in shapes:
                listed = isinstance(held[name], list)
                empty = torch.zeros((0, *shape[1:]) if listed else shape, dtype=dtype, device=self.device)
                setattr(self, name, [empty] if listed else empty)


def channel_rows(name: str, features: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return features with samples first and channels last.

    Args:
        name: Of the argument, for messages.
        features: Real, with samples on the first axis.
        axes: Where the channels are, not the first axis; of several they are read in row-major order.

    Returns:
        Shape ``[N, positions, C]``: pixels or tokens lie in between, in order. A view where that is possible.

    Raises:
        TypeError: If the dtype is not floating.
        ValueError: If there is no such axis, or a value is not finite.
    """
    if not features.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating tensor, got {features.dtype}.")
    if features.ndim < 2 or not all(-features.ndim < axis < features.ndim and axis for axis in axes):
        raise ValueError(
            f"{name} must have samples on its first axis and channels on {list(axes)}, got {list(features.shape)}."
        )
    finite = features.isfinite()
    if not bool(finite.all()):
        raise ValueError(
            f"{name} has {int((~finite).sum())} values that are not finite, the first at "
            f"{(~finite).nonzero()[0].tolist()}; look for overflow or diverged members, above all in half precision."
        )
    moved = features.detach().movedim(axes, tuple(range(-len(axes), 0)))
    return moved.reshape(len(features), -1, math.prod(features.shape[axis] for axis in axes))


def repeats(x: Tensor, y: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how often the pixels of x and of y are repeated, down and across, to come to one grid.

    Args:
        x: Shape ``[N, C1, H1, W1]``; features of any other shape are not images, and are left as they are.
        y: Shape ``[N, C2, H2, W2]``; the sides of one grid are multiples of the other's.

    Raises:
        ValueError: If they are not.
    """
    if x.ndim != 4 or y.ndim != 4:
        return (1, 1), (1, 1)
    (h1, w1), (h2, w2) = x.shape[2:], y.shape[2:]
    high, wide = max(h1, h2), max(w1, w2)
    if high % h1 or high % h2 or wide % w1 or wide % w2:
        raise ValueError(
            f"the grids of x and y are {h1} x {w1} and {h2} x {w2}; expected sides that are multiples of the other's: "
            "pool first, or use CKA, which needs no common grid."
        )
    return (high // h1, wide // w1), (high // h2, wide // w2)


def summed_pixels(x: Tensor, sides: tuple[int, int]) -> Tensor:
    """Return the sums of the pixels in rectangles with these sides. Shape ``[N, C, H / sides[0], W / sides[1]]``."""
    if sides == (1, 1):
        return x
    n, c, h, w = x.shape
    return x.reshape(n, c, h // sides[0], sides[0], w // sides[1], sides[1]).sum((3, 5))


def check_pair(x: Tensor, y: Tensor) -> None:
    """Check that two batches belong together.

    Raises:
        ValueError: If they have different numbers of samples.
    """
    if len(x) != len(y):
        raise ValueError(
            f"x has {len(x)} samples and y {len(y)}; expected features of the same inputs, in the same order."
        )


def undefined(reason: str) -> Tensor:
    """Return NaN, with a warning that says why there is no value: a 0-dimensional tensor, float64."""
    warnings.warn(f"no similarity: {reason}", UserWarning, stacklevel=3)
    return torch.tensor(math.nan, dtype=torch.float64)


def features_of(network: nn.Module, taps: Iterable[Tap | str], *inputs: Any) -> dict[str, Tensor]:
    """Run a network on a batch, in evaluation mode and without gradients, and return what modules put out.

    Args:
        network: The network; its mode is restored.
        taps: Taps of its symmetry, or names of modules; a name with ``-2``, ``-3``, ... means a later call.
        inputs: What it is called with, moved to its device.

    Returns:
        By name, copies: what is changed in place later does not show.

    Raises:
        ValueError: If there is no such module, it was not called as often, or its output is no tensor.
    """
    modules = dict(network.named_modules())
    wanted: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for tap in taps:
        name, module, call = (tap, tap, 0) if isinstance(tap, str) else (tap.name, tap.module, tap.call)
        base, _, number = name.rpartition("-")
        if module not in modules and number.isdigit():
            module, call = base, int(number) - 1
        if module not in modules:
            raise ValueError(unknown("module", module, modules))
        wanted[module][call] = name
    found: dict[str, Tensor] = {}
    handles = []
    for name, names in wanted.items():
        calls = itertools.count()

        def keep(module: nn.Module, args: Any, output: Any, calls: Any = calls, names: Any = names) -> None:
            name = names.get(next(calls))
            if name is not None:
                if not isinstance(output, Tensor):
                    raise ValueError(f"{name} puts out a {type(output).__name__}; expected a module with one tensor.")
                found[name] = output.detach().clone()

        handles.append(modules[name].register_forward_hook(keep))
    training = {name: module.training for name, module in modules.items()}
    try:
        with torch.no_grad():
            network.eval()(*on_device_of(network, inputs))
    finally:
        for handle in handles:
            handle.remove()
        for name, module in modules.items():
            module.training = training[name]
    missing = [name for names in wanted.values() for name in names.values() if name not in found]
    if missing:
        raise ValueError(f"{', '.join(missing)} were not called by the network on these inputs.")
    return found
