"""Test whether two networks are equal up to symmetry, within the precision of their files.

Two networks are equal if, in double precision, with noise of size u on weights (half a unit in the last place of the
coarser file type, at least 1e-13):

1. Outputs on random inputs differ by at most 30 times the effect of the noise on the weights of a and b, using up to 16
   draws.
2. Each slice of each tensor, along every axis (of vectors each number), differs by at most 20 (σ + u‖a‖), where σ is
   the effect of the element on noise on b there. Otherwise the search continues in double precision.

For 16-bit files the limits are 6 and 8. Networks whose aligned weights differ by at most 10 u‖a‖ in each slice are
equal without computing outputs. Networks with over 4 million weights are also not found to be equal if two outputs
differ by more than 2 % and by far more than rounding.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_sym._distributed import wide
from lightning_sym.networks.modes import containers_kept, evaluating
from lightning_sym.symmetry import Call, Element, Symmetry, weight_matching
from lightning_sym.symmetry.charts import charted
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.proof import change, cropped, double, double_copy, noisy, outputs_of, runs
from lightning_sym.symmetry.tracing.graph.capture import state_tensors
from lightning_sym.symmetry.views import ConvertedTensors

# Largest difference of a slice of weights, or of an output, between equal networks, in units of the effect of rounding.
# Networks with a planted element differ by 17 at most (rank-one maps; others 5) and by 4 to 8; networks in single
# precision at a distance of 1e-5 by over 100.
_OF_WEIGHTS, _OF_OUTPUTS = 20.0, 30.0
# Limits for 16-bit numbers. Networks with a planted element differ by 5 and 2.
_COARSE, _OF_COARSE_WEIGHTS, _OF_COARSE_OUTPUTS = 1e-4, 8.0, 6.0
_DRAWS = 4  # draws of rounding noise; for outputs, half for each network
_MOST_DRAWS, _IN_DOUBT = 16, 20.0  # up to so many draws for outputs while the difference is below this limit
_INPUTS, _NUMBERS = 64, 2**19  # number of random inputs, and the most numbers in them together
_COMPUTED = 1e-13
_FAR = 0.5  # a relative difference of outputs that rounding does not explain
# The same for outputs of large networks in their own precision: at least the first number, and this multiple of the
# rounding of the files. Their copies in double precision take most of the time and memory.
_CLEAR, _TIMES_ROUNDING = 0.02, 300.0
_LARGE, _FEW = 2**22, 2  # numbers of a large network, and inputs
# Largest difference of a slice, in units of its rounding. Moved copies that are stored in single precision differ by 3.
_TIMES = 10.0
_AT_ONCE = 2**18  # numbers compared at once


@dataclass(frozen=True)
class Equality:
    """Result of a comparison of two networks.

    Attributes:
        answer: "equal" up to symmetry; the "same function" on random inputs, with other weights; or "not found" to be
            equal, as outputs differ.
        times: Difference of the worst slice of weights, or of the worst output, relative to the limit of rounding.
        worst: Name of that slice or output.
        inputs: Number of random inputs.
    """

    answer: Literal["equal", "same function", "not found"]
    times: float
    worst: str
    inputs: int


def rounding_of(*dtypes: torch.dtype) -> float:
    """Return the relative rounding error of the coarsest type, or that of computing in double precision."""
    return max(_COMPUTED, *(torch.finfo(dtype).eps / 2 for dtype in dtypes))


def equality(
    symmetry: Symmetry, a: nn.Module, b: nn.Module, elements: Sequence[Element], rounding: float, *, seed: int = 0
) -> tuple[Equality, ...]:
    """Decide whether elements make two networks equal, to the rounding of their files.

    First, each output on random inputs is compared with the effect of rounding the weights of both networks. If outputs
    of large networks differ far more, a few inputs in the networks' own precision decide. If outputs agree, each slice
    (row, column) of each transformed tensor is compared with the effect of rounding the weights of ``b``. If a slice
    differs, the elements are refined in double precision.

    Args:
        symmetry: The symmetry of both networks.
        a: The reference. Not changed.
        b: The other network. Not changed.
        elements: Each brings ``b`` close to ``a``, or is the identity, which is not refined.
        rounding: Relative rounding error of the files' numbers.
        seed: Seed of inputs and noise.

    Returns:
        One answer for each element.
    """
    with torch.no_grad():
        if (clear := _clear_difference(symmetry, a, b, rounding, seed)) is not None:
            return tuple(clear for _ in elements)
        one, two = (double_copy(network).eval() for network in (a, b))
        calls, count = _random_calls(symmetry.examples, one, torch.Generator().manual_seed(seed))
        times, worst = _output_difference(one, two, calls, rounding, seed)
        if times > 1:
            return tuple(Equality("not found", times, worst, count) for _ in elements)
        found = []
        for element in elements:
            ours, theirs = state_tensors(one), state_tensors(two)
            times, worst = weight_difference(symmetry, ours, theirs, element, rounding, seed)
            if times > 1 and not symmetry.factors.is_identity(element):
                moved = symmetry.act(element, double_copy(b).eval(), inplace=True)
                near = weight_matching(symmetry, one, moved, seed=seed).element
                times, worst = weight_difference(
                    symmetry, ours, theirs, symmetry.compose(near, element), rounding, seed
                )
            found.append(Equality("equal" if times <= 1 else "same function", times, worst, count))
        return tuple(found)


# ---- functions


def _clear_difference(symmetry: Symmetry, a: nn.Module, b: nn.Module, rounding: float, seed: int) -> Equality | None:
    """Return the answer "not found" for large networks with clearly different outputs; None in all other cases."""
    if sum(tensor.numel() for tensor in a.parameters()) < _LARGE:
        return None
    generator, dtype = torch.Generator().manual_seed(seed), next(a.parameters()).dtype
    example = pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, cropped(tuple(symmetry.examples[0]))
    )
    try:
        with evaluating(a), evaluating(b), containers_kept(a), containers_kept(b):
            found = _changes_together(a, b, example, generator) or [
                change(outputs_of(a, call), outputs_of(b, call))
                for call in (_drawn(example, generator) for _ in range(_FEW))
            ]
    except Exception:  # copies in double precision may run
        return None
    limit = max(_CLEAR, _TIMES_ROUNDING * rounding)
    times = min(found) / limit  # one input may be a special point
    return Equality("not found", times, "an output", _FEW) if math.inf > min(found) > limit else None


def _changes_together(a: nn.Module, b: nn.Module, example: Any, generator: torch.Generator) -> list[float]:
    """Return the changes of the outputs on a few random samples, in one run as weights take most of the time.

    Args:
        a: The reference.
        b: The other network.
        example: Arguments.
        generator: Generator for the samples.

    Returns:
        One number for each sample; empty if samples of arguments or outputs cannot be told apart.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    if not all(own.ndim for own in tensors) or len({len(own) for own in tensors}) != 1:
        return []
    several = pytree.tree_map_only(Tensor, lambda t: t[:1].repeat(_FEW, *[1] * (t.ndim - 1)), example)
    call = _drawn(several, generator)
    try:
        ours, theirs = outputs_of(a, call), outputs_of(b, call)
    except Exception:  # the first axis may not be of samples
        return []
    if not all(own.ndim and len(own) == _FEW for own in (*ours, *theirs)):
        return []
    places = [slice(number, number + 1) for number in range(_FEW)]
    return [change([own[at] for own in ours], [own[at] for own in theirs]) for at in places]


