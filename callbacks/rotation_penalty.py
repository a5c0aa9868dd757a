"""The rotation penalty of every member, site, kind and repeat: the table and the picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pytorch_lightning import Trainer
from rich.table import Table

from lightning_sym.callbacks._checks import on_first_rank
from lightning_sym.callbacks._publish import log_summary, publish_figure, publish_table
from lightning_sym.callbacks.run_report import RunReport
from lightning_sym.datamodules import ImageDataModule
from lightning_sym.figures import PenaltyFamily, rotation_penalty
from lightning_sym.tasks import RotationTask
from lightning_sym.zoo import versions

_SAMPLES = 2000
_UNITS = {
    "penalty": "accuracy of the member less that of the rotated network after training, on the same images; fraction "
    "of images, positive is worse. That on val is too low by what the choice of the epoch gains, as test is not",
    "accuracy": "fraction of images, 0 to 1",
    "loss": "mean cross-entropy, nats",
    "epoch": "epoch whose weights were kept, counted from 0: that with the best validation accuracy; none if untrained",
    "std": "standard deviation over the repeats of a member, sample form; of several members the root mean square",
    "low, high": f"95 % percentile interval for the mean test penalty, from {_SAMPLES} bootstrap samples of what "
    "interval_over names; none if there are fewer than three",
    "above_group": "penalty less that of the kind group at the same site: mean over members of the differences between "
    "a member's means, with a 95 % bootstrap interval over members (none for one member)",
}
_KINDS = {
    "group": ("group element", False),
    "orthogonal": ("orthogonal matrix", False),
    "none": ("not rotated, trained on", True),
    "undo": ("group element, undone exactly", True),
}


class RotationPenalty(RunReport[RotationTask]):
    """Say what a fit of a :class:`lightning_sym.tasks.RotationTask` found.

    At the end of the fit, and only then, the members and the rotated networks are evaluated on the test split: of each
    the weights that were kept. With several processes each evaluates its share of the images.

    On rank 0, in ``results``: ``penalties.csv`` and ``.json`` (every member, site, kind and repeat: accuracies and
    penalties on validation and test images), ``summary.csv`` and ``.json`` (per site and kind: mean, standard deviation
    over repeats, a bootstrap interval over members, or over repeats if there is one member, and how far the penalty is
    above that of the group, member by member), and ``rotation_penalty.png``, in TensorBoard under
    ``figures/RotationPenalty``. Mean penalties are logged as ``test_penalty/<site>/<kind>`` and
    ``test_penalty/<kind>``, and that of ``group`` (the first kind if it is not there) as ``hp_metric``. A table is
    printed, with the places of all files.

    Args:
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 3.3.
    """

    task_type = RotationTask

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(dirpath)
        self._summary: list[dict[str, Any]] = []
        self._title = ""
        self._notes: list[str] = []

    def report(self, trainer: Trainer, task: RotationTask, data: ImageDataModule) -> None:
        """Evaluate, and write tables and figures."""
        validation = data.val_dataloader()
        with task.evaluating():
            found = {"test": task.evaluate(data.test_dataloader())}
            if not isinstance(validation, list):  # there are validation images
                found["val"] = task.evaluate(validation)
        on_first_rank(trainer, lambda: self._publish(trainer, task, data, found))

    def _publish(
        self,
        trainer: Trainer,
        task: RotationTask,
        data: ImageDataModule,
        found: Mapping[str, Mapping[str, list[float]]],
    ) -> None:
        rows = _rows(task, found)
        self._summary = _summary(rows)
        zoo, members = task.model_zoo, [int(key) for key in task.members]
        self._title = f"{type(task.members[str(members[0])]).__name__}, {len(members)} member{'s' * (len(members) > 1)}"
        self._notes = [_legend(self._summary), *_differences(self._summary)]
        self._notes += [
            f"{task.names[index]} was stopped: {record['reason']}" for index, record in task.stopped.items()
        ]
        about = {
            "units": _UNITS,
            "kinds": {kind: _KINDS.get(kind, (kind, False))[0] for kind in task.kinds},
            "zoo": str(zoo.path),
            "architecture": zoo.architecture,
            "members": {str(number): zoo.member(number).sha256 for number in members},
            "seed": task.seed,
            "settings": {name: getattr(task, name) for name in ("repeats", "scale", "weight_decay_on")},
            "epochs": trainer.current_epoch,
            "data": data.identity(),
            "versions": versions(),
        }
        what = "rotation penalties: "
        publish_table(rows, {"what": what + "each rotated network", **about}, self.path / "penalties")
        publish_table(self._summary, {"what": what + "per site and kind", **about}, self.path / "summary")
        figure = _figure(self._summary, title=f"Rotation penalty: {self._title}")
        tag = "figures/RotationPenalty/rotation_penalty"
        publish_figure(trainer, figure, tag, self.path / "rotation_penalty.png")
        values = task.quantities(found["test"], "test")
        main = "group" if "group" in task.kinds else task.kinds[0]
        log_summary(trainer, values, values.get(f"test_penalty/{main}", math.nan))

    def table(self) -> Table:
        """Return the mean penalties."""
        return _terminal_table(self._summary, self._title)

    def notes(self) -> list[str]:
        """Say what the numbers are, and what was stopped."""
        return self._notes

    def places(self, trainer: Trainer) -> dict[str, Path]:
        """Return picture and tables."""
        return {
            "picture": self.path / "rotation_penalty.png",
            "table": self.path / "summary.csv",
            "runs": self.path / "penalties.csv",
        }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _rows(task: RotationTask, found: Mapping[str, Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    penalties = {split: task.penalties(metrics["accuracy"]) for split, metrics in found.items()}
    place = {key: len(task.branches) + offset for offset, key in enumerate(task.members)}
    rows = []
    for index, rotation in enumerate(task.rotations):
        trained = bool(task.parameters_of(index)) and index not in task.stopped
        row: dict[str, Any] = {
            "member": rotation.member,
            "site": rotation.site,
            "kind": rotation.kind,
            "repeat": rotation.repeat,
            "epoch": task.kept[index]["epoch"] if trained and index in task.kept else None,
        }
        for split in ("val", "test"):
            accuracies, losses = (found.get(split, {}).get(name) for name in ("accuracy", "loss"))
            row[f"{split}_penalty"] = _finite(penalties[split][index]) if accuracies else None
            row[f"{split}_accuracy"] = _finite(accuracies[index]) if accuracies else None
            row[f"{split}_loss"] = _finite(losses[index]) if losses else None
            member = place[task.lower_of[index]]
            row[f"member_{split}_accuracy"] = _finite(accuracies[member]) if accuracies else None
        rows.append({**row, "stopped": task.stopped.get(index, {}).get("reason", "")})
    return rows


def _summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_key: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        own = by_key.setdefault((row["site"], row["kind"]), {})
        if row["test_penalty"] is not None:
            own.setdefault(row["member"], []).append(row["test_penalty"])
    summary = []
    for (site, kind), by_member in by_key.items():
        values = list(by_member.values())
        whole = [value for each in values for value in each]
        spreads = [np.var(each, ddof=1) for each in values if len(each) > 1]
        low, high, over = _interval(values)
        group = by_key.get((site, "group"), {}) if kind != "group" else {}
        above = [[float(np.mean(by_member[n]) - np.mean(group[n]))] for n in by_member if n in group]
        above_low, above_high, _ = _interval(above)
        validated = [r["val_penalty"] for r in rows if (r["site"], r["kind"]) == (site, kind)]
        summary.append(
            {
                "site": site,
                "kind": kind,
                "members": len(values),
                "networks": len(whole),
                "penalty": _mean(whole),
                "std": float(np.sqrt(np.mean(spreads))) if spreads else None,
                "low": low,
                "high": high,
                "interval_over": over,
                "above_group": _mean([value for (value,) in above]),
                "above_group_low": above_low,
                "above_group_high": above_high,
                "val_penalty": _mean([value for value in validated if value is not None]),
            }
        )
    return summary


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _interval(values: Sequence[Sequence[float]]) -> tuple[float | None, float | None, str]:
    """Return the bootstrap interval of the mean, and over what: members; of one member repeats.

    None for two members, or two repeats of one: resamples of two are only these two and their mean.

    Args:
        values: For each member the penalties of its repeats.

    References:
        Efron (1979), "Bootstrap Methods: Another Look at the Jackknife".
    """
    if len(values) > 2:  # repeats of one member are no news about others
        drawn, over = np.array([np.mean(each) for each in values]), "members"
    elif len(values) == 1 and len(values[0]) > 2:
        drawn, over = np.array(values[0]), "repeats"
    else:
        return None, None, ""
    picked = np.random.default_rng(0).integers(len(drawn), size=(_SAMPLES, len(drawn)))
    low, high = np.quantile(drawn[picked].mean(1), [0.025, 0.975])
    return float(low), float(high), over


def _legend(summary: Sequence[Mapping[str, Any]]) -> str:
    text = "mean on test images"
    if any(row["std"] is not None for row in summary):
        text += " ± standard deviation over repeats"
    over = sorted({row["interval_over"] for row in summary} - {""})
    return text + (f"; in brackets: 95 % interval for the mean, over {' or '.join(over)}" if over else "")


def _differences(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return in words how far orthogonal matrices are above the group: members differ more than these differences."""
    parts = [
        f"{row['site']} {_points(row['above_group'])}"
        + (
            f" \\[{_points(row['above_group_low'])}, {_points(row['above_group_high'])}]"
            if row["above_group_low"] is not None
            else ""
        )
        for row in summary
        if row["kind"] == "orthogonal" and row["above_group"] is not None
    ]
    return [f"orthogonal less group, member by member: {', '.join(parts)}"] if parts else []


