"""Convolutions on the group p4 of translations and rotations by 90 degrees.

Features on the group are ``[N, 4 C, H, W]``: channel ``g C + c`` is feature ``c`` at rotation ``g``, in the frame
of the image. Rotating the image by 90 degrees rotates each map and moves the one at ``g`` to ``g + 1``; a translation
shifts all maps equally.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_features, check_integers, check_kernel, check_known
from lightning_sym.layers.circular_conv import circular_conv2d, he_uniform

ROTATIONS = 4
KINDS = ("lifting", "full", "pointwise", "separable", "depthwise_separable")

GroupConvKind = Literal["lifting", "full", "pointwise", "separable", "depthwise_separable"]


def rotated(filters: Tensor) -> Tensor:
    """Rotate filters by 0, 90, 180 and 270 degrees, counter-clockwise.

    Args:
        filters: Shape ``[..., k, k]``.

    Returns:
        Shape ``[4, ..., k, k]``.
    """
    return torch.stack([torch.rot90(filters, turns, (-2, -1)) for turns in range(ROTATIONS)])


def relative(weights: Tensor) -> Tensor:
    """Expand weights that depend on the difference of two rotations to all pairs of rotations.

    Args:
        weights: Shape ``[4, ...]``.

    Returns:
        ``weights[(h - g) % 4]`` at ``[g, h]``. Shape ``[4, 4, ...]``.
    """
    return torch.stack([torch.roll(weights, turns, 0) for turns in range(ROTATIONS)])


def by_rotation(x: Tensor) -> Tensor:
    """Reshape features ``[N, 4 C, H, W]`` to ``[N, 4, C, H, W]``."""
    return x.reshape(len(x), ROTATIONS, x.shape[1] // ROTATIONS, *x.shape[2:])


class GroupConv(nn.Module):
    r"""A convolution that is equivariant to translations and rotations by 90 degrees.

    With ``*`` the circular convolution and :math:`\rho_g` the rotation of a filter by g quarter turns:

    - ``lifting``, from images to features on the group: :math:`y[g] = b + (\rho_g W) * x`;
    - ``full``: :math:`y[g] = b + \sum_h (\rho_g W_{(h - g) \bmod 4}) * x[h]`;
    - ``pointwise``: :math:`y[g] = b + (\rho_g W) * x[g]`, which does not mix rotations;
    - ``separable``: depthwise over space, :math:`s[h] = b_s + (\rho_h w) * x[h]`, then over rotations and channels,
      :math:`y[g, c'] = b[c'] + \sum_{c, h} V[c', c, (h - g) \bmod 4]\, s[h, c]`;
    - ``depthwise_separable``: the same s, then depthwise over rotations,
      :math:`r[g, c] = b_r[c] + \sum_h v[c, (h - g) \bmod 4]\, s[h, c]`, then over channels,
      :math:`y[g, c'] = b[c'] + \sum_c P[c', c]\, r[g, c]`.

    Parameters: ``C' C k^2 + C'`` (lifting, pointwise), ``4 C' C k^2 + C'`` (full), ``C k^2 + C + 4 C' C + C'``
    (separable), ``C k^2 + C + 4 C + C + C' C + C'`` (depthwise separable). Spatial filters are He-uniform by their own
    fan-in; V is drawn from ``U(-sqrt(3/(4C)), sqrt(3/(4C)))``, P from ``U(-sqrt(3/C), sqrt(3/C))``, v is 1/4; biases
    are 0. Uses torch's global generator. (In the published code all entries of V start at ``1 / (4 sqrt(C))``: all
    features are then equal, and nearly nine in ten deep ReLU networks start with the same output for all inputs.)

    Args:
        in_channels: ``C`` per rotation: features have ``4 C`` channels (``C`` with ``lifting``).
        out_channels: ``C'`` per rotation: the result has ``4 C'`` channels.
        kind: As above.
        kernel_size: ``k``, odd.

    Attributes:
        weight: For lifting and pointwise W ``[C', C, k, k]``; for full ``[C', 4 C, k, k]`` with
            :math:`W_h[c', c]` at ``[c', h C + c]``; V ``[C', C, 4]``; P ``[C', C]``.
        bias: b, shape ``[C']``.
        spatial_weight: w of the separable kinds, shape ``[C, k, k]``; otherwise None.
        spatial_bias: b_s, shape ``[C]``, or None.
        rotation_weight: v of the kind depthwise separable, shape ``[C, 4]``; otherwise None.
        rotation_bias: b_r, shape ``[C]``, or None.

    Raises:
        ValueError: If an argument is out of range; in the forward, if the number of channels is wrong.

    References:
        Cohen and Welling (2016), "Group Equivariant Convolutional Networks", arXiv:1602.07576; Knigge, Romero, Bekkers
        (2022), "Exploiting Redundancy: Separable Group Convolutional Networks on Lie Groups", arXiv:2110.13059;
        docs/theory/relaxed_layers.md, 1.6. The published code of van der Ouderaa et al. (2023) stores each map in its
        own rotated frame instead, in which all kinds but pointwise lose translation equivariance.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kind: GroupConvKind = "pointwise", kernel_size: int = 3
    ) -> None:
        super().__init__()
        check_known("kind of GroupConv", kind, KINDS)
        check_integers(of=self, in_channels=in_channels, out_channels=out_channels)
        check_kernel(self, kernel_size)
        self.in_channels, self.out_channels, self.kind, self.kernel_size = in_channels, out_channels, kind, kernel_size
        area = kernel_size**2
        for name in ("spatial_weight", "spatial_bias", "rotation_weight", "rotation_bias"):
            self.register_parameter(name, None)
        if kind in ("lifting", "pointwise", "full"):
            inputs = in_channels * (ROTATIONS if kind == "full" else 1)
            weight = he_uniform(torch.empty(out_channels, inputs, kernel_size, kernel_size), inputs * area)
        else:
            spatial = torch.empty(in_channels, kernel_size, kernel_size)
            self.spatial_weight = nn.Parameter(he_uniform(spatial, area))
            self.spatial_bias = nn.Parameter(torch.zeros(in_channels))
            if kind == "separable":
                bound = (3 / (ROTATIONS * in_channels)) ** 0.5
                weight = nn.init.uniform_(torch.empty(out_channels, in_channels, ROTATIONS), -bound, bound)
            else:
                self.rotation_weight = nn.Parameter(torch.full((in_channels, ROTATIONS), 1 / ROTATIONS))
                self.rotation_bias = nn.Parameter(torch.zeros(in_channels))
                bound = (3 / in_channels) ** 0.5
                weight = nn.init.uniform_(torch.empty(out_channels, in_channels), -bound, bound)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def filters(self) -> Tensor:
        """Return the filters of the kinds lifting, pointwise and full for all rotations of the output.

        Returns:
            Shape ``[4, C', C, k, k]``; for full ``[4, C', 4 C, k, k]``.

        Raises:
            ValueError: If the kind is separable.
        """
        if self.kind in ("lifting", "pointwise"):
            return rotated(self.weight)
        if self.kind != "full":
            raise ValueError(f"GroupConv of kind {self.kind!r} has no joint filters; use spatial_weight and weight.")
        shape = (self.out_channels, ROTATIONS, self.in_channels, self.kernel_size, self.kernel_size)
        rotations = rotated(self.weight.view(shape))  # [g, C', h - g, C, k, k]
        shifted = [torch.roll(filters, turns, 1) for turns, filters in enumerate(rotations)]
        return torch.stack(shifted).flatten(2, 3)

    def spatial(self, x: Tensor) -> Tensor:
        """Return s, the first stage of the separable kinds. Shape ``[N, 4 C, H, W]``.

        Raises:
            ValueError: If the kind is not separable.
        """
        if self.spatial_weight is None or self.spatial_bias is None:
            raise ValueError(f"GroupConv of kind {self.kind!r} has no spatial stage; only the separable kinds do.")
        filters = rotated(self.spatial_weight).flatten(0, 1)[:, None]
        return circular_conv2d(x, filters, torch.cat([self.spatial_bias] * ROTATIONS), groups=len(filters))

    def rotation(self, spatial: Tensor) -> Tensor:
        """Return r, the second stage of the kind depthwise separable, from s. Shape ``[N, 4 C, H, W]``.

        Raises:
            ValueError: If the kind is not depthwise separable.
        """
        if self.rotation_weight is None or self.rotation_bias is None:
            raise ValueError(f"GroupConv of kind {self.kind!r} has no stage of rotations; only depthwise_separable.")
        mixing = relative(self.rotation_weight.mT)  # [g, h, C]
        mixed = torch.einsum("nhcij,ghc->ngcij", by_rotation(spatial), mixing)
        return (mixed + self.rotation_bias[:, None, None]).flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, 4 C', H, W]`` for ``[N, 4 C, H, W]``, or for ``[N, C, H, W]`` with ``lifting``."""
        check_features(self, x, self.in_channels * (1 if self.kind == "lifting" else ROTATIONS))
        if self.kind == "depthwise_separable":
            hidden = by_rotation(self.rotation(self.spatial(x))).flatten(0, 1)  # rotations as samples
            y = F.conv2d(hidden, self.weight[:, :, None, None], self.bias)
            return y.reshape(len(x), ROTATIONS * self.out_channels, *x.shape[2:])
        bias = torch.cat([self.bias] * ROTATIONS)
        if self.kind == "separable":
            mixing = relative(self.weight.movedim(-1, 0))  # [g, h, C', C]
            matrix = mixing.transpose(1, 2).flatten(2, 3).flatten(0, 1)
            return F.conv2d(self.spatial(x), matrix[:, :, None, None], bias)
        groups = ROTATIONS if self.kind == "pointwise" else 1
        return circular_conv2d(x, self.filters().flatten(0, 1), bias, groups=groups)

    def extra_repr(self) -> str:
        """Return channels, kind and kernel size, for ``repr``."""
        return f"{self.in_channels}, {self.out_channels}, kind={self.kind!r}, kernel_size={self.kernel_size}"


class GroupLift(nn.Module):
    """Lift images to features on p4: four copies, as ``[N, 4 C, H, W]``.

    A pointwise :class:`GroupConv` after it equals one of kind ``lifting``: networks lift once and then use uniform
    blocks.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, 4 C, H, W]`` for ``[N, C, H, W]``."""
        return x.repeat(1, ROTATIONS, 1, 1)


class GroupMax(nn.Module):
    """Maximum over a feature's four rotations at each position; the gradient goes to the first of ties.

    Features on p4 become maps that rotate with the image; on a grid of one point, they are invariant.

    Raises:
        ValueError: In the forward, if the number of channels is not a multiple of 4.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C, H, W]`` for ``[N, 4 C, H, W]``."""
        if x.ndim != 4 or x.shape[1] % ROTATIONS:
            raise ValueError(
                f"GroupMax expects features [N, 4 C, H, W], got {list(x.shape)}; lift them first, by GroupLift or "
                "GroupConv."
            )
        return by_rotation(x).max(1).values
