"""Curvature of any network by back-propagated square-root columns, with autograd alone."""

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from lightning_sym._distributed import device_of, moved, ranks
from lightning_sym._random import generator as seeded_generator
from lightning_sym.curvature.blocks import (
    Factors,
    KroneckerBlock,
    Likelihood,
    NonFiniteError,
    over_batches_and_ranks,
)
from lightning_sym.curvature.proof import Pass, check_rows, prove
from lightning_sym.curvature.rules import FFC, Rule, curved_parameters, find_rule, full_name, unfolded_out_factors


def autograd_factors(
    network: nn.Module,
    loader: Iterable[Sequence[Tensor]],
    likelihood: Likelihood,
    *,
    samples: int | None = None,
    ffc: FFC = "shared",
    generator: torch.Generator | None = None,
    columns: int | None = None,
) -> Factors:
    """Return the factors; see :func:`lightning_sym.curvature.factors`, whose engine ``autograd`` this is.

    Args:
        network: Any module; parameters belong to layers with a rule.
        loader: Batches of inputs and labels or targets.
        likelihood: ``"classification"`` or ``"regression"``.
        samples: None for all K columns of the square root; otherwise how many random combinations of them.
        ffc: As for :class:`~lightning_sym.curvature.Rule`.
        generator: Generator for the random signs; use a different one on each rank.
        columns: How many columns go through one backward pass together, by ``vmap``; None for 1 on a CPU, where
            more is not faster, and for all of them on other devices.

    Returns:
        The same on every rank.
    """
    with ready(network) as network:
        layers = curved_layers(network, ffc)
        device = device_of(network)
        if columns is None:
            columns = 1 if device.type == "cpu" else 1_000_000

        def compute() -> Factors | None:
            check_weights(network)
            sums = _Sums(layers)
            for x, y in batches(network, loader):
                if not sums.samples:
                    prove(network, layers, x, functools.partial(sums.see, network))
                sums.add(network, x, y, likelihood, samples, generator, columns)
            return sums.factors(likelihood)

        return over_batches_and_ranks(compute, device)


@contextmanager
def ready(network: nn.Module) -> Iterator[nn.Module]:
    """Give the network in eval mode with gradients on, in single precision at least; all as before afterwards.

    Backward hooks of its modules are off: they may change gradients, and curvature is that of the function.

    Args:
        network: Any module. One with parameters in half precision is copied.

    Yields:
        The network, or its copy.

    Raises:
        ValueError: If it is wrapped by DDP or ``torch.compile``, or has parameters that are not initialised yet.
    """
    if isinstance(network, nn.parallel.DistributedDataParallel):
        raise ValueError("network is wrapped for DDP; pass network.module.")
    if hasattr(network, "_orig_mod"):
        raise ValueError("network is compiled, which hides its layers; pass the network that was compiled.")
    for name, parameter in network.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"Parameter {name!r} is not initialised yet; call the network once before.")
    tensors = (*network.parameters(), *network.buffers())
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors):
        network = copy.deepcopy(network).float()
    modes = [(module, module.training) for module in network.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device_of(network).type, enabled=False))
        hooks = [(module, module._backward_hooks, module._backward_pre_hooks) for module, _ in modes]
        try:
            network.eval()
            for module, _ in modes:
                module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
            yield network
        finally:
            for module, training in modes:
                module.training = training
            for module, after, before in hooks:
                module._backward_hooks, module._backward_pre_hooks = after, before


def curved_layers(network: nn.Module, ffc: FFC = "shared") -> dict[str, tuple[nn.Module, Rule]]:
    """Return the layers that have trainable parameters of their own, with their rules.

    Args:
        network: Any module.
        ffc: As for :class:`~lightning_sym.curvature.Rule`.

    Returns:
        By the module's name, in the order of ``named_modules``.

    Raises:
        ValueError: If a layer has no rule, a parameter belongs to two modules, or there is none to train.
    """
    layers: dict[str, tuple[nn.Module, Rule]] = {}
    owners: dict[int, str] = {}
    for name, module in network.named_modules():
        trainable = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        for parameter in trainable.values():
            if (other := owners.setdefault(id(parameter), name)) != name:
                raise ValueError(
                    f"Modules {other!r} and {name!r} share a parameter, which has no such block; give each its own."
                )
        if trainable:
            layers[name] = (module, find_rule(name, module, ffc))
    if not layers:
        raise ValueError("The network has no trainable parameters to compute curvature of.")
    return layers


