"""Batches that callbacks evaluate networks on."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_sym._distributed import gathered, together
from lightning_sym.callbacks._checks import has_members


class TrainingBatches:
    """This process's share of the training data, in an order that does not change, without augmentation.

    That is the ``curvature_dataloader()`` of a datamodule; of other data the data set for training in its own order.

    Args:
        callback: Named in messages.
        trainer: Has the data.
        task: Says what inputs and targets are, if it trains several networks.
        count: How many batches are taken; None for all.

    Raises:
        TypeError: If the data have no order of their own.
    """

    def __init__(self, callback: Callback, trainer: Trainer, task: LightningModule, count: int | None = None) -> None:
        self._name, self._count = type(callback).__name__, count
        self._share = slice(None)
        self._pairs: Callable[[Any], Any] = lambda batch: batch
        data: Any = getattr(trainer, "datamodule", None)
        several: Any = task if has_members(task) else None
        if several is not None:
            self._pairs = several.evaluation_batch
        if callable(getattr(data, "curvature_dataloader", None)):
            self._loader: Iterable[Any] = data.curvature_dataloader()
            if several is not None and several.member_parallel:  # every rank has all the data
                self._share = slice(trainer.global_rank, None, trainer.world_size)
            return
        given = trainer.train_dataloader
        if not isinstance(given, DataLoader) or isinstance(given.dataset, IterableDataset):
            raise TypeError(
                f"{self._name} goes through the training data in their own order, and a {type(given).__name__} has "
                "none; use a DataLoader of a data set with indices, or a datamodule with curvature_dataloader()."
            )
        mine = range(trainer.global_rank, len(given.dataset), trainer.world_size)  # type: ignore[arg-type]
        own: Any = Subset(given.dataset, mine)
        self._loader = DataLoader(own, given.batch_size or 64, collate_fn=given.collate_fn)

    def __iter__(self) -> Iterator[Any]:
        """Yield inputs and targets."""
        for batch in islice(self._loader, self._count):
            yield self._pairs(tree_map_only(Tensor, lambda tensor: tensor[self._share], batch))

    def own(self) -> list[Any]:
        """Return the batches of this process, on the CPU; to be called on every process.

        Raises:
            ValueError: If they are not the same when they are read again.
        """
        found: list[Any] = []
        with isolate_rng():
            together(lambda: found.extend(self._read_twice()))
        return found

    def of_all(self) -> list[Any]:
        """Return the batches of all processes, as :meth:`own`."""
        return [batch for part in gathered(self.own()) for batch in part]

    def _read_twice(self) -> list[Any]:
        first = [tree_map_only(Tensor, Tensor.cpu, batch) for batch in self]
        again = (tree_map_only(Tensor, Tensor.cpu, batch) for batch in self)
        for one, two in zip(first, again, strict=True):
            if any(not torch.equal(a, b) for a, b in zip(tree_leaves(one), tree_leaves(two), strict=True)):
                raise ValueError(
                    f"the data changed between two passes, and {self._name} is for fixed data; give batches in a fixed "
                    "order without shuffling and random augmentation, such as curvature_dataloader() of a datamodule."
                )
        return first


class EqualBatches:
    """The batches that are as large as the first one: statistics of batch norms count every batch alike.

    Args:
        batches: Batches of images with labels, which can be read more than once.
    """

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield them, in their order."""
        size = None
        for batch in self._batches:
            size = size or len(batch[0])
            if len(batch[0]) == size:
                yield batch
