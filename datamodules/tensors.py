"""Your own data: tensors in memory or in a file, and torch data sets."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from numbers import Number
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._random import generator
from lightning_sym._text import name_of_callable
from lightning_sym.datamodules.base import DataSplit, InMemoryDataModule, LabelledInputs
from lightning_sym.datamodules.loader import Augmentation, augmented, check_tensors, too_large_batch
from lightning_sym.weights import check_dense, listed, read_weights

Pair: TypeAlias = tuple[Any, Any]
# Networks have weights for each class or token: larger numbers without that many targets are probably mistakes.
_MOST_CLASSES, _MOST_TOKENS = 100_000, 1_000_000
_NAMES = (("x", "inputs"), ("y", "targets"))  # accepted names of inputs and targets in a file


class TensorDataModule(InMemoryDataModule):
    """Inputs and targets of any shape: spectra, simulations, tokens; for classification and regression.

    In one line: ``TensorDataModule((inputs, targets))``. Types are converted as follows:

    - float inputs become float32, standardised only if ``standardize`` is set;
    - integer inputs are tokens, int64, never normalised; uint8 inputs are pixels and become floats in [0, 1];
    - integer targets are class numbers, int64; float targets are values, float32, never standardised. One value per
      input has shape ``[N, 1]``, the shape of a network's output.

    Batches, their order, members, processes and resuming are those of :class:`ImageDataModule`; ``augmentations``
    change training inputs in every epoch. Without test data, a split seeded by the number of inputs alone is held out
    of the training data; without validation data, one seeded by ``data_seed``.

    A subclass may override :meth:`load` instead of passing ``train``.

    Args:
        train: Training inputs and targets, ``(x, y)``, tensors or arrays of shape ``[N, ...]`` each. Or the path of a
            file with both, named ``x`` or ``inputs`` and ``y`` or ``targets``: ``.pt`` (a dictionary),
            ``.safetensors`` or ``.npz``; no code in it is run. None: :meth:`load` is overridden.
        val: Validation data in the same form. None: ``val_fraction`` of the training data.
        test: Test data in the same form. None: ``test_fraction`` of the training data.
        batch_size: Training inputs per batch, process and member, >= 1.
        eval_batch_size: Inputs per batch and process in every other loader, >= 1.
        val_fraction: Fraction in [0, 1) of the training data (without test data) held out for validation
            if ``val`` is not given. 0: no validation.
        test_fraction: Fraction in (0, 1) of the training data held out for the test if ``test`` is not given.
        max_samples: Largest number of inputs in each split, >= 1, for quick runs. None: no limit.
        data_seed: Seed of the validation split, and of the order of the batches unless the task announces member seeds.
        standardize: Subtract the training inputs' mean of each channel (the first axis of an input) and divide by its
            standard deviation; for inputs ``[N, D]`` each of the ``D`` numbers is a channel.
        num_classes: Number of outputs of networks. None: one more than the largest class number, or the number of
            values per input.
        class_names: Names of the classes. None: their numbers.
        augmentations: Functions that change the inputs of training batches, applied in this order. Each is called as
            ``augmentation(inputs, generator)`` with the unnormalised inputs of one member's batch,
            ``[B, *input_shape]``, and returns inputs of the same shape and type; it may change them in place. All its
            random numbers must come from ``generator``, on the CPU, which depends only on the seed, the epoch and the
            batch. None: none.

    Attributes:
        input_shape: Shape of an input.
        num_classes: Number of outputs of networks for these data.
        tokens: One more than the largest token; None if inputs are floats.
        regression: Whether targets are floats.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If an argument is out of its range, inputs and targets do not match or are not finite, an
            augmentation returns another shape or type, or a split would be empty or smaller than one batch.

    Note:
        The constructor reads the data. Logs no metrics. Checkpoints hold the arguments except the data, with
        augmentations by name; :meth:`identity` holds the data's fingerprint.
    """

    location_arguments: ClassVar[tuple[str, ...]] = ("train", "val", "test")

    def __init__(
        self,
        train: str | Path | tuple[Any, Any] | None = None,
        val: str | Path | tuple[Any, Any] | None = None,
        test: str | Path | tuple[Any, Any] | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 500,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        max_samples: int | None = None,
        data_seed: int = 0,
        standardize: bool = False,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        augmentations: list[Augmentation] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, data_seed)
        check_numbers("in [0, 1)", val_fraction=val_fraction)
        check_numbers("in (0, 1)", test_fraction=test_fraction)
        check_integers(optional=True, max_samples=max_samples, num_classes=num_classes)
        named = {"train": train, "val": val, "test": test}
        given = {name: str(data) if isinstance(data, Path) else data for name, data in named.items()}
        self.save_hyperparameters(ignore=["dataset", "augmentations", *given])
        self._augmentations = _checked(augmentations)
        if self._augmentations:
            self.save_hyperparameters({"augmentations": list(map(name_of_callable, self._augmentations))})
        self.save_hyperparameters({name: data for name, data in given.items() if isinstance(data, str)})
        self._given: dict[str, Any] = given
        self._val_fraction, self._test_fraction, self._max_samples = val_fraction, test_fraction, max_samples
        self._standardize, self._given_classes, self._given_names = standardize, num_classes, class_names
        reads_itself = type(self).load is not TensorDataModule.load
        if reads_itself and any(data is not None for data in given.values()):
            raise ValueError(f"{type(self).__name__} reads its data by itself; leave train, val and test out.")
        if not reads_itself and train is None:
            raise ValueError(f"{type(self).__name__} needs train: a pair (inputs, targets), or the path of a file.")
        if not reads_itself:
            self.setup()

    def load(self) -> tuple[Pair, Pair | None, Pair | None]:
        """Return training, validation and test data; override it in a subclass without ``train``.

        Returns:
            Inputs and targets of each split, ``[N, ...]`` each; None for a split to hold out of the training data.
        """
        train, val, test = (_read(data, name) if isinstance(data, str) else data for name, data in self._given.items())
        return train, val, test

    def setup(self, stage: str | None = None) -> None:
        """Read and split the data, on every process; a second call has no effect.

        Args:
            stage: Ignored: every split is made for every stage, so that the identity is always the same.

        Raises:
            ValueError: If inputs and targets do not match, or the splits cannot be made.
        """
        super().setup(stage)
        if self._given:
            augmented(self._splits["train"][0][:2].clone(), self._augmentations, generator("augment"))
        self._given = {}  # the splits hold the data

    def augmentation(self) -> dict[str, Any]:
        """Return the functions that change training inputs."""
        return {"augmentations": self._augmentations}

    def __getattr__(self, name: str) -> Any:
        # These attributes follow from the data; a subclass's load may need attributes that its constructor sets later.
        if name in ("input_shape", "num_classes", "class_names") and not self.__dict__.get("_splits"):
            self.setup()
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def make_splits(self) -> tuple[Mapping[DataSplit, LabelledInputs], tuple[list[float], list[float]] | None]:
        """Load and split the data, and set the attributes that describe them."""
        loaded: Any = self.load()
        if not (isinstance(loaded, tuple | list) and len(loaded) == 3 and loaded[0] is not None):
            raise ValueError(
                f"{type(self).__name__}.load must return training, validation and test data, each a pair (inputs, "
                "targets); None for validation or test data to hold out of the training data."
            )
        given = dict(zip(("train", "val", "test"), loaded, strict=True))
        parts = {name: _as_split(part, self._where(name)) for name, part in given.items() if part is not None}
        train = parts.pop("train")
        for name, part in parts.items():
            for what, mine, first in zip(part._fields, part, train, strict=True):
                if mine.shape[1:] != first.shape[1:] or mine.dtype != first.dtype:
                    raise ValueError(
                        f"{self._where(name)}: {what} must be like those for training, {first.dtype} of shape "
                        f"{['N', *first.shape[1:]]}, got {mine.dtype} of shape {list(mine.shape)}."
                    )
        if "test" not in parts:
            train, parts["test"] = self._held_out(train, "test", self._test_fraction, ("hold_out", len(train.inputs)))
        if "val" not in parts:
            keys = ("split", self._data_seed)
            train, parts["val"] = self._held_out(train, "val", self._val_fraction, keys)
        whole: dict[DataSplit, LabelledInputs] = {"train": train, "val": parts["val"], "test": parts["test"]}
        splits = {
            name: LabelledInputs(*(tensor[: self._max_samples].contiguous() for tensor in part))
            for name, part in whole.items()
        }
        if self._batch_size > len(splits["train"].inputs):
            raise ValueError(too_large_batch(self._batch_size, 1, len(splits["train"].inputs)))
        self._describe(list(whole.values()))  # a smaller part has the same networks
        if not self.regression:
            kept, known = (int((part["train"].targets.flatten().bincount() > 0).sum()) for part in (splits, whole))
            if kept < known and (kept == 1 or len(splits["train"].inputs) >= 10 * known):
                warnings.warn(
                    f"{type(self).__name__}: max_samples {self._max_samples} keeps the first inputs, which are of "
                    f"{kept} of {known} classes; shuffle the data before.",
                    stacklevel=2,
                )
        return splits, self._choose_statistics(splits["train"].inputs)

    def _where(self, split: str) -> str:
        return f"{type(self).__name__}: {split}"

    def _held_out(
        self, whole: LabelledInputs, split: str, fraction: float, keys: tuple[str | int, ...]
    ) -> tuple[LabelledInputs, LabelledInputs]:
        """Shuffle the training data and split off a held-out set; return the rest first."""
        count = round(fraction * len(whole.inputs))
        if (fraction and count == 0) or count == len(whole.inputs):
            raise ValueError(
                f"{split}_fraction {fraction} of {len(whole.inputs)} training inputs leaves a split empty; use another "
                f"fraction, or give {split}."
            )
        order = torch.randperm(len(whole.inputs), generator=generator(*keys))
        first, rest = (LabelledInputs(*(tensor[part] for tensor in whole)) for part in (order[:count], order[count:]))
        return rest, first

    def _describe(self, parts: list[LabelledInputs]) -> None:
        """Set the attributes that describe the data."""
        inputs, targets = parts[0]
        self.regression = targets.is_floating_point()
        parts = [part for part in parts if len(part.inputs)]
        if self.regression:
            classes = targets[0].numel()
        else:
            if (least := min(int(part.targets.min()) for part in parts)) < 0:
                raise ValueError(f"{type(self).__name__}: class numbers must be >= 0, got {least}.")
            classes = max(int(part.targets.max()) for part in parts) + 1
            self._check_classes(classes, parts)
        if self._given_classes is not None and self._given_classes < classes and not self.regression:
            raise ValueError(
                f"{type(self).__name__}: num_classes {self._given_classes} is too small for class number {classes - 1}."
            )
        self.num_classes = classes if self._given_classes is None else self._given_classes
        self.input_shape = tuple(inputs.shape[1:])
        self.class_names = tuple(self._given_names or map(str, range(self.num_classes)))
        if len(self.class_names) != self.num_classes:
            raise ValueError(f"class_names must have {self.num_classes} names, got {len(self.class_names)}.")
        if not inputs.is_floating_point():
            if (least := min(int(part.inputs.min()) for part in parts)) < 0:
                raise ValueError(f"{type(self).__name__}: tokens must be >= 0, got {least}.")
            self.tokens = max(int(part.inputs.max()) for part in parts) + 1
            if self.tokens > max(_MOST_TOKENS, sum(part.inputs.numel() for part in parts)):
                raise ValueError(
                    f"{type(self).__name__}: integer inputs are tokens, and these go up to {self.tokens - 1}; number "
                    "tokens from 0, or pass floats if the inputs are values."
                )

    def _check_classes(self, classes: int, parts: list[LabelledInputs]) -> None:
        """Check that the class numbers, with largest number ``classes - 1``, are plausible; warn of unused ones."""
        name, count = type(self).__name__, sum(part.targets.numel() for part in parts)
        if (self._given_classes or classes) < 2:
            raise ValueError(
                f"{name}: all targets are class 0; pass class numbers of at "
                "least two classes (num_classes for those that do not occur), or floats for regression."
            )
        if self._given_classes is None and classes > max(_MOST_CLASSES, count):
            raise ValueError(
                f"{name}: class numbers go up to {classes - 1}, but there are {count} targets; number the classes from "
                "0, pass floats for regression, or set num_classes."
            )
        if self._given_classes is not None or (parts[0].targets.ndim > 1 and not parts[0].inputs.is_floating_point()):
            return  # sequences of tokens need not contain all tokens
        used = torch.stack([part.targets.flatten().bincount(minlength=classes) for part in parts]).sum(0)
        if unused := (used == 0).nonzero()[:, 0].tolist():
            warnings.warn(
                f"{name}: class numbers go up to {classes - 1}, so networks have {classes} outputs, but {len(unused)} "
                f"of them ({listed(unused)}) are no target; number the classes from 0, as np.unique(y, "
                f"return_inverse=True)[1] does, or set num_classes to {classes} to keep them.",
                stacklevel=2,
            )

    def _choose_statistics(self, inputs: Tensor) -> tuple[list[float], list[float]] | None:
        if not self._standardize:
            return None
        if not inputs.is_floating_point():
            raise ValueError("standardize applies to floats, but these inputs are tokens; leave it out.")
        rows = inputs.double().transpose(0, 1).flatten(1)
        mean, std = rows.mean(1).tolist(), rows.std(1, correction=0).tolist()
        if 0 in std:
            raise ValueError(
                f"Channel {std.index(0)} is constant over the {len(inputs)} training inputs, so they cannot be "
                "standardized; leave the channel out, or set standardize to false."
            )
        return mean, std


class DatasetDataModule(TensorDataModule):
    """A torch ``Dataset`` of pairs ``(input, target)``, read into memory once.

    Items are tensors, arrays, numbers or images of PIL, all of one shape; random transforms of the data set are applied
    once. The rest is as in :class:`TensorDataModule`. In YAML a data set is a class with its arguments.

    Args:
        dataset: The training data.
        val: Validation data. None: ``val_fraction`` of the training data.
        test: Test data. None: ``test_fraction`` of the training data.
        batch_size: See :class:`TensorDataModule`.
        eval_batch_size: See there.
        val_fraction: See there.
        test_fraction: See there.
        max_samples: See there.
        data_seed: See there.
        standardize: See there.
        num_classes: See there.
        class_names: See there.
        augmentations: See there.

    Raises:
        TypeError: If an item is not a pair of tensors, arrays or numbers.
        ValueError: As :class:`TensorDataModule`.
    """

    location_arguments: ClassVar[tuple[str, ...]] = ("dataset", "val", "test")

    def __init__(
        self,
        dataset: Dataset[Any],
        val: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 500,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        max_samples: int | None = None,
        data_seed: int = 0,
        standardize: bool = False,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        augmentations: list[Augmentation] | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            max_samples=max_samples,
            data_seed=data_seed,
            standardize=standardize,
            num_classes=num_classes,
            class_names=class_names,
            augmentations=augmentations,
        )
        self._given = {"train": dataset, "val": val, "test": test}
        self.setup()

    def load(self) -> tuple[Pair, Pair | None, Pair | None]:
        """Return the items of the data sets, stacked."""
        train, val, test = (None if data is None else _stacked(data, name) for name, data in self._given.items())
        assert train is not None
        return train, val, test


def _checked(augmentations: list[Augmentation] | None) -> tuple[Augmentation, ...]:
    """Check the list of augmentation functions."""
    if augmentations is not None and not (isinstance(augmentations, Sequence) and all(map(callable, augmentations))):
        raise ValueError(
            f"augmentations must be a list of functions of inputs and a generator, got {augmentations!r}; pass the "
            "functions themselves, or in a recipe their paths."
        )
    return tuple(augmentations or ())


def _tensor(values: Any, what: str = "data") -> Tensor:
    """Return values as a tensor; an image of PIL with its channels first, as torchvision does.

    Args:
        values: Tensor, image, array, or nested sequences of numbers, in any byte and memory order.
        what: Name of the values in errors.
    """
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if hasattr(values, "getbands"):
        pixels = torch.from_numpy(np.array(values))
        return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{what} must have one shape for all, got sequences of different lengths; pad them.") from None
    if array.dtype.kind not in "biufc":
        raise ValueError(
            f"{what} must be numbers, got {array.dtype}; convert them, names by np.unique(x, return_inverse=True)[1]."
        )
    if np.ma.is_masked(values):
        raise ValueError(f"{what} must have no masked values; fill them, or remove these inputs.")
    array = array.astype(np.float64 if array.dtype == np.longdouble else array.dtype.newbyteorder("="), copy=False)
    # Memory maps may be larger than the memory: only arrays that torch cannot share are copied.
    return torch.as_tensor(array.copy() if min(array.strides, default=0) < 0 else array)


def _as_split(pair: Any, where: str) -> LabelledInputs:
    """Convert data to the types that networks take, and check them."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"{where} must be a pair (inputs, targets), got {type(pair).__name__}.")
    inputs, targets = (
        _tensor(part, f"{where}: {name}") for name, part in zip(("inputs", "targets"), pair, strict=True)
    )
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        check_dense(tensor, name, where)
        if tensor.is_complex():
            raise ValueError(
                f"{where}: {name} must be real numbers, got {tensor.dtype}; pass real and imaginary parts as two "
                "channels, or their absolute values."
            )
    if inputs.dtype == torch.uint8:
        inputs = inputs / 255
    inputs = inputs.float() if inputs.is_floating_point() or inputs.dtype == torch.bool else inputs.long()
    targets = targets.float() if targets.is_floating_point() else targets.long()
    if not targets.is_floating_point() and targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]  # class numbers in a column
    if targets.is_floating_point() and targets.ndim == 1:
        targets = targets[:, None]  # shape of network outputs; otherwise a loss would broadcast [B] and [B, 1]
    check_tensors(inputs, targets, where)
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if not tensor.isfinite().all():
            raise ValueError(f"{where}: {name} must be finite, got NaN or infinity; remove these inputs.")
    return LabelledInputs(inputs, targets)


