"""Map translations of weights by linear elements, and bring weights near to others by translations.

See docs/theory/translations.md.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats, Ints, rising
from lightning_sym.symmetry.solving.structure import Structure
from lightning_sym.symmetry.tracing.affine.parts import Folds, Free, Readers, Writers
from lightning_sym.symmetry.tracing.affine.space import Located, Translations, scales
from lightning_sym.symmetry.views import ConvertedTensors, NamedTensors, doubled

# By gain, power and epsilon of a variance: entries of an element, and of the gain.
Found = dict[tuple[str, int, float | None], list[tuple[Ints, Ints]]]
_SETTLED = 1e-13  # steps that are smaller than that, relative to the tensors, are rounding
_MOST = 64  # times that translations behind weights are followed
_NOTHING = 1e-9  # singular values that are smaller than that, relative to the largest, are zero


class Linear(Protocol):
    """The action of a linear element."""

    def on_thin(self, name: str, values: Tensor, axes: Collection[int], lead: int = 0) -> Tensor:
        """Return the image of an addition to a tensor."""

    def splits(self, name: str, axes: Collection[int]) -> bool:
        """Return whether units lie on one of some axes together with another axis."""

    def moved(self, tensor: Tensor, name: str) -> Tensor:
        """Return the image of a tensor."""

    def learn_gains(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the gains around the maps."""


class _Moved(NamedTensors):
    """Tensors under a linear element, each made when it is asked for."""

    def __init__(self, action: Linear, tensors: Mapping[str, Tensor], moving: Collection[str]) -> None:
        self.action, self.tensors, self.moving, self._names = action, tensors, moving, tensors
        action.learn_gains(tensors)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        return self.action.moved(tensor, name) if name in self.moving else tensor


def carried(space: Translations, element: Tensor, action: Linear, back: Linear, moving: Collection[str]) -> Tensor:
    """Return the shift g n g^-1 for a linear element g.

    It is linear in n, and the same for all weights: it is found at generic ones.

    Args:
        space: All shifts.
        element: n. Shape (size,), float64.
        action: The action of g.
        back: The action of its inverse.
        moving: The names of tensors that linear elements move.

    Returns:
        Shape (size,), float64.
    """
    if not bool(element.any()):
        return element
    assert space.parts is not None
    there = space.generic
    tensors: Mapping[str, Tensor] = _Moved(back, there.tensors, moving)
    action.learn_gains(tensors)
    plain = space.factors.isdisjoint(moving)
    here = there if plain else space.at(tensors)
    return _Carrier(space, here, there, action, space.idle.intersection(moving)).carried(element)


