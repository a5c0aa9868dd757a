"""The passes of an engine through a network, and its interface."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from lightning_sym._checks import check_batches, check_pair, check_rows
from lightning_sym._distributed import device_of, moved, ranks
from lightning_sym._random import generator as seeded_generator
from lightning_sym.curvature.blocks import Likelihood, NonFiniteError, check_targets
from lightning_sym.curvature.proof import Pass
from lightning_sym.curvature.rules import FFC, Rule, find_rule
from lightning_sym.curvature.sums import FactorSums
from lightning_sym.networks.modes import evaluating
from lightning_sym.symmetry.tracing.graph.capture import copied


class Engine(ABC):
    """Adds the batches of this rank to the sums of both factors of every block.

    Args:
        network: The network, as :func:`ready` gives it.
        ffc: As for :class:`~lightning_sym.curvature.Rule`.
        columns: How many columns of the square root go through one backward pass together.
        lengthscales: Whether length scales get blocks.

    Attributes:
        layers: The layers with curvature and their rules, by name.
        sums: The sums.
    """

    def __init__(self, network: nn.Module, ffc: FFC, columns: int, lengthscales: bool = False) -> None:
        self.network, self.ffc, self.columns = network, ffc, columns
        self.layers = curved_layers(network, ffc, lengthscales)
        self.sums = FactorSums(network, self.layers, self.quiet)

    def quiet(self) -> AbstractContextManager[Any]:
        """Return the block within which the network itself is called."""
        return nullcontext()

    def running(self) -> AbstractContextManager[None]:
        """Return the block within which the methods below are called."""
        return nullcontext()

    @abstractmethod
    def see(self, x: Tensor, cotangent: Callable[[Tensor], Tensor] | None) -> Pass:
        """Run some samples and return the inputs of the rules, with gradients of pulled-back vectors."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs for a batch, and store the tensors for :meth:`add`. Shape ``[N, K]``."""

    @abstractmethod
    def add(self, x: Tensor, outputs: Tensor, square_root: Tensor) -> None:
        """Add a batch to the sums.

        Args:
            x: The batch. Shape ``[N, ...]``.
            outputs: Latest result of :meth:`forward`. Shape ``[N, K]``.
            square_root: The columns to pull back. Shape ``[V, N, K]``.
        """


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
        network = copied(network).float()
    hooks = [(module, module._backward_hooks, module._backward_pre_hooks) for module in network.modules()]
    autocast = torch.autocast(device_of(network).type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), autocast, evaluating(network):
        try:
            for module, _, _ in hooks:
                module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
            yield network
        finally:
            for module, after, before in hooks:
                module._backward_hooks, module._backward_pre_hooks = after, before


def not_called(name: str, module: nn.Module) -> ValueError:
    """Return the error for a layer that the network does not use."""
    return ValueError(
        f"Module {name!r} ({type(module).__name__}) has trainable parameters but is not called; freeze them with "
        "requires_grad_(False) or remove it."
    )


def called_twice(name: str) -> ValueError:
    """Return the error for a layer that the network uses more than once."""
    return ValueError(
        f"Module {name!r} is called more than once for a batch, which its curvature rule does not cover; use one "
        "instance per call."
    )


def not_of_tensors(name: str, module: nn.Module) -> ValueError:
    """Return the error for a layer that takes or returns something else than a tensor."""
    return ValueError(f"Module {name!r} ({type(module).__name__}) must take one tensor and return one for curvature.")


def curved_layers(
    network: nn.Module, ffc: FFC = "shared", lengthscales: bool = False
) -> dict[str, tuple[nn.Module, Rule]]:
    """Return the layers with trainable direct parameters, and their rules.

    Args:
        network: Any module.
        ffc: As for :class:`~lightning_sym.curvature.Rule`.
        lengthscales: Whether length scales get blocks.

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
            layers[name] = (module, find_rule(name, module, ffc, lengthscales))
    if not layers:
        raise ValueError("The network has no trainable parameters to compute curvature of.")
    return layers


def check_weights(network: nn.Module) -> None:
    """Raise :class:`NonFiniteError` if a parameter or buffer is not finite; the error names it.

    Buffers may hold minus infinity, as masks of attention do.
    """
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        broken = ~tensor.isfinite()
        if not isinstance(tensor, nn.Parameter):
            broken &= tensor != -torch.inf
        if broken.any():
            raise NonFiniteError(f"{name!r} of the network is not finite; lower the learning rate.")


def batches(network: nn.Module, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels of every batch that is not empty, on the network's device, inputs in its precision."""
    parameter = next(network.parameters())
    check_batches(loader)
    for batch in loader:
        check_pair(batch)
        x, y = (moved(tensor, parameter.device) for tensor in batch[:2])
        if x.is_inference():
            x = x.clone()  # autograd takes no others
        if len(x):
            yield (x.to(parameter.dtype) if x.is_floating_point() else x), y


