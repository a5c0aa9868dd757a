"""Find translations of a network's weights that preserve its function.

See docs/theory/translations.md.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Ints, rising
from lightning_sym.symmetry.numbering import sum_by
from lightning_sym.symmetry.tracing.affine.absorbing import absorb_ahead
from lightning_sym.symmetry.tracing.affine.forms import Forms
from lightning_sym.symmetry.tracing.affine.interpreter import Interpreter
from lightning_sym.symmetry.tracing.affine.leaning import leaning_of
from lightning_sym.symmetry.tracing.affine.normed import normed_of
from lightning_sym.symmetry.tracing.affine.parts import Free, Kind, Parts, Readers, Shown, Step, Taker, Writers
from lightning_sym.symmetry.tracing.affine.reading import Constants, read_ahead
from lightning_sym.symmetry.tracing.affine.solution import Solution
from lightning_sym.symmetry.tracing.affine.space import Translations
from lightning_sym.symmetry.tracing.affine.system import Derived, System, states_of
from lightning_sym.symmetry.tracing.affine.values import Value
from lightning_sym.symmetry.tracing.affine.weights import Beside, Weights, names_of_total
from lightning_sym.symmetry.tracing.graph.capture import Capture

# Names for kinds of entries.
NORM = "biases that batch norms absorb"
LINEAR = "biases that linear layers absorb"
UNSEEN = "biases that nothing sees"
TAKEN = "functions of weights that other weights absorb"
OPPOSED = "coupled translations"
WRITERS = "means that norms subtract"
READERS = "rows that read a layer norm"


def find_translations(
    captures: Sequence[Capture],
    tensors: Mapping[str, Tensor],
    constants: Collection[str] = (),
    *,
    members: Collection[str] = (),
    keep: Collection[str] = (),
    still: Collection[str] = (),
    scaled: Callable[[str, int], bool] = lambda name, axis: False,
    outputs: bool = False,
    exclusive: bool = False,
) -> Translations:
    """Find the translations of a network's tensors.

    Args:
        captures: The network, captured on one or several examples.
        tensors: Its parameters and buffers by name. Values matter for those in `constants`, shapes for others.
        constants: The names of tensors in no state dict.
        members: The names of tensors with separate units for each member along the first axis.
        keep: Weights with rows that keep their mean.
        still: Tensors that are not translated.
        scaled: Whether scales or signs act differently on the positions along an axis of a tensor.
        outputs: Whether a softmax reads the outputs along their last axis, and therefore ignores a common offset.
        exclusive: Whether translations of two factors of a product always exclude each other.
    """
    try:
        return _found(captures, tensors, constants, members, keep, still, scaled, outputs=outputs, exclusive=exclusive)
    except Exception as error:  # the interpreter does not support this form of an operation
        found, why = Translations(), f"{type(error).__name__}: {error}"
        found.notes.append(f"translations of weights were not searched, as the affine interpreter stopped ({why})")
        return found


def _found(
    captures: Sequence[Capture],
    tensors: Mapping[str, Tensor],
    constants: Collection[str],
    members: Collection[str],
    keep: Collection[str],
    still: Collection[str],
    scaled: Callable[[str, int], bool],
    *,
    outputs: bool,
    exclusive: bool,
) -> Translations:
    known = set(constants) | {name for name, tensor in tensors.items() if not tensor.is_floating_point()}
    system = System(tensors, tensors.keys() - known - {*still}, known)
    system.members, system.exclusive = set(members), exclusive
    system.names = states_of(captures)
    values = Weights(system, tensors)
    read = [Constants(system, capture, values) for capture in captures]
    read_ahead(system, read, scaled)
    absorb_ahead(system, read)
    while True:
        marked: dict[str, Value | None] = {}
        interpreters = []
        for own in read:
            # Coefficients that count a length must fit two lengths.
            system.lengths, system.walk, system.counted = own.lengths, 0, False
            interpreters.append(_interpreted(system, own, marked, outputs=outputs))
            if system.counted:
                system.walk = 1
                interpreters.append(_interpreted(system, own, marked, outputs=outputs))
        if not system.late:
            break
        system = system.again()
    for name in keep:
        for family in system.families.get(name, {}).values():
            system.unknowns.vanish(family.directions)
    compiler = _Compiler(Solution(system), marked)
    if any(bool(compiler.living[probe].any()) for probe in system.probes):
        raise RuntimeError("too many rows of a weight have to be told apart")
    found = compiler.translations()
    found.normed, found.leaning = normed_of(interpreters), leaning_of(interpreters)
    found.idle = frozenset(system.idle)
    found.notes.extend(system.blind)
    return found


def _interpreted(
    system: System, constants: Constants, marked: dict[str, Value | None], *, outputs: bool
) -> Interpreter:
    """Interpret one capture, and record the values of its named nodes."""
    interpreter = Interpreter(system, constants, outputs=outputs)
    interpreter.run()
    for mark in constants.capture.marks:
        value = interpreter.values.get(mark.node)
        if mark.name not in marked and isinstance(value, Value):
            interpreter.numbers(value)
        marked.setdefault(mark.name, value)
    return interpreter


class _Compiler:
    """Extracts translations from a solved system.

    Args:
        solution: The free unknowns.
        marked: Named values.
    """

    def __init__(self, solution: Solution, marked: Mapping[str, Value | None]) -> None:
        self.solution, self.system, self.marked = solution, solution.system, marked
        forms, free = solution.solved.forms, solution.solved.free
        self.living = torch.from_numpy(np.diff(forms.indptr) > 0)
        own = {(name, axes): family for name, families in self.system.families.items()
               for axes, family in families.items()}  # fmt: skip
        column = np.full(self.system.unknowns.count, -1)
        column[free] = np.arange(len(free))
        shifts = np.zeros(len(free), bool)
        shifts[column[solution.shifts]] = True
        patterns: dict[Any, Ints] = {}
        for key, family in own.items():
            used = rising(forms[family.directions.numpy().ravel()].indices)
            used = used[shifts[used] | np.isin(free[used], solution.directions)]
            if len(used):
                patterns[key] = used
        self.group = group = np.full(len(free), -1)  # of weights that share changes
        for number, used in enumerate(patterns.values()):
            shifts[used] = False
            met = rising(group[used])
            group[np.isin(group, met[met >= 0])] = number
            group[used] = number
        self.first = np.flatnonzero(shifts)
        self.families = own
        self.coupled: dict[int, list[Any]] = {}  # families by group
        for key, used in patterns.items():
            self.coupled.setdefault(int(group[used[0]]), []).append(key)
        changes = [np.flatnonzero(group == number) for number in self.coupled]
        self.order = np.concatenate([self.first, *changes, column[solution.passing]])
        place = np.full(len(free), -1)
        place[self.order] = np.arange(len(self.order))
        self.patterns = {number: place[used] for number, used in zip(self.coupled, changes, strict=True)}
        self.column = np.full(len(column), -1)
        self.column[free] = place  # by unknown
        self.order = free[self.order]

    def translations(self) -> Translations:
        """Return all translations."""
        system, shown = self.system, {name: self._shown(value) for name, value in self.marked.items()}
        needed = list(system.free.values())
        needed += [rows.numbers for family in self.families.values() for rows in family.rows.values()]
        needed += [self.families[key].directions for keys in self.coupled.values() for key in keys]
        needed += [own.source for own in self.solution.order]
        needed += [own.unseen for own in self.solution.order if own.unseen is not None]
        needed += [numbers for pair in shown.values() for numbers in pair if numbers is not None]
        empty = torch.zeros(0, dtype=torch.int64)
        self.wanted = rising(torch.cat([empty, *(numbers.reshape(-1) for numbers in needed)]).numpy())
        forms = Forms(self.solution, self.wanted, self.order)
        free = [Free(name, self._at(numbers)) for name, numbers in system.free.items()]
        readers = [
            Readers(name, tuple(sorted(axes)), self._at(rows.numbers), rows.coefficient, rows.segments.numpy(),
                    not bool(self.living[rows.numbers.flatten(1)].any(1).all()))
            for (name, axes), family in self.families.items()
            for rows in family.rows.values()
        ]  # fmt: skip
        begin, writers = len(self.first), []
        for number, columns in self.patterns.items():
            for name, axes in self.coupled[number]:
                whole = system.shape(name)
                shape = tuple(size if axis in axes else 1 for axis, size in enumerate(whole))
                at = self._at(self.families[name, axes].directions)
                writers.append(Writers(name, tuple(sorted(axes)), at, columns, begin, shape, whole))
            begin += len(columns) * writers[-1].size
        steps = [self._step(own) for own in self._together()]
        takers = [
            Taker(name, sign, self._at(torch.cat([system.free[own].reshape(-1) for own, _ in by.given])), by)
            for name, functions in system.takers.items()
            for by, sign in functions.values()
        ]
        constants = {
            name: system.tensors[name]
            for name in system.tensors
            if name in system.constants or not system.tensors[name].is_floating_point()
        }
        parts = Parts(
            forms,
            free,
            readers,
            writers,
            steps,
            {
                name: Shown(None if at is None else self._at(at), self._at(drifts))
                for name, (at, drifts) in shown.items()
            },
            {key: system.made(key) for key in system.nodes},
            {name: system.shape(name) for name in system.tensors},
            constants,
            len(self.first),
            begin,
            sum(itertools.starmap(self._in_common, self._pairs())),
            [],
            takers=takers,
        )
        parts.kinds = [*self._kinds(parts), *self._kinds_of_changes(parts)]
        return Translations(parts)

    def _at(self, numbers: Tensor) -> Ints:
        """Return the indices of unknowns among the wanted ones."""
        return np.searchsorted(self.wanted, numbers.numpy())

    def _shown(self, value: Any) -> tuple[Tensor | None, Tensor]:
        """Return the translation of a named value, and the unknowns of its drifts."""
        drifts = [torch.zeros(0, dtype=torch.int64)]
        if not isinstance(value, Value):
            return None, drifts[0]
        drifts += [own.numbers.reshape(-1) for own in value.drifts.values()]
        every, translation = torch.cat(drifts), value.translation
        still = translation is None or not bool(self.living[translation].any())
        return None if still else translation, every[self.living[every]]

    def _together(self) -> Iterator[Derived]:
        """Yield derived unknowns in order; those that weights with shared changes make of the same ones together."""
        together: dict[Any, list[Derived]] = {}
        every: list[list[Derived]] = []
        for own in self.solution.order:
            used = self.solution.solved.forms[[] if own.unseen is None else own.unseen.numpy().ravel()].indices
            keys = [(reading, own.total is None, self.group[used[0]]) for reading in own.readings if len(used)]
            some = next((together[key] for key in keys if key in together), [])
            if not some:
                every.append(some)
            some.append(own)
            together |= dict.fromkeys(keys, some)
        for some in every:
            yield some[0] if len(some) == 1 else _beside(some)

    def _step(self, own: Derived) -> Step:
        columns = self.column[own.numbers.numpy().ravel()]
        unseen = None if own.unseen is None else self._at(own.unseen)
        evaluate: Any = own.evaluate
        names = frozenset(evaluate.names(self.system))
        changed = frozenset() if own.total is None else frozenset(names_of_total(self.system, own.total))
        changed, share = (self.system.added_to(names), 0.5) if own.halfway is not None else (changed, 1.0)
        shape = tuple(own.numbers.shape)
        return Step(self._at(own.source), columns, own.evaluate, unseen, names, changed, shape, share)

    def _pairs(self) -> Iterator[tuple[sparse.csr_matrix, sparse.csr_matrix, int]]:
        """Yield the forms of what is added to each output of weights that share changes, and of these changes.

        Shapes (segments × outputs, free), (outputs, free); and the number of segments.
        """
        forms = self.solution.solved.forms
        for keys in self.coupled.values():
            families = [self.families[key] for key in keys]
            outputs = [family.directions.reshape(-1) for family in families]
            added: dict[Any, dict[int, tuple[Tensor, float]]] = {}
            for at, ((name, axes), family) in enumerate(zip(keys, families, strict=True)):
                for (by, *row), rows in family.rows.items():
                    if bool(self.living[rows.numbers].any()):
                        found = added.setdefault((by[1], *row), {})
                        found[at] = rows.numbers.flatten(1), rows.coefficient.factor
                if name in self.system.free and self.system.partial.get(name) == axes:
                    added.setdefault(None, {})[at] = self.system.free[name].reshape(1, -1), 1.0
            for found in added.values():
                count = max(len(own) for own, _ in found.values())
                zeros = [torch.zeros(count, len(own), dtype=torch.int64) for own in outputs]
                some = [found.get(at, (own, 1.0)) for at, own in enumerate(zeros)]
                factors = torch.cat([torch.full(own.shape, factor) for own, factor in some], 1).numpy().ravel()
                numbers = torch.cat([own for own, _ in some], 1).numpy().ravel()
                yield (sparse.diags(factors) @ forms[numbers]).tocsr(), forms[torch.cat(outputs).numpy()], count

    @staticmethod
    def _in_common(own: sparse.csr_matrix, patterns: sparse.csr_matrix, segments: int) -> int:
        """Return the dimension of directions that are among translations of each output; see :meth:`_pairs`."""
        if not patterns.nnz or not own.nnz:
            return 0
        used = patterns[:, patterns.getnnz(0) > 0]
        if own.nnz == own.shape[0] == len(set(own.indices.tolist())):
            return int(segments * used.shape[1])
        given = torch.from_numpy(own[:, own.getnnz(0) > 0].toarray())
        blocks = [torch.from_numpy(used.toarray())] * segments
        wanted: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        both = torch.linalg.matrix_rank(torch.cat([given, wanted], 1), rtol=1e-9)
        return int(torch.linalg.matrix_rank(given, rtol=1e-9)) + int(wanted.shape[1]) - int(both)

    def _kinds(self, parts: Parts) -> list[Kind]:
        """Name the kinds of the first entries of elements."""
        forms = self.solution.solved.forms[self.wanted][:, self.first].tocsr()
        places: list[Readers | Free | Step] = [*parts.readers, *parts.free, *parts.steps]
        held = [forms[(own.source if isinstance(own, Step) else own.at).ravel()].indices for own in places]
        number = np.repeat(np.arange(len(places)), [len(own) for own in held])
        entry = np.concatenate([np.zeros(0, np.int64), *held])
        # The number of times that each entry is added to each place.
        table = sparse.csr_matrix((np.ones(len(entry), np.int64), (entry, number)), (parts.entries, len(places)))
        row = np.repeat(np.arange(parts.entries), np.diff(table.indptr))
        hashes = np.random.default_rng(0).integers(2**63, size=len(places), dtype=np.uint64)
        most, added = np.zeros(parts.entries, np.int64), table.indices < len(parts.readers) + len(parts.free)
        np.maximum.at(most, row[added], table.data[added])
        _, like = np.unique(sum_by(row, hashes[table.indices], parts.entries), return_inverse=True)
        rank = {name: number for number, name in enumerate(self.system.tensors)}
        found = []
        for entries in np.split(np.argsort(like, kind="stable"), np.cumsum(np.bincount(like))):
            some = [places[at] for first in entries[:1] for at in table[first].indices]
            rows = [place for place in some if isinstance(place, Readers)]
            free = sorted((place.name for place in some if isinstance(place, Free)), key=rank.__getitem__)
            steps = [place for place in some if isinstance(place, Step)]
            names = [*(place.name for place in rows), *free]
            if names:
                kind = self._kind(rows, free, steps, int(most[entries].max()))
                found.append((rank[names[0]], Kind(kind, names[0], entries)))
        return [kind for _, kind in sorted(found, key=lambda own: (own[0], own[1].entries[0]))]

    def _kinds_of_changes(self, parts: Parts) -> list[Kind]:
        """Name the entries that change weights; those of several weights that share changes with the first of these."""
        found = []
        for coupled in parts.coupled:
            patterns = [self.solution.solved.forms[self.wanted[own.at.ravel()]] for own in coupled]
            for at, own in enumerate(coupled):
                others = [pattern for index, pattern in enumerate(patterns) if index != at]
                rank = sparse.csgraph.structural_rank(sparse.vstack(others).tocsr()) if others else 0
                entries = np.arange(parts.size)[own.places][: None if at == 0 else 0]
                found.append(Kind(WRITERS if rank < len(own.columns) else OPPOSED, own.name, entries))
        return found

    def _kind(self, rows: Sequence[Readers], free: Sequence[str], steps: Sequence[Step], most: int) -> str:
        """Name the kind of entries that are added at equal places, at most ``most`` times to each tensor."""
        if any(own.coefficient.items or own.segments.any() for own in rows if not own.constants):
            return READERS
        if not self.system.idle.isdisjoint(free):
            return TAKEN
        free = [*(own.name for own in rows), *free]  # of a table that is translated equally in all rows
        learned = [isinstance(self.system.tensors[name], torch.nn.Parameter) for name in free]
        if not all(learned):
            return NORM if learned[0] and most == 1 and not steps else OPPOSED
        if len(free) > 1:
            return OPPOSED
        return WRITERS if most > 1 and not steps else LINEAR if steps else UNSEEN


def _beside(some: Sequence[Derived]) -> Derived:
    """Return derived unknowns as those of one step."""
    parts = [(own, own.unseen) for own in some if own.unseen is not None]
    rows = len(some[0].numbers) if len(parts[0][1]) == 1 else 1
    maps = tuple((own.evaluate, tuple(own.source.shape), tuple(own.numbers.shape)) for own in some)
    unseen = [
        at.expand(1 if rows > 1 else len(own.numbers), *own.numbers.shape[1:]).reshape(1, -1) for own, at in parts
    ]
    numbers = torch.cat([own.numbers.reshape(rows, -1) for own in some], 1)
    source = torch.cat([own.source.reshape(-1) for own in some])
    evaluate: Any = Beside(maps, rows)
    return replace(some[0], numbers=numbers, source=source, evaluate=evaluate, unseen=torch.cat(unseen, 1))
