"""The merged network, one tensor at a time."""

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_sym.merging.formulas import Tally
from lightning_sym.merging.methods import merge_tensors
from lightning_sym.merging.parameters import Layers, MergeSettings
from lightning_sym.networks.batch_norm import batch_norms
from lightning_sym.symmetry.tracing.graph.capture import first_names, state_tensors
from lightning_sym.symmetry.views import NamedTensors

_STATISTICS = ("running_mean", "running_var")


class MergedTensors(NamedTensors):
    """The floating tensors of a merged network by their first names; each is computed when it is read.

    Statistics of batch norms are weighted means in every method: sums of differences can make a variance negative.

    Args:
        settings: The method and its settings.
        networks: The networks in the order of the settings, of one architecture. Not changed.
        reference: Network with the names and types of the result.
        has_base: Whether the reference is the base of the method.

    Attributes:
        tally: Sums over the tensors that have been read.
    """

    def __init__(
        self, settings: MergeSettings, networks: Sequence[nn.Module], reference: nn.Module, *, has_base: bool
    ) -> None:
        self.tally = Tally()
        self._settings, self._has_base = settings, has_base
        self._states, self._reference = [state_tensors(network) for network in networks], state_tensors(reference)
        self._names = {name: None for name, tensor in self._reference.items() if tensor.is_floating_point()}
        self._layers, self._statistics = Layers(self._names), _statistics_of(reference)

    def __getitem__(self, name: str) -> Tensor:
        """Compute a tensor, in the type of the reference."""
        tensors, own = [state[name].detach() for state in self._states], self._reference[name].detach()
        if name in self._statistics:
            held = [*tensors, own] if self._has_base else tensors
            merged = merge_tensors("linear", held, weight=self.shares(name))
        else:
            base = own if self._has_base else None
            merged = self._settings.merged(name, tensors, base, self._layers, self.tally)
        return merged.to(own.dtype)

    def shares(self, name: str) -> list[float]:
        """Return the share of each network, and last of a base, in statistics: none is negative, and their sum is 1.

        Args:
            name: Name of the tensor whose weights count.
        """
        shared = {key: setting.at(name, self._layers) for key, setting in self._settings.shared.items()}
        each = self._settings.per_model
        weights = [own["weight"].at(name, self._layers) if "weight" in own else 1.0 for own in each]
        if "t" in shared:
            weights = [1 - shared["t"], shared["t"]]
        if min(*weights, shared.get("lambda", 0.0)) < 0:
            self.tally.note("negative weights count as 0 in averages of statistics", name)
        positive = [max(weight, 0.0) for weight in weights]
        total = sum(positive)
        if not self._has_base:
            return [weight / total if total else 1 / len(positive) for weight in positive]
        adds_up = "lambda" in shared and not shared["normalize"]  # to the factor of the sum of differences
        factor = min(max(shared.get("lambda", 1.0), 0.0) * (total if adds_up else float(total > 0)), 1.0)
        return [*(factor * weight / (total or 1.0) for weight in positive), 1 - factor]


def _statistics_of(network: nn.Module) -> set[str]:
    """Return the first names of the statistics of batch norms."""
    names = first_names(network)
    return {names[f"{place}.{own}".lstrip(".")] for place in batch_norms(network) for own in _STATISTICS}
