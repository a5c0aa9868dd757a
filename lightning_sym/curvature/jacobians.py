"""Compute Jacobians of a network's outputs: by its parameters, for the rank, and by its inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_numbers, check_rows, is_finite
from lightning_sym._distributed import device_of, moved, run_on, wide
from lightning_sym.networks.modes import evaluating, in_precision
from lightning_sym.symmetry.dimension import jacobian_rows
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import copied


@dataclass(frozen=True)
class JacobianRank:
    """Rank of the Jacobian J of a network's outputs by its parameters, on some inputs.

    Attributes:
        parameters: Number of trainable parameters P, the columns of J.
        equations: Number of samples times number of outputs, the rows of J.
        rank: Number of singular values above the tolerance; None if J is too large, see :attr:`note`.
        note: Reason for a missing rank, or a limit of it; empty otherwise.
        above: The smallest singular value that counts, relative to the largest.
        below: The largest one that does not, relative to the largest; 0 if there is none.
    """

    parameters: int
    equations: int
    rank: int | None
    note: str = ""
    above: float = 0.0
    below: float = 0.0

    @property
    def nullity(self) -> int | None:
        """The number of directions that leave the outputs on these inputs alone, to first order: P minus the rank."""
        return None if self.rank is None else self.parameters - self.rank


def jacobian_rank(
    network: nn.Module, inputs: Tensor, *, tolerance: float = 1e-6, max_bytes: int = 2**30
) -> JacobianRank:
    r"""Count how many directions in weight space change a network's outputs on some inputs.

    From the eigenvalues of :math:`J J^\top`, or of :math:`J^\top J`, whichever is smaller, in double precision. These
    are the squares of the singular values, so that singular values below 3e-8 of the largest are rounding;
    :func:`lightning_sym.symmetry.local_dimension` does without squares, at a higher price.

    Args:
        network: Any module that treats samples apart in eval mode. Unchanged.
        inputs: One batch, shape ``[N, ...]``, N >= 1.
        tolerance: Singular values above it times the largest one count. In [3e-8, 1).
        max_bytes: Most memory for J (or for :math:`J^\top J`, if that is smaller). >= 1.

    Returns:
        The rank; without one where it would need more memory.

    Raises:
        ValueError: If an argument is out of range, or the Jacobian is not finite.

    Note:
        ``O(N K P min(N K, P))`` time for K outputs.

    Example:
        >>> jacobian_rank(nn.Linear(3, 2), torch.randn(50, 3)).nullity
        0
    """
    check_numbers("in [3e-8, 1)", tolerance=tolerance)
    check_integers(max_bytes=max_bytes)
    if not inputs.ndim or not len(inputs):
        raise ValueError(f"inputs must be a batch of at least one sample, got shape {list(inputs.shape)}.")
    exact = in_precision(copied(network), wide(device_of(network))).eval()
    given = _widened(exact, inputs)
    with torch.no_grad():
        equations = check_rows(run_on(exact, given)).numel()
    parameters = sum(p.numel() for p in exact.parameters() if p.requires_grad)
    if not parameters:
        raise ValueError("the network has no trainable parameters; expected some with requires_grad=True.")
    size = min(equations, parameters)
    needed = 8 * (parameters**2 if parameters < equations else equations * parameters)
    if needed > max_bytes:
        note = (
            f"no rank: the Jacobian of {equations} outputs by {parameters} parameters needs {needed / 2**30:.2g} GiB, "
            f"more than {max_bytes / 2**30:.2g}; take fewer inputs, or raise max_bytes"
        )
        return JacobianRank(parameters, equations, None, note)
    with torch.enable_grad():
        rows = jacobian_rows(exact, Call((given,)), lambda outputs: outputs)
        if parameters < equations:
            square = torch.zeros(parameters, parameters, dtype=given.dtype, device=given.device)
            for block in rows:
                square += block.T @ block
        else:
            whole = torch.cat(list(rows))
            square = whole @ whole.T
    if not bool(square.isfinite().all()):
        raise ValueError("The Jacobian is not finite; check weights and inputs for NaN and infinity.")
    singular = torch.linalg.eigvalsh(square).flip(0).clamp(min=0).sqrt()
    relative = (singular / singular[0] if float(singular[0]) > 0 else singular).cpu()
    rank = int((relative > tolerance).sum())
    return JacobianRank(
        parameters,
        equations,
        rank,
        "the rank is as large as it can be with so few inputs, and grows with more"
        if rank == equations < parameters
        else "",
        above=float(relative[rank - 1]) if rank else 0.0,
        below=float(relative[rank]) if rank < size else 0.0,
    )


def input_jacobians(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the Jacobian of every sample's outputs by its own input.

    Two networks with the same function have the same Jacobians.

    Args:
        network: Any module that treats samples apart in eval mode. Unchanged.
        inputs: Shape ``[N, ...]``, floating, with D entries per sample.

    Returns:
        Shape ``[N, K, D]`` for K outputs, in the network's dtype and on its device.

    Raises:
        ValueError: If the inputs are not floating.

    Example:
        >>> network = nn.Linear(3, 2)
        >>> torch.equal(input_jacobians(network, torch.zeros(1, 3))[0], network.weight)
        True
    """
    if not inputs.is_floating_point():
        raise ValueError(f"inputs must be floating, as Jacobians by {inputs.dtype} are not defined.")
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), inputs.dtype)
    with torch.enable_grad(), evaluating(network):
        given = moved(inputs.detach(), device_of(network)).to(dtype, copy=True).requires_grad_()
        outputs = check_rows(run_on(network, given), given).reshape(len(given), -1)
        if not is_finite(outputs):
            raise ValueError("The network's outputs are not finite; check weights and inputs for NaN and infinity.")
        # As samples do not depend on one another, the gradient of a sum over them holds those of all.
        found = [torch.autograd.grad(each.sum(), given, retain_graph=True)[0] for each in outputs.unbind(1)]
    return torch.stack(found, 1).flatten(2).detach()


def _widened(network: nn.Module, inputs: Tensor) -> Tensor:
    given = moved(inputs.detach(), device_of(network))
    return given.to(wide(given.device)) if given.is_floating_point() else given
