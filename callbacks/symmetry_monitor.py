"""How training moves a network along its symmetry: conserved quantities, balance, dead units, distance to the start."""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn

from lightning_sym._files import write_atomically
from lightning_sym._random import generator, seeded
from lightning_sym._text import ranges
from lightning_sym.callbacks._checks import run_folder
from lightning_sym.callbacks._publish import publish_figure, publish_table
from lightning_sym.datamodules import ImageDataModule
from lightning_sym.figures import symmetry_curves
from lightning_sym.symmetry import Balance, Symmetry, balance, canonicalize, trace_symmetry
from lightning_sym.tasks import ZooTask
from lightning_sym.tasks.strategy import gather
from lightning_sym.zoo import versions

Numbers: TypeAlias = dict[str, float]

_SHARDED = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)
_UNITS = {
    "step": "optimizer steps taken",
    "epoch": "epochs trained, with the part of the current one",
    "imbalance": "sum over units of |incoming - outgoing| / sum of (incoming + outgoing), squared norms; 0 to 1",
    "conserved": "mean over units of |incoming - outgoing|, squared norms of weights",
    "drift": "sum over units of |change of (incoming - outgoing) since the start| / sum of (incoming + outgoing) then",
    "dead": "number of units with no incoming or no outgoing weights",
    "parameters": "Euclidean distance to the start, relative to the norm of the start",
    "balanced": "the same with both in the balanced gauge, units in place",
    "canonical": "the same with both in canonical form (balanced, signs fixed, units sorted)",
}
_OF_GROUPS = ("imbalance", "conserved", "drift", "dead")
_OF_DISTANCE = ("parameters", "balanced", "canonical")


