"""Second moments of paired features in one pass, from which the best stitching maps follow."""

import torch
from torch import Tensor

from lightning_sym._checks import check_integers
from lightning_sym._distributed import summed, wide

_ROWS = 65_536  # positions per cast to double precision, which bounds its memory


class FeatureMoments:
    r"""Streaming sums of products of features ``x``, the input of a map, and ``y``, its desired output.

    They determine the least squares problem :math:`\min_s \sum_m \|y_m - s\,x_m\|^2` for every family of maps ``s``,
    exactly and in one pass for any batches. Features are not centred, as the maps have no bias.

    Args:
        in_channels: Channels ``C1`` of ``x``, >= 1.
        out_channels: Channels ``C2`` of ``y``, >= 1.
        device: Device of the sums; default the CPU. Features are moved there.

    Attributes:
        xx: :math:`\sum_m x_m x_m^\top`. Shape ``[C1, C1]``, float64 (float32 on MPS, which has no float64).
        yx: :math:`\sum_m y_m x_m^\top`. Shape ``[C2, C1]``, same dtype.
        yy: Diagonal of :math:`\sum_m y_m y_m^\top`. Shape ``[C2]``, same dtype.
        count: Number of positions ``m`` (samples times pixels or tokens) seen.
        reduced: Whether the sums are already over all ranks.

    Raises:
        ValueError: If a width is not an integer >= 1.

    References:
        docs/theory/stitching.md, 2.5.

    Example:
        >>> moments = FeatureMoments(2, 1)
        >>> moments.update(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([[3.0], [5.0]]))
        >>> moments.yx
        tensor([[ 8., 10.]], dtype=torch.float64)
    """

    def __init__(self, in_channels: int, out_channels: int, device: torch.device | str | None = None) -> None:
        check_integers(in_channels=in_channels, out_channels=out_channels)
        self.in_channels = in_channels
        self.out_channels = out_channels
        device = torch.device(device or "cpu")
        dtype = wide(device)
        self.xx = torch.zeros(in_channels, in_channels, dtype=dtype, device=device)
        self.yx = torch.zeros(out_channels, in_channels, dtype=dtype, device=device)
        self.yy = torch.zeros(out_channels, dtype=dtype, device=device)
        self.count = 0
        self.reduced = False

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor, axis: int = 1) -> None:
        """Add a batch.

        Args:
            x: Features with ``C1`` channels along ``axis``; floating, any number of axes.
            y: Features with ``C2`` channels along ``axis`` and otherwise the shape of ``x``; from the same inputs,
                row by row.
            axis: Axis of the channels: 1 for ``[N, C, H, W]``, -1 for tokens ``[N, T, C]``.

        Raises:
            RuntimeError: If the sums were already reduced over ranks.
            TypeError: If a dtype is not floating.
            ValueError: If shapes do not match, or a value is not finite; the sums are then unchanged.
        """
        if self.reduced:
            raise RuntimeError(
                "FeatureMoments.update was called after reduce, and would add one rank's batch to the sum "
                "over all; update first, or start new moments."
            )
        x, y = self._rows("x", x, self.in_channels, axis), self._rows("y", y, self.out_channels, axis)
        if x.shape[:-1] != y.shape[:-1]:
            raise ValueError(
                "x and y must have equal shapes except for the channels, got (channels moved to the end) "
                f"{list(x.shape)} and {list(y.shape)}; give both networks the same inputs and cut them where the "
                "resolution is the same."
            )
        x, y = x.reshape(-1, self.in_channels), y.reshape(-1, self.out_channels)
        sums = [torch.zeros_like(total) for total in (self.xx, self.yx, self.yy)]
        with torch.autocast(self.xx.device.type, enabled=False):
            for rows, targets in zip(torch.split(x, _ROWS), torch.split(y, _ROWS), strict=True):
                a, b = rows.to(self.xx), targets.to(self.xx)
                sums[0] += a.T @ a
                sums[1] += b.T @ a
                sums[2] += b.square().sum(0)
        # The diagonals suffice: a value that is not finite makes its channel's square so.
        for name, squares in (("x", sums[0].diagonal()), ("y", sums[2])):
            if not bool(squares.isfinite().all()):
                channel = int((~squares.isfinite()).nonzero()[0])
                raise ValueError(
                    f"{name} has values that are not finite in channel {channel}; look for overflow, above all in "
                    "half precision."
                )
        self.xx += sums[0]
        self.yx += sums[1]
        self.yy += sums[2]
        self.count += len(x)

    def part(self, x: Tensor, y: Tensor) -> "FeatureMoments":
        """Return the moments of selected channels of ``x`` and ``y``.

        Args:
            x: Indices of channels. int64, on any device.
            y: Indices of channels. int64, on any device.
        """
        part = FeatureMoments(len(x), len(y), self.xx.device)
        x, y = x.to(self.xx.device), y.to(self.xx.device)
        part.xx, part.yx, part.yy = self.xx[x][:, x], self.yx[y][:, x], self.yy[y]
        part.count, part.reduced = self.count, self.reduced
        return part

    def reduce(self) -> None:
        """Sum over all ranks of ``torch.distributed``, in place; a second call has no effect.

        Call it on every rank, also with one process, after the last update. With NCCL the sums must be on a GPU.
        """
        if self.reduced:
            return
        self.reduced = True
        parts = (self.xx, self.yx, self.yy)
        flat = summed(torch.cat([*(part.flatten() for part in parts), self.yy.new_tensor([self.count])]))
        *sums, count = torch.split(flat, [*(part.numel() for part in parts), 1])
        for part, total in zip(parts, sums, strict=True):
            part.copy_(total.view_as(part))
        self.count = round(float(count))

    def _rows(self, name: str, features: Tensor, channels: int, axis: int) -> Tensor:
        """Move the channels to the last axis, after checking their number."""
        if not features.dtype.is_floating_point:
            raise TypeError(f"{name} must be a floating tensor, got {features.dtype}.")
        if not -features.ndim <= axis < features.ndim:
            raise ValueError(f"axis must be an axis of {name}, got {axis} for shape {list(features.shape)}.")
        if features.shape[axis] != channels:
            raise ValueError(
                f"{name} must have {channels} channels along axis {axis}, got shape {list(features.shape)}."
            )
        return features.detach().movedim(axis, -1)
