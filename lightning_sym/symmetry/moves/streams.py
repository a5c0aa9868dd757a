"""Rotates residual streams: by given, random or Hadamard matrices, or to principal components."""

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
from lightning_sym.symmetry.moves.moved import Moved, few, moved, norms_of, require_weights
from lightning_sym.symmetry.moves.tied import described_ties
from lightning_sym.symmetry.proof import double, double_copy
from lightning_sym.symmetry.solving.rotations import Rotation

# Matrices farther from orthogonal than the first are rejected; up to the second they are used without change.
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
    r"""Rotate a residual stream: writers W become Q W, readers W become W Q^T.

    Gains may stay in place: :math:`D Q D^{-1}` acts after a gain D (docs/theory/transformers.md, 3 and 6.3); after
    :func:`fold_norm_gains` this is Q.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed.
        matrix: The orthogonal matrix Q, of shape (width, width); ``"hadamard"``, see :func:`hadamard`; or ``"random"``
            for a uniform one. Before layer norms it must fix the vector of ones, as the named ones then do. A matrix of
            single precision is orthogonalised in double precision.
        stream: Name of the stream's axis group, if there are several.
        generator: Generator for a random matrix.
        check: Whether to verify numerically that the outputs stay the same.

    Returns:
        The network and the element.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If the network has other tensors or modules than the traced one, or a gain has a zero entry; if no
            stream can be rotated (the message names the gain that prevents it); or if the matrix has another shape,
            is not orthogonal, or moves the vector of ones before a layer norm.
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
    r"""Return the orthogonal matrix that rotates a stream to the principal components of its activations.

    After ``rotate_stream(symmetry, network, stream_axes(...))`` the units are principal components in descending order
    (SliceGPT, arXiv:2401.15024, slices these). The activations are the inputs of the stream's norms, each vector
    divided by its length, as in the norms.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Run in evaluation mode, in float64; not changed.
        batches: Inputs as in :func:`trace_symmetry`: tensors, tuples of positional arguments, or dictionaries of
            keyword arguments. By default the traced examples.
        stream: Name of the stream's axis group, if there are several.

    Returns:
        Shape (width, width), float64, on the CPU; one row per component, with a positive largest entry.

    Raises:
        TypeError: If `network` is not a module.
        ValueError: If no stream can be rotated, or no norm that reads it is a module; or if layer norms read it: every
            unit then has a component along ones, so none can be a principal component.
    """
    require_weights(symmetry, network)
    (first, *more) = _chosen(symmetry, network, stream)
    rotation = symmetry.structure.rotations[first]
    name, units = symmetry.groups[rotation.orbit].name, torch.from_numpy(rotation.units)
    if rotation.fixes_ones:
        raise ValueError(
            f"layer norms read the stream of {name}: they commute only with rotations that fix the vector of ones, and "
            "none of these makes a unit a principal component; after center_writers, RMS norms can replace the layer "
            "norms, and the new network be traced"
        )
    readers = {}
    for norm in norms_of(symmetry):
        tap = symmetry.taps.get(norm.module)
        if tap is not None and (found := tap.positions(units)) is not None:
            readers[norm.module] = found
    if more or not readers:
        raise ValueError(
            f"no norm that reads the stream of {name} is a module with an input to record; expected a network with "
            "norms as modules"
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
    """Return the indices of the rotations of one stream."""
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
    """Return an orthogonal matrix in double precision that the stream allows."""
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
            f"layer norms, which subtract the mean, read the stream of {name}; expected a matrix that fixes the vector "
            f"of ones, got one that moves it by {moved_by:.1g}; try hadamard({size}, fixes_ones=True)"
        )
    if max(away, moved_by) <= _EXACT:
        return turn
    reflection = ones_reflection(size)
    around = reflection @ turn @ reflection
    one[1:, 1:] = polar_factor(around[1:, 1:])
    return reflection @ one @ reflection
