"""Classification metrics of a whole population, exact over processes."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric


class PopulationClassification(Metric):
    """Accuracy and mean cross-entropy of every member, and the confusion matrix over members.

    All states are sums, so results do not depend on how the data are cut into batches or over ranks. A rank
    that holds some of the members only adds to their rows.

    Args:
        members: Number of members of the whole population, ``M``.
        num_classes: ``K``; None leaves the confusion matrix out.
    """

    full_state_update = False
    higher_is_better = None
    is_differentiable = False

    correct: Tensor
    loss_sum: Tensor
    count: Tensor
    confusion: Tensor

    def __init__(self, members: int, num_classes: int | None = None) -> None:
        super().__init__()
        self.add_state("correct", torch.zeros(members, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("loss_sum", torch.zeros(members, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(members, dtype=torch.int64), dist_reduce_fx="sum")
        self.num_classes = num_classes
        if num_classes is not None:
            zeros = torch.zeros(num_classes, num_classes, dtype=torch.int64)
            self.add_state("confusion", zeros, dist_reduce_fx="sum")

    def update(self, rows: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add one batch that all the given members saw.

        Args:
            rows: Which members the logits are of. Shape ``[m]``, int64.
            logits: Shape ``[m, B, K]``.
            labels: Shape ``[B]``, int64.
        """
        members, size, classes = logits.shape
        predicted = logits.argmax(2)
        repeated = labels.expand(members, size)
        losses = F.cross_entropy(logits.flatten(0, 1).double(), repeated.reshape(-1), reduction="none")
        self.correct[rows] += (predicted == repeated).sum(1)
        self.loss_sum[rows] += losses.view(members, size).sum(1)
        self.count[rows] += size
        if self.num_classes is not None:
            cells = (repeated * classes + predicted).flatten()
            self.confusion += torch.bincount(cells, minlength=classes * classes).view(classes, classes)

    def add(self, rows: Tensor, correct: Tensor, losses: Tensor, size: int | Tensor) -> None:
        """Add sums that are known already, without the checks of :meth:`update`.

        Args:
            rows: Which members. Shape ``[m]``, int64.
            correct: Correctly classified images. Shape ``[m]``.
            losses: Mean loss of each member's batch. Shape ``[m]``.
            size: Images per member; a number, or shape ``[m]``, int64.
        """
        self._update_count += 1
        self._computed = None
        self.correct[rows] += correct
        self.loss_sum[rows] += losses.double() * size
        self.count[rows] += size

    def compute(self) -> dict[str, Tensor]:
        """Return ``accuracy`` and ``loss``, shape ``[M]``, NaN for members that saw nothing; ``confusion``.

        ``confusion[i, j]`` is the fraction of images of class ``i`` that are taken for class ``j``, averaged over
        members. Rows of classes that did not occur are 0.
        """
        count = self.count.double()
        result = {"accuracy": self.correct.double() / count, "loss": self.loss_sum / count}
        if self.num_classes is not None:
            rows = self.confusion.sum(1, keepdim=True).clamp(min=1)
            result["confusion"] = self.confusion.double() / rows
        return result

    def values(self) -> dict[str, Tensor]:
        """Return what :meth:`compute` does, on the CPU; torchmetrics drops the axis of a single member there."""
        computed: dict[str, Tensor] = {name: value.cpu() for name, value in self.compute().items()}
        for name in ("accuracy", "loss"):
            computed[name] = computed[name].reshape(-1)
        return computed
