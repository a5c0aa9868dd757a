"""Records of diverged networks, kept on the device at every step and read at intervals."""

from collections.abc import Iterable

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
