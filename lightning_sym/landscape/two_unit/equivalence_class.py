r"""The equivalence class of :math:`\phi(x) = c\,\mathrm{relu}(a x) + d\,\mathrm{relu}(b x)`, exactly."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_sym.landscape.planes import WeightPlane
from lightning_sym.landscape.two_unit.loss import Moments, slopes, split_weights, target_slopes

Kind = Literal["mixed", "same_sign", "zero"]
_FLAT = 1e-9  # curvatures and slopes below this are zero: planes are known to about 1e-12


class PlaneQuadric:
    r"""The surface :math:`f = ca + db = \text{level}` in a 3-plane, clipped to inputs of one sign.

    In coordinates y along :attr:`axes` from :attr:`centre`, :math:`f = f_0 + (-y_1^2 + s y_2^2 + y_3^2) / 2` for every
    3-plane, by interlacing with the eigenvalues -1, -1, 1, 1 of the form on R^4. So the surface is a hyperboloid of one
    sheet, with a throat around the centre, or of two, or a cone if the level is :math:`f_0`.

    Args:
        plane: Plane of dimension 3 in R^4, with orthonormal basis.
        level: p* for a, b > 0; -q* for a, b < 0.
        moment: The second moment of the inputs on that side.
        sign: Sign of a and b: 1 or -1.

    Attributes:
        level: As given.
        moment: As given.
        sign: As given.
        eigenvalues: -1, s, 1. Shape ``[3]``, float64.
        axes: Their directions in coefficients, as columns. Shape ``[3, 3]``, float64.
        centre: Coefficients of the critical point of f. Shape ``[3]``, float64. NaN if there is none, as happens for
            s = 0.
        throat: f0, the value of f there. NaN if there is none.
        sheets: 1 or 2, before clipping. A cone counts as 1.
        centre_inside: Whether a and b have the right signs at the centre; only then does the picture change at
            :attr:`closing_epsilon`.

    Raises:
        ValueError: If the plane is not of dimension 3 in R^4.
    """

    def __init__(self, plane: WeightPlane, level: float, moment: float, sign: int) -> None:
        origin, basis = (t.detach().double().cpu() for t in (plane.centre, plane.basis))
        if basis.shape != (4, 3):
            raise ValueError(f"plane must be of dimension 3 in R^4, got a basis of shape {[*basis.shape]}.")
        self.level, self.moment, self.sign = level, moment, sign
        swapped = basis.roll(2, 0)  # S Q for the form f = theta^T S theta / 2: (a, b) and (c, d) exchanged
        self.eigenvalues, self.axes = torch.linalg.eigh(basis.T @ swapped)
        slope = self.axes.T @ (swapped.T @ origin)
        at_origin = float(origin[:2] @ origin[2:])
        curved = self.eigenvalues.abs() > _FLAT
        offset = torch.where(curved, -slope / torch.where(curved, self.eigenvalues, 1.0), 0.0)
        if bool((curved | (slope.abs() <= _FLAT)).all()):
            self.throat = at_origin + float(slope @ offset) / 2
        else:  # a saddle surface that runs on for ever along the second axis
            offset, self.throat = torch.full_like(offset, math.nan), math.nan
        self.centre = self.axes @ offset
        a, b = (origin + basis @ self.centre)[:2].tolist()
        self.centre_inside = sign * a >= 0 and sign * b >= 0
        height = level - self.throat
        # s = 0 with a centre: two walls, unless they cross at it
        two = height != 0 if not curved[1] else height * self.s < 0
        self.sheets = 2 if two and not math.isnan(height) else 1

    @property
    def s(self) -> float:
        """The middle eigenvalue, in [-1, 1]."""
        return float(self.eigenvalues[1])

    @property
    def closing_epsilon(self) -> float:
        """The epsilon at which ``{J < eps}`` swallows the centre: the throat fills, or two sheets touch. May be NaN."""
        return self.moment * (self.throat - self.level) ** 2


class TwoUnitClass:
    """All weights (a, b, c, d) that compute the target's function, exactly.

    Mixed targets have two slopes that are not 0: one unit carries each of them, and the class is two surfaces in R^4.
    Same-sign targets have one: the class is three-dimensional, with flanges of dimension 2 where one unit is dead.

    Args:
        target: Slopes (p*, q*), shape ``[2]``, or weights, shape ``[4]``. A slope counts as 0 where it is exactly 0.
        moments: Moments of the sample; those of N(0, 1) by default.

    Attributes:
        target: The slopes. Shape ``[2]``, float64.
        moments: As given.
        weights: The target's weights, shape ``[4]``, float64; None if it was given by slopes.

    Raises:
        ValueError: If ``target`` has another shape or is not finite.

    Example:
        >>> mixed = TwoUnitClass((0.56, 0.3))
        >>> mixed.kind, mixed.dimension, mixed.components, round(mixed.barrier, 12)
        ('mixed', 2, 2, 0.045)
    """

    def __init__(self, target: Tensor | Sequence[float], moments: Moments | None = None) -> None:
        if len(target) not in {2, 4}:
            raise ValueError(f"target must be slopes (p, q) or weights (a, b, c, d), got {len(target)} numbers.")
        self.target = target_slopes(target).cpu()
        self.moments = moments or Moments()
        self.weights = torch.as_tensor(target, dtype=torch.float64).detach().cpu() if len(target) == 4 else None
        self._p, self._q = (float(slope) for slope in self.target)

    @property
    def kind(self) -> Kind:
        """``"mixed"``, ``"same_sign"`` or ``"zero"``: two, one or no slopes that are not 0."""
        kinds: tuple[Kind, ...] = ("zero", "same_sign", "mixed")
        return kinds[int(self._p != 0) + int(self._q != 0)]

    @property
    def dimension(self) -> int:
        """Largest dimension of a piece of the class: 2 if mixed, otherwise 3."""
        return 2 if self.kind == "mixed" else 3

    @property
    def components(self) -> int:
        """Number of connected components in R^4: 2 if mixed, otherwise 1."""
        return 2 if self.kind == "mixed" else 1

    @property
    def zero_distance(self) -> float:
        """J0, the distance J of the function 0 from the target."""
        return self.moments.positive * self._p**2 + self.moments.negative * self._q**2

    @property
    def barrier(self) -> float:
        """Smallest J that must be crossed between the components: ``{J < eps}`` is connected exactly for eps above."""
        return min(self.moments.positive * self._p**2, self.moments.negative * self._q**2)

    @property
    def learning_coefficient(self) -> float:
        """Half the codimension: the volume of ``{J < eps}`` grows like eps to this power, up to logarithms."""
        return (4 - self.dimension) / 2

    @property
    def local_minima(self) -> dict[str, float]:
        """Values of J where a search from default initial weights gets stuck, by the dead unit."""
        minima = {
            "negative side lost": self.moments.negative * self._q**2,
            "positive side lost": self.moments.positive * self._p**2,
            "both sides lost": self.zero_distance,
        }
        if self.kind == "mixed":
            return minima
        return {"both sides lost": self.zero_distance} if self.kind == "same_sign" else {}

    def diagnose(self, distances: Tensor, reached: float, tolerance: float = 0.01) -> list[str]:
        """Classify the outcome of each restart of a search.

        Args:
            distances: J at the end, on the class's moments. Shape ``[R]``.
            reached: J below which a restart has found the class.
            tolerance: How near a local minimum counts as that minimum. Relative, > 0.

        Returns:
            Per restart ``"reached"``, a key of :attr:`local_minima`, ``"not finite"`` or ``"elsewhere"``.
        """

        def name(value: float) -> str:
            if not math.isfinite(value):
                return "not finite"
            if value < reached:
                return "reached"
            near = (key for key, level in self.local_minima.items() if abs(value - level) <= tolerance * level)
            return next(near, "elsewhere")

        return [name(value) for value in distances.tolist()]

    def contains(self, weights: Tensor, tolerance: float = 1e-9) -> Tensor:
        """Return whether weights compute the target's function, up to rounding.

        Args:
            weights: Shape ``[..., 4]``, floating.
            tolerance: Largest error of a slope, relative to the target's slopes and ``|ca| + |db|``. > 0.

        Returns:
            Shape ``[...]``, bool.
        """
        inputs, outputs = split_weights(weights)
        scale = (inputs * outputs).abs().sum(-1) + self.target.abs().sum().to(weights)
        errors = (slopes(weights) - self.target.to(weights)).abs().amax(-1)
        return errors <= tolerance * scale

    def residuals(self, plane: WeightPlane, coefficients: Tensor) -> Tensor:
        """Return (p - p*, q - q*) at points of a plane: the class is where both are 0.

        Each is piecewise quadratic and continuous, so that it can be contoured at 0: in generic 2-planes mixed classes
        are points, same-sign classes curves; in 3-planes curves and surfaces. On the same-sign strata one of the two
        vanishes on a whole region, where contouring it shows nothing; contour the other one and keep its points where
        this is 0.

        Args:
            plane: Plane of dimension m in R^4.
            coefficients: Shape ``[..., m]``.

        Returns:
            Shape ``[..., 2]``, float64, on the device of ``coefficients``.
        """
        centre, basis = (t.detach().to(coefficients.device, torch.float64) for t in (plane.centre, plane.basis))
        return slopes(centre + coefficients.double() @ basis.T) - self.target.to(coefficients.device)

    def quadric(self, plane: WeightPlane) -> PlaneQuadric:
        """Return the intersection of a 3-plane with the 3-dimensional stratum of a same-sign class.

        Args:
            plane: Plane of dimension 3 in R^4.

        Returns:
            The surface, with its throat and the epsilon of its change of topology.

        Raises:
            ValueError: If the class is not of same sign, or the plane not of dimension 3 in R^4.
        """
        if self.kind != "same_sign":
            raise ValueError(f"quadrics are for same-sign classes; this one is {self.kind}, use residuals() instead.")
        positive = self._p != 0
        return PlaneQuadric(
            plane,
            level=self._p if positive else -self._q,
            moment=self.moments.positive if positive else self.moments.negative,
            sign=1 if positive else -1,
        )
