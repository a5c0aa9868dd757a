"""Group elements (permutations with scales, or invertible matrices), and the intertwiner groups of activations."""

import math
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from lightning_sym._checks import check_integers
from lightning_sym._linear_algebra import random_orthogonal

ACCEPT = 1e-12  # an identity with a smaller relative residual holds: it is off by rounding only
REJECT = 1e-2  # one with a larger residual fails; in between it is doubtful and counted as failing


@dataclass(frozen=True, eq=False)
class GroupElement:
    r"""A group element ``A = P D``, which scales (with signs) and then permutes; or a dense invertible matrix.

    :math:`(A x)_i = d_{p[i]} x_{p[i]}`: the new position ``i`` receives the old unit ``p[i]`` times the scale of that
    unit. Compare elements by their :meth:`matrix`; ``==`` compares the identity of objects.

    Args:
        permutation: The index vector ``p``. Shape ``[H]``, int64, each of ``0 .. H - 1`` once.
        scale: The signed scales ``d``, indexed by the old unit. Shape ``[H]``, floating, finite and non-zero,
            on the same device.
        dense: The matrix, if the element is not of the form ``P D``; then ``permutation`` and ``scale`` must
            be those of the identity. Shape ``[H, H]``, dtype and device of ``scale``.
            :meth:`from_matrix` fills in all three.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes or devices differ, ``permutation`` is not a permutation, or a value is zero or not finite.

    References:
        Godfrey et al. (2022), "On the Symmetries of Deep Learning Models and their Internal Representations",
        arXiv:2205.14258, section 3. The order of scaling and permuting is our convention.

    Example:
        >>> a = GroupElement(torch.tensor([1, 0]), torch.tensor([3.0, 2.0]))
        >>> a.matrix()
        tensor([[0., 2.],
                [3., 0.]])
        >>> a.apply(torch.tensor([10.0, 1.0]))
        tensor([ 2., 30.])
    """

    permutation: Tensor
    scale: Tensor
    dense: Tensor | None = None

    def __post_init__(self) -> None:
        p, d = self.permutation, self.scale
        if p.dtype != torch.int64:
            raise TypeError(f"permutation must be an int64 tensor of indices, got {p.dtype}.")
        if not d.dtype.is_floating_point:
            raise TypeError(f"scale must be a floating tensor, got {d.dtype}.")
        if p.ndim != 1 or p.shape != d.shape or not len(p):
            raise ValueError(
                f"permutation and scale must have one shape [H] with H >= 1, got {list(p.shape)} and {list(d.shape)}."
            )
        if p.device != d.device:
            raise ValueError(f"permutation and scale must be on one device, got {p.device} and {d.device}.")
        places = torch.arange(len(p), device=p.device)
        if not torch.equal(p.sort().values, places):
            raise ValueError(f"permutation must hold each of 0 to {len(p) - 1} once, got {p.tolist()}.")
        if not bool((d.isfinite() & (d != 0)).all()):
            raise ValueError("scale must be finite and non-zero; a unit scaled by 0 could not be brought back.")
        if self.dense is not None:
            if self.dense.shape != (len(p), len(p)) or self.dense.dtype != d.dtype or self.dense.device != d.device:
                raise ValueError(
                    f"dense must have shape [{len(p)}, {len(p)}] and the dtype and device of scale, "
                    f"got {list(self.dense.shape)}, {self.dense.dtype} and {self.dense.device}."
                )
            if not torch.equal(p, places) or not bool((d == 1).all()):
                raise ValueError("With dense, permutation and scale must be the identity's: use from_matrix(dense).")
            if not bool(self.dense.isfinite().all()):
                raise ValueError("dense must be finite.")

    @classmethod
    def _of(cls, permutation: Tensor, scale: Tensor, dense: Tensor | None = None) -> Self:
        """Return an element from parts that are valid by construction, without checks."""
        element = object.__new__(cls)
        for name, value in (("permutation", permutation), ("scale", scale), ("dense", dense)):
            object.__setattr__(element, name, value)
        return element

    @classmethod
    def _of_dense(cls, matrix: Tensor) -> Self:
        """Return the element of an invertible matrix, without checks."""
        unit = cls.identity(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return cls._of(unit.permutation, unit.scale, matrix)

    @classmethod
    def identity(
        cls, size: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Self:
        """Return the neutral element.

        Args:
            size: The number of units ``H``, >= 1.
            dtype: Dtype of the scales; floating.
            device: Device of the element; by default the CPU.

        Raises:
            ValueError: If ``size`` < 1.
        """
        check_integers(size=size)
        device = device or "cpu"
        return cls._of(torch.arange(size, device=device), torch.ones(size, dtype=dtype, device=device))

    @classmethod
    def from_matrix(cls, matrix: Tensor, *, tolerance: float | None = None) -> Self:
        """Return the element with this matrix: ``P D`` if the matrix has that form, otherwise dense.

        Args:
            matrix: Invertible. Shape ``[H, H]``, floating.
            tolerance: Largest magnitude that counts as zero: of entries relative to the largest of their row, and of
                singular values relative to the largest. Unitless, >= 0; by default 1000 units of rounding of the dtype.

        Raises:
            TypeError: If the dtype is not floating.
            ValueError: If the matrix is not square, not finite or not invertible.
        """
        _check_matrix(matrix)
        tolerance = _tolerance(tolerance, matrix.dtype)
        monomial = _monomial(matrix, tolerance)
        if monomial is not None:
            return cls._of(*monomial)
        if not _invertible(matrix, tolerance):
            raise ValueError(f"The matrix of shape {list(matrix.shape)} is not invertible, so no group element has it.")
        return cls._of_dense(matrix)

    @property
    def size(self) -> int:
        """The number of units ``H``."""
        return len(self.permutation)

    def compose(self, other: "GroupElement") -> "GroupElement":
        """Return the product ``self @ other``, which applies ``other`` first.

        Args:
            other: Element of the same size, dtype and device.

        Raises:
            ValueError: If sizes, dtypes or devices differ.
        """
        for what in ("size", "dtype", "device"):
            mine, its = (e.size if what == "size" else getattr(e.scale, what) for e in (self, other))
            if mine != its:
                raise ValueError(f"Elements of one {what} can be composed, got {mine} and {its}.")
        if self.dense is not None or other.dense is not None:
            # apply() multiplies P D with a dense matrix in O(H^2)
            return GroupElement._of_dense(self.apply(other.matrix(), dim=0))
        # (A B x)_i = d[p[i]] (B x)_{p[i]} = d[p[i]] e[q[p[i]]] x_{q[p[i]]}: permutation q[p], and the old unit
        # j = q[k] is scaled by e[j], then by d[k].
        q = other.permutation
        return GroupElement._of(q[self.permutation], other.scale * self.scale[q.argsort()])

    def __matmul__(self, other: "GroupElement") -> "GroupElement":
        return self.compose(other) if isinstance(other, GroupElement) else NotImplemented

    def inverse(self) -> "GroupElement":
        """Return the inverse. For ``P D``: permutation ``argsort(p)``, scales ``1 / d[p]``."""
        if self.dense is not None:
            return GroupElement._of(self.permutation, self.scale, torch.linalg.inv(self.dense))
        return GroupElement._of(self.permutation.argsort(), 1 / self.scale[self.permutation])

    def matrix(self) -> Tensor:
        """Return ``A`` as a matrix. Shape ``[H, H]``, dtype and device of ``scale``; ``O(H^2)`` memory."""
        if self.dense is not None:
            return self.dense
        matrix = self.scale.new_zeros(self.size, self.size)
        return matrix.scatter(1, self.permutation[:, None], self.scale[self.permutation][:, None])

    def apply(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return ``A`` times ``x`` along one axis, without building a matrix for ``P D``.

        Args:
            x: Floating, any shape with ``H`` entries along ``dim``, on the element's device.
            dim: The axis of the units; for features of a convolution 1.

        Returns:
            A new tensor with the shape and dtype of ``x``; the element is cast to this dtype.

        Raises:
            TypeError: If ``x`` is not floating.
            ValueError: If ``x`` has no such axis, or the axis has another size.
        """
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            raise TypeError(f"A group element acts on floating tensors, got {x.dtype}.")
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim must be an axis of x, got {dim} for shape {list(x.shape)}.")
        if x.shape[dim] != self.size:
            raise ValueError(
                f"An element of size {self.size} acts on an axis of that size, got {x.shape[dim]} (shape "
                f"{list(x.shape)}, dim {dim})."
            )
        if self.dense is not None:
            product: Tensor = torch.tensordot(self.dense.to(x.dtype), x, dims=([1], [dim]))
            return product.movedim(0, dim)
        shape = [1] * x.ndim
        shape[dim] = self.size
        return x.index_select(dim, self.permutation) * self.scale[self.permutation].to(x.dtype).view(shape)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "GroupElement":
        """Return the element on another device or with scales of another floating dtype."""
        dense = None if self.dense is None else self.dense.to(device=device, dtype=dtype)
        return GroupElement._of(self.permutation.to(device=device), self.scale.to(device=device, dtype=dtype), dense)


@dataclass(frozen=True)
class IntertwinerGroup:
    r"""The group :math:`G_\sigma` of an elementwise activation, for any number of units, with its :math:`\varphi`.

    :math:`G_\sigma = \{A \in GL_n : \sigma(A x) = B \sigma(x) \text{ for all } x\}` and
    :math:`\varphi(A) = B`. For a non-linear activation every element is ``P D``, a permutation after a diagonal
    matrix. Two answers for one unit therefore determine the group: is ``sigma(t x)`` a multiple of ``sigma(x)`` for
    all ``t > 0``, and for ``t = -1``? The group always contains the permutations.

    Two objects are equal (``==``, with equal hashes) if they are the same group with the same :math:`\varphi`; the
    name and the fields of a measurement are ignored.

    Args:
        name: Name of the activation.
        positive_scales: Whether ``sigma(t x) = t**exponent sigma(x)`` for all ``t > 0``.
        signs: Whether ``sigma(-x) = sigma(x)`` (``even``), or ``offset - sigma(x)``.
        dense: Whether the activation is linear; the group then holds all invertible matrices.
        permutations: Whether units can be permuted. They can for every activation; a layer of a network may fix
            them.
        exponent: Exponent of the positive scales in :math:`\varphi`; 1 without them. 0 for ``sign``, which is
            invariant under them.
        even: Whether the activation is even, so that :math:`\varphi` drops the signs.
        offset: The constant that an affine intertwiner adds for each flipped unit: ``sigma(-x) = offset - sigma(x)``.
            See :meth:`shift`. Linear intertwiners have offset 0. The next bias can absorb the constant, unless zero
            padding or max-pooling is in between.
        measured: Whether :func:`measure` determined the group from values; otherwise it was looked up.
        residual: If measured: the largest relative residual of the accepted identities, < 1e-12.
        margin: If measured: the smallest relative residual of the rejected identities; infinite without any.

    Raises:
        ValueError: If the settings contradict each other, for example an exponent without positive scales.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, Definition 3.1, Lemma 3.2 and Table 1. The separation of
        positive and negative scales and the offsets are our extensions.

    Example:
        >>> from lightning_sym.symmetry.groups import INTERTWINER_GROUPS, measure
        >>> INTERTWINER_GROUPS["relu"] == measure(torch.relu)
        True
        >>> INTERTWINER_GROUPS["relu"].dimension(8)
        8
    """

    name: str = field(compare=False)
    positive_scales: bool
    signs: bool
    dense: bool = False
    permutations: bool = True
    exponent: float = 1.0
    even: bool = False
    offset: float = 0.0
    measured: bool = field(default=False, compare=False)
    residual: float = field(default=0.0, compare=False)
    margin: float = field(default=math.inf, compare=False)

    def __post_init__(self) -> None:
        if self.dense and not (self.positive_scales and self.signs and self.exponent == 1 and not self.even):
            raise ValueError("A dense group has positive_scales, signs and exponent 1, and is not even.")
        if not self.positive_scales and self.exponent != 1:
            raise ValueError(f"exponent requires positive scales, and the group has none; got {self.exponent}.")
        if not math.isfinite(self.exponent) or not math.isfinite(self.offset):
            raise ValueError(f"exponent and offset must be finite, got {self.exponent} and {self.offset}.")
        if self.even and not self.signs:
            raise ValueError("even is about signs; it needs signs=True.")
        if self.offset and (not self.signs or self.even or (self.positive_scales and self.exponent != 0)):
            raise ValueError(
                "An offset is for sigma(-x) = offset - sigma(x): it needs signs=True and even=False, and excludes "
                "positive scales."
            )

    @property
    def doubtful(self) -> bool:
        """Whether an identity was rejected with a residual below 1e-2; the group may then be too small."""
        return self.margin < REJECT

    def sample(
        self, size: int, generator: torch.Generator, scale: float = 0.5, dtype: torch.dtype = torch.float64
    ) -> GroupElement:
        """Return a random element.

        The permutation is uniform, signs are fair and magnitudes are log-normal, as far as the group has them. A dense
        group gives ``U diag(m) V`` with Haar-distributed orthogonal ``U``, ``V`` and log-normal magnitudes ``m``.

        Args:
            size: The number of units ``H``, >= 1.
            generator: Generator of the random numbers; it determines the device of the element.
            scale: Standard deviation of the logarithm of the magnitudes, unitless, >= 0; 0 leaves them at 1.
            dtype: Dtype of the scales, floating.

        Raises:
            ValueError: If ``size`` or ``scale`` is out of range.
        """
        check_integers(size=size)
        if not 0 <= scale < math.inf:
            raise ValueError(f"scale must be >= 0 and finite, got {scale}.")
        options: dict[str, Any] = {"generator": generator, "device": generator.device}
        magnitudes = torch.ones(size, dtype=dtype, device=generator.device)
        if self.positive_scales:
            magnitudes = (scale * torch.randn(size, dtype=dtype, **options)).exp()
        if self.dense:
            left, right = (random_orthogonal(size, generator, dtype=dtype) for _ in range(2))
            return GroupElement._of_dense(left * magnitudes @ right)
        if self.signs:
            magnitudes = magnitudes * (1 - 2 * torch.randint(2, (size,), **options)).to(dtype)
        order = torch.randperm(size, **options) if self.permutations else torch.arange(size, device=generator.device)
        return GroupElement._of(order, magnitudes)

    def contains(self, element: GroupElement | Tensor, tolerance: float | None = None) -> bool:
        """Return whether an element, or a matrix, belongs to the group.

        Args:
            element: The element, or a matrix of shape ``[H, H]``, floating.
            tolerance: Bound for three errors: the deviation from 1 of magnitudes that must be 1; the size of entries
                that must be 0, relative to the largest entry of their row; and the relative size of singular values
                that count as 0. Unitless, >= 0; by default 1000 units of rounding of the dtype.

        Raises:
            TypeError: If ``element`` is neither, or its dtype is not floating.
            ValueError: If a matrix is not square.
        """
        if isinstance(element, GroupElement):
            tolerance = _tolerance(tolerance, element.scale.dtype)
            if element.dense is None:
                return self._admits(element.scale, tolerance)
            matrix = element.dense
        elif isinstance(element, Tensor):
            _check_matrix(element, finite=False)
            matrix, tolerance = element, _tolerance(tolerance, element.dtype)
        else:
            raise TypeError(f"contains expects a GroupElement or a matrix, got {type(element).__name__}.")
        monomial = _monomial(matrix, tolerance)
        if monomial is not None:
            return self._admits(monomial[1], tolerance)
        return self.dense and _invertible(matrix, tolerance)

    def _admits(self, scale: Tensor, tolerance: float) -> bool:
        """Return whether the group admits these scales."""
        right = scale.isfinite() & (scale != 0)
        if not self.signs:
            right &= scale > 0
        if not self.positive_scales:
            right &= (scale.abs() - 1).abs() <= tolerance
        return bool(right.all())

    def phi(self, element: GroupElement) -> GroupElement:
        r"""Return :math:`\varphi(A)`, the action of ``A`` after the activation, up to :meth:`shift`.

        That is, :math:`\sigma(A x) = \varphi(A) \sigma(x)` for all ``x``.

        The scales alone determine the result, without matrices. It equals ``sigma(A) sigma(I)^{-1}`` if ``sigma(I)``
        is invertible, and is also right if it is not (``sigma(0) = sigma(1)``).

        Args:
            element: Element of the group; phi is a homomorphism on the group only.

        Returns:
            An element of the same size, dtype and device; ``element`` itself if phi changes nothing.

        Raises:
            ValueError: If the element does not belong to the group.
        """
        if not self.contains(element):
            raise ValueError(
                f"The element of size {element.size} is not in the intertwiner group of {self.name}, which holds "
                f"{self._elements()}."
            )
        if self.dense:
            return element
        if element.dense is not None:
            element = GroupElement.from_matrix(element.dense)
        if self.exponent == 1 and not self.even:
            return element
        scale = element.scale.abs()
        if self.exponent != 1:
            scale = scale**self.exponent
        return GroupElement._of(element.permutation, scale if self.even else scale.copysign(element.scale))

    def shift(self, element: GroupElement) -> Tensor:
        """Return ``c`` in ``sigma(A x) = phi(A) sigma(x) + c``: the offset at the flipped units.

        Args:
            element: Element of the group.

        Returns:
            Shape ``[H]``, indexed by the new position, dtype and device of the scales. All zero unless the group
            was requested with ``affine=True``.
        """
        return self.offset * (element.scale[element.permutation] < 0).to(element.scale.dtype)

    def dimension(self, size: int) -> int:
        """Return the dimension of the continuous part for ``size`` >= 1 units: ``H**2``, ``H`` or 0."""
        check_integers(size=size)
        return size**2 if self.dense else size if self.positive_scales else 0

    def _elements(self) -> str:
        """Describe the elements in words."""
        if self.dense:
            return "all invertible matrices"
        if self.positive_scales:
            return f"permutations with {'non-zero' if self.signs else 'positive'} scales"
        return f"permutations{' with signs' if self.signs else ''}"


def _check_matrix(matrix: Tensor, *, finite: bool = True) -> None:
    """Raise unless a matrix is square and floating and, with `finite`, has finite entries."""
    if not matrix.dtype.is_floating_point:
        raise TypeError(f"The matrix must be floating, got {matrix.dtype}.")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"The matrix must be square, shape [H, H] with H >= 1, got {list(matrix.shape)}.")
    if finite and not bool(matrix.isfinite().all()):
        raise ValueError("The matrix must be finite.")


def _tolerance(tolerance: float | None, dtype: torch.dtype) -> float:
    """Return the tolerance; the default allows for the rounding of a few products."""
    if tolerance is None:
        return 1000 * torch.finfo(dtype).eps
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be >= 0, got {tolerance}.")
    return tolerance


def _monomial(matrix: Tensor, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """Return the permutation and the scales of a matrix with one entry per row and column, otherwise None."""
    if not bool(matrix.isfinite().all()):
        return None
    magnitudes = matrix.abs()
    largest, p = magnitudes.max(1)
    rest = magnitudes.scatter(1, p[:, None], 0).amax(1)
    places = torch.arange(len(p), device=p.device)
    if not bool(((largest > 0) & (rest <= tolerance * largest)).all()) or not torch.equal(p.sort().values, places):
        return None
    return p, matrix.new_empty(len(p)).scatter(0, p, matrix.gather(1, p[:, None])[:, 0])


def _invertible(matrix: Tensor, tolerance: float) -> bool:
    """Return whether a matrix is finite and its smallest singular value is not negligible."""
    if not bool(matrix.isfinite().all()):
        return False
    values = torch.linalg.svdvals(matrix)
    return bool(values[-1] > tolerance * values[0])
