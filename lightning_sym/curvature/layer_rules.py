"""Rules of this package's own layers (docs/theory/curvature.md, 1.2 to 1.4)."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sym.curvature.blocks import Axes
from lightning_sym.curvature.rules import Rule, circular_gram, circular_patches, gram, register_layer
from lightning_sym.layers.circular_conv import CircularConv, circular_conv2d
from lightning_sym.layers.factored import FactoredFullyConnected, factored_hidden, factored_map
from lightning_sym.layers.finite_groups import EquivariantLinear
from lightning_sym.layers.fully_connected import FullyConnected
from lightning_sym.layers.group_conv import GroupConv, inverse, relative, shifted, turned
from lightning_sym.layers.sparse import SparseConv, SparseFactoredFullyConnected


@register_layer(FullyConnected)
class FullyConnectedRule(Rule):
    """A linear map of the whole grid: a single place."""

    def inputs(self, module: FullyConnected, x: Tensor) -> dict[str, Tensor]:
        """Return the flattened input."""
        return {"weight": x.flatten(1)[:, None]}

    def gradients(self, module: FullyConnected, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the flattened gradient."""
        g = g.flatten(2)[:, :, None]
        return {"weight": g, "bias": g}


@register_layer(EquivariantLinear)
class EquivariantLinearRule(Rule):
    """Output points are places, all with one weight, which sees the sums of the inputs over the orbits of pairs."""

    def inputs(self, module: EquivariantLinear, x: Tensor) -> dict[str, Tensor]:
        """Return, for each output point, the sums of the inputs over the orbits."""
        x = x.flatten(2)[:, :, None]
        pairs = module.pairs.expand(*x.shape[:2], -1, -1)
        sums = x.new_zeros(*pairs.shape[:3], module.weight.shape[2])
        return {"weight": sums.scatter_add(3, pairs, x.expand_as(pairs)).transpose(1, 2).flatten(2)}

    def gradients(self, module: EquivariantLinear, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the gradient at each output point, for the bias their sums over orbits."""
        g = g.flatten(3)
        bias = g.new_zeros(*g.shape[:3], module.bias.shape[1]).index_add(3, module.points, g)
        return {"weight": g.mT, "bias": bias.flatten(2)[:, :, None]}


@register_layer(CircularConv)
class CircularConvRule(Rule):
    """All positions of the grid are places; with KFC's scale."""

    weight: ClassVar[str] = "weight"

    def inputs(self, module: Any, x: Tensor) -> dict[str, Tensor]:
        """Return circular patches."""
        return {"weight": circular_patches(x, module.kernel_size).flatten(1, 2).mT}

    def in_factors(self, module: Any, x: Tensor) -> dict[str, Tensor]:
        """Return N times A, without patches."""
        return {"weight": circular_gram(x, module.kernel_size).flatten(2).flatten(0, 1)}

    def gradients(self, module: Any, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the gradient at each position, for the bias their sum."""
        g = g.flatten(3)
        return {self.weight: g.mT, "bias": g.sum(3)[:, :, None]}


@register_layer(SparseConv)
class SparseConvRule(CircularConvRule):
    """That of a convolution, with patches interpolated to the anchors. The positions of the anchors are left out."""

    weight = "u"
    left_out = ("positions", "omega")
    lengthscales = ("omega",)

    def inputs(self, module: SparseConv, x: Tensor) -> dict[str, Tensor]:
        """Return interpolated patches."""
        patches = module.interpolation() @ circular_patches(x, module.kernel_size)  # [N, C, M, T]
        return {"u": patches.flatten(1, 2).mT}

    def in_factors(self, module: SparseConv, x: Tensor) -> dict[str, Tensor]:
        """Return N times A, without patches."""
        dense = circular_gram(x, module.kernel_size)  # [C, k k, C, k k]
        phi = module.interpolation().to(dense)
        return {"u": torch.einsum("mi,cidj,nj->cmdn", phi, dense, phi).flatten(2).flatten(0, 1)}

    def gradients(self, module: SparseConv, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return those of a convolution, and of the length scale if it is learned and has a block."""
        found = super().gradients(module, x, g)
        if "omega" not in self.left_out and module.omega is not None:
            found["omega"] = _at_number(circular_conv2d(x, module.filter_slopes(), None), g)
        return found


class _FactoredRule(Rule):
    """Channels are places: of the first factor those of the input, of the second those of the output.

    A is then one block for each channel. B is shared by them; with ``ffc="per_channel"`` it has blocks as well.
    """

    first: str
    second: str

    def incoming(self, module: Any, x: Tensor) -> Tensor:
        """Return the input of the first factor. Shape ``[N, C, S]``."""
        return x.flatten(2)

    def outgoing(self, module: Any, g: Tensor) -> Tensor:
        """Return the gradient at the products of the second factor. Shape ``[V, N, C', S']``."""
        return g.flatten(3)

    def second_by_pairs(self, module: Any) -> Tensor:
        """Return the second factor. Shape ``[C', C, S']``."""
        second: Tensor = getattr(module, self.second)
        return second

    def inputs(self, module: Any, x: Tensor) -> dict[str, Tensor]:
        """Return the input, and the numbers between the factors, by channel."""
        x = self.incoming(module, x)
        hidden = factored_hidden(x, getattr(module, self.first), module.b1)  # [C, C', N]
        return {self.first: x.transpose(0, 1)[:, :, None], self.second: hidden.permute(1, 2, 0)[:, :, None]}

    def gradients(self, module: Any, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the gradients between the factors and at the output, by channel."""
        g = self.outgoing(module, g)
        # One product for each output channel: [C', V N, S'] by [C', S', C].
        hidden = (g.flatten(0, 1).transpose(0, 1) @ self.second_by_pairs(module).mT).permute(1, 2, 0)
        hidden = torch.unflatten(hidden, 0, g.shape[:2])  # [V, N, C, C']
        found = {self.first: hidden, self.second: g, "b1": hidden.sum(2)[:, :, None]}
        if self.ffc == "per_channel":
            found |= {name: found[name].movedim(2, 0)[..., None, :] for name in (self.first, self.second)}
        return found


@register_layer(FactoredFullyConnected)
class FactoredFullyConnectedRule(_FactoredRule):
    """Block-diagonal A, ``[C, S, S]`` for theta1 and ``[C', C, C]`` for theta2."""

    first, second = "theta1", "theta2"

    def gradients(self, module: FactoredFullyConnected, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return those of both factors and both biases."""
        return super().gradients(module, x, g) | {"b2": g.flatten(3).sum(2)[:, :, None]}

    def axes(self, module: FactoredFullyConnected, name: str) -> Axes | None:
        """Return that of theta2, ``[C', C, S']``, whose last axis is that of B."""
        if name != "theta2":
            return None
        outs, ins, positions = module.theta2.shape
        return (positions, outs, ins), (1, 2, 0)


@register_layer(SparseFactoredFullyConnected)
class SparseFactoredFullyConnectedRule(_FactoredRule):
    """That of the factored layer, of inputs and gradients interpolated to the anchors, which are left out."""

    left_out = ("positions1", "positions2", "omega1", "omega2")
    lengthscales = ("omega1", "omega2")
    first, second = "u1", "u2"

    def incoming(self, module: SparseFactoredFullyConnected, x: Tensor) -> Tensor:
        """Return the interpolated input. Shape ``[N, C, M1]``."""
        return x.flatten(2) @ module.interpolations()[0].mT

    def second_by_pairs(self, module: SparseFactoredFullyConnected) -> Tensor:
        """Return the values at the anchors of the output grid. Shape ``[C', C, M2]``."""
        return torch.unflatten(module.u2.mT, 0, (module.out_channels, module.in_channels))

    def outgoing(self, module: SparseFactoredFullyConnected, g: Tensor) -> Tensor:
        """Return the interpolated gradient. Shape ``[V, N, C', M2]``."""
        return g.flatten(3) @ module.interpolations()[1].mT

    def gradients(self, module: SparseFactoredFullyConnected, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return those of the factored layer, and of length scales if they are learned and have blocks."""
        found = super().gradients(module, x, g)
        if "omega1" not in self.left_out and module.omega1 is not None:
            (theta1, theta2), (slope1, slope2) = module.factors(), module.factor_slopes()
            pairs = {"omega1": (slope1, theta2, torch.zeros_like(module.b1)), "omega2": (theta1, slope2, module.b1)}
            for name, (first, second, bias) in pairs.items():
                found[name] = _at_number(factored_map(x.flatten(2), first, second, bias, None), g)
        return found


def _at_number(slope: Tensor, g: Tensor) -> Tensor:
    """Return the gradient at a single number, shape ``[V, N, 1, 1]``, from the output's derivative and gradient."""
    return (g.flatten(2) * slope.flatten(1)).sum(2)[..., None, None]


@register_layer(GroupConv)
class GroupConvRule(Rule):
    """Elements and positions are places, ``R = G T``, all with one filter, which sees patches that are turned back.

    Depthwise filters have a block for each channel.
    """

    def inputs(self, module: GroupConv, x: Tensor) -> dict[str, Tensor]:
        """Return patches that are turned back, and the inputs of the later stages."""
        patches = self._turned_back(module, x)
        if module.spatial_weight is None:
            return {"weight": patches.permute(0, 1, 4, 2, 3).flatten(3).flatten(1, 2)}
        return {"spatial_weight": patches.permute(2, 0, 1, 4, 3).flatten(2, 3)} | self._later_inputs(module, x)

    def _later_inputs(self, module: GroupConv, x: Tensor) -> dict[str, Tensor]:
        """Return the inputs of the stages after the spatial one."""
        spatial = module.spatial(x)
        parts = torch.unflatten(spatial, 1, (module.order, -1)).flatten(3)  # [N, h, C, T]
        seen = torch.stack([shifted(parts, inverse(g), 1) for g in range(module.order)], 1)  # [N, g, g^-1 h, C, T]
        if module.rotation_weight is None:
            return {"weight": seen.permute(0, 1, 4, 3, 2).flatten(3).flatten(1, 2)}
        mixed = torch.unflatten(module.rotation(spatial), 1, (module.order, -1)).flatten(3)  # [N, g, C, T]
        return {
            "rotation_weight": seen.permute(3, 0, 1, 4, 2).flatten(2, 3),
            "weight": mixed.mT.flatten(1, 2),
        }

    def _turned_back(self, module: GroupConv, x: Tensor) -> Tensor:
        """Return the input of the filter itself for each element of the output.

        Returns:
            Shape ``[N, G, F, k k, T]``, with ``F = C``, of full ``F = G C`` by the element ``g^-1 h``.
        """
        patches = torch.unflatten(circular_patches(x, module.kernel_size), 2, (module.kernel_size, -1))
        found = []
        for g in range(module.order):
            seen = patches
            if module.kind == "full":
                seen = shifted(torch.unflatten(patches, 1, (module.order, -1)), inverse(g), 1).flatten(1, 2)
            elif module.kind != "lifting":
                seen = torch.unflatten(patches, 1, (module.order, -1))[:, g]
            found.append(turned(seen, inverse(g), (2, 3)).flatten(2, 3))
        return torch.stack(found, 1)

    def in_factors(self, module: GroupConv, x: Tensor) -> dict[str, Tensor]:
        """Return N times A, without patches: that of the plain patches, turned back."""
        kernel, later = module.kernel_size, {}
        if module.spatial_weight is not None:
            later = {name: gram(a, a.ndim - 3) for name, a in self._later_inputs(module, x).items()}
        depthwise = module.spatial_weight is not None
        if module.kind in ("lifting", "full"):
            plain = [circular_gram(x, kernel)] * module.order
        else:
            parts = torch.unflatten(x, 1, (module.order, -1)).unbind(1)
            plain = [circular_gram(part, kernel, depthwise=depthwise) for part in parts]
        grams = []
        for back, found in zip(map(inverse, range(module.order)), plain, strict=True):
            # [F, k k, F, k k]; depthwise [C, k k, k k]
            found = torch.unflatten(torch.unflatten(found, -1, (kernel, kernel)), 1, (kernel, kernel))
            found = turned(turned(found, back, (1, 2)), back)
            if module.kind == "full":
                for axis in (0, 3):  # elements come before channels
                    by_element = torch.unflatten(found, axis, (module.order, -1))
                    found = shifted(by_element, back, axis).flatten(axis, axis + 1)
            grams.append(found.flatten(3).flatten(1, 2) if depthwise else found.flatten(3).flatten(0, 2))
        return {("spatial_weight" if depthwise else "weight"): torch.stack(grams).sum(0)} | later

    def gradients(self, module: GroupConv, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return the gradients at all stages; for biases their sums."""
        g = torch.unflatten(g, 2, (module.order, -1)).flatten(4)  # [V, N, g, C', T]
        found = {"weight": g.mT.flatten(2, 3), "bias": g.sum((2, 4))[:, :, None]}
        if module.spatial_weight is None:
            return found
        if module.rotation_weight is None:
            g = torch.einsum("vngot,ghoc->vnhct", g, relative(module.weight.movedim(-1, 0)))
        else:
            g = torch.einsum("vngot,oc->vngct", g, module.weight)
            found |= self._depthwise("rotation", g)
            g = torch.einsum("vngct,ghc->vnhct", g, relative(module.rotation_weight.mT))
        return found | self._depthwise("spatial", g)

    def _depthwise(self, stage: str, g: Tensor) -> dict[str, Tensor]:
        """Return the gradients at a depthwise stage, of shape ``[V, N, G, C, T]``, for its weight and bias."""
        blocks = g.permute(3, 0, 1, 2, 4).flatten(3)[..., None]
        return {f"{stage}_weight": blocks, f"{stage}_bias": g.sum((2, 4))[:, :, None]}
