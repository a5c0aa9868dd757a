"""Rotates residual streams: by matrices that are given, random ones, Hadamard matrices, or principal components."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from lightning_sym._distributed import on_device_of
from lightning_sym._linear_algebra import polar_factor
from lightning_sym._text import unknown
from lightning_sym.networks.modes import evaluating
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.streams import ones_reflection, random_turn
from lightning_sym.symmetry.moves.hadamard import hadamard
from lightning_sym.symmetry.moves.moved import Moved, few, moved, require_weights
from lightning_sym.symmetry.moves.tied import described_ties
from lightning_sym.symmetry.proof import double, double_copy
from lightning_sym.symmetry.tracing.rotations import Rotation

# A matrix that is further from an orthogonal one is none; up to the second it is taken as it is.
_ORTHOGONAL, _EXACT = 1e-4, 1e-13


def rotate_stream(
    symmetry: Symmetry,
    network: nn.Module,
    matrix: ArrayLike | Tensor | Literal["hadamard", "random"],
    *,
    stream: str | None = None,
    generator: torch.Generator | None = None,
    check: bool = True,
) -> Moved:
    r"""Rotate a residual stream: writers W become Q W, what reads it becomes W Q^T.

    Gains may stay in place: :math:`D Q D^{-1}` acts behind a gain D (docs/theory/transformers.md, 3 and 6.3); after
    :func:`fold_norm_gains` it is Q itself.

    Args:
        symmetry: Of the network's architecture.
        network: Not changed.
        matrix: The orthogonal matrix Q, of shape (width, width); or ``"hadamard"``, see :func:`hadamard`, or
            ``"random"``, all matrices being equally likely. Behind layer norms it must leave the vector of ones as it
            is; the named ones then do. Numbers of single precision are made orthogonal to double precision.
        stream: The name of the stream's axis group, if there are several.
        generator: Where a random matrix comes from.
        check: Whether to prove that the outputs stay.

    Returns:
        The network and the element.

    Raises:
        TypeError: If it is no network.
        ValueError: If the network has other tensors or modules than the traced one, no stream that may be rotated (the
            gain that forbids it is named), or a gain that holds a zero; or if the matrix has another shape, is not
            orthogonal, or moves the vector of ones where a mean is taken off.
        RuntimeError: If the function has changed.

    Example:
        >>> from lightning_sym.symmetry.trace import trace_symmetry
        >>> network = nn.Sequential(nn.Linear(5, 8), nn.RMSNorm(8), nn.Linear(8, 3)).double()
        >>> moved, element = rotate_stream(trace_symmetry(network, torch.randn(2, 5)), network, hadamard(8))
        >>> torch.allclose(moved[0].weight, hadamard(8) @ network[0].weight)
        True
    """
    require_weights(symmetry, network, check=check)
    chosen = _chosen(symmetry, network, stream)
    identity, rotations = symmetry.identity(), symmetry.structure.rotations
    turns = list(identity.rotation)
    for index in chosen:
        turns[index] = _turn(rotations[index], matrix, symmetry.groups[rotations[index].orbit].name, generator)
    return moved(symmetry, network, identity.replaced(rotation=tuple(turns)), check=check)


def stream_axes(
    symmetry: Symmetry, network: nn.Module, batches: Iterable[Any] | None = None, *, stream: str | None = None
) -> Tensor:
    r"""Return the orthogonal matrix that turns a stream to the principal components of its activations.

    After ``rotate_stream(symmetry, network, stream_axes(...))`` the first unit is the direction with most of the
    stream, and so on (what SliceGPT, arXiv:2401.15024, slices). The stream is what its norms read, each vector divided
    by its length, as the norms divide it.

    Args:
        symmetry: Of the network's architecture.
        network: Run in evaluation mode, in float64; not changed.
        batches: Inputs as :func:`trace_symmetry` takes them: tensors, tuples of positional arguments, or dictionaries
            of keyword arguments. By default the traced examples.
        stream: The name of the stream's axis group, if there are several.

    Returns:
        Shape (width, width), float64, on the CPU; a row for each component, of which the largest entry is positive.

    Raises:
        TypeError: If it is no network.
        ValueError: If no stream may be rotated, it is read by layer norms (no unit can be a component there, as each
            has a part along ones), or by no norm that is a module.
    """
    require_weights(symmetry, network)
    (first, *more) = _chosen(symmetry, network, stream)
    rotation = symmetry.structure.rotations[first]
    name, units = symmetry.groups[rotation.orbit].name, torch.from_numpy(rotation.units)
    if rotation.fixes_ones:
        raise ValueError(
            f"the stream of {name} is read by layer norms, which only rotations about the vector of ones pass, and "
            "none of these makes a unit a principal component; after center_writers, RMS norms can take the place of "
            "the layer norms, and the new network be traced"
        )
    readers = {}
    for norm in symmetry.norms:
        tap = symmetry.taps.get(norm.module)
        if tap is not None and (found := tap.positions(units)) is not None:
            readers[norm.module] = found
    if more or not readers:
        raise ValueError(
            f"no norm that reads the stream of {name} is a module by itself, at which it could be watched; expected a "
            "network with norms as modules"
        )
    exact, total = double_copy(network), torch.zeros(rotation.size, rotation.size, dtype=torch.float64)

    def watch(axis: int, at: Tensor) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            values = inputs[0].movedim(axis, -1)[..., at.to(inputs[0].device)].reshape(-1, rotation.size)
            directions = nn.functional.normalize(values, dim=1)
            total.add_((directions.mT @ directions).cpu())

        return hook

    calls = symmetry.examples if batches is None else [_call(symmetry, batch) for batch in batches]
    for module, found in readers.items():
        exact.get_submodule(module).register_forward_pre_hook(watch(*found))
    with torch.no_grad(), evaluating(exact):
        for call in double(list(calls)):
            on_device_of(exact, call).run(exact)
    axes: Tensor = torch.linalg.eigh(total).eigenvectors.flip(1).mT
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return axes * largest.sign()


def _call(symmetry: Symmetry, batch: Any) -> Any:
    return symmetry.call(None, batch) if isinstance(batch, Mapping) else symmetry.call(batch)


def _chosen(symmetry: Symmetry, network: nn.Module, stream: str | None) -> list[int]:
    """Return the numbers of the rotations of one stream."""
    rotations = symmetry.structure.rotations
    by_name: dict[str, list[int]] = {}
    for index, rotation in enumerate(rotations):
        by_name.setdefault(symmetry.groups[rotation.orbit].name, []).append(index)
    if not by_name:
        why = next((note for note in symmetry.notes if note.startswith("the stream of")), "")
        if ties := described_ties(network) if why else "":
            why = f"{why.partition(': ')[0]}: {ties}, untie(network) and trace again"
        raise ValueError(
            "no stream of the network may be rotated; "
            + (why or "expected units that linear layers alone write, and that RMS norms or layer norms read")
        )
    if stream is not None and stream not in by_name:
        raise ValueError(unknown("stream", stream, by_name))
    if stream is None and len(by_name) > 1:
        raise ValueError(
            f"the network has {len(by_name)} streams; expected one of them as stream=: {few([*by_name], 4)}"
        )
    return by_name[stream] if stream is not None else next(iter(by_name.values()))


def _turn(rotation: Rotation, matrix: Any, name: str, generator: torch.Generator | None) -> Tensor:
    """Return an orthogonal matrix in double precision, as a stream allows it."""
    size, fixes_ones = rotation.size, rotation.fixes_ones
    if isinstance(matrix, str):
        if matrix not in ("hadamard", "random"):
            raise ValueError(unknown("matrix", matrix, ("hadamard", "random")))
        return random_turn(rotation, generator) if matrix == "random" else hadamard(size, fixes_ones=fixes_ones)
    turn = torch.as_tensor(matrix).detach().to("cpu", torch.float64, copy=True)
    if turn.shape != (size, size):
        raise ValueError(
            f"the stream of {name} has {size} units; expected an orthogonal matrix of shape [{size}, {size}], got one "
            f"of shape {list(turn.shape)}"
        )
    one = torch.eye(size, dtype=torch.float64)
    away = float((turn @ turn.mT - one).abs().max()) if bool(turn.isfinite().all()) else float("inf")
    if not away <= _ORTHOGONAL:
        raise ValueError(
            f"the matrix is not orthogonal: Q Q^T differs by {away:.1g} from the identity; expected one that is"
        )
    if not fixes_ones:
        return turn if away <= _EXACT else polar_factor(turn)
    moved_by = float((turn.sum(1) - 1).abs().max())
    if not moved_by <= _ORTHOGONAL:
        raise ValueError(
            f"the stream of {name} is read by layer norms, which take off the mean; expected a matrix that leaves the "
            f"vector of ones as it is, got one that moves it by {moved_by:.1g}; try hadamard({size}, fixes_ones=True)"
        )
    if max(away, moved_by) <= _EXACT:
        return turn
    reflection = ones_reflection(size)
    around = reflection @ turn @ reflection
    one[1:, 1:] = polar_factor(around[1:, 1:])
    return reflection @ one @ reflection
