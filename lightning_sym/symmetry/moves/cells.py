"""Balances what heads put out against what reads it."""

from dataclasses import replace

from torch import nn

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.cells import balancing, gram_matrices
from lightning_sym.symmetry.moves.moved import Moved, moved, require_weights
from lightning_sym.symmetry.proof import double_copy
from lightning_sym.symmetry.tracing.capture import state_tensors

_SETTLED, _MOST_ROUNDS = 1e-12, 100


def balance_heads(symmetry: Symmetry, network: nn.Module, *, check: bool = True) -> Moved:
    r"""Give values and outputs, queries and keys of every head equal Gram matrices.

    The member of least squared norm among those that invertible matrices in the heads make
    (docs/theory/intertwiners.md, 5.5), by positive matrices: what orthogonal ones may still turn stays as it is. Heads
    whose Gram matrices are singular stay, with a note; so do planes of rotary positions.

    Args:
        symmetry: Of the network's architecture.
        network: Not changed.
        check: Whether to prove that the outputs stay.

    Returns:
        The network and the element.

    Raises:
        TypeError: If it is no network.
        ValueError: If the network has other tensors or modules than the traced one, or no units that invertible
            matrices mix.
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
    require_weights(symmetry, network)
    structure, identity = symmetry.structure, symmetry.identity()
    if not structure.dense:
        raise ValueError("no units of the network are mixed by invertible matrices; expected attention with heads")
    tensors = {name: tensor.detach() for name, tensor in state_tensors(double_copy(network)).items()}
    weights = [name for name in tensors if name in symmetry.parameter_names]
    total, singular = identity, set[int]()
    for _ in range(_MOST_ROUNDS):
        dense, largest = list(identity.dense), 0.0
        grams = gram_matrices(structure, {name: tensors[name] for name in weights})
        for cell, (out, read) in enumerate(zip(*grams, strict=True)):
            found = balancing(out, read)
            if found is None:
                singular.add(cell)
                continue
            largest = max(largest, float((found - dense[cell]).abs().max()))
            dense[cell] = found
        if largest <= _SETTLED:
            break
        step = replace(identity, dense=tuple(dense))
        tensors, total = symmetry.act_on(step, tensors, shifts=False), symmetry.compose(step, total)
    note = f"{len(singular)} heads stay as they are, as what they put out or what reads it has dependent units"
    return moved(symmetry, network, total, check=check, notes=[note] if singular else [])
