"""Networks that tests of several folders go through, and what cutting a network must not change."""

import copy
import functools

import torch
import torchvision
from torch import Tensor, nn

from lightning_sym.networks import (
    CIFARResNet,
    CIFARResNet18,
    CompactTransformer,
    LeNet5,
    MultiLayerPerceptron,
    MyrtleCNN,
    Network,
    ResidualCNN,
    TorchvisionNetwork,
    VisionTransformer,
)

# Makers and image shapes; the widths and sizes are the smallest that reach every branch.
OURS = {
    "perceptron": (lambda: MultiLayerPerceptron([5, 4, 3], image_size=3), (1, 3, 3)),
    "perceptron_no_bias": (lambda: MultiLayerPerceptron([4], image_size=4, bias=False), (1, 4, 4)),
    "lenet_28": (lambda: LeNet5(activation="tanh"), (1, 28, 28)),
    "lenet_28_no_padding": (lambda: LeNet5(padding=0), (1, 28, 28)),
    "lenet_32": (lambda: LeNet5(in_channels=3, image_size=32), (3, 32, 32)),
    "myrtle": (lambda: MyrtleCNN(width=2, image_size=12), (3, 12, 12)),
    "myrtle_no_bn": (lambda: MyrtleCNN(2, batch_norm=False, image_size=8, activation="sigmoid"), (3, 8, 8)),
    "myrtle_constant": (lambda: MyrtleCNN(3, constant_width=True, image_size=(9, 8)), (3, 9, 8)),
    "resnet20_a": (lambda: CIFARResNet(width=2, activation="leaky_relu(0.1)"), (3, 8, 8)),
    "resnet20_b": (lambda: CIFARResNet(width=2, shortcut="B"), (3, 8, 8)),
    "resnet32_identity": (lambda: CIFARResNet(32, width=1, activation="identity"), (3, 8, 8)),
    "resnet44": (lambda: CIFARResNet(44, width=1, activation="silu"), (3, 8, 8)),
    "resnet56": (lambda: CIFARResNet(56, width=1, activation="gaussian"), (3, 8, 8)),
    "residual_cnn": (lambda: ResidualCNN((2, 3), (1, 1), residual_activation="identity"), (3, 8, 8)),
    "cifar_resnet18": (lambda: CIFARResNet18(width=2), (3, 8, 8)),
    "cct": (lambda: CompactTransformer(1, 8, variant="2/3x2", width=4), (1, 8, 8)),
    "cct_sinusoidal": (lambda: CompactTransformer(3, (8, 6), 5, "2/2x1", 4, 2, 1.5, "sinusoidal", "relu"), (3, 8, 6)),
    "vit": (lambda: VisionTransformer(1, 4, 5, 2, 8, 2, 2, pool="class", dropout=0.1), (1, 4, 4)),
    "vit_modern": (
        lambda: VisionTransformer(
            *(3, (4, 6), 5, 2, 16, 2, 4, 2, 1.5, "rms", "rotary", "swiglu", "sequence"), bias=False, layer_scale=0.1
        ),
        (3, 4, 6),
    ),
}
TORCHVISION = {
    "tv_resnet18": (lambda: Network.wrap(functools.partial(torchvision.models.resnet18, num_classes=10)), (3, 32, 32)),
    "tv_mobilenet_v2": (lambda: TorchvisionNetwork("mobilenet_v2", image_size=32), (3, 32, 32)),
    "tv_squeezenet": (lambda: Network.wrap(torchvision.models.squeezenet1_1), (3, 32, 32)),
}


@torch.no_grad()
def check_every_cut(network: Network, x: Tensor) -> None:
    """Check that the halves of every cut are the network, to the last bit, in both modes, also the second one twice."""
    for training in (False, True):
        network.train(training)
        start = copy.deepcopy(network.state_dict())

        def run(module: nn.Module, *inputs: object) -> Tensor:
            torch.manual_seed(1)  # dropout
            return module(*inputs)

        expected, end = run(network, x), copy.deepcopy(network.state_dict())
        for site in network.sites():
            network.load_state_dict(start)
            lower, upper = network.split(site)
            assert lower.training is upper.training is training
            values = run(lower, x)
            random = torch.get_rng_state()
            assert torch.equal(upper(values), expected), site
            for name, value in network.state_dict().items():  # running statistics of batch norms
                assert torch.equal(value, end[name]), (site, name)
            if not training:
                torch.set_rng_state(random)
                assert torch.equal(upper(values), expected), f"{site}: the upper half changed what it was given"
            names = {name for half in (lower, upper) for name, _ in half.named_parameters()}
            assert names == {name for name, _ in network.named_parameters()}
        network.load_state_dict(start)


class Logits(nn.Module):
    """A language model whose only output are logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens).logits


class Words(nn.Module):
    """A mean of the words' vectors."""

    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.output(self.embedding(tokens).mean(1))
