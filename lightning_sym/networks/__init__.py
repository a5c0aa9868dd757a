"""Networks: plain torch modules with a common base class, without Lightning."""

from lightning_sym.networks.activations import (
    Gaussian,
    IdentityActivation,
    Polynomial,
    is_activation,
    make_activation,
)
from lightning_sym.networks.base import Cuts, Network, NetworkOrModule, WrappedNetwork, architecture_name
from lightning_sym.networks.batch_norm import (
    batch_norms,
    float_average,
    recalibrate_batch_norm,
)
from lightning_sym.networks.cifar_resnet import CIFARPreResNet, CIFARResNet, CIFARResNet18, ResidualCNN
from lightning_sym.networks.compact_transformer import CompactTransformer
from lightning_sym.networks.construction import build
from lightning_sym.networks.lenet import LeNet5
from lightning_sym.networks.multilayer_perceptron import MultiLayerPerceptron
from lightning_sym.networks.myrtle import MyrtleCNN
from lightning_sym.networks.narrowing import narrowed
from lightning_sym.networks.relaxed import RelaxedNetwork
from lightning_sym.networks.torchvision_network import LinearSumsResNet, TorchvisionNetwork
from lightning_sym.networks.vision_transformer import VisionTransformer

__all__ = [
    "CIFARPreResNet",
    "CIFARResNet",
    "CIFARResNet18",
    "CompactTransformer",
    "Cuts",
    "Gaussian",
    "IdentityActivation",
    "LeNet5",
    "LinearSumsResNet",
    "MultiLayerPerceptron",
    "MyrtleCNN",
    "Network",
    "NetworkOrModule",
    "Polynomial",
    "RelaxedNetwork",
    "ResidualCNN",
    "TorchvisionNetwork",
    "VisionTransformer",
    "WrappedNetwork",
    "architecture_name",
    "batch_norms",
    "build",
    "float_average",
    "is_activation",
    "make_activation",
    "narrowed",
    "recalibrate_batch_norm",
]
