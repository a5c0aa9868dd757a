"""Completeness of a small network's group: whether it explains the nullity of the Jacobian.

See docs/theory/tracing.md, 8.5.
"""

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_sym._linear_algebra import thin_svd
from lightning_sym.networks.modes import attributes_kept, evaluating, plain_cdist
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.exchanges import missing_exchange
from lightning_sym.symmetry.jacobians import has_its_derivative, jacobian_at, moves_outputs
from lightning_sym.symmetry.lengths import other_lengths, samples_of
from lightning_sym.symmetry.proof import double, double_copy, perturb, runs
from lightning_sym.symmetry.tangents import tangents_at
from lightning_sym.symmetry.tracing.graph.calls import Call, tensors_of
from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.operations import Trait, name_of, operations

# Networks with more parameters, or more intermediate numbers for all rows, are not measured.
MOST_PARAMETERS = 2000
_MOST_NUMBERS = 2e7
# Maximum number of parameters for searches over weights. Rectifiers of larger networks are leaky, with this slope.
_MOST_SEARCHED = 500
_SLOPE = 0.1
# Smaller singular values, relative to the largest, count as zero.
_ZERO = 1e-12
# Maximum number of searches for generic weights, maximum steps of each, and required number of equal results.
_SEARCHES, _STEPS, _AGREEING = 4, 20, 3
# Thresholds of normal numbers for changing an entry in a step: where further directions move it, and elsewhere.
_RARITIES = ((-1.0, 2.0), (0.0, 1.8), (1.0, 1.5), (1.8, 1.2))
# Root mean squares of random weights: of matrices times the root of the fan-in; bounds for those of vectors.
_GROWTH, _LEAST = 1.5, 0.2
# Number of steps of the power iteration for the largest singular value.
_POWERS = 8
# Ratio of the number of inputs in searches to that of the first measurement.
_MORE = 4
# Maximum number of further weights at which entries may be read.
_READINGS = 12
# Number of names in a note.
_SHOWN = 6
# Rectifiers; the first three write into their input.
_RECTIFIERS = (torch.relu_, Tensor.relu_, F.relu_, torch.relu, Tensor.relu, F.relu)
# Functions that are constant for many units at most weights, or that jump: their derivatives show nothing. Each is
# replaced by a smooth function with the same group, which is as close to linear, odd or even.
_SMOOTH: Mapping[Any, Callable[..., Tensor]] = {
    F.hardsigmoid: lambda x, inplace=False: torch.sigmoid(2 * x / 3),
    F.hardswish: lambda x, inplace=False: x * torch.sigmoid(2 * x / 3),
    F.relu6: lambda x, inplace=False: _clipped(x, 0.0, 6.0),
    F.hardtanh: lambda x, min_val=-1.0, max_val=1.0, inplace=False: _clipped(x, min_val, max_val),
    **dict.fromkeys((torch.hardshrink, F.softshrink), lambda x, lambd=0.5: x - torch.tanh(x)),
    F.threshold: lambda x, threshold, value, inplace=False: value + (x - value) * torch.sigmoid(x - threshold),
}
# Parts of notes on operations that may hide dimensions: wrong where a measured nullity shows that none is missing.
_REFUTED = ("could absorb", "could undo")
# Maximum number of random weights of large networks, and numbers of these that must agree on what is missing: of
# analytic functions, whose generic weights all have the same kernel, and with units that may be on one side only.
_DRAWS, _ANALYTIC, _PIECEWISE = 4, 2, 3
# Operations with one-sided units, and with sides that random weights rarely reach.
_BENT = {"relu", "leaky_relu", "prelu", "abs", "max_pool1d", "max_pool2d", "max_pool3d"}
_REPLACED = {"hardsigmoid", "hardtanh", "relu6", "threshold"}
_CLIPPED = (operations(Trait.EQUALISE) | operations(Trait.ORDER)) - _BENT - _REPLACED - {
    "where", "masked_fill", "eq", "ne"
} | {"maximum", "minimum", "max", "min", "amax", "amin", "sort", "topk"}  # fmt: skip


