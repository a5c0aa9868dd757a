"""Rotary positions: constants that rotate planes of coordinates, by different angles at each position.

Conventions differ (halves, neighbours, complex numbers, matrices), but a rotary embedding always combines each
coordinate x_c with its partner. The result is x_c own_c + x_partner other_c, with constants own and other. The normal
form spells it as one operation, `rotary`. See docs/theory/transformers.md, 5.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.graph.coordinates import varies
from lightning_sym.symmetry.tracing.graph.running import is_close
from lightning_sym.symmetry.tracing.labelling.rules import register_rule
from lightning_sym.symmetry.tracing.labelling.values import Value
from lightning_sym.symmetry.tracing.labelling.vocabulary import Trace

_ROUNDING = 1e-12  # relative difference between equal entries of a table


@torch.library.custom_op("lightning_sym::rotary", mutates_args=())
def rotary(value: Tensor, own: Tensor, other: Tensor, partner: Sequence[int], source: Sequence[int]) -> Tensor:
    """Rotate planes of coordinates, which index the last axis.

    Args:
        value: Shape (..., coordinates).
        own: The factor of each coordinate. Broadcasts against `value`.
        other: The factor of its partner. Broadcasts against `value`.
        partner: The partner of each coordinate; outside all planes, the coordinate itself.
        source: The input coordinate whose unit each output coordinate keeps: itself for a rotation, its partner for a
            reflection.
    """
    own, other = own.to(value.dtype), other.to(value.dtype)
    return own * value + other * value[..., list(partner)]


@rotary.register_fake
def _(value: Tensor, own: Tensor, other: Tensor, partner: Sequence[int], source: Sequence[int]) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


class Planes(NamedTuple):
    """The planes that a function rotates; see `rotary`.

    Attributes:
        axis: The axis of the coordinates.
        own: Shape of the value, with size 1 along constant axes.
        other: Shape as for ``own``.
        partner: Shape (coordinates,).
        source: Shape (coordinates,).
    """

    axis: int
    own: Tensor
    other: Tensor
    partner: Tensor
    source: Tensor

    @property
    def alone(self) -> Tensor:
        """The coordinates outside all planes."""
        return (self.partner == torch.arange(len(self.partner))).nonzero().ravel()

    @property
    def rotated(self) -> Tensor:
        """The coordinates of the planes."""
        return (self.partner != torch.arange(len(self.partner))).nonzero().ravel()

    def without_rest(self) -> "Planes":
        """Return the planes, restricted to the rotated coordinates."""
        place = torch.zeros_like(self.partner)
        place[self.rotated] = torch.arange(len(self.rotated))
        own, other = (part.expand(self._whole(part)).index_select(self.axis, self.rotated) for part in self[1:3])
        return Planes(self.axis, own, other, place[self.partner[self.rotated]], place[self.source[self.rotated]])

    def _whole(self, part: Tensor) -> list[int]:
        return [len(self.partner) if axis == self.axis else size for axis, size in enumerate(part.shape)]


def find_planes(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Planes | None:
    r"""Find the planes that a function rotates, if it has no other effect.

    The group of a plane with matrices :math:`M_p` at positions p is the commutant: all A with :math:`A M_p = M_p A` for
    all p, or :math:`A' M_p = M_p A` after a reflection. For multiples of rotations it consists of the complex numbers
    :math:`a + b J`, for any angles.

    Args:
        function: Linear; takes and returns values of one shape.
        shape: This shape.

    Returns:
        The planes; None if the function has another effect, or is equal at all positions.
    """
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    expected = function(value)
    for axis in reversed(range(len(shape))):
        partner = _partners(function, axis, shape) if shape[axis] > 1 else None
        found = None if partner is None else _planes(function, axis, partner, shape)
        if partner is not None and found is not None:
            made = found.own * value + found.other * value.index_select(axis, partner)
            if is_close(made, expected):
                return found
    return None


def _line(numbers: Tensor, axis: int, shape: tuple[int, ...]) -> Tensor:
    """Spread numbers along one axis, constant along all others."""
    return numbers.double().reshape(-1, *[1] * (len(shape) - axis - 1)).expand(shape).clone()


def _partners(function: Callable[[Tensor], Tensor], axis: int, shape: tuple[int, ...]) -> Tensor | None:
    """Return the partner of each coordinate, from x_c own + x_partner other for x = 1, c and c squared."""
    size = shape[axis]
    numbers = torch.arange(size, dtype=torch.float64) / size
    line = _line(numbers, axis, shape)
    total, first, second = (function(own) for own in (torch.ones_like(line), line, line.square()))
    by_difference = first - total * line  # other * (partner - own)
    place = (second - total * line.square()) / by_difference - line
    told = by_difference.abs() > 1e-6 * float(total.abs().max() + by_difference.abs().max())
    seen = told.movedim(axis, 0).reshape(size, -1)
    best = seen.long().argmax(1, keepdim=True)
    partner = (place.movedim(axis, 0).reshape(size, -1).gather(1, best)[:, 0] * size).nan_to_num(-1).round().long()
    alone = torch.arange(size)
    partner = partner.where(seen.any(1), alone)
    if bool(((partner < 0) | (partner >= size)).any()) or not torch.equal(partner[partner], alone):
        return None
    return None if torch.equal(partner, alone) else partner


def _planes(function: Callable[[Tensor], Tensor], axis: int, partner: Tensor, shape: tuple[int, ...]) -> Planes | None:
    """Return the planes if the matrix of each pair of partners is a multiple of a rotation or reflection."""
    first = partner > torch.arange(len(partner))
    sides = [_line(own, axis, shape).bool() for own in (first, ~first)]
    made = [function(side.double()) for side in sides]
    own, other = (torch.where(side, made[0], made[1]) for side in sides)
    room = _ROUNDING * float(max(own.abs().max(), other.abs().max()))
    a, b = (part.movedim(axis, 0).reshape(len(partner), -1) for part in (own, other))
    d, c = a[partner], b[partner]
    turns = ((a - d).abs().amax(1) <= room) & ((b + c).abs().amax(1) <= room)
    mirrors = ((a + d).abs().amax(1) <= room) & ((b - c).abs().amax(1) <= room)
    alone = partner == torch.arange(len(partner))  # coordinates outside all planes must pass unchanged
    if not bool((turns ^ mirrors).all()) or bool((a[alone] != 1).any()):
        return None
    own, other = (_narrowed(part, room) for part in (own, other))
    if all(part.numel() == part.shape[axis] for part in (own, other)) or not bool(own.any()):
        return None
    return Planes(axis, own, other, partner, torch.where(turns, torch.arange(len(partner)), partner))


def _narrowed(part: Tensor, room: float) -> Tensor:
    """Reduce axes along which all entries are equal to size 1."""
    for axis, size in enumerate(part.shape):
        if size > 1 and float((part - part.narrow(axis, 0, 1)).abs().max()) <= room:
            part = part.narrow(axis, 0, 1).clone()  # releases the full table
    return part


@register_rule("lightning_sym::rotary")
def _rotated(
    trace: Trace, value: Value, own: Value, other: Value, partner: Sequence[int], source: Sequence[int]
) -> Value:
    """Let complex numbers act on the planes: both coordinates have the same scale."""
    constraints, axis = trace.constraints, value.ndim - 1
    table = torch.complex(own.concrete, other.concrete)  # type: ignore[arg-type]
    if len(value.labels) != 1 or axis not in value.labels[0].axes:
        value = trace.join(value, Value(value.shape, concrete=table.expand(value.shape)), product=True)
        return trace.join(value, trace.move(value, lambda t: t[..., list(partner)]), product=False)
    label = constraints.resolve(value.labels[0])
    place = np.arange(label.size).reshape(label.atom.shape)
    across = place[..., list(partner)]
    first, second = place[place < across], across[place < across]
    atom, scale = label.atom.ravel(), label.scale.ravel()
    pair = atom[first], atom[second]
    constraints.turned.append(pair)
    copies = tuple(constraints.copied_from(part) for part in pair)
    if (copies[0] != pair[0]).any():  # rotated copies are copies of rotated units
        constraints.turned.append((copies[0], copies[1]))
    constraints.equate([(scale[first], 1.0), (scale[second], -1.0)])
    # Planes with the same angles may be permuted.
    table = table[..., [min(both) for both in enumerate(partner)]].expand(value.shape)
    with constraints.unrestricted():
        trace.beside_constant(label, Value(value.shape, concrete=table))
    constraints.restricted.append(np.concatenate(pair))
    others = [axis for axis in range(value.ndim) if axis not in label.axes]
    if any(varies(table, axis) for axis in others):  # several angles
        constraints.planes.append(pair)
    return Value(value.shape, (label.moved(label.axes, lambda part: part[..., list(source)]),))
