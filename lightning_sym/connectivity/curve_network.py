"""A network at a point of a curve in weight space, with the curve's control points as parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sym._checks import check_numbers
from lightning_sym._exports import explained
from lightning_sym.connectivity.curves import Curve, CurveKind
from lightning_sym.connectivity.interpolation import check_same_structure
from lightning_sym.landscape.planes import trainable, weight_vector
from lightning_sym.symmetry.tracing.graph.capture import copied


class CurveNetwork(nn.Module):
    r"""Any network, at a point of a curve between two sets of its weights.

    The only parameters are the inner control points of the curve, ``bends``; a buffer holds both endpoints. The buffer
    ``coefficients`` selects the point, see :func:`lightning_sym.connectivity.curves.curve_coefficients`, so that
    ``torch.func.vmap`` can run networks on curves of both kinds together. Batch norms with running statistics use batch
    statistics in both modes: running statistics belong to a single point of the curve.

    The gradient of control point k is that of the weights at the point times :math:`c_k(t)`, plus that of the
    regulariser :math:`\frac{\lambda}{2} \lVert \gamma(t) \rVert^2`. The value excludes the regulariser
    (docs/theory/curves.md, 1.2).

    Args:
        start: The network at t = 0. Not changed.
        end: The network at t = 1, of the same structure. Not changed.
        bends: Number of control points between the endpoints, >= 1, initialised on the linear path.
        decay: Regularisation strength lambda. >= 0.

    Attributes:
        bends: Shape ``[bends, P]``, trained.
        ends: Shape ``[2, P]``.
        coefficients: Coefficients of all control points. Shape ``[bends + 2]``; not saved.

    Raises:
        ValueError: If the networks differ in structure or in tensors other than trainable parameters and batch norm
            statistics, or have no trainable parameters.
    """

    ends: Tensor
    coefficients: Tensor

    @explained
    def __init__(self, start: nn.Module, end: nn.Module, bends: int = 1, decay: float = 0.0) -> None:
        super().__init__()
        check_endpoints(start, end)
        points = Curve.straight(weight_vector(start), weight_vector(end), bends).points
        check_numbers(">= 0", decay=decay)
        self.decay = decay
        self.bends = nn.Parameter(points[1:-1].clone())
        self.register_buffer("ends", points[[0, -1]])
        self.register_buffer("coefficients", torch.eye(bends + 2)[0].to(points), persistent=False)
        self._shapes = {name: parameter.shape for name, parameter in trainable(start).items()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        own: dict[Tensor, str] = {}
        names = {n: own.setdefault(p, n) for n, p in start.named_parameters(remove_duplicate=False)}
        self._own_names = {name: first for name, first in names.items() if first in self._shapes}  # includes tied names
        self.network = _without_weights(copied(start)).train()  # endpoints are often in evaluation mode

    def forward(self, inputs: Any) -> Any:
        """Return the network's outputs at the current point."""
        parts: tuple[Tensor, ...] = _Point.apply(self.bends, self.ends, self.coefficients, self.decay, self._sizes)
        weights = {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}
        tensors = {name: weights[first] for name, first in self._own_names.items()}
        return functional_call(self.network, tensors, (inputs,), tie_weights=False)

    @staticmethod
    def curve(state: dict[str, Tensor], kind: CurveKind) -> Curve:
        """Return the curve of a state that ``state_dict`` returned."""
        ends = state["ends"]
        return Curve(torch.cat([ends[:1], state["bends"], ends[1:]]), kind)


class _Point(torch.autograd.Function):
    """The point of a curve, split into the parameters; backward adds the regulariser's gradient to that of the loss.

    Memory traffic dominates its cost: the point is computed parameter by parameter, which fit into the cache.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        bends: Tensor, ends: Tensor, coefficients: Tensor, decay: float, sizes: list[int]
    ) -> tuple[Tensor, ...]:
        found = []
        for start, end, *between in zip(*(row.split(sizes) for row in (*ends, *bends)), strict=True):
            part = torch.addcmul(coefficients[0] * start, coefficients[-1], end)
            for coefficient, bend in zip(coefficients[1:-1], between, strict=True):  # no matmul: autocast rounds it
                part = torch.addcmul(part, coefficient, bend)
            found.append(part)
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, _, coefficients, ctx.decay, ctx.sizes = inputs
        ctx.save_for_backward(coefficients, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        coefficients, *point = ctx.saved_tensors
        whole = gradients[0].new_empty(sum(ctx.sizes))
        for part, gradient, place in zip(torch.split(whole, ctx.sizes), gradients, point, strict=True):
            part.copy_(gradient)
            if ctx.decay:
                part.add_(place, alpha=ctx.decay)
        between = coefficients[1:-1, None]
        scaled = whole.mul_(between[0])[None] if len(between) == 1 else between * whole
        return scaled, None, None, None, None


def check_endpoints(start: nn.Module, end: nn.Module) -> None:
    """Check that two networks can be the endpoints of a curve.

    Args:
        start: The network at t = 0.
        end: The network at t = 1.

    Raises:
        ValueError: If they differ in structure, or in tensors that are constant on a curve: untrained parameters, and
            buffers other than batch norm statistics.
    """
    check_same_structure(start, end)
    weights = trainable(start).keys()
    if weights != trainable(end).keys():
        raise ValueError("The networks have different trainable parameters; train the same parameters in both.")
    statistics = {
        f"{name}.{buffer}" if name else buffer
        for name, module in start.named_modules()
        if isinstance(module, _BatchNorm)
        for buffer, _ in module.named_buffers(recurse=False)
    }
    others = {**dict(end.named_parameters()), **dict(end.named_buffers())}
    for name, value in (*start.named_parameters(), *start.named_buffers()):
        if name not in weights and name not in statistics and not _same(value, others[name]):
            raise ValueError(
                f"The networks differ in {name!r}, which is not trained, so that no curve connects them; use the same "
                "values in both."
            )


def _same(one: Tensor, other: Tensor) -> bool:
    """Test whether two tensors of one shape are equal; NaN equals NaN."""
    return bool(((one == other.to(one.device)) | (one != one) & (other != other).to(one.device)).all())


def _without_weights(network: nn.Module) -> nn.Module:
    """Return the network with empty trainable parameters and without running statistics."""
    for parameter in trainable(network).values():
        parameter.data = parameter.data.new_empty(0)
    network.requires_grad_(False)
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return network
