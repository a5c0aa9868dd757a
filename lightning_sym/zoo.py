"""A zoo on disk: a folder of trained members that share an architecture, with a manifest.

::

    zoo/
      member-0000.safetensors     parameters and buffers, and a record of the member
      member-0007.safetensors
      manifest.json               an index, rebuilt from the members after each change

A member's file holds its full record (architecture, seed, metrics, data, versions) and a checksum of
its content, so that the manifest can be rebuilt at any time. Files appear under their final name
only when complete: several processes may add members to one zoo at once. Nothing in a zoo can run
code: tensors are safetensors, metadata is JSON, and class paths are checked against an allow-list.

Example:
    >>> zoo = ModelZoo.open("runs/zoo-mnist5k/zoo")                # doctest: +SKIP
    >>> good = zoo.filter(lambda member: member.metric("val", "accuracy") > 0.98)    # doctest: +SKIP
    >>> a, b = (good.load(number) for number in good.pairs(1, seed=0)[0])            # doctest: +SKIP
"""

import hashlib
import io
import json
import math
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from lightning_sym import __version__
from lightning_sym._checkpoint_files import MANIFEST
from lightning_sym._checks import check_integers, not_finite
from lightning_sym._claims import Claim
from lightning_sym._exports import explained
from lightning_sym._files import load_json, write_atomically
from lightning_sym._notebook import Tabular
from lightning_sym._text import ranges
from lightning_sym.networks import Network, architecture_name, build
from lightning_sym.weights import as_network, check_numbers_alike, fit_weights, flat_weights, read_weights

FORMAT = "lightning_sym.zoo/1"
_MEMBER = re.compile(r"member-\d{4,}\.safetensors")
_DAMAGED = "delete it and train the member again"
_WRONG_SUM = "its content does not agree with its checksum"
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself


@dataclass(frozen=True)
class ZooMember:
    """The record of one member, without its weights.

    Attributes:
        number: The member's index in the zoo, which is the seed of its initialisation and data order.
        file: Name of its file in the zoo's folder.
        architecture: ``{"class_path": ..., "init_args": {...}}``.
        metrics: By split and name, for example ``{"val": {"accuracy": 0.98, "loss": 0.07}}``. Fractions in
            ``[0, 1]``; losses are means of the loss in ``training``, a cross-entropy in nats.
        data: The datamodule's identity: arguments, counts per split, preprocessing statistics, fingerprint.
        training: Training settings: epochs, the kept epoch, optimizer, loss (None or absent if not recorded),
            execution.
        versions: Versions of Python packages, by name.
        created: Time in UTC, ISO 8601.
        sha256: Checksum of the record and the weights.
    """

    number: int
    file: str
    architecture: dict[str, Any]
    metrics: dict[str, dict[str, float]]
    data: dict[str, Any]
    training: dict[str, Any]
    versions: dict[str, str]
    created: str
    sha256: str

    def metric(self, split: str, name: str) -> float:
        """Return one metric.

        Raises:
            ValueError: If the member has no such metric; the message lists those it has.
        """
        try:
            return self.metrics[split][name]
        except KeyError:
            known = [f"{s}/{n}" for s, values in self.metrics.items() for n in values]
            asked = f"{split}/{name}" if name else split
            raise ValueError(
                f"Member {self.number} has no metric {asked}; it has: {', '.join(known) or 'none'}."
            ) from None


