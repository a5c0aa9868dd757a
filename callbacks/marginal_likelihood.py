"""Prior precisions learned by the marginal likelihood during training, and what they say about layers."""

import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning import LightningModule, Trainer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_sym._random import generator
from lightning_sym._text import unknown
from lightning_sym.callbacks._checks import on_first_rank
from lightning_sym.callbacks._learned_networks import LearnedNetworks, Number, learned_networks
from lightning_sym.callbacks._publish import log_summary, publish_figure, publish_table
from lightning_sym.callbacks.run_report import RunReport
from lightning_sym.curvature import (
    CurvatureError,
    Evidence,
    Groups,
    PrecisionOptimizer,
    factors,
    parameter_groups,
)
from lightning_sym.curvature.engines import ENGINES
from lightning_sym.datamodules import InputDataModule
from lightning_sym.figures import evidence_curves, relative_effective_parameters
from lightning_sym.zoo import versions

_TERMS = ("log_marginal_likelihood", "log_likelihood", "log_determinant", "scatter")
_OF_PATHS = ("precision", "mean_square", "effective", "normalised", "relative")
_MOST_SKIPPED = 3
_MOST_ROWS = 40  # of the printed table of a zoo
_UNITS = {
    "precision": "of the Gaussian prior; the geometric mean over tensors if they have several",
    "mean_square": "mean squared weight",
    "effective": "number of parameters that the data determine, 0 to parameters",
    "normalised": "effective / parameters",
    "relative": "normalised over the sum of those of all paths of the layer, 0 to 1",
    "member": "number in the zoo",
    "type": "of a layer: the path with the largest relative number",
    "evidence": "nats per training datum: log marginal likelihood = log likelihood - log determinant - scatter",
    "loss": "of the test split: cross-entropy in nats, or squared error summed over outputs",
    "accuracy": "of the test split: fraction, 0 to 1",
    "seconds": "of a curvature pass, its eigenvalues and the steps of the precisions",
}


