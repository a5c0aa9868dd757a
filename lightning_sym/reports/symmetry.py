"""Training along and across symmetry orbits: conserved quantities, balance, dead units, distance to the start."""

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_sym._random import seeded
from lightning_sym._tags import MOST_CURVES, overview, tag
from lightning_sym.figures import Chart, Marks, epoch_panel
from lightning_sym.networks import architecture_name
from lightning_sym.reports.report import ResultTable, RunResults, finite, over_members
from lightning_sym.symmetry import Balance, balance, canonicalize, trace_symmetry
from lightning_sym.symmetry.tracing.graph.capture import copied

Numbers: TypeAlias = dict[str, float]
Point: TypeAlias = Mapping[str, Any]

UNITS = {
    "step": "optimizer steps taken",
    "epoch": "epochs trained, with the part of the current one",
    "imbalance": "sum over units of |incoming - outgoing| / sum of (incoming + outgoing), squared norms; 0 to 1",
    "conserved": "mean over units of |incoming - outgoing|, squared norms of weights",
    "drift": "sum over units of |change of (incoming - outgoing) since the start| / sum of (incoming + outgoing) then",
    "dead": "number of units with no incoming or no outgoing weights",
    "parameters": "Euclidean distance to the start, relative to the norm of the start",
    "balanced": "the same with both in the balanced gauge, units in place",
    "canonical": "the same with both in canonical form (balanced, signs fixed, units sorted)",
}
OF_GROUPS = ("imbalance", "conserved", "drift", "dead")
GAUGES = ("parameters", "balanced", "canonical")


class GroupKind(NamedTuple):
    """Quantities that are defined for an axis group.

    Attributes:
        size: Number of units.
        two_sided: Whether something comes into its units and something goes out.
        conserved: Whether it has a free scale, so that gradient flow conserves something.
    """

    size: int
    two_sided: bool
    conserved: bool

    @property
    def quantities(self) -> list[str]:
        """Names of the measured quantities."""
        defined = {"imbalance": self.two_sided, "conserved": self.conserved, "drift": self.conserved}
        return [name for name in OF_GROUPS if defined.get(name, True)]


