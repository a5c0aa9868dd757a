"""Shifts as a group: what they add to weights, how two of them follow one another, how linear elements carry them.

See docs/theory/intertwiners.md, 3.6.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import spsolve
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints
from lightning_sym.symmetry.rearranging import Summand
from lightning_sym.symmetry.tracing.equations import solve
from lightning_sym.symmetry.tracing.shifts import NORM, Added, Fold, Shift
from lightning_sym.symmetry.views import ConvertedTensors, doubled

Vectors = tuple[Tensor, ...]
_SETTLED = 1e-13  # steps that are smaller than that, relative to the tensors, are rounding


def additions(shifts: Sequence[Shift], vectors: Vectors, tensors: Mapping[str, Tensor]) -> dict[str, list[Summand]]:
    """Return what shifts add to tensors.

    Args:
        shifts: All shifts of a network.
        vectors: How much of each. Each of shape (size,), float64.
        tensors: The network's parameters and buffers as they are, by name. What is taken off by a bias is left out if
            the weight is not among them.

    Returns:
        By name, summands that broadcast to the tensor, of its dtype and on its device. Sums over weights are float64
        until then.

    Raises:
        ValueError: If a gain by which a summand would have to be divided holds a zero.
    """
    found: dict[str, list[Summand]] = {}
    acting = [(shift, vector) for shift, vector in zip(shifts, vectors, strict=True) if bool(vector.any())]
    moved = _moved_offsets(acting, tensors)
    means = _means(shifts)
    for shift, vector in acting:
        if shift.norm is not None and any(name is not None and name not in tensors for name in shift.norm):
            continue
        times = shift.times(tensors)
        for part in shift.added:
            if (tensor := tensors.get(part.tensor)) is not None and all(gain in tensors for gain in part.needed):
                values = _thin(part, vector, tensor, tensors) * (1.0 if part.axis is not None else times)
                direction = _direction(part, tensors)
                summand = Summand(values) if isinstance(direction, float) else Summand(values, direction)
                found.setdefault(part.tensor, []).append(summand)
        for off in shift.taken_off:
            if off.bias in tensors and all(name in tensors for name in off.needed):
                taken = off.seen(off.made(vector, tensors), len(tensors[off.bias]))
                if shift.norm is not None:
                    taken = times * _without_mean(taken, means.get(off.bias), tensors)
                found.setdefault(off.bias, []).append(Summand(-taken.to(tensors[off.bias])))
        for row in shift.balanced:
            if row.bias in tensors and row.offset in tensors and (row.gain is None or row.gain in tensors):
                offset = tensors[row.offset].detach().double().cpu() + moved.get(row.offset, 0.0)
                ratio = offset if row.gain is None else offset / tensors[row.gain].detach().double().cpu()
                found.setdefault(row.bias, []).append(Summand((-vector * ratio.sum()).to(tensors[row.bias])))
    return found


def _means(shifts: Sequence[Shift]) -> dict[str, Added]:
    """Return, by bias, how its mean may be shifted."""
    return {
        part.tensor: part
        for shift in shifts
        if shift.size == 1 and shift.pivots is None
        for part in shift.added
        if not part.axes
    }


def _without_mean(taken: Tensor, mean: Added | None, tensors: Mapping[str, Tensor]) -> Tensor:
    """Take off a bias's change what nobody sees, which depends on what nobody sees of the weight.

    Elements could otherwise not be put one after the other without the network.

    Args:
        taken: The change. Shape (outputs,), or (outputs, entries).
        mean: How the bias's mean may be shifted, if it may.
        tensors: The network's tensors.
    """
    if mean is None:
        return taken
    along = _direction(mean, tensors)
    direction = torch.ones(len(taken)).to(taken) if isinstance(along, float) else along.to(taken)
    direction = direction.reshape(-1, *[1] * (taken.ndim - 1))
    return taken - direction * (taken / direction).mean(0)


def rates(
    shift: Shift, tensors: Mapping[str, Tensor], shifts: Sequence[Shift] = ()
) -> Iterator[tuple[str, sparse.csr_matrix]]:
    """Yield how fast a shift changes tensors, by name: one row per weight, one column per entry of the shift.

    Args:
        shift: One shift.
        tensors: The network's parameters by name, in float64.
        shifts: All shifts of the network.
    """
    times, means = shift.times(tensors), _means(shifts)
    for part in shift.added:
        often = 1.0 if part.axis is not None else times
        yield part.tensor, often * added_by(part, shift.size, tensors)
    for off in shift.taken_off:
        taken = off.seen(torch.from_numpy(off.rates(tensors)), len(tensors[off.bias]))
        if shift.norm is not None:
            taken = times * _without_mean(taken, means.get(off.bias), tensors)
        yield off.bias, -sparse.csr_matrix(taken.numpy())
    for row in shift.balanced:
        offset = tensors[row.offset]
        ratio = offset if row.gain is None else offset / tensors[row.gain]
        size = tensors[row.bias].numel()
        own = sparse.identity(size, format="csr") if shift.size == size else sparse.csr_matrix(np.ones((size, 1)))
        yield row.bias, -float(ratio.sum()) * own


def added_by(part: Added, size: int, tensors: Mapping[str, Tensor]) -> sparse.csr_matrix:
    """Return what a part of a shift adds to its tensor: one row per weight, one column per entry of the shift.

    Args:
        part: The part.
        size: The number of the shift's entries.
        tensors: The network's parameters by name, in float64.
    """
    tensor = tensors[part.tensor]
    shape = [size if axis in part.axes else 1 for axis, size in enumerate(tensor.shape)]
    at = torch.arange(math.prod(shape)).reshape(shape).expand(tensor.shape).reshape(-1).numpy()
    direction = _direction(part, tensors)
    along = np.ones(1) if isinstance(direction, float) else direction.numpy()
    own = sparse.identity(size, format="csr") if part.matrix is None else part.matrix
    own = sparse.diags(_multiples(part, tensors).reshape(-1).numpy()) @ own
    return sparse.diags(np.broadcast_to(along, tensor.shape).ravel()) @ own.tocsr()[at]


def _moved_offsets(acting: Sequence[tuple[Shift, Tensor]], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is added to biases of layer norms, which rows that read them have to know."""
    wanted = {row.offset for shift, _ in acting for row in shift.balanced}
    moved: dict[str, Tensor] = {}
    for shift, vector in acting:
        for part in shift.added:
            if part.tensor in wanted and part.tensor in tensors:
                summand = _thin(part, vector, tensors[part.tensor].double().cpu(), tensors)
                moved[part.tensor] = moved.get(part.tensor, torch.zeros((), dtype=torch.float64)) + summand
    return moved


