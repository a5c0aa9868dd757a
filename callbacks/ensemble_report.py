"""The members of a zoo, or the points of curves between them, as ensembles."""

from collections.abc import Iterator
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn

from lightning_sym._checks import check_integers
from lightning_sym.callbacks._batches import splits_of
from lightning_sym.callbacks._checks import lacking
from lightning_sym.callbacks.report import RunReport
from lightning_sym.connectivity import Curve
from lightning_sym.datamodules import ImageDataModule
from lightning_sym.ensembles import ensemble_scores, log_probabilities
from lightning_sym.reports import RunResults
from lightning_sym.reports.ensembles import MeasuredEnsemble, ensemble_results
from lightning_sym.reports.report import counted, picked
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.zoo import ModelZoo

_OF_ZOOS = ("network",)
_OF_CURVES = ("curves", "kinds", "member", "model_zoo")


class EnsembleReport(RunReport):
    """Score ensembles of the networks that a fit has trained.

    After a fit of a :class:`lightning_sym.tasks.ZooTask`, its kept members form an ensemble. After a fit of a
    :class:`lightning_sym.tasks.CurveTask`, the ensembles are equally spaced points of each curve, its two endpoints,
    and all members of the zoo. Other zoos can be added for comparison, such as the snapshots of
    :class:`lightning_sym.callbacks.FastGeometricEnsemble`. Predictions are means of probabilities on the test data
    (docs/theory/ensembles.md, 2). Batch norm statistics of all networks are recomputed on the training data. Processes
    share the data.

    On rank 0, in ``results``: ``ensembles.csv`` and ``.json`` (accuracy, loss, calibration and diversity of every
    ensemble), ``added.csv`` and ``.json`` (the same as members are added), ``ensembles.png`` (in TensorBoard under
    ``figures/EnsembleReport``). Logged are ``ensemble/<accuracy or loss>/<kind>``; a table is printed.

    Args:
        points: Number of points of a curve, endpoints included. >= 2.
        zoos: Folders of other zoos, by their names in tables and figures; default none.
        train_batches: Number of batches of the training data for batch norm statistics, per process, >= 1; None for
            all.
        bins: Bins of the calibration error. >= 1.
        allow: Your packages that define networks of those zoos, see ``ModelZoo.open``.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of range.
    """

    needs = ("kept_states", "classifies")
    either = (_OF_ZOOS, _OF_CURVES)
    example = "ZooTask"

    def __init__(
        self,
        points: int = 21,
        zoos: dict[str, str] | None = None,
        train_batches: int | None = None,
        bins: int = 15,
        allow: list[str] | None = None,
        dirpath: str | None = None,
    ) -> None:
        check_integers(2, points=points)
        check_integers(bins=bins, train_batches=1 if train_batches is None else train_batches)
        self.points = points
        self.zoos = {str(name): str(folder) for name, folder in (zoos or {}).items()}
        self.train_batches = train_batches
        self.bins = bins
        self.allow = list(allow or ())
        super().__init__(dirpath)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task and the data, and open the other zoos.

        Raises:
            TypeError: If the task lacks a required attribute, or the data are not of ``lightning_sym.datamodules``.
            FileNotFoundError: If a zoo does not exist.
            ValueError: If the task trains no classifiers, or neither curves nor the members of a zoo.
        """
        super().setup(trainer, pl_module, stage)
        if not self.active:
            return
        task: Any = pl_module
        self._others = {name: ModelZoo.open(folder, allow=self.allow) for name, folder in self.zoos.items()}
        if not task.classifies or all(lacking(task, names) for names in self.either):
            raise ValueError(
                f"EnsembleReport scores classifiers that a ZooTask or the points of curves that a CurveTask has "
                f"trained, and {type(task).__name__} trains neither; remove the callback."
            )

    def measure(self, trainer: Trainer, task: Any, data: ImageDataModule) -> tuple[list[MeasuredEnsemble], str]:
        """Score all ensembles; call it on every rank."""
        splits = splits_of(trainer, task, self.train_batches)
        train = splits.pop("train")
        ((split, judged),) = splits.items()
        found: list[MeasuredEnsemble] = []

        def predicted(networks: Iterator[nn.Module]) -> tuple[Tensor, Tensor]:
            with trainer.precision_plugin.forward_context():
                return log_probabilities(networks, judged, recalibration_data=train)

        def add(name: str, kind: str, rows: Tensor, labels: Tensor) -> None:
            found.append(MeasuredEnsemble(name, kind, ensemble_scores(rows, labels, bins=self.bins)))

        place = {"device": trainer.strategy.root_device, "dtype": task.dtype}  # inputs are of the run's precision
        others = dict(self._others)
        if lacking(task, _OF_CURVES):
            states = task.kept_states()
            add("members", "members", *predicted(_with_states(task.network, states.values(), place)))
        else:
            others = {"members": task.model_zoo, **others}
            for name, curve in task.curves.items():
                rows, labels = predicted(_along(curve, task.member(name.first), self.points, place))
                title = f"{name.first}-{name.second}/{name.kind}"
                if name.kind == task.kinds[0]:
                    add(f"{name.first}-{name.second}/ends", "two ends", rows[[0, -1]], labels)
                add(title, f"{name.kind} points", rows, labels)
        for name, zoo in others.items():
            add(name, name, *predicted(zoo.load(number).to(**place) for number in zoo.numbers))
        return found, split

    def report(self, trainer: Trainer, task: Any, data: ImageDataModule, measured: Any) -> RunResults:
        """Return the tables and the figure."""
        ensembles, split = measured
        architecture = task.network.architecture if lacking(task, _OF_CURVES) else task.model_zoo.architecture
        about = {
            "architecture": architecture,
            "zoos": self.zoos,
            "settings": picked(self, "points", "train_batches"),
            **self.source(data),
        }
        title = f"{architecture['class_path'].rpartition('.')[2]}, {counted(len(ensembles), 'ensemble')}"
        return ensemble_results(ensembles, title=title, split=split, about=about)


def _along(curve: Curve, network: nn.Module, points: int, where: dict[str, Any]) -> Iterator[nn.Module]:
    """Yield one network with the weights of each point in turn."""
    scratch = copied(network).to(**where)
    write = curve.writer(scratch)
    for place in torch.linspace(0, 1, points, dtype=torch.float64).tolist():
        write(place)
        yield scratch


def _with_states(network: nn.Module, states: Any, where: dict[str, Any]) -> Iterator[nn.Module]:
    """Yield one network with each state in turn."""
    for state in states:
        scratch = copied(network).to(**where)
        scratch.load_state_dict(state)
        yield scratch