def _random_calls(examples: Sequence[Call], network: nn.Module, generator: torch.Generator) -> tuple[list[Call], int]:
    """Return calls on random inputs around an example, and their total number of inputs."""
    example = Call(*double(tuple(examples[0])))
    smaller = Call(*cropped(tuple(example)))
    example = smaller if runs(network, [smaller]) else example
    tensors = [leaf for leaf in pytree.tree_leaves(tuple(example)) if isinstance(leaf, Tensor)]
    numbers = sum(tensor.numel() for tensor in tensors)
    sizes = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    size = sizes.pop() if len(sizes) == 1 else 0
    if size:
        count = max(2, min(_INPUTS, _NUMBERS * size // max(numbers, 1)))
        one = pytree.tree_map_only(Tensor, lambda t: t[:1].repeat(count, *[1] * (t.ndim - 1)), tuple(example))
        batch = _drawn(one, generator)
        if runs(network, [batch]):
            return [batch], count
    count = max(2, min(_INPUTS, _NUMBERS // max(numbers, 1)))
    return [_drawn(tuple(example), generator) for _ in range(count)], count * max(size, 1)


def _drawn(arguments: Any, generator: torch.Generator) -> Call:
    """Return arguments with added noise of the same magnitude, and with integers shuffled."""

    def shuffled(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or not tensor.numel():
            return tensor
        order = torch.randint(tensor.numel(), (tensor.numel(),), generator=generator)
        return tensor.reshape(-1)[order.to(tensor.device)].reshape(tensor.shape)

    return Call(*pytree.tree_map_only(Tensor, shuffled, noisy(arguments, generator)))


def _output_difference(
    one: nn.Module, two: nn.Module, calls: Sequence[Call], rounding: float, seed: int
) -> tuple[float, str]:
    """Return the largest difference of an output relative to the limit of rounding, and its name."""
    ours, theirs = _outputs(one, calls), _outputs(two, calls)
    if [own.shape for own in ours] != [own.shape for own in theirs]:
        return math.inf, "the shape of an output"
    apart = [_norms(x - y) for x, y in zip(ours, theirs, strict=True)]
    sizes = [_norms(own) for own in ours]
    far = any(bool((x > _FAR * torch.maximum(size, size.mean())).any()) for x, size in zip(apart, sizes, strict=True))
    limit = _OF_COARSE_OUTPUTS if rounding > _COARSE else _OF_OUTPUTS
    noise, drawn = [torch.zeros_like(own) for own in apart], 0
    worst, where = math.inf, "no output"
    while drawn < (2 if far and rounding < _COARSE else _DRAWS) or (drawn < _MOST_DRAWS and 1 < worst < _IN_DOUBT):
        for network, outputs in ((one, ours), (two, theirs)):  # either may be the rounded one
            rounded = double_copy(network).eval()
            for name, tensor in state_tensors(rounded).items():
                if tensor.is_floating_point():
                    tensor.copy_(_with_noise(tensor, name, rounding, seed + drawn))
            for total, x, y in zip(noise, _outputs(rounded, calls), outputs, strict=True):
                total += _norms(x - y).square()
            drawn += 1
        worst, where = 0.0, "no output"
        for number, (x, squares, size) in enumerate(zip(apart, noise, sizes, strict=True)):
            times = _times(x, limit * (squares / (drawn / 2)).sqrt() + 1e-13 * size)
            if times.numel() and float(times.max()) > worst:
                worst, place = float(times.max()), int(times.argmax())
                where = f"output {place}" if len(apart) == 1 else f"number {place} of output {number}"
    return worst, where


def _outputs(network: nn.Module, calls: Sequence[Call]) -> list[Tensor]:
    """Return the outputs for all calls, in float64 on the CPU; several calls form a new first axis."""
    found = [[_plain(output) for output in outputs_of(network, call)] for call in calls]
    return found[0] if len(found) == 1 else [torch.stack(own) for own in zip(*found, strict=True)]


def _plain(output: Tensor) -> Tensor:
    output = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
    return output.double().cpu().nan_to_num(0.0, 1e300, -1e300)


def _norms(outputs: Tensor) -> Tensor:
    """Return the norm of each output over the first axis (inputs)."""
    norms: Tensor = torch.linalg.vector_norm(outputs[None] if outputs.ndim < 2 else outputs, dim=0)
    return norms.reshape(-1)


def _times(apart: Tensor, allowed: Tensor) -> Tensor:
    return torch.where(apart > 0, apart / allowed.clamp_min(1e-300), 0.0)


# ---- weights


def weight_difference(
    symmetry: Symmetry,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    element: Element,
    rounding: float,
    seed: int = 0,
) -> tuple[float, str]:
    """Return the largest difference of a slice of a tensor relative to the limit of rounding, and its name.

    A slice holds all numbers at one position of an axis; for a vector, one number.

    Args:
        symmetry: The symmetry of both networks.
        ours: The tensors of the reference, by name.
        theirs: The tensors of the other network.
        element: Acts on ``theirs``.
        rounding: Relative rounding error of the numbers.
        seed: Seed of the noise.
    """
    charts = symmetry.structure.charts
    exact = ConvertedTensors(theirs, lambda tensor: tensor.detach().double() if tensor.is_floating_point() else tensor)
    moved = MovedTensors(symmetry.factors, element, charted(exact, charts))
    draws = [
        MovedTensors(symmetry.factors, element, charted(_Rounded(exact, rounding, seed + n), charts))
        for n in range(_DRAWS)
    ]
    worst, where, limit = 0.0, "no weight", _OF_COARSE_WEIGHTS if rounding > _COARSE else _OF_WEIGHTS
    for name, tensor in charted(ours, charts).items():
        if not tensor.is_floating_point():
            if not name.endswith("num_batches_tracked") and not torch.equal(tensor, theirs[name].to(tensor.device)):
                return math.inf, name
            continue
        mine, own = tensor.detach().double().cpu(), moved[name].cpu()
        apart = _slices(torch.where(mine == own, 0.0, mine - own))  # masks hold equal infinities
        noise = [torch.zeros_like(squares) for _, squares in apart]
        for draw in draws:
            rounded = draw[name].cpu()
            for total, (_, squares) in zip(
                noise, _slices(torch.where(rounded == own, 0.0, rounded - own)), strict=True
            ):
                total += squares / _DRAWS
        slots = symmetry.structure.slots_of.get(name, [])
        mixed = {own.axes[0] for own in slots if symmetry.structure.kinds_at(own) & {"matrices", "rotations"}}
        for (axis, squares), total, (_, size) in zip(apart, noise, _slices(mine), strict=True):
            # Entries of a fitted matrix have errors relative to its largest one: they mix other slices into each.
            known = size + size.mean() if axis in mixed else size
            times = _times(squares.sqrt(), limit * (total.sqrt() + rounding * known.sqrt()))
            if times.numel() and not float(times.max()) <= worst:
                worst, place = float(times.max()), int(times.argmax())
                where = name if axis is None else f"{name} at {place} of axis {axis}"
    return worst, where


def _slices(tensor: Tensor) -> list[tuple[int | None, Tensor]]:
    """Return the squared norms of the slices for each axis."""
    squares = tensor.square()
    if squares.ndim < 2:
        return [(0 if squares.ndim else None, squares.reshape(-1))]
    axes = range(squares.ndim)
    return [(axis, squares.sum([other for other in axes if other != axis])) for axis in axes]


class _Rounded(ConvertedTensors):
    """Tensors with rounding noise; repeated accesses return the same noise."""

    def __init__(self, tensors: Mapping[str, Tensor], rounding: float, seed: int) -> None:
        super().__init__(tensors, torch.detach)
        self._rounding, self._seed = rounding, seed

    def _made(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return _with_noise(tensor, name, self._rounding, self._seed) if tensor.is_floating_point() else tensor


def _with_noise(tensor: Tensor, name: str, rounding: float, seed: int) -> Tensor:
    """Return a tensor with relative noise that depends only on its name and a seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + 1_000_003 * seed)
    drawn = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator).to(tensor.device)
    return torch.where(tensor.isfinite(), tensor * (1 + rounding * drawn), tensor)


def equal_weights(a: nn.Module, b: nn.Module, rounding: float) -> Equality:
    """Compare all slices (rows, columns) of the tensors of two networks with the rounding of their numbers.

    The limit is half of that of :func:`lightning_sym.merging.equality.weight_difference`, which in addition allows for
    errors of the other network's numbers: networks that pass here pass there.

    Args:
        a: The reference.
        b: A network of the same function.
        rounding: Relative rounding error of the numbers.

    Returns:
        "equal", or the "same function" with a slice that differs by more. No inputs are tried.
    """
    worst, where, theirs = 0.0, "no weight", state_tensors(b)
    for name, own in sorted(state_tensors(a).items(), key=lambda named: named[1].numel()):
        one, two = own.detach(), theirs[name].detach().to(own.device)
        if name.endswith("num_batches_tracked") or torch.equal(one, two):
            continue
        times, place = _largest(one, two, _TIMES * rounding) if one.is_floating_point() else (math.inf, "")
        if not times <= worst:  # NaN counts
            worst, where = times, name + place
        if not worst <= 1:
            return Equality("same function", worst, where, 0)
    return Equality("equal", worst, where, 0)


def _largest(one: Tensor, two: Tensor, allowed: float) -> tuple[float, str]:
    """Return the largest difference of a slice relative to an allowed part of its norm, and its place."""
    if one.ndim < 2:
        one, two = one.reshape(-1, 1), two.reshape(-1, 1)
    found = [torch.zeros(2, size, dtype=wide(one.device), device=one.device) for size in one.shape]
    step = max(_AT_ONCE * len(one) // max(one.numel(), 1), 1)
    for start in range(0, len(one), step):
        at = slice(start, start + step)
        x, y = (own[at].to(torch.promote_types(own.dtype, torch.float32)) for own in (one, two))
        for place, own in enumerate((torch.where(x == y, 0.0, x - y), x)):  # masks hold equal infinities
            squares = own.square()
            for axis, totals in enumerate(found):
                others = [other for other in range(own.ndim) if other != axis]
                totals[place, at if axis == 0 else slice(None)] += squares.sum(others, dtype=totals.dtype)
    worst, where = 0.0, ""
    for axis, (apart, whole) in enumerate(found):
        times = torch.where(apart != 0, apart.sqrt() / (allowed * whole.sqrt()), 0.0)
        if times.numel() and not float(times.max()) <= worst:
            worst, where = float(times.max()), f" at {int(times.argmax())} of axis {axis}"
    return worst, where
