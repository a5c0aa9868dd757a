"""Rounding and pruning of weights, as objectives simulate them and as networks hold them."""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_sym._checks import check_integers, check_numbers, check_words, is_batch, not_finite
from lightning_sym._distributed import fitting, inputs_for
from lightning_sym._text import unknown
from lightning_sym.networks.modes import evaluating, twice_differentiable
from lightning_sym.orbit.objective import check_no_targets
from lightning_sym.orbit.view import call_of
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import copied

Granularity = Literal["tensor", "channel"]
Scope = Literal["tensor", "global"]

# Linear maps: the places of their input and of their weight among the arguments, and the input's axis of features.
_LINEAR = {
    functional.linear: (0, 1, -1),
    torch.addmm: (1, 2, -1),
    torch.conv1d: (0, 1, -2),
    torch.conv2d: (0, 1, -3),
    torch.conv3d: (0, 1, -4),
    torch.conv_transpose1d: (0, 1, -2),
    torch.conv_transpose2d: (0, 1, -3),
    torch.conv_transpose3d: (0, 1, -4),
}
_NOT_FINITE = "inputs of a linear map of the network are not finite on the data; look for NaN and infinity in both."
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def round_to_nearest(
    network: nn.Module,
    bits: int,
    granularity: Granularity = "tensor",
    *,
    activations: int | None = None,
    data: Any = None,
) -> nn.Module:
    """Round the matrices and kernels of a network to integers of few bits, times a step.

    Rounding is symmetric: the integers run from -(2^(bits-1) - 1) to 2^(bits-1) - 1, and the weight of largest
    magnitude in a tensor (or channel) has the last of these. Vectors (biases, gains) stay. Weights remain
    floating-point numbers.

    Args:
        network: Not changed.
        bits: Number of bits of a weight, >= 2.
        granularity: Whether each tensor has one range, or each output channel its own.
        activations: Number of bits of the inputs of linear maps and convolutions, >= 2, with one range for each; None
            does not round them. Hooks of the network round them in each call.
        data: One batch, or an iterable of batches, as :func:`minimize_on_orbit` takes them: the ranges of activations
            are the largest values on these, and larger ones are clipped. None: each call of the network has its own
            ranges.

    Returns:
        A changed copy.

    Raises:
        ValueError: If the number of bits is below 2, the granularity is unknown, or the data are empty.

    Example:
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> len(round_to_nearest(network, bits=3)[0].weight.unique()) <= 7
        True
    """
    check_rounding(bits, granularity, activations)
    result = copied(network)
    axes = matrices_of(result)
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if name in axes:
                parameter.copy_(rounded(parameter.double(), bits, axes[name] if granularity == "channel" else None))
    return result if activations is None else round_inputs(result, activations, data)


def round_inputs(network: nn.Module, bits: int, data: Any = None) -> nn.Module:
    """Round the inputs of a network's linear maps and convolutions in each call, by hooks.

    Args:
        network: Changed in place.
        bits: Number of bits, >= 2.
        data: See :func:`round_to_nearest`.

    Returns:
        The network.
    """
    hooks = _Hooks(bits, None if data is None else _ranges(network, bits, data))
    network.register_forward_pre_hook(hooks.before)
    network.register_forward_hook(hooks.after, always_call=True)
    return network


def prune_by_magnitude(
    network: nn.Module, fraction: float, *, scope: Scope = "tensor", keep: Collection[str] = ()
) -> nn.Module:
    """Set the smallest weights of a network's matrices and kernels to 0.

    Args:
        network: Not changed.
        fraction: Part of the weights that becomes 0, in [0, 1).
        scope: Whether this is the part of each tensor, or of all together.
        keep: Names of parameters that stay.

    Returns:
        A changed copy. Vectors (biases, gains) stay.

    Raises:
        ValueError: If the fraction is outside [0, 1), the scope is unknown, or there is no such matrix to keep.

    Example:
        >>> pruned = prune_by_magnitude(nn.Linear(10, 10), 0.7)
        >>> int((pruned.weight == 0).sum())
        70
    """
    check_numbers("in [0, 1)", fraction=fraction)
    check_words(("scope", scope, ("tensor", "global")))
    result = copied(network)
    axes = pruned_matrices(result, keep)
    own = {name: parameter.detach() for name, parameter in result.named_parameters() if name in axes}
    if scope == "global" and own:
        whole = kept(torch.cat([weight.abs().double().reshape(-1) for weight in own.values()]), fraction)
        masks = torch.split(whole, [weight.numel() for weight in own.values()])
    else:
        masks = tuple(kept(weight, fraction) for weight in own.values())
    for weight, mask in zip(own.values(), masks, strict=True):
        weight.mul_(mask.view(weight.shape))
    return result


