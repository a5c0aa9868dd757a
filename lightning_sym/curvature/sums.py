"""Sum Kronecker factors over batches; every batch decides the rows that count and checks their samples."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_sym._random import generator
from lightning_sym.curvature.blocks import KroneckerBlock
from lightning_sym.curvature.rules import Layers, Rule, curved_parameters, full_name, gram, summed_products, unfolded
from lightning_sym.curvature.structure import every_place_counts
from lightning_sym.layers.polyphase_pool import PolyphasePool

_CYCLES = 100  # of draws; each shows at least one more row
_UNITS = 12  # so many in a row are never all off
_MASKED = -90.0  # lower values mark masked places, which are filled with -100, -1000 and less
_ON = 4.0  # so far at least from 0 is tried, where a single sample says little of how large outputs get


class FactorSums:
    """Sums of products of inputs and of gradients, over the rows that the loss sees, and the number of these rows.

    The loss sees a row if the network's outputs depend on the layer's output there: rows of padding that a mask hides
    do not count. A gradient of 0 is no proof: a unit that is off, or a maximum elsewhere, also gives one.

    Args:
        network: The network.
        layers: Its layers with curvature and their rules, by name.
        quiet: Gives the block within which the network is called.
    """

    def __init__(self, network: nn.Module, layers: Layers, quiet: Callable[[], AbstractContextManager[Any]]) -> None:
        self.network, self.layers, self.quiet = network, layers, quiet
        self.parameters = {full for full, _, _ in curved_parameters(layers)}
        self.out: dict[str, Tensor] = {}
        self.inner: dict[str, Tensor] = {}
        self.rows: dict[str, int] = {}
        self.regroups = False  # whether rows may be given to other samples behind a layer
        self._every_place: bool | None = None  # whether the network's structure shows that all rows count
        self._folded: set[str] = set()  # layers that have had other than one row for each sample
        self._with_inputs: dict[str, set[str]] = {}
        self._seen: dict[tuple[str, str], Tensor] = {}  # in this batch, by layer and parameter: shape [rows, R]

    @torch.no_grad()
    def add_out(self, name: str, x: Tensor, g: Tensor, samples: int) -> None:
        """Add the products of gradients at a layer's output.

        Args:
            name: Name of the layer.
            x: Its input. Shape ``[rows, ...]``.
            g: Some columns at its output. Shape ``[V, rows, ...]``.
            samples: N.
        """
        module, rule = self.layers[name]
        if name not in self._with_inputs:
            self._with_inputs[name] = set(rule.inputs(module, x[:1]))
        with_inputs = self._with_inputs[name]
        vectors = rule.gradients(module, x, g)
        if type(rule).out_factors is not Rule.out_factors and len(x) == samples:
            found = {key: b * vectors[key].shape[-2] for key, b in rule.out_factors(module, x, g).items()}
        else:
            found = summed_products(unfolded(vectors, samples, with_inputs))
        for key, b in found.items():
            if full_name(name, key) in self.parameters:
                self._add(self.out, full_name(name, key), b)
        for key in with_inputs & vectors.keys():
            if full_name(name, key) not in self.parameters:
                continue
            if (name, key) not in self._seen:  # one column shows nearly all; the rest is found below
                self._seen[name, key] = _not_zero(vectors[key][..., :1, :, :, :])

    def add_inner(self, x: Tensor, inputs: Mapping[str, Tensor]) -> None:
        """Add the products of inputs of a batch, once all columns have been added.

        Args:
            x: The batch. Shape ``[N, ...]``.
            inputs: Inputs of each layer, by name. Shape ``[rows, ...]``.

        Raises:
            ValueError: If rows are not those of the samples in turn.
        """
        self._folded |= {name for name, a in inputs.items() if len(a) != len(x)}
        own = set(inputs) if self.regroups else self._folded & inputs.keys()
        look = _Look(self.network, self.layers, x, inputs, self.quiet)
        hidden = {at: seen for at, seen in self._seen.items() if not seen.all() and look.has_places(*at, seen)}
        if hidden and self._every_place is None:
            self._every_place = every_place_counts(self.network)
        if self._every_place:
            for at in [at for at in hidden if at[0] not in self._folded]:
                hidden.pop(at).fill_(True)
        if own or hidden:
            look.check_and_find(own, hidden)
        with torch.no_grad():
            for name, a in inputs.items():
                module, rule = self.layers[name]
                partly = {key: seen for (of, key), seen in hidden.items() if of == name and not seen.all()}
                found = rule.inputs(module, a) if partly else rule.in_factors(module, a)
                for key, values in found.items():
                    full, counted = full_name(name, key), partly.get(key)
                    if full not in self.parameters:
                        continue
                    if partly:
                        values = gram(values if counted is None else values * counted[..., None], values.ndim - 3)
                    self._add(self.inner, full, values)
                    count = self._seen[name, key].numel() if counted is None else int(counted.sum())
                    self.rows[full] = self.rows.get(full, 0) + count
        self._seen.clear()

    def blocks(self, samples: int) -> dict[str, KroneckerBlock]:
        """Return the blocks of all batches, which have so many samples together, by the parameter's name."""
        found = {}
        for full, name, key in curved_parameters(self.layers):
            if full in self.out:
                module, rule = self.layers[name]
                out, inner, places = self.out[full], self.inner.get(full), 1.0
                if inner is not None:
                    places = self.rows[full] / samples
                    out, inner = out / (places or 1.0), inner / samples
                found[full] = KroneckerBlock(out, inner, key in rule.blocks_first, rule.axes(module, key), places)
        return found

    @staticmethod
    def _add(sums: dict[str, Tensor], full: str, found: Tensor) -> None:
        if full in sums:
            sums[full] += found
        else:
            sums[full] = found.clone()


