"""Ensembles of networks: the cyclical learning rate of fast geometric ensembling, and scores of predictions."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym._checks import check_batches, check_integers, check_numbers, check_pair
from lightning_sym._distributed import Batches, gathered, run_on
from lightning_sym._exports import explained
from lightning_sym.connectivity.interpolation import LabelledBatches
from lightning_sym.networks import recalibrate_batch_norm
from lightning_sym.networks.batch_norm import batch_norms
from lightning_sym.networks.modes import evaluating

_CHUNK = 4096  # samples processed at once


def cyclical_learning_rate(steps: float, cycle: int, highest: float, lowest: float) -> float:
    r"""Return the learning rate of fast geometric ensembling after a number of steps.

    It falls linearly from ``highest`` to ``lowest`` in the first half of a cycle, and rises linearly in the
    second (docs/theory/ensembles.md, 1).

    Args:
        steps: Optimizer steps since the start of the first cycle. >= 0; possibly fractional.
        cycle: Length of a cycle in optimizer steps. >= 1.
        highest: Learning rate at both ends of a cycle. >= ``lowest``.
        lowest: Learning rate in the middle of a cycle. >= 0.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Garipov et al. (2018), "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", arXiv:1802.10026,
        section 4.

    Example:
        >>> [cyclical_learning_rate(step, 4, 0.5, 0.25) for step in range(6)]
        [0.5, 0.375, 0.25, 0.375, 0.5, 0.375]
    """
    check_integers(cycle=cycle)
    check_numbers(">= 0", steps=steps, highest=highest, lowest=lowest)
    if lowest > highest:
        raise ValueError(f"lowest must be at most highest={highest}, got {lowest}.")
    place = (steps % cycle) / cycle
    share = 2 * place if place < 0.5 else 2 - 2 * place
    return (1 - share) * highest + share * lowest


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of class probabilities for each of several predictors. All of shape ``[M]``, float64, on the CPU.

    Standard errors are over samples: the uncertainty for the given networks, without the variation between training
    runs.

    Attributes:
        accuracy: Fraction of samples with the right class as the most probable one, in [0, 1].
        accuracy_error: Its standard error.
        loss: Mean negative log probability of the right class, nats.
        loss_error: Its standard error.
        brier: Mean squared distance of the probabilities from the one-hot label, in [0, 2].
        calibration_error: Expected calibration error, in [0, 1]: mean over samples of the difference between accuracy
            and mean confidence, in bins of similar confidence. It is biased upwards for few samples.
    """

    accuracy: Tensor
    accuracy_error: Tensor
    loss: Tensor
    loss_error: Tensor
    brier: Tensor
    calibration_error: Tensor


@dataclass(frozen=True, eq=False)
class EnsembleScores:
    r"""Scores of the members of an ensemble, alone and together, by number of members.

    All tensors are float64, on the CPU. Entry ``j - 1`` of those of shape ``[M]`` is for the first ``j`` members; the
    prediction of an ensemble is the mean of its members' probabilities. See docs/theory/ensembles.md, 2 and 3.

    Attributes:
        alone: Each member by itself.
        together: The ensemble of the first members.
        ambiguity: Mean loss of the members less that of the ensemble, nats: the gain of averaging over a
            randomly chosen member; never negative. Shape ``[M]``.
        ambiguity_error: Its standard error over samples, which are paired. Shape ``[M]``.
        variance: Mean Brier score of the members less that of the ensemble, equal to the mean squared distance of the
            members' probabilities from their mean. Shape ``[M]``.
        disagreements: Fraction of samples that two members assign to different classes. Shape ``[M, M]``.
        divergences: Mean over samples of :math:`\mathrm{KL}(p_a \Vert p_b)`, nats; infinite where ``b`` excludes what
            ``a`` allows. Shape ``[M, M]``.
        samples: Number of samples, over all ranks.
        bins: Number of bins of the calibration error.
    """

    alone: Scores
    together: Scores
    ambiguity: Tensor
    ambiguity_error: Tensor
    variance: Tensor
    disagreements: Tensor
    divergences: Tensor
    samples: int
    bins: int

    @property
    def disagreement(self) -> Tensor:
        """Mean of ``disagreements`` over pairs of the first members. Shape ``[M]``; NaN for one member."""
        return _over_pairs(self.disagreements)

    @property
    def divergence(self) -> Tensor:
        """Mean of ``divergences`` over ordered pairs of the first members, nats. Shape ``[M]``; NaN for one member."""
        return _over_pairs(self.divergences)


