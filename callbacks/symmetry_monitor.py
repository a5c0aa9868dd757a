"""Training along and across symmetry orbits: conserved quantities, balance, dead units, distance to the start."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn

from lightning_sym._files import write_atomically
from lightning_sym._random import generator
from lightning_sym.callbacks._checks import has_members
from lightning_sym.callbacks._monitor import TrainingMonitor, by_member
from lightning_sym.callbacks.publishing import publish_text
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.reports import RunResults
from lightning_sym.reports.symmetry import GroupKind, SymmetryMeter, monitor_results, monitor_scalars
from lightning_sym.zoo import versions


class SymmetryMonitor(TrainingMonitor):
    r"""Log how far training moves a network along and across its symmetry orbits.

    The symmetry is traced once, before the first step. For each axis group (units permuted together, for example the
    neurons of a layer) let :math:`a_i` and :math:`b_i` be the squared norms of the incoming and outgoing weights of
    unit :math:`i` (:func:`lightning_sym.symmetry.balance`). Values are logged at the start of training, after
    every ``every_n_epochs`` epochs (or ``every_n_steps`` optimizer steps) and at the end:

    - ``symmetry/imbalance/<group>``: :math:`\sum_i |a_i - b_i| / \sum_i (a_i + b_i)`, in [0, 1]; 0 if every unit is
      balanced. Omitted for groups without outgoing weights (a batch norm before tanh), where it would always be 1.
    - ``symmetry/conserved/<group>``: mean of :math:`|a_i - b_i|` over units, and ``symmetry/drift/<group>``:
      :math:`\sum_i |(a_i - b_i) - (a_i - b_i)^{start}| / \sum_i (a_i + b_i)^{start}`. Gradient flow conserves
      :math:`a_i - b_i`; finite steps, momentum, adaptive optimizers and weight decay change it. Only for groups with
      independent scales; without them (tanh, GELU) there is no conserved quantity.
    - ``symmetry/dead/<group>``: number of units with :math:`a_i = 0` or :math:`b_i = 0` exactly, which no scale can
      balance. It depends on weights only; units that never fire on the data are not counted.
    - ``symmetry/distance/parameters``, ``.../balanced``, ``.../canonical``: Euclidean distance to the start, relative
      to the norm of the start. The first compares the parameters. The second compares balanced networks without
      permuting units, and so cancels rescaling. The third compares canonical forms, with fixed signs and sorted units:
      it is zero for two points of one orbit, but jumps when the sorting of two units changes
      (docs/theory/canonical.md, 4).

    ``symmetry/<quantity>`` is the mean over groups; with more than two or three groups, values of groups are details.

    For a :class:`lightning_sym.tasks.ZooTask` these are means over members; ``details/.../member-0003`` is one member.
    Members with weights that are not finite are left out. Any other module is one network, the attribute ``network``.

    Written at the end, on rank 0: ``results/symmetry.png`` (in TensorBoard ``figures/SymmetryMonitor/symmetry``),
    ``symmetry.csv`` and ``.json`` (a row per point, member and group), ``symmetry_distance.csv`` and ``.json`` (a row
    per point and member); before the first step ``symmetry.txt``, the symmetry as text, and the same in TensorBoard.

    Training is bitwise unaffected: the callback measures a copy and draws no random number. With ``ddp`` rank 0
    measures; with ``ddp_members`` every rank measures its own members. Checkpoints hold the curves and, if
    ``distance``, the starting weights for a resumed run; without these, "start" is the time when the monitor was added.

    Args:
        every_n_epochs: Epochs between two points. >= 1.
        every_n_steps: Optimizer steps between two points, instead of epochs. None or >= 1.
        members: Members of a ``ZooTask`` to watch: ``"all"`` or their indices.
        network: The attribute of the LightningModule that holds the network, with dots for attributes of attributes;
            ``""`` is the LightningModule itself. Not used for a ``ZooTask``.
        distance: Whether to log distances, which needs two canonical forms per point and member.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.
        prefix: First part of all names instead of ``symmetry``; two monitors in one fit need different prefixes.

    Raises:
        ValueError: If an argument is out of range.

    Note:
        The network is traced on ``example_input_array`` of the LightningModule if it is set, on the input shape of a
        datamodule of :mod:`lightning_sym.datamodules`, or on the first training batch. A batch, or its first entry if
        it is a tuple or list, must be the input of ``network``.
    """

    shown_first: ClassVar[Mapping[str, str]] = {"imbalance, and change of conserved quantities": "(imbalance|drift)"}

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
        super().__init__(every_n_epochs, every_n_steps, members, network, dirpath, prefix)
        self.distance = distance

    def clear(self) -> None:
        """Reset the state of an earlier fit."""
        super().clear()
        self._meter: SymmetryMeter | None = None
        self._kinds: dict[str, GroupKind] = {}  # with _table, of a resumed run that may lack an input for tracing
        self._table: dict[str, Any] = {}  # the symmetry for the files
        self._forms: dict[int, dict[str, Tensor]] = {}  # canonical forms of the starts; recomputed after a resume

    # ---- before the first step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the network, which the module's setup may have made, and trace it if its input is known.

        Raises:
            ValueError: If there is no such network, or it cannot be traced.
        """
        network = self.network_of(pl_module)  # raises an error if there is none
        example = known_example(trainer, pl_module)
        if example is not None:
            self._trace(network, example)

    def _trace(self, network: nn.Module, example: Any) -> None:
        self._meter = SymmetryMeter(network, example)
        self._kinds = self._meter.kinds
        symmetry = self._meter.symmetry
        self._table = {"symmetry": symmetry.table(), "notes": list(symmetry.notes)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the start, if the network has been traced."""
        if self._meter is not None:
            self.begin(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Trace on the first batch if the network's input is otherwise unknown, and measure the start.

        Raises:
            ValueError: If the batch does not begin with an input, or the network cannot be traced.
        """
        if self._meter is None:
            self._trace(self.network_of(pl_module), first_input(pl_module, batch))
            self.begin(trainer, pl_module)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the symmetry, and measure the start; see :meth:`TrainingMonitor.begin`."""
        super().begin(trainer, pl_module)
        if trainer.is_global_zero and self.active:
            text = str(self.meter.symmetry)
            write_atomically(self.path / f"{self.prefix}.txt", f"{text}\n")
            publish_text(trainer, text, self.prefix)

    @property
    def meter(self) -> SymmetryMeter:
        """The object that measures, available once the network has been traced."""
        assert self._meter is not None
        return self._meter

    def settings(self, members: list[int]) -> dict[str, Any]:
        """Return the settings that a checkpoint and the resumed run must share."""
        return {"network": self.meter.symmetry.fingerprint, "members": members, "distance": self.distance}

    # ---- points

    def take_starts(self, trainer: Trainer, pl_module: LightningModule) -> dict[int, Any]:
        """Return the starting weights, on rank 0 of all members, as it writes the checkpoint."""
        own = self.own_states(trainer, pl_module)
        return by_member({n: self.meter.start(state, distance=self.distance) for n, state in own.items()})

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the quantities of each member, on rank 0 of all members."""
        own = {}
        for number, state in self.own_states(trainer, pl_module).items():
            start = self.starts[number]
            if self.distance and number not in self._forms:
                self._forms[number] = self.meter.forms(start["state"])
            forms = self._forms[number] if self.distance else None
            own[number] = self.meter.values(state, start, forms)
        return {"members": by_member(own)}

    @property
    def charts(self) -> dict[str, str]:
        """Tags of TensorBoard's first charts: imbalance and drift, and the distances if they are measured."""
        distances = {"distance to the start": f"{re.escape(self.prefix)}/distance/.*"} if self.distance else {}
        return {**super().charts, **distances}

    def scalars(self, point: Mapping[str, Any], *, named: bool) -> dict[str, float]:
        """Return means over members, and the members' own values."""
        return monitor_scalars(point, self.prefix, named=named)

    def results(self, network: str, members: list[int]) -> RunResults:
        """Return the curves as a figure and tables."""
        about = {"network": network, "members": members, **self._table, "versions": versions()}
        return monitor_results(
            self.points, self._kinds, network=network, about=about, name=self.prefix, distance=self.distance
        )

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the curves and the starting weights, on rank 0 of all members."""
        state = super().state_dict()
        kinds = {name: list(kind) for name, kind in self._kinds.items()}
        return {**state, "kinds": kinds, "table": self._table} if state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the curves and the starting weights."""
        super().load_state_dict(state_dict)
        if state_dict:
            # For a run without a remaining epoch, which may never see a batch to trace the network on.
            self._kinds = {name: GroupKind(*kind) for name, kind in state_dict["kinds"].items()}
            self._table = state_dict["table"]


def known_example(trainer: Trainer, pl_module: LightningModule) -> Any:
    """Return an example of the network's input if one is known before the first batch, else None."""
    example = pl_module.example_input_array
    if isinstance(example, Mapping):
        raise ValueError(
            f"The symmetry is traced with positional arguments of the network, but example_input_array of "
            f"{type(pl_module).__name__} is a {type(example).__name__}; make it a tensor or a tuple."
        )
    if example is not None:
        return example
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, InMemoryDataModule):
        return torch.randn(2, *data.input_shape, generator=generator("SymmetryMonitor"))
    return None


def first_input(pl_module: LightningModule, batch: Any) -> Tensor:
    """Return the first few inputs of a batch.

    Raises:
        ValueError: If the batch does not begin with inputs.
    """
    first = batch[0] if isinstance(batch, (tuple, list)) and len(batch) else batch
    if not isinstance(first, Tensor) or first.dim() == 0:
        found = f"a {type(batch).__name__}" + (
            f" that begins with a {type(first).__name__}" if first is not batch else ""
        )
        raise ValueError(
            f"The symmetry is traced with an input of the network, and a batch is {found}; set example_input_array in "
            f"{type(pl_module).__name__}.__init__ to an input of the network, or let batches begin with one."
        )
    if has_members(pl_module):
        first = first[0]  # a population's batches have one row per member
    return first[:4]
