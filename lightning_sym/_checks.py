"""Checks of arguments, with error messages that name the argument and its value."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_sym._text import LARGEST_SEED, unknown

Grid = int | Sequence[int]
T = TypeVar("T")


def _named(name: str, of: object) -> str:
    owner = type(of).__name__ if isinstance(of, nn.Module) else of
    return f"{name} of {owner}" if owner else name


def is_integer(value: object, least: int = 1) -> bool:
    """Test whether a value is an integer (and no bool) of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_integers(least: int = 1, *, of: object = "", optional: object = False, **values: object) -> None:
    """Check that every value is an integer of at least ``least``.

    Args:
        least: Smallest allowed value.
        of: Owner of the arguments, for the message: words, or a module, which is named by its class.
        optional: Whether a value may be None.
        values: The arguments by name.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name, value in values.items():
        if not is_integer(value, least) and not (optional and value is None):
            raise ValueError(f"{_named(name, of)} must be an integer >= {least}, got {value!r}.")


def check_seeds(**values: object) -> None:
    """Check that every value is a seed: an integer that numpy, Lightning and torch accept.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name, value in values.items():
        if not (is_integer(value, 0) and isinstance(value, int) and value <= LARGEST_SEED):
            raise ValueError(f"{name} must be an integer from 0 to {LARGEST_SEED}, got {value!r}.")


def check_numbers(allowed: str, *, of: object = "", optional: object = False, **values: object) -> None:
    """Check that every value is a number in an interval; infinity and NaN are in no interval.

    Args:
        allowed: ``"> 0"``, ``">= 0"``, or an interval such as ``"in (0, 1]"``.
        of: As for :func:`check_integers`.
        optional: Whether a value may be None.
        values: The arguments by name.

    Raises:
        ValueError: If one is not; the message names it.
    """
    for name, value in values.items():
        if optional and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Real) or not _within(float(value), allowed):
            raise ValueError(
                f"{_named(name, of)} must be {'' if '(' in allowed else 'a number '}{allowed}, got {value!r}."
            )


def check_words(*checks: tuple[str, object, tuple[str, ...]]) -> None:
    """Raise unless each argument, given as a name, a value and the accepted words, is one of these words."""
    for name, value, accepted in checks:
        if value not in accepted:
            options = " or ".join(f'"{word}"' for word in accepted)
            raise ValueError(f"{name} must be {options}, got {value!r}.")


def check_known(kind: str, value: object, options: Collection[str]) -> None:
    """Raise unless a value is one of the options of its kind; the message lists them and proposes the nearest one."""
    if value not in options:
        raise ValueError(unknown(kind, value, options))


def check_different(name: str, values: object, known: Collection[str] = (), *, of: str = "names") -> None:
    """Check that a value is a list of different entries, at least one.

    Args:
        name: Name of the argument.
        values: Its value.
        known: The allowed entries; none for any.
        of: Noun for the entries in the message without ``known``.

    Raises:
        ValueError: If it is not.
    """
    entries = values if isinstance(values, Sequence) and not isinstance(values, str) else ()
    if not entries or len(set(entries)) < len(entries) or (known and set(entries) - set(known)):
        allowed = f"ones of {', '.join(known)}" if known else of
        raise ValueError(f"{name} must be a list of different {allowed}, got {values!r}.")


def _within(value: float, allowed: str) -> bool:
    if not math.isfinite(value):
        return False
    if match := re.fullmatch(r"in ([\[(])(.+), (.+)([\])])", allowed):
        opening, low, high, closing = match.groups()
        above = value >= float(low) if opening == "[" else value > float(low)
        return above and (value <= float(high) if closing == "]" else value < float(high))
    relation, bound = allowed.split()
    return value > float(bound) if relation == ">" else value >= float(bound)


def check_counts_alike(
    mean: Callable[[Tensor], Tensor],
    samples: int,
    each: Callable[[Tensor], Tensor] | None = None,
    targets: Any = None,
) -> None:
    """Check, on up to 32 samples, that a loss is the mean over samples with equal weights.

    With class weights or ignored labels, the mean over a batch has another divisor, and a sum over batches
    depends on the division of samples into batches.

    Args:
        mean: Maps indices of samples, possibly repeated, to their loss, a scalar.
        samples: Number of samples. >= 1.
        each: Maps indices of samples to the loss of each alone; default ``mean`` of one after another.
        targets: The targets, any nesting of tensors; a sample with a negative label, which may be ignored, is tried.

    Raises:
        ValueError: If it is not.
    """
    rows = torch.linspace(0, samples - 1, min(samples, 32)).round().long()
    rows = torch.cat([torch.tensor([_suspect(targets)]), rows])
    together = mean(rows)
    apart = (torch.stack([mean(row[None]) for row in rows]) if each is None else each(rows)).mean()
    if bool(together.isfinite()) and not torch.allclose(together, apart, rtol=1e-3, atol=1e-6):
        raise ValueError(
            f"loss must be the mean over samples, but of {len(rows)} samples it is {float(together):.4g} where the "
            f"mean of their losses is {float(apart):.4g}; divide by the number of samples, without class weights and "
            "ignored labels."
        )


