"""Pruning on the Rashomon set: units are removed as long as the loss stays below that of the whole network plus eps."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._distributed import device_of, inputs_for, moved, on_device_of, summed, together, wide
from lightning_sym.landscape.planes import trainable
from lightning_sym.landscape.units import RemovableUnits, Unit, removable_units
from lightning_sym.networks.batch_norm import recalibrate_batch_norm
from lightning_sym.networks.modes import batch_loss, evaluating, for_loss
from lightning_sym.symmetry.tracing.graph.capture import copied

Loss = Callable[[Any, Any], Tensor]
_ROUNDING = 1e-6  # relative, of a mean loss in float32


@dataclass(frozen=True)
class PruningSettings:
    r"""Settings of a pruning.

    Attributes:
        epsilon: By how much the loss on the training data may exceed that of the whole network: the Rashomon set is
            ``{L <= L0 + epsilon}``. In units of the loss, > 0.
        steps: Length of a walk, in optimizer steps, >= 1.
        penalty: Weight of the squared outgoing weights of the units that are tried at the beginning of a walk, > 0.
        penalty_end: The same when the cooldown begins; until then it grows geometrically. >= ``penalty``.
        fraction: Fraction of the remaining units that are tried at once, in ``[0, 1)``; at least one unit. 0 tries
            single units.
        tries: Number of single units that are tried, each with a separate walk, before pruning ends. >= 1.
        cooldown: During which last part of a walk the learning rate falls, linearly to zero, as a fraction in
            ``[0, 1]``: noise of minibatches would count against the units. 0 keeps it constant.

    Raises:
        ValueError: If one is out of range.
    """

    epsilon: float = 0.01
    steps: int = 300
    penalty: float = 1e-3
    penalty_end: float = 7.1
    fraction: float = 0.1
    tries: int = 3
    cooldown: float = 0.5

    def __post_init__(self) -> None:
        check_numbers("> 0", epsilon=self.epsilon, penalty=self.penalty, penalty_end=self.penalty_end)
        check_numbers("in [0, 1)", fraction=self.fraction)
        check_numbers("in [0, 1]", cooldown=self.cooldown)
        check_integers(steps=self.steps, tries=self.tries)
        if self.penalty_end < self.penalty:
            raise ValueError(f"penalty_end must be at least penalty, got {self.penalty_end} and {self.penalty}.")


@dataclass(frozen=True)
class PruningStep:
    """Units that were removed together.

    Attributes:
        units: Axis group and number of each unit that was removed.
        loss: Mean loss on all training data afterwards.
        walks: How many walks there had been by then, those that failed included.
        walked: Whether a walk preceded the removal.
        numbers: Further measurements of the network, by name.
    """

    units: tuple[Unit, ...]
    loss: float
    walks: int
    walked: bool
    numbers: dict[str, float] = field(default_factory=dict)


class Pruning:
    r"""Prune one network step by step; the caller runs the optimizer.

    Tensors keep their size during pruning, with zeros for removed units, so that optimizers and processes need no
    change. The measured and returned networks are smaller, ``units.sliced(tensors, units.kept(pruning.removed))``. The
    caller runs the walks::

        pruning.start(network)
        while not pruning.finished:
            while not pruning.due:
                ...gradients of the loss on a batch; learning rate times pruning.rate...
                pruning.add_gradients(network)
                ...a step of the optimizer...
            pruning.decide(network)

    An attempt takes the units with the least effect (:meth:`RemovableUnits.importance`), walks for some steps downhill
    on :math:`L + \mu_s \sum \|\text{outgoing weights}\|^2` with a growing :math:`\mu_s`, and removes them: all of them
    if the loss on all training data is then at most the threshold, otherwise half of them, and so on. If not even one
    can be removed, the network is restored to its state before the walk. Units are removed without a walk if the loss
    stays at or below that of the whole network, or does not rise. When no more units can be removed, a walk without a
    penalty follows. Pruning continues from its end if its loss is lower, until no more units can be removed again.

    In the last part of each walk the learning rate falls (:attr:`rate`), so that minibatches' noise does not count
    against the units. Each failed attempt on a single unit doubles its importance, so that others are tried first.

    Args:
        units: Units of the architecture.
        settings: How it is pruned.
        evaluate: Recomputes batch norm statistics, in place, and returns the mean loss on all training data.
        batches: Returns the inputs for measuring activations.
        describe: Further measurements of the network after each step, without effect on pruning.

    Attributes:
        reference: Mean loss of the whole network.
        threshold: The same plus epsilon: fixed, however low the loss has become since.
        removed: By axis group, the numbers of removed units, in order.
        history: Removed units, step by step; first the whole network.
        kept: Weights of the whole size after the last step that was accepted.
        finished: Whether nothing more can go.

    References:
        The loop is that of "Finding the Rashomon manifold" (SERI MATS sprint, 2022); docs/theory/pruning.md, 2.
    """

    def __init__(
        self,
        units: RemovableUnits,
        settings: PruningSettings,
        *,
        evaluate: Callable[[nn.Module], float],
        batches: Callable[[], Iterable[Any]],
        describe: Callable[[nn.Module], dict[str, float]] | None = None,
    ) -> None:
        self.units = units
        self.settings = settings
        self._evaluate = evaluate
        self._batches = batches
        self._describe = describe
        self.reference = self.threshold = math.nan
        self.removed: dict[str, list[int]] = {name: [] for name in units.sizes}
        self.history: list[PruningStep] = []
        self.kept: dict[str, Tensor] = {}
        self.finished = False
        self.walks = 0
        self._tried: list[Unit] = []
        self._walked = 0
        self._most = units_in(units.sizes)  # how many may be tried at once
        self._failures: dict[Unit, int] = {}  # how often a unit was tried alone, in vain
        self._vain: list[Unit] = []  # those that were since something was accepted
        self._rested = 0  # how many units were left at the last walk without a penalty
        self._importance: dict[Unit, float] | None = None  # of the weights that are kept

    # ---- remaining units

    @property
    def widths(self) -> dict[str, int]:
        """Number of remaining units in each axis group."""
        return {name: size - len(self.removed[name]) for name, size in self.units.sizes.items()}

    def small(self, network: nn.Module) -> nn.Module:
        """Return the network without the removed units."""
        return self.units.without(network, self.removed)

    @property
    def due(self) -> bool:
        """Whether the walk has ended, and :meth:`decide` is to be called."""
        return not self.finished and self._walked >= self.settings.steps

    @property
    def rate(self) -> float:
        """Learning rate of the walk's next step, as a fraction of that at its beginning, in ``(0, 1]``."""
        left = 1 - self._walked / self.settings.steps
        return min(1.0, left / self.settings.cooldown) if self.settings.cooldown and left > 0 else 1.0

    # ---- the loop

    def start(self, network: nn.Module) -> None:
        """Measure the whole network, remove units that need no walk, and choose the first trial."""
        whole = self.small(network)
        self.reference = self._evaluate(whole)
        if not math.isfinite(self.reference):
            raise ValueError("The loss of the network that is to be pruned is not finite; check its weights and data.")
        self.threshold = self.reference + self.settings.epsilon
        self._accept(network, whole, (), self.reference, walked=False)
        self._remove_at_once(network)
        self._choose(network)

    @torch.no_grad()
    def add_gradients(self, network: nn.Module) -> None:
        """Add the gradient of the penalty; once for each optimizer step."""
        settings = self.settings
        # It is complete when the learning rate begins to fall: the rest of the walk settles.
        rising = max(1.0, settings.steps * (1 - settings.cooldown))
        growth = (settings.penalty_end / settings.penalty) ** min(1.0, self._walked / rising)
        for parameter, axis, positions in self.units.outgoing(network, self._tried):
            if parameter.grad is not None:
                own = parameter.index_select(axis, positions)
                parameter.grad.index_add_(axis, positions, own, alpha=2 * settings.penalty * growth)
        self._walked += 1

    def decide(self, network: nn.Module) -> None:
        """Remove the units of the trial, or restore everything; then choose the next trial."""
        self.walks += 1
        if not self._tried:
            self._rest(network)
            return
        count = self._remove_most(network, self._tried, self.threshold, walked=True)
        if count:
            self._vain, self._most = [], count if count < len(self._tried) else 2 * count
            self._remove_at_once(network)
        else:
            self._put_back(network)
        self._choose(network)

    def _put_back(self, network: nn.Module) -> None:
        """Restore the network after a walk that did not free even one unit."""
        network.load_state_dict(self.kept)
        self._most = max(1, len(self._tried) // 4)
        if len(self._tried) == 1:
            (unit,) = self._tried
            self._failures[unit] = self._failures.get(unit, 0) + 1
            self._vain.append(unit)

    def _choose(self, network: nn.Module) -> None:
        """Choose the units that are tried next: those that do the least; none for a walk without a penalty."""
        left = [unit for unit in self._least(network) if unit not in self._vain]
        self._tried = left[: self._at_once()] if len(self._vain) < self.settings.tries else []
        self._walked = 0
        self.finished = not self._tried and self._rested == units_in(self.widths)

    def _at_once(self) -> int:
        """Return the number of units per trial."""
        return max(1, min(self._most, int(self.settings.fraction * units_in(self.widths))))

    def _rest(self, network: nn.Module) -> None:
        """Keep the result of a walk without a penalty if it went down: more units may be removable there."""
        small = self.small(network)
        loss = self._evaluate(small)
        self._rested = units_in(self.widths)
        if loss <= self.history[-1].loss:
            self._accept(network, small, (), loss, walked=True)
            self._vain = []
            self._choose(network)
        else:
            network.load_state_dict(self.kept)
            self.finished = True

    def _least(self, network: nn.Module) -> list[Unit]:
        """Return the units that may be tried, those that do the least first; one of every group stays."""
        importance = self._measured_importance(network)
        order = {name: place for place, name in enumerate(self.units.sizes)}
        # A failed unit is likely to fail again: each failure doubles its score.
        counts = {unit: value * 2 ** self._failures.get(unit, 0) for unit, value in importance.items()}
        left = self.widths
        chosen = []
        for name, number in sorted(counts, key=lambda unit: (counts[unit], order[unit[0]], unit[1])):
            if left[name] > 1 and number not in self.removed[name]:
                left[name] -= 1
                chosen.append((name, number))
        return chosen

    def _measured_importance(self, network: nn.Module) -> dict[Unit, float]:
        if self._importance is None:
            self._importance = self.units.importance(network, self._batches(), self.removed)
        return self._importance

    def _remove_at_once(self, network: nn.Module) -> None:
        """Remove units that need no walk: the loss stays at most the current one, or that of the whole network.

        First those that do nothing at all, then as many as may be tried at once, as long as all of them can go.
        """
        importance = self._measured_importance(network)
        dead = len([unit for unit in self._least(network) if importance[unit] == 0.0])
        for count, again in ((dead, False), (self._at_once(), True)):
            while count and (candidates := self._least(network)[:count]):
                # Sums of other lengths are rounded otherwise: without this, units that do nothing might stay.
                highest = min(max(self.reference, self.history[-1].loss) * (1 + _ROUNDING), self.threshold)
                if not self._remove_most(network, candidates, highest, walked=False, fewer=False) or not again:
                    break
                count = self._at_once()

    def _remove_most(
        self, network: nn.Module, candidates: list[Unit], highest: float, *, walked: bool, fewer: bool = True
    ) -> int:
        """Remove all candidates, or else the first half, a quarter, ... if fewer will do; return how many."""
        count = len(candidates)
        while count:
            removed = {name: [*numbers] for name, numbers in self.removed.items()}
            for name, number in candidates[:count]:
                removed[name].append(number)
            small = self.units.without(network, removed)
            loss = self._evaluate(small)
            if loss <= highest:  # not so if it is NaN
                self.removed = removed
                self._accept(network, small, tuple(candidates[:count]), loss, walked=walked)
                return count
            count = count // 2 if fewer else 0
        return 0

    def _accept(
        self, network: nn.Module, small: nn.Module, units: tuple[Unit, ...], loss: float, *, walked: bool
    ) -> None:
        self.units.write_back(network, small, self.removed)
        self.kept = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
        self._importance = None
        numbers = {} if self._describe is None else self._describe(small)
        self.history.append(PruningStep(units, loss, self.walks, walked, numbers))

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors; the weights of the walk are the network's."""
        names = ("reference", "threshold", "removed", "kept", "finished", "walks", "_tried", "_walked", "_most")
        plain = {name: getattr(self, name) for name in (*names, "_failures", "_vain", "_rested")}
        return {**plain, "history": [vars(step) for step in self.history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._importance = None
        for name, value in state.items():
            setattr(self, name, [PruningStep(**step) for step in value] if name == "history" else value)


class MagnitudePruning:
    """Pruning by magnitude, along with another one: as many units of each group, those of the smallest weights.

    Args:
        units: Units of the architecture.

    Attributes:
        removed: By axis group, the numbers of removed units, in order.
    """

    def __init__(self, units: RemovableUnits) -> None:
        self.units = units
        self.removed: dict[str, list[int]] = {name: [] for name in units.sizes}

    def follow(self, network: nn.Module, counts: Mapping[str, int]) -> None:
        """Remove units, in place, until each group has lost a given number.

        Args:
            network: A network of the whole architecture.
            counts: By axis group, the number of units to remove in total.
        """
        magnitude = self.units.magnitudes(network)
        for name, count in counts.items():
            left = [(name, n) for n in range(self.units.sizes[name]) if n not in self.removed[name]]
            smallest = sorted(left, key=lambda unit: (magnitude[unit], unit[1]))
            self.removed[name] += [number for _, number in smallest[: count - len(self.removed[name])]]
        self.units.write_back(network, self.small(network), self.removed)

    def small(self, network: nn.Module) -> nn.Module:
        """Return the network without the removed units."""
        return self.units.without(network, self.removed)


def units_in(widths: Mapping[str, int]) -> int:
    """Return the total number of units."""
    return sum(widths.values())


def mean_loss(network: nn.Module, batches: Iterable[Any], loss: Loss) -> tuple[float, float | None]:
    """Return the mean loss in evaluation mode, exact over batches and processes, and the error of a classifier.

    Args:
        network: The network.
        batches: Inputs and targets; with several processes each brings its share, and all get the same numbers.
        loss: Mean loss of a batch, given outputs and targets.

    Returns:
        The loss, and the classification error in ``[0, 1]``; None unless targets are labels of outputs ``[B, K]``.

    Raises:
        ValueError: If there are no samples.
    """
    device = device_of(network)
    sums = torch.zeros(4, dtype=wide(device), device=device)  # samples, loss, wrong, labelled

    def run() -> None:
        for inputs, targets in batches:
            given, wanted = inputs_for(network, inputs), moved(targets, device)
            (outputs, wanted), size = for_loss((network(given), wanted)), len(given)
            sums[0] += size
            sums[1] += batch_loss(loss, outputs, wanted).to(sums.dtype) * size
            if wanted.ndim == 1 and not wanted.is_floating_point() and outputs.ndim == 2:
                sums[2] += (outputs.argmax(1) != wanted).sum()
                sums[3] += size

    with torch.no_grad(), evaluating(network):
        together(run)
    samples, total, wrong, labelled = summed(sums).tolist()
    if not samples:
        raise ValueError("There are no samples to evaluate the network on; expected at least one batch.")
    return total / samples, wrong / labelled if labelled == samples else None


@dataclass(frozen=True)
class PrunedNetwork:
    """The result of :func:`rashomon_pruning`.

    Attributes:
        network: The smaller network, in evaluation mode.
        loss: Its mean loss on the training data, at most ``threshold``.
        threshold: Loss of the whole network plus epsilon.
        widths: Number of remaining units in each axis group.
        history: Removed units, step by step.
    """

    network: nn.Module
    loss: float
    threshold: float
    widths: dict[str, int]
    history: list[PruningStep]


def rashomon_pruning(
    network: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    settings: PruningSettings | None = None,
    loss: Loss = F.cross_entropy,
    learning_rate: float = 3e-3,
    describe: Callable[[nn.Module], dict[str, float]] | None = None,
) -> PrunedNetwork:
    """Prune a network as long as its loss stays below a threshold, with walks on all data at once (Adam).

    For data that fit into one batch; :class:`lightning_sym.tasks.RashomonPruning` takes batches, processes and zoos.

    Args:
        network: Any network with removable units, see :func:`removable_units`. Not changed.
        inputs: Training data. Shape ``[N, ...]``.
        targets: Their targets, as the loss takes them.
        settings: How it is pruned.
        loss: Mean loss, given outputs and targets.
        learning_rate: Learning rate of Adam, which is reset for each walk. > 0.
        describe: Further measurements of the network after each step, without effect on pruning.

    Raises:
        ValueError: If no unit can be removed, or the loss of the network is not finite.
        RuntimeError: If the pruned network is above its threshold, which cannot be.
    """
    settings = settings or PruningSettings()
    check_numbers("> 0", learning_rate=learning_rate)
    inputs, targets = inputs_for(network, inputs), on_device_of(network, for_loss(targets))
    data = [(inputs, targets)]

    def evaluate(candidate: nn.Module) -> float:
        recalibrate_batch_norm(candidate, data)
        return mean_loss(candidate, data, loss)[0]

    walker = copied(network)
    units = removable_units(walker, inputs[:2])
    pruning = Pruning(units, settings, evaluate=evaluate, batches=lambda: data, describe=describe)
    pruning.start(walker)
    while not pruning.finished:
        optimizer = torch.optim.Adam(trainable(walker).values(), learning_rate)
        small, kept = pruning.small(walker).train(), units.kept(pruning.removed)
        whole = {**dict(walker.named_parameters()), **dict(walker.named_buffers())}
        while not pruning.due:
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = learning_rate * pruning.rate
            value = batch_loss(loss, functional_call(small, units.sliced(whole, kept), (inputs,)), targets)
            value.backward()  # type: ignore[no-untyped-call]
            pruning.add_gradients(walker)
            optimizer.step()
        pruning.decide(walker)
    found = pruning.small(walker).eval()
    check_below(mean_loss(found, data, loss)[0], pruning.threshold)
    return PrunedNetwork(found, pruning.history[-1].loss, pruning.threshold, pruning.widths, pruning.history)


def check_below(loss: float, threshold: float) -> None:
    """Raise ``RuntimeError`` if a network that was pruned is not below its threshold."""
    if not loss <= threshold:
        raise RuntimeError(
            f"The pruned network has the loss {loss!r}, above its threshold {threshold!r}, although it was below when "
            "it was accepted; use training data and a network that give the same numbers every time."
        )
