"""The intertwiner group of an activation: which channel mixings commute through it, and as what."""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_integers
from lightning_sym._linear_algebra import random_orthogonal
from lightning_sym._random import seeded
from lightning_sym._text import unknown
from lightning_sym.networks.activations import Gaussian, IdentityActivation, Polynomial, make_activation

ACCEPT = 1e-12  # an identity with a smaller relative residual holds: it is off by rounding only
REJECT = 1e-2  # one with a larger residual fails; in between it is doubtful and counted as failing


@dataclass(frozen=True, eq=False)
class GroupElement:
    r"""One element ``A = P D``: scales (with signs) first, permutes second; or a dense invertible matrix.

    :math:`(A x)_i = d_{p[i]} x_{p[i]}`: the new place ``i`` receives the old unit ``p[i]``, times that old
    unit's scale. Elements are compared by their :meth:`matrix`; ``==`` is identity of objects.

    Args:
        permutation: The index vector ``p``. Shape ``[H]``, int64, each of ``0 .. H - 1`` once.
        scale: The signed scales ``d``, indexed by the old unit. Shape ``[H]``, floating, finite and non-zero,
            on the same device.
        dense: The matrix, if the element is not of the form ``P D``; then ``permutation`` and ``scale`` must
            be those of the identity. Shape ``[H, H]``, dtype and device of ``scale``.
            :meth:`from_matrix` fills in all three.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes or devices differ, ``permutation`` is not one, or a value is zero or not finite.

    References:
        Godfrey et al. (2022), "On the Symmetries of Deep Learning Models and their Internal Representations",
        arXiv:2205.14258, section 3. The order of scaling and permuting is ours.

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
        """Return an element made from parts that are right by construction, without the checks."""
        element = object.__new__(cls)
        for name, value in (("permutation", permutation), ("scale", scale), ("dense", dense)):
            object.__setattr__(element, name, value)
        return element

    @classmethod
    def _of_dense(cls, matrix: Tensor) -> Self:
        """Return the element of an invertible matrix, without the checks."""
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
            device: Where it lives; by default the CPU.

        Raises:
            ValueError: If ``size`` < 1.
        """
        check_integers(size=size)
        device = device or "cpu"
        return cls._of(torch.arange(size, device=device), torch.ones(size, dtype=dtype, device=device))

    @classmethod
    def from_matrix(cls, matrix: Tensor, *, tolerance: float | None = None) -> Self:
        """Return the element with this matrix: as ``P D`` where it has that form, otherwise dense.

        Args:
            matrix: Invertible. Shape ``[H, H]``, floating.
            tolerance: Up to which entries count as zero, relative to the largest of their row, and singular
                values relative to the largest. Unitless, >= 0; by default 1000 units of rounding of the dtype.

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
        """Return ``self`` after ``other``, the element of the matrix product; also written ``self @ other``.

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
            # apply, so that P D times a dense matrix stays O(H^2)
            return GroupElement._of_dense(self.apply(other.matrix(), dim=0))
        # (A B x)_i = d[p[i]] (B x)_{p[i]} = d[p[i]] e[q[p[i]]] x_{q[p[i]]}: permutation q[p], and the old unit
        # j = q[k] is scaled by e[j], then by d[k].
        q = other.permutation
        return GroupElement._of(q[self.permutation], other.scale * self.scale[q.argsort()])

    def __matmul__(self, other: "GroupElement") -> "GroupElement":
        return self.compose(other) if isinstance(other, GroupElement) else NotImplemented

    def inverse(self) -> "GroupElement":
        """Return the element that undoes this one. For ``P D``: permutation ``argsort(p)``, scales ``1 / d[p]``."""
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
            A new tensor with the shape and dtype of ``x``: the element is cast to it.

        Raises:
            TypeError: If ``x`` is not floating.
            ValueError: If ``x`` has no such axis, or another size along it.
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
    matrix, so the group is given by two answers for one unit: is ``sigma(t x)`` a multiple of ``sigma(x)`` for
    all ``t > 0``, and for ``t = -1``? Permutations always belong to it.

    Two are equal (``==``, and they hash alike) if they are the same group with the same :math:`\varphi`: the
    name, and how it was found out, do not count.

    Args:
        name: Name of the activation.
        positive_scales: Whether ``sigma(t x) = t**exponent sigma(x)`` for all ``t > 0``.
        signs: Whether ``sigma(-x) = sigma(x)`` (``even``), or ``offset - sigma(x)``.
        dense: The activation is linear: all invertible matrices.
        permutations: Whether units change places. They do through every activation; at a place in a network they may
            be held where they are.
        exponent: Exponent of the positive scales in :math:`\varphi`; 1 without them. 0 for ``sign``, which forgets
            them.
        even: :math:`\varphi` forgets the signs.
        offset: What an affine intertwiner adds for each flipped unit, ``sigma(-x) = offset - sigma(x)``; see
            :meth:`shift`. 0 for the linear ones. The next bias can absorb it; zero padding and max-pooling
            in between cannot.
        measured: It was measured from values, by :func:`measure`, rather than looked up.
        residual: If measured: the largest relative residual of the identities that were accepted, < 1e-12.
        margin: If measured: the smallest relative residual of those that were rejected; infinite if none was.
        reach: If measured: the largest ``abs(x)`` looked at where all values were finite.

    Raises:
        ValueError: If the settings contradict each other, for example an exponent without positive scales.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, Definition 3.1, Lemma 3.2 and Table 1. Positive and negative
        scales apart, and offsets, are ours.

    Example:
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
    reach: float = field(default=math.inf, compare=False)

    def __post_init__(self) -> None:
        if self.dense and not (self.positive_scales and self.signs and self.exponent == 1 and not self.even):
            raise ValueError("A dense group has positive_scales, signs and exponent 1, and is not even.")
        if not self.positive_scales and self.exponent != 1:
            raise ValueError(f"exponent is about positive scales, of which there are none; got {self.exponent}.")
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
        """Whether an identity was rejected with a residual below 1e-2, so that the group may be too small."""
        return self.margin < REJECT

    @property
    def confidence(self) -> str:
        """A sentence that says how the group is known.

        ``looked up``: a theorem. ``measured``: for each identity (``t = -1``; ``t = 2`` and ``t = 1/pi`` with
        one exponent) the residual is the largest ``abs(sigma(t x) - c sigma(x))`` relative to the larger of the
        two terms, over a fixed grid of ``x``; the sentence gives the worst of the accepted ones and the best of
        the rejected ones. It is ``doubtful`` if a rejected one lies between 1e-12 and 1e-2: too large for
        rounding, too small for an identity that plainly fails. Rejecting it is the safe side: every
        element of the group is right, up to the accepted residual, but the group may be too small.
        """
        if not self.measured:
            return "looked up"
        parts = []
        if self.positive_scales or self.signs:
            parts.append(f"the accepted identities hold to {self.residual:.1e}")
        if self.margin < math.inf:
            parts.append(f"the rejected ones fail by at least {self.margin:.1e}")
        text = f"{', '.join(parts)}, for abs(x) up to {self.reach:.0e}"
        if self.doubtful:
            return (
                f"measured, doubtful: {text}; an identity between {ACCEPT:.0e} and {REJECT:.0e} counts as failing, so "
                "the group is right but may be too small"
            )
        return f"measured: {text}"

    def sample(
        self, size: int, generator: torch.Generator, scale: float = 0.5, dtype: torch.dtype = torch.float64
    ) -> GroupElement:
        """Return a random element.

        A uniform permutation, fair signs and log-normal magnitudes, as far as the group has them. A dense group
        gives ``U diag(m) V`` with Haar-distributed orthogonal ``U``, ``V`` and such magnitudes ``m``.

        Args:
            size: The number of units ``H``, >= 1.
            generator: Generator for the random numbers; the element is made on its device.
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
            tolerance: Relative: how far magnitudes may be from 1 where they must be 1, how large the entries
                that must be 0 may be beside the largest of their row, and how small a singular value may be
                beside the largest. Unitless, >= 0; by default 1000 units of rounding of the dtype.

        Raises:
            TypeError: If it is neither, or its dtype is not floating.
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
        """Return whether these are scales of the group."""
        right = scale.isfinite() & (scale != 0)
        if not self.signs:
            right &= scale > 0
        if not self.positive_scales:
            right &= (scale.abs() - 1).abs() <= tolerance
        return bool(right.all())

    def phi(self, element: GroupElement) -> GroupElement:
        r"""Return :math:`\varphi(A)`, by which ``A`` comes out of the activation, but for :meth:`shift`.

        That is, :math:`\sigma(A x) = \varphi(A) \sigma(x)` for all ``x``.

        Found from the scales alone, with no matrices: equal to ``sigma(A) sigma(I)^{-1}`` where ``sigma(I)`` is
        invertible, and right also where it is not (``sigma(0) = sigma(1)``).

        Args:
            element: Element of the group: phi is a homomorphism on the group only.

        Returns:
            An element of the same size, dtype and device; ``element`` itself where phi changes nothing.

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
            Shape ``[H]``, indexed by the new place, dtype and device of the scales. All zero unless the group
            was asked for with ``affine=True``.
        """
        return self.offset * (element.scale[element.permutation] < 0).to(element.scale.dtype)

    def dimension(self, size: int) -> int:
        """Return the dimension of the continuous part for ``size`` >= 1 units: ``H**2``, ``H`` or 0."""
        check_integers(size=size)
        return size**2 if self.dense else size if self.positive_scales else 0

    def _elements(self) -> str:
        """Return what the elements are, in words."""
        if self.dense:
            return "all invertible matrices"
        if self.positive_scales:
            return f"permutations with {'non-zero' if self.signs else 'positive'} scales"
        return f"permutations{' with signs' if self.signs else ''}"


def _rows() -> Mapping[str, IntertwinerGroup]:
    """Return the table: from kinds of group to names."""
    kinds: dict[tuple[str, ...], dict[str, Any]] = {
        ("identity", "avg_pool", "interpolate"): {"positive_scales": True, "signs": True, "dense": True},
        ("relu", "leaky_relu", "prelu", "max_pool"): {"positive_scales": True, "signs": False},
        ("relu_squared",): {"positive_scales": True, "signs": False, "exponent": 2.0},
        ("abs",): {"positive_scales": True, "signs": True, "even": True},
        ("polynomial(2)",): {"positive_scales": True, "signs": True, "exponent": 2.0, "even": True},
        ("polynomial(3)",): {"positive_scales": True, "signs": True, "exponent": 3.0},
        ("dropout",): {"positive_scales": True, "signs": True},
        ("gaussian", "cos"): {"positive_scales": False, "signs": True, "even": True},
        ("tanh", "sin", "erf", "atan", "softsign", "hardtanh", "softshrink", "hardshrink", "tanhshrink"): {
            "positive_scales": False,
            "signs": True,
        },
        (
            *("sigmoid", "logsigmoid", "gelu", "silu", "softplus", "elu", "celu", "selu", "mish"),
            *("relu6", "hardswish", "hardsigmoid", "alpha_dropout"),
        ): {"positive_scales": False, "signs": False},
    }
    return MappingProxyType({name: IntertwinerGroup(name, **flags) for names, flags in kinds.items() for name in names})


INTERTWINER_GROUPS: Mapping[str, IntertwinerGroup] = _rows()
"""Groups by the activation's name, read-only.

