"""Fully connected networks."""

from collections.abc import Sequence

from torch import nn

from lightning_sym._checks import check_integers, height_width
from lightning_sym.networks.activations import make_activation
from lightning_sym.networks.base import _SequentialNetwork


class MultiLayerPerceptron(_SequentialNetwork):
    """Flatten, then linear layers with an activation after each but the last.

    The modules are named ``flatten``, ``linear1``, ``activation1``, ``linear2``, ..., ``classifier``. PyTorch's
    initialisation.

    Args:
        widths: Hidden units of each layer, each >= 1. Empty for a linear classifier.
        in_channels: Channels of the images, >= 1.
        image_size: Side of square images, or (height, width), in pixels, >= 1.
        num_classes: Number of outputs ``C``, >= 1.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.
        bias: Whether the linear layers have biases.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> MultiLayerPerceptron(widths=[32], image_size=8)(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        widths: Sequence[int] = (512, 512, 512),
        in_channels: int = 1,
        image_size: int | tuple[int, int] = 28,
        num_classes: int = 10,
        activation: str = "relu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_integers(in_channels=in_channels, num_classes=num_classes)
        if not isinstance(widths, Sequence) or isinstance(widths, str):
            raise ValueError(f"widths must be a list of integers, got {widths!r}.")
        check_integers(**{f"widths[{index}]": width for index, width in enumerate(widths)})
        height, width = height_width(image_size, "image_size")
        self.flatten = nn.Flatten()
        sizes = [in_channels * height * width, *widths]
        for layer in range(1, len(sizes)):
            self.add_module(f"linear{layer}", nn.Linear(sizes[layer - 1], sizes[layer], bias=bias))
            self.add_module(f"activation{layer}", make_activation(activation))
        if not widths:
            make_activation(activation)  # reject a wrong name also without hidden layers
        self.classifier = nn.Linear(sizes[-1], num_classes, bias=bias)
