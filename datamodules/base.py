"""Base classes of the datamodules: splits, statistics, loaders and the identity of the data."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor

from lightning_sym._checks import check_integers, check_known, check_numbers, check_seeds
from lightning_sym._loading import LoadsTrusted
from lightning_sym._random import generator
from lightning_sym.datamodules.loader import (
    EpochLoader,
    TensorLoader,
    check_images,
    check_shift,
    check_statistics,
    normalisation,
    normalised,
    too_large_batch,
)
from lightning_sym.datamodules.transforms import ImageTransform

DataSplit: TypeAlias = Literal["train", "val", "test"]


class LabelledImages(NamedTuple):
    """Images of shape ``[N, C, H, W]``, uint8, and their labels of shape ``[N]``, int64."""

    images: Tensor
    labels: Tensor


class LabelledInputs(NamedTuple):
    """Inputs of shape ``[N, ...]``, float32 or int64 tokens, and targets of shape ``[N, ...]``, int64 or float32."""

    inputs: Tensor
    targets: Tensor


Split: TypeAlias = LabelledImages | LabelledInputs


class InputDataModule(LoadsTrusted, LightningDataModule, ABC):
    """Base of all datamodules: inputs in batches, with or without labels.

    Batches are tuples that begin with the inputs, of shape ``[B, *input_shape]``.

    Attributes:
        input_shape: Shape of one input.
        num_classes: Number of outputs of networks for these data.
        tokens: Vocabulary size if inputs are integer tokens; None for other inputs.
        regression: Whether targets are real values rather than class numbers.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    tokens: int | None = None
    regression: bool = False
    location_arguments: ClassVar[tuple[str, ...]] = ()
    """Constructor arguments that locate the data; not part of :meth:`identity`."""

    @classmethod
    def trusted_modules(cls) -> Iterable[str]:
        """Return the modules of all imported transforms, which a checkpoint may name."""
        return {path.rpartition(".")[0] for path in ImageTransform._known}

    @property
    def in_channels(self) -> int:
        """Size of an input's first axis: the channels of an image."""
        return self.input_shape[0]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of an input in pixels; axes beyond the third count as width, absent ones as 1."""
        sides = (*self.input_shape[1:], 1, 1)
        return sides[0], math.prod(sides[1:])

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Identify the data by plain values that can be written as JSON."""

    @abstractmethod
    def curvature_dataloader(self) -> EpochLoader:
        """Return all training inputs in a fixed order without augmentation, each on exactly one process."""

    def _described(self, splits: Mapping[Any, int]) -> dict[str, Any]:
        """Return the entries common to every identity: class, arguments, sizes."""
        hidden = {"_instantiator", "_class_path", *self.location_arguments}
        return {
            "class_path": f"{type(self).__module__}.{type(self).__qualname__}",
            "arguments": {name: value for name, value in sorted(self.hparams_initial.items()) if name not in hidden},
            "num_classes": self.num_classes,
            "input_shape": list(self.input_shape),
            **({} if self.tokens is None else {"tokens": self.tokens}),
            "splits": dict(splits),
        }

    def _place(self) -> dict[str, Any]:
        """Return a loader's arguments ``device``, ``rank`` and ``world_size``."""
        if self.trainer is None:
            return {"device": torch.device("cpu"), "rank": 0, "world_size": 1}
        sharing = self.trainer.distributed_sampler_kwargs or {}
        return {
            "device": self.trainer.strategy.root_device,
            "rank": sharing.get("rank", 0),
            "world_size": sharing.get("num_replicas", 1),
        }


