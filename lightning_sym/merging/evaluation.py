"""Losses and barriers of merged networks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from lightning_sym.connectivity.interpolation import Barrier, Loss, barrier, curve_losses
from lightning_sym.merging.network_files import NetworkFiles
from lightning_sym.symmetry.tracing.graph.calls import Call
from lightning_sym.symmetry.tracing.graph.capture import state_tensors

PLAIN, ALIGNED = "merged, unaligned", "merged, aligned"  # names of merged networks
Data = Iterable[Sequence[Tensor]]


class _Readable(nn.Module):
    """A network with a single output tensor: the logits, if there are several outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        return Call.of(inputs).outputs_of(self.network)[0]


@dataclass(frozen=True)
class Evaluation:
    """Settings of the evaluation.

    Attributes:
        data: Test batches.
        statistics: Batches for the statistics of batch norms.
        loss: Function of outputs and targets.
        points: Number of points on a linear path.
        progress: Whether to show progress bars.
        copies: Storage for new networks.
    """

    data: Data
    statistics: Data | None
    loss: Loss | None
    points: int
    progress: bool
    copies: NetworkFiles

    def losses(
        self,
        names: Sequence[str],
        networks: Sequence[nn.Module],
        plain: nn.Module,
        result: nn.Module,
        align_only: bool,
    ) -> dict[str, tuple[float, float | None]]:
        """Return loss and accuracy of the networks, and of merged ones with recomputed batch norm statistics.

        Args:
            names: Names of the networks.
            networks: The networks, unaligned.
            plain: Their merge without alignment.
            result: Their merge after alignment, or the second one, aligned.
            align_only: Whether the result is the second one.
        """
        found = self.measured(networks, names, recalibrate=False)
        if align_only:
            return found | self.measured([result], [f"{names[1]}, aligned"], recalibrate=False)
        return found | self.measured([plain, result], [PLAIN, ALIGNED], recalibrate="auto")

    def measured(
        self, networks: Sequence[nn.Module], names: Sequence[str], *, recalibrate: bool | Literal["auto"]
    ) -> dict[str, tuple[float, float | None]]:
        """Return loss and accuracy of networks by name.

        Args:
            networks: The networks, of one class.
            names: Their names.
            recalibrate: Whether to recompute the statistics of batch norms first.
        """
        scratch = _Readable(self.copies.copy(networks[0], state_tensors(networks[0]).items()))

        def place(number: float) -> None:
            scratch.network.load_state_dict(networks[int(number)].state_dict())

        curve = curve_losses(
            scratch,
            place,
            list(range(len(networks))),
            self.data,
            loss=self.loss,
            recalibrate=recalibrate,
            recalibration_data=self.statistics,
        )
        accuracies = [None] * len(names) if curve.accuracy is None else curve.accuracy.tolist()
        return dict(zip(names, zip(curve.loss.tolist(), accuracies, strict=True), strict=True))

    def barriers(self, networks: Sequence[nn.Module], aligned: Sequence[nn.Module]) -> dict[str, list[Barrier]]:
        """Return the barriers from the first network to each other one, before and after alignment."""
        return {
            name: [self._barrier(own[0], other) for other in own[1:]]
            for name, own in (("unmatched", networks), ("aligned", aligned))
        }

    def _barrier(self, a: nn.Module, b: nn.Module) -> Barrier:
        return barrier(
            _Readable(a),
            _Readable(b),
            self.data,
            points=self.points,
            loss=self.loss,
            recalibration_data=self.statistics,
            progress=self.progress,
        )


def warnings_of(
    losses: Mapping[str, tuple[float, float | None]],
    barriers: Mapping[str, Sequence[Barrier]],
    align: str,
    align_only: bool,
) -> tuple[str, ...]:
    """Warn if the result is better without alignment on these data."""
    if align_only:
        before, after = barriers["unmatched"][0].loss_barrier, barriers["aligned"][0].loss_barrier
        what = "the barrier on these data is lower"
    else:
        before, after = losses[PLAIN][0], losses[ALIGNED][0]
        what = "no network was aligned, as the loss on these data is lower"
    if not before < after:
        return ()
    other = "weights" if align == "activations" else "activations"
    return (
        f"{what} without alignment ({before:.4g}; aligned {after:.4g}); try --align {other}, or checkpoints that were "
        "trained longer or are wider",
    )
