"""Networks: plain torch modules with a common base class, without Lightning."""

from lightning_sym._exports import exported
from lightning_sym.networks.activations import Gaussian as Gaussian
from lightning_sym.networks.activations import IdentityActivation as IdentityActivation
from lightning_sym.networks.activations import Polynomial as Polynomial
from lightning_sym.networks.activations import is_activation as is_activation
from lightning_sym.networks.activations import make_activation as make_activation
from lightning_sym.networks.base import Cuts as Cuts
from lightning_sym.networks.base import Network as Network
from lightning_sym.networks.base import NetworkOrModule as NetworkOrModule
from lightning_sym.networks.base import WrappedNetwork as WrappedNetwork
from lightning_sym.networks.base import architecture_name as architecture_name
from lightning_sym.networks.batch_norm import batch_norms as batch_norms
from lightning_sym.networks.batch_norm import float_average as float_average
from lightning_sym.networks.batch_norm import recalibrate_batch_norm as recalibrate_batch_norm
from lightning_sym.networks.cifar_resnet import CIFARPreResNet as CIFARPreResNet
from lightning_sym.networks.cifar_resnet import CIFARResNet as CIFARResNet
from lightning_sym.networks.cifar_resnet import CIFARResNet18 as CIFARResNet18
from lightning_sym.networks.cifar_resnet import ResidualCNN as ResidualCNN
from lightning_sym.networks.compact_transformer import CompactTransformer as CompactTransformer
from lightning_sym.networks.construction import build as build
from lightning_sym.networks.lenet import LeNet5 as LeNet5
from lightning_sym.networks.multilayer_perceptron import MultiLayerPerceptron as MultiLayerPerceptron
from lightning_sym.networks.myrtle import MyrtleCNN as MyrtleCNN
from lightning_sym.networks.narrowing import narrowed as narrowed
from lightning_sym.networks.relaxed import RelaxedNetwork as RelaxedNetwork
from lightning_sym.networks.torchvision_network import LinearSumsResNet as LinearSumsResNet
from lightning_sym.networks.torchvision_network import TorchvisionNetwork as TorchvisionNetwork
from lightning_sym.networks.vision_transformer import VisionTransformer as VisionTransformer

__all__ = exported(globals())
