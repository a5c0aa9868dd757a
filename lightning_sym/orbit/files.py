"""Checkpoints moved along the orbit of their network: files in, files with the same function out."""

import csv
import functools
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lightning_sym._checkpoint_files import ELEMENT, HISTORY, REPORT, check_out, element_in, files_of_result, single
from lightning_sym._checks import is_integer
from lightning_sym._files import load_json, write_atomically
from lightning_sym._text import name_of_callable
from lightning_sym.connectivity.interpolation import Loss
from lightning_sym.merging.checkpoint import Checkpoint, example_in, model_of
from lightning_sym.merging.evaluation import Data, Evaluation
from lightning_sym.merging.network_files import NetworkFiles, with_tensors
from lightning_sym.models import example_of
from lightning_sym.orbit.descent import OrbitMinimum, minimize_on_orbit
from lightning_sym.orbit.objective import Objective
from lightning_sym.orbit.problem import Function
from lightning_sym.orbit.steps import OrbitStep
from lightning_sym.symmetry import Call, Element, trace_symmetry
from lightning_sym.symmetry.base import Symmetry, unchecked
from lightning_sym.symmetry.group.saved import write_element
from lightning_sym.symmetry.moves.moved import Moved, largest_output_change, moved
from lightning_sym.symmetry.proof import double_copy
from lightning_sym.symmetry.tracing.graph.capture import state_tensors
from lightning_sym.zoo import versions

GIVEN, RESULT = "as given", "reparametrized"
_INPUT, _LARGEST_INPUT = "lightning_sym.input", 2**24


@dataclass(frozen=True, eq=False)
class ReparametrizedCheckpoint:
    """The files that :func:`reparametrize_checkpoint` wrote, and how it went.

    Attributes:
        out: The file of weights, or the index, that was written.
        symmetry: The symmetry of the network.
        element: The element that maps the given network to the result.
        before: The objective at the given network; NaN if an element was applied.
        after: The objective at the result.
        change: The largest relative change of an output in float64.
        change_as_written: The same with weights rounded to the types of the file.
        history: The steps of the descent; none if an element was applied.
        converged: Whether the derivative fell below the tolerance.
        seconds: Duration of the move, without reading, tracing, tests and writing.
        losses: Loss, and accuracy or None, on the test data by network. None without test data.
        notes: Omissions, and coordinates that were held.
    """

    out: Path
    symmetry: Symmetry
    element: Element
    before: float
    after: float
    change: float
    change_as_written: float
    history: tuple[OrbitStep, ...] = field(default=(), repr=False)
    converged: bool = False
    seconds: float = 0.0
    losses: Mapping[str, tuple[float, float | None]] | None = None
    notes: tuple[str, ...] = ()


