"""Measures of similarity by name, for two networks with known layers and symmetry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sym import _measures
from lightning_sym._checks import check_different, check_known
from lightning_sym.similarity.cka import CKA
from lightning_sym.similarity.features import Features, repeats
from lightning_sym.similarity.kernels import Kernel
from lightning_sym.similarity.procrustes import GroupProcrustes, OrthogonalProcrustes
from lightning_sym.symmetry import ChannelGroup

Setting: TypeAlias = bool | float | str | None

_KERNELS: dict[str, Kernel] = {"cka_linear": "linear", "cka_max": "max", "cka_laplace": "laplace"}
MEASURES = tuple(_measures.MEASURES)
DEFAULT_MEASURES = ("group", "orthogonal", "cka_linear", "cka_max")


@dataclass(frozen=True)
class Layer:
    """A layer, described before any data are seen.

    Attributes:
        group: Action of the network's symmetry on its channels.
        example: Its features on two inputs.
    """

    group: ChannelGroup
    example: Features


class Measure:
    """A measure of similarity by name.

    Args:
        title: Name of the measure in tables.
        settings: Settings of its class, and ``measure`` if it differs from the title: one of ``group``, ``orthogonal``,
            ``cka_linear``, ``cka_max``, ``cka_laplace``. For ``group`` the setting ``group`` names an activation with
            the intertwiner group to use instead of the network's symmetry.

    Attributes:
        title: As given.
        kind: The measure.
        description: The measure and its settings.

    Raises:
        ValueError: If the measure or a setting is unknown, or a setting is out of its range.

    Example:
        >>> Measure("live", {"measure": "group", "live": True}).kind
        'group'
    """

    def __init__(self, title: str, settings: Mapping[str, Setting] | None = None) -> None:
        given: dict[str, Any] = dict(settings or {})
        self.title, self.kind = title, str(given.pop("measure", title))
        check_known("measure", self.kind, MEASURES)
        for name in given:
            check_known(f"setting of {self.kind}", name, _measures.MEASURES[self.kind])
        self.description: dict[str, Setting] = {"measure": self.kind, **given}
        self._group = given.pop("group", None)
        self._settings = given
        self._example = self._cka() if self.kind in _KERNELS else self._procrustes(self._group or "relu")

    @property
    def own_group(self) -> bool:
        """Whether it compares up to the network's symmetry, which must then be known."""
        return self.kind == "group" and self._group is None

    def _cka(self) -> CKA:
        return CKA(_KERNELS[self.kind], **self._settings)

    def _procrustes(self, group: ChannelGroup | str, other: ChannelGroup | None = None) -> GroupProcrustes:
        if self.kind == "orthogonal":
            return OrthogonalProcrustes(**self._settings)
        return GroupProcrustes(group, other, **self._settings)

    def metric(self, first: Sequence[Layer], second: Sequence[Layer]) -> Metric | list[list[Metric]]:
        """Return the metric or metrics for :class:`SimilarityMatrix`, for the layers of two networks."""
        if self.kind in _KERNELS:
            return self._cka()
        return [[self._between(one, two) for two in second] for one in first]

    def _between(self, one: Layer, two: Layer) -> Metric:
        try:
            repeats(one.example, two.example)
        except ValueError as error:
            return Incomparable(str(error))
        if self.own_group and one.group.inside != two.group.inside:
            return Incomparable("their channels have groups of different kinds.")
        return self._procrustes(*((one.group, two.group) if self.own_group else (self._group or "relu",)))


def named_measures(given: Sequence[str] | Mapping[str, Mapping[str, Setting] | None]) -> dict[str, Measure]:
    """Build measures by name.

    Args:
        given: Names, or settings by name.

    Raises:
        ValueError: If there are none, one is repeated, or one is unknown.
    """
    names = [given] if isinstance(given, str) else list(given)
    if isinstance(given, str) or not names or len(set(names)) < len(names):
        raise ValueError(f"measures must be a list of different names, or settings by name, got {given!r}.")
    settings = given if isinstance(given, Mapping) else dict.fromkeys(names)
    return {name: Measure(name, settings[name]) for name in names}


def checked_sites(sites: Literal["all"] | Sequence[str]) -> Literal["all"] | list[str]:
    """Check names of sites, or ``"all"``.

    Raises:
        ValueError: If they are neither distinct names nor ``"all"``.
    """
    if sites == "all":
        return "all"
    check_different("sites", sites)
    return list(sites)


class Incomparable(Metric):
    """Replacement of a measure for two layers that it cannot compare: the value is NaN.

    Args:
        reason: Reason for the warning.
    """

    full_state_update = False

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def update(self, x: Tensor | Features, y: Tensor | Features) -> None:
        """Ignore the batch."""

    def compute(self) -> Tensor:
        """Return NaN."""
        return torch.tensor(torch.nan, dtype=torch.float64)
