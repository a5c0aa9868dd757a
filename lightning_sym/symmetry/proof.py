"""The proof that a group is a network's symmetry: random elements act on it, and its outputs must not change."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sym._checks import must_be_finite
from lightning_sym._distributed import on_device_of
from lightning_sym.networks.modes import attributes_kept, containers_kept, evaluating
from lightning_sym.symmetry.charts import charted
from lightning_sym.symmetry.double_precision import in_double_precision
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Draw, Factors
from lightning_sym.symmetry.solving.structure import Structure
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import (
    constant_names,
    copied,
    first_names,
    share_memory,
    state_tensors,
)

# The least tolerance; a mistake in a rule changes outputs by 1e-2 and more.
_EXACT = 1e-10
# Between these are the root mean squares of random weights: a network of smaller or larger ones would be linear to all
# digits, or overflow.
_USUAL = (1e-2, 1e2)
# Larger changes of outputs are no rounding of networks in single precision, a thousand times as large as expected.
_ROUNDING = 0.1
# So many units of a stream are rotated at once: more cost as much as running the network, and show no more.
_ROTATED = 64
# So many numbers are drawn for a large tensor, and repeated.
_DRAWN = 65521


class Group(Protocol):
    """Interface of a symmetry for the proof: random elements, and their action on a network."""

    structure: Structure
    factors: Factors

    def drawn(self, draw: Draw) -> Element:
        """Draw a random element."""

    def _moved(self, element: Element, network: nn.Module) -> nn.Module: ...

    def _weights(self, element: Element, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]: ...


def tolerance_of(precision: torch.dtype) -> float:
    """Return the change of the output that rounding may cause in a network that computes in some precision.

    1e-10 in double precision; in lower ones a thousand roundings (1.2e-4 in single precision), at most a tenth.
    """
    return min(max(_EXACT, 1000 * torch.finfo(precision).eps), 0.1)


class LowestPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the lowest floating-point precision of the results of operations.

    Attributes:
        dtype: That precision.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = torch.float64

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            return result
        came = [_real(leaf.dtype) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if torch.float64 in came:  # results made of constants only are the same before and after
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor) and (dtype := _real(leaf.dtype)).is_floating_point:
                    self.dtype = max(self.dtype, dtype, key=lambda d: torch.finfo(d).eps)
        return result


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def double(inputs: Any) -> Any:
    """Return floating tensors in float64."""
    return pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)


# Turns tensors that come one by one into those that copies in float64 hold.
Place: TypeAlias = Callable[[Iterable[tuple[str, Tensor]]], dict[str, Tensor]]
_PLACE: ContextVar[Place] = ContextVar("place", default=dict)


@contextlib.contextmanager
def double_copies(place: Place) -> Iterator[None]:
    """Let copies in float64 hold their parameters and buffers elsewhere than in memory.

    Args:
        place: Called with these, by name, one after the other; returns them where they shall be.
    """
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


def double_copy(network: nn.Module, names: Mapping[str, str] | None = None) -> nn.Module:
    """Return a copy that computes in float64, without a copy in between, including plain attributes of modules.

    Args:
        network: Not changed.
        names: For each place the first name of the tensor that it is to hold. By default as in the network.
    """
    kept = [value for module in network.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    made: dict[int, Any] = {
        id(tensor): tensor.detach().to(torch.float64, copy=True) for tensor in kept if tensor.is_floating_point()
    }
    states = {
        name: tensor
        for name, tensor in state_tensors(network).items()
        if tensor.is_floating_point() and type(tensor) in (nn.Parameter, Tensor)
    }
    exact = _PLACE.get()((name, tensor.detach().to(torch.float64, copy=True)) for name, tensor in states.items())
    for name, tensor in states.items():
        keeps = type(tensor) is nn.Parameter
        made[id(tensor)] = nn.Parameter(exact[name], tensor.requires_grad) if keeps else exact[name]
    exactly = in_double_precision(copied(network, made).double())
    return share_memory(exactly, first_names(network) if names is None else names)


def outputs_of(network: nn.Module, call: Call) -> list[Tensor]:
    """Return every output tensor of a network that counts."""
    return [tensor.detach() for tensor in call.outputs_of(network)]


def _all_outputs(
    network: nn.Module, batches: Sequence[Call], lowest: LowestPrecision | None = None
) -> list[list[Tensor]]:
    """Return the outputs for several batches.

    Args:
        network: The network.
        batches: Its inputs.
        lowest: Records the lowest precision, unless the network has operations that do not run while others watch
            (torch.cond).

    Raises:
        ValueError: If the network does not run.
    """
    if lowest is not None:
        with contextlib.suppress(ValueError), lowest:
            return _all_outputs(network, batches)
    try:
        with containers_kept(network):  # weights that modules compute and keep are recomputed for other weights
            return [outputs_of(network, batch) for batch in batches]
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"a copy of the network in float64 does not run ({type(error).__name__}: {reason[:200]}), so that nothing "
            "can be tested; expected an example whose values the network takes (ids below its vocabulary size), and a "
            "network that computes in the precision of its weights and inputs; check=False leaves the test out"
        ) from error


def compute_the_same(calls: Sequence[Call], a: nn.Module, b: nn.Module) -> bool:
    """Return whether two networks agree on some inputs, up to the rounding of their weights.

    Networks of one orbit do, so that networks that do not are of two. In float64 and evaluation mode.

    Args:
        calls: The inputs. Without any, and where copies in float64 do not run, nothing is the same.
        a: A network. Not changed.
        b: Another one of the same architecture; it may be on another device.
    """
    dtypes = [own.dtype for network in (a, b) for own in network.parameters() if own.is_floating_point()]
    tolerance = tolerance_of(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64))

    def changed(networks: Iterable[nn.Module], calls: Sequence[Call]) -> float:
        """Return the largest change from one network to the other; nan if they do not run, or have no outputs."""
        found = []
        for network in networks:
            with torch.no_grad(), evaluating(network), attributes_kept(network), contextlib.suppress(ValueError):
                outputs = itertools.chain(*_all_outputs(network, on_device_of(network, calls)))
                found.append([tensor.cpu() for tensor in outputs])
        return change(found[0], found[1]) if len(found) == 2 and found[0] else math.nan

    # Changes beyond rounding in the networks' precision need no copies.
    if tolerance < _ROUNDING and math.inf > changed((a, b), list(calls)) > _ROUNDING:
        return False
    return changed(map(double_copy, (a, b)), double(list(calls))) <= tolerance


def noisy(inputs: Any, generator: torch.Generator) -> Any:
    """Return floating inputs with noise of the same size; integers (tokens) and masks are kept."""

    def add(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        finite = tensor[torch.isfinite(tensor)]
        size = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
        drawn = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        return tensor + (size or 1.0) * drawn.to(tensor.device)

    return pytree.tree_map_only(Tensor, add, inputs)


def cropped(inputs: Any, size: int = 64) -> Any:
    """Return inputs with images of more pixels on a side than `size` cut down to these; other inputs are kept."""

    def cut(tensor: Tensor) -> Tensor:
        images = tensor.is_floating_point() and tensor.ndim == 4 and min(tensor.shape[2:]) > size
        return tensor[..., :size, :size].contiguous() if images else tensor

    return pytree.tree_map_only(Tensor, cut, inputs)


def runs(network: nn.Module, calls: Iterable[Call]) -> bool:
    """Return whether a network takes some inputs."""
    try:
        with containers_kept(network):
            for call in calls:
                outputs_of(network, call)
    except Exception:
        return False
    return True


def batches_of(network: nn.Module, inputs: Call, generator: torch.Generator, *, thrifty: bool = False) -> list[Call]:
    """Return inputs to test a network on: the example's first samples, and others with noise around the first.

    One sample may be a special point: zeros, padding, dead units. The example is alone if noise cannot be added.

    Args:
        network: Decides, by an error, whether a batch of another size than the example's can be had.
        inputs: The example, in float64.
        generator: Where the noise comes from.
        thrifty: Whether to take as few samples as can be, untried: one, and another one with noise around it.
    """
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    if all(t.ndim for t in tensors) and len({len(t) for t in tensors}) == 1:
        few = pytree.tree_map_only(Tensor, lambda t: t[:1] if thrifty else t[:2], inputs)
        around = noisy(pytree.tree_map_only(Tensor, lambda t: t[:1], inputs), generator)
        leaves, structure = pytree.tree_flatten(few)
        both = [
            torch.cat([one, two]) if isinstance(one, Tensor) else one
            for one, two in zip(leaves, pytree.tree_leaves(around), strict=True)
        ]
        if thrifty:
            return [few, around]  # the first run shows whether it can be had
        batches = [pytree.tree_unflatten(both, structure)]
        try:
            with containers_kept(network):
                outputs_of(network, batches[0])
        except Exception:
            pass
        else:
            return batches
    around = noisy(inputs, generator)
    return [inputs, around] if runs(network, [around]) else [inputs]  # some numbers may be places in a table


def change(
    before: Sequence[Tensor], after: Sequence[Tensor], rounded: Sequence[Tensor] | None = None, rounding: float = 1.0
) -> float:
    """Return the largest change of an element of some outputs, relative to its own and to a typical magnitude.

    Each output is compared separately. Typical is the median over the elements that are not bitwise equal (a mask of
    the smallest number there is, or of infinities, does not count). It is raised to the rounding of the weights, as a
    difference of equal numbers is known no better. If there is no finite number before, nothing is compared, but
    finite elements must stay finite.

    Args:
        before: The outputs.
        after: With the weights that an element changed.
        rounded: With these rounded otherwise.
        rounding: By how much.
    """
    worst = 0.0
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if old.shape != new.shape:
            return math.inf
        if not old.is_floating_point():
            worst = worst if torch.equal(old, new) else math.inf
            continue
        finite = torch.isfinite(old)
        if not bool(torch.isfinite(new[finite]).all()) or bool(torch.isfinite(new[torch.isinf(old)]).any()):
            return math.inf
        changed = finite & (old != new)
        if not bool(changed.any()):
            continue
        sizes, apart = old[changed].double().abs(), (new - old)[changed].double().abs()
        medians = [float(sizes[sizes > 0].median())] if bool((sizes > 0).any()) else []
        if rounded is not None:
            loose = ((rounded[index] - new)[changed].double() / rounding).abs().nan_to_num(0.0, 0.0, 0.0)
            medians += [float(loose[loose > 0].median())] if bool((loose > 0).any()) else []
        worst = max(worst, float((apart / (sizes + max(medians, default=1.0))).max()))
    return worst


def moving_element(
    symmetry: Group, network: nn.Module, generator: torch.Generator, scale: float, before: Element | None
) -> Element:
    """Draw an element that moves every unit of a network that can move.

    Args:
        symmetry: The group.
        network: On which it is to act.
        generator: Where randomness comes from.
        scale: Standard deviation of the logarithms of the magnitudes.
        before: The element before it; each sign is changed by one of the two.
    """
    closed = symmetry.factors.closed(charted(state_tensors(network), symmetry.structure.charts))
    element = symmetry.drawn(Draw(generator, scale, cycles=True, most=_ROTATED, closed=closed))
    if before is None:
        return element
    pairs = ((own, element.parts[own.name], before.parts[own.name]) for own in symmetry.factors)
    return element.replaced(**{own.name: own.unlike(part, other) for own, part, other in pairs})


def informative(outputs: Iterable[Tensor]) -> bool:
    """Return whether outputs hold anything that can be compared."""
    return any(bool(torch.isfinite(o).any()) if o.is_floating_point() else o.numel() > 0 for o in outputs)


def largest_change(
    symmetry: Group,
    network: nn.Module,
    batches: Sequence[Sequence[Call]],
    *,
    own: Mapping[str, Tensor],
    samples: int,
    scale: float,
    generator: torch.Generator,
    noise: Sequence[float] = (0.0,),
    tolerance: float | None = None,
) -> tuple[float, torch.dtype]:
    """Let random elements act on a network, and return the largest change of an output.

    Every element moves all units that can move, and two have no sign in common. Each time the changed weights go
    through a state dict into a network that has not been changed: tensors outside of the state dict cannot have moved.

    Args:
        symmetry: The group.
        network: In float64 and evaluation mode; its weights are replaced.
        batches: Inputs for the first, second, ... element, then again from the first.
        own: The state dict to restore if noise makes the network's outputs infinite.
        samples: How many elements are tried.
        scale: Standard deviation of the logarithms of their magnitudes.
        generator: Where randomness comes from.
        noise: For each element in the same way: how much noise is added to the weights before, relative to their root
            mean square; infinity for weights that are nothing but noise.
        tolerance: Larger changes are examined more closely; by default from the network's precision.

    Returns:
        The change, and the lowest precision of the network's operations.

    Raises:
        ValueError: If no output is finite, or the network is not deterministic.
    """
    worst, seen, precision = 0.0, False, torch.float64
    element: Element | None = None
    for sample in range(samples):
        these, amount = batches[sample % len(batches)], noise[sample % len(noise)]
        if sample and math.isinf(amount):  # noise as large as the network's weights; elements made of it may be larger
            network.load_state_dict(own)
        lowest = None if sample else LowestPrecision()
        before = _perturbed_outputs(symmetry, network, these, amount, generator, own, lowest)
        precision = lowest.dtype if lowest is not None else precision
        seen = seen or any(informative(outputs) for outputs in before)
        element = moving_element(symmetry, network, generator, scale, element)
        worst = max(worst, change_by(symmetry, element, network, these, before, precision, generator, tolerance))
    if not seen:
        raise ValueError(
            "no output of the network is finite on the example, so nothing can be tested; expected an example input "
            "with finite outputs"
        )
    return worst, precision


def change_by(
    symmetry: Group,
    element: Element,
    network: nn.Module,
    batches: Sequence[Call],
    before: Sequence[list[Tensor]],
    precision: torch.dtype,
    generator: torch.Generator,
    tolerance: float | None = None,
) -> float:
    """Let an element act on a network, and return the largest change of an output.

    Args:
        symmetry: The group.
        element: The element.
        network: In float64 and evaluation mode; its weights are replaced.
        batches: Its inputs.
        before: Its outputs before.
        precision: The lowest precision of its operations.
        generator: Where randomness comes from.
        tolerance: Larger changes are examined more closely; by default from the precision.
    """
    _move(symmetry, element, network)
    after = _all_outputs(network, batches)
    found = max(change(old, new) for old, new in zip(before, after, strict=True))
    if found > (tolerance if tolerance is not None else tolerance_of(precision)):
        found = _looked_at_closely(network, batches, before, after, precision, generator)
    return found


def change_between(
    one: nn.Module, two: nn.Module, batches: Sequence[Call], generator: torch.Generator
) -> tuple[float, torch.dtype]:
    """Return the largest change of an output from one network to another, and the precision of the first.

    Args:
        one: In float64 and evaluation mode.
        two: As `one`, with other weights.
        batches: Their inputs.
        generator: Where randomness comes from.
    """
    lowest = LowestPrecision()
    before = _all_outputs(one, batches, lowest)
    after = _all_outputs(two, batches)
    found = max(change(old, new) for old, new in zip(before, after, strict=True))
    if found > tolerance_of(lowest.dtype):
        found = _looked_at_closely(two, batches, before, after, lowest.dtype, generator)
    return found, lowest.dtype


def _move(symmetry: Group, element: Element, network: nn.Module) -> None:
    """Let an element act on a network through its state dict; all other tensors are kept.

    Tensor by tensor, unless the state dict holds other things than the network's own tensors.
    """
    tensors = state_tensors(network)
    state = network.state_dict(keep_vars=True)
    held = {id(tensor) for tensor in state.values()}
    if all(id(tensors[name]) in held for name in symmetry.structure.moving):
        for name, tensor in symmetry._weights(element, tensors):
            tensors[name].copy_(tensor)
        network.load_state_dict(state)
    else:
        network.load_state_dict(symmetry._moved(element, network).state_dict())


def _perturbed_outputs(
    symmetry: Group,
    network: nn.Module,
    batches: Sequence[Call],
    amount: float,
    generator: torch.Generator,
    own: Mapping[str, Tensor],
    lowest: LowestPrecision | None,
) -> list[list[Tensor]]:
    """Add noise to the weights, and return the outputs: less of it, around their own, where they are not finite.

    Some networks need weights that are like their own (a positive one under a logarithm or a root).
    """
    if not amount:
        return _all_outputs(network, batches, lowest)
    usual: int | None = None  # number of finite outputs with the network's weights
    for less in (amount, *(least for least in (0.3, 0.03, 0.003, 0.0) if least < amount)):
        if less:
            perturb(symmetry, network, less, generator)
        outputs = _all_outputs(network, batches, lowest)
        if not less or _finite(outputs) == sum(t.numel() for found in outputs for t in found):
            break
        noisy_weights = _detached(network)
        network.load_state_dict(own)
        usual = usual if usual is not None else _finite(_all_outputs(network, batches))
        if _finite(outputs) >= usual:
            network.load_state_dict(noisy_weights)
            break
    return outputs


def _detached(network: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a network's weights and statistics."""
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def _finite(outputs: Iterable[Iterable[Tensor]]) -> int:
    return sum(int(t.isfinite().sum()) for found in outputs for t in found)


