"""Weight vectors of a network, and the affine planes through some of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_numbers
from lightning_sym.networks import architecture_name


def weight_vector(network: nn.Module) -> Tensor:
    """Return a network's trainable parameters as one vector.

    Args:
        network: Any module. Parameters with ``requires_grad`` count, in the order of ``named_parameters()``.

    Returns:
        A detached copy, shape [P], in the parameters' dtype and on their device.

    Raises:
        ValueError: If the network has no trainable parameter.
    """
    return torch.cat([parameter.detach().flatten() for parameter in trainable(network).values()])


def weight_tensors(network: nn.Module, vectors: Tensor) -> dict[str, Tensor]:
    """Return weight vectors as the tensors that ``torch.func.functional_call`` takes.

    Args:
        network: The module with the names and shapes.
        vectors: Shape [..., P], in the order of :func:`weight_vector`.

    Returns:
        By name of the trainable parameter a view of shape [..., *shape of the parameter].

    Raises:
        ValueError: If the last axis is not P long, or the network has no trainable parameter.
    """
    shapes = {name: parameter.shape for name, parameter in trainable(network).items()}
    size = sum(shape.numel() for shape in shapes.values())
    if vectors.ndim == 0 or vectors.shape[-1] != size:
        raise ValueError(
            f"vectors must have shape [..., {size}], one entry for each trainable parameter of the "
            f"{architecture_name(network)}, got {list(vectors.shape)}."
        )
    return as_tensors(vectors, shapes)


def as_tensors(vectors: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return views ``[..., *shape]`` of vectors ``[..., P]``, one for each shape; the shapes have P entries in all."""
    parts = torch.split(vectors, [shape.numel() for shape in shapes.values()], -1)
    return {name: part.view((*part.shape[:-1], *shapes[name])) for name, part in zip(shapes, parts, strict=True)}


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a network by name.

    Raises:
        ValueError: If there is none, or one is complex.
    """
    found = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError(f"{architecture_name(network)} has no trainable parameters, so that it has no weight vector.")
    for name, parameter in found.items():
        if parameter.is_complex():
            raise ValueError(f"Parameter {name!r} is complex, and weight vectors are real; freeze it.")
    return found


def independent(vectors: Tensor, tolerance: float = 1e-3) -> list[int]:
    """Choose linearly independent vectors, the earlier ones first.

    A vector is accepted if the part of it orthogonal to those accepted before is longer than ``tolerance`` times the
    vector itself; projections are subtracted twice (docs/theory/equivalence.md, 3.1).

    Args:
        vectors: Differences to a common point, shape [n, P], floating.
        tolerance: Relative, in (0, 1). Raised to ``10 max(P, n)`` times float64's machine epsilon.

    Returns:
        Positions of the accepted vectors, rising. Vectors that are zero or not finite are never accepted.

    Raises:
        ValueError: If the shape or the tolerance is wrong.

    Example:
        >>> independent(torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]))
        [0, 2]
    """
    if vectors.ndim != 2 or not vectors.is_floating_point():
        raise ValueError(
            f"vectors must be a floating tensor of shape [n, P], got {vectors.dtype} of shape {list(vectors.shape)}."
        )
    return _gram_schmidt(vectors.detach().cpu().double(), tolerance)[0]


def _gram_schmidt(vectors: Tensor, tolerance: float) -> tuple[list[int], Tensor]:
    """Return the positions of the accepted vectors and their orthonormal basis, shape [P, accepted]."""
    check_numbers("in (0, 1)", tolerance=tolerance)
    count, size = vectors.shape
    tolerance = max(tolerance, 10 * max(size, count) * torch.finfo(torch.float64).eps)
    basis = vectors.new_zeros(size, min(count, size))
    accepted: list[int] = []
    for index, vector in enumerate(vectors):
        length = torch.linalg.vector_norm(vector)
        if len(accepted) == size or not torch.isfinite(length) or length == 0:
            continue
        found = basis[:, : len(accepted)]
        rest = vector / length
        for _ in range(2):  # once leaves errors of machine epsilon over the length of the remainder
            rest = rest - found @ (found.T @ rest)
        if (remaining := torch.linalg.vector_norm(rest)) > tolerance:
            basis[:, len(accepted)] = rest / remaining
            accepted.append(index)
    return accepted, basis[:, : len(accepted)]


def as_exact(values: Tensor, size: int, name: str) -> Tensor:
    """Return numbers ``[..., size]`` in float64, on the CPU.

    Raises:
        ValueError: If the last axis has another length; the message calls them by their name.
    """
    if values.ndim == 0 or values.shape[-1] != size:
        raise ValueError(f"{name} must have shape [..., {size}], got {list(values.shape)}.")
    return values.detach().cpu().double()


@dataclass(frozen=True, eq=False)
class WeightPlane:
    r"""The affine plane of dimension m through m + 1 points of weight space, with Gram-Schmidt's basis.

    Distances within the plane are those of the coefficients: the basis is orthonormal. All tensors are float64 on the
    CPU.

    Attributes:
        centre: The first point, shape [P]; the coefficients are zero there.
        basis: Orthonormal columns, shape [P, m]. Column k is the remainder of ``points[k + 1] - centre`` after the
            earlier ones, with a positive factor: the Q of a QR decomposition with a positive diagonal of R, so that
            point k has zeros after coefficient k.
        points: Points that define it, shape [m + 1, P], the centre first.

    Example:
        >>> plane = WeightPlane.through(torch.tensor([[1.0, 0.0, 0.0], [3.0, 0.0, 0.0], [3.0, 4.0, 0.0]]))
        >>> plane.coordinates(plane.points)
        tensor([[0., 0.],
                [2., 0.],
                [2., 4.]], dtype=torch.float64)
    """

    centre: Tensor
    basis: Tensor
    points: Tensor

    @classmethod
    def through(cls, points: Tensor, *, tolerance: float = 1e-3) -> Self:
        """Return the plane through points.

        Args:
            points: Shape [m + 1, P] with m >= 1, floating, finite; the centre first.
            tolerance: Tolerance of :func:`independent`, which the differences to the centre must pass.

        Returns:
            The plane.

        Raises:
            ValueError: If the shape or dtype is wrong, m is larger than P, a number is not finite, or a point
                depends on those before it; the sentence names the point.
        """
        if not isinstance(points, Tensor) or points.ndim != 2 or not points.is_floating_point() or len(points) < 2:
            got = f"{points.dtype} {list(points.shape)}" if isinstance(points, Tensor) else type(points).__name__
            raise ValueError(f"points must be a floating tensor [m + 1, P] of at least two weight vectors, got {got}.")
        count, size = len(points) - 1, points.shape[1]
        if count > size:
            raise ValueError(
                f"{count + 1} points need {count} dimensions, but the network has only {size} parameters; "
                f"pass at most {size + 1} points."
            )
        exact = points.detach().cpu().to(torch.float64, copy=True)
        for index, point in enumerate(exact):
            if not point.isfinite().all():
                raise ValueError(f"Point {index} has weights that are not finite; leave it out.")
        accepted, basis = _gram_schmidt(exact[1:] - exact[0], tolerance)
        if len(accepted) < count:
            wrong = next(index for index in range(count) if index not in accepted) + 1
            raise ValueError(
                f"Point {wrong} lies in the plane of the points before it (to a relative tolerance of {tolerance:g}), "
                "so that the points span no plane of that dimension; leave it out, see independent()."
            )
        return cls(exact[0], basis, exact)

    @property
    def dimension(self) -> int:
        """The number m of basis vectors."""
        return int(self.basis.shape[1])

    def coordinates(self, vectors: Tensor) -> Tensor:
        """Return the coefficients of the orthogonal projections of weight vectors [..., P]: [..., m], float64."""
        return (as_exact(vectors, len(self.centre), "vectors") - self.centre) @ self.basis

    def residual(self, vectors: Tensor) -> Tensor:
        """Return the distances of weight vectors [..., P] from the plane: [...], float64, >= 0."""
        difference = as_exact(vectors, len(self.centre), "vectors") - self.centre
        distance: Tensor = torch.linalg.vector_norm(difference - (difference @ self.basis) @ self.basis.T, dim=-1)
        return distance

    def weights(self, coefficients: Tensor) -> Tensor:
        """Return the weight vectors at coefficients [..., m]: [..., P], float64."""
        return self.centre + as_exact(coefficients, self.dimension, "coefficients") @ self.basis.T
