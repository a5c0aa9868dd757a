"""Preparation for matching: checks, the balanced gauge, and tensors of one dtype."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_sym._checks import must_be_finite
from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.form import balanced_element, settled_element
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.views import ConvertedTensors


def check_architecture(symmetry: Symmetry, network: nn.Module, which: str) -> None:
    """Check that a network has the traced architecture.

    Args:
        symmetry: The symmetry.
        network: The network.
        which: Its name in error messages.

    Raises:
        ValueError: If it does not.
    """
    try:
        symmetry.require(network)
    except ValueError as error:
        raise ValueError(f"{which} is not of the traced architecture: {error}.") from error


@torch.no_grad()
def check_networks(symmetry: Symmetry, **networks: nn.Module) -> None:
    """Check that networks have the traced architecture, and that values and their squares are finite.

    Args:
        symmetry: The symmetry.
        **networks: The networks; error messages use the keys.

    Raises:
        ValueError: If one does not.
    """
    for which, network in networks.items():
        check_architecture(symmetry, network, which)
        for name, tensor in symmetry.tensors(network).items():
            if must_be_finite(name, symmetry.weight_names) and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} of {which} holds values that are not finite; networks must be finite.")
            if tensor.is_floating_point() and name in symmetry.weight_names:
                own = torch.promote_types(tensor.dtype, torch.float32)
                most = math.sqrt(torch.finfo(own).max) / 4
                if not float(torch.linalg.vector_norm(tensor.detach(), dtype=own)) < most:
                    raise ValueError(
                        f"{name} of {which} holds values up to {float(tensor.detach().abs().max()):.1e}, whose squares "
                        f"{str(own)[6:]} does not hold; expected smaller ones, or networks in float64."
                    )


def balanced(symmetry: Symmetry, network: nn.Module, *, signs: bool = True) -> tuple[nn.Module, Element]:
    """Bring a network to the balanced gauge.

    Args:
        symmetry: Symmetry of the network.
        network: Not changed.
        signs: Whether to make the gains of rotated streams positive.

    Returns:
        The balanced network, and the element that maps the given one to it.
    """
    element = balanced_element(symmetry, network, signs=signs)
    return symmetry.act(element, network), element


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two networks and their gauges: elements, applied on the fly without copies.

    Attributes:
        symmetry: Symmetry of both networks.
        a: The reference, as given.
        b: The other network, as given.
        left: Maps the reference to its gauge; None for the identity.
        right: Maps the other network to its gauge; None for the identity.
        balanced: Whether the gauge is the balanced one, so that the result needs the reference's scales.
    """

    symmetry: Symmetry
    a: nn.Module
    b: nn.Module
    left: Element | None = None
    right: Element | None = None
    balanced: bool = False

    @property
    def is_even(self) -> bool:
        """Whether balancing hardly changes the proportions of units, so that it is unnecessary."""
        if not self.balanced or self.left is None or self.right is None:
            return False
        return all(own.is_even(self.left.parts[own.name], self.right.parts[own.name]) for own in self.symmetry.factors)

    @property
    def is_plain(self) -> bool:
        """Whether both networks are compared as they are."""
        return self.left is None and self.right is None

    def target(self, device: torch.device) -> Mapping[str, Tensor]:
        """Return the reference's parameters in its gauge, on a device, in at least single precision."""
        return working(self.a, self.symmetry, device, element=self.left)

    def start(self, device: torch.device, element: Element | None = None) -> Mapping[str, Tensor]:
        """Return the other network's parameters in its gauge, on a device, in the reference's dtypes.

        Args:
            device: The device.
            element: Applied to them in addition.
        """
        if self.right is not None:
            element = self.right if element is None else self.symmetry.compose(element, self.right)
        return working(self.b, self.symmetry, device, like=self.symmetry.tensors(self.a), element=element)

    def back(self, element: Element) -> Element:
        """Convert an element between the gauges to one for ``b`` as given, with the scales of ``a``."""
        if self.right is not None:
            element = self.symmetry.compose(element, self.right)
        if self.left is None:
            return element
        if self.balanced:
            return self.symmetry.compose(to_gauge_of(self.symmetry, self.a, self.left, self.b, element), element)
        return self.symmetry.compose(self.symmetry.inverse(self.left), element)

    def forth(self, element: Element) -> Element:
        """Convert an element for ``b`` as given to one between the gauges."""
        if self.right is not None:
            element = self.symmetry.compose(element, self.symmetry.inverse(self.right))
        return element if self.left is None else self.symmetry.compose(self.left, element)


