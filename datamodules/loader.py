"""Batches made by indexing inputs held in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from lightning_sym._checks import check_integers, is_integer
from lightning_sym._random import generator
from lightning_sym._text import name_of_callable

# A function of (inputs, generator) that returns inputs. The command line rejects functions with narrower types.
Augmentation: TypeAlias = Callable[[Any, Any], Any]


class EpochSampler(SequentialSampler):
    """Store the epoch that Lightning passes to ``loader.sampler.set_epoch``.

    It is a ``SequentialSampler`` so that Lightning neither replaces it (``overfit_batches``) nor warns that
    an evaluation loader is shuffled; the loader decides about shuffling.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order of the next iteration."""
        self.epoch = epoch


class EpochLoader(ABC):
    """An iterable of batches with a length, which resumes within an epoch from a checkpoint.

    A subclass implements :meth:`epoch_batches`; each batch must depend on the epoch and its index only.

    Args:
        total: Inputs per epoch of all processes together, >= 0; a checkpoint taken within an epoch must agree.
        batch_size: Inputs per batch and process, >= 1; a checkpoint taken within an epoch must agree.
        interleaved: Sharing of an epoch between processes: each takes its part of every global batch (training), or
            one contiguous part.
        drop_last: Leave out the last (global) batch if it is smaller than the others.
        even: If interleaved: give all processes equally many batches; the last one may be empty.
        rank: Index of this process, 0 <= rank < world_size.
        world_size: Number of processes.

    Attributes:
        batch_size: As given.
        sampler: Stores the epoch, see :class:`EpochSampler`.
        batch_sampler: None; Lightning requires the attribute of a loader with a sampler.
    """

    def __init__(
        self,
        total: int,
        batch_size: int,
        *,
        interleaved: bool,
        drop_last: bool = False,
        even: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.batch_size = batch_size
        self.sampler = EpochSampler()
        self.batch_sampler = None
        if interleaved:
            self._first, self._end, self._stride = batch_size * rank, total, batch_size * world_size
        else:
            self._first, self._end = total * rank // world_size, total * (rank + 1) // world_size
            self._stride = batch_size
        count = total if interleaved and (drop_last or even) else max(0, self._end - self._first)
        self._length = count // self._stride if drop_last else -(-count // self._stride)
        self._layout = {"global_batch": batch_size * world_size, "images": total}
        self._position = 0  # number of batches returned in epoch self._epoch
        self._epoch = 0
        self._resume: dict[str, Any] | None = None

    @abstractmethod
    def epoch_batches(self, epoch: int) -> Callable[[int], Any]:
        """Return a function from the index of a batch to the batch."""

    def positions(self, index: int) -> slice:
        """Return the epoch's positions that form a batch of this process."""
        first = min(self._first + index * self._stride, self._end)
        return slice(first, min(first + self.batch_size, self._end))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # A generator reads the epoch when its first batch is requested: Lightning makes the first iterator of a fit
        # before it calls set_epoch.
        return self._batches()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, for use without Lightning."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position within the current epoch, which Lightning stores in checkpoints."""
        return {"epoch": self._epoch, "position": self._position, **self._layout}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a stored position: the next iteration of that epoch yields the remaining batches.

        Iterations of another epoch start at its first batch, as does one of that epoch if it was complete.

        Args:
            state_dict: Result of :meth:`state_dict`, in this process or another.
        """
        self._epoch, self._position = int(state_dict["epoch"]), int(state_dict["position"])
        self._resume = dict(state_dict)

    def _start(self, epoch: int) -> int:
        """Return the index of the first batch to yield, and clear the stored position."""
        resume, self._resume = self._resume, None
        if resume is None or resume["epoch"] != epoch or resume["position"] == 0:
            return 0
        mine, theirs = self._layout, {name: resume.get(name) for name in self._layout}
        if theirs != mine:
            raise ValueError(
                f"Cannot continue within epoch {epoch}: the checkpoint was made with {theirs['images']} "
                f"training inputs in global batches of {theirs['global_batch']}, now there are {mine['images']} "
                f"in batches of {mine['global_batch']}; use the same data, batch size and number of processes, or a "
                "checkpoint from the end of an epoch."
            )
        return int(resume["position"]) % max(1, len(self))

    def _batches(self) -> Iterator[Any]:
        epoch = self.sampler.epoch
        start = self._start(epoch)
        make = self.epoch_batches(epoch)
        for index in range(start, len(self)):
            batch = make(index)
            self._epoch, self._position = epoch, index + 1
            yield batch


class TensorLoader(EpochLoader):
    """Batches of normalised images with random shifts and flips, or of other inputs, for one network or a population.

    An iterable with a length: no worker processes, no per-image Python. A batch is one gather from the uint8
    images, followed by flip and normalisation, on the device of the images. Inputs other than uint8 images are floats
    or tokens of any shape, with targets of any shape; shifts and flips do not apply, but augmentation functions do.

    The order of seed ``s`` in epoch ``e`` is ``torch.randperm(N, generator=generator("order", s, e))``. The
    augmentation of all ``N`` positions of the epoch is drawn from ``generator("augment", s, e)``, always on the CPU;
    functions receive ``generator("augment", s, e, k)`` for global batch ``k``. A batch therefore depends only on
    ``(seed, epoch, position)``: not on the device, the number of processes or the other members.

    Batches are pairs ``(inputs, targets)``; images are float32, their labels int64:

    - ``seeds`` None: the images in their order. Shapes ``[B, C, H, W]`` and ``[B]``.
    - ``seeds`` an int: reshuffled in each epoch. Same shapes.
    - ``seeds`` a sequence of ``M`` seeds: row ``m`` equals the batch of a loader with ``seeds[m]`` alone. Shapes
      ``[M, B, C, H, W]`` and ``[M, B]``.

    Without seeds, process ``r`` of ``W`` gets the ``r``-th of ``W`` contiguous parts, without padding or repetition
    (a part may be empty, and the numbers of batches may differ). With seeds, global batch ``k`` is the positions
    ``k*B*W`` to ``(k+1)*B*W`` of the order, and process ``r`` takes its ``r``-th ``B``. ``W`` processes with batches
    of ``B`` thus process the same inputs as one process with batches of ``B*W``.

    Args:
        inputs: Images of shape ``[N, C, H, W]``, uint8; or floats, or tokens (int64), of shape ``[N, ...]``.
        targets: Class numbers of images, shape ``[N]``, int64; of other inputs also floats, ``[N, ...]``.
        batch_size: Images per batch, member and process, >= 1.
        mean: Mean of each channel (the first axis of an input), subtracted. Length ``C``, in units of pixel values
            scaled to [0, 1], or in the units of floats. None, for floats and tokens: no normalisation.
        std: Standard deviation of each channel, which divides. Length ``C``, > 0, same units. None as ``mean``.
        seeds: None, one seed or one seed per member, see above.
        shift: Largest random shift along each axis, in pixels, 0 <= shift < min(H, W). Each image's integer shifts are
            drawn uniformly from ``[-shift, shift]``. Needs seeds.
        shift_fill: Value of the pixels that a shift exposes: ``"mean"`` (the channel's mean, rounded to the
            nearest uint8) or a number in [0, 255], rounded.
        flip: Mirror each image left to right with probability 1/2. Needs seeds.
        augmentations: Functions called in turn on the inputs of a batch before they are normalised, see
            :func:`augmented`. Each process calls them on the whole global batch and takes its part.
            Not for uint8 images. Needs seeds.
        rank: Index of this process, 0 <= rank < world_size.
        world_size: Number of processes that share the images.
        drop_last: Leave out the last batch if it is smaller than the others (with seeds: the last global
            batch).
        reshuffle: False: every epoch has the order and the augmentation of epoch 0.
        dealt: Without seeds: processes take whole batches in turn instead of contiguous parts, so that the batches
            are the same for any number of processes. All processes have equally many; the last may be empty.
        device: Device of the batches. None: the device of ``inputs``.

    Attributes:
        inputs: The raw inputs of this process, on the device.
        targets: Their targets, on the device.
        sampler: Stores the epoch, see :class:`EpochSampler`.
        batch_sampler: None.

    Raises:
        ValueError: If an argument is out of its range, if there are no inputs, or if ``drop_last`` would
            leave out every image.

    Note:
        The whole epoch's order and shifts are held on the device: 24 bytes per image and member.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        batch_size: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        seeds: Sequence[int] | int | None = None,
        shift: int = 0,
        shift_fill: float | Literal["mean"] = "mean",
        flip: bool = False,
        augmentations: Sequence[Augmentation] = (),
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        reshuffle: bool = True,
        dealt: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        images = inputs.dtype == torch.uint8
        (check_images if images else check_tensors)(inputs, targets)
        check_integers(batch_size=batch_size)
        if images and (mean is None or std is None):
            raise ValueError("Images are normalised by mean and std; got None.")
        if images:
            check_statistics(mean, std, inputs.shape[1])
            check_shift(shift, shift_fill, (inputs.shape[2], inputs.shape[3]))
        elif shift or flip:
            raise ValueError(f"shift and flip are for uint8 images, got {inputs.dtype}; leave them out.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got rank {rank} of world_size {world_size}.")
        if images and augmentations:
            raise ValueError("augmentations are for floats and tokens; uint8 images have shift and flip.")
        if seeds is None and (shift > 0 or flip or augmentations):
            raise ValueError("shift, flip and augmentations are random and need seeds; got seeds=None.")
        if isinstance(seeds, Sequence) and len(seeds) == 0:
            raise ValueError("seeds must hold at least one seed, got an empty sequence.")

        whole = seeds is not None or dealt
        super().__init__(
            len(inputs),
            batch_size,
            interleaved=whole,
            drop_last=drop_last,
            even=dealt,
            rank=rank,
            world_size=world_size,
        )
        if drop_last and len(self) == 0:
            raise ValueError(too_large_batch(batch_size, world_size, len(inputs)))
        device = inputs.device if device is None else torch.device(device)
        self._seeds = seeds if seeds is None or isinstance(seeds, int) else tuple(int(seed) for seed in seeds)
        self._shift, self._flip, self._augmentations = shift, flip, tuple(augmentations)
        self._reshuffle = reshuffle
        own = slice(None) if whole else slice(self._first, self._end)
        self._offset = 0 if whole else self._first
        self.inputs = inputs[own].to(device)
        self.targets = targets[own].to(device)
        self._affine = None if mean is None or std is None else normalisation(mean, std, self.inputs)
        self._windows = self.inputs if shift == 0 else _windows(self.inputs, shift, shift_fill, mean or [])

    def normalize(self, inputs: Tensor) -> Tensor:
        """Normalise inputs as the batches are.

        Args:
            inputs: Shape ``[..., C, H, W]``, uint8, or floats or tokens of the shape of the loader's, on its device.

        Returns:
            ``(images / 255 - mean) / std`` of images, float32; ``(inputs - mean) / std`` of floats, or a copy. Same
            shape.
        """
        return normalised(inputs, self._affine)

    def epoch_batches(self, epoch: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        """Return a function from the index of a batch to the batch."""
        epoch = epoch if self._reshuffle else 0
        draws = self._draw(epoch)
        if draws is not None and self._augmentations:
            return lambda index: self._augmented(index, epoch, draws[0])
        return lambda index: self._batch(self.positions(index), draws)

    def _draw(self, epoch: int) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """Draw order ``[N]``, shifts ``[2, N]`` and flips ``[N]`` of an epoch; a members axis precedes ``N``."""
        if self._seeds is None:
            return None
        seeds = [self._seeds] if isinstance(self._seeds, int) else self._seeds
        count, device = len(self.inputs), self.inputs.device
        order = torch.stack([torch.randperm(count, generator=generator("order", seed, epoch)) for seed in seeds])
        shift = flip = None
        if self._shift or self._flip:  # drawing them takes longer than the order
            random = [generator("augment", seed, epoch) for seed in seeds]
            shift = torch.stack(
                [torch.randint(2 * self._shift + 1, (2, count), generator=one) for one in random], dim=1
            )
            flip = torch.stack([torch.rand(count, generator=one) < 0.5 for one in random])
        if isinstance(self._seeds, int):
            order, shift, flip = order[0], None if shift is None else shift[:, 0], None if flip is None else flip[0]
        return (
            order.to(device),
            shift.to(device) if shift is not None and self._shift else None,
            flip.to(device) if flip is not None and self._flip else None,
        )

    def _batch(
        self, positions: slice, draws: tuple[Tensor, Tensor | None, Tensor | None] | None
    ) -> tuple[Tensor, Tensor]:
        if draws is None:
            own = slice(positions.start - self._offset, positions.stop - self._offset)
            return self.normalize(self.inputs[own]), self.targets[own]
        order, shift, flip = draws
        indices = order[..., positions]
        if shift is None:
            inputs = taken(self.inputs, indices)
        else:
            inputs = self._windows[indices, :, shift[0, ..., positions], shift[1, ..., positions]]
        if flip is not None:
            inputs = torch.where(flip[..., positions, None, None, None], inputs.flip(-1), inputs)
        return self.normalize(inputs), taken(self.targets, indices)

    def _augmented(self, index: int, epoch: int, order: Tensor) -> tuple[Tensor, Tensor]:
        """Return this process's part of a global batch, augmented as a whole so that results ignore the processes."""
        own, first = self.positions(index), index * self._stride
        part = slice(own.start - first, own.stop - first)
        seeds = [self._seeds] if isinstance(self._seeds, int) else self._seeds or ()
        rows = []
        for seed, indices in zip(seeds, order.view(len(seeds), -1)[:, first : first + self._stride], strict=True):
            random = generator("augment", seed, epoch, index)
            rows.append(augmented(self.inputs[indices], self._augmentations, random)[part])
        inputs = rows[0] if isinstance(self._seeds, int) else torch.stack(rows)
        return self.normalize(inputs), self.targets[order[..., own]]


def taken(rows: Tensor, indices: Tensor) -> Tensor:
    """Return ``rows[indices]``, eight times as fast. Shape ``[*indices.shape, *rows.shape[1:]]``."""
    return rows.index_select(0, indices.flatten()).view((*indices.shape, *rows.shape[1:]))


def augmented(inputs: Tensor, augmentations: Sequence[Augmentation], random: torch.Generator) -> Tensor:
    """Apply augmentation functions to a batch, one after another.

    Args:
        inputs: Shape ``[B, ...]``, floats or tokens, before normalisation; may be changed in place.
        augmentations: Each is called as ``augmentation(inputs, random)``, and returns equally many inputs of the same
            shape and type, in the same order.
        random: Generator on the CPU of all their random numbers.

    Returns:
        The result of the last function. Shape and type of ``inputs``.

    Raises:
            ValueError: If a function returns another shape or type.
    """
    for augmentation in augmentations:
        changed = augmentation(inputs, random)
        if not isinstance(changed, Tensor) or (changed.shape, changed.dtype) != (inputs.shape, inputs.dtype):
            kind = type(changed).__name__
            got = f"{changed.dtype} of shape {list(changed.shape)}" if isinstance(changed, Tensor) else f"a {kind}"
            raise ValueError(
                f"The augmentation {name_of_callable(augmentation)} must return inputs like those it got, "
                f"{inputs.dtype} of shape {list(inputs.shape)}, got {got}."
            )
        inputs = changed
    return inputs


def _windows(images: Tensor, shift: int, fill: float | Literal["mean"], mean: Sequence[float]) -> Tensor:
    """Return a view ``[N, C, 2*shift + 1, 2*shift + 1, H, W]`` of all shifts of the images, padded once."""
    count, channels, height, width = images.shape
    fills = [value * 255 for value in mean] if fill == "mean" else [float(fill)] * channels
    values = torch.tensor(fills, dtype=torch.float64).round().clamp(0, 255).to(images)
    padded = images.new_empty(count, channels, height + 2 * shift, width + 2 * shift)
    padded.copy_(values[:, None, None].expand_as(padded))
    padded[..., shift : shift + height, shift : shift + width] = images
    return padded.unfold(2, height, 1).unfold(3, width, 1)


def normalisation(mean: Sequence[float], std: Sequence[float], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the offset to subtract from each channel, and the factor to multiply the difference by.

    Args:
        mean: Mean of each channel, in units of pixel values scaled to [0, 1], or in the units of floats.
        std: Standard deviation of each channel, same units.
        like: Inputs ``[N, C, ...]``, uint8 images or floats, on the device of the result.

    Returns:
        Shape ``[C, 1, ...]`` each, float32.
    """
    unit, ones = 255 if like.dtype == torch.uint8 else 1, [1] * (like.ndim - 2)
    means, stds = (torch.tensor(list(values), dtype=torch.float64).view(-1, *ones) * unit for values in (mean, std))
    return means.float().to(like.device), (1 / stds).float().to(like.device)


def normalised(inputs: Tensor, affine: tuple[Tensor, Tensor] | None) -> Tensor:
    """Normalise inputs for the networks.

    Args:
        inputs: uint8 images, floats or tokens; not changed.
        affine: Result of :func:`normalisation` on the same device; None copies the inputs.

    Returns:
        A new tensor of the same shape.
    """
    if affine is None:
        return inputs.clone()
    mean, scale = affine
    # Two operations, no fused multiply-add, so that a row's bits do not depend on the rest of the batch.
    return (inputs - mean).mul_(scale)


def check_tensors(inputs: Tensor, targets: Tensor, where: str = "inputs") -> None:
    """Check that inputs and targets of any shape match.

    Args:
        inputs: Must be floats or tokens (int64) of shape ``[N, D, ...]``, no size 0.
        targets: Must be int64 or floats of shape ``[N, ...]``.
        where: Name of the data in the message.

    Raises:
            ValueError: If they do not match.
    """
    for name, tensor, least in (("inputs", inputs, 2), ("targets", targets, 1)):
        if not (tensor.is_floating_point() or tensor.dtype == torch.int64) or tensor.ndim < least:
            raise ValueError(
                f"{where}: {name} must be floats or int64 of shape [N, {'D, ' if least == 2 else ''}...], got "
                f"{tensor.dtype} of shape {list(tensor.shape)}."
            )
    if len(inputs) != len(targets):
        raise ValueError(f"{where}: there must be one target per input, got {len(targets)} for {len(inputs)}.")
    if inputs.numel() == 0:
        raise ValueError(f"{where} must not be empty, got shape {list(inputs.shape)}.")


def check_images(images: Tensor, labels: Tensor, where: str = "images") -> None:
    """Check shapes and types of images and labels.

    Args:
        images: Must have shape ``[N, C, H, W]``, uint8, no size 0.
        labels: Must have shape ``[N]``, int64.
        where: Name of the data in the message.

    Raises:
            ValueError: If a shape or type is wrong.
    """
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            f"{where} must be uint8 of shape [N, C, H, W], got {images.dtype} of shape {list(images.shape)}."
        )
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{where}: labels must be int64 of shape [{len(images)}], one per image, "
            f"got {labels.dtype} of shape {list(labels.shape)}."
        )
    if images.numel() == 0:
        raise ValueError(f"{where} must not be empty, got shape {list(images.shape)}.")


def check_statistics(mean: Sequence[float] | None, std: Sequence[float] | None, channels: int) -> None:
    """Check the mean and the standard deviation of the channels; None passes.

    Raises:
        ValueError: If there is not one value per channel, a mean is outside [0, 1] or a deviation outside (0, 1].
    """
    for name, values in (("mean", mean), ("std", std)):
        if values is None:
            continue
        if len(values) != channels:
            raise ValueError(f"{name} must have one value per channel ({channels}), got {len(values)}: {list(values)}.")
        # This form also rejects NaN.
        if not all((0 <= value <= 1) and (name == "mean" or value > 0) for value in values):
            accepted = "[0, 1]" if name == "mean" else "(0, 1]"
            raise ValueError(
                f"{name} must be in {accepted}, in units of pixel values scaled to [0, 1], "
                f"got {list(values)}; divide values in 0-255 units by 255."
            )


def check_shift(shift: int, fill: float | Literal["mean"], size: tuple[int, int]) -> None:
    """Check the random shift and its fill against the size ``(H, W)`` of the images.

    Raises:
        ValueError: If the shift is not an integer in ``[0, min(H, W))`` or the fill neither ``"mean"`` nor a
            number in [0, 255].
    """
    if not is_integer(shift, 0) or shift >= min(size):
        raise ValueError(
            f"shift must be an integer >= 0 and smaller than the image ({size[0]}x{size[1]} pixels), got {shift}."
        )
    if fill != "mean" and (isinstance(fill, str) or not 0 <= fill <= 255):
        raise ValueError(f'shift_fill must be "mean" or a number in [0, 255], got {fill!r}.')


def too_large_batch(batch_size: int, world_size: int, total: int) -> str:
    """Return the message for a batch size larger than the training set."""
    product = f" x {world_size} processes = {batch_size * world_size}" if world_size > 1 else ""
    return (
        f"batch_size {batch_size}{product} is more than the {total} training inputs, and incomplete batches "
        f"are dropped; use a batch_size of at most {total // world_size}."
    )
