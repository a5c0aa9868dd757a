"""Metrics of a whole population, exact over processes."""

from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from lightning_sym.networks.modes import batch_loss
from lightning_sym.population import Loss


class PopulationLoss(Metric):
    """Mean loss of every member.

    All states are sums, so results do not depend on how the data are cut into batches or over ranks, for a loss that
    is a mean over samples with equal weights (no class weights, no ignored labels). A rank that holds some of the
    members only adds to their rows.

    Args:
        members: Number of members of the whole population, ``M``.
        loss: A member's mean loss of a batch, given its outputs and its targets; for :meth:`update`.

    Attributes:
        sums: Names of the states that a checkpoint holds.
    """

    full_state_update = False
    sums: tuple[str, ...] = ("loss_sum", "count")

    loss_sum: Tensor
    count: Tensor

    def __init__(self, members: int, loss: Loss | None = None) -> None:
        super().__init__()
        self._loss = (loss,)  # in a tuple: no part of the metric's state
        self.add_state("loss_sum", torch.zeros(members, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(members, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, rows: Tensor, outputs: Any, targets: Any) -> None:
        """Add one batch that all the given members saw.

        Args:
            rows: Which members the outputs are of. Shape ``[m]``, int64.
            outputs: With a leading member axis, ``[m, B, ...]``.
            targets: Without, ``[B, ...]``.
        """
        (loss,) = self._loss
        assert loss is not None
        size = len(tree_leaves(outputs)[0][0])
        losses = [batch_loss(loss, tree_map(lambda tensor, i=i: tensor[i], outputs), targets) for i in range(len(rows))]
        _add(self.loss_sum, rows, torch.stack(losses).double() * size)
        _add(self.count, rows, size)

    def add_step(self, rows: Tensor, losses: Tensor, sizes: int | Tensor, outputs: Any, targets: Any) -> None:
        """Add the losses of a training step, without the checks of :meth:`update`.

        Args:
            rows: Which members. Shape ``[m]``, int64.
            losses: Mean loss of each member's batch. Shape ``[m]``.
            sizes: Images per member; 0 leaves a member out. Shape ``[m]``, int64.
            outputs: With a leading member axis; None if no member was run.
            targets: With or without a member axis.
        """
        self._update_count += 1
        self._computed = None
        _add(self.loss_sum, rows, losses.double() * sizes)
        _add(self.count, rows, sizes)

    def compute(self) -> dict[str, Tensor]:
        """Return ``loss``, shape ``[M]``, NaN for members that saw nothing."""
        return {"loss": self.loss_sum / self.count.double()}

    def values(self) -> dict[str, Tensor]:
        """Compute the values on the CPU; unlike :meth:`compute`, keep the axis of a single member."""
        self._update_count = self._update_count or 1  # prevents the warning about no data, which NaN reports
        computed: dict[str, Tensor] = {name: value.cpu() for name, value in self.compute().items()}
        return {name: value.reshape(-1) if value.dim() < 2 else value for name, value in computed.items()}

    def totals(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the sums over all ranks, for a checkpoint; to be called on every rank."""
        # On the device of the process group: after a fit Lightning has moved the module to the CPU.
        device = trainer.strategy.root_device
        totals = {name: getattr(self, name).clone().to(device) for name in self.sums}
        if trainer.world_size > 1:
            totals = {name: trainer.strategy.reduce(total, reduce_op="sum") for name, total in totals.items()}
        return totals

    def set_totals(self, totals: dict[str, Tensor]) -> None:
        """Begin with sums of a checkpoint."""
        for name, value in totals.items():
            setattr(self, name, value.to(self.device))


def _add(total: Tensor, rows: Tensor, values: Tensor | int) -> None:
    """Add values to rows that are all different: an eighth of the time of ``total[rows] += values``."""
    values = values.to(total.dtype) if isinstance(values, Tensor) else total.new_full((), values)
    total.index_add_(0, rows, values.expand(len(rows)))


_LARGEST_CONFUSION = 1000  # classes; 8 MB, and more than a picture shows


class PopulationClassification(PopulationLoss):
    """Accuracy and mean cross-entropy of every member, and the confusion matrix over members.

    Args:
        members: Number of members of the whole population, ``M``.
        num_classes: ``K``; None leaves the confusion matrix out, as more than 1000 classes do.
    """

    sums = ("correct", "loss_sum", "count")

    correct: Tensor
    confusion: Tensor

    def __init__(self, members: int, num_classes: int | None = None) -> None:
        super().__init__(members)
        self.add_state("correct", torch.zeros(members, dtype=torch.int64), dist_reduce_fx="sum")
        self.num_classes = num_classes if num_classes is not None and num_classes <= _LARGEST_CONFUSION else None
        if self.num_classes is not None:
            zeros = torch.zeros(self.num_classes, self.num_classes + 1, dtype=torch.int64)  # last: outputs beyond K
            self.add_state("confusion", zeros, dist_reduce_fx="sum")

    def update(self, rows: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch that all the given members saw.

        Args:
            rows: Which members the logits are of. Shape ``[m]``, int64.
            outputs: Logits. Shape ``[m, B, K]``.
            targets: Labels. Shape ``[B]``, int64.

        Raises:
            ValueError: If outputs are no logits, or there is none for a label.
        """
        if not isinstance(outputs, Tensor) or outputs.ndim != 3:
            got = f"shape {list(outputs.shape[1:])}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            raise ValueError(f"The cross-entropy takes logits of shape [B, K], and the network returns {got}.")
        members, size, classes = outputs.shape
        if size and (largest := int(targets.max())) >= classes:
            raise ValueError(
                f"The network has {classes} outputs, and the data have class number {largest}; give the network "
                f"{largest + 1} outputs, or number the classes from 0."
            )
        predicted = outputs.argmax(2)
        repeated = targets.expand(members, size)
        losses = F.cross_entropy(outputs.flatten(0, 1).double(), repeated.reshape(-1), reduction="none")
        _add(self.correct, rows, (predicted == repeated).sum(1))
        _add(self.loss_sum, rows, losses.view(members, size).sum(1))
        _add(self.count, rows, size)
        if self.num_classes is not None:
            known = self.num_classes
            cells = (repeated * (known + 1) + predicted.clamp(max=known)).flatten()
            self.confusion += torch.bincount(cells, minlength=known * (known + 1)).view(known, known + 1)

    def add_step(self, rows: Tensor, losses: Tensor, sizes: int | Tensor, outputs: Any, targets: Any) -> None:
        """Add the results of a training step; targets may also be probabilities of classes."""
        super().add_step(rows, losses, sizes, outputs, targets)
        if outputs is not None:
            labels = targets.argmax(-1) if targets.is_floating_point() else targets
            _add(self.correct, rows, (outputs.argmax(-1) == labels).sum(1) * (sizes > 0))

    def compute(self) -> dict[str, Tensor]:
        """Return ``accuracy`` and ``loss``, shape ``[M]``, NaN for members that saw nothing; ``confusion``.

        ``confusion[i, j]`` is the fraction of images of class ``i`` that are taken for class ``j``, averaged over
        members. Rows of classes that did not occur are 0, others sum to 1 less the outputs beyond the classes.
        """
        result = {"accuracy": self.correct.double() / self.count.double(), **super().compute()}
        if self.num_classes is not None:
            rows = self.confusion.sum(1, keepdim=True).clamp(min=1)
            result["confusion"] = self.confusion[:, :-1].double() / rows
        return result
