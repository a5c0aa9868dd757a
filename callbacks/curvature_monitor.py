"""How sharp the loss is during training: top eigenvalue, trace, and curvature along the step."""

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_sym._checks import check_integers, check_numbers
from lightning_sym._random import seeded
from lightning_sym.callbacks._checks import network_of
from lightning_sym.callbacks._monitor import check_whole_weights, has_members
from lightning_sym.curvature import (
    CurvatureOperator,
    NonFiniteError,
    NotConvergedError,
    directional_curvature,
    top_eigenpairs,
    trace,
)

_LOSSES = ("loss", "loss_function", "criterion", "loss_fn")

State = dict[str, Tensor]


class CurvatureMonitor(Callback):
    r"""Follow how sharp the training loss is: the Hessian's largest eigenvalue, its trace, its value along the step.

    Logged after every ``every_n_epochs`` epochs (or ``every_n_steps`` optimizer steps), on rank 0:

    - ``curvature/top_eigenvalue``: the largest eigenvalue, to ``tolerance``;
    - ``curvature/trace`` and ``curvature/trace_error``: the trace by Hutchinson's method and its standard error; the
    same
      random signs at every point;
    - ``curvature/step``: :math:`d^\top H d` for the direction d, of length 1, of the optimizer step just taken, at the
      weights after it. Left out where the step was zero, or was not seen (epochs of unknown length);
    - ``curvature/loss``: the loss that all this is the curvature of: in eval mode, on the data below.

    For tasks that train several networks these are means over the members that were not stopped, and
    ``curvature/top_eigenvalue/member-0003`` is one. The data are ``curvature_dataloader()`` of the datamodule: all
    training inputs, not augmented; of other datamodules the training data set in its order. With several processes each
    takes its share. Where it changes from pass to pass (random augmentation in the data set), an error says so.

    Training stays bitwise as it is: copies are measured, and the global random numbers are put back. Checkpoints hold
    the points. An eigenvalue that was not found to the tolerance is left out, with a warning.

    Args:
        every_n_epochs: Epochs between two points. >= 1.
        every_n_steps: Optimizer steps between two points, in place of epochs. None or >= 1.
        loss: Mean over samples of outputs and targets; default the module's ``loss``, ``loss_function``, ``criterion``
            or ``loss_fn``.
        network: The attribute of the LightningModule that holds the network, with dots for attributes of attributes;
            ``""`` is the LightningModule itself. Not used for tasks with several networks.
        train_batches: How many batches of the data are used per process, >= 1; None for all.
        probes: Number of random vectors for the trace. >= 2.
        tolerance: Of the eigenvalue's residual, relative to it. In (0, 1).
        prefix: First part of all names, in place of ``curvature``; two monitors in one fit need two.

    Attributes:
        points: What was measured: ``step``, ``epoch``, and ``members``: numbers by the member's number (0 for one
            network).

    Raises:
        ValueError: If an argument is out of range.

    Note:
        A point takes about ``probes + 15`` products with the Hessian, each some three gradients over the data.
    """

    def __init__(
        self,
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        network: str = "network",
        train_batches: int | None = None,
        probes: int = 16,
        tolerance: float = 1e-3,
        prefix: str = "curvature",
    ) -> None:
        check_integers(
            every_n_epochs=every_n_epochs,
            every_n_steps=1 if every_n_steps is None else every_n_steps,
            train_batches=1 if train_batches is None else train_batches,
        )
        check_integers(2, probes=probes)
        check_numbers("in (0, 1)", tolerance=tolerance)
        if not re.fullmatch(r"[\w.-]+", prefix):
            raise ValueError(f"prefix must be made of letters, digits, '_', '.' and '-', got {prefix!r}.")
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.loss = loss
        self.network = network
        self.train_batches = train_batches
        self.probes = probes
        self.tolerance = tolerance
        self.prefix = prefix
        self.points: list[dict[str, Any]] = []
        self._before: dict[int, State] = {}

    @property
    def state_key(self) -> str:
        """Two monitors of one fit keep their states apart."""
        return self._generate_state_key(network=self.network, prefix=self.prefix)

    # ---- when

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the strategy and the loss.

        Raises:
            ValueError: If the strategy shards weights, or there is no loss.
        """
        if stage != "fit":
            return
        check_whole_weights(self, trainer)
        self._loss_of(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the network, which the module's own setup may have made.

        Raises:
            ValueError: If there is no such network.
        """
        if not has_members(pl_module):
            network_of(self, pl_module, self.network)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the weights if the step that comes is the one to be measured."""
        self._before = {}
        if self.every_n_steps is not None:
            due = (trainer.global_step + 1) % self.every_n_steps == 0
        else:
            last = batch_idx + 1 == trainer.num_training_batches
            due = last and (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if due:
            self._before = self._states(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure after every so many optimizer steps."""
        due = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if due and trainer.global_step:  # not while gradients accumulate for the first one
            self._measure(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after every so many epochs."""
        if self.every_n_steps is None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._measure(trainer, pl_module)

    # ---- what

    def _loss_of(self, task: LightningModule) -> Callable[[Tensor, Tensor], Tensor]:
        named = (getattr(task, name, None) for name in _LOSSES)
        loss = self.loss if self.loss is not None else next((found for found in named if callable(found)), None)
        if loss is None:
            raise ValueError(
                f"CurvatureMonitor needs the loss of outputs and targets, and {type(task).__name__} has no "
                f"{' and no '.join(_LOSSES)}; give it such an attribute, or the callback loss=..."
            )
        return loss

    def _states(self, task: Any) -> dict[int, State]:
        """Return copies of the weights and buffers of the networks that this process has."""
        if not has_members(task):
            network = network_of(self, task, self.network)
            return {0: {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}}
        own = [number for number in task.numbers if number in task.member_seeds or not task.member_parallel]
        return {number: {name: t.detach().clone() for name, t in task.population.member_state(number).items()}
                for number in own}  # fmt: skip

    def _measure(self, trainer: Trainer, task: Any) -> None:
        """Add a point, and log it; to be called on every rank."""
        if self.points and self.points[-1]["step"] == trainer.global_step:
            return  # resumed within a batch that was measured
        before, self._before = self._before, {}
        after, loss = self._states(task), self._loss_of(task)
        several = has_members(task)
        stopped = task.gathered()[0] if several else {}
        data = self._data(trainer, spread=several and task.member_parallel)
        found: dict[int, dict[str, float]] = {}
        with seeded(0):  # whatever the networks' constructors draw
            for number in task.numbers if several else [0]:
                if number in stopped:
                    continue
                first, last = (self._shared(trainer, task, states.get(number), number) for states in (before, after))
                assert last is not None
                network = self._network(trainer, task, number, last)
                found[number] = self._sharpness(network, data, loss, last, first)
        self.points.append({"step": trainer.global_step, "epoch": trainer.current_epoch + 1, "members": found})
        if trainer.is_global_zero:
            scalars = _scalars(found, self.prefix, several=several)
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=max(trainer.global_step - 1, 0))  # Lightning's step of an epoch's end

    def _shared(self, trainer: Trainer, task: Any, state: State | None, number: int) -> State | None:
        """Return a network's state as all ranks take it to be; to be called on every rank."""
        if trainer.world_size == 1:
            return state
        if not has_members(task):  # rank 0 has the statistics that DDP and checkpoints keep
            source = 0
        elif task.member_parallel:
            source = task.numbers.index(number) % trainer.world_size
        elif state is not None:  # the mean of statistics, as the task has it at the end of an epoch
            buffers = {name for name, _ in task.network.named_buffers()}
            return {
                name: trainer.strategy.reduce(value, reduce_op="mean")
                if name in buffers and value.is_floating_point()
                else value
                for name, value in state.items()
            }
        else:
            return None
        shared: State | None = trainer.strategy.broadcast(state, src=source)
        return shared

    def _network(self, trainer: Trainer, task: Any, number: int, state: State) -> nn.Module:
        """Return a network with a state; the module's own one where that has it."""
        several = has_members(task)
        network: nn.Module = task.network.fresh(number) if several else network_of(self, task, self.network)
        if several or trainer.world_size > 1:
            network = network if several else copy.deepcopy(network)
            dtype = next(value.dtype for value in state.values() if value.is_floating_point())
            network.to(trainer.strategy.root_device, dtype).load_state_dict(state)
        return network

    def _sharpness(
        self, network: nn.Module, data: Any, loss: Any, state: State, before: State | None
    ) -> dict[str, float]:
        """Return the numbers of one network at one point."""
        found: dict[str, float] = {}
        try:
            hessian = CurvatureOperator(network, data, loss)
            found["loss"] = hessian.gradient_and_loss()[1]
            estimate = trace(hessian, self.probes)
            found |= {"trace": estimate.value, "trace_error": estimate.standard_error}
            step = None if before is None else hessian.flatten(state).double() - hessian.flatten(before).double()
            if step is not None and bool(step.any()):
                found["step"] = directional_curvature(hessian, {"step": step})["step"][1]
            found["top_eigenvalue"] = float(top_eigenpairs(hessian, tolerance=self.tolerance).values[0])
        except (NonFiniteError, NotConvergedError) as error:
            rank_zero_warn(f"CurvatureMonitor leaves out what it could not measure: {error}")
        return found

    def _data(self, trainer: Trainer, *, spread: bool) -> Iterable[Any]:
        """Return this rank's batches, always the same ones."""
        source: Any = getattr(trainer, "datamodule", None)
        if hasattr(source, "curvature_dataloader"):
            loader = source.curvature_dataloader()
            if self.train_batches is not None:
                loader = list(islice(loader, self.train_batches))
            if spread:  # every rank has all the data, and takes a part of each batch
                rank, size = trainer.global_rank, trainer.world_size
                return [[tensor[rank::size] for tensor in batch] for batch in loader]
            return loader  # type: ignore[no-any-return]
        given = trainer.train_dataloader
        if not isinstance(given, DataLoader) or not hasattr(given.dataset, "__getitem__"):
            raise ValueError(
                "CurvatureMonitor goes through the training data in their order, for which it needs a DataLoader of a "
                f"data set with indices, got {type(given).__name__}; give the datamodule a curvature_dataloader()."
            )
        mine = range(trainer.global_rank, len(given.dataset), trainer.world_size)  # type: ignore[arg-type]
        chosen: Any = Subset(given.dataset, mine)
        ordered = DataLoader(chosen, given.batch_size or 64, collate_fn=given.collate_fn)
        return ordered if self.train_batches is None else list(islice(ordered, self.train_batches))

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the points."""
        return {"points": list(self.points)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the points back."""
        self.points = list(state_dict["points"])


def _scalars(found: Mapping[int, Mapping[str, float]], prefix: str, *, several: bool) -> dict[str, float]:
    """Return what is logged: means over members, and each member's numbers."""
    scalars = {}
    for name in dict.fromkeys(name for values in found.values() for name in values):
        values = {number: own[name] for number, own in found.items() if name in own}
        scalars[f"{prefix}/{name}"] = math.fsum(values.values()) / len(values)
        if several:
            scalars |= {f"{prefix}/{name}/member-{number:04d}": value for number, value in values.items()}
    return scalars
