"""Fine-tuning the members of a zoo on several tasks."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sym._checks import check_different
from lightning_sym.networks import Network, NetworkOrModule
from lightning_sym.symmetry import Symmetry, trace_symmetry
from lightning_sym.tasks._members import example_input
from lightning_sym.tasks.metrics import PopulationLoss
from lightning_sym.tasks.zoo import ZooTask


class FineTuneTask(ZooTask):
    r"""Fine-tune the members of a zoo, the parents, on several tasks.

    With ``T`` tasks, member ``n`` starts from parent ``n // T`` and is trained on task ``n % T``, in its own order of
    the training data. The inputs and targets of a task are those of the datamodule, changed by :meth:`task_batch`,
    which a subclass may override: by default, images are rotated by quarter turns. Every member is evaluated on its own
    task. Otherwise this is a :class:`lightning_sym.tasks.ZooTask`.

    Args:
        network: Architecture of the zoo.
        zoo: Folder of the zoo.
        tasks: Different tasks, at least one: numbers of quarter turns, counterclockwise.
        members: Number of fine-tuned networks, >= 1. ``T`` times the number of parents trains all tasks of each.
        seed: Number of the first fine-tuned network. >= 0.
        execution: As for ``ZooTask``.
        optimizer: Makes the optimizer from parameters; default Adam.
        keep: Keep the weights of the ``"best"`` or of the ``"last"`` epoch.
        loss: As for ``ZooTask``.
        allow: Your own packages that define networks of the zoo, see ``ModelZoo.open``.

    Attributes:
        tasks: As given.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        network: NetworkOrModule,
        zoo: str,
        tasks: Sequence[int] = (1, 2, 3),
        members: int = 3,
        seed: int = 0,
        execution: Literal["loop", "vmap"] = "loop",
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        keep: Literal["best", "last"] = "last",
        loss: Callable[[Any, Any], Any] | None = None,
        allow: Sequence[str] | None = None,
    ) -> None:
        check_different("tasks", tasks, of="tasks")
        self.tasks = list(tasks)
        self.zoo = str(zoo)
        super().__init__(
            network,
            members=members,
            seed=seed,
            execution=execution,
            optimizer=optimizer,
            keep=keep,
            loss=loss,
            initial=self.zoo,
            allow=allow,
        )

    def task_batch(self, task: Any, inputs: Tensor, targets: Any) -> tuple[Tensor, Any]:
        """Change a batch of the datamodule to a batch of a task.

        Args:
            task: One of ``tasks``.
            inputs: Shape ``[B, ...]``.
            targets: Shape ``[B, ...]``.

        Returns:
            Inputs and targets of the same shapes.

        Raises:
            ValueError: If inputs are no square images.
        """
        if inputs.ndim < 3 or inputs.shape[-1] != inputs.shape[-2]:
            raise ValueError(
                f"The tasks of {type(self).__name__} are quarter turns of square images, got inputs of shape "
                f"{list(inputs.shape[1:])}; override task_batch for other tasks."
            )
        return torch.rot90(inputs, task, (-2, -1)), targets

    def task_of(self, number: int) -> Any:
        """Return the task of a member."""
        return self.tasks[number % len(self.tasks)]

    def parent_of(self, number: int) -> int:
        """Return the index of a member's parent in the zoo."""
        return number // len(self.tasks)

    def parent(self, number: int) -> Network:
        """Load a parent, in evaluation mode.

        Args:
            number: Its index in the zoo.
        """
        return self._open_initial().load(number)

    @cached_property
    def symmetry(self) -> Symmetry:
        """The symmetry of the networks."""
        number = self.parent_of(self.seed)
        zoo, first = self._open_initial(), self.parent(number)
        example = example_input(zoo, number, first, getattr(self._trainer, "datamodule", None))
        return trace_symmetry(first, example, nullity=False)

    def identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the run that loads it must share."""
        return {**super().identity(), "tasks": self.tasks}

    def training_batch(self, batch: Any, batch_idx: int) -> tuple[Tensor, Any]:
        """Give each member a batch of its task."""
        inputs, targets = super().training_batch(batch, batch_idx)
        pairs = zip(self.population.numbers, inputs, targets, strict=True)
        changed = [self.task_batch(self.task_of(number), *pair) for number, *pair in pairs]
        return torch.stack([own for own, _ in changed]), torch.stack([own for _, own in changed])

    def add_evaluation(self, metric: PopulationLoss, inputs: Tensor, targets: Any) -> None:
        """Add one batch to a metric, for each running member in the form of its task."""
        numbers, stopped = self.population.numbers, frozenset(self.stopped)
        for task in self.tasks:
            others = frozenset(number for number in numbers if self.task_of(number) != task) | stopped
            if others >= set(numbers):
                continue
            own_inputs, own_targets = self.task_batch(task, inputs, targets)
            running = [index for index, number in enumerate(numbers) if number not in others]
            outputs = self.population(own_inputs, skip=others)
            metric.update(self.rows(inputs.device)[running], outputs, own_targets)
