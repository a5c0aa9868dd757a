"""Read checkpoints, align or average their networks, and write the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_sym.connectivity.interpolation import Barrier, Loss, mean_tensors
from lightning_sym.merging.alignment import merge
from lightning_sym.merging.checkpoint import Checkpoint, check_configurations, model_files
from lightning_sym.merging.equality import Equality, equality, rounding_of
from lightning_sym.merging.evaluation import ALIGNED, PLAIN, Data, Evaluation, Inputs, warnings_of
from lightning_sym.merging.network_files import NetworkFiles
from lightning_sym.networks.batch_norm import batch_norms, recalibrate_batch_norm
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.files import is_temporary
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.matching.activations import activation_matching
from lightning_sym.symmetry.matching.weights import Match, parameter_distance, weight_matching
from lightning_sym.symmetry.proof import change, double, double_copies, double_copy, outputs_of
from lightning_sym.symmetry.trace import trace_symmetry
from lightning_sym.symmetry.tracing.calls import Call

METHODS = ("weights", "activations")
# Matches are found from weights; inverting their matrices loses far less precision than this.
_UNCHANGED = 1e-8


@dataclass(frozen=True, eq=False)
class MergedCheckpoints:
    """The files that :func:`merge_checkpoints` wrote, and their evaluation.

    Attributes:
        out: The file or index that was written.
        files: The checkpoints.
        method: "weights" or "activations".
        align_only: Whether the second checkpoint was aligned to the first, instead of averaged with it.
        symmetry: The symmetry of the network.
        elements: One per checkpoint: the group element that aligned it.
        distances: For each but the first: Euclidean distance of its parameters to those of the first before and after
            alignment.
        equal: For each but the first, whether it equals the first, before and after the match, to the rounding of the
            files.
        largest_change: Largest relative change of an output by alignment, in float64.
        losses: By name: of each checkpoint, of the average without alignment, and of the average after alignment (of
            the aligned second one with ``align_only``). Loss, and accuracy or None. None without data.
        barriers: On the linear paths from the first to each other one, "unmatched" and by the method. None without
            data.
        notes: Omissions and their reasons.
    """

    out: Path
    files: tuple[Path, ...]
    method: str
    align_only: bool
    symmetry: Symmetry
    elements: tuple[Element, ...]
    distances: tuple[tuple[float, float], ...]
    equal: tuple[tuple[Equality, Equality], ...]
    largest_change: float
    losses: Mapping[str, tuple[float, float | None]] | None = None
    barriers: Mapping[str, Sequence[Barrier]] | None = None
    notes: tuple[str, ...] = field(default=())


def merge_checkpoints(
    files: Sequence[str | Path],
    out: str | Path,
    *,
    network: nn.Module,
    inputs: Any,
    method: Literal["weights", "activations"] = "weights",
    align_only: bool = False,
    recalibrate: bool = False,
    data: Data | None = None,
    train: Data | None = None,
    loss: Loss | None = None,
    points: int = 11,
    prefix: str | None = None,
    seed: int = 0,
    progress: bool = False,
) -> MergedCheckpoints:
    """Align checkpoints of one network up to its symmetry, and write their average.

    The symmetry is traced on the network and verified numerically, and :func:`lightning_sym.merging.merge` aligns
    the networks. Before anything is written, each aligned network is run to verify that its function is unchanged.

    Args:
        files: At least two (two with ``align_only``): state dicts, Lightning checkpoints, safetensors or the index of
            several. All of one architecture and in the same types.
        out: A path ending in ``.safetensors``, or a folder if the first checkpoint (with ``align_only`` the second) is
            an index, or has a transformers ``config.json`` in its folder; the model's other files are then copied.
            Existing files are not replaced.
        network: Network for the weights, with any weights. Not changed.
        inputs: Example inputs: an input, a tuple of positional arguments, or a :class:`Call`.
        method: "weights", or "activations", which needs ``train``.
        align_only: Write the second checkpoint with the permutation and scales of the first, the same function, instead
            of the average.
        recalibrate: Recompute the batch norm statistics of the average; needs ``train``.
        data: Test batches ``(inputs, targets)`` that can be read several times, for losses and barriers.
        train: Training batches for activations and for batch norm statistics. None: ``data``.
        loss: As for :func:`lightning_sym.connectivity.barrier`.
        points: Number of points on a linear path, both endpoints included, >= 2.
        prefix: Prefix of the weights' names, where several prefixes fit.
        seed: Seed of the matching.
        progress: Whether to show progress bars.

    Returns:
        The result, with losses and barriers if there are data.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the checkpoints do not match the network or each other, or an argument is out of its range.
            No file remains.
        OSError: If the result cannot be written. No file remains.
    """
    paths, train = [Path(file) for file in files], data if train is None else train
    _check_arguments(paths, method, align_only, recalibrate, train)
    written = paths[1] if align_only else paths[0]  # determines the form of the result
    _check_out(Path(out), written)
    if recalibrate and not batch_norms(network):
        raise ValueError("recalibrate needs batch norms, but the network has none; leave it out.")
    check_configurations(paths)
    copies = NetworkFiles(_existing(Path(out).absolute().parent))
    names = _distinct_names(paths)
    checkpoints, converted = _of_one_type(
        [Checkpoint.read(file, network, prefix, copies) for file in paths], names, copies
    )
    networks = [own.network for own in checkpoints]
    dtype = next(iter(networks[0].parameters())).dtype
    example = _call(inputs, dtype)
    with double_copies(copies.placed):
        symmetry = trace_symmetry(networks[0], *example.positional, output=example.output, **example.keywords)
        statistics = None if train is None else Inputs(train, dtype, equal=True)
        with unchecked():  # all are copies of one network, and aligned networks are run below
            aligned = _aligned(symmetry, networks, method, statistics, seed, progress, copies, align_only)
            largest = max(_change_of(symmetry, e, own) for e, own in zip(aligned.elements, networks, strict=True))
            equal = tuple(
                _compare_with_first(symmetry, checkpoints, number, aligned, seed) for number in range(1, len(paths))
            )
    allowed = max(symmetry.tolerance, _UNCHANGED)
    if not largest <= allowed:
        raise ValueError(
            f"an aligned network changes an output by {largest:.1e} (expected {allowed:.1e} at most), so that nothing "
            "was written; please report the architecture."
        )
    distances = tuple(
        (parameter_distance(networks[0], own), parameter_distance(aligned.networks[0], moved))
        for own, moved in zip(networks[1:], aligned.networks[1:], strict=True)
    )
    left = [f"{name} {reason}: unchanged" for name, reason in zip(names, aligned.reasons, strict=True) if reason]
    notes = (*left, *converted, *_notes(symmetry, network, data, recalibrate or align_only))
    if recalibrate and statistics is not None:
        recalibrate_batch_norm(aligned.result, statistics)
    losses, barriers, elements, result = None, None, aligned.elements, aligned.result
    if data is not None:
        evaluated = Evaluation(Inputs(data, dtype), statistics, loss, points, progress, copies)
        losses = evaluated.losses(names, networks, result, align_only)
        barriers = evaluated.barriers(networks, aligned.networks, method)
        notes += warnings_of(losses, barriers, method, align_only)
        if not align_only and aligned.moves and losses[PLAIN][0] < losses[ALIGNED][0]:
            elements = tuple(symmetry.identity() for _ in networks)
            result = copies.copy(networks[0], mean_tensors(networks))
            if recalibrate and statistics is not None:
                recalibrate_batch_norm(result, statistics)
    return MergedCheckpoints(
        out=checkpoints[1 if align_only else 0].write(result, out),
        files=tuple(paths),
        method=method,
        align_only=align_only,
        symmetry=symmetry,
        elements=elements,
        distances=distances,
        equal=equal,
        largest_change=largest,
        losses=losses,
        barriers=barriers,
        notes=(*_equality_notes(names, [after for _, after in equal]), *notes),
    )


# ---- inputs


def _check_arguments(
    files: Sequence[Path], method: str, align_only: bool, recalibrate: bool, train: Data | None
) -> None:
    if len(files) < 2 or (align_only and len(files) > 2):
        expected = "two" if align_only else "at least two"
        raise ValueError(f"files must be {expected} checkpoints{' to align' * align_only}, got {len(files)}.")
    if method not in METHODS:
        raise ValueError(f"method must be 'weights' or 'activations', got {method!r}.")
    if align_only and recalibrate:
        raise ValueError("recalibrate needs an average, but align_only writes none; leave one of them out.")
    for needed, what in ((method == "activations", "method='activations'"), (recalibrate, "recalibrate")):
        if needed and train is None:
            raise ValueError(f"{what} needs data to run the networks on; pass data (--data).")


def _check_out(out: Path, written: Path) -> None:
    """Check, before any computation, that a result in the form of a file can be written."""
    several, folder = written.suffix == ".json", out.suffix != ".safetensors"
    if (several and not folder) or (folder and not several and not model_files(written)):
        expected = f"a folder for the shards of {written.name}" if several else "a file that ends in .safetensors"
        raise ValueError(f"out is {out}; expected {expected}.")
    # A killed run leaves only hidden files, which do not interfere.
    if out.exists() and not (folder and out.is_dir() and all(is_temporary(path) for path in out.iterdir())):
        raise ValueError(f"{out} exists already; expected {'an empty' if folder else 'a new'} path.")


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _of_one_type(
    checkpoints: Sequence[Checkpoint], names: Sequence[str], copies: NetworkFiles
) -> tuple[list[Checkpoint], list[str]]:
    """Convert all checkpoints to double precision if one has it; also return notes on checkpoints of other types."""
    first, notes = checkpoints[0], []
    for name, other in zip(names[1:], checkpoints[1:], strict=True):
        unlike = [own for own, dtype in first.dtypes.items() if other.dtypes.get(own, dtype) != dtype]
        if unlike:
            types = str(other.dtypes[unlike[0]])[6:], str(first.dtypes[unlike[0]])[6:]
            notes.append(f"{name} holds {unlike[0]} as {types[0]}, and {names[0]} as {types[1]}: it was converted")
    exact = [torch.float64 in {own.dtype for own in each.network.parameters()} for each in checkpoints]
    if any(exact) and not all(exact):
        with double_copies(copies.placed):
            checkpoints = [
                each if is_exact else replace(each, network=double_copy(each.network).eval())
                for each, is_exact in zip(checkpoints, exact, strict=True)
            ]
    return list(checkpoints), notes


def _call(inputs: Any, dtype: torch.dtype) -> Call:
    """Return the example, with floating tensors in the dtype of the weights."""
    call = Call.of(inputs)
    return call if dtype != torch.float64 else Call(*double(tuple(call)))


# ---- alignment and evaluation


@dataclass(frozen=True)
class _Aligned:
    """Aligned networks.

    Attributes:
        elements: The group element that aligned each network.
        found: The match of each network, used or not.
        networks: The aligned networks.
        result: The network to write.
        reasons: Why a network was left unchanged, or "".
    """

    elements: tuple[Element, ...]
    found: tuple[Element, ...]
    networks: Sequence[nn.Module]
    result: nn.Module
    reasons: tuple[str, ...]

    @property
    def moves(self) -> bool:
        """Whether a network was changed."""
        return not all(self.reasons[1:])


def _aligned(
    symmetry: Symmetry,
    networks: Sequence[nn.Module],
    method: Literal["weights", "activations"],
    batches: Data | None,
    seed: int,
    progress: bool,
    copies: NetworkFiles,
    align_only: bool,
) -> _Aligned:
    """Align networks to the first one, and return them with their average or the second one."""
    if align_only:
        match = _match(symmetry, networks, method, batches, seed, progress)
        elements, result = (symmetry.identity(), match.element), copies.keep(match.network)
        return _Aligned(elements, elements, [networks[0], result], result, ("", ""))
    how: Literal["auto", "activations"] = "activations" if method == "activations" else "auto"
    merged = merge(symmetry, networks, align=how, batches=batches, seed=seed, copies=copies)
    aligned = [
        own if merged.reasons[number] or not number else symmetry.act(element, copies.keep(own), inplace=True)
        for number, (element, own) in enumerate(zip(merged.elements, networks, strict=True))
    ]
    return _Aligned(merged.elements, merged.found, aligned, merged.network, merged.reasons)


def _match(
    symmetry: Symmetry, networks: Sequence[nn.Module], method: str, batches: Data | None, seed: int, progress: bool
) -> Match:
    a, b = networks
    if method == "activations":
        assert batches is not None
        return activation_matching(symmetry, a, b, batches, seed=seed)
    return weight_matching(symmetry, a, b, seed=seed, progress=progress)


def _compare_with_first(
    symmetry: Symmetry, checkpoints: Sequence[Checkpoint], number: int, aligned: _Aligned, seed: int
) -> tuple[Equality, Equality]:
    """Test whether a checkpoint equals the first one, before and after the match."""
    first, other = checkpoints[0], checkpoints[number]
    rounding = rounding_of(*first.dtypes.values(), *other.dtypes.values())
    elements = symmetry.identity(), aligned.found[number]
    before, after = equality(symmetry, first.network, other.network, elements, rounding, seed=seed)
    return before, after


def _change_of(symmetry: Symmetry, element: Element, network: nn.Module) -> float:
    """Return the largest relative change of an output under an element, on the traced examples, in float64."""
    if symmetry.factors.is_identity(element):
        return 0.0
    exact = double_copy(network).eval()
    with torch.no_grad():
        examples = [Call(*double(tuple(call))) for call in symmetry.examples]
        before = [outputs_of(exact, call) for call in examples]
        symmetry.act(element, exact, inplace=True)
        after = [outputs_of(exact, call) for call in examples]
    return max((change(old, new) for old, new in zip(before, after, strict=True)), default=0.0)


def _distinct_names(files: Sequence[Path]) -> list[str]:
    """Return the names of files, numbered where two share a name."""
    names = [file.name for file in files]
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _equality_notes(names: Sequence[str], equal: Sequence[Equality]) -> tuple[str, ...]:
    """Describe which checkpoints equal the first one up to symmetry, and which do not."""
    first, *others = names
    kinds = list(zip(others, equal, strict=True))
    same = [name for name, own in kinds if own.answer == "equal"]
    unlike = [name for name, own in kinds if own.answer == "not found"]
    notes = [f"{', '.join(same)}: equal to {first} up to symmetry, to rounding"] if same else []
    if unlike:
        which = "all others" if len(unlike) == len(others) > 1 else ", ".join(unlike)
        inputs = max(own.inputs for own in equal)
        notes.append(f"{which}: not found to equal {first}, as outputs differ on {inputs} random inputs")
    for name, own in kinds:
        if own.answer == "same function":
            notes.append(
                f"{name}: the same function as {first} on {own.inputs} random inputs, by other weights ({own.worst} "
                f"differs {own.times:.2g} times as much as rounding allows)"
            )
    return tuple(notes)


def _notes(symmetry: Symmetry, result: nn.Module, data: Data | None, settled: bool) -> tuple[str, ...]:
    notes = []
    if data is None:
        notes.append("without data there are no losses, no barrier and no recalibration (--data)")
    if batch_norms(result) and not settled:
        notes.append("the batch norm statistics are averages and match no network (--recalibrate)")
    return (*notes, *symmetry.notes)
