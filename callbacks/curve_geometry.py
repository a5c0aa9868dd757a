"""Hessian and Jacobians at points of trained curves, as tables and figures."""

from typing import Any

from pytorch_lightning import Trainer

from lightning_sym._checks import check_integers
from lightning_sym._distributed import rank, ranks
from lightning_sym.callbacks.report import RunReport
from lightning_sym.connectivity import curve_geometry
from lightning_sym.datamodules import InMemoryDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.curve_geometry import CurveOf, curve_geometry_results
from lightning_sym.reports.report import picked
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.tasks import CurveTask


class CurveGeometry(RunReport):
    """Measure loss and function around points of the curves that a fit has trained.

    Acts at the end of a fit of :class:`lightning_sym.tasks.CurveTask`, at points of the kept curves of the first pairs,
    in double precision. Per point it computes products of the Hessian with the straight, detour, tangent and a random
    direction. Its spectral results are the largest eigenvalues, the trace with its standard error, and counts of small
    eigenvalues (or for larger networks their density). It compares rank and nullity of the Jacobian of the outputs by
    the weights with the dimension of the symmetry's orbit. It compares the Jacobians by the input between points:
    cosine, linear CKA, and the transfer of a linear probe for classes from one point to another. Two exact identities
    are checked at every point, see :func:`lightning_sym.connectivity.curve_geometry`. Batch norm statistics are
    recomputed at every point. With several processes each takes its share of the images.

    On rank 0, in ``results``: ``geometry.csv`` and ``.json`` (a row for each point), ``geometry_jacobians.csv`` and
    ``.json``, ``geometry_near_zero.csv`` and ``.json`` or ``geometry_density.csv`` and ``.json``, and for each curve
    ``geometry-<first>-<second>-<kind>.png`` (in TensorBoard under ``figures/CurveGeometry``). Logged under
    ``details/geometry/pair-<first>-<second>/<kind>`` are ``top_eigenvalue/max``, ``trace/max``, ``gradient_norm/max``,
    ``<direction>_product/max`` over the points, ``jacobian_cosine/ends``, ``jacobian_probe/ends``, and
    ``identities/worst``. A table is printed, with the paths of all files.

    Args:
        points: Number of points of a curve, equally spaced, endpoints included. >= 2.
        pairs: Number of pairs with measured curves, from the first. >= 1.
        images: Number of training images for the loss, from the first, without augmentation. >= 1.
        jacobian_images: Number of these for the Jacobians. >= 4, as CKA needs so many.
        eigenvalues: Number of largest eigenvalues. >= 1.
        probes: Random vectors for the trace of networks too large to decompose their Hessian. >= 2.
        density_steps: Lanczos steps for the density of their eigenvalues; 0 for none.
        max_parameters: Networks of at most this size have their whole Hessian decomposed, with one product per
            parameter. >= 0.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of its range.
    """

    needs = (
        *("pairs", "curves", "member", "model_zoo", "symmetry", "loss_function", "classifies"),
        *("bends", "decay", "matched", "seed"),
    )
    example = "CurveTask"

    def __init__(
        self,
        points: int = 5,
        pairs: int = 1,
        images: int = 512,
        jacobian_images: int = 64,
        eigenvalues: int = 1,
        probes: int = 16,
        density_steps: int = 16,
        max_parameters: int = 4000,
        dirpath: str | None = None,
    ) -> None:
        check_integers(2, points=points, probes=probes)
        check_integers(pairs=pairs, images=images, eigenvalues=eigenvalues)
        check_integers(4, jacobian_images=jacobian_images)
        check_integers(0, density_steps=density_steps, max_parameters=max_parameters)
        self.points, self.pairs = points, pairs
        self.images, self.jacobian_images = images, jacobian_images
        self.settings = {
            "eigenvalues": eigenvalues,
            "probes": probes,
            "density_steps": density_steps,
            "max_parameters": max_parameters,
        }
        super().__init__(dirpath)

    def measure(self, trainer: Trainer, task: CurveTask, data: InMemoryDataModule) -> Any:
        """Measure all curves."""
        network = copied(task.member(task.pairs[0][0])).to(trainer.strategy.root_device)
        images, labels = (part[: self.images] for part in data.split_tensors("train"))
        inputs = data.normalize(images)
        own = [tuple(part[rank() :: ranks()] for part in (inputs, labels))] if len(inputs) > rank() else []
        chosen = [(name, curve) for name, curve in task.curves.items() if name.pair in task.pairs[: self.pairs]]
        found = {}
        with self.progress(trainer, "looking along curves") as progress:
            for number, (name, curve) in enumerate(chosen):

                def show(done: int, total: int, before: int = number) -> None:
                    progress(before * total + done, len(chosen) * total)

                found[CurveOf(*name)] = curve_geometry(
                    curve,
                    network,
                    own,
                    None if task.classifies else task.loss_function,
                    points=self.points,
                    inputs=inputs[: self.jacobian_images],
                    labels=labels[: self.jacobian_images] if task.classifies else None,
                    symmetry=task.symmetry,
                    progress=show,
                    **self.settings,
                )
        return found

    def report(self, trainer: Trainer, task: CurveTask, data: InMemoryDataModule, measured: Any) -> RunResults:
        """Return the results, with figures."""
        members = sorted({number for name in measured for number in name[:2]})
        zoo = task.model_zoo
        about = {
            **zoo.source(members),
            "images": {name.title: shape.samples for name, shape in measured.items()},
            "seeds": {"members": members, "seed": task.seed},
            "settings": {
                **picked(task, "bends", "decay", "matched"),
                **picked(self, "points", "pairs", "jacobian_images"),
                **self.settings,
            },
            **self.source(data),
        }
        return curve_geometry_results(measured, title=architecture_name(task.member(task.pairs[0][0])), about=about)