@explained
def log_probabilities(
    networks: Iterable[nn.Module], batches: LabelledBatches, *, recalibration_data: Batches | None = None
) -> tuple[Tensor, Tensor]:
    """Return the predictions of networks for the same samples.

    Args:
        networks: Classifiers, run in evaluation mode on their own devices; at least one. A generator may yield the
            same network with new weights each time.
        batches: Pairs of inputs and labels, in the same order whenever they are read: a list or a loader, neither
            shuffled nor augmented. With several processes each passes its share.
        recalibration_data: Inputs on which batch norm statistics are recomputed in place before each network is run,
            as for :func:`lightning_sym.networks.recalibrate_batch_norm`; None keeps the statistics.

    Returns:
        Logarithms of the probabilities ``[M, N, C]``, float64, and the labels ``[N]``, int64; on the CPU.

    Raises:
        ValueError: If there are no networks, outputs are not finite logits ``[B, C]`` of the same classes, labels are
            not integers ``[B]``, or the data change between passes.

    Note:
        Takes ``8 M N C`` bytes.
    """
    if isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList):  # a Sequential has many layers
        raise ValueError(f"networks must be several networks, got one {type(networks).__name__}; pass a list.")
    check_batches(batches, "batches")
    found: list[Tensor] = []
    labels = None
    for network in networks:
        if recalibration_data is not None and batch_norms(network):
            recalibrate_batch_norm(network, recalibration_data)
        with torch.no_grad(), evaluating(network):
            rows = [_predicted(network, batch) for batch in batches]
        own = torch.cat([target for _, target in rows]) if rows else torch.zeros(0, dtype=torch.int64)
        found.append(torch.cat([row for row, _ in rows]) if rows else torch.zeros(0, 1, dtype=torch.float64))
        if labels is not None and not torch.equal(labels, own):
            raise ValueError(
                "The data change between passes; pass a list, or a loader that neither shuffles nor drops samples."
            )
        if found[-1].shape != found[0].shape:
            raise ValueError(
                f"Networks of an ensemble must have the same classes, got {found[0].shape[1]} and {found[-1].shape[1]}."
            )
        labels = own
    if labels is None:
        raise ValueError("networks must have at least one network, got none.")
    return torch.stack(found), labels


def _predicted(network: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    check_pair(batch)
    inputs, labels = batch[:2]
    outputs = run_on(network, inputs)
    logits = isinstance(outputs, Tensor) and outputs.ndim == 2
    if not logits or labels.shape != outputs.shape[:1] or labels.is_floating_point():
        got = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"An ensemble needs classifiers with logits [B, C] and integer labels [B], got outputs {got} and "
            f"labels {list(labels.shape)} of {labels.dtype}."
        )
    if not outputs.isfinite().all():
        raise ValueError("A network of the ensemble has outputs that are not finite; leave it out.")
    return outputs.cpu().double().log_softmax(1), labels.cpu().long()


@explained
def ensemble_scores(log_probabilities: Tensor, labels: Tensor, *, bins: int = 15) -> EnsembleScores:
    """Score the members of an ensemble, alone and together, and their diversity.

    With several processes (``torch.distributed`` initialised) each passes its own samples, and all get the same result;
    call it on every rank.

    Args:
        log_probabilities: Log probabilities from :func:`log_probabilities`. Shape ``[M, N, C]``.
        labels: Right classes. Shape ``[N]``, integers in ``[0, C)``.
        bins: Number of confidence bins of equal width for the calibration error. >= 1.

    Raises:
        ValueError: If shapes do not match, labels are no classes, probabilities do not sum to 1, or there are no
            samples.

    References:
        Krogh, Vedelsby (1995), "Neural Network Ensembles, Cross Validation, and Active Learning", for the ambiguity;
        Guo et al. (2017), "On Calibration of Modern Neural Networks", arXiv:1706.04599, for the calibration error.

    Example:
        >>> predicted = torch.tensor([[[0.75, 0.25]], [[0.25, 0.75]]]).log()
        >>> scores = ensemble_scores(predicted, torch.tensor([0]))
        >>> scores.alone.accuracy, scores.together.loss.exp()
        (tensor([1., 0.], dtype=torch.float64), tensor([1.3333, 2.0000], dtype=torch.float64))
    """
    check_integers(bins=bins)
    if log_probabilities.ndim != 3 or labels.shape != log_probabilities.shape[1:2] or not len(log_probabilities):
        raise ValueError(
            "log_probabilities must have shape [M, N, C], M >= 1, and labels [N], got "
            f"{list(log_probabilities.shape)} and {list(labels.shape)}."
        )
    members, _, classes = log_probabilities.shape
    if labels.is_floating_point() or not ((labels >= 0) & (labels < classes)).all():
        raise ValueError(f"labels must be integers from 0 to {classes - 1}; leave out samples without a class.")
    sums = torch.zeros(3 * members, 4, dtype=torch.float64)  # single members, ensembles, ambiguities
    binned = torch.zeros(2 * members, bins, 3, dtype=torch.float64)
    pairs = torch.zeros(2, members, members, dtype=torch.float64)
    for start in range(0, len(labels), _CHUNK):
        part = slice(start, start + _CHUNK)
        _add(log_probabilities[:, part].cpu().double(), labels[part].cpu().long(), sums, binned, pairs)
    count = torch.tensor([len(labels)], dtype=torch.float64)
    sums, binned, pairs, count = (sum(parts) for parts in zip(*gathered((sums, binned, pairs, count)), strict=True))
    samples = int(count)
    if samples == 0:
        raise ValueError("There are no samples to score an ensemble on; pass at least one.")
    means = sums / samples
    alone, together = (_scores(means[own], binned[own] / samples, samples)
                       for own in (slice(members), slice(members, 2 * members)))  # fmt: skip
    ambiguity = means[2 * members :]
    return EnsembleScores(
        alone,
        together,
        ambiguity=ambiguity[:, 1],
        ambiguity_error=_error(ambiguity[:, 1], ambiguity[:, 2], samples),
        variance=_means_of_first(alone.brier) - together.brier,
        disagreements=pairs[0] / samples,
        divergences=pairs[1] / samples,
        samples=samples,
        bins=bins,
    )


