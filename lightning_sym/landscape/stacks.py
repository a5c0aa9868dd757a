"""Slices of neighbouring equivalence classes: one plane and grid, a line of targets."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_sym.landscape.evaluation import LossSurface
from lightning_sym.landscape.grids import Grid, evaluate_grid
from lightning_sym.landscape.planes import WeightPlane
from lightning_sym.landscape.walks import NetworkOutputs


def class_stack(
    make_surface: Callable[[Tensor], LossSurface],
    targets: Tensor,
    plane: WeightPlane,
    grid: Grid,
    *,
    below: float | None = None,
    partial: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    limit_seconds: float | None = 600,
    limit_bytes: int | None = 2 * 2**30,
) -> Tensor:
    r"""Evaluate one grid for several targets: slices of the classes :math:`[\theta^*(s)]` along a line.

    See docs/theory/equivalence.md, 9.

    Args:
        make_surface: From a target weight vector ``[P]`` to the surface of J around it, for example
            ``surfaces(network, inputs)``.
        targets: :math:`\theta^*(s)`, shape ``[S, P]``, S >= 1, for example of :func:`two_unit_targets`.
        plane: The same for all targets.
        grid: The same for all targets.
        below: As for :func:`evaluate_grid`.
        partial: Where unfinished slices are kept, as for :func:`evaluate_grid`; the number of the slice is appended.
        progress: Called with (slices done, S) after every slice.
        limit_seconds: Most estimated time for the whole stack, in seconds; None for no limit.
        limit_bytes: Most memory for the whole stack; None for no limit.

    Returns:
        J, shape ``[S, *grid.shape]``, float64, on the CPU.

    Raises:
        ValueError: If there is no target, or as for :func:`evaluate_grid`, whose limits are shared out over the slices.
    """
    if targets.ndim != 2 or not len(targets):
        raise ValueError(f"targets must have shape [S, P] with S >= 1, got {list(targets.shape)}.")
    slices = []
    for number, target in enumerate(targets):
        values = evaluate_grid(
            make_surface(target),
            plane,
            grid,
            below=below,
            partial=None if partial is None else partial.with_name(f"{partial.name}.{number}"),
            limit_seconds=None if limit_seconds is None else limit_seconds / len(targets),
            limit_bytes=None if limit_bytes is None else limit_bytes // len(targets),
        )
        slices.append(values)
        if progress is not None:
            progress(number + 1, len(targets))
    return torch.stack(slices)


def surfaces(
    network: nn.Module, inputs: Tensor, *, dtype: torch.dtype = torch.float64
) -> Callable[[Tensor], LossSurface]:
    """Return the function that makes the surface of J around a weight vector of a network.

    Args:
        network: The architecture; its own weights do not matter.
        inputs: Shape ``[N, ...]``.
        dtype: Dtype of weights and arithmetic.

    Returns:
        From a weight vector ``[P]`` to a surface whose targets are the outputs there.
    """
    function = NetworkOutputs(network, inputs, dtype)

    def make(target: Tensor) -> LossSurface:
        with torch.no_grad():
            outputs = function(function.start(target))
        return LossSurface(function.network, function.inputs, outputs, dtype=dtype)

    return make


def two_unit_targets(start: tuple[float, float], stop: tuple[float, float], count: int) -> Tensor:
    r"""Return weights of the two-unit net whose slopes (p, q) go along a line, evenly spaced.

    See docs/theory/equivalence.md, 9.

    :math:`\phi(x) = c\,\mathrm{relu}(a x) + d\,\mathrm{relu}(b x)` has slope p for x > 0, and q against :math:`|x|` for
    x < 0. The first unit carries p, the second q, both balanced: :math:`a = |c| = \sqrt{|p|}`,
    :math:`-b = |d| = \sqrt{|q|}`. Where p or q passes 0 the dimension of the class jumps from 2 to 3.

    Args:
        start: (p, q) of the first target.
        stop: (p, q) of the last one.
        count: Number of targets, >= 1; one is at the start.

    Returns:
        Weights (a, b, c, d), shape ``[count, 4]``, float64.

    Raises:
        ValueError: If the count is less than 1.

    Example:
        >>> two_unit_targets((1.0, 4.0), (1.0, 0.0), 2).tolist()
        [[1.0, -2.0, 1.0, 2.0], [1.0, 0.0, 1.0, 0.0]]
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}.")
    share = torch.linspace(0, 1, count, dtype=torch.float64)[:, None]
    first, last = (torch.tensor(ends, dtype=torch.float64) for ends in (start, stop))
    slopes = (1 - share) * first + share * last
    size = slopes.abs().sqrt()
    return torch.cat([size * torch.tensor([1.0, -1.0], dtype=torch.float64) + 0.0, size * slopes.sign()], 1)


def cut_dimension(parameters: int, class_dimension: int, plane_dimension: int) -> int:
    """Return the dimension in which a generic plane cuts a class (docs/theory/equivalence.md, 5.6).

    Codimensions add: ``class_dimension + plane_dimension - parameters``. At 0 the cut is isolated points; below, a
    generic plane meets the class nowhere, and one through members of it in these alone. What a picture shows beyond is
    there because epsilon is loose.

    Args:
        parameters: P, the number of weights.
        class_dimension: Local dimension of the class, ``0 .. P``: P less the rank of the Jacobian
            (:func:`lightning_sym.symmetry.local_dimension`) at a regular point.
        plane_dimension: m, ``0 .. P``.

    Raises:
        ValueError: If a dimension is outside of ``0 .. P``.

    Example:
        >>> cut_dimension(4, 3, 2), cut_dimension(4, 2, 2)  # two-unit net: same sign, mixed
        (1, 0)
    """
    if not (0 <= class_dimension <= parameters and 0 <= plane_dimension <= parameters):
        raise ValueError(
            f"both dimensions must be in 0 .. {parameters}, the number of parameters; got {class_dimension} and "
            f"{plane_dimension}."
        )
    return class_dimension + plane_dimension - parameters
