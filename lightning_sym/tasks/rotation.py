"""Rotate the units before one activation, and retrain the layers after it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sym import stitching
from lightning_sym._checks import check_different, check_integers, check_seeds
from lightning_sym._linear_algebra import random_orthogonal
from lightning_sym._random import generator
from lightning_sym.networks.base import site_name
from lightning_sym.symmetry import Element
from lightning_sym.tasks._branches import BranchTask
from lightning_sym.tasks._members import example_input
from lightning_sym.zoo import ModelZoo

DEFAULT_KINDS = ("group", "orthogonal")
# Relative to the largest output. Rounding alone stays far below, a wrong matrix is far above.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
_ADVICE = "leave this site out of sites, or group and undo out of kinds"


@dataclass(frozen=True)
class Rotation:
    """A rotation: its place and kind.

    Attributes:
        member: The member's number.
        site: The activation after the map.
        kind: Kind of map: see :class:`RotationTask`.
        repeat: Number of the draw, from 0.
    """

    member: int
    site: str
    kind: str
    repeat: int

    def __str__(self) -> str:
        return f"member-{self.member}/{self.site}/{self.kind}/repeat-{self.repeat}"


class RotationTask(BranchTask):
    r"""Rotate the units before an activation of a trained network, then retrain the layers after it.

    For a member of a zoo and a site, the values :math:`W_m x + b_m` before the activation become
    :math:`T (W_m x + b_m)`, with a fixed random ``T`` that mixes channels. Layers before ``T`` are frozen. The layers
    after it start from the member's weights and are trained. The rotation penalty is the accuracy of the member less
    that of the trained network. If ``T`` belongs to the symmetry group, the layers after it can invert it exactly, and
    training has to find the inverse. The inverse of another orthogonal matrix does not pass through the
    activation.

    Kinds of ``T``:

    - ``"group"``: a random element of the intertwiner group of the activation: a uniform permutation, and where the
      group has them scales :math:`\exp(s z - s^2 / 2)` (mean 1, ``z`` standard normal) and signs.
    - ``"orthogonal"``: a random orthogonal matrix (Haar measure).
    - ``"none"``: no ``T``; shows the effect of further training alone. It has one repeat, as nothing is drawn.
    - ``"undo"``: the ``T`` of ``"group"`` of the same repeat, with its inverse applied to the layers after it, and no
      training: the oracle, with penalty 0.

    Several values cross a cut within a residual block; only the one before the activation is rotated.

    Branches share only the frozen bottom layers. A fit trains the top layers of members x sites x kinds x repeats
    networks one after another, and holds all of them. Batch norms of the top layers are trained as usual. Use it with
    :class:`lightning_sym.callbacks.RotationReport`, which makes the table and the figure. Tests use the weights of the
    epoch with the best validation accuracy, branch by branch; the last ones if there are no validation data.

    Args:
        zoo: Folder of the zoo.
        members: ``"all"``, or a list of numbers.
        sites: Names of the activations to rotate before, or ``"all"``. Default all but the last, as in the paper;
            the only one if there is one.
        kinds: Which of the kinds above, each once.
        repeats: How many are drawn for each member, site and kind. >= 1.
        scale: ``s`` above, the standard deviation of the scales' logarithms. >= 0.
        seed: Seed of all draws, which depend on it, the member, site, kind and repeat only. >= 0.
        optimizer: Makes the optimizer; default that of the paper's zoos, Adam with learning rate 1e-3 and weight decay
            1e-4.
        weight_decay_on: ``"all"`` parameters, or ``"weights"``: those with "weight" in their name, batch norm's
            included, biases not (the paper's code).
        lr_scheduler: Makes its scheduler, stepped after each epoch; default none.
        channels_last: Lay images and weights out with the channels last: the same numbers up to rounding, often faster.
        allow: Your own packages with networks of the zoo, see ``ModelZoo.open``.

    Attributes:
        known_kinds: Class attribute: the kinds there are; a subclass that adds some in :meth:`rotate` names them here.
        rotations: The branches, in order; after ``setup``.

    Logged after each epoch: ``train/loss`` (mean over all), and on the validation split, in fractions, the penalties as
    means over members, repeats and sites ``penalty/<kind>``, and for each site ``penalty/<site>/<kind>`` (where there
    are up to 15 curves; otherwise as details); ``test_penalty/...`` when tested. In ``metrics.csv``, and in TensorBoard
    with ``--log_details true``: ``details/member-0/<site>/<kind>/repeat-0/train_loss``, ``.../val_accuracy``,
    ``.../val_loss``.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Godfrey, Brown, Emerson, Kvinge (2022), "On the Symmetries of Deep Learning Models and their Internal
        Representations", arXiv:2205.14258, section 3.3. Different: epochs are chosen on validation images. The kinds
        "none" and "undo" are ours.

    Example:
        >>> RotationTask("runs/zoo-mnist5k-lenet/zoo", repeats=3).kinds
        ('group', 'orthogonal')
    """

    known_kinds: ClassVar[tuple[str, ...]] = ("group", "orthogonal", "none", "undo")

    def __init__(
        self,
        zoo: str,
        members: Literal["all"] | list[int] = "all",
        sites: Literal["all"] | list[str] | None = None,
        kinds: Sequence[str] = DEFAULT_KINDS,
        repeats: int = 10,
        scale: float = 1.0,
        seed: int = 0,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        weight_decay_on: Literal["all", "weights"] = "weights",
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        channels_last: bool = False,
        allow: Sequence[str] | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, channels_last, allow, weight_decay_on)
        check_integers(repeats=repeats)
        if not (math.isfinite(scale) and scale >= 0):
            raise ValueError(f"scale must be a finite number >= 0, got {scale}.")
        check_seeds(seed=seed)
        if members != "all":
            check_different("members", members, of="numbers")
        if sites not in (None, "all"):
            check_different("sites", sites)
        check_different("kinds", kinds, self.known_kinds)
        self.zoo = str(zoo)
        self._members: Literal["all"] | list[int] = members
        self.sites = sites
        self.kinds = tuple(kinds)
        self.repeats = repeats
        self.scale = scale
        self.seed = seed
        self.rotations: list[Rotation] = []
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.save_hyperparameters({"kinds": list(kinds), "_class_path": self.describe()["_class_path"]})

    @property
    def zoos(self) -> dict[str, tuple[ModelZoo, int]]:
        """The zoo, with the number of one member; after ``setup``."""
        return {"zoo": (self.model_zoo, int(next(iter(self.members))))}

    # ---- optimizer

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Return the paper's: Adam."""
        return torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-4)

    # ---- rotations

    def generator(self, rotation: Rotation) -> torch.Generator:
        """Return a generator that depends on the seed and the rotation only."""
        drawn = "group" if rotation.kind == "undo" else rotation.kind  # the oracle inverts the draw of the group kind
        return generator("rotation", self.seed, rotation.member, rotation.site, drawn, rotation.repeat)

    def rotate(
        self, rotation: Rotation, source: stitching.CutNetwork, example: Tensor
    ) -> tuple[Callable[[stitching.Port], stitching.StitchingMap], stitching.CutNetwork]:
        """Return the factory of the map before the activation, and the network of the top layers.

        A subclass may add kinds here, or redefine existing ones.

        Args:
            rotation: The rotation.
            source: The member, cut before its activations.
            example: Images of the right size.

        Raises:
            ValueError: If there is no such rotation at the site.
        """
        random = self.generator(rotation)
        if rotation.kind == "none":
            return stitching.IdentityMap, source
        if rotation.kind == "orthogonal":
            matrix, behind = random_orthogonal(source.crossings(rotation.site)[0].channels, random), source
            matrix = matrix.to(example.dtype)
        else:
            matrix, undone = rotate_by_group(source, rotation.site, example, random, scale=self.scale)
            behind = undone if rotation.kind == "undo" else source
        return (lambda port: stitching.FixedMap(port, matrix)), behind

    def build(self) -> None:
        """Open the zoo, cut its members and make all networks."""
        zoo = self.model_zoo
        numbers = list(zoo.numbers) if self._members == "all" else self._members
        self.members = {str(number): zoo.load(number) for number in numbers}
        first = self.members[str(numbers[0])]
        example = example_input(zoo, numbers[0], first, self.data)
        sites = self._sites(first.sites())
        for key, network in self.members.items():
            like = next(iter(self.lowers.values()), None)
            self.lowers[key] = stitching.CutNetwork(network, sites, example=example, before=True, like=like)
        self.rotations = [
            Rotation(number, site, kind, repeat)
            for number in numbers
            for site in sites
            for kind in self.kinds
            for repeat in range(1 if kind == "none" else self.repeats)
        ]
        self.lower_of = [str(rotation.member) for rotation in self.rotations]
        self.names = list(map(str, self.rotations))
        self.branches = tuple(self._branch(rotation, example) for rotation in self.rotations)

    def _sites(self, known: Sequence[str]) -> list[str]:
        if self.sites is None:
            return list(known[:-1] or known)
        if isinstance(self.sites, str):
            return list(known)
        sites = [site_name(site, known) for site in self.sites]
        if unknown := [site for site in sites if site not in known]:
            raise ValueError(f"The network has no site {unknown[0]!r}; it has {', '.join(known)}.")
        return sites

    def _branch(self, rotation: Rotation, example: Tensor) -> stitching.StitchedNetwork:
        source = self.lowers[str(rotation.member)]
        first = source.crossings(rotation.site)[0]
        if not first.mapped:
            raise ValueError(
                f"The values before {rotation.site!r} are the network's input or have no channels, and cannot be "
                "rotated; leave this site out of sites."
            )
        family, behind = self.rotate(rotation, source, example)
        oracle = rotation.kind == "undo"
        return stitching.StitchedNetwork(
            source,
            behind,
            rotation.site,
            family=family,
            ports="branch",
            batch_norm="frozen" if oracle else "batch",
            train_upper=not oracle,
        )

    # ---- penalties

    def label(self, index: int) -> tuple[str, str]:
        """Return the site, and the kind of rotation."""
        return self.rotations[index].site, self.rotations[index].kind


