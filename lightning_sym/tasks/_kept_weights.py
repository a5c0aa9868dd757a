"""The weights of each member that a fit keeps, and their exchange with the current ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_sym._checks import not_finite


def keep_best(task: Any, values: Mapping[str, list[float]]) -> None:
    """Keep the current weights of each member if they are its best; without metrics, of all members."""
    for number in task.population.numbers:
        if number in task.stopped:
            continue
        metrics = {name: row[task.numbers.index(number)] for name, row in values.items()}
        old = task.kept.get(number, {}).get("metrics")
        if metrics and old and task.score(metrics) <= task.score(old):
            continue
        task.kept[number] = {
            "epoch": task.current_epoch,
            "metrics": metrics,
            # On the CPU, as the accelerator's memory is for training; a checkpoint also returns them there.
            "state": {name: value.cpu() for name, value in task.state_to_keep(number).items()},
            "epochs": epochs_trained(task),
        }


def epochs_trained(task: Any) -> float:
    """Return the number of epochs trained so far, with the fraction of the current one."""
    progress = task.trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return float(task.current_epoch + min(1.0, progress / max(1, int(task.trainer.num_training_batches))))


def broken_weights(task: Any) -> list[str]:
    """Return the names of weights that are not finite, except for the current weights of stopped members."""
    found = []
    for number in task.population.numbers:
        current = {} if number in task.stopped else task.population.member_state(number)
        states = {"weights": current, "kept weights": task.kept.get(number, {}).get("state", {})}
        for kind, state in states.items():
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            found += [f"{name}, {kind} of {task.member_title(number)}" for name in not_finite(tensors)]
    return found


class WeightExchange:
    """Replaces the current weights of all members by the kept ones, and back.

    Args:
        task: The task with these members.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self._current: dict[int, dict[str, Tensor]] = {}
        self._evaluating = False

    def swap_in(self) -> None:
        """Give the members their kept weights."""
        population = self._task.population
        self._current = {number: population.member_state(number) for number in self._task.kept}
        for number, record in self._task.kept.items():
            population.set_member_state(number, record["state"])

    def swap_out(self) -> None:
        """Give the members their current weights back."""
        for number, state in self._current.items():
            self._task.population.set_member_state(number, state)
        self._current = {}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the members their kept weights within the block; on every rank. Blocks may be nested."""
        task = self._task
        if self._evaluating:
            yield
            return
        task.to_device(task.trainer.strategy.root_device)
        mode = task.population.training
        self._evaluating = True
        self.swap_in()
        try:
            task.begin_evaluation()
            yield
        finally:
            task.end_evaluation()
            self.swap_out()
            task.population.train(mode)
            self._evaluating = False
