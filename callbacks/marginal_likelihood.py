"""Learn prior precisions by the marginal likelihood during training, and report effective parameters of layers."""

import math
import time
import warnings
from statistics import fmean
from typing import Any, Literal

from pytorch_lightning import LightningModule, Trainer

from lightning_sym._checks import check_integers, check_known
from lightning_sym._random import generator
from lightning_sym._tags import details, tag
from lightning_sym.callbacks._learned_networks import LearnedNetworks, Number, learned_networks
from lightning_sym.callbacks._waiting import said_if_long
from lightning_sym.callbacks.report import RunReport
from lightning_sym.curvature import CurvatureError, Evidence, PrecisionOptimizer, PriorGroups, factors, parameter_groups
from lightning_sym.curvature.engines import ENGINES, engine_for
from lightning_sym.datamodules import InputDataModule
from lightning_sym.networks import architecture_name
from lightning_sym.reports import RunResults
from lightning_sym.reports.evidence import OF_PATHS, TERMS, by_member, evidence_results, layer_types, member_name
from lightning_sym.reports.report import picked

_MOST_SKIPPED = 3


class MarginalLikelihood(RunReport):
    """Learn the prior precisions of a network, or of all members of a zoo, by maximising the marginal likelihood.

    Works with every task that has a ``prior``, a :class:`lightning_sym.curvature.GaussianPrior` that regularises its
    training: an :class:`lightning_sym.tasks.EquivarianceTask`, or your own LightningModule. An optional
    method ``evaluate(batches)`` is called on every rank with the test split, for the ``loss`` and, if it returns one,
    the ``accuracy`` of the report. The data are those of ``lightning_sym.datamodules``.

    Updates follow every ``every_n_epochs``-th epoch from epoch ``burn_in`` on, counted from 1. One pass over all
    training data, without augmentation, in eval mode and at least single precision, computes the Kronecker factors of
    the curvature at the current weights. Then ``steps`` steps of Adam on the log precisions (and the log noise of a
    regression) maximise the log marginal likelihood per datum, at fixed weights. In layers with several pathways
    (:class:`lightning_sym.layers.ResidualPathways`), this selects among them. If the task's prior is on length scales
    (``prior_on: lengthscales``), these have learned precisions, and curvature, too.

    Updates with a curvature or loss that is not finite are skipped, with one warning; three in a row stop the run.

    With a :class:`lightning_sym.tasks.ZooTask` with ``prior_precision``, for any networks with curvature rules for
    their layers, every member has its own precisions, learned from its current weights (not the kept ones). The prior
    includes batch norms: scale and shift are linear in eval mode, so that their blocks are exact. Stopped members are
    skipped. With ``ddp_members`` all processes share the pass of each member.

    Logged after every update, with the new precisions: ``evidence/log_marginal_likelihood`` and its parts
    ``evidence/log_likelihood``, ``evidence/log_determinant``, ``evidence/scatter`` (the last two are subtracted; nats
    per datum), ``evidence/seconds``, for a regression ``evidence/noise``. For every pathway (or layer without
    pathways) ``details/precision/<path>``, and also ``effective/<path>``, ``normalised/<path>``, ``relative/<path>``,
    ``mean_square/<path>``. For a zoo the ``evidence/...`` are means over members (seconds: the sum), and values of a
    member and of its pathways are logged as ``details/.../member-0003``.

    At the end of the fit, on rank 0, in ``results``: ``layers.csv`` and ``.json``, the table of the paper's appendix D
    with a row for every layer and pathway; ``evidence.csv`` and ``.json``, a row for every update;
    ``relative_effective_parameters.png`` and ``evidence.png`` (in TensorBoard ``figures/MarginalLikelihood``). The last
    row of both belongs to the final weights. The layers and the test accuracy are printed, the latter logged as
    ``final/test_accuracy``. For a zoo, the tables have a column ``member``, figures show the mean over members, and the
    test accuracy is that of the kept weights.

    With several processes factors are exact sums over all of them, and all have bitwise equal precisions. A checkpoint
    holds precisions, their optimizer and the curves.

    Args:
        burn_in: First epoch, counted from 1, with an update of precisions, >= 1. None: never, which is plain
            maximum a posteriori training; the evidence is then computed once, at the end.
        every_n_epochs: Updates follow epochs that are multiples of it, >= 1.
        steps: Steps of Adam per update, >= 1.
        lr: Learning rate of the log precisions, > 0.
        lr_schedule: ``"constant"``, as in the authors' code; ``"cosine"``, as in the paper's text: it falls from
            ``lr`` to 0 over ``trainer.max_epochs`` epochs, so that weights and precisions converge together.
        engine: Engine of the curvature, see :func:`lightning_sym.curvature.factors`. ``"auto"``: ``"backpack"``, or
            ``"autograd"``, with the same numbers, for networks that BackPACK cannot handle; the tables name it.
        samples: None: exact factors, in as many backward passes as the network has outputs. Otherwise Monte Carlo with
            so many backward passes, >= 1; new random signs in every update.
        granularity: ``"per_path"``: a precision for every pathway of every layer. ``"per_tensor"``: for every tensor.
        ffc: How factored fully connected layers share B, see :func:`lightning_sym.curvature.factors`.
        bounds: Range of log precisions.
        learn_noise: Whether the noise of a regression is learned.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Attributes:
        networks: The networks with learned precisions; available after ``setup``.

    Raises:
        ValueError: If an argument is out of range.

    References:
        van der Ouderaa, Immer, van der Wilk (2023), "Learning Layer-wise Equivariances Automatically using Gradients",
        arXiv:2310.06131; docs/theory/curvature.md, 2.4, 3.3 and 3.4.
    """

    data_type = InputDataModule  # type: ignore[type-abstract]
    networks: LearnedNetworks
    _groups: PriorGroups
    _engine: str

    def __init__(
        self,
        burn_in: int | None = 10,
        every_n_epochs: int = 5,
        steps: int = 20,
        lr: float = 0.1,
        lr_schedule: Literal["constant", "cosine"] = "constant",
        engine: str = "auto",
        samples: int | None = None,
        granularity: Literal["per_path", "per_tensor"] = "per_path",
        ffc: Literal["shared", "per_channel"] = "shared",
        bounds: tuple[float, float] = (-20.0, 20.0),
        learn_noise: bool = True,
        dirpath: str | None = None,
    ) -> None:
        super().__init__(dirpath)
        check_integers(every_n_epochs=every_n_epochs, steps=steps)
        check_integers(optional=True, burn_in=burn_in, samples=samples)
        check_known("lr_schedule", lr_schedule, ("constant", "cosine"))
        check_known("granularity", granularity, ("per_path", "per_tensor"))
        check_known("ffc", ffc, ("shared", "per_channel"))
        check_known("engine", engine, ("auto", *ENGINES))
        PrecisionOptimizer(["trial"], lr=lr, bounds=(bounds[0], bounds[1]))  # rejects bad settings early
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
        self._optimizers: dict[Number, PrecisionOptimizer] = {}
        self._fitting = False
        self._begin()

    def _begin(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._skipped: dict[Number, int] = {}  # consecutive skipped updates
        self._warned = False
        self._running: list[Number] = []
        self._tested: dict[Number, dict[str, float]] = {}

    # ---- schedule

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the task and the data, and make the optimizers of the precisions.

        Raises:
            TypeError: If the task has no prior, or the data are not of ``lightning_sym.datamodules``.
            ValueError: If the cosine schedule has no end.

        Warns:
            UserWarning: If training ends before the first update.
        """
        super().setup(trainer, pl_module, stage)
        self._fitting = stage == "fit"
        if not self._fitting:
            return
        self._begin()
        self.networks = learned_networks(pl_module)
        if self.lr_schedule == "cosine" and self.burn_in is not None and (trainer.max_epochs or -1) < 1:
            raise ValueError(
                "lr_schedule cosine of MarginalLikelihood ends with trainer.max_epochs, which is not set; set it, or "
                "use constant."
            )
        last = 0 if trainer.fast_dev_run else trainer.max_epochs or 0  # type: ignore[attr-defined]
        never = self.burn_in is not None and not any(map(self.updates_after, range(1, last + 1)))
        if last > 0 and never and trainer.is_global_zero:
            warnings.warn(
                f"MarginalLikelihood updates precisions after epochs >= burn_in={self.burn_in} that are multiples of "
                f"every_n_epochs={self.every_n_epochs}, but training ends after epoch {last}: they will never "
                "be updated; lower one of the two, train longer, or set burn_in to null.",
                stacklevel=2,
            )
        prior = self.networks.prior
        self._engine = engine_for(prior.network) if self.engine == "auto" else self.engine
        self._groups = parameter_groups(prior.network, self.granularity, lengthscales=prior.on == "lengthscales")
        self._running = self.networks.numbers
        self._optimizers = {number: self._make_optimizer(number) for number in self.networks.numbers}

    def _make_optimizer(self, number: Number) -> PrecisionOptimizer:
        prior = self.networks.prior
        present = prior.members[number]
        optimizer = PrecisionOptimizer(
            self._groups.names,
            lr=self.lr,
            log_noise=present.log_noise,
            learn_noise=self.learn_noise and prior.likelihood == "regression",
            bounds=(self.bounds[0], self.bounds[1]),
        )
        for index, name in enumerate(self._groups.names):  # they may differ if the task was trained before
            values = [present.log_precisions[key] for key, group in self._groups.precisions.items() if group == name]
            optimizer.log_precisions[index] = fmean(values)
        optimizer.log_precisions.clamp_(*self.bounds)
        return optimizer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the task trains under its prior.

        Raises:
            ValueError: If it does not.
        """
        if self.networks.prior.samples < 1:
            raise ValueError(
                f"{type(pl_module).__name__} does not train under its prior; call self.prior.start("
                "self.trainer.optimizers, self.trainer.datamodule) in its on_fit_start, and "
                "self.prior.add_gradients() in on_before_optimizer_step."
            )

    def updates_after(self, epoch: int) -> bool:
        """Test whether precisions are updated after an epoch, counted from 1."""
        return self.burn_in is not None and epoch >= self.burn_in and epoch % self.every_n_epochs == 0

    def _lr_after(self, trainer: Trainer, epoch: int) -> float:
        """Return the learning rate of the precisions after an epoch, counted from 1."""
        if self.lr_schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * min(epoch / (trainer.max_epochs or epoch), 1))) / 2

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the precisions, if due."""
        epoch = trainer.current_epoch + 1
        if not self.updates_after(epoch):
            return
        with said_if_long(trainer, "MarginalLikelihood computes the curvature"):
            found = [record for number in self.networks.running() if (record := self._update(trainer, number, epoch))]
        self.records += found
        self._log(trainer, pl_module, found)

    def _update(self, trainer: Trainer, number: Number, epoch: int) -> dict[str, Any] | None:
        """Update the precisions of one network and return its record; None if the update was skipped."""
        before = self._optimizers[number].state_dict()
        try:
            record = self._measured(trainer, number, epoch, self.steps)
        except CurvatureError as error:
            self._optimizers[number].load_state_dict(before)
            self._skip(trainer, number, epoch, error)
            return None
        self._skipped[number] = 0
        self._apply(number)
        return record

    def _measured(self, trainer: Trainer, number: Number, epoch: int, steps: int = 0) -> dict[str, Any]:
        """Return the record of a network at its current weights, after some steps of its precisions."""
        start = time.perf_counter()
        evidence = self._evidence(trainer, number, epoch)
        if steps:
            self._optimizers[number].update(evidence, steps, self._lr_after(trainer, epoch))
        record = self._record(number, evidence, epoch)
        return {**record, "seconds": time.perf_counter() - start}

    def _evidence(self, trainer: Trainer, number: Number, epoch: int) -> Evidence:
        """Return the evidence of a network at its current weights; on every rank."""
        network = self.networks.network(number)
        keys = (epoch, trainer.global_rank) if number is None else (epoch, trainer.global_rank, number)
        found = factors(
            network,
            self.networks.batches(self.data(trainer)),
            self.networks.prior.likelihood,
            engine=self._engine,
            samples=self.samples,
            ffc=self.ffc,
            generator=generator("marginal likelihood", *keys) if self.samples else None,
            lengthscales=self.networks.prior.on == "lengthscales",
        )
        return Evidence.of(network, found, self._groups, temperature=self.networks.prior.temperature)

    def _skip(self, trainer: Trainer, number: Number, epoch: int, error: CurvatureError) -> None:
        self._skipped[number] = self._skipped.get(number, 0) + 1
        if self._skipped[number] >= _MOST_SKIPPED:
            raise CurvatureError(
                f"{_MOST_SKIPPED} updates of the precisions{_of(number)} in a row failed, the last after epoch "
                f"{epoch}: {error}"
            ) from error
        if not self._warned and trainer.is_global_zero:
            warnings.warn(
                f"The update of the precisions{_of(number)} after epoch {epoch} was skipped, and training continues: "
                f"{error} Further skipped updates are not reported.",
                stacklevel=2,
            )
        self._warned = True

    def _apply(self, number: Number) -> None:
        """Apply the new precisions to the training of a network."""
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
            **{name: value / evidence.samples for name, value in zip(TERMS, values, strict=True)},
            **({"noise": math.exp(noise)} if self.networks.prior.likelihood == "regression" else {}),
            "samples": evidence.samples,
            "paths": {
                path: {
                    "layer": found.layer,
                    "parameters": found.size,
                    "effective": found.raw,
                    **picked(found, "precision", "mean_square", "normalised", "relative"),
                }
                for path, found in evidence.effective_parameters(precisions, noise).items()
            },
        }

    @property
    def charts(self) -> dict[str, str]:
        """Tags of TensorBoard's first charts, by title: the evidence and its terms."""
        terms = {"log marginal likelihood": TERMS[:1], "its terms": TERMS[1:]}
        return {} if self.burn_in is None else {n: f"evidence/({'|'.join(tags)})$" for n, tags in terms.items()}

    def _log(self, trainer: Trainer, task: LightningModule, records: list[dict[str, Any]]) -> None:
        """Log the records of one update, which are the same on every rank."""
        if not records:
            return
        for name in (*TERMS, "noise"):
            if values := [record[name] for record in records if name in record]:
                task.log(f"evidence/{name}", fmean(values))
        task.log("evidence/seconds", math.fsum(record["seconds"] for record in records))
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            found: dict[str, float] = {}
            for record in records:
                of = "" if "member" not in record else f"/{member_name(record['member'])}"
                found |= {f"{tag(n, path)}{of}": vs[n] for path, vs in record["paths"].items() for n in OF_PATHS}
                if of:
                    found |= {f"evidence/{name}{of}": record[name] for name in TERMS}
            for logger in trainer.loggers:  # at Lightning's step of an epoch's end
                logger.log_metrics(details(found), step=max(trainer.global_step - 1, 0))

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the precisions for a resumed run."""
        return {
            "optimizers": {
                member_name(number): optimizer.state_dict() for number, optimizer in self._optimizers.items()
            },
            "settings": {"granularity": self.granularity},
            "records": self.records,
            "skipped": {member_name(number): count for number, count in self._skipped.items()},
            "warned": self._warned,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, in a fit; call it after ``setup``.

        Raises:
            ValueError: If the state belongs to another network or other members, or has another granularity of
                precisions.
        """
        if not self._fitting or not state_dict["optimizers"]:  # testing a checkpoint keeps the results of a fit
            return
        granularity = state_dict["settings"]["granularity"]
        if granularity != self.granularity:
            raise ValueError(
                f"The checkpoint has precisions {granularity} but this run has them {self.granularity}; use the "
                "granularity that the run began with."
            )
        names = {member_name(number): number for number in self._optimizers}
        if names.keys() != state_dict["optimizers"].keys():
            raise ValueError("The checkpoint has precisions of other networks than this run; use its own recipe.")
        for name, state in state_dict["optimizers"].items():
            self._optimizers[names[name]].load_state_dict(state)
            if state["adam"]["state"]:  # Adam has made an update
                self._apply(names[name])
        self.records = list(state_dict["records"])
        self._skipped = {names[name]: count for name, count in state_dict["skipped"].items()}
        self._warned = state_dict["warned"]

    # ---- report

    def measure(self, trainer: Trainer, task: LightningModule, data: InputDataModule) -> None:
        """Evaluate the final weights."""
        epoch = trainer.current_epoch
        self._running = self.networks.running()
        done = {record.get("member") for record in self.records if record["epoch"] == epoch}
        for number in self._running:
            if number in done:
                continue
            try:
                self.records = [*self.records, self._measured(trainer, number, epoch)]
            except CurvatureError as error:
                if trainer.is_global_zero:
                    warnings.warn(f"There is no evidence of the final weights{_of(number)}: {error}", stacklevel=2)
        self._tested = self.networks.test(data)

    def report(self, trainer: Trainer, task: LightningModule, data: InputDataModule, measured: None) -> RunResults:
        """Return the layers and the evidence, with figures."""
        prior = self.networks.prior
        members = None if None in self._optimizers else len(self.networks.numbers)
        names = ("burn_in", "every_n_epochs", "steps", "lr", "lr_schedule", "samples", "granularity", "ffc")
        own = prior.members
        return evidence_results(
            self.records,
            self._last(),
            self._tested,
            network=architecture_name(prior.network),
            architecture=getattr(prior.network, "architecture", architecture_name(prior.network)),
            members=members,
            keep=str(getattr(task, "keep", "last")) if trainer.max_epochs else "last",  # the same if untrained
            updated=any(optimizer.state_dict()["adam"]["state"] for optimizer in self._optimizers.values()),
            about={
                "settings": {
                    **picked(self, *names, "learn_noise"),
                    "engine": self._engine,
                    "precision": prior.precision,
                    "bounds": list(self.bounds),
                    **picked(prior, "likelihood", "temperature"),
                    "prior_on": prior.on,
                    "prior_step": "implicit" if prior.implicit else "gradient",
                },
                "log_precisions": by_member({number: one.log_precisions for number, one in own.items()}, members),
                "log_noise": by_member({number: one.log_noise for number, one in own.items()}, members),
                "epochs": trainer.current_epoch,
                **self.source(data),
            },
        )

    def _last(self) -> dict[Number, dict[str, Any]]:
        """Return the last record of each network that was not stopped, by index."""
        found = {record.get("member"): record for record in self.records}
        return {number: found[number] for number in self._running if number in found}

    def layer_types(self, member: int | None = None) -> dict[str, str]:
        """Return, for each layer with several pathways, the one with the largest relative number in the last record.

        Args:
            member: Index of the member, for a zoo.
        """
        last = self._last()
        return layer_types(last[member]) if member in last else {}


def _of(number: Number) -> str:
    return "" if number is None else f" of member {number}"
