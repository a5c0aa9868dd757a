"""Inputs of lengths other than the example's, so that accidents of its shape do not count as symmetries."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_sym.networks.modes import containers_kept
from lightning_sym.symmetry.proof import double, noisy, outputs_of, runs
from lightning_sym.symmetry.tracing.graph.calls import Call, tensors_of
from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.nodes import argument, shape_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations

# Axes of a call's tensors: index of the tensor among the leaves, and its axis.
Axes = frozenset[tuple[int, int]]
Result = TypeVar("Result")

# Maximum number of combinations of axes to try; networks accept most examples at the first or second one.
_MOST_TRIES = 8
# Sizes of axes that have size 1 in an example. A network takes both if they are lengths, and one at most if it
# broadcasts them: a gate or a mask that all of its units or heads share is no input with a number for each.
_LENGTHS = (3, 2)
# A number of samples beyond those of all other tests.
_SAMPLES = 5
# Size of the larger images for tests of large networks, if these accept them.
_LARGE_IMAGE = 64


def axes_of_call(call: Call, size: int | None = None) -> Axes:
    """Return the axes of a call's tensors, or only those of the given size."""
    leaves = enumerate(pytree.tree_leaves(call))
    tensors = [(number, leaf) for number, leaf in leaves if isinstance(leaf, Tensor)]
    return frozenset((number, axis) for number, t in tensors for axis in range(t.ndim) if size in (None, t.shape[axis]))


def resized(call: Call, axes: Axes, size: int, generator: torch.Generator | None = None) -> Call:
    """Resize some axes of a call's tensors.

    Args:
        call: An example.
        axes: The axes.
        size: Their new size; entries are repeated cyclically.
        generator: Generator for noise of the size of floating entries, and for integers in the range of the given
            ones; masks of zeros and ones are kept. None for no noise.
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
            if (low, high) == (0, 1):  # a mask: with random ones some place might attend to nothing
                continue
            drawn = torch.randint(low, high + 1, own.shape, dtype=own.dtype, generator=generator)
            leaves[number] = drawn.to(own.device)
    result: Call = pytree.tree_unflatten(leaves, structure)
    return result


def samples_of(call: Call) -> Axes:
    """Return the axes that index samples: the first axes, if these have one size in all tensors; otherwise none."""
    tensors = tensors_of(list(call))
    alike = all(t.ndim for t in tensors) and len({len(t) for t in tensors}) == 1
    return frozenset(own for own in axes_of_call(call) if not own[1]) if alike else frozenset()


def form_of(call: Call) -> tuple[int, ...]:
    """Return the numbers of axes of a call's tensors."""
    return tuple(leaf.ndim if isinstance(leaf, Tensor) else -1 for leaf in pytree.tree_leaves(call))


