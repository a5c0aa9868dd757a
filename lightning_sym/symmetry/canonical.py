"""Canonical forms: one member for each orbit of a network's symmetry group."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_sym.symmetry._capture import state_tensors
from lightning_sym.symmetry._structure import Site
from lightning_sym.symmetry.base import Element, Symmetry

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

# Largest relative gradient, (incoming - outgoing) / (incoming + outgoing), at which norms count as balanced.
BALANCED = 1e-13
# Keys of units that differ by less, relative to the largest, are ties: rounding differs between orbit members.
TIE = 1e-9
# Sums of squares below are zero: their logarithms mean nothing.
NOTHING = 1e-280


@dataclass(frozen=True)
class Balance:
    """Incoming against outgoing norms of the units of one axis group.

    Attributes:
        incoming: Squared norm of what a unit's scale multiplies, times the exponent. Shape (size,), float64.
        outgoing: Squared norm of what the scale divides, times the exponent. Shape (size,), float64.
        difference: ``incoming - outgoing``. Shape (size,), float64.
        dead: Number of units with nothing coming in or nothing going out.
    """

    incoming: Tensor
    outgoing: Tensor
    difference: Tensor
    dead: int


@dataclass(frozen=True)
class CanonicalForm:
    """A network's canonical form, and how it was reached.

    Attributes:
        network: The canonical member of the orbit, in the dtype and on the device of the given network.
        element: The element that maps the given network to it.
        dead: For each axis group that holds dead units (incoming or outgoing weights all zero): which units, by their
            place in the group before sorting. Each of shape (size,), bool.
        sweeps: Passes over all scales that balancing took, Newton steps included.
        residual: Largest relative difference of incoming and outgoing norms that is left, unitless.
        converged: Whether all scale gauges were reached.
        notes: What was left as it was, and why.
    """

    network: nn.Module
    element: Element
    dead: dict[str, Tensor]
    sweeps: int
    residual: float
    converged: bool
    notes: tuple[str, ...]


class _Plan:
    """What of a structure does not depend on weights, laid out for sums over slices.

    Attributes:
        tensors: Per parameter with labelled axes: its name and its sites, those with two axes last.
        row_of: For each position the number of its row: positions, those of one module's tensors counted as the same.
        forms: Exponents (positions, scales); `up` and `down`: their positive and negative parts, transposed.
        classes: Scales that play the same role for the units of one type, in the order of the forward pass.
        class_of: For each scale its class; -1 for scales within dense cells, which nothing here touches.
        touching: For each class, the tensors on which it acts.
        first: For each type, for each column, whether it belongs to the first module that touches the units.
        parameter: For each position, whether it belongs to a parameter (and to no bias that a shift sets to zero).
    """

    def __init__(self, symmetry: Symmetry) -> None:
        structure = symmetry.structure
        self.sites = structure.sites
        self.forms = structure.magnitudes
        total, scales = self.forms.shape
        self.total = total
        self.site_of = np.zeros(total, np.int64)
        self.unit_at = np.full(total, -1)
        for index, site in enumerate(structure.sites):
            self.site_of[site.offset : site.offset + site.size] = index
            self.unit_at[site.offset : site.offset + site.size] = site.unit.ravel()
        shifted = {structure.sites[bias].tensor for bias, _, _ in structure.shifts}
        self.shifted = shifted
        self.parameter = np.zeros(total, bool)
        by_name: dict[str, list[Site]] = {}
        for site in structure.sites:
            acts = self.forms.indptr[site.offset] < self.forms.indptr[site.offset + site.size]
            if site.tensor in symmetry.parameter_names and site.axes and (acts or (site.unit >= 0).any()):
                by_name.setdefault(site.tensor, []).append(site)
                self.parameter[site.offset : site.offset + site.size] = site.tensor not in shifted
        self.tensors = {name: sorted(sites, key=lambda site: len(site.axes)) for name, sites in by_name.items()}
        positive = self.forms.maximum(0)
        negative = (-self.forms).maximum(0)
        self.up, self.down = positive.T.tocsr(), negative.T.tocsr()
        self.up_used, self.down_used = (self.up > 0).astype(np.float64), (self.down > 0).astype(np.float64)
        self.used = (abs(self.forms) > 0).astype(np.float64)
        self.used_at = np.repeat(np.arange(total), np.diff(self.forms.indptr))
        # Rows: positions, those of one module's tensors (weight, bias) counted as the same.
        longest: dict[str, int] = {}
        for site in structure.sites:
            prefix = site.tensor.rpartition(".")[0]
            longest[prefix] = max(longest.get(prefix, 0), site.size)
        begin = dict(zip(longest, np.cumsum([0, *longest.values()]).tolist(), strict=False))
        self.rows = sum(longest.values())
        self.row_of = np.zeros(total, np.int64)
        for site in structure.sites:
            self.row_of[site.offset : site.offset + site.size] = begin[site.tensor.rpartition(".")[0]] + np.arange(
                site.size
            )
        self.largest = np.zeros(scales)
        np.maximum.at(self.largest, self.forms.indices, abs(self.forms.data))

        dense = {int(unit) for cell in structure.dense for unit in cell}
        self.class_of = np.full(scales, -2)
        classes = []
        for units, table in zip(structure.types, structure.scale_table, strict=True):
            for column in table.T:
                if int(units[0]) in dense:
                    self.class_of[column] = -1
                    continue
                members = np.unique(column[self.class_of[column] == -2])
                if len(members):
                    self.class_of[members] = -3
                    classes.append(members)
        classes += [np.array([scale]) for scale in np.flatnonzero(self.class_of == -2)]
        columns = self.forms.tocsc()
        columns.sort_indices()
        classes.sort(key=lambda members: int(columns.indices[columns.indptr[members[0]]]))
        self.classes = classes
        for index, members in enumerate(classes):
            self.class_of[members] = index
        self.touching: list[list[str]] = [[] for _ in classes]
        for name, sites in self.tensors.items():
            own = np.unique(
                np.concatenate([self.class_of[self.forms[s.offset : s.offset + s.size].indices] for s in sites])
            )
            for index in own[own >= 0]:
                self.touching[index].append(name)
        self.first = []
        for matrix in structure.columns:
            names = [structure.sites[i].tensor for i in self.site_of[matrix[0]]]
            prefix = names[0].rpartition(".")[0] if names else ""
            own_module = [
                name.rpartition(".")[0] == prefix and self.parameter[p]
                for name, p in zip(names, matrix[0], strict=True)
            ]
            self.first.append(np.array(own_module, bool))

    @staticmethod
    def at(site: Site) -> slice:
        """Return where a site's positions are."""
        return slice(site.offset, site.offset + site.size)


