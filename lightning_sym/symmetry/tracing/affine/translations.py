"""What may be added to a network's weights without a change of the function: found, and done.

See docs/theory/intertwiners.md, 3.6.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sym.symmetry.tracing.affine.interpreter import Interpreter
from lightning_sym.symmetry.tracing.affine.reading import Constants, read_ahead
from lightning_sym.symmetry.tracing.affine.solution import Definitions, Solution
from lightning_sym.symmetry.tracing.affine.system import Derived, System, Weights, states_of
from lightning_sym.symmetry.tracing.affine.values import Atom, Total
from lightning_sym.symmetry.tracing.capture import Capture


def find_translations(
    captures: Sequence[Capture], tensors: Mapping[str, Tensor], constants: Collection[str] = ()
) -> "Translations":
    """Find what may be added to a network's tensors.

    Args:
        captures: The network, captured on one example or several.
        tensors: Its parameters and buffers by name; of those in `constants` the numbers count, of others the shapes.
        constants: The names of those that are in no state dict.
    """
    known = set(constants) | {name for name, tensor in tensors.items() if not tensor.is_floating_point()}
    system = System(tensors, tensors.keys() - known, known)
    system.names = states_of(captures)
    values = Weights(system, tensors)
    read = [Constants(system, capture, values) for capture in captures]
    read_ahead(system, read)
    while True:
        for own in read:
            # What is counted has to fit two lengths, if there is any.
            system.lengths, system.walk, system.counted = own.lengths, 0, False
            Interpreter(system, own).run()
            if system.counted:
                system.walk = 1
                Interpreter(system, own).run()
        if not system.late:
            return Translations(Solution(system))
        system = system.again()


class Translations:
    """All that may be added to a network's tensors, as a vector space.

    An element holds the free unknowns only: what is added to values of the network. What it adds to tensors is made of
    these and of the network's weights, in the order of the graph.

    Args:
        solution: The free unknowns.

    Attributes:
        size: The number of entries of an element.
    """

    def __init__(self, solution: Solution) -> None:
        self.solution, self.system = solution, solution.system
        self._blocks = self._of_directions()
        self.size = len(solution.shifts) + sum(math.prod(shape) for _, _, _, shape in self._blocks)

    def _of_directions(self) -> list[tuple[int, str, frozenset[int], tuple[int, ...]]]:
        """Return for each free direction its weight, the axes along which it has multiples, and their shape."""
        found = []
        wanted = self.solution.directions
        for name, families in self.system.families.items():
            for axes, family in families.items():
                first = int(family.directions.reshape(-1)[0])
                own = wanted[(wanted >= first) & (wanted < first + family.directions.numel())]
                shape = tuple(size if axis in axes else 1 for axis, size in enumerate(self.system.shape(name)))
                found += [(number, name, axes, shape) for number in own.tolist()]
        return found

    @property
    def dimension(self) -> int:
        """The number of independent directions: an element's entries, less those that say the same.

        Rows of ones, times the coefficients of a relation, are directions of a weight's outputs, too.
        """
        return self.size - sum(
            self._in_common(own, family)
            for name, families in self.system.families.items()
            for axes, family in families.items()
            for own in (
                *(rows.numbers for rows in family.rows.values()),
                *([self.system.free[name][None]] if self._is_partial(name, axes) else []),
            )
        )

    def _is_partial(self, name: str, axes: frozenset[int]) -> bool:
        return name in self.system.free and self.system.partial.get(name) == axes

    def _in_common(self, numbers: Tensor, family: Any) -> int:
        """Return how many directions of a weight's outputs are among what is added to each of its outputs."""
        forms, segments = self.solution.solved.forms, len(numbers)
        patterns = forms[family.directions.reshape(-1).numpy()]
        own = forms[numbers.reshape(-1).numpy()]
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

    def tangents(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return how fast each entry of an element changes tensors. Shape (size, *the tensor's), float64."""
        return self.changes(torch.eye(self.size, dtype=torch.float64), tensors)

    def act(self, element: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to which something is added.

        Args:
            element: Shape (size,), float64.
            tensors: Parameters and buffers, by name.

        Returns:
            Those that change, of their dtype and on their device.
        """
        changes = self.changes(element[None], tensors, finite=True)
        return {name: (tensors[name].detach().double() + own[0].to(tensors[name].device)).to(tensors[name].dtype)
                for name, own in changes.items()}  # fmt: skip

    def changes(self, elements: Tensor, tensors: Mapping[str, Tensor], *, finite: bool = False) -> dict[str, Tensor]:
        """Return what elements add to tensors.

        Args:
            elements: Shape (elements, size), float64.
            tensors: Parameters and buffers, by name.
            finite: Whether to count products of changes; for one element.

        Returns:
            By name, shape (elements, *the tensor's), float64.
        """
        weights = Weights(self.system, tensors)
        definitions = Definitions(self.solution, weights)
        free = self.solution.solved.free
        column = {number: at for at, number in enumerate(free.tolist())}
        values = torch.zeros(len(elements), len(free), dtype=torch.float64)
        count = len(self.solution.shifts)
        values[:, [column[number] for number in self.solution.shifts.tolist()]] = elements[:, :count]
        patterns = self._patterns(definitions, column)
        known = definitions.all_of(values)
        for own in self.solution.order:
            made = own.evaluate(known[:, own.source], self._changed(own.total, weights, known, finite=finite))
            made = self._seen(made, own, patterns)
            at = torch.tensor([column.get(number, -1) for number in own.numbers.reshape(-1).tolist()])
            values[:, at[at >= 0]] = made.reshape(len(elements), -1)[:, at >= 0]
            known = definitions.all_of(values)
        return self._added(known, elements, patterns, weights)

    def _patterns(self, definitions: Definitions, column: Mapping[int, int]) -> Tensor:
        """Return what each free direction makes of all unknowns. Shape (directions, unknowns)."""
        values = torch.zeros(len(self._blocks), len(column), dtype=torch.float64)
        for at, (number, *_) in enumerate(self._blocks):
            values[at, column[number]] = 1
        return definitions.all_of(values)

    def _seen(self, made: Tensor, own: Derived, patterns: Tensor) -> Tensor:
        """Take what nobody sees off a translation behind a weight: shifts could otherwise not be added."""
        if own.unseen is None or not len(patterns):
            return made
        axes = [axis for axis, size in enumerate(own.unseen.shape) if size > 1]
        basis = patterns[:, own.unseen.reshape(-1)]
        basis = basis[basis.abs().amax(1) > 0]
        if not len(basis):
            return made
        if not axes:
            return torch.zeros_like(made)
        lead = made.ndim - own.unseen.ndim
        moved = made.movedim([lead + axis for axis in axes], list(range(-len(axes), 0)))
        flat = moved.reshape(-1, basis.shape[1])
        flat = flat - flat @ torch.linalg.pinv(basis) @ basis
        back: Tensor = flat.reshape(moved.shape).movedim(list(range(-len(axes), 0)), [lead + axis for axis in axes])
        return back

    def _changed(self, total: Total | None, weights: Weights, known: Tensor, *, finite: bool) -> Weights:
        """Return the weights with what has been added to them so far, as far as a relation's sum needs them."""
        if total is None or not finite:
            return weights
        tensors = dict(weights.tensors)
        for name in self._names(total):
            if name in self.system.free:
                numbers = self.system.free[name]
                tensors[name] = weights.tensor(name) + known[0, numbers].expand(self.system.shape(name))
        return Weights(self.system, tensors)

    def _names(self, total: Total) -> set[str]:
        """Return the names of all tensors of which a relation's sum is made."""
        found: set[str] = set()
        todo: list[Any] = [atom for coefficient, *_ in total.terms for atom, *_ in coefficient.items]
        while todo:
            own = todo.pop()
            if isinstance(own, Atom):
                if own.kind == "parameter":
                    found.add(own.key)
                else:
                    todo.append(self.system.nodes[own.key])
            elif own in self.system.names:
                found.add(self.system.names[own])
            else:
                todo += own.all_input_nodes
        return found | (self._names(total.before[0]) if total.before is not None else set())

    def _added(self, known: Tensor, elements: Tensor, patterns: Tensor, weights: Weights) -> dict[str, Tensor]:
        """Return what is added to tensors, from all unknowns."""
        found: dict[str, Tensor] = {}
        lead = len(elements)

        def add(name: str, part: Tensor) -> None:
            shape = (lead, *self.system.shape(name))
            found[name] = found.get(name, torch.zeros(shape, dtype=torch.float64)) + part

        for name, numbers in self.system.free.items():
            if bool((own := known[:, numbers]).any()):
                add(name, own)
        for name, families in self.system.families.items():
            for axes, family in families.items():
                for rows in family.rows.values():
                    own = known[:, rows.numbers]
                    if not bool(own.any()):
                        continue
                    thin = [size if axis in axes else 1 for axis, size in enumerate(self.system.shape(name))]
                    by = weights.coefficient(rows.coefficient).expand(len(rows.segments))
                    for segment in range(own.shape[1]):
                        add(name, own[:, segment] * torch.where(rows.segments == segment, by, 0.0).reshape(thin))
        begin = len(self.solution.shifts)
        for at, (_, name, axes, shape) in enumerate(self._blocks):
            size = math.prod(shape)
            multiples = elements[:, begin : begin + size]
            begin += size
            if bool(multiples.any()):
                pattern = patterns[at, self.system.families[name][axes].directions]
                add(name, pattern * multiples.reshape(-1, *shape))
        return found

    def vectors(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
        """Return tangents as vectors. Shape (size, all entries of the named tensors)."""
        found = self.tangents(tensors)
        parts = [
            found[name].reshape(self.size, -1) if name in found
            else torch.zeros(self.size, math.prod(self.system.shape(name)), dtype=torch.float64)
            for name in names
        ]  # fmt: skip
        return torch.cat(parts, 1) if parts else torch.zeros(self.size, 0, dtype=torch.float64)
