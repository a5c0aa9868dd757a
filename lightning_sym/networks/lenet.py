"""LeNet-5."""

from torch import nn

from lightning_sym._checks import check_integers, height_width
from lightning_sym.networks.activations import make_activation
from lightning_sym.networks.base import _SequentialNetwork


class LeNet5(_SequentialNetwork):
    """LeNet-5 in its modern form: two 5x5 convolutions with max pooling, three linear layers.

    Widths 6, 16, 120, 84. The first convolution has no padding for 32x32 images and padding 2 for 28x28 images,
    so that both have the same parameters: 61,706 for one channel and ten classes. Without padding on 28x28 images
    there are fewer: 43,661 for one channel and one output. PyTorch's initialisation.

    Args:
        in_channels: Channels of the images, >= 1.
        image_size: 28 or 32 (or (28, 28), (32, 32)), in pixels.
        num_classes: Number of outputs ``C``, >= 1.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.
        padding: Padding of the first convolution, 0 or 2 pixels. None: 2 for 28x28 images, 0 for 32x32.

    Raises:
        ValueError: If an argument is out of range.

    References:
        LeCun et al. (1998), "Gradient-based learning applied to document recognition". Modern differences: max pooling
        without weights, all connections between the channels, a linear output layer, ReLU.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | tuple[int, int] = 28,
        num_classes: int = 10,
        activation: str = "relu",
        padding: int | None = None,
    ) -> None:
        super().__init__()
        check_integers(in_channels=in_channels, num_classes=num_classes)
        size = height_width(image_size, "image_size")
        if size not in ((28, 28), (32, 32)):
            raise ValueError(f"LeNet5 takes images of 28x28 or 32x32 pixels, got image_size={image_size!r}.")
        if padding is None:
            padding = 2 if size == (28, 28) else 0
        if padding not in (0, 2):
            raise ValueError(f"padding must be 0 or 2 (null: as the image size requires), got {padding!r}.")
        side = (size[0] + 2 * padding - 12) // 4  # after two convolutions and two poolings
        self.conv1 = nn.Conv2d(in_channels, 6, 5, padding=padding)
        self.activation1 = make_activation(activation)
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.activation2 = make_activation(activation)
        self.pool2 = nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.linear1 = nn.Linear(16 * side * side, 120)
        self.activation3 = make_activation(activation)
        self.linear2 = nn.Linear(120, 84)
        self.activation4 = make_activation(activation)
        self.classifier = nn.Linear(84, num_classes)