_PLANS: WeakKeyDictionary[Symmetry, _Plan] = WeakKeyDictionary()


def _plan(symmetry: Symmetry) -> _Plan:
    if symmetry not in _PLANS:
        _PLANS[symmetry] = _Plan(symmetry)
    return _PLANS[symmetry]


def _array(tensor: Tensor) -> Floats:
    result: Floats = tensor.detach().to("cpu", torch.float64).numpy()
    return result


class _Squares:
    """Sums of squares of a network's weights by position, under any scales.

    A term is a square q, summed over the axes without units; scales l turn it into q exp(2 a.l), where a adds the
    exponents at its positions on all axes. The sum of all terms is the squared norm of the network.
    """

    def __init__(self, plan: _Plan, tensors: dict[str, Tensor]) -> None:
        self.plan = plan
        self.squares: dict[str, Floats] = {}
        self.axes: dict[str, list[tuple[int, ...]]] = {}
        for name, sites in plan.tensors.items():
            tensor = tensors[name].detach()
            axes = sorted({axis for site in sites for axis in site.axes})
            rest = [axis for axis in range(tensor.ndim) if axis not in axes]
            if math.prod(tensor.shape[axis] for axis in rest) == 1:
                square = tensor.double().square_() if tensor.dtype != torch.float64 else tensor.square()
                square = square.reshape([tensor.shape[axis] for axis in axes])
            else:
                square = torch.linalg.vector_norm(tensor, dim=rest, dtype=torch.float64).square_()
            place = {axis: index for index, axis in enumerate(axes)}
            self.squares[name] = square.cpu().numpy()
            self.axes[name] = [tuple(place[axis] for axis in site.axes) for site in sites]

    def slices(self, factor: Floats, names: Sequence[str] | None = None, wanted: Bools | None = None) -> Floats:
        """Return the sum of the terms at each position; factor: what each position multiplies its terms by.

        Only for the sites of the named tensors that hold a wanted position; 0 elsewhere, or more than asked for.
        """
        total = np.zeros(self.plan.total)
        for name in self.squares if names is None else names:
            square, sites, axes = self.squares[name], self.plan.tensors[name], self.axes[name]
            own = [factor[_Plan.at(site)] for site in sites]
            if len(sites) == 1 and len(axes[0]) == square.ndim:
                total[_Plan.at(sites[0])] = square.ravel() * own[0]
            elif len(sites) == 2 and square.ndim == 2 and len(axes[1]) == 1:
                for site, here, there, matrix in zip(sites, own, own[::-1], (square, square.T), strict=True):
                    if wanted is None or wanted[_Plan.at(site)].any():
                        total[_Plan.at(site)] = here * (matrix @ there)
            else:
                self._add(total, name, self._scaled(name, factor))
        return total

    def _spread(self, name: str, values: Floats, index: int) -> Floats:
        site, axes = self.plan.tensors[name][index], self.axes[name][index]
        shape = [1] * self.squares[name].ndim
        for axis, size in zip(axes, site.shape, strict=True):
            shape[axis] = size
        return values[_Plan.at(site)].reshape(shape)

    def _scaled(self, name: str, factor: Floats) -> Floats:
        result = self.squares[name]
        for index in range(len(self.plan.tensors[name])):
            result = result * self._spread(name, factor, index)
        return result

    def _add(self, total: Floats, name: str, terms: Floats) -> None:
        for site, axes in zip(self.plan.tensors[name], self.axes[name], strict=True):
            others = tuple(axis for axis in range(terms.ndim) if axis not in axes)
            total[_Plan.at(site)] = terms.sum(others).ravel()

    def change(self, factor: Floats, slices: Floats, speed: Floats, names: Sequence[str]) -> Floats:
        """Return how the slices change when the logarithm of each position's factor changes by `speed`."""
        total = slices * speed
        moving = factor * speed
        for name in names:
            square, sites, axes = self.squares[name], self.plan.tensors[name], self.axes[name]
            if len(sites) == 1 and len(axes[0]) == square.ndim:
                continue
            if len(sites) == 2 and square.ndim == 2 and len(axes[1]) == 1:
                one, two = _Plan.at(sites[0]), _Plan.at(sites[1])
                total[one] += factor[one] * (square @ moving[two])
                total[two] += factor[two] * (moving[one] @ square)
            else:
                rate = sum(self._spread(name, speed, index) for index in range(len(sites)))
                self._add(total, name, self._scaled(name, factor) * rate)
        return total

    def present(self, mask: Floats) -> Bools:
        """Return for each position whether it has a term (whatever its value) all of whose positions are allowed."""
        result = np.zeros(self.plan.total, bool)
        for name, square in self.squares.items():
            sites = self.plan.tensors[name]
            if any(len(site.axes) > 1 for site in sites):
                allowed = np.ones(square.shape)
                for index in range(len(sites)):
                    allowed = allowed * self._spread(name, mask, index)
                total = np.zeros(self.plan.total)
                self._add(total, name, allowed)
                result |= total > 0
            elif all(mask[_Plan.at(site)].any() for site in sites):
                for site in sites:
                    result[_Plan.at(site)] = mask[_Plan.at(site)] > 0
        return result

    def allowed(self, mask: Floats) -> list[str]:
        """Return the tensors that have terms all of whose positions are allowed."""
        return [name for name in self.squares if all(mask[_Plan.at(site)].any() for site in self.plan.tensors[name])]