def element_at(
    source: stitching.CutNetwork, site: str, generator: torch.Generator | None = None, *, scale: float = 1.0
) -> Element:
    r"""Draw an element of a network's symmetry that changes the units at one site, and no others.

    As far as the group at the site has them: a uniform permutation, signs that are fair coins, and scales
    :math:`d = \exp(s z - s^2 / 2)` (mean 1, ``z`` standard normal) of the values that cross the cut; without an
    activation, a matrix with singular values :math:`\exp(s z)`. Units of a residual stream are the same
    all along the stream.

    Args:
        source: The network, cut at the site.
        site: Where.
        generator: Where randomness comes from.
        scale: ``s``, the standard deviation of the scales' logarithms, >= 0.

    Returns:
        The element of ``source.symmetry``.

    Raises:
        ValueError: If the network is not cut there, the group moves nothing there, or ``scale`` is out of range.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 3.3, for scales with s = 1.
    """
    if site not in source.sites:
        raise ValueError(f"The network is not cut at {site!r}, only at {', '.join(source.sites)}.")
    if not 0 <= scale < float("inf"):
        raise ValueError(f"scale must be a finite number >= 0, got {scale}.")
    first = source.crossings(site)[0]
    if not first.mapped:
        raise ValueError(f"What crosses the cut at {site!r} is the network's input or has no channels; {_ADVICE}.")
    group = first.group
    if not (group.permutations or group.positive_scales or group.signs or group.dense):
        raise ValueError(f"The symmetry group does not change what crosses the cut at {site!r}; {_ADVICE}.")
    symmetry = source.symmetry
    (seen,) = symmetry.taps[f"{site}/0"].seen
    return symmetry.sample_at(seen, generator, scale=scale)


