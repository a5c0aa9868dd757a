"""Test a traced symmetry on random elements, and trace the inputs that fail."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_sym.networks.modes import attributes_kept, evaluating
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.completeness import measure
from lightning_sym.symmetry.described import listed
from lightning_sym.symmetry.lengths import other_lengths, tested, tried
from lightning_sym.symmetry.proof import (
    LowestPrecision,
    batches_of,
    change_by,
    cropped,
    double,
    double_copy,
    informative,
    largest_change,
    moving_element,
    outputs_of,
    runs,
    tolerance_of,
)
from lightning_sym.symmetry.tracing.graph.calls import Call, tensors_of
from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.normal_form.masks import mark_masked_softmaxes

# Networks that hold more numbers than this are tested on fewer samples: their many units leave less to chance.
_LARGE = 5e5
# A network is traced so often at most: further lengths are added while the group is too large for one.
_MOST_TRACES = 4
# Samples of inputs of other lengths: on fewer ones, two exchanged units may both be dead.
_ROWS = 8
_MASKED = "softmax in {}: a mask may hide whole rows, whose weights then do not sum to one, so that biases stay"


def proven(
    network: nn.Module,
    captures: Sequence[Capture],
    trace: Callable[[Call], Capture],
    derive: Callable[[Sequence[Capture]], Symmetry],
    tolerance: float | None,
    *,
    whole: bool,
) -> Symmetry:
    """Derive a symmetry and verify it at the lengths of the examples and at others; trace those that fail.

    Args:
        network: The network.
        captures: The network on each example.
        trace: Captures it on another call.
        derive: Makes the symmetry of captures.
        tolerance: Tolerance of the self-test.
        whole: Whether to measure the dimensions that the symmetry leaves out.

    Raises:
        RuntimeError: If the self-test fails at the lengths of the examples.
    """
    values = (node.meta.get("val") for each in captures for node in each.graph.nodes)
    volume = sum(value.numel() / max(len(value), 1) for value in values if isinstance(value, Tensor) and value.ndim)
    thrifty = volume > _LARGE
    unproven: list[tuple[Call, float]] = []
    notes: list[str] = []
    for count in range(_MOST_TRACES):
        symmetry = derive(captures)
        symmetry.notes = (*symmetry.notes, *notes)
        try:
            exact = _prove(symmetry, network, captures, tolerance, thrifty=thrifty)
        except RuntimeError:
            further = [each for call in symmetry.examples for each in tested(call, [own.call for own in captures])]
            more = [found for call in further if (found := tried(trace, call))]
            if count or not more:
                more = []
                if not (masked := mark_masked_softmaxes(captures)):
                    raise
                notes = [_MASKED.format(listed(masked))]
        else:
            unproven = _elsewhere(symmetry, exact, [own.call for own in captures], thrifty=thrifty)
            if not unproven:
                if whole:
                    measure(symmetry, network, captures)
                return symmetry
            more = [found for call, _ in unproven if (found := tried(trace, call))]
            if not more:
                break
        captures = [*captures, *more]  # the functions at these lengths count as well
    for call, change in unproven[:1]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(list(call)))
        note = f"of inputs as long as the examples only: on others, as {shapes}, outputs change by {change:.1e}"
        symmetry.notes = (note, *symmetry.notes)
    return symmetry


def _elsewhere(
    symmetry: Symmetry, exact: nn.Module, calls: Sequence[Call], *, thrifty: bool
) -> list[tuple[Call, float]]:
    """Try random elements on inputs of other lengths, as far as the network takes them.

    Args:
        symmetry: The symmetry; its largest error is updated.
        exact: A copy of the network in float64, of any weights; these are changed.
        calls: The traced calls.
        thrifty: Whether to try few.

    Returns:
        Inputs with outputs that an element changes, and the change: the first one, and ever shorter ones. These
        are traced together, as the group is derived again each time. Nothing if there is none.
    """
    generator, element = torch.Generator().manual_seed(1), None

    def failing(example: Call) -> tuple[Call, float] | None:
        nonlocal element
        for call, exactly, outputs in other_lengths(exact, example, generator, thrifty=thrifty, rows=_ROWS):
            for _ in range(1 if thrifty else 2) if informative(outputs) else ():
                element = moving_element(symmetry, exact, generator, 0.5, element)
                try:
                    change = change_by(
                        symmetry, element, exact, [exactly], [outputs], symmetry.precision, generator,
                        symmetry.tolerance,
                    )  # fmt: skip
                except ValueError:  # the network is not deterministic
                    continue
                if not change <= symmetry.tolerance:
                    with LowestPrecision() as lowest:  # which resizing may lower, at other sizes alone
                        outputs_of(exact, exactly)
                    if not change <= tolerance_of(lowest.dtype):
                        return call, change
                    continue
                symmetry.worst_error = max(symmetry.worst_error, change)
        return None

    found: list[tuple[Call, float]] = []
    with torch.no_grad(), evaluating(exact):
        for call in calls:
            while len(found) < _MOST_TRACES - 1 and (more := failing(call)) is not None:
                shorter = _size(more[0]) < _size(call)
                found += [more] if shorter or not found else []
                call = more[0]
                if not shorter:
                    break
            if found:
                break
    return found


def _size(call: Call) -> int:
    """Return the number of elements in the tensors of a call."""
    return sum(tensor.numel() for tensor in tensors_of(list(call)))


def _prove(
    symmetry: Symmetry, network: nn.Module, captures: Sequence[Capture], tolerance: float | None, *, thrifty: bool
) -> nn.Module:
    """Try random elements, and raise an error if one of them changes the outputs.

    Returns:
        The tested copy of the network, with random weights.
    """
    whole = double(symmetry.examples)
    for examples, few, exact in _trials(network, whole) if thrifty else [(whole, False, double_copy(network))]:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad(), evaluating(exact):
            batches = [batch for example in examples for batch in batches_of(exact, example, generator, thrifty=few)]
            once = few and not symmetry.factors.chances
            symmetry.elements_tried = 1 if once else 2
            try:
                symmetry.worst_error, symmetry.precision = largest_change(
                    symmetry,
                    exact,
                    [batches[1::2]] if once else [batches[::2], batches[1::2]] if few else [batches],
                    own=network.state_dict(),
                    samples=symmetry.elements_tried,
                    scale=0.5,
                    generator=generator,
                    noise=(math.inf,) if once else (0.3, math.inf),
                    tolerance=tolerance,
                )
            except ValueError:
                if not few:  # one sample may be too few
                    raise
                continue
        if examples is whole or symmetry.worst_error <= (tolerance or tolerance_of(symmetry.precision)):
            symmetry._trials[:0] = [(examples, few)] if few else []
            break  # a function may do something else with small images
    symmetry.tolerance = tolerance if tolerance is not None else tolerance_of(symmetry.precision)
    if not symmetry.worst_error <= symmetry.tolerance:
        rules = listed(sorted({name for each in captures for name in each.rules}))
        check = f"check your rule for {rules}, or report" if rules else "report"
        raise RuntimeError(
            f"the self-test changed the output by {symmetry.worst_error:.1e} (relative; at most "
            f"{symmetry.tolerance:.1g} was expected): the rule of some operation allows too much, or the network keeps "
            f"something computed from its weights from one call to the next; {check} the network"
        )
    return exact


def _trials(network: nn.Module, examples: Sequence[Call]) -> Iterator[tuple[Sequence[Call], bool, nn.Module]]:
    """Yield tests of a large network until one runs: inputs, whether one sample of each is enough, and a copy.

    First on parts of images, where it takes these, as the group is that of every size. The copy is in float64.
    """
    parts, exact = cropped(examples), double_copy(network)
    sizes, own = ([tensor.shape for tensor in tensors_of(list(calls))] for calls in (parts, examples))
    if sizes != own:
        with torch.no_grad(), evaluating(exact), attributes_kept(exact):
            drawn = torch.Generator().manual_seed(0)
            takes_parts = runs(exact, [batches_of(exact, call, drawn, thrifty=True)[0] for call in parts])
        if takes_parts:
            yield parts, True, exact
            exact = double_copy(network)  # its weights were changed
    yield examples, True, exact
    yield examples, False, double_copy(network)
