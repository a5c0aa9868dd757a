"""Transforms of a whole data set: each image changes once, as determined by its index and a seed."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sym._checks import check_integers, check_known, check_numbers, check_seeds
from lightning_sym._random import generator

Split: TypeAlias = Literal["train", "test"]

# Images per chunk, which bounds the memory of the float32 intermediates (about 100 MB for 3x64x64).
# Results do not depend on it: every image is computed alone.
_CHUNK = 1024


class ImageTransform(ABC):
    """A transform of a whole data set, applied once in ``setup``.

    A subclass implements ``__call__`` and, where they change, :meth:`output_shape`, :meth:`output_classes` and
    :meth:`output_names`. Recipes name the class::

        transforms:
          - class_path: lightning_sym.datamodules.Rotated
            init_args: {max_angle: 90}

    The change of an image may depend on its index and on seeds, not on the number of images: smaller data sets are
    then subsets of larger ones. A subclass stores each constructor argument in an attribute of the same name (as plain
    values: checkpoints store them), or overrides :meth:`arguments`.
    """

    _known: ClassVar[dict[str, type["ImageTransform"]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ImageTransform._known[f"{cls.__module__}.{cls.__qualname__}"] = cls
        if cls.__module__ == __name__:  # recipes name our own classes by the package that re-exports them
            ImageTransform._known[f"lightning_sym.datamodules.{cls.__name__}"] = cls

    @abstractmethod
    def __call__(self, images: Tensor, labels: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Return transformed copies of the images and labels.

        Args:
            images: Shape ``[N, C, H, W]``, uint8.
            labels: Shape ``[N]``, int64.
            split: Half of the source that the images belong to.

        Returns:
            Images of shape ``[N, *output_shape((C, H, W))]``, uint8, and labels of shape ``[N]``, int64.
        """

    def output_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the shape ``(C, H, W)`` of the images made from images of shape ``shape``."""
        return shape

    def output_classes(self, classes: int) -> int:
        """Return the number of classes after the transform, from the number before."""
        return classes

    def output_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the classes after the transform, from the names before."""
        return names

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments, for checkpoints and for the identity of the data."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def config(self) -> dict[str, Any]:
        """Return class path and arguments in the form of a recipe."""
        return {
            "class_path": f"{type(self).__module__}.{type(self).__qualname__}",
            "init_args": self.arguments(),
        }

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "ImageTransform":
        """Build a transform from the result of :meth:`config`.

        Args:
            config: ``class_path`` (only classes that are already imported are found, so a checkpoint cannot
                run foreign code) and ``init_args``.

        Returns:
            The transform.

        Raises:
            ValueError: If no imported subclass has that path.
        """
        path, known = str(config.get("class_path")), ImageTransform._known
        check_known("transform", path, sorted(known))
        return known[path](**dict(config.get("init_args") or {}))


