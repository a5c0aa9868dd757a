"""From a network to its symmetry."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from lightning_sym._distributed import on_device_of
from lightning_sym.networks.base import Cuts
from lightning_sym.networks.modes import evaluating
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.further import find_further, laws_hold, shown_by
from lightning_sym.symmetry.lengths import Axes, axes_of, form_of, grown, other_lengths, resized, samples_of
from lightning_sym.symmetry.proof import (
    all_finite,
    batches_of,
    change_by,
    cropped,
    double,
    double_copy,
    informative,
    largest_change,
    moving_element,
    runs,
    tolerance_of,
)
from lightning_sym.symmetry.solving.group import Group, find_group
from lightning_sym.symmetry.tracing.calls import Call, arguments_of, check_arguments, tensors_of
from lightning_sym.symmetry.tracing.capture import Capture, capture, state_tensors
from lightning_sym.symmetry.tracing.expansion import expand
from lightning_sym.symmetry.tracing.labels import Labels, find_labels
from lightning_sym.symmetry.tracing.normalise import normalise
from lightning_sym.symmetry.tracing.norms import absorbed_statistics, find_norms
from lightning_sym.symmetry.tracing.rules import leaf_types, own_operations
from lightning_sym.symmetry.tracing.shift_walk import find_shifts
from lightning_sym.symmetry.tracing.shifts import Shown
from lightning_sym.symmetry.tracing.stacks import away_from
from lightning_sym.symmetry.tracing.structure import Structure, folded
from lightning_sym.symmetry.tracing.tensors import Tensors
from lightning_sym.symmetry.tracing.tilt_search import find_tilts
from lightning_sym.symmetry.translations import size_of

# Networks that hold more numbers than this are tested on fewer samples: their many units leave less to chance.
_LARGE = 5e5
# Whether shifts that only the affine interpreter finds are used.
_FURTHER = True
# A network is traced so often at most: further lengths are added while the group is too large for one.
_MOST_TRACES = 4


def trace_symmetry(
    network: nn.Module,
    example_input: Any = None,
    *,
    more_examples: Sequence[Any] = (),
    affine: bool = False,
    shifts: bool = True,
    check: bool = True,
    tolerance: float | None = None,
    cuts: Cuts | None = None,
    output: str | int | None = None,
    **keywords: Any,
) -> Symmetry:
    """Find the weight-space symmetry of a network, and prove it on random elements.

    The network is run once on tensors without data; what each operation demands is written down, position by position,
    and solved. The result holds for every network of this architecture, in evaluation mode, for any weights, and for
    inputs of any values and size: what a slice or an index leaves out at the example's size is fixed, as a longer input
    may reach it. Axes of length 1 are traced at another length where the network takes that. The self-test tries other
    lengths and numbers of samples, too, and what fails there is traced as well; if that does not help, a note says that
    the result holds at the example's lengths only. A function that branches on a size far from the example's needs an
    example for each branch.

    Args:
        network: Any network whose operations do not depend on values. Not changed. It may be without weights, on
            torch's meta device (:func:`~lightning_sym.symmetry.without_weights`): shapes and constants are enough.
        example_input: An input (a tensor of any batch size, on any device), or a tuple of positional arguments; None
            where keyword arguments say all.
        more_examples: Further inputs, as `example_input`, of other lengths or image sizes: the group is what all of
            them allow. A part of a weight that one of them reaches need not be fixed. Where the network is given
            keyword arguments, a dictionary among these replaces them.
        affine: Whether to count changes of sign that add a constant, where the next bias can take it up: the units of
            sigmoid networks then have signs, as those of tanh networks do (docs/theory/intertwiners.md, 1.4).
        shifts: Whether to count what may be added to weights (docs/theory/intertwiners.md, 3.6): biases that the next
            layers take off, means that norms take off, and the like. Without, the group is linear: permutations, signs,
            scales and matrices.
        check: Whether to run the self-test (recommended): two random elements on float64 copies of the network, one
            with weights near its own and one with random weights, on samples of every example and on noise around
            them, each through a round trip of the state dict. A network without weights cannot be tested; a note says
            so. Without, networks that the symmetry meets later are not run, either (:meth:`Symmetry.require`).
        tolerance: Largest relative change of an output that the self-test accepts. By default 1e-10, or as much as the
            lowest precision to which the network rounds inside asks for (1.2e-4 for float32).
        cuts: Made by the network's :meth:`~lightning_sym.networks.Network.cuts`: what crosses them can be tapped, too.
        output: Which of several outputs is to stay the same: its name in a dictionary, dataclass or named tuple, or its
            place in a tuple. By default ``logits`` if there is one (the notes name what else there is), and else
            all outputs; caches for later calls never count.
        **keywords: The network's keyword arguments: ``trace_symmetry(model, input_ids=ids, attention_mask=mask)``.

    Returns:
        The symmetry.

    Raises:
        TypeError: If a parameter is complex or not floating, an example holds no tensor, or the network does not take
            its arguments.
        ValueError: If the network cannot be traced (data-dependent control flow, parametrised or lazy weights, a weight
            that is not finite, or shares a part of its memory with another), has no output of that name, or puts out
            no finite number.
        RuntimeError: If the self-test fails, because the rule of some operation allows too much.

    Example:
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> symmetry = trace_symmetry(network, torch.randn(2, 5))
        >>> symmetry.dimension
        8
        >>> other = symmetry.act(symmetry.sample(), network)
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"expected a network (a torch.nn.Module), got {type(network).__name__}")
    if not isinstance(more_examples, (list, tuple)):
        raise TypeError(f"more_examples must be a list of inputs, got {type(more_examples).__name__}")
    if torch.get_default_device().type == "meta":  # inside of `with torch.device("meta")`, which builds networks
        with torch.device("cpu"):
            return trace_symmetry(
                network, example_input, more_examples=more_examples, affine=affine, shifts=shifts, check=check,
                tolerance=tolerance, cuts=cuts, output=output, **keywords,
            )  # fmt: skip
    examples = [Call.of(example_input, keywords, output)]
    for example in more_examples:
        if keywords and isinstance(example, Mapping):
            examples.append(Call.of(example_input, example, output))
        else:
            examples.append(Call.of(example, {} if example_input is None else keywords, output))
    for example in examples:
        _check_example(network, example)
    _check_network(network)
    tensors = Tensors.of(network)
    examples = examples if tensors.weightless else on_device_of(network, examples)

    def traced(call: Call) -> Traced:
        return Traced(call, normalise(expand(capture(network, call, leaf_types(), cuts=cuts)), own_operations()))

    runs = [_lengthened(examples, number, traced) or traced(call) for number, call in enumerate(examples)]
    if note := _unused(tensors, [each for _, each in runs]):
        warnings.warn(note, stacklevel=2)

    def derive() -> Symmetry:
        symmetry = _derived(network, tensors, examples, runs, affine=affine, shifts=shifts, output=output)
        symmetry._checked = check
        symmetry.require(network, check=tensors.weightless)
        return symmetry

    return _proven(derive, traced, network, runs, tolerance) if check and not tensors.weightless else derive()


