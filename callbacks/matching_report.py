"""Barriers between the members of a zoo before and after matching: the table and the pictures."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from pytorch_lightning import Trainer
from torch import Tensor, nn

from lightning_sym._checks import check_integers, check_words
from lightning_sym._text import name_of_callable
from lightning_sym.callbacks._batches import without_augmentation
from lightning_sym.callbacks.report import RunReport
from lightning_sym.connectivity import Barrier, barrier
from lightning_sym.connectivity.interpolation import line, output_change, split_losses
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.networks.batch_norm import batch_norms
from lightning_sym.reports import RunResults
from lightning_sym.reports.matching import MERGED, SPLITS, Line, MergedPair, Pair, matching_results
from lightning_sym.reports.report import counted, picked
from lightning_sym.reports.stitching import AS_IS, NO_NORM, RECALIBRATED
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.tasks import MatchingTask
from lightning_sym.tasks.matching import UNMATCHED
from lightning_sym.zoo import rebuild_manifest, write_member


class MatchingReport(RunReport):
    """Report the results of a :class:`lightning_sym.tasks.MatchingTask`.

    At the end of the fit, loss and accuracy are evaluated on training images (without augmentation) and test images.
    The paths are the linear paths between the networks of every pair, before (``unmatched``) and after matching by each
    method. Networks with batch norms are evaluated twice: with interpolated running statistics, and with statistics
    recomputed on training images at every point, endpoints included. Processes share the images.

    Rank 0 writes to ``results``:

    - ``summary.csv`` and ``.json``: barriers per method, with mean and standard deviation over pairs, and bootstrap
      interval over models
    - ``barriers.csv`` and ``.json``: the barriers of each pair, and the distances of the weights
    - ``curves.csv`` and ``.json``: all evaluated points
    - ``interpolation.png`` and ``barriers.png`` (in TensorBoard under ``figures/MatchingReport``)
    - ``symmetry.txt`` and ``.json``: the networks' symmetry group (in TensorBoard as text)

    The mean barriers are logged as ``barrier/<split>_loss/<method>`` and ``barrier/<split>_accuracy/<method>``, for
    batch norms those with recalibrated statistics. A table is printed, with the places of all files. Tables also have
    the change of the second network's outputs on test images. If a method changes the network's function
    (``soft_maps``), the printed table marks the method and lists the new loss and accuracy.

    The average of the networks of each pair is a member of the zoo ``results/merged``: the first pair is member 0. Of
    all methods, that with the lowest validation loss of the pair's average is chosen (training loss without validation
    data). Batch norm statistics are recomputed. ``merged.csv`` and ``.json`` hold losses and accuracies of the
    averages. If the task has a ``loss``, every reported loss is that loss; accuracies require classes.

    Args:
        points: Number of points of a line, equally spaced, endpoints included. >= 2.
        train_batches: How many batches (of ``eval_batch_size`` images) of the training split are used per process, >=
            1; None for all.
        recalibrate: ``"both"``: networks with batch norms are evaluated without and with recalibrated statistics.
            ``"auto"``: only with. Nothing changes for other networks.
        merge: Whether to write the averages of matched networks.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of its range.
    """

    needs = (
        *("pairs", "methods", "elements", "member", "matched", "model_zoo", "symmetry"),
        *("restarts", "scales", "signs", "loss_function", "classifies"),
    )
    example = "MatchingTask"

    def __init__(
        self,
        points: int = 25,
        train_batches: int | None = None,
        recalibrate: Literal["both", "auto"] = "both",
        merge: bool = True,
        dirpath: str | None = None,
    ) -> None:
        check_integers(2, points=points)
        check_integers(train_batches=1 if train_batches is None else train_batches)
        check_words(("recalibrate", recalibrate, ("both", "auto")))
        self.points = points
        self.train_batches = train_batches
        self.recalibrate = recalibrate
        self.merge = merge
        super().__init__(dirpath)

    def measure(self, trainer: Trainer, task: MatchingTask, data: InMemoryDataModule) -> Any:
        """Evaluate all lines and means; return barriers, distances of endpoints, and averages with their weights."""
        device = trainer.strategy.root_device  # after a fit Lightning has moved the module to the CPU
        loaders = without_augmentation(data, self.train_batches)
        validation = data.val_dataloader()
        judges: dict[str, Any] = {"train": loaders["train"]} if validation == [] else {"val": validation}
        methods = [method for method in task.methods if all(method in task.elements[pair] for pair in task.pairs)]
        kinds = [NO_NORM]
        if batch_norms(task.member(task.pairs[0][0])):
            kinds = [AS_IS, RECALIBRATED] if self.recalibrate == "both" else [RECALIBRATED]
        loss = None if task.classifies else task.loss_function
        jobs = [(pair, method) for pair in task.pairs for method in [UNMATCHED, *methods]]
        curves: dict[Line, dict[Pair, Barrier]] = {}
        distances: dict[tuple[Pair, str], float] = {}
        changes: dict[tuple[Pair, str], float] = {}
        means: dict[Pair, list[tuple[MergedPair, dict[str, Tensor]]]] = {}
        with self.progress(trainer, "evaluating lines") as progress:
            for done, (pair, method) in enumerate(jobs):
                a, matched = task.member(pair[0]).to(device), task.matched(pair, method).to(device)
                distances[pair, method] = _distance(a, matched)
                changes[pair, method] = output_change(task.member(pair[1]).to(device), matched, loaders["test"])
                for kind in kinds:
                    for split in SPLITS:
                        curves.setdefault(Line(method, kind, split), {})[pair] = barrier(
                            a,
                            matched,
                            loaders[split],
                            points=self.points,
                            loss=loss,
                            recalibrate=kind == RECALIBRATED,
                            recalibration_data=loaders["train"],
                        )
                if self.merge and method != UNMATCHED:
                    mean = copied(a)
                    losses = split_losses(
                        mean,
                        line(a, matched, mean),
                        [0.0, 1.0, 0.5],  # the last one stays
                        {**judges, "test": loaders["test"]},
                        loss=loss,
                        recalibration_data=loaders["train"],
                    )
                    weights = {name: tensor.cpu() for name, tensor in mean.state_dict().items()}
                    means.setdefault(pair, []).append(
                        (MergedPair(pair, method, losses, changes[pair, method]), weights)
                    )
                progress(done + 1, len(jobs))
        return curves, distances, changes, [min(found, key=_judged) for found in means.values()]

    def report(self, trainer: Trainer, task: MatchingTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return the barriers and the symmetry group, with figures."""
        curves, distances, changes, means = measured
        zoo, members = task.model_zoo, sorted({number for pair in task.pairs for number in pair})
        about = {
            **zoo.source(members),
            "pairs": [list(pair) for pair in task.pairs],
            "points": self.points,
            "images": {line.split: next(iter(found.values())).samples for line, found in curves.items()},
            "seeds": {"members": members},
            "settings": picked(task, "restarts", "scales", "signs"),
            "symmetry": picked(task.symmetry, "dimension", "log10_permutations"),
            **self.source(data),
        }
        kind = architecture_name(task.member(members[0]))
        title = f"{kind}, {counted(len(task.pairs), 'pair')}"
        self._write(task, data, means)
        return matching_results(
            curves,
            distances,
            task.symmetry,
            title=title,
            about=about,
            loss=None if task.classifies else name_of_callable(task.loss_function),
            merged=[merged for merged, _ in means],
            changes=changes,
        )

    def _write(
        self, task: MatchingTask, data: InMemoryDataModule, means: Sequence[tuple[MergedPair, dict[str, Tensor]]]
    ) -> None:
        """Write the averages as members of a zoo; delete those of an earlier run."""
        folder, zoo = self.path / MERGED, task.model_zoo
        for old in folder.glob("member-*.safetensors"):
            old.unlink()
        for number, (merged, weights) in enumerate(means):
            members = {str(one): zoo.member(one).sha256 for one in merged.pair}
            write_member(
                folder,
                number,
                weights,
                architecture=zoo.architecture,
                metrics=merged.metrics(),
                data=data.identity(),
                training={
                    "merged": {
                        "zoo": str(zoo.path),
                        "members": members,
                        "method": merged.method,
                        "output_change": merged.output_change,
                    }
                },
            )
        if means:
            rebuild_manifest(folder)


def _judged(mean: tuple[MergedPair, dict[str, Tensor]]) -> float:
    return float(next(iter(mean[0].losses.values())).loss[-1])


def _distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return math.sqrt(sum(float((x - y).double().square().sum()) for x, y in pairs))