class SymmetryMeter:
    """Measure weights of one architecture, on a copy of the network in float64.

    Args:
        network: The network; it is not modified, and no random number is drawn.
        example: Example inputs of the network; may be nested, and on any device.

    Attributes:
        symmetry: The symmetry of the network.
        kinds: Quantities that are defined for each axis group, by its name.

    Raises:
        ValueError: If the network has no parameters, or cannot be traced.
    """

    def __init__(self, network: nn.Module, example: Any) -> None:
        with seeded(0):
            self._copy = copied(network).cpu()
            first = next(self._copy.parameters(), None)
            if first is None:
                raise ValueError(f"{architecture_name(network)} has no parameters whose symmetry could be measured.")

            def fitting(value: Any) -> Any:
                return value.detach().cpu().to(first.dtype if value.is_floating_point() else value.dtype)

            example = torch.utils._pytree.tree_map_only(Tensor, fitting, example)
            self.symmetry = trace_symmetry(self._copy, example)
            fixed = {name for name, own in self._copy.named_parameters() if not own.requires_grad}
            if fixed == {name for name, _ in self._copy.named_parameters()}:  # trained by other means
                fixed = set()
            buffers = (name for name, _ in self._copy.named_buffers())
            fixed.update(name for name in buffers if not name.endswith(("running_mean", "running_var")))
            self._copy.double().eval().requires_grad_(False)
            probe = copy.deepcopy(self._copy)
            for parameter in probe.parameters():
                parameter.fill_(1.0)
            balances = balance(self.symmetry, probe)
        charts = self.symmetry.structure.charts
        self.kinds: dict[str, GroupKind] = {}
        for group in self.symmetry.groups:
            found = balances[group.name]
            two_sided = bool((found.incoming > 0).all() and (found.outgoing > 0).all())
            # Gradient flow conserves nothing where a frozen parameter or a buffer, such as a gain, holds the scale.
            held = {name for own in group.occurrences for name in charts.held_in(own.tensor)}
            free = (group.scales > 0 or group.dense) and fixed.isdisjoint(held)
            self.kinds[group.name] = GroupKind(group.size, two_sided, free)

    @torch.no_grad()
    def start(self, state: Mapping[str, Tensor], *, distance: bool = True) -> dict[str, Any]:
        """Return the quantities at the start, for comparison with later weights.

        Args:
            state: Parameters and buffers, by name.
            distance: Whether to keep the weights, for distances.
        """
        self._load(state)
        sides = balance(self.symmetry, self._copy)
        start: dict[str, Any] = {
            "difference": {name: found.difference for name, found in sides.items()},
            "total": {name: float((found.incoming + found.outgoing).sum()) for name, found in sides.items()},
        }
        return {**start, "state": state} if distance else start

    @torch.no_grad()
    def values(
        self, state: Mapping[str, Tensor], start: Mapping[str, Any], forms: Mapping[str, Tensor] | None = None
    ) -> dict[str, Any]:
        """Return the quantities of each axis group, and distances to the start; NaN where weights are not finite.

        Args:
            state: Parameters and buffers, by name.
            start: Result of :meth:`start`.
            forms: The start in each gauge; None for no distances.
        """
        measured = self._load(state)
        sides = balance(self.symmetry, self._copy) if measured else {}
        groups = {name: _quantities(kind, sides.get(name), start, name) for name, kind in self.kinds.items()}
        if forms is None:
            return {"groups": groups, "distance": {}}
        distance = dict.fromkeys(GAUGES, math.nan)
        if measured and forms:
            now = self._all_forms()
            for name, form in forms.items():
                distance[name] = _ratio(float((now[name] - form).double().norm()), float(form.double().norm()))
        return {"groups": groups, "distance": distance}

    @torch.no_grad()
    def forms(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights in every gauge, one vector each; nothing if they are not finite."""
        return self._all_forms() if self._load(state) else {}

    def _load(self, state: Mapping[str, Tensor]) -> bool:
        """Put weights into the copy; return whether they are finite."""
        finite = True
        for name, tensor in (*self._copy.named_parameters(), *self._copy.named_buffers()):
            if name in state:
                tensor.copy_(state[name])
                finite = finite and bool(torch.isfinite(tensor).all())
        return finite

    def _all_forms(self) -> dict[str, Tensor]:
        """Return the copy in every gauge; it ends as the canonical form."""
        forms = {"parameters": self._vector()}
        canonicalize(self.symmetry, self._copy, signs=False, order=False, inplace=True, check=False)
        forms["balanced"] = self._vector()
        canonicalize(self.symmetry, self._copy, inplace=True, check=False)
        forms["canonical"] = self._vector()
        return forms

    def _vector(self) -> Tensor:
        """Return all parameters of the copy, no wider than the network's, for memory's sake."""
        layout = self.symmetry.architecture.layout
        parts = [
            parameter.flatten().to(torch.float64 if layout[name][1] == torch.float64 else torch.float32)
            for name, parameter in self._copy.named_parameters()
        ]
        return torch.cat(parts)


def _quantities(kind: GroupKind, found: Balance | None, start: Mapping[str, Any], name: str) -> Numbers:
    """Return the defined quantities of a group; NaN without a balance."""
    if found is None:
        return dict.fromkeys(kind.quantities, math.nan)
    size = float(found.difference.abs().sum())
    change = float((found.difference - start["difference"][name]).abs().sum())
    values = {
        "imbalance": _ratio(size, float((found.incoming + found.outgoing).sum())),
        "conserved": size / len(found.difference),
        "drift": _ratio(change, start["total"][name]),
        "dead": found.dead,
    }
    return {quantity: values[quantity] for quantity in kind.quantities}


def monitor_scalars(point: Point, prefix: str = "symmetry", *, named: bool = False) -> Numbers:
    """Return the logged numbers of a point: means of finite values over members, and over axis groups.

    Those of single groups are details if there are more than a monitor has room for.

    Args:
        point: ``members``, by number: their ``groups`` and ``distance`` as :meth:`SymmetryMeter.values` gives them.
        prefix: First part of all tags.
        named: Whether each member also has its own tag.
    """
    found: dict[str, dict[int, float]] = {}
    quantity_of: dict[str, str] = {}  # of the tags of single groups
    for number, values in point["members"].items():
        own = {f"{prefix}/distance/{gauge}": value for gauge, value in values["distance"].items()}
        for group, quantities in values["groups"].items():
            for quantity, value in quantities.items():
                own[name := f"{prefix}/{quantity}/{_group_tag(group)}"] = value
                quantity_of[name] = f"{prefix}/{quantity}"
        for name, value in own.items():
            found.setdefault(name, {})[number] = value
    scalars = over_members(found, named=named)
    groups = {name: scalars.pop(name) for name in quantity_of if name in scalars}
    of_all: dict[str, list[float]] = {}
    for name, value in groups.items():
        of_all.setdefault(quantity_of[name], []).append(value)
    means = {quantity: math.fsum(values) / len(values) for quantity, values in of_all.items()}
    return {**scalars, **overview(groups, means, MOST_CURVES // 2)}


def monitor_results(
    points: Sequence[Point],
    kinds: Mapping[str, GroupKind],
    *,
    network: str,
    about: Mapping[str, Any],
    name: str = "symmetry",
    distance: bool = True,
) -> RunResults:
    """Report how training moved networks along and across their symmetry orbits.

    Args:
        points: In the order of time: ``step``, ``epoch`` and ``members``, as for :func:`monitor_scalars`.
        kinds: Quantities that are defined for each axis group.
        network: Name of the architecture, for the title.
        about: Everything needed to make the tables again.
        name: Name of the files.
        distance: Whether there are distances.
    """
    what = "units of axis groups while training: balance of incoming and outgoing squared norms"
    groups, gauges = list(_group_rows(points, kinds)), []
    tables = [ResultTable(name, what, groups, UNITS, about)]
    if distance:
        gauges = [
            {**head, **{gauge: finite(values["distance"][gauge]) for gauge in GAUGES}}
            for head, values in _by_member(points)
        ]
        what = "distance of the parameters to those at the start of training"
        tables.append(ResultTable(f"{name}_distance", what, gauges, UNITS, about))
    members = len(points[-1]["members"])
    count = f", mean of {members} members" if members > 1 else ""
    dead = any(row["dead"] for row in groups) and (distance or any(len(kind.quantities) > 1 for kind in kinds.values()))
    chart = _chart(kinds, f"Symmetry of {network} while training{count}", dead=dead)
    return RunResults(tables, chart.named(name, {"groups": groups, "distance": gauges}))


def _by_member(points: Sequence[Point]) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    for point in points:
        for number, values in point["members"].items():
            yield {"step": point["step"], "epoch": point["epoch"], "member": number}, values


def _group_rows(points: Sequence[Point], kinds: Mapping[str, GroupKind]) -> Iterator[dict[str, Any]]:
    for head, values in _by_member(points):
        for group, own in values["groups"].items():
            numbers = {name: finite(own[name]) if name in own else None for name in OF_GROUPS}
            yield {**head, "group": group, "size": kinds[group].size, **numbers}


def _chart(kinds: Mapping[str, GroupKind], title: str, *, dead: bool) -> Chart:
    def of_groups(quantity: str) -> Marks:
        defined = {name for name, kind in kinds.items() if quantity in kind.quantities}
        return Marks(quantity, "epoch", label=_short, where=lambda row: row["group"] in defined)

    looks = [("as trained", "#1b1b1b", "-"), ("balanced, units in place", "#009e73", "--"),
             ("canonical, units sorted", "#cc79a7", ":")]  # fmt: skip
    distances = [
        Marks(gauge, "epoch", label=label, look={"color": color, "ls": style}, table="distance")
        for gauge, (label, color, style) in zip(GAUGES, looks, strict=True)
    ]
    ratio, change = (
        "$|$in $-$ out$|$ / (in $+$ out),\nsquared norms",
        "change of (in $-$ out)\n/ (in $+$ out) at the start",
    )
    panels = [
        epoch_panel("Imbalance, 0 = balanced", ratio, of_groups("imbalance"), bottom=0),
        epoch_panel("Change of the quantities conserved by gradient flow", change, of_groups("drift"), bottom=0),
        epoch_panel("Distance to the start", "relative to the norm at the start", *distances, bottom=0),
        epoch_panel("Dead units", "number of units, mean over members", of_groups("dead"), bottom=0),
    ]
    return Chart(panels if dead else panels[:3], title, columns=1, legend="each")


def _short(row: Mapping[str, Any]) -> str:
    name: str = row["group"]
    return name if len(name) <= 28 else "..." + name[-25:]


def _group_tag(group: str) -> str:
    """Return a group's name in a tag: the second group of a layer, ``conv1 (2)``, is ``conv1--2``."""
    numbered = re.fullmatch(r"(.+) \((\d+)\)", group)
    return f"{tag(numbered[1])}--{numbered[2]}" if numbered else tag(group)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