class Traced(NamedTuple):
    """A call, and the network's operations on it."""

    call: Call
    capture: Capture


def _lengthened(examples: Sequence[Call], number: int, traced: Callable[[Call], Traced]) -> Traced | None:
    """Trace an example with axes of length 1 lengthened, as many as the network takes: at one position nothing turns.

    Returns:
        None if it has no such axes, or if another example is longer there.
    """
    call = examples[number]
    axes = axes_of(call, 1)
    alike = [axes_of(other, 1) for other in examples if form_of(other) == form_of(call)]
    axes = axes.intersection(*alike)
    # A length that no axis of the example has tells what is as long as the input from what is as long as that.
    size = next(size for size in itertools.count(3) if not axes_of(call, size))

    def take(own: Axes) -> Traced | None:
        samples = samples_of(call) & own  # two of them say as much as three, in less time
        return _tried(traced, resized(resized(call, samples, 2), own - samples, size))

    return grown(axes, take) if axes else None


def _tried(traced: Callable[[Call], Traced], call: Call) -> Traced | None:
    """Trace a network on a call that it may refuse in any way."""
    try:
        return traced(call)
    except Exception:
        return None


def _tested(call: Call, known: Sequence[Call]) -> Iterator[Call]:
    """Yield an example as it is, if it was traced at another length only, and with the samples of its self-test."""
    if all(call is not other for other in known):
        yield call
    if samples := samples_of(call):
        yield from (resized(call, samples, size) for size in (1, 2, 3))