class InMemoryDataModule(InputDataModule):
    """Base of data held in memory in three splits and batched by index on the trainer's device.

    A subclass implements :meth:`make_splits`, may override :meth:`augmentation`, and passes the arguments below to
    this constructor.

    The loaders are :class:`~lightning_sym.datamodules.TensorLoader`, sharded over the trainer's processes, on its
    device (the CPU without a trainer). If the task has an attribute ``member_seeds`` (a sequence of ints), training
    batches have a leading axis with one row per member, each shuffled by its seed. Otherwise ``data_seed`` sets the
    order. Training drops the last incomplete batch.

    Args:
        batch_size: Training inputs per batch, process and member, >= 1.
        eval_batch_size: Inputs per batch and process in every other loader, >= 1.
        data_seed: Seed of the split, and of the order of the batches unless the task announces member seeds.

    Attributes:
        class_names: Names of the classes.

    Raises:
        ValueError: If an argument is out of its range.
    """

    class_names: tuple[str, ...]

    def __init__(self, batch_size: int, eval_batch_size: int, data_seed: int) -> None:
        super().__init__()
        check_integers(batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_seeds(data_seed=data_seed)
        # With more processes than evaluation inputs, some processes evaluate no input.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self._batch_size, self._eval_batch_size, self._data_seed = batch_size, eval_batch_size, data_seed
        self._splits: Mapping[DataSplit, Split] = {}
        self._on_device: dict[tuple[DataSplit, torch.device], Split] = {}
        self._statistics: tuple[list[float], list[float]] | None = None
        self._fingerprint: str | None = None

    @abstractmethod
    def make_splits(self) -> tuple[Mapping[DataSplit, Split], tuple[list[float], list[float]] | None]:
        """Return the three splits, and mean and standard deviation of each channel (None: no normalisation).

        Called once on every process.
        """

    def augmentation(self) -> dict[str, Any]:
        """Return arguments of :class:`~lightning_sym.datamodules.TensorLoader` that change training inputs."""
        return {}

    @property
    def mean(self) -> list[float] | None:
        """Mean of each channel, subtracted from inputs; for images in units of pixel values in [0, 1]. None: none."""
        self.setup()
        return None if self._statistics is None else list(self._statistics[0])

    @property
    def std(self) -> list[float] | None:
        """Standard deviation of each channel, which divides inputs; same units. None: none."""
        self.setup()
        return None if self._statistics is None else list(self._statistics[1])

    def setup(self, stage: str | None = None) -> None:
        """Read and split the data, on every process; a second call has no effect.

        Args:
            stage: Ignored: every split is made for every stage, so that the identity is always the same.

        Raises:
            ValueError: If :meth:`make_splits` rejects the data.
        """
        if not self._splits:
            splits, self._statistics = self.make_splits()
            self._splits = splits

    def teardown(self, stage: str | None = None) -> None:
        """Release the copies on other devices; called on every process.

        Args:
            stage: Ignored.
        """
        self._on_device = {key: value for key, value in self._on_device.items() if key[1].type == "cpu"}

    def train_dataloader(self) -> TensorLoader:
        """Return the shuffled and augmented training batches, with a row per member of a population.

        If the task does not train and names a split in ``epoch_split``, return each image of that split once, without
        augmentation. Raises a ``ValueError`` if the training images do not fill one batch on every process.
        """
        split = None if self.trainer is None else getattr(self.trainer.lightning_module, "epoch_split", None)
        if split is not None:
            return self._loader(split, batch_size=self._eval_batch_size, dealt=True)
        seeds = None if self.trainer is None else getattr(self.trainer.lightning_module, "member_seeds", None)
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        return self._loader(
            "train",
            batch_size=self._batch_size,
            seeds=self._data_seed if seeds is None else [int(seed) for seed in seeds],
            **self.augmentation(),
            drop_last=True,
            reshuffle=not overfit,  # Lightning's meaning of overfit_batches: the same batches in every epoch
        )

    def curvature_dataloader(self) -> TensorLoader:
        """Return all training images in a fixed order without augmentation, each on exactly one process."""
        return self._loader("train", batch_size=self._eval_batch_size)

    def val_dataloader(self) -> TensorLoader | list[TensorLoader]:
        """Return the validation images in a fixed order.

        Returns:
            The loader, or an empty list if ``val_fraction`` is 0: Lightning then skips validation, with one message.
        """
        self.setup()
        if len(self._splits["val"][0]) == 0:
            return []
        return self._loader("val", batch_size=self._eval_batch_size)

    def test_dataloader(self) -> TensorLoader:
        """Return the test images in a fixed order."""
        return self._loader("test", batch_size=self._eval_batch_size)

    def predict_dataloader(self) -> TensorLoader:
        """Return the test images in a fixed order, with their labels."""
        return self._loader("test", batch_size=self._eval_batch_size)

    def split_tensors(self, split: DataSplit) -> Split:
        """Return the raw inputs and targets of a split, on the CPU.

        Args:
            split: ``"train"``, ``"val"`` or ``"test"``.

        Returns:
            Inputs of shape ``[N, *input_shape]``, before normalisation, and targets: images as uint8 with labels
            ``[N]``, int64. The tensors are not copied: do not write to them.

        Raises:
            ValueError: If there is no such split.
        """
        check_known("split", split, ("train", "val", "test"))
        self.setup()
        return self._splits[split]

    def normalize(self, inputs: Tensor) -> Tensor:
        """Normalise inputs for the networks.

        Args:
            inputs: Shape ``[..., *input_shape]``, as from :meth:`split_tensors`, on any device.

        Returns:
            ``(images / 255 - mean) / std``, ``(inputs - mean) / std``, or a copy. Same shape and device; bitwise as in
            the loaders.
        """
        self.setup()
        like = self._splits["train"][0][:0].to(inputs.device)
        return normalised(inputs, None if self._statistics is None else normalisation(*self._statistics, like))

    def identity(self) -> dict[str, Any]:
        """Identify the data by plain values that can be written as JSON; reads the data.

        Returns:
            ``class_path``; ``arguments`` (without those that only locate the files); ``num_classes``,
            ``input_shape``; ``splits``, the number of inputs in each; ``mean`` and ``std`` in use, or None;
            ``fingerprint``, the SHA-256 of shapes, types and bytes of all split tensors. Identical in every run and
            process.
        """
        self.setup()
        if self._fingerprint is None:
            self._fingerprint = _fingerprint(self._splits)
        return {
            **self._described({name: len(part[0]) for name, part in self._splits.items()}),
            "mean": self.mean,
            "std": self.std,
            "fingerprint": self._fingerprint,
        }

    def _loader(self, split: DataSplit, **options: Any) -> TensorLoader:
        """Make a loader with the trainer's device and this process's share."""
        self.setup()
        place = self._place()
        device = place["device"]
        if (split, device) not in self._on_device:
            part = self._splits[split]
            self._on_device[split, device] = type(part)(*(tensor.to(device) for tensor in part))
        inputs, targets = self._on_device[split, device]
        return TensorLoader(inputs, targets, mean=self.mean, std=self.std, **place, **options)


class ImageDataModule(InMemoryDataModule):
    """Base of the image datamodules: small data sets, held in memory as uint8 and batched by index.

    A subclass implements :meth:`load` and states ``source_shape`` and ``source_classes`` (and, if it can,
    ``source_sizes``, ``source_names``). ``num_classes``, ``input_shape``, ``in_channels`` and ``image_size``
    are known after construction; :meth:`setup` reads the data.

    ``transforms`` first change the whole source, image by image. One permutation of the source training set, drawn
    from ``data_seed``, is cut into validation (first) and training images. ``train_fraction`` and ``max_samples``
    keep the first images of each split, so that smaller training sets are subsets of larger ones. The test set depends
    on neither. Images are normalised with the statistics of the remaining training images.

    Args:
        batch_size: Training images per batch, process and member, >= 1.
        eval_batch_size: Images per batch and process in every other loader, >= 1.
        train_fraction: Fraction in (0, 1] of the training images (without those for validation) to use.
        val_fraction: Fraction in [0, 1) of the source's training set held out for validation, rounded
            to the nearest image. 0: no validation, :meth:`val_dataloader` returns an empty list.
        max_samples: Largest number of images in each split, >= 1, for quick runs. None: no limit.
        data_seed: Seed of the split, and of the order of the batches unless the task announces member seeds.
        shift: Largest random translation of training images in pixels, drawn again in each epoch; see
            :class:`~lightning_sym.datamodules.TensorLoader`. >= 0 and smaller than the image.
        shift_fill: Value of the pixels that a shift exposes: ``"mean"`` or a number in [0, 255].
        flip: Mirror training images left to right with probability 1/2.
        mean: Mean of each channel for normalisation, in units of pixel values scaled to [0, 1]. None: that of
            the training images.
        std: Standard deviation of each channel, > 0, same units. None: that of the training images.
        transforms: Transforms of the whole data set, applied in this order. None: none.

    Attributes:
        num_classes: Number of classes, after the transforms.
        class_names: Names of the classes, after the transforms.
        input_shape: Shape ``(C, H, W)`` of an image, after the transforms.

    Raises:
        ValueError: If an argument is out of its range, or the split would be empty or smaller than one batch.

        Logs no metrics. Checkpoints hold the arguments (transforms as class path and arguments) and no data; Lightning
        adds the position within the epoch, from which a resumed run continues exactly.
    """

    source_shape: ClassVar[tuple[int, int, int]]
    """Shape ``(C, H, W)`` of an image of the source."""
    source_classes: ClassVar[int]
    """Number of classes of the source."""
    source_sizes: ClassVar[tuple[int, int] | None] = None
    """Numbers of training and test images of the source, if known before it is read."""
    source_names: ClassVar[tuple[str, ...] | None] = None
    """Names of the source's classes; None: their numbers."""

    def __init__(
        self,
        batch_size: int = 32,
        eval_batch_size: int = 500,
        train_fraction: float = 1.0,
        val_fraction: float = 0.1,
        max_samples: int | None = None,
        data_seed: int = 0,
        shift: int = 0,
        shift_fill: float | Literal["mean"] = "mean",
        flip: bool = False,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        transforms: list[ImageTransform] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, data_seed)
        # A checkpoint holds transforms as plain values, and load_from_checkpoint passes them on.
        self._transforms = [
            ImageTransform.from_config(transform) if isinstance(transform, Mapping) else transform
            for transform in transforms or []
        ]
        self.save_hyperparameters(ignore=["transforms"])
        self.save_hyperparameters({"transforms": [transform.config() for transform in self._transforms] or None})

        self.input_shape: tuple[int, int, int] = self.source_shape
        self.num_classes: int = self.source_classes
        self.class_names: tuple[str, ...] = self.source_names or tuple(map(str, range(self.source_classes)))
        for transform in self._transforms:
            self.input_shape = transform.output_shape(self.input_shape)
            self.num_classes = transform.output_classes(self.num_classes)
            self.class_names = transform.output_names(self.class_names)
        check_integers(2, of=type(self).__name__, num_classes=self.num_classes)

        check_numbers("in (0, 1]", train_fraction=train_fraction)
        check_numbers("in [0, 1)", val_fraction=val_fraction)
        check_integers(optional=True, max_samples=max_samples)
        check_shift(shift, shift_fill, self.image_size)
        check_statistics(mean, std, self.in_channels)
        self._train_fraction, self._val_fraction, self._max_samples = train_fraction, val_fraction, max_samples
        self._shift, self._shift_fill, self._flip = shift, shift_fill, flip
        self._given_mean, self._given_std = mean, std
        if self.source_sizes is not None:
            self._split_sizes(*self.source_sizes)

    @abstractmethod
    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """Read the source, on every process.

        Returns:
            Training and test images of shape ``[N, *source_shape]``, uint8, with labels in
            ``[0, source_classes)``, int64. Shuffle the test images if classes are sorted, as
            ``max_samples`` keeps the first ones.
        """

    def _loaded(self) -> tuple[LabelledImages, LabelledImages]:
        """Load the data, and turn arrays into tensors."""
        found: Any = self.load()
        parts = found if isinstance(found, tuple | list) and len(found) == 2 else ()
        if not parts or not all(isinstance(part, tuple | list) and len(part) == 2 for part in parts):
            raise ValueError(
                f"{type(self).__name__}.load must return training and test data, each a pair (images, labels), as "
                "LabelledImages(images, labels), LabelledImages(images, labels)."
            )
        train, test = (LabelledImages(*map(torch.as_tensor, part)) for part in parts)
        return train, test

    @property
    def transforms(self) -> tuple[ImageTransform, ...]:
        """The transforms, in order of application."""
        return tuple(self._transforms)

    def augmentation(self) -> dict[str, Any]:
        """Return the arguments ``shift``, ``shift_fill`` and ``flip``."""
        return {"shift": self._shift, "shift_fill": self._shift_fill, "flip": self._flip}

    def make_splits(self) -> tuple[Mapping[DataSplit, LabelledImages], tuple[list[float], list[float]]]:
        """Load, transform and split the images.

        Raises:
            ValueError: If the data do not have the declared shape and classes, if a split is empty, or if a channel is
                constant and ``std`` is not given.
        """
        train, test = self._loaded()
        for name, part in (("train", train), ("test", test)):
            self._check(part, f"the {name} images of the source", self.source_shape, self.source_classes)
        for transform in self._transforms:
            train = LabelledImages(*transform(*train, "train"))
            test = LabelledImages(*transform(*test, "test"))
        for name, part in (("train", train), ("test", test)):
            self._check(part, f"the {name} images after the transforms", self.input_shape, self.num_classes)

        sizes = self._split_sizes(len(train.images), len(test.images))
        order = torch.randperm(len(train.images), generator=generator("split", self._data_seed))
        held_out = round(self._val_fraction * len(order))
        indices = {
            "train": order[held_out : held_out + sizes["train"]],
            "val": order[:held_out][: sizes["val"]],
        }
        splits: dict[DataSplit, LabelledImages] = {
            "train": LabelledImages(train.images[indices["train"]], train.labels[indices["train"]]),
            "val": LabelledImages(train.images[indices["val"]], train.labels[indices["val"]]),
            "test": LabelledImages(test.images[: sizes["test"]].clone(), test.labels[: sizes["test"]].clone()),
        }
        return splits, self._choose_statistics(splits["train"].images)

    def split_tensors(self, split: DataSplit) -> LabelledImages:
        """Return the raw images and labels of a split, on the CPU; see :meth:`InMemoryDataModule.split_tensors`."""
        part = super().split_tensors(split)
        assert isinstance(part, LabelledImages)
        return part

    def _split_sizes(self, train: int, test: int) -> dict[DataSplit, int]:
        """Return the size of each split for given numbers of source training and test images."""
        limit = self._max_samples if self._max_samples is not None else max(train, test)
        held_out = round(self._val_fraction * train)
        left = round(self._train_fraction * (train - held_out))
        if self._val_fraction > 0 and held_out == 0:
            raise ValueError(
                f"val_fraction {self._val_fraction} of {train} training images leaves the validation split "
                "empty; use a larger fraction, or 0 for no validation."
            )
        if left == 0:
            raise ValueError(
                f"val_fraction {self._val_fraction} and train_fraction {self._train_fraction} of {train} "
                "training images leave the training split empty; use a smaller val_fraction or a larger "
                "train_fraction."
            )
        sizes: dict[DataSplit, int] = {
            "train": min(left, limit),
            "val": min(held_out, limit),
            "test": min(test, limit),
        }
        if self._batch_size > sizes["train"]:
            raise ValueError(too_large_batch(self._batch_size, 1, sizes["train"]))
        return sizes

    def _check(self, part: LabelledImages, where: str, shape: tuple[int, ...], classes: int) -> None:
        images, labels = part
        where = f"{type(self).__name__}: {where}"
        check_images(images, labels, where)
        if tuple(images.shape[1:]) != shape:
            raise ValueError(f"{where} must have shape {shape}, got {tuple(images.shape[1:])}.")
        if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise ValueError(
                f"{where}: labels must be in [0, {classes}), got values from {int(labels.min())} to "
                f"{int(labels.max())}."
            )

    def _choose_statistics(self, images: Tensor) -> tuple[list[float], list[float]]:
        mean, std = channel_statistics(images)
        if self._given_std is None and 0 in std:
            raise ValueError(
                f"Channel {std.index(0)} is constant over the {len(images)} training images, so they cannot be "
                "normalised by its standard deviation; set std, or use more images."
            )
        given = (self._given_mean, mean), (self._given_std, std)
        mean, std = ([float(value) for value in (measured if own is None else own)] for own, measured in given)
        return mean, std


def channel_statistics(images: Tensor) -> tuple[list[float], list[float]]:
    """Return exact mean and standard deviation of each channel.

    Computed from the counts of the 256 values, so that the result depends neither on the order of the images nor on
    the machine.

    Args:
        images: Shape ``[N, C, H, W]``, uint8, N >= 1.

    Returns:
        Means and (population) standard deviations, one per channel, in units of pixel values scaled to [0, 1].
    """
    values = range(256)
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256).tolist()
        total = sum(counts)
        first = sum(value * count for value, count in zip(values, counts, strict=True))
        second = sum(value * value * count for value, count in zip(values, counts, strict=True))
        means.append(first / total / 255)
        # total * second - first**2 is an exact integer: no cancellation, and 0 only for a constant channel.
        stds.append((total * second - first * first) ** 0.5 / total / 255)
    return means, stds


def _fingerprint(splits: Mapping[DataSplit, Split]) -> str:
    digest = hashlib.sha256()
    for name, part in splits.items():
        for field, tensor in zip(part._fields, part, strict=True):
            digest.update(f"{name}/{field}:{list(tensor.shape)}:{tensor.dtype}:".encode())
            array = tensor.contiguous().numpy()
            digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()
