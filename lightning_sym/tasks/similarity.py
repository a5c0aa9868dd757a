"""Similarity of the members of a zoo, layer by layer, compared with null values; nothing is trained."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any, Literal

import torch
from pytorch_lightning import LightningModule
from rich.progress import track
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sym._checks import check_different, check_integers, check_known, check_seeds, check_words
from lightning_sym._distributed import summed, wide_device
from lightning_sym._loading import LoadsTrusted
from lightning_sym._random import derive_seed, generator
from lightning_sym._tags import details, overview, tag
from lightning_sym.networks import Network
from lightning_sym.networks.base import site_name
from lightning_sym.similarity import Features, Layer, Link, PopulationSimilarity, features_of
from lightning_sym.similarity.measures import DEFAULT_MEASURES, Setting, checked_sites, named_measures
from lightning_sym.symmetry import Symmetry, trace_symmetry
from lightning_sym.tasks._members import Pair, check_data, check_pairs, example_input, require_members, require_two
from lightning_sym.tasks._population_checkpoint import require_same
from lightning_sym.zoo import ModelZoo

Null = Literal["untrained", "shuffled"]

TRAINED = "trained"
NULLS: tuple[Null, ...] = ("untrained", "shuffled")
_DEAD = 1e-7  # a channel is dead if its norm, relative to the largest of its layer, is smaller


class SimilarityTask(LoadsTrusted, LightningModule):
    """Compare the layers of pairs of trained networks by several measures, with null values.

    The fit is one pass over a split of the data, normalised by the datamodule and without augmentation. Every network
    sees every image once; nothing is trained. For each pair of members, each layer of the first is compared with each
    of the second. A similarity means little by itself; two null values are reported with it:

    - ``untrained``: of two networks of the same architecture with fresh weights, one for each member; batch norms have
      their initial statistics;
    - ``shuffled``: of the trained networks, where the second is given each batch under a permutation without fixed
      points.

    The measures, with their settings (see :class:`lightning_sym.similarity.GroupProcrustes`,
    :class:`~lightning_sym.similarity.OrthogonalProcrustes` and :class:`~lightning_sym.similarity.CKA`):

    - ``group`` (``live``, ``center``, ``group``): Procrustes, up to the action of the network's traced symmetry on the
      channels of a layer; with ``group`` the name of an activation: up to its intertwiner group, as in the paper;
    - ``orthogonal`` (``center``);
    - ``cka_linear``, ``cka_max``, ``cka_laplace`` (``estimator``, ``normalize``, ``bandwidth``).

    Two layers that a measure cannot compare (grids that do not fit, groups of different kinds) have the value NaN.

    Several processes share out whole batches: the results are the same up to rounding. Features are
    computed once for each network and batch, kernels once for each layer of each network. CKA keeps the features of all
    images, on every process, unless its estimator is ``minibatch``; bound them by ``limit_train_batches``. At
    the end every process computes all kernels of CKA and all assignments of the Procrustes measures: more processes
    shorten only the pass over the images.

    Args:
        zoo: The zoo's folder.
        other_zoo: Folder of the zoo that second members come from, of any architecture; default the same zoo.
        pairs: Numbers of the members of each pair. ``"all"``: every two members once, or with another zoo each of one
            with each of the other. A number: so many of these, drawn.
        sites: Names of the layers to be compared, or ``"all"``: the networks' sites; of a network with functions as
            activations, such as ``F.relu``, the outputs of its layers with weights.
        measures: Names of measures, or settings by name; a measure under another name sets ``measure`` to its
            kind. Default group, orthogonal, cka_linear, cka_max.
        split: The images: ``"train"``, ``"val"`` or ``"test"``.
        nulls: Null values of each similarity: some of ``"untrained"``, ``"shuffled"``; default both.
        seed: Seed of all that is drawn: pairs, fresh weights, orders. >= 0.
        allow: Your own packages with networks of the zoos, see ``ModelZoo.open``.

    Attributes:
        pairs: The pairs; before ``setup`` they are known only if they were given.
        layers: Names of the layers of first and of second members; after ``setup``.
        similarities: By measure and kind (``trained``, ``untrained``, ``shuffled``): shape ``[pairs, layers of the
            first, layers of the second]``, float64. After the epoch.
        live: By kind (``trained``, ``untrained``), zoo (0 or 1) and member: for each layer the number of channels that
            are not zero on all images, and of all channels.
        images: How many images were seen.

    Logged at the end of the epoch: ``similarity/<measure>/<layer>``, the mean over pairs of the similarity of a layer
    with the same layer of the second network (a detail where there are more than 30), and as details
    ``details/similarity_untrained/...``, ``details/similarity_shuffled/...``; none if the layers of first and second
    have different names.

    A checkpoint holds the results. A fit that was interrupted before them restarts.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Godfrey, Brown, Emerson, Kvinge (2022), "On the Symmetries of Deep Learning Models and their Internal
        Representations", arXiv:2205.14258, section 5. The nulls are ours. docs/theory/similarity.md.

    Example:
        >>> SimilarityTask("runs/zoo-mnist5k/zoo", measures={"group": {"live": True}}).pairs
        []
    """

    def __init__(
        self,
        zoo: str,
        other_zoo: str | None = None,
        pairs: Literal["all"] | int | list[list[int]] = "all",
        sites: Literal["all"] | list[str] = "all",
        measures: list[str] | dict[str, dict[str, Setting] | None] | None = None,
        split: Literal["train", "val", "test"] = "test",
        nulls: Sequence[Null] = NULLS,
        seed: int = 0,
        allow: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_words(("split", split, ("train", "val", "test")))
        check_seeds(seed=seed)
        if nulls:
            check_different("nulls", nulls, NULLS)
        self._measures = named_measures(DEFAULT_MEASURES if measures is None else measures)
        self.zoo = str(zoo)
        self.other_zoo = None if other_zoo is None else str(other_zoo)
        self._drawn: int | None = None
        if isinstance(pairs, int):
            check_integers(pairs=pairs)
            self._drawn = pairs
        given = pairs != "all" and self._drawn is None
        self.pairs: list[Pair] = check_pairs(pairs, same=other_zoo is not None) if given else []
        self.split, self.seed = split, seed
        self.nulls: tuple[Null, ...] = tuple(null for null in NULLS if null in nulls)
        self.allow = tuple(allow or ())
        self.save_hyperparameters()
        self._sites: tuple[Literal["all"] | list[str], ...] = (checked_sites(sites), "all")
        self.nothing = nn.Parameter(torch.zeros(1))  # an optimizer, and DDP, want a parameter

        self.layers: tuple[list[str], list[str]] = ([], [])
        self.similarities: dict[str, dict[str, Tensor]] = {}
        self.live: dict[str, dict[tuple[int, int], list[tuple[int, int]]]] = {}
        self.images = 0
        self._zoos: list[ModelZoo] = []
        self._networks: dict[str, Network] = {}  # by name; not registered, so in no checkpoint
        self._squares: dict[str, list[Tensor]] = {}
        self._limit_val_batches: int | float | None = None

    # ---- the networks

    @property
    def epoch_split(self) -> str:
        """The split that datamodules provide for the epoch, each image once, not augmented."""
        return self.split

    @property
    def measures(self) -> list[str]:
        """The names of the measures."""
        return list(self._measures)

    @property
    def kinds(self) -> list[str]:
        """The kinds of values: ``trained``, and the nulls."""
        return [TRAINED, *self.nulls]

    @property
    def zoos(self) -> dict[str, tuple[ModelZoo, int]]:
        """The zoos that first and second members come from, each with the number of one member; after ``setup``."""
        return {
            name: (zoo, self.pairs[0][i])
            for i, (name, zoo) in enumerate(zip(("zoo", "other_zoo"), self._zoos, strict=False))
        }

    def setup(self, stage: str) -> None:
        """Open the zoos, load members, trace their symmetry, and make the metrics; on every process.

        Raises:
            FileNotFoundError: If there is no zoo.
            TypeError: If the data are not of ``lightning_sym.datamodules``.
            ValueError: If members, sites or data do not fit.
        """
        data, trial = getattr(self.trainer, "datamodule", None), bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        if not callable(getattr(data, "split_tensors", None)):
            raise TypeError(
                "SimilarityTask needs a datamodule of lightning_sym.datamodules, which yields each input once, "
                f"without augmentation; got {type(data).__name__}."
            )
        if not self._networks:
            self._build(data)
        for zoo, number in self.zoos.values():
            check_data(zoo, number, data, trial=trial)
        # There is nothing to validate; a pass over the validation split would be for nothing.
        self._limit_val_batches, self.trainer.limit_val_batches = self.trainer.limit_val_batches, 0

    def teardown(self, stage: str) -> None:
        """Give the trainer its settings back."""
        if self._limit_val_batches is not None:
            self.trainer.limit_val_batches = self._limit_val_batches

    def _build(self, data: Any) -> None:
        first = ModelZoo.open(self.zoo, allow=self.allow)
        zoos = [first] if self.other_zoo is None else [first, ModelZoo.open(self.other_zoo, allow=self.allow)]
        if len(zoos) == 1:
            require_two(first, "Similarity")
        self.pairs = self.pairs or self._some(
            list(combinations(first.numbers, 2) if len(zoos) == 1 else product(first.numbers, zoos[1].numbers))
        )
        self._zoos = zoos
        for side, zoo in enumerate(zoos):
            require_members(zoo, self._numbers(side))
        networks: dict[str, Network] = {}
        known: list[list[Layer]] = []
        layers: list[list[str]] = []
        for side, zoo in enumerate(zoos):
            for number in self._numbers(side):
                networks[self._name(side, number)] = network = zoo.load(number)
                if "untrained" in self.nulls:
                    fresh = network.fresh(derive_seed("untrained", self.seed, side, number))
                    networks[self._name(side, number, "untrained")] = fresh.to(next(network.parameters()).dtype)
            number = self._numbers(side)[0]
            network = networks[self._name(side, number)]
            example = example_input(zoo, number, network, data)
            symmetry = trace_symmetry(network, example, nullity=False, exchange=False)
            sites, wanted = _layers(network, symmetry), self._sites[side]
            names = sites if wanted == "all" else [site_name(name, sites) for name in wanted]
            for name in names:
                check_known("site", name, sites)
            features = features_of(network, names, example)
            groups = [symmetry.channels(name) for name in names]
            known.append(
                [Layer(one, Features(features[name], one.axes)) for name, one in zip(names, groups, strict=True)]
            )
            layers.append(names)
        for network in networks.values():
            network.requires_grad_(False).eval()
        self.layers = layers[0], layers[-1]
        self._axes = [[layer.group.axes for layer in own] for own in known]
        self._channels = [[layer.example.size for layer in own] for own in known]
        self._networks = networks
        self.collected = nn.ModuleList(
            PopulationSimilarity(measure.metric(known[0], known[-1]), *self.layers, self._links)
            for measure in self._measures.values()
        )

    def _some(self, pairs: list[Pair]) -> list[Pair]:
        """Return all pairs, or as many as are to be drawn."""
        if self._drawn is None:
            return pairs
        if self._drawn > len(pairs):
            raise ValueError(f"pairs must be at most the {len(pairs)} that there are, got {self._drawn}.")
        drawn = torch.randperm(len(pairs), generator=generator("pairs", self.seed))[: self._drawn]
        return [pairs[place] for place in sorted(drawn.tolist())]

    def _numbers(self, side: int) -> list[int]:
        """Return the numbers of a zoo's members that are in a pair."""
        places = (0, 1) if len(self._zoos) == 1 else (side,)
        return sorted({pair[place] for pair in self.pairs for place in places})

    def _name(self, side: int, number: int, kind: str = TRAINED) -> str:
        """Return the name of a network: a member, or its untrained counterpart."""
        zoo = "member" if side == 0 else "other"
        return f"{zoo} {number}" + (", untrained" if kind == "untrained" else "")

    @property
    def _links(self) -> list[Link]:
        """The comparisons: all pairs of one kind, then of the next."""
        other = len(self._zoos) - 1
        return [
            Link(self._name(0, first, kind), self._name(other, second, kind), kind == "shuffled")
            for kind in self.kinds
            for first, second in self.pairs
        ]

    # ---- the pass over the data

    def configure_optimizers(self) -> Optimizer:
        """Return an optimizer with learning rate 0."""
        return torch.optim.SGD([self.nothing], lr=0.0)

    def on_fit_start(self) -> None:
        """Bring the networks to the right device."""
        dtype = self.dtype if isinstance(self.dtype, torch.dtype) else None
        for network in self._networks.values():
            network.to(device=self.device, dtype=dtype)

    def on_train_epoch_start(self) -> None:
        """Reset all sums."""
        self._squares, self.images = {}, 0
        for one in self.collected:
            one.reset()  # type: ignore[operator]  # a PopulationSimilarity

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Add a batch of images, which all networks see."""
        images = batch[0]
        if len(images):
            self._add(images, batch_idx * self.trainer.world_size + self.trainer.global_rank)
        return (0.0 * self.nothing).sum()

    def _add(self, images: Tensor, number: int) -> None:
        features: dict[str, dict[str, Features]] = {}
        for name, network in self._networks.items():
            side = int(name.startswith("other"))
            values = features_of(network, self.layers[side], images)
            features[name] = {
                layer: Features(values.pop(layer), axes, f"{name} at {layer}")
                for layer, axes in zip(self.layers[side], self._axes[side], strict=True)
            }
            squares = [
                layer.squares() + len(layer) * layer.positions * layer.mean().square()
                for layer in features[name].values()
            ]
            before = self._squares.get(name, [torch.zeros_like(one) for one in squares])
            self._squares[name] = [one + two for one, two in zip(before, squares, strict=True)]
        order = _another_order(len(images), generator("shuffled", self.seed, number))
        for one in self.collected:
            one.update(features, order)  # type: ignore[operator]
        self.images += len(images)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Do nothing: the epoch measures everything."""

    def on_train_epoch_end(self) -> None:
        """Compute all similarities, log them, and end the fit."""
        self.compute_similarities()
        trained, nulls = self.logged()
        for name, value in {**overview(trained, {}), **details(nulls)}.items():
            self.log(name, value)
        self.trainer.should_stop = True

    def compute_similarities(self) -> None:
        """Compute all similarities of the epoch; to be called on every process."""
        found = list(zip(self._measures, self.collected, strict=True))
        bar = self.trainer.is_global_zero and self.trainer.progress_bar_callback is not None
        for name, one in track(found, description="comparing", transient=True) if bar else found:
            values = one.compute()  # type: ignore[operator]
            one.reset()  # type: ignore[operator]  # its state can be large
            self.similarities[name] = dict(zip(self.kinds, values.split(len(self.pairs)), strict=True))
        self.live = self._live_channels()
        self.images = int(summed(torch.tensor(self.images, device=self.device)))

    def _live_channels(self) -> dict[str, dict[tuple[int, int], list[tuple[int, int]]]]:
        live: dict[str, dict[tuple[int, int], list[tuple[int, int]]]] = {}
        for kind in (TRAINED, *(["untrained"] if "untrained" in self.nulls else [])):
            live[kind] = {}
            for side in range(len(self._zoos)):
                for number in self._numbers(side):
                    own = [summed(one).sqrt() for one in self._own_squares(self._name(side, number, kind), side)]
                    live[kind][side, number] = [(int((n > _DEAD * n.max()).sum()), len(n)) for n in own]
        return live

    def _own_squares(self, name: str, side: int) -> list[Tensor]:
        """Return the sums of squares of a network's channels; zeros if this process saw no image."""
        device = wide_device(self.device)
        none = [torch.zeros(size, dtype=torch.float64, device=device) for size in self._channels[side]]
        return self._squares.get(name, none)

    def logged(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return means over pairs, of layers with the same name in both networks: of the networks, and null values."""
        trained: dict[str, float] = {}
        nulls: dict[str, float] = {}
        for measure, kinds in self.similarities.items() if self.layers[0] == self.layers[1] else ():
            for kind, values in kinds.items():
                of_layers = {
                    tag(f"similarity{'' if kind == TRAINED else '_' + kind}", measure, layer): float(
                        values[:, place, place].mean()
                    )
                    for place, layer in enumerate(self.layers[0])
                }
                (trained if kind == TRAINED else nulls).update(of_layers)
        return trained, nulls

    # ---- checkpoints

    def identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the run that loads it must share, as plain values by name."""
        return {
            "pairs": [list(pair) for pair in self.pairs],
            "layers": [list(names) for names in self.layers],
            "measures": {name: measure.description for name, measure in self._measures.items()},
            "split": self.split,
            "kinds": self.kinds,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the results."""
        checkpoint["similarity"] = {
            "identity": self.identity(),
            "similarities": self.similarities,
            "live": self.live,
            "images": self.images,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the results.

        Raises:
            ValueError: If there are none, or they are of other networks or measures.
        """
        saved = checkpoint.get("similarity")
        if saved is None:
            raise ValueError(f"The checkpoint holds no similarities: it was not written by a {type(self).__name__}.")
        if not saved["similarities"]:
            raise ValueError(
                "The checkpoint was written before all images had been seen, and holds no similarities; restart the "
                "run, without ckpt_path."
            )
        require_same(saved["identity"], self.identity())
        self.similarities, self.live, self.images = saved["similarities"], saved["live"], saved["images"]


def _another_order(count: int, source: torch.Generator) -> Tensor:
    """Draw a random permutation without fixed points, a single cycle. Shape ``[count]``, int64."""
    cycle = torch.randperm(count, generator=source)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    return order


def _layers(network: Network, symmetry: Symmetry) -> list[str]:
    """Return the sites of a network; if some are functions, which no tap observes, its layers with weights."""
    sites = network.sites()
    if all(site in symmetry.taps for site in sites):
        return sites
    weights = ((name, getattr(module, "weight", None)) for name, module in network.named_modules())
    return [name for name, weight in weights if name in symmetry.taps and weight is not None and weight.ndim > 1]
