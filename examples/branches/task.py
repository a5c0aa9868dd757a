"""From when on does the order of the data not matter? Frankle et al. (2020)."""

from collections.abc import Sequence
from typing import Any

from lightning_sym.networks import Network
from lightning_sym.tasks import ZooTask


class BranchTask(ZooTask):
    """A network, member 0, and copies that see its batches for some epochs.

    Args:
        network: Architecture of all.
        leave: After how many epochs each copy leaves.
        seed: Of the weights that all begin with.
        **settings: As for ``ZooTask``.
    """

    def __init__(
        self,
        network: Network,
        leave: Sequence[int] = (0, 1, 2, 4, 8),
        seed: int = 0,
        **settings: Any,
    ):
        size = 1 + len(leave)
        super().__init__(network, members=size, seed=seed, keep="last", **settings)
        self.leave = tuple(leave)

    def make_member(self, number):
        return super().make_member(self.seed)  # the same weights for all

    def training_batch(self, batch, batch_idx):
        images, labels = batch  # [M, B, ...] and [M, B]: a row for each member
        together = [self.current_epoch < epoch for epoch in (0, *self.leave)]
        rows = [0 if still else row for row, still in enumerate(together)]
        return images[rows], labels[rows]

    def identity(self):
        # Settings that a resumed run must share.
        return {**super().identity(), "leave": list(self.leave)}

    def setup(self, stage):
        super().setup(stage)
        if self.member_parallel:
            raise ValueError("Branches need batches of the trunk; use ddp.")