def other_lengths(
    network: nn.Module, call: Call, generator: torch.Generator, *, thrifty: bool, rows: int = 2
) -> Iterator[tuple[Call, Call, list[Tensor]]]:
    """Yield inputs of lengths other than an example's that a network accepts.

    Args:
        network: In float64 and evaluation mode.
        call: The example.
        generator: Generator for the entries.
        thrifty: Whether to skip other numbers of samples, shorter sequences, and larger images.
        rows: Number of samples, unless it is thrifty; the first two are repeated, with other noise.

    Yields:
        The example with other lengths; some samples of it in float64, with noise; and the network's outputs for these.
    """
    tensors, samples = tensors_of(list(call)), samples_of(call)
    images = any(t.is_floating_point() and t.ndim >= 4 for t in tensors)
    if thrifty and images and max(max(t.shape[2:], default=0) for t in tensors) > _LARGE_IMAGE:
        return
    few, ones = double(call), axes_of_call(call, 1) - samples
    if samples:
        one = thrifty and (images or all(t.ndim == 2 for t in tensors))  # sequences may come before samples
        several = pytree.tree_map_only(Tensor, lambda t: t[torch.arange(rows) % min(2, len(t))], few)
        few = pytree.tree_map_only(Tensor, lambda t: t[: 1 if one else 2], few)
        few = several if not thrifty and runs(network, [several]) else few
        if not thrifty and not runs(network, [few]):  # the nodes of a graph are no samples
            few, samples = double(call), frozenset()

    def first_taken(axes: Axes, sizes: Iterable[int]) -> Iterator[tuple[Call, Call, list[Tensor]]]:
        for size in sizes:

            def take(own: Axes, size: int = size) -> tuple[Call, Call, list[Tensor]] | None:
                exactly = resized(few, own, size, generator)
                if axes <= ones and not runs(network, [resized(few, own, _LENGTHS[size == _LENGTHS[0]])]):
                    return None
                try:
                    with containers_kept(network):
                        return resized(call, own, size), exactly, outputs_of(network, exactly)
                except Exception:  # a network may refuse inputs with any error
                    return None

            if (found := grown(axes, take)) is not None:
                yield found
                return

    if samples and not thrifty:
        yield from first_taken(samples, [_SAMPLES + (len(tensors[0]) == _SAMPLES)])
    for size in dict.fromkeys(size for t in tensors for size in t.shape):
        axes = axes_of_call(call, size) - samples
        if not axes:
            continue
        if not (thrifty and images):
            yield from first_taken(axes, [size + 2 + size // 4, 2 * size])
        if size > 1 and (images or not thrifty):
            yield from first_taken(axes, [(size + 1) // 2])


def _choices(axes: Axes) -> Iterator[Axes]:
    """Yield candidates for axes with a common length: all, those at one place of their tensors, single ones."""
    yield axes
    yield frozenset(own for own in axes if own[1])  # the first axis mostly indexes samples
    for place in sorted({axis for _, axis in axes}):
        yield frozenset(own for own in axes if own[1] == place)
    for own in sorted(axes):
        yield frozenset({own})


def grown(axes: Axes, take: Callable[[Axes], Result | None]) -> Result | None:
    """Return the result for an example with as many resized axes as a network accepts.

    Args:
        axes: Axes of one size.
        take: Returns None if the network does not accept an example with another size along some axes.

    Returns:
        The result for the largest set of axes found; None if there is none.
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
    """Trace an example with axes of length 1 lengthened where possible: at one position, rotary cosines are all 1.

    Args:
        examples: All examples.
        number: Index of the one to trace.
        trace: Traces a network on a call.

    Returns:
        None if it has no such axes, or if another example is longer there.
    """
    call = examples[number]
    axes = axes_of_call(call, 1)
    alike = [axes_of_call(other, 1) for other in examples if form_of(other) == form_of(call)]
    axes = axes.intersection(*alike)
    # A size that no axis of the example has distinguishes sizes of the input from those of the network.
    size = next(size for size in itertools.count(3) if not axes_of_call(call, size))

    def take(own: Axes) -> Result | None:
        samples = samples_of(call) & own  # two of them are as informative as three, and faster
        few, others = resized(call, samples, 2), own - samples
        made = tried(trace, resized(few, others, size))
        if made is None or not others:
            return made
        again = tried(trace, resized(few, others, _LENGTHS[1]))
        return made if again is not None else None

    return grown(axes, take) if axes else None


def captures_of(examples: Sequence[Call], trace: Callable[[Call], Capture]) -> list[Capture]:
    """Trace a network on examples, and on longer inputs where an example is not informative.

    Axes of length 1 are traced at another length. A softmax over a single place ignores its input; then an input of two
    or four times the size is traced as well.

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
    """Trace an input of two or four times the size of a call, with more than one place for every softmax."""
    samples = samples_of(call)
    for times, size in itertools.product(
        (2, 4), dict.fromkeys(size for t in tensors_of(list(call)) for size in t.shape)
    ):

        def take(own: Axes, longer: int = times * size) -> Capture | None:
            return tried(trace, resized(call, own, longer))

        captured = grown(axes_of_call(call, size) - samples, take)
        if captured is not None and not _sees_one_place(captured):
            return [captured]
    return []


def tried(trace: Callable[[Call], Result], call: Call) -> Result | None:
    """Trace a network on a call; return None if it refuses the call with any error."""
    try:
        return trace(call)
    except Exception:
        return None


def tested(call: Call, known: Sequence[Call]) -> Iterator[Call]:
    """Yield an example unchanged, if it was traced only at another length, and with the samples of its self-test."""
    if all(call is not other for other in known):
        yield call
    if samples := samples_of(call):
        yield from (resized(call, samples, size) for size in (1, 2, 3))