class Rotated(ImageTransform):
    r"""Rotate each image about its centre by its own angle, uniform in ``[-max_angle, max_angle]``.

    Bilinear, zeros outside, truncated to uint8. Positive angles are counter-clockwise.

    Args:
        max_angle: Largest angle, in degrees, > 0 and <= 180.
        train_seed: Seed of the angles of the training images.
        test_seed: Seed of the angles of the test images.

    Raises:
        ValueError: If ``max_angle`` is out of its range.

    References:
        Rotated MNIST and CIFAR-10 of van der Ouderaa et al. (2023), "Learning layer-wise equivariances
        automatically using gradients", arXiv:2310.06131. Distribution and seeds are theirs; the
        generator differs, and with it the angles of single images.
    """

    def __init__(self, max_angle: float = 180.0, train_seed: int = 1, test_seed: int = 0) -> None:
        check_numbers("in (0, 180]", max_angle=max_angle)
        self.max_angle = max_angle
        check_seeds(train_seed=train_seed, test_seed=test_seed)
        self.train_seed, self.test_seed = train_seed, test_seed

    def __call__(self, images: Tensor, labels: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Return the rotated images and the same labels; see :class:`ImageTransform`."""
        draw = _uniform(len(images), "rotated", self.train_seed if split == "train" else self.test_seed)
        return rotate(images, (2 * draw - 1) * self.max_angle), labels


class Translated(ImageTransform):
    """Translate each image by two random shifts, each uniform in ``[-max_shift, max_shift]``, not rounded.

    Bilinear, zeros outside, truncated to uint8.

    Args:
        max_shift: Largest shift along each axis, > 0, in pixels of the image before this transform (put ``Resized``
            before or after accordingly). May be fractional.
        train_seed: Seed of the shifts of the training images.
        test_seed: Seed of the shifts of the test images.

    Raises:
        ValueError: If ``max_shift`` is out of its range.

    References:
        Translated MNIST of van der Ouderaa et al. (2023), arXiv:2310.06131: 8 pixels in the paper; their code
        moves by up to 7.71 pixels on the 28x28 grid, which is ``Translated(7.71)`` before ``Resized(32)``.
    """

    def __init__(self, max_shift: float = 8.0, train_seed: int = 1, test_seed: int = 0) -> None:
        check_numbers("> 0", max_shift=max_shift)
        self.max_shift = max_shift
        check_seeds(train_seed=train_seed, test_seed=test_seed)
        self.train_seed, self.test_seed = train_seed, test_seed

    def __call__(self, images: Tensor, labels: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Return the translated images and the same labels; see :class:`ImageTransform`."""
        draw = _uniform(2 * len(images), "translated", self.train_seed if split == "train" else self.test_seed)
        return translate(images, (2 * draw.view(-1, 2) - 1) * self.max_shift), labels


class Quadrant(ImageTransform):
    """Paste each image into one of the four quadrants of a black canvas, chosen uniformly.

    Quadrant 0 is upper left, 1 upper right, 2 lower left, 3 lower right. With ``size``, the image is resized
    (bilinear, no antialiasing) to ``size / 2`` before it is pasted. For smaller sizes the result equals that of
    resizing the canvas; a change of quadrant is always an exact circular shift by half the canvas.

    Args:
        target: Class to predict: ``"digit"`` keeps the labels, ``"digit_and_quadrant"`` makes them
            ``label + num_classes * quadrant``, four times as many classes. A shift-invariant network predicts the
            quadrant at chance level.
        num_classes: Number of classes before the transform, for ``"digit_and_quadrant"``.
        size: Height and width of the canvas in pixels, even, >= 2. None: twice those of the image.
        train_seed: Seed of the quadrants of the training images.
        test_seed: Seed of the quadrants of the test images.
        jitter: Translates every pasted image by whole pixels, uniform from ``-jitter`` to ``jitter`` along each axis,
            circularly; >= 0 and smaller than a quarter of the canvas, so that the centre stays in its quadrant. Without
            jitter there are only four positions, and the position of a stroke reveals much about the digit.

    Raises:
        ValueError: If an argument is out of its range.

    References:
        van der Ouderaa et al. (2023), arXiv:2310.06131: MNIST on a 56x56 canvas resized to 32x32
        (``Quadrant(size=32)``).
    """

    positions = ("upper left", "upper right", "lower left", "lower right")

    def __init__(
        self,
        target: Literal["digit", "digit_and_quadrant"] = "digit_and_quadrant",
        num_classes: int = 10,
        size: int | None = None,
        train_seed: int = 1001,
        test_seed: int = 1000,
        jitter: int = 0,
    ) -> None:
        check_known("target", target, ("digit", "digit_and_quadrant"))
        check_integers(num_classes=num_classes)
        check_integers(0, jitter=jitter)
        if size is not None and (size < 2 or size % 2):
            raise ValueError(f"size must be an even number of pixels >= 2, or null, got {size}.")
        self.target = target
        self.num_classes = num_classes
        self.size = size
        check_seeds(train_seed=train_seed, test_seed=test_seed)
        self.train_seed, self.test_seed = train_seed, test_seed
        self.jitter = jitter

    def __call__(self, images: Tensor, labels: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Return the canvases and the labels for ``target``; see :class:`ImageTransform`."""
        seed = self.train_seed if split == "train" else self.test_seed
        draw = _uniform(len(images), "quadrant", seed)
        quadrants = (4 * draw).long()
        if self.size is not None:
            images = resize(images, (self.size // 2, self.size // 2))
        canvas = paste(images, quadrants)
        if self.jitter:
            if 4 * self.jitter >= min(canvas.shape[-2:]):
                raise ValueError(
                    f"jitter of Quadrant must be smaller than a quarter of the canvas, which is "
                    f"{canvas.shape[-2]}x{canvas.shape[-1]}, got {self.jitter}."
                )
            shifts = (2 * self.jitter + 1) * _uniform(2 * len(images), "quadrant jitter", seed).view(-1, 2)
            canvas = roll(canvas, shifts.long() - self.jitter)
        return canvas, self._label(labels, quadrants)

    def _label(self, labels: Tensor, quadrants: Tensor) -> Tensor:
        return labels if self.target == "digit" else labels + self.num_classes * quadrants

    def output_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the shape of the canvas."""
        channels, height, width = shape
        return (channels, 2 * height, 2 * width) if self.size is None else (channels, self.size, self.size)

    def output_classes(self, classes: int) -> int:
        """Return the number of classes.

        Raises:
            ValueError: If the number of classes differs from ``num_classes``.
        """
        if self.target == "digit":
            return classes
        if classes != self.num_classes:
            raise ValueError(
                f"Quadrant(num_classes={self.num_classes}) got data with {classes} classes; set num_classes "
                f"to {classes}."
            )
        return 4 * classes

    def output_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names, with the quadrant if ``target`` includes it."""
        if self.target == "digit":
            return names
        return tuple(f"{name} {position}" for position in self.positions for name in names)


class Resized(ImageTransform):
    """Resize each image to a square, bilinear without antialiasing, rounded to uint8.

    Args:
        size: Height and width in pixels, >= 1.

    Raises:
        ValueError: If ``size`` is below 1.
    """

    def __init__(self, size: int = 32) -> None:
        check_integers(size=size)
        self.size = size

    def __call__(self, images: Tensor, labels: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Return the resized images and the same labels; see :class:`ImageTransform`."""
        return resize(images, (self.size, self.size)), labels

    def output_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return ``(C, size, size)``."""
        return (shape[0], self.size, self.size)


def rotate(images: Tensor, angles: Tensor) -> Tensor:
    """Rotate each image about its centre.

    Args:
        images: Shape ``[N, C, H, W]``, uint8.
        angles: Shape ``[N]``, in degrees, counter-clockwise.

    Returns:
        Same shape, uint8: bilinear, zeros outside, truncated.
    """
    radians = torch.deg2rad(angles.double())[:, None, None]
    x, y = _pixel_grid(images)
    cos, sin = radians.cos(), radians.sin()
    # Each output pixel reads from its inverse rotation; the y axis points down.
    return _sample(images, lambda part: (cos[part] * x - sin[part] * y, sin[part] * x + cos[part] * y))


def translate(images: Tensor, shifts: Tensor) -> Tensor:
    """Translate each image.

    Args:
        images: Shape ``[N, C, H, W]``, uint8.
        shifts: Shape ``[N, 2]``, in pixels, down and to the right.

    Returns:
        Same shape, uint8: bilinear, zeros outside, truncated.
    """
    shifts = shifts.double()[:, :, None, None]
    x, y = _pixel_grid(images)
    return _sample(images, lambda part: (x - shifts[part, 1], y - shifts[part, 0]))


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images.

    Args:
        images: Shape ``[N, C, H, W]``, uint8.
        size: New height and width, in pixels.

    Returns:
        Shape ``[N, C, *size]``, uint8: bilinear without antialiasing, rounded to nearest.
    """
    if tuple(images.shape[-2:]) == size:
        return images
    parts = [
        F.interpolate(part.float(), size=size, mode="bilinear", align_corners=False).round().clamp(0, 255)
        for part in (images[first : first + _CHUNK] for first in range(0, len(images), _CHUNK))
    ]
    return torch.cat([part.to(torch.uint8) for part in parts])


def paste(images: Tensor, quadrants: Tensor) -> Tensor:
    """Paste each image into one quadrant of a black canvas twice as high and wide.

    Args:
        images: Shape ``[N, C, H, W]``, uint8.
        quadrants: Shape ``[N]``, int64: 0 upper left, 1 upper right, 2 lower left, 3 lower right.

    Returns:
        Shape ``[N, C, 2*H, 2*W]``, uint8.
    """
    count, channels, height, width = images.shape
    canvas = images.new_zeros(count, channels, 2, height, 2, width)
    # Indices apart from each other put the batch axis first: the left-hand side has shape [N, C, H, W].
    canvas[torch.arange(count), :, quadrants // 2, :, quadrants % 2, :] = images
    return canvas.view(count, channels, 2 * height, 2 * width)


def roll(images: Tensor, shifts: Tensor) -> Tensor:
    """Translate each image by whole pixels, circularly.

    Args:
        images: Shape ``[N, C, H, W]``.
        shifts: Down and to the right. Shape ``[N, 2]``, int64.

    Returns:
        Shape and dtype of ``images``.
    """
    height, width = images.shape[-2:]
    rows = (torch.arange(height) - shifts[:, :1]) % height
    columns = (torch.arange(width) - shifts[:, 1:]) % width
    moved = images.permute(0, 2, 3, 1)[torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None]]
    return moved.permute(0, 3, 1, 2).contiguous()


def _uniform(count: int, *keys: str | int) -> Tensor:
    """Draw ``count`` numbers from [0, 1), float64; a smaller count draws a prefix."""
    return torch.rand(count, generator=generator(*keys), dtype=torch.float64)


def _pixel_grid(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return pixel coordinates relative to the centre: ``x`` of shape ``[W]`` and ``y`` of shape ``[H, 1]``."""
    height, width = images.shape[-2:]
    x = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    y = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
    return x, y[:, None]


def _sample(images: Tensor, places: Callable[[slice], tuple[Tensor, Tensor]]) -> Tensor:
    """Sample each image bilinearly at coordinates ``places(slice)``, x and y in pixels."""
    height, width = images.shape[-2:]
    parts = []
    for first in range(0, len(images), _CHUNK):
        part = slice(first, first + _CHUNK)
        x, y = places(part)  # each [n, H, W] or with sizes 1
        x, y = x + torch.zeros_like(y), y + torch.zeros_like(x)
        # grid_sample wants -1 and 1 at the outer edges of the border pixels.
        grid = torch.stack([2 * x / width, 2 * y / height], dim=-1)
        values = F.grid_sample(images[part].float(), grid.float(), padding_mode="zeros", align_corners=False)
        # Truncation as in the source of these tasks; the small offset keeps float32 rounding from reducing whole
        # values by 1.
        parts.append((values + 1e-2).clamp(0, 255).to(torch.uint8))
    return torch.cat(parts)