class _Carrier:
    """Carries shifts from some weights to others.

    Args:
        space: All shifts.
        here: Their action at the first weights.
        there: Their action at the others.
        action: The map from the first weights to the others.
        alone: Tensors of which each entry has its own addition.
    """

    def __init__(
        self, space: Translations, here: Located, there: Located, action: Linear, alone: Collection[str]
    ) -> None:
        assert space.parts is not None
        self.space, self.parts, self.here, self.there, self.action = space, space.parts, here, there, action
        self.alone = alone

    def carried(self, element: Tensor) -> Tensor:
        """Return the image of an element."""
        result = torch.zeros(self.space.size, dtype=torch.float64)
        if bool(element[: self.space.entries].any()):
            result[: self.space.entries] = self._first(element)
        for coupled in self.parts.coupled:
            if bool(element[coupled[0].places].any()):
                result[coupled[0].places] = self._writers(coupled, element)
        return result / torch.from_numpy(self.there.multiples)

    def _first(self, element: Tensor) -> Tensor:
        known = self.here.forms(self.here.values(element))
        moved, (telling, solve) = np.zeros(len(known)), read_off(self.there)
        for part in telling:
            if not (own := known[part.at]).any():
                continue
            values = torch.from_numpy(own)
            if isinstance(part, Readers):
                moved[part.at] = self._rows(part, values).numpy()
            elif part.name in self.alone:
                moved[part.at] = self.action.moved(values, part.name).numpy()
            else:
                moved[part.at] = self.action.on_thin(part.name, values, range(own.ndim)).numpy()
        return torch.from_numpy(solve(moved))

    def _rows(self, rows: Readers, values: Tensor) -> Tensor:
        whole = self.parts.shapes[rows.name]
        others = [axis for axis in range(len(whole)) if axis not in rows.axes]
        thin = [size if axis in rows.axes else 1 for axis, size in enumerate(whole)]
        count = len(values)
        before, after = (own.coefficient(rows) for own in (self.here, self.there))
        inside = torch.zeros(count, len(rows.segments), dtype=torch.float64)
        inside[torch.from_numpy(rows.segments), torch.arange(len(rows.segments))] = before
        inside = inside.reshape(count, *thin)
        at = torch.from_numpy(np.unique(rows.segments, return_index=True)[1])
        if self.action.splits(rows.name, rows.axes):  # no axis alone says what moves
            moved = self._on_all_axes(rows.name, rows.axes, (values * inside).sum(0), values.shape[1:])
            return (moved[:, at] / after[at]).T.reshape(values.shape)
        values = self.action.on_thin(rows.name, values, others, 1)
        moved = self.action.on_thin(rows.name, inside, rows.axes, 1).reshape(count, -1)
        factors = moved[:, at] / after[at]  # (segments before, segments after)
        result: Tensor = torch.tensordot(factors, values, ([0], [0]))
        return result

    def _on_all_axes(self, name: str, axes: Sequence[int], added: Tensor, thin: Sequence[int]) -> Tensor:
        """Return the image of an addition to a weight. Shape (places on other axes, of a thin array; on these)."""
        moved = self.action.on_thin(name, added[None], range(added.ndim), 1)[0]
        others = [axis for axis in range(added.ndim) if axis not in axes]
        for axis in others:
            moved = moved.narrow(axis, 0, thin[axis])
        return moved.permute(*others, *axes).flatten(len(others)).flatten(0, -2)

    def _writers(self, coupled: Sequence[Writers], element: Tensor) -> Tensor:
        first, count = coupled[0], len(coupled[0].columns)
        multiples = torch.from_numpy(self.here.of_writers(element, first))
        rows, solve = _solver(self.there, coupled)
        if any(self.action.splits(part.name, part.axes) for part in coupled):  # no axis alone says what moves
            images = []
            for part in coupled:
                made = (self.here.spread_patterns(part) * multiples.reshape(-1, *part.shape)).sum(0)
                images.append(self._on_all_axes(part.name, part.axes, made, part.at.shape))
            return torch.from_numpy(solve(torch.cat(images).numpy()[rows])).reshape(-1)
        multiples = self.action.on_thin(first.name, multiples.reshape(-1, *first.shape), first.axes, 1)
        moved = torch.cat([
            self.action.on_thin(part.name, self.here.spread_patterns(part), part.kept(), 1).reshape(count, -1)
            for part in coupled
        ], 1)  # fmt: skip
        factors = solve(moved[:, torch.from_numpy(rows)].numpy().T.copy())
        made = sparse.csr_matrix(factors) @ multiples.reshape(count, -1).numpy()
        return torch.from_numpy(np.ascontiguousarray(made)).reshape(-1)


def _solver(located: Located, coupled: Sequence[Writers]) -> tuple[Ints, Any]:
    """Return rows of patterns that determine their multiples, and the function that solves for these; kept."""
    known = located.__dict__.setdefault("_solvers", {})
    if coupled[0].begin not in known:
        from scipy.sparse.linalg import splu  # slow to import

        patterns = sparse.vstack([located.patterns(part) for part in coupled]).tocsr()
        rows = pivots(patterns)
        known[coupled[0].begin] = rows, splu(patterns[rows].tocsc()).solve
    found: tuple[Ints, Any] = known[coupled[0].begin]
    return found


