"""Barriers between the members of a zoo before and after matching: the table and the pictures."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from lightning_sym._files import write_atomically
from lightning_sym._statistics import bootstrap_over_models
from lightning_sym.callbacks._checks import on_first_rank
from lightning_sym.callbacks._publish import log_summary, publish_figure, publish_table
from lightning_sym.callbacks.run_report import RunReport
from lightning_sym.connectivity import Barrier, barrier
from lightning_sym.datamodules import ImageDataModule
from lightning_sym.figures import Bars, Lines, barrier_bars, interpolation_curves
from lightning_sym.networks.batch_norm import batch_norms
from lightning_sym.tasks import MatchingTask
from lightning_sym.tasks.matching import UNMATCHED
from lightning_sym.zoo import versions

Pair = tuple[int, int]
_SPLITS = ("train", "test")
_QUANTITIES = ("loss_barrier", "loss_barrier_mean", "accuracy_barrier", "accuracy_barrier_mean")
_AS_IS, _RECALIBRATED, _NONE = "as is", "recalibrated", "none"
_UNITS = {
    "loss_barrier": "nats: largest loss on the line above the straight line between the losses of its ends",
    "loss_barrier_mean": "nats: largest loss on the line above the mean of the losses of its ends",
    "accuracy_barrier": "fraction of images, 0 to 1: as loss_barrier, positive where the line is worse",
    "accuracy_barrier_mean": "fraction of images, 0 to 1: as loss_barrier_mean, positive where the line is worse",
    "loss": "mean cross-entropy, nats",
    "accuracy": "fraction of images, 0 to 1",
    "distance": "Euclidean distance between the parameters of both networks",
    "t": "place on the line, 0 (first network) to 1 (second network)",
    "batch_norm": f"running statistics on the line: interpolated ({_AS_IS!r}), measured anew at every point "
    f"({_RECALIBRATED!r}), or no batch norm in the network ({_NONE!r})",
    "low, high": "95 % percentile interval for the mean over pairs, from 2000 bootstrap samples of the models",
    "std": "standard deviation over pairs, sample form",
}


@dataclass(frozen=True)
class _Key:
    """What was evaluated, but for the pair."""

    method: str
    batch_norm: str
    split: str


class MatchingReport(RunReport[MatchingTask]):
    """Say what a fit of a :class:`lightning_sym.tasks.MatchingTask` found.

    At the end of the fit, loss and accuracy are evaluated on the straight line between the two networks of every
    pair, before (``unmatched``) and after matching by each method, on training images (without augmentation) and test
    images. Networks with batch norms are evaluated twice: with interpolated running statistics, and with statistics
    measured anew on training images at every point, both ends included. With several processes each evaluates its
    share of the images.

    On rank 0, in ``results``: ``summary.csv`` and ``.json`` (barriers per method: mean and standard deviation over
    pairs, bootstrap interval over models), ``barriers.csv`` and ``.json`` (the same per pair, and the distances of the
    weights), ``curves.csv`` and ``.json`` (all that was evaluated), ``interpolation.png`` and ``barriers.png`` (in
    TensorBoard under ``figures/MatchingReport``), ``symmetry.txt`` and ``.json``: the networks' symmetry group (in
    TensorBoard as text). The mean barriers are logged as ``barrier/<split>_loss/<method>`` and
    ``barrier/<split>_accuracy/<method>``, for batch norms those with recalibrated statistics. A table is printed, with
    the places of all files.

    Args:
        points: Number of points of a line, equally spaced, both ends included. >= 2.
        train_batches: How many batches (of ``eval_batch_size`` images) of the training split are used per process, >=
            1; None for all.
        recalibrate: ``"both"``: networks with batch norms are evaluated without and with recalibrated statistics.
            ``"auto"``: only with. Nothing changes for other networks.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of its range.
    """

    task_type = MatchingTask

    def __init__(
        self,
        points: int = 25,
        train_batches: int | None = None,
        recalibrate: Literal["both", "auto"] = "both",
        dirpath: str | None = None,
    ) -> None:
        if points < 2:
            raise ValueError(f"points must be at least 2, got {points}.")
        if train_batches is not None and train_batches < 1:
            raise ValueError(f"train_batches must be at least 1, or null for all, got {train_batches}.")
        if recalibrate not in ("both", "auto"):
            raise ValueError(f'recalibrate must be "both" or "auto", got {recalibrate!r}.')
        self.points = points
        self.train_batches = train_batches
        self.recalibrate = recalibrate
        super().__init__(dirpath)
        self._summary: list[dict[str, Any]] = []
        self._pairs = 0
        self._title = ""

    def report(self, trainer: Trainer, task: MatchingTask, data: ImageDataModule) -> None:
        """Evaluate, and write tables and figures."""
        distances: dict[tuple[Pair, str], float] = {}
        curves = self._curves(trainer, task, data, distances)
        on_first_rank(trainer, lambda: self._publish(trainer, task, data, curves, distances))

    def _curves(
        self,
        trainer: Trainer,
        task: MatchingTask,
        data: ImageDataModule,
        distances: dict[tuple[Pair, str], float],
    ) -> dict[_Key, dict[Pair, Barrier]]:
        """Evaluate all lines, on every rank."""
        device = trainer.strategy.root_device  # after a fit Lightning has moved the module to the CPU
        loaders: dict[str, Iterable[tuple[Tensor, Tensor]]] = {
            "train": data.curvature_dataloader(),
            "test": data.test_dataloader(),
        }
        if self.train_batches is not None:
            loaders["train"] = list(islice(loaders["train"], self.train_batches))
        methods = [
            UNMATCHED,
            *(method for method in task.methods if all(method in task.elements[p] for p in task.pairs)),
        ]
        kinds = [_NONE]
        if batch_norms(task.member(task.pairs[0][0])):
            kinds = [_AS_IS, _RECALIBRATED] if self.recalibrate == "both" else [_RECALIBRATED]
        jobs = [(pair, method, kind) for pair in task.pairs for method in methods for kind in kinds]
        curves: dict[_Key, dict[Pair, Barrier]] = {}
        shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        matched: dict[tuple[Pair, str], nn.Module] = {}
        for pair, method, kind in track(jobs, "evaluating lines", transient=True) if shown else jobs:
            a = task.member(pair[0]).to(device)
            if (pair, method) not in matched:
                matched = {(pair, method): task.matched(pair, method).to(device)}
                distances[pair, method] = _distance(a, matched[pair, method])
            for split in _SPLITS:
                curves.setdefault(_Key(method, kind, split), {})[pair] = barrier(
                    a,
                    matched[pair, method],
                    loaders[split],
                    points=self.points,
                    recalibrate=kind == _RECALIBRATED,
                    recalibration_data=_Equal(loaders["train"]),
                )
        return curves

    def _publish(
        self,
        trainer: Trainer,
        task: MatchingTask,
        data: ImageDataModule,
        curves: dict[_Key, dict[Pair, Barrier]],
        distances: dict[tuple[Pair, str], float],
    ) -> None:
        self._summary = _summary(curves)
        self._pairs = len(task.pairs)
        kind = type(task.member(task.pairs[0][0])).__name__
        self._title = f"{kind}, {self._pairs} pair{'s' * (self._pairs > 1)}"
        first = next(iter(curves.values()))
        about = {
            "units": _UNITS,
            "architecture": task.model_zoo.architecture,
            "zoo": str(task.model_zoo.path),
            "members": {str(n): task.model_zoo.member(n).sha256 for n in sorted({n for p in task.pairs for n in p})},
            "pairs": [list(pair) for pair in task.pairs],
            "points": self.points,
            "images": {split: _images(curves, split) for split in _SPLITS},
            "seeds": {"members": sorted({n for p in task.pairs for n in p}), "matching_seed": task.matching_seed},
            "settings": {name: getattr(task, name) for name in ("restarts", "scales", "signs")},
            "symmetry": {"dimension": task.symmetry.dimension, "log10_permutations": task.symmetry.log10_permutations},
            "data": data.identity(),
            "versions": versions(),
        }
        what = "the lines between networks of a zoo, before and after matching: "
        publish_table(self._summary, {"what": what + "barriers over pairs", **about}, self.path / "summary")
        rows = _pair_rows(curves, distances)
        publish_table(rows, {"what": what + "barriers of each pair", **about}, self.path / "barriers")
        publish_table(_curve_rows(curves), {"what": what + "all points", **about}, self.path / "curves")
        columns = [_lines(curves, kind, split) for kind in _kinds(curves) for split in _SPLITS]
        t = next(iter(first.values())).t.numpy()
        figure = interpolation_curves(t, columns, title=f"Between two networks: {self._title}")
        publish_figure(trainer, figure, "figures/MatchingReport/interpolation", self.path / "interpolation.png")
        publish_figure(
            trainer,
            barrier_bars(_bars(curves, self._summary), title=f"Barriers: {self._title}{_suffix(_kinds(curves)[-1])}"),
            "figures/MatchingReport/barriers",
            self.path / "barriers.png",
        )
        self._log(trainer, task)

    def _log(self, trainer: Trainer, task: MatchingTask) -> None:
        symmetry = task.symmetry
        write_atomically(self.path / "symmetry.txt", f"{symmetry}\n")
        found = {
            "dimension": symmetry.dimension,
            "log10_permutations": symmetry.log10_permutations,
            "signs": symmetry.signs,
            "worst_error": symmetry.worst_error if math.isfinite(symmetry.worst_error) else None,
            "notes": list(symmetry.notes),
            "rows": symmetry.table(),
        }
        write_atomically(self.path / "symmetry.json", json.dumps(found, indent=1) + "\n")
        last = self._summary[-1]["batch_norm"]
        values = {
            f"barrier/{row['split']}_{name}/{row['method']}": row[f"{name}_barrier"]
            for row in self._summary
            for name in ("loss", "accuracy")
            if row["batch_norm"] == last
        }
        best = min(v for name, v in values.items() if name.startswith("barrier/test_loss/"))
        log_summary(trainer, values, best)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("symmetry", f"```\n{symmetry}\n```", trainer.global_step)

    def table(self) -> Table:
        """Return the mean barriers."""
        return _terminal_table(self._summary, self._title)

    def notes(self) -> list[str]:
        """Say what the numbers are."""
        note = "mean ± standard deviation over pairs"
        if any(row["note"] == "" for row in self._summary):
            note += "; in brackets: 95 % interval for the mean, over models"
        return [note]

    def places(self, trainer: Trainer) -> dict[str, Path]:
        """Return picture, tables and the symmetry group."""
        return {
            "picture": self.path / "interpolation.png",
            "table": self.path / "summary.csv",
            "pairs": self.path / "barriers.csv",
            "group": self.path / "symmetry.txt",
        }


class _Equal:
    """The batches that are as large as the first one: statistics count every batch alike."""

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        size = None
        for batch in self._batches:
            size = size or len(batch[0])
            if len(batch[0]) == size:
                yield batch


def _distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return math.sqrt(sum(float((x - y).double().square().sum()) for x, y in pairs))


def _images(curves: Mapping[_Key, Mapping[Pair, Barrier]], split: str) -> int:
    return next(c.samples for key, found in curves.items() if key.split == split for c in found.values())


def _kinds(curves: Mapping[_Key, object]) -> list[str]:
    return list(dict.fromkeys(key.batch_norm for key in curves))


def _suffix(kind: str) -> str:
    return {_NONE: "", _AS_IS: ", statistics as they are", _RECALIBRATED: ", statistics recalibrated"}[kind]


def _value(curve: Barrier, quantity: str) -> float:
    value = getattr(curve, quantity)
    return math.nan if value is None else float(value)


def _summary(curves: Mapping[_Key, Mapping[Pair, Barrier]]) -> list[dict[str, Any]]:
    rows = []
    for key in sorted(curves, key=lambda key: (_kinds(curves).index(key.batch_norm), _SPLITS.index(key.split))):
        found = curves[key]
        values = [[_value(curve, quantity) for quantity in _QUANTITIES] for curve in found.values()]
        interval = bootstrap_over_models(list(found), values)
        row: dict[str, Any] = {
            "method": key.method,
            "batch_norm": key.batch_norm,
            "split": key.split,
            "pairs": interval.pairs,
            "models": interval.models,
        }
        for index, quantity in enumerate(_QUANTITIES):
            row[quantity] = float(interval.mean[index])
            for name in ("std", "low", "high"):
                value = float(getattr(interval, name)[index])
                row[f"{quantity}_{name}"] = value if math.isfinite(value) else None
        row["note"] = interval.note
        rows.append(row)
    return rows


def _pair_rows(
    curves: Mapping[_Key, Mapping[Pair, Barrier]], distances: Mapping[tuple[Pair, str], float]
) -> list[dict[str, Any]]:
    rows = []
    for key, found in curves.items():
        for pair, curve in found.items():
            assert curve.accuracy is not None
            middle = len(curve.t) // 2
            rows.append(
                {
                    "first": pair[0],
                    "second": pair[1],
                    "method": key.method,
                    "batch_norm": key.batch_norm,
                    "split": key.split,
                    **{quantity: _value(curve, quantity) for quantity in _QUANTITIES},
                    "loss_first": curve.loss[0].item(),
                    "loss_second": curve.loss[-1].item(),
                    "accuracy_first": curve.accuracy[0].item(),
                    "accuracy_second": curve.accuracy[-1].item(),
                    "t_middle": curve.t[middle].item(),
                    "loss_middle": curve.loss[middle].item(),
                    "accuracy_middle": curve.accuracy[middle].item(),
                    "distance": distances[pair, key.method],
                }
            )
    return rows


def _curve_rows(curves: Mapping[_Key, Mapping[Pair, Barrier]]) -> list[dict[str, Any]]:
    return [
        {
            "first": pair[0],
            "second": pair[1],
            "method": key.method,
            "batch_norm": key.batch_norm,
            "split": key.split,
            "t": t,
            "loss": loss,
            "accuracy": accuracy,
        }
        for key, found in curves.items()
        for pair, curve in found.items()
        for t, loss, accuracy in zip(
            curve.t.tolist(),
            curve.loss.tolist(),
            curve.accuracy.tolist() if curve.accuracy is not None else [],
            strict=True,
        )
    ]


def _lines(curves: Mapping[_Key, Mapping[Pair, Barrier]], kind: str, split: str) -> Lines:
    found = {key.method: list(c.values()) for key, c in curves.items() if (key.batch_norm, key.split) == (kind, split)}
    return Lines(
        f"{split} images{_suffix(kind).replace(', ', chr(10))}",
        {method: torch.stack([curve.loss for curve in each]).numpy() for method, each in found.items()},
        {
            method: torch.stack([curve.accuracy for curve in each if curve.accuracy is not None]).numpy()
            for method, each in found.items()
        },
    )


# What the terminal's table and the bars show: split, quantity, factor, heading.
_SHOWN = (
    ("train", "loss_barrier", 1.0, "train loss", "nats"),
    ("test", "loss_barrier", 1.0, "test loss", "nats"),
    ("test", "accuracy_barrier", 100.0, "test accuracy", "points"),
)


def _bars(curves: Mapping[_Key, Mapping[Pair, Barrier]], summary: Sequence[Mapping[str, Any]]) -> list[Bars]:
    kind = _kinds(curves)[-1]
    panels = []
    for split, quantity, factor, heading, unit in _SHOWN:
        rows = {row["method"]: row for row in summary if (row["batch_norm"], row["split"]) == (kind, split)}
        panels.append(
            Bars(
                f"{heading}, {unit}",
                {
                    method: [factor * _value(c, quantity) for c in curves[_Key(method, kind, split)].values()]
                    for method in rows
                },
                {
                    method: tuple(  # type: ignore[misc]
                        math.nan if (end := row[f"{quantity}_{name}"]) is None else factor * end
                        for name in ("low", "high")
                    )
                    for method, row in rows.items()
                },
            )
        )
    return panels


def _terminal_table(summary: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = Table(title=f"Barriers between networks: {title}", title_justify="left")
    table.add_column("method")
    kinds = list(dict.fromkeys(row["batch_norm"] for row in summary))
    for _, _, _, heading, unit in _SHOWN:
        table.add_column(f"{heading},\n{unit}", justify="right", no_wrap=True)  # together less than 80 characters
    by_key = {(row["method"], row["batch_norm"], row["split"]): row for row in summary}
    for kind in kinds:
        if kind != _NONE:
            table.add_row(f"[bold]batch norm {kind}[/bold]")
        for method in dict.fromkeys(row["method"] for row in summary):
            cells = [_cell(by_key[method, kind, split], name, factor) for split, name, factor, _, _ in _SHOWN]
            table.add_row(method.replace("_", "-"), *cells)
        table.add_section()
    return table


def _cell(row: Mapping[str, Any], quantity: str, factor: float) -> str:
    digits = 1 if factor > 1 else 3

    def text(name: str) -> str:
        return f"{factor * row[name]:.{digits}f}"

    cell = text(quantity)
    if row[f"{quantity}_std"] is not None:
        cell += f" ± {text(f'{quantity}_std')}"
    if row[f"{quantity}_low"] is not None:
        cell += f"\n\\[{text(f'{quantity}_low')}, {text(f'{quantity}_high')}]"
    return cell
