"""The action of an element on parameters, buffers, the state of an optimiser, and values inside the network."""

import functools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sym._checks import is_finite
from lightning_sym._distributed import wide
from lightning_sym._exports import explained
from lightning_sym.symmetry.arrays import Floats, Ints, apart, on_axes, together
from lightning_sym.symmetry.charts import Charts, charted, uncharted
from lightning_sym.symmetry.elements import Tap
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Factor, Factors, Gains, LinearAction
from lightning_sym.symmetry.intertwiners import GroupElement
from lightning_sym.symmetry.rearranging import Summand, rearranged
from lightning_sym.symmetry.solving.structure import Slot
from lightning_sym.symmetry.views import ConvertedTensors, FixedTensors, fitting

_SMALL = 2**16  # numbers of tensors that are moved at once
# The power of a weight's scale that acts on each entry of an optimiser's state.
_POWERS = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "grad_avg", "prev"), -1.0),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"), -2.0),
    "acc_delta": 2.0,
}


def _exact(tensor: Tensor) -> Tensor:
    """Convert floating vectors to double precision, and numbers of 16 bits to single; return others unchanged."""
    if not tensor.is_floating_point() or (tensor.ndim != 1 and tensor.itemsize > 2):
        return tensor
    exact = wide(tensor.device) if tensor.ndim == 1 else torch.float32
    return tensor.detach().to(exact) if tensor.dtype != exact else tensor


def _powered(scale: Floats, power: float) -> Floats:
    """Raise magnitudes to a power; odd and zeroth powers keep the sign."""
    powered: Floats = np.abs(scale) ** power
    return powered if power in (2.0, -2.0) else np.sign(scale) * powered


