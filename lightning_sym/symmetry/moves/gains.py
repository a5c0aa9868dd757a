"""Folds the gains and biases of norms into the weights after them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sym.symmetry.arrays import Ints, as_array
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.charts import uncharted
from lightning_sym.symmetry.group.element import Element
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
from lightning_sym.symmetry.tracing.graph.capture import state_tensors
from lightning_sym.symmetry.tracing.graph.norms import Norm


def fold_norm_gains(
    symmetry: Symmetry, network: nn.Module, *, leave: str | Sequence[str] = (), check: bool = True
) -> Moved:
    """Bring the gains of all norms to 1, and the biases of layer norms to 0, by folding them into their readers.

    Scales of the group that act on gains and their readers absorb the gains; its translations absorb the biases into
    the readers' biases (docs/theory/transformers.md, 6.1). A bias is kept in part where readers have no biases, with a
    note. A gain that cannot be folded raises an error, as the next steps (rotations, norms without gains) rely on it.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.
        leave: Patterns (``"*.q_norm.weight"``) of gains, biases or modules of norms to leave unchanged.
        check: Whether to verify numerically that the outputs stay the same.

    Returns:
        The network, with gains of exactly 1 (and biases of exactly 0), and the element.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If the network has other tensors or modules than the traced one, or has no norm with a gain; or if
            a gain has a zero entry, or cannot be brought to 1 (that of the last norm, if embeddings are tied).
        RuntimeError: If the function has changed.

    Example:
        >>> from lightning_sym.symmetry.trace import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> symmetry = trace_symmetry(network, torch.randn(2, 5))
        >>> moved, element = fold_norm_gains(symmetry, symmetry.act(symmetry.sample(), network))
        >>> moved[1].weight.tolist() == [1.0] * 8 and moved[1].bias.tolist() == [0.0] * 8
        True
    """
    require_weights(symmetry, network, check=check)
    norms = [norm for norm in norms_of(symmetry) if norm.gain is not None or norm.bias is not None]
    if not norms:
        raise ValueError(
            "the network has no norm (layer norm, RMS norm, group norm) with a gain; expected one with gains to fold"
        )
    check_left(leave, [name for norm in norms for name in (norm.gain, norm.bias, norm.module)])
    norms = [norm for norm in norms if not is_left(leave, norm.module)]
    gains = list(dict.fromkeys(norm.gain for norm in norms if norm.gain and not is_left(leave, norm.gain)))
    biases = list(dict.fromkeys(norm.bias for norm in norms if norm.bias and not is_left(leave, norm.bias)))
    exact = double_copy(network)
    _require_plain(norms, gains)
    element = _folding(symmetry, network, symmetry.tensors(exact), gains)
    shift, left = _without_biases(symmetry, symmetry.tensors(symmetry.act(element, exact)), biases)
    kept = [name for name in biases if bool(left[name].any())]

    def settle(result: nn.Module) -> None:
        tensors = state_tensors(result)
        with torch.no_grad():
            ones = ((name, torch.ones_like(tensors[name])) for name in gains)
            for name, one in uncharted(ones, symmetry.structure.charts, tensors):
                tensors[name].copy_(one)
            for name in biases:
                tensors[name].masked_fill_(~left[name].to(tensors[name].device), 0.0)

    kind = _plural("the bias", kept)
    notes = [f"{kind} cannot be 0, as a reader of it has no bias to absorb it"] if kept else []
    return moved(symmetry, network, symmetry.compose(shift, element), check=check, settle=settle, notes=notes)


def _plural(what: str, names: Sequence[str], prefix: str = "") -> str:
    """Format a noun with one name or several."""
    ending = "es" if what.endswith("s") else "s"
    return f"{what}{ending * (len(names) > 1)} {few([prefix + name for name in names])}"


def _require_plain(norms: Sequence[Norm], gains: Sequence[str]) -> None:
    shifted = [norm.gain for norm in norms if norm.gain in gains and not norm.plain and norm.gain is not None]
    if shifted:
        raise ValueError(
            f"{_plural('the gain', shifted, '1 + ')} cannot be folded, as no scale of the group acts on a sum; "
            f"leave={pattern_of(shifted)!r} folds all others"
        )


def _positions(symmetry: Symmetry, name: str) -> Ints | None:
    """Return the positions of a vector's elements among those of all slots; None if it is not a vector."""
    slots = [slot for slot in symmetry.structure.slots_of.get(name, ()) if len(slot.axes) <= 1]
    slot = next((slot for slot in slots if slot.size == math.prod(symmetry.layout[name][0])), None)
    return None if slot is None else np.arange(slot.offset, slot.offset + slot.size)


def _folding(symmetry: Symmetry, network: nn.Module, tensors: Mapping[str, Tensor], gains: Sequence[str]) -> Element:
    """Return the scales and signs that bring gains to 1.

    Raises:
        ValueError: If gains have zero entries, or no such scales exist.
    """
    values = {name: as_array(tensors[name].reshape(-1)) for name in gains}
    if zeros := [name for name in gains if not values[name].all()]:
        raise ValueError(
            f"no scale brings the zeros in {_plural('the gain', zeros)} to 1; expected gains other than zero, or "
            f"leave={pattern_of(zeros)!r}, which folds all others"
        )
    at = {name: places for name in gains if (places := _positions(symmetry, name)) is not None}
    rows = np.concatenate([np.zeros(0, np.int64), *at.values()])
    gain = np.concatenate([np.zeros(0), *(values[name] for name in at)])
    found = {factor.name: factor.brought_to_one(rows, gain) for factor in symmetry.factors}
    parts = {name: own[0] for name, own in found.items() if own is not None}
    holds = np.all([np.ones(len(rows), bool), *(own[1] for own in found.values() if own is not None)], axis=0)
    ends = np.cumsum([len(places) for places in at.values()])
    held = {name for name in gains if name not in at and not (values[name] == 1).all()}
    held |= {name for name, part in zip(at, np.split(holds, ends[:-1]), strict=bool(at)) if not part.all()}
    if held:
        stuck = [name for name in gains if name in held]
        ties = described_ties(network)
        why = f"{ties}: untie(network) first" if ties else "others read them, or the values before them"
        raise ValueError(
            f"{_plural('the gain', stuck)} cannot be taken into the weights behind ({why}); "
            f"leave={pattern_of(stuck)!r} folds all others"
        )
    return symmetry.identity().replaced(**parts)


def _without_biases(
    symmetry: Symmetry, tensors: Mapping[str, Tensor], biases: Sequence[str]
) -> tuple[Element, dict[str, Tensor]]:
    """Return the translation that cancels biases where possible, and masks of the entries that stay nonzero."""
    exact = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    found = {factor.name: factor.taken_off(exact, biases) for factor in symmetry.factors}
    parts = {name: own[0] for name, own in found.items() if own is not None}
    sizes = [exact[name].numel() for name in biases]
    off = np.any([np.zeros(sum(sizes), bool), *(own[1] for own in found.values() if own is not None)], axis=0)
    left = torch.split(torch.from_numpy(~off), sizes) if sizes else ()
    kept = {name: part.view_as(exact[name]) for name, part in zip(biases, left, strict=True)}
    return symmetry.identity().replaced(**parts), kept
