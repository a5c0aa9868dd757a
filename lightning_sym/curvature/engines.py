"""Curvature factors of a network on data, by one of several engines."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_known
from lightning_sym._distributed import device_of
from lightning_sym.curvature.autograd import AutogradEngine
from lightning_sym.curvature.backpack_engine import BackpackEngine
from lightning_sym.curvature.blocks import Factors, Likelihood, check_likelihood, over_batches_and_ranks
from lightning_sym.curvature.passes import Engine, batches, check_weights, draws, loss_and_columns, ready
from lightning_sym.curvature.proof import prove
from lightning_sym.curvature.rules import FFC, curved_parameters

ENGINES: dict[str, type[Engine]] = {"autograd": AutogradEngine, "backpack": BackpackEngine}


def engine_for(network: nn.Module) -> str:
    """Return ``"backpack"`` if BackPACK handles the structure of a network, otherwise ``"autograd"``."""
    try:
        BackpackEngine(network, "shared", 1)
    except ValueError:  # whatever else is wrong, autograd says as well
        return "autograd"
    return "backpack"


def factors(
    network: nn.Module,
    loader: Iterable[Sequence[Tensor]],
    likelihood: Likelihood = "classification",
    *,
    engine: str = "autograd",
    samples: int | None = None,
    ffc: FFC = "shared",
    generator: torch.Generator | None = None,
    columns: int | None = None,
    lengthscales: bool = False,
) -> Factors:
    r"""Return the Kronecker factors of the generalised Gauss-Newton matrix, for unit noise, over all data and ranks.

    The network runs in eval mode and at least in single precision. Afterwards it is restored: mode,
    gradients, buffers, hooks. Nothing is kept between calls.

    Every call begins with two checks on five samples of the first batch. First, the samples are the first axis
    everywhere and independent of one another. Second, autograd's gradient of every parameter equals the gradient
    from its layer's rule. If the network may move rows along the first axis, every batch is checked
    for the sample of each row.

    Args:
        network: Any module from one tensor to ``[N, K]`` with parameters in layers that have a rule (see
            :func:`register_layer`). Each layer is called once, with an input of shape ``[N, ...]``, or of shape
            ``[N * T, ...]`` with the T positions of a sample one after the other, treated as ``[N, T, ...]``. Frozen
            parameters are constants.
        loader: Batches ``(inputs, labels, ...)``; with several processes, on every rank its own share, also of
            another number of batches, or none. The result does not depend on the batches.
        likelihood: ``"classification"``: logits and class indices ``[N]``. ``"regression"``: means and targets
            ``[N, K]``. There are no class weights: with them a loss is no log likelihood.
        engine: ``"autograd"``: any architecture, by backward passes. ``"backpack"``: the same numbers by BackPACK, for
            networks of ``nn.Sequential``, :class:`~lightning_sym.layers.ResidualPathways` and modules that call
            their children one after the other, which includes ours without skip connections.
        samples: None for the exact matrix, in K - 1 backward passes (regression: K); otherwise Monte Carlo with that
            many combinations of the columns of an exact square root, with random signs, >= 1: unbiased, in as many
            backward passes. (KFAC's labels, drawn from the network's predictions, are unbiased as well. But a confident
            network then shows almost no curvature most of the time: its evidence came out as -0.02 nats per datum
            instead of -3.5.)
        ffc: B of factored fully connected layers: ``"shared"`` by all channels, or ``"per_channel"``, which is
            closer to the exact blocks and costs C times as many eigenvalue problems of B.
        generator: Generator for the random signs; use a different one on each rank. By default every call draws the
            same.
        columns: How many columns go through one backward pass (or, with ``backpack``, one layer) together, by ``vmap``;
            None for 1 on a CPU, where more is not faster, and for all of them on other devices.
        lengthscales: Whether the trained length scales of sparse layers get blocks, exact numbers, for a prior on them
            (``parameter_groups(network, lengthscales=True)``).

    Returns:
        One block for each trainable parameter but those in ``left_out``: anchor positions and, unless asked for, length
        scales.

    Raises:
        ValueError: If an argument is out of range, a layer has no rule, is called twice or never, a check fails, or
            outputs and targets do not fit; with several processes, on all of them.
        EmptyLoaderError: If no rank has a sample.
        NonFiniteError: If weights, outputs, loss or factors are not finite.

    Note:
        Factors are float64 (float32 where the device has none): sums of exact products of values in the network's
        precision. Dropout and everything else follows eval mode. Samples may have different numbers of places
        from batch to batch, and padding counts for nothing: a place counts if outputs can depend on it.

    References:
        Martens and Grosse (2015), arXiv:1503.05671; Grosse and Martens (2016), arXiv:1602.01407 (convolutions); van
        der Ouderaa et al. (2023), arXiv:2310.06131 (factored layers); docs/theory/curvature.md, 1.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3))
        >>> found = factors(network, [(torch.randn(5, 2), torch.tensor([0, 1, 2, 0, 1]))])
        >>> found.blocks["0.weight"].out_factor.shape, found.blocks["0.weight"].in_factor.shape
        (torch.Size([3, 3]), torch.Size([2, 2]))
    """
    check_likelihood(likelihood)
    check_known("curvature engine", engine, ENGINES)
    if samples is not None:
        check_integers(samples=samples)
        generator = draws(generator)
    with ready(network) as network:
        device = device_of(network)
        together = columns or (1 if device.type == "cpu" else 1_000_000)
        return over_batches_and_ranks(
            lambda: _of_this_rank(
                ENGINES[engine](network, ffc, together, lengthscales), loader, likelihood, samples, generator
            ),
            device,
        )


def _of_this_rank(
    engine: Engine,
    loader: Iterable[Sequence[Tensor]],
    likelihood: Likelihood,
    samples: int | None,
    generator: torch.Generator | None,
) -> Factors | None:
    """Return the factors of this rank's data; None without a sample."""
    check_weights(engine.network)
    count, width, loss_sum = 0, 0, 0.0
    with engine.running():
        for x, y in batches(engine.network, loader):
            if not count:
                prove(engine.network, engine.layers, x, engine.see)
            outputs = engine.forward(x)
            loss, square_root = loss_and_columns(outputs, y, likelihood, samples, generator)
            engine.add(x, outputs, square_root)
            count, width, loss_sum = count + len(x), outputs.shape[1], loss_sum + loss.item()
    if not count:
        return None
    left_out = tuple(full for full, _, _ in curved_parameters(engine.layers, left_out=True))
    return Factors(engine.sums.blocks(count), count, width, likelihood, loss_sum, left_out)