def _suspect(targets: Any) -> int:
    """Return the number of a sample with a negative label, or 0."""
    for target in tree_leaves(targets):
        if isinstance(target, Tensor) and target.dtype in (torch.int64, torch.int32) and len(target):
            low, place = target.flatten(1).amin(1).min(0) if target.ndim > 1 else target.min(0)
            if low < 0:
                return int(place)
    return 0


class UnfitInputsError(ValueError):
    """A network does not run on its inputs."""


def reason_of(error: BaseException) -> str:
    """Return the first line of an error; of :class:`UnfitInputsError`, that of its cause, without advice."""
    first = error.__cause__ if isinstance(error, UnfitInputsError) and error.__cause__ else error
    return (str(first).strip().splitlines() or [type(first).__name__])[0].rstrip(".")[:200]


def as_list(name: str, values: Iterable[T]) -> list[T]:
    """Return several of a kind, such as ``networks``, as a list; raise ``ValueError`` for a single one or none."""
    one = isinstance(values, nn.Module | Mapping | str) and not isinstance(values, nn.ModuleList)
    if one or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of {name}, got a {type(values).__name__}.")
    if not (found := list(values)):
        raise ValueError(f"{name} must have at least one {name[:-1]}, got none.")
    return found


def check_batches(data: object, name: str = "data") -> None:
    """Raise ``ValueError`` unless data are a list or loader of batches; rows of a tensor are samples."""
    if not isinstance(data, Iterable) or isinstance(data, Tensor):
        raise ValueError(f"{name} must be a list or loader of batches, got {type(data).__name__}.")


def is_batch(given: object) -> TypeGuard[Tensor]:
    """Return whether something is a tensor with rows."""
    return isinstance(given, Tensor) and given.ndim > 0


def check_pair(batch: object) -> None:
    """Raise ``ValueError`` unless a batch begins with two tensors."""
    if not isinstance(batch, list | tuple) or len(batch) < 2 or not all(map(is_batch, batch[:2])):
        parts = batch if isinstance(batch, list | tuple) else [batch]
        kinds = [
            "a tensor without rows" if isinstance(own, Tensor) and not own.ndim else type(own).__name__ for own in parts
        ]
        raise ValueError(f"data must be pairs of tensors, inputs and labels, got {', '.join(kinds)}.")


def check_rows(outputs: Any, inputs: Tensor | None = None) -> Tensor:
    """Return the outputs of a network; raise ``ValueError`` unless they are a tensor, with a row for each input."""
    rows = outputs if inputs is None else inputs
    if not isinstance(outputs, Tensor) or not outputs.ndim or len(outputs) != len(rows):
        wanted = "" if inputs is None else f" with a row for each of {len(inputs)} inputs"
        got = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"the network must return one tensor{wanted}, got {got}.")
    return outputs


def check_kernel(module: nn.Module, kernel_size: object) -> None:
    """Check that a kernel size is an odd integer >= 1, so that the kernel has a centre.

    Raises:
        ValueError: If it is not.
    """
    check_integers(of=module, kernel_size=kernel_size)
    if isinstance(kernel_size, int) and kernel_size % 2 == 0:
        raise ValueError(f"kernel_size of {type(module).__name__} must be odd, got {kernel_size}.")


def height_width(grid: object, name: str = "grid", *, of: object = "") -> tuple[int, int]:
    """Return height and width of a grid or an image, from a pair or from the side of a square.

    Args:
        grid: In pixels: an integer >= 1, or a pair of them.
        name: Name of the argument.
        of: As for :func:`check_integers`.

    Raises:
        ValueError: If it is neither an integer >= 1 nor a pair of them.
    """
    sides = (grid, grid) if isinstance(grid, int) else tuple(grid) if isinstance(grid, Sequence) else ()
    if len(sides) != 2 or not all(is_integer(side) for side in sides):
        raise ValueError(f"{_named(name, of)} must be an integer >= 1 or a pair (height, width), got {grid!r}.")
    return sides[0], sides[1]


def check_features(module: nn.Module, x: Tensor, channels: int, grid: tuple[int, int] | None = None) -> None:
    """Check that features have shape ``[N, channels, H, W]``, on the grid of a layer.

    Raises:
        ValueError: If they are not.
    """
    if x.ndim != 4 or x.shape[1] != channels or (grid is not None and tuple(x.shape[2:]) != grid):
        sides = ("H", "W") if grid is None else grid
        raise ValueError(
            f"{type(module).__name__} expects features of shape [N, {channels}, {sides[0]}, {sides[1]}], got "
            f"{list(x.shape)}; build the layer for the channels and grid of its input."
        )


def not_finite(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with NaN or infinity, except masks of -inf."""
    return [name for name, value in state.items() if not finite_or_mask(value)]


def must_be_finite(name: str, weights: Collection[str]) -> bool:
    """Return whether a parameter or buffer of a network must be finite; other buffers may be masks."""
    return name in weights or name.endswith(("running_mean", "running_var"))


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite, or unknown, on the meta device."""
    if tensor.is_meta:
        return True
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.float()  # torch cannot compare these
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())  # the sum is faster, but may overflow


def finite_or_mask(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite, or it is a mask: a table of -inf and few different numbers."""
    if is_finite(tensor):
        return True
    others = tensor[tensor != -math.inf]
    return tensor.ndim > 1 and bool(others.isfinite().all()) and 2 * len(torch.unique(others)) <= len(others)
