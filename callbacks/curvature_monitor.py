"""Sharpness of the loss during training: top eigenvalue, trace, and curvature along the step."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Generator, Tensor, nn

from lightning_sym import curvature
from lightning_sym._checks import check_integers, check_numbers, not_finite
from lightning_sym._random import generator
from lightning_sym.callbacks._batches import TrainingBatches
from lightning_sym.callbacks._checks import loss_of
from lightning_sym.callbacks._monitor import TrainingMonitor, by_member
from lightning_sym.reports import RunResults
from lightning_sym.reports.curvature_monitor import monitor_results, monitor_scalars
from lightning_sym.reports.report import picked
from lightning_sym.zoo import versions

State = Mapping[str, Tensor]


class CurvatureMonitor(TrainingMonitor):
    r"""Log the sharpness of the training loss: the Hessian's top eigenvalue, trace and curvature along the step.

    Works with any LightningModule that holds a network, and with populations such as
    :class:`lightning_sym.tasks.ZooTask`. Values are logged at the start of training, after every ``every_n_epochs``
    epochs (or ``every_n_steps`` optimizer steps) and at the end:

    - ``curvature/top_eigenvalue``: the largest eigenvalue, to the relative error ``tolerance``;
    - ``curvature/trace`` and ``curvature/trace_error``: the trace by Hutchinson's method and its standard error; with
      the same random signs at every point, and other ones for each member, so that the errors of members are
      independent;
    - ``curvature/along_step``: :math:`d^\top H d` for the normalised direction d of the last optimizer step, at the
      weights after it. Omitted without a step (at the start), for a zero step, and for the last step of an epoch of
      unknown length;
    - ``curvature/loss``: the underlying loss, in eval mode, on the data below.

    For populations these are means over members (``trace_error`` is the standard error of the mean), and
    ``details/curvature/top_eigenvalue/member-0003`` is one member. Members without finite weights are left
    out. The data are ``curvature_dataloader()`` of the datamodule: all training inputs, without augmentation; for other
    datamodules the training data set in index order. With several processes each takes its share. Data that change
    between passes (by random augmentation) raise an error.

    Written at the end, on rank 0: ``results/curvature.png`` (in TensorBoard ``figures/CurvatureMonitor/curvature``),
    ``curvature.csv`` and ``.json`` (a row per point and member).

    Training is bitwise unaffected: the callback measures copies and restores the global random numbers. Checkpoints
    hold the points. Values that miss the tolerance are left out, with a warning.

    Args:
        every_n_epochs: Epochs between two points. >= 1.
        every_n_steps: Optimizer steps between two points, instead of epochs. None or >= 1.
        members: Members of a population to watch: ``"all"`` or their indices.
        network: The attribute of the LightningModule that holds the network, with dots for attributes of attributes;
            ``""`` is the LightningModule itself. Not used for a population.
        loss: Mean over samples of outputs and targets; default the module's ``loss``, ``loss_function``, ``criterion``
            or ``loss_fn``.
        train_batches: Number of batches of the data per process, >= 1; None for all.
        probes: Number of random vectors for the trace. >= 2.
        tolerance: Relative error of the eigenvalue, as :func:`~lightning_sym.curvature.top_eigenvalue` estimates it. In
            (0, 1).
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
        prefix: First part of all names instead of ``curvature``; two monitors in one fit need different prefixes.

    Raises:
        ValueError: If an argument is out of range.

    Note:
        A point takes about ``probes + 8`` products with the Hessian, each of about three gradients over the data.
    """

    shown_first: ClassVar[Mapping[str, str]] = {
        "largest eigenvalue of the Hessian": "top_eigenvalue",
        "its trace": "trace",
        "along the step": "along_step",
    }

    def __init__(
        self,
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        members: Literal["all"] | list[int] = "all",
        network: str = "network",
        loss: Callable[[Any, Any], Any] | None = None,
        train_batches: int | None = None,
        probes: int = 16,
        tolerance: float = 1e-3,
        dirpath: str | None = None,
        prefix: str = "curvature",
    ) -> None:
        super().__init__(every_n_epochs, every_n_steps, members, network, dirpath, prefix)
        check_integers(train_batches=1 if train_batches is None else train_batches)
        check_integers(2, probes=probes)
        check_numbers("in (0, 1)", tolerance=tolerance)
        self.loss = loss
        self.train_batches = train_batches
        self.probes = probes
        self.tolerance = tolerance

    def clear(self) -> None:
        """Reset the state of an earlier fit."""
        super().clear()
        self._before: dict[int, dict[str, Tensor]] | None = None  # this rank's weights before the next step
        self._steps: dict[int, dict[str, Tensor]] = {}  # the last step of all members

    def settings(self, members: list[int]) -> dict[str, Any]:
        """Return the settings that a checkpoint and the resumed run must share."""
        return {"members": members, **picked(self, "train_batches", "probes", "tolerance")}

    # ---- when

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the network, the loss and the data, and measure the start.

        Raises:
            TypeError: If the training data have no fixed order.
            ValueError: If there is no such network or no loss, or the data change.
        """
        self.network_of(pl_module)  # raises an error if there is none
        self.begin(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Store the weights if a point may follow the next step."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        step = trainer.global_step + 1
        last = batch_idx + 1 == trainer.num_training_batches or step == trainer.max_steps
        due = last or (self.every_n_steps is not None and step % self.every_n_steps == 0)
        self._before, self._steps = self.own_states(trainer, pl_module, None) if due else None, {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, and measure after every so many steps."""
        if self._before is not None:
            after = self.own_states(trainer, pl_module)
            self._steps = by_member({number: _change(self._before[number], after[number]) for number in after})
            self._before = None
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    # ---- measurements

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the measurements of all members, on every rank."""
        loss, found = loss_of(self, pl_module, self.loss), {}
        steps, self._steps = self._steps, {}
        with isolate_rng():
            data = TrainingBatches(self, trainer, pl_module, self.train_batches)
            for number, state in self.states(trainer, pl_module).items():
                network = self.copied(trainer, pl_module, state)
                finite = not not_finite(state)
                signs = generator("curvature monitor", number)
                found[number] = self._sharpness(network, data, loss, steps.get(number), signs) if finite else {}
        return {"members": found}

    def _sharpness(
        self, network: nn.Module, data: Any, loss: Any, step: State | None, signs: Generator
    ) -> dict[str, float]:
        """Return the measurements of one network at one point."""
        found: dict[str, float] = {}
        try:
            hessian = curvature.CurvatureOperator(network, data, loss)
            found["loss"] = hessian.gradient_and_loss()[1]
            estimate = curvature.trace(hessian, self.probes, generator=signs)
            found |= {"trace": estimate.value, "trace_error": estimate.standard_error}
            if step is not None and bool((direction := hessian.flatten(step)).any()):
                found["along_step"] = curvature.directional_curvature(hessian, {"step": direction})["step"][1]
            found["top_eigenvalue"] = curvature.top_eigenvalue(hessian, error=self.tolerance).value
        except (curvature.NonFiniteError, curvature.NotConvergedError) as error:
            rank_zero_warn(f"CurvatureMonitor leaves out a measurement: {error}")
        return found

    def scalars(self, point: Mapping[str, Any], *, named: bool) -> dict[str, float]:
        """Return means over members, and the members' own values."""
        return monitor_scalars(point, self.prefix, named=named)

    def results(self, network: str, members: list[int]) -> RunResults:
        """Return the curves as a figure and a table."""
        about = {"network": network, "settings": self.settings(members), "versions": versions()}
        return monitor_results(self.points, network=network, about=about, name=self.prefix)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the points, and the last step if its point is still due."""
        state = super().state_dict()
        return {**state, "steps": self._steps} if state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the points."""
        super().load_state_dict(state_dict)
        self._steps = state_dict.get("steps", {})


def _change(before: State, after: State) -> dict[str, Tensor]:
    """Return the change of all tensors, in double precision on the CPU."""
    return {name: after[name].double() - before[name].cpu().double() for name in after}
