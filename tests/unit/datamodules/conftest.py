from collections.abc import Callable

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from lightning_sym.datamodules import ImageDataModule, LabelledImages, MNIST5kDataModule


@pytest.fixture(scope="session")
def mnist5k() -> MNIST5kDataModule:
    data = MNIST5kDataModule()
    data.setup("fit")
    return data


def numbered_images(count: int, shape: tuple[int, int, int] = (2, 5, 6), seed: int = 0) -> LabelledImages:
    """Random images whose first pixel says their number (mod 256), and whose label is their number mod 10."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    images[:, 0, 0, 0] = torch.arange(count)
    return LabelledImages(images, torch.arange(count) % 10)


class TinyDataModule(ImageDataModule):
    """Forty training and twelve test images; the number of an image is its first pixel."""

    source_shape = (2, 5, 6)
    source_classes = 10
    loads = 0

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        self.loads += 1
        return numbered_images(40), numbered_images(12, seed=1)


class Recorder(LightningModule):
    """A network with one weight that remembers the raw numbers of the images it sees."""

    def __init__(self, data: ImageDataModule) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.data = data
        self.seen: list[tuple[int, list[int]]] = []
        self.evaluated: list[int] = []

    def numbers(self, images: Tensor) -> list[int]:
        mean, std = self.data.mean[0], self.data.std[0]
        return ((images[..., 0, 0, 0] * std + mean) * 255).round().long().tolist()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, self.numbers(batch[0])))
        return self.layer(batch[0].mean().view(1, 1)).sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluated += self.numbers(batch[0])

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return batch[1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def tiny() -> type[TinyDataModule]:
    return TinyDataModule


@pytest.fixture
def recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture
def numbered() -> Callable[..., LabelledImages]:
    return numbered_images
