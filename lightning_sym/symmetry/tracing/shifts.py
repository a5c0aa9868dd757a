"""Shifts: what may be added to weights without a change of the function, and which other weights take it off again.

Found by data flow, from the operations alone. See docs/theory/intertwiners.md, 3.6.
"""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor, fx

from lightning_sym.symmetry.tracing.capture import Capture
from lightning_sym.symmetry.tracing.equations import solve
from lightning_sym.symmetry.tracing.invisible import (
    MOVEMENTS,
    PASSES,
    SOFTMAX,
    TRANSPOSES,
    Backwards,
    Gains,
    argument,
    moved,
    name_of,
    reduced,
    shape_of,
    shared_memory,
)

Ints = NDArray[np.int64]
_FACTOR = 1e4  # by which shifts may grow or shrink at once
_MOST = 2**20  # entries of a parameter of several axes that are told apart

# What the kinds of shifts are called in tables.
NORM = "biases that batch norms take off"
LINEAR = "biases that linear layers take off"
UNSEEN = "biases that nothing sees"
OPPOSED = "weights against one another"
WRITERS = "means that norms take off"
READERS = "rows that read a layer norm"


@dataclass(frozen=True, eq=False)
class Fold:
    """Gains between which a rotation acts on an axis: there, shifts are counted in multiples of their product.

    What a rotation makes of a shift is then the same for all networks (docs/theory/intertwiners.md, 3.6).

    Attributes:
        axis: The tensor's axis.
        at: Where the rotation's units stand on it. Shape (units,).
        gains: Names of gains, where the units stand in them (shape (units,)), and the powers.
    """

    axis: int
    at: Ints
    gains: tuple[tuple[str, Ints, int], ...]

    def multiples(self, size: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return of what an axis's entries are multiples. Shape (size,), float64, on the CPU."""
        found = torch.ones(size, dtype=torch.float64)
        for name, place, power in self.gains:
            gain = tensors[name].detach().to("cpu", torch.float64).reshape(-1)[torch.from_numpy(place)]
            if power < 0 and bool((gain == 0).any()):
                raise ValueError(
                    f"{name} holds a zero, by which a shift would be divided; expected gains that are not zero, "
                    "or an element without shifts: sample(shifts=False)"
                )
            found[torch.from_numpy(self.at)] *= gain**power
        return found


@dataclass(frozen=True)
class Added:
    """What a shift adds to one tensor.

    Attributes:
        tensor: Its name.
        axes: The axes along which what is added varies as the shift says; along all others it is one number, or a
            multiple of the gains.
        shape: The tensor's sizes along these axes.
        matrix: What is added on these axes, from the shift: (positions, size), sparse; None for the identity.
        axis: The axis of the gains, if there are any.
        gains: Tensors on that axis, and the powers to which they multiply what is added.
        folds: Axes along which it is counted in multiples of gains.
    """

    tensor: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    matrix: sparse.csr_matrix | None = None
    axis: int | None = None
    gains: Gains = ()
    folds: tuple[Fold, ...] = ()

    @property
    def needed(self) -> set[str]:
        """The names of the gains."""
        return {gain for gain, _ in self.gains} | {name for fold in self.folds for name, *_ in fold.gains}

    def of(self, shift: Tensor) -> Tensor:
        """Return what is added on the axes."""
        return (shift if self.matrix is None else torch.from_numpy(self.matrix @ shift.numpy())).reshape(self.shape)


@dataclass(frozen=True)
class TakenOff:
    """A bias that takes off what a shift adds to the input of its linear layer: b - W t.

    Attributes:
        bias: Its name.
        weight: The weight.
        axis: The weight's axis over which the layer sums.
        out: The weight's axis of the outputs.
        matrix: t from the shift: (inputs, size), sparse.
        folds: Of what t is counted in multiples.
    """

    bias: str
    weight: str
    axis: int
    out: int
    matrix: sparse.csr_matrix
    folds: tuple[Fold, ...] = ()

    @property
    def needed(self) -> set[str]:
        """The names of the tensors that say what is taken off."""
        return {self.weight} | {name for fold in self.folds for name, *_ in fold.gains}

    def entering(self, shift: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return t. Shape (inputs,), float64."""
        values = torch.from_numpy(self.matrix @ shift.numpy())
        for fold in self.folds:
            values = values * fold.multiples(len(values), tensors)
        return values


@dataclass(frozen=True)
class Balanced:
    """A bias that takes off what a shift u adds to rows that read a layer norm: b - u sum(beta / gamma).

    Attributes:
        bias: Its name.
        gain: The norm's gain gamma; None for ones.
        offset: The norm's bias beta.
    """

    bias: str
    gain: str | None
    offset: str


@dataclass(frozen=True)
class Shift:
    """A vector that may be added to tensors without a change of the function.

    Attributes:
        kind: What it is called in tables.
        size: Its number of entries.
        added: What it adds, to one tensor after the other. The first names it.
        taken_off: The biases that take off what linear layers make of it.
        balanced: The bias that takes off what rows that read a layer norm make of it.
        pivots: For each entry, where it alone is added, once: (number in `added`, position on its axes). Shape
            (size, 2). None where all entries are added, one by one, to the one tensor.
    """

    kind: str
    size: int
    added: tuple[Added, ...]
    taken_off: tuple[TakenOff, ...] = ()
    balanced: tuple[Balanced, ...] = ()
    pivots: Ints | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors to which it is added."""
        return tuple(part.tensor for part in self.added)


@dataclass(frozen=True)
class Shown:
    """What shifts do to a value inside the network.

    Attributes:
        axes: The axes along which it varies what they add.
        added: By the number of a shift, what it adds on these axes: (positions, size), sparse.
        unknown: The numbers of the shifts that add something that depends on the input.
    """

    axes: tuple[int, ...] = ()
    added: tuple[tuple[int, sparse.csr_matrix], ...] = ()
    unknown: tuple[int, ...] = ()


@dataclass
class _Unknowns:
    """Numbers of what is added to one entry of a tensor or value; number 0 is nothing."""

    count: int = 1
    equations: list[tuple[Ints, NDArray[np.float64]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.zero = np.ones(1, bool)

    def fresh(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        numbers = torch.arange(self.count, self.count + size).reshape(shape)
        self.count += size
        if self.count > len(self.zero):
            self.zero = np.r_[self.zero, np.zeros(max(self.count, 4096), bool)]
        return numbers

    def vanish(self, numbers: Tensor) -> None:
        self.zero[numbers.reshape(-1).numpy()] = True

    def living(self, numbers: Tensor | None) -> Tensor | None:
        """Return the same numbers, 0 where nothing can be added any more; None if that is everywhere."""
        if numbers is None:
            return None
        gone = torch.from_numpy(np.asarray(self.zero[numbers.numpy()]))
        return None if bool(gone.all()) else numbers.masked_fill(gone, 0)

    def combined(self, *terms: tuple[Tensor, float]) -> Tensor:
        """Return the numbers of a sum of multiples."""
        shape = np.broadcast_shapes(*(numbers.shape for numbers, _ in terms))
        stacked = np.stack([numbers.expand(shape).reshape(-1).numpy() for numbers, _ in terms])
        pairs, inverse = np.unique(stacked, axis=1, return_inverse=True)
        result = self.fresh((pairs.shape[1],))
        self.equations.append((np.vstack([result.numpy(), pairs]).T, np.array([-1.0, *(by for _, by in terms)])))
        self.vanish(result[torch.from_numpy((pairs == 0).all(0))])
        return result[torch.from_numpy(inverse.reshape(-1))].reshape(shape)

    def equate(self, one: Tensor | None, two: Tensor | None) -> None:
        if one is None and two is None:
            return
        if one is None or two is None:
            self.vanish(one if two is None else two)  # type: ignore[arg-type]
            return
        shape = np.broadcast_shapes(one.shape, two.shape)
        pairs = torch.stack([numbers.expand(shape).reshape(-1) for numbers in (one, two)], 1).numpy()
        self.equations.append((pairs, np.array([1.0, -1.0])))


def _plain(numbers: Tensor) -> Tensor | None:
    """Keep the axes along which numbers change, the others with one entry; None if there are none but zeros."""
    for axis, size in enumerate(numbers.shape):
        if size > 1 and bool((numbers == numbers.narrow(axis, 0, 1)).all()):
            numbers = numbers.narrow(axis, 0, 1)
    return numbers.contiguous() if bool(numbers.any()) else None


def find_shifts(
    captures: Sequence[Capture],
    tensors: Mapping[str, Tensor],
    constants: Collection[str],
    *,
    keep: Collection[str] = (),
    outputs: bool = False,
) -> tuple[list[Shift], dict[str, Shown]]:
    """Return what may be added to a network's tensors, and what that does to its named values.

    Args:
        captures: The network, captured on one example or several.
        tensors: Its parameters and buffers by name.
        constants: Those that are in no state dict.
        keep: Weights whose rows keep their mean.
        outputs: Whether a softmax reads the outputs along their last axis, which does not see what they have in common.
    """
    shifts = Shifts(tensors, constants, outputs=outputs)
    for capture in captures:
        shifts.walk(capture)
    for name in keep:
        shifts.writers.pop(name, None)
    return shifts.found()


class Shifts:
    """Collects, over all walks through a network, what may be added to its tensors.

    Args:
        tensors: Parameters and buffers by name.
        constants: Those that are in no state dict: no tensors of the network, but part of its function.
        outputs: Whether a softmax reads the outputs along their last axis.
    """

    def __init__(self, tensors: Mapping[str, Tensor], constants: Collection[str], *, outputs: bool = False) -> None:
        self.tensors = {n: t for n, t in tensors.items() if n not in constants and t.is_floating_point()}
        self.outputs = outputs
        self.unknowns = _Unknowns()
        self.sources: dict[str, Tensor] = {}
        self.reached: dict[str, Tensor] = {}  # which elements of tensors are read, on any example
        self.lost: set[str] = set()  # tensors that something sees as they are
        self.layers: dict[tuple[str | None, str, int, int], list[Tensor | None]] = {}  # what enters each linear layer
        self.others: set[str] = set()  # biases that are not only those of linear layers
        self.writers: dict[str, dict[frozenset[int], Gains]] = {}
        self.readers: dict[str, set[Any]] = {}
        self.values: dict[str, tuple[Tensor | None, bool]] = {}

    def walk(self, capture: Capture) -> None:
        """Walk through a capture of the network."""
        _Walk(self, capture).run()

    def source(self, name: str, *, axes: Collection[int] | None = None) -> Tensor | None:
        """Return the numbers of what is added to a tensor; along all but some axes the same."""
        if name not in self.tensors:
            return None
        shape = tuple(self.tensors[name].shape)
        wanted = tuple(size if axes is None or axis in axes else 1 for axis, size in enumerate(shape))
        if name not in self.sources:
            self.sources[name] = self.unknowns.fresh(wanted)
            if name in self.lost:
                self.unknowns.vanish(self.sources[name])
        found = self.sources[name]
        if any(a > b for a, b in zip(found.shape, wanted, strict=True)):  # used in another way before: what both allow
            narrow = self.unknowns.fresh(wanted)
            self.unknowns.equate(found, narrow)
            self.sources[name] = found = narrow
        return found

    def lose(self, name: str) -> None:
        """Say that nothing may be added to a tensor."""
        self.lost.add(name)
        if name in self.sources:
            self.unknowns.vanish(self.sources[name])

    # What has been found.

    def found(self) -> tuple[list[Shift], dict[str, Shown]]:
        """Return all shifts; and what they do to the values that have a name."""
        taken = self._taken_off()
        forms = solve(
            self.unknowns.count, self.unknowns.equations, np.flatnonzero(self.unknowns.zero[: self.unknowns.count])
        )
        shifts, columns = self._constant(forms, taken)
        for name, ways in self.writers.items():
            for axes, gains in ways.items():
                shape = self.tensors[name].shape
                others = tuple(axis for axis in range(len(shape)) if axis not in axes)
                axis = min(axes) if gains else None
                sizes = tuple(shape[other] for other in others)
                shifts.append(Shift(WRITERS, math.prod(sizes), (Added(name, others, sizes, None, axis, gains),)))
        for name, read in self.readers.items():
            if len(read) == 1 and None not in read:
                ((bias, gain, offset, axis),) = read
                out = 1 - axis
                size = self.tensors[name].shape[out]
                gains = ((gain, -1),) if gain is not None else ()
                balanced = (Balanced(bias, gain, offset),) if offset is not None else ()
                shifts.append(Shift(READERS, size, (Added(name, (out,), (size,), None, axis, gains),), (), balanced))
        shown = {name: self._shown(forms, columns, shifts, *value) for name, value in self.values.items()}
        return shifts, shown

    def _taken_off(self) -> list[tuple[str, str, int, int, Tensor]]:
        """Demand that every layer of one bias takes off the same; return what is taken off."""
        by_bias: dict[str | None, list[tuple[str, int, int]]] = {}
        for bias, weight, axis, out in self.layers:
            by_bias.setdefault(bias, []).append((weight, axis, out))
        result = []
        for (bias, weight, axis, out), entering in self.layers.items():
            living = [self.unknowns.living(numbers) for numbers in entering]
            if bias is None or bias in self.others or bias in self.lost or len(by_bias[bias]) > 1:
                for numbers in living:
                    if numbers is not None:
                        self.unknowns.vanish(numbers)
                continue
            for numbers in living[1:]:
                self.unknowns.equate(living[0], numbers)
            if living[0] is not None:
                result.append((bias, weight, axis, out, living[0]))
        return result

    def _constant(
        self, forms: sparse.csr_matrix, taken: Sequence[tuple[str, str, int, int, Tensor]]
    ) -> tuple[list[Shift], list[Any]]:
        """Return the shifts by constants, and which of the free numbers each has as entries."""
        added, off = {}, []
        for name, numbers in self.sources.items():
            own = forms[numbers.reshape(-1).numpy()]
            if own.nnz:
                added[name] = own
        for bias, weight, axis, out, numbers in taken:
            own = forms[numbers.reshape(-1).numpy()]
            if own.nnz:
                size = self.tensors[weight].shape[axis]
                whole = own if own.shape[0] == size else sparse.vstack([own] * size).tocsr()
                off.append((bias, weight, axis, out, whole))
        keys: dict[int, list[Any]] = {}
        for index, own in [*added.items(), *enumerate(entry[-1] for entry in off)]:
            for column in np.unique(own.indices).tolist():
                keys.setdefault(column, []).append(index)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for column, key in keys.items():
            if any(isinstance(index, str) for index in key):  # what is added to no tensor changes nothing
                groups.setdefault(tuple(key), []).append(column)
        order = {name: place for place, name in enumerate(self.tensors)}
        shifts, columns = [], []
        for kind, members in sorted(groups.items(), key=lambda item: min(order[n] for n in item[0] if n in order)):
            column = np.array(sorted(members))
            names = sorted((n for n in kind if isinstance(n, str)), key=order.__getitem__)
            parts = [(name, self.sources[name], added[name][:, column].tocsr()) for name in names]
            basis, pivots = _pivoted([matrix for _, _, matrix in parts])
            shifts.append(
                Shift(
                    _kind(parts, [off[index] for index in kind if isinstance(index, int)], self.tensors),
                    basis.shape[1],
                    tuple(
                        Added(name, axes, tuple(numbers.shape[axis] for axis in axes), (matrix @ basis).tocsr())
                        for name, numbers, matrix in parts
                        for axes in [_axes(numbers)]
                    ),
                    tuple(
                        TakenOff(*off[index][:-1], (off[index][-1][:, column] @ basis).tocsr())
                        for index in kind
                        if isinstance(index, int)
                    ),
                    pivots=pivots,
                )
            )
            columns.append((column, basis))
        return shifts, columns

    def _shown(
        self,
        forms: sparse.csr_matrix,
        columns: Sequence[Any],
        shifts: Sequence[Shift],
        numbers: Tensor | None,
        dim: bool,
    ) -> Shown:
        unknown = tuple(i for i, shift in enumerate(shifts) if shift.kind not in (READERS, LINEAR, NORM)) if dim else ()
        if numbers is None:
            return Shown(unknown=unknown)
        own = forms[numbers.reshape(-1).numpy()]
        parts = [(index, (own[:, column] @ basis).tocsr()) for index, (column, basis) in enumerate(columns)]
        return Shown(_axes(numbers), tuple((index, matrix) for index, matrix in parts if matrix.nnz), unknown)


def _axes(numbers: Tensor) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(numbers.shape) if size > 1)


def _pivoted(matrices: Sequence[sparse.csr_matrix]) -> tuple[sparse.csr_matrix, Ints]:
    """Return a basis in which each entry stands alone somewhere, and where.

    Args:
        matrices: (positions, entries) each.

    Returns:
        Combinations of the entries, in columns; and for each, in which matrix and row it stands alone, with factor 1.
    """
    whole = sparse.vstack(matrices).tocsr()
    starts = np.cumsum([0, *(matrix.shape[0] for matrix in matrices)])
    alone = np.flatnonzero(np.diff(whole.indptr) == 1)
    columns, first = np.unique(whole.indices[whole.indptr[alone]], return_index=True)
    rows = alone[first]
    if len(columns) == whole.shape[1]:
        basis = sparse.diags(1 / whole.data[whole.indptr[rows]]).tocsr()
    else:  # entangled: as many independent rows as there are
        dense, rows_found = whole.toarray().T.copy(), list[int]()
        for _ in range(len(dense)):
            at = np.unravel_index(np.abs(dense[len(rows_found) :]).argmax(), dense[len(rows_found) :].shape)
            here = len(rows_found)
            if abs(dense[here + at[0], at[1]]) < 1e-9:
                break
            dense[[here, here + at[0]]] = dense[[here + at[0], here]]
            dense[here] /= dense[here, at[1]]
            for other in range(len(dense)):
                if other != here:
                    dense[other] -= dense[other, at[1]] * dense[here]
            rows_found.append(int(at[1]))
        rows = np.array(rows_found)
        basis = sparse.csr_matrix(np.linalg.inv(whole[rows].toarray()))
    matrix = np.searchsorted(starts, rows, side="right") - 1
    return basis, np.stack([matrix, rows - starts[matrix]], 1)


def _kind(parts: Sequence[Any], off: Sequence[Any], tensors: Mapping[str, Tensor]) -> str:
    if any(not isinstance(tensors[name], torch.nn.Parameter) for name, _, _ in parts):
        whole = all(
            matrix.shape[0] == matrix.shape[1] and (matrix != sparse.identity(matrix.shape[0])).nnz == 0
            for _, _, matrix in parts
        )
        return NORM if whole and not off and isinstance(tensors[parts[0][0]], torch.nn.Parameter) else OPPOSED
    return OPPOSED if len(parts) > 1 else LINEAR if off else UNSEEN


class _Walk:
    """Follows what is added to biases and positions forwards through one capture."""

    def __init__(self, shifts: Shifts, capture: Capture) -> None:
        self.shifts, self.capture, self.unknowns = shifts, capture, shifts.unknowns
        self.unsafe = shared_memory(capture.graph)
        self.backwards = Backwards(capture, shifts.tensors, outputs=shifts.outputs, unsafe=self.unsafe)
        self.numbers: dict[fx.Node, Any] = {}  # what is added to the value of a node, before it is absorbed
        self.changed: set[fx.Node] = set()  # values that change by something that depends on the input
        self.summing: dict[fx.Node, int] = {}  # axes along which a value sums to one
        self.normed: dict[fx.Node, tuple[str | None, str | None]] = {}  # gain and bias of the norm right before
        self.turned: dict[fx.Node, str] = {}  # transposed matrices

    def run(self) -> None:
        shifts, capture = self.shifts, self.capture
        for node, name in capture.states.items():
            if name in shifts.tensors and node.users:
                own = self.backwards(node)
                own = {} if own is None else own
                before = shifts.writers.get(name)
                shifts.writers[name] = own if before is None else {a: g for a, g in own.items() if before.get(a) == g}
        for node in capture.graph.nodes:
            if node.op == "output":
                self._see(node)
            elif node.op == "call_function":
                for given in node.all_input_nodes:
                    writes = bool(self.backwards(given)) and given in capture.states
                    if (
                        (writes or given in self.changed)
                        and self.backwards.passed(node, given)
                        and self.backwards(node)
                    ):
                        self.changed.add(node)
                if node in self.unsafe:
                    self._see(node)
                else:
                    self.numbers[node] = self._operation(node)
        for node, name in capture.states.items():
            if name in shifts.tensors:
                self._read_as_weight(node, name)
        for mark in capture.marks:
            numbers = self.numbers.get(mark.node)
            if isinstance(numbers, Tensor):
                rank = len(shape_of(mark.node) or ())
                numbers = numbers.reshape(*[1] * (rank - numbers.ndim), *numbers.shape)
            if not isinstance(numbers, list):
                shifts.values.setdefault(mark.name, (numbers, mark.node in self.changed))

    # Values.

    def _at(self, node: Any) -> Tensor | None:
        """Return what is added to a value, as far as something behind it may see it."""
        if not isinstance(node, fx.Node):
            return None
        numbers = self.unknowns.living(self._raw(node))
        if numbers is None or self._absorbed(node, numbers):
            return None
        return numbers

    def _raw(self, node: fx.Node) -> Tensor | None:
        name = self.capture.states.get(node)
        if node in self.turned:
            base: Any = node.args[0]
            numbers = self._raw(base)
            return None if numbers is None else _plain(moved(node, numbers.expand(shape_of(base) or ())))
        if name is None:
            found = self.numbers.get(node)
            return found if isinstance(found, Tensor) else None
        if name not in self.shifts.tensors or not node.users:
            return None
        self.shifts.others.add(name)
        return self.shifts.source(name, axes=self._whole_axes(node, name))

    def _whole_axes(self, node: fx.Node, name: str) -> set[int]:
        """Return along which axes of a tensor everything is read; of others, a longer input may read more."""
        shape = tuple(self.shifts.tensors[name].shape)
        size, axes = math.prod(shape), set(range(len(shape)))
        if size > _MOST:
            return (
                axes - {0} if len(shape) > 1 and not any(name_of(user) in MOVEMENTS for user in node.users) else set()
            )
        if name not in self.shifts.reached:
            self.shifts.reached[name] = torch.zeros(size, dtype=torch.bool)
        reached = self.shifts.reached[name]
        self._reach(node, torch.arange(size).reshape(shape), reached)
        whole = reached.reshape(shape)
        return {axis for axis in axes if bool((whole == whole.narrow(axis, 0, 1)).all())}

    def _reach(self, node: fx.Node, elements: Any, reached: Tensor) -> None:
        """Mark the elements of a tensor that an operation reads that does not only move them."""
        for user in node.users:
            if user.target is operator.getitem and isinstance(elements, (list, tuple)):
                self._reach(user, elements[user.args[1]], reached)  # type: ignore[index]
            elif name_of(user) in MOVEMENTS and user not in self.unsafe and isinstance(elements, Tensor):
                if (parts := moved(user, elements)) is not None:
                    self._reach(user, parts, reached)
                else:
                    reached[elements.reshape(-1)] = True
            else:
                for part in elements if isinstance(elements, (list, tuple)) else [elements]:
                    reached[part.reshape(-1)] = True

    def _absorbed(self, node: fx.Node, numbers: Tensor) -> bool:
        invisible, shape = self.backwards(node), shape_of(node) or ()
        if invisible is None:
            return True
        offset = len(shape) - numbers.ndim
        for axes, gains in invisible.items():
            if not gains and all(axis < offset or numbers.shape[axis - offset] == 1 for axis in axes):
                self.changed |= {user for user in node.users if self.backwards(user) and user.op != "output"}
                return True
        return False

    def _see(self, node: fx.Node) -> None:
        """An operation sees all of its arguments as they are: nothing may be added to them."""
        for given in node.all_input_nodes:
            self._fix(given)

    def _fix(self, node: Any) -> None:
        if not isinstance(node, fx.Node):
            return
        name = self.capture.states.get(node, self.turned.get(node))
        if name is not None:
            self.shifts.others.add(name)
            self.shifts.lose(name)
            return
        found = self.numbers.get(node)
        for numbers in found if isinstance(found, list) else [self._at(node)]:
            if numbers is not None:
                self.unknowns.vanish(numbers)

    # Operations.

    def _operation(self, node: fx.Node) -> Any:
        name = name_of(node)
        self._remember(node, name)
        if name == "getitem":
            found = self.numbers.get(node.args[0])  # type: ignore[arg-type]
            if isinstance(found, list):
                return found[node.args[1]]  # type: ignore[index]
            return None
        rule = getattr(self, f"_{_RULES.get(name, '')}", None)
        if name in PASSES and isinstance(node.args[0], fx.Node):
            rule = self._pass
        elif name in MOVEMENTS and isinstance(node.args[0], fx.Node):
            rule = self._move
        if rule is None:
            return self._see(node)
        return rule(node, name)

    def _remember(self, node: fx.Node, name: str) -> None:
        """Note what is known of a value besides what is added to it."""
        first = node.args[0] if node.args else None
        if name in SOFTMAX and "log" not in name:
            axis: Any = node.args[1]
            self.summing[node] = axis % len(shape_of(node) or (1,))
        elif name in PASSES - {"neg"} and isinstance(first, fx.Node):
            floating = node.meta["val"].is_floating_point() if shape_of(node) is not None else False
            if first in self.summing and floating:
                self.summing[node] = self.summing[first]
            if first in self.normed and floating:
                self.normed[node] = self.normed[first]
        elif name in MOVEMENTS and isinstance(first, fx.Node):
            before, after = shape_of(first) or (), shape_of(node) or ()
            if before and after and _keeps_the_last_axis(node, before, after):
                if self.summing.get(first) == len(before) - 1:
                    self.summing[node] = len(after) - 1
                if first in self.normed:
                    self.normed[node] = self.normed[first]
            if name in TRANSPOSES and self.capture.states.get(first) in self.shifts.tensors and len(before) == 2:
                self.turned[node] = self.capture.states[first]
        elif name == "layer_norm" and len(node.args[1]) == 1:  # type: ignore[arg-type]
            own = [argument(node, 2, "weight"), argument(node, 3, "bias")]
            names = [self.capture.states.get(part) if isinstance(part, fx.Node) else None for part in own]
            if all(part is None or named in self.shifts.tensors for part, named in zip(own, names, strict=True)):
                self.normed[node] = (names[0], names[1])

    def _pass(self, node: fx.Node, name: str) -> Any:
        if shape_of(node) is None or not node.meta["val"].is_floating_point():
            return self._see(node)
        numbers = self._at(node.args[0])
        return self._scaled(numbers, -1.0) if name == "neg" else numbers

    def _scaled(self, numbers: Tensor | None, factor: float) -> Tensor | None:
        if numbers is None or factor == 1:
            return numbers
        return self.unknowns.combined((numbers, factor))

    def _move(self, node: fx.Node, name: str) -> Any:
        first = node.args[0]
        count = node.meta["val"] if isinstance(node.meta.get("val"), (list, tuple)) else None
        nothing = None if count is None else [None] * len(count)
        if node in self.turned:
            return nothing
        numbers, shape = self._at(first), shape_of(first)
        if numbers is None or shape is None:
            return nothing
        result = moved(node, numbers.expand(shape))
        if result is None:
            self._see(node)
            return nothing
        return [_plain(part) for part in result] if count is not None else _plain(result)

    def _sum(self, node: fx.Node, name: str) -> Any:
        alpha: Any = node.kwargs.get("alpha", 1)
        factors = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[name]
        if not isinstance(alpha, (int, float)) or not node.meta["val"].is_floating_point():
            return self._see(node)
        terms = [
            (numbers, float(by))
            for given, by in zip(node.args[:2], factors, strict=True)
            if (numbers := self._at(given)) is not None
        ]
        if not terms:
            return None
        if len(terms) == 1:
            return self._scaled(*terms[0])
        return _plain(self.unknowns.combined(*terms))

    def _product(self, node: fx.Node, name: str) -> Any:
        one, two = node.args[:2]
        quotient = name not in ("mul", "multiply")
        if node.kwargs.get("rounding_mode") or isinstance(one, fx.Node) == isinstance(two, fx.Node):
            return self._see(node)
        value, factor = (one, two) if isinstance(one, fx.Node) else (two, one)
        if not isinstance(factor, (int, float)) or (quotient and value is two):
            return self._see(node)
        if not 1 / _FACTOR <= abs(factor) <= _FACTOR:  # equations hold up to rounding, in which it would be lost
            return self._see(node)
        return self._scaled(self._at(value), 1 / factor if quotient else float(factor))

    def _weight(self, node: Any) -> tuple[str, bool] | None:
        """Return which matrix a node is, and whether it is transposed."""
        if not isinstance(node, fx.Node):
            return None
        name = self.capture.states.get(node)
        if name in self.shifts.tensors and node not in self.unsafe:
            return name, False
        return (self.turned[node], True) if node in self.turned and node not in self.unsafe else None

    def _layer(self, node: fx.Node, entering: Any, weight: Any, bias: Any, *, turned: bool, channel: int) -> Any:
        """A linear layer: what enters it is taken off by its bias, whose own shift comes out of it.

        Args:
            node: The operation.
            entering: What it takes.
            weight: Its weight.
            bias: Its bias.
            turned: Whether the weight's first axis is the one that is summed over.
            channel: The axis of its channels.
        """
        found = self._weight(weight)
        name = self.capture.states.get(bias) if isinstance(bias, fx.Node) else None
        if found is None or (isinstance(bias, fx.Node) and name not in self.shifts.tensors):
            return self._see(node)
        numbers, rank = self._at(entering), len(shape_of(entering) or ())
        if numbers is not None:
            numbers = _plain(numbers)
        if numbers is not None:
            at = channel % rank - (rank - numbers.ndim)
            if any(size > 1 and axis != at for axis, size in enumerate(numbers.shape)):
                self.unknowns.vanish(numbers)
                numbers = None
        axis = int(found[1]) if turned else 1 - int(found[1])
        key = (name, found[0], axis, 1 - axis)
        self.shifts.layers.setdefault(key, []).append(None if numbers is None else numbers.reshape(-1))
        if name is None:
            return None
        own = self.shifts.source(name)
        assert own is not None
        after = len(shape_of(node) or ()) - channel % rank - 1
        return self.unknowns.living(own.reshape(-1, *[1] * after))

    def _linear(self, node: fx.Node, name: str) -> Any:
        bias = argument(node, 2, "bias")
        return self._layer(node, node.args[0], node.args[1], bias, turned=False, channel=-1)

    def _addmm(self, node: fx.Node, name: str) -> Any:
        bias, one, two = node.args[:3]
        plain = all(node.kwargs.get(key, 1) == 1 for key in ("alpha", "beta")) and len(shape_of(bias) or ()) == 1
        if not plain or self._weight(two) is None:
            return self._see(node)
        return self._layer(node, one, two, bias, turned=True, channel=-1)

    def _convolution(self, node: fx.Node, name: str) -> Any:
        entering, weight = node.args[:2]
        bias, padding, groups = (
            argument(node, 2, "bias"),
            argument(node, 4, "padding", 0),
            argument(node, 6, "groups", 1),
        )
        sizes = [padding] if isinstance(padding, int) else list(padding) if not isinstance(padding, str) else [1]
        if any(sizes) or groups != 1:
            self._fix(entering)
        if groups != 1:
            if isinstance(weight, fx.Node) and weight not in self.capture.states:  # one that was moved about is a value
                self._fix(weight)
            own = self.capture.states.get(bias) if isinstance(bias, fx.Node) else None
            if own not in self.shifts.tensors:
                self._fix(bias)
            else:
                self.shifts.others.add(own)
                source = self.shifts.source(own)
                rank = len(shape_of(node) or ())
                assert source is not None
                return self.unknowns.living(source.reshape(-1, *[1] * (int(name[4]) if rank else 0)))
            return None
        count = int(name[4])
        return self._layer(node, entering, weight, bias, turned=False, channel=-count - 1)

    def _matmul(self, node: fx.Node, name: str) -> Any:
        one, two = node.args[:2]
        rank = len(shape_of(two) or ())
        if self._weight(two) is not None:
            if (entering := self._at(one)) is not None:
                self.unknowns.vanish(entering)
            found = self._weight(two)
            assert found is not None
            axis = int(found[1])
            self.shifts.layers.setdefault((None, found[0], axis, 1 - axis), []).append(None)
            return None
        numbers = None if two in self.capture.states else self._at(two)
        if numbers is None:
            self._see(node)
            return None
        last = len(shape_of(one) or ()) - 1
        if self._at(one) is not None or self.summing.get(one) != last or rank < 2:  # type: ignore[arg-type]
            return self._see(node)
        if numbers.ndim >= 2 and numbers.shape[-2] > 1:
            return self._see(node)
        return numbers

    def _attention(self, node: fx.Node, name: str) -> Any:
        query, key, value = node.args[:3]
        for given in (query, key, argument(node, 3, "attn_mask")):
            self._fix(given)
        numbers = self._at(value)
        if numbers is None:
            return None
        if numbers.ndim >= 2 and numbers.shape[-2] > 1:
            self._fix(value)
            return None
        heads, more = (shape_of(value) or ())[-3:-2], (shape_of(query) or ())[-3:-2]
        if heads != more and numbers.ndim >= 3 and numbers.shape[-3] > 1:
            numbers = numbers.repeat_interleave(more[0] // heads[0], -3)
        return numbers

    def _embedding(self, node: fx.Node, name: str) -> Any:
        weight = node.args[0]
        own = self.capture.states.get(weight)  # type: ignore[arg-type]
        if own not in self.shifts.tensors:
            return self._see(node)
        numbers = self.shifts.source(own, axes={1})
        rank = len(shape_of(node) or ())
        assert numbers is not None
        return self.unknowns.living(numbers.reshape(*[1] * (rank - 1), -1))

    def _norm(self, node: fx.Node, name: str) -> Any:
        """Layer norm, group norm, instance norm: their own bias is added to what comes out."""
        if name == "instance_norm" and not node.args[5]:  # by running statistics
            return self._batch_norm(node, name)
        places = {"layer_norm": (2, 3), "group_norm": (2, 3), "instance_norm": (1, 2)}[name]
        gain, bias = argument(node, places[0], "weight"), argument(node, places[1], "bias")
        for given in node.all_input_nodes:
            if given is not bias:
                self._fix(given)
        own = self.capture.states.get(bias) if isinstance(bias, fx.Node) else None
        if own not in self.shifts.tensors or bias is gain:
            self._fix(bias)
            return None
        self.shifts.others.add(own)
        numbers = self.shifts.source(own)
        assert numbers is not None
        after = 0 if name == "layer_norm" else len(shape_of(node) or ()) - 2
        return self.unknowns.living(numbers.reshape(*numbers.shape, *[1] * after))

    def _batch_norm(self, node: fx.Node, name: str) -> Any:
        value, gain, bias, mean, variance = node.args[:5]
        own, running = (self.capture.states.get(n) if isinstance(n, fx.Node) else None for n in (bias, mean))
        self._fix(gain)
        self._fix(variance)
        numbers = self._at(value)
        rank = len(shape_of(value) or ())
        if node.args[5] or running not in self.shifts.tensors:
            self._fix(value)
            self._fix(mean)
        else:
            source = self.shifts.source(running)
            assert source is not None
            self.shifts.others.add(running)
            if numbers is not None:
                numbers = _plain(numbers)
            at = None if numbers is None else 1 - (rank - numbers.ndim)
            if numbers is not None and any(size > 1 and axis != at for axis, size in enumerate(numbers.shape)):
                self.unknowns.vanish(numbers)
                numbers = None
            self.unknowns.equate(self.unknowns.living(source), None if numbers is None else numbers.reshape(-1))
        if own not in self.shifts.tensors:
            self._fix(bias)
            return None
        self.shifts.others.add(own)
        added = self.shifts.source(own)
        assert added is not None
        return self.unknowns.living(added.reshape(-1, *[1] * (rank - 2)))

    def _mean(self, node: fx.Node, name: str) -> Any:
        numbers, rank = self._at(node.args[0]), len(shape_of(node.args[0]) or ())
        if numbers is None:
            return None
        gone, keep = reduced(node, rank), len(shape_of(node) or ()) == rank
        numbers = numbers.reshape(*[1] * (rank - numbers.ndim), *numbers.shape)
        if any(numbers.shape[axis] > 1 for axis in gone):
            return self._see(node)
        if not keep:
            numbers = numbers.reshape([size for axis, size in enumerate(numbers.shape) if axis not in gone])
        return numbers

    def _pool(self, node: fx.Node, name: str) -> Any:
        """Means over what is the same everywhere."""
        count = int(next(c for c in name if c in "123"))
        numbers = self._at(node.args[0])
        if numbers is not None and any(size > 1 for size in numbers.shape[max(numbers.ndim - count, 0) :]):
            return self._see(node)
        return numbers

    def _cat(self, node: fx.Node, name: str) -> Any:
        parts: Any = node.args[0]
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, fx.Node) for part in parts):
            return self._see(node)
        shape = shape_of(node) or ()
        axis, found = argument(node, 1, "dim", 0) % len(shape), [self._at(part) for part in parts]
        if all(numbers is None for numbers in found):
            return None
        whole = []
        for part, numbers in zip(parts, found, strict=True):
            size = shape_of(part) or ()
            if len(size) != len(shape):
                continue
            whole.append((torch.zeros(1, dtype=torch.int64) if numbers is None else numbers).expand(size))
        return _plain(torch.cat(whole, axis))

    def _read_as_weight(self, node: fx.Node, name: str) -> None:
        """Put down, for a matrix that linear layers use, what its other uses say."""
        users, normed = list(node.users), set[Any]()
        for user in [*users, *(late for turned in users if turned in self.turned for late in turned.users)]:
            kind = name_of(user)
            if user in self.turned:
                continue
            place = {"linear": 1, "addmm": 2, "matmul": 1, "mm": 1}.get(kind)
            weight = user.args[place] if place is not None and len(user.args) > place else None
            entering = user.args[1 if kind == "addmm" else 0] if place is not None else None
            found = self._weight(weight)
            if found is None or found[0] != name or user in self.unsafe or len(self.shifts.tensors[name].shape) != 2:
                if place is not None and name in self.shifts.sources and found is not None and found[0] == name:
                    self.shifts.lose(name)
                normed.add(None)
                continue
            plain = all(user.kwargs.get(key, 1) == 1 for key in ("alpha", "beta"))
            out = int(found[1]) if kind == "linear" else 1 - int(found[1])
            source = self.shifts.sources.get(name)
            if source is not None and not (source.shape[out] == 1 and self._same_for_all_rows(user)):
                self.shifts.lose(name)
            bias = user.args[0] if kind == "addmm" else argument(user, 2, "bias") if kind == "linear" else None
            own = self.capture.states.get(bias) if isinstance(bias, fx.Node) else None
            gain_and_offset = self.normed.get(entering) if isinstance(entering, fx.Node) else None
            # A layer norm's bias makes rows add a constant, which the layer's own bias has to take off.
            needs = gain_and_offset is not None and gain_and_offset[1] is not None
            if gain_and_offset is None or not plain or (needs and own not in self.shifts.tensors):
                normed.add(None)
                continue
            if (bias is not None and own is None) or (needs and self._is_seen_elsewhere(bias, name)):
                normed.add(None)
                continue
            normed.add((own if needs else None, *gain_and_offset, 1 - out))
        self.shifts.readers[name] = self.shifts.readers.get(name, set()) | normed

    def _same_for_all_rows(self, user: fx.Node) -> bool:
        """Whether nobody sees it if the same is added to all channels that a linear layer puts out."""
        rank = len(shape_of(user) or ())
        invisible = self.backwards(user)
        return invisible is None or invisible.get(frozenset({rank - 1})) == ()

    def _is_seen_elsewhere(self, bias: Any, weight: str) -> bool:
        """Whether a bias is anything but that of linear layers of one weight."""
        for user in bias.users:
            given = user.args[2] if name_of(user) == "addmm" else user.args[1] if len(user.args) > 1 else None
            is_bias = user.args[0] is bias if name_of(user) == "addmm" else argument(user, 2, "bias") is bias
            found = self._weight(given)
            if name_of(user) not in ("linear", "addmm") or not is_bias or found is None or found[0] != weight:
                return True
        return False


def _keeps_the_last_axis(node: fx.Node, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a movement hands the last axis on as it is, whatever it does to the others."""
    name, last = name_of(node), len(before) - 1
    if before[-1] != after[-1]:
        return False
    if name in ("view", "reshape", "_unsafe_view", "expand", "flatten", "mT"):
        return name != "mT"
    rest: Any = node.args[1:]
    if name == "permute":
        return bool(rest) and rest[0][-1] % len(before) == last
    if name in ("select", "slice", "transpose", "swapaxes", "swapdims", "squeeze"):
        axes = rest[:2] if name in ("transpose", "swapaxes", "swapdims") else rest[:1]
        return bool(axes) and all(isinstance(axis, int) and axis % len(before) != last for axis in axes)
    return name == "unsqueeze" and rest[0] not in (-1, last + 1)


_RULES = {
    **dict.fromkeys(("add", "sub", "rsub"), "sum"),
    **dict.fromkeys(("mul", "multiply", "div", "true_divide", "divide"), "product"),
    "linear": "linear",
    "addmm": "addmm",
    **{f"conv{count}d": "convolution" for count in (1, 2, 3)},
    **dict.fromkeys(("matmul", "mm", "bmm"), "matmul"),
    "scaled_dot_product_attention": "attention",
    "embedding": "embedding",
    **dict.fromkeys(("layer_norm", "group_norm", "instance_norm"), "norm"),
    "batch_norm": "batch_norm",
    "mean": "mean",
    **{f"adaptive_avg_pool{count}d": "pool" for count in (1, 2, 3)},
    **{f"max_pool{count}d": "pool" for count in (1, 2, 3)},
    **dict.fromkeys(("cat", "concat", "concatenate"), "cat"),
}