def _unused(tensors: Tensors, captures: Sequence[Capture]) -> str | None:
    """Say which parameters no operation reads."""
    read = {name for each in captures for node, name in each.states.items() if node.users}
    unused = [name for name in tensors.parameters if name not in read]
    names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
    note = f"parameters that evaluation never uses stay as they are, whatever reads them in training: {names}"
    return note if unused else None


class Added(NamedTuple):
    """A group with what may be added to weights, and with tilts.

    Attributes:
        structure: The group on parameters and buffers.
        values: The same group on the values inside the network that have a name.
        shown: What shifts do to these values.
        notes: What limits shifts and tilts.
        common_shift: Counts the shifts that a softmax behind the outputs does not see besides; None without shifts.
        on_trial: Whether the group laws are still to be tried.
    """

    structure: Structure
    values: Structure
    shown: dict[str, Shown]
    notes: list[str]
    common_shift: Callable[[], int] | None
    on_trial: bool


def _shifts_of(
    captures: Sequence[Capture], tensors: Tensors, labels: Labels, group: Group, *, wanted: bool, failed: int
) -> Added:
    """Find what may be added to weights, and the layer norms that are tilted.

    Args:
        captures: The network in normal form, on one example or several.
        tensors: Its tensors.
        labels: What its operations demand.
        group: Its group without shifts.
        wanted: Whether there are to be shifts.
        failed: Of the ways to add shifts that only the affine interpreter finds, so many are not tried.
    """
    structure, values, _ = group
    # Where a bias takes up what changes of sign add, it cannot at once take up what they add to a mean.
    flipped = [weight for _, weight, _, _ in structure.absorbed]
    states, kept, stacked = tensors.states, labels.kept, labels.stacked
    found, shown, norms = find_shifts(captures, states, kept, keep=flipped) if wanted else ([], {}, {})
    further = find_further(captures, states, kept, found) if wanted and _FURTHER else None
    known = size_of(away_from(stacked, found, shown)[0])
    options = further.options[failed:] if further is not None and not stacked and not flipped else []
    if options:
        found, shown = [shift for shift, _ in options[0]], shown_by(options[0], shown)
    found, shown = away_from(stacked, found, shown)
    structure = replace(structure, shifts=tuple(found))
    tilts, notes = find_tilts(structure, values, norms)
    structure, values = (replace(each, tilts=tuple(tilts)) for each in (structure, values))
    if structure.rotations or tilts:
        structure = replace(structure, shifts=folded(structure))
    if further is not None:
        notes += further.notes(size_of(found) + sum(tilt.size for tilt in tilts))
    shapes = {name: _without_values(tensor) for name, tensor in states.items()}

    def common_shift() -> int:
        """Return how many more shifts a softmax behind the outputs does not see."""
        every, more, _ = find_shifts(captures, shapes, kept, keep=flipped, outputs=True)
        return size_of(away_from(stacked, every, more)[0]) - known

    return Added(structure, values, shown, notes, common_shift if wanted else None, bool(options))


def _derived(
    network: nn.Module,
    tensors: Tensors,
    examples: Sequence[Call],
    runs: Sequence[Traced],
    *,
    affine: bool,
    shifts: bool,
    output: str | int | None,
) -> Symmetry:
    """Derive the symmetry from what was captured; see :func:`trace_symmetry`."""
    captures = [each for _, each in runs]
    labels = find_labels(captures, tensors, affine=affine, lengths=len(examples))
    group = find_group(labels)
    parameters = dict(network.named_parameters())
    for failed in itertools.count():
        added = _shifts_of(captures, tensors, labels, group, wanted=shifts, failed=failed)
        symmetry = Symmetry(
            added.structure,
            added.values,
            labels.walk.taps,
            network,
            [*_left_aside(tensors, captures, output), *group.notes, *added.notes],
            constants=_constants(tensors, captures),
            examples=examples,
            shown=added.shown,
            absorbed=absorbed_statistics(captures, parameters),
            norms=find_norms(captures, parameters),
            common_shift=added.common_shift,
        )
        if not added.on_trial or laws_hold(symmetry, tensors.states):
            break
    return symmetry


