"""What matching starts from: checked networks, in the balanced gauge, as tensors of one dtype."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sym._distributed import wide
from lightning_sym.symmetry.arrays import Floats
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.form import canonicalize
from lightning_sym.symmetry.canonical.streams import positive
from lightning_sym.symmetry.elements import Element
from lightning_sym.symmetry.matching.proportion import to_scales_of
from lightning_sym.symmetry.tracing.capture import state_tensors


def check_networks(symmetry: Symmetry, **networks: nn.Module) -> None:
    """Check that networks, named by the keys, are of the traced architecture and finite.

    Raises:
        ValueError: If one is not.
    """
    for which, network in networks.items():
        try:
            symmetry.require(network)
        except ValueError as error:
            raise ValueError(f"{which} is not of the traced architecture: {error}.") from error
        for name, tensor in state_tensors(network).items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} of {which} holds values that are not finite; networks must be finite.")


def balanced(symmetry: Symmetry, network: nn.Module, *, signs: bool = True) -> tuple[nn.Module, Element]:
    """Return the network in the balanced gauge, and the element that brings it there.

    Args:
        symmetry: The network's.
        network: Not changed.
        signs: Whether gains between which streams rotate may change their signs; they are positive then.
    """
    form = canonicalize(symmetry, network, scales="balanced", signs=False, order=False)
    if not (signs and symmetry.structure.rotations):
        return form.network, form.element
    flips = positive(symmetry, state_tensors(form.network))
    return symmetry.act(flips, form.network, inplace=True), symmetry.compose(flips, form.element)


def comparable(
    symmetry: Symmetry, a: nn.Module, b: nn.Module, *, balance: bool, signs: bool = True
) -> tuple[nn.Module, nn.Module, Callable[[Element], Element], Callable[[Element], Element]]:
    """Return two networks as they are compared: balanced, or as they are.

    Returns:
        Both, and two functions: of an element for the second as it is compared the first makes one for ``b`` as it is,
        which brings it to the scales of ``a``; the other goes the opposite way.
    """
    if not balance:
        return a, b, lambda element: element, lambda element: element
    (target, left), (source, right) = (balanced(symmetry, network, signs=signs) for network in (a, b))

    def back(element: Element) -> Element:
        scales = to_scales_of(symmetry, a, left, symmetry.act(element, source))
        return symmetry.compose(scales, symmetry.compose(element, right))

    def forth(element: Element) -> Element:
        return symmetry.compose(left, symmetry.compose(element, symmetry.inverse(right)))

    return target, source, back, forth


def working(
    network: nn.Module, symmetry: Symmetry, device: torch.device, like: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the parameters on a device, in the dtypes of others or else their own, in at least single precision."""
    tensors = {}
    for name, tensor in state_tensors(network).items():
        if name in symmetry.parameter_names:
            dtype = tensor.dtype if like is None else like[name].dtype
            single = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            tensors[name] = tensor.detach().to(device, single)
    return tensors


def inner(one: Tensor, two: Tensor) -> float:
    """Return the inner product of two tensors of one shape and dtype."""
    return float(torch.dot(one.reshape(-1), two.reshape(-1)))


def squared_distance(ones: Mapping[str, Tensor], twos: Mapping[str, Tensor]) -> float:
    """Return the squared Euclidean distance of tensors to those of the same names, which may be on another device."""
    pairs = ((one, twos[name].to(one)) for name, one in ones.items())
    return math.fsum(float((one - two).square().sum(dtype=wide(one.device))) for one, two in pairs)


def along(tensor: Tensor, axes: tuple[int, ...]) -> Floats:
    """Return the sum over all other axes. Shape (sizes of the axes), float64."""
    others = [axis for axis in range(tensor.ndim) if axis not in axes]
    total = tensor.sum(others) if others else tensor
    return np.asarray(total.double().cpu().numpy())