def _looked_at_closely(
    network: nn.Module,
    batches: Sequence[Call],
    before: Sequence[list[Tensor]],
    after: Sequence[list[Tensor]],
    precision: torch.dtype,
    generator: torch.Generator,
) -> float:
    """Return the change of the outputs, relative to that caused by other roundings of the weights."""
    again = _all_outputs(network, batches)
    for one, two in zip(itertools.chain(*after), itertools.chain(*again), strict=True):
        if not bool(((one == two) | (one != one) & (two != two)).all()):
            raise ValueError(
                "the outputs of the network change from run to run, even in evaluation mode, so nothing can be tested; "
                "expected a network that draws no random numbers then (check F.dropout without training=self.training)"
            )
    rounding = max(torch.finfo(precision).eps, 1e-14)
    least = math.inf
    for _ in range(4):  # pure rounding may by chance be the same for other roundings of the weights
        factors = {}
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape[-1:], dtype=tensor.dtype, generator=generator).to(tensor.device)
                factors[name] = 1 + rounding * drawn
                tensor.mul_(factors[name])
        rounded = _all_outputs(network, batches)
        found = max(change(*outputs, rounding) for outputs in zip(before, after, rounded, strict=True))
        least = min(least, found)
        if least <= tolerance_of(precision):
            break
        for name, tensor in network.state_dict().items():  # back, up to much less
            if name in factors:
                tensor.div_(factors[name])
    return least


