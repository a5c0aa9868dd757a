"""Train and eval mode, precision and differentiability of a network."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


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
def twice_differentiable() -> Iterator[None]:
    """Compute attention and weight norms by plain operations, which support double and forward differentiation.

    They support ``vmap``, too. The second derivative of torch's fused weight norm is wrong: it takes the norms for
    constants.
    """
    fast, names = torch.backends.mha.get_fastpath_enabled(), vars(torch)
    fused = names["_weight_norm"]
    torch.backends.mha.set_fastpath_enabled(False)
    names["_weight_norm"] = _plain_weight_norm
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        names["_weight_norm"] = fused


def _plain_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    weight: Tensor = v * (g / torch.norm_except_dim(v, 2, dim))
    return weight
