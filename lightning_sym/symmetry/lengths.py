"""Inputs of other lengths than an example's: what is special about its shape shall not be taken for a symmetry."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_sym.symmetry.proof import double, noisy, outputs_of
from lightning_sym.symmetry.tracing.calls import Call, tensors_of
from lightning_sym.symmetry.tracing.capture import Capture, containers_kept
from lightning_sym.symmetry.tracing.nodes import argument, shape_of
from lightning_sym.symmetry.tracing.operations import Trait, name_of, operations

# Axes of a call's tensors: the number of the tensor among the leaves, and its axis.
Axes = frozenset[tuple[int, int]]
Result = TypeVar("Result")

# So many combinations of axes are tried at most; networks take most examples at the first or second one.
_MOST_TRIES = 8
# Another number of samples than the one or two and their neighbours on which everything is tested.
_SAMPLES = 5
# Large networks are tested on so many pixels of larger images, if they take these, and no others.
_LARGE_IMAGE = 64


def axes_of(call: Call, size: int | None = None) -> Axes:
    """Return the axes of a call's tensors, or those of some size."""
    leaves = enumerate(pytree.tree_leaves(call))
    tensors = [(number, leaf) for number, leaf in leaves if isinstance(leaf, Tensor)]
    return frozenset((number, axis) for number, t in tensors for axis in range(t.ndim) if size in (None, t.shape[axis]))


def resized(call: Call, axes: Axes, size: int, generator: torch.Generator | None = None) -> Call:
    """Return a call whose tensors have another size along some axes.

    Args:
        call: An example.
        axes: The axes.
        size: Their size: entries from the first on, and from the first on again.
        generator: Source of noise as large as floating entries, and of integers in the range of those that are there;
            masks of zeros and ones stay. None for no noise.
    """
    leaves, structure = pytree.tree_flatten(call)
    for number, axis in axes:
        own: Tensor = leaves[number]
        leaves[number] = own.index_select(axis, torch.arange(size, device=own.device) % own.shape[axis])
    for number in {number for number, _ in axes}:
        own = leaves[number]
        if generator is None:
            break
        if own.is_floating_point():
            leaves[number] = noisy(own, generator)
        elif own.dtype != torch.bool and not own.is_complex():
            low, high = int(own.min()), int(own.max())
            if (low, high) == (0, 1):  # a mask: no place attends to nothing
                continue
            drawn = torch.randint(low, high + 1, own.shape, dtype=own.dtype, generator=generator)
            leaves[number] = drawn.to(own.device)
    result: Call = pytree.tree_unflatten(leaves, structure)
    return result


def samples_of(call: Call) -> Axes:
    """Return the axes that count samples, where the first axes of all tensors do: none where they differ."""
    tensors = tensors_of(list(call))
    alike = all(t.ndim for t in tensors) and len({len(t) for t in tensors}) == 1
    return frozenset(own for own in axes_of(call) if not own[1]) if alike else frozenset()


def form_of(call: Call) -> tuple[int, ...]:
    """Return the numbers of axes of a call's tensors."""
    return tuple(leaf.ndim if isinstance(leaf, Tensor) else -1 for leaf in pytree.tree_leaves(call))