def comparable(symmetry: Symmetry, a: nn.Module, b: nn.Module, *, balance: bool, signs: bool = True) -> Comparison:
    """Choose the gauges for the comparison of two networks: balanced, or only as far as no norms are involved."""
    if not balance:
        if not signs:
            return Comparison(symmetry, a, b)
        return Comparison(symmetry, a, b, settled_element(symmetry, a), settled_element(symmetry, b))
    left, right = (balanced_element(symmetry, network, signs=signs) for network in (a, b))
    return Comparison(symmetry, a, b, left, right, balanced=True)


def working(
    network: nn.Module,
    symmetry: Symmetry,
    device: torch.device,
    like: Mapping[str, Tensor] | None = None,
    element: Element | None = None,
) -> Mapping[str, Tensor]:
    """Return the parameters on a device, in at least single precision.

    Args:
        network: Not changed.
        symmetry: Symmetry of the network.
        device: The device.
        like: Tensors by name that determine the dtypes; by default the network's own.
        element: Applied to the parameters, which are then computed on each access.
    """
    given = converted(network, symmetry, device, like)
    if element is None:
        return {name: given[name] for name in given if name in symmetry.weight_names}
    return MovedTensors(symmetry.factors, element, given, symmetry.weight_names)


def converted(
    network: nn.Module, symmetry: Symmetry, device: torch.device, like: Mapping[str, Tensor] | None = None
) -> Mapping[str, Tensor]:
    """Return all tensors of a network, including buffers; see :func:`working`."""
    return _Working(symmetry.tensors(network), device, like)


class _Working(ConvertedTensors):
    """A network's tensors on a device, in given dtypes, in at least single precision."""

    def __init__(
        self, tensors: Mapping[str, Tensor], device: torch.device, like: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(tensors, torch.detach)
        self._device, self._like = device, tensors if like is None else like

    def _made(self, name: str) -> Tensor:
        dtype = self._like[name].dtype
        single = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        return super()._made(name).to(self._device, single)


def to_gauge_of(
    symmetry: Symmetry, reference: nn.Module, gauge: Element, network: nn.Module, element: Element
) -> Element:
    """Return the element that maps a balanced network to the scales of a reference (docs/theory/matching.md, 1.5).

    A unit gets the scale of the corresponding unit of the reference. The scale of a nearly dead unit is meaningless:
    with incoming weights of norm 1 and outgoing ones of 1e-8, it would make another unit's outgoing weights 1e8 times
    smaller than its incoming ones. A unit is out of proportion if it would exceed both its reference and its own
    balanced form. It then gets the reference's ratio of incoming to outgoing norms, with its own least norm added to
    both. Running variances stay non-negative where the reference's are.

    Args:
        symmetry: Symmetry of both networks.
        reference: The network with the wanted scales. Not changed.
        gauge: Maps the reference to the balanced gauge.
        network: The other network. Not changed.
        element: Maps it to the balanced gauge, with units aligned to the reference's.

    Returns:
        The inverse of the gauge, with other scales for units out of proportion.
    """
    back = symmetry.inverse(gauge)
    theirs, given = symmetry.tensors(reference), symmetry.tensors(network)
    own = MovedTensors(symmetry.factors, element, given)
    found = {f.name: f.put_in_proportion(theirs, own, back.parts[f.name]) for f in symmetry.factors}
    parts = {name: part for name, part in found.items() if part is not None}
    if not parts:
        return back

    def distance(way: Element) -> float:
        moved = MovedTensors(symmetry.factors, symmetry.compose(way, element), given)
        pairs = ((theirs[name].detach().double().cpu(), moved[name].double().cpu()) for name in symmetry.weight_names)
        return math.fsum(float((one - two).square().sum()) for one, two in pairs)

    # Scales first: the translations of `back` bring biases before batch norms to those of the reference. Rank-one maps
    # change norms as well, and can make exact scales seem out of proportion.
    return min(back, symmetry.compose(back, symmetry.identity().replaced(**parts)), key=distance)
