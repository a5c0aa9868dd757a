"""Stacks: parameters with several members along the first axis, each with separate units (experts, heads).

During tracing, all members of a stack share one label per further axis, a *template*. A value made of one member knows
this member (`Members`). While operations keep members apart, a constraint on a template holds for each member
separately. Where values of different members are combined, the templates become shared units. Finally, each remaining
template becomes separate units of every member. See docs/theory/intertwiners.md, 2.14.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from lightning_sym.symmetry.arrays import Ints, rising
from lightning_sym.symmetry.numbering import components
from lightning_sym.symmetry.tracing.graph.capture import Capture
from lightning_sym.symmetry.tracing.graph.coordinates import core, varies
from lightning_sym.symmetry.tracing.graph.nodes import axes_of, equation_of, letters_of, shape_of
from lightning_sym.symmetry.tracing.graph.operations import Trait, is_pointwise, moving, name_of, operations
from lightning_sym.symmetry.tracing.labelling.constraints import Constraints, Label, Sighting, counted
from lightning_sym.symmetry.tracing.labelling.values import Members, Value, values_in

_PRODUCTS = ("einsum", "matmul")
_INDICES = ("index", "index_select")
_NORMS = ("layer_norm", "rms_norm")
_MIXED = object()  # values of different members are combined
_LEFT = object()  # the result combines several members


def _is_pointwise(node: fx.Node) -> bool:
    return is_pointwise(node.target) or name_of(node) in operations(Trait.CAST)


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (reader, tensor) for each reader of a tensor, after moves."""
    for user in node.users:
        name = name_of(user)
        if name in operations(Trait.MOVE | Trait.CAST) | {"getitem"} and user.args[0] is node:
            yield from _readers(user)
        else:
            yield user, node


