"""Takes the mean off all that is written into what layer norms read."""

from collections.abc import Sequence

from torch import nn

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.moves.moved import Moved, check_left, few, is_left, moved, pattern_of, require_weights
from lightning_sym.symmetry.moves.tied import described_ties
from lightning_sym.symmetry.proof import double_copy
from lightning_sym.symmetry.tracing.norms import Norm


def center_writers(
    symmetry: Symmetry, network: nn.Module, *, leave: str | Sequence[str] = (), check: bool = True
) -> Moved:
    r"""Bring the mean over units of all that is written into a layer norm to 0.

    Weights, biases, embeddings and positions lose what they write along the vector of ones, which the norm takes off
    anyway: shifts of the group (docs/theory/transformers.md, 6.2). Afterwards what the norm reads has mean 0
    for every input, so that an RMS norm with the same gain, bias and eps does the same (SliceGPT, arXiv:2401.15024).

    Args:
        symmetry: Of the network's architecture.
        network: Not changed.
        leave: Patterns of layer norms, by module or gain, which need not see means of 0.
        check: Whether to prove that the outputs stay.

    Returns:
        The network and the element.

    Raises:
        TypeError: If it is no network.
        ValueError: If the network has other tensors or modules than the traced one, no layer norm, or writes something
            of which no element takes the mean off (tied embeddings).
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
    norms = [norm for norm in symmetry.norms if norm.layer]
    if not norms:
        raise ValueError("the network has no layer norm, so that nothing takes a mean off; expected one that has")
    check_left(leave, [name for norm in norms for name in (norm.gain, norm.module)])
    norms = [norm for norm in norms if not is_left(leave, norm.gain, norm.module)]
    tensors = {name: tensor.detach().cpu() for name, tensor in symmetry.tensors(double_copy(network)).items()}
    wanted = {name for norm in norms for name in norm.writers}
    found = {factor.name: factor.centred(tensors, wanted) for factor in symmetry.factors}
    _require_writers(symmetry, network, norms, set().union(*(own[1] for own in found.values() if own is not None)))
    parts = {name: own[0] for name, own in found.items() if own is not None}
    return moved(symmetry, network, symmetry.identity().replaced(**parts), check=check)


def _require_writers(symmetry: Symmetry, network: nn.Module, norms: Sequence[Norm], free: set[str]) -> None:
    """Check that the mean of all that is written into norms may be taken off."""
    for norm in norms:
        held = [name for name in norm.writers if name not in free]
        if not held and not norm.others:
            continue
        ties = described_ties(network)
        ties = f" ({ties}: untie(network) first)" if ties and held else ""
        what = f"the mean of {few(held)} is seen by others" if held else f"it reads the output of {few(norm.others)}"
        stuck = [own.module or str(own.gain) for own in norms if own.others or not free.issuperset(own.writers)]
        rest = f"; leave={pattern_of(stuck)!r} centres what all others read" if len(stuck) < len(norms) else ""
        raise ValueError(
            f"what the layer norm {norm.module or norm.gain} reads cannot be given the mean 0, as {what}{ties}{rest}"
        )
