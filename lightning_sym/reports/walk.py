"""A walk through a class of equivalent weights, and its learning coefficient."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from safetensors.torch import save
from torch import Tensor

from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.landscape import LevelSetWalk, OrbitDistances, SGLDSamples
from lightning_sym.reports.report import ResultTable, RunResults, text_table

UNITS = {
    "J": "mean over inputs of the squared distance to the teacher's outputs, summed over outputs",
    "distance": "Euclidean distance of weights to the teacher's",
    "orbit_distance": "the same to the nearest image of the teacher under its symmetry group",
    "dimension": "number of weights less the rank of the Jacobian of the outputs: local dimension of the class",
    "learning_coefficient": "mean of J over temperature, of Langevin chains: half the codimension at a regular point",
}
_LOWEST = 1e-34  # where J = 0 is drawn
_AWAY = 1e-4  # of the distance from the teacher, which counts as away from its orbit


def _chart(*, bound: bool) -> Chart:
    """Return the chart of a walk; distances to the orbit may be upper bounds."""
    orbit = f"to its orbit under the symmetry group{', at most' if bound else ''}"

    def line(name: str, label: str, style: str = "-", **of: Any) -> Marks:
        return Marks(name, "step", label=label, look={"ls": style}, **of)

    distances = [line("distance", "to the beginning"), line("orbit_distance", orbit, "--")]
    losses = [line("J", "after a step along the tangent", table="predicted"), line("J", "after the correction")]
    dimensions = [line("dimension", "dimension", kind="steps")]
    panels = [
        Panel(distances, "Where the walk goes", "step", "distance of weights", bottom=0),
        Panel(losses, "J on the way", "step", "J", log="y"),
        Panel(dimensions, "Dimension of the class there", "step", "weights less rank of the Jacobian"),
    ]
    return Chart(panels, "A walk through the class: {title}", legend="each")


def walk_results(
    walk: LevelSetWalk,
    places: Tensor,
    orbit: OrbitDistances,
    samples: SGLDSamples | None = None,
    *,
    title: str,
    teacher: Mapping[str, Any],
    settings: Mapping[str, Any],
    about: Mapping[str, Any],
) -> RunResults:
    """Report a walk through equivalent weights.

    Args:
        walk: The walk, the teacher first.
        places: Steps with a measured distance to the teacher's orbit. Shape ``[k]``, int64.
        orbit: These distances.
        samples: Langevin chains near the teacher; None for none.
        title: Name of the equivalence class.
        teacher: Facts about it.
        settings: Settings of the walk and the chains.
        about: Everything else needed to make the table again.
    """
    distances = (walk.vectors - walk.vectors[0]).norm(dim=1)
    dimensions = walk.vectors.shape[1] - walk.ranks
    facts = {
        "distance": float(distances.max()),
        "orbit_distance": float(orbit.distances.max()),
        "highest_J": float(walk.losses.max()),
        "lowest_dimension": int(dimensions.min()),
        "highest_dimension": int(dimensions.max()),
        "rank": int(walk.ranks[0]),
    }
    if samples is not None:
        facts["learning_coefficient"] = samples.learning_coefficient
        facts["learning_coefficient_error"] = samples.standard_error
    about = {"teacher": teacher, "orbit_distance_is": orbit.kind, "settings": settings, "found": facts, **about}
    rows = walk_rows(walk, places, orbit)

    drawn = {
        "walk": [{**row, "J": max(row["J"], _LOWEST)} for row in rows],
        "predicted": [
            {"step": step + 1, "J": max(loss, _LOWEST)} for step, loss in enumerate(walk.predictor_losses.tolist())
        ],
    }
    return RunResults(
        [ResultTable("walk", "a walk through weights that compute the teacher's function", rows, UNITS, about)],
        _chart(bound=orbit.kind != "exact").named("walk", drawn, title),
        files={"walk.safetensors": save({"weights": walk.vectors.cpu().contiguous()})},
        numbers={f"walk/{name}": float(value) for name, value in facts.items()},
        shown=_shown(facts, len(rows) - 1),
        notes=_notes(facts, exact=orbit.kind == "exact"),
        places={"picture": "walk.png", "table": "walk.csv"},
    )


def walk_rows(walk: LevelSetWalk, places: Tensor, orbit: OrbitDistances) -> list[dict[str, Any]]:
    """Return a row for each point of a walk; arguments as for :func:`walk_results`."""
    measured = dict(zip(places.tolist(), orbit.distances.tolist(), strict=True))
    distances = (walk.vectors - walk.vectors[0]).norm(dim=1)
    return [
        {
            "step": step,
            "J": float(walk.losses[step]),
            "distance": float(distance),
            "orbit_distance": measured.get(step),
            "dimension": walk.vectors.shape[1] - int(walk.ranks[step]),
        }
        for step, distance in enumerate(distances)
    ]


def _shown(facts: Mapping[str, float], steps: int) -> Table:
    dimensions = sorted({int(facts["lowest_dimension"]), int(facts["highest_dimension"])})
    lines = [
        ["steps", str(steps)],
        ["highest J", f"{facts['highest_J']:.1e}"],
        ["farthest from the teacher", f"{facts['distance']:.2f}"],
        ["farthest from its orbit", f"{facts['orbit_distance']:.2g}"],
        ["dimension of the class", " to ".join(map(str, dimensions))],
    ]
    if "learning_coefficient" in facts:
        spread = f"{facts['learning_coefficient']:.3f} ± {facts['learning_coefficient_error']:.3f}"
        lines.append(["learning coefficient", spread])
    return text_table("A walk from the teacher at J = 0", ["measured", "value"], lines)


def _notes(facts: Mapping[str, float], *, exact: bool) -> list[str]:
    if facts["orbit_distance"] > _AWAY * facts["distance"]:
        sure = "" if exact else ", as far as matching can tell"
        notes = [f"J = 0 far from the teacher's orbit: the class is larger than its symmetry group makes it{sure}"]
    else:
        notes = ["the walk never left the teacher's orbit under its symmetry group"]
    if "learning_coefficient" in facts:
        half = facts["rank"] / 2
        notes.append(f"half the rank of the Jacobian, what a regular point would have: {half:g}")
    return notes