def check_weights(network: nn.Module) -> None:
    """Raise :class:`NonFiniteError` if a parameter or buffer is not finite; the error names it."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if not tensor.isfinite().all():
            raise NonFiniteError(f"{name!r} of the network is not finite; lower the learning rate.")


def batches(network: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels of every batch that is not empty, on the network's device, inputs in its precision."""
    parameter = next(network.parameters())
    for batch in loader:
        if not isinstance(batch, list | tuple) or len(batch) < 2 or not all(isinstance(t, Tensor) for t in batch[:2]):
            raise ValueError(
                f"The loader must give pairs of tensors, inputs and labels, for curvature, got {type(batch).__name__}."
            )
        x, y = (moved(tensor, parameter.device) for tensor in batch[:2])
        if x.is_inference():
            x = x.clone()  # autograd takes no others
        if len(x):
            yield (x.to(parameter.dtype) if x.is_floating_point() else x), y


def check_outputs(outputs: Any, x: Tensor) -> None:
    """Raise ``ValueError`` unless a network gives one row of outputs, ``[N, K]``, for each of its inputs."""
    if not isinstance(outputs, Tensor):
        raise ValueError(f"Curvature needs a network that returns one tensor, got {type(outputs).__name__}.")
    if outputs.ndim != 2 or not outputs.is_floating_point():
        raise ValueError(f"Curvature needs outputs of shape [N, K], got shape {list(outputs.shape)}.")
    if len(outputs) != len(x):
        raise ValueError(f"The network gives {len(outputs)} outputs for {len(x)} inputs; it needs one for each.")


def check_trained(outputs: Tensor) -> None:
    """Raise ``ValueError`` unless the outputs of a network depend on parameters that are trained."""
    if not outputs.requires_grad:
        raise ValueError("No trainable parameter reaches the network's outputs; freeze it, or use what it gives.")


