"""Published results in miniature: runs, measurements, and the claims of the sources.

A module for each group of results has ``RESULTS``; ``core`` has the types and runs them, ``page`` writes
docs/results.md and docs/results/.
"""

from published import equivariance, genni, intertwiners, peers, rashomon, rebasin
from published.core import Result, Run

RESULTS: tuple[Result, ...] = (
    *genni.RESULTS,
    *intertwiners.RESULTS,
    *equivariance.RESULTS,
    *rebasin.RESULTS,
    *rashomon.RESULTS,
    *peers.RESULTS,
)


def _check() -> None:
    """Raise ValueError if two results have one name, or two runs that differ share one folder."""
    names = [result.name for result in RESULTS]
    if double := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"Results must have names of their own; more than one is called {sorted(double)}.")
    seen: dict[tuple[str, bool], Run] = {}
    for result in RESULTS:
        for full, runs in ((False, result.runs), (True, result.full)):
            for run in runs:
                if seen.setdefault((run.name, full), run) != run:
                    raise ValueError(f"Two runs that differ are called {run.name!r}; one of them is of {result.name}.")


_check()

__all__ = ["RESULTS"]
