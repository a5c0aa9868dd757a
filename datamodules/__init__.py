"""Datamodules: images, tensors of any kind and Gaussian noise, held in memory and batched by index."""

from lightning_sym.datamodules.base import (
    ImageDataModule,
    InMemoryDataModule,
    InputDataModule,
    LabelledImages,
    LabelledInputs,
)
from lightning_sym.datamodules.broden import BrodenDataModule
from lightning_sym.datamodules.cifar import CIFAR10DataModule, CIFAR100DataModule
from lightning_sym.datamodules.concepts import Concept, ConceptLoader, ConceptsDataModule
from lightning_sym.datamodules.diabetes import DiabetesDataModule
from lightning_sym.datamodules.digits import DigitsDataModule
from lightning_sym.datamodules.gaussian import GaussianInputsDataModule
from lightning_sym.datamodules.loader import EpochLoader, TensorLoader
from lightning_sym.datamodules.mnist import FashionMNISTDataModule, MNISTDataModule
from lightning_sym.datamodules.mnist5k import MNIST5kDataModule
from lightning_sym.datamodules.tensors import DatasetDataModule, TensorDataModule
from lightning_sym.datamodules.transforms import ImageTransform, Quadrant, Resized, Rotated, Translated
from lightning_sym.datamodules.zoo_weights import ZooWeightsDataModule
from lightning_sym.dissection.networks import ConceptBatch

__all__ = [
    "BrodenDataModule",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "Concept",
    "ConceptBatch",
    "ConceptLoader",
    "ConceptsDataModule",
    "DatasetDataModule",
    "DiabetesDataModule",
    "DigitsDataModule",
    "EpochLoader",
    "FashionMNISTDataModule",
    "GaussianInputsDataModule",
    "ImageDataModule",
    "ImageTransform",
    "InMemoryDataModule",
    "InputDataModule",
    "LabelledImages",
    "LabelledInputs",
    "MNIST5kDataModule",
    "MNISTDataModule",
    "Quadrant",
    "Resized",
    "Rotated",
    "TensorDataModule",
    "TensorLoader",
    "Translated",
    "ZooWeightsDataModule",
]