def balance(symmetry: Symmetry, network: nn.Module) -> dict[str, Balance]:
    r"""Measure for every unit the norm of its incoming weights against that of its outgoing weights.

    For a unit with a free scale :math:`\lambda` (spec 4.2) whose weights move by :math:`w_k \to \lambda^{a_k} w_k`,
    gradient flow conserves :math:`\sum_k a_k w_k^2`: incoming minus outgoing squared norm, each term weighted by its
    exponent. Weight decay drives it to 0. Where several scales belong to a unit, the one that both multiplies and
    divides weights is taken: with batch norm before the activation the scale of what the unit puts out, so that
    incoming means ``gamma^2 + beta^2``, and outgoing the next layer's columns. (The other scale, in front of the batch
    norm, only multiplies: gradient flow conserves the norm of the rows themselves.) Without a free scale (tanh, GELU)
    incoming means the first module's weights and biases, outgoing all others, and nothing is conserved.

    Args:
        symmetry: Of the network's architecture.
        network: Not changed.

    Returns:
        By the names of the axis groups, in their order.

    Raises:
        ValueError: If the network has another structure than the traced one.

    Note:
        One pass over the weights; computed in float64 on the CPU.

    Example:
        >>> from lightning_sym.symmetry.tracing import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> balance(trace_symmetry(network, torch.randn(2, 5)), network)["0"].difference.shape
        torch.Size([8])
    """
    symmetry.require(network)
    plan = _plan(symmetry)
    squares = _Squares(plan, state_tensors(network))
    slices = squares.slices(np.ones(plan.total))
    return dict(_balances(symmetry, plan, slices))


def _balances(symmetry: Symmetry, plan: _Plan, slices: Floats) -> Iterator[tuple[str, Balance]]:
    up, down = plan.up @ slices, plan.down @ slices
    has_up = np.diff(plan.up.indptr) > 0
    has_down = np.diff(plan.down.indptr) > 0
    structure = symmetry.structure
    for index, group in enumerate(symmetry.groups):
        table = structure.scale_table[index]
        both = [c for c in range(table.shape[1]) if has_up[table[0, c]] and has_down[table[0, c]]]
        if table.shape[1] and not group.dense:
            chosen = table[:, both[0] if both else 0]
            incoming, outgoing = up[chosen], down[chosen]
            one_sided = not both
        else:
            columns = structure.columns[index]
            incoming = slices[columns[:, plan.first[index]]].sum(1)
            later = ~plan.first[index] & plan.parameter[columns[0]]
            outgoing = slices[columns[:, later]].sum(1) + _joint_sums(symmetry, plan, slices)[group.units.numpy()]
            one_sided = not later.any() and not outgoing.any()
        dead = incoming <= NOTHING if one_sided else (incoming <= NOTHING) | (outgoing <= NOTHING)
        one, two = torch.from_numpy(incoming), torch.from_numpy(outgoing)
        yield group.name, Balance(one, two, one - two, int(dead.sum()))


def _joint_sums(symmetry: Symmetry, plan: _Plan, slices: Floats) -> Floats:
    """Return for each unit the sum over positions of grouped convolutions' inputs."""
    total = np.zeros(symmetry.units)
    for site in plan.sites:
        if len(site.axes) == 2:
            unit = site.unit.ravel()
            np.add.at(total, unit[unit >= 0], slices[plan.at(site)][unit >= 0])
    return total


