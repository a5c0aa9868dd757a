"""What an element does: to parameters, buffers and an optimiser's state, and to the values inside the network."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints, odd, on_axes
from lightning_sym.symmetry.elements import Element, Tap
from lightning_sym.symmetry.groups import GroupElement
from lightning_sym.symmetry.tracing.structure import Slot, Structure
from lightning_sym.symmetry.translations import additions

# By which power of a weight's scale an optimiser's state moves.
_POWERS = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "grad_avg", "prev"), -1.0),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), -2.0),
    "acc_delta": 2.0,
}


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


class _Scratch:
    """Memory for what is needed only for a moment: fresh memory costs more than the work done in it."""

    def __init__(self) -> None:
        self.memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def select(self, tensor: Tensor, axis: int, source: Ints) -> Tensor:
        """Return `tensor.index_select(axis, source)`, valid until the next call."""
        key = (tensor.dtype, tensor.device)
        held = self.memory.get(key)
        if held is None or held.numel() < tensor.numel() or held.data_ptr() == tensor.data_ptr():
            held = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            self.memory[key] = held
        index = torch.from_numpy(source).to(tensor.device)
        return torch.index_select(tensor, axis, index, out=held[: tensor.numel()].view(tensor.shape))


class Action:
    """What one element does.

    Args:
        structure: The group.
        element: The element.
    """

    def __init__(self, structure: Structure, element: Element) -> None:
        self.structure, self.element = structure, element
        self._scratch = _Scratch()

    @cached_property
    def scale(self) -> Floats:
        """For each position of all slots by what it is multiplied, before it moves."""
        scale: Floats = np.exp(self.structure.magnitudes @ self.element.log_scale.numpy())
        flips = self.structure.signs @ (self.element.sign.numpy() < 0).astype(np.float64)
        return np.where(odd(flips), -scale, scale)

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

    def on_activations(self, tap: Tap) -> ActivationAction:
        """Return what the element does to a value inside the network, if the structure is that of these."""
        parts = {}
        for slot in tap.seen:
            source, scale = self.source_in(slot), self.scale[slot.rows]
            element = GroupElement._of(torch.from_numpy(source), torch.from_numpy(scale))
            if slot.offset in self.structure.dense_places:
                mixed = self._mixed(torch.eye(len(source), dtype=torch.float64), slot, 0)
                element = GroupElement._of_dense(element.apply(mixed, dim=0))
            added = tap.offset * torch.from_numpy(scale[source] < 0).double() if tap.offset else None
            parts[slot.axes] = (element, added)
        if any(bool(self.element.shift[index].any()) for index in tap.shown.unknown):
            raise ValueError(
                f"the element's shifts add a multiple of ones to {tap.name} that depends on the input (what reads it "
                "does not see that); expected an element without shifts: sample(shifts=False)"
            )
        summands = [torch.from_numpy(matrix @ self.element.shift[index].numpy()) for index, matrix in tap.shown.added]
        if not any(bool(part.any()) for part in summands):
            return ActivationAction(parts)
        shape = [size if axis in tap.shown.axes else 1 for axis, size in enumerate(tap.shape)]
        return ActivationAction(parts, torch.stack(summands).sum(0).reshape(shape))

    def along(self, name: str, axes: tuple[int, ...], values: Tensor) -> Tensor:
        """Return what the linear part makes of what is added to a tensor.

        Args:
            name: The tensor.
            axes: Some of its axes.
            values: What is added, on these axes; along all others it is the same everywhere, and stays so.
        """
        values = values.double()
        for slot in self.structure.slots_of.get(name, ()):
            if len(slot.axes) > 1:
                continue
            source = self.source_in(slot)
            scale = torch.from_numpy(self.scale[self.source[slot.rows]])
            if not slot.axes or slot.axes[0] not in axes:
                values = values * float(scale[0])
                continue
            at = axes.index(slot.axes[0])
            if slot.offset in self.structure.dense_places:
                values = self._mixed(values, slot, at)
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
        added = additions(self.structure.shifts, self.element.shift, tensors) if shifted else {}
        for name, summand in self._added(tensors).items():
            added.setdefault(name, []).append(summand)
        for name, tensor in tensors.items():
            if name in self.structure.slots_of:
                yield name, self.moved(tensor, name, shifted=shifted, added=added.get(name, ()))

    def moved(
        self, tensor: Tensor, name: str, *, power: float = 1.0, shifted: bool = True, added: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return what becomes of one tensor.

        Args:
            tensor: A parameter or buffer, or as many numbers.
            name: Its name.
            power: Power of the weights' scales; -1 for gradients, -2 for their squares.
            shifted: Whether to move running variances as evaluation asks for: v' = s^2 (v + eps) - eps.
            added: What is added before.
        """
        slots = self.structure.slots_of[name]
        result = tensor.detach()
        for index, summand in enumerate(added):
            result = result.add_(summand) if index else result + summand
        for slot in slots:
            if slot.offset in self.structure.dense_places:
                result = self._mixed(result, slot, slot.axes[0])
        joint = next((slot for slot in slots if len(slot.axes) == 2), None)
        if joint is not None:
            scale = _powered(self.scale[joint.rows], power)
            result = self._moved_jointly(result * _on_axis(scale, joint, result), joint)
        else:
            moves = [(slot.axes[0], self.source_in(slot)) for slot in slots if slot.axes]
            moves = [(axis, source) for axis, source in moves if (source != np.arange(len(source))).any()]
            for axis, source in moves[:-1]:
                result = self._scratch.select(result, axis, source)
            if moves:
                axis, source = moves[-1]
                result = result.index_select(axis, torch.from_numpy(source).to(result.device))
        if result.data_ptr() == tensor.data_ptr():
            result = result.clone()
        for slot in slots:
            if slot is joint:
                continue
            scale = self.scale[self.source[slot.rows]]
            if slot.kind == "variance" and shifted:
                square = _on_axis(scale**2, slot, result)
                result.add_(slot.epsilon).mul_(square).sub_(slot.epsilon)
            elif not np.all(scale == 1):
                result.mul_(_on_axis(_powered(scale, power), slot, result))
        return result

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

    def _mixed(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Let dense matrices act on one axis: A where units are put out, its inverse transposed where they are read."""
        for cells, positions, read in self.structure.dense_places.get(slot.offset, ()):
            matrices = torch.stack([self.element.dense[cell] for cell in cells])
            matrices = (torch.linalg.inv(matrices).mT if read else matrices).to(tensor)
            moved = tensor.movedim(axis, 0).clone(memory_format=torch.contiguous_format)
            for at in positions:  # (cells, size)
                index = torch.from_numpy(at.ravel()).to(tensor.device)
                old = moved.index_select(0, index).reshape(*at.shape, -1)
                moved.index_copy_(0, index, torch.bmm(matrices, old).reshape(len(index), *moved.shape[1:]))
            tensor = moved.movedim(0, axis)
        return tensor

    def carry(self, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
        """Move an optimiser's state: gradients by the inverse scale, their squares by its square, steps as weights."""
        structure = self.structure
        names = {tensor: name for name, tensor in tensors.items()}
        mixes = any(not torch.equal(m, torch.eye(len(m), dtype=m.dtype)) for m in self.element.dense)
        moved: list[tuple[Tensor, Tensor]] = []
        for group in optimizer.param_groups:
            powers = dict(_POWERS)
            if isinstance(optimizer, torch.optim.RMSprop):
                powers["momentum_buffer"] = 0.0  # of gradients over their size
            for parameter in group["params"]:
                name = names.get(parameter)
                state = optimizer.state.get(parameter, {})
                if name not in structure.slots_of or not state:
                    continue
                if mixes and any(slot.offset in structure.dense_places for slot in structure.slots_of[name]):
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
                    moved.append((value, self.moved(value, name, power=powers[key], shifted=False)))
        for value, new in moved:  # only now, so that an error leaves everything as it was
            value.copy_(new)


def _on_axis(vector: Floats, slot: Slot, tensor: Tensor) -> Tensor:
    return torch.from_numpy(on_axes(vector, slot.shape, slot.axes, tensor.ndim)).to(tensor)
