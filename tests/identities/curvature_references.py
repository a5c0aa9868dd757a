"""Dense references for curvature, by automatic differentiation, and the layers that are compared with them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from lightning_sym.layers import (
    CircularConv,
    EquivariantLinear,
    FactoredFullyConnected,
    FullyConnected,
    GroupConv,
    PolyphasePool,
    ResidualPathways,
    SparseConv,
    SparseFactoredFullyConnected,
    grid_action,
)

GRID = (4, 6)


# By name: a constructor, and the shape of a sample.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear on tokens": (lambda: nn.Linear(5, 3), (2, 4, 5)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), (2, 7)),
    "conv zeros": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, *GRID)),
    "conv same": (lambda: nn.Conv2d(2, 3, (3, 5), padding="same", dilation=(1, 2)), (2, 7, 9)),
    "conv stride": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, *GRID)),
    "conv circular": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), (2, *GRID)),
    "conv reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect", bias=False), (2, *GRID)),
    "conv groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2), (4, *GRID)),
    "conv depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (4, *GRID)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (1, 2, 2)), (2, 2, 3, 3)),
    "transposed conv": (lambda: nn.ConvTranspose2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 0)), (2, 3, 2)),
    "transposed conv groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2, padding=3), (4, *GRID)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=3, output_padding=2), (2, 4)),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=2, padding=1), (2, 2, 2, 3)),
    "batch norm": (lambda: nn.BatchNorm2d(3), (3, *GRID)),
    "batch norm flat": (lambda: nn.BatchNorm1d(5), (5,)),
    "layer norm": (lambda: nn.LayerNorm(6), (3, *GRID)),
    "layer norm of maps": (lambda: nn.LayerNorm([2, 3, 2]), (2, 3, 2)),
    "rms norm": (lambda: nn.RMSNorm(6), (3, *GRID)),
    "rms norm of maps": (lambda: nn.RMSNorm([3, 2], eps=0.1), (2, 3, 2)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (3, *GRID)),
    "instance norm of the past": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (3, 6)),
    "instance norm in space": (lambda: nn.InstanceNorm3d(2, affine=True), (2, 2, 2, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, *GRID)),
    "prelu": (lambda: nn.PReLU(), (3, *GRID)),
    "prelu of channels": (lambda: nn.PReLU(3), (3, *GRID)),
    "fully connected": (lambda: FullyConnected(2, 3, (2, 3), (1, 2)), (2, 2, 3)),
    "equivariant": (lambda: EquivariantLinear(2, 3, grid_action("d4", 3)), (2, 3, 3)),
    "circular": (lambda: CircularConv(2, 3), (2, *GRID)),
    "circular 5 on a small grid": (lambda: CircularConv(2, 3, 5), (2, 2, 3)),
    "factored": (lambda: FactoredFullyConnected(3, 2, GRID, (2, 3)), (3, *GRID)),
    "sparse": (lambda: SparseConv(2, 3), (2, *GRID)),
    "sparse, learned": (lambda: SparseConv(2, 3, learn_positions=True, learn_lengthscale=True), (2, *GRID)),
    "sparse factored": (lambda: SparseFactoredFullyConnected(3, 2, (2, 3), (2, 2)), (3, 2, 3)),
    **{f"{group} {kind}": (lambda kind=kind, group=group: GroupConv(2, 3, kind, group=group),
        (2 if kind == "lifting" else 2 * order, *GRID)) for group, order in (("p4", 4), ("p4m", 8))
        for kind in ("lifting", "full", "pointwise", "separable", "depthwise_separable")},
}  # fmt: skip


def perturbed(network: nn.Module, seed: int = 0) -> nn.Module:
    """Return the network in double precision and eval mode, with random weights and statistics everywhere."""
    generator = torch.Generator().manual_seed(seed)
    network = network.double().eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "positions" not in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)
    return network


def with_head(name: str, outputs: int = 3) -> tuple[nn.Sequential, tuple[int, ...]]:
    """Return a layer between two nonlinear parts, so that gradients differ by sample, and the shape of a sample."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make()
    size = layer.eval()(torch.zeros(1, *shape)).numel()
    return perturbed(nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(size, outputs))), shape


def data(count: int, shape: tuple[int, ...], outputs: int, likelihood: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random inputs and labels or targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    if likelihood == "classification":
        return x, torch.randint(outputs, (count,), generator=generator)
    return x, torch.randn(count, outputs, generator=generator, dtype=torch.float64)


def jacobians(network: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return outputs ``[N, K]`` and, by parameter, Jacobians ``[N, K, P]``."""
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def output(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(network, parameters, (x[None],))[0]

    # Sample by sample, row by row: vmap of PReLU's backward pass is wrong (torch 2.15).
    found = [jacrev(output, chunk_size=1)(parameters, sample) for sample in x]
    return network(x).detach(), {name: torch.stack([each[name].flatten(1) for each in found]) for name in parameters}


def hessians(outputs: Tensor, likelihood: str) -> Tensor:
    """Return the Hessians of the loss in the outputs. Shape ``[N, K, K]``."""
    if likelihood == "regression":
        return torch.eye(outputs.shape[1], dtype=outputs.dtype).expand(len(outputs), -1, -1)
    p = outputs.softmax(1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None]


def dense_blocks(network: nn.Module, x: Tensor, likelihood: str) -> dict[str, Tensor]:
    """Return the generalised Gauss-Newton matrix of each parameter. Shape ``[P, P]``."""
    outputs, found = jacobians(network, x)
    middle = hessians(outputs, likelihood)
    return {name: torch.einsum("nkp,nkl,nlq->pq", j, middle, j) for name, j in found.items()}


def square_root_gradients(network: nn.Sequential, x: Tensor, likelihood: str) -> Tensor:
    """Return the square-root gradients at the output of the first module. Shape ``[V, N, ...]``."""
    head = network[1:]
    middle = network[0](x).detach()
    slopes = torch.stack([jacrev(lambda value: head(value[None])[0])(sample) for sample in middle])  # [N, K, ...]
    outputs = network(x).detach()
    if likelihood == "regression":
        return slopes.transpose(0, 1)
    p = outputs.softmax(1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]  # [N, K, V]
    return torch.einsum("nkv,nk...->vn...", root, slopes)


def relaxed_network(scale: float | None = None) -> nn.Sequential:
    """Return a network with two relaxed layers of a factored and a convolutional path, and an ordinary layer."""
    torch.manual_seed(0)
    first = {"fc": FactoredFullyConnected(2, 3, GRID), "conv": CircularConv(2, 3)}
    second = {
        "fc": FactoredFullyConnected(3, 2, GRID, (2, 3)),
        "conv": nn.Sequential(CircularConv(3, 2), PolyphasePool()),
    }
    layers = [ResidualPathways(first, scale=scale), nn.Tanh(), ResidualPathways(second), nn.Tanh()]
    return perturbed(nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3)))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()
