"""Matching the members of a zoo: the symmetry of one network that makes it most like another."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any, Literal, TypeVar, get_args

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from lightning_sym._checks import check_integers
from lightning_sym._distributed import gathered, together
from lightning_sym._tags import details
from lightning_sym._text import unknown
from lightning_sym.networks import Network
from lightning_sym.population import LoopPopulation, Population
from lightning_sym.symmetry import (
    ActivationMoments,
    Element,
    Symmetry,
    activation_matching,
    trace_symmetry,
    weight_matching,
)
from lightning_sym.symmetry.matching.coordinate_descent import FREEDOM
from lightning_sym.symmetry.matching.directions import OrbitDirections
from lightning_sym.tasks._members import (
    Pair,
    ZooUserTask,
    check_pairs,
    example_input,
    pair_name,
    require_members,
    require_two,
)
from lightning_sym.tasks.metrics import PopulationClassification, PopulationLoss
from lightning_sym.zoo import ModelZoo

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
]

UNMATCHED = "unmatched"
METHODS: tuple[Method, ...] = get_args(Method)
USUAL: tuple[Method, ...] = ("weights", "activations", "straight_through")
TRAINED: tuple[Method, ...] = ("straight_through", "orbit_descent")
# Matching by weights within a part of the group: what it may do (docs/theory/matching.md, 1.7).
PARTS: dict[Method, tuple[str, ...]] = {
    "permutations": ("permutations",),
    "blocks": ("permutations", "blocks"),
    "matrices": ("permutations", "blocks", "matrices"),
}


class Coordinates(nn.Module):
    """Coordinates of the group near the identity, as parameters; 0 between steps."""

    def __init__(self, directions: OrbitDirections) -> None:
        super().__init__()
        zeros = {name: nn.Parameter(torch.zeros(shape)) for name, shape in directions.shapes.items()}
        self.values = nn.ParameterDict(zeros)


class _Along(torch.autograd.Function):
    """Weights as they are, whose gradient goes to the coordinates of the group."""

    @staticmethod
    def forward(ctx: Any, directions: OrbitDirections, weights: dict[str, Tensor], *coordinates: Tensor) -> Any:
        ctx.directions, ctx.weights, ctx.like = directions, weights, coordinates
        return tuple(tensor.detach().clone() for tensor in weights.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        found = ctx.directions.pulled_back(ctx.weights, dict(zip(ctx.weights, gradients, strict=True)))
        return None, None, *(own.to(like) for own, like in zip(found.values(), ctx.like, strict=True))


class MidpointPopulation(LoopPopulation):
    """Pairs of networks as the members of a population: a member runs the midpoint of its pair.

    What is registered, and trained, is the latent network of each pair, or coordinates of the group; see
    :class:`MatchingTask`.

    Args:
        symmetry: That of all networks.
        pairs: The networks of each pair; a member's number is the place of its pair.
        trained: By which method, ``"straight_through"`` or ``"orbit_descent"``; None if nothing is trained.

    Attributes:
        started: By number, the second network as the start has moved it.
        steps: By number, the element that has moved it on from there by now.
    """

    def __init__(self, symmetry: Symmetry, pairs: Sequence[tuple[Network, Network]], *, trained: Method | None) -> None:
        directions = OrbitDirections(symmetry) if trained == "orbit_descent" else None

        def latent(number: int) -> nn.Module:
            if directions is not None:
                return Coordinates(directions)
            return copy.deepcopy(pairs[number][0]).requires_grad_() if trained else nn.Identity()

        super().__init__(latent, range(len(pairs)))
        self.symmetry = symmetry
        self.directions = directions
        self.started: dict[int, nn.Module] = {}
        with torch.device("cpu"):  # where elements are; Lightning makes populations on its own device
            self.steps = dict.fromkeys(self.numbers, symmetry.identity())
        self._frozen = tuple(pairs), _batch_statistics(copy.deepcopy(pairs[0][0]))  # in a tuple: not registered

    def latent(self, number: int) -> nn.Module:
        """Return the latent network of a pair."""
        return self._member(number)

    @torch.no_grad()
    def absorb(self) -> None:
        """Let the elements take up what steps have changed of coordinates, which are 0 again."""
        if self.directions is None:
            return
        for number in self.numbers:
            values: Any = self._member(number).values
            if all(bool(own.isfinite().all()) for own in values.values()):
                self.steps[number] = self.symmetry.compose(self.directions.element(values), self.steps[number])
            for own in values.values():
                own.zero_()

    def move_frozen(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the networks that are not registered."""
        pairs, runner = self._frozen
        for network in (runner, *(network for pair in pairs for network in pair)):
            network.to(device=device, dtype=dtype)

    def run_member(self, number: int, prepared: Any) -> Tensor:
        """Return the logits of a pair's midpoint: its value is of the matched network, its gradient of the latent."""
        moved = dict(self.symmetry.act(self.steps[number], self.started[number]).named_parameters())
        if self.directions is not None:
            values: Any = self._member(number).values
            given = (values[name] for name in self.directions.shapes)
            ends = dict(zip(moved, _Along.apply(self.directions, moved, *given), strict=True))  # type: ignore[no-untyped-call]
        else:
            latent = dict(self.latent(number).named_parameters())
            ends = {name: value + latent[name] - latent[name].detach() for name, value in moved.items()}
        return self.run_midpoint(self.midpoint(number, ends), prepared)

    def midpoint(self, number: int, ends: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights halfway between the first network of a pair and other weights."""
        return {name: 0.5 * (a + ends[name]) for name, a in self._frozen[0][number][0].named_parameters()}

    def run_midpoint(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the logits of given weights; batch norms use the batch."""
        runner = self._frozen[1]
        # Copies, as batch norms write their statistics.
        buffers = {name: buffer.clone() for name, buffer in runner.named_buffers()}
        logits: Tensor = functional_call(runner, {**buffers, **weights}, (images,))
        return logits

    def member_state(self, number: int) -> dict[str, Tensor]:
        """Return a copy of a pair's latent network, and the tensors of its element."""
        return super().member_state(number) | _tensors(self.steps[number])

    def set_member_state(self, number: int, state: Mapping[str, Tensor]) -> None:
        """Give a pair another latent network and another element."""
        self.steps[number] = _element(self.symmetry, state)
        super().set_member_state(number, {name: value for name, value in state.items() if not name.startswith(_PREFIX)})


class MatchingTask(ZooUserTask):
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

      It begins where ``weights`` ends, whose scales it keeps, and changes permutations and signs from there. The
      element is kept whose midpoint has the lowest validation loss (training loss if there are no validation data),
      that of ``weights`` included.

    - ``permutations``, ``blocks``, ``matrices``: as ``weights``, but in a part of the group, each larger than the one
      before: permutations of units; blocks (heads) that change places, too; matrices inside heads and phases of planes,
      too. What is left to ``weights`` are the rotations of streams.
    - ``activations_weights``: as ``weights``, from where ``activations`` ends.
    - ``orbit_descent``: from the best of all others that are there, by the validation loss of the midpoint (by weights,
      until these are), the gradient of the midpoint's loss moves the element along the continuous part of the group:
      rotations of streams, matrices inside heads, phases of planes, scales (docs/theory/matching.md, 3.1). Permutations
      and signs stay as they are. What is kept is as for ``straight_through``, beside which it is not run.

    Batch norms use the statistics of the batch at midpoints, in training and validation. Without
    ``straight_through`` or ``orbit_descent`` the fit ends after one epoch. Pairs are the members of a population: what
    holds for all is said at :class:`lightning_sym.tasks.PopulationTask`; of a pair whose training diverges the best
    element by then is kept.

    Args:
        zoo: The zoo's folder, with two members or more.
        pairs: Numbers of the members of each pair; the second one is matched to the first. ``"all"``: every two
            members once, the lower number first.
        methods: Some of those above; default ``"weights"``, ``"activations"``, ``"straight_through"``.
        restarts: From how many starting points weight matching is tried (the identity, then random ones); the best
            is kept. >= 1.
        matching_seed: Seed of the orders and starting points in weight matching. >= 0.
        scales: Whether units may be rescaled, where the activation allows it.
        signs: Whether units may change sign, where the activation allows it.
        loss: A network's mean loss on a batch, given outputs and targets; default the cross-entropy.
        optimizer: Makes the optimizer of the latent networks, or of ``orbit_descent``; default SGD with learning rate
            0.01 and momentum 0.9, for ``orbit_descent`` Adam with learning rate 0.003.
        allow: Packages of your own whose networks the zoo may hold, see ``ModelZoo.open``.

    Attributes:
        pairs: The pairs; before ``setup`` they are known only if they were given.
        symmetry: The symmetry of the networks; after ``setup``.
        elements: What was found: by pair and method. For ``straight_through`` the best so far.

    Logged at the end of each epoch, on rank 0, of the midpoint between both networks of a pair:
    ``pair-0-1/<method>/midpoint_loss`` and ``.../midpoint_accuracy`` on the validation split, for ``unmatched`` too
    (nats; fractions in ``[0, 1]``, not with a ``loss`` of your own),
    ``pair-0-1/straight_through/train_midpoint_loss``, and the means over pairs as
    ``midpoint_loss/<method>``, ``midpoint_accuracy/<method>``, ``train_midpoint_loss/straight_through``.

    A checkpoint holds latent networks, elements, moments and what has been added up in the epoch.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Ainsworth, Hayase, Srinivasa (2023), "Git Re-Basin: Merging Models modulo Permutation Symmetries",
        arXiv:2209.04836: the three methods. They keep the element with the lowest loss of a training batch, and have
        neither scales nor signs. Matching activations by correlation is from Li et al. (2016), arXiv:1511.07543.
    """

    population: MidpointPopulation
    symmetry: Symmetry

    def __init__(
        self,
        zoo: str,
        pairs: Literal["all"] | list[list[int]] = "all",
        methods: Sequence[Method] | None = None,
        restarts: int = 1,
        matching_seed: int = 0,
        scales: bool = True,
        signs: bool = True,
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        allow: Sequence[str] | None = None,
    ) -> None:
        methods = USUAL if methods is None else methods
        if optimizer is None and "orbit_descent" in methods:  # coordinates have several units
            optimizer = partial(torch.optim.Adam, lr=0.003)
        super().__init__(loss=loss, optimizer=optimizer)
        for method in [methods] if isinstance(methods, str) else methods:
            if method not in METHODS:
                raise ValueError(unknown("method", method, METHODS))
        if isinstance(methods, str) or not methods or len(set(methods)) < len(methods):
            raise ValueError(f"methods must be a list of different ones of {', '.join(METHODS)}, got {methods!r}.")
        if set(TRAINED) <= set(methods):
            raise ValueError(
                "methods may hold straight_through or orbit_descent, not both: a pair is trained in one way; fit twice."
            )
        check_integers(restarts=restarts)
        check_integers(0, matching_seed=matching_seed)
        self.pairs = [] if pairs == "all" else check_pairs(pairs)
        self.zoo = str(zoo)
        self.methods: tuple[Method, ...] = tuple(method for method in METHODS if method in methods)
        self.restarts = restarts
        self.matching_seed = matching_seed
        self.scales = scales
        self.signs = signs
        self.allow = tuple(allow or ())
        self.save_hyperparameters(ignore=["optimizer", "loss"])
        self.save_hyperparameters({name: self.describe()[name] for name in ("_class_path", "loss_name")})

        self.elements: dict[Pair, dict[str, Element]] = {}
        self._start: dict[Pair, Element] = {}  # where training begins
        self._moments: dict[Pair, ActivationMoments] | None = None
        self._midpoints: dict[tuple[int, str], dict[str, Tensor]] = {}
        self._members: dict[int, Network] = {}
        self._opened: ModelZoo | None = None

    # ---- the zoo

    @property
    def trained(self) -> Method | None:
        """The method by which something is trained, if any is."""
        return next((method for method in self.methods if method in TRAINED), None)

    @property
    def model_zoo(self) -> ModelZoo:
        """The zoo, opened; after ``setup``."""
        assert self._opened is not None
        return self._opened

    def member(self, number: int) -> Network:
        """Return a member, in evaluation mode and without gradients; it is shared, so do not change it."""
        return self._members[number]

    def matched(self, pair: Pair, method: str) -> Network:
        """Return the second network of a pair as a method has moved it; of ``"unmatched"`` a copy of itself.

        Raises:
            ValueError: If the method was not run (or not yet).
        """
        found = self.elements.get(pair, {})
        if method != UNMATCHED and method not in found:
            raise ValueError(f"Pair {pair} has no element for {unknown('method', method, [UNMATCHED, *found])}")
        return self._moved(pair, found.get(method))

    def _moved(self, pair: Pair, element: Element | None) -> Network:
        second = self.member(pair[1])
        moved = copy.deepcopy(second) if element is None else self.symmetry.act(element, second)
        assert isinstance(moved, Network)
        return moved

    @property
    def zoos(self) -> dict[str, tuple[ModelZoo, int]]:
        """The zoo, with the number of one member; after ``setup``."""
        return {"zoo": (self.model_zoo, self.pairs[0][0])}

    def build(self) -> None:
        """Open the zoo, load the members and find their symmetry."""
        zoo = ModelZoo.open(self.zoo, allow=self.allow)
        require_two(zoo, "Matching")
        self.pairs = self.pairs or list(combinations(zoo.numbers, 2))
        require_members(zoo, chain.from_iterable(self.pairs))
        members = {number: zoo.load(number) for number in sorted({number for pair in self.pairs for number in pair})}
        for network in members.values():
            network.requires_grad_(False)
        first = members[self.pairs[0][0]]
        self.symmetry = trace_symmetry(
            first, example_input(zoo, self.pairs[0][0], first, getattr(self._trainer, "datamodule", None))
        )
        self._opened, self._members = zoo, members

    # ---- pairs as members

    @property
    def numbers(self) -> list[int]:
        """The places of the pairs."""
        return list(range(len(self.pairs)))

    def make_population(self, numbers: list[int]) -> Population:
        """Return the pairs as a population."""
        networks = [(self.member(first), self.member(second)) for first, second in self.pairs]
        return MidpointPopulation(self.symmetry, networks, trained=self.trained)

    def make_metric(self, split: str) -> PopulationLoss:
        """Return what adds up: in training the losses of pairs; else of all that is evaluated, with accuracies."""
        if split == "train":
            return PopulationLoss(len(self.pairs))
        rows = len(self.pairs) * len(self._variants)
        return PopulationClassification(rows) if self.classifies else PopulationLoss(rows, self.loss)

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Make the optimizer of the latent networks: SGD."""
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def identity(self) -> dict[str, Any]:
        """Return the pairs, the methods, what tells architectures apart, and the loss if it is no cross-entropy."""
        pairs = [list(pair) for pair in self.pairs]
        found = {"pairs": pairs, "methods": list(self.methods), "symmetry": self.symmetry.fingerprint}
        return found if self.classifies else {**found, "loss": self._loss_name}

    def member_title(self, number: int) -> str:
        """Return how messages call a pair."""
        return f"Pair {pair_name(self.pairs[number])}"

    def score(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return what says how good an element is: the loss of the midpoint."""
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
            work: What it returns for a pair's number must not depend on the process.
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
        """Match weights; a run that goes on has what it found in its checkpoint."""
        super().on_fit_start()
        self.to_device(self.device)
        if not self.elements:
            self.elements = {pair: {} for pair in self.pairs}
            by_weights = [method for method in self.methods if method in PARTS]
            if set(self.methods) & {"weights", *TRAINED}:
                by_weights.append("weights")

            def match(number: int) -> dict[str, Element]:
                return {method: self._match_weights(number, method) for method in by_weights}

            numbers = self.numbers if by_weights else []
            for number, found in self._shared_out(match, numbers, "matching weights").items():
                pair = self.pairs[number]
                self.elements[pair] |= found
                if self.trained:
                    self.elements[pair][self.trained] = self._start[pair] = found["weights"]
            if set(self.methods) & {"activations", "activations_weights"}:
                self._moments = {pair: self._new_moments(pair) for pair in self.pairs}
        self.population.started = {
            number: self._moved(pair, self._start[pair]) for number, pair in enumerate(self.pairs) if self._start
        }

    @property
    def _options(self) -> dict[str, Any]:
        return {"signs": self.signs, "seed": self.matching_seed}

    def _match_weights(self, number: int, method: Method) -> Element:
        a, b = map(self.member, self.pairs[number])
        freedom = PARTS.get(method, FREEDOM)
        return weight_matching(
            self.symmetry, a, b, restarts=self.restarts, scales=self.scales, freedom=freedom, **self._options
        ).element

    def _match_latent(self, number: int) -> Element:
        """Match the second network to the latent one, from where the step before left off."""
        latent, step = self.population.latent(number), self.population.steps[number]
        if not parameters_to_vector(latent.parameters()).isfinite().all():
            return step  # its loss is not finite either, and stops it
        return weight_matching(
            self.symmetry, latent, self.population.started[number], initial=step, scales=False, **self._options
        ).element

    def _element_now(self, number: int) -> Element:
        """Return the element that is trained as it is by now."""
        return self.symmetry.compose(self.population.steps[number], self._start[self.pairs[number]])

    def _new_moments(self, pair: Pair) -> ActivationMoments:
        a, b = map(self.member, pair)
        return ActivationMoments(self.symmetry, a, b)

    def _match_activations(self) -> None:
        if self._moments is None:
            return
        moments, self._moments = self._moments, None
        for own in moments.values():
            own.reduce()

        def match(number: int) -> dict[str, Element]:
            pair = self.pairs[number]
            options = {"scales": self.scales, **self._options}
            a, b = map(self.member, pair)
            found = {"activations": activation_matching(self.symmetry, a, b, moments[pair], **options).element}
            if "activations_weights" in self.methods:
                more = weight_matching(self.symmetry, a, b, initial=found["activations"], **options)
                found["activations_weights"] = more.element
            return found

        for number, found in self._shared_out(match, self.numbers).items():
            self.elements[self.pairs[number]] |= found

    # ---- training

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Add up activations in the first epoch; take the latent networks' gradients."""
        with torch.no_grad():
            for moments in (self._moments or {}).values():
                moments.update(batch[0])
            self.population.absorb()
            if self.trained == "straight_through":
                running = [number for number in self.numbers if number not in self.skipped]
                with torch.autocast(self.device.type, enabled=False):
                    self.population.steps |= self._shared_out(self._match_latent, running)
        return super().training_step(batch, batch_idx)

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

    def _keep(self, values: Mapping[str, list[float]]) -> None:
        """Keep the elements whose midpoint is the best so far; without validation by the training loss."""
        if self.trained is None:
            return
        before = set(self.kept)
        super()._keep(values or {"loss": self.history["train/loss"][-1]})
        for number, record in self.kept.items():
            pair = self.pairs[number]
            if number not in before:  # where it begins counts, too
                self._keep_start(number, values)
            step = _element(self.symmetry, record["state"])
            self.elements[pair][self.trained] = self.symmetry.compose(step, self._start[pair])

    def _keep_start(self, number: int, values: Mapping[str, list[float]]) -> None:
        """Keep what weight matching found if it is better than what was trained; descend from the best of all."""
        pair, record = self.pairs[number], self.kept[number]
        others = [v for v in self._variants if v == "weights" or (self.trained == "orbit_descent" and v not in TRAINED)]
        found = {v: {name: row[self._row(v, number)] for name, row in values.items()} for v in others if values}
        found = {v: metrics for v, metrics in found.items() if v == UNMATCHED or v in self.elements[pair]}
        best = max(found, key=lambda variant: self.score(found[variant]), default=None)
        if best is None or self.score(found[best]) < self.score(record["metrics"]):
            return
        record |= {"metrics": found[best], "state": record["state"] | _tensors(self.symmetry.identity())}
        if self.trained == "orbit_descent" and best != "weights":
            self._start[pair] = self.symmetry.identity() if best == UNMATCHED else self.elements[pair][best]
            self.population.started[number] = self._moved(pair, self._start[pair])
            self.population.steps[number] = self.symmetry.identity()
            for parameter in self.population.member_parameters(number):
                for optimizer in self.trainer.optimizers:
                    optimizer.state.pop(parameter, None)

    # ---- midpoints

    @property
    def _variants(self) -> list[str]:
        """What is evaluated: first what is trained; weight matching also where it is only the start of that."""
        known = {UNMATCHED, *self.methods, *(["weights"] if self.trained else [])}
        return [variant for variant in (*TRAINED, UNMATCHED, *METHODS[: -len(TRAINED)]) if variant in known]

    def _row(self, variant: str, number: int) -> int:
        """Return the place of a variant of a pair in the metric."""
        return self._variants.index(variant) * len(self.pairs) + number

    def _evaluated(self, number: int) -> dict[str, Element | None]:
        """Return the elements to evaluate now, by variant; None moves nothing."""
        pair = self.pairs[number]
        found: dict[str, Element | None] = {UNMATCHED: None, **self.elements.get(pair, {})}
        if self.trained and pair in self._start:
            found[self.trained] = self._element_now(number)
            if number in self.stopped:
                del found[self.trained]
        return {variant: element for variant, element in found.items() if variant in self._variants}

    @torch.no_grad()
    def begin_evaluation(self) -> None:
        """Make the midpoints."""
        super().begin_evaluation()
        self.population.absorb()
        self.to_device(self.trainer.strategy.root_device)
        for number, pair in enumerate(self.pairs):
            for variant, element in self._evaluated(number).items():
                ends = dict(self._moved(pair, element).named_parameters())
                self._midpoints[number, variant] = self.population.midpoint(number, ends)

    def end_evaluation(self) -> None:
        """Drop the midpoints."""
        self._midpoints = {}

    def add_evaluation(self, metric: PopulationLoss, inputs: Tensor, targets: Any) -> None:
        """Add one batch to a metric, of all midpoints."""
        for (number, variant), weights in self._midpoints.items():
            rows = torch.tensor([self._row(variant, number)], device=inputs.device)
            metric.update(rows, self.population.run_midpoint(weights, inputs)[None], targets)

    @property
    def shown(self) -> str:
        """The mean over pairs of what is trained."""
        return f"midpoint_loss/{self.trained or self.methods[-1]}"

    def each(
        self, split: str, running: Mapping[str, Mapping[int, float]], values: Mapping[str, list[float]]
    ) -> dict[str, float]:
        """Return nothing: single pairs are in the summary."""
        return {}

    def summary(
        self, split: str, running: Mapping[str, Mapping[int, float]], values: Mapping[str, list[float]]
    ) -> dict[str, float]:
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
        """Return where training is, by the pair's number."""
        return {number: vars(step) for number, step in self.population.steps.items()}

    def load_member_records(self, records: Mapping[int, Any]) -> None:
        """Take it back."""
        self.population.steps = {number: Element(**step) for number, step in records.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what has been found, of all ranks; to be called on every rank, as Lightning does."""
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
            "start": {pair: vars(element) for pair, element in self._start.items()},
            "moments": moments,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what had been found.

        Raises:
            ValueError: If the checkpoint is of another task, of other pairs or methods, or of other networks.
        """
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint["population"]
        self.elements = {
            pair: {method: Element(**element) for method, element in found.items()}
            for pair, found in saved["elements"].items()
        }
        self._start = {pair: Element(**element) for pair, element in saved["start"].items()}
        self._moments = {pair: self._new_moments(pair) for pair in saved["moments"]} or None
        if self._trainer is None or self.trainer.is_global_zero:  # what was added up over ranks is one rank's now
            for pair, moments in (self._moments or {}).items():
                moments.load_state_dict(saved["moments"][pair])


def _batch_statistics(network: Network) -> Network:
    """Return the network in evaluation mode, but with batch norms that use the batch."""
    network.eval()
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    return network


_PREFIX = "element."
_SEVERAL = ("dense", "shift", "rotation", "tilt")  # of an element, what holds several tensors


def _tensors(element: Element) -> dict[str, Tensor]:
    """Return the tensors of an element by name, for the state of a member."""
    several = {f"{name}.{place}": one for name in _SEVERAL for place, one in enumerate(getattr(element, name))}
    single = {name: getattr(element, name) for name in ("permutation", "log_scale", "sign", "phase")}
    return {f"{_PREFIX}{name}": tensor.clone() for name, tensor in {**single, **several}.items()}


def _element(symmetry: Symmetry, state: Mapping[str, Tensor]) -> Element:
    """Return the element whose tensors are in the state of a member."""
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
    dense, shift, rotation, tilt = (
        tuple(found.pop(name) for name in list(found) if name.startswith(f"{kind}.")) for kind in _SEVERAL
    )
    return Element(symmetry.fingerprint, **found, dense=dense, shift=shift, rotation=rotation, tilt=tilt)
