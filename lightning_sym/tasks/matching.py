"""Matching the members of a zoo: the symmetry of one network that makes it most like another."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, TypeVar

import torch
from pytorch_lightning import LightningModule
from rich.progress import track
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_sym._checks import check_integers
from lightning_sym._text import unknown
from lightning_sym.networks import Network
from lightning_sym.symmetry import (
    ActivationMoments,
    Element,
    Symmetry,
    activation_matching,
    trace_symmetry,
    weight_matching,
)
from lightning_sym.tasks._members import Pair, check_data, check_pairs, example_input, pair_name, require_two
from lightning_sym.tasks.metrics import PopulationClassification
from lightning_sym.zoo import ModelZoo

T = TypeVar("T")
Method = Literal["weights", "activations", "straight_through"]

UNMATCHED = "unmatched"
METHODS: tuple[Method, ...] = ("weights", "activations", "straight_through")


class MatchingTask(LightningModule):
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

    Batch norms use the statistics of the batch at midpoints, in training and validation. Without
    ``straight_through`` the fit ends after one epoch.

    Args:
        zoo: The zoo's folder, with two members or more.
        pairs: Numbers of the members of each pair; the second one is matched to the first. ``"all"``: every two
            members once, the lower number first.
        methods: Some of ``"weights"``, ``"activations"``, ``"straight_through"``; default all.
        restarts: From how many starting points weight matching is tried (the identity, then random ones); the best
            is kept. >= 1.
        matching_seed: Seed of the orders and starting points in weight matching. >= 0.
        scales: Whether units may be rescaled, where the activation allows it.
        signs: Whether units may change sign, where the activation allows it.
        optimizer: Makes the optimizer of the latent networks; default SGD, learning rate 0.01, momentum 0.9.
        allow: Packages of your own whose networks the zoo may hold, see ``ModelZoo.open``.

    Attributes:
        pairs: The pairs; before ``setup`` they are known only if they were given.
        symmetry: The symmetry of the networks; after ``setup``.
        elements: What was found: by pair and method. For ``straight_through`` the best so far.

    Logged at the end of each epoch, on rank 0, of the midpoint between both networks of a pair:
    ``pair-0-1/<method>/midpoint_loss`` and ``.../midpoint_accuracy`` on the validation split, for ``unmatched`` too
    (nats; fractions in ``[0, 1]``), ``pair-0-1/straight_through/train_midpoint_loss``, and the means over pairs as
    ``midpoint_loss/<method>``, ``midpoint_accuracy/<method>``, ``train_midpoint_loss/straight_through``.

    A checkpoint holds latent networks, elements, moments and what has been added up in the epoch.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Ainsworth, Hayase, Srinivasa (2023), "Git Re-Basin: Merging Models modulo Permutation Symmetries",
        arXiv:2209.04836: the three methods. They keep the element with the lowest loss of a training batch, and have
        neither scales nor signs. Matching activations by correlation is from Li et al. (2016), arXiv:1511.07543.
    """

    symmetry: Symmetry
    latents: nn.ModuleDict

    def __init__(
        self,
        zoo: str,
        pairs: Literal["all"] | list[list[int]] = "all",
        methods: Sequence[Method] | None = None,
        restarts: int = 1,
        matching_seed: int = 0,
        scales: bool = True,
        signs: bool = True,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        allow: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        methods = METHODS if methods is None else methods
        for method in [methods] if isinstance(methods, str) else methods:
            if method not in METHODS:
                raise ValueError(unknown("method", method, METHODS))
        if isinstance(methods, str) or not methods or len(set(methods)) < len(methods):
            raise ValueError(f"methods must be a list of different ones of {', '.join(METHODS)}, got {methods!r}.")
        check_integers(restarts=restarts)
        check_integers(0, matching_seed=matching_seed)
        self.pairs = [] if pairs == "all" else check_pairs(pairs)
        self.zoo = str(zoo)
        self.methods: tuple[Method, ...] = tuple(method for method in METHODS if method in methods)
        self.restarts = restarts
        self.matching_seed = matching_seed
        self.scales = scales
        self.signs = signs
        self.optimizer = optimizer
        self.allow = tuple(allow or ())
        self.save_hyperparameters(ignore=["optimizer"])
        kind = type(self)
        self.save_hyperparameters({"_class_path": f"{kind.__module__}.{kind.__qualname__}"})
        self._make_optimizer([nn.Parameter(torch.zeros(2, 2))])  # refuses bad settings now

        self.elements: dict[Pair, dict[str, Element]] = {}
        # Of straight-through: where it began, and what it has composed with that by now.
        self._start: dict[Pair, Element] = {}
        self._step: dict[Pair, Element] = {}
        self._started: dict[Pair, nn.Module] = {}  # the second networks, moved by the start
        self._best: dict[Pair, dict[str, float]] = {}
        self._moments: dict[Pair, ActivationMoments] | None = None
        self._members: dict[int, Network] = {}
        self._opened: ModelZoo | None = None
        # Sums over the epoch's steps: of the midpoints' losses, weighted by images, and of images.
        self._train_loss = torch.zeros(0, dtype=torch.float64)
        self._train_count = 0.0

    # ---- the zoo

    @property
    def straight_through(self) -> bool:
        """Whether latent networks are trained."""
        return "straight_through" in self.methods

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
        second = self.member(pair[1])
        if method == UNMATCHED:
            return copy.deepcopy(second)
        found = self.elements.get(pair, {})
        if method not in found:
            raise ValueError(f"Pair {pair} has no element for {unknown('method', method, [UNMATCHED, *found])}")
        return self._acted(found[method], pair)

    def _acted(self, element: Element, pair: Pair) -> Network:
        moved = self.symmetry.act(element, self.member(pair[1]))
        assert isinstance(moved, Network)
        return moved

    def setup(self, stage: str) -> None:
        """Open the zoo, load the members and find their symmetry; on every process.

        Raises:
            FileNotFoundError: If there is no zoo.
            ValueError: If it has fewer than two members, or not those of the pairs, or the data do not fit.
        """
        self._open()
        data, trial = getattr(self.trainer, "datamodule", None), bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        check_data(self.model_zoo, self.pairs[0][0], data, trial=trial)

    def _open(self) -> None:
        if self._members:
            return
        zoo = ModelZoo.open(self.zoo, allow=self.allow)
        require_two(zoo, "Matching")
        self.pairs = self.pairs or list(combinations(zoo.numbers, 2))
        members = {number: zoo.load(number) for number in sorted({number for pair in self.pairs for number in pair})}
        for network in members.values():
            network.requires_grad_(False)
        first = members[self.pairs[0][0]]
        self.symmetry = trace_symmetry(
            first, example_input(zoo, self.pairs[0][0], first, getattr(self._trainer, "datamodule", None))
        )
        self._opened, self._members = zoo, members
        self._scratch = (_batch_statistics(copy.deepcopy(first)),)  # in a tuple: no part of what is trained
        if self.straight_through:
            self.latents = nn.ModuleDict({pair_name(pair): copy.deepcopy(members[pair[0]]) for pair in self.pairs})
            for latent in self.latents.values():
                for parameter in latent.parameters():
                    parameter.requires_grad_(True)
        else:
            self.nothing = nn.Parameter(torch.zeros(1))  # an optimizer, and DDP, want a parameter
        self._train_loss = torch.zeros(len(self.pairs), dtype=torch.float64)
        self.val_metrics = PopulationClassification(len(self.pairs) * len(self._variants))

    # ---- processes

    def _shared_out(self, work: Callable[[Pair], T], title: str | None = None) -> dict[Pair, T]:
        """Do something for every pair, each on one process, and return all results on every process.

        Args:
            work: What it returns must not depend on the process.
            title: Title of the progress bar; None for none.
        """
        rank, size = self.trainer.global_rank, self.trainer.world_size
        mine: dict[Pair, T] = {}
        error: Exception | None = None
        own: Iterable[Pair] = self.pairs[rank::size]
        if title and self.trainer.is_global_zero and self.trainer.progress_bar_callback is not None:
            own = track(self.pairs[rank::size], description=title, transient=True)
        try:
            for pair in own:
                mine[pair] = work(pair)
        except Exception as caught:
            error = caught
        parts: list[Any] = [(mine, error)]
        if size > 1:
            parts = [None] * size
            torch.distributed.all_gather_object(parts, (mine, error))
        for _, failed in parts:
            if failed is not None:
                raise failed
        found = {pair: result for part, _ in parts for pair, result in part.items()}
        return {pair: found[pair] for pair in self.pairs}

    # ---- fitting

    def configure_optimizers(self) -> Optimizer:
        """Make the optimizer of the latent networks."""
        if not self.straight_through:
            return torch.optim.SGD([self.nothing], lr=0.0)
        return self._make_optimizer(self.latents.parameters())

    def _make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        if self.optimizer is not None:
            return self.optimizer(parameters)
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def _to_device(self) -> None:
        for network in (*self._members.values(), *self._scratch):
            network.to(self.device)
        self._train_loss = self._train_loss.to(self.device)

    def on_fit_start(self) -> None:
        """Match weights; a run that goes on has what it found in its checkpoint."""
        self._to_device()
        if not self.elements:
            self.elements = {pair: {} for pair in self.pairs}
            if set(self.methods) & {"weights", "straight_through"}:
                starts = self._shared_out(self._match_weights, "matching weights")
                for pair, element in starts.items():
                    if "weights" in self.methods:
                        self.elements[pair]["weights"] = element
                    if self.straight_through:
                        self.elements[pair]["straight_through"] = self._start[pair] = element
                        self._step[pair] = self.symmetry.identity()
            if "activations" in self.methods:
                self._moments = {pair: self._new_moments(pair) for pair in self.pairs}
        self._started = {pair: self._acted(element, pair) for pair, element in self._start.items()}

    def _match_weights(self, pair: Pair) -> Element:
        a, b = map(self.member, pair)
        return weight_matching(
            self.symmetry,
            a,
            b,
            scales=self.scales,
            signs=self.signs,
            restarts=self.restarts,
            seed=self.matching_seed,
        ).element

    def _match_latent(self, pair: Pair) -> Element:
        """Match the second network to the latent one, from where the step before left off."""
        return weight_matching(
            self.symmetry,
            self._latent(pair),
            self._started[pair],
            scales=False,
            signs=self.signs,
            seed=self.matching_seed,
            initial=self._step[pair],
        ).element

    def _current(self, pair: Pair) -> Element:
        """Return straight-through's element as it is by now."""
        return self.symmetry.compose(self._step[pair], self._start[pair])

    def _latent(self, pair: Pair) -> nn.Module:
        return self.latents[pair_name(pair)]

    def _new_moments(self, pair: Pair) -> ActivationMoments:
        a, b = map(self.member, pair)
        return ActivationMoments(self.symmetry, a, b)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Add up activations in the first epoch; take the latent networks' gradients."""
        images, labels = batch
        if self._moments is not None:
            with torch.no_grad():
                for moments in self._moments.values():
                    moments.update(images)
        if not self.straight_through:
            return (0.0 * self.nothing).sum()
        with torch.no_grad():
            self._step = self._shared_out(self._match_latent)
        losses = []
        for pair in self.pairs:
            latent = dict(self._latent(pair).named_parameters())
            moved = dict(self.symmetry.act(self._step[pair], self._started[pair]).named_parameters())
            a = dict(self.member(pair[0]).named_parameters())
            # The value is that of the matched network, the gradient goes to the latent one.
            weights = {
                name: 0.5 * a[name] + 0.5 * (moved[name] + latent[name] - latent[name].detach()) for name in latent
            }
            losses.append(F.cross_entropy(self._run(weights, images), labels))
        each = torch.stack(losses)
        self._train_loss += each.detach().double() * len(labels)
        self._train_count += len(labels)
        return each.sum()

    def _run(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the logits of given weights; batch norms use the batch."""
        (network,) = self._scratch
        # Copies, as batch norms write their statistics.
        buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
        logits: Tensor = functional_call(network, {**buffers, **weights}, (images,))
        return logits

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Match activations when the first epoch's batches have been seen, before its validation."""
        if self.trainer.is_last_batch:
            self._match_activations()

    def _match_activations(self) -> None:
        if self._moments is None:
            return
        moments, self._moments = self._moments, None
        for found in moments.values():
            found.reduce()

        def match(pair: Pair) -> Element:
            a, b = map(self.member, pair)
            return activation_matching(
                self.symmetry,
                a,
                b,
                moments[pair],
                scales=self.scales,
                signs=self.signs,
                seed=self.matching_seed,
            ).element

        for pair, element in self._shared_out(match).items():
            self.elements[pair]["activations"] = element

    def on_train_epoch_end(self) -> None:
        """Log training losses; end the fit where nothing is trained."""
        self._match_activations()  # if max_steps ended the epoch
        if not self.straight_through:
            self.trainer.should_stop = True
            return
        losses, count = self._train_sums()
        self._train_loss.zero_()
        self._train_count = 0.0
        if count == 0:
            return
        values = (losses / count).tolist()
        self._log("train_midpoint_loss", {(pair, "straight_through"): v for pair, v in self._zip(values)})
        if not self._validated():
            self._keep({pair: (self._current(pair), value) for pair, value in self._zip(values)})

    def _zip(self, values: Sequence[float]) -> Iterator[tuple[Pair, float]]:
        return zip(self.pairs, values, strict=True)

    def _train_sums(self) -> tuple[Tensor, float]:
        """Return the sums over all ranks."""
        both = torch.cat([self._train_loss, self._train_loss.new_tensor([self._train_count])])
        if self.trainer.world_size > 1:
            # On the device of the process group: after a fit Lightning has moved the module to the CPU.
            both = self.trainer.strategy.reduce(both.to(self.trainer.strategy.root_device), reduce_op="sum")  # type: ignore[assignment]
        return both[:-1], float(both[-1])

    def _validated(self) -> bool:
        batches = torch.tensor(sum(self.trainer.num_val_batches), device=self.trainer.strategy.root_device)
        return int(self.trainer.strategy.reduce(batches, reduce_op="max")) > 0

    def _keep(self, candidates: Mapping[Pair, tuple[Element, float]]) -> None:
        """Keep straight-through's elements whose midpoint is the best so far."""
        for pair, (element, loss) in candidates.items():
            if math.isfinite(loss) and loss < self._best.get(pair, {"loss": math.inf})["loss"]:
                self.elements[pair]["straight_through"] = element
                self._best[pair] = {"loss": loss, "epoch": float(self.current_epoch)}

    # ---- midpoints

    @property
    def _variants(self) -> list[str]:
        """What is evaluated; weight matching also where it is only the start of straight-through."""
        return [UNMATCHED, *(method for method in METHODS if method in self.methods or self._is_start(method))]

    def _is_start(self, method: str) -> bool:
        return method == "weights" and self.straight_through

    def _evaluated(self) -> dict[tuple[Pair, str], Element | None]:
        """Return the elements to evaluate now, by pair and method; None moves nothing."""
        found: dict[tuple[Pair, str], Element | None] = {}
        fitting = self.trainer.state.fn == "fit"
        for pair in self.pairs:
            known: dict[str, Element] = dict(self.elements.get(pair, {}))
            if fitting and pair in self._start:
                known["weights"] = self._start[pair]
                known["straight_through"] = self._current(pair)
            found[pair, UNMATCHED] = None
            found.update({(pair, method): known[method] for method in self._variants if method in known})
        return found

    def _begin_evaluation(self) -> None:
        self._to_device()
        self.val_metrics.to(self.device)
        self._midpoints = {key: self._midpoint(key[0], element) for key, element in self._evaluated().items()}

    def _midpoint(self, pair: Pair, element: Element | None) -> dict[str, Tensor]:
        b = self.member(pair[1]) if element is None else self._acted(element, pair)
        ends = dict(b.named_parameters())
        with torch.no_grad():
            return {name: 0.5 * (a + ends[name]) for name, a in self.member(pair[0]).named_parameters()}

    def _evaluate(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        for (pair, method), weights in self._midpoints.items():
            row = self.pairs.index(pair) * len(self._variants) + self._variants.index(method)
            rows = torch.tensor([row], device=images.device)
            self.val_metrics.update(rows, self._run(weights, images)[None], labels)

    def _end_evaluation(self, split: str) -> dict[tuple[Pair, str], float]:
        """Log what was found and return the losses."""
        computed = self.val_metrics.values()
        self.val_metrics.reset()
        losses: dict[tuple[Pair, str], float] = {}
        for name in ("loss", "accuracy"):
            values = computed[name].view(len(self.pairs), -1).tolist()
            named = {
                (pair, method): values[self.pairs.index(pair)][self._variants.index(method)]
                for pair, method in self._midpoints
            }
            shown = {key: value for key, value in named.items() if key[1] in (UNMATCHED, *self.methods)}
            self._log(f"{split}midpoint_{name}", shown)
            losses = losses or named
        self._midpoints = {}
        return losses

    def _log(self, name: str, values: Mapping[tuple[Pair, str], float]) -> None:
        """Log values, the same on all ranks, and their means over pairs."""
        means: dict[str, list[float]] = {}
        for (pair, method), value in values.items():
            if math.isfinite(value):
                means.setdefault(method, []).append(value)
                self.log(f"pair-{pair_name(pair)}/{method}/{name}", value)
        for method, found in means.items():
            shown = (name, method) == ("midpoint_loss", "straight_through")
            self.log(f"{name}/{method}", math.fsum(found) / len(found), prog_bar=shown)

    def on_validation_epoch_start(self) -> None:
        """Make the midpoints."""
        self._begin_evaluation()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Evaluate all midpoints; images ``[B, C, H, W]``, labels ``[B]``."""
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        """Log, and keep straight-through's best elements."""
        if self.trainer.sanity_checking:
            self.val_metrics.reset()
            return
        candidates = {key: element for key, element in self._evaluated().items() if element is not None}
        losses = self._end_evaluation("")
        if self.trainer.state.fn != "fit" or not self.straight_through:
            return
        for method in ("weights", "straight_through"):
            self._keep(
                {
                    pair: (element, losses[pair, which])
                    for (pair, which), element in candidates.items()
                    if which == method and (which != "weights" or pair not in self._best)
                }
            )

    def on_test_epoch_start(self) -> None:
        """Make the midpoints."""
        self._begin_evaluation()

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Evaluate all midpoints; images ``[B, C, H, W]``, labels ``[B]``."""
        self._evaluate(batch)

    def on_test_epoch_end(self) -> None:
        """Log under the same names as in validation, with ``test_`` before the quantity."""
        self._end_evaluation("test_")

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what has been found, of all ranks; to be called on every rank, as Lightning does."""
        losses, count = self._train_sums()
        moments: dict[str, Any] | None = None
        if self._moments is not None:
            moments = {}
            for pair, found in self._moments.items():
                total = self._new_moments(pair)
                total.load_state_dict(found.state_dict())
                total.reduce()
                moments[pair_name(pair)] = total.state_dict()
        checkpoint["matching"] = {
            "pairs": [list(pair) for pair in self.pairs],
            "methods": list(self.methods),
            "elements": {
                pair_name(pair): {method: _packed(element) for method, element in found.items()}
                for pair, found in self.elements.items()
            },
            "start": {pair_name(pair): _packed(element) for pair, element in self._start.items()},
            "step": {pair_name(pair): _packed(element) for pair, element in self._step.items()},
            "best": {pair_name(pair): dict(best) for pair, best in self._best.items()},
            "moments": moments,
            "train_loss": losses.cpu(),
            "train_count": count,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what had been found.

        Raises:
            ValueError: If the checkpoint is of another task, of other pairs or methods, or of other networks.
        """
        saved = checkpoint.get("matching")
        if saved is None:
            raise ValueError("The checkpoint holds no matching: it was not written by a MatchingTask.")
        self._open()
        for name, theirs, mine in (
            ("pairs", saved["pairs"], [list(pair) for pair in self.pairs]),
            ("methods", saved["methods"], list(self.methods)),
        ):
            if theirs != mine:
                raise ValueError(
                    f"The checkpoint has {name} {theirs} and this run has {mine}; use the settings and the zoo that it "
                    "was made with, which the config.yaml of its run holds."
                )
        by_name = {pair_name(pair): pair for pair in self.pairs}
        self.elements = {
            by_name[name]: {method: _unpacked(element) for method, element in found.items()}
            for name, found in saved["elements"].items()
        }
        self._start, self._step = (
            {by_name[name]: _unpacked(element) for name, element in saved[key].items()} for key in ("start", "step")
        )
        self._best = {by_name[name]: dict(best) for name, best in saved["best"].items()}
        for found in self.elements.values():
            if any(element.group != self.symmetry.fingerprint for element in found.values()):
                raise ValueError("The checkpoint was made with networks of another architecture; use the same zoo.")
        first = self._trainer is None or self.trainer.is_global_zero  # what was added up over ranks is one rank's now
        self._moments = None
        if saved["moments"] is not None:
            self._moments = {pair: self._new_moments(pair) for pair in self.pairs}
            if first:
                for name, state in saved["moments"].items():
                    self._moments[by_name[name]].load_state_dict(state)
        if first:
            self._train_loss = saved["train_loss"].to(self._train_loss)
            self._train_count = saved["train_count"]


def _batch_statistics(network: Network) -> Network:
    """Return the network in evaluation mode, but with batch norms that use the batch."""
    network.eval()
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    return network


def _packed(element: Element) -> dict[str, Any]:
    """Return an element as plain values, which a checkpoint may hold."""
    return {
        "group": element.group,
        "permutation": element.permutation,
        "log_scale": element.log_scale,
        "sign": element.sign,
        "dense": list(element.dense),
        "shift": list(element.shift),
    }


def _unpacked(saved: Mapping[str, Any]) -> Element:
    return Element(**{**saved, "dense": tuple(saved["dense"]), "shift": tuple(saved["shift"])})
