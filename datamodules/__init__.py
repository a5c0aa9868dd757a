"""Datamodules: images, tensors of any kind and Gaussian noise, held in memory and batched by index."""

from lightning_sym._exports import exported
from lightning_sym.datamodules.base import ImageDataModule as ImageDataModule
from lightning_sym.datamodules.base import InMemoryDataModule as InMemoryDataModule
from lightning_sym.datamodules.base import InputDataModule as InputDataModule
from lightning_sym.datamodules.base import LabelledImages as LabelledImages
from lightning_sym.datamodules.base import LabelledInputs as LabelledInputs
from lightning_sym.datamodules.broden import BrodenDataModule as BrodenDataModule
from lightning_sym.datamodules.cifar import CIFAR10DataModule as CIFAR10DataModule
from lightning_sym.datamodules.cifar import CIFAR100DataModule as CIFAR100DataModule
from lightning_sym.datamodules.concepts import Concept as Concept
from lightning_sym.datamodules.concepts import ConceptLoader as ConceptLoader
from lightning_sym.datamodules.concepts import ConceptsDataModule as ConceptsDataModule
from lightning_sym.datamodules.diabetes import DiabetesDataModule as DiabetesDataModule
from lightning_sym.datamodules.digits import DigitsDataModule as DigitsDataModule
from lightning_sym.datamodules.gaussian import GaussianInputsDataModule as GaussianInputsDataModule
from lightning_sym.datamodules.loader import EpochLoader as EpochLoader
from lightning_sym.datamodules.loader import TensorLoader as TensorLoader
from lightning_sym.datamodules.mnist import FashionMNISTDataModule as FashionMNISTDataModule
from lightning_sym.datamodules.mnist import MNISTDataModule as MNISTDataModule
from lightning_sym.datamodules.mnist5k import MNIST5kDataModule as MNIST5kDataModule
from lightning_sym.datamodules.tensors import DatasetDataModule as DatasetDataModule
from lightning_sym.datamodules.tensors import TensorDataModule as TensorDataModule
from lightning_sym.datamodules.transforms import ImageTransform as ImageTransform
from lightning_sym.datamodules.transforms import Quadrant as Quadrant
from lightning_sym.datamodules.transforms import Resized as Resized
from lightning_sym.datamodules.transforms import Rotated as Rotated
from lightning_sym.datamodules.transforms import Translated as Translated
from lightning_sym.datamodules.zoo_weights import ZooWeightsDataModule as ZooWeightsDataModule
from lightning_sym.dissection.networks import ConceptBatch as ConceptBatch

__all__ = exported(globals())