@explained
@dataclass(frozen=True, eq=False)
class ActivationAction:
    r"""The action of an element on a value inside the network: :math:`v' = A (v + t) + c`.

    `Symmetry.on_activations` makes it.

    Attributes:
        parts: By axes of the value that index units: the element that acts there, and the vector c of shape
            ``(positions,)`` or None. Usually there is one axis, the channels, and no c; there are none where the group
            acts trivially. On several axes the element acts on positions in row-major order; () is a value of one unit.
        shift: The translation t, of a shape that broadcasts to the value's; None if it is zero.
    """

    parts: Mapping[tuple[int, ...], tuple[GroupElement, Tensor | None]]
    shift: Tensor | None = None

    @property
    def element(self) -> GroupElement:
        """The matrix A, where the units index one axis and nothing is added.

        Raises:
            ValueError: If units index several axes or none, or something is added; use :meth:`apply` there.
        """
        if len(self.parts) != 1 or any(len(axes) != 1 for axes in self.parts):
            raise ValueError(
                f"units live on the axes {list(self.parts)} of this value, so no single matrix acts on its channels; "
                "use apply."
            )
        ((element, added),) = self.parts.values()
        if self.shift is not None or (added is not None and bool(added.any())):
            raise ValueError(
                "the element adds a vector here, which no matrix does; use apply, or an element without shifts: "
                "sample(shifts=False)."
            )
        return element

    def apply(self, values: Tensor) -> Tensor:
        """Map the network's value to the value of the transformed network.

        Args:
            values: A batch of any size, with the axes of the tap; floating, on any device.

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
    """The action of one element.

    Args:
        factors: The factors of the group.
        element: The element.
    """

    def __init__(self, factors: Factors, element: Element) -> None:
        self.factors, self.structure, self.element = factors, factors.structure, element
        gains = Gains()
        made = [factor.linear_action(element.parts[factor.name], gains) for factor in factors.inwards]
        self.linear: list[LinearAction] = [action for action in made if action is not None]  # in the order of acting
        self._acting_at: dict[int, list[LinearAction]] = {}

    @cached_property
    def _parts(self) -> list[tuple[Factor[Any], Any]]:
        """The factors with a part other than the identity, in the order of acting, and these parts."""
        pairs = ((factor, self.element.parts[factor.name]) for factor in self.factors.inwards)
        return [(factor, part) for factor, part in pairs if not factor.is_identity(part)]

    @cached_property
    def _by_entries(self) -> list[tuple[Factor[Any], Any]]:
        """Those that may multiply single entries of tensors."""
        return [(factor, part) for factor, part in self._parts if type(factor).entries is not Factor.entries]

    @cached_property
    def scale(self) -> Floats:
        """The factor that multiplies each position of all slots before it moves."""
        scale = np.ones(self.structure.magnitudes.shape[0])
        for factor, own in reversed(self._parts):
            if (multipliers := factor.multipliers(own)) is not None:
                scale = scale * multipliers
        return scale

    @cached_property
    def _scales(self) -> Tensor:
        return torch.from_numpy(self.scale)

    @cached_property
    def _scaled(self) -> set[int]:
        """The offsets of slots with factors other than 1."""
        slots = np.unique(self.structure.slots_at(np.flatnonzero(self.scale != 1)))
        return {self.structure.slots[index].offset for index in slots.tolist()}

    @cached_property
    def source(self) -> Ints:
        """The source of the new content of each position of all slots."""
        return self.factors.source(self.element.permutation)

    @cached_property
    def permutes(self) -> bool:
        """Whether any position gets its content from another one."""
        return not self.factors["permutation"].is_identity(self.element.permutation)

    def source_in(self, slot: Slot) -> Ints:
        """Return the source of the new content of each position of a slot, within that slot."""
        found: Ints = self.source[slot.rows] - slot.offset
        return found

    def on_activations(self, tap: Tap, tensors: Mapping[str, Tensor] | None = None) -> ActivationAction:
        """Return the element's action on a value inside the network; the structure must be that of such values.

        Args:
            tap: The value.
            tensors: The network's parameters before the action, by name, where they are needed.
        """
        parts = {}
        for slot in tap.seen:
            source, scale = self.source_in(slot), self.scale[slot.rows]
            element = GroupElement._of(torch.from_numpy(source), torch.from_numpy(scale))
            for action in self.linear:
                action.require(tap, slot)
            if self.acts_by_matrices(slot):
                mixed = self._by_matrices(torch.eye(len(source), dtype=torch.float64), slot, 0)
                element = GroupElement._of_dense(element.apply(mixed, dim=0))
            added = tap.offset * torch.from_numpy(scale[source] < 0).double() if tap.offset else None
            parts[slot.axes] = (element, added)
        return ActivationAction(parts, self._shown(tap, tensors))

    def _shown(self, tap: Tap, tensors: Mapping[str, Tensor] | None) -> Tensor | None:
        """Return the translation of a value; None if it is zero."""
        parts = (factor.shown(self.element.parts[factor.name], tap, tensors) for factor in self.factors)
        shown = [part for part in parts if part is not None]
        return functools.reduce(operator.add, shown) if shown else None

    def on_thin(self, name: str, values: Tensor, axes: Collection[int], lead: int = 0) -> Tensor:
        """Apply the linear part to a translation of a tensor, on some of its axes.

        Args:
            name: Name of the tensor.
            values: The translation, float64, with `lead` axes before the tensor's axes. An axis along which it is
                constant has size 1, and keeps it.
            axes: Axes of the tensor that the linear part acts on.
            lead: Number of leading axes.
        """
        for slot in self.structure.slots_of.get(name, ()):
            if slot.of_stack:
                values = self._on_thin_stack(values, slot, axes, lead)
                continue
            if len(slot.axes) > 1 or not (slot.axes[0] in axes if slot.axes else 0 in axes or values.ndim == lead):
                continue
            source = self.source_in(slot) if self.permutes else None
            scale = self._scales[slot.rows]
            scale = scale if source is None else scale[torch.from_numpy(source)]
            if not slot.axes or values.shape[lead + slot.axes[0]] < slot.size:
                values = values * float(scale[0])
                continue
            at = lead + slot.axes[0]
            values = self._by_matrices(values, slot, at)
            shape = [-1 if axis == at else 1 for axis in range(values.ndim)]
            values = values if source is None else values.index_select(at, torch.from_numpy(source))
            values = values * scale.reshape(shape) if slot.offset in self._scaled else values
        return values

    def _on_thin_stack(self, values: Tensor, slot: Slot, axes: Collection[int], lead: int) -> Tensor:
        """Apply the linear part on one slot of a stack to a translation; without its inner axis, permute members."""
        (first, inner), front = slot.axes, values.shape[:lead]
        thin = [axis for axis in slot.axes if values.shape[lead + axis] < slot.shape[slot.axes.index(axis)]]
        if first not in axes or (len(thin) == 2 and inner not in axes):
            return values
        source, scale = self.source_in(slot), self.scale[slot.rows]
        if inner not in axes:
            members = source.reshape(slot.shape)[:, 0] // slot.shape[1]
            return values.index_select(lead + first, torch.from_numpy(members))
        if len(thin) == 2:
            return values * float(scale[source][0])
        whole = [slot.shape[slot.axes.index(axis)] if axis in slot.axes else size
                 for axis, size in enumerate(values.shape[lead:])]  # fmt: skip
        at = (lead + first, lead + inner)
        flat = self._by_matrices(together(values.expand(*front, *whole), at), slot, 0)
        flat = rearranged(flat, {0: source}, {0: scale[source]})
        result = apart(flat, at, slot.shape)
        for axis in thin:
            result = result.narrow(lead + axis, 0, 1)
        return result

    def splits(self, name: str, axes: Collection[int]) -> bool:
        """Return whether units of a tensor lie on one of some axes together with another axis."""
        return any(slot.of_stack and len({axis in axes for axis in slot.axes}) > 1
                   for slot in self.structure.slots_of.get(name, ()))  # fmt: skip

    # On parameters and buffers.

    def on_weights(self, tensors: Mapping[str, Tensor], *, shifted: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Transform the parameters and buffers that the element acts on, one after the other.

        Args:
            tensors: Parameters and buffers, by name.
            shifted: See :meth:`moved`.

        Yields:
            The names and the new tensors.
        """
        self.learn_gains(tensors)
        added = self.summands(tensors, shifted=shifted)
        for name, tensor in tensors.items():
            if name in self.structure.slots_of:
                yield name, self.moved(tensor, name, shifted=shifted, added=added.get(name, ()))

    def summands(self, tensors: Mapping[str, Tensor], *, shifted: bool = True) -> dict[str, list[Summand]]:
        """Return the summands that tensors get before they move, by name; see :meth:`on_weights`."""
        tensors = tensors if isinstance(tensors, FixedTensors) else ConvertedTensors(tensors, _exact)
        added: dict[str, list[Summand]] = {name: [Summand(own)] for name, own in self._added(tensors).items()}
        for factor in self.factors if shifted else (own for own in self.factors if own.name != "shift"):
            for name, summands in factor.added(self.element.parts[factor.name], tensors).items():
                added.setdefault(name, []).extend(summands)
        return added

    def moved(
        self, tensor: Tensor, name: str, *, power: float = 1.0, shifted: bool = True, added: Sequence[Summand] = ()
    ) -> Tensor:
        """Transform one tensor.

        Args:
            tensor: A parameter or buffer, or a tensor of its shape.
            name: Its name.
            power: Power of the weights' scales; -1 for gradients, -2 for their squares.
            shifted: Whether running variances transform as in evaluation mode: v' = s^2 (v + eps) - eps.
            added: Summands to add first.
        """
        if (exact := _exact(tensor)) is not tensor:  # summands may cancel; the result is rounded once
            moved = self.moved(exact, name, power=power, shifted=shifted, added=added)
            if tensor.itemsize > 2 or not is_finite(tensor):
                return moved.to(tensor)
            return fitting(moved, tensor.dtype, name).to(tensor.device)
        slots, added = self.structure.slots_of[name], [summand.like(tensor) for summand in added]
        for factor, part in self._by_entries:
            if (entries := factor.entries(part, name)) is not None:
                for summand in added:
                    tensor = summand.added_to(tensor)
                tensor, added = tensor * torch.from_numpy(_powered(entries.numpy(), power)).to(tensor), []
        if name in self.structure.on_single_axes and power == 1.0 and not self.permutes and tensor.numel() <= _SMALL:
            return self._moved_by_axes(tensor, slots, added)
        stacked = [slot for slot in slots if slot.of_stack]
        if sum(len(slot.axes) for slot in stacked) > len({axis for slot in stacked for axis in slot.axes}):
            for summand in added:
                tensor = summand.added_to(tensor)
            return self._moved_in_stack(tensor, slots, power)
        joined: list[Slot] = []
        for _ in stacked:  # as a tensor with one axis for all units of all members
            joined.append(next(slot for slot in slots if slot.of_stack and len(slot.axes) > 1))
            axes = joined[-1].axes
            slots = [_beside(slot, axes) for slot in slots]
            added = [Summand(together(summand.whole.expand(tensor.shape), axes)) for summand in added]
            tensor = together(tensor, axes)
        result = tensor.detach()
        matrices = [slot for slot in slots if self.acts_by_matrices(slot)]
        joint = next((slot for slot in slots if len(slot.axes) == 2 and not slot.of_stack), None)
        if joint is not None or (matrices and tensor.numel() <= _SMALL):
            for summand in added:
                result = summand.added_to(result)
            added = []
        for slot in matrices:
            axis = slot.axes[0]
            result = self._by_matrices(result, slot, axis)
            added = [own.along(axis, slot.size, tensor.ndim) for own in added]
            added = [Summand(self._by_matrices(own.values, slot, axis), own.times) for own in added]
        if joint is not None:
            scale = _powered(self.scale[joint.rows], power)
            result = self._moved_jointly(result * _on_axis(scale, joint, result), joint)
        sources, scales, variance = {}, {}, None
        for slot in slots:
            if slot is joint:
                continue
            scale = self.scale[slot.rows]
            if self.permutes:
                source = self.source_in(slot)
                scale = scale[source]
                if joint is None and slot.axes and (source != np.arange(len(source))).any():
                    sources[slot.axes[0]] = source
            if slot.kind == "variance" and shifted:
                variance = slot, scale
            elif not np.all(scale == 1):
                scales[slot.axes[0] if slot.axes else 0] = _powered(scale, power)
        result = rearranged(result, sources, scales, added)
        if variance is not None:
            slot, scale = variance
            result.add_(slot.epsilon).mul_(_on_axis(scale**2, slot, result)).sub_(slot.epsilon)
        for slot in reversed(joined):
            result = apart(result, slot.axes, slot.shape).contiguous()
        return result

    def _moved_by_axes(self, tensor: Tensor, slots: Sequence[Slot], added: Sequence[Summand]) -> Tensor:
        """Transform a small tensor by what acts on one axis after the other, without permutations."""
        result = tensor = tensor.detach()
        for summand in added:
            result = summand.added_to(result)
        for slot in slots:
            axis = slot.axes[0] if slot.axes else 0
            result = self._by_matrices(result, slot, axis) if slot.axes else result
            if slot.offset in self._scaled:
                shape = [-1 if own == axis else 1 for own in range(result.ndim)]
                result = result * self._scales[slot.rows].reshape(shape).to(result)
        return result.clone(memory_format=torch.contiguous_format) if result is tensor else result.contiguous()

    def _moved_in_stack(self, tensor: Tensor, slots: list[Slot], power: float) -> Tensor:
        """Transform a stack of weights, where each member has units of its own on both axes."""
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
        """Return the terms that biases absorb for signs: the flipped columns times offset = sigma(x) + sigma(-x)."""
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
        """Transform the weight of a grouped convolution, where the channels of the second axis depend on the first."""
        row = self.source_in(next(slot for slot in self.structure.slots_of[joint.tensor] if slot.axes == (0,)))
        unit = joint.unit
        # Fixed channels (-1) keep their order.
        wanted = np.append(self.element.permutation.numpy(), -1)[unit]
        # Row r of the new weight is row[r] of the old one; its columns are those of the wanted units.
        order = np.argsort(unit[row], axis=1, kind="stable")
        rank = np.argsort(np.argsort(wanted, axis=1, kind="stable"), axis=1)
        column = np.take_along_axis(order, rank, axis=1)
        return tensor[torch.from_numpy(row)[:, None].to(tensor.device), torch.from_numpy(column).to(tensor.device)]

    # By matrices.

    def learn_gains(self, tensors: Mapping[str, Tensor]) -> None:
        """Store the gains that conjugate matrices, before any of them changes.

        Args:
            tensors: Parameters, by name; a missing one raises an error once it is needed.

        Raises:
            ValueError: If a gain has a zero entry, which is not invertible.
        """
        for action in self.linear:
            action.learn(tensors)

    def acts_by_matrices(self, slot: Slot) -> bool:
        """Return whether a matrix other than permutations and scales acts on a slot."""
        return bool(self._acting(slot))

    def _acting(self, slot: Slot) -> list[LinearAction]:
        """Return the actions by matrices that change a slot."""
        found = self._acting_at.get(slot.offset)
        if found is None:
            found = self._acting_at[slot.offset] = [action for action in self.linear if action.acts_at(slot)]
        return found

    def _by_matrices(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Apply all matrices other than permutations and scales to one axis."""
        for action in self._acting(slot):
            tensor = action.on_axis(tensor, slot, axis)
        return tensor

    # On the state of an optimiser.

    def carry(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        """Transform an optimiser's state in place, so that training continues equivalently.

        Averages of gradients are divided by scales, averages of their squares by squared scales, and steps multiplied.

        Args:
            optimizer: The optimiser.
            names: The name of each parameter.

        Raises:
            ValueError: If matrices mix a parameter, or the state has an unknown entry.
        """
        structure = self.structure
        mixed = {slot.offset for slot in structure.slots if self.acts_by_matrices(slot)}
        regrouped = structure.charts.only_moving
        powers = dict(_POWERS)
        if isinstance(optimizer, torch.optim.RMSprop):
            powers["momentum_buffer"] = 0.0  # an average of gradients divided by their size
        # By name, separately for a second parameter that shares its memory, and by entry of the state.
        weights: dict[int, dict[str, Tensor]] = {}
        found: dict[tuple[int, str], dict[str, Tensor]] = {}
        for parameter in (own for group in optimizer.param_groups for own in group["params"]):
            name = names.get(parameter)
            state = optimizer.state.get(parameter, {})
            _require_known(state, parameter, powers, moves=name in structure.moving)
            if name not in structure.moving or not state:
                continue
            parts = structure.charts.names_of(name)
            if any(slot.offset in mixed for part in parts for slot in structure.slots_of.get(part, ())):
                raise ValueError(
                    f"a dense matrix mixes {name}, under which no optimiser's state is carried (second moments "
                    "cannot be); expected an element with mixing=False, or an optimiser without state"
                )
            twin = sum(name in own for own in weights.values())
            weights.setdefault(twin, {})[name] = parameter.detach()
            for key, value in state.items():
                if key in powers and isinstance(value, Tensor) and value.shape == parameter.shape:
                    found.setdefault((twin, key), {})[name] = value
        moved: list[tuple[Tensor, Tensor]] = []
        for (twin, key), values in found.items():
            for members in regrouped.stacks.values():
                lacking = [own for own in members if own not in values]
                if 0 < len(lacking) < len(members):
                    raise ValueError(
                        f"elements exchange {', '.join(members)}, and the optimiser holds no {key} of "
                        f"{', '.join(lacking)}; expected that of all, or trace_symmetry(..., exchange=False)."
                    )
            before = charted(weights[twin], regrouped)
            new = [
                (part, self._carried(held, part, powers[key], before[part]))
                for part, held in charted(values, regrouped).items()
                if part in structure.slots_of
            ]
            moved += [(values[name], value) for name, value in uncharted(new, regrouped, values)]
        for value, changed in moved:  # only now, so that an error leaves the state unchanged
            value.copy_(changed)

    def _carried(self, held: Tensor, name: str, power: float, weight: Tensor) -> Tensor:
        """Transform an average of gradients of a tensor, by the chain rule if a function of its weights is scaled.

        Args:
            held: The average.
            name: The tensor's name.
            power: The power of scales that it is multiplied by: -1 for gradients, -2 for their squares.
            weight: The tensor, before the element acts.
        """
        charts = self.structure.charts
        before = dict(charted({name: weight}, Charts(charts.added)))[name]
        slope = charts.slope(name, before)
        if slope is None:
            return self.moved(held, name, power=power, shifted=False)
        after = charts.slope(name, self.moved(before, name, shifted=False))
        assert after is not None
        return (self.moved(held * slope**power, name, power=power, shifted=False) * after**-power).to(held.dtype)


def _require_known(state: Mapping[str, Any], parameter: Tensor, known: Collection[str], *, moves: bool) -> None:
    """Check that a parameter's state consists of known averages and single numbers.

    Args:
        state: The state.
        parameter: The parameter.
        known: The names of averages.
        moves: Whether an element may change the parameter. If not, any state of this parameter alone is allowed, but no
            state of several parameters together (LBFGS).

    Raises:
        ValueError: If not.
    """
    for key, value in state.items():
        sizes = [own.numel() for own in pytree.tree_leaves(value) if isinstance(own, Tensor) and own.ndim]
        alike = isinstance(value, Tensor) and value.shape == parameter.shape
        if (not alike or key not in known) if moves and sizes else max(sizes, default=0) > parameter.numel():
            raise ValueError(
                f"the optimiser's state {key!r} cannot be carried; expected one of {', '.join(known)}, or a state that "
                "is reset (reset_state=True)"
            )


def _beside(slot: Slot, axes: tuple[int, ...]) -> Slot:
    """Adapt a slot to a tensor with two axes merged into one leading axis."""
    if slot.axes == axes:
        return replace(slot, axes=(0,), shape=(slot.size,))
    return replace(slot, axes=tuple(axis + 1 - sum(other < axis for other in axes) for axis in slot.axes))


def _on_axis(vector: Floats, slot: Slot, tensor: Tensor) -> Tensor:
    return torch.from_numpy(on_axes(vector, slot.shape, slot.axes, tensor.ndim)).to(tensor)
