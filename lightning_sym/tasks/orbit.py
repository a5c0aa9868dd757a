"""Points of the orbits of trained networks: rounded, pruned, or measured by a function of their weights."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sym import orbit
from lightning_sym._checks import check_integers, check_known, check_numbers, check_seeds
from lightning_sym._distributed import gathered, rank, ranks, wide_device
from lightning_sym._random import generator
from lightning_sym._text import unknown
from lightning_sym.networks.modes import evaluating
from lightning_sym.reports.orbit import OrbitPoint
from lightning_sym.symmetry import Element, Symmetry, trace_symmetry
from lightning_sym.tasks._members import check_data, example_input
from lightning_sym.tasks._untrained import UntrainedTask
from lightning_sym.zoo import ModelZoo

Option = bool | int | float | str
# Networks that are not found by descent; Wanda differs by what is pruned only.
GIVEN = ("trained", "random", "balanced", "hadamard", "equalized", "smooth_quant", "awq", "wanda")
ROUNDINGS = {"nearest": orbit.round_to_nearest, "gptq": orbit.round_by_gptq}
FACTORS = ("scales", "cells", "gained", "rotations", "phases", "shifts", "tilts")
PROXIES = ("range", "l1")
DESCENTS = ("orbit", "random_orbit", *PROXIES, *FACTORS)
DEFAULT_ARMS = ("trained", "random", "balanced", "orbit")


class OrbitTask(UntrainedTask):
    r"""Compare networks of a zoo with other points of their orbits, by one objective with several settings.

    All points of an orbit have the same function. After rounding or pruning their functions differ: error and accuracy
    are measured on test data. Of other objectives, the value itself is compared. Nothing is trained: the fit has no
    epochs, and its report does the work.

    Arms, the ways to choose a point:

    - ``trained``: the network of the zoo.
    - ``random``: a random element of the symmetry group moves it.
    - ``balanced``: scales and heads of smallest norm.
    - ``hadamard``: Hadamard matrices rotate residual streams (QuaRot).
    - ``equalized``: equal ranges of incoming and outgoing weights (cross-layer equalisation).
    - ``smooth_quant``: scales that move outliers of activations to the weights (SmoothQuant).
    - ``awq``: scales by a power of the mean activations, found by a search over powers (AWQ).
    - ``wanda``: the network of the zoo, with weights pruned by magnitude times the norm of their input (Wanda).
    - ``orbit``: the objective is minimised over the orbit, :func:`lightning_sym.orbit.minimize_on_orbit`.
    - ``random_orbit``: likewise, from the random point.
    - ``range``, ``l1``: another kind of the objective is minimised, a function of the weights alone.
    - ``scales``, ``cells``, ``gained``, ``rotations``, ``phases``, ``shifts``, ``tilts``: only these coordinates move.

    Args:
        zoo: Folder of the zoo.
        objective: Name of an objective, one of ``lightning_sym.orbit.OBJECTIVES``. For ``quantization_error`` networks
            are rounded, for ``sparsity`` pruned, in both cases with the options of the objective.
        grid: Values of the objective's options, by option; every combination is a setting. Numbers of the first option
            are the horizontal axis of the figures.
        options: Further options of the objective, the same in all settings.
        arms: The arms, ``trained`` among them.
        some: Arms and roundings for some values of the first option only: by name, the values. Not ``trained``.
        roundings: How weights are rounded, ``nearest`` or ``gptq``; with several, each arm is rounded in all ways.
        members: How many members, the first ones, >= 1; None for all.
        images: Number of training inputs for the descents and for SmoothQuant, AWQ, GPTQ and Wanda, >= 1.
        steps: Most steps of a descent, >= 1.
        lr: Learning rate of Adam, > 0.
        orbit_seed: Seed of random elements and of the choice of training inputs, >= 0.
        allow: Your own packages with networks of the zoo, see ``ModelZoo.open``.

    Attributes:
        model_zoo: The zoo, opened; after ``setup``.
        symmetry: Symmetry of its networks; after ``setup``.
        results: The latest results of :meth:`measure_all`.

    Raises:
        ValueError: If an argument is out of its range, or there is no such objective, option, arm or rounding.

    References:
        docs/theory/orbit.md. Nagel et al. (2019), arXiv:1906.04721; Xiao et al. (2023), arXiv:2211.10438; Ashkboos et
        al. (2024), arXiv:2404.00456; Sun et al. (2024), arXiv:2306.11695; Frantar et al. (2023), arXiv:2210.17323; Lin
        et al. (2024), arXiv:2306.00978.

    Example:
        >>> task = OrbitTask("runs/zoo-digits-mlp/zoo", "quantization_error", {"bits": [3, 4]})
        >>> task.settings
        [{'bits': 3}, {'bits': 4}]
    """

    model_zoo: ModelZoo
    symmetry: Symmetry
    results: list[OrbitPoint]

    def __init__(
        self,
        zoo: str,
        objective: str = "quantization_error",
        grid: dict[str, list[Option]] | None = None,
        options: dict[str, Option] | None = None,
        arms: Sequence[str] = DEFAULT_ARMS,
        some: dict[str, list[Option]] | None = None,
        roundings: Sequence[str] = ("nearest",),
        members: int | None = None,
        images: int = 256,
        steps: int = 100,
        lr: float = 0.02,
        orbit_seed: int = 0,
        allow: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_integers(optional=True, members=members)
        check_integers(images=images, steps=steps)
        check_seeds(orbit_seed=orbit_seed)
        check_numbers("> 0", lr=lr)
        self.grid = {name: list(values) for name, values in (grid or {}).items()}
        if empty := [name for name, values in self.grid.items() if not values or len(set(values)) < len(values)]:
            raise ValueError(f"grid must have different values of each option, got {empty[0]}: {self.grid[empty[0]]}.")
        self.settings = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        self.objective, self.options = objective, dict(options or {})
        self.arms, self.some = tuple(arms), {arm: list(values) for arm, values in (some or {}).items()}
        if "trained" not in self.arms or len(set(self.arms)) < len(self.arms):
            raise ValueError(f'arms must be different, "trained" among them, got {list(self.arms)}.')
        for arm in self.arms:
            check_known("arm", arm, (*GIVEN, *DESCENTS))
            self._objective(arm, self.settings[0])
        for setting in self.settings:
            self._objective("trained", setting)
        self.roundings = tuple(roundings)
        for rounding in self.roundings:
            if rounding not in ROUNDINGS:
                raise ValueError(unknown("rounding", rounding, ROUNDINGS))
        if not self.roundings or len(set(self.roundings)) < len(self.roundings):
            raise ValueError(f"roundings must be different, at least one, got {list(self.roundings)}.")
        known = [name for name in (*self.arms, *self.roundings[1:]) if name != "trained"]
        if other := [name for name in self.some if name not in known]:
            raise ValueError(unknown("arm of some", other[0], known))
        if "wanda" in self.arms and objective != "sparsity":
            raise ValueError(f"the arm wanda prunes, but the objective is {objective}; leave it out of arms.")
        if objective != "quantization_error" and ("awq" in self.arms or self.roundings != ("nearest",)):
            what = "arm awq" if "awq" in self.arms else "rounding gptq"
            raise ValueError(f"the {what} rounds, but the objective is {objective}; leave it out.")
        self.zoo, self.members, self.images, self.steps, self.lr = str(zoo), members, images, steps, lr
        self.orbit_seed, self.allow = orbit_seed, tuple(allow or ())
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Open the zoo and find the symmetry of its networks, on every process.

        Raises:
            FileNotFoundError: If there is no zoo.
            ValueError: If the data do not fit the networks, or their symmetry has no coordinates of a kind that an arm
                moves.
        """
        data, self.results = getattr(self.trainer, "datamodule", None), []
        self.model_zoo = ModelZoo.open(self.zoo, allow=self.allow)
        number = self.numbers[0]
        trial = bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        check_data(self.model_zoo, number, data, trial=trial)
        network = self.model_zoo.load(number)
        self.symmetry = trace_symmetry(network, example_input(self.model_zoo, number, network, data))
        for arm in self.arms:
            if arm in FACTORS:
                orbit.OrbitDirections(self.symmetry, arm)

    @property
    def numbers(self) -> list[int]:
        """The indices of the members that are compared; after ``setup``."""
        return self.model_zoo.numbers[: self.members]

    @property
    def changes(self) -> bool:
        """Whether networks are rounded or pruned."""
        return self.objective in ("quantization_error", "sparsity")

    def _objective(self, arm: str, setting: Mapping[str, Option]) -> orbit.Objective:
        """Return the objective of an arm."""
        kind = {"kind": arm} if arm in PROXIES else {}
        return orbit.objective_named(self.objective, **{**self.options, **setting, **kind})

    # ---- measurements

    def measure_all(self, data: Any, device: torch.device, progress: Callable[[int, int], None]) -> list[OrbitPoint]:
        """Measure all arms of all members in all settings; to be called on every process, which share them.

        Args:
            data: An in-memory datamodule.
            device: Where networks are run, in float64.
            progress: Called with the numbers of completed arms and of all, of this process.
        """
        device = wide_device(device)
        calibration, test = self._calibration(data, device), _inputs(data, "test", device)
        jobs = [(number, arm) for arm in self.arms for number in self.numbers]
        own = list(enumerate(jobs))[rank() :: ranks()]
        found = []
        for done, (place, (number, arm)) in enumerate(own, 1):
            network = self.model_zoo.load(number).to(device, torch.float64)
            found.append((place, self._measured(network, number, arm, calibration, test)))
            progress(done, len(own))
        in_order = sorted(itertools.chain.from_iterable(gathered(found)), key=lambda one: one[0])
        self.results = [point for _, points in in_order for point in points]
        return self.results

    def _calibration(self, data: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return randomly chosen training inputs with their targets."""
        inputs, targets = _inputs(data, "train", device)
        order = torch.randperm(len(inputs), generator=generator("orbit", self.orbit_seed, "images"))
        chosen = order[: self.images].to(device)
        return inputs[chosen], targets[chosen]

    def _measured(
        self,
        network: nn.Module,
        number: int,
        arm: str,
        calibration: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
    ) -> list[OrbitPoint]:
        """Measure one arm of one member in all settings."""
        start: Any = self._start(arm, network, number, calibration)
        with torch.no_grad(), evaluating(network):
            whole = network(test[0]) if self.changes else None
        points = []
        for setting in self.settings:
            if not self._has(arm, setting):
                continue
            if arm == "awq":
                start = self._awq(network, setting, calibration)
            found = self._found(arm, network, setting, calibration, start)
            if arm in GIVEN:
                start = found.element  # the same in all settings
            values = {"change": found.change}
            if arm != "wanda":  # which has another rule than the objective
                values["objective"] = found.after
            if arm in DESCENTS:
                values["seconds"] = found.history[-1].seconds
            if arm in PROXIES:
                values["objective"] = self._found("trained", network, setting, calibration, found.element).after
            if self.changes:
                for rounding in self.roundings:
                    if self._has(rounding, setting):
                        changed = self._changed(arm, found.network, {**self.options, **setting}, calibration, rounding)
                        own = {**values, **_compared(changed, whole, *test)}
                        named = {"rounding": rounding} if len(self.roundings) > 1 else {}
                        points.append(OrbitPoint(number, arm, {**setting, **named}, own))
                        values = {"change": found.change}  # the others are of the point, and given once
                continue
            if self._objective(arm, setting).reads_data:
                values["objective_test"] = self._found("trained", network, setting, test, found.element).after
            points.append(OrbitPoint(number, arm, setting, values))
        return points

    def _has(self, name: str, setting: Mapping[str, Option]) -> bool:
        """Return whether an arm or a rounding is measured in a setting."""
        return name not in self.some or next(iter(setting.values())) in self.some[name]

    def _awq(self, network: nn.Module, setting: Mapping[str, Option], calibration: tuple[Tensor, Tensor]) -> Element:
        """Return the element of AWQ."""
        given: dict[str, Any] = {**self.options, **setting}
        own = {name: given[name] for name in ("bits", "granularity") if name in given}
        return orbit.awq(self.symmetry, network, calibration, **own)

    def _start(self, arm: str, network: nn.Module, number: int, calibration: tuple[Tensor, Tensor]) -> Any:
        """Return the point where an arm begins, as :func:`lightning_sym.orbit.minimize_on_orbit` takes it."""
        if arm in ("random", "random_orbit"):
            return self.symmetry.sample(generator("orbit", self.orbit_seed, number))
        if arm == "equalized":
            return orbit.cross_layer_equalization(self.symmetry, network)
        if arm == "smooth_quant":
            return orbit.smooth_quant(self.symmetry, network, calibration)
        if arm in ("trained", "wanda"):
            return self.symmetry.identity()  # None would let closed forms move it
        return arm if arm in ("balanced", "hadamard") else None

    def _found(
        self, arm: str, network: nn.Module, setting: Mapping[str, Option], data: tuple[Tensor, Tensor], start: Any
    ) -> orbit.OrbitMinimum:
        """Return the point of an arm; one that is given is where no step is made."""
        return orbit.minimize_on_orbit(
            self.symmetry,
            network,
            self._objective(arm, setting),
            data=data,
            factors=arm if arm in FACTORS else None,
            lr=self.lr,
            max_steps=self.steps if arm in DESCENTS else 0,
            start=start,
            seed=self.orbit_seed,
        )

    def _changed(
        self, arm: str, network: nn.Module, options: Mapping[str, Any], calibration: Any, rounding: str
    ) -> nn.Module:
        """Return the rounded or pruned network."""
        given = {name: value for name, value in options.items() if name != "kind"}  # which is of the objective alone
        if self.objective == "quantization_error":
            needed = rounding == "gptq" or "activations" in given
            given = {"bits": 4, **given, **({"data": calibration} if needed else {})}
            return ROUNDINGS[rounding](network, **given)
        if arm == "wanda":
            return orbit.prune_by_wanda(network, calibration, **given)
        return orbit.prune_by_magnitude(network, **given)


def _inputs(data: Any, split: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return all inputs of a split, normalised, in float64, and their targets."""
    inputs, targets = data.split_tensors(split)
    normalised = data.normalize(inputs)
    if normalised.is_floating_point():
        normalised = normalised.double()
    return normalised.to(device), targets.to(device)


def _compared(changed: nn.Module, before: Any, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the relative squared error against the outputs of the whole network, and with classes both accuracies."""
    with torch.no_grad(), evaluating(changed):
        after = changed(inputs)
    found = {"error": float((after - before).square().sum() / before.square().sum())}
    if not targets.is_floating_point():
        for name, outputs in (("accuracy", after), ("whole_accuracy", before)):
            found[name] = float((outputs.argmax(-1) == targets).double().mean())
    return found