Source: Godfrey et al. (2022), arXiv:2205.14258, Table 1, with our additions (docs/theory/intertwiners.md, 1.2).
Activations with parameters stand for their defaults; :func:`intertwiner_group` looks at the parameters.
Dropout has scales and signs only, although it is linear in evaluation: other mixings would change the
distribution in training. For the same reason alpha dropout has permutations only.
"""

# sigma(-x) = offset - sigma(x): docs/theory/intertwiners.md, 1.4.
_OFFSETS = {"sigmoid": 1.0, "hardsigmoid": 1.0}

_TYPES: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.Identity, IdentityActivation), "identity"),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), "avg_pool"),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), "avg_pool"),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), "interpolate"),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), "max_pool"),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), "max_pool"),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), "dropout"),
    **dict.fromkeys((nn.AlphaDropout, nn.FeatureAlphaDropout), "alpha_dropout"),
    **{
        kind: kind.__name__.lower()
        for kind in (
            *(nn.ReLU, nn.PReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.SELU, nn.Mish, nn.Hardswish, Gaussian),
            *(nn.Tanh, nn.Tanhshrink, nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid),
        )
    },
}

_ALIASES = {
    "square": "polynomial(2)",
    "arctan": "atan",
    "swish": "silu",
    "upsample": "interpolate",
    **{f"{how}{kind}_pool{n}d": f"{kind}_pool" for how in ("", "adaptive_") for kind in ("max", "avg") for n in "123"},
}


def intertwiner_group(
    activation: nn.Module | str | Callable[[Tensor], Tensor], *, affine: bool = False
) -> IntertwinerGroup:
    """Return the intertwiner group of an activation: from the table, or measured.

    Args:
        activation: One of

            - a module: all elementwise ones of torch and ours; pooling, resizing and dropout, which act on
              channels as in the table; any other elementwise module, which is measured;
            - a name of :data:`INTERTWINER_GROUPS` or :func:`lightning_sym.networks.make_activation`;
            - a function of torch with its default options, such as ``torch.relu`` or ``F.gelu``;
            - any other elementwise function from tensor to tensor, which is measured.

            Parameters count: ``LeakyReLU(1)`` is the identity and ``LeakyReLU(-1)`` is ``abs``. Modules that are
            random in training (``RReLU``, dropout) stand for what they do in evaluation. ``PReLU`` has
            positive scales whatever its slopes are, since they are trained; with one slope per channel the
            permutation acts on the vector of slopes too.
        affine: Allow intertwiners with an offset: ``sigmoid(-x) = 1 - sigmoid(x)``, so that networks with biases
            have its signs too (see :meth:`IntertwinerGroup.shift`).

    Returns:
        The group; ``measured`` and ``confidence`` say how it is known.

    Raises:
        TypeError: If it is not one of these.
        ValueError: If the name is unknown, or the activation cannot be measured: see :func:`measure`.

    Note:
        A look-up takes microseconds, a measurement one or two milliseconds.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, Table 1 and section 3.

    Example:
        >>> intertwiner_group(nn.Hardtanh(-1, 2)) == intertwiner_group("gelu")
        True
        >>> intertwiner_group("sigmoid", affine=True).offset
        1.0
    """
    if isinstance(activation, str):
        name = _ALIASES.get(activation, activation)
        if name not in INTERTWINER_GROUPS:
            try:
                module = make_activation(activation)
            except ValueError as error:
                if "(" in activation:  # its own sentence says what is wrong with the argument
                    raise
                raise ValueError(unknown("activation", activation, INTERTWINER_GROUPS)) from error
            return intertwiner_group(module, affine=affine)
        group = INTERTWINER_GROUPS[name]
    elif isinstance(activation, type):
        raise TypeError(f"Expected an activation, got the class {activation.__name__}; pass an instance of it.")
    elif isinstance(activation, nn.Module) or callable(activation):
        found = _look_up_module(activation) if isinstance(activation, nn.Module) else _look_up_function(activation)
        if found is None:
            return measure(activation, affine=affine)
        group = found
    else:
        raise TypeError(
            f"Expected an activation module, name or function from tensor to tensor, got {type(activation).__name__}."
        )
    if affine and group.name in _OFFSETS:
        return replace(group, signs=True, offset=_OFFSETS[group.name])
    return group


def _look_up_module(module: nn.Module) -> IntertwinerGroup | None:
    """Return a module's row of the table; None if it has to be measured."""
    # A subclass is what it inherits from only while it computes the same.
    kind = next((base for base in type(module).__mro__ if "forward" in vars(base)), type(module))
    if kind is nn.LeakyReLU or kind is nn.RReLU:
        # RReLU in evaluation: the mean of its bounds
        bounds = ("negative_slope",) if kind is nn.LeakyReLU else ("lower", "upper")
        slope = sum(float(getattr(module, bound)) for bound in bounds) / len(bounds)
        if not math.isfinite(slope):
            raise ValueError(f"The slope of {kind.__name__} must be finite, got {slope}.")
        return INTERTWINER_GROUPS["identity" if slope == 1 else "abs" if slope == -1 else "leaky_relu"]
    if kind is Polynomial:
        assert isinstance(module, Polynomial)
        degree = module.degree
        if degree == 1:
            return INTERTWINER_GROUPS["identity"]
        return IntertwinerGroup(f"polynomial({degree})", True, True, exponent=float(degree), even=degree % 2 == 0)
    # What is further up than that computes something else (ReLU6 inherits from Hardtanh, but has a row).
    inherited = type(module).__mro__[: type(module).__mro__.index(kind) + 1]
    return next((INTERTWINER_GROUPS[_TYPES[base]] for base in inherited if base in _TYPES), None)