def check_rounding(bits: object, granularity: object, activations: object) -> None:
    """Check the arguments of a rounding.

    Raises:
        ValueError: If a number of bits is below 2, or the granularity is unknown.
    """
    check_integers(2, bits=bits)
    check_words(("granularity", granularity, ("tensor", "channel")))
    if activations is not None:
        check_integers(2, activations=activations)


def matrices_of(network: nn.Module) -> dict[str, int]:
    """Return the names of a network's matrices and kernels, each with the axis of its output channels.

    A floating parameter counts if at least two of its axes are longer than 1; embeddings are among them. The axis is
    the first, or the second of transposed convolutions and of the layers ``Conv1D`` of GPT-2.
    """
    second = {
        id(module.weight)
        for module in network.modules()
        if isinstance(module, _TRANSPOSED) or (type(module).__name__ == "Conv1D" and hasattr(module, "weight"))
    }
    if broken := not_finite(dict(network.named_parameters())):
        raise ValueError(f"{broken[0]} holds values that are not finite; expected a network with finite weights.")
    return {
        name: int(id(own) in second)
        for name, own in network.named_parameters()
        if own.is_floating_point() and sum(size > 1 for size in own.shape) > 1
    }


def pruned_matrices(network: nn.Module, keep: Collection[str]) -> dict[str, int]:
    """Return :func:`matrices_of` without some.

    Raises:
        ValueError: If one of these is not among them.
    """
    axes = matrices_of(network)
    if missing := [name for name in keep if name not in axes]:
        raise ValueError(unknown("matrix to keep", missing[0], axes))
    return {name: axis for name, axis in axes.items() if name not in keep}


def rounded(weight: Tensor, bits: int, axis: int | None = None, largest: Tensor | None = None) -> Tensor:
    """Round numbers to the nearest of few bits, with a straight-through derivative.

    Rounding itself counts as the identity (Bengio et al. 2013, arXiv 1308.3432), and the step is differentiated as in
    LSQ (Esser et al. 2020, arXiv 1902.08153), through the largest number.

    Args:
        weight: Any shape.
        bits: Number of bits, >= 2.
        axis: Each entry of this axis has its own range; None for one range.
        largest: The range; larger numbers are clipped. None: the largest magnitude.

    Returns:
        Multiples of the step, in the same shape and dtype.
    """
    if largest is None:
        axes = [other for other in range(weight.ndim) if other != axis]
        largest = weight.abs().amax(axes, keepdim=True) if axes else weight.abs()
    else:
        weight = weight.clamp(-largest, largest)
    step = largest / (2 ** (bits - 1) - 1)
    step = torch.where(step > 0, step, 1.0)
    with torch.no_grad():
        ratio = weight / step
        whole = ratio.round()
        result, rest = whole * step, whole - ratio
    # The value is exactly that of the result: the differences are 0 and bear the derivative.
    return result + (weight - weight.detach()) + rest * (step - step.detach())


def kept(weight: Tensor, fraction: float) -> Tensor:
    """Return a mask of the weights that pruning by magnitude keeps; of the same shape, bool."""
    sizes = weight.detach().abs().reshape(-1)
    mask = torch.ones_like(sizes, dtype=torch.bool)
    mask[sizes.argsort(stable=True)[: round(fraction * len(sizes))]] = False  # the first of equal ones go
    return mask.view(weight.shape)


