"""Orthogonal matrices on streams, between gains: docs/theory/transformers.md, 3."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Floats, Ints, multiplied, together
from lightning_sym.symmetry.elements import AxisGroup, Tap
from lightning_sym.symmetry.group.between_gains import NO_MATRIX, BetweenGains, Matrices, moved_units
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.group.factor import Draw, Gains, LinearAction
from lightning_sym.symmetry.group.gathered import Canonical, Gathered, Rung, Wanted
from lightning_sym.symmetry.group.search import MatrixPlace, Seen
from lightning_sym.symmetry.group.streams import (
    best_turn,
    gain_signs,
    principal_turns,
    random_turn,
    rotatable,
    weight_products,
)
from lightning_sym.symmetry.solving.rotations import Rotation
from lightning_sym.symmetry.solving.structure import Slot, Structure

_ORTHOGONAL = 1e-8  # how far a matrix that is read from a file may be from an orthogonal one


class Rotations(BetweenGains):
    """An orthogonal matrix Q per stream; behind gains with diagonal D, :math:`D Q D^{-1}` acts."""

    name = "rotation"

    @property
    def cells(self) -> tuple[Rotation, ...]:
        """The streams."""
        return self.structure.rotations

    @property
    def places(self) -> Mapping[int, Sequence[tuple[int, Ints, tuple[int, ...]]]]:
        """By slot offset: the places of streams."""
        return self.structure.rotated_places

    def usable(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Return the numbers of the streams between gains other than zero."""
        return rotatable(self.structure, tensors)

    def drawn(self, number: int, draw: Draw) -> Tensor:
        """Draw a matrix, all being equally likely."""
        return random_turn(self.cells[number], draw.generator, most=draw.most)

    def inverse(self, own: Matrices) -> Matrices:
        """Return the inverse of a part."""
        return tuple(turn.mT for turn in own)

    def carried(self, own: Matrices, by: Element, back: Element) -> Matrices:
        """Return the matrices between permutations and the signs in front of all gains."""
        if self.group["permutation"].is_identity(by.permutation) and self.group["sign"].is_identity(by.sign):
            return own
        result = list(self.identity())
        for index, turn in enumerate(own):
            if len(turn):
                other, order, sign = self._brought(index, by)
                result[other] = sign[:, None] * turn[order[:, None], order] * sign
        return tuple(result)

    def _brought(self, index: int, by: Element) -> tuple[int, Tensor, Tensor]:
        """Return the image of a rotation's units under an element, before all gains: x_a = sign_a x_order[a].

        Returns:
            The rotation at their new place; for each of its units its place among these, shape
            (size,); and its sign. Shape (size,).
        """
        structure, rotation = self.structure, self.structure.rotations[index]
        other = int(structure.rotation_of[int(torch.argsort(by.permutation)[int(rotation.units[0])])])
        came = by.permutation.numpy()[structure.rotations[other].units]
        generators = structure.sign_table[rotation.orbit][structure.place_in_orbit[came]][:, rotation.plain_sign]
        sign = by.sign[torch.from_numpy(generators)].prod(1)
        return other, torch.from_numpy(structure.place_in_cell[came]), sign

    def linear_action(self, own: Matrices, gains: Gains) -> "RotationAction | None":
        """Return the action of a part by matrices; None for the identity."""
        action = RotationAction(self.structure, own, gains)
        return action if action.moving else None

    def tangents(self, parameters: Mapping[str, Floats], tensors: Mapping[str, Tensor]) -> sparse.csr_matrix:
        """Return the directions of antisymmetric matrices on streams that move parameters alone."""
        found = [super().tangents(parameters, tensors)]
        moved: dict[int, list[tuple[Slot, Ints, tuple[int, ...]]]] = {}
        for slot in self.structure.slots:
            for index, at, powers in self.structure.rotated_places.get(slot.offset, ()):
                moved.setdefault(index, []).append((slot, at, powers))
        closed = self.closed(tensors)
        for index, places in moved.items():
            rotation = self.structure.rotations[index]
            if index in closed or not all(slot.tensor in parameters for slot, *_ in places):
                continue
            basis = _antisymmetric_basis(rotation.size, fixes_ones=rotation.fixes_ones)
            change = {name: np.zeros((len(basis), *w.shape)) for name, w in parameters.items()}
            gains = [parameters[name].ravel()[at] for name, at in rotation.gains]
            for slot, at, powers in places:
                factors = (gain ** float(k) for gain, k in zip(gains, powers, strict=True))
                around = math.prod(factors, start=np.ones(len(at)))
                weights = parameters[slot.tensor]
                rows = together(torch.arange(weights.size).view(weights.shape), slot.axes).numpy()[at]
                turned = np.tensordot(around[:, None] * basis / around, weights.ravel()[rows], 1)
                change[slot.tensor].reshape(len(basis), -1)[:, rows] += turned
            rates = np.concatenate([own.reshape(len(basis), -1) for own in change.values()], 1)
            found.append(sparse.csr_matrix(rates.T))
        return sparse.hstack(found).tocsr()

    def best_match(self, target: Mapping[str, Tensor], current: Mapping[str, Tensor], orbit: int) -> Matrices | None:
        """Return the rotations of streams that bring parameters nearest to others; see :class:`Factor`."""
        able = [index for index in rotatable(self.structure, current) if self.structure.rotations[index].orbit == orbit]
        turns = list(self.identity())
        for index in able:
            products = weight_products(self.structure, index, target, current)
            turns[index] = best_turn(self.structure.rotations[index], products)
        return tuple(turns) if able else None

    freedom, late = "rotations", True

    def mixes(self, orbit: int) -> bool:
        """Return whether the units of an orbit are those of a stream."""
        return any(rotation.orbit == orbit for rotation in self.structure.rotations)

    def able(self, orbit: int, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether a stream of an orbit rotates between gains without zeros."""
        return any(self.structure.rotations[index].orbit == orbit for index in rotatable(self.structure, tensors))

    def seen(
        self, groups: Sequence[AxisGroup], values: Structure, networks: Sequence[Mapping[str, Tensor]]
    ) -> Iterable[Seen]:
        """Yield the outputs of modules that show a whole stream that rotates in all networks."""
        able = set.intersection(*(set(rotatable(self.structure, own)) for own in networks))
        for group in groups:
            for tap in group.taps if group.rotations and not group.dense else ():
                for slot in tap.seen if not tap.squared else ():
                    for index, at, powers in values.rotated_places.get(slot.offset, ()):
                        if index in able and len(slot.axes) == 1:
                            rotation, where = self.structure.rotations[index], torch.from_numpy(at)
                            gains = tuple((*gain, power) for gain, power in zip(rotation.gains, powers, strict=True))
                            name = f"stream {index} at {tap.name}"
                            yield Seen(index, rotation.orbit, name, tap, slot.axes[0], where, gains)

    def best_seen(self, products: Mapping[int, Tensor]) -> Matrices:
        """Return the rotations that bring activations nearest; see :class:`Factor`."""
        turns = enumerate(self.structure.rotations)
        return tuple(best_turn(own, products[index]) if index in products else NO_MATRIX for index, own in turns)

    def settled_signs(
        self, orbit: int, target: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> frozenset[int] | None:
        """Return the signs that act on gains, where these are positive in both networks; see :class:`Factor`."""
        able = (self.structure.rotations[index] for index in rotatable(self.structure, current))
        own = [rotation for rotation in able if rotation.orbit == orbit]
        for tensors in (target, current):
            for name, at in (gain for rotation in own for gain in rotation.gains):
                gain = tensors[name].reshape(-1)
                if not bool((gain[torch.from_numpy(at).to(gain.device)] > 0).all()):
                    return None
        columns = range(self.structure.sign_table[orbit].shape[1])
        settled = frozenset(k for k in columns if not any(rotation.plain_sign[k] for rotation in own))
        return settled if own else None

    @property
    def gains(self) -> frozenset[str]:
        """The gains around rotated streams."""
        return frozenset(name for rotation in self.structure.rotations for name, _ in rotation.gains)

    def unbounded(self, networks: Sequence[Mapping[str, Tensor]], balanced: bool) -> tuple[Sequence[str], bool]:
        """Return a note on streams that rotate between gains; see :class:`Factor`."""
        count = len(self.structure.rotations)
        stiff = count > 0 and not (balanced and all(len(rotatable(self.structure, own)) == count for own in networks))
        note = "streams rotate between gains that are no ones (zeros, or not balanced): no lower bound is known"
        return [note] * stiff, stiff

    def invariants(self, tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return the singular values of tensors on a stream, and sizes of fixed means; see :class:`Factor`."""
        found = {}
        for slot in self.structure.slots:
            places = self.structure.rotated_places.get(slot.offset)
            if places is None or slot.tensor not in tensors:
                continue
            rows, means = together(tensors[slot.tensor], slot.axes).reshape(slot.size, -1).clone(), list[Tensor]()
            for index, at, _ in places:
                if self.structure.rotations[index].fixes_ones:  # the stream's sign may flip means alone
                    mean = rows[at].mean(0)
                    means.append(torch.linalg.vector_norm(mean) * math.sqrt(len(at)))
                    rows[at] -= mean
            found[slot.tensor] = [torch.linalg.svdvals(rows), *means]
        return found

    rung, keeps_norms = Rung.LAST, True

    def concerned(self, wanted: Wanted) -> bool:
        """Return whether streams are turned: in balanced forms, where signs are free."""
        return bool(self.structure.rotations) and wanted.scales == "balanced" and wanted.signs

    def canonical(self, state: Gathered) -> Canonical:
        """Make gains positive, and turn streams to their principal axes, where units may leave their places."""
        known = gain_signs(self.structure, state.tensors)
        state.move({"sign": torch.from_numpy(np.where(known < 0, -1.0, 1.0))})
        if not state.wanted.order:
            return Canonical({})
        turns, notes = principal_turns(self.structure, state.tensors)
        return Canonical({self.name: turns}, notes)

    def left(self, wanted: Wanted, tensors: Mapping[str, Tensor]) -> Iterable[str]:
        """Yield a note on streams that stay; see :class:`Factor`."""
        stiff = len(self.structure.rotations)
        if self.concerned(wanted) and wanted.order:
            stiff -= len(rotatable(self.structure, tensors))
        if stiff:
            yield (
                f"{stiff} streams are not rotated (with scales='balanced', signs and order only, and between gains "
                "other than zero): the form is canonical up to these rotations only"
            )

    def matrix_places(self) -> Iterable[MatrixPlace]:
        """Yield the places of rotations of streams; see :class:`Factor`."""
        for slot in self.structure.slots:
            for index, at, powers in self.structure.rotated_places.get(slot.offset, ()):
                known = zip(self.structure.rotations[index].gains, powers, strict=True)
                gains = tuple((name, torch.from_numpy(own), power) for (name, own), power in known if power)
                maps, where = (f"stream {index}",), MatrixPlace.indices(at[None])
                yield MatrixPlace(slot.tensor, maps, slot.axes, where, gains=gains)

    def at(self, coordinates: Mapping[str, Tensor]) -> Matrices:
        """Return the part at some coordinates: their exponential."""
        turns = []
        for index, rotation in enumerate(self.structure.rotations):
            matrix = antisymmetric(coordinates[f"rotation {index}"], rotation.fixes_ones)
            turns.append(torch.linalg.matrix_exp(matrix) if bool(matrix.any()) else NO_MATRIX)
        return tuple(turns)

    def pulled_back(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the derivative with respect to the coordinates; see :class:`Factor`."""
        found = {}
        for index, rotation in enumerate(self.structure.rotations):
            products = weight_products(self.structure, index, gradients, weights)  # inf or nan after gains of 0
            found[f"rotation {index}"] = antisymmetric(products, rotation.fixes_ones)
        return found

    def check(self, own: Matrices) -> None:
        """Check that a part is one of this factor.

        Raises:
            ValueError: If a matrix is not orthogonal, or moves the vector of ones where a mean is subtracted.
        """
        super().check(own)
        for turn, rotation in zip(own, self.structure.rotations, strict=True):
            if not len(turn):
                continue
            away = float((turn @ turn.mT - torch.eye(len(turn), dtype=turn.dtype)).abs().max())
            away = max(away, float((turn.sum(1) - 1).abs().max()) if rotation.fixes_ones else 0.0)
            if len(turn) != rotation.size or not away <= _ORTHOGONAL:
                raise ValueError(
                    f"rotation holds a matrix that is no rotation of {rotation.size} units ({away:.1g} off)"
                )


class RotationAction(LinearAction):
    """The action of orthogonal matrices on single axes.

    Args:
        structure: The group.
        turns: One per rotation, or an empty one.
        gains: The gains around the rotations.
    """

    def __init__(self, structure: Structure, turns: Matrices, gains: Gains) -> None:
        self.structure, self.gains = structure, gains
        self._found: dict[tuple[int, tuple[int, ...]], tuple[Ints, Tensor]] = {}
        self.turns = [*map(moved_units, turns)]

    @property
    def moving(self) -> bool:
        """Whether any matrix moves anything."""
        return any(len(moved) for moved, _ in self.turns)

    def learn(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the gains around the matrices.

        Raises:
            ValueError: If a gain of units that move is zero.
        """
        for rotation, (moved, _) in zip(self.structure.rotations, self.turns, strict=True):
            for name, at in rotation.gains if len(moved) else ():
                self.gains.learn(name, tensors, "rotation", torch.from_numpy(at[moved]))

    def acts_at(self, slot: Slot) -> bool:
        """Return whether a matrix changes the units of a slot."""
        return any(len(self.turns[index][0]) for index, *_ in self.structure.rotated_places.get(slot.offset, ()))

    def require(self, tap: Tap, slot: Slot) -> None:
        """Check that the matrices act on a value inside the network.

        Raises:
            ValueError: If it holds squares.
        """
        if tap.squared and self.acts_at(slot):
            raise ValueError(
                f"{tap.name} holds squares of units that the element rotates, and no matrix acts on squares; expected "
                "another tap, or an element without rotations: sample(mixing=False)"
            )

    def on_axis(self, tensor: Tensor, slot: Slot, axis: int) -> Tensor:
        """Let the matrices act on one axis, between gains."""
        for index, at, powers in self.structure.rotated_places.get(slot.offset, ()):
            moved, matrix = self._between(index, powers)
            if not len(moved):
                continue
            matrix = matrix.to(tensor)
            if slot.offset in self.structure.rotated_whole and len(moved) == len(at):
                tensor = multiplied(matrix, tensor, axis)
            else:
                where = torch.from_numpy(at[moved]).to(tensor.device)
                tensor = tensor.index_copy(axis, where, multiplied(matrix, tensor.index_select(axis, where), axis))
        return tensor

    def _between(self, index: int, powers: tuple[int, ...]) -> tuple[Ints, Tensor]:
        """Return which units of a rotation are moved, and the matrix among these between powers of the gains."""
        if (index, powers) not in self._found:
            moved, matrix = self.turns[index]
            for (name, place), power in zip(self.structure.rotations[index].gains, powers, strict=True):
                if power and len(moved):
                    around = self.gains.of(name, "rotation")[torch.from_numpy(place[moved])] ** power
                    matrix = around[:, None] * matrix / around
            self._found[index, powers] = moved, matrix
        return self._found[index, powers]


def antisymmetric(matrix: Tensor, fixes_ones: bool) -> Tensor:
    """Return the nearest antisymmetric matrix (that annihilates the vector of ones, if it must)."""
    if fixes_ones:
        matrix = matrix - matrix.mean(0, keepdim=True)
        matrix = matrix - matrix.mean(1, keepdim=True)
    return (matrix - matrix.mT) / 2


def _antisymmetric_basis(size: int, *, fixes_ones: bool) -> Floats:
    """Return a basis of antisymmetric matrices (that send the vector of ones to 0). Shape (matrices, size, size)."""
    frame = np.linalg.qr(np.c_[np.ones(size), np.eye(size)[:, 1:]])[0][:, 1:] if fixes_ones else np.eye(size)
    first, second = np.triu_indices(frame.shape[1], 1)
    outer = np.einsum("ik,jk->kij", frame[:, first], frame[:, second])
    return np.asarray(outer - outer.transpose(0, 2, 1))
