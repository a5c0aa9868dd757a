"""The heat map of stitching any site to any site."""

import numpy as np
from helpers import assert_refused
from test_equivalence_figures import drawn, labels

from lightning_sym.figures import HeatMap, penalty_heat_map, similarity_maps

SITES = ["relu1", "relu2", "relu3"]


def test_heat_map_has_numbers_and_hatches():
    values = np.array([[0.01, np.nan, 0.2], [0.8, -0.0001, 0.123]])
    figure = drawn(penalty_heat_map(values, ["a1", "a2"], SITES, "any to any"))
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.0", "20.0", "80.0", "0.0", "12.3"]
    (hatched,) = axes.patches
    assert hatched.get_hatch()
    assert hatched.get_xy() == (0.5, -0.5)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a1", "a2"]
    assert axes.get_xlabel() == "cut of B, which provides the top layers"
    nothing = drawn(penalty_heat_map([[np.nan]], ["a"], ["b"]))
    assert not nothing.axes[0].texts


def test_a_heat_map_of_another_shape_is_refused():
    assert_refused(penalty_heat_map, np.zeros((2, 2)), SITES, SITES, says="per name in sites_b (3)")
    assert_refused(penalty_heat_map, np.zeros((0, 3)), [], SITES, says="at least one each")


def test_cells_without_a_value_are_hatched_and_named_and_the_colors_too():
    values = np.array([[0.5, np.nan], [0.25, 0.75]])
    names = ["a", "b"]
    maps = similarity_maps([HeatMap("cka_linear", {"trained": values})], {"trained": (names, names)})
    for figure, word in ((maps, "similarity"), (penalty_heat_map(values, names, names), "penalty")):
        axes, bar = drawn(figure).axes
        (cell,) = axes.patches
        assert (cell.get_xy(), cell.get_hatch()) == ((0.5, -0.5), "////")
        assert len(labels(figure)) == 1
        assert word in bar.get_ylabel()
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    whole = drawn(similarity_maps([HeatMap("cka_linear", {"trained": np.eye(2)})], {"trained": (names, names)}))
    assert not whole.legends