def check_outputs(outputs: Any, x: Tensor) -> None:
    """Raise ``ValueError`` unless a network gives one row of outputs, ``[N, K]``, for each of its inputs."""
    check_rows(outputs, x)
    if outputs.ndim != 2 or not outputs.is_floating_point():
        raise ValueError(f"Curvature needs outputs of shape [N, K], got shape {list(outputs.shape)}.")


def check_trained(outputs: Tensor) -> None:
    """Raise ``ValueError`` unless the outputs of a network depend on parameters that are trained."""
    if not outputs.requires_grad:
        raise ValueError("No trainable parameter reaches the network's outputs; freeze it, or use its output.")


def loss_and_columns(
    outputs: Tensor, targets: Tensor, likelihood: Likelihood, samples: int | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    r"""Return the summed loss of a batch, and columns S with :math:`\mathbb E\,\sum_v s_v s_v^\top = \Lambda`.

    Args:
        outputs: Logits or means. Shape ``[N, K]``.
        targets: Class indices, shape ``[N]``, or values, shape ``[N, K]``.
        likelihood: ``"classification"`` or ``"regression"``.
        samples: None for an exact square root, with V = K for regression and K - 1 for classification (1 if K is 1);
            otherwise V Monte Carlo columns.
        generator: Generator for the random signs, on the CPU or the device of the outputs.

    Returns:
        Sum over samples of the cross-entropy or the squared error, float64, a scalar, and the columns, shape
        ``[V, N, K]``, as the outputs. All detached.

    Raises:
        ValueError: If targets have the wrong shape, or a class is out of range.
    """
    outputs = outputs.detach()
    count, width = outputs.shape
    check_targets(outputs, targets, likelihood)
    if likelihood == "regression":
        loss = (outputs.double() - targets.double()).square().sum()
        if samples is None:
            eye = torch.eye(width, dtype=outputs.dtype, device=outputs.device)
            return loss, eye[:, None].expand(width, count, width)
        return loss, _signs(samples, outputs, generator) / samples**0.5
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
        return loss, softmax_root(probabilities)
    mixed = _signs(samples, outputs, generator) * probabilities.sqrt()
    return loss, (mixed - probabilities * mixed.sum(2, keepdim=True)) / samples**0.5


def softmax_root(probabilities: Tensor) -> Tensor:
    r"""Return K - 1 columns with :math:`\sum_v s_v s_v^\top = \mathrm{diag}(p) - p p^\top`.

    With :math:`u = \sqrt p` that is :math:`\mathrm{diag}(u) (I - u u^\top) \mathrm{diag}(u)`. The reflection of
    :math:`u` to the axis of the likeliest class gives a basis of the image of the projection in the middle. This avoids
    cancellation, so that the columns of a confident network keep all of their digits.

    Args:
        probabilities: Shape ``[N, K]``, rows of sum 1.

    Returns:
        Shape ``[max(K - 1, 1), N, K]``.
    """
    width = probabilities.shape[1]
    if width == 1:
        return torch.zeros_like(probabilities)[None]
    largest = probabilities.argmax(1)
    columns = torch.arange(width - 1, device=probabilities.device)[:, None]
    columns = columns + (columns >= largest)  # [K - 1, N], the classes but the likeliest
    root = probabilities.sqrt()
    mirror = root + F.one_hot(largest, width).to(root)
    others = root.expand(width - 1, -1, -1).gather(2, columns[:, :, None])  # [K - 1, N, 1]
    halved = 1 + root.gather(1, largest[:, None])  # half of the mirror's squared length
    return root * (F.one_hot(columns, width).to(root) - mirror * (others / halved))


def _signs(samples: int, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return random signs that mix the columns of the exact square root, ``[V, N, K]``.

    For a confident network nearly every mixture is about as long as the root itself. With drawn labels its
    curvature would come from rare labels, and most passes would see almost none of it.
    """
    device = generator.device if generator is not None else outputs.device
    drawn = torch.randint(2, (samples, *outputs.shape), generator=generator, device=device)
    return (2 * drawn - 1).to(outputs)


def pull_back(outputs: Tensor, nodes: list[Tensor], columns: Tensor) -> Iterator[list[Tensor | None]]:
    """Yield gradients of columns at tensors that the outputs were computed from; the graph is kept.

    Args:
        outputs: Shape ``[N, ...]``.
        nodes: Tensors with gradients.
        columns: Vectors to pull back. Shape ``[V, N, ...]``, the rest as the outputs.

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
    """Return the generator, or a new one with a fixed seed for each pass and rank."""
    rank = torch.distributed.get_rank() if ranks() > 1 else 0
    return generator if generator is not None else seeded_generator("curvature", rank)
