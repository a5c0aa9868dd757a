"""Remove units from a network: smaller tensors, and a record from which the smaller network can be built."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_sym._checks import is_integer

M = TypeVar("M", bound=nn.Module)
Axis = tuple[str, int]
"""A tensor's name in the state dict, and one of its axes."""
# Attribute in which a narrowed network records the kept positions of the original tensors.
KEPT = "_kept_positions"


def narrowed(network: M, kept: Mapping[Axis, Sequence[int] | Tensor]) -> M:
    """Return a copy of a network that keeps only some positions of its tensors.

    The caller determines which positions belong together (a unit's row, its bias, the columns that read it); see
    :func:`lightning_sym.landscape.removable_units`. The size attributes of linear layers, convolutions and batch norms
    are updated.

    A :class:`lightning_sym.networks.Network` records the kept positions: its ``architecture`` has a third entry,
    ``kept``, from which :func:`lightning_sym.networks.build` makes it. ``fresh(seed)`` has the initial weights of the
    original network at these positions.

    Args:
        network: Any module, possibly narrowed before. Not changed.
        kept: Positions to keep, in order, for each axis of a tensor that becomes shorter; at least one. Integers of
            shape ``[k]`` each.

    Returns:
        The copy. Sizes and cost are those of the smaller tensors.

    Raises:
        ValueError: If there is no such tensor or axis, or positions are missing, repeated or out of range.

    Example:
        >>> layer = narrowed(nn.Linear(3, 2), {("weight", 0): [1], ("bias", 0): [1]})
        >>> layer
        Linear(in_features=3, out_features=1, bias=True)
    """
    positions = {axis: [int(place) for place in places] for axis, places in kept.items()}
    small = copy.deepcopy(network)
    tensors = dict(small.state_dict(keep_vars=True))
    for (name, axis), places in positions.items():
        _check(tensors, name, axis, places)
        owner, tensor = small.get_submodule(name.rpartition(".")[0]), tensors[name]
        with torch.no_grad():
            part = tensor.detach().index_select(axis, torch.tensor(places, device=tensor.device))
        if isinstance(tensor, nn.Parameter):
            part = nn.Parameter(part, tensor.requires_grad)
        setattr(owner, name.rpartition(".")[2], part)
        tensors[name] = part
    for module in small.modules():
        _update_sizes(module)
    before: dict[Axis, list[int]] = small.__dict__.get(KEPT, {})
    whole = {
        axis: [before[axis][place] for place in places] if axis in before else places
        for axis, places in positions.items()
    }
    small.__dict__[KEPT] = {**before, **whole}
    return small


def _check(tensors: Mapping[str, Tensor], name: str, axis: int, places: Sequence[int]) -> None:
    """Check that positions can be kept."""
    if name not in tensors or not 0 <= axis < tensors[name].ndim:
        raise ValueError(f"The network has no axis {axis} of a tensor {name!r} to keep positions of.")
    size = tensors[name].shape[axis]
    if not places or len(set(places)) < len(places) or not all(0 <= place < size for place in places):
        raise ValueError(
            f"The positions to keep of {name}[{axis}] must be different numbers from 0 to {size - 1}, at least one, "
            f"got {list(places)[:8]}."
        )


def _update_sizes(module: nn.Module) -> None:
    """Update a module's size attributes from its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.modules.conv._ConvNd):
        if module.groups > 1 and module.groups == module.in_channels == module.out_channels:  # one filter per channel
            module.groups = module.in_channels = module.out_channels = len(module.weight)
        else:
            sizes = [module.weight.shape[0], module.weight.shape[1]]
            first, second = ("in_channels", "out_channels") if module.transposed else ("out_channels", "in_channels")
            setattr(module, first, sizes[0])
            setattr(module, second, sizes[1] * module.groups)
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        tensor = module.running_mean if module.weight is None else module.weight
        if tensor is not None:
            module.num_features = len(tensor)


# ---- as JSON


def kept_as_json(kept: Mapping[Axis, Sequence[int]]) -> list[dict[str, Any]]:
    """Convert kept positions to JSON, grouping axes with equal positions: ``[{"axes": [...], "positions": [...]}]``."""
    axes: dict[tuple[int, ...], list[str]] = {}
    for (name, axis), places in kept.items():
        axes.setdefault(tuple(places), []).append(f"{name}[{axis}]")
    return [{"axes": names, "positions": list(places)} for places, names in axes.items()]


def kept_from_json(entries: object) -> dict[Axis, list[int]]:
    """Convert the result of :func:`kept_as_json` back.

    Raises:
        ValueError: If the entries are malformed.
    """
    expected = 'expected [{"axes": ["linear1.weight[0]", ...], "positions": [0, 2, ...]}, ...]'
    found: dict[Axis, list[int]] = {}
    for entry in entries if isinstance(entries, list) else [None]:
        axes, places = (entry.get(name) for name in ("axes", "positions")) if isinstance(entry, Mapping) else (0, 0)
        if not isinstance(axes, list) or not isinstance(places, list) or not all(is_integer(p, 0) for p in places):
            raise ValueError(f"The kept entries of an architecture need axes and positions, got {entry!r}; {expected}.")
        for axis in axes:
            name, bracket, number = str(axis).removesuffix("]").rpartition("[")
            if not bracket or not number.isdigit():
                raise ValueError(f"An architecture keeps positions of {axis!r}, which is no axis; {expected}.")
            found[name, int(number)] = list(places)
    return found
