"""How training moves a network along its symmetry: conserved quantities, balance, dead units, distance to the start."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn

from lightning_sym._checks import check_integers
from lightning_sym._files import write_atomically
from lightning_sym._random import generator
from lightning_sym._text import ranges
from lightning_sym.callbacks._checks import lacking, network_of
from lightning_sym.callbacks.publishing import publish_results, publish_text
from lightning_sym.callbacks.report import AfterFit
from lightning_sym.datamodules import ImageDataModule
from lightning_sym.reports.symmetry import GroupKind, SymmetryMeter, monitor_results, monitor_scalars
from lightning_sym.tasks.strategy import gather
from lightning_sym.zoo import versions

_SHARDED = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)
# A task with all of these trains several networks.
_OF_POPULATIONS = ("population", "numbers", "member_seeds", "member_parallel", "network")


class SymmetryMonitor(AfterFit):
    r"""Follow how training moves a network along and across the orbits of its symmetry group.

    The symmetry is traced once, before the first step. For each axis group (units that move together, for example the
    neurons of a layer) let :math:`a_i` and :math:`b_i` be the squared norms of what comes into unit :math:`i` and of
    what goes out of it (:func:`lightning_sym.symmetry.balance`). Logged, from values at the start of training, after
    every ``every_n_epochs`` epochs (or ``every_n_steps`` optimizer steps) and at the end:

    - ``symmetry/imbalance/<group>``: :math:`\sum_i |a_i - b_i| / \sum_i (a_i + b_i)`, in [0, 1]; 0 if every unit is
      balanced. Not for groups whose units only receive (a batch norm before tanh): there it would always be 1.
    - ``symmetry/conserved/<group>``: mean of :math:`|a_i - b_i|` over units, and ``symmetry/drift/<group>``:
      :math:`\sum_i |(a_i - b_i) - (a_i - b_i)^{start}| / \sum_i (a_i + b_i)^{start}`. Gradient flow conserves
      :math:`a_i - b_i`; finite steps, momentum, adaptive optimizers and weight decay change it. Only for groups with
      a free scale; without one (tanh, GELU) nothing is conserved.
    - ``symmetry/dead/<group>``: number of units with :math:`a_i = 0` or :math:`b_i = 0` exactly, which no scale can
      balance. That is read from weights; units that never fire on the data are another thing.
    - ``symmetry/distance/parameters``, ``.../balanced``, ``.../canonical``: Euclidean distance to the start, relative
      to the norm of the start: of the parameters as they are; after both networks were balanced, with units in place
      (what is left when rescaling is taken out); of the canonical forms, with signs fixed and units sorted. The last is
      zero for two members of one orbit, but jumps where two units change places (docs/theory/intertwiners.md, 5.4).

    For a :class:`lightning_sym.tasks.ZooTask` these are means over members; ``.../member-0003`` is one member. Members
    whose weights are not finite are left out. All other modules are one network, the attribute ``network``.

    Written at the end, on rank 0: ``results/symmetry.png`` (in TensorBoard ``figures/SymmetryMonitor/symmetry``),
    ``symmetry.csv`` and ``.json`` (a row per point, member and group), ``symmetry_distance.csv`` and ``.json`` (a row
    per point and member); before the first step ``symmetry.txt``, the symmetry as text, and the same in TensorBoard.

    Training stays bitwise as it is: a copy is measured, and no random number is drawn. With ``ddp`` rank 0 measures;
    with ``ddp_members`` every rank its own members. Checkpoints hold the curves and, if ``distance``, the weights at
    the start, so that a resumed run goes on with them; without these "start" is where the monitor came in.

    Args:
        every_n_epochs: Epochs between two points. >= 1.
        every_n_steps: Optimizer steps between two points, in place of epochs. None or >= 1.
        members: Which members of a ``ZooTask`` are watched: ``"all"`` or their numbers.
        network: The attribute of the LightningModule that holds the network, with dots for attributes of attributes;
            ``""`` is the LightningModule itself. Not used for a ``ZooTask``.
        distance: Whether to log distances, which needs two canonical forms per point and member.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
        prefix: First part of all names, in place of ``symmetry``; two monitors in one fit need two.

    Raises:
        ValueError: If an argument is out of range.

    Note:
        The network is traced on ``example_input_array`` of the LightningModule if it is set, on the input shape of a
        datamodule of :mod:`lightning_sym.datamodules`, or on the first training batch (its first entry if it is a tuple
        or list), which must be what ``network`` is called with.
    """

    data_type = None

    def __init__(
        self,
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        members: Literal["all"] | list[int] = "all",
        network: str = "network",
        distance: bool = True,
        dirpath: str | None = None,
        prefix: str = "symmetry",
    ) -> None:
        check_integers(every_n_epochs=every_n_epochs, every_n_steps=1 if every_n_steps is None else every_n_steps)
        if members != "all" and (isinstance(members, str) or not members or len(set(members)) != len(members)):
            raise ValueError(f'members must be "all" or distinct numbers, at least one, got {members!r}.')
        if not re.fullmatch(r"[\w.-]+", prefix):
            raise ValueError(f"prefix must be made of letters, digits, '_', '.' and '-', got {prefix!r}.")
        super().__init__(dirpath)
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.members = members
        self.network = network
        self.distance = distance
        self.prefix = prefix
        self._clear()

    def _clear(self) -> None:
        self._meter: SymmetryMeter | None = None
        self._kinds: dict[str, GroupKind] = {}  # with _table, of a resumed run that may have nothing to trace
        self._table: dict[str, Any] = {}  # the symmetry for the files
        self._points: list[dict[str, Any]] = []
        self._starts: dict[int, dict[str, Any]] = {}
        self._forms: dict[int, dict[str, Tensor]] = {}  # of the starts; made again after a resume
        self._saved_as: dict[str, Any] | None = None
        self._begun = False
        self._epoch = 0.0

    @property
    def state_key(self) -> str:
        """Two monitors of one fit keep their states apart."""
        return self._generate_state_key(network=self.network, prefix=self.prefix)

    # ---- before the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the members and the strategy.

        Raises:
            ValueError: If there is no such member, or the strategy shards weights.
        """
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._clear()
        if isinstance(trainer.strategy, _SHARDED):
            raise ValueError(
                f"SymmetryMonitor needs whole weights, which {type(trainer.strategy).__name__} shards; use ddp, or "
                "remove the callback."
            )
        task: Any = pl_module
        several = _has_members(pl_module)
        if several and self.members != "all" and (missing := sorted(set(self.members) - set(task.numbers))):
            raise ValueError(
                f"SymmetryMonitor(members=...) names member(s) {ranges(missing)}, and the task has "
                f"{ranges(task.numbers)}."
            )
        if not several and self.members != "all":
            raise ValueError(
                f"SymmetryMonitor(members={self.members}) is for a task with several networks, such as a ZooTask, and "
                f"{type(pl_module).__name__} has no {' and no '.join(lacking(pl_module, _OF_POPULATIONS))}; leave "
                'members at "all".'
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the network, which the module's own setup may have made, and trace it if its input is known.

        Raises:
            ValueError: If there is no such network, or it cannot be traced.
        """
        network = self._network(pl_module)  # an error if there is none
        example = _example(trainer, pl_module)
        if example is not None:
            self._trace(network, example)

    def _network(self, pl_module: LightningModule) -> nn.Module:
        """Return the network to watch; for a population the one that its members are made from."""
        return network_of(self, pl_module, "network" if _has_members(pl_module) else self.network)

    def _trace(self, network: nn.Module, example: Any) -> None:
        self._meter = SymmetryMeter(network, example)
        self._kinds = self._meter.kinds
        symmetry = self._meter.symmetry
        self._table = {"symmetry": symmetry.table(), "notes": list(symmetry.notes)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the start, if the network has been traced."""
        if self._meter is not None:
            self._begin(trainer, pl_module, self._meter)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Trace on the first batch if nothing else said what the network's input is, and measure the start.

        Raises:
            ValueError: If the batch does not show what the input is, or the network cannot be traced.
        """
        if not self._begun:
            if self._meter is None:
                self._trace(self._network(pl_module), _first_input(pl_module, batch))
            assert self._meter is not None
            self._begin(trainer, pl_module, self._meter)
        # Lightning does not end an epoch again that was over but for that when it was saved (by every_n_train_steps).
        if batch_idx == 0 and self._is_due(trainer, trainer.current_epoch):
            self._measure(trainer, pl_module, float(trainer.current_epoch))

    def _begin(self, trainer: Trainer, pl_module: LightningModule, meter: SymmetryMeter) -> None:
        self._begun = True
        mine = self._settings(meter, self._watched(pl_module))
        if self._saved_as is not None and self._saved_as != mine:
            different = [f"{name} {self._saved_as.get(name)!r} there, {mine[name]!r} here" for name in mine
                         if self._saved_as.get(name) != mine[name]]  # fmt: skip
            raise ValueError(
                f"The checkpoint's SymmetryMonitor watched something else: {'; '.join(different)}. Resume with the "
                "same network and arguments, or with another prefix to start its curves anew."
            )
        if trainer.is_global_zero and self.active:
            write_atomically(self.path / f"{self.prefix}.txt", f"{meter.symmetry}\n")
            publish_text(trainer, str(meter.symmetry), self.prefix)
        if not self._points:
            # Rank 0 has the starts of all members, as it writes the checkpoint.
            own = {
                number: meter.start(self._state(pl_module, number), distance=self.distance)
                for number in self._own(trainer, pl_module)
            }
            self._starts |= _of_all_ranks(own)
            done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            self._measure(trainer, pl_module, _epochs(trainer, begun=done))

    def _settings(self, meter: SymmetryMeter, members: list[int]) -> dict[str, Any]:
        return {"network": meter.symmetry.fingerprint, "members": members, "distance": self.distance}

    # ---- points

    def _watched(self, pl_module: LightningModule) -> list[int]:
        """Return the numbers of all watched members; a network that is no population is number 0."""
        if not _has_members(pl_module):
            return [0]
        numbers: Any = pl_module.numbers
        return list(numbers) if self.members == "all" else sorted(self.members)

    def _own(self, trainer: Trainer, pl_module: LightningModule) -> list[int]:
        """Return the numbers of the members that this rank measures."""
        watched, task = self._watched(pl_module), pl_module
        if _has_members(pl_module) and task.member_parallel:
            return [number for number in watched if number in task.member_seeds]  # type: ignore[operator]
        return watched if trainer.is_global_zero else []  # all ranks have the same weights

    def _state(self, pl_module: LightningModule, number: int) -> dict[str, Tensor]:
        """Return a copy on the CPU of the current parameters and buffers."""
        if _has_members(pl_module):
            population: Any = pl_module.population
            state: Mapping[str, Tensor] = population.member_state(number)
        else:
            network = self._network(pl_module)
            state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def _measure(self, trainer: Trainer, pl_module: LightningModule, epoch: float) -> None:
        """Add a point; to be called on every rank."""
        assert self._meter is not None
        own = {}
        for number in self._own(trainer, pl_module):
            start = self._starts[number]
            if self.distance and number not in self._forms:
                self._forms[number] = self._meter.forms(start["state"])
            forms = self._forms[number] if self.distance else None
            own[number] = self._meter.values(self._state(pl_module, number), start, forms)
        point = {"step": trainer.global_step, "epoch": epoch, "members": _of_all_ranks(own)}
        self._points.append(point)
        if trainer.is_global_zero and self.active:
            scalars = monitor_scalars(point, self.prefix, named=_has_members(pl_module))
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=max(trainer.global_step - 1, 0))  # Lightning's step of an epoch's end

    def _is_due(self, trainer: Trainer, epochs: int) -> bool:
        """Return whether a point is wanted after so many epochs, and has not been made."""
        wanted = self._begun and self.every_n_steps is None and epochs % self.every_n_epochs == 0
        return wanted and bool(trainer.global_step != self._points[-1]["step"])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure after every so many optimizer steps."""
        if self.every_n_steps is None or trainer.global_step == self._points[-1]["step"]:
            return  # the latter while gradients accumulate
        if trainer.global_step % self.every_n_steps == 0:
            self._measure(trainer, pl_module, _epochs(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after every so many epochs."""
        self._epoch = _epochs(trainer, ended=True)
        if self._is_due(trainer, trainer.current_epoch + 1):
            self._measure(trainer, pl_module, self._epoch)

    # ---- the end

    def conclude(self, trainer: Trainer, task: LightningModule, data: None) -> None:
        """Measure the end, write the figure and the tables; without points, nothing: there was no step."""
        if self._begun and trainer.global_step != self._points[-1]["step"]:
            self._measure(trainer, task, self._epoch)
        if not self._points or not trainer.is_global_zero:
            return
        network = type(self._network(task)).__name__
        about = {"network": network, "members": self._watched(task), **self._table, "versions": versions()}
        results = monitor_results(
            self._points, self._kinds, network=network, about=about, name=self.prefix, distance=self.distance
        )
        publish_results(trainer, results, self.path, "figures/SymmetryMonitor")

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the curves and the start, on rank 0 of all members."""
        if self._meter is None or not self._points:
            return {}
        return {
            "settings": self._settings(self._meter, sorted(self._starts)),
            "points": list(self._points),
            "starts": self._starts,
            "kinds": {name: list(kind) for name, kind in self._kinds.items()},
            "table": self._table,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the curves and the start back."""
        if state_dict:
            self._saved_as = state_dict["settings"]
            self._points = list(state_dict["points"])
            self._starts = state_dict["starts"]
            # For a run without an epoch left, which may never see a batch to trace the network on.
            self._kinds = {name: GroupKind(*kind) for name, kind in state_dict["kinds"].items()}
            self._table = state_dict["table"]


def _has_members(pl_module: LightningModule) -> bool:
    """Return whether a task trains several networks, which it has by number."""
    return not lacking(pl_module, _OF_POPULATIONS)


def _of_all_ranks(own: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return what all ranks know of their members, in order; to be called on every rank."""
    return dict(sorted(item for part in gather(own) for item in part.items()))


def _example(trainer: Trainer, pl_module: LightningModule) -> Any:
    """Return an example of the network's input if one is known before the first batch, else None."""
    example = pl_module.example_input_array
    if isinstance(example, Mapping):
        raise ValueError(
            f"SymmetryMonitor calls the network with positional arguments, and example_input_array of "
            f"{type(pl_module).__name__} is a {type(example).__name__}; make it a tensor or a tuple."
        )
    if example is not None:
        return example
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, ImageDataModule):
        return torch.randn(2, *data.input_shape, generator=generator("SymmetryMonitor"))
    return None


def _first_input(pl_module: LightningModule, batch: Any) -> Tensor:
    """Return a few inputs out of a batch."""
    first = batch[0] if isinstance(batch, (tuple, list)) and len(batch) else batch
    if not isinstance(first, Tensor) or first.dim() == 0:
        found = f"a {type(batch).__name__}" + (
            f" that begins with a {type(first).__name__}" if first is not batch else ""
        )
        raise ValueError(
            f"SymmetryMonitor cannot tell the network's input from a batch that is {found}; set example_input_array in "
            f"{type(pl_module).__name__}.__init__ to what the network is called with, or let batches begin with it."
        )
    if _has_members(pl_module):
        first = first[0]  # a population's batches have one row per member
    return first[:4]


def _epochs(trainer: Trainer, *, begun: int | None = None, ended: bool = False) -> float:
    """Return how many epochs have been trained, with the part of the current one.

    Args:
        trainer: Says how many batches an epoch has.
        begun: Batches of this epoch that count; default all that were begun, which at the end of a batch are all done.
        ended: Whether the epoch is over, for epochs of unknown length.
    """
    batches = float(trainer.num_training_batches)
    if not math.isfinite(batches) or batches == 0:
        return float(trainer.current_epoch + ended)
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready if begun is None else begun
    return float(trainer.current_epoch + min(1.0, done / batches))
