"""The figures of curves show what they are given."""

import numpy as np
import pytest
from helpers import assert_refused
from test_equivalence_figures import drawn

from lightning_sym.figures import CurvePlane, contour_levels, curve_planes
from lightning_sym.reports.paths import path_chart


def test_levels_are_dense_near_the_lowest_loss():
    """Those of docs/theory/curves.md, 1.4: a geometric sequence above the lowest, from exp(-5) to the highest."""
    losses = np.array([[0.2, 0.5], [3.2, 9.0]])
    levels = contour_levels(losses)
    assert len(levels) == 8
    np.testing.assert_allclose(levels[[0, -1]], [0.2 + np.exp(-5), 5.0])
    steps = np.diff(np.log(levels - 0.2))
    np.testing.assert_allclose(steps, steps[0])
    np.testing.assert_allclose(contour_levels([0.2, np.inf])[-1], 5.0)


@pytest.mark.parametrize("losses", [[1.0, 1.0], [7.0, np.inf], [0.0, 1e-4]])
def test_levels_rise_where_there_is_nothing_to_see(losses):
    assert (np.diff(contour_levels(losses)) > 0).all()


def plane(title: str, residual: float = 0.0, height: float = 1.0) -> CurvePlane:
    x, y = np.linspace(-1, 5, 7), np.linspace(-0.5, 2, 6)
    loss = height * ((x[:, None] - 2) ** 2 + y**2)
    loss[0, 0] = np.inf
    path = np.array([[0, 0], [2, 0.7], [4, 0]])
    return CurvePlane(title, x, y, loss, path[[0, -1]], [[2, 1.4]], path, residual)


def test_a_panel_for_each_plane_with_the_curve_and_its_points():
    figure = drawn(curve_planes([plane("0-1, bezier"), plane("0-1, chain", residual=0.5)], title="all"))
    first, second = figure.axes[:2]
    assert [axes.get_title() for axes in (first, second)] == ["0-1, bezier", "0-1, chain"]
    found = {line.get_label(): line.get_xydata() for line in first.get_lines()}
    np.testing.assert_allclose(found["curve"], plane("").path)
    np.testing.assert_allclose(found["bend"], [[2, 1.4]])
    np.testing.assert_allclose(found["ends"], found["straight line"])
    assert "up to 0.5 away" in second.get_xlabel()
    assert "away" not in first.get_xlabel()
    assert figure.axes[-1].get_ylabel() == "train loss, nats, cut off at 5"


def test_flat_planes_can_be_drawn():
    drawn(curve_planes([plane("flat", height=0.0)]))
    assert_refused(curve_planes, [], says="planes must have at least one entry")


def test_paths_show_the_loss_and_accuracies_in_percent():
    rows = [{"t": t, "loss": 2 - t, "accuracy": t, "method": "weights", "split": "test"} for t in (0.0, 0.5, 1.0)]
    figure = drawn(path_chart(rows, "method", ["split"], title="all", panel="{split}", loss=None).draw(rows))
    loss, accuracy = ([line.get_ydata() for line in axes.get_lines()] for axes in figure.axes)
    np.testing.assert_allclose(loss, [[2.0, 1.5, 1.0]])
    np.testing.assert_allclose(accuracy, [[0.0, 50.0, 100.0]])
