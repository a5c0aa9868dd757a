"""Equivariant subsampling."""

from typing import Literal

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_known


class PolyphasePool(nn.Module):
    """Subsampling by 2 that keeps, for each sample, the polyphase component with the largest norm.

    The four components are ``x[..., a::2, b::2]``. Shifting a sample circularly by s shifts its output by floor(s/2)
    or ceil(s/2). Rotating it by 90 degrees rotates the output up to such a shift. Neither depends on the rest of the
    batch. Derivatives treat the choice as constant.

    This holds if one component has the largest norm. At an exact tie the first of the largest in the order (a, b) =
    (0, 0), (1, 0), (0, 1), (1, 1) is kept, independently of the shift. If tied components differ by more than a shift,
    equivariance is lost. Features with few values, such as integer images without a layer before, tie
    easily under ``"max"``, and seldom under ``"l2"``.

    Args:
        norm: ``"max"``, the largest magnitude, or ``"l2"``; over all channels and positions of a sample. Features of
            :class:`~lightning_sym.layers.GroupConv` need no special treatment: their channels hold all four rotations.
        groups: Consecutive groups of channels of equal size that choose separately, >= 1. With more than one, maps
            of different groups may move by different amounts under a shift of one pixel, and later layers that mix
            them are not equivariant; as many groups as channels give the paper's choice per feature map.

    Raises:
        ValueError: If an argument is out of range; in the forward, if height, width or channels are not divisible.

    References:
        Chaman and Dokmanic (2021), "Truly shift-invariant convolutional neural networks", arXiv:2011.14214;
        docs/theory/relaxed_layers.md, 2.
    """

    def __init__(self, norm: Literal["max", "l2"] = "max", groups: int = 1) -> None:
        super().__init__()
        check_known("norm of PolyphasePool", norm, ("max", "l2"))
        check_integers(of=self, groups=groups)
        self.norm, self.groups = norm, groups

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C, H/2, W/2]``, contiguous, for ``[N, C, H, W]``."""
        if x.ndim != 4 or x.shape[2] % 2 or x.shape[3] % 2:
            raise ValueError(
                f"PolyphasePool halves height and width, and needs features [N, C, H, W] with even ones, got "
                f"{list(x.shape)}; pad the images to a power of two, or pool less often."
            )
        batch, channels, height, width = x.shape
        if channels % self.groups:
            raise ValueError(
                f"PolyphasePool with {self.groups} groups of channels needs a multiple of them, got {channels}; "
                "use groups=1."
            )
        x = x.reshape(batch * self.groups, channels // self.groups, height, width)
        # [N, b, a] -> b * 2 + a
        choice = self._scores(x.detach()).mT.flatten(1).argmax(1)
        rows = torch.arange(0, height, 2, device=x.device) * width
        columns = torch.arange(0, width, 2, device=x.device)
        kept = (rows[:, None] + columns).flatten() + (choice % 2 * width + choice // 2)[:, None]
        y = x.flatten(2).gather(2, kept[:, None].expand(-1, x.shape[1], -1))
        return y.view(batch, channels, height // 2, width // 2)

    def _scores(self, x: Tensor) -> Tensor:
        """Return the norms of the components, up to a monotonic function. Shape ``[N, 2, 2]``."""
        # Over channels first: this is contiguous, and reduces the strided part.
        over_channels = x.abs().amax(1) if self.norm == "max" else x.square().sum(1)
        height, width = over_channels.shape[1:]
        components = over_channels.view(len(x), height // 2, 2, width // 2, 2)
        return components.amax((1, 3)) if self.norm == "max" else components.sum((1, 3))

    def extra_repr(self) -> str:
        """Return norm and groups, for ``repr``."""
        return f"norm={self.norm!r}, groups={self.groups}"
