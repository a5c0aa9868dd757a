"""From a network to its symmetry: capture, normal form, labels, group, shifts, proof."""

import contextlib
import functools
import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_sym._distributed import on_device_of
from lightning_sym.networks.base import Cuts
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.checking import check_network, examples_of
from lightning_sym.symmetry.group.statistics import free_positions
from lightning_sym.symmetry.lengths import captures_of
from lightning_sym.symmetry.self_test import proven
from lightning_sym.symmetry.shifts import find_shifts
from lightning_sym.symmetry.solving.gained import Known
from lightning_sym.symmetry.solving.group import find_group
from lightning_sym.symmetry.solving.unread import wide_matrices
from lightning_sym.symmetry.tracing.calls import Call
from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.labels import find_labels
from lightning_sym.symmetry.tracing.norms import absorbed_statistics, find_norms
from lightning_sym.symmetry.tracing.rules import namesakes
from lightning_sym.symmetry.tracing.tensors import Tensors
from lightning_sym.symmetry.tracing.tracer import Tracer


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
        shifts: Whether to count what may be added to weights (docs/theory/translations.md): biases that the next
            layers take off, means that norms take off, and the like. Without, the group is linear: permutations, signs,
            scales and matrices.
        check: Whether to run the self-test (recommended): two random elements on float64 copies of the network, one
            with weights near its own and one with random weights, on samples of every example and on noise around
            them, each through a round trip of the state dict. Of a small network it then measures the nullity of the
            Jacobian (:attr:`Symmetry.nullity`), and notes how many of its dimensions the group leaves out
            (docs/theory/tracing.md, 8.5). A network without weights cannot be tested; a note says so. Without,
            networks that the symmetry meets later are not run, either (:meth:`Symmetry.require`).
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
    inside_meta = torch.get_default_device().type == "meta"  # of ``with torch.device("meta")``, which builds networks
    with _new_garbage_only(), torch.device("cpu") if inside_meta else contextlib.nullcontext():
        examples = examples_of(network, example_input, more_examples, keywords, output)
        check_network(network)
        tensors = Tensors.of(network)
        examples = examples if tensors.weightless else on_device_of(network, examples)
        trace = Tracer(network, cuts, tensors.fixed)
        captures = trace.agreeing(captures_of(examples, trace))
        for note in tensors.cut(captures).unused(captures):
            warnings.warn(note, stacklevel=2)
        derive = functools.partial(
            _derived, trace, tensors, examples, affine=affine, shifts=shifts, check=check, output=output
        )
        prove = check and not tensors.weightless
        return proven(network, captures, trace, derive, tolerance, whole=shifts) if prove else derive(captures)


@contextlib.contextmanager
def _new_garbage_only() -> Iterator[None]:
    """Let the garbage collector look only at what is made meanwhile: else it takes a third of the time."""
    if gc.get_freeze_count():  # somebody else's
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
) -> Symmetry:
    """Derive the symmetry of a network from its operations; see :func:`trace_symmetry`.

    Args:
        trace: What captures the network.
        tensors: Its tensors.
        examples: The calls that the user gave.
        captures: The network in normal form, on each of these and on further ones.
        affine: As there.
        shifts: Likewise.
        check: Likewise.
        output: Likewise.
    """
    captures = trace.agreeing(captures)
    tensors, network = tensors.cut(captures), trace.network
    labels = find_labels(captures, tensors, affine=affine, lengths=len(examples))
    parameters = {*tensors.parameters}
    absorbed = absorbed_statistics(captures, parameters)
    group = find_group(labels, Known(parameters, absorbed))
    told = sorted(set().union(*(captured.told for captured in captures)))
    group = group._replace(structure=replace(group.structure, told=tuple(told)))
    added = find_shifts(captures, tensors, labels, group, wanted=shifts)
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
        absorbed=absorbed,
        norms=find_norms(captures, parameters),
        common_shift=added.common_shift,
    )
    symmetry._checked = check
    symmetry.require(network, check=tensors.weightless)
    return symmetry


def _left_out(captures: Sequence[Capture], output: str | int | None) -> list[str]:
    """Say which outputs do not count."""
    names = dict.fromkeys(name for captured in captures for name in captured.left_out)
    kept = "logits" if output is None else output
    note = f"of the outputs {kept} stays the same, {', '.join(names)} may change (output=... chooses)"
    return [note] if names else []
