"""What TensorBoard shows of figures: a picture for each panel, whose words can be read on a card."""

import io
import itertools

import numpy as np
import pytest
from helpers import too_small
from matplotlib.figure import Figure

from lightning_sym import figures
from lightning_sym.figures import (
    FoundPoint,
    HeatMap,
    Lines,
    PenaltyFamily,
    PenaltyPanel,
    cards,
    confusion_matrix,
    interpolation_curves,
    isosurface,
    penalty_curves,
    planes_beside,
    relative_effective_parameters,
    similarity_maps,
    validation_curves,
)
from lightning_sym.figures.cards import CARD

T = np.linspace(0, 1, 5)
GRID = np.add.outer(T, T)
LONG = "A long title that says of which networks, of which pairs and after how many epochs all of this is"


class _Scale:
    zero, constant = 0.1, 1.0


def penalties() -> Figure:
    sites = ["relu1", "functional-relu-2", "module.relu"]
    family = PenaltyFamily("full", np.array([0.0, 0.3, 0.9]), *[np.zeros(3)] * 3)
    return penalty_curves([PenaltyPanel(title, sites, [family]) for title in ("as is", "recalibrated")], title=LONG)


def interpolation() -> Figure:
    columns = [Lines(title, {"weights": T}, {"weights": T}) for title in ("as is", "recalibrated", "merged")]
    return interpolation_curves(T, columns, title=LONG)


def maps() -> Figure:
    values = {kind: np.eye(12) for kind in ("trained", "untrained")}
    names = [f"module.layer{number}" for number in range(12)]
    measures = [HeatMap(name, values) for name in ("CKA", "Procrustes")]
    return similarity_maps(measures, dict.fromkeys(values, (names,) * 2))


def planes() -> Figure:
    points = [FoundPoint("A", (0.5, 0.5), 0.1)]
    return planes_beside((GRID, GRID), (T, T), (points, points), _Scale(), names=("searched", "orbit"), title=LONG)


def shares() -> Figure:
    layers = {f"blocks.{number}.conv": {"fc": [0.1, 0.2], "conv": [0.9, 0.8]} for number in range(5)}
    return relative_effective_parameters([1, 2], layers, title=LONG)


def views() -> Figure:
    return isosurface(GRID[..., None] + T, T, 1.0, [FoundPoint("A", (0.5, 0.5, 0.5), 0.1)], _Scale(), title=LONG)


DRAWN = {"penalties": (penalties, 2), "interpolation": (interpolation, 6), "maps": (maps, 4), "planes": (planes, 2)}
DRAWN |= {"shares": (shares, 5), "views": (views, 2)}
DRAWN |= {"curves": (lambda: validation_curves([[0.1], [0.2]], [0], epochs=[1, 2]), 1)}
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
        family = PenaltyFamily("full", np.zeros(len(sites)), *[np.zeros(len(sites))] * 3)
        for _, card in cards(penalty_curves([PenaltyPanel(title, sites, [family]) for title in "ab"])):
            card.savefig(io.BytesIO())
            (panel,) = (axes for axes in card.axes if axes.get_visible())
            per_point = min(CARD[0] / card.get_figwidth(), CARD[1] / card.get_figheight()) / 72
            names = panel.get_xticklabels()
            assert [name.get_text() for name in names] == sites
            assert all(name.get_fontsize() * per_point >= 9 and name.get_rotation() == slant for name in names)
            boxes = [name.get_window_extent() for name in names]
            assert slant or all(one.x1 < two.x0 for one, two in itertools.pairwise(boxes))


def test_what_only_outer_panels_name_is_on_every_card():
    """Rows and columns share names of axes and titles; the accuracy of the second kind has neither by itself."""
    found = []
    for _, card in cards(interpolation()):
        (panel,) = (axes for axes in card.axes if axes.get_visible())
        found.append((panel.get_title(), panel.get_ylabel()))
        assert "from A" in panel.get_xlabel()
    kinds = [("as is", "recalibrated")] * 2 + [("merged",)] * 2
    rows = zip(kinds, ["loss, nats", "accuracy, %"] * 2, strict=True)
    assert found == [(title, row) for titles, row in rows for title in titles]


def test_every_figure_is_drawn_with_words_that_can_be_read():
    """The decorator enlarges them; a new function without it would be small in TensorBoard's page of images."""
    functions = {name: getattr(figures, name) for name in figures.__all__ if callable(getattr(figures, name))}
    plain = [name for name, draw in functions.items() if draw.__annotations__.get("return") is Figure]
    assert len(plain) > 25
    assert [name for name in plain if not hasattr(functions[name], "__wrapped__")] == []
