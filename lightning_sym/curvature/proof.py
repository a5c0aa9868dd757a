"""Curvature proves itself: two checks of a network and its rules, on a few samples, before an engine relies on them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_sym._distributed import wide
from lightning_sym._random import generator
from lightning_sym.curvature.blocks import in_parameter_order
from lightning_sym.curvature.rules import Layers, Rule, full_name, gram, mean_products

# A prime, so that any mixing of a sample with its k-th neighbour, for any k, mixes one of the changed samples with an
# unchanged one; they are neither first nor last nor mirror images of each other.
_PROBES = 5
_CHANGED = slice(1, 3)


@dataclass(frozen=True)
class Pass:
    """The inputs and gradients of an engine for a few samples.

    Attributes:
        outputs: Outputs of the network. Shape ``[M, K]``.
        inputs: Input of each layer, by its name, in the order of the calls. Shape ``[rows, ...]``.
        gradients: At the outputs of the layers, as the rules will see them. Shape ``[rows, ...]``.
        parameters: Autograd's gradients of the network's parameters, by their full names.
    """

    outputs: Tensor
    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


class _RowsError(ValueError):
    """The rows of a layer's input cannot be those of the samples."""


# Takes inputs and, for a backward pass, a function from outputs to the pulled-back vectors.
See: TypeAlias = Callable[[Tensor, Callable[[Tensor], Tensor] | None], Pass]


def prove(network: nn.Module, layers: Layers, x: Tensor, see: See) -> None:
    """Check that the first axis of every layer is the samples, and that every rule is its layer.

    *Samples are the first axis.* Some of the samples are changed; in the input of every layer, and in the outputs, only
    their rows may change then, and only their rows may have gradients of their outputs. Two that are the same must be
    so everywhere. A layer has one row for each sample, or several that follow one another, as of tokens that are folded
    into the batch.

    *The rule is the layer.* Random gradients are set at the outputs of these samples. From the layer's input and the
    gradients at its output, a rule has to give autograd's gradient of every parameter, up to half of the digits of
    the precision. If a rule has a faster way to its factors, the results have to agree.

    Five samples are taken from all over the batch, the same ones several times where it has fewer, and two of them are
    changed: to another one, doubled but for whole numbers, or, of a single one, reversed. A network that does not take
    a batch of five is checked with the whole batch; if that is one sample, only the second check says something.

    Args:
        network: The network.
        layers: Its layers with curvature and their rules, by name.
        x: A batch of inputs, not empty. Shape ``[N, ...]``.
        see: The engine's passes: forward, and backward where it is given something to pull back.

    Raises:
        ValueError: If a check fails; the message names the module and a remedy.

    Note:
        Two forward passes and a backward pass of five samples. Nothing is drawn from the global generator. The check
        covers these weights and these samples: it does not see a path that is dead, or a branch that is not taken, for
        all of them.
    """
    probes = _probes(x)
    try:
        plain = see(probes.clone(), _cotangent)
    except Exception as error:
        # A network may be made for batches of one size.
        if isinstance(error, _RowsError) or len(probes) == len(x):
            raise
        probes = x
        plain = see(probes.clone(), _cotangent)
    if plain.outputs.isnan().any():
        return  # which the engine will say better; minus infinity may be a mask
    count = len(probes)
    for name, g in plain.gradients.items():
        check_rows(name, layers[name][0], g, count)
    changed = _check_samples(network, layers, probes, plain, see)
    for name, g in plain.gradients.items():
        if _strays(g, count):
            raise ValueError(
                f"Outputs of a sample depend on rows of other samples at the output of module {_label(name, layers)}: "
                "what comes after it mixes samples, or its first axis is not the samples; give it [N, ...], and treat "
                "every sample by itself behind it, or freeze its parameters with requires_grad_(False)."
            )
    _check_places(layers, probes, changed, see)
    with torch.no_grad():
        _check_rules(layers, plain, count)


