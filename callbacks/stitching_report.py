"""The stitching penalty of every pair, site and family of maps: the table and the pictures."""

from collections.abc import Sequence
from typing import Any

from pytorch_lightning import Trainer

from lightning_sym._checks import check_different
from lightning_sym.callbacks.batch_norm_recalibration import BatchNormRecalibration
from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.report import counted, picked
from lightning_sym.reports.stitching import AS_IS, RECALIBRATED, differs_by_number, stitching_results
from lightning_sym.tasks import StitchingTask


class StitchingReport(RunReport):
    """Report the results of a :class:`lightning_sym.tasks.StitchingTask`.

    At the end of the fit, and only then, the kept weights of the stitched networks are evaluated on the test split.
    With a :class:`lightning_sym.callbacks.BatchNormRecalibration`, networks of all families are evaluated twice: with
    its recomputed statistics and with those of training.

    On rank 0, in ``results``: ``penalties.csv`` and ``.json`` (every pair, site and family), ``summary.csv`` and
    ``.json`` (means over pairs, standard deviation, bootstrap interval over models), ``penalties.png``: penalty against
    site, without and with recalibrated statistics. For any-to-any sites a heat map for each family in its place; for
    ``lasso`` maps ``sparsity.png`` too; with ``choose`` also ``choices.csv``, ``.json`` and ``.png``. All are
    in TensorBoard under ``figures/StitchingReport``; mean penalties are logged as
    ``details/test_penalty/<site>/<family>``, the mean over sites and trained families as ``test_penalty``. A table is
    printed, with the places of all files.

    Args:
        choose: Names of families, each without its number. ``["group"]`` chooses, for every pair and place, one of
            ``group(0.01)``, ``group(0.1)`` and so on by validation accuracy. The chosen maps are a further family,
            ``group(chosen)``, drawn instead of these.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, eq. 4.3 and figures of section 4; appendix D.5 for ``choose``. Their
        error bars are standard deviations over dependent pairs.
    """

    needs = (
        *("stitches", "branches", "names", "members", "pairs", "zoos", "target_zoo", "seed", "left_out", "kept"),
        *("stopped", "ports", "batch_norm", "init", "head_start", "resize"),
        *("families", "evaluating", "evaluate", "penalties", "parameters_of"),
    )
    example = "StitchingTask"

    def __init__(self, choose: Sequence[str] = (), dirpath: str | None = None) -> None:
        if choose or not isinstance(choose, Sequence):
            check_different("choose", choose)
        self.choose = tuple(choose)
        super().__init__(dirpath)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Check the task and the data, and that there are maps to choose from and data to choose by.

        Raises:
            ValueError: If there are not.
        """
        super().setup(trainer, pl_module, stage)
        if not (self.active and self.choose):
            return
        task: StitchingTask = pl_module
        for base in self.choose:
            names = [name for name in task.families if differs_by_number(name, base)]
            if len(names) < 2:
                raise ValueError(
                    f"choose names {base!r}, which needs two or more maps of this name with a number, as "
                    f"group(0.01) and group(0.1), but maps are {', '.join(task.families)}."
                )
        if not len(self.data(trainer).split_tensors("val")[0]):
            raise ValueError("choose needs validation data; set val_fraction of the data above 0.")

    def measure(self, trainer: Trainer, task: StitchingTask, data: InMemoryDataModule) -> Any:
        """Evaluate the kept weights on the test split; return the numbers by kind of statistics, and sparsities."""
        recalibration = _recalibration(trainer)
        evaluations: dict[str, dict[str, list[float]]] = {}
        with task.evaluating():
            sparsities = [  # of the kept weights; those of a stopped branch may not be finite
                None if index in task.stopped else _sparsity(branch.stitching_maps)
                for index, branch in enumerate(task.branches)
            ]
            normed = any(branch.batch_norms() for branch in task.branches)
            if not normed or recalibration is None or not recalibration.keep:
                evaluations[AS_IS] = task.evaluate(data.test_dataloader())
            if normed and recalibration is not None:
                with recalibration.recalibrated(trainer, task):
                    evaluations[RECALIBRATED] = task.evaluate(data.test_dataloader())
        return evaluations, sparsities

    def report(self, trainer: Trainer, task: StitchingTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return penalties and their means over pairs, with figures."""
        evaluations, sparsities = measured
        networks = []
        for index, (stitch, branch) in enumerate(zip(task.stitches, task.branches, strict=True)):
            kept = task.kept.get(index, {})
            networks.append(
                {
                    "name": task.names[index],
                    "lower": stitch.pair[0],
                    "upper": stitch.pair[1],
                    **picked(stitch, "site", "target_site", "place", "family"),
                    "trained": bool(task.parameters_of(index)),
                    "batch_norm": bool(branch.batch_norms()),
                    "ports": len(branch.maps),
                    "dimension": sum(module.dimension() for module in branch.stitching_maps),
                    "sparsity": sparsities[index],
                    "epoch": kept.get("epoch"),
                    **{f"val_{name}": kept.get("metrics", {}).get(name) for name in ("accuracy", "loss")},
                }
            )
        lower, upper = task.zoos["lower"][0], task.zoos["upper"][0]
        recalibration = _recalibration(trainer)
        about = {
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
            "settings": picked(task, "ports", "batch_norm", "init", "head_start", "resize"),
            "recalibration": recalibration and picked(recalibration, "images", "batch_size", "exact"),
            "skipped": task.left_out,
            "epochs": trainer.current_epoch,
            **self.source(data),
        }
        names = dict.fromkeys(architecture_name(network) for network in task.members.values())
        return stitching_results(
            networks,
            {kind: {**found, "penalty": task.penalties(found["accuracy"])} for kind, found in evaluations.items()},
            {index: record["reason"] for index, record in task.stopped.items()},
            title=f"{', '.join(names)}, {counted(len(task.pairs), 'pair')}",
            about=about,
            two_zoos=task.target_zoo is not None,
            epochs=trainer.max_epochs,
            choose=self.choose,
        )


def _recalibration(trainer: Trainer) -> BatchNormRecalibration | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((one for one in callbacks if isinstance(one, BatchNormRecalibration)), None)


def _sparsity(maps: Sequence[Any]) -> float:
    entries = [module.port.in_channels * module.port.out_channels for module in maps]
    zeros = sum(size * float(module.sparsity()) for size, module in zip(entries, maps, strict=True))
    return float(zeros / max(1, sum(entries)))
