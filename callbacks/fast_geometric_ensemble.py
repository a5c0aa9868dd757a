"""Fast geometric ensembles: a cyclical learning rate, with a snapshot of the weights at each minimum."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_numbers, not_finite
from lightning_sym._text import ranges
from lightning_sym.callbacks._batches import PreparedBatches, splits_of
from lightning_sym.callbacks._checks import has_members, network_of
from lightning_sym.callbacks._monitor import check_whole_weights
from lightning_sym.callbacks.report import RunReport
from lightning_sym.connectivity import average, barrier
from lightning_sym.ensembles import Scores, cyclical_learning_rate, ensemble_scores, log_probabilities
from lightning_sym.landscape import weight_vector
from lightning_sym.networks.batch_norm import batch_norms, recalibrate_batch_norm
from lightning_sym.reports import RunResults
from lightning_sym.reports.ensembles import MeasuredEnsemble, ensemble_results
from lightning_sym.reports.report import counted, picked
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.zoo import rebuild_manifest, versions, write_member

State = dict[str, Tensor]
_SETTINGS = ("highest", "lowest", "cycle_epochs", "cycle_steps", "start_epoch")


class FastGeometricEnsemble(RunReport):
    """Turn one training run into an ensemble: cycle the learning rate, and keep the weights at each minimum.

    For any LightningModule with one optimizer, and for tasks that train several networks (each becomes an ensemble).
    The callback overrides any scheduler and sets the learning rate of all parameter groups before every step. It begins
    at ``start_epoch``, or at the checkpoint of a run without this callback. The rate falls from ``highest`` to
    ``lowest`` in the first half of a cycle, and rises in the second. In the middle of each cycle the weights are kept,
    a *snapshot*. Begin with trained weights, after about 80 % of a usual training. Cycles must be long enough for the
    weights to move: on small data, 1000 steps or more.

    The end of the fit scores, for each network, its initial weights, the ensemble of its snapshots (the mean of
    their probabilities), and the average of the snapshots' weights (stochastic weight averaging). With several
    networks, so are the ensembles of all initial weights, of all averages and of all snapshots. Batch norm statistics
    are recomputed on the training data for all of them. Scores are on the test data of datamodules of
    ``lightning_sym.datamodules``, otherwise on the validation data. Each process scores its share.

    On rank 0, in ``results``: ``ensembles.csv`` and ``.json`` (accuracy, loss, calibration and diversity of every
    ensemble), ``added.csv`` and ``.json`` (the same by number of members), ``snapshots.csv`` and ``.json`` (distances
    of snapshots to the start and to each other, and barriers between consecutive ones), ``ensembles.png`` (in
    TensorBoard under ``figures/FastGeometricEnsemble``). Next to ``results``, as zoos: ``snapshots/member-0000`` (the
    snapshots of one network, numbered from 1; 0 is its start) and ``averages`` (weight averages, by index of the
    network). Logged are ``ensemble/<accuracy or loss>/<kind>``; a table is printed.

    Checkpoints hold the snapshots, so that a resumed run ends like an uninterrupted one.

    Args:
        highest: Learning rate at both ends of a cycle, > 0; for SGD with momentum a fraction of the largest that
            trains.
        lowest: Learning rate in the middle of a cycle, at snapshots. In ``[0, highest]``.
        cycle_epochs: Length of a cycle in epochs, an even number >= 2.
        cycle_steps: Length in optimizer steps, instead of epochs; an even number >= 2. None: epochs.
        start_epoch: Epochs before the first cycle. >= 0.
        network: The attribute of the LightningModule that holds the network, with dots for attributes of attributes;
            ``""`` is the LightningModule itself. Not used for tasks with several networks.
        points: Number of points on the linear path between consecutive snapshots for the barrier of the training
            loss, >= 2.
        train_batches: Number of training batches per process for barriers and statistics, >= 1; None for all.
        bins: Bins of the calibration error. >= 1.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Attributes:
        snapshots: The snapshots: ``step``, ``epoch`` and ``states``, parameters and buffers by index of the network (0
            if there is one). The first is the start of the first cycle.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Garipov et al. (2018), "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", arXiv:1802.10026,
        section 4; Izmailov et al. (2018), "Averaging Weights Leads to Wider Optima and Better Generalization",
        arXiv:1803.05407, for the weight average. docs/theory/ensembles.md.
    """

    data_type = None

    def __init__(
        self,
        highest: float = 0.05,
        lowest: float = 1e-4,
        cycle_epochs: int = 4,
        cycle_steps: int | None = None,
        start_epoch: int = 0,
        network: str = "network",
        points: int = 11,
        train_batches: int | None = None,
        bins: int = 15,
        dirpath: str | None = None,
    ) -> None:
        super().__init__(dirpath)
        check_numbers("> 0", highest=highest)
        check_numbers(">= 0", lowest=lowest)
        if lowest > highest:
            raise ValueError(f"lowest must be at most highest={highest}, got {lowest}.")
        for name, value in (("cycle_epochs", cycle_epochs), ("cycle_steps", cycle_steps)):
            if value is not None and (type(value) is not int or value < 2 or value % 2):
                raise ValueError(
                    f"{name} must be an even integer >= 2, got {value!r}: a snapshot is taken in the middle of a cycle."
                )
        check_integers(0, start_epoch=start_epoch)
        check_integers(2, points=points)
        check_integers(bins=bins, train_batches=1 if train_batches is None else train_batches)
        self.highest = highest
        self.lowest = lowest
        self.cycle_epochs = cycle_epochs
        self.cycle_steps = cycle_steps
        self.start_epoch = start_epoch
        self.network = network
        self.points = points
        self.train_batches = train_batches
        self.bins = bins
        self.snapshots: list[dict[str, Any]] = []
        self._cycle = 0
        self._numbers: list[int] = []
        self._saved_as: dict[str, Any] | None = None

    # ---- training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task and the strategy.

        Raises:
            ValueError: If the strategy shards weights, or the task trains no classifiers.
        """
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.snapshots, self._saved_as = [], None
        check_whole_weights(self, trainer)
        if getattr(pl_module, "classifies", True) is False:
            raise ValueError(
                f"FastGeometricEnsemble scores classifiers, but {type(pl_module).__name__} minimises another loss than "
                "the cross-entropy; remove the callback, or declare classifies = True in the class of the task."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine the length of a cycle, and check the task.

        Raises:
            ValueError: If there is no such network, not one optimizer, no data for scores, or no time for a snapshot;
                or if the checkpoint's ensemble had other settings.
        """
        if not has_members(pl_module):
            network_of(self, pl_module, self.network)
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"FastGeometricEnsemble sets the learning rate of one optimizer, but {type(pl_module).__name__} has "
                f"{len(trainer.optimizers)}; remove the callback."
            )
        if self._saved_as is not None and self._saved_as != picked(self, *_SETTINGS):
            raise ValueError(
                f"The checkpoint's FastGeometricEnsemble had {self._saved_as}, but this one has "
                f"{picked(self, *_SETTINGS)}; resume with the same arguments."
            )
        self._cycle = self._steps_of_cycle(trainer)
        if not self.active:
            return
        splits = splits_of(trainer, pl_module)
        if "train" not in splits or len(splits) == 1:
            raise ValueError(
                "FastGeometricEnsemble needs training data and data to score on, each in a fixed order; pass "
                "DataLoaders of data sets with indices for training and validation, or a datamodule of "
                "lightning_sym.datamodules."
            )
        if not has_members(pl_module):  # errors come now instead of after training
            network = network_of(self, pl_module, self.network)
            with isolate_rng(), trainer.precision_plugin.forward_context():
                for batches in splits.values():
                    log_probabilities([network], islice(batches, 1))
        first = self.snapshots[0]["step"] if self.snapshots else trainer.global_step
        last = trainer.estimated_stepping_batches
        if not self.snapshots:
            first += max(0, self.start_epoch - trainer.current_epoch) * self._steps_of_epoch(trainer)
        if last - first < self._cycle // 2:
            raise ValueError(
                f"FastGeometricEnsemble takes its first snapshot {self._cycle // 2} steps after step {first}, but the "
                f"fit ends at step {last:g}; raise max_epochs, or shorten the cycle."
            )

    def _steps_of_epoch(self, trainer: Trainer) -> float:
        return math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)

    def _steps_of_cycle(self, trainer: Trainer) -> int:
        if self.cycle_steps is not None:
            return self.cycle_steps
        if not math.isfinite(trainer.num_training_batches):
            raise ValueError(
                "FastGeometricEnsemble counts cycles in epochs, but the length of an epoch is unknown; set cycle_steps."
            )
        return int(self.cycle_epochs * self._steps_of_epoch(trainer))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the first cycle."""
        if not self.snapshots and trainer.current_epoch >= self.start_epoch:
            self._keep(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the learning rate of the next step."""
        if not self.snapshots:
            return
        rate = self.learning_rate(trainer.global_step)
        for group in trainer.optimizers[0].param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of an optimizer step, counted in a fit from the start of the first cycle."""
        done = step - self.snapshots[0]["step"]
        return cyclical_learning_rate(done, self._cycle, self.highest, self.lowest)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a snapshot in the middle of each cycle."""
        if not self.snapshots or trainer.global_step == self.snapshots[-1]["step"]:
            return  # the step count is unchanged while gradients accumulate
        if (trainer.global_step - self.snapshots[0]["step"]) % self._cycle == self._cycle // 2:
            self._keep(trainer, pl_module)

    def _keep(self, trainer: Trainer, task: Any) -> None:
        """Store the weights of all networks on the CPU, the same on every rank; call it on every rank."""
        several = has_members(task)
        if several:
            own = {number: task.population.member_state(number) for number in task.population.numbers}
            states = task.gathered_by_member(own)
        else:
            states = {0: network_of(self, task, self.network).state_dict()}
        states = {number: {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
                  for number, state in states.items()}  # fmt: skip
        if trainer.world_size > 1 and not (several and task.member_parallel):
            states = trainer.strategy.broadcast(states)  # batch norm statistics differ between ranks
        self.snapshots.append({"step": trainer.global_step, "epoch": trainer.current_epoch, "states": states})

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshots."""
        return {"settings": picked(self, *_SETTINGS), "snapshots": list(self.snapshots)} if self.snapshots else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the snapshots."""
        if state_dict:
            self._saved_as, self.snapshots = state_dict["settings"], list(state_dict["snapshots"])

    # ---- the end

    def conclude(self, trainer: Trainer, task: Any, data: None) -> None:
        """Score the ensembles, if there are any."""
        stopped = task.gathered()[0] if has_members(task) else {}
        self._numbers = (
            [number for number in self.snapshots[-1]["states"] if number not in stopped] if self.snapshots else []
        )
        diverged = [number for number in self._numbers if not self._finite(number)]
        self._numbers = [number for number in self._numbers if number not in diverged]
        if diverged:
            rank_zero_warn(
                f"FastGeometricEnsemble leaves out network {ranges(diverged)} with weights that are not "
                "finite; lower highest."
            )
        if len(self.snapshots) > 1 and self._numbers:
            super().conclude(trainer, task, data)
        elif not diverged:
            rank_zero_warn("FastGeometricEnsemble has no ensemble: the fit ended before a network's first snapshot.")

    def _finite(self, number: int) -> bool:
        """Test whether all weights of a network's snapshots are finite; the same on every rank."""
        states = [snapshot["states"][number] for snapshot in self.snapshots]
        return not any(map(not_finite, states))

    def measure(self, trainer: Trainer, task: Any, data: None) -> Any:
        """Score all networks and ensembles; call it on every rank."""
        splits = splits_of(trainer, task, self.train_batches)
        train = splits.pop("train")
        ((split, judged),) = splits.items()
        networks, predicted, rows = {}, {}, []
        with self.progress(trainer, "scoring ensembles") as progress, trainer.precision_plugin.forward_context():
            for done, number in enumerate(self._numbers):
                networks[number] = self._networks(trainer, task, number, train)
                predicted[number], labels = log_probabilities(networks[number], judged)
                scores = ensemble_scores(predicted[number], labels)
                rows += self._rows(number, networks[number][:-1], train, scores.alone)
                progress(done + 1, len(self._numbers))
        return networks, rows, self._ensembles(predicted, labels), split

    def _networks(self, trainer: Trainer, task: Any, number: int, train: PreparedBatches) -> list[nn.Module]:
        """Return the start, the snapshots and their average, each with recomputed statistics."""
        found: list[nn.Module] = []
        for snapshot in self.snapshots:
            state = snapshot["states"][number]
            network = copied(task.network if has_members(task) else network_of(self, task, self.network))
            dtype = next(value.dtype for value in state.values() if value.is_floating_point())
            network.to(trainer.strategy.root_device, dtype).load_state_dict(state)
            found.append(network)
        found.append(average(found[1:]))
        for network in found:
            if batch_norms(network):
                recalibrate_batch_norm(network, train)
        return found

    def _rows(
        self, number: int, networks: Sequence[nn.Module], train: PreparedBatches, alone: Scores
    ) -> list[dict[str, Any]]:
        """Return distances of a network's snapshots, and the barriers between them."""
        vectors = [weight_vector(network).double() for network in networks]
        lines = [
            barrier(one, two, train, points=self.points, recalibration_data=train) for one, two in pairwise(networks)
        ]
        return [
            {
                "network": number,
                "snapshot": place,
                "step": snapshot["step"],
                "epoch": snapshot["epoch"],
                "accuracy": float(alone.accuracy[place]),
                "loss": float(alone.loss[place]),
                "train_loss": lines[place - 1].loss_ends[1] if place else lines[0].loss_ends[0],
                "train_loss_barrier": lines[place - 1].loss_barrier if place else None,
                "distance_from_start": float((vectors[place] - vectors[0]).norm()),
                "distance_from_previous": float((vectors[place] - vectors[place - 1]).norm()) if place else None,
                "norm": float(vectors[place].norm()),
            }
            for place, snapshot in enumerate(self.snapshots)
        ]

    def _ensembles(self, predicted: Mapping[int, Tensor], labels: Tensor) -> list[MeasuredEnsemble]:
        """Return the ensembles of each network, and those over networks."""
        found = []
        kinds = {"starts": slice(1), "snapshots": slice(1, -1), "averages": slice(-1, None)}
        for kind, place in kinds.items():
            rows = {_name(number): own[place] for number, own in predicted.items()}
            named = [(name, kind, own) for name, own in rows.items()]
            if len(rows) > 1:
                named.append(("all", f"all {kind}", torch.cat(list(rows.values()))))
            found += [
                MeasuredEnsemble(f"{name}/{kind}", group, ensemble_scores(own, labels, bins=self.bins))
                for name, group, own in named
            ]
        return found

    def report(self, trainer: Trainer, task: Any, data: None, measured: Any) -> RunResults:
        """Return the tables and the figure, and write the zoos."""
        networks, rows, ensembles, split = measured
        source: Any = getattr(trainer, "datamodule", None)
        identity = source.identity() if hasattr(source, "identity") else {}
        first = networks[self._numbers[0]][0]
        about = {
            "architecture": _architecture(first),
            "networks": self._numbers,
            "cycle_steps": self._cycle,
            "settings": picked(self, *_SETTINGS, "points", "train_batches"),
            "data": identity,
            "versions": versions(),
        }
        for number, own in networks.items():
            *snapshots, mean = own
            mine = [row for row in rows if row["network"] == number]
            for place, (row, network) in enumerate(zip(mine, snapshots, strict=True)):
                self._write(f"snapshots/{_name(number)}", place, network, row, split, identity)
            (score,) = [one.scores.alone for one in ensembles if one.name == f"{_name(number)}/averages"]
            known = {"snapshots": len(snapshots) - 1, "accuracy": float(score.accuracy), "loss": float(score.loss)}
            self._write("averages", number, mean, known, split, identity)
        for folder in ("averages", *(f"snapshots/{_name(number)}" for number in networks)):
            rebuild_manifest(self.path.parent / folder)
        moved = [row["distance_from_previous"] for row in rows if row["snapshot"]]
        hills = [row["train_loss_barrier"] for row in rows if row["snapshot"]]
        notes = [
            f"consecutive snapshots are {min(moved):.3g} to {max(moved):.3g} apart (norm {rows[0]['norm']:.3g}), the "
            f"barrier between them is at most {max(hills):.2g} nats"
        ]
        title = f"{type(first).__name__}, {counted(len(self.snapshots) - 1, 'snapshot')}"
        results = ensemble_results(ensembles, title=title, split=split, about=about, snapshots=rows, notes=notes)
        places = {"zoo": self.path.parent / "snapshots", "means": self.path.parent / "averages"}
        return replace(results, places={**results.places, **places})

    def _write(
        self,
        folder: str,
        number: int,
        network: nn.Module,
        known: Mapping[str, Any],
        split: str,
        data: Mapping[str, Any],
    ) -> None:
        """Write one network into a zoo."""
        metrics = {split: {name: known[name] for name in ("accuracy", "loss") if name in known}}
        write_member(
            self.path.parent / folder,
            number,
            network.state_dict(),
            architecture=_architecture(network),
            metrics=metrics,
            data=data,
            training={**known, **picked(self, *_SETTINGS)},
        )


def _name(number: int) -> str:
    return f"member-{number:04d}"


def _architecture(network: nn.Module) -> dict[str, Any]:
    """Return a network's architecture; for a module without one, its class."""
    try:
        return dict(network.architecture)  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError):
        return {"class_path": f"{type(network).__module__}.{type(network).__qualname__}", "init_args": {}}
