"""The chart of pruned networks."""

from lightning_sym.reports.pruning import REPORT


def test_the_bound_is_a_line_without_markers():
    steps = [
        {"member": member, "epsilon": 0.01, "units": units, "loss": 1 / units, "threshold": 1.0, "test_error": 0.1}
        for member in range(3)
        for units in (40, 20, 10)
    ]
    axes = REPORT.charts["pruning"].draw({"steps": steps, "magnitude": steps}).axes[0]
    markers = {line.get_linestyle(): line.get_marker() for line in axes.lines}
    assert markers[":"] in ("", "None")
    assert markers["-"] == markers["--"] == "."
