"""The intersection of a 3-plane with the large stratum of a same-sign class of the two-unit network, a quadric."""

import math

import torch

from lightning_sym.landscape.planes import WeightPlane

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