def _look_up_function(function: Callable[..., Any]) -> IntertwinerGroup | None:
    """Return the row of a function of torch; None if it has to be measured."""
    try:
        name = _functions().get(function)
    except TypeError:  # not hashable
        return None
    return None if name is None else INTERTWINER_GROUPS[name]


@functools.cache
def _functions() -> dict[Any, str]:
    """Return the functions of torch that have a row, with its name."""
    names = {**{name: name for name in INTERTWINER_GROUPS}, **_ALIASES}
    found: dict[Any, str] = {}
    for name, row in names.items():
        for home in (torch, F, torch.special, torch.Tensor):
            function = getattr(home, name, None)
            if function is not None:
                found[function] = row
    return found


_MODEST = 2.0  # up to here an activation must be finite; beyond, it may overflow
_TIMES = (2.0, 1 / math.pi)  # log(pi) / log(2) is irrational: no function is periodic in log(x) with both periods


@functools.cache
def _grid() -> Tensor:
    """Return the points x: 0 and both signs of magnitudes from 1e-30 to 1e30. Shape [16, 16]; x[i] = -x[~i]."""
    modest = torch.linspace(0.0123, _MODEST, 47, dtype=torch.float64, device="cpu")
    wide = torch.logspace(-30, 30, 73, dtype=torch.float64, device="cpu")
    some = torch.linspace(_MODEST + 0.321, 12.3, 7, dtype=torch.float64, device="cpu")
    half = torch.cat([modest, wide, some, torch.zeros(1, dtype=torch.float64, device="cpu")])
    return torch.cat([half, -half.flip(0)]).view(16, 16)