def _multiples(part: Added, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return of what a summand's entries on its axes are multiples. Float64, of the shape of these axes."""
    found = torch.ones(part.shape, dtype=torch.float64)
    for fold in part.folds:
        at = part.axes.index(fold.axis)
        shape = [-1 if axis == at else 1 for axis in range(len(part.shape))]
        found = found * fold.multiples(part.shape[at], tensors).reshape(shape)
    return found


def _thin(part: Added, vector: Tensor, tensor: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a summand with one entry along the axes along which it does not vary."""
    shape = [size if axis in part.axes else 1 for axis, size in enumerate(tensor.shape)]
    values = part.of(vector)
    if part.folds:
        values = values * _multiples(part, tensors)
    return values.reshape(shape).to(tensor)


def _direction(part: Added, tensors: Mapping[str, Tensor]) -> Tensor | float:
    """Return the product of the gains on their axis."""
    if not part.gains or part.axis is None:
        return 1.0
    tensor, result = tensors[part.tensor], None
    for gain, power in part.gains:
        own = tensors[gain].detach().reshape(-1).to(tensor)
        if power < 0 and bool((own == 0).any()):
            raise ValueError(
                f"{gain} holds a zero, by which {part.tensor} would have to be divided; expected gains that are not "
                "zero, or an element without shifts: sample(shifts=False)"
            )
        result = own**power if result is None else result * own**power
    assert result is not None
    return result.reshape([-1 if axis == part.axis else 1 for axis in range(tensor.ndim)])


def product(shifts: Sequence[Shift], first: Vectors, second: Vectors) -> Vectors:
    """Return the shift that acts as one and then another.

    They are added, but for one thing: if the first adds the same w to all rows of a weight, the bias behind it takes
    off w t more of what the second adds to the weight's input, in all entries alike.
    """
    result = [one + two for one, two in zip(first, second, strict=True)]
    for (absorbing, index), target in _noticed(shifts).items():
        off = shifts[absorbing].taken_off[index]
        entering = torch.from_numpy(off.matrix @ second[absorbing].numpy())
        for number, part in _uniform(shifts, off.weight, off.out):
            if bool(entering.any()) and bool(first[number].any()):
                rows = _over(part, first[number], off.axis)
                result[target] = result[target] - (rows @ entering)
    return tuple(result)


def inverse(shifts: Sequence[Shift], vectors: Vectors) -> Vectors:
    """Return the shift that undoes another one."""
    back = tuple(-vector for vector in vectors)
    left = product(shifts, vectors, back)
    # What is left of their product is added to all entries of biases alike, which commutes with everything.
    return tuple(vector - rest for vector, rest in zip(back, left, strict=True))


def _uniform(shifts: Sequence[Shift], weight: str, out: int) -> Iterable[tuple[int, Added]]:
    """Yield the shifts that add the same to all rows of a weight."""
    for number, shift in enumerate(shifts):
        for part in shift.added:
            if part.tensor == weight and out not in part.axes and part.axis in (None, out):
                yield number, part


def _over(part: Added, vector: Tensor, axis: int) -> Tensor:
    """Return what is added along one axis of a weight, summed over those of a kernel."""
    rows = part.of(vector)
    return rows.movedim(part.axes.index(axis), 0).flatten(1).sum(1) if rows.ndim > 1 else rows


def _noticed(shifts: Sequence[Shift]) -> dict[tuple[int, int], int]:
    """Return, by what is taken off where the same may be added to all rows, the shift of the bias's mean."""
    means = {
        part.tensor: number
        for number, shift in enumerate(shifts)
        if shift.size == 1
        for part in shift.added
        if not part.axes
    }
    return {
        (number, index): means[off.bias]
        for number, shift in enumerate(shifts)
        for index, off in enumerate(shift.taken_off)
        if off.bias in means and shift.norm is None and off.unseen is None and off.at is None and off.before is None
    }


def nearest(
    shifts: Sequence[Shift], tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor] | None = None
) -> Vectors:
    """Return the shift that brings each shift's own tensors as near to a reference as it can: one after the other.

    Means that norms take off first, each to the reference's mean; then biases, those of later layers as they are then.
    From different members of one orbit it leads to the same tensors, up to the linear part of the group.

    Args:
        shifts: All shifts of a network.
        tensors: Its parameters and running statistics, by name.
        reference: Parameters to come near to; by default zeros. Buffers follow.
    """
    vectors: Vectors = tuple(torch.zeros(shift.size, dtype=torch.float64) for shift in shifts)
    touched = [_touched(shift) for shift in shifts]
    current = _Shifted(tensors, set().union(*touched))
    sizes = {n: float(torch.linalg.vector_norm(t, math.inf)) if t.numel() else 0.0 for n, t in current.items()}
    if not all(map(math.isfinite, sizes.values())):
        return vectors
    order = sorted(range(len(shifts)), key=lambda index: shifts[index].pivots is not None)
    pending = set(order)  # the shifts of which something has changed since they were found
    for _ in range(len(shifts) + 1):
        for index in [index for index in order if index in pending]:
            pending.discard(index)
            step = least_step(shifts[index], current, reference)
            size = max(sizes[name] for name in shifts[index].names)
            if not bool((step.abs() > _SETTLED * size).any()):
                continue
            only = tuple(step if at == index else torch.zeros_like(v) for at, v in enumerate(vectors))
            added = additions(shifts, only, current)
            for name, summands in added.items():
                current.add(name, summands)
            exact = shifts[index].added[0].matrix is None  # means, which are then as they should be
            pending |= {i for i in order if touched[i] & added.keys() and not (exact and i == index)}
            vectors = product(shifts, vectors, only)
        if not pending:
            break
    return vectors


class _Shifted(ConvertedTensors):
    """Tensors in double precision, to which something is added: it is thin, and they are large.

    Args:
        tensors: Parameters and buffers, by name. Not changed.
        names: Those that there are.
    """

    def __init__(self, tensors: Mapping[str, Tensor], names: set[str]) -> None:
        super().__init__(tensors, doubled, names)
        self._added: dict[str, list[Summand]] = {}
        self._last: tuple[str, Tensor] = ("", torch.zeros(0))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._small:
            return self._small[name]
        if name != self._last[0]:
            self._last = (name, super().__getitem__(name))
        return self._last[1]

    def _made(self, name: str) -> Tensor:
        tensor = super()._made(name)
        for summand in self._added.get(name, ()):
            tensor = summand.added_to(tensor)
        return tensor

    def add(self, name: str, summands: Sequence[Summand]) -> None:
        """Add something to a tensor."""
        own = self._added.setdefault(name, [])
        for summand in summands:
            alike = next((at for at, other in enumerate(own) if _alike(other, summand)), None)
            if alike is None:
                own.append(summand)
            else:
                own[alike] = Summand(own[alike].values + summand.values, summand.times)
        self._small.pop(name, None)
        if self._last[0] == name:
            self._last = ("", torch.zeros(0))


def _alike(one: Summand, two: Summand) -> bool:
    """Whether two summands are multiples of the same, along the same axes."""
    if one.values.shape != two.values.shape or (one.times is None) != (two.times is None):
        return False
    return one.times is None or two.times is None or torch.equal(one.times, two.times)


def _touched(shift: Shift) -> set[str]:
    """Return the names of all tensors that a shift needs or changes."""
    names = set(shift.names).union(*(part.needed for part in shift.added))
    names |= {name for name in shift.norm or () if name is not None}
    names = names.union(*({off.bias} | off.needed for off in shift.taken_off))
    return names | {name for row in shift.balanced for name in (row.bias, row.gain, row.offset) if name is not None}


def least_step(shift: Shift, tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return how much of a shift brings its own tensors nearest to a reference, by default zeros."""
    nothing = torch.zeros(shift.size, dtype=torch.float64)
    normal = sparse.csr_matrix((shift.size, shift.size))
    right = np.zeros(shift.size)
    for part in shift.added:
        tensor = tensors[part.tensor]
        if reference is not None and part.tensor not in reference:
            continue
        if any(bool((tensors[gain] == 0).any()) for gain in part.needed):
            return nothing
        times = math.prod(size for axis, size in enumerate(tensor.shape) if axis not in part.axes)
        apart = -_over_others(part, tensor, tensors)
        if reference is not None:
            apart += _over_others(part, reference[part.tensor].detach().to(tensor), tensors)
        multiples = _multiples(part, tensors)
        if part.matrix is None:
            return (apart / times / multiples).reshape(-1)
        matrix = sparse.diags(multiples.reshape(-1).numpy()) @ part.matrix
        normal = normal + times * (matrix.T @ matrix)
        right += matrix.T @ apart.reshape(-1).numpy()
        if shift.kind == NORM:
            break  # the bias; running means follow
        if shift.norm is not None:
            break  # rows say how much, biases follow
    return torch.from_numpy(spsolve(normal.tocsc(), right).reshape(-1)) if normal.nnz else nothing


def _over_others(part: Added, tensor: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor, divided by the gains, summed over all axes along which a summand does not vary."""
    direction = _direction(part, tensors)
    others = [axis for axis in range(tensor.ndim) if axis not in part.axes]
    if isinstance(direction, Tensor) and part.axis in others:
        tensor = torch.tensordot(tensor, 1 / direction.reshape(-1), ([part.axis], [0])).unsqueeze(part.axis)
    elif isinstance(direction, Tensor):
        tensor = tensor / direction
    return (tensor.sum(others) if others else tensor).reshape(part.shape)


def carried(
    shifts: Sequence[Shift], vectors: Vectors, along: Callable[[str, tuple[int, ...], Tensor, Sequence[Fold]], Tensor]
) -> Vectors:
    """Return the shift g n g^-1 for a linear element g.

    Args:
        shifts: All shifts of a network.
        vectors: n.
        along: What g does to what is added to a tensor: the tensor's name, the axes, and an array on these; along all
            other axes it is the same; and of which gains these are multiples.

    Returns:
        The vectors.
    """
    result = []
    for shift, vector in zip(shifts, vectors, strict=True):
        if not bool(vector.any()):
            result.append(vector)
            continue
        new = torch.zeros_like(vector)
        for number, part in enumerate(shift.added):
            here = np.arange(shift.size) if shift.pivots is None else np.flatnonzero(shift.pivots[:, 0] == number)
            if not len(here):
                continue
            moved = along(part.tensor, part.axes, part.of(vector), part.folds)
            at = here if shift.pivots is None else shift.pivots[here, 1]
            factor = math.prod(float(along(gain, (), torch.ones(1), ())) ** -power for gain, power in part.gains)
            new[torch.from_numpy(here)] = factor * moved.reshape(-1)[torch.from_numpy(at)]
        result.append(new)
    return tuple(result)


def size_of(shifts: Sequence[Shift]) -> int:
    """Return the dimension of the group of all shifts."""
    return sum(shift.size for shift in shifts) - repeated(shifts)


def repeated(shifts: Sequence[Shift]) -> int:
    """Return how many directions shifts have in common, so that they count twice among their entries.

    Ones in every row and ones in every column are the same matrix of ones: rows that read a layer norm and write into a
    stream of another one, and embeddings against positions.
    """
    ways: dict[str, list[Added]] = {}
    for shift in shifts:
        for part in shift.added if shift.pivots is None else ():
            ways.setdefault(part.tensor, []).append(part)
    count = sum(shift.common for shift in shifts)
    for own in ways.values():
        for one, two in itertools.combinations(own, 2):
            both = set(one.axes) & set(two.axes)
            count += math.prod(size for axis, size in zip(one.axes, one.shape, strict=True) if axis in both)
    return count + sum(
        _in_common(shift, ways)
        for shift in shifts
        if shift.pivots is not None and not shift.taken_off and shift.norm is None
    )


def _in_common(shift: Shift, ways: Mapping[str, Sequence[Added]]) -> int:
    """Return how many of a shift's directions add to every tensor what shifts of its means add, too."""
    equations: list[tuple[Ints, NDArray[np.float64]]] = []
    for part in shift.added:
        mean = next((other for other in ways.get(part.tensor, ()) if not other.gains), None)
        if mean is None or part.matrix is None or (np.diff(part.matrix.indptr) > 1).any():
            return 0
        number, factor = np.full(part.matrix.shape[0], shift.size), np.ones(part.matrix.shape[0])
        rows = np.flatnonzero(np.diff(part.matrix.indptr))
        number[rows], factor[rows] = part.matrix.indices, part.matrix.data
        alike = [place for place, axis in enumerate(part.axes) if axis not in mean.axes]
        # Along the axes of the mean, everything has to be the same as the first.
        whole, by = (np.moveaxis(a.reshape(part.shape), alike, range(len(alike))) for a in (number, factor))
        size = math.prod(whole.shape[: len(alike)])
        whole, by = whole.reshape(size, -1), by.reshape(size, -1)
        for one, two in {(one, two) for one in np.unique(by[1:]) for two in np.unique(by[0])}:
            at = (by[1:] == one) & (by[:1] == two)
            pairs = np.stack([whole[1:][at], np.broadcast_to(whole[:1], whole[1:].shape)[at]], 1)
            equations.append((pairs, np.array([one, -two])))
    nothing = np.array([shift.size])
    return int(solve(shift.size + 1, equations, nothing).shape[1])
