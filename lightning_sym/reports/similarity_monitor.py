"""Similarity of networks during training to their start, to a reference and to each other."""

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_sym._distributed import gathered, rank, ranks
from lightning_sym._random import seeded
from lightning_sym._tags import details, tag
from lightning_sym._text import unknown
from lightning_sym.figures import Chart, Marks, epoch_panel, measure_label
from lightning_sym.networks import Network, architecture_name
from lightning_sym.reports.report import ResultTable, RunResults, finite
from lightning_sym.similarity import Features, Layer, Link, Measure, PopulationSimilarity, features_of
from lightning_sym.symmetry import ChannelGroup, trace_symmetry
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.weights import check_numbers_alike, listed

State: TypeAlias = Mapping[str, Tensor]
Pair: TypeAlias = tuple[int, int]

UNITS = {
    "step": "optimizer steps taken",
    "epoch": "epochs trained, with the part of the current one",
    "with": "what the member first is compared with: itself at the start, the reference, or the member second",
    "similarity": "1: the same up to what the measure does not see; unitless; empty where features are not finite",
}
START, REFERENCE, MEMBERS = "start", "reference", "members"
_OTHERS = {START: "the start", REFERENCE: "the reference", MEMBERS: "other members"}
_PANEL = epoch_panel("", "similarity", Marks("similarity", "epoch", ["site"]), by=["with", "measure"], top=1.03)
CHART = Chart(
    [replace(_PANEL, title=lambda row: f"{measure_label(row['measure'])}, with {_OTHERS[row['with']]}")],
    "Similarity of representations of {title} while training",
    columns=2,
    share="xy",
)
_BATCH = 100  # images that a network sees at a time


