"""Base of stitching maps: a matrix between the channels of two networks, in a soft and a hard form."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_integers, check_known
from lightning_sym.stitching.maps.moments import FeatureMoments
from lightning_sym.symmetry import ChannelGroup, IntertwinerGroup

Mode = Literal["soft", "hard"]
PERMUTATIONS = IntertwinerGroup("permutations", positive_scales=False, signs=False)


@dataclass(frozen=True)
class Port:
    """A tensor that crosses a stitched cut: its widths on both sides and the group that acts on it.

    The group is the image under phi of the intertwiner group of the activation before the cut: for ReLU
    permutations and positive scales, for tanh permutations and signs, for GELU permutations only, for a linear
    network all invertible matrices. :class:`~lightning_sym.stitching.GroupMap` and
    :class:`~lightning_sym.stitching.AssignmentMap` use the group; other families need only widths and axis.

    Args:
        in_channels: Channels of the bottom network, >= 1.
        out_channels: Channels that the top network expects, >= 1.
        axis: Axis of the channels: 1 for ``[N, C, H, W]``, -1 for tokens ``[N, T, C]``.
        group: Group on the channels; default permutations only.
        blocks: Group on blocks of channels, if it mixes channels within blocks, as for attention heads and residual
            streams; default none.

    Raises:
        ValueError: If a width is not an integer >= 1, or ``axis`` is no integer.
    """

    in_channels: int
    out_channels: int
    axis: int = 1
    group: IntertwinerGroup = PERMUTATIONS
    blocks: ChannelGroup | None = None

    def __post_init__(self) -> None:
        check_integers(of="a port", in_channels=self.in_channels, out_channels=self.out_channels)
        if isinstance(self.axis, bool) or not isinstance(self.axis, int):
            raise ValueError(f"axis of a port must be an integer, 1 for images or -1 for tokens, got {self.axis!r}.")


class StitchingMap(nn.Module, ABC):
    """A linear map without bias from the channels of one network to those of another; each family is a subclass.

    A new family implements :meth:`matrix` and makes its parameters in the constructor, with the port as the first
    argument.

    The mode is explicit and does not follow :meth:`train` and :meth:`eval`: ``"soft"`` in training, ``"hard"`` for the
    exact member of the family, for example a permutation. Families without rounding are identical in both. Checkpoints
    do not contain the mode.

    Args:
        port: Widths, axis and group of the features.

    Attributes:
        needs_equal_widths: Class attribute: maps of this family are square.
        fitted: Class attribute: the map is not trained but fitted by :meth:`init_from_moments`; use before that raises
            a ``RuntimeError``.
        port: As given.

    Raises:
        ValueError: If the widths differ and the family needs equal ones.

    References:
        Godfrey et al. (2022), "On the Symmetries of Deep Learning Models and their Internal Representations",
        arXiv:2205.14258, section 4 and appendix D.2; docs/theory/stitching.md, 2.1.
    """

    needs_equal_widths: ClassVar[bool] = False
    fitted: ClassVar[bool] = False

    _zero: Tensor

    def __init__(self, port: Port) -> None:
        super().__init__()
        if self.needs_equal_widths and port.in_channels != port.out_channels:
            raise ValueError(
                f"{type(self).__name__} needs equal widths, got {port.in_channels} channels in and "
                f"{port.out_channels} out; use FullMap, LowRankMap or LassoMap."
            )
        self.port = port
        self._mode: Mode = "soft"
        # Tracks device and dtype, also for families without parameters.
        self.register_buffer("_zero", torch.zeros(()), persistent=False)

    @property
    def mode(self) -> Mode:
        """``"soft"`` for training, or ``"hard"``, rounded; setting ``"hard"`` calls :meth:`refresh`."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        check_known("mode of a stitching map", mode, ("soft", "hard"))
        self._mode = mode
        if mode == "hard":
            self.refresh()

    @abstractmethod
    def matrix(self) -> Tensor:
        """Return the matrix in the current mode. Shape ``[C2, C1]``; differentiable in soft mode.

        ``C1`` are the port's input, ``C2`` its output channels; dtype and device are the map's.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map along the port's axis.

        Args:
            x: Features with ``C1`` channels along that axis; floating.

        Returns:
            Features with ``C2`` channels along that axis and otherwise the shape of ``x``.

        Raises:
            ValueError: If the number of channels along that axis is wrong.
        """
        self._check(x)
        return self._apply_matrix(self.matrix(), x)

    def project(self) -> None:
        """Project the parameters to their feasible set, in place; call it after each optimizer step."""

    def regularization(self) -> Tensor:
        """Return the regularisation loss: a scalar on the map's device, default 0, the same in both modes."""
        return self._zero.new_zeros(())

    def init_from_moments(self, moments: FeatureMoments) -> None:
        """Initialise by the family's best least squares fit to features.

        Args:
            moments: Moments of the input features and of the desired output features; reduced over ranks.

        Raises:
            NotImplementedError: If the family has no such initialisation.
            ValueError: If the widths are not the port's, or the moments are empty.
        """
        port, widths = self.port, (moments.in_channels, moments.out_channels)
        if widths != (port.in_channels, port.out_channels):
            raise ValueError(
                f"{type(self).__name__} maps {port.in_channels} to {port.out_channels} channels, got moments of "
                f"{widths[0]} and {widths[1]}; gather them at the map's own port."
            )
        if not moments.count:
            raise ValueError("The moments are empty; update them with features of at least one batch.")
        with torch.no_grad():
            self._fit(moments)

    def _fit(self, moments: FeatureMoments) -> None:
        """Set parameters and buffers to the best fit of checked moments; without gradients."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot start from moments of features; leave this start out, or override "
            "init_from_moments."
        )

    def held_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that stay at their initial value in the head start, the first part of training."""
        return []

    def undecayed_parameters(self) -> list[nn.Parameter]:
        """Return the parameters without weight decay."""
        return []

    def refresh(self) -> None:
        """Recompute buffers for hard mode, if the parameters have changed."""

    def dimension(self) -> int:
        """Return the family's degrees of freedom; by default the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def sparsity(self, threshold: float = 1e-3) -> float:
        """Return the fraction of entries of the hard matrix that are at most ``threshold`` in magnitude.

        For a permutation with scales it is ``1 - 1/C``.

        Args:
            threshold: In the units of the matrix, >= 0. The default is that of Godfrey et al., eq. D.1.

        Returns:
            In [0, 1].

        Raises:
            ValueError: If ``threshold`` is negative.
        """
        if not threshold >= 0:
            raise ValueError(f"threshold must be >= 0, got {threshold}.")
        mode = self.mode
        try:
            self.mode = "hard"
            return float((self.matrix().abs() <= threshold).double().mean())
        finally:
            self.mode = mode

    def extra_repr(self) -> str:
        """Return widths and axis, for ``repr``."""
        return f"{self.port.in_channels}, {self.port.out_channels}, axis={self.port.axis}"

    def _check(self, x: Tensor) -> None:
        """Raise an error unless features have the port's channels."""
        axis, channels = self.port.axis, self.port.in_channels
        if not -x.ndim <= axis < x.ndim or x.shape[axis] != channels:
            raise ValueError(
                f"{type(self).__name__} expects {channels} channels along axis {axis}, got features of shape "
                f"{list(x.shape)}; make the port from the features that cross the cut."
            )

    def _apply_matrix(self, matrix: Tensor, x: Tensor) -> Tensor:
        """Return a matrix times features along the port's axis."""
        axis = self.port.axis % x.ndim
        if axis == x.ndim - 1:
            return F.linear(x, matrix)
        if axis == 1 and x.ndim == 4:
            return F.conv2d(x, matrix[:, :, None, None])
        return F.linear(x.movedim(axis, -1), matrix).movedim(-1, axis)


class FittedMap(StitchingMap):
    """A map without trainable parameters, which is fitted to moments and then constant.

    Raises:
        RuntimeError: From every use before :meth:`init_from_moments` or loading the checkpoint of a fitted map.
    """

    fitted: ClassVar[bool] = True

    _fit_done: Tensor

    def __init__(self, port: Port) -> None:
        super().__init__(port)
        self.register_buffer("_fit_done", torch.zeros((), dtype=torch.int64))
        self._usable = False  # copy of the buffer's value that needs no GPU synchronisation

    def init_from_moments(self, moments: FeatureMoments) -> None:
        """Fit the map; see :meth:`StitchingMap.init_from_moments`."""
        super().init_from_moments(moments)
        self._fit_done.fill_(1)
        self._usable = True

    def _check_fitted(self) -> None:
        if not self._usable:
            raise RuntimeError(
                f"{type(self).__name__} is not fitted yet; call init_from_moments with the FeatureMoments of its port, "
                "or load a checkpoint of a fitted one."
            )

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[no-untyped-call,arg-type]
        self._usable = bool(self._fit_done)