def perturb(symmetry: Group, network: nn.Module, amount: float, generator: torch.Generator) -> None:
    """Add noise to weights and statistics, relative to their root mean square: values that happen to be special go.

    Args:
        symmetry: Says which buffers are running variances: these are multiplied.
        network: Changed.
        amount: How much; if infinite, values are replaced, and dead units come to life. Weights and statistics that
            are not finite are always replaced.
        generator: Where the noise comes from.
    """
    held = symmetry.structure.charts.held_in
    variances = {own for slot in symmetry.structure.slots if slot.kind == "variance" for own in held(slot.tensor)}
    gains = {own for factor in symmetry.factors for name in factor.gains for own in held(name)}
    constants, weights = constant_names(network), dict(network.named_parameters())
    pool = torch.randn(2 * _DRAWN, dtype=torch.float64, generator=generator)
    for name, tensor in state_tensors(network).items():
        if name in constants or not tensor.is_floating_point():
            continue  # constants of the architecture, and integers
        norm = float(torch.linalg.vector_norm(tensor))
        finite = math.isfinite(norm) or bool(torch.isfinite(tensor).all())
        if not finite and not must_be_finite(name, weights):
            continue
        # Drawing millions of numbers would take longer than everything else: large tensors get a few of the same ones.
        count = min(tensor.numel(), _DRAWN)
        begin = int(torch.randint(2 * _DRAWN - count + 1, (), generator=generator))
        drawn = pool[begin : begin + count].to(tensor)
        if math.isinf(amount) and name in gains:  # results of dividing by a number near 0 are less precise
            drawn = drawn.sign() * (drawn.abs() / 2).exp()
        size = norm / math.sqrt(max(tensor.numel(), 1)) or 0.1
        with torch.no_grad():
            for part, noise in _tiles(tensor, drawn):
                if name in variances:
                    if not finite or (math.isinf(amount) and not _USUAL[0] ** 2 <= size <= _USUAL[1] ** 2):
                        part.fill_(1.0)
                    part.mul_((min(amount, 0.3) * noise).exp())
                elif math.isinf(amount) or not finite:
                    part.copy_(noise * (min(max(size, _USUAL[0]), _USUAL[1]) if finite else 0.1))
                else:
                    part.add_(noise, alpha=amount * size)


def _tiles(tensor: Tensor, drawn: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the parts of a tensor that are changed in place, each with its numbers of a pattern that repeats."""
    if not tensor.is_contiguous():
        return [(tensor, drawn.repeat(-(-tensor.numel() // len(drawn)))[: tensor.numel()].reshape(tensor.shape))]
    flat = tensor.view(-1)
    if not len(flat):
        return []
    whole = len(flat) // len(drawn) * len(drawn)
    return [(flat[:whole].view(-1, len(drawn)), drawn), (flat[whole:], drawn[: len(flat) - whole])]
