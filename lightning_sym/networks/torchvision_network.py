"""The classification networks of torchvision by name, and residual ones without ReLU after the sums."""

import torch
from torch import nn
from torch.func import functional_call

from lightning_sym._checks import check_integers, check_known, height_width
from lightning_sym.networks.base import _ModuleHolder
from lightning_sym.networks.modes import evaluating


class TorchvisionNetwork(_ModuleHolder):
    """A classification network of torchvision with random weights, wrapped as by :meth:`Network.wrap`.

    Names of parameters and sites begin with ``module.``; :class:`lightning_sym.networks.WrappedNetwork` defines names
    of repeated calls and functional activations. Auxiliary classifiers are removed.

    Args:
        model: Name in ``torchvision.models``, for example ``resnet18`` or ``vgg11_bn``.
        in_channels: Channels of the images, >= 1. If not 3, the first convolution is replaced by one with PyTorch's
            initialisation.
        image_size: Side of square images, or (height, width), in pixels. One image is passed through the network on
            the meta device, without computation, to reject unsupported sizes.
        num_classes: Number of outputs ``C``, >= 1.

    Raises:
        ValueError: If torchvision has no such classification network, an argument is out of range, or the
            network cannot take images of that size.
    """

    def __init__(
        self,
        model: str,
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 224,
        num_classes: int = 10,
    ) -> None:
        from torchvision import models  # takes a second, so imported only where needed

        check_integers(in_channels=in_channels, num_classes=num_classes)
        size = height_width(image_size, "image_size")
        names = models.list_models(module=models)
        check_known("torchvision network", model, names)
        # These two have auxiliary outputs in train mode, and warn without init_weights.
        extra = {"aux_logits": False, "init_weights": True} if model in ("googlenet", "inception_v3") else {}
        module = models.get_model(model, weights=None, num_classes=num_classes, **extra)
        if in_channels != 3:
            _replace_first_convolution(module, in_channels)
        _check_takes(module, model, (in_channels, *size))
        super().__init__(module)


class LinearSumsResNet(TorchvisionNetwork):
    """A residual network of torchvision without the ReLU after each residual sum.

    Parameters and their names are those of the network with all activations, so that its weights load into both; but
    weights of one make no useful network of the other. The residual outputs are the outputs of the blocks, for
    example of ``module.layer4.2``; they are no sites, which are outputs of activations.

    Args:
        model: Name of a network with residual blocks ``BasicBlock`` or ``Bottleneck``, for example ``resnet50``.
        in_channels: See :class:`TorchvisionNetwork`.
        image_size: See there.
        num_classes: See there.

    Raises:
        ValueError: If the network has no such blocks, or as for :class:`TorchvisionNetwork`.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 6 and appendix F.3.
    """

    def __init__(
        self,
        model: str = "resnet50",
        in_channels: int = 3,
        image_size: int | tuple[int, int] = 224,
        num_classes: int = 10,
    ) -> None:
        from lightning_sym.networks._linear_sums import leave_out_last_activations

        super().__init__(model, in_channels, image_size, num_classes)
        if not leave_out_last_activations(self.module):
            raise ValueError(
                f"{model} has no residual blocks of torchvision's ResNet; choose a ResNet such as resnet50."
            )


def _replace_first_convolution(module: nn.Module, in_channels: int) -> None:
    """Replace the first convolution by one for another number of channels."""
    name, old = next((name, part) for name, part in module.named_modules() if isinstance(part, nn.Conv2d))
    new = nn.Conv2d(
        in_channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    parent, _, attribute = name.rpartition(".")
    module.get_submodule(parent).register_module(attribute, new)


def _check_takes(module: nn.Module, model: str, shape: tuple[int, int, int]) -> None:
    """Check on the meta device that the module takes images of a shape, in eval mode."""
    state = {name: value.to("meta") for name, value in [*module.named_parameters(), *module.named_buffers()]}
    try:
        with torch.no_grad(), evaluating(module):
            functional_call(module, state, torch.empty(1, *shape, device="meta"))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"torchvision's {model} cannot take images of shape {list(shape)}: {reason}.") from error
