"""Files of figures: formats, widths of a column and a page, labels for people, names that do not overlap."""

import re
from itertools import pairwise

import numpy as np
import pytest
from helpers import assert_refused
from matplotlib.figure import Figure
from PIL import Image

from lightning_sym.figures import (
    Chart,
    HeatMap,
    Marks,
    Panel,
    figure_bytes,
    fitted_figure,
    similarity_maps,
    write_figure,
)

LONG = [f"module.encoder.layers.{number}.self_attention.out_proj" for number in range(24)]


def lines(names, groups=("orthogonal", "cka_linear", "cka_max"), by=()):
    rows = [{"x": x, "g": g, "y": 0.1 * k} for k, g in enumerate(groups) for x in names]
    panel = Panel([Marks("y", "x", ["g"])], "{g}" if by else "Similarity", "layer", "similarity", by=by)
    return Chart([panel], "A title", columns=2).draw(rows)


def heat_map(names):
    return similarity_maps([HeatMap("cka_linear", {"trained": np.eye(len(names))})], {"trained": (names, names)})


@pytest.mark.parametrize(("size", "inches"), [(None, 6.4), ("column", 3.25), ("page", 6.75)])
def test_a_figure_is_as_wide_as_a_column_or_a_page_at_200_dots_per_inch(tmp_path, size, inches):
    figure = lines(["activation1", "activation2"])
    (file,) = write_figure(figure, tmp_path / "lines.png", size=size)
    with Image.open(file) as picture:
        assert picture.width == pytest.approx(200 * inches, abs=1)
        assert picture.info["dpi"] == pytest.approx((200, 200), abs=0.1)
    assert figure.get_figwidth() == 6.4  # the figure itself, which loggers take, stays


@pytest.mark.parametrize("form", ["pdf", "svg"])
def test_text_in_a_file_for_papers_is_text(tmp_path, form):
    files = write_figure(lines(["activation1", "activation2"]), tmp_path / "lines.png", form, "column")
    assert [file.name for file in files] == ["lines.png", f"lines.{form}"]
    content = files[1].read_bytes()
    if form == "svg":
        assert b">CKA, linear</text>" in content
    else:
        assert b"/Type3" not in content
        assert b"/FontFile2" in content
    assert figure_bytes(Figure(), form) == figure_bytes(Figure(), form)  # without the time


def test_letters_in_a_column_have_six_points_and_a_half_or_more():
    fitted = fitted_figure(lines(["activation1", "activation2"], by=["g"]), "column")
    fitted.draw_without_rendering()
    assert len({axes.get_subplotspec().colspan.start for axes in fitted.axes}) == 1  # below one another
    sizes = {text.get_fontsize() for axes in fitted.axes for text in (axes.title, *axes.get_xticklabels())}
    sizes |= {text.get_fontsize() for text in fitted.legends[0].get_texts()}
    assert min(sizes) >= 6.5
    assert max(sizes) <= 8
    for axes in fitted.axes:
        box = axes.get_tightbbox()
        assert 0 <= box.x0 <= box.x1 <= fitted.bbox.width


@pytest.mark.parametrize(("draw", "size"), [(lines, None), (lines, "page"), (lines, "column"), (heat_map, "column")])
def test_long_names_of_modules_do_not_overlap(draw, size):
    fitted = fitted_figure(draw(LONG), size)
    fitted.draw_without_rendering()
    axes = fitted.axes[0]
    for axis in (axes.xaxis, axes.yaxis) if draw is heat_map else (axes.xaxis,):
        names = [name for name in axis.get_ticklabels() if name.get_text()]
        assert 2 <= len(names) <= len(LONG)
        assert all(re.fullmatch(r"\d+\.self_attention\.out_proj", name.get_text()) for name in names)
        boxes = [name.get_window_extent() for name in names]
        if names[0].get_rotation() in (0, 90):
            assert not any(one.overlaps(two) for one, two in pairwise(boxes))
        else:  # slanted: lines of text are as far from one another as they are high
            places = [axes.transData.transform((place, 0))[0] for place in axis.get_majorticklocs()]
            slant = np.radians(names[0].get_rotation())
            high = names[0].get_fontsize() * fitted.dpi / 72
            assert min(np.diff(places)) * np.sin(slant) > high


def test_lines_differ_by_dashes_and_markers_as_well_as_colors():
    drawn = lines(["a", "b", "c"]).axes[0].lines
    looks = {(line.get_color(), str(line._unscaled_dash_pattern), line.get_marker()) for line in drawn}
    assert len(looks) == len(drawn) == 3
    for properties in zip(*looks, strict=True):
        assert len(set(properties)) == 3


def test_any_figure_of_matplotlib_is_written(tmp_path):
    figure = Figure()
    figure.subplots().plot([0, 1])
    assert all(file.stat().st_size for file in write_figure(figure, tmp_path / "plain.png", "pdf", "column"))


def test_unknown_formats_and_sizes_are_refused(tmp_path):
    for options, words in ((("jpg",), "format of figures"), (("png", "poster"), "size of figures")):
        assert_refused(lambda options=options: write_figure(Figure(), tmp_path / "a.png", *options), says=words)
    assert not list(tmp_path.iterdir())