def _left_aside(tensors: Tensors, captures: Sequence[Capture], output: str | int | None) -> list[str]:
    """Say which parameters are not used, and which outputs do not count."""
    notes = [note] if (note := _unused(tensors, captures)) else []
    if left_out := dict.fromkeys(name for each in captures for name in each.left_out):
        kept = "logits" if output is None else output
        notes.append(f"of the outputs {kept} stays the same, {', '.join(left_out)} may change (output=... chooses)")
    return notes


def _constants(tensors: Tensors, captures: Sequence[Capture]) -> dict[str, Tensor]:
    """Return the tensors whose values count: those read as they are, and those that may have been looked at."""
    valued = {name for each in captures for name in each.folded}
    read = {name for each in captures for node, name in each.states.items() if node.users}
    return {
        name: tensor
        for name, tensor in tensors.states.items()
        if name in valued or (name in read and (name in tensors.unsaved or not tensor.is_floating_point()))
    }


def _proven(
    derive: Callable[[], Symmetry],
    traced: Callable[[Call], Traced],
    network: nn.Module,
    runs: list[Traced],
    tolerance: float | None,
) -> Symmetry:
    """Prove a symmetry at the lengths of the examples and at others; trace what fails, too, until nothing does.

    Args:
        derive: Makes the symmetry of all `runs`.
        traced: Traces the network on a call.
        network: The network.
        runs: Grows by what has to be traced as well.
        tolerance: Of the self-test.
    """
    values = (node.meta.get("val") for _, each in runs for node in each.graph.nodes)
    volume = sum(value.numel() / max(len(value), 1) for value in values if isinstance(value, Tensor) and value.ndim)
    thrifty = volume > _LARGE
    unproven: tuple[Call, float] | None = None
    for count in range(_MOST_TRACES):
        symmetry = derive()
        try:
            exact = _prove(symmetry, network, tolerance, thrifty=thrifty)
        except RuntimeError:
            further = [each for call in symmetry.examples for each in _tested(call, [known for known, _ in runs])]
            more = [found for call in further if (found := _tried(traced, call))]
            if count or not more:
                raise
        else:
            unproven = _elsewhere(symmetry, exact, [call for call, _ in runs], thrifty=thrifty)
            if unproven is None:
                return symmetry
            more = [found for call in unproven[:1] if (found := _tried(traced, call))]
            if not more:
                break
        runs += more  # the functions at these lengths count, too
    if unproven is not None:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(list(unproven[0])))
        note = f"of inputs as long as the examples only: on others, as {shapes}, outputs change by {unproven[1]:.1e}"
        symmetry.notes = (note, *symmetry.notes)
    return symmetry


def _elsewhere(
    symmetry: Symmetry, exact: nn.Module, calls: Sequence[Call], *, thrifty: bool
) -> tuple[Call, float] | None:
    """Try random elements on inputs of other lengths, as far as the network takes them.

    Args:
        symmetry: The symmetry, whose largest error is kept up to date.
        exact: A copy of the network in float64, of any weights; these are changed.
        calls: What was traced.
        thrifty: Whether to try few.

    Returns:
        An input on which an element changes the outputs, and by how much; None if there is none.
    """
    generator = torch.Generator().manual_seed(1)
    signs = None
    with torch.no_grad(), evaluating(exact):
        for example in calls:
            for call, exactly, outputs in other_lengths(exact, example, generator, thrifty=thrifty):
                for _ in range(1 if thrifty else 2) if informative(outputs) else ():
                    element = moving_element(symmetry, generator, 0.5, signs)
                    signs = element.sign
                    try:
                        change = change_by(
                            symmetry, element, exact, [exactly], [outputs], symmetry.precision, generator,
                            symmetry.tolerance,
                        )  # fmt: skip
                    except ValueError:  # something else comes out every time
                        continue
                    if not change <= symmetry.tolerance:
                        return call, change
                    symmetry.worst_error = max(symmetry.worst_error, change)
    return None


