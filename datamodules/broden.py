"""A reader for concept data sets in the folder format of Broden."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from lightning_sym._checks import check_integers, check_known, height_width
from lightning_sym._text import unknown
from lightning_sym.datamodules.base import InputDataModule
from lightning_sym.datamodules.concepts import Concept, ConceptLoader
from lightning_sym.datamodules.loader import check_statistics, normalisation, normalised
from lightning_sym.dissection.networks import ConceptBatch


class BrodenDataModule(InputDataModule):
    """Images with concept masks, in the folder format of Broden, the data set of network dissection.

    The folder holds ``index.csv`` (one row per image: its path below ``images/``, its split, the size ``sh``, ``sw`` of
    its masks, and its annotations for each category), ``category.csv`` (the names of the categories) and for each
    category ``c_<category>.csv`` (numbers and names of its concepts). An annotation is a list, separated by semicolons,
    of numbers (concepts of the whole image) and paths of PNG files below ``images/``. Each pixel of a PNG file encodes
    a number, ``red + 256 * green``; 0 is no concept. An image with an entry for a category is annotated for all
    concepts of that category.

    The data have no training set; they serve :class:`~lightning_sym.tasks.DissectionTask`.

    Args:
        root: The folder.
        image_size: Side, or (height, width), to which images are resized bilinearly, in pixels.
        num_classes: Number of outputs of networks for these images, >= 1.
        categories: Names of the categories to use; None for all.
        split: Name of the split in ``index.csv``; None for all images.
        eval_batch_size: Images per batch and process, >= 1. The masks of a batch take images times concepts times
            pixels per mask bytes.
        max_samples: Largest number of images, >= 1; keeps the first ones. None for all.
        mean: Mean of each channel, in units of pixel values scaled to [0, 1]; default ImageNet's.
        std: Standard deviation of each channel, same units; default ImageNet's.

    Attributes:
        mean: As given, a list.
        std: As given, a list.
        concepts: The concepts, in the order of the masks; available after ``setup``.
        concept_classes: 0: the images have no classes.

    Raises:
        ValueError: If an argument is out of its range.

    References:
        Bau et al. (2017), "Network Dissection", arXiv:1704.05796, section 2.1, and the files of its data set.
    """

    location_arguments: ClassVar[tuple[str, ...]] = ("root",)

    def __init__(
        self,
        root: str = "data/broden1_224",
        image_size: int | tuple[int, int] = 224,
        num_classes: int = 1000,
        categories: Sequence[str] | None = None,
        split: str | None = "val",
        eval_batch_size: int = 32,
        max_samples: int | None = None,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
    ) -> None:
        super().__init__()
        check_integers(num_classes=num_classes, eval_batch_size=eval_batch_size)
        check_integers(optional=True, max_samples=max_samples)
        self._size = height_width(image_size, "image_size")
        check_statistics(mean, std, 3)
        self.save_hyperparameters()
        self.input_shape = (3, *self._size)
        self.num_classes = num_classes
        self.concepts: tuple[Concept, ...] = ()
        self.concept_classes = 0
        self._root = Path(root).expanduser().absolute()
        self._categories, self._split, self._max_samples = categories, split, max_samples
        self._batch_size = eval_batch_size
        self.mean, self.std = list(mean), list(std)
        self._rows: list[dict[str, str]] = []
        self._places: dict[str, dict[int, int]] = {}  # by category and number: the concept's index

    def setup(self, stage: str | None = None) -> None:
        """Read the tables; images and masks are read on demand.

        Args:
            stage: Ignored.

        Raises:
            FileNotFoundError: If a table is missing; the message names it and the remedy.
            ValueError: If a table lacks a column or a category, or no image remains.
        """
        if self._rows:
            return
        known = [row["name"] for row in self._table("category.csv", "name")]
        categories = list(known if self._categories is None else self._categories)
        for category in categories:
            check_known("category", category, known)
        concepts: list[Concept] = []
        for category in categories:
            self._places[category] = {}
            for row in self._table(f"c_{category}.csv", "number", "name"):
                self._places[category][self._number(row["number"], f"c_{category}.csv")] = len(concepts)
                concepts.append(Concept(row["name"], category))
        rows = self._table("index.csv", "image", "split", "sh", "sw", *categories)
        splits = sorted({row["split"] for row in rows})
        if self._split is not None and self._split not in splits:
            raise ValueError(unknown("split", self._split, splits))
        chosen = [row for row in rows if self._split in (None, row["split"])][: self._max_samples]
        if not chosen or not concepts:
            raise ValueError(f"{self._root} has no images or no concepts; look at its index.csv and category.csv.")
        sizes = {(row["sh"], row["sw"]) for row in chosen}
        if len(sizes) > 1:
            raise ValueError(
                f"{self._root / 'index.csv'} has masks of sizes {sorted(sizes)}; expected one size for all."
            )
        self.concepts, self._rows = tuple(concepts), chosen

    def _table(self, name: str, *columns: str) -> list[dict[str, str]]:
        path = self._root / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is not there; set root to a folder in Broden's format, with index.csv, category.csv, a "
                "c_<category>.csv for each category, and images."
            )
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(
                    f"{path} has no column {', '.join(missing)}, but {', '.join(reader.fieldnames or ())}; expected a "
                    "table in Broden's format."
                )
            return list(reader)

    def _number(self, text: str, where: str) -> int:
        if not text.strip().isdecimal():
            raise ValueError(f"{self._root / where} has {text!r} where the number of a concept is expected.")
        return int(text)

    def identity(self) -> dict[str, Any]:
        """Identify the data by plain values that can be written as JSON; reads no image."""
        self.setup()
        found = self._described({"images": len(self._rows)})
        return {
            **found,
            "concepts": len(self.concepts),
            "first": self._rows[0]["image"],
            "last": self._rows[-1]["image"],
        }

    def concept_dataloader(self) -> ConceptLoader:
        """Return the images with their masks, each on exactly one process."""
        self.setup()
        place = self._place()
        device = place.pop("device")

        def make(own: slice) -> ConceptBatch:
            rows = self._rows[own]
            images = torch.stack([self._image(row["image"]) for row in rows]).to(device)
            found = [self._annotation(row) for row in rows]
            masks, annotated = (torch.stack(part).to(device) for part in zip(*found, strict=True))
            return ConceptBatch(normalised(images, normalisation(self.mean, self.std, images)), masks, annotated, None)

        return ConceptLoader(len(self._rows), self._batch_size, make, **place)

    def curvature_dataloader(self) -> ConceptLoader:
        """Return the loader of all images: there is no training set."""
        return self.concept_dataloader()

    train_dataloader = val_dataloader = test_dataloader = concept_dataloader

    def _opened(self, name: str, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """Return the pixels of an image as red, green and blue, ``[H, W, 3]``."""
        path = self._root / "images" / name
        try:
            with Image.open(path) as image:
                whole = image.convert("RGB")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path}, named in {self._root / 'index.csv'}, does not exist; unpack the data set again."
            ) from error
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{path} cannot be read as an image; unpack the data set again.") from error
        if size is not None and whole.size != size[::-1]:
            whole = whole.resize(size[::-1], Image.Resampling.BILINEAR)
        return np.array(whole)

    def _image(self, name: str) -> Tensor:
        return torch.from_numpy(self._opened(name, self._size)).permute(2, 0, 1)

    def _annotation(self, row: dict[str, str]) -> tuple[Tensor, Tensor]:
        """Return an image's masks, bool ``[concepts, H, W]``, and the annotated concepts, bool ``[concepts]``."""
        height, width = (self._number(row[name], "index.csv") for name in ("sh", "sw"))
        masks = torch.zeros(len(self.concepts), height, width, dtype=torch.bool)
        annotated = torch.zeros(len(self.concepts), dtype=torch.bool)
        for category, places in self._places.items():
            entries = [entry for entry in (row[category] or "").split(";") if entry]
            if entries:
                annotated[list(places.values())] = True
            for entry in entries:
                if entry.isdecimal():
                    if int(entry) in places:
                        masks[places[int(entry)]] = True
                    continue
                pixels = self._opened(entry).astype(np.int64)
                numbers = pixels[..., 0] + 256 * pixels[..., 1]
                if numbers.shape != (height, width):
                    raise ValueError(
                        f"{self._root / 'images' / entry} has {numbers.shape[0]} x {numbers.shape[1]} pixels, but "
                        f"index.csv states {height} x {width}; unpack the data set again."
                    )
                for number in np.unique(numbers).tolist():
                    if number in places:
                        masks[places[number]] |= torch.from_numpy(numbers == number)
        return masks, annotated
