"""Read checkpoints, align or average their networks, and write the result."""

import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym._checkpoint_files import check_out, description_of
from lightning_sym._files import write_atomically
from lightning_sym._notebook import Tabular
from lightning_sym._text import nearest
from lightning_sym.connectivity.interpolation import Barrier, Loss
from lightning_sym.merging.adapters import Adapter, with_adapter
from lightning_sym.merging.alignment import HOW, Alignment, How, aligned_without_search
from lightning_sym.merging.alignment import align as aligned_networks
from lightning_sym.merging.card import card_of, configuration_of
from lightning_sym.merging.checkpoint import Checkpoint, example_in, model_of
from lightning_sym.merging.equality import Equality, equal_weights, equality, rounding_of
from lightning_sym.merging.evaluation import ALIGNED, PLAIN, Data, Evaluation, warnings_of
from lightning_sym.merging.folders import check_configurations
from lightning_sym.merging.formulas import Tally
from lightning_sym.merging.network_files import NetworkFiles, with_tensors
from lightning_sym.merging.parameters import Layers, MergeSettings
from lightning_sym.merging.repair import repair
from lightning_sym.merging.result import MergedTensors
from lightning_sym.merging.sources import Sources
from lightning_sym.merging.traced import linear_symmetry
from lightning_sym.models import example_of
from lightning_sym.networks.batch_norm import EqualBatches, batch_norms, recalibrate_batch_norm
from lightning_sym.networks.modes import containers_kept, evaluating
from lightning_sym.symmetry import Call, Element, trace_symmetry
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.proof import change, double, double_copies, double_copy, outputs_of, tolerance_of
from lightning_sym.symmetry.tracing.graph.capture import state_tensors

_NOT_ALIGNED = "was not aligned"
_NAMED = 4  # most networks that a note names
# Networks whose matrices are farther apart do not come from one another: other seeds had 0.49 to 0.84 after alignment,
# noisy fine-tunes 0.02.
_UNRELATED = 0.3
# Matches are found from weights; inverting their matrices loses far less precision than this.
_UNCHANGED = 1e-8
_LARGE = 2**22  # networks with more numbers run in single precision first, as copies in double precision take long


