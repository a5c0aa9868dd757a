"""Prior precisions learned by the marginal likelihood during training, and what they say about layers."""

import math
import time
import warnings
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning import LightningModule, Trainer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_sym._random import generator
from lightning_sym._text import unknown
from lightning_sym.callbacks._checks import on_first_rank
from lightning_sym.callbacks._publish import log_summary, publish_figure, publish_table
from lightning_sym.callbacks.run_report import RunReport
from lightning_sym.curvature import CurvatureError, Evidence, Groups, PrecisionOptimizer, factors, parameter_groups
from lightning_sym.curvature.engines import ENGINES
from lightning_sym.datamodules import InputDataModule
from lightning_sym.figures import evidence_curves, relative_effective_parameters
from lightning_sym.tasks import EquivarianceTask
from lightning_sym.zoo import versions

_TERMS = ("log_marginal_likelihood", "log_likelihood", "log_determinant", "scatter")
_OF_PATHS = ("precision", "mean_square", "effective", "normalised", "relative")
_MOST_SKIPPED = 3
_UNITS = {
    "precision": "of the Gaussian prior; the geometric mean over tensors if they have several",
    "mean_square": "mean squared weight",
    "effective": "number of parameters that the data determine, 0 to parameters",
    "normalised": "effective / parameters",
    "relative": "normalised over the sum of those of all paths of the layer, 0 to 1",
    "type": "of a layer: the path with the largest relative number",
    "evidence": "nats per training datum: log marginal likelihood = log likelihood - log determinant - scatter",
    "loss": "of the test split: cross-entropy in nats, or squared error summed over outputs",
    "accuracy": "of the test split: fraction, 0 to 1",
    "seconds": "of a curvature pass, its eigenvalues and the steps of the precisions",
}


