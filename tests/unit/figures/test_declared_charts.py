"""Charts show the columns of the tables that they declare."""

import itertools

import numpy as np
import pytest
from helpers import assert_refused
from test_equivalence_figures import drawn, labels

from lightning_sym.figures import Chart, Marks, Panel
from lightning_sym.figures._room import separate

PLACES = ["relu1", "relu2", "relu3"]


def rows(**columns):
    """Return rows of columns; a single value is in every row."""
    length = max(len(values) for values in columns.values() if isinstance(values, list))
    table = [values if isinstance(values, list) else [values] * length for values in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*table, strict=True)]


def chart(*marks, **panel):
    return Chart([Panel(marks, **panel)])


def segments(axes):
    """Return the ends of all error bars, one series after the other."""
    return [[tuple(bar[:, 1]) for bar in container[2][0].get_segments()] for container in axes.containers]


# ---- series


@pytest.mark.parametrize("legend", ["below", "beside", "each", "above", ""])
def test_the_legend_names_bands_and_error_bars(legend):
    table = rows(epoch=[0, 0, 1, 1], y=[1.0, 3.0, 2.0, 4.0], low=0.5, high=None, std=0.25)
    errors = {"error": [("low", "high"), "std"], "spans": ["95 % interval", "± standard deviation"]}
    cases = (
        (Marks("y", "epoch"), "lowest to highest"),
        (Marks("y", "epoch", kind="error", **errors), "± standard deviation"),  # there is no interval
        (Marks("y", "epoch", **errors), "± standard deviation"),
        (Marks("y", "epoch", kind="bars", error=["std"]), "± std"),
        (Marks("low", "epoch", kind="error", error=[("low", "y")]), "low to y"),
    )
    for marks, name in cases if legend == "below" else cases[-1:]:
        panel = Panel([marks], by=["epoch"]) if legend == "beside" else Panel([marks])
        assert labels(drawn(Chart([panel], legend=legend).draw(table))) == [name]
    table = rows(epoch=[0, 1], y=[1.0, 2.0], low=None, high=None)
    assert not drawn(Chart([Panel([Marks("y", "epoch", error=[("low", "high")])])]).draw(table)).legends
    with pytest.raises(ValueError, match="spans must name the 1 intervals in error, one name for each, got 2"):
        Marks("y", "x", error=["std"], spans=["a", "b"])


def test_rows_with_the_same_place_are_a_mean_and_a_band():
    table = rows(epoch=[0, 0, 1, 1, 2, 2], loss=[1.0, 3.0, 2.0, None, None, float("nan")])
    (axes,) = drawn(chart(Marks("loss", "epoch", label="loss")).draw(table)).axes
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[0, 2], [1, 2]]  # nothing is known of the last one
    (band,) = axes.collections
    assert {1, 3} <= set(band.get_paths()[0].vertices[:, 1])
    (axes,) = drawn(chart(Marks("loss", "epoch")).draw(table[::2])).axes
    assert not axes.collections  # one observation has no band


def test_groups_labels_factors_and_filters():
    splits, methods = ["train"] * 4 + ["test"] * 4, ["a", "a", "b", "b"] * 2
    table = rows(t=[0, 1] * 4, method=methods, split=splits, share=list(range(8)))
    for where in ({"split": "test"}, {"split": ("test", "val")}, lambda row: row["split"] == "test"):
        marks = Marks("share", "t", ["method"], factor=100, where=where, looks={"b": {"label": "bee", "ls": "--"}})
        (axes,) = drawn(chart(marks).draw({"points": table})).axes
        assert [line.get_ydata().tolist() for line in axes.lines] == [[400, 500], [600, 700]]
        assert [line.get_label() for line in axes.lines] == ["a", "bee"]
        assert axes.lines[1].get_linestyle() == "--"
    named = Marks("share", "t", ["method", "split"], label="{method} of {split}")
    assert labels(drawn(chart(named).draw(table))) == ["a of train", "b of train", "a of test", "b of test"]
    both = chart(Marks("share", "t", table="one"), Marks("share", "t", table="two"), Marks("none", "t", table="two"))
    (axes,) = drawn(both.draw({"one": table[:2], "two": table[2:4]})).axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0, 1], [2, 3]]


def test_lines_dots_steps_and_areas():
    table = rows(x=[0, 0, 1, 1], y=[0.1, 0.2, 0.3, 0.5])
    kinds = [Marks("y", "x", kind=kind, label=kind) for kind in ("lines", "dots", "steps")]
    (axes,) = drawn(chart(*kinds).draw(table)).axes
    expected = [[0.1, 0.3], [0.2, 0.5]] * 2 + [[0.15, 0.4]]
    np.testing.assert_allclose([line.get_ydata() for line in axes.lines], expected)
    assert [line.get_marker() for line in axes.lines] == ["None"] * 2 + ["."] * 2 + ["None"]
    shares = rows(epoch=[1, 2] * 2, path=["fc", "fc", "conv", "conv"], share=[0.25, 0.5, 0.75, 0.5])
    for some, width in ((shares, 1), (shares[::2], 1)):
        (axes,) = drawn(chart(Marks("share", "epoch", ["path"], "area")).draw(some)).axes
        ends = [area.get_paths()[0].get_extents() for area in axes.collections]
        assert [(area.y0, area.y1) for area in ends] == [(0, 0.5 if some is shares else 0.25), (0.25, 1)]
        assert [area.width for area in ends] == [width] * 2


