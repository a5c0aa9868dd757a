"""Predicting a metric of networks from their weights, in forms that know more or less of the symmetry."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_sym._checks import check_different, check_integers, check_numbers
from lightning_sym._random import derive_seed, generator, seeded
from lightning_sym.population import LoopPopulation
from lightning_sym.tasks.population import PopulationTask
from lightning_sym.tasks.population_interface import ByMember, Rows
from lightning_sym.zoo import ModelZoo
from lightning_sym.zoo_weights import FORMS, Form, WeightSpace


class WeightRegressor(nn.Module):
    """An MLP with one hidden layer on the weights of networks; inputs ``[B, 2, P]``, outputs ``[B, 1]``.

    Features and outputs are standardised by means and standard deviations over the training data, so that all
    predictors start near the mean target; features that vary by less than 1e-5 of their size are only centred.

    Args:
        form: Which form of the weights is read.
        size: Number of weights, ``P``.
        sizes: Numbers of entries of the tensors, if features are their statistics: mean, standard deviation, third
            central moment over the variance, fourth root of the fourth, minimum and maximum of each. None: features are
            the weights.
        hidden: Number of hidden units.
    """

    mean: Tensor
    deviation: Tensor
    target_mean: Tensor
    target_deviation: Tensor

    def __init__(self, form: Form, size: int, sizes: Sequence[int] | None, hidden: int) -> None:
        super().__init__()
        self.form, self.sizes = FORMS.index(form), None if sizes is None else list(sizes)
        count = size if sizes is None else 6 * len(sizes)
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("deviation", torch.ones(count))
        self.register_buffer("target_mean", torch.zeros(1))
        self.register_buffer("target_deviation", torch.ones(1))
        self.body = nn.Sequential(nn.Linear(count, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def features(self, inputs: Tensor) -> Tensor:
        """Return the features before they are standardised."""
        weights = inputs[..., self.form, :]
        if self.sizes is None:
            return weights
        found = []
        for part in weights.split(self.sizes, -1):  # type: ignore[no-untyped-call]
            mean = part.mean(-1, keepdim=True)
            square, cube, fourth = ((part - mean).pow(power).mean(-1, keepdim=True) for power in (2, 3, 4))
            skew = cube / square.clamp_min(torch.finfo(part.dtype).tiny)
            # Two entries have no third moment but rounding errors, which differ between devices.
            skew = torch.where(skew.abs() > 1e-5 * part.abs().amax(-1, keepdim=True), skew, 0.0)
            found += [mean, square.sqrt(), skew, fourth.sqrt().sqrt()]
            found += [part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)]
        return torch.cat(found, -1)

    def standardize(self, inputs: Tensor, targets: Tensor) -> None:
        """Set means and standard deviations from training inputs ``[N, 2, P]`` and targets ``[N, 1]``."""
        for name, values in (("", self.features(inputs)), ("target_", targets)):
            deviation = values.std(0, correction=0)
            self.get_buffer(f"{name}mean").copy_(values.mean(0))
            varies = deviation > 1e-5 * values.abs().amax(0)
            self.get_buffer(f"{name}deviation").copy_(torch.where(varies, deviation, 1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        """Predict the metric."""
        outputs: Tensor = self.body((self.features(inputs) - self.mean) / self.deviation)
        return self.target_mean + self.target_deviation * outputs


class WeightRegressionTask(PopulationTask):
    """Predict a metric of the networks of a zoo from their weights, by several arms side by side.

    The data are :class:`lightning_sym.datamodules.ZooWeightsDataModule` of the same zoo. All arms train an MLP with one
    hidden layer on the mean squared error. They differ in the features:

    - ``"raw"``: the weights;
    - ``"canonical"``: the weights of the canonical form, the same for all points of an orbit;
    - ``"orbit"``: the weights, in training those of a random point of the orbit, drawn at each access;
    - ``"statistics"``: six statistics of each tensor, invariant to permutations but not to scales;
    - ``"invariants"``: the same statistics of the canonical form, invariant to the whole symmetry group.

    With ``A`` arms, member ``n`` is repeat ``n // A`` of arm ``n % A``: other initial weights and another order of the
    data. See :class:`PopulationTask` for all that tasks with several networks share.

    Args:
        zoo: Folder of the zoo.
        arms: Different arms, at least one.
        members: Number of predictors, >= 1; ``A`` times the number of repeats trains all arms equally often.
        seed: Number of the first one. >= 0.
        hidden: Number of hidden units. >= 1.
        scale: Standard deviation of the logarithms of scales of random points, >= 0.
        optimizer: Makes the optimizer from parameters; default AdamW with learning rate 1e-3 and weight decay 0.1.
        allow: Your own packages with networks of the zoo, see ``ModelZoo.open``.

    Logged after each epoch: ``train/loss``, ``val/loss``, and for each arm ``val/loss/<arm>``: means over predictors.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Unterthiner, Keysers, Gelly, Bousquet, Tolstikhin (2020), "Predicting Neural Network Accuracy from Weights",
        arXiv:2002.11448 (with quantiles instead of higher moments); Navon et al. (2023), "Equivariant Architectures for
        Learning in Deep Weight Spaces", arXiv:2301.12780, for augmentation and aligned weights as baselines.
    """

    known_arms: ClassVar[Mapping[str, Form]] = {
        "raw": "raw",
        "canonical": "canonical",
        "orbit": "raw",
        "statistics": "raw",
        "invariants": "canonical",
    }

    def __init__(
        self,
        zoo: str,
        arms: Sequence[str] = ("raw", "canonical", "orbit", "statistics", "invariants"),
        members: int = 25,
        seed: int = 0,
        hidden: int = 64,
        scale: float = 0.5,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        allow: Sequence[str] | None = None,
    ) -> None:
        check_different("arms", arms, self.known_arms)
        check_integers(hidden=hidden)
        check_numbers(">= 0", scale=scale)
        self.zoo, self.allow = str(zoo), tuple(allow or ())
        self.arms, self.hidden, self.scale = list(arms), hidden, scale
        super().__init__(members, seed, loss=F.mse_loss, optimizer=optimizer)
        self.save_hyperparameters(ignore=["optimizer"])
        self.save_hyperparameters({"arms": self.arms, **self.describe()})

    population: LoopPopulation

    @cached_property
    def space(self) -> WeightSpace:
        """The weights of the zoo's networks, and their symmetry."""
        return WeightSpace(ModelZoo.open(self.zoo, allow=self.allow))

    def default_optimizer(self, parameters: Any) -> Optimizer:
        """Make the default optimizer."""
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)

    def arm_of(self, number: int) -> str:
        """Return the arm of a member."""
        return self.arms[number % len(self.arms)]

    def setup(self, stage: str) -> None:
        """Trace the symmetry, on the CPU, and check that the trainer suits a population."""
        _ = self.space.symmetry
        super().setup(stage)

    def make_member(self, number: int) -> nn.Module:
        """Make a predictor."""
        arm, space = self.arm_of(number), self.space
        sizes = space.sizes if arm in ("statistics", "invariants") else None
        with seeded(derive_seed("weight regression", number)):
            return WeightRegressor(self.known_arms[arm], space.size, sizes, self.hidden)

    def on_fit_start(self) -> None:
        """Standardise features and targets by the training data."""
        super().on_fit_start()
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        inputs, targets = self.evaluation_batch(data.split_tensors("train"))
        for number, member in zip(self.population.numbers, self.population.members.values(), strict=True):
            assert isinstance(member, WeightRegressor)
            own = inputs
            if self.arm_of(number) == "orbit":
                own = self.moved(inputs, generator("orbit statistics", number))
            member.standardize(own.to(self.device), targets.to(self.device))

    def moved(self, inputs: Tensor, random: torch.Generator, *, canonical: bool = False) -> Tensor:
        """Return inputs of random points of the orbits of networks.

        Args:
            inputs: Shape ``[B, 2, P]``.
            random: Generator of the random numbers, on the CPU.
            canonical: Whether to compute the canonical forms of these points, which are otherwise left as they are.
        """
        result = inputs.clone()
        for row in result:
            tensors = self.space.move(self.space.tensors(row[0]), random, self.scale)
            row[0] = self.space.vector(tensors)
            if canonical:
                row[1] = self.space.vector(self.space.canonical(tensors))
        return result

    def identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the run that loads it must share."""
        return {**super().identity(), "arms": self.arms}

    def evaluation_batch(self, batch: Any) -> tuple[Tensor, Any]:
        """Check the shape of a batch.

        Raises:
            ValueError: If inputs are not the weights of the zoo's networks in two forms.
        """
        inputs, targets = batch
        if inputs.shape[-2:] != (len(FORMS), self.space.size):
            raise ValueError(
                f"{type(self).__name__} takes weights of shape [{len(FORMS)}, {self.space.size}], got "
                f"{list(inputs.shape[-2:])}; use ZooWeightsDataModule with the zoo {self.zoo}."
            )
        return inputs, targets

    def training_batch(self, batch: Any, batch_idx: int) -> tuple[Tensor, Any]:
        """Move the networks along their orbits for the members that learn from random points."""
        inputs, targets = super().training_batch(batch, batch_idx)
        rows = list(inputs)
        for index, number in enumerate(self.population.numbers):
            if self.arm_of(number) == "orbit":
                random = self.step_generator("orbit", number, batch_idx, per_process=False)
                _, own = self.global_batch(len(rows[index]))
                for _ in range(own.start):  # the points of other processes
                    self.space.symmetry.sample(random, scale=self.scale)
                rows[index] = self.moved(rows[index], random)
        return torch.stack(rows), targets

    def summary(self, split: str, running: ByMember, values: Rows) -> dict[str, float]:
        """Summarise all members, and those of each arm."""
        found = super().summary(split, running, values)
        for arm in self.arms if split != "train" else ():
            if own := [value for number, value in running["loss"].items() if self.arm_of(number) == arm]:
                found[f"{split}/loss/{arm}"] = sum(own) / len(own)
        return found