def reparametrize_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    objective: Objective | Function | None = None,
    *,
    element: str | Path | None = None,
    inverse: bool = False,
    network: nn.Module | None = None,
    inputs: Any = None,
    data: Any = None,
    test: Data | None = None,
    loss: Loss | None = None,
    compressed: Mapping[str, Callable[[nn.Module], nn.Module]] | None = None,
    prefix: str | None = None,
    ignore: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    **options: Any,
) -> ReparametrizedCheckpoint:
    """Move a checkpoint along the orbit of its network, and write it with its names, types and shards.

    The symmetry is traced on the network. The result computes the same function; this is verified in float64 before
    anything is written. Beside the weights it writes the element (not if one was applied), the steps ``history.csv``
    and ``report.json``. In a folder these are the names; for ``moved.safetensors`` the names are
    ``moved.element.safetensors``, ``moved.history.csv`` and ``moved.report.json``. All files appear, or none.

    Args:
        checkpoint: A state dict, Lightning checkpoint, file of safetensors, the index of several, or the folder of a
            model of transformers or timm.
        out: A path that ends in ``.safetensors``, or a new folder if the checkpoint is an index or a folder; the
            model's other files are then copied. Existing files are not replaced.
        objective: The function to minimise, as :func:`minimize_on_orbit` takes it; None to apply ``element``.
        element: A file of an element to apply, by :meth:`Symmetry.save`, or a folder with ``element.safetensors``.
        inverse: Whether to apply the inverse of that element.
        network: Network for the weights, with any weights. Not changed. None: as the folder describes it.
        inputs: Example inputs: an input, a tuple of positional arguments, or a :class:`Call`. None: drawn for the
            network of the folder. The file of the element holds the shape of a single input.
        data: Batches for the objective, as :func:`minimize_on_orbit` takes them.
        test: Test batches ``(inputs, targets)`` that can be read several times, for losses before and after.
        loss: As for :func:`lightning_sym.connectivity.barrier`.
        compressed: Changes of networks by name, such as :func:`round_to_nearest`; losses of both networks are measured
            after each.
        prefix: Prefix of the weights' names, where several prefixes fit.
        ignore: Patterns of names of tensors that are copied unchanged.
        about: Entries of the report that describe objective, data and settings.
        notes: Notes to add.
        **options: Further arguments of :func:`minimize_on_orbit`.

    Returns:
        The result.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the checkpoint does not match the network, the element is of another architecture, or an
            argument does not suit. No file remains.
        RuntimeError: If the function has changed. No file remains.
        OSError: If the result cannot be written. No file remains.
    """
    out = Path(out)
    if (objective is None) == (element is None):
        given = "neither" if objective is None else "both"
        raise ValueError(f"expected an objective to minimise, or an element to apply, got {given}.")
    source = single(checkpoint)
    named = (about or {}).get("objective") or (None if objective is None else name_of_callable(objective))
    files = files_of_result(out)
    check_out(out, source, list(files.values()))
    if objective is not None and data is None and getattr(objective, "reads_data", False):
        raise ValueError(
            f"{named} needs data to run the network on; pass data (--data), or an objective of the weights alone."
        )
    if network is None:
        model = model_of(source)
        network, inputs = model.network, example_of(model) if inputs is None else inputs
    read = Checkpoint.read(source.file, network, prefix, ignore=ignore)
    example = example_in(next(iter(read.network.parameters())).dtype, inputs)
    symmetry = trace_symmetry(read.network, example)
    if moving := sorted(read.ignored & set(symmetry.structure.moving)):
        raise ValueError(
            f"ignore leaves out {moving[0]}, which has to move with the other weights; expected patterns of "
            "tensors that the group does not change."
        )
    exact, began = double_copy(read.network), time.perf_counter()  # rounded once, to the types of the file
    with unchecked():  # a copy of the traced network
        if objective is not None:
            result: Moved = minimize_on_orbit(symmetry, exact, objective, data=data, **options)
        else:
            found = symmetry.load(element_in(Path(str(element))))
            result = moved(symmetry, exact, symmetry.inverse(found) if inverse else found, check=True)
    seconds = time.perf_counter() - began
    tensors = {name: own for name, own in state_tensors(result.network).items() if own.is_floating_point()}
    written = _as_written(read, tensors)
    minimum = result if isinstance(result, OrbitMinimum) else None
    sign = -1 if options.get("maximize", False) else 1
    if minimum is not None and not sign * (minimum.before - minimum.after) > 1e-9 * abs(minimum.before):
        notes = (*notes, "the objective did not improve: it is at its best, constant, or needs more steps")
    reparametrized = ReparametrizedCheckpoint(
        out=out,
        symmetry=symmetry,
        element=result.element,
        before=math.nan if minimum is None else minimum.before,
        after=math.nan if minimum is None else minimum.after,
        change=result.change,
        change_as_written=largest_output_change(symmetry, exact, double_copy(written))[0],
        history=() if minimum is None else minimum.history,
        converged=minimum is not None and minimum.converged,
        seconds=seconds,
        losses=None if test is None else _losses(read.network, written, test, loss, compressed or {}),
        notes=(*notes, *read.notes, *result.notes, *symmetry.notes),
    )
    report = {"checkpoint": str(checkpoint), "out": str(out), "objective": named, **(about or {})}
    report |= _numbers(reparametrized)
    place = read.write(tensors, out, beside=_files_beside(files, out, report, example, minimum))
    return replace(reparametrized, out=place)


def stored_input(element: str | Path) -> tuple[tuple[int, ...], int | None] | None:
    """Read the input that the network of an element's file was traced with.

    Args:
        element: The file, or a folder with ``element.safetensors``.

    Returns:
        Shape of one sample, and the number above all integers for integers; None if the file does not say it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged.
    """
    path = element_in(Path(element))
    try:
        with safe_open(path, framework="pt") as opened:  # type: ignore[no-untyped-call]
            text = (opened.metadata() or {}).get(_INPUT)
        if text is None:
            return None
        content = load_json(text)
        shape, tokens = content["shape"], content["tokens"]
        if not all(is_integer(size, 1) for size in [*shape, 1 if tokens is None else tokens]):
            raise ValueError(f"its input is {content}")
        if math.prod(shape) > _LARGEST_INPUT:
            raise ValueError(f"its input has {math.prod(shape)} numbers")
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); write it again.") from None
    return tuple(shape), tokens


def _described_input(example: Call) -> dict[str, str]:
    """Return metadata that describe a single tensor of samples; none for other inputs."""
    tensors = example.positional
    if example.keywords or len(tensors) != 1 or not isinstance(tensors[0], Tensor) or tensors[0].ndim < 1:
        return {}
    (own,) = tensors
    tokens = None if own.is_floating_point() else int(own.max()) + 1
    return {_INPUT: json.dumps({"shape": list(own.shape[1:]), "tokens": tokens})}