def _without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same kind and shape without memory."""
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


# The options of `trace_symmetry`, which are no arguments of the network.
_OPTIONS = ("example_input", "more_examples", "affine", "check", "tolerance", "cuts", "output", "shifts")


def _check_example(network: nn.Module, example: Call) -> None:
    """Check that an example holds tensors, and that the network takes it.

    Raises:
        TypeError: If it holds no tensor, or does not fit.
        ValueError: If one is empty.
    """
    tensors = [t for t in torch.utils._pytree.tree_leaves(example) if isinstance(t, Tensor)]
    if not tensors:
        given = ", ".join(type(value).__name__ for value in (*example.positional, *example.keywords.values()))
        raise TypeError(
            "the example input must be a tensor or a tuple with tensors, or keyword arguments of the network, got "
            f"{given or 'nothing'}; {type(network).__name__} takes {arguments_of(network)}"
        )
    if any(t.numel() == 0 for t in tensors):
        raise ValueError("the example input is empty; expected at least one sample")
    check_arguments(network, example, _OPTIONS)


def _prove(symmetry: Symmetry, network: nn.Module, tolerance: float | None, *, thrifty: bool) -> nn.Module:
    """Try random elements, and raise an error if one of them changes the outputs.

    Returns:
        The copy of the network on which they were tried, with random weights.
    """
    whole = double(symmetry.examples)
    symmetry.elements_tried = 2
    for examples, few in _trials(network, whole) if thrifty else [(whole, False)]:
        exact = double_copy(network)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad(), evaluating(exact):
            batches = [batch for example in examples for batch in batches_of(exact, example, generator, thrifty=few)]
            try:
                symmetry.worst_error, symmetry.precision = largest_change(
                    symmetry,
                    exact,
                    [batches[::2], batches[1::2]] if few else [batches],
                    own=network.state_dict(),
                    samples=2,
                    scale=0.5,
                    generator=generator,
                    noise=(0.3, math.inf),
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
        raise RuntimeError(
            f"the self-test changed the output by {symmetry.worst_error:.1e} (relative; at most "
            f"{symmetry.tolerance:.1g} was expected): the rule of some operation allows too much, or the network keeps "
            "something computed from its weights from one call to the next; check your own rules, or report the network"
        )
    return exact


def _trials(network: nn.Module, examples: Sequence[Call]) -> Iterator[tuple[Sequence[Call], bool]]:
    """Yield on what a large network is tested until it runs: inputs, and whether one sample of each is enough.

    First on parts of images, where it takes these, as the group is that of every size.
    """
    parts = cropped(examples)
    sizes, own = ([tensor.shape for tensor in tensors_of(list(calls))] for calls in (parts, examples))
    if sizes != own:
        exact = double_copy(network)
        with torch.no_grad(), evaluating(exact):
            takes_parts = runs(exact, parts)
        del exact  # while the parts are tried on another copy
        if takes_parts:
            yield parts, True
    yield examples, True
    yield examples, False


def _check_network(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or 'the network'} is a scripted or traced module of TorchScript, whose operations cannot be "
                "seen; expected the module that it was made from"
            )
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"{name or 'the network'} has parametrised weights, whose symmetry is that of what they are computed "
                "from; remove the parametrisation first (torch.nn.utils.parametrize.remove_parametrizations)"
            )
        hooks = getattr(module, "_forward_pre_hooks", {}).values()
        if hook := next((h for h in hooks if type(h).__name__ in ("SpectralNorm", "WeightNorm")), None):
            kind = type(hook).__name__
            raise ValueError(
                f"{name or 'the network'} has weights that a {kind} hook computes before every forward; remove the "
                "hook first (torch.nn.utils.remove_spectral_norm or remove_weight_norm)"
            )
    for name, tensor in state_tensors(network).items():
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ValueError(f"{name} has no shape yet (a lazy module); run the network once on an example first")
    for name, parameter in network.named_parameters():
        if parameter.is_complex() or not parameter.is_floating_point():
            raise TypeError(f"{name} has dtype {parameter.dtype}; expected real floating-point parameters")
    weights = dict(network.named_parameters())
    for name, tensor in state_tensors(network).items():
        # Other buffers may hold infinities: masks do.
        finite = name in weights or name.endswith(("running_mean", "running_var"))
        if finite and not tensor.is_meta and not all_finite(tensor):
            raise ValueError(f"{name} holds values that are not finite; expected finite weights and statistics")
