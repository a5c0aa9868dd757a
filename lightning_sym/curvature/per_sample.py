"""The trace of the Gauss-Newton matrix from the gradients of single samples."""

import math

import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

from lightning_sym._distributed import rank, summed, together, wide
from lightning_sym._random import derive_seed
from lightning_sym.curvature.operators import CurvatureOperator

_AT_ONCE = 2**24  # numbers that all gradients of some samples are together
_ROUNDING = 1e-5  # of the largest eigenvalue of a loss's second derivative


def gauss_newton_trace(
    operator: CurvatureOperator, passes: int, generator: torch.Generator
) -> tuple[float, float, float]:
    r"""Estimate the trace of the Gauss-Newton matrix of an operator's network, data and loss, with its standard error.

    .. math::
        \mathrm{tr}\, G = \frac1N \sum_n \sum_k \pm \| J_n^\top s_{nk} \|^2
        = E\, \frac1N \sum_n \pm \Big\| J_n^\top \sum_k z_{nk} s_{nk} \Big\|^2,
        \qquad \nabla^2_f \ell_n = \sum_k \pm s_{nk} s_{nk}^\top,

    with random signs z. Only products between outputs of one sample are noise, and that averages out over
    the samples. With a random z for the weights, all products between samples are noise as well
    (docs/theory/spectra.md, 3).

    Args:
        operator: An operator of either kind. To be called on every process together.
        passes: How often the gradients of all samples are taken. >= 2.
        generator: Generator of the signs, on the CPU, in the same state on each rank; each draws others.

    Returns:
        Estimate, standard error and its degrees of freedom, by Welch and Satterthwaite.

    Raises:
        ValueError: If the network mixes samples, or ``torch.func`` cannot take the gradient of one sample.
    """
    drawn = int(torch.randint(2**62, (), generator=generator))
    own = torch.Generator().manual_seed(derive_seed("samples", drawn, rank()))
    # Sums over the samples of this process: of means over passes, of their variances, of the squares of these.
    sums = torch.zeros(3, dtype=wide(operator.device), device=operator.device)

    def add() -> None:
        for x, y in operator.batches():
            values = torch.stack([_squares(operator, x, y, own) for _ in range(passes)])
            spread = values.var(0) / passes
            sums.add_(torch.stack([values.mean(0).sum(), spread.sum(), spread.square().sum()]))

    together(add)
    total = summed(sums)
    freedom = (passes - 1) * float(total[1]) ** 2 / float(total[2]) if total[2] > 0 else math.inf
    return float(total[0]) / operator.samples, math.sqrt(float(total[1])) / operator.samples, freedom


def _squares(operator: CurvatureOperator, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Return each sample's part of the trace, with random signs. Shape ``[N]``."""
    network, loss = operator.network, operator.loss
    weights = {name: network.get_parameter(name).detach() for name in operator.names}

    def squared(one: Tensor, direction: Tensor) -> Tensor:
        def along(own: dict[str, Tensor]) -> Tensor:
            outputs: Tensor = functional_call(network, own, (one[None],))[0]
            return (outputs * direction).sum()

        slopes = grad(along)(weights)
        return torch.stack([slope.square().sum() for slope in slopes.values()]).sum()

    def compared(one: Tensor, target: Tensor) -> Tensor:
        return loss(one[None], target[None])

    with torch.no_grad():
        outputs = network(x)
        alone = network(x[:1])
    if not torch.allclose(alone, outputs[:1], rtol=1e-3, atol=1e-5 * float(outputs.abs().max())):
        raise ValueError("the network mixes the samples of a batch, so that none has gradients; use another method.")
    try:
        second = vmap(jacrev(grad(compared)))(outputs, y)
        values, axes = torch.linalg.eigh(second.reshape(len(x), outputs[0].numel(), -1).to(wide(x.device)))
        signs = 2 * torch.randint(2, values.shape, generator=generator).to(values) - 1
        found = torch.zeros(len(x), dtype=values.dtype, device=values.device)
        for sign in (1.0, -1.0):
            # Where the loss curves down, as some losses do, its part counts as negative.
            sizes = torch.where(sign * values > _ROUNDING * values.abs().max(), values.abs(), 0.0).sqrt()
            if bool(sizes.any()):
                sides = (axes @ (sizes * signs)[:, :, None])[:, :, 0].reshape(outputs.shape).to(outputs)
                chunk = max(1, _AT_ONCE // operator.size)
                found += sign * vmap(squared, chunk_size=chunk)(x, sides)
    except RuntimeError as error:
        reason = str(error).split(". ")[0].splitlines()[0]
        raise ValueError(
            f"torch.func cannot take the gradients of single samples ({reason}); use method='hutchinson'."
        ) from error
    return found