def calibration_batch(batches: Iterable[Sequence[Tensor]], count: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Draw a random subset of data as one batch; memory holds no more than that and one batch.

    Args:
        batches: Batches that begin with the inputs, each tensor with one entry per input; read once.
        count: Number of inputs, >= 1; all if there are fewer.
        seed: Seed of the draw.

    Raises:
        ValueError: If there is no batch.
    """
    generator = torch.Generator().manual_seed(seed)
    held: list[Tensor] = []
    for batch in batches:
        keys = torch.rand(len(batch[0]), generator=generator)
        new = [keys, *(own.cpu() for own in batch)]
        held = [torch.cat(pair) for pair in zip(held, new, strict=True)] if held else new
        kept = held[0].argsort()[:count]
        held = [own[kept] for own in held]
    if not held:
        raise ValueError("the data hold no batch; expected at least one.")
    return tuple(held[1:])


def _files_beside(
    files: Mapping[str, str], out: Path, report: Mapping[str, Any], example: Call, minimum: OrbitMinimum | None
) -> dict[str, Callable[[Path], object]]:
    """Return functions that write the report, the card, the element and the steps, by the names of the files."""
    texts = {files[REPORT]: json.dumps(report, indent=1, default=str) + "\n"}
    if minimum is not None:
        texts[files[HISTORY]] = _table(minimum.history)
    if out.suffix != ".safetensors":
        texts["README.md"] = _card(out.name, report["checkpoint"], report, minimum)
    found: dict[str, Callable[[Path], object]] = {
        name: functools.partial(write_atomically, content=text) for name, text in texts.items()
    }
    if minimum is not None:
        found[files[ELEMENT]] = functools.partial(write_element, minimum.element, metadata=_described_input(example))
    return found


def _as_written(read: Checkpoint, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the network with weights rounded to the types of the file."""
    own = state_tensors(read.network)
    rounded = {
        name: tensor.to(read.dtypes.get(name, own[name].dtype)).to(own[name].dtype) for name, tensor in tensors.items()
    }
    return with_tensors(read.network, rounded)


def _losses(
    given: nn.Module,
    result: nn.Module,
    test: Data,
    loss: Loss | None,
    compressed: Mapping[str, Callable[[nn.Module], nn.Module]],
) -> dict[str, tuple[float, float | None]]:
    """Return loss and accuracy of both networks, and of both after each change."""
    evaluation = Evaluation(test, None, loss, 2, False, NetworkFiles())
    pairs = {GIVEN: given, RESULT: result}
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {"": lambda network: network}
    makers |= {f", {name}": change for name, change in compressed.items()}
    found: dict[str, tuple[float, float | None]] = {}
    for suffix, change in makers.items():
        for name, network in pairs.items():
            found |= evaluation.measured([change(network)], [name + suffix], recalibrate=False)
    return found


def _numbers(found: ReparametrizedCheckpoint) -> dict[str, Any]:
    """Return the entries of the report that were measured."""
    rows = (
        None
        if found.losses is None
        else [{"weights": name, "loss": loss, "accuracy": accuracy} for name, (loss, accuracy) in found.losses.items()]
    )
    numbers = {name: getattr(found, name) for name in ("before", "after", "change", "change_as_written", "seconds")}
    return {
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "steps": max(len(found.history) - 1, 0),
        "converged": found.converged,
        "test": rows,
        "symmetry": {"dimension": found.symmetry.dimension, "fingerprint": found.symmetry.fingerprint},
        "notes": list(found.notes),
        "versions": versions(),
    }


def _table(history: Sequence[OrbitStep]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(OrbitStep._fields)
    writer.writerows(history)
    return text.getvalue()


def _card(title: str, source: str, report: Mapping[str, Any], minimum: OrbitMinimum | None) -> str:
    """Return the text of README.md."""
    changes = f"{report['change']:.1e} in float64, {report['change_as_written']:.1e} with stored weights"
    lines = [
        f"# {title}",
        "",
        f"The function of `{source}` with other weights, by lightning_sym.",
        f"Largest relative change of an output: {changes}.",
    ]
    if minimum is not None:
        lines += [
            "",
            f"Objective {report['objective']}: {minimum.before:.6g} before, {minimum.after:.6g} here.",
            "The same for other checkpoints of this architecture:",
            "",
            "```bash",
            f"lightning-sym reparametrize OTHER --apply {ELEMENT} --out MOVED",
            "```",
        ]
    return "\n".join([*lines, ""])
