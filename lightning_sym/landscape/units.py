"""Removable units of a network: their positions, their effects, and the network without them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_rows, is_finite
from lightning_sym._distributed import Batches, device_of, inputs_for, run_on, summed, together, wide
from lightning_sym._text import unknown
from lightning_sym.networks import architecture_name
from lightning_sym.networks.batch_norm import inputs_of
from lightning_sym.networks.modes import evaluating
from lightning_sym.networks.narrowing import Axis, narrowed
from lightning_sym.symmetry import Symmetry, trace_symmetry
from lightning_sym.symmetry.charts import charted
from lightning_sym.symmetry.tracing.graph.capture import copied

Unit = tuple[str, int]
"""The name of an axis group, and the unit's number in it."""
Removed = Mapping[str, Sequence[int]]
"""By axis group, the numbers of its units that are no longer there."""

_READ = {nn.Linear: 1, nn.Conv1d: 1, nn.Conv2d: 1, nn.Conv3d: 1}
# Relative change of an output that refutes an exact removal: float64 rounds sums of some hundred terms to 1e-13.
_TOLERANCE = 1e-10
_PERTURBATIONS = (0.3, 1.0, 3.0, 3.0)  # of weights, relative to their size


@dataclass(frozen=True)
class _Place:
    """Positions of the units of a group on an axis of one tensor, ``[size, k]``, int64."""

    tensor: str
    axis: int
    positions: Tensor
    is_parameter: bool
    is_read: bool  # by a linear layer or a convolution, as one of its inputs