def batches_in(data: Any, *, inputs_only: bool = True) -> list[Any]:
    """Return the batches of data: of one batch, or of an iterable of them.

    Args:
        data: See :func:`round_to_nearest`.
        inputs_only: Whether targets are no batches.

    Raises:
        ValueError: If there is none, one is empty, or two look like inputs and their targets.
    """
    if data is None:
        raise ValueError("data are missing; pass a batch of inputs, or an iterable of batches.")
    batches = [data] if isinstance(data, (Tensor, Call, Mapping, tuple)) else list(data)
    if not batches:
        raise ValueError("data hold no batch; expected at least one.")
    if any(is_batch(own) and len(own) == 0 for own in tree_leaves(batches)):
        raise ValueError("data hold a batch without samples; leave it out.")
    if inputs_only:
        check_no_targets(batches)
    return batches


See: TypeAlias = Callable[[Tensor, Tensor | None, int, Callable[..., Any]], Tensor]


class InputMode(TorchFunctionMode):
    """Shows the inputs of linear maps and convolutions to a function, and lets it replace them.

    Layers ``nn.MultiheadAttention`` show queries, keys and values, but not the inputs of their last map.

    Args:
        see: Maps the input, the weight, the input's axis of features (from the end), and the map as a function of its
            input to the new input. The function of a convolution takes another kernel as well, and then omits the bias.
            The weight is None for ``nn.MultiheadAttention``.
    """

    def __init__(self, see: See) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        given, keywords = list(args), dict(kwargs or {})
        if function is functional.multi_head_attention_forward:
            given[:3] = [self._see(own, None, -1, lambda *given: None) for own in given[:3]]
        elif function in _LINEAR:
            at, weight, axis = _LINEAR[function]
            names = ("input", "mat1")
            where = next((name for name in names if name in keywords), None)
            holder: Any = given if where is None else keywords
            place: Any = at if where is None else where
            other = given[weight] if len(given) > weight else keywords.get("weight", keywords.get("mat2"))

            def again(inputs: Tensor, kernel: Tensor | None = None) -> Any:
                changed = {**dict(enumerate(given)), **keywords, place: inputs}
                if kernel is not None:
                    changed |= {1: kernel, 2: None} if len(given) > 1 else {"weight": kernel}
                    changed["bias"] = None
                rest = {name: changed[name] for name in keywords}
                return function(*(changed[number] for number in range(len(given))), **rest)

            holder[place] = self._see(holder[place], other, axis, again)
        return function(*given, **keywords)


class RoundedInputs(InputMode):
    """Rounds the inputs of linear maps and convolutions, with one range for each call of one of these.

    Args:
        bits: Number of bits, >= 2.
        ranges: The ranges in the order of the calls; None for the largest value of each input.

    Attributes:
        seen: The ranges of the calls.
    """

    def __init__(self, bits: int, ranges: list[Tensor] | None = None) -> None:
        super().__init__(self._rounded)
        self.bits, self.ranges, self.seen = bits, ranges, list[Tensor]()

    def _rounded(self, inputs: Tensor, weight: Tensor | None, axis: int, again: Callable[..., Any]) -> Tensor:
        if not inputs.is_floating_point():
            return inputs
        number = len(self.seen)
        self.seen.append(inputs.detach().abs().amax())
        if self.ranges is None:
            return rounded(inputs, self.bits)
        if number >= len(self.ranges):
            raise ValueError(
                f"the network calls more linear maps than the {len(self.ranges)} of the data that gave the ranges of "
                "its activations; pass data of the same kind, or none."
            )
        return rounded(inputs, self.bits, largest=self.ranges[number].to(inputs))


class _Hooks:
    """Rounds activations within the calls of a network.

    Args:
        bits: Number of bits.
        ranges: See :class:`RoundedInputs`.
    """

    def __init__(self, bits: int, ranges: list[Tensor] | None) -> None:
        self.bits, self.ranges, self._open = bits, ranges, list[ExitStack]()

    def before(self, network: nn.Module, arguments: Any) -> None:
        """Begin to round."""
        self._open.append(ExitStack())
        self._open[-1].enter_context(RoundedInputs(self.bits, self.ranges))

    def after(self, network: nn.Module, arguments: Any, output: Any) -> None:
        """End to round; also after an error."""
        if self._open:
            self._open.pop().close()