@dataclass(frozen=True, eq=False)
class MergedCheckpoints(Tabular):
    """The files that :func:`merge_checkpoints` wrote, and their evaluation.

    Attributes:
        out: The file or index that was written.
        names: Short names of the networks: the reference first.
        files: Their files.
        settings: The method and its settings.
        align: How the networks were aligned: "auto", "weights", "activations" or "none".
        align_only: Whether the second checkpoint was aligned to the first, instead of merged with it.
        has_base: Whether the differences of the others from the reference are merged.
        symmetry: The symmetry of the network.
        elements: One per network: the group element that aligned it.
        reasons: One per network: why it was left unchanged; "" if it was aligned, or is the reference.
        distances: For each but the reference: Euclidean distance of its parameters to those of the reference before and
            after alignment.
        equal: For each but the reference, whether it equals the reference, before and after the match, to the rounding
            of the files.
        largest_change: Largest relative change of an output by alignment: in float64, or for large networks in float32
            where that shows no more than rounding.
        tally: Cosines of differences, shares of dropped numbers and sign conflicts, of methods with a base.
        losses: By name: of each network, of the result without alignment, and of the result (of the aligned second one
            with ``align_only``). Loss, and accuracy or None. None without data.
        barriers: On the linear paths from the reference to each other one, "unmatched" and "aligned". None without
            data.
        notes: Omissions and their reasons.
    """

    out: Path
    names: tuple[str, ...]
    files: tuple[Path, ...]
    settings: MergeSettings
    align: str
    align_only: bool
    has_base: bool
    symmetry: Symmetry
    elements: tuple[Element, ...]
    reasons: tuple[str, ...]
    distances: tuple[tuple[float, float], ...]
    equal: tuple[tuple[Equality, Equality], ...]
    largest_change: float
    tally: Tally
    losses: Mapping[str, tuple[float, float | None]] | None = None
    barriers: Mapping[str, Sequence[Barrier]] | None = None
    notes: tuple[str, ...] = field(default=())

    def titled_rows(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the method, and for each network its distance to the reference and the reason to leave it as it is."""
        return f"{len(self.names)} networks merged by {self.settings.method.name}: {self.out}", [
            {"network": name, "distance before": before, "distance after": after, "left unchanged": reason}
            for name, (before, after), reason in zip(
                self.names, [(None, None), *self.distances], self.reasons, strict=True
            )
        ]


def merge_checkpoints(
    files: Sequence[str | Path],
    out: str | Path,
    *,
    network: nn.Module | None = None,
    inputs: Any = None,
    base: str | Path | None = None,
    method: str | MergeSettings = "linear",
    align: How = "auto",
    align_only: bool = False,
    recalibrate: bool = False,
    ignore: Sequence[str] = (),
    out_dtype: str | None = None,
    data: Data | None = None,
    train: Data | None = None,
    loss: Loss | None = None,
    points: int = 11,
    prefix: str | None = None,
    seed: int = 0,
    progress: bool = False,
    description: str | None = None,
    notes: Sequence[str] = (),
    **settings: Any,
) -> MergedCheckpoints:
    """Align checkpoints of one network up to its symmetry, merge them, and write the result.

    The reference is the base, or else the first checkpoint: the others are aligned to it (:func:`align`), and the
    result has its names, types and shards. The symmetry is traced on the network. Before anything is written, each
    aligned network is run to verify that its function is unchanged.

    Args:
        files: At least two (two with ``align_only``; methods with a base need one): state dicts, Lightning checkpoints,
            safetensors, the index of several, folders of models of transformers, zoos (all members), or
            ``FOLDER+ADAPTER`` for a model with a LoRA adapter. All of one architecture.
        out: A path ending in ``.safetensors``, or a folder if the reference (with ``align_only`` the second checkpoint)
            is an index or the folder of a model; the model's other files are then copied. Existing files are not
            replaced.
        network: Network for the weights, with any weights. Not changed. None: as the folder of the reference describes
            it.
        inputs: Example inputs: an input, a tuple of positional arguments, or a :class:`Call`. None: drawn for the
            network of the folder.
        base: The parent of the networks, for methods that merge differences from it. It may be one of ``files``.
        method: Name of a method (:data:`METHODS`), or a method with its settings.
        align: "auto": by weights, where that brings them nearer; networks in one order are not changed. "weights" and
            "activations" (with ``train``) force the search. "none" merges the networks without it.
        align_only: Write the second checkpoint with the permutation and scales of the first, the same function, instead
            of merging them.
        recalibrate: Recompute the batch norm statistics of the result, or, without batch norms, give hidden units the
            mean and the deviation of the merged networks (REPAIR); needs ``train``.
        ignore: Patterns of names of tensors that are left out, or copied from the reference.
        out_dtype: Type of the result's tensors, such as "bfloat16"; None for those of the reference.
        data: Test batches ``(inputs, targets)`` that can be read several times, for losses and barriers.
        train: Training batches for activations and for batch norm statistics. None: ``data``.
        loss: As for :func:`lightning_sym.connectivity.barrier`.
        points: Number of points on a linear path, both endpoints included, >= 2.
        prefix: Prefix of the weights' names, where several prefixes fit.
        seed: Seed of the matching and of random masks.
        progress: Whether to show progress bars.
        description: Text of the result's README.md about its settings, such as a configuration in YAML.
        notes: Notes to add to those of the merge.
        **settings: Settings of the method, each one value, or one per checkpoint; see :meth:`MergeSettings.of`.

    Returns:
        The result, with losses and barriers if there are data.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the checkpoints do not match the network or each other, or an argument is out of its range.
            No file remains.
        OSError: If the result cannot be written. No file remains.
    """
    train = data if train is None else train
    asked = Sources.of(files, base, "linear" if align_only else method, settings, seed)
    _check_arguments(asked, align, align_only, recalibrate, train)
    if len({one.file.resolve() for one in asked.found}) == 1 and not align_only:
        align = "none"  # one model, with adapters
    written = asked.found[1 if align_only else 0]  # determines the form of the result
    check_out(Path(out), written)
    described = description_of(asked.found[0]) if network is None else None
    if network is None:
        model = model_of(asked.found[0])
        network, inputs = model.network, example_of(model) if inputs is None else inputs
    differing = check_configurations([written.file, *(one.file for one in asked.found)])
    layers = Layers([name for name, own in state_tensors(network).items() if own.is_floating_point()])
    notes = (*notes, *asked.settings.check(layers))
    copies = NetworkFiles(_existing(Path(out).absolute().parent))
    checkpoints, converted = _read_all(asked, network, described, prefix, copies, ignore)
    networks = [own.network for own in checkpoints]
    dtype = next(iter(networks[0].parameters())).dtype
    example = example_in(dtype, inputs)
    statistics = None if train is None else EqualBatches(train)
    with double_copies(copies.placed), unchecked():  # all are copies of one network, and moved networks are run below
        symmetry, aligned, largest = _alignment_of(
            networks, example, asked, align, align_only, statistics, seed, copies
        )
        equal = tuple(
            _compare_with_first(symmetry, checkpoints, number, aligned, seed) for number in range(1, len(networks))
        )
    others = (*_strangers(asked, aligned), *notes, *differing, *converted)
    others += _notes(network, data, recalibrate or align_only or len(networks) == 1)
    others += symmetry.notes if aligned.moved else ()
    if math.isnan(symmetry.worst_error):  # traced in part
        reason = "as no network needs them" if aligned.moved else "as no network moves"
        symmetry.notes = (*symmetry.notes, f"translations are not included, {reason}")
    merged = asked.merged(aligned.networks)
    tensors: Mapping[str, Tensor] = state_tensors(aligned.networks[1]) if align_only else merged
    losses, barriers = None, None
    if recalibrate or data is not None:
        result = copies.copy(networks[0], tensors.items())
        if recalibrate and statistics is not None:
            _recalibrate(result, asked.parents(aligned.networks), statistics, merged)
        tensors = state_tensors(result)
    if data is not None:
        evaluated = Evaluation(data, statistics, loss, points, progress, copies)
        plain = result if align_only else copies.copy(networks[0], asked.merged(networks).items())
        losses = evaluated.losses(asked.names, networks, plain, result, align_only)
        barriers = evaluated.barriers(networks, aligned.networks)
        # Equal networks merge to themselves, whatever the loss of another mean.
        decided = not align_only and all(after.answer == "equal" for _, after in equal)
        others += () if decided else warnings_of(losses, barriers, align, align_only)
        if not align_only and not decided and aligned.moved and losses[PLAIN][0] < losses[ALIGNED][0]:
            aligned, merged = _undone(symmetry, aligned, networks), asked.merged(networks)
            if recalibrate and statistics is not None:
                _recalibrate(plain, asked.parents(networks), statistics, merged)
            tensors = state_tensors(plain)
    found = MergedCheckpoints(
        out=Path(out),
        names=asked.names,
        files=tuple(one.file for one in asked.found),
        settings=asked.settings,
        align=align,
        align_only=align_only,
        has_base=asked.has_base,
        symmetry=symmetry,
        elements=aligned.elements,
        reasons=aligned.reasons,
        distances=aligned.distances[1:],
        equal=equal,
        largest_change=largest,
        tally=merged.tally,
        losses=losses,
        barriers=barriers,
        notes=(*_equality_notes(asked.names, [after for _, after in equal]), *_reasons(asked, aligned), *others),
    )
    options = {"align": align, "out_dtype": out_dtype, "ignore": list(ignore), "recalibrate": recalibrate}
    has_card = not align_only and Path(out).suffix != ".safetensors"
    beside = {"README.md": _readme(asked, aligned, description, options, Path(out).name)} if has_card else {}
    form = checkpoints[1 if align_only else 0]
    place = form.write(tensors, out, out_dtype=out_dtype, beside=beside)
    return replace(found, out=place, notes=(*found.notes, *merged.tally.notes, *form.left_behind(out)))


def _readme(
    asked: Sources, aligned: Alignment, description: str | None, options: Mapping[str, Any], title: str
) -> Callable[[Path], None]:
    """Return a function that writes the README.md of the result to a path."""
    if description is None:
        given = [one.given for one in asked.found]
        models, base = [given[place] for place in asked.models], given[0] if asked.has_base else None
        description = configuration_of(asked.settings, models, base, options)
    return functools.partial(write_atomically, content=card_of(asked, aligned.reasons, description, title))


# ---- inputs


def _check_arguments(asked: Sources, align: str, align_only: bool, recalibrate: bool, train: Data | None) -> None:
    if align not in HOW:
        raise ValueError(f"align must be one of {', '.join(HOW)}, got {align!r}.{nearest(align, HOW)}")
    if len(asked.found) < 2 and asked.settings.method.most != 1:
        raise ValueError(f"{asked.settings.method.name} merges two or more checkpoints, got one; pass another.")
    if align_only and (len(asked.found) != 2 or asked.has_base or align == "none"):
        raise ValueError(
            f"align_only writes the second of two checkpoints, aligned to the first; got {len(asked.found)} checkpoints"
            f"{', and align=none' * (align == 'none')}."
        )
    if align_only and recalibrate:
        raise ValueError("recalibrate needs a merged network, but align_only writes none; leave one of them out.")
    for needed, what in ((align == "activations", "align='activations'"), (recalibrate, "recalibrate")):
        if needed and train is None:
            raise ValueError(f"{what} needs data to run the networks on; pass data (--data).")


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


def _read_all(
    asked: Sources,
    network: nn.Module,
    described: Path | None,
    prefix: str | None,
    copies: NetworkFiles,
    ignore: Sequence[str],
) -> tuple[list[Checkpoint], list[str]]:
    """Read all checkpoints, with their adapters, in one type; also return notes."""
    found: list[Checkpoint] = []
    notes: list[str] = []
    unmatched = dict.fromkeys(ignore)
    for one in asked.found:
        model = found[0].network if found else network  # its values replace ignored tensors
        named = None if described is None else description_of(one) or described  # configurations are alike
        own = Checkpoint.read(one.file, model, prefix, copies, ignore, named)
        if one.adapter is not None:
            adapted = with_adapter(state_tensors(own.network), Adapter.read(one.adapter))
            own = replace(own, network=with_tensors(own.network, copies.placed(adapted.items())).eval())
        held = {*own.stored, *own.names.values(), *own.extras.values()}
        unmatched = {pattern: None for pattern in unmatched if not fnmatch.filter(held, pattern)}
        found.append(own)
        notes += own.notes
    notes += [f"ignore={pattern!r} matches no tensor" for pattern in unmatched]
    checkpoints, converted = _of_one_type(found, asked.names, copies)
    return checkpoints, [*notes, *converted]


# ---- alignment


def _alignment_of(
    networks: Sequence[nn.Module],
    example: Call,
    asked: Sources,
    align: How,
    align_only: bool,
    batches: Data | None,
    seed: int,
    copies: NetworkFiles,
) -> tuple[Symmetry, Alignment, float]:
    """Trace the symmetry and align the networks to the first; trace only in part if this needs no search.

    Returns:
        The symmetry, the alignment, and the largest change of an output of a moved network.

    Raises:
        ValueError: See :func:`_check_unchanged`.
    """
    how: How = "weights" if align_only and align == "auto" else align
    rounds = 1 if asked.has_base or align_only else 20
    find = functools.partial(
        aligned_networks,
        networks=networks,
        how=how,
        batches=batches,
        seed=seed,
        copies=copies,
        max_rounds=rounds,
    )
    quick = functools.partial(aligned_without_search, networks=networks, seed=seed, copies=copies)
    if how != "activations":
        symmetry = linear_symmetry(networks[0], example)
        aligned = find(symmetry) if how == "none" else quick(symmetry, how=how)
        if aligned is not None:
            largest, unchanged = _largest_change(symmetry, aligned, networks)
            if unchanged:
                return symmetry, aligned, largest
    # Any element may act. Values inside exchanged modules have no names by which activations could be compared.
    symmetry = trace_symmetry(networks[0], example, exchange=how != "activations")
    aligned = find(symmetry)
    return symmetry, aligned, _check_unchanged(symmetry, aligned, networks)


def _recalibrate(network: nn.Module, parents: Sequence[nn.Module], data: Data, merged: MergedTensors) -> None:
    """Recompute the statistics of batch norms, or else repair the units of hidden layers."""
    if batch_norms(network):
        recalibrate_batch_norm(network, data)
    else:
        repair(network, parents, data, merged.shares)


def _check_unchanged(symmetry: Symmetry, aligned: Alignment, networks: Sequence[nn.Module]) -> float:
    """Return the largest relative change of an output of a moved network.

    Raises:
        ValueError: If it is larger than the tolerance of the symmetry.
    """
    largest, unchanged = _largest_change(symmetry, aligned, networks)
    if not unchanged:
        allowed = max(symmetry.tolerance, _UNCHANGED)
        raise ValueError(
            f"an aligned network changes an output by {largest:.1e} (expected {allowed:.1e} at most), so that nothing "
            "was written; please report the architecture."
        )
    return largest


def _largest_change(symmetry: Symmetry, aligned: Alignment, networks: Sequence[nn.Module]) -> tuple[float, bool]:
    """Return the largest relative change of an output of a moved network, and whether all changes are rounding."""
    largest, unchanged = 0.0, True
    for element, network, moved in zip(aligned.elements, networks, aligned.networks, strict=True):
        if moved is not network:
            change, allowed = _change_in_single(symmetry, network, moved), tolerance_of(torch.float32)
            if not change <= allowed:
                change, allowed = _change_of(symmetry, element, network), max(symmetry.tolerance, _UNCHANGED)
            largest, unchanged = max(largest, change), unchanged and change <= allowed
    return largest, unchanged


def _undone(symmetry: Symmetry, aligned: Alignment, networks: Sequence[nn.Module]) -> Alignment:
    """Return the alignment in which no network moves."""
    elements = tuple(symmetry.identity() for _ in networks)
    first, *others = aligned.reasons
    reasons = (first, *(reason or "has the lower loss unaligned" for reason in others))
    return replace(aligned, elements=elements, networks=tuple(networks), reasons=reasons)


def _reasons(asked: Sources, aligned: Alignment) -> list[str]:
    """Describe the alignment of each network but the reference."""
    notes = []
    rows = list(zip(asked.names, aligned.reasons, aligned.distances, strict=True))
    for name, reason, (before, after) in rows[1:]:
        if reason != _NOT_ALIGNED:
            done = f"{reason}: unchanged" if reason else f"was aligned (distance {before:.4g}, then {after:.4g})"
            notes.append(f"{name} {done}")
    return notes


def _strangers(asked: Sources, aligned: Alignment) -> list[str]:
    """Name the networks that do not seem to come from the base."""
    base, *others = aligned.networks
    pairs = zip(asked.names[1:], others, strict=True) if asked.has_base else ()
    strange = [name for name, network in pairs if _apart(base, network) > _UNRELATED]
    return [f"{', '.join(strange)}: does not seem to come from the base {asked.names[0]}"] if strange else []


def _apart(one: nn.Module, two: nn.Module) -> float:
    """Return the squared distance of two networks' matrices relative to the sum of their squared norms, in [0, 2]."""
    square, total = 0.0, 0.0
    for own, other in zip(one.parameters(), two.parameters(), strict=True):
        if own.ndim > 1:
            a, b = own.detach(), other.detach()
            square += float(torch.linalg.vector_norm(a - b)) ** 2
            total += float(torch.linalg.vector_norm(a)) ** 2 + float(torch.linalg.vector_norm(b)) ** 2
    return square / total if total else 0.0


def _compare_with_first(
    symmetry: Symmetry, checkpoints: Sequence[Checkpoint], number: int, aligned: Alignment, seed: int
) -> tuple[Equality, Equality]:
    """Test whether a checkpoint equals the first one, before and after the match."""
    first, other = checkpoints[0], checkpoints[number]
    rounding = rounding_of(*first.dtypes.values(), *other.dtypes.values())
    if not aligned.reasons[number]:
        moved = equal_weights(first.network, aligned.networks[number], rounding)
        if moved.answer == "equal":  # and so are the functions, as the element keeps that of the other network
            return equal_weights(first.network, other.network, rounding), moved
    elements = symmetry.identity(), aligned.found[number]
    before, after = equality(symmetry, first.network, other.network, elements, rounding, seed=seed)
    return before, after


def _change_in_single(symmetry: Symmetry, network: nn.Module, moved: nn.Module) -> float:
    """Return the same as :func:`_change_of` for large networks in single precision, without copies; NaN for others."""
    parameters = list(network.parameters())
    if sum(own.numel() for own in parameters) < _LARGE or any(own.dtype != torch.float32 for own in parameters):
        return math.nan
    with torch.no_grad(), evaluating(network), evaluating(moved), containers_kept(network), containers_kept(moved):
        pairs = [(outputs_of(network, call), outputs_of(moved, call)) for call in symmetry.examples]
    return max((change(old, new) for old, new in pairs), default=0.0)


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


def _equality_notes(names: Sequence[str], equal: Sequence[Equality]) -> tuple[str, ...]:
    """Describe which checkpoints equal the first one up to symmetry, and which do not."""
    first, *others = names
    kinds = list(zip(others, equal, strict=True))
    same = [name for name, own in kinds if own.answer == "equal"]
    unlike = [name for name, own in kinds if own.answer == "not found"]
    notes = [f"{', '.join(same)}: equal to {first} up to symmetry, to rounding"] if same else []
    if unlike:
        which = ", ".join(unlike) if len(unlike) <= _NAMED else f"{len(unlike)} of {len(others)} checkpoints"
        inputs = max(own.inputs for own in equal)
        notes.append(f"{which}: not found to equal {first}, as outputs differ on {inputs} random inputs")
    for name, own in kinds:
        if own.answer == "same function":
            notes.append(
                f"{name}: the same function as {first} on {own.inputs} random inputs, by other weights ({own.worst} "
                f"differs {own.times:.2g} times as much as rounding allows)"
            )
    return tuple(notes)


def _notes(result: nn.Module, data: Data | None, settled: bool) -> tuple[str, ...]:
    notes = []
    if data is None:
        notes.append("without data there are no losses, no barrier and no recalibration (--data)")
    if batch_norms(result) and not settled:
        notes.append("the batch norm statistics are averages and match no network (--recalibrate)")
    return tuple(notes)
