"""A task on landscapes with known learning coefficients: estimates by chains, compared with the theory."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from lightning_sym._checks import check_different, check_integers, check_known, check_seeds
from lightning_sym.landscape import AnalyticLandscape, LearningCoefficientEstimate, analytic_landscapes
from lightning_sym.tasks._untrained import UntrainedTask


class Calibrated(NamedTuple):
    """The estimate for one landscape.

    Attributes:
        landscape: The landscape.
        found: The estimate by chains.
        exact: The exact mean of such chains; None if it is not known.
    """

    landscape: AnalyticLandscape
    found: LearningCoefficientEstimate
    exact: float | None


class AnalyticLandscapesTask(UntrainedTask):
    r"""Estimate known learning coefficients by chains, and check that invalid settings give no estimate.

    The landscapes are those of :func:`lightning_sym.landscape.analytic_landscapes`: quadratic ones, where the mean of
    chains is known exactly at any temperature, step and localisation; two rectified units; reduced-rank regression;
    normal crossings, whose mean at singular points is an integral over two variables; and two with invalid settings,
    which must give no estimate. Nothing is trained: the fit has no epochs, and its report runs the chains. With several
    processes each runs its share of the chains.

    Args:
        landscapes: Names of landscapes, or ``"all"``.
        chains: Number of chains of each, >= 3; default that of the landscape, 500 to 1000.
        steps: Steps of each chain, >= 8; default that of the landscape, 3000.
        seed: Seed of the chains, >= 0.

    Raises:
        ValueError: If an argument is out of range.

    References:
        docs/theory/learning_coefficients.md, 2 to 4.
    """

    def __init__(
        self,
        landscapes: Literal["all"] | list[str] = "all",
        chains: int | None = None,
        steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        known = {one.name: one for one in analytic_landscapes()}
        names = list(known) if landscapes == "all" else landscapes
        check_different("landscapes", names)
        for name in names:
            check_known("landscape", name, known)
        check_seeds(seed=seed)
        check_integers(3, optional=True, chains=chains)
        check_integers(8, optional=True, steps=steps)
        self.landscapes = [known[name] for name in names]  # not registered: there is nothing to train
        self.changes = {name: value for name, value in (("chains", chains), ("steps", steps)) if value is not None}
        self.seed = seed
        self.save_hyperparameters()

    # ---- calibration

    def calibrate(self, inputs: Tensor, progress: Callable[[int, int], None]) -> list[Calibrated]:
        """Run the chains of all landscapes; to be called on every process, with the same inputs.

        Args:
            inputs: Shape ``[N, ...]``, at least three numbers each.
            progress: Called with the numbers of landscapes that are done and of all.

        Raises:
            ValueError: If the inputs are too small.
        """
        if inputs[0].numel() < 3 if len(inputs) else True:
            raise ValueError(f"The landscapes take inputs of at least 3 numbers, got shape {list(inputs.shape)}.")
        results = []
        for done, landscape in enumerate(self.landscapes):
            landscape.network.to(inputs.device)
            found = landscape.estimate(inputs, seed=self.seed, **self.changes)
            results.append(Calibrated(landscape, found, landscape.exact(inputs, found)))
            progress(done + 1, len(self.landscapes))
        return results
