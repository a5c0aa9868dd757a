"""The figures of curves show what they are given."""

import numpy as np
import pytest
from helpers import assert_refused
from test_equivalence_figures import drawn

from lightning_sym.figures import CurvePlane, GeometryLines, contour_levels, curve_geometry_panels, curve_planes


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


@pytest.mark.parametrize("dense", [False, True])
def test_legends_of_a_geometry_lie_over_no_line(dense):
    """Constant lines over all the width, as ranks are, leave no free corner."""
    ones = np.ones(5)
    lines = GeometryLines(
        t=np.linspace(0, 1, 5),
        loss=ones,
        gradient_norm=2 * ones,
        norms={name: (number + 1) * ones for number, name in enumerate(("straight", "detour", "tangent", "random"))},
        curvatures={"straight": -ones, "detour": ones},
        eigenvalues=[5 * ones],
        trace=20 * ones,
        trace_error=2 * ones,
        ranks={"rank": 640 * ones, "nullity": 8000 * ones, "dimension of the orbit": 128 * ones},
        similarity={"mean cosine": ones, "linear CKA": 0.9 * ones},
        deviations={"gradient along the curve": 1e-8 * ones, "second derivative of the loss": 1e-5 * ones},
        tolerance=1e-6,
        counts={} if dense else {f"|λ| < {tolerance:g} of the largest": ones / tolerance for tolerance in (1e-3, 1e-6)},
        density={t: (np.linspace(-1, 5, 20), ones[0] * np.ones(20)) for t in (0.0, 0.5, 1.0)} if dense else {},
    )
    figure = drawn(curve_geometry_panels(lines))
    for axes in figure.axes:
        box = axes.get_legend().get_window_extent()
        heights = [
            axes.transData.transform(line.get_xydata())[:, 1] for line in axes.get_lines() if len(line.get_xydata()) > 2
        ]
        assert max(map(max, heights)) < box.y0, axes.get_title()
        assert box.y1 < axes.get_window_extent().y1
