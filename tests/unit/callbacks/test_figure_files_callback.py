"""A callback chooses the format and the width of the figures of a run."""

from types import SimpleNamespace

import pytest
from helpers import assert_refused

from lightning_sym.callbacks import FigureFiles, publish_figure
from lightning_sym.figures import Chart, Marks, Panel

FIGURE = Chart([Panel([Marks("y", "x")])], "")
ROWS = [{"x": 0, "y": 1.0}, {"x": 1, "y": 2.0}]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("callbacks", "names"), [([], ["a.png"]), ([FigureFiles("svg", "column")], ["a.png", "a.svg"])], ids=["none", "svg"]
)
def test_figures_are_written_as_the_callback_says(callbacks, names, tmp_path):
    trainer = SimpleNamespace(callbacks=callbacks, loggers=[])
    publish_figure(trainer, FIGURE.draw(ROWS), "figures/a", tmp_path / "a.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_unknown_choices_are_refused():
    assert_refused(lambda: FigureFiles("jpg"), says="jpg")
    assert_refused(lambda: FigureFiles("pdf", "poster"), says="poster")
