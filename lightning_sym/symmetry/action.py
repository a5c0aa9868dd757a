"""What an element does: to parameters, buffers and an optimiser's state, and to the values inside the network."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_sym._distributed import wide
from lightning_sym.symmetry.arrays import Floats, Ints, apart, odd, on_axes, together
from lightning_sym.symmetry.described import listed
from lightning_sym.symmetry.elements import Element, Tap
from lightning_sym.symmetry.intertwiners import GroupElement
from lightning_sym.symmetry.phases import phases_of, turn
from lightning_sym.symmetry.rearranging import Summand, rearranged
from lightning_sym.symmetry.tracing.structure import Slot, Structure
from lightning_sym.symmetry.views import ConvertedTensors

# By which power of a weight's scale an optimiser's state moves.
_POWERS = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "grad_avg", "prev"), -1.0),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), -2.0),
    "acc_delta": 2.0,
}

NO_MATRIX = torch.zeros(0, 0, dtype=torch.float64)


def _exact(tensor: Tensor) -> Tensor:
    """Return a floating vector in double precision, any other tensor as it is."""
    exact = wide(tensor.device)
    vector = tensor.ndim == 1 and tensor.is_floating_point() and tensor.dtype != exact
    return tensor.detach().to(exact) if vector else tensor


def _powered(scale: Floats, power: float) -> Floats:
    """Raise magnitudes to a power; odd and zeroth powers keep the sign."""
    powered: Floats = np.abs(scale) ** power
    return powered if power in (2.0, -2.0) else np.sign(scale) * powered


@dataclass(frozen=True, eq=False)
class ActivationAction:
    r"""What an element does to a value in the network, made by `Symmetry.on_activations`: :math:`v' = A (v + t) + c`.

    Attributes:
        parts: By the value's axes on which units live: the element that acts there, and what is added after it.
            Usually one axis, the channels, and nothing to add; none where nothing acts. Over several axes
            together the element acts on the positions in row-major order; () is one unit that fills the value. What
            is added has shape ``(positions,)``.
        shift: What shifts of biases add before, of a shape that broadcasts to the value's; None if nothing.
    """

    parts: Mapping[tuple[int, ...], tuple[GroupElement, Tensor | None]]
    shift: Tensor | None = None

    @property
    def element(self) -> GroupElement:
        """The one element that acts, where the units live on one axis and nothing is added.

        Raises:
            ValueError: If units live on several axes or none, or something is added; :meth:`apply` does it all.
        """
        if len(self.parts) != 1 or any(len(axes) != 1 for axes in self.parts):
            raise ValueError(
                f"units live on the axes {list(self.parts)} of this value, so that no one matrix acts on its channels; "
                "use apply."
            )
        ((element, added),) = self.parts.values()
        if self.shift is not None or (added is not None and bool(added.any())):
            raise ValueError(
                "something is added here, which no matrix does; use apply, or an element without shifts: "
                "sample(shifts=False)."
            )
        return element

    def apply(self, values: Tensor) -> Tensor:
        """Return the value of the changed network, from that of the network as it was.

        Args:
            values: A batch of any size, of the axes that the tap has; floating, on any device.

        Returns:
            A new tensor of the same shape, dtype and device.
        """
        if self.shift is not None:
            values = values + self.shift.to(values)
        for axes, (element, added) in self.parts.items():
            last = tuple(range(values.ndim - len(axes), values.ndim))
            moved = values.movedim(axes, last)
            shape = moved.shape
            moved = moved.reshape(*shape[: values.ndim - len(axes)], -1) if axes else moved[..., None]
            moved = element.to(device=values.device).apply(moved)
            if added is not None:
                moved = moved + added.to(moved)
            values = moved.reshape(shape).movedim(last, axes)
        return values


class Action:
    """What one element does.

    Args:
        structure: The group.
        element: The element.
    """

    def __init__(self, structure: Structure, element: Element) -> None:
        self.structure, self.element = structure, element
        self._gains: dict[str, Tensor] = {}

    @cached_property
    def scale(self) -> Floats:
        """For each position of all slots by what it is multiplied, before it moves."""
        scale = np.ones(self.structure.magnitudes.shape[0])
        if bool(self.element.log_scale.any()):
            scale = np.exp(self.structure.magnitudes @ self.element.log_scale.numpy())
        if bool((negative := self.element.sign < 0).any()):
            flips = self.structure.signs @ negative.numpy().astype(np.float64)
            scale = np.where(odd(flips), -scale, scale)
        return scale

    @cached_property
    def source(self) -> Ints:
        """For each position of all slots, the position whose content it gets."""
        source = np.arange(self.structure.magnitudes.shape[0])
        permutation = self.structure.comes(self.element.permutation.numpy())
        for orbit, (units, columns) in enumerate(zip(self.structure.orbits, self.structure.columns, strict=True)):
            if self.structure.copies_of(orbit) or not np.array_equal(permutation[units], units):
                source[columns] = self.structure.arriving(orbit, "columns", permutation)
        return source

    def source_in(self, slot: Slot) -> Ints:
        """For each position of a slot, the position of that slot whose content it gets."""
        found: Ints = self.source[slot.rows] - slot.offset
        return found

    def on_activations(self, tap: Tap, tensors: Mapping[str, Tensor] | None = None) -> ActivationAction:
        """Return what the element does to a value inside the network, if the structure is that of these.

        Args:
            tap: The value.
            tensors: The network's parameters before, where they are needed.
        """
        parts = {}
        for slot in tap.seen:
            source, scale = self.source_in(slot), self.scale[slot.rows]
            element = GroupElement._of(torch.from_numpy(source), torch.from_numpy(scale))
            self._require_planes(tap, slot)
            if self._is_mixed(slot) or self._is_rotated(slot) or self._is_turned(slot):
                if tap.squared and self._is_rotated(slot):
                    raise ValueError(
                        f"{tap.name} holds squares of units that the element rotates, on which no matrix acts; "
                        "expected another tap, or an element without rotations: sample(mixing=False)"
                    )
                mixed = self._mixed(torch.eye(len(source), dtype=torch.float64), slot, 0)
                mixed = self._turned(self._rotated(mixed, slot, 0), slot, 0)
                element = GroupElement._of_dense(element.apply(mixed, dim=0))
            if self._is_tilted(slot):
                tilted = self._tilted(torch.eye(len(source), dtype=torch.float64), slot, 0)
                element = GroupElement._of_dense(element.apply(tilted, dim=0))
            added = tap.offset * torch.from_numpy(scale[source] < 0).double() if tap.offset else None
            parts[slot.axes] = (element, added)
        return ActivationAction(parts, self._shown(tap, tensors))

    def _shown(self, tap: Tap, tensors: Mapping[str, Tensor] | None) -> Tensor | None:
        """Return what shifts add to a value; None for nothing."""
        space, shown, element = self.structure.shifts, tap.shown, self.element.shift
        if not shown or not bool(element.any()):
            return None
        if space.shows(element, shown.unknown):
            raise ValueError(
                f"the element's shifts add a multiple of ones to {tap.name} that depends on the input (what reads it "
                "does not see that); expected an element without shifts: sample(shifts=False)"
            )
        if shown.at is None or not space.shows(element, shown.at):
            return None
        if tensors is None and (needed := space.needed(shown.at)):
            raise ValueError(
                f"what shifts add to {tap.name} depends on {listed(sorted(needed))}; expected the network, too, or an "
                "element without shifts: sample(shifts=False)"
            )
        located = space.generic if tensors is None else space.at(tensors)
        added = torch.from_numpy(located.known(element)[shown.at])
        return added if bool(added.any()) else None

    def on_thin(self, name: str, values: Tensor, axes: Collection[int], lead: int = 0) -> Tensor:
        """Return what the linear part makes of what is added to a tensor, on some of its axes.

        Args:
            name: The tensor.
            values: What is added, float64: behind some leading axes the tensor's, with size 1 where it is the same
                everywhere, and stays so.
            axes: The axes on which the linear part acts.
            lead: How many axes come before.
        """
        for slot in self.structure.slots_of.get(name, ()):
            if len(slot.axes) > 1 or not (slot.axes[0] in axes if slot.axes else 0 in axes or values.ndim == lead):
                continue
            source = self.source_in(slot)
            scale = torch.from_numpy(self.scale[slot.rows][source])
            if not slot.axes or values.shape[lead + slot.axes[0]] < slot.size:
                values = values * float(scale[0])
                continue
            at = lead + slot.axes[0]
            values = self._by_matrices(values, slot, at)
            shape = [-1 if axis == at else 1 for axis in range(values.ndim)]
            values = values.index_select(at, torch.from_numpy(source)) * scale.reshape(shape)
        return values

    # On parameters and buffers.

    def on_weights(self, tensors: Mapping[str, Tensor], *, shifted: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield what becomes of the parameters and buffers that move, one after the other.

        Args:
            tensors: Parameters and buffers, by name.
            shifted: As for :meth:`moved`.
        """
        self.learn_gains(tensors)
        added = self.summands(tensors, shifted=shifted)
        for name, tensor in tensors.items():
            if name in self.structure.slots_of:
                yield name, self.moved(tensor, name, shifted=shifted, added=added.get(name, ()))

    def summands(self, tensors: Mapping[str, Tensor], *, shifted: bool = True) -> dict[str, list[Summand]]:
        """Return what is added to tensors before they move, by name; the arguments are those of :meth:`on_weights`."""
        tensors = ConvertedTensors(tensors, _exact)
        added: dict[str, list[Summand]] = {}
        if shifted and bool(self.element.shift.any()):
            added = self.structure.shifts.at(tensors).summands(self.element.shift)
        for name, summand in self._added(tensors).items():
            added.setdefault(name, []).append(Summand(summand))
        return added

    def moved(
        self, tensor: Tensor, name: str, *, power: float = 1.0, shifted: bool = True, added: Sequence[Summand] = ()
    ) -> Tensor:
        """Return what becomes of one tensor.

        Args:
            tensor: A parameter or buffer, or as many numbers.
            name: Its name.
            power: Power of the weights' scales; -1 for gradients, -2 for their squares.
            shifted: Whether to move running variances as evaluation asks for: v' = s^2 (v + eps) - eps.
            added: What is added before.
        """
        if (exact := _exact(tensor)) is not tensor:  # what is added may cancel; the result is rounded once
            return self.moved(exact, name, power=power, shifted=shifted, added=added).to(tensor)
        slots, added = self.structure.slots_of[name], [summand.like(tensor) for summand in added]
        stacked = [slot for slot in slots if slot.of_stack]
        if len(stacked) == 1:  # as a tensor of one axis for all units of all members
            axes = stacked[0].axes
            slots = [_beside(slot, axes) for slot in slots]
            added = [Summand(together(summand.whole.expand(tensor.shape), axes)) for summand in added]
            tensor = together(tensor, axes)
        elif stacked:
            return self._moved_in_stack(tensor, slots, power)
        result = tensor.detach()
        matrices = [slot for slot in slots if self._acts_by_matrices(slot)]
        joint = next((slot for slot in slots if len(slot.axes) == 2 and not slot.of_stack), None)
        if matrices or joint is not None:
            for summand in added:
                result = summand.added_to(result)
            added = []
        for slot in matrices:
            result = self._by_matrices(result, slot, slot.axes[0])
        if joint is not None:
            scale = _powered(self.scale[joint.rows], power)
            result = self._moved_jointly(result * _on_axis(scale, joint, result), joint)
        sources, scales, variance = {}, {}, None
        for slot in slots:
            if slot is joint:
                continue
            source = self.source_in(slot)
            if joint is None and slot.axes and (source != np.arange(len(source))).any():
                sources[slot.axes[0]] = source
            scale = self.scale[slot.rows][source]
            if slot.kind == "variance" and shifted:
                variance = slot, scale
            elif not np.all(scale == 1):
                scales[slot.axes[0] if slot.axes else 0] = _powered(scale, power)
        result = rearranged(result, sources, scales, added)
        if variance is not None:
            slot, scale = variance
            result.add_(slot.epsilon).mul_(_on_axis(scale**2, slot, result)).sub_(slot.epsilon)
        if stacked:
            result = apart(result, stacked[0].axes, stacked[0].shape).contiguous()
        return result

    def _moved_in_stack(self, tensor: Tensor, slots: list[Slot], power: float) -> Tensor:
        """Move a stack of weights whose members have units of their own on both sides."""
        result, index = tensor.detach(), [torch.arange(size) for size in tensor.shape]
        for slot in slots:
            if not slot.axes:
                continue
            scale = self.scale[slot.rows]
            result = result * _on_axis(_powered(scale, power), slot, result)
            source = torch.from_numpy(self.source_in(slot)).reshape(slot.shape)
            index[slot.axes[-1]] = source % slot.shape[-1] if slot.of_stack else source
            if slot.of_stack:
                index[0] = source[:, 0] // slot.shape[-1]
        places = []
        for axis, own in enumerate(index):
            shape = [size if at == axis or (at == 0 and own.ndim > 1) else 1 for at, size in enumerate(tensor.shape)]
            places.append(own.reshape(shape).to(tensor.device))
        return result[tuple(places)]

    def _added(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what biases take up of signs: as sigma(-x) = offset - sigma(x), the unit's column times the offset."""
        added: dict[str, Tensor] = {}
        for bias, weight, axis, offset in self.structure.absorbed:
            slot = next((s for s in self.structure.slots_of.get(weight, ()) if s.axes == (axis,)), None)
            if slot is None or weight not in tensors:
                continue
            flipped = torch.from_numpy(self.scale[slot.rows] < 0)
            if flipped.any():
                columns = tensors[weight].detach()
                columns = columns.flatten(2).sum(2) if columns.ndim > 2 else columns
                added[bias] = offset * columns[:, flipped.to(columns.device)].sum(1)
        return added

    def _moved_jointly(self, tensor: Tensor, joint: Slot) -> Tensor:
        """Move the weight of a grouped convolution: which channel the second axis means depends on the first."""
        row = self.source_in(next(slot for slot in self.structure.slots_of[joint.tensor] if slot.axes == (0,)))
        unit = joint.unit
        # Channels on which nothing acts (-1) stay in the order in which they are.
        wanted = np.where(unit < 0, -1, self.element.permutation.numpy()[unit])
        # In row r of the new weight stands row[r] of the old one, in which the wanted units have to be found.
        order = np.argsort(unit[row], axis=1, kind="stable")
        rank = np.argsort(np.argsort(wanted, axis=1, kind="stable"), axis=1)
        column = np.take_along_axis(order, rank, axis=1)
        return tensor[torch.from_numpy(row)[:, None].to(tensor.device), torch.from_numpy(column).to(tensor.device)]

    def _acts_by_matrices(self, slot: Slot) -> bool:
        """Whether more than a permutation and scales acts on a slot."""
        return self._is_mixed(slot) or self._is_rotated(slot) or self._is_tilted(slot) or self._is_turned(slot)

    def _by_matrices(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Let all that is no permutation or scale act on one axis."""
        if self._is_mixed(slot):
            tensor = self._mixed(tensor, slot, axis)
        if self._is_rotated(slot):
            tensor = self._rotated(tensor, slot, axis)
        if self._is_tilted(slot):
            tensor = self._tilted(tensor, slot, axis)
        return self._turned(tensor, slot, axis)

    @cached_property
    def _mixes(self) -> bool:
        """Whether a dense matrix of this element is no identity."""
        return bool(self._mixing)

    @cached_property
    def _mixing(self) -> set[int]:
        """The numbers of the dense cells whose matrices of this element are no identities."""
        pairs = enumerate(zip(self.element.dense, self.structure.same, strict=True))
        return {cell for cell, (own, same) in pairs if not (own is same or torch.equal(own, same))}

    @cached_property
    def _inverse_transposes(self) -> tuple[Tensor, ...]:
        """What the dense matrices do to what reads their units. Each of shape (size, size), float64."""
        found = list(self.element.dense)
        mixing = sorted(self._mixing)
        for cell, inverse in zip(mixing, inverted([found[cell] for cell in mixing]), strict=True):
            found[cell] = inverse.mT
        return tuple(found)

    def _is_mixed(self, slot: Slot) -> bool:
        """Whether a dense matrix of this element changes what stands in a slot."""
        if not self._mixes:
            return False
        acting = self.structure.dense_places.get(slot.offset, ())
        return any(not self._mixing.isdisjoint(cells) for cells, _, _ in acting)

    def _mixed(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Let dense matrices act on one axis: A where units are put out, its inverse transposed where they are read."""
        shape, size = tensor.shape, tensor.shape[axis]
        lines = tensor.reshape(math.prod(shape[:axis]), size, -1)
        acting = [
            (cells, at, read)
            for cells, positions, read in self.structure.dense_places.get(slot.offset, ())
            for at in positions  # (cells, size)
        ]
        # What no matrix reaches stays.
        result = torch.empty_like(lines) if sum(at.size for _, at, _ in acting) == size else lines.clone()
        for cells, at, read in acting:
            inner = np.argsort(at[:, 0])  # blocks in a row need not be looked for
            cells, at = [cells[index] for index in inner], at[inner]
            own = self._inverse_transposes if read else self.element.dense
            matrices = torch.stack([own[cell] for cell in cells]).to(tensor)
            first, count = int(at[0, 0]), at.size
            if np.array_equal(at.ravel(), np.arange(first, first + count)):
                _multiply(matrices, lines.narrow(1, first, count), result.narrow(1, first, count))
            else:
                index = torch.from_numpy(at.ravel()).to(tensor.device)
                old = lines.index_select(1, index)
                result.index_copy_(1, index, _multiply(matrices, old, torch.empty_like(old)))
        return result.reshape(shape)

    # Rotations.

    @cached_property
    def _turns(self) -> list[tuple[Ints, Tensor]]:
        """For each rotation: which of its units it moves at all, and the matrix among these."""
        turns = []
        for matrix in self.element.rotation or ():
            change = matrix - torch.eye(len(matrix), dtype=matrix.dtype)
            moved = torch.nonzero(change.any(0) | change.any(1)).ravel() if len(matrix) else torch.zeros(0).long()
            turns.append((moved.numpy(), matrix[moved][:, moved]))
        return turns

    def _is_rotated(self, slot: Slot) -> bool:
        """Whether a rotation of this element changes what stands in a slot."""
        if not any(len(moved) for moved, _ in self._turns):
            return False
        return any(len(self._turns[index][0]) for index, *_ in self.structure.rotated_places.get(slot.offset, ()))

    def learn_gains(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the gains between which rotations act, before any of them changes.

        Args:
            tensors: Parameters, by name; those that are missing are missed where one of them is needed.

        Raises:
            ValueError: If a gain holds a zero, which no rotation passes.
        """
        turns = self._turns or [(np.zeros(0, np.int64), NO_MATRIX)] * len(self.structure.rotations)
        for rotation, (moved, _) in zip(self.structure.rotations, turns, strict=True):
            for name, at in rotation.gains if len(moved) else ():
                if name not in tensors or name in self._gains:
                    continue
                gain = tensors[name].detach().to("cpu", torch.float64, copy=True).reshape(-1)
                if not bool(gain[torch.from_numpy(at[moved])].all()):
                    raise ValueError(
                        f"the gain {name} holds a zero, through which no rotation passes; expected gains other than "
                        "zero, or an element without rotations: sample(mixing=False)"
                    )
                self._gains[name] = gain
        for tilt, vector in zip(self.structure.tilts, self.element.tilt, strict=False):
            gain_name = tilt.gain
            if gain_name is None or gain_name in self._gains or gain_name not in tensors or not bool(vector.any()):
                continue
            self._gains[gain_name] = tensors[gain_name].detach().to("cpu", torch.float64, copy=True).reshape(-1)
            if not bool(self._gains[gain_name].all()):
                raise ValueError(
                    f"the gain {gain_name} holds a zero, through which no tilt passes; expected gains other than zero, "
                    "or an element without tilts: sample(mixing=False)"
                )

    def _between(self, index: int, powers: tuple[int, ...]) -> Tensor | None:
        """Return between which diagonal and its inverse a rotation acts; None if there is nothing around it."""
        rotation, moved = self.structure.rotations[index], self._turns[index][0]
        around: Tensor | None = None
        for (name, at), power in zip(rotation.gains, powers, strict=True):
            if not power:
                continue
            if name not in self._gains:
                raise ValueError(
                    f"the element rotates what stands behind the gain {name}, which is not there; expected the network "
                    "itself beside what is changed, or an element without rotations: sample(mixing=False)"
                )
            factor = self._gains[name][torch.from_numpy(at[moved])] ** power
            around = factor if around is None else around * factor
        return around

    def _rotated(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Let rotations act on one axis, between gains."""
        for index, at, powers in self.structure.rotated_places.get(slot.offset, ()):
            moved, matrix = self._turns[index]
            if not len(moved):
                continue
            around = self._between(index, powers)
            if around is not None:
                matrix = around[:, None] * matrix / around
            whole = np.array_equal(at[moved], np.arange(tensor.shape[axis]))
            where = torch.from_numpy(at[moved]).to(tensor.device)
            old = (tensor if whole else tensor.index_select(axis, where)).movedim(axis, -1)
            new = (old @ matrix.to(tensor).mT).movedim(-1, axis)
            tensor = new.contiguous() if whole else tensor.index_copy(axis, where, new)
        return tensor

    # Tilts.

    def _is_tilted(self, slot: Slot) -> bool:
        """Whether a tilt of this element changes what stands in a slot."""
        at = self.structure.tilted_places.get(slot.offset)
        return at is not None and bool(self.element.tilt) and bool(self.element.tilt[at[0]].any())

    def _tilted(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Let a tilt act on one axis, between gains.

        Both the map and its inverse change a tensor by one of rank 1.
        """
        index, reads = self.structure.tilted_places[slot.offset]
        gain, vector = self.structure.tilts[index].gain, self.element.tilt[index]
        ones = torch.ones_like(vector)
        if reads:  # W - W t 1^T / (1 + 1^T t), written for columns
            ones, vector = -vector / (1 + vector.sum()), ones
        if gain is not None:
            if gain not in self._gains:
                raise ValueError(
                    f"the element tilts what stands behind the gain {gain}, which is not there; expected the network "
                    "itself beside what is changed, or an element without tilts: sample(mixing=False)"
                )
            around = self._gains[gain]
            vector, ones = (vector / around, ones * around) if reads else (vector * around, ones / around)
        total = torch.tensordot(tensor, ones.to(tensor), ([axis], [0])).unsqueeze(axis)
        change: Tensor = total * vector.to(tensor).reshape([-1 if at == axis else 1 for at in range(tensor.ndim)])
        return tensor + change

    # Phases.

    @cached_property
    def _phase(self) -> Tensor:
        """For each plane, the angle by which it is turned."""
        return phases_of(self.structure, self.element)

    def _is_turned(self, slot: Slot) -> bool:
        """Whether a plane of a slot is turned."""
        if not self.structure.planes or not bool(self._phase.any()):
            return False
        places = self.structure.turned_places.get(slot.offset)
        return places is not None and bool(self._phase[torch.from_numpy(places[0])].any())

    def _turned(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Turn the planes of one axis."""
        if not self._is_turned(slot):
            return tensor
        phase, first, second = self.structure.turned_places[slot.offset]
        return turn(tensor, axis, self._phase[torch.from_numpy(phase)], first, second)

    def _require_planes(self, tap: Tap, slot: Slot) -> None:
        """Check that phases act on a value inside the network.

        Raises:
            ValueError: If it shows some coordinates of planes only, or is half of what positions make of them.
        """
        if not self.structure.phases:
            return
        phases = self.structure.phase_of[slot.unit.ravel()]
        seen = (slot.unit.ravel() >= 0) & (phases >= 0)
        if not seen.any() or not bool(self._phase[torch.from_numpy(phases[seen])].any()):
            return
        places = self.structure.turned_places.get(slot.offset)
        if tap.half_turned or places is None or 2 * len(places[0]) != seen.sum():
            raise ValueError(
                f"{tap.name} shows coordinates of planes that the element turns, one by one, on which no matrix acts; "
                "expected another tap, or an element without phases: sample(mixing=False)"
            )

    def carry(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        """Move an optimiser's state: gradients by the inverse scale, their squares by its square, steps as weights.

        Args:
            optimizer: Its state is changed.
            names: The name of each parameter.
        """
        structure = self.structure
        mixed = {slot.offset for slot in structure.slots if self._acts_by_matrices(slot)}
        moved: list[tuple[Tensor, Tensor]] = []
        for group in optimizer.param_groups:
            powers = dict(_POWERS)
            if isinstance(optimizer, torch.optim.RMSprop):
                powers["momentum_buffer"] = 0.0  # of gradients over their size
            for parameter in group["params"]:
                name = names.get(parameter)
                state = optimizer.state.get(parameter, {})
                if name not in structure.moving or not state:
                    continue
                own = structure.charts.names_of(name)
                if any(slot.offset in mixed for part in own for slot in structure.slots_of.get(part, ())):
                    raise ValueError(
                        f"{name} is mixed by a dense matrix, under which second moments have no image; expected an "
                        "element with mixing=False"
                    )
                for key, value in state.items():
                    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.ndim == 0:
                        continue
                    if key not in powers:
                        raise ValueError(
                            f"the optimiser's state {key!r} cannot be carried; expected one of {', '.join(powers)}"
                        )
                    for part, held in structure.charts.parts_of(name, value):
                        if part in structure.slots_of:
                            moved.append((held, self.moved(held, part, power=powers[key], shifted=False)))
        for value, new in moved:  # only now, so that an error leaves everything as it was
            value.copy_(new)


def _beside(slot: Slot, axes: tuple[int, ...]) -> Slot:
    """Return a slot of a tensor of which two axes were put together, in front of all others."""
    if slot.axes == axes:
        return replace(slot, axes=(0,), shape=(slot.size,))
    return replace(slot, axes=tuple(axis + 1 - sum(other < axis for other in axes) for axis in slot.axes))


def inverted(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the inverses of square matrices, those of one size found together."""
    found = list(matrices)
    for size in {len(matrix) for matrix in matrices}:
        alike = [index for index, matrix in enumerate(matrices) if len(matrix) == size]
        inverses = torch.linalg.inv(torch.stack([matrices[index] for index in alike]))
        for index, inverse in zip(alike, inverses.unbind(), strict=True):
            found[index] = inverse
    return found


def _multiply(matrices: Tensor, lines: Tensor, out: Tensor) -> Tensor:
    """Multiply matrices to blocks of an axis.

    Args:
        matrices: Shape (blocks, size, size).
        lines: Shape (before, blocks x size, after).
        out: Where the product goes, of the shape of `lines`.
    """
    blocks, size, _ = matrices.shape
    old, new = (each.view(len(lines), blocks, size, -1) for each in (lines, out))
    if lines.shape[2] == 1:
        new.copy_(torch.bmm(old[..., 0].movedim(1, 0), matrices.mT).movedim(0, 1)[..., None])
    else:
        for number in range(len(lines)):
            new[number] = torch.bmm(matrices, old[number])
    return out


def _on_axis(vector: Floats, slot: Slot, tensor: Tensor) -> Tensor:
    return torch.from_numpy(on_axes(vector, slot.shape, slot.axes, tensor.ndim)).to(tensor)
