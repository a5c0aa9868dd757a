"""Members that are trained no further: found without waiting for the device, recorded, and reported once."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Steps between two looks on an accelerator, where a look waits until the device has caught up.
STEPS_BETWEEN_LOOKS = 50


class Divergence:
    """Notes which losses are not finite without waiting for the device, and says later when that began."""

    def __init__(self) -> None:
        self._alive: Tensor | None = None  # [n], bool
        self._first: Tensor | None = None  # [n], int64: the number of the note that found it, or -1
        self._notes: list[tuple[int, int]] = []  # since the last look: epoch and step

    def note(self, finite: Tensor, out: Iterable[int], epoch: int, step: int) -> Tensor:
        """Note one step.

        Args:
            finite: Which losses are finite. Shape ``[n]``, bool.
            out: Indices of networks that are not trained, or not any more.
            epoch: The current one.
            step: The current one.

        Returns:
            Whether each network continues: it is neither out, nor not finite at this step or since the last look. Shape
            ``[n]``, bool, on the device of ``finite``.
        """
        if self._alive is None or self._first is None:
            self._alive = torch.ones_like(finite)
            if out := list(out):
                self._alive[out] = False
            self._first = torch.full_like(finite, -1, dtype=torch.int64)
        self._first = torch.where(self._alive & ~finite, len(self._notes), self._first)
        self._alive = self._alive & finite
        self._notes.append((epoch, step))
        return self._alive

    @property
    def due(self) -> bool:
        """Whether to look now: after every step on a CPU, which does not wait, and else after so many."""
        return self._alive is not None and (self._alive.device.type == "cpu" or len(self._notes) >= STEPS_BETWEEN_LOOKS)

    def look(self) -> dict[int, tuple[int, int]]:
        """Return the first epoch and step with a loss that is not finite since the last look, by index; may wait."""
        first = [] if self._first is None else self._first.tolist()
        found = {index: self._notes[number] for index, number in enumerate(first) if number >= 0}
        self.forget()
        return found

    def forget(self) -> None:
        """Drop the records since the last look."""
        self._alive = self._first = None
        self._notes = []


class Stopping:
    """Stops members of one rank after losses that are not finite.

    Args:
        task: The task with these members.

    Attributes:
        records: Epoch, step and reason of every stopped member, by number.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self._divergence = Divergence()
        self.records: dict[int, dict[str, Any]] = {}

    def restart(self, records: dict[int, dict[str, Any]]) -> None:
        """Start again with the given records."""
        self._divergence.forget()
        self.records = records

    def without_diverged(self, losses: Tensor, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
        """Zero the losses and gradients of diverged members; also return a mask of the running ones, ``[m]``, bool."""
        task = self._task
        finite = torch.isfinite(losses)
        if task.trainer.world_size > 1 and not task.member_parallel:
            # All ranks hold all members: a loss that is not finite on one rank counts on all, or weights would differ.
            finite = task.trainer.strategy.reduce(finite.float(), reduce_op="sum") == task.trainer.world_size
        skipped = task.skipped
        out = [index for index, number in enumerate(task.population.numbers) if number in skipped]
        alive = self._divergence.note(finite, out, task.current_epoch, task.global_step)
        if self._divergence.due and not self.settle():
            return losses, gradients, alive  # zeros already where members were skipped
        return losses.masked_fill(~alive, 0.0), task.population.without(gradients, alive), alive

    def settle(self) -> bool:
        """Stop the members that have diverged since the last look; return whether there are any."""
        found = self._divergence.look()
        for index, (epoch, step) in found.items():
            self._task.stop(self._task.population.numbers[index], "its training loss is not finite", epoch, step)
        return bool(found)

    def stop(self, number: int, reason: str, epoch: int | None = None, step: int | None = None) -> None:
        """Record that a member is stopped, and warn; arguments as for :meth:`PopulationTask.stop`."""
        task = self._task
        epoch = task.current_epoch if epoch is None else epoch
        step = task.global_step if step is None else step
        self.records[number] = {"epoch": epoch, "step": step, "reason": reason}
        if task.member_parallel or task.trainer.is_global_zero:  # one rank that holds the member warns
            warnings.warn(
                f"{task.member_title(number)} was stopped in epoch {epoch}, step {step}: {reason}. The others go on.",
                stacklevel=3,
            )
