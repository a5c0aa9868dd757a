"""The parameters and buffers of a traced network."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from lightning_sym._checks import must_be_finite
from lightning_sym.symmetry.charts import Charts, charted
from lightning_sym.symmetry.tracing.graph.capture import Capture, constant_names, state_tensors
from lightning_sym.symmetry.tracing.graph.weightless import constant_values, is_weightless
from lightning_sym.symmetry.tracing.normal_form.alike import stacks_of
from lightning_sym.symmetry.tracing.normal_form.pieces import pieces_of


class Tensors(NamedTuple):
    """A network's parameters and buffers.

    Attributes:
        states: Every tensor once, by its first name. Constants on the meta device have their initial values.
        parameters: The names of the parameters.
        unsaved: The names of tensors that no state dict contains, and of masks: buffers that hold infinities.
        weightless: Whether some tensors are on the meta device.
    """

    states: dict[str, Tensor]
    parameters: list[str]
    unsaved: set[str]
    weightless: bool

    @classmethod
    def of(cls, network: nn.Module) -> "Tensors":
        """Return the tensors of a network."""
        states, weightless = state_tensors(network), is_weightless(network)
        parameters = [name for name, _ in network.named_parameters() if name in states]
        states |= constant_values(network) if weightless else {}
        weights = {*parameters}
        buffers = ((name, own) for name, own in states.items() if not must_be_finite(name, weights) and not own.is_meta)
        masks = {name for name, own in buffers if own.is_floating_point() and bool(own.isinf().any())}
        return cls(states, parameters, constant_names(network) | masks, weightless)

    @property
    def fixed(self) -> dict[str, Tensor]:
        """The values of floating-point constants."""
        floating = {
            name: tensor.detach()
            for name, tensor in self.states.items()
            if name not in self.parameters and tensor.is_floating_point() and not tensor.is_meta
        }
        return {name: own for name, own in floating.items() if name in self.unsaved}

    @property
    def kept(self) -> dict[str, Tensor]:
        """The buffers that no element changes: integers and constants."""
        buffers = {name: own for name, own in self.states.items() if name not in self.parameters}
        return {name: own for name, own in buffers.items() if name in self.unsaved or not own.is_floating_point()}

    def cut(self, captures: Sequence[Capture]) -> "Tensors":
        """Return these tensors with parameters split into the pieces, and stacked as, the captures read them."""
        charts = Charts({}, pieces_of(captures), stacks_of(captures))
        if not charts.pieces and not charts.stacks:
            return self
        parameters = [*dict.fromkeys(own for name in self.parameters for own in charts.names_of(name))]
        # The group would treat a buffer of zeros and ones as a mask, so pieces are parameters.
        made, held = charted(self.states, charts), {*charts.owners, *charts.stacks} & {*parameters}
        states = {
            name: nn.Parameter(own.detach(), requires_grad=False) if name in held else own for name, own in made.items()
        }
        return self._replace(states=states, parameters=parameters)

    def unused(self, captures: Sequence[Capture]) -> list[str]:
        """Return a note on the parameters that no operation reads, or nothing."""
        read = _read(captures)
        unused = [name for name in self.parameters if name not in read]
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        note = f"parameters that evaluation never uses are unchanged, even if training reads them: {names}"
        return [note] if unused else []

    def constants(self, captures: Sequence[Capture]) -> dict[str, Tensor]:
        """Return the tensors with relevant values: integers, unsaved constants, and folded constants."""
        read, valued = _read(captures), {name for captured in captures for name in captured.folded}
        return {
            name: tensor
            for name, tensor in self.states.items()
            if name in valued or (name in read and (name in self.unsaved or not tensor.is_floating_point()))
        }


def _read(captures: Sequence[Capture]) -> set[str]:
    """Return the names of tensors that some operation reads."""
    return {name for captured in captures for node, name in captured.states.items() if node.users}
