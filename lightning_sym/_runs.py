"""Results and settings of runs, read from their folders without importing torch."""

import csv
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_sym._files import TooLargeError, load_yaml, read_json
from lightning_sym._text import unknown

CONFIG = "config.yaml"
# Settings without effect on results: locations of files, and displays during a run.
_NO_SETTINGS = (
    *("run_dir", "zoo_dir", "overwrite", "log_details", "figures", "figure_size", "requires", "ckpt_path"),
    *("weights_only", "checkpoint"),
)
_NO_OPTIONS = (
    *("logger", "log_every_n_steps", "profiler", "plugins", "default_root_dir", "dirpath"),
    *("enable_progress_bar", "enable_checkpointing", "enable_model_summary"),
)


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Attributes:
        name: Name that distinguishes it from the other runs.
        folder: Its folder.
        settings: Its settings by dotted option, as on the command line, with classes by the last part of their name.
            Includes seeds, but not paths of files.
        numbers: Final numbers of its reports, by name, with the main one first; NaN for those that are not finite.
        logged: The last value of each quantity in ``metrics.csv``, by name.
        units: Known units of numbers, by name.
        members: Seeds of the members of its zoo; empty if it has none.
    """

    name: str
    folder: Path
    settings: Mapping[str, str]
    numbers: Mapping[str, float]
    logged: Mapping[str, float]
    units: Mapping[str, str]
    members: frozenset[int] = frozenset()

    def table(self, name: str) -> dict[str, Any]:
        """Return a table of its results: ``rows``, ``units``, and other entries.

        Raises:
            ValueError: If there is no such table.
        """
        tables = sorted(file.stem for file in (self.folder / "results").glob("*.json"))
        if name not in tables:
            raise ValueError(f"{self.folder} has no such table. {unknown('table', name, tables or ['none'])}")
        return _json(self.folder / "results" / f"{name}.json")


def find_runs(places: Sequence[str | Path]) -> tuple[list[FinishedRun], list[str]]:
    """Find the runs in some folders, each once and in order, and a sentence for each one that was left out.

    Args:
        places: Folders of runs, or of several such folders.

    Raises:
            ValueError: If a folder is neither, or a run that was named has not ended.
    """
    folders: dict[Path, bool] = {}  # whether the folder was named explicitly
    for place in map(Path, places):
        inside = [file.parent for file in sorted(place.glob(f"*/{CONFIG}"))]
        if (place / CONFIG).is_file():
            folders[place] = True
        elif inside:
            folders |= {folder: folders.get(folder, False) for folder in inside}
        else:
            what = "holds no run" if place.is_dir() else "is not there" if not place.exists() else "is a file"
            raise ValueError(f"{place} {what}; expected the folder of a run (with {CONFIG}), or of several runs.")
    once = {folder.resolve(): folder for folder in reversed(folders)}
    kept = [folder for folder in folders if once[folder.resolve()] == folder]
    runs, left_out = [], []
    for folder, name in zip(kept, _names(kept), strict=True):
        try:
            runs.append(read_run(folder, name))
        except ValueError as error:
            if folders[folder]:
                raise
            left_out.append(f"left out: {error}")
    return runs, left_out


def read_run(folder: Path, name: str = "") -> FinishedRun:
    """Read the settings and results of a run.

    Args:
        folder: Its folder.
        name: Its name; default the folder's name.

    Raises:
        ValueError: If there is no run, it has not ended, or a file is damaged.
    """
    try:
        return _read_run(folder, name)
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{folder} holds settings or results of another form than fit writes ({type(error).__name__}: {error}); "
            "run it again, or leave it out."
        ) from None


def _read_run(folder: Path, name: str) -> FinishedRun:
    config = _config(folder / CONFIG)
    logged, epochs = _last_values(folder / "metrics.csv")
    file = folder / "results" / "numbers.json"
    final = _json(file) if file.is_file() else {}
    most = (config.get("trainer") or {}).get("max_epochs")
    if not final and not (most is not None and epochs >= most):
        last = (folder / "checkpoints" / "last.ckpt").is_file()
        todo, options = ("resume it", "--ckpt_path last") if last else ("start it again", "--overwrite true")
        raise ValueError(
            f"{folder} has not ended: it has no results, and {epochs} of {most or 'all'} epochs; {todo} (lightning-sym "
            f"fit --config {shlex.quote(str(folder / CONFIG))} {options}), or leave it out."
        )
    try:
        numbers = {
            row["number"]: math.nan if row["value"] is None else float(row["value"]) for row in final.get("rows", [])
        }
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); expected a table of results.") from None
    headline = final.get("headline")
    members = folder / "results" / "members.json"
    seeds = _json(members).get("seeds", []) if members.is_file() else []
    return FinishedRun(
        name or folder.name,
        folder,
        dict(_flat(config)),
        {key: numbers[key] for key in sorted(numbers, key=lambda key: key != headline)},
        logged,
        final.get("units", {}),
        frozenset(seeds if isinstance(seeds, list) else ()),
    )


def is_seed(option: str) -> bool:
    """Test whether an option is a seed."""
    last = option.rpartition(".")[2]
    return last in ("seed", "seed_everything") or last.endswith("_seed")


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest final parts of paths that distinguish folders."""
    whole = [Path(os.path.abspath(folder)) for folder in folders]
    for depth in range(1, max((len(path.parts) for path in whole), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len(set(names)) == len(names):
            break
    return names if folders else []


def _config(file: Path) -> dict[str, Any]:
    try:
        content = load_yaml(file.read_text(encoding="utf-8"), str(file))
    except TooLargeError:
        raise
    except (yaml.YAMLError, UnicodeDecodeError):
        content = None
    if not isinstance(content, dict) or "model" not in content:
        raise ValueError(f"{file} is no configuration of a run; expected the file that fit writes.")
    return content


def _json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] | None = read_json(file)
    if content is None:
        raise ValueError(f"{file} is damaged or cannot be read; expected a table of results.")
    return content


def whole_lines(file: Path) -> Iterator[str]:
    """Yield the complete lines of a file; a power failure may cut the last one."""
    with file.open(newline="", encoding="utf-8") as lines:
        yield from (line for line in lines if line.endswith("\n"))


def _last_values(file: Path) -> tuple[dict[str, float], int]:
    """Return the last value of each column of ``metrics.csv`` and the number of epochs in it."""
    values: dict[str, float] = {}
    if file.is_file():
        try:
            for row in csv.DictReader(whole_lines(file)):
                values |= {name: float(text) for name, text in row.items() if name and text}
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{file} is damaged ({error}); expected numbers under names.") from None
    epochs = int(values.pop("epoch", -1)) + 1
    values.pop("step", None)
    return {name: value for name, value in values.items() if math.isfinite(value)}, epochs


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings by dotted option, without those that have no effect on results."""
    if isinstance(node, Mapping):
        kind = node.get("class_path")
        if kind is not None:
            yield path, str(kind).rpartition(".")[2]
            node = {**(node.get("init_args") or {}), **(node.get("dict_kwargs") or {})}
        for name, value in node.items():
            if name not in (_NO_OPTIONS if path else _NO_SETTINGS):
                yield from _flat(value, f"{path}.{name}" if path else str(name))
    elif isinstance(node, list) and node and all(isinstance(one, Mapping) and "class_path" in one for one in node):
        kinds = [str(one["class_path"]).rpartition(".")[2] for one in node]
        yield path, ", ".join(kinds)
        for one, kind in zip(node, kinds, strict=True):
            yield from (entry for entry in _flat(one, f"{path}.{kind}") if entry[0] != f"{path}.{kind}")
    else:
        yield path, node if isinstance(node, str) else json.dumps(node, default=str)