def test_intervals_come_from_the_first_columns_that_have_them():
    ends = {"low": [0.005, None, None], "high": [0.02, 0.03, None], "std": [1, 0.01, 1]}
    table = rows(site=PLACES, penalty=[0.01, 0.02, None], **ends)
    marks = Marks("penalty", "site", kind="error", error=[("low", "high"), "std"], factor=100)
    (axes,) = drawn(chart(marks).draw(table)).axes
    np.testing.assert_allclose(segments(axes)[0], [[0.5, 2], [1, 3]])  # the interval, and the standard deviation
    shade = Marks("penalty", "site", error=[("low", "high")])
    assert len(drawn(chart(shade).draw(table)).axes[0].collections) == 1
    outside = rows(site=["a"], penalty=[0.01], low=[0.02], high=[0.04])  # a bootstrap interval may leave its mean out
    np.testing.assert_allclose(segments(drawn(chart(marks).draw(outside)).axes[0])[0][0], [1, 4])


def test_standard_errors_of_observations_are_combined():
    table = rows(epoch=[0, 0, 0], trace=[1.0, 3.0, None], error=[0.3, 0.4, 9.0])
    (axes,) = drawn(chart(Marks("trace", "epoch", kind="error", error=["error"])).draw(table)).axes
    np.testing.assert_allclose(segments(axes)[0][0], [2 - 0.25, 2 + 0.25])


# ---- panels


def test_a_panel_for_each_value_in_the_order_of_the_rows():
    table = rows(x=[0, 1] * 3, measure=["cka"] * 2 + ["group"] * 4, layer=[1, 1, 1, 1, 2, 2], y=list(range(6)))
    panel = Panel([Marks("y", "x")], lambda row: f"{row['measure']} {row['layer']}", "x", "y", ["measure", "layer"])
    figure = drawn(Chart([panel], "All: {title}", columns=2).draw(table, "nets"))
    assert [axes.get_title() for axes in figure.axes if axes.axison] == ["cka 1", "group 1", "group 2"]
    assert figure.get_suptitle() == "All: nets"
    assert [axes.get_ylabel() for axes in figure.axes[:3]] == ["y", "", "y"]  # named once
    assert [axes.get_xlabel() for axes in figure.axes[:3]] == ["", "x", "x"]


def test_a_label_has_the_same_color_in_all_panels():
    table = rows(x=[0] * 4, name=["a", "b", "b", "c"], part=[1, 1, 2, 2], y=[1.0] * 4)
    panel = Panel([Marks("y", "x", ["name"])], by=["part"])
    figure = drawn(Chart([panel]).draw(table))
    colors = [{line.get_label(): line.get_color() for line in axes.lines} for axes in figure.axes]
    assert colors[0]["b"] == colors[1]["b"]
    assert len({*colors[0].values(), *colors[1].values()}) == 3
    assert labels(figure) == ["a", "b", "c"]
    alike = chart(Marks("y", "x", ["name", "part"], color="{name}")).draw(table)
    assert [line.get_color() for line in alike.axes[0].lines][1:3] == [alike.axes[0].lines[1].get_color()] * 2
    assert len({line.get_color() for line in alike.axes[0].lines}) == 3
    each = drawn(Chart([panel], legend="each").draw(table))
    assert [text.get_text() for text in each.axes[0].get_legend().get_texts()] == ["a", "b"]


def test_axes_are_logarithmic_and_have_ends_and_levels():
    table = rows(x=[1, 2, 3], y=[1.0, 0.0, 100.0])
    (axes,) = drawn(chart(Marks("y", "x"), log="xy", levels={"most": 50.0}).draw(table)).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 100], [50, 50]]
    (axes,) = drawn(chart(Marks("y", "x"), bottom=-5, whole=True, levels=lambda row: {"x": row["x"]}).draw(table)).axes
    assert axes.get_ylim()[0] == -5
    assert axes.get_ylim()[1] > 100
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert chart(Marks("y", "x"), top=1.03).draw(table).axes[0].get_ylim()[1] == 1.03


@pytest.mark.parametrize("places", [[8, 16, 32, 64, 128], [64, 96, 128], [100, 101, 5000]])
def test_few_whole_numbers_on_a_logarithmic_axis_have_ticks(places):
    (axes,) = drawn(chart(Marks("y", "x"), log="x").draw(rows(x=places, y=[1.0] * len(places)))).axes
    assert list(axes.get_xticks()) == places
    assert [label.get_text() for label in axes.get_xticklabels()] == list(map(str, places))
    assert not len(axes.get_xticks(minor=True))
    for many in (rows(x=list(range(1, 50)), y=[1.0] * 49), rows(x=[0.013, 0.17, 2.3], y=[1.0] * 3)):
        (axes,) = drawn(chart(Marks("y", "x"), log="x").draw(many)).axes
        assert set(axes.get_xticks()) <= {10.0**power for power in range(-5, 6)}


