"""Balances what heads put out against what reads it."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.cells import balancing, gram_matrices
from lightning_sym.symmetry.moves.moved import Moved, moved, require_weights
from lightning_sym.symmetry.proof import double_copy
from lightning_sym.symmetry.tracing.structure import Structure

_SETTLED, _MOST_ROUNDS = 1e-12, 100


def balance_heads(symmetry: Symmetry, network: nn.Module, *, check: bool = True) -> Moved:
    r"""Give values and outputs, queries and keys of every head equal Gram matrices.

    The member of least squared norm among those that invertible matrices in the heads make
    (docs/theory/intertwiners.md, 5.5), by positive matrices: what orthogonal ones may still turn stays as it is. In a
    plane of rotary positions, which complex numbers multiply, queries and keys get one norm, and their phase stays.
    Heads whose Gram matrices are singular, and planes of which one side is zero, stay, with a note.

    Args:
        symmetry: Of the network's architecture.
        network: Not changed.
        check: Whether to prove that the outputs stay.

    Returns:
        The network and the element.

    Raises:
        TypeError: If it is no network.
        ValueError: If the network has other tensors or modules than the traced one, or neither units that invertible
            matrices mix nor planes.
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
    structure, identity = symmetry.structure, symmetry.identity()
    if not structure.dense and not structure.phases:
        raise ValueError("no units of the network are mixed by invertible matrices; expected attention with heads")
    tensors = {name: tensor.detach() for name, tensor in symmetry.tensors(double_copy(network)).items()}
    weights = [name for name in tensors if name in symmetry.parameter_names]
    moduli, zeros = _balanced_moduli(structure, {name: tensors[name] for name in weights})
    total, singular = identity.replaced(log_scale=moduli), set[int]()
    tensors = symmetry.acted(total, tensors, shifts=False)
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
        step = identity.replaced(dense=tuple(dense))
        tensors, total = symmetry.acted(step, tensors, shifts=False), symmetry.compose(step, total)
    notes = [f"{len(singular)} heads stay as they are, as what they put out or what reads it has dependent units"]
    notes = notes * bool(singular) + [f"{zeros} planes stay as they are, as queries or keys are 0 there"] * bool(zeros)
    return moved(symmetry, network, total, check=check, notes=notes)


def _balanced_moduli(structure: Structure, tensors: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the logarithms of the scales after which queries and keys have one norm in each plane.

    Args:
        structure: The group.
        tensors: The network's parameters, by name.

    Returns:
        Shape (scales,), float64; and of how many planes one side is zero, which stay.
    """
    forms = structure.magnitudes
    squares = np.zeros((2, forms.shape[1]))
    for slot in structure.slots:
        if slot.offset not in structure.turned_places or slot.tensor not in tensors:
            continue
        _, *coordinates = structure.turned_places[slot.offset]
        at = np.concatenate(coordinates)
        rows = tensors[slot.tensor].double().cpu().movedim(slot.axes[0], 0).reshape(slot.size, -1)
        own = forms[slot.offset + at]  # one scale at each
        np.add.at(squares, ((own.data < 0).astype(int), own.indices), rows.square().sum(1).numpy()[at])
    acting, nonzero = squares.any(0), squares.all(0)
    result = np.zeros(forms.shape[1])
    result[nonzero] = np.log(squares[1, nonzero] / squares[0, nonzero]) / 4
    return torch.from_numpy(result), int((acting & ~nonzero).sum())