def _points(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:.1f}"  # no "-0.0"


def _figure(summary: Sequence[Mapping[str, Any]], title: str) -> Any:
    sites = list(dict.fromkeys(row["site"] for row in summary))
    families = []
    for kind in dict.fromkeys(row["kind"] for row in summary):
        own = [row for row in summary if row["kind"] == kind]
        name, baseline = _KINDS.get(kind, (kind, False))
        numbers = {
            column: [math.nan if row[column] is None else row[column] for row in own]
            for column in ("penalty", "low", "high", "std")
        }
        families.append(
            PenaltyFamily(name, numbers["penalty"], numbers["low"], numbers["high"], numbers["std"], baseline)
        )
    return rotation_penalty(sites, families, title=title)


def _terminal_table(summary: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = Table(title=f"Rotation penalty, points: {title}", title_justify="left")
    table.add_column("in front of")
    kinds = list(dict.fromkeys(row["kind"] for row in summary))
    for kind in kinds:
        table.add_column(kind, justify="right", no_wrap=True)
    by_key = {(row["site"], row["kind"]): row for row in summary}
    for site in dict.fromkeys(row["site"] for row in summary):
        table.add_row(site, *(_cell(by_key[site, kind]) for kind in kinds))
    return table


def _cell(row: Mapping[str, Any]) -> str:
    if row["penalty"] is None:
        return "stopped"
    cell = _points(row["penalty"])
    if row["std"] is not None:
        cell += f" ± {_points(row['std'])}"
    if row["low"] is not None:
        cell += f"\n\\[{_points(row['low'])}, {_points(row['high'])}]"
    return cell