def pivots(matrix: sparse.csr_matrix) -> Ints:
    """Return as many independent rows of a matrix as it has columns: such that have one entry, if possible."""
    rest, left = matrix, np.arange(matrix.shape[1])
    found = columns = np.zeros(0, np.int64)
    while len(left):  # solve rows with one unknown, then those that have one left
        rows = np.flatnonzero(np.diff(rest.indptr) == 1)
        sizes = np.abs(rest.data[rest.indptr[rows]])
        if len(found):
            rows = rows[np.argsort(-sizes, kind="stable")][: np.count_nonzero(sizes >= _NOTHING)]
        told, first = np.unique(rest.indices[rest.indptr[rows]], return_index=True)
        if not len(told):
            break
        found, columns = np.concatenate([found, rows[first]]), np.concatenate([columns, left[told]])
        keep = np.ones(len(left), bool)
        keep[told] = False
        rest, left = rest[:, keep].tocsr(), left[keep]
    if len(left):  # entangled
        some = np.flatnonzero(np.diff(rest.indptr))
        dense = rest[some].toarray()
        chosen = []
        for _ in left:
            size = np.abs(dense).max(1)
            at = int(size.argmax())
            if size[at] < _NOTHING:
                raise RuntimeError("some shifts change nothing that can be told from others")
            column = int(np.abs(dense[at]).argmax())
            chosen.append(some[at])
            dense = dense - np.outer(dense[:, column] / dense[at, column], dense[at])
        found = np.concatenate([found, np.array(chosen, np.int64)])
        columns = np.concatenate([columns, left])
    result: Ints = found[np.argsort(columns)]
    return result


def _told(located: Located) -> Ints:
    """Return the wanted unknowns that determine the first entries of an element, in their order."""
    parts, entries = located.parts, located.space.entries
    empty = np.zeros(0, np.int64)
    at = rising(np.concatenate([empty, *(own.at.ravel() for own in parts.placed)]))
    forms = located.matrix[at][:, :entries]
    return at[pivots(forms)]


def read_off(located: Located) -> tuple[list[Free | Readers], Any]:
    """Return parts that tell the first entries of an element, and the function from additions to these: (wanted,)."""
    found = located.__dict__.get("_read")
    if found is None:
        from scipy.sparse.linalg import splu  # slow to import

        at = _told(located)
        parts = [part for part in located.parts.placed if np.isin(part.at, at).any()]
        solve = splu(located.matrix[at][:, : located.space.entries].tocsc())
        found = located.__dict__["_read"] = parts, lambda moved: solve.solve(moved[at])
    return found


def folded(structure: Structure) -> Translations:
    """Return a group's shifts, counted in multiples of the gains around rotations and rank-one maps.

    Args:
        structure: The group, with its rotations and rank-one maps.
    """
    space = structure.shifts
    if not space or not (structure.rotations or structure.gained or structure.tilts):
        return space
    assert space.parts is not None
    located = [space.generic, space.at(space.generic_tensors(1))]
    at = _told(located[0])
    tables = [own.matrix[at][:, : space.entries] for own in located]
    found, steady, changing = Found(), np.ones(space.entries, bool), np.ones(space.entries, bool)
    while changing.any():
        found = _folds_of_entries(structure, at, steady)
        one, two = (_in_multiples(own.tensors, found, table) for own, table in zip(located, tables, strict=True))
        changing = steady & (np.asarray(abs(one - two).max(1).todense()).ravel() > _NOTHING)
        steady &= ~changing
    for writer, *_ in space.parts.coupled:
        entries = np.arange(writer.places.start, writer.places.stop).reshape(-1, *writer.shape)
        indices = np.indices(entries.shape).reshape(entries.ndim, -1)
        for axis in writer.axes:
            _fold(structure, found, writer.name, axis, entries.ravel(), indices[1 + axis])
    folds = [
        Folds(gain, np.concatenate([one for one, _ in own]), np.concatenate([two for _, two in own]), power, epsilon)
        for (gain, power, epsilon), own in found.items()
    ]
    result = Translations(space.parts, folds)
    result.normed, result.idle = space.normed, space.idle
    return result


def _folds_of_entries(structure: Structure, at: Ints, steady: Bools) -> Found:
    """Return the entries of a gain that the first entries of an element are multiples of, by gain and power.

    Args:
        structure: The group.
        at: Which wanted unknown tells each entry.
        steady: Which entries are counted in multiples.
    """
    space, found = structure.shifts, Found()
    assert space.parts is not None
    entry = np.full(len(space.generic.forms.forms.constant.indptr) - 1, -1)
    entry[at[steady]] = np.flatnonzero(steady)
    for part in space.parts.placed:
        lead = part.at.ndim - len(space.parts.shapes[part.name])
        own = entry[part.at]
        places = np.nonzero(np.atleast_1d(own) >= 0)
        for axis in range(own.ndim - lead):
            if own.shape[lead + axis] > 1:
                _fold(structure, found, part.name, axis, own[places], places[lead + axis])
    return found


