"""Gaussian noise as inputs, for questions about the function of a network that are independent of a data set."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sym._checks import check_integers, check_seeds, is_integer
from lightning_sym._random import generator
from lightning_sym.datamodules.base import InputDataModule
from lightning_sym.datamodules.loader import EpochLoader, too_large_batch


class GaussianLoader(EpochLoader):
    """Batches of independent standard normal inputs, each a tuple of one tensor ``[B, *shape]``, float32.

    ``keys`` alone determine input ``i``, for any batch size, device and number of processes: inputs are drawn in
    blocks on the CPU.

    Args:
        shape: Shape of one input.
        samples: Inputs per epoch, >= 0, of all processes.
        batch_size: Inputs per batch and process, >= 1.
        keys: Seed of the inputs; see ``lightning_sym._random.generator``.
        fresh: Draw new inputs in every epoch.
        drop_last: Leave out the last batch if it is smaller than the others.
        interleaved: Sharing of an epoch between processes: each takes its part of every global batch (training), or
            one contiguous part.
        rank: Index of this process.
        world_size: Number of processes.
        device: Where the batches go.
    """

    _BLOCK = 256  # inputs that are drawn together

    def __init__(
        self,
        shape: Sequence[int],
        samples: int,
        batch_size: int,
        keys: Sequence[str | int],
        *,
        fresh: bool = False,
        drop_last: bool = False,
        interleaved: bool = False,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            samples, batch_size, interleaved=interleaved, drop_last=drop_last, rank=rank, world_size=world_size
        )
        self.shape = tuple(shape)
        self._keys = tuple(keys)
        self._fresh = fresh
        self._device = torch.device(device)
        self._held: Tensor | None = None  # inputs that stay the same, on the device

    def epoch_batches(self, epoch: int) -> Callable[[int], tuple[Tensor]]:
        """Return a function from the index of a batch to the batch."""
        if not self._fresh and self._held is None:
            self._held = self._draw(self._first, self._end, ()).to(self._device)

        def batch(index: int) -> tuple[Tensor]:
            own = self.positions(index)
            if self._held is not None:
                return (self._held[own.start - self._first : own.stop - self._first],)
            return (self._draw(own.start, own.stop, (epoch,)).to(self._device),)

        return batch

    def _draw(self, first: int, last: int, more: tuple[int, ...]) -> Tensor:
        """Return inputs ``first`` to ``last - 1``."""
        blocks = range(first // self._BLOCK, max(first, last - 1) // self._BLOCK + 1)
        drawn = torch.cat(
            [torch.randn(self._BLOCK, *self.shape, generator=generator(*self._keys, *more, block)) for block in blocks]
        )
        start = first - blocks[0] * self._BLOCK
        return drawn[start : start + last - first]


class GaussianInputsDataModule(InputDataModule):
    """Independent standard normal inputs of any shape, without labels.

    Batches are tuples of one tensor ``[B, *shape]``, float32. Training inputs are either identical in every epoch, in
    fixed order, as in GENNI's reference code, or fresh in every step, so that a network cannot memorise them.
    Validation and test inputs are fixed, independent draws from the same distribution.

    Args:
        shape: Shape of one input, each side >= 1: ``[1, 1, 1]`` for one number, ``[1, 28, 28]`` for images.
        samples: Training inputs per epoch, >= 1.
        batch_size: Training inputs per batch and process, >= 1.
        eval_batch_size: Inputs per batch and process in every other loader, >= 1.
        val_samples: Validation inputs, >= 0. 0: no validation.
        test_samples: Test inputs, >= 1.
        fresh: Draw new training inputs in every epoch, so in every step.
        num_classes: Number of outputs of networks, >= 1; recipes link it.
        data_seed: Seed of all inputs.

    Attributes:
        input_shape: ``shape``.

    Raises:
        ValueError: If an argument is out of its range.

    Note:
        :meth:`curvature_dataloader` returns the same inputs with and without ``fresh``.
    """

    def __init__(
        self,
        shape: Sequence[int] = (1, 1, 1),
        samples: int = 16384,
        batch_size: int = 256,
        eval_batch_size: int = 1024,
        val_samples: int = 4096,
        test_samples: int = 4096,
        fresh: bool = False,
        num_classes: int = 1,
        data_seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        sides = shape if isinstance(shape, Sequence) else ()
        if not sides or not all(is_integer(side) for side in sides):
            raise ValueError(f"shape must be a list of integers >= 1, as [1, 28, 28], got {shape!r}.")
        check_integers(samples=samples, test_samples=test_samples, num_classes=num_classes)
        check_integers(batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_integers(0, val_samples=val_samples)
        check_seeds(data_seed=data_seed)
        if batch_size > samples:
            raise ValueError(too_large_batch(batch_size, 1, samples))
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.input_shape = tuple(shape)
        self.num_classes = num_classes
        self.fresh = fresh
        self._sizes = {"train": samples, "val": val_samples, "test": test_samples}
        self._batch_size, self._eval_batch_size = batch_size, eval_batch_size
        self._data_seed = data_seed

    def identity(self) -> dict[str, Any]:
        """Identify the inputs by plain values that can be written as JSON."""
        found = self._described(self._sizes)
        found["arguments"]["shape"] = list(self.input_shape)  # which may have been given as a tuple
        return found

    def train_dataloader(self) -> GaussianLoader:
        """Return the training batches without an incomplete last one."""
        loader = self._loader("train", self._batch_size, fresh=self.fresh, drop_last=True, interleaved=True)
        if len(loader) == 0:
            raise ValueError(too_large_batch(self._batch_size, self._place()["world_size"], self._sizes["train"]))
        return loader

    def curvature_dataloader(self) -> GaussianLoader:
        """Return all training inputs in order, each on exactly one process."""
        return self._loader("train", self._eval_batch_size)

    def val_dataloader(self) -> GaussianLoader | list[GaussianLoader]:
        """Return the validation inputs, or an empty list if there are none."""
        return self._loader("val", self._eval_batch_size) if self._sizes["val"] else []

    def test_dataloader(self) -> GaussianLoader:
        """Return the test inputs."""
        return self._loader("test", self._eval_batch_size)

    def predict_dataloader(self) -> GaussianLoader:
        """Return the test inputs."""
        return self.test_dataloader()

    def _loader(self, split: str, batch_size: int, **options: Any) -> GaussianLoader:
        keys = ("gaussian inputs", split, self._data_seed)
        return GaussianLoader(self.input_shape, self._sizes[split], batch_size, keys, **self._place(), **options)