def test_what_was_not_measured_is_said_and_what_is_not_there_is_left_out():
    table = rows(x=[0, 1], y=[None, float("nan")], z=[1.0, 2.0])
    (axes,) = drawn(chart(Marks("y", "x")).draw(table)).axes
    assert [text.get_text() for text in axes.texts] == ["not measured"]
    panels = [Panel([Marks("z", "x")]), Panel([Marks("none", "x")])]
    assert len(Chart(panels).draw(table).axes) == 1
    assert_refused(Chart(panels[1:]).draw, table, says="panels must have at least one entry")
    assert list(Chart(panels[1:]).named("nothing", table)) == []
    assert [name for name, _ in Chart(panels).named("some", table)] == ["some"]


# ---- named places


def test_bars_stand_side_by_side_with_their_values():
    kinds, values = ["group"] * 3 + ["orthogonal"] * 3, [0, 1.7, 1.3, 0.7, 4.6, None]
    table = rows(site=PLACES * 2, kind=kinds, y=values, std=0.5)
    (axes,) = drawn(chart(Marks("y", "site", ["kind"], "bars", error=["std"], values=".1f")).draw(table)).axes
    assert [bar.get_height() for bar in axes.patches] == [0, 1.7, 1.3, 0.7, 4.6, 0]
    edges = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(edges))
    assert [text.get_text() for text in axes.texts] == ["0.0", "1.7", "1.3", "0.7", "4.6"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == PLACES


@pytest.mark.parametrize("flat", [False, True])
def test_values_of_bars_are_beside_their_error_bars(flat):
    table = rows(site=PLACES, kind="group", y=[3.0, -1.0, 2.0], std=[2.0, 3.0, 0.0])
    marks = Marks("y", "site", ["kind"], "bars", error=["std"], values=".1f")
    (axes,) = drawn(chart(marks, flat=flat).draw(table)).axes
    ends = [text.xy[0 if flat else 1] for text in axes.texts]
    assert ends == [5.0, 2.0, 2.0]


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_values_of_bars_are_inside_the_axes_and_beyond_the_dots(flat, points):
    table = rows(site=PLACES, kind="group", y=[30.0, 1.0, 2.0], low=[29.0, 1, 2], high=[31.0, 1, 2])
    marks = Marks("y", "site", ["kind"], "bars", error=[("low", "high")], values=".7g")
    dots = Marks("y", "site", ["kind"], "dots", factor=1.5)
    panel = chart(marks, dots, flat=flat, points=points and not flat)
    (axes,) = (figure := panel.draw(table)).axes
    separate(figure)
    place = 0 if flat else 1
    assert [text.xy[place] for text in axes.texts] == [45.0, 1.5, 3.0]
    inside = axes.get_window_extent().get_points()[1, place]
    assert all(text.get_window_extent().get_points()[1, place] < inside for text in axes.texts)


def test_swapped_axes_have_bars_dots_and_intervals():
    means = rows(method=["unmatched", "weights"], y=[2.0, 0.0], low=[1.5, None], high=[2.5, None])
    pairs = rows(method=["unmatched", "unmatched", "weights", "weights"], y=[1.0, 3.0, 0.0, 0.0])
    marks = [
        Marks("y", "method", ["method"], "bars", error=[("low", "high")], values=".3g"),
        Marks("y", "method", ["method"], "dots", table="pairs"),
    ]
    panel = chart(*marks, flat=True, names={"weights": "weight matching"}, xlabel="method", ylabel="barrier")
    (axes,) = drawn(panel.draw({"means": means, "pairs": pairs})).axes
    assert [bar.get_width() for bar in axes.patches] == [2.0, 0.0]
    assert [text.get_text() for text in axes.texts] == ["2", "0"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["unmatched", "weight matching"]
    assert axes.get_xlabel() == "barrier"
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "."]
    assert dots == [1, 3, 0, 0]


@pytest.mark.parametrize("count", [1, 8, 25])
def test_many_series_and_long_names_fit(count):
    sites = [f"blocks.{place}.activation1" for place in range(19)]
    table = [
        {"site": site, "family": f"family {k}", "y": 0.02 * k, "std": 0.01} for k in range(count) for site in sites
    ]
    panel = Panel([Marks("y", "site", ["family"], "error", error=["std"])])
    figure = drawn(Chart([panel], legend="beside").draw(table))
    (axes,) = figure.axes
    if count > 1:
        legend = figure.legends[0].get_window_extent()
        assert legend.x0 >= axes.get_window_extent().x1
        assert legend.x1 <= figure.bbox.x1
    assert all(label.get_window_extent().y0 >= 0 for label in axes.get_xticklabels())


# ---- penalties


def penalties(values, std=0.0):
    marks = Marks("y", "site", kind="error", error=["std"], factor=100)
    (axes,) = drawn(chart(marks, points=True).draw(rows(site=PLACES, y=values, std=std))).axes
    return axes
