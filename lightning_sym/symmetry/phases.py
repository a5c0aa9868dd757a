"""Angles by which an element turns the planes of rotary positions: drawn, put one after the other, undone, applied.

See docs/theory/intertwiners.md, 2.15.
"""

import math

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.elements import Element
from lightning_sym.symmetry.tracing.structure import Structure


def random_phases(structure: Structure, generator: torch.Generator | None) -> Tensor:
    """Draw an angle for each plane, all being equally likely, in [-pi, pi). Shape (phases,), float64."""
    return (2 * torch.rand(structure.phases, dtype=torch.float64, generator=generator) - 1) * math.pi


def phases_of(structure: Structure, element: Element) -> Tensor:
    """Return an element's angles, one per plane of the structure; elements may be without any."""
    return element.phase if len(element.phase) else torch.zeros(structure.phases, dtype=torch.float64)


def phases_after(structure: Structure, second: Element, first: Element) -> Tensor:
    """Return the angles of the element that acts as `first` and then `second`."""
    later = phases_of(structure, second)
    return phases_of(structure, first) + _pulled(structure, later, first.permutation.numpy())


def phases_back(structure: Structure, element: Element) -> Tensor:
    """Return the angles of the element that undoes another one."""
    return -_pulled(structure, phases_of(structure, element), torch.argsort(element.permutation).numpy())


def _pulled(structure: Structure, phase: Tensor, permutation: Ints) -> Tensor:
    """Rename planes of the permuted network to those of the network before: what unit p[j] has, j had."""
    result, turned = phase.clone(), np.flatnonzero(structure.phase_of >= 0)
    came = structure.phase_of[permutation[turned]]
    result[torch.from_numpy(came)] = phase[torch.from_numpy(structure.phase_of[turned])]
    return result


def turn(tensor: Tensor, axis: int, phase: Tensor, first: Ints, second: Ints) -> Tensor:
    """Turn planes of an axis: (x, y) becomes (x cos - y sin, x sin + y cos).

    Args:
        tensor: Floating. Not changed.
        axis: The axis on which the coordinates of planes stand.
        phase: An angle for each plane. Shape (planes,), float64.
        first: Where their first coordinates stand. Shape (planes,).
        second: Where their second ones do. Shape (planes,).

    Returns:
        A new tensor of the same shape, dtype and device.
    """
    where = [torch.from_numpy(place).to(tensor.device) for place in (first, second)]
    x, y = (tensor.index_select(axis, place) for place in where)
    shape = [-1 if own == axis % tensor.ndim else 1 for own in range(tensor.ndim)]
    cosine, sine = (function(phase).reshape(shape).to(tensor) for function in (torch.cos, torch.sin))
    turned = torch.cat([x * cosine - y * sine, x * sine + y * cosine], axis)
    return tensor.index_copy(axis, torch.cat(where), turned)
