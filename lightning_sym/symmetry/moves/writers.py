"""Centres all weights that write into layer norms."""

from collections.abc import Sequence

from torch import nn

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.moves.moved import (
    Moved,
    check_left,
    few,
    is_left,
    moved,
    norms_of,
    pattern_of,
    require_weights,
)
from lightning_sym.symmetry.moves.tied import described_ties
from lightning_sym.symmetry.proof import double_copy
from lightning_sym.symmetry.tracing.graph.norms import Norm


def center_writers(
    symmetry: Symmetry, network: nn.Module, *, leave: str | Sequence[str] = (), check: bool = True
) -> Moved:
    r"""Bring the mean over units of all inputs of layer norms to 0.

    Weights, biases, embeddings and positions lose their component along the vector of ones, which the norm subtracts
    anyway. These are translations of the group (docs/theory/transformers.md, 6.2). Afterwards every input of
    the norm has mean 0. An RMS norm with the same gain, bias and eps is then equivalent (SliceGPT, arXiv:2401.15024).

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.
        leave: Patterns of layer norms, by module or gain, to exclude.
        check: Whether to verify numerically that the outputs stay the same.

    Returns:
        The network and the element.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If the network has other tensors or modules than the traced one, or no layer norm; or if no element
            centres one of its writers (tied embeddings).
        RuntimeError: If the function has changed.

    Example:
        >>> import torch
        >>> from lightning_sym.symmetry.trace import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> moved, element = center_writers(trace_symmetry(network, torch.randn(2, 5)), network)
        >>> bool(moved[0].weight.mean(0).abs().max() < 1e-6)
        True
    """
    require_weights(symmetry, network, check=check)
    norms = [norm for norm in norms_of(symmetry) if norm.layer]
    if not norms:
        raise ValueError("the network has no layer norm, so nothing subtracts a mean; expected one that has")
    check_left(leave, [name for norm in norms for name in (norm.gain, norm.module)])
    norms = [norm for norm in norms if not is_left(leave, norm.gain, norm.module)]
    tensors = {name: tensor.detach().cpu() for name, tensor in symmetry.tensors(double_copy(network)).items()}
    wanted = {name for norm in norms for name in norm.writers}
    found = {factor.name: factor.centred(tensors, wanted) for factor in symmetry.factors}
    _require_writers(symmetry, network, norms, set().union(*(own[1] for own in found.values() if own is not None)))
    parts = {name: own[0] for name, own in found.items() if own is not None}
    return moved(symmetry, network, symmetry.identity().replaced(**parts), check=check)


def _require_writers(symmetry: Symmetry, network: nn.Module, norms: Sequence[Norm], free: set[str]) -> None:
    """Check that translations can centre all writers of norms."""
    for norm in norms:
        held = [name for name in norm.writers if name not in free]
        if not held and not norm.others:
            continue
        ties = described_ties(network)
        ties = f" ({ties}: untie(network) first)" if ties and held else ""
        what = f"others read the mean of {few(held)}" if held else f"it reads the output of {few(norm.others)}"
        stuck = [own.module or str(own.gain) for own in norms if own.others or not free.issuperset(own.writers)]
        rest = f"; leave={pattern_of(stuck)!r} centres the inputs of all others" if len(stuck) < len(norms) else ""
        raise ValueError(
            f"the inputs of the layer norm {norm.module or norm.gain} cannot be centred, as {what}{ties}{rest}"
        )
