"""Derive the symmetry of a network: capture, normal form, labels, group, translations, verification."""

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_sym._distributed import on_device_of
from lightning_sym.networks.base import Cuts
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.checking import check_network, examples_of
from lightning_sym.symmetry.described import listed
from lightning_sym.symmetry.group.statistics import free_positions
from lightning_sym.symmetry.lengths import captures_of
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.self_test import proven
from lightning_sym.symmetry.shifts import find_shifts
from lightning_sym.symmetry.solving.gained import Known
from lightning_sym.symmetry.solving.group import find_group
from lightning_sym.symmetry.solving.unread import wide_matrices
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.norms import absorbed_statistics, find_norms
from lightning_sym.symmetry.tracing.labelling.elementwise_rules import FACTORS
from lightning_sym.symmetry.tracing.labelling.rules import namesakes
from lightning_sym.symmetry.tracing.labels import find_labels
from lightning_sym.symmetry.tracing.normal_form.alike import Role, read_apart
from lightning_sym.symmetry.tracing.normal_form.merging import sums_of_layers
from lightning_sym.symmetry.tracing.tensors import Tensors
from lightning_sym.symmetry.tracing.tracer import Tracer
from lightning_sym.symmetry.views import ConvertedTensors, doubled

_MOST_SETS = 4  # of equal modules that are tried one by one, if all together lose elements
_PAIRS = 4  # of random elements whose products are compared
_LARGE = 2 * 10**6  # parameters, above which one pair is compared
_SMALL = 10**5  # entries of a tensor that is compared in a large network
_SAME = 1e-7  # relative and absolute difference of weights that count as equal

_EXCHANGED = "add in {}: layers that read one value are exchanged; exchange=False finds more of their translations"
_NOT_CLOSED = "translations of {} are left out: the product of two elements with them is no element"