def measure(
    function: nn.Module | Callable[[Tensor], Tensor], *, affine: bool = False, name: str | None = None
) -> IntertwinerGroup:
    r"""Find the intertwiner group of an elementwise function from its values.

    By Lemma 3.2 of the reference it is enough to know for which ``t`` there is a ``c`` with
    ``sigma(t x) = c sigma(x)`` for all ``x``. Looked at are ``t = -1`` (``c`` can only be 1 or -1) and ``t = 2``
    together with ``t = 1/pi`` (``c = t**exponent`` with one exponent), in float64, at 0 and at magnitudes from
    1e-30 to 1e30. An identity is accepted if its residual, relative at every single point, is below 1e-12;
    otherwise it is rejected, and the group is ``doubtful`` if the residual was below 1e-2: so the
    group may be too small, but what it holds is right. A function that passes as odd and homogeneous of
    degree 1 is linear, and its group dense. Differences below the rounding of the values near
    ``abs(x) = 1`` are no evidence: a kink narrower than about 1e-15 is not seen.

    Points where the function overflows are left out (``reach`` says how far the rest goes), but it must be
    finite for ``abs(x) <= 2``.

    Args:
        function: A module or a function from a tensor to a tensor of the same shape and dtype, elementwise and
            deterministic. It gets float64 tensors of several shapes on the CPU. A module is copied, the copy is
            cast to float64 and put in evaluation mode.
        affine: Also try ``sigma(-x) = offset - sigma(x)``.
        name: What to call it; by default the function's name, or the module's description.

    Returns:
        The group, with ``measured=True``. For a linear function with a constant added, which the lemma does not
        cover, the permutations (and with ``affine`` the signs) only.

    Raises:
        TypeError: If it is not callable, or does not return a float64 tensor.
        ValueError: If it raises, changes the shape, is random or keeps state, does not act elementwise, is not
            finite near 0, or is constant.

    Note:
        About seven calls with up to 256 numbers each. Torch's random state is left as it was.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, Lemma 3.2 and appendix B; the procedure is ours.

    Example:
        >>> group = measure(lambda x: x.relu() ** 2.5)
        >>> group.positive_scales, group.signs, group.exponent
        (True, False, 2.5)
    """
    if not callable(function):
        raise TypeError(f"Expected a function from tensor to tensor, got {type(function).__name__}.")
    name = name or _name(function)
    call = _caller(function, name)
    with torch.no_grad(), seeded(0):
        x = _grid()
        y = call(x)
        _check_values(call, name, x, y)
        scaled = [call(t * x).flatten() for t in _TIMES]
    x, y = x.flatten(), y.flatten()
    near = x.abs() <= _MODEST
    # What rounding may do to a difference of values of this size.
    noise = 16 * torch.finfo(torch.float64).eps * float(y[near].abs().max())

    def residual(left: Tensor, right: Tensor) -> float:
        """Return the largest pointwise residual of left = right, where both are finite."""
        difference = ((left - right).abs() - noise).clamp_min(0)
        relative = difference / torch.maximum(left.abs(), right.abs()).clamp_min(torch.finfo(torch.float64).tiny)
        return float(relative[left.isfinite() & right.isfinite()].max())

    accepted, rejected = [0.0], [math.inf]
    flipped = y.flip(0)  # sigma(-x), by the order of the grid
    attempts = [(residual(flipped, y), True, 0.0), (residual(flipped, -y), False, 0.0)]
    if affine and min(attempts)[0] >= ACCEPT:
        offset = 2 * float(y[x == 0][0])  # the identity at x = 0
        attempts.append((residual(flipped, offset - y), False, offset))
    sign_residual, even, offset = min(attempts)
    signs = sign_residual < ACCEPT
    (accepted if signs else rejected).append(sign_residual)

    exponent = _exponent(y, scaled[0], noise)
    scale_residual = 1.0
    if exponent is not None:
        scale_residual = max(residual(s, t**exponent * y) for s, t in zip(scaled, _TIMES, strict=True))
    scales = scale_residual < ACCEPT
    (accepted if scales else rejected).append(scale_residual)

    used = y.isfinite() & flipped.isfinite() & scaled[0].isfinite() & scaled[1].isfinite()
    return IntertwinerGroup(
        name,
        positive_scales=scales,
        signs=signs,
        dense=scales and signs and exponent == 1 and not even and offset == 0,
        exponent=exponent if scales and exponent is not None else 1.0,
        even=signs and even,
        offset=offset if signs else 0.0,
        measured=True,
        residual=max(accepted),
        margin=min(rejected),
        reach=float(x[used].abs().max()),
    )


