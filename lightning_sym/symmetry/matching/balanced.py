"""What matching starts from: checked networks, in the balanced gauge, as tensors of one dtype."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.canonical.form import balanced_element, settled_element
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.moving import MovedTensors
from lightning_sym.symmetry.views import ConvertedTensors


def check_networks(symmetry: Symmetry, **networks: nn.Module) -> None:
    """Check that networks, named by the keys, are of the traced architecture and finite, also when squared.

    Raises:
        ValueError: If one is not.
    """
    for which, network in networks.items():
        try:
            symmetry.require(network)
        except ValueError as error:
            raise ValueError(f"{which} is not of the traced architecture: {error}.") from error
        for name, tensor in symmetry.tensors(network).items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} of {which} holds values that are not finite; networks must be finite.")
            if tensor.is_floating_point() and name in symmetry.parameter_names:
                own = torch.promote_types(tensor.dtype, torch.float32)
                most = math.sqrt(torch.finfo(own).max) / 4
                if not float(torch.linalg.vector_norm(tensor.detach(), dtype=own)) < most:
                    raise ValueError(
                        f"{name} of {which} holds values up to {float(tensor.detach().abs().max()):.1e}, whose squares "
                        f"{str(own)[6:]} does not hold; expected smaller ones, or networks in float64."
                    )


def balanced(symmetry: Symmetry, network: nn.Module, *, signs: bool = True) -> tuple[nn.Module, Element]:
    """Return the network in the balanced gauge, and the element that brings it there.

    Args:
        symmetry: The network's.
        network: Not changed.
        signs: Whether gains between which streams rotate may change their signs; they are positive then.
    """
    element = balanced_element(symmetry, network, signs=signs)
    return symmetry.act(element, network), element


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two networks as they are compared, in the balanced gauge or as they are: as elements, so that nothing is copied.

    Attributes:
        symmetry: The symmetry of both.
        a: The reference as it is.
        b: The other network as it is.
        left: Brings the reference to where it is compared; None if that is where it is.
        right: The same of the other one.
        balanced: Whether that is the balanced gauge, so that scales are handed over in the end.
    """

    symmetry: Symmetry
    a: nn.Module
    b: nn.Module
    left: Element | None = None
    right: Element | None = None
    balanced: bool = False

    @property
    def is_even(self) -> bool:
        """Whether balancing hardly changes the proportions of units: then they are as well compared as they are."""
        if not self.balanced or self.left is None or self.right is None:
            return False
        return all(own.is_even(self.left.parts[own.name], self.right.parts[own.name]) for own in self.symmetry.factors)

    def target(self, device: torch.device) -> Mapping[str, Tensor]:
        """Return the parameters of the reference as they are compared, on a device, in at least single precision."""
        return working(self.a, self.symmetry, device, element=self.left)

    def start(self, device: torch.device, element: Element | None = None) -> Mapping[str, Tensor]:
        """Return the parameters of the other network as they are compared, on a device, in the reference's dtypes.

        Args:
            device: The device.
            element: Moves them from there.
        """
        if self.right is not None:
            element = self.right if element is None else self.symmetry.compose(element, self.right)
        return working(self.b, self.symmetry, device, like=self.symmetry.tensors(self.a), element=element)

    def back(self, element: Element) -> Element:
        """Return the element of ``b`` as it is for one of what is compared; it brings ``b`` to the scales of ``a``."""
        if self.right is not None:
            element = self.symmetry.compose(element, self.right)
        if self.left is None:
            return element
        if self.balanced:
            return self.symmetry.compose(to_gauge_of(self.symmetry, self.a, self.left, self.b, element), element)
        return self.symmetry.compose(self.symmetry.inverse(self.left), element)

    def forth(self, element: Element) -> Element:
        """Return the element of what is compared for one of ``b`` as it is."""
        if self.right is not None:
            element = self.symmetry.compose(element, self.symmetry.inverse(self.right))
        return element if self.left is None else self.symmetry.compose(self.left, element)


def comparable(symmetry: Symmetry, a: nn.Module, b: nn.Module, *, balance: bool, signs: bool = True) -> Comparison:
    """Return how two networks are compared: balanced, or as they are."""
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
    """Return the parameters on a device, in the dtypes of others or else their own, in at least single precision.

    Args:
        network: Not changed.
        symmetry: The network's.
        device: The device.
        like: Tensors of the same names; None for those of the network itself.
        element: Moves the parameters; they are made anew whenever one is asked for then.
    """
    given = converted(network, symmetry, device, like)
    if element is None:
        return {name: given[name] for name in given if name in symmetry.parameter_names}
    return MovedTensors(symmetry.factors, element, given, symmetry.parameter_names)


def converted(
    network: nn.Module, symmetry: Symmetry, device: torch.device, like: Mapping[str, Tensor] | None = None
) -> Mapping[str, Tensor]:
    """Return all tensors of a network, buffers included; see :func:`working`."""
    return _Working(symmetry.tensors(network), device, like)


class _Working(ConvertedTensors):
    """A network's tensors on a device, in the dtypes of others or else their own, in at least single precision."""

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
    """Return the element that brings a balanced network to the scales of a reference: docs/theory/matching.md, 1.5.

    A unit gets the scale of the reference's unit in its place. Of a unit that is nearly dead the scale says nothing:
    with incoming weights of norm 1 and outgoing ones of 1e-8 it would make another's outgoing weights 1e8 times smaller
    than its incoming ones. Where a unit would so come to be much larger than both its reference and its own balanced
    form, the ratio of incoming to outgoing weights is taken from the reference's unit with the unit's least norm added
    to both sides. Running variances are not made negative where the reference's are not.

    Args:
        symmetry: Symmetry of both networks.
        reference: The network whose scales are wanted. Not changed.
        gauge: Brings the reference to the balanced gauge.
        network: The other network. Not changed.
        element: Brings it to the balanced gauge, its units in the places of the reference's.

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
        pairs = (
            (theirs[name].detach().double().cpu(), moved[name].double().cpu()) for name in symmetry.parameter_names
        )
        return math.fsum(float((one - two).square().sum()) for one, two in pairs)

    # Scales first: the shifts of `back` bring biases in front of batch norms to those of the reference. Tilts change
    # norms, too, so that what is handed over exactly may seem to be out of proportion.
    return min(back, symmetry.compose(back, symmetry.identity().replaced(**parts)), key=distance)
