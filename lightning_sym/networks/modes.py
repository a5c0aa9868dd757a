"""Train and eval mode, precision and differentiability of a network."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

T = TypeVar("T")
_STOPS = (torch.detach, Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network in eval mode, and restore the mode of every part at the end, also after an error."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def attributes_kept(network: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules after the block, including containers."""
    kept = {module: dict(vars(module)) for module in network.modules()}
    try:
        with containers_kept(network):
            yield
    finally:
        for module, attributes in kept.items():
            vars(module).clear()
            vars(module).update(attributes)


@contextmanager
def containers_kept(network: nn.Module) -> Iterator[None]:
    """Restore the dictionaries and lists that modules fill during a forward pass (LeViT: biases by resolution)."""
    caches = [held for module in network.modules() for held in vars(module).values() if type(held) in (dict, list)]
    before = [held.copy() for held in caches]
    try:
        yield
    finally:
        for held, content in zip(caches, before, strict=True):
            held.clear()
            if isinstance(held, dict):
                held.update(content)
            else:
                held.extend(content)


def for_loss(values: T) -> T:
    """Return outputs or targets as losses take them.

    Tensors in half precision become float32, as their mean loss would have two digits; integers become int64.
    """

    def widened(value: Any) -> Any:
        dtype = value.dtype if isinstance(value, Tensor) else None
        if dtype in (torch.float16, torch.bfloat16):
            return value.float()
        return value.long() if dtype in (torch.int8, torch.int16, torch.int32) else value

    found: T = tree_map(widened, values)
    return found


@contextmanager
def loss_errors(outputs: Any, targets: Any) -> Iterator[None]:
    """Raise errors of a loss as a ``ValueError`` that names the shapes of outputs and targets."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError, UserWarning) as error:
        said = " ".join(str(error).split())[:200].rstrip(".")
        shown = [
            f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"in a {type(value).__name__}"
            for value in (outputs, targets)
        ]
        kind = f" and type {targets.dtype}" if isinstance(targets, Tensor) else ""
        raise ValueError(
            f"loss cannot be computed for outputs {shown[0]} and targets {shown[1]}{kind} ({said}); give targets as "
            "the loss takes them."
        ) from error


def batch_loss(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Tensor:
    """Compute the mean loss of a batch.

    Raises:
        ValueError: If it cannot be computed, or is no single number.
    """
    outputs, targets = for_loss((outputs, targets))
    with loss_errors(outputs, targets), warnings.catch_warnings():
        warnings.filterwarnings("error", "Using a target size")  # it broadcasts, and compares all pairs
        found = loss(outputs, targets)
    if not isinstance(found, Tensor) or found.ndim:
        got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"The loss of a batch must be a tensor with one number, got {got}; return its mean.")
    return found


def in_precision(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert floating parameters and buffers to a dtype, in place.

    Complex ones are unchanged: ``Module.to`` would drop their imaginary part.

    Args:
        network: Any module.
        dtype: A floating dtype.

    Returns:
        The network.
    """
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return network


@contextmanager
def twice_differentiable(*, functional: bool = False) -> Iterator[None]:
    """Compute attention, weight norms and distances by plain operations, which support double and forward derivatives.

    They also support ``vmap``. The second derivative of torch's fused weight norm is wrong, as it treats norms as
    constants.

    Args:
        functional: Whether to write out layer and instance norms as well. The reverse derivatives of ``torch.func``'s
            ``jvp`` and ``vmap(jacrev)`` are wrong for the fused ones, by 1 to 60 percent and without an error.

    Note:
        Names in ``torch`` are replaced in all threads until the context ends; names imported before keep the fused
        functions.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    # The hooks of torch.nn.utils.weight_norm call the name in their module, which sys.modules holds: in torch.nn.utils
    # the function of the same name hides it.
    plain: list[tuple[dict[str, Any], str, Callable[..., Any]]] = [
        (vars(module), "_weight_norm", _plain_weight_norm)
        for module in (torch, sys.modules["torch.nn.utils.weight_norm"])
    ]
    if functional:
        norms = (_plain_layer_norm, _plain_native_layer_norm, _plain_instance_norm)
        plain += [(vars(torch), own.__name__.removeprefix("_plain_"), own) for own in norms]
    fused = [(names, name, names[name]) for names, name, _ in plain]
    torch.backends.mha.set_fastpath_enabled(False)
    for names, name, own in plain:
        names[name] = own
    try:
        with sdpa_kernel(SDPBackend.MATH), PlainDistances():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for names, name, own in fused:
            names[name] = own


class PlainDistances(TorchFunctionMode):
    """Computes ``torch.cdist`` by plain operations, as ``vmap`` of the fused one's derivative is wrong."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (plain_cdist if function is torch.cdist else function)(*args, **(kwargs or {}))


class PassedGradients(TorchFunctionMode):
    """Lets gradients pass where a network stops them: its outputs depend on these weights nevertheless."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _STOPS:
            return args[0]
        with torch.enable_grad():
            return function(*args, **(kwargs or {}))


def plain_cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    """Return the distances between all pairs of rows, as ``torch.cdist``; `compute_mode` has no effect."""
    distances: Tensor = torch.linalg.vector_norm(x1[..., :, None, :] - x2[..., None, :, :], p, -1)
    return distances


def _plain_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    weight: Tensor = v * (g / torch.norm_except_dim(v, 2, dim))
    return weight


def _plain_layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _affine(_standardised(x, tuple(range(-len(shape), 0)), eps), weight, bias)


def _plain_native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    axes = tuple(range(-len(shape), 0))
    deviation = (x.var(axes, correction=0, keepdim=True) + eps).rsqrt()
    return _plain_layer_norm(x, shape, weight, bias, eps), x.mean(axes, keepdim=True), deviation


def _plain_instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    wide = [-1, *([1] * (x.dim() - 2))]
    if use_input_stats:  # running statistics do not change, as no derivative depends on them
        y = _standardised(x, tuple(range(2, x.dim())), eps)
    elif running_mean is None or running_var is None:
        raise ValueError("an instance norm without running statistics needs those of its input.")
    else:
        y = (x - running_mean.view(wide)) * (running_var.view(wide) + eps).rsqrt()
    return _affine(y, *(None if own is None else own.view(wide) for own in (weight, bias)))


def _standardised(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(axes, keepdim=True)
    return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