def _exponent(y: Tensor, doubled: Tensor, noise: float) -> float | None:
    """Return the q with ``sigma(2 x) = 2**q sigma(x)`` at most points, if there is one."""
    # Subnormal numbers have lost digits.
    usable = y.isfinite() & doubled.isfinite() & (y.abs() > max(1e3 * noise, 1e-290))
    if not bool(usable.any()):  # the function is nearly zero but for large x
        usable = y.isfinite() & doubled.isfinite() & (y != 0)
    if not bool(usable.any()):
        return None
    ratio = float((doubled[usable] / y[usable]).median())
    if not 1e-300 < ratio < 1e300:
        return None
    exponent = math.log2(ratio)
    simple = Fraction(exponent).limit_denominator(12)
    return float(simple) if abs(exponent - simple) < 1e-13 * max(1.0, abs(exponent)) else exponent


def _name(function: nn.Module | Callable[..., Any]) -> str:
    """Return what to call a function in messages."""
    if isinstance(function, nn.Module):
        text = repr(function)
        return text if "\n" not in text and len(text) <= 80 else type(function).__name__
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))


def _caller(function: nn.Module | Callable[..., Any], name: str) -> Callable[[Tensor], Tensor]:
    """Return the function with its output checked; it gets a copy, for functions that work in place."""
    if isinstance(function, nn.Module):
        try:
            module = copy.deepcopy(function).to(device="cpu", dtype=torch.float64).eval()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise ValueError(
                f"{name} cannot be measured: copying it to float64 on the CPU failed ({_first_line(error)}); measure "
                "a plain function instead."
            ) from error
        function = module.forward  # past the hooks, which belong to the network

    def call(x: Tensor) -> Tensor:
        shape = list(x.shape)
        try:
            y = function(x.clone())
        except Exception as error:
            raise ValueError(
                f"{name} raised {type(error).__name__} ({_first_line(error)}) on a float64 tensor of shape {shape}; an "
                "activation takes any shape, elementwise."
            ) from error
        if not isinstance(y, Tensor):
            raise TypeError(f"{name} returned {type(y).__name__}; an activation returns a tensor.")
        if list(y.shape) != shape:
            raise ValueError(
                f"{name} made shape {list(y.shape)} out of {shape}; an activation acts elementwise and keeps the shape."
            )
        if y.dtype != torch.float64:
            raise TypeError(f"{name} returned {y.dtype} for torch.float64; an activation keeps the dtype.")
        return y

    return call