def _not_zero(vectors: Tensor) -> Tensor:
    """Return the rows where gradients ``[*blocks, V, rows, R, O]`` are not 0. Shape ``[rows, R]``."""
    return (vectors.abs().amax(-1) != 0).flatten(0, -3).any(0)


class _Look:
    """Checks a batch again: for the rows' samples, and for rows that matter to outputs but have no gradient.

    Outputs of layers keep their values, except in rows that have no gradient yet: random numbers are tried there.
    """

    def __init__(
        self,
        network: nn.Module,
        layers: Layers,
        x: Tensor,
        inputs: Mapping[str, Tensor],
        quiet: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.network, self.layers, self.x, self.inputs, self.quiet = network, layers, x, inputs, quiet
        self.clean: dict[str, Tensor] = {}
        self.other: dict[str, Tensor] = {}  # replacements for outputs
        self.nodes: dict[str, Tensor] = {}
        self.drawn = generator("rows that the loss sees")

    def has_places(self, name: str, key: str, seen: Tensor) -> bool:
        """Return whether the places of a parameter's gradients, ``[rows, R]``, are those of its inputs.

        In factored layers the places are channels, and all of them count.
        """
        module, rule = self.layers[name]
        with torch.no_grad():
            return rule.inputs(module, self.inputs[name][:1])[key].shape[-2] == seen.shape[1]

    def check_and_find(self, own: set[str], hidden: dict[tuple[str, str], Tensor]) -> None:
        """Check the samples of the rows of some layers, and mark in ``hidden`` further rows that the loss sees."""
        outputs = self._run()
        drawn = torch.randn(outputs.shape, generator=self.drawn, dtype=torch.float64).to(outputs)
        g = self._pulled(outputs, drawn)
        if own:
            # A power of two for each sample: then everything scales by it, without rounding.
            powers = torch.randint(16, (len(outputs),), generator=self.drawn).to(outputs.device)
            weights = torch.exp2(powers.to(outputs.dtype) - 8)
            scaled = self._pulled(outputs, drawn * weights[:, None])
            for name in own:
                self._check_own(name, g[name], scaled[name], weights)
        self._note(hidden, g)
        fruitless = cycle = 0
        first = {at: seen.clone() for at, seen in hidden.items()}
        # A row of one unit is off half of the time, and one of many units never.
        enough = 3 * math.ceil(_UNITS / min((self._width(*at) for at in hidden), default=_UNITS))
        while fruitless < enough and not all(bool(seen.all()) for seen in hidden.values()):
            if cycle % 3 == 0:  # rows found since may block others or be needed by them: alternate
                noise = self._noise(hidden if cycle % 2 else first)
            self.other = {name: self._tried(name, *noise[name], cycle % 3) for name in noise}
            outputs = self._run()
            found = bool(outputs.isfinite().all()) and self._note(hidden, self._pulled(outputs, drawn))
            if found:
                enough = max(enough, 6)  # something unknown hides rows: both kinds of turns
            fruitless, cycle = 0 if found else fruitless + 1, cycle + 1
            if cycle > 3 * _CYCLES:
                names = sorted({name for name, _ in hidden})
                raise ValueError(
                    f"Which rows of modules {names} the outputs depend on is not found in {_CYCLES} trials; pool fewer "
                    "places at once, or freeze their parameters with requires_grad_(False)."
                )

    def _width(self, name: str, key: str) -> int:
        """Return the size of a row of gradients."""
        module, rule = self.layers[name]
        with torch.no_grad():
            return rule.gradients(module, self.inputs[name][:1], self.clean[name][None, :1])[key].shape[-1]

    def _run(self) -> Tensor:
        self.nodes.clear()
        with ExitStack() as stack:
            for name, (module, _) in self.layers.items():
                stack.enter_context(module.register_forward_hook(self._keep(name)))
            for module in self.network.modules():
                if type(module) is PolyphasePool:
                    stack.enter_context(module.register_forward_hook(_whole_window))
            stack.enter_context(self.quiet())
            stack.enter_context(_StraightThrough())
            outputs: Tensor = self.network(self.x.clone())
        return outputs

    def _keep(self, name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            clean = self.clean.setdefault(name, output.detach())
            if self.other:  # random numbers of other layers must not change the value
                output = output + (self.other.get(name, clean) - output).detach()
            self.nodes[name] = output
            return output.clone()

        return keep

    def _pulled(self, outputs: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        settings: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        found = torch.autograd.grad(outputs, list(self.nodes.values()), cotangent, **settings)
        return dict(zip(self.nodes, found, strict=True))

    def _check_own(self, name: str, g: Tensor, scaled: Tensor, weights: Tensor) -> None:
        """Raise unless a layer's rows are those of the samples in turn, the same number for each."""
        whose = weights.repeat_interleave(len(g) // len(weights))
        rows, scaled = g.flatten(1), scaled.flatten(1)
        expected = rows * whose[:, None]
        wrong = (scaled - expected).norm(dim=1) > torch.finfo(g.dtype).eps ** 0.5 * expected.norm(dim=1)
        if wrong.any():
            raise ValueError(
                f"Module {name!r} ({type(self.layers[name][0]).__name__}) has an output of shape {list(g.shape)} for "
                f"{len(weights)} samples, whose row {int(wrong.nonzero()[0])} is not of the sample whose turn it is; "
                "give it [N, ...], or [N * T, ...] with the same number T of rows for each sample, those of a sample "
                "one after the other, or freeze its parameters with requires_grad_(False)."
            )

    @torch.no_grad()
    def _note(self, hidden: dict[tuple[str, str], Tensor], g: Mapping[str, Tensor]) -> bool:
        """Set which rows have gradients; return whether there is a new one."""
        new = False
        for (name, key), seen in hidden.items():
            module, rule = self.layers[name]
            now = _not_zero(rule.gradients(module, self.inputs[name], g[name][None])[key])
            new |= bool((now & ~seen).any())
            seen |= now
        return new

    def _noise(self, hidden: dict[tuple[str, str], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, for each layer with rows that are not seen yet, where these rows are in its output, and noise."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for (name, key), seen in hidden.items():
            if seen.all():
                continue
            module, rule = self.layers[name]
            clean = self.clean[name]
            at = torch.zeros_like(clean).requires_grad_()
            vectors = rule.gradients(module, self.inputs[name], at[None])[key]
            wanted = self._normal(vectors) * ~seen[..., None]
            (where,) = torch.autograd.grad((vectors * wanted).sum(), at)
            before = found[name][0] if name in found else False
            found[name] = ((where != 0) | before, self._normal(clean))
        return found

    def _tried(self, name: str, where: Tensor, noise: Tensor, kind: int) -> Tensor:
        """Return replacement outputs of a layer: larger than all else, up or down, or of magnitude 1."""
        clean = self.clean[name]
        size = max(float(clean.abs().max()), _ON) * float(noise.abs().amax()) / 2  # another one in each cycle
        tried = noise if kind == 2 else clean + size * (1 - 2 * kind) * (noise.sign() + noise / 8)
        return torch.where(where, tried, clean)

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.drawn).to(like)


class _StraightThrough(TorchFunctionMode):
    """Gives a gradient to units that are off, and to entries below a maximum; values stay the same.

    And scores of a softmax, which over a single place is constant, but for rounding in some ways to compute it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and let the gradient through it."""
        kwargs = dict(kwargs or {})
        other = _INSTEAD.get(func)
        x = args[0] if args else None
        if other is None or not isinstance(x, Tensor) or not x.requires_grad:
            return func(*args, **kwargs)
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        found = func(*args, **kwargs)
        values = found if isinstance(found, Tensor) else found[0]
        smooth = other(torch.where(x.isfinite() & (x > _MASKED), x, 0.0), args[1:], kwargs)
        if smooth is None or smooth.shape != values.shape:
            return found
        values = values + (smooth - smooth.detach())
        return values if isinstance(found, Tensor) else type(found)((values, *found[1:]))


def _itself(x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return x


def _attended(x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return sums of the scores of attention, of those places that are attended to."""
    given = {**dict(zip(("key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)), **kwargs}
    key, value, mask = given["key"], given["value"], given.get("attn_mask")
    if given.get("enable_gqa"):
        key = key.repeat_interleave(x.shape[-3] // key.shape[-3], -3)
    scores = x @ key.mT
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if mask is not None:
        hidden = hidden | (~mask if mask.dtype == torch.bool else ~(mask > _MASKED))
    if given.get("is_causal"):
        hidden = hidden | torch.ones_like(hidden[..., :, :]).triu(1)
    sums: Tensor = scores.masked_fill(hidden, 0.0).sum(-1, keepdim=True)
    return sums.expand(*sums.shape[:-1], value.shape[-1])


def _mean_over_axes(x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    axes = args[0] if args else kwargs.get("dim")
    keep = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    return None if axes is None or isinstance(axes, Tensor) else x.mean(axes, keepdim=keep)


def _mean_of_windows(pool: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def mean(x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        given = {**dict(zip(_WINDOW, args, strict=False)), **kwargs}
        if given.pop("dilation", 1) != 1:
            return None
        return pool(x, **{key: given[key] for key in _WINDOW if key in given})

    return mean


_WINDOW = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
_INSTEAD: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys(
        (
            *(F.relu, torch.relu, Tensor.relu, F.relu6, F.hardtanh, F.threshold, F.hardswish, F.hardsigmoid),
            *(torch.clamp, Tensor.clamp, torch.clamp_min, Tensor.clamp_min),
        ),
        _itself,
    ),
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax), _itself),
    F.scaled_dot_product_attention: _attended,
    **dict.fromkeys((torch.amax, Tensor.amax, torch.max, Tensor.max), _mean_over_axes),
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d), _mean_of_windows(F.avg_pool1d)),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _mean_of_windows(F.avg_pool2d)),
    **dict.fromkeys((F.max_pool3d, torch.max_pool3d), _mean_of_windows(F.avg_pool3d)),
}


def _whole_window(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    mean = F.avg_pool2d(args[0], 2)
    return output + (mean - mean.detach())


# ---- operations that may give rows to other samples

_REGROUPING = (
    *("Index", "Scatter", "Masked", "Split", "Unbind", "Cat", "Stack", "Slice", "Select", "Take", "Put"),
    *("Cumsum", "Segment"),
)
_PRODUCTS = {"MmBackward0": 1, "AddmmBackward0": 2, "BmmBackward0": 1}  # which of them is the right factor


def regroups(outputs: Tensor, nodes: list[Tensor]) -> bool:
    """Return whether an operation between layers' outputs and the network's may move rows along the first axis.

    Args:
        outputs: Outputs of the network.
        nodes: At the outputs of the layers.
    """
    ends = {node.grad_fn for node in nodes}
    reaches: dict[Any, bool] = {}
    stack = [outputs.grad_fn]
    while stack:
        at = stack[-1]
        nexts = [child for child, _ in at.next_functions] if at is not None else []
        todo = [child for child in nexts if child is not None and child not in reaches]
        if todo:
            stack.extend(todo)
            continue
        stack.pop()
        behind = [child is not None and reaches[child] for child in nexts]
        reaches[at] = any(behind) or at in ends
        if any(behind) and _moves_rows(at, behind):
            return True
    return False


def _moves_rows(at: Any, behind: list[bool]) -> bool:
    """Return whether an operation may move rows, of a node of the graph, and which arguments come from layers."""
    name = type(at).__name__
    if name in _PRODUCTS:  # from the left a matrix adds up rows; of a product for each sample not those of others
        return behind[_PRODUCTS[name]] and (name != "BmmBackward0" or len(at._saved_self) == 1)
    return name.startswith(_REGROUPING) and getattr(at, "_saved_dim", 0) == 0
