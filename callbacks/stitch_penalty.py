"""The stitching penalty of every pair, site and family of maps: the table and the pictures."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pytorch_lightning import Trainer
from rich.table import Table

from lightning_sym._statistics import bootstrap_over_models
from lightning_sym.callbacks._checks import on_first_rank
from lightning_sym.callbacks._publish import log_summary, publish_figure, publish_table
from lightning_sym.callbacks.batch_norm_recalibration import BatchNormRecalibration
from lightning_sym.callbacks.run_report import RunReport
from lightning_sym.datamodules import ImageDataModule
from lightning_sym.figures import (
    PenaltyFamily,
    PenaltyPanel,
    SparsityFamily,
    penalty_curves,
    penalty_heat_map,
    sparsity_against_penalty,
)
from lightning_sym.tasks import StitchingTask
from lightning_sym.zoo import versions

_MOST_NOTES = 4
_AS_IS, _RECALIBRATED, _NONE = "as is", "recalibrated", "none"
_UNITS = {
    "penalty": "mean accuracy of both members less that of the stitched network; fraction of images, positive is worse",
    "accuracy": "fraction of images, 0 to 1",
    "loss": "mean cross-entropy, nats",
    "dimension": "degrees of freedom of the map, over all ports",
    "sparsity": "fraction of entries of the map that are at most 1e-3, over all ports",
    "epoch": "epoch whose weights were kept, counted from 0: that with the best validation accuracy",
    "batch_norm": f"running statistics of the upper part: as training left them ({_AS_IS!r}), measured anew on "
    f"training images ({_RECALIBRATED!r}), or no batch norm above the cut ({_NONE!r})",
    "low, high": "95 % percentile interval for the mean over pairs, from 2000 bootstrap samples of the models",
    "std": "standard deviation over pairs, sample form",
}


class StitchPenalty(RunReport[StitchingTask]):
    """Say what a fit of a :class:`lightning_sym.tasks.StitchingTask` found.

    At the end of the fit, and only then, the stitched networks are evaluated on the test split: of each the weights
    that were kept. If there is a :class:`lightning_sym.callbacks.BatchNormRecalibration`, all of them, whatever their
    family, are evaluated with statistics measured anew as it says, and as training left them too.

    On rank 0, in ``results``: ``penalties.csv`` and ``.json`` (every pair, site and family), ``summary.csv`` and
    ``.json`` (means over pairs, standard deviation, bootstrap interval over models), ``penalties.png``: penalty against
    site, without and with recalibrated statistics. For any-to-any sites a heat map for each family in its place; for
    ``lasso`` maps ``sparsity.png`` too. All are in TensorBoard under ``figures/StitchPenalty``; mean penalties are
    logged as ``test_penalty/<site>/<family>``, and the mean over sites and trained families as ``hp_metric``. A table
    is printed, with the places of all files.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, eq. 4.3 and figures of section 4, whose error bars are standard
        deviations over pairs that are not independent.
    """

    task_type = StitchingTask

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(dirpath)
        self._rows: list[dict[str, Any]] = []
        self._summary: list[dict[str, Any]] = []
        self._title = ""
        self._notes: list[str] = []

    def report(self, trainer: Trainer, task: StitchingTask, data: ImageDataModule) -> None:
        """Evaluate, and write tables and figures."""
        recalibration = next(
            (callback for callback in trainer.callbacks if isinstance(callback, BatchNormRecalibration)),  # type: ignore[attr-defined]
            None,
        )
        found: dict[str, dict[str, list[float]]] = {}
        with task.evaluating():
            sparsities = [  # of the kept weights; those of a stopped branch may not be finite
                None if index in task.stopped else _sparsity(branch.stitching_maps)
                for index, branch in enumerate(task.branches)
            ]
            normed = any(branch.batch_norms() for branch in task.branches)
            if not normed or recalibration is None or not recalibration.keep:
                found[_AS_IS] = task.evaluate(data.test_dataloader())
            if normed and recalibration is not None:
                with recalibration.recalibrated(trainer, task):
                    found[_RECALIBRATED] = task.evaluate(data.test_dataloader())
        on_first_rank(trainer, lambda: self._publish(trainer, task, data, found, sparsities, recalibration))

    def _publish(
        self,
        trainer: Trainer,
        task: StitchingTask,
        data: ImageDataModule,
        found: Mapping[str, Mapping[str, list[float]]],
        sparsities: Sequence[float | None],
        recalibration: BatchNormRecalibration | None,
    ) -> None:
        self._rows = _rows(task, found, sparsities)
        self._summary = _summary(self._rows, two_zoos=task.target_zoo is not None)
        pairs = len(task.pairs)
        lower, upper = task.zoos["lower"][0], task.zoos["upper"][0]
        names = dict.fromkeys(type(network).__name__ for network in task.members.values())
        self._title = f"{', '.join(names)}, {pairs} pair{'s' * (pairs > 1)}"
        stopped = [f"{task.names[index]} was stopped: {record['reason']}" for index, record in task.stopped.items()]
        self._notes = stopped[:_MOST_NOTES]
        if len(stopped) > _MOST_NOTES:
            self._notes.append(f"{len(stopped) - _MOST_NOTES} more were stopped; see penalties.csv")
        about = {
            "units": _UNITS,
            "zoo": str(lower.path),
            "target_zoo": str(upper.path),
            "architecture": lower.architecture,
            "target_architecture": upper.architecture,
            "members": {
                "lower": {str(n): lower.member(n).sha256 for n in sorted({a for a, _ in task.pairs})},
                "upper": {str(n): upper.member(n).sha256 for n in sorted({b for _, b in task.pairs})},
            },
            "pairs": [list(pair) for pair in task.pairs],
            "seed": task.seed,
            "settings": {name: getattr(task, name) for name in ("ports", "batch_norm", "init", "head_start", "resize")},
            "recalibration": None
            if recalibration is None
            else {name: getattr(recalibration, name) for name in ("images", "batch_size", "exact")},
            "skipped": task.left_out,
            "epochs": trainer.current_epoch,
            "data": data.identity(),
            "versions": versions(),
        }
        what = "stitching penalties on the test split: "
        publish_table(self._rows, {"what": what + "each stitched network", **about}, self.path / "penalties")
        publish_table(self._summary, {"what": what + "over pairs", **about}, self.path / "summary")
        self._figures(trainer, task)
        kind = _shown(self._summary)
        shown = [row for row in self._summary if row["batch_norm"] in (kind, _NONE) and row["penalty"] is not None]
        logged = {f"test_penalty/{row['place']}/{row['family']}": row["penalty"] for row in shown}
        trained = [row["penalty"] for row in shown if row["trained"]]
        log_summary(trainer, logged, float(np.mean(trained)) if trained else math.nan)

    def _figures(self, trainer: Trainer, task: StitchingTask) -> None:
        kinds, shown = list(dict.fromkeys(row["batch_norm"] for row in self._summary)), _shown(self._summary)
        figures = {}
        if all(row["site"] == row["target_site"] for row in self._summary):
            panels = [_panel(kind, self._summary) for kind in kinds if kind != _NONE] or [_panel(_NONE, self._summary)]
            figures["penalties"] = penalty_curves(panels, title=f"Stitching penalty: {self._title}")
        else:
            for family in dict.fromkeys(row["family"] for row in self._summary):
                values, below, above = _grid(self._summary, family, shown)
                title = f"Stitching penalty, {family}: {self._title}"
                name = "penalties" if len(task.families) == 1 else f"penalties_{_file_name(family)}"
                figures[name] = penalty_heat_map(values, below, above, title)
        if any(row["family"].startswith("lasso") for row in self._summary):
            sites = list(dict.fromkeys(row["place"] for row in self._summary))
            families = _sparsities(self._summary, sites, shown)
            figures["sparsity"] = sparsity_against_penalty(families, sites, title=f"Sparsity: {self._title}")
        for name, figure in figures.items():
            publish_figure(trainer, figure, f"figures/StitchPenalty/{name}", self.path / f"{name}.png")
        self._picture = self.path / f"{next(iter(figures))}.png"

    def table(self) -> Table:
        """Return the mean penalties."""
        return _terminal_table(self._summary, self._title)

    def notes(self) -> list[str]:
        """Say what the numbers are, and what was stopped."""
        return [_legend(self._summary), *self._notes]

    def places(self, trainer: Trainer) -> dict[str, Path]:
        """Return picture and tables."""
        return {
            "picture": self._picture,
            "table": self.path / "summary.csv",
            "pairs": self.path / "penalties.csv",
        }


def _shown(summary: Sequence[Mapping[str, Any]]) -> str:
    """Return the kind of statistics that is shown where there is room for one."""
    kinds = {row["batch_norm"] for row in summary}
    return next(kind for kind in (_RECALIBRATED, _AS_IS, _NONE) if kind in kinds)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rows(
    task: StitchingTask, found: Mapping[str, Mapping[str, list[float]]], sparsities: Sequence[float | None]
) -> list[dict[str, Any]]:
    rows = []
    kinds = list(found)
    for kind in kinds:
        penalties = task.penalties(found[kind]["accuracy"])
        for index, (stitch, branch) in enumerate(zip(task.stitches, task.branches, strict=True)):
            kept = task.kept.get(index, {})
            metrics = kept.get("metrics", {})
            normed = bool(branch.batch_norms())
            if not normed and kind != kinds[0]:
                continue  # nothing to recalibrate: the same again
            stopped = index in task.stopped
            rows.append(
                {
                    "lower": stitch.pair[0],
                    "upper": stitch.pair[1],
                    "site": stitch.site,
                    "target_site": stitch.target_site,
                    "place": stitch.place,
                    "family": stitch.family,
                    "trained": bool(task.parameters_of(index)),
                    "batch_norm": kind if normed else _NONE,
                    "ports": len(branch.maps),
                    "dimension": sum(module.dimension() for module in branch.stitching_maps),
                    "sparsity": sparsities[index],
                    "epoch": kept.get("epoch"),
                    "val_accuracy": metrics.get("accuracy"),
                    "val_loss": metrics.get("loss"),
                    "accuracy": None if stopped else _finite(found[kind]["accuracy"][index]),
                    "loss": None if stopped else _finite(found[kind]["loss"][index]),
                    "penalty": None if stopped else _finite(penalties[index]),
                    "stopped": task.stopped[index]["reason"] if stopped else "",
                }
            )
    return rows


def _sparsity(maps: Sequence[Any]) -> float:
    entries = [module.port.in_channels * module.port.out_channels for module in maps]
    zeros = sum(size * float(module.sparsity()) for size, module in zip(entries, maps, strict=True))
    return float(zeros / max(1, sum(entries)))


def _summary(rows: Sequence[Mapping[str, Any]], *, two_zoos: bool) -> list[dict[str, Any]]:
    """Return means over pairs, for each place, family and kind of statistics.

    Numbers of members of two zoos are those of different models, even if they are the same.
    """
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["batch_norm"], row["place"], row["family"]), []).append(row)
    summary = []
    for (kind, place, family), found in groups.items():
        used = [row for row in found if row["penalty"] is not None]
        pairs = [(int(row["lower"]), int(row["upper"])) for row in used]
        values = [row["penalty"] for row in used]
        numbers: dict[str, Any] = dict.fromkeys(("penalty", "penalty_std", "penalty_low", "penalty_high"))
        note = "all pairs were stopped"
        if used:
            numbers["penalty"] = float(np.mean(values))
            note = "no interval: a zoo stitched to another one"
            numbers["penalty_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
        if used and not two_zoos:
            interval = bootstrap_over_models(pairs, values)
            numbers |= {f"penalty_{name}": _finite(float(getattr(interval, name))) for name in ("low", "high")}
            note = interval.note
        summary.append(
            {
                "place": place,
                "site": found[0]["site"],
                "target_site": found[0]["target_site"],
                "family": family,
                "trained": found[0]["trained"],
                "batch_norm": kind,
                "pairs": len(used),
                **numbers,
                "accuracy": float(np.mean([row["accuracy"] for row in used])) if used else None,
                "dimension": found[0]["dimension"],
                "sparsity": float(np.mean([row["sparsity"] for row in used])) if used else None,
                "note": note,
            }
        )
    return summary


def _value(row: Mapping[str, Any] | None, name: str) -> float:
    return math.nan if row is None or row[name] is None else float(row[name])


def _panel(kind: str, summary: Sequence[Mapping[str, Any]]) -> PenaltyPanel:
    """Return the penalties with one kind of statistics; of sites without batch norm above them those without."""
    rows = {(row["place"], row["family"]): row for row in summary if row["batch_norm"] in (kind, _NONE)}
    sites = list(dict.fromkeys(row["place"] for row in summary))
    families = {row["family"]: row["trained"] for row in summary}

    def column(family: str, name: str) -> list[float]:
        return [_value(rows.get((site, family)), name) for site in sites]

    return PenaltyPanel(
        {_NONE: "", _AS_IS: "batch norm statistics as training left them", _RECALIBRATED: "statistics recalibrated"}[
            kind
        ],
        sites,
        [
            PenaltyFamily(
                family,
                column(family, "penalty"),
                column(family, "penalty_low"),
                column(family, "penalty_high"),
                column(family, "penalty_std"),
                baseline=not trained,
            )
            for family, trained in families.items()
        ],
    )


def _grid(summary: Sequence[Mapping[str, Any]], family: str, kind: str) -> tuple[Any, list[str], list[str]]:
    below, above = (list(dict.fromkeys(row[name] for row in summary)) for name in ("site", "target_site"))
    values = np.full((len(below), len(above)), np.nan)
    for row in summary:
        if row["family"] == family and row["batch_norm"] in (kind, _NONE):
            values[below.index(row["site"]), above.index(row["target_site"])] = _value(row, "penalty")
    return values, below, above


def _sparsities(summary: Sequence[Mapping[str, Any]], sites: Sequence[str], kind: str) -> list[SparsityFamily]:
    rows = {(row["place"], row["family"]): row for row in summary if row["batch_norm"] in (kind, _NONE)}

    def column(family: str, name: str) -> list[float]:
        return [_value(rows.get((site, family)), name) for site in sites]

    return [
        SparsityFamily(
            family,
            column(family, "sparsity"),
            column(family, "penalty"),
            std=column(family, "penalty_std"),
            baseline=not trained,
        )
        for family, trained in {row["family"]: row["trained"] for row in summary}.items()
    ]


def _file_name(family: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in family).strip("_")


def _legend(summary: Sequence[Mapping[str, Any]]) -> str:
    text = "accuracy points lost, mean over pairs"
    if any(row["penalty_std"] is not None for row in summary):
        text += " ± standard deviation"
    text += "; * not trained"
    if any(row["batch_norm"] == _RECALIBRATED for row in summary):
        text += "; batch norm statistics as training left them (as is) and measured anew (recalibrated)"
    return text


def _terminal_table(summary: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return families by sites; where there are many sites, families by their mean and worst site."""
    table = Table(title=f"Stitching penalties on test images: {title}", title_justify="left")
    sites = list(dict.fromkeys(row["place"] for row in summary))
    few = len(sites) <= 4
    table.add_column("map", no_wrap=True)
    for site in sites if few else ("mean over sites", "least", "most", "at"):
        table.add_column(site, justify="right")
    for kind in dict.fromkeys(row["batch_norm"] for row in summary if row["batch_norm"] != _NONE) or [_NONE]:
        if kind != _NONE:
            table.add_row(f"[bold]{kind}[/bold]")
        rows = {(row["place"], row["family"]): row for row in summary if row["batch_norm"] in (kind, _NONE)}
        for family, trained in {row["family"]: row["trained"] for row in summary}.items():
            name = f"{family}{'' if trained else ' *'}"
            if few:
                table.add_row(name, *(_cell(rows.get((site, family))) for site in sites))
                continue
            found = {site: _value(rows.get((site, family)), "penalty") for site in sites}
            found = {site: value for site, value in found.items() if math.isfinite(value)}
            if found:
                worst = max(found, key=found.__getitem__)
                values = [float(np.mean(list(found.values()))), min(found.values()), found[worst]]
                table.add_row(name, *(f"{100 * value:.1f}" for value in values), worst)
        table.add_section()
    return table


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or row["penalty"] is None:
        return "-"
    spread = "" if row["penalty_std"] is None else f" ± {100 * row['penalty_std']:.1f}"
    return f"{100 * row['penalty']:.1f}{spread}"