def loss_and_columns(
    outputs: Tensor, targets: Tensor, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    r"""Return the summed loss of a batch, and columns S with :math:`\mathbb E\,\sum_v s_v s_v^\top = \Lambda`.

    Args:
        outputs: Logits or means. Shape ``[N, K]``.
        targets: Class indices, shape ``[N]``, or values, shape ``[N, K]``.
        likelihood: ``"classification"`` or ``"regression"``.
        samples: None for the exact square root with V = K; otherwise V Monte Carlo columns.
        generator: Generator for the random signs, on the CPU or the device of the outputs.

    Returns:
        Sum over samples of the cross-entropy or the squared error, float64, a scalar, and the columns, shape
        ``[V, N, K]``, as the outputs. All detached.

    Raises:
        ValueError: If targets have the wrong shape, or a class is out of range.
    """
    outputs = outputs.detach()
    count, width = outputs.shape
    if likelihood == "regression":
        if targets.shape != outputs.shape:
            raise ValueError(
                f"Regression targets must have the shape of the outputs, {list(outputs.shape)}, got "
                f"{list(targets.shape)}; reshape them in the data module."
            )
        loss = (outputs.double() - targets.double()).square().sum()
        if samples is None:
            eye = torch.eye(width, dtype=outputs.dtype, device=outputs.device)
            return loss, eye[:, None].expand(width, count, width)
        return loss, _signs(samples, outputs, generator) / samples**0.5
    if targets.shape != (count,) or targets.is_floating_point():
        raise ValueError(
            f"Labels must be class indices of shape [{count}], got {targets.dtype} of shape {list(targets.shape)}."
        )
    if count and not (targets.min() >= 0 and targets.max() < width):
        raise ValueError(
            f"Labels must be in 0 to {width - 1}, as the network has {width} outputs, got {int(targets.min())} to "
            f"{int(targets.max())}."
        )
    loss = F.cross_entropy(outputs.double(), targets.long(), reduction="sum")
    probabilities = outputs.softmax(1)
    if not probabilities.isfinite().all():
        raise NonFiniteError("The network's outputs are not finite; lower the learning rate or look at the inputs.")
    if samples is None:
        eye = torch.eye(width, dtype=outputs.dtype, device=outputs.device)
        return loss, probabilities.T.sqrt()[:, :, None] * (eye[:, None] - probabilities)
    mixed = _signs(samples, outputs, generator) * probabilities.sqrt()
    return loss, (mixed - probabilities * mixed.sum(2, keepdim=True)) / samples**0.5


def _signs(samples: int, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return random signs that mix the columns of the exact square root, ``[V, N, K]``.

    Of a confident network nearly every mixture is about as long as the root itself, whereas with drawn labels its
    curvature would come from rare labels, and one pass would most often see next to nothing of it.
    """
    device = generator.device if generator is not None else outputs.device
    drawn = torch.randint(2, (samples, *outputs.shape), generator=generator, device=device)
    return (2 * drawn - 1).to(outputs)


class _Sums:
    """Sums of both factors over the batches of this rank, and what one forward pass left for them."""

    def __init__(self, layers: dict[str, tuple[nn.Module, Rule]]) -> None:
        self.layers = layers
        self.parameters = {full: getattr(layers[name][0], key) for full, name, key in curved_parameters(layers)}
        self.recorded: dict[str, tuple[Tensor, int, Tensor]] = {}
        self.out: dict[str, Tensor] = {}
        self.inner: dict[str, Tensor] = {}
        self.samples, self.outputs, self.loss = 0, 0, 0.0

    def _hook(self, name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
            if name in self.recorded:
                raise ValueError(
                    f"Module {name!r} is called more than once for a batch, which its curvature rule does not cover; "
                    "use one instance per call."
                )
            if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
                raise ValueError(
                    f"Module {name!r} ({type(module).__name__}) must take one tensor and return one for curvature."
                )
            x = args[0].detach()
            self.recorded[name] = (x, x._version, output)
            # Operations in place, for example a ReLU's, change this copy.
            return output.clone()

        return record

    def add(
        self,
        network: nn.Module,
        x: Tensor,
        y: Tensor,
        likelihood: Likelihood,
        samples: int | None,
        generator: torch.Generator | None,
        columns: int,
    ) -> None:
        """Add one batch."""
        outputs = self._forward(network, x)
        loss, square_root = loss_and_columns(outputs, y, likelihood, samples, generator)
        inner = self._add_inner()
        nodes = [output for _, _, output in self.recorded.values()]
        for piece in torch.split(square_root, columns):
            for gradients in pull_back(outputs, nodes, piece):
                self._add_out(gradients, len(x), inner)
        self.recorded.clear()
        self.samples += len(x)
        self.outputs = outputs.shape[1]
        self.loss += loss.item()

    def see(self, network: nn.Module, x: Tensor, cotangent: Callable[[Tensor], Tensor] | None) -> Pass:
        """Return what the rules see of some samples; with gradients where there is something to pull back."""
        with torch.set_grad_enabled(cotangent is not None):
            outputs = self._forward(network, x)
        recorded = dict(self.recorded)
        self.recorded.clear()
        inputs = {name: x for name, (x, _, _) in recorded.items()}
        if cotangent is None:
            return Pass(outputs, inputs)
        check_trained(outputs)
        nodes = [output for _, _, output in recorded.values()]
        found = torch.autograd.grad(
            outputs,
            [*nodes, *self.parameters.values()],
            cotangent(outputs.detach()),
            allow_unused=True,
            materialize_grads=True,
        )
        return Pass(
            outputs.detach(),
            inputs,
            dict(zip(recorded, found[: len(nodes)], strict=True)),
            dict(zip(self.parameters, found[len(nodes) :], strict=True)),
        )

    def _forward(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return the outputs; inputs and outputs of the layers are recorded."""
        self.recorded.clear()
        handles = []
        try:
            for name, (module, _) in self.layers.items():
                handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
            outputs = network(x)
        finally:
            for handle in handles:
                handle.remove()
        check_outputs(outputs, x)
        self._check_recorded(len(x))
        found: Tensor = outputs
        return found

    def _check_recorded(self, samples: int) -> None:
        for name, (module, _) in self.layers.items():
            if name not in self.recorded:
                raise ValueError(
                    f"Module {name!r} ({type(module).__name__}) has trainable parameters but is not called; freeze "
                    "them with requires_grad_(False) or remove it."
                )
            x, version, output = self.recorded[name]
            if x._version != version:
                raise ValueError(
                    f"The input of module {name!r} is changed in place after the call; use operations out of place."
                )
            check_rows(name, module, x, samples)
            if torch.is_grad_enabled() and not output.requires_grad:
                raise ValueError(
                    f"Module {name!r} ({type(module).__name__}) is called without gradients, for example in "
                    "torch.no_grad(); freeze its parameters with requires_grad_(False)."
                )

    @torch.no_grad()
    def _add_inner(self) -> dict[str, set[str]]:
        """Add A of all layers; return which parameters have one."""
        found = {}
        for name, (x, _, _) in self.recorded.items():
            module, rule = self.layers[name]
            factors = rule.in_factors(module, x)
            self._accumulate(self.inner, name, factors)
            found[name] = set(factors)
        return found

    @torch.no_grad()
    def _add_out(self, gradients: Sequence[Tensor | None], samples: int, inner: dict[str, set[str]]) -> None:
        for (name, (x, _, output)), g in zip(self.recorded.items(), gradients, strict=True):
            module, rule = self.layers[name]
            columns = output.new_zeros(1, *output.shape) if g is None else g
            found = unfolded_out_factors(rule, module, x, columns, samples, inner[name])
            self._accumulate(self.out, name, found)

    def _accumulate(self, sums: dict[str, Tensor], name: str, found: dict[str, Tensor]) -> None:
        for parameter, factor in found.items():
            if (key := full_name(name, parameter)) in self.parameters:
                if key in sums:
                    sums[key] += factor
                else:
                    sums[key] = factor.clone()

    def factors(self, likelihood: Likelihood) -> Factors | None:
        """Return what was summed; None without a sample."""
        if not self.samples:
            return None
        blocks = {}
        for key, name, parameter in curved_parameters(self.layers):
            if key in self.out:
                module, rule = self.layers[name]
                inner = self.inner.get(key)
                inner = None if inner is None else inner / self.samples
                axes = rule.axes(module, parameter)
                blocks[key] = KroneckerBlock(self.out[key], inner, parameter in rule.blocks_first, axes)
        left_out = tuple(key for key, _, _ in curved_parameters(self.layers, left_out=True))
        return Factors(blocks, self.samples, self.outputs, likelihood, self.loss, left_out)


def pull_back(outputs: Tensor, nodes: list[Tensor], columns: Tensor) -> Iterator[list[Tensor | None]]:
    """Yield gradients of columns at tensors that the outputs were computed from; the graph is kept.

    Args:
        outputs: Shape ``[N, ...]``.
        nodes: Tensors with gradients.
        columns: What is pulled back. Shape ``[V, N, ...]``, the rest as the outputs.

    Yields:
        One gradient for each node, shape ``[V, ...]``, the rest as the node; None where no gradient comes. All columns
        together by ``vmap`` where the network's operations allow it and memory suffices, otherwise V times one.
    """
    settings: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    if len(columns) > 1:
        try:
            yield list(torch.autograd.grad(outputs, nodes, columns, is_grads_batched=True, **settings))
            return
        except RuntimeError:  # an operation without a batching rule, or not enough memory
            pass
    for column in columns:
        gradients = torch.autograd.grad(outputs, nodes, column, **settings)
        yield [None if g is None else g[None] for g in gradients]


def draws(generator: torch.Generator | None) -> torch.Generator:
    """Return the generator, or one that every pass starts anew, another on every rank."""
    rank = torch.distributed.get_rank() if ranks() > 1 else 0
    return generator if generator is not None else seeded_generator("curvature", rank)
