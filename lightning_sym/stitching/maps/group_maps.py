"""Stitching maps in the intertwiner group: permutations with scales or signs, trained or fitted."""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_known, check_numbers
from lightning_sym.stitching.maps import fits
from lightning_sym.stitching.maps.base import FittedMap, Port, StitchingMap
from lightning_sym.stitching.maps.birkhoff import Projection, nearest_permutation, projected, sinkhorn, soft_sort
from lightning_sym.stitching.maps.moments import FeatureMoments

_INITIAL_ITERATIONS = 100  # of Sinkhorn at the start, from uniform random entries
_SMALLEST_SCALE = 1e-3  # relative to the largest: initial scale in SoftSort of units with fitted scale 0


class _ElementMap(StitchingMap):
    """A product ``P diag(d)``, applied by indices instead of a matrix product if ``P`` is a permutation."""

    needs_equal_widths: ClassVar[bool] = True
    _for_dense_groups: ClassVar[str] = "FullMap"

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        if port.group.dense:
            raise ValueError(
                f"{type(self).__name__} relaxes permutations and scales, but the port's group is that of all "
                f"invertible matrices; use {self._for_dense_groups}."
            )

    @abstractmethod
    def _element(self) -> tuple[Tensor | None, Tensor | None]:
        """Return ``P`` and ``d`` in the current mode, each None if it is the identity.

        ``P`` is a matrix while it is relaxed, and an index vector once it is rounded; ``d`` is by input channel.
        """

    def matrix(self) -> Tensor:
        """Return ``P diag(d)`` in the current mode. Shape ``[C, C]``."""
        p, d = self._element()
        if p is not None and p.ndim == 2:
            return p if d is None else p * d
        d = self._zero.new_ones(self.port.in_channels) if d is None else d
        p = torch.arange(len(d), device=d.device) if p is None else p
        return d.new_zeros(len(d), len(d)).scatter(1, p[:, None], d[p][:, None])  # differentiable in the scale

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map, in hard mode by indices instead of a product; see :meth:`StitchingMap.forward`."""
        self._check(x)
        p, d = self._element()
        if p is not None and p.ndim == 2:
            return self._apply_matrix(p if d is None else p * d, x)
        axis = self.port.axis % x.ndim
        if d is not None:
            d = d.to(x.dtype)  # otherwise autocast's half precision features would become single
            x = x * d.view([-1 if k == axis else 1 for k in range(x.ndim)])
        return x if p is None else x.index_select(axis, p)

    def extra_repr(self) -> str:
        """Return widths, axis and group, for ``repr``."""
        names = {"permutations": "permutations", "positive_scales": "scales", "signs": "signs"}
        acting = "+".join(name for flag, name in names.items() if getattr(self.port.group, flag)) or "trivial"
        return f"{super().extra_repr()}, group={acting}"


class GroupMap(_ElementMap):
    r"""The group of the port, relaxed: :math:`s = P\,\mathrm{diag}(d)` with ``P`` doubly stochastic.

    Soft mode is this matrix; :meth:`project` keeps ``P`` in the Birkhoff polytope, and the regularisation
    :math:`-\alpha \|P\|_F` is meant to attract it to the corners, the permutations (but see the note). Hard mode is the
    group element: ``P`` rounded to the nearest permutation, applied by indices. The scales follow the port:

    * positive scales only: ``d >= 0``;
    * signs only: ``d`` relaxed to [-1, 1], and in hard mode 1 or -1 (1 for 0);
    * both: any ``d``;
    * neither: there is no ``d``.

    Without permutations ``P`` is the identity and only ``d`` exists.

    The hard permutation is the int64 buffer ``assignment``: output ``i`` gets input ``assignment[i]``. Each use in hard
    mode compares ``weights`` with a copy of the last rounded ones, so that the buffer is never stale; loading a
    checkpoint also recomputes it. Rounding is deterministic, and hence equal on all ranks.

    Args:
        port: Equal widths, the axis, and the group, which must not be ``dense``.
        alpha: Weight of the regularisation, >= 0. The default is that of Godfrey et al.
        projection: Projection of ``P`` to the polytope: ``"sinkhorn"`` as there, or ``"euclidean"``, the nearest point.

    Attributes:
        weights: ``P``. Shape ``[C, C]``; None without permutations.
        scale: ``d``, by input channel; initialised as ones. Shape ``[C]``; None without scales and signs.
        assignment: See above. Shape ``[C]``, int64.

    Raises:
        ValueError: If widths differ, the port's group is dense, or an option is out of range.

    Note:
        The gradient of the regularisation is parallel to ``P``, and Sinkhorn's iterations undo any scaling of ``P``:
        the regularisation has an effect with the Euclidean projection only.

        The head start holds ``scale`` at 1, except for ports with signs: with fixed signs, half of the pairs
        would look worse than no match. Rounding is ``O(C^3)`` at worst on the CPU, 10 to 20 ms for 512 channels.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, appendix D.2; docs/theory/stitching.md, 2.2 to 2.4. The floor in
        Sinkhorn, the Euclidean projection, signs and ports without scales are additions.
    """

    weights: nn.Parameter | None
    scale: nn.Parameter | None
    assignment: Tensor

    def __init__(self, port: Port, alpha: float = 0.1, projection: Projection = "sinkhorn") -> None:
        super().__init__(port)
        check_numbers(">= 0", of="GroupMap", alpha=alpha)
        check_known("projection of GroupMap", projection, get_args(Projection))
        self.alpha = alpha
        self.projection = projection
        size = port.in_channels
        self.register_parameter("weights", None)
        self.register_parameter("scale", None)
        if port.group.permutations:
            self.weights = nn.Parameter(sinkhorn(torch.rand(size, size), _INITIAL_ITERATIONS))
        if port.group.positive_scales or port.group.signs:
            self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("assignment", torch.arange(size))
        self._rounded: Tensor | None = None  # the weights of the current assignment

    @torch.no_grad()
    def project(self) -> None:
        """Project ``P`` to the polytope and ``d`` to its range, in place; without gradients."""
        if self.weights is not None:
            self.weights.copy_(projected(self.weights, self.projection))
        if self.scale is not None:
            if not self.port.group.signs:
                self.scale.clamp_(min=0)
            elif not self.port.group.positive_scales:
                self.scale.clamp_(-1, 1)

    def regularization(self) -> Tensor:
        """Return ``-alpha`` times the Frobenius norm of the relaxed ``P``, in both modes; a scalar."""
        if self.weights is None:
            return super().regularization()
        norm: Tensor = torch.linalg.vector_norm(self.weights)
        return -self.alpha * norm

    def _fit(self, moments: FeatureMoments) -> None:
        assignment, scale = fits.assign(moments, self.port.group)
        if self.weights is not None:
            self.weights.copy_(torch.eye(len(assignment))[assignment])
        if self.scale is not None:
            self.scale.copy_(scale)
        self.refresh()

    def held_parameters(self) -> list[nn.Parameter]:
        """Return ``scale``, unless it contains signs; see the note above."""
        return [] if self.scale is None or self.port.group.signs else [self.scale]

    def undecayed_parameters(self) -> list[nn.Parameter]:
        """Return ``weights``: the projection would undo most of a decay, which then acts on the scales only."""
        return [] if self.weights is None else [self.weights]

    @torch.no_grad()
    def refresh(self) -> None:
        """Round ``P`` to ``assignment`` if it has changed, or a checkpoint was loaded."""
        if self.weights is None:
            return
        last, now = self._rounded, self.weights.detach()
        # Compare values rather than version counters, which miss writes through .data.
        if last is not None and (last.device, last.dtype) == (now.device, now.dtype) and torch.equal(last, now):
            return
        self.assignment.copy_(nearest_permutation(now))
        self._rounded = now.clone()

    def dimension(self) -> int:
        """Return the number of independent scales, ``C`` or 0; permutations and signs are discrete."""
        return self.port.in_channels if self.port.group.positive_scales else 0

    def extra_repr(self) -> str:
        """Return widths, axis, group and options, for ``repr``."""
        return f"{super().extra_repr()}, alpha={self.alpha:g}, projection={self.projection!r}"

    def _element(self) -> tuple[Tensor | None, Tensor | None]:
        if self.mode == "soft":
            return self.weights, self.scale
        self.refresh()
        scale: Tensor | None = self.scale
        if scale is not None and not self.port.group.positive_scales:
            scale = torch.where(scale < 0, -1.0, 1.0).to(scale.dtype)
        return None if self.weights is None else self.assignment, scale

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[no-untyped-call,arg-type]
        self._rounded = None  # the checkpoint's assignment may be older than its weights
        if self.mode == "hard":
            self.refresh()


class SoftSortMap(_ElementMap):
    r"""A permutation relaxed by sorting scores: :math:`s = \mathrm{SoftSort}(q)\,\mathrm{diag}(e^{l})`.

    ``2 C`` degrees of freedom, or ``C`` if the port has no positive scales and there is no ``l``. Hard mode is the
    permutation that sorts the scores in descending order, the largest entry of each row (ties in the order of
    the channels). Signs of a port are ignored.

    Args:
        port: Equal widths, the axis, and the group: with permutations, not dense.
        tau: Temperature of the sort, in units of the scores, > 0. Default ``1/C``: initial scores are uniform
            in [-1, 1], so that about one neighbour on either side has weight.

    Attributes:
        scores: ``q``. Shape ``[C]``.
        log_scale: ``l``, by input channel; initialised as zeros. Shape ``[C]``; None without positive scales.

    Raises:
        ValueError: If widths differ, the group is dense or without permutations, or ``tau`` is out of range.

    References:
        Prillo and Eisenschlos (2020), arXiv:2006.16038; as a stitching map Godfrey et al. (2022), arXiv:2205.14258,
        appendix D.2.
    """

    log_scale: nn.Parameter | None

    def __init__(self, port: Port, tau: float | None = None) -> None:
        super().__init__(port)
        if not port.group.permutations:
            raise ValueError("SoftSortMap needs a port with permutations; use GroupMap, which works without.")
        check_numbers("> 0", optional=True, of="SoftSortMap", tau=tau)
        size = port.in_channels
        self.tau = 1 / size if tau is None else tau
        self.scores = nn.Parameter(2 * torch.rand(size) - 1)
        self.register_parameter("log_scale", None)
        if port.group.positive_scales:
            self.log_scale = nn.Parameter(torch.zeros(size))

    def extra_repr(self) -> str:
        """Return widths, axis, group and temperature, for ``repr``."""
        return f"{super().extra_repr()}, tau={self.tau:g}"

    def _element(self) -> tuple[Tensor | None, Tensor | None]:
        scale = None if self.log_scale is None else self.log_scale.exp()
        if self.mode == "soft":
            return soft_sort(self.scores, self.tau), scale
        # Not the argmax of the rows, which is not a permutation if there are ties.
        return self.scores.detach().argsort(descending=True, stable=True), scale

    def _fit(self, moments: FeatureMoments) -> None:
        """Initialise with evenly spaced scores that sort into the best permutation, and with nonzero scales."""
        assignment, scale = fits.assign(moments, replace(self.port.group, signs=False))
        # The range of the random initialisation; row i of the sort picks the i-th largest score.
        self.scores[assignment.to(self.scores.device)] = torch.linspace(1, -1, len(scale)).to(self.scores)
        if self.log_scale is not None:
            largest = scale.max() if scale.max() > 0 else scale.new_ones(())
            self.log_scale.copy_(scale.clamp_min(_SMALLEST_SCALE * largest).log())


class AssignmentMap(_ElementMap, FittedMap):
    r"""The untrained group element ``P D`` that minimises :math:`\sum_m \|y_m - s x_m\|^2`, by linear assignment.

    The port determines ``d``: with positive scales ``d >= 0`` (0 for a pair with a negative inner product, which
    no positive scale improves), with scales and signs any ``d``, with signs only 1 or -1, otherwise 1. The scale of a
    dead input is 1. The optimum over all elements is exact.

    Args:
        port: Equal widths, the axis, and the group, which must not be ``dense``.

    Attributes:
        assignment: Output ``i`` gets input ``assignment[i]``. Shape ``[C]``, int64.
        scale: ``d``, by input channel. Shape ``[C]``.

    Raises:
        ValueError: If widths differ or the group is dense.

    References:
        docs/theory/stitching.md, 2.5; for permutations alone it is the activation matching of Ainsworth et al.
        (2023), arXiv:2209.04836, section 3.1.
    """

    _for_dense_groups: ClassVar[str] = "LeastSquaresMap"

    assignment: Tensor
    scale: Tensor

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.register_buffer("assignment", torch.arange(port.in_channels))
        self.register_buffer("scale", torch.ones(port.in_channels))

    def dimension(self) -> int:
        """Return the number of fitted scales, ``C`` or 0."""
        return self.port.in_channels if self.port.group.positive_scales else 0

    def _element(self) -> tuple[Tensor | None, Tensor | None]:
        self._check_fitted()
        group = self.port.group
        scale = self.scale if group.positive_scales or group.signs else None
        return self.assignment if group.permutations else None, scale

    def _fit(self, moments: FeatureMoments) -> None:
        assignment, scale = fits.assign(moments, self.port.group)
        self.assignment.copy_(assignment)
        self.scale.copy_(scale)
