"""The outputs of one network on fixed inputs at any weights, and J around such weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from lightning_sym._checks import check_rows
from lightning_sym._distributed import fitting
from lightning_sym.landscape.evaluation import LossSurface
from lightning_sym.landscape.planes import weight_tensors, weight_vector
from lightning_sym.networks.modes import PlainDistances, in_precision
from lightning_sym.symmetry.tracing.graph.capture import copied


class NetworkOutputs:
    """The outputs of a network in evaluation mode on fixed inputs, as a function of its weight vector.

    Args:
        network: Any network that treats its inputs apart. Not changed; a copy is used.
        inputs: Shape ``[N, ...]``, N >= 1. Floating inputs are cast to ``dtype``.
        dtype: Dtype of the weights and the arithmetic.

    Raises:
        ValueError: If there are no inputs, or the network has nothing to train.
    """

    def __init__(self, network: nn.Module, inputs: Tensor, dtype: torch.dtype = torch.float64) -> None:
        if inputs.ndim == 0 or len(inputs) == 0:
            raise ValueError(f"inputs must hold at least one input, shape [N, ...], got shape {list(inputs.shape)}.")
        self.network = in_precision(copied(network), dtype).eval()
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise ValueError("the network has no trainable parameters; expected some with requires_grad=True.")
        self.own = weight_vector(self.network)
        self.inputs = inputs.detach().to(self.own.device, dtype if inputs.is_floating_point() else None)

    def _forward(self, vector: Tensor, inputs: Tensor) -> Tensor:
        with fitting(inputs):
            output = functional_call(self.network, weight_tensors(self.network, vector), (inputs,))
        return check_rows(output).reshape(len(output), -1)

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the outputs ``[N, K]`` at a weight vector ``[P]``; differentiable."""
        return self._forward(vector, self.inputs)

    def jacobian(self, vector: Tensor) -> Tensor:
        """Return the derivatives of all outputs by all weights, shape ``[N * K, P]``, K vector products per input."""

        def one(weights: Tensor, single: Tensor) -> Tensor:
            return self._forward(weights, single[None])[0]

        with PlainDistances():
            rows: Tensor = vmap(jacrev(one), in_dims=(None, 0), randomness="same")(vector, self.inputs)
        return rows.detach().flatten(0, 1)

    def start(self, vector: Tensor | None) -> Tensor:
        """Return a checked copy of a weight vector ``[P]``; of the network's own if there is none."""
        vector = self.own if vector is None else vector.detach().to(self.own)
        if vector.shape != self.own.shape or not bool(torch.isfinite(vector).all()):
            raise ValueError(
                f"start must be a finite weight vector of shape {list(self.own.shape)}, as weight_vector makes it; "
                f"got shape {list(vector.shape)}."
            )
        return vector.clone()


def surfaces(
    network: nn.Module, inputs: Tensor, *, dtype: torch.dtype = torch.float64
) -> Callable[[Tensor], LossSurface]:
    """Return the function that makes the surface of J around a weight vector of a network.

    Args:
        network: The architecture; its own weights do not matter.
        inputs: Shape ``[N, ...]``.
        dtype: Dtype of weights and arithmetic.

    Returns:
        A function from a weight vector ``[P]`` to a surface; its targets are the outputs at this vector.
    """
    function = NetworkOutputs(network, inputs, dtype)

    def make(target: Tensor) -> LossSurface:
        with torch.no_grad():
            outputs = function(function.start(target))
        return LossSurface(function.network, function.inputs, outputs, dtype=dtype)

    return make
