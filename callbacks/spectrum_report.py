"""Sharpness of the members of a zoo after training."""

import time
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities import rank_zero_warn

from lightning_sym._checks import check_integers
from lightning_sym._distributed import gathered
from lightning_sym._random import seeded
from lightning_sym.callbacks._batches import TrainingBatches
from lightning_sym.callbacks.report import RunReport
from lightning_sym.curvature import CurvatureOperator, canonical_operator, sharpness_modulo_symmetry, spectral_density
from lightning_sym.datamodules import InputDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.report import counted
from lightning_sym.reports.spectra import MemberSpectrum, spectrum_results
from lightning_sym.symmetry import trace_symmetry

_LANCZOS = 20  # products for a largest eigenvalue, about


class SpectrumReport(RunReport):
    """Report the sharpness of trained networks, raw and modulo symmetry.

    At the end of the fit, every member that was not stopped is evaluated at its kept weights, without training at its
    current ones. The quantities are the
    largest eigenvalue, trace and Frobenius norm of the Hessian of the task's loss. The loss is that of the training
    data, not augmented, in eval mode. Each quantity is measured at the network, at the balanced point of its orbit, and
    at that point across the orbit, where rescaling has no effect (docs/theory/spectra.md, 6.1). The density of the
    spectrum across the orbit is estimated too. All values are float64; processes share the data.

    On rank 0, in ``results``: ``sharpness.csv`` and ``.json`` (a row per member and measure), ``spectrum.csv`` and
    ``.json`` (nodes and weights of the densities), ``spectrum.png`` and ``sharpness.png`` (in TensorBoard under
    ``figures/SpectrumReport``); means over members as ``sharpness/<measure>/<place>``; a table is printed.

    Args:
        steps: Steps of Lanczos's method for the density. >= 1.
        probes: Random vectors for the density. >= 1.
        trace_probes: Random vectors for traces and norms. >= 2.
        tolerance: Bound of residuals relative to the largest eigenvalues. In (0, 1).
        train_batches: Number of batches of the training data per process, >= 1; None for all.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of its range.

    Note:
        A member takes about ``3 * (trace_probes + 20) + steps * probes`` products with the Hessian, each some three
        gradients over the data. If that takes more than a minute, a warning estimates it from a product over one batch.
    """

    needs = ("kept_states", "loss", "network")
    example = "ZooTask"
    data_type = InputDataModule

    def __init__(
        self,
        steps: int = 64,
        probes: int = 4,
        trace_probes: int = 64,
        tolerance: float = 1e-4,
        train_batches: int | None = None,
        dirpath: str | None = None,
    ) -> None:
        check_integers(steps=steps, probes=probes, train_batches=1 if train_batches is None else train_batches)
        check_integers(2, trace_probes=trace_probes)
        self.steps = steps
        self.probes = probes
        self.trace_probes = trace_probes
        self.tolerance = tolerance
        self.train_batches = train_batches
        super().__init__(dirpath)

    def measure(self, trainer: Trainer, task: Any, data: Any) -> dict[int, MemberSpectrum]:
        """Measure all members; to be called on every rank.

        Raises:
            ValueError: If the training data change from pass to pass.
        """
        device = trainer.strategy.root_device  # after a fit Lightning has moved the module to the CPU
        batches = TrainingBatches(self, trainer, task, self.train_batches).own()
        states = task.kept_states()
        found = {}
        with self.progress(trainer, "measuring spectra") as progress, seeded(0):
            for done, (number, state) in enumerate(states.items()):
                network = task.network.fresh(number)
                dtype = next(value.dtype for value in state.values() if value.is_floating_point())
                network.to(device, dtype).load_state_dict(state)
                if not done:
                    symmetry = trace_symmetry(network, torch.rand(2, *data.input_shape, dtype=dtype).to(device))
                    self._say_if_long(network, batches, task.loss, len(states))
                found[number] = self._measured(symmetry, network, batches, task.loss)
                progress(done + 1, len(states))
        return found

    def _say_if_long(self, network: Any, batches: Any, loss: Any, members: int) -> None:
        """Warn of more than a minute of work, from a product over the first batch; to be called on every rank."""
        samples = sum(gathered(sum(len(x) for x, _ in batches)))
        try:
            hessian = CurvatureOperator(network, batches[:1], loss, dtype=torch.float64, check=False)
            ones = torch.ones(hessian.size)
            hessian @ ones  # the first product of a process loads code, and can take a thousand times as long
        except ValueError:  # the first batch has no loss; the spectrum itself refuses data without any
            return
        begun = time.perf_counter()
        hessian @ ones
        products = members * (3 * (self.trace_probes + _LANCZOS) + self.steps * self.probes)
        each = (time.perf_counter() - begun) * samples / hessian.samples
        minutes = each * products / 60
        if minutes > 1:
            rank_zero_warn(
                f"SpectrumReport makes about {products:,} products with Hessians of {samples:,} inputs, in "
                f"roughly {minutes:.0f} min on this machine; fewer inputs take less (train_batches=2, on the command "
                "line --trainer.callbacks.train_batches 2)."
            )

    def _measured(self, symmetry: Any, network: Any, batches: Any, loss: Any) -> MemberSpectrum:
        sharpness = sharpness_modulo_symmetry(
            symmetry, network, batches, loss, probes=self.trace_probes, tolerance=self.tolerance, columns=32
        )
        _, across, _ = canonical_operator(symmetry, network, batches, loss, columns=32)
        return MemberSpectrum(sharpness, spectral_density(across, self.steps, self.probes))

    def report(self, trainer: Trainer, task: Any, data: Any, measured: dict[int, MemberSpectrum]) -> RunResults:
        """Return the table and the figures."""
        about = {
            "architecture": task.network.architecture,
            "seeds": list(measured),
            "settings": {name: getattr(self, name) for name in ("steps", "probes", "trace_probes", "tolerance")},
            **self.source(data),
        }
        title = f"{architecture_name(task.network)}, {counted(len(measured), 'member')}"
        return spectrum_results(measured, title=title, about=about)
