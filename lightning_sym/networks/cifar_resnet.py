"""Residual networks for small images."""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_integers, height_width, is_integer
from lightning_sym.networks.activations import make_activation
from lightning_sym.networks.base import _SequentialNetwork


class SubsampleAndPad(nn.Module):
    """The parameter-free shortcut of option A: subsampling, and zero channels on both sides.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output, >= ``in_channels``. Half of the zero channels precede the input's
            channels (the smaller half, if their number is odd), half follow.
        stride: Step between the kept pixels, >= 1.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (out_channels - in_channels) // 2
        self.after = out_channels - in_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, out_channels, ceil(H / stride), ceil(W / stride)]`` for ``[N, in_channels, H, W]``."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))

    def extra_repr(self) -> str:
        """Return stride and padding, for ``repr``."""
        return f"stride={self.stride}, before={self.before}, after={self.after}"


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm; the input is added before the last activation.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: Stride of the first convolution and of the shortcut.
        shortcut: ``A`` or ``B``, used where the shape changes.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.
        residual_activation: Name of the activation after the sum.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        shortcut: str,
        activation: str,
        residual_activation: str,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.activation1 = make_activation(activation)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.activation2 = make_activation(residual_activation)
        self.shortcut: nn.Module
        if stride == 1 and in_channels == out_channels:
            self.shortcut = nn.Identity()
        elif shortcut == "A":
            self.shortcut = SubsampleAndPad(in_channels, out_channels, stride)
        else:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, out_channels, ceil(H / stride), ceil(W / stride)]`` for ``[N, in_channels, H, W]``."""
        branch = self.norm2(self.conv2(self.activation1(self.norm1(self.conv1(x)))))
        output: Tensor = self.activation2(branch + self.shortcut(x))
        return output


def _stages(widths: Sequence[int], depths: Sequence[int], make: Callable[[int, int, int], nn.Module]) -> nn.Sequential:
    """Make the blocks of all stages from channels before, channels after and stride.

    They stand in one container, so that positions in named_modules() are those of the published networks.
    """
    blocks, channels = nn.Sequential(), widths[0]
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for block in range(depth):
            blocks.append(make(channels, width, 2 if stage > 0 and block == 0 else 1))
            channels = width
    return blocks