class MarginalLikelihood(RunReport[LightningModule, InputDataModule]):
    """Learn the prior precisions of a network, or of all members of a zoo, by evidence, every few epochs of training.

    It works with every task that has a ``prior``, a :class:`lightning_sym.curvature.GaussianPrior` that it trains its
    network under: an :class:`lightning_sym.tasks.EquivarianceTask`, or a LightningModule of your own. If it has a
    method ``evaluate(batches)``, this is called on every rank with the test split, for the ``loss``, and maybe
    ``accuracy``, of the report. The data are those of ``lightning_sym.datamodules``.

    After every ``every_n_epochs``-th epoch from epoch ``burn_in`` on, counted from 1: one pass over all training data,
    not augmented, in eval mode and in single precision at least, for the Kronecker factors of the curvature at the
    present weights; then ``steps`` steps of Adam on the log precisions (and the log noise of a regression) uphill on
    the log marginal likelihood per datum, at fixed weights. Where a layer has several paths
    (:class:`lightning_sym.layers.ResidualPathways`), this decides how much of each it uses.

    Updates whose curvature, or loss, is not finite are skipped, with one warning; three in a row stop the run.

    With a :class:`lightning_sym.tasks.ZooTask` with ``prior_precision``, of any networks whose layers have curvature
    rules, every member has precisions of its own, learned from its present weights (not those it keeps). Batch norms
    are in the prior, too: in eval mode scale and shift are linear, so that their blocks are exact. Members that were
    stopped are passed over. With ``ddp_members`` the pass of each member is shared out over all processes.

    Logged after every update, with the new precisions: ``evidence/log_marginal_likelihood`` and its parts
    ``evidence/log_likelihood``, ``evidence/log_determinant``, ``evidence/scatter`` (the last two are subtracted; nats
    per datum), ``evidence/seconds``, for a regression ``evidence/noise``, and for every path (every layer that has no
    paths) ``precision/<path>``, ``effective/<path>``, ``normalised/<path>``, ``relative/<path>``,
    ``mean_square/<path>``. Of a zoo the ``evidence/...`` are means over members (seconds: the sum), and those of a
    member and of its paths are logged as ``.../member-0003``.

    At the end of the fit, on rank 0, in ``results``: ``layers.csv`` and ``.json``, the table of the paper's appendix D
    with a row for every layer and path; ``evidence.csv`` and ``.json``, a row for every update;
    ``relative_effective_parameters.png`` and ``evidence.png`` (in TensorBoard ``figures/MarginalLikelihood``). The last
    row of both is of the final weights. The layers and the test accuracy are printed, the latter logged as
    ``hp_metric``. Of a zoo, the tables have a column ``member``, figures show the mean over members, and the test
    accuracy is that of the weights that it keeps.

    With several processes factors are exact sums over all of them, and every one holds the same precisions to the last
    bit. A checkpoint holds precisions, their optimizer and the curves.

    Args:
        burn_in: First epoch, counted from 1, after which precisions may be updated, >= 1. None: never, which is plain
            maximum a posteriori training; the evidence is then computed once, at the end.
        every_n_epochs: Updates come after epochs that are multiples of it, >= 1.
        steps: Steps of Adam per update, >= 1.
        lr: Learning rate of the log precisions, > 0.
        lr_schedule: ``"constant"``, as in the authors' code; ``"cosine"``, as in the paper's text: it falls over
            ``trainer.max_epochs`` epochs from ``lr`` to 0, so that weights and precisions come to rest together.
        engine: Engine of the curvature, see :func:`lightning_sym.curvature.factors`.
        samples: None: exact factors, in as many backward passes as the network has outputs. Otherwise Monte Carlo with
            so many backward passes, >= 1; other random signs in every update.
        granularity: ``"per_path"``: a precision for every path of every layer. ``"per_tensor"``: for every tensor.
        ffc: How factored fully connected layers share B, see :func:`lightning_sym.curvature.factors`.
        bounds: Range of log precisions.
        learn_noise: Whether the noise of a regression is learned.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of range.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), "Learning Layer-wise Equivariances Automatically using Gradients",
        arXiv:2310.06131; docs/theory/curvature.md, 3.3 and 3.4.
    """

    task_type = LightningModule
    data_type = InputDataModule  # type: ignore[type-abstract]

    def __init__(
        self,
        burn_in: int | None = 10,
        every_n_epochs: int = 5,
        steps: int = 20,
        lr: float = 0.1,
        lr_schedule: Literal["constant", "cosine"] = "constant",
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
            ("lr_schedule", lr_schedule, ("constant", "cosine")),
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
        self.lr_schedule = lr_schedule
        self.engine = engine
        self.samples = samples
        self.granularity = granularity
        self.ffc = ffc
        self.bounds = bounds
        self.learn_noise = learn_noise
        self._groups: Groups | None = None
        self._networks: LearnedNetworks | None = None
        self._optimizers: dict[Number, PrecisionOptimizer] = {}
        self._fitting = False
        self._begin()

    def _begin(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._skipped: dict[Number, int] = {}  # in a row
        self._warned = False
        self._running: list[Number] = []
        self._tested: dict[Number, dict[str, float]] = {}

    @property
    def networks(self) -> LearnedNetworks:
        """The networks whose precisions are learned; from ``setup`` on."""
        assert self._networks is not None
        return self._networks

    # ---- schedule

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task and the data, and make the optimizers of the precisions.

        Raises:
            TypeError: If the task has no prior, or the data are not of ``lightning_sym.datamodules``.
            ValueError: If a cosine has no end.
        """
        super().setup(trainer, pl_module, stage)
        self._fitting = stage == "fit"
        if not self._fitting:
            return
        self._begin()
        self._networks = learned_networks(pl_module)
        if self.lr_schedule == "cosine" and self.burn_in is not None and (trainer.max_epochs or -1) < 1:
            raise ValueError(
                "lr_schedule cosine of MarginalLikelihood ends with trainer.max_epochs, which is not set; set it, or "
                "use constant."
            )
        self._groups = parameter_groups(self.networks.prior.network, self.granularity)
        self._running = self.networks.numbers
        self._optimizers = {number: self._make_optimizer(number) for number in self.networks.numbers}

    def _make_optimizer(self, number: Number) -> PrecisionOptimizer:
        assert self._groups is not None
        prior = self.networks.prior
        present = prior.members[number]
        optimizer = PrecisionOptimizer(
            self._groups.names,
            lr=self.lr,
            log_noise=present.log_noise,
            learn_noise=self.learn_noise and prior.likelihood == "regression",
            bounds=(self.bounds[0], self.bounds[1]),
        )
        for index, name in enumerate(self._groups.names):  # they may differ in a task that was trained before
            values = [present.log_precisions[key] for key, group in self._groups.precisions.items() if group == name]
            optimizer.log_precisions[index] = math.fsum(values) / len(values)
        optimizer.log_precisions.clamp_(*self.bounds)
        return optimizer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the task trains under its prior.

        Raises:
            ValueError: If it does not.
        """
        if self.networks.prior.samples < 1:
            raise ValueError(
                f"{type(pl_module).__name__} does not train under its prior; call self.prior.start(trainer.optimizers, "
                "trainer.datamodule) in its on_fit_start, and add self.prior.penalty() to its training loss."
            )

    def updates_after(self, epoch: int) -> bool:
        """Return whether precisions are updated after an epoch, counted from 1."""
        return self.burn_in is not None and epoch >= self.burn_in and epoch % self.every_n_epochs == 0

    def _lr_after(self, trainer: Trainer, epoch: int) -> float:
        """Return the learning rate of the precisions after an epoch, counted from 1."""
        if self.lr_schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * min(epoch / (trainer.max_epochs or epoch), 1))) / 2

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the precisions, if it is time."""
        epoch = trainer.current_epoch + 1
        if not self.updates_after(epoch):
            return
        found = [record for number in self.networks.running() if (record := self._update(trainer, number, epoch))]
        self.records += found
        self._log(trainer, pl_module, found)

    def _update(self, trainer: Trainer, number: Number, epoch: int) -> dict[str, Any] | None:
        """Update the precisions of one network, and return its record; None if the update was skipped."""
        optimizer = self._optimizers[number]
        start, before = time.perf_counter(), optimizer.state_dict()
        try:
            evidence = self._evidence(trainer, number, epoch)
            optimizer.update(evidence, self.steps, self._lr_after(trainer, epoch))
            record = self._record(number, evidence, epoch)
        except CurvatureError as error:
            optimizer.load_state_dict(before)
            self._skip(trainer, number, epoch, error)
            return None
        self._skipped[number] = 0
        self._apply(number)
        return {**record, "seconds": time.perf_counter() - start}

    def _evidence(self, trainer: Trainer, number: Number, epoch: int) -> Evidence:
        """Return the evidence of a network at its present weights; on every rank."""
        assert self._groups is not None
        network = self.networks.network(number)
        keys = (epoch, trainer.global_rank) if number is None else (epoch, trainer.global_rank, number)
        found = factors(
            network,
            self.networks.batches(self.data(trainer)),
            self.networks.prior.likelihood,
            engine=self.engine,
            samples=self.samples,
            ffc=self.ffc,
            generator=generator("marginal likelihood", *keys) if self.samples else None,
        )
        return Evidence.of(network, found, self._groups, temperature=self.networks.prior.temperature)

    def _skip(self, trainer: Trainer, number: Number, epoch: int, error: CurvatureError) -> None:
        self._skipped[number] = self._skipped.get(number, 0) + 1
        whose = "" if number is None else f" of member {number}"
        if self._skipped[number] >= _MOST_SKIPPED:
            raise CurvatureError(
                f"{_MOST_SKIPPED} updates of the precisions{whose} in a row failed, the last after epoch {epoch}: "
                f"{error}"
            ) from error
        if not self._warned and trainer.is_global_zero:
            warnings.warn(
                f"The update of the precisions{whose} after epoch {epoch} was skipped, and training goes on: {error} "
                "Further ones that are skipped are not reported.",
                stacklevel=2,
            )
        self._warned = True

    def _apply(self, number: Number) -> None:
        """Have a network train with its new precisions."""
        assert self._groups is not None
        optimizer = self._optimizers[number]
        found = dict(zip(self._groups.names, optimizer.log_precisions.tolist(), strict=True))
        log_precisions = {name: found[group] for name, group in self._groups.precisions.items()}
        self.networks.prior.members[number].set(log_precisions, float(optimizer.log_noise))

    def _record(self, number: Number, evidence: Evidence, epoch: int) -> dict[str, Any]:
        precisions, noise = self._optimizers[number].log_precisions, float(self._optimizers[number].log_noise)
        terms = evidence.terms(precisions, noise)
        values = (terms.total, terms.log_likelihood, terms.log_determinant, terms.scatter)
        if not math.isfinite(terms.total):
            raise CurvatureError("The log marginal likelihood is not finite; lower the learning rate.")
        return {
            "epoch": epoch,
            **({} if number is None else {"member": number}),
            **{name: value / evidence.samples for name, value in zip(_TERMS, values, strict=True)},
            **({"noise": math.exp(noise)} if self.networks.prior.likelihood == "regression" else {}),
            "samples": evidence.samples,
            "paths": {
                path: {
                    "layer": found.layer,
                    "parameters": found.size,
                    "precision": found.precision,
                    "mean_square": found.mean_square,
                    "effective": found.raw,
                    "normalised": found.normalised,
                    "relative": found.relative,
                }
                for path, found in evidence.effective_parameters(precisions, noise).items()
            },
        }

    def _log(self, trainer: Trainer, task: LightningModule, records: list[dict[str, Any]]) -> None:
        """Log the records of one update; they are the same on every rank already."""
        if not records:
            return
        for name in (*_TERMS, "noise"):
            if values := [record[name] for record in records if name in record]:
                task.log(f"evidence/{name}", _mean(values))
        task.log("evidence/seconds", math.fsum(record["seconds"] for record in records))
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            details: dict[str, float] = {}
            for record in records:
                of = "" if "member" not in record else f"/{_member(record['member'])}"
                details |= {f"{n}/{path}{of}": values[n] for path, values in record["paths"].items() for n in _OF_PATHS}
                if of:
                    details |= {f"evidence/{name}{of}": record[name] for name in _TERMS}
            for logger in trainer.loggers:
                logger.log_metrics(details, step=max(trainer.global_step - 1, 0))  # Lightning's step of an epoch's end

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs."""
        return {
            "optimizers": {_member(number): optimizer.state_dict() for number, optimizer in self._optimizers.items()},
            "settings": {"granularity": self.granularity},
            "records": self.records,
            "skipped": {_member(number): count for number, count in self._skipped.items()},
            "warned": self._warned,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, in a fit; to be called after ``setup``.

        Raises:
            ValueError: If it is of another network or of other members, or of precisions that are divided in another
                way.
        """
        if not self._fitting or not state_dict["optimizers"]:  # a test of a checkpoint leaves what a fit found
            return
        granularity = state_dict["settings"]["granularity"]
        if granularity != self.granularity:
            raise ValueError(
                f"The checkpoint has precisions {granularity} and this run has them {self.granularity}; use the "
                "granularity that the run began with."
            )
        names = {_member(number): number for number in self._optimizers}
        if names.keys() != state_dict["optimizers"].keys():
            raise ValueError("The checkpoint has precisions of other networks than this run; use its own recipe.")
        for name, state in state_dict["optimizers"].items():
            self._optimizers[names[name]].load_state_dict(state)
            if state["adam"]["state"]:  # there was an update
                self._apply(names[name])
        self.records = list(state_dict["records"])
        self._skipped = {names[name]: count for name, count in state_dict["skipped"].items()}
        self._warned = state_dict["warned"]

    # ---- report

    def report(self, trainer: Trainer, task: LightningModule, data: InputDataModule) -> None:
        """Evaluate the final weights, and write tables and figures."""
        epoch = trainer.current_epoch
        self._running = self.networks.running()
        done = {record.get("member") for record in self.records if record["epoch"] == epoch}
        for number in self._running:
            if number in done:
                continue
            start = time.perf_counter()
            try:
                record = self._record(number, self._evidence(trainer, number, epoch), epoch)
            except CurvatureError as error:
                if trainer.is_global_zero:
                    whose = "" if number is None else f" of member {number}"
                    warnings.warn(f"There is no evidence of the final weights{whose}: {error}", stacklevel=2)
            else:
                self.records = [*self.records, {**record, "seconds": time.perf_counter() - start}]
        self._tested = self.networks.test(data)
        on_first_rank(trainer, lambda: self._publish(trainer, data))

    def _publish(self, trainer: Trainer, data: InputDataModule) -> None:
        terms = [{name: value for name, value in record.items() if name != "paths"} for record in self.records]
        last = {number: {n: v for n, v in record.items() if n != "paths"} for number, record in self._last().items()}
        prior = self.networks.prior
        about = {
            "what": "a network trained under a prior learned by its Laplace marginal likelihood",
            "units": _UNITS,
            "architecture": getattr(prior.network, "architecture", type(prior.network).__name__),
            "test": self._by_member(self._tested) or {},
            "evidence": self._by_member(last),
            "types": self._by_member({number: _types(record) for number, record in self._last().items()}) or {},
            "settings": {
                **{name: getattr(self, name) for name in ("burn_in", "every_n_epochs", "steps", "lr", "lr_schedule")},
                **{name: getattr(self, name) for name in ("engine", "samples", "granularity", "ffc")},
                "learn_noise": self.learn_noise,
                "precision": prior.precision,
                "bounds": list(self.bounds),
                "likelihood": prior.likelihood,
                "temperature": prior.temperature,
                "prior_step": "implicit" if prior.implicit else "gradient",
            },
            "log_precisions": self._by_member({number: own.log_precisions for number, own in prior.members.items()}),
            "log_noise": self._by_member({number: own.log_noise for number, own in prior.members.items()}),
            "epochs": trainer.current_epoch,
            "data": data.identity(),
            "versions": versions(),
        }
        publish_table(self._rows(), about, self.path / "layers")
        publish_table(terms, {**about, "what": "the log marginal likelihood during training"}, self.path / "evidence")
        if self.records:
            self._figures(trainer, self._title())
        means = self._mean_test()
        log_summary(
            trainer,
            {f"final/test_{name}": value for name, value in means.items()},
            means.get("accuracy", means.get("loss")),
        )

    def _figures(self, trainer: Trainer, title: str) -> None:
        tag = "figures/MarginalLikelihood"
        epochs = sorted({record["epoch"] for record in self.records})
        groups = [[record for record in self.records if record["epoch"] == epoch] for epoch in epochs]
        if layers := _relaxed(self.records[-1]):
            relative = {
                layer: {
                    name: [_mean([_relaxed(record)[layer][name]["relative"] for record in group]) for group in groups]
                    for name in paths
                }
                for layer, paths in layers.items()
            }
            publish_figure(
                trainer,
                relative_effective_parameters(epochs, relative, title=title),
                f"{tag}/relative_effective_parameters",
                self.path / "relative_effective_parameters.png",
            )
        curves = {name: [_mean([record[name] for record in group]) for group in groups] for name in _TERMS}
        figure = evidence_curves(epochs, curves, title=title)
        publish_figure(trainer, figure, f"{tag}/evidence", self.path / "evidence.png")

    def _title(self) -> str:
        members = len(self.networks.numbers)
        name = (
            type(self.networks.prior.network).__name__
            if None in self._optimizers
            else (f"{members} {type(self.networks.prior.network).__name__}, mean over members")
        )
        tested = self._mean_test()
        return f"{name}, test accuracy {100 * tested['accuracy']:.1f} %" if "accuracy" in tested else name

    def _by_member(self, values: dict[Number, Any]) -> Any:
        """Return values by the names of members; that of the network if it is the only one, None without it."""
        if None in self._optimizers:
            return values.get(None)
        return {_member(number): value for number, value in values.items()}

    def _last(self) -> dict[Number, dict[str, Any]]:
        """Return the last record of each network that was not stopped, by its number."""
        found = {record.get("member"): record for record in self.records}
        return {number: found[number] for number in self._running if number in found}

    def _mean_test(self) -> dict[str, float]:
        """Return the mean over networks of what they have on the test split; empty without one."""
        names = next(iter(self._tested.values()), {})
        return {name: _mean([values[name] for values in self._tested.values()]) for name in names}

    def layer_types(self, member: int | None = None) -> dict[str, str]:
        """Return, of the last record, the path with the largest relative number for each layer with several.

        Args:
            member: Its number; of a zoo.
        """
        last = self._last()
        return _types(last[member]) if member in last else {}

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                **({} if number is None else {"member": number}),
                "layer": values["layer"],
                "path": _within(path, values["layer"]),
                **{name: values[name] for name in ("parameters", *_OF_PATHS)},
                "type": _types(record).get(values["layer"], ""),
            }
            for number, record in self._last().items()
            for path, values in record["paths"].items()
        ]

    def table(self) -> Table:
        """Return precision, mean squared weight, normalised and relative numbers of the layers with several paths."""
        last = self._last()
        names = next((_names(record) for record in last.values()), [])
        table = Table(
            title="Layers by their effective parameters", title_justify="left", box=SIMPLE_HEAD, pad_edge=False
        )
        members = None not in self._optimizers
        for column in ("member", "layer") if members else ("layer",):
            table.add_column(column, no_wrap=True)
        if names:
            for name in ("precision", "mean_square", "normalised", "relative"):
                for path in names:
                    table.add_column(f"{_SHORT[name]} {path}", justify="right")
            table.add_column("type")
        else:  # ordinary networks
            for column in ("precision", "mean square", "normalised"):
                table.add_column(column, justify="right")
        rows = [
            ([str(number)] if members else []) + cells
            for number, record in last.items()
            for cells in (_relaxed_cells(record, names) if names else _ordinary_cells(record))
        ]
        for cells in rows[:_MOST_ROWS] if members else rows:
            table.add_row(*cells)
        if members and len(rows) > _MOST_ROWS:
            table.caption = f"and {len(rows) - _MOST_ROWS} more in layers.csv"
        return table

    def notes(self) -> list[str]:
        """Say how good the networks are, what their evidence is, and what a pass costs."""
        notes = []
        of = "" if None in self._optimizers else "mean over members: "
        tested = self._mean_test()
        if "accuracy" in tested:
            notes.append(f"{of}test accuracy {100 * tested['accuracy']:.2f} %, loss {tested['loss']:.4f}")
        elif tested:
            notes.append(f"{of}test loss {tested['loss']:.4f}")
        if last := list(self._last().values()):
            means = {name: _mean([record[name] for record in last]) for name in _TERMS}
            parts = (
                -means["log_marginal_likelihood"],
                -means["log_likelihood"],
                means["log_determinant"],
                means["scatter"],
            )
            total, fit, determinant, scatter = (f"{part:.4f}" for part in parts)
            notes.append(
                f"{of}-log marginal likelihood / N: {total} = {fit} (fit) + {determinant} (log determinant) + "
                f"{scatter} (scatter)"
            )
            notes.append(
                f"{len(self.records)} curvature passes of {_mean([record['seconds'] for record in self.records]):.2f} s"
            )
        return notes

    def places(self, trainer: Trainer) -> dict[str, Path]:
        """Return picture and table."""
        pictures = [self.path / f"{name}.png" for name in ("relative_effective_parameters", "evidence")]
        found = [picture for picture in pictures if picture.is_file()]
        return {**({"picture": found[0]} if found else {}), "table": self.path / "layers.csv"}


_SHORT = {"precision": "prec.", "mean_square": "w²", "normalised": "norm.", "relative": "rel."}


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _member(number: Number) -> str:
    """Return the name of a member in tags and checkpoints; empty for the only network of a task."""
    return "" if number is None else f"member-{number:04d}"


def _relaxed(record: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the numbers of layers with several paths: by layer, then by the path's name within it."""
    layers: dict[str, dict[str, dict[str, Any]]] = {}
    for path, values in record["paths"].items():
        layers.setdefault(values["layer"], {})[_within(path, values["layer"])] = values
    return {layer: paths for layer, paths in layers.items() if len(paths) > 1}


def _names(record: dict[str, Any]) -> list[str]:
    """Return the names of paths within their layers; empty for an ordinary network."""
    return list(dict.fromkeys(path for found in _relaxed(record).values() for path in found))


def _types(record: dict[str, Any]) -> dict[str, str]:
    """Return the path with the largest relative number for each layer with several."""
    return {
        layer: max(paths, key=lambda path: float(paths[path]["relative"])) for layer, paths in _relaxed(record).items()
    }


def _relaxed_cells(record: dict[str, Any], names: list[str]) -> Iterator[list[str]]:
    """Yield the printed row of each layer with several paths."""
    types = _types(record)
    for layer, found in _relaxed(record).items():
        cells = [
            "-" if path not in found else _short(found[path][name])
            for name in ("precision", "mean_square", "normalised")
            for path in names
        ]
        relative = ["-" if path not in found else f"{found[path]['relative']:.3f}" for path in names]
        yield [layer or "network", *cells, *relative, types[layer].upper()]


def _ordinary_cells(record: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the printed row of each layer."""
    for values in record["paths"].values():
        numbers = (values["precision"], values["mean_square"], values["normalised"])
        yield [values["layer"] or "network", *map(_short, numbers)]


def _within(path: str, layer: str) -> str:
    """Return the name of a path within its layer: empty where the layer is the path."""
    return "" if path == layer else path.removeprefix(f"{layer}.")


def _short(value: float) -> str:
    """Return one or two digits, in at most five characters, for a table of 80 columns: 8e-3, 0.079, 3.1, 280, 3e7."""
    if value == 0 or 1e-2 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 99.5 else f"{value:.0f}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
