"""Loss and accuracy along trained curves and linear paths: the table and the pictures."""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from pytorch_lightning import Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sym._checks import check_integers
from lightning_sym._distributed import rank, ranks, summed, wide
from lightning_sym._text import name_of_callable
from lightning_sym.callbacks._batches import without_augmentation
from lightning_sym.callbacks.report import RunReport
from lightning_sym.connectivity import Curve, curve_barriers, curve_losses
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.landscape import LossSurface, WeightPlane, weight_tensors, weight_vector
from lightning_sym.landscape.planes import trainable
from lightning_sym.networks import architecture_name
from lightning_sym.networks.batch_norm import batch_norms
from lightning_sym.reports import RunResults
from lightning_sym.reports.curve import LINE, MATCHED, MeasuredPath, MeasuredPlane, Pair, curve_results
from lightning_sym.reports.report import counted
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.tasks import CurveTask

# How far the grid of a plane reaches beyond the rectangle of its three points, as a share of its sides.
_MARGIN = 0.2


class CurveReport(RunReport):
    """Report the results of a :class:`lightning_sym.tasks.CurveTask`.

    At the end of the fit, loss and accuracy are evaluated on training images (without augmentation) and test images.
    The paths are every kept curve, the linear path between its endpoints, and the linear path after matching. The loss
    is also evaluated on a grid of the plane through the endpoints and the bend of some curves. Batch norm statistics
    are recomputed at every point, endpoints included. Processes share the images.

    On rank 0, in ``results``: ``summary.csv`` and ``.json`` (highest, mean, barrier, length, by path; means over
    pairs), ``curves.csv`` and ``.json`` (the same of each pair), ``points.csv`` and ``.json`` (all places),
    ``planes.csv`` and ``.json``, ``along.png`` and ``planes.png`` (in TensorBoard under ``figures/CurveReport``). Each
    curve is written as ``curve-<first>-<second>-<kind>.safetensors``, for
    :func:`lightning_sym.connectivity.load_curve`. Logged are ``barrier/<split>_loss/<path>`` and
    ``details/highest/<split>_loss/<path>``. A table is printed, with the places of all files.

    Args:
        points: Number of places of a path, equally spaced, endpoints included. >= 2. With fewer than 61 the highest may
            be missed.
        train_batches: How many batches (of ``eval_batch_size`` images) of the training split are used per process, >=
            1; None for all.
        matching: Method that matches the second network for the linear path after matching; None leaves it out.
            Unused if the task has matched its endpoints; their path is then shown.
        planes: Number of pairs with an evaluated plane, the first ones. >= 0.
        plane_points: Points of a plane's grid along each axis. >= 2.
        plane_images: Number of training images for the planes, the first ones. >= 1.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of its range.
    """

    needs = (
        *("pairs", "names", "curves", "member", "end", "matched", "model_zoo", "loss_function", "classifies"),
        *("bends", "decay", "seed", "gathered"),
    )
    example = "CurveTask"

    def __init__(
        self,
        points: int = 61,
        train_batches: int | None = None,
        matching: Literal["weights", "activations"] | None = "weights",
        planes: int = 1,
        plane_points: int = 21,
        plane_images: int = 1000,
        dirpath: str | None = None,
    ) -> None:
        check_integers(2, points=points, plane_points=plane_points)
        check_integers(train_batches=1 if train_batches is None else train_batches, plane_images=plane_images)
        check_integers(0, planes=planes)
        if matching not in ("weights", "activations", None):
            raise ValueError(f'matching must be "weights", "activations" or None, got {matching!r}.')
        self.points = points
        self.train_batches = train_batches
        self.matching = matching
        self.planes = planes
        self.plane_points = plane_points
        self.plane_images = plane_images
        super().__init__(dirpath)

    def measure(self, trainer: Trainer, task: CurveTask, data: InMemoryDataModule) -> Any:
        """Evaluate all paths and planes."""
        network = copied(task.member(task.pairs[0][0])).to(trainer.strategy.root_device)
        # Twice as fast for convolutions on a CPU, without gradients; the same numbers up to rounding.
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        loaders = without_augmentation(data, self.train_batches)
        curves = self._paths(task)
        jobs = [(path, pair) for path, own in curves.items() for pair in own]
        drawn = [name for name in task.curves if name.pair in task.pairs[: self.planes]]
        paths: dict[str, dict[Pair, MeasuredPath]] = {}
        planes = []
        with self.progress(trainer, "evaluating curves") as progress:
            for done, (path, pair) in enumerate(jobs):
                along = curve_barriers(
                    curves[path][pair],
                    network,
                    loaders,
                    points=self.points,
                    loss=None if task.classifies else task.loss_function,
                    recalibration_data=loaders["train"],
                )
                paths.setdefault(path, {})[pair] = MeasuredPath(_on_cpu(curves[path][pair]), along)
                progress(done + 1, len(jobs) + len(drawn))
            for done, name in enumerate(drawn):
                title, curve = f"{name.first}-{name.second}, {name.kind}", curves[name.kind][name.pair]
                measured = self._plane(title, curve, network, task, data)
                planes += [] if measured is None else [measured]
                progress(len(jobs) + done + 1, len(jobs) + len(drawn))
        return paths, planes, task.gathered()[0]

    def report(self, trainer: Trainer, task: CurveTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return the tables, the figures and the curves."""
        paths, planes, stopped = measured
        zoo, members = task.model_zoo, sorted({number for pair in task.pairs for number in pair})
        about = {
            **zoo.source(members),
            "pairs": [list(pair) for pair in task.pairs],
            "points": self.points,
            "images": {split: along.samples for split, along in next(iter(paths[LINE].values())).along.items()},
            "plane_images": self.plane_images,
            "seeds": {"members": members, "seed": task.seed},
            "settings": {"bends": task.bends, "decay": task.decay, "matched": task.matched, "matching": self.matching},
            "stopped": {str(task.names[number]): reason for number, reason in stopped.items()},
            **self.source(data),
        }
        title = f"{architecture_name(task.member(members[0]))}, {counted(len(task.pairs), 'pair')}"
        loss = None if task.classifies else name_of_callable(task.loss_function)
        notes = [f"{task.names[number]} was stopped: {found['reason']}" for number, found in stopped.items()]
        return curve_results(paths, planes, title=title, about=about, notes=notes, loss=loss)

    def _paths(self, task: CurveTask) -> dict[str, dict[Pair, Curve]]:
        """Return the lines and the curves, by path and pair."""
        matched = self.matching if task.matched == "as_is" else task.matched
        found: dict[str, dict[Pair, Curve]] = {LINE: {}}
        for pair in task.pairs:
            start = weight_vector(task.member(pair[0]))
            found[LINE][pair] = Curve.straight(start, weight_vector(task.end(pair, "as_is")))
            if matched is not None:
                end = weight_vector(task.end(pair, matched))
                found.setdefault(MATCHED, {})[pair] = Curve.straight(start, end)
        for name, curve in task.curves.items():
            found.setdefault(name.kind, {})[name.pair] = curve
        return found

    # ---- planes

    def _plane(
        self, name: str, curve: Curve, network: nn.Module, task: CurveTask, data: InMemoryDataModule
    ) -> MeasuredPlane | None:
        """Return the loss in the plane of a curve; None if it is still a straight line."""
        try:
            plane = curve.plane()
        except ValueError:
            return None
        corners = plane.coordinates(plane.points)
        low, high = corners.amin(0), corners.amax(0)
        x, y = (
            torch.linspace(float(a - _MARGIN * (b - a)), float(b + _MARGIN * (b - a)), self.plane_points).double()
            for a, b in zip(low, high, strict=True)
        )
        coefficients = torch.cartesian_prod(x, y)
        images, labels = (part[: self.plane_images] for part in data.split_tensors("train"))
        inputs = data.normalize(images)
        if task.classifies and not batch_norms(network):
            loss = _surface_losses(network, plane, coefficients, inputs, labels)
        else:
            loss = _recalibrated_losses(network, plane, coefficients, (inputs, labels), task)
        return MeasuredPlane(name, _on_cpu(curve), plane, x, y, loss.view(len(x), len(y)))


def _on_cpu(curve: Curve) -> Curve:
    return replace(curve, points=curve.points.detach().cpu())


def _surface_losses(
    network: nn.Module, plane: WeightPlane, coefficients: Tensor, inputs: Tensor, labels: Tensor
) -> Tensor:
    """Return the cross-entropy at points of a plane; processes share the points; ``inf`` if not finite."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        repeated = targets.expand(outputs.shape[:2])
        return F.cross_entropy(outputs.flatten(0, 1), repeated.flatten(), reduction="none").view(repeated.shape)

    surface = LossSurface(network, inputs, labels, loss=losses)
    found = torch.zeros(len(coefficients), dtype=wide(surface.device))
    own = slice(rank(), None, ranks())
    found[own] = surface.on(plane, coefficients[own]).to(found)
    return summed(found.to(surface.device)).cpu()


def _recalibrated_losses(
    network: nn.Module, plane: WeightPlane, coefficients: Tensor, data: tuple[Tensor, Tensor], task: CurveTask
) -> Tensor:
    """Return the loss at points of a plane; processes share the images; ``inf`` if not finite."""
    network = copied(network)
    parameters = trainable(network)
    batches = [tuple(part[rank() :: ranks()] for part in data)]
    loss = None if task.classifies else task.loss_function

    @torch.no_grad()
    def place(index: float) -> None:
        for name, value in weight_tensors(network, plane.weights(coefficients[int(index)])).items():
            parameters[name].copy_(value)

    found = []
    for index in range(len(coefficients)):
        try:
            found.append(float(curve_losses(network, place, [index], batches, loss=loss).loss))
        except ValueError:  # far out, weights or activations may overflow
            found.append(math.inf)
    return torch.tensor(found, dtype=torch.float64)