def stacked(capture: Capture, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the parameters that may have members along their first axis, with the number of members.

    The result is empty unless a product or an index reads a tensor with three or more axes.
    """
    found, product = {}, False
    for node, name in capture.states.items():
        shape = tensors[name].shape
        if len(shape) < 2 or shape[0] < 2 or not tensors[name].is_floating_point():
            continue
        readers = list(_readers(node))
        names = [name_of(user) for user, _ in readers]
        allowed = (*_INDICES, *(_PRODUCTS if len(shape) > 2 else ()))
        if readers and all(
            own in allowed or _is_pointwise(user) or _is_batched(user)
            for own, (user, _) in zip(names, readers, strict=True)
        ):
            found[name] = int(shape[0])
            product = product or (len(shape) > 2 and any(own in allowed for own in names))
    return found if product else {}


def _is_batched(node: fx.Node) -> bool:
    """Whether a product multiplies its factors member by member."""
    equation = equation_of(node) if name_of(node) in _PRODUCTS else None
    if equation is None:
        return False
    given: Any = node.args[1] if name_of(node) == "einsum" else node.args[:2]
    *terms, out = letters_of(equation)
    several = [
        {letter for letter, size in zip(term, shape_of(value) or (), strict=True) if size > 1}
        for term, value in zip(terms, given, strict=True)
    ]
    return bool(set.intersection(*several) & {*out})


def _agree(numbers: Sequence[Tensor]) -> bool:
    """Whether the members agree wherever several are known; tensors have equal ranks and broadcast."""
    return all(bool((core(number) == core(numbers[0])).all()) for number in numbers)


class Flattened(NamedTuple):
    """The units of all members on one axis.

    Attributes:
        member: The member of each.
        templates: Their templates; the label has no axes.
        wholes: The members as units.
        units: The units themselves.
        where: The operation.
    """

    member: Ints
    templates: Label
    wholes: Label
    units: Label
    where: str


class Stacks:
    """The state of stacks during tracing.

    Attributes:
        sizes: By name of a stacked parameter, the number of its members.
        shown: By name of a value inside the network, its members.
        flattened: Units of all members that lie on one axis.
        doubled: Scales of members in values that templates act on, with these. Those of the units include them.
    """

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self.sizes: dict[str, int] = {}
        self.shown: dict[str, Members | None] = {}
        self.flattened: list[Flattened] = []
        self.doubled: list[tuple[Ints, Ints]] = []
        self.atoms, self.scales = np.zeros(0, np.int64), np.zeros(0, np.int64)  # the stack size of each template, or 0
        self.shared_atoms: list[Ints] = []
        self.shared_scales: list[Ints] = []
        self._numbers = 0

    # Templates.

    def _mark(self, atoms: tuple[int, int], scales: tuple[int, int], size: int) -> None:
        for name, (start, stop) in (("atoms", atoms), ("scales", scales)):
            known: Ints = getattr(self, name)
            known = np.r_[known, np.zeros(max(stop - len(known), 0), np.int64)]
            known[start:stop] = size
            setattr(self, name, known)
        for own in self.flattened:
            for label in (own.wholes, own.units):
                self.atoms[label.atom[label.atom < len(self.atoms)]] = 0
                self.scales[label.scale[label.scale < len(self.scales)]] = 0

    def state(self, value: Value) -> Value:
        """Return the value of a parameter, with members if it is a stack."""
        size = self.sizes.get(value.state or "")
        if size is None or not value.labels:
            return value
        for label in value.labels[1:]:
            if not self._holds(value.with_labels(label)):
                first, scale = int(label.atom.flat[0]), int(label.scale.flat[0])
                self._mark((first, first + label.size), (scale, scale + label.size), size)
        number = torch.arange(size).reshape(-1, *[1] * (value.ndim - 1)).expand(value.shape)
        return replace(value, members=Members(number, size))

    def holds(self, label: Label) -> bool:
        """Whether a label has templates."""
        pairs = ((self.atoms, label.atom), (self.scales, label.scale))
        return any(bool(known[ids[ids < len(known)]].any()) for known, ids in pairs)

    def _holds(self, value: Value) -> bool:
        """Whether templates act on a value."""
        return any(self.holds(label) for label in value.labels)

    def _share(self, value: Value) -> None:
        for label in value.labels:
            self.shared_atoms.append(label.atom.ravel())
            self.shared_scales.append(label.scale.ravel())

    # The walk.

    def before(self, arguments: Any) -> tuple[int, int]:
        """Share the templates of arguments without known members; return the current number of atoms and scales."""
        if self.sizes:
            for value in values_in(arguments):
                if value.members is None and self._holds(value):
                    self._share(value)
        return self.constraints.atoms, self.constraints.scales

    def after(self, node: fx.Node, args: Any, kwargs: Any, result: Any, since: tuple[int, int]) -> Any:
        """Return an operation's result with its members, or share the templates that it combined.

        Args:
            node: The operation.
            args: Its arguments.
            kwargs: Its keyword arguments.
            result: Its result.
            since: The result of `before`.
        """
        values = values_in((args, kwargs))
        inside = [value for value in values if value.members is not None]
        if inside and name_of(node) != "getitem":
            known = self._follow(node, args, kwargs, inside)
            if known is _MIXED:
                for value in inside:
                    self._share(value)
            else:
                size = inside[0].members.size if inside[0].members else 0
                self._mark((since[0], self.constraints.atoms), (since[1], self.constraints.scales), size)
                self._unmark_scales(result, since[1])
            if known is _MIXED or known is _LEFT:
                result = torch.utils._pytree.tree_map_only(Value, lambda v: replace(v, members=None), result)
            else:
                made = name_of(node) in operations(Trait.MOVE | Trait.CAST) and inside[0].of_state
                result = self._with(result, known, size, made=made)
        return torch.utils._pytree.tree_map_only(Value, self._named, result)

    def _unmark_scales(self, result: Any, since: int) -> None:
        """Unmark new scales of units that are not templates, such as the members themselves."""
        for value in values_in(result):
            for label in value.labels:
                if not self._holds(value.with_labels(label.scaled_by(np.zeros_like(label.scale)))):
                    self.scales[label.scale[label.scale >= since]] = 0

    def _with(self, result: Any, numbers: Any, size: int, *, made: bool) -> Any:
        parts, several = (result, True) if isinstance(result, (list, tuple)) else ([result], False)
        numbers = numbers if isinstance(numbers, (list, tuple)) else [numbers]
        for part, number in zip(parts, numbers, strict=True):
            for own in part.labels if isinstance(part, Value) and not made else ():
                if not self.holds(own) and any(varies(core(number), axis) for axis in own.axes):
                    self.doubled += [(own.scale, each.atom) for each in part.labels if self.holds(each)]
        new = [
            replace(part, members=Members(number, size))
            if isinstance(part, Value) and (self._holds(part) or part.chooses is not None)
            and not self._stands_across(part, number)
            else part
            for part, number in zip(parts, numbers, strict=True)
        ]  # fmt: skip
        return new if several else new[0]

    def _stands_across(self, value: Value, number: Tensor) -> bool:
        """Whether a template acts along an axis with several members."""
        axes = {axis for label in value.labels if self._holds(value.with_labels(label)) for axis in label.axes}
        return any(varies(core(number), axis) for axis in axes)

    def _named(self, value: Value) -> Value:
        """Number the members that were just chosen."""
        if value.chooses is None or value.members is not None or not self.sizes:
            return value
        count = int(np.prod(value.shape))
        self._numbers -= count
        number = torch.arange(self._numbers, self._numbers + count).reshape(value.shape)
        return replace(value, members=Members(number, value.chooses.size))

    def _follow(self, node: fx.Node, args: Any, kwargs: Any, inside: list[Value]) -> Any:
        """Return the members of a result's elements (or of each result), or a marker if they are mixed."""
        name = name_of(node)
        if len({value.members.size for value in inside if value.members}) > 1:
            return _MIXED
        meta: Any = node.meta.get("val")
        if name in _INDICES and len(inside) == 2:
            return _picked(name, args, tuple(meta.shape))
        if name in operations(Trait.MOVE) and len(inside) == 1 and args[0] is inside[0]:
            return _moved(node, args, kwargs)
        if name in (*_PRODUCTS, "linear"):
            return _contracted(node, args, tuple(meta.shape))
        if _is_pointwise(node) and isinstance(meta, Tensor):
            rank = meta.ndim
            numbers = [v.members.number for v in inside if v.members]
            wide = [number[(None,) * (rank - number.ndim)] for number in numbers]
            return torch.broadcast_to(_widest(wide), meta.shape) if _agree(wide) else _MIXED
        if len(inside) != 1 or args[0] is not inside[0] or not isinstance(meta, Tensor):
            return _MIXED
        number = inside[0].members.number if inside[0].members else torch.zeros(0)
        if name in operations(Trait.PAD | Trait.POOL | Trait.MAX_POOL | Trait.RESIZE) and number.ndim == meta.ndim:
            changed = [axis for axis, size in enumerate(meta.shape) if size != number.shape[axis]]
            if any(varies(core(number), axis) for axis in changed):
                return _MIXED
            for axis in changed:
                number = number.narrow(axis, 0, 1)
            return number.expand(meta.shape)
        if name in operations(Trait.SUM):
            return _summed(number, args, kwargs, tuple(meta.shape))
        if name in operations(Trait.SOFTMAX):
            return _MIXED if varies(core(number), args[1]) else number
        if name in _NORMS:
            axes = range(number.ndim - len(args[1]), number.ndim)
            return _MIXED if any(varies(core(number), axis) for axis in axes) else number
        return _MIXED


def _widest(numbers: Sequence[Tensor]) -> Tensor:
    """Broadcast the first of several agreeing tensors of members to the common shape."""
    return core(numbers[0]).expand(np.broadcast_shapes(*(core(number).shape for number in numbers)))


def _moved(node: fx.Node, args: Any, kwargs: Any) -> Any:
    value, rest = args[0], args[1:]
    if any(v.concrete is None for v in values_in((rest, kwargs))):
        return _MIXED
    rest, kwargs = torch.utils._pytree.tree_map(lambda v: v.concrete if isinstance(v, Value) else v, (rest, kwargs))
    return moving(node, rest, kwargs)(value.members.number)


def _picked(name: str, args: Any, shape: tuple[int, ...]) -> Any:
    """Return the members of elements taken from a stack at indices of members."""
    value, index = (args[0], args[1][0]) if name == "index" else (args[0], args[2])
    first = name == "index" and all(other is None for other in args[1][1:])
    if not (first or (name == "index_select" and args[1] == 0)) or not isinstance(index, Value):
        return _MIXED
    if index.members is None or index.chooses is None or value.members is None:
        return _MIXED
    number = value.members.number
    line = torch.arange(number.shape[0]).reshape(-1, *[1] * (number.ndim - 1))
    if number.shape[0] != value.members.size or not bool((core(number) == line).all()):
        return _MIXED
    return index.members.number.reshape((*index.shape, *[1] * (value.ndim - 1))).expand(shape)


def _contracted(node: fx.Node, args: Any, shape: tuple[int, ...]) -> Any:
    if (equation := equation_of(node)) is None:
        return _MIXED
    *terms, out = letters_of(equation)
    values = list(args[1]) if name_of(node) == "einsum" else list(args[:2])
    if name_of(node) == "linear" and len(args) > 2 and args[2] is not None:
        values, terms = [*values, args[2]], [*terms, out[-1]]
    every = "".join(dict.fromkeys(out + "".join(terms)))
    numbers = []
    for term, value in zip(terms, values, strict=True):
        if value.members is None:
            continue
        order = [term.index(letter) for letter in every if letter in term]
        number = value.members.number.permute(order)
        numbers.append(number[tuple(slice(None) if letter in term else None for letter in every)])
    if not _agree(numbers):
        return _MIXED
    number = _widest(numbers)
    summed = [axis for axis, letter in enumerate(every) if letter not in out]
    if any(number.shape[axis] > 1 and varies(core(number), axis) for axis in summed):
        return _LEFT
    for axis in reversed(summed):
        number = number.select(axis, 0)
    return number.expand(shape)


def _summed(number: Tensor, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Any:
    gone = sorted(axes_of(args[1] if len(args) > 1 else kwargs.get("dim"), number.ndim), reverse=True)
    if any(varies(core(number), axis) for axis in gone):
        return _LEFT
    for axis in gone:
        number = number.narrow(axis, 0, 1) if len(shape) == number.ndim else number.select(axis, 0)
    return number


# From templates to separate units.


class _Images:
    """Variables with one copy per member; the first member keeps the template itself."""

    def __init__(self, sizes: Ints, count: int) -> None:
        self.sizes = np.r_[sizes, np.zeros(count - len(sizes), np.int64)]
        extra = np.maximum(self.sizes - 1, 0)
        self.start = count + np.cumsum(extra) - extra
        self.count = count + int(extra.sum())

    def of(self, ids: Ints, member: int | Ints) -> Ints:
        """Return the variables of a member, or one of each; variables other than templates are common to all."""
        return np.where((self.sizes[ids] > 0) & (member > 0), self.start[ids] + member - 1, ids)

    def each(self, ids: Ints) -> Ints:
        """Return all variables, followed by the templates' copies for further members. Shape (n,)."""
        ids = ids.ravel()
        copies = [self.of(ids[self.sizes[ids] > member], member) for member in range(1, int(self.sizes.max(initial=0)))]
        return np.concatenate([ids, *copies])

    def columns(self, table: Ints, *, ids: int | None = None) -> list[Ints]:
        """Return the columns of a table of variables for each member. Shapes (rows, n).

        Args:
            table: Variables; the templates in a column belong to stacks of one size.
            ids: The number of rows that are variables; by default all.
        """
        rows = table[:ids]
        size = self.sizes[rows].max(0, initial=0)
        result = [table[:, size == 0]] if (size == 0).any() else []
        for own in np.unique(size[size > 0]).tolist():
            part = table[:, size == own]
            result += [np.concatenate([self.of(part[:ids], m), part[len(rows) :]]) for m in range(own)]
        return result


def _shared(stacks: Stacks, axis_labels: dict[str, tuple[Label, ...]]) -> tuple[Ints, Ints]:
    """Return the stack sizes of the remaining templates, or 0: for atoms, and for scales."""
    constraints = stacks.constraints
    atoms = np.r_[stacks.atoms, np.zeros(constraints.atoms - len(stacks.atoms), np.int64)]
    scales = np.r_[stacks.scales, np.zeros(constraints.scales - len(stacks.scales), np.int64)]
    for ids in stacks.shared_atoms:
        atoms[ids] = 0
    for ids in stacks.shared_scales:
        scales[ids] = 0
    if not atoms.any():
        return atoms, scales
    component = components(constraints.atoms, [*constraints.merges, *constraints.contracted, *constraints.turned])
    fixed, still = np.zeros(constraints.atoms, bool), np.ones(constraints.scales, bool)
    for ids in constraints.fixed_atoms:
        fixed[component[ids]] = True
    for each in (constraints.fixed_magnitudes, constraints.fixed_signs):
        at = np.zeros(constraints.scales, bool)
        for ids in each:
            at[ids] = True
        still &= at
    for label in (label for name in stacks.sizes for label in axis_labels[name][1:]):
        if fixed[component[label.atom]].all() and still[label.scale].all():
            atoms[label.atom] = 0  # fixed units are common to all members
            scales[label.scale] = 0
    before = -1
    while before != (before := int((atoms > 0).sum())):
        least, most = np.full(component.max(initial=0) + 1, 2**40), np.zeros(component.max(initial=0) + 1, np.int64)
        np.minimum.at(least, component, atoms)
        np.maximum.at(most, component, atoms)
        atoms[(least != most)[component]] = 0
        for name in stacks.sizes:
            labels = axis_labels[name][1:]
            several = sum(bool((atoms[label.atom] > 0).all()) for label in labels) > 2
            for label in labels:
                if several or not (atoms[label.atom] > 0).all():
                    atoms[label.atom] = 0
                    scales[label.scale] = 0
    for variables, _ in constraints.magnitude_equations + constraints.sign_equations:
        own = scales[variables]
        several = ((own > 0) & (own < own.max(1, initial=0, keepdims=True))).any(1)
        scales[variables[several]] = 0
    return atoms, scales


def unstack(stacks: Stacks, axis_labels: dict[str, tuple[Label, ...]]) -> tuple[set[str], set[str]]:
    """Give each member of a stack separate units in all constraints.

    Returns:
        The parameters with such units, on two axes together. The names of values inside the network with an
        input-dependent action.
    """
    constraints = stacks.constraints
    atoms, scales = _shared(stacks, axis_labels)
    for row in stacks.flattened:
        if not atoms[row.templates.atom].all():
            constraints.fix_units(row.templates.atom)
            constraints.notes[f"{row.where}: {counted('two labelled axes became one', row.templates.atom)}"] = None
            tag = constraints.derive_tags(row.units.tag, row.templates.atom)
            constraints.occurrences.append(Sighting(Label((), row.units.atom, tag, row.units.scale)))
    if not atoms.any():
        for row in stacks.flattened:
            constraints.equate([(row.units.scale, 1.0), (row.wholes.scale, -1.0), (row.templates.scale, -1.0)])
        return set(), set()
    known = len(constraints._pending)
    units, factors = _Images(atoms, constraints.atoms), _Images(scales, constraints.scales)
    pending = np.full(max(units.count, known), -1)
    pending[: constraints.atoms] = constraints._pending[: constraints.atoms]
    templates = np.flatnonzero(atoms)
    for member in range(1, int(atoms.max())):
        own = templates[atoms[templates] > member]
        pending[units.of(own, member)] = constraints._pending[own]
    constraints._pending = pending
    for name in ("merges", "contracted", "turned", "planes", "blocks", "shared_gains"):
        setattr(constraints, name, _pairs(units, getattr(constraints, name)))
    constraints.copies = [
        (part[0], part[1], part[2])
        for copies in constraints.copies
        for part in units.columns(np.stack([array.ravel() for array in copies]), ids=2)
    ]
    for equations in (constraints.magnitude_equations, constraints.sign_equations):
        equations[:] = [(part.T, c) for variables, c in equations for part in factors.columns(variables.T)]
    for name in ("restricted", "held", "normed", "centred", "gained", "divided"):
        setattr(constraints, name, [units.each(ids) for ids in getattr(constraints, name)])
    for name in ("fixed_magnitudes", "fixed_signs"):
        setattr(constraints, name, [factors.each(ids) for ids in getattr(constraints, name)])
    constraints.atoms, constraints.scales = units.count, factors.count
    for row in stacks.flattened:
        unit, factor = units.of(row.templates.atom, row.member), factors.of(row.templates.scale, row.member)
        apart = atoms[row.templates.atom] > 0
        constraints.merges.append((unit[apart], row.units.atom[apart]))
        constraints.equate([(row.units.scale, 1.0), (row.wholes.scale, -1.0), (factor, -1.0)])
    for scale, templates in stacks.doubled:
        if atoms[templates].any():
            constraints.fix_scales(scale)
    joint = _on_parameters(stacks, axis_labels, units, factors)
    unknown = _on_values(stacks, units, factors)
    _keep_inside(constraints, units)
    return joint, unknown


def _keep_inside(constraints: Constraints, units: _Images) -> None:
    """Fix templates inside their members, which may still be permuted."""
    fixed = rising(np.concatenate([np.zeros(0, np.int64), *(ids.ravel() for ids in constraints.fixed_atoms)]))
    held = fixed[units.sizes[fixed] > 0]
    constraints.fixed_atoms = [fixed[units.sizes[fixed] == 0]]
    for size in np.unique(units.sizes[held]).tolist():
        own = held[units.sizes[held] == size]
        tag = constraints.derive_tags(np.zeros_like(own), own)
        atom = np.stack([units.of(own, member) for member in range(size)])
        label = Label((), atom.ravel(), np.broadcast_to(tag, atom.shape).ravel(), np.zeros(atom.size, np.int64))
        constraints.occurrences.append(Sighting(label))


def _pairs(images: _Images, pairs: list[tuple[Ints, Ints]]) -> list[tuple[Ints, Ints]]:
    table = np.concatenate([np.zeros((2, 0), np.int64), *(np.stack([a.ravel(), b.ravel()]) for a, b in pairs)], 1)
    return [(part[0], part[1]) for part in images.columns(table)]


def _spread(label: Label, size: int, units: _Images, factors: _Images) -> Label:
    """Return the label of all members of a stack; its first axis indexes the members."""
    atom, scale = (
        np.stack([images.of(ids, member) for member in range(size)])
        for images, ids in ((units, label.atom), (factors, label.scale))
    )
    return Label((0, *label.axes), atom, np.broadcast_to(label.tag, atom.shape), scale)


def _on_parameters(
    stacks: Stacks, axis_labels: dict[str, tuple[Label, ...]], units: _Images, factors: _Images
) -> set[str]:
    constraints, joint = stacks.constraints, set()
    seen = np.concatenate([np.zeros(0, np.int64), *constraints.normed, *constraints.centred])
    fixed = rising(np.concatenate([np.zeros(0, np.int64), *(ids.ravel() for ids in constraints.fixed_atoms)]))
    held = rising(np.concatenate([np.zeros(0, np.int64), *(ids.ravel() for ids in constraints.fixed_magnitudes)]))
    for name, size in stacks.sizes.items():
        members, *labels = axis_labels[name]
        own = [label for label in labels if (units.sizes[label.atom] > 0).any()]
        if all(np.isin(label.atom, fixed).all() and np.isin(label.scale, held).all() for label in own):
            continue  # only whole members move
        if not own:
            continue
        joint.add(name)
        spread = [_spread(label, size, units, factors) for label in own]
        whole = np.broadcast_to(members.scale[:, None], spread[0].scale.shape)  # the scale of a member
        spread[0] = spread[0].scaled_by(constraints.product((spread[0].scale, 1.0), (whole, 1.0)))
        for label in spread:
            constraints.block(np.broadcast_to(members.atom[:, None], label.atom.shape), label.atom)
            if len(spread) > 1 or np.isin(label.atom, seen).any():
                constraints.restrict(label)
        axis_labels[name] = (*(label for label in labels if label not in own), *spread)
    return joint


def _on_values(stacks: Stacks, units: _Images, factors: _Images) -> set[str]:
    unknown: set[str] = set()
    occurrences: list[Sighting] = []
    for sighting in stacks.constraints.occurrences:
        label = sighting.label
        held = units.sizes[label.atom] > 0
        if not held.any():
            occurrences.append(sighting)
            continue
        if sighting.tensor is not None:
            unknown.add(sighting.tensor)
        atom, tag, scale = (part.ravel() for part in label.parts)
        flat, parts = held.ravel(), [(atom, tag, scale)]
        for member in range(1, int(units.sizes[atom].max())):
            mine = flat & (units.sizes[atom] > member)
            parts.append((units.of(atom[mine], member), tag[mine], factors.of(scale[mine], member)))
        occurrences.append(Sighting(Label((), *(np.concatenate(each) for each in zip(*parts, strict=True)))))
    stacks.constraints.occurrences = [Sighting(each.label) if each.tensor in unknown else each for each in occurrences]
    return unknown
