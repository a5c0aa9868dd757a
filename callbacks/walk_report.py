"""A walk through a class of equivalent weights, and its learning coefficient."""

import torch
from pytorch_lightning import Trainer

from lightning_sym._checks import check_integers, check_numbers, check_seeds
from lightning_sym.callbacks.equivalence_report import first_inputs
from lightning_sym.callbacks.report import RunReport
from lightning_sym.datamodules import InputDataModule
from lightning_sym.landscape import orbit_distances, sample_sgld, walk_level_set
from lightning_sym.reports import RunResults
from lightning_sym.reports.report import picked
from lightning_sym.reports.walk import walk_results
from lightning_sym.tasks import EquivalenceTask

_CHAIN_STEPS, _CHAIN_BURN_IN = 2000, 400  # of each Langevin chain
_TEMPERATURE = 1e-5  # of the chains: the J about which they fluctuate, in units of J0
_ORBIT_POINTS = 100  # points of a walk with a measured distance to the orbit


class WalkReport(RunReport):
    r"""Walk from the teacher through weights that compute exactly its function, and measure the size of their class.

    At the end of a search with :class:`lightning_sym.tasks.EquivalenceTask`, the walk follows the level set ``J = 0``
    on some inputs: a step along the tangent, then Gauss-Newton back to the set. It records the distance to the
    teacher's orbit under its symmetry group: if that stays 0, the walk saw only the group; if it grows, the class is
    larger. If ``chains`` is not 0, Langevin chains run at low temperature. Their mean J gives the learning coefficient:
    half the codimension of the class at a regular point.

    In ``results``: ``walk.csv`` and ``.json`` (a row for each point), ``walk.safetensors`` (its weights), ``walk.png``,
    in TensorBoard as ``figures/WalkReport/walk`` too. Everything is done on rank 0, in float64.

    Args:
        steps: Number of steps of the walk, >= 1.
        step_size: Length of a step in weight space, > 0.
        inputs: How many inputs of the search the function is compared on, >= 1. A Jacobian has a row for each output
            of each.
        chains: Langevin chains, at a temperature where J fluctuates about 1e-5 J0; 0 for none.
        seed: Seed of directions and noise.
        dirpath: Folder of tables and figures; default ``results`` in the run's folder.

    Raises:
        ValueError: If an argument is out of range.

    References:
        Allgower and Georg (1990), "Numerical Continuation Methods"; Lau et al. (2023), "The Local Learning
        Coefficient", arXiv:2308.12108.
    """

    needs = ("about_teacher", "copy_of_teacher", "sample_inputs", "title")
    example = "EquivalenceTask"
    data_type = InputDataModule  # type: ignore[type-abstract]

    def __init__(
        self,
        steps: int = 500,
        step_size: float = 0.05,
        inputs: int = 100,
        chains: int = 0,
        seed: int = 0,
        dirpath: str | None = None,
    ) -> None:
        super().__init__(dirpath)
        check_integers(steps=steps, inputs=inputs)
        check_integers(0, chains=chains)
        check_seeds(seed=seed)
        check_numbers("> 0", step_size=step_size)
        self.steps = steps
        self.step_size = step_size
        self.inputs = inputs
        self.chains = chains
        self.seed = seed

    def report(self, trainer: Trainer, task: EquivalenceTask, data: InputDataModule, measured: None) -> RunResults:
        """Walk, and return the results."""
        task.to(trainer.strategy.root_device)
        teacher = task.copy_of_teacher().to(device=trainer.strategy.root_device, dtype=torch.float64)
        inputs = first_inputs(task.sample_inputs(), self.inputs).double()
        with self.progress(trainer, "walking through the class") as progress:
            walk = walk_level_set(
                teacher,
                inputs,
                steps=self.steps,
                step_size=self.step_size,
                seed=self.seed,
                progress=progress,
            )
        places = torch.unique(torch.linspace(0, self.steps, min(self.steps + 1, _ORBIT_POINTS)).round().long())
        orbit = orbit_distances(teacher, walk.vectors[places], walk.vectors[0], inputs[:2])
        samples = None
        if self.chains:
            with torch.no_grad():
                zero = float(teacher(inputs).square().flatten(1).sum(1).mean())
            with self.progress(trainer, "Langevin chains") as progress:
                samples = sample_sgld(
                    teacher,
                    inputs,
                    chains=self.chains,
                    steps=_CHAIN_STEPS - _CHAIN_BURN_IN,
                    burn_in=_CHAIN_BURN_IN,
                    inverse_temperature=int(walk.ranks[0]) / (2 * _TEMPERATURE * zero),
                    seed=self.seed,
                    progress=progress,
                )
        return walk_results(
            walk,
            places,
            orbit,
            samples,
            title=task.title(),
            teacher=task.about_teacher,
            settings=picked(self, "steps", "step_size", "inputs", "chains", "seed"),
            about=self.source(data),
        )
