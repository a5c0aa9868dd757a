"""The networks that are merged, the reference first, and the formula."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lightning_sym._checkpoint_files import Found, check_whole
from lightning_sym.merging.checkpoint import find_checkpoints
from lightning_sym.merging.methods import merge_method
from lightning_sym.merging.parameters import MergeSettings
from lightning_sym.merging.result import MergedTensors


@dataclass(frozen=True)
class Sources:
    """Networks in files, and the method that merges them.

    Attributes:
        found: The files of the networks; the first is the reference.
        names: Short names of the networks.
        models: Places of the merged networks in ``found``, in the order of the settings.
        settings: The method and its settings.
        has_base: Whether the differences of the networks from the reference are merged.
    """

    found: tuple[Found, ...]
    names: tuple[str, ...]
    models: tuple[int, ...]
    settings: MergeSettings
    has_base: bool

    @classmethod
    def of(
        cls,
        files: Sequence[str | Path],
        base: str | Path | None,
        method: str | MergeSettings,
        settings: Mapping[str, Any],
        seed: int,
    ) -> "Sources":
        """Find the files, and check the settings, before any weights are read.

        Methods that merge differences leave out a base among the files; for slerp the base is the first network; in the
        others it counts as one of the networks.

        Args:
            files: As :func:`lightning_sym.merging.merge_checkpoints` takes them.
            base: The base; None for none.
            method: Name of a method, or a method with its settings.
            settings: Settings by name, each one value, or one per network.
            seed: Seed of random masks.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the method does not take so many networks, such a base or such settings.
        """
        models = [one for file in files for one in find_checkpoints(str(file))]
        bases = [] if base is None else find_checkpoints(str(base))
        if base is not None and len(bases) != 1:
            raise ValueError(f"base is {base}, which holds {len(bases)} networks; expected one.")
        check_whole([*bases, *models])
        kind = method.method if isinstance(method, MergeSettings) else merge_method(method)
        among = [place for place, one in enumerate(models) if bases and _place(one) == _place(bases[0])]
        has_base, is_end = bool(bases) and kind.base != "unused", bool(bases) and kind.name == "slerp"
        given = dict(settings)
        if has_base or is_end:
            given = {name: _without(value, among, len(models)) for name, value in given.items()}
            models = [*(bases if is_end else []), *(one for place, one in enumerate(models) if place not in among)]
        if isinstance(method, MergeSettings):
            if given:
                raise ValueError(f"the method holds its settings; leave out {', '.join(given)}.")
        else:
            stands_alone = bool(bases) and not (among or is_end)  # refused where the method uses none
            method = MergeSettings.of(method, len(models), has_base=has_base or stands_alone, seed=seed, **given)
        first = among[0] if among and not (has_base or is_end) else 0
        order = [first, *(place for place in range(len(models)) if place != first)]
        found = [*(bases if has_base else []), *(models[place] for place in order)]
        places = [order.index(place) + has_base for place in range(len(models))]
        return cls(tuple(found), tuple(_distinct_names(found)), tuple(places), method, has_base)

    def parents(self, networks: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the networks in the order of :meth:`MergedTensors.shares`.

        Args:
            networks: One for each of :attr:`found`.
        """
        return [*(networks[place] for place in self.models), *(networks[:1] if self.has_base else [])]

    def merged(self, networks: Sequence[nn.Module]) -> MergedTensors:
        """Merge networks, one tensor at a time.

        Args:
            networks: One for each of :attr:`found`. Not changed.
        """
        models = [networks[place] for place in self.models]
        return MergedTensors(self.settings, models, networks[0], has_base=self.has_base)


def _place(one: Found) -> tuple[Path, Path | None]:
    """Return the files of a network, however their names are written."""
    return one.file.resolve(), None if one.adapter is None else one.adapter.resolve()


def _without(value: Any, among: Sequence[int], count: int) -> Any:
    """Return the values of a setting without those of the given networks."""
    per_network = isinstance(value, list | tuple) and not all(isinstance(own, Mapping) for own in value)  # no filters
    if per_network and len(value) == count:
        return [own for place, own in enumerate(value) if place not in among]
    return value


def _distinct_names(found: Sequence[Found]) -> list[str]:
    """Return the names of folders or files, numbered where two share a name."""
    names = [one.file.name if one.folder is None else one.folder.resolve().name for one in found]
    names = [name + (f"+{one.adapter.name}" if one.adapter else "") for name, one in zip(names, found, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]