def _check_values(call: Callable[[Tensor], Tensor], name: str, x: Tensor, y: Tensor) -> None:
    """Raise unless y = call(x) is deterministic, elementwise, finite near 0 and not constant."""
    if not torch.equal(call(x).nan_to_num(), y.nan_to_num()):
        raise ValueError(
            f"{name} gave two answers for one input: it is random or keeps state; put it in evaluation mode, or "
            "measure a deterministic function."
        )
    finite, near = y.isfinite(), x.abs() <= _MODEST
    # Elementwise before finite: a softmax of large numbers may be neither.
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0), device="cpu")
    moved = torch.empty_like(y).flatten()
    moved[order] = call(x.flatten()[order].view(x.shape)).flatten()
    few = near.flatten().nonzero()[::7, 0]
    alone = call(x.flatten()[few][:, None]).flatten()
    single = call(x.flatten()[few[:1]][None]).flatten()
    whole = y.flatten()
    pairs = [(moved, whole), (alone, whole[few]), (single, whole[few[:1]])]
    if not all(torch.allclose(a, b, rtol=1e-12, atol=1e-14, equal_nan=True) for a, b in pairs):
        raise ValueError(
            f"{name} does not act elementwise: a number's image changed with its place or its neighbours; expected a "
            "function applied to each number by itself (for one slope per channel use nn.PReLU)."
        )
    if not bool(finite[near].all()):
        at = float(x[near & ~finite][0])
        raise ValueError(
            f"{name} is not finite at x = {at:.3g}; an activation must be finite on the whole line, at least for "
            f"abs(x) <= {_MODEST:g}."
        )
    values = y[finite]
    if float(values.max() - values.min()) <= 16 * torch.finfo(torch.float64).eps * float(values.abs().max()):
        raise ValueError(f"{name} is constant ({float(values[0]):.3g}), and so forgets its input: it has no group.")


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _check_matrix(matrix: Tensor, *, finite: bool = True) -> None:
    """Raise unless it is a square floating matrix, and finite where that is asked for."""
    if not matrix.dtype.is_floating_point:
        raise TypeError(f"The matrix must be floating, got {matrix.dtype}.")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"The matrix must be square, shape [H, H] with H >= 1, got {list(matrix.shape)}.")
    if finite and not bool(matrix.isfinite().all()):
        raise ValueError("The matrix must be finite.")


def _tolerance(tolerance: float | None, dtype: torch.dtype) -> float:
    """Return the tolerance, by default one that forgives the rounding of a few products."""
    if tolerance is None:
        return 1000 * torch.finfo(dtype).eps
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be >= 0, got {tolerance}.")
    return tolerance


def _monomial(matrix: Tensor, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """Return the permutation and the scales of a matrix with one entry per row and column, None for others."""
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