def _read(path: str, split: str) -> Pair:
    """Read inputs and targets from a file without running code in it."""
    file = Path(path).expanduser()
    if file.suffix not in (".pt", ".safetensors", ".npz"):
        raise ValueError(f"{split} must be a .pt, .safetensors or .npz file, got {path}.")
    if not file.is_file():
        raise FileNotFoundError(
            f"There is no file {file.absolute()}; pass a .pt, .safetensors or .npz file as {split}."
        )
    found: Mapping[str, Any]
    if file.suffix == ".npz":
        try:
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        except Exception:  # of zipfile, numpy or the refused unpickler
            raise ValueError(f"{file} is damaged, or holds objects other than arrays of numbers.") from None
    else:
        try:
            found = read_weights(file)
        except ValueError:
            raise ValueError(
                f"{file} is damaged, or holds objects other than tensors by name, and is not opened; save a dictionary "
                'of tensors, torch.save({"x": inputs, "y": targets}, path).'
            ) from None
    pair = [next((found[name] for name in names if name in found), None) for names in _NAMES]
    if any(part is None for part in pair):
        raise ValueError(
            f"{file} must hold inputs, named x or inputs, and targets, named y or targets; it holds "
            f"{', '.join(map(str, found)) or 'nothing'}."
        )
    return pair[0], pair[1]


