"""Gauges of the scales: balanced (least squared norm) or unit incoming norms; normalised where neither exists."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import scipy  # its parts are imported on first use
from scipy import sparse
from torch import Tensor

from lightning_sym.symmetry.arrays import Bools, Floats, Ints, rising
from lightning_sym.symmetry.group.norms import NOTHING, Plan, Squares
from lightning_sym.symmetry.solving.structure import Slot, Structure

# Largest relative gradient, (incoming - outgoing) / (incoming + outgoing), of balanced norms.
_BALANCED = 1e-13
# Normalising ends once no logarithm moves by more than the first; below the second it has converged.
_STILL, _NORMALISED = 4e-15, 1e-12
_FALLS = 1e-7  # least rate of a direction along which the squared norm falls for ever
_NEAR = 3e-2  # largest change of a logarithm in the last sweep, before the first step of Newton's method
_ACCURATE, _LOOSE = 1e-8, 1e-2  # least and largest relative residual of the equations of a step of Newton's method
_RIDGE = 1e-10  # relative to the diagonal, for directions that scale nothing


class ScaleGauge:
    """Finds the scales that bring a network to a gauge; see `canonicalize`.

    Args:
        plan: The plan of the group.
        squares: Squared norms of the network.
        gauge: "balanced" or "unit"; None leaves all scales unchanged.
        held: Logarithms known beforehand, nan elsewhere. Shape (generators,).
        variances: For "balanced": logarithms that give the running variances they move, plus epsilon, the geometric
            mean 1; nan for scales that move none. Shape (generators,).

    Attributes:
        log_scale: Natural logarithms of the scales. Shape (generators,).
        dead: Mask of generators that stay, as all weights that they multiply, or divide, are zero. Shape (generators,).
        movable: The dead ones that change weights: there, networks of one orbit may differ after balancing.
        notes: Notes on missed tolerances.
        sweeps: Number of passes over all generators.
        residual: Largest relative difference between incoming and outgoing norms after balancing.
        converged: Whether all tolerances were reached.
    """

    def __init__(self, plan: Plan, squares: Squares, gauge: str | None, held: Floats, variances: Floats) -> None:
        self.plan, self.squares, count = plan, squares, len(plan.class_of)
        self.log_scale = np.zeros(count)
        known = ~np.isnan(held)
        self.sought = (plan.class_of >= 0) & ~known
        self.dead, self.movable = np.zeros(count, bool), np.zeros(count, bool)
        self.notes: list[str] = []
        self.sweeps, self.residual, self.converged = 0, 0.0, True
        self._level: Callable[[Floats], Floats] | None = None
        if gauge is None or not count:
            return
        self.log_scale[known] = held[known]
        levels, free = self._levels()
        # Variances would tend to -epsilon along with weights that several scales only multiply together.
        while gauge == "balanced" and (joint := self._jointly(free, levels) & ~np.isnan(variances)).any():
            self.log_scale[joint] = variances[joint]
            self.sought &= ~joint
            levels, free = self._levels()
        if free.any():
            (self._balance if gauge == "balanced" else self._unit)(free, self._without(*levels))
        for index in reversed(range(len(levels))):
            self._normalise(levels[index], self._without(*levels[:index]))

    def _without(self, *generators: Bools) -> Floats:
        """Return a mask of the parameter positions without these generators and without dead ones."""
        out = np.any([self.dead, *generators], axis=0)
        return np.where(self.plan.used @ out.astype(np.float64) > 0, 0.0, self.plan.parameter)

    def _levels(self) -> tuple[list[Bools], Bools]:
        """Find generators that only multiply (or only divide) the remaining weights: they have no minimum.

        Fixing the norms of such weights makes them constants, which may make other scales one-sided. In a network with
        batch norm, the scale before it comes first: it multiplies rows. Once these rows are constants, the previous
        layer's scale no longer divides anything, and only multiplies its gamma and beta.

        Returns:
            Masks of the generators of each level, and of the other ones, which act on both sides. Each of shape
            (generators,).
        """
        plan = self.plan
        levels: list[Bools] = []
        while True:
            count = self.squares.present(self._without(*levels)).astype(np.float64)
            up, down = plan.up_used @ count > 0, plan.down_used @ count > 0
            peel = self.sought & (up != down)
            if not peel.any():
                return levels, self.sought & up & down
            levels.append(peel)  # from now on they act on neither side of anything

    def _jointly(self, free: Bools, levels: Sequence[Bools] = ()) -> Bools:
        """Find scales through running variances that multiply weights, and divide none, together with other scales.

        The squared norm is a sum of exponentials of linear functions of the logarithms. It has no minimum exactly if
        along some direction no exponent rises and one falls; a linear program finds it. The units of a class play the
        same role, so that a direction exists with one rate per class.

        Args:
            free: Mask of the scales that may change. Shape (generators,).
            levels: Masks of the scales whose weights do not count.

        Returns:
            Shape (generators,).
        """
        plan, found = self.plan, np.zeros(len(free), bool)
        moving = through_variances(plan.structure) & free
        if not moving.any():
            return found
        of, mask = np.where(free, plan.class_of, -1), self._without(*levels)
        classes, own = rising(of[of >= 0]), np.flatnonzero(of >= 0)
        member = sparse.csr_matrix(
            (np.ones(len(own)), (own, np.searchsorted(classes, of[own]))), (len(of), len(classes))
        )
        rows = {
            tuple(np.sum(parts, axis=0).tolist())
            for name in self.squares.allowed(mask)
            for parts in itertools.product(*(_patterns(plan, slot, mask, member) for slot in plan.tensors[name]))
        }
        if not rows:
            return found
        table, count = np.array(sorted(rows)), len(rows)
        bounds = [(-1.0, 1.0)] * len(classes) + [(0.0, 1.0)] * count
        falling = np.concatenate([np.zeros(len(classes)), -np.ones(count)])
        solved = scipy.optimize.linprog(falling, np.hstack([table, np.eye(count)]), np.zeros(count), bounds=bounds)
        if -solved.fun > _FALLS:
            found[moving] = np.isin(of[moving], classes[np.abs(solved.x[: len(classes)]) > _FALLS])
        return found

    def _factor(self, mask: Floats, log_scale: Floats | None = None) -> Floats:
        """Return the factors that scales (by default the current ones) put on the squares at each position."""
        exponents = self.plan.forms @ (self.log_scale if log_scale is None else log_scale)
        result: Floats = mask * np.exp(2 * exponents)
        return result

    def _sides(self, mask: Floats, names: Collection[str]) -> tuple[Floats, Floats]:
        """Return each generator's squared norms of the weights it multiplies and divides, times the exponents."""
        slices = self.squares.slices(self._factor(mask), names)
        return self.plan.up @ slices, self.plan.down @ slices

    def _sides_of(self, index: int, own: Ints, mask: Floats, names: Collection[str]) -> tuple[Floats, Floats]:
        """Return the same for some generators of one class, from the tensors that it acts on."""
        plan, part = self.plan, self.plan.parts[index]
        factor, rows = np.zeros(plan.total), np.searchsorted(plan.classes[index], own)
        factor[part.at] = mask[part.at] * np.exp(2 * (part.forms @ self.log_scale))
        touching = [name for name in plan.touching[index] if name in names]
        slices = self.squares.slices(factor, touching, part.slots)
        return (part.up @ slices)[rows], (part.down @ slices)[rows]

    def _rescale(self, own: Ints, sides: tuple[Floats, Floats], target: Floats) -> float:
        """Scale generators' slices to target squared norms, and mark generators with zero slices as dead.

        Args:
            own: Indices of the generators.
            sides: Squared norms that these multiply and divide. Each of shape (own,).
            target: Target squared norms. Shape (generators,).

        Returns:
            The largest change of a logarithm.
        """
        zero = sum(sides) <= NOTHING
        self.dead[own[zero]] = True
        own, (up, down) = own[~zero], (side[~zero] for side in sides)
        step = np.log(target[own] / (up + down)) / (2 * self.plan.largest[own])
        self.log_scale[own] += np.where(up > 0, step, -step)
        return float(abs(step).max(initial=0))

    def _check(self, change: float, note: str) -> None:
        if change > _NORMALISED:
            self.converged = False
            self.notes.append(note.format(change))

    def _normalise(self, among: Bools, mask: Floats) -> None:
        """Scale each generator's slices to squared norm n, the number of slices (rows of one module count once)."""
        plan = self.plan
        count = self.squares.present(mask)
        target = self._rows(count)
        allowed = self.squares.allowed(mask)
        interacting = self._interact(among, count)
        groups = plan.classes if interacting else [np.flatnonzero(among)]
        for sweep in range(2000 if interacting else 1):
            worst = 0.0
            for index, members in enumerate(groups):
                own = members[among[members] & ~self.dead[members]]
                if not len(own):
                    continue
                if interacting:
                    sides = self._sides_of(index, own, mask, allowed)
                else:
                    sides = tuple(side[own] for side in self._sides(mask, allowed))
                worst = max(worst, self._rescale(own, sides, target))
                if self.dead[own].any():
                    mask = mask * self._without()
                    worst = 1.0
            self.sweeps = max(self.sweeps, sweep + 1)
            if worst <= _STILL:
                break
        if interacting:
            self._check(worst, "scales with one-sided slices were normalised to {:.1e} only")

    def _interact(self, among: Bools, count: Bools) -> bool:
        """Return whether two of the generators act on one weight, or one acts with several exponents."""
        plan = self.plan
        acting = plan.used @ among.astype(np.float64) * count
        if (acting > 1).any():
            return True
        for slots in plan.tensors.values():
            if sum(bool(acting[slot.rows].any()) for slot in slots) > 1:
                return True
        block = plan.forms[np.flatnonzero(acting)]
        return bool((abs(block.data) != plan.largest[block.indices])[among[block.indices]].any())

    def _rows(self, count: Bools) -> Floats:
        """Return the number of rows that each generator acts on; equal positions in one module count once."""
        plan = self.plan
        keep = count[plan.used_at]
        pairs = rising(plan.forms.indices[keep].astype(np.int64) * plan.rows + plan.row_of[plan.used_at[keep]])
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
            divided = plan.down_used[own].sum(0).A1 > 0
            allowed = np.where(divided | (plan.used @ later.astype(np.float64) > 0), 0.0, mask)
            count = self.squares.present(allowed)
            target = self._rows(count)
            if not (plan.up_used @ count.astype(np.float64))[own].all():
                self.converged = False
                self.notes.append("scales were left unchanged where incoming weights depend on later scales")
                continue
            for _ in range(200):
                worst = self._rescale(own, self._sides_of(index, own, allowed, plan.touching[index]), target)
                if worst <= _STILL:
                    break
            self._check(worst, "incoming weights were normalised to {:.1e} only")
            mask = mask * self._without()

    def _balance(self, free: Bools, mask: Floats) -> None:
        """Minimise the squared norm over the free generators: cyclic sweeps, then Newton's method.

        The squared norm is a sum of exponentials of linear functions of the logarithms, hence convex.
        """
        names = self.squares.allowed(mask)
        mask = self._bury(free, mask, names)
        active = free & ~self.dead
        if active.any():
            self._sweep(active, mask, names)
            self._descend(active, mask, names)

    def _bury(self, free: Bools, mask: Floats, names: Collection[str]) -> Floats:
        """Mark free generators with zero slices as dead, and return the mask without their positions.

        Zero slices have no balance: their units stay unchanged, and the others are balanced as if these were absent.
        """
        while True:
            up, down = self._sides(mask, names)
            dead = free & ~self.dead & ((up <= NOTHING) | (down <= NOTHING))
            if not dead.any():
                return mask
            self.dead |= dead
            self.movable |= dead & ((up > NOTHING) | (down > NOTHING))
            mask = mask * self._without()

    def _energy(self, log_scale: Floats, mask: Floats, names: Collection[str]) -> float:
        return self.squares.energy(self._factor(mask, log_scale), names)

    def _sweep(self, active: Bools, mask: Floats, names: Collection[str]) -> None:
        """Balance one class after another, while the squared norm falls."""
        plan = self.plan
        current = self._energy(self.log_scale, mask, names)
        for _ in range(30):
            before = self.log_scale.copy()
            for index, members in enumerate(plan.classes):
                own = members[active[members]]
                if len(own):
                    up, down = self._sides_of(index, own, mask, names)
                    self.log_scale[own] += np.log(down / up) / (4 * plan.largest[own])
            self.sweeps += 1
            after = self._energy(self.log_scale, mask, names)
            moved = float(abs(self.log_scale - before).max())
            if after > current * (1 + 1e-12):  # scales of one class act on a common weight (a shared layer)
                self.log_scale = before
                break
            current = after
            if moved < _NEAR:
                break

    def _descend(self, active: Bools, mask: Floats, names: Collection[str]) -> None:
        """Take Newton steps with backtracking until all norms are balanced."""
        current = self._energy(self.log_scale, mask, names)
        for _ in range(100):
            factor, slices, gradient = self._gradient(active, mask, names)
            if self.residual <= _BALANCED:
                break
            step = self._newton(active, factor, slices, gradient, names)
            self.sweeps += 1
            length = 1.0
            slope = float(2 * gradient @ step)
            for _ in range(40):
                after = self._energy(self.log_scale + length * step, mask, names)
                if after <= current * (1 + 4e-16) + 1e-4 * length * slope or abs(length * slope) < 1e-13 * current:
                    break
                length /= 2
            self.log_scale = self.log_scale + length * step
            current = self._energy(self.log_scale, mask, names)
            if abs(step).max() < 1e-15 or abs(self.log_scale).max() > 300:
                self._gradient(active, mask, names)
                break
        if not self.residual <= 100 * _BALANCED:
            self.converged = False
            self.notes.append(
                f"incoming and outgoing norms differ by {self.residual:.1e} (relative): no balanced representative was "
                "reached"
            )

    def _gradient(self, active: Bools, mask: Floats, names: Collection[str]) -> tuple[Floats, Floats, Floats]:
        """Return the factors, the slices, and the gradient of half the energy; update the residual."""
        factor = self._factor(mask)
        slices = self.squares.slices(factor, names)
        up, down = self.plan.up @ slices, self.plan.down @ slices
        self.residual = float((abs(up - down)[active] / (up + down)[active]).max())
        return factor, slices, np.where(active, up - down, 0.0)

    def _newton(
        self, active: Bools, factor: Floats, slices: Floats, gradient: Floats, names: Collection[str]
    ) -> Floats:
        """Solve for the Newton step (of half the energy) by conjugate gradients, preconditioned at two levels."""
        forms, back = self.plan.forms, self.plan.forms.T

        diagonal = np.where(active, 2 * (forms.power(2).T @ slices), 1.0)

        def times(v: Floats) -> Floats:
            changed = 2 * (back @ self.squares.change(factor, slices, forms @ v, names))
            return np.where(active, changed + _RIDGE * diagonal * v, 0.0)  # some scales undo one another

        coarse = self._level or self._coarse(active, factor, slices, names)

        def precondition(v: Floats) -> Floats:
            return v / diagonal + coarse(v)

        from scipy.sparse import linalg  # slow to import

        shape = len(active), len(active)
        hessian, inverse = (linalg.LinearOperator(shape, own, dtype=np.float64) for own in (times, precondition))
        # A step squares the residual: a more accurate one, or one far below the tolerance, would cost more for nothing.
        accuracy = max(min(max(self.residual, _BALANCED / (10 * self.residual)), _LOOSE), _ACCURATE)
        step: Floats = linalg.cg(hessian, -gradient, rtol=accuracy, maxiter=500, M=inverse)[0]
        self._level = coarse if abs(step).max() < 1 else None  # as good for the next step, if this one is short
        return step

    def _coarse(
        self, active: Bools, factor: Floats, slices: Floats, names: Collection[str]
    ) -> Callable[[Floats], Floats]:
        """Return the inverse of the Hessian restricted to common scales of whole classes.

        Common scales propagate from layer to layer: without this preconditioner, conjugate gradients need as many steps
        as the network has layers.
        """
        plan = self.plan
        of = np.where(active, plan.class_of, -1)
        found, own = rising(of[of >= 0]), np.flatnonzero(active)
        if 2 * len(found) > len(own):  # for classes of few units the diagonal suffices
            return np.zeros_like
        place = own, np.searchsorted(found, of[own])
        member = sparse.csr_matrix((np.ones(len(own)), place), (len(active), len(found)))
        columns = []
        for index in found:
            part, speed = plan.parts[index], np.zeros(plan.total)
            speed[part.at] = part.forms @ (of == index)
            touching = [name for name in plan.touching[index] if name in names]
            change = self.squares.change(factor, slices, speed, touching)[part.at]
            columns.append(sparse.csc_matrix(2 * (member.T @ (part.forms.T @ change))[:, None]))
        from scipy.sparse.linalg import splu  # slow to import

        matrix = sparse.hstack(columns, format="csc")
        solve = splu((matrix + sparse.diags(_RIDGE * matrix.diagonal())).tocsc()).solve
        return lambda v: member @ solve(member.T @ v)


