"""The figures of stitching show what they are given."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_hex
from test_equivalence_figures import drawn, labels

from lightning_sym.figures import (
    PenaltyFamily,
    PenaltyPanel,
    SparsityFamily,
    penalty_curves,
    penalty_heat_map,
    rotation_penalty,
    sparsity_against_penalty,
)

SITES = ["relu1", "relu2", "relu3"]
NONE = np.full(3, np.nan)


def family(name: str, mean, *, low=NONE, high=NONE, std=NONE, baseline: bool = False) -> PenaltyFamily:
    return PenaltyFamily(name, np.asarray(mean), np.asarray(low), np.asarray(high), np.asarray(std), baseline)


# ---- curves


def test_curves_are_in_points_with_error_bars():
    full = family(
        "full", [0.01, 0.02, np.nan], low=[0.005, np.nan, np.nan], high=[0.02, 0.03, np.nan], std=[1, 0.01, 1]
    )
    figure = drawn(penalty_curves([PenaltyPanel("Myrtle", SITES, [full])], "all"))
    (axes,) = figure.axes
    (container,) = axes.containers
    line, _, (bars,) = container
    np.testing.assert_allclose(line.get_ydata(), [1, 2, np.nan])
    ends = [segment[:, 1] for segment in bars.get_segments()[:2]]
    np.testing.assert_allclose(ends[0], [0.5, 2])  # the interval
    np.testing.assert_allclose(ends[1], [1, 3])  # the standard deviation, as one end is missing
    assert [tick.get_text() for tick in axes.get_xticklabels()] == SITES
    assert axes.get_ylabel() == "penalty, points of accuracy"
    assert axes.get_title() == "Myrtle"
    assert axes.get_yscale() == "linear"
    assert any(np.all(np.asarray(line.get_ydata()) == 0) for line in axes.lines)
    assert figure.get_suptitle() == "all"


def test_a_family_looks_the_same_in_all_panels():
    one = [family("full", [0.1] * 3), family("group", [0.2] * 3), family("identity", [0.8] * 3, baseline=True)]
    two = [family("identity", [0.7] * 3, baseline=True), family("rank 1", [0.3] * 3), family("group", [0.1] * 3)]
    figure = drawn(penalty_curves([PenaltyPanel("a", SITES, one), PenaltyPanel("b", SITES, two)]))
    first, second = figure.axes
    assert labels(figure) == ["full", "group", "rank 1", "identity"]  # baselines last
    assert first.containers[1][0].get_color() == second.containers[1][0].get_color()
    assert first.containers[1][0].get_marker() == second.containers[1][0].get_marker()
    assert len({container[0].get_color() for axes in figure.axes for container in axes.containers}) == 3
    assert len(first.containers) == len(second.containers) == 2  # baselines have no error bars
    (baseline,) = (line for line in first.lines if np.allclose(np.asarray(line.get_ydata(), float), 80))
    red, green, blue = (to_hex(baseline.get_color())[k : k + 2] for k in (1, 3, 5))
    assert red == green == blue
    assert baseline.get_linestyle() == "--"
    assert baseline.get_linewidth() < first.containers[0][0].get_linewidth()
    assert first.get_ylim() == second.get_ylim()


def test_large_penalties_leave_room_for_small_ones():
    values = [family("full", [0.0005, 0.01, 0.02], std=[0.0001, 0.001, 0.001]), family("rank 1", [0.4, 0.8, 0.6])]
    (axes,) = drawn(penalty_curves([PenaltyPanel("a", SITES, values)])).axes
    assert axes.get_yscale() == "symlog"
    assert "logarithmic above 10" in axes.get_ylabel()
    bottom, top = axes.get_ylim()
    assert bottom < 0
    assert top > 80
    heights = axes.transAxes.inverted().transform(axes.transData.transform([(0, 0.0), (0, 2.0), (0, 10.0), (0, 80.0)]))
    assert heights[1, 1] - heights[0, 1] > 0.07
    assert 0.35 < heights[2, 1] < 0.65
    assert heights[3, 1] < 1
    ticks = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
    assert {0, 2, 10, 20, 60} <= set(ticks)


def test_negative_and_missing_penalties():
    values = [family("full", [-0.02, 0.01, np.nan], std=[0.01, 0.0, np.nan]), family("nothing", NONE)]
    (axes,) = drawn(penalty_curves([PenaltyPanel("a", SITES, values)])).axes
    assert axes.get_ylim()[0] < -3
    values = [family("full", [-0.3, 0.01, 0.5])]
    (axes,) = drawn(penalty_curves([PenaltyPanel("a", SITES, values)])).axes
    assert axes.get_ylim()[0] < -30
    (axes,) = drawn(penalty_curves([PenaltyPanel("a", SITES, [family("nothing", NONE)])])).axes
    assert np.isfinite(axes.get_ylim()).all()


def test_an_interval_that_leaves_the_mean_out_has_no_negative_bar():
    full = family("full", [0.01, 0.02, 0.03], low=[0.02] * 3, high=[0.04] * 3)
    (axes,) = drawn(penalty_curves([PenaltyPanel("a", SITES, [full])])).axes
    _, _, (bars,) = axes.containers[0]
    np.testing.assert_allclose(bars.get_segments()[0][:, 1], [1, 4])


@pytest.mark.parametrize("count", [1, 8, 25])
def test_many_families_and_long_names_fit(count):
    sites = [f"blocks.{place}.activation1" for place in range(19)]
    values = [
        PenaltyFamily(f"family {k}", *(np.full(19, 0.02 * k) for _ in range(3)), np.full(19, 0.01))
        for k in range(count)
    ]
    figure = drawn(penalty_curves([PenaltyPanel("a", sites, values)]))
    (axes,) = figure.axes
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= axes.get_window_extent().x1
    assert legend.x1 <= figure.bbox.x1
    assert len(labels(figure)) == count
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(box.y0 >= 0 for box in boxes)


# ---- the others


def test_heat_map_has_numbers_and_hatches():
    values = np.array([[0.01, np.nan, 0.2], [0.8, -0.0001, 0.123]])
    figure = drawn(penalty_heat_map(values, ["a1", "a2"], SITES, "any to any"))
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.0", "20.0", "80.0", "0.0", "12.3"]
    (hatched,) = axes.patches
    assert hatched.get_hatch()
    assert hatched.get_xy() == (0.5, -0.5)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a1", "a2"]
    assert axes.get_xlabel() == "continued in B after"
    nothing = drawn(penalty_heat_map([[np.nan]], ["a"], ["b"]))
    assert not nothing.axes[0].texts


def test_sparsity_has_a_panel_for_each_site():
    lasso = SparsityFamily("lasso", [0.2, 0.7, np.nan], [0.01, 0.02, 0.03], [0.001, np.nan, 0.001])
    group = SparsityFamily("group", [0.98] * 3, [0.05, 0.06, 0.5])
    full = SparsityFamily("full", [0.0] * 3, [0.01] * 3, baseline=True)
    figure = drawn(sparsity_against_penalty([lasso, group, full], SITES, "sparse"))
    assert [axes.get_title() for axes in figure.axes] == [*SITES, ""]  # two in a row
    assert labels(figure) == ["lasso", "group", "full"]
    places = [
        {
            line.get_label(): (line.get_xdata()[0], line.get_ydata()[0])
            for line in axes.lines
            if line.get_marker() != "None"
        }
        for axes in figure.axes
    ]
    assert places[0]["lasso"] == pytest.approx((0.2, 1))
    assert places[1]["group"] == pytest.approx((0.98, 6))
    assert "lasso" not in places[2]
    assert [len(axes.containers) for axes in figure.axes] == [1, 0, 0, 0]
    assert figure.axes[0].get_ylim() == figure.axes[2].get_ylim()
    assert "logarithmic above" in figure.get_supylabel()
    many = [f"blocks.{place}.activation2" for place in range(5)]
    grid = drawn(sparsity_against_penalty([SparsityFamily("a", [0.5] * 5, [0.1] * 5)], many))
    assert [axes.axison for axes in grid.axes] == [True] * 5 + [False]


def test_rotation_has_bars_side_by_side():
    kinds = [
        family("group", [0.0, 0.017, 0.013], std=[0.005] * 3),
        family("orthogonal", [0.007, 0.046, np.nan], low=[0.005, 0.04, np.nan], high=[0.01, 0.05, np.nan]),
        family("not trained", [0.7, 0.7, 0.7], baseline=True),
    ]
    figure = drawn(rotation_penalty(SITES, kinds, "rotation"))
    (axes,) = figure.axes
    bars = [patch for patch in axes.patches if patch.get_width() < 0.5]
    assert [bar.get_height() for bar in bars[:6]] == pytest.approx([0, 1.7, 1.3, 0.7, 4.6, 0])
    edges = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(edges))
    assert [bool(bar.get_hatch()) for bar in bars] == [False] * 6 + [True] * 3
    assert [text.get_text() for text in axes.texts] == ["0.0", "1.7", "1.3", "0.7", "4.6", "70.0", "70.0", "70.0"]
    assert labels(figure) == ["group", "orthogonal", "not trained"]
    assert axes.get_ylabel().startswith("penalty, points of accuracy")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: penalty_curves([]), "panels must have at least one entry"),
        (lambda: penalty_curves([PenaltyPanel("a", SITES, [])]), "panel 'a' must have at least one site and one"),
        (lambda: penalty_curves([PenaltyPanel("a", SITES[:2], [family("full", NONE)])]), r"mean of the family 'full'"),
        (lambda: penalty_heat_map(np.zeros((2, 2)), SITES, SITES), r"per name in sites_b \(3\).*got shape \[2, 2\]"),
        (lambda: penalty_heat_map(np.zeros((0, 3)), [], SITES), "at least one each"),
        (lambda: sparsity_against_penalty([], SITES), "at least one site and one family"),
        (lambda: sparsity_against_penalty([SparsityFamily("a", [0.0], [0.0])], SITES), "sparsity of the family 'a'"),
        (lambda: rotation_penalty([], []), "at least one site"),
    ],
)
def test_stitching_figures_of_nothing_are_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