class MarginalLikelihood(RunReport[EquivarianceTask, InputDataModule]):
    """Learn the prior precisions of a network by its Laplace marginal likelihood, every few epochs of training.

    After every ``every_n_epochs``-th epoch from epoch ``burn_in`` on, counted from 1: one pass over all training data,
    not augmented, in eval mode and in single precision at least, for the Kronecker factors of the curvature at the
    present weights; then ``steps`` steps of Adam on the log precisions (and the log noise of a regression) uphill on
    the log marginal likelihood per datum, at fixed weights. Where a layer has several paths
    (:class:`lightning_sym.layers.ResidualPathways`), this decides how much of each it uses.

    Updates whose curvature, or loss, is not finite are skipped, with one warning; three in a row stop the run.

    Logged after every update, with the new precisions: ``evidence/log_marginal_likelihood`` and its parts
    ``evidence/log_likelihood``, ``evidence/log_determinant``, ``evidence/scatter`` (the last two are subtracted; nats
    per datum), ``evidence/seconds``, for a regression ``evidence/noise``, and for every path (every layer that has no
    paths) ``precision/<path>``, ``effective/<path>``, ``normalised/<path>``, ``relative/<path>``,
    ``mean_square/<path>``.

    At the end of the fit, on rank 0, in ``results``: ``layers.csv`` and ``.json``, the table of the paper's appendix D
    with a row for every layer and path; ``evidence.csv`` and ``.json``, a row for every update;
    ``relative_effective_parameters.png`` and ``evidence.png`` (in TensorBoard ``figures/MarginalLikelihood``). The last
    row of both is of the final weights. The layers and the test accuracy are printed, the latter logged as
    ``hp_metric``.

    With several processes factors are exact sums over all of them, and every one holds the same precisions to the last
    bit. A checkpoint holds precisions, their optimizer and the curves.

    Args:
        burn_in: First epoch, counted from 1, after which precisions may be updated, >= 1. None: never, which is plain
            maximum a posteriori training; the evidence is then computed once, at the end.
        every_n_epochs: Updates come after epochs that are multiples of it, >= 1.
        steps: Steps of Adam per update, >= 1.
        lr: Learning rate of the log precisions, > 0.
        engine: Of the curvature, see :func:`lightning_sym.curvature.factors`.
        samples: None: exact factors, in as many backward passes as the network has outputs. Otherwise Monte Carlo with
            so many labels per datum, >= 1; other ones in every update.
        granularity: ``"per_path"``: a precision for every path of every layer. ``"per_tensor"``: for every tensor.
        ffc: Of factored fully connected layers, see :func:`lightning_sym.curvature.factors`.
        bounds: Range of log precisions.
        learn_noise: Whether the noise of a regression is learned.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of range.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), "Learning Layer-wise Equivariances Automatically using Gradients",
        arXiv:2310.06131; our specification, 4.4 and 6.
    """

    task_type = EquivarianceTask
    data_type = InputDataModule  # type: ignore[type-abstract]

    def __init__(
        self,
        burn_in: int | None = 10,
        every_n_epochs: int = 5,
        steps: int = 20,
        lr: float = 0.1,
        engine: str = "autograd",
        samples: int | None = None,
        granularity: Literal["per_path", "per_tensor"] = "per_path",
        ffc: Literal["shared", "per_channel"] = "shared",
        bounds: tuple[float, float] = (-20.0, 20.0),
        learn_noise: bool = True,
        dirpath: str | None = None,
    ) -> None:
        super().__init__(dirpath)
        for name, number, optional in (
            ("burn_in", burn_in, True),
            ("every_n_epochs", every_n_epochs, False),
            ("steps", steps, False),
            ("samples", samples, True),
        ):
            if not (optional and number is None) and (type(number) is not int or number < 1):
                raise ValueError(f"{name} must be an integer >= 1{' or null' * optional}, got {number!r}.")
        for name, choice, accepted in (
            ("granularity", granularity, ("per_path", "per_tensor")),
            ("ffc", ffc, ("shared", "per_channel")),
            ("engine", engine, tuple(ENGINES)),
        ):
            if choice not in accepted:
                raise ValueError(unknown(name, choice, accepted))
        PrecisionOptimizer(["trial"], lr=lr, bounds=(bounds[0], bounds[1]))  # refuses bad settings now
        self.burn_in = burn_in
        self.every_n_epochs = every_n_epochs
        self.steps = steps
        self.lr = lr
        self.engine = engine
        self.samples = samples
        self.granularity = granularity
        self.ffc = ffc
        self.bounds = bounds
        self.learn_noise = learn_noise
        self._groups: Groups | None = None
        self._optimizer: PrecisionOptimizer | None = None
        self._begin()

    def _begin(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._skipped = 0  # in a row
        self._warned = False
        self._tested: dict[str, float] = {}

    # ---- schedule

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task and the data, and make the optimizer of the precisions.

        Raises:
            TypeError: If the task is another one, or the data are not of ``lightning_sym.datamodules``.
        """
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        task = self.task(pl_module)
        self._begin()
        groups = parameter_groups(task.network, self.granularity)
        starts = set(task.log_precisions.values())
        start = starts.pop() if len(starts) == 1 else 0.0
        self._groups = groups
        self._optimizer = PrecisionOptimizer(
            groups.names,
            lr=self.lr,
            log_precision=start,
            log_noise=task.log_noise,
            learn_noise=self.learn_noise and task.likelihood == "regression",
            bounds=(self.bounds[0], self.bounds[1]),
        )
        for index, name in enumerate(groups.names):  # of a task that was trained before
            members = [task.log_precisions[key] for key, group in groups.precisions.items() if group == name]
            self._optimizer.log_precisions[index] = math.fsum(members) / len(members)

    def updates_after(self, epoch: int) -> bool:
        """Return whether precisions are updated after an epoch, counted from 1."""
        return self.burn_in is not None and epoch >= self.burn_in and epoch % self.every_n_epochs == 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the precisions, if it is time."""
        epoch = trainer.current_epoch + 1
        if not self.updates_after(epoch):
            return
        task = self.task(pl_module)
        assert self._optimizer is not None
        start, before = time.perf_counter(), self._optimizer.state_dict()
        try:
            evidence = self._evidence(trainer, task, epoch)
            self._optimizer.update(evidence, self.steps)
            record = self._record(task, evidence, epoch)
        except CurvatureError as error:
            self._optimizer.load_state_dict(before)
            self._skip(trainer, epoch, error)
            return
        self._skipped = 0
        self._apply(task)
        record["seconds"] = time.perf_counter() - start
        self.records.append(record)
        self._log(trainer, task, record)

    def _evidence(self, trainer: Trainer, task: EquivarianceTask, epoch: int) -> Evidence:
        """Return the evidence at the present weights; on every rank."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        assert self._groups is not None
        task.to(trainer.strategy.root_device)  # after a fit Lightning has moved the module to the CPU
        draws = generator("marginal likelihood", epoch, trainer.global_rank) if self.samples else None
        found = factors(
            task.network,
            data.curvature_dataloader(),
            task.likelihood,
            engine=self.engine,
            samples=self.samples,
            ffc=self.ffc,
            generator=draws,
        )
        return Evidence.of(task.network, found, self._groups, temperature=task.temperature)

    def _skip(self, trainer: Trainer, epoch: int, error: CurvatureError) -> None:
        self._skipped += 1
        if self._skipped >= _MOST_SKIPPED:
            raise CurvatureError(
                f"{_MOST_SKIPPED} updates of the precisions in a row failed, the last after epoch {epoch}: {error}"
            ) from error
        if not self._warned and trainer.is_global_zero:
            warnings.warn(
                f"The update of the precisions after epoch {epoch} was skipped, and training goes on: {error} "
                "Further ones that are skipped are not reported.",
                stacklevel=2,
            )
        self._warned = True

    def _apply(self, task: EquivarianceTask) -> None:
        """Have the task train with the new precisions."""
        assert self._groups is not None
        assert self._optimizer is not None
        found = dict(zip(self._groups.names, self._optimizer.log_precisions.tolist(), strict=True))
        noise = float(self._optimizer.log_noise)
        task.set_prior({name: found[group] for name, group in self._groups.precisions.items()}, noise)

    def _record(self, task: EquivarianceTask, evidence: Evidence, epoch: int) -> dict[str, Any]:
        assert self._optimizer is not None
        precisions = self._optimizer.log_precisions
        noise = float(self._optimizer.log_noise)
        terms = evidence.terms(precisions, noise)
        values = (terms.total, terms.log_likelihood, terms.log_determinant, terms.scatter)
        record: dict[str, Any] = {
            "epoch": epoch,
            **{name: value / evidence.samples for name, value in zip(_TERMS, values, strict=True)},
            "samples": evidence.samples,
            "paths": {
                path: {
                    "layer": number.layer,
                    "parameters": number.size,
                    "precision": number.precision,
                    "mean_square": number.mean_square,
                    "effective": number.raw,
                    "normalised": number.normalised,
                    "relative": number.relative,
                }
                for path, number in evidence.effective_parameters(precisions, noise).items()
            },
        }
        if not math.isfinite(terms.total):
            raise CurvatureError("The log marginal likelihood is not finite; lower the learning rate.")
        if task.likelihood == "regression":
            record["noise"] = math.exp(noise)
        return record

    def _log(self, trainer: Trainer, task: EquivarianceTask, record: dict[str, Any]) -> None:
        for name in (*_TERMS, "seconds", "noise"):
            if name in record:
                task.log(f"evidence/{name}", record[name])  # the same on every rank already
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            details = {f"{name}/{path}": values[name] for path, values in record["paths"].items() for name in _OF_PATHS}
            for logger in trainer.loggers:
                logger.log_metrics(details, step=max(trainer.global_step - 1, 0))  # Lightning's step of an epoch's end

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs."""
        return {
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
            "settings": {"granularity": self.granularity},
            "records": self.records,
            "skipped": self._skipped,
            "warned": self._warned,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state; to be called after ``setup``.

        Raises:
            ValueError: If it is of another network, or of precisions that are divided in another way.
        """
        if self._optimizer is None or state_dict["optimizer"] is None:
            return
        granularity = state_dict["settings"]["granularity"]
        if granularity != self.granularity:
            raise ValueError(
                f"The checkpoint has precisions {granularity} and this run has them {self.granularity}; use the "
                "granularity that the run began with."
            )
        self._optimizer.load_state_dict(state_dict["optimizer"])
        self.records = list(state_dict["records"])
        self._skipped, self._warned = state_dict["skipped"], state_dict["warned"]

    # ---- report

    def report(self, trainer: Trainer, task: EquivarianceTask, data: InputDataModule) -> None:
        """Evaluate the final weights, and write tables and figures."""
        epoch = trainer.current_epoch
        if not self.records or self.records[-1]["epoch"] != epoch:
            start = time.perf_counter()
            try:
                record = self._record(task, self._evidence(trainer, task, epoch), epoch)
            except CurvatureError as error:
                if trainer.is_global_zero:
                    warnings.warn(f"There is no evidence of the final weights: {error}", stacklevel=2)
            else:
                self.records = [*self.records, {**record, "seconds": time.perf_counter() - start}]
        test: Any = data.test_dataloader() if hasattr(data, "test_dataloader") else None
        self._tested = {} if test in (None, []) else task.evaluate(test)
        on_first_rank(trainer, lambda: self._publish(trainer, task, data))

    def _publish(self, trainer: Trainer, task: EquivarianceTask, data: InputDataModule) -> None:
        terms = [{name: value for name, value in record.items() if name != "paths"} for record in self.records]
        about = {
            "what": "a network trained under a prior learned by its Laplace marginal likelihood",
            "units": _UNITS,
            "architecture": task.network.architecture,
            "test": self._tested,
            "evidence": terms[-1] if terms else None,
            "types": self.layer_types(),
            "settings": {
                **{name: getattr(self, name) for name in ("burn_in", "every_n_epochs", "steps", "lr", "engine")},
                **{name: getattr(self, name) for name in ("samples", "granularity", "ffc")},
                "bounds": list(self.bounds),
                "likelihood": task.likelihood,
                "temperature": task.temperature,
                "prior_step": "implicit" if task.implicit else "gradient",
            },
            "log_precisions": task.log_precisions,
            "log_noise": task.log_noise,
            "epochs": trainer.current_epoch,
            "data": data.identity(),
            "versions": versions(),
        }
        publish_table(self._rows(), about, self.path / "layers")
        publish_table(terms, {**about, "what": "the log marginal likelihood during training"}, self.path / "evidence")
        if self.records:
            epochs = [record["epoch"] for record in self.records]
            tag = "figures/MarginalLikelihood"
            if relative := self._relative():
                publish_figure(
                    trainer,
                    relative_effective_parameters(epochs, relative, title=self._title(task)),
                    f"{tag}/relative_effective_parameters",
                    self.path / "relative_effective_parameters.png",
                )
            curves = {name: [record[name] for record in self.records] for name in _TERMS}
            figure = evidence_curves(epochs, curves, title=self._title(task))
            publish_figure(trainer, figure, f"{tag}/evidence", self.path / "evidence.png")
        log_summary(
            trainer,
            {f"final/test_{name}": value for name, value in self._tested.items()},
            self._tested.get("accuracy", self._tested.get("loss")),
        )

    def _title(self, task: EquivarianceTask) -> str:
        name = type(task.network).__name__
        return f"{name}, test accuracy {100 * self._tested['accuracy']:.1f} %" if "accuracy" in self._tested else name

    def _relaxed(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the final numbers of layers with several paths: by layer, then by the path's name within it."""
        layers: dict[str, dict[str, dict[str, Any]]] = {}
        for path, values in (self.records[-1]["paths"] if self.records else {}).items():
            layers.setdefault(values["layer"], {})[_within(path, values["layer"])] = values
        return {layer: paths for layer, paths in layers.items() if len(paths) > 1}

    def layer_types(self) -> dict[str, str]:
        """Return, of the last record, the path with the largest relative number for each layer with several."""
        return {
            layer: max(paths, key=lambda path: float(paths[path]["relative"]))
            for layer, paths in self._relaxed().items()
        }

    def _relative(self) -> dict[str, dict[str, list[float]]]:
        """Return relative effective numbers over the records, by layer and path."""
        return {
            layer: {
                path: [record["paths"][f"{layer}.{path}" if layer else path]["relative"] for record in self.records]
                for path in paths
            }
            for layer, paths in self._relaxed().items()
        }

    def _rows(self) -> list[dict[str, Any]]:
        types = self.layer_types()
        return [
            {
                "layer": values["layer"],
                "path": _within(path, values["layer"]),
                **{name: values[name] for name in ("parameters", *_OF_PATHS)},
                "type": types.get(values["layer"], ""),
            }
            for path, values in (self.records[-1]["paths"] if self.records else {}).items()
        ]

    def table(self) -> Table:
        """Return precision, mean squared weight, normalised and relative numbers of the layers with several paths."""
        layers = self._relaxed()
        paths = list(dict.fromkeys(path for found in layers.values() for path in found))
        table = Table(
            title="Layers by their effective parameters", title_justify="left", box=SIMPLE_HEAD, pad_edge=False
        )
        table.add_column("layer", no_wrap=True)
        if not layers:  # an ordinary network
            for column in ("precision", "mean square", "normalised"):
                table.add_column(column, justify="right")
            for row in self._rows():
                numbers = (row["precision"], row["mean_square"], row["normalised"])
                table.add_row(row["layer"] or "network", *(f"{number:.3g}" for number in numbers))
            return table
        for name in ("precision", "mean_square", "normalised", "relative"):
            for path in paths:
                table.add_column(f"{_SHORT[name]} {path}", justify="right")
        table.add_column("type")
        types = self.layer_types()
        for layer, found in layers.items():
            cells = [
                "-"
                if path not in found
                else (f"{found[path][name]:.3f}" if name == "relative" else _short(found[path][name]))
                for name in ("precision", "mean_square", "normalised", "relative")
                for path in paths
            ]
            table.add_row(layer or "network", *cells, types[layer].upper())
        return table

    def notes(self) -> list[str]:
        """Say how good the network is, what its evidence is, and what the pass costs."""
        notes = []
        if "accuracy" in self._tested:
            notes.append(f"test accuracy {100 * self._tested['accuracy']:.2f} %, loss {self._tested['loss']:.4f}")
        elif self._tested:
            notes.append(f"test loss {self._tested['loss']:.4f}")
        if self.records:
            last = self.records[-1]
            parts = (
                -last["log_marginal_likelihood"],
                -last["log_likelihood"],
                last["log_determinant"],
                last["scatter"],
            )
            total, fit, determinant, scatter = (f"{part:.4f}" for part in parts)
            notes.append(
                f"-log marginal likelihood / N: {total} = {fit} (fit) + {determinant} (log determinant) + {scatter} "
                "(scatter)"
            )
            seconds = [record["seconds"] for record in self.records]
            notes.append(f"{len(seconds)} curvature passes of {sum(seconds) / len(seconds):.2f} s")
        return notes

    def places(self, trainer: Trainer) -> dict[str, Path]:
        """Return picture and table."""
        pictures = [self.path / f"{name}.png" for name in ("relative_effective_parameters", "evidence")]
        found = [picture for picture in pictures if picture.is_file()]
        return {**({"picture": found[0]} if found else {}), "table": self.path / "layers.csv"}


_SHORT = {"precision": "prec.", "mean_square": "w²", "normalised": "norm.", "relative": "rel."}


def _within(path: str, layer: str) -> str:
    """Return the name of a path within its layer: empty where the layer is the path."""
    return "" if path == layer else path.removeprefix(f"{layer}.")


def _short(value: float) -> str:
    """Return two digits, in at most six characters: 0.079, 3.1, 280, 3e7."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
