"""Batches that reports evaluate networks on."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_sym.datamodules import InputDataModule


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


class PreparedBatches:
    """Batches to each of which something is done, as often as they are read.

    Args:
        batches: Batches that can be read more than once.
        prepare: Done to each.
        most: At most so many, the first ones; None for all.
    """

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], Any], most: int | None = None) -> None:
        self._batches, self._prepare, self._most = batches, prepare, most

    def __iter__(self) -> Iterator[Any]:
        """Yield them, in their order."""
        return map(self._prepare, islice(self._batches, self._most))


def share_of(batches: Iterable[Any], rank: int, size: int) -> PreparedBatches:
    """Return one process's share of batches that all processes have: a part of each."""
    return PreparedBatches(batches, lambda batch: [tensor[rank::size] for tensor in batch])


def in_order(loader: Any, trainer: Trainer) -> DataLoader[Any] | None:
    """Return this process's share of a loader's data, in their order, each once; None if they have no order."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    mine = range(trainer.global_rank, len(dataset), trainer.world_size)  # type: ignore[arg-type]
    return DataLoader(Subset(dataset, mine), loader.batch_size or 64, collate_fn=loader.collate_fn)  # type: ignore[arg-type]


def splits_of(trainer: Trainer, *, spread: bool) -> dict[str, Iterable[Any]]:
    """Return this process's share of the training data, as they are, and of those that networks are judged by.

    Args:
        trainer: Trainer of the run, during or after a fit.
        spread: Whether datamodules of ``lightning_sym.datamodules`` give every process all the data.

    Returns:
        ``train``, and ``test`` (with a datamodule of ours that has test data) or ``val``. A split that is not there, or
        whose data have no order, is left out.
    """
    data: Any = getattr(trainer, "datamodule", None)
    found: dict[str, Any] = {}
    if isinstance(data, InputDataModule):
        loaders: dict[str, Any] = {"train": data.curvature_dataloader()}
        loaders["test"] = data.test_dataloader() if is_overridden("test_dataloader", data) else None
        if loaders["test"] in (None, []):
            loaders["val"] = data.val_dataloader() if is_overridden("val_dataloader", data) else None
        for name, loader in loaders.items():
            if loader not in (None, []):
                shared = spread and trainer.world_size > 1
                found[name] = share_of(loader, trainer.global_rank, trainer.world_size) if shared else loader
        return found
    validation: Any = trainer.val_dataloaders
    while isinstance(validation, list | tuple) and validation:
        validation = validation[0]
    for name, loader in (("train", trainer.train_dataloader), ("val", validation)):
        if (ordered := in_order(loader, trainer)) is not None:
            found[name] = ordered
    return found