class RemovableUnits:
    """The units of an architecture that can be removed; made by :func:`removable_units`.

    A unit is one index of an axis group of the network's symmetry: a hidden unit of a linear layer, a channel of a
    convolution with its batch norm, a channel of a whole residual stream. Removing it deletes this index from
    every tensor that the group acts on.

    Attributes:
        sizes: By axis group, how many units it has.
        refused: By axis group, why its units cannot be removed one by one.
    """

    def __init__(self, symmetry: Symmetry, network: nn.Module) -> None:
        modules = dict(network.named_modules())
        self.sizes: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self._places: dict[str, tuple[_Place, ...]] = {}
        self._layout = {name: shape for name, (shape, _) in symmetry.layout.items()}
        self._charts = symmetry.structure.charts
        for group in symmetry.groups:
            places = []
            for occurrence in group.occurrences:
                owner, _, leaf = occurrence.tensor.rpartition(".")
                is_read = leaf == "weight" and _READ.get(type(modules.get(owner))) == occurrence.axis  # type: ignore[arg-type]
                places.append(
                    _Place(occurrence.tensor, occurrence.axis, occurrence.positions, occurrence.is_parameter, is_read)
                )
            self.sizes[group.name], self._places[group.name] = group.size, tuple(places)
            cells = int(group.cells.max()) + 1
            if any(place.tensor in self._charts.stacks for place in places):
                self._refuse(group.name, "elements exchange their modules (trace_symmetry(..., exchange=False))")
            elif not any(place.is_read for place in places):
                self._refuse(group.name, "no linear layer or convolution reads them")
            elif not group.movable or cells > 1:
                self._refuse(group.name, "they belong to heads or groups, which have equally many units each")
            elif group.size < 2:
                self._refuse(group.name, "there is only one")

    def _refuse(self, group: str, reason: str) -> None:
        self.refused[group] = reason
        self.sizes.pop(group, None)

    def _read(self, group: str) -> list[_Place]:
        return [place for place in self._places[group] if place.is_read]

    def restrict(self, groups: Iterable[str]) -> None:
        """Restrict removal to the units of these groups.

        Raises:
            ValueError: If there is no such group, or its units cannot be removed.
        """
        wanted = list(groups)
        for name in wanted:
            self._check_group(name)
            if name not in self.sizes:  # an earlier restriction has left it out
                raise ValueError(unknown("axis group", name, self.sizes))
        self.sizes = {name: size for name, size in self.sizes.items() if name in wanted}

    def _check_group(self, name: str) -> None:
        """Check that the units of an axis group can be removed.

        Raises:
            ValueError: If not; the message says why, and which group can be named in its place.
        """
        if name in self.refused:
            raise ValueError(
                f"The units of {name} cannot be removed one by one: {self.refused[name]}; choose of "
                f"{', '.join(self.sizes)}."
            )
        if name in self._places:
            return
        for group, places in self._places.items():
            if any(place.tensor.rpartition(".")[0] == name and not place.is_read for place in places):
                raise ValueError(
                    f"The units of {name} are tied to those of axis group {group!r}, and are removed with them or not "
                    "at all; name that group."
                )
        raise ValueError(unknown("axis group", name, self.sizes))

    # ---- without some units

    def kept(self, removed: Removed) -> dict[Axis, Tensor]:
        """Return the remaining positions on every axis that becomes shorter, for :func:`narrowed`.

        Raises:
            ValueError: If there is no such unit, its group cannot lose one, or none would remain.
        """
        gone: dict[Axis, list[Tensor]] = {}
        for group, numbers in removed.items():
            self._check_group(group)
            size = len(self._places[group][0].positions)
            if any(not 0 <= number < size for number in numbers):
                raise ValueError(f"Units of {group} are numbers from 0 to {size - 1}, got {list(numbers)[:8]}.")
            if len(set(numbers)) == size:
                raise ValueError(f"At least one of the {size} units of {group} must remain; remove fewer.")
            for place in self._places[group] if len(numbers) else ():
                positions = place.positions[torch.tensor(list(numbers))].flatten()
                gone.setdefault((place.tensor, place.axis), []).append(positions)
        kept = {}
        for (name, axis), parts in gone.items():
            left = torch.ones(self._layout[name][axis], dtype=torch.bool)
            left[torch.cat(parts)] = False
            kept[name, axis] = left.nonzero().flatten()
        return kept

    def without(self, network: nn.Module, removed: Removed) -> nn.Module:
        """Return a smaller network: a copy of a network of the whole architecture without some units."""
        return narrowed(network, self.kept(removed))

    @torch.no_grad()
    def write_back(self, network: nn.Module, small: nn.Module, removed: Removed) -> None:
        """Give a network of the whole architecture the weights of a smaller one, and zeros for removed units.

        Its function is then that of the smaller one. Statistics of removed units do not change.

        Args:
            network: Changed in place.
            small: Result of :meth:`without`, which may have changed since.
            removed: The units that it is without.
        """
        kept, parameters = self.kept(removed), dict(network.named_parameters())
        source = small.state_dict()
        for name, tensor in network.state_dict().items():
            if name in parameters:
                tensor.zero_()
            axes = [kept.get((name, axis), torch.arange(size)) for axis, size in enumerate(tensor.shape)]
            if axes:
                index = torch.meshgrid(*(places.to(tensor.device) for places in axes), indexing="ij")
                tensor[index] = source[name].to(tensor)
            else:
                tensor.copy_(source[name])

    @staticmethod
    def sliced(tensors: Mapping[str, Tensor], kept: Mapping[Axis, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the smaller network, copied from those of the whole one; gradients flow back.

        Args:
            tensors: Parameters and buffers of the whole network, by name.
            kept: Result of :meth:`kept`.
        """
        found = dict(tensors)
        for (name, axis), positions in kept.items():
            found[name] = found[name].index_select(axis, positions.to(found[name].device))
        return {name: tensor.clone() if tensor is tensors[name] else tensor for name, tensor in found.items()}

    # ---- effects of units

    def outgoing(self, network: nn.Module, units: Iterable[Unit]) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """Yield the outgoing weights of units: a parameter, its axis, and the positions on it."""
        parameters = dict(network.named_parameters())
        numbers: dict[str, list[int]] = {}
        for group, number in units:
            numbers.setdefault(group, []).append(number)
        for group, own in numbers.items():
            for place in self._read(group):
                parameter = parameters[place.tensor]
                yield parameter, place.axis, place.positions[torch.tensor(own)].flatten().to(parameter.device)

    def importance(self, network: nn.Module, batches: Batches, removed: Removed | None = None) -> dict[Unit, float]:
        r"""Return the effect of every unit: the standard deviation of its activation times its outgoing norm.

        Effects of a unit with several readers (the pixels of a channel after flattening, the blocks of a residual
        stream) are combined by the root of the sum of squares: to first order in small weights, the standard deviation
        of its contribution to all readers (docs/theory/pruning.md, 2).

        Args:
            network: A network of the whole architecture. It is run in evaluation mode.
            batches: Inputs, or tuples that begin with them. With several processes each brings its share, and all get
                the same numbers.
            removed: Removed units, which do not count.
        """
        variance = self._variances(network, batches, removed or {})
        parameters = dict(network.named_parameters())
        found: dict[Unit, float] = {}
        for group, size in self.sizes.items():
            total = torch.zeros(size, dtype=torch.float64)
            for place in self._read(group):
                squares = _squares(parameters[place.tensor], place.axis)
                total += (variance[place.tensor] * squares)[place.positions].sum(1)
            found |= {(group, number): value for number, value in enumerate(total.sqrt().tolist())}
        return found

    def _variances(self, network: nn.Module, batches: Batches, removed: Removed) -> dict[str, Tensor]:
        """Return the variances of the inputs of layers that read units, by the name of the weight, ``[inputs]``.

        The smaller network is run; inputs that it has not have variance 0.
        """
        small, kept = self.without(network, removed), self.kept(removed)
        names = list(dict.fromkeys(place.tensor for group in self.sizes for place in self._read(group)))
        device = device_of(network)
        sums = {  # how many values, their sum, and that of their squares
            name: torch.zeros(3, small.get_parameter(name).shape[1], dtype=wide(device), device=device)
            for name in names  # inputs are axis 1
        }

        def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def add(module: nn.Module, arguments: tuple[Any, ...]) -> None:
                axis = -1 if isinstance(module, nn.Linear) else 1
                values = arguments[0].detach().movedim(axis, 0).flatten(1).to(sums[name].dtype)
                count = torch.full_like(values[:, 0], values.shape[1])
                sums[name] += torch.stack([count, values.sum(1), values.square().sum(1)])

            return add

        def run() -> None:
            for images in inputs_of(batches):
                run_on(small, images)

        with contextlib.ExitStack() as hooks, torch.no_grad(), evaluating(small):
            for name in names:
                module = small.get_submodule(name.rpartition(".")[0])
                hooks.enter_context(module.register_forward_pre_hook(watch(name)))
            together(run)
        found = {}
        for name in names:
            count, first, second = summed(sums[name]).double().cpu()
            whole = torch.zeros(self._layout[name][1], dtype=torch.float64)
            whole[kept.get((name, 1), slice(None))] = (second / count - (first / count).square()).clamp(min=0)
            if not is_finite(whole):
                raise ValueError(f"the inputs of {name} have no variance; pass finite data and weights, and some data.")
            found[name] = whole
        return found

    def magnitudes(self, network: nn.Module) -> dict[Unit, float]:
        """Return the norm of every unit's incoming parameters times that of its outgoing ones.

        The product is invariant under the scales of a ReLU unit, which move from one factor to the other.
        """
        parameters = charted(dict(network.named_parameters()), self._charts)
        found: dict[Unit, float] = {}
        for group, size in self.sizes.items():
            squares = torch.zeros(2, size, dtype=torch.float64)
            for place in self._places[group]:
                if place.is_parameter:
                    squares[int(place.is_read)] += _squares(parameters[place.tensor], place.axis)[place.positions].sum(
                        1
                    )
            products = squares.prod(0).sqrt().tolist()
            found |= {(group, number): value for number, value in enumerate(products)}
        return found

    # ---- proof

    def check(self, network: nn.Module, example: Any) -> None:
        """Remove one unit with zero outgoing weights from each group; refuse the group if outputs change.

        Args:
            network: A network of the architecture.
            example: Its positional arguments, as tensors with a batch axis.
        """
        generator = torch.Generator().manual_seed(0)
        arguments = tuple(part.double() if part.is_floating_point() else part for part in example)
        # Weights that happen to be 0, and units that no example activates, would hide a mistake.
        for size in _PERTURBATIONS:
            exact = copied(network).double().eval()
            with torch.no_grad():
                for parameter in exact.parameters():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
                    parameter.add_(noise * size * parameter.square().mean().sqrt().clamp(min=1e-3))
            for group in list(self.sizes):
                if reason := self._fault(exact, group, arguments):
                    self._refuse(group, reason)

    @torch.no_grad()
    def _fault(self, network: nn.Module, group: str, arguments: tuple[Tensor, ...]) -> str:
        """Return why units of a group cannot be removed; nothing if they can."""
        for number in (0, self.sizes[group] - 1):
            silent = copied(network)
            for parameter, axis, positions in self.outgoing(silent, [(group, number)]):
                parameter.index_fill_(axis, positions, 0.0)
            try:
                small = self.without(silent, {group: [number]})(*arguments)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                said = " ".join(str(error.__cause__ or error).split())
                return f"without one the network cannot run ({said[:120]})"
            whole = check_rows(silent(*arguments))
            if small.shape != whole.shape or (small - whole).abs().max() > _TOLERANCE * whole.abs().max().clamp(min=1):
                return "without one the outputs change even where nothing reads it, as under a norm over units"
        return ""


def _squares(tensor: Tensor, axis: int) -> Tensor:
    """Return the sum of squares at each position of an axis, on the CPU in float64."""
    values = tensor.detach().cpu().double().movedim(axis, 0)
    return values.reshape(len(values), -1).square().sum(1)


def removable_units(network: nn.Module, example: Any, *, symmetry: Symmetry | None = None) -> RemovableUnits:
    """Find the units of a network that can be removed one by one, from its symmetry.

    Each axis group is tried: a unit with zero outgoing weights is removed from a copy in float64 with random weights,
    and outputs must not change. Other groups are refused, with the reason: units of attention heads, units under a
    layer norm, channels that a shortcut ties to a place.

    Args:
        network: The network. Its weights do not matter.
        example: An input (a tensor of any batch size), or a tuple of positional arguments.
        symmetry: That of the network, if it was traced already.

    Raises:
        ValueError: If no unit can be removed; the message says why.
    """
    arguments = inputs_for(network, example if isinstance(example, tuple) else (example,))
    symmetry = trace_symmetry(network, arguments, exchange=False) if symmetry is None else symmetry
    units = RemovableUnits(symmetry, network)
    units.check(network, arguments)
    if not units.sizes:
        reasons = "; ".join(f"those of {name}: {reason}" for name, reason in list(units.refused.items())[:3])
        raise ValueError(
            f"{architecture_name(network)} has no units that can be removed one by one ({reasons or 'it has no units'})"
            "; expected hidden units of linear layers or channels of convolutions."
        )
    return units