def _fold(structure: Structure, found: Found, name: str, axis: int, entries: Ints, places: Ints) -> None:
    """Note the gains around the maps on an axis of a tensor that entries of an element are added to."""
    for gain, at, gain_at, power, epsilon in _between(structure, name, axis):
        position = np.full(int(max(places.max(initial=0), at.max(initial=0))) + 1, -1)
        position[at] = np.arange(len(at))
        own = position[places]
        found.setdefault((gain, power, epsilon), []).append((entries[own >= 0], gain_at[own[own >= 0]]))


def _in_multiples(tensors: Mapping[str, Tensor], found: Found, table: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return the additions of entries at their places, both counted in multiples of gains."""
    multiples = np.ones(table.shape[1])
    for (gain, power, epsilon), parts in found.items():
        sizes = tensors[gain].detach().cpu().double().numpy().ravel()
        sizes = sizes if epsilon is None else np.sqrt(np.abs(sizes + epsilon))
        for entries, places in parts:
            multiples[entries] *= sizes[places] ** power
    return (sparse.diags(1 / multiples) @ table @ sparse.diags(multiples)).tocsr()


def _between(structure: Structure, name: str, axis: int) -> Iterator[tuple[str, Ints, Ints, int, float | None]]:
    """Yield the gains around the maps on an axis, the positions, the entries of the gains, and powers.

    The last item is the epsilon of a variance with a root that counts.
    """
    for slot in structure.slots_of.get(name, ()):
        if slot.axes != (axis,):
            continue
        for index, at, powers in structure.rotated_places.get(slot.offset, ()):
            for (gain, place), power in zip(structure.rotations[index].gains, powers, strict=True):
                if power:
                    yield gain, at, place, power, None
        for held in structure.gained_places.get(slot.offset, ()):
            for gained, power in zip(structure.gained[held.cell].gains, held.powers, strict=True):
                if power:
                    yield gained.name, held.at, gained.at, power, None
                if power and gained.norm is not None:
                    yield gained.norm.variance[0], held.at, gained.norm.variance[1], -power, gained.norm.epsilon
        if slot.offset in structure.tilted_places and slot.offset not in structure.rotated_places:
            index, reads = structure.tilted_places[slot.offset]
            if (own := structure.tilts[index].gains.get(name)) is not None:
                yield own, np.arange(slot.size), np.arange(slot.size), -1 if reads else 1, None


def elements_alone(
    space: Translations, tensors: Mapping[str, Tensor], names: Collection[str]
) -> dict[str, tuple[Floats, Floats]]:
    """Return the shifts that add to one tensor only, entry by entry, and that no weight propagates.

    Args:
        space: All shifts.
        tensors: A network's parameters and buffers, by name.
        names: The tensors.

    Returns:
        By tensor, if all of its entries move: such elements in columns, shape (size, elements), and their additions,
        shape (entries, elements).
    """
    if not space:
        return {}
    assert space.parts is not None
    parts, located = space.parts, space.at(tensors)
    forms = (located.matrix[:, : space.entries] @ sparse.diags(located.multiples[: space.entries])).tocsr()
    places = [own.at.ravel() for own in parts.placed] + [own.source.ravel() for own in parts.steps]
    every = rising(np.concatenate(places))
    _, label = sparse.csgraph.connected_components((abs(forms[every]).T @ abs(forms[every])).tocsr(), False)
    found = {}
    for part in parts.free:
        if part.name not in names or part.name in space.idle or not forms[part.at.ravel()].nnz:
            continue
        near = np.flatnonzero(np.isin(label, label[forms[part.at.ravel()].indices]))
        others = forms[np.setdiff1d(every, part.at.ravel())][:, near]
        values, vectors = np.linalg.eigh((others.T @ others).toarray())
        kernel = vectors[:, values <= _NOTHING * max(float(values.max(initial=0.0)), 1.0)]
        added = forms[np.broadcast_to(part.at, parts.shapes[part.name]).ravel()][:, near] @ kernel
        if kernel.shape[1] and (np.abs(added).max(1) > _NOTHING).all():
            elements = np.zeros((space.size, kernel.shape[1]))
            elements[near] = kernel
            found[part.name] = (elements, added)
    return found


def nearest(
    space: Translations,
    tensors: Mapping[str, Tensor],
    parameters: Collection[str],
    reference: Mapping[str, Tensor] | None = None,
    entries: Ints | None = None,
) -> Tensor:
    """Return the shift that brings its direct additions as near to a reference as it can.

    Additions through weights follow; biases that compensate for these are fitted afterwards, and buffers where they
    alone are shifted. From different points of one orbit it leads to the same tensors, up to the linear part of the
    group.

    Args:
        space: All shifts.
        tensors: A network's parameters and buffers, by name.
        parameters: Which of them are parameters; buffers follow.
        reference: Parameters to come near to; by default zeros.
        entries: Which entries of the shift are used; None for all.
    """
    if not space:
        return torch.zeros(0, dtype=torch.float64)
    return _Nearest(space, tensors, parameters, reference, entries).found()


class _Nearest:
    """Brings tensors near to a reference by shifts, see :func:`nearest`.

    Distances are counted in multiples of the gains that a shift adds, if any.
    """

    def __init__(
        self, space: Translations, tensors: Mapping[str, Tensor], parameters: Collection[str],
        reference: Mapping[str, Tensor] | None, entries: Ints | None,
    ) -> None:  # fmt: skip
        assert space.parts is not None
        self.space, self.parts, self.reference = space, space.parts, reference
        self.tensors = ConvertedTensors(tensors, doubled)
        self.located = space.at(self.tensors)
        self.used = np.ones(space.size, bool)
        if entries is not None:
            self.used = np.zeros(space.size, bool)
            self.used[entries] = True
        self.names = set(parameters if reference is None else set(parameters) & reference.keys()) & tensors.keys()

    def _apart(self, name: str) -> Tensor:
        """Return the difference of a tensor from the reference."""
        tensor = self.tensors[name]
        return tensor if self.reference is None else tensor - self.reference[name].detach().to(tensor)

    def found(self) -> Tensor:
        """Return the shift."""
        element = torch.zeros(self.space.size, dtype=torch.float64)
        for coupled in self.parts.coupled:
            some = [part for part in coupled if part.name in self.names and self.used[part.places].any()]
            if some:
                element[some[0].places] = self._of_writers(some)
        if not bool(element.isfinite().all()):
            return torch.zeros_like(element)
        entries = np.flatnonzero(self.used[: self.space.entries])
        for names in (self.names, set() if self.reference is not None else self.tensors.keys() - self.names):
            entries = self._rest(element, entries, names)
        return element

    def _of_writers(self, coupled: Sequence[Writers]) -> Tensor:
        """Return the multiples of changes of weights that cancel most of these."""
        patterns = sparse.vstack([self.located.patterns(part)[part.spread] for part in coupled]).tocsr()
        given = np.concatenate([
            self._apart(part.name).permute([*part.kept(), *part.axes]).reshape(-1, part.size).numpy()
            for part in coupled
        ])  # fmt: skip
        scale = scales(patterns)
        step = _least((sparse.diags(scale) @ patterns).tocsr(), scale[:, None] * given)
        multiples = self.located.multiples[coupled[0].places]
        return torch.from_numpy(np.divide(-step.ravel(), multiples, out=np.zeros_like(multiples), where=multiples != 0))

    def _rest(self, element: Tensor, entries: Ints, names: Collection[str]) -> Ints:
        """Fit all additions to tensors, except those to weights' outputs, until nothing moves any more.

        Returns:
            The entries that move none of these tensors.
        """
        places, given, weight = self._places(element, names)
        if not len(entries) or not np.isfinite(given).all():
            return entries[:0]
        forms = self.located.matrix[:, entries] @ sparse.diags(self.located.multiples[entries])
        forms = forms.tocsr()[places]
        forms.eliminate_zeros()  # of entries that do not pass
        scale = scales(forms)
        solve = _Least((sparse.diags(scale) @ forms).tocsr(), weight)
        size = np.abs(given).max(initial=0.0)
        for _ in range(_MOST):
            known = self.located.known(element)
            step = -solve(scale * (given + known[places]))
            if not (np.abs(step) > _SETTLED * max(size, np.abs(element.numpy()).max())).any():
                break
            element[torch.from_numpy(entries)] += torch.from_numpy(step)
        left: Ints = entries[forms.getnnz(0) == 0]
        return left

    def _places(self, element: Tensor, names: Collection[str]) -> tuple[Ints, Floats, Floats]:
        """Return the wanted unknowns that are seen in some tensors, their values, and how often they occur."""
        at, given, weight = [np.zeros(0, np.int64)], [np.zeros(0)], [np.zeros(0)]
        for part in self.parts.free:
            if part.name in names:
                apart = self._apart(part.name)
                thin = [axis for axis, size in enumerate(part.at.shape) if size < apart.shape[axis]]
                held = apart.isfinite()  # masks hold -inf
                both = apart.masked_fill(~held, 0.0), held.double()
                total, times = (own.sum(thin) if thin else own for own in both)
                at.append(part.at.ravel())
                given.append((total / times.clamp(min=1)).reshape(-1).numpy())
                weight.append(times.reshape(-1).numpy())
        for rows in self.parts.readers:
            if rows.name in names and self.located.matrix[rows.at.ravel()].nnz:
                at.append(rows.at.ravel())
                own, often = self._of_rows(rows, element)
                given.append(own.reshape(-1).numpy())
                weight.append(np.repeat(often, math.prod(rows.at.shape[1:])))
        return np.concatenate(at), np.concatenate(given), np.concatenate(weight)

    def _of_rows(self, rows: Readers, element: Tensor) -> tuple[Tensor, Floats]:
        """Return the multiples that rows hold. Shape (segments, *thin); and the number of places of each segment."""
        apart = self._apart(rows.name)
        for part in self.parts.writers:
            if part.name == rows.name:
                apart = self.located.of_one(part, element).added_to(apart)
        thin = [axis for axis in range(apart.ndim) if axis not in rows.axes and rows.at.shape[1 + axis] == 1]
        often = math.prod(apart.shape[axis] for axis in thin)
        apart = apart.mean(thin, keepdim=True) if thin else apart
        kept = [axis for axis in range(apart.ndim) if axis not in rows.axes]
        flat = apart.permute((*kept, *rows.axes)).reshape(-1, len(rows.segments)) / self.located.coefficient(rows)
        segments = torch.from_numpy(rows.segments)
        times = torch.bincount(segments, minlength=len(rows.at)).double()
        summed = torch.zeros(len(flat), len(rows.at), dtype=torch.float64).index_add(1, segments, flat)
        return (summed / times).T.reshape(rows.at.shape), often * times.numpy()


def _least(matrix: sparse.csr_matrix, given: Floats) -> Floats:
    return _Least(matrix, np.ones(matrix.shape[0]))(given)


class _Least:
    """Solves least squares, block by block; of several solutions the shortest.

    Args:
        matrix: Shape (equations, unknowns).
        weight: Weight of each equation.
    """

    def __init__(self, matrix: sparse.csr_matrix, weight: Floats) -> None:
        self.right = (matrix.T @ sparse.diags(weight)).tocsr()
        normal = (self.right @ matrix).tocsr()
        _, label = sparse.csgraph.connected_components(normal, False)
        diagonal = normal.diagonal()
        alone = np.bincount(label, minlength=1)[label] == 1
        inverse = np.divide(1.0, diagonal, out=np.zeros_like(diagonal), where=alone & (diagonal != 0))
        parts = [sparse.diags(inverse).tocoo()]
        order = np.argsort(label[~alone], kind="stable")
        members = np.flatnonzero(~alone)[order]
        for own in np.split(members, np.flatnonzero(np.diff(label[members])) + 1) if len(members) else []:
            block = np.linalg.pinv(normal[own][:, own].toarray(), rcond=_NOTHING, hermitian=True)
            one, two = np.meshgrid(own, own, indexing="ij")
            parts.append(sparse.coo_matrix((block.ravel(), (one.ravel(), two.ravel())), normal.shape))
        self.inverse = sum(parts[1:], start=parts[0]).tocsr()

    def __call__(self, given: Floats) -> Floats:
        found: Floats = self.inverse @ (self.right @ given)
        return found
