"""The Myrtle CNN."""

from torch import nn

from lightning_sym._checks import check_integers, height_width
from lightning_sym.networks.activations import make_activation
from lightning_sym.networks.base import _SequentialNetwork


class MyrtleCNN(_SequentialNetwork):
    """Four 3x3 convolutions of widths c, 2c, 4c, 8c, max pooling after all but the first, one linear layer.

    The modules are named ``conv1``, ``norm1``, ``activation1``, ``conv2``, ..., ``pool4``, ``final_pool``,
    ``flatten``, ``classifier``. The final pooling takes the maximum over all remaining positions (4x4 for
    32x32 images, 3x3 for 28x28). With ``width=64`` and CIFAR images: 1,557,066 parameters, 1,556,106 without
    batch norm. PyTorch's initialisation.

    Args:
        width: Channels ``c`` of the first convolution, >= 1.
        batch_norm: Normalise before each activation; if False, the convolutions have biases instead.
        constant_width: Give all four convolutions ``width`` channels (the paper's constant-width variant has
            512).
        in_channels: Channels of the images, >= 1.
        image_size: Side of square images, or (height, width), in pixels, >= 8.
        num_classes: Number of outputs ``C``, >= 1.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Godfrey et al. (2022), "On the Symmetries of Deep Learning Models and their Internal Representations",
        arXiv:2205.14258, after a network by D. Page (myrtle.ai).
    """

    def __init__(
        self,
        width: int = 64,
        batch_norm: bool = True,
        constant_width: bool = False,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        num_classes: int = 10,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        check_integers(width=width, in_channels=in_channels, num_classes=num_classes)
        height, wide = height_width(image_size, "image_size")
        if min(height, wide) < 8:
            raise ValueError(f"MyrtleCNN takes images of at least 8x8 pixels, got image_size={image_size!r}.")
        channels = [in_channels, *(width if constant_width else width * 2**layer for layer in range(4))]
        for layer in range(1, 5):
            conv = nn.Conv2d(channels[layer - 1], channels[layer], 3, padding=1, bias=not batch_norm)
            self.add_module(f"conv{layer}", conv)
            if batch_norm:
                self.add_module(f"norm{layer}", nn.BatchNorm2d(channels[layer]))
            self.add_module(f"activation{layer}", make_activation(activation))
            if layer > 1:
                self.add_module(f"pool{layer}", nn.MaxPool2d(2))
        self.final_pool = nn.MaxPool2d((height // 8, wide // 8))
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(channels[-1], num_classes)