def _ranges(network: nn.Module, bits: int, data: Any) -> list[Tensor]:
    """Return the largest input of each linear map on data."""
    found: list[Tensor] = []
    with torch.no_grad(), evaluating(network), twice_differentiable():
        for batch in inputs_for(network, batches_in(data)):
            with RoundedInputs(bits) as mode:
                _run(network, batch)
            if not all(own.isfinite() for own in mode.seen):
                raise ValueError(_NOT_FINITE)
            if found and len(found) != len(mode.seen):
                raise ValueError("the network calls other linear maps on each batch; expected the same ones.")
            found = [torch.maximum(one, two) for one, two in zip(found or mode.seen, mode.seen, strict=True)]
    return found


def _run(network: nn.Module, batch: Any) -> None:
    """Run a network on a batch."""
    call = call_of(batch)
    with fitting(*call.positional, *call.keywords.values()):
        call.run(network)


def largest_inputs(network: nn.Module, data: Iterable[Any]) -> dict[str, Tensor]:
    """Return the largest magnitude of each input feature of linear maps and convolutions on data.

    Args:
        network: Not changed; it runs in evaluation mode.
        data: Batches.

    Returns:
        By the name of the weight; each of shape (features,).
    """
    found: dict[str, Tensor] = {}

    def take(name: str, sizes: Tensor) -> None:
        own = sizes.amax(0)
        found[name] = own if name not in found else torch.maximum(found[name], own)

    _with_inputs(network, data, take)
    return found


def mean_inputs(network: nn.Module, data: Iterable[Any]) -> dict[str, Tensor]:
    """Return the mean magnitude of each input feature; see :func:`largest_inputs`."""
    totals: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def take(name: str, sizes: Tensor) -> None:
        totals[name] = sizes.sum(0) + totals.get(name, 0)
        counts[name] = len(sizes) + counts.get(name, 0)

    _with_inputs(network, data, take)
    return {name: own / counts[name] for name, own in totals.items()}


def show_inputs(network: nn.Module, data: Iterable[Any], see: See, *, gradients: bool = False) -> None:
    """Run a network in evaluation mode on data, and show the inputs of its maps to a function.

    Args:
        network: Not changed.
        data: Batches.
        see: See :class:`InputMode`.
        gradients: Whether the function needs them.

    Raises:
        ValueError: If the network does not run on the data, or an input is not finite.
    """

    def finite(inputs: Tensor, weight: Tensor | None, axis: int, again: Callable[..., Any]) -> Tensor:
        if inputs.is_floating_point() and not inputs.isfinite().all():
            raise ValueError(_NOT_FINITE)
        return see(inputs, weight, axis, again)

    with torch.set_grad_enabled(gradients), evaluating(network), twice_differentiable():
        for batch in data:
            with InputMode(finite):
                _run(network, batch)


def _with_inputs(network: nn.Module, data: Iterable[Any], take: Callable[[str, Tensor], None]) -> None:
    """Call a function with the name of each weight that is used, and the magnitudes of its inputs by feature."""
    names = {own.data_ptr(): name for name, own in network.named_parameters()}

    def see(inputs: Tensor, weight: Tensor | None, axis: int, again: Callable[..., Any]) -> Tensor:
        name = None if weight is None else names.get(weight.data_ptr())
        if name is not None:
            take(name, inputs.abs().movedim(axis, -1).flatten(0, -2))
        return inputs

    show_inputs(network, data, see)


def squared_inputs(network: nn.Module, data: Iterable[Any]) -> dict[str, Tensor]:
    """Return, for each weight, the sum of squares of the inputs that it multiplies on data.

    That is the derivative by the weights of the sum of all outputs of its map at squared inputs, for kernels, too.

    Args:
        network: Not changed; it runs in evaluation mode.
        data: Batches.

    Returns:
        By the name of the weight, and of its shape; float64.
    """
    exact = copied(network).requires_grad_(True)
    parameters = dict(exact.named_parameters())
    found: dict[str, Tensor] = {}

    def see(inputs: Tensor, weight: Tensor | None, axis: int, again: Callable[..., Any]) -> Tensor:
        if weight is not None and weight.requires_grad:
            total = again(inputs.detach().square()).sum()
            slopes = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, retain_graph=True)
            for (name, own), slope in zip(parameters.items(), slopes, strict=True):
                if slope is not None and own.ndim > 1:
                    found[name] = found.get(name, 0) + slope.double()
        return inputs.detach()

    show_inputs(exact, data, see, gradients=True)
    return found