def _clipped(x: Tensor, least: float, most: float) -> Tensor:
    size = (most - least) / 2
    return least + size + size * torch.tanh((x - least - size) / size)


class _NoDerivativeError(Exception):
    """A network has no derivative, or does not run on other inputs."""


class Excess(NamedTuple):
    """The part of a Jacobian's kernel outside the tangent space of the orbit.

    Attributes:
        missing: Dimension of the kernel minus that of the orbit, on entries of parameters that count.
        nullity: Dimension of that kernel.
        moved: Masks by name of entries that directions outside the tangent space move, or that no output depends on.
        names: Finds as few parameters as possible that such directions move.
        whole: Dimension of the kernel on all entries.
        read: Mask of the entries that an output depends on, at some of the weights. Shape (entries,).
        sure: Whether searches for generic weights agree; otherwise all dimensions are the least ones found.
    """

    missing: int
    nullity: int
    whole: int
    read: Tensor
    moved: Mapping[str, Tensor] = {}
    names: Callable[[], Sequence[str]] = tuple
    sure: bool = True


def measure(symmetry: Symmetry, network: nn.Module, captures: Sequence[Capture]) -> None:
    """Measure the nullity of a network's Jacobian, and note how many of its dimensions the group leaves out.

    Args:
        symmetry: The symmetry, after its self-test. Its nullity stays None if the network is too large, rounds to
            single precision, or has no derivative that shows how outputs change; or, with a note, if all tested
            weights have other nullities.
        network: Not changed.
        captures: The traced calls.
    """
    count = sum(parameter.numel() for parameter in network.parameters())
    if not count:
        return
    if count > MOST_PARAMETERS:
        symmetry.unmeasured = f"more than {MOST_PARAMETERS} parameters: see local_dimension"
    elif symmetry.precision != torch.float64:
        symmetry.unmeasured = f"the network rounds to {symmetry.precision}"
    elif count * max(map(_numbers, captures)) > _MOST_NUMBERS:
        symmetry.unmeasured = "the values inside are too large; use smaller examples"
    if symmetry.unmeasured:
        return
    exact = double_copy(network).cpu()
    with torch.no_grad(), evaluating(exact):
        calls = [_few(exact, pytree.tree_map_only(Tensor, Tensor.cpu, double(own.call))) for own in captures]
    found = None
    large = count > _MOST_SEARCHED
    with evaluating(exact), attributes_kept(exact), warnings.catch_warnings(), _Batched(leaky=large):
        warnings.simplefilter("ignore")  # of other operations without a batched version
        with contextlib.suppress(_NoDerivativeError):
            least = functools.partial(_at_a_few, agreeing=_agreeing(captures)) if large else _least
            found = least(symmetry, exact, network.state_dict(), calls)
    if found is not None and found.missing:
        with evaluating(exact), attributes_kept(exact), warnings.catch_warnings(), _Batched(leaky=True):
            warnings.simplefilter("ignore")
            found = _at_small_vectors(symmetry, exact, network.state_dict(), calls, found)
    if found is None:
        symmetry.unmeasured = "no derivative, or another at all tested weights"
        return
    with evaluating(exact), attributes_kept(exact), warnings.catch_warnings(), _Batched(leaky=True):
        warnings.simplefilter("ignore")
        read = _read_at_some(symmetry, exact, network.state_dict(), calls, found.read)
        if not has_its_derivative(exact, calls[0]) or moves_outputs(exact, ~read, calls):
            symmetry.unmeasured = "derivatives do not show how outputs change, as with rounding or a custom backward"
            return
    if found.sure:
        symmetry.nullity = found.nullity
    idle = symmetry.dimension - (found.nullity - found.missing)
    if found.sure and not found.missing and not idle:
        symmetry.notes = tuple(note for note in symmetry.notes if not any(part in note for part in _REFUTED))
    if idle > 0:
        symmetry.notes = (
            *symmetry.notes,
            f"{idle} of {symmetry.dimension} dimensions of this group change nothing (at these sizes)",
        )
    if not bool(found.read.all()):
        symmetry.notes = (*symmetry.notes, *_unread(symmetry, exact, read, captures))
    with evaluating(exact), attributes_kept(exact), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(6)
        _draw(symmetry, exact, network.state_dict(), generator, math.inf)
        further = [*_further(exact, calls, generator)]
        exchanged = missing_exchange(symmetry, exact, further, functools.partial(_Batched, leaky=True))
    if exchanged:
        text = "some exchange of entries of {} changes no output (at these sizes), and no element of this group does it"
        symmetry.notes = (*symmetry.notes, text.format(_first(exchanged)))
    if found.missing:
        missing, where = f"{found.missing} of {found.nullity}", "at these sizes"
        if not found.sure:
            missing = f"at most {found.missing} of at most {found.nullity}"
            where = "which is uncertain, as it differs between all tested weights"
        symmetry.notes = (
            *symmetry.notes,
            f"this group leaves out {missing} dimensions of the Jacobian's nullity ({where}), which move "
            f"{_first(found.names())}",
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _read_at_some(
    symmetry: Symmetry, exact: nn.Module, own: Mapping[str, Tensor], calls: Sequence[Call], read: Tensor
) -> Tensor:
    """Return a mask of the entries that an output depends on at some weights, with leaky rectifiers: none are dead.

    Args:
        symmetry: See :func:`_least`.
        exact: See there.
        own: See there.
        calls: See there.
        read: Entries that are known to be read. Shape (entries,).
    """
    generator, counts = torch.Generator().manual_seed(3), [-1, -1]
    for amount in (math.inf, 0.3, math.inf, 0.03, *[math.inf] * _READINGS):
        if bool(read.all()) or (amount == math.inf and len(counts) > 5 and counts[-5] == counts[-1]):
            break
        _draw(symmetry, exact, own, generator, amount)
        for call in _further(exact, calls, generator):
            with contextlib.suppress(Exception):  # as in `measure`
                read = read | (jacobian_at(exact, call, 1, generator).nan_to_num(0.0) != 0).any(0)
        counts.append(int(read.sum()))
    return read


def _unread(symmetry: Symmetry, network: nn.Module, read: Tensor, captures: Sequence[Capture]) -> list[str]:
    """Return a note on entries that no output depends on, of parameters that other notes do not name.

    Args:
        symmetry: The symmetry, with its other notes.
        network: The network.
        read: Mask of the entries that an output depends on. Shape (entries,).
        captures: The traced calls.
    """
    parts = dict(network.named_parameters())
    masks = zip(parts, torch.split(read, [part.numel() for part in parts.values()]), strict=True)
    states = [own for captured in captures for own in captured.states.items()]
    used = {name.partition("[")[0] for node, name in states if node.users}  # of a vector in pieces, its own name
    told = set(re.findall(r"[\w.]+", " ".join(symmetry.notes)))
    left = {name: int((~mask).sum()) for name, mask in masks if name in used - told}
    named = [f"{count} of {parts[name].numel()} entries of {name}" for name, count in left.items() if count]
    more = f" and of {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    text = "no output depends on {}{} (at these sizes): the measured nullity does not count these"
    return [text.format(", ".join(named[:_SHOWN]), more)] if named else []


class _Batched(TorchFunctionMode):
    """Writes out functions without a batched derivative; embeddings have gradients at padding tokens as well.

    RMS norms without eps use that of single precision: that of double precision would vanish in rounding.

    Args:
        leaky: Whether rectifiers are leaky, so that no unit is dead. Their scales and permutations are the same.
    """

    def __init__(self, *, leaky: bool) -> None:
        super().__init__()
        self.leaky = leaky

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {} if kwargs is None else kwargs
        if self.leaky and function in _RECTIFIERS:
            inplace = function in _RECTIFIERS[:3] or options.get("inplace", len(args) > 1 and args[1])
            return F.leaky_relu(args[0] if args else options["input"], _SLOPE, inplace=inplace)
        if function in _SMOOTH:
            return _SMOOTH[function](*args, **{"x" if key == "input" else key: own for key, own in options.items()})
        if function is torch.cdist:
            return plain_cdist(*args, **options)
        if function is F.one_hot and args and len(args) + len(options) == 2:
            classes = options.get("num_classes", args[-1])
            return (args[0][..., None] == torch.arange(classes)).long() if classes > 0 else function(*args, **options)
        if function is F.embedding and not options.get("max_norm"):
            return args[1][args[0]]
        if function is F.batch_norm:
            return _batch_norm(*args, **options)
        if function is F.prelu and not options:
            x, slope = args
            slope = slope.view(-1, *[1] * (x.ndim - 2)) if x.ndim > 1 else slope
            return torch.where(x > 0, x, slope * x)
        if function is F.rms_norm:
            given = {**dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)), **options}
            eps = given.get("eps")
            return function(**given | {"eps": torch.finfo(torch.float32).eps if eps is None else eps})
        return function(*args, **options)