def other_lengths(
    network: nn.Module, call: Call, generator: torch.Generator, *, thrifty: bool
) -> Iterator[tuple[Call, Call, list[Tensor]]]:
    """Yield inputs of other lengths than an example's that a network takes.

    Args:
        network: In float64 and evaluation mode.
        call: The example.
        generator: Source of what stands there.
        thrifty: Whether to leave out other numbers of samples, shorter sequences, and larger images.

    Yields:
        The example with other lengths; some samples of it in float64, with noise; and what the network puts out then.
    """
    tensors, samples = tensors_of(list(call)), samples_of(call)
    images = any(t.is_floating_point() and t.ndim >= 4 for t in tensors)
    if thrifty and images and max(max(t.shape[2:], default=0) for t in tensors) > _LARGE_IMAGE:
        return
    few = double(call)
    if samples:
        one = thrifty and (images or all(t.ndim == 2 for t in tensors))  # sequences may come before samples
        few = pytree.tree_map_only(Tensor, lambda t: t[: 1 if one else 2], few)

    def first_taken(axes: Axes, sizes: Iterable[int]) -> Iterator[tuple[Call, Call, list[Tensor]]]:
        for size in sizes:

            def take(own: Axes, size: int = size) -> tuple[Call, Call, list[Tensor]] | None:
                exactly = resized(few, own, size, generator)
                try:
                    with containers_kept(network):
                        return resized(call, own, size), exactly, outputs_of(network, exactly)
                except Exception:  # a network may refuse inputs in any way
                    return None

            if (found := grown(axes, take)) is not None:
                yield found
                return

    if samples and not thrifty:
        yield from first_taken(samples, [_SAMPLES + (len(tensors[0]) == _SAMPLES)])
    for size in dict.fromkeys(size for t in tensors for size in t.shape):
        axes = axes_of(call, size) - samples
        if not axes:
            continue
        if not (thrifty and images):
            yield from first_taken(axes, [size + 2 + size // 4, 2 * size])
        if size > 1 and (images or not thrifty):
            yield from first_taken(axes, [(size + 1) // 2])


def _choices(axes: Axes) -> Iterator[Axes]:
    """Yield which axes may have one length in common: all, those of one place in their tensors, each by itself."""
    yield axes
    yield frozenset(own for own in axes if own[1])  # the first axis mostly counts samples
    for place in sorted({axis for _, axis in axes}):
        yield frozenset(own for own in axes if own[1] == place)
    for own in sorted(axes):
        yield frozenset({own})


def grown(axes: Axes, take: Callable[[Axes], Result | None]) -> Result | None:
    """Return what a network makes of an example whose axes are as long as it takes them.

    Args:
        axes: Axes of one size.
        take: Returns None if the network does not take an example with another size along some axes.

    Returns:
        The result for as many of the axes as were found together; None if there are none.
    """
    found: Axes = frozenset()
    result: Result | None = None
    tried: set[Axes] = set()
    for choice in _choices(axes):
        together = found | choice
        if together == found or together in tried or len(tried) == _MOST_TRIES:
            continue
        tried.add(together)
        if (taken := take(together)) is not None:
            found, result = together, taken
    return result


def lengthened(examples: Sequence[Call], number: int, trace: Callable[[Call], Result]) -> Result | None:
    """Trace an example with axes of length 1 lengthened, as many as the network takes: at one position nothing turns.

    Args:
        examples: All examples.
        number: The number of the one that is traced.
        trace: Traces a network on a call.

    Returns:
        None if it has no such axes, or if another example is longer there.
    """
    call = examples[number]
    axes = axes_of(call, 1)
    alike = [axes_of(other, 1) for other in examples if form_of(other) == form_of(call)]
    axes = axes.intersection(*alike)
    # A length that no axis of the example has tells what is as long as the input from what is as long as that.
    size = next(size for size in itertools.count(3) if not axes_of(call, size))

    def take(own: Axes) -> Result | None:
        samples = samples_of(call) & own  # two of them say as much as three, in less time
        return tried(trace, resized(resized(call, samples, 2), own - samples, size))

    return grown(axes, take) if axes else None


def captures_of(examples: Sequence[Call], trace: Callable[[Call], Capture]) -> list[Capture]:
    """Trace a network on examples, and on longer inputs where an example shows too little.

    Axes of length 1 are traced at another length. Where a softmax sees one place only, which says nothing of what it
    reads, an input of two or four times the size is traced, too.

    Args:
        examples: All examples.
        trace: Traces a network on a call.
    """
    found = []
    for number, call in enumerate(examples):
        captured = lengthened(examples, number, trace) or trace(call)
        found.append(captured)
        if _sees_one_place(captured):
            found += _larger(captured.call, trace)
    return found


def _sees_one_place(captured: Capture) -> bool:
    """Return whether some softmax is over an axis of length 1."""
    softmaxes = (node for node in captured.graph.nodes if name_of(node) in operations(Trait.SOFTMAX))
    shapes = ((shape_of(node), argument(node, 1, "dim")) for node in softmaxes)
    return any(shape and isinstance(axis, int) and shape[axis] == 1 for shape, axis in shapes)


def _larger(call: Call, trace: Callable[[Call], Capture]) -> list[Capture]:
    """Trace an input of two or four times the size of a call, at which no softmax sees one place only."""
    samples = samples_of(call)
    for times, size in itertools.product(
        (2, 4), dict.fromkeys(size for t in tensors_of(list(call)) for size in t.shape)
    ):

        def take(own: Axes, longer: int = times * size) -> Capture | None:
            return tried(trace, resized(call, own, longer))

        captured = grown(axes_of(call, size) - samples, take)
        if captured is not None and not _sees_one_place(captured):
            return [captured]
    return []


def tried(trace: Callable[[Call], Result], call: Call) -> Result | None:
    """Trace a network on a call that it may refuse in any way."""
    try:
        return trace(call)
    except Exception:
        return None


def tested(call: Call, known: Sequence[Call]) -> Iterator[Call]:
    """Yield an example as it is, if it was traced at another length only, and with the samples of its self-test."""
    if all(call is not other for other in known):
        yield call
    if samples := samples_of(call):
        yield from (resized(call, samples, size) for size in (1, 2, 3))