def _add(logs: Tensor, labels: Tensor, sums: Tensor, binned: Tensor, pairs: Tensor) -> None:
    """Add samples: columns of the sums are correct, loss, its square, and Brier score."""
    members, samples, _ = logs.shape
    if samples and not float(logs.logsumexp(2).abs().max()) < 1e-3:  # also rejects NaN
        raise ValueError(
            "log_probabilities must be logarithms of probabilities that sum to 1; apply log_softmax to logits."
        )
    counts = torch.arange(1, members + 1, dtype=torch.float64)[:, None, None]
    together = logs.logcumsumexp(0) - counts.log()
    every = torch.cat([logs, together])
    probabilities, right = every.exp(), labels[None, :, None].expand(len(every), -1, 1)
    losses = -every.gather(2, right)[..., 0]
    confidence, predicted = probabilities.max(2)
    correct = (predicted == labels).double()
    # |p - e_y|^2 = |p|^2 - 2 p_y + 1
    brier = probabilities.square().sum(2) - 2 * probabilities.gather(2, right)[..., 0] + 1
    sums[: len(every)] += torch.stack([correct, losses, losses.square(), brier], 2).sum(1)
    ambiguity = _means_of_first(losses[:members]) - losses[members:]
    sums[len(every) :, 1:3] += torch.stack([ambiguity, ambiguity.square()], 2).sum(1)
    bins = binned.shape[1]
    inner = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    places = torch.bucketize(confidence, inner) + bins * torch.arange(len(every))[:, None]  # (a, b], as in Guo et al.
    for column, values in enumerate((torch.ones_like(confidence), confidence, correct)):
        found = torch.bincount(places.flatten(), values.flatten(), minlength=len(every) * bins)
        binned[..., column] += found.view(len(every), bins)
    pairs[0] += torch.stack([(predicted[:members] != own).sum(1) for own in predicted[:members]])
    flat, zero = probabilities[:members].flatten(1), logs.flatten(1).isneginf()
    known = logs.flatten(1).masked_fill(zero, 0)  # 0 log 0 = 0
    crossed = (flat @ known.T).masked_fill(flat @ zero.double().T > 0, -math.inf)
    pairs[1] += ((flat * known).sum(1, keepdim=True) - crossed).fill_diagonal_(0)  # exact zeros


def _scores(means: Tensor, binned: Tensor, samples: int) -> Scores:
    accuracy, loss, square, brier = means.unbind(1)
    return Scores(
        accuracy=accuracy,
        accuracy_error=_error(accuracy, accuracy, samples),
        loss=loss,
        loss_error=_error(loss, square, samples),
        brier=brier,
        calibration_error=(binned[..., 2] - binned[..., 1]).abs().sum(1),
    )


def _error(mean: Tensor, square: Tensor, samples: int) -> Tensor:
    """Return the standard error of a mean from the mean of squares; NaN for one sample."""
    return ((square - mean.square()).clamp(min=0) / (samples - 1)).sqrt() if samples > 1 else mean * torch.nan


def _means_of_first(values: Tensor) -> Tensor:
    """Return the means over the first 1, 2, ... entries along the first axis."""
    counts = torch.arange(1, len(values) + 1, dtype=values.dtype)
    return values.cumsum(0) / counts.view(-1, *[1] * (values.ndim - 1))


def _over_pairs(values: Tensor) -> Tensor:
    """Return the means over ordered pairs of the first 1, 2, ... entries."""
    counts = torch.arange(1, len(values) + 1, dtype=values.dtype)
    return values.cumsum(0).cumsum(1).diagonal() / (counts * (counts - 1))
