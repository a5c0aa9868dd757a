"""What TensorBoard shows of figures: a picture for each panel, whose words can be read on a card."""

import io
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from helpers import too_small
from matplotlib.figure import Figure

from lightning_sym import figures
from lightning_sym.figures import (
    Chart,
    FoundPoint,
    HeatMap,
    Marks,
    Panel,
    cards,
    confusion_matrix,
    isosurface,
    planes_beside,
    readable_names,
    similarity_maps,
)
from lightning_sym.figures.cards import CARD
from lightning_sym.reports.evidence import SHARES
from lightning_sym.reports.paths import path_chart

T = np.linspace(0, 1, 5)
GRID = np.add.outer(T, T)
LONG = "A long title that says of which networks, of which pairs and after how many epochs all of this is"


class _Scale:
    zero, constant = 0.1, 1.0


def penalties(*panels: str, sites: Sequence[str] = ("relu1", "functional-relu-2", "module.relu")) -> Figure:
    rows = [{"site": site, "panel": panel, "penalty": 0.3 * k} for panel in panels for k, site in enumerate(sites)]
    panel = Panel([Marks("penalty", "site", kind="error", label="full")], "{panel}", by=["panel"], points=True)
    return Chart([panel], LONG, columns=1, legend="beside", share="y").draw(rows)


def interpolation() -> Figure:
    rows = [
        {"t": t, "loss": t, "accuracy": t, "method": "weights", "split": split}
        for split in ("as is", "recalibrated", "merged")
        for t in T
    ]
    return path_chart(rows, "method", ["split"], title=LONG, panel="{split}", loss=None).draw(rows)


def maps() -> Figure:
    values = {kind: np.eye(12) for kind in ("trained", "untrained")}
    names = [f"module.layer{number}" for number in range(12)]
    measures = [HeatMap(name, values) for name in ("CKA", "Procrustes")]
    return similarity_maps(measures, dict.fromkeys(values, (names,) * 2))


def planes() -> Figure:
    points = [FoundPoint("A", (0.5, 0.5), 0.1)]
    return planes_beside((GRID, GRID), (T, T), (points, points), _Scale(), names=("searched", "orbit"), title=LONG)


def shares() -> Figure:
    rows = [
        {"epoch": epoch, "layer": f"blocks.{number}.conv", "path": path, "relative": relative}
        for number in range(5)
        for epoch in (1, 2)
        for path, relative in (("fc", 0.1 * epoch), ("conv", 1 - 0.1 * epoch))
    ]
    return SHARES.draw(rows, LONG)


def views() -> Figure:
    return isosurface(GRID[..., None] + T, T, 1.0, [FoundPoint("A", (0.5, 0.5, 0.5), 0.1)], _Scale(), title=LONG)


DRAWN = {"interpolation": (interpolation, 6), "maps": (maps, 4), "planes": (planes, 2)}
DRAWN |= {"penalties": (lambda: penalties("as is", "recalibrated"), 2)}
DRAWN |= {"shares": (shares, 5), "views": (views, 2)}
CURVE = Chart([Panel([Marks("y", "x")], "Accuracy", "epoch", "accuracy")])
DRAWN |= {"curves": (lambda: CURVE.draw([{"x": 1, "y": 0.1}, {"x": 2, "y": 0.2}]), 1)}
DRAWN |= {"confusion": (lambda: confusion_matrix(np.eye(30), title=LONG), 1)}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.long
def test_each_panel_is_a_picture_that_can_be_read(name):
    draw, count = DRAWN[name]
    figure = draw()
    figure.savefig(io.BytesIO())  # the file with all panels comes first
    found = {}
    for number, card in cards(figure):
        card.savefig(io.BytesIO())
        assert not too_small(card, *CARD)
        (panel,) = (axes for axes in card.axes if axes.get_visible() and axes.get_subplotspec())
        width, height = card.get_size_inches()
        assert height <= 1.3 * width
        assert panel.get_position().width * panel.get_position().height > 0.2
        assert panel.get_title() or card.get_suptitle()
        words = panel.get_xlabel() or card.get_supxlabel(), panel.get_ylabel() or card.get_supylabel()
        assert any(words) or name == "maps"  # whose ticks are names
        found[number] = panel.get_title(), *words
    assert list(found) == ([""] if count == 1 else [str(number) for number in range(1, count + 1)])
    assert len(set(found.values())) == count or name == "views"


def test_names_of_a_few_sites_can_be_read():
    for sites, slant in ((["relu1", "relu2"], 0), ([f"activation{number}" for number in range(1, 5)], 30)):
        for _, card in cards(penalties("a", "b", sites=sites)):
            card.savefig(io.BytesIO())
            (panel,) = (axes for axes in card.axes if axes.get_visible())
            per_point = min(CARD[0] / card.get_figwidth(), CARD[1] / card.get_figheight()) / 72
            names = panel.get_xticklabels()
            assert [name.get_text() for name in names] == [readable_names(site) for site in sites]
            assert all(name.get_fontsize() * per_point >= 9 and name.get_rotation() == slant for name in names)
            boxes = [name.get_window_extent() for name in names]
            assert slant or all(one.x1 < two.x0 for one, two in itertools.pairwise(boxes))


def test_every_figure_is_drawn_with_words_that_can_be_read():
    """The decorator enlarges them; a new function without it would be small in TensorBoard's page of images."""
    functions = {name: getattr(figures, name) for name in figures.__all__ if callable(getattr(figures, name))}
    plain = [name for name, draw in functions.items() if draw.__annotations__.get("return") is Figure]
    assert len(plain) > 10
    plain.remove("fitted_figure")  # draws nothing
    assert [name for name in plain if not hasattr(functions[name], "__wrapped__")] == []