@explained
class ModelZoo(Tabular):
    """A zoo opened for reading; make one with :meth:`open`.

    Iterating yields the :class:`ZooMember` records in order of index; ``len(zoo)`` counts them.

    Attributes:
        path: The zoo's folder.
        architecture: The architecture shared by all members.
        members: Records by index.
        damaged: Defects of ignored files, by file name.
    """

    def __init__(
        self,
        path: Path,
        members: Mapping[int, ZooMember],
        damaged: Mapping[str, str],
        network: Network | None,
        allow: Sequence[str],
    ) -> None:
        self.path = path
        self.members = dict(sorted(members.items()))
        self.damaged = dict(damaged)
        self._network = network
        self._allow = tuple(allow)

    def titled_rows(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the architecture and the folder, and a row with the metrics of each member."""
        names = dict.fromkeys(
            (split, name) for one in self.members.values() for split, metrics in one.metrics.items() for name in metrics
        )
        rows = [
            {"member": number, **{f"{split}/{name}": one.metrics.get(split, {}).get(name) for split, name in names}}
            for number, one in self.members.items()
        ]
        name = str(self.architecture["class_path"]).rpartition(".")[2]
        return f"{len(rows)} members, {name}, in {self.path}", rows

    @classmethod
    def open(cls, path: str | Path, *, network: Network | None = None, allow: Sequence[str] = ()) -> "ModelZoo":
        """Open a zoo: read the record of every member, but not the weights.

        Members are found by their files: those that were just added, or have a writer that ended before it updated the
        manifest, are included. A damaged file is ignored, with a warning that names it.

        Args:
            path: The zoo's folder.
            network: The architecture to load members into, instead of the one named in the files.
            allow: Further packages with classes that may be instantiated, for example ``["my_package"]``.
                ``lightning_sym`` and ``torchvision.models`` are always allowed.

        Raises:
            FileNotFoundError: If the folder does not exist or holds no member.
            ValueError: If members have different architectures, or the manifest is not a zoo's.
        """
        path = Path(path)
        if not path.is_dir():
            raise FileNotFoundError(
                f"No zoo at {path.absolute()}: the folder does not exist. Train one first, for example "
                "lightning-sym fit --config zoo/mnist5k."
            )
        listed = _read_manifest(path)
        members, damaged = _scan(path)
        missing = sorted(set(listed) - {member.file for member in members.values()} - set(damaged))
        damaged.update(dict.fromkeys(missing, "listed in the manifest, but the file is gone"))
        for name, reason in sorted(damaged.items()):
            warnings.warn(f"Left out {path / name}: {reason}; {_DAMAGED}.", stacklevel=2)
        if not members:
            what = f"{len(damaged)} damaged member(s) only" if damaged else "no members"
            todo = f"{'Delete them and train' if damaged else 'Train'} some into it first."
            if any((path / "zoo").glob("member-*.safetensors")):  # a run folder
                todo = f"Its folder zoo has some; open {path / 'zoo'}."
            raise FileNotFoundError(f"The zoo at {path.absolute()} holds {what}. {todo}")
        _check_one_architecture(path, members.values())
        return cls(path, members, damaged, network, allow)

    @classmethod
    def add(
        cls,
        path: str | Path,
        weights: Sequence[str | Path | nn.Module | Mapping[str, Tensor]],
        *,
        network: Network | Callable[[], nn.Module],
        prefix: str | None = None,
        data: Mapping[str, Any] | None = None,
        metrics: Sequence[Mapping[str, Mapping[str, float]]] | None = None,
    ) -> "ModelZoo":
        """Add networks that were trained elsewhere, and open the zoo. All are checked before one is written.

        Args:
            path: The zoo's folder; created if it does not exist. New members get the indices after the largest one.
            weights: Per member a file (a state dict of ``torch.save``, a Lightning checkpoint, safetensors), a state
                dict, or the trained module. See :func:`lightning_sym.weights.fit_weights`.
            network: Builder of the architecture: a ``Network``, or the class of a plain module, or a
                ``functools.partial`` of it with its arguments, which must be plain values. It must be importable:
                the zoo's files hold its path.
            prefix: Prefix of the names in the files; None: the only one that fits.
            data: The identity of the training data, ``datamodule.identity()``; None if unknown.
            metrics: Per member by split and name, if known.

        Returns:
            The zoo, which may build this architecture; elsewhere ``ModelZoo.open`` needs ``allow``.

        Raises:
            FileNotFoundError: If a file does not exist.
            TypeError: If ``network`` is a module without a known constructor.
            ValueError: If weights do not fit the architecture, are not finite, or equal those of another member, or the
                zoo holds another architecture.
            OSError: If the zoo cannot be written to, or a run has claimed members of the same indices.
        """
        path, network = Path(path), as_network(network)
        architecture = network.architecture
        if isinstance(weights, str | Path | nn.Module | Mapping) or not len(weights):
            raise ValueError("weights must be a list of files, state dicts or modules, at least one.")
        sources = [str(one) if isinstance(one, str | Path) else f"weights[{i}]" for i, one in enumerate(weights)]
        states = []
        for source, found in zip(sources, weights, strict=True):
            tensors = found.state_dict() if isinstance(found, nn.Module) else found
            tensors = flat_weights(tensors, source) if isinstance(tensors, Mapping) else read_weights(tensors)
            states.append(fit_weights(tensors, network, prefix=prefix, source=source))
            _check_finite(states[-1], source)
        known: dict[str, str] = {}  # owners of weights, by checksum
        start = 0
        if any(path.glob("member-*.safetensors")):
            zoo = cls.open(path, network=network)
            if zoo.architecture != architecture:
                raise ValueError(
                    f"The zoo at {path} holds {zoo.architecture}, and these are {architecture}; choose another folder."
                )
            start = max(zoo.numbers) + 1
            known = {_checksum("", zoo.state(number)): f"member {number} of {path}" for number in zoo.numbers}
        for source, state in zip(sources, states, strict=True):
            checksum = _checksum("", {name: value.detach().cpu() for name, value in state.items()})
            if checksum in known:
                raise ValueError(f"{source} holds the same weights as {known[checksum]}; leave one of them out.")
            known[checksum] = source
        numbers = range(start, start + len(states))
        claim = Claim(path, "zoo", numbers, f"The zoo at {path}", "wait for it, or choose another folder")
        try:
            if taken := [number for number in numbers if (path / member_file(number)).exists()]:
                raise ValueError(
                    f"Another process has added member(s) {ranges(taken)} to the zoo at {path}; add again."
                )
            for index, state in enumerate(states):
                found = weights[index]
                write_member(
                    path,
                    numbers[index],
                    state,
                    architecture=architecture,
                    metrics=metrics[index] if metrics else None,
                    data=data,
                    training={"imported": str(found) if isinstance(found, str | Path) else type(found).__name__},
                )
            rebuild_manifest(path)
        finally:
            claim.release()
        package = architecture["class_path"].split(".")[0]
        return cls.open(path, allow=() if package in ("lightning_sym", "torchvision") else [package])

    @property
    def architecture(self) -> dict[str, Any]:
        """The architecture shared by all members: ``{"class_path": ..., "init_args": {...}}``."""
        return next(iter(self.members.values())).architecture

    @property
    def numbers(self) -> list[int]:
        """The members' indices, ascending."""
        return list(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[ZooMember]:
        return iter(self.members.values())

    def source(self, numbers: Iterable[int]) -> dict[str, Any]:
        """Return architecture, folder and the checksums of some members, as plain data for a report."""
        members = {str(number): self.member(number).sha256 for number in numbers}
        return {"architecture": self.architecture, "zoo": str(self.path), "members": members}

    def __repr__(self) -> str:
        return f"ModelZoo({str(self.path)!r}, {len(self)} members of {self.architecture['class_path']})"

    def member(self, number: int) -> ZooMember:
        """Return the record of one member.

        Raises:
            ValueError: If there is none of this index; the message reports a damaged file.
        """
        if number in self.members:
            return self.members[number]
        name = member_file(number) if isinstance(number, int) else ""
        if name in self.damaged:
            raise ValueError(f"Member {number} cannot be used: {self.path / name}: {self.damaged[name]}; {_DAMAGED}.")
        raise ValueError(f"No member {number!r} in {self.path}; it has members {ranges(self.numbers)}.")

    def state(self, number: int, *, finite: bool = True) -> dict[str, Tensor]:
        """Return one member's parameters and buffers, on the CPU, after checking its checksum.

        Args:
            number: The member's index.
            finite: Whether to reject weights that are not finite, of a diverged member.

        Raises:
            ValueError: If there is no such member, its file is damaged, or its weights are not finite.
        """
        state = read_member(self.path / self.member(number).file)[1]
        if finite and (broken := not_finite(state)):
            raise ValueError(
                f"Member {number} of {self.path} has values that are not finite in {broken[0]}: it diverged; choose "
                "other members, or load it with finite=False."
            )
        return state

    def load(self, number: int, *, finite: bool = True) -> Network:
        """Return one member as a network in evaluation mode, on the CPU.

        Args:
            number: The member's index.
            finite: As for :meth:`state`.

        Raises:
            ValueError: If there is no such member, its file is damaged, its weights are not finite, its class path is
                not allowed, or the weights do not fit the network that was passed to :meth:`open`.
        """
        state = self.state(number, finite=finite)
        if self._network is not None:
            network = self._network.fresh(number)
        else:
            network = build(self.member(number).architecture, allow=self._allow)
        kinds = {value.dtype for value in state.values() if value.is_floating_point()}
        if len(kinds) == 1:
            network.to(kinds.pop())  # a zoo trained in float64 is not rounded
        try:
            own = network.state_dict(keep_vars=True)
            for name in state.keys() & own.keys():
                check_numbers_alike(state[name], own[name], name, f"Member {number} of {self.path}")
            network.load_state_dict(state)
        except RuntimeError as error:
            detail = " ".join(str(error).split())[:300]
            raise ValueError(
                f"Member {number} of {self.path} does not fit the network {architecture_name(network)}: {detail}"
            ) from None
        return network.eval()

    def filter(self, keep: Callable[[ZooMember], bool]) -> "ModelZoo":
        """Return a view of the members that satisfy ``keep``.

        Raises:
            ValueError: If no member remains.
        """
        members = {number: member for number, member in self.members.items() if keep(member)}
        if not members:
            raise ValueError(f"No member of {self.path} remains after the filter; it holds {len(self)} members.")
        return ModelZoo(self.path, members, self.damaged, self._network, self._allow)

    def pairs(self, count: int, seed: int) -> list[tuple[int, int]]:
        """Draw ordered pairs of distinct members, uniformly, with replacement between draws.

        As in Godfrey et al. (2022), arXiv 2205.14258, but from a seed.

        Args:
            count: Number of pairs. >= 1.
            seed: The same seed and the same members give the same pairs.

        Raises:
            ValueError: If ``count`` < 1 or the zoo has fewer than two members.
        """
        check_integers(count=count)
        if len(self) < 2:
            raise ValueError(f"Pairs need at least two members; {self.path} has {len(self)}.")
        source = torch.Generator().manual_seed(seed)
        first = torch.randint(len(self), (count,), generator=source)
        step = torch.randint(1, len(self), (count,), generator=source)
        second = (first + step) % len(self)
        numbers = self.numbers
        return [(numbers[a], numbers[b]) for a, b in zip(first.tolist(), second.tolist(), strict=True)]

    def summary(self) -> dict[str, Any]:
        """Summarise the zoo by plain data.

        Returns:
            ``path``, ``architecture``, ``members`` (count), ``damaged`` (count) and ``metrics``: mean, min,
            max and standard deviation (of a sample) over members of every metric, by split and name.
        """
        values: dict[str, dict[str, list[float]]] = {}
        for member in self:
            for split, metrics in member.metrics.items():
                for name, value in metrics.items():
                    values.setdefault(split, {}).setdefault(name, []).append(value)
        return {
            "path": str(self.path),
            "architecture": self.architecture,
            "members": len(self),
            "damaged": len(self.damaged),
            "metrics": {
                split: {name: statistics(numbers) for name, numbers in metrics.items()}
                for split, metrics in values.items()
            },
        }

    def verify(self) -> dict[str, str]:
        """Check every member's checksum.

        Returns:
            Defects by file name, empty if there are none. Includes the files that :meth:`open` ignored.
        """
        wrong = dict(self.damaged)
        for member in self:
            try:
                self.state(member.number)
            except ValueError as error:
                wrong[member.file] = str(error)
        return wrong


def example_input(zoo: ModelZoo, number: int, network: Network, data: Any) -> Tensor:
    """Return two random inputs of the shape that a member was trained on: tokens, or of its weights' dtype.

    Args:
        zoo: Its zoo.
        number: The member's number.
        network: The member.
        data: The datamodule, asked where the zoo does not know the size; or None.

    Raises:
        ValueError: If neither knows.
    """
    known = zoo.member(number).data
    shape = known.get("input_shape", getattr(data, "input_shape", None))
    if shape is None:
        raise ValueError(
            f"The zoo at {zoo.path} does not record the shape of its networks' inputs, and neither do the data; use a "
            "datamodule with input_shape."
        )
    tokens = known.get("tokens", getattr(data, "tokens", None))
    source = torch.Generator().manual_seed(0)
    if tokens is not None:
        return torch.randint(tokens, (2, *shape), generator=source)
    example = torch.rand(2, *shape, generator=source)
    return example.to(next(network.parameters()).dtype)


def statistics(values: Sequence[float]) -> dict[str, float]:
    """Return mean, min, max and standard deviation (of a sample; NaN of one) of the values."""
    spread = stdev(values) if len(values) > 1 else math.nan
    return {"mean": fmean(values), "min": min(values), "max": max(values), "std": spread}


def member_file(number: int) -> str:
    """Return the file name of a member, for example ``member-0007.safetensors``."""
    return f"member-{number:04d}.safetensors"


def write_member(
    path: str | Path,
    number: int,
    state: Mapping[str, Tensor],
    *,
    architecture: Mapping[str, Any],
    metrics: Mapping[str, Mapping[str, float]] | None = None,
    data: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> Path:
    """Write one member into a zoo, replacing one of the same index; call :func:`rebuild_manifest` afterwards.

    Args:
        path: The zoo's folder; created if absent.
        number: The member's index. >= 0.
        state: Parameters and buffers, by name.
        architecture: Value of :attr:`lightning_sym.networks.Network.architecture`.
        metrics: By split and name; must be finite.
        data: The datamodule's identity.
        training: Training settings.

    Returns:
        The member's file.

    Raises:
        OSError: If the folder cannot be written to or the disk is full. No partial file remains.
        ValueError: If a weight or a metric is not finite, or a value cannot be stored as JSON.
    """
    path = Path(path)
    check_integers(0, number=number)
    _check_finite(state, f"Member {number}")
    record = {
        "format": FORMAT,
        "number": number,
        "architecture": dict(architecture),
        "metrics": {split: dict(values) for split, values in (metrics or {}).items()},
        "data": dict(data or {}),
        "training": dict(training or {}),
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        text = json.dumps(record, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The record of member {number} cannot be stored as JSON ({error}); it was not written."
        ) from None
    # Clones, as safetensors rejects tensors that share memory (tied weights).
    tensors = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    metadata = {"member": text, "member_sha256": _checksum(text, {}), "sha256": _checksum(text, tensors)}
    content = save_safetensors(tensors, metadata=metadata)
    file = path / member_file(number)
    write_atomically(file, content)
    return file


def read_member(file: str | Path) -> tuple[ZooMember, dict[str, Tensor]]:
    """Read one member completely: its record and its weights.

    Returns:
        The record, and the tensors on the CPU.

    Raises:
        ValueError: If the file is not a member, is truncated, or does not agree with its checksum.
    """
    file = Path(file)
    try:
        content = file.read_bytes()  # read once, as another process may replace the file at any time
        member, text = _read_record(file.name, io.BytesIO(content), len(content))
        tensors = load_safetensors(content)
        if _checksum(text, tensors) != member.sha256:
            raise ValueError(_WRONG_SUM)
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror or error}).") from None
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{file} is damaged or no zoo member ({error}); {_DAMAGED}.") from None
    return member, tensors


def rebuild_manifest(path: str | Path) -> Path:
    """Rebuild ``manifest.json`` from the members' files.

    Safe when several processes add members at once: each takes a lock, reads all files and writes.

    Args:
        path: The zoo's folder.

    Returns:
        The manifest's file.

    Raises:
        OSError: If the folder cannot be written to.
        ValueError: If members have different architectures.
    """
    path = Path(path)
    try:
        with FileLock(path / ".manifest.lock", timeout=120):
            members, damaged = _scan(path)
            _check_one_architecture(path, members.values())
            first = next(iter(members.values()), None)
            manifest = {
                "format": FORMAT,
                "architecture": first.architecture if first else None,
                "updated": datetime.now(UTC).isoformat(timespec="seconds"),
                "versions": versions(),
                "members": [
                    # The architecture is the same for all and written once at the top.
                    {name: value for name, value in asdict(member).items() if name != "architecture"}
                    | {"seed": member.number}
                    for _, member in sorted(members.items())
                ],
                "damaged": damaged,
            }
            write_atomically(path / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    except Timeout:
        raise OSError(
            f"Another process has held {path / '.manifest.lock'} for two minutes; if none is running, delete it."
        ) from None
    return path / MANIFEST


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect results."""
    others = ("torch", "torchvision", "pytorch-lightning", "numpy")
    return {"lightning_sym": __version__, **{name: version(name) for name in others}}


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\x1f{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1f".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_record(name: str, content: BinaryIO, length: int) -> tuple[ZooMember, str]:
    """Return a member's record and its text, after checking the text's checksum, without reading weights.

    Args:
        name: Name of the member's file.
        content: Content of the file.
        length: Length of the content, in bytes.

    Raises:
        ValueError: If it is not a member; the message describes the defect.
    """
    try:
        (size,) = struct.unpack("<Q", content.read(8))
        if size > min(length, _LARGEST_HEADER):
            raise ValueError("it is truncated, or not a safetensors file")
        header = load_json(content.read(size))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        if length != 8 + size + max(ends, default=0):
            raise ValueError("it is truncated or too long")
        metadata = header["__metadata__"]
        if _checksum(metadata["member"], {}) != metadata["member_sha256"]:
            raise ValueError(_WRONG_SUM)
        record = load_json(metadata["member"])
        if record.get("format") != FORMAT:
            raise ValueError(f"its format is {record.get('format')!r}, not {FORMAT!r}")
        record |= {"file": name, "sha256": metadata["sha256"]}
        known = {field.name: record[field.name] for field in fields(ZooMember)}
        if wrong := _wrong_entry(known):
            raise ValueError(wrong)
        return ZooMember(**known), metadata["member"]
    except KeyError as error:
        raise ValueError(f"it is no member of a zoo: {error} is missing from its header") from None
    except (
        struct.error,
        UnicodeDecodeError,
        json.JSONDecodeError,
        AttributeError,
        TypeError,
        IndexError,
        OverflowError,
        RecursionError,
    ):
        raise ValueError("it is not a safetensors file") from None


def _wrong_entry(record: Mapping[str, Any]) -> str:
    """Describe a wrong type in a record; empty if there is none."""
    metrics, architecture = record["metrics"], record["architecture"]
    kinds = {"number": int, "created": str, "sha256": str}
    kinds |= dict.fromkeys(("architecture", "metrics", "data", "training", "versions"), dict)
    for name, kind in kinds.items():
        if not isinstance(record[name], kind) or isinstance(record[name], bool):
            return f"its {name} is {str(record[name])[:40]!r}, and should be of type {kind.__name__}"
    if record["number"] < 0:
        return f"its number is {record['number']}, and should be at least 0"
    if not isinstance(architecture.get("class_path"), str) or not isinstance(architecture.get("init_args", {}), dict):
        return "its architecture has no class_path, or init_args without names"
    for split, values in metrics.items():
        if not isinstance(values, dict):
            return f"its metrics of {split} are {str(values)[:40]!r}, and should be numbers by name"
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                return f"its metric {split}/{name} is {str(value)[:40]!r}, and should be a finite number"
    return ""


def _scan(path: Path) -> tuple[dict[int, ZooMember], dict[str, str]]:
    """Return the records of all readable member files, and the defects of the others."""
    members: dict[int, ZooMember] = {}
    damaged: dict[str, str] = {}
    for file in sorted(path.glob("member-*.safetensors")):
        if not _MEMBER.fullmatch(file.name):
            continue
        if not file.is_file():  # reading a pipe would block
            damaged[file.name] = "it is no file"
            continue
        try:
            with file.open("rb") as content:
                member, _ = _read_record(file.name, content, os.fstat(content.fileno()).st_size)
            if file.name != member_file(member.number):
                raise ValueError(f"it claims to be member {member.number}: a copy under another name")
            members[member.number] = member
        except ValueError as error:
            damaged[file.name] = f"the file is damaged or no zoo member ({error})"
        except OSError as error:
            damaged[file.name] = error.strerror or str(error)
    return members, damaged


def _read_manifest(path: Path) -> list[str]:
    """Return the files listed in the manifest; none if there is no manifest."""
    file = path / MANIFEST
    if not file.exists():
        return []
    try:
        manifest = load_json(file.read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, not {FORMAT!r}")
        return [str(entry["file"]) for entry in manifest["members"]]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not the manifest of a zoo ({error}); delete it, and rebuild it from the members with "
            "lightning_sym.zoo.rebuild_manifest."
        ) from None


def _check_finite(state: Mapping[str, Tensor], source: str) -> None:
    if broken := not_finite(state):
        raise ValueError(f"{source} has values that are not finite in {', '.join(broken[:3])}; it was not written.")


def _check_one_architecture(path: Path, members: "Iterator[ZooMember] | Any") -> None:
    kinds: dict[str, int] = {}
    for member in members:
        kinds.setdefault(json.dumps(member.architecture, sort_keys=True), member.number)
    if len(kinds) > 1:
        (first, a), (second, b), *_ = kinds.items()
        raise ValueError(
            f"The zoo at {path} mixes architectures: member {a} is {first} and member {b} is {second}; "
            "keep each architecture in a separate folder."
        )