def rotate_by_group(
    source: stitching.CutNetwork,
    site: str,
    example: Tensor,
    generator: torch.Generator | None = None,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, stitching.CutNetwork]:
    """Draw an element of the group before an activation; return its matrix, and the network that inverts it.

    The layers of that network above the cut map the changed values to the outputs of the source. All other values at
    the cut are unchanged.

    Args:
        source: The network, cut before its activations.
        site: Where.
        example: Images for the check that the outputs agree, in the weights' dtype. Shape ``[N, C, H, W]``.
        generator: Where randomness comes from.
        scale: Standard deviation of the logarithms of scales, >= 0; see :func:`element_at`.

    Returns:
        The matrix ``[C, C]`` that acts on the values' channels, in the weights' dtype; the network, cut there.

    Raises:
        ValueError: If the symmetry has no element that moves only these values at the cut, or the function changes.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 3.3 for the matrix; the exact undoing is ours.
    """
    planted = stitching.PlantedStitches(source, element_at(source, site, generator, scale=scale))
    matrix, *others = planted.matrices(site)
    assert matrix is not None
    for crossing, other in zip(source.crossings(site)[1:], others, strict=True):
        if other is not None and not torch.equal(other, torch.eye(len(other), dtype=other.dtype)):
            raise ValueError(
                f"No element of the symmetry group changes the values before {site!r} alone: {crossing.name}, "
                f"which crosses the same cut, has the same units; {_ADVICE}."
            )
    undone = stitching.CutNetwork(planted.network, [site], example=example, before=True, like=source)
    port = stitching.Port(len(matrix), len(matrix), axis=source.crossings(site)[0].axis)
    with torch.no_grad():
        value, *rest = source.values(example)[site]
        found = undone.upper(site)((stitching.FixedMap(port, matrix)(value), *rest))
        expected = source.network(example)
        largest = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
        error = float((found - expected).abs().max() / largest)
    if not error <= _TOLERANCES.get(matrix.dtype, 0.1):
        raise ValueError(
            f"The element of the symmetry group that was drawn for {site!r} changes the network's output, by "
            f"{error:.1e} of its largest value, which it should not; {_ADVICE}."
        )
    return matrix, undone