def _stacked(dataset: Any, split: str) -> Pair:
    """Stack all inputs and all targets of a data set."""
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        raise TypeError(
            f"The data set for {split} must have __len__ and __getitem__, or be an IterableDataset, but "
            f"{type(dataset).__name__} has no length."
        )
    items = iter(dataset) if isinstance(dataset, IterableDataset) else map(dataset.__getitem__, range(len(dataset)))
    columns: tuple[list[Tensor], list[Tensor]] = [], []
    for number, item in enumerate(_read_items(items, split)):
        where = f"Item {number} of the data set for {split}"
        if not (isinstance(item, tuple | list) and len(item) == 2 and all(map(_is_data, item))):
            raise TypeError(
                f"{where} must be a pair (input, target) of tensors, arrays or numbers, got {_kinds(item)}; give the "
                "data set a transform that makes it one."
            )
        for column, name, part in zip(columns, ("input", "target"), item, strict=True):
            column.append(_tensor(part, f"{where}: {name}"))
            check_dense(column[-1], name, where)
    for name, column in zip(("inputs", "targets"), columns, strict=True):
        shapes = sorted({tuple(part.shape) for part in column})
        if not shapes:
            raise ValueError(f"The data set for {split} is empty; expected items (input, target).")
        if len(shapes) != 1:
            seen = " and ".join(map(str, shapes[:2]))
            raise ValueError(f"The {name} of the data set for {split} must all have one shape, got {seen}.")
    return torch.stack(columns[0]), torch.stack(columns[1])


def _read_items(items: Iterable[Any], split: str) -> Iterator[Any]:
    """Yield the items of a data set; its own errors are reported with the number of the item."""
    reading = iter(items)
    for number in count():
        try:
            item = next(reading)
        except StopIteration:
            return
        except Exception as error:  # of any kind: it is foreign code
            raise ValueError(
                f"Item {number} of the data set for {split} cannot be read ({type(error).__name__}: {error}); repair "
                "the data set, or leave this item out."
            ) from error
        yield item


def _is_data(part: object) -> bool:
    """Return whether a value can hold numbers: a number, a name, a sequence, an array, a tensor or an image of PIL."""
    return isinstance(part, Number | Sequence) or hasattr(part, "__array__") or hasattr(part, "getbands")


def _kinds(item: Any) -> str:
    if isinstance(item, tuple | list):
        return f"{type(item).__name__} of {', '.join(type(part).__name__ for part in item)}"
    return type(item).__name__
