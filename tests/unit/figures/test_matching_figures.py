"""The figures of matching show what they are given."""

import numpy as np
import pytest
from helpers import assert_refused
from test_equivalence_figures import drawn, labels

from lightning_sym.figures import Bars, Lines, barrier_bars, interpolation_curves

T = np.linspace(0, 1, 5)


def lines(title: str, pairs: int = 2) -> Lines:
    values = {
        name: np.tile((1 + k) * T * (1 - T), (pairs, 1)) for k, name in enumerate(["unmatched", "weights", "other"])
    }
    return Lines(title, values, {name: 1 - value for name, value in values.items()})


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_two_panels_for_each_kind_of_evaluation(columns):
    figure = drawn(interpolation_curves(T, [lines(f"kind {k}") for k in range(columns)], title="all"))
    panels = [axes for axes in figure.axes if axes.axison]
    assert len(panels) == 2 * columns
    assert [axes.get_title() for axes in panels if axes.get_title()] == [f"kind {k}" for k in range(columns)]
    (unmatched, weights, other) = panels[0].get_lines()
    assert unmatched.get_label() == "unmatched"
    assert weights.get_label() == "weight matching"
    assert other.get_label() == "other"
    np.testing.assert_allclose(weights.get_ydata(), 2 * T * (1 - T))
    np.testing.assert_allclose(panels[min(2, columns)].get_lines()[0].get_ydata(), 100 * (1 - T * (1 - T)))
    assert labels(figure) == ["unmatched", "weight matching", "other"]


def test_without_accuracies_there_are_losses_only():
    columns = [Lines(title, {"weights": np.ones((2, 5))}, {}) for title in ("train", "test")]
    figure = drawn(interpolation_curves(T, columns, loss="SquaredDistance()"))
    assert [axes.get_title() for axes in figure.axes] == ["train", "test"]
    assert figure.axes[0].get_ylabel() == "loss, SquaredDistance()"


def test_one_pair_has_no_shade():
    assert len(interpolation_curves(T, [lines("a", pairs=1)]).axes[0].collections) == 0
    assert len(interpolation_curves(T, [lines("a", pairs=2)]).axes[0].collections) == 3


def test_bars_have_means_dots_and_intervals():
    panel = Bars(
        "test loss, nats",
        {"unmatched": [1.0, 3.0], "weights": [0.0, 0.0]},
        {"unmatched": (1.5, 2.5), "weights": (np.nan, np.nan)},
    )
    figure = drawn(barrier_bars([panel, panel], title="all"))
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [2.0, 0.0]
    assert [text.get_text() for text in axes.texts] == ["2", "0"]
    assert len(axes.get_lines()) == 3  # dots of two methods, one interval


def test_matching_figures_of_nothing_are_refused():
    assert_refused(interpolation_curves, T, [], says="columns must have at least one entry")
    assert_refused(barrier_bars, [], says="panels must have at least one entry")
