"""Spectra and sharpness of the members of a zoo, raw and modulo symmetry."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure

from lightning_sym.curvature import SharpnessModuloSymmetry, SpectralDensity
from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports.report import Column, Report, Row, RunResults, finite

_PLACES = ("raw", "balanced", "modulo_symmetry")
_WHAT = "Hessian modulo symmetry of the members of a zoo"


def _share(row: Row) -> str:
    return "-" if row["gauge_share"] is None else f"{round(100 * row['gauge_share'])} %"


def _with_error(place: str) -> Callable[[Row], str]:
    """Return a function for the cells of a place: the trace is an estimate, with its standard error."""

    def cell(row: Row) -> str:
        error = row[f"{place}_error"] if row["measure"] == "trace" else None
        return f"{row[place]:.4g}" + (f" ± {error:.2g}" if error else "")

    return cell


REPORT = Report(
    {"sharpness": f"{_WHAT}: sharpness", "spectrum": f"{_WHAT}: densities"},
    [
        Column("top_eigenvalue", "largest eigenvalue, in nats (or the loss's unit) per squared unit of parameters"),
        Column("trace", "sum of eigenvalues, same unit"),
        Column("norm", "Frobenius norm, same unit"),
        Column("member", heading="member", text="d"),
        Column("measure", heading="measure", text=lambda row: row["measure"].replace("_", " ")),
        Column("raw", "of the network as it is", "as it is", _with_error("raw"), number="sharpness/{measure}/raw"),
        Column("balanced", "of the canonical member of its orbit", "balanced", _with_error("balanced"),
               number="sharpness/{measure}/balanced"),
        Column("modulo_symmetry", "of that member, in the directions orthogonal to the orbit: the same for all of the "
               "orbit", "modulo symmetry", _with_error("modulo_symmetry"),
               number="sharpness/{measure}/modulo_symmetry"),
        Column("gauge_share", "1 - modulo_symmetry / raw; negative where the network is flatter than the balanced "
               "member", "gauge share", _share),
        Column("raw_error, balanced_error, modulo_symmetry_error",
               "standard error of the trace; of the eigenvalue, its residual"),
        Column("node, weight", "nodes and weights of the spectral density, modulo symmetry; the weights of one probe "
               "sum to 1"),
    ],
    layout={"names": 2, "whole": ()},
    places={"picture": "sharpness.png", "table": "sharpness.csv"},
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class MemberSpectrum:
    """Measurements of one member.

    Attributes:
        sharpness: Its sharpness.
        density: The density of its spectrum, modulo symmetry.
    """

    sharpness: SharpnessModuloSymmetry
    density: SpectralDensity


def spectrum_results(members: Mapping[int, MemberSpectrum], *, title: str, about: Mapping[str, Any]) -> RunResults:
    """Report the sharpness of networks and the part of it that depends on the point of the orbit.

    Args:
        members: Measured spectra, by index of the member; at least one.
        title: For the table and the figures.
        about: Everything needed to make the tables again.
    """
    rows = list(sharpness_rows(members))
    width = max(one.density.width for one in members.values())
    notes = list(dict.fromkeys(note for one in members.values() for note in one.sharpness.notes))
    some = next(iter(members.values())).sharpness
    taken = f"{some.orbit} of {some.parameters} directions are the orbit's"
    kept = f"; {some.statistics} move statistics of batch norms, and stay" if some.statistics else ""
    return REPORT.results(
        {"sharpness": rows, "spectrum": list(node_rows(members))},
        title=title,
        about={**about, "smoothing": width},
        headline=None,
        figures=_figures(members, rows, width, title),
        notes=[taken + kept, *notes],
    )


def sharpness_rows(members: Mapping[int, MemberSpectrum]) -> Iterator[dict[str, Any]]:
    """Yield a row per member and measure."""
    for number, one in members.items():
        sharpness = one.sharpness
        found = dict(zip(_PLACES, (sharpness.raw, sharpness.balanced, sharpness.modulo), strict=True))
        errors = {
            "top_eigenvalue": {place: own.residual for place, own in found.items()},
            "trace": {place: own.trace.standard_error for place, own in found.items()},
        }
        for row in one.sharpness.rows():
            own = errors.get(row["measure"], {})
            share = finite(row.pop("gauge_share"))
            yield {"member": number, **row, "gauge_share": share, **{f"{p}_error": own.get(p) for p in _PLACES}}


def node_rows(members: Mapping[int, MemberSpectrum]) -> Iterator[dict[str, Any]]:
    """Yield a row per member, probe and node."""
    for number, one in members.items():
        for probe, (nodes, weights) in enumerate(zip(one.density.nodes, one.density.weights, strict=True)):
            for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
                yield {"member": number, "probe": probe, "node": node, "weight": weight}


def _figures(
    members: Mapping[int, MemberSpectrum], rows: list[dict[str, Any]], width: float, title: str
) -> Iterator[tuple[str, Figure]]:
    low, high = min(m.density.low for m in members.values()), max(m.density.high for m in members.values())
    x = torch.linspace(low - 5 * width, high + 5 * width, 1024, dtype=torch.float64)
    size = next(iter(members.values())).density.size
    single = 1 / (size * width * math.sqrt(2 * math.pi))  # the peak of one eigenvalue
    densities = [
        {"member": number, "eigenvalue": place, "density": max(density, 1e-3 * single)}
        for number, one in members.items()
        for place, density in zip(x.tolist(), one.density.at(x, width).tolist(), strict=True)
    ]
    panel = Panel(
        [Marks("density", "eigenvalue", label="member {member}", look={"lw": 1.2})],
        xlabel=f"eigenvalue (smoothed with a Gaussian of width {width:.2g})",
        ylabel="density",
        log="y",
        bottom=1e-2 * single,
        levels={"one eigenvalue": single},
    )
    yield from Chart([panel]).named("spectrum", densities, title)
    bars = [
        {
            **row,
            "member": str(row["member"]),
            "place": place.replace("raw", "as_it_is"),
            "value": row[place],
            "error": row[f"{place}_error"],
        }
        for row in rows
        for place in _PLACES
    ]
    marks = Marks(
        "value",
        "member",
        kind="bars",
        error=["error"],
        spans=["± error"],
        label=lambda row: row["place"].replace("_", " "),
    )
    panel = Panel([marks], lambda row: row["measure"].replace("_", " "), "member", by=["measure"])
    yield from Chart([panel], columns=1).named("sharpness", bars, title)