def trace_symmetry(
    network: nn.Module,
    example_input: Any = None,
    *,
    more_examples: Sequence[Any] = (),
    affine: bool = False,
    shifts: bool = True,
    check: bool = True,
    nullity: bool = True,
    exchange: bool = True,
    tolerance: float | None = None,
    cuts: Cuts | None = None,
    output: str | int | None = None,
    **keywords: Any,
) -> Symmetry:
    """Find the weight-space symmetry of a network, and verify it numerically on random elements.

    The network is run once on tensors without data. The constraints of each operation are collected position by
    position, and solved. The result holds for every network of this architecture, in evaluation mode, for all weights,
    and for inputs of any values and size. Weights outside a slice or an index at the example's size are fixed, as
    longer inputs may reach them. Axes of length 1 are traced at another length where the network accepts it. The
    self-test also tries other lengths and numbers of samples, and traces those at which it fails. If this does not
    help, a note limits the result to the example's lengths. A function that branches on a size far from the
    example's needs an example for each branch.

    Args:
        network: Any network whose operations do not depend on values, other than those of integer and boolean inputs
            (a note then restricts the group to some). Not changed. Its weights may be on torch's meta device
            (:func:`~lightning_sym.symmetry.without_weights`), as shapes and constants suffice.
        example_input: An input (a tensor of any batch size, on any device), or a tuple of positional arguments; None
            if all arguments are keywords.
        more_examples: Further inputs, as `example_input`, of other lengths or image sizes. The group is the one that
            all of them allow, and weights that any of them reaches need not be fixed. Where the network has keyword
            arguments, a dictionary among the inputs replaces these.
        affine: Whether to include sign changes that add a constant, where the next bias can absorb it. Units of sigmoid
            networks then have signs, as those of tanh networks do (docs/theory/intertwiners.md, 1.4).
        shifts: Whether to include translations (docs/theory/translations.md): changes of biases that the next
            layers cancel, changes of means that norms subtract, and others. Otherwise the group is linear:
            permutations, signs, scales and matrices.
        check: Whether to run the self-test (recommended). It applies two random elements to float64 copies of the
            network, through a round trip of the state dict: one copy with weights near its own, one with random
            weights. A large network gets the second only, unless a wrong group may contain that element by chance, as
            with few signs. Inputs are samples of every example, and noise around them. Of networks with up to 2 million
            parameters, products of elements are also compared with elements one after the other; the translations of
            tensors that differ are left out, with a note. A network without weights cannot be tested, as a note says.
            Without the self-test, networks given to the symmetry later are not run either (:meth:`Symmetry.require`).
        nullity: Whether the self-test also measures the nullity of the Jacobian (:attr:`Symmetry.nullity`) of a network
            with up to 2,000 parameters, which takes up to half a minute. Notes then give the number of dimensions that
            the group misses, and weights that a permutation outside the group exchanges (docs/theory/tracing.md, 8.5).
        exchange: Whether elements exchange modules with equal operations: experts, heads, members of an ensemble
            (docs/theory/tracing.md, 4). The tensors of such modules are then stacked, and values inside them have no
            names. Otherwise every module keeps its place; modules also do if the self-test finds that such elements do
            not compose.
        tolerance: Largest relative change of an output that the self-test accepts. By default 1e-10, or more if the
            network rounds to a lower precision (1.2e-4 for float32).
        cuts: The network's :meth:`~lightning_sym.networks.Network.cuts`, if values that cross them need hook points.
        output: The output to keep, if there are several: its key in a dictionary, its field in a dataclass or named
            tuple, or its index in a tuple. By default ``logits`` if it exists (notes name the others), otherwise all
            outputs; caches for later calls never count.
        **keywords: The network's keyword arguments: ``trace_symmetry(model, input_ids=ids, attention_mask=mask)``.

    Returns:
        The symmetry.

    Raises:
        TypeError: If a parameter is complex or not floating, an example holds no tensor, or the network does not accept
            the arguments.
        ValueError: If the network has no output of that name, or no finite output; or if it cannot be traced:
            data-dependent control flow, parametrised or lazy weights, weights that are not finite, or overlapping
            memory.
        RuntimeError: If the self-test fails, because the rule of an operation allows too much.

    Example:
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> symmetry = trace_symmetry(network, torch.randn(2, 5))
        >>> symmetry.dimension
        8
        >>> other = symmetry.act(symmetry.sample(), network)
    """
    inside_meta = torch.get_default_device().type == "meta"  # within ``with torch.device("meta")``, to build networks
    with _new_garbage_only(), torch.device("cpu") if inside_meta else contextlib.nullcontext():
        examples = examples_of(network, example_input, more_examples, keywords, output)
        check_network(network)
        tensors = Tensors.of(network)
        examples = examples if tensors.weightless else on_device_of(network, examples)
        trace = Tracer(network, cuts, tensors.fixed, tensors.kept)
        captures = trace.agreeing(captures_of(examples, trace))
        for note in tensors.cut(captures).unused(captures):
            warnings.warn(note, stacklevel=2)
        derive = functools.partial(
            _derived, trace, tensors, examples, affine=affine, shifts=shifts, check=check, output=output
        )
        apart, sums = captures, sums_of_layers(captures)
        plain = functools.partial(derive, merges=False)
        captures, known = _exchanging(trace, captures, plain) if exchange else (captures, None)
        if check and trace.stacked and not tensors.weightless and _not_composed(known, network):
            trace.stacked = ()
            captures, known = [trace(captured.call) for captured in captures], None
        if known is not None and sums:
            exchanged, known = known.exchanged_norms, derive(captures)
            known.exchanged_norms = exchanged
            left = sums_of_layers(captures)
            lost = [own for own in sums if own not in left]
            stacked, trace.stacked = trace.stacked, ()
            if lost and derive(apart).dimension > known.dimension:
                known.notes += (_EXCHANGED.format(lost[0]),)
            trace.stacked = stacked
        captures, known = _splitting(trace, captures, known or derive(captures), derive)

        def begin(found: Sequence[Capture]) -> Symmetry:
            return known if found is captures else derive(found)

        if not check or tensors.weightless:
            return begin(captures)
        symmetry = proven(network, captures, trace, begin, tolerance, whole=shifts and nullity)
        still: frozenset[str] = frozenset()
        small = sum(own.numel() for own in network.parameters()) <= _LARGE
        while small and symmetry.shifts and (moved := _not_composed(symmetry, network)):
            still = still | moved if moved - still else frozenset(tensors.states)
            own = functools.partial(derive, still=still)
            symmetry = proven(network, captures, trace, own, tolerance, whole=shifts and nullity)
            symmetry.notes = (*symmetry.notes, _NOT_CLOSED.format(listed(sorted(still))))
        return symmetry


