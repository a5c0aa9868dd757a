"""The local dimension of a network's equivalence class, from the rank of its Jacobian."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lightning_sym._checks import check_integers, check_numbers, is_finite
from lightning_sym._distributed import fitting, on_device_of
from lightning_sym.networks.modes import PassedGradients, PlainDistances
from lightning_sym.symmetry.arrays import together
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.elements import AxisGroup
from lightning_sym.symmetry.moves.moved import require_weights
from lightning_sym.symmetry.proof import double, double_copy
from lightning_sym.symmetry.tracing.graph.calls import Call, check_arguments
from lightning_sym.symmetry.watching import watched

# Units whose incoming weights and biases have a larger cosine are duplicates (docs/theory/equivalence.md, 10).
DUPLICATE = 1 - 1e-6
# Activations that are linear where their input is positive; where it is negative, the first two are constant.
_PIECEWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU)
_ACTIVATIONS = tuple(
    getattr(nn, name)
    for name in (
        *("ReLU", "ReLU6", "LeakyReLU", "PReLU", "RReLU", "Tanh", "Sigmoid", "GELU", "SiLU", "ELU", "SELU", "CELU"),
        *("Softplus", "Mish", "Hardtanh", "Hardswish", "Hardsigmoid", "Softsign", "Softshrink", "Hardshrink"),
    )
)
# Kinds of units that are counted.
_KINDS = ("dead", "always_on", "constant", "duplicated")
# Bytes of the Jacobian held in addition to the result.
_CHUNK = 64 * 2**20


@dataclass(frozen=True)
class LocalDimension:
    """The dimension of the set of equivalent networks, from the Jacobian of ``theta -> f(X; theta)``.

    Attributes:
        parameters: Number of parameters ``p``.
        equations: Number of samples times number of outputs.
        rank: Rank of the Jacobian.
        nullity: ``p - rank``: an upper bound for the dimension of the set of parameters with the same outputs on X,
            which contains the orbit.
        orbit_dimension: Dimension of the symmetry group, `Symmetry.dimension`; with ``log_softmax`` plus that of
            translations common to all logits, `Symmetry.common_shift`. At most the nullity, which bounds the orbit's
            dimension where some elements act trivially; a note reports this.
        excess: ``nullity - orbit_dimension``, at least 0.
        singular_values: Singular values of the Jacobian, descending. Shape (min(p, equations),), float64.
        above: The smallest singular value counted in the rank, relative to the largest.
        below: The largest one not counted, relative to the largest; 0 if there is none.
        dead: Number of units with activation 0 on all of X (for a ReLU: input never positive).
        always_on: Number of units with a piecewise linear activation that is linear on all of X (for a ReLU: input
            always positive).
        constant: Number of units with constant activation on X, without dead ones.
        duplicated: Number of units with incoming weights and bias equal to a positive multiple of an earlier unit's.
        groups: The four counts by name of the axis group, where any is not 0.
        notes: Notes on limits of the result.
    """

    parameters: int
    equations: int
    rank: int
    nullity: int
    orbit_dimension: int
    excess: int
    singular_values: Tensor
    above: float
    below: float
    dead: int
    always_on: int
    constant: int
    duplicated: int
    groups: dict[str, dict[str, int]]
    notes: tuple[str, ...]

    @property
    def gap(self) -> float:
        """The ratio of the two singular values around the cut, ``above / below``; infinite if none is below."""
        return self.above / self.below if self.below > 0 else math.inf

    def __str__(self) -> str:
        units = f"dead {self.dead}, always on {self.always_on}, constant {self.constant}, duplicated {self.duplicated}"
        lines = [
            f"parameters                 {self.parameters}",
            f"equations                  {self.equations}",
            f"rank of the Jacobian       {self.rank}",
            f"nullity                    {self.nullity}",
            f"dimension of the orbit     {self.orbit_dimension}",
            f"excess                     {self.excess}",
            f"singular values at the cut {self.above:.1e} | {self.below:.1e}, relative to the largest",
            f"units                      {units}",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def local_dimension(
    symmetry: Symmetry,
    network: nn.Module,
    inputs: Any = None,
    *,
    tolerance: float = 1e-9,
    log_softmax: bool = False,
    training: bool = False,
    max_parameters: int = 4096,
    **keywords: Any,
) -> LocalDimension:
    r"""Compare the nullity of a network's Jacobian with the dimension of its orbit.

    The kernel of :math:`J = \partial f(X; \theta) / \partial \theta` contains the tangent space of the orbit, so that
    :math:`p - \operatorname{rank} J \geq \dim(\text{orbit})`. The excess is due to dead, always-on, constant or
    duplicated units, to too few inputs, and to symmetries of this function alone (docs/theory/equivalence.md, 10).
    For a squared loss, the Gauss-Newton matrix has the kernel of J; for cross-entropy use ``log_softmax=True``.

    Args:
        symmetry: Symmetry of the network's architecture.
        network: Not changed; a copy in float64 is used.
        inputs: One batch: a tensor with the samples on its first axis, shape (N, ...), or a tuple of positional
            arguments. Moved to the network's device. The rank grows with N and saturates; N times the number of outputs
            should far exceed the number of parameters.
        tolerance: Singular values above ``tolerance`` times the largest count in the rank. Unitless, in (0, 1).
        log_softmax: Whether to take the logarithm of the softmax over the last axis of the output.
        training: Whether batch norms use the batch's own statistics. Slower: all samples then depend on one another.
        max_parameters: Maximum number of parameters, as the Jacobian is dense. At least 1.
        **keywords: The network's keyword arguments, in addition to or instead of `inputs`.

    Returns:
        Rank, nullity, the singular values around the cut, and counts of units that explain an excess.

    Raises:
        TypeError: If the network does not take the arguments.
        ValueError: If an argument is out of range, or the network has another structure than the traced one or more
            than ``max_parameters`` parameters.

    Note:
        ``O(N C p min(N C, p))`` time for C outputs; at most ``p x p`` plus one chunk of the Jacobian in memory. Rows
        beyond p are folded in by QR factorisation, which unlike ``J^T J`` does not square the singular values.

    Example:
        >>> from lightning_sym.symmetry.trace import trace_symmetry
        >>> network, inputs = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.1), nn.Linear(4, 2)), torch.randn(200, 3)
        >>> found = local_dimension(trace_symmetry(network, inputs), network, inputs)
        >>> found.nullity, found.orbit_dimension
        (4, 4)
    """
    check_numbers("in (0, 1)", tolerance=tolerance)
    check_integers(max_parameters=max_parameters)
    require_weights(symmetry, network)
    count = sum(p.numel() for p in network.parameters())
    if count > max_parameters:
        raise ValueError(
            f"the network has {count} parameters, and a dense Jacobian allows at most max_parameters={max_parameters}; "
            f"use a narrower network of this kind, or raise max_parameters (this takes {count}^2 numbers of 8 bytes)."
        )
    given = symmetry.call(inputs, keywords)
    check_arguments(network, given, ("inputs", "tolerance", "log_softmax", "training", "max_parameters"))
    call = on_device_of(network, double(given))
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    if not tensors or tensors[0].ndim == 0 or len(tensors[0]) == 0:
        raise ValueError(
            "inputs must hold a batch of at least one sample, as a tensor with the samples on its first axis."
        )
    exact = double_copy(network).requires_grad_(True)
    exact.train(training)
    transform: Callable[[Tensor], Tensor] = (lambda y: F.log_softmax(y, -1)) if log_softmax else (lambda y: y)
    with torch.no_grad(), fitting(*call.positional, *call.keywords.values()):
        call.run(exact)
    rows = _rows_of_batch(exact, call, transform) if training else jacobian_rows(exact, call, transform)
    equations, values = _singular_values(rows, torch.zeros(0, count, dtype=torch.float64, device=tensors[0].device))
    largest = float(values[0]) if len(values) else 0.0
    rank = int((values > tolerance * largest).sum())
    relative = values / largest if largest > 0 else values
    above = float(relative[rank - 1]) if rank else 0.0
    below = float(relative[rank]) if rank < len(values) else 0.0

    notes = []
    if equations < count:
        notes.append(
            f"the rank has not saturated: {equations} equations for {count} parameters; take at least "
            f"{math.ceil(2 * count * len(tensors[0]) / max(equations, 1))} samples"
        )
    if below > 0 and above / below < 1e3:
        notes.append(
            f"no clear gap: singular values {above:.1e} and {below:.1e} of the largest on either side of the tolerance"
        )
    groups = _count_units(symmetry, exact, call, notes)
    group = symmetry.dimension + (symmetry.common_shift if log_softmax else 0)
    orbit = min(group, count - rank)
    if orbit < group:
        notes.append(
            f"the group has {group} dimensions, its orbit here at most {orbit}: some elements change nothing (linear "
            "layers in a row that are wider than their outputs, weights that are zero)"
        )
    return LocalDimension(
        parameters=count,
        equations=equations,
        rank=rank,
        nullity=count - rank,
        orbit_dimension=orbit,
        excess=count - rank - orbit,
        singular_values=values,
        above=above,
        below=below,
        groups={name: found for name, found in groups.items() if any(found.values())},
        notes=tuple(notes),
        **{kind: sum(found[kind] for found in groups.values()) for kind in _KINDS},
    )


def _singular_values(blocks: Iterable[Tensor], folded: Tensor) -> tuple[int, Tensor]:
    """Return the number of rows, and the singular values of all rows together, on the CPU.

    Args:
        blocks: The rows, in chunks.
        folded: An empty matrix with as many columns.
    """
    count = 0
    for block in blocks:
        if not is_finite(block):
            raise ValueError("The Jacobian is not finite; check weights and inputs for NaN and infinity.")
        count += len(block)
        folded = torch.cat([folded, block])
        if len(folded) > 2 * folded.shape[1]:
            folded = torch.linalg.qr(folded, mode="r").R
    return count, torch.linalg.svdvals(folded).cpu() if folded.numel() else folded.new_zeros(0, device="cpu")


def _flat(outputs: Iterable[Tensor], transform: Callable[[Tensor], Tensor]) -> Tensor:
    """Flatten all floating outputs to one row per sample."""
    found = [transform(leaf) for leaf in outputs if leaf.is_floating_point()]
    return torch.cat([leaf.flatten(1) if leaf.ndim > 1 else leaf[:, None] for leaf in found], 1)


def jacobian_rows(
    network: nn.Module, call: Call, transform: Callable[[Tensor], Tensor] = lambda outputs: outputs
) -> Iterator[Tensor]:
    """Yield the Jacobian of all outputs by the trainable parameters, for networks that process samples separately.

    Args:
        network: In eval mode.
        call: One batch, with the samples on the first axis of every tensor.
        transform: Applied to the outputs.

    Yields:
        Chunks of at most 64 MiB (or of one sample), in the order of samples and then of outputs. Shape ``[n, P]``, in
        the network's dtype and on its device.
    """
    parameters = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    buffers = dict(network.named_buffers())
    leaves, spec = pytree.tree_flatten(call)
    batched = [isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves]
    samples = len(next(leaf for leaf, use in zip(leaves, batched, strict=True) if use))
    count = sum(p.numel() for p in parameters.values())

    def one(weights: dict[str, Tensor], *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        single = [next(given)[None] if use else leaf for leaf, use in zip(leaves, batched, strict=True)]
        own: Call = pytree.tree_unflatten(single, spec)
        with PassedGradients():
            outputs = functional_call(network, (weights, buffers), own.positional, dict(own.keywords))
        return _flat(own.counted(outputs), transform)[0]

    if len({len(leaf) for leaf, use in zip(leaves, batched, strict=True) if use}) > 1:  # common to all samples
        yield from _rows_of_batch(network, call, transform)
        return
    jacobian = vmap(jacrev(one), in_dims=(None, *[0] * sum(batched)), randomness="same")
    every = [leaf for leaf, use in zip(leaves, batched, strict=True) if use]
    with torch.no_grad():
        outputs = len(one(parameters, *(leaf[0] for leaf in every)))
    step = max(1, _CHUNK // (8 * count * max(outputs, 1)))
    for start in range(0, samples, step):
        try:
            with PlainDistances():
                parts = jacobian(parameters, *(leaf[start : start + step] for leaf in every))
        except (RuntimeError, NotImplementedError):
            if start:
                raise
            # Some operations have no batched version; differentiating the whole batch does not need one.
            yield from _rows_of_batch(network, call, transform)
            return
        # One matrix per parameter: samples, outputs, entries.
        yield torch.cat([part.flatten(2) for part in parts.values()], 2).flatten(0, 1).detach()


def _rows_of_batch(network: nn.Module, call: Call, transform: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Yield the Jacobian of the whole batch's outputs, in chunks of outputs."""
    with PassedGradients():
        output = _flat(call.outputs_of(network), transform).flatten()
    parameters = [p for p in network.parameters() if p.requires_grad]
    count = sum(p.numel() for p in parameters)
    step = max(1, min(len(output), _CHUNK // (8 * count)))
    for start in range(0, len(output), step):
        rows = []
        for index in range(start, min(start + step, len(output))):
            parts = torch.autograd.grad(output[index], parameters, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([part.flatten() for part in parts]))
        yield torch.stack(rows).detach()


def _count_units(symmetry: Symmetry, network: nn.Module, call: Call, notes: list[str]) -> dict[str, dict[str, int]]:
    """Count the units that explain an excess, by axis group, from their activations on the inputs."""
    modules = dict(network.named_modules())
    taps = {tap.name: tap for group in symmetry.groups for tap in group.taps}
    taps = {name: tap for name, tap in taps.items() if isinstance(modules[tap.module], _ACTIVATIONS)}
    with torch.no_grad():
        # In-place activations change their input, so the input is recorded separately.
        entered, left = (
            watched(network, taps, lambda: call.run(network), lambda _, value: value.clone(), inputs=inputs)
            for inputs in (True, False)
        )
    result, blind = {}, []
    for group in symmetry.groups:
        counts = dict.fromkeys(_KINDS, 0)
        seen = False
        for tap in group.taps:
            where = tap.positions(group.units)
            if where is None or tap.name not in left or entered[tap.name].shape != left[tap.name].shape:
                continue
            seen, (axis, positions) = True, where
            x, y = (t[tap.name].movedim(axis, 0)[positions].reshape(group.size, -1) for t in (entered, left))
            for kind, units in _kinds(modules[tap.module], x, y).items():
                counts[kind] += int(units.sum())
        if not seen:
            blind.append(group.name)
        counts["duplicated"] = _duplicates(group, symmetry.tensors(network))
        result[group.name] = counts
    if blind:
        shown = ", ".join(blind[:3]) + (f" and {len(blind) - 3} more" if len(blind) > 3 else "")
        notes.append(f"no activation module shows the units of {shown}: dead, always-on and constant units not counted")
    return result


def _kinds(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Classify units as dead, always on or constant, from the inputs and outputs of their activation."""
    dead, always_on = (y == 0).all(1), torch.zeros(len(y), dtype=torch.bool)
    if isinstance(module, _PIECEWISE):
        always_on = (x > 0).all(1)
        if not isinstance(module, (nn.ReLU, nn.ReLU6)):
            always_on |= (x < 0).all(1)
    spread = y.amax(1) - y.amin(1)
    return {"dead": dead, "always_on": always_on, "constant": (spread <= 1e-12 * y.abs().amax(1)) & ~dead}


def _duplicates(group: AxisGroup, tensors: Mapping[str, Tensor]) -> int:
    """Count units whose incoming weights and bias are a positive multiple of those of an earlier unit."""
    own = [place for place in group.occurrences if place.is_parameter]
    if not own:
        return 0
    module = own[0].tensor.rpartition(".")[0]
    rows = torch.cat(
        [
            together(tensors[place.tensor].detach(), place.axes)[place.positions].reshape(group.size, -1)
            for place in own
            if place.tensor.rpartition(".")[0] == module and place.axes == own[0].axes
        ],
        1,
    )
    norms = torch.linalg.vector_norm(rows, dim=1)
    # Zero rows are dead units, not duplicates.
    rows = rows[norms > 0] / norms[norms > 0, None]
    return int(((rows @ rows.T).tril(-1) > DUPLICATE).any(1).sum())
