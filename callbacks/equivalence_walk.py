"""A walk through a class of equivalent weights, and its learning coefficient."""

import math
from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning import Trainer
from rich.table import Table
from safetensors.torch import save

from lightning_sym._files import write_atomically
from lightning_sym.callbacks._checks import on_first_rank
from lightning_sym.callbacks._publish import log_summary, publish_figure, publish_table
from lightning_sym.callbacks.equivalence_plane import first_inputs, progress_bar
from lightning_sym.callbacks.run_report import RunReport
from lightning_sym.datamodules import InputDataModule
from lightning_sym.figures.equivalence_walks import walk_curves
from lightning_sym.landscape import SGLDSamples, orbit_distances, sample_sgld, walk_level_set
from lightning_sym.tasks import EquivalenceTask
from lightning_sym.zoo import versions

_AWAY = 1e-4  # of the distance from the teacher, which counts as away from its orbit
_ORBIT_POINTS = 100  # of a walk at which the distance to the orbit is measured
_UNITS = {
    "J": "mean over inputs of the squared distance to the teacher's outputs, summed over outputs",
    "distance": "Euclidean distance of weights to the teacher's",
    "orbit_distance": "the same to the nearest image of the teacher under its symmetry group",
    "dimension": "number of weights less the rank of the Jacobian of the outputs: local dimension of the class",
    "learning_coefficient": "mean of J over temperature, of Langevin chains: half the codimension at a regular point",
}


