"""The Laplace posterior of a network as an object of laplace-torch, for predictions and samples."""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_numbers
from lightning_sym.curvature.blocks import Factors, Likelihood
from lightning_sym.curvature.engines import factors
from lightning_sym.curvature.prior_groups import PriorGroups, parameter_groups

if TYPE_CHECKING:
    from lightning_sym.curvature._laplace_torch import RelaxedLaplace

_MOST_BYTES = 4 * 2**30  # of all dense matrices together; laplace-torch holds two more copies, and their eigenvectors


def to_laplace(
    network: nn.Module,
    loader: Iterable[Sequence[Tensor]],
    likelihood: Likelihood = "classification",
    *,
    log_precisions: Tensor | None = None,
    log_noise: float = 0.0,
    groups: PriorGroups | None = None,
    temperature: float = 1.0,
    engine: str = "autograd",
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> "RelaxedLaplace":
    """Return laplace-torch's ``KronLaplace`` of a network at its present weights, with our factors, ready to use.

    Use it where ``laplace.Laplace(network, ..., hessian_structure="kron")`` ends in ``Found parameters in un-supported
    layers``: it covers all layers that :func:`factors` covers, ours and those that you register.

    Called on inputs it gives the predictive distribution, ``laplace.sample(n)`` draws weights, and
    ``laplace.log_marginal_likelihood(...)`` is that of :class:`Evidence` at the same precisions. It holds a copy of
    the network; changes of the copy do not affect the network.

    Args:
        network: As for :func:`factors`.
        loader: As for :func:`factors`.
        likelihood: ``"classification"`` or ``"regression"``.
        log_precisions: Log precisions of the groups, in the order of ``groups.names``. Shape ``[G]``; default 0.
        log_noise: Logarithm of sigma, for a regression.
        groups: Which parameters share a precision; default ``parameter_groups(network)``, one for each path.
        temperature: Temperature of the posterior, > 0, as for :class:`Evidence`.
        engine: As for :func:`factors`.
        samples: As for :func:`factors`.
        generator: As for :func:`factors`.

    Returns:
        A ``laplace.KronLaplace`` in eval mode. Its ``prior_precision`` has one entry for each parameter tensor.
        Unlike laplace-torch's classes, it refuses ``fit`` (make a new one instead, so that no factors are stale), and
        its evidence has the right derivative for ``sigma_noise``. Anchor positions and lengthscales, which have no
        curvature, are constants.

    Raises:
        ValueError: As :func:`factors`; if precisions do not fit the groups; if a classification is given noise; if
            the dense matrices would be larger than 4 GiB together.

    Note:
        laplace-torch knows one or two dense matrices for a parameter. The block-diagonal A of factored layers is
        written out, ``[C S, C S]``. Blocks with a group axis in B (depthwise filters) become one matrix of all their
        parameters. :class:`Evidence` needs neither. Jacobians, for ``pred_type="glm"``, are those of ``torch.func``;
        their memory grows with the square of the batch.

    References:
        Daxberger et al. (2021), "Laplace Redux", arXiv:2106.14806; docs/theory/curvature.md, 4.2.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3))
        >>> laplace = to_laplace(network, [(torch.randn(5, 2), torch.tensor([0, 1, 2, 0, 1]))])
        >>> laplace(torch.randn(4, 2)).shape, laplace.sample(7).shape
        (torch.Size([4, 3]), torch.Size([7, 9]))
    """
    groups = parameter_groups(network) if groups is None else groups
    if log_precisions is None:
        log_precisions = torch.zeros(len(groups.names))
    if log_precisions.shape != (len(groups.names),) or not log_precisions.isfinite().all():
        raise ValueError(
            f"There are {len(groups.names)} groups of precisions, got log_precisions {log_precisions}; give one finite "
            "number for each, in the order of groups.names."
        )
    if likelihood == "classification" and log_noise != 0:
        raise ValueError(f"A classification has no noise, got log_noise={log_noise}; leave it out.")
    check_numbers("> 0", temperature=temperature)
    found = factors(network, loader, likelihood, engine=engine, samples=samples, generator=generator)
    _check_sizes(found, max(4, next(network.parameters()).element_size()))
    with warnings.catch_warnings():
        # One of the libraries that laplace-torch imports uses torch.jit.script, which is deprecated.
        warnings.simplefilter("ignore")
        from lightning_sym.curvature._laplace_torch import RelaxedLaplace
    by_group = dict(zip(groups.names, log_precisions.detach().double().exp().tolist(), strict=True))
    missing = [name for name in found.blocks if name not in groups.precisions]
    if missing:
        raise ValueError(f"Parameter {missing[0]!r} has a curvature block but no precision group.")
    precisions = {name: by_group[groups.precisions[name]] for name in found.blocks}
    return RelaxedLaplace(network, found, precisions, math.exp(log_noise), temperature)


def _check_sizes(found: Factors, width: int) -> None:
    """Raise unless the dense matrices, of numbers of so many bytes, are of a size that one can work with."""
    sides = {name: block.dense_sides for name, block in found.blocks.items()}
    total = sum(width * side**2 for name in sides for side in sides[name])
    if total > _MOST_BYTES:
        name = max(sides, key=lambda name: max(sides[name]))
        side = max(sides[name])
        raise ValueError(
            f"laplace-torch needs dense matrices of {total / 2**30:.1f} GiB for this network, of which that of "
            f"{name!r} is {side} x {side}, and to_laplace makes {_MOST_BYTES / 2**30:g} GiB at most; use Evidence, "
            "which keeps blocks apart, or freeze such layers with requires_grad_(False)."
        )