def _exchanging(
    trace: Tracer, captures: Sequence[Capture], derive: Callable[[Sequence[Capture]], Symmetry]
) -> tuple[Sequence[Capture], Symmetry | None]:
    """Return captures that read equal modules as stacks, where the group then has more elements and loses none.

    Returns:
        The captures, and their symmetry if it was derived.
    """
    best: Symmetry | None = None
    apart: set[Role] = set()

    def attempt(sets: Sequence[Sequence[Role]]) -> Sequence[Capture] | None:
        nonlocal best
        kept, new = trace.stacked, [*trace.stacked, *(role for roles in sets for role in roles)]
        trace.stacked = new
        found = [trace(captured.call) for captured in captures]
        apart.update(*(read_apart(captured) for captured in found))
        if not apart & {*new}:
            trace.stacked = kept
            best = best or derive(captures)
            trace.stacked = new
            symmetry = derive(found)
            more = symmetry.log10_permutations > best.log10_permutations + 1e-9
            if more and _loses_nothing(best, symmetry):
                known = {(norm.module, norm.gain, norm.bias) for norm in symmetry.norms}
                lost = (own.module for own in best.norms if (own.module, own.gain, own.bias) not in known)
                symmetry.exchanged_norms = (*best.exchanged_norms, *lost)
                best = symmetry
                return found
        trace.stacked = kept
        return None

    sets = trace.alike or []
    found = attempt(sets) if sets else None
    if found is None and apart and (sets := [roles for roles in sets if apart.isdisjoint(roles)]):
        found = attempt(sets)
    if found is not None:
        return found, best
    for one in sets[:_MOST_SETS] if len(sets) > 1 else ():
        captures = attempt([one]) or captures
    return captures, best


def _not_composed(symmetry: Symmetry | None, network: nn.Module) -> frozenset[str]:
    """Return the tensors where two random elements, one after the other, act differently from their product.

    An element followed by its inverse is compared as well. Exchanged modules may share translations that their exchange
    does not carry along, as may units that permutations or matrices mix. Of a large network small tensors are compared,
    which hold most translations.
    """
    if symmetry is None:
        return frozenset()
    weights = {name: own.detach() for name, own in symmetry.tensors(network).items() if own.is_floating_point()}
    large = sum(own.numel() for own in weights.values()) > _LARGE
    names = [name for name, own in weights.items() if not large or own.numel() <= _SMALL]
    exact, seed, differ = ConvertedTensors(weights, doubled), torch.Generator().manual_seed(0), set[str]()
    for _ in range(1 if large else _PAIRS):
        one, two = (symmetry.sample(seed) for _ in range(2))
        moved = MovedTensors(symmetry.factors, one, exact)
        pairs = [
            (MovedTensors(symmetry.factors, two, moved), symmetry.compose(two, one)),
            (MovedTensors(symmetry.factors, symmetry.inverse(one), moved), symmetry.identity()),
        ]
        for found, product in pairs:
            wanted = MovedTensors(symmetry.factors, product, exact)
            differ |= {
                own for own in names if not torch.allclose(found[own], wanted[own], _SAME, _SAME, equal_nan=True)
            }
    return frozenset(differ)