class _Scales:
    """Finds the scales of the gauge: see `canonicalize`."""

    def __init__(self, symmetry: Symmetry, plan: _Plan, squares: _Squares, gauge: str) -> None:
        self.plan, self.squares = plan, squares
        self.log_scale = np.zeros(symmetry.scales)
        self.dead = np.zeros(symmetry.scales, bool)
        self.notes: list[str] = []
        self.sweeps, self.residual, self.converged = 0, 0.0, True
        self.allowed = plan.parameter.astype(np.float64)
        levels, rest = self._levels()
        free = np.zeros(symmetry.scales, bool)
        free[rest] = True
        if len(rest):
            mask = self._without(np.concatenate([np.zeros(0, np.int64), *levels]))
            if gauge == "balanced":
                self._balance(free, mask)
            else:
                self._unit(free, mask)
        for level in range(len(levels) - 1, -1, -1):
            mask = self._without(np.concatenate([np.zeros(0, np.int64), *levels[:level]]))
            self._normalise(levels[level], mask)

    def _without(self, scales: Ints) -> Floats:
        """Return a mask of the positions on which none of the scales acts, nor any dead one."""
        mask = self.allowed.copy()
        out = np.zeros(len(self.log_scale))
        out[scales] = 1
        out[self.dead] = 1
        mask[self.plan.used @ out > 0] = 0
        return mask

    def _levels(self) -> tuple[list[Ints], Ints]:
        """Peel off scales that only multiply (or only divide) what is left of the weights: they have no minimum.

        Normalising such a scale's weights makes them constant, which may leave others one-sided: with batch norm first
        the scale in front of it goes (it multiplies rows), and with these rows the divisions by the previous layer's
        scale, of which gamma and beta are left.
        """
        plan = self.plan
        pending = plan.class_of >= 0
        levels: list[Ints] = []
        while True:
            mask = self._without(np.concatenate([np.zeros(0, np.int64), *levels]))
            count = self.squares.present(mask).astype(np.float64)
            up, down = plan.up_used @ count > 0, plan.down_used @ count > 0
            peel = np.flatnonzero(pending & (up != down))
            if not len(peel):
                return levels, np.flatnonzero(pending & up & down)
            levels.append(peel)
            pending[peel] = False

    def _factor(self, mask: Floats, log_scale: Floats | None = None) -> Floats:
        exponents = self.plan.forms @ (self.log_scale if log_scale is None else log_scale)
        result: Floats = mask * np.exp(2 * exponents)
        return result

    def _normalise(self, scales: Ints, mask: Floats) -> None:
        """Give each scale's slices the squared norm that is their number (rows of one module count once)."""
        plan = self.plan
        among = np.zeros(len(self.log_scale), bool)
        among[scales] = True
        count = self.squares.present(mask)
        target = self._rows(count)
        allowed = self.squares.allowed(mask)
        acting = plan.used @ among.astype(np.float64) > 0
        interacting = self._interact(among, count)
        groups = plan.classes if interacting else [scales]
        worst = 0.0
        for sweep in range(2000 if interacting else 1):
            worst = 0.0
            for index, members in enumerate(groups):
                own = members[among[members] & ~self.dead[members]]
                if not len(own):
                    continue
                names = [name for name in plan.touching[index] if name in allowed] if interacting else allowed
                slices = self.squares.slices(self._factor(mask), names, acting)
                up, down = (plan.up @ slices)[own], (plan.down @ slices)[own]
                total = up + down
                zero = total <= NOTHING
                self.dead[own[zero]] = True
                own, total = own[~zero], total[~zero]
                sign = np.where(up[~zero] > 0, 1.0, -1.0)
                step = sign * np.log(target[own] / total) / (2 * plan.largest[own])
                self.log_scale[own] += step
                worst = max(worst, float(abs(step).max(initial=0)))
                if zero.any():
                    mask = np.where(plan.used @ self.dead.astype(float) > 0, 0.0, mask)
                    worst = 1.0
            self.sweeps = max(self.sweeps, sweep + 1)
            if worst <= 4e-15:
                break
        if interacting and worst > 1e-12:
            self.converged = False
            self.notes.append(f"scales with one-sided slices were normalised to {worst:.1e} only")

    def _interact(self, among: Bools, count: Bools) -> bool:
        """Return whether two of the scales act on one weight, or one acts with several exponents."""
        plan = self.plan
        acting = plan.used @ among.astype(np.float64) * count
        if (acting > 1).any():
            return True
        for sites in plan.tensors.values():
            if sum(bool(acting[plan.at(site)].any()) for site in sites) > 1:
                return True
        positions = np.flatnonzero(acting)
        block = plan.forms[positions]
        return bool((abs(block.data) != plan.largest[block.indices])[among[block.indices]].any())

    def _rows(self, count: Bools) -> Floats:
        """Return for each scale on how many rows of modules it acts: positions, each counted once per module."""
        plan = self.plan
        keep = count[plan.used_at]
        pairs = np.unique(plan.forms.indices[keep].astype(np.int64) * plan.rows + plan.row_of[plan.used_at[keep]])
        return np.maximum(np.bincount(pairs // plan.rows, minlength=len(self.log_scale)), 1).astype(np.float64)

    def _unit(self, free: Bools, mask: Floats) -> None:
        """Forward sweep: each class normalises the incoming weights that depend on no later class."""
        plan = self.plan
        self.sweeps = 1
        later = free.copy()
        for index, members in enumerate(plan.classes):
            own = members[free[members]]
            if not len(own):
                continue
            later[own] = False
            out = np.zeros(len(free))
            out[own] = 1
            allowed = mask.copy()
            allowed[plan.used @ later.astype(float) > 0] = 0
            allowed[plan.down_used.T @ out > 0] = 0
            count = self.squares.present(allowed)
            target = self._rows(count)
            if not (plan.up_used @ count.astype(float))[own].all():
                self.notes.append("scales whose incoming weights depend on later scales were left as they are")
                continue
            for _ in range(200):
                total = (plan.up @ self.squares.slices(self._factor(allowed), plan.touching[index]))[own]
                zero = total <= NOTHING
                self.dead[own[zero]] = True
                step = np.where(zero, 0.0, np.log(target[own] / np.where(zero, 1.0, total)) / (2 * plan.largest[own]))
                self.log_scale[own] += step
                if abs(step).max(initial=0) <= 4e-15:
                    break
            if self.dead[own].any():
                mask = np.where(plan.used @ self.dead.astype(float) > 0, 0.0, mask)

    def _balance(self, free: Bools, mask: Floats) -> None:
        """Minimise the squared norm over the free scales: cyclic sweeps, then Newton's method.

        The squared norm is a sum of exponentials of linear functions of the scales' logarithms, so it is convex.
        """
        plan = self.plan
        names = self.squares.allowed(mask)
        touching = [[name for name in own if name in names] for own in plan.touching]
        # Slices without norm have no balance: their units stay, and the others are balanced as if these were absent.
        while True:
            slices = self.squares.slices(self._factor(mask), names)
            up, down = plan.up @ slices, plan.down @ slices
            dead = free & ~self.dead & ((up <= NOTHING) | (down <= NOTHING))
            if not dead.any():
                break
            self.dead |= dead
            mask = np.where(plan.used @ self.dead.astype(float) > 0, 0.0, mask)
        active = free & ~self.dead
        if not active.any():
            return

        def gap(log_scale: Floats) -> tuple[float, Floats, Floats, Floats]:
            factor = self._factor(mask, log_scale)
            slices = self.squares.slices(factor, names)
            up, down = plan.up @ slices, plan.down @ slices
            relative = abs(up - down)[active] / (up + down)[active]
            return float(relative.max()), factor, slices, np.where(active, up - down, 0.0)

        def energy(log_scale: Floats) -> float:
            factor = self._factor(mask, log_scale)
            return math.fsum(self._energy_of(name, factor) for name in names)

        indicator = (plan.class_of[:, None] == np.arange(len(plan.classes))).astype(np.float64)
        acting = (plan.used @ indicator).T > 0
        current = energy(self.log_scale)
        for _ in range(30):
            before = self.log_scale.copy()
            for index, members in enumerate(plan.classes):
                own = members[active[members]]
                if len(own):
                    slices = self.squares.slices(self._factor(mask), touching[index], acting[index])
                    up, down = (plan.up @ slices)[own], (plan.down @ slices)[own]
                    self.log_scale[own] += np.log(down / up) / (4 * plan.largest[own])
            self.sweeps += 1
            after = energy(self.log_scale)
            moved = float(abs(self.log_scale - before).max())
            if after > current * (1 + 1e-12):  # scales of one class met in one weight (a shared layer)
                self.log_scale = before
                break
            current = after
            if moved < 1e-3:
                break
        for _ in range(100):
            worst, factor, slices, gradient = gap(self.log_scale)
            if worst <= BALANCED:
                break
            step = self._newton(active, factor, slices, gradient, names)
            self.sweeps += 1
            length = 1.0
            slope = float(2 * gradient @ step)
            for _ in range(40):
                after = energy(self.log_scale + length * step)
                if after <= current * (1 + 4e-16) + 1e-4 * length * slope or abs(length * slope) < 1e-13 * current:
                    break
                length /= 2
            self.log_scale = self.log_scale + length * step
            current = energy(self.log_scale)
            if abs(step).max() < 1e-15 or abs(self.log_scale).max() > 300:
                break
        self.residual = gap(self.log_scale)[0]
        if not self.residual <= 100 * BALANCED:
            self.converged = False
            self.notes.append(
                f"incoming and outgoing norms differ by {self.residual:.1e} (relative): no balanced member was reached"
            )

    def _energy_of(self, name: str, factor: Floats) -> float:
        squares, plan = self.squares, self.plan
        square, sites, axes = squares.squares[name], plan.tensors[name], squares.axes[name]
        if len(sites) == 2 and square.ndim == 2 and len(axes[1]) == 1:
            return float(factor[plan.at(sites[0])] @ (square @ factor[plan.at(sites[1])]))
        return float(squares._scaled(name, factor).sum())

    def _newton(self, active: Bools, factor: Floats, slices: Floats, gradient: Floats, names: Sequence[str]) -> Floats:
        """Solve for Newton's step (of half the energy) by conjugate gradients, preconditioned by the diagonal."""
        plan = self.plan
        diagonal = np.where(active, 2 * (plan.forms.power(2).T @ slices), 1.0)

        def times(v: Floats) -> Floats:
            result = 2 * (plan.forms.T @ self.squares.change(factor, slices, plan.forms @ v, names))
            return np.where(active, result, 0.0)

        x = np.zeros_like(gradient)
        residual = -gradient
        z = residual / diagonal
        direction = z.copy()
        product = float(residual @ z)
        start = product
        for _ in range(500):
            if product <= 1e-16 * start:
                break
            image = times(direction)
            curvature = float(direction @ image)
            if curvature <= 0:
                break
            alpha = product / curvature
            x += alpha * direction
            residual = residual - alpha * image
            z = residual / diagonal
            product, last = float(residual @ z), product
            direction = z + product / last * direction
        return x


class _Gauged:
    """The weights under scales and signs that are found already, one tensor at a time."""

    def __init__(self, symmetry: Symmetry, plan: _Plan, tensors: dict[str, Tensor], log_scale: Floats) -> None:
        self.symmetry, self.plan, self.tensors = symmetry, plan, tensors
        self.scale = np.exp(plan.forms @ log_scale)
        self.sign = np.ones(plan.total)
        self.sites: dict[str, list[Site]] = {}
        for site in plan.sites:
            self.sites.setdefault(site.tensor, []).append(site)

    def spread(self, values: Floats, site: Site, ndim: int) -> Floats:
        """Return a site's values in the shape of its tensor."""
        shape = [1] * ndim
        for axis, size in zip(site.axes, site.shape, strict=True):
            shape[axis] = size
        return values[self.plan.at(site)].reshape(shape)

    def weight(self, name: str) -> Floats:
        """Return a tensor under the scales and signs."""
        value = _array(self.tensors[name])
        for site in self.sites[name]:
            scale = self.spread(self.scale, site, value.ndim)
            if site.kind == "variance":
                value = scale**2 * (value + site.epsilon) - site.epsilon
            elif not (scale == 1).all() or not (self.sign[self.plan.at(site)] == 1).all():
                value = value * (scale * self.spread(self.sign, site, value.ndim))
        return value


def _find_signs(symmetry: Symmetry, plan: _Plan, gauged: _Gauged, notes: list[str]) -> Floats:
    """Choose all signs, class by class in the order of the forward pass; leaves them in `gauged.sign`."""
    structure = symmetry.structure
    forms = structure.signs.tocsr()
    number = forms.shape[1]
    inside = {int(unit) for cell in structure.dense for unit in cell}
    result = np.ones(number)
    pending = np.ones(number, bool)
    classes = []
    taken = np.zeros(number, bool)
    for units, table in zip(structure.types, structure.sign_table, strict=True):
        for column in table.T:
            if int(units[0]) in inside:
                pending[column] = False
                continue
            members = np.unique(column[~taken[column]])
            if len(members):
                taken[members] = True
                classes.append(members)
    classes += [np.array([sign]) for sign in np.flatnonzero(pending & ~taken)]
    by_sign = forms.tocsc()
    by_sign.sort_indices()
    touched = [by_sign.indices[by_sign.indptr[s] : by_sign.indptr[s + 1]] for s in range(number)]
    classes.sort(key=lambda members: int(touched[members[0]][0]))

    def exponents(position: int) -> NDArray[np.int32]:
        own: NDArray[np.int32] = plan.forms.indices[plan.forms.indptr[position] : plan.forms.indptr[position + 1]]
        return own

    def decide(members: Ints, names: Sequence[str]) -> None:
        """Make the largest of the entries positive whose sign depends on one pending sign only."""
        if not names:
            return
        among = np.zeros(number, bool)
        among[members] = True
        unknown = forms @ pending.astype(np.float64)
        largest, votes, cubes, sums, sizes = (np.zeros(number) for _ in range(5))
        rows: list[tuple[Ints, Floats]] = []
        for name in names:
            value = gauged.weight(name)
            for site in plan.tensors[name]:
                if len(site.axes) != 1:
                    continue
                at = plan.at(site)
                single = np.flatnonzero(unknown[at] == 1)
                if not len(single):
                    continue
                block = forms[site.offset + single]
                hits = block.multiply(pending[None, :]).tocsr()
                hits.eliminate_zeros()
                owner = hits.indices.astype(np.int64)
                known = value
                for other in plan.tensors[name]:
                    if other is not site:
                        known = known * (gauged.spread(unknown, other, value.ndim) == 0)
                matrix = np.moveaxis(known, site.axes[0], 0).reshape(site.size, -1)[single]
                keep = among[owner]
                rows.append((owner[keep], matrix[keep]))
        for owner, matrix in rows:
            np.maximum.at(largest, owner, abs(matrix).max(1, initial=0))
        for owner, matrix in rows:
            tied = abs(matrix) >= largest[owner][:, None] * (1 - TIE)
            np.add.at(votes, owner, (np.sign(matrix) * tied).sum(1))
            unit = matrix / np.maximum(largest[owner], NOTHING)[:, None]
            np.add.at(cubes, owner, (unit**3).sum(1))
            np.add.at(sums, owner, unit.sum(1))
            np.add.at(sizes, owner, abs(unit).sum(1))
        for score in (votes, np.where(abs(cubes) > TIE * sizes, cubes, 0), np.where(abs(sums) > TIE * sizes, sums, 0)):
            settled = members[pending[members] & (score[members] != 0) & (largest[members] > 0)]
            result[settled] = np.sign(score[settled])
            pending[settled] = False
        flips = forms @ (result < 0).astype(np.float64)
        gauged.sign = np.where(np.mod(np.rint(flips), 2) == 1, -1.0, 1.0)

    gains: list[tuple[Ints, str]] = []
    for members in classes:
        positions = [p for p in touched[members[0]] if plan.parameter[p]]
        # A gain is a vector that takes the sign, but not the scale of the weights that take it: gamma of a batch norm.
        for position in positions:
            name = plan.sites[plan.site_of[position]].tensor
            vector = gauged.tensors[name].numel() == plan.sites[plan.site_of[position]].size
            if vector and not np.array_equal(exponents(position), exponents(positions[0])):
                gains.append((members, name))
                break
    if gains:
        decide(np.concatenate([members for members, _ in gains]), list(dict.fromkeys(name for _, name in gains)))
    for members in classes:
        if not pending[members].any():
            continue
        # Signs that its gain was waiting for are known by now.
        decide(members, [name for own, name in gains if own is members])
        positions = [p for p in touched[members[0]] if plan.parameter[p]]
        names = list(dict.fromkeys(plan.sites[plan.site_of[p]].tensor for p in positions))
        prefix = names[0].rpartition(".")[0] if names else ""
        decide(members, [name for name in names if name.rpartition(".")[0] == prefix])
    while pending.any():
        left = np.flatnonzero(pending)
        for sign in left:
            names = [plan.sites[plan.site_of[p]].tensor for p in touched[sign] if plan.parameter[p]]
            if names and pending[sign]:
                decide(np.array([sign]), list(dict.fromkeys(names)))
        if int(pending.sum()) == len(left):
            break
    return result


def _refine(rank: Ints, key: Floats, size: Floats | None = None) -> Ints:
    """Split equal ranks by a key, largest first; keys that differ by rounding only stay equal."""
    order = np.lexsort((-key, rank))
    ordered, ranks = key[order], rank[order]
    scale = float(abs(key).max(initial=0)) if size is None else float(size.max(initial=0))
    new = (np.diff(ranks) != 0) | (abs(np.diff(ordered)) > TIE * max(scale, NOTHING))
    result = np.empty_like(rank)
    result[order] = np.r_[0, np.cumsum(new)]
    return result


def _colour(kind: int, number: NDArray[np.int64]) -> Floats:
    """Return reproducible numbers in [0.5, 1.5) for pairs of integers."""
    raw = np.sin(number * 12.9898 + kind * 78.233 + 0.5) * 43758.5453
    result: Floats = 0.5 + (raw - np.floor(raw))
    return result


def _order(symmetry: Symmetry, plan: _Plan, slices: Floats, gauged: _Gauged, notes: list[str]) -> Ints:
    """Sort units within cells, and blocks, by keys that no other permutation changes."""
    structure = symmetry.structure
    inside = {int(unit) for cell in structure.dense for unit in cell}
    joint = _joint_sums(symmetry, plan, slices)
    ranks = [np.zeros(len(units), np.int64) for units in structure.types]
    sortable = [
        index
        for index, units in enumerate(structure.types)
        if structure.movable[index] and len(units) > 1 and int(units[0]) not in inside
    ]

    def tied(index: int) -> bool:
        alone = not any(np.isin(structure.types[index], blocks).any() for blocks in structure.coarse)
        cells = structure.fine[index] * len(ranks[index]) if alone else 0
        return len(np.unique(ranks[index] + cells)) < len(ranks[index])

    for index in sortable:
        columns, units = structure.columns[index], structure.types[index]
        own = slices[columns] * plan.parameter[columns]
        first = plan.first[index]
        ranks[index] = _refine(ranks[index], own[:, first].sum(1))
        ranks[index] = _refine(ranks[index], own[:, ~first].sum(1) + joint[units])
        for column in range(columns.shape[1]):
            if not tied(index):
                break
            ranks[index] = _refine(ranks[index], own[:, column])
    left = [index for index in sortable if tied(index)]
    for powers in (3, 1):
        for index in left:
            _by_entries(symmetry, plan, gauged, ranks, index, powers, coloured=False)
    for _ in range(3):
        left = [index for index in left if tied(index)]
        for index in left:
            _by_entries(symmetry, plan, gauged, ranks, index, 1, coloured=True)
    for index in left:
        if tied(index):
            notes.append(f"units of {symmetry.groups[index].name} that no key tells apart keep their order")

    permutation = np.arange(symmetry.units)
    for index in sortable:
        units, cells = structure.types[index], structure.fine[index]
        start = np.lexsort((np.arange(len(units)), cells))
        permutation[units[start]] = units[np.lexsort((np.arange(len(units)), ranks[index], cells))]
    rank_of = np.zeros(symmetry.units, np.int64)
    for index, units in enumerate(structure.types):
        rank_of[units] = ranks[index]
    for blocks in structure.coarse:
        keys = rank_of[permutation[blocks]]
        order = np.lexsort(keys.T[::-1])
        within = permutation.copy()
        permutation[blocks] = within[blocks[order]]
    return permutation


def _by_entries(
    symmetry: Symmetry, plan: _Plan, gauged: _Gauged, ranks: list[Ints], index: int, power: int, *, coloured: bool
) -> None:
    """Refine the ranks of one type by sums over the entries of each unit's slices.

    Coloured, an entry's weight in the sum depends on where it stands on the other axes: on the position if its unit is
    fixed, and on the rank of its unit otherwise.
    """
    structure = symmetry.structure
    columns = structure.columns[index]
    colour = np.ones(plan.total)
    if coloured:
        for number, site in enumerate(plan.sites):
            colour[plan.at(site)] = _colour(number, np.arange(site.size))
        for kind in range(len(structure.types)):
            if structure.movable[kind]:
                for place, positions in enumerate(structure.columns[kind].T):
                    colour[positions] = _colour(1000 + 37 * kind + place, ranks[kind])
    names = dict.fromkeys(plan.sites[plan.site_of[p]].tensor for p in columns[0])
    for name in names:
        value = gauged.weight(name) ** power
        for site in gauged.sites[name]:
            mine = [c for c in range(columns.shape[1]) if plan.sites[plan.site_of[columns[0, c]]] is site]
            if not mine:
                continue
            weight = value
            for other in gauged.sites[name]:
                if other is not site and len(other.axes) == 1:
                    weight = weight * gauged.spread(colour, other, value.ndim)
            sums = np.moveaxis(weight, site.axes[0], 0).reshape(site.size, -1)
            total, size = sums.sum(1), abs(sums).sum(1)
            for column in mine:
                at = columns[:, column] - site.offset
                ranks[index] = _refine(ranks[index], total[at], size[at])


def canonicalize(
    symmetry: Symmetry,
    network: nn.Module,
    *,
    scales: Literal["balanced", "unit"] | None = "balanced",
    signs: bool = True,
    order: bool = True,
    inplace: bool = False,
) -> CanonicalForm:
    r"""Return the canonical member of a network's orbit: the same function, the same weights for every member.

    **Scales** (spec 4.2). A scale that only multiplies weights (the one in front of a batch norm) has no member of
    smallest norm; the weights that it multiplies get squared norm 1 (or their number, if it acts on the rows of several
    modules, as does the scale of a residual stream on all its last batch norms). Weights that are normalised that way
    are constant, so that a scale that otherwise only divides such weights is one-sided, too: hence
    :math:`\gamma_c^2 + \beta_c^2 = 1`. The rule follows from the exponents alone. Biases before a batch norm are 0. The
    scales that are left, which multiply some weights and divide others, take

    - ``"balanced"``: the values of smallest L2 norm: incoming and outgoing norms are equal. The squared norm is a
      convex function of the logarithms; cyclic sweeps with the factor :math:`(q_- / q_+)^{1/4}`, then Newton's method.
    - ``"unit"``: incoming weights and bias of norm 1, layer by layer; for a residual stream those of the first module
      that writes into it.

    **Signs.** The gain of a norm layer is positive. Otherwise the entry of largest magnitude among the incoming weights
    and bias is positive; if the largest ones tie and disagree, the sum of the cubes is, then the plain sum.

    **Order** (spec 4.3). Within its cell, by falling norm of the incoming weights; ties by the norm of all other
    weights, then by each tensor's norm, sums of cubes and sums of entries, and sums weighted by the place of the units
    on the other side. Units that are alike in all of these keep their order, with a note unless they are exact copies.

    Args:
        symmetry: Of the network's architecture.
        network: Not changed unless ``inplace``.
        scales: The gauge of the scales. None leaves scales and biases before batch norms as they are.
        signs: Whether to fix signs.
        order: Whether to sort units and blocks.
        inplace: Whether to change the network itself.

    Returns:
        The canonical form. Computed in float64, stored in the network's dtype.

    Raises:
        ValueError: If ``scales`` is unknown, the network has another structure than the traced one, or a weight is not
            finite.

    Note:
        Units whose incoming or outgoing weights are all zero are dead: their scale stays, other scales are found as if
        they were absent, and `CanonicalForm.dead` reports them. For them alone the form depends on the orbit's member.
        Cells on which any invertible matrix acts (`AxisGroup.dense`) stay as they are, with a note. Sorting is not
        continuous: near networks may have far canonical forms (spec 4.4).

    Example:
        >>> from lightning_sym.symmetry.tracing import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        >>> symmetry = trace_symmetry(network, torch.randn(2, 5))
        >>> other = symmetry.act(symmetry.sample(), network)
        >>> one, two = (canonicalize(symmetry, member).network for member in (network, other))
        >>> torch.allclose(one[0].weight, two[0].weight, rtol=0, atol=1e-12)
        True
    """
    if scales not in ("balanced", "unit", None):
        raise ValueError(f"scales must be 'balanced', 'unit' or None, got {scales!r}.")
    symmetry.require(network)
    tensors = state_tensors(network)
    plan = _plan(symmetry)
    squares = _Squares(plan, tensors)
    for name, tensor in tensors.items():
        # Summing the squares is cheaper for large tensors than looking at every entry again.
        seen = squares.squares.get(name)
        finite = bool(torch.isfinite(tensor).all()) if seen is None else math.isfinite(float(seen.sum()))
        if not finite:
            raise ValueError(
                f"{name} holds values that are not finite; expected a network whose weights are all finite."
            )
    structure = symmetry.structure
    notes: list[str] = []
    identity = symmetry.identity()
    log_scale = np.zeros(symmetry.scales)
    sweeps, residual, converged = 0, 0.0, True
    dead_scales = np.zeros(symmetry.scales, bool)
    if scales is not None and symmetry.scales:
        found = _Scales(symmetry, plan, squares, scales)
        log_scale, dead_scales = found.log_scale, found.dead
        notes += found.notes
        sweeps, residual, converged = found.sweeps, found.residual, found.converged
    gauged = _Gauged(symmetry, plan, tensors, log_scale)
    slices = squares.slices(gauged.scale**2)
    dead = _dead_units(symmetry, plan, slices, dead_scales)
    sign = _find_signs(symmetry, plan, gauged, notes) if signs and symmetry.signs else identity.sign.numpy()
    shift = list(identity.shift)
    if scales is not None:
        for index, (bias, _, _) in enumerate(structure.shifts):
            shift[index] = torch.from_numpy(-gauged.weight(structure.sites[bias].tensor).ravel())
    permutation = identity.permutation.numpy()
    if order:
        # Biases before batch norms are zero by now, and the running means have moved with them.
        for (bias, mean, _), by in zip(structure.shifts, shift, strict=True):
            if scales is not None:
                gauged.tensors = {
                    **gauged.tensors,
                    structure.sites[bias].tensor: torch.zeros_like(by),
                    structure.sites[mean].tensor: _moved_mean(gauged, structure.sites[mean], by),
                }
        permutation = _order(symmetry, plan, slices, gauged, notes)
    if structure.dense:
        notes.append(
            f"{len(structure.dense)} cells on which invertible matrices act stay as they are: the form is canonical up "
            "to these matrices only"
        )
    element = Element(
        symmetry.fingerprint,
        torch.from_numpy(permutation.copy()),
        torch.from_numpy(log_scale),
        torch.from_numpy(np.asarray(sign, np.float64).copy()),
        identity.dense,
        tuple(shift),
    )
    result = symmetry.act(element, network, inplace=inplace)
    return CanonicalForm(result, element, dead, sweeps, residual, converged, tuple(dict.fromkeys(notes)))


def _moved_mean(gauged: _Gauged, mean: Site, by: Tensor) -> Tensor:
    """Return a running mean that, under the gauge's scale and sign, equals the scaled one plus the shift."""
    at = gauged.plan.at(mean)
    factor = torch.from_numpy(gauged.scale[at] * gauged.sign[at])
    return gauged.tensors[mean.tensor].detach().to("cpu", torch.float64) + by / factor


def _dead_units(symmetry: Symmetry, plan: _Plan, slices: Floats, dead_scales: Bools) -> dict[str, Tensor]:
    """Return for each axis group which units are dead, where any are."""
    result = {}
    for index, (name, found) in enumerate(_balances(symmetry, plan, slices)):
        table = symmetry.structure.scale_table[index]
        if table.shape[1]:
            units = dead_scales[table].any(1)
        elif found.dead:
            units = ((found.incoming <= NOTHING) | (found.outgoing <= NOTHING)).numpy()
        else:
            continue
        if units.any():
            result[name] = torch.from_numpy(units)
    return result
