"""Data: images in memory, in fixed splits, in batches for one network or for a population."""

from lightning_sym.datamodules.base import ImageDataModule, LabelledImages
from lightning_sym.datamodules.cifar import CIFAR10DataModule, CIFAR100DataModule
from lightning_sym.datamodules.digits import DigitsDataModule
from lightning_sym.datamodules.loader import TensorLoader
from lightning_sym.datamodules.mnist import FashionMNISTDataModule, MNISTDataModule
from lightning_sym.datamodules.mnist5k import MNIST5kDataModule
from lightning_sym.datamodules.transforms import ImageTransform, Quadrant, Resized, Rotated, Translated

__all__ = [
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "ImageDataModule",
    "ImageTransform",
    "LabelledImages",
    "MNIST5kDataModule",
    "MNISTDataModule",
    "Quadrant",
    "Resized",
    "Rotated",
    "TensorLoader",
    "Translated",
]