def _splitting(
    trace: Tracer, captures: Sequence[Capture], best: Symmetry, derive: Callable[[Sequence[Capture]], Symmetry]
) -> tuple[Sequence[Capture], Symmetry]:
    """Return captures that read biases before exponentials as factors, where the group then has more dimensions."""
    if any(note.endswith(FACTORS) for note in best.notes):
        trace.splits = True
        found = [trace(captured.call) for captured in captures]
        symmetry = derive(found)
        more = symmetry.dimension > best.dimension and symmetry.shifts >= best.shifts
        if more and _loses_nothing(best, symmetry):
            return found, symmetry
        trace.splits = False
    return captures, best


def _loses_nothing(before: Symmetry, after: Symmetry) -> bool:
    """Whether one group has at least as many dimensions, signs and half turns as another one, and no more notes."""
    one, two = ((own.dimension, own.signs, own.structure.flips.shape[1], -len(own.notes)) for own in (before, after))
    return all(old <= new for old, new in zip(one, two, strict=True))


@contextlib.contextmanager
def _new_garbage_only() -> Iterator[None]:
    """Limit garbage collection to objects created in this context: otherwise it takes a third of the time."""
    if gc.get_freeze_count():  # other code has frozen objects
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _derived(
    trace: Tracer,
    tensors: Tensors,
    examples: Sequence[Call],
    captures: Sequence[Capture],
    *,
    affine: bool,
    shifts: bool,
    check: bool,
    output: str | int | None,
    merges: bool = True,
    still: Collection[str] = (),
) -> Symmetry:
    """Derive the symmetry of a network from its operations; see :func:`trace_symmetry`.

    Args:
        trace: Captures the network.
        tensors: Its tensors.
        examples: The user's calls.
        captures: The network in normal form, on each of these and on further ones.
        affine: See there.
        shifts: See there.
        check: See there.
        output: See there.
        merges: Whether to merge layers in the search for translations.
        still: Tensors that are not translated.
    """
    captures = trace.agreeing(captures)
    tensors, network = tensors.cut(captures), trace.network
    labels = find_labels(captures, tensors, affine=affine, lengths=len(examples))
    parameters = {*tensors.parameters}
    absorbed = absorbed_statistics(captures, parameters)
    group = find_group(labels, Known(parameters, absorbed))
    told = sorted(set().union(*(captured.told for captured in captures)))
    group = group._replace(structure=replace(group.structure, told=tuple(told)))
    added = find_shifts(captures, tensors, labels, group, wanted=shifts, merges=merges, still=still)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.states.items()}
    free = free_positions(added.structure, shapes, group.unread.values())
    unread = [note for note, positions in group.unread.items() if not free[positions].all()]
    unread += wide_matrices(added.structure, tensors.states)
    symmetry = Symmetry(
        added.structure,
        added.values,
        labels.walk.taps,
        network,
        [
            *tensors.unused(captures),
            *_left_out(captures, output),
            *group.notes,
            *unread,
            *added.notes,
            *namesakes(network),
        ],
        constants=tensors.constants(captures),
        examples=examples,
        shown=added.shown,
        absorbed=absorbed | added.structure.idle,
        norms=find_norms(captures, parameters),
        common_shift=added.common_shift,
    )
    symmetry._checked = check
    symmetry.require(network, check=tensors.weightless)
    return symmetry


def _left_out(captures: Sequence[Capture], output: str | int | None) -> list[str]:
    """Note the outputs that do not count, and the inputs."""
    names = dict.fromkeys(name for captured in captures for name in captured.left_out)
    kept = "logits" if output is None else output
    note = f"of the outputs {kept} stays the same, {', '.join(names)} may change (output=... chooses)"
    given = "for integer and boolean inputs that select as many elements, and the same branches, as the example's only"
    return [note] * bool(names) + [given] * any(captured.given for captured in captures)