class _ResidualNetwork(_SequentialNetwork):
    """One convolution, stages of residual blocks, global average pooling, one linear layer.

    Each stage but the first halves height and width.

    Args:
        widths: Channels of the stages.
        depths: Blocks of the stages.
        shortcut: ``A`` or ``B``.
        in_channels: Channels of the images.
        image_size: Side of the images, or (height, width).
        num_classes: Number of outputs.
        activation: Name of the activation.
        residual_activation: Name of the activation after the sums; default ``activation``.
        stride: Stride of the first convolution.
    """

    def __init__(
        self,
        widths: Sequence[int],
        depths: Sequence[int],
        shortcut: str,
        in_channels: int,
        image_size: int | tuple[int, int],
        num_classes: int,
        activation: str,
        residual_activation: str | None = None,
        stride: int = 1,
    ) -> None:
        super().__init__()
        height_width(image_size, "image_size")  # any size fits, because of the padding
        after_sums = activation if residual_activation is None else residual_activation
        self.conv = nn.Conv2d(in_channels, widths[0], 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        self.activation = make_activation(activation)
        self.blocks = _stages(
            widths, depths, lambda a, b, step: ResidualBlock(a, b, step, shortcut, activation, after_sums)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(widths[-1], num_classes)


class CIFARResNet(_ResidualNetwork):
    """ResNet-20, 32, 44 and 56: residual networks of three stages for CIFAR.

    Stages of widths c, 2c, 4c, each of ``(depth - 2) / 6`` blocks; global average pooling. With the
    defaults and CIFAR images: 269,722 parameters (ResNet-32: 464,154; ResNet-44: 658,586; ResNet-56: 853,018).
    Kaiming-normal weights (fan in, gain of ReLU) in convolutions and the linear layer, PyTorch's initialisation
    otherwise.

    Args:
        depth: 20, 32, 44 or 56: the number of layers with weights, without shortcuts.
        shortcut: Where the shape changes, ``A`` keeps every second pixel and pads zero channels on both sides
            (a quarter of the output's channels on each), ``B`` is a 1x1 convolution with batch norm.
        width: Channels ``c`` of the first stage, >= 1.
        in_channels: Channels of the images, >= 1.
        image_size: Side of square images, or (height, width), in pixels, >= 1.
        num_classes: Number of outputs ``C``, >= 1.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.

    Raises:
        ValueError: If an argument is out of range.

    References:
        He et al. (2016), "Deep Residual Learning for Image Recognition", section 4.2, arXiv:1512.03385. Their option A
        pads the zero channels after the others; padding on both sides, as here, is that of Godfrey et al.
        (arXiv:2205.14258).
    """

    def __init__(
        self,
        depth: Literal[20, 32, 44, 56] = 20,
        shortcut: Literal["A", "B"] = "A",
        width: int = 16,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        num_classes: int = 10,
        activation: str = "relu",
    ) -> None:
        check_integers(width=width, in_channels=in_channels, num_classes=num_classes)
        if depth not in (20, 32, 44, 56):
            raise ValueError(f"depth must be 20, 32, 44 or 56, got {depth!r}.")
        if shortcut not in ("A", "B"):
            raise ValueError(f"shortcut must be 'A' or 'B', got {shortcut!r}.")
        widths, depths = (width, 2 * width, 4 * width), ((depth - 2) // 6,) * 3
        super().__init__(widths, depths, shortcut, in_channels, image_size, num_classes, activation)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)


class CIFARResNet18(_ResidualNetwork):
    """ResNet-18 for small images: a 3x3 first convolution without pooling, then four stages of two blocks.

    Widths c, 2c, 4c, 8c; 1x1 convolution shortcuts (option B); global average pooling. With the
    defaults and CIFAR images: 11,173,962 parameters. PyTorch's initialisation.

    Args:
        width: Channels ``c`` of the first stage, >= 1.
        in_channels: Channels of the images, >= 1.
        image_size: Side of square images, or (height, width), in pixels, >= 1.
        num_classes: Number of outputs ``C``, >= 1.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.

    Raises:
        ValueError: If an argument is out of range.

    References:
        He et al. (2016), "Deep Residual Learning for Image Recognition", arXiv:1512.03385, with the usual first
        layer for CIFAR, as in Godfrey et al. (2022), arXiv:2205.14258.
    """

    def __init__(
        self,
        width: int = 64,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        num_classes: int = 10,
        activation: str = "relu",
    ) -> None:
        check_integers(width=width, in_channels=in_channels, num_classes=num_classes)
        widths = (width, 2 * width, 4 * width, 8 * width)
        super().__init__(widths, (2, 2, 2, 2), "B", in_channels, image_size, num_classes, activation)


class PreActivationBlock(nn.Module):
    """Batch norm, activation and a 3x3 convolution, twice; the input is added after them, without an activation.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: Stride of the first convolution, and of the 1x1 convolution on the input where the shape changes.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, activation: str) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.activation1 = make_activation(activation)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.activation2 = make_activation(activation)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, out_channels, ceil(H / stride), ceil(W / stride)]`` for ``[N, in_channels, H, W]``."""
        branch = self.conv2(self.activation2(self.norm2(self.conv1(self.activation1(self.norm1(x))))))
        output: Tensor = branch + self.shortcut(x)
        return output


class CIFARPreResNet(_SequentialNetwork):
    """PreResNet-8, 14, 20 and so on: residual networks of three stages for CIFAR, with activations before convolutions.

    Stages of widths c, 2c, 4c, each of ``(depth - 2) / 6`` blocks; then batch norm, activation, global average pooling
    and a linear layer. No activation acts on the sums of a stage. Where the shape changes, the input passes a 1x1
    convolution without batch norm. With the defaults and CIFAR images: 272,282 parameters. Kaiming-normal weights (fan
    out) in convolutions, PyTorch's initialisation otherwise.

    Args:
        depth: Number of layers with weights, without shortcuts: 8, 14, 20, ...
        width: Channels ``c`` of the first stage, >= 1.
        in_channels: Channels of the images, >= 1.
        image_size: Side of square images, or (height, width), in pixels, >= 1.
        num_classes: Number of outputs ``C``, >= 1.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.

    Raises:
        ValueError: If an argument is out of range.

    References:
        He et al. (2016), "Identity Mappings in Deep Residual Networks", arXiv:1603.05027, as in the code of Garipov et
        al. (2018), arXiv:1802.10026.
    """

    def __init__(
        self,
        depth: int = 20,
        width: int = 16,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        num_classes: int = 10,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        check_integers(width=width, in_channels=in_channels, num_classes=num_classes)
        if not is_integer(depth, 8) or (depth - 2) % 6:
            raise ValueError(f"depth must be 8 or more by a multiple of 6, as 20, got {depth!r}.")
        height_width(image_size, "image_size")  # any size fits, because of the padding
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        widths, depths = (width, 2 * width, 4 * width), ((depth - 2) // 6,) * 3
        self.blocks = _stages(widths, depths, lambda a, b, step: PreActivationBlock(a, b, step, activation))
        self.norm = nn.BatchNorm2d(widths[-1])
        self.activation = make_activation(activation)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")


class ResidualCNN(_ResidualNetwork):
    """A residual network of any size, with a separate activation, or none, on residual outputs.

    The modules are ``conv``, ``norm``, ``activation``, the blocks ``blocks.0``, ``blocks.1``, ..., each with
    ``activation1`` inside and ``activation2`` after the sum, then ``pool``, ``flatten``, ``classifier``. PyTorch's
    initialisation. Option B shortcuts; each stage but the first halves height and width.

    Args:
        widths: Channels of the stages, each >= 1.
        depths: Blocks of the stages, each >= 1; as many as widths.
        stride: Step of the first convolution, in pixels, >= 1.
        residual_activation: Activation after the sums; ``"identity"`` for none. None: as ``activation``.
        in_channels: Channels of the images, >= 1.
        image_size: Side of square images, or (height, width), in pixels, >= 1.
        num_classes: Number of outputs ``C``, >= 1.
        activation: A name that :func:`lightning_sym.networks.make_activation` takes.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 6, dissect a ResNet-50 without ReLU on residual outputs.
    """

    def __init__(
        self,
        widths: Sequence[int] = (32,),
        depths: Sequence[int] = (2,),
        stride: int = 2,
        residual_activation: str | None = None,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 32,
        num_classes: int = 10,
        activation: str = "relu",
    ) -> None:
        check_integers(stride=stride, in_channels=in_channels, num_classes=num_classes)
        for name, sizes in (("widths", widths), ("depths", depths)):
            if not sizes or not all(is_integer(size) for size in sizes) or len(sizes) != len(widths):
                raise ValueError(f"{name} must be one integer >= 1 for each stage, got {list(sizes)}.")
        super().__init__(
            widths, depths, "B", in_channels, image_size, num_classes, activation, residual_activation, stride
        )
