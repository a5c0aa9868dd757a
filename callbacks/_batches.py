"""Batches that reports evaluate networks on."""

from collections.abc import Iterable, Iterator

from torch import Tensor


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
