"""Stitching the members of a zoo: all pairs, sites and families of maps in one fit."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sym import stitching
from lightning_sym._checks import check_seeds, check_words
from lightning_sym._distributed import together
from lightning_sym._random import derive_seed, seeded
from lightning_sym.networks import Network
from lightning_sym.networks.base import site_name
from lightning_sym.tasks._branches import BranchTask
from lightning_sym.tasks._members import Pair, check_pairs, example_input, pair_name, require_members, require_two
from lightning_sym.zoo import ModelZoo

_IMAGES_AT_ONCE = 125  # when maps are fitted to features
Family = str | Callable[[stitching.Port], stitching.StitchingMap]
SitePair = tuple[str, str]

DEFAULT_MAPS = ("full", "rank(1)", "rank(2)", "rank(4)", "group", "identity")


@dataclass(frozen=True)
class Stitch:
    """A stitch: its networks, cuts and map.

    Attributes:
        pair: Numbers of the lower and of the upper member.
        site: Where the lower one is cut.
        target_site: Where the upper one is cut.
        family: Name of the family of maps.
    """

    pair: Pair
    site: str
    target_site: str
    family: str

    @property
    def place(self) -> str:
        """The sites: one name if both are the same."""
        return self.site if self.site == self.target_site else f"{self.site}-{self.target_site}"

    def __str__(self) -> str:
        return f"pair-{pair_name(self.pair)}/{self.place}/{self.family}"


class StitchingTask(BranchTask):
    r"""Stitch pairs of members of a zoo, at all sites and with all families of maps, in one fit.

    For a pair ``(i, j)`` and a site the stitched network has the bottom layers of member ``i``, a map :math:`s`, and
    the top layers of member ``j``. Both parts are frozen; the map is trained on cross-entropy and its regulariser, and
    projected after every step. The stitching penalty is the mean accuracy of both members less that of the stitched
    network. The maps do not interact: the results are those of training each alone.

    Bottom layers are run once per batch; the layers above a cut are run once per map. In evaluation, maps are ``hard``
    (permutations are rounded, small weights of ``lasso`` are 0). Use it with
    :class:`lightning_sym.callbacks.BatchNormRecalibration`, so that all maps are evaluated with statistics measured
    with them, and :class:`lightning_sym.callbacks.StitchingReport`, which makes the tables and figures. Tests use the
    weights of the epoch with the best validation accuracy, map by map; the last ones if there are no validation data.

    Args:
        zoo: Folder of the zoo of the bottom layers, and of the top layers if there is no ``target_zoo``.
        pairs: ``"all"``: every two members once, the lower number below. An integer: so many ordered pairs, drawn at
            random without repetition. Or a list of pairs of numbers.
        sites: ``"all"``: the same site in both members, each of them. A list of names: these. A list of pairs of names:
            lower and upper site. ``"any"``: every site of the lower with every site of the upper member where
            positions and ports fit.
        maps: Families: names for :func:`lightning_sym.stitching.stitching_map`, or anything that makes a
            :class:`lightning_sym.stitching.StitchingMap` from a :class:`lightning_sym.stitching.Port` (in YAML
            ``class_path`` and ``init_args`` of a class). Default full, of rank 1, 2 and 4, the intertwiner group, and
            the identity without training where widths are equal.
        target_zoo: Folder of the zoo of the top layers; its networks may have another architecture.
        ports: ``"all"``: a map for each value that crosses the cut, also for skip connections. ``"branch"``: one for
            the site's activation only, as in the paper.
        batch_norm: Statistics of the top layers' batch norms in training: those of the batch (``"batch"``), or of
            the upper member (``"frozen"``).
        init: ``"random"``: as the paper. ``"features"``: maps start from the best fit between the features of both
            members on the training images, in one pass. That is another experiment: label it accordingly.
        head_start: Fraction of the epochs, at the start, while a group map trains its permutation only and its
            scales stay at 1. In [0, 1].
        resize: Average positions of the lower member where it has whole multiples of the upper one's.
        seed: Seed of the maps' initial values and of drawn pairs. >= 0.
        optimizer: Makes the optimizer; default SGD without momentum, learning rate 1e-3, weight decay 1e-4 (on all but
            permutations).
        lr_scheduler: Makes its scheduler, stepped after each epoch; default none.
        channels_last: Lay images and weights out with the channels last: the same numbers up to rounding, often faster.
        allow: Your own packages with networks of the zoos, see ``ModelZoo.open``.

    Attributes:
        stitches: The branches, in order; after ``setup``.
        pairs: The pairs; before ``setup`` they are known only if they were given.
        left_out: Combinations of sites that do not fit (``sites="any"``) and families that do not fit the widths, with
            the reason.

    Logged after each epoch: ``train/loss`` (mean over all), and on the validation split, in fractions, the penalties as
    means over pairs and sites ``penalty/<family>``, and over pairs ``penalty/<site>/<family>`` (for families that are
    trained, where there are up to 15 curves; otherwise as details). In ``metrics.csv``, and in TensorBoard with
    ``--log_details true``: ``details/pair-0-1/<site>/<family>/train_loss``, ``.../val_accuracy``, ``.../val_loss``.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Godfrey, Brown, Emerson, Kvinge (2022), "On the Symmetries of Deep Learning Models and their Internal
        Representations", arXiv:2205.14258, section 4 and appendix D.2. Different: statistics are recomputed for all
        families, epochs are chosen on validation images, skip connections have maps.

    Example:
        >>> StitchingTask("runs/zoo-mnist5k/zoo", pairs=[[0, 1]], maps=["full", "group"]).pairs
        [(0, 1)]
    """

    def __init__(
        self,
        zoo: str,
        pairs: Literal["all"] | int | list[list[int]] = "all",
        sites: Literal["all", "any"] | list[str] | list[list[str]] = "all",
        maps: Sequence[str | Callable[[stitching.Port], stitching.StitchingMap]] | None = None,
        target_zoo: str | None = None,
        ports: Literal["all", "branch"] = "all",
        batch_norm: Literal["batch", "frozen"] = "batch",
        init: Literal["random", "features"] = "random",
        head_start: float = 0.5,
        resize: bool = False,
        seed: int = 0,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        channels_last: bool = False,
        allow: Sequence[str] | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, channels_last, allow)
        check_words(
            ("ports", ports, ("all", "branch")),
            ("batch_norm", batch_norm, ("batch", "frozen")),
            ("init", init, ("random", "features")),
        )
        if not 0.0 <= head_start <= 1.0:
            raise ValueError(f"head_start is a fraction of the epochs and must be in [0, 1], got {head_start}.")
        check_seeds(seed=seed)
        if isinstance(pairs, int) and pairs < 1:
            raise ValueError(f"pairs must be at least 1, got {pairs}.")
        self.pairs: list[Pair] = []
        self._drawn: Literal["all"] | int = "all"
        if isinstance(pairs, int) or pairs == "all":
            self._drawn = pairs
        else:
            self.pairs = check_pairs(pairs, same=target_zoo is not None)
        self.zoo = str(zoo)
        self.target_zoo = str(target_zoo) if target_zoo is not None else None
        self.sites = sites
        self.families: dict[str, Family] = _families(DEFAULT_MAPS if maps is None else maps)
        self.ports: stitching.Ports = ports
        self.batch_norm: stitching.BatchNormMode = batch_norm
        self.init = init
        self.head_start = head_start
        self.resize = resize
        self.seed = seed
        self.stitches: list[Stitch] = []
        self.left_out: dict[str, str] = {}
        self._zoos: dict[str, tuple[ModelZoo, int]] = {}
        self._targets: dict[str, stitching.CutNetwork] = {}
        self._target_of: list[str] = []
        self._fitted = False
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler", "maps"])
        self.save_hyperparameters({"maps": list(self.families), "_class_path": self.describe()["_class_path"]})

    @property
    def cuts(self) -> list[stitching.CutNetwork]:
        """All cut networks, the upper ones too."""
        return [*super().cuts, *self._targets.values()]

    @property
    def zoos(self) -> dict[str, tuple[ModelZoo, int]]:
        """The zoos ``"lower"`` and ``"upper"``, opened, each with the number of one member; after ``setup``."""
        return self._zoos

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Return the paper's: SGD without momentum."""
        return torch.optim.SGD(parameters, lr=1e-3, weight_decay=1e-4)

    # ---- pairs, sites, maps

    def build(self) -> None:
        """Open the zoos, cut their members and make all stitched networks."""
        lower = ModelZoo.open(self.zoo, allow=self.allow)
        upper = lower if self.target_zoo is None else ModelZoo.open(self.target_zoo, allow=self.allow)
        if upper is lower:
            require_two(lower, "Stitching")
        self.pairs = self.pairs or self._draw_pairs(lower, upper)
        for zoo, side in (lower, 0), (upper, 1):
            require_members(zoo, (pair[side] for pair in self.pairs))
        self._zoos = {"lower": (lower, self.pairs[0][0]), "upper": (upper, self.pairs[0][1])}
        self._check_inputs()
        networks: dict[str, Network] = {}
        for pair in self.pairs:
            for zoo, number in zip((lower, upper), pair, strict=True):
                networks.setdefault(self._key(zoo, number), zoo.load(number))
        example = example_input(lower, self.pairs[0][0], networks[self._key(lower, self.pairs[0][0])], self.data)
        places = self._places(*(networks[self._key(z, n)] for z, n in zip((lower, upper), self.pairs[0], strict=True)))
        below, above = (list(dict.fromkeys(place[side] for place in places)) for side in (0, 1))
        for first, second in self.pairs:
            for zoo, number, cuts, sites in ((lower, first, self.lowers, below), (upper, second, self._targets, above)):
                key = self._key(zoo, number)
                like = next((cut for cut in cuts.values()), None)
                if key not in cuts:
                    cuts[key] = stitching.CutNetwork(networks[key], sites, example=example, like=like)
        self.members = networks
        self._build_stitches(lower, upper, places)

    def _draw_pairs(self, lower: ModelZoo, upper: ModelZoo) -> list[Pair]:
        same = upper is lower
        every = [(a, b) for a in lower.numbers for b in upper.numbers if not same or a != b]
        if self._drawn == "all":
            return list(combinations(lower.numbers, 2)) if same else every
        if self._drawn > len(every):
            raise ValueError(
                f"The zoo at {lower.path} has {len(every)} ordered pairs, and {self._drawn} are asked for."
            )
        order = torch.randperm(len(every), generator=torch.Generator().manual_seed(self.seed))
        return [every[index] for index in order[: self._drawn].tolist()]

    def _check_inputs(self) -> None:
        (lower, a), (upper, b) = self._zoos["lower"], self._zoos["upper"]
        for name in ("input_shape", "num_classes"):
            one, two = (zoo.member(number).data.get(name) for zoo, number in ((lower, a), (upper, b)))
            if one is not None and two is not None and one != two:
                raise ValueError(
                    f"The members of {lower.path} have {name} {one} and those of {upper.path} {two}; stitch zoos that "
                    "were trained on the same kind of data."
                )

    def _key(self, zoo: ModelZoo, number: int) -> str:
        return str(number) if self.target_zoo is None or zoo is self._zoos["lower"][0] else f"target-{number}"

    def _places(self, lower: Network, upper: Network) -> list[SitePair]:
        """Return the pairs of sites that were asked for."""
        if self.sites == "any":
            return [(a, b) for a in lower.sites() for b in upper.sites()]
        if self.sites == "all":
            if lower.sites() != upper.sites():
                raise ValueError(
                    f"{type(lower).__name__} and {type(upper).__name__} have different sites; give pairs of them as "
                    f'sites, of {", ".join(lower.sites())} and of {", ".join(upper.sites())}, or sites="any".'
                )
            return [(site, site) for site in lower.sites()]
        if isinstance(self.sites, str) or not self.sites:
            raise ValueError(
                f'sites must be "all", "any", a list of names or a list of pairs of names, got {self.sites!r}.'
            )
        known = lower.sites(), upper.sites()
        pairs: list[SitePair] = []
        for site in self.sites:
            both = (site, site) if isinstance(site, str) else tuple(site)
            if len(both) != 2:
                raise ValueError(f"sites must be names or pairs of names, got {site!r}.")
            pairs.append((site_name(both[0], known[0]), site_name(both[1], known[1])))
        if len(set(pairs)) < len(pairs):
            raise ValueError(f"sites must be different, got {self.sites!r}.")
        return pairs

    def _build_stitches(self, lower: ModelZoo, upper: ModelZoo, places: Sequence[SitePair]) -> None:
        made: list[stitching.StitchedNetwork] = []
        for pair in self.pairs:
            below, above = self._key(lower, pair[0]), self._key(upper, pair[1])
            for site, target_site in places:
                for name, family in self.families.items():
                    stitch = Stitch(pair, site, target_site, name)
                    try:
                        with seeded(derive_seed("stitch", self.seed, *pair, site, target_site, name)):
                            branch = stitching.StitchedNetwork(
                                self.lowers[below],
                                self._targets[above],
                                site,
                                target_site,
                                family=family,
                                ports=self.ports,
                                batch_norm=self.batch_norm,
                                resize=self.resize,
                            )
                    except ValueError as error:
                        # "any" stitches the combinations that fit; named ones must, unless they are only a baseline.
                        if self.sites != "any" and family != "identity":
                            raise
                        self.left_out[f"{stitch.place}/{name}"] = str(error)
                        continue
                    made.append(branch)
                    self.stitches.append(stitch)
                    self.lower_of.append(below)
                    self._target_of.append(above)
        if not made:
            raise ValueError(f"Nothing can be stitched: {next(iter(self.left_out.values()))}")
        if self.left_out:
            rank_zero_info(f"{len(self.left_out)} combinations of sites and maps are left out, as they do not fit.")
        self.branches, self.names = tuple(made), [str(stitch) for stitch in self.stitches]

    # ---- maps that are fitted to features

    def on_fit_start(self) -> None:
        """Fit maps to features under ``init="features"``; a resumed run has them in its checkpoint."""
        super().on_fit_start()
        if not self._fitted:
            self._fit_from_features()
            self._fitted = True

    def _fit_from_features(self) -> None:
        wanted = [
            index
            for index, branch in enumerate(self.branches)
            if self.init == "features" or any(module.fitted for module in branch.stitching_maps)
        ]
        if not wanted:
            return
        if not hasattr(self.data, "curvature_dataloader"):
            raise ValueError(
                f"{self.stitches[wanted[0]].family} is fitted to features of the training data and needs a "
                f"datamodule of lightning_sym.datamodules, got {type(self.data).__name__}."
            )
        # One set of moments for all families of a pair and place.
        moments: dict[tuple[str, str, str, str], list[stitching.FeatureMoments]] = {}
        places = {self._place_of(index): self.branches[index] for index in wanted}
        for place, branch in places.items():
            moments[place] = [
                stitching.FeatureMoments(module.port.in_channels, module.port.out_channels, self.device)
                for module in branch.stitching_maps
            ]
        above = {place[1]: self._targets[place[1]] for place in places}

        def gather() -> None:
            for batch, _ in self.data.curvature_dataloader():
                # The values at all cuts of all members are held together: a batch for evaluation takes a gigabyte.
                for images in batch.to(self.device, self.dtype).split(_IMAGES_AT_ONCE):
                    below = self.population.prepared(images)
                    values = {key: cut.values(images) for key, cut in above.items()}
                    for (lower, target, site, target_site), branch in places.items():
                        branch.add_moments(
                            below[lower][site], values[target][target_site], moments[lower, target, site, target_site]
                        )

        together(gather)  # a failure on one rank, such as features that are not finite, is raised on all
        for found in moments.values():
            for one in found:
                one.reduce()
        for index in wanted:
            branch = self.branches[index]
            for module, one in zip(branch.stitching_maps, moments[self._place_of(index)], strict=True):
                if module.fitted or self.init == "features":
                    module.init_from_moments(one)

    def _place_of(self, index: int) -> tuple[str, str, str, str]:
        """Return the key of a branch's moments: both members and both sites."""
        branch = self.branches[index]
        return self.lower_of[index], self._target_of[index], branch.site, branch.target_site

    def held(self) -> list[nn.Parameter]:
        """Return the scales of group maps during the head start."""
        epochs, steps = self.trainer.max_epochs, self.trainer.max_steps
        if epochs is not None and epochs >= 0:
            over = self.current_epoch >= self.head_start * epochs
        else:
            over = self.global_step >= self.head_start * steps  # steps may be -1, for a fit without an end
        if over:
            return []
        return [p for branch in self.branches for module in branch.stitching_maps for p in module.held_parameters()]

    # ---- penalties

    def references(self, index: int) -> list[str]:
        """Return both members; Godfrey et al. (2022), eq. 4.3, in the sign of their figures."""
        return [self.lower_of[index], self._target_of[index]]

    def label(self, index: int) -> tuple[str, str]:
        """Return the place, and the family of maps."""
        return self.stitches[index].place, self.stitches[index].family

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the kept weights."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["population"]["fitted"] = self._fitted

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the kept weights."""
        super().on_load_checkpoint(checkpoint)
        self._fitted = checkpoint["population"]["fitted"]


def _families(maps: Sequence[Family]) -> dict[str, Family]:
    if isinstance(maps, str) or not maps:
        raise ValueError(f"maps must be a list of families, as [full, group, rank(1)], got {maps!r}.")
    found: dict[str, Family] = {}
    for family in maps:
        if isinstance(family, str):
            stitching.stitching_map(family)  # refuses unknown names now
            name = family
        else:
            name = _family_name(family)
        if name in found:
            raise ValueError(f"maps must be different, got {name!r} twice.")
        found[name] = family
    return found


def _family_name(family: Callable[[stitching.Port], stitching.StitchingMap]) -> str:
    """Return the name of a class or function, with the options of a ``functools.partial`` that are no defaults."""
    if not isinstance(family, functools.partial):
        return getattr(family, "__name__", None) or type(family).__name__
    # A value from YAML has the class as an argument of jsonargparse's function, and defaults among the options.
    made = next((one for one in family.args if isinstance(one, type)), family.func)
    known = inspect.signature(made).parameters
    options = {k: v for k, v in family.keywords.items() if k not in known or repr(known[k].default) != repr(v)}
    name: str = getattr(made, "__name__", None) or type(made).__name__
    return name + (f"({', '.join(f'{key}={value}' for key, value in options.items())})" if options else "")
