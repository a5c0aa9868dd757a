"""Settings of a merge: per model, per layer and per tensor."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from reprlib import repr as brief
from typing import Any

from torch import Tensor

from lightning_sym._checks import check_numbers, check_seeds
from lightning_sym._text import nearest
from lightning_sym.merging.formulas import Tally
from lightning_sym.merging.methods import FLAGS, RANGES, MergeMethod, check_models, merge_method, merge_tensors

_NUMBERED = re.compile(r"(.*_)?\d+")
# Entries of these settings must cover every tensor, as in mergekit: a default would give the rest full weight.
_COVERING = ("weight", "t")
# Sums of weights below this share of their magnitudes are 0 up to rounding.
_ZERO = 1e-8


class Layers:
    """Layers of a network, found in the names of its tensors, and their relative depth.

    The layer of a tensor is the part of its name up to the first number: ``model.layers.3`` for
    ``model.layers.3.mlp.up_proj.weight``, likewise ``h.3``, ``encoder.layer.3``, ``blocks.3``, ``layer1.0`` and
    ``encoder_layer_3``. Numbers that all names share, as in a wrapped network, and the tensor's own name do not count.
    Experts, and blocks within numbered stages, belong to the layer around them. Without any numbers, each module is a
    layer.

    The L layers are numbered i = 0, ..., L-1 by first appearance and have depth i / (L-1); a single layer has depth 1.
    Tensors before the first layer have depth 0, tensors after the last one depth 1, and tensors between two layers
    the depth of the one before. Earlier versions of mergekit do the same; 0.1.5 gives depth 0 to tensors after the
    last layer.

    Args:
        names: Names of the tensors, in the order of the network.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        split = [name.split(".") for name in self.names]
        shared = 0
        if split:
            shared = next((n for n, parts in enumerate(zip(*split, strict=False)) if len(set(parts)) > 1), 0)
        layers = [_layer(parts, shared) for parts in split]
        if not any(layers):
            layers = [tuple(parts[:-1]) or ("",) for parts in split]
        order = {layer: number for number, layer in enumerate(dict.fromkeys(filter(None, layers)))}
        self.count = len(order)
        self._places: dict[str, float] = {}
        deepest = 0.0
        for name, layer in zip(self.names, layers, strict=True):
            place = deepest
            if layer:
                place = order[layer] / (self.count - 1) if self.count > 1 else 1.0
            deepest = max(deepest, place)
            self._places[name] = place

    def place(self, name: str) -> float:
        """Return the relative depth of a tensor, in [0, 1].

        Raises:
            ValueError: If the network holds no tensor of this name.
        """
        if name not in self._places:
            raise ValueError(f"The network has no tensor {name!r}.{nearest(name, self.names)}")
        return self._places[name]


def _layer(parts: Sequence[str], shared: int) -> tuple[str, ...]:
    """Return the parts of a name up to its first number; empty without one."""
    for number in range(shared, len(parts) - 1):
        if _NUMBERED.fullmatch(parts[number]):
            return tuple(parts[: number + 1])
    return ()


@dataclass(frozen=True)
class Setting:
    """A number for each tensor, by parts of its name and by depth.

    Attributes:
        entries: Pairs of a part of a name, or None for any name, and numbers over depth. The first match counts.
        where: Place of the setting, for messages.
    """

    entries: tuple[tuple[str | None, tuple[float, ...]], ...]
    where: str = field(default="", compare=False)

    @classmethod
    def of(cls, value: object, where: str, *, flag: bool = False) -> "Setting":
        """Read a setting.

        Args:
            value: A number; a list of numbers, interpolated linearly over depth; entries ``{filter: ..., value: ...}``
                with one of these values each; or a setting, returned unchanged.
            where: Place of the value, for messages.
            flag: Whether the values are true or false, and no lists, instead of numbers.

        Raises:
            ValueError: If the value has another form.
        """
        if isinstance(value, Setting):
            return value
        entries = [value] if isinstance(value, Mapping) else value
        if isinstance(entries, list | tuple) and any(isinstance(entry, Mapping) for entry in entries):
            return cls(tuple(_entry(entry, f"{where}[{n}]", flag) for n, entry in enumerate(entries)), where)
        return cls(((None, _numbers(value, where, flag)),), where)

    def over(self, other: "Setting") -> "Setting":
        """Return this setting with the entries of another one, which count where no entry of this one matches."""
        return Setting((*self.entries, *other.entries), self.where)

    def at(self, name: str, layers: Layers) -> float:
        """Return the number for a tensor.

        Args:
            name: Name of the tensor.
            layers: Layers of its network.

        Raises:
            ValueError: If no entry matches, or the network holds no tensor of this name.
        """
        for part, numbers in self.entries:
            if part is None or part in name:
                return _interpolated(numbers, layers.place(name))
        raise ValueError(
            f"{self.where} has no value for {name}; add an entry without filter, which counts for all other tensors."
        )

    @property
    def constant(self) -> float | None:
        """The number of all tensors; None if it depends on the tensor."""
        part, numbers = self.entries[0]
        return numbers[0] if part is None and len(set(numbers)) == 1 else None

    @property
    def filters(self) -> tuple[str, ...]:
        """The parts of names."""
        return tuple(part for part, _ in self.entries if part is not None)


