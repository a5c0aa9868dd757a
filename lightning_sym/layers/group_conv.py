"""Convolutions on the groups p4 of translations and quarter turns, and p4m, which has reflections as well.

Features on the group are ``[N, G C, H, W]``: channel ``g C + c`` is feature ``c`` at element ``g`` of the point group,
in the frame of the image. Elements 0 to 3 are as many quarter turns, 4 to 7 the same after a transposition (p4m). An
element ``k`` moves each map of its image, and the one at ``g`` to ``k g``; a translation shifts all maps equally.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_features, check_integers, check_kernel, check_known
from lightning_sym.layers.circular_conv import circular_conv2d, he_uniform

KINDS = ("lifting", "full", "pointwise", "separable", "depthwise_separable")

GroupConvKind = Literal["lifting", "full", "pointwise", "separable", "depthwise_separable"]
PlaneGroup = Literal["p4", "p4m"]

ORDERS: dict[PlaneGroup, int] = {"p4": 4, "p4m": 8}


def inverse(element: int) -> int:
    """Return the number of the inverse of an element; reflections are their own."""
    return -element % 4 if element < 4 else element


def turned(x: Tensor, element: int, axes: tuple[int, int] = (-2, -1)) -> Tensor:
    """Move maps by an element of a point group: a transposition for 4 to 7, then quarter turns counter-clockwise."""
    return torch.rot90(x.transpose(*axes) if element >= 4 else x, element % 4, axes)


def shifted(x: Tensor, element: int, axis: int) -> Tensor:
    """Move the entries of an axis of a point group's elements.

    Args:
        x: With G entries along the axis.
        element: g.
        axis: Along the elements.

    Returns:
        ``x[g^-1 h]`` at h, of the same shape.
    """
    halves = torch.split(x, 4, axis)  # turns, and those after a transposition
    if element >= 4:
        halves = tuple(half.flip(axis).roll(1, axis) for half in reversed(halves))
    rolled = [half.roll(element % 4, axis) for half in halves]
    return rolled[0] if len(rolled) == 1 else torch.cat(rolled, axis)


def relative(weights: Tensor) -> Tensor:
    """Expand weights that depend on ``g^-1 h`` to all pairs of elements.

    Args:
        weights: Shape ``[G, ...]``.

    Returns:
        ``weights[g^-1 h]`` at ``[g, h]``. Shape ``[G, G, ...]``.
    """
    return torch.stack([shifted(weights, element, 0) for element in range(len(weights))])


class GroupConv(nn.Module):
    r"""A convolution that is equivariant to translations and quarter turns, and to reflections on p4m.

    With ``*`` the circular convolution and :math:`\rho_g W` a filter after one of G elements g of the point group:

    - ``lifting``, from images to features on the group: :math:`y[g] = b + (\rho_g W) * x`;
    - ``full``: :math:`y[g] = b + \sum_h (\rho_g W_{g^{-1} h}) * x[h]`;
    - ``pointwise``: :math:`y[g] = b + (\rho_g W) * x[g]`, which does not mix elements;
    - ``separable``: depthwise over space, :math:`s[h] = b_s + (\rho_h w) * x[h]`, then over elements and channels,
      :math:`y[g, c'] = b[c'] + \sum_{c, h} V[c', c, g^{-1} h]\, s[h, c]`;
    - ``depthwise_separable``: the same s, then depthwise over elements,
      :math:`r[g, c] = b_r[c] + \sum_h v[c, g^{-1} h]\, s[h, c]`, then over channels,
      :math:`y[g, c'] = b[c'] + \sum_c P[c', c]\, r[g, c]`.

    On p4, :math:`g^{-1} h` is the number (h - g) mod 4. Parameters: ``C' C k^2 + C'`` (lifting, pointwise),
    ``G C' C k^2 + C'`` (full), ``C k^2 + C + G C' C + C'`` (separable), ``C k^2 + C + G C + C + C' C + C'`` (depthwise
    separable). Spatial filters are He-uniform by their own fan-in; V is drawn from
    ``U(-sqrt(3/(G C)), sqrt(3/(G C)))``, P from ``U(-sqrt(3/C), sqrt(3/C))``, v is 1/G; biases are 0. Uses
    torch's global generator. (In the published code all entries of V start at ``1 / (4 sqrt(C))``: all features are
    then equal, and nearly nine in ten deep ReLU networks start with the same output for all inputs.)

    Args:
        in_channels: ``C`` per element: features have ``G C`` channels (``C`` with ``lifting``).
        out_channels: ``C'`` per element: the result has ``G C'`` channels.
        kind: As above.
        kernel_size: ``k``, odd.
        group: ``"p4"``: translations and quarter turns, G = 4. ``"p4m"``: also reflections, G = 8.

    Attributes:
        weight: For lifting and pointwise W ``[C', C, k, k]``; for full ``[C', G C, k, k]`` with
            :math:`W_h[c', c]` at ``[c', h C + c]``; V ``[C', C, G]``; P ``[C', C]``.
        bias: b, shape ``[C']``.
        spatial_weight: w of the separable kinds, shape ``[C, k, k]``; otherwise None.
        spatial_bias: b_s, shape ``[C]``, or None.
        rotation_weight: v of the kind depthwise separable, shape ``[C, G]``; otherwise None.
        rotation_bias: b_r, shape ``[C]``, or None.
        order: G.

    Raises:
        ValueError: If an argument is out of range; in the forward, if the number of channels is wrong.

    References:
        Cohen and Welling (2016), "Group Equivariant Convolutional Networks", arXiv:1602.07576; Knigge, Romero, Bekkers
        (2022), "Exploiting Redundancy: Separable Group Convolutional Networks on Lie Groups", arXiv:2110.13059;
        docs/theory/relaxed_layers.md, 1.6. The published code of van der Ouderaa et al. (2023) stores each map in its
        own rotated frame instead, in which all kinds but pointwise lose translation equivariance.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kind: GroupConvKind = "pointwise",
        kernel_size: int = 3,
        group: PlaneGroup = "p4",
    ) -> None:
        super().__init__()
        check_known("kind of GroupConv", kind, KINDS)
        check_known("group of GroupConv", group, ORDERS)
        check_integers(of=self, in_channels=in_channels, out_channels=out_channels)
        check_kernel(self, kernel_size)
        self.in_channels, self.out_channels, self.kind, self.kernel_size = in_channels, out_channels, kind, kernel_size
        self.group, self.order = group, ORDERS[group]
        area = kernel_size**2
        for name in ("spatial_weight", "spatial_bias", "rotation_weight", "rotation_bias"):
            self.register_parameter(name, None)
        if kind in ("lifting", "pointwise", "full"):
            inputs = in_channels * (self.order if kind == "full" else 1)
            weight = he_uniform(torch.empty(out_channels, inputs, kernel_size, kernel_size), inputs * area)
        else:
            spatial = torch.empty(in_channels, kernel_size, kernel_size)
            self.spatial_weight = nn.Parameter(he_uniform(spatial, area))
            self.spatial_bias = nn.Parameter(torch.zeros(in_channels))
            if kind == "separable":
                bound = (3 / (self.order * in_channels)) ** 0.5
                weight = nn.init.uniform_(torch.empty(out_channels, in_channels, self.order), -bound, bound)
            else:
                self.rotation_weight = nn.Parameter(torch.full((in_channels, self.order), 1 / self.order))
                self.rotation_bias = nn.Parameter(torch.zeros(in_channels))
                bound = (3 / in_channels) ** 0.5
                weight = nn.init.uniform_(torch.empty(out_channels, in_channels), -bound, bound)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def filters(self) -> Tensor:
        """Return the filters of the kinds lifting, pointwise and full for all elements of the output.

        Returns:
            Shape ``[G, C', C, k, k]``; for full ``[G, C', G C, k, k]``.

        Raises:
            ValueError: If the kind is separable.
        """
        if self.kind in ("lifting", "pointwise"):
            return self._turned(self.weight)
        if self.kind != "full":
            raise ValueError(f"GroupConv of kind {self.kind!r} has no joint filters; use spatial_weight and weight.")
        shape = (self.out_channels, self.order, self.in_channels, self.kernel_size, self.kernel_size)
        elements = self._turned(self.weight.view(shape))  # [g, C', g^-1 h, C, k, k]
        return torch.stack([shifted(filters, g, 1) for g, filters in enumerate(elements)]).flatten(2, 3)

    def _turned(self, filters: Tensor) -> Tensor:
        """Return filters after each element. Shape ``[G, ..., k, k]``."""
        return torch.stack([turned(filters, element) for element in range(self.order)])

    def by_element(self, x: Tensor) -> Tensor:
        """Reshape features ``[N, G C, H, W]`` to ``[N, G, C, H, W]``."""
        return x.reshape(len(x), self.order, x.shape[1] // self.order, *x.shape[2:])

    def spatial(self, x: Tensor) -> Tensor:
        """Return s, the first stage of the separable kinds. Shape ``[N, G C, H, W]``.

        Raises:
            ValueError: If the kind is not separable.
        """
        if self.spatial_weight is None or self.spatial_bias is None:
            raise ValueError(f"GroupConv of kind {self.kind!r} has no spatial stage; only the separable kinds do.")
        filters = self._turned(self.spatial_weight).flatten(0, 1)[:, None]
        return circular_conv2d(x, filters, torch.cat([self.spatial_bias] * self.order), groups=len(filters))

    def rotation(self, spatial: Tensor) -> Tensor:
        """Return r, the second stage of the kind depthwise separable, from s. Shape ``[N, G C, H, W]``.

        Raises:
            ValueError: If the kind is not depthwise separable.
        """
        if self.rotation_weight is None or self.rotation_bias is None:
            raise ValueError(f"GroupConv of kind {self.kind!r} has no stage of rotations; only depthwise_separable.")
        mixing = relative(self.rotation_weight.mT)  # [g, h, C]
        mixed = torch.einsum("nhcij,ghc->ngcij", self.by_element(spatial), mixing)
        return (mixed + self.rotation_bias[:, None, None]).flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, G C', H, W]`` for ``[N, G C, H, W]``, or for ``[N, C, H, W]`` with ``lifting``."""
        check_features(self, x, self.in_channels * (1 if self.kind == "lifting" else self.order))
        if self.kind == "depthwise_separable":
            hidden = self.by_element(self.rotation(self.spatial(x))).flatten(0, 1)  # elements as samples
            y = F.conv2d(hidden, self.weight[:, :, None, None], self.bias)
            return y.reshape(len(x), self.order * self.out_channels, *x.shape[2:])
        bias = torch.cat([self.bias] * self.order)
        if self.kind == "separable":
            mixing = relative(self.weight.movedim(-1, 0))  # [g, h, C', C]
            matrix = mixing.transpose(1, 2).flatten(2, 3).flatten(0, 1)
            return F.conv2d(self.spatial(x), matrix[:, :, None, None], bias)
        groups = self.order if self.kind == "pointwise" else 1
        return circular_conv2d(x, self.filters().flatten(0, 1), bias, groups=groups)

    def extra_repr(self) -> str:
        """Return channels, kind, kernel size and group, for ``repr``."""
        sizes = f"{self.in_channels}, {self.out_channels}, kind={self.kind!r}, kernel_size={self.kernel_size}"
        return f"{sizes}, group={self.group!r}"


class GroupLift(nn.Module):
    """Lift images to features on a group: a copy for each element, as ``[N, G C, H, W]``.

    A pointwise :class:`GroupConv` after it equals one of kind ``lifting``: networks lift once and then use uniform
    blocks.

    Args:
        group: ``"p4"``, G = 4, or ``"p4m"``, G = 8.
    """

    def __init__(self, group: PlaneGroup = "p4") -> None:
        super().__init__()
        check_known("group of GroupLift", group, ORDERS)
        self.order = ORDERS[group]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, G C, H, W]`` for ``[N, C, H, W]``."""
        return x.repeat(1, self.order, 1, 1)


class GroupMax(nn.Module):
    """Maximum over a feature's elements at each position; the gradient goes to the first of ties.

    Features on the group become maps that move with the image; on a grid of one point, they are invariant.

    Args:
        group: ``"p4"``, G = 4, or ``"p4m"``, G = 8.

    Raises:
        ValueError: In the forward, if the number of channels is not a multiple of G.
    """

    def __init__(self, group: PlaneGroup = "p4") -> None:
        super().__init__()
        check_known("group of GroupMax", group, ORDERS)
        self.order = ORDERS[group]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C, H, W]`` for ``[N, G C, H, W]``."""
        if x.ndim != 4 or x.shape[1] % self.order:
            raise ValueError(
                f"GroupMax expects features [N, {self.order} C, H, W], got {list(x.shape)}; lift them first, by "
                "GroupLift or GroupConv."
            )
        return x.reshape(len(x), self.order, x.shape[1] // self.order, *x.shape[2:]).max(1).values
