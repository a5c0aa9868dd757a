"""Dissection of the members of zoos: concepts of single units, in the network's basis and in rotated ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_sym import dissection
from lightning_sym._checks import check_different, check_integers, check_known, check_numbers, check_seeds
from lightning_sym._distributed import wide
from lightning_sym._random import generator
from lightning_sym.datamodules import BrodenDataModule, ConceptsDataModule
from lightning_sym.dissection.networks import shape_of_maps
from lightning_sym.networks.base import site_name
from lightning_sym.reports.dissection import BestUnit, Dissected
from lightning_sym.symmetry import Symmetry, trace_symmetry
from lightning_sym.tasks._members import check_data, example_input
from lightning_sym.tasks._untrained import UntrainedTask
from lightning_sym.zoo import ModelZoo

# The datamodules with masks of concepts.
ConceptData: TypeAlias = ConceptsDataModule | BrodenDataModule
ALPHAS = tuple(step / 10 for step in range(11))
_HALFWAY = 0.5  # with the end, the evaluated points on the path to a permutation


class DissectionTask(UntrainedTask):
    r"""Count the concepts that single units detect, in the networks' own basis and on paths to random ones.

    The activations :math:`a` of a layer are dissected in the bases :math:`Q^\alpha a`, on the shortest path from the
    identity (:math:`\alpha = 0`, the units themselves) to a random rotation Q (:math:`\alpha = 1`), another one for
    each member. A unit detects a concept if the positions of its largest activations overlap those of the concept by
    more than ``least``. Nothing is trained: the fit has no epochs, and its report does the work.

    Each result has three controls. ``"group"`` replaces the rotation by a random element of the network's symmetry
    (permutations and positive scales, which also scale the thresholds): nothing may change. ``"permutation"`` takes a
    random even permutation, in the middle of the path and at its end, where nothing may have changed. ``"untrained"``
    takes the network's initial weights.

    Args:
        zoos: Folders of zoos, by their names in tables and figures.
        site: Name of the module whose output is dissected, maps of activations; or names by the name of the zoo.
            Default the last activation; it need not be an activation.
        members: How many members of each zoo, the first ones, >= 1; None for all.
        alphas: Points of the path, in [0, 1], 0 and 1 among them; default 0, 0.1, ..., 1.
        top: Fraction of a unit's activations above its threshold, in (0, 1); 0.005 is that of network dissection.
        least: A unit detects a concept above this intersection over union, in [0, 1); network dissection has 0.04.
        basis_seed: Seed of rotations, permutations and elements, >= 0.
        controls: Whether the controls are run.
        allow: Your own packages with networks of the zoos, see ``ModelZoo.open``.

    Attributes:
        zoos: The zoos, opened; after ``setup``.
        sites: The site of each zoo's networks; after ``setup``.
        results: The latest results of :meth:`dissect_all`.

    Raises:
        ValueError: If an argument is out of its range.

    References:
        Godfrey et al. (2022), arXiv:2205.14258, section 6 and appendix F; Bau et al. (2017), arXiv:1704.05796.
        The controls are ours; docs/theory/dissection.md, 1 and 4.
    """

    zoos: dict[str, ModelZoo]
    sites: dict[str, str]
    results: list[Dissected]

    def __init__(
        self,
        zoos: dict[str, str],
        site: str | dict[str, str] | None = None,
        members: int | None = None,
        alphas: list[float] | None = None,
        top: float = 0.005,
        least: float = 0.04,
        basis_seed: int = 0,
        controls: bool = True,
        allow: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(zoos, Mapping) or not zoos:
            raise ValueError(f"zoos must be folders of zoos by their names, as {{relu: runs/zoo/zoo}}, got {zoos!r}.")
        for name in site if isinstance(site, Mapping) else ():
            check_known("zoo", name, list(zoos))
        check_integers(optional=True, members=members)
        points = ALPHAS if alphas is None else alphas
        check_different("alphas", points, of="numbers")
        for alpha in points:
            check_numbers("in [0, 1]", alphas=alpha)
        if not {0.0, 1.0} <= set(points):
            raise ValueError(f"alphas must be different numbers, 0 and 1 among them, got {list(points)}.")
        check_numbers("in (0, 1)", top=top)
        check_numbers("in [0, 1)", least=least)
        check_seeds(basis_seed=basis_seed)
        self.folders = {name: str(folder) for name, folder in zoos.items()}
        self.site, self.members, self.alphas = site, members, tuple(sorted(points))
        self.top, self.least, self.basis_seed, self.controls = top, least, basis_seed, controls
        self.allow = tuple(allow or ())
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Open the zoos, on every process.

        Raises:
            FileNotFoundError: If there is no zoo.
            TypeError: If the data have no masks of concepts.
            ValueError: If the data do not fit the networks, or networks have no such site, or one without maps.
        """
        data = getattr(self.trainer, "datamodule", None)
        if missing := [
            name
            for name in ("concepts", "concept_classes", "concept_dataloader", "mean", "std")
            if not hasattr(data, name)
        ]:
            raise TypeError(
                f"DissectionTask needs data with masks of concepts, and {type(data).__name__} has no "
                f"{' and no '.join(missing)}; use ConceptsDataModule or BrodenDataModule."
            )
        self.zoos = {name: ModelZoo.open(folder, allow=self.allow) for name, folder in self.folders.items()}
        self.sites, self.results = {}, []
        for name, zoo in self.zoos.items():
            network = zoo.load(zoo.numbers[0])
            sites = network.sites()
            site = self.site.get(name) if isinstance(self.site, Mapping) else self.site
            known = dict.fromkeys([*sites, *filter(None, dict(network.named_modules()))])
            self.sites[name] = sites[-1] if site is None else site_name(site, list(known))
            check_known("site", self.sites[name], list(known))
            check_data(zoo, zoo.numbers[0], data, trial=True)
            shape_of_maps(network, self.sites[name], example_input(zoo, zoo.numbers[0], network, data))

    # ---- dissection

    def members_of(self, name: str) -> list[int]:
        """Return the numbers of the members of a zoo that are dissected."""
        return self.zoos[name].numbers[: self.members]

    def dissect_all(
        self, data: ConceptData, device: torch.device, progress: Callable[[int, int], None]
    ) -> list[Dissected]:
        """Dissect all networks in all bases; to be called on every process.

        Args:
            data: Images with masks of concepts.
            device: Where networks are run.
            progress: Called with the numbers of networks that are done and of all.
        """
        jobs = [
            (name, number, network)
            for name in self.zoos
            for number in self.members_of(name)
            for network in (("trained", "untrained") if self.controls else ("trained",))
        ]
        self.results = []
        symmetries: dict[str, Symmetry] = {}
        for done, (name, number, kind) in enumerate(jobs):
            zoo, site = self.zoos[name], self.sites[name]
            network = zoo.load(number)
            example = example_input(zoo, number, network, data)
            if self.controls and name not in symmetries:
                symmetries[name] = trace_symmetry(network, example, nullity=False, exchange=False)
            if kind == "untrained":
                network = network.fresh(number)
            channels = shape_of_maps(network, site, example)[1]
            bases = self._bases(number, kind, channels, symmetries.get(name), site)
            loader = data.concept_dataloader()
            found = dissection.dissect(
                network.to(device),
                site,
                torch.stack([matrix for _, _, matrix in bases]),
                loader,
                images=loader.total,
                example=example[:1],
                concepts=len(data.concepts),
                classes=data.concept_classes,
                top=self.top,
            )
            self.results += [
                Dissected(name, number, kind, basis, alpha, one)
                for (basis, alpha, _), one in zip(bases, found, strict=True)
            ]
            progress(done + 1, len(jobs))
        return self.results

    def best_units(self, data: ConceptData, device: torch.device, *, units: int, images: int) -> list[BestUnit]:
        """Find the units with the largest overlaps in three bases, and the images to which they respond most.

        Call it on every process, after :meth:`dissect_all`.

        Args:
            data: The images that :meth:`dissect_all` was given.
            device: Where networks are run.
            units: Units of each basis, >= 1; of equal overlaps the first ones.
            images: Images of each unit, >= 1.

        Returns:
            Units of the first member of each zoo, in its own basis, at the point of the path nearest to its middle, and
            at its end, the largest overlap of each basis first.

        Raises:
            ValueError: If ``units`` or ``images`` is below 1.
        """
        check_integers(units=units, images=images)
        found = []
        for name, zoo in self.zoos.items():
            number, chosen = zoo.numbers[0], []
            rotated = {
                one.alpha: one.found
                for one in self.results
                if (one.zoo, one.member, one.network, one.basis) == (name, number, "trained", "rotation")
            }
            path = self._path(number, rotated[0.0].overlaps.shape[0])
            for alpha in dissection.three_places(self.alphas):
                detected = rotated[alpha].detectors(self.least)
                order = detected.overlap.sort(descending=True, stable=True).indices[:units].tolist()
                basis = path.at(alpha)
                chosen += [(alpha, unit, detected, basis[unit], rotated[alpha].thresholds[unit]) for unit in order]
            strongest = dissection.strongest_images(
                zoo.load(number).to(device),
                self.sites[name],
                torch.stack([direction for *_, direction, _ in chosen]),
                torch.stack([threshold for *_, threshold in chosen]),
                (batch.images for batch in data.concept_dataloader()),
                count=images,
            )
            for (alpha, unit, detected, _, _), own in zip(chosen, strongest, strict=True):
                concept, overlap = int(detected.concept[unit]), float(detected.overlap[unit])
                found.append(BestUnit(name, number, alpha, unit, concept, overlap, _shown(own, data)))
        return found

    def _path(self, number: int, channels: int) -> dissection.Geodesic:
        """Return the path from the own basis of a member to its rotation."""
        return dissection.Geodesic(
            dissection.random_rotation(channels, generator("dissection", "rotation", self.basis_seed, number))
        )

    def _bases(
        self, number: int, kind: str, channels: int, symmetry: Symmetry | None, site: str
    ) -> list[tuple[str, float, Tensor]]:
        """Return the bases for dissection: kind, position on the path, matrix."""

        def source(what: str) -> torch.Generator:
            return generator("dissection", what, self.basis_seed, number)

        rotation = self._path(number, channels)
        bases = [("rotation", alpha, rotation.at(alpha)) for alpha in self.alphas]
        if symmetry is not None and kind == "trained":
            permutation = dissection.Geodesic(dissection.random_permutation_matrix(channels, source("permutation")))
            bases += [("permutation", alpha, permutation.at(alpha)) for alpha in (_HALFWAY, 1.0)]
            bases.append(("group", 1.0, group_matrix(symmetry, site, source("group"))))
        return bases


def _shown(strongest: dissection.StrongestImages, data: ConceptData) -> dissection.StrongestImages:
    """Return the images with values in [0, 1], as they were before normalisation."""
    images = strongest.images.float()
    if data.mean is not None and data.std is not None:
        mean, std = (torch.tensor(list(values)).view(-1, 1, 1) for values in (data.mean, data.std))
        images = images * std + mean
    return replace(strongest, images=images.clamp(0, 1))


def group_matrix(symmetry: Symmetry, site: str, source: torch.Generator) -> Tensor:
    """Return the action on channels of a random permutation with positive scales, from a network's symmetry.

    Args:
        symmetry: The symmetry.
        site: Name of the tap.
        source: Source of randomness.

    Returns:
        Shape ``[C, C]``, float64.
    """
    element = symmetry.sample(source, signs=False, mixing=False, shifts=False)
    channels = symmetry.taps[site].shape[1]
    places = (1,) * (len(symmetry.taps[site].shape) - 2)
    units = torch.eye(channels, dtype=wide(torch.device("cpu"))).reshape(channels, channels, *places)
    return symmetry.on_activations(element, site).apply(units).reshape(channels, channels).T.contiguous()