class EquivalenceWalk(RunReport[EquivalenceTask, InputDataModule]):
    r"""Walk from the teacher through weights that compute exactly its function, and see how large their class is.

    At the end of a search with :class:`lightning_sym.tasks.EquivalenceTask`: a walk along the level set ``J = 0`` on
    some inputs (a step along the tangent, then Gauss-Newton back to the set), with the distance to the teacher's orbit
    under its symmetry group: if that stays 0, the walk saw nothing but the group; if it grows, the class is larger.
    And, if ``chains`` is not 0, Langevin chains at low temperature, whose mean J tells the learning coefficient: half
    the codimension of the class at a regular point.

    In ``results``: ``walk.csv`` and ``.json`` (a row for each point), ``walk.safetensors`` (its weights), ``walk.png``,
    in TensorBoard as ``figures/EquivalenceWalk/walk`` too. Everything is done on rank 0, in float64.

    Args:
        steps: Number of steps of the walk, >= 1.
        step_size: Length of a step in weight space, > 0.
        direction: ``"carried"``, one random direction is followed, so that the walk goes far; or ``"random"``, a new
            one for every step.
        inputs: How many inputs of the search the function is compared on, >= 1. A Jacobian has a row for each output
            of each.
        chains: Langevin chains; 0 for none.
        chain_steps: Number of steps of each chain, of which the first fifth is not counted. >= 10.
        temperature: Temperature of the chains: the J about which they fluctuate, in units of J0. > 0.
        seed: Seed of directions and noise.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Allgower and Georg (1990), "Numerical Continuation Methods"; Lau et al. (2023), "The Local Learning
        Coefficient", arXiv:2308.12108.
    """

    task_type = EquivalenceTask
    data_type = InputDataModule  # type: ignore[type-abstract]

    def __init__(
        self,
        steps: int = 500,
        step_size: float = 0.05,
        direction: Literal["carried", "random"] = "carried",
        inputs: int = 100,
        chains: int = 0,
        chain_steps: int = 2000,
        temperature: float = 1e-5,
        seed: int = 0,
        dirpath: str | None = None,
    ) -> None:
        super().__init__(dirpath)
        for name, number, least in (
            ("steps", steps, 1),
            ("inputs", inputs, 1),
            ("chains", chains, 0),
            ("chain_steps", chain_steps, 10),
            ("seed", seed, 0),
        ):
            if type(number) is not int or number < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {number!r}.")
        for name, value in (("step_size", step_size), ("temperature", temperature)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number > 0, got {value}.")
        if direction not in ("carried", "random"):
            raise ValueError(f'direction must be "carried" or "random", got {direction!r}.')
        self.steps = steps
        self.step_size = step_size
        self.direction = direction
        self.inputs = inputs
        self.chains = chains
        self.chain_steps = chain_steps
        self.temperature = temperature
        self.seed = seed
        self._rows: list[dict[str, Any]] = []
        self._facts: dict[str, float] = {}
        self._exact = True

    def report(self, trainer: Trainer, task: EquivalenceTask, data: InputDataModule) -> None:
        """Walk, and write table and figure."""
        on_first_rank(trainer, lambda: self._work(trainer, task, data))

    def _work(self, trainer: Trainer, task: EquivalenceTask, data: InputDataModule) -> None:
        device = trainer.strategy.root_device
        task.to(device)
        teacher = task.copy_of_teacher().to(device=device, dtype=torch.float64)
        inputs = first_inputs(task, self.inputs).double()
        with progress_bar(trainer, "walking through the class") as progress:
            walk = walk_level_set(
                teacher,
                inputs,
                steps=self.steps,
                step_size=self.step_size,
                direction="random" if self.direction == "random" else None,
                seed=self.seed,
                progress=progress,
            )
        places = torch.unique(torch.linspace(0, self.steps, min(self.steps + 1, _ORBIT_POINTS)).round().long())
        orbit = orbit_distances(teacher, walk.vectors[places], walk.vectors[0], inputs[:2])
        self._exact = orbit.kind == "exact"
        plain = (walk.vectors - walk.vectors[0]).norm(dim=1)
        dimensions = walk.vectors.shape[1] - walk.ranks
        measured = dict(zip(places.tolist(), orbit.distances.tolist(), strict=True))
        self._rows = [
            {
                "step": step,
                "J": float(walk.losses[step]),
                "distance": float(plain[step]),
                "orbit_distance": measured.get(step),
                "dimension": int(dimensions[step]),
            }
            for step in range(len(plain))
        ]
        self._facts = {
            "distance": float(plain.max()),
            "orbit_distance": float(orbit.distances.max()),
            "highest_J": float(walk.losses.max()),
            "lowest_dimension": int(dimensions.min()),
            "highest_dimension": int(dimensions.max()),
            "rank": int(walk.ranks[0]),
        }
        samples = self._sampled(trainer, teacher, inputs)
        if samples is not None:
            self._facts["learning_coefficient"] = samples.learning_coefficient
            self._facts["learning_coefficient_error"] = samples.standard_error
        about = {
            "what": "a walk through weights that compute the teacher's function",
            "units": _UNITS,
            "teacher": task.about_teacher,
            "orbit_distance_is": orbit.kind,
            "settings": {
                name: getattr(self, name)
                for name in (
                    "steps",
                    "step_size",
                    "direction",
                    "inputs",
                    "chains",
                    "chain_steps",
                    "temperature",
                    "seed",
                )
            },
            "found": self._facts,
            "data": data.identity(),
            "versions": versions(),
        }
        publish_table(self._rows, about, self.path / "walk")
        write_atomically(self.path / "walk.safetensors", save({"weights": walk.vectors.cpu().contiguous()}))
        figure = walk_curves(
            walk.losses.cpu(),
            walk.predictor_losses.cpu(),
            dimensions.cpu(),
            plain.cpu(),
            places,
            orbit.distances.cpu(),
            bound=orbit.kind != "exact",
            title=f"A walk through the class: {task.title()}",
        )
        publish_figure(trainer, figure, "figures/EquivalenceWalk/walk", self.path / "walk.png")
        log_summary(trainer, {f"walk/{name}": float(value) for name, value in self._facts.items()})

    def _sampled(self, trainer: Trainer, teacher: torch.nn.Module, inputs: torch.Tensor) -> SGLDSamples | None:
        """Run the Langevin chains, if any are asked for."""
        if self.chains == 0:
            return None
        with torch.no_grad():
            zero = float(teacher(inputs).square().flatten(1).sum(1).mean())
        with progress_bar(trainer, "Langevin chains") as progress:
            return sample_sgld(
                teacher,
                inputs,
                chains=self.chains,
                steps=self.chain_steps - self.chain_steps // 5,
                burn_in=self.chain_steps // 5,
                dimension=int(self._facts["rank"]),
                target_loss=self.temperature * zero,
                seed=self.seed,
                progress=progress,
            )

    def table(self) -> Table:
        """Return what the walk saw."""
        table = Table(title="A walk from the teacher at J = 0", title_justify="left")
        table.add_column("measured")
        table.add_column("value", justify="right")
        table.add_row("steps", str(self.steps))
        table.add_row("highest J", f"{self._facts['highest_J']:.1e}")
        table.add_row("farthest from the teacher", f"{self._facts['distance']:.2f}")
        table.add_row("farthest from its orbit", f"{self._facts['orbit_distance']:.2g}")
        dimensions = sorted({int(self._facts["lowest_dimension"]), int(self._facts["highest_dimension"])})
        table.add_row("dimension of the class", " to ".join(map(str, dimensions)))
        if "learning_coefficient" in self._facts:
            value, error = self._facts["learning_coefficient"], self._facts["learning_coefficient_error"]
            table.add_row("learning coefficient", f"{value:.3f} ± {error:.3f}")
        return table

    def notes(self) -> list[str]:
        """Say what the numbers mean."""
        far = self._facts["orbit_distance"] > _AWAY * self._facts["distance"]
        exact = "" if self._exact else ", as far as matching can tell"
        said = f"J = 0 far from the teacher's orbit: the class is larger than its symmetry group makes it{exact}"
        return [
            said if far else "the walk never left the teacher's orbit under its symmetry group",
            *(
                [f"half the rank of the Jacobian, what a regular point would have: {self._facts['rank'] / 2:g}"]
                if "learning_coefficient" in self._facts
                else []
            ),
        ]

    def places(self, trainer: Trainer) -> dict[str, Path]:
        """Return picture and table."""
        return {"picture": self.path / "walk.png", "table": self.path / "walk.csv"}