class SimilarityMeter:
    """Measure the similarity of networks of one architecture, layer by layer, on a fixed set of inputs.

    Several processes share out the inputs and find the same numbers up to rounding, but for CKA with
    ``estimator="minibatch"``, which depends on the batches. Layers are measured one by one: each needs one
    forward pass per network, and memory for the features of all networks on this process's inputs.

    Args:
        network: The architecture; it is not modified. No random number is drawn.
        inputs: Inputs of the network, the same on every process. Shape ``[N, ...]``.
        measures: The measures; None for linear CKA and, if the network can be traced, ``group``.
        sites: Names of the modules with compared outputs; ``"all"``: the outputs of all activations.
        reference: Another network to be compared with, of any architecture with as many sites.
        device: Where to measure; default where the network is.

    Attributes:
        sites: As given, or found.
        measures: As given, or chosen.
        inputs: On the device, in the precision of the network.

    Raises:
        ValueError: If there are no inputs or sites, or the sites of the reference do not fit;
            or if a measure needs the symmetry of the network, and it cannot be traced.
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: Tensor,
        measures: Sequence[Measure] | None = None,
        sites: Sequence[str] | str = "all",
        reference: nn.Module | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not len(inputs):
            raise ValueError("there are no inputs to compare networks on; expected at least 4.")
        with seeded(0):
            self._copy = _private_copy(network).to(device)
            self.sites = _sites(self._copy, sites)
            self.inputs = _fitting(inputs, self._copy)
            own, self.measures = self._known(self._copy, self.sites, measures)
            self._reference, self._reference_sites = None, self.sites
            theirs = own
            if reference is not None:
                self._reference = _private_copy(reference).to(next(self._copy.parameters()))
                self._reference_sites = _matching_sites(self._reference, self.sites)
                theirs, _ = self._known(self._reference, self._reference_sites, self.measures)
        self._layers = own, theirs

    def _known(
        self, network: nn.Module, sites: Sequence[str], measures: Sequence[Measure] | None
    ) -> tuple[list[Layer], list[Measure]]:
        """Return the known facts about each layer, and the possible measures."""
        example = self.inputs[:2]
        features = features_of(network, sites, example)
        possible = list(measures) if measures is not None else [Measure("group"), Measure("cka_linear")]
        try:
            symmetry = trace_symmetry(network, example, nullity=False, exchange=False)
            groups = [symmetry.channels(site) for site in sites]
        except ValueError as error:
            if measures is not None and any(measure.own_group for measure in measures):
                raise ValueError(
                    f"the measure group compares up to the network's own symmetry, and {error} Leave it out, or name "
                    "an activation, as in {group: {group: relu}}."
                ) from error
            warnings.warn(
                f"no similarity up to the network's own symmetry, and channels are taken to be on axis 1: {error}",
                stacklevel=4,
            )
            possible = [measure for measure in possible if not measure.own_group]
            groups = [ChannelGroup.orthogonal(features[site].shape[1]) for site in sites]
        known = [Layer(group, Features(features[site], group.axes)) for site, group in zip(sites, groups, strict=True)]
        return known, possible

    def links(self, numbers: Sequence[int]) -> dict[str, list[Pair]]:
        """Return the compared pairs of members by the kind of comparison.

        Args:
            numbers: The members.
        """
        with_itself = [(number, number) for number in numbers]
        found = {START: with_itself, REFERENCE: with_itself if self._reference is not None else []}
        return {name: pairs for name, pairs in {**found, MEMBERS: list(itertools.combinations(numbers, 2))}.items()
                if pairs}  # fmt: skip

    @torch.no_grad()
    def values(self, states: Mapping[int, State], starts: Mapping[int, State]) -> dict[str, Tensor]:
        """Return all similarities; to be called on every process, with the same weights.

        Args:
            states: The members' parameters and buffers now, by number.
            starts: The same at the start.

        Returns:
            Similarities by link, shape ``[links, measures, sites]``, float64; NaN where a network's features are
            not finite.
        """
        links = self.links(list(states))
        shape = len(self.measures), len(self.sites)
        found = {name: torch.full((len(pairs), *shape), math.nan, dtype=torch.float64) for name, pairs in links.items()}
        networks = {
            f"{kind} {n}": state for kind, all_ in (("now", states), (START, starts)) for n, state in all_.items()
        }
        batches = torch.split(self.inputs[rank() :: ranks()], _BATCH)
        for place, site in enumerate(self.sites):
            features = {}
            for name, state in networks.items():
                _load(self._copy, state)
                features[name] = [features_of(self._copy, [site], batch)[site] for batch in batches]
            if self._reference is not None:
                other = self._reference_sites[place]
                features[REFERENCE] = [features_of(self._reference, [other], batch)[other] for batch in batches]
            own = {name for name, parts in features.items() if not all(bool(part.isfinite().all()) for part in parts)}
            broken = set().union(*gathered(own))
            for name, pairs in links.items():
                named = [_link(name, pair) for pair in pairs]
                rows = [row for row, link in enumerate(named) if not broken & {link.first, link.second}]
                if rows:
                    found[name][rows, :, place] = self._compared(place, features, [named[row] for row in rows])
        return found

    def _compared(self, place: int, features: Mapping[str, Sequence[Tensor]], links: Sequence[Link]) -> Tensor:
        """Return the similarities of linked networks at one site. Shape ``[links, measures]``."""
        first = self._layers[0][place]
        second = self._layers[1][place] if links[0].second == REFERENCE else first
        site = [self.sites[place]]
        needed = {name for link in links for name in link[:2]}
        collected = [
            PopulationSimilarity(measure.metric([first], [second]), site, site, links).to(self.inputs.device)
            for measure in self.measures
        ]
        for index in range(len(next(iter(features.values())))):
            batch = {
                name: {
                    site[0]: Features(features[name][index], (second if name == REFERENCE else first).group.axes, name)
                }
                for name in needed
            }
            for one in collected:
                one.update(batch)
        return torch.stack([one.compute()[:, 0, 0] for one in collected], dim=1)


def _link(compared_with: str, pair: Pair) -> Link:
    first, second = f"now {pair[0]}", f"now {pair[1]}"
    others = {START: f"{START} {pair[1]}", REFERENCE: REFERENCE}
    return Link(first, others.get(compared_with, second))


def _private_copy(network: nn.Module) -> nn.Module:
    """Return a copy for measuring, in single or double precision."""
    private = copied(network)
    dtypes = {parameter.dtype for parameter in private.parameters()}
    if not dtypes:
        raise ValueError(f"{architecture_name(network)} has no parameters; nothing would change while it is trained.")
    return private.to(torch.float64 if torch.float64 in dtypes else torch.float32).eval().requires_grad_(False)


def with_weights(network: nn.Module, state: State, source: str) -> nn.Module:
    """Return a copy of a network with other weights.

    Args:
        network: Architecture; it is not modified.
        state: All parameters and buffers of its state dict, by name.
        source: Where they are from, for the message.

    Raises:
        ValueError: If some are missing or do not fit.
    """
    private = _private_copy(network)
    wanted = private.state_dict(keep_vars=True)
    for name in state.keys() & wanted.keys():
        check_numbers_alike(state[name], wanted[name], name, source)
    try:
        private.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"The weights in {source} do not fit {architecture_name(network)}: {' '.join(str(error).split())}"
        ) from error
    return private


def _fitting(inputs: Tensor, network: nn.Module) -> Tensor:
    """Return inputs on the device of a network, floating ones in its precision."""
    weight = next(network.parameters())
    return inputs.to(weight) if inputs.is_floating_point() else inputs.to(weight.device)


def _load(network: nn.Module, state: State) -> None:
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if name in state:
            tensor.copy_(state[name])


def _sites(network: nn.Module, sites: Sequence[str] | str) -> list[str]:
    """Return the names of sites of a network; it is not changed."""
    modules = dict(network.named_modules())
    if not isinstance(sites, str):
        for site in sites:
            if site not in modules:
                raise ValueError(unknown("module", site, modules))
        return list(sites)
    try:
        if isinstance(network, Network):
            found = network.sites()
        else:
            found = [site.removeprefix("module.") for site in Network.wrap(copied(network)).sites()]
    except (ValueError, TypeError) as error:
        raise ValueError(f"Name the sites to be compared, as they could not be found: {error}") from error
    functional = [site for site in found if site.rpartition(".")[2].startswith("functional-")]
    kept = [site for site in found if site not in functional]
    if not kept:
        raise ValueError(
            f"{architecture_name(network)} has no activation modules; name the sites to be compared, modules such as "
            f"{listed([name for name, module in modules.items() if name and not len(list(module.children()))])}."
        )
    if functional:
        warnings.warn(f"activations that are no modules are not compared: {listed(functional)}", stacklevel=4)
    return kept


def _matching_sites(reference: nn.Module, sites: Sequence[str]) -> list[str]:
    """Return the sites of the reference: those of the same names, or else as many others."""
    if set(sites) <= dict(reference.named_modules()).keys():
        return list(sites)
    found = _sites(reference, "all")
    if len(found) != len(sites):
        raise ValueError(
            f"the reference has {len(found)} sites, {', '.join(found)}, and there are {len(sites)} to be compared, "
            f"{', '.join(sites)}; expected modules of the same names, or as many sites."
        )
    return found


# ---- logged and written results


def monitor_scalars(
    point: Mapping[str, Any], measures: Sequence[str], sites: Sequence[str], prefix: str
) -> dict[str, float]:
    """Return the logged numbers of a point: means of finite values over members or pairs; single sites are details.

    Args:
        point: ``values``, as :meth:`SimilarityMeter.values` returns them.
        measures: Names of the measures.
        sites: Names of the sites.
        prefix: First part of all tags.
    """
    found = {
        tag(prefix, name, measure, site): float(values[:, i, j].nanmean())
        for name, values in point["values"].items()
        for i, measure in enumerate(measures)
        for j, site in enumerate(sites)
        if bool(values[:, i, j].isfinite().any())
    }
    over_sites = {
        tag(prefix, name, measure): float(values[:, i].nanmean())
        for name, values in point["values"].items()
        for i, measure in enumerate(measures)
        if bool(values[:, i].isfinite().any())
    }
    return over_sites | details(found)


def monitor_results(
    points: Sequence[Mapping[str, Any]],
    links: Mapping[str, Sequence[Pair]],
    measures: Sequence[str],
    sites: Sequence[str],
    *,
    network: str,
    about: Mapping[str, Any],
    name: str = "similarity",
) -> RunResults:
    """Report the similarity of networks during training.

    Args:
        points: In the order of time: ``step``, ``epoch`` and ``values``, as for :func:`monitor_scalars`.
        links: Compared pairs, see :meth:`SimilarityMeter.links`.
        measures: Names of the measures.
        sites: Names of the sites.
        network: Name of the architecture, for the title.
        about: Everything needed to make the table again.
        name: Name of the files.
    """
    rows = list(_rows(points, links, measures, sites))
    table = ResultTable(name, "similarity of representations while training", rows, UNITS, about)
    return RunResults([table], CHART.named(name, rows, network))


def _rows(
    points: Sequence[Mapping[str, Any]],
    links: Mapping[str, Sequence[Pair]],
    measures: Sequence[str],
    sites: Sequence[str],
) -> Iterator[dict[str, Any]]:
    for point in points:
        for compared_with, pairs in links.items():
            values = point["values"][compared_with]
            for (row, (first, second)), (i, measure), (j, site) in itertools.product(
                enumerate(pairs), enumerate(measures), enumerate(sites)
            ):
                yield {
                    "step": point["step"], "epoch": point["epoch"], "with": compared_with, "measure": measure,
                    "site": site, "first": first, "second": second if compared_with == MEMBERS else None,
                    "similarity": finite(float(values[row, i, j])),
                }  # fmt: skip