class SymmetryMonitor(Callback):
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
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be at least 1, got {every_n_epochs}.")
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be None or at least 1, got {every_n_steps}.")
        if members != "all" and (isinstance(members, str) or not members or len(set(members)) != len(members)):
            raise ValueError(f'members must be "all" or distinct numbers, at least one, got {members!r}.')
        if not re.fullmatch(r"[\w.-]+", prefix):
            raise ValueError(f"prefix must be made of letters, digits, '_', '.' and '-', got {prefix!r}.")
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.members = members
        self.network = network
        self.distance = distance
        self.dirpath = dirpath
        self.prefix = prefix
        self._clear()

    def _clear(self) -> None:
        self._symmetry: Symmetry | None = None
        self._copy: nn.Module | None = None
        # By group: size, whether it has two sides, and whether anything is conserved.
        self._kinds: dict[str, tuple[int, bool, bool]] = {}
        self._table: dict[str, Any] = {}  # the symmetry for the files
        self._points: list[dict[str, Any]] = []
        self._starts: dict[int, dict[str, Any]] = {}
        self._forms: dict[int, dict[str, Tensor]] = {}  # of the starts; made again after a resume
        self._saved_as: dict[str, Any] | None = None
        self._begun = False
        self._written = False
        self._epoch = 0.0
        self._path = Path()

    @property
    def state_key(self) -> str:
        """Two monitors of one fit keep their states apart."""
        return self._generate_state_key(network=self.network, prefix=self.prefix)

    # ---- before the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the network and trace it if an example of its input is at hand.

        Raises:
            ValueError: If there is no such network or member, the strategy shards weights, or the network cannot be
                traced.
        """
        if stage != "fit":
            return
        self._clear()
        if isinstance(trainer.strategy, _SHARDED):
            raise ValueError(
                f"SymmetryMonitor needs whole weights, which {type(trainer.strategy).__name__} shards; use ddp, or "
                "remove the callback."
            )
        self._path = Path(self.dirpath) if self.dirpath else run_folder(trainer) / "results"
        if isinstance(pl_module, ZooTask):
            if self.members != "all" and (missing := sorted(set(self.members) - set(pl_module.numbers))):
                raise ValueError(
                    f"SymmetryMonitor(members=...) names member(s) {ranges(missing)}, and the task has "
                    f"{ranges(pl_module.numbers)}."
                )
        elif self.members != "all":
            raise ValueError(
                f"SymmetryMonitor(members={self.members}) is for a ZooTask, got {type(pl_module).__name__}, which is "
                'one network; leave members at "all".'
            )
        kind = type(pl_module)
        later = (
            kind.setup is not LightningModule.setup or kind.configure_model is not LightningModule.configure_model
        ) and not isinstance(pl_module, ZooTask)
        if not later:  # a network may yet be made by the module's own setup or configure_model
            self._trace_known(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Trace a network that the module's own setup made."""
        self._trace_known(trainer, pl_module)

    def _trace_known(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network = self._network(pl_module)  # an error if there is none
        example = _example(trainer, pl_module)
        if self._symmetry is None and example is not None:
            self._trace(network, example)

    def _network(self, pl_module: LightningModule) -> nn.Module:
        """Return the network to watch; for a population the one that its members are made from."""
        if isinstance(pl_module, ZooTask):
            return pl_module.network
        found: Any = pl_module
        for name in self.network.split(".") if self.network else ():
            found = getattr(found, name, None)
        if isinstance(found, nn.Module):
            compiled = getattr(found, "_orig_mod", None)
            return compiled if isinstance(compiled, nn.Module) else found
        children = [name for name, child in pl_module.named_children() if next(child.parameters(), None) is not None]
        choices = [f'network="{name}"' for name in children] + ['network="" for the whole module']
        what = "no such attribute" if found is None else f"a {type(found).__name__} there, not an nn.Module"
        raise ValueError(
            f'SymmetryMonitor(network="{self.network}") watches the network in that attribute of the LightningModule, '
            f"and {type(pl_module).__name__} has {what}; say where it is: {', '.join(choices)}."
        )

    def _trace(self, network: nn.Module, example: Any) -> None:
        """Trace a copy in float64, to which weights are copied at each point."""
        with seeded(0):
            try:
                self._copy = copy.deepcopy(network).cpu()
            except RuntimeError as error:
                raise ValueError(
                    f"SymmetryMonitor works on a copy of the network, and {type(network).__name__} cannot be copied "
                    f"({error}); keep tensors that have a gradient history out of its attributes."
                ) from error
            first = next(self._copy.parameters(), None)
            if first is None:
                raise ValueError(f"SymmetryMonitor found no parameters in {type(network).__name__}.")

            def fitting(value: Any) -> Any:
                return value.detach().cpu().to(first.dtype if value.is_floating_point() else value.dtype)

            example = torch.utils._pytree.tree_map_only(Tensor, fitting, example)
            self._symmetry = trace_symmetry(self._copy, example)
            self._copy.double().eval().requires_grad_(False)
            probe = copy.deepcopy(self._copy)
            for parameter in probe.parameters():
                parameter.fill_(1.0)
            balances = balance(self._symmetry, probe)
        for group in self._symmetry.groups:
            found = balances[group.name]
            two_sided = bool((found.incoming > 0).all() and (found.outgoing > 0).all())
            self._kinds[group.name] = (group.size, two_sided, group.scales > 0 or group.dense)
        self._table = {"symmetry": self._symmetry.table(), "notes": list(self._symmetry.notes)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the start, if the network has been traced."""
        if self._symmetry is not None:
            self._begin(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Trace on the first batch if nothing else said what the network's input is, and measure the start.

        Raises:
            ValueError: If the batch does not show what the input is, or the network cannot be traced.
        """
        if not self._begun:
            if self._symmetry is None:
                self._trace(self._network(pl_module), _first_input(pl_module, batch))
            self._begin(trainer, pl_module)
        # Lightning does not end an epoch again that was over but for that when it was saved (by every_n_train_steps).
        if batch_idx == 0 and self._is_due(trainer, trainer.current_epoch):
            self._measure(trainer, pl_module, float(trainer.current_epoch))

    def _is_due(self, trainer: Trainer, epochs: int) -> bool:
        """Return whether a point is wanted after so many epochs, and has not been made."""
        wanted = self._begun and self.every_n_steps is None and epochs % self.every_n_epochs == 0
        return wanted and bool(trainer.global_step != self._points[-1]["step"])

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._symmetry is not None
        self._begun = True
        mine = self._settings(pl_module)
        if self._saved_as is not None and self._saved_as != mine:
            different = [f"{name} {self._saved_as.get(name)!r} there, {mine[name]!r} here" for name in mine
                         if self._saved_as.get(name) != mine[name]]  # fmt: skip
            raise ValueError(
                "The checkpoint's SymmetryMonitor watched something else: "
                + "; ".join(different)
                + ". Resume with the "
                "same network and arguments, or with another prefix to start its curves anew."
            )
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            text = str(self._symmetry)
            write_atomically(self._path / f"{self.prefix}.txt", text + "\n")
            for logger in trainer.loggers:
                add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
                if callable(add_text):  # four spaces: Markdown's way to leave a table's columns alone
                    add_text(self.prefix, "\n".join("    " + line for line in text.splitlines()), global_step=0)
        if not self._points:
            # Rank 0 has the starts of all members, as it writes the checkpoint.
            own = {number: self._start(pl_module, number) for number in self._own(trainer, pl_module)}
            for part in gather(own):
                self._starts.update(part)
            done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            self._measure(trainer, pl_module, _epochs(trainer, begun=done))

    def _settings(self, pl_module: LightningModule) -> dict[str, Any]:
        assert self._symmetry is not None
        return {
            "network": self._symmetry.fingerprint,
            "members": self._watched(pl_module),
            "distance": self.distance,
        }

    # ---- points

    def _watched(self, pl_module: LightningModule) -> list[int]:
        """Return the numbers of all watched members; a network that is no population is number 0."""
        if not isinstance(pl_module, ZooTask):
            return [0]
        return pl_module.numbers if self.members == "all" else sorted(self.members)

    def _own(self, trainer: Trainer, pl_module: LightningModule) -> list[int]:
        """Return the numbers of the members that this rank measures."""
        watched = self._watched(pl_module)
        if isinstance(pl_module, ZooTask) and pl_module.member_parallel:
            return [number for number in watched if number in pl_module.member_seeds]
        return watched if trainer.is_global_zero else []  # all ranks have the same weights

    def _state(self, pl_module: LightningModule, number: int) -> dict[str, Tensor]:
        """Return a copy on the CPU of the current parameters and buffers."""
        if isinstance(pl_module, ZooTask):
            state: Mapping[str, Tensor] = pl_module.population.member_state(number)
        else:
            network = self._network(pl_module)
            state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def _load(self, state: Mapping[str, Tensor]) -> bool:
        """Put weights into the copy; return whether they are finite."""
        assert self._copy is not None
        finite = True
        for name, tensor in (*self._copy.named_parameters(), *self._copy.named_buffers()):
            if name in state:
                tensor.copy_(state[name])
                finite = finite and bool(torch.isfinite(tensor).all())
        return finite

    def _start(self, pl_module: LightningModule, number: int) -> dict[str, Any]:
        assert self._symmetry is not None
        assert self._copy is not None
        state = self._state(pl_module, number)
        self._load(state)
        sides = balance(self._symmetry, self._copy)
        start: dict[str, Any] = {
            "difference": {name: found.difference for name, found in sides.items()},
            "total": {name: float((found.incoming + found.outgoing).sum()) for name, found in sides.items()},
        }
        return {**start, "state": state} if self.distance else start

    def _measure(self, trainer: Trainer, pl_module: LightningModule, epoch: float) -> None:
        """Add a point; to be called on every rank."""
        own = {number: self._values(pl_module, number) for number in self._own(trainer, pl_module)}
        members: dict[int, dict[str, Any]] = {}
        for part in gather(own):
            members.update(part)
        point = {"step": trainer.global_step, "epoch": epoch, "members": dict(sorted(members.items()))}
        self._points.append(point)
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            scalars = self._scalars(point, isinstance(pl_module, ZooTask))
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=max(trainer.global_step - 1, 0))  # Lightning's step of an epoch's end

    @torch.no_grad()
    def _values(self, pl_module: LightningModule, number: int) -> dict[str, Any]:
        """Measure one member."""
        assert self._symmetry is not None
        assert self._copy is not None
        start = self._starts[number]
        if not self._load(self._state(pl_module, number)):
            groups = {name: {**self._quantities(name), "dead": math.nan} for name in self._kinds}
            return {"groups": groups, "distance": dict.fromkeys(_OF_DISTANCE, math.nan) if self.distance else {}}
        groups = {}
        for name, found in balance(self._symmetry, self._copy).items():
            groups[name] = self._quantities(name, found, start)
        distance: Numbers = {}
        if self.distance:
            now = self._all_forms()
            if number not in self._forms:
                finite = self._load(start["state"])
                self._forms[number] = self._all_forms() if finite else {}
            distance = dict.fromkeys(_OF_DISTANCE, math.nan)
            for name, form in self._forms[number].items():
                distance[name] = _ratio(float((now[name] - form).double().norm()), float(form.double().norm()))
        return {"groups": groups, "distance": distance}

    def _quantities(self, name: str, found: Balance | None = None, start: Mapping[str, Any] | None = None) -> Numbers:
        """Return what is defined for a group; NaN without a balance."""
        _, two_sided, conserved = self._kinds[name]
        values: Numbers = {}
        if found is None or start is None:
            found, change, total, before = None, math.nan, math.nan, math.nan
        else:
            change = float((found.difference - start["difference"][name]).abs().sum())
            total, before = float((found.incoming + found.outgoing).sum()), start["total"][name]
        size = math.nan if found is None else float(found.difference.abs().sum())
        if two_sided:
            values["imbalance"] = _ratio(size, total)
        if conserved:
            values["conserved"] = size if found is None else size / len(found.difference)
            values["drift"] = _ratio(change, before)
        values["dead"] = math.nan if found is None else found.dead
        return values

    def _all_forms(self) -> dict[str, Tensor]:
        """Return the parameters of the copy in every gauge, one vector each; the copy ends as the canonical form."""
        assert self._symmetry is not None
        assert self._copy is not None
        forms = {"parameters": self._vector()}
        canonicalize(self._symmetry, self._copy, signs=False, order=False, inplace=True)
        forms["balanced"] = self._vector()
        canonicalize(self._symmetry, self._copy, inplace=True)
        forms["canonical"] = self._vector()
        return forms

    def _vector(self) -> Tensor:
        """Return all parameters of the copy, no wider than the network's, for memory's sake."""
        assert self._symmetry is not None
        assert self._copy is not None
        layout = self._symmetry.layout
        parts = [
            parameter.flatten().to(torch.float64 if layout[name][1] == torch.float64 else torch.float32)
            for name, parameter in self._copy.named_parameters()
        ]
        return torch.cat(parts)

    def _scalars(self, point: Mapping[str, Any], named: bool) -> Numbers:
        """Return what is logged for a point, without what is not finite."""
        scalars: Numbers = {}
        found: dict[str, dict[int, float]] = {}
        for number, values in point["members"].items():
            for name, quantities in values["groups"].items():
                for quantity, value in quantities.items():
                    found.setdefault(f"{self.prefix}/{quantity}/{_tag(name)}", {})[number] = value
            for gauge, value in values["distance"].items():
                found.setdefault(f"{self.prefix}/distance/{gauge}", {})[number] = value
        for tag, by_member in found.items():
            finite = {number: value for number, value in by_member.items() if math.isfinite(value)}
            if finite:
                scalars[tag] = math.fsum(finite.values()) / len(finite)
            if named:
                scalars.update({f"{tag}/member-{number:04d}": value for number, value in finite.items()})
        return scalars

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

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the end, write the figure and the tables."""
        if not self._begun:
            return
        if trainer.global_step != self._points[-1]["step"]:
            self._measure(trainer, pl_module, self._epoch)
        self._written = True
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._publish(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files of a run that was killed after its last epoch; resumed, it has no training to end."""
        if self._written or not self._points or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._publish(trainer, pl_module)

    def _publish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        watched = self._watched(pl_module)
        network = type(self._network(pl_module)).__name__
        about = {
            "what": "units of axis groups while training: balance of incoming and outgoing squared norms",
            "units": _UNITS,
            "network": network,
            "members": watched,
            **self._table,
            "versions": versions(),
        }
        publish_table(list(self._rows()), about, self._path / self.prefix)
        if self.distance:
            rows = [
                {"step": point["step"], "epoch": point["epoch"], "member": number}
                | {gauge: _written_value(values["distance"][gauge]) for gauge in _OF_DISTANCE}
                for point in self._points
                for number, values in point["members"].items()
            ]
            about["what"] = "distance of the parameters to those at the start of training"
            publish_table(rows, about, self._path / f"{self.prefix}_distance")
        curves = {quantity: self._curves(quantity) for quantity in ("imbalance", "drift", "dead")}
        distance = {
            gauge: [[m["distance"][gauge] for m in point["members"].values()] for point in self._points]
            for gauge in (_OF_DISTANCE if self.distance else ())
        }
        if not (curves["imbalance"] or curves["drift"] or distance):
            return
        count = f", mean of {len(watched)} members" if len(watched) > 1 else ""
        figure = symmetry_curves(
            [point["epoch"] for point in self._points],
            **curves,
            distance=distance,
            title=f"Symmetry of {network} while training{count}",
        )
        publish_figure(trainer, figure, f"figures/SymmetryMonitor/{self.prefix}", self._path / f"{self.prefix}.png")

    def _rows(self) -> Iterator[dict[str, Any]]:
        for point in self._points:
            for number, values in point["members"].items():
                for name, quantities in values["groups"].items():
                    row = {"step": point["step"], "epoch": point["epoch"], "member": number}
                    row |= {"group": name, "size": self._kinds[name][0]}
                    yield row | {quantity: _written_value(quantities.get(quantity)) for quantity in _OF_GROUPS}

    def _curves(self, quantity: str) -> dict[str, list[list[float]]]:
        names = [name for name, (_, two_sided, conserved) in self._kinds.items()
                 if {"imbalance": two_sided, "drift": conserved}.get(quantity, True)]  # fmt: skip
        return {
            name: [[values["groups"][name][quantity] for values in point["members"].values()] for point in self._points]
            for name in names
        }

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the curves and the start, on rank 0 of all members."""
        if self._symmetry is None or not self._points:
            return {}
        settings = {
            "network": self._symmetry.fingerprint,
            "members": sorted(self._starts),
            "distance": self.distance,
        }
        shown = {"kinds": {name: list(kind) for name, kind in self._kinds.items()}, "table": self._table}
        return {"settings": settings, "points": list(self._points), "starts": self._starts, **shown}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the curves and the start back."""
        if state_dict:
            self._saved_as = state_dict["settings"]
            self._points = list(state_dict["points"])
            self._starts = state_dict["starts"]
            # For a run without an epoch left, which may never see a batch to trace the network on.
            self._kinds = {name: (kind[0], kind[1], kind[2]) for name, kind in state_dict["kinds"].items()}
            self._table = state_dict["table"]


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
    if isinstance(pl_module, ZooTask):
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


def _tag(group: str) -> str:
    """Return a group's name with nothing that TensorBoard replaces: "conv1 (2)" is "conv1-2"."""
    return re.sub(r"[^-/\w.]+", "-", group).strip("-")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _written_value(value: float | None) -> float | None:
    """Return a number for CSV and JSON, which know no NaN."""
    return value if value is not None and math.isfinite(value) else None