def check_rows(name: str, module: nn.Module, x: Tensor, samples: int) -> None:
    """Raise unless the rows of a layer's input can be those of the samples.

    Args:
        name: Name of the layer.
        module: The layer.
        x: Its input, or a tensor at its output. Shape ``[rows, ...]``.
        samples: N.

    Raises:
        ValueError: If there is not the same number of rows, at least one, for each sample.
    """
    shape = x.shape
    if x.ndim and len(x) and len(x) % samples == 0:
        return
    second = " (it seems to be the second; transpose it)" if len(shape) > 1 and shape[1] == samples else ""
    some = (
        ""
        if second
        else "if it sees some samples or tokens only (experts with routing, x[mask]), give it all of them and multiply "
        "its output by 0 where it takes no part, "
    )
    raise _RowsError(
        f"Module {name!r} ({type(module).__name__}) has an input or output of shape {list(shape)} for {samples} "
        f"samples, whose first axis cannot be the samples{second}; give it [N, ...], or [N * T, ...] with the T rows "
        f"of a sample one after the other, {some}or freeze its parameters with requires_grad_(False)."
    )


# ---- probes


def _probes(x: Tensor) -> Tensor:
    """Return a few samples from all over a batch, the same ones several times if there are fewer."""
    count = len(x)
    at = [i * count // _PROBES if count >= _PROBES else i % count for i in range(_PROBES)]
    return x[torch.tensor(at, device=x.device)]


def _own(x: Tensor, samples: int) -> slice:
    """Return a mask of the rows of changed samples."""
    chosen = _CHANGED if samples > 2 else slice(0, 1)
    rows = x.shape[0] // samples
    return slice(rows * chosen.start, rows * chosen.stop)


def _others(x: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Return the rows of the others: those before and those behind."""
    own = _own(x, samples)
    return x[: own.start], x[own.stop :]


def _changed(probes: Tensor, doubled: bool) -> Tensor:
    """Return the probes with some replaced by the same other one: a valid sample, and another mean.

    It is doubled, which also changes a maximum that all samples share; but not for integers, as they may be indices.
    """
    own = _own(probes, len(probes))
    old, others = probes[own], torch.cat(_others(probes, len(probes)))
    new = next((other for other in others if not (other == old).all()), old[0]).expand_as(old)
    if doubled:
        new = torch.where(new == new.round(), new, 2 * new)
    if torch.equal(new, old) and new.ndim > 1:
        new = new.flip(-1)
    if torch.equal(new, old) and doubled:
        new = new + 1
    return probes.slice_scatter(new, 0, own.start, own.stop)


def _cotangent(outputs: Tensor) -> Tensor:
    """Return random gradients at the outputs of the changed samples, and zeros for the others."""
    drawn = torch.randn(outputs.shape, generator=generator("curvature proves itself"), dtype=torch.float64)
    for rows in _others(drawn, len(drawn)):
        rows.zero_()
    return drawn.to(outputs.dtype).to(outputs.device)


# ---- samples are the first axis


def _check_samples(network: nn.Module, layers: Layers, probes: Tensor, plain: Pass, see: See) -> Pass:
    """Raise if a sample changes the inputs of a layer, or the outputs, for another one; return the pass."""
    count = len(probes)
    changed, inputs = _see_changed(probes, see)
    for name, before in _seen(plain):
        after = dict(_seen(changed)).get(name)
        if after is not None and after.ndim == before.ndim and len(after) == len(before):
            before, after = _of_same_length(before, after)
            found = _largest_change(_others(before, count), _others(after, count))
            if found <= 64 * _eps(before):  # on a CPU it is exactly 0
                continue
            again = dict(_seen(see(probes.clone(), None)))[name]
            noise = _largest_change([before], [_of_same_length(again, after)[0]])
            if noise > math.sqrt(_eps(before)):
                raise ValueError(
                    f"{_place(name, layers)} is not the same in a second pass, in eval mode; curvature needs a network "
                    "that draws no random numbers then: for example F.dropout with training=self.training."
                )
            if found <= 10 * noise:
                continue
        raise ValueError(
            f"{_place(name, layers)} changes for a sample when other samples do{_origin(network, probes, inputs)}; "
            "curvature needs the samples on the first axis, one independent of another: transpose what is time-first, "
            "keep the rows of a sample together where tokens or windows are folded into the batch, and mix no samples "
            "(a batch norm needs track_running_stats=True and eval mode, attention the samples on its batch axis)."
        )
    return changed


def _of_same_length(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors up to where the shorter one ends, along all axes but the first: padding may be trimmed."""
    for axis in range(1, before.ndim):
        length = min(before.shape[axis], after.shape[axis])
        before, after = (tensor.narrow(axis, 0, length) for tensor in (before, after))
    return before, after


def _check_places(layers: Layers, probes: Tensor, changed: Pass, see: See) -> None:
    """Raise if inputs of a layer, or outputs, for a sample depend on its place in the batch."""
    count = len(probes)
    for name in _of_their_place(changed, count):
        # Rounding may depend on the row, and some functions jump; not for other samples again.
        if name in _of_their_place(see(_changed(probes, doubled=False), None), count):
            raise ValueError(
                f"{_place(name, layers)} is not the same for a sample in another row of the batch; curvature needs a "
                "network that treats all alike: for example, positions are added along the tokens."
            )


def _seen(found: Pass) -> list[tuple[str | None, Tensor]]:
    """Return the compared tensors: the layers' inputs, by name, and the outputs, by None."""
    return [*found.inputs.items(), (None, found.outputs)]


def _of_their_place(changed: Pass, count: int) -> list[str | None]:
    """Return the places where the two equal samples differ by more than rounding."""
    if count < _CHANGED.stop:
        return []
    pairs = [(name, x, x[_own(x, count)].chunk(2)) for name, x in _seen(changed)]
    return [name for name, x, (a, b) in pairs if _largest_change([a], [b]) > math.sqrt(_eps(x))]


def _see_changed(probes: Tensor, see: See) -> tuple[Pass, Tensor]:
    """Return a pass of changed probes, and these."""
    if probes.is_floating_point():
        inputs = _changed(probes, doubled=True)
        try:
            return see(inputs.clone(), None), inputs
        except _RowsError:
            raise
        except Exception:  # it may take only inputs in some range; those below are
            pass
    inputs = _changed(probes, doubled=False)
    return see(inputs.clone(), None), inputs


def _largest_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the largest difference between rows of tensors, relative to the row before."""
    found = 0.0
    for old, new in zip(before, after, strict=True):
        if not torch.equal(old, new):
            old, new = (tensor.flatten(1).to(wide(tensor.device)) for tensor in (old, new))
            same = (old == new) | (old.isnan() & new.isnan())
            change = torch.where(same, 0, new - old).norm(dim=1)
            size = torch.where(same & ~old.isfinite(), 0, old).norm(dim=1)
            found = max(found, torch.where(change == 0, 0, change / size).nan_to_num(math.inf).max().item())
    return found


def _strays(g: Tensor, samples: int) -> bool:
    """Return whether gradients are not 0 at rows of other samples; NaN does not count."""
    others = _others(g, samples)
    if not any(rows.any() for rows in others):
        return False
    stray, mine = (rows.nan_to_num(0.0).norm().item() for rows in (torch.cat(others), g[_own(g, samples)]))
    return bool(stray > 64 * _eps(g) * mine)


def _origin(network: nn.Module, probes: Tensor, changed: Tensor) -> str:
    """Name the first module that mixes samples, as part of a sentence; empty if unclear."""
    count = len(probes)

    def record(x: Tensor) -> list[tuple[nn.Module, list[Tensor], list[Tensor]]]:
        found: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            found.append((module, [t.clone() for t in args if isinstance(t, Tensor)], _tensors(output)))

        with ExitStack() as hooks, torch.no_grad():
            for module in network.modules():
                hooks.enter_context(module.register_forward_hook(keep))
            network(x.clone())
        return found

    def mixed(before: list[Tensor], after: list[Tensor]) -> bool:
        pairs = list(zip(before, after, strict=False))
        usable = [(a, b) for a, b in pairs if a.shape == b.shape and a.ndim and a.shape[0] % count == 0]
        return any(_largest_change(_others(a, count), _others(b, count)) > 64 * _eps(a) for a, b in usable)

    names = {module: name for name, module in network.named_modules()}
    for (module, *before), (other, *after) in zip(record(probes), record(changed), strict=False):
        if module is other and mixed(before[1], after[1]) and not mixed(before[0], after[0]):
            return f", from module {names[module]!r} ({type(module).__name__}) on"
    return ""


def _tensors(output: Any) -> list[Tensor]:
    found = output if isinstance(output, list | tuple) else [output]
    return [tensor.clone() for tensor in found if isinstance(tensor, Tensor)]


# ---- the rule is the layer


def _check_rules(layers: Layers, seen: Pass, samples: int) -> None:
    """Raise unless the rules give autograd's gradients of a pass, and factors that agree with their definition."""
    found: dict[tuple[str, str], Tensor] = {}
    for name, g in seen.gradients.items():
        x = seen.inputs[name]
        entries = _gradients_of_rule(name, *layers[name], x[_own(x, samples)], g[_own(g, samples)])
        found |= {(name, key): values for key, values in entries.items()}
    if not found:
        return  # trained parameters are left out
    expected = [seen.parameters[full_name(name, key)].flatten() for name, key in found]
    differences = torch._foreach_sub(list(found.values()), expected)
    norms = [torch.stack(torch._foreach_norm(each)).tolist() for each in (differences, expected)]
    tolerance = math.sqrt(_resolution([*seen.inputs.values(), *seen.gradients.values(), *expected]))
    for (name, key), error, size in zip(found, *norms, strict=True):
        if error <= tolerance * size:
            continue
        x, g = seen.inputs[name], seen.gradients[name]
        if not (x.isfinite().all() and g.isfinite().all()):
            continue  # nor will be the factors
        # Where a sum cancels, its rounding is that of the terms.
        if error > tolerance * max(size, _size_of_terms(*layers[name], key, x, g)):
            raise ValueError(
                f"The curvature rule of module {_label(name, layers)} gives a gradient of {key!r} that is not "
                f"autograd's (of norm {size:.1e}, their difference {error:.1e}): the parameter is used elsewhere as "
                "well, a forward hook changes what the module gives, or the rule is wrong; use a parameter in one "
                "module only, remove the hook, or correct the rule."
            )


def _gradients_of_rule(name: str, module: nn.Module, rule: Rule, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a layer's parameters as its rule has them, flat, in the order of the parameters."""
    whose = f"The curvature rule of module {name!r} ({type(module).__name__})"
    inputs, vectors = rule.inputs(module, x), rule.gradients(module, x, g[None])
    wanted = {k: p for k, p in module._parameters.items() if p is not None and p.requires_grad}
    wanted = {k: p for k, p in wanted.items() if k not in rule.left_out}
    if missing := sorted(wanted.keys() - vectors.keys()):
        raise ValueError(f"{whose} gives no gradients for {missing}; return them, or name them in left_out.")
    found = {}
    for key, parameter in wanted.items():
        a, v = _aligned(f"{whose} gives", key, parameter, x.shape[0], inputs.get(key), vectors[key])
        entries = v.sum(1) if a is None else v.mT @ a  # [L, O, ...]
        if len(entries) > 1 and key not in rule.blocks_first:
            entries = entries.transpose(0, 1)
        found[key] = in_parameter_order(entries.flatten(), rule.axes(module, key))
    if not type(rule).__module__.startswith("lightning_sym."):  # those are tested
        outer = {key: gram(a, a.ndim - 3) for key, a in inputs.items()}
        _check_shortcut(f"{whose} gives in_factors that are not those of its inputs", rule.in_factors(module, x), outer)
        given = rule.out_factors(module, x, g[None])
        _check_shortcut(f"{whose} gives out_factors that are not those of its gradients", given, mean_products(vectors))
    return found


def _aligned(
    whose: str, key: str, parameter: Tensor, rows: int, inputs: Tensor | None, vectors: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Return the inputs of a parameter and the gradients there, with the same blocks and places.

    Args:
        whose: The rule's name, for errors.
        key: Name of the parameter, for errors.
        parameter: The parameter.
        rows: Number of rows of the layer's input.
        inputs: Shape ``[*blocks, rows, R, I]``; None for a parameter without inputs.
        vectors: Shape ``[*blocks, 1, rows, R, O]``. Without blocks where the inputs have them, its places are maybe
            those of all blocks.

    Returns:
        Shapes ``[L, rows * R, I]``, or None, and ``[L, rows * R, O]``.
    """
    g = vectors.reshape(-1, *vectors.shape[-3:]) if vectors.ndim > 4 else vectors[:1]
    a = None if inputs is None else inputs.reshape(-1, *inputs.shape[-3:]) if inputs.ndim > 3 else inputs[None]
    blocks, of_inputs, places, width = (1, rows, 1, 1) if a is None else a.shape
    count = max(len(g), blocks)
    if (size := count * g.shape[-1] * width) != parameter.numel():
        raise ValueError(f"{whose} a block of {size} parameters for {key!r}, which has {parameter.numel()}.")
    if count > 1 == len(g) and g.shape[2] == count * places:
        g = torch.unflatten(g[0], 1, (count, -1)).transpose(0, 1)
    if g.shape[1] != rows or of_inputs != rows:
        raise ValueError(
            f"{whose} {of_inputs} inputs and {g.shape[1]} gradients of {key!r} for {rows} rows of the layer's input; "
            "return shapes [*blocks, N, R, I] and [*blocks, V, N, R, O], with all places in R."
        )
    if g.shape[2] != places:
        few = "sum them over the places, as one" if a is None else "return one for each input"
        raise ValueError(f"{whose} gradients of {key!r} at {g.shape[2]} places and inputs at {places}; {few}.")
    g = g.flatten(1, 2)
    if a is not None:
        a = a.flatten(1, 2)
        a = a if blocks == count else a.expand(count, -1, -1)
    return a, g if len(g) == count else g.expand(count, -1, -1)


def _size_of_terms(module: nn.Module, rule: Rule, key: str, x: Tensor, g: Tensor) -> float:
    """Return the root of the sum of squares of the terms that add up to a parameter's gradient."""
    inputs = rule.inputs(module, x).get(key)
    vectors = rule.gradients(module, x, g[None])[key]
    a, v = _aligned("", key, getattr(module, key), x.shape[0], inputs, vectors)
    terms = g if a is None else v.norm(dim=-1) * a.norm(dim=-1)
    return float(terms.norm())


def _check_shortcut(what: str, found: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
    """Raise unless the factors that a rule has in its own way are those by definition."""
    for key in {*found, *plain}:
        if key not in found or key not in plain or found[key].shape != plain[key].shape:
            raise ValueError(f"{what} in shape or name, for {key!r}; correct the rule.")
        error, scale = (found[key] - plain[key]).norm().item(), plain[key].norm().item()
        if error > math.sqrt(_resolution([plain[key]])) * scale:
            raise ValueError(f"{what} for {key!r}, the difference being {error / scale:.1e} of them; correct the rule.")


# ---- words and digits


def _place(name: str | None, layers: Layers) -> str:
    return "The output of the network" if name is None else f"The input of module {_label(name, layers)}"


def _label(name: str, layers: Layers) -> str:
    return f"{name!r} ({type(layers[name][0]).__name__})"


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _resolution(tensors: Iterable[Tensor]) -> float:
    """Return the relative rounding of products of tensors: that of their lowest precision."""
    kinds = {(tensor.dtype, tensor.device.type) for tensor in tensors if tensor.is_floating_point()}
    found = max((torch.finfo(dtype).eps for dtype, _ in kinds), default=0.0)
    for dtype, device in kinds:
        if dtype == torch.float32:
            setting = torch.get_float32_matmul_precision()
            # "medium" is bfloat16; convolutions on tensor cores have ten bits by default.
            found = max(found, 2.0**-7 if setting == "medium" else 2.0**-10 * (setting == "high" or device != "cpu"))
    return found
