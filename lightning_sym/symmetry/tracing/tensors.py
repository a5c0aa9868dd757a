"""The parameters and buffers of a network that is traced."""

from typing import NamedTuple

from torch import Tensor, nn

from lightning_sym.symmetry.tracing.capture import constant_names, state_tensors
from lightning_sym.symmetry.tracing.weightless import constant_values, is_weightless


class Tensors(NamedTuple):
    """A network's parameters and buffers.

    Attributes:
        states: Each once, by its first name; constants without memory with the values that they will have.
        parameters: The names of the parameters among them.
        unsaved: The names of those that no state dict holds.
        weightless: Whether some of them are on the meta device.
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
        return cls(states, parameters, constant_names(network), weightless)