def _patterns(plan: Plan, slot: Slot, mask: Floats, member: sparse.csr_matrix) -> list[Floats]:
    """Return the different exponents of classes at the positions of a slot that count. Each of shape (classes,)."""
    places = np.flatnonzero(mask[slot.rows] > 0) + slot.offset
    return list(np.unique((plan.forms[places] @ member).toarray(), axis=0))


def through_variances(structure: Structure) -> Bools:
    """Return a mask of the scales that running variances move with. Shape (generators,)."""
    found = np.zeros(structure.magnitudes.shape[1], bool)
    for slot in structure.slots:
        if slot.kind == "variance":
            found[structure.magnitudes[slot.rows].indices] = True
    return found


def variance_scales(structure: Structure, tensors: Mapping[str, Tensor]) -> Floats:
    """Return the logarithms of scales that give running variances plus epsilon the geometric mean 1.

    Args:
        structure: The group.
        tensors: Parameters and buffers, by name.

    Returns:
        Shape (generators,); nan for scales that move none, or one that is not positive.
    """
    total, weight = np.zeros((2, structure.magnitudes.shape[1]))
    for slot in structure.slots:
        if slot.kind == "variance":
            values = tensors[slot.tensor].detach().double().cpu().numpy().ravel() + slot.epsilon
            entries = structure.magnitudes[slot.rows].tocoo()
            with np.errstate(divide="ignore", invalid="ignore"):
                np.add.at(total, entries.col, entries.data * np.log(values[entries.row]) / 2)
            np.add.at(weight, entries.col, entries.data**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = -total / weight
    found: Floats = np.where(np.isfinite(logs), logs, np.nan)
    return found


def _at_rest(plan: Plan, squares: Squares) -> ScaleGauge:
    """Return a gauge that leaves all scales unchanged."""
    unknown = np.full(len(plan.class_of), np.nan)
    return ScaleGauge(plan, squares, None, unknown, unknown)


def one_sided(plan: Plan, squares: Squares) -> Bools:
    """Return a mask of the scales along which a norm of the weights has no minimum.

    These only multiply, or only divide, weights; or running variances move with them, and they only multiply weights
    together with other scales.

    Args:
        plan: The plan of the group.
        squares: Squared norms of the network.

    Returns:
        Shape (generators,).
    """
    gauge = _at_rest(plan, squares)
    levels, _ = gauge._levels()
    found = levels[0].copy() if levels else np.zeros(len(plan.class_of), bool)
    while (joint := gauge._jointly(gauge.sought & ~found)).any():
        found |= joint
    return found


def without_balance(plan: Plan, squares: Squares) -> Bools:
    """Return a mask of the scales of dead units, which balancing leaves unchanged; arguments as of `one_sided`."""
    gauge = _at_rest(plan, squares)
    levels, free = gauge._levels()
    mask = gauge._without(*levels)
    gauge._bury(free & ~gauge._jointly(free, levels), mask, squares.allowed(mask))
    return gauge.movable
