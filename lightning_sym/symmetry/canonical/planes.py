"""The canonical phases of planes: docs/theory/intertwiners.md, 5.6."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools
from lightning_sym.symmetry.tracing.structure import Structure

# A plane whose Gram matrix is a multiple of the identity, up to this relative difference, has no principal axes.
_ROUND = 1e-9


def principal_phases(structure: Structure, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Bools]:
    """Return the angles that turn the planes to the principal axes of the first weights in which they stand.

    There the two coordinates are orthogonal, and the first one is the larger. Half a turn is left, which is a sign.

    Args:
        structure: The group.
        tensors: Parameters, by name.

    Returns:
        Shape (phases,), float64; and which planes have no such axes and are left as they are. Shape (phases,), bool.
    """
    phases = structure.phases
    gram, seen = np.zeros((3, phases)), np.zeros(phases, bool)
    for slot in structure.slots:
        if slot.offset not in structure.turned_places or slot.tensor not in tensors:
            continue
        phase, first, second = structure.turned_places[slot.offset]
        if seen[phase].any():
            continue
        weights = tensors[slot.tensor].detach().double().cpu()
        rows = weights.movedim(slot.axes[0], 0).reshape(slot.size, -1).numpy()
        x, y = rows[first], rows[second]
        for kind, product in enumerate((x * x, y * y, x * y)):
            np.add.at(gram[kind], phase, product.sum(1))
        seen[phase] = True
    apart = gram[0] - gram[1]
    unclear = np.hypot(apart, 2 * gram[2]) <= _ROUND * (gram[0] + gram[1])
    angle = np.where(unclear, 0.0, -np.arctan2(2 * gram[2], apart) / 2)
    return torch.from_numpy(angle), unclear
