"""Linear maps that commute with a finite group of permutations, and the actions of such groups."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import Grid, check_integers, check_known, height_width

GridGroup = Literal["c4", "d4"]


def grid_action(group: GridGroup, grid: Grid) -> Tensor:
    """Return the permutations of the points of a square grid by quarter turns, with or without reflections.

    Args:
        group: ``"c4"``: the four turns. ``"d4"``: also the four reflections.
        grid: Side of the square, or height and width.

    Returns:
        The new place of each point, numbered row by row, under each element. Shape ``[4 or 8, S]``, int64, on the CPU.

    Raises:
        ValueError: If the group is unknown, or the grid is no square.
    """
    check_known("group of a grid", group, ("c4", "d4"))
    height, width = height_width(grid)
    if height != width:
        raise ValueError(f"Quarter turns move the points of a square grid, got {height}x{width}; resize the images.")
    points = torch.arange(height * width, device="cpu").view(height, width)
    images = [points] if group == "c4" else [points, points.mT]
    # The grid of point numbers after a turn is the inverse permutation.
    return torch.stack([torch.rot90(image, turns).flatten().argsort() for image in images for turns in range(4)])


def regular_action(table: Sequence[Sequence[int]]) -> Tensor:
    """Return the permutations of a group's elements by multiplication from the left, which are the rows of its table.

    Args:
        table: Entry ``[g][h]`` is the number of the product ``g h``.

    Returns:
        Shape ``[G, G]``, int64.

    Raises:
        ValueError: If it is not the table of a group.
    """
    size = len(table)
    if size and all(len(row) == size for row in table):
        found = torch.tensor(table, device="cpu")
        numbers = torch.arange(size, device="cpu")
        latin = all((sides.sort(1).values == numbers).all() for sides in (found, found.mT))
        if latin and torch.equal(found[found], found[:, found]) and (found == numbers).all(1).any():
            return found
    raise ValueError(
        "table must be the multiplication table of a group: n rows with the numbers 0 to n - 1, each once in every row "
        f"and column, with an identity, and associative, got {table!r}."
    )


def orbits(*actions: Tensor) -> Tensor:
    """Number the orbits of a group on points, or on pairs of points: entries of a matrix that commutes with it.

    Args:
        actions: One or two actions of the same group, each ``[G, P]``: of one, orbits of points; of two, of pairs.

    Returns:
        Shape ``[P]`` or ``[P, Q]``, int64, from 0 on without gaps.
    """
    images = actions[0] if len(actions) == 1 else actions[0][:, :, None] * actions[1].shape[1] + actions[1][:, None]
    found: Tensor = torch.unique(images.amin(0), return_inverse=True)[1]
    return found


def _checked(action: Tensor | Sequence[Sequence[int]], name: str) -> Tensor:
    found = torch.as_tensor(action, device="cpu")  # its values count under ``torch.device("meta")`` as well
    if found.ndim != 2 or not found.numel() or not torch.equal(
        found.sort(1).values, torch.arange(found.shape[1], device="cpu").expand_as(found)
    ):  # fmt: skip
        raise ValueError(f"{name} of EquivariantLinear must be rows of permutations of 0 to P - 1, got {action!r}.")
    return found


class EquivariantLinear(nn.Module):
    r"""Any affine map between features on two sets of points that commutes with a finite group.

    The group permutes both sets, and the weight is constant on the orbits of pairs of points:

    .. math:: y[n, c', p] = b[c', o(p)] + \sum_{c, q} W[c', c, o(p, q)]\, x[n, c, q]

    The indicators of the orbits are a basis of all equivariant matrices. On the group's own elements
    (:func:`regular_action`) the layer is the group convolution, :math:`o(g, h) = g^{-1} h`. Layers of several
    groups in :class:`~lightning_sym.layers.ResidualPathways` are the paper's formula (28).

    It has ``C' C O + C' O'`` parameters, with O orbits of pairs and O' of output points. The weight is drawn from
    ``U(-1/sqrt(C P), 1/sqrt(C P))`` by torch's global generator, the bias is 0.

    Args:
        in_channels: ``C``, >= 1.
        out_channels: ``C'``, >= 1.
        action: New place of each input point under each element of the group, ``[G, P]``: all elements, once or equally
            often. See :func:`grid_action` and :func:`regular_action`.
        out_action: The same for output points, ``[G, P']``, in the same order; default that of the inputs.
        out_grid: Shape of the output points; default that of the inputs, or ``[P']`` if they are others.

    Attributes:
        weight: Shape ``[C', C, O]``.
        bias: Shape ``[C', O']``.
        pairs: Orbit of each pair. Shape ``[P', P]``.
        points: Orbit of each output point. Shape ``[P']``.

    Raises:
        ValueError: If an argument is out of range or the rows are no group; in the forward, if features have
            another shape.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), appendices A and B; Finzi, Welling, Wilson (2021), "A Practical
        Method for Constructing Equivariant Multilayer Perceptrons", arXiv:2104.09459; docs/theory/relaxed_layers.md,
        1.9.

    Example:
        >>> layer = EquivariantLinear(1, 1, grid_action("d4", 2))  # the same point, a neighbour, or the opposite one
        >>> layer.weight.shape, layer(torch.zeros(3, 1, 2, 2)).shape
        (torch.Size([1, 1, 3]), torch.Size([3, 1, 2, 2]))
    """

    pairs: Tensor
    points: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        action: Tensor | Sequence[Sequence[int]],
        out_action: Tensor | Sequence[Sequence[int]] | None = None,
        out_grid: Grid | None = None,
    ) -> None:
        super().__init__()
        check_integers(of=self, in_channels=in_channels, out_channels=out_channels)
        self.in_channels, self.out_channels = in_channels, out_channels
        before = _checked(action, "action")
        after = before if out_action is None else _checked(out_action, "out_action")
        if len(before) != len(after):
            raise ValueError(f"out_action has {len(after)} elements of the group, but action {len(before)}.")
        both = torch.cat([before, after + before.shape[1]], 1)
        elements = {tuple(row) for row in both.tolist()}
        if any(tuple(row) not in elements for product in (both[:, one] for one in both) for row in product.tolist()):
            raise ValueError("action and out_action are no group: a product of two elements is missing; add it.")
        self.out_grid = None if out_grid is None else height_width(out_grid, "out_grid", of=self)
        if self.out_grid is not None and math.prod(self.out_grid) != after.shape[1]:
            raise ValueError(f"out_grid must have the {after.shape[1]} points of out_action, got {out_grid!r}.")
        pairs, points = orbits(after, before), orbits(after)
        bound = (in_channels * before.shape[1]) ** -0.5
        weight = torch.empty(out_channels, in_channels, int(pairs.max()) + 1)
        self.weight = nn.Parameter(nn.init.uniform_(weight, -bound, bound))
        self.bias = nn.Parameter(torch.zeros(out_channels, int(points.max()) + 1))
        for name, table in (("pairs", pairs), ("points", points)):  # no state: their values are kept on meta
            self.register_buffer(name, table if weight.is_meta else table.to(weight.device), persistent=False)

    def matrix(self) -> Tensor:
        """Return the weights of all pairs of points. Shape ``[C', P', C, P]``."""
        return self.weight[:, :, self.pairs].transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, C', *out_grid]`` for ``[N, C, ...]`` with P points."""
        if x.ndim < 3 or x.shape[1] != self.in_channels or x.shape[2:].numel() != self.pairs.shape[1]:
            raise ValueError(
                f"EquivariantLinear expects features [N, {self.in_channels}, ...] with {self.pairs.shape[1]} points, "
                f"got {list(x.shape)}; look at its action."
            )
        same = self.pairs.shape[0] == self.pairs.shape[1]
        shape = self.out_grid or (x.shape[2:] if same else self.pairs.shape[:1])
        y = F.linear(x.flatten(1), self.matrix().flatten(2).flatten(0, 1), self.bias[:, self.points].flatten())
        return y.view(len(x), self.out_channels, *shape)

    def extra_repr(self) -> str:
        """Return channels and points, for ``repr``."""
        after, before = self.pairs.shape
        return f"{self.in_channels}, {self.out_channels}, points={before}, out_points={after}"
