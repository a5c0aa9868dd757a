"""Batches that callbacks evaluate networks on."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Subset

from lightning_sym._distributed import gathered, together
from lightning_sym.callbacks._checks import has_members
from lightning_sym.datamodules import InMemoryDataModule, InputDataModule

Batches: TypeAlias = Iterable[tuple[Tensor, Tensor]]


class TrainingBatches:
    """This process's share of the training data, in a fixed order, without augmentation.

    Uses the ``curvature_dataloader()`` of a datamodule, otherwise the training data set in index order.

    Args:
        callback: The callback, named in messages.
        trainer: The trainer with the data.
        task: The task, which defines inputs and targets if it trains several networks.
        count: Number of batches; None for all.

    Raises:
        TypeError: If the data have no fixed order.
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
        own = in_order(trainer.train_dataloader, trainer)
        if own is None:
            raise TypeError(
                f"{self._name} reads the training data in a fixed order, but a "
                f"{type(trainer.train_dataloader).__name__} has none; use a DataLoader of a data set with indices, or "
                "a datamodule with curvature_dataloader()."
            )
        self._loader = own

    def __iter__(self) -> Iterator[Any]:
        """Yield inputs and targets."""
        for batch in islice(self._loader, self._count):
            yield self._pairs(tree_map_only(Tensor, lambda tensor: tensor[self._share], batch))

    def own(self) -> list[Any]:
        """Return the batches of this process, on the CPU; call it on every process.

        Raises:
            ValueError: If a second pass yields other batches.
        """
        found: list[Any] = []
        with isolate_rng():
            together(lambda: found.extend(self._read_twice()))
        return found

    def of_all(self) -> list[Any]:
        """Return the batches of all processes, checked as by :meth:`own`."""
        return [batch for part in gathered(self.own()) for batch in part]

    def _read_twice(self) -> list[Any]:
        first = [tree_map_only(Tensor, Tensor.cpu, batch) for batch in self]
        again = (tree_map_only(Tensor, Tensor.cpu, batch) for batch in self)
        for one, two in zip(first, again, strict=True):
            if any(not torch.equal(a, b) for a, b in zip(tree_leaves(one), tree_leaves(two), strict=True)):
                raise ValueError(
                    f"the data changed between two passes, but {self._name} needs fixed data; pass batches in a fixed "
                    "order without shuffling and random augmentation, such as curvature_dataloader() of a datamodule."
                )
        return first


class PreparedBatches:
    """Batches that are preprocessed whenever they are read.

    Args:
        batches: Batches that can be read more than once.
        prepare: Function applied to each batch.
        most: Largest number of batches, from the first; None for all.
    """

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], Any], most: int | None = None) -> None:
        self._batches, self._prepare, self._most = batches, prepare, most

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches in order."""
        return map(self._prepare, islice(self._batches, self._most))


def without_augmentation(data: InMemoryDataModule, train_batches: int | None) -> dict[str, Batches]:
    """Return the first batches of this process's share of the training data, or all, and those of the test data."""
    train = data.curvature_dataloader()
    return {
        "train": train if train_batches is None else list(islice(train, train_batches)),
        "test": data.test_dataloader(),
    }


def in_order(loader: Any, trainer: Trainer) -> DataLoader[Any] | None:
    """Return this process's share of a loader's data in index order, each item once; None if there is no order."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    mine = range(trainer.global_rank, len(dataset), trainer.world_size)  # type: ignore[arg-type]
    return DataLoader(Subset(dataset, mine), loader.batch_size or 64, collate_fn=loader.collate_fn)  # type: ignore[arg-type]


def splits_of(trainer: Trainer, task: Any, train_batches: int | None = None) -> dict[str, PreparedBatches]:
    """Return this process's share of the training data, without augmentation, and of the evaluation data.

    Batches are on the device, in the precision of the run, preprocessed by the task for evaluation.

    Args:
        trainer: Trainer of the run, during or after a fit.
        task: Its task.
        train_batches: Largest number of training batches; None for all.

    Returns:
        ``train``, and ``test`` (for a datamodule of this package with test data) or ``val``. Missing splits, and splits
        without a fixed order, are left out.
    """

    def prepare(batch: Any) -> Any:
        moved = trainer.strategy.batch_to_device(batch, trainer.strategy.root_device)
        moved = trainer.precision_plugin.convert_input(moved)
        return task.evaluation_batch(moved) if hasattr(task, "evaluation_batch") else moved

    # With ddp_members datamodules give every process all the data.
    whole = getattr(task, "member_parallel", False) and trainer.world_size > 1
    rank, size = trainer.global_rank, trainer.world_size
    found = {}
    for name, loader in _loaders(trainer).items():
        batches = PreparedBatches(loader, prepare, train_batches if name == "train" else None)
        share = PreparedBatches(batches, lambda batch: [tensor[rank::size] for tensor in batch])
        found[name] = share if whole else batches
    return found


def _loaders(trainer: Trainer) -> dict[str, Any]:
    data: Any = getattr(trainer, "datamodule", None)
    if isinstance(data, InputDataModule):
        loaders: dict[str, Any] = {"train": data.curvature_dataloader()}
        loaders["test"] = data.test_dataloader() if is_overridden("test_dataloader", data) else None
        if loaders["test"] in (None, []):
            loaders["val"] = data.val_dataloader() if is_overridden("val_dataloader", data) else None
        return {name: loader for name, loader in loaders.items() if loader not in (None, [])}
    validation: Any = trainer.val_dataloaders
    while isinstance(validation, list | tuple) and validation:
        validation = validation[0]
    ordered = {"train": in_order(trainer.train_dataloader, trainer), "val": in_order(validation, trainer)}
    return {name: loader for name, loader in ordered.items() if loader is not None}
