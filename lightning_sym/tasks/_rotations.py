"""Random changes of basis before one activation: elements of the symmetry group, and orthogonal matrices."""

import torch
from torch import Tensor

from lightning_sym.stitching import CutNetwork, FixedMap, PlantedStitches, Port
from lightning_sym.symmetry import Element

# Relative to the largest output. Rounding alone stays far below, a wrong matrix is far above.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_ADVICE = "leave this site out of sites, or group and undo out of kinds"


def element_at(
    source: CutNetwork, site: str, generator: torch.Generator | None = None, *, scale: float = 1.0
) -> Element:
    r"""Draw an element of a network's symmetry that changes the units at one site, and no others.

    As far as the group at the site has them: a uniform permutation, signs that are fair coins, and scales
    :math:`d = \exp(s z - s^2 / 2)` (mean 1, ``z`` standard normal) of the values that cross the cut; without an
    activation, a matrix with singular values :math:`\exp(s z)`. Units of a residual stream are the same
    all along the stream.

    Args:
        source: The network, cut at the site.
        site: Where.
        generator: Where randomness comes from.
        scale: ``s``, the standard deviation of the scales' logarithms, >= 0.

    Returns:
        The element of ``source.symmetry``.

    Raises:
        ValueError: If the network is not cut there, the group moves nothing there, or ``scale`` is out of range.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 3.3, for scales with s = 1.
    """
    if site not in source.sites:
        raise ValueError(f"The network is not cut at {site!r}, only at {', '.join(source.sites)}.")
    if not 0 <= scale < float("inf"):
        raise ValueError(f"scale must be a finite number >= 0, got {scale}.")
    first = source.crossings(site)[0]
    if not first.mapped:
        raise ValueError(f"What crosses the cut at {site!r} is the network's input or has no channels; {_ADVICE}.")
    group = first.group
    if not (group.permutations or group.positive_scales or group.signs or group.dense):
        raise ValueError(f"The symmetry group does not change what crosses the cut at {site!r}; {_ADVICE}.")
    symmetry = source.symmetry
    (seen,) = symmetry.taps[f"{site}/0"].seen
    return symmetry.sample_at(seen, generator, scale=scale)


def rotate_by_group(
    source: CutNetwork,
    site: str,
    example: Tensor,
    generator: torch.Generator | None = None,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, CutNetwork]:
    """Draw an element of the group before an activation; return its matrix, and the network that inverts it.

    The layers of that network above the cut map the changed values to the outputs of the source. All other values at
    the cut are unchanged.

    Args:
        source: The network, cut before its activations.
        site: Where.
        example: Images for the check that the outputs agree, in the weights' dtype. Shape ``[N, C, H, W]``.
        generator: Where randomness comes from.
        scale: Standard deviation of the logarithms of scales, >= 0; see :func:`element_at`.

    Returns:
        The matrix ``[C, C]`` that acts on the values' channels, in the weights' dtype; the network, cut there.

    Raises:
        ValueError: If the symmetry has no element that moves only these values at the cut, or the function changes.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 3.3 for the matrix; the exact undoing is ours.
    """
    planted = PlantedStitches(source, element_at(source, site, generator, scale=scale))
    matrix, *others = planted.matrices(site)
    assert matrix is not None
    for crossing, other in zip(source.crossings(site)[1:], others, strict=True):
        if other is not None and not torch.equal(other, torch.eye(len(other), dtype=other.dtype)):
            raise ValueError(
                f"No element of the symmetry group changes the values before {site!r} alone: {crossing.name}, "
                f"which crosses the same cut, has the same units; {_ADVICE}."
            )
    undone = CutNetwork(planted.network, [site], example=example, before=True, like=source)
    port = Port(len(matrix), len(matrix), axis=source.crossings(site)[0].axis)
    with torch.no_grad():
        value, *rest = source.values(example)[site]
        found = undone.upper(site)((FixedMap(port, matrix)(value), *rest))
        expected = source.network(example)
        largest = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
        error = float((found - expected).abs().max() / largest)
    if not error <= _TOLERANCES.get(matrix.dtype, 0.1):
        raise ValueError(
            f"The element of the symmetry group that was drawn for {site!r} changes the network's output, by "
            f"{error:.1e} of its largest value, which it should not; {_ADVICE}."
        )
    return matrix, undone
