"""Matching the members of a zoo: the symmetry of one network that makes it most like another."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from lightning_sym._checks import check_different, check_integers, check_known, check_numbers
from lightning_sym._distributed import gathered, together
from lightning_sym._tags import details
from lightning_sym._text import unknown
from lightning_sym.networks import Network
from lightning_sym.population import Population
from lightning_sym.symmetry import ActivationMoments, Element, activation_matching, weight_matching
from lightning_sym.symmetry.matching.coordinate_descent import FREEDOM
from lightning_sym.symmetry.tracing.graph.capture import copied
from lightning_sym.tasks._members import Pair, PairTask, pair_name
from lightning_sym.tasks._midpoints import MidpointPopulation, element_of, element_tensors
from lightning_sym.tasks.metrics import PopulationClassification, PopulationLoss
from lightning_sym.tasks.population_interface import ByMember, Rows

T = TypeVar("T")
Method = Literal[
    "permutations",
    "blocks",
    "matrices",
    "weights",
    "activations",
    "activations_weights",
    "straight_through",
    "orbit_descent",
    "soft_maps",
]

UNMATCHED = "unmatched"
METHODS: tuple[Method, ...] = get_args(Method)
USUAL: tuple[Method, ...] = ("weights", "activations", "straight_through")
DESCENDING: tuple[Method, ...] = ("orbit_descent", "soft_maps")
TRAINED: tuple[Method, ...] = ("straight_through", *DESCENDING)
# Parts of the group for matching by weights (docs/theory/matching.md, 1.7).
PARTS: dict[Method, tuple[str, ...]] = {
    "permutations": ("permutations",),
    "blocks": ("permutations", "blocks"),
    "matrices": ("permutations", "blocks", "matrices"),
}


class MatchingTask(PairTask):
    r"""Match pairs of members of a zoo, by one or more methods, all pairs in one fit.

    For a pair ``(i, j)`` every method looks for an element :math:`\pi` of the networks' symmetry group (permutations
    of units; scales and signs where activations allow them) that makes :math:`\pi(\theta_j)` as like
    :math:`\theta_i` as it can; the function of network ``j`` stays the same.

    - ``weights``: least distance of weights, by coordinate descent over groups of units. At the start of the fit;
      no data.
    - ``activations``: largest correlation of units' activations, from moments that are added up over the first
      epoch of training batches.
    - ``straight_through``: a latent network, :math:`\hat\theta`, is trained by SGD such that the midpoint of the line
      between :math:`\theta_i` and :math:`\pi(\theta_j)` has a low loss, where :math:`\pi` matches :math:`\theta_j`
      to :math:`\hat\theta` in every step:

      .. math:: L\bigl(\tfrac12 \theta_i + \tfrac12 (\pi(\theta_j) + \hat\theta - \text{sg}(\hat\theta))\bigr).

      It begins with the element of ``weights``, keeps the scales, and changes permutations and signs. The result is
      the element with the lowest validation loss at the midpoint (training loss if there are no validation data), that
      of ``weights`` included.

    - ``permutations``, ``blocks``, ``matrices``: as ``weights``, in increasing subgroups: permutations of units; then
      permutations of blocks (heads); then matrices inside heads and phases of rotary pairs. Only ``weights`` adds
      rotations of streams.
    - ``activations_weights``: as ``weights``, starting from the element of ``activations``.
    - ``orbit_descent``: gradient descent on the midpoint's loss along the continuous part of the group: rotations of
      streams, matrices inside heads, phases of rotary pairs, scales (docs/theory/matching.md, 3.1). Permutations and
      signs do not change. It starts from the best element of the other methods, by the validation loss of the midpoint
      (from ``weights`` before the first validation). The kept element is chosen as for ``straight_through``; the two
      methods are not combined. Each step draws a point for each pair, uniform in the middle half of the linear path.
    - ``soft_maps``: **leaves the group, and so changes the function of network** ``j``. Like ``orbit_descent``, but it
      trains matrices outside the group: doubly stochastic ones for permuted units, any for streams, invertible ones
      inside heads (docs/theory/matching.md, 3.2). The loss adds the relative squared change of the outputs, averaged
      over the batch, times ``keep_function``. Barriers are those of the linear path to the changed network. Networks
      without batch norms only.

    Batch norms use the statistics of the batch at midpoints, in training and validation. Without a method that trains
    the fit ends after one epoch. The members of the population are the pairs, once for each such method; see
    :class:`lightning_sym.tasks.PopulationTask`. If the training of a pair diverges, its best element is kept.

    Args:
        zoo: The zoo's folder, with two members or more.
        pairs: Numbers of the members of each pair; the second one is matched to the first. ``"all"``: every two
            members once, the lower number first.
        methods: Some of those above; default ``"weights"``, ``"activations"``, ``"straight_through"``.
        restarts: From how many starting points weight matching is tried (the identity, then random ones); the best
            is kept. >= 1.
        scales: Whether units may be rescaled, where the activation allows it.
        signs: Whether units may change sign, where the activation allows it.
        keep_function: Weight of the change of outputs in the loss of ``soft_maps``. >= 0; 0 lets the function go.
        loss: A network's mean loss on a batch, given outputs and targets; default the cross-entropy.
        optimizer: Makes the optimizer; default SGD with learning rate 0.01 and momentum 0.9 for
            ``straight_through``, Adam with learning rate 0.003 for ``orbit_descent`` and ``soft_maps``.
        allow: Your own packages with networks of the zoo, see ``ModelZoo.open``.

    Attributes:
        pairs: The pairs; before ``setup`` they are known only if they were given.
        symmetry: The symmetry of the networks; after ``setup``.
        elements: Results by pair and method. For methods that train the best so far; for ``soft_maps`` where
            its matrices begin, see :meth:`matched`.

    Logged at the end of each epoch, on rank 0, of the midpoint between both networks of a pair:
    ``pair-0-1/<method>/midpoint_loss`` and ``.../midpoint_accuracy`` on the validation split, for ``unmatched`` too
    (nats; fractions in ``[0, 1]``, only with the default ``loss``),
    ``pair-0-1/straight_through/train_midpoint_loss``, and the means over pairs as
    ``midpoint_loss/<method>``, ``midpoint_accuracy/<method>``, ``train_midpoint_loss/straight_through``; in training of
    ``orbit_descent`` and ``soft_maps`` at the places that were drawn.

    A checkpoint holds latent networks, elements, moments and the sums of the epoch.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Ainsworth, Hayase, Srinivasa (2023), "Git Re-Basin: Merging Models modulo Permutation Symmetries",
        arXiv:2209.04836: the three methods. They keep the element with the lowest loss of a training batch, and have
        neither scales nor signs. Matching activations by correlation is from Li et al. (2016), arXiv:1511.07543.
    """

    population: MidpointPopulation

    def __init__(
        self,
        zoo: str,
        pairs: Literal["all"] | list[list[int]] = "all",
        methods: Sequence[Method] | None = None,
        restarts: int = 1,
        scales: bool = True,
        signs: bool = True,
        keep_function: float = 1.0,
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        allow: Sequence[str] | None = None,
    ) -> None:
        methods = USUAL if methods is None else methods
        if optimizer is None and set(methods) & set(DESCENDING):  # coordinates have several units
            optimizer = partial(torch.optim.Adam, lr=0.003)
        super().__init__(zoo, pairs, allow, loss=loss, optimizer=optimizer)
        for method in [methods] if isinstance(methods, str) else methods:
            check_known("method", method, METHODS)
        check_different("methods", methods, METHODS)
        if "straight_through" in methods and set(methods) & set(DESCENDING):
            raise ValueError(
                "methods may hold straight_through or orbit_descent and soft_maps, not both: their optimizers differ; "
                "fit twice."
            )
        check_integers(restarts=restarts)
        check_numbers(">= 0", keep_function=keep_function)
        self.methods: tuple[Method, ...] = tuple(method for method in METHODS if method in methods)
        self.restarts = restarts
        self.scales = scales
        self.signs = signs
        self.keep_function = keep_function
        self.save_hyperparameters(ignore=["optimizer", "loss"])
        self.save_hyperparameters({name: self.describe()[name] for name in ("_class_path", "loss_name")})

        self.elements: dict[Pair, dict[str, Element]] = {}
        self._start: dict[int, Element] = {}  # where the training of each member begins
        self._moments: dict[Pair, ActivationMoments] | None = None
        self._midpoints: dict[int, dict[str, Tensor]] = {}  # by row of the metric

    # ---- the zoo

    @property
    def trained(self) -> tuple[Method, ...]:
        """The methods that train."""
        return tuple(method for method in self.methods if method in TRAINED)

    def matched(self, pair: Pair, method: str) -> Network:
        """Return the second network of a pair as a method has moved it; of ``"unmatched"`` a copy of itself.

        For ``"soft_maps"`` it computes another function.

        Raises:
            ValueError: If the method was not run (or not yet).
        """
        found = self.elements.get(pair, {})
        if method != UNMATCHED and method not in found:
            raise ValueError(f"Pair {pair} has no element for {unknown('method', method, [UNMATCHED, *found])}")
        network = self._moved(pair, found.get(method))
        for number, trained in enumerate(self.trainings):
            if trained == (pair, method) and number in self.kept:
                self.population.trained(number).give(network, self.kept[number]["state"])
        return network

    def _moved(self, pair: Pair, element: Element | None) -> Network:
        second = self.member(pair[1])
        moved = copied(second) if element is None else self.symmetry.act(element, second)
        assert isinstance(moved, Network)
        return moved

    def build(self) -> None:
        """Open the zoo, load the members and find their symmetry."""
        self.open_pairs("Matching")
        for network in self._members.values():
            network.requires_grad_(False)
        _ = self.symmetry  # now, as Lightning makes members on its own device

    # ---- pairs as members

    @property
    def trainings(self) -> list[tuple[Pair, Method | None]]:
        """Pair and method of each member, by number; None without a method."""
        return [(pair, method) for method in self.trained or (None,) for pair in self.pairs]

    @property
    def numbers(self) -> list[int]:
        """The places of the members."""
        return list(range(len(self.trainings)))

    def make_population(self, numbers: list[int]) -> Population:
        """Return the pairs, as often as there are methods that train them, as a population."""
        ends = [(self.member(first), self.member(second), method) for (first, second), method in self.trainings]
        return MidpointPopulation(self.symmetry, ends, keep_function=self.keep_function)

    def make_metric(self, split: str) -> PopulationLoss:
        """Make the metric: losses of pairs in training; otherwise of all evaluated networks, with accuracies."""
        if split == "train":
            return PopulationLoss(len(self.numbers))
        rows = len(self.pairs) * len(self._variants)
        return PopulationClassification(rows) if self.classifies else PopulationLoss(rows, self.loss)

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Make the optimizer of the latent networks: SGD."""
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def identity(self) -> dict[str, Any]:
        """Return the pairs, the methods, the architecture, and the loss if it is no cross-entropy."""
        pairs = [list(pair) for pair in self.pairs]
        found = {"pairs": pairs, "methods": list(self.methods), "symmetry": self.symmetry.fingerprint}
        return found if self.classifies else {**found, "loss": self._loss_name}

    def member_title(self, number: int) -> str:
        """Return the name of a pair in messages."""
        pair, method = self.trainings[number]
        return f"Pair {pair_name(pair)}" + (f" by {method}" if len(self.trained) > 1 else "")

    def score(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Rank an element by the loss of the midpoint."""
        return (-metrics["loss"],)

    def to_device(self, device: torch.device) -> None:
        """Move all networks."""
        super().to_device(device)
        assert isinstance(self.dtype, torch.dtype)
        self.population.move_frozen(device, self.dtype)

    # ---- matching

    def _shared_out(self, work: Callable[[int], T], numbers: Sequence[int], title: str | None = None) -> dict[int, T]:
        """Do something for pairs, each on one process, and return all results on every process.

        Args:
            work: Its results must not depend on the process.
            numbers: The pairs' numbers.
            title: Title of the progress bar; None for none.
        """
        own: Iterable[int] = numbers[self.trainer.global_rank :: self.trainer.world_size]
        if title and self.trainer.is_global_zero and self.trainer.progress_bar_callback is not None:
            own = track(own, description=title, transient=True)
        mine: dict[int, T] = {}
        together(lambda: mine.update((number, work(number)) for number in own))
        return dict(sorted((number, result) for part in gathered(mine) for number, result in part.items()))

    def on_fit_start(self) -> None:
        """Match weights; a resumed run has the results in its checkpoint."""
        super().on_fit_start()
        self.to_device(self.device)
        if not self.elements:
            by_weights = [method for method in self.methods if method in PARTS]
            if set(self.methods) & {"weights", *TRAINED}:
                by_weights.append("weights")

            def match(place: int) -> dict[str, Element]:
                return {method: self._match_weights(self.pairs[place], method) for method in by_weights}

            places = range(len(self.pairs)) if by_weights else []
            found = self._shared_out(match, places, "matching weights")
            self.elements = {pair: found.get(place, {}) for place, pair in enumerate(self.pairs)}
            for number, (pair, method) in enumerate(self.trainings):
                if method is not None:
                    self.elements[pair][method] = self._start[number] = self.elements[pair]["weights"]
            if self.by_activations:
                self._moments = {pair: self._new_moments(pair) for pair in self.pairs}
        self.population.started = {
            number: self._moved(self.trainings[number][0], start) for number, start in self._start.items()
        }

    @property
    def _options(self) -> dict[str, Any]:
        return {"signs": self.signs}

    def _match_weights(self, pair: Pair, method: Method) -> Element:
        a, b = map(self.member, pair)
        freedom = PARTS.get(method, FREEDOM)
        return weight_matching(
            self.symmetry, a, b, restarts=self.restarts, scales=self.scales, freedom=freedom, **self._options
        ).element

    def _match_latent(self, number: int) -> Element:
        """Match the second network to the latent one, from where the step before left off."""
        latent, step = self.population.latent_network(number), self.population.steps[number]
        if not parameters_to_vector(latent.parameters()).isfinite().all():
            return step  # its loss is not finite either, and stops it
        return weight_matching(
            self.symmetry, latent, self.population.started[number], initial=step, scales=False, **self._options
        ).element

    def _new_moments(self, pair: Pair) -> ActivationMoments:
        a, b = map(self.member, pair)
        return ActivationMoments(self.symmetry, a, b)

    @property
    def by_activations(self) -> bool:
        """Whether a method matches by activations."""
        return bool({*self.methods} & {"activations", "activations_weights"})

    def _match_activations(self) -> None:
        if self._moments is None:
            return
        moments, self._moments = self._moments, None
        for own in moments.values():
            own.reduce()

        def match(place: int) -> dict[str, Element]:
            pair = self.pairs[place]
            options = {"scales": self.scales, **self._options}
            a, b = map(self.member, pair)
            found = {"activations": activation_matching(self.symmetry, a, b, moments[pair], **options).element}
            if "activations_weights" in self.methods:
                more = weight_matching(self.symmetry, a, b, initial=found["activations"], **options)
                found["activations_weights"] = more.element
            return found

        for place, found in self._shared_out(match, range(len(self.pairs))).items():
            self.elements[self.pairs[place]] |= found

    # ---- training

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Add up activations in the first epoch; take the latent networks' gradients."""
        with torch.no_grad():
            for moments in (self._moments or {}).values():
                moments.update(batch[0])
            self.population.settle()
            if "straight_through" in self.trained:
                skipped = self.skipped
                running = [number for number in self.numbers if number not in skipped]
                with torch.autocast(self.device.type, enabled=False):
                    self.population.steps |= self._shared_out(self._match_latent, running)
        for number, (pair, method) in enumerate(self.trainings):
            if method in DESCENDING:
                source = self.step_generator(f"place {method} {pair[1]}", pair[0], batch_idx, per_process=False)
                self.population.places[number] = 0.25 + 0.5 * float(torch.rand((), generator=source))
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then project doubly stochastic matrices: after real steps only."""
        super().optimizer_step(*args, **kwargs)
        self.population.project()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Match activations when the first epoch's batches have been seen, before its validation."""
        if self.trainer.is_last_batch:
            self._match_activations()

    def on_train_epoch_end(self) -> None:
        """Log training losses; end the fit where nothing is trained."""
        self._match_activations()  # if max_steps ended the epoch
        super().on_train_epoch_end()
        if not self.trained:
            self.trainer.should_stop = True

    def keep_weights(self, values: Mapping[str, list[float]]) -> None:
        """Keep the elements with the best midpoint so far, by the training loss without validation."""
        if not self.trained:
            return
        before = set(self.kept)
        super().keep_weights(values or {"loss": self.history["train/loss"][-1]})
        for number, record in self.kept.items():
            pair, method = self.trainings[number]
            if number not in before:  # the start also counts
                self._keep_start(number, values)
            if method is not None:
                step = element_of(self.symmetry, record["state"])
                self.elements[pair][method] = self.symmetry.compose(step, self._start[number])

    def _keep_start(self, number: int, values: Mapping[str, list[float]]) -> None:
        """Keep the result of weight matching if it is better than training's; descend from the best of all."""
        (pair, method), record = self.trainings[number], self.kept[number]
        descends = method in DESCENDING
        others = [v for v in self._variants if v == "weights" or (descends and v not in TRAINED)]
        places = {v: self._row(v, self.pairs.index(pair)) for v in others}
        found = {v: {name: row[place] for name, row in values.items()} for v, place in places.items() if values}
        found = {v: metrics for v, metrics in found.items() if v == UNMATCHED or v in self.elements[pair]}
        best = max(found, key=lambda variant: self.score(found[variant]), default=None)
        if best is None or self.score(found[best]) < self.score(record["metrics"]):
            return
        unchanged = self.population.trained(number).unchanged() | element_tensors(self.symmetry.identity())
        record |= {"metrics": found[best], "state": record["state"] | unchanged}
        if descends and best != "weights":
            self._start[number] = self.symmetry.identity() if best == UNMATCHED else self.elements[pair][best]
            self.population.started[number] = self._moved(pair, self._start[number])
            self.population.set_member_state(number, record["state"])
            for parameter in self.population.member_parameters(number):
                for optimizer in self.trainer.optimizers:
                    optimizer.state.pop(parameter, None)

    # ---- midpoints

    @property
    def _variants(self) -> list[str]:
        """The evaluated pairs and methods: first those that train; weight matching also as their start."""
        known = {UNMATCHED, *self.methods, *(["weights"] if self.trained else [])}
        return [variant for variant in (*TRAINED, UNMATCHED, *METHODS[: -len(TRAINED)]) if variant in known]

    def _row(self, variant: str, place: int) -> int:
        """Return the place in the metric of a variant of a pair, given the pair's place."""
        return self._variants.index(variant) * len(self.pairs) + place

    @torch.no_grad()
    def begin_evaluation(self) -> None:
        """Make the midpoints."""
        super().begin_evaluation()
        self.population.settle()
        self.to_device(self.trainer.strategy.root_device)
        for place, pair in enumerate(self.pairs):
            others: dict[str, Element | None] = {UNMATCHED: None, **self.elements.get(pair, {})}
            for variant, element in others.items():
                if variant in self._variants and variant not in TRAINED:
                    self._add_midpoint(self._row(variant, place), place, self._moved(pair, element))
        for number in self._start:
            if number not in self.stopped:
                element = self.symmetry.compose(self.population.steps[number], self._start[number])
                moved = self._moved(self.trainings[number][0], element)
                self.population.trained(number).give(moved)
                self._add_midpoint(number, number, moved)

    def _add_midpoint(self, row: int, number: int, moved: Network) -> None:
        self._midpoints[row] = self.population.between(number, dict(moved.named_parameters()))

    def end_evaluation(self) -> None:
        """Drop the midpoints."""
        self._midpoints = {}

    def add_evaluation(self, metric: PopulationLoss, inputs: Tensor, targets: Any) -> None:
        """Add one batch to a metric, of all midpoints."""
        for row, weights in self._midpoints.items():
            rows = torch.tensor([row], device=inputs.device)
            metric.update(rows, self.population.run_between(weights, inputs)[None], targets)

    @property
    def shown(self) -> str:
        """The mean over the trained pairs."""
        return f"midpoint_loss/{(*self.trained, self.methods[-1])[0]}"

    def each(self, split: str, running: ByMember, values: Rows) -> dict[str, float]:
        """Return nothing: single pairs are in the summary."""
        return {}

    def summary(self, split: str, running: ByMember, values: Rows) -> dict[str, float]:
        """Return the means over pairs by method, and as details the values of all pairs."""
        found: dict[str, float] = {}
        for quantity, row in values.items():
            name = f"midpoint_{quantity}" if split == "val" else f"{split}_midpoint_{quantity}"
            for first in range(0, len(row), len(self.pairs)):
                variant = self._variants[first // len(self.pairs)]
                pairs = {
                    pair: value for pair, value in zip(self.pairs, row[first:], strict=False) if math.isfinite(value)
                }
                if pairs and variant in (UNMATCHED, *self.methods):
                    found |= details({f"pair-{pair_name(pair)}/{variant}/{name}": v for pair, v in pairs.items()})
                    found[f"{name}/{variant}"] = math.fsum(pairs.values()) / len(pairs)
        return found

    # ---- checkpoints

    def member_records(self) -> dict[int, Any]:
        """Return the state of training, by the pair's number."""
        return {number: vars(step) for number, step in self.population.steps.items()}

    def load_member_records(self, records: Mapping[int, Any]) -> None:
        """Take it back."""
        self.population.steps = {number: Element(**step) for number, step in records.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the results of all ranks; to be called on every rank, as Lightning does."""
        super().on_save_checkpoint(checkpoint)
        moments: dict[Pair, Any] = {}
        for pair, found in (self._moments or {}).items():
            total = self._new_moments(pair)
            total.load_state_dict(found.state_dict())
            total.reduce()
            moments[pair] = total.state_dict()
        checkpoint["population"] |= {
            "elements": {
                pair: {method: vars(element) for method, element in found.items()}
                for pair, found in self.elements.items()
            },
            "start": {number: vars(element) for number, element in self._start.items()},
            "moments": moments,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the results.

        Raises:
            ValueError: If the checkpoint is of another task, of other pairs or methods, or of other networks.
        """
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint["population"]
        self.elements = {
            pair: {method: Element(**element) for method, element in found.items()}
            for pair, found in saved["elements"].items()
        }
        self._start = {number: Element(**element) for number, element in saved["start"].items()}
        self._moments = {pair: self._new_moments(pair) for pair in saved["moments"]} or None
        if self._trainer is None or self.trainer.is_global_zero:  # sums over ranks now belong to one rank
            for pair, moments in (self._moments or {}).items():
                moments.load_state_dict(saved["moments"][pair])
