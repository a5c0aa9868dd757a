"""Curves of low loss between the members of a zoo, all of them trained in one fit."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, product
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sym._checks import check_different, check_integers, check_numbers, check_words
from lightning_sym.connectivity import Curve, CurveNetwork, curve_coefficients
from lightning_sym.connectivity.curves import KINDS, CurveKind
from lightning_sym.landscape import weight_vector
from lightning_sym.networks import Network
from lightning_sym.networks.batch_norm import NotFiniteStatisticsError, batch_norms, recalibrate_batch_norm
from lightning_sym.symmetry import ActivationMoments, activation_matching, weight_matching
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.tasks._members import Pair, PairTask, pair_name
from lightning_sym.tasks.metrics import PopulationLoss
from lightning_sym.zoo import ModelZoo

Matched = Literal["as_is", "weights", "activations"]
MATCHED: tuple[Matched, ...] = get_args(Matched)


class CurveName(NamedTuple):
    """A curve, by the numbers of its endpoints and its kind."""

    first: int
    second: int
    kind: CurveKind

    @property
    def pair(self) -> Pair:
        """The members at t = 0 and t = 1."""
        return self.first, self.second

    def __str__(self) -> str:
        return f"pair-{pair_name(self.pair)}/{self.kind}"


class CurveTask(PairTask):
    r"""Train low-loss curves in weight space between pairs of members of a zoo.

    The endpoints of a curve are fixed networks of the zoo, and its bends are initialised on the segment between them.
    In each step every curve draws one point, :math:`t \sim U(0, 1)`, and takes a gradient step
    on the loss of the network :math:`\gamma(t)` there, plus :math:`\frac{\lambda}{2} \lVert \gamma(t) \rVert^2`
    (docs/theory/curves.md, 1). Any architecture is possible: the network itself is run, with the weights of the point.
    The curves are the members of a population, each pair with each kind: see
    :class:`lightning_sym.tasks.PopulationTask`.

    Batch norms use the statistics of the batch in training. They are recomputed at every point of an evaluation.

    In validation and test every curve is evaluated at ``places`` points, equally spaced between its endpoints; the logs
    hold the means. The bends with the lowest mean validation loss are kept. With several processes all draw the same
    points.

    Args:
        zoo: The zoo's folder, with two members or more.
        pairs: Numbers of the members at the endpoints of each curve. ``"all"``: every two members once, the lower
            number first.
        kinds: Some of ``"bezier"``, ``"chain"``; default both.
        bends: Number of control points between the endpoints. >= 1.
        matched: Alignment of the second member of each pair before training: none (``"as_is"``), or by its weights, or
            by its activations on the training images. It moves along its symmetry orbit; its function is unchanged.
        decay: Lambda of the regulariser. >= 0; the weight decay that the members were trained with is a good choice.
            It takes the place of the optimizer's weight decay, which would draw the bends to 0, not the points.
        places: At how many points a curve is evaluated in validation. >= 1.
        recalibration_batches: With how many batches of training images (of ``eval_batch_size``, per process) batch
            norms are measured there. >= 1.
        seed: Seed of the points. >= 0.
        execution: ``"loop"`` or ``"vmap"``, as for :class:`lightning_sym.tasks.PopulationTask`.
        loss: A network's mean loss on a batch, given outputs and targets; default the cross-entropy.
        optimizer: Makes the optimizer of the bends; default SGD, learning rate 0.05, momentum 0.9.
        lr_scheduler: Makes its learning-rate scheduler; default none.
        lr_scheduler_interval: Whether the scheduler steps once per epoch or per optimizer step.
        keep: Whether the bends of the ``"best"`` epoch are kept or the ``"last"`` ones; default the best if there are
            validation data.
        allow: Your own packages with networks of the zoo, see ``ModelZoo.open``.

    Attributes:
        pairs: The pairs; before ``setup`` they are known only if they were given.
        names: The curve of each member of the population, by number.
        curves: The curves that were kept, by name.

    Logged at the end of each epoch, on rank 0, for split ``train`` (at the points that were drawn) and ``val``:
    ``<split>/loss`` and ``<split>/accuracy`` (means over curves, with ``/min`` and ``/max``), and
    ``pair-0-1/<kind>/<split>_loss`` and ``..._accuracy`` of each curve.

    A checkpoint holds the control points and the endpoints.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Garipov et al. (2018), "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs", arXiv:1802.10026. Their
        code has extra layers for each architecture. Matching before training: Tatro et al. (2020), arXiv:2009.02439.

    Example:
        >>> CurveTask("runs/zoo-mnist5k-mlp/zoo", pairs=[[0, 1]]).names
        [CurveName(first=0, second=1, kind='bezier'), CurveName(first=0, second=1, kind='chain')]
    """

    def __init__(
        self,
        zoo: str,
        pairs: Literal["all"] | list[list[int]] = "all",
        kinds: Sequence[CurveKind] = KINDS,
        bends: int = 1,
        matched: Matched = "as_is",
        decay: float = 0.0,
        places: int = 3,
        recalibration_batches: int = 1,
        seed: int = 0,
        execution: Literal["loop", "vmap"] = "loop",
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        keep: Literal["best", "last"] | None = None,
        allow: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            zoo,
            pairs,
            allow,
            seed=seed,
            execution=execution,
            loss=loss,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            lr_scheduler_interval=lr_scheduler_interval,
            keep=keep,
        )
        check_different("kinds", kinds, KINDS)
        check_words(("matched", matched, MATCHED))
        check_integers(bends=bends, places=places, recalibration_batches=recalibration_batches)
        check_numbers(">= 0", decay=decay)
        if self._settings.get("weight_decay"):
            raise ValueError(
                f"The optimizer has weight_decay {self._settings['weight_decay']}, which would draw the bends to 0 and "
                "not the points of the curve; set it to 0 and use decay of CurveTask."
            )
        self.kinds: tuple[CurveKind, ...] = tuple(kinds)
        self.bends, self.matched, self.decay = bends, matched, decay
        self.places, self.recalibration_batches = places, recalibration_batches
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler", "loss"])
        self.save_hyperparameters({"kinds": list(kinds), **self.describe()})
        self._moved: dict[tuple[Pair, str], Network] = {}
        self._points: dict[int, list[dict[str, Tensor]]] = {}  # evaluated points, by member

    # ---- the zoo, and the ends of the curves

    @property
    def names(self) -> list[CurveName]:
        """The curve of each member of the population."""
        return [CurveName(*pair, kind) for pair, kind in product(self.pairs, self.kinds)]

    @property
    def numbers(self) -> list[int]:
        """The places of the curves in :attr:`names`."""
        return list(range(len(self.names)))

    def build(self) -> None:
        """Open the zoo, load members, and match them if that is wanted."""
        self.open_pairs("A curve")
        for pair in self.pairs:
            _check_ends(self.model_zoo, pair, *map(self.member, pair))
            if self._trainer is not None:  # now, as Lightning makes members on its own device
                self.end(pair, self.matched)

    @property
    def by_activations(self) -> bool:
        """Whether members are aligned by their activations."""
        return self.matched == "activations"

    def end(self, pair: Pair, matched: Matched) -> Network:
        """Return the second member of a pair, moved along its orbit to be like the first; to be called on every rank.

        Args:
            pair: One of :attr:`pairs`.
            matched: As the argument of the class; ``"as_is"`` for the member itself.

        Raises:
            ValueError: If activations are to be matched and there is no datamodule to measure them on.
        """
        a, b = map(self.member, pair)
        if matched == "as_is":
            return b
        if (pair, matched) not in self._moved:
            if matched == "weights":
                match = weight_matching(self.symmetry, a, b)
            else:
                moments = ActivationMoments(self.symmetry, a, b)
                for images, *_ in self._training_batches("matches activations"):
                    moments.update(images)
                moments.reduce()
                match = activation_matching(self.symmetry, a, b, moments)
            assert isinstance(match.network, Network)
            self._moved[pair, matched] = match.network
        return self._moved[pair, matched]

    def _training_batches(self, what: str) -> Iterable[Any]:
        """Return this rank's training images, not augmented."""
        if not hasattr(self.data, "curvature_dataloader"):
            raise ValueError(
                f"CurveTask {what} on training data, and these have no curvature_dataloader; use a datamodule of "
                "lightning_sym.datamodules."
            )
        batches: Iterable[Any] = self.data.curvature_dataloader()
        return batches

    # ---- curves as members

    def make_member(self, number: int) -> nn.Module:
        """Return a curve initialised to the linear path."""
        name = self.names[number]
        # Without a trainer, and so without data, the checkpoint provides the endpoints.
        matched = "as_is" if self._trainer is None else self.matched
        return CurveNetwork(self.member(name.first), self.end(name.pair, matched), self.bends, self.decay)

    @property
    def curves(self) -> dict[CurveName, Curve]:
        """The curves that were kept, by name, on the CPU; without those that were stopped before any was."""
        return {self.names[number]: self._curve(number, record["state"]) for number, record in self.kept.items()}

    def curve(self, number: int) -> Curve:
        """Return a curve with its current bends; within :meth:`evaluating` with the kept ones."""
        return self._curve(number, self.population.member_state(number))

    def _curve(self, number: int, state: dict[str, Tensor]) -> Curve:
        name = self.names[number]
        about = {
            "pair": list(name.pair),
            "zoo": str(self.model_zoo.path),
            "members": [self.model_zoo.member(end).sha256 for end in name.pair],
            "architecture": self.model_zoo.architecture,
            **{setting: getattr(self, setting) for setting in ("matched", "decay", "seed")},
        }
        return Curve(CurveNetwork.curve(state, name.kind).points, name.kind, about)

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Make the optimizer of the bends: SGD."""
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def identity(self) -> dict[str, Any]:
        """Return the curves and their loss."""
        settings = {name: getattr(self, name) for name in ("bends", "matched", "decay", "seed", "execution")}
        return {"curves": list(map(str, self.names)), "loss": self._loss_name, **settings}

    def member_title(self, number: int) -> str:
        """Return the name of a curve in messages."""
        return f"Curve {self.names[number]}"

    def tag(self, split: str, quantity: str, number: int) -> str:
        """Return the tag of a curve's value."""
        return f"{self.names[number]}/{split}_{quantity}"

    def score(self, metrics: dict[str, float]) -> tuple[float, ...]:  # type: ignore[override]
        """Rank a curve by its mean loss, which training minimises."""
        return (-metrics["loss"],)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Draw a point of each curve and take the gradients of its bends."""
        rows = []
        for number in self.population.numbers:
            name = self.names[number]
            source = self.step_generator(f"place on {name}", self.seed, batch_idx, per_process=False)
            place = torch.rand((), generator=source, dtype=torch.float64)
            rows.append(curve_coefficients(name.kind, self.bends + 2, place))
        self.population.set_buffer("coefficients", torch.stack(rows))
        return super().training_step(batch, batch_idx)

    # ---- evaluation

    @torch.no_grad()
    def begin_evaluation(self) -> None:
        """Make the networks at the evaluated points of all running curves."""
        super().begin_evaluation()
        places = [(place + 1) / (self.places + 1) for place in range(self.places)]
        self._points = {n: self._networks_at(n, places) for n in self.population.numbers if n not in self.stopped}

    def end_evaluation(self) -> None:
        """Drop them."""
        self._points = {}

    def _networks_at(self, number: int, places: Iterable[float]) -> list[dict[str, Tensor]]:
        """Compute parameters and buffers at points of a curve, with batch norms recomputed."""
        assert isinstance(self.dtype, torch.dtype)
        network = copied(self._runner).to(self.trainer.strategy.root_device, self.dtype)
        write, found = self.curve(number).writer(network), []
        most = int(self.trainer.fast_dev_run) or self.recalibration_batches  # type: ignore[attr-defined]
        for place in places:
            write(place)
            if batch_norms(network):
                batches = self._training_batches("measures batch norms")
                images = (self.trainer.precision_plugin.convert_input(images) for images, *_ in batches)
                try:
                    recalibrate_batch_norm(network, list(islice(images, most)))
                except NotFiniteStatisticsError:  # so the loss there is not finite either, and stops the curve
                    for parameter in network.parameters():
                        parameter.fill_(math.nan)
            tensors = (*network.named_parameters(), *network.named_buffers())
            found.append({name: tensor.detach().clone() for name, tensor in tensors})
        return found

    @property
    def _runner(self) -> Network:
        return self.member(self.pairs[0][0])

    def _run(self, tensors: dict[str, Tensor], inputs: Tensor) -> Any:
        return functional_call(self._runner, tensors, (inputs,))

    def add_evaluation(self, metric: PopulationLoss, inputs: Tensor, targets: Any) -> None:
        """Add one batch to a metric at all points of all curves, as means over points."""
        for number, points in self._points.items():
            row = torch.tensor([number], device=inputs.device)
            for tensors in points:
                metric.update(row, self._run(tensors, inputs)[None], targets)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the outputs at the points of all curves, ``[M, places, B, ...]``."""
        inputs = batch if isinstance(batch, Tensor) else batch[0]
        rows = [torch.stack([self._run(tensors, inputs) for tensors in points]) for points in self._points.values()]
        return torch.stack(rows)


def _check_ends(zoo: ModelZoo, pair: Pair, a: Network, b: Network) -> None:
    """Raise if two members can be joined by no curve, or one would say nothing."""
    first, second = map(zoo.member, pair)
    name = pair_name(pair)
    if first.data.get("fingerprint") != second.data.get("fingerprint"):
        raise ValueError(
            f"The members of pair {name} of the zoo at {zoo.path} were trained on different data, so that no loss is "
            "theirs; choose pairs of members with the same data."
        )
    if torch.equal(weight_vector(a), weight_vector(b)):
        raise ValueError(
            f"The members of pair {name} of the zoo at {zoo.path} have the same weights, so that there is nothing "
            "between them; choose pairs of different networks."
        )
