"""Balances the incoming and outgoing weights of heads."""

from torch import nn

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.moves.moved import Moved, moved, require_weights
from lightning_sym.symmetry.proof import double_copy


def balance_heads(symmetry: Symmetry, network: nn.Module, *, check: bool = True) -> Moved:
    r"""Give values and outputs, queries and keys of every head equal Gram matrices.

    The result has the least squared norm among all that GL(d) on the heads can reach (docs/theory/canonical.md,
    5). Positive matrices bring it there, so that rotations of heads stay unchanged. In a rotary pair,
    complex numbers act: queries and keys get equal norms, and the phase stays. Heads with singular Gram matrices, and
    pairs with one zero side, stay unchanged, with a note.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.
        check: Whether to verify numerically that the outputs stay the same.

    Returns:
        The network and the element.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If the network has other tensors or modules than the traced one, or has neither GL(d) blocks nor
            rotary pairs.
        RuntimeError: If the function has changed.

    Example:
        >>> import torch
        >>> from lightning_sym.symmetry.trace import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 4))
        >>> moved, element = balance_heads(trace_symmetry(network, torch.randn(2, 5)), network)
        >>> one, two = (moved[0].weight @ moved[0].weight.T, moved[1].weight.T @ moved[1].weight)
        >>> torch.allclose(one, two, atol=1e-5)
        True
    """
    require_weights(symmetry, network, check=check)
    exact = {name: tensor.detach() for name, tensor in symmetry.tensors(double_copy(network)).items()}
    total, notes, some = symmetry.identity(), list[str](), False
    for factor in symmetry.factors.inwards:
        tensors = symmetry.acted(total, exact, shifts=False)
        found = factor.balanced_heads({name: tensors[name] for name in tensors if name in symmetry.parameter_names})
        if found is not None:
            total = symmetry.compose(symmetry.identity().replaced(**found.parts), total)
            notes, some = [*found.notes, *notes], True
    if not some:
        raise ValueError("invertible matrices mix no units of the network; expected attention with heads")
    return moved(symmetry, network, total, check=check, notes=notes)
