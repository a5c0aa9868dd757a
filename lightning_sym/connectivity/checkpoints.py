"""Read checkpoints, align or average their networks, and write the result."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_sym._documents import load_json
from lightning_sym.connectivity.equality import Equality, equality, rounding_of
from lightning_sym.connectivity.interpolation import Barrier, Loss, barrier, curve_losses, mean_tensors
from lightning_sym.connectivity.merging import merge
from lightning_sym.connectivity.network_files import NetworkFiles, with_tensors
from lightning_sym.networks.batch_norm import batch_norms, recalibrate_batch_norm
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.files import Shards, is_temporary, named_for, write_moved, write_new
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.matching.activations import activation_matching
from lightning_sym.symmetry.matching.weights import Match, parameter_distance, weight_matching
from lightning_sym.symmetry.proof import all_finite, change, double, double_copies, double_copy, outputs_of
from lightning_sym.symmetry.trace import trace_symmetry
from lightning_sym.symmetry.tracing.calls import Call
from lightning_sym.symmetry.tracing.capture import first_names, state_tensors
from lightning_sym.weights import fit_weights, read_weights

METHODS = ("weights", "activations")
_PLAIN, _ALIGNED = "mean as they are", "mean, aligned"  # names of weight averages
Data = Iterable[Sequence[Tensor]]
# Matches are found from weights; inverting their matrices loses far less precision than this.
_UNCHANGED = 1e-8
# Files of a model that are not copied: weights in other files and formats, training states, descriptions of weights.
_NOT_COPIED = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf"),
    *("trainer_state.json", "readme.md", "*.tmp"),
)
# Settings of a configuration that are independent of the architecture.
_NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint and its network.

    Attributes:
        file: The file, or the index of several.
        network: Network with the checkpoint's weights, in evaluation mode; in double precision if the file is, else in
            single precision.
        shards: Layout on disk; None if the file is not safetensors.
        dtypes: The type of each floating tensor in the file, by the network's names.
    """

    file: Path
    network: nn.Module
    shards: Shards | None
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def read(
        cls, file: str | Path, network: nn.Module, prefix: str | None = None, copies: NetworkFiles | None = None
    ) -> "Checkpoint":
        """Read a checkpoint into a copy of a network.

        Tensors stay in the memory-mapped file, except those of another type, which are converted.

        Args:
            file: A state dict, a Lightning checkpoint, a file of safetensors or the index of several.
            network: Network for the weights; may be without weights, on torch's meta device. Not changed.
            prefix: Prefix of the weights' names, where several prefixes fit.
            copies: Storage for converted tensors; None for memory.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is damaged, not finite, or has another configuration.
            OSError: If there is no space for converted tensors.
        """
        file = Path(file)
        shards = Shards(file) if file.suffix in (".json", ".safetensors") else None
        tensors = read_weights(file, mapped=True) if shards is None else shards.read_all()
        state = fit_weights(tensors, network, prefix=prefix, source=str(file))
        floating = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        for name, tensor in floating.items():
            if not all_finite(tensor):
                raise ValueError(f"{file} holds {name} with values that are not finite; expected finite weights.")
        exact = bool(floating) and all(tensor.dtype == torch.float64 for tensor in floating.values())
        names = first_names(network)
        held: dict[str, Tensor] = {}
        for name, tensor in state.items():
            held.setdefault(names[name], tensor)
        types = {
            name: torch.float64 if exact and own.is_floating_point() else own.dtype
            for name, own in state_tensors(network).items()
        }
        others = ((name, own.to(types[name])) for name, own in held.items() if own.dtype != types[name])
        held |= (copies if copies is not None else NetworkFiles()).placed(others)
        found = with_tensors(network, held).eval()
        dtypes = {name: tensor.dtype for name, tensor in floating.items()}
        return cls(file, found.double() if exact else found, shards, dtypes)

    def write(self, network: nn.Module, out: str | Path) -> Path:
        """Write another network's weights in this checkpoint's form: names, types, shards and metadata.

        Checkpoints other than safetensors become one safetensors file with the network's names. If ``out`` is a folder,
        the other files of a transformers model (configuration, tokenizer) are copied.

        Args:
            network: Network of this checkpoint's architecture.
            out: As :func:`merge_checkpoints` takes it.

        Returns:
            The written file or index.

        Raises:
            ValueError: If a number exceeds the range of its type. No file remains.
            OSError: If it cannot be written. No file remains.
        """
        out = Path(out)
        model_files = [] if out.suffix == ".safetensors" else _model_files(self.file)
        tensors = {name: tensor.detach() for name, tensor in state_tensors(network).items()}
        names = first_names(network)
        if self.shards is None:
            held = {name: tensors[name] for name in network.state_dict() if names.get(name) == name}
            types = {name: self.dtypes.get(name, tensor.dtype) for name, tensor in held.items()}
            return _write_into_folder(held, types, out, model_files) if model_files else write_new(held, types, out)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        needed = [name for name, _ in network.named_parameters()]
        named = named_for(self.shards, shapes, names, needed, ())

        def moved(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
            for name in weights:
                if name in moving:
                    yield name, tensors[name]

        moving = {name for name in named.values() if tensors[name].is_floating_point()}
        return write_moved(self.shards, named, moved, moving, out, model_files)


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

    The symmetry is traced on the network and verified numerically, and :func:`lightning_sym.connectivity.merge` aligns
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
    _check_configurations(paths)
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
        evaluated = _Evaluation(Inputs(data, dtype), statistics, loss, points, progress, copies)
        losses = evaluated.losses(names, networks, result, align_only)
        barriers = evaluated.barriers(networks, aligned.networks, method)
        notes += _warnings(losses, barriers, method, align_only)
        if not align_only and aligned.moves and losses[_PLAIN][0] < losses[_ALIGNED][0]:
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
    if (several and not folder) or (folder and not several and not _model_files(written)):
        expected = f"a folder for the shards of {written.name}" if several else "a file that ends in .safetensors"
        raise ValueError(f"out is {out}; expected {expected}.")
    # A killed run leaves only hidden files, which do not interfere.
    if out.exists() and not (folder and out.is_dir() and all(is_temporary(path) for path in out.iterdir())):
        raise ValueError(f"{out} exists already; expected {'an empty' if folder else 'a new'} path.")


def _configuration_of(file: Path) -> dict[str, Any] | None:
    """Return the transformers configuration in a checkpoint's folder; None if there is none."""
    try:
        content = load_json((file.parent / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "model_type" in content else None


def _model_files(file: Path) -> list[Path]:
    """Return the files of a transformers model in its checkpoint's folder, without weights."""
    if _configuration_of(file) is None:
        return []
    files = (path for path in sorted(file.parent.iterdir()) if path.is_file() and not path.name.startswith("."))
    return [path for path in files if not any(fnmatch(path.name.lower(), own) for own in _NOT_COPIED)]


def _write_into_folder(
    tensors: Mapping[str, Tensor], types: Mapping[str, torch.dtype], out: Path, model_files: Sequence[Path]
) -> Path:
    """Write tensors and copies of other files into a folder, completely or not at all."""
    there = out.exists()
    try:
        found = write_new(tensors, types, out / "model.safetensors")
        for path in model_files:
            shutil.copyfile(path, out / path.name)
    except BaseException:
        for name in ("model.safetensors", *(path.name for path in model_files)):
            (out / name).unlink(missing_ok=True)
        if not there and out.exists():
            out.rmdir()
        raise
    return found


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _check_configurations(files: Sequence[Path]) -> None:
    """Check that the transformers configurations in the checkpoints' folders agree."""
    found: list[tuple[Path, dict[str, Any]]] = []
    for path in dict.fromkeys(file.parent / "config.json" for file in files):
        content = _configuration_of(path)
        if content is not None:
            found.append((path, {key: value for key, value in content.items() if key not in _NOT_ARCHITECTURE}))
    for path, content in found[1:]:
        first, own = found[0]
        for key in sorted(own.keys() | content.keys()):
            if own.get(key) != content.get(key):
                raise ValueError(
                    f"{path} states {key}: {content.get(key)!r}, but {first} {own.get(key)!r}; expected checkpoints "
                    "of one configuration."
                )


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


class Inputs:
    """Batches with inputs in the dtype of a network; can be iterated as often as the given batches.

    Args:
        batches: Batches that begin with the inputs.
        dtype: Dtype of floating inputs.
        equal: Leave out batches smaller than the first: batch norm statistics would give their inputs more weight.
    """

    def __init__(self, batches: Data, dtype: torch.dtype, *, equal: bool = False) -> None:
        self._batches, self._dtype, self._equal = batches, dtype, equal

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Yield the batches in order."""
        size = None
        for inputs, *others in self._batches:
            size = len(inputs) if size is None else size
            if len(inputs) == size or not self._equal:
                yield [inputs.to(self._dtype) if inputs.is_floating_point() else inputs, *others]


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
    merged = merge(symmetry, networks, method=method, batches=batches, seed=seed, files=copies)
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


def _warnings(
    losses: Mapping[str, tuple[float, float | None]],
    barriers: Mapping[str, Sequence[Barrier]],
    method: str,
    align_only: bool,
) -> tuple[str, ...]:
    """Warn if the result is better without alignment on these data."""
    if align_only:
        before, after = barriers["unmatched"][0].loss_barrier, barriers[method][0].loss_barrier
        what = "the barrier on these data is lower"
    else:
        before, after = losses[_PLAIN][0], losses[_ALIGNED][0]
        what = "no network was aligned, as the loss of the average on these data is lower"
    if not before < after:
        return ()
    other = "activations" if method == "weights" else "weights"
    return (
        f"{what} without alignment ({before:.4g}; aligned {after:.4g}); try --method {other}, or checkpoints that were "
        "trained longer or are wider",
    )


class _Readable(nn.Module):
    """A network with a single output tensor: the logits, if there are several outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        return Call.of(inputs).outputs_of(self.network)[0]


@dataclass(frozen=True)
class _Evaluation:
    """Settings of the evaluation.

    Attributes:
        data: Test batches.
        statistics: Batches for the statistics of batch norms.
        loss: Function of outputs and targets.
        points: Number of points on a linear path.
        progress: Whether to show progress bars.
        copies: Storage for new networks.
    """

    data: Inputs
    statistics: Inputs | None
    loss: Loss | None
    points: int
    progress: bool
    copies: NetworkFiles

    def losses(
        self, names: Sequence[str], networks: Sequence[nn.Module], result: nn.Module, align_only: bool
    ) -> dict[str, tuple[float, float | None]]:
        """Return loss and accuracy of the networks, and of their averages with recomputed batch norm statistics."""
        found = self._found(networks, names, recalibrate=False)
        if align_only:
            return found | self._found([result], [f"{names[1]}, aligned"], recalibrate=False)
        means = [self.copies.copy(networks[0], mean_tensors(networks)), result]
        return found | self._found(means, [_PLAIN, _ALIGNED], recalibrate="auto")

    def _found(
        self, networks: Sequence[nn.Module], names: Sequence[str], *, recalibrate: bool | Literal["auto"]
    ) -> dict[str, tuple[float, float | None]]:
        scratch = _Readable(self.copies.copy(networks[0], state_tensors(networks[0]).items()))

        def place(number: float) -> None:
            scratch.network.load_state_dict(networks[int(number)].state_dict())

        curve = curve_losses(
            scratch,
            place,
            list(range(len(networks))),
            self.data,
            loss=self.loss,
            recalibrate=recalibrate,
            recalibration_data=self.statistics,
        )
        accuracies = [None] * len(names) if curve.accuracy is None else curve.accuracy.tolist()
        return dict(zip(names, zip(curve.loss.tolist(), accuracies, strict=True), strict=True))

    def barriers(
        self, networks: Sequence[nn.Module], aligned: Sequence[nn.Module], method: str
    ) -> dict[str, list[Barrier]]:
        """Return the barriers from the first network to each other one, before and after alignment."""
        return {
            name: [self._barrier(own[0], other) for other in own[1:]]
            for name, own in (("unmatched", networks), (method, aligned))
        }

    def _barrier(self, a: nn.Module, b: nn.Module) -> Barrier:
        return barrier(
            _Readable(a),
            _Readable(b),
            self.data,
            points=self.points,
            loss=self.loss,
            recalibration_data=self.statistics,
            progress=self.progress,
        )