def _batch_norm(
    x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Return a batch norm of which running statistics have derivatives; the arguments are those of torch."""
    if training or mean is None or variance is None:
        return F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
    gain = (variance + eps).rsqrt() if weight is None else weight * (variance + eps).rsqrt()
    start = -mean * gain if bias is None else bias - mean * gain
    gain, start = (own.view(-1, *[1] * (x.ndim - 2)) for own in (gain, start))
    return x * gain + start


def _numbers(captured: Capture) -> int:
    """Return the number of numbers that a call computes."""
    values = (node.meta.get("val") for node in captured.graph.nodes)
    return sum(value.numel() for value in values if isinstance(value, Tensor))


def _few(network: nn.Module, call: Call) -> Call:
    """Return two samples of a call, and those with its extreme integers, if the network takes them.

    The range of integers is that of the whole call, and a graph's nodes are no samples.
    """
    if not samples_of(call):
        return call
    rows = {0: None, min(1, len(tensors_of(list(call))[0]) - 1): None}
    for tensor in tensors_of(list(call)):
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool and tensor.numel():
            numbers = tensor.reshape(len(tensor), -1)
            rows |= dict.fromkeys((int(numbers.amin(1).argmin()), int(numbers.amax(1).argmax())))
    few: Call = pytree.tree_map_only(Tensor, lambda t: t[[*rows]], call)
    return few if runs(network, [few]) else call


def _least(symmetry: Symmetry, exact: nn.Module, own: Mapping[str, Tensor], calls: Sequence[Call]) -> Excess | None:
    """Return the excess at generic weights, where the whole kernel is smallest.

    Units that are dead or always on have further directions. From weights with such units, a search changes the signs
    and sizes of entries that these directions move. Nothing is missing if every entry that some weights make an output
    depend on is explained: at some weights, the entries read include it and have no further directions.

    Args:
        symmetry: The symmetry.
        exact: The network in float64 and evaluation mode; its weights are replaced.
        own: The network's original weights and buffers.
        calls: Inputs of every traced length.

    Returns:
        The excess; None if it cannot be measured.
    """
    generator = torch.Generator().manual_seed(2)
    read, explained = torch.zeros(2, sum(weight.numel() for weight in exact.parameters()), dtype=torch.bool)
    drawn = functools.partial(_draw, symmetry, exact, own, generator)

    def is_whole(found: Excess) -> bool:
        read.logical_or_(found.read)
        if not found.missing:
            explained.logical_or_(found.read)
        return bool(found.read.any()) and not bool((read & ~explained).any())

    for amount in (math.inf, 0.3, 0.03):  # some functions are not finite at most weights
        drawn(amount)
        if (best := _measured(symmetry, exact, calls[:1], generator)) is not None:
            break
    if best is None or (is_whole(best) and bool(read.all())):
        return best
    entries = {name: torch.ones_like(own, dtype=torch.bool) for name, own in exact.named_parameters()}
    nothing = Excess(0, 0, len(read), torch.zeros_like(read), entries)  # known at such weights
    calls = [*_further(exact, calls, generator)]
    more = max(1, _MORE // len(calls))
    # With notes, a short search suffices.
    searches, steps, agreeing = (2, 6, 2) if symmetry.notes else (_SEARCHES, _STEPS, _AGREEING)
    ends, weights = list[int](), _weights(exact)
    while len(ends) < searches and ends.count(best.whole) < 2:
        results, least, kept = list[int](), None if ends else best, _weights(exact)
        while len(results) < steps and (len(results) < agreeing or len({*results}) > 1):
            found = _measured(symmetry, exact, calls, generator, more, least) or nothing
            if is_whole(found):
                return found._replace(read=read)
            results.append(found.whole)
            if least is None or found.whole <= min(results):
                least, kept = found, _weights(exact)
            if least.whole < best.whole:
                best, weights = least, kept
            _mutate(exact, kept, least.moved, len(results), generator)
        ends.append(sorted(results)[agreeing - 1])
        drawn(amount)
    if not torch.equal(best.read, read):
        exact.load_state_dict(weights, strict=False)
        best = _measured(symmetry, exact, calls, generator, more, counted=read) or best
    return best._replace(read=read, sure=not best.missing or ends.count(best.whole) >= 2)


def _at_a_few(
    symmetry: Symmetry, exact: nn.Module, own: Mapping[str, Tensor], calls: Sequence[Call], *, agreeing: int
) -> Excess | None:
    """Return the excess of a large network where several random weights agree on it; see :func:`_least`.

    Args:
        symmetry: See there.
        exact: See there.
        own: See there.
        calls: See there.
        agreeing: Number of weights that must agree, unless nothing is missing.
    """
    generator = torch.Generator().manual_seed(2)
    amounts, known = [math.inf, 0.3, 0.03], list[tuple[int, int]]()
    read = torch.zeros(sum(weight.numel() for weight in exact.parameters()), dtype=torch.bool)
    for number in range(_DRAWS):
        while amounts:
            _draw(symmetry, exact, own, generator, amounts[0])
            more = max(1, _MORE // len(calls)) if number else 1
            if (found := _measured(symmetry, exact, calls, generator, more)) is not None:
                break
            del amounts[0]
        else:
            return None
        known.append((found.missing, found.nullity))
        found = found._replace(read=read.logical_or_(found.read))
        if not found.missing and (number or bool(found.read.all())):
            return found
        if known.count(known[-1]) == agreeing:
            return found
        calls = calls if number else [*_further(exact, calls, generator)]
    return None


def _at_small_vectors(
    symmetry: Symmetry, exact: nn.Module, own: Mapping[str, Tensor], calls: Sequence[Call], found: Excess
) -> Excess:
    """Return the excess at weights with small biases if nothing is missing there, otherwise the one that was found.

    Behind a norm, a bias larger than the gain keeps a unit on for all inputs.
    """
    generator, named = torch.Generator().manual_seed(5), found.names()
    calls = [*_further(exact, calls, generator)]
    for _ in range(_AGREEING):
        _draw(symmetry, exact, own, generator, math.inf)
        for name, weight in exact.named_parameters():
            if weight.ndim == 1:
                size = 0.5 + torch.rand(weight.shape, generator=generator, dtype=weight.dtype)
                weight.data.copy_(weight.sign() * size * (_SLOPE if name in named else 1.0))
        with contextlib.suppress(_NoDerivativeError):
            small = _measured(symmetry, exact, calls, generator, max(1, _MORE // len(calls)))
            if small is not None and not small.missing:
                return small._replace(read=found.read | small.read)
    return found


def _agreeing(captures: Sequence[Capture]) -> int:
    """Return the number of weights that must agree on the excess; it exceeds all draws if agreement proves nothing."""
    names = {name_of(node) for captured in captures for node in captured.graph.nodes}
    return _DRAWS + 1 if names & _CLIPPED else _PIECEWISE if names & _BENT else _ANALYTIC


def _draw(
    symmetry: Symmetry, exact: nn.Module, own: Mapping[str, Tensor], generator: torch.Generator, amount: float
) -> None:
    """Perturb a network's own weights by some amount, or draw others if it is infinite."""
    exact.load_state_dict(own)
    perturb(symmetry, exact, amount, generator)
    if math.isinf(amount):
        _spread(exact, generator)


def _weights(network: nn.Module) -> dict[str, Tensor]:
    """Copy a network's parameters."""
    return {name: weight.detach().clone() for name, weight in network.named_parameters()}


def _spread(network: nn.Module, generator: torch.Generator) -> None:
    """Give weights sizes and signs such that few units are dead, always on or saturated.

    Values keep their sizes from layer to layer, biases are smaller, and every line of a weight has both signs.
    """
    for weight in network.parameters():
        with torch.no_grad():
            size = float(weight.square().mean().sqrt()) if weight.numel() else 1.0
            several = weight.ndim > 1 and len(weight)
            wanted = _GROWTH / math.sqrt(weight[0].numel() or 1) if several else min(max(size, _LEAST), _GROWTH)
            weight.mul_(wanted / (size or 1.0))
            for axis in range(weight.ndim) if weight.ndim > 1 and weight.numel() else ():
                same = (weight.sign().sum(axis, keepdim=True).abs() == weight.shape[axis]) & (weight.shape[axis] > 1)
                at = torch.randint(max(weight.shape[axis], 1), same.shape, generator=generator)
                weight.mul_(1 - 2 * torch.zeros_like(weight).scatter_(axis, at, same.to(weight.dtype)))


def _mutate(
    network: nn.Module, kept: Mapping[str, Tensor], moved: Mapping[str, Tensor], step: int, generator: torch.Generator
) -> None:
    """Replace weights by copies with new signs and sizes at some entries; their number varies by step."""
    least, elsewhere = _RARITIES[step % len(_RARITIES)]
    for name, weight in network.named_parameters():
        sign, size, drawn = torch.randn(3, *weight.shape, generator=generator, dtype=weight.dtype).unbind()
        chosen = moved[name] & (drawn > least) | (drawn > elsewhere)
        with torch.no_grad():
            weight.copy_(torch.where(chosen, sign.sign() * size.exp(), 1.0) * kept[name])


# ---- inputs


def _further(network: nn.Module, calls: Sequence[Call], generator: torch.Generator) -> Iterator[Call]:
    """Yield calls with all tokens of the network's tables, and calls of other lengths."""
    for call in calls:
        call = _reaching(network, call)
        yield call
        own = [tensor.shape[1:] if samples_of(call) else tensor.shape for tensor in tensors_of(list(call))]
        with torch.no_grad():
            others = [exactly for _, exactly, _ in other_lengths(network, call, generator, thrifty=False)]
        for other in others:
            if [t.shape[1:] if samples_of(call) else t.shape for t in tensors_of(list(other))] != own:
                yield other


def _reaching(network: nn.Module, call: Call) -> Call:
    """Return a call with integers that include a table's first and last row, if the network runs; masks are kept."""
    sizes = sorted({parameter.shape[0] for parameter in network.parameters() if parameter.ndim > 1}, reverse=True)
    leaves, structure = pytree.tree_flatten(call)
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.dtype == torch.bool or not leaf.numel():
            continue
        if int(leaf.min()) < 0 or int(leaf.max()) == 1:
            continue
        for size in sizes:
            reached = leaf.clone()
            reached.view(-1)[-1] = size - 1
            tried: Call = pytree.tree_unflatten([*leaves[:number], reached, *leaves[number + 1 :]], structure)
            if size > int(leaf.max()) + 1 and runs(network, [tried]):
                leaves[number] = reached
                break
        if leaf.numel() > 1 and int(leaf.min()) > 0:
            reached = leaves[number].clone()
            reached.view(-1)[0] = 0
            tried = pytree.tree_unflatten([*leaves[:number], reached, *leaves[number + 1 :]], structure)
            leaves[number] = reached if runs(network, [tried]) else leaves[number]
    result: Call = pytree.tree_unflatten(leaves, structure)
    return result


# ---- the Jacobian


def _measured(
    symmetry: Symmetry,
    network: nn.Module,
    calls: Sequence[Call],
    generator: torch.Generator,
    least: int = 1,
    before: Excess | None = None,
    counted: Tensor | None = None,
) -> Excess | None:
    """Return the excess at a network's current weights.

    Args:
        symmetry: The symmetry.
        network: The network at these weights.
        calls: Inputs.
        generator: Generator for the noise around these.
        least: Ratio of the number of inputs to its minimum.
        before: The excess at other weights. Where the kernel is larger, only its dimension is measured.
        counted: Mask of the entries that count; by default those that an output depends on. Shape (entries,).

    Returns:
        The excess; None if too few outputs are finite, or all units are dead.
    """
    for more in (least, 8):  # more, where many numbers are not finite
        try:
            rows = torch.cat([jacobian_at(network, call, more, generator) for call in calls])
        except Exception as error:
            raise _NoDerivativeError from error
        rows = rows[torch.linalg.vector_norm(rows, dim=1).isfinite()]
        if len(rows) >= rows.shape[1]:
            break
    else:
        return None
    if not (largest := float(rows.abs().max())):
        return None
    rows = rows / largest
    sizes = torch.linalg.vector_norm(rows, dim=0)
    rows = _fewer(rows)
    found = _compared(symmetry, network, rows, sizes, sizes > 0 if counted is None else counted)
    larger = before is not None and (
        found.whole > before.whole or (found.whole == before.whole and torch.equal(found.read, before.read))
    )
    if before is not None and larger and found.missing:
        return before._replace(whole=found.whole, read=found.read)
    return found


def _rank(values: Tensor) -> int:
    """Return the number of nonzero singular values."""
    return int((values > _ZERO * float(values.max())).sum()) if len(values) else 0


def _fewer(rows: Tensor) -> Tensor:
    """Return random sums of a matrix's rows, where there are many: these have the same kernel."""
    count = 2 * rows.shape[1]
    if len(rows) <= count:
        return rows
    generator, summed = torch.Generator().manual_seed(0), torch.zeros(count, rows.shape[1], dtype=rows.dtype)
    for part in torch.split(rows, count):
        summed[: len(part)] += part * torch.randn(len(part), 1, generator=generator, dtype=rows.dtype)
    return summed


# ---- the group


def _compared(symmetry: Symmetry, network: nn.Module, rows: Tensor, sizes: Tensor, counted: Tensor) -> Excess:
    """Compare the kernel of a Jacobian with the orbit's tangents, on some entries of parameters.

    Args:
        symmetry: The symmetry.
        network: The network at these weights.
        rows: Rows of the Jacobian. Shape (rows, parameters).
        sizes: The lengths of the Jacobian's columns. Shape (parameters,).
        counted: Mask of the entries that count, among them all with columns that are not zero. Shape (parameters,).
    """
    tangents = tangents_at(symmetry, network)
    # Short rows keep their lengths: behind a saturated softmax, they are differences of numbers near 1, whose rounding
    # would count as rank.
    scale = sizes.clamp(min=1e-3 * float(sizes.max()))[counted]
    rows = rows[:, counted] / scale
    basis, values, _ = thin_svd(scale[:, None] * torch.from_numpy(tangents.vectors.toarray())[counted])
    known = basis[:, : _rank(values)]
    further = _kernel(torch.cat([rows, known.T]))
    rest = torch.linalg.vector_norm(further, dim=1)
    # Scales of running statistics count if gains and biases compensate them. They are no tangents of parameters.
    absorbed = tangents.statistics - symmetry.buffer_dimension
    missing = max(further.shape[1] - absorbed, 0)
    moved = sizes == 0
    moved[counted] |= rest > 1e-6
    parts = dict(network.named_parameters())
    counts = [part.numel() for part in parts.values()]
    pieces = zip(parts.items(), torch.split(moved, counts), strict=True)
    masks = {name: mask.view(part.shape) for (name, part), mask in pieces}
    of = torch.repeat_interleave(torch.tensor(counts))[counted]
    return Excess(
        missing,
        nullity=tangents.rank + further.shape[1],
        whole=int((~counted).sum()) + known.shape[1] + further.shape[1],
        read=sizes > 0,
        moved=masks,
        names=functools.partial(_names, parts, of, further, known, rest, absorbed),
    )


def _kernel(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of a matrix's kernel, by inverse iteration. Shape (columns, dimension)."""
    triangle = torch.linalg.qr(rows, mode="r").R
    count = triangle.shape[1]
    generator = torch.Generator().manual_seed(0)
    along = torch.randn(count, 1, generator=generator, dtype=rows.dtype)
    for _ in range(_POWERS):
        along = F.normalize(triangle.T @ (triangle @ along), dim=0)
    largest = float(torch.linalg.vector_norm(triangle @ along))
    # Few directions show that the kernel is trivial. With a shift, none of its vectors is lost in rounding.
    width, shifted, shift = 2, False, torch.full((count,), 1e-14 * largest, dtype=rows.dtype)
    solved = triangle + torch.diag(shift * (triangle.diagonal().abs() < shift))
    while True:
        width = min(width, count)
        found = torch.randn(count, width, generator=generator, dtype=rows.dtype)
        for _ in range(3):
            found = torch.linalg.solve_triangular(solved.T, found, upper=False)
            found = torch.linalg.qr(torch.linalg.solve_triangular(solved, found, upper=True)).Q
        _, values, right = thin_svd(triangle @ found)
        zero = values < _ZERO * largest
        if not zero.any() or (shifted and (width == count or not zero.all())):
            kernel: Tensor = found @ right.T[:, zero]
            return kernel
        if not shifted:
            solved, shifted = torch.linalg.qr(torch.cat([triangle, torch.diag(10 * shift)]), mode="r").R, True
        width *= 4


def _names(
    parts: Mapping[str, Tensor], of: Tensor, further: Tensor, known: Tensor, rest: Tensor, absorbed: int
) -> list[str]:
    """Return a small set of parameters such that directions that move only these complete the kernel.

    Args:
        parts: All parameters.
        of: Index of each entry's parameter. Shape (entries,).
        further: Orthonormal basis of the kernel's part outside the tangent space. Shape (entries, dimension).
        known: Orthonormal basis of the tangent space. Shape (entries, known).
        rest: Size of the movement of each entry by directions outside the tangent space. Shape (entries,).
        absorbed: Number of directions of biases and gains that may be missing, as they compensate statistics.
    """
    kernel = torch.cat([known, further], 1)
    moves = torch.zeros(len(parts), dtype=torch.float64).index_add_(0, of, rest.square())
    matrices = [part.ndim > 1 for part in parts.values()]
    kept = torch.ones(len(parts), dtype=torch.bool)
    for number in sorted(range(len(parts)), key=lambda n: (absorbed > 0 and matrices[n], float(moves[n]))):
        kept[number] = False
        outside = kernel[~kept[of]]
        # Directions that move nothing here, together with the known ones, have this codimension in the kernel.
        kept[number] = _rank_of(outside) - _rank_of(outside[:, : known.shape[1]]) > absorbed
    return [name for name, keep in zip(parts, kept.tolist(), strict=True) if keep]


def _rank_of(rows: Tensor) -> int:
    """Return the rank of a part of a matrix with orthonormal columns."""
    product = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
    return int((torch.linalg.eigvalsh(product) > 1e-12).sum())
