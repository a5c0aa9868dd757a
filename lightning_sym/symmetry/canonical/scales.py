"""The scales of a gauge: balanced (least squared norm), or unit incoming norms; and norms where neither exists."""

from collections.abc import Sequence

import numpy as np

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.norms import NOTHING, Bools, Floats, Ints, Plan, Squares

# Largest relative gradient, (incoming - outgoing) / (incoming + outgoing), at which norms count as balanced.
_BALANCED = 1e-13


class Scales:
    """Finds the scales of a gauge: see `canonicalize`.

    Args:
        symmetry: Symmetry of the network.
        plan: The symmetry's.
        squares: The network's.
        gauge: "balanced" or "unit".

    Attributes:
        log_scale: What was found. Shape (scales,).
        dead: Scales that stay because what they multiply, or what they divide, is zero. Shape (scales,).
        notes: What was not reached.
        sweeps: Passes over all scales.
        residual: Largest relative difference of incoming and outgoing norms that balancing left.
        converged: Whether all was reached.
    """

    def __init__(self, symmetry: Symmetry, plan: Plan, squares: Squares, gauge: str) -> None:
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
        """Return by what the scales (those found so far) multiply the squares at each position."""
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
        for slots in plan.tensors.values():
            if sum(bool(acting[plan.at(slot)].any()) for slot in slots) > 1:
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
                self.converged = False
                self.notes.append("scales whose incoming weights depend on later scales were left as they are")
                continue
            worst = 0.0
            for _ in range(200):
                total = (plan.up @ self.squares.slices(self._factor(allowed), plan.touching[index]))[own]
                zero = total <= NOTHING
                self.dead[own[zero]] = True
                step = np.where(zero, 0.0, np.log(target[own] / np.where(zero, 1.0, total)) / (2 * plan.largest[own]))
                self.log_scale[own] += step
                worst = float(abs(step).max(initial=0))
                if worst <= 4e-15:
                    break
            if worst > 1e-12:
                self.converged = False
                self.notes.append(f"incoming weights were normalised to {worst:.1e} only")
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
            return self.squares.energy(self._factor(mask, log_scale), names)

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
            if worst <= _BALANCED:
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
        if not self.residual <= 100 * _BALANCED:
            self.converged = False
            self.notes.append(
                f"incoming and outgoing norms differ by {self.residual:.1e} (relative): no balanced member was reached"
            )

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
