"""Sharpness of the loss during training, as CurvatureMonitor reports it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_sym.figures import Chart, Marks, epoch_panel
from lightning_sym.reports.report import ResultTable, RunResults, over_members

Point = Mapping[str, Any]
QUANTITIES = ("loss", "top_eigenvalue", "along_step", "trace", "trace_error")
UNITS = {
    "step": "optimizer steps",
    "epoch": "epochs of training, with the part of the current one",
    "loss": "mean over samples, in eval mode, without regularisers, in nats (or the loss's unit)",
    "top_eigenvalue": "largest eigenvalue of the Hessian, in units of the loss per squared unit of parameters",
    "along_step": "second derivative in the direction of the optimizer step just taken, same unit",
    "trace": "sum of eigenvalues, same unit, with its standard error in trace_error",
}

_TRACE = Marks("trace", "epoch", label="trace")
_ERRORS = replace(
    _TRACE, kind="error", error=["trace_error"], spans=["± standard error"], look={"ls": "", "marker": ""}
)
_LARGEST = Marks("top_eigenvalue", "epoch", label="largest")
_ALONG = Marks("along_step", "epoch", label="along the step", look={"ls": "--"})
_LOSS = Marks("loss", "epoch", label="loss")
CHART = Chart(
    [
        epoch_panel("Eigenvalue", "second derivative of the loss", _LARGEST, _ALONG),
        epoch_panel("Trace", "sum of eigenvalues", _TRACE, _ERRORS),
        epoch_panel("Training loss", "in eval mode, without regularisers", _LOSS, log="y"),
    ],
    "Sharpness of {title}",
    legend="each",
)


def monitor_scalars(point: Point, prefix: str = "curvature", *, named: bool = False) -> dict[str, float]:
    """Return the logged numbers of a point: means over members, and the standard error of the mean of the traces.

    Args:
        point: ``members``, by number: those of ``QUANTITIES`` that were found.
        prefix: First part of all tags.
        named: Whether each member also has its own tag.
    """
    found = {
        f"{prefix}/{name}": {number: values[name] for number, values in point["members"].items() if name in values}
        for name in QUANTITIES
    }
    scalars = over_members(found, named=named)
    errors = [error for error in found[f"{prefix}/trace_error"].values() if math.isfinite(error)]
    if errors:  # independent, as members have different random signs; the figure combines them alike
        scalars[f"{prefix}/trace_error"] = math.hypot(*errors) / len(errors)
    return scalars


def monitor_results(
    points: Sequence[Point], *, network: str, about: Mapping[str, Any], name: str = "curvature"
) -> RunResults:
    """Report the sharpness of the loss during training.

    Args:
        points: In the order of time: ``step``, ``epoch`` and ``members``, as for :func:`monitor_scalars`.
        network: Name of the architecture, for the title.
        about: Everything needed to make the table again.
        name: Name of the files.
    """
    rows = [
        {"step": point["step"], "epoch": point["epoch"], "member": number, **{q: values.get(q) for q in QUANTITIES}}
        for point in points
        for number, values in point["members"].items()
    ]
    table = ResultTable(name, "Hessian of the training loss, while training", rows, UNITS, about)
    count = f", mean of {members} members" if (members := len(points[-1]["members"])) > 1 else ""
    return RunResults([table], CHART.named(name, rows, f"{network} while training{count}"))
