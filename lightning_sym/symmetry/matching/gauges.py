"""From the balanced gauge to that of a reference."""

import math

from torch import nn

from lightning_sym.symmetry.base import Symmetry
from lightning_sym.symmetry.group.element import Element
from lightning_sym.symmetry.moving import MovedTensors


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