def _entry(entry: object, where: str, flag: bool) -> tuple[str | None, tuple[float, ...]]:
    """Read an entry of a list with filters."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be an entry with filter and value like its neighbours, got {brief(entry)}.")
    for key in entry:
        if key not in ("filter", "value"):
            near = nearest(str(key), ("filter", "value"))
            raise ValueError(f"{where} has an unknown key {key!r}; expected filter and value.{near}")
    if "value" not in entry:
        raise ValueError(f"{where} has no value; expected filter and value.")
    part = entry.get("filter")
    if part is not None and (not isinstance(part, str) or not part):
        raise ValueError(f"{where}.filter must be a part of tensors' names, got {brief(part)}.")
    return None if part == "*" else part, _numbers(entry["value"], f"{where}.value", flag)


def _numbers(value: object, where: str, flag: bool) -> tuple[float, ...]:
    if flag:
        if isinstance(value, bool) or (isinstance(value, Real) and value in (0, 1)):
            return (float(value),)
        raise ValueError(f"{where} must be true or false, got {brief(value)}.")
    given = value if isinstance(value, list | tuple) else [value]
    numbers = tuple(map(_number, given))
    if not numbers or None in numbers:
        raise ValueError(f"{where} must be a finite number, or a list of them over the layers, got {brief(value)}.")
    return tuple(number for number in numbers if number is not None)


def _number(value: object) -> float | None:
    """Return a finite number; also of text, as YAML 1.1 reads 1e-3 as text."""
    if isinstance(value, bool) or not isinstance(value, Real | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _interpolated(numbers: Sequence[float], place: float) -> float:
    """Interpolate numbers linearly over equal distances in [0, 1]."""
    position = place * (len(numbers) - 1)
    low = int(position)
    high = min(low + 1, len(numbers) - 1)
    share = position - low
    return (1 - share) * numbers[low] + share * numbers[high]


@dataclass(frozen=True)
class MergeSettings:
    """A merge method with its settings.

    Attributes:
        method: The method.
        per_model: For each model besides the base, its settings by name.
        shared: Settings of the merge by name.
        seed: Seed of random masks.
    """

    method: MergeMethod
    per_model: tuple[Mapping[str, Setting], ...]
    shared: Mapping[str, Setting]
    seed: int = 0

    @classmethod
    def of(cls, method: str, models: int, *, has_base: bool, seed: int = 0, **settings: Any) -> "MergeSettings":
        """Check a method and its settings, before anything is read.

        Args:
            method: Name of the method.
            models: Number of models besides the base.
            has_base: Whether there is a base.
            seed: Seed of random masks, >= 0.
            settings: By name (``lambda`` also as ``lambda_``); None counts as not given. A value has one of the forms
                of :meth:`Setting.of`. Settings of models (weight, density, ...) are one value for all, or a list with
                one value per model; a ramp over layers for each model is a list of lists.

        Raises:
            ValueError: If the method or a setting is unknown, a value has the wrong form or range, the weights sum to
                0, or the number of models or the base does not fit the method.
        """
        chosen = merge_method(method)
        check_seeds(seed=seed)
        given = {name.removesuffix("_"): value for name, value in settings.items() if value is not None}
        for name in given:
            check_setting(chosen, name)
        check_models(chosen, models, has_base)
        shared = {
            name: _complete(name, Setting.of(given.get(name, default), name, flag=name in FLAGS), default)
            for name, default in chosen.shared.items()
            if name in given or default is not None
        }
        each: dict[str, list[Setting]] = {}
        for name, default in chosen.per_model.items():
            values = _one_per_model(given.get(name, default), name, models)
            each[name] = [_complete(name, value, default) for value in values]
        own = cls(chosen, tuple({name: each[name][n] for name in each} for n in range(models)), shared, seed)
        if all(setting.constant is not None for setting in own._settings()):
            own._values(lambda setting: setting.constant or 0.0, "")
        return own

    def constants(self) -> dict[str, Any]:
        """Return the keyword arguments of :func:`lightning_sym.merging.methods.merge_tensors`, but for the seed.

        Raises:
            ValueError: If a setting depends on the tensor.
        """
        if varying := next((setting for setting in self._settings() if setting.constant is None), None):
            raise ValueError(f"{varying.where} depends on the tensor; expected one number for all.")
        return self._values(lambda setting: setting.constant or 0.0, "")

    def check(self, layers: Layers) -> tuple[str, ...]:
        """Evaluate the settings at every tensor.

        Args:
            layers: Layers of the network.

        Returns:
            Notes on filters that match no tensor.

        Raises:
            ValueError: If a setting has no value for a tensor, or weights sum to 0 there.
        """
        for name in layers.names:
            self._at(name, layers)
        parts = {part for name in layers.names for part in name.split(".")}
        unused = {
            f"filter {part!r} of {setting.where} is part of no tensor's name.{nearest(part, parts)}"
            for setting in self._settings()
            for part in setting.filters
            if not any(part in name for name in layers.names)
        }
        return tuple(sorted(unused))

    def merged(
        self, name: str, tensors: Sequence[Tensor], base: Tensor | None, layers: Layers, tally: Tally | None = None
    ) -> Tensor:
        """Merge a tensor of all models, by the values of the settings at its name.

        Args:
            name: Name of the tensor.
            tensors: The tensor of each model besides the base, of one shape.
            base: The tensor of the base, of the same shape; None without a base.
            layers: Layers of the network.
            tally: Collects numbers for the report.

        Returns:
            The merged tensor, as :func:`lightning_sym.merging.methods.merge_tensors` returns it.

        Raises:
            ValueError: If a setting has no value for the tensor, or weights sum to 0 there.
        """
        values = self._at(name, layers)
        return merge_tensors(self.method, tensors, base=base, seed=self.seed, name=name, tally=tally, **values)

    def _settings(self) -> list[Setting]:
        return [*(setting for model in self.per_model for setting in model.values()), *self.shared.values()]

    def _at(self, name: str, layers: Layers) -> dict[str, Any]:
        """Return the keyword arguments of ``merge_tensors`` at a tensor."""
        return self._values(lambda setting: setting.at(name, layers), f" at {name}")

    def _values(self, number: Callable[[Setting], float], where: str) -> dict[str, Any]:
        """Return the keyword arguments of ``merge_tensors`` for a number of each setting, and check them together."""
        own = {one: [number(model[one]) for model in self.per_model] for one in self.method.per_model}
        shared: dict[str, Any] = {one: number(setting) for one, setting in self.shared.items()}
        shared |= {one: bool(shared[one]) for one in FLAGS if one in shared}
        weights = own.get("weight")
        if weights and shared.get("normalize", True) and not self.method.elect:
            _check_sum(weights, where)
        for density, epsilon in zip(own.get("density", ()), own.get("epsilon", ()), strict=False):
            if density < 1 and not epsilon < density < 1 - epsilon:
                raise ValueError(
                    f"epsilon must leave density - epsilon and density + epsilon in (0, 1), got {epsilon:g} and "
                    f"density {density:g}{where}."
                )
        return {"lambda_" if one == "lambda" else one: value for one, value in {**own, **shared}.items()}


def check_setting(method: MergeMethod, name: str, where: str = "") -> None:
    """Check that a method has a setting.

    Args:
        method: The method.
        name: Name of the setting.
        where: Place of the setting, for the message.

    Raises:
        ValueError: If it has none.
    """
    known = (*method.per_model, *method.shared)
    if name not in known:
        expected = f"expected {', '.join(known)}" if known else "leave it out"
        place = f"{where}: " if where else ""
        raise ValueError(f"{place}{method.name} has no setting {name!r}; {expected}.{nearest(name, known)}")


def _one_per_model(value: object, name: str, models: int) -> list[Setting]:
    """Return the setting of each model."""
    if not isinstance(value, list | tuple) or (value and all(isinstance(entry, Mapping) for entry in value)):
        return [Setting.of(value, name)] * models
    if len(value) != models:
        raise ValueError(
            f"{name} holds {len(value)} values for {models} models; expected one for all, or one for each (a list of "
            "numbers over the layers for each model is a list of lists)."
        )
    return [Setting.of(one, f"{name}[{number}]") for number, one in enumerate(value)]


def _complete(name: str, setting: Setting, default: float | bool | None) -> Setting:
    """Check the range of a setting, and let the default count for tensors without a matching entry."""
    for _, numbers in setting.entries:
        for number in numbers if name in RANGES else ():
            check_numbers(RANGES[name], **{setting.where: number})
    if name in _COVERING or default is None or any(part is None for part, _ in setting.entries):
        return setting
    return setting.over(Setting.of(default, name, flag=isinstance(default, bool)))


def _check_sum(weights: Sequence[float], where: str) -> None:
    """Check that weights that are divided by their sum do not sum to 0."""
    if abs(math.fsum(weights)) <= _ZERO * math.fsum(map(abs, weights)):
        raise ValueError(
            f"The weights {', '.join(f'{weight:g}' for weight in weights)}{where} sum to 0, and are divided by their "
            "sum; pass other weights, or normalize: false where the method has it."
        )
