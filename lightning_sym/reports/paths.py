"""The chart of loss and accuracy on lines and curves between networks, for several reports."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.reports.report import Row

# Name, color and style of each method and path, the same in all charts.
LOOKS: Mapping[str, Mapping[str, Any]] = {
    method: {"label": name, "color": color, "ls": style, "lw": 2.2}
    for method, name, color, style in (
        ("unmatched", "unmatched", "#7f7f7f", "-"),
        ("weights", "weight matching", "#0072b2", "-"),
        ("activations", "activation matching", "#d55e00", "--"),
        ("straight_through", "straight-through", "#cc79a7", ":"),
        ("permutations", "permutations", "#000000", "-"),
        ("blocks", "with heads as blocks", "#56b4e9", "-"),
        ("matrices", "with matrices in heads", "#009e73", "-"),
        ("activations_weights", "activations, then weights", "#e69f00", "-"),
        ("orbit_descent", "descent on the orbit", "#cc79a7", "-"),
        ("soft_maps", "soft maps (other function)", "#8c564b", ":"),
        ("line", "straight line", "#7f7f7f", "-"),
        ("matched", "line after matching", "#009e73", "--"),
        ("bezier", "Bezier curve", "#0072b2", "-"),
        ("chain", "chain", "#d55e00", "-"),
    )
}


def path_chart(
    rows: Sequence[Row],
    group: str,
    by: Sequence[str] = (),
    *,
    title: str,
    panel: str | Callable[[Row], str],
    loss: str | None,
) -> Chart:
    """Return the chart of loss and accuracy against the place ``t``: means and bands over pairs.

    Args:
        rows: Rows with ``t``, ``loss`` and maybe ``accuracy``.
        group: Column that names the lines.
        by: Columns: a pair of panels, loss and accuracy, for each combination of their values. Panels that differ
            in the last one are adjacent.
        title: Title of the chart.
        panel: Title of a panel.
        loss: Name of the loss; None for the cross-entropy.
    """
    classified = any(row.get("accuracy") is not None for row in rows)
    quantities = [("loss", f"loss, {loss or 'nats'}", 1.0), *([("accuracy", "accuracy, %", 100.0)] * classified)]
    panels = [
        Panel(
            [Marks(quantity, "t", [group], where=dict(zip(by, outer, strict=False)), factor=factor, looks=LOOKS)],
            panel,
            "$t$, from A ($0$) to B ($1$)",
            label,
            by[-1:],
            bottom=0 if quantity == "loss" else None,
        )
        for outer in dict.fromkeys(tuple(row[name] for name in by[:-1]) for row in rows)
        for quantity, label, factor in quantities
    ]
    return Chart(panels, title, columns=min(2, len({tuple(row[name] for name in by) for row in rows})), share="xr")
